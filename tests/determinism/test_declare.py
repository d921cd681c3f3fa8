"""Declarations: they travel with the object, are inherited, and are never copied onto something else."""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import random
from typing import Any

import pytest
import torch

import hotset.determinism.declare as declare
from hotset.determinism.declare import declared, deterministic, nondeterministic
from hotset.determinism.verdict import verdict_of
from hotset.errors import ArgumentError


@deterministic
def halve(x: float) -> float:
    return x / 2


@deterministic
class Scale:
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def __call__(self, x: float) -> float:
        return x * self.factor


class ScaleMore(Scale):
    pass


@nondeterministic
class Jitter(Scale):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int

    def __call__(self, x: Any) -> Any:
        return x


class Slotted:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: int) -> int:
        return x + self.size


class AnswersToAnyName:
    def __getattr__(self, name: str) -> str:
        return "deterministic"

    def __call__(self, x: Any) -> Any:
        return x


class Methods:
    @deterministic
    def plain(self, x: int) -> int:
        return x

    @deterministic
    @staticmethod
    def static(x: int) -> int:
        return x

    def undeclared(self, x: int) -> int:
        return x + 1


def test_an_undeclared_object_has_no_declaration() -> None:
    for thing in (len, math.sqrt, Frozen, Frozen(1), torch.nn.ReLU(), 3, None, AnswersToAnyName()):
        assert declared(thing) is None


def test_a_function_is_marked_in_place_and_stays_picklable() -> None:
    assert halve(3) == 1.5
    assert declared(halve) == "deterministic"
    assert pickle.loads(pickle.dumps(halve)) is halve


def test_instances_and_subclasses_inherit_and_the_nearest_declaration_wins() -> None:
    assert [declared(thing) for thing in (Scale, Scale(), ScaleMore, ScaleMore())] == ["deterministic"] * 4
    assert declared(Jitter) == declared(Jitter()) == "nondeterministic"
    mine = Jitter()
    assert deterministic(mine) is mine
    assert declared(mine) == "deterministic"
    assert declared(Jitter()) == "nondeterministic"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.ReLU(),
        lambda: functools.partial(pow, 2),
        lambda: Frozen(3),
        lambda: Scale(),
    ],
    ids=["module", "partial", "frozen dataclass", "plain"],
)
def test_an_instance_is_the_same_object_afterwards_and_its_copy_is_declared_too(make: Any) -> None:
    thing = make()
    assert nondeterministic(thing) is thing
    assert declared(thing) == "nondeterministic"
    assert declared(pickle.loads(pickle.dumps(thing))) == "nondeterministic"
    assert declared(make()) != "nondeterministic"


def test_equality_of_a_frozen_dataclass_is_not_changed_by_its_mark() -> None:
    assert deterministic(Frozen(3)) == Frozen(3)


@pytest.mark.parametrize(
    "thing",
    [math.sqrt, Scale(3.0).__call__, Slotted(5), torch.sqrt],
    ids=["builtin", "method", "slots", "torch"],
)
def test_a_callable_without_attributes_is_wrapped_in_a_picklable_one(thing: Any) -> None:
    argument = torch.tensor(16.0) if thing is torch.sqrt else 16
    carrier = deterministic(thing)
    assert declared(carrier) == "deterministic"
    assert declared(thing) is None or thing is not carrier
    again = pickle.loads(pickle.dumps(carrier))
    assert declared(again) == "deterministic"
    assert carrier(argument) == again(argument) == thing(argument)
    assert declared(nondeterministic(carrier)) == "nondeterministic"


def test_the_wrapper_passes_attribute_reads_on() -> None:
    assert deterministic(Slotted(5)).size == 5
    assert deterministic(math.sqrt).__name__ == "sqrt"
    with pytest.raises(AttributeError, match="nothing"):
        deterministic(Slotted(5)).nothing  # type: ignore[attr-defined] # noqa: B018


def test_methods_and_static_methods_have_their_functions_declaration() -> None:
    assert declared(Methods().plain) == declared(Methods.plain) == "deterministic"
    assert declared(Methods.static) == declared(Methods().static) == "deterministic"
    assert declared(Methods().undeclared) is None


def test_declaring_one_bound_method_leaves_the_other_instances_alone() -> None:
    one = Methods()
    assert declared(deterministic(one.undeclared)) == "deterministic"
    assert declared(one.undeclared) is None
    assert declared(Methods.undeclared) is None


def test_a_wrapper_of_a_deterministic_function_is_not_deterministic_by_copy() -> None:
    @functools.wraps(halve)
    def noisy(x: float) -> float:
        return halve(x) + random.random()

    assert declare._ATTRIBUTE in vars(noisy), "functools.wraps no longer copies: the rule has no reason left"
    assert declared(noisy) is None
    assert declared(deterministic(noisy)) == "deterministic"
    assert declared(halve) == "deterministic"


def test_a_wrapper_of_a_nondeterministic_function_stays_nondeterministic() -> None:
    @nondeterministic
    def draw(x: float) -> float:
        return x + random.random()

    @functools.wraps(draw)
    def wrapper(x: float) -> float:
        return draw(x)

    assert declared(wrapper) == "nondeterministic"


def test_a_partial_of_a_declared_function_is_not_declared() -> None:
    assert declared(functools.partial(halve, 3)) is None


def test_what_is_made_of_a_nondeterministic_object_is_nondeterministic() -> None:
    @nondeterministic
    class Jitter:
        def __call__(self, x: float) -> float:
            return x

        apply = __call__

        @deterministic
        def exactly(self, x: float) -> float:
            return x

    partial = functools.partial(Jitter(), 3)
    for step in (partial, functools.partial(partial), Jitter().apply, functools.partial(Jitter().apply)):
        assert declared(step) == "nondeterministic"
        assert verdict_of(step).kind == "random"
    assert declared(Jitter().exactly) == "deterministic"
    assert declared(deterministic(partial)) == "deterministic", "its own declaration wins"


def test_an_object_that_cannot_be_declared_is_refused_with_a_sentence() -> None:
    with pytest.raises(ArgumentError, match=r"3 cannot be declared deterministic.*declare its class"):
        deterministic(3)
