"""A dataset that knows epochs: ``cached.set_epoch(epoch)`` has the effect that it has without a cache."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from helpers import all_pairs, equal_batches, is_a_sentence, rarely, recorded
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

import hotset

N = 12
pytestmark = pytest.mark.filterwarnings("ignore:.* has a set_epoch:hotset.HotsetWarning")


class Course(Dataset[Any]):
    """Its samples depend on a stage, and it may have come to another one in a new epoch."""

    def __init__(self, first: int = 1, *, steady: bool = False) -> None:
        self.first = first  # the epoch of the second stage
        self.steady = steady
        self.stage, self.epoch = 0, 0

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch  # reading does not read it
        self.stage = 0 if self.steady else max(0, epoch + 1 - self.first)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index + 100 * self.stage])


class TwoStages(Course):
    def set_epoch(self, epoch: int) -> None:
        self.stage = int(epoch >= self.first)


class Fairseqs(Dataset[Any]):
    """Has a method for others to override."""

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        """Will receive the updated epoch number at the beginning of the epoch."""

    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.filterwarnings("default")
def test_a_set_epoch_without_statements_is_not_warned_of() -> None:
    with recorded() as told, hotset.cache(Fairseqs(), memory="1MiB"), hotset.cache(Course(), memory="1MiB"):
        pass
    assert [str(each.message).split(",")[0] for each in told] == ["Course has a set_epoch"]


def as_it_is(dataset: Any) -> Any:
    return dataset


def subset(dataset: Any) -> Any:
    return Subset(dataset, list(range(3, N)))


def twice(dataset: Any) -> Any:
    return ConcatDataset([dataset, dataset])


def course(epochs: int, dataset: Any, kind: Any, wrap: Any = as_it_is) -> list[Any]:
    """The batches of these epochs, each begun by ``set_epoch``."""
    torch.manual_seed(3)
    loader = kind(wrap(dataset), batch_size=4, shuffle=True)
    found = []
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        found.append(list(loader))
    return found


WORKERS = {
    "none": {},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


CASES = all_pairs([Course, TwoStages], [DataLoader, hotset.DataLoader], WORKERS, [as_it_is, subset, twice])


@pytest.mark.parametrize(
    ("make", "kind", "workers", "wrap"),
    rarely(CASES, *(case for case in CASES if case[2:] == ("two", subset))),
)
def test_what_set_epoch_changes_counts_from_its_epoch_on(
    make: Any, kind: Any, workers: str, wrap: Any
) -> None:
    expected = course(4, make(), functools.partial(DataLoader, **WORKERS[workers]), wrap)
    with recorded() as told, hotset.cache(make(), memory="1MiB") as cached:
        found = course(4, cached, functools.partial(kind, **WORKERS[workers]), wrap)
        if make is TwoStages and workers != "persistent":
            assert cached.stats().cached == len(set(torch.cat(found[-1]).flatten().tolist()))
    equal_batches(found, expected)
    sentences = [str(each.message) for each in told if "stage has changed" in str(each.message)]
    # Persistent workers do not see it, as without a cache; twice the dataset is two epochs in one.
    if workers != "persistent" and wrap is not twice:
        assert ["again" in each for each in sentences] == [False, True][: 1 + (make is Course)]
    assert all(map(is_a_sentence, sentences))


def test_it_counts_at_once_where_no_pass_begins() -> None:
    with recorded(), hotset.cache(TwoStages(), memory="1MiB") as cached:
        assert [int(cached[index]) for index in range(3)] == [0, 1, 2]
        cached.set_epoch(1)
        assert [int(cached[index]) for index in range(3)] == [100, 101, 102]


@pytest.mark.parametrize("kind", [DataLoader, hotset.DataLoader])
def test_what_no_cached_sample_depends_on_drops_nothing(kind: Any) -> None:
    with recorded() as told, hotset.cache(Course(steady=True), memory="1MiB") as cached:
        course(4, cached, kind)
        assert (cached.stats().cached, cached.stats().misses) == (N, N)
    assert not [each for each in told if "has changed" in str(each.message)]


class Ordered(Course):
    def set_epoch(self, epoch: int) -> None:
        self.order = [(number + max(0, epoch - 1)) % N for number in range(N)]
        self.names = {"first": "a", "second": "b"}

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.order[index]), self.names["second"]


@pytest.mark.parametrize("kind", [DataLoader, hotset.DataLoader])
def test_another_container_of_the_same_values_drops_nothing(kind: Any) -> None:
    plain, source = Ordered(), Ordered()
    plain.set_epoch(0)
    source.set_epoch(0)
    expected = course(3, plain, DataLoader)
    with recorded(), hotset.cache(source, memory="1MiB") as cached:
        equal_batches(course(2, cached, kind), expected[:2])
        assert cached.stats().misses == N
        source.order = list(source.order)
        source.order[0], source.order[1] = 1, 0
        assert [int(x) for batch, _ in kind(cached, batch_size=4) for x in batch] == [1, 0, *range(2, N)]


class Scales:
    """A live transform that reads the dataset's epoch."""

    def __init__(self, of: Course) -> None:
        self.of = of

    def __call__(self, sample: Any) -> Any:
        return sample * (1 + self.of.epoch) + torch.rand(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_live_transforms_alone_read_drops_nothing(workers: int) -> None:
    class Scaled(Course):
        def __getitem__(self, index: int) -> Any:
            return scale(super().__getitem__(index))

    plain, source = Scaled(steady=True), Course(steady=True)
    scale = Scales(plain)
    kind = functools.partial(DataLoader, num_workers=workers)
    expected = course(3, plain, kind)
    live = hotset.nondeterministic(Scales(source))
    with recorded() as told, hotset.cache(source, transform=live, memory="1MiB") as cached:
        equal_batches(course(3, cached, functools.partial(hotset.DataLoader, num_workers=workers)), expected)
        assert cached.stats().misses == N
    assert not [each for each in told if "has changed" in str(each.message)]


@pytest.mark.parametrize("key", [None, "the course"])
def test_the_user_may_say_that_nothing_depends_on_the_epoch(key: str | None) -> None:
    dataset = hotset.deterministic(Course()) if key is None else Course()
    with recorded() as told, hotset.cache(dataset, memory="1MiB", key=key) as cached:
        first, *later = course(3, cached, hotset.DataLoader)
        assert dataset.stage == 2
        assert cached.stats().misses == N
        assert {int(x) for batch in later[-1] for x in batch} == {int(x) for batch in first for x in batch}
    assert not [each for each in told if "has changed" in str(each.message)]


@pytest.mark.parametrize("kind", [DataLoader, hotset.DataLoader])
def test_a_window_moves_on_with_samples_of_the_epoch(kind: Any) -> None:
    window = hotset.Window(8, replace=0.25, wait=True)
    with recorded(), hotset.cache(Course(2), memory="1MiB", window=window) as cached:
        seen = []
        for epoch, batches in enumerate(course(5, cached, kind)):
            stages, places = zip(*(divmod(int(x), 100) for batch in batches for x in batch), strict=True)
            assert set(stages) == {max(0, epoch - 1)}
            seen.append(set(places))
        assert all(len(places) == 8 for places in seen)
        assert [len(after - before) for before, after in itertools.pairwise(seen)] == [2] * 4


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_set_in_mid_pass_counts_in_the_next(workers: int) -> None:
    with recorded(), hotset.cache(TwoStages(), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=1, num_workers=workers)
        batches = iter(loader)
        found = [next(batches)]
        cached.set_epoch(1)
        found += list(batches)
        assert len(found) == N
        assert torch.cat(list(loader)).flatten().tolist() == list(range(100, 100 + N))
        assert cached.stats().cached == N


def test_an_epoch_set_in_mid_pass_counts_in_the_next_for_any_sample_that_was_read_before() -> None:
    class Long(TwoStages):
        def __len__(self) -> int:
            return 400

    order = [200, *range(200), *range(201, 400)]  # few samples are compared, such as the first and last
    with recorded(), hotset.cache(Long(), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=1, sampler=order)
        batches = iter(loader)
        next(batches)
        cached.set_epoch(1)
        list(batches)
        assert torch.cat(list(loader)).flatten().tolist() == [100 + index for index in order]


def begin_second_stage(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.set_epoch(1)


@pytest.mark.parametrize("kind", [DataLoader, hotset.DataLoader])
def test_an_epoch_set_in_a_worker_takes_effect_there(kind: Any) -> None:
    with recorded(), hotset.cache(TwoStages(), memory="1MiB") as cached:
        assert torch.cat(list(kind(cached, batch_size=4))).flatten().tolist() == list(range(N))
        loader = kind(
            cached, batch_size=4, num_workers=2, worker_init_fn=begin_second_stage, collate_fn=torch.cat
        )
        assert torch.cat(list(loader)).flatten().tolist() == list(range(100, 100 + N))


class ByEpoch(Course):
    """Has no set_epoch that counts: programs set its epoch."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index + 100 * self.epoch])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_of_a_dataset_is_its_own(workers: int) -> None:
    own = ByEpoch()
    with recorded(), hotset.cache(own, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, N, num_workers=workers)
        for epoch in range(3):
            loader.dataset.epoch = epoch
            assert (cached.epoch, own.epoch) == (epoch, epoch)
            assert torch.cat(list(loader)).flatten().tolist() == [100 * epoch + index for index in range(N)]
