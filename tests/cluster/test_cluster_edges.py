"""Edges of a shared cache: who is waited for, what has room, what is promised, what is asked for ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import ids
from torch.utils.data.distributed import DistributedSampler

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

import machines
from machines import town
from samples import big_image_and_label as image
from test_cluster_boundary import Four, N, R, four, in_first_epoch

import hotset
from hotset.cluster.boundary import RingShelf
from hotset.cluster.remote_cache import RemoteCache
from hotset.cluster.wire_records import ABSENT, PROMISED
from hotset.store.format import LINE, PRESENT, Live, Slot
from hotset.store.ring import Ring
from hotset.store.schema import Schema
from hotset.store.store import Store

SLOTS = 16
LARGE = 23  # the entry whose tail finds no room

# ---- who is waited for -------------------------------------------------------------------------------------


def test_who_has_not_loaded_a_state_and_was_further_is_not_waited_for() -> None:
    with in_first_epoch() as made:
        state = made.place("a").rank.position
        for epoch in range(1, 5):
            for place in made.places:
                place.help()
            made.begin(epoch)
        both = [made.place(name) for name in ("a", "c")]
        for place in both:
            place.rank.go_to(state, place.ring)
        made.fill_residents()
        for place in both:
            place.bring(place.owned(np.arange(N, N + R)))
        assert len(made.place("b").owned(np.arange(N, N + R)))
        made.begin(1, "a", "c")
        assert [place.cursor for place in both] == [R, R]


def test_who_did_not_hear_of_a_state_and_loads_one_is_followed_by_who_did_not_hear_of_that() -> None:
    with in_first_epoch() as made:
        a, _, c = made.places
        state = a.rank.position
        for epoch in range(1, 4):
            for place in made.places:
                place.help()
            made.begin(epoch)
        made.deaf = {"c"}
        a.rank.go_to(state, a.ring)
        for epoch in (1, 2):
            made.begin(epoch, "a", "b")
        made.deaf = {"a"}
        c.rank.go_to(state, c.ring)
        made.deaf = set()
        made.begin(1, "c")
        assert {each[:2] for each in made.standings} == {(2, 2)}
        assert c.rank.position.epoch == 1


# ---- that there is room again is noticed -------------------------------------------------------------------


def numbers(entry: int) -> torch.Tensor:
    return torch.full((1000,), float(entry))


def text(entry: int) -> str:
    return f"{entry} ".ljust((200 if entry == LARGE else 1) * LINE - 1, "x")


@contextlib.contextmanager
def part(make: Callable[[int], Any], limit: Callable[[Schema], int], **more: Any) -> Iterator[Ring]:
    """A machine's part of a window's ring, on which somebody trains."""
    schema = Schema.infer([make(0), make(1)], as_lies=True)
    about = {"name": "test", "shared": True}
    with contextlib.closing(Ring.create(schema, SLOTS, limit(schema), about=about, **more)) as ring:
        ring.segment.live[Live.EPOCH] = 1
        ring.member.row[Slot.BEGUN] = 1
        yield ring


def ready(ring: Ring, first: int, count: int) -> int:
    """How many of these entries the machine says are ready, to who comes to the boundary."""
    words = np.array([0, first, count, 0, 0], np.int64)
    return int(RingShelf(ring, bytes(16), lambda: None).window(words)[5])


def test_a_machine_that_had_no_lines_for_one_entry_is_waited_for_again() -> None:
    with part(text, lambda schema: SLOTS * schema.stride + 40 * LINE) as ring:
        ring.fill(np.arange(SLOTS), text)
        for lap in range(1, 4):  # every row has its memory, and one tail of these is too large
            ring.segment.live[Live.CURSOR] = lap * SLOTS
            ring.room.reopen()  # as after half a second
            entries = np.arange(lap * SLOTS, (lap + 1) * SLOTS)
            ring.fill(entries, text)
        assert ring.present(entries).all()
        ring.segment.live[Live.CURSOR] = 4 * SLOTS
        assert ready(ring, 4 * SLOTS, 8) == 0


def test_a_row_that_the_file_system_had_no_memory_for_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with part(numbers, lambda schema: SLOTS * schema.stride, path=str(tmp_path / "ring")) as ring:
        assert ring.segment.bounded
        ring.fill(np.arange(8), numbers)
        with monkeypatch.context() as patch:
            patch.setattr(ring.segment, "reserve", lambda at, size: False)
            for _ in range(20):
                ring.room.reopen()  # as after half a second
                ring.fill(np.array([9]), numbers)
        assert int(ring.segment.live[Live.ROWS_NEXT]) == 8
        ring.room.reopen()
        ring.fill(np.arange(8, SLOTS), numbers)
        assert int((ring.segment.index >= PRESENT).sum()) == SLOTS


def test_nobody_waits_for_an_entry_that_has_left() -> None:
    with part(numbers, lambda schema: 1 << 20) as ring:
        ring.segment.live[Live.CURSOR] = 4
        shelf, memory = RingShelf(ring, bytes(16), lambda: None), np.empty(1 << 16, np.uint8)
        assert shelf.take(ids(2, 5), memory, claim=True).generations.tolist() == [ABSENT, ABSENT]
        assert shelf.take(ids(2, 5), memory, claim=True).generations.tolist() == [ABSENT, PROMISED]


def test_what_could_not_be_read_is_promised_no_longer() -> None:
    with four() as made:
        good, bad = sorted(made.sample(order) for order in ("bc", "bd"))

        def read(index: int) -> str:
            if index == bad:
                raise OSError("no such sample")
            return made.text(index)

        errand = made.errand("a")
        errand._read = read
        with pytest.raises(OSError, match="no such sample"):
            errand.run(ids(good, bad), [])
        errand._settle()
        memory = np.empty(1 << 16, np.uint8)
        found = made.peers["b"].shelf.take(ids(good, bad), memory, claim=True).generations.tolist()
        assert found[0] >= 0
        assert found[1] == ABSENT, "who asks next may read it at once"


# ---- what is asked for before it is wanted -----------------------------------------------------------------


def neighbours(made: Four, me: str) -> RemoteCache:
    """A machine's way to the other three."""
    found = RemoteCache(0, bytes(16))
    company: Any = made.errand(me)._company
    company.look = company.count = lambda **how: None  # whom it knows it was told, and nobody adds up
    found._company = company
    return found


