"""A leaf: a value in a sample's tree, and how it becomes bytes and a value again.

A leaf is *fixed* (the same number of bytes in every sample, at one offset of the row) or *variable* (bytes in
the tail, dimensions in the row). The first samples decide which: see :mod:`hotset.store.leaves.schema`. There
are two kinds: arrays (numpy's :mod:`hotset.store.leaves.array_leaf`, tensors
:mod:`hotset.store.leaves.tensor_leaf`), and what Python has (:mod:`hotset.store.leaves.python_leaves`);
:mod:`hotset.store.leaves.find_leaf` finds the one that fits a value.

A value that a leaf stores comes back equal in type, dtype, shape, strides of dense arrays, and bytes. A leaf
refuses any other value with :class:`SchemaMismatch`, and that sample stays uncached.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["LARGEST_DIMENSION", "Carrier", "Leaf", "SchemaMismatch", "Shape", "is_tensor"]

Carrier = npt.NDArray[Any]
Shape = tuple[int, ...]

LARGEST_DIMENSION = (1 << 32) - 1


class SchemaMismatch(Exception):
    """A sample that does not fit the schema; its message says where and why."""


class Leaf(Protocol):
    """One kind of value.

    ``fixed_bytes`` is None for a variable leaf: ``dims`` dimensions of elements of ``itemsize`` bytes.
    """

    @property
    def fixed_bytes(self) -> int | None: ...
    @property
    def dims(self) -> int:
        return 0

    @property
    def itemsize(self) -> int:
        return 1

    def check(self, value: object) -> Any:
        """Return the value in the form that :meth:`put` wants.

        Raises:
            SchemaMismatch: the value is of another kind.
        """

    def check_all(self, values: Sequence[object]) -> list[Any]:
        """As :meth:`check`, for this leaf's values in several samples: much faster than one by one."""
        return [self.check(value) for value in values]

    def shape_of(self, checked: Any) -> Shape:
        """The dimensions of a variable leaf's checked value."""
        shape: Shape = checked.shape
        return shape

    def put(self, buffer: Any, offset: int, checked: Any) -> None:
        """Write a checked value there."""

    def put_all(self, buffer: Any, offset: int, stride: int, checked: Sequence[Any]) -> None:
        """Write a fixed leaf's values into rows, the first at ``offset``."""
        for place, value in enumerate(checked):
            self.put(buffer, offset + place * stride, value)

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        """Return the value that lies there; arrays share the buffer's memory."""

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        """Return a fixed leaf's values in ``count`` rows, the first at ``offset``."""
        return [self.get(buffer, offset + place * stride, ()) for place in range(count)]

    def widen(self, value: object) -> Leaf:
        """Return a leaf that fits this one's values and ``value`` too, or self if there is none."""
        return self

    def to_json(self) -> dict[str, Any]: ...


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor of torch's own class, found out without importing torch."""
    loaded = sys.modules.get("torch")
    return loaded is not None and type(value) is getattr(loaded, "Tensor", None)
