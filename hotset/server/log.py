"""The server's log: a line for each record, in a file that stays small.

The file is the daemon's standard output and error too, so it contains what the interpreter prints when it
dies. All writers append (``O_APPEND``), so the file can be cut while they have it open: when it has grown
past its bound, its last half is kept and the rest is removed. (A rotating handler renames the file, and
standard error would go on to the old one.)

Names and paths in a record come from clients' requests. A record is made printable, so that no name can begin
a line that looks like another record; a traceback's lines are indented for the same reason.
"""

from __future__ import annotations

import logging
import os
import sys

from hotset._warnings import printable

__all__ = ["LARGEST", "set_up"]

LARGEST = 256 << 10
_LONGEST = 2000


def set_up(level: str, *, file: bool) -> None:
    """Send every record of this process to standard error.

    Args:
        level: the lowest level that is written.
        file: whether standard error is the log file, which is cut when it is too large, or a terminal.
    """
    handler = _Cutting() if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname}"
        lines = [f"{head} {printable(record.getMessage(), _LONGEST)}"]
        if record.exc_info:
            traceback = self.formatException(record.exc_info).splitlines()
            lines += [f"    {printable(line, _LONGEST)}" for line in traceback]
        return "\n".join(lines)


class _Cutting(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        cut(sys.stderr.fileno())


def cut(fd: int) -> None:
    """Keep the last half of a log that is open for appending, from a line's beginning, if it is too large."""
    size = os.fstat(fd).st_size
    if size > LARGEST:
        _, _, kept = os.pread(fd, LARGEST // 2, size - LARGEST // 2).partition(b"\n")
        os.ftruncate(fd, 0)
        os.write(fd, kept)
