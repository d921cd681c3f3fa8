"""What a batch must hold.

A dataset of the benchmarks labels each sample with its own index. So a batch names the samples that it
claims to hold, and each one is compared with the original, value by value: a checksum would do, and would
say less about what is wrong.

Written with numpy alone, because the peers that run in an interpreter of their own check themselves with
the same code, and need not have torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CropTruth", "PaddedTruth", "RaggedTruth", "RowTruth", "Truth", "WrongData"]

Array = npt.NDArray[Any]

# Rows are compared in runs of about so many bytes, which stay in a core's own cache.
_RUN_BYTES = 1 << 18


class WrongData(Exception):
    """A batch does not hold what its labels say; the message says where."""


class Truth(Protocol):
    """The originals that batches are compared with."""

    @property
    def size(self) -> int:
        """Samples in an epoch."""

    def check(self, batch: Any) -> list[int]:
        """Return the samples that ``batch`` holds.

        Raises:
            WrongData: a sample is not as its original.
        """


class RowTruth:
    """Batches ``(x, ids)`` of rows of one shape, unchanged; ``ids`` may have a trailing dimension of 1."""

    def __init__(self, rows: Array) -> None:
        self._rows = rows
        self.size = len(rows)

    def check(self, batch: Any) -> list[int]:
        values, ids = _split(batch, self.size)
        if values.shape != (len(ids), *self._rows.shape[1:]) or values.dtype != self._rows.dtype:
            raise WrongData(f"a batch of {values.dtype} {values.shape} for {len(ids)} samples")
        run = max(1, _RUN_BYTES // max(1, self._rows[0].nbytes))
        for start in range(0, len(ids), run):
            part = ids[start : start + run]
            if not np.array_equal(values[start : start + run], self._rows[part]):
                raise WrongData(f"a sample among {part[:4]} differs from its original")
        return ids


class CropTruth:
    """Batches ``(x, ids)`` of random crops ``(channels, side, side)``, some of them flipped left to right.

    A crop carries no note of where it was cut, so its top left pixel is looked for among the places that
    it can come from, and the whole is compared there. The rows hold noise, in which few places match.
    """

    def __init__(self, rows: Array, side: int) -> None:
        self._rows = rows
        self._side = side
        self.size = len(rows)

    def check(self, batch: Any) -> list[int]:
        values, ids = _split(batch, self.size)
        if values.shape != (len(ids), self._rows.shape[1], self._side, self._side):
            raise WrongData(f"a batch of shape {values.shape} for {len(ids)} samples")
        for value, i in zip(values, ids, strict=True):
            if not any(self._is_cut_from(value, row) for row in (self._rows[i], self._rows[i][:, :, ::-1])):
                raise WrongData(f"sample {i} is not a crop of its original")
        return ids

    def _is_cut_from(self, value: Array, row: Array) -> bool:
        places = row[0, : row.shape[1] - self._side + 1, : row.shape[2] - self._side + 1] == value[0, 0, 0]
        return any(
            np.array_equal(value, row[:, y : y + self._side, x : x + self._side])
            for y, x in np.argwhere(places)
        )


class RaggedTruth:
    """Batches ``(samples, ids)`` of vectors of different lengths.

    ``samples`` is a sequence of vectors, or a pair ``(values, offsets)``, in which sample ``k`` is
    ``values[offsets[k]:offsets[k + 1]]``.
    """

    def __init__(self, samples: Sequence[Array]) -> None:
        self._samples = samples
        self.size = len(samples)

    def check(self, batch: Any) -> list[int]:
        held, ids = batch
        numbers = _numbers(ids, self.size)
        if isinstance(held, tuple):
            values, offsets = np.asarray(held[0]), np.asarray(held[1])
            held = np.split(values, offsets[1:-1]) if len(offsets) else []
        if len(held) != len(numbers):
            raise WrongData(f"{len(held)} vectors for {len(numbers)} samples")
        for vector, i in zip(held, numbers, strict=True):
            if not np.array_equal(np.asarray(vector), self._samples[i]):
                raise WrongData(f"sample {i} differs from its original")
        return numbers


class PaddedTruth:
    """Batches ``(x, ids)`` of samples of different lengths, padded with zeros to the longest one's."""

    def __init__(self, samples: Sequence[Array]) -> None:
        self._samples = samples
        self.size = len(samples)

    def check(self, batch: Any) -> list[int]:
        values, ids = _split(batch, self.size)
        longest = max(len(self._samples[i]) for i in ids)
        if values.shape != (len(ids), longest, *self._samples[0].shape[1:]):
            raise WrongData(f"a batch of shape {values.shape} for {len(ids)} samples of up to {longest}")
        for value, i in zip(values, ids, strict=True):
            length = len(self._samples[i])
            if not np.array_equal(value[:length], self._samples[i]) or value[length:].any():
                raise WrongData(f"sample {i} differs from its original")
        return ids


def _split(batch: Any, size: int) -> tuple[Array, list[int]]:
    values, ids = batch
    return np.asarray(values), _numbers(ids, size)


def _numbers(ids: Any, size: int) -> list[int]:
    numbers: list[int] = np.asarray(ids).reshape(-1).tolist()
    if not numbers or min(numbers) < 0 or max(numbers) >= size:
        raise WrongData("a batch that names samples which do not exist")
    return numbers
