"""The ring: a store whose rows are used again, for a window that runs over more samples than it can hold.

Samples enter the window in an endless sequence of *entries* 0, 1, 2, ... (:mod:`hotset.policy.window`), and
the number of an entry is its sample id here. The live word ``CURSOR`` says how many have left; it only ever
rises. Any M consecutive entries are different samples, so entry ``k`` belongs in slot ``k mod M``, in *lap*
``k div M``, and rows need no allocator::

    entry   ... cursor-1 │ cursor ............ cursor+N-1 │ ... cursor+M-1 │ ...
                  left   │         resident               │    incoming    │ to come
    slot             ────┴── each of the M slots once ────┴────────────────┴─ again from here

The index has a word for each slot. A record's word holds its lap in the place of the generation, so that a
reader knows the one word that means its entry; every other word means "absent"::

    absent or left ── claim ──> claimed ── publish ──> present in lap l ── cursor passes ──> left
        ^                          │                                                          │
        └── refused in lap l <─────┴── no room, or cannot be kept              its lines, or its slot,
                                                                               are wanted by another entry

**Readers** take no lock: they load the words, copy, and load the words again. Equal words mean that no
process wrote there meanwhile, because a word never comes back once it was gone: a resident entry is never
replaced, and an entry that has left is never claimed again. (The lap's 20 bits repeat after a million laps,
which no read lasts. A *clear* lets words come back, and counts the clear generation up.) While a row is being
written, its tail word may be torn, so the index words are also loaded again before it is used.

**Claims** are given for the M entries from the cursor on, in slots with no record of another of them. So a
slow process never writes an old entry over a newer one, nor a fast one over an entry that others still use.
Claims do not hold the lap: a claim of another lap keeps the slot busy, and the entry absent, while its
claimant lives.

**Refused** is a word of its own, the small number ``lap + 1``. To readers the entry is absent, and a process
that needs it may claim it; but reading it has failed once, so the window does not wait for it
(:meth:`Ring.settled`). Nor does the window wait for an entry whose word says that it draws random numbers,
which no process may claim.

**Room for tails** is searched for as :mod:`hotset.store.fixed_rows` says. In order of preference an extent
comes from

1. the widest gap between runs; since entries leave in the order in which they came, gaps grow together;
2. lines never used so far, as far as limit and memory go;
3. the runs of entries that have left, oldest first, no more than needed. Their words are cleared first.

One search serves as many records as fit into the extent.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store.claims import Ids, Index, Participant
from hotset.store.fixed_rows import FixedRowAllocator
from hotset.store.format import (
    CLAIMED,
    DRAWS,
    GENERATION_MASK,
    GENERATION_SHIFT,
    LINE,
    OWN_FORM,
    PRESENT,
    ROW_MASK,
    Live,
    split_tail,
)
from hotset.store.leaves.schema import Schema
from hotset.store.segment import Address, Words
from hotset.store.store import Store

__all__ = ["Ring", "RingAllocator", "RingIndex", "WindowState", "attach_store"]

Mask = npt.NDArray[np.bool_]

# An extent is at most this many lines, and at most this part of all, so that little lies unused in extents.
_LARGEST_EXTENT = (4 << 20) // LINE
_SHARES = 256
_CLEAR_SECONDS = 1.0  # other processes wait meanwhile
# Where a window's position is, in the order of WindowState, in which it is read: the epoch before the cursor.
_WORDS = (Live.WINDOW_LOADS, Live.WINDOW_EPOCH, Live.WINDOW_CURSOR, Live.WINDOW_BEHIND, Live.WINDOW_LATE)


class RingIndex(Index):
    """The index words of a ring: one for each slot, which its entries use in turn."""

    def words(self, ids: Ids) -> Words:
        """The words of the entries' slots; 0 where the record or the drawing mark is of another lap."""
        laps, slots = np.divmod(ids, len(self._words))
        found: Words = self._words[slots]
        wanted = (laps & GENERATION_MASK) << GENERATION_SHIFT | PRESENT | slots
        other = found & ~OWN_FORM != wanted
        if np.logical_or.reduce(other):
            drawing = (found >= DRAWS) & (found < CLAIMED) & (found & ~DRAWS != (laps & GENERATION_MASK) + 1)
            found[(other & (found >= PRESENT)) | drawing] = 0
        return found

    def places(self, ids: Ids) -> Ids:
        return ids % len(self._words)

    def generations(self, ids: Ids) -> Words:
        return ids // len(self._words) & GENERATION_MASK

    def refusals(self, ids: Ids) -> Words:
        return self.generations(ids) + 1

    def admit(self, ids: Ids) -> Ids:
        if not len(ids):
            return ids
        slots, cursor = self.places(ids), self.cursor
        held = self._held(slots, self._words[slots], cursor)
        # A process that has not seen the window move back may ask for entries a lap or more ahead.
        beyond = cursor + len(self._words)
        free = (held < cursor) | (held >= beyond) | (held == ids)
        here: Ids = ids[(ids >= cursor) & (ids < beyond) & free & (slots < self._segment.geometry.rows)]
        return here

    def records(self) -> tuple[Ids, Ids]:
        """The slots that have records, in the order of their entries; and those whose entries have left."""
        words, cursor = self._words.copy(), self.cursor
        slots = np.flatnonzero(words >= PRESENT)
        held = self._held(slots, words[slots], cursor)
        slots = slots[np.argsort(held)]
        return slots, slots[: int((held < cursor).sum())]

    @property
    def cursor(self) -> int:
        """How many entries have left."""
        return int(self._segment.live[Live.WINDOW_CURSOR])

    def _held(self, slots: Ids, words: Words, cursor: int) -> Ids:
        """The entries whose records or refusals these slots have; -1 for none.

        The words hold 20 bits of the lap. Of the entries that a word may mean, it is the nearest to the
        cursor.
        """
        count, half = len(self._words), GENERATION_MASK // 2 + 1
        words = np.where((words >= DRAWS) & (words < CLAIMED), words & ~DRAWS, words)
        laps = np.where(words >= PRESENT, words >> GENERATION_SHIFT, words - 1)
        ahead = ((laps - cursor // count + half) & GENERATION_MASK) - half
        has_lap = (words >= PRESENT) | ((words > 0) & (words <= GENERATION_MASK + 1))
        return np.where(has_lap, (cursor // count + ahead) * count + slots, -1)


class RingAllocator(FixedRowAllocator):
    """Allocates a ring's memory: the row of each slot is fixed, and lines go where no record needs them."""

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant)
        self._index = RingIndex(participant.segment)

    def _find(self, count: int) -> tuple[int, int]:
        """First line and length of a new extent, 0 without room; the caller has the short lock."""
        live, geometry = self._segment.live, self._geometry
        limit = (int(live[Live.LIMIT]) - geometry.taken(geometry.rows, 0)) // LINE
        capacity = max(min(geometry.lines, limit), 0)
        most = max(count, min(_LARGEST_EXTENT, capacity // _SHARES))
        runs, left = self._runs()
        first, lines = runs.widest(0, int(live[Live.LINES_NEXT]))
        why = None
        if lines < most:
            why = self._grow(min(runs.end + most, capacity))
            first, lines = runs.widest(0, int(live[Live.LINES_NEXT]))
        for needed in (most, count):
            if lines < needed:
                first, lines = self._give_up(runs, left, needed)
        if lines < count:
            self.refuse(why or self._limit_reached())
            return 0, 0
        return first, min(lines, most)

    def _give_up(self, runs: _Runs, left: Ids, needed: int) -> tuple[int, int]:
        """Forget the fewest entries that have left, oldest first, that free this many lines, if any do."""
        high = int(self._segment.live[Live.LINES_NEXT])
        fewest = bisect.bisect_left(range(len(left)), needed, key=lambda gone: runs.widest(gone, high)[1])
        found = runs.widest(fewest, high)
        if found[1] < needed:
            return runs.widest(0, high)
        self._segment.index[left[:fewest]] = 0
        return found

    def _runs(self) -> tuple[_Runs, Ids]:
        """The lines in use, and the slots of entries that have left, the oldest first."""
        # Extents before words: a record that is published meanwhile is seen twice, not missed.
        begins, ends = self._extents_of_others()
        slots, left = self._index.records()
        firsts, counts = split_tail(self._tails[slots])
        ages = np.minimum(np.arange(len(slots)), len(left))
        return _Runs(
            np.concatenate([firsts, begins]),
            np.concatenate([firsts + counts, ends]),
            np.concatenate([ages, np.full(len(begins), len(left))]),
        ), left


class _Runs:
    """Runs of lines in use, in the order of the lines.

    Attributes:
        end: the line after the last run.
    """

    def __init__(self, firsts: Words, ends: Words, ages: Words) -> None:
        order = np.argsort(firsts, kind="stable")
        self._firsts, self._ends, self._ages = firsts[order], ends[order], ages[order]
        self.end = int(ends.max()) if len(ends) else 0

    def widest(self, gone: int, high: int) -> tuple[int, int]:
        """The widest gap below line ``high``, once the oldest ``gone`` runs are no longer in use."""
        used = self._ages >= gone
        begins = np.append(0, np.maximum.accumulate(self._ends[used]))
        widths = np.append(self._firsts[used], high) - begins
        best = int(widths.argmax())
        return int(begins[best]), max(int(widths[best]), 0)


class Ring(Store):
    """Entries of a running window in one segment, as this process sees them.

    Where :class:`Store` has samples and their ids, a ring has entries, any number from 0 on (int64);
    ``create`` takes the number of slots as ``samples``, and ``len`` returns it. Reading and filling are as in
    any store, but an entry that has left is never stored again.

    The caller moves the window by storing the live word ``CURSOR``. To move it back, :meth:`clear` the ring.

    Example:
        >>> import torch
        >>> from hotset.store.format import Live
        >>> schema = Schema.infer([torch.zeros(2)], keep_order=True)
        >>> ring = Ring.create(schema, 4, 1 << 20, about={})
        >>> _ = ring.fill(np.arange(4), lambda entry: torch.tensor([entry, 0.0]))
        >>> ring.segment.live[Live.WINDOW_CURSOR] = 2
        >>> _ = ring.fill(np.arange(4, 6), lambda entry: torch.tensor([entry, 0.0]))
        >>> ring.read(np.array([5, 2]))
        [tensor([5., 0.]), tensor([2., 0.])]
        >>> ring.present(np.arange(6)).tolist()
        [False, False, True, True, True, True]
        >>> ring.close()
    """

    _index_type = RingIndex
    _allocator_type = RingAllocator
    _is_ring = True

    @staticmethod
    def _address_space(schema: Schema, samples: int, limit: int) -> tuple[int, int]:
        # Rows come first, so that rows and lines together never pass the limit.
        rows = min(samples, limit // schema.stride)
        return rows, max((limit - rows * schema.stride) // LINE, 1)

    def unchanged(self, words: Words, clear_generation: int) -> bool:
        same: Mask = self.segment.index[words & ROW_MASK] == words
        return bool(np.logical_and.reduce(same)) and self.clear_generation() == clear_generation

    def holds(self, ids: Ids | None = None) -> bool:
        return ids is not None and super().holds(ids)  # a ring never holds all entries

    @property
    def stored_bytes(self) -> int:
        slots, _ = RingIndex(self.segment).records()
        lines = int(self.tails(slots).counts.sum())
        return self.segment.geometry.taken(len(slots), lines)

    def settled(self, entries: Ids) -> Mask:
        """Which of these entries are in the store, were refused, or draw: the window waits for the others."""
        words = self.words(entries)
        settled: Mask = (words >= PRESENT) | ((words & ~DRAWS) == self.index.refusals(entries))
        # If the limit has room for fewer rows than slots, some entries are never stored.
        settled |= self.index.places(entries) >= self.segment.geometry.rows
        return settled & (self.clear_generation() is not None)

    def refuse(self, entries: Ids) -> None:
        """Mark as refused those of these entries that are absent and that no process is reading.

        Called by a process that prepares entries ahead of use, when its reading of the source failed.
        """
        self.filler.claims.refuse(entries)


def attach_store(where: Address | str) -> Store:
    """Attach to a dataset's store, a ring or not.

    Raises:
        SegmentError: it is gone, or damaged.
    """
    try:
        return Store.attach(where)
    except SegmentError as error:
        if error.__cause__ is not None:  # it could not be opened or read, and is not known to be a ring
            raise
        return Ring.attach(where)


class WindowState(NamedTuple):
    """The position of a window, as the live words of its ring hold it. The greater of two is further.

    Attributes:
        loads: how often a saved state was loaded, which may move the window back.
        epoch: how many epochs have begun, 0 before the first.
        cursor: how many entries have left.
        behind: how many entries that were due have not come in yet.
        late: how many entries were ever late.
    """

    loads: int
    epoch: int
    cursor: int
    behind: int
    late: int

    @classmethod
    def of(cls, ring: Ring) -> WindowState:
        """The position of a ring's window."""
        return cls(*(int(ring.segment.live[word]) for word in _WORDS))

    def put(self, ring: Ring) -> None:
        """Store this position in a ring; the caller holds the short lock."""
        live = ring.segment.live
        # The cursor before the epoch: a process that sees the new epoch must see its cursor.
        live[Live.WINDOW_CURSOR] = self.cursor
        live[Live.WINDOW_BEHIND] = self.behind
        live[Live.WINDOW_LATE] = self.late
        live[Live.WINDOW_LOADS] = self.loads
        live[Live.WINDOW_EPOCH] = self.epoch

    def put_back(self, ring: Ring, leads: Callable[[WindowState, WindowState], bool]) -> None:
        """Move a ring's window to this position, even if that is back, unless it has come from there.

        Args:
            leads: whether a window that was in the first state is in the second one after an epoch, or still.
        """
        generation, now = ring.clear_generation(), WindowState.of(ring)
        if leads(self, now):
            return
        # An entry is never claimed twice, so the ring must not hold an entry that has left. If a process is
        # still writing, its records are given up slot by slot.
        if self.cursor < now.cursor:
            ring.clear(_CLEAR_SECONDS, generation=generation)
        with ring.participant.short_lock():
            # Another rank may have loaded the same state meanwhile, and begun.
            if not leads(self, WindowState.of(ring)):
                self.put(ring)
