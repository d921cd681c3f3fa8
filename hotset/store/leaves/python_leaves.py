"""Leaves of what Python has: numbers, also of numpy, lists of them, text, None, enumerations, functions."""

from __future__ import annotations

import importlib
import operator
import struct
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotset.store.leaves.leaf import Carrier, Leaf, SchemaMismatch, Shape

__all__ = [
    "EnumLeaf",
    "NamedLeaf",
    "NoneLeaf",
    "NumberLeaf",
    "NumbersLeaf",
    "TextLeaf",
    "name_of_type",
    "named_from_json",
    "named_leaf",
    "number_kind",
    "numbers_leaf",
    "type_named",
]

_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_PYTHON_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float, "complex": complex}
_NUMPY_NAMES = {"bool": "?", "int": "<i8", "float": "<f8", "complex": "<c16"}
_INT_RANGE = range(-(1 << 63), 1 << 63)
_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)
_MANY_NUMBERS = 8  # of a list, from which on they are one leaf


@dataclass(frozen=True)
class NumberLeaf(Leaf):
    """A Python bool, int, float or complex, or a numpy scalar (``kind`` is then its type string)."""

    kind: str

    @property
    def fixed_bytes(self) -> int:
        return {"bool": 1, "int": 8, "float": 8, "complex": 16}.get(self.kind) or np.dtype(self.kind).itemsize

    @property
    def _numpy_name(self) -> str:
        return _NUMPY_NAMES.get(self.kind, self.kind)

    def check(self, value: object) -> Any:
        kind = number_kind(value)
        if kind != self.kind:
            raise SchemaMismatch(f"{type(value).__name__} instead of {self.kind}")
        if kind == "int" and value not in _INT_RANGE:
            raise SchemaMismatch("an int of more than 64 bits")
        return value

    def check_all(self, values: Sequence[Any]) -> list[Any]:
        python = _PYTHON_NUMBERS.get(self.kind)
        if python is None or set(map(type, values)) != {python}:
            return super().check_all(values)
        if python is int and (min(values) not in _INT_RANGE or max(values) not in _INT_RANGE):
            return super().check_all(values)
        return list(values)

    def put(self, buffer: Any, offset: int, checked: Any) -> None:
        if self.kind == "int":
            _INT.pack_into(buffer, offset, checked)
        elif self.kind == "float":
            _FLOAT.pack_into(buffer, offset, checked)
        elif self.kind == "bool":
            buffer[offset] = checked
        elif self.kind == "complex":
            _COMPLEX.pack_into(buffer, offset, checked.real, checked.imag)
        else:
            np.ndarray((), np.dtype(self.kind), buffer, offset)[()] = checked

    def put_all(self, buffer: Any, offset: int, stride: int, checked: Sequence[Any]) -> None:
        np.ndarray((len(checked),), self._numpy_name, buffer, offset, (stride,))[:] = checked

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        return self.get_all(buffer, offset, 0, 1)[0]

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        values: Carrier = np.ndarray((count,), self._numpy_name, buffer, offset, (stride,))
        return values.tolist() if self.kind in _PYTHON_NUMBERS else list(values)

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "number", "kind": self.kind}


