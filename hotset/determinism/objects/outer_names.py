"""Names outside of a dataset that its code uses: globals of modules, and attributes of classes.

``settings.SIZE = 64`` and ``Augment.strength = 2`` change what code does without changing any object that a
dataset holds. Each module and class of the user's is given as an object whose attributes are these names, as
they stand for something now, so that they can be compared like attributes of a dataset.

A global that the code itself binds (``global count; count += 1``) is its own state, and does not count.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from hotset.determinism.objects.bindings import bound_by
from hotset.determinism.objects.code_dependencies import installed, is_users, loaded_globals, names_in
from hotset.determinism.objects.safe_access import is_opaque

__all__ = ["outer_names"]


def outer_names(code: Iterable[Any], classes: Iterable[type]) -> list[Any]:
    """The modules and classes, each as an object with the names that are used of it.

    Args:
        code: functions, and classes whose attributes they may read; anything else is left out.
        classes: more of these; the bases of all count as well.
    """
    found: dict[int, tuple[Any, set[str]]] = {}
    named, kinds = set[str](), list(classes)
    for each in code:
        if issubclass(type(each), type):
            kinds.append(each)
        elif type(each) is types.FunctionType and is_users(each):
            named |= names_in(each.__code__)
            _add_globals(found, each)
    shown = [_shown(str(names.get("__name__")), names, used) for names, used in found.values()]
    users = {base for each in kinds if not is_opaque(each) for base in each.__mro__ if is_users(base)}
    return [*shown, *(_shown(each.__name__, vars(each), named) for each in users)]


def _add_globals(found: dict[int, tuple[Any, set[str]]], function: types.FunctionType) -> None:
    bound = bound_by(function.__code__)
    for name, *attributes in loaded_globals(function.__code__):
        names = function.__globals__
        if name in bound:
            continue
        _add(found, names, name)
        value = names.get(name)
        for attribute in attributes:  # settings.SIZE
            if type(value) is not types.ModuleType:
                break
            _add(found, vars(value), attribute)
            value = vars(value).get(attribute)


def _add(found: dict[int, tuple[Any, set[str]]], names: Any, name: str) -> None:
    if installed(str(names.get("__name__"))) is None:
        found.setdefault(id(names), (names, set()))[1].add(name)


def _shown(title: str, names: Any, used: set[str]) -> Any:
    """An object, of a class with this title, whose ``__dict__`` has these names of another one."""

    def held(_: object) -> dict[str, Any]:
        return {name: names[name] for name in sorted(used) if name in names}

    return type(title, (), {"__slots__": (), "__dict__": property(held)})()
