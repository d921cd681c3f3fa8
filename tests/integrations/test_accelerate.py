"""Accelerate over hotset.DataLoader: ``from_cache`` keeps the wrapper and the cache's speed.

A run is recorded as its training steps saw it: epoch, labels, and the loss with all its bits.
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rarely, seed_everything
from live import flip_and_crop
from samples import image_and_label
from sources import Samples, Transformed
from torch.utils.data import DataLoader, IterableDataset

import hotset
from benchmarks.operators import define_torchvision_operators

define_torchvision_operators()

from accelerate import Accelerator, DataLoaderConfiguration, debug_launcher, skip_first_batches  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from hotset.integrations.accelerate import from_cache  # noqa: E402

# torchdata's loader, which is made and dropped by `prepare` before ours takes its place.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
SAMPLES = 26
BATCH = 4
EPOCHS = 3


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its state in its classes; each test begins without it."""
    yield
    reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # type: ignore[no-untyped-call]
    GradientState._reset_state()  # type: ignore[no-untyped-call]


class Training:
    """The training of one process: prepared once, then run or resumed."""

    def __init__(self, kind: Any, dataset: Any, workers: int = 0, **configuration: Any) -> None:
        seed_everything()
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
        model = torch.nn.Linear(torch.as_tensor(dataset[0][0]).numel(), 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seed_everything()
        loader = kind(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if kind is hotset.DataLoader:
            assert from_cache(self.loader) is self.loader
            assert type(self.loader.base_dataloader) is hotset.DataLoader

    def run(self, first: int = 0, save_at: tuple[int, int] | None = None, folder: Any = None) -> list[Any]:
        return [step for epoch in range(first, EPOCHS) for step in self.epoch(epoch, save_at, folder)]

    def epoch(
        self, epoch: int, save_at: tuple[int, int] | None = None, folder: Any = None, loader: Any = None
    ) -> Iterator[Any]:
        for number, (images, labels) in enumerate(loader or self.loader):
            loss = (self.model(images.flatten(1).float() / 255).squeeze(1) - labels / 100).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            gathered = self.accelerator.gather_for_metrics(labels).tolist()
            if (epoch, number) == save_at:
                self.accelerator.save_state(str(folder))
            yield epoch, labels.tolist(), gathered, loss.item()


def made(live: bool) -> tuple[Any, Any]:
    """The same samples, without a cache and with one."""
    transform = [flip_and_crop] if live else []
    source = Samples(image_and_label, SAMPLES)
    return Transformed(source, transform), hotset.cache(source, transform=transform or None, memory="4MiB")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("live", [False, True], ids=["gathered", "live"])
def test_batches_and_losses_are_those_of_torch(workers: int, live: bool) -> None:
    plain, cached = made(live)
    expected = Training(DataLoader, plain, workers).run()
    reset()
    with cached:
        training = Training(hotset.DataLoader, cached, workers)
        assert training.run() == expected
        inner = training.loader.base_dataloader
        assert inner.last_epoch.hit_rate == 1.0
        assert inner.num_workers == workers
    # gather_for_metrics knows the last batch.
    assert [len(gathered) for _, _, gathered, _ in expected][-1] == SAMPLES % BATCH


def test_skipped_batches_are_those_of_torch() -> None:
    plain, cached = made(live=False)

    def run(kind: Any, dataset: Any, again: Any) -> list[Any]:
        training = Training(kind, dataset)
        rest = again(skip_first_batches(training.loader, 4))
        return [*training.epoch(0, loader=rest), *training.epoch(1)]

    expected = run(DataLoader, plain, lambda loader: loader)
    reset()
    with cached:
        assert run(hotset.DataLoader, cached, from_cache) == expected
    assert len(expected) == 3 + 7


@pytest.mark.parametrize(
    ("workers", "save_at"),
    rarely(itertools.product([0, 2], [(0, 0), (1, 3), (1, 6)]), (2, (0, 0)), (2, (1, 6))),
)
def test_a_saved_run_resumes_as_if_it_had_not_stopped(
    workers: int, save_at: tuple[int, int], tmp_path: Path
) -> None:
    def training(cached: Any) -> Training:
        return Training(hotset.DataLoader, cached, workers, use_stateful_dataloader=True)

    with made(live=True)[1] as cached:
        whole = training(cached).run(save_at=save_at, folder=tmp_path)
        reset()
        again = training(cached)
        again.accelerator.load_state(str(tmp_path))
        epoch, number = save_at
        over = number == 6  # its last batch: the state is that of the next epoch
        rest = again.run(first=epoch + over)
    assert rest == whole[epoch * 7 + number + 1 :]


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_loader_without_a_batch_sampler_is_returned_as_it_is() -> None:
    prepared = Accelerator(cpu=True).prepare(DataLoader(Streamed(), batch_size=4))
    inner = prepared.base_dataloader
    assert from_cache(prepared).base_dataloader is inner


def test_a_loader_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a DataLoader; call Accelerator.prepare"):
        from_cache(DataLoader(Samples(image_and_label, 4)))


# Two ranks


def rank_main(folder: str, plain: Any, cached: Any) -> None:
    """The program of each of two ranks: run with torch's loader, with hotset's, stop and resume."""
    torch.set_num_threads(1)  # this is a fork: OpenMP would wait for the threads of its parent
    expected = Training(DataLoader, plain).run()
    got = Training(hotset.DataLoader, cached).run()
    AcceleratorState._reset_state()  # type: ignore[no-untyped-call]
    saving = Training(hotset.DataLoader, cached, use_stateful_dataloader=True)
    whole = saving.run(save_at=(1, 1), folder=f"{folder}/state")
    saving.accelerator.wait_for_everyone()
    AcceleratorState._reset_state()  # type: ignore[no-untyped-call]
    going_on = Training(hotset.DataLoader, cached, use_stateful_dataloader=True)
    accelerator = going_on.accelerator
    accelerator.load_state(f"{folder}/state")
    rest = going_on.run(first=1)
    found = {"expected": expected, "got": got, "whole": whole, "rest": rest}
    torch.save(found, f"{folder}/rank{accelerator.process_index}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def test_two_ranks_train_and_resume_as_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Accelerate chooses, with a warning
    plain, cached = made(live=True)
    with cached:
        debug_launcher(rank_main, args=(str(tmp_path), plain, cached), num_processes=2)
        assert cached.stats().cached == SAMPLES
        assert cached.check() == []
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}")
        assert found["got"] == found["expected"]
        assert len(found["got"]) == EPOCHS * 4  # 7 batches in all, evened out
        assert found["rest"] == found["whole"][4 + 2 :]


def test_the_resumed_example_ends_with_the_same_weights(capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capfd.readouterr().out
    assert "100.0% from the cache" in printed
    assert "middle: equal" in printed


def test_the_example_on_the_device_prints_equal_losses(capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE.with_name("device_accelerate.py")), run_name="__main__")
    assert "losses: equal" in capfd.readouterr().out
