"""How a batch is built from indices, in the main process and in workers alike.

=============================================  ===========================================================
everything cached, nothing live, and a         gathered: each leaf is copied straight into the batch's
collate function that hotset knows             memory
the same, but less than half of it absent,     filled, then gathered (:meth:`BatchBuilder.filled`)
or samples of up to 2 KiB
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

from hotset.dataset.streams.cached_stream import CachedStream, passes_of
from hotset.loader.batch_buffer import BatchBuffer, as_it_is
from hotset.loader.collate import as_in_workers, bound
from hotset.loader.index_route import Indices, Route, fetched
from hotset.store.batch_layout import NotGathered
from hotset.store.blocks import Blocks
from hotset.store.claims import Ids
from hotset.store.gather import Copy, Gather, Memory
from hotset.store.record_batch import RecordBatch
from hotset.store.store import Store
from hotset.store.torch_threads import one_thread

__all__ = ["BatchBuilder", "LocalGather", "make_gather"]

# Batches gathered together take no more than this: a user who keeps one keeps the memory of all of them.
_RUN_BYTES = 1 << 20
_SMALL = 2048  # bytes of a record


def make_gather(
    store: Store, collate_fn: Callable[[list[Any]], Any], sample: int, *, for_workers: bool
) -> Gather | None:
    """The gather for this store and collate function, checked on one sample; None if it cannot be made.

    Args:
        store: of a cache with nothing live.
        for_workers: whether batches are to be as workers would make them.
    """
    collate_samples, variable = bound(collate_fn, store.schema)
    if for_workers:
        collate_samples = as_in_workers(collate_samples)
    try:
        gather = Gather(store, collate_samples, variable)
        gather.compare(sample)
    except NotGathered:
        return None
    return gather


class BatchBuilder:
    """Builds batches that are not simply gathered.

    Args:
        batched: whether the order gives lists of indices; if not, its elements go to the dataset as they are.
    """

    def __init__(self, dataset: Any, route: Route, *, batched: bool) -> None:
        self._dataset = dataset
        self._route = route
        self._batched = batched

    def resolve(self, indices: Any) -> Indices | None:
        """As :meth:`Route.resolve`; None without batches."""
        return self._route.resolve(indices) if self._batched else None

    def samples(self, indices: Any, resolved: Indices | None, uncached: dict[int, Any] | None = None) -> Any:
        """The samples for the collate function; ``resolved`` is what :meth:`resolve` returned for them."""
        if not self._batched:
            if isinstance(self._dataset, CachedStream):  # its recorded part has no index for others
                return passes_of(self._dataset).samples([indices])[0]
            return self._dataset[indices]
        if resolved is None:  # not integers, or out of range: the dataset decides
            return fetched(self._dataset, indices)
        return self._route.samples(resolved, uncached)

    def filled(
        self,
        ids: Ids,
        prepare: Callable[[Ids, Sequence[RecordBatch]], Copy | None],
        finish: Callable[[Copy], Any | None],
    ) -> tuple[Any | None, dict[int, Any]]:
        """Fill the only cache, then gather the batch if filling returned fewer than half of its samples.

        Args:
            prepare, finish: look up a batch to gather, and make it after the copy.

        Returns:
            The batch, and the samples that were just read; None for the batch if it must be collated from its
            samples.
        """
        access = self._route.single
        assert access is not None
        store = access.store
        before = store.filler.reads if store is not None else 0
        if store is not None:
            store.filler.expect_batches(len(ids))
        # Large samples that were just read are collated as they are: their records' pages are not mapped yet.
        # Small ones share pages, and to gather them takes less time than to collate them.
        records, uncached = access.receive(ids, keep=store is None or store.schema.stride > _SMALL)
        copy = prepare(ids, records) if 2 * len(uncached) < len(ids) else None
        if copy is not None:
            one_thread(copy.run)
            batch = finish(copy)
            if batch is not None:
                read = store.filler.reads - before if store is not None else 0
                if access.count_hits(ids, less=read + sum(len(each.ids) for each in records)):
                    return batch, uncached
        return None, {**access.decoded(records), **uncached}


class LocalGather:
    """Gathers batches of one cache into this process's recycled blocks, or into page-locked memory.

    Args:
        sample_bytes: about how many bytes a sample takes.
        pinned: batches go to page-locked memory of torch's own allocator, because only that one knows when
            a ``.to("cuda", non_blocking=True)`` has ended, and recycles it.
    """

    def __init__(self, gather: Gather, sample_bytes: int, *, pinned: bool) -> None:
        self.gather = gather
        self._sample_bytes = sample_bytes
        self._pinned = pinned
        self._blocks = Blocks()

    def size(self, count: int) -> int:
        """About how many bytes a batch takes."""
        return self._sample_bytes * count

    def holds(self, ids: Ids) -> bool:
        """Whether the cache has these samples now."""
        return self.gather.store.holds(ids)

    def prepare(self, ids: Ids, received: Sequence[RecordBatch] = ()) -> Copy | None:
        """Look up a batch; None if one of its samples is neither cached nor among the received records."""
        return self.gather.prepare(ids, self._memory, received)

    def finish(self, copy: Copy, start: int = 0, stop: int | None = None) -> Any | None:
        """The batch, once the copy was run; None if the cache was cleared meanwhile."""
        return self.gather.finish(copy, as_it_is, start, stop)

    def run_length(self, count: int, most: int) -> int:
        """How many batches of so many samples are worth gathering at once."""
        # torch gives page-locked memory for one tensor at a time.
        return 1 if self._pinned else min(_RUN_BYTES // max(self.size(count), 1), most)

    def _memory(self, size: int) -> Memory:
        return _Pinned() if self._pinned else BatchBuffer(self._blocks.array(size), size, as_it_is)


class _Pinned:
    """Memory of torch's own page-locked allocator, which recycles it."""

    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size // dtype.itemsize, dtype=dtype, device="cpu", pin_memory=True)
