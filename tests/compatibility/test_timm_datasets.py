"""timm: its dataset of pictures in folders, with its transforms for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.operators import define_torchvision_operators

from .harness import Compatibility, Program, photograph

define_torchvision_operators()
timm_data = pytest.importorskip("timm.data", reason="the programs over timm need timm")

# timm leaves it to the garbage collector to close its files.
pytestmark = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore::ResourceWarning")]
pytestmark.append(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


def write(folder: Path, count: int) -> None:
    for number in range(count):
        file = folder / "train" / f"class{number % 3}" / f"{number:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        photograph(number % 50).save(file, quality=88)


def made(folder: Path) -> Any:
    dataset = timm_data.create_dataset("", root=str(folder), split="train")
    dataset.transform = timm_data.create_transform((3, 128, 128), is_training=True, re_prob=0.3)
    return dataset


class TestTimm(Compatibility):
    programs = [Program("timm, `create_dataset` and `create_transform` for training", write, made)]
