"""Within a session: jobs that ask for the same thing get one cache, whoever of them comes first.

It is as between the ranks of a job (:mod:`hotset.session.job_cache`), with files in place of processes: who
has its turn looks for the cache's file, and makes it if there is none. The file gets its name under the
ledger's lock, so that a session which is being destroyed gets no new cache:

::

    a job ── its turn ── a file for this key? ── yes ── attach ────────────────────────────────> joined
                              └── no ── create, under another name ── ledger: enter, rename ──> made

What was spilled before a reboot is found by its key as well: memory's part of the cache is made anew around
it, and says of each sample that it is on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from hotset._warnings import warn
from hotset.errors import SegmentError, SessionError
from hotset.session.file_names import CACHE, is_there, member_of, runtime
from hotset.session.free_cache import is_retired
from hotset.session.job_cache import PATIENCE_SECONDS, HasSegment, Shared
from hotset.session.named_lock import Turns
from hotset.session.quota import Quota
from hotset.session.reclaim import reclaim, said_of
from hotset.session.runtime_dir import open_folder
from hotset.session.session_definition import Session, attach_ledger, open_ledger
from hotset.session.sessions import find
from hotset.session.spill_dirs import open_spill, spill_path
from hotset.store import memory_limits as machine
from hotset.store.allocator import distrust_allocator
from hotset.store.claims import Participant
from hotset.store.format import LINE, ON_DISK, PRESENT, SLOTS, Geometry, Live
from hotset.store.segment import Segment
from hotset.units import parse_bytes

__all__ = ["CacheLocation", "SessionCacheHandle", "share_in"]

S = TypeVar("S", bound=HasSegment)

# How long another process's removing of a cache is waited for, and how long not again if it takes longer:
# it may be stopped.
_GOING_SECONDS = 2.0
_IMPATIENT_SECONDS = 60.0


class CacheLocation(NamedTuple):
    """Where a cache of a session is to be made.

    Attributes:
        path: of its file, while it is made.
        name: of its file, once it is whole.
        spill: the path of its second tier's; None if the session has none.
        folder: the folder of that.
        persist: whether the second tier gets every record.
        limit: bytes that a cache there may ever hold, unless its user said less: what the session may hold
            now is bounded by its ledger, and a resize changes that.
    """

    path: str
    name: str
    spill: str | None
    folder: str
    persist: bool
    limit: int


class SessionCacheHandle:
    """A process's use of one cache of a session, and what that may hold of the session's memory.

    It pickles; in the process that unpickles it the session counts as used once :meth:`join` is called. It
    ends with :meth:`close`, with the object, or with the process.

    Args:
        number: of the session.
        member: the cache's number in the session's ledger.
    """

    def __init__(self, number: int, member: int) -> None:
        self._number = number
        self._member = member
        self._ledger: Quota | None = None
        self._row = -1
        self._impatient_until = 0.0
        self._departures = 0

    def join(self, memory: int = -1) -> bool:
        """Be known as one that uses the cache; False if it is gone, or is just making room for another.

        Args:
            memory: of no meaning here: a cache of a session is reached by its name.
        """
        ledger = self._open()
        if ledger is None:
            return False
        # The row is looked at again once it is held: it may have been given to another cache before.
        if ledger.use(self._row) and ledger.members().get(self._member) == self._row:
            return True
        self.close()
        return False

    def stand_by(self) -> None:
        """Use the cache no more, and the session still; :meth:`join` uses it again, if it is there."""
        ledger = self._open()
        if ledger is not None:
            ledger.stand_by()

    def left(self) -> int:
        """See :class:`hotset.store.allocator.Allowance`."""
        with contextlib.suppress(OSError):
            ledger = self._open()
            if ledger is not None:
                self._departures = ledger.departures
                # In this order: what another process drops in between counts twice, and not never. Room that
                # is not there is refused when it is taken; room that is not seen is not asked for.
                unused = sum(ledger.bytes_of(row) for row in ledger.unused() if row != self._row)
                return ledger.left(self._row) + unused
        return 0

    def take(self, total: int) -> bool:
        """See :class:`hotset.store.allocator.Allowance`."""
        with contextlib.suppress(OSError):
            ledger = self._open()
            return ledger is not None and ledger.take(self._row, total, self._member)
        return False

    def make_room(self, total: int, more: int = 0) -> str | None:
        """See :class:`hotset.store.allocator.Allowance`."""
        with contextlib.suppress(OSError):
            ledger = self._open()
            if ledger is not None:
                session = find(self._number)
                needed = max(total - ledger.left(self._row), more)
                dropped = reclaim(session, needed) if needed > 0 else []
                if dropped:
                    return said_of(session.name, dropped)
                # Or another process makes room, or has since it was looked for: it may be enough for both.
                if needed <= 0 or self._waits(ledger) or ledger.departures != self._departures:
                    return ""
        return None

    def _waits(self, ledger: Quota) -> bool:
        """Wait, if another process is just removing a cache; False if none is, or it does not get on."""
        began = time.monotonic()
        if began < self._impatient_until or not ledger.going():
            return False
        while ledger.going():
            if time.monotonic() - began > _GOING_SECONDS:
                self._impatient_until = time.monotonic() + _IMPATIENT_SECONDS
                return False
            time.sleep(2e-3)
        return True

    def close(self) -> None:
        """Use it no more."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()

    def _open(self) -> Quota | None:
        if self._ledger is None:
            with contextlib.suppress(OSError), runtime() as folder:
                # Kept open, and by no block that is left only when the interpreter ends.
                ledger = attach_ledger(folder, find(self._number).file)
                row = ledger.members().get(self._member)
                if row is not None:
                    self._ledger, self._row = ledger, row
                else:
                    ledger.close()
        return self._ledger

    def __reduce__(self) -> tuple[type[SessionCacheHandle], tuple[int, int]]:
        return SessionCacheHandle, (self._number, self._member)


