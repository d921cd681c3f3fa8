"""Writes records into a segment: they are laid out in scratch memory, then written with one system call.

A record could be laid out in the mapping. But then each of its pages is faulted in and mapped, which costs
more than everything else together (117 us against 60 for 150 KB). ``pwrite`` puts the bytes into the same
pages without mapping them here, and a reader later faults sixteen at a time. So a run of records whose rows
follow each other is laid out in a scratch buffer that stays in the processor's cache, and written from there;
only a run that is larger than the buffer is laid out in the mapping.

A record is whole before its index word names it; publishing is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.store import format as fmt
from hotset.store import irregular_records as forms
from hotset.store.format import PRESENT, RECORD, RECORD_HEADER
from hotset.store.leaves.schema import Prepared, Schema
from hotset.store.segment import Segment

__all__ = ["Record", "Records", "lay_out"]

_SCRATCH = 1 << 20


class Record(NamedTuple):
    """A flattened sample, its index position and generation, and the row and line that it was given."""

    place: int
    generation: int
    prepared: forms.Flattened
    row: int
    line: int


class _Scratch(threading.local):
    """A buffer for each thread: writing lets other threads run."""

    def __init__(self) -> None:
        self.bytes = np.zeros(_SCRATCH, np.uint8)
        # Bytes at its beginning in which tails or bodies lay: rows need zeros between their leaves.
        self.used = 0


class Records:
    """Writes the records of one segment."""

    def __init__(self, segment: Segment, schema: Schema) -> None:
        self._segment = segment
        self._schema = schema
        self._scratch = _Scratch()

    def write(self, records: Sequence[Record]) -> list[int]:
        """Write records to their places; returns the index words that publish them.

        Raises:
            OSError: the file cannot be written (a disk that fails).
        """
        words: list[int] = []
        for run in self._runs(records) if records else ():
            words += self._write_run(run)
        return words

    def _runs(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Records in runs that are contiguous in the file, and small enough for the scratch buffer."""
        if not self._schema.has_tail and len(records) * self._segment.geometry.stride <= _SCRATCH:
            rows = [record.row for record in records]
            if rows == list(range(rows[0], rows[0] + len(rows))) and all(map(_is_common, records)):
                yield list(records)
                return
        run: list[Record] = []
        size = 0
        for record in records:
            own = self._segment.geometry.stride + record.prepared.tail_lines * fmt.LINE
            if run and (size + own > _SCRATCH or not _follows(run[-1], record)):
                yield run
                run, size = [], 0
            run.append(record)
            size += own
        if run:
            yield run

    def _write_run(self, run: list[Record]) -> list[int]:
        segment, geometry = self._segment, self._segment.geometry
        rows_at = geometry.rows_at + run[0].row * geometry.stride
        tails_at = geometry.lines_at + run[0].line * fmt.LINE
        rows = len(run) * geometry.stride
        size = rows
        if self._schema.has_tail or not all(map(_is_common, run)):
            size += sum(record.prepared.tail_lines for record in run) * fmt.LINE
        if size > _SCRATCH:
            return self._lay_out(run, segment.buffer, rows_at, tails_at)
        scratch = self._scratch.bytes
        scratch[: min(rows, self._scratch.used)] = 0
        words = self._lay_out(run, scratch.data, 0, rows)
        if size > rows or any(word & fmt.OWN_FORM for word in words):
            self._scratch.used = max(self._scratch.used, size)
        segment.write(scratch.data[:rows], rows_at)
        if size > rows:
            segment.write(scratch.data[rows:size], tails_at)
        return words

    def _lay_out(self, run: list[Record], buffer: Any, row_at: int, tail_at: int) -> list[int]:
        stride = self._segment.geometry.stride
        view = memoryview(buffer)
        if len(run) > 1 and not self._schema.has_tail and all(map(_is_common, run)):
            stamps = _lay_out_rows(self._schema, view, row_at, run)
            return [
                PRESENT | stamp << fmt.GENERATION_SHIFT | one.row
                for stamp, one in zip(stamps, run, strict=True)
            ]
        words = []
        for place, generation, prepared, row, line in run:
            stamp = lay_out(self._schema, view, row_at, tail_at, prepared, place, generation, line)
            words.append(PRESENT | stamp << fmt.GENERATION_SHIFT | row)
            row_at += stride
            tail_at += prepared.tail_lines * fmt.LINE
        return words


def lay_out(
    schema: Schema,
    buffer: memoryview,
    row_at: int,
    tail_at: int,
    prepared: forms.Flattened,
    place: int,
    generation: int = 0,
    line: int = 0,
) -> int:
    """Lay a record out, header and checksum included; returns its stamp.

    Args:
        buffer: where it goes; zeros between the leaves of its row.
        row_at, tail_at: offsets of its row and its tail.
        place: of its word in the index.
        line: number of the tail's first line in the segment.
    """
    stamp = forms.stamp(prepared, generation)
    forms.write(schema, buffer, row_at, prepared, line, tail_at)
    length = schema.stride - RECORD_HEADER + prepared.tail_bytes
    tail = buffer[tail_at : tail_at + prepared.tail_bytes] if prepared.tail_bytes else None
    crc = fmt.checksum(place, length, stamp, buffer[row_at + RECORD_HEADER : row_at + schema.stride], tail)
    RECORD.pack_into(buffer, row_at, length, stamp, crc)
    return stamp


def _lay_out_rows(schema: Schema, view: memoryview, row_at: int, run: Sequence[Record]) -> list[int]:
    """As :func:`lay_out`, for records without tails whose rows follow each other; leaf by leaf."""
    schema.write_rows(view, row_at, [one.prepared for one in run])  # type: ignore[misc]
    rows = np.frombuffer(view, np.uint8, len(run) * schema.stride, row_at).reshape(len(run), schema.stride)
    headers: npt.NDArray[np.uint32] = rows[:, :RECORD_HEADER].view("<u4")
    stamps = np.array([one.generation for one in run], np.int64)
    places = np.array([one.place for one in run], np.int64)
    lengths = np.full(len(run), schema.stride - RECORD_HEADER, np.int64)
    headers[:, 0], headers[:, 1] = lengths, stamps
    headers[:, 2], headers[:, 3] = fmt.checksums(places, lengths, stamps, rows), 0
    found: list[int] = stamps.tolist()
    return found


def _is_common(record: Record) -> bool:
    return type(record.prepared) is Prepared


def _follows(one: Record, other: Record) -> bool:
    """Whether ``other`` lies directly behind ``one`` in the file."""
    return other.row == one.row + 1 and (
        other.prepared.tail_lines == 0 or other.line == one.line + one.prepared.tail_lines
    )
