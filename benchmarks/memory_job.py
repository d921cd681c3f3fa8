"""Four processes with two loader workers each, and what they take together.

Run as ``python -m benchmarks.memory_job none|hotset COUNT``; prints one line of JSON, in bytes: the fields of
:class:`benchmarks.footprint.Footprint`, and ``cached``, what is in the cache.

Each process runs one whole epoch, so that everything that will be touched has been, and stands still
half-way through the second. A whole garbage collection is part of that: it writes to the header of every
object, and so takes from processes of one fork server the memory that they share. In a training it comes
sooner or later, whichever the kind: here, in both.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from importlib import import_module
from typing import Any

from benchmarks.footprint import of_ranks, ready_to_stand, stand

__all__ = ["main"]

_RANKS = 4
_WORKERS = 2
_BATCH = 64


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    # Not forked from this process: as torchrun's ranks do, each finds the cache by what was pickled. The
    # fork server has imported torch before, which saves seconds and is the same in both kinds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.data"])
    from benchmarks.data import Generated

    dataset: Any = Generated(count)
    if kind == "hotset":
        from hotset import cache

        dataset = cache(dataset)
    taken = of_ranks(context, _RANKS, _rank, kind, dataset)
    cached = 0
    if kind == "hotset":
        stats = dataset.stats()
        if stats.cached != count:
            raise SystemExit(f"{stats.cached} of {count} samples are cached")
        cached = stats.bytes
        dataset.close()
    print(json.dumps({**taken._asdict(), "cached": cached}))


def _rank(kind: str, dataset: Any, barrier: Any) -> None:
    with ready_to_stand(barrier):
        # Imported by kind: the cache's job has to carry hotset's own modules, and the other not.
        library: Any = import_module("hotset" if kind == "hotset" else "torch.utils.data")
        loader = library.DataLoader(
            dataset, batch_size=_BATCH, shuffle=True, num_workers=_WORKERS, persistent_workers=True
        )
        for _ in loader:
            pass
        middle = len(loader) // 2
        for k, _ in enumerate(loader):
            if k == middle:
                gc.collect()
                stand(barrier)


if __name__ == "__main__":
    main()
