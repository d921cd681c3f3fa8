"""What Python and libraries look up on the type of an object is, on a cached dataset, its dataset's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, recorded
from torch.utils.data import DataLoader, Dataset, Subset

import hotset

N = 6


class Plain(Dataset[Any]):
    def __init__(self) -> None:
        self.scale = 1

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        if not -N <= index < N:
            raise IndexError(index)
        return torch.full((2,), float(index * self.scale))


class Rich(Plain):
    """Its class says itself what Python does with it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rich) and other.scale == self.scale

    def __hash__(self) -> int:
        return 11

    def __bool__(self) -> bool:
        return False

    def __call__(self, by: int) -> int:
        return by * self.scale

    def __lt__(self, other: Any) -> bool:
        return True

    def __str__(self) -> str:
        return "rich"

    def __format__(self, how: str) -> str:
        return f"rich {how}"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.arange(3)

    def __imul__(self, by: int) -> Any:
        self.scale *= by
        return self

    def __or__(self, other: Any) -> str:
        return "or"

    def __index__(self) -> int:
        return 4


class Entered(Plain):
    def __enter__(self) -> Any:
        self.scale = 7
        return self

    def __exit__(self, *exception: object) -> bool:
        self.scale = 1
        return exception[0] is KeyError


def times(dataset: Any, by: int) -> Any:
    dataset *= by
    return dataset.scale


ASKED: dict[str, Callable[[Any], Any]] = {
    "eq": lambda dataset: (dataset == Rich(), Rich() == dataset, dataset != Rich(), dataset == 3),
    "hash": lambda dataset: (hash(dataset), Rich() in {dataset: 1}),
    "bool": lambda dataset: bool(dataset),
    "call": lambda dataset: (callable(dataset), dataset(3)),
    "lt": lambda dataset: dataset < 3,
    "text": lambda dataset: (str(dataset), f"{dataset:>9}"),
    "array": lambda dataset: np.asarray(dataset).tolist(),
    "or": lambda dataset: dataset | 3,
    "index": lambda dataset: list(range(dataset)),
    "in place": lambda dataset: times(dataset, 3),
}


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("through", ["", "pickle", "copy", "deepcopy"])
def test_special_methods_are_those_of_the_datasets_class(ask: str, through: str) -> None:
    ways: dict[str, Any] = {"pickle": lambda each: pickle.loads(pickle.dumps(each))}
    way = {**ways, "": lambda each: each, "copy": copy.copy, "deepcopy": copy.deepcopy}[through]
    plain = Rich()
    with recorded(), hotset.cache(Rich(), memory="1MiB") as made:
        cached = way(made)
        assert isinstance(cached, hotset.CachedDataset)
        list(DataLoader(cached))
        assert ASKED[ask](cached) == ASKED[ask](plain)
        equal_batches(list(DataLoader(cached)), list(DataLoader(plain)))


def test_a_class_without_special_methods_gets_none() -> None:
    with hotset.cache(Plain(), memory="1MiB") as cached:
        assert bool(cached)
        assert not callable(cached)
        assert cached == cached
        assert cached != cached.dataset
        assert cached in {cached}
        assert np.asarray(cached).shape == (N, 2)


class Annotated(Plain):
    """As Python 3.14 makes a class with annotations, in a module that does not put them off."""

    def __annotate_func__(form: int) -> dict[str, type]:  # type: ignore[misc]
        return {"scale": int}


def test_the_type_of_a_cached_dataset_is_asked_for_its_own_annotations() -> None:
    with hotset.cache(Annotated(), memory="1MiB") as cached:
        assert isinstance(inspect.get_annotations(type(cached)), dict)
        assert "__annotate_func__" not in vars(type(cached))


def test_what_an_operator_changes_takes_effect_and_leaves_the_dataset_cached() -> None:
    plain, own = Rich(), Rich()
    with recorded(), hotset.cache(own, memory="1MiB") as made:
        cached = made
        list(DataLoader(cached))
        cached *= 5
        plain *= 5
        assert cached is made
        equal_batches(list(DataLoader(cached)), list(DataLoader(plain)))
        assert cached.stats().cached == N


def test_with_enters_and_leaves_the_dataset() -> None:
    own = Entered()
    cached: Any = hotset.cache(own, memory="1MiB")
    with recorded(), cached as entered:
        assert entered is cached
        assert own.scale == 7
        assert cached[2].tolist() == [14, 14]
        raise KeyError  # which the dataset's __exit__ suppresses
    assert own.scale == 1
    assert cached[2].tolist() == [2, 2]
    with hotset.cache(Subset(own, [1, 2]), memory="1MiB") as part:
        assert part[0].tolist() == [1, 1]
    assert own.scale == 1


@dataclasses.dataclass
class Record(Dataset[Any]):
    count: int = N
    scale: int = 2

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * self.scale)


def test_a_dataclass_is_one() -> None:
    with hotset.cache(Record(), memory="1MiB") as made:
        cached: Any = made
        assert dataclasses.is_dataclass(cached)
        assert [each.name for each in dataclasses.fields(cached)] == ["count", "scale"]
        assert dataclasses.asdict(cached) == {"count": N, "scale": 2}
        assert dataclasses.replace(cached, scale=3) == Record(scale=3)
        assert cached == Record()
        with pytest.raises(TypeError, match="unhashable"):
            hash(cached)
        match cached:
            case Record(count, scale=2):
                assert count == N
            case _:
                pytest.fail("it does not match")
        equal_batches(list(DataLoader(cached)), list(DataLoader(Record())))


@pytest.mark.parametrize("given", [{"transform": torch.neg}, {"window": hotset.Window(resident=3)}])
def test_a_method_that_may_read_samples_is_refused_where_the_dataset_does_not_know_them(given: Any) -> None:
    with hotset.cache(Rich(), memory="1MiB", **given) as cached:
        for ask in ("array", "or"):
            with pytest.raises(TypeError, match=r"__(array|or)__\(\)"):
                ASKED[ask](cached)
        assert ASKED["text"](cached) == ASKED["text"](Rich())


@pytest.mark.parametrize("dataset", [Plain(), Subset(Plain(), [1, 2])])
def test_what_is_set_on_its_type_is_refused(dataset: Any) -> None:
    with hotset.cache(dataset, memory="1MiB") as cached:
        for name in ("scale", "__len__", "close"):
            with pytest.raises(
                TypeError, match=rf"'{name}' cannot be set on CachedDataset.*type\(cached\.dataset"
            ):
                setattr(type(cached), name, 3)

        class Mine(hotset.CachedDataset[Any]):
            pass

        Mine.scale = 3


def test_an_element_of_a_window_is_not_set_by_its_position() -> None:
    class Listed(Plain):
        def __init__(self) -> None:
            self.values = list(range(N))

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(self.values[index])

        def __setitem__(self, index: int, value: int) -> None:
            self.values[index] = value

        def __delitem__(self, index: int) -> None:
            del self.values[index]

    own = Listed()
    with hotset.cache(own, window=hotset.Window(resident=3)) as cached:
        with pytest.raises(TypeError, match=r"cached\[0\] cannot be set or deleted, as a window's"):
            cached[0] = 9
        with pytest.raises(TypeError, match="a window's indices"):
            del cached[1]
    assert own.values == list(range(N))
