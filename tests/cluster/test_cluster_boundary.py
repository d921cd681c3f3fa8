"""The boundary of a window that machines share: in whatever order messages come, and whoever is not there.

Its logic alone first, with rings and ranks that are real, in one process, and messages that are calls. Then
what real processes on real machines get from it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from helpers import eventually
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from samples import big_image_and_label as image
from sources import Closed
from stores import attached
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

import machines
from machines import MIB, NEVER, Town, Trainer, town

import hotset
from hotset.cluster import batch_fetch as errands
from hotset.cluster import store_service as shelf
from hotset.cluster import wire_records as records
from hotset.cluster.batch_fetch import BatchFetch, Brought
from hotset.cluster.boundary import Boundary, RingShelf
from hotset.cluster.keys import Keys
from hotset.cluster.membership import Member, Membership
from hotset.cluster.ownership import Ownership
from hotset.cluster.peers import Peers
from hotset.cluster.pending_request import Answer
from hotset.cluster.remote_cache import RemoteCache
from hotset.cluster.store_service import StoreService
from hotset.cluster.wire_records import (
    ABSENT,
    LEFT,
    PROMISED,
    ROOMLESS,
    CacheIdentity,
    Longs,
    WireRecords,
    sound,
)
from hotset.dataset import active_window as residents
from hotset.dataset.active_window import ActiveWindow, WindowPosition
from hotset.dataset.window import Sizes, Window
from hotset.errors import SegmentError
from hotset.policy.rendezvous import Placement
from hotset.store.claims import Ids
from hotset.store.format import LINE, PRESENT, Live
from hotset.store.ring import Ring, WindowState
from hotset.store.schema import Schema
from hotset.store.store import Store

NAMES = ("a", "b", "c")
SAMPLES, N, R = 200, 20, 6
D = 240
WINDOW = Window(N, replace=0.3, seed=1)

# ---- machines in one process -----------------------------------------------------------------------------


def pair(entry: int) -> torch.Tensor:
    return torch.tensor([float(entry), 0.0])


class Helpers:
    """Where helper processes would be: notes what they are asked for."""

    def __init__(self, store: Ring, read: Callable[[int], Any], **how: Any) -> None:
        self.wanted: Ids = np.empty(0, np.int64)

    def ask(self, entries: Ids) -> None:
        self.wanted = entries

    def raise_errors(self) -> None:
        pass

    def close(self) -> None:
        pass


class Place:
    """A machine: the ring as its node has it, and its one rank."""

    def __init__(self, circle: Circle, name: str) -> None:
        self._circle, self.name = circle, name
        about = {"name": "test", "shared": True}
        schema = Schema.infer([pair(0)], as_lies=True)
        self.node = Ring.create(schema, circle.sizes.slots, 1 << 20, about=about)
        self.owners = Ownership(name, circle.members)
        self.shelf = RingShelf(self.node, bytes(16), lambda: self.owners)
        self.begin_job()

    def begin_job(self) -> None:
        """Have a rank that knows of nothing."""
        ring = Ring.attach(self.node.segment.address)
        self.ring: Ring | None = ring
        boundary: Any = Boundary(Line(self._circle, self))  # type: ignore[arg-type]
        wait = self._circle.wait
        self.rank = ActiveWindow(self._circle.sizes, ring, pair, "test", wait=wait, boundary=boundary)

    def end_job(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.ring = None

    def begin(self, epoch: int) -> None:
        self.rank.begin(epoch, self.ring, 1, None, lambda sentence: None)

    @property
    def cursor(self) -> int:
        return self.rank.position.cursor

    def owned(self, entries: Ids) -> Ids:
        """Those of these entries that it owns, and so prepares."""
        slots = entries % len(self.node)
        theirs = [some for _, some in self.owners.others(entries, slots)]
        return np.setdiff1d(entries, np.concatenate([entries[:0], *theirs]))

    def bring(self, entries: Sequence[int] | Ids) -> None:
        self.node.fill(np.array(entries, np.int64), pair)

    def help(self, most: int = SAMPLES) -> None:
        """What its helpers do: the first few of what they were asked for and have not brought yet."""
        helpers: Any = self.rank._background
        wanted = helpers.wanted if helpers is not None else np.empty(0, np.int64)
        self.bring(wanted[~self.node.settled(wanted)][:most])

    def close(self) -> None:
        self.end_job()
        self.node.close()


class Circle:
    """Machines that share a window.

    Attributes:
        deaf: the names of those whose nodes do not answer.
        step: called while each answer is on its way, and before anything is decided.
    """

    def __init__(self, window: Window = WINDOW, names: Sequence[str] = NAMES) -> None:
        self.sizes, self.wait = Sizes.of(window, SAMPLES, 1), window.wait
        self.members = tuple(Member(name, "", "", "", 1 << 20) for name in names)
        self.deaf: set[str] = set()
        self.step: Callable[[], None] = lambda: None
        self.places = [Place(self, name) for name in names]

    def place(self, name: str) -> Place:
        return next(place for place in self.places if place.name == name)

    def begin(self, epoch: int, *names: str) -> None:
        for name in names or NAMES:
            self.place(name).begin(epoch)

    def fill_residents(self) -> None:
        """What the first epoch does, by using them."""
        for place in self.places:
            place.bring(place.owned(np.arange(N)))

    @property
    def standings(self) -> list[WindowState]:
        return [WindowState.of(place.node) for place in self.places]

    @property
    def cursors(self) -> list[int]:
        return [place.cursor for place in self.places]


class Line:
    """A machine's neighbours, as far as a boundary uses them."""

    def __init__(self, circle: Circle, place: Place) -> None:
        self._circle, self._place = circle, place

    def owners(self, ring: Ring) -> Ownership:
        return self._place.owners

    def me(self, ring: Ring) -> str:
        self._circle.step()  # between what was heard and what is decided
        return self._place.name

    def names(self, ring: Ring) -> list[str]:
        return [place.name for place in self._circle.places if place is not self._place]

    def say(self, ring: Ring, words: Longs, names: Sequence[str] | None = None) -> dict[str, Longs]:
        found = {}
        for name in self.names(ring) if names is None else names:
            if name not in self._circle.deaf:
                found[name] = self._circle.place(name).shelf.window(words)
            self._circle.step()
        return found


@contextlib.contextmanager
def circle(window: Window = WINDOW) -> Iterator[Circle]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residents, "PrefetchPool", Helpers)
        patch.setattr(shelf, "LEASE", NEVER)
        made = Circle(window)
        try:
            yield made
        finally:
            for place in made.places:
                place.close()


