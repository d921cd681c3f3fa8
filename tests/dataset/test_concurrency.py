"""``concurrency=``: samples of a source that waits are read several at once, and nothing else changes."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import equal_batches, failure, is_a_sentence, recorded, rng_states, seed_everything
from sources import ReadLog
from torch.utils.data import DataLoader, Dataset

import hotset

N = 96


class Waiting(Dataset[Any]):
    """Each read waits; how many wait at once is logged."""

    def __init__(self, log: ReadLog, seconds: float = 0.01) -> None:
        self.log = log
        self.seconds = seconds
        self.inside = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "inside": 0}

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.inside += 1
        self.log.add(self.inside)
        time.sleep(self.seconds * (10 if index % 20 == 7 else 1))
        value = self.value(index)
        self.inside -= 1
        return value

    def value(self, index: int) -> Any:
        return torch.full((5,), float(index)), index


class Drawing(Waiting):
    def value(self, index: int) -> Any:
        tensor, label = super().value(index)
        return (tensor * random.random() if index % 16 == 5 else tensor), label


class DrawingAnew(Waiting):
    """A few samples make a generator for one draw."""

    def value(self, index: int) -> Any:
        tensor, label = super().value(index)
        return (tensor * random.Random().random() if index in (40, 41) else tensor), label


class Broken(Waiting):
    bad = -1

    def value(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError(f"no object {index}")
        return super().value(index)


class Threadbound(Waiting):
    """A database connection, which belongs to the thread that opened it."""

    def __init__(self, log: ReadLog) -> None:
        super().__init__(log, 0.0)
        self.connection: Any = None

    def value(self, index: int) -> Any:
        if self.connection is None:
            self.connection = sqlite3.connect(":memory:")
        (found,) = self.connection.execute(f"select {index} + 1").fetchone()
        return torch.tensor(found), index


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "reads")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Waiting, Drawing])
def test_batches_and_random_states_are_those_of_torch(
    kind: type[Waiting], workers: int, log: ReadLog
) -> None:
    seen: list[list[Any]] = []
    for cached in (False, True):
        seed_everything()
        dataset: Any = kind(log, 0.001)
        with recorded():
            if cached:
                dataset = hotset.cache(dataset, memory="64MiB", concurrency=8)
            loader = (hotset.DataLoader if cached else DataLoader)(
                dataset, 16, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3)
            )
            seen.append([*(batch for _ in range(2) for batch in loader), *rng_states()])
        if cached:
            dataset.close()
    for number, (expected, got) in enumerate(zip(*seen, strict=True)):
        equal_batches(got, expected, f"batch {number}")


def test_a_generator_that_is_made_in_a_thread_is_noticed(log: ReadLog) -> None:
    with hotset.cache(DrawingAnew(log, 0.0), memory="64MiB", key="x", concurrency=8) as cached:
        with pytest.warns(hotset.HotsetWarning, match=r"\(40, 41\) draw"):
            for _ in hotset.DataLoader(cached, 16):
                pass
        assert cached.stats().cached == N - 2


def test_many_reads_wait_at_once(log: ReadLog) -> None:
    with hotset.cache(Waiting(log), memory="64MiB", key="x", concurrency=8) as cached:
        log.reset()
        for _ in hotset.DataLoader(cached, 32):
            pass
        assert log.total() == N
        assert 3 <= max(log.order()) <= 8
        assert cached.stats().cached == N
        before = threading.active_count()
        assert [thread.name for thread in threading.enumerate() if "hotset-read" in thread.name] == []
        assert threading.active_count() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_comes_in_its_turn_and_what_came_before_is_kept(workers: int, log: ReadLog) -> None:
    dataset = Broken(log, 0.0)
    with hotset.cache(dataset, memory="64MiB", key="x", concurrency=8) as cached:
        dataset.bad = 40
        found = failure(lambda: list(hotset.DataLoader(cached, 16, num_workers=workers)))
        assert found.kind is KeyError
        assert "no object 40" in found.text
        assert [int(cached[index][1]) for index in range(40)] == list(range(40))
        dataset.bad = -1
        labels = [label for batch in hotset.DataLoader(cached, 16) for label in batch[1].tolist()]
        assert labels == list(range(N))


def test_a_dataset_that_does_not_bear_threads_is_read_by_one_and_the_user_is_told(log: ReadLog) -> None:
    dataset = Threadbound(log)
    with hotset.cache(dataset, memory="64MiB", key="x", concurrency=8) as cached:
        with pytest.warns(hotset.HotsetWarning, match="does not bear concurrency=") as told:
            found = [int(value) for batch in hotset.DataLoader(cached, 16) for value in batch[0]]
        assert found == list(range(1, N + 1))
        cached.clear()
        log.reset()
        for _ in hotset.DataLoader(cached, 16):
            pass
        assert log.total() == N, "each once, and no longer in vain in a thread first"
        dataset.connection.close()
        (sentence,) = [str(each.message) for each in told if each.category is hotset.HotsetWarning]
        assert is_a_sentence(sentence)


def test_ctrl_c_ends_the_reads_and_leaves_no_claim(log: ReadLog) -> None:
    with hotset.cache(Waiting(log, 0.02), memory="64MiB", key="x", concurrency=4) as cached:
        timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                for _ in hotset.DataLoader(cached, N):
                    pass
        finally:
            timer.join()
        labels = [label for batch in hotset.DataLoader(cached, 16) for label in batch[1].tolist()]
        assert labels == list(range(N))
        assert cached.stats().cached == N


@pytest.mark.parametrize("wrong", [0, -1, "many", 1.5, True, 5000])
def test_a_number_of_threads_that_is_none_is_refused(wrong: Any, log: ReadLog) -> None:
    found = failure(lambda: hotset.cache(Waiting(log), memory="64MiB", concurrency=wrong))
    assert found.kind is hotset.ArgumentError
    assert "concurrency=" in found.text
    assert is_a_sentence(found.text)


def test_as_many_threads_as_are_named_are_taken(log: ReadLog) -> None:
    with hotset.cache(Waiting(log, 0.0), memory="64MiB", key="x", concurrency=1024) as cached:
        assert [label for batch in hotset.DataLoader(cached, 16) for label in batch[1].tolist()] == list(
            range(N)
        )


def test_a_window_is_filled_by_processes(log: ReadLog) -> None:
    found = failure(lambda: hotset.cache(Waiting(log), window=hotset.Window(resident=8), concurrency=4))
    assert found.kind is hotset.ArgumentError
    assert is_a_sentence(found.text)
