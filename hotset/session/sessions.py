"""Sessions: caches that have a name, a budget and a life of their own, beyond the job that filled them.

A session is a ledger in the runtime folder, whose head says what it is
(:mod:`hotset.session.session_definition`), and one file for each of its caches beside it; what memory has no
room for lies in its spill folder (:mod:`hotset.session.file_names`). This is its life:

========== ============================================================================================
created    by a person or a server; nothing is taken but the ledger
used       every process that uses it holds a lock on the ledger, shared; no list of processes is kept
destroyed  first the ledger ends, so that no cache is added; then each cache is emptied where it is: jobs
           that are reading find their samples gone and go on from their source; then the files go
expired    its time to live has passed since it was last used; whoever looks destroys it
resized    its ledger's limit changes, also under jobs that use it: those that had no more room go on with
           more, or caches that nobody uses make room for less
rebooted   memory is gone. A session that says so (``persist``) is made again from its definition in the
           spill folder, and its caches go on from what was spilled
========== ============================================================================================

No process has to run for any of that. A server (:mod:`hotset.server`) is one more user of this module. What a
process leaves that dies over it is put right by :mod:`hotset.session.recovery`.
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
from hotset.session import server_quota as servers
from hotset.session.file_names import LEDGER, remove_caches, roster_file, runtime, traffic_file, unlink
from hotset.session.named_lock import Turns
from hotset.session.reclaim import Dropped, reclaim
from hotset.session.runtime_dir import KNOB, runtime_folder
from hotset.session.session_definition import (
    Session,
    forget,
    ledger_in,
    open_ledger,
    restore,
    session_of,
    set_memory,
    write_down,
)
from hotset.session.spill_dirs import open_spill, remember
from hotset.store import memory_limits as machine
from hotset.units import format_bytes

__all__ = ["Resized", "create", "destroy", "expire", "find", "one_at_a_time", "resize", "sessions"]

_ELSEWHERE = f"set {KNOB} to another folder"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_LARGEST_NUMBER = (1 << 32) - 1
_MOST_MEMORY = 1 << 60
_TURN = "5e55105" + "0" * 25
_TURN_SECONDS = 30.0


def create(
    name: str | None = None,
    *,
    memory: int | None = None,
    spill: str | None = None,
    ttl: float | None = None,
    persist: bool = False,
    server: int | None = None,
) -> Session:
    """Make a session.

    Args:
        name: up to 100 of the characters A-Z, a-z, 0-9, dot, underscore and hyphen, no dot first and not a
            number; its number if None.
        memory: bytes that its caches may hold together. None: what the server has, or without a server half
            of what is free; but no more than the runtime folder's file system has.
        spill: a folder for what is beyond; it is made if it is not there, in a folder that is. Of its disk,
            64 MiB or a hundredth, whichever is more, stay free.
        ttl: seconds after its last use at which it expires.
        persist: write every record to ``spill`` too, and keep it there over a reboot.
        server: port of the server that it belongs to.

    Raises:
        SessionError: the name is no such name or taken, or the spill folder cannot be used.
        FolderError: the runtime folder is not safely this user's own.

    Warns:
        HotsetWarning: the runtime folder's file system has less than ``memory``.
    """
    _require_sense(name, memory, spill, ttl, persist)
    if spill is not None:
        spill = os.path.abspath(spill)
        os.close(open_spill(spill, make=True))
        remember(spill)
    expire()
    memory = _memory(memory, server)
    with one_at_a_time(), runtime() as folder:
        there = {known.name: known.number for known in sessions()}
        if name in there:
            raise SessionError(f"there is a session {name!r} already; destroy it, or take another name.")
        number = _draw(set(there.values()))
        session = Session(number, name or str(number), memory, spill, persist, ttl, time.time(), server)
        try:
            write_down(folder, session)
            servers.enter(folder, server, number)
        except OSError as error:
            forget(session)
            if isinstance(error, HotsetError):
                raise
            where = os.readlink(f"/proc/self/fd/{folder}")
            why = error.strerror or error
            raise SessionError(
                f"no session can be made in {where}: {why}; free some, or {_ELSEWHERE}."
            ) from error
    return session


def find(which: str | int) -> Session:
    """Return the session of that name or number.

    Raises:
        SessionError: there is none.
        FolderError: the runtime folder is not safely this user's own.
    """
    found = sessions()
    for session in found:
        if str(which) in (session.name, str(session.number)):
            return session
    known = f"there are: {', '.join(known.name for known in found[:10])}" if found else "there is none"
    raise SessionError(
        f"there is no session {_short(str(which))} on this machine; `hotset session create NAME` makes one "
        f"({known})."
    )


def sessions() -> list[Session]:
    """Return the sessions of this user on this machine, oldest first.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    found = []
    with runtime() as folder:
        restore(folder)
        for file in sorted(os.listdir(folder)):
            if LEDGER.fullmatch(file):
                with contextlib.suppress(OSError), ledger_in(folder, file) as ledger:
                    found.append(session_of(ledger))
    return sorted(found, key=lambda session: (session.created, session.number))


def destroy(session: Session) -> int:
    """Destroy a session: free its memory and its disk, also under jobs that use it.

    They find their samples absent and read them from their source from then on.

    Returns:
        Bytes that were freed.

    Raises:
        SessionError: it is gone already.
        FolderError: the runtime folder is not safely this user's own.
    """
    with one_at_a_time(), runtime() as folder:
        with ledger_in(folder, session.file) as ledger:
            ledger.end()
            forget(session)  # first: what is half destroyed is not to come back after a reboot
            freed = remove_caches(folder, session.number, session.spill)
        servers.leave(session.server, session.number)
        unlink(folder, roster_file(session.number))
        unlink(folder, traffic_file(session.number))
        unlink(folder, session.file)
    return freed


