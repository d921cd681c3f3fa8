"""Tails: where the variable leaves of records lie in a segment, and where they go when gathered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotset.store import format as fmt
from hotset.store.segment import Words

__all__ = ["VariableTails", "runs"]


class VariableTails:
    """Runs of lines: where they lie in the segment, and where they go when gathered one behind the other.

    Attributes:
        heads: the heads of the rows that they belong to (:attr:`Schema.head`).
        first: first line of each run in the segment.
        counts: lines of each run.
        starts: first line of each run among the gathered ones.
        total: how many lines there are in all.
    """

    def __init__(self, heads: npt.NDArray[np.void]) -> None:
        self.heads = heads
        words: Words = heads["tail"]
        self.first: Words = words >> fmt.TAIL_COUNT_BITS
        self.counts: Words = words & ((1 << fmt.TAIL_COUNT_BITS) - 1)
        ends: Words = np.add.accumulate(self.counts)
        self.starts: Words = ends - self.counts
        self.total = int(ends[-1]) if len(ends) else 0

    def outside(self, lines: int) -> npt.NDArray[np.bool_] | None:
        """Which of the runs do not lie within so many lines; None, the common answer, if all do."""
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
