"""Leaves of tensors.

A tensor that requires a gradient, lies on a device, is sparse, or is a subclass without a codec, is refused,
not flattened: its bytes alone do not describe it. How the dimensions lie in memory is kept as that of numpy's
arrays is (:mod:`hotset.store.leaves.array_leaf`).

This module imports torch, so it is imported where there are tensors: `hotset run` holds a store without.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from hotset.store.leaves.array_leaf import ArrayLeaf, dense_strides, layout_from_json, memory_order
from hotset.store.leaves.leaf import Carrier, SchemaMismatch, Shape

__all__ = ["TORCH_DTYPES", "TensorLeaf", "tensor_from_json", "tensor_leaf"]

# Dtypes of whole bytes, by name: not the quantized ones, nor those that pack several values in a byte.
_WHOLE_BYTES = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|float8\w+|complex\w+")
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and _WHOLE_BYTES.fullmatch(name)
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# numpy has no name for some of torch's dtypes: they travel as integers of the same size.
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    dtype: {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for name, dtype in TORCH_DTYPES.items()
    if name in ("bfloat16", "complex32") or name.startswith("float8")
}


@dataclass(frozen=True)
class TensorLeaf(ArrayLeaf):
    """A tensor; ``dtype`` is torch's name without ``torch.``."""

    library: ClassVar[str] = "torch"

    @cached_property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @cached_property
    def _carrier_dtype(self) -> np.dtype[Any]:
        carried = self.torch_dtype not in _CARRIERS  # else numpy() refuses it
        if not carried:
            return np.dtype(object)
        none: Carrier = torch.empty(0, dtype=self.torch_dtype, device="cpu").numpy()
        return none.dtype

    def _carrier(self, value: object) -> Carrier:
        if type(value) is not torch.Tensor:
            raise SchemaMismatch(f"{type(value).__name__} instead of a tensor")
        if value.dtype != self.torch_dtype or value.ndim != self.ndim:
            raise SchemaMismatch(
                f"{value.dtype} with {value.ndim} dimensions instead of {self.dtype} with {self.ndim}"
            )
        _refuse(value)
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        carrier = _CARRIERS.get(value.dtype)
        array: Carrier = (value if carrier is None else value.view(carrier)).numpy()
        return array

    def _carriers(self, values: Sequence[Any]) -> Sequence[Carrier] | None:
        if set(map(type, values)) != {torch.Tensor} or any(map(vars, values)):
            return None
        try:  # numpy() refuses every tensor that bytes alone do not describe, and dtypes that numpy lacks.
            return [value.numpy() for value in values]
        except (RuntimeError, TypeError):
            return None

    def _over(self, buffer: Any, offset: int, shape: Shape) -> Any:
        if 0 in shape:
            return torch.empty(shape, dtype=self.torch_dtype, device="cpu")
        flat = torch.frombuffer(buffer, dtype=self.torch_dtype, count=math.prod(shape), offset=offset)
        return flat.view(shape)

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        if not self.is_plain or not self.fixed_bytes:
            return super().get_all(buffer, offset, stride, count)
        shape = self.shape or ()
        size, dtype = math.prod(shape), self.torch_dtype
        make, places = torch.frombuffer, range(offset, offset + stride * count, stride)
        return [make(buffer, dtype=dtype, count=size, offset=at).view(shape) for at in places]

    def _permuted(self, array: Any) -> Any:
        return array.permute(self._inverse)

    def _laid_out(self, array: Any) -> Any:
        shape = tuple(array.shape)
        strides = dense_strides(shape, self.order)
        return torch.empty_strided(shape, strides, dtype=self.torch_dtype, device="cpu").copy_(array)


def _refuse(value: torch.Tensor) -> None:
    """Raise SchemaMismatch for a tensor that bytes alone do not describe."""
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        raise SchemaMismatch(f"a {kind} tensor on {value.device}; only dense ones on the CPU are cached")
    if value.requires_grad:
        raise SchemaMismatch("a tensor that requires a gradient; detach it to have it cached")
    if vars(value):
        raise SchemaMismatch(f"a tensor with attributes of its own ({', '.join(vars(value))})")


def tensor_leaf(value: torch.Tensor, *, keep_order: bool) -> TensorLeaf:
    """Return the leaf that fits exactly this tensor.

    Raises:
        SchemaMismatch: it could not come back as it was.
    """
    _refuse(value)
    if value.dtype not in _NAMES:
        raise SchemaMismatch(f"a tensor of {value.dtype}")
    shape = tuple(value.shape)
    order = memory_order(shape, value.stride())
    return TensorLeaf(_NAMES[value.dtype], value.ndim, shape, order, keep_order)


def tensor_from_json(described: Any) -> TensorLeaf:
    """Return the leaf that ``to_json`` described.

    Raises:
        ValueError, KeyError, TypeError: the description does not fit any tensor.
    """
    TORCH_DTYPES[described["dtype"]]
    if described.get("writeable", True) is not True:
        raise ValueError(f"a tensor can be written to, got writeable={described['writeable']!r}")
    return TensorLeaf(described["dtype"], *layout_from_json(described))
