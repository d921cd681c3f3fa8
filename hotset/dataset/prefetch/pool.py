"""The prefetch pool: processes that read samples into a store while the training goes on.

::

    main process                         queue                               worker, one of several
    request(ids)  ── the newest list ──>  ids  ── read between chunks ───────>  process them in order:
    idle          <── lists done ───────────────────────────────────────────    claim, read, publish
    raise_errors  <── errors ───────────────────────────────────────────────    give the sample up

The user's dataset is not thread-safe, and a process with threads should not fork: so processes do the work,
and no thread supervises them. A request is one write to shared memory (:mod:`hotset.dataset.prefetch.queue`).
All workers process the same list (:mod:`hotset.dataset.prefetch.worker`); claims in the store divide it
among them.

Each worker may be killed at any time: a dead process's claims are void, and published samples are complete.

==================================  ========================================================================
a worker is killed, or crashes      the next :meth:`PrefetchPool.request` starts another; one warning
a worker fails before it begins     it would fail each time: nothing is prefetched any more; one warning
the main process dies, however      the kernel kills the workers, even while they block in a read
the main process is forked          the child's copy is as if no request had been made
``close()``, garbage, the end       the workers are killed, whatever they do
a worker's start is interrupted     the queue is closed: a worker that is not known here ends by itself
==================================  ========================================================================
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import weakref
from typing import Any

import torch.multiprocessing

from hotset._warnings import warn
from hotset.dataset.attachment import Attachment
from hotset.dataset.prefetch.queue import PrefetchQueue
from hotset.dataset.prefetch.worker import NOT_BEGUN, Read, worker_process
from hotset.store.claims import Ids
from hotset.store.store import Store

__all__ = ["PrefetchPool"]

_JOIN_SECONDS = 5.0


class PrefetchPool:
    """Worker processes that fill a store. None is started before the first :meth:`request`.

    One thread may use it at a time. A forked child that makes a request starts workers of its own.

    Args:
        store: the store to fill. Forked workers inherit it, others attach to its memory.
        read: returns the sample of a sample id; it runs in the workers only.
        processes: the number of workers, at least 1.
        context: a multiprocessing context, or its name; None for torch's default, as in a DataLoader.

    Attributes:
        processes, context: the same.

    Raises:
        ValueError: there is no context of that name.

    Example:
        >>> import time, numpy as np, torch
        >>> from hotset.store.leaves.schema import Schema
        >>> rows = torch.arange(8.0).view(4, 2)
        >>> store = Store.create(Schema.infer([rows[0]], keep_order=False), 4, 1 << 20, about={})
        >>> pool = PrefetchPool(store, rows.__getitem__, processes=1)
        >>> pool.request(np.arange(4))  # returns at once
        >>> while not pool.idle:
        ...     time.sleep(0.01)
        >>> store.holds(), store.read(np.array([3]))
        (True, [tensor([6., 7.])])
        >>> pool.close()
        >>> store.close()
    """

    def __init__(self, store: Store, read: Read, *, processes: int, context: Any = None) -> None:
        self._store, self._read, self.processes = store, read, processes
        self.context: Any = (
            torch.multiprocessing.get_context(context) if isinstance(context, str) else context
        )
        self._queue: PrefetchQueue | None = None
        self._workers: dict[int, Any] = {}
        self._failed = self._warned = False
        _pools.add(self)

    def request(self, ids: Ids) -> None:
        """Have these samples read, in this order; an earlier request is dropped.

        Starts the workers at first use, and restarts those that have died since.

        Args:
            ids: sample ids, int64; those that are in the store already cost nothing.

        Warns:
            HotsetWarning: a worker has died, or none can be started.

        Raises:
            IndexError: the store has no such sample.
        """
        if self._queue is not None and self._queue.is_closed:
            self.close()  # the last call was interrupted
        self._reap_dead()
        if self._failed:
            return
        wanted = len(ids) > 0 and not self._store.holds(ids)
        try:
            if self._queue is None:
                self._queue = PrefetchQueue.create(self.processes)
            self._queue.post(ids)
            if wanted:
                self._start_workers(self._queue)
        except Exception as error:
            # A script without a main guard runs again in each spawned worker, and must end there.
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise
            why = f"No prefetch worker can be started: {type(error).__name__}: {error}. {self._advice(error)}"
        except BaseException:
            self.close()  # of a worker that was just being started nothing is known here
            raise
        else:
            return
        self._give_up(why)

    def raise_errors(self) -> None:
        """Raise, once, what ``read`` has raised in a worker; its traceback is in the message.

        The worker has given that sample up and gone on. Each worker keeps one error until it is raised here,
        and drops those that follow meanwhile. Costs a microsecond or two if there is no error.
        """
        error = self._queue.take_error() if self._queue is not None else None
        if error is not None:
            error.reraise()  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        """Whether no worker has anything left to do, a dead one included."""
        queue = self._queue
        return queue is None or all(
            queue.done[number] == queue.number or _has_ended(worker)
            for number, worker in self._workers.items()
        )

    def close(self) -> None:
        """Kill the workers, and return once they are gone. May be called again, and in a forked child."""
        if self._queue is not None:
            self._queue.close()
        for worker in self._workers.values():
            worker.kill()
        while self._workers:
            _reap(self._workers.popitem()[1])
        self._queue = None

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At the interpreter's end anything may be gone already, what this module has imported too.
        with suppress(Exception):
            self.close()

    def _start_workers(self, queue: PrefetchQueue) -> None:
        context = self.context or torch.multiprocessing  # its default is set at its first use, not sooner
        attachment = Attachment(self._store, None, "")
        attachment.watch(self._store.filler.watch)
        for number in range(self.processes):
            if number in self._workers:
                continue
            queue.done[number] = NOT_BEGUN
            worker = context.Process(
                target=worker_process,
                args=(queue.address, number, attachment, self._read),
                name=f"hotset-fill-{number}",
                daemon=True,
            )
            worker.start()
            self._workers[number] = worker

    def _reap_dead(self) -> None:
        for number, worker in list(self._workers.items()):
            if not _has_ended(worker):
                continue
            assert self._queue is not None
            code, begun = worker.exitcode, self._queue.done[number] != NOT_BEGUN
            _reap(self._workers.pop(number))
            if (code is None or code > 0) and not begun:
                self._give_up("A prefetch worker failed before it began; its output on stderr says why.")
                return
            how = "exit code unknown" if code is None else f"exit code {code}"
            how = f"killed by signal {-code}" if code is not None and code < 0 else how
            self._warn(
                f"A prefetch worker, which fills the cache in the background, died ({how}); it is started "
                "again. If the kernel killed it because memory ran out, lower `memory=`."
            )

    def _give_up(self, why: str) -> None:
        self.close()
        self._failed, self._warned = True, False
        self._warn(f"{why} Nothing is prefetched any more: samples are read when they are needed.")

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            warn(sentence)

    def _advice(self, error: Exception) -> str:
        if isinstance(error, (ConnectionError, EOFError)):
            return (
                "The fork server has ended, and its output on stderr says why; if it ended as it imported "
                'this program, write what starts processes below `if __name__ == "__main__":`.'
            )
        if isinstance(error, OSError):
            return "Look at the limits of this shell (`ulimit -a`)."
        if multiprocessing.current_process().daemon:
            return "Only the process that trains can start prefetch workers, and not a loader's worker."
        return (
            "A start method other than fork pickles the dataset: define what it holds at the top level of a "
            'module, or pass `multiprocessing_context="fork"`.'
        )

    def _forget(self) -> None:
        """Drop the queue and the workers, in a forked child, whose own they are not."""
        self._workers = {}
        self.close()


_pools: weakref.WeakSet[PrefetchPool] = weakref.WeakSet()


def _forget_inherited() -> None:
    for pool in list(_pools):
        pool._forget()


os.register_at_fork(after_in_child=_forget_inherited)


def _has_ended(worker: Any) -> bool:
    """Whether a worker has ended; multiprocessing does not hear of one that the program has reaped."""
    if not worker.is_alive():
        return True
    try:
        os.kill(worker.pid, 0)
    except OSError:
        return True
    return False


def _reap(worker: Any) -> None:
    worker.join(_JOIN_SECONDS)
    # Without an exit code it hangs in the kernel, for example in a read from a disk that is gone.
    if worker.exitcode is not None:
        with contextlib.suppress(OSError):  # the program has closed all descriptors, and its sentinel
            worker.close()
