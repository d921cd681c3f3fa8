"""Resuming with other numbers of workers, samples in a batch and ranks; and states that must be refused.

Ranks are loaders with a DistributedSampler of their own in one process. What they have consumed together, and
what is left, is compared as a whole: none twice and none dropped, except the samples that DistributedSampler
itself repeats to make all parts equally long, or leaves out with ``drop_last``.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import failure, is_a_sentence, rarely, rng_states, seed_everything
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import draw_all
from resuming import EagerBatches, through_a_checkpoint
from samples import number
from sources import Samples
from test_resume_replay import Stream
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import hotset
from hotset.errors import HotsetWarning, StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

N = 41


@pytest.fixture(scope="module")
def cached() -> Iterator[Any]:
    with hotset.cache(Samples(number, N), transform=[hotset.deterministic(int)], memory="1MiB") as made:
        made.__getitems__(list(range(N)))
        yield made


@pytest.fixture(scope="module")
def live() -> Iterator[Any]:
    with hotset.cache(Samples(number, N), transform=[draw_all], memory="1MiB") as made:
        made.__getitems__(list(range(N)))
        yield made


def refusal(saved: hotset.DataLoader[Any], now: hotset.DataLoader[Any]) -> str:
    """Why a pass that one loader has begun cannot be resumed by the other."""
    next(iter(saved))
    with pytest.raises(StateError) as told:
        now.load_state_dict(saved.state_dict())
    assert is_a_sentence(str(told.value))
    return str(told.value)


def test_a_pass_of_samples_is_not_resumed_in_batches(cached: Any) -> None:
    def loader(size: int | None) -> hotset.DataLoader[Any]:
        return hotset.DataLoader(cached, batch_size=size)

    alone, both = "batch_size=None over SequentialSampler", "BatchSampler over SequentialSampler"
    assert f"with {both}, and this one has {alone}" in refusal(loader(4), loader(None))
    assert f"with {alone}, and this one has {both}" in refusal(loader(None), loader(4))


@pytest.mark.parametrize("size", [4, None])
def test_a_state_whose_sampler_has_no_name_is_refused(cached: Any, size: int | None) -> None:
    loader = hotset.DataLoader(cached, batch_size=size)
    state = loader.state_dict()
    state["cut"][1] = []
    with pytest.raises(StateError, match="use the same samplers"):
        loader.load_state_dict(state)


def test_a_pass_of_samples_is_not_divided_anew_among_ranks(cached: Any) -> None:
    def loader(ranks: int) -> hotset.DataLoader[Any]:
        return hotset.DataLoader(cached, batch_size=None, sampler=DistributedSampler(cached, ranks, 0))

    assert "from 2 ranks, and there are 3 now" in refusal(loader(2), loader(3))


def flat(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch]


def samples(order: Any) -> list[int]:
    return [number(i) for i in order]


# ---- workers and batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["shuffle", "weighted", "generator="])
def test_a_pass_resumes_with_another_batch_size(order: str, cached: Any) -> None:
    """Also twice within one pass, and into the same size again."""

    def make(size: int) -> Any:
        if order == "weighted":
            return hotset.DataLoader(cached, size, sampler=WeightedRandomSampler(torch.ones(N), N))
        generator = torch.Generator().manual_seed(3) if order == "generator=" else None
        return hotset.DataLoader(cached, size, shuffle=True, generator=generator)

    seed_everything(1)
    whole = flat(make(4))
    seed_everything(1)
    loader, seen = make(4), []
    for size in (7, 3, 3, 10):
        batches = iter(loader)
        seen += flat(itertools.islice(batches, 2))
        torch.rand(5)  # the trainer's
        state = loader.state_dict()
        loader = make(size)
        loader.load_state_dict(state)
    rest = list(loader)
    assert seen + flat(rest) == whole
    assert [len(batch) for batch in rest] == [N - 2 * (4 + 7 + 3 + 3)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_resumes_with_another_batch_size_and_drop_last(drop_last: bool, cached: Any) -> None:
    loader = hotset.DataLoader(cached, 4, drop_last=drop_last)
    next(iter(loader))
    other = hotset.DataLoader(cached, 10, drop_last=drop_last)
    other.load_state_dict(loader.state_dict())
    rest = list(other)
    assert [len(batch) for batch in rest] == [10, 10, 10] + ([] if drop_last else [7])
    assert flat(rest) == samples(range(4, 34 if drop_last else N))


@pytest.mark.parametrize(
    ("before", "after", "order"),
    rarely(
        [
            (before, after, order)
            for before, after in ((0, 2), (2, 0), (2, 3))
            for order in ("shuffle", "generator=", "drawn in iter()")
        ],
        (2, 3, "generator="),
        (0, 2, "drawn in iter()"),
    ),
)
def test_a_pass_resumes_with_another_number_of_workers(
    before: int, after: int, order: str, live: Any
) -> None:
    """With live transforms, so that workers make the batches; the samples are compared, not the draws."""

    def make(workers: int) -> Any:
        if order == "drawn in iter()":
            return hotset.DataLoader(live, batch_sampler=EagerBatches(N), num_workers=workers)
        generator = torch.Generator().manual_seed(3) if order == "generator=" else None
        return hotset.DataLoader(live, batch_size=4, shuffle=True, generator=generator, num_workers=workers)

    def values(batches: Any) -> list[Any]:
        return [int(value) for batch in batches for value in innermost(batch)]

    loader = make(before)
    batches = iter(loader)
    seen = values(itertools.islice(batches, 3))
    state = loader.state_dict()
    expected = values(batches)
    second = values(loader) if order == "generator=" else None
    batches = None
    other = make(after)
    other.load_state_dict(state)
    assert values(other) == expected
    assert sorted(seen + expected) == sorted(samples(range(N)))
    if second is not None:
        assert values(other) == second


def innermost(batch: Any) -> Any:
    while isinstance(batch, dict):
        batch = batch["sample"]
    return batch


# ---- ranks -------------------------------------------------------------------------------------------


def ranks_of(cached: Any, count: int, *, drop_last: bool = False, kind: Any = DistributedSampler) -> Any:
    return [
        hotset.DataLoader(
            cached, 3, sampler=kind(cached, num_replicas=count, rank=rank, seed=2, drop_last=drop_last)
        )
        for rank in range(count)
    ]


def states_after(loaders: Any, batches: int, seen: list[int]) -> Any:
    for loader in loaders:
        seen += flat(itertools.islice(iter(loader), batches))
    return [loader.state_dict() for loader in loaders]


def check_dealt(rest: list[list[int]], seen: list[int], ranks: int, drop_last: bool) -> None:
    """The ranks' rests have one length, and together are the samples that were not consumed, padded."""
    left = N - len(seen)
    share = left // ranks if drop_last else math.ceil(left / ranks)
    assert [len(part) for part in rest] == [share] * ranks
    missing = Counter(samples(range(N))) - Counter(seen)
    together = Counter(itertools.chain.from_iterable(rest))
    if drop_last:
        assert not together - missing
        assert (missing - together).total() == left - share * ranks < ranks
    else:
        assert set(together) == set(missing)
        assert (together - missing).total() == share * ranks - left < ranks


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (2, 1), (1, 2), (3, 5)])
@pytest.mark.parametrize("consumed", [0, 1, 2])
def test_a_pass_resumes_with_another_number_of_ranks(
    before: int, after: int, drop_last: bool, consumed: int, cached: Any
) -> None:
    loaders = ranks_of(cached, before, drop_last=drop_last)
    for loader in loaders:
        loader.sampler.set_epoch(5)
    seen: list[int] = []
    states = states_after(loaders, consumed, seen)
    others = ranks_of(cached, after, drop_last=drop_last)
    for loader in others:
        loader.load_state_dict(states[0])
    rest = [flat(loader) for loader in others]
    check_dealt(rest, seen, after, drop_last)
    for loader in others:  # and the next epoch is a whole one
        loader.sampler.set_epoch(6)
    following = Counter(itertools.chain.from_iterable(flat(loader) for loader in others))
    assert (Counter(samples(range(N))) - following).total() == (N % after if drop_last else 0)


