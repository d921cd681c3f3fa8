"""Leaves of numpy's arrays, and what tensors (:mod:`hotset.store.leaves.tensor_leaf`) share with them.

A read-only array (``np.asarray(picture)``) comes back read-only.

Dense arrays that are not in C order in memory (a picture read as HWC and permuted to CHW) keep their order: a
live transform that sums over the picture would round otherwise. They are stored in that order where single
samples are wanted (``keep_order``), and in C order where whole batches are gathered, because
``torch.stack`` gives batches in C order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from hotset.store.leaves.array_dtypes import dtype_of, name_of
from hotset.store.leaves.leaf import LARGEST_DIMENSION, Carrier, Leaf, SchemaMismatch, Shape

__all__ = [
    "ArrayLeaf",
    "NumpyLeaf",
    "dense_strides",
    "layout_from_json",
    "memory_order",
    "numpy_from_json",
    "numpy_leaf",
]

_SMALL = 2048  # bytes of an array, up to which a call for each would cost more than its copying


def dense_strides(shape: Shape, order: Shape) -> Shape:
    """Strides, in elements, of a dense array whose dimensions lie in ``order``, outermost first."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _is_dense_in(order: Shape, shape: Shape, strides: Shape) -> bool:
    """Whether an array of this shape and strides (in elements) is dense, its dimensions in that order."""
    dense = dense_strides(shape, order)
    return all(size == 1 or have == want for size, have, want in zip(shape, strides, dense, strict=True))


def memory_order(shape: Shape, strides: Shape) -> Shape:
    """The order of a dense array's dimensions in memory, outermost first; C order if it is not dense."""
    identity = tuple(range(len(shape)))
    if _is_dense_in(identity, shape, strides):
        return identity
    # Where the strides of dimensions of one element fit in, they are kept: torch.stack looks at them.
    order = tuple(sorted(identity, key=lambda axis: (-strides[axis], -shape[axis], axis)))
    if strides == dense_strides(shape, order):
        return order
    # Otherwise these are arbitrary: they go first, and count for nothing.
    order = tuple(sorted(identity, key=lambda axis: (shape[axis] != 1, -strides[axis], axis)))
    return order if _is_dense_in(order, shape, strides) else identity


