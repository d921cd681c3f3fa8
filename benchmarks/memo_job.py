"""What a rank does in the benchmark "memo": it reads overlapping windows of one video's frames.

Started by torchrun as ``-m benchmarks.memo_job FRAMES FOLDER``. Each computation of a frame adds a byte to
the folder's file ``computed``. A rank that has ended leaves ``done.RANK`` there, with the bytes kept.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hotset

__all__ = ["FRAME_BYTES", "WINDOW", "main"]

WINDOW = 8
_SIDE = 128
FRAME_BYTES = _SIDE * _SIDE * 3
_SECONDS = 2e-3


def decode(folder: str, number: int) -> npt.NDArray[np.uint8]:
    """One frame."""
    time.sleep(_SECONDS)
    fd = os.open(f"{folder}/computed", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"x")
    os.close(fd)
    return np.full((_SIDE, _SIDE, 3), number % 251, np.uint8)


class Windows(Dataset[npt.NDArray[np.uint8]]):
    """Each frame lies in eight windows."""

    def __init__(self, folder: str, frames: int) -> None:
        self.folder, self.frames = folder, frames
        self.decode = hotset.memo(decode, memory="1GiB", key="frames")

    def __len__(self) -> int:
        return self.frames - WINDOW + 1

    def __getitem__(self, first: int) -> npt.NDArray[np.uint8]:
        return np.stack([self._frame(number) for number in range(first, first + WINDOW)])

    def _frame(self, number: int) -> npt.NDArray[np.uint8]:
        # By its number alone: the folder's date changes with each computation.
        return self.decode.get((number,), lambda: decode(self.folder, number))


def main() -> None:
    frames, folder = int(sys.argv[1]), sys.argv[2]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset = Windows(folder, frames)
    sampler: DistributedSampler[npt.NDArray[np.uint8]] = DistributedSampler(dataset, ranks, rank)
    for batch in DataLoader(dataset, 4, sampler=sampler, num_workers=2):
        assert len(batch)
    Path(folder, f"epoch.{rank}").touch()
    while not all(Path(folder, f"epoch.{other}").exists() for other in range(ranks)):
        time.sleep(0.02)
    stats = dataset.decode.stats()
    problems = dataset.decode.check()
    Path(folder, f"done.{rank}").write_text(f"{stats.bytes} {len(problems)}")


if __name__ == "__main__":
    main()