def test_ranks_change_again_and_again_within_one_pass(cached: Any) -> None:
    seen: list[int] = []
    states = states_after(ranks_of(cached, 2), 1, seen)
    for count in (3, 3, 2, 2, 1, 3):
        loaders = ranks_of(cached, count)
        for loader in loaders:
            loader.load_state_dict(through_a_checkpoint(states[0]))
        states = states_after(loaders, 1, seen)
    # 6, 15, 24, 30, 36, 39 have been seen, and three ranks share two: one comes twice.
    loaders = ranks_of(cached, 3)
    assert set(seen) == set(samples(range(N)))
    assert len(seen) == N + 1
    for loader in loaders:
        loader.load_state_dict(states[0])
        assert flat(loader) == []


def test_a_pass_resumes_with_other_ranks_and_another_batch_size(cached: Any) -> None:
    seen: list[int] = []
    state = states_after(ranks_of(cached, 2), 2, seen)[0]
    rest = []
    for rank in range(3):
        loader = hotset.DataLoader(cached, 5, sampler=DistributedSampler(cached, 3, rank, seed=2))
        loader.load_state_dict(state)
        batches = list(loader)
        assert [len(batch) for batch in batches] == [5, 5]
        rest.append(flat(batches))
    check_dealt(rest, seen, 3, drop_last=False)


