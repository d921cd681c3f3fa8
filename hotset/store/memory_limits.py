"""How much memory may still be taken, under the machine's limit and every enclosing control group's.

A full tmpfs or disk is an error that a program can handle. A control group's limit is not: the kernel first
reclaims, then kills, and the write to shared memory that exceeded it never returns. So the headroom is read
*before* memory is touched. Each of these is a bound, and the tightest counts:

- the machine: ``MemAvailable`` of ``/proc/meminfo``;
- this process's control group **and each of its ancestors**: a container's own group is often unlimited
  while the pod or the batch job around it is not. The limit less what its members use, where page cache
  (``inactive_file + active_file``) does not count as used, since the kernel drops it before it kills;
  but files that are mapped do, since they are the programs that run.
  Shared memory is on the anonymous lists, so it does count. ``memory.high`` of version 2 does not kill but
  slows its members down without end, so it bounds like ``memory.max``. Swap counts nowhere: a cache that is
  swapped out is worse than none.

Where the groups are is read from ``/proc/self/cgroup`` and ``/proc/self/mountinfo``, never assumed. Both
paths are relative to a cgroup namespace's root, which may lie below the mount's:

=================  ==================  ======================================================================
mount's root       this group          where it is
=================  ==================  ======================================================================
``/``              ``/job/step``       mount point + ``/job/step``: a host, version 1, 2 or both at once
``/``              ``/``               the mount point: a container with a cgroup namespace
``/docker/c1``     ``/docker/c1/x``    mount point + ``/x``: a container without one
``/../..``         ``/x``              mount point + two unknown names + ``/x``: the namespace is newer than
                                       the mount. Found by this process's id in the groups' lists.
``/``              ``/../x``           outside of the mount: not visible, skipped
=================  ==================  ======================================================================

A file that cannot be read or parsed is ignored. The list of files is made again whenever
``/proc/self/cgroup`` changes, which it does when the process is moved. Limits and usage are read each time:
they may change at any moment, also from "unlimited".
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hotset.store.mountinfo import mounts

__all__ = ["Headroom", "Limits", "headroom", "keep_freed_memory", "mappable", "tmpfs_free", "total"]

_SMALLEST_MARGIN = 64 << 20
_LARGEST_MARGIN = 1 << 30
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1

_TOTAL = re.compile(rb"^MemTotal: *(\d+) kB$", re.M)
_AVAILABLE = re.compile(rb"^MemAvailable: *(\d+) kB$", re.M)


@dataclass(frozen=True)
class Headroom:
    """Memory that may still be taken.

    Attributes:
        bytes: what is left under the tightest bound, less a safety margin of 3 % of that bound's limit
            (at least 64 MiB, at most 1 GiB); never negative.
        limit: the tightest bound's total, in bytes.
        what: the tightest bound in words: ``"the machine's memory"``, or
            ``"control group /job (memory.max)"``.
    """

    bytes: int
    limit: int
    what: str


@dataclass(frozen=True)
class _Version:
    """What the files of one version of control groups are called."""

    limits: tuple[str, ...]
    usage: str
    page_cache: re.Pattern[bytes]
    mapped: re.Pattern[bytes]
    shared: re.Pattern[bytes]


_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    re.compile(rb"^total_(?:in)?active_file (\d+)$", re.M),
    re.compile(rb"^total_mapped_file (\d+)$", re.M),
    re.compile(rb"^total_shmem (\d+)$", re.M),
)
_V2 = _Version(
    ("memory.max", "memory.high"),
    "memory.current",
    re.compile(rb"^(?:in)?active_file (\d+)$", re.M),
    re.compile(rb"^file_mapped (\d+)$", re.M),
    re.compile(rb"^shmem (\d+)$", re.M),
)


@dataclass(frozen=True)
class _Group:
    """A control group that bounds this process: its own, or an ancestor of it."""

    name: str
    folder: str
    version: _Version

    def bounds(self, machine: int) -> Iterator[Headroom]:
        """Yield what is left under each limit that is set, before the margin.

        A limit above the machine's memory is never the tightest, so its usage is not worth reading.
        """
        for file in self.version.limits:
            limit = _number(f"{self.folder}/{file}")
            if limit is None or not 0 <= limit < machine:
                continue
            used = _number(f"{self.folder}/{self.version.usage}")
            if used is None:
                continue
            left = limit - used + min(self._reclaimable(), used)
            yield Headroom(left, limit, f"control group {self.name} ({file})")

    def _reclaimable(self) -> int:
        """Page cache that the kernel would drop before it kills: not the code that programs run."""
        stat = _read(f"{self.folder}/memory.stat")
        cache, mapped, shared = (
            sum(map(int, pattern.findall(stat)))
            for pattern in (self.version.page_cache, self.version.mapped, self.version.shared)
        )
        return max(cache - max(mapped - shared, 0), 0)


class Limits:
    """The bounds of this process.

    Args:
        root: the folder under which ``/proc`` and the mount points lie; another than ``/`` to look at a
            copy of them.
    """

    def __init__(self, root: str = "/") -> None:
        self._root = root.rstrip("/")
        self._found: tuple[bytes, list[_Group]] = b"", []

    def headroom(self) -> Headroom:
        """Return what is left under the tightest bound; see :func:`headroom`."""
        machine = self._machine()
        bounds = [machine, *(bound for group in self._groups() for bound in group.bounds(machine.limit))]
        tightest = min((_less_margin(bound) for bound in bounds), key=lambda bound: bound.bytes)
        return replace(tightest, bytes=max(0, tightest.bytes))

    def _machine(self) -> Headroom:
        text = _read(f"{self._root}/proc/meminfo")
        total, available = _TOTAL.search(text), _AVAILABLE.search(text)
        if total and available:
            left, limit = 1024 * int(available[1]), 1024 * int(total[1])
        else:  # /proc is not there or masked: the pages that are free right now, which is too little
            page = os.sysconf("SC_PAGE_SIZE")
            left, limit = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        return Headroom(left, limit, "the machine's memory")

    def _groups(self) -> list[_Group]:
        membership = _read(f"{self._root}/proc/self/cgroup")
        if membership != self._found[0]:
            self._found = membership, _find_groups(membership, self._root)
        return self._found[1]


_here = Limits()


def headroom() -> Headroom:
    """Return how much memory may still be taken before the kernel would kill for it.

    Safe to call from any thread and after a fork; a call reads a few small files: 60 us where nothing but the
    machine bounds, some 25 us more for each control group with a limit (2 cores, Linux 6.18).

    Example:
        >>> free = headroom()
        >>> 0 <= free.bytes <= free.limit
        True
    """
    return _here.headroom()


def total() -> int:
    """Return the bytes of memory that the machine has in all.

    Example:
        >>> headroom().limit <= total()
        True
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mappable(share: float) -> int:
    """How large a file this process may make and map, in this share of its address space.

    That is what a shell or a batch system limits by ``ulimit -f`` and ``ulimit -v``.

    Example:
        >>> mappable(0.25) > 0
        True
    """
    allowed = sys.maxsize
    for limit, part in ((resource.RLIMIT_FSIZE, 1.0), (resource.RLIMIT_AS, share)):
        bound = resource.getrlimit(limit)[0]
        if bound != resource.RLIM_INFINITY:
            allowed = min(allowed, int(bound * part))
    return allowed


