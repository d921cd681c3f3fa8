"""Samples that draw random numbers as they are read: never frozen, and drawn as torch draws them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hotset

LENGTH = 60
EPOCHS = 3


class Augmented(Dataset[Any]):
    """Augments a minority of its samples as it reads them, as one does with the rare classes."""

    def __init__(self, minority: set[int], kind: str) -> None:
        self.minority = minority
        self.kind = kind
        self.numpy_rng = np.random.default_rng(5)
        self.torch_rng = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return LENGTH

    def factor(self) -> float:
        if self.kind == "random":
            return random.uniform(0.6, 1.4)
        if self.kind == "numpy":
            return float(np.random.uniform(0.6, 1.4))
        if self.kind == "torch":
            return float(torch.empty(1).uniform_(0.6, 1.4))
        if self.kind == "own numpy":
            return float(self.numpy_rng.uniform(0.6, 1.4))
        return float(torch.rand(1, generator=self.torch_rng))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.arange(4.0) + index
        return (x * self.factor() if index in self.minority else x), index


KINDS = ["random", "numpy", "torch", "own numpy", "own torch"]
MINORITIES = {
    "every twentieth": set(range(3, LENGTH, 20)),
    "the first ones": {0, 1, 2},
    "neighbours in the middle": {28, 29, 30},
    "the last one": {LENGTH - 1},
}


def seed(number: int = 0) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def states() -> list[bytes]:
    key = np.random.get_state(legacy=False)
    return [repr(random.getstate()).encode(), repr(key).encode(), torch.get_rng_state().numpy().tobytes()]


def run(loader: Any, epochs: int = EPOCHS) -> list[Any]:
    """All that a training sees: batches of all epochs, and the generators' states after each epoch."""
    seen: list[Any] = []
    for _ in range(epochs):
        seen += [[part.tolist() for part in batch] for batch in loader]
        seen.append(states())
    return seen


def cached_of(dataset: Any, **options: Any) -> Any:
    return hotset.cache(dataset, **{"memory": "4MiB", **options})


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*draws? random numbers", category=hotset.HotsetWarning)
        yield


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_states_are_those_of_torch_without_a_cache(kind: str, workers: int) -> None:
    for minority in MINORITIES.values():
        options: dict[str, Any] = {"batch_size": 10, "shuffle": True, "num_workers": workers}
        seed()
        expected = run(DataLoader(Augmented(minority, kind), **options))
        with cached_of(Augmented(minority, kind)) as cached:
            seed()
            assert run(hotset.DataLoader(cached, **options)) == expected
            stats = cached.stats()
            assert (stats.cached, stats.uncached) == (LENGTH - len(minority), len(minority))
            assert cached.check() == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["random", "own numpy"])
def test_through_torchs_own_loader(kind: str, workers: int) -> None:
    minority = MINORITIES["every twentieth"]
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": workers}
    seed()
    expected = run(DataLoader(Augmented(minority, kind), **options))
    with cached_of(Augmented(minority, kind)) as cached:
        seed()
        assert run(DataLoader(cached, **options)) == expected
        assert cached.stats().uncached == len(minority)
