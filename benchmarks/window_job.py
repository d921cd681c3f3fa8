"""Processes with two loader workers each that train on nothing from a window, and what they take together.

Run as ``python -m benchmarks.window_job KIND RANKS COUNT SIDE``; prints one line of JSON, the fields of
:class:`benchmarks.footprint.Footprint`. With hotset all ranks have one window, with MONAI each has its own.
They stand still in the midst of the third epoch: the window has moved, every worker lives.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import volumes
from benchmarks.footprint import of_ranks, ready_to_stand, stand

__all__ = ["HOTSET", "MONAI", "NONE", "main"]

NONE, HOTSET, MONAI = "no cache", "hotset.Window", "MONAI SmartCacheDataset"
_WORKERS = 2


def main() -> None:
    kind, (ranks, count, side) = sys.argv[1], map(int, sys.argv[2:5])
    # Forked, and so are their workers: with another start method MONAI's window cannot have any.
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        items = volumes.write(Path(folder), count, side)
        volumes.volumes(items, side // 2)[0]  # what is imported at first use all processes then share
        given: Any = items
        if kind == HOTSET:
            import hotset

            sizes = hotset.Window(count // 2, replace=volumes.RATE)
            given = stack.enter_context(hotset.cache(volumes.volumes(items, side // 2), window=sizes))
        taken = of_ranks(context, ranks, _rank, kind, given, side)
    print(json.dumps(taken._asdict()))


def _rank(kind: str, given: Any, side: int, barrier: Any) -> None:
    with ready_to_stand(barrier), ExitStack() as stack:
        if kind == HOTSET:
            epoch = volumes.running_window(stack, given, _WORKERS)
        elif kind == MONAI:
            epoch, _ = volumes.monai_window(stack, given, side // 2, len(given) // 2, _WORKERS)
        else:
            epoch = volumes.plain(given, side // 2, _WORKERS)
        for _ in range(2):
            for _ in epoch():
                pass
        for number, _ in enumerate(epoch()):
            if number == 2:
                stand(barrier)


if __name__ == "__main__":
    main()
