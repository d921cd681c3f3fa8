"""Batches made by workers, straight into shared blocks.

The workers are torch's: an inner DataLoader runs them over a private dataset (:class:`BatchMaker`) whose
"samples" are whole batches. The inner loader's sampler gives tasks: a batch's indices and the number of a
free block. A worker fills, gathers or runs the live part and collates into the block, and sends a message:
the batch's tree, with a reference into the block for each tensor (:mod:`hotset.loader.worker_messages`).

::

    main      task = (block 3, indices) ──>  worker: fill, gather or live + collate into block 3
    main      tensors over block 3      <──  message = (block 3, {"image": at 0, uint8, (64, 3, 224, 224)})

Objects that a block cannot hold (text, other objects, a batch larger than its block) travel in the message,
as with torch's own loader. torch does everything else about workers: seeds, errors, time-outs, deaths and
persistence, through its public arguments.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert, get_worker_info

from hotset.dataset.parent_death import parent_death_signal
from hotset.dataset.sample_access import Told
from hotset.dataset.streams.recording import StreamRecording
from hotset.determinism.draws.rng import Generators
from hotset.loader.batch_buffer import BatchBuffer
from hotset.loader.batch_builder import BatchBuilder, make_gather
from hotset.loader.batch_order import WholeEpoch, whole_epoch
from hotset.loader.collate import bound, is_known
from hotset.loader.index_route import Route, route_to, samples_in
from hotset.loader.look_ahead import Ahead, IdleWork, Upcoming, batches_ahead
from hotset.loader.rng_state import pack, restore
from hotset.loader.worker_messages import NO_BLOCK, BatchMessage, TensorRef, WorkerReport, message_pool
from hotset.store.blocks import BlockPool, SharedBlocks
from hotset.store.claims import Ids
from hotset.store.gather import Copy, Gather
from hotset.store.locks import can_reopen
from hotset.store.memory_limits import keep_freed_memory
from hotset.store.record_batch import RecordBatch
from hotset.store.segment import Address

__all__ = [
    "BatchBuffers",
    "BatchMaker",
    "BatchMessage",
    "Task",
    "TaskSampler",
    "WorkerInit",
    "may_draw",
    "random_parts",
    "torch_loader",
]


# Short epochs of live transforms took 1.13 times as long when each began with memory to be faulted in.
_KEPT_BETWEEN_EPOCHS = 256 << 20
# Without address space; or not allowed to, as a program that gave up its rights or `prctl` hides its files.
_UNREACHABLE = (errno.ENOMEM, errno.EACCES, errno.EPERM)


class Task(NamedTuple):
    """A worker's task: make a batch in a block.

    Attributes:
        number: of the task, which its message repeats; none is given twice by a loader's sampler.
        indices: of the batch; with ``batch_size=None``, an index of any kind that the dataset takes.
        idle: whether the task has no batch, and only takes the worker's turn.
        pool, block_bytes, block: the block for the batch; None, 0 and :data:`NO_BLOCK` without one.
        states: states to restore the worker's generators to first; None to leave them.
        ahead: what comes later; None if that is not known.
    """

    number: int
    indices: Any
    idle: bool
    pool: Address | None
    block_bytes: int
    block: int
    states: Any = None
    ahead: Ahead | None = None


class BatchBuffers:
    """Blocks for batches: the pool that the next task's block comes from.

    The loader and its task sampler refer to it, but it refers to neither, so that a dropped loader ends its
    workers at once and not at the next garbage collection.

    Attributes:
        needed: bytes of the largest batch so far; if that exceeds a block, the next task gets a new pool.
    """

    def __init__(self, block_bytes: int) -> None:
        self.needed = block_bytes
        self._pool: BlockPool | None = None

    def take(self) -> tuple[BlockPool, int] | None:
        """A free block that is large enough, by its pool and number.

        None if there is none: the limits of this process leave no room for a pool (``ulimit -v``), or the
        user keeps as many batches as it has blocks.
        """
        pool = self._pool
        try:
            if pool is None or not pool.is_reachable or pool.block_bytes < self.needed:
                pool = self._pool = message_pool(self.needed)
            return pool, pool.take()
        except (OSError, MemoryError):
            return None

    def trim(self, kept_bytes: int = 0) -> None:
        """As :meth:`BlockPool.trim`, where there is a pool; no batch is being built."""
        if self._pool is not None and self._pool.is_ours:
            self._pool.trim(kept_bytes)

    def trim_between_epochs(self) -> None:
        """Free what exceeds the memory that is worth keeping: new workers need not fault it in again."""
        self.trim(_KEPT_BETWEEN_EPOCHS)

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # A batch that outlives the loader keeps the pool: it must not keep the memory of the other blocks.
        # At the interpreter's end anything may be gone, even this module's imports.
        with suppress(Exception):
            self.trim()


class _Given(NamedTuple):
    """What is remembered of a task that was given: its batch's size, and its block, if it has one."""

    samples: int
    place: tuple[BlockPool, int] | None


