"""Ledgers: what may be held together, and who holds how much of it.

A session's caches share its memory, and a server's sessions share the server's. Each has a ledger, a small
file in the runtime folder, and every process that takes room for samples enters it there first:

::

       0  ┌─────────────────────────────────────────────┐
          │ head: one JSON object, padded               │  written once
    4096  ├─────────────────────────────────────────────┤
          │ limit │ ended │ ...                         │  int64 each
          ├─────────────────────────────────────────────┤
          │ row 0: member │ bytes of memory             │  of one cache, or of one session
          ├─────────────────────────────────────────────┤
          │ row 1 ...                        (510 rows) │
          └─────────────────────────────────────────────┘

Nothing is ever added up: a row is *set* to what its member will hold, under the ledger's lock and before the
member takes it. A process killed in between leaves a row that says too much, until that member's next extent
sets it right; it never says too little, and no sum can drift.

A session's ledger may stand under a server's: then both must have room. The order of locks is the segment's,
the session's, the server's, and nothing waits for long: who cannot have a lock in time has no room, for half
a second.

Byte 0 of the file is held, shared, by every process that uses the session; byte 1 is the lock.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import SessionError
from hotset.session.folder import open_at
from hotset.store import locks

__all__ = ["Ledger"]

_HEAD_BYTES = 4096
_WORDS = 1024
_SIZE = _HEAD_BYTES + 8 * _WORDS
_LIMIT, _ENDED, _FIRST_ROW = 0, 1, 4
_MEMBER, _MEMORY = 0, 1
_ROW_WORDS = 2
_ROWS = (_WORDS - _FIRST_ROW) // _ROW_WORDS
_LIFE, _SHORT = 0, 1
_LOCK_SECONDS = 2.0


class Ledger:
    """A ledger that is there, as this process sees it.

    Args:
        folder: descriptor of the private folder that it lies in.
        file: its name there.

    Raises:
        SessionError: it is no ledger of this version.
        OSError: see :func:`hotset.session.folder.open_at`.

    Attributes:
        head: what it is for.
    """

    def __init__(self, folder: int, file: str) -> None:
        fd = open_at(folder, file)
        self._pid = os.getpid()
        self._thread_lock = threading.RLock()
        self._holds = False
        self._parent: tuple[Ledger, int] | None = None
        try:
            self.head: dict[str, Any] = _read_head(fd, file)
            words = np.frombuffer(mmap.mmap(fd, _SIZE), np.int64, _WORDS, _HEAD_BYTES)
            # For locks, a description of its own: the mapping keeps the other open while it is there.
            self._fd = locks.reopen(fd)
        finally:
            os.close(fd)
        self._words: npt.NDArray[np.int64] = words
        self._rows = words[_FIRST_ROW : _FIRST_ROW + _ROWS * _ROW_WORDS].reshape(_ROWS, _ROW_WORDS)
        _ledgers.add(self)
        self._closer = self._make_closer()

    @staticmethod
    def create(folder: int, file: str, head: dict[str, Any], limit: int) -> None:
        """Make a ledger; it has its name once it is whole.

        Raises:
            SessionError: ``head`` is longer than 4,000 bytes.
            OSError: the file cannot be made.
        """
        content = json.dumps(head).encode()
        if len(content) > _HEAD_BYTES - 96:
            raise SessionError(f"{len(content):,} bytes of names and paths are too many; shorten them.")
        temporary = f"{file}.{secrets.token_hex(4)}.new"
        fd = open_at(folder, temporary, create=True)
        try:
            os.posix_fallocate(fd, 0, _SIZE)  # on a full file system an error now, and not SIGBUS later
            os.pwrite(fd, limit.to_bytes(8, "little"), _HEAD_BYTES)
            os.pwrite(fd, content.ljust(_HEAD_BYTES), 0)
            os.rename(temporary, file, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(fd)

    def stand_under(self, parent: Ledger, row: int) -> None:
        """Take no more than this ledger has to give, in which this one has that row; it is closed with it."""
        self._parent = (parent, row)

    # ---- budget --------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Bytes of memory that all members may hold together."""
        return int(self._words[_LIMIT])

    @limit.setter
    def limit(self, value: int) -> None:
        self._words[_LIMIT] = value

    @property
    def ended(self) -> bool:
        """Whether it takes no new members, as its session is being destroyed."""
        return bool(self._words[_ENDED])

    @property
    def held(self) -> int:
        """Bytes of memory that all members hold together."""
        return int(self._rows[:, _MEMORY].sum())

    def left(self, row: int) -> int:
        """Bytes of memory that this member may hold, as things stand: what it has, and what is left."""
        own = int(self._rows[row, _MEMORY])
        left = self.limit - (self.held - own)
        if self._parent is not None:
            parent, above = self._parent
            left = min(left, parent.left(above) - (self.held - own))
        return max(left, 0)

    def take(self, row: int, memory: int) -> bool:
        """Have this member hold so many bytes of memory in all; False if they are not there to be had."""
        with self.lock() as held:
            own = int(self._rows[row, _MEMORY])
            after = self.held - own + memory
            if not held or self.ended or (memory > own and after > self.limit):
                return False
            if self._parent is not None:
                parent, above = self._parent
                if not parent.take(above, after):
                    return False
            self._rows[row, _MEMORY] = memory
            return True

    # ---- members -------------------------------------------------------------------------------------

    def enter(self, member: int) -> int:
        """Take a row for a member; the caller has the lock.

        Raises:
            SessionError: the ledger has ended, or is full.
        """
        if self.ended:
            raise SessionError("the session is being destroyed.")
        for row in np.flatnonzero(self._rows[:, _MEMBER] == member).tolist():
            return int(row)
        free = np.flatnonzero(self._rows[:, _MEMBER] == 0)
        if not len(free):
            raise SessionError(f"there are {_ROWS} already, which is the most; destroy some.")
        self._rows[free[0], _MEMORY] = 0
        self._rows[free[0], _MEMBER] = member
        return int(free[0])

    def leave(self, row: int) -> None:
        """Give a row back, and what its member held."""
        with self.lock():
            self._rows[row] = 0
            if self._parent is not None:
                parent, above = self._parent
                parent.take(above, self.held)

    def members(self) -> dict[int, int]:
        """The row of each member."""
        return {int(self._rows[row, _MEMBER]): int(row) for row in np.flatnonzero(self._rows[:, _MEMBER])}

    def end(self) -> None:
        """Take no new members any more."""
        with self.lock():
            self._words[_ENDED] = 1

    # ---- locks ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the ledger's lock; yields False if it could not be had within two seconds."""
        with self._thread_lock:
            fd = self._descriptor()
            held = locks.lock(fd, _SHORT, _LOCK_SECONDS)
            try:
                yield held
            finally:
                if held:
                    locks.unlock(fd, _SHORT)

    def use(self) -> None:
        """Be known as one that uses the session, until this object or the process ends."""
        self._holds = locks.try_lock(self._descriptor(), _LIFE, shared=True)
        self.touch()

    def touch(self) -> None:
        """Note that it is used now."""
        os.utime(self._descriptor())

    @property
    def last_used(self) -> float:
        """When it was noted last that it is used, in seconds of Unix time."""
        return os.fstat(self._descriptor()).st_mtime

    @property
    def in_use(self) -> bool:
        """Whether any process uses it."""
        return self._holds or locks.is_locked(self._descriptor(), _LIFE)

    def close(self) -> None:
        """Use it no more."""
        with self._thread_lock:
            self._holds = False
            self._closer()
            self._fd = -1
            if self._parent is not None:
                self._parent[0].close()

    def _descriptor(self) -> int:
        """A descriptor of this process's own: a forked child shares its parent's locks with the other one."""
        if self._fd < 0 or self._pid != os.getpid():
            raise SessionError("this process has left the session.")
        return self._fd

    def _after_fork_in_child(self) -> None:
        self._thread_lock = threading.RLock()
        if self._fd < 0:
            return
        inherited, self._fd, self._pid = self._fd, locks.reopen(self._fd), os.getpid()
        self._closer.detach()
        os.close(inherited)
        self._closer = self._make_closer()
        if self._holds:
            self.use()

    def _make_closer(self) -> weakref.finalize[..., Ledger]:
        closer = weakref.finalize(self, _close, self._fd, self._pid)
        closer.atexit = False
        return closer


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _reopen_inherited() -> None:
    for ledger in list(_ledgers):
        with contextlib.suppress(OSError):
            ledger._after_fork_in_child()


os.register_at_fork(after_in_child=_reopen_inherited)


def _close(
    fd: int, pid: int, own_pid: Callable[[], int] = os.getpid, close: Callable[[int], None] = os.close
) -> None:
    # Bound above: it may run when this module's own names are gone already.
    if pid == own_pid():
        close(fd)


def _read_head(fd: int, file: str) -> dict[str, Any]:
    if os.fstat(fd).st_size != _SIZE:
        raise SessionError(f"{file} is no session of this version of hotset.")
    try:
        head = json.loads(os.pread(fd, _HEAD_BYTES, 0))
    except ValueError:
        head = None
    if not isinstance(head, dict):
        raise SessionError(f"{file} is no session of this version of hotset, or is damaged.")
    return head
