"""Look-ahead: a worker without a task fills the cache with what its next batches need.

torch's workers stop when each has ``prefetch_factor`` batches waiting: while a network compiles, while an
evaluation runs, they do nothing, and later the loader is late. But the order of the epoch is known, and the
cache is a buffer that can hold all of it. So each task tells its worker a batch that comes much later, and a
worker whose queue of tasks is empty reads samples of these batches, for the cache, until a task comes.

::

    main      task 7, and batch 71 ──> queue ──> worker: get() finds no task: fills batch 9, 11, ... 71
                                                         a task has come: get() returns it

It is done in the worker's main thread, between two tasks: a dataset is never read by two threads, and reading
ahead is watched like any reading for the cache, so it moves no generator. A task that comes meanwhile waits
for one short read. Each worker reads ahead for its own batches, so it counts each sample once, as a miss.

In each pass it ends where the cache has no room, or another reason not to store a sample: that would be read
twice. Exceptions are left to the batch that they belong to. Nothing is known ahead of samplers that may draw
later in the epoch (:func:`hotset.loader.batch_order.whole_epoch`).
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

from hotset.dataset.sample_access import SampleAccess
from hotset.loader.batch_order import WholeEpoch
from hotset.store.claims import Ids

__all__ = ["Ahead", "IdleWork", "Upcoming", "batches_ahead", "context_with"]

# A worker knows its batches this far ahead; a task that carries them stays below a megabyte.
_SAMPLES = 1 << 16
_BATCHES = 1 << 10
# About as long as a chunk of samples that is claimed together takes: a task waits no longer.
_SECONDS = 8e-3


class Ahead(NamedTuple):
    """What a task tells its worker of later tasks.

    Attributes:
        begins: whether this is the worker's first task of a pass.
        batches: the indices of further batches that it will be asked for, after those it knows.
    """

    begins: bool
    batches: list[Any]


def batches_ahead(order: WholeEpoch, number: int, workers: int) -> Ahead:
    """What to tell a worker with task ``number`` of a pass, once that task's batch was taken from the order.

    Args:
        number: of the task; the workers take turns.
    """
    depth = max(1, min(_BATCHES, _SAMPLES // order.batch_size))
    begins = number < workers
    turns = range(1 if begins else depth, depth + 1)
    found = (order.peek(turn * workers - 1) for turn in turns)
    return Ahead(begins, list(itertools.takewhile(lambda batch: batch is not None, found)))


class IdleWork:
    """What a worker does while it has no task. The worker's queue and its dataset refer to the same one.

    Attributes:
        step: does a little; returns whether there is more to do. None in any process but a worker.
    """

    def __init__(self) -> None:
        self.step: Callable[[], bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"step": None}


class _TaskQueue(Queue):  # type: ignore[type-arg]
    """A queue whose ``get()`` does idle work until there is something to get."""

    def __init__(self, idle: IdleWork, context: BaseContext) -> None:
        super().__init__(ctx=context)
        self._idle = idle

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._idle

    def __setstate__(self, state: Any) -> None:
        inner, self._idle = state
        super().__setstate__(inner)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        step = self._idle.step
        while step is not None and self.empty() and step():
            pass
        return super().get(block, timeout)


def context_with(idle: IdleWork, context: BaseContext | str | None) -> BaseContext:
    """A multiprocessing context like the given one, whose workers do this when they have no task."""
    if not isinstance(context, BaseContext):
        context = multiprocessing.get_context(context)
    twin: Any = copy.copy(context.get_context())
    twin.Queue = partial(_TaskQueue, idle, twin)
    return twin  # type: ignore[no-any-return]


class Upcoming:
    """The batches that a worker will be asked for, and how far it has read ahead.

    Args:
        access: of the only cache behind the dataset.
        ids_of: maps indices to sample ids; None where the dataset itself must be asked for them.
    """

    def __init__(self, access: SampleAccess, ids_of: Callable[[Any], Ids | None]) -> None:
        self._access = access
        self._ids_of = ids_of
        self._batches: deque[Any] = deque()
        self._passed = 0  # of these, how many need no reading any more
        self._count = 1
        self._ended = False

    def note(self, ahead: Ahead) -> None:
        """Note what a task tells, and that the batch of this task is no longer ahead."""
        if ahead.begins:
            self._batches.clear()
            self._passed, self._count, self._ended = 0, 1, False
        elif self._batches:
            self._batches.popleft()
            self._passed = max(self._passed - 1, 0)
        self._batches.extend(ahead.batches)

    def fill_some(self) -> bool:
        """Read a few samples for the cache; return whether there may be more to read."""
        store = self._access.store
        if self._ended or store is None:
            return False
        while self._passed < len(self._batches):
            ids = self._ids_of(self._batches[self._passed])
            missing = ids[store.index.missing(ids)] if ids is not None else None
            if missing is not None and len(missing):
                self._fill(missing[: max(self._count, self._access.at_once)])
                return True
            self._passed += 1
        return False

    def _fill(self, ids: Ids) -> None:
        begun = time.perf_counter()
        try:
            self._ended = not self._access.fill_ahead(ids)
        except Exception:  # it is raised again where its batch is made
            self._passed += 1
        brief = time.perf_counter() - begun < _SECONDS
        self._count = self._count * 2 if brief else max(self._count // 2, 1)