@contextlib.contextmanager
def in_first_epoch(window: Window = WINDOW) -> Iterator[Circle]:
    """All ranks are in their first epoch, have used its samples, and nothing that comes next is ready."""
    with circle(window) as made:
        made.begin(0)
        made.fill_residents()
        yield made


# ---- one after the other ---------------------------------------------------------------------------------


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("late", NAMES)
def test_the_cursor_goes_up_to_the_first_entry_that_its_owner_has_not_got(first: str, late: str) -> None:
    with in_first_epoch() as made:
        for name in NAMES:
            if name != late:
                made.place(name).help()
        missing = int(made.place(late).owned(np.arange(N, N + R))[0]) - N
        assert missing < R
        made.begin(1, first)
        assert set(made.standings) == {WindowState(0, 2, missing, R - missing, R - missing)}, "all are told"
        made.begin(1)
        assert made.cursors == [missing] * 3


def test_what_was_late_is_due_again_and_counted_once() -> None:
    with in_first_epoch() as made:
        for epoch in range(1, 4):  # nobody prepares anything
            made.begin(epoch)
        assert made.standings[0] == WindowState(0, 4, 0, 3 * R, 3 * R)
        behind = 3 * R
        for epoch in range(4, 9):
            for place in made.places:
                place.help()
            made.begin(epoch)
            ready = min(R + behind, 2 * R)
            behind += R - ready
            assert set(made.standings) == {WindowState(0, epoch + 1, R * epoch - behind, behind, 3 * R)}
        assert behind == 0


def test_a_machine_without_a_rank_is_told_and_not_waited_for() -> None:
    with in_first_epoch() as made:
        made.place("b").end_job()
        made.place("a").help()
        made.place("c").help()
        made.begin(1, "c")
        assert set(made.standings) == {WindowState(0, 2, R, 0, 0)}


def test_a_machine_whose_rank_has_begun_nothing_is_not_waited_for() -> None:
    with circle() as made:
        made.begin(0, "a", "c")
        made.fill_residents()
        made.place("a").help()
        made.place("c").help()
        made.begin(1, "c")
        assert made.place("c").cursor == R


def test_a_rank_that_trains_no_more_is_waited_for_once() -> None:
    with in_first_epoch() as made:
        for epoch in range(1, 4):
            made.place("a").help()
            made.place("c").help()
            made.begin(epoch, "a", "c")
            missing = int(made.place("b").owned(np.arange(N, N + R))[0]) - N
            assert (made.place("a").cursor == missing) == (epoch <= 2)
        assert made.place("a").cursor > R


def test_a_slots_next_holder_has_begun_nothing() -> None:
    with in_first_epoch() as made:
        for place in made.places:
            place.end_job()
            place.begin_job()
            assert place.ring is not None
            assert place.ring.member.slot >= 0
        made.begin(0, "b")
        made.place("b").help()
        made.begin(1, "b")
        assert made.place("b").cursor == R


@pytest.mark.parametrize("unheard", NAMES)
def test_who_did_not_hear_of_a_state_follows_those_who_did(unheard: str) -> None:
    with in_first_epoch() as made:
        state = made.places[0].rank.position
        for epoch in range(1, 4):
            for place in made.places:
                place.help()
            made.begin(epoch)
        made.deaf = {unheard}
        others = [place for place in made.places if place.name != unheard]
        others[0].rank.go_to(state, others[0].ring)
        other = made.place(unheard)
        assert WindowState.of(other.node)[:3] == (0, 4, 3 * R)
        leased = other.owned(np.arange(4 * R + N - 1, 3 * R + N - 1, -1))[:1]
        other.shelf.take(leased, np.empty(1 << 16, np.uint8), claim=True)  # somebody reads it at this moment
        made.deaf = set()
        made.begin(1, others[0].name)
        assert {each[:2] for each in made.standings} == {(1, 2)}, "it is told at the next boundary"
        assert other.node.era() == 2
        assert {each.cursor for each in made.standings} <= set(range(R + 1))
        assert not other.node.settled(np.arange(3 * R, 3 * R + N)).any(), "and has what it had forgotten"


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_loads_a_state_after_another_has_begun_from_it_changes_nothing(wait: bool) -> None:
    window = Window(N, replace=0.3, seed=1, wait=wait)
    with in_first_epoch(window) as made:
        state = made.places[0].rank.position
        for epoch in range(1, 4):
            for place in made.places:
                place.help()
            made.begin(epoch)
        first, *others = made.places
        first.rank.go_to(state, first.ring)
        first.begin(1)
        mine = first.owned(np.arange(first.cursor, first.cursor + N))
        first.bring(mine)
        before = made.standings
        for place in others:
            place.rank.go_to(state, place.ring)
            place.begin(1)
        assert made.standings == before
        assert made.cursors == [first.cursor] * 3
        assert first.node.present(mine).all(), "what it has read is still there"


def test_a_window_leads_from_one_place_to_the_next_and_no_further() -> None:
    sizes = Sizes.of(WINDOW, SAMPLES, 1)
    at = WindowState(1, 3, 2 * R, 0, 0)
    for epoch, cursor, behind, leads in [
        (3, 2 * R, 0, True),
        (3, 2 * R + 1, 0, False),
        (3, 2 * R - 1, 1, False),
        (4, 3 * R, 0, True),
        (4, 3 * R - 1, 1, True),
        (4, 2 * R, R, True),
        (4, 2 * R, 0, False),
        (4, 3 * R + 1, 0, False),
        (5, 4 * R, 0, False),
        (5, 3 * R, 0, False),
        (2, R, 0, False),
    ]:
        assert sizes.leads(at, WindowState(0, epoch, cursor, behind, 9)) == leads


def test_who_was_left_out_once_is_not_level_with_who_is_left_out_next() -> None:
    with in_first_epoch() as made:
        state = made.places[0].rank.position
        for deaf in ("a", "b", "c"):
            for epoch in (1, 2, 3):
                for place in made.places:
                    place.help()
                made.begin(epoch, *(name for name in NAMES if name != deaf))
            made.deaf = {deaf}
            who = next(place for place in made.places if place.name != deaf)
            who.rank.go_to(state, who.ring)
            made.deaf = set()
            made.begin(1, who.name)
            assert {each.epoch for each in made.standings} == {2}
        assert made.standings[0].loads == 3


