"""A program as users write them, which knows nothing of hotset: ``python program.py FOLDER DEVICE``.

It trains a small network on JPEG files, three epochs with two workers, and prints each step's loss.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class _Files(Dataset[Any]):
    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = Image.open(self.files[index]).convert("RGB").resize((64, 64))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255, index % 10


def main(folder: str, device: str) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    files = _Files(folder)
    loader: Any = DataLoader(files, 4, shuffle=True, num_workers=2, pin_memory=device != "cpu")
    network = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 31 * 31, 10))
    network.to(device)
    optimizer: Any = torch.optim.SGD(network.parameters(), 0.01)
    for _ in range(3):
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
