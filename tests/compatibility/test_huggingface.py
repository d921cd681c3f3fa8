"""Datasets of Hugging Face: rows, rows as tensors, and pictures with a transform of batches."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.operators import define_torchvision_operators

from .harness import Compatibility, Program, photograph

define_torchvision_operators()
datasets = pytest.importorskip("datasets", reason="the programs over Hugging Face datasets need datasets")
v2 = pytest.importorskip("torchvision.transforms.v2", reason="one of the programs needs torchvision")

pytestmark = pytest.mark.compatibility

datasets.disable_progress_bars()


def write_rows(folder: Path, count: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50257, (count, 128)).tolist()
    made = datasets.Dataset.from_dict({"input_ids": tokens, "label": list(range(count))})
    made.save_to_disk(str(folder / "rows"))


def rows(folder: Path) -> Any:
    return datasets.load_from_disk(str(folder / "rows"))


def tensors(folder: Path) -> Any:
    return rows(folder).with_format("torch")


def write_pictures(folder: Path, count: int) -> None:
    files = []
    for number in range(count):
        file = io.BytesIO()
        photograph(number % 50).save(file, "JPEG", quality=88)
        files.append({"bytes": file.getvalue(), "path": None})
    made = datasets.Dataset.from_dict({"image": files, "label": [number % 10 for number in range(count)]})
    made.cast_column("image", datasets.Image()).save_to_disk(str(folder / "pictures"))


CROP = v2.Compose([v2.RandomResizedCrop(128, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()])


def augmented(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {"pixels": [CROP(picture.convert("RGB")) for picture in batch["image"]], "label": batch["label"]}


def pictures(folder: Path) -> Any:
    return datasets.load_from_disk(str(folder / "pictures")).with_transform(augmented)


def stacked(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return ids, torch.tensor([sample["label"] for sample in samples])


class TestHuggingFace(Compatibility):
    programs = [
        Program(
            "Hugging Face datasets, rows of 128 integers",
            write_rows,
            rows,
            samples=4000,
            loader={"collate_fn": stacked},
        ),
        Program('Hugging Face datasets, `with_format("torch")`', write_rows, tensors, samples=4000),
        Program(
            "Hugging Face datasets, pictures, `with_transform` of RandomResizedCrop", write_pictures, pictures
        ),
    ]
