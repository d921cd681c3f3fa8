"""What a rank does in the benchmark "ranks": it trains on nothing, from its shard of a common dataset.

Started by torchrun as ``-m benchmarks.ranks_job none|hotset COUNT FOLDER``. Each rank runs one whole epoch,
so that everything that will be touched has been, and stops half-way through the second: it leaves
``ready.RANK`` in the folder and waits for ``go``. There the sizes are read. Every read of the source adds a
byte to the folder's file ``reads``. A rank that has ended leaves ``done.RANK``, with the bytes cached.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.data import DistributedSampler

from benchmarks.data import Counted, Generated, Sample

__all__ = ["main"]

_WORKERS = 2
_BATCH = 64
_PATIENCE = 240.0


def main() -> None:
    kind, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Imported by kind: the cache's job has to carry hotset's own modules, and the other not.
    library: Any = import_module("hotset" if kind == "hotset" else "torch.utils.data")
    dataset: Any = Counted(Generated(count), folder / "reads")
    if kind == "hotset":
        dataset = library.cache(dataset)
    sampler: DistributedSampler[Sample] = DistributedSampler(dataset, ranks, rank)
    loader = library.DataLoader(
        dataset, batch_size=_BATCH, sampler=sampler, num_workers=_WORKERS, persistent_workers=True
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for k, _ in enumerate(loader):
            if epoch == 1 and k == len(loader) // 2:
                (folder / f"ready.{rank}").touch()
                _wait_for(folder / "go")
        # Gradients keep ranks in step; here nothing else does, and one would begin while others still fill.
        (folder / f"epoch {epoch}.{rank}").touch()
        for other in range(ranks):
            _wait_for(folder / f"epoch {epoch}.{other}")
    cached = 0
    if kind == "hotset":
        if problems := dataset.check():
            raise SystemExit(problems[0])
        cached = dataset.stats().bytes
    part = folder / f"part.{rank}"
    part.write_text(str(cached))
    part.rename(folder / f"done.{rank}")


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            raise SystemExit("nobody came to read the sizes")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
