"""Attributes that are set on a cached dataset are set on the dataset, and the cache follows them."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import all_pairs, equal_batches, rarely, recorded
from kills import in_child
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

import hotset

N = 12


class Pictures(Dataset[Any]):
    """Like torchvision's datasets."""

    def __init__(self, transform: Any = None, target_transform: Any = None) -> None:
        self.transform = transform
        self.target_transform = target_transform
        self.scale = 1
        self.classes = ["a", "b"]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if not -N <= index < N:
            raise IndexError(index)
        image, label = torch.full((4,), float(index * self.scale)), index % 3
        image = self.transform(image) if self.transform is not None else image
        return image, self.target_transform(label) if self.target_transform is not None else label


class Times:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Pair:
    def __init__(self, of: Any) -> None:
        self.of = of

    def __call__(self, sample: Any) -> Any:
        return self.of(sample[0]), sample[1]


class Noise:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4) + random.random()


def plus_ten(label: int) -> int:
    return label + 10


LOADERS = {
    "torch": functools.partial(DataLoader, batch_size=5),
    "hotset": functools.partial(hotset.DataLoader, batch_size=5),
}


def two_epochs(loader: Any) -> list[Any]:
    torch.manual_seed(5)
    random.seed(5)
    return [batch for _ in range(2) for batch in loader]


def same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        equal_batches(one, other)


def sets_transform(dataset: Any) -> None:
    dataset.transform = Times(3)


def sets_noise(dataset: Any) -> None:
    dataset.transform = Noise()


def sets_none(dataset: Any) -> None:
    dataset.transform = None


def sets_target(dataset: Any) -> None:
    dataset.target_transform = plus_ten


def sets_both(dataset: Any) -> None:
    dataset.transform = Times(3)
    dataset.target_transform = plus_ten


def sets_another(dataset: Any) -> None:
    dataset.scale = 7


CHANGES = (sets_transform, sets_noise, sets_none, sets_target, sets_both, sets_another)


@pytest.mark.parametrize(
    ("change", "through", "made_by", "workers"),
    rarely(
        all_pairs(CHANGES, ["cached", "the dataset", "a Subset"], LOADERS, [0, 2]),
        (sets_transform, "the dataset", "hotset", 2),
        (sets_noise, "a Subset", "torch", 2),
        (sets_target, "cached", "hotset", 2),
        (sets_both, "the dataset", "hotset", 2),
    ),
)
def test_a_set_attribute_takes_effect_as_on_the_dataset(
    change: Any, through: str, made_by: str, workers: int
) -> None:
    make = LOADERS[made_by]
    plain = Pictures(Times(2))
    # Where nothing is drawn, it is the same without workers.
    plain_loader = make(plain, num_workers=workers if change is sets_noise else 0)
    same_before = two_epochs(plain_loader)
    change(plain)
    expected = two_epochs(plain_loader)
    with recorded() as told, hotset.cache(Pictures(Times(2)), memory="1MiB") as cached:
        same(two_epochs(make(cached, num_workers=workers)), same_before)
        part: Any = Subset(cached, range(N))
        change({"cached": cached, "the dataset": cached.dataset, "a Subset": part.dataset}[through])
        same(two_epochs(make(cached, num_workers=workers)), expected)
        assert cached.stats().cached == N, "it is cached anew"
        late = through == "the dataset" and made_by == "torch" and workers > 0
        assert late or cached.stats().hits >= N, "only torch's workers begin before it can be noticed"
        equal_batches(list(cached.plan.live), ["Noise"] if change is sets_noise else [])
    words = [str(w.message) for w in told]
    if change is sets_another:
        assert len(words) == 1
        how = "has changed" if through == "the dataset" else "was set"
        assert f"Pictures.scale {how}" in words[0]
        assert f"{N} cached samples" in words[0]
    else:
        assert words == []


