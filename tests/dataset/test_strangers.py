"""A dataset may hold objects whose own code raises whatever they are asked: an unbound proxy, for example.

They are never asked when samples are read. So training goes on as without a cache, samples are cached, and
what else the dataset holds is followed when it changes in place.
"""

from __future__ import annotations

import itertools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import rarely
from torch.utils.data import Dataset

import hotset
from hotset.determinism.fingerprint.fingerprint import fingerprint

N = 12


def outside(*_: Any, **__: Any) -> Any:
    raise RuntimeError("working outside of context")


class Unbound:
    """As werkzeug's LocalProxy without a context."""

    __slots__ = ("target",)
    __class__ = property(outside)  # type: ignore[assignment]
    __dict__ = property(outside)  # type: ignore[assignment]
    __len__ = __iter__ = __getitem__ = __bool__ = __call__ = __getattr__ = outside
    __eq__ = __hash__ = __repr__ = __str__ = __dir__ = outside  # type: ignore[assignment]


class HidesItsClass:
    __class__ = property(outside)  # type: ignore[assignment]


class HidesAttributes:
    __dict__ = property(outside)  # type: ignore[assignment]


class AnswersNothing:
    def __getattribute__(self, name: str) -> Any:
        raise KeyError(name)


class LacksNothing:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __call__(self, value: Any) -> Any:
        return value


class Uncountable(list[int]):
    __len__ = __iter__ = __bool__ = outside


class NoDict(dict[str, int]):
    __len__ = __iter__ = keys = values = items = outside


class HidesBases(type):
    __bases__ = property(outside)  # type: ignore[assignment]


class HidesAll(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


class HasNoHash(type):
    __hash__ = outside  # type: ignore[assignment]


class OfHiddenBases(metaclass=HidesBases):
    pass


class OfHiddenClass(metaclass=HidesAll):
    pass


class OfUnhashableClass(metaclass=HasNoHash):
    pass


class NamesNoModule:
    __module__ = property(outside)  # type: ignore[assignment]


class Numbers(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no functions")


class Target:
    pass


STRANGERS: dict[str, Callable[[], Any]] = {
    **{
        kind.__name__: kind
        for kind in (
            *(Unbound, HidesItsClass, HidesAttributes, AnswersNothing, LacksNothing, NoDict),
            *(OfHiddenBases, OfUnhashableClass, NamesNoModule),
        )
    },
    "uncountable": lambda: Uncountable([1]),
    "of a hidden class": lambda: type.__call__(OfHiddenClass),
    "a weak proxy": lambda: weakref.proxy(Target()),
    "a tensor": lambda: torch.zeros(2).as_subclass(Numbers),
}


class Transform:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value + (0 if self.held is None else 1)


class Holder(Dataset[torch.Tensor]):
    def __init__(self, held: Any = None, transform: Any = None) -> None:
        self.held, self.transform = held, transform
        self.scale = [2]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.held is self.held
        value = torch.full((3,), float(index * self.scale[0]))
        return value if self.transform is None else self.transform(value)


STRANGER: Any = None  # what this module's code names


class NamesStranger(Holder):
    def __getitem__(self, index: int) -> torch.Tensor:
        assert STRANGER is STRANGER
        return super().__getitem__(index)


def _named(stranger: Any) -> tuple[Any, None]:
    global STRANGER
    STRANGER = stranger
    return NamesStranger(), None


WAYS: dict[str, Callable[[Any], Any]] = {
    "a global class": lambda stranger: _named(type(stranger)),
    "an attribute": lambda stranger: (Holder(stranger), None),
    "a class in an attribute": lambda stranger: (Holder(type(stranger)), None),
    "in a list": lambda stranger: (Holder([[stranger], 1]), None),
    "in a dict": lambda stranger: (Holder({"a": {"b": stranger}}), None),
    "in an object": lambda stranger: (Holder(Transform(stranger)), None),
    "in its transform": lambda stranger: (Holder(transform=Transform(stranger)), None),
    "in a given transform": lambda stranger: (Holder(), Transform(stranger)),
    "in what it wraps": lambda stranger: (torch.utils.data.Subset(Holder(stranger), range(N)), None),
}


CASES = list(itertools.product(STRANGERS, WAYS))


@pytest.mark.parametrize(("name", "way"), rarely(CASES, *CASES[1::2]))
def test_what_a_dataset_holds_may_raise_whatever_it_is_asked(name: str, way: str) -> None:
    dataset, transform = WAYS[way](STRANGERS[name]())
    holder = getattr(dataset, "dataset", dataset)
    added = int(transform is not None or holder.transform is not None)
    with hotset.cache(dataset, transform=transform, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        for _ in range(2):
            assert torch.cat(list(loader))[:, 0].tolist() == [2 * index + added for index in range(N)]
        assert cached.stats().cached == N
        assert str(cached.plan)
        holder.scale[0] = 3
        with pytest.warns(hotset.HotsetWarning, match=r"\w+.scale has changed"):
            assert torch.cat(list(loader))[:, 0].tolist() == [3 * index + added for index in range(N)]


class Delegates(Holder):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise KeyError(name)


@pytest.mark.parametrize("dataset", [Delegates(), Holder(transform=LacksNothing())])
def test_a_dataset_or_transform_may_raise_what_it_likes_for_attributes_it_lacks(dataset: Any) -> None:
    with hotset.cache(dataset, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        for epoch in range(2):
            cached.set_epoch(epoch)
            assert torch.cat(list(loader))[:, 0].tolist() == [2 * index for index in range(N)]
        assert cached.stats().cached == N


@pytest.mark.parametrize(
    "name", ["HidesAttributes", "OfHiddenBases", "OfUnhashableClass", "of a hidden class"]
)
def test_what_cannot_be_looked_into_has_no_fingerprint_that_another_process_has(name: str) -> None:
    held = types.SimpleNamespace(held=STRANGERS[name]())
    assert fingerprint(held).unknowns
    assert fingerprint(held).digest != fingerprint(held).digest


class Moody:
    """Shows its attributes until its mood changes."""

    __slots__ = ()
    shown: dict[str, Any] | None = {"size": 3}  # noqa: RUF012 - what each object shows

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        if self.shown is None:
            raise RuntimeError("working outside of context")
        return self.shown


@pytest.mark.parametrize(
    ("shown", "sentence"),
    [(None, "Moody.__dict__ has changed"), (NoDict(), "cannot be compared any more .*working")],
)
def test_what_a_dataset_holds_may_hide_in_mid_training_which_goes_on_after_one_warning(
    shown: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Holder(Moody())
    with hotset.cache(dataset, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        whole = torch.cat(list(loader))
        monkeypatch.setattr(Moody, "shown", shown)
        with pytest.warns(hotset.HotsetWarning, match=sentence) as told:
            assert torch.equal(torch.cat(list(loader)), whole)
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(torch.cat(list(loader)), whole)


class Guarded(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("it is guarded")

    def __delitem__(self, name: str) -> None:
        raise TypeError("it is guarded")


class KeepsGuarded(Dataset[torch.Tensor]):
    """Python itself sets attributes past the methods of the dict that holds them."""

    def __init__(self) -> None:
        self.__dict__ = Guarded(read=0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        self.last = index
        return torch.tensor([float(index)])


def test_attributes_in_a_dict_that_refuses_to_be_written_to_are_put_back() -> None:
    dataset = KeepsGuarded()
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert vars(dataset) == {"read": 0}
        assert [cached[index].item() for index in range(N)] == list(range(N))
        assert cached.stats().cached == N
