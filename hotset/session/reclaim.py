"""Reclaiming: unused caches are dropped for a cache that needs room, the least recently used first.

A user who edits a transform starts a new cache, and the old one only takes up the session's memory. So before
a process reports that its session is full, it looks for caches that no process uses:

::

    no room ── a cache unused, not pinned? ── no ──> full: samples come from the source
       ^              │ the least recently used
       │              v
       │        hold its byte of the quota alone ── another was quicker ──> the next one
       │              │
       └── row given back <── emptied, file removed, what it spilled too

A process uses a cache while it holds the cache's byte of the quota with a shared lock
(:mod:`hotset.session.quota`): from before it attaches until it closes or ends. A stopped process still holds
its lock. While the reclaiming process holds the byte exclusively, a process that wants the cache finds it
gone and creates it again under another name. The memory is freed as that of a destroyed session
(:mod:`hotset.session.session_files`), so that a reader without a lock (a machine's node, a report) never
touches pages that are gone.

A process that dies while reclaiming leaves an invalidated file, or a row without a file; both are dropped
first the next time. If the session persists, only memory is freed: the next job continues from the records on
its disk.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from hotset._warnings import printable
from hotset.errors import SegmentError, SessionError
from hotset.session.quota import Quota
from hotset.session.runtime_dir import opened, runtime
from hotset.session.session_definition import Session, quota_in
from hotset.session.session_files import caches_of, id_of, is_there, member_of, remove_cache
from hotset.store.format import HEADER_BYTES, unpack_header
from hotset.store.segment import Segment, read_metadata
from hotset.units import format_bytes

__all__ = ["Dropped", "Room", "drop_damaged", "pin", "reclaim", "room_of", "sentence_about"]


@dataclass(frozen=True)
class Dropped:
    """A cache that was dropped.

    Attributes:
        name: of its dataset.
        bytes: of memory that were freed.
        idle: seconds since its last recorded use.
    """

    name: str
    bytes: int
    idle: float


@dataclass(frozen=True)
class Room:
    """The memory that a session has for a new cache.

    Attributes:
        free: bytes that no cache holds.
        unused: bytes of caches that no process uses and that are not pinned; they are dropped when needed.
        used: bytes of the other caches.
    """

    free: int
    unused: int
    used: int


def room_of(session: Session) -> Room:
    """Return the room that a session has for a new cache.

    Raises:
        SessionError: it is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    with runtime() as folder, quota_in(folder, session.file) as quota:
        unused = sum(quota.bytes_of(row) for row in quota.unused())
        held = quota.held
        return Room(max(quota.bound - held, 0), unused, max(held - unused, 0))


def reclaim(session: Session, needed: int) -> list[Dropped]:
    """Drop unused caches until this many bytes are freed, or none is left; return the dropped caches.

    Raises:
        SessionError: the session is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    dropped: list[Dropped] = []
    with runtime() as folder, quota_in(folder, session.file) as quota:
        files = {member_of(file): file for file in caches_of(session.number, os.listdir(folder))}
        rows = {row: member for member, row in quota.members().items()}
        for row in quota.unused():
            if sum(each.bytes for each in dropped) >= needed:
                break
            # An empty cache frees nothing, unless its row was left by a process that died.
            if row in rows and (quota.bytes_of(row) or rows[row] not in files):
                dropped += _drop(session, quota, folder, row, rows[row], files.get(rows[row]))
    return dropped


def drop_damaged(session: Session) -> list[Dropped]:
    """Drop the caches that nobody can open and no process uses any more; return them, named by their files.

    Raises:
        SessionError: the session is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    dropped: list[Dropped] = []
    with runtime() as folder, quota_in(folder, session.file) as quota:
        rows = quota.members()
        for file in caches_of(session.number, os.listdir(folder)):
            row = rows.get(member_of(file))
            if row is not None and _is_damaged(folder, file):
                dropped += _drop(session, quota, folder, row, member_of(file), file)
    return dropped


def pin(session: Session, which: str | int, pinned: bool = True) -> str:
    """Pin a cache, so that it stays while no process uses it, or unpin it; return its name.

    ``which`` is the cache's id, or its name if no other cache of the session has that.

    Raises:
        SessionError: there is no such cache, or there are several of that name; or the session is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    with runtime() as folder, quota_in(folder, session.file) as quota:
        rows = quota.members()
        files = caches_of(session.number, os.listdir(folder))
        names = {file: _name_of(folder, file) for file in files if member_of(file) in rows}
        found = [file for file, name in names.items() if str(which) in (str(id_of(file)), name)]
        if len(found) != 1:
            caches = ", ".join(f"{id_of(file)} ({printable(name)})" for file, name in sorted(names.items()))
            there = f"there are: {caches}" if names else "it has none"
            many = "several caches" if found else "no cache"
            raise SessionError(
                f"session {session.name!r} has {many} {printable(str(which))!r}; name one by its id "
                f"({there})."
            )
        quota.pin(rows[member_of(found[0])], pinned)
        return names[found[0]]


def sentence_about(session: str, dropped: list[Dropped]) -> str:
    """Return a sentence for the user; empty if nothing was dropped."""
    freed = [each for each in dropped if each.bytes]
    if not freed:
        return ""
    names = ", ".join(
        f"{each.name} ({format_bytes(each.bytes)}, used last {_ago(each.idle)})" for each in freed[:5]
    )
    more = f" and {len(freed) - 5} more" if len(freed) > 5 else ""
    what = "an unused cache" if len(freed) == 1 else "unused caches"
    return (
        f"session {session!r} was full, so {what} made room: {names}{more}. `hotset session pin` keeps a "
        "cache, and `hotset session resize` gives the session more memory."
    )


def _drop(
    session: Session, quota: Quota, folder: int, row: int, member: int, file: str | None
) -> list[Dropped]:
    """Drop the cache of this row, unless another process was quicker."""
    with quota.lock_member(row) as held:
        if not held or quota.members().get(member) != row:
            return []
        name, size, idle = "", quota.bytes_of(row), time.time() - quota.used_at(row)
        if file is not None and is_there(folder, file):
            name = _name_of(folder, file)
            remove_cache(folder, file, None if session.persist else session.spill)
        quota.leave(row)
    return [Dropped(name, size, max(idle, 0.0))]


def _is_damaged(folder: int, file: str) -> bool:
    """Whether a cache's header, or its metadata, are none. One that memory is too short for now is whole."""
    try:
        with opened(folder, file) as fd:
            geometry, _ = unpack_header(os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size, file)
            read_metadata(fd, geometry)
    except (SegmentError, ValueError):
        return True
    except OSError:
        return False
    return False


def _name_of(folder: int, file: str) -> str:
    """The name of a cache's dataset; the file's name if the cache cannot be opened."""
    path = f"/proc/self/fd/{folder}/{file}"
    with contextlib.suppress(SegmentError, OSError), contextlib.closing(Segment.attach(path)) as segment:
        return str(segment.metadata.get("name", file))
    return file


def _ago(seconds: float) -> str:
    """How long ago, as text.

    Example:
        >>> _ago(7), _ago(200), _ago(90000)
        ('7 s ago', '3 min ago', '25 h ago')
    """
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
