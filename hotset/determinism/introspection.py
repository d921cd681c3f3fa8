"""What an object is made of, read from outside: no ``__getattr__``, property or ``__eq__`` of its own runs.

An object written in Python *is* its attributes: its ``__dict__`` and its slots. One that has a base written
in C (``datetime``, ``Decimal``, a pyarrow table) also holds what only that base can read. :func:`solid_base`
tells the two apart, as ``copyreg`` does: it is the first base that was not made by a ``class`` statement.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

__all__ = ["attributes", "solid_base"]

_HEAP_TYPE = 1 << 9


def attributes(obj: object) -> dict[str, Any]:
    """Return the instance attributes of ``obj``, those in slots too, by name; unset slots are left out.

    Empty for what has none. The dict is a new one, its values are the object's own.

    Example:
        >>> attributes(types.SimpleNamespace(size=3))
        {'size': 3}
    """
    found: dict[str, Any] = {}
    for cls in reversed(type(obj).__mro__):
        # Members of a type from C may be anything: functools.partial's reads part of a pointer as a number.
        if "__slots__" not in vars(cls):
            continue
        for name, member in list(vars(cls).items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(obj, cls)
                except AttributeError:
                    continue
    with contextlib.suppress(AttributeError, TypeError):  # what has only slots, or nothing at all
        found.update(object.__getattribute__(obj, "__dict__"))
    return found


def solid_base(cls: type) -> type:
    """Return the nearest base of ``cls`` that was written in C; ``object`` for a class wholly in Python.

    Example:
        >>> class Text(str): ...
        >>> solid_base(Text), solid_base(types.SimpleNamespace)
        (<class 'str'>, <class 'types.SimpleNamespace'>)
    """
    for base in cls.__mro__:
        if not base.__flags__ & _HEAP_TYPE:
            return base
        # A type that C made at run time is a heap type as well, but brings an allocator of its own.
        new = vars(base).get("__new__")
        if isinstance(new, types.BuiltinMethodType) and new.__self__ is base:
            return base
    return object
