"""What several processes take together, as it is at one moment at which none of them moves.

The *proportional set size* counts a page that n processes map as 1/n in each, so that summed over all of
them it is what they take. It knows nothing of shared memory that is held open but mapped by nobody at the
moment, as torch's batches on their way from a worker are: that is counted apart.

The moment is made by a barrier. Each process runs until everything that will be touched has been, and calls
:func:`stand`; there its workers live and its queues are full. Whoever measures comes last, and lets all go
on. Only the standard library is imported here: a job without hotset shall not carry any of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Footprint", "of_ranks", "of_tree", "ready_to_stand", "stand"]

_PATIENCE = 240.0


class Footprint(NamedTuple):
    """Bytes of several processes: their proportional set size, and shared memory that none of them maps."""

    pss: int
    unmapped: int


def of_tree(root: int) -> Footprint:
    """Measure the process ``root`` and all its descendants."""
    pids = family(root)
    return Footprint(summed_pss(pids), unmapped_shared(pids))


def of_ranks(context: Any, ranks: int, run: Callable[..., None], *given: Any) -> Footprint:
    """Measure this process and ``ranks`` others, each of which calls ``run(*given, barrier)``.

    Args:
        context: a multiprocessing context, which starts them.
        run: stands at the barrier once, within :func:`ready_to_stand`.

    Raises:
        SystemExit: one of them failed.
        threading.BrokenBarrierError: one of them failed, or hung, before it stood.
    """
    barrier = context.Barrier(ranks + 1)
    # Not daemons, which may have no children, as workers are.
    processes = [context.Process(target=run, args=(*given, barrier)) for _ in range(ranks)]
    for process in processes:
        process.start()
    barrier.wait(_PATIENCE)
    found = of_tree(os.getpid())
    barrier.wait(_PATIENCE)
    for process in processes:
        process.join(_PATIENCE)
    failed = [process.exitcode for process in processes if process.exitcode != 0]
    if failed:
        raise SystemExit(f"{len(failed)} of {ranks} processes failed")
    return found


def stand(barrier: Any) -> None:
    """Stop here until all have been measured."""
    barrier.wait(_PATIENCE)
    barrier.wait(_PATIENCE)


@contextlib.contextmanager
def ready_to_stand(barrier: Any) -> Iterator[None]:
    """Whatever fails within ends the waiting of all the others too."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


def family(root: int) -> set[int]:
    """Return ``root`` and all its descendants but those that have ended, which hold nothing any more."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; state and parent follow the last one.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(stat.parent.name)] = int(parent)
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
