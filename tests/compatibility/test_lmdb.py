"""LMDB: an environment that is opened at once, and one that each process opens when it reads first."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from .harness import SPAWNED, Compatibility, Program, photograph

lmdb = pytest.importorskip("lmdb", reason="the programs over LMDB need lmdb")

pytestmark = pytest.mark.compatibility


def write(folder: Path, count: int) -> None:
    environment = lmdb.open(str(folder / "pictures"), map_size=1 << 30)
    with environment.begin(write=True) as transaction:
        for number in range(count):
            file = io.BytesIO()
            photograph(number % 50).save(file, "JPEG")
            transaction.put(f"{number:08}".encode(), file.getvalue())
    environment.close()


def opened(folder: Path) -> Any:
    return lmdb.open(str(folder / "pictures"), readonly=True, lock=False, readahead=False)


class Lazy(Dataset[Any]):
    """Opens the environment when it reads first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: Any = None
        environment = opened(folder)
        self.length = environment.stat()["entries"]
        environment.close()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.environment is None:
            self.environment = opened(self.folder)
        with self.environment.begin(buffers=True) as transaction:
            encoded = transaction.get(f"{index:08}".encode())
            picture = Image.open(io.BytesIO(encoded)).convert("RGB").resize((160, 120))
        return torch.from_numpy(np.array(picture)), index % 10


class Opened(Lazy):
    """Opens the environment in ``__init__``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment = opened(folder)


def mirrored(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    picture, label = sample
    return (picture.flip(1) if random.random() < 0.5 else picture), label


class Augmented(Lazy):
    """Keeps its transform as an attribute, as torchvision's datasets do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.transform = mirrored

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(super().__getitem__(index))


class TestLMDB(Compatibility):
    programs = [
        Program("LMDB, environment opened in `__init__`", write, Opened),
        Program("LMDB, environment opened when it is read first", write, Lazy),
        Program("LMDB, random `transform`", write, Augmented),
        Program("LMDB, random `transform`, spawned workers", write, Augmented, loader=SPAWNED),
    ]
