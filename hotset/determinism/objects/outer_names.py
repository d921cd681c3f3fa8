"""Names outside of a dataset that its code uses: globals, attributes of classes, variables of closures.

``settings.SIZE = 64`` and ``Augment.strength = 2`` change what code does without changing any object that a
dataset holds, and so does a new value of an enclosing function's variable. Each module, class and closure of
the user's is given as an object whose attributes are these names, as they stand for something now, so that
they can be compared like attributes of a dataset. So are the code, defaults and attributes of a function, and
the class of an object: IPython's autoreload sets these, and leaves functions and objects in their places.

So are the variables of the environment, if the code reads it, and the value that a ``ContextVar`` or a
``threading.local`` of a module has here.

A name that the code itself binds (``global count; count += 1``) is its own state, and does not count.
"""

from __future__ import annotations

import contextvars
import os
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

from hotset.determinism.objects.code_dependencies import (
    READS_ENVIRONMENT,
    cells_of,
    globals_of,
    installed,
    is_users,
    names_in,
)
from hotset.determinism.objects.reading_names import CALLED_UNNAMED
from hotset.determinism.objects.safe_access import UNSET, content_of_cell, dict_of, is_opaque

__all__ = ["outer_names"]


def outer_names(code: Iterable[Any], objects: Iterable[Any]) -> list[Any]:
    """The modules, classes, closures and functions, each as an object with the names that are used of it.

    Args:
        code: functions, and classes whose attributes they may read; anything else is left out.
        objects: more classes are those of these; the bases of all count as well.
    """
    found: dict[int, tuple[Any, set[str]]] = {}
    objects, functions = list(objects), dict[int, types.FunctionType]()
    here = dict[str, Any]()
    named, kinds, closures = set[str](CALLED_UNNAMED), list[type](map(type, objects)), list[Any]()
    for each in code:
        if issubclass(type(each), type):
            kinds.append(each)
        elif type(each) is types.FunctionType and is_users(each):
            functions[id(each)] = each
            named |= names_in(each.__code__)
            for names, name in globals_of(each):
                if installed(str(names.get("__name__"))) is None:
                    found.setdefault(id(names), (names, set()))[1].add(name)
                    here |= _value_here(name, names.get(name))
            closures += _closure(each)
    shown = [_shown(str(names.get("__name__")), names, used) for names, used in found.values()]
    users = {base for each in kinds if not is_opaque(each) for base in each.__mro__ if is_users(base)}
    shown += [_shown(each.__name__, vars(each), named) for each in users]
    shown += [_function(each, named) for each in functions.values()]
    if named & READS_ENVIRONMENT:
        here["os.environ"] = _titled("os.environ", lambda: dict(os.environ))
    return [*shown, *closures, *here.values(), *map(_class_of, objects)]


def _value_here(name: str, value: Any) -> dict[str, Any]:
    """What a variable holds whose value is another one in each context or thread; empty for any other."""
    if type(value) is contextvars.ContextVar:
        return {name: _titled(name, lambda: {"value": value.get(UNSET)})}
    if issubclass(type(value), threading.local):
        return {name: _titled(name, lambda: dict(dict_of(value) or {}))}
    return {}


def _function(function: types.FunctionType, used: set[str]) -> Any:
    def held() -> dict[str, Any]:
        own = ("__code__", "__defaults__", "__kwdefaults__", *(used & vars(function).keys()))
        return {name: getattr(function, name) for name in own}

    return _titled(_title(function), held)


def _class_of(value: Any) -> Any:
    return _titled(type(value).__name__, lambda: {"__class__": type(value)})


def _title(function: types.FunctionType) -> str:
    return function.__qualname__.rpartition("<locals>.")[2]


def _closure(function: types.FunctionType) -> list[Any]:
    """The variables of enclosing functions that a function reads; nothing if there are none."""
    if not cells_of(function):
        return []

    def held() -> dict[str, Any]:
        content = {name: content_of_cell(cell) for name, cell in cells_of(function).items()}
        return {name: value for name, value in content.items() if value is not UNSET}

    return [_titled(_title(function), held)]


def _shown(title: str, names: Any, used: set[str]) -> Any:
    """An object, of a class with this title, whose ``__dict__`` has these names of another one."""
    return _titled(title, lambda: {name: names[name] for name in sorted(used) if name in names})


def _titled(title: str, held: Callable[[], dict[str, Any]]) -> Any:
    """An object, of a class with this title, whose ``__dict__`` is what a function returns."""
    return type(title, (), {"__slots__": (), "__dict__": property(lambda _: held())})()
