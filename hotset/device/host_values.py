"""The plain values that a step's Python reads: a graph has those of its capture.

A loss weight that is annealed, ``network.eval()``, another rate of dropout: where the caller changes one of
these between two calls, a replay would go on with the old one, and nothing would say so. So they are looked
at before each call:

- of each module, whether it trains, and the settings of torch's own;
- the globals, enclosing names and attributes of the user's objects that the step's code names.

A Trainer counts epochs and notes losses between calls, in attributes that its step does not read. So what
counts are names in code that the step may call: its own, and that of functions and methods that are named
there, and so on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from hotset.determinism.objects.code_dependencies import cells_of, globals_of, names_in, package_of
from hotset.determinism.objects.object_graph import reached_by_code, within_reach
from hotset.determinism.objects.safe_access import attributes_of, content_of_cell

__all__ = ["HostValues"]

# By id: a class of the user's may have no hash.
_PLAIN = frozenset(map(id, (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)))
_FEW = 64  # entries of a dict of settings, numbers in an array, or in a tensor that is not on the device
_CALL = "__call__"
_CALLED_UNNAMED, _MODE = frozenset({_CALL, "forward"}), frozenset({"training"})


class HostValues:
    """The plain values within reach of a step, now and later.

    Args:
        fn: the step.
        modes_alone: only whether modules train, which is the same for all ranks.

    Example:
        >>> settings = types.SimpleNamespace(weight=1.0, epoch=0)
        >>> def step(batch): return batch * settings.weight
        >>> values = HostValues(step)
        >>> before = values.now()
        >>> settings.epoch = 1
        >>> values.now() == before
        True
        >>> settings.weight = 0.5
        >>> values.now() == before
        False
    """

    def __init__(self, fn: Callable[..., Any], *, modes_alone: bool = False) -> None:
        found = (each for _, each in within_reach([fn], (nn.Module,)))
        modules = {id(each): each for one in found for each in one.modules()}  # type: ignore[attr-defined]
        self._named: list[Callable[[], Any]] = []  # give what a global or an enclosing name stands for
        self._held = [_Attributes(each, _MODE) for each in modules.values()]
        if modes_alone:
            return
        reached = [each for each in reached_by_code(fn) if id(each) not in modules]
        objects = [each for each in reached if not issubclass(type(each), types.FunctionType)]
        called, names = _called(_function_of(fn), reached, [*objects, *modules.values()])
        for function in called:
            self._named += [functools.partial(dict.get, *place) for place in globals_of(function)]
            self._named += [functools.partial(content_of_cell, cell) for cell in cells_of(function).values()]
        self._held = [_Attributes(each, names) for each in objects]
        for each in modules.values():
            own = [name for name, value in vars(each).items() if type(value) in (bool, float)]
            is_torchs = package_of(type(each)) == "torch"
            self._held.append(_Attributes(each, frozenset(own) if is_torchs else names | _MODE))

    def now(self) -> list[Any]:
        """What they are now; to be compared."""
        return [*(_shown(look()) for look in self._named), *(look() for look in self._held)]


def _function_of(value: Any) -> Any:
    """The function that a call runs; whatever else for what is none of Python's."""
    kind = type(value)
    if issubclass(kind, functools.partial):
        return _function_of(value.func)
    if issubclass(kind, (types.MethodType, staticmethod, classmethod)):
        return value.__func__
    if issubclass(kind, property):
        return value.fget
    return value if issubclass(kind, types.FunctionType) else getattr(kind, _CALL, None)


def _called(step: Any, reached: list[Any], owners: list[Any]) -> tuple[list[Any], frozenset[str]]:
    """The functions that a step may call, itself among them, and all names in their code.

    Args:
        reached: with the functions that count.
        owners: objects and classes whose attributes may be functions.
    """
    users = {id(each) for each in reached if issubclass(type(each), types.FunctionType)}
    called: dict[int, Any] = {}
    names, fresh = _CALLED_UNNAMED, [step] if issubclass(type(step), types.FunctionType) else []
    while fresh:
        called.update((id(each), each) for each in fresh)
        names = names.union(*(names_in(each.__code__) for each in fresh))
        held = [space.get(name) for each in fresh for space, name in globals_of(each)]
        held += [content_of_cell(cell) for each in fresh for cell in cells_of(each).values()]
        held += [value for owner in owners for name, value in _held(owner).items() if name in names]
        found = {id(each): each for each in map(_function_of, held)}
        fresh = [each for key, each in found.items() if key in users and key not in called]
    return list(called.values()), names


def _held(owner: Any) -> Any:
    """The attributes of an object, or class, by name."""
    return vars(owner) if issubclass(type(owner), type) else attributes_of(owner) or {}


class _Attributes:
    """Gives the plain ones among an object's, or class's, attributes of these names."""

    def __init__(self, owner: Any, names: frozenset[str]) -> None:
        self._owner, self._names = owner, names
        self._found: tuple[int, list[str]] = -1, []

    def __call__(self) -> list[Any]:
        held = _held(self._owner)
        if self._found[0] != len(held):  # one was set for the first time
            self._found = len(held), [name for name in held if name in self._names]
        return [_shown(held.get(name)) for name in self._found[1]]


def _shown(value: Any) -> Any:
    """A plain value, or a few of them; None for all else."""
    kind = type(value)
    if id(kind) in _PLAIN:
        return value
    if kind is dict and len(value) <= _FEW:
        plain = ((key, each) for key, each in value.items() if id(type(each)) in _PLAIN)
        return {key: each for key, each in plain if type(key) is str}
    is_small = kind is np.ndarray and value.size <= _FEW and not value.dtype.hasobject
    if is_small or issubclass(kind, np.generic):
        return value.tobytes()
    is_small = kind is torch.Tensor and value.numel() <= _FEW and value.layout is torch.strided
    if is_small and value.device.type == "cpu" and not value.is_quantized:
        return repr(value.tolist())  # in which nan is equal to itself
    return None
