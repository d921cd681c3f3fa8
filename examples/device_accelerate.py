"""Accelerate's prepared model, optimizer and loader, with 20 steps for each word from the host.

Accelerator.prepare builds a plain loader of its own; from_cache gives its wrapper a hotset.DataLoader again,
and data_sink runs the prepared step on it.

Run it: python examples/device_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import Dataset

import hotset
from hotset.integrations.accelerate import from_cache


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for pictures that are decoded."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=noise) + index % 10 / 10, index % 10


def train(accelerator: Accelerator, cached: hotset.CachedDataset, sink_size: int) -> torch.Tensor:
    """Train for 60 steps, three passes over the data; return the last loss."""
    set_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    loader = hotset.DataLoader(cached, batch_size=32, shuffle=True)
    network, optimizer, prepared = accelerator.prepare(network, optimizer, loader)
    prepared = from_cache(prepared)

    def step(pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(pictures), labels)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    with hotset.data_sink(step, prepared, sink_size, device=accelerator.device) as sink:
        while sink.steps < 60:
            loss: torch.Tensor = sink()
    return loss


def main() -> None:
    accelerator = Accelerator()
    with hotset.cache(Pictures(), memory="64MiB") as cached:
        losses = [train(accelerator, cached, sink_size) for sink_size in (1, 20)]
    accelerator.print("last loss, 1 and 20 steps a sink:", *(f"{loss.item():.4f}" for loss in losses))
    accelerator.print("losses:", "equal" if torch.equal(losses[0], losses[1]) else "DIFFERENT")


if __name__ == "__main__":
    main()
