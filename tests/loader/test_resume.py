"""Resuming a loader: the rest of the pass is bit for bit what it would have been."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import rarely, rng_states, seed_everything
from live import draw_all
from resuming import (
    BATCHES,
    ORDERS,
    Caches,
    DrawsFromAll,
    EagerBatches,
    N,
    check,
    same,
    template_of,
    through_a_checkpoint,
    training,
)
from samples import image_and_label
from sources import Samples
from torch.utils.data import (
    ConcatDataset,
    SequentialSampler,
    Subset,
)

import hotset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def template() -> Iterator[bytes]:
    yield from template_of()


@pytest.fixture
def caches(template: bytes) -> Iterator[Caches]:
    made = Caches(template)
    yield made
    for cached in made.made:
        cached.close()


# ---- without workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_pass_resumes_without_workers(order: str, caches: Caches) -> None:
    for stop, earlier in ((0, []), (1, [None]), (3, []), (3, [2]), (None, []), (None, [None])):
        check(lambda: hotset.DataLoader(caches.again(), **ORDERS[order]()), stop, earlier)


def test_a_pass_resumes_after_each_batch(caches: Caches) -> None:
    for stop in range(BATCHES + 1):
        check(lambda: hotset.DataLoader(caches.again(), batch_size=4, shuffle=True), stop, [None], passes=2)


@pytest.mark.parametrize("order", ["shuffle", "weighted", "with a state", "listed batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gathered_batches(order: str, workers: int, caches: Caches) -> None:
    """Everything cached, nothing live: no workers are used, but the draws are those with workers."""

    def run(resume: bool) -> Any:
        seed_everything(3)
        cached = caches(live=False, warm=True)
        make = lambda: hotset.DataLoader(cached, num_workers=workers, **ORDERS[order]())  # noqa: E731
        loader = make()
        training(loader)
        batches = iter(loader)
        training(batches, 3)
        if resume:
            state, step = through_a_checkpoint(loader.state_dict()), torch.get_rng_state()
            seed_everything(4)
            loader = make()
            loader.load_state_dict(state)
            torch.set_rng_state(step)
            batches = iter(loader)
        return training(batches), training(loader), rng_states()[2]

    same(run(resume=True), run(resume=False))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_began_cold_resumes_warm_and_the_reverse(workers: int, caches: Caches) -> None:
    for first in (False, True):
        warmth = iter((first, not first))
        options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}

        def make(warmth: Any = warmth, options: Any = options) -> Any:
            cached = caches(live=workers > 0, warm=next(warmth))
            return hotset.DataLoader(cached, **options)

        seed_everything(5)
        loader = make()
        batches = iter(loader)
        training(batches, 2)
        state, step = loader.state_dict(), torch.get_rng_state()
        expected = training(batches)
        batches = None
        other = make()
        other.load_state_dict(state)
        torch.set_rng_state(step)
        same(training(other), expected)


def test_a_pass_over_subset_and_concatenation_resumes(caches: Caches) -> None:
    def make() -> Any:
        both = ConcatDataset([Subset(caches(), [5, 3, 3, 21, 0, 8, 13]), caches(n=9)])
        return hotset.DataLoader(both, batch_size=3, shuffle=True)

    check(make, 2, [None])


class FailsOnce(SequentialSampler):
    """Its pass cannot begin the first time that it is to."""

    fails = False

    def __iter__(self) -> Iterator[int]:
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt
        return super().__iter__()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_cannot_begin_is_resumed_by_the_next_iter(workers: int, caches: Caches) -> None:
    cached = caches(live=False)
    order = FailsOnce(cached)
    loader = hotset.DataLoader(cached, batch_size=4, sampler=order, num_workers=workers)
    batches = iter(loader)
    training(batches, 2)
    loader.load_state_dict(state := loader.state_dict())
    order.fails = True
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    assert loader.state_dict() == state
    same(training(loader), training(batches))


# ---- with workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "persistent", "prefetch", "stop", "earlier"),
    [
        (1, False, 2, 2, []),
        (1, True, 4, None, [None]),
        (2, False, 1, 3, [None]),
        pytest.param(2, False, 4, 1, [], marks=pytest.mark.chaos),
        (2, False, 2, None, [None]),
        (2, True, 1, 3, [None]),
        (2, True, 2, 0, [None]),
        pytest.param(2, True, 2, BATCHES, [None], marks=pytest.mark.chaos),
        (2, True, 2, None, [None]),
        (3, True, 1, 4, []),
    ],
)
def test_a_pass_resumes_with_workers(
    workers: int, persistent: bool, prefetch: int, stop: int | None, earlier: list[int | None], caches: Caches
) -> None:
    options: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": persistent,
        "prefetch_factor": prefetch,
    }
    check(lambda: hotset.DataLoader(caches.again(), batch_size=4, shuffle=True, **options), stop, earlier)


@pytest.mark.parametrize(
    ("order", "persistent"),
    rarely(
        itertools.product(
            ["weighted", "shuffle, generator=", "with a state", "eager batches"], [False, True]
        ),
        ("shuffle, generator=", False),
        ("eager batches", False),
        ("weighted", True),
        ("with a state", True),
    ),
)
def test_a_pass_in_any_order_resumes_with_workers(order: str, persistent: bool, caches: Caches) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    check(lambda: hotset.DataLoader(caches.again(), **options, **ORDERS[order]()), 2, [None])


@pytest.mark.parametrize(("left", "stop"), rarely([(3, 0), (1, 1), (0, 1)], (3, 0)))
def test_draws_for_unconsumed_batches_of_persistent_workers_are_repeated(
    left: int, stop: int, caches: Caches
) -> None:
    """A pass that was left early: the workers have drawn beyond its last consumed batch."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "batch_size": 4, "shuffle": True}
    check(lambda: hotset.DataLoader(caches(), **options), stop, [left])