@pytest.mark.parametrize("kind", [DistributedSampler, StatefulDistributedSampler])
def test_an_interrupted_epoch_resumes_without_set_epoch(kind: Any, cached: Any) -> None:
    """torchdata's sampler keeps a count, which is at the end of the last pass: it must not be loaded."""
    loader = ranks_of(cached, 2, kind=kind)[1]
    list(loader)
    loader.sampler.set_epoch(7)
    batches = iter(loader)
    next(batches)
    other = ranks_of(cached, 2, kind=kind)[1]
    other.load_state_dict(loader.state_dict())
    assert flat(other) == flat(batches) != []
    assert other.sampler.epoch == 7


def test_a_state_of_another_rank_leaves_the_random_states_alone(cached: Any) -> None:
    """Each rank's dropout draws by itself: only a rank's own state says how far that has come."""
    first, second = ranks_of(cached, 2)
    seed_everything()
    next(iter(first))
    state = first.state_dict()
    torch.rand(3)
    before = rng_states()
    second.load_state_dict(state)
    assert rng_states() == before
    first.load_state_dict(state)
    assert rng_states() != before


def test_setting_another_epoch_drops_the_interrupted_one_with_a_warning(cached: Any) -> None:
    loader = ranks_of(cached, 2)[0]
    loader.sampler.set_epoch(7)
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.sampler.set_epoch(7)  # as a training loop does
    assert len(flat(loader)) == 21 - 3
    loader.load_state_dict(state)
    loader.sampler.set_epoch(8)
    with pytest.warns(HotsetWarning, match="epoch"):
        got = flat(loader)
    expected = DistributedSampler(cached, 2, 0, seed=2)
    expected.set_epoch(8)
    assert got == samples(expected)


def test_between_two_epochs_the_user_sets_the_next_one(cached: Any) -> None:
    loader = ranks_of(cached, 2)[0]
    list(loader)
    other = ranks_of(cached, 2)[0]
    other.load_state_dict(loader.state_dict())
    other.sampler.set_epoch(1)  # no warning: warnings are errors here
    assert len(flat(other)) == 21


# ---- states that must be refused ---------------------------------------------------------------------


def refused(load: Any) -> str:
    found = failure(load)
    assert found.kind is StateError, found.text
    sentence = found.last_line.split("StateError: ")[-1]  # a worker's comes with its traceback
    assert is_a_sentence(sentence), sentence
    return sentence


