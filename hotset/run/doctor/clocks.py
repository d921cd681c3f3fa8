"""The clocks of a process, and sums of what they say."""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["Clocks", "Sums"]


class Clocks(NamedTuple):
    """Seconds: of the wall, of this thread's processor time, of the process's."""

    wall: float
    thread: float
    process: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def since(self, earlier: Clocks) -> Clocks:
        return Clocks(self.wall - earlier.wall, self.thread - earlier.thread, self.process - earlier.process)


class Sums:
    """Counts and seconds by name, as they are written."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.of[name] = self.of.get(name, 0.0) + value
