"""A batch of tensors of different shapes: one buffer, and the offset and shape of each tensor in it.

Making a tensor object for each sample costs more than copying a small sample does. So a ragged batch is a
sequence that makes its tensors when they are indexed, and offers the whole buffer besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from hotset.errors import ArgumentError

__all__ = ["Ragged"]

_ALIGN = 16


class Ragged(Sequence[torch.Tensor]):
    """Tensors of one dtype and number of dimensions, each of its own shape.

    Args:
        buffer: uint8, one-dimensional: the bytes of all tensors, with gaps allowed between them.
        starts: int64 array of shape (B,): offset of each tensor's first byte, a multiple of 16.
        shapes: int64 array of shape (B, ndim).
        dtype: of the tensors.

    ``batch[i]`` is a view of the buffer; ``list(batch)`` all of them; :meth:`packed` one tensor without gaps.

    Example:
        >>> batch = Ragged.of([torch.ones(2, 3), torch.zeros(1, 3)])
        >>> len(batch), batch[1].shape, batch.packed()[1].tolist()
        (2, torch.Size([1, 3]), [0, 2, 3])
    """

    __slots__ = ("buffer", "dtype", "shapes", "starts")

    def __init__(
        self,
        buffer: torch.Tensor,
        starts: npt.NDArray[np.int64],
        shapes: npt.NDArray[np.int64],
        dtype: torch.dtype,
    ) -> None:
        self.buffer = buffer
        self.starts = starts
        self.shapes = shapes
        self.dtype = dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Ragged:
        """Copy tensors of one dtype and number of dimensions into a ragged batch.

        Raises:
            TypeError: they differ in dtype or in their number of dimensions.
        """
        first = tensors[0]
        if any(t.dtype != first.dtype or t.ndim != first.ndim for t in tensors):
            raise TypeError(
                "a ragged batch holds tensors of one dtype and one number of dimensions; "
                f"these have {sorted({f'{t.dtype}, {t.ndim}' for t in tensors})}."
            )
        sizes = np.array([t.numel() * t.itemsize for t in tensors], np.int64)
        padded = -(-sizes // _ALIGN) * _ALIGN
        starts = np.cumsum(padded) - padded
        buffer = torch.zeros(int(padded.sum()), dtype=torch.uint8, device=first.device)
        shapes = np.array([t.shape for t in tensors], np.int64).reshape(len(tensors), first.ndim)
        batch = cls(buffer, starts, shapes, first.dtype)
        for mine, given in zip(batch, tensors, strict=True):
            mine.copy_(given)
        return batch

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        shape = self.shapes[index].tolist()
        size = math.prod(shape) * self.dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=self.dtype, device=self.buffer.device)
        return self.buffer.narrow(0, int(self.starts[index]), size).view(self.dtype).view(shape)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tensors concatenated along their first dimension, and int64 offsets of shape (B + 1,) there.

        Raises:
            RuntimeError: they differ in a dimension other than the first.
        """
        lengths = torch.from_numpy(self.shapes[:, 0].copy())
        offsets = torch.zeros(len(self) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(lengths, 0, out=offsets[1:])
        return torch.cat(list(self)), offsets

    def to(self, *args: Any, **kwargs: Any) -> Ragged:
        """The batch with its buffer on another device (one copy for all tensors).

        Raises:
            ArgumentError: another dtype was asked for.
        """
        buffer = self.buffer.to(*args, **kwargs)
        if buffer.dtype != torch.uint8:  # the bytes of the tensors were taken for numbers
            raise ArgumentError(
                f"Ragged.to takes a device and no dtype, got {buffer.dtype}; convert its tensors one by one."
            )
        return Ragged(buffer, self.starts, self.shapes, self.dtype)

    def pin_memory(self) -> Ragged:
        """The batch in page-locked memory; DataLoader calls this with ``pin_memory=True``."""
        return Ragged(self.buffer.pin_memory(), self.starts, self.shapes, self.dtype)

    def __repr__(self) -> str:
        return f"Ragged({len(self)} tensors of {self.dtype}, shapes {self.shapes.tolist()[:3]} ...)"
