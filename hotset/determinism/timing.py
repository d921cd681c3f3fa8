"""Timing a call that is made several times: what it takes typically, though the machine is busy.

The first call may import a library, another may wait for the disk or for another process's turn on the core:
one such call among few makes a mean say anything. So the lowest and the highest quarter are left out. (The
rest has a mean, and not a median alone, as a transform that works on every other sample only takes neither
of its two times.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Timed", "typical"]


class Timed:
    """A function, and what each of its calls took.

    Attributes:
        times: seconds of each call that returned.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.times: list[float] = []

    def __call__(self, *values: Any) -> Any:
        begun = time.perf_counter()
        made = self._call(*values)
        self.times.append(time.perf_counter() - begun)
        return made

    @property
    def seconds(self) -> float:
        """See :func:`typical`."""
        return typical(self.times)


def typical(times: Sequence[float]) -> float:
    """Return the mean of the middle half; 0.0 of nothing.

    Example:
        >>> typical([1.0, 1.0, 3.0, 100.0])
        2.0
    """
    dropped = min((len(times) + 1) // 4, (len(times) - 1) // 2)
    middle = sorted(times)[dropped : len(times) - dropped]
    return sum(middle) / len(middle) if middle else 0.0
