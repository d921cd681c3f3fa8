"""A process's use of one cache of a session, and the room that the session's quota gives it."""

from __future__ import annotations

import contextlib
import time

from hotset.session.quota import Quota
from hotset.session.reclaim import reclaim, sentence_about
from hotset.session.runtime_dir import runtime
from hotset.session.session_definition import attach_quota
from hotset.session.sessions import find

__all__ = ["SessionCacheHandle"]

# How long this process waits while another one removes a cache. If that takes longer, the other process may
# be stopped: then this one does not wait again for a while.
_REMOVAL_SECONDS = 2.0
_IMPATIENT_SECONDS = 60.0


class SessionCacheHandle:
    """A process's use of one cache of a session, and what that may hold of the session's memory.

    It can be pickled; in the process that unpickles it the session counts as used once :meth:`join` is
    called. The use ends with :meth:`close`, with the object, or with the process. ``member`` is the cache's
    number in the quota of the session.
    """

    def __init__(self, number: int, member: int) -> None:
        self._number = number
        self._member = member
        self._quota: Quota | None = None
        self._row = -1
        self._impatient_until = 0.0
        self._departures = 0

    def join(self, memory: int = -1) -> bool:
        """Mark the cache as in use by this process; False if it is gone, or is making room for another.

        ``memory`` is ignored: a session's cache is reached by its name.
        """
        quota = self._open()
        if quota is None:
            return False
        # The row is read again once it is held: it may have been given to another cache meanwhile.
        if quota.use(self._row) and quota.members().get(self._member) == self._row:
            return True
        self.close()
        return False

    def release(self) -> None:
        """Stop using the cache, but go on using the session; :meth:`join` takes the cache up again."""
        quota = self._open()
        if quota is not None:
            quota.release_member()

    def left(self) -> int:
        """See :class:`hotset.store.allocator.Allowance`."""
        with contextlib.suppress(OSError):
            quota = self._open()
            if quota is not None:
                self._departures = quota.departures
                # In this order, a cache that another process drops in between counts twice rather than never.
                # If room is missing, taking it fails; if room is not counted, no process tries to take it.
                unused = sum(quota.bytes_of(row) for row in quota.unused() if row != self._row)
                return quota.left(self._row) + unused
        return 0

    def take(self, total: int) -> bool:
        """See :class:`hotset.store.allocator.Allowance`."""
        with contextlib.suppress(OSError):
            quota = self._open()
            return quota is not None and quota.take(self._row, total, self._member)
        return False

    def make_room(self, total: int, more: int = 0) -> str | None:
        """See :class:`hotset.store.allocator.Allowance`."""
        with contextlib.suppress(OSError):
            quota = self._open()
            if quota is not None:
                session = find(self._number)
                needed = max(total - quota.left(self._row), more)
                dropped = reclaim(session, needed) if needed > 0 else []
                if dropped:
                    return sentence_about(session.name, dropped)
                # Another process may be making room, or has made some meanwhile: that may be enough for both.
                if needed <= 0 or self._waits(quota) or quota.departures != self._departures:
                    return ""
        return None

    def _waits(self, quota: Quota) -> bool:
        """Wait while another process removes a cache; False if none does, or if it takes too long."""
        began = time.monotonic()
        if began < self._impatient_until or not quota.is_removing():
            return False
        while quota.is_removing():
            if time.monotonic() - began > _REMOVAL_SECONDS:
                self._impatient_until = time.monotonic() + _IMPATIENT_SECONDS
                return False
            time.sleep(2e-3)
        return True

    def close(self) -> None:
        """Stop using the cache and the session."""
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.close()

    def _open(self) -> Quota | None:
        if self._quota is None:
            with contextlib.suppress(OSError), runtime() as folder:
                # Kept open until close().
                quota = attach_quota(folder, find(self._number).file)
                row = quota.members().get(self._member)
                if row is not None:
                    self._quota, self._row = quota, row
                else:
                    quota.close()
        return self._quota

    def __reduce__(self) -> tuple[type[SessionCacheHandle], tuple[int, int]]:
        return SessionCacheHandle, (self._number, self._member)