@pytest.mark.parametrize("made_by", LOADERS)
def test_an_attribute_that_is_set_for_each_epoch_ends_the_cache(made_by: str) -> None:
    plain = Pictures()
    with recorded() as told, hotset.cache(Pictures(), memory="1MiB") as cached:
        before, loader = LOADERS[made_by](plain), LOADERS[made_by](cached)
        cached.scale = 9
        for epoch in range(5):
            plain.scale = cached.scale = epoch
            same(list(loader), list(before))
        assert cached.stats().cached == 0
    words = [str(w.message) for w in told]
    assert len(words) == 2
    assert f"Pictures.scale was set, and samples may depend on it, so {N} cached samples" in words[0]
    assert "Pictures.scale has changed again before its cache has served an epoch" in words[1]


class WithMethods(Pictures):
    def __init__(self) -> None:
        super().__init__(Times(2))
        self.numbers = list(range(N))
        self.looked_up = 0
        self._labels: list[int] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.numbers[index])

    def set_scale(self, scale: int) -> None:
        self.scale = scale

    def close_mosaic(self) -> None:
        self.transform = Times(3)

    def reverse(self) -> None:
        self.numbers.reverse()

    def shorten(self) -> None:
        self.numbers.pop()

    def labels(self) -> list[int]:
        if self._labels is None:
            self._labels = [number % 3 for number in self.numbers]
        return self._labels

    @functools.cached_property
    def weights(self) -> list[float]:
        return [1.0] * len(self.labels())

    def weigh(self) -> list[float]:
        return self.weights


METHODS = {
    "scale": lambda dataset: dataset.set_scale(7),
    "transform": lambda dataset: dataset.close_mosaic(),
    "order": lambda dataset: dataset.reverse(),
    "length": lambda dataset: dataset.shorten(),
}


@pytest.mark.parametrize(
    ("method", "made_by", "workers"),
    rarely(all_pairs(METHODS, LOADERS, [0, 2]), ("scale", "hotset", 2), ("order", "hotset", 2)),
)
def test_a_method_that_sets_an_attribute_takes_effect_as_on_the_dataset(
    method: str, made_by: str, workers: int
) -> None:
    plain = WithMethods()
    with hotset.cache(WithMethods(), memory="1MiB") as cached, recorded() as told:
        loaders = [LOADERS[made_by](plain), LOADERS[made_by](cached, num_workers=workers)]
        for _ in range(2):
            expected, found = map(two_epochs, loaders)
            same(found, expected)
            METHODS[method](plain)
            METHODS[method](cached)
        expected, found = map(two_epochs, loaders)
        same(found, expected)
        assert cached.stats().cached == len(plain), "it is cached anew"
    names = {"scale": "scale was set", "order": "numbers was set", "length": "numbers was set"}
    assert all(names.get(method, "-") in str(each.message) for each in told)


class Overwritten(Pictures):
    """As pytorch-forecasting's TimeSeriesDataSet, which may be told of values to give in place of its own."""

    def __init__(self) -> None:
        super().__init__(Times(2))
        self._values: dict[str, int] | None = None

    def __getitem__(self, index: int) -> Any:
        picture, label = super().__getitem__(index)
        return picture, label if self._values is None else self._values["label"]

    def overwrite(self, label: int) -> None:
        self._values = {"label": label}


