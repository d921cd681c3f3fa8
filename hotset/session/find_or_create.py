"""Find or create: of all processes that want the same cache, the first creates it, and the others join it.

::

    process ── lock ── does it exist? ── yes ── take a share, attach ───────────────> joined
                                └── no ── create (reads the source) ── list it ─────> created

Creating takes seconds and all processes come at once, so one process at a time looks and creates, under a
lock (:mod:`hotset.session.named_lock`). The ranks of a job and the jobs of a session do the same, and look in
different places:

====================  ==========================================  =========================================
..                    the ranks of one job                        the jobs of a session
====================  ==========================================  =========================================
where a cache is      a memfd, in the list of                     a file of the runtime folder, by its name
                      :mod:`hotset.session.catalog`
what lists it         the catalog's file                          the file's name, given under the quota's
                                                                  lock: a session that is being destroyed
                                                                  gets no new cache
its creator dies      the memory dies with it, unless another     the unfinished file is left; the next
                      rank has joined: that one has it open       process creates one
no lock for 120 s     the rank creates one of its own: that       SessionError
                      costs memory and one warning
====================  ==========================================  =========================================

Waiting is bounded because a creator may be stopped. A session's cache that was spilled before a reboot is
found by its key too: a segment in memory is created for it, whose index says that its samples are on disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from hotset._warnings import warn
from hotset.errors import SegmentError, SessionError
from hotset.session import catalog
from hotset.session.job import Job, digest, this_job
from hotset.session.named_lock import NamedLocks
from hotset.session.runtime_dir import KNOB, path_of, runtime, unfinished
from hotset.session.session_cache import SessionCacheHandle
from hotset.session.session_definition import Session, open_quota
from hotset.session.session_files import CACHE, is_retired, is_there, member_of
from hotset.session.spill_dirs import make_spill, opened_spill, spill_path
from hotset.store import memory_limits
from hotset.store.allocator import distrust_allocator
from hotset.store.claims import Participant
from hotset.store.format import LINE, ON_DISK, PRESENT, SLOTS, Geometry, Live
from hotset.store.segment import Address, Segment
from hotset.units import parse_bytes

__all__ = [
    "CacheHandle",
    "CacheLocation",
    "HasSegment",
    "Shared",
    "attach_again",
    "find_or_create_in_job",
    "find_or_create_in_session",
]

PATIENCE_SECONDS = 120.0


class HasSegment(Protocol):
    """What is found or created: something over a segment, such as a :class:`~hotset.store.store.Store`."""

    segment: Segment


class HasFile(HasSegment, Protocol):
    """What is found or created in a session: it knows its file, so that other processes can attach to it."""

    path: str | None


class CacheHandle(Protocol):
    """A process's share in a cache that other processes use too."""

    def join(self, memory: int = -1) -> bool:
        """Take a share of this process's own; False if the cache is gone."""

    def close(self) -> None:
        """Give the share back."""


S = TypeVar("S", bound=HasSegment)
F = TypeVar("F", bound=HasFile)


@dataclass(frozen=True)
class Shared(Generic[S]):  # Python 3.10 has no generic named tuples
    """What was found or created.

    Attributes:
        value: what ``create`` or ``attach`` returned; None only if ``create`` did.
        handle: this process's share in it; close it when ``value`` is closed. None without a value.
        joined: whether another one's was attached, and ``create`` was not called.
    """

    value: S | None
    handle: CacheHandle | None
    joined: bool


class _Caches(Protocol[S]):
    """Where the caches for one key are looked up and created."""

    lock_names: list[str]

    def lock_failed(self, error: OSError | None) -> None:
        """Called where the lock could not be had, before :meth:`find`; raises if one cannot go on without it.

        The error is None if another process held the lock for too long.
        """

    def find(self) -> Shared[S] | None:
        """Attach to a cache that is there; None if there is none."""

    def create(self) -> Shared[S]:
        """Create one, so that others find it."""


