"""What a dataset holds is changed in place, or set behind the cached dataset's back: samples follow.

Each change is made between two passes, over the cached dataset and over one without a cache; what loaders
give of both is compared. A change that comes again ends the cache, as does one that running workers see.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import enum
import functools
import importlib
import mmap
import multiprocessing as mp
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, equal_batches, rarely, recorded
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

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


class Around(Dataset[Any]):
    """A dataset of the user's around a cached one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class Deep(Around):
    """A dataset whose code calls functions of its own before it asks for a sample."""

    def __getitem__(self, index: int) -> Any:
        return self.after(30, index)

    def after(self, calls: int, index: int) -> Any:
        return self.after(calls - 1, index) if calls else self.dataset[index]


class Walks(IterableDataset[Any]):
    """A stream of the user's of a cached dataset's samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(N))


QUIET: dict[str, Callable[[Any, Any], Any]] = {
    "weighted": lambda kind, dataset: kind(dataset, 4, sampler=WeightedRandomSampler([1.0] * N, N)),
    "random subset": lambda kind, dataset: kind(dataset, 4, sampler=SubsetRandomSampler(range(N))),
    "no batches": lambda kind, dataset: kind(dataset, None, sampler=[3, 5, 7]),
    "subset": lambda kind, dataset: kind(Subset(dataset, range(2, N)), 4, shuffle=True),
    "concatenated": lambda kind, dataset: kind(ConcatDataset([dataset, dataset]), 4),
    "deep": lambda kind, dataset: kind(Deep(dataset), 4),
    "a stream": lambda kind, dataset: kind(Walks(dataset), 4),
    "around": lambda kind, dataset: kind(Around(Around(Subset(dataset, range(N)))), 4),
}


@pytest.mark.parametrize(
    ("way", "loader"),
    [*((way, "torch") for way in QUIET), *rarely([(way, "hotset") for way in QUIET], ("around", "hotset"))],
)
def test_a_pass_in_which_nobody_asks_for_the_length_is_noticed(way: str, loader: str) -> None:
    plain = Held()
    held = copy.copy(plain)
    held.rows, held.config = copy.deepcopy(plain.rows), copy.deepcopy(plain.config)
    with hotset.cache(held, memory="1MiB") as cached, recorded() as caught:
        loaders = [QUIET[way](DataLoader, plain), QUIET[way](LOADERS[loader], cached)]
        for epoch in range(4):
            if epoch == 2:
                for dataset in (plain, held):
                    nested_object(dataset)
            batches = []
            for each in loaders:
                torch.manual_seed(epoch)
                batches.append(list(each))
            equal_batches(batches[1], batches[0])
        assert [str(one.message) for one in caught if "strength has changed" in str(one.message)]
        assert cached.stats().hits > 0  # of what was cached anew


@pytest.mark.parametrize("use", [len, lambda cached: cached.fill()], ids=["len", "fill"])
def test_a_change_between_another_use_and_a_pass_is_noticed(use: Callable[[Any], Any]) -> None:
    with hotset.cache(Held(), memory="1MiB") as cached, recorded() as caught:
        loader = DataLoader(Subset(cached, range(N)), 4)
        list(loader)
        use(cached)
        nested_object(cached.dataset)
        equal_batches(list(loader), list(DataLoader(cached.dataset, 4)))
        assert [str(one.message) for one in caught if "strength has changed" in str(one.message)]


def test_a_change_in_the_midst_of_a_pass_of_torchs_loader_counts_from_the_next_one_on() -> None:
    with hotset.cache(Held(), memory="1MiB") as cached:
        loader = DataLoader(Subset(cached, range(N)), 4)
        before, other = list(loader), iter(loader)
        got = [next(other)]
        nested_object(cached.dataset)
        got += other
        equal_batches(got, before)
        with pytest.warns(hotset.HotsetWarning, match="strength has changed"):
            after = next(iter(loader))
        equal_batches(after, next(iter(DataLoader(cached.dataset, 4))))


def with_validations(make: Any, dataset: Any, change: Callable[[Any], None], held: Any) -> list[Any]:
    """Batches of three epochs in which each third batch is followed by a change and another pass."""
    loader, validation = make(Subset(dataset, range(N - 2)), 2), make(Subset(dataset, range(N - 2, N)), 2)
    found = []
    for _ in range(3):
        for number, batch in enumerate(loader):
            found.append(batch)
            if number % 3 == 2:
                change(held)
                found += validation
    return found


@pytest.mark.parametrize("change", [nested_object, label])
def test_a_pass_goes_on_when_another_finds_the_dataset_changed(change: Any) -> None:
    plain, held = Held(), Held()
    expected = with_validations(DataLoader, plain, change, plain)
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        equal_batches(with_validations(hotset.DataLoader, cached, change, held), expected)
    assert [w for w in told if "has changed" in str(w.message)]


def changed_in_mid_pass(make: Any, dataset: Any, held: Any) -> list[Any]:
    """The batches of two passes, in the second of which another pass begins after a change."""
    loader, other = make(dataset, batch_size=2), make(dataset, batch_size=5)
    found, batches = list(loader), iter(loader)
    found += [next(batches) for _ in range(3)]
    held.labels[:] += 5
    next(iter(other))
    return [*found, *batches]


def test_batches_that_were_gathered_ahead_are_dropped_when_another_pass_finds_a_change() -> None:
    plain, held = Held(), Held()
    expected = changed_in_mid_pass(DataLoader, plain, plain)
    with recorded(), hotset.cache(held, memory="1MiB") as cached:
        equal_batches(changed_in_mid_pass(hotset.DataLoader, cached, held), expected)


def passes(loader: Any, change: Callable[[], None], count: int, *, epochs: int = 2) -> list[list[Any]]:
    """Batches of so many times so many epochs; after each time there is a change."""
    found = []
    for _ in range(count):
        found.append([batch for _ in range(epochs) for batch in loader])
        change()
    return found


CASES = all_pairs([*PRIVATE, *SHARED], LOADERS, [0, 2])
# A change is found in the main process, which tells its workers in one way, but for what they share with it.
SHOW_WORKERS = (label, weight, array, *SHARED)


@pytest.mark.parametrize(
    ("change", "made_by", "workers"),
    rarely(CASES, *(case for case in CASES if case[-1] and case[0] not in SHOW_WORKERS)),
)
def test_a_change_in_place_takes_effect_from_the_next_pass_on(
    change: Any, made_by: str, workers: int
) -> None:
    make = LOADERS[made_by]
    plain, held = Held(), Held()
    expected = passes(DataLoader(plain, batch_size=5), lambda: change(plain), 2)
    assert str(expected[0]) != str(expected[1])
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        loader = make(cached, batch_size=5, num_workers=workers)
        for found, wanted in zip(passes(loader, lambda: change(held), 2), expected, strict=True):
            equal_batches(found, wanted)
    assert [w for w in told if "has changed, and samples may depend on it" in str(w.message)]


class Labels(Dataset[Any]):
    def __init__(self) -> None:
        self.labels = np.zeros(N, np.int64)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return int(self.labels[index])


class Table(Dataset[Any]):
    def __init__(self) -> None:
        import pandas

        rows = {"name": [f"picture {i}" for i in range(N)], "label": np.zeros(N, np.int64), "odd": [{}] * N}
        self.table = pandas.DataFrame(rows)
        self.weights = pandas.Series(np.ones(N))

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        row = self.table.iloc[index]
        return row["name"], int(row["label"]), float(self.weights[index])


def one_cell(dataset: Any) -> None:
    dataset.table.loc[3, "label"] += 5


def one_text(dataset: Any) -> None:
    dataset.table.loc[4, "name"] += "!"


def one_weight(dataset: Any) -> None:
    dataset.weights[5] += 1.0


@pytest.mark.parametrize("change", [one_cell, one_text, one_weight])
def test_a_change_of_pandas_table_takes_effect_from_the_next_pass_on(change: Any) -> None:
    pytest.importorskip("pandas")
    plain, held = Table(), Table()
    expected = passes(DataLoader(plain, batch_size=5), lambda: change(plain), 2)
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        for found, wanted in zip(
            passes(hotset.DataLoader(cached, batch_size=5), lambda: change(held), 2), expected, strict=True
        ):
            equal_batches(found, wanted)
    assert [w for w in told if "has changed, and samples may depend on it" in str(w.message)]


@pytest.mark.parametrize("made_by", rarely(list(LOADERS), "hotset"))
def test_spawned_workers_read_what_has_changed(made_by: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 5, "num_workers": 1, "multiprocessing_context": "spawn"}
    held = Labels()
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        cached.fill()
        label(held)
        # Nobody asks for the length of what a Subset wraps.
        loader = LOADERS[made_by](Subset(cached, range(N)), **arguments)
        equal_batches(list(loader), list(DataLoader(held, batch_size=5)))
    assert "Labels.labels has changed" in str(told[0].message)


@pytest.mark.parametrize("change", [label, value])
def test_what_changes_again_and_again_ends_the_cache(change: Any) -> None:
    plain, held = Held(), Held()
    expected = passes(hotset.DataLoader(plain, batch_size=5), lambda: change(plain), 4, epochs=1)
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        found = passes(hotset.DataLoader(cached, batch_size=5), lambda: change(held), 4, epochs=1)
        for one, other in zip(found, expected, strict=True):
            equal_batches(one, other)
        assert cached.stats().cached == 0
    words = [str(w.message) for w in told]
    assert len(words) == 2
    assert f"{N} cached samples were dropped" in words[0]
    assert "has changed again" in words[1]


@pytest.mark.parametrize(
    ("change", "made_by", "workers"),
    rarely(all_pairs([label, value], LOADERS, [0, 2]), (value, "torch", 2)),
)
def test_what_changes_every_few_epochs_is_cached_anew_each_time(
    change: Any, made_by: str, workers: int
) -> None:
    # The workers of torch's loader begin before it asks for the length: they read one pass uncached.
    plain, held = Held(), Held()
    arguments: dict[str, Any] = {"batch_size": 5, "num_workers": workers}
    expected = passes(DataLoader(plain, batch_size=5), lambda: change(plain), 4, epochs=3)
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        found = []
        for _ in range(4):
            found += passes(LOADERS[made_by](cached, **arguments), lambda: change(held), 1, epochs=3)
            assert cached.stats().hits >= N
        for one, other in zip(found, expected, strict=True):
            equal_batches(one, other)
    assert ["samples are cached anew" in str(w.message) for w in told] == [True] * 3


class Times:
    """A transform of the user's, which is tried on a few samples."""

    def __init__(self) -> None:
        self.factor = 2

    def __call__(self, sample: Any) -> Any:
        return sample * self.factor


