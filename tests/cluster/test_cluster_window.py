"""A window that several machines share: one cursor, each sample held once, whatever machine dies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import eventually
from samples import big_image_and_label as image
from stores import attached

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from machines import Town, Trainer, town

from hotset.dataset.window import Sizes, Window
from hotset.store.format import PRESENT, Live

N = 240
WINDOW = Window(60, replace=0.2, seed=3, wait=True)


def sizes(window: Window = WINDOW) -> Sizes:
    return Sizes.of(window, N, 1)


def epoch(trainers: Sequence[Trainer], workers: int = 0, pause: float = 0.0) -> list[list[int]]:
    """What each rank has seen in the next epoch."""
    for rank, trainer in enumerate(trainers):
        trainer.begin("window_epoch", rank, len(trainers), workers, pause)
    return [trainer.result().value for trainer in trainers]


def members(cursor: int, window: Window = WINDOW) -> list[int]:
    return sorted(sizes(window).policy().members(cursor).tolist())


def together(parts: list[list[int]]) -> list[int]:
    return sorted(sample for part in parts for sample in part)


def positions(trainers: Sequence[Trainer]) -> set[tuple[int, ...]]:
    return {tuple(trainer.call("position")) for trainer in trainers}


def held(made: Town) -> list[set[int]]:
    """The slots in which each machine has a record."""
    found = []
    for machine in made.machines:
        with attached(machine.file) as ring:
            assert ring.check() == []
            found.append(set(np.flatnonzero(ring.segment.index >= PRESENT).tolist()))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_use_the_residents_and_no_other_samples(tmp_path: Path, workers: int) -> None:
    with town(tmp_path, image, N) as made:
        trainers = made.trainers(window=WINDOW)
        for number in range(8):
            seen = epoch(trainers, workers)
            assert together(seen) == members(12 * number), number
            assert positions(trainers) == {(number, 12 * number, 0)}
        slots = held(made)
        assert sum(map(len, slots)) == len(set.union(*slots)), "each is held once"
        assert all(slots), "and every machine holds some"
        assert made.reads() <= 60 + 8 * 12 + 12, "each sample is read once as it comes in"


def captioned(index: int) -> tuple[str, int]:
    return "text " * (index * 37 % 300), index


def test_samples_with_tails(tmp_path: Path) -> None:
    with town(tmp_path, captioned, N, count=2) as made:
        trainers = made.trainers(window=WINDOW)
        for number in range(12):  # every slot is used again
            assert together(epoch(trainers)) == members(12 * number)
        held(made)


@pytest.mark.parametrize("replace", [0.2, "auto"])
def test_nobody_waits_and_all_agree(tmp_path: Path, replace: Any) -> None:
    window = Window(60, replace=replace, seed=1)
    with town(tmp_path, image, N, seconds=0.002) as made:
        trainers = made.trainers(window=window)
        cursors: list[int] = []

        def has_moved() -> bool:
            seen = epoch(trainers, pause=0.01)
            ((at, cursor, _),) = positions(trainers)
            assert at == len(cursors)
            assert together(seen) == members(cursor, window)
            cursors.append(cursor)
            return bool(cursor > 24)

        assert eventually(has_moved)
        assert cursors == sorted(cursors)


def test_a_window_that_no_machine_could_hold_alone(tmp_path: Path) -> None:
    room = sizes().slots * 12_400
    with town(tmp_path, image, N, memory=room // 2) as made:
        trainers = made.trainers(window=WINDOW)
        for number in range(6):
            assert together(epoch(trainers)) == members(12 * number)
        slots = held(made)
        assert max(map(len, slots)) <= room // 2 // 12_300
        assert len(set.union(*slots)) >= sizes().slots - 12, "all residents, and what comes next"
        before = made.reads()
        assert before <= 60 + 6 * 12 + 12
        for machine in made.machines:
            assert machine.node is not None
            status = machine.node.call("status")
            assert 0 < status["memory"] <= room // 2


def test_a_machine_on_which_nobody_trains_is_not_waited_for(tmp_path: Path) -> None:
    window = Window(60, replace="auto", seed=1)
    with town(tmp_path, image, N) as made:
        trainers = made.trainers(*made.machines[:2], window=window)
        cursor = 0

        def has_moved() -> bool:
            nonlocal cursor
            epoch(trainers, pause=0.02)
            ((_, cursor, _),) = positions(trainers)
            return cursor > 24

        assert eventually(has_moved)
        with attached(made.machines[2].file) as ring:
            assert int(ring.segment.live[Live.CURSOR]) == cursor, "it is told all the same"
        assert held(made)[2], "and holds what it owns"


def test_a_machine_dies(tmp_path: Path) -> None:
    with town(tmp_path, image, N) as made:
        trainers = made.trainers(window=WINDOW)
        for number in range(3):
            assert together(epoch(trainers)) == members(12 * number)
        first = min(made.machines, key=lambda machine: machine.name)  # who decides about the cursor
        place = made.machines.index(first)
        first.kill()
        left = [trainer for number, trainer in enumerate(trainers) if number != place]
        for number in range(3, 7):
            for rank, trainer in enumerate(trainers):
                if rank != place:
                    trainer.begin("window_epoch", rank, 3, 0, 0.0)
            seen = [trainer.result().value for trainer in left]
            whole = sizes().policy().members(12 * number)
            assert set(together(seen)) <= set(whole.tolist())
            assert len(together(seen)) == 40
            assert positions(left) == {(number, 12 * number, 0)}


def test_a_machine_joins(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers(window=WINDOW)
        for number in range(3):
            assert together(epoch(trainers)) == members(12 * number)
        made.reads()
        made.add()
        made.settled()
        for number in range(3, 6):
            assert together(epoch(trainers)) == members(12 * number)
        assert held(made)[2]
        assert made.reads() <= 3 * 12 + 12, "what is resident is found with its former owner"


def test_a_job_that_comes_later_goes_on(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers(window=WINDOW)
        for number in range(4):
            assert together(epoch(trainers)) == members(12 * number)
        for trainer in trainers:
            trainer.end()
        for machine in made.machines:
            machine.trainers.clear()
        made.reads()
        later = made.trainers(window=WINDOW)
        for number in range(3, 6):
            assert together(epoch(later)) == members(12 * number)
        assert made.reads() <= 2 * 12 + 12, "the memory is where it was"


def test_a_state_puts_all_machines_back(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers(window=WINDOW)
        for _ in range(3):
            epoch(trainers)
        states = [trainer.call("state") for trainer in trainers]
        expected = [epoch(trainers) for _ in range(3)]
        for rank, trainer in enumerate(trainers):
            trainer.call("go_on", states[rank], rank, 2)
        assert [epoch(trainers) for _ in range(3)] == expected
        held(made)


def test_residents_are_read_before_the_first_epoch_where_that_is_wanted(tmp_path: Path) -> None:
    window = Window(60, replace=0, seed=1, prefill=True)
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers(window=window)
        assert together(epoch(trainers)) == members(0, window)
        assert made.reads() == 60
        assert together(epoch(trainers)) == members(0, window)
        assert made.reads() == 0


def test_a_window_as_large_as_the_data_is_none(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        made.settled()
        trainers = [machine.trainer() for machine in made.machines]
        told = [trainer.cache(made.source, image, window=Window(N + 1)) for trainer in trainers]
        assert any("so all are cached and none is replaced" in sentence for each in told for sentence in each)
        for epoch in range(2):
            assert [walk.wrong for walk in made.epoch(trainers, epoch)] == [[], []]
        for machine in made.machines:
            with attached(machine.file) as store:
                assert "shared" not in store.segment.metadata
        assert sum(len(machine.holds()) for machine in made.machines) == N


def test_two_windows_over_the_same_data_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    other = Window(30, replace=0.1, seed=9, wait=True)
    with town(tmp_path, image, N, count=2) as made:
        ones = made.trainers(window=WINDOW)
        others = made.trainers(window=other)
        whole = made.trainers()
        for number in range(4):
            assert together(epoch(ones)) == members(12 * number)
            assert together(epoch(others)) == members(3 * number, other)
        assert [walk.wrong for walk in made.epoch(whole, 0)] == [[], []]
