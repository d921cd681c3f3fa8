"""In each process of a program that ``hotset doctor`` runs: what torch's loaders do there is noted.

There is one :class:`Watch` in an interpreter and in all processes that it forks. Torch's iterators call it
around each batch, and hooks call it around each fetch and each decoder. What it knows of a process begins
anew in a fork: :mod:`~hotset.run.doctor.fetching` as far as it makes batches,
:mod:`~hotset.run.doctor.training_watch` as far as it takes them, and :mod:`~hotset.run.doctor.finish`, by
which a process that trains ends the watching.

A process writes what it has seen to a file of its own in the ledger, once a second at most, and at its end.
``hotset doctor`` reads these when the program has ended. Nothing is sent while a batch is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hotset.run.doctor import decoding
from hotset.run.doctor.fetching import Resting, WorkerWatch
from hotset.run.doctor.finish import Finish, say_done
from hotset.run.doctor.loop import Loop, begins
from hotset.run.doctor.training_watch import TrainingWatch
from hotset.run.environment import WatchOptions
from hotset.run.import_hook import Hook
from hotset.run.ledger import MEMORY, OURS, TRIAL, TRYING, WATCHED, Ledger

__all__ = ["Watch", "install", "installed"]

_WRITE_SECONDS = 1.0  # it takes a millisecond


class _Process:
    """What watches in this process, and its file."""

    def __init__(self, options: WatchOptions, stop: Callable[[], bool]) -> None:
        self.pid = os.getpid()
        self._ledger = Ledger(options.ledger)
        self._written = time.perf_counter()
        self.worker = WorkerWatch(self.write_soon)
        self.training = TrainingWatch(self._ledger, self.worker, self.write_soon)
        # A worker that takes batches itself ends nothing.
        self.finish: Finish | None = None
        if _is_loader_worker():  # atexit does not run there
            multiprocessing.util.Finalize(None, self.write, kwargs={"last": True}, exitpriority=0)
        else:
            self.finish = Finish(options, self.training, stop)

    def before(self, iterator: Any, made: float | None) -> Loop | None:
        """See :class:`~.loader_wait.Observer`; the iterator was made at this time, if that is known."""
        if not self.training.is_watched():
            return None
        loop = self.training.before(iterator, made)
        if self.finish is not None:
            self.finish.if_time(iterator, pass_ended=False)
        return loop

    def after(self, iterator: Any, failed: bool, batch: Callable[[], Any]) -> None:
        if not self.training.is_watched():
            return
        if self.finish is not None:
            self.finish.begin()
        self.training.after(iterator, failed, batch)
        if failed and self.finish is not None:
            self.finish.if_time(None, pass_ended=True)

    def write_soon(self) -> bool:
        """Write now if that is due, once a second; whether it was."""
        now = time.perf_counter()
        is_due = now - self._written > _WRITE_SECONDS
        if is_due:
            self._written = now
            self.write()
        return is_due

    def write(self, *, last: bool = False) -> None:
        """Write what this process has seen; ``last`` as it ends."""
        if os.getpid() != self.pid or self._ledger.has(TRYING):
            return  # a worker that was stopped for the trial has a fetch as long as that
        # Of workers that live shortly one is enough: the kernel takes milliseconds to say their memory.
        remembers = last and self.worker.fetching.is_unread and self._ledger.mark(MEMORY)
        fetching = self.worker.fetching.to_json(memory=remembers)
        loops = self.training.to_json()
        if fetching or loops:
            found = {"pid": self.pid, "fetching": fetching, "loops": loops}
            self._ledger.write(f"{WATCHED}{self.pid}.json", json.dumps(found))


def _is_loader_worker() -> bool:
    """Whether this process is a worker of a loader; another one that the program has started may train."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