class _CreationLock(NamedLocks):
    """The lock under which a cache is looked for and created."""

    def __init__(self, caches: _Caches[Any]) -> None:
        super().__init__(caches.lock_names, PATIENCE_SECONDS)
        self._caches = caches

    def take(self) -> bool:
        error = None
        try:
            if super().take():
                return True
        except OSError as refused:
            error = refused
        self._caches.lock_failed(error)
        return False


def _find_or_create(caches: _Caches[S]) -> Shared[S]:
    with _CreationLock(caches):
        return caches.find() or caches.create()


def find_or_create_in_job(
    key: str,
    name: str,
    *,
    create: Callable[[], S | None],
    attach: Callable[[Address], S],
    job: Job | None = None,
) -> Shared[S]:
    """Return what another rank of this job has created for ``key`` here; if none has, create and list it.

    A process that is not a rank always creates its own. A rank that asks twice shares its own cache, too.

    Args:
        key: what is in it, all of it: two processes with one key must want the same. Any length.
        name: a label for people.
        create: creates the cache, or returns None if that cannot be done: then the next rank tries. No other
            process of the job creates for this key meanwhile.
        attach: attaches to a cache that exists.
        job: with which processes to share; None: with the ranks of :func:`this_job`.

    Returns:
        The value, and this process's share in it.

    Raises:
        Whatever ``create`` raises, untouched; the next rank creates then.

    Warns:
        HotsetWarning: the ranks could not meet, so that this one created its own, or it could not be listed.
    """
    caches = _JobCaches(key, name, create, attach, job or this_job())
    return _find_or_create(caches) if caches.lock_names else caches.create()


class _JobCaches(Generic[S]):
    """The caches for one key that ranks of this job have listed."""

    def __init__(
        self, key: str, name: str, create: Callable[[], S | None], attach: Callable[[Address], S], job: Job
    ) -> None:
        self._job, self._key, self._name = job, digest(key), name
        self._create, self._attach = create, attach
        self._why_own = ""
        # A process that is not a rank shares with no other, and waits for no other.
        launchers = job.launchers if job.takes else ()
        self.lock_names = [digest(launcher, self._key) for launcher in launchers]

    def lock_failed(self, error: OSError | None) -> None:
        """Note why the cache will be this rank's own."""
        self._why_own = (
            _unusable(error)
            if error is not None
            else f"another rank began to make it and has not ended for {PATIENCE_SECONDS:.0f} s; look "
            "whether one is stopped, or reads its first samples that slowly"
        )

    def find(self) -> Shared[S] | None:
        """Attach to the oldest one that is offered to this job and can be reached."""
        try:
            return self._join()
        except OSError as error:
            self._why_own = _unusable(error)
            return None

    def _join(self) -> Shared[S] | None:
        for entry in catalog.entries():
            if entry.key != self._key or not set(entry.groups) & set(self._job.takes):
                continue
            handle = catalog.CatalogHandle(entry.nonce, entry.name)
            # The share first: what is attached and not listed could be collected, and created a second time.
            if handle.join():
                with contextlib.suppress(OSError):
                    value = self._attach(catalog.address_of(entry))
                    handle.join(value.segment.fd)
                    return Shared(value, handle, joined=True)
                handle.close()  # of a dead one, that removes what it has left
        return None

    def create(self) -> Shared[S]:
        """Create one and list it; with a warning if it is this rank's own, though others could use it."""
        value = self._create()
        if value is None:
            return Shared(None, None, joined=False)
        with contextlib.suppress(OSError):
            catalog.gc()  # what dead processes left; whether the folder is usable, register says
        handle = catalog.register(value.segment.address, self._name, key=self._key, groups=self._job.offers)
        if self._why_own and handle.joined:  # else it has warned of the same folder
            warn(
                f"The cache {self._name!r} is this rank's own, and takes memory besides the other ranks' "
                f"one: {self._why_own}."
            )
        return Shared(value, handle, joined=False)


