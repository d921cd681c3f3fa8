"""The device tier: samples that stay in the device's memory, and batches that are gathered there.

A resident sample is a row in one tensor for each leaf of a batch. The rows are filled from the cache, once,
in the first pass that finds everything cached: as many samples as fit, those of the lowest ids.
(Which ones does not matter: each is used once an epoch.) From then on the host gives row numbers:

    ids of the batch ─> rows ─┬─ all resident ─> index_select on the device
                              └─ some not     ─> these from the cache, put between the others

That needs batches that are columns of equal samples, as ``default_collate`` makes them of a cache without
live transforms; others come as they always do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from hotset._warnings import warn
from hotset.device.trees import map_tensors, tensors_of
from hotset.errors import ArgumentError
from hotset.store.memory_limits import headroom
from hotset.units import format_bytes, parse_bytes

__all__ = ["GpuCache", "ResidentBatches", "SampleSelector", "parse_resident"]

Ids = npt.NDArray[np.int64]

_FILLED_AT_ONCE = 64 << 20
# Rows are moved as integers, the widest that fit: not every dtype can be selected and put by index
# everywhere, and as bytes a row takes eight times as many reads.
_MOVED_AS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@runtime_checkable
class SampleSelector(Protocol):
    """What the iterator over a loader's batches offers if its batches can be gathered elsewhere."""

    def sample_ids(self) -> Ids | None:
        """The ids of all samples that may come, ascending; None if batches cannot be made from ids."""

    def generation(self) -> Any:
        """A value that changes when the cache is cleared; None while its content must not be used."""

    def select(self) -> Ids | None:
        """The sample ids of the next batch, which counts as handed over; None if it has none.

        Raises:
            StopIteration: the pass is over.
        """

    def gather(self, ids: Ids) -> Any | None:
        """A batch of these samples: tensors with a row for each. None if one of them is no longer cached."""

    def build(self) -> Any:
        """The batch that :meth:`select` was last called for, as the iterator itself would have made it."""


def parse_resident(resident: int | str | None, device: torch.device) -> int | None:
    """Bytes of a device's memory; a percentage is of what is free there now.

    Raises:
        ArgumentError, QuantityError: it is not an amount of memory, or is zero.
    """
    if resident is None:
        return None
    size = parse_bytes(resident, name="resident", whole=lambda: _free(device))
    if size == 0:
        raise ArgumentError("resident=0 keeps nothing on the device; give an amount, or leave it out.")
    return size


