"""Sessions: caches that have a name, a budget and a life of their own, beyond the job that filled them.

A session is a ledger in the runtime folder (:mod:`hotset.session.ledger`), whose head says what it is, and
one file for each of its caches beside it; what memory has no room for lies in its spill folder:

    <number>.session                   the ledger: budget, and who uses the session
    <number>-<key>-<nonce>.cache       a segment: one cache, filled by whoever reads through it
    <number>-<key>-<nonce>.spill       its records on disk (:mod:`hotset.session.spills`)

========== ============================================================================================
created    by a person or a server; nothing is taken but the ledger
used       every process that uses it holds a lock on the ledger, shared; no list of processes is kept
destroyed  first the ledger ends, so that no cache is added; then each cache is emptied where it is: jobs
           that are reading find their samples gone and go on from their source; then the files go
expired    its time to live has passed since it was last used; whoever looks destroys it
rebooted   memory is gone. A session that says so (``persist``) is made again from its definition in the
           spill folder, and its caches go on from what was spilled
========== ============================================================================================

No process has to run for any of that. A server (:mod:`hotset.server`) is one more user of this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hotset.errors import HotsetError, SegmentError, SessionError
from hotset.session.folder import KNOB, open_at, open_folder, runtime_folder
from hotset.session.ledger import Ledger
from hotset.session.retire import retire
from hotset.session.spills import known_folders, open_spill, remember
from hotset.session.turn import turns
from hotset.store import memory as machine
from hotset.told import tell
from hotset.units import format_bytes

_ELSEWHERE = f"set {KNOB} to another folder"

__all__ = [
    "CACHE",
    "Session",
    "create",
    "destroy",
    "drop_server",
    "expire",
    "find",
    "open_ledger",
    "recover",
    "server_limit",
    "sessions",
    "set_server_budget",
]

CACHE = re.compile(r"(\d{1,10})-([0-9a-f]{32})-([0-9a-f]{16})\.(cache|spill)")

_SESSION = re.compile(r"(\d{1,10})\.session")
_DEFINITION = re.compile(r"(\d{1,10})\.session\.json")
_UNFINISHED = re.compile(
    r"(?:\d{1,10}(?:-[0-9a-f]{32}-[0-9a-f]{16})?|server-\d{1,5})\.\w+(?:\.json)?\.[0-9a-f]{8}\.new"
)
_NAMELESS = re.compile(r"[0-9a-f]{32}")  # for a moment, where the file system knows no nameless files
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_LARGEST_NUMBER = (1 << 32) - 1
_TURN = "5e55105" + "0" * 25
_RESTORING = "5e55104" + "0" * 25
_TURN_SECONDS = 30.0
_MOST_MEMORY = 1 << 60
_YOUNG_SECONDS = 60.0


@dataclass(frozen=True)
class Session:
    """What a session is; what it holds is told by :func:`hotset.session.reports.report`.

    Attributes:
        number: 1 to 2**32 - 1, drawn at random.
        name: what people call it; the number if they did not say.
        memory: bytes that its caches may hold in memory together.
        spill: the folder for what is beyond that; None if nothing is spilled.
        persist: whether every record is spilled, and outlives a reboot.
        ttl: seconds after its last use at which it expires; None if it does not.
        created: seconds of Unix time.
        server: port of the server that it belongs to; None if it belongs to nobody.
    """

    number: int
    name: str
    memory: int
    spill: str | None
    persist: bool
    ttl: float | None
    created: float
    server: int | None

    @property
    def file(self) -> str:
        """Name of its ledger in the runtime folder."""
        return f"{self.number}.session"


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
        spill: a folder for what is beyond; it is made if it is not there.
        ttl: seconds after its last use at which it expires.
        persist: write every record to ``spill`` too, and keep it there over a reboot.
        server: port of the server that it belongs to.

    Raises:
        SessionError: the name is no such name or taken, or the spill folder cannot be used.
        FolderError: the runtime folder is not safely this user's own.

    Warns:
        HotsetWarning: the runtime folder's file system has less than ``memory``.
    """
    if name is not None and (not _NAME.fullmatch(name) or name.isdigit()):
        raise SessionError(
            f"{_short(name)} is no name for a session; use up to 100 of the characters A-Z, a-z, 0-9, dot, "
            "underscore and hyphen, no dot at the beginning, and not digits only."
        )
    if persist and spill is None:
        raise SessionError("persist needs a spill folder, where the records are kept; name one by spill.")
    if memory is not None and memory < 0:
        raise SessionError(f"memory={memory} is negative; give a number of bytes, zero or more.")
    if memory is not None and memory > _MOST_MEMORY:
        raise SessionError(f"memory={memory} is more than any machine has; give a number of bytes.")
    if ttl is not None and not 0 < ttl < float("inf"):
        raise SessionError(f"ttl={ttl} is no time to live; give a number of seconds above zero.")
    if spill is not None:
        spill = os.path.abspath(spill)
        os.close(open_spill(spill, make=True))
        remember(spill)
    expire()
    if memory is None:
        limit = server_limit(server) if server is not None else None
        memory = machine.headroom().bytes // 2 if limit is None else limit
        memory = min(memory, _room_here())  # in a container that may be 64 MB
    elif memory > (room := _room_here()):
        tell(
            f"memory={format_bytes(memory)} is more than the {format_bytes(room)} that the file system of "
            f"{runtime_folder()} has; give it more (docker's --shm-size), or {_ELSEWHERE}."
        )
    with _one_at_a_time(), _runtime() as folder:
        there = {known.name: known.number for known in sessions()}
        if name in there:
            raise SessionError(f"there is a session {name!r} already; destroy it, or take another name.")
        number = _draw(set(there.values()))
        session = Session(number, name or str(number), memory, spill, persist, ttl, time.time(), server)
        try:
            # Or whoever looks in between would make it again from its definition.
            with turns([_RESTORING], _TURN_SECONDS):
                if persist:
                    _define(session)
                Ledger.create(folder, session.file, asdict(session), memory)
            _enter_server(folder, session)
        except OSError as error:
            _undefine(session)
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
    with _runtime() as folder:
        _restore(folder)
        for file in sorted(os.listdir(folder)):
            if _SESSION.fullmatch(file):
                with contextlib.suppress(OSError), _ledger(folder, file) as ledger:
                    found.append(_session_of(ledger))
    return sorted(found, key=lambda session: (session.created, session.number))


