"""A process's use of one cache of a session, and the room that the session's quota gives it."""

from __future__ import annotations

import contextlib
import time

from hotset.session.file_names import runtime
from hotset.session.quota import Quota
from hotset.session.reclaim import reclaim, said_of
from hotset.session.session_definition import attach_quota
from hotset.session.sessions import find

__all__ = ["SessionCacheHandle"]

# How long another process's removing of a cache is waited for, and how long not again if it takes longer:
# it may be stopped.
_GOING_SECONDS = 2.0
_IMPATIENT_SECONDS = 60.0


class SessionCacheHandle:
    """A process's use of one cache of a session, and what that may hold of the session's memory.

    It pickles; in the process that unpickles it the session counts as used once :meth:`join` is called. It
    ends with :meth:`close`, with the object, or with the process.

    Args:
        number: of the session.
        member: the cache's number in the session's quota.
    """

    def __init__(self, number: int, member: int) -> None:
        self._number = number
        self._member = member
        self._quota: Quota | None = None
        self._row = -1
        self._impatient_until = 0.0
        self._departures = 0

    def join(self, memory: int = -1) -> bool:
        """Be known as one that uses the cache; False if it is gone, or is just making room for another.

        Args:
            memory: of no meaning here: a cache of a session is reached by its name.
        """
        quota = self._open()
        if quota is None:
            return False
        # The row is looked at again once it is held: it may have been given to another cache before.
        if quota.use(self._row) and quota.members().get(self._member) == self._row:
            return True
        self.close()
        return False

    def stand_by(self) -> None:
        """Use the cache no more, and the session still; :meth:`join` uses it again, if it is there."""
        quota = self._open()
        if quota is not None:
            quota.stand_by()

    def left(self) -> int:
        """See :class:`hotset.store.allocator.Allowance`."""
        with contextlib.suppress(OSError):
            quota = self._open()
            if quota is not None:
                self._departures = quota.departures
                # In this order: what another process drops in between counts twice, and not never. Room that
                # is not there is refused when it is taken; room that is not seen is not asked for.
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
                    return said_of(session.name, dropped)
                # Or another process makes room, or has since it was looked for: it may be enough for both.
                if needed <= 0 or self._waits(quota) or quota.departures != self._departures:
                    return ""
        return None

    def _waits(self, quota: Quota) -> bool:
        """Wait, if another process is just removing a cache; False if none is, or it does not get on."""
        began = time.monotonic()
        if began < self._impatient_until or not quota.going():
            return False
        while quota.going():
            if time.monotonic() - began > _GOING_SECONDS:
                self._impatient_until = time.monotonic() + _IMPATIENT_SECONDS
                return False
            time.sleep(2e-3)
        return True

    def close(self) -> None:
        """Use it no more."""
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.close()

    def _open(self) -> Quota | None:
        if self._quota is None:
            with contextlib.suppress(OSError), runtime() as folder:
                # Kept open, and by no block that is left only when the interpreter ends.
                quota = attach_quota(folder, find(self._number).file)
                row = quota.members().get(self._member)
                if row is not None:
                    self._quota, self._row = quota, row
                else:
                    quota.close()
        return self._quota

    def __reduce__(self) -> tuple[type[SessionCacheHandle], tuple[int, int]]:
        return SessionCacheHandle, (self._number, self._member)
