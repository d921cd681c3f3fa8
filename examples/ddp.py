"""Data-parallel training on one machine: the ranks share one cache automatically.

Each rank calls hotset.cache like a script without ranks; the first makes the cache and the others join it.
DistributedSampler gives each rank other samples in each epoch, so by the end of the first one they have
filled the cache together, and the second one reads nothing.

Run it: python -m torch.distributed.run --nproc-per-node 2 examples/ddp.py    (with python alone: one rank)
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import hotset

SAMPLES = 2048
EPOCHS = 2


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for pictures that are decoded; counts how often this process does so."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        noise = torch.Generator().manual_seed(index)
        label = index % 10
        return torch.randn(3, 8, 8, generator=noise) + label / 10, label


def train(dataset: Any, loader_type: Any) -> list[float]:
    """Train from the same start on whatever gives the samples; return the mean loss of each epoch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=7)
    loader = loader_type(dataset, batch_size=32, sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        summed = torch.zeros(())
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            summed += loss.detach()
        losses.append(over_ranks(summed) / len(loader) / dist.get_world_size())
    return losses


def over_ranks(value: float | torch.Tensor) -> float:
    """Sum a number over all ranks."""
    total = torch.as_tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    torch.set_num_threads(1)
    for name, alone in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, alone)
    dist.init_process_group("gloo")
    uncached = Pictures()
    expected = train(uncached, torch.utils.data.DataLoader)
    pictures = Pictures()
    with hotset.cache(pictures, memory="64MiB") as cached:
        losses = train(cached, hotset.DataLoader)
        problems = cached.check()
    before, after = over_ranks(uncached.reads), over_ranks(pictures.reads)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {SAMPLES} samples, {EPOCHS} epochs")
        same = "equal" if losses == expected else "DIFFERENT"
        print(f"losses without a cache {expected}, with {losses}: {same}")
        print(f"reads without a cache {before:.0f}, with {after:.0f}: {after / SAMPLES:.3f} per sample")
        print(f"problems in the cache: {problems}")
    # A DistributedDataParallel lies in a reference cycle and holds the group; one that is still there when
    # the interpreter ends may abort it (seen in one launch of ten without hotset, torch 2.13, gloo).
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
