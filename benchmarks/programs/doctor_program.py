"""Trainings that are bound by one thing each, for ``hotset doctor`` to judge and to be run as it advises.

``python doctor_program.py PIPELINE WORKERS SECONDS FOLDER [--cached | --cached-torch]`` trains for so long,
and prints samples a second of whole epochs: what workers take to start and to end counts. The first epoch,
of a process that must import much, does not. With ``--cached-torch`` the loader over the cache is torch's.
With ``--watching``, in the environment that ``hotset doctor`` gives, every second epoch is one without its
clocks, and it prints how much faster those are, of each pair.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.data import photographs


class Rows(Dataset[Any]):
    """``kind`` says what a sample costs."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.files = photographs(folder, 300) if kind in ("decode", "picture") else _arrays(folder)

    def __len__(self) -> int:
        return {"small": 20_000, "collate": 8_000, "large": 400, "picture": 400}.get(self.kind, 600)

    def __getitem__(self, index: int) -> Any:
        return getattr(self, f"_{self.kind}")(index)

    def _read(self, index: int) -> Any:
        return torch.from_numpy(np.fromfile(self.files[index % len(self.files)], np.uint8))

    def _wait(self, index: int) -> Any:
        time.sleep(4e-3)
        return torch.full((3, 64, 64), index % 256, dtype=torch.uint8)

    def _decode(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            return torch.from_numpy(np.array(image.convert("RGB").resize((224, 224))))

    def _picture(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            return image.convert("RGB")

    def _small(self, index: int) -> Any:
        return torch.full((52,), float(index)), index

    def _collate(self, index: int) -> Any:
        return list(range(index % 60, index % 60 + 40))

    def _large(self, index: int) -> Any:
        return torch.full((3, 512, 512), float(index))


def _arrays(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.bin" for number in range(200)]
    for path in paths:
        if not path.exists():
            np.full(150_528, 7, np.uint8).tofile(path)
    return [str(path) for path in paths]


def flip(sample: torch.Tensor) -> torch.Tensor:
    """A random transform that is live after a cache, with some arithmetic."""
    moved = sample.flip(0) if torch.rand(()) < 0.5 else sample
    return moved.float().div(255).sub(0.5).mul(2.0)


def cut(picture: Any) -> torch.Tensor:
    """A random square of a picture, of another size."""
    x, y = (float(torch.rand(())) * 0.3 * size for size in picture.size)
    box = (x, y, x + 0.7 * picture.width, y + 0.7 * picture.height)
    return torch.from_numpy(np.array(picture.resize((96, 96), box=box))).permute(2, 0, 1).float()


class Transformed(Dataset[Any]):
    """Decoded pictures with a transform at their end, as torchvision's datasets have it."""

    def __init__(self, kind: str, folder: Path, transform: Callable[[Any], torch.Tensor]) -> None:
        self.rows = Rows(kind, folder)
        self.transform: Any = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.rows[index])


def padded(samples: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, samples))
    return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in samples])


def compute(seconds: float, batch: Any) -> None:
    """A step on this machine's processors; it takes about as long on one core that is free."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.ones(64).sum()


def rest(seconds: float, batch: Any) -> None:
    """A step on a device: this process waits for it."""
    time.sleep(seconds)


# Name: kind of sample, batch size, step.
PIPELINES: dict[str, tuple[str, int, Any]] = {
    "read": ("read", 32, functools.partial(rest, 1e-3)),
    "wait": ("wait", 16, functools.partial(rest, 4e-3)),
    "decode": ("decode", 16, functools.partial(rest, 4e-3)),
    "live": ("flipped", 16, functools.partial(rest, 2e-3)),
    "short": ("cut", 32, functools.partial(rest, 2e-3)),
    "collate": ("collate", 64, functools.partial(rest, 1e-3)),
    "small": ("small", 256, functools.partial(rest, 1e-3)),
    "large": ("large", 8, functools.partial(rest, 2e-3)),
    "step": ("decode", 16, functools.partial(compute, 60e-3)),
    "device": ("decode", 16, functools.partial(rest, 80e-3)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pipeline", choices=PIPELINES)
    parser.add_argument("workers", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--cached-torch", action="store_true")
    parser.add_argument("--watching", action="store_true")
    asked = parser.parse_args()
    kind, batch_size, step = PIPELINES[asked.pipeline]
    dataset: Any = Rows(kind, asked.folder)
    if kind in ("flipped", "cut"):
        of, transform = {"flipped": ("decode", flip), "cut": ("picture", cut)}[kind]
        dataset = Transformed(of, asked.folder, transform)
    loader_kind: Any = DataLoader
    if asked.cached or asked.cached_torch:
        import hotset

        dataset = hotset.cache(dataset, memory="2GiB")
        dataset.fill()
        loader_kind = hotset.DataLoader if asked.cached else DataLoader
    collate = {"collate_fn": padded} if kind == "collate" else {}
    loader = loader_kind(
        dataset, batch_size=batch_size, shuffle=True, drop_last=True, num_workers=asked.workers, **collate
    )

    def epoch() -> float:
        start = time.perf_counter()
        for batch in loader:
            step(batch)
        return time.perf_counter() - start

    if asked.watching:
        print(json.dumps({"ratios": watched_over_plain(epoch, asked.seconds)}), flush=True)
        return
    epoch()
    epochs: list[float] = []
    while sum(epochs) < asked.seconds:
        epochs.append(epoch())
    samples = len(epochs) * len(loader) * batch_size
    print(json.dumps({"rate": samples / sum(epochs)}), flush=True)


def watched_over_plain(epoch: Callable[[], float], seconds: float) -> list[float]:
    """The time of an epoch with clocks, as a multiple of one without, of pairs in turns."""
    from hotset.run.doctor.watch import installed

    watch = installed()
    assert watch is not None, "the environment is that of hotset doctor"

    def timed(off: bool) -> float:
        watch.is_off = off  # workers are forked at the beginning of each epoch
        return epoch()

    timed(False)
    ratios, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds or len(ratios) < 9:
        first = len(ratios) % 2 == 1
        one, other = timed(first), timed(not first)
        ratios.append(other / one if first else one / other)
    return ratios


if __name__ == "__main__":
    main()
