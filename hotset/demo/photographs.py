"""Photographs to train on: crops of real photographs, or the images in any folder of the user's.

The demo measures decoding, and noise or flat colour decodes unlike a photograph. So the demo makes crops of
the six real photographs in the packages of scikit-learn and scikit-image: nothing is downloaded, and each
JPEG takes as long to decode as a camera's. A crop's class is the photograph that it is from; a small network
learns these classes within an epoch or two.

The layout is torchvision's ``ImageFolder``: one subfolder per class.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import Dataset

from hotset.errors import ArgumentError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Photographs", "build"]

_QUALITY = 90  # of a JPEG
_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})


def build(
    folder: Path,
    count: int = 2000,
    size: int = 512,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write ``count`` JPEGs, ``folder/<class>/<nnnn>.jpg``, and return ``folder``.

    Each is a square crop at a random place, its side random between half and the whole of the photograph's
    shorter side, resized to ``size`` by ``size`` pixels, RGB. The six classes share ``count`` evenly. Image
    ``i`` depends on ``i`` alone, so a smaller count is a prefix of a larger one.

    Args:
        folder: made if it is missing; files of the same names are overwritten.
        count: images in all, at least 1.
        size: side of an image in pixels.
        progress: called in this thread with the number of images written so far.

    Raises:
        ArgumentError: ``count`` or ``size`` below 1.
        ImportError: scikit-learn, scikit-image or Pillow is missing.
        OSError: no room in the folder, or no right to write there.

    Example:
        >>> build(Path("/tmp/photographs"), count=60)
        PosixPath('/tmp/photographs')
    """
    if count < 1 or size < 1:
        raise ArgumentError(f"count={count} and size={size} must both be at least 1.")
    sources = list(_bundled().items())
    for name, _ in sources:
        (folder / name).mkdir(parents=True, exist_ok=True)

    def write(i: int) -> None:
        name, photograph = sources[i % len(sources)]
        crop = _crop(photograph, size, np.random.default_rng([0, i]))
        crop.save(folder / name / f"{i // len(sources):04d}.jpg", quality=_QUALITY)

    # Threads, not processes: Pillow resizes and encodes without the GIL, threads start at once, and after
    # Ctrl-C it is enough to cancel the calls that have not begun.
    executor = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
    try:
        for done, _ in enumerate(executor.map(write, range(count)), start=1):
            if progress is not None:
                progress(done)
    finally:
        executor.shutdown(cancel_futures=True)
    return folder


def _bundled() -> dict[str, Image]:
    """Return the photographs, RGB, by class name in alphabetical order."""
    from PIL import Image
    from skimage import data
    from sklearn.datasets import load_sample_images

    samples = load_sample_images()
    arrays = {Path(path).stem: array for path, array in zip(samples.filenames, samples.images, strict=True)}
    arrays |= {name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")}
    return {name: Image.fromarray(arrays[name]) for name in sorted(arrays)}


def _crop(photograph: Image, size: int, rng: np.random.Generator) -> Image:
    from PIL import Image

    shorter = min(photograph.size)
    side = rng.uniform(shorter / 2, shorter)
    left = rng.uniform(0, photograph.width - side)
    upper = rng.uniform(0, photograph.height - side)
    box = (left, upper, left + side, upper + side)
    return photograph.resize((size, size), Image.Resampling.BICUBIC, box=box)


class Photographs(Dataset[tuple[str, int]]):
    """A map-style dataset over a folder of class subfolders: ``ds[i]`` is ``(path, class index)``.

    It reads names only, so that decoding is a step of its own whose result a cache can hold. Classes are the
    subfolders that hold images at any depth (jpg, jpeg, png, webp, in upper or lower case), sorted by name
    as ``ImageFolder`` sorts them; hidden subfolders are skipped.

    Attributes:
        classes: class names; the index of one is its label.
        samples: every ``(path, class index)``.

    Raises:
        ArgumentError: ``folder`` is missing, is not a folder, has no subfolders, or they hold no image.

    Example:
        >>> Photographs(Path("/tmp/photographs"))[0]
        ('/tmp/photographs/astronaut/0000.jpg', 0)
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise ArgumentError(f"{folder} {what}; {_WANTED}")
        candidates = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        if not candidates:
            raise ArgumentError(f"{folder} has no subfolders; {_WANTED}")
        images = {p.name: found for p in candidates if (found := _images(p))}
        if not images:
            raise ArgumentError(f"no subfolder of {folder} holds an image; {_WANTED}")
        self.classes = list(images)
        self.samples = [(str(path), label) for label, found in enumerate(images.values()) for path in found]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.samples[index]


_WANTED = "give a folder with one subfolder of images (jpg, jpeg, png or webp) per class."


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