@pytest.mark.chaos
def test_a_pass_resumes_with_spawned_workers(caches: Caches) -> None:
    """With a transform that holds no torch.Generator, as torch cannot pickle one."""
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}

    def make() -> Any:
        caches.made.append(hotset.cache(Samples(image_and_label, N), transform=[draw_all], memory="1MiB"))
        return hotset.DataLoader(caches.made[-1], batch_size=4, shuffle=True, **options)

    check(make, 3, passes=0)


@pytest.mark.parametrize("stop", [0, 1])
def test_a_loader_with_running_workers_loads_a_state(stop: int, caches: Caches) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "batch_size": 4, "shuffle": True}
    seed_everything(6)
    loader = hotset.DataLoader(caches(), **options)
    batches = iter(loader)
    training(batches, stop)
    state, step = loader.state_dict(), torch.get_rng_state()
    expected = training(batches), training(loader)
    loader.load_state_dict(state)
    torch.set_rng_state(step)
    same((training(loader), training(loader)), expected)


def test_a_resumed_loader_is_resumed_again(caches: Caches) -> None:
    """Saved in the midst of a pass that was itself resumed, and resumed with other workers."""
    make = lambda workers: hotset.DataLoader(caches(), batch_size=4, shuffle=True, num_workers=workers)  # noqa: E731
    seed_everything(7)
    loader = make(0)
    batches = iter(loader)
    training(batches, 1)
    state = loader.state_dict()
    loader = make(2)
    loader.load_state_dict(state)
    batches = iter(loader)
    training(batches, 2)
    state = loader.state_dict()
    expected = training(batches)
    loader = make(2)
    loader.load_state_dict(state)
    same(training(loader), expected)


def test_a_state_holds_the_generators_of_a_transform_that_was_set_meanwhile() -> None:
    class Pictures(Samples):
        transform: Any = DrawsFromAll()

        def __getitem__(self, index: int) -> Any:
            return self.transform(super().__getitem__(index))

    def make() -> Any:
        cached = hotset.cache(Pictures(image_and_label, N), memory="4MiB")
        return hotset.DataLoader(cached, batch_size=4)

    loader = make()
    training(loader)
    assert loader.state_dict()
    loader.dataset.transform = DrawsFromAll()
    batches = iter(loader)
    training(batches, 2)
    state = through_a_checkpoint(loader.state_dict())
    expected = training(batches)
    other = make()
    other.dataset.transform = DrawsFromAll()
    other.load_state_dict(state)
    same(training(other), expected)
    for each in (loader, other):
        each.dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_draw_and_are_read_in_batches_draw_the_same_once_resumed(workers: int) -> None:
    """Without a cache, as it was closed."""

    class Together(Samples):
        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(()) if index in (5, 20, 22, 27) else torch.zeros(())

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    def make() -> Any:
        cached = hotset.cache(Together(image_and_label, 32), memory="1MiB")
        cached.close()
        return hotset.DataLoader(cached, batch_size=4, num_workers=workers)

    loader, other = make(), make()
    batches = iter(loader)
    consumed = [next(batches) for _ in range(3)]
    state, expected = through_a_checkpoint(loader.state_dict()), list(batches)
    assert consumed[1][1].any()
    other.load_state_dict(state)
    same(list(other), expected)


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("workers", [(2, 0, 0), (2, 0, 2), (0, 2, 0), (0, 2, 2)])
def test_a_pass_that_is_resumed_twice_keeps_the_order_that_it_began_with(
    workers: tuple[int, ...], is_cached: bool, caches: Caches
) -> None:
    """torch calls a sampler's iter() twice with workers, and a batch sampler may draw in it."""
    seed_everything(9)
    data = caches() if is_cached else Samples(image_and_label, N)
    state, seen = None, list[bytes]()
    for turn, count in enumerate(workers):
        loader = hotset.DataLoader(data, batch_sampler=EagerBatches(N), num_workers=count)
        if state is not None:
            seed_everything(10 + turn)
            loader.load_state_dict(state)
        batches = iter(loader)
        for batch in training(batches, 2 if turn < 2 else None):
            images = batch[0][0] if is_cached else batch[0]
            seen += [image.numpy().tobytes() for image in images]
        state = through_a_checkpoint(loader.state_dict())
        del batches
    assert len(seen) == len(set(seen)) == N