@pytest.mark.parametrize("on_cached", [True, False])
@pytest.mark.parametrize("made_by", LOADERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_private_attribute_that_was_none_counts_if_samples_are_others_now(
    on_cached: bool, made_by: str, workers: int
) -> None:
    plain = Overwritten()
    with hotset.cache(Overwritten(), memory="1MiB") as cached:
        loaders = [LOADERS[made_by](plain), LOADERS[made_by](cached, num_workers=workers)]
        expected, found = map(two_epochs, loaders)
        same(found, expected)
        for dataset in (plain, cached if on_cached else cached.dataset):
            dataset.overwrite(7)
        with pytest.warns(hotset.HotsetWarning, match="_values has changed, .* are cached anew"):
            expected, found = map(two_epochs, loaders)
        same(found, expected)
        assert cached.stats().cached == N, "it is cached anew"


class Curriculum(WithMethods):
    def set_epoch(self, epoch: int) -> None:
        self.numbers = list(range(epoch, N))


@pytest.mark.parametrize("made_by", LOADERS)
def test_a_length_that_the_epoch_sets_takes_effect_as_on_the_dataset(made_by: str) -> None:
    plain = Curriculum()
    with pytest.warns(hotset.HotsetWarning, match="has a set_epoch"):
        cached = hotset.cache(Curriculum(), memory="1MiB")
    with cached:
        loaders = [LOADERS[made_by](dataset) for dataset in (plain, cached)]
        with recorded() as told:
            for epoch in range(3):
                plain.set_epoch(epoch)
                cached.set_epoch(epoch)
                expected, found = map(two_epochs, loaders)
                same(found, expected)
                assert cached.stats().cached == len(cached) == N - epoch
    words = [str(each.message) for each in told if "numbers was set" in str(each.message)]
    assert len(words) == 2


def test_a_method_that_computes_something_once_drops_nothing() -> None:
    with recorded() as told, hotset.cache(WithMethods(), memory="1MiB", key="x") as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        list(loader)
        assert cached.labels() is cached.dataset.labels()
        assert cached.weigh() == [1.0] * N
        cached.set_scale(1)  # as it was
        list(loader)
        assert cached.stats().hits == N
    equal_batches([str(each.message) for each in told], [])


def test_a_method_called_in_mid_pass_takes_effect_with_the_next_pass() -> None:
    with hotset.cache(WithMethods(), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        first = [float(pictures[1, 0]) for pictures, _ in loader]
        batches = iter(loader)
        next(batches)
        cached.set_scale(7)
        cached.labels()
        assert cached.stats().cached == cached.plan.samples == N
        assert cached.check() == []
        assert len(list(batches)) == 2
        with pytest.warns(hotset.HotsetWarning, match=r"WithMethods\.scale was set"):
            assert [float(pictures[1, 0]) for pictures, _ in loader] == [7 * value for value in first]


def test_a_set_attribute_is_read_back_and_set_on_the_users_object() -> None:
    """`train = hotset.cache(ds)` can replace `train = ds`: both then set attributes of one object."""
    dataset = Pictures()
    with hotset.cache(dataset, memory="1MiB") as cached:
        cached.transform = t = Times(2)
        assert cached.transform is t
        assert dataset.transform is t
        cached.classes = ["c"]
        assert cached.classes == dataset.classes == ["c"]
        cached.mine = 3
        assert cached.mine == dataset.mine == 3  # type: ignore[attr-defined]
        equal_batches(cached[4], dataset[4])


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, [3, 1, 4]), lambda d: ConcatDataset([d, d])])
def test_a_transform_set_inside_a_wrapped_dataset_is_seen(wrap: Any) -> None:
    inner, plain = Pictures(Times(2)), Pictures(Times(3))
    expected = wrap(plain)
    with hotset.cache(wrap(inner), memory="1MiB") as cached:
        before = [cached[i] for i in range(len(cached))]
        assert cached.stats().cached == len(before)
        inner.transform = Times(3)
        for index in range(len(cached)):
            equal_batches(cached[index], expected[index])


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: Subset(d, [3, 1, 4]), lambda d: ConcatDataset([d, d])]
)
def test_an_attribute_set_on_the_dataset_itself_reaches_what_is_read_after_that(
    wrap: Any, pickled: bool
) -> None:
    """Also where a part of the dataset's chain is live, and samples are read from a copy of it."""
    inner = Pictures(torch.nn.Sequential(torch.nn.Hardtanh(-90.0, 90.0), torch.nn.Dropout(0.5)))
    with hotset.cache(wrap(inner), memory="1MiB") as made:
        cached = pickle.loads(pickle.dumps(made)) if pickled else made
        given = cached.dataset
        last = len(given) - 1
        first = cached[last]
        inside = getattr(given, "dataset", getattr(given, "datasets", [given])[0])
        inside.scale, inside.transform[1].p = 7, 0.0
        cached.clear()
        equal_batches(cached[last], given[last])
        assert not torch.equal(first[0], given[last][0])
        del inside.scale
        with pytest.raises(AttributeError, match="scale"):
            cached[0]
        cached.close()


