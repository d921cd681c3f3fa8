"""The format of LeRobot: rows in a Parquet file, frames in a video that are decoded by their timestamps.

The dataset is written after ``LeRobotDataset``, which this does not install: the same parts under the same
names, for one camera.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from benchmarks.operators import define_torchvision_operators

from .harness import Compatibility, Program, photograph

define_torchvision_operators()
av = pytest.importorskip("av", reason="the programs over LeRobot's format need av (PyAV)")
datasets = pytest.importorskip("datasets", reason="the programs over LeRobot's format need datasets")
v2 = pytest.importorskip(
    "torchvision.transforms.v2", reason="the programs over LeRobot's format need torchvision"
)

pytestmark = pytest.mark.compatibility

datasets.disable_progress_bars()

FPS = 10
CAMERA = "observation.images.top"


def write(folder: Path, count: int) -> None:
    with av.open(str(folder / "episode.mp4"), "w") as video:
        stream = video.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
        stream.gop_size = 10
        base = np.asarray(photograph(0, 160, 120))
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.roll(base, 3 * number, 1), format="rgb24")
            video.mux(stream.encode(frame))
        video.mux(stream.encode())
    drawn = np.random.default_rng(0)
    rows = {
        "observation.state": drawn.random((count, 6), np.float32).tolist(),
        "action": drawn.random((count, 6), np.float32).tolist(),
        "timestamp": [number / FPS for number in range(count)],
        "frame_index": list(range(count)),
    }
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / "episode.parquet"))


def decode_video_frames(path: str, timestamps: list[float]) -> torch.Tensor:
    """The frames nearest to these times, as LeRobot finds them: from the key frame before the first one."""
    frames, times = [], []
    with av.open(path) as video:
        stream = video.streams.video[0]
        stream.codec_context.thread_count = 1
        video.seek(int(min(timestamps) / stream.time_base), stream=stream, backward=True)
        for frame in video.decode(stream):
            frames.append(frame.to_ndarray(format="rgb24"))
            times.append(float(frame.pts * Fraction(stream.time_base)))
            if times[-1] >= max(timestamps) - 1e-4:
                break
    nearest = [int(np.abs(np.array(times) - time).argmin()) for time in timestamps]
    return torch.from_numpy(np.stack([frames[number] for number in nearest])).permute(0, 3, 1, 2) / 255


def to_torch(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: [torch.tensor(value) for value in column] for name, column in batch.items()}


class Episodes(Dataset[Any]):
    def __init__(self, root: Path, image_transforms: Any = None) -> None:
        self.root = root
        self.image_transforms = image_transforms
        self.hf_dataset = datasets.load_dataset(
            "parquet", data_files=str(root / "episode.parquet"), split="train", cache_dir=str(root / "hf")
        )
        self.hf_dataset.set_transform(to_torch)

    def __len__(self) -> int:
        return len(self.hf_dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.hf_dataset[index]
        frames = decode_video_frames(str(self.root / "episode.mp4"), [float(item["timestamp"])])
        item = {CAMERA: frames.squeeze(0), **item}
        if self.image_transforms is not None:
            item[CAMERA] = self.image_transforms(item[CAMERA])
        return item


jitter = functools.partial(v2.ColorJitter, brightness=(0.8, 1.2), contrast=(0.8, 1.2))


def augmented(folder: Path) -> Any:
    return Episodes(folder, v2.Compose([v2.RandomCrop((112, 152)), jitter()]))


class TestLeRobot(Compatibility):
    programs = [
        Program("LeRobot's format, frames of an mp4 by timestamp", write, Episodes, samples=400),
        Program("LeRobot's format, with random `image_transforms`", write, augmented, samples=400),
    ]
