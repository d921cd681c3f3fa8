"""What this process has imported is moved into pages of 2 MiB, so that thousands of forks are cheap.

A fork copies an entry of the page table for each page, and the child gives all of them back as it ends: for
the 260 MB of a process of tests that is more than half of what a loader's worker costs. Of large pages there
are a five-hundredth. One that a parent or a child writes to is split again; most, of modules that a test
does not use, never are.

Kernels before 6.1, and those without large pages, refuse, and forks cost what they did.
"""

from __future__ import annotations

import ctypes

_LARGE = 2 << 20
_MADV_COLLAPSE = 25


def use_large_pages() -> None:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start, end in _private_memory():
        for place in range(-(-start // _LARGE) * _LARGE, end - _LARGE + 1, _LARGE):
            advise(place, _LARGE, _MADV_COLLAPSE)


def _private_memory() -> list[tuple[int, int]]:
    """Where memory lies that is no file's, and that no other process writes to."""
    found = []
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                addresses, permissions, _, _, _, *name = line.split()
                if permissions == "rw-p" and name in ([], ["[heap]"]):
                    start, end = addresses.split("-")
                    found.append((int(start, 16), int(end, 16)))
    except OSError:
        pass
    return found