class Transformed(Dataset[Any]):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        sample = torch.full((2,), float(index))
        return sample if self.transform is None else self.transform(sample)


@pytest.mark.parametrize(("own", "workers"), [(True, 0), (False, 2)])
def test_a_parameter_of_a_transform_that_was_tried_is_followed(own: bool, workers: int) -> None:
    times = Times()
    arguments = {} if own else {"transform": [times]}
    held = Transformed(times if own else None)
    with recorded() as told, hotset.cache(held, memory="1MiB", **arguments) as cached:
        loader = hotset.DataLoader(cached, batch_size=5, num_workers=workers)
        for factor in (2, 3, 4):
            times.factor = factor
            for _ in range(2):
                equal_batches(list(loader), list(DataLoader(Transformed(times), batch_size=5)))
        assert cached.stats().hits == N
    assert ["samples are cached anew" in str(w.message) for w in told] == [True] * 2


class Mapped(Held):
    """Its labels are in memory that all its processes share."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = np.frombuffer(mmap.mmap(-1, 8 * N), np.int64)


@pytest.mark.parametrize(("kind", "change"), [(Held, label), (Held, value), (Mapped, label)])
def test_persistent_workers_of_torchs_loader_see_it_too(kind: Any, change: Any) -> None:
    plain, held = kind(), kind()
    arguments: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "persistent_workers": True}
    expected = passes(DataLoader(plain, **arguments), lambda: change(plain), 4)
    with recorded(), hotset.cache(held, memory="1MiB") as cached:
        found = passes(DataLoader(cached, **arguments), lambda: change(held), 4)
    for one, other in zip(found, expected, strict=True):
        equal_batches(one, other)


class Buffered(Held):
    """Its labels are in memory of another object's, which each process has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = np.frombuffer(bytearray(8 * N), np.int64)


