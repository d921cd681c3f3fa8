"""Whether to keep what a function returns is worth it: a comparison of its calls' times, in one process.

To find what is kept takes some fifty microseconds, for the file's status, a key and a look into the store; to
keep it takes some hundred more. A picture of 32 x 32 is decoded in less. So the calls are timed: how long
hotset takes before it computes, which a hit takes at least, how long the function computes, and how long
hotset takes in all. The function is left alone

- if to keep a result takes longer than many uses of it can save: that is known in the first epoch;
- if to give a result back takes longer than to compute it, with the copy of a large one: from hits.

What hotset takes are medians: a few calls wait for a processor. What the function takes is a mean: where most
files are small, the few large ones may be all that counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Worth"]

_FIRST = 8  # calls of a process that are left out: they import, and touch memory for the first time
_JUDGED = 64  # calls, then twice as many each time
_KEPT = 1024  # the last times, of which the medians are: a training may call millions of times
_USES = 10  # a training of fewer epochs should not be the rule


class Worth:
    """What calls of one function take, in one process; all times in seconds.

    Example:
        >>> worth = Worth()
        >>> any(worth.missed(before=50e-6, computing=25e-6, whole=400e-6) for _ in range(100))
        True
        >>> any(worth.missed(before=50e-6, computing=2e-3, whole=3e-3) for _ in range(1000))
        False
    """

    def __init__(self) -> None:
        self._misses = self._hits = -_FIRST
        self._judge_misses = self._judge_hits = _JUDGED
        self._computed = 0.0  # seconds, in all misses that count
        self._own: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # of hotset: before, and in all
        self._giving: deque[float] = deque(maxlen=_KEPT)

    def missed(self, before: float, computing: float, whole: float) -> bool:
        """Count a call that computed; whether the function is to be left alone from now on.

        Args:
            before: until it began to compute.
            computing: the function.
            whole: the call.
        """
        self._misses += 1
        if self._misses <= 0:
            return False
        self._computed += computing
        self._own.append((before, whole - computing))
        if self._misses < self._judge_misses:
            return False
        self._judge_misses *= 2
        waits, own = map(_median, zip(*self._own, strict=True))
        return bool(_USES * (self._computed / self._misses - waits) < own)

    def gave(self, whole: float, computing: Callable[[], float]) -> bool:
        """Count a hit; whether the function is to be left alone from now on.

        Args:
            whole: the call.
            computing: tells what the function takes, a mean over all processes.
        """
        self._hits += 1
        if self._hits <= 0:
            return False
        self._giving.append(whole)
        if self._hits < self._judge_hits:
            return False
        self._judge_hits *= 2
        return _median(self._giving) > computing()


def _median(times: Iterable[float]) -> float:
    import statistics  # here: each process of the program imports this module as it starts

    return statistics.median(times)
