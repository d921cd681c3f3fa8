"""What a process does that takes batches: the loops over its loaders, of which one has taken the most time.

The clocks of :mod:`~hotset.run.doctor.loop` are around each batch.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from hotset.run.doctor.fetching import WorkerWatch
from hotset.run.doctor.loop import LEAST_BATCHES, LoaderSettings, Loop, begins, facts_of
from hotset.run.ledger import THREADS, Ledger

__all__ = ["TrainingWatch"]


class TrainingWatch:
    """Watches where torch's iterators are asked for a batch, and where they give one."""

    def __init__(self, ledger: Ledger, worker: WorkerWatch, write_soon: Callable[[], bool]) -> None:
        self._ledger = ledger
        self._worker = worker  # of this process: a loop without workers makes its batches itself
        self._write_soon = write_soon
        self._loops: dict[str, Loop] = {}
        self._loop_of: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()
        self._settings: dict[Loop, LoaderSettings] = {}  # they keep datasets: see _remember
        self._has_threads = False

    def is_watched(self) -> bool:
        """Whether this thread is; the ledger notes if another one takes batches."""
        if threading.current_thread() is threading.main_thread():
            return True
        if not self._has_threads:
            self._has_threads = True
            self._ledger.mark(THREADS)
        return False

    def before(self, iterator: Any, made: float | None) -> Loop:
        """The loop asks for a batch from an iterator that was made then; returns what is known of it."""
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
        return loop

    def after(self, iterator: Any, failed: bool, batch: Callable[[], Any]) -> None:
        """The loop gets a batch, or has ``failed`` to: there was none."""
        now, loop = time.perf_counter(), self._loop(iterator)
        if not failed and loop.got_in_rest(now):
            return
        if failed:
            loop.ended()
        else:
            loop.got(iterator, batch)
        if self._write_soon():
            loop.begin_step()
        loop.watched(time.perf_counter() - now)

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
                self._worker.count_for(loop.fetching, fetcher)
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

    def end(self) -> tuple[Loop, LoaderSettings] | None:
        """The loop that has taken the most time, and what a trial needs of its loader; None if none counts.

        What was kept of other loaders is dropped.
        """
        main = self._main()
        settings = None if main is None else self._settings.get(main)
        self._settings.clear()
        if main is None or settings is None:
            return None
        if settings.batches is not None:
            length = main.pass_batches
            settings = settings._replace(batches=None if length is None else max(round(length), 1))
        return main, settings

    def let_go_on(self) -> None:
        """Continue all workers that were stopped."""
        for loop in self._loops.values():
            loop.let_go_on()

    def to_json(self) -> list[dict[str, Any]]:
        return [loop.to_json() for loop in self._loops.values()]
