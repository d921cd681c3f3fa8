"""The demo's training: the pipeline's two steps, a small network, and the timed loop.

The pipeline is a common one: decode and resize, which give the same result each time and are worth caching,
then a random flip and crop, which must stay live. The network is small enough (about 0.2 ms a sample, forward
and backward on one core) that training waits for the data pipeline, as it does with a larger network on a
GPU.

Both runs start from one seed, take the same arguments, and draw from torch's generators only. So their losses
are equal bit for bit exactly if the two loaders give the same batches in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn

import hotset
from hotset.demo.photographs import Photographs
from hotset.errors import ArgumentError

__all__ = ["Decoded", "EpochResult", "flip_and_crop", "load_resized", "steady", "train"]

LOADED_SIZE = 224
TRAINED_SIZE = 192
LEARNING_RATE = 0.05


@hotset.deterministic
def load_resized(sample: tuple[str, int]) -> tuple[torch.Tensor, int]:
    """Return ``(image, label)`` for ``(path, label)``: a ``(3, 224, 224)`` uint8 tensor, RGB.

    Raises:
        ArgumentError: the image cannot be read; its path is named.
    """
    path, label = sample
    try:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((LOADED_SIZE, LOADED_SIZE), Image.Resampling.BILINEAR)
    # Pillow's decoders raise all of these for a damaged file, depending on the format and the damage.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ArgumentError(f"{path} cannot be read as an image ({error}); repair or remove it.") from error
    pixels = torch.from_numpy(np.array(resized))
    return pixels.permute(2, 0, 1).contiguous(), label


def flip_and_crop(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Return the image cropped to ``(3, 192, 192)`` at a random place, and flipped half the time."""
    image, label = sample
    top, left = torch.randint(LOADED_SIZE - TRAINED_SIZE + 1, (2,)).tolist()
    image = image[:, top : top + TRAINED_SIZE, left : left + TRAINED_SIZE]
    if torch.rand(()) < 0.5:
        image = image.flip(2)
    return image, label


class Decoded(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The dataset without a cache: both steps run for every sample in every epoch."""

    def __init__(self, photographs: Photographs) -> None:
        self.photographs = photographs

    def __len__(self) -> int:
        return len(self.photographs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return flip_and_crop(load_resized(self.photographs[index]))


@dataclass(frozen=True)
class EpochResult:
    """One epoch: its seconds, how many of them the trainer waited for data, and each step's loss."""

    seconds: float
    waited: float
    samples: int
    losses: tuple[float, ...]


@contextmanager
def steady() -> Iterator[None]:
    """Train on one thread, and restore torch's thread count and generator afterwards.

    The workers use the other cores. A second OpenMP thread would spin while it waits for a core: a step would
    take many times as long, and a different time in each run.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def train(
    loader: Iterable[list[torch.Tensor]],
    *,
    classes: int,
    epochs: int,
    on_batch: Callable[[int], None] = lambda samples: None,
) -> Iterator[EpochResult]:
    """Train a new network, yielding each epoch's result as the epoch ends.

    torch's global generator is seeded once, before the network is made. So what later epochs draw also
    depends on the state in which the loader leaves the generator.

    Args:
        loader: gives ``[images, labels]``: uint8 ``(n, 3, 192, 192)`` and int64 ``(n,)``.
        classes: how many labels there are.
        epochs: how often to go through the loader.
        on_batch: called after each step with its number of samples.
    """
    torch.manual_seed(0)
    step = _Step(classes)
    for _ in range(epochs):
        losses: list[float] = []
        samples = 0
        waited = 0.0
        begin = wait_begin = time.perf_counter()
        # Making the iterator starts the workers, and the trainer waits for that too.
        for images, labels in loader:
            waited += time.perf_counter() - wait_begin
            losses.append(step(images, labels))
            samples += len(labels)
            on_batch(len(labels))
            wait_begin = time.perf_counter()
        end = time.perf_counter()
        yield EpochResult(end - begin, waited + end - wait_begin, samples, tuple(losses))


class _Step:
    """A training step of a small convolutional network; calling it returns the loss."""

    def __init__(self, classes: int) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=8, stride=8),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, classes),
        )
        self.loss = nn.CrossEntropyLoss()
        self.pixels = torch.empty(0)
        # torch chooses its kernels at the first pass; only the first of the two runs would pay for that.
        self.loss(self.net(torch.zeros(1, 3, TRAINED_SIZE, TRAINED_SIZE)), torch.zeros(1).long()).backward()

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        # One buffer for the floats: 28 MB of fresh memory a batch would cost more than the network does.
        if len(self.pixels) < len(images):
            self.pixels = torch.empty(images.shape)
        pixels = torch.mul(images, 1 / 64, out=self.pixels[: len(images)]).sub_(2)
        loss = self.loss(self.net(pixels), labels)
        self.net.zero_grad()
        loss.backward()
        # Not torch.optim: its first step imports torch's compiler for a second and leaves a folder in /tmp.
        with torch.no_grad():
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
        return float(loss.item())
