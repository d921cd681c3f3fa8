"""A plain PyTorch loop, its batches sent to the device ahead of use; then the same steps, 50 for each word.

The program is the same on a laptop and on a GPU: there the copies of the next batches run while the step
computes, and the sunk step is one graph that is replayed. Losses are the same in both loops.

Run it: python examples/device_loop.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

import hotset

EPOCHS, BATCH = 4, 32


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for pictures that are decoded."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=noise) + index % 10 / 10, index % 10


class Training:
    """A network, its optimizer, and one step."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = (nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
        self.network = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.02, momentum=0.9)

    def step(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.network(pictures), labels)
        loss.backward()
        self.optimizer.step()
        return loss


def main() -> None:
    with hotset.cache(Pictures(), memory="64MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=BATCH, shuffle=True)
        for _ in loader:  # an epoch of something else fills the cache; training would do as well
            pass

        queue = hotset.DeviceQueue(loader)
        training = Training(queue.device)
        for _ in range(EPOCHS):
            for pictures, labels in queue:
                loss = training.step(pictures, labels).detach()
        queue.close()
        print(f"one step at a time: loss {loss.item():.4f} after {queue.stats().batches} steps")

        training = Training(queue.device)
        sink = hotset.data_sink(training.step, queue, sink_size=50)
        while sink.epoch < EPOCHS:
            sunk = sink()
        sink.close()
        print(f"50 at a time:       loss {sunk.item():.4f} after {sink.steps} steps")
        print("losses:", "equal" if torch.allclose(loss, sunk) else "DIFFERENT")


if __name__ == "__main__":
    main()