def asked(made: Four) -> list[int]:
    """What the machines were asked for, however often."""
    return sorted(sample for peer in made.peers.values() for some in peer.asked for sample in some)


def test_what_was_asked_for_ahead_is_not_asked_for_again() -> None:
    with four() as made:
        here, *there = (made.sample(order) for order in ("bd", "bc", "c"))
        for name, sample in zip("abc", (here, *there), strict=True):  # a replica is here
            made.peers[name].store.fill(ids(sample), made.text)
        store, way = made.peers["a"].store, neighbours(made, "a")
        batch = ids(there[1], here, there[0], there[1])  # in no order, one is here, and one comes twice
        way.announce(store, batch)
        assert asked(made) == sorted(there), "each once, and what is here not at all"
        assert sorted(way.bring(store, batch, made.text).ids().tolist()) == sorted(there)
        assert asked(made) == sorted(there)
        assert sorted(way.bring(store, batch, made.text).ids().tolist()) == sorted(there)
        assert asked(made) == sorted(2 * there), "what has come was for one batch"
        assert made.reads == []


def test_only_what_has_no_room_here_is_passed_on() -> None:
    with four() as made:
        kept, other = made.sample("ab"), made.sample("ac")
        store = made.peers["a"].store
        store.fill(ids(kept), made.text)
        store.room.why_full = "its memory limit is reached"
        assert neighbours(made, "a").pass_on(store, {each: made.text(each) for each in (kept, other)})
        assert (made.holders(kept), made.holders(other)) == ("a", "c")


class _Asking(machines._Trainer):
    def asks(self, dealt: bool) -> list[list[int]]:
        """What a loader whose order is known asks for ahead in an epoch."""
        found: list[list[int]] = []
        way = self._cached._remote
        announce = way.announce

        def heard(store: Store, wanted: Any) -> None:
            found.append(wanted.tolist())
            announce(store, wanted)

        way.announce = heard
        try:
            sampler: Any = DistributedSampler(self._cached, 1, 0, shuffle=False) if dealt else None
            for data, labels in hotset.DataLoader(self._cached, batch_size=10, sampler=sampler):
                batch = labels.tolist()
                assert self._differing(batch, list(zip(data, batch, strict=True))) == []
        finally:
            del way.announce
        return found


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_the_next_batch_is_asked_for_ahead_unless_it_is_gathered_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, dealt: bool
) -> None:
    monkeypatch.setattr(machines, "_Trainer", _Asking)
    with town(tmp_path, image, 120, count=count) as made:
        trainer = made.trainers()[0]
        later = np.arange(10, 120).reshape(-1, 10).tolist()
        assert trainer.call("asks", dealt) == later, "not all of any batch is here"
        assert made.reads() == 120
        found = trainer.call("asks", dealt)
        if count == 1:  # all is here, and several batches are gathered at once
            assert len(found) < len(later) // 2
        else:
            assert found == later
        assert made.reads() == 0
