"""Filling in the background: processes that bring samples into a store while the training goes on.

::

    main process                         board                               helper, one of several
    ask(ids)      ── the newest list ──>  ids  ── looked at between chunks ──>  walk them in order:
    idle          <── lists done ───────────────────────────────────────────    claim, read, publish
    raise_errors  <── what was raised ──────────────────────────────────────    give that sample up

The user's data set is not thread-safe, and a process with threads should not fork: so the work is done by
processes, and no thread watches over them. Asking is one write to shared memory (:mod:`hotset.data.board`).
All helpers walk the same list; claims in the store share it out among them, loader workers and other ranks.
A helper passes over what others have claimed, and comes back for it at the end: they may die, or give up.

Each of them may be killed at any time; a claim of the dead is void, and what was published is whole.

==================================  ========================================================================
a helper is killed, or crashes      the next :meth:`Background.ask` starts another; one warning
a helper fails before it begins     it would fail each time: nothing is filled any more; one warning
the main process dies, however      the kernel kills the helpers, in the midst of a read too
the main process is forked          the child's copy is as if it had never been asked
``close()``, garbage, the end       the helpers are killed, whatever they are at
==================================  ========================================================================
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper

from hotset.data.board import Address, Board
from hotset.session.share import attach_again
from hotset.store.allocator import keep_freed_memory
from hotset.store.claims import Ids
from hotset.store.format import CLAIMED, PRESENT
from hotset.store.store import Store
from hotset.told import tell

__all__ = ["Background"]

Read = Callable[[int], Any]

_JOIN_SECONDS = 5.0
_NOT_BEGUN = -1
# Training comes first; but with less than this share of a busy core a window would hardly move.
_NICE = 5


class Background:
    """Helper processes that fill a store. Nothing is started before the first :meth:`ask`.

    It is used by one thread at a time. A forked child that asks begins anew, with helpers of its own.

    Args:
        store: what to fill. Helpers that are forked inherit it, others attach to its memory.
        read: gives the sample of a number (an id of the store); it runs in the helpers only.
        processes: how many helpers there are, at least 1.
        context: a multiprocessing context, or its name; None for torch's default, as in a DataLoader.

    Raises:
        ValueError: there is no context of that name.

    Example:
        >>> from hotset.store.schema import Schema
        >>> rows = torch.arange(8.0).view(4, 2)
        >>> store = Store.create(Schema.infer([rows[0]], as_lies=False), samples=4, limit=1 << 20, about={})
        >>> background = Background(store, rows.__getitem__, processes=1)
        >>> background.ask(np.arange(4))  # returns at once
        >>> while not background.idle:
        ...     time.sleep(0.01)
        >>> store.holds(), store.read(np.array([3]))
        (True, [tensor([6., 7.])])
        >>> background.close()
        >>> store.close()
    """

    def __init__(self, store: Store, read: Read, *, processes: int, context: Any = None) -> None:
        self._store, self._read, self._processes = store, read, processes
        self._context: Any = (
            torch.multiprocessing.get_context(context) if isinstance(context, str) else context
        )
        self._board: Board | None = None
        self._helpers: dict[int, Any] = {}
        self._hopeless = self._told = False
        _backgrounds.add(self)

    def ask(self, ids: Ids) -> None:
        """Say which samples are wanted now, in this order; what was asked for before is dropped.

        Starts the helpers at first use, and anew those that have died since.

        Args:
            ids: numbers of samples, int64; those that are in the store already cost nothing.

        Warns:
            HotsetWarning: a helper has died, or none can be started.

        Raises:
            IndexError: the store has no such sample.
        """
        self._bury_the_dead()
        if self._hopeless:
            return
        wanted = len(ids) > 0 and not self._store.holds(ids)
        try:
            if self._board is None:
                self._board = Board.create(self._processes)
            self._board.post(ids)
            if wanted:
                self._start_helpers(self._board)
        except Exception as error:
            # A script without a main guard runs again in each helper that is spawned, and must end there.
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise
            why = f"No helper can be started: {type(error).__name__}: {error}. {self._advice(error)}"
        else:
            return
        self._give_up(why)

    def raise_errors(self) -> None:
        """Raise, once, what ``read`` has raised in a helper; the traceback there is in the message.

        That sample was given up, and the helper has gone on. Each helper keeps one error until it is raised
        here, and lets go of those that follow meanwhile. Costs a microsecond or two where there is none.
        """
        error = self._board.take_error() if self._board is not None else None
        if error is not None:
            error.reraise()  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        """Whether no helper has anything left to do. One that has died has not."""
        board = self._board
        return board is None or all(
            board.done[number] == board.number or not helper.is_alive()
            for number, helper in self._helpers.items()
        )

    def close(self) -> None:
        """Kill the helpers, and return once they are gone. It may be called again, and in a forked child."""
        helpers, self._helpers = self._helpers, {}
        for helper in helpers.values():
            helper.kill()
        for helper in helpers.values():
            _bury(helper)
        self._forget()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone already
            self.close()

    def _start_helpers(self, board: Board) -> None:
        context = self._context or torch.multiprocessing  # whose default its first use settles, not sooner
        for number in range(self._processes):
            if number in self._helpers:
                continue
            board.done[number] = _NOT_BEGUN
            helper = context.Process(
                target=_help,
                args=(board.address, number, _Carried(self._store), self._read),
                name=f"hotset-fill-{number}",
                daemon=True,
            )
            helper.start()
            self._helpers[number] = helper

    def _bury_the_dead(self) -> None:
        for number, helper in list(self._helpers.items()):
            if helper.is_alive():
                continue
            assert self._board is not None
            code, begun = helper.exitcode, self._board.done[number] != _NOT_BEGUN
            _bury(self._helpers.pop(number))
            if code > 0 and not begun:
                self._give_up("A helper failed before it began, and what it wrote to stderr says why.")
                return
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self._tell(
                f"A helper that fills the cache in the background died ({how}); it is started again. If the "
                "kernel killed it for want of memory, lower `memory=`."
            )

    def _give_up(self, why: str) -> None:
        self.close()
        self._hopeless, self._told = True, False
        self._tell(f"{why} Nothing is filled in the background: samples are read when they are needed.")

    def _tell(self, sentence: str) -> None:
        if not self._told:
            self._told = True
            tell(sentence)

    def _advice(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return "Look at the limits of this shell (`ulimit -a`)."
        if multiprocessing.current_process().daemon:
            return "Helpers are started by the process that trains, and not by a worker."
        return (
            "A start method other than fork pickles the data set: define what it holds at the top level of a "
            'module, or pass `multiprocessing_context="fork"`.'
        )

    def _forget(self) -> None:
        """Let go of the board, and in a forked child of helpers that are not its own."""
        self._helpers = {}
        board, self._board = self._board, None
        if board is not None:
            board.close()


_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()


def _forget_inherited() -> None:
    # In helpers as well: a leash's writing end that one of them kept would hold the others alive.
    for background in list(_backgrounds):
        background._forget()


os.register_at_fork(after_in_child=_forget_inherited)


def _bury(helper: Any) -> None:
    helper.join(_JOIN_SECONDS)
    if helper.exitcode is not None:  # else it hangs in the kernel, over a disk that is gone, say
        helper.close()


# ---- in a helper -----------------------------------------------------------------------------------------

# A helper claims what takes it about this long. It is what a store's filler claims at once: of more, others
# would claim a part meanwhile, and be waited for. It is also how soon a newer list is noticed.
_CHUNK_SECONDS = 8e-3
_LARGEST_CHUNK = 64
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 50e-3


class _Carried:
    """A store on its way into a helper: a fork inherits it; pickled, it is attached to anew."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getstate__(self) -> Any:
        return self.store.segment.address, type(self.store).attach

    def __setstate__(self, state: Any) -> None:
        self.store = attach_again(*state)


def _help(address: Address, number: int, carried: _Carried, read: Read) -> None:
    """What a helper process runs, until it is killed."""
    board = Board.attach(address)
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

    def __init__(self, board: Board, number: int, store: Store, read: Read) -> None:
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
        """Those of these places whose samples are not in the store, and not given up."""
        places = places[self._store.words(ids[places]) < PRESENT]
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