@dataclass(frozen=True)
class NumbersLeaf(Leaf):
    """A list or tuple of Python numbers of one kind: token ids, a box.

    Attributes:
        container: ``"list"`` or ``"tuple"``.
        kind: ``"bool"``, ``"int"`` or ``"float"``.
        length: of the list in all samples, or None if it varies.
    """

    container: str
    kind: str
    length: int | None

    dims = 1

    @property
    def itemsize(self) -> int:
        return 1 if self.kind == "bool" else 8

    @property
    def fixed_bytes(self) -> int | None:
        return None if self.length is None else self.length * self.itemsize

    def check(self, value: object) -> Carrier:
        if type(value) is not (list if self.container == "list" else tuple):
            raise SchemaMismatch(f"{type(value).__name__} instead of {self.container}")
        assert isinstance(value, (list, tuple))
        if self.length is not None and len(value) != self.length:
            raise SchemaMismatch("other keys or another length than in the first samples")
        if operator.countOf(map(type, value), _PYTHON_NUMBERS[self.kind]) != len(value):
            raise SchemaMismatch(f"a {self.container} that does not hold {self.kind} alone")
        try:
            return np.fromiter(value, _NUMPY_NAMES[self.kind], len(value))
        except OverflowError:
            raise SchemaMismatch("an int of more than 64 bits") from None

    def put(self, buffer: Any, offset: int, checked: Carrier) -> None:
        np.ndarray(checked.shape, checked.dtype, buffer, offset)[:] = checked

    def put_all(self, buffer: Any, offset: int, stride: int, checked: Sequence[Carrier]) -> None:
        rows: Carrier = np.ndarray(
            (len(checked), len(checked[0])), checked[0].dtype, buffer, offset, (stride, self.itemsize)
        )
        rows[:] = checked

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        count = dims[0] if self.length is None else self.length
        values: Carrier = np.ndarray((count,), _NUMPY_NAMES[self.kind], buffer, offset)
        return values.tolist() if self.container == "list" else tuple(values.tolist())

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        assert self.length is not None
        shape, strides = (count, self.length), (stride, self.itemsize)
        rows: Carrier = np.ndarray(shape, _NUMPY_NAMES[self.kind], buffer, offset, strides)
        found: list[Any] = rows.tolist()
        return found if self.container == "list" else list(map(tuple, found))

    def widen(self, value: object) -> Leaf:
        other = replace(self, length=None)
        try:
            other.check(value)
        except SchemaMismatch:
            return self
        return self if len(value) == self.length else other  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "numbers", "container": self.container, "kind": self.kind, "length": self.length}


@dataclass(frozen=True)
class TextLeaf(Leaf):
    """A str or bytes; always variable."""

    kind: str

    fixed_bytes = None
    dims = 1

    def check(self, value: object) -> bytes:
        if type(value).__name__ != self.kind or type(value) not in (str, bytes):
            raise SchemaMismatch(f"{type(value).__name__} instead of {self.kind}")
        if isinstance(value, bytes):
            return value
        # A path that is not valid UTF-8 has lone surrogates, which must come back as such.
        return str(value).encode("utf-8", "surrogatepass")

    def shape_of(self, checked: bytes) -> Shape:
        return (len(checked),)

    def put(self, buffer: Any, offset: int, checked: bytes) -> None:
        buffer[offset : offset + len(checked)] = checked

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        raw = bytes(memoryview(buffer)[offset : offset + dims[0]])
        return raw if self.kind == "bytes" else raw.decode("utf-8", "surrogatepass")

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "text", "kind": self.kind}


@dataclass(frozen=True)
class NoneLeaf(Leaf):
    """None: it takes no bytes."""

    fixed_bytes = 0

    def check(self, value: object) -> None:
        if value is not None:
            raise SchemaMismatch(f"{type(value).__name__} instead of None")

    def put(self, buffer: Any, offset: int, checked: None) -> None:
        pass

    def get(self, buffer: Any, offset: int, dims: Shape) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "none"}


@dataclass(frozen=True)
class EnumLeaf(Leaf):
    """A member of an enumeration, stored as its position in it."""

    enum: type

    fixed_bytes = 8

    def check(self, value: object) -> int:
        if type(value) is not self.enum:
            raise SchemaMismatch(f"{type(value).__name__} instead of {self.enum.__name__}")
        for place, member in enumerate(self.enum):  # type: ignore[var-annotated, arg-type]
            if member is value:
                return place
        raise SchemaMismatch(f"{value!r}, which is not a single member of {self.enum.__name__}")

    def put(self, buffer: Any, offset: int, checked: int) -> None:
        _INT.pack_into(buffer, offset, checked)

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        return list(self.enum)[_INT.unpack_from(buffer, offset)[0]]  # type: ignore[call-overload]

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "enum", "type": name_of_type(self.enum)}


