"""Remedies: what would help where not all samples fit into the cache, with figures.

A later cut saves more work, and an earlier one may have smaller samples. The smallest are often the files
themselves: a JPEG of 63 KiB is a picture of 549 KiB. The sizes of the files are looked up where the dataset
holds their paths in a list as long as itself; where it does not, nothing is said about files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from torch.utils.data import Subset

from hotset.dataset.plan import Plan
from hotset.determinism.objects.object_graph import attributes
from hotset.determinism.objects.safe_access import elements
from hotset.session.session_definition import Session
from hotset.units import format_bytes

__all__ = ["file_bytes", "remedies"]

# A smaller sample is mentioned if it takes at most this share of one at the cut.
_SMALLER = 0.6


def remedies(plan: Plan, session: Session | None, free: int, files: float | None) -> list[str]:
    """Sentences about what would make more samples fit; none if all fit, or with a spill or a window.

    Args:
        plan: the plan, without these sentences.
        session: the session of the cache; None for a cache of this job.
        free: the bytes of memory that the machine has left.
        files: mean bytes of a sample's files; None if that is not known. 0 says nothing: files of /proc, and
            of some network file systems, tell no size.
    """
    missing = plan.total_bytes - plan.room
    if not plan.sample_bytes or missing <= 0 or plan.spill is not None or plan.window is not None:
        return []
    ways = []
    if session is not None:
        needed = format_bytes(session.memory + missing + (missing >> 5))
        # The user types this size: "1.5 GiB" would be two words in a shell.
        if missing <= free:
            ways.append(f"`hotset session resize {session.name} --memory {needed.replace(' ', '')}`")
        ways.append("a session with `--spill FOLDER`")
    else:
        if plan.total_bytes <= free:
            ways.append(f'memory="{format_bytes(plan.total_bytes * 1.03)}"')
        ways.append("spill=, a folder on a disk for the samples that do not fit")
        resident = format_bytes(plan.room)
        ways.append(f'window=hotset.Window(resident="{resident}"), which trains on one part at a time')
    return [
        f"{format_bytes(missing)} more are needed for all samples; what would help: {', or '.join(ways)}",
        *_smaller(plan, files),
    ]


def _smaller(plan: Plan, files: float | None) -> list[str]:
    """Sentences about points of the pipeline at which samples are smaller than at the cut."""
    sizes = [
        (row.bytes, number, row.name) for number, row in enumerate(plan.rows) if row.cached and row.bytes
    ]
    sentences = []
    least, number, name = min(sizes, default=(plan.sample_bytes, 0, ""))
    cut = format_bytes(plan.sample_bytes)
    if least < _SMALLER * plan.sample_bytes:
        sentences.append(
            f"after {name} a sample takes {format_bytes(least)}, and {cut} at the cut: with cut={number} "
            f"{_share(plan, least)} of them fit, and the transforms that follow run for each use"
        )
    if files and files < _SMALLER * min(least, plan.sample_bytes):
        sentences.append(
            f"the files have {format_bytes(files)} a sample, and what is cached of one has {cut}: if the "
            "dataset returned the files' bytes, and the first step of transform= decoded them, with cut=0 "
            f"{_share(plan, files)} would fit, and be decoded for each use"
        )
    return sentences


def _share(plan: Plan, size: float) -> str:
    return f"{min(1.0, plan.room / (plan.used * size)):.0%}"


def file_bytes(dataset: Any, indices: Sequence[int]) -> float | None:
    """The mean bytes of these samples' files; None if the dataset does not hold their paths.

    Example:
        >>> file_bytes([("/bin/sh", 3)], [0]) == os.stat("/bin/sh").st_size
        True
        >>> file_bytes([("no file", 3)], [0]) is None
        True
    """
    while isinstance(dataset, Subset):
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    held = [dataset] if isinstance(dataset, (list, tuple)) else list(attributes(dataset).values())
    held = [elements(each) for each in held if issubclass(type(each), (list, tuple))]
    lists = [each for each in held if len(each) == len(dataset)]
    sizes = []
    for index in indices:
        paths = {path for each in lists for path in _paths(each[index])}
        try:
            sizes.append(sum(os.stat(path).st_size for path in paths))
        except (OSError, ValueError):  # a string that is not a path
            return None
        if not paths:
            return None
    return sum(sizes) / len(sizes) if sizes else None


def _paths(entry: Any) -> list[str]:
    """The paths of existing files in an item: the item itself, or its parts."""
    parts = (
        entry.values() if isinstance(entry, dict) else entry if isinstance(entry, (list, tuple)) else [entry]
    )
    found = [os.fspath(part) for part in parts if isinstance(part, (str, PurePath))]
    return [path for path in found if os.path.isfile(path)]
