"""Arrays with gaps: views of larger arrays come back with the strides that they had.

Records hold dense arrays. For samples that is enough, as batches are dense. But what a function returned is
computed with: a sum over a crop of a picture adds in another order than one over its dense copy, and rounds
differently. So an array that is not dense, or that cannot be written to, is stored as a dense one beside its
strides, and is laid out with the same strides again. The gaps hold nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np

from hotset.store.leaves.codecs import codec_of, register_codec
from hotset.store.leaves.leaf import SchemaMismatch, is_tensor
from hotset.store.leaves.tree import MAKERS, Group, parts_of

__all__ = ["Strided", "with_strides"]

_LARGEST_GAPS = 8  # how many times the elements' bytes a layout may take
_DEEPEST = 64  # deeper containers are refused later
_BUILTIN = (dict, list, tuple, OrderedDict)
_WITHOUT_PARTS = frozenset({int, float, complex, bool, str, bytes, type(None)})


class Strided:
    """A numpy array or a tensor as it lies: what is stored in its place.

    Raises:
        SchemaMismatch: several of its elements share memory, or it is a few elements of something huge.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        self.is_torch = is_tensor(array)
        shape = tuple(array.shape)
        each = 1 if self.is_torch else max(array.itemsize, 1)
        strides = array.stride() if self.is_torch else array.strides
        if any(step % each for step in strides):
            raise SchemaMismatch("an array whose strides are no multiples of its elements")
        strides = tuple(step // each for step in strides)
        _check(shape, strides)
        self.layout = (shape, strides)


def _check(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    steps = sorted((abs(step), size) for step, size in zip(strides, shape, strict=True) if size > 1)
    reach = 0
    for step, size in steps:
        if step == 0:
            raise SchemaMismatch("an array that repeats its elements (broadcast, or expanded)")
        if step <= reach:
            raise SchemaMismatch("an array whose elements share memory with each other")
        reach += step * (size - 1)
    if reach + 1 > _LARGEST_GAPS * max(math.prod(shape), 1024):
        raise SchemaMismatch("a few elements of a much larger array; copy them")


def _flatten(value: Strided) -> Any:
    shape, strides = value.layout
    dense = value.array.contiguous() if value.is_torch else np.ascontiguousarray(value.array)
    writable = True if value.is_torch else bool(value.array.flags.writeable)
    return dense, list(shape), list(strides), writable


def _unflatten(tree: Any) -> Any:
    dense, shape, strides, writable = tree
    shape, strides = tuple(shape), tuple(strides)
    if is_tensor(dense):
        import torch

        return torch.empty_strided(shape, strides, dtype=dense.dtype, device=dense.device).copy_(
            dense.view(shape)
        )
    # The element with the lowest address comes first; a negative stride begins at its other end.
    lowest = sum(min(step, 0) * (size - 1) for step, size in zip(strides, shape, strict=True) if size)
    highest = sum(max(step, 0) * (size - 1) for step, size in zip(strides, shape, strict=True) if size)
    memory = np.empty(highest - lowest + 1, dense.dtype)
    steps = tuple(step * dense.itemsize for step in strides)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dense.dtype, memory, -lowest * dense.itemsize, steps)
    array[...] = dense.reshape(shape)
    array.flags.writeable = writable
    return array


register_codec(Strided, _flatten, _unflatten)


def with_strides(value: Any) -> Any:
    """A value with its arrays that have gaps, or are read-only, replaced by :class:`Strided`.

    They may lie in containers and in attributes of objects. What a codec takes apart stays as it is.

    Raises:
        SchemaMismatch: one of them cannot be laid out again.
    """
    return _with_strides(value, {}, 0)


def _with_strides(value: Any, met: dict[int, Any], depth: int) -> Any:
    """As :func:`with_strides`; ``met`` has what became of each container, by its id."""
    kind = type(value)
    if kind in _WITHOUT_PARTS or depth > _DEEPEST:
        return value
    if kind is np.ndarray:
        dense = value.flags.c_contiguous or _is_dense(value.shape, value.strides, value.itemsize)
        return value if (dense and value.flags.writeable) or value.dtype.hasobject else Strided(value)
    if is_tensor(value):
        return _tensor_with_strides(value)
    if id(value) in met:
        return met[id(value)]
    met[id(value)] = value  # within itself
    if kind in _BUILTIN or codec_of(value) is None:
        met[id(value)] = _container_with_strides(value, met, depth)
    return met[id(value)]


def _container_with_strides(value: Any, met: dict[int, Any], depth: int) -> Any:
    found = parts_of(value)
    if found is None:
        return value
    kind, keys, parts = found
    laid = [_with_strides(part, met, depth + 1) for part in parts]
    if all(new is old for new, old in zip(laid, parts, strict=True)):
        return value
    (made,) = MAKERS[kind](Group(kind, keys, (), type(value)), [tuple(laid)])
    return made


def _tensor_with_strides(value: Any) -> Any:
    import torch

    if value.layout is not torch.strided or value.is_quantized:
        return value  # which no leaf takes, or whose codec keeps its parts
    if value.is_conj() or value.is_neg():
        raise SchemaMismatch("a tensor whose conjugate is not computed yet; call resolve_conj()")
    return value if _is_dense(value.shape, value.stride(), 1) else Strided(value)


def _is_dense(shape: Any, strides: Any, itemsize: int) -> bool:
    """Whether the elements follow each other without gaps, in some order of the dimensions."""
    if 0 in shape:
        return True
    expected = itemsize
    for step, size in sorted((step, size) for step, size in zip(strides, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected = step * size
    return True
