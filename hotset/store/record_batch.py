"""Records of a batch, copied out of a segment: rows side by side, and tails one behind the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.store import irregular_records as forms
from hotset.store.claims import Ids
from hotset.store.format import LINE, OWN_STAMP, RECORD_HEADER, split_tail
from hotset.store.schema import Schema
from hotset.store.segment import Words

__all__ = ["ReceivedRecords", "VariableTails", "heads_of", "runs"]


class ReceivedRecords(NamedTuple):
    """Verified records in private memory, as another machine has sent them.

    Attributes:
        ids: of their samples, each once, ascending.
        lines: of each record's tail.
        rows: uint8 of shape (records, stride).
        tails: uint8 of shape (sum of lines, 256).
    """

    ids: Ids
    lines: Words
    rows: npt.NDArray[np.uint8]
    tails: npt.NDArray[np.uint8]

    @property
    def are_common(self) -> bool:
        """Whether all of them have the common form."""
        return not (self.rows[:, 4:8].copy().view("<u4") & OWN_STAMP).any()

    def samples(self, schema: Schema, *, decode: bool = True) -> dict[int, Any]:
        """Build the samples, by id, in one new block of memory.

        Args:
            schema: of the store.
            decode: see :func:`hotset.store.irregular_records.read`.

        Raises:
            SegmentError: a sample's own form cannot be read here.
        """
        if not len(self.ids):
            return {}
        memory = np.empty(self.rows.nbytes + self.tails.nbytes, np.uint8)
        memory[: self.rows.nbytes] = self.rows.reshape(-1)
        memory[self.rows.nbytes :] = self.tails.reshape(-1)
        starts = self.rows.nbytes + (np.cumsum(self.lines) - self.lines) * LINE
        found = forms.read(schema, memory.data, 0, starts.tolist(), decode=decode)
        return dict(zip(self.ids.tolist(), found, strict=True))


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
        if (
            int(np.maximum.reduce(ends, initial=0)) <= lines
            and int(np.minimum.reduce(self.first, initial=0)) >= 0
        ):
            return None
        return (self.first < 0) | (ends > lines)

    def lines(self) -> Words:
        """The numbers of all lines, in the order in which they are gathered."""
        return runs(self.first, self.counts)


def heads_of(rows: npt.NDArray[np.uint8], head: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The heads of rows that lie side by side.

    Args:
        rows: of shape (records, stride).
        head: :attr:`Schema.head`.
    """
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