@dataclass(frozen=True)
class ArrayLeaf(Leaf):
    """A tensor or a numpy array.

    Attributes:
        dtype: torch's name without ``torch.``, or numpy's (:mod:`hotset.store.leaves.array_dtypes`).
        ndim: number of dimensions.
        shape: the shape that all samples share, or None if it varies.
        order: how the dimensions of a sample lie in memory, outermost first.
        keep_order: stored in that order; False stores them in C order.
        library: ``"torch"`` or ``"numpy"``.
    """

    dtype: str
    ndim: int
    shape: Shape | None
    order: Shape
    keep_order: bool
    library: ClassVar[str]

    @cached_property
    def is_plain(self) -> bool:
        """Whether samples are in C order in memory."""
        return self.order == tuple(range(self.ndim))

    @cached_property
    def _inverse(self) -> Shape:
        return tuple(self.order.index(axis) for axis in range(self.ndim))

    @cached_property
    def fixed_bytes(self) -> int | None:
        if self.shape is None:
            return None
        return math.prod(self.shape) * self.itemsize

    @property
    def dims(self) -> int:
        return self.ndim

    def stored_shape(self, shape: Shape) -> Shape:
        """Shape of what is stored for a sample of this shape: permuted if stored as it lies."""
        return tuple(shape[axis] for axis in self.order) if self.keep_order else shape

    # ---- to bytes ------------------------------------------------------------------------------------

    def check(self, value: object) -> Carrier:
        array = self._carrier(value)
        if self.shape is not None and array.shape != self.shape:
            raise SchemaMismatch(f"shape {array.shape} instead of {self.shape}")
        if max(array.shape, default=0) > LARGEST_DIMENSION:
            raise SchemaMismatch(f"shape {array.shape}, with more than 32 bits")
        self._check_order(array)
        return array.transpose(self.order) if self.keep_order and not self.is_plain else array

    def _carrier(self, value: object) -> Carrier:
        """The value, checked but for shape and order, as an array of numpy's, which shares its memory.

        Raises:
            SchemaMismatch: it has another type, dtype or number of dimensions, or bytes do not describe it.
        """
        raise NotImplementedError

    def check_all(self, values: Sequence[Any]) -> list[Carrier]:
        arrays = self._carriers(values) if self.shape is not None and self.is_plain else None
        if arrays is None:
            return super().check_all(values)
        shape, dtype = self.shape, self._carrier_dtype
        for array in arrays:
            if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                return super().check_all(values)
        return list(arrays)

    def _carriers(self, values: Sequence[Any]) -> Sequence[Carrier] | None:
        """As :meth:`_carrier`, of several values, whose dtypes may differ; None if one may be refused."""
        raise NotImplementedError

    @property
    def _carrier_dtype(self) -> np.dtype[Any]:
        """The dtype of what :meth:`_carriers` returns for values of this leaf."""
        raise NotImplementedError

    def _check_order(self, array: Carrier) -> None:
        """Refuse a dense array whose dimensions lie otherwise than the leaf's: it would come out changed."""
        if array.size == 0 or (self.is_plain and array.flags.c_contiguous):
            return
        strides = tuple(step // array.itemsize for step in array.strides)
        if _is_dense_in(self.order, array.shape, strides):
            return
        if not self.is_plain or memory_order(array.shape, strides) != self.order:
            raise SchemaMismatch("its dimensions lie in another order in memory")

    def put(self, buffer: Any, offset: int, checked: Carrier) -> None:
        np.copyto(np.ndarray(checked.shape, checked.dtype, buffer, offset), checked)

    def put_all(self, buffer: Any, offset: int, stride: int, checked: Sequence[Carrier]) -> None:
        first = checked[0]
        if first.nbytes > _SMALL:
            super().put_all(buffer, offset, stride, checked)
            return
        # All at once, over an array of their own: a call for each costs more than to copy twice.
        rows: Carrier = np.ndarray((len(checked), first.nbytes), np.uint8, buffer, offset, (stride, 1))
        rows[:] = np.array(checked, first.dtype).view(np.uint8).reshape(rows.shape)

    # ---- from bytes ----------------------------------------------------------------------------------

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        # A variable leaf's dimensions are those of what was stored; a fixed one's follow from its shape.
        stored = dims if self.shape is None else self.stored_shape(self.shape)
        array = self._over(buffer, offset, stored)
        if self.is_plain:
            return array
        return self._permuted(array) if self.keep_order else self._laid_out(array)

    def _over(self, buffer: Any, offset: int, shape: Shape) -> Any:
        """An array of this shape over the buffer's memory."""
        raise NotImplementedError

    def _permuted(self, array: Any) -> Any:
        """What is stored in the order of memory, with its dimensions as the sample has them."""
        raise NotImplementedError

    def _laid_out(self, array: Any) -> Any:
        """Copy an array in C order into the order that samples have in memory."""
        raise NotImplementedError

    # ---- as a description ----------------------------------------------------------------------------

    def widen(self, value: object) -> Leaf:
        try:
            array = replace(self, shape=None).check(value)
        except SchemaMismatch:
            return self
        stored = self.stored_shape(self.shape) if self.shape is not None else None
        return self if array.shape == stored else replace(self, shape=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "leaf": "array",
            "library": self.library,
            "dtype": self.dtype,
            "ndim": self.ndim,
            "shape": self.shape,
            "order": self.order,
            "as_lies": self.keep_order,
        }


@dataclass(frozen=True)
class NumpyLeaf(ArrayLeaf):
    """A numpy array.

    Attributes:
        writeable: whether it can be written to.
    """

    writeable: bool = True
    library: ClassVar[str] = "numpy"

    @cached_property
    def itemsize(self) -> int:
        return self.numpy_dtype.itemsize

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return dtype_of(self.dtype)

    @property
    def _carrier_dtype(self) -> np.dtype[Any]:
        return self.numpy_dtype

    def _carrier(self, value: object) -> Carrier:
        if type(value) is not np.ndarray:
            raise SchemaMismatch(f"{type(value).__name__} instead of a numpy array")
        if value.dtype != self.numpy_dtype or value.ndim != self.ndim:
            raise SchemaMismatch(
                f"{value.dtype} with {value.ndim} dimensions instead of {self.dtype} with {self.ndim}"
            )
        if not self._has_flags(value):
            if name_of(value.dtype) != self.dtype:
                raise SchemaMismatch(f"{value.dtype!r} instead of {self.numpy_dtype!r}")
            raise SchemaMismatch(
                "an array that can be written to among read-only ones, or the other way round"
            )
        return value

    def _carriers(self, values: Sequence[Any]) -> Sequence[Carrier] | None:
        # An object of a subclass is not an array of numpy's own.
        alike = all(type(value) is np.ndarray and self._has_flags(value) for value in values)
        return values if alike else None

    def _has_flags(self, array: Carrier) -> bool:
        """Whether an array can be written to if the leaf's can, and its dtype is no more than it tells."""
        if array.flags.writeable != self.writeable or array.dtype.metadata is not None:
            return False
        # Equal dtypes may be of two types (int64 and longlong).
        same = array.dtype.type is self.numpy_dtype.type
        return same and (array.dtype.names is None or name_of(array.dtype) == self.dtype)

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        array = super().get(buffer, offset, dims)
        if not self.writeable:
            array.flags.writeable = False
        return array

    def _over(self, buffer: Any, offset: int, shape: Shape) -> Any:
        return np.ndarray(shape, self.numpy_dtype, buffer, offset)

    def _permuted(self, array: Any) -> Any:
        return array.transpose(self._inverse)

    def _laid_out(self, array: Any) -> Any:
        laid = np.empty(tuple(array.shape[axis] for axis in self.order), self.numpy_dtype)
        laid = laid.transpose(self._inverse)
        np.copyto(laid, array)
        return laid

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), **({} if self.writeable else {"writeable": False})}


