"""The names of the attributes that a dataset's reading code may read.

A dataset holds more than its samples depend on: a number that only ``set_epoch`` and a live transform use, a
list for the log. Reading is what ``__getitem__`` does, and what it calls. So the search begins there, and
follows every name in the code: to methods and properties of the class and its bases, to the functions and
objects that the dataset holds under that name, to functions and classes of the user's that the code loads.
All that comes up is taken for a name of the dataset's, whatever the code reads it from.

An attribute whose name does not come up is not read, unless code asks for it by a computed name
(``getattr``), or for all at once (``vars``, ``copy``): then any may be read. So may any if the class is
compiled code.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from hotset.determinism.code_dependencies import is_users, names_in
from hotset.determinism.object_graph import held_objects, loaded_by

__all__ = ["names_read"]

_READING = ("__getitem__", "__getitems__", "__getattr__", "__getattribute__")
_IN_READING = ("__len__", "__iter__", "__call__", "__enter__", "__exit__")  # which code calls without a name
_OF_ANY_NAME = frozenset(
    {*("getattr", "vars", "dir", "eval", "exec", "locals", "attrgetter", "methodcaller", "getmembers")}
    | {*("copy", "deepcopy", "dumps", "asdict", "fields")}
    | {*("__dict__", "__getattribute__", "__getstate__", "__reduce_ex__")}
)
_CONTAINERS = (list, tuple, dict)
_MOST = 256


def names_read(dataset: Any, but: Collection[str] = ()) -> frozenset[str] | None:
    """All names in the code that reads samples; None if it may read attributes of any name.

    Args:
        dataset: the dataset.
        but: attributes whose objects do not count, such as transforms.

    Example:
        >>> class Squares:
        ...     def __init__(self): self.root, self.epoch = 3, 0
        ...     def __getitem__(self, index): return self.scaled(index) ** 2
        ...     def scaled(self, index): return self.root * index
        >>> sorted(names_read(Squares()))
        ['root', 'scaled']
    """
    kind, held = type(dataset), vars(dataset)
    waiting = [function for name in _READING for function in _of_class(kind, name)]
    if not waiting:
        return None
    waiting += (function for name in _IN_READING for function in _of_class(kind, name))
    names: set[str] = set()
    seen: set[types.CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        found = names_in(function.__code__)
        if found & _OF_ANY_NAME or len(seen) > _MOST:
            return None
        for name in found - names:
            waiting += _of_class(kind, name)
            waiting += _functions(held[name]) if name in held and name not in but else ()
        if is_users(function):
            waiting += (one for value in loaded_by(function) for one in _functions(value))
        names |= found
    return frozenset(names)


def _of_class(kind: type, name: str) -> Iterator[types.FunctionType]:
    """The functions of a class and its bases that a name may stand for."""
    for cls in kind.__mro__:
        if name in vars(cls):
            yield from _functions(vars(cls)[name])


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions that may run if code uses this value."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, property):
        yield from _functions(value.fget)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func)
    elif isinstance(value, types.MethodType):
        yield from _each((value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        yield from _each((value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, type):
        if is_users(value):
            yield from _each(vars(value).values())
            yield from _each(value.__bases__)
    elif isinstance(value, _CONTAINERS) and len(value) <= _MOST:
        yield from _each(value.values() if isinstance(value, dict) else value)
    elif not isinstance(value, Dataset):  # whose own code is looked at by itself
        yield from _functions(inspect.getattr_static(value, "__wrapped__", ()))
        for each in held_objects(value):
            if is_users(each) and not isinstance(each, (Dataset, *_CONTAINERS)):
                yield from _functions(type(each))


def _each(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    for value in values:
        yield from _functions(value)
