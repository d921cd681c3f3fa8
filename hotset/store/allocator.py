"""The allocator: memory is reserved in extents before it is touched, against the real limit.

Two regions are allocated, rows and lines, each from its beginning to its end, in extents that belong to
one slot. Inside its extent a process takes rows and lines without a lock. An extent is

1. checked against the cache's own limit (the live word ``LIMIT``), to the byte, and against the budget that
   it may share with other caches (a session's);
2. checked against what the machine and every enclosing control group still have, less what a loader's batches
   may take: where a touched page exceeds a control group's limit, the kernel kills the process;
3. reserved with ``posix_fallocate``, so that a full tmpfs or disk is an error here and not SIGBUS later;
4. only then entered in the shared words, so that a process killed in between has taken nothing.

Extents grow with what was allocated so far (a quarter of it), so that a small cache takes little more than
its data, and shrink as the limit comes near (a sixteenth of what is left), so that processes which write no
more strand little. A dead process's extent passes to its slot's next holder.

A cache never evicts a sample to make room for another: with shuffled epochs every sample is equally likely to
be next, so evicting cannot raise the hit rate. But *other* caches of the budget that no process uses can be
freed: where the budget is exhausted, they are asked to give their memory back (:meth:`Allowance.make_room`),
and the extent is tried again. That may take seconds, so no lock of the segment is held meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from hotset.store import memory_limits
from hotset.store.claims import Participant
from hotset.store.format import LINE, ON_DISK, PRESENT, RECORD_HEADER, ROW_MASK, Live, Slot, split_tail

__all__ = ["Allocator", "Allowance", "distrust_allocator"]

_LARGEST_EXTENT = 4 << 20
_RETRY_SECONDS = 0.5
_PART = 64
_TRIES = 4  # others may be quicker to take what was given back


class Allowance(Protocol):
    """A budget that this segment shares with others."""

    def left(self) -> int:
        """Bytes that this segment may hold in all, with what :meth:`make_room` would give it."""

    def take(self, total: int) -> bool:
        """Let this segment hold this many bytes in all; False if the budget has not that many."""

    def make_room(self, total: int, more: int = 0) -> str | None:
        """Free caches of the budget that no process uses; may take seconds.

        Args:
            total: bytes that this segment is to hold in all.
            more: bytes that are to be given back in any case.

        Returns:
            A sentence for the user, which may be empty; None if no cache can be freed.
        """


class _Shortage(NamedTuple):
    """Why there is no extent.

    Attributes:
        why: a sentence; None if the short lock could not be had.
        total: bytes that the segment would hold with the extent, if other caches might make room; else 0.
        more: bytes that the machine lacks, whatever the budget has.
    """

    why: str | None = None
    total: int = 0
    more: int = 0


class _Region(NamedTuple):
    """The rows or the lines of a segment, and the words that say which of them are reserved.

    Attributes:
        next_word: of a slot: the next unit (row or line) of its extent; the word behind it is its end.
        live_word: of the header: how many units slots have reserved so far.
        start: where the region begins in the file.
        size: bytes of a unit.
        capacity: how many units there are.
    """

    next_word: int
    live_word: int
    start: int
    size: int
    capacity: int


class Allocator:
    """Allocates rows and lines of a segment to this process.

    ``free`` says what a disk has left; None in memory, which the machine and its control groups bound.

    Attributes:
        knob: the argument by which the user set the limit.
        allowance: the budget that it shares with other caches; None if it shares none.
        in_flight: bytes that a loader's batches may take at a time; memory keeps room for them.
        why_full: a sentence that says why room was last refused; None if it never was.
        notes: sentences for the user; the caller that shows them removes them.
    """

    def __init__(
        self, participant: Participant, free: Callable[[], memory_limits.Headroom] | None = None
    ) -> None:
        self._participant = participant
        self._free_elsewhere = free
        self._segment = participant.segment
        self._geometry = geometry = participant.segment.geometry
        self._rows = _Region(Slot.ROW_NEXT, Live.ROWS_NEXT, geometry.rows_at, geometry.stride, geometry.rows)
        self._lines = _Region(Slot.LINE_NEXT, Live.LINES_NEXT, geometry.lines_at, LINE, geometry.lines)
        self._refused_until = 0.0
        self._left: dict[tuple[int, int], tuple[int, int]] = {}
        self._affordable = 0
        self.knob = "`memory=`"
        self.allowance: Allowance | None = None
        self.in_flight = 0
        self.why_full: str | None = None
        self.notes: list[str] = []

    def _free(self) -> memory_limits.Headroom:
        """What is left where the records lie; of memory, when the batches in flight have taken theirs."""
        if self._free_elsewhere is not None:
            return self._free_elsewhere()
        free = memory_limits.headroom()
        return replace(free, bytes=max(free.bytes - self.in_flight, 0))

    @property
    def is_full(self) -> bool:
        """Whether the last extent was refused, less than half a second ago."""
        return time.monotonic() < self._refused_until

    def reserve(self, places: Sequence[int], tails: Sequence[int]) -> list[tuple[int, int]]:
        """Give a row to each of these records, and a run of lines to each tail.

        The caller keeps other threads of this process out until the records are published, or will not be,
        and has called :meth:`settle`.

        Args:
            places: where their words are in the index (ignored here: rows are allocated in order).
            tails: lines of each record's tail; 0 for none.

        Returns:
            Row and first line of each record, in order; fewer than asked for if an extent ends, and none if
            there is no room.
        """
        given: list[tuple[int, int]] = []
        rows = self._take_rows(len(tails))
        for row, lines in zip(rows, tails, strict=False):
            line = self.take_lines(lines) if lines else 0
            if line < 0:
                self._give_back(rows[len(given) :])
                break
            given.append((row, line))
        return given

    def settle(self) -> None:
        """End what :meth:`reserve` began. Here room is taken as soon as it is reserved."""

    def take_lines(self, count: int) -> int:
        """Take a run of lines; returns its first line, or -1 without room. As :meth:`reserve` otherwise."""
        first, taken = self._take(self._lines, count, count)
        return first if taken else -1

    def place(self, row: int) -> bool:
        """Whether this row, which belongs to no extent, may be touched; False if there is no room.

        For segments in which each sample has its own row; the caller has claimed the sample, and keeps other
        threads of this process out.
        """
        if not self._affords(self._geometry.stride):
            return False
        live = self._segment.live
        if row < int(live[Live.ROWS_NEXT]):
            return True
        with self._participant.short_lock() as held:
            if held:
                # A little beyond the row, so that rows written one after the other seldom need the lock.
                after = int(live[Live.ROWS_NEXT])
                live[Live.ROWS_NEXT] = min(max(row + 1, after, after * 17 // 16), self._geometry.rows)
            return held

    def _affords(self, size: int) -> bool:
        """Whether the machine has this many bytes more to touch."""
        if self.is_full:
            return False
        if self._affordable < size:
            free = self._free()
            room = free.bytes - self._geometry.rows_at
            if size > room:
                return self.refuse(self._no_memory(free))
            self._affordable = max(size, min(room // 16, _LARGEST_EXTENT))
        self._affordable -= size
        return True

    def has_room(self) -> bool:
        """Whether one more record, of the smallest size, can be stored now.

        Once room was refused to any process, this is False until a 64th of the limit is free again: the
        refused record was stored elsewhere, and is looked for there, though a smaller one would still fit.
        """
        live = self._segment.live
        if self.is_full or (live[Live.FULL] and self._left_of_limit() < self._limit() // _PART):
            return False
        live[Live.FULL] = 0
        with self._participant.thread_lock:
            if self._own_extent(self._rows, 1) is None:
                return False
            if not live[Live.LINES_NEXT]:  # no record has needed lines so far
                return True
            return self._own_extent(self._lines, 1) is not None

    def _take_rows(self, count: int) -> list[int]:
        rows: list[int] = []
        while len(rows) < count:
            first, taken = self._take(self._rows, 1, count - len(rows))
            if not taken:
                break
            rows.extend(range(first, first + taken))
        return rows

    def _give_back(self, rows: list[int]) -> None:
        """Return the rows that were taken last; rows of an earlier extent are lost."""
        row, known = self._participant.row, (os.getpid(), Slot.ROW_NEXT)
        begin, end = int(row[Slot.ROW_NEXT]), int(row[Slot.ROW_END])
        while rows and rows[-1] == begin - 1:
            begin = rows.pop()
        left = begin, end
        row[Slot.ROW_NEXT] = begin
        self._left[known] = left

    def _take(self, region: _Region, least: int, most: int) -> tuple[int, int]:
        """Take up to ``most`` units; returns the first and how many, 0 if ``least`` cannot be had."""
        extent = self._own_extent(region, least)
        if extent is None:
            return 0, 0
        begin, end = extent
        taken = min(most, end - begin)
        # The row is entered as taken before it is written: a process killed in between loses the row; the
        # other order could allocate a published row. No call, so no interrupt, lies between the two stores.
        row, known, left = self._participant.row, (os.getpid(), region.next_word), (begin + taken, end)
        row[region.next_word] = begin + taken
        self._left[known] = left
        return begin, taken

    def _own_extent(self, region: _Region, least: int) -> tuple[int, int] | None:
        """This process's extent, from its next unit on, if need be a new one; None if it cannot be had."""
        begin, end = self._rest(region)
        if end - begin < least:
            if not self._extend(region, least):
                return None
            row = self._participant.row
            begin, end = int(row[region.next_word]), int(row[region.next_word + 1])
            self._left[os.getpid(), region.next_word] = begin, end
        return begin, end

    def _rest(self, region: _Region) -> tuple[int, int]:
        """What is left of this process's extent, from its next unit to its end; (0, 0) if that is damaged."""
        row = self._participant.row
        begin, end = int(row[region.next_word]), int(row[region.next_word + 1])
        # An extent that a predecessor left is believed if it lies in the region; an extent that has changed
        # since this process wrote it (damage, a clear) is not.
        known = self._left.get((os.getpid(), region.next_word), (begin, end))
        return (begin, end) if 0 <= begin <= end <= region.capacity and (begin, end) == known else (0, 0)

    def _extend(self, region: _Region, count: int) -> bool:
        """Reserve an extent of at least ``count`` units for this process's slot."""
        if self.is_full or self._participant.slot < 0:
            return False
        tries = 0
        while (shortage := self._try_to_extend(region, count)) is not None:
            tries += 1
            if tries > _TRIES or not self._makes_room(shortage):
                return False if shortage.why is None else self.refuse(shortage.why)
        return True

    def _try_to_extend(self, region: _Region, count: int) -> _Shortage | None:
        """Reserve an extent; return what stands in the way, if something does."""
        live, row, size = self._segment.live, self._participant.row, region.size
        with self._participant.short_lock() as held:
            if not held:
                return _Shortage()
            first = max(int(live[region.live_word]), 0)
            taken = self._segment.taken
            left = min(region.capacity - first, self._left_of_limit() // size)
            units = max(count, min(left // 16, _LARGEST_EXTENT // size, max(first // 4, 16 * count)))
            # A record's lines lie in one extent. Records are often alike, so a multiple of this one strands
            # nothing; of long ones that differ, too much would be stranded if they shared an extent.
            units = count if units < 4 * count else units - units % count
            free = self._free()
            # The index is touched word by word, as samples come in: it may still take all its bytes.
            room = free.bytes - self._geometry.rows_at
            if units * size > room:
                units = count
            begin, end = self._rest(region)
            kept = end - begin if end == first else 0  # the old extent goes on, if none lies between
            units -= kept
            if units > left:
                return _Shortage(self._limit_reached())
            total = taken + units * size
            if units * size > room:
                return _Shortage(self._no_memory(free), total, units * size)
            # Entered before it is reserved: killed in between, this process leaves the budget too small.
            if self.allowance is not None and not self.allowance.take(total):
                return _Shortage(self._limit_reached(), total)
            if not self._segment.reserve(region.start + first * size, units * size):
                if self.allowance is not None:
                    self.allowance.take(taken)
                return _Shortage(self._file_system_full(), total, units * size)
            # No call lies between these stores, so no interrupt either, by which an extent would be lost.
            # What was left of the old one elsewhere (too short a run of lines) is given up.
            live[region.live_word] = first + units
            row[region.next_word] = first - kept
            row[region.next_word + 1] = first + units
        return None

    def _makes_room(self, shortage: _Shortage) -> bool:
        """Free other caches of the budget; whether that gave enough back for another try."""
        live = self._segment.live
        if self.allowance is None or not shortage.total or (shortage.more and live[Live.FREED_IN_VAIN]):
            return False
        before = self._free().bytes
        note = self.allowance.make_room(shortage.total, shortage.more)
        if note:
            self.notes.append(note)
        # The memory of other caches may be charged to another control group than the one that is full.
        if shortage.more and note is not None and self._free().bytes < before + shortage.more // 2:
            live[Live.FREED_IN_VAIN] = 1
        return note is not None

    def _left_of_limit(self) -> int:
        """Bytes that the limit, and the budget, leave."""
        return self._limit() - self._segment.taken

    def _limit(self) -> int:
        """Bytes that this segment may hold in all, by its own limit and by the budget."""
        own = int(self._segment.live[Live.LIMIT])
        return own if self.allowance is None else min(own, self.allowance.left())

    def _limit_reached(self) -> str:
        return f"its memory limit is reached; raise {self.knob}"

    def _file_system_full(self) -> str:
        return f"its file system is full; give it more (docker's --shm-size), free some, or lower {self.knob}"

    def _no_memory(self, free: memory_limits.Headroom) -> str:
        return f"{free.what} has no more to give; lower {self.knob} or free some"

    def reopen(self) -> None:
        """Forget that room was refused: the segment was emptied."""
        self.why_full = None
        self._refused_until = 0.0

    def refuse(self, why: str) -> bool:
        """Note why there is no room; it is tried again after half a second. Returns False."""
        self.why_full = why
        self._segment.live[Live.FULL] = 1
        self._refused_until = time.monotonic() + _RETRY_SECONDS
        return False


def distrust_allocator(participant: Participant) -> None:
    """In a file that may be damaged, raise the counters of allocated room above all records in use.

    After a crash of the machine these counters may be older than the index.
    """
    segment, geometry, live = participant.segment, participant.segment.geometry, participant.segment.live
    words = segment.used_index
    words = words[words >= PRESENT]
    rows = words[words & ON_DISK == 0] & ROW_MASK
    rows = rows[rows < geometry.rows].tolist()
    if not rows:
        return
    lines = max(_end_of_tail(participant, row) for row in rows)
    with participant.short_lock() as held:
        if held:
            live[Live.ROWS_NEXT] = max(int(live[Live.ROWS_NEXT]), max(rows) + 1)
            live[Live.LINES_NEXT] = max(int(live[Live.LINES_NEXT]), lines)


def _end_of_tail(participant: Participant, row: int) -> int:
    """The line after a record's tail; 0 if it is damaged. The file, not the mapping, is read."""
    segment, geometry = participant.segment, participant.segment.geometry
    word = os.pread(segment.fd, 8, geometry.rows_at + row * geometry.stride + RECORD_HEADER)
    end = sum(split_tail(int.from_bytes(word, "little")))
    return end if end <= geometry.lines else 0
