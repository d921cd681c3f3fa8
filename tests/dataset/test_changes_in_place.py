"""What a dataset holds is changed in place, or set behind the cached dataset's back: samples follow.

Each change is made between two passes, over the cached dataset and over one without a cache; what loaders
give of both is compared. A change that comes again ends the cache, as does one that running workers see.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
from collections.abc import Callable
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, equal_batches, recorded
from torch.utils.data import DataLoader, Dataset, Subset

import hotset

N = 12
LOADERS: dict[str, Any] = {"torch": DataLoader, "hotset": hotset.DataLoader}


class Config:
    def __init__(self) -> None:
        self.strength, self.nested = 1, {"sizes": [1, 2]}


class Held(Dataset[Any]):
    """Samples depend on all that it holds."""

    def __init__(self) -> None:
        self.labels = np.zeros(N, np.int64)
        self.weights = torch.ones(N)
        self.config = Config()
        self.options = argparse.Namespace(shift=0)
        self.names = ["a"] * N
        self.rows = [{"box": [0, 0]} for _ in range(N)]
        self.value = mp.Value("i", 0)
        self.array = mp.Array("d", [0.0, 0.0])
        self.raw = mp.RawValue("i", 0)
        self.event = mp.Event()
        self.shared = torch.zeros(1).share_memory_()
        self.number = 0
        self.reads = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        total = self.config.strength + self.config.nested["sizes"][1] + self.options.shift + self.number
        total += self.value.value + self.array[1] + self.raw.value + self.event.is_set() + float(self.shared)
        total += sum(self.rows[index]["box"])
        return int(self.labels[index]), float(self.weights[index]) * total, self.names[index]


def label(dataset: Any) -> None:
    dataset.labels[3] += 5


def weight(dataset: Any) -> None:
    dataset.weights.mul_(2)


def nested_object(dataset: Any) -> None:
    dataset.config.strength += 4


def nested_container(dataset: Any) -> None:
    dataset.config.nested["sizes"][1] += 1


def namespace(dataset: Any) -> None:
    dataset.options.shift += 1


def one_name(dataset: Any) -> None:
    dataset.names[2] += "b"


def one_row(dataset: Any) -> None:
    dataset.rows[4]["box"][1] += 9


def set_directly(dataset: Any) -> None:
    dataset.__dict__["number"] += 1


def value(dataset: Any) -> None:
    dataset.value.value += 1


def array(dataset: Any) -> None:
    dataset.array[1] += 2


def raw(dataset: Any) -> None:
    dataset.raw.value += 3


def event(dataset: Any) -> None:
    dataset.event.clear() if dataset.event.is_set() else dataset.event.set()


def shared_tensor(dataset: Any) -> None:
    dataset.shared.add_(1)


SHARED = (value, array, raw, event, shared_tensor)
PRIVATE = (label, weight, nested_object, nested_container, namespace, one_name, one_row, set_directly)


def passes(loader: Any, change: Callable[[], None], count: int) -> list[list[Any]]:
    found = []
    for _ in range(count):
        found.append([batch for _ in range(2) for batch in loader])
        change()
    return found


@pytest.mark.parametrize(("change", "made_by", "workers"), all_pairs([*PRIVATE, *SHARED], LOADERS, [0, 2]))
def test_a_change_in_place_takes_effect_from_the_next_pass_on(
    change: Any, made_by: str, workers: int
) -> None:
    make = LOADERS[made_by]
    plain, held = Held(), Held()
    expected = passes(make(plain, batch_size=5, num_workers=workers), lambda: change(plain), 2)
    assert str(expected[0]) != str(expected[1])
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        loader = make(cached, batch_size=5, num_workers=workers)
        for found, wanted in zip(passes(loader, lambda: change(held), 2), expected, strict=True):
            equal_batches(found, wanted)
    assert [w for w in told if "has changed, and samples may depend on it" in str(w.message)]


@pytest.mark.parametrize("change", [label, value])
def test_what_changes_again_and_again_ends_the_cache(change: Any) -> None:
    plain, held = Held(), Held()
    expected = passes(hotset.DataLoader(plain, batch_size=5), lambda: change(plain), 4)
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        found = passes(hotset.DataLoader(cached, batch_size=5), lambda: change(held), 4)
        for one, other in zip(found, expected, strict=True):
            equal_batches(one, other)
        assert cached.stats().cached == 0
    words = [str(w.message) for w in told]
    assert len(words) == 2
    assert f"{N} cached samples were dropped" in words[0]
    assert "has changed again" in words[1]


@pytest.mark.parametrize("change", [label, value])
def test_persistent_workers_see_what_they_see_without_a_cache(change: Any) -> None:
    plain, held = Held(), Held()
    arguments: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "persistent_workers": True}
    expected = passes(DataLoader(plain, **arguments), lambda: change(plain), 3)
    with recorded() as told, hotset.cache(held, transform=[list], memory="1MiB", cut=0) as cached:
        found = passes(hotset.DataLoader(cached, **arguments), lambda: change(held), 3)
    for one, other in zip(found, expected, strict=True):
        equal_batches(one, other)
    assert len(told) == (1 if change is value else 0)


def test_what_reading_changes_does_not_count() -> None:
    class Notes(Held):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.table = SimpleNamespace(reads=0), np.zeros(N)
            self.known: dict[int, Any] = {}
            self.shared_count = mp.Value("i", 0)

        def __getitem__(self, index: int) -> Any:
            self.counts.reads += 1
            self.table[index] = index
            self.shared_count.value += 1
            if index not in self.known:
                self.known[index] = super().__getitem__(index)
            if index == 2 and not hasattr(self, "late"):
                self.late = index
            return self.known[index]

    expected = list(DataLoader(Held(), batch_size=5))
    with hotset.cache(Notes(), memory="1MiB") as cached:
        for _ in range(3):
            equal_batches(list(hotset.DataLoader(cached, batch_size=5)), expected)
        assert cached.stats().hits == 2 * N
        assert cached.dataset.counts.reads == N, "planning leaves no trace"


def test_planning_puts_back_what_it_has_changed_also_if_it_refuses() -> None:
    class Own:
        def __init__(self) -> None:
            self.state = 1

    class Random(Dataset[Any]):
        def __init__(self) -> None:
            self.own, self.seen, self.row = Own(), np.zeros(N), {"reads": [0]}

        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> float:
            self.own.state = self.own.state * 1103515245 % 2**31
            self.seen[index] += 1
            self.row["reads"][0] += 1
            return self.own.state / 2**31

    dataset = Random()
    with pytest.raises(hotset.NotCacheable):
        hotset.cache(dataset, memory="1MiB")
    assert dataset.own.state == 1
    assert not dataset.seen.any()
    assert dataset.row == {"reads": [0]}


def test_a_declared_dataset_and_what_is_too_large_are_not_watched() -> None:
    @hotset.deterministic
    class Declared(Held):
        pass

    held = Declared()
    with hotset.cache(held, memory="1MiB") as cached:
        before = list(hotset.DataLoader(cached, batch_size=5))
        label(held)
        equal_batches(list(hotset.DataLoader(cached, batch_size=5)), before)


def test_a_change_in_what_a_subset_wraps_is_noticed() -> None:
    held = Held()
    with recorded() as told, hotset.cache(Subset(held, [3, 4]), memory="1MiB") as cached:
        assert [label for label, *_ in (cached[0], cached[1])] == [0, 0]
        label(held)
        assert len(cached) == 2
        assert cached[0][0] == 5
    assert "Held.labels has changed" in str(told[0].message)


def test_other_shared_memory_is_watched_too() -> None:
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:

        class Reads(Dataset[Any]):
            def __init__(self) -> None:
                self.memory, self.pair = memory, (ctypes.c_int * 2)(1, 2)

            def __len__(self) -> int:
                return N

            def __getitem__(self, index: int) -> Any:
                return self.memory.buf[0] + self.pair[1] + index

        dataset = Reads()
        with recorded(), hotset.cache(dataset, memory="1MiB") as cached:
            assert (cached[1], len(cached)) == (3, N)
            dataset.pair[1] = 5
            assert (len(cached), cached[1]) == (N, 6)
            memory.buf[0] = 7
            assert (len(cached), cached[1]) == (N, 13)
            del dataset
    finally:
        memory.close()
        memory.unlink()
