"""A dataset that reads several samples at once (``__getitems__``) is read so, by whatever fills the cache."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, failure, rarely, rng_states, seed_everything
from sources import ReadLog
from torch.utils.data import DataLoader, Dataset

import hotset

N = 160


class Table(Dataset[Any]):
    """Rows as HF's datasets give them; each call is logged with how many rows it was for."""

    def __init__(self, log: ReadLog) -> None:
        self.log = log

    def __len__(self) -> int:
        return N

    def row(self, index: int) -> Any:
        return {"ids": list(range(index, index + 12)), "x": torch.full((3,), float(index)), "y": index % 4}

    def __getitem__(self, index: int) -> Any:
        (row,) = self.__getitems__([range(N)[index]])
        return row

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.log.add(len(indices))
        return [self.row(index) for index in indices]


class Shared(Table):
    """Gives the same list and the same tensors out again and again: they are its own."""

    def __init__(self, log: ReadLog) -> None:
        super().__init__(log)
        self.rows = [self.row(index) for index in range(N)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.rows[index] for index in indices]


class Drawing(Table):
    """A sample in ten draws."""

    def row(self, index: int) -> Any:
        row = super().row(index)
        if index % 10 == 3:
            row["x"] *= random.uniform(0.5, 2) + float(np.random.rand()) + float(torch.rand(1))
        return row


class Broken(Table):
    bad = -1

    def row(self, index: int) -> Any:
        if index == self.bad:
            raise OSError(f"row {index} cannot be read")
        return super().row(index)


class Short(Table):
    short = False

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return super().__getitems__(indices)[: -1 if self.short and len(indices) > 1 else None]


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "reads")


@pytest.mark.parametrize(
    ("kind", "workers"), rarely(itertools.product([Table, Shared, Drawing], [0, 2]), (Table, 2))
)
def test_batches_and_draws_are_those_of_torch(kind: type[Table], workers: int, log: ReadLog) -> None:
    seen: list[list[Any]] = []
    for make in (lambda: kind(log), lambda: hotset.cache(kind(log), memory="64MiB")):
        seed_everything()
        dataset = make()
        loader_kind = hotset.DataLoader if isinstance(dataset, hotset.CachedDataset) else DataLoader
        generator = torch.Generator().manual_seed(3)
        loader = loader_kind(dataset, 16, shuffle=True, num_workers=workers, generator=generator)
        with pytest.warns(hotset.HotsetWarning) if _warns(kind, dataset) else contextlib.nullcontext():
            batches = [batch for _ in range(3) for batch in loader]
        seen.append([*batches, *rng_states()])
        if isinstance(dataset, hotset.CachedDataset):
            dataset.close()
    assert len(seen[0]) == len(seen[1])
    for number, (expected, got) in enumerate(zip(*seen, strict=True)):
        equal_batches(got, expected, f"batch {number}")


def _warns(kind: type[Table], dataset: Any) -> bool:
    return kind is Drawing and isinstance(dataset, hotset.CachedDataset)


def test_a_fill_asks_for_many_rows_at_once(log: ReadLog) -> None:
    with hotset.cache(Table(log), memory="64MiB", key="rows") as cached:
        log.reset()
        for _ in hotset.DataLoader(cached, 32):
            pass
        sizes = log.order()
        assert sum(sizes) == N
        assert len(sizes) < N / 4
        assert cached.stats().cached == N
        log.reset()
        assert cached[5]["y"] == 1
        assert cached.__getitems__([7, 3])[1]["y"] == 3
        assert log.order() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_is_that_of_its_row_and_the_others_are_cached(workers: int, log: ReadLog) -> None:
    dataset = Broken(log)
    with hotset.cache(dataset, memory="64MiB", key="rows") as cached:
        dataset.bad = 21
        loader = hotset.DataLoader(cached, 16, num_workers=workers)
        found = failure(lambda: list(loader))
        assert found.kind is OSError
        assert "row 21 cannot be read" in found.text
        dataset.bad = -1
        assert cached.stats().cached >= 21 - 16
        batches = list(hotset.DataLoader(cached, 16, num_workers=workers))
        assert torch.cat([batch["x"][:, 0] for batch in batches]).tolist() == list(map(float, range(N)))


def test_too_few_rows_are_refused_with_a_sentence(log: ReadLog) -> None:
    dataset = Short(log)
    with hotset.cache(dataset, memory="64MiB", key="rows") as cached:
        for _ in hotset.DataLoader(cached, 16, sampler=range(64)):  # so that the next are read in groups
            pass
        dataset.short = True
        with pytest.raises(hotset.ArgumentError, match=r"Short.__getitems__ must return one sample for each"):
            cached.__getitems__(list(range(64, 128)))


def test_rows_that_are_the_datasets_own_are_not_changed(log: ReadLog) -> None:
    dataset = Shared(log)

    def halve(row: Any) -> Any:
        row["x"] /= 2
        row["ids"].reverse()
        return row

    with hotset.cache(dataset, transform=[halve], memory="64MiB") as cached:
        for _ in range(2):
            for number, batch in enumerate(hotset.DataLoader(cached, 16)):
                assert batch["x"][:, 0].tolist() == [
                    index / 2 for index in range(16 * number, 16 * number + 16)
                ]
    assert [float(row["x"][0]) for row in dataset.rows] == list(map(float, range(N)))
    assert [row["ids"][0] for row in dataset.rows] == list(range(N))


class InGroups(Dataset[Any]):
    """A call takes five milliseconds, for however many samples."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(0.005)
        if self.bad in indices:
            raise LookupError(self.bad)
        return [float(index) for index in indices]


@pytest.mark.parametrize("transform", [None, abs])
def test_the_plan_says_what_a_sample_takes_in_a_group(transform: Any) -> None:
    states = rng_states()
    plan = hotset.cache(InGroups(), memory="1MiB", transform=transform).plan
    assert plan.sample_seconds < 0.0025, "at least two in a group"
    assert plan.rows[0].seconds is not None
    assert plan.rows[0].seconds < 0.0025
    assert rng_states() == states
    # A group that cannot be read says nothing.
    assert hotset.cache(InGroups(bad=200), memory="1MiB").plan.sample_seconds > 0


class Uncacheable(Table):
    """Rows that cannot be cached, and say of how many rows their batch was."""

    def __getitem__(self, index: int) -> Any:
        return Row(index, 0)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Row(index, len(indices)) for index in indices]


class Row:
    def __new__(cls, *numbers: int) -> Row:
        return super().__new__(cls)

    def __init__(self, number: int, together: int) -> None:
        self.number, self.together = number, together


def as_pairs(rows: list[Row]) -> list[tuple[int, int]]:
    return [(row.number, row.together) for row in rows]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:nothing of Uncacheable can be cached")
def test_rows_that_cannot_be_cached_are_read_in_the_batches_of_torch(workers: int, log: ReadLog) -> None:
    table = Uncacheable(log)
    expected = list(DataLoader(table, 7, collate_fn=as_pairs))
    with hotset.cache(table, memory="1MiB") as cached:
        for kind in (hotset.DataLoader, DataLoader):
            assert list(kind(cached, 7, num_workers=workers, collate_fn=as_pairs)) == expected
