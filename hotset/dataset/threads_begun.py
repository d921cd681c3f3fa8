"""Threads that reading a sample begins, and that a forked worker would wait for.

To plan, hotset reads samples in the main process, before a loader forks its workers; without hotset workers
may be the first that read. A fork copies no threads. Most libraries begin theirs anew in the child (torch,
OpenMP), but polars does not: a worker that asks it for a query waits for ever. So a sentence says it where
reading the samples is what began them. (Whoever used them before has the same workers without hotset.)
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["ThreadsBegun"]

_LOST_BY_FORK = ("polars",)


class ThreadsBegun:
    """The libraries whose threads are begun from now on and do not survive a fork."""

    def __init__(self) -> None:
        self._before = _found()

    def warnings(self, name: str) -> list[str]:
        """A sentence for each library.

        Args:
            name: of the dataset's class.
        """
        return [
            f"reading samples of {name} began threads of {library} in this process, and a forked worker that "
            f"reads with {library} waits for them for ever; with workers, give the loader "
            'multiprocessing_context="forkserver".'
            for library in sorted(_found() - self._before)
        ]


def _found() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # without /proc
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
                library, _, number = file.read().strip().partition("-")
                if library in _LOST_BY_FORK and number.isdecimal():
                    found.add(library)
    return found
