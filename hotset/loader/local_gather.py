"""Where the batches that this process gathers go: to recycled blocks, or to page-locked memory of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotset.store.blocks import BlockPool
from hotset.store.claims import Ids
from hotset.store.gather import Copy, Gather, Memory
from hotset.store.record_batch import ReceivedRecords

__all__ = ["LocalGather"]

# Batches gathered at once take no more than this together: what is kept of one keeps the others' memory.
_RUN_BYTES = 1 << 20


class LocalGather:
    """Gathers batches of one cache into this process's recycled blocks, or into page-locked memory.

    Args:
        gather: how batches of the cache are made.
        sample_bytes: about what a sample takes.
        pinned: batches go to page-locked memory of torch's own allocator, because only that one knows when
            a ``.to("cuda", non_blocking=True)`` has ended; they are not recycled by us.
    """

    def __init__(self, gather: Gather, sample_bytes: int, *, pinned: bool) -> None:
        self.gather = gather
        self._sample_bytes = sample_bytes
        self._pinned = pinned
        self._pool: BlockPool | None = None

    def size(self, count: int) -> int:
        """About what a batch takes."""
        return self._sample_bytes * count

    def prepare(self, ids: Ids, loose: Sequence[ReceivedRecords] = ()) -> Copy | None:
        """Look a batch up; None if one of its samples is neither in the cache nor among the loose records."""
        return self.gather.prepare(ids, self._memory, loose)

    def finish(self, copy: Copy, start: int = 0, stop: int | None = None) -> Any | None:
        """The batch, once the copy was run; None if the cache was cleared meanwhile."""
        return self.gather.finish(copy, _keep, start, stop)

    def run_length(self, count: int, most: int) -> int:
        """How many batches of so many samples are worth gathering at once."""
        # Page-locked memory is torch's: it is given for one tensor at a time.
        return 1 if self._pinned else min(_RUN_BYTES // max(self.size(count), 1), most)

    def _memory(self, size: int) -> Memory:
        if self._pinned:
            return _Pinned()
        pool = self._pool
        if pool is None or not pool.is_ours or pool.block_bytes < size:
            # Batches of variable size: a quarter more, so that not every larger one asks for a new pool.
            pool = self._pool = BlockPool(size if pool is None else size + size // 4)
        return _Block(pool.lend(pool.take()))


class _Block:
    """Memory in a block; each tensor refers to it, and has a storage of its own."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        if size == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._array, dtype=dtype, count=size // dtype.itemsize, offset=offset)


class _Pinned:
    """Memory that torch's own page-locked allocator gives and recycles."""

    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size // dtype.itemsize, dtype=dtype, pin_memory=True)


def _keep(done: torch.Tensor, offset: int) -> torch.Tensor:
    return done
