"""The eight lines of the README, on random pictures: wrap a dataset, and train from memory.

Run it: python examples/quickstart.py
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch.utils.data import Dataset

import hotset


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for files that take a millisecond to decode."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = np.random.Generator(np.random.PCG64(index)).integers(0, 256, (3, 128, 128), dtype=np.uint8)
        time.sleep(0.001)
        return torch.from_numpy(noise), index % 10


def random_flip(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Runs for each use of a sample: it is not declared deterministic, so nothing of it is cached."""
    picture, label = sample
    return (picture.flip(-1) if torch.rand(()) < 0.5 else picture), label


def main() -> None:
    train = hotset.cache(Pictures(), transform=[random_flip], memory="1GiB")
    print(train.plan)
    loader = hotset.DataLoader(train, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)
    for _ in range(3):
        for pictures, labels in loader:
            assert pictures.shape[1:] == (3, 128, 128)
            assert labels.dtype == torch.int64
        print(loader.last_epoch)


if __name__ == "__main__":
    main()
