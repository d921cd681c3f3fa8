"""The kinds of leaves: numbers, text, None and enums here, arrays in :mod:`hotset.store.array_leaf`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.store.array_leaf import ArrayLeaf, array_from_json, array_leaf
from hotset.store.leaf import Leaf, SchemaMismatch, Shape

__all__ = [
    "ArrayLeaf",
    "EnumLeaf",
    "Leaf",
    "NoneLeaf",
    "NumberLeaf",
    "SchemaMismatch",
    "Shape",
    "TextLeaf",
    "leaf_from_json",
    "leaf_of",
    "name_of_type",
]

Carrier = npt.NDArray[Any]


_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_INT_RANGE = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class NumberLeaf:
    """A Python bool, int, float or complex, or a numpy scalar (``kind`` is then its type string)."""

    kind: str

    @property
    def fixed_bytes(self) -> int:
        return {"bool": 1, "int": 8, "float": 8, "complex": 16}.get(self.kind) or np.dtype(self.kind).itemsize

    dims = 0

    def check(self, value: object) -> Any:
        kind = _number_kind(value)
        if kind != self.kind:
            raise SchemaMismatch(f"{type(value).__name__} instead of {self.kind}")
        if kind == "int" and value not in _INT_RANGE:
            raise SchemaMismatch("an int of more than 64 bits")
        return value

    def measure(self, checked: Any) -> tuple[Shape, int]:
        return (), self.fixed_bytes

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

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        if self.kind == "int":
            return _INT.unpack_from(buffer, offset)[0]
        if self.kind == "float":
            return _FLOAT.unpack_from(buffer, offset)[0]
        if self.kind == "bool":
            return bool(buffer[offset])
        if self.kind == "complex":
            return complex(*_COMPLEX.unpack_from(buffer, offset))
        return np.ndarray((), np.dtype(self.kind), buffer, offset)[()]

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        name = {"bool": "?", "int": "<i8", "float": "<f8", "complex": "<c16"}.get(self.kind)
        values: Carrier = np.ndarray((count,), name or self.kind, buffer, offset, (stride,))
        return values.tolist() if name else list(values)

    def widen(self, value: object) -> Leaf:
        return self

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "number", "kind": self.kind}


@dataclass(frozen=True)
class TextLeaf:
    """A str or bytes; always variable."""

    kind: str

    fixed_bytes = None
    dims = 1

    def check(self, value: object) -> bytes:
        if type(value).__name__ != self.kind or type(value) not in (str, bytes):
            raise SchemaMismatch(f"{type(value).__name__} instead of {self.kind}")
        if isinstance(value, bytes):
            return value
        # Paths that are no valid UTF-8 come as lone surrogates, and have to go back as such.
        return str(value).encode("utf-8", "surrogatepass")

    def measure(self, checked: bytes) -> tuple[Shape, int]:
        return (len(checked),), len(checked)

    def put(self, buffer: Any, offset: int, checked: bytes) -> None:
        buffer[offset : offset + len(checked)] = checked

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        raw = bytes(memoryview(buffer)[offset : offset + dims[0]])
        return raw if self.kind == "bytes" else raw.decode("utf-8", "surrogatepass")

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        raise AssertionError("text is variable")

    def widen(self, value: object) -> Leaf:
        return self

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "text", "kind": self.kind}


@dataclass(frozen=True)
class NoneLeaf:
    """None: it takes no bytes."""

    fixed_bytes = 0
    dims = 0

    def check(self, value: object) -> None:
        if value is not None:
            raise SchemaMismatch(f"{type(value).__name__} instead of None")

    def measure(self, checked: None) -> tuple[Shape, int]:
        return (), 0

    def put(self, buffer: Any, offset: int, checked: None) -> None:
        pass

    def get(self, buffer: Any, offset: int, dims: Shape) -> None:
        return None

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        return [None] * count

    def widen(self, value: object) -> Leaf:
        return self

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "none"}


@dataclass(frozen=True)
class EnumLeaf:
    """A member of an enumeration, stored as its position in it."""

    enum: type

    fixed_bytes = 8
    dims = 0

    def check(self, value: object) -> int:
        if type(value) is not self.enum:
            raise SchemaMismatch(f"{type(value).__name__} instead of {self.enum.__name__}")
        for place, member in enumerate(self.enum):  # type: ignore[var-annotated, arg-type]
            if member is value:
                return place
        raise SchemaMismatch(f"{value!r}, which is no single member of {self.enum.__name__}")

    def measure(self, checked: int) -> tuple[Shape, int]:
        return (), 8

    def put(self, buffer: Any, offset: int, checked: int) -> None:
        _INT.pack_into(buffer, offset, checked)

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        return list(self.enum)[_INT.unpack_from(buffer, offset)[0]]  # type: ignore[call-overload]

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        return [self.get(buffer, offset + place * stride, ()) for place in range(count)]

    def widen(self, value: object) -> Leaf:
        return self

    def to_json(self) -> dict[str, Any]:
        return {"leaf": "enum", "type": name_of_type(self.enum)}


def _number_kind(value: object) -> str | None:
    kind = type(value)
    if kind in (bool, int, float, complex):
        return kind.__name__
    if isinstance(value, (np.bool_, np.number, np.datetime64, np.timedelta64)):
        # Two of numpy's types may share a dtype (int64 and longlong): only the one that comes back is taken.
        return value.dtype.str if np.dtype(value.dtype.str).type is kind else None
    return None


def leaf_of(value: object, *, as_lies: bool) -> Leaf | None:
    """Return the leaf that fits exactly this value, or None if it is no leaf of ours.

    Raises:
        Misfit: it is one in kind, but cannot be given back as it was (a sparse tensor, say).
    """
    if value is None:
        return NoneLeaf()
    if type(value) in (str, bytes):
        return TextLeaf(type(value).__name__)
    array = array_leaf(value, as_lies=as_lies)
    if array is not None:
        return array
    number = _number_kind(value)
    return NumberLeaf(number) if number is not None else None


def name_of_type(cls: type) -> str:
    """``module:qualname``, by which a schema in a segment's metadata names a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def leaf_from_json(described: Any, find: Callable[[str, str], type]) -> Leaf:
    """Return the leaf that ``to_json`` described, if it is one that :func:`leaf_of` could have made.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    kind = described["leaf"]
    if kind == "array":
        return array_from_json(described)
    if kind == "number":
        number = described["kind"]
        if number not in ("bool", "int", "float", "complex") and np.dtype(number).kind not in "biufcmM":
            raise ValueError(f"no such number: {number!r}")
        return NumberLeaf(number)
    if kind == "text":
        if described["kind"] not in ("str", "bytes"):
            raise ValueError(f"no such text: {described['kind']!r}")
        return TextLeaf(described["kind"])
    if kind == "enum":
        return EnumLeaf(find(described["type"], "enum"))
    if kind == "none":
        return NoneLeaf()
    raise ValueError(f"no such leaf: {kind!r}")
