"""The typical time of a call, from a few calls on a machine that does other things as well.

The first call may import a library, another may wait for the disk or the processor, and one such call among
few would decide the mean. So the lowest and the highest quarter are left out. The rest is averaged: a median
would be wrong for a transform that works on every other sample only, and so takes one of two times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Timed", "typical"]


class Timed:
    """A function, and the times of its calls.

    Attributes:
        times: the seconds of each call that returned.
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
    """Return the mean of the middle half of the times; 0.0 if there are none.

    Example:
        >>> typical([1.0, 1.0, 3.0, 100.0])
        2.0
    """
    dropped = min((len(times) + 1) // 4, (len(times) - 1) // 2)
    middle = sorted(times)[dropped : len(times) - dropped]
    return sum(middle) / len(middle) if middle else 0.0
