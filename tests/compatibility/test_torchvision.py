"""torchvision: a folder of pictures, and a detection dataset under the second version of its transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.operators import define_torchvision_operators

from .harness import Compatibility, Program, photograph

define_torchvision_operators()
pytest.importorskip("torchvision", reason="the programs over torchvision need torchvision")

from torchvision import datasets, tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

pytestmark = pytest.mark.compatibility

BOX = "<bndbox><xmin>{0}</xmin><ymin>{0}</ymin><xmax>{1}</xmax><ymax>{1}</ymax></bndbox>"


def write_folder(folder: Path, count: int) -> None:
    for number in range(count):
        file = folder / f"class{number % 3}" / f"{number:05}.jpg"
        file.parent.mkdir(exist_ok=True)
        photograph(number % 50).save(file, quality=88)


def image_folder(folder: Path) -> Any:
    return datasets.ImageFolder(
        str(folder),
        transform=v2.Compose(
            [
                v2.RandomResizedCrop(128, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
            ]
        ),
    )


def write_detection(folder: Path, count: int) -> None:
    root = folder / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / name).mkdir(parents=True)
    for number in range(count):
        photograph(number % 50).save(root / "JPEGImages" / f"{number:05}.jpg", quality=88)
        objects = "".join(
            f"<object><name>cat</name>{BOX.format(5 + each, 90 + number % 50)}</object>"
            for each in range(1 + number % 3)
        )
        size = "<size><width>320</width><height>240</height><depth>3</depth></size>"
        (root / "Annotations" / f"{number:05}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
    names = "\n".join(f"{number:05}" for number in range(count))
    (root / "ImageSets" / "Main" / "train.txt").write_text(names)


def detection(folder: Path) -> Any:
    transforms = v2.Compose(
        [
            v2.Resize((160, 200)),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    found = datasets.VOCDetection(str(folder), "2012", "train", transforms=transforms)
    return datasets.wrap_dataset_for_transforms_v2(found, target_keys=("boxes", "labels"))


def batch_of_lists(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


class TestTorchvision(Compatibility):
    programs = [
        Program("torchvision, `ImageFolder`, RandomResizedCrop and flip (v2)", write_folder, image_folder),
        Program(
            "torchvision, `wrap_dataset_for_transforms_v2(VOCDetection)`, resize and flip",
            write_detection,
            detection,
            loader={"collate_fn": batch_of_lists},
        ),
    ]


def test_boxes_are_flipped_with_their_picture(tmp_path: Path) -> None:
    write_detection(tmp_path, 2)
    picture, target = detection(tmp_path)[0]
    assert type(picture) is tv_tensors.Image
    assert type(target["boxes"]) is tv_tensors.BoundingBoxes