def test_a_transform_put_into_a_container_is_seen() -> None:
    import torchvision.transforms as T

    chain, other = T.Compose([Times(2)]), T.Compose([Times(2), Times(5)])
    with hotset.cache(Pictures(chain), memory="1MiB") as cached:
        equal_batches([cached[i] for i in range(N)], [Pictures(Times(2))[i] for i in range(N)])
        chain.transforms.append(Times(5))
        equal_batches([cached[i] for i in range(N)], [Pictures(other)[i] for i in range(N)])
        assert cached.plan.cached == ("Pictures", "Times", "Times")


def test_a_spill_folder_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the cache after a change: the program may have gone to another folder."""
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    with hotset.cache(Pictures(), memory="1MiB", spill="disk/spill") as cached:
        monkeypatch.chdir("/")
        cached.scale = 2
        assert cached[3][0][0] == 6
        assert cached.stats().cached == 1
        assert cached.plan.spill == str(tmp_path / "disk" / "spill")


def test_arguments_of_cache_hold_for_the_new_plan(tmp_path: Path) -> None:
    asked: Any = {
        "memory": "2MiB",
        "spill": str(tmp_path),
        "transform": [Pair(Times(2)), Pair(Times(3))],
        "cut": 1,
    }
    with hotset.cache(Pictures(), **asked) as cached:
        before = cached.plan
        cached.scale = 2
        plan = cached.plan
        assert plan.fingerprint != before.fingerprint
        assert (plan.limit, plan.spill, plan.live) == (before.limit, before.spill, ("Pair",))
        assert float(cached[5][0][0]) == 60.0


class Private(Dataset[Any]):
    """Its attributes have names that something in place of it might have itself."""

    def __init__(self) -> None:
        self._epoch, self._cache, self._dataset, self._labels = 0, {}, "a name", list(range(N))

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return self._labels[index] + 100 * self._epoch

    def _samples(self) -> int:
        return N


@pytest.mark.parametrize(("loader", "workers"), [(DataLoader, 0), (DataLoader, 2), (hotset.DataLoader, 0)])
def test_attributes_with_an_underscore_are_the_datasets_too(loader: Any, workers: int) -> None:
    own = Private()
    with recorded(), hotset.cache(own, memory="1MiB") as cached:
        assert (cached._cache, cached._dataset, cached._labels) == ({}, "a name", own._labels)
        assert cached._samples() == N
        with pytest.raises(AttributeError, match="_missing"):
            _ = cached._missing
        batches = loader(cached, N, num_workers=workers)
        for epoch in range(3):
            batches.dataset._epoch = epoch
            assert next(iter(batches)).tolist() == [100 * epoch + label for label in range(N)]
        assert own._epoch == 2


class Shifted(Pictures):
    scale = 5

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image + self.offset, label


class Negative(Shifted):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return -image, label


def deletes(dataset: Any) -> None:
    del dataset.scale


def updates_dict(dataset: Any) -> None:
    dataset.__dict__.update(offset=3)


def sets_in_vars(dataset: Any) -> None:
    vars(dataset)["offset"] = 3


def sets_dict(dataset: Any) -> None:
    dataset.__dict__ = {**dataset.__dict__, "offset": 3}


def sets_class(dataset: Any) -> None:
    dataset.__class__ = Negative


def copies_by_hand(dataset: Any) -> Any:
    twin = dataset.__class__.__new__(dataset.__class__)
    twin.__dict__.update(dataset.__dict__)
    twin.offset = 7
    return twin


BY_HAND = (deletes, updates_dict, sets_in_vars, sets_dict, sets_class, copies_by_hand)


@pytest.mark.parametrize("change", BY_HAND)
@pytest.mark.parametrize("made_by", LOADERS)
def test_what_lies_under_the_attributes_is_the_datasets(change: Any, made_by: str) -> None:
    plain, own = Shifted(), Shifted()
    with recorded(), hotset.cache(own, memory="1MiB") as cached:
        loaders = {dataset: LOADERS[made_by](dataset) for dataset in (plain, cached)}
        same(*map(two_epochs, loaders.values()))
        expected, found = change(plain) or plain, change(cached) or cached
        make = [loaders.get(each) or LOADERS[made_by](each) for each in (found, expected)]
        same(*map(two_epochs, make))
        assert vars(own).keys() == vars(plain).keys() == vars(cached).keys()
        assert type(own) is type(plain)
        with pytest.raises(AttributeError, match="missing"):
            del cached.missing
        assert {*dir(plain), "stats"} <= {*dir(cached)}


class Mergeable(Pictures):
    """Its class says itself what operators do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = list(range(N))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.numbers[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.numbers[index] = value

    def __delitem__(self, index: int) -> None:
        del self.numbers[index]

    def __add__(self, other: Any) -> Any:
        both = copy.copy(self)
        both.numbers = self.numbers + [(number + 5) % N for number in other.numbers]
        return both

    def __radd__(self, other: Any) -> Any:
        return self if other == 0 else NotImplemented

    def __reversed__(self) -> Any:
        return iter(self.numbers)


@pytest.mark.parametrize("made_by", LOADERS)
def test_elements_that_are_set_or_deleted_are_the_datasets(made_by: str) -> None:
    plain = Mergeable()
    with recorded() as told, hotset.cache(Mergeable(), memory="1MiB") as cached:
        loaders = [LOADERS[made_by](dataset) for dataset in (plain, cached)]
        same(*map(two_epochs, loaders))
        for dataset in (plain, cached):
            dataset[2] = dataset[3] = 9
            del dataset[5]
        same(*map(two_epochs, loaders))
        assert cached.stats().hits >= N - 1
    assert ["Mergeable.elements was set" in str(each.message) for each in told] == [True]
    with hotset.cache(Pictures(), memory="1MiB") as cached, pytest.raises(TypeError, match="Pictures"):
        cached[0] = 3


def test_sums_are_what_the_datasets_class_makes_of_them() -> None:
    plain, other = Mergeable(), Mergeable()
    with hotset.cache(Mergeable(), memory="1MiB") as cached:
        for expected, found in [
            (plain + other, cached + other),
            (other + plain, other + cached),
            (sum([plain, other]), sum([cached, other])),
        ]:
            assert type(found) is Mergeable
            same([found[i] for i in range(len(found))], [expected[i] for i in range(len(expected))])
        assert sum([cached]) is cached
        assert list(reversed(cached)) == list(reversed(plain))
    with hotset.cache(Pictures(), memory="1MiB") as cached:
        both: Any = cached + Pictures()
        assert isinstance(both, ConcatDataset)
        assert both.datasets[0] is cached
        same(list(reversed(cached)), [Pictures()[i] for i in reversed(range(N))])
        assert cached.stats().cached == N
        with pytest.raises(TypeError, match="unsupported operand"):
            _ = 0 + cached


def test_memory_of_the_old_cache_is_freed() -> None:
    class Large(Pictures):
        def __getitem__(self, index: int) -> Any:
            value = torch.zeros(1 << 18) + index
            return self.transform(value) if self.transform else value

    def shared() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:"))

    with hotset.cache(Large(), memory="64MiB") as cached:
        sizes = []
        for by in (2, 3, 4):
            cached.transform = Times(by)
            for index in range(N):
                assert float(cached[index][0]) == index * by
            sizes.append(shared())
    assert max(sizes) < 1.5 * min(sizes), "the third cache takes no more than the first"


def test_a_window_continues_where_it_stood() -> None:
    window = hotset.Window(resident=4, replace=0.5, seed=3)

    def run(change: bool) -> list[list[float]]:
        with hotset.cache(Pictures(Times(2)), window=window) as cached:
            loader = hotset.DataLoader(cached, batch_size=4)
            found = []
            for epoch in range(4):
                if change and epoch == 2:
                    cached.transform = Times(20)
                found.append(torch.cat([x[:, 0] for x, _ in loader]).tolist())
            return found

    plain, changed = run(False), run(True)
    assert all(len(epoch) == 4 for epoch in changed)
    assert changed[:1] == plain[:1]
    for epoch in changed[2:]:
        assert all(x % 20 == 0 for x in epoch)
    assert sorted(x / 10 for x in changed[2]) != sorted(plain[0]), "it has moved on"


def test_with_a_key_nothing_stale_is_served() -> None:
    with recorded() as told, hotset.cache(Pictures(Times(2)), memory="1MiB", key="mine") as cached:
        cached[3]
        cached.transform = Times(5)
        assert float(cached[3][0][0]) == 15.0
        assert cached.stats().cached == 0
    assert len(told) == 1
    assert 'key="mine"' in str(told[0].message)


class Refused(Pictures):
    """Draws random numbers once it is told to."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image + (random.random() if self.scale > 1 else 0), label


def test_samples_that_become_uncacheable_come_from_the_source() -> None:
    with recorded() as told, hotset.cache(Refused(), memory="1MiB") as cached:
        assert cached[1][1] == 1
        cached.scale = 2
        assert len({float(cached[1][0][0]) for _ in range(5)}) == 5, "nothing is frozen"
        assert cached.plan.cached == ()
    assert "Refused.scale was set" in str(told[-1].message)
    assert "source" in str(told[-1].message)


def _set_in_worker(change: Any, worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    change(info.dataset)


@pytest.mark.parametrize(
    ("made_by", "change"),
    rarely(
        itertools.product(LOADERS, [sets_transform, sets_noise, sets_another]),
        ("torch", sets_noise),
        ("torch", sets_another),
        ("hotset", sets_transform),
    ),
)
def test_an_attribute_set_in_a_worker_takes_effect_there_as_in_torch(change: Any, made_by: str) -> None:
    make = functools.partial(
        LOADERS[made_by], num_workers=2, worker_init_fn=functools.partial(_set_in_worker, change)
    )
    expected = two_epochs(make(Pictures()))
    with recorded(), hotset.cache(Pictures(), memory="1MiB") as cached:
        same(two_epochs(make(cached)), expected)
        assert cached.stats().cached == 0, "nothing of it is kept for others"


class Calls:
    def __init__(self, function: Any) -> None:
        self.functions = [function]

    def __call__(self, worker: int) -> None:
        for function in self.functions:
            function(worker)


@pytest.mark.parametrize("kind", [functools.partial, Calls])
@pytest.mark.parametrize("made_by", LOADERS)
def test_a_worker_sets_attributes_also_where_everything_is_cached(kind: Any, made_by: str) -> None:
    sets = kind(functools.partial(_set_in_worker, sets_another))
    make = functools.partial(LOADERS[made_by], num_workers=2, worker_init_fn=sets)
    with recorded(), hotset.cache(Pictures(), memory="1MiB") as cached:
        cached.fill()
        same(two_epochs(make(cached)), two_epochs(make(Pictures())))


def test_setting_a_transform_in_mid_pass_is_an_error() -> None:
    with hotset.cache(Pictures(Times(2)), memory="1MiB") as cached:
        for loader in (hotset.DataLoader(cached, batch_size=2), hotset.DataLoader(cached, batch_size=2)):
            batches = iter(loader)
            next(batches)
            cached.transform = Times(3)
            with pytest.raises(hotset.errors.ArgumentError, match="begin a new pass"):
                next(batches)
            assert float(next(iter(loader))[0][1, 0]) == 3.0


class OpensFile(Dataset[Any]):
    """Reads a file that it opens itself, or that a worker's initialization opens."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)  # type: ignore[assignment]
        return torch.tensor(list(os.pread(self.file.fileno(), 3, index)))  # type: ignore[attr-defined]


def _opens(worker: int) -> None:
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.dataset.file = dataset.path.open("rb", buffering=0)


@pytest.mark.parametrize("made_by", LOADERS)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_file_that_a_worker_opens_for_a_declared_dataset_leaves_its_samples_cached(
    made_by: str, tmp_path: Path
) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(N + 2)))
    dataset = hotset.deterministic(OpensFile(tmp_path / "bytes"))
    with hotset.cache(dataset, memory="1MiB") as cached:
        loader = LOADERS[made_by](cached, batch_size=2, num_workers=2, worker_init_fn=_opens)
        for _ in range(2):
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(N))
        assert cached.stats().misses == N
        assert cached.stats().hits >= N


