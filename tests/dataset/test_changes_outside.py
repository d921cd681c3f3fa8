"""What code reads besides its dataset is changed between two passes: globals, classes, functions.

Each change is made over the cached dataset and over one without a cache; what loaders give is compared.
"""

from __future__ import annotations

import argparse
import contextvars
import ctypes
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import equal_batches, recorded
from torch.utils.data import DataLoader, Dataset, Subset

import hotset

N = 12
LOADERS: dict[str, Any] = {"torch": DataLoader, "hotset": hotset.DataLoader}

NUMBER = 1
OPTIONS = argparse.Namespace(size=1)
TABLE = {"gains": [1, 2]}
GAIN = {"all": 1}
KNOWN: dict[int, int] = {}
reads = 0


def helper(value: torch.Tensor) -> torch.Tensor:
    return value + NUMBER


def other_helper(value: torch.Tensor) -> torch.Tensor:
    return value - 3


def gain(value: torch.Tensor, more: int = 0) -> torch.Tensor:
    return value + GAIN["all"] + more + gain.offset  # type: ignore[attr-defined]


gain.offset = 0  # type: ignore[attr-defined]


def _enclosing(number: int) -> tuple[Callable[[Any], Any], Callable[[int], None], dict[str, int]]:
    table = {"all": number}

    def added(value: torch.Tensor) -> torch.Tensor:
        return value + number * table["all"]

    def become(other: int) -> None:
        nonlocal number
        number = other

    return added, become, table


added, become, enclosed_table = _enclosing(1)


