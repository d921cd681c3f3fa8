"""What a run ran on: without it a figure means nothing.

The price of a page fault is measured too, because it rules loading: a loader that puts each batch into
fresh memory pays it for every 4 KiB, on a virtual machine about 2 us, and copies in a tenth of the time.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from pathlib import Path

__all__ = ["describe", "page_fault_seconds"]

_PROBE_BYTES = 64 << 20


def describe() -> dict[str, str | float | int]:
    """Return the machine in words and figures, for the table and the JSON file."""
    import torch

    return {
        "cpu": _first(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "last-level cache": _last_level_cache(),
        "memory": _first(Path("/proc/meminfo"), "MemTotal"),
        "virtual machine": "yes" if "hypervisor" in _first(Path("/proc/cpuinfo"), "flags").split() else "no",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads of torch": torch.get_num_threads(),
        "page size (bytes)": mmap.PAGESIZE,
        "huge pages for shared memory": _chosen(
            Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        ),
        "first touch of a page (us)": round(page_fault_seconds() * 1e6, 2),
    }


def page_fault_seconds(probes: int = 3) -> float:
    """Return what the first touch of one page of fresh memfd memory costs: the fastest of ``probes``."""
    return min(_touch_once() for _ in range(probes))


def _touch_once() -> float:
    fd = os.memfd_create("page-fault-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _PROBE_BYTES)
        with mmap.mmap(fd, _PROBE_BYTES) as memory:
            pages = _PROBE_BYTES // mmap.PAGESIZE
            places = range(0, _PROBE_BYTES, mmap.PAGESIZE)
            start = time.perf_counter()
            for place in places:
                memory[place] = 1
            fresh = time.perf_counter() - start
            start = time.perf_counter()
            for place in places:
                memory[place] = 2
            # The second pass pays for the loop alone.
            return max(0.0, fresh - (time.perf_counter() - start)) / pages
    finally:
        os.close(fd)


def _first(path: Path, key: str) -> str:
    """Return the value of the first line ``key : value``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")


def _last_level_cache() -> str:
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return caches[-1].read_text().strip() if caches else "unknown"


def _chosen(path: Path) -> str:
    """Return the option in brackets of a file such as ``always [never]``."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0] or "unknown"
    except OSError:
        return "unknown"
