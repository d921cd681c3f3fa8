"""Where not all samples fit: how much is missing, and what would help, with figures.

A later cut saves more work, and an earlier one may have smaller samples. The smallest are often the files
themselves: a JPEG of 63 KiB is a picture of 549 KiB. What they take is looked up where the data set holds the
paths of its files, in a list as long as itself; where that cannot be known, nothing is said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from torch.utils.data import Subset

from hotset.dataset.plan import Plan
from hotset.determinism.introspection import attributes
from hotset.session.session_definition import Session
from hotset.units import format_bytes

__all__ = ["file_bytes", "remedies"]

# Smaller samples are worth a sentence, if they are that much smaller.
_SMALLER = 0.6


def remedies(plan: Plan, session: Session | None, free: int, files: float | None) -> list[str]:
    """Sentences about what would help; none if all samples fit, on a disk too, or there is a window.

    Args:
        plan: without them.
        session: in which the cache is to be.
        free: bytes of memory that the machine has left.
        files: mean bytes of a sample's files; None if that is not known.
    """
    missing = plan.total_bytes - plan.room
    if not plan.sample_bytes or missing <= 0 or plan.spill is not None or plan.window is not None:
        return []
    ways = []
    if session is not None:
        needed = format_bytes(session.memory + missing + (missing >> 5))
        # Sizes in notes are to be typed: "1.5 GiB" is two words in a shell.
        if missing <= free:
            ways.append(f"`hotset session resize {session.name} --memory {needed.replace(' ', '')}`")
        ways.append("a session with `--spill FOLDER`")
    else:
        if plan.total_bytes <= free:
            ways.append(f'memory="{format_bytes(plan.total_bytes * 1.03)}"')
        ways.append("spill=, a folder on a disk for the others")
        resident = format_bytes(plan.room)
        ways.append(f'window=hotset.Window(resident="{resident}"), which trains on a part at a time')
    return [
        f"{format_bytes(missing)} are missing for all samples; what would help: {', or '.join(ways)}",
        *_smaller(plan, files),
    ]


def _smaller(plan: Plan, files: float | None) -> list[str]:
    """Where samples are smaller than at the cut."""
    sizes = [
        (row.bytes, number, row.name) for number, row in enumerate(plan.rows) if row.cached and row.bytes
    ]
    told = []
    least, number, name = min(sizes, default=(plan.sample_bytes, 0, ""))
    cut = format_bytes(plan.sample_bytes)
    if least < _SMALLER * plan.sample_bytes:
        told.append(
            f"after {name} a sample takes {format_bytes(least)}, and {cut} at the cut: with cut={number} "
            f"{_share(plan, least)} of them fit, and what follows runs for each use"
        )
    if files is not None and files < _SMALLER * min(least, plan.sample_bytes):
        told.append(
            f"the files have {format_bytes(files)} a sample, and what is cached of one has {cut}: of a data "
            "set that gives the files' bytes, with decoding the first step of transform= and cut=0, "
            f"{_share(plan, files)} would fit, and be decoded for each use"
        )
    return told


def _share(plan: Plan, size: float) -> str:
    return f"{min(1.0, plan.room / (plan.used * size)):.0%}"


def file_bytes(dataset: Any, indices: Sequence[int]) -> float | None:
    """Mean bytes of the files that belong to these samples; None if that cannot be known.

    Example:
        >>> file_bytes([("/bin/sh", 3)], [0]) == os.stat("/bin/sh").st_size
        True
        >>> file_bytes([("no file", 3)], [0]) is None
        True
    """
    while isinstance(dataset, Subset):
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    held = [dataset] if isinstance(dataset, (list, tuple)) else list(attributes(dataset).values())
    lists = [each for each in held if isinstance(each, (list, tuple)) and len(each) == len(dataset)]
    sizes = []
    for index in indices:
        paths = {path for each in lists for path in _paths(each[index])}
        try:
            sizes.append(sum(os.stat(path).st_size for path in paths))
        except (OSError, ValueError):  # a text that is no path
            return None
        if not paths:
            return None
    return sum(sizes) / len(sizes) if sizes else None


def _paths(entry: Any) -> list[str]:
    """What looks like a file's path in an item: itself, or its parts."""
    parts = (
        entry.values() if isinstance(entry, dict) else entry if isinstance(entry, (list, tuple)) else [entry]
    )
    found = [os.fspath(part) for part in parts if isinstance(part, (str, PurePath))]
    return [path for path in found if os.path.isfile(path)]
