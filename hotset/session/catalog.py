"""The catalog of the caches on this machine: one small file for each, in the runtime folder.

A cache is a memfd, which has no name: a process reaches it through a process that has it open, by way of
``/proc``. The file says which processes those are:

::

       0  ┌──────────────────────────────────────────────────────────┐
          │ head: one JSON object, padded; whole before the file has │  written once
          │ its name                                                 │
    4096  ├──────────────────────────────────────────────────────────┤
          │ holder 0: process, descriptor, process namespace; 64 B   │  its process holds byte 1 + 0 locked
          ├──────────────────────────────────────────────────────────┤
          │ holder 1 ...                       (up to 256)           │
          └──────────────────────────────────────────────────────────┘

First comes the process that made the cache, which the head names, then any holder. A process takes a holder's
line by locking its byte, and only then writes it, so lines of dead processes are used again and the file
cannot grow. Readers ignore these locks: a line may be old or half written, so what it leads to is opened only
if it is the memory's inode, and used only if the cache's nonce is in it.

The file does not say whether the cache is alive. A cache is alive while a process holds a *shared lock* on
its file (byte 0), which the kernel drops with the holder. A pid would not do: it may be reused, and it means
another process in each container that shares ``/dev/shm``.

::

            temporary name         <nonce>.json
    create ──> lock, write ── rename ──> listed ── last holder closes it ──────────> removed
                    │                      │   └── last holder dies ──> stale ── gc ──> removed
                    └── died: stale ── gc ──> removed

What keeps a living cache's file from being removed:

- the file gets its name when its lock is held, so a listed file without a lock has lost its last holder,
  and is not one that is still to be locked. A temporary file has such a moment: it is stale only when it is
  a minute old as well, and a creator that finds it gone makes another;
- a process that removes it takes an *exclusive* lock first, which any holder's shared lock prevents, and then
  checks that the name still means the file that it locked;
- a process that joins takes a shared lock first, then checks the same; if the check fails, it came too late.

The last process to close drops its locks, that of its place among the holders too, *before* it tries for the
exclusive one of all bytes. If it converted the one into the other, or kept its place, both would fail when
two close at once, and the file would stay behind.

No failure here ends a training run: a cache that cannot be listed works unlisted, after one warning.

Functions that open the runtime folder raise FolderError if it is not safely this user's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

from hotset._warnings import warn
from hotset.errors import FolderError, SegmentError
from hotset.session.job import pid_namespace
from hotset.session.named_lock import LOCK_FILE
from hotset.session.runtime_dir import KNOB, is_named, open_at, opened, path_of, runtime, write
from hotset.store import locks
from hotset.store.segment import Address

__all__ = ["CatalogHandle", "ListedCache", "address_of", "entries", "find", "gc", "register"]

_LONGEST_LABEL = 200
_YOUNG_SECONDS = 60.0
_CREATE_TRIES = 5

_NONCE = r"[0-9a-f]{16,64}"
_LISTED = re.compile(rf"({_NONCE})\.json")
_TEMPORARY = re.compile(rf"{_NONCE}\.[0-9a-f]{{8}}\.new")

_FORMAT = 2
_HEAD_BYTES = 4096
_HOLDERS = 256
_HOLDER_BYTES = 64
_LIFE, _FIRST_HOLDER_LOCK = 0, 1  # bytes of the file: the lock of byte 0 means that the cache is alive

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
class ListedCache:
    """One listed cache, as it was at the moment of looking.

    Attributes:
        file: name of its file in the runtime folder.
        alive: whether a process holds it, in any container.
        at: process and descriptor that have its memory open now, and can be reached from here; None if there
            is none, or if all are in other containers' process namespaces.
        problem: why the file cannot be used; empty if it can. The fields below are void then.
        pid, fd, inode: process that made the cache, its descriptor of the memory, the memory's inode.
        nonce: the cache's random bytes, in hexadecimal.
        name: its label, for users.
        created: when it was made, in seconds of Unix time.
        pidns: inode of the process namespace in which ``pid`` counts.
        key: what is in it; two caches of one key hold the same samples. Empty if no process may share it.
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
        """Where its memory can be opened from here; None if it cannot."""
        return f"/proc/{self.at[0]}/fd/{self.at[1]}" if self.at else None


