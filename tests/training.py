"""What the tests of training share: data, a network that draws, models made alike, and a record of each step.

Everything that is random in a training is here: the order is shuffled, a live transform draws from the global
generators, dropout draws between two batches, and the optimizer has momentum. So a step that is done twice or
left out, or a draw at another moment, is another loss from there on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import eventually, rng_states, seed_everything
from sources import Samples, Transformed
from torch import nn

import hotset
from hotset.train.callbacks import Callback
from hotset.train.model import Model
from hotset.train.run_state import RunState


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Batches are tiny, and a second OpenMP thread that waits for a busy core spins: 400 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    # A queue's watch is told to end, not waited for. Who looks for what is left behind would collect garbage.
    eventually(lambda: not any(thread.name == "hotset-watch" for thread in threading.enumerate()))


N, BATCHES = 22, 6  # batches of four, the last one short
CLASSES = 3


def row(index: int) -> tuple[torch.Tensor, int]:
    return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % CLASSES


def double(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    return sample[0] * 2, sample[1]


def jitter(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Live: draws from all three global generators."""
    return sample[0] + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand()), sample[1]


deterministic_double = hotset.deterministic(double)


@contextmanager
def loader_of(kind: str, workers: int = 0, **options: Any) -> Iterator[Any]:
    """A shuffling loader: "hotset" over a cache, or "torch" over the dataset without one."""
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers, **options}
    transforms: list[Any] = [deterministic_double, jitter]
    if kind == "torch":
        yield torch.utils.data.DataLoader(Transformed(Samples(row, N), transforms), **options)
        return
    with hotset.cache(Samples(row, N), transform=transforms, memory="4MiB") as cached:
        yield hotset.DataLoader(cached, **options)


def model_of(metrics: Any = None, **options: Any) -> Model:
    network = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, CLASSES)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    return Model(network, nn.CrossEntropyLoss(), optimizer, metrics, device="cpu", **options)


class Step(NamedTuple):
    epoch: int
    step: int
    step_in_epoch: int
    loss: float


class Recorder(Callback):
    """Keeps what it is told, event by event."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.sinks: list[tuple[int, int]] = []
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)

    def on_step_end(self, run: RunState) -> None:
        self.steps.append(Step(run.epoch, run.step, run.step_in_epoch, run.loss))

    def on_sink_end(self, run: RunState) -> None:
        assert run.losses.tolist()[-1] == run.loss
        self.sinks.append((run.step, len(run.losses)))

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


class Outcome(NamedTuple):
    """All that can tell two trainings apart."""

    losses: list[float]
    network: dict[str, list[Any]]
    momentum: list[Any]
    generators: tuple[str, str, str]
    steps: int


def outcome(model: Model, recorder: Recorder) -> Outcome:
    network = {name: value.tolist() for name, value in model.network.state_dict().items()}
    momentum = [state["momentum_buffer"].tolist() for state in model.optimizer.state.values()]
    return Outcome(recorder.losses, network, momentum, rng_states(), model.steps)


def trained(kind: str, epoch: int = 3, *others: Callback, workers: int = 0, **options: Any) -> Outcome:
    """The outcome of one training from the beginning."""
    seed_everything(1)
    recorder, model = Recorder(), model_of()
    with loader_of(kind, workers) as loader:
        model.train(epoch, loader, [recorder, *others], **options)
    return outcome(model, recorder)


WAYS: dict[str, dict[str, Any]] = {
    "step by step": {},
    "sinks that end within a pass": {"dataset_sink_mode": True, "sink_size": 4},
    "sinks of a pass": {"dataset_sink_mode": True},
}


def resumed(path: Path, kind: str, epoch: int = 3, workers: int = 0, **options: Any) -> Outcome:
    """The outcome of a run that goes on from a checkpoint, in a process that has drawn other numbers."""
    seed_everything(99)
    recorder, model = Recorder(), model_of()
    with loader_of(kind, workers) as loader:
        model.train(epoch, loader, recorder, resume=path, **options)
    return outcome(model, recorder)


def check_resumed(got: Outcome, whole: Outcome, step: int) -> None:
    assert got == whole._replace(losses=whole.losses[step:]), f"resumed at step {step}"