@contextlib.contextmanager
def open_ledger(session: Session) -> Iterator[Ledger]:
    """Have a session's ledger open.

    Raises:
        SessionError: it is gone.
    """
    with _runtime() as folder, _ledger(folder, session.file) as ledger:
        yield ledger


def destroy(session: Session) -> int:
    """Destroy a session: free its memory and its disk, also under jobs that use it.

    They find their samples absent and read them from their source from then on.

    Returns:
        Bytes that were freed.

    Raises:
        SessionError: it is gone already.
        FolderError: the runtime folder is not safely this user's own.
    """
    with _one_at_a_time(), _runtime() as folder:
        with _ledger(folder, session.file) as ledger:
            ledger.end()
            freed = 0
            _undefine(session)  # first: what is half destroyed is not to come back after a reboot
            for file in _caches(folder, session.number):
                freed += _remove_cache(folder, file, session.spill)
            freed += _collect_spilled(session)
        _leave_server(session)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(session.file, dir_fd=folder)
    return freed


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


def recover(port: int | None = None) -> list[str]:
    """Remove what crashes left of sessions that are no more; return a sentence for each.

    Args:
        port: of the server that begins; sessions of it that are there stay. None: nobody begins.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    told = []
    with _one_at_a_time(), _runtime() as folder:
        half = [session for session in sessions() if _has_ended(folder, session)]
    for session in half:  # by a process that died over it
        with contextlib.suppress(SessionError):
            destroy(session)
            told.append(f"Destroyed session {session.name!r}, as a process that has died had begun to.")
    with _one_at_a_time(), _runtime() as folder:
        alive = {session.number: session for session in sessions()}
        for session in alive.values():  # its server may have begun after it was made again
            _enter_server(folder, session)
        for file in sorted(os.listdir(folder)):
            cache = CACHE.fullmatch(file)
            if cache and int(cache[1]) not in alive:
                _remove_cache(folder, file, None)
                told.append(f"Removed {file}: its session is no more.")
            elif _UNFINISHED.fullmatch(file) and _is_old(folder, file):
                _unlink(folder, file)
                told.append(f"Removed {file}: the process that was making it has died.")
        for spill in known_folders():
            told += _recover_spilled(spill, alive, folder)
    told += expire()
    return told


# ---- servers -----------------------------------------------------------------------------------------


def set_server_budget(port: int, memory: int) -> None:
    """Say what the sessions of a server may hold together; makes its ledger if there is none.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    with _runtime() as folder:
        try:
            with _ledger(folder, _server_file(port)) as ledger:
                ledger.limit = memory
        except FileNotFoundError:
            Ledger.create(folder, _server_file(port), {"port": port}, memory)