class TaskSampler:
    """The inner loader's sampler: the user's batch sampler, with a free block for each batch.

    ``iter()`` calls the user's sampler's ``iter()`` at once, as torch's loader would.

    Args:
        prefetch: called with each batch's indices when they are drawn, some batches before they are needed.
        workers: how many workers take turns; 0 to tell them nothing of later batches.
    """

    def __init__(
        self, batches: Any, buffers: BatchBuffers, prefetch: Callable[[Any], None] | None, workers: int
    ) -> None:
        self._batches = batches
        self._workers = workers
        self._buffers = buffers
        self._prefetch = prefetch
        self._numbers = itertools.count()
        # By the task's number: a block that no tensor lies in is free, and another task's, before its message
        # has been handed on.
        self._out: dict[int, _Given] = {}
        self._idle = 0
        self._states: dict[int, Any] = {}
        self._late = False

    def begin(self, batches: Any, idle: int, states: dict[int, Any], *, late: bool) -> None:
        """Set the next pass.

        Args:
            late: whether torch's loader would have started its workers in an earlier pass: then it would not
                call ``iter()`` twice in this one, for workers that start.
            idle: how many idle tasks to give before its first batch, so that this goes to the worker whose
                turn it was when the pass was interrupted.
            states: states to restore workers' generators to, by worker.
        """
        self._batches, self._idle, self._states, self._late = batches, idle, states, late

    def __iter__(self) -> Iterator[Task]:
        if self._late:
            self._late = False
            return iter(())
        whole = whole_epoch(self._batches) if self._workers else None
        return self._tasks(iter(self._batches) if whole is None else whole)

    def _tasks(self, batches: Iterator[Any]) -> Iterator[Task]:
        # When torch asks for a pass's first task, it has dropped the messages of one that was broken off, and
        # a message recycles its block. There was none for a batch that failed.
        self.recall()
        # The workers take turns, so the number of each first task is the number of its worker.
        for turn, indices in enumerate(itertools.chain(itertools.repeat((), self._idle), batches)):
            taken = self._buffers.take()
            idle = turn < self._idle
            if self._prefetch is not None and not idle:
                self._prefetch(indices)
            ahead = None
            if self._workers and isinstance(batches, WholeEpoch) and not idle:
                ahead = batches_ahead(batches, turn - self._idle, self._workers)
            task = next(self._numbers)
            self._out[task] = _Given(samples_in(indices), taken)  # from now on, a worker has the block
            place: tuple[Address | None, int, int] = None, 0, NO_BLOCK
            if taken is not None:
                pool, block = taken
                place = pool.address, pool.block_bytes, block
            yield Task(task, indices, idle, *place, self._states.get(turn), ahead)

    def __len__(self) -> int:
        return len(self._batches)

    def answered(self, message: BatchMessage) -> None:
        """A message has arrived: from now on the message recycles its block."""
        self._out.pop(message.report.task, None)

    def failed_before(self, message: BatchMessage) -> list[int]:
        """The sizes of the batches that should have come before this message, and raised exceptions instead.

        Only where batches come in order. An exception alone does not tell: a time-out takes no batch.
        """
        failed = [task for task in self._out if task < message.report.task]
        return [self._take_back(task).samples for task in failed]

    def recall(self) -> None:
        """Take back the blocks of tasks that no worker will answer."""
        for task in list(self._out):
            self._take_back(task)

    def _take_back(self, task: int) -> _Given:
        given = self._out.pop(task)
        # An interrupt may have dropped its message, which has recycled the block: it may be another task's.
        if given.place is not None and all(other.place != given.place for other in self._out.values()):
            pool, block = given.place
            pool.give_back(block)
        return given


