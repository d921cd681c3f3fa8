"""An allocator for stores whose rows are fixed, and whose lines are used again.

The row of each index word belongs to it for good, and needs no allocator: it is touched when its first record
is written. The lines of tails are used again, so a free run has to be found. There is no free list, which a
killed process could leave wrong: under the short lock the runs of all records and the extents of living
processes are in use, and all other lines are free. The subclass says which of them to take, and which records
it gives up for that (:meth:`FixedRowAllocator._find`).

A process takes lines from its extent without a lock. Two orders of effects keep a record from being
overwritten: the process moves the beginning of its extent only *after* it has published what it wrote there
(:meth:`FixedRowAllocator.settle`), and the search reads the extents *before* the index words. So each run is
seen in an extent, or in a record, or in both. A dead process's extent is free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from hotset.store.allocator import Allocator
from hotset.store.claims import Participant
from hotset.store.format import LINE, RECORD, RECORD_HEADER, Live, Slot, split_tail
from hotset.store.segment import Words

__all__ = ["FixedRowAllocator"]


class FixedRowAllocator(Allocator):
    """Allocates memory of a store in which each index word has a row of its own."""

    # Whether lines are allocated before they are written, also where no file system bounds the segment. A
    # write to the file allocates as well, in half the time, and fails without room; a touch of the mapping
    # would be killed.
    _reserves_memory = True

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant)
        # A dead predecessor's extent counts as free, so it may hold other records by now.
        participant.inherits = False
        segment, geometry = participant.segment, participant.segment.geometry
        at = geometry.rows_at + RECORD_HEADER
        self._tails: Words = np.ndarray((geometry.rows,), np.int64, segment.buffer, at, (geometry.stride,))
        # The next line of this process's extent, and its end.
        self._extent = 0, 0

    def has_room(self) -> bool:
        return not self.is_full  # whether there is room depends on the record

    def place(self, row: int) -> bool:
        if row >= self._geometry.rows:
            return self.refuse(self._limit_reached())
        at, stride = self._geometry.rows_at + row * self._geometry.stride, self._geometry.stride
        (length, *_) = RECORD.unpack(os.pread(self._segment.fd, RECORD_HEADER, at))  # touches no page
        if length:
            return True  # a record was written here before
        # Where no file system bounds the segment, the check of the headroom was enough.
        if self._segment.bounded and not self._segment.reserve(at, stride):
            return self.refuse(self._file_system_full())
        return super().place(row)

    def reserve(self, places: Sequence[int], tails: Sequence[int]) -> list[tuple[int, int]]:
        """Row and first line for as many of these records as have rows and fit into one extent."""
        given: list[tuple[int, int]] = []
        for row, lines in zip(places, tails, strict=True):
            # A new extent only for the first: the others in the old extent are not published yet.
            if lines and not self._fits(lines) and (given or not self._extend_to(lines)):
                break
            # Last, as a row counts once it was placed.
            if not self.place(row):
                break
            first, end = self._extent
            given.append((row, first if lines else 0))
            self._extent = first + lines, end
        return given

    def _fits(self, lines: int) -> bool:
        """Whether this process still has an extent, with this many lines left in it."""
        first, end = self._extent
        # After a clear, or in another slot (that of a forked child), there is none.
        return int(self._participant.row[Slot.LINE_END]) == end and end - first >= lines

    def settle(self) -> None:
        """Move the extent's beginning past the reserved lines: their records are published, or given up."""
        if self._fits(0):
            self._participant.row[Slot.LINE_NEXT] = self._extent[0]

    def _extend_to(self, count: int) -> bool:
        """Find an extent of ``count`` lines or more; this process has nothing unpublished in its old one."""
        if self.is_full or self._participant.slot < 0:
            return False
        with self._participant.short_lock() as held:
            if not held:
                return False
            first, lines = self._find(count)
            if not lines:
                return False
            row = self._participant.row
            row[Slot.LINE_NEXT], row[Slot.LINE_END] = first, first + lines
            self._extent = first, first + lines
        return True

    def _find(self, count: int) -> tuple[int, int]:
        """First line and length of a new extent, 0 without room; the caller has the short lock."""
        raise NotImplementedError

    def _grow(self, lines: int) -> str | None:
        """Raise the number of lines in use to this many; returns what prevents that, or None."""
        live, geometry = self._segment.live, self._geometry
        now = int(live[Live.LINES_NEXT])
        size = (lines - now) * LINE
        if size <= 0:
            return None
        free = self._free()
        if size > free.bytes - geometry.rows_at:
            return self._no_memory(free)
        reserves = self._segment.bounded or self._reserves_memory
        if reserves and not self._segment.reserve(geometry.lines_at + now * LINE, size):
            return self._file_system_full()
        live[Live.LINES_NEXT] = lines
        return None

    def tails_of(self, rows: Words) -> Words:
        """How many lines the tails of the records in these rows have."""
        counts: Words = split_tail(self._tails[rows])[1]
        return counts

    def _extents_of_others(self) -> tuple[Words, Words]:
        """First lines and ends of the extents that other living processes have."""
        extents = self._segment.slots[:, Slot.LINE_NEXT : Slot.LINE_END + 1].copy()
        extents[self._participant.slot] = 0
        own = np.flatnonzero(extents[:, 1] > extents[:, 0])
        own = own[[self._participant.is_alive(slot) for slot in own.tolist()]]
        return extents[own, 0], extents[own, 1]
