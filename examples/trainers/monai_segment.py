"""Segmentation of volumes with MONAI's dictionary transforms, and random patches of them.

In place of MONAI's ``CacheDataset``, which each rank fills for itself: what precedes the first random
transform is kept once for the machine.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from common import Epochs, arguments

# isort: split
import monai
import nibabel
import numpy as np
import torch
from monai import transforms
from monai.data import DataLoader, Dataset

import hotset

SIDE = 64


def volumes(folder: Path, count: int) -> list[dict[str, str]]:
    """So many compressed NIfTI volumes, each with a mask."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        voxels = rng.normal(size=(SIDE, SIDE, SIDE)).astype(np.float32)
        pair = {"image": voxels, "label": (voxels > 1).astype(np.uint8)}
        files = {key: folder / f"{key}{number:03}.nii.gz" for key in pair}
        for key, file in files.items():
            if not file.exists():
                nibabel.save(nibabel.Nifti1Image(pair[key], np.eye(4)), file)
        found.append({key: str(file) for key, file in files.items()})
    return found


def main() -> None:
    given, told = arguments(), Epochs()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    monai.utils.set_determinism(0)
    keys = ["image", "label"]
    transform = transforms.Compose(
        [
            transforms.LoadImaged(keys),
            transforms.EnsureChannelFirstd(keys),
            transforms.Spacingd(keys, pixdim=(1.5, 1.5, 1.5), mode=("bilinear", "nearest")),
            transforms.ScaleIntensityd("image"),
            transforms.RandSpatialCropd(keys, (32, 32, 32), random_size=False),
            transforms.RandFlipd(keys, prob=0.5),
        ]
    )
    dataset: Any = Dataset(volumes(given.folder / "volumes", max(given.samples // 16, 2)), transform)
    if given.hotset:
        dataset = hotset.cache(dataset)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=given.workers)
    net = monai.networks.nets.BasicUNet(3, 1, 2, features=(8, 8, 8, 8, 8, 8))
    loss_of, optimizer = (
        monai.losses.DiceCELoss(to_onehot_y=True, softmax=True),
        torch.optim.SGD(net.parameters(), 0.01),
    )
    for _ in range(given.epochs):
        told.begin()
        for batch in loader:
            loss = loss_of(net(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.step(loss.item())
        told.end()


if __name__ == "__main__":
    main()
