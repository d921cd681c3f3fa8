"""The definition of a session, and where it is stored.

It is in the head of the session's quota: a session exists while its quota does. The quota lies in memory
and is gone after a reboot. The definition of a session that persists is also in its spill folder, beside the
records, and a process that lists the sessions creates missing quotas from it:

::

    write_down    <number>.session.json ──> <number>.session ──> the session is there
    a reboot               │                    (gone)
    restore                └──────────────> <number>.session ──> it is there again, with what was spilled
    forget              (gone)                  ...              it does not come back

The definition is written first and removed first. A process that dies in between leaves a session that comes
back whole, or does not come back, and never one that a reboot brings back half destroyed. Creating and
restoring exclude each other (:mod:`hotset.session.named_lock`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hotset.errors import HotsetError, SessionError
from hotset.session import server_quota
from hotset.session.named_lock import NamedLocks
from hotset.session.quota import Quota
from hotset.session.runtime_dir import new_file, opened, runtime, write
from hotset.session.session_files import DEFINITION, is_there, remove_spilled
from hotset.session.spill_dirs import known_folders, opened_spill

__all__ = [
    "Session",
    "attach_quota",
    "forget",
    "open_quota",
    "quota_in",
    "restore",
    "session_of",
    "set_memory",
    "write_down",
]

_RESTORING = "5e55104" + "0" * 25
_RESTORING_SECONDS = 30.0


@dataclass(frozen=True)
class Session:
    """The definition of a session; :func:`hotset.session.reports.report` returns what it holds.

    Attributes:
        number: 1 to 2**32 - 1, drawn at random.
        name: given by the user; else the number.
        memory: bytes that its caches may hold in memory together.
        spill: the folder for samples beyond that; None if nothing is spilled.
        persist: whether every record is spilled, and outlives a reboot.
        ttl: seconds after its last use at which it expires; None if it does not.
        created: seconds of Unix time.
        server: port of the server that owns it; None if none does.
    """

    number: int
    name: str
    memory: int
    spill: str | None
    persist: bool
    ttl: float | None
    created: float
    server: int | None

    @staticmethod
    def name_of(session: Session | str | int | None) -> str | int | None:
        """What a program may give as a session, as its name or number; None for none."""
        return session.name if isinstance(session, Session) else session

    @property
    def is_sound(self) -> bool:
        """Whether each value is of its type, as it is not where a definition was damaged or edited."""
        whole = (self.number, self.memory, 0 if self.server is None else self.server)
        times = (self.created, 0.0 if self.ttl is None else self.ttl)
        return (
            all(type(value) is int and 0 <= value < 1 << 63 for value in whole)
            and all(isinstance(value, (int, float)) for value in times)
            and type(self.name) is str
            and isinstance(self.spill, (str, type(None)))
        )

    @property
    def file(self) -> str:
        """Name of its quota in the runtime folder."""
        return f"{self.number}.session"

    @property
    def definition(self) -> str:
        """Name in its spill folder of the file that says what it is."""
        return f"{self.file}.json"


# ---- in the quota -----------------------------------------------------------------------------------


@contextlib.contextmanager
def open_quota(session: Session) -> Iterator[Quota]:
    """Open a session's quota for a block.

    Raises:
        SessionError: it is gone.
    """
    with runtime() as folder, quota_in(folder, session.file) as quota:
        yield quota


def quota_in(folder: int, file: str) -> contextlib.closing[Quota]:
    """Open a session's quota for a block: see :func:`attach_quota`."""
    return contextlib.closing(attach_quota(folder, file))


def attach_quota(folder: int, file: str) -> Quota:
    """Return a session's quota, under the server's if there is one; the caller closes it.

    Raises:
        SessionError: it is gone, or no quota.
    """
    try:
        quota = Quota(folder, file)
    except FileNotFoundError:
        raise SessionError(f"session {file.partition('.')[0]} is gone.") from None
    port, number = quota.head.get("server"), quota.head.get("number")
    if isinstance(port, int) and isinstance(number, int):
        server_quota.put_under_server(folder, port, number, quota)
    return quota


def session_of(quota: Quota) -> Session:
    """Return the session whose quota this is.

    Raises:
        SessionError: the quota's head does not say.
    """
    try:
        session = Session(**{**quota.head, "memory": quota.limit})  # it may have been resized
    except TypeError as error:
        raise SessionError("its head is of another version of hotset, or damaged.") from error
    if not session.is_sound:
        raise SessionError("its head is damaged.")
    return session


def set_memory(quota: Quota, session: Session) -> None:
    """Set what a session's caches may hold to ``session.memory``, also after a reboot.

    Raises:
        SessionError: nothing can be written to its spill folder.
    """
    if session.persist:
        _define(session)
    quota.limit = session.memory


def write_down(folder: int, session: Session) -> None:
    """Create a session's quota in the runtime folder, and its definition if it persists.

    Raises:
        SessionError: nothing can be written to its spill folder, or the names are too long.
        OSError: the quota cannot be created.
    """
    # Without the lock a process that lists sessions now would create it again from its definition.
    with NamedLocks([_RESTORING], _RESTORING_SECONDS):
        if session.persist:
            _define(session)
        Quota.create(folder, session.file, asdict(session), session.memory)


# ---- in the spill folder -----------------------------------------------------------------------------


def forget(session: Session) -> OSError | None:
    """Remove a session's definition, so that it does not come back after a reboot.

    Returns:
        Why the definition of a session that persists could not be removed.
    """
    if session.spill is not None and session.persist:
        try:
            remove_spilled(session.spill, session.definition)
        except OSError as error:
            return error
    return None


def restore(folder: int) -> None:
    """Create the missing quotas of sessions that outlive a reboot. A disk that fails hides its own alone."""
    for spill in known_folders():
        with contextlib.suppress(OSError), opened_spill(spill) as place:
            for file in filter(DEFINITION.fullmatch, os.listdir(place)):
                quota = file.removesuffix(".json")
                if is_there(folder, quota):
                    continue
                with (
                    contextlib.suppress(OSError, ValueError, TypeError, HotsetError),
                    NamedLocks([_RESTORING], _RESTORING_SECONDS) as held,
                ):
                    # Another process may have done it while this one waited for the lock.
                    if held and not is_there(folder, quota):
                        _restore_one(folder, place, file, spill)


def _define(session: Session) -> None:
    """Write down what a session is where its records will be."""
    assert session.spill is not None
    with opened_spill(session.spill) as place:
        try:
            with new_file(place, session.definition) as fd:
                write(fd, json.dumps(asdict(session)).encode())
                os.fsync(fd)
        except OSError as error:
            why = error.strerror or error
            raise SessionError(
                f"cannot write to the spill folder {session.spill}: {why}; free space, or use another folder."
            ) from error


def _restore_one(folder: int, place: int, file: str, spill: str) -> None:
    with opened(place, file) as fd:
        head: dict[str, Any] = json.loads(os.pread(fd, 1 << 16, 0))
    session = Session(**{**head, "spill": spill})  # where it was found, whatever it says
    if session.definition == file and session.is_sound:
        Quota.create(folder, session.file, asdict(session), session.memory)
        # Its server is gone, unless it has been started again and lists the session.
        server_quota.enter(folder, session.server, session.number)
