"""The ring: a store whose rows are used again, for a window that runs over more samples than it can hold.

Samples enter the window in an endless sequence of *entries* 0, 1, 2, ... (:mod:`hotset.policy.window`), and
here an entry's number is the sample's. The live word ``CURSOR`` says how many have left; it only ever rises.
Any M entries in a row are different samples, so entry ``k`` has its place in slot ``k mod M``, in *lap*
``k div M``, and rows need no allocator::

    entry   ... cursor-1 │ cursor ............ cursor+N-1 │ ... cursor+M-1 │ ...
                  left   │         resident               │    incoming    │ to come
    slot             ────┴── each of the M slots once ────┴────────────────┴─ again from here

The index has a word for each slot. A record's word holds its lap in the place of the generation, so that a
reader knows the one word that means its entry; every other means "absent"::

    absent or left ── claim ──> claimed ── publish ──> present in lap l ── cursor passes ──> left
        ^                          │                                                          │
        └── refused in lap l <─────┴── no room, or another form                its lines, or its slot,
                                                                               are wanted by another entry

**Readers** take no lock: they load the words, copy, and load the words again. Equal words mean that nobody
wrote there meanwhile, because a word never comes back once it was gone: what is resident is never replaced
and what has left is never claimed again. (The lap's 20 bits repeat after a million laps, which no reader
sleeps through. A *clear* lets words come back, and counts the era up.) The tail's place in a row that was
being written is garbage, so the words are looked at before it is used, too.

**Who may claim**: one of the M entries from the cursor on, in a slot with no record of another of them. So a
slow process never writes an old entry over a newer one, nor a fast one over what others still use. Claims do
not carry the lap: that of another lap keeps the slot busy, and the entry absent, while its claimant lives.

**Refused** is a word of its own (``lap + 1``, as small as that). To readers it is absent, and who needs the
entry may claim it; but it was tried, and the window need not wait for it: :meth:`Ring.settled`.

**Room for tails** is found by looking, under the short lock: the runs of all records are in use, so is what
living processes have in their extents, and everything between is free. There is no free list which a killed
process could leave wrong, and nothing that it had is lost. In the order of preference an extent comes from

1. a gap between runs, the widest; since entries leave in the order in which they came, gaps grow together;
2. lines never used so far, as far as limit and memory go;
3. the runs of entries that have left, oldest first, no more of them than needed. Their words go first.

One look serves as many records as fit into the extent. Two orders of effects keep a record from being
overwritten: a process moves the beginning of its extent only *after* publishing what it wrote there, and who
looks reads the extents *before* the words. So each run is seen in an extent, or in a record, or in both.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hotset.store import memory
from hotset.store.check import RECORD
from hotset.store.claims import Ids, Index, Membership
from hotset.store.format import (
    GENERATION_MASK,
    GENERATION_SHIFT,
    LINE,
    PRESENT,
    RECORD_HEADER,
    ROW_MASK,
    TAIL_COUNT_BITS,
    Live,
    Slot,
)
from hotset.store.room import Room
from hotset.store.schema import Schema
from hotset.store.segment import Words
from hotset.store.store import Store

__all__ = ["Ring"]

Mask = npt.NDArray[np.bool_]

# An extent is at most so many lines, and such a part of all: what processes have and do not use is little.
_LARGEST_EXTENT = (4 << 20) // LINE
_SHARES = 256


class _RingIndex(Index):
    """The index words of a ring: one for each slot, which entries use in turn."""

    def words(self, ids: Ids) -> Words:
        """The words of the slots, but 0 where a slot has another lap's record."""
        laps, slots = np.divmod(ids, len(self._words))
        found: Words = self._words[slots]
        wanted = (laps & GENERATION_MASK) << GENERATION_SHIFT | PRESENT | slots
        other = found != wanted
        if np.logical_or.reduce(other):
            found[other & (found >= PRESENT)] = 0
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
        # What lies a lap or more ahead is wanted by a process that does not know that the window moved back.
        beyond = cursor + len(self._words)
        free = (held < cursor) | (held >= beyond) | (held == ids)
        here: Ids = ids[(ids >= cursor) & (ids < beyond) & free & (slots < self._segment.geometry.rows)]
        return here

    def records(self) -> tuple[Ids, Ids]:
        """The slots that have records, those of entries that have left first and in that order; and those."""
        words, cursor = self._words.copy(), self.cursor
        slots = np.flatnonzero(words >= PRESENT)
        held = self._held(slots, words[slots], cursor)
        slots = slots[np.argsort(held)]
        return slots, slots[: int((held < cursor).sum())]

    @property
    def cursor(self) -> int:
        """How many entries have left."""
        return int(self._segment.live[Live.CURSOR])

    def _held(self, slots: Ids, words: Words, cursor: int) -> Ids:
        """The entries that these slots have records or refusals of; -1 for none.

        The words hold 20 bits of the lap. Of the entries that one may mean, it is the one next to the cursor.
        """
        count, half = len(self._words), GENERATION_MASK // 2 + 1
        laps = np.where(words >= PRESENT, words >> GENERATION_SHIFT, words - 1)
        ahead = ((laps - cursor // count + half) & GENERATION_MASK) - half
        told = (words >= PRESENT) | ((words > 0) & (words <= GENERATION_MASK + 1))
        return np.where(told, (cursor // count + ahead) * count + slots, -1)


class _RingRoom(Room):
    """Rows that are where their slots are, and lines wherever nobody needs the ones that were there."""

    def __init__(self, member: Membership) -> None:
        super().__init__(member)
        # A predecessor's extent may hold records by now, and is no longer in use.
        member.inherits = False
        segment, geometry = member.segment, member.segment.geometry
        self._index = _RingIndex(segment)
        self._tails: Words | None = None
        if geometry.has_tail:
            at = geometry.rows_at + RECORD_HEADER
            self._tails = np.ndarray((geometry.rows,), np.int64, segment.buffer, at, (geometry.stride,))
        # How far this process's extent is used, and where it ends.
        self._extent = 0, 0

    @contextlib.contextmanager
    def lent(self, places: Sequence[int], tails: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        # No other thread may take lines, and a new extent for it, before these are published.
        with self._member.one_thread():
            try:
                yield self._lend(places, tails)
            finally:
                self._settle()

    def place(self, row: int) -> bool:
        if row >= self._geometry.rows:
            return self.refuse(self._limit_reached())
        # A row that was written before has its memory. Read past the mapping: looking would take it.
        at, stride = self._geometry.rows_at + row * self._geometry.stride, self._geometry.stride
        (length, *_) = RECORD.unpack(os.pread(self._segment.fd, RECORD_HEADER, at))
        if length:
            return not self.is_full
        # Where no file system ends, the look at the headroom was enough.
        if self._segment.bounded and not self._segment.reserve(at, stride):
            return self.refuse(self._file_system_full())
        return super().place(row)

    # ---- lines ---------------------------------------------------------------------------------------

    def _lend(self, rows: Sequence[int], tails: Sequence[int]) -> list[tuple[int, int]]:
        """Places for as many of these records as have rows, and fit into one extent."""
        given: list[tuple[int, int]] = []
        for row, lines in zip(rows, tails, strict=True):
            if not self.place(row):
                break
            # A new extent only for the first: in the old one, the others are not published yet.
            if lines and not self._fits(lines) and (given or not self._extend_to(lines)):
                break
            first, end = self._extent
            given.append((row, first if lines else 0))
            self._extent = first + lines, end
        return given

    def _fits(self, lines: int) -> bool:
        """Whether this process still has an extent, and so many lines left in it."""
        first, end = self._extent
        # After a clear, or in another slot (that of a forked child), there is none.
        return int(self._member.row[Slot.LINE_END]) == end and end - first >= lines

    def _settle(self) -> None:
        """Let go of what was taken of the extent: there is a record there now, or nothing."""
        if self._fits(0):
            self._member.row[Slot.LINE_NEXT] = self._extent[0]

    def _extend_to(self, count: int) -> bool:
        """Find an extent of ``count`` lines or more; this process has nothing unpublished in its old one."""
        if self.is_full or self._member.slot < 0:
            return False
        with self._member.short_lock() as held:
            if not held:
                return False
            first, lines = self._find(count)
            if not lines:
                return False
            row = self._member.row
            row[Slot.LINE_NEXT], row[Slot.LINE_END] = first, first + lines
            self._extent = first, first + lines
        return True

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

    def _grow(self, lines: int) -> str | None:
        """Have that many lines in all, where there are less; returns what stands in the way."""
        live, geometry = self._segment.live, self._geometry
        now = int(live[Live.LINES_NEXT])
        size = (lines - now) * LINE
        if size <= 0:
            return None
        free = memory.headroom()
        if size > free.bytes - geometry.rows_at:
            return self._no_memory(free)
        if not self._segment.reserve(geometry.lines_at + now * LINE, size):
            return self._file_system_full()
        live[Live.LINES_NEXT] = lines
        return None

    def _give_up(self, runs: _Runs, left: Ids, needed: int) -> tuple[int, int]:
        """Forget as few entries that have left as free so many lines, the oldest first; none if none do."""
        high = int(self._segment.live[Live.LINES_NEXT])
        fewest = bisect.bisect_left(range(len(left)), needed, key=lambda gone: runs.widest(gone, high)[1])
        found = runs.widest(fewest, high)
        if found[1] < needed:
            return runs.widest(0, high)
        self._segment.index[left[:fewest]] = 0
        return found

    def _runs(self) -> tuple[_Runs, Ids]:
        """The lines in use, and the slots of entries that have left, the oldest first."""
        assert self._tails is not None
        # Extents before words: what is published meanwhile is seen twice, and not missed.
        extents = self._segment.slots[:, Slot.LINE_NEXT : Slot.LINE_END + 1].copy()
        extents[self._member.slot] = 0
        own = np.flatnonzero(extents[:, 1] > extents[:, 0])
        own = own[[self._member.is_alive(slot) for slot in own.tolist()]]
        slots, left = self._index.records()
        tails = self._tails[slots]
        firsts, counts = tails >> TAIL_COUNT_BITS, tails & ((1 << TAIL_COUNT_BITS) - 1)
        ages = np.minimum(np.arange(len(slots)), len(left))
        begins, ends = extents[own].T
        return _Runs(
            np.concatenate([firsts, begins]),
            np.concatenate([firsts + counts, ends]),
            np.concatenate([ages, np.full(len(own), len(left))]),
        ), left


class _Runs:
    """Runs of lines in use, as they lie.

    Attributes:
        end: the line after the last of them.
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

    Wherever :class:`Store` speaks of samples and their numbers, these are entries, of any size from 0 on
    (int64); ``create`` is told the number of slots, and ``len`` returns it. What its readers get, and what
    :meth:`fill` stores, is the store's, and of entries that have left nothing is stored any more.

    The live word ``CURSOR`` is whoever's who moves the window. To move it back, :meth:`clear` the ring.

    Example:
        >>> import torch
        >>> from hotset.store.format import Live
        >>> schema = Schema.infer([torch.zeros(2)], as_lies=True)
        >>> ring = Ring.create(schema, 4, 1 << 20, about={})
        >>> _ = ring.fill(np.arange(4), lambda entry: torch.tensor([entry, 0.0]))
        >>> ring.segment.live[Live.CURSOR] = 2
        >>> _ = ring.fill(np.arange(4, 6), lambda entry: torch.tensor([entry, 0.0]))
        >>> ring.read(np.array([5, 2]))
        [tensor([5., 0.]), tensor([2., 0.])]
        >>> ring.present(np.arange(6)).tolist()
        [False, False, True, True, True, True]
        >>> ring.close()
    """

    _index_type = _RingIndex
    _room_type = _RingRoom
    _is_ring = True

    @staticmethod
    def _address_space(schema: Schema, samples: int, limit: int) -> tuple[int, int]:
        # Rows come first, so that rows and lines together never pass the limit.
        rows = min(samples, limit // schema.stride)
        return rows, max((limit - rows * schema.stride) // LINE, 1) if schema.has_tail else 0

    def unchanged(self, words: Words, era: int) -> bool:
        same: Mask = self.segment.index[words & ROW_MASK] == words
        return bool(np.logical_and.reduce(same)) and self.era() == era

    def holds(self, ids: Ids | None = None) -> bool:
        return ids is not None and super().holds(ids)  # all entries are more than there is room for

    @property
    def stored_bytes(self) -> int:
        slots, _ = _RingIndex(self.segment).records()
        lines = int(self.tails(slots).counts.sum()) if self.schema.has_tail else 0
        return self.segment.geometry.taken(len(slots), lines)

    def settled(self, entries: Ids) -> Mask:
        """Which of these entries are in the store, or were refused: those that nobody needs to wait for."""
        words = self.words(entries)
        settled: Mask = (words >= PRESENT) | (words == self.index.refusals(entries))
        # Where the limit has room for fewer rows than there are slots, some entries are never stored.
        settled |= self.index.places(entries) >= self.segment.geometry.rows
        return settled & (self.era() is not None)

    def refuse(self, entries: Ids) -> None:
        """Note that these entries were tried in vain, as far as they are absent and nobody is reading them.

        For who fills ahead of those who need the entries, and whose reading of the source failed.
        """
        self.filler.claims.refuse(entries)
