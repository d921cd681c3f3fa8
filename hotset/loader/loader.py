"""``hotset.DataLoader``: torch's DataLoader with the same arguments and batches, reading from the cache.

``iter()`` decides once for an epoch how its batches are made; the first row that fits applies:

=============================================  ===========================================================
no cache behind the dataset                    by torch's own loader, whose workers die with this process
a cached stream that was not read yet          the same, over a dataset that records what goes by
everything cached, nothing live, and a         gathered in this process, ahead of use; no workers
collate function that hotset knows, unless
worker_init_fn may change the dataset
workers                                        by workers, in shared blocks (an inner loader)
no workers                                     in this process, sample by sample
=============================================  ===========================================================

A collate function of the user's, or ``batch_size=None``, runs where torch would run it, on samples that were
copied out of the cache together.

Batches, their order, and every random state after each of them are those of torch's loader with the same
arguments over the same dataset without the cache.
"""

from __future__ import annotations

import inspect
import multiprocessing
import operator
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from hotset._warnings import warn
from hotset.dataset.active_window import ActiveWindow
from hotset.dataset.current_cache import pass_begins
from hotset.dataset.planning.lost_threads import has_threads
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.streams.cached_stream import CachedStream, followed_passes, passes_of
from hotset.dataset.streams.recording import StreamRest
from hotset.determinism.draws.rng import Generators
from hotset.determinism.objects.reading_names import names_used_by
from hotset.errors import ArgumentError, StateError
from hotset.loader.batch_buffer import BlockCollate
from hotset.loader.batch_builder import BatchBuilder, LocalGather, make_gather
from hotset.loader.batch_order import BatchOrder, draw_base_seed
from hotset.loader.collate import as_in_workers, bound, is_known
from hotset.loader.epoch_summary import EpochSummary
from hotset.loader.index_route import Route, route_to
from hotset.loader.local_batches import LocalBatches, Reading
from hotset.loader.look_ahead import IdleWork, context_with
from hotset.loader.remaining_batches import RemainingBatches, cut_of
from hotset.loader.rng_state import Beginning, LocalGenerators
from hotset.loader.state import (
    EpochProgress,
    SavedState,
    header,
    identity_of,
    is_of_stream,
    read_state,
)
from hotset.loader.stream_order import StreamSampler, with_stream_order
from hotset.loader.stream_reading import batches_of, loader_of_rest, rest_of_stream, warn_of_order
from hotset.loader.torch_batches import FollowedBy, RecordedOrder, TorchBatches
from hotset.loader.worker_batches import WorkerBatches
from hotset.loader.worker_messages import BatchMessage
from hotset.loader.worker_process import (
    BatchBuffers,
    BatchMaker,
    TaskSampler,
    WorkerInit,
    may_draw,
    random_parts,
    torch_loader,
)

__all__ = ["DataLoader"]

T = TypeVar("T")

# Live parts often turn uint8 into float32; a shared block takes no memory before it is written to.
_GROWTH = 4
# How many samples are looked up to find a cached one.
_LOOKED_UP = 4096
_SMALLEST_BLOCK = 1 << 20
# The arguments that may be set on a loader, and that what it keeps from pass to pass is made of.
_MADE_OF = frozenset({"collate_fn", "num_workers", "pin_memory"})


