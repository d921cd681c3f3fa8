"""The boundary of a window that several machines share: how they agree on its cursor.

Each machine has the ring's slots, and records in those that it owns. Its cursor must be the same everywhere,
and may move no further than what is ready on all machines goes. Whoever comes to the boundary first::

    look    all machines say where they stand, and up to where their own entries are ready
    move    the first machine by name that answers is told where the cursor goes now. If it has been told
            something else already, that holds; what it answers is told to all the others

So whoever comes later finds the window moved, on his own machine. Where the first by name dies between two
who come at the same moment they may move the cursor to two places; the next boundary begins at the further
one, and until then some samples are used twice in an epoch, or not at all.

A machine that does not answer is not waited for: its entries are read when they are used. Nor is one on which
nobody trains, as nobody prepares samples there: nobody has begun this epoch, or the one before.

Where a state is loaded, all are told to go back. Who did not hear of it stands further than the others, but
has loaded fewer states, and so follows them as soon as it is there again.

The words of a request, and of its answer (:class:`hotset.store.ring.WindowState` is five of them)::

    look       0 | first, count of what is due | first, count of the residents   ──> standing | ready | fresh
    move       1 | standing                                                      ──> standing
    put back   2 | standing                                                      ──> standing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cluster.ownership import Ownership
from hotset.cluster.remote_cache import RemoteCache
from hotset.cluster.store_service import StoreService
from hotset.cluster.wire_records import Longs, partitions
from hotset.errors import SegmentError
from hotset.store.format import Slot
from hotset.store.ring import Ring, WindowState

__all__ = ["Boundary", "RingShelf", "Seen"]

_LOOK, _MOVE, _PUT_BACK = range(3)


class Seen(NamedTuple):
    """What a machine says of a window.

    Attributes:
        standing: where it stands there.
        ready: how many of the entries that are due are in, before the first of its own that is not.
        fresh: whether it has none of the residents.
    """

    standing: WindowState
    ready: int
    fresh: bool


def _ready(ring: Ring, due: Longs, mine: npt.NDArray[np.bool_]) -> int:
    """How many of these entries come before the first that is this machine's and not in.

    Where nothing more can come in, as the cache was destroyed, nothing is waited for.
    """
    if ring.invalidated:
        return len(due)
    own = np.flatnonzero(mine)
    missing = own[~ring.settled(due[own])]
    return int(missing[0]) if len(missing) else len(due)


class _Mine:
    """Which entries of a ring this machine owns; worked out once for each list of machines."""

    def __init__(self) -> None:
        self._of: Ownership | None = None
        self._slots: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def among(self, ring: Ring, owners: Ownership | None, entries: Longs) -> npt.NDArray[np.bool_]:
        """Which of these entries are this machine's; all of them while it knows of no others."""
        if owners is None:
            return np.ones(len(entries), np.bool_)
        if self._of is not owners:
            slots = np.arange(len(ring))
            self._slots = np.ones(len(ring), np.bool_)
            for _, theirs in owners.others(slots, partitions(slots, ring.schema.stride, len(ring))):
                self._slots[theirs] = False
            self._of = owners
        return self._slots[ring.index.places(entries)]


