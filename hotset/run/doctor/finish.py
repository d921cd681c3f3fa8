"""The end of watching, in a process that trains: it was long enough, or the program ends before.

Of all processes of the program, the first that comes here tries what a cache would give, in a fork. Then
``hotset doctor`` is told that it may end the program.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from hotset.run.doctor.loop import workers_of
from hotset.run.doctor.training_watch import TrainingWatch
from hotset.run.environment import WatchOptions
from hotset.run.ledger import DONE, INTERRUPTED, TOLD, TRIAL, TRYING, Ledger

__all__ = ["Finish", "say_done"]

_LOOK_SECONDS, _SIGNAL_SECONDS = 0.02, 5.0  # a launcher may pass it on later


class Finish:
    """When the watching of this process ends, and what follows.

    Args:
        options: say for how long it is watched.
        stop: stops watching here, and writes what was seen; returns whether it had not been stopped before.
    """

    def __init__(self, options: WatchOptions, training: TrainingWatch, stop: Callable[[], bool]) -> None:
        self._options = options
        self._ledger = Ledger(options.ledger)
        self._training = training
        self._stop_watching = stop
        self._pid = os.getpid()
        self._begun: float | None = None  # when the first batch was there

    def begin(self) -> None:
        """A batch is there."""
        if self._begun is None:
            self._begun = time.perf_counter()
            self._call_at_exit()

    def if_time(self, iterator: Any, *, pass_ended: bool) -> None:
        """End it if that was long enough; ``iterator`` is the one that is gone through, if there is one."""
        if self._begun is None:
            return
        watched = time.perf_counter() - self._begun
        if watched >= self._options.seconds or (pass_ended and watched >= self._options.epoch_seconds):
            has_tried = self._stop(iterator)
            # The program is ended when this is there: of several ranks, the one that has tried writes it.
            if has_tried or not self._ledger.has(TRYING):
                say_done(self._options)

    def _call_at_exit(self) -> None:
        """Have the end of this process noticed."""
        if multiprocessing.parent_process() is None:
            atexit.register(lambda: self._at_exit(getattr(sys, "last_type", None)))
        else:  # multiprocessing's processes do not run atexit
            multiprocessing.util.Finalize(
                None, lambda: self._at_exit(sys.exc_info()[0], raises=False), exitpriority=0
            )

    def _at_exit(self, error: type[BaseException] | None, *, raises: bool = True) -> None:
        """The program ends before its time, by itself or by Ctrl-C; if by an error, there is no report."""
        if os.getpid() != self._pid:
            return
        if error is not None and not issubclass(error, (KeyboardInterrupt, SystemExit)):
            return
        interrupted = error is not None and issubclass(error, KeyboardInterrupt)
        if interrupted:
            self._ledger.mark(INTERRUPTED)
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
        if not self._stop_watching():
            return False
        found = self._training.end()
        if found is None or not self._ledger.mark(TRYING):
            return False
        main, settings = found
        workers = workers_of(iterator)
        self._ledger.pause(workers)
        try:
            # Imported here: it imports torch, as the program has done by now.
            from hotset.run.doctor.observed import decodes_any
            from hotset.run.doctor.trial import in_fork

            decodes = decodes_any(self._options.ledger)
            step, drops = main.step()
            self._ledger.write(TRIAL, in_fork(settings, step, drops=drops, decodes=decodes))
        finally:
            self._ledger.resume(workers)
        return True


def say_done(options: WatchOptions) -> None:
    """Have ``hotset doctor`` end the program, and wait here for its SIGINT.

    Python drops the exception of a SIGINT that comes while it calls what is registered for a fork, such as
    that of a worker, or a finalizer; here nothing drops it. A handler that raises nothing lets the program go
    on, as after Ctrl-C.
    """
    ledger = Ledger(options.ledger)
    ledger.mark(DONE)
    begin = time.monotonic()
    while options.ends and not ledger.has(TOLD) and time.monotonic() < begin + _SIGNAL_SECONDS:
        time.sleep(_LOOK_SECONDS)
