"""Spill folders: where records go that do not fit into memory, and how they are found again.

In the folder that the user names, hotset uses one of its own, ``hotset-<uid>``, under the rules of the
runtime folder (:mod:`hotset.session.runtime_dir`): private, and nothing in it is trusted by its name.

A private cache's spill file has no name at all: it ends with the last process that has it open, and with the
machine. A session's has one, as it outlives jobs:

    <session's number>-<key>-<nonce>.spill     records
    <session's number>.session.json            what the session is, if it outlives a reboot (``--persist``)

The runtime folder, which says what sessions there are, lies in memory and is gone after a reboot, the spill
files are not. So each spill folder is entered in a list on disk, ``spill-folders`` in
``$XDG_STATE_HOME/hotset`` (``~/.local/state/hotset``), one path a line. ``hotset gc`` looks through all of
them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hotset.errors import FolderError, SessionError
from hotset.session.runtime_dir import open_private
from hotset.store.mountinfo import mounts

__all__ = ["known_folders", "make_spill", "opened_spill", "remember", "spill_path"]

# Files there are shared with other machines, which this one's locks and liveness know nothing of.
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "afs", "ceph", "lustre", "gpfs", "beegfs"}
_REMOTE |= {"ocfs2", "gfs2", "glusterfs", "orangefs"}
_REMOTE |= {f"fuse.{name}" for name in ("glusterfs", "sshfs", "s3fs", "gcsfuse")}


def spill_path(folder: str) -> Path:
    """Return hotset's own folder in a spill folder."""
    return Path(folder) / f"hotset-{os.geteuid()}"


@contextlib.contextmanager
def opened_spill(folder: str) -> Iterator[int]:
    """Open hotset's own folder in a spill folder for a block, which gets its descriptor.

    Raises:
        FolderError: it does not exist, or is not safely this user's own.
    """
    place = open_private(spill_path(folder))
    try:
        yield place
    finally:
        os.close(place)


def make_spill(folder: str) -> None:
    """Create hotset's own folder in a spill folder, if it is missing.

    Raises:
        SessionError: it cannot be made.
        FolderError: what is there is not safely this user's own.
    """
    if not folder.isprintable() or (system := _file_system(folder)) in _REMOTE:
        why = f"it is on a network ({system})" if folder.isprintable() else "its name has odd characters"
        raise SessionError(
            f"the spill folder {folder!r} cannot be used: {why}; choose one on a disk of this machine."
        )
    try:
        # Only the last folder: if one above it is missing, the name is wrong or a disk is not mounted,
        # and spilling there would fill another disk.
        for last in (folder, spill_path(folder)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(last, 0o700)
    except OSError as error:
        above = os.path.dirname(folder)
        if not os.path.isdir(above):
            why = f": there is no folder {above}; correct the name, mount the disk, or create that folder."
        elif os.path.isdir(folder):
            why = f": no folder can be made in it ({error.strerror}); choose one that is writable."
        else:
            why = f" ({error.strerror}); choose one that is writable."
        raise SessionError(f"the spill folder {folder} cannot be used{why}") from error
    with opened_spill(folder):
        pass  # what is there is checked


def remember(folder: str) -> None:
    """Enter a spill folder in the list, so that what a crash leaves in it is found.

    Raises:
        SessionError: the list cannot be written.
    """
    file = _list()
    try:
        if folder in known_folders():
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{folder}\n".encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise SessionError(
            f"{file} cannot be written ({error.strerror}); without it, files in {folder} would not be found "
            "after a crash. Set XDG_STATE_HOME to a folder that you may write to."
        ) from error


def known_folders() -> list[str]:
    """Return the spill folders that are known, and that are there."""
    try:
        lines = _list().read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for folder in dict.fromkeys(lines):
        with contextlib.suppress(FolderError, ValueError), opened_spill(folder):
            found.append(folder)
    return found


def _file_system(folder: str) -> str:
    """The kind of the file system that a folder is on, or would be; empty if unknown."""
    place = os.path.realpath(folder)
    best, kind = -1, ""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", "rb") as file:
        for mount in mounts(file.read()):
            if len(mount.point) >= best and os.path.commonpath([mount.point, place]) == mount.point:
                best, kind = len(mount.point), mount.kind
    return kind


def _list() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(os.path.abspath(home)) / "hotset" / "spill-folders"
