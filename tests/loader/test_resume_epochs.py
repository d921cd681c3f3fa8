"""A state taken at any moment, loaded where all random states differ, gives the batches that would have come.

The rest of the pass and two whole ones after it, with training steps that draw from torch's generator, as
dropout does. torchdata's loader passes the same table: it does what users expect of a state.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, difference, rarely, seed_everything
from resuming import same, through_a_checkpoint, training
from samples import image_and_label
from sources import Samples
from torch.utils.data import DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import hotset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]

N = 10  # three batches of four, the last one short
BATCHES = 3
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


ORDERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffle": lambda data: {"shuffle": True},
    "shuffle, generator=": lambda data: {"shuffle": True, "generator": _seeded(5)},
    "RandomSampler": lambda data: {"sampler": RandomSampler(data, replacement=True)},
    "RandomSampler with its own": lambda data: {"sampler": RandomSampler(data, generator=_seeded(7))},
    "DistributedSampler": lambda data: {"batch_size": 2, "sampler": DistributedSampler(data, 2, 1, seed=3)},
}


@hotset.nondeterministic
def draws(sample: Any) -> Any:
    return sample, torch.rand(2), random.random(), float(np.random.rand())


DATA = ("plain", "cached", "cached, live")


@pytest.fixture(params=DATA)
def data(request: pytest.FixtureRequest) -> Iterator[Any]:
    source = Samples(image_and_label, N)
    if request.param == "plain":
        yield source
        return
    live = [draws] if request.param == "cached, live" else None
    with hotset.cache(source, transform=live, memory="1MiB") as cached:
        yield cached


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# As "pass, batches consumed": a pass's end is the beginning of the next one, and was seen by the consumer.
MOMENTS = {
    "before the first pass": (0, 0),
    "between two batches": (0, 1),
    "after the last batch, whose pass nobody has seen the end of": (0, BATCHES),
    "after a pass": (1, 0),
    "in a later pass": (1, 2),
}


def run(make: Callable[[], Any], save: Callable[[Any], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Four passes: the state at each moment, and the batches after it, those of the pass and of two more."""
    states: dict[tuple[int, int], Any] = {}
    passes: list[list[Any]] = []
    seed_everything(1)
    loader = make()
    for number in range(4):
        passes.append([])
        if (number, 0) in MOMENTS.values():
            states[number, 0] = save(loader.state_dict())
        for batch in loader:
            passes[-1].append(batch)
            torch.rand(3)
            at = number, len(passes[-1])
            if at in MOMENTS.values():
                states[at] = save(loader.state_dict())
    after = {
        name: [passes[number][batches:], *passes[number + 1 : number + 3]]
        for name, (number, batches) in MOMENTS.items()
    }
    return {name: states[at] for name, at in MOMENTS.items()}, after


# Five states, three passes of workers after each: two seconds of processor time for one.
TAKES_LONG = [
    ("workers", "shuffle, generator=", "plain"),
    ("workers", "RandomSampler with its own", "cached, live"),
    ("workers", "DistributedSampler", "cached"),
    ("persistent workers", "shuffle", "cached, live"),
    ("persistent workers", "shuffle, generator=", "cached, live"),
]


@pytest.mark.parametrize(
    ("workers", "order", "data"),
    rarely(all_pairs(WORKERS, ORDERS, DATA), *TAKES_LONG),
    indirect=["data"],
)
def test_a_state_of_any_moment_resumes_in_any_process(workers: str, order: str, data: Any) -> None:
    def make() -> Any:
        return hotset.DataLoader(data, **WORKERS[workers], **{"batch_size": 4, **ORDERS[order](data)})

    states, after = run(make, through_json)
    assert [[len(batches) for batches in one] for one in after.values()] == [
        [3, 3, 3], [2, 3, 3], [0, 3, 3], [3, 3, 3], [1, 3, 3]
    ]  # fmt: skip
    for name, state in states.items():
        random.seed(name)
        torch.manual_seed(random.getrandbits(60)), np.random.seed(random.getrandbits(30))
        loader = make()
        loader.load_state_dict(state)
        got = [training(loader) for _ in after[name]]
        found = difference(got, after[name], "passes")
        assert found is None, f"{name}: {found}"


@pytest.mark.chaos
@pytest.mark.parametrize("workers", WORKERS)
def test_torchdatas_loader_passes_the_same_table(workers: str) -> None:
    """Not with `generator=` or orders drawn from it, where torchdata's loader differs."""
    data = Samples(image_and_label, N)
    for order in ("shuffle", "DistributedSampler"):

        def make(order: str = order) -> Any:
            return StatefulDataLoader(data, **WORKERS[workers], **{"batch_size": 4, **ORDERS[order](data)})

        states, after = run(make, through_a_checkpoint)
        for name, state in states.items():
            seed_everything(2)
            loader = make()
            loader.load_state_dict(state)
            same([training(loader) for _ in after[name]], after[name])


@pytest.mark.parametrize(
    ("workers", "data"), rarely(itertools.product(WORKERS, DATA), ("workers", "plain")), indirect=["data"]
)
def test_a_state_taken_after_break_is_that_of_the_interrupted_pass(workers: str, data: Any) -> None:
    def make() -> Any:
        return hotset.DataLoader(data, batch_size=4, shuffle=True, **WORKERS[workers])

    _, after = run(make, through_json)
    seed_everything(1)
    loader = make()
    for _ in loader:
        torch.rand(3)
        break
    state = through_json(loader.state_dict())
    del loader
    seed_everything(3)
    loader = make()
    loader.load_state_dict(state)
    same([training(loader) for _ in range(3)], after["between two batches"])


def test_all_loaders_of_a_program_resume_from_one_moment() -> None:
    """The validation loader is iterated later, and must not put the trainer's generators back."""

    def epochs(loaders: list[Any], count: int) -> list[Any]:
        return [[training(loader) for loader in loaders] for _ in range(count)]

    def make() -> list[Any]:
        data = Samples(image_and_label, N)
        return [hotset.DataLoader(data, batch_size=4, shuffle=True) for _ in range(2)]

    seed_everything(1)
    loaders = make()
    epochs(loaders, 1)
    states = [through_json(loader.state_dict()) for loader in loaders]
    expected = epochs(loaders, 2)
    seed_everything(2)
    loaders = make()
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
    same(epochs(loaders, 2), expected)


def test_a_trainers_own_random_states_win() -> None:
    """Accelerate takes a loader's state before the step, and its own states after it."""
    data = Samples(image_and_label, N)
    seed_everything(1)
    loader = hotset.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    batches = iter(loader)
    next(batches)
    state = through_json(loader.state_dict())
    torch.rand(3)  # the step
    own = torch.get_rng_state()
    expected = [training(batches), training(loader)]
    del batches
    seed_everything(2)
    loader = hotset.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    loader.load_state_dict(state)
    torch.set_rng_state(own)
    same([training(loader), training(loader)], expected)