def test_setting_an_attribute_with_persistent_workers_is_an_error() -> None:
    with hotset.cache(Pictures(Times(2)), memory="1MiB", transform=Pair(Noise())) as cached:
        loader = hotset.DataLoader(cached, batch_size=2, num_workers=1, persistent_workers=True)
        list(loader)
        cached.transform = Times(3)
        with pytest.raises(hotset.errors.ArgumentError, match="persistent_workers"):
            iter(loader)
        del loader


@pytest.mark.parametrize("name", ["dataset", "plan", "stats", "clear"])
def test_its_own_names_cannot_be_set(name: str) -> None:
    with hotset.cache(Pictures(), memory="1MiB") as cached, pytest.raises(AttributeError, match=name):
        setattr(cached, name, 3)


def test_its_own_public_names_are_few() -> None:
    with hotset.cache(Pictures(), memory="1MiB") as cached:
        own = {name for name in dir(type(cached)) if not name.startswith("_")}
        assert own == {"check", "clear", "close", "dataset", "fill", "plan", "set_epoch", "stats"}


def test_a_pickled_copy_follows_as_well() -> None:
    with hotset.cache(Pictures(Times(2)), memory="1MiB") as cached:
        cached[3]
        cached.transform = Times(5)
        with pickle.loads(pickle.dumps(cached)) as copy:
            assert float(copy[3][0][0]) == 15.0
            copy.transform = Times(6)
            assert float(copy[3][0][0]) == 18.0
            assert float(cached[3][0][0]) == 15.0

        def child() -> None:
            assert float(cached[3][0][0]) == 15.0
            cached.transform = Times(7)
            assert float(cached[3][0][0]) == 21.0
            cached.close()

        in_child(child)
        assert float(cached[3][0][0]) == 15.0


