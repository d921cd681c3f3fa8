"""torch's own datasets, and token files that are mapped into memory as nanoGPT does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

import hotset

from .harness import Compatibility, Program

pytestmark = pytest.mark.compatibility

BLOCK = 512


def write_arrays(folder: Path, count: int) -> None:
    drawn = np.random.default_rng(0)
    np.save(folder / "pictures.npy", drawn.integers(0, 255, (count, 3, 64, 64), dtype=np.uint8))
    np.save(folder / "labels.npy", np.arange(count) % 10)


def stacked(folder: Path) -> Any:
    pictures = TensorDataset(torch.from_numpy(np.load(folder / "pictures.npy")))
    return StackDataset(picture=pictures, label=np.load(folder / "labels.npy").tolist())


def parts(folder: Path) -> Any:
    whole = TensorDataset(
        *(torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("pictures", "labels"))
    )
    half = len(whole) // 2
    return ConcatDataset([Subset(whole, range(half, len(whole))), Subset(whole, range(half))])


def write_tokens(folder: Path, count: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50257, count * BLOCK + 1)
    tokens.astype(np.uint16).tofile(folder / "train.bin")


class Windows(Dataset[Any]):
    """Windows of fixed beginnings; a sampler shuffles them."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.memmap(folder / "train.bin", np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // BLOCK

    def begin(self, index: int) -> int:
        return index * BLOCK

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.begin(index)
        window = torch.from_numpy(self.tokens[begin : begin + BLOCK + 1].astype(np.int64))
        return window[:-1], window[1:]


class RandomOffsets(Windows):
    """A window that begins anywhere, another one each time."""

    def begin(self, index: int) -> int:
        return int(torch.randint(len(self.tokens) - BLOCK, ()))


class TestTorch(Compatibility):
    programs = [
        Program("torch, `StackDataset` of arrays in memory", write_arrays, stacked, samples=4000),
        Program("torch, `ConcatDataset` of `Subset`s in memory", write_arrays, parts, samples=4000),
        Program(
            "tokens in an `np.memmap`, windows of 512",
            write_tokens,
            Windows,
            samples=8000,
            needs="fixed windows, `begin = index * 512`: one that begins anywhere is refused",
        ),
    ]


def test_windows_that_begin_anywhere_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path, 9)
    with pytest.raises(hotset.NotCacheable, match="another sample each time"):
        hotset.cache(RandomOffsets(tmp_path), memory="1GiB")
