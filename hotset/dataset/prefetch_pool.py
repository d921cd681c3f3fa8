"""Filling in the background: processes that bring samples into a store while the training goes on.

::

    main process                         board                               helper, one of several
    ask(ids)      ── the newest list ──>  ids  ── looked at between chunks ──>  walk them in order:
    idle          <── lists done ───────────────────────────────────────────    claim, read, publish
    raise_errors  <── what was raised ──────────────────────────────────────    give that sample up

The user's data set is not thread-safe, and a process with threads should not fork: so the work is done by
processes, and no thread watches over them. Asking is one write to shared memory
(:mod:`hotset.dataset.prefetch_queue`). All helpers walk the same list
(:mod:`hotset.dataset.prefetch_worker`); claims in the store share it out among them.

Each of them may be killed at any time; a claim of the dead is void, and what was published is whole.

==================================  ========================================================================
a helper is killed, or crashes      the next :meth:`PrefetchPool.ask` starts another; one warning
a helper fails before it begins     it would fail each time: nothing is filled any more; one warning
the main process dies, however      the kernel kills the helpers, in the midst of a read too
the main process is forked          the child's copy is as if it had never been asked
``close()``, garbage, the end       the helpers are killed, whatever they are at
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
from hotset.dataset.prefetch_queue import PrefetchQueue
from hotset.dataset.prefetch_worker import NOT_BEGUN, Carried, Read, helper_process
from hotset.store.claims import Ids
from hotset.store.store import Store

__all__ = ["PrefetchPool"]

_JOIN_SECONDS = 5.0


class PrefetchPool:
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
        >>> import time, numpy as np, torch
        >>> from hotset.store.schema import Schema
        >>> rows = torch.arange(8.0).view(4, 2)
        >>> store = Store.create(Schema.infer([rows[0]], as_lies=False), samples=4, limit=1 << 20, about={})
        >>> background = PrefetchPool(store, rows.__getitem__, processes=1)
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
        self._board: PrefetchQueue | None = None
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
                self._board = PrefetchQueue.create(self._processes)
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
            _reap(helper)
        self._forget()

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At the interpreter's end anything may be gone already, what this module has imported too.
        with suppress(Exception):
            self.close()

    def _start_helpers(self, board: PrefetchQueue) -> None:
        context = self._context or torch.multiprocessing  # whose default its first use settles, not sooner
        for number in range(self._processes):
            if number in self._helpers:
                continue
            board.done[number] = NOT_BEGUN
            helper = context.Process(
                target=helper_process,
                args=(board.address, number, Carried(self._store), self._read),
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
            code, begun = helper.exitcode, self._board.done[number] != NOT_BEGUN
            _reap(self._helpers.pop(number))
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
            warn(sentence)

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


_backgrounds: weakref.WeakSet[PrefetchPool] = weakref.WeakSet()


def _forget_inherited() -> None:
    for background in list(_backgrounds):
        background._forget()


os.register_at_fork(after_in_child=_forget_inherited)


def _reap(helper: Any) -> None:
    helper.join(_JOIN_SECONDS)
    if helper.exitcode is not None:  # else it hangs in the kernel, over a disk that is gone, say
        helper.close()
