"""HDF5 through h5py: a file that is opened at once, and one that each process opens when it reads first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from .harness import SPAWNED, Compatibility, Program

h5py = pytest.importorskip("h5py", reason="the programs over HDF5 need h5py")

pytestmark = pytest.mark.compatibility


def write(folder: Path, count: int) -> None:
    drawn = np.random.default_rng(0)
    with h5py.File(folder / "samples.h5", "w") as file:
        signals = drawn.random((count, 16, 256), np.float32)
        file.create_dataset("signals", data=signals, chunks=(1, 16, 256), compression="gzip")
        file["labels"] = np.arange(count) % 7


class Opened(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.file = h5py.File(folder / "samples.h5", "r")

    def __len__(self) -> int:
        return len(self.file["labels"])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.file["signals"][index]), int(self.file["labels"][index])


class Lazy(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "samples.h5")
        with h5py.File(self.path, "r") as file:
            self.length = len(file["labels"])
        self.file: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["signals"][index]), int(self.file["labels"][index])


class TestHDF5(Compatibility):
    programs = [
        Program("h5py, file opened in `__init__`", write, Opened),
        Program("h5py, file opened when it is read first", write, Lazy),
        Program("h5py, file opened when it is read first, spawned workers", write, Lazy, loader=SPAWNED),
    ]
