"""Objects of classes that were derived from a container, a text, a number or an array: that and attributes.

Such are dicts with their items as attributes (``EasyDict``, ``Munch``, the outputs of transformers' models)
and a user's own lists, texts and arrays. A namespace of :mod:`types` is attributes alone.

An attribute that is an item of the dict as well comes back as that very item, and a ``__dict__`` that is the
dict itself as that. None of the class's code runs but an array's ``__array_finalize__``. A class with a
``__new__`` or ``__del__`` is none of these (see :mod:`hotset.store.leaves.instances`). One of arrays may have
a ``__new__``, which numpy's documentation tells it to have, but no own way to be pickled.
"""

from __future__ import annotations

import json
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hotset.store.leaves.instances import dict_of_object, own_attributes, set_attributes, solid_base
from hotset.store.leaves.leaf import SchemaMismatch

__all__ = ["derived_from"]

_ITSELF = "itself"


def _ordered(cls: Any, items: dict[Any, Any]) -> Any:
    made = OrderedDict.__new__(cls)
    for key, value in items.items():
        OrderedDict.__setitem__(made, key, value)
    return made


def _mapping(cls: Any, items: dict[Any, Any]) -> Any:
    made = dict.__new__(cls)
    dict.update(made, items)
    return made


def _listed(cls: Any, parts: list[Any]) -> Any:
    made = list.__new__(cls)
    list.extend(made, parts)
    return made


# What an object of a class derived from each of these holds, and how one is made of it, without attributes.
_BASES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    dict: (lambda value: dict(dict.items(value)), _mapping),
    OrderedDict: (lambda value: dict(OrderedDict.items(value)), _ordered),
    list: (lambda value: list(list.__iter__(value)), _listed),
    tuple: (lambda value: list(tuple.__iter__(value)), tuple.__new__),
    str: (str.__str__, str.__new__),
    bytes: (lambda value: bytes(memoryview(value)), bytes.__new__),
    int: (int.__int__, int.__new__),
    float: (float.__float__, float.__new__),
    np.ndarray: (lambda value: value.view(np.ndarray), lambda cls, array: array.view(cls)),
    types.SimpleNamespace: (lambda value: None, lambda cls, nothing: types.SimpleNamespace.__new__(cls)),
}


def derived_from(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """How objects of a derived class are flattened and built again; None for any other class.

    Example:
        >>> class Options(dict): ...
        >>> flatten, unflatten = derived_from(Options)
        >>> unflatten(flatten(Options(size=3)))
        {'size': 3}
        >>> derived_from(dict) is None
        True
    """
    base = solid_base(cls)
    if base not in _BASES or (cls is base and cls is not types.SimpleNamespace):
        return None
    if hasattr(cls, "__del__") or issubclass(cls, Iterator) or any(_own(cls, base)):
        return None
    if hasattr(cls, "_fields") and issubclass(cls, tuple):  # a namedtuple
        return None
    content, make = _BASES[base]

    def flatten(value: Any) -> Any:
        if type(value) is not cls:
            raise SchemaMismatch(f"an object of another class of the name {cls.__qualname__}")
        held = content(value)
        if dict_of_object(value) is value:
            return held, {}, _ITSELF
        own = own_attributes(value)
        if not all(type(name) is str for name in own):
            raise SchemaMismatch(f"an object of {cls.__qualname__} with attributes whose names are not text")
        shared = [name for name, part in own.items() if _is_item(held, name, part)]
        return held, {name: part for name, part in own.items() if name not in shared}, json.dumps(shared)

    def unflatten(tree: Any) -> Any:
        held, own, shared = tree
        made = make(cls, held)
        if shared == _ITSELF:
            made.__dict__ = made
            return made
        set_attributes(made, [*own.items(), *((name, held[name]) for name in json.loads(shared))])
        return made

    return flatten, unflatten


def _own(cls: Any, base: Any) -> Iterator[bool]:
    """Whether a class has its own ways to do what would make its objects more than content and attributes."""
    names = ("__reduce__", "__reduce_ex__", "__setstate__") if base is np.ndarray else ("__new__",)
    return (getattr(cls, name) is not getattr(base, name) for name in names)


def _is_item(held: Any, name: str, part: Any) -> bool:
    return type(held) is dict and name in held and held[name] is part