def share_in(
    session: Session,
    key: str,
    name: str,
    *,
    create: Callable[[CacheLocation], S | None],
    attach: Callable[[str], S],
) -> Shared[S]:
    """Return the session's cache of that key; if there is none, make it.

    Args:
        session: which.
        key: what is in the cache, all of it: two jobs with one key must want the same. Any length.
        name: a label for people.
        create: makes it where it is told, or returns None if that cannot be done.
        attach: attaches to one that is there. What it refuses is somebody else's.

    Returns:
        The value, and this process's use of the session; None without a value.

    Raises:
        SessionError: the session is gone, or another job makes the cache and does not end.
        Whatever ``create`` raises, untouched.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    turn = hashlib.blake2b(f"{session.number} {digest}".encode(), digest_size=16).hexdigest()
    with Turns([turn], PATIENCE_SECONDS) as mine:
        if not mine:
            raise SessionError(
                f"another process began to make the cache {name!r} in session {session.name!r} and has not "
                f"ended for {PATIENCE_SECONDS:.0f} s; look whether one is stopped, or reads its first "
                "samples that slowly."
            )
        folder = open_folder()
        try:
            place = os.readlink(f"/proc/self/fd/{folder}")
            found = _join(session, digest, folder, place, attach)
            if found is None:
                _revive(session, digest, folder, place)
                found = _join(session, digest, folder, place, attach)
            if found is not None:
                return Shared(*found, joined=True)
            return Shared(*_make(session, digest, folder, place, create), joined=False)
        finally:
            os.close(folder)


def _join(
    session: Session, digest: str, folder: int, place: str, attach: Callable[[str], S]
) -> tuple[S, SessionCacheHandle] | None:
    """Attach to a cache of that key: where there are several, they are of other transforms, but for one."""
    files = [file for file in os.listdir(folder) if _is_for(file, session, digest, "cache")]
    for file in sorted(files):
        use = _use(session, file)
        # The use first: what is attached and not used could expire.
        # Who was making room with it, and died over that, has left it condemned.
        if use.join() and not is_retired(f"{place}/{file}"):
            with contextlib.suppress(SegmentError, FileNotFoundError):
                return attach(f"{place}/{file}"), use
        use.close()
    return None


def _make(
    session: Session, digest: str, folder: int, place: str, create: Callable[[CacheLocation], S | None]
) -> tuple[S | None, SessionCacheHandle | None]:
    base = f"{session.number}-{digest}-{secrets.token_hex(8)}"
    spill, beside = None, ""
    if session.spill is not None:
        os.close(open_spill(session.spill, make=True))
        beside = str(spill_path(session.spill))
        spill = f"{beside}/{base}.spill"
    with _unfinished(folder, f"{base}.cache") as temporary:
        path = f"{place}/{temporary}"
        whole = f"{place}/{base}.cache"
        value = create(CacheLocation(path, whole, spill, beside, session.persist, _most(session)))
        if value is None:
            return None, None
        use = _name(session, folder, temporary, f"{base}.cache")
    return value, use


@contextlib.contextmanager
def _unfinished(folder: int, file: str) -> Iterator[str]:
    """A name for a file that is being made; nothing is left under it."""
    temporary = f"{file}.{secrets.token_hex(4)}.new"
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _name(session: Session, folder: int, temporary: str, file: str) -> SessionCacheHandle:
    """Give a cache its name, and use it, unless the session is being destroyed.

    Raises:
        SessionError: it is.
    """
    use = _use(session, file)
    with open_ledger(session) as ledger, ledger.lock():
        ledger.enter(member_of(file))
        # Before it has its name, under the lock: a moment without a user, and another job might drop it.
        use.join()
        os.rename(temporary, file, src_dir_fd=folder, dst_dir_fd=folder)
    return use


def _revive(session: Session, digest: str, folder: int, place: str) -> None:
    """Make memory's part of the caches of that key anew whose spilled records have outlived a reboot."""
    if not session.persist or session.spill is None:
        return
    with contextlib.suppress(OSError):
        beside = open_spill(session.spill)
        try:
            files = [file for file in os.listdir(beside) if _is_for(file, session, digest, "spill")]
        finally:
            os.close(beside)
        for file in files:
            path = f"{spill_path(session.spill)}/{file}"
            if is_there(folder, file.removesuffix("spill") + "cache"):
                continue
            try:
                with _unfinished(folder, file.removesuffix("spill") + "cache") as temporary:
                    _revive_one(session, path, f"{place}/{temporary}")
                    _name(session, folder, temporary, file.removesuffix("spill") + "cache").close()
            except SegmentError as error:
                os.unlink(path)
                warn(f"what session {session.name!r} kept on disk cannot be used, and is read again: {error}")


