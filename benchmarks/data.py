"""The datasets: six kinds of sample, each labelled with its own index, so that a batch can be checked.

| samples            | shape                       | what they stand for                                |
|--------------------|-----------------------------|----------------------------------------------------|
| images             | 3x224x224 uint8, 150,528 B  | decoded pictures: copying is the whole work        |
| kilobytes          | 256 float32, 1,024 B        | embeddings, feature rows                           |
| bytes              | 210 uint8                   | tables: the price of *anything* per row shows      |
| photographs        | JPEG files of 512x512       | a source that costs: decode and resize             |
| ragged             | uint8 of any length         | the same files undecoded, tokens, audio            |
| molecules          | (n_atoms, 3) float32        | small and of different lengths, to be padded       |

Fixed rows hold noise from a fixed seed: no two are alike, so a wrong row is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

__all__ = [
    "CROP",
    "Counted",
    "Files",
    "Generated",
    "Photographs",
    "Samples",
    "byte_rows",
    "decode",
    "flip_and_crop",
    "image_rows",
    "kilobyte_rows",
    "molecules",
    "photographs",
    "ragged_samples",
]

Array = npt.NDArray[Any]
Sample = tuple[Any, int]

CROP = 192
_IMAGE = (3, 224, 224)


def image_rows(count: int) -> torch.Tensor:
    """Return uint8 ``(count, 3, 224, 224)``."""
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (count, *_IMAGE), dtype=np.uint8))


def byte_rows(count: int) -> torch.Tensor:
    """Return uint8 ``(count, 210)``."""
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (count, 210), dtype=np.uint8))


def kilobyte_rows(count: int) -> torch.Tensor:
    """Return float32 ``(count, 256)``."""
    return torch.from_numpy(np.random.default_rng(2).standard_normal((count, 256), dtype=np.float32))


def ragged_samples(total: int, mean: int) -> list[torch.Tensor]:
    """Return uint8 vectors of ``total`` bytes in all, their lengths even between half and 1.5 ``mean``."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(mean // 2, mean * 3 // 2, max(2, total // mean))
    flat = torch.from_numpy(rng.integers(0, 256, int(lengths.sum()), dtype=np.uint8))
    return list(torch.split(flat, lengths.tolist()))


def molecules(count: int) -> list[torch.Tensor]:
    """Return float32 ``(n_atoms, 3)`` positions of molecules with 3 to 29 atoms, as QM9's have."""
    rng = np.random.default_rng(4)
    sizes = rng.integers(3, 30, count)
    flat = torch.from_numpy(rng.standard_normal((int(sizes.sum()), 3), dtype=np.float32))
    return list(torch.split(flat, sizes.tolist()))


def photographs(folder: Path, count: int) -> list[Path]:
    """Return ``count`` JPEG files below ``folder``, where they are written if they are not there yet."""
    from hotset.demo.photographs import build

    # A folder of its own for each count: a run that was interrupted while writing leaves no full folder.
    target = folder / f"photographs-{count}"
    files = sorted(target.rglob("*.jpg"))
    return files if len(files) == count else sorted(build(target, count=count).rglob("*.jpg"))


class Samples(Dataset[Sample]):
    """``(values[i], i)`` out of the main memory, with a live ``suffix`` where one is given."""

    def __init__(
        self, values: Sequence[Any] | torch.Tensor, suffix: Callable[[Sample], Sample] | None = None
    ) -> None:
        self._values = values
        self._suffix = suffix

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, i: int) -> Sample:
        sample = self._values[i], i
        return self._suffix(sample) if self._suffix is not None else sample


class Files(Dataset[Sample]):
    """``(bytes, i)``: a file as it is, a one-dimensional uint8 array."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(file) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> Sample:
        return np.fromfile(self._files[i], dtype=np.uint8), i


class Photographs(Files):
    """``(picture, i)``: a JPEG file decoded and resized to 224x224, uint8 ``(3, 224, 224)``."""

    def __getitem__(self, i: int) -> Sample:
        return decode(self._files[i]), i


class Generated(Dataset[Sample]):
    """``(image, i)`` made on the spot: a source that keeps nothing in memory."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self._count:
            raise IndexError(i)
        return torch.from_numpy(np.random.default_rng(i).integers(0, 256, _IMAGE, dtype=np.uint8)), i


class Counted(Dataset[Sample]):
    """The samples of another dataset; each reading adds a byte to a file, which all processes share."""

    def __init__(self, samples: Generated | Photographs, log: Path) -> None:
        self._samples = samples
        # The name keeps it out of the identity: the file changes with every reading.
        self._hotset_log = str(log)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Sample:
        fd = os.open(self._hotset_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, b".")
        os.close(fd)
        return self._samples[i]


def decode(file: str | BinaryIO) -> torch.Tensor:
    """Return the picture in ``file``, resized to 224x224: uint8 ``(3, 224, 224)``, contiguous."""
    from PIL import Image

    with Image.open(file) as picture:
        resized = picture.convert("RGB").resize((_IMAGE[2], _IMAGE[1]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def flip_and_crop(sample: Sample) -> Sample:
    """Cut a random square of ``CROP`` pixels out of a picture, and flip every other one left to right."""
    picture, i = sample
    y, x = torch.randint(0, picture.shape[1] - CROP + 1, (2,)).tolist()
    crop = picture[:, y : y + CROP, x : x + CROP]
    return (crop.flip(2) if torch.rand(()) < 0.5 else crop), i
