"""Leaves of tensors and numpy arrays.

A read-only array (``np.asarray(picture)``) comes back read-only. A tensor that requires a gradient, lies on a
device, is sparse, or is a subclass without a codec, is refused, not flattened: its bytes alone do not
describe it.

Dense arrays that are not in C order in memory (a picture read as HWC and permuted to CHW) keep their order: a
live transform that sums over the picture would round otherwise. They are stored in that order where single
samples are wanted (``keep_order``), and in C order where whole batches are gathered, because
``torch.stack`` gives batches in C order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hotset.store.leaves.leaf import LARGEST_DIMENSION, Carrier, Leaf, SchemaMismatch, Shape

__all__ = [
    "TORCH_DTYPES",
    "ArrayLeaf",
    "array_from_json",
    "array_leaf",
]

# Dtypes of whole bytes, by name: not the quantized ones, nor those that pack several values in a byte.
_WHOLE_BYTES = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|float8\w+|complex\w+")
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and _WHOLE_BYTES.fullmatch(name)
}
_TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# numpy has no name for some of torch's dtypes: they travel as integers of the same size.
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    dtype: {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for name, dtype in TORCH_DTYPES.items()
    if name in ("bfloat16", "complex32") or name.startswith("float8")
}
_CACHED_KINDS = "biufcmMSU"
_SMALL = 2048  # bytes of an array, up to which a call for each would cost more than its copying


def _dense_strides(shape: Shape, order: Shape) -> Shape:
    """Strides, in elements, of a dense array whose dimensions lie in ``order``, outermost first."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _is_dense_in(order: Shape, shape: Shape, strides: Shape) -> bool:
    """Whether an array of this shape and strides (in elements) is dense, its dimensions in that order."""
    dense = _dense_strides(shape, order)
    return all(size == 1 or have == want for size, have, want in zip(shape, strides, dense, strict=True))


def _memory_order(shape: Shape, strides: Shape) -> Shape:
    """The order of a dense array's dimensions in memory, outermost first; C order if it is not dense."""
    identity = tuple(range(len(shape)))
    if _is_dense_in(identity, shape, strides):
        return identity
    # Dimensions of one element have arbitrary strides: they go first, and count for nothing.
    order = tuple(sorted(identity, key=lambda axis: (shape[axis] != 1, -strides[axis], axis)))
    return order if _is_dense_in(order, shape, strides) else identity


