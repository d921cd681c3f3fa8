"""``hotset.DataLoader``: torch's DataLoader, same arguments and same batches, fed from the cache.

Which way an epoch's batches take is decided once, in ``iter()``:

====================================================  ====================================================
everything cached, nothing live                       gathered in this process, ahead of use; no workers
workers, and something absent or live                 built by workers in shared blocks (an inner loader)
no workers, and something absent or live              built in this process, samples one by one
no cache behind the data set, an iterable data set,   torch's own loader, untouched
a collate function of the user's, ``batch_size=None``
====================================================  ====================================================

Batches, their order, and every random state after each of them are those of torch's loader with the same
arguments over the same data set without the cache.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from hotset.data.collate import bound, is_known
from hotset.data.draws import Draws
from hotset.data.local import LocalBatches, LocalGather
from hotset.data.route import Route, route_to
from hotset.data.summary import EpochSummary
from hotset.data.workers import BatchMaker, Desks, Letter, TaskSampler, WorkerInit, make_gather
from hotset.errors import HotsetWarning
from hotset.store.blocks import making_workers
from hotset.store.claims import Ids

__all__ = ["DataLoader"]

T = TypeVar("T")

# Live parts often turn uint8 into float32; a shared block takes no memory before it is written to.
_GROWTH = 4
_SMALLEST_BLOCK = 1 << 20


class DataLoader(TorchDataLoader[T]):
    """Batches from a cached data set, at the speed of memory where they are wholly cached.

    It takes every argument of :class:`torch.utils.data.DataLoader` and yields what that yields: the same
    batches in the same order and types, leaving the same random states behind. Over a data set without a
    cache it *is* torch's loader.

    Batches are yours to keep and to write to. Their memory is used again when nothing refers to it any more.

    Attributes:
        last_epoch: an :class:`~hotset.data.summary.EpochSummary` of the pass that ended or was begun last;
            None before the first and where torch's own loader runs. ``str()`` gives one line.

    Example:
        >>> import hotset, torch
        >>> from torch.utils.data import TensorDataset
        >>> cached = hotset.cache(TensorDataset(torch.arange(8.0), torch.arange(8)), memory="1MiB")
        >>> [y.tolist() for x, y in hotset.DataLoader(cached, batch_size=4)]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    last_epoch: EpochSummary | None = None
    # What is made at first use and kept for later epochs. Not attributes of __init__: a loader is often made
    # again from its arguments, or pickled, and none of this may come along.
    _passes = 0
    _workers_begun = False
    _inner: TorchDataLoader[Any] | None = None
    _desks: Desks | None = None
    _gathers: tuple[Any, LocalGather | None] | None = None

    def __iter__(self) -> Any:
        route = self._route()
        if route is None:
            return super().__iter__()
        gather = self._local_gather(route) if route.all_present() else None
        summary = EpochSummary(self._passes, _length(self), route.caches)
        self._passes += 1
        self.last_epoch = summary
        if self.num_workers == 0 or gather is not None:
            self._warn_of_pinning()
            if self._desks is not None:
                self._desks.rest()
            return LocalBatches(self._draws(), route, gather, self._builder(route), summary)
        return self._from_workers(route, summary)

    # ---- which way -----------------------------------------------------------------------------------

    def _route(self) -> Route | None:
        if not self._auto_collation or not is_known(self.collate_fn):
            return None
        return route_to(self.dataset)

    def _local_gather(self, route: Route) -> LocalGather | None:
        single = route.single
        if single is None or single.store is None or single.source.live:
            return None
        if self._gathers is None or self._gathers[0] is not single.store:
            gather = make_gather(single, self.collate_fn, int(route.local(np.zeros(1, np.int64))[0]))
            pinned = self.pin_memory and torch.accelerator.is_available()
            size = single.plan.sample_bytes
            local = LocalGather(gather, size, pinned=pinned) if gather is not None else None
            self._gathers = (single.store, local)
        return self._gathers[1]

    # ---- in this process -----------------------------------------------------------------------------

    def _draws(self) -> Draws:
        ahead = self.num_workers * (self.prefetch_factor or 0)
        again = self.persistent_workers and self._workers_begun
        self._workers_begun = True
        return Draws(self.batch_sampler, ahead=ahead, generator=self.generator, fresh=not again)

    def _builder(self, route: Route) -> Callable[[Any, Ids | None], Any]:
        collate_fn = bound(self.collate_fn, route.schema)[0]
        pinned = self.pin_memory and torch.accelerator.is_available()

        def build(indices: Any, ids: Ids | None) -> Any:
            if ids is None:
                samples = [self.dataset[index] for index in indices]
            else:
                samples = route.samples(ids)
            batch = collate_fn(samples)
            if pinned:
                batch = pin_memory(batch)  # type: ignore[no-untyped-call]
            return batch

        return build

    # ---- by workers ----------------------------------------------------------------------------------

    def _from_workers(self, route: Route, summary: EpochSummary) -> Iterator[Any]:
        inner = self._inner or self._make_inner(route)
        if self.persistent_workers:
            self._inner = inner
        self._workers_begun = True
        assert self._desks is not None
        return _WorkerBatches(inner, self._desks, summary)

    def _make_inner(self, route: Route) -> TorchDataLoader[Any]:
        desks = self._desks = self._desks or self._make_desks(route)
        with warnings.catch_warnings():
            # The outer loader has warned of too many workers already.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return TorchDataLoader(
                BatchMaker(self.dataset, self.collate_fn),
                batch_size=None,
                sampler=TaskSampler(self.batch_sampler, desks),
                num_workers=self.num_workers,
                collate_fn=_unchanged,  # type: ignore[arg-type]
                pin_memory=self.pin_memory,
                timeout=self.timeout,
                worker_init_fn=WorkerInit(self.dataset, self.worker_init_fn),
                multiprocessing_context=self.multiprocessing_context,
                generator=self.generator,
                prefetch_factor=self.prefetch_factor,
                persistent_workers=self.persistent_workers,
                pin_memory_device=self.pin_memory_device,
                in_order=self.in_order,
            )

    def _make_desks(self, route: Route) -> Desks:
        sample = max(cached.plan.sample_bytes for cached in route.caches)
        return Desks(max(_GROWTH * sample * (self.batch_size or 256), _SMALLEST_BLOCK))

    def _warn_of_pinning(self) -> None:
        if self.pin_memory and not torch.accelerator.is_available():
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, "
                "then device pinned memory won't be used.",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        made = ("_passes", "_workers_begun", "_inner", "_desks", "_gathers", "_iterator", "last_epoch")
        return {**{k: v for k, v in self.__dict__.items() if k not in made}, "_iterator": None}