@pytest.mark.parametrize(
    ("kind", "change"), [(Held, label), (Held, value), (Mapped, label), (Buffered, label)]
)
def test_persistent_workers_see_what_they_see_without_a_cache(kind: Any, change: Any) -> None:
    plain, held = kind(), kind()
    arguments: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "persistent_workers": True}
    expected = passes(DataLoader(plain, **arguments), lambda: change(plain), 3)
    with recorded() as told, hotset.cache(held, transform=[list], memory="1MiB", cut=0) as cached:
        found = passes(hotset.DataLoader(cached, **arguments), lambda: change(held), 3)
    for one, other in zip(found, expected, strict=True):
        equal_batches(one, other)
    assert len(told) == (1 if change is value or kind is Mapped else 0)


class _MadeWithDefaults(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3) * index


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_default_dtype_counts(workers: int) -> None:
    before = torch.get_default_dtype()
    try:
        with recorded() as told, hotset.cache(_MadeWithDefaults(), memory="1MiB") as cached:
            loader = hotset.DataLoader(cached, batch_size=4, num_workers=workers)
            seen = [{batch.dtype for batch in loader}]
            for dtype in (torch.float64, torch.float64, torch.float16):
                torch.set_default_dtype(dtype)
                seen.append({batch.dtype for batch in loader})
    finally:
        torch.set_default_dtype(before)
    assert seen == [{torch.float32}, {torch.float64}, {torch.float64}, {torch.float16}]
    assert ["get_default_dtype() has changed" in str(each.message) for each in told] == [True, True]


