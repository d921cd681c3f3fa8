"""The form of a SharedCache's samples: what fits in a slot, how it is stored, and how many slots there are.

Samples of one shape are one fixed leaf of the store's schema, so that slots are the rows of one array. Where
the shape varies, also in the number of dimensions, a sample is two variable leaves: its shape, and its
elements in a row.
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
from hotset.store.leaves import SchemaMismatch
from hotset.store.schema import Prepared, Schema

__all__ = ["SampleSpec", "limit_in_bytes", "sample_count"]

_GIB = 1 << 30
_LARGEST_SAMPLE = (1 << 31) - 64


class SampleSpec:
    """What all samples of one cache have in common.

    Args:
        data_dims: their shape, or None if it varies.
        dtype: of their elements.

    Raises:
        ArgumentError: one of them is no such thing, or a sample would have 2 GiB or more.

    Attributes:
        dims: their shape, or None.
        dtype: of their elements.
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
                two = [(np.zeros(count, np.int64), torch.empty(count, dtype=dtype)) for count in (1, 2)]
                return Schema.infer(two, as_lies=True)
            size = math.prod(dims) * dtype.itemsize
            if size <= _LARGEST_SAMPLE:
                return Schema.infer([torch.empty(dims, dtype=dtype)], as_lies=True)
        except (SchemaMismatch, AttributeError, RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"dtype={dtype!r} cannot be cached; give a torch.dtype whose values are whole bytes, such as "
                "torch.uint8, torch.bfloat16 or torch.float32."
            ) from error
        raise ArgumentError(
            f"data_dims={dims} makes samples of {size:,} bytes, and a slot holds less than 2 GiB; split them."
        )

    def share_out(self, limit: int, samples: int) -> tuple[int, int]:
        """Return how many of these samples have a slot, and how many lines there are for their tails.

        Args:
            limit: bytes for the samples, and, where they have one shape, one more for each one's state:
                stocaching's arithmetic, which gives as many slots as it does.
            samples: length of the data set.
        """
        if self.dims is None:
            # A slot without a line for its sample would be of no use.
            length = min(samples, limit // (self.schema.stride + LINE))
            return length, (limit - length * self.schema.stride) // LINE
        size = math.prod(self.dims) * self.dtype.itemsize
        if samples * (size + 1) <= limit:
            return samples, 0
        return max(limit - samples, 0) // max(size, 1), 0

    def prepare(self, value: object) -> Prepared:
        """Take a sample apart, as the store wants it.

        Raises:
            ArgumentError: it is of another dtype or shape, or no sample at all.
        """
        try:
            tensor = self._tensor(value)
        except RuntimeError as error:
            raise ArgumentError(f"A SharedCache cannot hold this sample: {error}.") from error
        shape = tuple(tensor.shape)
        if tensor.dtype != self.dtype:
            raise ArgumentError(
                f"This SharedCache holds {self.dtype}, and the sample is {tensor.dtype}; convert it with "
                f"`.to({self.dtype})`, or make the cache with `dtype={tensor.dtype}`."
            )
        if self.dims is not None and shape != self.dims:
            raise ArgumentError(
                f"This SharedCache holds samples of shape {self.dims}, and this one has {shape}; give it "
                "that shape, or make the cache with `data_dims=None`, for shapes that vary."
            )
        try:
            if self.dims is not None:
                return self.schema.prepare(tensor)
            return self.schema.prepare((np.array(shape, np.int64), tensor.reshape(-1)))
        except SchemaMismatch as error:
            raise ArgumentError(f"A SharedCache cannot hold this sample: {error}.") from error

    def unpack(self, stored: Any) -> torch.Tensor:
        """Return the sample that was read as ``stored``; it shares its memory."""
        if self.dims is not None:
            return stored  # type: ignore[no-any-return]
        shape, elements = stored
        return elements.view(shape.tolist())  # type: ignore[no-any-return]

    def _tensor(self, value: object) -> torch.Tensor:
        """The sample as a plain, contiguous tensor on the CPU; a number becomes one of the cache's dtype."""
        if isinstance(value, torch.Tensor):
            return value.detach().as_subclass(torch.Tensor).cpu().contiguous()
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError):  # text, objects
                return torch.from_numpy(np.require(value, requirements=["C", "W"]))
        elif isinstance(value, bool | int | float | complex | np.generic):
            with contextlib.suppress(RuntimeError, OverflowError, TypeError):
                if torch.can_cast(torch.as_tensor(value).dtype, self.dtype):
                    return torch.tensor(value, dtype=self.dtype)
            raise ArgumentError(f"{value!r} is no value of {self.dtype}, which this cache holds; convert it.")
        raise ArgumentError(
            f"A SharedCache holds tensors, numpy arrays of numbers, and numbers; this is a "
            f"{type(value).__name__}. Convert it to a tensor."
        )


def limit_in_bytes(size_limit_gib: Any) -> int:
    """Return a limit that was given in GiB.

    Raises:
        QuantityError: it is negative, not finite, or no number.

    Example:
        >>> limit_in_bytes(0.5)
        536870912
    """
    number = isinstance(size_limit_gib, Real) and not isinstance(size_limit_gib, bool)
    if not number or not 0 <= size_limit_gib < math.inf:
        raise QuantityError(
            f"size_limit_gib={size_limit_gib!r} is no number of GiB; give an int or a float, 0 or more."
        )
    return int(size_limit_gib * _GIB)


def sample_count(dataset_len: Any) -> int:
    """Return the length of a data set.

    Raises:
        ArgumentError: it is no int, or less than 1.
    """
    try:
        count = operator.index(dataset_len)
    except TypeError:
        count = 0
    if count < 1:
        raise ArgumentError(f"dataset_len={dataset_len!r} is no number of samples; give an int, 1 or more.")
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
            f"data_dims={data_dims!r} is no shape; give a tuple of ints such as (3, 224, 224), or None if "
            "the samples' shapes vary."
        )
    return dims
