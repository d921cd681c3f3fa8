"""Shared by the tests of resuming: samplers of every kind, caches with live draws, and one comparison.

:func:`check` interrupts a run, saves the state as a checkpoint would, and continues the run. A second loader
with the same arguments, under other random states, resumes from the state. Both must give the same batches:
those of the interrupted pass, and of the passes after it. Transforms draw from the global
generators and from their own, and the "training step" between two batches draws as well.
"""

from __future__ import annotations

import io
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from helpers import difference, seed_everything
from live import halve
from samples import image_and_label
from sources import ListedBatches, Samples
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import hotset

N = 22  # six batches of four, the last one short
BATCHES = 6
deterministic_halve = hotset.deterministic(halve)
Make = Callable[[], Any]


class DrawsFromAll:
    """A live transform: global generators, and two of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(11)
        self.generator = torch.Generator().manual_seed(12)

    def __call__(self, sample: Any) -> Any:
        own = self.rng.random(), float(torch.rand((), generator=self.generator))
        return sample, (random.random(), random.gauss(0, 1), float(np.random.rand()), torch.rand(2), own)


class Remembering(Sampler[int]):
    """A sampler of the user's that has a state, and continues from it in every ``iter()``."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.at = 0
        self.order = torch.randperm(n, generator=torch.Generator().manual_seed(5)).tolist()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield self.order[self.at - 1]
        self.at = 0
        self.order.reverse()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}  # not a copy, as users write it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


class EagerBatches(Sampler[list[int]]):
    """A batch sampler that draws in ``iter()``, not with the first batch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return -(-self.n // 4)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n).tolist()
        return iter([order[at : at + 4] for at in range(0, self.n, 4)])


class Wrapped(Sampler[int]):
    """A sampler around another one that draws from a generator of its own."""

    def __init__(self, n: int) -> None:
        self.inside = SubsetRandomSampler(range(n), generator=torch.Generator().manual_seed(8))
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        yield from self.inside


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# What may follow shuffle's place in a loader's arguments, by name.
ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 4},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "shuffle and drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "shuffle, generator=": lambda: {"batch_size": 4, "shuffle": True, "generator": _generator(5)},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler(range(1, N + 1), N)},
    "subset sampler": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(N))},
    "replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(N), replacement=True, num_samples=N),
    },
    "replacement, own generator": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(N), replacement=True, num_samples=70, generator=_generator(6)),
    },
    "own generator": lambda: {"batch_size": 4, "sampler": RandomSampler(range(N), generator=_generator(7))},
    "with a state": lambda: {"batch_size": 4, "sampler": Remembering(N)},
    "wrapped": lambda: {"batch_size": 4, "sampler": Wrapped(N)},
    "eager batches": lambda: {"batch_sampler": EagerBatches(N)},
    "batches over a sampler": lambda: {"batch_sampler": _OtherBatches(RandomSampler(range(N)), 4, False)},
    "listed batches": lambda: {
        "batch_sampler": ListedBatches([[3], [1, 0, 2], list(range(9, 21)), [5, 5], [7], [8]])
    },
}


class _OtherBatches(BatchSampler):
    """Not torch's own class: it may cut batches in any way."""


class Caches:
    """Makes caches, and closes all of them.

    Called, it makes a new one, cold; :meth:`again` attaches to one that is there, full, with transforms that
    have not drawn yet.
    """

    def __init__(self, template: bytes) -> None:
        self.made: list[Any] = []
        self._template = template

    def again(self) -> Any:
        self.made.append(pickle.loads(self._template))
        return self.made[-1]

    def __call__(self, *, live: bool = True, warm: bool = False, n: int = N) -> Any:
        steps = [deterministic_halve, DrawsFromAll()] if live else [deterministic_halve]
        cached = hotset.cache(Samples(image_and_label, n), transform=steps, memory="4MiB")
        self.made.append(cached)
        if warm:
            cached.__getitems__(list(range(n)))
        return cached


def template_of(n: int = N) -> Iterator[bytes]:
    """A full cache, pickled before any of its transforms had drawn, while it lasts."""
    steps = [deterministic_halve, DrawsFromAll()]
    with hotset.cache(Samples(image_and_label, n), transform=steps, memory="4MiB") as cached:
        as_it_is = pickle.dumps(cached)
        cached.__getitems__(list(range(n)))
        yield as_it_is


def through_a_checkpoint(state: Any) -> Any:
    """What a checkpoint gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def training(batches: Any, count: int | None = None) -> list[Any]:
    """Consume batches with a step after each that draws from torch's generator."""
    consumed = []
    for batch in itertools.islice(batches, count):
        consumed.append(batch)
        torch.rand(3)
    return consumed


def same(got: Any, expected: Any) -> None:
    found = difference(got, expected, "batches")
    assert found is None, found


def check(make: Make, stop: int | None, earlier: list[int | None] | None = None, passes: int = 1) -> None:
    """Interrupt after ``stop`` batches (None: between two passes), after some earlier passes.

    Args:
        earlier: how many batches of each earlier pass are consumed; None for all.
        passes: how many follow.
    """
    seed_everything(1)
    loader = make()
    for count in earlier or []:
        training(iter(loader), count)
    batches = iter(loader) if stop is not None else iter(())
    assert len(training(batches, stop or 0)) == (stop or 0)
    state = through_a_checkpoint(loader.state_dict())
    expected = [training(batches)] + [training(loader) for _ in range(passes)]
    del batches, loader

    seed_everything(2)
    loader = make()
    loader.load_state_dict(state)
    got = [training(loader)] if stop is not None else [[]]
    got += [training(loader) for _ in range(passes)]
    same(got, expected)