@dataclass(frozen=True)
class Resized:
    """What came of a resize.

    Attributes:
        session: as it is now.
        dropped: the caches that made room, as nobody used them.
        over: bytes that its caches hold beyond what they may; they are in use or pinned, and stay.
    """

    session: Session
    dropped: tuple[Dropped, ...]
    over: int


def resize(session: Session, memory: int) -> Resized:
    """Change what the caches of a session may hold together, from now on, also under jobs that use it.

    A job that had found it full goes on filling within half a second. If the caches hold more than that,
    those that nobody uses go, the least recently used first; what is in use or pinned stays, and nothing is
    added until it is less.

    Args:
        session: which.
        memory: bytes.

    Raises:
        SessionError: it is gone, the amount is none, or more than the server has that it belongs to.
        FolderError: the runtime folder is not safely this user's own.

    Warns:
        HotsetWarning: the runtime folder's file system has less than ``memory``.
    """
    _require_amount(memory)
    bound = servers.limit(session.server) if session.server is not None else None
    if bound is not None and memory > bound:
        raise SessionError(
            f"memory={format_bytes(memory)} is more than the {format_bytes(bound)} that the server of port "
            f"{session.server} has for all its sessions; give less, or start it with more `--memory`."
        )
    with one_at_a_time(), runtime() as folder, ledger_in(folder, session.file) as ledger:
        if ledger.ended:
            raise SessionError(f"session {session.name!r} is being destroyed.")
        resized = replace(session_of(ledger), memory=memory)
        _tell_if_too_much(memory, ledger.held)
        set_memory(ledger, resized)
        over = ledger.held - memory
        dropped = reclaim(resized, over) if over > 0 else []
        return Resized(resized, tuple(dropped), max(ledger.held - memory, 0))


def expire() -> list[str]:
    """Destroy the sessions whose time is over and that nobody uses; return a sentence for each.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    told = []
    for session in sessions():
        if session.ttl is None:
            continue
        with contextlib.suppress(SessionError):
            with open_ledger(session) as ledger:
                if ledger.in_use:
                    ledger.touch()
                    continue
                idle = time.time() - ledger.last_used
            if idle > session.ttl:
                freed = destroy(session)
                told.append(
                    f"Destroyed session {session.name!r}, not used for {idle:.0f} s: "
                    f"{format_bytes(freed)} freed."
                )
    return told


def one_at_a_time() -> Turns:
    """A block in which this process is the one, of all that make or destroy sessions.

    Entering it raises SessionError if another one is at it and does not end, and FolderError if the runtime
    folder is not safely this user's own.
    """
    return _TheOne([_TURN], _TURN_SECONDS)


class _TheOne(Turns):
    def take(self) -> bool:
        if super().take():
            return True
        raise SessionError(
            "another process is making or destroying a session, and has not ended for "
            f"{_TURN_SECONDS:.0f} s; look whether one is stopped."
        )


# ---- what is asked for -------------------------------------------------------------------------------


def _require_sense(
    name: str | None, memory: int | None, spill: str | None, ttl: float | None, persist: bool
) -> None:
    if name is not None and (not _NAME.fullmatch(name) or name.isdigit()):
        raise SessionError(
            f"{_short(name)} is no name for a session; use up to 100 of the characters A-Z, a-z, 0-9, dot, "
            "underscore and hyphen, no dot at the beginning, and not digits only."
        )
    if persist and spill is None:
        raise SessionError("persist needs a spill folder, where the records are kept; name one by spill.")
    if memory is not None:
        _require_amount(memory)
    if ttl is not None and not 0 < ttl < float("inf"):
        raise SessionError(f"ttl={ttl} is no time to live; give a number of seconds above zero.")


def _require_amount(memory: int) -> None:
    if memory < 0:
        raise SessionError(f"memory={memory} is negative; give a number of bytes, zero or more.")
    if memory > _MOST_MEMORY:
        raise SessionError(f"memory={memory} is more than any machine has; give a number of bytes.")


def _memory(asked: int | None, server: int | None) -> int:
    """What a session gets that asked for so many bytes; more than there is is told."""
    if asked is None:
        limit = servers.limit(server) if server is not None else None
        return min(machine.headroom().bytes // 2 if limit is None else limit, _room_here())
    _tell_if_too_much(asked)
    return asked


def _tell_if_too_much(asked: int, held: int = 0) -> None:
    """Tell whoever asked for more than the file system has, besides what is held already."""
    if asked - held > (room := _room_here()):
        warn(
            f"memory={format_bytes(asked)} is more than the {format_bytes(room + held)} that the file system "
            f"of {runtime_folder()} has; give it more (docker's --shm-size), or {_ELSEWHERE}."
        )


def _room_here() -> int:
    """Bytes that the runtime folder's file system has to give; in a container that may be 64 MB."""
    return machine.tmpfs_free(str(runtime_folder()))


def _draw(taken: set[int]) -> int:
    while True:
        number = 1 + secrets.randbelow(_LARGEST_NUMBER)
        if number not in taken:
            return number


def _short(text: str) -> str:
    """A name as it can be shown: whoever gave it."""
    shown = ascii(text[:60])
    return shown if len(text) <= 60 else f"{shown}... ({len(text):,} characters)"
