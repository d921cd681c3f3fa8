"""What an object of a class of Python's is made of.

An object of a class that was made by a ``class`` statement *is* its attributes: its ``__dict__`` and its
slots. One with a base written in C (``datetime``, ``Decimal``, a pyarrow table) also holds data that only
that base can read. :func:`solid_base` tells the two apart, much as ``copyreg`` does.

So an object of the first kind is stored as its attributes, and made again of them without its constructor,
which may change what was stored. That holds for dataclasses, for a tokenizer's ``BatchEncoding`` and for
features of a class of the user's own. It does not hold where another object with the same attributes is not
the same:

- one without attributes marks something by its identity alone (``MISSING = Missing()``);
- an iterator goes on from where it is;
- a class with a ``__new__`` or ``__del__`` counts its objects, or frees what they hold.

An object of a class written in C is stored if the class itself gives a state for pickle and takes it back, as
libraries in Rust and C++ do (:func:`state_of`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hotset.store.leaves.leaf import SchemaMismatch

__all__ = [
    "dict_of_object",
    "is_plain",
    "make_instance",
    "own_attributes",
    "plain_attributes",
    "set_attributes",
    "slots_of",
    "solid_base",
    "state_of",
]

_HEAP_TYPE = 1 << 9
# Bytes of an object's state. One with more is something that samples refer to, as a tokenizer.
_LARGEST_STATE = 256 << 10


def solid_base(cls: type) -> type:
    """Return the nearest base of ``cls`` that was written in C; ``object`` for a class wholly in Python.

    Example:
        >>> class Text(str): ...
        >>> solid_base(Text), solid_base(types.SimpleNamespace)
        (<class 'str'>, <class 'types.SimpleNamespace'>)
        >>> from torch.utils.data import Dataset
        >>> solid_base(Dataset)
        <class 'object'>
    """
    for base in cls.__mro__:
        if not base.__flags__ & _HEAP_TYPE:
            return base
        # A type that C code made at run time is a heap type as well, but has an allocator of its own.
        new = vars(base).get("__new__")
        if isinstance(new, types.BuiltinMethodType) and new.__self__ is base:
            return base
        # Some of these have no constructor; a `class` statement gives attributes or slots. One that is no
        # larger than an object (typing.Generic, from Python 3.12 on) adds nothing but methods.
        larger = base.__basicsize__ > object.__basicsize__
        if larger and base.__base__ is object and not vars(base).keys() & {"__dict__", "__slots__"}:
            return base
    return object


def slots_of(value: object) -> dict[str, types.MemberDescriptorType]:
    """What reads and sets the slots that the classes of an object declare, by name.

    Members of a type written in C are not safe to read: one of functools.partial reads half a pointer.

    Example:
        >>> class Point:
        ...     __slots__ = ("x", "__weakref__")
        >>> slots_of(Point())
        {'x': <member 'x' of 'Point' objects>}
    """
    found: dict[str, types.MemberDescriptorType] = {}
    try:
        for cls in reversed(type(value).__mro__):
            for name, member in list(vars(cls).items()) if "__slots__" in vars(cls) else ():
                if isinstance(member, types.MemberDescriptorType):
                    found[name] = member
    except Exception:  # of a metaclass
        return {}
    return found


def dict_of_object(value: object) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, itself: not what its class shows in its place."""
    for cls in type(value).__mro__:
        member = vars(cls).get("__dict__")
        if isinstance(member, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return member.__get__(value)  # type: ignore[no-any-return]
    return None


def plain_attributes(value: object) -> dict[str, Any] | None:
    """The attributes of an object that is nothing else; None if it is more than that, or has none.

    Example:
        >>> class Features:
        ...     def __init__(self, ids): self.ids = ids
        >>> plain_attributes(Features([1, 2]))
        {'ids': [1, 2]}
        >>> plain_attributes(3), plain_attributes(Features)
        (None, None)
    """
    if not is_plain(type(value)):
        return None
    found = own_attributes(value)
    return found if found and all(type(name) is str for name in found) else None


def own_attributes(value: object) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and in slots of its own, by name."""
    found: dict[str, Any] = dict(dict_of_object(value) or ())
    for name, slot in slots_of(value).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # it is unset
            continue
    return found


def is_plain(cls: type[Any]) -> bool:
    """Whether another object of this class with the same attributes is the same."""
    new: object = cls.__new__
    if solid_base(cls) is not object or new is not object.__new__:
        return False
    return not hasattr(cls, "__del__") and not issubclass(cls, Iterator)


def make_instance(cls: type[Any], names: Iterable[str], values: Iterable[Any]) -> Any:
    """An object of a plain class with these attributes; none of the class's code runs."""
    made: Any = object.__new__(cls)
    set_attributes(made, zip(names, values, strict=True))
    return made


def set_attributes(made: object, held: Iterable[tuple[str, Any]]) -> None:
    """Set attributes of an object where they lie.

    Raises:
        ValueError: its class has no place for one.
    """
    slots, own = slots_of(made), dict_of_object(made)
    for name, value in held:
        if name in slots:
            slots[name].__set__(made, value)
        elif own is not None:
            own[name] = value
        else:
            raise ValueError(f"{type(made).__qualname__} has no attribute {name}")


def state_of(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """How objects of a class written in C give the state that pickle keeps of them, and are made of it again.

    None for any other class. Pickle itself must make an object by ``cls.__new__(cls)`` and
    ``__setstate__``, and both be the class's own code, in C: a stored schema must not be a way to run
    anything else.
    """
    base: Any = object
    own = [vars(cls).get(name) for name in ("__getstate__", "__setstate__")]
    if solid_base(cls) is not cls or None in own or any(type(each) is types.FunctionType for each in own):
        return None
    if cls.__reduce__ is not base.__reduce__ or cls.__reduce_ex__ is not base.__reduce_ex__:
        return None
    if issubclass(cls, Iterator) or hasattr(cls, "__getnewargs__") or hasattr(cls, "__getnewargs_ex__"):
        return None

    def flatten(value: Any) -> Any:
        state = value.__getstate__()
        if isinstance(state, (str, bytes)) and len(state) > _LARGEST_STATE:
            raise SchemaMismatch(f"an object of {cls.__module__}.{cls.__qualname__} of {len(state):,} bytes")
        return state

    def unflatten(state: Any) -> Any:
        made: Any = cls.__new__(cls)
        made.__setstate__(state)
        return made

    return flatten, unflatten
