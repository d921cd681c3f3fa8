"""File systems for the run alone, which can be filled to the brim for no one else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_CLONE_NEWNS, _MS_REC_PRIVATE = 0x20000, 0x44000
_libc = ctypes.CDLL(None, use_errno=True)


def own_mounts() -> bool:
    """Give this process and its children a mount namespace for themselves; False where that may not be."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    private: int = _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    return private == 0


class Place:
    """A folder on a file system of its own, if that may be, which can be filled to the brim."""

    def __init__(self, folder: Path, kind: str, size: int) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self._ballast = folder / "ballast"
        self.mounted = False
        image = f"{folder}.image"
        if kind == "ext4":
            with open(image, "wb") as file:
                file.truncate(size)
            make = ["mkfs.ext4", "-q", "-m0", "-O^has_journal", image]
            command = ["mount", "-o", "loop", image, str(folder)]
            if _succeeds(make):
                self.mounted = _succeeds(command)
        else:
            self.mounted = _succeeds(
                ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "x", str(folder)]
            )
        for known in folder.iterdir():
            known.rmdir()  # lost+found

    def used(self) -> int:
        status = os.statvfs(self.folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def fill(self, but: int) -> None:
        """Leave so many bytes."""
        status = os.statvfs(self.folder)
        size = status.f_bavail * status.f_frsize - but
        fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            os.posix_fallocate(fd, 0, max(size, 1))
        os.close(fd)

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
        shutil.rmtree(self.folder)


def _succeeds(command: list[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False
