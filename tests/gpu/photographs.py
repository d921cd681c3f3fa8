"""A plain training loop over JPEG files, as most programs have it, with torch's loader and with hotset's.

    file ── decode, resize to 256 x 256 ──│── crop of 224, flip ──> device ──> normalised ──> network
                    cached                          live

Three epochs are timed: torch's; a later one of hotset's; and as many steps on one batch that stays on the
device, which is what the network allows. The first epoch, which fills the cache, is in the note.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import hotset
from benchmarks.operators import define_torchvision_operators
from hotset.demo.photographs import build

from .figures import Figure, Scale, ratios, seconds
from .networks import colour, sgd, training_step

define_torchvision_operators()

from torchvision import models, transforms  # noqa: E402

__all__ = ["photographs"]


class _Files(Dataset[Any]):
    def __init__(self, files: list[Path], transform: Callable[[Any], Any]) -> None:
        self.files = files
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        picture = Image.open(self.files[index]).convert("RGB")
        return self.transform(picture), index % 1000


def photographs(device: str, scale: Scale) -> Iterator[Figure]:
    """Figures of two networks."""
    count, times = scale.photographs
    resize = transforms.Resize((256, 256))
    live = [transforms.RandomCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    workers = scale.workers[-1] * 2
    more: dict[str, Any] = {
        "batch_size": scale.batch,
        "shuffle": True,
        "num_workers": workers,
        "drop_last": True,
        "pin_memory": device != "cpu",
        "persistent_workers": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(build(Path(folder), count).rglob("*.jpg")) * times
        dataset = _Files(files, transforms.Compose([resize, *live]))
        plain: Any = DataLoader(dataset, **more)
        with hotset.cache(dataset, memory="8GiB") as cached:
            ours: Any = hotset.DataLoader(cached, **more)
            for network in (models.resnet18, models.resnet50):
                yield _of(device, scale, network, plain, ours)


def _of(device: str, scale: Scale, make: Callable[[], Any], plain: Any, ours: Any) -> Figure:
    torch.manual_seed(7)
    network = make().to(device, memory_format=torch.channels_last)
    step = training_step(network, sgd(network), colour, torch.bfloat16)

    def epoch(batches: Iterable[Any]) -> None:
        for images, labels in batches:
            step(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))

    begun = time.perf_counter()
    epoch(ours)
    first = time.perf_counter() - begun
    found = ratios(device, scale.pairs, lambda: epoch(ours), lambda: epoch(plain))
    one = next(iter(plain))
    kept = [tuple(part.to(device) for part in one)] * len(plain)
    limit = statistics.median(seconds(device, lambda: epoch(kept)) for _ in range(scale.pairs))
    images = scale.batch * len(plain)
    speedups, later, theirs = found
    note = (
        f"{images / later:,.0f} images/s against {images / theirs:,.0f} with {plain.num_workers} workers; "
        f"{images / limit:,.0f} on one batch that stays; the epoch before {first / theirs:.2f} of torch's"
    )
    return Figure(
        f"photographs: {make.__name__}, hotset / torch", ">= 1", statistics.median(speedups), speedups, note
    )
