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
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from hotset.determinism.objects.code_dependencies import is_users, names_in
from hotset.determinism.objects.object_graph import held_functions, held_objects, loaded_by
from hotset.determinism.objects.safe_access import attributes_of, is_a, is_opaque, length, values_of

__all__ = ["CALLED_UNNAMED", "ReadingCode", "names_used_by", "reading_code"]

_READING = ("__getitem__", "__getitems__", "__getattr__", "__getattribute__")
_IN_READING = ("__len__", "__iter__", "__call__", "__enter__", "__exit__")  # which code calls without a name
CALLED_UNNAMED = frozenset((*_READING, *_IN_READING))
"""Methods that are called where samples are read, although no code there names them."""
_OF_ANY_NAME = frozenset(
    {*("getattr", "vars", "dir", "eval", "exec", "locals", "attrgetter", "methodcaller", "getmembers")}
    | {*("copy", "deepcopy", "dumps", "asdict", "fields")}
    | {*("__dict__", "__getattribute__", "__getstate__", "__reduce_ex__")}
)
_CONTAINERS = (list, tuple, dict)
_MOST = 256  # functions, and elements of a container
_MOST_VALUES = 10_000


class ReadingCode(NamedTuple):
    """The code that reads samples of a dataset.

    Attributes:
        names: all names in it; None if it may read attributes of any name.
        functions: those that were found.
    """

    names: frozenset[str] | None
    functions: list[types.FunctionType]


def reading_code(dataset: Any, but: Collection[str] = ()) -> ReadingCode:
    """The code that reads samples, as far as it can be found.

    Args:
        dataset: the dataset.
        but: attributes whose objects do not count, such as transforms.

    Example:
        >>> class Squares:
        ...     def __init__(self): self.root, self.epoch = 3, 0
        ...     def __getitem__(self, index): return self.scaled(index) ** 2
        ...     def scaled(self, index): return self.root * index
        >>> sorted(reading_code(Squares()).names)
        ['root', 'scaled']
    """
    kind, held = type(dataset), attributes_of(dataset) or {}
    search = _Search()
    for name in _READING:
        search.add_of_class(kind, name)
    if not search.waiting:
        return ReadingCode(None, [])
    for name in _IN_READING:
        search.add_of_class(kind, name)
    names: set[str] = set()
    functions: list[types.FunctionType] = []
    reads_any = False
    for function in search.functions():
        functions.append(function)
        found = names_in(function.__code__)
        reads_any |= bool(found & _OF_ANY_NAME)
        for name in found - names:
            search.add_of_class(kind, name)
            if name in held and name not in but:
                search.add(held[name])
        names |= found
    return ReadingCode(None if reads_any or search.is_too_wide else frozenset(names), functions)


def names_used_by(function: Any) -> frozenset[str]:
    """The names in the code of a function of the user's, and of those of the user's that it calls.

    Example:
        >>> names_used_by(print)
        frozenset()
    """
    search = _Search()
    if is_users(function):
        search.add(function)
    return frozenset[str]().union(*(names_in(each.__code__) for each in search.functions()))


class _Search:
    """Finds the functions that may run if code uses a value; each value is looked at once.

    (An enumeration holds its members, and each member is of that enumeration.)

    Attributes:
        waiting: functions that were found and not given yet, each code once.
    """

    def __init__(self) -> None:
        self.waiting: list[types.FunctionType] = []
        self._codes: set[types.CodeType] = set()
        self._is_blind = False
        self._seen: dict[int, Any] = {}  # by identity; kept, so that no other value gets the same one

    @property
    def is_too_wide(self) -> bool:
        """Whether there is more than can be looked through."""
        return self._is_blind or len(self._codes) > _MOST or len(self._seen) > _MOST_VALUES

    def functions(self) -> Iterator[types.FunctionType]:
        """The functions that were found, and those that the user's among them load, as far as it can look."""
        while self.waiting and not self.is_too_wide:
            function = self.waiting.pop()
            yield function
            if is_users(function):
                self.add(*loaded_by(function))

    def add_of_class(self, kind: type, name: str) -> None:
        """Add the functions of a class and its bases that a name may stand for."""
        self.add(*(vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)))

    def add(self, *values: Any) -> None:
        """Add the functions that may run if code uses these values."""
        queue = list(values)
        while queue and not self.is_too_wide:
            value = queue.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if is_opaque(value):
                self._is_blind = True  # nobody knows what its code reads
            elif type(value) is not types.FunctionType:
                queue += _parts(value)
            elif value.__code__ not in self._codes:
                self._codes.add(value.__code__)
                self.waiting.append(value)


def _parts(value: Any) -> Iterable[Any]:
    """What may run if code uses this value, or has parts that may."""
    kind = type(value)
    if issubclass(kind, (staticmethod, classmethod)):
        return (value.__func__,)
    if issubclass(kind, property):
        return (value.fget,)
    if issubclass(kind, functools.cached_property):
        return (value.func,)
    if issubclass(kind, types.MethodType):
        return (value.__func__, value.__self__)
    if issubclass(kind, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if issubclass(kind, type):
        return (*vars(value).values(), *value.__bases__) if is_users(value) else ()
    if issubclass(kind, _CONTAINERS) and length(value) <= _MOST:
        return values_of(value)
    if is_a(value, Dataset):
        return ()  # its own code is looked at by itself
    held = (each for each in held_objects(value) if not is_a(each, (Dataset, *_CONTAINERS)))
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    return (wrapped, *held_functions(value), *(type(each) for each in held if is_users(each)))
