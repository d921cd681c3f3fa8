"""Lightning's Trainer and Fabric over hotset.DataLoader: the same batches and losses as with torch's loader.

Lightning rebuilds loaders from their attributes and saves their state in its own checkpoints. A run is what
recorded as its training steps saw it: epoch, number in the epoch, labels, and the loss with all its bits.
"""

from __future__ import annotations

import itertools
import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import equal_batches, rarely, seed_everything
from live import flip_and_crop
from samples import image_and_label
from sources import Samples, Transformed
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

import hotset
from benchmarks.operators import define_torchvision_operators

define_torchvision_operators()

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from hotset.integrations.lightning import EpochEnds  # noqa: E402

pytestmark = [
    # Advice to use more workers, and to log more often.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning 2.6 still asks for a class that torch 2.13 deprecates.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_trainer.py"
SAMPLES = 24
BATCH = 4
BATCHES = SAMPLES // BATCH


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Learner(LightningModule):
    """A linear layer that remembers what it saw."""

    def __init__(self, record: Path | None = None) -> None:
        super().__init__()
        self.record = record
        self.net = torch.nn.LazyLinear(1)
        self.steps: list[Any] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        images, labels = batch
        loss = (self.net(images.flatten(1).float() / 255).squeeze(1) - labels / 100).square().mean()
        self.steps.append((self.current_epoch, number, labels.tolist(), loss.item()))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.validated.append(batch[1].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_fit_end(self) -> None:
        """Write the run to a file for the process that started the ranks."""
        if self.record is not None:
            loader: Any = self.trainer.train_dataloader
            epoch = getattr(loader, "last_epoch", None)
            found = {
                "steps": self.steps,
                "loader": f"{type(loader).__module__}.{type(loader).__name__}",
                "sampler": type(loader.sampler).__name__,
                "workers": loader.num_workers,
                "from_cache": epoch.hit_rate if epoch is not None else None,
            }
            torch.save(found, self.record / f"rank{self.global_rank}")


def fit(
    train: Any, *callbacks: Any, val: Any = None, ckpt: Any = None, record: Any = None, **options: Any
) -> Learner:
    """Train from a fixed start; the returned module holds what it saw."""
    torch.manual_seed(0)
    module = Learner(record)
    module.net(torch.zeros(1, *next(iter(train.dataset))[0].shape).flatten(1))
    seed_everything()
    options = {"devices": 1, "max_epochs": 3, **options}
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module, train, val, ckpt_path=ckpt)
    return module


def loader(kind: Any, dataset: Any, workers: int = 0, **options: Any) -> Any:
    options = {"shuffle": True, "generator": torch.Generator().manual_seed(3), **options}
    return kind(dataset, batch_size=BATCH, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("live", [False, True], ids=["gathered", "live"])
def test_the_trainer_takes_the_loader_as_it_is(workers: int, live: bool) -> None:
    transform = [flip_and_crop] if live else None
    plain = Transformed(Samples(image_and_label, SAMPLES), transform or [])
    expected = fit(loader(DataLoader, plain, workers), val=DataLoader(plain, batch_size=5))
    with hotset.cache(Samples(image_and_label, SAMPLES), transform=transform, memory="4MiB") as cached:
        train = loader(hotset.DataLoader, cached, workers)
        got = fit(train, val=hotset.DataLoader(cached, batch_size=5))
        assert got.trainer.train_dataloader is train
        assert train.last_epoch.hit_rate == 1.0
    assert got.steps == expected.steps
    assert len(got.steps) == 3 * BATCHES
    assert got.validated == expected.validated


# Ranks: Lightning builds the loader again, with a DistributedSampler


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "left-alone"])
def test_two_ranks_share_the_cache_and_train_as_with_torch(tmp_path: Path, injected: bool) -> None:
    def run(name: str, kind: Any, dataset: Any) -> list[Any]:
        record = tmp_path / name
        record.mkdir()
        # With use_distributed_sampler=False the loader is left alone: both ranks go through all of it.
        options: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 2}
        fit(loader(kind, dataset), record=record, **options, use_distributed_sampler=injected)
        return [torch.load(record / f"rank{rank}") for rank in range(2)]

    expected = run("torch", DataLoader, Samples(image_and_label, SAMPLES))
    with hotset.cache(Samples(image_and_label, SAMPLES), memory="4MiB") as cached:
        got = run("hotset", hotset.DataLoader, cached)
        assert cached.stats().cached == SAMPLES
        assert cached.check() == []
    for mine, theirs in zip(got, expected, strict=True):
        assert mine["steps"] == theirs["steps"]
        assert len(mine["steps"]) == 2 * (BATCHES // 2 if injected else BATCHES)
        assert mine["sampler"] == theirs["sampler"]
        assert mine["sampler"] == ("DistributedSampler" if injected else "RandomSampler")
        assert mine["loader"] == "hotset.loader.loader.DataLoader"
        assert mine["from_cache"] == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "timeout": 30},
        {"drop_last": True, "pin_memory": False, "in_order": True},
        {"worker_init_fn": print, "num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_a_loader_that_is_built_again_keeps_its_arguments(arguments: dict[str, Any]) -> None:
    from lightning.pytorch.utilities.data import _update_dataloader

    with hotset.cache(Samples(image_and_label, SAMPLES), memory="4MiB") as cached:
        before = hotset.DataLoader(cached, batch_size=BATCH, **arguments)
        after: Any = _update_dataloader(before, DistributedSampler(cached, num_replicas=2, rank=1))
        assert type(after) is hotset.DataLoader
        assert after.dataset is cached
        assert after.batch_size == BATCH
        for name in arguments:
            assert getattr(after, name) == getattr(before, name), name


# Options of the Trainer


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.parametrize(
    "options",
    [{"overfit_batches": 2}, {"limit_train_batches": 3, "limit_val_batches": 1}, {"fast_dev_run": 2}],
    ids=lambda options: "-".join(options),
)
def test_limited_batches_equal_torchs(options: dict[str, Any]) -> None:
    def run(kind: Any, dataset: Any) -> Learner:
        return fit(loader(kind, dataset), val=kind(dataset, batch_size=BATCH), **options)

    expected = run(DataLoader, Samples(image_and_label, SAMPLES))
    with hotset.cache(Samples(image_and_label, SAMPLES), memory="4MiB") as cached:
        got = run(hotset.DataLoader, cached)
        taken: Any = got.trainer.train_dataloader
        assert type(taken) is hotset.DataLoader
        if "overfit_batches" in options:  # Lightning has built it again without shuffling
            assert type(taken.sampler) is SequentialSampler
    assert got.steps == expected.steps
    assert got.validated == expected.validated


# Going on from Lightning's checkpoints


written_to_before = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@written_to_before
@pytest.mark.parametrize(("workers", "limit"), rarely(itertools.product([0, 2], [1.0, 4]), (2, 4)))
def test_a_run_resumes_in_mid_epoch_as_if_it_had_not_stopped(
    workers: int, limit: float, tmp_path: Path
) -> None:
    def run(*callbacks: Any, **options: Any) -> Learner:
        with hotset.cache(
            Samples(image_and_label, SAMPLES), transform=[flip_and_crop], memory="4MiB"
        ) as cached:
            train = loader(hotset.DataLoader, cached, workers)
            return fit(train, *callbacks, limit_train_batches=limit, **options)

    whole = run(checkpoints(tmp_path))
    batches = BATCHES if limit == 1.0 else 4
    assert len(whole.steps) == 3 * batches
    for step in (1, batches + 2):
        rest = run(checkpoints(tmp_path), ckpt=tmp_path / f"step={step}.ckpt")
        # Loss for loss: parameters, samples, order and live draws are all in it.
        assert rest.steps == whole.steps[step:], step


@written_to_before
@pytest.mark.parametrize("limit", [1.0, 4], ids=["whole", "limited"])
def test_a_checkpoint_at_the_last_batch_costs_no_epoch(limit: float, tmp_path: Path) -> None:
    def run(*callbacks: Any, **options: Any) -> Learner:
        with hotset.cache(Samples(image_and_label, SAMPLES), memory="4MiB") as cached:
            sampler: Any = DistributedSampler(cached, num_replicas=1, rank=0)
            train = loader(hotset.DataLoader, cached, shuffle=None, sampler=sampler)
            return fit(train, EpochEnds(), *callbacks, limit_train_batches=limit, **options)

    whole = run(checkpoints(tmp_path))
    batches = BATCHES if limit == 1.0 else 4
    for step in (batches, 2 * batches, batches + 1):
        rest = run(checkpoints(tmp_path), ckpt=tmp_path / f"step={step}.ckpt")
        assert rest.steps == whole.steps[step:], step


# Fabric


def test_fabric_sets_the_loader_up() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    expected = list(fabric.setup_dataloaders(loader(DataLoader, Samples(image_and_label, SAMPLES))))
    with hotset.cache(Samples(image_and_label, SAMPLES), memory="4MiB") as cached:
        inner = loader(hotset.DataLoader, cached)
        got = list(fabric.setup_dataloaders(inner))
        assert inner.last_epoch is not None
        equal_batches(got, expected)


@written_to_before
def test_the_resumed_example_ends_with_the_same_weights(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capfd.readouterr().out
    assert "100.0% from the cache" in printed
    assert "middle: equal" in printed


def test_the_example_on_the_device_prints_equal_losses(capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE.with_name("device_lightning.py")), run_name="__main__")
    assert "losses: equal" in capfd.readouterr().out