def _free(device: torch.device) -> int:
    """Bytes that a device has left; on the CPU, where nothing is kept, those of the machine."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else headroom().bytes


class GpuCache:
    """The samples that are kept on a device, where they may take ``limit`` bytes.

    Attributes:
        count: how many are kept.
        columns: for each leaf of a batch a tensor on the device, ``(count, ...)``; a sample is a row of each.
            Other tensors take their place when the samples are filled anew.
        example: a batch of one sample on the host, which has the tree of all batches.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit = limit
        self._device = device
        self._refused = False
        self._passed_by = 0
        self._generation: Any = None
        self.clear()

    def clear(self) -> None:
        """Free all of them."""
        self.count = 0
        self.example: Any = None
        self.columns: list[torch.Tensor] = []
        self._ids: Ids | None = None
        self._rows: Ids = np.empty(0, np.int64)

    def serve(self, source: Iterator[Any]) -> ResidentBatches | None:
        """A pass's batches, gathered on the device as far as they are resident; None if they cannot be."""
        if self._refused:
            return None
        selector = source if isinstance(source, SampleSelector) else None
        ids = selector.sample_ids() if selector is not None else None
        generation = selector.generation() if selector is not None else None
        if selector is None or ids is None or not len(ids) or generation is None:
            self._pass_by()
            return None
        if self._ids is None or not self.is_current(generation) or not np.array_equal(ids, self._ids):
            self.clear()
            if not self._fill(selector, ids):
                return None
            self._generation = generation
        self._passed_by = -1  # after a clear the rest of its pass goes by, too
        return ResidentBatches(self, selector)

    def _pass_by(self) -> None:
        """Nothing is resident in this pass. The first such pass fills the cache; the second one warns."""
        self._passed_by += 1
        if self._passed_by == 2:
            warn(
                f"no samples are kept on {self._device}, as in two passes batches were not made of rows of a "
                "cache that holds all of them: it has no room for all, or a live transform, samples of "
                "different shape or a running window come in between, or the loader is not hotset's. Leave "
                "out resident=, or see print(cached.plan)."
            )

    def is_current(self, generation: Any) -> bool:
        """Whether the resident samples are of this generation of the cache."""
        return generation is not None and generation == self._generation

    @property
    def complete(self) -> bool:
        """Whether all samples that may come are resident, so that a step needs only the numbers of rows."""
        return self._ids is not None and self.count == len(self._ids)

    def rows(self, ids: Ids) -> Ids:
        """The samples' rows; -1 for those that are not resident."""
        return self._rows[ids]

    # ---- filling -------------------------------------------------------------------------------------

    def _fill(self, source: SampleSelector, ids: Ids) -> bool:
        example = source.gather(ids[:1])
        if example is None:
            return False
        columns = tensors_of(example)
        if not columns:
            return self._refuse("they hold no tensors")
        size = sum(tensor.nbytes for tensor in columns)
        count = min(len(ids), self._limit // max(size, 1))
        if count == 0:
            return self._refuse(
                f"one takes {format_bytes(size)}, and resident={format_bytes(self._limit)}; raise it"
            )
        try:
            held = [torch.empty((count, *t.shape[1:]), dtype=t.dtype, device=self._device) for t in columns]
        except torch.OutOfMemoryError:
            return self._refuse(f"the device has no {format_bytes(count * size)} to give; lower resident=")
        step = max(1, _FILLED_AT_ONCE // max(size, 1))
        for start in range(0, count, step):
            part = source.gather(ids[start : min(start + step, count)])
            if part is None:
                return False
            for column, filled in zip(held, tensors_of(part), strict=True):
                column[start : start + len(filled)].copy_(filled)
        self._rows = np.full(int(ids[-1]) + 1, -1, np.int64)
        self._rows[ids[:count]] = np.arange(count)
        self._ids, self.columns, self.count, self.example = ids, held, count, example
        return True

    def _refuse(self, why: str) -> bool:
        self._refused = True
        warn(f"no samples are kept on {self._device}: {why}.")
        return False

    # ---- gathering -----------------------------------------------------------------------------------

    def select(self, rows: torch.Tensor) -> Any:
        """The batch of these rows (int64, on the device); can be captured in a graph."""
        # Of more than 16 rows torch moves 16 bytes at a time, if a row is made of such.
        moved = ((column, _moved(column).index_select(0, rows)) for column in self.columns)
        picked = iter([made.view(c.dtype).view(len(rows), *c.shape[1:]) for c, made in moved])
        return map_tensors(lambda _: next(picked), self.example)

    def mixed(self, rows: Ids, absent: Any) -> Any:
        """A batch of which some samples (row -1) come from the host, in order, as ``absent``."""
        there, missing = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        picked = self.upload(rows[there])
        at_there, at_missing = self.upload(there), self.upload(missing)
        columns = []
        for column, brought in zip(self.columns, tensors_of(absent), strict=True):
            made = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, device=self._device)
            arrived = brought.to(self._device, non_blocking=True)
            _moved(made).index_copy_(0, at_there, _moved(column).index_select(0, picked))
            _moved(made).index_copy_(0, at_missing, _moved(arrived.contiguous()))
            columns.append(made)
        made_of = iter(columns)
        return map_tensors(lambda _: next(made_of), self.example)

    def upload(self, numbers: Ids) -> torch.Tensor:
        """Numbers of rows or places (int64) on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


class ResidentBatches:
    """Iterator over a pass's batches, made on the device as far as their samples are resident.

    Attributes:
        cache: the resident samples.
    """

    def __init__(self, cache: GpuCache, source: SampleSelector) -> None:
        self.cache = cache
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        ids = self._next()
        if ids is None:
            return self._source.build()
        rows = self.cache.rows(ids)
        missing = ids[rows < 0]
        if not len(missing):
            return self.cache.select(self.cache.upload(rows))
        absent = self._source.gather(missing) if len(missing) < len(ids) else None
        if absent is None:
            return self._source.build()
        return self.cache.mixed(rows, absent)

    @property
    def is_current(self) -> bool:
        """Whether the resident samples are those that the host's cache holds now."""
        return self.cache.is_current(self._source.generation())

    def _next(self) -> Ids | None:
        """The next batch's sample ids; None if it has none, or the cache was cleared since the pass began."""
        ids = self._source.select()
        return ids if self.is_current else None

    def rows(self) -> Ids | None:
        """The rows of the next batch, which counts as handed over; None if it is not made of resident ones.

        Raises:
            StopIteration: there is none.
        """
        ids = self._next()
        if ids is None:
            return None
        rows = self.cache.rows(ids)
        return rows if int(rows.min(initial=0)) >= 0 else None

    def build(self) -> Any:
        """The batch for which :meth:`rows` gave None."""
        return self._source.build()


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """A column's rows as wide integers: another view of its memory, with a row of these for each sample."""
    rows = tensor.view(len(tensor), math.prod(tensor.shape[1:]))
    size = rows.shape[1] * rows.element_size()
    if size == 0:
        return rows
    return rows.view(next(dtype for width, dtype in _MOVED_AS if size % width == 0))
