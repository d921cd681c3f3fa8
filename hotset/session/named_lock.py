"""Locks by name: processes that want to create the same thing do so one at a time.

All these locks are on one file of the runtime folder, each on a byte that follows from the thing's name. The
kernel drops a lock with its holder, so a killed holder delays no other process. The file exists while any
process holds a lock or waits for one: the last process removes it, after it has locked the whole file. A
process that waited, or came meanwhile, then gets the lock of a file without a name, sees that, and starts
again:

::

    create or open ── lock ── still named? ── yes ──> block ── unlock ── can lock all? ── yes ──> remove
          ^                        │                                           └── no: others use it
          └────────── no ──────────┘

So nothing is left behind except the file of a killed holder, which the next process uses, and ``hotset gc``
removes when no process holds a lock. (The alternative was a file for each name. But one call must release all
locks, so that no interrupt comes in between, see :mod:`hotset.store.locks`; several names would be several
files.)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from hotset.session.runtime_dir import is_named, open_folder, open_or_create
from hotset.store import locks

__all__ = ["LOCK_FILE", "NamedLocks"]

LOCK_FILE = "named_locks"

_DIGITS = 15  # of a name's 32, as offsets in a file have 63 bits


class NamedLocks(locks.Held):
    """A block that holds the locks of all these names; it gets False if it could not get them in time.

    Args:
        names: 32 hexadecimal digits each. Processes that share several names must list them in the same
            order; otherwise they wait for each other until their patience ends.
        patience: seconds for all of them together.

    Entering it raises FolderError if the runtime folder, or the file, is not safely this user's own, and
    OSError if the file system refuses.
    """

    def __init__(self, names: Sequence[str], patience: float) -> None:
        self._file = _File()
        super().__init__(self._file, 0, length=0)
        self._bytes = [int(name[:_DIGITS], 16) for name in names]
        self._seconds = patience

    def take(self) -> bool:
        """Lock all of them."""
        deadline = time.monotonic() + self._seconds
        while True:
            self._file.open()
            # Stored before it is locked, so that an interrupt cannot leave a lock without owner.
            fd = self._file.value
            held = all(locks.lock(fd, byte, deadline - time.monotonic()) for byte in self._bytes)
            if held and is_named(fd, self._file.folder.value, LOCK_FILE):
                return True
            self._file.close()
            if not held or time.monotonic() > deadline:
                return False


class _File(locks.Description):
    """The open file that the locks are on; the last process that closes it removes it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = locks.Description()

    def open(self) -> None:
        """Create or open it."""
        self.folder.close()
        self.folder.value = open_folder()
        self.value = open_or_create(self.folder.value, LOCK_FILE)

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # The block has ended, and its locks with it. What happens at the interpreter's end, gc() cleans up.
        try:
            with suppress(Exception), _All(self) as all_mine:
                if all_mine and is_named(self.value, self.folder.value, LOCK_FILE):
                    os.unlink(LOCK_FILE, dir_fd=self.folder.value)
        finally:
            self.close()


class _All(locks.Held):
    """A lock of the whole file, if no other process holds a part of it."""

    def __init__(self, file: _File) -> None:
        super().__init__(file, 0, length=0)

    def take(self) -> bool:
        return self.description.value >= 0 and locks.try_lock(self.description.value, 0, length=0)
