"""The ring among processes: fillers and readers while the window moves, and fillers that are killed.

What a sample is made of names its entry in every element, so that a torn or another one's copy shows. Nothing
is timed: readers end when they have verified so many copies, and until then the window moves on.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import eventually, often, rarely
from kills import child, ended, kill, lingering
from stores import ids, pause
from test_ring import Fresh, M, cursor_of, gather_for, limit_for, move, opened, sized, used, view_of, window

from hotset.store.format import Slot
from hotset.store.ring import Ring

FAR = ((1 << 20) - 3) * M


def shared(count: int) -> Any:
    """Words that forked children share with their parent."""
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)


def fixed(entry: int) -> Any:
    return torch.full((3000,), entry)


def variable(entry: int) -> Any:
    return torch.full((1 + entry * 7919 % 50, 60), entry)


def read_wrong(ring: Ring, entries: Any) -> tuple[int, list[int]]:
    """How many copies could be made of these entries, and which of them are wrong."""
    found = ring.read(entries) or []
    return len(found), [int(e) for e, value in zip(entries, found, strict=False) if not (value == e).all()]


class Gathering:
    """As :func:`read_wrong`, by the gather."""

    def __init__(self, ring: Ring) -> None:
        self.gather, self.ring = None, ring

    def __call__(self, ring: Ring, entries: Any) -> tuple[int, list[int]]:
        if self.gather is None:
            with contextlib.suppress(AssertionError):  # the entry to compare with was gone too soon
                self.gather, _ = gather_for(ring, cursor_of(ring))  # type: ignore[assignment]
            return 0, []
        copy = self.gather.prepare(entries, lambda size: Fresh())
        if copy is None:
            return 0, []
        copy.run()
        batch = self.gather.finish(copy, lambda done, offset: done)
        if batch is None:
            return 0, []
        # Variable ones are padded with zeros, and no entry here is zero.
        rows = [(e, row.reshape(-1)) for e, row in zip(entries.tolist(), batch, strict=True)]
        return len(batch), [e for e, row in rows if row[0] != e or not ((row == e) | (row == 0)).all()]


@contextlib.contextmanager
def children(*bodies: Callable[[], object]) -> Iterator[list[int]]:
    pids = [child(body) for body in bodies]
    try:
        yield pids
    finally:
        for pid in pids:
            kill(pid)


def fill_forever(ring: Ring, make: Any, seed: int) -> Callable[[], None]:
    def body() -> None:
        choose = random.Random(seed)
        with view_of(ring) as mine:
            while True:
                mine.allocator.reopen()
                entries = window(mine)
                if choose.random() < 0.5:
                    choose.shuffle(entries)
                mine.fill(entries[: choose.randint(1, M)], make, keep=False)

    return body


@pytest.mark.parametrize(
    ("how", "make"),
    rarely(itertools.product(["read", "gather"], [fixed, variable]), ("read", variable), ("gather", fixed)),
)
def test_while_the_window_moves_no_copy_is_torn_or_another_entrys(make: Any, how: str) -> None:
    wanted = often(700, 2000)
    limit = limit_for(make, M, 50 * M)
    with opened(make, limit=limit, cursor=FAR) as ring:
        counts = shared(2)

        def read_on(number: int) -> Callable[[], None]:
            def body() -> None:
                choose = random.Random(number)
                with view_of(ring) as mine:
                    copies = read_wrong if how == "read" else Gathering(mine)
                    while counts[number] < wanted:
                        entries = cursor_of(mine) + ids(choose.randint(-2, M - 1) for _ in range(2))
                        done, torn = copies(mine, entries)
                        assert torn == [], f"{torn} with the cursor at {cursor_of(mine)}"
                        counts[number] += done

            return body

        fillers = [fill_forever(ring, make, seed) for seed in range(2)]
        with children(*fillers, read_on(0), read_on(1)) as pids:
            choose = random.Random(5)
            while counts.min() < wanted:
                before = counts.sum()
                move(ring, cursor_of(ring) + choose.randint(0, 3))
                pause(choose.random() * 4e-3)
                # The readers get on between two moves, however slowly the fillers bring them something.
                assert eventually(lambda before=before: _got_on(pids[2:], counts, before, wanted))  # type: ignore[misc]
            assert [ended(pid) for pid in pids[2:]] == [0, 0]
        assert ring.check() == []
        assert used(ring) <= limit


def _got_on(readers: list[int], counts: Any, before: int, wanted: int) -> bool:
    """Whether one of them has read more than before, or all have read enough; fails if one has failed."""
    for pid in readers:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert info is None or info.si_status == 0, "a reader met a wrong copy"
    return bool(counts.sum() > before or counts.min() >= wanted)


@pytest.mark.parametrize("make", rarely([fixed, variable], fixed))
def test_fillers_that_are_killed_leave_everything_to_be_filled(make: Any) -> None:
    with opened(make, limit=limit_for(make, M, 100 * M)) as ring:
        choose = random.Random(3)
        for seed in range(often(12, 40)):
            with children(fill_forever(ring, make, seed), fill_forever(ring, make, seed + 50)):
                for _ in range(3):
                    pause(choose.random() * 4e-3)
                    move(ring, cursor_of(ring) + choose.randint(0, 3))
            with view_of(ring) as fresh:
                assert fresh.check() == []
                assert set(fresh.fill(window(ring), make)) <= set(window(ring).tolist())
                assert fresh.holds(window(ring))
                found = fresh.read(window(ring))
                assert found is not None
                assert [int(value[(0,) * value.ndim]) for value in found] == window(ring).tolist()
                assert all((value == value[(0,) * value.ndim]).all() for value in found)
                assert fresh.check() == []


def test_what_killed_fillers_had_of_a_tight_budget_is_not_lost() -> None:
    make = sized(lambda entry: 4)
    with opened(make, limit=limit_for(make, M, 4 * M)) as ring:
        assert ring.participant.slot == 0
        for lap in range(often(16, 50)):
            # Killed with an extent in hand, and a claim. Its slot's next holder wants nothing.
            with lingering(lambda: _take_and_stay(ring, extent=True)) as pid:
                kill(pid)
            idle = lingering(lambda: _take_and_stay(ring, extent=False))
            with idle if lap % 2 else contextlib.nullcontext():
                ring.allocator.reopen()
                ring.fill(window(ring), make, keep=False)
                assert ring.present(window(ring)).all(), f"in lap {lap}"
                assert ring.check() == []
            move(ring, cursor_of(ring) + 5)


_kept: list[Ring] = []


def _take_and_stay(ring: Ring, *, extent: bool) -> None:
    mine = Ring.attach(ring.segment.address)
    _kept.append(mine)  # it must not be closed before this process dies
    assert mine.participant.slot == 1
    if extent:
        assert len(mine.filler.claims.take(window(ring)[-2:], 2)) == 2
        assert mine.allocator._extend_to(4)
        row = mine.segment.slots[mine.participant.slot]
        assert row[Slot.LINE_END] - row[Slot.LINE_NEXT] == 4


@pytest.mark.usefixtures("patient")
def test_two_fillers_read_each_entry_once() -> None:
    moves, step = 60, 3
    with opened(fixed) as ring:
        reads, done = shared(2 * (M + moves * step)).reshape(2, -1), shared(2)

        def fill_along(number: int) -> Callable[[], None]:
            def body() -> None:
                def read(entry: int) -> Any:
                    reads[number, entry] += 1
                    return fixed(entry)

                with view_of(ring) as mine:
                    for at in range(moves):
                        while cursor_of(mine) < at * step:
                            pause(1e-4)
                        mine.fill(window(mine), read, keep=False)
                        done[number] = at + 1

            return body

        with children(fill_along(0), fill_along(1)) as pids:
            for at in range(moves):
                while done.min() <= at:
                    pause(1e-4)
                if at + 1 < moves:
                    move(ring, (at + 1) * step)
            assert [ended(pid) for pid in pids] == [0, 0]
        entries = M + (moves - 1) * step
        assert reads.sum(axis=0)[:entries].tolist() == [1] * entries
        assert reads.sum(axis=0)[entries:].sum() == 0
