"""The specification of a SharedCache's samples: dtype and shape, how they are stored, how many slots fit.

Samples of one shape are one fixed leaf of the store's schema, so that slots are the rows of one array. If the
shape varies, also in the number of dimensions, a sample is two variable leaves: its shape, and its elements,
flattened.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from hotset.errors import ArgumentError, QuantityError
from hotset.store.format import LINE
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.schema import Prepared, Schema

__all__ = ["SampleSpec", "limit_in_bytes", "sample_count"]

_GIB = 1 << 30
_LARGEST_SAMPLE = (1 << 31) - 64


class SampleSpec:
    """The common properties of all samples of a cache.

    Args:
        data_dims: their shape, or None if it varies.
        dtype: their dtype.

    Raises:
        ArgumentError: an argument has a wrong type or value, or a sample would have 2 GiB or more.

    Attributes:
        dims: their shape, or None.
        dtype: their dtype.
        schema: how they are stored.
    """

    def __init__(self, data_dims: Sequence[int] | None, dtype: torch.dtype) -> None:
        self.dims = _dimensions(data_dims)
        self.dtype = dtype
        self.schema = self._schema()

    def _schema(self) -> Schema:
        dims, dtype = self.dims, self.dtype
        try:
            if dims is None:
                empty = [torch.empty(count, dtype=dtype, device="cpu") for count in (1, 2)]
                two = [(np.zeros(len(tensor), np.int64), tensor) for tensor in empty]
                return Schema.infer(two, keep_order=True)
            size = math.prod(dims) * dtype.itemsize
            if size <= _LARGEST_SAMPLE:
                return Schema.infer([torch.empty(dims, dtype=dtype, device="cpu")], keep_order=True)
        except (SchemaMismatch, AttributeError, RuntimeError, TypeError) as error:
            raise ArgumentError(
                "dtype= must be a torch.dtype whose values are whole bytes, such as torch.uint8, "
                f"torch.bfloat16 or torch.float32, got {dtype!r}."
            ) from error
        raise ArgumentError(
            f"A sample must be smaller than 2 GiB, but data_dims={dims} makes {size:,} bytes; split the "
            "samples."
        )

    def share_out(self, limit: int, samples: int) -> tuple[int, int]:
        """Return how many of these samples have a slot, and how many lines there are for their tails.

        Args:
            limit: bytes for the samples; if they have one shape, it includes one byte for each one's state:
                stocaching's arithmetic, which gives the same number of slots.
            samples: the length of the dataset.
        """
        if self.dims is None:
            # A slot needs at least one line for its sample.
            length = min(samples, limit // (self.schema.stride + LINE))
            return length, (limit - length * self.schema.stride) // LINE
        size = math.prod(self.dims) * self.dtype.itemsize
        if samples * (size + 1) <= limit:
            return samples, 0
        return max(limit - samples, 0) // max(size, 1), 0

    def prepare(self, value: object) -> Prepared:
        """Prepare a sample for the store.

        Raises:
            ArgumentError: it has another dtype or shape, or is not an array or a number.
        """
        try:
            return self._prepared(self._tensor(value))
        except (RuntimeError, SchemaMismatch) as error:
            raise ArgumentError(f"A SharedCache cannot hold this sample: {error}.") from error

    def _prepared(self, tensor: torch.Tensor) -> Prepared:
        shape = tuple(tensor.shape)
        if tensor.dtype != self.dtype:
            raise ArgumentError(
                f"A sample of this SharedCache must be {self.dtype}, got {tensor.dtype}; convert it with "
                f"`.to({self.dtype})`, or make the cache with `dtype={tensor.dtype}`."
            )
        if self.dims is not None and shape != self.dims:
            raise ArgumentError(
                f"A sample of this SharedCache must have shape {self.dims}, got {shape}; reshape it, or make "
                "the cache with `data_dims=None`, for shapes that vary."
            )
        if self.dims is not None:
            return self.schema.prepare(tensor)
        return self.schema.prepare((np.array(shape, np.int64), tensor.reshape(-1)))

    def unpack(self, stored: Any) -> torch.Tensor:
        """Return the sample that was read as ``stored``. They share memory."""
        if self.dims is not None:
            return stored  # type: ignore[no-any-return]
        shape, elements = stored
        return elements.view(shape.tolist())  # type: ignore[no-any-return]

    def _tensor(self, value: object) -> torch.Tensor:
        """The sample as a plain, contiguous CPU tensor; a number is converted to the cache's dtype."""
        if isinstance(value, torch.Tensor):
            return value.detach().as_subclass(torch.Tensor).cpu().contiguous()
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError):  # strings, objects
                return torch.from_numpy(np.require(value, requirements=["C", "W"]))
        elif isinstance(value, bool | int | float | complex | np.generic):
            with contextlib.suppress(RuntimeError, OverflowError, TypeError):
                if torch.can_cast(torch.as_tensor(value, device="cpu").dtype, self.dtype):
                    return torch.tensor(value, dtype=self.dtype, device="cpu")
            raise ArgumentError(
                f"A sample of this SharedCache must be a value of {self.dtype}, got {value!r}; convert it."
            )
        raise ArgumentError(
            f"A sample of a SharedCache must be a tensor, a numpy array of numbers, or a number, got a "
            f"{type(value).__name__}; convert it to a tensor."
        )


def limit_in_bytes(size_limit_gib: Any) -> int:
    """Convert a limit in GiB to bytes.

    Raises:
        QuantityError: it is negative, not finite, or not a number.

    Example:
        >>> limit_in_bytes(0.5)
        536870912
    """
    number = isinstance(size_limit_gib, Real) and not isinstance(size_limit_gib, bool)
    if not number or not 0 <= size_limit_gib < math.inf:
        raise QuantityError(
            f"size_limit_gib= must be an int or a float of at least 0, got {size_limit_gib!r}."
        )
    return int(size_limit_gib * _GIB)


def sample_count(dataset_len: Any) -> int:
    """Return the length of a dataset as an int.

    Raises:
        ArgumentError: it is not an int, or less than 1.
    """
    try:
        count = operator.index(dataset_len)
    except TypeError:
        count = 0
    if count < 1:
        raise ArgumentError(f"dataset_len= must be an int of at least 1, got {dataset_len!r}.")
    return count


def _dimensions(data_dims: Sequence[int] | None) -> tuple[int, ...] | None:
    if data_dims is None:
        return None
    try:
        dims = tuple(operator.index(size) for size in data_dims)
    except TypeError:
        dims = (-1,)
    if min(dims, default=0) < 0:
        raise ArgumentError(
            "data_dims= must be a tuple of ints such as (3, 224, 224), or None if the samples' shapes vary, "
            f"got {data_dims!r}."
        )
    return dims