def test_a_state_is_of_the_dataset_as_it_is_since_an_attribute_was_set() -> None:
    with hotset.cache(Pictures(Times(2)), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=5)
        list(loader)
        loader.state_dict()
        cached.transform = Times(3)
        batches = iter(loader)
        next(batches)
        other = hotset.DataLoader(cached, batch_size=5)
        other.load_state_dict(loader.state_dict())
        same(list(other), list(batches))


class Scaled(Pictures):
    def enlarge(self) -> None:
        self.scale = 7

    def names(self) -> list[str]:
        return self.classes


def test_what_a_method_sets_in_a_pass_counts_in_the_next_whatever_is_called_meanwhile() -> None:
    with hotset.cache(Scaled(), memory="1MiB") as cached:
        loader = LOADERS["hotset"](cached)
        for number, _ in enumerate(loader):
            if number == 0:
                cached.enlarge()
            else:
                assert cached.names() == ["a", "b"]
        plain = Scaled()
        plain.enlarge()
        with pytest.warns(hotset.HotsetWarning, match=r"Scaled\.scale was set"):
            found = list(loader)
        same(found, list(LOADERS["torch"](plain)))


class Grows(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = [torch.full((2,), float(number)) for number in range(6)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, hotset.DataLoader])
def test_the_length_of_a_dataset_that_grows_or_shrinks_is_followed_from_the_next_pass_on(
    loader: Any, workers: int
) -> None:
    dataset = Grows()
    with recorded() as told, hotset.cache(dataset, memory="1MiB") as cached:
        batches = loader(cached, batch_size=2, num_workers=workers)
        for change in (lambda: None, lambda: dataset.rows.append(torch.ones(2)), dataset.rows.pop):
            change()
            seen = torch.cat(list(batches))
            assert torch.equal(seen, torch.stack(dataset.rows))
            assert len(cached) == len(dataset)
    words = [str(each.message) for each in told]
    dropped = "6 cached samples were dropped, and samples are cached anew."
    assert words[0] == f"the length of Grows changed from 6 to 7, and samples may depend on it, so {dropped}"
    assert all("the length of Grows changed from 7 to 6" in each for each in words[1:])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", [lambda rows: rows.append(torch.ones(2)), lambda rows: rows.pop()])