def test_what_reading_changes_does_not_count() -> None:
    class Notes(Held):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.table = SimpleNamespace(reads=0), np.zeros(N)
            self.known: dict[int, Any] = {}
            self.kept = [{"read": [0]} for _ in range(3000)]
            self.shared_count = mp.Value("i", 0)

        def __getitem__(self, index: int) -> Any:
            self.counts.reads += 1
            self.table[index] = index
            self.kept[-1 - index]["read"][0] += 1
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


class Stage:
    """A live transform that goes by a number which processes share."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.stage.value + torch.rand(1)


class Staged(Dataset[Any]):
    """Holds the number as well, for its ``next_stage``; ``by`` says how its samples depend on it."""

    def __init__(self, by: str) -> None:
        self.stage, self.by, self.log = mp.Value("i", 0), by, []
        self.transform = Stage(self.stage)
        self.further = self._with_stage

    def __len__(self) -> int:
        return N

    def next_stage(self) -> None:
        self.stage.value += 1
        self.log.append(self.stage.value)

    @property
    def now(self) -> int:
        return int(self.stage.value)

    def _with_stage(self, index: int) -> float:
        return float(self.stage.value * index)


class ByTransform(Staged):
    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index)))


class ByProperty(Staged):
    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index) * self.now))


class ByMethodThatItHolds(Staged):
    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), self.further(index)))


class ByComputedName(Staged):
    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index) * getattr(self, "sta" + "ge").value))


def stage_of(dataset: Any) -> int:
    return int(dataset.stage.value)


class ByFunction(Staged):
    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index) * stage_of(self)))


class Base(Staged):
    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index) * self.stage.value)


class ByBase(Base):
    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index))


class Unit(enum.Enum):
    """Holds its members, and each member is of this class."""

    NUMBER = 1

    def of(self, dataset: Any) -> int:
        return int(dataset.stage.value)


class Node:
    root: Any = None

    def of(self, dataset: Any) -> int:
        return Unit.NUMBER.of(dataset)


Node.root = Node()


class ByCircle(Staged):
    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.node, self.unit = Node(), Unit.NUMBER
        self.children = [self.node, [self.unit]]
        self.children.append(self.children)

    def __getitem__(self, index: int) -> Any:
        scale = self.unit.value * self.node.root.of(self) * len(self.children[2])
        return self.transform(torch.full((2,), float(index) * scale))


class Outer(Dataset[Any]):
    """Reads what another dataset holds."""

    def __init__(self, inner: Staged) -> None:
        self.inner, self.transform = inner, inner.transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index) * self.inner.stage.value))


class Scale:
    def __init__(self, stage: Any) -> None:
        self.stage = stage

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value * (1 + self.stage.value)


class ScaledInside(Outer):
    """Reads a dataset that has a transform of its own, which is a part of the cached samples."""

    def __init__(self, inner: Staged) -> None:
        super().__init__(inner)
        inner.transform = Scale(inner.stage)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.inner[index])


READ_BY: dict[str, Callable[[], Any]] = {
    "a property": lambda: ByProperty("property"),
    "a method that it holds": lambda: ByMethodThatItHolds("held"),
    "a computed name": lambda: ByComputedName("name"),
    "a function": lambda: ByFunction("function"),
    "classes and lists that hold themselves": lambda: ByCircle("circle"),
    "its base class": lambda: ByBase("base"),
    "a dataset around it": lambda: Outer(ByTransform("outer")),
    "a transform within": lambda: ScaledInside(ByTransform("within")),
}


def staged_passes(dataset: Any, advance: Callable[[], None], count: int, *, epochs: int = 2) -> list[Any]:
    torch.manual_seed(7)
    return passes(hotset.DataLoader(dataset, batch_size=5), advance, count, epochs=epochs)


def test_what_only_a_live_transform_reads_does_not_count() -> None:
    plain, held = ByTransform("transform"), ByTransform("transform")
    expected = staged_passes(plain, plain.next_stage, 3)
    with hotset.cache(held, memory="1MiB") as cached:
        assert cached.plan.live
        for one, other in zip(staged_passes(cached, held.next_stage, 3), expected, strict=True):
            equal_batches(one, other)
        assert cached.stats().hits == 5 * N


@pytest.mark.parametrize("by", READ_BY)
def test_what_reading_finds_in_any_way_counts(by: str) -> None:
    plain, held = READ_BY[by](), READ_BY[by]()
    advance = [getattr(one, "inner", one).next_stage for one in (plain, held)]
    expected = staged_passes(plain, advance[0], 3, epochs=1)
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        assert cached.plan.live
        found = staged_passes(cached, advance[1], 3, epochs=1)
        for one, other in zip(found, expected, strict=True):
            equal_batches(one, other)
    assert ["has changed," in str(w.message) for w in told] == [True, False]
    assert "has changed again" in str(told[1].message)


class Calls:
    """Calls what it was given, as one that tries again does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.functions = [function]

    def __call__(self, *given: Any) -> Any:
        return self.functions[0](*given)


