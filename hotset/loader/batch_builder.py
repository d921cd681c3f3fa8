"""How a batch is built from indices, in the main process and in workers alike.

=============================================  ===========================================================
everything cached, nothing live, and a         gathered: each leaf is copied straight to where the batch is
collate function that is known here
less than half of it is absent                 filled, then gathered (:meth:`BatchBuilder.filled`)
all else                                       samples one by one, live part included, then collated
                                               (:meth:`BatchBuilder.samples`)
=============================================  ===========================================================

The main process gathers into recycled blocks, or page-locked memory of torch's (:class:`LocalGather`); a
worker into a shared block (:mod:`hotset.loader.worker_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotset.loader.collate import bound
from hotset.loader.index_route import Indices, Route, fetched
from hotset.store.batch_layout import NotGathered
from hotset.store.blocks import BlockPool
from hotset.store.claims import Ids
from hotset.store.gather import Copy, Gather, Memory
from hotset.store.record_batch import ReceivedRecords
from hotset.store.torch_threads import one_thread

__all__ = ["BatchBuilder", "LocalGather", "make_gather"]

# Batches gathered at once take no more than this together: what is kept of one keeps the others' memory.
_RUN_BYTES = 1 << 20


def make_gather(cached: Any, collate_fn: Callable[[list[Any]], Any], sample: int) -> Gather | None:
    """The gather for this cache and collate function, compared on one sample; None if there is none."""
    store = cached._store
    if store is None or cached._source.live:
        return None
    collate_samples, variable = bound(collate_fn, store.schema)
    try:
        gather = Gather(store, collate_samples, variable)
        gather.compare(sample)
    except NotGathered:
        return None
    return gather


class BatchBuilder:
    """Builds batches that are not simply gathered.

    Args:
        dataset: the user's dataset, with caches behind it.
        route: to these caches.
        batched: whether an index is a batch's; else it is the dataset's own.
    """

    def __init__(self, dataset: Any, route: Route, *, batched: bool) -> None:
        self._dataset = dataset
        self._route = route
        self._batched = batched

    def resolve(self, indices: Any) -> Indices | None:
        """As :meth:`Route.resolve`; None if they are not a batch's."""
        return self._route.resolve(indices) if self._batched else None

    def samples(self, indices: Any, resolved: Indices | None, in_hand: dict[int, Any] | None = None) -> Any:
        """What the collate function is given for these indices, which :meth:`resolve` has resolved."""
        if not self._batched:
            return self._dataset[indices]
        if resolved is None:  # no integers, or out of range: the dataset's own business
            return fetched(self._dataset, indices)
        return self._route.samples(resolved, in_hand)

    def filled(
        self,
        ids: Ids,
        prepare: Callable[[Ids, Sequence[ReceivedRecords]], Copy | None],
        finish: Callable[[Copy], Any | None],
    ) -> tuple[Any | None, dict[int, Any]]:
        """Bring what is absent into the single cache, then gather the batch, if less than half was absent.

        Args:
            ids: the samples.
            prepare, finish: look a gathered batch up, and make it once it was copied.

        Returns:
            The batch, and the samples in hand; None for the batch if it is to be collated from its samples.
        """
        single = self._route.single
        assert single is not None
        access, store = single._access, single._store
        before = store.filler.reads if store is not None else 0
        records, in_hand = access.bring(ids)
        # What was just read is collated as it is: its record's pages were written, and are not mapped yet.
        copy = prepare(ids, records) if 2 * len(in_hand) < len(ids) else None
        if copy is not None:
            one_thread(copy.run)
            batch = finish(copy)
            if batch is not None:
                read = store.filler.reads - before if store is not None else 0
                access.count_hits(ids, less=read + sum(len(each.ids) for each in records))
                return batch, in_hand
        return None, {**access.taken_apart(records), **in_hand}


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
