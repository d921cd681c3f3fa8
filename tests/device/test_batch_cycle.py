"""Going round a loader: what is told of new passes, and positions that are true whatever has happened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from hotset.device.batch_cycle import BatchCycle
from hotset.device.queue import DeviceQueue
from hotset.errors import StateError


def cycle_of(loader: Any) -> BatchCycle:
    return BatchCycle(DeviceQueue(loader, depth=0, device="cpu"))


def drawn(cycle: BatchCycle, count: int) -> list[Any]:
    return [cycle.take(count - number).batch for number in range(count)]


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=6))
def test_positions_are_those_of_a_loop(length: int, calls: list[int]) -> None:
    cycle = cycle_of(list(range(length)))
    taken = 0
    for call in calls:
        assert drawn(cycle, call) == [(taken + number) % length for number in range(call)]
        taken += call
        assert (cycle.length, cycle.epoch, cycle.step) == (length, taken // length, taken % length)
    cycle.close()
    assert (cycle.epoch, cycle.step) == (taken // length, 0)


class Told(list[Any]):
    """A list that is told of epochs; what it gives tells which."""

    def __init__(self, length: int) -> None:
        super().__init__(range(length))
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Counting(Told):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


def test_each_new_pass_is_told_of_its_number() -> None:
    for loader in (Told(2), Counting(2)):
        drawn(cycle_of(loader), 7)
        assert loader.told == [1, 2, 3]


def test_it_is_told_when_the_pass_begins_and_not_before() -> None:
    loader = Counting(2)
    cycle = cycle_of(loader)
    drawn(cycle, 2)
    assert loader.told == []
    drawn(cycle, 1)
    assert loader.told == [1]


def test_who_sets_epochs_himself_is_not_overruled() -> None:
    loader = Counting(2)
    cycle = cycle_of(loader)
    for epoch in range(5, 9):
        loader.set_epoch(epoch)
        drawn(cycle, 2)
    assert loader.told == [5, 6, 7, 8]
    drawn(cycle, 2)
    assert loader.told == [5, 6, 7, 8, 9]


def dealt() -> DistributedSampler[Any]:
    return DistributedSampler(TensorDataset(torch.arange(12)), num_replicas=2, rank=0)


@pytest.mark.parametrize("where", ["sampler", "batch_sampler", "inside a batch sampler"])
def test_samplers_are_found_wherever_a_loader_has_them(where: str) -> None:
    sampler = dealt()
    data = sampler.dataset
    if where == "sampler":
        loader: Any = DataLoader(data, batch_size=2, sampler=sampler)
    elif where == "batch_sampler":
        loader = DataLoader(data, batch_sampler=(batches := BatchSampler(sampler, 2, False)))
        batches.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]
    else:
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
    drawn(cycle_of(loader), 7)
    assert sampler.epoch == 2


class Failing:
    """A pass of three batches of which the second one fails; it goes on after that."""

    def __iter__(self) -> Iterator[Any]:
        return _FailingPass()

    def __len__(self) -> int:
        return 3


class _FailingPass:
    def __init__(self) -> None:
        self._number = 0

    def __iter__(self) -> _FailingPass:
        return self

    def __next__(self) -> int:
        self._number += 1
        if self._number == 2:
            raise OSError("no answer")
        if self._number > 3:
            raise StopIteration
        return self._number


def test_after_an_error_it_goes_on_and_the_pass_counts() -> None:
    cycle = cycle_of(Failing())
    found: list[Any] = []
    for _ in range(6):
        try:
            found.append(cycle.take(1).batch)
        except OSError:
            found.append("error")
    assert found == [1, "error", 3, 1, "error", 3]
    assert cycle.epoch == 1


def test_states_that_are_none() -> None:
    cycle = cycle_of([1])
    for state in (None, {}, {"passes": "x", "taken": 0, "loader": {}}, {"passes": 0, "taken": 0}):
        with pytest.raises(StateError, match="state must be what Sink"):
            cycle.load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="cannot say where it stands"):
        cycle.state_dict()


# Rows of resident samples


class Serving:
    """Rows as a pass over resident samples gives them, by a script: rows, a batch of its own, an error."""

    complete = is_current = True

    def __init__(self, script: list[Any]) -> None:
        self._script = iter(script)
        self._one: Any = None
        self.uploads: list[list[int]] = []
        self.given: list[Any] = []
        self.cache = self

    def rows(self) -> Any:
        self._one = next(self._script)
        self.given.append(self._one)
        if isinstance(self._one, BaseException):
            raise self._one
        return np.array(self._one) if isinstance(self._one, list) else None

    def build(self) -> Any:
        return self._one

    def upload(self, rows: Any) -> torch.Tensor:
        self.uploads.append(rows.tolist())
        return torch.from_numpy(rows)


class Scripted(DeviceQueue[Any]):
    """A queue whose passes are served from these scripts."""

    def __init__(self, *scripts: list[Any]) -> None:
        super().__init__([], depth=0, device="cpu")
        self.passes = [Serving(script) for script in scripts]
        self._next = iter(self.passes)

    def __iter__(self) -> Any:
        iterator: Any = iter(())

        class Pass:
            resident = next(self._next)
            __next__ = iterator.__next__
            count = self._tally.count

        return Pass()


def told(cycle: BatchCycle, count: int) -> list[Any]:
    found: list[Any] = []
    for number in range(count):
        try:
            one = cycle.take(count - number)
        except OSError:
            found.append("error")
        else:
            found.append(one.batch.tolist() if one.resident is not None else one.batch)
    return found


def test_one_upload_for_all_that_a_call_wants_of_a_pass() -> None:
    queue = Scripted([[1, 2], [3], [4, 5]], [[6], [7, 8]])
    assert told(BatchCycle(queue), 5) == [[1, 2], [3], [4, 5], [6], [7, 8]]
    assert [one.uploads for one in queue.passes] == [[[1, 2, 3, 4, 5]], [[6, 7, 8]]]
    assert queue.stats().batches == 5


def test_a_batch_that_is_not_resident_comes_in_its_turn() -> None:
    queue = Scripted([[1], [2], "built", [3], "built too"])
    assert told(BatchCycle(queue), 5) == [[1], [2], "built", [3], "built too"]


def test_an_error_comes_in_its_turn_and_what_was_uploaded_is_not_lost() -> None:
    queue = Scripted([[1], [2], OSError(), [3], [4]])
    cycle = BatchCycle(queue)
    assert told(cycle, 5) == [[1], [2], "error", [3], [4]]
    assert cycle.step == 4


def test_rows_that_were_found_before_an_interrupt_come_after_it() -> None:
    queue = Scripted([[1], [2], KeyboardInterrupt(), [3], [4]])
    cycle = BatchCycle(queue)
    with pytest.raises(KeyboardInterrupt):
        cycle.take(5)
    assert cycle.step == 0
    assert told(cycle, 4) == [[1], [2], [3], [4]]


class Stateful(Scripted):
    """Its loader's state is how many rows it has given."""

    def __init__(self, *scripts: list[Any]) -> None:
        super().__init__(*scripts)
        self.loader: Any = self

    def state_dict(self) -> Any:
        return {"given": len(self.passes[0].given)}


def test_a_state_after_an_interrupt_is_that_before_the_rows_that_were_found() -> None:
    cycle = BatchCycle(Stateful([[1], [2], [3], KeyboardInterrupt(), [4]]))
    assert told(cycle, 1) == [[1]]
    with pytest.raises(KeyboardInterrupt):
        cycle.take(5)
    assert cycle.state_dict() == {"passes": 0, "taken": 1, "loader": {"given": 1}}
