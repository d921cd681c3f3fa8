"""Batches made in this process: gathered from the cache, ahead of use where that pays.

Three batches' worth of blocks are in play: the one the consumer holds, the one it gets next, and the one a
thread is gathering meanwhile. More would leave the processor's cache. The thread is worth its hand-over
only for batches that take longer than that (about 100 us, two megabytes); smaller ones are gathered where
they are asked for.

The thread receives index arrays and returns batches; it draws nothing, holds nothing of the iterator, and
ends when the iterator does. What goes wrong in it is raised at the consumer's next batch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hotset.data.draws import Draws
from hotset.data.route import Route
from hotset.data.summary import EpochSummary
from hotset.store.blocks import BlockPool
from hotset.store.claims import Ids
from hotset.store.gather import Gather

__all__ = ["LocalBatches", "LocalGather"]

_WORTH_A_THREAD = 2 << 20
_AHEAD = 2


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to this thread: its team's spinning beside a busy process costs more than it brings."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class LocalGather:
    """Gathers batches of one cache into this process's recycled blocks, or into page-locked memory.

    Args:
        gather: how batches of the cache are made.
        pinned: batches go to page-locked memory of torch's own allocator, because only that one knows when
            a ``.to("cuda", non_blocking=True)`` has ended; they are not recycled by us.
    """

    def __init__(self, gather: Gather, *, pinned: bool) -> None:
        self.gather = gather
        self._pinned = pinned
        self._pool: BlockPool | None = None

    def size(self, count: int) -> int:
        """Bytes of the fixed columns of a batch."""
        return self.gather.layout(count)[1]

    def __call__(self, ids: Ids) -> Any | None:
        """The batch of these samples, or None if one is not in the cache. Keep torch to one thread."""
        if self._pinned:
            return self.gather(ids, _pinned, _keep)
        size = self.size(len(ids))
        pool = self._pool
        if pool is None or not pool.is_ours or pool.block_bytes < size:
            pool = self._pool = BlockPool(size)
        block = pool.lend(pool.take())

        def place(offset: int, count: int, width: int) -> torch.Tensor:
            flat = torch.frombuffer(block, dtype=torch.uint8, count=count * width, offset=offset)
            return flat.view(count, width)

        return self.gather(ids, place, _keep)


def _keep(done: torch.Tensor, offset: int) -> torch.Tensor:
    return done


def _pinned(offset: int, count: int, width: int) -> torch.Tensor:
    return torch.empty((count, width), dtype=torch.uint8, pin_memory=True)


class LocalBatches:
    """Iterator over one epoch's batches, made in this process.

    Args:
        draws: the epoch's indices, and when to draw them.
        route: to the caches.
        gather: for wholly cached batches without a live part; None if there is no such thing.
        build: makes a batch of indices the slow way: samples read one by one, then collated.
        summary: counts batches, samples and waiting.
    """

    def __init__(
        self,
        draws: Draws,
        route: Route,
        gather: LocalGather | None,
        build: Callable[[Any, Ids | None], Any],
        summary: EpochSummary,
    ) -> None:
        self._draws = draws
        self._route = route
        self._gather = gather
        self._build = build
        self._summary = summary
        self._ahead: _Ahead | None = None
        self._pid = os.getpid()

    def __iter__(self) -> LocalBatches:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            indices = self._draws.take()
        except StopIteration:
            self._stop()
            self._summary.end()
            raise
        batch = self._make(indices)
        self._draws.top_up()
        self._summary.count(len(indices), time.perf_counter() - start)
        return batch

    def _make(self, indices: Any) -> Any:
        ids = self._route.resolve(indices)
        if ids is None or self._gather is None:
            return self._build(indices, ids)
        if self._gather.size(len(ids)) < _WORTH_A_THREAD:
            batch = self._gather_here(ids)
        else:
            batch = self._gather_ahead(ids)
        if batch is None:
            return self._build(indices, ids)
        single = self._route.single
        if single is not None and single.store is not None:
            single.store.count_hits(len(ids))
        return batch

    def _gather_here(self, ids: Ids) -> Any | None:
        assert self._gather is not None
        with one_thread():
            return self._gather(self._route.local(ids))

    def _gather_ahead(self, ids: Ids) -> Any | None:
        if self._pid != os.getpid():  # a forked child has the iterator, and not its thread
            return self._gather_here(ids)
        assert self._gather is not None
        if self._ahead is None:
            self._ahead = _Ahead(self._gather)
        ahead = self._ahead
        if ahead.pending == 0:
            ahead.ask(self._route.local(ids))
        # The next batches are asked for before this one is waited for, so that the thread never idles.
        while ahead.pending < _AHEAD:
            later = self._draws.peek(ahead.pending - 1)
            resolved = self._route.resolve(later) if later is not None else None
            if resolved is None:
                break
            ahead.ask(self._route.local(resolved))
        return ahead.next()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def __len__(self) -> int:
        return self._summary.batches_expected

    def __del__(self) -> None:
        self._stop()


class _Ahead:
    """A thread that gathers the batches it is asked for, in order."""

    def __init__(self, gather: LocalGather) -> None:
        self.pending = 0
        # SimpleQueue.put may be called by a destructor that runs inside another put; Queue's may not.
        self._asked: queue.SimpleQueue[Ids | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        started = threading.Event()
        threading.Thread(
            target=_gather_loop,
            args=(gather, self._asked, self._made, started),
            name="hotset-gather",
            daemon=True,
        ).start()
        started.wait()
        # The thread has set its own number of threads, and with it the default of threads yet to come.
        torch.set_num_threads(torch.get_num_threads())

    def ask(self, ids: Ids) -> None:
        self._asked.put(ids)
        self.pending += 1

    def next(self) -> Any | None:
        made = self._made.get()
        self.pending -= 1
        if isinstance(made, _Failed):
            raise made.error
        return made

    def stop(self) -> None:
        self._asked.put(None)


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _gather_loop(
    gather: LocalGather,
    asked: queue.SimpleQueue[Ids | None],
    made: queue.SimpleQueue[Any],
    started: threading.Event,
) -> None:
    torch.set_num_threads(1)
    started.set()
    while (ids := asked.get()) is not None:
        try:
            made.put(gather(ids))
        except BaseException as error:
            made.put(_Failed(error))
