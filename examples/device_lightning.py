"""Lightning's Trainer with a DeviceQueue as its data loader: batches arrive on the device, ahead of use.

Run it: python examples/device_lightning.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import Dataset

import hotset


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for pictures that are decoded."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=noise) + index % 10 / 10, index % 10


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
        self.last_loss = torch.tensor(float("nan"))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        pictures, labels = batch
        loss = nn.functional.cross_entropy(self.net(pictures), labels)
        self.last_loss = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(cached: hotset.CachedDataset, *, queued: bool) -> float:
    """Train for two epochs; return the last loss."""
    torch.manual_seed(0)
    model = Classifier()
    loader = hotset.DataLoader(
        cached, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    trainer = Trainer(
        max_epochs=2,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, hotset.DeviceQueue(loader) if queued else loader)
    return float(model.last_loss)


def main() -> None:
    with hotset.cache(Pictures(), memory="64MiB") as cached:
        plain, queued = train(cached, queued=False), train(cached, queued=True)
    print(f"last loss: {plain:.4f} from the loader, {queued:.4f} from the queue")
    print("losses:", "equal" if plain == queued else "DIFFERENT")


if __name__ == "__main__":
    main()