class DataLoader(TorchDataLoader[T]):
    """Batches from a cached dataset, at the speed of memory if they are wholly cached.

    It takes every argument of :class:`torch.utils.data.DataLoader` and yields the same batches in the same
    order and types, and leaves the same random states behind. Over a dataset without a cache it *is* torch's
    loader.

    You may keep batches and write to them. Their memory is used again once nothing refers to it.

    Attributes:
        last_epoch: an :class:`~hotset.loader.epoch_summary.EpochSummary` of the pass that was begun last;
            None before the first. ``str()`` gives one line.

    Example:
        >>> import hotset, torch
        >>> from torch.utils.data import TensorDataset
        >>> cached = hotset.cache(TensorDataset(torch.arange(8.0), torch.arange(8)), memory="1MiB")
        >>> [y.tolist() for x, y in hotset.DataLoader(cached, batch_size=4)]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    # Made at first use and kept for later epochs. Not set in __init__: other libraries make a loader again
    # from its attributes, and pickle it, and none of these may come along (see __getstate__).
    last_epoch: EpochSummary | None = None
    _pass: EpochProgress | None = None
    _saved: SavedState | None = None
    _watched: Generators | None = None
    _local_generators: LocalGenerators | None = None
    _known: dict[str, Any] | None = None
    _currents: list[SampleAccess] | None = None
    _workers_begun: bool = False
    _seeded_by: torch.Generator | None = None  # draws the seed of workers that no pass has needed yet
    _inner: TorchDataLoader[Any] | None = None
    _buffers: BatchBuffers | None = None
    _gathers: tuple[Any, LocalGather | None] | None = None
    _into_blocks: BlockCollate | None = None
    _recorded: RecordedOrder | None = None
    _begins_by: Callable[[Any], Iterator[Any]] | None = None  # how torch's loader begins a resumed order
    _recorder: TorchDataLoader[Any] | None = None  # over a stream that is read first
    _rest_loader: TorchDataLoader[Any] | None = None  # over what is not recorded of it
    _read_by: tuple[Any, ...] | None = None  # what the last pass over a stream was made of
    _in_stream_order: bool = False  # whether such a pass is repeated, to resume it

    if not TYPE_CHECKING:  # the arguments are torch's

        def __init__(self, dataset, *arguments, **named):
            if isinstance(dataset, CachedStream):
                arguments, named = (), with_stream_order(dataset, arguments, named)
            super().__init__(dataset, *arguments, **named)

        __init__.__signature__ = inspect.signature(TorchDataLoader.__init__)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "generator" and not isinstance(value, (torch.Generator, type(None))):
            raise ArgumentError(
                f"generator= must be a torch.Generator, got {value!r}; write "
                f"generator=torch.Generator().manual_seed({value if type(value) is int else 0})."
            )
        super().__setattr__(name, value)
        if name in _MADE_OF:
            for made in ("_gathers", "_watched", "_local_generators"):
                self.__dict__.pop(made, None)

    def __iter__(self) -> Any:
        if self.timeout and not self.num_workers:  # torch's own error, raised at the same moment
            raise AssertionError(f"timeout must be 0 without workers, got {self.timeout}; set num_workers.")
        saved = self._saved
        self._follow_stream(saved)
        route = route_to(self.dataset)
        followed = route.followed if route is not None else []
        running = self._inner is not None or self._iterator is not None
        with pass_begins(followed, running=running, persistent=self.persistent_workers):
            self._follow_caches(route.currents if route is not None else [], running=running)
            begun = self._next_or_saved(saved)
        # Not before: if the pass cannot begin, the next iter() begins the same.
        self._saved = None
        if isinstance(self.sampler, StreamSampler):
            self.sampler.pass_began()
        return begun

    def _next_or_saved(self, saved: SavedState | None) -> Any:
        """Begin the next pass, or go on with a saved one, unless a window has moved on since."""
        windows = self._windows()
        moved_on = saved is not None and saved.has_moved_on(Beginning(self), windows)
        begins = saved is None or moved_on or not saved.under_way
        for window in windows:
            (window.begin_next if begins else window.prepare)(self._helpers, self.multiprocessing_context)
        if saved is not None and not moved_on:
            return self._go_on(saved)
        streams = self.num_workers == 0 and self._reads_stream
        run = self._next_pass(Beginning(self, self._live_generators() if streams else None))
        return self._begin(run, self._order)

    def _next_pass(self, beginning: Beginning) -> EpochProgress:
        last, fresh = self._pass, self._fresh
        run = EpochProgress(last.number + 1 if last is not None else 0, beginning.take(), fresh)
        if last is not None and not fresh:  # the same workers go on
            run.workers.update(last.workers)
            run.ask_workers = not last.over or len(last.workers) < self.num_workers
        return run

    def __len__(self) -> int:
        own = super().__len__()
        rest = self._rest
        return own if rest is None else own + len(rest.sizes(self.batch_size, drop_last=self.drop_last))

    @property
    def _order(self) -> Any:
        """The sampler that gives the indices: of whole batches, or one by one with ``batch_size=None``."""
        return self.batch_sampler if self.batch_sampler is not None else self.sampler

    @property
    def _samples_in_order(self) -> Any:
        """The sampler that gives the indices one by one."""
        return self.sampler

    @property
    def _fresh(self) -> bool:
        """Whether the next pass starts workers, if there are any."""
        return not (self.persistent_workers and self._workers_begun)

    def _begin(self, run: EpochProgress, batches: Any) -> Any:
        """Begin a pass, or the rest of one, over these batches."""
        self._pass = run
        run.watch = tuple(window.raise_errors for window in self._windows())
        self._workers_begun = True
        route = self._route()
        summary = EpochSummary(run.number, _length(self), route.caches if route is not None else [])
        self.last_epoch = summary
        run.summary = summary
        run.describe(self._header(), under_way=True)
        begun = self._batches(route, run, batches)
        summary._began()
        return begun

    def _batches(self, route: Route | None, run: EpochProgress, batches: Any) -> Any:
        """The pass's batches, for which workers are started where they are needed."""
        if route is not None and self.num_workers:
            for cache in route.followed:
                cache.fill_for_workers()
        if route is None:
            size = self.batch_size or 1
            batches_of_torch = self._torch_iterator()
            ended = passes_of(self._stream).ended if self._stream is not None else None
            sizes = self._recorded.sizes if self._recorded is not None else None
            measured = self.batch_size is not None and self.collate_fn is default_collate
            workers = self.num_workers > 0
            return TorchBatches(
                batches_of_torch, run, sizes, size, ended=ended, workers=workers, measured=measured
            )
        batches_of_cache = self._from_cache(route, run, batches)
        left = self._rest
        if self._stream is None or left is None:
            return batches_of_cache
        skip = self._consumed_of_rest(left, run)
        run.followed = True
        make = partial(self._loader_of_rest, self._stream, left)
        return FollowedBy(batches_of_cache, partial(rest_of_stream, make, left, run, skip))

    def _loader_of_rest(self, stream: CachedStream[Any], left: StreamRest) -> Any:
        """torch's loader over what is not recorded of a stream; its workers persist as this one's do."""
        if self._rest_loader is None or not self.persistent_workers:
            self._rest_loader = loader_of_rest(self, stream, left)
        return self._rest_loader

    def _consumed_of_rest(self, left: StreamRest, run: EpochProgress) -> int:
        """How many batches were consumed, in a pass that is resumed, of those that follow the cached ones."""
        if not run.batches:
            return 0
        if cut_of(self.batch_sampler, self.sampler).batch_size is None:
            return max(run.batches - len(self._order), 0)
        # Not by batches: those from the cache may have had another size.
        sizes = left.sizes(self.batch_size, drop_last=self.drop_last)
        return batches_of(run.samples - len(self._samples_in_order), sizes)

    def _from_cache(self, route: Route, run: EpochProgress, batches: Any) -> Iterator[Any]:
        all_cached = route.all_present() and not self._workers_may_change_dataset()
        gather = self._local_gather(route) if all_cached or route.has_peers else None
        run.gathered = gather is not None and all_cached
        if self.num_workers == 0 or run.gathered:
            self._warn_of_pinning()
            if self._buffers is not None:
                self._buffers.trim()
            order, reading = self._batch_order(run, batches), self._reading(route, gather)
            return LocalBatches(order, reading, self._read_anew, run, for_workers=self.num_workers > 0)
        return self._from_workers(route, run, batches)

    def _reading(self, route: Route, gather: LocalGather | None = None) -> Reading:
        """What this process makes batches of."""
        builder = BatchBuilder(self.dataset, route, batched=self.batch_sampler is not None)
        return Reading(route, gather, partial(self._local_gather, route), builder, self._collate(route))

    def _read_anew(self) -> Reading | None:
        route = self._route()
        return self._reading(route) if route is not None else None

    def _workers_may_change_dataset(self) -> bool:
        """Whether each worker may set something on its dataset before its first batch."""
        return self.num_workers > 0 and "dataset" in names_used_by(self.worker_init_fn)

    # ---- resuming ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume from here, in another process too.

        You may call it at any time, even after every batch: it takes microseconds, and the size of the state
        does not depend on the data. The state counts the batches that were handed over; those that were made
        ahead are made again. It consists of plain values: ``json`` and ``torch.save`` keep it, and
        ``torch.load`` reads it with ``weights_only=True``. Save it on each rank, together with the random
        states of the training.

        Example:
            >>> import hotset, torch
            >>> from torch.utils.data import TensorDataset
            >>> def loader():
            ...     cached = hotset.cache(TensorDataset(torch.arange(8)), memory="1MiB")
            ...     return hotset.DataLoader(cached, batch_size=2, shuffle=True)
            >>> first = loader()
            >>> batches = iter(first)
            >>> consumed = [next(batches), next(batches)]
            >>> second = loader()
            >>> second.load_state_dict(first.state_dict())
            >>> [x.tolist() for x, in second] == [x.tolist() for x, in batches]
            True
        """
        if self._saved is not None:
            return self._saved.state
        if not self.in_order and self.num_workers:
            warn(
                "with in_order=False batches come as they are done, and a loader that resumes from this "
                "state may give some of the last ones twice, and miss others; leave in_order=True."
            )
        run = self._pass
        live = self._live_generators() if self.num_workers == 0 else None
        if self._local_generators is None:
            self._local_generators = LocalGenerators(self, live)
        in_process = self._local_generators.states(only_samplers=run is not None and run.gathered)
        if run is None or run.over:
            if isinstance(self.sampler, StreamSampler):
                self.sampler.settle()
            run = self._next_pass(Beginning(self, live))
            run.describe(self._header(), under_way=False)
        return run.state(in_process)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next ``iter()`` resume where the loader that gave this state had stopped.

        With as many workers and ranks as before, the rest of the pass is bit for bit what it would have
        been: samples, their order, the draws of live transforms. With another number of workers or ranks,
        or another batch size, the same samples come, none twice and none dropped. Persistent workers are
        started anew.

        This call sets the global generators of this process, from which the loader's samplers and, without
        workers, its live transforms draw, to their states at ``state_dict()``: the orders of later passes are
        drawn from them, as dropout is. A trainer that saves their states itself restores them after this
        call; what is drawn between this call and ``iter()`` counts. Only in the midst of a pass whose batches
        are made in this process, ``iter()`` restores them once more. A state of another rank does not change
        them.

        Raises:
            StateError: the state is damaged, of another format, or of another dataset or sampler.
        """
        cut = cut_of(self.batch_sampler, self.sampler)
        saved = read_state(state, self._identity_for(state), cut, self.num_workers, self._header()["windows"])
        if self._route() is None or (self._stream is not None and is_of_stream(state)):
            saved.require_replay(self, cut)
            if self._stream is not None and saved.under_way:
                passes_of(self._stream).tell_of_replay()
        elif self._rest is not None and saved.position.samples > len(self._samples_in_order):
            saved.require_size(cut)
        saved.restore_samplers(Beginning(self))
        for window, position in zip(self._windows(), saved.windows, strict=True):
            window.go_to(position)
        if saved.same_rank:
            saved.restore_globals()
        self._saved = saved

    def _go_on(self, saved: SavedState) -> Any:
        """The rest of a saved pass."""
        # Running workers have made draws that are not in the state, and may still write to their blocks.
        self._end_workers()
        live = self._live_generators() if self.num_workers == 0 else None
        beginning = Beginning(self, live)
        if saved.same_rank:
            saved.restore_generators(beginning, with_globals=saved.under_way)
        run = saved.run()
        before, generator = beginning.take(), self.generator

        def rewind() -> None:
            beginning.restore_samplers(before)
            beginning.restore_generators(before, with_globals=True)

        def begin(sampler: Any) -> Any:
            """Begin a sampler as the interrupted pass began it, even if it was begun here before."""
            rewind()
            begun = iter(sampler)
            if run.fresh:
                draw_base_seed(generator)
                begun = iter(sampler) if saved.began_with_workers else begun
            return begun

        try:
            if not run.fresh and self._route() is None:
                self._torch_iterator()  # starts the workers, which ran already when the pass began
                rewind()
            by_samples = cut_of(self.batch_sampler, self.sampler).batch_size is not None
            anew = begin if saved.redraws(self.num_workers) else None
            self._begins_by = anew if run.fresh else None
            rest = RemainingBatches(self._order, saved.position, anew, by_samples=by_samples)
            batches = self._begin(run, rest)
        finally:
            self._begins_by = None
            if saved.under_way and saved.same_rank:  # to the states that load_state_dict or the trainer set
                beginning.globals.restore()
        if saved.under_way and saved.same_loader and live is not None:
            saved.restore_live(live)
        return batches

    def _end_workers(self) -> None:
        """Have the next pass start workers anew; none of those that end gets, or still writes to, a block."""
        self._inner = self._iterator = self._recorder = self._rest_loader = self._buffers = None
        self._workers_begun = False

    def _header(self) -> dict[str, Any]:
        windows = [window.state() for window in self._windows()]
        return header(self._identity(), cut_of(self.batch_sampler, self.sampler), self.num_workers, windows)

    @property
    def _helpers(self) -> int:
        """How many processes prepare a window's samples: one per worker, but a core is left for training."""
        cores = len(os.sched_getaffinity(0))
        return max(1, min(self.num_workers, cores - 1))

    def _windows(self) -> list[ActiveWindow]:
        """The running windows of the caches behind the dataset."""
        route = route_to(self.dataset)
        found = [each.window for each in route.currents if each.window] if route is not None else []
        return list({id(window): window for window in found}.values())

    def _identity(self) -> dict[str, Any]:
        stream = self._stream
        if stream is not None:  # its samples are counted from its second pass on
            parts = passes_of(stream).parts() if self._route() is not None else None
            count = len(passes_of(stream).ids()) if parts is not None else None
            # The order of indices follows from them: the workers' parts take turns.
            kept = parts.kept.tolist() if parts is not None else None
            return {"samples": count, "fingerprints": [stream.plan.fingerprint], "parts": kept}
        if self._known is None:
            route = self._route()
            fingerprints = [cached.plan.fingerprint for cached in route.caches] if route is not None else []
            self._known = identity_of(self.dataset, fingerprints)
        return self._known

    def _identity_for(self, state: Any) -> dict[str, Any]:
        """The identity to compare a state with: one of a stream's first pass counts no samples.

        Raises:
            StateError: the state is of a recorded stream, which is not recorded here.
        """
        identity = self._identity()
        if self._stream is None or not isinstance(state, dict) or "data" not in state:
            return identity
        if is_of_stream(state):
            return {**identity, "samples": None}
        if identity["samples"] is None:
            raise StateError(
                "the state is from a stream that was recorded, and here it is not recorded yet; call fill() "
                "on the cached stream first, or keep it in the session in which it was recorded (session=)."
            )
        return identity

    # ---- streams -------------------------------------------------------------------------------------

    @property
    def _stream(self) -> CachedStream[Any] | None:
        return self.dataset if isinstance(self.dataset, CachedStream) else None

    @property
    def _rest(self) -> StreamRest | None:
        """What the next pass gets from a stream itself, after the recorded samples; None if nothing."""
        return passes_of(self._stream).rest() if self._stream is not None else None

    @property
    def _reads_stream(self) -> bool:
        """Whether the next pass runs an iterable dataset."""
        return isinstance(self.dataset, IterableDataset) or (
            self._stream is not None and self._route() is None
        )

    def _follow_stream(self, saved: SavedState | None) -> None:
        """Find out how far a stream is recorded, and make ready for the pass that begins."""
        stream = self._stream
        if stream is None:
            return
        passes = followed_passes(stream)
        passes.wait_for_ranks()
        self._in_stream_order = saved is not None and saved.under_way and is_of_stream(saved.state)
        sampler = self.sampler
        if isinstance(sampler, StreamSampler) and (saved is None or not saved.under_way):
            sampler.settle()
        route = self._route()
        warn_of_order(stream, sampler, self.batch_size, is_read=route is not None)
        # Persistent workers have it as it was recorded, or was not, when they began, or repeat a pass.
        read_by = passes, passes.ids() if route is not None else None, self._in_stream_order
        if self._read_by is not None and any(map(operator.is_not, read_by, self._read_by)):
            self._end_workers()
            self._forget()
        self._read_by = read_by

    def _torch_iterator(self) -> Any:
        """torch's own iterator over the dataset, or over a stream that is recorded as it goes by."""
        if self._stream is None:
            return super().__iter__()
        if self.batch_size is None and self.batch_sampler is not None:
            raise ArgumentError(
                "batch_sampler= must be left out for the first pass over "
                f"{type(self._stream.dataset).__name__}, which has no index before it was read once; call "
                "fill() on the cached stream before."
            )
        if self._recorder is None or not self.persistent_workers:
            recording = followed_passes(self._stream).recording(
                self.num_workers, self.batch_size or 1, replay=self._in_stream_order
            )
            self._recorder = torch_loader(self, recording, self.batch_size, self.drop_last)
        return iter(self._recorder)

    def _follow_caches(self, now: list[SampleAccess], *, running: bool) -> None:
        """Forget what is known of caches that were made anew because an attribute of their dataset was set.

        Args:
            now: what their samples are read by in the pass that begins.
            running: whether workers of an earlier pass run.

        Raises:
            ArgumentError: persistent workers have the dataset as it was.
        """
        before = self._currents
        if before is not None and any(one is not other for one, other in zip(before, now, strict=False)):
            if running:
                raise ArgumentError(
                    f"a transform or attribute of {now[0].plan.name} was set, and persistent workers have "
                    "the dataset as it was; make another loader, or leave out persistent_workers=True."
                )
            self._forget()
        self._currents = now

    def _live_generators(self) -> Generators:
        """The generators that live transforms, and samples as they are read, draw from in this process."""
        if self._watched is None:
            stream, route = self._stream, self._route()
            if stream is not None:  # the same ones, whether a pass runs it or reads what was recorded
                parts = [self.dataset, *passes_of(stream).access.source.random_parts, self.collate_fn]
            elif route is not None:
                parts = random_parts(route, self.collate_fn)
            else:
                parts = [self.dataset, self.collate_fn]
            self._watched = Generators(parts)
        return self._watched

    def _forget(self) -> None:
        """Forget what is known of the dataset: it is another, or read by something else."""
        self._known = self._watched = self._local_generators = None

    # ---- routes --------------------------------------------------------------------------------------

    def _route(self) -> Route | None:
        return None if self._in_stream_order else route_to(self.dataset, in_part=True)

    def _get_iterator(self) -> Any:
        """torch's own iterator, with a recorded order, and with workers that die with this process."""
        copy = type(self).__new__(type(self))  # the user's own attributes stay as they are
        copy.__dict__.update(self.__dict__)
        if not isinstance(self.dataset, IterableDataset):
            self._recorded = RecordedOrder(self._order, self._begins_by)
            copy.__dict__["sampler" if self.batch_sampler is None else "batch_sampler"] = self._recorded
        if self.num_workers:
            copy.__dict__["worker_init_fn"] = WorkerInit(self.worker_init_fn)
        begun = TorchDataLoader._get_iterator(copy)
        if self._recorded is not None:
            self._recorded.began()
        return begun

    def _local_gather(self, route: Route) -> LocalGather | None:
        single = route.single
        store = single.store if single is not None and not single.source.live else None
        if single is None or store is None:
            return None
        if self.batch_sampler is None or not is_known(self.collate_fn):
            return None
        if self._gathers is None or self._gathers[0] is not store:
            ids = route.sample_ids(np.arange(min(route.length, _LOOKED_UP)))
            cached_ids = store.in_common_form(ids)
            if not len(cached_ids):  # nothing was read so far
                return None
            for_workers = self.num_workers > 0
            gather = make_gather(store, self.collate_fn, int(cached_ids[0]), for_workers=for_workers)
            pinned = self.pin_memory and torch.accelerator.is_available()
            size = single.plan.sample_bytes
            local = LocalGather(gather, size, pinned=pinned) if gather is not None else None
            self._gathers = (store, local)
        return self._gathers[1]

    # ---- in this process -----------------------------------------------------------------------------

    def _batch_order(self, run: EpochProgress, batches: Any) -> BatchOrder:
        ahead = self.num_workers * (self.prefetch_factor or 0)
        fresh = run.fresh and not (isinstance(batches, RemainingBatches) and batches.redraws)
        batched = self.batch_sampler is not None
        order = BatchOrder(batches, ahead=ahead, generator=self.generator, fresh=fresh, arrays=batched)
        if run.batches:
            order.begin()
        if order.seeded_by is not None:
            self._seeded_by = order.seeded_by
        return order

    def _collate(self, route: Route) -> Callable[[Any], Any]:
        """The collate function, which also pins its result if torch's loader would."""
        pins = self.pin_memory and torch.accelerator.is_available()
        collate_fn: Callable[[Any], Any] = bound(self.collate_fn, route.schema)[0]
        if is_known(self.collate_fn):
            if self.collate_fn is default_collate and self.batch_sampler is not None and not pins:
                if self._into_blocks is None:
                    self._into_blocks = BlockCollate()
                collate_fn = self._into_blocks
            if self.num_workers:
                collate_fn = as_in_workers(collate_fn)
        if not pins:
            return collate_fn
        return lambda samples: pin_memory(collate_fn(samples))  # type: ignore[no-untyped-call]

    # ---- by workers ----------------------------------------------------------------------------------

    def _from_workers(self, route: Route, run: EpochProgress, batches: Any) -> Iterator[Any]:
        forks = self._inner is None and _start_method(self.multiprocessing_context) == "fork"
        if forks and has_threads("tokio"):
            route.currents[0].warn(
                "this process has threads of tokio, which libraries in Rust (obstore, or polars for Parquet) "
                "start as they read first, and which a forked worker lacks: one that reads with such a "
                'library waits for ever. If yours do, pass multiprocessing_context="spawn" to the loader.',
                "tokio",
            )
        if forks and may_draw(route, self.collate_fn):
            # Forked workers inherit what is found out here about code; else each would, in each epoch.
            self._live_generators()
        # Persistent workers that were not needed up to now: torch's would have been seeded in the first pass.
        late = self._inner is None and not run.fresh and not run.resumed
        seeded = {"generator": self._seeded_by.clone_state()} if late and self._seeded_by is not None else {}
        inner = self._inner if self._inner is not None else self._make_inner(route, **seeded)
        if self.persistent_workers:
            self._inner = inner
        assert self._buffers is not None
        accesses = route.currents
        return WorkerBatches(
            inner, self._buffers, run, batches, lambda cache, told: accesses[cache].warn(*told), late=late
        )

    def _make_inner(self, route: Route, **changed: Any) -> TorchDataLoader[Any]:
        if self._buffers is None:
            sample = max(each.plan.sample_bytes for each in route.currents)
            count = self.batch_size or (256 if self.batch_sampler is not None else 1)
            count = min(count, route.length)  # some pass 10**9, for one batch of all samples
            self._buffers = BatchBuffers(max(_GROWTH * sample * count, _SMALLEST_BLOCK))
        idle, batched = IdleWork(), self.batch_sampler is not None
        workers = self.num_workers if self.in_order else 0
        prefetch = route.prefetch if route.spills else None
        return torch_loader(
            self,
            BatchMaker(self.dataset, self.collate_fn, batched=batched, idle=idle),
            None,
            sampler=TaskSampler(self._order, self._buffers, prefetch, workers),
            collate_fn=_unchanged,
            multiprocessing_context=context_with(idle, self.multiprocessing_context),
            **changed,
        )

    def _warn_of_pinning(self) -> None:
        if self.pin_memory and not torch.accelerator.is_available():
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, "
                "then device pinned memory won't be used.",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        made = DataLoader.__annotations__  # the attributes that the class declares
        return {**{k: v for k, v in self.__dict__.items() if k not in made}, "_iterator": None}


def _start_method(context: Any) -> str:
    """How this loader starts its workers."""
    return str(multiprocessing.get_start_method() if context is None else context.get_start_method())


def _unchanged(message: BatchMessage) -> BatchMessage:
    return message


def _length(loader: TorchDataLoader[Any]) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a sampler without a length
        return 0
