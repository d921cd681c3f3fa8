"""A small classifier by Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from common import Epochs, arguments, pictures

# isort: split
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import hotset


class Classifier(pl.LightningModule):
    """Two convolutions; prints each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.LazyLinear(2)
        )
        self.net(torch.zeros(1, 3, 64, 64))
        self.told = Epochs()

    def training_step(self, batch: Any, number: int) -> Any:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.told.step(loss.item())
        return loss

    def on_train_epoch_start(self) -> None:
        self.told.begin()

    def on_train_epoch_end(self) -> None:
        self.told.end()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    given = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    pictures(given.folder, given.samples)
    transform = transforms.Compose(
        [
            transforms.Resize(80),
            transforms.CenterCrop(72),
            transforms.RandomCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    dataset: Any = ImageFolder(str(given.folder / "pictures"), transform=transform)
    if given.hotset:
        dataset = hotset.cache(dataset)
    loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=given.workers)
    trainer = pl.Trainer(
        max_epochs=given.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
