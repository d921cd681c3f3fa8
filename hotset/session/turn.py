"""Turns: of all processes that want to make one thing, one at a time.

A turn is a file of the runtime folder, named after the thing, and the exclusive lock on it. The kernel drops
the lock with its holder, so a killed one holds up nobody. Who has had its turn removes the file *before* the
lock goes; who waited then gets the lock of a file without a name, sees that, and begins anew:

::

    make or open ── lock ── still named? ── yes ──> my turn ── remove ── unlock
         ^                       │
         └────────── no ─────────┘

So nothing stays behind, but for a killed holder's file, which the next one takes over, and the collector
removes at any time: who has opened it and not locked it yet begins anew as well. (One permanent file with a
byte for each thing was the alternative: it never goes away.) A forked child closes what it inherited, or it
would keep its dead parent's turn.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence

from hotset.session.folder import is_named, open_at, open_folder
from hotset.store import locks

__all__ = ["TURN", "turns"]

TURN = re.compile(r"[0-9a-f]{32}\.turn")

_BYTE = 0

_held: set[int] = set()


@contextlib.contextmanager
def turns(names: Sequence[str], patience: float) -> Iterator[bool]:
    """Have the turns of all these names at once; yields False if one could not be had in ``patience``.

    Args:
        names: 32 hexadecimal digits each. Processes that want several of the same must name them in one
            order, or they wait for each other until their patience ends.
        patience: seconds for all of them together.

    Raises:
        FolderError: the runtime folder, or the file of a turn, is not safely this user's own.
        OSError: the file system refuses.
    """
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        folder = open_folder()
        stack.callback(os.close, folder)
        for name in names:
            fd = _take(folder, f"{name}.turn", deadline)
            if fd is None:
                yield False
                return
            stack.callback(_end, fd, folder, f"{name}.turn")
        yield True


def _take(folder: int, file: str, deadline: float) -> int | None:
    while True:
        fd = _open(folder, file)
        if fd is None:
            continue
        try:
            held = locks.lock(fd, _BYTE, deadline - time.monotonic())
            if held and is_named(fd, folder, file):
                _held.add(fd)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if not held or time.monotonic() > deadline:
            return None


def _open(folder: int, file: str) -> int | None:
    """Make or open the file; None if it went away meanwhile, as another had its turn with it, however new."""
    for create in (True, False):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            return open_at(folder, file, create=create)
    return None


def _end(fd: int, folder: int, file: str) -> None:
    if fd not in _held:
        return  # a forked child that left the `with` block: the turn is its parent's
    _held.discard(fd)
    try:
        with contextlib.suppress(OSError):
            if is_named(fd, folder, file):
                os.unlink(file, dir_fd=folder)
        # A child that is being forked in another thread may hold a copy for a moment: closing is not enough.
        locks.unlock(fd, _BYTE)
    finally:
        os.close(fd)


def _drop_inherited() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_inherited)