def test_where_nobody_has_any_resident_all_that_are_due_go_in() -> None:
    with in_first_epoch() as made:
        for place in made.places:
            assert place.node.clear()
        made.begin(1)
        assert made.cursors == [R] * 3


@pytest.mark.parametrize("first", NAMES)
def test_who_alone_has_lost_its_memory_is_waited_for(first: str) -> None:
    with in_first_epoch() as made:
        for name in ("a", "b"):
            made.place(name).help()
        assert made.place("c").node.clear()
        made.begin(1, first)
        assert made.standings[0].cursor == int(made.place("c").owned(np.arange(N, N + R))[0]) - N < R


@pytest.mark.parametrize("ahead", NAMES)
def test_who_stands_behind_goes_to_where_the_furthest_is_and_not_on_from_his_own(ahead: str) -> None:
    behind = next(name for name in NAMES if name != ahead)
    with in_first_epoch() as made:
        for place in made.places:
            place.help()
        WindowState(0, 3, 2 * R, 0, 0).put(made.place(ahead).node)
        made.begin(1, behind)
        assert made.place(behind).cursor == 2 * R, "though all would be ready for R"
        made.begin(2, behind)
        assert made.place(behind).cursor == 2 * R, "that epoch had begun"


def test_a_rank_on_a_machine_that_has_joined_counts_from_where_the_others_are() -> None:
    with circle() as made:
        for place in made.places[:2]:
            WindowState(0, 5, 4 * R, 0, 0).put(place.node)
        late = made.place("c")
        late.begin(0)
        assert late.cursor == 4 * R, "a job that comes later goes on"
        for place in made.places:
            place.bring(place.owned(np.arange(4 * R, 4 * R + N + R)))
        late.begin(1)
        assert late.cursor == 5 * R, "and its next epoch is the others' next"


def test_what_a_machine_owned_that_has_left_is_waited_for_where_it_is_owned_now() -> None:
    with in_first_epoch() as made:
        due = np.arange(N, N + R)
        left = [place for place in made.places if place.name != "c"]
        for place in left:
            place.help()
        assert len(made.place("c").owned(due))
        for place in left:
            place.owners = Ownership(place.name, made.members[:2])
        made.deaf = {"c"}
        moved = next(place for place in left if not place.node.settled(place.owned(due)).all())
        other = next(place for place in left if place is not moved)
        other.bring(other.owned(due))
        missing = moved.owned(due)
        first = int(missing[~moved.node.settled(missing)][0]) - N
        made.begin(1, other.name, moved.name)
        assert [place.cursor for place in left] == [first, first]
        for place in left:
            place.help()
        made.begin(2, other.name, moved.name)
        assert [place.cursor for place in left] == [2 * R, 2 * R], "they prepare what they own now"


@pytest.mark.parametrize("who", NAMES)
def test_a_state_puts_all_machines_back_and_empties_them(who: str) -> None:
    with in_first_epoch() as made:
        state = made.place(who).rank.position
        for epoch in range(1, 4):
            for place in made.places:
                place.help()
            made.begin(epoch)
        other = next(place for place in made.places if place.name != who)
        leased = other.owned(np.arange(3 * R + N, 4 * R + N))[:1]
        other.shelf.take(leased, np.empty(1 << 16, np.uint8), claim=True)  # somebody reads it at this moment
        assert not other.node.settled(leased).any()
        made.place(who).rank.go_to(state, made.place(who).ring)
        assert set(made.standings) == {WindowState(1, 1, 0, 0, 0)}
        for place in made.places:
            assert place.node.era() == 2, "nothing of what has left may be there"
            assert not place.node.settled(np.arange(4 * R + N)).any()


@pytest.mark.parametrize("who", NAMES)
def test_each_is_told_once_where_the_cursor_goes(who: str) -> None:
    with in_first_epoch() as made:
        told = dict.fromkeys(NAMES, 0)
        for place in made.places:

            def window(words: Longs, name: str = place.name, ask: Any = place.shelf.window) -> Longs:
                told[name] += int(words[0] == 1)
                return ask(words)  # type: ignore[no-any-return]

            place.shelf.window = window  # type: ignore[method-assign]
        made.begin(1, who)
        assert told == {name: int(name != who) for name in NAMES}


def test_who_waits_prepares_what_it_owns_itself() -> None:
    window = Window(N, replace=0.3, seed=1, wait=True)
    with in_first_epoch(window) as made:
        made.begin(1)
        assert made.cursors == [R] * 3
        first = made.places[0]
        assert first.node.settled(first.owned(np.arange(N, N + R))).all()
        for place in made.places[1:]:
            others = np.setdiff1d(np.arange(N, N + R), place.owned(np.arange(N, N + R)))
            assert not place.node.settled(others).any()


@pytest.mark.parametrize(
    "words",
    [
        [],
        [0],
        [0, 1, 2, 3],
        [0, 1, 1 << 40, 0, 1],
        [0, 1, 1, 0, -1],
        [1, 1, 9, -1, 0, 0],
        [1] * 5,
        [3] * 6,
        [1] * 7,
    ],
)
def test_what_is_nothing_that_is_asked_of_a_window_is_refused(words: list[int]) -> None:
    with in_first_epoch() as made:
        before = made.standings
        with pytest.raises((SegmentError, ValueError)):
            made.places[0].shelf.window(np.array(words, np.int64))
        assert made.standings == before


# ---- all at once -----------------------------------------------------------------------------------------


