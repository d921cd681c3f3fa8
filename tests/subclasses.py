"""Samples of tensor subclasses from torchvision and MONAI, and PIL images.

Both libraries are imported as samples are made: a process that has imported MONAI takes three times as long
to fork, and all test files are imported before any test runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image


def boxes_and_masks(index: int) -> dict[str, Any]:
    from torchvision import tv_tensors

    pixels = (torch.arange(3 * 4 * 5) + index).reshape(3, 4, 5).to(torch.uint8)
    boxes = torch.tensor([[0, 1, 2, 3], [1, 1, 3, index % 4 + 1]])
    return {
        "image": tv_tensors.Image(pixels),
        "mask": tv_tensors.Mask(pixels[0] % 2 == 0),
        "video": tv_tensors.Video(pixels.expand(2, 3, 4, 5).clone()),
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(4, 5)),
        "label": index,
    }


def boxes_that_vary(index: int) -> Any:
    """Another canvas and format for some samples: attributes, not values."""
    from torchvision import tv_tensors

    form, canvas = ("XYXY", (4, 5)) if index % 3 else ("XYWH", (9, 9))
    return tv_tensors.BoundingBoxes(torch.tensor([[0, 1, 2, index]]), format=form, canvas_size=canvas)


def meta_tensors(index: int) -> dict[str, Any]:
    from monai.data.meta_tensor import MetaTensor

    affine = torch.diag(torch.tensor([2.0, 2.0, 3.0 + index, 1.0], dtype=torch.float64))
    volume = torch.full((1, 3, 4, 2), float(index))
    meta = {"filename_or_obj": f"/data/{index}.nii", "spatial_shape": np.array([3, 4, 2])}
    return {"image": MetaTensor(volume, affine=affine, meta=meta), "label": index}


class Mask(Image.Image):
    """A picture of a class that was derived from Pillow's."""


MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16")


def images(index: int) -> list[Any]:
    """One PIL image of every mode, of another size for each sample."""
    size = (5 + index % 3, 4)
    pixels = np.arange(size[0] * size[1] * 3).reshape(size[1], size[0], 3) * 5 + index
    colour = Image.fromarray(pixels.astype(np.uint8))
    return [*(_converted(colour, mode) for mode in MODES), index]


def _converted(image: Any, mode: str) -> Any:
    if mode == "LAB":  # nothing converts to it
        return Image.frombytes("LAB", image.size, image.tobytes())
    return image.convert("L").convert(mode) if mode in ("I;16", "LA") else image.convert(mode)


def fixed_image(index: int) -> tuple[Any, int]:
    pixels = (np.arange(8 * 6 * 3).reshape(6, 8, 3) * 7 + index).astype(np.uint8)
    return Image.fromarray(pixels), index
