"""Batches from workers: messages are opened and counted, and their blocks are tracked.

A resumed pass begins with idle tasks: one for each worker, which restores its generators, and then one for
each worker that has had its turn, so that every batch is made by the worker that would have made it. If
persistent workers are used again after a pass that was not read to its end, an idle task asks each worker for
its states.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from hotset.dataset.pipeline import SampleStopped, stopped
from hotset.dataset.sample_access import Told
from hotset.loader.state import EpochProgress
from hotset.loader.torch_batches import clear_reraising_frame
from hotset.loader.worker_messages import BatchMessage
from hotset.loader.worker_process import BatchBuffers, TaskSampler
from hotset.store.blocks import making_workers

__all__ = ["WorkerBatches"]


class WorkerBatches:
    """Iterator over one epoch's batches, made by the inner loader's workers.

    Args:
        buffers: the blocks that the batches are in.
        warn: called with each warning of a worker, and the number of the cache that it is of.
        late: see :meth:`TaskSampler.begin`.
    """

    def __init__(
        self,
        inner: TorchDataLoader[Any],
        buffers: BatchBuffers,
        run: EpochProgress,
        batches: Any,
        warn: Callable[[int, Told], None],
        *,
        late: bool,
    ) -> None:
        self._warn = warn
        self._persistent = inner.persistent_workers
        self._workers = inner.num_workers
        self._in_order = inner.in_order
        self._tasks: TaskSampler = inner.sampler  # type: ignore[assignment]
        self._buffers = buffers
        self._run = run
        self._messages: Any = None
        idle: int = 0
        states: dict[int, Any] = {}
        if run.ask_workers and inner.in_order:
            idle = inner.num_workers
        elif run.resumed and inner.in_order and run.workers:
            idle, states = inner.num_workers + run.turn, dict(run.workers)
        self._tasks.begin(batches, idle, states, late=late)
        with making_workers():
            self._messages = iter(inner)
        for _ in range(idle):
            message: BatchMessage = next(self._messages)
            self._tasks.answered(message)
            run.workers[message.report.worker] = message.report.states

    def __iter__(self) -> WorkerBatches:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        self._run.raise_errors()
        try:
            message = next(self._messages)
        except StopIteration:
            self._run.end()
            if not self._persistent:
                self._buffers.trim_between_epochs()  # the workers have ended
            raise
        except BaseException as error:
            clear_reraising_frame(error)
            if isinstance(error, SampleStopped):
                raise stopped(error) from None
            raise
        self._tasks.answered(message)
        for samples in self._tasks.failed_before(message) if self._in_order else ():
            self._run.failed(samples)
        report = message.report
        self._buffers.needed = max(self._buffers.needed, report.needed)
        for cache, told in report.told:
            self._warn(cache, told)
        self._run.workers[report.worker] = report.states
        self._run.turn = (report.worker + 1) % self._workers
        self._run.count(report.samples, start)
        return message.batch

    def __len__(self) -> int:
        return len(self._messages)

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # Persistent workers continue their tasks, and the next epoch begins by receiving their messages.
        if self._persistent:
            return
        self._messages = None  # ends and joins the workers: only then are their blocks free
        # At the interpreter's end anything may be gone, even this module's imports.
        with suppress(Exception):
            self._tasks.recall()
            self._buffers.trim_between_epochs()
