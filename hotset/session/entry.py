"""What a cache's file in the runtime folder says: which cache it is, and who has its memory open.

::

       0  ┌──────────────────────────────────────────────────────────┐
          │ head: one JSON object, padded; whole before the file has │  written once
          │ its name                                                 │
    4096  ├──────────────────────────────────────────────────────────┤
          │ holder 0: process, descriptor, process namespace; 64 B   │  its process holds byte 1 + 0 locked
          ├──────────────────────────────────────────────────────────┤
          │ holder 1 ...                       (up to 256)           │
          └──────────────────────────────────────────────────────────┘

The memory has no name, so it is reached through a process that has it open: first the one that made it, which
the head names, then any holder. A place among the holders is taken by locking its byte, and written by who
has the lock, so places of dead processes are used again and the file cannot grow. Nobody looks at those locks
to *read*: a line may be old or half written, so what it leads to is opened only if it is the memory's inode,
and used only if the cache's nonce is in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import dataclass
from typing import Any

from hotset.session.job import pid_namespace
from hotset.store import locks

__all__ = ["NONCE", "Entry", "look", "pack_head", "write_holder"]

NONCE = r"[0-9a-f]{16,64}"

_FORMAT = 2
_HEAD_BYTES = 4096
_HOLDERS = 256
_HOLDER_BYTES = 64
_FIRST_HOLDER_LOCK = 1

_FIELDS: dict[str, type] = {
    "pid": int,
    "fd": int,
    "inode": int,
    "nonce": str,
    "name": str,
    "created": float,
    "pidns": int,
    "key": str,
    "groups": list,
}


@dataclass(frozen=True)
class Entry:
    """One listed cache, as it was at the moment of looking.

    Attributes:
        file: name of its file in the runtime folder.
        alive: whether a process holds it, in whatever container.
        at: process and descriptor that have its memory open now, and can be reached from here; None when
            there is none, or when all are in other containers' process namespaces.
        problem: why the file cannot be understood; empty if it can. The fields below are then void.
        pid, fd, inode: process that made the cache, its descriptor of the memory, the memory's inode.
        nonce: the cache's random bytes, in hexadecimal.
        name: its label, for people.
        created: when it was made, in seconds of Unix time.
        pidns: inode of the process namespace in which ``pid`` counts.
        key: what is in it; two caches of one key hold the same samples. Empty if nobody may share it.
        groups: the groups of ranks that may share it: see :mod:`hotset.session.job`.
    """

    file: str
    alive: bool
    at: tuple[int, int] | None = None
    problem: str = ""
    pid: int = -1
    fd: int = -1
    inode: int = -1
    nonce: str = ""
    name: str = ""
    created: float = 0.0
    pidns: int = -1
    key: str = ""
    groups: tuple[str, ...] = ()

    @property
    def path(self) -> str | None:
        """Where its memory can be opened from here; None if nowhere."""
        return f"/proc/{self.at[0]}/fd/{self.at[1]}" if self.at else None


def pack_head(fields: dict[str, Any]) -> bytes:
    """Return the head of a file, for a cache that these fields describe."""
    return json.dumps({"format": _FORMAT, "kind": "memfd", **fields}).encode().ljust(_HEAD_BYTES)


def write_holder(fd: int, memory: int) -> None:
    """Say in the file that this process has the cache's memory open; for as long as ``fd`` is.

    Without a free place nothing is said: others reach the memory through those who have one.

    Args:
        fd: the file, on a description of this process's own.
        memory: descriptor of the memory.

    Raises:
        OSError: the file system refuses.
    """
    for place in range(_HOLDERS):
        if locks.try_lock(fd, _FIRST_HOLDER_LOCK + place):
            line = f"{os.getpid()} {memory} {pid_namespace()}".ljust(_HOLDER_BYTES - 1) + "\n"
            os.pwrite(fd, line.encode(), _HEAD_BYTES + place * _HOLDER_BYTES)
            return


def look(fd: int, file: str, *, alive: bool) -> Entry:
    """Read the file behind ``fd``, whose name is ``file``."""
    try:
        values = _parse(os.pread(fd, _HEAD_BYTES, 0), file)
    except ValueError as error:
        return Entry(file, alive, problem=str(error))
    here = pid_namespace()
    for pid, memory, pidns in [(values["pid"], values["fd"], values["pidns"]), *_read_holders(fd)]:
        if pidns == here and _is_there(pid, memory, values["inode"]):
            return Entry(file, alive, (pid, memory), **values)
    return Entry(file, alive, **values)


def _is_there(pid: int, memory: int, inode: int) -> bool:
    try:
        status = os.stat(f"/proc/{pid}/fd/{memory}")
    except OSError:
        return False
    return status.st_ino == inode and stat.S_ISREG(status.st_mode)


def _read_holders(fd: int) -> list[tuple[int, int, int]]:
    content = os.pread(fd, _HOLDERS * _HOLDER_BYTES, _HEAD_BYTES)
    found = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError):  # half written, or not by us
            pid, memory, pidns = (int(word) for word in line.split())
            found.append((pid, memory, pidns))
    return found


def _parse(content: bytes, file: str) -> dict[str, Any]:
    """Return the fields of a head.

    Raises:
        ValueError: a sentence that says what is wrong with it.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError("It is not JSON.") from error
    if not isinstance(values, dict) or (values.get("format"), values.get("kind")) != (_FORMAT, "memfd"):
        raise ValueError("It is not a listing of this version of hotset.")
    for field, kind in _FIELDS.items():
        if type(values.get(field)) is not kind:
            raise ValueError(f"Its field {field!r} is missing or of another type.")
    if file != f"{values['nonce']}.json":
        raise ValueError("It has another cache's name.")
    found = {field: values[field] for field in _FIELDS}
    found["groups"] = tuple(str(group) for group in values["groups"])
    return found