def numpy_leaf(value: Carrier, *, keep_order: bool) -> NumpyLeaf:
    """Return the leaf that fits exactly this array.

    Raises:
        SchemaMismatch: it could not come back as it was.
    """
    name = name_of(value.dtype)
    strides = tuple(step // max(value.itemsize, 1) for step in value.strides)
    order = memory_order(value.shape, strides)
    return NumpyLeaf(name, value.ndim, value.shape, order, keep_order, value.flags.writeable)


def numpy_from_json(described: Any) -> NumpyLeaf:
    """Return the leaf that ``to_json`` described.

    Raises:
        ValueError, KeyError, TypeError: the description does not fit any array.
    """
    dtype, writeable = described["dtype"], described.get("writeable", True)
    dtype_of(dtype)
    if type(writeable) is not bool:
        raise ValueError(f"an array must be writeable or not, got {writeable!r}")
    return NumpyLeaf(dtype, *layout_from_json(described), writeable)


def layout_from_json(described: Any) -> tuple[int, Shape | None, Shape, bool]:
    """The number of dimensions, the shape, the order and ``keep_order`` that ``to_json`` described.

    Raises:
        ValueError, KeyError, TypeError: they do not fit any array.
    """
    ndim, keep_order = described["ndim"], described["as_lies"]
    shape = None if described["shape"] is None else tuple(described["shape"])
    order = tuple(described["order"])
    if type(ndim) is not int or type(keep_order) is not bool or sorted(order) != list(range(ndim)):
        raise ValueError(f"the order must be a permutation of {ndim!r} dimensions, got {order}")
    sizes = () if shape is None else shape
    fit = all(type(n) is int and 0 <= n <= LARGEST_DIMENSION for n in sizes)
    if not fit or len(sizes) not in (0, ndim):
        raise ValueError(f"a shape must have {ndim} sizes of 32 bits, got {shape}")
    return ndim, shape, order, keep_order