class Chain:
    """As users write it; hotset does not know what is in it."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            value = step(value)
        return value


class Scale:
    factor = 2

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor


class Base(Dataset[Any]):
    shift = 0

    def _doubled(self, value: Any) -> Any:
        return 2 * value


class Sizes:
    width = 1


class Named:
    height = 1


NAMED = Named()


class Outside(Base):
    def __init__(self) -> None:
        self.transform = Chain(Scale(), gain, added)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        global reads
        reads += 1
        KNOWN[index] = index
        numbers = helper(torch.full((OPTIONS.size,), index)) * TABLE["gains"][0] + self.shift
        return self.transform(self._doubled(numbers) + self.extra() + Sizes.width + NAMED.height)

    def extra(self) -> int:
        return 0


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: owner[name].__setitem__(0, 7) if owner is TABLE else setattr(owner, name, value)


def _set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def _set_cells(function: Any, cells: Any) -> None:
    ctypes.pythonapi.PyFunction_SetClosure(ctypes.py_object(function), ctypes.py_object(cells))


CHANGES: dict[str, Callable[[], None]] = {
    "a number": _set_global("NUMBER", 5),
    "a function": _set_global("helper", other_helper),
    "a namespace": _set(OPTIONS, "size", 3),
    "a list in a dict": _set(TABLE, "gains", 7),
    "an attribute of a transform's class": _set(Scale, "factor", 9),
    "an attribute of a base class": _set(Base, "shift", 4),
    "what a function in a chain reads": lambda: GAIN.update(all=4),
    "a variable of an enclosing function": lambda: become(6),
    "what a variable of an enclosing function holds": lambda: enclosed_table.update(all=3),
    "an attribute of a class that the reading method names": _set(Sizes, "width", 4),
    "an attribute of the class of a global": _set(Named, "height", 4),
    "a method": _set(Outside, "extra", lambda self: 8),
    "a method that a base has": _set(Outside, "_doubled", lambda self, value: 3 * value),
    "a method that no code names": _set(Scale, "__call__", lambda self, value: -value),
    # as IPython's autoreload sets them where a module was edited
    "the code of a function": _set(helper, "__code__", other_helper.__code__),
    "the code of a function in a chain": _set(gain, "__code__", other_helper.__code__),
    "an attribute of a function": _set(gain, "offset", 6),
    "the cells of a function": lambda: _set_cells(added, (types.CellType(5), types.CellType({"all": 2}))),
    "a default of a function": _set(gain, "__defaults__", (4,)),
    "the code of a method": _set(Base._doubled, "__code__", (lambda self, value: 5 * value).__code__),
    "the reading method": _set(Outside, "__getitem__", lambda self, index: Base.shift + torch.ones(2)),
}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    names = ("NUMBER", "helper", "reads")
    before = {name: globals()[name] for name in names}
    classes = {each: dict(vars(each)) for each in (Scale, Base, Outside, Sizes, Named)}
    functions = [(each, each.__code__, each.__defaults__) for each in (helper, gain, Base._doubled)]
    cells = added.__closure__
    yield
    _set_cells(added, cells)
    for each, code, defaults in functions:
        each.__code__, each.__defaults__ = code, defaults
    globals().update(before)
    OPTIONS.size, TABLE["gains"], GAIN["all"] = 1, [1, 2], 1
    KNOWN.clear()
    become(1)
    gain.offset = 0  # type: ignore[attr-defined]
    enclosed_table["all"] = 1
    for each, attributes in classes.items():
        for name in vars(each).keys() - attributes.keys():
            delattr(each, name)
        for name in vars(each).keys() & attributes.keys():
            if vars(each)[name] is not attributes[name]:
                setattr(each, name, attributes[name])


def _passes(dataset: Any, loader: Any, workers: int, change: Callable[[], None]) -> list[Any]:
    found = [list(loader(dataset, batch_size=4, num_workers=workers)) for _ in range(2)]
    change()
    return [*found, *(list(loader(dataset, batch_size=4, num_workers=workers)) for _ in range(2))]


@pytest.mark.parametrize(
    ("change", "loader", "workers"),
    [
        *((change, "hotset", 0) for change in CHANGES),
        ("a number", "torch", 0),
        ("a method", "torch", 2),
        ("a namespace", "hotset", 2),
    ],
)
def test_a_change_of_what_code_reads_is_followed(change: str, loader: str, workers: int) -> None:
    with recorded() as told, hotset.cache(Subset(Outside(), range(N)), memory="1MiB") as cached:
        got = _passes(cached, LOADERS[loader], workers, CHANGES[change])
        # Workers of torch's loader run before it asks for the length, so the next pass fills the new cache.
        assert cached.stats().hits >= (0 if (loader, workers) == ("torch", 2) else N)
        assert cached.stats().cached == N
    assert any("has changed" in str(each.message) for each in told)
    assert not equal_passes(got[1], got[2])
    expected = list(DataLoader(Outside(), batch_size=4))
    equal_batches(got[2], expected)
    equal_batches(got[3], expected)


CONTEXT = contextvars.ContextVar("CONTEXT", default=1)
HERE = threading.local()


class Around(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, int(os.environ["AROUND"]), CONTEXT.get(), HERE.shift])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda: os.environ.update(AROUND="2"), N),
        (lambda: CONTEXT.set(2), N),
        (lambda: setattr(HERE, "shift", 2), 0),  # no fingerprint tells it from what it was
    ],
    ids=["environment", "context", "thread"],
)
def test_a_change_of_what_surrounds_code_is_followed(
    change: Callable[[], Any], kept: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AROUND", "1")
    HERE.shift = 1

    def run() -> None:
        with recorded() as told, hotset.cache(Around(), memory="1MiB") as cached:
            got = _passes(cached, hotset.DataLoader, workers, change)
            assert cached.stats().cached == kept
            assert cached.stats().hits >= kept
        assert any("has changed" in str(each.message) for each in told)
        expected = list(DataLoader(Around(), batch_size=4))
        assert not equal_passes(got[1], expected)
        equal_batches(got[2], expected)
        equal_batches(got[3], expected)

    contextvars.copy_context().run(run)


class Backwards(Chain):
    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return -super().__call__(value)


class Inverted(Outside):
    def _doubled(self, value: Any) -> Any:
        return -2 * value


@pytest.mark.parametrize("of_transform", [False, True])
def test_another_class_of_an_object_is_followed(of_transform: bool) -> None:
    def change(dataset: Outside) -> Outside:
        if of_transform:
            dataset.transform.__class__ = Backwards
        else:
            dataset.__class__ = Inverted
        return dataset

    dataset = Outside()
    with recorded() as told, hotset.cache(Subset(dataset, range(N)), memory="1MiB") as cached:
        got = _passes(cached, hotset.DataLoader, 0, lambda: change(dataset))
        assert cached.stats().hits == N
    assert any("__class__ has changed" in str(each.message) for each in told)
    equal_batches(got[3], list(DataLoader(change(Outside()), batch_size=4)))


def test_a_function_is_edited_after_one_that_took_its_place_to_no_effect() -> None:
    def also_helper(value: torch.Tensor) -> torch.Tensor:
        return NUMBER + value

    with recorded(), hotset.cache(Outside(), memory="1MiB") as cached:
        _passes(cached, hotset.DataLoader, 0, _set_global("helper", also_helper))
        assert cached.stats().hits == 3 * N
        also_helper.__code__ = other_helper.__code__
        got = list(hotset.DataLoader(cached, batch_size=4))
    equal_batches(got, list(DataLoader(Outside(), batch_size=4)))


def equal_passes(one: list[Any], other: list[Any]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_changes_no_sample_keeps_the_cache(workers: int) -> None:
    def change() -> None:
        KNOWN[1000 + len(KNOWN)] = 1  # read by the code, and of no use

    with recorded() as told, hotset.cache(Outside(), memory="1MiB") as cached:
        for _ in range(3):
            change()
            list(hotset.DataLoader(cached, batch_size=4, num_workers=workers))
        assert cached.stats().hits == 2 * N
    assert not told


def test_what_changes_before_anything_was_read_costs_nothing() -> None:
    """However often: a program that sets itself up asks for lengths meanwhile."""
    dataset = Outside()
    with recorded() as told, hotset.cache(dataset, memory="1MiB") as cached:
        for number in range(3):
            GAIN["all"] += 1
            dataset.shift = number
            assert len(cached) == N
        got = _passes(cached, hotset.DataLoader, 0, lambda: None)
        assert cached.stats().hits == 3 * N
    assert not told
    equal_batches(got[0], list(DataLoader(dataset, batch_size=4)))


@pytest.mark.parametrize("epochs", [1, 12])
def test_of_a_window_the_samples_that_it_holds_are_compared(epochs: int) -> None:
    """After some epochs no resident's number in the window is its index in the dataset."""
    window = hotset.Window(resident=6, replace=0.5, wait=True)
    with recorded() as told, hotset.cache(Outside(), window=window) as cached:
        loader = hotset.DataLoader(cached, batch_size=3)
        for _ in range(epochs):
            list(loader)
        KNOWN[1000 + len(KNOWN)] = 1  # read by the code, and of no use
        list(loader)
        assert not told
        CHANGES["a number"]()
        found = torch.cat(list(loader))
    assert any("has changed" in str(each.message) for each in told)
    assert {*map(tuple, found.tolist())} <= {tuple(Outside()[index].tolist()) for index in range(N)}
