"""Lightning's Trainer over a cache: stop in the midst of an epoch, go on, and end with the same weights.

The Trainer takes a hotset.DataLoader like any loader. With several ranks it builds it again with a
DistributedSampler, and the ranks share one cache. Its checkpoints hold the loader's state.

Run it: python examples/lightning_trainer.py        (python examples/lightning_trainer.py 2: two ranks)
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset

import hotset
from hotset.integrations.lightning import EpochEnds

STEPS, EPOCHS = 16, 2


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for pictures that are decoded."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=noise) + index % 10 / 10, index % 10


def random_flip(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    picture, label = sample
    return (picture.flip(-1) if torch.rand(()) < 0.5 else picture), label


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        pictures, labels = batch
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(cached: Any, folder: str, ranks: int, resume: str | None = None) -> torch.Tensor:
    """Train from the beginning or from a checkpoint; return the weights."""
    torch.manual_seed(0)
    model = Classifier()
    # A generator of its own makes later epochs' order part of the loader's state, too.
    loader = hotset.DataLoader(
        cached, batch_size=32 // ranks, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            EpochEnds(),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS // 2, save_top_k=-1),
        ],
    )
    trainer.fit(model, loader, ckpt_path=resume)
    if trainer.is_global_zero:
        print(loader.last_epoch if ranks == 1 else f"{ranks} ranks: {cached.stats()}")
    return torch.cat([weights.detach().flatten() for weights in model.parameters()])


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with (
        tempfile.TemporaryDirectory() as folder,
        hotset.cache(Pictures(), transform=[random_flip], memory="64MiB") as cached,
    ):
        whole = train(cached, folder, ranks)
        if ranks == 1:
            gone_on = train(cached, folder, ranks, resume=f"{folder}/step={STEPS + STEPS // 2}.ckpt")
            print("weights after going on from the middle:", "equal" if whole.equal(gone_on) else "DIFFERENT")


if __name__ == "__main__":
    main()
