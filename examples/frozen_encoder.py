"""A linear probe on a frozen network, whose features are computed once per machine.

hotset.batched(encode) is a transform that gets collated batches while the cache is filled. Its results are
cached as samples, under a fingerprint that includes the network's weights. Ranks share the work: each sample
is encoded once.

Run it: python examples/frozen_encoder.py
Two ranks: python -m torch.distributed.run --nproc-per-node 2 examples/frozen_encoder.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hotset

SIDE = 96


class Gratings(Dataset[tuple[torch.Tensor, int]]):
    """Stripes under noise, in ten directions, which are the classes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        label = index % 10
        angle, phase = torch.tensor(label * torch.pi / 10), 6.3 * torch.rand((), generator=noise)
        at = torch.arange(SIDE) / 3
        wave = torch.sin(at[:, None] * angle.cos() + at * angle.sin() + phase)
        return wave + 0.5 * torch.randn(3, SIDE, SIDE, generator=noise), label


def make_network() -> nn.Module:
    """Stands for a network that was trained elsewhere."""
    torch.manual_seed(0)
    widths = [3, 32, 64, 96, 128]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval().requires_grad_(False)


network = make_network()


def encode(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The features and labels of a batch of pictures and labels."""
    pictures, labels = batch
    return network(pictures), labels


def train_probe(loader: Any, epochs: int, prepare: Callable[[Any], Any]) -> tuple[list[float], float]:
    """Train a linear probe; return the seconds of each epoch, and how many of the last one it had right."""
    torch.manual_seed(0)
    probe = nn.Sequential(nn.BatchNorm1d(128), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.5)
    seconds: list[float] = []
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        start, right, seen = time.perf_counter(), 0, 0
        for batch in loader:
            features, labels = prepare(batch)
            guess = probe(features)
            optimizer.zero_grad()
            nn.functional.cross_entropy(guess, labels).backward()
            optimizer.step()
            right += int((guess.argmax(1) == labels).sum())
            seen += len(labels)
        seconds.append(time.perf_counter() - start)
    return seconds, right / seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")

    pictures = Gratings(asked.samples)
    cached = hotset.cache(pictures, transform=[hotset.batched(encode, size=32)], memory="64MiB")
    order = DistributedSampler(cached) if ranks > 1 else None
    loader = hotset.DataLoader(cached, batch_size=32, shuffle=order is None, sampler=order)
    seconds, right = train_probe(loader, asked.epochs, prepare=lambda batch: batch)
    if ranks > 1:
        dist.barrier()
    stats = cached.stats()
    print(f"{stats.misses} of {asked.samples} samples were encoded by {ranks} rank(s)")
    if ranks == 1:
        plain = DataLoader(pictures, batch_size=32, shuffle=True)
        again, right_again = train_probe(plain, 2, prepare=lambda batch: encode([*batch]))
        print(f"{'':<28}{'epoch 1':>9}{'later':>9}{'memory':>11}{'right':>8}")
        for name, spent, size, share in (
            ("encoded in each epoch", again, 0, right_again),
            ("hotset.batched", seconds, stats.bytes, right),
        ):
            later = min(spent[1:])
            print(f"{name:<28}{spent[0]:>7.2f} s{later:>7.3f} s{size / 1024:>7.0f} KiB{share:>8.0%}")
        print(f"later epochs are {min(again[1:]) / min(seconds[1:]):.0f} times as fast")
    cached.close()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
