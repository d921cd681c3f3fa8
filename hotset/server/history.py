"""The last ten minutes of each session: what its readers got, and what it held.

The server reads the caches' counters every two seconds. The counters only rise while a cache exists, so a
rate is the difference between two readings, divided by the seconds between them. Where a rate is unknown, the
point is null: at the first reading of a session, and when a counter has fallen, because a cache was destroyed
meanwhile. The number of points is bounded, and the view contains only sessions of the last reading, so memory
does not grow with time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hotset.session.reports import SessionReport

__all__ = ["INTERVAL", "History"]

INTERVAL = 2.0
_POINTS = 300


@dataclass(frozen=True)
class _Totals:
    """A session's counters, summed over its caches, at one reading."""

    hits: int
    misses: int
    waited: float
    cached: int
    memory: int
    disk: int

    @classmethod
    def of(cls, report: SessionReport) -> _Totals:
        caches = report.caches
        return cls(
            hits=sum(cache.hits + cache.peer_hits for cache in caches),
            misses=sum(cache.misses for cache in caches),
            waited=sum(cache.waited_seconds for cache in caches),
            cached=sum(cache.cached for cache in caches),
            memory=report.memory,
            disk=report.disk,
        )


@dataclass(frozen=True)
class _Reading:
    unix: float
    clock: float
    totals: dict[int, _Totals]


class History:
    """The last readings of all sessions; safe to use from several threads."""

    def __init__(self) -> None:
        # One more than the view shows, as a rate needs the reading before.
        self._readings: deque[_Reading] = deque(maxlen=_POINTS + 1)
        self._lock = threading.Lock()

    def add(self, reports: Iterable[SessionReport]) -> None:
        """Add a reading: the sessions as they are now."""
        totals = {report.session.number: _Totals.of(report) for report in reports}
        with self._lock:
            self._readings.append(_Reading(time.time(), time.monotonic(), totals))

    def view(self) -> dict[str, Any]:
        """Return what ``GET /api/history`` answers."""
        with self._lock:
            readings = list(self._readings)
        shown = readings[-_POINTS:]
        before = [None, *readings[:-1]][-len(shown) :] if shown else []
        numbers = shown[-1].totals if shown else {}
        return {
            "interval": INTERVAL,
            "times": [reading.unix for reading in shown],
            "sessions": {str(number): _series(number, shown, before) for number in numbers},
        }


def _series(number: int, shown: list[_Reading], before: list[_Reading | None]) -> dict[str, list[Any]]:
    points = [_point(number, reading, last) for reading, last in zip(shown, before, strict=True)]
    return {name: [point.get(name) for point in points] for name in _NAMES}


_NAMES = ("samples_per_second", "waited", "hit_rate", "cached", "memory", "disk")


def _point(number: int, reading: _Reading, last: _Reading | None) -> dict[str, float | None]:
    now = reading.totals.get(number)
    if now is None:
        return {}
    point: dict[str, float | None] = {"cached": now.cached, "memory": now.memory, "disk": now.disk}
    then = last.totals.get(number) if last else None
    if last is None or then is None:
        return point
    seconds = reading.clock - last.clock
    hits, misses, waited = now.hits - then.hits, now.misses - then.misses, now.waited - then.waited
    if seconds > 0 and min(hits, misses, waited) >= 0:
        point["samples_per_second"] = (hits + misses) / seconds
        point["waited"] = waited / seconds
        point["hit_rate"] = hits / (hits + misses) if hits + misses else None
    return point