def server_limit(port: int) -> int | None:
    """Return what the sessions of a server may hold together; None if there is no such server."""
    with _runtime() as folder, contextlib.suppress(OSError), _ledger(folder, _server_file(port)) as ledger:
        return ledger.limit
    return None


def drop_server(port: int) -> None:
    """Remove a server's ledger, once its sessions are destroyed."""
    with _runtime() as folder:
        _unlink(folder, _server_file(port))


def _server_file(port: int) -> str:
    return f"server-{port}.ledger"


def _enter_server(folder: int, session: Session) -> None:
    """Have a session count in its server's budget, if that server has one."""
    if session.server is None:
        return
    file = _server_file(session.server)
    with contextlib.suppress(FileNotFoundError), _ledger(folder, file) as ledger, ledger.lock():
        ledger.enter(session.number)


def _leave_server(session: Session) -> None:
    if session.server is None:
        return
    file = _server_file(session.server)
    with contextlib.suppress(OSError), _runtime() as folder, _ledger(folder, file) as ledger:
        row = ledger.members().get(session.number)
        if row is not None:
            ledger.leave(row)


# ---- files -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _runtime() -> Iterator[int]:
    folder = open_folder()
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _ledger(folder: int, file: str) -> Iterator[Ledger]:
    """A ledger, and above it the server's, if there is one.

    Raises:
        SessionError: it is gone, or no ledger.
    """
    try:
        ledger = Ledger(folder, file)
    except FileNotFoundError:
        if _SESSION.fullmatch(file):
            raise SessionError(f"session {file.partition('.')[0]} is no more.") from None
        raise
    try:
        port, number = ledger.head.get("server"), ledger.head.get("number")
        if isinstance(port, int) and isinstance(number, int):
            with contextlib.suppress(OSError):
                parent = Ledger(folder, _server_file(port))
                row = parent.members().get(number)
                if row is not None:
                    ledger.stand_under(parent, row)
                else:
                    parent.close()
        yield ledger
    finally:
        ledger.close()


def _session_of(ledger: Ledger) -> Session:
    try:
        session = Session(**ledger.head)
    except TypeError as error:
        raise SessionError("its head is of another version of hotset, or damaged.") from error
    if not (type(session.number) is int and type(session.name) is str and type(session.memory) is int):
        raise SessionError("its head is damaged.")
    return session


def _caches(folder: int, number: int) -> list[str]:
    found = ((file, CACHE.fullmatch(file)) for file in os.listdir(folder))
    return [file for file, name in found if name and int(name[1]) == number]


def _remove_cache(folder: int, file: str, spill: str | None) -> int:
    """Empty a cache under whoever uses it, and remove its files; returns the bytes that it had taken."""
    freed = 0
    with contextlib.suppress(SegmentError, OSError):
        freed += retire(f"/proc/self/fd/{folder}/{file}")
    if spill is not None:
        with contextlib.suppress(OSError):
            freed += _unlink_spilled(spill, file.removesuffix("cache") + "spill")
    _unlink(folder, file)
    return freed


def _unlink(folder: int, file: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file, dir_fd=folder)


def _unlink_spilled(spill: str, file: str) -> int:
    place, freed = open_spill(spill), 0
    try:
        # Its disk is given back now, also under a job that has it open.
        if file.endswith(".spill"):
            with contextlib.suppress(OSError, SegmentError):
                freed = retire(f"/proc/self/fd/{place}/{file}")
        _unlink(place, file)
    finally:
        os.close(place)
    return freed


def _collect_spilled(session: Session) -> int:
    """Remove spill files of a session whose caches are gone already (memory was, over a reboot)."""
    freed = 0
    if session.spill is None:
        return freed
    with contextlib.suppress(OSError):
        place = open_spill(session.spill)
        try:
            files = os.listdir(place)
        finally:
            os.close(place)
        for file in files:
            if (found := CACHE.fullmatch(file)) and int(found[1]) == session.number:
                freed += _unlink_spilled(session.spill, file)
    return freed


