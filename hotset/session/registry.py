"""The list of the caches on this machine: one small JSON file for each, in the runtime folder.

A private cache is a memfd, which has no name: who knows process, descriptor, inode and nonce reaches it
through ``/proc``, and the file is where they are told. It says nothing about life. A cache is alive while
somebody holds a *shared lock* on its file, which the kernel drops with the holder. A pid would not do: it
may be reused, and the same number means another process in each container that shares ``/dev/shm``.

::

            temporary name         <nonce>.json
    create ──> lock, write ── rename ──> listed ── last holder closes it ──────────> removed
                    │                      │   └── last holder dies ──> stale ── gc ──> removed
                    └── died: stale ── gc ──> removed

What keeps a living cache's file from being removed:

- the file gets its name when its lock is held, so a listed file without a lock has lost its last holder,
  and is not one that is still to be locked. A temporary file has such a moment: it is stale only when it is
  a minute old as well, and a creator that finds it gone makes another;
- who removes takes an *exclusive* lock first, which any holder's shared one prevents, and then looks
  whether the name still means the file that it locked;
- who joins takes a shared lock first, then looks likewise, and if not, it came too late.

The last one to close drops its shared lock *before* it tries for the exclusive one. The other order
(turn one into the other) fails for both when two close at once, and the file stays behind.

Nothing here may fail a training run: a cache that cannot be listed works, unlisted, after one warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotset.errors import ArgumentError, FolderError, HotsetWarning
from hotset.session.folder import KNOB, open_at, open_folder
from hotset.store import locks

__all__ = ["Entry", "Registration", "entries", "gc", "register"]

_FORMAT = 1
_LIFE = 0  # the byte of the file whose lock means that the cache is alive
_LONGEST_FILE = 1 << 16
_LONGEST_LABEL = 200
_YOUNG_SECONDS = 60.0
_CREATE_TRIES = 5

_NONCE = r"[0-9a-f]{16,64}"
_LISTED = re.compile(rf"({_NONCE})\.json")
_TEMPORARY = re.compile(rf"{_NONCE}\.[0-9a-f]{{8}}\.new")

_FIELDS: dict[str, type] = {
    "pid": int,
    "fd": int,
    "inode": int,
    "nonce": str,
    "name": str,
    "created": float,
    "pidns": int,
}


@dataclass(frozen=True)
class Entry:
    """One listed cache, as it was at the moment of looking.

    Attributes:
        file: name of its file in the runtime folder.
        alive: whether a process holds it, in whatever container.
        path: where its memory can be opened from here; None when its first process has gone, or is in
            another container's process namespace.
        problem: why the file cannot be understood; empty if it can. The fields below are then void.
        pid, fd, inode: process that made the cache, its descriptor of the memory, the memory's inode.
        nonce: the cache's random bytes, in hexadecimal.
        name: its label, for people.
        created: when it was made, in seconds of Unix time.
        pidns: inode of the process namespace in which ``pid`` counts.
    """

    file: str
    alive: bool
    path: str | None = None
    problem: str = ""
    pid: int = -1
    fd: int = -1
    inode: int = -1
    nonce: str = ""
    name: str = ""
    created: float = 0.0
    pidns: int = -1


class Registration:
    """A process's share in a listed cache. While one process holds one, the cache counts as alive.

    Pickling carries nonce and name only; the process that unpickles it calls :meth:`join`. A forked child
    has left by itself, as its copy of the descriptor would keep a dead parent alive in everyone's eyes, and
    calls :meth:`join` too. It ends with :meth:`close`, with the object, or with the process.

    Attributes:
        nonce: which cache, in hexadecimal.
        name: its label.
    """

    def __init__(self, nonce: str, name: str) -> None:
        self.nonce = nonce
        self.name = name
        self._share = _Share(f"{nonce}.json")
        # Also at the interpreter's ordinary end, so that a script which never closes leaves nothing.
        weakref.finalize(self, self._share.end)

    @property
    def joined(self) -> bool:
        """Whether this process holds a share."""
        return self._share.fd >= 0

    def join(self) -> bool:
        """Take a share of this process's own; False if the cache is no longer listed, or never was."""
        return self.joined or self._share.take()

    def after_fork(self) -> None:
        """In a forked child: drop what was inherited, and leave the parent's share alone.

        It is called by itself after ``os.fork()``; calling it again does no harm.
        """
        self._share.drop_inherited()

    def close(self) -> None:
        """Give the share back, and remove the file if it was the last one."""
        self._share.end()

    def __reduce__(self) -> tuple[type[Registration], tuple[str, str]]:
        return Registration, (self.nonce, self.name)


