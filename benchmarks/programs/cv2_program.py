"""A network on mosaics of four photographs that OpenCV reads, three of them drawn at random; two workers."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.programs.training_loop import train

SIDE = 64


class Mosaics(Dataset[Any]):
    def __init__(self, folder: str) -> None:
        self.files = sorted(str(path) for path in Path(folder).rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        chosen = [index, *(random.randrange(len(self)) for _ in range(3))]
        mosaic = np.empty((2 * SIDE, 2 * SIDE, 3), np.uint8)
        for place, number in enumerate(chosen):
            picture = cv2.resize(cv2.imread(self.files[number]), (SIDE, SIDE))
            top, left = SIDE * (place // 2), SIDE * (place % 2)
            mosaic[top : top + SIDE, left : left + SIDE] = picture
        return torch.from_numpy(mosaic).permute(2, 0, 1).float() / 255, index % 10


def main(folder: str, epochs: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = DataLoader(Mosaics(folder), batch_size=16, shuffle=True, num_workers=2)
    train(net, optimizer, nn.functional.cross_entropy, loader, epochs)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
