"""Handwritten digits in MNIST's files: a folder of them if there is one, else scikit-learn's digits as such.

An IDX file is a magic number (two zero bytes, a code for the type, the number of axes), the size of each axis
as four bytes, big-endian, and the values. MNIST is four of them: pictures ``[n, 28, 28]`` and labels ``[n]``
of unsigned bytes, for training (``train-``) and for testing (``t10k-``), compressed (``.gz``) or not.

scikit-learn brings 1,797 digits of 8 x 8 along. Where MNIST is not at hand they are written to such files,
enlarged to 24 x 24 with a margin of 2, every fifth of them for testing, and read like MNIST: the same code
runs in any case. They are few and small, so losses and accuracies are not MNIST's.

Run it: python examples/mnist.py [FOLDER]
"""

from __future__ import annotations

import gzip
import math
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

import hotset

Bytes = npt.NDArray[np.uint8]

TRAIN, TEST = "train", "t10k"
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
UNSIGNED_BYTES = 8  # IDX's code for the type
CLASSES = 10


def read_idx(path: Path, axes: int) -> Bytes:
    """The values of an IDX file of unsigned bytes; ``ValueError`` if it is anything else, or not whole."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}); fetch the file again.") from error
    header = 4 + 4 * axes
    magic = bytes([0, 0, UNSIGNED_BYTES, axes])
    if data[:4] != magic:
        gzipped = ", as compressed files do, whose names end in .gz" if data[:2] == b"\x1f\x8b" else ""
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes with {axes} axes: it begins with "
            f"{data[:4].hex(' ') or 'nothing'}{gzipped}, not with {magic.hex(' ')}."
        )
    if len(data) < header:
        raise ValueError(f"{path} ends within its header, after {len(data)} bytes; fetch the file again.")
    shape = [int(size) for size in np.frombuffer(data, ">u4", axes, offset=4)]
    expected = header + math.prod(shape)
    if len(data) != expected:
        raise ValueError(
            f"{path} has {len(data):,} bytes, and its header, which promises {shape}, needs {expected:,}; "
            "fetch the file again."
        )
    # A copy, as what lies over bytes cannot be written to, of which torch warns.
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()


def write_idx(path: Path, values: Bytes) -> None:
    """Write unsigned bytes as an IDX file, compressed if its name ends in ``.gz``."""
    sizes = np.array(values.shape, ">u4").tobytes()
    data = bytes([0, 0, UNSIGNED_BYTES, values.ndim]) + sizes + values.tobytes()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits to a folder as MNIST's four files, the same each time."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    images = np.pad(grey.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    labels = digits.target.astype(np.uint8)
    for_test = np.arange(len(labels)) % 5 == 4
    for part, chosen in ((TRAIN, ~for_test), (TEST, for_test)):
        write_idx(folder / f"{part}-{IMAGES}", images[chosen])
        write_idx(folder / f"{part}-{LABELS}", labels[chosen])


# Deterministic, so that hotset.cache keeps what they give.


def resize(picture: torch.Tensor) -> torch.Tensor:
    """uint8 (1, h, w) to float32 (1, 32, 32), still from 0 to 255, bilinearly."""
    return interpolate(picture[None].float(), (32, 32), mode="bilinear", align_corners=False)[0]


def rescale(picture: torch.Tensor) -> torch.Tensor:
    """To 0 to 1."""
    return picture / 255


def normalise(picture: torch.Tensor) -> torch.Tensor:
    """By the mean and the deviation of MNIST's pixels."""
    return (picture - 0.1307) / 0.3081


FOR_LENET = (resize, rescale, normalise)


class Mnist(Dataset[tuple[torch.Tensor, int]]):
    """One half of a folder's digits: pictures, uint8 ``(1, 28, 28)`` before the transforms, and labels.

    Args:
        folder: has MNIST's files.
        part: ``TRAIN`` or ``TEST``.
        transform: functions of a picture, one after the other.

    Raises:
        FileNotFoundError: a file is missing, with and without ``.gz``.
        ValueError: a file is not what its name says.
    """

    def __init__(
        self, folder: Path, part: str, transform: Sequence[Callable[[torch.Tensor], torch.Tensor]] = ()
    ) -> None:
        images, labels = find(folder, f"{part}-{IMAGES}"), find(folder, f"{part}-{LABELS}")
        self.images = torch.from_numpy(read_idx(images, 3))
        self.labels = torch.from_numpy(read_idx(labels, 1))
        self.transform = list(transform)
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"{images} has {len(self.images):,} pictures, and {labels} has {len(self.labels):,} labels: "
                "they are not of the same dataset."
            )
        if len(self.labels) and int(self.labels.max()) >= CLASSES:
            raise ValueError(f"{labels} has a label {int(self.labels.max())}; digits go from 0 to 9.")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.images[index][None]
        for function in self.transform:
            picture = function(picture)
        return picture, int(self.labels[index])


def find(folder: Path, name: str) -> Path:
    """A file of this name in a folder, or its compressed form."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no {name} and no {name}.gz in {folder}; name a folder that has one.")


def open_digits(folder: str | Path | None, transform: Any = FOR_LENET) -> tuple[Mnist, Mnist]:
    """Digits for training and for testing: a folder's, or scikit-learn's if none is given."""
    if folder is not None:
        return Mnist(Path(folder), TRAIN, transform), Mnist(Path(folder), TEST, transform)
    with tempfile.TemporaryDirectory() as own:
        write_digits(Path(own))
        return open_digits(own, transform)


def main() -> None:
    for digits in open_digits(sys.argv[1] if len(sys.argv) > 1 else None):
        counts = torch.bincount(digits.labels, minlength=CLASSES).tolist()
        print(f"{len(digits):,} pictures of {tuple(digits.images.shape[1:])}, of each digit {counts}")
        print(hotset.cache(digits).plan)


if __name__ == "__main__":
    main()