def test_states_of_other_loaders_are_refused(cached: Any) -> None:
    loader = hotset.DataLoader(cached, 4, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    with hotset.cache(Samples(number, 7), memory="1MiB") as shorter:
        assert "41 samples" in refused(lambda: hotset.DataLoader(shorter, 4).load_state_dict(state))
    with hotset.cache(Samples(float, N), memory="1MiB") as different:
        other = hotset.DataLoader(different, 4, shuffle=True)
        assert "fingerprint" in refused(lambda: other.load_state_dict(state))
    assert "SequentialSampler" in refused(lambda: hotset.DataLoader(cached, 4).load_state_dict(state))
    sampler = SubsetRandomSampler(range(N))
    other = hotset.DataLoader(cached, 4, sampler=sampler)
    assert "SubsetRandomSampler" in refused(lambda: other.load_state_dict(state))
    other = hotset.DataLoader(cached, batch_sampler=EagerBatches(N))
    assert "EagerBatches" in refused(lambda: other.load_state_dict(state))
    assert "format 3" in refused(lambda: loader.load_state_dict({**state, "format": 3}))
    for nothing in (None, 3, [], {}, {"epoch": 3}, "state"):
        assert "state must be" in refused(lambda nothing=nothing: loader.load_state_dict(nothing))
    for name in state:
        if name != "format":
            lacks = {key: value for key, value in state.items() if key != name}
            refused(lambda lacks=lacks: loader.load_state_dict(lacks))


def test_a_refused_state_leaves_the_loader_as_it_was(cached: Any) -> None:
    loader = hotset.DataLoader(cached, 4, sampler=SequentialSampler(cached))
    refused(lambda: loader.load_state_dict({"format": 1}))
    assert flat(loader) == samples(range(N))


def test_a_state_that_torchs_own_loader_cannot_replay_is_refused() -> None:
    stream = hotset.DataLoader(Stream(), 4, num_workers=2)
    batches = iter(stream)
    next(batches)
    state = stream.state_dict()
    batches = None
    assert "num_workers" in refused(lambda: hotset.DataLoader(Stream(), 4).load_state_dict(state))
    assert "batch size" in refused(
        lambda: hotset.DataLoader(Stream(), 5, num_workers=2).load_state_dict(state)
    )
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    plain = hotset.DataLoader(Samples(number, N), num_workers=1, persistent_workers=True, **options)
    list(plain)
    batches = iter(plain)
    next(batches)
    state = plain.state_dict()
    batches = plain = None
    other = hotset.DataLoader(Samples(number, N), **options)
    assert "persistent" in refused(lambda: other.load_state_dict(state))


def test_a_worker_refuses_a_damaged_state() -> None:
    with hotset.cache(Samples(number, N), transform=[draw_all], memory="1MiB") as live:
        loader = hotset.DataLoader(live, 4, num_workers=1)
        batches = iter(loader)
        next(batches)
        state = copy.deepcopy(loader.state_dict())
        batches = None
        state["in_workers"]["0"]["torch's global state"]["torch"] = "AAAA" * 1685 + "AA=="
        loader.load_state_dict(state)
        refused(lambda: list(loader))


def test_an_empty_state_of_a_generator_is_refused() -> None:
    """numpy 1 ends the process where it is given an empty list."""
    with hotset.cache(Samples(number, N), transform=[draw_all], memory="1MiB") as live:
        loader = hotset.DataLoader(live, 3)
        next(iter(loader))
        for name in loader.state_dict()["in_process"]:
            state = loader.state_dict()
            state["in_process"][name] = []
            refused(lambda state=state: loader.load_state_dict(state))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*path, key))


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 60), st.floats(), st.text(max_size=3),
    st.binary(max_size=9), st.just([]), st.just({}), st.just(10**13), st.just(-(2**200)),
    st.lists(st.integers(0, 5), max_size=5), st.dictionaries(st.text(max_size=3), st.integers()),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["distributed", "generators"])
def test_any_mutated_state_is_refused_or_resumes(kind: str, cached: Any) -> None:
    """There is never another exception, nor a sample that is not the dataset's."""
    with hotset.cache(Samples(number, N), transform=[draw_all], memory="1MiB") as live:

        def make() -> Any:
            if kind == "distributed":
                return hotset.DataLoader(cached, 3, sampler=DistributedSampler(cached, 2, 0))
            generator = torch.Generator().manual_seed(3)
            return hotset.DataLoader(live, 3, sampler=RandomSampler(live, generator=generator))

        loader = make()
        next(iter(loader))
        state = loader.state_dict()
        whole = set(samples(range(N)))
        target = make()

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.data())
        def mutate(data: Any) -> None:
            seed_everything()
            changed = copy.deepcopy(state)
            for _ in range(data.draw(st.integers(1, 2))):
                path = data.draw(st.sampled_from(list(_paths(changed))[1:]))
                holder = changed
                for key in path[:-1]:
                    holder = holder[key]
                old = holder[path[-1]]
                if isinstance(old, bytes) and old and data.draw(st.booleans()):
                    at = data.draw(st.integers(0, len(old) - 1))
                    holder[path[-1]] = old[:at] + data.draw(st.binary(max_size=8)) + old[at + 4 :]
                elif isinstance(holder, dict) and data.draw(st.integers(0, 4)) == 0:
                    del holder[path[-1]]
                else:
                    holder[path[-1]] = data.draw(ANYTHING)
            try:
                target.load_state_dict(changed)
                batches = list(target)
            except StateError:
                return
            assert {int(value) for batch in batches for value in innermost(batch)} <= whole

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an epoch that was not asked for
            mutate()
