"""The clocks of a process, and when they rest.

To read a processor clock takes half a microsecond, and what is done with it some more. Where batches come
fast, all of that together took 2 % of the time. So the clocks are read for some batches in a row, and then
rest until what that took is a small part of the time since the first of these: where batches take long, they
never rest.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

__all__ = ["Clocks", "Rests"]

_IN_A_ROW = 8  # batches; workers give theirs in turn, and one that is waited for longer than others
_REST = 400.0  # times what reading the clocks of these took
_LONGEST_SECONDS = 0.5


class Clocks(NamedTuple):
    """Seconds: of the wall, of this thread's processor time, of the process's.

    Attributes:
        queued: in which the main thread could have run, but all processors were taken; 0.0 if the kernel does
            not say it.
    """

    wall: float
    thread: float
    process: float
    queued: float

    @classmethod
    def now(cls) -> Clocks:
        """The clocks, read in the main thread."""
        queued = _queued()  # before the others, as it takes the longest
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), queued)

    def since(self, earlier: Clocks) -> Clocks:
        return Clocks(
            self.wall - earlier.wall,
            self.thread - earlier.thread,
            self.process - earlier.process,
            self.queued - earlier.queued,
        )


# This process, and its file that says what its main thread waited. It stays open: to open it anew for each
# step took 5 % of steps of 1.6 ms, beside a busy worker.
_waited_file = 0, -1


def _queued() -> float:
    global _waited_file
    try:
        if _waited_file[0] != os.getpid():
            _waited_file = os.getpid(), os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(_waited_file[1], 100, 0).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Rests:
    """When the clocks rest.

    Args:
        times: what reading them took, for how long they rest: more where most of what that costs is not seen.
    """

    def __init__(self, times: float = _REST) -> None:
        self._times = times
        self._count = 0  # of batches in a row
        self._begun = 0.0  # when the clocks were read for the first of these
        self._spent = 0.0  # the seconds that all of them took
        self.until = 0.0

    def now(self, time: float) -> bool:
        """Whether they rest at this time."""
        return time < self.until

    def spent(self, seconds: float) -> None:
        """So long did reading them take."""
        self._spent += seconds

    def count(self, now: float) -> None:
        """They were read for a batch; after some, they rest."""
        if not self._count:
            self._begun = now
        self._count += 1
        if self._count > _IN_A_ROW:
            self.until = min(self._begun + self._times * self._spent, now + _LONGEST_SECONDS)
            self._count, self._spent = 0, 0.0
