"""Reports of caches and sessions for users: what they hold and have served, and whether records are valid.

::

    report(session)    the caches of one session, in numbers; reads no record        server, hotset session
    report_all()       those of every session                                        the same
    report_jobs()      the caches of jobs that use no session, the same              hotset top
    check_caches()     every cache within reach; verifies every record of it         hotset check

A cache counts itself, in the words of its segment. A report reads these words through a mapping of its own;
what other processes write meanwhile may be seen half a batch apart.

Private caches are found in the catalog, those of sessions by their files. If only processes of another
container hold a private cache, its file's lock shows that it is alive, but its memory, which has no name,
cannot be opened from here: it is reported as out of reach, and left alone.

Functions that open the runtime folder raise FolderError if it is not safely this user's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hotset.errors import SegmentError, SessionError
from hotset.session import catalog, sessions
from hotset.session.catalog import ListedCache, address_of
from hotset.session.quota import Quota
from hotset.session.runtime_dir import runtime, runtime_folder
from hotset.session.session_definition import Session, open_quota
from hotset.session.session_files import CACHE, caches_of, id_of, member_of
from hotset.store import locks
from hotset.store.format import DESTROYED, ON_DISK, PRESENT, SLOTS, Live, Slot
from hotset.store.fsck import check_segment, check_tiers
from hotset.store.segment import Address, Segment, attach_second

__all__ = [
    "CacheReport",
    "CheckedCache",
    "SessionReport",
    "check_caches",
    "report",
    "report_all",
    "report_jobs",
]


# ---- in numbers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheReport:
    """One cache of a session.

    Attributes:
        id: 32 bits that identify it, for users.
        name: what its dataset is called.
        samples: length of the dataset.
        cached: how many of them it holds, in memory or on disk.
        spilled: how many of those on disk alone.
        memory: bytes that it has taken in memory.
        disk: bytes that it has taken on disk.
        limit: bytes that it may take in memory.
        mean_bytes: bytes of a record on average; 0 without any.
        hits: samples served from it.
        peer_hits: samples that other machines of the session's cluster sent to processes of this one.
        misses: samples read from the source.
        hit_rate: fraction of the samples served that did not come from the source; None before the first.
        fill_seconds: spent in the source and the cached transforms, summed over processes.
        waited_seconds: that training loops have waited for batches, summed over them.
        processes: how many living processes have it open and have read or written samples.
        in_use: whether any process uses it; an unused cache is dropped for others, unless it is pinned.
        pinned: whether it stays while no process uses it.
        state: ``ok``, ``invalidated`` (an audit found it stale), or a sentence if it cannot be opened.
        process: that has made it; None in a session.
    """

    id: int
    name: str
    samples: int = 0
    cached: int = 0
    spilled: int = 0
    memory: int = 0
    disk: int = 0
    limit: int = 0
    mean_bytes: float = 0.0
    hits: int = 0
    peer_hits: int = 0
    misses: int = 0
    hit_rate: float | None = None
    fill_seconds: float = 0.0
    waited_seconds: float = 0.0
    processes: int = 0
    in_use: bool = False
    pinned: bool = False
    state: str = "ok"
    process: int | None = None


@dataclass(frozen=True)
class SessionReport:
    """A session and its caches.

    Attributes:
        session: its definition.
        in_use: whether a living process uses it.
        memory, disk: bytes that its caches have taken together.
        caches: each of them, by name.
    """

    session: Session
    in_use: bool
    memory: int
    disk: int
    caches: tuple[CacheReport, ...]

    @property
    def unused(self) -> int:
        """Bytes of memory of the caches that are dropped when others need room."""
        return sum(cache.memory for cache in self.caches if not (cache.in_use or cache.pinned))


def report(session: Session) -> SessionReport:
    """Return what a session and its caches hold and have served.

    Raises:
        SessionError: it is gone.
    """
    with runtime() as folder, open_quota(session) as quota:
        in_use = quota.in_use
        files = caches_of(session.number, os.listdir(folder))
        found = [_with_quota(_cache_in(folder, file), quota, file) for file in files]
    caches = tuple(sorted(found, key=lambda cache: (cache.name, cache.id)))
    memory, disk = (sum(getattr(cache, tier) for cache in caches) for tier in ("memory", "disk"))
    return SessionReport(session, in_use, memory, disk, caches)


def report_all() -> list[SessionReport]:
    """Return the reports of this user's sessions on this machine, oldest first."""
    found = []
    for session in sessions.sessions():
        with contextlib.suppress(SessionError):  # destroyed since it was listed
            found.append(report(session))
    return found


def report_jobs() -> list[CacheReport]:
    """Return what the caches of running jobs hold and have served that are in no session, oldest first."""
    found = []
    for entry in catalog.entries():
        if not entry.alive or entry.at is None:
            continue
        with contextlib.suppress(SegmentError):  # it has ended meanwhile
            counts = _counts_of(address_of(entry), id_of(entry.file), entry.name)
            found.append(replace(counts, in_use=True, process=entry.pid))
    return found


def _with_quota(cache: CacheReport, quota: Quota, file: str) -> CacheReport:
    """Add what the quota says of a cache. A use is recorded there, as its process may be killed."""
    row = quota.members().get(member_of(file))
    if row is None:
        return cache
    in_use = quota.note_if_used(row)
    limit = min(cache.limit, quota.limit)  # it has address space for more, as the session may be resized
    return replace(cache, in_use=in_use, pinned=quota.is_pinned(row), limit=limit)


def _cache_in(folder: int, file: str) -> CacheReport:
    try:
        return _counts_of(f"/proc/self/fd/{folder}/{file}", id_of(file), file)
    except SegmentError as error:
        return CacheReport(id_of(file), file, state=str(error))


