"""Batches made in this process: gathered from the cache, ahead of use where that pays.

Three blocks are in use: that of the batch that the consumer holds, that of the next batch, and that of the
batch that a thread gathers meanwhile. More would not fit into the processor's cache.

A thread gathers ahead while the consumer computes, or while its thread looks up the next batch and lays it
out. Small batches are gathered in the consumer's thread: below a megabyte the hand-over takes longer than the
copy.

Small batches are gathered several at once, as far as their indices are known without a draw: for 32 rows of
210 bytes, looking up and laying out took ten times as long as copying. Each is still a batch of its own, and
counts when it is handed over.

A device that keeps samples gathers batches itself: it takes a batch's sample ids instead of the batch
(:meth:`LocalBatches.select`). The batch counts as handed over in either case.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hotset.dataset.pipeline import SampleStopped, stopped
from hotset.loader.batch_builder import BatchBuilder, LocalGather
from hotset.loader.batch_order import BatchOrder
from hotset.loader.index_route import Indices, Route, samples_in
from hotset.loader.state import EpochProgress
from hotset.store.claims import Ids
from hotset.store.gather import Copy
from hotset.store.torch_threads import HelperThread, one_thread

__all__ = ["LocalBatches", "Reading"]

_WORTH_A_THREAD = 1 << 20
_AHEAD = 2
_FETCHED_AHEAD = 64 << 20
_LONGEST_RUN = 64
_LOOKS = 8  # batches of a cold cache after which a gather is looked for
_LONGEST_RUN_OF_A_DISK = 256


class _Several:
    """Batches that were gathered together, to be handed over one by one."""

    def __init__(self, gather: LocalGather, copy: Copy, batches: list[Ids]) -> None:
        self._gather = gather
        self._copy = copy
        self._left = deque(batches)
        self._start = 0

    @property
    def left(self) -> int:
        """How many batches are still to be handed over."""
        return len(self._left)

    def next(self) -> tuple[Any, Ids]:
        """A batch (None if it must be collated), and its sample ids."""
        ids = self._left.popleft()
        start, self._start = self._start, self._start + len(ids)
        return self._gather.finish(self._copy, start, self._start), ids


class Reading(NamedTuple):
    """What batches are made of, and how.

    Attributes:
        gather: for wholly cached batches without a live part; None if no batch can be gathered.
        find_gather: looks for a gather after each of the first batches, as long as there is none: to compare
            it with collating takes a sample that is cached.
    """

    route: Route
    gather: LocalGather | None
    find_gather: Callable[[], LocalGather | None]
    builder: BatchBuilder
    collate: Callable[[Any], Any]


class LocalBatches:
    """Iterator over one epoch's batches, made in this process.

    Args:
        renewed: returns what batches are made of now, once another pass has found the dataset changed as it
            began; None if they can be made no more.
        run: counts what was consumed, for the loader's state, and the waiting.
        for_workers: whether workers would make the batches if they were not gathered.
    """

    def __init__(
        self,
        order: BatchOrder,
        reading: Reading,
        renewed: Callable[[], Reading | None],
        run: EpochProgress,
        *,
        for_workers: bool,
    ) -> None:
        self._order = order
        self._for_workers = for_workers
        self._renewed = renewed
        self._run = run
        self._ahead: HelperThread[Copy | None] = HelperThread("hotset-gather")
        self._several: _Several | None = None
        self._selected: Any = None
        self._readahead: HelperThread[None] = HelperThread("hotset-fetch")
        self._use(reading)
        for cache in reading.route.followed:
            cache.pass_of = weakref.ref(self)

    def _use(self, reading: Reading) -> None:
        """Make batches of this from now on."""
        self._route, self._gather, self._find_gather, self._builder, self._collate = reading
        route = reading.route
        self._single, self._has_peers = route.single, route.has_peers  # asked for with every batch
        self._looks_left = _LOOKS
        self._prefetched = 0 if route.spills else None  # how many of the next batches are prefetched
        self._longest = _LONGEST_RUN_OF_A_DISK if route.spills else _LONGEST_RUN

    def _follow(self) -> None:
        """Go on with the dataset as it is now, as torch's loader does without workers.

        Raises:
            ArgumentError: a transform, or another attribute, was set in this pass.
        """
        if not self._route.follow(may_go_on=not self._for_workers):
            return
        reading = self._renewed()
        if reading is None:
            raise self._route.refusal(self._route.currents[0])
        self._ahead.stop()
        self._several = None
        self._run.gathered = False
        self._use(reading)

    def __iter__(self) -> LocalBatches:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            self._run.raise_errors()
            indices = self._draw()
            if self._prefetched is not None:
                self._prefetched = self._prefetch(self._prefetched - 1, samples_in(indices))
            if self._has_peers and not (self._several is not None and self._several.left > 1):
                self._ask_ahead()
            try:
                batch = self._make(indices)
            except BaseException:
                self._run.failed(samples_in(indices))
                raise
            finally:
                self._order.top_up()  # as torch does for a batch that fails, too
            self._run.count(samples_in(indices), start)
            return batch
        except StopIteration:
            raise
        except SampleStopped as error:
            raise stopped(error) from None
        except BaseException:
            # Of an interrupt it is unknown whether its batch, or one that was made ahead, was taken by then.
            self._ahead.stop()
            self._several = None
            self._reading_ends()
            raise

    def _draw(self) -> Any:
        self._follow()
        try:
            return self._order.take()
        except StopIteration:
            self._readahead.stop()
            self._ahead.stop()
            self._run.end()
            self._reading_ends()
            raise

    def _reading_ends(self) -> None:
        for cache in self._route.followed:
            cache.changes.pass_ended()

    # ---- hotset.device.gpu_cache.SampleSelector ------------------------------------------------------

    def sample_ids(self) -> Ids | None:
        """The ids of all samples of the epoch, ascending; None if batches cannot be made from ids."""
        single = self._single
        store = single.store if single is not None else None
        if self._gather is None or single is None or single.window is not None or store is None:
            return None
        if self._has_peers:
            return None  # other machines have some of them
        if store.schema.has_tail:
            return None  # a batch's shapes depend on its samples
        return np.unique(self._route.sample_ids(np.arange(self._route.length)))

    def generation(self) -> Any:
        """A value that changes when the cache is cleared; None while its content must not be used."""
        store = self._single.store if self._single is not None else None
        return (id(store), store.clear_generation()) if store is not None else None

    def select(self) -> Ids | None:
        """The sample ids of the next batch, which counts as handed over; None if it has none.

        Raises:
            StopIteration: the pass is over.
        """
        start = time.perf_counter()
        self._run.raise_errors()
        self._selected = self._draw()
        # What was gathered ahead begins with this batch: the next one must not be taken from there.
        self._ahead.stop()
        self._several = None
        ids = self._route.ids_of(self._selected)
        if ids is not None and not self._may_be_served(ids):
            ids = None
        self._order.top_up()
        self._run.count(samples_in(self._selected), start)
        return ids

    def gather(self, ids: Ids) -> Any | None:
        """A batch of these samples; None if one is no longer in the cache."""
        assert self._gather is not None
        copy = self._gather.prepare(ids)
        if copy is None:
            return None
        one_thread(copy.run)
        return self._gather.finish(copy)

    def build(self) -> Any:
        """The batch of the last :meth:`select`, collated from its samples."""
        return self._build(self._selected, self._route.resolve(self._selected))

    # ---- making --------------------------------------------------------------------------------------

    def _prefetch(self, known: int, count: int) -> int:
        """Prefetch the next batches' samples from the disk; returns how many batches are prefetched."""
        size = self._gather.size(count) if self._gather is not None else _FETCHED_AHEAD
        known, most = max(known, 0), max(_FETCHED_AHEAD // max(size, 1), 2)
        if known > most // 2:
            return known  # prefetch many at once: tiny samples are then often neighbours on the disk
        batches = []
        while known < most and (later := self._order.peek(known)) is not None:
            batches.append(later)
            known += 1
        indices = _joined(batches)
        if indices is not None:
            # The kernel's queue is short: a thread that prefetches more than fits must wait, for up to half
            # of an epoch's time. So a thread of its own prefetches.
            self._readahead.post(partial(self._route.prefetch, indices))
        return known

    def _ask_ahead(self) -> None:
        """Ask other machines for their samples of the next batch, if that batch is known."""
        later = self._order.peek(0)
        ids = self._route.ids_of(later) if later is not None else None
        if ids is not None and self._single is not None:
            self._single.ask_ahead(ids)

    def _make(self, indices: Any) -> Any:
        """The batch of these indices."""
        if self._several is not None:
            batch, ids = self._several.next()
            if not self._several.left:
                self._several = None
            if len(ids) == samples_in(indices) and batch is not None and self._may_be_served(ids):
                return batch
            # The store was cleared, or the program has set another batch size: what was gathered with this
            # batch must not be used either.
            self._several = None
        resolved = self._builder.resolve(indices)
        gather = self._gather
        if resolved is None or gather is None:
            return self._build(indices, resolved)
        ids = self._route.sample_ids(resolved)
        worth = gather.size(len(resolved)) >= _WORTH_A_THREAD
        if self._ahead.pending or worth:
            batch = self._gather_ahead(gather, ids, _AHEAD if worth else 0)
        else:
            batch = self._gather_here(gather, ids)
        if batch is not None and self._may_be_served(ids):
            return batch
        # Samples from other machines are copied straight into the batch.
        with self._reading():
            batch, uncached = self._builder.filled(ids, gather.prepare, gather.finish)
        if batch is not None:
            return batch
        return self._build(indices, resolved, uncached)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Around what may read the dataset."""
        with contextlib.ExitStack() as stack:
            for current in self._route.currents if self._for_workers else ():
                stack.enter_context(current.in_place_of_workers())
            yield

    def _build(self, indices: Any, resolved: Indices | None, uncached: dict[int, Any] | None = None) -> Any:
        """The batch, collated from its samples."""
        with self._reading():
            samples = self._builder.samples(indices, resolved, uncached)
        batch = self._collate(samples)
        if self._gather is None and self._looks_left:
            self._looks_left -= 1
            self._gather = self._find_gather()
        return batch

    def _may_be_served(self, ids: Ids) -> bool:
        """Count the hits of a batch that was gathered; False if an audit of one has found a difference."""
        return self._single is None or self._single.count_hits(ids)

    def _gather_here(self, gather: LocalGather, ids: Ids) -> Any | None:
        """The batch; if it is small, the next ones are gathered with it."""
        if not gather.holds(ids):
            return None  # to look for the next ones takes longer
        run = [ids, *self._known(gather.run_length(len(ids), self._longest) - 1)]
        copy = gather.prepare(ids if len(run) == 1 else np.concatenate(run))
        if copy is None:
            return None
        one_thread(copy.run)
        if len(run) == 1:
            return gather.finish(copy)
        self._several = _Several(gather, copy, run)
        return self._several.next()[0]

    def _known(self, count: int) -> list[Ids]:
        """The sample ids of the next batches, as far as they are known without a draw."""
        batches: list[Any] = []
        while len(batches) < count and (later := self._order.peek(len(batches))) is not None:
            batches.append(later)
        indices = _joined(batches)
        # Resolved together: to resolve a batch of 32 alone takes longer than to copy it.
        ids = self._route.ids_of(indices) if indices is not None else None
        if ids is None:
            return []
        ends = list(itertools.accumulate(map(len, batches)))
        return np.split(ids, ends[:-1])

    def _gather_ahead(self, gather: LocalGather, ids: Ids, distance: int) -> Any | None:
        """The batch from the thread, which then has up to ``distance`` batches to make, this one included."""
        ahead = self._ahead
        if ahead.pending == 0:
            ahead.ask(partial(_copied, gather.prepare(ids)))
        # Ask for the next batches before waiting for this one, so that the thread never idles.
        while ahead.pending < distance:
            later = self._order.peek(ahead.pending - 1)
            next_ids = self._route.ids_of(later) if later is not None else None
            if next_ids is None:
                break
            ahead.ask(partial(_copied, gather.prepare(next_ids)))
        copy = ahead.next()
        if copy is not None and copy.count != len(ids):  # the program has set another batch size meanwhile
            ahead.stop()
            return None
        return gather.finish(copy) if copy is not None else None

    def __len__(self) -> int:
        return len(self._order)


def _joined(batches: list[Any]) -> Any | None:
    """The indices of these batches in one array; None if there are none, or some that make no array."""
    try:
        return np.concatenate(batches)
    except ValueError:
        return None


def _copied(copy: Copy | None) -> Copy | None:
    """Run a copy, in the thread; None if the batch must be collated."""
    if copy is not None:
        copy.run()
    return copy