def test_a_concatenation_keeps_the_lengths_that_its_parts_had(change: Any, workers: int) -> None:
    def story(first: Any, second: Any, rows: Any) -> list[Any]:
        loader = hotset.DataLoader(ConcatDataset([first, second]), batch_size=2, num_workers=workers)
        found = [list(loader)]
        change(rows)
        batches = iter(loader)
        found.append([])
        with contextlib.suppress(IndexError):  # of an index that the first part does not have any more
            for batch in batches:
                found[-1].append(batch)
        return [*found, list(batches)]

    plain, dataset = Grows(), Grows()
    expected = story(plain, Grows(), plain.rows)
    make = functools.partial(hotset.cache, memory="1MiB")
    with recorded(), make(dataset) as cached, make(Grows()) as other:
        equal_batches(story(cached, other, dataset.rows), expected)


@pytest.mark.parametrize(
    ("ask", "key"),
    [(len, None), (lambda loader: pickle.dumps(loader.dataset), "growing")],
    ids=["len", "pickle"],
)
def test_a_dataset_may_grow_in_the_midst_of_a_pass_whoever_asks_for_its_length(
    ask: Callable[[Any], Any], key: str | None
) -> None:
    """As a progress bar asks for the loader's."""

    def passes(loader: Any, dataset: Any) -> list[Any]:
        found = []
        for _ in range(3):
            for number, batch in enumerate(loader):
                found.append(batch)
                if number == 1:
                    dataset.rows.append(torch.full((2,), 7.0))
                    ask(loader)
        return found

    plain, dataset = Grows(), Grows()
    expected = passes(hotset.DataLoader(plain, batch_size=2), plain)
    with warnings.catch_warnings(), hotset.cache(dataset, memory="1MiB", key=key) as cached:
        warnings.simplefilter("ignore", hotset.HotsetWarning)
        equal_batches(passes(hotset.DataLoader(cached, batch_size=2), dataset), expected)


def test_what_is_set_on_a_copy_is_not_set_on_the_original() -> None:
    dataset = Grows()
    train = hotset.cache(dataset, memory="1MiB")
    list(DataLoader(train))
    valid = copy.copy(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hotset.HotsetWarning)
        valid.rows = [torch.full((2,), -1.0)] * 6
    assert valid[1].tolist() == [-1, -1]
    assert train[1].tolist() == [1, 1]
    assert dataset.rows[1].tolist() == [1, 1]
    valid.close()
    hits = train.stats().hits
    assert train[2].tolist() == [2, 2]
    assert train.stats().hits == hits + 1, "the copy's end has no effect on the original"
    train.close()
