"""Quotas: a memory limit for several caches or sessions, and how much each of them holds.

A session's caches share its memory, and a server's sessions share the server's. Each session and each server
has a quota, a small file in the runtime folder, and a process enters memory there before it takes it:

::

       0  ┌─────────────────────────────────────────────┐
          │ head: one JSON object, padded               │  written once
    4096  ├─────────────────────────────────────────────┤
          │ limit │ ended │ how many left │ ...         │  int64 each
          ├─────────────────────────────────────────────┤
          │ row 0: member │ bytes │ last used │ pinned  │  of one cache, or of one session
          ├─────────────────────────────────────────────┤
          │ row 1 ...                        (510 rows) │
          └─────────────────────────────────────────────┘

No sums are stored: a row is *set* to what its member will hold, under the quota's lock and before the member
takes the memory. A process killed in between leaves a row that is too high, until the member's next extent
sets it again. A row is never too low, and no sum can drift.

A session's quota may stand under a server's: then both must have room. The order of locks is the segment's,
the session's, the server's. No process waits long for a lock: without it, it treats the quota as full for
half a second.

Every process that uses the session holds byte 0 of the file, shared; byte 1 is the lock. Every process that
uses the cache of row ``r`` holds byte ``2 + r``, shared. A process that reclaims the cache's memory
(:mod:`hotset.session.reclaim`) locks that byte exclusively: this shows that no process uses the cache, and
keeps others out. A stopped process keeps its locks.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import SessionError
from hotset.session.runtime_dir import new_file, open_at
from hotset.store import locks
from hotset.store.standard_streams import beyond_standard

__all__ = ["Quota"]

_HEAD_BYTES = 4096
_WORDS = 2048
_SIZE = _HEAD_BYTES + 8 * _WORDS
_LIMIT, _ENDED, _LEFT, _FIRST_ROW = 0, 1, 2, 4
_MEMBER, _MEMORY, _USED, _PINNED = range(4)  # _USED in nanoseconds of Unix time
_ROW_WORDS = 4
_ROWS = 510
_LIFE, _SHORT, _FIRST_USE = 0, 1, 2
_LOCK_SECONDS = 2.0


class Quota:
    """An existing quota, as this process sees it.

    Args:
        folder: descriptor of the private folder that it lies in.
        file: its name there.

    Raises:
        SessionError: it is not a quota of this version of hotset.
        OSError: see :func:`hotset.session.runtime_dir.open_at`.

    Attributes:
        head: describes the session or server whose quota it is.
    """

    @beyond_standard()
    def __init__(self, folder: int, file: str) -> None:
        fd = open_at(folder, file)
        opened = locks.file_of(fd)
        self._holds = False
        self._used_row = -1
        self._file_lock = locks.FileLock(lambda: locks.own(fd, opened), self._after_fork_in_child)
        self._parent: tuple[Quota, int, int] | None = None
        try:
            self.head: dict[str, Any] = _read_head(fd, file)
            words = np.frombuffer(mmap.mmap(fd, _SIZE), np.int64, _WORDS, _HEAD_BYTES)
        except BaseException:
            os.close(fd)
            raise
        self._words: npt.NDArray[np.int64] = words
        self._rows = words[_FIRST_ROW : _FIRST_ROW + _ROWS * _ROW_WORDS].reshape(_ROWS, _ROW_WORDS)
        self._closer = weakref.finalize(self, locks.close_own, fd, opened)
        self._closer.atexit = False

    @staticmethod
    def create(folder: int, file: str, head: dict[str, Any], limit: int) -> None:
        """Create a quota; the file gets its name once it is whole.

        Raises:
            SessionError: ``head`` is longer than 4,000 bytes.
            OSError: the file cannot be created.
        """
        content = json.dumps(head).encode()
        if len(content) > _HEAD_BYTES - 96:
            raise SessionError(
                f"names and paths must be up to {_HEAD_BYTES - 96:,} bytes together, got {len(content):,}."
            )
        with new_file(folder, file) as fd:
            os.posix_fallocate(fd, 0, _SIZE)  # on a full file system an error now, and not SIGBUS later
            os.pwrite(fd, limit.to_bytes(8, "little"), _HEAD_BYTES)
            os.pwrite(fd, content.ljust(_HEAD_BYTES), 0)

    def set_parent(self, parent: Quota, row: int, member: int) -> None:
        """Bound this quota by ``parent`` too, where that row is this member's; :meth:`close` closes both."""
        self._parent = (parent, row, member)

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
        """Whether it accepts no new members, because its session is being destroyed."""
        return bool(self._words[_ENDED])

    @property
    def held(self) -> int:
        """Bytes of memory that all members hold together."""
        return int(self._rows[:, _MEMORY].sum())

    def left(self, row: int) -> int:
        """Bytes of memory that this member may hold now: its own, and those that no member holds."""
        others = self.held - int(self._rows[row, _MEMORY])
        return max(self.bound - others, 0)

    @property
    def bound(self) -> int:
        """Bytes of memory that all members may hold together, by this quota and the one above it."""
        if self._parent is None:
            return self.limit
        parent, above, _ = self._parent
        return min(self.limit, parent.left(above))

    def take(self, row: int, memory: int, member: int | None = None) -> bool:
        """Set how many bytes of memory a member holds in all; False if there are not that many.

        Args:
            row: the member's.
            memory: bytes.
            member: must be the row's member; None: any.
        """
        with self.lock() as held:
            own = int(self._rows[row, _MEMORY])
            if member is not None and int(self._rows[row, _MEMBER]) != member:
                return False  # the member is gone, and the row is another's
            after = self.held - own + memory
            if not held or self.ended or (memory > own and after > self.limit):
                return False
            if self._parent is not None:
                parent, above, itself = self._parent
                if not parent.take(above, after, itself):
                    return False
            self._rows[row, _MEMORY] = memory
            return True

    # ---- members -------------------------------------------------------------------------------------

    def enter(self, member: int) -> int:
        """Take a row for a member; the caller has the lock.

        Raises:
            SessionError: the quota has ended, or is full.
        """
        if self.ended:
            raise SessionError("the session is being destroyed.")
        for row in np.flatnonzero(self._rows[:, _MEMBER] == member).tolist():
            return int(row)
        # A process that has just freed a row may still lock it, and then this one could not use its member.
        fd = self._locks().process().value
        for row in np.flatnonzero(self._rows[:, _MEMBER] == 0).tolist():
            if not locks.is_locked(fd, _FIRST_USE + row):
                self._rows[row] = member, 0, time.time_ns(), 0
                return int(row)
        raise SessionError(
            f"a session must have at most {_ROWS} caches, and a server {_ROWS} sessions, got one more; "
            "destroy some."
        )

    def leave(self, row: int) -> None:
        """Free a row, and what its member held."""
        with self.lock():
            self._rows[row] = 0
            self._words[_LEFT] += 1
            if self._parent is not None:
                parent, above, itself = self._parent
                parent.take(above, self.held, itself)

    @property
    def departures(self) -> int:
        """How many members have left so far; after a change there may be more room."""
        return int(self._words[_LEFT])

    def members(self) -> dict[int, int]:
        """The row of each member."""
        return {int(self._rows[row, _MEMBER]): int(row) for row in np.flatnonzero(self._rows[:, _MEMBER])}

    def end(self) -> None:
        """Refuse new members from now on."""
        with self.lock():
            self._words[_ENDED] = 1

    def bytes_of(self, row: int) -> int:
        """Bytes of memory that this row's member holds."""
        return int(self._rows[row, _MEMORY])

    # ---- which members are used ------------------------------------------------------------------------

    def unused(self) -> list[int]:
        """The rows of members that no process uses and that are not pinned, least recently used first.

        Members that another process is removing now are among them: see :meth:`is_removing`.
        """
        fd = self._locks().process().value
        rows = np.flatnonzero((self._rows[:, _MEMBER] != 0) & (self._rows[:, _PINNED] == 0)).tolist()
        free = [row for row in rows if row != self._used_row and not locks.is_shared(fd, _FIRST_USE + row)]
        return sorted(free, key=lambda row: int(self._rows[row, _USED]))

    def is_removing(self) -> bool:
        """Whether another process is removing a member now, so that there will soon be room."""
        fd = self._locks().process().value
        return any(locks.is_locked(fd, _FIRST_USE + row) for row in self.unused())

    def note_if_used(self, row: int) -> bool:
        """Whether any process uses this row's member; records the use, as its process may be killed."""
        used = row == self._used_row or locks.is_shared(self._locks().process().value, _FIRST_USE + row)
        if used:
            self._rows[row, _USED] = time.time_ns()
        return used

    def used_at(self, row: int) -> float:
        """The last recorded use of this row's member, in seconds of Unix time."""
        return int(self._rows[row, _USED]) / 1e9

    def is_pinned(self, row: int) -> bool:
        """Whether this row's member stays while no process uses it."""
        return bool(self._rows[row, _PINNED])

    def pin(self, row: int, pinned: bool) -> None:
        """Pin this row's member, so that it stays while no process uses it, or unpin it."""
        self._rows[row, _PINNED] = int(pinned)

    def lock_member(self, row: int) -> locks.Held:
        """A block in which no other process can use this row's member, to remove it.

        The block gets False if a process uses the member, or if it is pinned. A process that wants to use the
        member meanwhile treats it as gone.
        """
        return _MemberLock(self, self._locks().thread(), row)

    # ---- locks ---------------------------------------------------------------------------------------

    def lock(self) -> locks.Held:
        """A block that holds the quota's lock; it gets False if another holder keeps it for two seconds.

        Raises:
            SessionError: this process has left the session.
            OSError: there is no descriptor left.
        """
        return locks.Held(self._locks().thread(), _SHORT, patience=_LOCK_SECONDS)

    def use(self, row: int = -1) -> bool:
        """Mark the session as in use, and a member of it, until :meth:`close` or the process ends.

        Args:
            row: the member's; -1: none.

        Returns:
            False if another process is removing the member.
        """
        fd = self._locks().process().value
        self._holds = locks.try_lock(fd, _LIFE, shared=True)
        if row >= 0 and locks.try_lock(fd, _FIRST_USE + row, shared=True):
            self._used_row = row
        self.touch()
        return row == self._used_row

    def release_member(self) -> None:
        """Stop using the member, but go on using the session."""
        row, self._used_row = self._used_row, -1
        if row >= 0:
            locks.unlock(self._locks().process().value, _FIRST_USE + row)

    def touch(self) -> None:
        """Record the time as the last use, of the session and of the member in use."""
        os.utime(self._locks().process().value)
        if self._used_row >= 0:
            self._rows[self._used_row, _USED] = time.time_ns()

    @property
    def last_used(self) -> float:
        """The session's last recorded use, in seconds of Unix time."""
        return os.fstat(self._locks().process().value).st_mtime

    @property
    def in_use(self) -> bool:
        """Whether any process uses it."""
        return self._holds or locks.is_locked(self._locks().process().value, _LIFE)

    def close(self) -> None:
        """Stop using it."""
        if self._used_row >= 0:
            self._rows[self._used_row, _USED] = time.time_ns()
        self._holds, self._used_row = False, -1
        self._file_lock.close()
        self._closer()
        if self._parent is not None:
            self._parent[0].close()

    def _locks(self) -> locks.FileLock:
        if not self._closer.alive:
            raise SessionError("this process has left the session.")
        return self._file_lock

    def _after_fork_in_child(self) -> None:
        if self._holds:
            row, self._used_row = self._used_row, -1
            self.use(row)


class _MemberLock(locks.Held):
    def __init__(self, quota: Quota, description: locks.Description, row: int) -> None:
        super().__init__(description, _FIRST_USE + row)
        self._quota, self._row = quota, row

    def take(self) -> bool:
        # Under the lock: a process that creates a cache enters it, and begins to use it, under the lock too.
        # By a description of its own, not the one by which this process uses members: so its own use counts.
        with self._quota.lock() as held:
            free = held and not self._quota.is_pinned(self._row)
            return free and locks.try_lock(self.description.value, self.byte)


def _read_head(fd: int, file: str) -> dict[str, Any]:
    if os.fstat(fd).st_size != _SIZE:
        raise SessionError(f"{file} is not a session of this version of hotset.")
    try:
        head = json.loads(os.pread(fd, _HEAD_BYTES, 0))
    except ValueError:
        head = None
    if not isinstance(head, dict):
        raise SessionError(f"{file} is not a session of this version of hotset, or is damaged.")
    return head