def scaled_by(dataset: Any, index: int) -> torch.Tensor:
    return torch.tensor(index * dataset.scale)


class ReadsBy(Dataset[Any]):
    def __init__(self, read: Callable[[Any], Callable[[int], Any]]) -> None:
        self.read, self.scale = read(self), 2

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.read(index)

    def scaled(self, index: int) -> Any:
        return scaled_by(self, index)


@pytest.mark.parametrize(
    "read",
    [
        lambda dataset: Calls(dataset.scaled),
        lambda dataset: Calls(functools.partial(scaled_by, dataset)),
        lambda dataset: functools.partial(Calls(Calls(scaled_by)), dataset),
    ],
)
def test_what_functions_read_that_objects_of_its_own_call_counts(read: Any) -> None:
    held = ReadsBy(read)
    with hotset.cache(held, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=N)
        list(loader)
        held.scale = 3
        with recorded() as told:
            assert [batch.tolist() for batch in loader] == [[3 * index for index in range(N)]]
    assert [str(warning.message)[:26] for warning in told] == ["ReadsBy.scale has changed,"]


def test_a_declared_dataset_is_not_watched() -> None:
    @hotset.deterministic
    class Declared(Held):
        pass

    held = Declared()
    with hotset.cache(held, memory="1MiB") as cached:
        before = list(hotset.DataLoader(cached, batch_size=5))
        label(held)
        equal_batches(list(hotset.DataLoader(cached, batch_size=5)), before)


def test_a_closed_cache_follows_no_change() -> None:
    held = Held()
    cached = hotset.cache(held, memory="1MiB")
    assert cached[3][0] == 0
    cached.close()
    label(held)
    assert (len(cached), cached[3][0], cached.stats().cached) == (N, 5, 0)
    cached.labels = held.labels + 1
    assert (cached[3][0], cached.stats().cached) == (6, 0)


def test_a_fill_is_of_what_the_dataset_holds_then() -> None:
    held = Held()
    with recorded(), hotset.cache(held, memory="1MiB") as cached:
        label(held)
        cached.fill()
        assert cached[3][0] == 5


def test_nested_numbers_texts_and_arrays_are_compared() -> None:
    class Rows(Dataset[Any]):
        def __init__(self) -> None:
            self.rows = [{"box": np.zeros(4), "size": (1, [2]), "name": "a"} for _ in range(N)]

        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            row = self.rows[index]
            return float(row["box"][0]), row["size"][1][0], row["name"]

    rows = Rows()
    with recorded() as told, hotset.cache(rows, memory="1MiB") as cached:
        assert cached[3] == (0.0, 2, "a")
        rows.rows[3]["box"][0] = 7
        assert (len(cached), cached[3]) == (N, (7.0, 2, "a"))
        rows.rows[3]["size"][1][0] = 5
        assert (len(cached), cached[3]) == (N, (7.0, 5, "a"))
    assert len(told) == 2


