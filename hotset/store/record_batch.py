"""Records of a batch, copied out of a segment: rows side by side, and tails one behind the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hotset.store import irregular_records as forms
from hotset.store.claims import Ids
from hotset.store.format import LINE, OWN_STAMP, RECORD_HEADER, TAIL, checksum, checksums, split_tail
from hotset.store.leaves.schema import Schema
from hotset.store.segment import Words

__all__ = ["RecordBatch", "VariableTails", "heads_of", "runs"]

Bytes = npt.NDArray[np.uint8]
_Size = TypeVar("_Size", int, Words)

_ALIGN = 64
_TOGETHER = 1 << 20  # bytes of samples that are built at once


def _aligned(size: _Size) -> _Size:
    return -(-size // _ALIGN) * _ALIGN


class RecordBatch(NamedTuple):
    """Records of several samples in private memory, from whichever tier, or from another machine.

    Attributes:
        ids: of their samples.
        lines: of each record's tail.
        rows: uint8 of shape (records, stride).
        tails: uint8 of shape (sum of lines, 256), in the order of the records.
        block: memory of one's own in which both lie, as :meth:`new` lays it out; None if they lie elsewhere,
            perhaps read-only.
    """

    ids: Ids
    lines: Words
    rows: Bytes
    tails: Bytes
    block: Any = None

    @classmethod
    def new(
        cls, allocate: Callable[[int], Any], ids: Ids, stride: int, lines: Words | None = None
    ) -> RecordBatch:
        """Lay out memory for records, to be written: rows, and from a multiple of 64 on tails.

        Args:
            allocate: gives memory for that many bytes.
            stride: bytes of a row.
            lines: of each record's tail; None if no record has one.
        """
        total = 0 if lines is None else int(np.add.reduce(lines))
        tails_at = _aligned(len(ids) * stride)
        block = allocate(tails_at + total * LINE)
        rows: Bytes = np.ndarray((len(ids), stride), np.uint8, block)
        tails: Bytes = np.ndarray((total, LINE), np.uint8, block, tails_at if total else 0)
        return cls(ids, np.zeros(len(ids), np.int64) if lines is None else lines, rows, tails, block)

    @staticmethod
    def fitting(size: int, count: int, stride: int, lines: Words | None) -> int:
        """How many of the first of ``count`` records :meth:`new` lays out in ``size`` bytes."""
        ends = _aligned(np.arange(1, count + 1) * stride)
        if lines is not None:
            ends += np.add.accumulate(lines) * LINE
        return int(np.searchsorted(ends, size, side="right"))

    @property
    def tails_at(self) -> list[int]:
        """The offset of each record's tail in the block."""
        sizes = [lines * LINE for lines in self.lines.tolist()]
        return list(itertools.accumulate(sizes, initial=_aligned(self.rows.nbytes)))[:-1]

    @property
    def parts(self) -> list[Any]:
        """The bytes that :meth:`new` lays out, wherever they lie: rows, zeros in between, tails."""
        between = bytes(_aligned(self.rows.nbytes) - self.rows.nbytes)
        return [self.rows.reshape(-1).data, between, self.tails.reshape(-1).data]

    @property
    def stamps(self) -> Words:
        """The generation and kind of each record, as its header says."""
        stamps: Words = self.rows[:, 4:8].copy().view("<u4")[:, 0].astype(np.int64)
        return stamps

    @property
    def are_common(self) -> bool:
        """Whether all of them have the common form."""
        return not (self.stamps & OWN_STAMP).any()

    def only(self, keep: npt.NDArray[np.bool_]) -> RecordBatch:
        """Some of the records, copied; ``keep`` says of each whether it is one of them."""
        tails = self.tails[np.repeat(keep, self.lines)]
        return RecordBatch(self.ids[keep], self.lines[keep], self.rows[keep], tails)

    def first(self, count: int) -> RecordBatch:
        """That many of the records, from the first on; views."""
        lines = self.lines[:count]
        return RecordBatch(self.ids[:count], lines, self.rows[:count], self.tails[: int(lines.sum())])

    def are_sound(self, stamps: Words, places: Ids | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Which of the records at these places are as their writers wrote them: length, stamp, checksum.

        Args:
            stamps: that they must have.
            places: their numbers; all of them if not given.
        """
        stride, ids, lines = self.rows.shape[1], self.ids[places], self.lines[places]
        heads = self.rows[places, : RECORD_HEADER + TAIL.size]
        lengths, written, sums = heads[:, :12].copy().view("<u4").astype(np.int64).T
        tail_bytes = lengths - (stride - RECORD_HEADER)
        sound: npt.NDArray[np.bool_] = (written == stamps) & (tail_bytes >= 0)
        sound &= -(-tail_bytes // LINE) == lines
        # The row, too, says how long its tail is.
        sound &= split_tail(heads[:, RECORD_HEADER:].copy().view("<i8")[:, 0])[1] == lines
        if not len(self.tails):
            sound &= np.array(checksums(ids, lengths, stamps, self.rows, places), np.int64) == sums
            return sound
        rows, tails = self.rows.reshape(-1).data, self.tails.reshape(-1).data
        numbers = np.arange(len(self.ids))[places]
        starts = (np.add.accumulate(self.lines) - self.lines)[places] * LINE
        columns = (numbers, ids, lengths, stamps, sums, starts, tail_bytes)
        said = zip(*(column.tolist() for column in columns), strict=True)
        for number, (place, sample, length, stamp, crc, start, size) in enumerate(said):
            if sound[number]:
                row = rows[place * stride + RECORD_HEADER : (place + 1) * stride]
                tail = tails[start : start + size] if size else None
                sound[number] = checksum(sample, length, stamp, row, tail) == crc
        return sound

    def read(self, schema: Schema, *, decode: bool = True) -> list[Any]:
        """Build the samples, in the block, or in a new one if there is none.

        Without ``decode``, some stay as :func:`hotset.store.irregular_records.read` says.

        Raises:
            SegmentError: a sample's own form cannot be read here.
        """
        own = self if self.block is not None else self._copied()
        tails_at = own.tails_at if len(own.tails) else [0] * len(own.ids)
        return forms.read(schema, own.block, 0, tails_at, decode=decode)

    def in_turn(self, schema: Schema) -> Iterator[Any]:
        """As :meth:`read`, but samples that are copied once more are built as they are taken, some at a time.

        Then a batch of pictures does not lie in memory twice, and each is built and used in memory that
        the process has touched before: 32 pictures of 540 KiB with a random crop took 29 ms in place of 50.
        """
        count = len(self.ids)
        size = max(count, 1)
        if schema.copies:
            size = max(count * _TOGETHER // max(self.rows.nbytes + self.tails.nbytes, 1), 1)
        own = self if self.block is not None else self._copied()
        tails_at = own.tails_at if len(own.tails) else [0] * count
        for at in range(0, count, size):
            rows_at = at * own.rows.shape[1]
            built = forms.read(schema, own.block, rows_at, tails_at[at : at + size])
            built.reverse()  # taken from the end, so that nothing refers to one that was taken
            while built:
                yield built.pop()

    def samples(self, schema: Schema, *, decode: bool = True) -> dict[int, Any]:
        """As :meth:`read`, by sample id."""
        return dict(zip(self.ids.tolist(), self.read(schema, decode=decode), strict=True))

    def _copied(self) -> RecordBatch:
        copy = RecordBatch.new(
            lambda size: np.empty(size, np.uint8).data, self.ids, self.rows.shape[1], self.lines
        )
        copy.rows[:], copy.tails[:] = self.rows, self.tails
        return copy


class VariableTails:
    """The tails of a batch: where their runs of lines lie in the segment, and where they go when gathered.

    Attributes:
        heads: the heads of the rows that they belong to (:attr:`Schema.head`).
        first: first line of each run in the segment.
        counts: lines of each run.
        starts: first line of each run among the gathered ones.
        total: how many lines there are in all.
    """

    def __init__(self, heads: npt.NDArray[np.void]) -> None:
        self.heads = heads
        self.first, self.counts = split_tail(heads["tail"])
        ends: Words = np.add.accumulate(self.counts)
        self.starts: Words = ends - self.counts
        self.total = int(ends[-1]) if len(ends) else 0

    def outside(self, lines: int) -> npt.NDArray[np.bool_] | None:
        """Which of the runs do not lie within this many lines; None, the common answer, if all do."""
        ends = self.first + self.counts
        highest, lowest = np.maximum.reduce(ends, initial=0), np.minimum.reduce(self.first, initial=0)
        if int(highest) <= lines and int(lowest) >= 0:
            return None
        return (self.first < 0) | (ends > lines)

    def lines(self) -> Words:
        """The numbers of all lines, in the order in which they are gathered."""
        return runs(self.first, self.counts)


def heads_of(rows: npt.NDArray[np.uint8], head: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The heads, of the dtype :attr:`Schema.head`, of rows that lie side by side."""
    width = rows[:, RECORD_HEADER : RECORD_HEADER + head.itemsize]
    heads: npt.NDArray[np.void] = np.ascontiguousarray(width).view(head)[:, 0]
    return heads


def runs(firsts: Words, counts: Words) -> Words:
    """The numbers in these runs, one run behind the other.

    Example:
        >>> runs(np.array([10, 3]), np.array([2, 3]))
        array([10, 11,  3,  4,  5])
    """
    ends = np.add.accumulate(counts)
    numbers: Words = (firsts - ends + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers
