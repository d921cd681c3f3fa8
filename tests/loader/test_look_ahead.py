"""Workers without a task fill the cache for batches that come later, and nothing else changes."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    Failure,
    equal_batches,
    eventually,
    failure,
    recorded,
    rng_states,
    seed_everything,
    taken_apart,
)
from sources import ReadLog
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler

import hotset

N, BATCH, WORKERS, PREFETCH = 240, 8, 2, 2
# torch has so many batches made before the second is asked for.
MADE = (WORKERS * PREFETCH + 1) * BATCH
pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "reads")


class Rows(Dataset[Any]):
    def __init__(self, log: ReadLog) -> None:
        self.log = log

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.log.add(index)
        return self.value(index)

    def value(self, index: int) -> Any:
        return torch.full((6,), float(index)), index


class Drawing(Rows):
    """A few samples draw random numbers."""

    def value(self, index: int) -> Any:
        tensor, label = super().value(index)
        return (tensor * random.random() if index % 16 == 5 else tensor), label


class Wide(Rows):
    def value(self, index: int) -> Any:
        return torch.full((20_000,), float(index))


def loader_over(dataset: Any, kind: Any = hotset.DataLoader, **options: Any) -> Any:
    return kind(
        dataset,
        **{
            "batch_size": BATCH,
            "num_workers": WORKERS,
            "prefetch_factor": PREFETCH,
            "shuffle": True,
            **options,
        },
    )


@pytest.mark.parametrize(
    "context",
    [None, "fork", multiprocessing.get_context("fork"), pytest.param("spawn", marks=pytest.mark.chaos)],
    ids=["default", "name", "context", "spawned"],
)
def test_while_the_consumer_does_something_else_all_is_cached(context: Any, log: ReadLog) -> None:
    seed_everything()
    expected = list(loader_over(Rows(log), DataLoader))
    with hotset.cache(Rows(log), memory="4MiB", key="x") as cached:
        log.reset()
        seed_everything()
        loader = loader_over(cached, multiprocessing_context=context)
        batches = iter(loader)
        found = [next(batches)]
        assert eventually(lambda: cached.stats().cached == N)
        found += batches
        equal_batches(found, expected)
        assert log.total() == N, "each sample was read once"
        stats = cached.stats()
        assert (stats.misses, stats.hits) == (N, 0), "what was read ahead is no hit when it is first used"
        assert sum(len(labels) for _, labels in loader) == N
        assert cached.stats().hits == N


def test_what_is_cleared_before_its_first_use_is_read_again_and_no_hit(log: ReadLog) -> None:
    with hotset.cache(Rows(log), memory="4MiB", key="x") as cached:
        batches = iter(loader_over(cached))
        next(batches)
        assert eventually(lambda: cached.stats().cached == N)
        cached.clear()
        list(batches)
        assert cached.stats().hits == 0


@pytest.mark.parametrize("kind", [Rows, Drawing])
def test_draws_and_random_states_are_torchs(kind: type[Rows], log: ReadLog) -> None:
    def epochs(loader: Any, wait: Any) -> Any:
        seed_everything()
        found = []
        for _ in range(2):
            for number, batch in enumerate(loader):
                found.append(batch)
                if number == 1:
                    wait()
                random.random()  # a training draws as well
                torch.rand(())
        return found, rng_states()

    expected = epochs(loader_over(kind(log), DataLoader), lambda: None)
    with recorded(), hotset.cache(kind(log), memory="4MiB", key="x") as cached:
        drawing = N // 16 if kind is Drawing else 0
        got = epochs(loader_over(cached), lambda: eventually(lambda: cached.stats().cached == N - drawing))
        equal_batches(got, expected)


@pytest.mark.parametrize("wrapped", ["Subset", "DistributedSampler"])
def test_other_orders_that_are_known(wrapped: str, log: ReadLog) -> None:
    with hotset.cache(Rows(log), memory="4MiB", key="x") as cached:
        log.reset()
        dataset: Any = Subset(cached, range(40, 200)) if wrapped == "Subset" else cached
        options: dict[str, Any] = {}
        if wrapped == "DistributedSampler":
            options = {"sampler": DistributedSampler(cached, 2, 0), "shuffle": False}
        loader = loader_over(dataset, **options)
        batches = iter(loader)
        labels = next(batches)[1].tolist()
        count = 160 if wrapped == "Subset" else N // 2
        assert eventually(lambda: log.total() == count)
        for batch in batches:
            labels += batch[1].tolist()
        assert log.total() == count, "none but this pass's own"
        assert len(labels) == count


class GoesRound(Rows):
    """Takes every integer."""

    def value(self, index: int) -> Any:
        return super().value(index % N)


def test_indices_that_the_dataset_alone_knows_are_left_to_it(log: ReadLog) -> None:
    beyond = {"sampler": SequentialSampler(range(N + 4 * MADE)), "shuffle": False}
    expected = list(loader_over(GoesRound(log), DataLoader, **beyond))
    with hotset.cache(GoesRound(log), memory="4MiB", key="x") as cached:
        batches = iter(loader_over(cached, **beyond))
        found = [next(batches)]
        assert eventually(lambda: cached.stats().cached == N)
        found += batches
        equal_batches(found, expected)


def test_a_sampler_that_may_draw_later_is_asked_for_no_more_than_torch_asks(log: ReadLog) -> None:
    with hotset.cache(Rows(log), memory="4MiB", key="x") as cached:
        log.reset()
        loader = loader_over(cached, shuffle=False, sampler=RandomSampler(cached, replacement=True))
        batches = iter(loader)
        next(batches)
        second = [next(batches) for _ in range(WORKERS * PREFETCH)]  # the workers have had time for more
        assert len(second) == WORKERS * PREFETCH
        assert log.total() <= 2 * MADE


def test_a_pass_that_is_broken_off_is_forgotten_by_persistent_workers(log: ReadLog) -> None:
    with hotset.cache(Rows(log), memory="4MiB", key="x") as cached:
        loader = loader_over(cached, persistent_workers=True)
        plain = loader_over(Rows(log), DataLoader, persistent_workers=True)
        for _ in range(3):
            seed_everything()
            for number, _batch in enumerate(loader):
                if number == 3:
                    break
            ours = list(loader)
            seed_everything()
            for number, _batch in enumerate(plain):
                if number == 3:
                    break
            equal_batches(ours, list(plain))
        assert cached.stats().cached == N


def test_a_resumed_pass_is_read_ahead_as_well(log: ReadLog) -> None:
    with hotset.cache(Rows(log), memory="4MiB", key="x") as cached:
        first = loader_over(cached)
        batches = iter(first)
        for _ in range(4):
            next(batches)
        state = first.state_dict()
        rest = list(batches)
        cached.clear()
        log.reset()
        again = loader_over(cached)
        again.load_state_dict(state)
        resumed = iter(again)
        found = [next(resumed)]
        assert eventually(lambda: log.total() == N - 4 * BATCH)
        found += resumed
        equal_batches(found, rest)
        assert log.total() == N - 4 * BATCH


class Many(Rows):
    def __len__(self) -> int:
        return 2400


def test_the_part_that_is_known_ahead_moves_on_with_the_pass(log: ReadLog) -> None:
    with hotset.cache(Many(log), memory="8MiB", key="x") as cached:
        batches = iter(loader_over(cached, batch_size=1))
        next(batches)
        assert eventually(lambda: cached.stats().cached >= 2048)
        for _ in range(300):
            next(batches)
        assert eventually(lambda: cached.stats().cached >= 2048 + 300)


# ---- where it ends -------------------------------------------------------------------------------------


def test_without_room_nothing_is_read_in_vain(log: ReadLog) -> None:
    with hotset.cache(Wide(log), memory="4MiB", key="x") as cached:
        log.reset()
        with recorded() as told:
            batches = iter(loader_over(cached))
            next(batches)
            assert eventually(lambda: cached.stats().cached > 40)
            assert len(list(batches)) == N // BATCH - 1
        assert ["no more fit" in str(each.message) for each in told] == [True]
        assert log.total() <= N + WORKERS * BATCH, "each worker may find out once that there is no room"


def test_a_warning_whose_pass_is_broken_off_comes_in_the_next(log: ReadLog) -> None:
    with hotset.cache(Wide(log), memory="4MiB", key="x") as cached:
        log.reset()
        batches = iter(loader_over(cached))
        next(batches)
        assert eventually(lambda: cached.stats().cached > 40)
        read = -1
        while read != (read := log.total()):  # until the workers have found out that there is no room
            time.sleep(0.3)
        del batches
        with recorded() as told:
            for _ in range(2):
                assert len(list(loader_over(cached))) == N // BATCH
        assert ["no more fit" in str(each.message) for each in told] == [True]


SPREAD = {place * (N - 1) // 7 for place in range(8)}  # the samples that a plan is made from
LOCK = threading.Lock()


class Odd(Rows):
    """All but a few samples cannot be stored."""

    def value(self, index: int) -> Any:
        return torch.zeros(3) if index in SPREAD else LOCK


def test_samples_that_cannot_be_stored_are_not_read_twice(log: ReadLog) -> None:
    def first(samples: list[Any]) -> int:
        return len(samples)

    with recorded(), hotset.cache(Odd(log), memory="4MiB", key="x") as cached:
        log.reset()
        assert list(loader_over(cached, collate_fn=first)) == [BATCH] * (N // BATCH)
        assert log.total() <= N + WORKERS * 2 * BATCH


class Broken(Rows):
    def value(self, index: int) -> Any:
        if index == 100:
            raise OSError("sample 100 cannot be read")
        return super().value(index)


def test_an_exception_comes_with_its_own_batch(log: ReadLog) -> None:
    with hotset.cache(Broken(log), memory="4MiB", key="x") as cached:
        batches = iter(loader_over(cached, shuffle=False))
        labels = next(batches)[1].tolist()
        assert eventually(lambda: cached.stats().cached > 200)

        def rest() -> None:
            for _, more in batches:
                labels.extend(more.tolist())

        found = failure(rest)
        assert found.kind is OSError
        assert "sample 100" in found.text
        assert labels == list(range(96))


class Flaky(Rows):
    """Sample 100 cannot be read a few times."""

    def __init__(self, log: ReadLog, times: int) -> None:
        super().__init__(log)
        self.left = multiprocessing.Value("i", times)

    def value(self, index: int) -> Any:
        if index == 100:
            with self.left.get_lock():
                self.left.value -= 1
                if self.left.value >= 0:
                    raise OSError("the disk did not answer")
        return super().value(index)


def until_it_fails(batches: Any, found: list[Any]) -> Failure | None:
    try:
        found.extend(batches)
    except OSError as error:
        return taken_apart(error)
    return None


@pytest.mark.parametrize("times", [1, 3])
def test_an_error_that_passes_gives_the_sample_or_the_error_and_nothing_else(
    times: int, log: ReadLog
) -> None:
    expected = list(loader_over(Rows(log), DataLoader, shuffle=False))
    with hotset.cache(Flaky(log, times), memory="4MiB", key="x") as cached:
        errors = 0
        for number in range(3):
            batches = iter(loader_over(cached, shuffle=False))
            found = [next(batches)]
            if number == 0:  # those that read ahead meet the error first
                assert eventually(lambda: cached.stats().cached > 200)
            told = until_it_fails(batches, found)
            errors += told is not None
            if told is not None:
                assert told.kind is OSError
                assert "in value" in told.text, "the user's own frame"
            equal_batches(found, expected if told is None else expected[:12])
        assert errors < times, "an error that nobody waits for is nobody's"
        assert cached.check() == []
