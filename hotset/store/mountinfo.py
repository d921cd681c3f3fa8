"""What is mounted where, as ``/proc/self/mountinfo`` lists it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Mount", "mounts"]


class Mount(NamedTuple):
    """One mount.

    Attributes:
        root: the folder of the file system that is mounted.
        point: where it is mounted.
        kind: of the file system.
        options: the file system's own ones.
    """

    root: str
    point: str
    kind: str
    options: list[str]


def mounts(mountinfo: bytes) -> Iterator[Mount]:
    """The mounts that the content of such a file lists; lines that are not like that are left out."""
    for line in os.fsdecode(mountinfo).split("\n"):
        before, _, after = line.partition(" - ")
        place, system = before.split(" "), after.split(" ")
        if len(place) >= 5 and len(system) >= 3:
            yield Mount(_unescaped(place[3]), _unescaped(place[4]), system[0], system[2].split(","))


def _unescaped(field: str) -> str:
    """Undo the octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
