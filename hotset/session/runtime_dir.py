"""The runtime folder: where the caches of this user on this machine are listed.

It lies on shared memory by default, where every user may create files, so a name there proves nothing.
Another user may have put a folder, a symlink, a hard link or a FIFO there first, or may swap one for another
between a check and its use. So hotset never checks a name and then opens it: it opens the name without
following links, and checks the file that it *opened*. A file that fails a check is refused, not repaired,
because the user should know that another user could set a trap there.

=============================  ========================================================================
opened                         is this user's own if it is
=============================  ========================================================================
the folder                     a folder, not a symlink; owned by the effective user; mode 0700 or less
a file in it                   regular, not a symlink; exactly one name; owned by the effective user;
                               nothing for group and others
=============================  ========================================================================

Locks show which processes are alive, and processes share pages of memory here, so the folder must be on a
file system of this machine, not on one that several machines mount.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hotset.errors import ArgumentError, FolderError
from hotset.store.standard_streams import beyond_standard

__all__ = [
    "KNOB",
    "is_named",
    "new_file",
    "open_at",
    "open_folder",
    "open_or_create",
    "open_private",
    "opened",
    "path_of",
    "runtime",
    "runtime_folder",
    "unfinished",
    "write",
]

KNOB = "HOTSET_RUNTIME_DIR"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def runtime_folder() -> Path:
    """Return the runtime folder; create it (mode 0700) if it does not exist.

    It is ``$HOTSET_RUNTIME_DIR`` if that is set; otherwise ``/dev/shm/hotset-<uid>``; where that cannot be
    created, ``$XDG_RUNTIME_DIR/hotset``, or else ``hotset-<uid>`` in the folder for temporary files.

    Raises:
        FolderError: it cannot be created, or what is there is not safely this user's own.
    """
    path, fd = _find()
    os.close(fd)
    return path


def open_folder() -> int:
    """Return a descriptor of the runtime folder, for use as ``dir_fd``; the caller closes it.

    Raises:
        FolderError: as :func:`runtime_folder`.
    """
    return _find()[1]


@contextlib.contextmanager
def runtime() -> Iterator[int]:
    """Open the runtime folder for a block, which gets its descriptor, for use as ``dir_fd``.

    Raises:
        FolderError: as :func:`runtime_folder`.
    """
    folder = open_folder()
    try:
        yield folder
    finally:
        os.close(folder)


def path_of(folder: int) -> str:
    """Return the path of a folder that is open."""
    return os.readlink(f"/proc/self/fd/{folder}")


def open_private(path: Path) -> int:
    """Return a descriptor of a folder, which the caller closes.

    Raises:
        FolderError: it is not there, or not safely this user's own.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        # With O_DIRECTORY the kernel says ENOTDIR for a symlink too.
        why = "is a symlink" if path.is_symlink() else f"cannot be opened ({error.strerror})"
        raise _refusal(path, why) from error
    why = _not_private(os.fstat(fd))
    if why:
        os.close(fd)
        raise _refusal(path, why)
    return fd


@beyond_standard()
def open_at(folder: int, name: str, *, create: bool = False) -> int:
    """Return a descriptor, for reading and writing, of a file in a folder that is open.

    Args:
        folder: what :func:`open_folder` returned.
        name: up to 100 of the characters A-Z, a-z, 0-9, dot, underscore and hyphen, no dot first.
        create: create the file, which must not exist, with mode 0600.

    Raises:
        ArgumentError: ``name`` is not such a name.
        FolderError: the file is not safely this user's own.
        FileNotFoundError, FileExistsError: it does not exist; it exists, with ``create``.
        OSError: the file system refuses: it is full, read-only, or too many files are open.
    """
    if not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{name!r} is not a name for a file of the runtime folder; use up to 100 of the characters "
            "A-Z, a-z, 0-9, dot, underscore and hyphen, and no dot at the beginning."
        )
    # Without O_NONBLOCK some devices wait in open() itself; it has no effect on a regular file.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    if create:
        flags |= os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        unfit = {errno.ELOOP: "is a symlink", errno.EISDIR: "is a folder", errno.ENXIO: "is a socket"}
        if error.errno in unfit:
            raise _refusal(Path(path_of(folder), name), unfit[error.errno]) from error
        raise
    status = os.fstat(fd)
    if status.st_nlink == 0:
        # Removed since open(): treated as if it did not exist.
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if not stat.S_ISREG(status.st_mode):
        why = "is not a regular file"
    elif status.st_nlink != 1:
        why = f"has {status.st_nlink} names (hard links)"
    else:
        why = _not_private(status)
    if why:
        os.close(fd)
        raise _refusal(Path(path_of(folder), name), why)
    return fd


@contextlib.contextmanager
def opened(folder: int, name: str, *, create: bool = False) -> Iterator[int]:
    """Open a file, as :func:`open_at` does, for a block that gets its descriptor."""
    fd = open_at(folder, name, create=create)
    try:
        yield fd
    finally:
        os.close(fd)


def open_or_create(folder: int, name: str) -> int:
    """Return what :func:`open_at` returns, for a file that is created if it does not exist."""
    while True:
        for create in (False, True):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                return open_at(folder, name, create=create)


@contextlib.contextmanager
def unfinished(folder: int, name: str) -> Iterator[str]:
    """Give a block the name under which a file is created: ``name``, eight random digits and ``.new``.

    The block renames the file when it is whole. Nothing is left under the temporary name.
    """
    temporary = f"{name}.{os.urandom(4).hex()}.new"
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)


@contextlib.contextmanager
def new_file(folder: int, name: str) -> Iterator[int]:
    """Create a file for a block, which gets its descriptor and writes its content.

    The file gets its name after the block, in place of an older file, so a process that opens it by name
    finds the whole content. If the block fails, nothing is left.

    Raises:
        FolderError, OSError: as :func:`open_at`.
    """
    with unfinished(folder, name) as temporary, opened(folder, temporary, create=True) as fd:
        yield fd
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def write(fd: int, content: bytes) -> None:
    """Write all of this.

    Raises:
        OSError: the file system is full, or fails.
    """
    while content:
        content = content[os.write(fd, content) :]


def is_named(fd: int, folder: int, name: str) -> bool:
    """Whether ``name`` still means the file behind ``fd``; to be checked after a wait for a lock on it."""
    try:
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _find() -> tuple[Path, int]:
    """Return the folder's path and a descriptor of it, trying the places in order.

    The next place is tried only if there is no folder and none can be created. A folder that exists and is
    not safely this user's own ends the search: to pass over it would silently split the list of caches.
    """
    failure = None
    for path in _places():
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            failure = failure or FolderError(
                f"The runtime folder {path} cannot be created ({error.strerror}); "
                f"set {KNOB} to a folder that you may write to."
            )
            continue
        return path, open_private(path)
    assert failure is not None, "there is always a place to try"
    raise failure


def _places() -> Iterator[Path]:
    chosen = os.environ.get(KNOB)
    if chosen:
        yield Path(os.path.abspath(chosen))
        return
    user = os.geteuid()
    yield Path(f"/dev/shm/hotset-{user}")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        yield Path(os.path.abspath(session)) / "hotset"
    yield Path(tempfile.gettempdir()) / f"hotset-{user}"


def _not_private(status: os.stat_result) -> str:
    """Return what makes this file or folder not this user's alone, or an empty string."""
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return f"is open to other users (mode {mode:04o})"
    return ""


def _refusal(path: Path, why: str) -> FolderError:
    return FolderError(
        f"{path} {why}, so hotset will not use it; set {KNOB} to a folder of your own, or remove it if it "
        "serves nothing else."
    )
