"""A training loop with Accelerate over a cache: saved in the midst of an epoch, and gone on with.

Accelerator.prepare builds a plain loader of its own; from_cache gives its wrapper a hotset.DataLoader again.
Several ranks share one cache.

Run it: python examples/accelerate_loop.py
Two ranks on the CPU: set ACCELERATE_USE_CPU=true and start it by
python -m torch.distributed.run --nproc-per-node 2
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import Dataset

import hotset
from hotset.integrations.accelerate import from_cache

EPOCHS = 3


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for pictures that are decoded."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=noise) + index % 10 / 10, index % 10


class Run:
    """A model and all that trains it, prepared."""

    def __init__(self, accelerator: Accelerator, cached: Any) -> None:
        set_seed(0)
        self.accelerator = accelerator
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = hotset.DataLoader(cached, batch_size=32, shuffle=True)
        self.model, self.optimizer, loader = accelerator.prepare(model, optimizer, loader)
        self.loader = from_cache(loader)

    def train(self, epochs: range, save: tuple[int, int, str] | None = None) -> torch.Tensor:
        """Train; save after a batch of an epoch, in a folder, if asked to. Return the weights."""
        for epoch in epochs:
            for number, (pictures, labels) in enumerate(self.loader):
                loss = nn.functional.cross_entropy(self.model(pictures), labels)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if save is not None and (epoch, number) == save[:2]:
                    self.accelerator.save_state(save[2])
        self.accelerator.wait_for_everyone()
        return torch.cat([weights.detach().flatten() for weights in self.model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    with tempfile.TemporaryDirectory() as own, hotset.cache(Pictures(), memory="64MiB") as cached:
        accelerator = Accelerator(cpu=True, dataloader_config=stateful)
        (folder,) = broadcast_object_list([own])  # that of rank 0
        run = Run(accelerator, cached)
        whole = run.train(range(EPOCHS), save=(1, 3, folder))
        accelerator.print(run.loader.base_dataloader.last_epoch)

        accelerator = Accelerator(cpu=True, dataloader_config=stateful)
        again = Run(accelerator, cached)
        accelerator.load_state(folder)
        same = again.train(range(1, EPOCHS)).equal(whole)
        accelerator.print("weights after going on from the middle:", "equal" if same else "DIFFERENT")
        accelerator.wait_for_everyone()
        accelerator.end_training()


if __name__ == "__main__":
    main()
