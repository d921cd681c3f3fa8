"""Datasets and samples that resist: that refuse to be copied or set, stop iterators, nest too deeply.

What a program sees of them is what it sees without a cache, in both loaders, with and without workers.
"""

from __future__ import annotations

import collections
import gc
import itertools
import mmap
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from helpers import all_pairs, equal_batches, rarely, recorded
from torch.utils.data import ConcatDataset, DataLoader, Dataset

import hotset

N = 12
LOADERS: dict[str, Any] = {"torch": DataLoader, "hotset": hotset.DataLoader}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(()) + random.random()


class Pictures(Dataset[Any]):
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        picture = torch.arange(4.0) + index
        for transform in self.transforms:
            picture = transform(picture)
        return picture, index


class RefusesToBeCopied(Pictures):
    def __copy__(self) -> Any:
        raise RuntimeError("no copies")

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


class RefusesToBePickled(Pictures):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not to be pickled")


class IsItsOwnCopy(Pictures):
    def __copy__(self) -> Any:
        return self


class GuardsItsAttributes(Pictures):
    def __init__(self, *transforms: Any) -> None:
        super().__init__(*transforms)
        self.__dict__["made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "made" in self.__dict__:
            raise AttributeError(f"{name} must not be set")
        super().__setattr__(name, value)


def two_epochs(loader: Any, dataset: Any, workers: int = 0, **arguments: Any) -> list[Any]:
    torch.manual_seed(3)
    random.seed(3)
    made = loader(dataset, num_workers=workers, **{"batch_size": 5, "shuffle": True, **arguments})
    return [batch for _ in range(2) for batch in made]


RESISTING = (RefusesToBeCopied, RefusesToBePickled, IsItsOwnCopy, GuardsItsAttributes)


CASES = all_pairs(RESISTING, LOADERS, [0, 2])


@pytest.mark.parametrize(
    ("kind", "loader", "workers"), rarely(CASES, *[case for case in CASES if case[-1]][2:])
)
def test_a_dataset_that_refuses_to_be_copied_or_set_is_cut_and_unchanged(
    kind: Any, loader: str, workers: int
) -> None:
    expected = two_epochs(LOADERS[loader], kind(double, noise), workers)
    dataset = kind(double, noise)
    held = dict(vars(dataset))
    with recorded() as told, hotset.cache(dataset, memory="1MiB") as cached:
        equal_batches(two_epochs(LOADERS[loader], cached, workers), expected)
        assert vars(dataset) == held
        assert cached.plan.cached[0] == kind.__name__
        assert cached.plan.live[-1] == "noise"
        assert cached.stats().hits >= N
    assert told == []


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class ClosesItsFile(Pictures):
    """Maps its file at once or when it is read first, and closes it as it goes, as datasets over LMDB do."""

    subclasses: ClassVar[list[str]] = []
    closed = 0

    def __init__(self, path: Path, at_once: bool, *transforms: Any) -> None:
        super().__init__(*transforms)
        self.path, self.letters = path, mapped(path) if at_once else None

    def __init_subclass__(cls) -> None:
        ClosesItsFile.subclasses.append(cls.__name__)

    def __getitem__(self, index: int) -> Any:
        if self.letters is None:
            self.letters = mapped(self.path)
        return self.letters[index], super().__getitem__(index)

    def __del__(self) -> None:
        ClosesItsFile.closed += 1
        if self.letters is not None:
            self.letters.close()


@pytest.mark.parametrize(("made_by", "at_once", "workers"), all_pairs(LOADERS, (True, False), (0, 2)))
def test_a_dataset_that_closes_its_file_as_it_goes_closes_it_once(
    made_by: str, at_once: bool, workers: int, tmp_path: Path
) -> None:
    path = tmp_path / "letters"
    path.write_bytes(b"abcdefghijkl")

    def make() -> Dataset[Any]:
        parts = [ClosesItsFile(path, at_once, double, noise) for _ in range(1 if at_once else 2)]
        return ConcatDataset(parts) if parts[1:] else parts[0]

    def passes(loader: type[DataLoader[Any]], dataset: Any) -> list[Any]:
        batches = loader(dataset, batch_size=5, num_workers=workers)
        torch.manual_seed(3), random.seed(4)
        return [*batches, *batches]

    expected = passes(DataLoader, make())
    gc.collect()
    ClosesItsFile.closed = 0
    dataset = make()
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert "double" in str(cached.plan)
        equal_batches(passes(LOADERS[made_by], cached), expected)
    del cached
    gc.collect()
    assert (ClosesItsFile.closed, ClosesItsFile.subclasses) == (0, [])
    assert dataset[3][0] == ord("d")


class FromItsEnd(list[Any]):
    """A transform that is a list of its steps, as imgaug's containers are: it knows how to apply them."""

    def __init__(self, *steps: Any) -> None:
        super().__init__(steps)

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        for step in reversed(self):
            picture = step(picture)
        return picture


class Ways(NamedTuple):
    first: Any
    second: Any


class Transformed(Pictures):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        picture = torch.arange(4.0) + index
        if isinstance(self.transform, Ways):
            return self.transform.first(picture), self.transform.second(picture)
        return self.transform(picture) if callable(self.transform) else picture


@pytest.mark.parametrize("last", [noise, torch.neg])
@pytest.mark.parametrize(("loader", "workers"), all_pairs(LOADERS, (0, 2)))
def test_a_transform_whose_class_derives_from_list_is_called_as_it_is(
    loader: str, workers: int, last: Any
) -> None:
    def passes(loader: type[DataLoader[Any]], dataset: Any) -> list[Any]:
        batches = loader(dataset, batch_size=5, num_workers=workers)
        torch.manual_seed(3), random.seed(4)
        return [*batches, *batches]

    transform = FromItsEnd(last, FromItsEnd(double, torch.sqrt))
    expected = passes(DataLoader, Transformed(transform))
    with hotset.cache(Transformed(transform), memory="1MiB") as cached:
        equal_batches(passes(LOADERS[loader], cached), expected)
        assert isinstance(transform[1], FromItsEnd)
    for given in (transform, [transform]):
        with hotset.cache(Transformed(None), transform=given, memory="1MiB") as cached:
            equal_batches(passes(LOADERS[loader], cached), expected)


def test_a_named_tuple_of_transforms_is_a_part_of_its_dataset() -> None:
    dataset = Transformed(Ways(double, torch.neg))
    with hotset.cache(dataset, memory="1MiB") as cached:
        equal_batches([cached[index] for index in range(N)], [dataset[index] for index in range(N)])
        assert cached.stats().misses == N


class Numbers(list[float]):
    """More than its attributes: without pickling nobody could copy it."""

    transform: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not to be pickled")

    def __getitem__(self, index: Any) -> Any:
        return self.transform(torch.tensor(super().__getitem__(index)))


def test_the_chain_of_a_dataset_that_nobody_can_copy_stays_whole() -> None:
    numbers = Numbers([1.5, 2.5, 3.5])
    numbers.transform = double
    with hotset.cache(numbers, memory="1MiB") as cached:
        assert [float(cached[i]) for i in (0, 2, 0)] == [3.0, 7.0, 3.0]
        assert cached.stats().hits == 1
    numbers.transform = noise
    with pytest.raises(hotset.NotCacheable, match="Numbers returns another sample each time"):
        hotset.cache(numbers, memory="1MiB")


class Filled(Dataset[Any]):
    """Keeps in a list what it has taken from an iterator."""

    def __init__(self, lines: Any) -> None:
        self.lines, self.taken = lines, list[int]()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        lines = self.lines[0] if isinstance(self.lines, list) else self.lines
        while len(self.taken) <= index:
            self.taken.append(next(lines))
        return torch.tensor(self.taken[index])


@pytest.mark.parametrize("kind", ["torch", "hotset"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "lines", [lambda: (i for i in range(N)), lambda: map(int, range(N)), lambda: [iter(range(N))]]
)
def test_a_list_that_an_iterator_fills_goes_on_with_it(
    lines: Callable[[], Any], workers: int, kind: str
) -> None:
    with hotset.cache(Filled(lines()), memory="1MiB") as cached:
        for _ in range(2):
            batches = list(LOADERS[kind](cached, batch_size=4, num_workers=workers))
            assert torch.cat(batches).tolist() == list(range(N))
        assert cached.stats().hits == N


class Queue(Dataset[Any]):
    """Gives what a loader, which has begun, gives next; whatever the index."""

    def __init__(self, numbers: Dataset[Any]) -> None:
        self.numbers = numbers
        self.begun = iter(DataLoader(numbers, batch_size=None))

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        try:
            return next(self.begun)
        except StopIteration:
            self.begun = iter(DataLoader(self.numbers, batch_size=None))
            return next(self.begun)


def test_what_was_taken_from_an_iterator_is_said_to_be_missing() -> None:
    with pytest.raises(hotset.NotCacheable, match="anew, and cache its 'numbers' before you make it"):
        hotset.cache(Queue(Filled(iter(range(N)))), memory="1MiB")


class Stops(Dataset[Any]):
    """Raises what an iterator means by its end, as a ``next()`` without a default does."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return next(iter([torch.full((2,), float(index))] if index != 7 else []))


class StopsInBatches(Stops):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize(
    ("kind", "loader", "workers", "collate"),
    all_pairs([Stops, StopsInBatches], LOADERS, [0, 2], [None, as_list]),
)
def test_stop_iteration_of_a_sample_is_what_it_is_without_a_cache(
    kind: Any, loader: str, workers: int, collate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The error keeps torch's iterator until the collector runs, and that then waits for its workers in vain.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    plain: dict[str, Any] = {"shuffle": False, "batch_size": 3, "collate_fn": collate}
    expected = two_epochs(DataLoader, kind(), workers, **plain)
    assert 0 < len(expected) < 8, "the loop takes it for the end of the epoch"
    with hotset.cache(kind(), memory="1MiB") as cached:
        equal_batches(two_epochs(LOADERS[loader], cached, workers, **plain), expected)
        with pytest.raises(StopIteration):
            cached[7]
        with pytest.raises(StopIteration):
            cached.__getitems__([6, 7])
        assert float(cached[8][0]) == 8.0
    gc.collect()


class Deep(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        value: Any = [index]
        for _ in range(900):
            value = (value,) if index % 2 else [value]
        return value


def depth(value: Any) -> tuple[int, int]:
    count = 0
    while isinstance(value, (list, tuple)):
        value, count = value[0], count + 1
    return count, value


@pytest.mark.parametrize("loader", LOADERS)
def test_what_is_nested_too_deeply_is_served_uncached_with_a_sentence(loader: str) -> None:
    with recorded() as told, hotset.cache(Deep(), memory="1MiB") as cached:
        for _ in range(2):
            for batch in LOADERS[loader](cached, batch_size=4, collate_fn=as_list):
                assert [depth(sample)[0] for sample in batch] == [901] * len(batch)
        assert depth(cached[5]) == (901, 5)
        assert cached.stats().cached == 0
    assert any("nothing of Deep can be cached" in str(w.message) and "nested" in str(w.message) for w in told)


class ReadOnly(Dataset[Any]):
    """As ``np.asarray(picture)`` and ``np.frombuffer`` give arrays."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.table = np.arange(4 * N).reshape(N, 4)
        self.table.flags.writeable = False

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        new = np.frombuffer(bytes([index] * 6), np.uint8)
        row = self.table[index]
        return {"new": new if index % self.every == 0 else new.copy(), "row": row, "own": np.ones(3)}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("loader", LOADERS)
def test_read_only_arrays_are_read_only_as_hit_and_as_miss(loader: str, every: int) -> None:
    def flags(samples: Any) -> list[Any]:
        return [{name: value.flags.writeable for name, value in each.items()} for each in samples]

    dataset = ReadOnly(every)
    expected = flags(dataset[i] for i in range(N)) * 2
    with hotset.cache(ReadOnly(every), memory="1MiB") as cached:
        made = LOADERS[loader](cached, batch_size=4, collate_fn=as_list)
        assert [flag for _ in range(2) for batch in made for flag in flags(batch)] == expected
        assert cached.stats().hits == N


def test_batches_of_read_only_arrays_are_those_of_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that the array cannot be written to
        expected = two_epochs(DataLoader, ReadOnly())
        with hotset.cache(ReadOnly(), memory="1MiB") as cached:
            equal_batches(two_epochs(hotset.DataLoader, cached), expected)
            assert cached.stats().hits == N


class Computed(Dataset[Any]):
    def __init__(self, compute: Any) -> None:
        self.compute = compute

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.compute(index)


def long_double(index: int) -> Any:
    np.full(48, 93, np.uint8)  # what the padding of a long double may be made of
    return np.full(3, index, np.longdouble) / 3


def test_long_doubles_are_cached() -> None:
    with hotset.cache(Computed(long_double), memory="1MiB") as cached:
        for index in [*range(N)] * 2:
            assert cached[index].dtype == np.longdouble
            assert (cached[index] == long_double(index)).all()
        assert cached.stats().cached == N


def nan_as_a_key(index: int) -> Any:
    return {float("inf") - float("inf"): index}


def test_nan_as_a_key_is_named_as_the_reason() -> None:
    with recorded() as told, hotset.cache(Computed(nan_as_a_key), memory="1MiB") as cached:
        assert list(cached[3].values()) == [3]
    assert [w for w in told if "a dict with NaN as a key" in str(w.message)]


def class_made_anew(index: int) -> Any:
    return collections.namedtuple("Local", "index")(index)


def test_a_class_that_getitem_makes_is_named_as_the_reason() -> None:
    with pytest.raises(hotset.NotCacheable, match=r"two classes of the name \w*Local, which is made anew"):
        hotset.cache(Computed(class_made_anew), memory="1MiB")


MAKES = (np.asarray, torch.as_tensor, list, tuple)


@pytest.mark.parametrize(
    ("made_by", "make"),
    rarely(itertools.product(LOADERS, MAKES), *(("torch", make) for make in MAKES[1:])),
)
def test_an_array_itself_is_a_dataset_with_live_transforms_in_workers(make: Any, made_by: str) -> None:
    rows = make(np.arange(2.0 * N).reshape(N, 2))

    def draws(sample: Any) -> torch.Tensor:
        return torch.as_tensor(sample) + torch.rand(())

    class Plain(Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            return draws(rows[index])

    with hotset.cache(rows, transform=draws, memory="1MiB") as cached:
        for workers in (0, 2):
            expected, found = (
                (torch.manual_seed(3), [*loader, *loader])[1]
                for loader in (
                    DataLoader(Plain(), batch_size=5, num_workers=workers),
                    LOADERS[made_by](cached, batch_size=5, num_workers=workers),
                )
            )
            equal_batches(found, expected)


class Pages(Dataset[torch.Tensor]):
    """Holds the page that it has come to: samples can only be read in order, as DLRM's are."""

    def __init__(self) -> None:
        self.page, self.rows = 0, torch.arange(10)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 10 == 0:
            self.page, self.rows = index, torch.arange(index, index + 10)
        if not 0 <= index - self.page < 10:
            raise IndexError(index)
        return self.rows[index - self.page]


def test_a_dataset_that_can_only_be_read_in_order_is_refused_and_left_as_it_was() -> None:
    dataset = Pages()
    with pytest.raises(hotset.NotCacheable, match=r"5 of 8 .* Pages\.rows, .* by the index alone"):
        hotset.cache(dataset, memory="1MiB")
    assert dataset.page == 0
    assert [int(sample) for sample in DataLoader(dataset, batch_size=None)] == list(range(60))
    cached = hotset.cache(hotset.deterministic(dataset), memory="1MiB")
    assert [int(sample) for sample in hotset.DataLoader(cached, batch_size=None)] == list(range(60))


def test_samples_that_cannot_be_read_in_any_order_are_left_out() -> None:
    class Gaps(Pages):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index >= 10:
                raise OSError(index)
            return torch.tensor(index)

    cached = hotset.cache(Gaps(), memory="1MiB")
    assert [int(cached[index]) for index in range(10)] == list(range(10))
