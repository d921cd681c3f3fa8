"""How many of the machine's processors other programs took, while one was watched.

They count if the machine is as busy later. If not, every rate that was measured is wrong by them.
"""

from __future__ import annotations

import contextlib
import os
import time

__all__ = ["Others"]

_BUSY = (0, 1, 2, 5, 6, 7)  # of /proc/stat's first line: user, nice, system, interrupts, steal


class Others:
    """Counts from its making on.

    Example:
        >>> Others().processors() is None  # within some seconds there is nothing to tell
        True
    """

    def __init__(self) -> None:
        self._begin = _now()

    def processors(self) -> float | None:
        """A mean over the time until now; None if the kernel does not say it, or it is too short.

        The programs that this process has started must have ended: what they took is its own.
        """
        now = _now()
        if self._begin is None or now is None or now[0] - self._begin[0] < 5.0:
            return None
        seconds, busy, own = (b - a for a, b in zip(self._begin, now, strict=True))
        return max(busy - own, 0.0) / seconds if busy > 0.0 else None


def _now() -> tuple[float, float, float] | None:
    """The time, the processor seconds of all programs, and of this one with those that it has started."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat") as file:
        words = file.readline().split()[1:]
        busy = sum(int(words[each]) for each in _BUSY) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(os.times()[:4])
    return None