def keep_freed_memory() -> None:
    """Make this process's malloc keep up to 256 MiB of freed memory instead of returning it to the kernel.

    In a small control group it keeps less: a thirty-second of the memory that is left.

    A worker allocates and frees the same few pictures repeatedly. glibc returns each to the kernel and faults
    it in again, which took a third of a worker's time with a random flip and crop. Other allocators have no
    ``mallopt``, or ignore it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, min(256 << 20, headroom().bytes // 32))


def tmpfs_free(path: str) -> int:
    """Return the bytes that the file system of ``path`` still has for this user.

    A tmpfs without a size of its own (``size=0``) is bounded by memory alone: then it is the headroom.

    Raises:
        OSError: ``path`` does not exist or cannot be looked at.
    """
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize if status.f_blocks else headroom().bytes


def _less_margin(bound: Headroom) -> Headroom:
    margin = min(_LARGEST_MARGIN, max(_SMALLEST_MARGIN, bound.limit * 3 // 100))
    return replace(bound, bytes=bound.bytes - margin)


def _read(path: str) -> bytes:
    """Return a file's content, or nothing if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _number(path: str) -> int | None:
    """Return the number in a file; None for ``max`` and for anything that is not one number."""
    try:
        return int(_read(path))
    except ValueError:
        return None


def _find_groups(membership: bytes, root: str) -> list[_Group]:
    """Return the groups that bound a process with this ``/proc/self/cgroup``, innermost first."""
    limiting = _mounts(_read(f"{root}/proc/self/mountinfo"))
    groups: list[_Group] = []
    for line in os.fsdecode(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        names = _parts(path)
        # A hierarchy may be mounted more than once; the mount that shows most ancestors is the best.
        walks = [
            _walk(root + point, below, names, version)
            for kind, mount_root, point in limiting
            if kind is version and (below := _below(root + point, _parts(mount_root), names)) is not None
        ]
        best = max(walks, key=len, default=[])
        groups += best
    return groups


def _mounts(mountinfo: bytes) -> list[tuple[_Version, str, str]]:
    """Return version, root within its hierarchy, and mount point of each mount that has memory limits."""
    versions = {"cgroup": _V1, "cgroup2": _V2}
    return [
        (versions[mount.kind], mount.root, mount.point)
        for mount in mounts(mountinfo)
        if mount.kind == "cgroup2" or (mount.kind == "cgroup" and "memory" in mount.options)
    ]


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _below(point: str, mount_root: list[str], group: list[str]) -> list[str] | None:
    """Return the names that lead from a mount point to the group; None if it is not below it."""
    if group[: len(mount_root)] == mount_root:
        below = group[len(mount_root) :]
        return None if ".." in below else below
    unknown = mount_root.count("..") - group.count("..")
    if unknown <= 0 or mount_root != [".."] * len(mount_root):
        return None
    known = [name for name in group if name != ".."]
    pattern = "/".join([glob.escape(point), *["*"] * unknown, *map(glob.escape, known)])
    me = b"%d" % os.getpid()
    for folder in glob.iglob(pattern):
        if me in _read(f"{folder}/cgroup.procs").split():
            return _parts(folder[len(point) :])
    return []


def _walk(point: str, below: list[str], group: list[str], version: _Version) -> list[_Group]:
    """Return the group and its ancestors up to the mount point, as far as they exist."""
    found = []
    for depth in range(len(below), -1, -1):
        folder = "/".join([point.rstrip("/"), *below[:depth]])
        name = "/" + "/".join(group[: max(0, len(group) - (len(below) - depth))])
        if os.path.isdir(folder):
            found.append(_Group(name, folder, version))
    return found