class RingShelf(StoreService):
    """A ring as a shelf, with its window.

    Args:
        ring: this machine's part.
        fingerprint: 16 bytes.
        owners: gives the machines, as this one knows them now.
    """

    def __init__(self, ring: Ring, fingerprint: bytes, owners: Callable[[], Ownership | None]) -> None:
        super().__init__(ring, fingerprint)
        self._ring, self._owners, self._mine = ring, owners, _Mine()

    def window(self, words: Longs) -> Longs:
        kind, *said = words.tolist()
        if kind == _LOOK and len(said) == 4:
            first, count, begin, residents = said
            if not (0 <= count <= len(self._ring) and 0 <= residents <= len(self._ring)):
                raise SegmentError("more than there is room for is asked of a window.")
            found = self._seen(np.arange(first, first + count), np.arange(begin, begin + residents))
            return np.array([*found.standing, found.ready, found.fresh], np.int64)
        if kind not in (_MOVE, _PUT_BACK) or len(said) != len(WindowState._fields) or min(said) < 0:
            raise SegmentError("nothing that is asked of a window.")
        standing = WindowState(*said)
        if kind == _PUT_BACK or standing.loads > WindowState.of(self._ring).loads:
            self.end_all_leases()  # the ring may be cleared, which waits for who is reading
        if kind == _PUT_BACK:
            standing.put_back(self._ring)
        return np.array(standing.begin(self._ring), np.int64)

    def _seen(self, due: Longs, residents: Longs) -> Seen:
        ring, owners = self._ring, self._owners()
        now = WindowState.of(ring)
        ready = len(due)
        if self._is_trained_on(now.epoch):
            ready = _ready(ring, due, self._mine.among(ring, owners, due))
        mine = residents[self._mine.among(ring, owners, residents)]
        return Seen(now, ready, not ring.settled(mine).any())

    def _is_trained_on(self, epoch: int) -> bool:
        """Whether anybody here is in this epoch, or still in the one before, and so prepares samples."""
        begun = self._ring.segment.slots[:, Slot.BEGUN]
        here = np.flatnonzero((begun > 0) & (begun >= epoch - 1) & (begun <= epoch))
        return any(self._ring.member.is_alive(slot) for slot in here.tolist())


class Boundary:
    """A process's way over the boundaries of a shared window; it pickles.

    Args:
        neighbours: the way to the other machines.
    """

    def __init__(self, neighbours: RemoteCache) -> None:
        self._neighbours = neighbours
        self._mine = _Mine()

    def mine(self, ring: Ring, entries: Longs) -> Longs:
        """Those of these entries that this machine owns."""
        return entries[self._mine.among(ring, self._neighbours.owners(ring), entries)]

    def look(self, ring: Ring, due: Longs, residents: Longs) -> list[Seen]:
        """What all machines that answer say of the window, this one first.

        Args:
            ring: this machine's part.
            due: the entries that are to go in at the next boundary, one after the other.
            residents: those that are in now.
        """
        runs = (int(due[0]) if len(due) else 0, len(due), int(residents[0]), len(residents))
        answers = self._neighbours.say(ring, np.array([_LOOK, *runs], np.int64))
        here = Seen(
            WindowState.of(ring),
            _ready(ring, due, self._mine.among(ring, self._neighbours.owners(ring), due)),
            not ring.settled(self.mine(ring, residents)).any(),
        )
        return [here, *(_seen_there(words) for words in answers.values() if len(words) == _SEEN)]

    def furthest(self, ring: Ring) -> WindowState:
        """Where the window stands on the machine where it stands furthest."""
        answers = self._neighbours.say(ring, np.array([_LOOK, 0, 0, 0, 0], np.int64))
        there = [_seen_there(words).standing for words in answers.values() if len(words) == _SEEN]
        return max([WindowState.of(ring), *there])

    def move(self, ring: Ring, to: WindowState) -> WindowState:
        """Move the window on all machines; where it stands then: elsewhere, if another one was first."""
        if self._neighbours.owners(ring) is None:  # this machine was told of nobody so far
            return to.begin(ring)
        me = self._neighbours.me(ring)
        others = self._neighbours.names(ring)
        for name in sorted([me, *others]):
            if name == me:
                to = to.begin(ring)
                break
            answer = self._neighbours.say(ring, _words(_MOVE, to), [name]).get(name)
            if answer is not None and len(answer) == len(to):
                to = WindowState(*answer.tolist())
                others.remove(name)
                break
        self._neighbours.say(ring, _words(_MOVE, to), others)
        return to.begin(ring)

    def put_back(self, ring: Ring, to: WindowState) -> None:
        """Have the window stand there on all machines, also where it stands further."""
        self._neighbours.say(ring, _words(_PUT_BACK, to))
        to.put_back(ring)


_SEEN = len(WindowState._fields) + 2


def _seen_there(words: Longs) -> Seen:
    *standing, ready, fresh = words.tolist()
    return Seen(WindowState(*standing), ready, bool(fresh))


def _words(kind: int, standing: WindowState) -> Longs:
    return np.array([kind, *standing], np.int64)