class CatalogHandle:
    """A process's share in a listed cache. While one process holds one, the cache counts as alive.

    Pickling carries nonce and name only; the process that unpickles it calls :meth:`join`. A forked child
    has no share, because its copy of the descriptor would make a dead parent look alive; it calls
    :meth:`join` too. The share ends with :meth:`close`, with the object, or with the process.

    Attributes:
        nonce: which cache, in hexadecimal.
        name: its label.
    """

    def __init__(self, nonce: str, name: str) -> None:
        self.nonce = nonce
        self.name = name
        self._share = _Share(f"{nonce}.json")

    @property
    def joined(self) -> bool:
        """Whether this process holds a share."""
        return self._share.value >= 0

    def join(self, memory: int = -1) -> bool:
        """Take a share for this process; False if the cache is no longer listed, or never was.

        Args:
            memory: descriptor of the cache's memory in this process, if it has one. From now on others can
                reach the memory through it, also after the death of the process that made it.
        """
        joined = self.joined or self._new_share().take()
        if joined and memory >= 0:
            self._share.offer(memory)
        return joined

    def close(self) -> None:
        """End the share, and remove the file if it was the last one."""
        self._share.end()

    def _new_share(self) -> _Share:
        """Return the share, for this process to take.

        It ends with this object, and at a normal end of the process, so that a script that never closes
        leaves nothing: after the process's children, which may still join, and also in those processes of
        multiprocessing's that do not run atexit.
        """
        Finalize(self, self._share.end, exitpriority=-1)
        return self._share

    def __reduce__(self) -> tuple[type[CatalogHandle], tuple[str, str]]:
        return CatalogHandle, (self.nonce, self.name)


class _Share(locks.Description):
    """A shared lock on a cache's file, held by the process that took it."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self._folder = ""
        self._pid = 0
        self._offered = False

    def hold(self, fd: int, folder: int) -> None:
        """Own the descriptor ``fd``, which has the lock."""
        self.value = fd
        self._folder = path_of(folder)
        self._pid = os.getpid()
        self._offered = False

    def take(self) -> bool:
        try:
            with runtime() as folder:
                # Stored before it is locked, so that an interrupt cannot leave a lock without owner.
                self.hold(open_at(folder, self.file), folder)
                if locks.try_lock(self.value, _LIFE, shared=True) and is_named(self.value, folder, self.file):
                    return True
        except OSError:
            pass
        self.close()
        return False

    def offer(self, memory: int) -> None:
        """List this process as one that has the memory open, if the file system has room."""
        if not self._offered:
            self._offered = True
            with contextlib.suppress(OSError):
                _write_holder(self.value, memory)

    def end(self) -> None:
        if self._pid != os.getpid():
            # Only close it: unlocking would drop the lock of the description, which is also the parent's.
            self.close()
        if self.value < 0:
            return
        fd, file, self.value = self.value, self._file, -1
        if locks.file_of(fd) != file:
            return  # the program has closed all descriptors, and this number may be another file's by now
        try:
            locks.unlock(fd, _LIFE, length=0)
            with contextlib.suppress(OSError):
                folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    _remove_unheld(fd, folder, self.file)
                finally:
                    os.close(folder)
        finally:
            os.close(fd)


def register(address: Address, name: str, *, key: str = "", groups: Sequence[str] = ()) -> CatalogHandle:
    """List a cache, and take this process's share in it.

    Args:
        address: of its memory.
        name: a label for users; cut after 200 characters.
        key: up to 100 characters that say what is in it, for processes that may share it.
        groups: up to 4 groups of ranks that may share it: see :mod:`hotset.session.job`.

    Warns:
        HotsetWarning: the cache could not be listed. The handle that is returned has no effect then.
    """
    nonce = address.nonce.hex()
    handle = CatalogHandle(nonce, name)
    try:
        head = {
            "format": _FORMAT,
            "kind": "memfd",
            "pid": address.pid,
            "fd": address.fd,
            "inode": address.inode,
            "nonce": nonce,
            "name": name[:_LONGEST_LABEL],
            "created": time.time(),
            "pidns": pid_namespace(),
            "key": key,
            "groups": list(groups),
        }
        with runtime() as folder:
            held = _create(folder, nonce, json.dumps(head).encode().ljust(_HEAD_BYTES))
            handle._new_share().hold(held, folder)
    except OSError as error:
        reason = error if isinstance(error, FolderError) else f"{error.strerror or error}."
        warn(
            f"The cache {name!r} works but is not listed, so `hotset check` does not see it, and other ranks "
            f"of this job cannot share it. To list it, set {KNOB} to a folder of your own on this machine. "
            f"The reason: {reason}"
        )
    return handle


def entries() -> list[ListedCache]:
    """Return the caches listed on this machine, oldest first, dead ones and damaged files too."""
    found = []
    with runtime() as folder:
        for file in _files(folder, _LISTED):
            try:
                with opened(folder, file) as fd:
                    found.append(_look(fd, file))
            except FileNotFoundError:
                continue  # removed since it was listed
            except OSError as error:
                found.append(ListedCache(file, alive=False, problem=str(error)))
    return sorted(found, key=lambda entry: (entry.created, entry.file))


def find(nonce: str) -> ListedCache | None:
    """Return the cache of that nonce if it can be reached from here; None otherwise."""
    return next((entry for entry in entries() if entry.nonce == nonce and entry.at), None)


def address_of(entry: ListedCache) -> Address:
    """Return where the memory of a listed cache can be had now.

    Raises:
        SegmentError: no process within reach has it open.
    """
    if entry.at is None:
        raise SegmentError(
            f"the memory of {entry.name!r} is out of reach: no process here has it open any more."
        )
    return Address(*entry.at, entry.inode, bytes.fromhex(entry.nonce))


def gc() -> list[str]:
    """Remove files of caches and of locks that no living process holds; return a sentence for each.

    Files that processes of another container hold stay, as do files that are not the catalog's.
    """
    removed = []
    with runtime() as folder:
        for file in [*_files(folder, _LISTED), *_files(folder, _TEMPORARY), LOCK_FILE]:
            # A file that is not safely this user's own, not readable or removed meanwhile is left alone.
            with contextlib.suppress(OSError), opened(folder, file) as fd:
                sentence = _removal_reason(fd, file)
                if sentence and _remove_unheld(fd, folder, file):
                    removed.append(sentence)
    return removed


def _files(folder: int, pattern: re.Pattern[str]) -> list[str]:
    return sorted(file for file in os.listdir(folder) if pattern.fullmatch(file))


def _create(folder: int, nonce: str, content: bytes) -> int:
    """Create the file whole and locked, then name it; returns the descriptor that holds the lock."""
    for _ in range(_CREATE_TRIES):
        temporary = f"{nonce}.{secrets.token_hex(4)}.new"
        fd = open_at(folder, temporary, create=True)
        try:
            if locks.try_lock(fd, _LIFE, shared=True):
                write(fd, content)
                os.rename(temporary, f"{nonce}.json", src_dir_fd=folder, dst_dir_fd=folder)
                return fd
        except FileNotFoundError:
            pass  # removed by gc(): this process was stopped for a minute before it had the lock
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.close(fd)
    raise FolderError(f"The runtime folder loses its files as soon as they are made; set {KNOB} to another.")


def _remove_unheld(fd: int, folder: int, file: str) -> bool:
    """Remove the file unless a process holds it, or the name means another file by now."""
    if not locks.try_lock(fd, _LIFE, length=0) or not is_named(fd, folder, file):
        return False
    os.unlink(file, dir_fd=folder)
    return True


def _removal_reason(fd: int, file: str) -> str:
    """Return the sentence for this file's removal; empty if it is too young to be removed."""
    if file == LOCK_FILE:
        return f"Removed {file}: no process is creating a cache or a session."
    if _TEMPORARY.fullmatch(file):
        young = abs(time.time() - os.fstat(fd).st_mtime) < _YOUNG_SECONDS
        return "" if young else f"Removed {file}: the process that was listing a cache there has died."
    entry = _look(fd, file)
    if entry.problem:
        return f"Removed {file}: no process holds it, and it cannot be read ({entry.problem})"
    return f"Removed {file}: no process holds the cache {entry.name!r} of process {entry.pid} any more."


