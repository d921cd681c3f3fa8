"""What sessions hold and have served, in numbers, for people who look: no sample is touched for it.

A cache counts itself, in the words of its segment; here they are read, through a mapping of its own, at the
moment of asking. What others write meanwhile may be seen half a batch apart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np

from hotset.errors import SegmentError
from hotset.session.file_names import CACHE, id_of, member_of
from hotset.session.quota import Quota
from hotset.session.runtime_dir import open_folder
from hotset.session.session_definition import Session, open_ledger
from hotset.store import locks
from hotset.store.format import ON_DISK, PRESENT, SLOTS, Live, Slot
from hotset.store.segment import Segment

__all__ = ["CacheReport", "SessionReport", "report"]


@dataclass(frozen=True)
class CacheReport:
    """One cache of a session.

    Attributes:
        id: 32 bits that tell it from others, for people.
        name: what its dataset is called.
        samples: length of the dataset.
        cached: how many of them it holds, in memory or on disk.
        spilled: how many of those on disk alone.
        memory: bytes that it has taken in memory.
        disk: bytes that it has taken on disk.
        limit: bytes that it may take in memory.
        mean_bytes: bytes of a record on average; 0 without any.
        hits: samples served from it.
        peer_hits: samples that other machines sent to this one's processes, of a session that they share.
        misses: samples read from the source.
        hit_rate: fraction of the samples served that did not come from the source; None before the first.
        fill_seconds: spent in the source and the cached transforms, summed over processes.
        waited_seconds: that loaders' consumers waited for batches, summed over them.
        processes: how many living processes have it open and have read or written samples.
        in_use: whether any process uses it; if not, and it is not pinned, it makes room for those that run.
        pinned: whether it stays, though nobody uses it.
        state: ``ok``, ``invalidated`` (an audit found it stale), or a sentence if it cannot be opened.
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


@dataclass(frozen=True)
class SessionReport:
    """A session and its caches.

    Attributes:
        session: what it is.
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
        """Bytes of that memory that make room for others when it is needed."""
        return sum(cache.memory for cache in self.caches if not (cache.in_use or cache.pinned))


def report(session: Session) -> SessionReport:
    """Look at a session.

    Raises:
        SessionError: it is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    folder = open_folder()
    try:
        with open_ledger(session) as ledger:
            in_use = ledger.in_use
            files = [file for file in os.listdir(folder) if _is_of(file, session.number)]
            looked = [_standing(_look(folder, file), ledger, file) for file in files]
    finally:
        os.close(folder)
    caches = tuple(sorted(looked, key=lambda cache: (cache.name, cache.id)))
    memory, disk = (sum(getattr(cache, tier) for cache in caches) for tier in ("memory", "disk"))
    return SessionReport(session, in_use, memory, disk, caches)


def _standing(cache: CacheReport, ledger: Quota, file: str) -> CacheReport:
    """With what the ledger says of it; that it is used is noted there, as it may end without a word."""
    row = ledger.members().get(member_of(file))
    if row is None:
        return cache
    in_use = ledger.note_if_used(row)
    limit = min(cache.limit, ledger.limit)  # it has address space for more, as the session may be resized
    return replace(cache, in_use=in_use, pinned=ledger.is_pinned(row), limit=limit)


def _is_of(file: str, number: int) -> bool:
    found = CACHE.fullmatch(file)
    return found is not None and int(found[1]) == number


def _look(folder: int, file: str) -> CacheReport:
    number = id_of(file)
    try:
        segment = Segment.attach(f"/proc/self/fd/{folder}/{file}")
    except SegmentError as error:
        return CacheReport(number, file, state=str(error))
    try:
        disk = _disk_bytes(segment)
        geometry, live = segment.geometry, segment.live
        words = segment.index[segment.index >= PRESENT]
        sums = segment.slots.sum(axis=0).tolist()
        hits = sums[Slot.HITS] + sums[Slot.PEER_HITS]
        served = hits + sums[Slot.MISSES]
        return CacheReport(
            id=number,
            name=str(segment.metadata.get("name", file)),
            samples=geometry.samples,
            cached=len(words),
            spilled=int(np.count_nonzero(words & ON_DISK)),
            memory=geometry.taken(int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT])),
            disk=disk,
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
    finally:
        segment.close()


def _disk_bytes(segment: Segment) -> int:
    """Bytes that a cache's records have taken on disk."""
    said = segment.metadata.get("spill")
    if not isinstance(said, dict) or not isinstance(said.get("path"), str):
        return 0
    try:
        second = Segment.attach(said["path"])
    except SegmentError:
        return 0
    try:
        live = second.live
        return second.geometry.taken(int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT]))
    finally:
        second.close()


def _processes(segment: Segment) -> int:
    """How many processes hold a slot; those that ever were are looked at, which are few."""
    used = np.flatnonzero(segment.slots[:, Slot.INCARNATION]).tolist()
    return sum(locks.is_locked(segment.fd, 1 + slot) for slot in used if slot < SLOTS)