def _unusable(error: OSError) -> str:
    return f"the runtime folder cannot be used; set {KNOB} to a folder of your own: {error}"


class CacheLocation(NamedTuple):
    """Where a cache of a session is to be made.

    Attributes:
        path: of its file, while it is made; once it is whole, it gets another.
        spill: path of the second tier's file; None if the session has none.
        folder: the folder of that file; empty without one.
        persist: whether the second tier gets every record.
        limit: bytes that the cache may ever hold, unless its user asks for less. The session's quota bounds
            what it may hold now, and a resize changes that.
    """

    path: str
    spill: str | None
    folder: str
    persist: bool
    limit: int


def find_or_create_in_session(
    session: Session,
    key: str,
    name: str,
    *,
    create: Callable[[CacheLocation], F | None],
    attach: Callable[[str], F],
) -> Shared[F]:
    """Return the session's cache of that key; if there is none, create it.

    Args:
        session: which.
        key: what is in the cache, all of it: two jobs with one key must want the same. Any length.
        name: a label for people.
        create: creates it at the given location, or returns None if that cannot be done.
        attach: attaches to a cache that exists; raises SegmentError if it is another one.

    Returns:
        The value, and this process's use of the session; None without a value.

    Raises:
        SessionError: the session is gone, or another job creates the cache and does not end.
        Whatever ``create`` raises, untouched.
    """
    with open_quota(session) as quota:
        quota.use()  # for as long as this takes, so that the session does not expire meanwhile
        return _find_or_create(_SessionCaches(session, key, name, create, attach))


class _SessionCaches(Generic[F]):
    """The caches of a session for one key."""

    def __init__(
        self,
        session: Session,
        key: str,
        name: str,
        create: Callable[[CacheLocation], F | None],
        attach: Callable[[str], F],
    ) -> None:
        self._session, self._name = session, name
        self._create, self._attach = create, attach
        self._digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        lock_name = f"{session.number} {self._digest}"
        self.lock_names = [hashlib.blake2b(lock_name.encode(), digest_size=16).hexdigest()]

    def lock_failed(self, error: OSError | None) -> None:
        """Raise: two caches of one key would take the session's room twice."""
        raise error or SessionError(
            f"another process began to make the cache {self._name!r} in session {self._session.name!r} and "
            f"has not ended for {PATIENCE_SECONDS:.0f} s; look whether one is stopped, or reads its first "
            "samples that slowly."
        )

    def find(self) -> Shared[F] | None:
        """Attach to one, in memory or, after a reboot, on disk."""
        with runtime() as folder:
            found = self._join(folder)
            if found is None and self._revive(folder):
                found = self._join(folder)
        return found

    def _join(self, folder: int) -> Shared[F] | None:
        # Where there are several, they are of other transforms, but for one.
        place, refused = path_of(folder), None
        for file in sorted(file for file in os.listdir(folder) if self._is_for(file, "cache")):
            use = _use(self._session, file)
            # The use first: what is attached and not used could expire. A process that was making room with
            # it, and died over that, has left it invalidated.
            if use.join() and not is_retired(f"{place}/{file}"):
                try:
                    return Shared(self._attach(f"{place}/{file}"), use, joined=True)
                except FileNotFoundError:
                    pass
                except SegmentError as error:
                    refused = error if _may_pass(error) else refused
            use.close()
        if refused is not None:  # another one of its key would take the session's room twice
            raise SessionError(
                f"the cache {self._name!r} of session {self._session.name!r} cannot be opened now: {refused}"
            ) from refused
        return None

    def create(self) -> Shared[F]:
        """Create one under another name, then give it its own."""
        session = self._session
        base = f"{session.number}-{self._digest}-{secrets.token_hex(8)}"
        spill, beside = None, ""
        if session.spill is not None:
            make_spill(session.spill)
            beside = str(spill_path(session.spill))
            spill = f"{beside}/{base}.spill"
        with runtime() as folder, unfinished(folder, f"{base}.cache") as temporary:
            place = path_of(folder)
            value = self._create(
                CacheLocation(f"{place}/{temporary}", spill, beside, session.persist, _most(session))
            )
            if value is None:
                return Shared(None, None, joined=False)
            value.path = f"{place}/{base}.cache"
            return Shared(value, _name(session, folder, temporary, f"{base}.cache"), joined=False)

    def _revive(self, folder: int) -> bool:
        """Create memory's part of the caches of that key whose spilled records have outlived a reboot."""
        session, revived, refused = self._session, False, None
        if not session.persist or session.spill is None:
            return False
        kept = f"what session {session.name!r} kept on disk"
        with contextlib.suppress(OSError):
            with opened_spill(session.spill) as beside:
                files = [file for file in os.listdir(beside) if self._is_for(file, "spill")]
            for file in files:
                path, cache = f"{spill_path(session.spill)}/{file}", file.removesuffix("spill") + "cache"
                if is_there(folder, cache):
                    continue
                try:
                    with unfinished(folder, cache) as temporary:
                        _revive_one(session, path, f"{path_of(folder)}/{temporary}")
                        _name(session, folder, temporary, cache).close()
                        revived = True
                except SegmentError as error:
                    if _may_pass(error):
                        refused = error
                        continue
                    os.unlink(path)
                    warn(f"{kept} cannot be used, and is read again: {error}")
        if refused is not None and not revived:
            raise SessionError(f"{kept} cannot be opened now: {refused}") from refused
        return revived

    def _is_for(self, file: str, kind: str) -> bool:
        found = CACHE.fullmatch(file)
        wanted = (self._session.number, self._digest, kind)
        return found is not None and (int(found[1]), found[2], found[4]) == wanted