def _counts_of(where: str | Address, number: int, name: str) -> CacheReport:
    with contextlib.closing(Segment.attach(where)) as segment:
        return _counted(segment, where, number, name)


def _counted(segment: Segment, where: str | Address, number: int, name: str) -> CacheReport:
    live = segment.live
    words = segment.used_index
    words = words[words >= PRESENT]
    sums = segment.slots.sum(axis=0).tolist()
    hits = sums[Slot.HITS] + sums[Slot.PEER_HITS]
    served = hits + sums[Slot.MISSES]
    return CacheReport(
        id=number,
        name=str(segment.metadata.get("name", name)),
        samples=segment.samples,
        cached=len(words),
        spilled=int(np.count_nonzero(words & ON_DISK)),
        memory=segment.taken,
        disk=_disk_bytes(segment, where),
        limit=int(live[Live.LIMIT]),
        mean_bytes=sums[Slot.STORED_BYTES] / len(words) if len(words) else 0.0,
        hits=sums[Slot.HITS],
        peer_hits=sums[Slot.PEER_HITS],
        misses=sums[Slot.MISSES],
        hit_rate=hits / served if served else None,
        fill_seconds=sums[Slot.FILL_NS] / 1e9,
        waited_seconds=sums[Slot.WAIT_NS] / 1e9,
        processes=_processes(segment),
        state="invalidated" if live[Live.INVALIDATED] else "ok",
    )


def _disk_bytes(segment: Segment, where: str | Address) -> int:
    """Bytes that a cache's records have taken on disk."""
    with contextlib.suppress(SegmentError), _second_of(segment, where) as second:
        return second.taken if second is not None else 0
    return 0


@contextlib.contextmanager
def _second_of(segment: Segment, where: str | Address) -> Iterator[Segment | None]:
    """Attach to what a cache has on disk, for a block; None if it spills nothing.

    Raises:
        SegmentError: it is gone, or damaged.
    """
    said = segment.metadata.get("spill")
    if not isinstance(said, dict):
        yield None
        return
    with contextlib.closing(attach_second(where, said)) as second:
        yield second


def _processes(segment: Segment) -> int:
    """How many processes hold a slot. Only slots that were ever taken are tested, which are few."""
    used = np.flatnonzero(segment.slots[:, Slot.INCARNATION]).tolist()
    return sum(locks.is_locked(segment.fd, 1 + slot) for slot in used if slot < SLOTS)


# ---- verified --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedCache:
    """One cache whose records were verified.

    Attributes:
        name: its name.
        owner: ``process 123``, or ``session NAME``.
        state: ``ok``, ``damaged``, ``dead`` (no process holds it; ``hotset gc`` frees it), ``out of reach``.
        problems: a sentence for each.
        counts: what it holds; None if it could not be opened.
    """

    name: str
    owner: str
    state: str
    problems: tuple[str, ...] = ()
    counts: CacheReport | None = None


def check_caches() -> Iterator[CheckedCache]:
    """Open every cache within reach, and verify every record in it, in memory and on disk."""
    for entry in catalog.entries():
        yield _private(entry)
    known = {session.number: session for session in sessions.sessions()}
    folder = runtime_folder()
    for file in sorted(os.listdir(folder)):
        found = CACHE.fullmatch(file)
        if found:
            number = int(found[1])
            if number not in known:
                yield CheckedCache(file, f"session {number}", "dead")
                continue
            seen = _check(f"{folder}/{file}", file, f"session {known[number].name}")
            counts = seen.counts
            if counts is not None:  # it has address space for more, as a session may be resized
                seen = replace(seen, counts=replace(counts, limit=min(counts.limit, known[number].memory)))
            if seen.state != "damaged" or os.path.exists(f"{folder}/{file}"):  # else destroyed meanwhile
                yield seen


def _private(entry: ListedCache) -> CheckedCache:
    name, pid = entry.name or entry.file, entry.at[0] if entry.at else entry.pid
    owner = f"process {pid}" if pid > 0 else ""
    if entry.problem:
        return CheckedCache(name, owner, "damaged", problems=(entry.problem,))
    if not entry.alive:
        return CheckedCache(name, owner, "dead")
    if entry.at is None:
        return CheckedCache(name, owner, "out of reach")
    seen = _check(address_of(entry), name, owner)
    # The process that had it open may have ended since it was listed: that is not damage.
    gone = seen.state == "damaged" and not os.path.exists(entry.path or "")
    return CheckedCache(name, owner, "out of reach") if gone else seen


def _check(where: str | Address, name: str, owner: str) -> CheckedCache:
    try:
        segment = Segment.attach(where)
    except SegmentError as error:
        return CheckedCache(name, owner, "damaged", problems=(str(error),))
    with contextlib.closing(segment):
        live = segment.live
        if live[Live.INVALIDATED] == DESTROYED:  # a process died while removing it, or is at it
            return CheckedCache(name, owner, "dead")
        counts = _counted(segment, where, 0, name)
        spilled = _spill_problems(segment, where)
        problems = (*check_segment(segment), *spilled)
        if problems and live[Live.INVALIDATED] == DESTROYED:  # while it was read here
            return CheckedCache(name, owner, "dead")
        return CheckedCache(counts.name, owner, "damaged" if problems else "ok", problems, counts)


def _spill_problems(segment: Segment, where: str | Address) -> list[str]:
    """Verify what a cache has on disk; returns a sentence for each problem."""
    try:
        with _second_of(segment, where) as second:
            return [*check_segment(second), *check_tiers(segment, second)] if second is not None else []
    except SegmentError as error:
        # A private cache's second tier has no name, and ends with its processes: that is not damage.
        return [str(error)] if "path" in segment.metadata["spill"] else []
