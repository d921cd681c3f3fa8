"""Zarr: an array whose chunks are samples, and a transform of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from .harness import Compatibility, Program

zarr = pytest.importorskip("zarr", reason="the programs over Zarr need zarr")

pytestmark = pytest.mark.compatibility


def write(folder: Path, count: int) -> None:
    group = zarr.open_group(folder / "samples.zarr", mode="w")
    values = np.random.default_rng(0).integers(0, 99, (count, 64, 64)).astype(np.int16)
    group.create_array("fields", data=values, chunks=(1, 64, 64))


class Fields(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.fields = zarr.open_group(folder / "samples.zarr", mode="r")["fields"]

    def __len__(self) -> int:
        return int(self.fields.shape[0])

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.fields[index])).float() / 99


class TestZarr(Compatibility):
    programs = [Program("Zarr, a chunk a sample", write, Fields)]
