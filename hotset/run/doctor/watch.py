"""In each process of a program that ``hotset doctor`` runs: what torch's loaders do there is noted.

The clocks of :mod:`~hotset.run.doctor.loop` are around each batch, where torch's iterators call
:class:`Observer`; those of :mod:`~hotset.run.doctor.fetching` are around each fetch and each decoder, by
hooks. A process writes what it has seen to a file of its own in the ledger, once a second at most, and at
its end. ``hotset doctor`` reads these when the program has ended. Nothing is sent while a batch is waited
for.

A process that trains also knows when that is enough: then the first of them tries a cache, in a fork, and
``hotset doctor`` ends the program.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hotset.run.doctor import decoding
from hotset.run.doctor.fetching import Fetching
from hotset.run.doctor.ledger import (
    DONE,
    INTERRUPTED,
    LEAST_BATCHES,
    MEMORY,
    OURS,
    THREADS,
    TOLD,
    TRIAL,
    TRYING,
    WATCHED,
    Ledger,
)
from hotset.run.doctor.loop import LoaderSettings, Loop, begins, facts_of, workers_of
from hotset.run.environment import WatchOptions
from hotset.run.import_hook import Hook

__all__ = ["Observer", "hooks"]

_WRITE_SECONDS = 1.0  # it takes a millisecond
_LOOK_SECONDS, _SIGNAL_SECONDS = 0.02, 5.0  # a launcher may pass it on later
_LEAST_EPOCH_SECONDS = 10.0  # a pass that took as long is enough to judge by


class _Process:
    """All that is known in this process; a forked one begins anew."""

    def __init__(self, options: WatchOptions) -> None:
        self.options = options
        self.pid = os.getpid()
        self._ledger = Ledger(options.ledger)
        self._fetching = Fetching()  # of a worker
        self._fetching_here: weakref.WeakKeyDictionary[Any, Fetching] = weakref.WeakKeyDictionary()
        self._inside: Fetching | None = None  # a fetch
        self._loops: dict[str, Loop] = {}
        self._loop_of: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()
        self._settings: dict[Loop, LoaderSettings] = {}  # they keep datasets: see _remember
        self._begun: float | None = None  # when the first batch was there
        self._written = time.perf_counter()
        self._over = self._has_threads = False
        self._makes_batches = _is_loader_worker()
        if self._makes_batches:  # atexit does not run there
            multiprocessing.util.Finalize(None, self.write, kwargs={"last": True}, exitpriority=0)

    # ---- making batches

    def fetch(self, fetcher: Any, plain: Callable[[Any, Any], Any], indices: Any, begun: float) -> Any:
        """A fetch, which whoever trains without workers calls, too; it was called at this time."""
        if self._over or threading.current_thread() is not threading.main_thread():
            return plain(fetcher, indices)
        outer, fetching = self._inside, self._fetching_here.get(fetcher, self._fetching)
        try:
            # Where samples are small, contextlib.suppress takes as much as the clocks.
            try:  # noqa: SIM105
                self._inside = fetching if fetching.begin(fetcher, begun) else None
            except Exception:  # watching that fails
                pass
            value = plain(fetcher, indices)
            try:
                fetching.end(fetcher, indices)
                self.write_soon()
                _rest(fetcher, fetching)
            except Exception:
                pass
            return value
        finally:
            self._inside = outer

    def decode(self, name: str, call: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """A decoder is called."""
        return call() if self._inside is None else self._inside.decode(name, call, size)

    # ---- training: as an observer of torch's iterators; see hotset.run.loader_wait

    def before(self, iterator: Any, made: float | None) -> Loop | None:
        """The loop asks for a batch from an iterator that was made then; returns what is known of it."""
        if not self._is_watched():
            return None
        now, is_first = time.perf_counter(), begins(iterator)
        loop = self._loop(iterator)
        if not is_first and loop.asked_in_rest(now):
            return loop
        if is_first:
            self._interrupt_others(loop)
        if is_first or loop not in self._settings:
            self._remember(loop, iterator)
        loop.asked(iterator, made)
        loop.watched(time.perf_counter() - now)
        self._end_if_time(iterator, pass_ended=False)
        return loop

    def after(self, iterator: Any, failed: bool, batch: Callable[[], Any]) -> None:
        if not self._is_watched():
            return
        now, loop = time.perf_counter(), self._loop(iterator)
        if not failed and loop.got_in_rest(now):
            return
        if self._begun is None:
            self._begun = now
            self._call_at_exit()
        if failed:
            loop.ended()
            self._end_if_time(None, pass_ended=True)
        else:
            loop.got(iterator, batch)
        if self.write_soon():
            loop.begin_step()
        loop.watched(time.perf_counter() - now)

    def _is_watched(self) -> bool:
        if self._over:
            return False
        if threading.current_thread() is threading.main_thread():
            return True
        if not self._has_threads:
            self._has_threads = True
            self._ledger.write(THREADS, "")
        return False

    def _loop(self, iterator: Any) -> Loop:
        loop = self._loop_of.get(iterator)
        if loop is None:
            facts = facts_of(iterator)  # once: the dataset's length may take long
            key = json.dumps(facts, default=str)
            if key not in self._loops:
                self._loops[key] = Loop(facts, self._ledger)
            loop = self._loop_of[iterator] = self._loops[key]
            fetcher = getattr(iterator, "_dataset_fetcher", None)  # there is one without workers
            if fetcher is not None:
                self._fetching_here[fetcher] = loop.fetching
        return loop

    def _interrupt_others(self, loop: Loop) -> None:
        for other in self._loops.values():
            if other is not loop:
                other.interrupt()

    def _remember(self, loop: Loop, iterator: Any) -> None:
        """Keep what a trial needs of the main loop and of this one: the program may drop other datasets."""
        main = self._main()
        self._settings = {one: kept for one, kept in self._settings.items() if one is main}
        self._settings[loop] = LoaderSettings.of(iterator, loop.facts)

    def _main(self) -> Loop | None:
        """The loop that has taken the most time."""
        seen = [loop for loop in self._loops.values() if loop.batches >= LEAST_BATCHES]
        return max(seen, key=lambda loop: loop.seconds, default=None)

    # ---- the end

    def _end_if_time(self, iterator: Any, *, pass_ended: bool) -> None:
        if self._begun is None or self._makes_batches:
            return
        watched = time.perf_counter() - self._begun
        if watched >= self.options.seconds or (pass_ended and watched >= _LEAST_EPOCH_SECONDS):
            has_tried = self._stop(iterator)
            # The program is ended when this is there: of several ranks, the one that has tried writes it.
            if has_tried or not self._ledger.has(TRYING):
                _say_done(self.options)

    def _call_at_exit(self) -> None:
        """Have the end of this process noticed."""
        if self._makes_batches:
            return
        if multiprocessing.parent_process() is None:
            atexit.register(lambda: self._at_exit(getattr(sys, "last_type", None)))
        else:  # multiprocessing's processes do not run atexit
            multiprocessing.util.Finalize(
                None, lambda: self._at_exit(sys.exc_info()[0], raises=False), exitpriority=0
            )

    def _at_exit(self, error: type[BaseException] | None, *, raises: bool = True) -> None:
        """The program ends before its time, by itself or by Ctrl-C; if by an error, there is no report."""
        if os.getpid() != self.pid:
            return
        if error is not None and not issubclass(error, (KeyboardInterrupt, SystemExit)):
            return
        interrupted = error is not None and issubclass(error, KeyboardInterrupt)
        if interrupted:
            self._ledger.write(INTERRUPTED, "")
        if not self._over:
            with contextlib.suppress(Exception):  # the program has ended well
                self._stop(None)
        if interrupted and raises:
            # Python ends by SIGINT if the last text that it has executed ended so; the trial's have not.
            with contextlib.suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _stop(self, iterator: Any) -> bool:
        """Stop watching, and try what a cache would give, if no other process of the program has.

        Returns:
            Whether it was tried here.
        """
        self._over = True
        for loop in self._loops.values():
            loop.let_go_on()
        self.write(last=True)
        watch_no_more()
        main = self._main()
        if main is None or main not in self._settings or not self._ledger.is_first(TRYING):
            return False
        settings = self._settings[main]
        if settings.batches is not None:
            length = main.pass_batches
            settings = settings._replace(batches=None if length is None else max(round(length), 1))
        self._settings.clear()
        workers = workers_of(iterator)
        self._ledger.pause(workers)
        try:
            # Imported here: it imports torch, as the program has done by now.
            from hotset.run.doctor.observed import decodes_any
            from hotset.run.doctor.trial import in_fork

            decodes = decodes_any(self.options.ledger)
            step, drops = main.step()
            self._ledger.write(TRIAL, in_fork(settings, step, drops=drops, decodes=decodes))
        finally:
            self._ledger.resume(workers)
        return True

    # ---- the ledger

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
        remembers = last and self._fetching.is_unread and self._ledger.is_first(MEMORY)
        fetching = self._fetching.to_json(memory=remembers)
        loops = [loop.to_json() for loop in self._loops.values()]
        if fetching or loops:
            found = {"pid": self.pid, "fetching": fetching, "loops": loops}
            self._ledger.write(f"{WATCHED}{self.pid}.json", json.dumps(found))


def _is_loader_worker() -> bool:
    """Whether this process is a worker of a loader; another one that the program has started may train."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


