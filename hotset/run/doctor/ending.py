"""Ends a program as Ctrl-C would, and each process of it that trains, wherever the program has put it.

SIGINT goes to the program's group of processes, as from a terminal. A process that trains may be in a session
of its own (``setsid``, some launchers): it gets the same signal if the program's first process has ended
without it. Other processes that the program leaves, such as a server, are left. If that does not end in time,
the first process and those that train get SIGTERM, as from ``kill``: not their workers, whose death would
look like a failure to them. Then all get SIGKILL. A process that ignores a signal, as all that a shell script
starts in the background do with SIGINT, is not waited for: the next signal follows at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hotset.units import format_seconds

__all__ = ["end_program"]

_ENDS = ((signal.SIGINT, 15.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))  # and the patience after each
_LOOK_SECONDS = 0.05
_ALONE_SECONDS = 1.0  # that a process has to end after the program's first process: a launcher has told it to


def end_program(
    program: int,
    training: Callable[[], Iterable[int]],
    say: Callable[[str], None],
    told: Callable[[], object],
) -> None:
    """End it, and return when it has ended, or cannot be ended.

    Args:
        program: its first process, which leads its group.
        training: the processes that train.
        say: is called with a sentence if it does not end as by Ctrl-C.
        told: is called, once or more, when each process that trains was sent a signal.
    """
    for number, patience in _ENDS:
        ending = _Ending(program, training, number)
        if ending.wait(patience, told):
            return
        if ending.is_ignored:
            say(f"the program ignores {number.name}.")
        else:
            say(f"the program did not end within {format_seconds(patience)} of {number.name}.")


class _Ending:
    """A signal, and who still runs after it."""

    def __init__(self, program: int, training: Callable[[], Iterable[int]], number: int) -> None:
        self._program = program
        self._training = training
        self._number = number
        self._told: set[int] = set()
        # As they are before: one that ignores it from then on, such as Lightning, is ending.
        self._deaf = {pid for pid in self._left() if _ignores(pid, number)}
        if number == signal.SIGTERM:
            self._tell(self._left())
        elif any(_group(pid) == program for pid in self._left()):
            self._send(os.killpg, program)

    def _left(self) -> list[int]:
        return [pid for pid in {self._program, *self._training()} if _runs(pid)]

    @property
    def is_ignored(self) -> bool:
        """Whether there is nothing to wait for."""
        return all(pid in self._deaf for pid in self._left())

    def wait(self, patience: float, told: Callable[[], object]) -> bool:
        """Whether all have ended after so many seconds; ``told`` is called when all were sent the signal."""
        begin = time.monotonic()
        alone = begin
        while self._left() and not self.is_ignored and time.monotonic() < begin + patience:
            if _runs(self._program):
                alone = time.monotonic() + _ALONE_SECONDS
            elif time.monotonic() >= alone:
                self._tell(pid for pid in self._left() if _group(pid) != self._program)
            if all(pid in self._told or _group(pid) == self._program for pid in self._left()):
                told()
            time.sleep(_LOOK_SECONDS)
        return not self._left()

    def _tell(self, pids: Iterable[int]) -> None:
        """Send the signal to these, once."""
        for pid in pids:
            if pid not in self._told:
                self._told.add(pid)
                self._send(os.kill, pid)

    def _send(self, by: Callable[[int, int], None], target: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            by(target, self._number)


def _group(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def _status(pid: int, field: str) -> str:
    """A field of what the kernel says of a process; empty if that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
    return ""


def _runs(pid: int) -> bool:
    return _status(pid, "State")[:1] not in ("", "Z", "X")


def _ignores(pid: int, number: int) -> bool:
    return bool(int(_status(pid, "SigIgn") or "0", 16) >> (number - 1) & 1)
