"""What a step's Python reads, and its caller changes between calls: the step is captured again with it."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sinking import BATCH, FakeGraphs, Training
from test_cuda_graph import ALIKE, Make, batches, sink_on, trained_alike
from torch import nn
from training import one_thread

from hotset.device.host_values import HostValues

__all__ = ["one_thread", "sink_on"]  # fixtures

WEIGHT = 1.0
OPTIONS: dict[str, Any] = {"weight": 1.0, "seed": 3}


class Options:
    weight = 1.0


@dataclass
class Settings:
    weight: float = 1.0


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


def weighted() -> float:
    return WEIGHT


def with_kept(read: Callable[[Training], Callable[[], float]]) -> Callable[[Training], Any]:
    """Makes, of a training, its step with a loss that is weighted by what is read so."""

    def make(training: Training) -> Any:
        weight = read(training)

        def step(images: Any, labels: Any) -> Any:
            training.optimizer.zero_grad()
            scores = training.network(images.flatten(1).float() / 255)
            loss = nn.functional.cross_entropy(scores, labels % 5) * weight()
            loss.backward()
            training.optimizer.step()
            return loss

        return step

    return make


HOLDERS: dict[str, Any] = {
    "a global": (sys.modules[__name__], "WEIGHT"),
    "a dict": (OPTIONS, "weight"),
    "a class": (Options, "weight"),
    "a dataclass": (Settings(), "weight"),
    "slots": (Slotted(), "weight"),
    "a namespace": (argparse.Namespace(weight=1.0), "weight"),
}


def put(holder: Any, name: str, value: float) -> None:
    if type(holder) is dict:
        holder[name] = value
    else:
        setattr(holder, name, value)


@pytest.fixture(autouse=True)
def _weights_are_put_back() -> Iterator[None]:
    yield
    for holder, name in HOLDERS.values():
        put(holder, name, 1.0)


@pytest.mark.parametrize("make", [float, np.float32, torch.tensor])
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_number_that_the_step_reads_is_captured_anew(
    sink_on: Make, kind: str, make: Callable[[float], Any]
) -> None:
    holder, name = HOLDERS[kind]

    def read(training: Training) -> Callable[[], float]:
        if kind == "a global":
            return weighted
        return lambda: holder["weight"] if kind == "a dict" else holder.weight

    def train(training: Training, five_steps: Callable[[], list[float]]) -> list[float]:
        losses = []
        for weight in (1.0, 1.0, 0.25, 0.25):
            put(holder, name, make(weight) if kind != "a dict" else weight)
            losses += five_steps()
        return losses

    _, graphs = trained_alike(sink_on, train, with_kept(read))
    assert graphs.captures == 2


def test_a_variable_of_an_enclosing_function(sink_on: Make) -> None:
    weights: dict[int, Callable[[float], None]] = {}

    def read(training: Training) -> Callable[[], float]:
        weight = 1.0

        def set_to(value: float) -> None:
            nonlocal weight
            weight = value

        weights[id(training)] = set_to
        return lambda: weight

    def train(training: Training, five_steps: Callable[[], list[float]]) -> list[float]:
        losses = five_steps()
        weights[id(training)](0.25)
        return losses + five_steps() + five_steps()

    _, graphs = trained_alike(sink_on, train, with_kept(read))
    assert graphs.captures == 2


def test_modules_that_train_no_more_and_other_settings_of_theirs(sink_on: Make) -> None:
    def train(training: Training, five_steps: Callable[[], list[float]]) -> list[float]:
        losses = five_steps()
        training.network[1].eval()  # a batch norm that is frozen
        losses += five_steps() + five_steps()
        training.network[3].p = 0.6
        losses += five_steps()
        training.network.eval()
        training.network.train()  # as an evaluation between two calls leaves it, but for the batch norm
        return losses + five_steps()

    _, graphs = trained_alike(sink_on, train)
    assert graphs.captures == 4


class Trainer(Training):
    """Counts and notes much that its step does not read, and counts the step's own calls."""

    epoch = calls = 0
    best = 0.0

    def step(self, images: Any, labels: Any) -> Any:
        self.calls += 1
        return super().step(images, labels)

    def fit(self, run: Callable[[], list[float]]) -> list[float]:
        found = run()
        self.epoch += 1
        self.best = max(self.best, *found)
        return found


def test_what_the_step_does_not_read_or_counts_itself_costs_no_capture(sink_on: Make) -> None:
    training = Trainer()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, ALIKE, 5, outputs="all")
    for _ in range(6):
        training.fit(lambda: sink().tolist())
    assert (graphs.captures, graphs.replays) == (1, 30 - 3)
    assert training.epoch == 6
    assert training.best > 0


def test_what_a_step_counts_in_shorter_batches_costs_no_capture(sink_on: Make) -> None:
    """These are run by Python until they have a graph of their own."""
    training = Trainer()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, batches(*[BATCH] * 4, 2), 5)
    for _ in range(6):
        sink()
    assert (graphs.captures, graphs.replays) == (2, 30 - 2 * 3)


def test_small_arrays_and_tensors_of_the_host_count_by_their_numbers() -> None:
    held = types.SimpleNamespace(
        a=np.array([1.0, np.nan]), b=torch.tensor([1.0, float("nan")]), c=torch.zeros(99)
    )

    def step(batch: Any) -> Any:
        return batch * held.a + held.b + held.c.sum()

    values = HostValues(step)
    before = values.now()
    assert values.now() == before
    held.a[0] = 2.0
    assert values.now() != before
    held.a[0] = 1.0
    assert values.now() == before
    held.b[0] = 2.0
    assert values.now() != before


class Raises:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class WithoutHash(type):
    __hash__ = None  # type: ignore[assignment]


class Odd(metaclass=WithoutHash):
    weight = 1.0


ODD: dict[str, Callable[[], Any]] = {
    "raises": Raises,
    "a class without a hash": lambda: Odd,
    "an object of it": Odd,
    "a dict with other keys": lambda: {1: 2, "odd": Odd()},
    "nan": lambda: float("nan"),
    "numpy's nan": lambda: np.float64("nan"),
    "an array of objects": lambda: np.array([object()]),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a tensor without memory": lambda: torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_values_end_no_step_and_do_not_count_as_changed(kind: str) -> None:
    held = ODD[kind]()

    def step(batch: Any) -> Any:
        return batch, held, Odd.weight

    values = HostValues(step)
    assert values.now() == values.now()


def test_of_ranks_only_whether_modules_train_counts() -> None:
    """A rank that captured alone would wait for the others for ever."""
    settings, network = types.SimpleNamespace(weight=1.0), nn.Sequential(nn.Dropout())

    def step(batch: Any) -> Any:
        return network(batch) * settings.weight

    values = HostValues(step, modes_alone=True)
    before = values.now()
    settings.weight = 2.0
    assert values.now() == before
    network.eval()
    assert values.now() != before