_here: _Process | None = None
_off = False


def _process(options: WatchOptions) -> _Process:
    global _here
    if _here is None or _here.pid != os.getpid():
        _here = _Process(options)
    return _here


# The fetcher that has made a batch last, what is known of it, and until when its clocks rest: a call of all
# that is above would take 1 % of batches of 2 ms, as the processor has forgotten it since the last one.
_resting: tuple[Callable[[], Any], Fetching] | None = None
_resting_until = 0.0


def _rest(fetcher: Any, fetching: Fetching) -> None:
    global _resting, _resting_until
    if _resting is None or _resting[0]() is not fetcher:
        _resting = weakref.ref(fetcher), fetching
    _resting_until = fetching.rests.until


def watch_no_more() -> None:
    """In this process, and in those that it forks from now on."""
    global _off
    _off = True


def _say_done(options: WatchOptions) -> None:
    """Have ``hotset doctor`` end the program, and wait here for its SIGINT.

    Python drops the exception of a SIGINT that comes while it calls what is registered for a fork, such as
    that of a worker, or a finalizer; here nothing drops it. A handler that raises nothing lets the program go
    on, as after Ctrl-C.
    """
    ledger = Ledger(options.ledger)
    ledger.write(DONE, "")
    begin = time.monotonic()
    while options.ends and not ledger.has(TOLD) and time.monotonic() < begin + _SIGNAL_SECONDS:
        time.sleep(_LOOK_SECONDS)


