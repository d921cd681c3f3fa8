"""Recovery: what a process leaves behind that dies while it changes a session, and how it is repaired.

What it leaves takes room, and does no other harm. ``hotset gc``, and a server when it starts, look through
the runtime folder and all known spill folders:

======================================  ==============================================================
found                                   repair
======================================  ==============================================================
a quota that has ended                  its destroying process has died: the session is destroyed
a session that its server's quota       it was made again after a reboot, and the server has begun since:
does not name                           the session enters it
a server's quota that names a session   the process that was making or destroying it has died: the session
that is gone                            leaves it
a quota, or a cache, that is damaged    removed, unless a process still uses it, which goes on
a cache whose session is gone           removed, at once: it got its name under the lock of a quota
a list of machines, or counts of their  removed, at once: it was written for a session that was there
traffic, whose session is gone
a spill file without a cache            removed, unless its session persists: the next job goes on from it;
                                        or a process has it locked: its session is in another runtime folder
a definition without a session          removed: it does not say what session that was
``.new``, and 32 digits for a name      removed: the process that was making it has died
======================================  ==============================================================

A quota without caches and a cache without jobs are valid: sessions outlive both. A file that a living process
is creating looks like one that a dead process has left, so the other files stay for a minute.

Functions that open the runtime folder raise FolderError if it is not safely this user's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

from hotset.errors import SessionError
from hotset.session import catalog, server_quota
from hotset.session.reclaim import drop_damaged
from hotset.session.runtime_dir import opened, runtime
from hotset.session.session_definition import Session, quota_in
from hotset.session.session_files import (
    CACHE,
    DEFINITION,
    QUOTA,
    SERVER_QUOTA,
    SHARED,
    is_there,
    remove_cache,
    unlink,
)
from hotset.session.sessions import destroy, expire, one_at_a_time, sessions
from hotset.session.spill_dirs import known_folders, opened_spill
from hotset.store.locks import is_locked, try_lock

__all__ = ["gc", "recover"]

_UNFINISHED = re.compile(
    r"(?:\d{1,10}(?:-[0-9a-f]{32}-[0-9a-f]{16})?|server-\d{1,5})\.\w+(?:\.json)?\.[0-9a-f]{8}\.new"
)
_NAMELESS = re.compile(r"[0-9a-f]{32}")  # for a moment, where the file system knows no nameless files
_YOUNG_SECONDS = 60.0


def gc() -> list[str]:
    """Free what dead processes left, and expired sessions; return a sentence for each."""
    return [*catalog.gc(), *recover()]


def recover() -> list[str]:
    """Repair what crashes left, and destroy expired sessions; return a sentence for each."""
    sentences = _destroy_half_destroyed()
    with one_at_a_time(), runtime() as folder:
        alive = {session.number: session for session in sessions()}
        for session in alive.values():  # its server may have started after it was created again
            server_quota.enter(folder, session.server, session.number)
        sentences += _recover_runtime(folder, alive)
        for session in alive.values():
            with contextlib.suppress(SessionError, OSError):  # it is gone by now
                sentences += [_removed(each.name) for each in drop_damaged(session)]
        for spill in known_folders():
            with contextlib.suppress(OSError):  # the disk fails, or is gone by now
                sentences += _recover_spilled(spill, alive, folder)
    sentences += expire()
    return sentences


def _destroy_half_destroyed() -> list[str]:
    sentences = []
    with one_at_a_time(), runtime() as folder:
        half = [session for session in sessions() if _has_ended(folder, session)]
    for session in half:  # by a process that died over it
        with contextlib.suppress(SessionError):
            destroy(session)
            sentences.append(
                f"Destroyed session {session.name!r}: the process that was destroying it has died."
            )
    return sentences


def _has_ended(folder: int, session: Session) -> bool:
    with contextlib.suppress(OSError), quota_in(folder, session.file) as quota:
        return quota.ended
    return False


def _recover_runtime(folder: int, alive: dict[int, Session]) -> list[str]:
    """Remove damaged quotas, caches without a session, and unfinished files."""
    files = sorted(os.listdir(folder))
    damaged = {int(found[1]) for file in files if (found := QUOTA.fullmatch(file))} - alive.keys()
    used = {number for number in damaged if _is_used(folder, f"{number}.session")}
    sentences = []
    for file in files:
        cache, quota = CACHE.fullmatch(file), QUOTA.fullmatch(file)
        if quota and int(quota[1]) in damaged - used:
            unlink(folder, file)
            sentences.append(_removed(file))
        elif cache and int(cache[1]) not in alive.keys() | used:
            remove_cache(folder, file)
            sentences.append(f"Removed {file}: its session is gone.")
        elif server := SERVER_QUOTA.fullmatch(file):
            server_quota.keep(folder, int(server[1]), alive.keys() | used)
        elif (shared := SHARED.fullmatch(file)) and int(shared[1]) not in alive:
            unlink(folder, file)
        elif _UNFINISHED.fullmatch(file) and _is_old(folder, file):
            unlink(folder, file)
            sentences.append(f"Removed {file}: the process that was making it has died.")
    return sentences


def _removed(file: str) -> str:
    return f"Removed {file}: it is damaged, or of another version, and no process uses it."


def _is_used(folder: int, file: str) -> bool:
    """Whether a process uses the session of this quota, or the file is not safely this user's own."""
    with contextlib.suppress(OSError), opened(folder, file) as fd:
        return is_locked(fd, 0)
    return True


def _recover_spilled(spill: str, alive: dict[int, Session], folder: int) -> list[str]:
    """Remove spill files without a session, and those whose cache is gone and that do not persist."""
    sentences = []
    caches = set(os.listdir(folder))
    with opened_spill(spill) as place:
        for file in sorted(os.listdir(place)):
            why = _why_spilled_is_dead(file, alive, caches, folder)
            if not why or not _is_old(place, file):
                continue
            # What a living process has locked is of a session of another runtime folder, unknown here.
            with contextlib.suppress(OSError), opened(place, file) as fd:
                if try_lock(fd, 0, length=0):
                    unlink(place, file)
                    sentences.append(f"Removed {file} in {spill}: {why}.")
    return sentences


def _why_spilled_is_dead(file: str, alive: dict[int, Session], caches: set[str], folder: int) -> str:
    """Why no process can use a file of a spill folder; empty if one can, or if it is not hotset's."""
    if found := CACHE.fullmatch(file):
        session = alive.get(int(found[1]))
        kept = session is not None and (session.persist or file.removesuffix("spill") + "cache" in caches)
        return "" if kept else "its cache is gone"
    if DEFINITION.fullmatch(file):
        # Without a quota: the session was not made again from the definition, so it cannot be.
        return "" if is_there(folder, file.removesuffix(".json")) else "it does not define a session"
    if _UNFINISHED.fullmatch(file) or _NAMELESS.fullmatch(file):
        return "the process that was making it has died"
    return ""


def _is_old(folder: int, file: str) -> bool:
    """Whether it is too old for a process to be still creating it."""
    try:
        changed = os.stat(file, dir_fd=folder, follow_symlinks=False).st_ctime
    except OSError:
        return False
    return abs(time.time() - changed) > _YOUNG_SECONDS
