"""The catalog of the caches on this machine: one small file for each, in the runtime folder.

A cache is a memfd, which has no name: a process reaches it through ``/proc`` with process, descriptor, inode
and nonce, which are in the file (:mod:`hotset.session.entry`). The file does not say whether the cache is
alive. A cache is alive while a process holds a *shared lock* on its file, which the kernel drops with the
holder. A pid would not do: it may be reused, and it means another process in each container that shares
``/dev/shm``.

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
- a process that joins takes a shared lock first, then checks the same; if not, it came too late.

The last process to close drops its shared lock *before* it tries for the exclusive one. If it converted the
one into the other, both would fail when two close at once, and the file would stay behind.

Nothing here may fail a training run: a cache that cannot be listed works unlisted, after one warning.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence

from hotset._warnings import warn
from hotset.errors import ArgumentError, FolderError
from hotset.session.entry import NONCE, Entry, look, pack_head, write_holder
from hotset.session.job import pid_namespace
from hotset.session.named_lock import TURNS
from hotset.session.runtime_dir import KNOB, is_named, open_at, open_folder
from hotset.store import locks

__all__ = ["CatalogHandle", "Entry", "entries", "find", "gc", "register"]

_LIFE = 0  # the byte of the file whose lock means that the cache is alive
_LONGEST_LABEL = 200
_YOUNG_SECONDS = 60.0
_CREATE_TRIES = 5

_LISTED = re.compile(rf"({NONCE})\.json")
_TEMPORARY = re.compile(rf"{NONCE}\.[0-9a-f]{{8}}\.new")


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
        # Also at the interpreter's ordinary end, so that a script which never closes leaves nothing.
        weakref.finalize(self, self._share.end)

    @property
    def joined(self) -> bool:
        """Whether this process holds a share."""
        return self._share.value >= 0

    def join(self, memory: int = -1) -> bool:
        """Take a share of this process's own; False if the cache is no longer listed, or never was.

        Args:
            memory: descriptor of the cache's memory in this process, if it has one: others may reach the
                memory by it from now on, also after the death of the process that made it.
        """
        joined = self.joined or self._share.take()
        if joined and memory >= 0:
            self._share.offer(memory)
        return joined

    def after_fork(self) -> None:
        """In a forked child: drop what was inherited, and leave the parent's share alone.

        ``os.fork()`` has closed it already; calling this as well does no harm.
        """
        self._share.drop_inherited()

    def close(self) -> None:
        """Give the share back, and remove the file if it was the last one."""
        self._share.end()

    def __reduce__(self) -> tuple[type[CatalogHandle], tuple[str, str]]:
        return CatalogHandle, (self.nonce, self.name)


class _Share(locks.Description):
    """A shared lock on a cache's file, held by the process that took it."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self._folder = ""
        self._pid = 0
        self._told = False

    def hold(self, fd: int, folder: int) -> None:
        """Own the descriptor ``fd``, which has the lock."""
        self.value = fd
        self._folder = os.readlink(f"/proc/self/fd/{folder}")
        self._pid = os.getpid()
        self._told = False

    def take(self) -> bool:
        try:
            with _folder() as folder:
                # In here before it is locked, so that no interrupt leaves a lock to nobody.
                self.hold(open_at(folder, self.file), folder)
                if locks.try_lock(self.value, _LIFE, shared=True) and is_named(self.value, folder, self.file):
                    return True
        except OSError:
            pass
        self.close()
        return False

    def offer(self, memory: int) -> None:
        """List this process as one that has the memory open, unless the disk is full."""
        if not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                write_holder(self.value, memory)

    def drop_inherited(self) -> None:
        # Closing only: unlocking would drop the lock of the description, which is the parent's too.
        if self._pid != os.getpid():
            self.close()

    def end(self) -> None:
        self.drop_inherited()
        if self.value < 0:
            return
        fd, self.value = self.value, -1
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


def register(
    *, pid: int, fd: int, inode: int, nonce: str, name: str, key: str = "", groups: Sequence[str] = ()
) -> CatalogHandle:
    """List a cache, and take this process's share in it.

    Args:
        pid, fd, inode: process that holds the memfd, its descriptor there, and the memfd's inode.
        nonce: 8 to 32 random bytes in hexadecimal, the cache's alone.
        name: a label for people; what is beyond 200 characters is cut.
        key: up to 100 characters that say what is in it, for those who may share it.
        groups: up to 4 groups of ranks that may: see :mod:`hotset.session.job`.

    Raises:
        ArgumentError: ``nonce`` is not of that form.

    Warns:
        HotsetWarning: the cache could not be listed. The registration that is returned is then inert.
    """
    if not re.fullmatch(NONCE, nonce):
        raise ArgumentError(
            f"nonce must be 8 to 32 bytes in lower-case hexadecimal digits, got nonce={nonce!r}."
        )
    registration = CatalogHandle(nonce, name)
    try:
        head = pack_head(
            {
                "pid": pid,
                "fd": fd,
                "inode": inode,
                "nonce": nonce,
                "name": name[:_LONGEST_LABEL],
                "created": time.time(),
                "pidns": pid_namespace(),
                "key": key,
                "groups": list(groups),
            }
        )
        with _folder() as folder:
            held = _create(folder, nonce, head)
            registration._share.hold(held, folder)
    except OSError as error:
        reason = error if isinstance(error, FolderError) else f"{error.strerror or error}."
        warn(
            f"The cache {name!r} works but is not listed, so `hotset check` does not see it, and other ranks "
            f"of this job cannot share it. To list it, set {KNOB} to a folder of your own on this machine. "
            f"The reason: {reason}"
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
                found.append(look(fd, file, alive=locks.is_locked(fd, _LIFE)))
            finally:
                os.close(fd)
    return sorted(found, key=lambda entry: (entry.created, entry.file))


def find(nonce: str) -> Entry | None:
    """Return the cache of that nonce if it can be reached from here; None otherwise.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    return next((entry for entry in entries() if entry.nonce == nonce and entry.at), None)


def gc() -> list[str]:
    """Remove the files of caches, and of turns, that no living process holds; return a sentence for each.

    Files that are held in another container stay, and files that are not the catalog's.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    removed = []
    with _folder() as folder:
        for file in [*_files(folder, _LISTED), *_files(folder, _TEMPORARY), TURNS]:
            # Not safely ours, not readable or just removed by somebody else: not ours to remove.
            with contextlib.suppress(OSError):
                fd = open_at(folder, file)
                try:
                    sentence = _removal_reason(fd, file)
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


def _remove_unheld(fd: int, folder: int, file: str) -> bool:
    """Remove the file unless a process holds it, or the name means another file by now."""
    if not locks.try_lock(fd, _LIFE, length=0) or not is_named(fd, folder, file):
        return False
    os.unlink(file, dir_fd=folder)
    return True


def _removal_reason(fd: int, file: str) -> str:
    """Return the sentence for this file's removal; empty if it is too young to be removed."""
    if file == TURNS:
        return f"Removed {file}: no process is creating a cache or a session."
    if _TEMPORARY.fullmatch(file):
        young = abs(time.time() - os.fstat(fd).st_mtime) < _YOUNG_SECONDS
        return "" if young else f"Removed {file}: the process that was listing a cache there has died."
    entry = look(fd, file, alive=locks.is_locked(fd, _LIFE))
    if entry.problem:
        return f"Removed {file}: no process holds it, and it cannot be read ({entry.problem})"
    return f"Removed {file}: no process holds the cache {entry.name!r} of process {entry.pid} any more."