class _WorkerBatches:
    """Iterator over one epoch's batches, made by the inner loader's workers."""

    def __init__(self, inner: TorchDataLoader[Any], desks: Desks, summary: EpochSummary) -> None:
        self._persistent = inner.persistent_workers
        self._tasks: TaskSampler = inner.sampler  # type: ignore[assignment]
        self._desks = desks
        self._summary = summary
        self._letters: Any = None
        with making_workers():
            self._letters = iter(inner)

    def __iter__(self) -> _WorkerBatches:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            letter: Letter = next(self._letters)
        except StopIteration:
            self._summary.end()
            if not self._persistent:
                self._desks.rest()  # the workers have ended; a batch still held must not keep all blocks
            raise
        self._tasks.answered(letter)
        self._desks.needed = max(self._desks.needed, letter.needed)
        for sentence in letter.told:
            warnings.warn(sentence, HotsetWarning, stacklevel=2)
        self._summary.count(letter.samples, time.perf_counter() - start)
        return letter.batch

    def __len__(self) -> int:
        return len(self._letters)

    def __del__(self) -> None:
        # Persistent workers go on with their tasks, and the next epoch begins by taking in their letters.
        if not self._persistent:
            self._letters = None  # ends and joins the workers: only then are their blocks free
            self._tasks.recall()
            self._desks.rest()


def _unchanged(letter: Letter) -> Letter:
    return letter


def _length(loader: TorchDataLoader[Any]) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a sampler without a length
        return 0
