"""A watch over a consumer that waits: past its patience, people are told what it waits for.

The consumer may hang in the user's own code (a storage that does not answer), where nobody can raise
anything; and a wait that ends after all should not have ended a training run. So a stall is *said*, each time
the patience has passed once more, and nothing is interrupted.

A thread looks, at most every quarter of the patience, at a clock that the consumer starts and stops. It ends
when it is told to, also by a destructor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hotset._warnings import warn

__all__ = ["StallMonitor"]

T = TypeVar("T")


class StallMonitor:
    """Watches one consumer.

    Args:
        patience: seconds.
        what: says what starves, given the seconds so far.

    Example:
        >>> watch = StallMonitor(60.0, lambda seconds: "nothing comes")
        >>> watch.watched(lambda: "come")
        'come'
        >>> watch.stop()
    """

    def __init__(self, patience: float, what: Callable[[float], str]) -> None:
        self._clock = _Clock()
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may be called by a destructor
        arguments = (self._clock, patience, what, self._told)
        threading.Thread(target=_look, args=arguments, name="hotset-watch", daemon=True).start()

    def watched(self, wait: Callable[[], T]) -> T:
        """Return what ``wait()`` does, which the consumer waits for.

        No ``with`` block: an interrupt may come before the first line of what ends that, and the watch would
        go on. The ``finally`` here is one store.
        """
        try:
            self._clock.since = time.monotonic()
            return wait()
        finally:
            self._clock.since = None

    def stop(self) -> None:
        """End it."""
        self._told.put(None)

    def __del__(self) -> None:
        self.stop()


class _Clock:
    """When the waiting began; None while nobody waits. Stores of an attribute are atomic."""

    since: float | None = None


def _look(
    clock: _Clock, patience: float, what: Callable[[float], str], told: queue.SimpleQueue[None]
) -> None:
    patient_until, since = 0.0, None
    pause = min(patience / 4, threading.TIMEOUT_MAX)  # patience may be without end
    while True:
        try:
            told.get(timeout=pause)
            return
        except queue.Empty:
            pass
        # In this order: held up between the two, it must not speak of a wait that is over.
        now, began = time.monotonic(), clock.since
        if began is None:
            continue
        if began != since:
            since, patient_until = began, began + patience
        if now >= patient_until:
            patient_until = now + patience
            warn(what(now - began))
