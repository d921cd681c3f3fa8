"""Special methods of the dataset's class, as Python and libraries look them up: on the type of an object.

``cached == other``, ``if cached``, ``cached(x)``, ``numpy.asarray(cached)``, ``dataclasses.asdict(cached)``
look at the type of what stands in for the dataset, and whether it has a method there matters as much as what
the method does (``callable``). So where ``isinstance`` finds the dataset's class, it is of a subclass with
those special methods of that class which hotset's does not have itself: each calls the dataset's. One
subclass serves all datasets whose classes have the same ones.

What programs set on ``type(cached)``, they mean to set on the dataset's class. It would be set for all cached
datasets of the process, and have no effect on this one's samples: :class:`NotSettable` refuses that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

__all__ = ["NOT_FORWARDED", "NOT_OF_SAMPLES", "NotSettable", "special_methods", "with_special_methods"]

NOT_FORWARDED = frozenset(
    {
        *("__new__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__set_name__"),
        *("__getattribute__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__setstate__"),
        *("__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__slotnames__", "__abstractmethods__"),
        *("__array_interface__", "__array_struct__"),
        *("__annotate__", "__annotate_func__"),
    }
)
"""What makes, copies and pickles an object is not the dataset's, or the object made would have no cache. Nor
is what shows numpy the dataset's memory itself, or what Python 3.14 calls with no object, for annotations."""
NOT_OF_SAMPLES = frozenset(
    {
        *("__bool__", "__eq__", "__ne__", "__hash__", "__str__", "__format__", "__call__"),
        *("__enter__", "__exit__", "__aenter__", "__aexit__"),
    }
)
"""What is answered for a dataset without its samples, so that a transform= or a window does not matter."""
_FIELDS = "__dataclass_fields__"
_SET_BY_PYTHON = ("__parameters__", "__orig_bases__", "__slotnames__")


class NotSettable(type):
    """The type of classes of hotset whose attributes cannot be set; those of the user's subclasses can."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if cls.__module__.startswith("hotset.") and name not in _SET_BY_PYTHON:
            raise TypeError(
                f"{name!r} cannot be set on {cls.__name__}, which is the class of all cached datasets; set "
                "it on the dataset's own, `type(cached.dataset)`."
            )
        super().__setattr__(name, value)


def special_methods(dataset: Any, kind: type) -> frozenset[str]:
    """The names of the special methods that the class of a dataset has, and ``kind`` does not have itself.

    Example:
        >>> class Digits(Dataset):
        ...     def __call__(self, x): return x
        >>> sorted(special_methods(Digits(), Dataset))
        ['__call__']
    """
    of_dataset = type(dataset)
    own = {name for cls in kind.__mro__ if cls is not object for name in vars(cls)}
    names = {
        name for cls in of_dataset.__mro__ if cls not in (object, *Dataset.__mro__) for name in vars(cls)
    }
    return frozenset(
        name
        for name in names - own - NOT_FORWARDED
        if name.startswith("__") and name.endswith("__")
        if name == _FIELDS or callable(getattr(of_dataset, name, None))
    )


@functools.cache
def with_special_methods(kind: type, names: frozenset[str]) -> Any:
    """The subclass of ``kind`` that has these special methods, by those of its ``dataset``.

    If ``__eq__`` is among them and ``__hash__`` is not, Python makes it unhashable, as it did the dataset.
    """
    body: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body |= {"__doc__": kind.__doc__, "_hotset_special": names}
    body |= {name: property(_fields) if name == _FIELDS else _forwarded(name) for name in names}
    return type(kind)(kind.__name__, (kind,), body)


def _forwarded(name: str) -> Callable[..., Any]:
    def forwarded(self: Any, *arguments: Any, **named: Any) -> Any:
        return self._hotset_call(name, *arguments, **named)

    forwarded.__name__ = name
    return forwarded


def _fields(cached: Any) -> Any:
    return getattr(cached.dataset, _FIELDS)