class _Share:
    """A shared lock on a cache's file, held by the process that took it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.fd = -1
        self._folder = ""
        self._pid = 0
        _shares.add(self)

    def hold(self, fd: int, folder: int) -> None:
        """Own the descriptor ``fd``, which has the lock."""
        self.fd = fd
        self._folder = os.readlink(f"/proc/self/fd/{folder}")
        self._pid = os.getpid()

    def take(self) -> bool:
        try:
            with _folder() as folder, contextlib.ExitStack() as stack:
                fd = open_at(folder, self.file)
                stack.callback(os.close, fd)
                if not locks.try_lock(fd, _LIFE, shared=True) or not _is_named(fd, folder, self.file):
                    return False
                self.hold(fd, folder)
                stack.pop_all()
        except OSError:
            return False
        return True

    def drop_inherited(self) -> None:
        # Closing only: unlocking would drop the lock of the description, which is the parent's too.
        if self.fd >= 0 and self._pid != os.getpid():
            fd, self.fd = self.fd, -1
            os.close(fd)

    def end(self) -> None:
        self.drop_inherited()
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        try:
            locks.unlock(fd, _LIFE)
            with contextlib.suppress(OSError):
                folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    _remove_unheld(fd, folder, self.file)
                finally:
                    os.close(folder)
        finally:
            os.close(fd)


_shares: weakref.WeakSet[_Share] = weakref.WeakSet()


def _drop_inherited() -> None:
    for share in list(_shares):
        share.drop_inherited()


os.register_at_fork(after_in_child=_drop_inherited)


def register(*, pid: int, fd: int, inode: int, nonce: str, name: str) -> Registration:
    """List a cache, and take this process's share in it.

    Args:
        pid, fd, inode: process that holds the memfd, its descriptor there, and the memfd's inode.
        nonce: 8 to 32 random bytes in hexadecimal, the cache's alone.
        name: a label for people; what is beyond 200 characters is cut.

    Raises:
        ArgumentError: ``nonce`` is not of that form.

    Warns:
        HotsetWarning: the cache could not be listed. The registration that is returned is then inert.
    """
    if not re.fullmatch(_NONCE, nonce):
        raise ArgumentError(
            f"nonce={nonce!r} is not 8 to 32 bytes in hexadecimal digits, a to f in lower case."
        )
    registration = Registration(nonce, name)
    try:
        fields = {
            "format": _FORMAT,
            "kind": "memfd",
            "pid": pid,
            "fd": fd,
            "inode": inode,
            "nonce": nonce,
            "name": name[:_LONGEST_LABEL],
            "created": time.time(),
            "pidns": _pid_namespace(),
        }
        with _folder() as folder:
            held = _create(folder, nonce, json.dumps(fields).encode())
            registration._share.hold(held, folder)
    except OSError as error:
        reason = error if isinstance(error, FolderError) else f"{error.strerror or error}."
        warnings.warn(
            f"The cache {name!r} works but is not listed, so `hotset check` and `hotset gc` do not see it. "
            f"To list it, set {KNOB} to a folder of your own on this machine. The reason: {reason}",
            HotsetWarning,
            stacklevel=2,
        )
    return registration


def entries() -> list[Entry]:
    """Return the caches listed on this machine, oldest first, dead ones and damaged files too.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    found = []
    with _folder() as folder:
        for file in _files(folder, _LISTED):
            try:
                fd = open_at(folder, file)
            except FileNotFoundError:
                continue  # removed since it was listed
            except OSError as error:
                found.append(Entry(file, alive=False, problem=str(error)))
                continue
            try:
                found.append(_look(fd, file))
            finally:
                os.close(fd)
    return sorted(found, key=lambda entry: (entry.created, entry.file))


