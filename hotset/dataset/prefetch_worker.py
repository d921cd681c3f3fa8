"""A helper: one of the processes that bring samples into a store while the training goes on.

It walks the newest list on the board in order: claim, read, publish. Claims in the store share samples out
among helpers, loader workers and other ranks. What others have claimed is passed over, and looked at again at
the end: they may die, or give up. A sample that raises, or cannot be stored, is given up for this list; what
it raised is reported on the board.

It comes after the training in everything, and is killed when its work is over, or its parent is: see
:mod:`hotset.dataset.prefetch_pool`, which starts it.
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

from hotset.dataset.prefetch_queue import PrefetchQueue, QueueAddress
from hotset.session.find_or_create import attach_again
from hotset.store.claims import Ids
from hotset.store.format import CLAIMED, PRESENT
from hotset.store.memory_limits import keep_freed_memory
from hotset.store.store import Store

__all__ = ["NOT_BEGUN", "Carried", "Read", "helper_process"]

Read = Callable[[int], Any]

NOT_BEGUN = -1  # what the board has of a helper that is being started
# Training comes first; but with less than this share of a busy core a window would hardly move.
_NICE = 5
# A helper claims what takes it about this long. It is what a store's filler claims at once: of more, others
# would claim a part meanwhile, and be waited for. It is also how soon a newer list is noticed.
_CHUNK_SECONDS = 8e-3
_LARGEST_CHUNK = 64
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 50e-3


class Carried:
    """A store on its way into a helper: a fork inherits it; pickled, it is attached to anew."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getstate__(self) -> Any:
        return self.store.segment.address, type(self.store).attach, self.store.filler.watch

    def __setstate__(self, state: Any) -> None:
        *where, watch = state
        self.store = attach_again(*where)
        self.store.filler.watch = watch


def helper_process(address: QueueAddress, number: int, carried: Carried, read: Read) -> None:
    """What a helper process runs, until it is killed."""
    board = PrefetchQueue.attach(address)
    _settle_in()
    helper = _Helper(board, number, carried.store, read)
    board.done[number] = 0
    pause = _SHORTEST_PAUSE
    while True:
        found = board.newest() if board.number != board.done[number] else None
        if found is None:
            board.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            helper.bring(*found)
            board.done[number] = found[0]
            pause = _SHORTEST_PAUSE


def _settle_in() -> None:
    """Make this process a helper, which comes after the training in everything."""
    torch.set_num_threads(1)  # first: after a fork the team's other threads are missing, and waited for
    for each in signal.valid_signals():
        # Handlers that were inherited (for Ctrl-C, a scheduler's warning) do their work in the main process.
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how a data set's children end
    os.nice(_NICE)
    keep_freed_memory()
    gc.freeze()  # what was inherited is not this process's to finalise, nor to copy by touching it
    random.seed()
    np.random.seed()
    torch.default_generator.seed()


class _Helper:
    """Walks lists, in one process."""

    def __init__(self, board: PrefetchQueue, number: int, store: Store, read: Read) -> None:
        self._board, self._number, self._store, self._source = board, number, store, read
        store.filler.ahead = True
        self._seconds = 0.0  # mean time that a sample takes, 0 until known
        # What is being filled: number of the list, and samples with their places in it.
        self._list, self._places = 0, dict[int, int]()

    def bring(self, number: int, ids: Ids) -> None:
        """Bring the samples of this list into the store, as far as there is room and they can be read.

        Returns at once when there is a newer list.
        """
        self._store.room.reopen()  # where there was none for an earlier list, the window has moved since
        left = np.sort(np.unique(ids, return_index=True)[1])  # places in the list
        pause = _SHORTEST_PAUSE
        while len(left := self._absent(number, ids, left)):
            read = False
            for start in range(0, len(left), _LARGEST_CHUNK):
                look = left[start : start + _LARGEST_CHUNK]
                while len(look := self._free(number, ids, look)):
                    self._fill(number, ids, self._share(look))
                    read = True
                    if self._board.number != number:
                        return
                    if self._in_vain:  # nobody needs to wait for the others either
                        self._store.refuse(ids[left])
                        return
            if not read:  # all that is left is claimed by others
                self._board.pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if self._board.number != number:
                    return

    @property
    def _in_vain(self) -> bool:
        """Whether nothing that is read could be stored: there is no room, or no slot to claim with."""
        return self._store.room.is_full or self._store.member.slot < 0

    def _share(self, free: Ids) -> Ids:
        """Those of these places that are this helper's to read next.

        Helpers that look at one moment must not all want the same, and then wait for each other (that took a
        seventh of three helpers' time): the second begins where the first will have got to, and so on.
        """
        most = int(_CHUNK_SECONDS / self._seconds) if self._seconds else 1
        chunk = max(1, min(most, _LARGEST_CHUNK))
        mine = free[self._number * chunk :][:chunk]
        return mine if len(mine) else free[:chunk]

    def _absent(self, number: int, ids: Ids, places: Ids) -> Ids:
        """Those of these places whose samples are to be brought, and not given up."""
        places = places[self._store.index.missing(ids[places])]
        return places[~self._board.given_up(number, places)] if len(places) else places

    def _free(self, number: int, ids: Ids, places: Ids) -> Ids:
        """Those of the absent ones that nobody alive is reading."""
        places = self._absent(number, ids, places)
        words = self._store.words(ids[places])
        read = [word for word in set(words.tolist()) if CLAIMED <= word < PRESENT and self._is_open(word)]
        return places[~np.isin(words, read)] if read else places

    def _is_open(self, word: int) -> bool:
        return self._store.filler.claims.is_open(word)

    def _fill(self, number: int, ids: Ids, places: Ids) -> None:
        """Read the samples at these places; those that raise, or cannot be stored, are given up."""
        self._list, self._places = number, dict(zip(ids[places].tolist(), places.tolist(), strict=True))
        start = time.perf_counter()
        in_vain: Iterable[int] = ()
        try:
            in_vain = self._store.fill(ids[places], self._read, keep=False)
            # One that draws, where that could not be put down, would be read for ever.
            for place in self._absent(number, ids, places).tolist():
                self._board.give_up(number, place)
        except _GivenUp:
            self._store.refuse(ids[places][self._board.given_up(number, places)])
        except Exception:  # of the store's own
            self._report()
            in_vain = self._places
        each = (time.perf_counter() - start) / len(places)
        self._seconds = 0.9 * self._seconds + 0.1 * each if self._seconds else each
        for sample in in_vain:
            self._board.give_up(number, self._places[sample])

    def _read(self, sample: int) -> Any:
        """Read a sample that is claimed, unless another helper has tried, after it was looked at here."""
        place = self._places[sample]
        if self._board.given_up(self._list, np.array([place])).all():
            raise _GivenUp
        try:
            return self._source(sample)
        except Exception:
            self._report()
            self._board.give_up(self._list, place)  # before the claim on it ends
            raise _GivenUp from None

    def _report(self) -> None:
        where = f"in helper process {os.getpid()}, which fills the cache"
        self._board.report(self._number, ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]


class _GivenUp(Exception):
    """This sample was tried in vain, and is not to be tried again."""