class Observer:
    """What torch's iterators call, in whichever process.

    If watching fails, it ends, and the report says so: the program must not fail.
    """

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._said = False
        # The iterator that was asked last, and its loop: while the clocks rest, all but counting is left out.
        # After a step the processor has forgotten what is called here, and a call takes eight times as long.
        self._last: tuple[weakref.ref[Any], Loop] | None = None
        self._made: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def made(self, iterator: Any) -> None:
        if not _off:
            self._made[iterator] = time.perf_counter()

    def before(self, iterator: Any) -> None:
        if _off:
            return
        loop = self._last_loop(iterator)
        if loop is not None and loop.asked_in_rest(time.perf_counter()):
            return
        if not self._is_ours(iterator):
            try:
                loop = _process(self._options).before(iterator, self._made.pop(iterator, None))
                self._last = None if loop is None else (weakref.ref(iterator), loop)
            except Exception as error:
                self._end_watching(error)

    def after(self, iterator: Any, seconds: float, failed: bool, batch: Callable[[], Any]) -> None:
        if _off:
            return
        loop = self._last_loop(iterator)
        if not failed and loop is not None and loop.got_in_rest(time.perf_counter()):
            return
        if not self._is_ours(iterator):
            try:
                _process(self._options).after(iterator, failed, batch)
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
            Ledger(self._options.ledger).write(OURS, "")
        return ours

    def _end_watching(self, error: Exception) -> None:
        watch_no_more()
        ledger = Ledger(self._options.ledger)
        ledger.write(TRIAL, json.dumps({"refused": f"{type(error).__name__}: {error}", "loaders": {}}))
        _say_done(self._options)


# ---- hooks -----------------------------------------------------------------------------------------------


def hooks(options: WatchOptions) -> Iterator[tuple[str, Hook]]:
    """The hooks that put the clocks around fetches and decoders."""
    yield "torch.utils.data._utils.fetch", functools.partial(_time_fetches, options)
    yield from decoding.hooks(functools.partial(_decode, options))


def _decode(options: WatchOptions, name: str, call: Callable[[], Any], size: Callable[[Any], int]) -> Any:
    return call() if _off else _process(options).decode(name, call, size)


def _time_fetches(options: WatchOptions, module: Any) -> None:
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        plain = kind.fetch

        def fetch(self: Any, indices: Any, plain: Any = plain) -> Any:
            if _off:
                return plain(self, indices)
            begun = time.perf_counter()
            if _resting is not None and _resting[0]() is self and begun < _resting_until:
                fetching = _resting[1]
                value = plain(self, indices)
                fetching.made(len(indices) if self.auto_collation else 1)
                return value
            return _process(options).fetch(self, plain, indices, begun)

        kind.fetch = functools.wraps(plain)(fetch)