class Watch:
    """What torch's iterators and the hooks call, in whichever process: a :class:`~.loader_wait.Observer`.

    If watching fails, it ends, and the report says so: the program must not fail.

    Attributes:
        is_off: whether nothing is watched, in this process and in those that it forks from now on.
    """

    def __init__(self, options: WatchOptions) -> None:
        self.is_off = False
        self._options = options
        self._process: _Process | None = None
        self._said = False
        # The iterator that was asked last, and its loop: while the clocks rest, all but counting is left out.
        # After a step the processor has forgotten what is called here, and a call takes eight times as long.
        self._last: tuple[weakref.ref[Any], Loop] | None = None
        self._made: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._resting: Resting | None = None  # for the same reason

    def _here(self) -> _Process:
        if self._process is None or self._process.pid != os.getpid():
            self._process = _Process(self._options, self.stop)
        return self._process

    def stop(self) -> bool:
        """Watch no more, and write what was seen; whether it was watched until now."""
        if self.is_off:
            return False
        self.is_off = True
        self._here().training.let_go_on()
        self._here().write(last=True)
        return True

    # ---- around a batch

    def made(self, iterator: Any) -> None:
        if not self.is_off:
            self._made[iterator] = time.perf_counter()

    def before(self, iterator: Any) -> None:
        if self.is_off:
            return
        loop = self._last_loop(iterator)
        if loop is not None and loop.asked_in_rest(time.perf_counter()):
            return
        if not self._is_ours(iterator):
            try:
                loop = self._here().before(iterator, self._made.pop(iterator, None))
                self._last = None if loop is None else (weakref.ref(iterator), loop)
            except Exception as error:
                self._end_watching(error)

    def after(self, iterator: Any, seconds: float, failed: bool, batch: Callable[[], Any]) -> None:
        if self.is_off:
            return
        loop = self._last_loop(iterator)
        if not failed and loop is not None and loop.got_in_rest(time.perf_counter()):
            return
        if not self._is_ours(iterator):
            try:
                self._here().after(iterator, failed, batch)
            except Exception as error:
                self._end_watching(error)

    def _last_loop(self, iterator: Any) -> Loop | None:
        """The loop of this iterator, if it was asked last and its pass has begun."""
        if self._last is None or self._last[0]() is not iterator or begins(iterator):
            return None
        return self._last[1]

    def _is_ours(self, iterator: Any) -> bool:
        """Whether it is the iterator by which hotset.DataLoader has its workers: its samples are tasks."""
        ours = type(getattr(iterator, "_dataset", None)).__module__.startswith("hotset.loader.")
        if ours and not self._said:
            self._said = True
            Ledger(self._options.ledger).mark(OURS)
        return ours

    def _end_watching(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self.stop()
        ledger = Ledger(self._options.ledger)
        ledger.write(TRIAL, json.dumps({"refused": f"{type(error).__name__}: {error}", "loaders": {}}))
        say_done(self._options)

    # ---- around a fetch, and a decoder

    def hooks(self) -> Iterator[tuple[str, Hook]]:
        """The hooks that put the clocks around fetches and decoders."""
        yield "torch.utils.data._utils.fetch", self._time_fetches
        yield from decoding.hooks(self._decode)

    def _decode(self, name: str, call: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        return call() if self.is_off else self._here().worker.decode(name, call, size)

    def _time_fetches(self, module: Any) -> None:
        for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
            plain = kind.fetch

            def fetch(fetcher: Any, indices: Any, plain: Any = plain) -> Any:
                if self.is_off:
                    return plain(fetcher, indices)
                begun, resting = time.perf_counter(), self._resting
                if resting is not None and begun < resting.until and resting.fetcher() is fetcher:
                    value = plain(fetcher, indices)
                    resting.fetching.made(len(indices) if fetcher.auto_collation else 1)
                    return value
                worker = self._here().worker
                value = worker.fetch(fetcher, plain, indices, begun)
                self._resting = worker.resting
                return value

            kind.fetch = functools.wraps(plain)(fetch)


_installed: Watch | None = None


def install(options: WatchOptions) -> Watch:
    """The watch of this interpreter, made as it starts; the caller has torch call it."""
    global _installed
    _installed = Watch(options)
    return _installed


def installed() -> Watch | None:
    """The watch of this interpreter; None if ``hotset doctor`` has not started it."""
    return _installed
