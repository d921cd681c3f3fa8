"""MONAI: volumes in NIfTI files, under a chain of dictionary transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.operators import define_torchvision_operators

from .harness import Compatibility, Program

define_torchvision_operators()
data = pytest.importorskip("monai.data", reason="the programs over MONAI need monai")
monai = pytest.importorskip("monai.transforms", reason="the programs over MONAI need monai")
nibabel = pytest.importorskip("nibabel", reason="the programs over MONAI need nibabel")

pytestmark = pytest.mark.compatibility

KEYS = ("image", "label")


def write(folder: Path, count: int) -> None:
    drawn = np.random.default_rng(0)
    for number in range(count):
        for key in KEYS:
            volume = drawn.integers(0, 200, (40, 40, 24)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), folder / f"{key}{number:04}.nii.gz")


def volumes(folder: Path) -> Any:
    images = sorted(map(str, folder.glob("image*")))
    files = [{"image": image, "label": image.replace("image0", "label0")} for image in images]
    chain = monai.Compose(
        [
            monai.LoadImaged(KEYS),
            monai.EnsureChannelFirstd(KEYS),
            monai.Spacingd(KEYS, (1.0, 1.0, 1.5), mode=("bilinear", "nearest")),
            monai.ScaleIntensityd("image"),
            monai.RandSpatialCropd(KEYS, (24, 24, 12), random_size=False),
            monai.RandFlipd(KEYS, prob=0.5, spatial_axis=0),
            monai.EnsureTyped(KEYS, track_meta=False),  # the record of operations holds addresses
        ]
    )
    chain.set_random_state(seed=7)
    return data.Dataset(files, chain)


class TestMONAI(Compatibility):
    programs = [
        Program(
            "MONAI, `Dataset` of NIfTI volumes, spacing, random crop and flip",
            write,
            volumes,
            samples=100,
            loader={"collate_fn": data.list_data_collate, "batch_size": 4},
        )
    ]
