"""The check: verifies every record, index word and extent of a segment, and names those that are damaged.

It needs the format only: which bytes a checksum covers does not depend on the schema. So ``hotset check``
needs no torch, and can verify a segment whose types it could not import.

It may run while other processes write. A problem with a record whose word has changed meanwhile is not
reported: in a ring that is how a row gets its next record.
"""

from __future__ import annotations

import itertools
import os

import numpy as np

from hotset.store import format as fmt
from hotset.store.format import GENERATION_MASK, PRESENT, RECORD, RECORD_HEADER, ROW_MASK, Live
from hotset.store.segment import Segment

__all__ = ["check_segment", "check_tiers", "content_problem", "record_problem"]


def record_problem(segment: Segment, sample: int, word: int) -> str | None:
    """What is wrong with the record that ``word`` says belongs to ``sample``; None if it is sound."""
    geometry = segment.geometry
    row = word & ROW_MASK
    if row >= geometry.rows:
        return f"sample {sample}: its index word names row {row:,} of {geometry.rows:,}"
    content = _part(segment, geometry.rows_at + row * geometry.stride, geometry.stride)
    if content is None:
        return f"sample {sample}: its record cannot be read"
    tail = None
    (tail_word,) = fmt.TAIL.unpack_from(content, RECORD_HEADER)
    if tail_word:
        first, lines = fmt.split_tail(tail_word)
        start, size = geometry.lines_at + first * fmt.LINE, lines * fmt.LINE
        if start + size > geometry.size:
            return f"sample {sample}: its record's tail lies outside the segment"
        tail = _part(segment, start, size)
        if tail is None:
            return f"sample {sample}: its record cannot be read"
    return content_problem(sample, word, content, tail)


def _part(segment: Segment, offset: int, length: int) -> memoryview | None:
    """A part of the file; None if it cannot be read.

    Not read through the mapping where a touch of that may be SIGBUS: a disk that fails, a full tmpfs whose
    pages were given back meanwhile.
    """
    if not segment.bounded:
        return memoryview(segment.buffer)[offset : offset + length]
    content = memoryview(bytearray(length))
    return content if segment.read(offset, content) else None


def content_problem(sample: int, word: int, row: memoryview, tail: memoryview | None) -> str | None:
    """What is wrong with a record, of which these are copies of row and tail; None if it is sound."""
    stamp = word >> fmt.GENERATION_SHIFT & fmt.STAMP_MASK
    length, written, crc = RECORD.unpack_from(row)
    tail_bytes = length - (len(row) - RECORD_HEADER)
    lines = 0 if tail is None else len(tail)
    if written != stamp or not 0 <= lines - tail_bytes < fmt.LINE or tail_bytes < 0:
        return f"sample {sample}: its record's header is damaged"
    body = tail[:tail_bytes] if tail is not None and tail_bytes else None
    if fmt.checksum(sample, length, stamp, row[RECORD_HEADER:], body) != crc:
        return f"sample {sample}: its record's checksum does not match"
    return None


def check_segment(segment: Segment) -> list[str]:
    """Verify every record, every index word and the extents of a segment; a sentence for each problem."""
    problems: list[str] = []
    geometry, live = segment.geometry, segment.live
    out_of_reach = _out_of_reach(segment)
    if out_of_reach is not None:
        return [out_of_reach]
    # In a ring a small word is the lap in which a sample was tried in vain, or was found to draw.
    refusals = GENERATION_MASK + 1 if segment.metadata.get("ring") is True else 0
    found = segment.used_index.copy()
    owners: dict[int, int] = {}
    tails: list[tuple[int, int, int]] = []
    for sample, word in enumerate(found.tolist()):
        if word >= PRESENT:
            if word & fmt.ON_DISK:
                # A record of the other segment, which is verified there.
                if "spill" not in segment.metadata:
                    problems.append(f"sample {sample}: its index word names a tier that does not exist")
                continue
            row = word & ROW_MASK
            problem = record_problem(segment, sample, word)
            tail = _tail(segment, row) if problem is None else None
            if segment.index[sample] != word:
                continue
            if problem is not None:
                problems.append(problem)
            if tail is not None:
                tails.append((*tail, sample))
            other = owners.setdefault(row, sample)
            if other != sample and segment.index[other] == found[other]:
                problems.append(f"samples {other} and {sample} share row {row}")
        elif not 0 <= word - (word & fmt.DRAWS) <= refusals and not fmt.CLAIMED <= word < PRESENT:
            problems.append(f"sample {sample}: its index word is damaged")
    tails.sort()
    for (_, end, one), (first, _, other) in itertools.pairwise(tails):
        if first < end and segment.index[one] == found[one] and segment.index[other] == found[other]:
            problems.append(f"samples {one} and {other} share line {first}")
    # Read after the index, as allocated room grows while others write, and before the index is looked at once
    # more, as a clear, which takes all room back, empties that first.
    rows_next, lines_next = int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT])
    same = segment.index[: len(found)] == found
    rows = max((row + 1 for row, sample in owners.items() if row < geometry.rows and same[sample]), default=0)
    lines = max((end for _, end, sample in tails if same[sample]), default=0)
    if rows > rows_next or lines > lines_next:
        problems.append("rows or lines in use lie beyond what was allocated, and would be allocated again")
    used, limit = segment.taken, int(live[Live.LIMIT])
    if not 0 <= used <= limit:
        problems.append(f"the extents add up to {used:,} bytes, and {limit:,} are allowed")
    return problems


def _out_of_reach(segment: Segment) -> str | None:
    """Why the records of a segment cannot be looked at; None if they can."""
    if not segment.bounded:
        return None  # mapped, and sealed against shrinking
    try:
        size = os.fstat(segment.own_fd()).st_size
    except OSError:
        return "its file cannot be read, as this program has closed it"
    return "the file was cut off before its first record" if size < segment.geometry.rows_at else None


def check_tiers(first: Segment, second: Segment) -> list[str]:
    """Verify that two tiers agree on what is in the second one; a sentence for each problem."""
    if _out_of_reach(second) is not None:
        return []  # check_segment has reported this
    words = first.index.copy()
    there = np.flatnonzero((words >= PRESENT) & (words & fmt.ON_DISK != 0))
    apart = there[words[there] & ~fmt.ON_DISK != second.index[there]]
    return [
        f"sample {sample}: the two tiers' index words disagree"
        for sample in apart.tolist()
        if first.index[sample] == words[sample]
    ]


def _tail(segment: Segment, row: int) -> tuple[int, int] | None:
    """The first line of a sound record's tail, and the one after its last; None if it has none."""
    geometry = segment.geometry
    word = _part(segment, geometry.rows_at + row * geometry.stride + RECORD_HEADER, 8)
    if word is None:
        return None
    first, lines = fmt.split_tail(*fmt.TAIL.unpack(word))
    return (first, first + lines) if lines else None
