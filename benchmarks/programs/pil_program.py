"""A network on photographs that PIL opens, crops and resizes at random; two workers."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.programs.training_loop import train


class Photographs(Dataset[Any]):
    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = Image.open(self.files[index]).convert("RGB")
        side = random.randint(120, min(picture.size))
        left = random.randint(0, picture.size[0] - side)
        top = random.randint(0, picture.size[1] - side)
        picture = picture.resize((64, 64), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255, index % 10


def main(folder: str, epochs: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = DataLoader(Photographs(folder), batch_size=16, shuffle=True, num_workers=2)
    train(net, optimizer, nn.functional.cross_entropy, loader, epochs)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
