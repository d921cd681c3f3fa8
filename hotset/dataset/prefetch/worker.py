"""A prefetch worker: one of the processes that read samples into a store while the training goes on.

It processes the queue's newest list in order: claim, read, publish. Claims in the store divide the samples
among prefetch workers, loader workers and other ranks. Samples that another process has claimed are skipped,
and looked at again at the end: that process may die, or give up. A sample that raises, or cannot be stored,
is given up for this list; its error is reported in the queue.

The training has priority over the worker, which is killed when its work or its parent ends: see
:mod:`hotset.dataset.prefetch.pool`, which starts it.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper

from hotset.dataset.attachment import Attachment
from hotset.dataset.prefetch.queue import PrefetchQueue, QueueAddress
from hotset.store.claims import Ids
from hotset.store.format import CLAIMED, PRESENT
from hotset.store.memory_limits import keep_freed_memory
from hotset.store.store import Store

__all__ = ["NOT_BEGUN", "Read", "worker_process"]

Read = Callable[[int], Any]

NOT_BEGUN = -1  # a worker's entry in the queue while it is being started
# The training has priority; but at a lower one than this a window would hardly move on a busy core.
_NICE = 5
# A worker claims samples for about this time, as a store's filler does at once: of more, other processes
# would claim a part meanwhile, and the worker would wait for them. A newer list is noticed after this time,
# too.
_CHUNK_SECONDS = 8e-3
_LARGEST_CHUNK = 64
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 50e-3


def worker_process(address: QueueAddress, number: int, attachment: Attachment, read: Read) -> None:
    """The main function of a worker process, which runs until it is killed."""
    queue = PrefetchQueue.attach(address)
    _set_up_process()
    store = attachment.attach()
    assert store is not None
    worker = _Worker(queue, number, store, read)
    queue.done[number] = 0
    pause = _SHORTEST_PAUSE
    while True:
        found = queue.newest() if queue.number != queue.done[number] else None
        if found is None:
            queue.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            worker.fill(*found)
            queue.done[number] = found[0]
            pause = _SHORTEST_PAUSE


def _set_up_process() -> None:
    """Prepare this process: lower its priority, ignore inherited signal handlers, seed the generators."""
    # First: torch would wait for the pool's other threads, which a fork does not copy.
    torch.set_num_threads(1)
    for each in signal.valid_signals():
        # Inherited handlers (for Ctrl-C, a scheduler's warning) are for the main process.
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how a dataset's children end
    os.nice(_NICE)
    keep_freed_memory()
    gc.freeze()  # do not finalise inherited objects, and do not copy their pages by touching them
    random.seed()
    np.random.seed()
    torch.default_generator.seed()


class _Worker:
    """Processes lists, in one process."""

    def __init__(self, queue: PrefetchQueue, number: int, store: Store, read: Read) -> None:
        self._queue, self._number, self._store, self._source = queue, number, store, read
        store.filler.ahead = True
        self._seconds = 0.0  # mean time per sample, 0 until known
        # What is being filled: the number of the list, and for each sample its position in the list.
        self._list, self._positions = 0, dict[int, int]()

    def fill(self, number: int, ids: Ids) -> None:
        """Read the samples of this list into the store, as far as there is room and they can be read.

        Returns at once when there is a newer list.
        """
        self._store.allocator.reopen()  # an earlier list may have found it full; the window has moved since
        left = np.sort(np.unique(ids, return_index=True)[1])  # positions in the list
        pause = _SHORTEST_PAUSE
        while len(left := self._absent(number, ids, left)):
            read = False
            for start in range(0, len(left), _LARGEST_CHUNK):
                look = left[start : start + _LARGEST_CHUNK]
                while len(look := self._free(number, ids, look)):
                    self._fill(number, ids, self._share(look))
                    read = True
                    if self._queue.number != number:
                        return
                    if self._is_futile:  # nor can the processes that hold the other claims store anything
                        self._store.refuse(ids[left])
                        return
            if not read:  # all that is left is claimed by others
                self._queue.pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if self._queue.number != number:
                    return

    @property
    def _is_futile(self) -> bool:
        """Whether nothing can be stored: the store is full, or this process has no slot to claim with."""
        return self._store.allocator.is_full or self._store.participant.slot < 0

    def _share(self, free: Ids) -> Ids:
        """Those of these positions that this worker is to read next.

        Workers that look at the same moment must not claim the same samples, and then wait for each other
        (that took a seventh of three workers' time): the second begins where the first will end, and so on.
        """
        most = int(_CHUNK_SECONDS / self._seconds) if self._seconds else 1
        chunk = max(1, min(most, _LARGEST_CHUNK))
        own = free[self._number * chunk :][:chunk]
        return own if len(own) else free[:chunk]

    def _absent(self, number: int, ids: Ids, positions: Ids) -> Ids:
        """Those of these positions whose samples are missing, and not given up."""
        positions = positions[self._store.index.missing(ids[positions])]
        return positions[~self._queue.given_up(number, positions)] if len(positions) else positions

    def _free(self, number: int, ids: Ids, positions: Ids) -> Ids:
        """Those of the missing ones that no living process has claimed."""
        positions = self._absent(number, ids, positions)
        words = self._store.words(ids[positions])
        is_open = self._store.filler.claims.is_open
        read = [word for word in set(words.tolist()) if CLAIMED <= word < PRESENT and is_open(word)]
        return positions[~np.isin(words, read)] if read else positions

    def _fill(self, number: int, ids: Ids, positions: Ids) -> None:
        """Read the samples at these positions; those that raise, or cannot be stored, are given up."""
        self._list = number
        self._positions = dict(zip(ids[positions].tolist(), positions.tolist(), strict=True))
        start = time.perf_counter()
        unstored: Iterable[int] = ()
        try:
            unstored = self._store.fill(ids[positions], self._read, keep=False)
            # A sample that draws, if that could not be recorded, would be read for ever.
            for position in self._absent(number, ids, positions).tolist():
                self._queue.give_up(number, position)
        except _GivenUp:
            self._store.refuse(ids[positions][self._queue.given_up(number, positions)])
        except Exception:  # raised by the store itself
            self._report()
            unstored = self._positions
        each = (time.perf_counter() - start) / len(positions)
        self._seconds = 0.9 * self._seconds + 0.1 * each if self._seconds else each
        for sample in unstored:
            self._queue.give_up(number, self._positions[sample])

    def _read(self, sample: int) -> Any:
        """Read a claimed sample, unless another worker has given it up since this one looked."""
        position = self._positions[sample]
        if self._queue.given_up(self._list, np.array([position])).all():
            raise _GivenUp
        try:
            return self._source(sample)
        except Exception:
            self._report()
            self._queue.give_up(self._list, position)  # before the claim on it ends
            raise _GivenUp from None

    def _report(self) -> None:
        where = f"in prefetch worker {os.getpid()}, which fills the cache"
        self._queue.report(self._number, ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]


class _GivenUp(Exception):
    """A worker has given this sample up; it is not to be tried again."""