def _revive_one(session: Session, spilled: str, path: str) -> None:
    second = Segment.attach(spilled)
    member = Participant(second)
    try:
        if second.live[Live.INVALIDATED]:
            raise SegmentError("an audit had found that the source no longer gives what is in it.")
        distrust_allocator(member)
        old = second.geometry
        metadata = {**second.metadata, "spill": {"path": spilled, "keeps_all": session.persist}}
        encoded = json.dumps(metadata).encode()
        limit = _most(session)
        if isinstance(said := metadata.get("memory"), (int, str)) and said != "auto":
            limit = min(parse_bytes(said, whole=lambda: session.memory), limit)
        rows = min(old.samples, limit // old.stride) + SLOTS
        lines = max(limit // LINE, 1)
        geometry = Geometry(old.samples, old.stride, rows, lines, len(encoded))
        first = Segment.create(geometry, encoded, path=path, limit=limit)
        try:
            words = second.index.copy()
            first.index[:] = np.where(words >= PRESENT, words | ON_DISK, 0)
        finally:
            first.close()
    finally:
        member.leave()
        second.close()


def _most(session: Session) -> int:
    """Bytes for which a cache gets address space: as many as the machine has, as a session can grow."""
    return max(session.memory, machine.total())


def _use(session: Session, file: str) -> SessionCacheHandle:
    return SessionCacheHandle(session.number, member_of(file))


def _is_for(file: str, session: Session, digest: str, kind: str) -> bool:
    found = CACHE.fullmatch(file)
    return found is not None and (int(found[1]), found[2], found[4]) == (session.number, digest, kind)