def gc() -> list[str]:
    """Remove the files of caches that no living process holds; returns a sentence for each.

    What is held in another container is left alone, like every file that is not of this list.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    removed = []
    with _folder() as folder:
        for file in [*_files(folder, _LISTED), *_files(folder, _TEMPORARY)]:
            # Not safely ours, not readable or just removed by somebody else: not ours to remove.
            with contextlib.suppress(OSError):
                fd = open_at(folder, file)
                try:
                    sentence = _obituary(fd, file)
                    if sentence and _remove_unheld(fd, folder, file):
                        removed.append(sentence)
                finally:
                    os.close(fd)
    return removed


@contextlib.contextmanager
def _folder() -> Iterator[int]:
    folder = open_folder()
    try:
        yield folder
    finally:
        os.close(folder)


def _files(folder: int, pattern: re.Pattern[str]) -> list[str]:
    return sorted(file for file in os.listdir(folder) if pattern.fullmatch(file))


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _create(folder: int, nonce: str, content: bytes) -> int:
    """Make the file whole, locked and then named; returns the descriptor that holds the lock."""
    for _ in range(_CREATE_TRIES):
        temporary = f"{nonce}.{secrets.token_hex(4)}.new"
        fd = open_at(folder, temporary, create=True)
        try:
            if locks.try_lock(fd, _LIFE, shared=True):
                _write(fd, content)
                os.rename(temporary, f"{nonce}.json", src_dir_fd=folder, dst_dir_fd=folder)
                return fd
        except FileNotFoundError:
            pass  # collected: this process was stopped for a minute before it had the lock
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.close(fd)
    raise FolderError(f"The runtime folder loses its files as soon as they are made; set {KNOB} to another.")


def _write(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _is_named(fd: int, folder: int, file: str) -> bool:
    """Whether ``file`` still means the file behind ``fd``."""
    try:
        named = os.stat(file, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _remove_unheld(fd: int, folder: int, file: str) -> bool:
    """Remove the file unless somebody holds it or the name means another one by now."""
    if not locks.try_lock(fd, _LIFE) or not _is_named(fd, folder, file):
        return False
    os.unlink(file, dir_fd=folder)
    return True


def _obituary(fd: int, file: str) -> str:
    """Return the sentence to say when this file is removed; empty if it is too young for that."""
    if _TEMPORARY.fullmatch(file):
        young = abs(time.time() - os.fstat(fd).st_mtime) < _YOUNG_SECONDS
        return "" if young else f"Removed {file}: the process that was listing a cache there has died."
    entry = _look(fd, file)
    if entry.problem:
        return f"Removed {file}: no process holds it, and it cannot be read ({entry.problem})"
    return f"Removed {file}: no process holds the cache {entry.name!r} of process {entry.pid} any more."


def _look(fd: int, file: str) -> Entry:
    alive = locks.is_locked(fd, _LIFE)
    try:
        values = _parse(os.pread(fd, _LONGEST_FILE, 0), file)
    except ValueError as error:
        return Entry(file, alive, problem=str(error))
    path = f"/proc/{values['pid']}/fd/{values['fd']}"
    try:
        reachable = values["pidns"] == _pid_namespace() and os.stat(path).st_ino == values["inode"]
    except OSError:
        reachable = False
    return Entry(file, alive, path if reachable else None, **values)


def _parse(content: bytes, file: str) -> dict[str, Any]:
    """Return the fields of a file.

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
    return {field: values[field] for field in _FIELDS}
