"""Claims: each sample to one process, for as long as that one lives and no longer; by real processes.

Whether a claimant lives is the kernel's word, not a pid's: these processes are killed, stopped, forked and
replaced in the same slot, and each time the question is who may take over what.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import eventually, finish, in_threads
from kills import child, ended, in_child, kill, lingering, stop
from stores import attached, count, ids, opened, stored, wrong

from hotset.store import fill, locks
from hotset.store.claims import Claims, Ids, Participant
from hotset.store.format import CLAIMED, PRESENT, SLOT_SHIFT, SLOTS, Geometry, Live, Slot
from hotset.store.segment import Segment
from hotset.store.store import Store
from hotset.store.torch_threads import HelperThread

N = 64


@pytest.fixture
def segment() -> Iterator[Segment]:
    with contextlib.closing(Segment.create(Geometry(N, 16, 0, 0, 0), limit=0)) as segment:
        yield segment


@pytest.fixture
def participant(segment: Segment) -> Iterator[Participant]:
    with contextlib.closing(_Leaving(segment)) as participant:
        yield participant


class _Leaving(Participant):
    close = Participant.leave


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as they are, but shorter: what follows them is looked at here."""
    monkeypatch.setattr("hotset.store.claims._LOCK_SECONDS", 0.3)
    monkeypatch.setattr("hotset.store.fill._PATIENCE_SECONDS", 0.3)


@pytest.fixture
def claims(participant: Participant) -> Claims:
    return Claims(participant)


def take(claims: Claims, wanted: Ids, most: int = N) -> list[int]:
    return claims.take(wanted, most).tolist()  # type: ignore[no-any-return]


def by_another(segment: Segment, wanted: Ids) -> Callable[[], Participant]:
    """What a child does: take all of these, or fail; it keeps what it has until it ends."""

    def body() -> Participant:
        participant = Participant(segment)
        assert take(Claims(participant), wanted) == wanted.tolist()
        return participant

    return body


def test_what_one_process_has_claimed_no_other_gets(segment: Segment, claims: Claims) -> None:
    with lingering(by_another(segment, ids(range(10)))):
        assert take(claims, ids(range(20))) == list(range(10, 20))
        assert take(claims, ids(range(20))) == []


def test_what_one_process_has_claimed_it_does_not_get_again(claims: Claims) -> None:
    assert take(claims, ids(5, 3, 9)) == [5, 3, 9]
    assert take(claims, ids(3, 4)) == [4]


def test_no_more_than_asked_for_in_the_order_asked_for(segment: Segment, claims: Claims) -> None:
    assert take(claims, ids(9, 1, 8, 2), 3) == [9, 1, 8]
    assert take(claims, ids(9, 1, 8, 2), 3) == [2]
    assert take(claims, ids(), 3) == []
    assert np.flatnonzero(segment.index).tolist() == [1, 2, 8, 9]


def test_present_samples_cannot_be_claimed(segment: Segment, claims: Claims) -> None:
    segment.index[[3, 4]] = PRESENT, PRESENT | 7
    assert take(claims, ids(range(2, 6))) == [2, 5]


