"""Safe access to a stranger's object: what it is, and what it holds, even if its own code raises.

A dataset may hold any object. An unbound context proxy (werkzeug's ``LocalProxy``) raises whatever it is
asked, even for its ``__class__``; what a weak proxy stands for may be gone; a dict's subclass may compute its
values. hotset looks into what a dataset holds, to name the cache, to see what has changed, to find
generators. None of that may end with an error of a stranger's:

================================  ==============================  =======================================
what is asked                     may run                         asked here instead
================================  ==============================  =======================================
``isinstance(x, kind)``           ``__class__``                   :func:`is_a`: False if that raises
``hasattr(x, name)``              ``__getattr__``                 :func:`has`: False if that raises
``vars(x)``                       a property ``__dict__``         :func:`dict_of`: None if that raises
``x.name``, ``x.name = value``    properties, ``__setattr__``     :func:`attributes_of`,
                                                                  :func:`set_attribute`: those of the dict and
                                                                  the slots themselves
``len(x)``, ``x.values()``, ...   methods of a subclass           :func:`length`, :func:`elements`: those of
                                                                  the built-in type
``type(x).__module__``, ...       properties of a metaclass       :func:`is_opaque`: such an object is not
                                                                  looked into at all
================================  ==============================  =======================================

What is not looked into counts by its identity where values are compared, and makes a fingerprint one of a
kind. A container is one by its type: a proxy of a list has no elements of its own.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import deque
from typing import Any

from hotset.store.leaves.instances import slots_of

__all__ = [
    "UNSET",
    "attributes_of",
    "content_of_cell",
    "dict_of",
    "elements",
    "has",
    "hides_attributes",
    "is_a",
    "is_opaque",
    "length",
    "loaded_class",
    "set_attribute",
    "shown",
    "values_of",
]

UNSET = object()
"""In place of a value: there is none."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, bytearray)
_ASKED = (
    *("__module__", "__qualname__", "__name__", "__mro__"),
    *("__bases__", "__base__", "__dict__", "__flags__"),
)


def is_a(value: object, kinds: type | tuple[Any, ...]) -> bool:
    """Whether a value is an instance of one of these classes, or says so.

    Example:
        >>> class Unbound:
        ...     @property
        ...     def __class__(self): raise RuntimeError("working outside of context")
        >>> is_a([], (list, dict)), is_a(Unbound(), list)
        (True, False)
    """
    try:
        return isinstance(value, kinds)
    except Exception:  # of the object's own code
        return False


def loaded_class(module: str, name: str) -> tuple[type, ...]:
    """A class of a module, for :func:`is_a`; nothing is of it as long as nobody has imported the module.

    Example:
        >>> loaded_class("json", "JSONDecodeError"), loaded_class("no.module", "Image")
        ((<class 'json.decoder.JSONDecodeError'>,), ())
    """
    kind = getattr(sys.modules.get(module), name, None)
    return () if kind is None else (kind,)


def is_opaque(value: object) -> bool:
    """Whether the class of a value, or the value if it is a class, raises when it is asked what it is."""
    kind = type(value)
    if type(kind) is type and not issubclass(kind, type):
        return False
    classes: tuple[Any, ...] = (kind, value) if issubclass(kind, type) else (kind,)
    try:
        for each in classes:
            hash(each)
            for name in _ASKED:
                getattr(each, name)
    except Exception:  # of a metaclass
        return True
    return False


def dict_of(value: object) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, itself; None if it has none, or does not show it.

    Example:
        >>> class Unbound:
        ...     @property
        ...     def __dict__(self): raise RuntimeError("working outside of context")
        >>> dict_of(Unbound()), dict_of(3)
        (None, None)
    """
    try:
        held = vars(value)  # of a weak proxy, those of what it stands for
    except Exception:  # of the object's own code
        return None
    return held if issubclass(type(held), dict) else None


def content_of_cell(cell: types.CellType) -> Any:
    """What a variable of an enclosing function stands for; :data:`UNSET` if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


def attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes of an object, in its ``__dict__`` and in slots; None if it has, or shows, neither.

    It is to be read only: set what it holds by :func:`set_attribute`.

    Example:
        >>> class Point:
        ...     __slots__ = ("x", "y")
        >>> point = Point()
        >>> set_attribute(point, "x", 1)
        >>> attributes_of(point), attributes_of(3)
        ({'x': 1}, None)
    """
    held, slots = dict_of(value), slots_of(value)
    if not slots:
        return held
    found = dict(held or {})
    for name, slot in slots.items():
        with contextlib.suppress(AttributeError, TypeError):  # it is unset, or of another class
            found[name] = slot.__get__(value)
    return found


def set_attribute(owner: object, name: str, value: object = UNSET) -> None:
    """Set an attribute where it lies, or delete it: no code of the owner runs, nor of its dict's class.

    Example:
        >>> class Point:
        ...     __slots__ = ("x", "y")
        ...     def __setattr__(self, name, value): raise TypeError("it is frozen")
        >>> point = Point()
        >>> set_attribute(point, "x", 1)
        >>> set_attribute(point, "x")
        >>> attributes_of(point)
        {}
    """
    slot, held = slots_of(owner).get(name), dict_of(owner)
    if slot is not None:
        slot.__delete__(owner) if value is UNSET else slot.__set__(owner, value)
    elif held is not None:
        dict.__delitem__(held, name) if value is UNSET else dict.__setitem__(held, name, value)


def has(value: object, name: str) -> bool:
    """Whether an object has an attribute; False if it raises when it is asked.

    Example:
        >>> has([], "append"), has([], "set_epoch")
        (True, False)
    """
    try:
        return hasattr(value, name)
    except Exception:  # of the object's own code
        return False


def hides_attributes(value: object) -> bool:
    """Whether an object that may have attributes raises when they are read.

    Example:
        >>> hides_attributes(3), hides_attributes(is_a)
        (False, False)
    """
    try:
        object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):  # it has none
        return False
    except Exception:
        return True
    return False


def elements(container: Any) -> list[Any]:
    """The elements of a container; of a dict its keys, and then its values.

    Example:
        >>> elements({"a": 1, "b": 2}), elements((3, 4))
        (['a', 'b', 1, 2], [3, 4])
    """
    base = _base(container)
    keys = list(base.__iter__(container))
    return [*keys, *base.values(container)] if base is dict else keys


def values_of(container: Any) -> list[Any]:
    """The elements of a container, of a dict without its keys.

    Example:
        >>> values_of({"a": 1, "b": 2})
        [1, 2]
    """
    base = _base(container)
    return list(base.values(container) if base is dict else base.__iter__(container))


def length(container: Any) -> int:
    """The number of elements of a container.

    Example:
        >>> length({"a": 1, "b": 2})
        2
    """
    return int(_base(container).__len__(container))


def _base(container: Any) -> Any:
    return next(base for base in _CONTAINERS if issubclass(type(container), base))


def shown(value: object) -> str:
    """The text of a value, for messages; the name of its type if it has none.

    Example:
        >>> shown("a"), shown(3)
        ("'a'", '3')
    """
    try:
        return repr(value)
    except Exception:  # of the object's own code
        return f"a {type(value).__name__}"