@dataclass(frozen=True)
class ArrayLeaf(Leaf):
    """A tensor or a numpy array.

    Attributes:
        library: ``"torch"`` or ``"numpy"``.
        dtype: torch's name without ``torch.``, or numpy's type string (which has the byte order).
        ndim: number of dimensions.
        shape: the shape that all samples share, or None if it varies.
        order: how the dimensions of a sample lie in memory, outermost first.
        keep_order: stored in that order; False stores them in C order.
        writeable: whether a numpy array can be written to; True for tensors.
    """

    library: str
    dtype: str
    ndim: int
    shape: Shape | None
    order: Shape
    keep_order: bool
    writeable: bool = True

    @cached_property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize if self.library == "torch" else self.numpy_dtype.itemsize

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

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

    def check(self, value: object) -> Carrier:
        array = _tensor_carrier(value, self) if self.library == "torch" else _numpy_carrier(value, self)
        if self.shape is not None and array.shape != self.shape:
            raise SchemaMismatch(f"shape {array.shape} instead of {self.shape}")
        if max(array.shape, default=0) > LARGEST_DIMENSION:
            raise SchemaMismatch(f"shape {array.shape}, with more than 32 bits")
        self._check_order(array)
        return array.transpose(self.order) if self.keep_order and not self.is_plain else array

    def check_all(self, values: Sequence[Any]) -> list[Carrier]:
        if self.shape is None or not self.is_plain:
            return super().check_all(values)
        arrays: Sequence[Carrier] = values
        if self.library == "torch":
            if set(map(type, values)) != {torch.Tensor} or any(map(vars, values)):
                return super().check_all(values)
            try:  # It refuses every tensor that bytes alone do not describe, and dtypes that numpy lacks.
                arrays = [value.numpy() for value in values]
            except (RuntimeError, TypeError):
                return super().check_all(values)
        shape, dtype = self.shape, self._carrier_dtype
        for array in arrays:
            # A type that holds objects is equal to no leaf's; a subclass of an array is none.
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                return super().check_all(values)
            if not array.flags.c_contiguous:
                return super().check_all(values)
            if self.library == "numpy" and not self._has_numpys_flags(array):
                return super().check_all(values)
        return list(arrays)

    def _has_numpys_flags(self, array: Carrier) -> bool:
        """Whether an array can be written to if the leaf's can, and its dtype has no metadata."""
        return array.flags.writeable == self.writeable and array.dtype.metadata is None

    @cached_property
    def _carrier_dtype(self) -> np.dtype[Any]:
        """What :meth:`check` gives for values that numpy has a dtype for."""
        if self.library == "numpy":
            return self.numpy_dtype
        carried = self.torch_dtype not in _CARRIERS
        return torch.empty(0, dtype=self.torch_dtype).numpy().dtype if carried else np.dtype(object)

    def _check_order(self, array: Carrier) -> None:
        """Refuse a dense array whose dimensions lie otherwise than the leaf's: it would come out changed."""
        if array.size == 0 or (self.is_plain and array.flags.c_contiguous):
            return
        strides = tuple(step // array.itemsize for step in array.strides)
        if _is_dense_in(self.order, array.shape, strides):
            return
        if not self.is_plain or _memory_order(array.shape, strides) != self.order:
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

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        array = self._in_order(buffer, offset, dims)
        if not self.writeable:
            array.flags.writeable = False
        return array

    def _in_order(self, buffer: Any, offset: int, dims: Shape) -> Any:
        # A variable leaf's dimensions are those of what was stored; a fixed one's follow from its shape.
        stored = dims if self.shape is None else self.stored_shape(self.shape)
        array: Any
        if self.library == "numpy":
            array = np.ndarray(stored, self.numpy_dtype, buffer, offset)
        elif 0 in stored:
            array = torch.empty(stored, dtype=self.torch_dtype)
        else:
            flat = torch.frombuffer(buffer, dtype=self.torch_dtype, count=math.prod(stored), offset=offset)
            array = flat.view(stored)
        if self.is_plain:
            return array
        if self.keep_order:
            return array.transpose(self._inverse) if self.library == "numpy" else array.permute(self._inverse)
        return self._lay_out(array)

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        if self.library != "torch" or not self.is_plain or not self.fixed_bytes:
            return super().get_all(buffer, offset, stride, count)
        shape = self.shape or ()
        size, dtype = math.prod(shape), self.torch_dtype
        make, places = torch.frombuffer, range(offset, offset + stride * count, stride)
        return [make(buffer, dtype=dtype, count=size, offset=at).view(shape) for at in places]

    def _lay_out(self, array: Any) -> Any:
        """Copy an array in C order into the order that samples have in memory."""
        shape = tuple(array.shape)
        strides = _dense_strides(shape, self.order)
        if self.library == "torch":
            return torch.empty_strided(shape, strides, dtype=self.torch_dtype).copy_(array)
        laid = np.empty(tuple(shape[axis] for axis in self.order), self.numpy_dtype)
        laid = laid.transpose(self._inverse)
        np.copyto(laid, array)
        return laid

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
            **({} if self.writeable else {"writeable": False}),
        }


def _tensor_carrier(value: object, leaf: ArrayLeaf) -> Carrier:
    if type(value) is not torch.Tensor:
        raise SchemaMismatch(f"{type(value).__name__} instead of a tensor")
    if value.dtype != TORCH_DTYPES[leaf.dtype] or value.ndim != leaf.ndim:
        raise SchemaMismatch(
            f"{value.dtype} with {value.ndim} dimensions instead of {leaf.dtype} with {leaf.ndim}"
        )
    _refuse_tensor(value)
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    carrier = _CARRIERS.get(value.dtype)
    array: Carrier = (value if carrier is None else value.view(carrier)).numpy()
    return array