def _name(session: Session, folder: int, temporary: str, file: str) -> SessionCacheHandle:
    """Give a cache its name, and use it, unless the session is being destroyed.

    Raises:
        SessionError: it is.
    """
    use = _use(session, file)
    with open_quota(session) as quota, quota.lock():
        quota.enter(member_of(file))
        # Before it has its name, under the lock: a moment without a user, and another job might drop it.
        use.join()
        os.rename(temporary, file, src_dir_fd=folder, dst_dir_fd=folder)
    return use


def _revive_one(session: Session, spilled: str, path: str) -> None:
    second = Segment.attach(spilled)
    participant = Participant(second)
    try:
        if second.live[Live.INVALIDATED]:
            raise SegmentError("an audit had found that the source no longer gives what is in it.")
        distrust_allocator(participant)
        if second.metadata.get("keyed"):
            raise SegmentError("the keys of functions' results were in memory.")
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
            first.live[Live.STREAM_IDS] = second.live[Live.STREAM_IDS]
            words = second.used_index.copy()
            first.used_index[:] = np.where(words >= PRESENT, words | ON_DISK, 0)
        finally:
            first.close()
    finally:
        participant.leave()
        second.close()


def _may_pass(error: SegmentError) -> bool:
    """Whether a file could not be opened, mapped or read for a reason that says nothing of its content.

    As too many open files, or too little memory. A link or a folder in its place will not pass.
    """
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in (errno.ELOOP, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.ENXIO)
    return isinstance(cause, MemoryError)


def _most(session: Session) -> int:
    """Bytes for which a cache gets address space: as many as the machine has, as a session can grow."""
    return max(session.memory, memory_limits.total())


def _use(session: Session, file: str) -> SessionCacheHandle:
    return SessionCacheHandle(session.number, member_of(file))


def attach_again(address: Any, attach: Callable[[Any], S]) -> S:
    """Attach to a cache where it was when its address was sent, or through a process that has it open now.

    The address is an :class:`Address`, or the path of a session's cache.

    Raises:
        OSError: what ``attach`` raises, if no process within reach has it open.
    """
    try:
        return attach(address)
    except OSError:
        entry = catalog.find(address.nonce.hex()) if isinstance(address, Address) else None
        if entry is None:
            raise
        return attach(catalog.address_of(entry))
