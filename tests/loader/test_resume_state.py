"""A loader's state is small, does not change, and taking it changes nothing."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import rng_states, seed_everything
from resuming import (
    Caches,
    N,
    Remembering,
    check,
    same,
    template_of,
    through_a_checkpoint,
    training,
)
from samples import image_and_label
from sources import GlobalDraws, Samples
from torch.utils.data import (
    DataLoader,
    Dataset,
)

import hotset
from hotset.errors import HotsetWarning, StateError

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


# ---- what a state is ---------------------------------------------------------------------------------


def _size(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def test_the_size_of_a_state_does_not_depend_on_data_or_batches(caches: Caches) -> None:
    """Except for the digits of a few numbers."""
    sizes = []
    for n in (100, 1_000_000):
        with hotset.cache(_Numbers(n), memory="64MiB") as cached:
            loader = hotset.DataLoader(cached, batch_size=10, shuffle=True)
            batches = iter(loader)
            for count in (0, 1, 7):
                for _ in range(count):
                    next(batches)
                sizes.append(_size(loader.state_dict()))
    assert max(sizes) - min(sizes) < 512
    assert max(sizes) < 40_000


class _Numbers(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_taking_a_state_changes_nothing(workers: int, caches: Caches) -> None:
    def run(asks: bool) -> Any:
        seed_everything(8)
        loader = hotset.DataLoader(caches(), batch_size=4, shuffle=True, num_workers=workers)
        states = [loader.state_dict()] if asks else []
        seen = []
        for _ in range(2):
            for batch in loader:
                states += [loader.state_dict()] if asks else []
                seen.append((batch, rng_states()))
            states += [loader.state_dict()] if asks else []
        return seen

    same(run(asks=True), run(asks=False))


def test_a_state_does_not_change_as_its_loader_continues(caches: Caches) -> None:
    loader = hotset.DataLoader(caches(), batch_size=4, sampler=Remembering(N), num_workers=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    before = through_a_checkpoint(state)
    list(batches)
    list(loader)
    same(through_a_checkpoint(state), before)


def test_before_iter_state_dict_returns_the_loaded_state(caches: Caches) -> None:
    loader = hotset.DataLoader(caches(), batch_size=4, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    other = hotset.DataLoader(caches(), batch_size=4, shuffle=True)
    other.load_state_dict(state)
    same(other.state_dict(), state)
    next(iter(other))
    assert other.state_dict()["batches"] == 2


def test_a_state_with_in_order_false_gives_a_warning(caches: Caches) -> None:
    loader = hotset.DataLoader(caches(), batch_size=4, num_workers=2, in_order=False)
    with pytest.warns(HotsetWarning, match="in_order=True"):
        loader.state_dict()


# ---- with and without a cache -------------------------------------------------------------------------


@pytest.mark.parametrize("cached_later", [False, True])
def test_a_state_resumes_with_and_without_a_cache(cached_later: bool, caches: Caches) -> None:
    """One side has no fingerprint: the user vouches for the samples, and none is lost."""
    data = [Samples(image_and_label, N), hotset.cache(Samples(image_and_label, N), memory="1MiB")]
    caches.made.append(data[1])
    first, second = data if cached_later else data[::-1]
    loader = hotset.DataLoader(first, batch_size=4, shuffle=True)
    batches = iter(loader)
    training(batches, 2)
    state = loader.state_dict()
    other: DataLoader[Any] = hotset.DataLoader(second, batch_size=4, shuffle=True)
    other.load_state_dict(state)  # type: ignore[attr-defined]
    same(list(other), list(batches))


def test_later_orders_continue_from_the_restored_global_generator(caches: Caches) -> None:
    """An order drawn sample by sample depends on the trainer's steps too, and continues with its states."""
    check(lambda: hotset.DataLoader(caches(), batch_size=4, sampler=GlobalDraws(N, 18)), 2, [None])


@pytest.mark.parametrize("place", [-1, 625, 10**6])
def test_a_position_beyond_the_end_of_a_generators_buffer_is_refused(place: int, caches: Caches) -> None:
    """numpy would accept it, and read the memory beyond its buffer."""
    loader = hotset.DataLoader(caches.again(), batch_size=4)
    next(iter(loader))
    state = through_a_checkpoint(loader.state_dict())
    state["in_process"]["numpy.random's global state"]["state"]["pos"] = place
    with pytest.raises(StateError, match="pos"):
        loader.load_state_dict(state)
