"""Reports of the caches on this machine: what they hold, and whether their records are valid.

Private caches are found in the catalog, those of sessions by their files. If only processes of another
container hold a cache, its file's lock shows that it is alive, but its memory, which has no name, cannot be
opened from here: it is reported as out of reach, and left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hotset.errors import SegmentError
from hotset.session import catalog as registry
from hotset.session import recovery, sessions
from hotset.session.entry import Entry
from hotset.session.file_names import CACHE
from hotset.session.find_or_create import address_of
from hotset.session.free_cache import DESTROYED
from hotset.session.runtime_dir import runtime_folder
from hotset.store.format import PRESENT, Live
from hotset.store.fsck import check_segment, check_tiers
from hotset.store.segment import Address, Segment, attach_second

__all__ = ["Report", "gc", "reports"]


@dataclass(frozen=True)
class Report:
    """The report of one cache.

    Attributes:
        name: its name.
        owner: ``process 123``, or ``session NAME``.
        state: ``ok``, ``damaged``, ``dead`` (nobody holds it: ``hotset gc`` frees it) or ``out of reach``.
        samples: length of its dataset; 0 if it could not be opened.
        cached: how many of them it holds.
        bytes: memory that it has taken for them.
        disk: bytes that it has spilled.
        limit: memory that it may take.
        problems: a sentence for each.
    """

    name: str
    owner: str
    state: str
    samples: int = 0
    cached: int = 0
    bytes: int = 0
    disk: int = 0
    limit: int = 0
    problems: tuple[str, ...] = ()


def reports() -> Iterator[Report]:
    """Open every cache within reach, and verify every record in it, in memory and on disk.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    for entry in registry.entries():
        yield _private(entry)
    known = {session.number: session for session in sessions.sessions()}
    folder = runtime_folder()
    for file in sorted(os.listdir(folder)):
        found = CACHE.fullmatch(file)
        if found:
            number = int(found[1])
            if number not in known:
                yield Report(file, f"session {number}", "dead")
                continue
            seen = _opened(f"{folder}/{file}", file, f"session {known[number].name}")
            if seen.state != "damaged" or os.path.exists(f"{folder}/{file}"):  # else destroyed meanwhile
                # It has address space for more, as a session may be resized.
                yield replace(seen, limit=min(seen.limit, known[number].memory))


def gc() -> list[str]:
    """Free what dead processes left, and expired sessions; return a sentence for each.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    return [*registry.gc(), *recovery.recover()]


def _private(entry: Entry) -> Report:
    name, pid = entry.name or entry.file, entry.at[0] if entry.at else entry.pid
    owner = f"process {pid}" if pid > 0 else ""
    if entry.problem:
        return Report(name, owner, "damaged", problems=(entry.problem,))
    if not entry.alive:
        return Report(name, owner, "dead")
    if entry.at is None:
        return Report(name, owner, "out of reach")
    try:
        seen = _opened(address_of(entry), name, owner)
    except SegmentError as error:
        seen = Report(name, owner, "damaged", problems=(str(error),))
    # The process that had it open may have ended since it was listed: that is not damage.
    gone = seen.state == "damaged" and not os.path.exists(entry.path or "")
    return Report(name, owner, "out of reach") if gone else seen


def _opened(where: str | Address, name: str, owner: str) -> Report:
    try:
        segment = Segment.attach(where)
    except SegmentError as error:
        return Report(name, owner, "damaged", problems=(str(error),))
    try:
        live = segment.live
        if (
            live[Live.INVALIDATED] == DESTROYED
        ):  # its files are not removed yet, or the process that removed them died
            return Report(name, owner, "dead")
        disk, spilled = _check_spilled(where, segment)
        problems = (*check_segment(segment), *spilled)
        return Report(
            str(segment.metadata.get("name", name)),
            owner,
            "damaged" if problems else "ok",
            samples=segment.geometry.samples,
            cached=int((segment.index >= PRESENT).sum()),
            bytes=segment.geometry.taken(int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT])),
            disk=disk,
            limit=int(live[Live.LIMIT]),
            problems=problems,
        )
    finally:
        segment.close()


def _check_spilled(where: str | Address, segment: Segment) -> tuple[int, list[str]]:
    """Verify what a cache has on disk; returns its bytes, and a sentence for each problem."""
    said = segment.metadata.get("spill")
    if not isinstance(said, dict):
        return 0, []
    try:
        second = attach_second(where, said)
    except SegmentError as error:
        # A private cache's second tier has no name, and ends with its processes: that is not damage.
        return 0, [str(error)] if "path" in said else []
    try:
        live = second.live
        taken = second.geometry.taken(int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT]))
        return taken, [*check_segment(second), *check_tiers(segment, second)]
    finally:
        second.close()
