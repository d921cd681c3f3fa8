"""The spill folder: what ``spill=`` may be, and the second tier that is made there."""

from __future__ import annotations

import os
from typing import Any, Literal

from hotset._warnings import warn
from hotset.errors import ArgumentError, FolderError, SessionError
from hotset.session.find_or_create import CacheLocation
from hotset.session.spill_dirs import make_spill, spill_path
from hotset.store.spill import SpillTo

__all__ = ["checked_folder", "spill_to"]


def checked_folder(spill: Any) -> str | Literal[False] | None:
    """The absolute path of a spill folder, as the program may change its directory before the folder is made.

    None and False are returned as they are.

    Raises:
        ArgumentError: it is not a path, or its parent does not exist.
    """
    if spill is None or spill is False:
        return spill
    path = os.fspath(spill) if isinstance(spill, (str, os.PathLike)) else b""
    if not isinstance(path, str) or not path:
        raise ArgumentError(f"spill= must be the path of a folder on a disk of this machine, got {spill!r}.")
    absolute = os.path.abspath(path)
    if not os.path.isdir(above := os.path.dirname(absolute)):
        raise ArgumentError(
            f"spill={spill!r} cannot be made, as the folder {above} does not exist; correct the path, mount "
            "the disk, or make that folder."
        )
    return absolute


def spill_to(name: str, spill: str | Literal[False] | None, location: CacheLocation | None) -> SpillTo | None:
    """Where a cache's second tier is to be made; None for nowhere, with a warning if the folder is unusable.

    Args:
        name: of the cache, for the warning.
        spill: a checked folder; False keeps a session's cache in memory.
        location: where the cache is made in its session; None without one.
    """
    if location is not None:
        if location.spill is None or spill is False:
            return None
        return SpillTo(location.folder, location.spill, keeps_all=location.persist)
    if not isinstance(spill, str):
        return None
    try:
        make_spill(spill)
    except (SessionError, FolderError) as error:
        warn(
            f"{name}: nothing is spilled, and samples that do not fit into memory come from the source: "
            f"{error}"
        )
        return None
    return SpillTo(str(spill_path(spill)))