class BatchMaker(Dataset[Any]):
    """The inner loader's dataset: makes a task's batch, in a worker.

    Args:
        batched: whether the order gives lists of indices; if not, each sample is collated alone.
        idle: gets what the worker does while it has no task.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], *, batched: bool, idle: IdleWork
    ) -> None:
        self.dataset = dataset
        self._idle = idle
        self._collate_fn = collate_fn
        self._batched = batched
        self._made: _InWorker | None = None

    def __getitem__(self, task: Task) -> BatchMessage:
        if self._made is None:
            self._made = _InWorker(self.dataset, self._collate_fn, self._batched)
            self._idle.step = self._made.upcoming.fill_some if self._made.upcoming is not None else None
        return self._made.answer(task)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}


class _InWorker:
    """The state that a worker keeps between batches."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        route = route_to(dataset, in_part=True)
        assert route is not None
        self.route: Route = route
        self.collate_fn = collate_fn
        self._batched = batched
        self._builder = BatchBuilder(dataset, route, batched=batched)
        self._gather: Gather | None = None
        self._not_gathered = not is_known(collate_fn)
        self._pools: dict[Address, SharedBlocks] = {}
        self._told: list[tuple[int, Told]] = []
        self._draws = may_draw(route, collate_fn)
        self._generators: Generators | None = None
        info = get_worker_info()
        self._worker = info.id if info is not None else 0
        for number, each in enumerate(route.currents):
            each.tell = partial(self._report_warning, number)
        single = route.single
        self.upcoming: Upcoming | None = None
        if single is not None and single.window is None and single.remote is None:
            self.upcoming = Upcoming(single, route.ids_of)

    def answer(self, task: Task) -> BatchMessage:
        if task.ahead is not None and self.upcoming is not None:
            self.upcoming.note(task.ahead)
        if task.states is not None:
            self._draws = True
            restore(self._drawn_from(), task.states)
        buffer = self._buffer(task)
        batch = self._batch(task.indices, buffer) if not task.idle else None
        told = tuple(self._told)
        self._told.clear()
        self._draws |= any(each.draws for each in self.route.currents)
        states = pack(self._drawn_from().states()) if self._draws else None
        report = WorkerReport(
            task.number, self._worker, buffer.needed, samples_in(task.indices), told, states
        )
        pool = task.pool.inode if task.pool is not None else 0
        return BatchMessage(pool, task.block, batch, report)

    def _buffer(self, task: Task) -> BatchBuffer:
        """The task's block; an empty one, for a batch that goes as torch sends it, if this process cannot
        reach the memory of the one that has it.
        """
        empty = BatchBuffer(bytearray(), 0, _reference)
        if task.pool is None:
            return empty
        blocks = self._pools.get(task.pool)
        if blocks is None:
            try:
                blocks = SharedBlocks(task.pool, task.block_bytes)
            except OSError as error:
                if can_reopen() and error.errno not in _UNREACHABLE:
                    raise  # that process has died
                return empty  # without /proc
            self._pools[task.pool] = blocks
        return BatchBuffer(blocks.array(task.block), task.block_bytes, _reference)

    def _drawn_from(self) -> Generators:
        """The generators that live transforms and the reading of samples draw from."""
        if self._generators is None:
            self._generators = Generators(random_parts(self.route, self.collate_fn))
        return self._generators

    def _report_warning(self, cache: int, told: Told) -> None:
        self._told.append((cache, told))

    def _batch(self, indices: Any, buffer: BatchBuffer) -> Any:
        resolved, uncached = self._builder.resolve(indices), None
        single = self.route.single
        if (
            resolved is not None
            and single is not None
            and not single.source.live
            and is_known(self.collate_fn)
        ):
            batch, uncached = self._builder.filled(
                self.route.sample_ids(resolved), partial(self._prepare, buffer), partial(self._finish, buffer)
            )
            if batch is not None:
                return batch
        return self._collate(self._builder.samples(indices, resolved, uncached), buffer)

    def _prepare(self, buffer: BatchBuffer, ids: Ids, records: Sequence[RecordBatch]) -> Copy | None:
        single = self.route.single
        assert single is not None
        store = single.store if self._gather is None and not self._not_gathered else None
        if store is not None:
            cached_ids = store.in_common_form(ids)
            if not len(cached_ids):
                return None
            self._gather = make_gather(store, self.collate_fn, int(cached_ids[0]), for_workers=True)
            self._not_gathered = self._gather is None
        return self._gather.prepare(ids, buffer.whole, records) if self._gather is not None else None

    def _finish(self, buffer: BatchBuffer, copy: Copy) -> Any | None:
        assert self._gather is not None
        return self._gather.finish(copy, buffer.placed)

    def _collate(self, samples: Any, buffer: BatchBuffer) -> Any:
        if self.collate_fn is not default_collate or not is_known(self.collate_fn) or not self._batched:
            return buffer.lay(bound(self.collate_fn, self.route.schema)[0](samples))
        return buffer.collate(samples)


