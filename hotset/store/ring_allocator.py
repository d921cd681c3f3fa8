"""Room in a ring: rows are where their slots are, and lines wherever nobody needs the ones that were there.

**Room for tails** is found by looking, under the short lock: the runs of all records are in use, so is what
living processes have in their extents, and everything between is free. There is no free list which a killed
process could leave wrong, and nothing that it had is lost. In the order of preference an extent comes from

1. a gap between runs, the widest; since entries leave in the order in which they came, gaps grow together;
2. lines never used so far, as far as limit and memory go;
3. the runs of entries that have left, oldest first, no more of them than needed. Their words go first.

One look serves as many records as fit into the extent. Two orders of effects keep a record from being
overwritten: a process moves the beginning of its extent only *after* publishing what it wrote there, and who
looks reads the extents *before* the words. So each run is seen in an extent, or in a record, or in both.

**Shared** by several machines, a ring has all slots on each of them, and rows only in those that it owns: the
others' are holes in the file, and take nothing. So ``ROWS_NEXT`` counts rows there, wherever they are. Which
slots it owns changes as machines come and go, and it may keep what others had no room for. So at the limit,
and where the file system is full, rows are made holes again that nobody needs, those of entries that left
longest ago first: their words go, then whoever still copies from them is waited for, and then their pages.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence

import numpy as np

from hotset.store import memory_limits as memory
from hotset.store.allocator import Allocator
from hotset.store.claims import Ids, Participant
from hotset.store.format import CLAIMED, LINE, PAGE, RECORD_HEADER, TAIL_COUNT_BITS, Live, Slot
from hotset.store.fsck import RECORD
from hotset.store.ring_index import RingIndex
from hotset.store.segment import Segment, Words

__all__ = ["RingAllocator", "is_shared"]

# An extent is at most so many lines, and such a part of all: what processes have and do not use is little.
_LARGEST_EXTENT = (4 << 20) // LINE
_SHARES = 256
# Of a shared ring's rows so many are freed at once, of so many that are looked at, and readers end by then.
_FREED = 64
_LOOKED_AT = 4096
_READERS_SECONDS = 0.1


def is_shared(segment: Segment) -> bool:
    """Whether a segment is a ring of which other machines hold the rest."""
    return bool(segment.metadata.get("shared"))


class RingAllocator(Allocator):
    """Rows that are where their slots are, and lines wherever nobody needs the ones that were there."""

    def __init__(self, member: Participant) -> None:
        super().__init__(member)
        # A predecessor's extent may hold records by now, and is no longer in use.
        member.inherits = False
        segment, geometry = member.segment, member.segment.geometry
        self._is_shared = is_shared(segment)
        self._index = RingIndex(segment)
        at = geometry.rows_at + RECORD_HEADER
        self._tails: Words = np.ndarray((geometry.rows,), np.int64, segment.buffer, at, (geometry.stride,))
        # How far this process's extent is used, and where it ends.
        self._extent = 0, 0
        self._looked = 0  # up to which slot it was looked for rows of nobody

    def has_room(self) -> bool:
        return not self.is_full  # whether there is room depends on which entry it is

    def place(self, row: int) -> bool:
        if row >= self._geometry.rows:
            return self.refuse(self._limit_reached())
        if self._was_written(row):
            return True
        at, stride = self._row_at(row), self._geometry.stride
        if self._is_shared and not (self._affords(stride) and self._count_row()):
            return False
        # Where no file system ends, the look at the headroom was enough.
        if self._segment.bounded and not self._segment.reserve(at, stride):
            if self._is_shared:
                with self._member.short_lock() as held:
                    freed = held and self._free_rows()
                if freed and self._segment.reserve(at, stride):
                    return True
                self._count_off(1)
            return self.refuse(self._file_system_full())
        return self._is_shared or super().place(row)

    def _count_row(self) -> bool:
        """Count one more row of a shared ring as taken; False if its limit or the session's is reached."""
        live = self._segment.live
        with self._member.short_lock() as held:
            if not held or not (self._grants_row() or (self._free_rows() and self._grants_row())):
                return self.refuse(self._limit_reached())
            live[Live.ROWS_NEXT] += 1
        return True

    def _count_off(self, rows: int) -> None:
        live = self._segment.live
        with self._member.short_lock() as held:
            if held:
                live[Live.ROWS_NEXT] -= rows
                self._grants(self._geometry.taken(int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT])))

    def _grants_row(self) -> bool:
        live = self._segment.live
        return self._grants(self._geometry.taken(int(live[Live.ROWS_NEXT]) + 1, int(live[Live.LINES_NEXT])))

    def _grants(self, total: int) -> bool:
        """Whether a shared ring may hold so much here."""
        if total > int(self._segment.live[Live.LIMIT]):
            return False
        return self.allowance is None or self.allowance.take(total)

    # ---- rows that nobody needs ----------------------------------------------------------------------

    def _row_at(self, row: int) -> int:
        return self._geometry.rows_at + row * self._geometry.stride

    def _was_written(self, row: int) -> bool:
        """Whether a row has its memory. Read past the mapping: looking would take it."""
        (length, *_) = RECORD.unpack(os.pread(self._segment.fd, RECORD_HEADER, self._row_at(row)))
        return bool(length)

    def _free_rows(self) -> bool:
        """Make holes again of a few rows that nobody needs; whether there were any.

        The caller has the short lock, so no slot without a record is claimed meanwhile.
        """
        live, index = self._segment.live, self._segment.index
        wanted = int(live[Live.ROWS_NEXT]) // _FREED + 1
        _, left = self._index.records()
        found = left[:wanted].tolist()
        index[found] = 0
        if len(found) < wanted:
            found += self._without_record(wanted - len(found), set(found))
        # One who had seen the words may be copying: where the file system is full, touching a hole kills.
        if not found or not self._member.unread(_READERS_SECONDS):
            return False
        for row in found:  # one by one: whoever is killed here leaves one row too many counted
            self._segment.write(memoryview(bytes(RECORD_HEADER)), self._row_at(row))
            live[Live.ROWS_NEXT] -= 1
        for row in found:
            self._discard(row)
        return True

    def _discard(self, row: int) -> None:
        """Give the pages of a row back, but for those that a neighbour needs."""
        first, last = self._row_at(row) // PAGE, (self._row_at(row + 1) - 1) // PAGE
        last -= last > first and self._is_needed(last)
        first += self._is_needed(first)
        self._segment.discard(first * PAGE, (last + 1 - first) * PAGE)

    def _is_needed(self, page: int) -> bool:
        """Whether a page holds a row, or what lies before the rows or behind them."""
        geometry = self._geometry
        first = (page * PAGE - geometry.rows_at) // geometry.stride
        last = ((page + 1) * PAGE - 1 - geometry.rows_at) // geometry.stride
        if last >= geometry.rows:
            return True
        words = self._segment.index[first : last + 1]
        return any(word >= CLAIMED or self._was_written(first + i) for i, word in enumerate(words.tolist()))

    def _without_record(self, most: int, known: set[int]) -> list[int]:
        """Slots that have a row and no record: what was in it was refused, or its lines were given up."""
        absent = np.flatnonzero(self._segment.index[: self._geometry.rows] < CLAIMED)
        absent = np.roll(absent, -int(np.searchsorted(absent, self._looked)))[:_LOOKED_AT]
        found: list[int] = []
        for row in absent.tolist():
            self._looked = row + 1
            if row not in known and self._was_written(row):
                found.append(row)
                if len(found) == most:
                    break
        return found

    # ---- lines ---------------------------------------------------------------------------------------

    def lend(self, places: Sequence[int], tails: Sequence[int]) -> list[tuple[int, int]]:
        """Places for as many of these records as have rows, and fit into one extent."""
        given: list[tuple[int, int]] = []
        for row, lines in zip(places, tails, strict=True):
            # A new extent only for the first: in the old one, the others are not published yet.
            if lines and not self._fits(lines) and (given or not self._extend_to(lines)):
                break
            # Last, as a row that has its place counts, whatever becomes of it.
            if not self.place(row):
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

    def settle(self) -> None:
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
        rows = int(live[Live.ROWS_NEXT]) if self._is_shared else geometry.rows
        limit = (int(live[Live.LIMIT]) - geometry.taken(rows, 0)) // LINE
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
        by_limit = why is None or why == self._limit_reached()
        if lines < count and self._is_shared and by_limit and self._free_rows():
            return self._find(count)
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
        if self._is_shared and not self._grants(geometry.taken(int(live[Live.ROWS_NEXT]), lines)):
            return self._limit_reached()
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
