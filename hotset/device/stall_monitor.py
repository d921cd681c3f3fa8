"""A thread that watches one consumer, and warns each time that a wait has lasted for the time-out once more.

The consumer may hang in the user's own code (a storage that does not answer), where nothing can be raised;
and a wait that ends after all should not have ended a training run. So the monitor *warns*, and interrupts
nothing. It reads, at least every quarter of the time-out, a clock that the consumer starts and stops.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from hotset._warnings import warn

__all__ = ["StallMonitor"]

T = TypeVar("T")


class StallMonitor:
    """Warns when one consumer waits for more than ``patience`` seconds.

    ``sentence`` returns the warning, given the seconds waited so far.

    Example:
        >>> watch = StallMonitor(60.0, lambda seconds: "nothing comes")
        >>> watch.watched(lambda: "come")
        'come'
        >>> watch.stop()
    """

    def __init__(self, patience: float, sentence: Callable[[float], str]) -> None:
        self._clock = _Clock()
        self._stops: SimpleQueue[None] = SimpleQueue()  # its put may be called by a destructor
        arguments = (self._clock, patience, sentence, self._stops)
        thread = threading.Thread(target=_watch, args=arguments, name="hotset-watch", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: training goes on, and a stall is not named
            thread.start()

    def watched(self, wait: Callable[[], T]) -> T:
        """Return what ``wait()`` returns; the clock runs meanwhile.

        No ``with`` block: an interrupt may come before the first line of its exit, and the clock would run
        on. The ``finally`` here is one store.
        """
        try:
            self._clock.since = time.monotonic()
            return wait()
        finally:
            self._clock.since = None

    def stop(self) -> None:
        """End the thread."""
        self._stops.put(None)

    def __del__(self) -> None:
        self.stop()


class _Clock:
    """When the waiting began; None while the consumer does not wait. Stores of an attribute are atomic."""

    since: float | None = None


def _watch(
    clock: _Clock, patience: float, sentence: Callable[[float], str], stops: SimpleQueue[None]
) -> None:
    patient_until, since = 0.0, None
    pause = min(patience / 4, threading.TIMEOUT_MAX)  # patience may be infinite
    while True:
        try:
            stops.get(timeout=pause)
            return
        except Empty:
            pass
        # In this order: a thread delayed between the two must not warn of a wait that is over.
        now, began = time.monotonic(), clock.since
        if began is None:
            continue
        if began != since:
            since, patient_until = began, began + patience
        if now >= patient_until:
            patient_until = now + patience
            warn(sentence(now - began))
