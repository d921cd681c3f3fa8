"""Sessions: named caches with a common memory limit, which outlive the job that filled them.

A session is a quota file in the runtime folder, whose head holds its definition
(:mod:`hotset.session.session_definition`), and one file for each of its caches beside it. Samples that do not
fit into memory lie in its spill folder (:mod:`hotset.session.session_files`). This is its life:

========== ============================================================================================
created    by a user or a server; it takes no memory except for the quota file
used       every process that uses it holds a shared lock on the quota; there is no list of processes
destroyed  first the quota ends, so that no cache is added; then each cache is emptied where it is: jobs
           that are reading find their samples gone and read from their source; then the files go
expired    its time to live has passed since its last use; the next process that looks destroys it
resized    its quota's limit changes, also while jobs use it: a job that had no room left gets more, or
           unused caches are dropped until the session fits
rebooted   memory is gone. A session with ``persist`` is created again from its definition in the spill
           folder, and its caches continue from what was spilled
========== ============================================================================================

None of this needs a process that runs all the time. A server (:mod:`hotset.server`) is one more user of this
module. :mod:`hotset.session.recovery` repairs what a process leaves that dies in between.

Functions that open the runtime folder raise FolderError if it is not safely this user's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from dataclasses import dataclass, replace

from hotset._warnings import warn
from hotset.errors import HotsetError, SessionError
from hotset.session import server_quota
from hotset.session.named_lock import NamedLocks
from hotset.session.quota import Quota
from hotset.session.reclaim import Dropped, reclaim
from hotset.session.runtime_dir import KNOB, path_of, runtime, runtime_folder
from hotset.session.session_definition import (
    Session,
    forget,
    open_quota,
    quota_in,
    restore,
    session_of,
    set_memory,
    write_down,
)
from hotset.session.session_files import QUOTA, membership_file, peer_stats_file, remove_caches, unlink
from hotset.session.spill_dirs import make_spill, remember
from hotset.store import memory_limits
from hotset.units import format_bytes, parse_bytes

__all__ = [
    "Resized",
    "create",
    "destroy",
    "expire",
    "find",
    "one_at_a_time",
    "resize",
    "sessions",
    "warn_if_too_much",
]

_ELSEWHERE = f"set {KNOB} to another folder"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_LARGEST_NUMBER = (1 << 32) - 1
_MOST_MEMORY = 1 << 60
_LOCK = "5e55105" + "0" * 25
_LOCK_SECONDS = 30.0


def create(
    name: str | None = None,
    *,
    memory: int | str | None = None,
    spill: str | None = None,
    ttl: float | None = None,
    persist: bool = False,
    server: int | None = None,
) -> Session:
    """Create a session.

    Args:
        name: up to 100 of the characters A-Z, a-z, 0-9, dot, underscore and hyphen, no dot first and not a
            number; its number if None.
        memory: what its caches may hold together: bytes, a string such as ``"64GiB"``, or a share such as
            ``"50%"`` of the machine's memory or its control group's limit. None: what the server has, or
            without a server half of what is free; but no more than the runtime folder's file system has.
        spill: a folder for samples beyond that; it is created if only the last folder of the path is missing.
            64 MiB or 1% of its disk, whichever is more, stays free.
        ttl: seconds after its last use at which it expires.
        persist: write every record to ``spill`` too, and keep it there across a reboot.
        server: port of the server that it belongs to.

    Raises:
        SessionError: the name is not allowed or taken, or the spill folder cannot be used.
        QuantityError: ``memory`` is not an amount of memory.

    Warns:
        HotsetWarning: the runtime folder's file system has less than ``memory``.
    """
    _require_sense(name, spill, ttl, persist)
    asked = None if memory is None else _amount(memory)
    if spill is not None:
        spill = os.path.abspath(spill)
        make_spill(spill)
        remember(spill)
    expire()
    limit = _memory(asked, server)
    with one_at_a_time(), runtime() as folder:
        there = {known.name: known.number for known in sessions()}
        if name in there:
            raise SessionError(f"there is a session {name!r} already; destroy it, or choose another name.")
        number = _draw(set(there.values()))
        session = Session(number, name or str(number), limit, spill, persist, ttl, time.time(), server)
        try:
            # First: a job that finds the session looks only then what bounds it.
            server_quota.enter(folder, server, number)
            write_down(folder, session)
        except OSError as error:
            forget(session)
            server_quota.leave(server, number)
            if isinstance(error, HotsetError):
                raise
            where, why = path_of(folder), error.strerror or error
            raise SessionError(
                f"no session can be created in {where}: {why}; free some memory there, or {_ELSEWHERE}."
            ) from error
    return session


def find(which: str | int) -> Session:
    """Return the session of that name or number.

    Raises:
        SessionError: there is none.
    """
    found = sessions()
    for session in found:
        if str(which) in (session.name, str(session.number)):
            return session
    known = f"there are: {', '.join(known.name for known in found[:10])}" if found else "there is none"
    raise SessionError(
        f"there is no session {_short(str(which))} on this machine, or no more (a `--ttl`, its server's "
        f"end and a reboot end one); `hotset session create NAME` creates one ({known})."
    )


def sessions() -> list[Session]:
    """Return the sessions of this user on this machine, oldest first."""
    found = []
    with runtime() as folder:
        restore(folder)
        for file in sorted(os.listdir(folder)):
            if QUOTA.fullmatch(file):
                with contextlib.suppress(OSError), quota_in(folder, file) as quota:
                    found.append(session_of(quota))
    return sorted(found, key=lambda session: (session.created, session.number))


def destroy(session: Session | str | int, *, unused: float | None = None) -> int:
    """Destroy a session: free its memory and its disk, also while jobs use it.

    These jobs find their samples absent and read them from their source from then on.

    Args:
        session: it, or its name or number.
        unused: seconds; destroy it only if no process has used it for longer. None: in any case.

    Returns:
        Bytes that were freed.

    Raises:
        SessionError: it is gone already, or has been used since.

    Warns:
        HotsetWarning: it persists, and what its disk keeps of it cannot be removed.
    """
    session = session if isinstance(session, Session) else find(session)
    with one_at_a_time(), runtime() as folder:
        with quota_in(folder, session.file) as quota:
            if unused is not None and _idle(quota) <= unused:
                raise SessionError(f"session {session.name!r} is in use.")
            quota.end()
            kept = forget(session)  # first: what is half destroyed is not to come back after a reboot
            freed = remove_caches(folder, session.number, session.spill)
        server_quota.leave(session.server, session.number)
        unlink(folder, membership_file(session.number))
        unlink(folder, peer_stats_file(session.number))
        unlink(folder, session.file)
    if kept is not None:
        warn(
            f"session {session.name!r} was destroyed, but its definition in {session.spill} could not be "
            f"removed ({kept.strerror or 'the folder cannot be opened'}), so it comes back when that can be "
            "read and written again; destroy it again then."
        )
    return freed


@dataclass(frozen=True)
class Resized:
    """The outcome of a resize.

    Attributes:
        session: as it is now.
        dropped: the unused caches that were dropped.
        over: bytes that its caches hold beyond the limit; these caches are in use or pinned, and stay.
    """

    session: Session
    dropped: tuple[Dropped, ...]
    over: int


def resize(session: Session | str | int, memory: int | str) -> Resized:
    """Change the memory limit of a session's caches, also while jobs use it.

    A job that had found the session full goes on filling within half a second. If the caches hold more than
    the new limit, unused caches are dropped, the least recently used first. Caches that are in use or pinned
    stay, and no samples are added until the session holds less.

    Args:
        session: it, or its name or number.
        memory: as :func:`create` takes it.

    Raises:
        SessionError: it is gone, or the amount is invalid or more than its server has.
        QuantityError: ``memory`` is not an amount of memory.

    Warns:
        HotsetWarning: the runtime folder's file system has less than ``memory``.
    """
    session, memory = session if isinstance(session, Session) else find(session), _amount(memory)
    bound = server_quota.limit(session.server) if session.server is not None else None
    if bound is not None and memory > bound:
        raise SessionError(
            f"memory={format_bytes(memory)} is more than the {format_bytes(bound)} that the server on port "
            f"{session.server} has for all its sessions; choose less, or start it with more `--memory`."
        )
    with one_at_a_time(), runtime() as folder, quota_in(folder, session.file) as quota:
        if quota.ended:
            raise SessionError(f"session {session.name!r} is being destroyed.")
        resized = replace(session_of(quota), memory=memory)
        warn_if_too_much(memory, quota.held)
        set_memory(quota, resized)
        over = quota.held - memory
        dropped = reclaim(resized, over) if over > 0 else []
        return Resized(resized, tuple(dropped), max(quota.held - memory, 0))


def expire() -> list[str]:
    """Destroy the sessions that have expired and that no process uses; return a sentence for each."""
    sentences = []
    for session in sessions():
        if session.ttl is None:
            continue
        with contextlib.suppress(SessionError):
            with open_quota(session) as quota:
                idle = _idle(quota)
            if idle > session.ttl:
                freed = destroy(session, unused=session.ttl)
                sentences.append(
                    f"Destroyed session {session.name!r}, unused for {idle:.0f} s: "
                    f"{format_bytes(freed)} freed."
                )
    return sentences


def _idle(quota: Quota) -> float:
    """Seconds since a session was used last. A use is recorded now, as its process may be killed."""
    if quota.in_use:
        quota.touch()
        return 0.0
    return time.time() - quota.last_used


def one_at_a_time() -> NamedLocks:
    """A block that one process at a time enters, to create or destroy sessions.

    Entering it raises SessionError if another process stays in its block for too long, and FolderError if the
    runtime folder is not safely this user's own.
    """
    return _OneAtATime([_LOCK], _LOCK_SECONDS)


class _OneAtATime(NamedLocks):
    def take(self) -> bool:
        if super().take():
            return True
        raise SessionError(
            "another process has been creating or destroying a session for more than "
            f"{_LOCK_SECONDS:.0f} s; check whether a process is stopped."
        )


# ---- what is asked for -------------------------------------------------------------------------------


def _require_sense(name: str | None, spill: str | None, ttl: float | None, persist: bool) -> None:
    if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name) or name.isdigit()):
        raise SessionError(
            "a session's name must be up to 100 of the characters A-Z, a-z, 0-9, dot, underscore and hyphen, "
            f"not start with a dot, and not be digits only, got {_short(name)}; choose another."
        )
    if spill == "":
        raise SessionError("a spill folder must be a path, got ''; name one, or leave it out.")
    if persist and spill is None:
        raise SessionError("persist needs a spill folder to keep the records in; pass one as spill.")
    if ttl is not None and not (isinstance(ttl, (int, float)) and 0 < ttl < float("inf")):
        raise SessionError(f"ttl must be a positive number of seconds, got {ttl!r}.")


def _amount(memory: int | str) -> int:
    """The bytes that were asked for."""
    if type(memory) is not int:
        memory = parse_bytes(memory, whole=lambda: memory_limits.headroom().limit)
    if memory < 0:
        raise SessionError(f"memory must be zero or more bytes, got {memory}.")
    if memory > _MOST_MEMORY:
        raise SessionError(f"memory must be a number of bytes that a machine can have, got {memory}.")
    return memory


def _memory(asked: int | None, server: int | None) -> int:
    """The memory limit of a new session; it warns if there is less memory than was asked for."""
    if asked is None:
        limit = server_quota.limit(server) if server is not None else None
        return min(memory_limits.headroom().bytes // 2 if limit is None else limit, _room_here())
    warn_if_too_much(asked)
    return asked


def warn_if_too_much(asked: int, held: int = 0) -> None:
    """Warn if this is more than the file system has, including what the session holds already."""
    if asked - held > (room := _room_here()):
        warn(
            f"memory={format_bytes(asked)} is more than the {format_bytes(room + held)} that the file system "
            f"of {runtime_folder()} has; give it more (docker's --shm-size), or {_ELSEWHERE}."
        )


def _room_here() -> int:
    """Bytes that the runtime folder's file system has to give; in a container that may be 64 MB."""
    return memory_limits.tmpfs_free(str(runtime_folder()))


def _draw(taken: set[int]) -> int:
    while True:
        number = 1 + secrets.randbelow(_LARGEST_NUMBER)
        if number not in taken:
            return number


def _short(name: object) -> str:
    """A name from any source, as it can be shown."""
    text = name if isinstance(name, str) else repr(name)
    shown = ascii(text[:60])
    return shown if len(text) <= 60 else f"{shown}... ({len(text):,} characters)"