@dataclass(frozen=True)
class NamedLeaf(Leaf):
    """A function, class or dtype that a module holds under this name: that very object, of no bytes."""

    name: str

    fixed_bytes = 0

    def check(self, value: object) -> None:
        if _object_named(self.name) is not value:
            raise SchemaMismatch(f"{value!r} instead of {self.name}")

    def put(self, buffer: Any, offset: int, checked: None) -> None:
        pass

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        return _object_named(self.name)

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "named", "name": self.name}


def named_leaf(value: object) -> NamedLeaf | None:
    """The leaf of a function, class or dtype that its module holds under its name; None for any other object.

    Example:
        >>> named_leaf(operator.add)
        NamedLeaf(name='_operator:add')
        >>> named_leaf(lambda: 1) is None
        True
    """
    own = _own_name(value)
    if own is None:
        return None
    leaf = NamedLeaf(f"{getattr(value, '__module__', 'torch')}:{own}")
    try:
        leaf.check(value)
    except (AttributeError, ImportError, ValueError, SchemaMismatch):
        return None
    return leaf


def named_from_json(name: str) -> NamedLeaf:
    """The leaf of what a module holds under this name.

    Raises:
        AttributeError, ImportError, ValueError: it is not a function, class or dtype of that name.
    """
    # Its module may call itself otherwise: a program's is __mp_main__ where it was spawned.
    if _own_name(_object_named(name)) != name.partition(":")[2]:
        raise ValueError(f"{name} must be a function, class or dtype of that name")
    return NamedLeaf(name)


def _own_name(value: object) -> str | None:
    """The name of a function, class or dtype in its module; None for any other object."""
    if issubclass(type(value), _NAMED):
        return str(value.__qualname__)  # type: ignore[attr-defined]
    if f"{type(value).__module__}.{type(value).__qualname__}" == "torch.dtype":
        return str(value).partition(".")[2]
    return None


def number_kind(value: object) -> str | None:
    """The ``kind`` of :class:`NumberLeaf` that fits a value; None for anything but such numbers."""
    kind = type(value)
    if kind in (bool, int, float, complex):
        return kind.__name__
    if isinstance(value, (np.bool_, np.number, np.datetime64, np.timedelta64)):
        # Two of numpy's types may share a dtype (int64 and longlong): only the one that dtype gives is taken.
        return value.dtype.str if np.dtype(value.dtype.str).type is kind else None
    return None


def numbers_leaf(value: Sequence[object]) -> NumbersLeaf | None:
    """The leaf of a list or tuple of many numbers of one kind; None for any other."""
    kind = type(value[0]).__name__ if value else ""
    if len(value) < _MANY_NUMBERS or kind not in ("bool", "int", "float") or len(set(map(type, value))) > 1:
        return None
    leaf = NumbersLeaf(type(value).__name__, kind, len(value))
    return leaf if type(value[0]) is _PYTHON_NUMBERS[kind] else None


def name_of_type(cls: type) -> str:
    """``module:qualname``, by which a schema in a segment's metadata names a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _object_named(name: str) -> Any:
    """What a module holds: ``module:qualname``.

    Importing a module runs it, and a schema must not be a way to run other code. So the module must be
    imported already, or lie in a package of which a part is: a process that reads a dataset's samples has
    imported the dataset's package, which may import the module of its samples only when it reads one. A
    top-level module that this process has not imported is refused, and so is a package's program
    (``__main__``).

    Raises:
        AttributeError, ImportError, ValueError: there is no such object, or its module must not be imported.
    """
    module, _, qualname = name.partition(":")
    if module not in sys.modules:
        known = module.partition(".")[0] in sys.modules and not module.endswith(".__main__")
        if not known:
            raise ValueError(f"the module of {name} must be imported by this program first")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def type_named(name: str) -> type:
    """The class that :func:`name_of_type` named.

    Raises:
        AttributeError, ImportError, ValueError: there is no such class, or its module must not be imported.
    """
    found = _object_named(name)
    if not isinstance(found, type):
        raise ValueError(f"{name} must be a class")
    return found