def _is_still(collate_fn: Callable[[Any], Any]) -> bool:
    """Whether this collate function is known to draw nothing."""
    return is_known(collate_fn) or collate_fn is default_convert


def may_draw(route: Route, collate_fn: Callable[[Any], Any]) -> bool:
    """Whether random numbers may be drawn when batches are made of samples that are all in the cache."""
    return any(each.source.live for each in route.currents) or not _is_still(collate_fn)


def random_parts(route: Route, collate_fn: Callable[[Any], Any]) -> list[Any]:
    """The objects that may draw random numbers when batches are made of samples."""
    parts = [part for each in route.currents for part in each.source.random_parts]
    return parts if _is_still(collate_fn) else [*parts, collate_fn]


def _reference(tensor: torch.Tensor, offset: int) -> TensorRef:
    """What a message has in place of a tensor that lies in its block."""
    return TensorRef(offset, tensor.dtype, tuple(tensor.shape))


class WorkerInit:
    """Runs in each worker before its first batch, and calls the user's function with the user's dataset.

    From then on the worker dies with the process that made it. torch's worker looks up its parent only after
    this call, to end when the parent dies: if the parent has died already, the worker takes the process that
    adopted it for its parent, and waits for work for ever. And at its end it waits until its batches were
    read, which then no process does.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user
        self._parent = parent_death_signal()

    def __call__(self, worker: int) -> None:
        self._parent.arm_in_worker(worker)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, (BatchMaker, StreamRecording)):
            keep_freed_memory()
            # Of what a fork inherits nothing is garbage. Python would look at all of it now and then, and so
            # have all of it copied: 0.1 s of each worker, and of each epoch where workers are new.
            gc.freeze()
            # WorkerInfo refuses plain assignment; the user must find the user's own dataset there.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.user is not None:
            self.user(worker)


def torch_loader(
    loader: DataLoader[Any], dataset: Any, batch_size: int | None, drop_last: bool = False, **changed: Any
) -> DataLoader[Any]:
    """torch's loader over another dataset, with the arguments of ``loader`` for all that is not changed."""
    same = (
        "num_workers collate_fn pin_memory timeout multiprocessing_context generator prefetch_factor "
        "persistent_workers pin_memory_device in_order"
    )
    arguments = {**{name: getattr(loader, name) for name in same.split()}, **changed}
    init = WorkerInit(loader.worker_init_fn)
    with warnings.catch_warnings():
        # The user's loader has warned of too many workers already.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return DataLoader(dataset, batch_size, drop_last=drop_last, worker_init_fn=init, **arguments)