def _recover_spilled(spill: str, alive: dict[int, Session], runtime: int) -> list[str]:
    """Remove spill files without a session, and those whose cache is gone and that do not persist."""
    told = []
    caches = set(os.listdir(runtime))
    place = open_spill(spill)
    try:
        files = sorted(os.listdir(place))
        for file in files:
            found = CACHE.fullmatch(file)
            if found:
                session = alive.get(int(found[1]))
                kept = session is not None and (
                    session.persist or file.removesuffix("spill") + "cache" in caches
                )
                if not kept and _is_old(place, file):
                    _unlink(place, file)
                    told.append(f"Removed {file} in {spill}: the cache that it belongs to is no more.")
            elif _DEFINITION.fullmatch(file) and not _is_there(runtime, file.removesuffix(".json")):
                # It was not made again from that, so it cannot be.
                if _is_old(place, file):
                    _unlink(place, file)
                    told.append(f"Removed {file} in {spill}: it does not say what session that was.")
            elif (_UNFINISHED.fullmatch(file) or _NAMELESS.fullmatch(file)) and _is_old(place, file):
                _unlink(place, file)
                told.append(f"Removed {file} in {spill}: the process that was making it has died.")
    finally:
        os.close(place)
    return told


def _is_old(folder: int, file: str) -> bool:
    """Whether nobody can be in the midst of making it."""
    try:
        changed = os.stat(file, dir_fd=folder, follow_symlinks=False).st_ctime
    except OSError:
        return False
    return abs(time.time() - changed) > _YOUNG_SECONDS


# ---- sessions that outlive a reboot ------------------------------------------------------------------


def _define(session: Session) -> None:
    """Write down what a session is where its records will be."""
    assert session.spill is not None
    place = open_spill(session.spill)
    try:
        name = f"{session.number}.session.json"
        temporary = f"{name}.{secrets.token_hex(4)}.new"
        fd = open_at(place, temporary, create=True)
        try:
            os.write(fd, json.dumps(asdict(session)).encode())
            os.fsync(fd)
            os.rename(temporary, name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            _unlink(place, temporary)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        why = error.strerror or error
        raise SessionError(f"nothing can be written to {session.spill}: {why}.") from error
    finally:
        os.close(place)


def _undefine(session: Session) -> None:
    if session.spill is not None:
        with contextlib.suppress(OSError):
            _unlink_spilled(session.spill, f"{session.number}.session.json")


def _has_ended(folder: int, session: Session) -> bool:
    with contextlib.suppress(OSError), _ledger(folder, session.file) as ledger:
        return ledger.ended
    return False


def _restore(folder: int) -> None:
    """Make the sessions again that outlive a reboot, and whose ledgers are gone."""
    for spill in known_folders():
        place = open_spill(spill)
        try:
            for file in os.listdir(place):
                found = _DEFINITION.fullmatch(file)
                if found and not _is_there(folder, f"{found[1]}.session"):
                    with (
                        contextlib.suppress(OSError, ValueError, TypeError, HotsetError),
                        turns([_RESTORING], _TURN_SECONDS) as mine,
                    ):
                        # Another process may have done it while this one waited for its turn.
                        if mine and not _is_there(folder, f"{found[1]}.session"):
                            _restore_one(folder, place, file, spill)
        finally:
            os.close(place)


def _restore_one(folder: int, place: int, file: str, spill: str) -> None:
    fd = open_at(place, file)
    try:
        head: dict[str, Any] = json.loads(os.pread(fd, 1 << 16, 0))
    finally:
        os.close(fd)
    # The server that it belonged to is no more, unless it has begun anew and asks for it.
    session = Session(**{**head, "spill": spill})
    if f"{session.number}.session.json" == file and type(session.memory) is int:
        Ledger.create(folder, session.file, asdict(session), session.memory)
        _enter_server(folder, session)


def _is_there(folder: int, file: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.stat(file, dir_fd=folder, follow_symlinks=False)
        return True
    return False


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of all processes that make or destroy sessions, one at a time."""
    with turns([_TURN], _TURN_SECONDS) as mine:
        if not mine:
            raise SessionError(
                "another process is making or destroying a session, and has not ended for "
                f"{_TURN_SECONDS:.0f} s; look whether one is stopped."
            )
        yield


def _room_here() -> int:
    """Bytes that the runtime folder's file system has to give."""
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
