"""Live transforms, collate and worker functions; the numbers that a transform draws show in its sample.

So a wrong draw, or a draw in another order or another worker, is a wrong batch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import seed_everything
from sources import ReadLog
from torch.utils.data import get_worker_info


def _tagged(sample: Any, drawn: Any) -> Any:
    return {"sample": sample, "drawn": drawn}


def draw_random(sample: Any) -> Any:
    return _tagged(sample, (random.random(), random.randrange(1000)))


def draw_numpy(sample: Any) -> Any:
    return _tagged(sample, np.random.rand(2))


def draw_torch(sample: Any) -> Any:
    return _tagged(sample, torch.rand(2))


def draw_all(sample: Any) -> Any:
    return draw_random(draw_numpy(draw_torch(sample)))


def flip_and_crop(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """An augmentation as users write it: in place on the sample, which must therefore be the caller's own."""
    image, label = sample
    if torch.rand(()) < 0.5:
        image.copy_(image.flip(-1).clone())
    top = int(torch.randint(0, 3, ()))
    image.mul_(1 + np.random.randint(3))
    return image[:, top : top + 3], label + random.randrange(100)


def tag_worker(sample: Any) -> Any:
    info = get_worker_info()
    return _tagged(sample, (-1, 0) if info is None else (info.id, info.seed % 2**62))


class HeldGenerator:
    """A suffix with RNGs of its own, and a counter."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(11)
        self.generator = torch.Generator().manual_seed(12)
        self.calls = 0

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        return _tagged(sample, (self.rng.random(), torch.rand(2, generator=self.generator), self.calls))


class LoggedCalls:
    """A deterministic transform whose calls are counted across processes."""

    def __init__(self, log: ReadLog) -> None:
        self.log = log

    def __call__(self, sample: Any) -> Any:
        self.log.add(0)
        image, label = sample
        return image.to(torch.float32) / 2, label


class Compose:
    """The usual container of transforms."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def halve(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    image, label = sample
    return image.to(torch.float32) / 2, label


def image_jitter(image: torch.Tensor) -> torch.Tensor:
    return image + torch.randint(0, 100, (), dtype=torch.int64)


def image_to_float(image: torch.Tensor) -> torch.Tensor:
    return image.to(torch.float32) / 4


def describe_samples(samples: list[Any]) -> list[Any]:
    """A collate_fn of the user's: proves that it is given the samples themselves, in a list."""
    assert type(samples) is list
    return [(type(sample).__name__, sample) for sample in samples]


def keep_first(samples: list[Any]) -> Any:
    return samples[0]


class WritesWorker:
    """A worker_init_fn that writes to files what it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        seen = f"{worker_id} {info.id} {info.num_workers} {type(info.dataset).__name__} {len(info.dataset)}"  # type: ignore[arg-type]
        (self.folder / f"worker-{worker_id}-{os.getpid()}").write_text(f"{seen} {info.seed}")


def reseed_worker(worker_id: int) -> None:
    seed_everything(9000 + worker_id)