def test_a_change_in_what_a_subset_wraps_is_noticed() -> None:
    held = Held()
    with recorded() as told, hotset.cache(Subset(held, [3, 4]), memory="1MiB") as cached:
        assert [label for label, *_ in (cached[0], cached[1])] == [0, 0]
        label(held)
        assert len(cached) == 2
        assert cached[0][0] == 5
    assert "Held.labels has changed" in str(told[0].message)


def set_on_it(dataset: Any) -> None:
    dataset.number += 7


def in_place(dataset: Any) -> None:
    label(getattr(dataset, "dataset", dataset))


class Reader(Dataset[Any]):
    """Computes something of another dataset's samples."""

    def __init__(self, parts: Any) -> None:
        self.parts = {"train": parts}

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        label, weight, _ = self.parts["train"][index]
        return label * 2, weight


@pytest.mark.parametrize(
    ("change", "around", "made_by", "workers"),
    all_pairs(
        [set_on_it, in_place],
        [lambda inner: inner, lambda inner: ConcatDataset([inner, Held()]), Reader],
        LOADERS,
        [0, 2],
    ),
)
def test_a_cache_of_a_dataset_that_reads_a_cached_one_follows_what_that_one_follows(
    change: Any, around: Any, made_by: str, workers: int
) -> None:
    plain = Held()
    expected = passes(DataLoader(around(plain), 4), lambda: change(plain), 2)
    with (
        recorded() as told,
        hotset.cache(Held(), memory="1MiB") as inner,
        hotset.cache(around(inner), memory="1MiB") as outer,
    ):
        loader = LOADERS[made_by](outer, 4, num_workers=workers)
        found = passes(loader, lambda: change(inner), 1)
        found += passes(loader, lambda: None, 1)
        assert outer.stats().cached == len(outer), "samples are cached anew"
    equal_batches(found, expected)
    assert "the cached Held in" in "".join(str(warning.message) for warning in told)


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


class Rows(list[Any]):
    """A list with an attribute of its own."""

    shift = 0

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + self.shift


@dataclasses.dataclass
class Row:
    number: int


def of_tensors() -> list[torch.Tensor]:
    return [torch.full((2,), float(index)) for index in range(N)]


def put(dataset: Any) -> None:
    dataset[3] = dataset[4] + 1


def put_inside(dataset: Any) -> None:
    dataset[4][0] += 7


def put_attribute(dataset: Any) -> None:
    dataset.shift = 2


THEMSELVES: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (of_tensors, put),
    (of_tensors, put_inside),
    (lambda: Rows(of_tensors()), put),
    (lambda: Rows(of_tensors()), put_attribute),
    (lambda: tuple(of_tensors()), put_inside),
    (lambda: dict(enumerate(of_tensors())), put),
    (lambda: np.arange(2.0 * N).reshape(N, 2), put),
    (lambda: torch.arange(2.0 * N).reshape(N, 2), put_inside),
    (lambda: [Row(index) for index in range(N)], lambda dataset: vars(dataset[3]).update(number=5)),
]


@pytest.mark.parametrize(
    ("make", "change", "workers"),
    rarely(
        [(*one, workers) for one in THEMSELVES for workers in (0, 2)],
        # In workers: a list, an object and an array.
        *((*one, 2) for number, one in enumerate(THEMSELVES) if number not in (1, 3, 6)),
    ),
)
def test_a_dataset_that_is_a_container_itself_is_followed(
    make: Callable[[], Any], change: Any, workers: int
) -> None:
    def loader(dataset: Any, workers: int) -> Any:
        return hotset.DataLoader(dataset, batch_size=5, num_workers=workers, collate_fn=copy.deepcopy)

    plain, held = make(), make()
    expected = passes(loader(plain, 0), lambda: change(plain), 2)
    assert str(expected[0]) != str(expected[1])
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        found = passes(loader(cached, workers), lambda: change(held), 2)
        assert cached.stats().cached == N
    for one, other in zip(found, expected, strict=True):
        assert str(one) == str(other)
    assert [w for w in told if "has changed, and samples may depend on it" in str(w.message)]