# ---- what a file says ------------------------------------------------------------------------------


def _write_holder(fd: int, memory: int) -> None:
    """List this process in the file as one that has the cache's memory open, until ``fd`` is closed.

    ``fd`` must be on an open file description of this process's own. If all places are taken nothing is
    written: others reach the memory through the processes that are listed.

    Raises:
        OSError: the file cannot be written.
    """
    for place in range(_HOLDERS):
        if locks.try_lock(fd, _FIRST_HOLDER_LOCK + place):
            line = f"{os.getpid()} {memory} {pid_namespace()}".ljust(_HOLDER_BYTES - 1) + "\n"
            os.pwrite(fd, line.encode(), _HEAD_BYTES + place * _HOLDER_BYTES)
            return


def _look(fd: int, file: str) -> ListedCache:
    """Read the file behind ``fd``, whose name is ``file``."""
    alive = locks.is_locked(fd, _LIFE)
    try:
        values = _parse(os.pread(fd, _HEAD_BYTES, 0), file)
    except ValueError as error:
        return ListedCache(file, alive, problem=str(error))
    here = pid_namespace()
    for pid, memory, pidns in [(values["pid"], values["fd"], values["pidns"]), *_read_holders(fd)]:
        if pidns == here and _is_there(pid, memory, values["inode"]):
            return ListedCache(file, alive, (pid, memory), **values)
    return ListedCache(file, alive, **values)


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
        with contextlib.suppress(ValueError):  # half written, or not by hotset
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