def _numpy_carrier(value: object, leaf: ArrayLeaf) -> Carrier:
    if type(value) is not np.ndarray:
        raise SchemaMismatch(f"{type(value).__name__} instead of a numpy array")
    if value.dtype.str != leaf.dtype or value.ndim != leaf.ndim:
        raise SchemaMismatch(
            f"{value.dtype} with {value.ndim} dimensions instead of {leaf.dtype} with {leaf.ndim}"
        )
    if not leaf._has_numpys_flags(value):
        _refuse_dtype(value)
        raise SchemaMismatch("an array that can be written to among read-only ones, or the other way round")
    return value


def _refuse_dtype(value: Carrier) -> None:
    """Raise SchemaMismatch for an array whose dtype its type string does not describe."""
    if value.dtype.metadata is not None:
        raise SchemaMismatch(f"a numpy array whose dtype has metadata ({dict(value.dtype.metadata)})")


def _refuse_tensor(value: torch.Tensor) -> None:
    """Raise SchemaMismatch for a tensor that bytes alone do not describe."""
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        raise SchemaMismatch(f"a {kind} tensor on {value.device}; only dense ones on the CPU are cached")
    if value.requires_grad:
        raise SchemaMismatch("a tensor that requires a gradient; detach it to have it cached")
    if vars(value):
        raise SchemaMismatch(f"a tensor with attributes of its own ({', '.join(vars(value))})")


def array_leaf(value: object, *, keep_order: bool) -> ArrayLeaf | None:
    """Return the leaf that fits exactly this tensor or array; None if it is neither.

    Raises:
        SchemaMismatch: it is one, and could not come back as it was.
    """
    if type(value) is torch.Tensor:
        _refuse_tensor(value)
        if value.dtype not in _TORCH_NAMES:
            raise SchemaMismatch(f"a tensor of {value.dtype}")
        shape = tuple(value.shape)
        order = _memory_order(shape, value.stride())
        return ArrayLeaf("torch", _TORCH_NAMES[value.dtype], value.ndim, shape, order, keep_order)
    if type(value) is np.ndarray:
        if value.dtype.kind not in _CACHED_KINDS:
            parts = "a list" if value.dtype.hasobject else "a dict of its fields"
            raise SchemaMismatch(f"a numpy array of {value.dtype}; return {parts} to have it cached")
        _refuse_dtype(value)
        strides = tuple(step // max(value.itemsize, 1) for step in value.strides)
        order = _memory_order(value.shape, strides)
        writeable = value.flags.writeable
        return ArrayLeaf("numpy", value.dtype.str, value.ndim, value.shape, order, keep_order, writeable)
    return None


def array_from_json(described: Any) -> ArrayLeaf:
    """Return the leaf that ``to_json`` described.

    Raises:
        ValueError, KeyError, TypeError: the description does not fit any array.
    """
    library, dtype, ndim, keep_order = (described[key] for key in ("library", "dtype", "ndim", "as_lies"))
    shape = None if described["shape"] is None else tuple(described["shape"])
    order = tuple(described["order"])
    if library == "torch":
        TORCH_DTYPES[dtype]
    elif library != "numpy" or np.dtype(dtype).kind not in _CACHED_KINDS or np.dtype(dtype).str != dtype:
        raise ValueError(f"an array must be of torch or numpy, with a known dtype, got {library}, {dtype}")
    if type(ndim) is not int or type(keep_order) is not bool or sorted(order) != list(range(ndim)):
        raise ValueError(f"the order must be a permutation of {ndim!r} dimensions, got {order}")
    sizes = () if shape is None else shape
    fit = all(type(n) is int and 0 <= n <= LARGEST_DIMENSION for n in sizes)
    if not fit or len(sizes) not in (0, ndim):
        raise ValueError(f"a shape must have {ndim} sizes of 32 bits, got {shape}")
    writeable = described.get("writeable", True)
    if type(writeable) is not bool or (library == "torch" and not writeable):
        raise ValueError(f"an array of {library} must be writeable or not, got {writeable!r}")
    return ArrayLeaf(library, dtype, ndim, shape, order, keep_order, writeable)
