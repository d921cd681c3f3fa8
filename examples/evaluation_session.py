"""Evaluation during training: what is evaluated on is the same after every epoch, down to the last transform.

So the cache comes after the last transform: decode, resize, centre crop and normalise are computed for the
first evaluation, and never again, also not by the next job of the session. The training data has random
transforms, and is loaded the same way in both trainings.

    photographs ── decode ── resize ── centre crop ── normalise ──┤ cache ├── batches ── small ResNet

Run it: examples/evaluation_session.sh, which also makes the session       (Pillow, scikit-learn,
scikit-image, matplotlib; a minute)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import descend, draw_epochs, print_table
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import hotset
from hotset.demo.photographs import Photographs, build

RESIZED, CROPPED = 72, 64
MEAN, STD = torch.tensor([123.7, 116.3, 103.5]).view(3, 1, 1), torch.tensor([58.4, 57.1, 57.4]).view(3, 1, 1)
LEARNING_RATE = 0.02


# ---- data ------------------------------------------------------------------------------------------------


@hotset.deterministic
def decode(path: str) -> Image.Image:
    with Image.open(path) as image:
        decoded: Image.Image = image.convert("RGB")
    return decoded


@hotset.deterministic
def resize(image: Image.Image) -> Image.Image:
    return image.resize((RESIZED, RESIZED), Image.Resampling.BILINEAR)


@hotset.deterministic
def centre_crop(image: Image.Image) -> Image.Image:
    edge = (RESIZED - CROPPED) // 2
    return image.crop((edge, edge, edge + CROPPED, edge + CROPPED))


@hotset.nondeterministic
def random_crop(image: Image.Image) -> Image.Image:
    left, top = torch.randint(RESIZED - CROPPED + 1, (2,)).tolist()
    return image.crop((left, top, left + CROPPED, top + CROPPED))


@hotset.deterministic
def normalise(image: Image.Image) -> torch.Tensor:
    """float32, (3, 64, 64)."""
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) - MEAN) / STD


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Photographs through a chain of transforms, one after the other."""

    def __init__(self, samples: list[tuple[str, int]], transforms: list[Callable[[Any], Any]]) -> None:
        self.samples = samples
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        value, label = self.samples[index]
        for transform in self.transforms:
            value = transform(value)
        return value, label  # type: ignore[return-value]


# ---- network ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.around = nn.Conv2d(width_in, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


def small_resnet(classes: int) -> nn.Module:
    """ResNet-18's eight blocks at a quarter of their width: 0.7 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 7, 2, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    width_in = 16
    for width, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
        layers += [Block(width_in, width, stride), Block(width, width, 1)]
        width_in = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, classes))


# ---- training and evaluation -----------------------------------------------------------------------------


class Epoch(NamedTuple):
    """What an epoch came to, and how many seconds its evaluation took."""

    loss: float
    accuracy: float
    eval_seconds: float


def train(loader: Iterable[Any], evaluated: Iterable[Any], epochs: int, classes: int) -> list[Epoch]:
    """Train from a fixed start, and evaluate after each epoch."""
    torch.manual_seed(0)
    net = small_resnet(classes)
    found = []
    for number in range(epochs):
        losses = [descend(net.train(), pictures, labels, LEARNING_RATE) for pictures, labels in loader]
        begin = time.perf_counter()
        accuracy = evaluate(net.eval(), evaluated)
        found.append(Epoch(statistics.fmean(losses), accuracy, time.perf_counter() - begin))
        print("epoch: {}, loss: {:.4f}, acc: {:.4f}, eval_cost: {:.2f}".format(number, *found[-1]))
    return found


@torch.no_grad()
def evaluate(net: nn.Module, evaluated: Iterable[Any]) -> float:
    right = total = 0
    for pictures, labels in evaluated:
        right += int((net(pictures).argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def run(words: argparse.Namespace, folder: Path) -> dict[str, list[Epoch]]:
    """Train without and with the cache."""
    photographs = Photographs(build(folder, count=words.train + words.evaluate, size=words.size))
    order = np.random.default_rng(0).permutation(len(photographs)).tolist()
    samples = [photographs.samples[i] for i in order]
    training = Pictures(samples[: words.train], [decode, resize, random_crop, normalise])
    evaluation = Pictures(samples[words.train :], [decode, resize, centre_crop, normalise])
    loading: dict[str, Any] = {"num_workers": words.workers, "persistent_workers": words.workers > 0}

    def trained(evaluated: Iterable[Any]) -> list[Epoch]:
        loader = torch.utils.data.DataLoader(training, batch_size=16, shuffle=True, **loading)
        return train(loader, evaluated, words.epochs, len(photographs.classes))

    # torch's preparations at a first step are not data loading.
    descend(small_resnet(2), torch.zeros(16, 3, CROPPED, CROPPED), torch.zeros(16).long(), LEARNING_RATE)
    found = {"without cache": trained(torch.utils.data.DataLoader(evaluation, batch_size=64, **loading))}
    with hotset.cache(evaluation, session=words.cache_session_id) as cached:
        print(cached.plan)
        found["with cache"] = trained(hotset.DataLoader(cached, batch_size=64, **loading))
    return found


# ---- what came of it -------------------------------------------------------------------------------------


def print_times(found: dict[str, list[Epoch]]) -> None:
    runs = found.values()
    later = [statistics.fmean(epoch.eval_seconds for epoch in run[1:]) for run in runs]
    rows = {
        "first": (f"{run[0].eval_seconds:.2f}" for run in runs),
        "later, mean": (f"{seconds:.2f}" for seconds in later),
    }
    print_table("evaluation, seconds", found, rows)
    one, other = ([epoch[:2] for epoch in run] for run in runs)
    print(f"losses and accuracies with and without: {'equal' if one == other else 'DIFFERENT'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="evaluation during training, with and without a cache")
    parser.add_argument("--cache-session-id", required=True, help="name or number of the session")
    parser.add_argument("--train", type=int, default=320, help="pictures to train on")
    parser.add_argument("--evaluate", type=int, default=1920, help="pictures to evaluate on")
    parser.add_argument("--size", type=int, default=512, help="pixels of a picture's side, as a JPEG")
    parser.add_argument("--epochs", type=int, default=4, help="of each training, at least 2")
    parser.add_argument("--workers", type=int, default=2, help="of each loader")
    parser.add_argument("--plot", type=Path, default=Path("session-evaluation.png"), help="a PNG")
    words = parser.parse_args()
    torch.set_num_threads(1)  # the workers want the other core
    with tempfile.TemporaryDirectory() as temporary:
        found = run(words, Path(temporary))
    print_times(found)
    seconds = {name: [epoch.eval_seconds for epoch in run] for name, run in found.items()}
    draw_epochs(seconds, "evaluation after epoch", "%.2f", words.plot)
    print(f"saved {words.plot}")


if __name__ == "__main__":
    main()
