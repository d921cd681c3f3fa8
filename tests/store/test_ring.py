"""The ring: rows that are used again, and readers, writers and a cursor that never wait for one another.

What a sample is made of names its entry, so that another's bytes show, whatever the index says. The processes
that work on one ring at once are in ``test_ring_processes.py``; here each race is brought about by hand, by a
step of one view between two steps of another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, equal_batches, often
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kills import child, ended, in_child, lingering
from samples import Opaque
from stores import Make, ids, wrong

from hotset.collate import pad
from hotset.errors import SegmentError
from hotset.loader.collate import bound
from hotset.store import ring as ring_module
from hotset.store.claims import Claims, Ids, Participant
from hotset.store.format import (
    CLAIMED,
    GENERATION_MASK,
    LINE,
    PRESENT,
    RECORD_HEADER,
    Live,
    Slot,
    checksum,
    split_tail,
    tail_word,
)
from hotset.store.gather import Gather
from hotset.store.leaves.schema import Schema
from hotset.store.memory_limits import Headroom
from hotset.store.ring import Ring
from hotset.store.store import Store

M = 8
FAR = (GENERATION_MASK - 1) * M + 3  # the lap's 20 bits run over two laps from here


def fixed(entry: int) -> Any:
    return {"image": torch.full((40,), entry), "label": entry % 7}


def variable(entry: int) -> Any:
    return {"image": torch.full((1 + entry % 5, 30), entry), "text": f"{entry} " + "x" * (entry * 37 % 400)}


def odd(entry: int) -> Any:
    """A sample that cannot be kept."""
    return {"image": Opaque(entry)}


def own(entry: int) -> Any:
    """A sample of a form of its own."""
    return {"image": torch.full((1 + entry % 90,), entry), "boxes": [{"at": entry, "of": None}] * (entry % 3)}


BOTH = pytest.mark.parametrize("make", [fixed, variable])


@contextlib.contextmanager
def opened(make: Make, slots: int = M, limit: int = 1 << 20, cursor: int = 0, **more: Any) -> Iterator[Ring]:
    schema = Schema.infer([make(0), make(1)], keep_order=True)
    with contextlib.closing(Ring.create(schema, slots, limit, about={"name": "test"}, **more)) as ring:
        move(ring, cursor)
        yield ring


@contextlib.contextmanager
def view_of(ring: Ring) -> Iterator[Ring]:
    """The ring as another process has it."""
    with contextlib.closing(Ring.attach(ring.segment.address)) as other:
        yield other


def move(ring: Store, cursor: int) -> None:
    ring.segment.live[Live.WINDOW_CURSOR] = cursor


def cursor_of(ring: Store) -> int:
    return int(ring.segment.live[Live.WINDOW_CURSOR])


def window(ring: Store, count: int = M) -> Ids:
    return cursor_of(ring) + np.arange(count)


def used(ring: Store) -> int:
    return ring.segment.taken


def contents(ring: Store, entries: Ids) -> dict[int, Any]:
    """Those of these entries that are in the ring, as they are read one by one."""
    found = {}
    for entry in entries.tolist():
        got = ring.read(ids(entry))
        assert (got is not None) == bool(ring.present(ids(entry))[0])
        if got is not None:
            found[entry] = got[0]
    return found


def holds_exactly(ring: Ring, entries: Ids, make: Make) -> None:
    around = np.arange(max(cursor_of(ring) - 3 * M, 0), cursor_of(ring) + 3 * M)
    found = contents(ring, around)
    assert sorted(found) == sorted(entries.tolist())
    assert wrong(found, make) == {}
    assert ring.check() == []


def never(entry: int) -> Any:
    raise AssertionError(f"entry {entry} was read from the source")


# ---- entries, slots and laps -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, FAR])
def test_entries_of_another_form_take_their_turns(start: int) -> None:
    def make(entry: int) -> Any:
        return own(entry) if entry % 3 else fixed(entry)

    with opened(fixed, cursor=start) as ring, view_of(ring) as other:
        for step in [0, 3, 1, 8, 5]:
            move(ring, cursor_of(ring) + step)
            ring.fill(window(ring), make)
            holds_exactly(ring, window(ring), make)
            got = other.read(window(ring))
            assert got is not None
            assert wrong(dict(zip(window(ring).tolist(), got, strict=True)), make) == {}


@BOTH
@pytest.mark.parametrize("start", [0, 5, FAR, 1 << 45])
def test_a_window_runs_over_many_laps(make: Make, start: int) -> None:
    with opened(make, cursor=start) as ring, view_of(ring) as other:
        for step in [0, 3, 1, 8, 5, 2, 7, 4, 6, 8, 8, 3]:
            move(ring, cursor_of(ring) + step)
            new = window(ring)[-step:] if step else window(ring)
            got = ring.fill(new, make)
            assert sorted(got) == new.tolist(), "each is read once"
            assert wrong(got, make) == {}
            assert other.fill(window(ring), never) == {}
            found = other.read(window(ring))
            assert found is not None
            assert wrong(dict(zip(window(ring).tolist(), found, strict=True)), make) == {}
            assert other.check() == []


def test_an_entry_of_another_lap_is_absent() -> None:
    with opened(fixed) as ring:
        ring.fill(ids(3), fixed)
        for entry in (3 + M, 3 + 2 * M, 3 + 5 * M, 3 + M * GENERATION_MASK):
            assert not ring.present(ids(entry))[0]
            assert ring.read(ids(entry)) is None
            assert not ring.holds(ids(entry))
            assert not ring.settled(ids(entry))[0]


@BOTH
def test_what_has_left_is_read_until_its_slot_is_needed(make: Make) -> None:
    with opened(make) as ring:
        ring.fill(window(ring), make)
        move(ring, 5)
        holds_exactly(ring, ids(range(M)), make)
        ring.fill(ids(M + 1), make)
        holds_exactly(ring, ids(0, range(2, M), M + 1), make)


def test_an_old_filler_does_not_overwrite_a_newer_entry() -> None:
    with opened(fixed) as ring, view_of(ring) as slow:

        def overtaken(entry: int) -> Any:
            if entry == 1:  # by now two more of the slow one's entries have left
                move(ring, 4)
                ring.fill(ids(M + 2, M + 3), fixed)
            return fixed(entry)

        slow.filler._seconds = 1.0  # so that it claims them one by one
        got = slow.fill(ids(0, 1, 2, 3), overtaken)
        assert wrong(got, fixed) == {}
        assert sorted(got) == [0, 1, 2, 3]
        found = contents(ring, np.arange(2 * M))
        assert {M + 2, M + 3} <= set(found)
        assert not {2, 3} & set(found)
        assert wrong(found, fixed) == {}


def test_what_has_left_is_read_from_the_source_and_not_stored() -> None:
    with opened(fixed, cursor=20) as ring:
        assert sorted(ring.fill(ids(15, 21, 19), fixed)) == [15, 19, 21]
        holds_exactly(ring, ids(21), fixed)
        ring.refuse(ids(14))
        assert ring.settled(ids(14, 15, 19, 21)).tolist() == [False, False, False, True]


@BOTH
def test_no_entry_takes_the_slot_of_one_that_has_not_left(make: Make) -> None:
    with opened(make, cursor=FAR) as ring:
        ring.fill(window(ring), make)
        assert sorted(ring.fill(window(ring) + M, make)) == (window(ring) + M).tolist()
        ring.refuse(window(ring) + M)
        holds_exactly(ring, window(ring), make)


def test_an_entry_that_is_a_lap_ahead_is_not_stored() -> None:
    with opened(fixed) as ring:
        got = ring.fill(ids(3, 3 + M, 1), fixed)
        assert wrong(got, fixed) == {}
        assert sorted(got) == [1, 3, 3 + M]
        holds_exactly(ring, ids(1, 3), fixed)
        ring.fill(ids(5 + M), fixed)
        ring.fill(ids(5), fixed)
        holds_exactly(ring, ids(1, 3, 5), fixed)


def test_a_record_from_before_the_window_was_moved_back_gives_way() -> None:
    with opened(fixed) as ring:
        move(ring, 2 * M)
        ring.fill(ids(2 * M + 3), fixed)
        ring.segment.live[Live.WINDOW_CURSOR] = M - 1
        ring.fill(ids(M + 3), fixed)
        assert ring.present(ids(M + 3))[0]


def test_nobody_waits_for_a_claim_that_cannot_be_his_entrys(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(fixed) as ring:
        in_child(lambda: Claims(Participant(ring.segment), ring.index).take(ids(3), M))
        move(ring, M)
        monkeypatch.setattr("hotset.store.fill.time.sleep", never)
        assert sorted(ring.fill(ids(3), fixed)) == [3]
        assert CLAIMED <= int(ring.segment.index[3]) < PRESENT


def test_a_claim_on_what_leaves_while_it_is_read_is_given_back() -> None:
    with opened(fixed) as ring, view_of(ring) as other:

        def read(entry: int) -> Any:
            move(ring, 4)
            return odd(entry)

        ring.fill(ids(3), read)
        other.fill(ids(3 + M), fixed)
        holds_exactly(ring, ids(3 + M), fixed)


def test_a_claim_of_another_lap_keeps_the_slot_busy_until_its_claimant_is_gone() -> None:
    with opened(fixed) as ring:

        def claim() -> Claims:
            claims = Claims(Participant(ring.segment), ring.index)
            claims.take(ids(3), M)
            return claims

        with lingering(claim):
            move(ring, M)
            assert len(ring.filler.claims.take(ids(3 + M), M)) == 0
            assert ring.settled(ids(3, 3 + M)).tolist() == [False, False]
        ring.fill(ids(3 + M), fixed)
        holds_exactly(ring, ids(3 + M), fixed)


def test_a_slot_that_another_thread_fills_for_an_earlier_lap_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, go = threading.Event(), threading.Event()

    def slowly(entry: int) -> Any:
        reading.set()
        assert go.wait(60)
        return fixed(entry)

    with opened(fixed) as ring:
        other = threading.Thread(target=lambda: ring.fill(ids(3), slowly))
        other.start()
        assert reading.wait(60)
        move(ring, M)
        monkeypatch.setattr("hotset.store.fill.time.sleep", lambda seconds: go.set())
        ring.fill(ids(3 + M), fixed)
        go.set()
        other.join(60)
        holds_exactly(ring, ids(3 + M), fixed)


def test_after_a_clear_everything_is_absent_and_cursor_and_epoch_are_as_they_were() -> None:
    with opened(variable, cursor=77) as ring:
        ring.segment.live[Live.WINDOW_EPOCH] = 9
        ring.fill(window(ring), variable)
        ring.filler.claims.take(ids(90), 1)
        ring.participant.leave()
        assert ring.clear()
        assert (cursor_of(ring), int(ring.segment.live[Live.WINDOW_EPOCH]), used(ring)) == (77, 9, 0)
        holds_exactly(ring, ids(), variable)
        ring.fill(window(ring), variable)
        holds_exactly(ring, window(ring), variable)


def test_a_store_is_no_ring_and_a_ring_no_store() -> None:
    with opened(fixed) as ring, pytest.raises(SegmentError, match="has a window"):
        Store.attach(ring.segment.address)
    schema = Schema.infer([fixed(0)], keep_order=True)
    store = Store.create(schema, M, 1 << 20, about={})
    with contextlib.closing(store), pytest.raises(SegmentError, match="has a window"):
        Ring.attach(store.segment.address)


@BOTH
def test_a_ring_in_a_file_is_verified_and_used_again(make: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    with opened(make, path=path) as ring:
        ring.fill(window(ring), make)
        with contextlib.closing(Ring.attach(path)) as other:
            assert wrong(contents(other, window(ring)), make) == {}
            move(ring, 5)
            other.fill(window(ring), make)
            at = ring.segment.geometry.rows_at + 6 * ring.segment.geometry.stride + 32
            ring.segment.buffer[at] ^= 1
        assert [problem[:9] for problem in ring.check()] == ["sample 6:"]
        with contextlib.closing(Ring.attach(path)) as other, pytest.warns(UserWarning, match="sample 6"):
            assert other.present(window(ring)).tolist() == [entry != 6 for entry in window(ring)]
        assert ring.check() == [], "its word is gone"


# ---- entries that were tried in vain ---------------------------------------------------------------------


def test_a_sample_that_cannot_be_kept_is_refused_in_its_lap_only() -> None:
    with opened(fixed) as ring:
        ring.fill(window(ring), lambda entry: odd(entry) if entry == 3 else fixed(entry))
        assert ring.settled(window(ring)).all()
        assert not ring.present(ids(3))[0]
        assert ring.check() == []
        assert not ring.settled(ids(3 + M, 3 + M * (GENERATION_MASK + 1) - M)).any()
        move(ring, 4)
        assert ring.settled(window(ring)).tolist() == [True] * 4 + [False] * 4
        ring.fill(window(ring), fixed)
        assert ring.present(window(ring)).all()


def test_a_refused_entry_may_be_claimed() -> None:
    with opened(fixed, cursor=FAR) as ring, view_of(ring) as other:
        ring.refuse(window(ring))
        assert ring.settled(window(ring)).all()
        assert not ring.present(window(ring)).any()
        assert ring.check() == []
        assert sorted(other.fill(window(ring), fixed)) == window(ring).tolist()
        holds_exactly(ring, window(ring), fixed)


def test_what_is_there_or_being_read_is_not_refused() -> None:
    with opened(fixed) as ring, view_of(ring) as other:

        def read(entry: int) -> Any:
            other.refuse(ids(0, 1, 2))
            return fixed(entry)

        ring.fill(ids(1), read)
        holds_exactly(ring, ids(1), fixed)
        assert other.settled(ids(0, 1, 2, 3)).tolist() == [True, True, True, False]


def test_what_a_dead_process_was_reading_can_be_refused() -> None:
    with opened(fixed) as ring:
        in_child(lambda: Claims(Participant(ring.segment), ring.index).take(ids(2), M))
        assert CLAIMED <= int(ring.segment.index[2]) < PRESENT
        ring.refuse(ids(2))
        assert ring.settled(ids(2))[0]


def test_an_exception_of_the_source_refuses_nothing() -> None:
    with opened(fixed) as ring:

        def read(entry: int) -> Any:
            if entry == 2:
                raise KeyError(entry)
            return fixed(entry)

        ring.filler._seconds = 1e-6  # so that they are claimed together
        with pytest.raises(KeyError):
            ring.fill(ids(1, 2, 3), read)
        assert ring.settled(ids(1, 2, 3)).tolist() == [True, False, False]
        assert ring.segment.index[[2, 3]].tolist() == [0, 0]


def test_entries_without_a_row_are_settled_and_the_others_stored() -> None:
    schema = Schema.infer([fixed(0)], keep_order=True)
    with opened(fixed, limit=3 * schema.stride) as ring:
        got = ring.fill(window(ring)[:5], fixed)
        got |= ring.fill(window(ring)[5:], fixed)
        assert sorted(got) == window(ring).tolist()
        assert ring.settled(window(ring)).all()
        holds_exactly(ring, ids(0, 1, 2), fixed)
        assert used(ring) <= 3 * schema.stride


def test_rows_that_were_written_before_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(fixed) as ring:
        ring.fill(window(ring, 6), fixed)
        ring.allocator._affordable = 0
        monkeypatch.setattr(
            "hotset.store.memory_limits.headroom", lambda: Headroom(0, 1, "the machine's memory")
        )
        move(ring, 6)
        ring.fill(ids(range(8, 14)), fixed)
        assert ring.present(ids(range(8, 14))).all()
        ring.fill(ids(6), fixed)
        assert not ring.present(ids(6))[0]
        assert "the machine's memory has no more to give" in str(ring.allocator.why_full)


# ---- room for tails --------------------------------------------------------------------------------------


def sized(lines: Callable[[int], int]) -> Make:
    """Samples with tails of so many lines."""
    return lambda entry: f"{entry} ".ljust(lines(entry) * LINE - 1, "x")


def limit_for(make: Make, slots: int, lines: int) -> int:
    return slots * Schema.infer([make(0), make(1)], keep_order=True).stride + lines * LINE


def test_lines_of_what_has_left_are_given_up_oldest_first_and_no_more_than_needed() -> None:
    make = sized(lambda entry: 5)
    with opened(make, limit=limit_for(make, M, 5 * M - 2)) as ring:
        ring.fill(window(ring, M - 1), make)
        assert ring.present(window(ring, M - 1)).all()
        move(ring, 4)
        ring.fill(ids(M - 1), make)  # three lines were left
        holds_exactly(ring, ids(range(1, M)), make)


def test_lines_of_what_has_not_left_are_never_given_up() -> None:
    make = sized(lambda entry: 5)
    with opened(make, limit=limit_for(make, M, 12)) as ring:
        for step in (0, 1, 1, 2, 3):
            move(ring, cursor_of(ring) + step)
            before = contents(ring, window(ring))
            ring.allocator.reopen()
            got = ring.fill(window(ring), make)
            assert sorted([*before, *got]) == window(ring).tolist()
            assert set(before) <= set(contents(ring, window(ring)))
            assert ring.present(window(ring)).sum() == 2
            assert ring.settled(window(ring)).all()
            assert ring.check() == []


def test_one_look_for_room_serves_many_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    find = ring_module.RingAllocator._find
    monkeypatch.setattr(ring_module.RingAllocator, "_find", lambda room, n: looks.append(n) or find(room, n))
    make = sized(lambda entry: 1 + entry % 4)
    with opened(make, 4096, limit=limit_for(make, 4096, 256 * 64)) as ring:
        for _ in range(3):
            ring.fill(window(ring, 4096), make, keep=False)
            assert ring.present(window(ring, 4096)).all()
            move(ring, cursor_of(ring) + 2048)
        assert len(looks) < 8192 * 2.5 / 64 * 1.5


def test_in_a_tight_budget_many_laps_fit_and_the_limit_holds() -> None:
    def lines(entry: int) -> int:
        return 1 + entry * entry * 7919 % 23

    make, slots, laps = sized(lines), 32, often(20, 50)
    most = max(sum(map(lines, range(c, c + slots))) for c in range((laps + 2) * slots))
    limit = limit_for(make, slots, most + 2 * 23)
    with opened(make, slots, limit=limit) as ring, view_of(ring) as other:
        views = [ring, other]
        while cursor_of(ring) < laps * slots:
            for view in views:
                view.allocator.reopen()
                for part in np.array_split(window(ring, slots), 4):
                    view.fill(part, make, keep=False)
            assert used(ring) <= limit
            assert ring.settled(window(ring, slots)).all()
            # All but a few that found no gap as long as they are.
            assert ring.present(window(ring, slots)).mean() > 0.8
            assert wrong(contents(other, window(ring, slots)), make) == {}
            views.reverse()
            move(ring, cursor_of(ring) + 5)
        assert ring.check() == []


def test_what_is_written_and_not_published_yet_is_in_use() -> None:
    make = sized(lambda entry: 4)
    with opened(make, limit=limit_for(make, M, 4 * M)) as ring, view_of(ring) as other:
        write = ring.filler._records.write

        def write_and_wait(records: Any) -> Any:
            words = write(records)
            other.allocator.reopen()
            other.fill(ids(5, 6, 7), make)  # finds room for its own before the first is published
            return words

        ring.filler._records.write = write_and_wait  # type: ignore[method-assign]
        ring.fill(ids(0), make)
        holds_exactly(ring, ids(0, 5, 6, 7), make)


def test_what_is_published_while_another_looks_for_room_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    make = sized(lambda entry: 4)
    with opened(make, limit=limit_for(make, M, 4 * M)) as ring, view_of(ring) as other:
        records = ring_module.RingIndex.records
        put = ring.index.put
        meanwhile: list[Callable[[], None]] = []

        def records_and_then(index: Any) -> Any:
            found = records(index)
            while index is other.allocator._index and meanwhile:
                meanwhile.pop()()  # published and settled, after the words were read
            return found

        def put_amid(entries: Ids, words: Any) -> None:
            if isinstance(words, int):
                return put(entries, words)  # a claim
            meanwhile.append(lambda: (put(entries, words), ring.allocator.settle())[0])
            other.fill(ids(4), make)
            return None

        monkeypatch.setattr(ring_module.RingIndex, "records", records_and_then)
        monkeypatch.setattr(ring.index, "put", put_amid)
        ring.fill(ids(0), make)
        holds_exactly(ring, ids(0, 4), make)


def test_the_rest_of_an_extent_is_in_use_behind_what_was_published_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = sized(lambda entry: 4)
    with opened(make, limit=limit_for(make, M, 256 * 40)) as ring, view_of(ring) as other:
        put = ring.index.put

        def put_and_look(entries: Ids, words: Any) -> None:
            put(entries, words)
            if not isinstance(words, int):
                other.fill(ids(4), make)  # published, and not settled yet

        monkeypatch.setattr(ring.index, "put", put_and_look)
        ring.filler._seconds = 1e-6  # so that both are written at once
        ring.fill(ids(0, 1), make)
        ring.fill(ids(2, 3), make)
        holds_exactly(ring, ids(range(5)), make)


def test_an_extent_that_a_clear_took_away_is_not_used() -> None:
    make = sized(lambda entry: 4)
    with opened(make, limit=1 << 22) as ring, view_of(ring) as other:
        ring.fill(ids(0), make)
        assert other.clear()
        other.fill(ids(1, 2), make)
        ring.fill(ids(3, 4), make)
        holds_exactly(ring, ids(1, 2, 3, 4), make)


def test_a_slots_next_holder_begins_without_an_extent() -> None:
    make = sized(lambda entry: 4)
    with opened(make, limit=1 << 22) as ring:
        ring.fill(ids(0), make)
        row = ring.segment.slots[ring.participant.slot]
        assert row[Slot.LINE_END] > row[Slot.LINE_NEXT]
        ring.participant.leave()
        with view_of(ring) as other:
            other.fill(ids(1, 2, 3), make)
            ring.fill(ids(4), make)
            holds_exactly(ring, ids(range(5)), make)


def test_the_check_names_records_that_share_lines() -> None:
    make = sized(lambda entry: 3)
    with opened(make) as ring:
        ring.fill(ids(1, 2, 4), make)
        geometry, view = ring.segment.geometry, memoryview(ring.segment.buffer)
        one, other = (geometry.rows_at + row * geometry.stride for row in (1, 3))
        view[other : other + geometry.stride] = view[one : one + geometry.stride]
        ring.segment.index[3] = ring.segment.index[1] + 2
        assert ring.check() == ["sample 3: its record's checksum does not match"]
        # Now signed, as a writer does who was given the lines of another.
        length, generation = np.frombuffer(view, np.uint32, 2, other).tolist()
        line, _ = split_tail(int(np.frombuffer(view, np.int64, 1, other + RECORD_HEADER)[0]))
        start = geometry.lines_at + line * LINE
        tail = view[start : start + length - (geometry.stride - RECORD_HEADER)]
        row = view[other + RECORD_HEADER : other + geometry.stride]
        view[other + 8 : other + 12] = checksum(3, length, generation, row, tail).to_bytes(4, "little")
        assert ring.check() == [f"samples 1 and 3 share line {line}"]


# ---- readers beside writers ------------------------------------------------------------------------------


class Fresh:
    def tensor(self, offset: int, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


def gather_for(ring: Ring, entry: int) -> tuple[Gather, Any]:
    collate, padded = bound(pad(0), ring.schema)
    gather = Gather(ring, collate, padded)
    gather.compare(entry)
    return gather, collate


@BOTH
@pytest.mark.parametrize("start", [0, FAR])
def test_a_gathered_batch_is_the_collate_functions(make: Make, start: int) -> None:
    with opened(make, cursor=start) as ring:
        ring.fill(window(ring), make)
        gather, collate = gather_for(ring, start)
        for _ in range(3):
            for wanted in (window(ring), window(ring)[::-3], ids(cursor_of(ring) + 2)):
                copy = gather.prepare(wanted, lambda size: Fresh())
                assert copy is not None
                copy.run()
                batch = gather.finish(copy, lambda done, offset: done)
                equal_batches(batch, collate([make(entry) for entry in wanted.tolist()]))
            assert gather.prepare(window(ring, M + 1), lambda size: Fresh()) is None
            move(ring, cursor_of(ring) + 5)
            ring.fill(window(ring), make)


@BOTH
@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
@pytest.mark.parametrize("what", ["overwritten", "claimed", "refused", "cleared and filled anew"])
def test_a_batch_whose_entries_are_overtaken_is_none(make: Make, when: str, what: str) -> None:
    with opened(make) as ring, view_of(ring) as other:
        ring.fill(window(ring), make)
        gather, _ = gather_for(ring, 0)
        copy = gather.prepare(window(ring), lambda size: Fresh())
        assert copy is not None
        if when == "after the copy":
            copy.run()
        move(ring, 1)
        if what == "overwritten":
            other.fill(ids(M), make)
        elif what == "claimed":
            assert len(other.filler.claims.take(ids(M), 1)) == 1
        elif what == "refused":
            other.refuse(ids(M))
        else:
            other.clear()
            move(ring, 0)
            other.fill(window(ring), lambda entry: make(entry + 5))
        if when == "before the copy":
            copy.run()
        assert gather.finish(copy, lambda done, offset: done) is None


def test_a_batch_whose_entries_lines_were_given_up_is_none() -> None:
    make = sized(lambda entry: 5)
    with opened(make, limit=limit_for(make, M, 5 * (M - 1))) as ring, view_of(ring) as other:
        ring.fill(window(ring, M - 1), make)
        gather, _ = gather_for(ring, 0)
        copy = gather.prepare(ids(0, 1), lambda size: Fresh())
        assert copy is not None
        move(ring, 1)
        other.fill(ids(M - 1), make)
        assert other.present(ids(M - 1))[0]
        copy.run()
        assert gather.finish(copy, lambda done, offset: done) is None


@BOTH
def test_a_sample_that_is_overwritten_while_it_is_read_is_none(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(make) as ring, view_of(ring) as other:
        ring.fill(window(ring), make)
        block = ring._block

        def meanwhile(size: int) -> Any:
            move(ring, 2)
            other.fill(ids(M + 1), make)
            return block(size)

        monkeypatch.setattr(ring, "_block", meanwhile)
        assert ring.read(ids(1)) is None
        assert ring.read(ids(3)) is not None


@pytest.mark.parametrize("torn", [-1, tail_word(0, 1 << 10)], ids=["beyond the segment", "long"])
def test_what_a_half_written_row_says_of_its_tail_is_not_believed(
    torn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(variable) as ring, view_of(ring) as other:
        ring.fill(window(ring), variable)
        gather, _ = gather_for(ring, 0)
        tails = ring.tails

        def meanwhile(rows: Any) -> Any:
            move(ring, 2)
            assert len(other.filler.claims.take(ids(M + 1), 1)) == 1
            ring.allocator._tails[1] = torn  # type: ignore[index]
            return tails(rows)

        def asked(size: int) -> Any:
            raise AssertionError(f"{size:,} bytes were asked for")

        monkeypatch.setattr(ring, "tails", meanwhile)
        monkeypatch.setattr(ring, "_block", asked)
        assert ring.read(ids(1)) is None
        other.filler.claims.release(ids(M + 1))
        move(ring, 0)
        ring.segment.index[1] = ring.segment.index[2] - 1
        assert gather.prepare(ids(0, 1), asked) is None


# ---- against a dict --------------------------------------------------------------------------------------


class RingMachine(RuleBasedStateMachine):
    """The dict says what the ring may hold; the ring may have less of what has left, and of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, int] = {}
        self.refused: set[int] = set()
        self.views: list[Ring] = []
        self.readings = 0

    @initialize(
        kind=st.sampled_from(["fixed", "variable"]),
        limit=st.sampled_from([0, 900, 3000, 6000, 1 << 20]),
        start=st.sampled_from([0, 5, FAR, (1 << 44) + 3]),
    )
    def create(self, kind: str, limit: int, start: int) -> None:
        self.kind, self.limit = kind, limit
        schema = Schema.infer([self.version(0, 0), self.version(1, 0)], keep_order=True)
        self.views = [Ring.create(schema, M, limit, about={})]
        move(self.ring, start)

    def teardown(self) -> None:
        for view in self.views:
            view.close()

    @property
    def ring(self) -> Ring:
        return self.views[0]

    @property
    def cursor(self) -> int:
        return cursor_of(self.ring)

    def version(self, entry: int, reading: int) -> Any:
        """An entry's sample at its ``reading``-th reading; some cannot be kept, some have other forms or
        large tails."""
        if entry % 11 == 7:
            return odd(entry)
        if entry % 7 == 3:
            return own(entry) | {"reading": reading}
        if self.kind == "fixed":
            return torch.tensor([entry, reading])
        length = 1500 if entry % 5 == 4 else entry * 7 % 300
        return {"image": torch.tensor([entry]), "text": f"{entry}/{reading} " + "x" * length}

    def fits(self, entry: int) -> bool:
        return entry % 11 != 7

    def entries(self, offsets: list[int]) -> Ids:
        return np.maximum(self.cursor + ids(offsets), 0)

    def took_turns(self) -> None:
        """Forget of the model what the slots have others' records, refusals or claims in place of."""
        for entry in [e for e in self.model if e < self.cursor]:
            if not self.ring.present(ids(entry))[0]:
                del self.model[entry]
        self.refused = {entry for entry in self.refused if entry >= self.cursor}

    offsets = st.lists(st.integers(-M, M - 1), min_size=1, max_size=M)
    view = st.integers(0, 2)

    @rule(view=view, offsets=offsets, keep=st.booleans(), rested=st.booleans())
    def fill(self, view: int, offsets: list[int], keep: bool, rested: bool) -> None:
        ring, wanted = self.views[view % len(self.views)], self.entries(offsets)
        here = set(wanted[ring.present(wanted)].tolist())
        last: dict[int, int] = {}
        if rested:
            ring.allocator.reopen()
        was_full = ring.allocator.is_full

        def read(entry: int) -> Any:
            assert entry not in last
            self.readings += 1
            last[entry] = self.readings
            return self.version(entry, self.readings)

        got = ring.fill(wanted, read, keep=keep)
        assert set(last) == set(wanted.tolist()) - here, "each absent entry is read once"
        for entry, reading in last.items():
            stored = bool(self.ring.present(ids(entry))[0])
            assert (entry in got) == (keep or not stored)
            if stored:
                assert self.fits(entry)
                assert entry >= self.cursor
                self.model[entry] = reading
                self.refused.discard(entry)
            elif entry >= self.cursor:
                self.refused.add(entry)
                assert not self.fits(entry) or self.limit < 1 << 20
                roomless = entry % M >= ring.segment.geometry.rows
                assert not self.fits(entry) or was_full or roomless or ring.allocator.why_full is not None
        for entry, value in got.items():
            assert difference(value, self.version(entry, last[entry])) is None
        self.took_turns()

    @rule(step=st.integers(1, M))
    def boundary(self, step: int) -> None:
        move(self.ring, self.cursor + step)
        self.took_turns()

    @rule(view=view, offsets=offsets)
    def refuse(self, view: int, offsets: list[int]) -> None:
        wanted = self.entries(offsets)
        self.views[view % len(self.views)].refuse(wanted)
        self.refused |= {
            entry for entry in wanted.tolist() if entry >= self.cursor and entry not in self.model
        }
        self.took_turns()

    @rule(view=view)
    def clear(self, view: int) -> None:
        assert self.views[view % len(self.views)].clear()
        self.model.clear()
        self.refused.clear()
        assert used(self.ring) == 0

    @precondition(lambda self: len(self.views) < 3)
    @rule()
    def attach(self) -> None:
        self.views.append(Ring.attach(self.ring.segment.address))

    @precondition(lambda self: len(self.views) > 1)
    @rule(view=st.integers(1, 2))
    def close(self, view: int) -> None:
        self.views.pop(view % (len(self.views) - 1) + 1).close()

    @rule(view=view)
    def leave(self, view: int) -> None:
        self.views[view % len(self.views)].participant.leave()

    @rule(offsets=offsets)
    def claim_and_vanish(self, offsets: list[int]) -> None:
        gone = Participant(self.ring.segment)
        taken = Claims(gone, self.ring.index).take(self.entries(offsets), M)
        gone.leave()
        assert not set(taken.tolist()) & set(self.model)
        self.refused -= set(taken.tolist())
        self.took_turns()

    @rule(view=view, offsets=offsets)
    def fill_in_a_child_that_is_killed(self, view: int, offsets: list[int]) -> None:
        ring, wanted = self.views[view % len(self.views)], self.entries(offsets)

        def read(entry: int) -> Any:
            if entry == wanted[-1]:
                os.kill(os.getpid(), signal.SIGKILL)
            return self.version(entry, 0)

        ended(child(lambda: ring.fill(wanted, read)))
        for entry in wanted.tolist():
            if entry in self.model:
                continue
            if self.ring.present(ids(entry))[0]:
                self.model[entry] = 0
            if self.ring.settled(ids(entry))[0] and entry not in self.model and entry >= self.cursor:
                self.refused.add(entry)
            else:
                self.refused.discard(entry)
        self.took_turns()

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not self.views:
            return
        assert self.ring.check() == []
        assert used(self.ring) <= self.limit
        around = np.arange(max(self.cursor - 2 * M, 0), self.cursor + 2 * M)
        for view in self.views:
            assert around[view.present(around)].tolist() == sorted(e for e in self.model if e >= around[0])
            for entry, value in contents(view, around).items():
                assert difference(value, self.version(entry, self.model[entry])) is None
            due = window(view)
            roomless = {e for e in due.tolist() if e % M >= view.segment.geometry.rows}
            known = {e for e in self.model if e in due} | self.refused | roomless
            assert set(due[view.settled(due)].tolist()) == known


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(
    max_examples=often(10, 150), stateful_step_count=20, deadline=None, database=None
)