class Loads(list[Any]):
    """Keeps what it has loaded, in place of the path."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(super().__getitem__(index), str):
            self[index] = float(super().__getitem__(index))
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_list_that_reading_fills_is_not_taken_for_changed(workers: int) -> None:
    with hotset.cache(Loads(map(str, range(N))), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=N, num_workers=workers)
        for _ in range(3):
            assert next(iter(loader)).tolist() == list(range(N))
        assert cached.stats().misses == N


def test_what_reading_changes_rarely_does_not_count() -> None:
    class NotesRarely(Labels):
        def __init__(self) -> None:
            super().__init__()
            self.rare = 0

        def __getitem__(self, index: int) -> int:
            self.rare += index == 7
            return super().__getitem__(index)

    with hotset.cache(NotesRarely(), memory="1MiB") as cached:
        for index in range(N):
            assert cached[index] == 0
        assert cached.dataset.rare == 1
        assert len(list(DataLoader(cached, batch_size=5))) == 3
        assert cached.stats().hits == N


class SoftLabels(Dataset[Any]):
    def __init__(self) -> None:
        self.soft, self.reads = torch.zeros(N), 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return index, self.soft[index].clone()


@pytest.mark.parametrize("made_by", [hotset.DataLoader, DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_labels_that_the_training_loop_refines_are_those_of_the_next_pass(made_by: Any, workers: int) -> None:
    def train(held: SoftLabels, dataset: Any, loader: Any) -> list[Any]:
        found = []
        for _ in range(4):
            for indices, soft in loader(dataset, batch_size=5, num_workers=workers):
                found.append(soft.tolist())
                held.soft[indices] += 1
        return found

    held, plain = SoftLabels(), SoftLabels()
    expected = train(plain, plain, DataLoader)
    with recorded(), hotset.cache(held, memory="1MiB") as cached:
        assert train(held, cached, made_by) == expected


looks = 0


class Looked(bytearray):
    def __bytes__(self) -> bytes:
        global looks
        looks += 1
        return bytearray(self).hex().encode()


class Bits(Dataset[int]):
    def __init__(self) -> None:
        self.bits = Looked(N)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return self.bits[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_holds_is_looked_at_once_as_a_pass_begins(workers: int) -> None:
    with hotset.cache(Bits(), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4, shuffle=True, num_workers=workers)
        cached.fill()
        list(loader)
        before = looks
        list(loader)
        assert looks == before + 1
        cached.dataset.bits[3] = 5
        with pytest.warns(hotset.HotsetWarning, match=r"Bits\.bits has changed"):
            assert sorted(torch.cat(list(loader)).tolist()) == [0] * (N - 1) + [5]


class Scaled(Dataset[Any]):
    def __init__(self) -> None:
        self.data, self.scale = torch.arange(48.0).view(N, 4).clone(), torch.ones(4)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index] * self.scale


def test_tensors_that_are_looked_at_may_still_be_resized() -> None:
    """After ``tensor.numpy()`` torch refuses to."""
    held = Scaled()
    with recorded(), hotset.cache(held, memory="1MiB") as cached:
        list(hotset.DataLoader(cached, batch_size=4))
        held.data.resize_(100, 4)
        held.scale.resize_(400)
    assert held.data.shape == (100, 4)


@pytest.mark.parametrize("made_by", LOADERS)
def test_a_transform_put_into_a_librarys_chain_is_noticed(
    made_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mmengine's ``Compose``, in an attribute of any name."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / f"chains_{made_by}.py").write_text(
        "class Chain:\n"
        "    def __init__(self, steps):\n"
        "        self.steps = steps\n"
        "    def __call__(self, value):\n"
        "        for step in self.steps:\n"
        "            value = step(value)\n"
        "        return value\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    chain = importlib.import_module(f"chains_{made_by}").Chain

    class Piped(Dataset[Any]):
        def __init__(self) -> None:
            self.pipeline = chain([torch.neg])

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.pipeline(torch.tensor(float(index)))  # type: ignore[no-any-return]

    plain = Piped()
    with recorded() as told, hotset.cache(Piped(), memory="1MiB") as cached:
        loaders = [LOADERS[made_by](plain, batch_size=4), LOADERS[made_by](cached, batch_size=4)]
        for change in (lambda steps: steps.append(torch.exp), lambda steps: steps.pop(0)):
            for loader in loaders:
                list(loader)
            change(plain.pipeline.steps)
            change(cached.pipeline.steps)
            equal_batches(*map(list, loaders))
    assert ["Chain.steps has changed" in str(each.message) for each in told] == [True, True]
