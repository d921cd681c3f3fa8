"""Without a cache the loader is torch's own: a pass is begun again, and its consumed batches are dropped.

torchdata's StatefulDataLoader runs the same scripts: after loading a state both give the batches that would
have come, and the same ones if the order is not drawn from the global generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, rarely, seed_everything
from resuming import check, same, through_a_checkpoint
from samples import image_and_label
from sources import Samples
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import hotset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]

N = 22


class Noisy(Dataset[Any]):
    """A map-style dataset that draws."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), self.rng.random()


class Stream(IterableDataset[Any]):
    """An iterable dataset with a state: shuffled by its own generator, divided among workers, counted."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        order = self.rng.permutation(N)[info.id :: info.num_workers] if info else self.rng.permutation(N)
        self.passes += 1
        for i in order.tolist():
            yield i, self.passes, float(torch.rand(()))

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Within(IterableDataset[Any]):
    """A stream whose generator is hidden."""

    def __init__(self) -> None:
        self.source = Stream()

    def __iter__(self) -> Iterator[Any]:
        for i, _, noise in self.source:
            yield i, noise


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


PLAIN: dict[str, Callable[..., Any]] = {
    "map-style": lambda **o: hotset.DataLoader(Noisy(), batch_size=4, shuffle=True, **o),
    "one by one": lambda **o: hotset.DataLoader(Noisy(), batch_size=None, shuffle=True, **o),
    "own collate_fn": lambda **o: hotset.DataLoader(
        Noisy(), batch_size=4, shuffle=True, collate_fn=_as_they_are, **o
    ),
    "iterable": lambda **o: hotset.DataLoader(Stream(), batch_size=4, **o),
    "iterable within another": lambda **o: hotset.DataLoader(Within(), batch_size=4, **o),
    "iterable, one by one": lambda **o: hotset.DataLoader(Stream(), batch_size=None, **o),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_an_uncached_pass_is_replayed(kind: str) -> None:
    for stop, earlier in ((3, []), (2, [None]), (2, [1]), (0, []), (None, [None])):
        check(PLAIN[kind], stop, earlier)


@pytest.mark.parametrize("kind", rarely(PLAIN, "iterable", "one by one"))
def test_an_uncached_pass_is_replayed_by_workers(kind: str) -> None:
    check(lambda: PLAIN[kind](num_workers=2), 3, [None])


@pytest.mark.parametrize(("stop", "earlier"), [(3, []), (3, [None]), (None, [None])])
def test_the_order_of_torchs_persistent_workers_is_resumed(
    stop: int | None, earlier: list[int | None]
) -> None:
    """The workers' own draws continue from an earlier pass, so they cannot be repeated; the order can."""
    check(
        lambda: hotset.DataLoader(
            Samples(image_and_label, N), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
        ),
        stop,
        earlier,
    )


def test_passes_after_a_resumed_one_have_orders_of_their_own() -> None:
    """A state of a pass without workers is loaded into a loader with persistent ones."""

    def make(workers: int) -> Any:
        dataset = Samples(image_and_label, N)
        return hotset.DataLoader(
            dataset, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )

    seed_everything(1)
    loader = make(0)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), list(batches)
    loader = make(2)
    loader.load_state_dict(state)
    same(list(loader), rest)
    passes, drawn = [], []
    for _ in range(3):
        passes.append([label for _, labels in loader for label in labels.tolist()])
        drawn.append(float(torch.rand(())))
    assert all(sorted(order) == sorted(passes[0]) for order in passes)
    assert len(set(map(tuple, passes))) == len(set(drawn)) == 3


# ---- beside torchdata --------------------------------------------------------------------------------


class NoisyWithState(Noisy):
    """A dataset that saves the generator that it draws from, as torchdata expects."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["rng"])

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2)


class Drawing(Sampler[int]):
    """Draws each index from its own generator, and has a state that says how far it has come."""

    def __init__(self) -> None:
        self.at = 0
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        while self.at < N:
            self.at += 1
            yield int(torch.randint(N, (1,), generator=self.generator))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["rng"])


class Counting(IterableDataset[Any]):
    """Continues from its position, and begins again at its end, with a state as torchdata expects."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        mine = range(first, N, step)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


# The order is drawn from the global generators in the first two, and each draws otherwise from them.
SCRIPTS: dict[str, Callable[..., Any]] = {
    "shuffle": lambda loader, **o: loader(Samples(image_and_label, N), batch_size=4, shuffle=True, **o),
    "shuffle, draws": lambda loader, **o: loader(NoisyWithState(), batch_size=4, shuffle=True, **o),
    "sampler with a state": lambda loader, **o: loader(
        Samples(image_and_label, N), batch_size=4, sampler=Drawing(), **o
    ),
    "iterable with a state": lambda loader, **o: loader(Counting(), batch_size=4, **o),
}


@pytest.mark.parametrize(
    ("script", "stop", "workers"),
    rarely(all_pairs(SCRIPTS, [2, None], [0, 2]), ("shuffle", None, 2), ("sampler with a state", None, 2)),
)
def test_resumed_batches_equal_torchdatas(script: str, stop: int | None, workers: int) -> None:
    """After two batches and at the end of an epoch; torchdata's also with a snapshot every few batches."""
    came: dict[str, Any] = {}
    variants = {"hotset": (hotset.DataLoader, {}), "torchdata": (StatefulDataLoader, {})}
    if workers:
        variants["snapshots"] = (StatefulDataLoader, {"snapshot_every_n_steps": 5})
    for name, (kind, options) in variants.items():
        seed_everything(9)
        loader = SCRIPTS[script](kind, num_workers=workers, **options)
        batches = iter(loader)
        for _ in range(stop or 0):
            next(batches)
        expected = list(batches)
        if stop is not None:
            # Asked for in the midst of the pass, so of a run of its own.
            seed_everything(9)
            loader = SCRIPTS[script](kind, num_workers=workers, **options)
            batches = iter(loader)
            for _ in range(stop):
                next(batches)
        state, step = through_a_checkpoint(loader.state_dict()), torch.get_rng_state()
        if stop is None:
            expected = list(loader)
        batches = loader = None
        seed_everything(10)
        loader = SCRIPTS[script](kind, num_workers=workers, **options)
        loader.load_state_dict(state)
        torch.set_rng_state(step)
        came[name] = list(loader)
        if name == "hotset":
            same(came[name], expected)
    if not script.startswith("shuffle") and stop is not None:  # theirs begins anew as it pleases
        for name in came:
            same(came[name], came["hotset"])


@pytest.mark.parametrize("script", ["sampler with a state", "iterable with a state"])
def test_a_state_is_loaded_into_the_loader_that_was_interrupted(script: str) -> None:
    """Its sampler or dataset is where the pass was left, and is put back."""
    for kind in (hotset.DataLoader, StatefulDataLoader):
        loader = SCRIPTS[script](kind)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        expected = [next(batches), next(batches)]
        loader.load_state_dict(state)
        batches = iter(loader)
        same([next(batches), next(batches)], expected)
