"""Five rows of CIFAR-10 through a rescale, cached in a session: the quick start's training script.

The dataset is CIFAR-10's binary version: files data_batch_1.bin to data_batch_5.bin, in them records of
3,073 bytes: the label, then 32 x 32 pixels of red, of green, of blue. Without a folder of it, a small one is
written in that format from photographs that scikit-learn and scikit-image bring along.

Run it: examples/quickstart_session.sh, which also makes the session     (Pillow, scikit-learn, scikit-image)
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

import hotset
from hotset.demo.photographs import Photographs, build

SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
Sample = dict[str, Any]


class Cifar10(Dataset[Sample]):
    """The first rows of CIFAR-10's binary files: ``{"image": uint8 (32, 32, 3), "label": int}``."""

    def __init__(self, folder: Path, num_samples: int) -> None:
        self.places = [
            (str(file), offset)
            for file in sorted(folder.glob("data_batch_*.bin"))
            for offset in range(0, file.stat().st_size, RECORD)
        ][:num_samples]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        file, offset = self.places[index]
        record = np.fromfile(file, np.uint8, RECORD, offset=offset)
        planes = torch.from_numpy(record[1:]).view(3, SIDE, SIDE)
        return {"image": planes.permute(1, 2, 0).contiguous(), "label": int(record[0])}


@hotset.deterministic
def rescale(sample: Sample) -> Sample:
    """Pixels from 0 to 255 become -1.0 to 0.0, float32."""
    return {**sample, "image": sample["image"] * (1.0 / 255.0) - 1.0}


def write_cifar10(folder: Path, rows: int) -> Path:
    """Write as many photographs into data_batch_1.bin, in the format of CIFAR-10."""
    with tempfile.TemporaryDirectory() as temporary:
        photographs = Photographs(build(Path(temporary), count=rows, size=SIDE))
        records = b""
        for path, label in photographs.samples:
            with Image.open(path) as image:
                pixels = np.asarray(image)
            records += bytes([label]) + pixels.transpose(2, 0, 1).tobytes()
    (folder / "data_batch_1.bin").write_bytes(records)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="five rows of CIFAR-10, cached in a session")
    parser.add_argument("--session-id", required=True, help="name or number of the session")
    parser.add_argument("--dataset-dir", type=Path, help="cifar-10-batches-bin")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        data = Cifar10(words.dataset_dir or write_cifar10(Path(temporary), rows=60), num_samples=5)
        with hotset.cache(data, transform=rescale, session=words.session_id) as cached:
            # batch_size=None: single samples, as they are.
            for number, item in enumerate(hotset.DataLoader(cached, batch_size=None)):
                print(f"{number} image shape: {tuple(item['image'].shape)}")


if __name__ == "__main__":
    main()