def test_released_claims_are_free_and_published_samples_stay(segment: Segment, claims: Claims) -> None:
    with lingering(by_another(segment, ids(7))):
        taken = claims.take(ids(range(5)), N)
        segment.index[2] = PRESENT | 1
        others = int(segment.index[7])
        claims.release(np.concatenate([taken, ids(7)]))
        assert int(segment.index[2]) == PRESENT | 1
        assert int(segment.index[7]) == others
        assert take(claims, ids(range(10))) == [0, 1, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize("one", [False, True])
def test_what_a_claimant_publishes_as_it_leaves_is_not_claimed(
    one: bool, segment: Segment, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Participant(segment)
    assert take(Claims(other), ids(3, 4)) == [3, 4]
    is_alive = Participant.is_alive

    def publish_and_leave(self: Participant, slot: int) -> bool:
        segment.index[3] = PRESENT | 3
        other.leave()
        return is_alive(self, slot)

    monkeypatch.setattr(Participant, "is_alive", publish_and_leave)
    if one:
        assert claims.take_one(3, overwrite=False) is None
        assert claims.take_one(4, overwrite=False) is not None
    else:
        assert take(claims, ids(3, 4)) == [4]
    assert int(segment.index[3]) == PRESENT | 3
    assert claims.own(ids(3, 4)).tolist() == [4]


def test_what_another_thread_publishes_as_it_is_looked_at_is_not_claimed(
    segment: Segment, claims: Claims
) -> None:
    class Published(dict[int, int]):
        def get(self, number: int, default: Any = None) -> Any:
            if number == 3:
                segment.index[3] = PRESENT | 3
                self.pop(3, None)
            return super().get(number, default)

    assert take(claims, ids(3, 4, 5)) == [3, 4, 5]
    assert claims.take(ids(3, 4, 5), N, threads=Published({3: -1, 5: -1})).tolist() == [4]
    assert int(segment.index[3]) == PRESENT | 3


def test_a_killed_claimants_samples_are_taken_over(segment: Segment, claims: Claims) -> None:
    with lingering(by_another(segment, ids(range(10)))) as pid:
        word = int(segment.index[0])
        assert claims.is_open(word)
        kill(pid)
        assert not claims.is_open(word)
        assert take(claims, ids(range(10)), 4) == [0, 1, 2, 3]
        assert take(claims, ids(range(10))) == [4, 5, 6, 7, 8, 9]


def test_a_claimant_that_ended_or_left_without_releasing_is_as_good_as_killed(
    segment: Segment, claims: Claims
) -> None:
    in_child(by_another(segment, ids(1)))
    other = by_another(segment, ids(2))()
    assert take(claims, ids(1, 2)) == [1]
    other.leave()
    assert take(claims, ids(1, 2)) == [2]


def test_an_interrupt_right_behind_a_claim_leaves_none() -> None:
    with opened(float, N) as store, attached(store) as other:
        claims = store.filler.claims
        take_some = claims.take

        def interrupted(*arguments: Any, **named: Any) -> Ids:
            assert len(take_some(*arguments, **named))
            raise KeyboardInterrupt

        claims.take = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            store.fill(ids(1, 2, 3), float)
        del claims.take
        assert other.filler.claims.take(ids(1, 2, 3), 3).tolist() == [1, 2, 3]


def test_a_stopped_claimant_keeps_its_claims(segment: Segment, claims: Claims) -> None:
    with lingering(by_another(segment, ids(range(10)))) as pid:
        stop(pid)
        assert take(claims, ids(range(12))) == [10, 11]


def test_a_dead_ones_claims_are_not_taken_for_those_of_its_slots_next_holder(
    segment: Segment, claims: Claims
) -> None:
    with lingering(by_another(segment, ids(3))) as pid:
        dead = int(segment.index[3])
        kill(pid)
    with lingering(by_another(segment, ids(4))):
        living = int(segment.index[4])
        slot = (living - CLAIMED) >> SLOT_SHIFT
        assert (dead - CLAIMED) >> SLOT_SHIFT == slot, "the slot is used again"
        assert not claims.is_open(dead)
        assert claims.is_open(living)
        assert take(claims, ids(3, 4)) == [3]


def test_each_holder_of_a_slot_is_another_incarnation(segment: Segment) -> None:
    seen = set()
    for number in range(5):
        in_child(by_another(segment, ids(number)))
        seen.add(int(segment.index[number]))
    assert len(seen) == 5
    assert int(segment.slots[0, Slot.INCARNATION]) == 5


def test_processes_take_slots_of_their_own_and_freed_ones_again(
    segment: Segment, participant: Participant
) -> None:
    assert participant.slot == 0
    with lingering(by_another(segment, ids(0))) as first, lingering(by_another(segment, ids(1))):
        assert segment.slots[1:3, Slot.PID].tolist() != [os.getpid()] * 2
        assert participant.is_alive(1)
        assert participant.is_alive(2)
        assert not participant.is_alive(3)
        kill(first)
        assert not participant.is_alive(1)
        with contextlib.closing(_Leaving(segment)) as newcomer:
            assert newcomer.slot == 1
    assert participant.is_alive(0)


# Forks


def _parent_with_a_child_of_its_own(segment: Segment, tell: int) -> None:
    participant = by_another(segment, ids(range(5)))()

    def tell_and_wait() -> None:
        os.write(tell, b"%d\n" % os.getpid())
        signal.pause()

    ended(child(tell_and_wait), within=60)
    participant.leave()


def test_a_forked_child_does_not_keep_its_parent_alive(segment: Segment, claims: Claims) -> None:
    """Otherwise a loader's workers would hold the claims of a killed trainer for as long as they live."""
    read, tell = os.pipe()
    parent = child(lambda: _parent_with_a_child_of_its_own(segment, tell))
    os.close(tell)
    grandchild = int(os.read(read, 32))
    os.close(read)
    try:
        assert take(claims, ids(range(5))) == []
        kill(parent)
        os.kill(grandchild, 0)
        assert take(claims, ids(range(5))) == list(range(5))
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_forked_child_has_a_slot_of_its_own_and_respects_its_parents_claims(
    segment: Segment, participant: Participant, claims: Claims
) -> None:
    assert take(claims, ids(range(5))) == list(range(5))

    def body() -> None:
        assert take(claims, ids(range(8))) == [5, 6, 7]
        assert participant.slot == 1

    in_child(body)
    assert participant.slot == 0
    assert take(claims, ids(range(8))) == [5, 6, 7]


def _take_in_process(claims: Claims, wanted: Ids, answers: Any) -> None:
    answers.put(claims.take(wanted, N).tolist())


def test_a_multiprocessing_child_is_like_any_other(claims: Claims) -> None:
    assert take(claims, ids(range(5))) == list(range(5))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_take_in_process, args=(claims, ids(range(7)), answers))
    process.start()
    finish(process)
    assert answers.get() == [5, 6]


@pytest.mark.usefixtures("impatient")
def test_a_fork_while_another_thread_holds_the_short_lock_does_not_wedge_the_child(
    participant: Participant, claims: Claims
) -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with participant.short_lock():
            held.set()
            assert go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        with lingering(lambda: take(claims, ids(0))):  # it gets nothing, and gets there within a bound
            pass
    finally:
        go.set()
        thread.join(60)
    assert take(claims, ids(0)) == [0]


# Threads


def test_of_many_threads_each_gets_other_samples(segment: Segment, claims: Claims) -> None:
    taken: list[list[int]] = [[] for _ in range(8)]

    def body(number: int) -> None:
        for _ in range(N):
            taken[number] += take(claims, ids(range(N)), 1)

    in_threads(8, body)
    assert sorted(itertools.chain(*taken)) == list(range(N))
    assert len(set(segment.index.tolist())) == 1


@pytest.mark.usefixtures("patient")
def test_of_many_processes_each_gets_other_samples(segment: Segment) -> None:
    read, tell = os.pipe()
    together = multiprocessing.get_context("fork").Barrier(4)

    def body() -> None:
        claims = Claims(Participant(segment))
        together.wait(60)
        mine = [sample for _ in range(N) for sample in take(claims, ids(range(N)), 1)]
        os.write(tell, b"".join(b"%d\n" % sample for sample in mine))
        together.wait(60)  # who ended early would leave its claims to the others

    children = [child(body) for _ in range(4)]
    assert [ended(pid) for pid in children] == [0] * 4
    os.close(tell)
    with os.fdopen(read, "rb") as file:
        assert sorted(int(line) for line in file) == list(range(N))


# The short lock, and slots, out of reach


def _hold_the_short_lock(segment: Segment) -> None:
    assert locks.try_lock(locks.reopen(segment.fd), 0)


@pytest.mark.usefixtures("impatient")
def test_a_stopped_holder_of_the_short_lock_is_waited_for_within_a_bound(
    segment: Segment, participant: Participant, claims: Claims
) -> None:
    with lingering(lambda: _hold_the_short_lock(segment)) as pid:
        stop(pid)
        with participant.short_lock() as held:
            assert not held
        for _ in range(20):
            assert take(claims, ids(range(5))) == []
        assert not segment.index.any()
    assert eventually(lambda: take(claims, ids(3)) == [3])


def test_a_stopped_holder_of_the_short_lock_does_not_cost_every_sample_the_whole_wait(
    segment: Segment, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real, clock = locks.lock, 100.0

    def lock(fd: int, byte: int, timeout: float) -> bool:
        waits.append(timeout)
        return real(fd, byte, 0.0)

    monkeypatch.setattr(locks, "lock", lock)
    monkeypatch.setattr("hotset.store.claims.time", SimpleNamespace(monotonic=lambda: clock))
    with lingering(lambda: _hold_the_short_lock(segment)) as pid:
        stop(pid)
        for _ in range(50):
            assert take(claims, ids(range(5))) == []
        clock += 60.0
        assert take(claims, ids(range(5))) == []
    assert len(waits) == 51
    assert waits[0] == waits[-1] > 0
    assert sum(waits[1:-1]) == 0


def sample(i: int) -> tuple[torch.Tensor, str]:
    return torch.full((7,), i), f"sample {i}"


@pytest.mark.usefixtures("impatient")
def test_a_store_goes_on_beside_a_stopped_holder_of_the_short_lock() -> None:
    """Samples come from the source meanwhile, and are cached again after it."""
    with opened(sample, N) as store, attached(store) as other:
        store.fill(ids(range(10)), sample)
        other.fill(ids(10), sample)
        with lingering(lambda: _hold_the_short_lock(store.segment)) as pid:
            stop(pid)
            for view in (store, other):
                uncached = view.fill(ids(range(20)), sample)
                assert sorted(uncached) == list(range(11, 20))
                assert wrong(uncached, sample) == {}
                assert wrong(stored(view), sample) == {}
            assert count(store) == 11
            kill(pid)
            assert eventually(lambda: store.fill(ids(range(20)), sample) is not None and count(store) == 20)
        assert store.check() == []


@pytest.mark.usefixtures("impatient")
def test_a_store_goes_on_beside_a_stopped_claimant_within_a_bound() -> None:
    with opened(sample, N) as store, attached(store) as other:
        with lingering(by_another(store.segment, ids(3, 4, 5))) as pid:
            stop(pid)
            for view in (store, other):
                uncached = view.fill(ids(range(10)), sample)
                assert {3, 4, 5} <= set(uncached)
                assert wrong(uncached, sample) == {}
            assert count(store) == 7
            kill(pid)
            assert sorted(store.fill(ids(range(10)), sample)) == [3, 4, 5]
        assert count(store) == 10
        assert store.check() == []


def test_with_every_slot_held_a_store_reads_from_the_source(segment: Segment) -> None:
    with opened(sample, N) as store, attached(store) as other:
        other.fill(ids(range(5)), sample)

        def hold_every_slot() -> None:
            fd = locks.reopen(store.segment.fd)
            assert sum(locks.try_lock(fd, 1 + slot) for slot in range(SLOTS)) == SLOTS - 1

        with lingering(hold_every_slot):
            assert store.participant.slot == -1
            assert store.participant.row[Slot.HITS] == 0
            for _ in range(3):
                uncached = store.fill(ids(range(10)), sample)
                assert sorted(uncached) == list(range(5, 10))
                assert wrong(uncached, sample) == {}
            store.count_hits(5)
            assert wrong(stored(store), sample) == {}
            assert count(store) == 5
        assert sorted(store.fill(ids(range(10)), sample)) == list(range(5, 10))
        assert count(store) == 10


@pytest.mark.parametrize("slot", [0, 1, SLOTS - 1, SLOTS, (1 << 13) - 1])
def test_a_claim_that_nobody_can_have_made_is_void(segment: Segment, claims: Claims, slot: int) -> None:
    """A damaged word, or a claim of the slot that this process itself is in, by a former holder."""
    segment.index[5] = CLAIMED | slot << SLOT_SHIFT | 4711
    assert take(claims, ids(4, 5)) == [4, 5]


# Those that are waited for


def test_a_claimant_that_gets_on_is_waited_for_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by who has waited for it long before; and one that does not get on is given up."""
    clock, patience = 0.0, fill._PATIENCE_SECONDS
    coming, read = [], []

    def pause(seconds: float) -> None:
        nonlocal clock
        clock += 0.75 * patience
        if coming:
            number = coming.pop(0)
            other.insert({number: sample(number)})

    def reading(i: int) -> tuple[torch.Tensor, str]:
        read.append(i)
        return sample(i)

    timer = SimpleNamespace(monotonic=lambda: clock, sleep=pause, perf_counter_ns=lambda: 0)
    monkeypatch.setattr(fill, "time", timer)
    with opened(sample, N) as store, attached(store) as other:
        others = Claims(other.participant)
        for first in (0, 8):
            coming[:] = take(others, ids(range(first, first + 8)))
            assert store.fill(ids(range(first, first + 8)), reading) == {}
            clock += 100 * patience
        assert (count(store), read) == (16, [])
        assert take(others, ids(20)) == [20]
        assert list(store.fill(ids(20), reading)) == read == [20]


def test_a_claim_that_is_given_back_just_after_it_was_respected_is_taken_over() -> None:
    """As when another process could not read a sample: this one reads it and keeps it."""
    with opened(sample, N) as store, attached(store) as other:
        others = Claims(other.participant)
        assert take(others, ids(5)) == [5]
        claims, taken = store.filler.claims, []

        class Late(Claims):
            def take(self, ids: Ids, most: int, **named: Any) -> Ids:
                found = claims.take(ids, most, **named)
                taken.append(found.tolist())
                others.release(others.own(ids))  # between the failed attempt and the look at the words
                return found

        store.filler.claims = Late(store.participant, store.index)
        assert store.fill(ids(5), sample, keep=False) == {}
        assert taken == [[], [5]]
        assert wrong(stored(store), sample) == {}
        assert count(store) == store.filler.reads == 1


def test_what_another_thread_claims_while_this_one_waits_for_the_lock_stays_that_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, go, read = threading.Event(), threading.Event(), []

    def slowly(number: int) -> Any:
        read.append(number)
        reading.set()
        assert go.wait(60)
        return sample(number)

    with opened(sample, N) as store:
        short_lock, here = Participant.short_lock, threading.current_thread()
        other = threading.Thread(target=lambda: store.fill(ids(5), slowly))

        def claimed_before(self: Participant) -> Any:
            if threading.current_thread() is here:
                if reading.is_set():
                    go.set()  # this thread has not claimed it, and tries again
                else:
                    other.start()
                    assert reading.wait(60)
            return short_lock(self)

        monkeypatch.setattr(Participant, "short_lock", claimed_before)
        store.fill(ids(5), slowly, keep=False)
        other.join(60)
        assert read == [5]
        assert wrong(stored(store), sample) == {}


@contextlib.contextmanager
def filled_by_another_thread(store: Store, wanted: Ids) -> Iterator[None]:
    """Another thread reads these samples, and stores them once the block has ended."""
    reading, go = threading.Event(), threading.Event()

    def read(number: int) -> Any:
        reading.set()
        assert go.wait(60)
        return sample(number)

    other = threading.Thread(target=lambda: store.fill(wanted, read))
    other.start()
    try:
        assert reading.wait(60)
        yield
    finally:
        go.set()
        other.join(60)


def test_an_interrupted_thread_gives_its_claims_back_while_another_fills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(sample, N) as store, attached(store) as other:
        claim = store.filler.claims.take

        def claim_and_interrupt(*arguments: Any, **named: Any) -> Ids:
            claim(*arguments, **named)
            raise KeyboardInterrupt

        with filled_by_another_thread(store, ids(5)):
            with monkeypatch.context() as patched:
                patched.setattr(store.filler.claims, "take", claim_and_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    store.fill(ids(1, 2), sample)
            assert take(Claims(other.participant), ids(1, 2, 5)) == [1, 2]
        assert wrong(stored(store), sample) == {}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no thread to spare")
def test_a_thread_that_cannot_be_started_to_store_leaves_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def large(number: int) -> torch.Tensor:
        return torch.full((1 << 17,), float(number))

    with opened(large, N, 1 << 26) as store, attached(store) as other:
        store.fill(ids(0), large)
        with filled_by_another_thread(store, ids(5)):
            monkeypatch.setattr(HelperThread, "ask", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                store.fill(ids(range(6, N)), large)
            assert take(Claims(other.participant), ids(range(N))) == [i for i in range(1, N) if i != 5]


def test_a_failed_thread_gives_back_nothing_that_another_has_claimed_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(sample, N) as store, attached(store) as other, contextlib.ExitStack() as stack:
        own, looks = store.filler.claims.own, itertools.count(1)

        def meanwhile(wanted: Ids) -> Ids:
            # It looks for its chunk's claims first, and then for what an interrupt may have left.
            if threading.current_thread() is here and next(looks) == 2:
                stack.enter_context(filled_by_another_thread(store, ids(5)))
            return own(wanted)

        def fails(number: int) -> Any:
            raise ValueError(f"sample {number} is damaged")

        here = threading.current_thread()
        monkeypatch.setattr(store.filler.claims, "own", meanwhile)
        with pytest.raises(ValueError, match="damaged"):
            store.fill(ids(5), fails)
        assert next(looks) > 2
        assert take(Claims(other.participant), ids(5)) == []


def test_what_cannot_be_stored_is_claimed_no_longer_than_it_is_read() -> None:
    with opened(float, N) as store, attached(store) as other:
        nothing = object()
        assert store.fill(ids(1, 2), lambda sample: nothing) == {1: nothing, 2: nothing}
        assert other.filler.claims.take(ids(1, 2), 2).tolist() == [1, 2]


def test_nothing_is_published_once_a_clear_has_begun() -> None:
    """A cache that is destroyed waits for no claim: its pages may be given back by now."""
    with opened(float, N) as store:

        def read(sample: int) -> float:
            store.segment.live[Live.CLEAR_GENERATION] |= 1
            return float(sample)

        assert store.fill(ids(1, 2), read) == {1: 1.0, 2: 2.0}
        assert int(store.segment.index.max()) < PRESENT


def test_nothing_is_claimed_in_the_midst_of_a_clear() -> None:
    with opened(torch.tensor, 10, 1 << 20) as store:
        claims = Claims(store.participant)
        store.segment.live[Live.CLEAR_GENERATION] += 1
        assert len(claims.take(np.arange(10), 10)) == 0
        store.segment.live[Live.CLEAR_GENERATION] += 1
        assert len(claims.take(np.arange(10), 10)) == 10