class Turns:
    """Threads of which one runs at a time, until its next message; ``schedule`` says whose turn it is."""

    def __init__(self, schedule: Sequence[int]) -> None:
        self._schedule = iter(schedule)
        self._goes: dict[int, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self.errors: list[BaseException] = []

    def step(self) -> None:
        """Called by a thread: wait for its next turn."""
        go = self._goes.get(threading.get_ident())
        if go is not None:
            self._back.release()
            assert go.acquire(timeout=60)

    def run(self, bodies: Sequence[Callable[[], None]], between: Callable[[int], None]) -> None:
        """Run all to their ends; ``between`` is called before each turn, with the schedule's number."""
        ended: set[int] = set()
        goes = [threading.Semaphore(0) for _ in bodies]

        def run(number: int) -> None:
            self._goes[threading.get_ident()] = goes[number]
            try:
                assert goes[number].acquire(timeout=60)
                bodies[number]()
            except BaseException as error:
                self.errors.append(error)
            finally:
                ended.add(number)
                self._back.release()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
        for thread in threads:
            thread.start()
        while len(ended) < len(bodies):
            number = next(self._schedule, 0)
            between(number)
            left = [each for each in range(len(bodies)) if each not in ended]
            goes[left[number % 3 % len(left)]].release()
            assert self._back.acquire(timeout=60)
        for thread in threads:
            thread.join()
        assert self.errors == []


FEW = settings(max_examples=60, deadline=None)


def turn(who: int, brings: int = 0, where: int = 0) -> int:
    """In a schedule: who goes on, after so many entries have come in somewhere."""
    return who + 3 * where + 9 * brings


A, B, C = range(3)
# b hears that a is not ready, c that it is, and neither that the other has come. b has its epoch, c decides.
SECOND_SEES_MORE = [B, turn(C, R, A), B, C, B, C, B, B, B, B, 1, 1, 1, 1]
# As that; both have a decide, and tell the others at once.
BOTH_DECIDE = [B, turn(C, R, A), B, C, B, C, B, C, B, C, C, C, B, B]
# b hears that c is not ready, a that it is. b has its epoch, then a decides for itself.
DECIDER_SEES_MORE = [B, B, A, turn(A, R, C), A, B, B, B, B, B, A, A, A, A]
# Between the other two, where the first by name does not answer.
SECOND_BY_NAME_DECIDES = [A, A, B, B, turn(A, R, A), B, A, B, A, B, A, B, A, B, A, B]


@FEW
@given(
    schedule=st.lists(st.integers(0, 80), max_size=30),
    ready=st.tuples(*[st.integers(0, R)] * 3),
    deaf=st.sampled_from(["", *NAMES]),
    auto=st.booleans(),
)
@example(schedule=SECOND_SEES_MORE, ready=(1, R, R), deaf="", auto=False)
@example(schedule=BOTH_DECIDE, ready=(1, R, R), deaf="", auto=False)
@example(schedule=DECIDER_SEES_MORE, ready=(R, R, 0), deaf="", auto=False)
@example(schedule=SECOND_BY_NAME_DECIDES, ready=(R, 0, R), deaf="a", auto=False)
def test_all_who_come_at_once_stand_at_one_cursor_whatever_the_order_of_messages(
    schedule: list[int], ready: tuple[int, ...], deaf: str, auto: bool
) -> None:
    window = Window(N, replace="auto" if auto else 0.3, seed=1)
    with in_first_epoch(window) as made:
        for place, count in zip(made.places, ready, strict=True):
            place.help(count)
        if deaf:  # and nobody trains there: its own rank would not know that the others cannot reach it
            made.deaf = {deaf}
            made.place(deaf).end_job()
        places = [place for place in made.places if place.name != deaf]
        turns = Turns(schedule)
        made.step = turns.step

        def between(number: int) -> None:
            places[number // 3 % 3 % len(places)].help(number // 9)

        turns.run([lambda place=place: place.begin(1) for place in places], between)  # type: ignore[misc]
        (cursor,) = {place.cursor for place in places}
        assert {WindowState.of(place.node)[:3] for place in places} == {(0, 2, cursor)}
        due = np.arange(N, N + cursor)
        assert all(place.node.settled(place.owned(due)).all() for place in places), "no more than is ready"


# ---- a model ---------------------------------------------------------------------------------------------


class WindowMachine(RuleBasedStateMachine):
    """Machines whose ranks come to boundaries one by one, while nodes go and come back.

    The model knows which entries each machine has, and from that where the window stands: what the machines
    must agree on without a model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.standing = WindowState(0, 0, 0, 0, 0)
        self.there: dict[str, set[int]] = {name: set() for name in NAMES}
        self.epochs: dict[str, int] = dict.fromkeys(NAMES, 0)  # begun by each rank, counted as the window's
        self.own: dict[str, int] = dict.fromkeys(NAMES, 0)  # and as it counts itself
        self.states: list[WindowPosition] = []
        self.unheard: set[str] = set()  # the names of those who have not heard of the state that was loaded

    @initialize(auto=st.booleans())
    def meet(self, auto: bool) -> None:
        window = Window(N, replace="auto" if auto else 0.3, seed=1)
        self.circle = self.stack.enter_context(circle(window))
        self.sizes = self.circle.sizes

    def teardown(self) -> None:
        self.stack.close()

    @property
    def ranks(self) -> list[str]:
        return [place.name for place in self.circle.places if place.ring is not None]

    def _has(self, place: Place, entries: Ids) -> None:
        place.bring(entries)
        self.there[place.name].update(entries.tolist())

    # ---- what is in memory ----------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), most=st.integers(1, 2 * R))
    def prepare(self, name: str, most: int) -> None:
        place = self.circle.place(name)
        if place.ring is None or not self.standing.epoch:
            return
        first = self.standing.cursor + N
        due = place.owned(np.arange(first, first + self.sizes.due(self.standing.behind)))
        missing = [entry for entry in due.tolist() if entry not in self.there[name]][:most]
        if WindowState.of(place.node) == self.standing:
            self._has(place, np.array(missing, np.int64))

    @rule(name=st.sampled_from(NAMES))
    def use(self, name: str) -> None:
        place = self.circle.place(name)
        if WindowState.of(place.node) == self.standing:
            self._has(place, place.owned(np.arange(self.standing.cursor, self.standing.cursor + N)))

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        assert self.circle.place(name).node.clear()
        self.there[name].clear()

    # ---- who is there ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.ranks) == 3)
    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.circle.deaf.add(name)
        self.circle.place(name).end_job()

    @precondition(lambda self: self.circle.deaf)
    @rule(name=st.sampled_from(NAMES))
    def come_back(self, name: str) -> None:
        if name in self.circle.deaf:
            self.circle.deaf.remove(name)
            self.circle.place(name).begin_job()
            self.epochs[name] = self.own[name] = 0

    # ---- states ---------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def save(self, name: str) -> None:
        if 0 < self.epochs[name] == self.own[name] and self.circle.place(name).ring is not None:
            self.states.append(self.circle.place(name).rank.position)

    @precondition(lambda self: self.states)
    @rule(number=st.integers(0, 99))
    def load(self, number: int) -> None:
        """All ranks load a state; a machine that does not answer stays where it is."""
        state = self.states[number % len(self.states)]
        for name in self.ranks:
            self.circle.place(name).rank.go_to(state, self.circle.place(name).ring)
            self.epochs[name] = self.own[name] = state.epoch + 1
        loads, _, cursor, _, late = self.standing
        to = WindowState(loads + 1, state.epoch + 1, state.cursor, state.behind, late)
        if self.sizes.leads(to, self.standing):
            return
        if state.cursor < cursor:
            for name in NAMES:
                self._forget(name)
        self.standing = to

    def _forget(self, name: str) -> None:
        if name not in self.circle.deaf:
            self.there[name].clear()
            return
        self.unheard.add(name)
        newest = {entry % self.sizes.slots: entry for entry in sorted(self.there[name])}
        self.there[name] = set(newest.values())

    # ---- boundaries -----------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        """A rank begins its next epoch; training goes in step, so nobody is more than one ahead."""
        place = self.circle.place(name)
        if place.ring is None:
            return
        if not self.epochs[name] and self.standing.epoch:  # it goes on where the others are
            self.epochs[name] = self.standing.epoch
        elif self.epochs[name] < self.standing.epoch:
            self.epochs[name] += 1
        elif all(self.epochs[other] in (0, self.standing.epoch) for other in self.ranks):
            self.epochs[name] += 1
            self.standing = self._moved()
        else:
            return
        place.begin(self.own[name])
        self.own[name] += 1
        assert place.cursor == self.standing.cursor

    def _moved(self) -> WindowState:
        now = self.standing
        first = now.cursor + N
        due = np.arange(first, first + self.sizes.due(now.behind))
        answering = [place for place in self.circle.places if place.name not in self.circle.deaf]
        heard = {int(entry): place for place in answering for entry in place.owned(due)}
        missing = [e for e, p in heard.items() if e not in self.there[p.name] and self.epochs[p.name]]
        ready = min(missing, default=first + len(due)) - first
        resident = set(range(now.cursor, first))
        if not any(resident & self.there[place.name] for place in answering):
            ready = len(due)
        return self.sizes.moved(now, now.epoch, ready)

    @invariant()
    def all_who_answer_stand_at_one_place(self) -> None:
        for name in list(self.unheard):
            if WindowState.of(self.circle.place(name).node).loads == self.standing.loads:
                self.unheard.remove(name)
                self.there[name].clear()
        if self.standing.epoch:
            heard = [place for place in self.circle.places if place.name not in self.circle.deaf]
            stand = {WindowState.of(place.node) for place in heard}
            back = {WindowState.of(place.node) for place in heard if not self.epochs[place.name]}
            assert stand - back <= {self.standing}
            if not self.sizes.auto:
                assert self.standing.cursor + self.standing.behind == R * (self.standing.epoch - 1)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# ---- what an owner has no room for -----------------------------------------------------------------------

FOUR = ("a", "b", "c", "d")
SMALL, LARGE = 1, 60  # lines of a tail


class Ticket:
    """A request to a shelf, which is answered when it is waited for."""

    def __init__(self, name: str, wanted: Longs, answer: Callable[[], Answer]) -> None:
        self.name, self.ids, self._answer = name, wanted, answer

    def wait(self, deadline: float) -> Answer:
        return self._answer()


class Peer:
    """A machine's store, as another one's errand asks it."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.shelf = StoreService(store, bytes(16))
        self.asked: list[list[int]] = []

    def ask(self, cache: CacheIdentity, wanted: Longs, *, claim: bool = False) -> Ticket:
        self.asked.append(wanted.tolist())

        def answer() -> Answer:
            found = self.shelf.take(wanted, np.empty(1 << 20, np.uint8), claim=claim)
            states = [found.generations == state for state in (LEFT, PROMISED, ROOMLESS)]
            return Answer(sound(cache, wanted, found), *states, True, found.lines, found.rows, found.tails)

        return Ticket(self.name, wanted, answer)

    def put(self, cache: CacheIdentity, brought: Longs, records: WireRecords) -> Ticket:
        good = sound(cache, brought, records)

        def answer() -> Answer:
            there, no = self.shelf.put(brought, records), np.zeros(len(brought), np.bool_)
            return Answer(there, no, no, good & ~there, True, records.lines, records.rows, records.tails)

        return Ticket(self.name, brought, answer)


class Four:
    """Four machines without processes; ``limits`` says what some may hold, all others hold anything."""

    def __init__(self, **limits: int) -> None:
        schema = Schema.infer([self.text(0), self.text(1)], as_lies=True)
        self.reads: list[int] = []
        self.members = tuple(Member(name, "", "", "", 1 << 20) for name in FOUR)
        self.peers = {
            name: Peer(name, Store.create(schema, D, limits.get(name, 1 << 20), about={"name": "test"}))
            for name in FOUR
        }
        orders = Placement(FOUR, [1] * 4).order(np.arange(D), 4).tolist()
        self.orders = ["".join(FOUR[number] for number in order) for order in orders]

    @staticmethod
    def text(index: int) -> str:
        return f"{index} ".ljust((LARGE if index % 5 == 4 else SMALL) * LINE - 1, "x")

    def sample(self, order: str, large: bool = False) -> int:
        """One whose owner, and those that come next, are these."""
        return next(
            i for i in range(D) if self.orders[i].startswith(order) and (i % 5 == 4) == large and i > 1
        )

    def _read(self, index: int) -> str:
        self.reads.append(index)
        return self.text(index)

    def errand(self, me: str) -> BatchFetch:
        peer = self.peers[me]
        company: Any = Peers(0)
        company._roster = Membership(me, Keys(b"", b""), self.members)
        company.owners = Ownership(me, self.members)
        company.peers = {name: other for name, other in self.peers.items() if name != me}
        return BatchFetch(company, peer.shelf.cache, peer.store, self._read, lambda count: False)

    def bring(self, me: str, *wanted: int) -> Brought:
        return self.errand(me).run(np.array(sorted(wanted)), [])

    def holders(self, index: int) -> str:
        return "".join(name for name in FOUR if self.peers[name].store.holds(np.array([index])))


@contextlib.contextmanager
def four(**limits: int) -> Iterator[Four]:
    made = Four(**limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "LEASE", NEVER)
        try:
            yield made
        finally:
            for peer in made.peers.values():
                peer.store.close()


@pytest.mark.parametrize(
    ("order", "full", "holder"),
    [("bcd", "", "b"), ("bcd", "b", "c"), ("bcd", "bc", "d"), ("abc", "a", "b"), ("abc", "ab", "c")],
)
def test_the_next_machine_with_room_keeps_it_and_all_find_it_there(
    order: str, full: str, holder: str
) -> None:
    with four(**dict.fromkeys(full, 0)) as made:
        wanted = made.sample(order)
        found = made.bring("a", wanted)
        assert found.read == {wanted: made.text(wanted)}
        assert not found.unkept
        assert made.holders(wanted) == holder
        for name in FOUR:
            if name != holder:
                assert made.bring(name, wanted).ids().tolist() == [wanted]
        assert made.reads == [wanted]


def test_what_three_machines_have_no_room_for_is_read_and_kept_nowhere() -> None:
    with four(b=0, c=0, d=0) as made:
        wanted = made.sample("bcd")
        found = made.bring("a", wanted)
        assert found.read == {wanted: made.text(wanted)}
        assert found.unkept, "which is told"
        assert made.holders(wanted) == ""


@pytest.mark.parametrize("order", ["bac", "bca"])
def test_where_the_asker_itself_comes_next_it_is_left_to_its_store(order: str) -> None:
    with four(b=0, c=0) as made:
        wanted = made.sample(order)
        found = made.bring("a", wanted)
        assert found.ids().tolist() == []
        assert not found.unkept


def test_what_two_machines_have_no_room_for_comes_in_the_order_of_its_numbers() -> None:
    with four(b=0, c=0) as made:
        wanted = [sample for sample in range(D) if made.orders[sample] in ("bcda", "cbda")]
        made.peers["d"].store.fill(np.array(wanted), made.text)
        (found,) = made.bring("a", *wanted).records
        assert found.ids.tolist() == wanted, "as a gather looks for them"


def test_all_that_was_asked_ahead_is_waited_for_together() -> None:
    with four() as made:
        waits: list[float] = []
        wanted = np.array([made.sample("bc")])

        class Watched(Ticket):
            def wait(self, deadline: float) -> Answer:
                waits.append(deadline)
                return super().wait(deadline)

        peers = made.peers.values()
        tickets: Any = [
            Watched(peer.name, wanted, peer.ask(peer.shelf.cache, wanted)._answer) for peer in peers
        ]
        made.errand("a").run(wanted, tickets[1:])
        assert len(waits) == 3
        assert len(set(waits)) == 1, "one deadline, and not one after the other"


def test_what_is_larger_than_any_answer_is_read_at_once() -> None:
    with four() as made:
        wanted = np.array([made.sample("bc", large=True)])
        peer = made.peers["b"]
        peer.store.fill(wanted, made.text)
        memory = np.empty(LARGE * LINE // 2, np.uint8)
        for _ in range(2):
            found = peer.shelf.take(wanted, memory, claim=True)
            assert found.generations.tolist() == [ABSENT]


def test_where_the_asker_comes_next_and_is_full_the_one_after_it_keeps_it() -> None:
    with four(a=0, b=0) as made:
        wanted = made.sample("bac")
        assert not made.bring("a", wanted).unkept
        assert made.holders(wanted) == "c"


@pytest.mark.parametrize(
    ("order", "small", "holder"), [("bac", "b", "a"), ("bac", "ab", "c"), ("bcd", "bc", "d")]
)
def test_what_turns_out_too_large_for_who_promised_to_keep_it_goes_further(
    order: str, small: str, holder: str
) -> None:
    with four(**dict.fromkeys(small, LARGE // 2 * LINE)) as made:
        wanted = made.sample(order, large=True)
        found = made.bring("a", wanted)
        assert not found.unkept
        assert made.holders(wanted) == holder
        assert made.reads == [wanted]


def test_what_is_too_large_for_all_is_kept_nowhere_and_that_is_told() -> None:
    with four(**dict.fromkeys("bcd", LARGE // 2 * LINE)) as made:
        wanted = made.sample("bcd", large=True)
        assert made.bring("a", wanted).unkept
        assert made.holders(wanted) == ""


def test_what_another_one_promised_and_does_not_bring_is_read_and_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errands, "PATIENCE", 0.0)
    with four() as made:
        wanted = made.sample("b")
        made.peers["b"].ask(made.peers["b"].shelf.cache, np.array([wanted]), claim=True).wait(0.0)
        assert made.bring("a", wanted).read == {wanted: made.text(wanted)}
        assert made.holders(wanted) == "b"


# ---- machines with processes -----------------------------------------------------------------------------

WAITING = Window(60, replace=0.2, seed=3, wait=True)
WILLING = Window(60, replace=0.2, seed=3)
STEP = 12


def residents_at(cursor: int, window: Window = WAITING) -> list[int]:
    return sorted(Sizes.of(window, D, 1).policy().members(cursor).tolist())


class Epoch:
    """What an epoch was: each rank's samples, where its window stood, and of what it was warned."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        told = [trainer.result() for trainer in trainers]
        self.samples = sorted(sample for each in told for sample in each.value)
        self.warnings = [sentence for each in told for sentence in each.warnings]
        self.positions = {tuple(trainer.call("position")) for trainer in trainers}

    @property
    def cursor(self) -> int:
        """Where the window stood; fails if that differed."""
        ((_, cursor, _),) = self.positions
        return int(cursor)


def begin(trainers: Sequence[Trainer], pause: float = 0.0) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.begin("window_epoch", rank, len(trainers), 0, pause)


def epoch(trainers: Sequence[Trainer], pause: float = 0.0) -> Epoch:
    begin(trainers, pause)
    return Epoch(trainers)


def epochs(trainers: Sequence[Trainer], enough: Callable[[list[Epoch]], bool], pause: float) -> list[Epoch]:
    """One after the other until it is enough; fails if it never is."""
    found: list[Epoch] = []
    assert eventually(lambda: found.append(epoch(trainers, pause)) or enough(found))
    return found


def moves_by(count: int) -> Callable[[list[Epoch]], bool]:
    """Whether the window has moved by so many samples since the first of some epochs."""
    return lambda found: found[-1].cursor - found[0].cursor >= count


def each_is_held_once(made: Town) -> None:
    held: list[int] = []
    for machine in made.machines:
        with attached(machine.file) as ring:
            assert ring.check() == []
            held += np.flatnonzero(ring.segment.index >= PRESENT).tolist()
    assert len(held) == len(set(held)) > 60


def test_all_come_to_the_boundary_at_once_many_times(tmp_path: Path) -> None:
    window = Window(60, replace="auto", seed=1)
    with town(tmp_path, image, D, seconds=0.004) as made:
        trainers = made.trainers(window=window)
        for found in epochs(trainers, lambda found: len({each.cursor for each in found}) > 20, pause=0.01):
            assert found.samples == residents_at(found.cursor, window), "each by one rank"


@pytest.mark.parametrize("window", [WAITING, WILLING])
def test_two_ranks_on_each_machine(tmp_path: Path, window: Window) -> None:
    with town(tmp_path, image, D, count=2) as made:
        trainers = [*made.trainers(window=window), *made.trainers(window=window)]
        made.reads()
        for found in epochs(trainers, moves_by(4 * STEP), pause=0.01):
            assert found.samples == residents_at(found.cursor, window)
        each_is_held_once(made)
        assert made.reads() <= 60 + found.cursor + 30, "and what comes next"


def test_ranks_that_come_one_after_the_others_epoch_are_where_they_were(tmp_path: Path) -> None:
    with town(tmp_path, image, D) as made:
        trainers = made.trainers(window=WILLING)
        numbers = itertools.count()

        def has_moved() -> bool:
            seen: list[int] = []
            for rank, trainer in enumerate(trainers):
                trainer.begin("window_epoch", rank, 3, 0, 0.0)
                seen += trainer.result().value
            ((at, cursor, _),) = {tuple(trainer.call("position")) for trainer in trainers}
            assert at == next(numbers)
            assert sorted(seen) == residents_at(cursor, WILLING)
            return bool(cursor > 2 * STEP)

        assert eventually(has_moved)


@pytest.mark.parametrize("window", [WAITING, WILLING])
def test_a_node_dies_and_begins_again_between_a_windows_epochs(tmp_path: Path, window: Window) -> None:
    with town(tmp_path, image, D) as made:
        trainers = made.trainers(window=window)
        for _ in range(3):
            epoch(trainers, pause=0.01)
        machine = min(made.machines, key=lambda each: each.name)  # who decides about the cursor
        assert machine.node is not None
        begin(trainers, pause=0.05)
        machine.node.kill()
        assert len(Epoch(trainers).samples) == 60
        machine.begin()
        ends = sorted(each.member.endpoint for each in made.machines)
        assert eventually(lambda: all(sorted(each.endpoints()) == ends for each in made.machines))
        # In this one what was read meanwhile is brought to where it belongs.
        before = epoch(trainers, pause=0.05).cursor
        made.reads()
        found = epochs(trainers, moves_by(2 * STEP), pause=0.02)
        assert [each.samples for each in found] == [residents_at(each.cursor, window) for each in found]
        assert made.reads() <= found[-1].cursor - before + 2 * STEP, "its ring is where it was"
        each_is_held_once(made)


def test_a_clear_in_the_midst_of_an_epoch_empties_all_machines_and_moves_nothing(tmp_path: Path) -> None:
    with town(tmp_path, image, D) as made:
        trainers = made.trainers(window=WAITING)
        for _ in range(3):
            epoch(trainers)
        begin(trainers[:2], pause=0.05)
        trainers[2].call("clear")
        trainers[2].begin("window_epoch", 2, 3, 0, 0.0)
        assert Epoch(trainers).samples == residents_at(3 * STEP)
        for number in range(4, 8):
            found = epoch(trainers)
            assert found.positions == {(number, STEP * number, 0)}
            assert found.samples == residents_at(STEP * number)
        each_is_held_once(made)


def test_what_is_late_is_made_up_and_counted_once_on_all_machines(tmp_path: Path) -> None:
    marker = tmp_path / "closed"
    with town(tmp_path, image, D) as made:
        made.source = source = Closed(image, D, made.log, marker)
        source.open = frozenset(residents_at(0, WILLING))
        trainers = made.trainers(window=WILLING)
        marker.touch()
        before, late, numbers = 0, 0, itertools.count()

        def behind() -> int:
            nonlocal before, late
            number = next(numbers)
            ((at, cursor, behind),) = epoch(trainers, pause=0.01).positions
            assert (at, cursor + behind) == (number, STEP * number)
            late += max(STEP - (cursor - before), 0) if number else 0
            before = cursor
            assert {trainer.call("stats").late for trainer in trainers} == {late}
            return behind

        assert [behind() for _ in range(8)] == [STEP * number for number in range(8)]
        marker.unlink()
        assert eventually(lambda: behind() == 0)


class _Loading(machines._Trainer):
    def by_loader(self, kind: str, number: int, rank: int, workers: int, context: str | None) -> list[int]:
        """This rank's part of a window's epoch, by a loader that is kept."""
        if self._loader is None:
            make: Any = DataLoader if kind == "torch" else hotset.DataLoader
            sampler: Any = DistributedSampler(self._cached, 2, rank, shuffle=False)
            self._loader = make(
                self._cached,
                batch_size=8,
                sampler=sampler,
                num_workers=workers,
                multiprocessing_context=context,
                persistent_workers=workers > 0,
            )
        self._cached.set_epoch(number)
        seen: list[int] = []
        for data, labels in self._loader:
            batch = labels.tolist()
            assert self._differing(batch, list(zip(data, batch, strict=True))) == []
            seen += batch
        return seen


@pytest.mark.parametrize(
    ("kind", "workers", "context"),
    [("torch", 0, None), ("torch", 1, "fork"), ("hotset", 1, "fork"), ("hotset", 1, "spawn")],
)
def test_epochs_that_are_announced_in_any_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int, context: str | None
) -> None:
    monkeypatch.setattr(machines, "_Trainer", _Loading)
    with town(tmp_path, image, D, count=2) as made:
        trainers = made.trainers(window=WAITING)
        for number in range(4):
            for rank, trainer in enumerate(trainers):
                trainer.begin("by_loader", kind, number, rank, workers, context)
            found = Epoch(trainers)
            assert found.samples == residents_at(STEP * number)
            assert found.positions == {(number, STEP * number, 0)}
        each_is_held_once(made)


def one_line(entry: int) -> str:
    return f"{entry} ".ljust(LINE - 1, "x")


def test_a_part_of_a_ring_leaves_no_room_for_rows_that_are_others() -> None:
    schema = Schema.infer([one_line(0), one_line(1)], as_lies=True)
    slots, mine = 6000, np.arange(0, 6000, 2)
    limit = len(mine) * (schema.stride + LINE)
    about = {"name": "test", "shared": True}
    with contextlib.closing(Ring.create(schema, slots, limit, about=about)) as ring:
        ring.fill(mine, one_line)
        stored = int((ring.segment.index >= PRESENT).sum())
        assert stored >= 0.99 * len(mine), "but for what is left of extents"


def test_of_small_records_a_machine_has_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_FEWEST_LOTS", 64)

    def kilobyte(entry: int) -> torch.Tensor:
        return torch.full((1000,), entry % 251, dtype=torch.uint8)

    schema = Schema.infer([kilobyte(0)], as_lies=True)
    owners = Ownership("a", tuple(Member(name, "", "", "", 1 << 20) for name in NAMES))
    about = {"name": "test", "shared": True, "ring": True}
    with contextlib.closing(Ring.create(schema, 6000, 1 << 24, about=about)) as ring:
        before = os.fstat(ring.segment.fd).st_blocks * 512
        shelf = RingShelf(ring, bytes(16), lambda: owners)
        entries = np.arange(6000, 12_000)
        theirs = [some for _, some in owners.others(entries, shelf.cache.partitions(entries))]
        mine = np.setdiff1d(entries, np.concatenate(theirs))
        assert 1500 < len(mine) < 2500
        assert Boundary(cast(Any, Told(owners))).mine(ring, entries).tolist() == mine.tolist()
        ring.segment.live[Live.CURSOR] = 6000
        ring.fill(mine, kilobyte)
        assert ring.present(mine).all()
        taken = os.fstat(ring.segment.fd).st_blocks * 512 - before - 8 * 6000
        assert taken < 1.3 * len(mine) * schema.stride


class Told(NamedTuple):
    """Neighbours, as far as who owns what goes."""

    here: Ownership

    def owners(self, ring: Ring) -> Ownership:
        return self.here


def test_a_record_of_another_lap_is_not_what_was_asked_for() -> None:
    about = {"name": "test", "shared": True, "ring": True}
    schema = Schema.infer([pair(0)], as_lies=True)
    with contextlib.closing(Ring.create(schema, 8, 1 << 16, about=about)) as ring:
        ring.fill(np.arange(8), pair)
        shelf = RingShelf(ring, bytes(16), lambda: None)
        asked = np.array([2, 5])
        found = shelf.take(asked, np.empty(1 << 12, np.uint8))
        assert sound(shelf.cache, asked, found).tolist() == [True, True]
        assert sound(shelf.cache, asked + [0, 8], found).tolist() == [True, False], "the same slot's next"
        assert sound(shelf.cache, asked[::-1], found).tolist() == [False, False]


# ---- who does not take part --------------------------------------------------------------------------------


def test_a_machine_whose_session_was_destroyed_does_not_hold_the_window_up(tmp_path: Path) -> None:
    with town(tmp_path, image, D) as made:
        trainers = made.trainers(window=WILLING)
        for _ in range(3):
            epoch(trainers, pause=0.01)
        node = made.machines[1].node
        assert node is not None
        node.call("destroy")
        epochs(trainers, moves_by(STEP), pause=0.02)


def test_a_machine_that_has_no_room_does_not_hold_the_window_up(tmp_path: Path) -> None:
    with town(tmp_path, image, D, memory=2 * MIB) as made:
        trainers = made.trainers(window=WILLING)
        trainers[1].begin("fill_session", 3000)
        trainers[1].result()
        epochs(trainers, moves_by(5 * STEP), pause=0.03)  # what cannot be stored is not waited for


def test_a_process_that_does_not_train_does_not_hold_the_window_up(tmp_path: Path) -> None:
    with town(tmp_path, image, D) as made:
        trainers = made.trainers(window=WILLING)
        epochs(trainers[:2], moves_by(3 * STEP), pause=0.02)


def test_a_state_holds_though_a_machine_did_not_hear_of_it(tmp_path: Path) -> None:
    with town(tmp_path, image, D) as made:
        trainers = made.trainers(window=WAITING)
        for _ in range(2):
            epoch(trainers)
        states = [trainer.call("state") for trainer in trainers]
        for _ in range(4):
            epoch(trainers)
        machine = made.machines[2]
        assert machine.node is not None
        made.wait_for(machine, 0.5)
        machine.node.stop()
        epoch(trainers[:2])  # in which it is found not to answer
        for rank, trainer in enumerate(trainers[:2]):
            trainer.begin("go_on", states[rank], rank, 2)
        for trainer in trainers[:2]:
            trainer.result()
        machine.node.go_on()
        made.wait_for(machine, NEVER)
        for trainer in trainers[:2]:
            trainer.call("forgive")
        for number in range(2, 5):
            assert epoch(trainers[:2]).positions == {(number, STEP * number, 0)}


def test_rows_that_are_refused_take_no_memory(tmp_path: Path) -> None:
    def kilobytes(entry: int) -> torch.Tensor:
        return torch.full((12_000,), entry % 251, dtype=torch.uint8)

    schema = Schema.infer([kilobytes(0)], as_lies=True)
    path = tmp_path / "ring"
    about = {"name": "test", "shared": True}
    with contextlib.closing(Ring.create(schema, 64, 10 * schema.stride, about=about, path=str(path))) as ring:
        ring.fill(np.arange(10), kilobytes)
        before = path.stat().st_blocks
        for entry in range(10, 64):
            ring.room.reopen()  # as after half a second
            ring.fill(np.array([entry]), kilobytes)
        assert int((ring.segment.index >= PRESENT).sum()) == 10
        assert (path.stat().st_blocks - before) * 512 < 2 * schema.stride


class _Full(machines._Trainer):
    def was_full(self) -> None:
        """As if a larger sample had once found no room."""
        self._cached._store.room.why_full = "it was full"


def test_nobody_is_told_that_no_more_fit_where_all_have_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_Trainer", _Full)
    with town(tmp_path, image, D, count=2) as made:
        trainer = made.trainers()[0]
        trainer.call("was_full")
        walk = trainer.walk(made.order(0))
        assert set.union(*(machine.holds() for machine in made.machines)) == set(range(D))
        assert walk.warnings == []


def test_a_machine_that_was_told_of_nobody_moves_its_window(runtime: Path) -> None:
    about = {"name": "test", "shared": True}
    schema = Schema.infer([pair(0)], as_lies=True)
    with contextlib.closing(Ring.create(schema, 8, 1 << 16, about=about)) as ring:
        boundary = Boundary(RemoteCache(4711, bytes(16)))
        assert len(boundary.look(ring, np.arange(2), np.arange(4))) == 1
        assert boundary.move(ring, WindowState(0, 1, 0, 0, 0)) == WindowState(0, 1, 0, 0, 0)
