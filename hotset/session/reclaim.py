"""Reclaiming: a cache that no process uses makes room for one that runs, least recently used first.

Whoever edits a transform begins a new cache, and what the old one holds of the session is of no use to it. So
before a process says that its session is full, it looks for caches that nobody uses:

::

    no room ── a cache unused, not pinned? ── no ──> full: samples come from the source
       ^              │ the least recently used
       │              v
       │        hold its byte of the ledger alone ── somebody was quicker ──> the next one
       │              │
       └── row given back <── emptied, file removed, what it spilled too

A cache is used by each process that holds its byte of the ledger, shared (:mod:`hotset.session.quota`), from
before it attaches until it closes or ends; a process that is stopped uses what it used. While the byte is
held alone, whoever comes for the cache finds it gone, and makes it anew, under another name. Its memory is
given back as a destroyed session's is (:mod:`hotset.session.free_cache`), so that a reader who holds no byte
(a machine's node, somebody who looks) never sees pages that are gone.

A process that dies in the midst of it leaves a file that is condemned, or a row without a file; both are the
first to go the next time. Of a session that persists memory alone is given back: the records on its disk are
to outlive more than that, and the next job goes on from them.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from hotset._warnings import printable
from hotset.errors import SegmentError, SessionError
from hotset.session.file_names import CACHE, id_of, is_there, member_of, remove_cache, remove_spilled, runtime
from hotset.session.quota import Quota
from hotset.session.session_definition import Session, ledger_in
from hotset.store.segment import Segment
from hotset.units import format_bytes

__all__ = ["Dropped", "Room", "pin", "reclaim", "room_of", "said_of"]


@dataclass(frozen=True)
class Dropped:
    """A cache that made room.

    Attributes:
        name: what its data set is called.
        bytes: of memory, that the session has back.
        idle: seconds since it was used last, as far as that was noted.
    """

    name: str
    bytes: int
    idle: float


@dataclass(frozen=True)
class Room:
    """Bytes of memory that a session has for a cache that begins now.

    Attributes:
        free: that no cache holds.
        unused: that caches hold which nobody uses and that are not pinned: they make room when it is needed.
        used: that the others hold.
    """

    free: int
    unused: int
    used: int


def room_of(session: Session) -> Room:
    """Look at what there is room for in a session.

    Raises:
        SessionError: it is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    with runtime() as folder, ledger_in(folder, session.file) as ledger:
        unused = sum(ledger.bytes_of(row) for row in ledger.unused())
        held = ledger.held
        return Room(max(ledger.bound - held, 0), unused, max(held - unused, 0))


def reclaim(session: Session, needed: int) -> list[Dropped]:
    """Have caches that nobody uses give their memory back, until so many bytes are, or there are none.

    Raises:
        SessionError: the session is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    dropped: list[Dropped] = []
    with runtime() as folder, ledger_in(folder, session.file) as ledger:
        files = {member_of(file): file for file in os.listdir(folder) if _is_of(file, session.number)}
        rows = {row: member for member, row in ledger.members().items()}
        for row in ledger.unused():
            if sum(each.bytes for each in dropped) >= needed:
                break
            # An empty one has nothing to give, unless it is a row that somebody has died over.
            if row in rows and (ledger.bytes_of(row) or rows[row] not in files):
                dropped += _drop(session, ledger, folder, row, rows[row], files.get(rows[row]))
    return dropped


def pin(session: Session, which: str | int, pinned: bool = True) -> str:
    """Have a cache stay when nobody uses it, or no longer, for as long as its memory is there.

    Args:
        session: whose it is.
        which: the cache's id, or its name if no other one has that.
        pinned: whether it is to stay.

    Returns:
        Its name.

    Raises:
        SessionError: there is no such cache, or there are several of that name; or the session is gone.
        FolderError: the runtime folder is not safely this user's own.
    """
    with runtime() as folder, ledger_in(folder, session.file) as ledger:
        rows = ledger.members()
        files = [file for file in os.listdir(folder) if _is_of(file, session.number)]
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
        ledger.pin(rows[member_of(found[0])], pinned)
        return names[found[0]]


def said_of(session: str, dropped: list[Dropped]) -> str:
    """The sentence for people; empty if nothing was dropped."""
    told = [each for each in dropped if each.bytes]
    if not told:
        return ""
    names = ", ".join(
        f"{each.name} ({format_bytes(each.bytes)}, used last {_ago(each.idle)})" for each in told[:5]
    )
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    what = "a cache that nobody uses" if len(told) == 1 else "caches that nobody uses"
    return (
        f"session {session!r} was full, so {what} made room: {names}{more}. `hotset session pin` keeps a "
        "cache, and `hotset session resize` gives the session more memory."
    )


def _drop(
    session: Session, ledger: Quota, folder: int, row: int, member: int, file: str | None
) -> list[Dropped]:
    """Drop the cache of this row, unless somebody was quicker."""
    with ledger.alone(row) as mine:
        if not mine or ledger.members().get(member) != row:
            return []
        if file is not None and not is_there(folder, file):
            file = None
        name, size, idle = "", ledger.bytes_of(row), time.time() - ledger.used_at(row)
        if file is not None:
            name = _name_of(folder, file)
            # The disk first: without its cache, a file there would be a reboot's to find.
            if session.spill is not None and not session.persist:
                with contextlib.suppress(OSError):
                    remove_spilled(session.spill, file.removesuffix("cache") + "spill")
            remove_cache(folder, file)
        ledger.leave(row)
    return [Dropped(name, size, max(idle, 0.0))]


def _name_of(folder: int, file: str) -> str:
    """What a cache's data set is called; the file's name if it does not say."""
    with contextlib.suppress(SegmentError, OSError):
        segment = Segment.attach(f"/proc/self/fd/{folder}/{file}")
        try:
            return str(segment.metadata.get("name", file))
        finally:
            segment.close()
    return file


def _is_of(file: str, number: int) -> bool:
    found = CACHE.fullmatch(file)
    return found is not None and int(found[1]) == number and found[4] == "cache"


def _ago(seconds: float) -> str:
    """How long ago, for a person.

    Example:
        >>> _ago(7), _ago(200), _ago(90000)
        ('7 s ago', '3 min ago', '25 h ago')
    """
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
