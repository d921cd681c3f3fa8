"""The clocks of a process, and sums of what they say."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

__all__ = ["Clocks", "Sums"]


class Clocks(NamedTuple):
    """Seconds: of the wall, of this thread's processor time, of the process's.

    Attributes:
        queued: in which this thread could have run, but all processors were taken; 0.0 if that was not read,
            or the kernel does not say it.
    """

    wall: float
    thread: float
    process: float
    queued: float = 0.0

    @classmethod
    def now(cls, *, queued: bool = False) -> Clocks:
        """All clocks; ``queued`` with the one that takes three microseconds."""
        waited = _queued() if queued else 0.0
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), waited)

    def since(self, earlier: Clocks) -> Clocks:
        return Clocks(*(now - then for now, then in zip(self, earlier, strict=True)))


def _queued() -> float:
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            return int(os.read(file, 100).split()[1]) / 1e9
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return 0.0


class Sums:
    """Counts and seconds by name, as they are written."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.of[name] = self.of.get(name, 0.0) + value
