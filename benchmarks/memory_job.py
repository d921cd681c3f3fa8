"""Four processes with two loader workers each, and what they take together.

Run as ``python -m benchmarks.memory_job none|hotset COUNT``; prints one line of JSON, in bytes: ``pss``, the
summed proportional set size; ``unmapped``, shared memory that is held open but mapped by nobody at the
moment, which no set size counts (torch's batches on their way from a worker are such); ``cached``, what is in
the cache.

Each process runs one whole epoch, so that everything that will be touched has been, and stops half-way
through the second. There the sizes are read: every worker lives, every queue is full, nobody moves.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["family", "main", "summed_pss", "unmapped_shared"]

_RANKS = 4
_WORKERS = 2
_BATCH = 64
_PATIENCE = 240.0


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    # Not forked from this process: as torchrun's ranks do, each finds the cache by what was pickled. The
    # fork server has imported torch before, which saves seconds and is the same in both kinds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.data"])
    barrier = context.Barrier(_RANKS + 1)
    from benchmarks.data import Generated

    dataset: Any = Generated(count)
    if kind == "hotset":
        from hotset import cache

        dataset = cache(dataset)
    ranks = [context.Process(target=_rank, args=(kind, dataset, barrier)) for _ in range(_RANKS)]
    for rank in ranks:
        rank.start()
    barrier.wait(_PATIENCE)
    pids = family(os.getpid())
    pss, unmapped = summed_pss(pids), unmapped_shared(pids)
    barrier.wait(_PATIENCE)
    for rank in ranks:
        rank.join(_PATIENCE)
    failed = [rank.exitcode for rank in ranks if rank.exitcode != 0]
    if failed:
        raise SystemExit(f"{len(failed)} of {_RANKS} processes failed")
    cached = 0
    if kind == "hotset":
        stats = dataset.stats()
        if stats.cached != count:
            raise SystemExit(f"{stats.cached} of {count} samples are cached")
        cached = stats.bytes
        dataset.close()
    print(json.dumps({"pss": pss, "unmapped": unmapped, "cached": cached}))


def _rank(kind: str, dataset: Any, barrier: Any) -> None:
    # Imported by kind: the cache's job has to carry hotset's own modules, and the other not.
    library: Any = import_module("hotset" if kind == "hotset" else "torch.utils.data")
    loader = library.DataLoader(
        dataset, batch_size=_BATCH, shuffle=True, num_workers=_WORKERS, persistent_workers=True
    )
    try:
        for _ in loader:
            pass
        middle = len(loader) // 2
        for k, _ in enumerate(loader):
            if k == middle:
                barrier.wait(_PATIENCE)
                barrier.wait(_PATIENCE)
    except BaseException:
        barrier.abort()
        raise


def family(root: int) -> set[int]:
    """Return ``root`` and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; the parent follows the state after the last one.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids = {root}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def summed_pss(pids: Iterable[int]) -> int:
    """Return the proportional set size of all of them together, in bytes."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def unmapped_shared(pids: Iterable[int]) -> int:
    """Return the bytes of shared memory files that some of them hold open and none of them maps."""
    held: dict[int, int] = {}
    mapped: set[int] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(link).startswith(("/dev/shm/", "/memfd:")):
                    about = link.stat()
                    held[about.st_ino] = about.st_blocks * 512
            except OSError:
                continue
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        mapped |= {int(line.split()[4]) for line in lines}
    return sum(size for inode, size in held.items() if inode not in mapped)


if __name__ == "__main__":
    main()
