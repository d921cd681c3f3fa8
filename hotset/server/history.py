"""The last ten minutes of each session: what its readers got, and what it held.

Caches count upwards from their beginning; a rate is the difference of two looks by the seconds between them.
Where it is unknown, the point is null: at the first look at a session, and when a count went down, because a
cache was destroyed meanwhile. The number of points is bounded, and only sessions of the last look are told,
so the memory for it does not grow with time.
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
    """A session's counts, summed over its caches, at one look."""

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
class _Look:
    unix: float
    clock: float
    totals: dict[int, _Totals]


class History:
    """Looks at all sessions, the oldest forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        # One more than is told, as a rate needs the look before.
        self._looks: deque[_Look] = deque(maxlen=_POINTS + 1)
        self._lock = threading.Lock()

    def add(self, reports: Iterable[SessionReport]) -> None:
        """Remember how the sessions are now."""
        totals = {report.session.number: _Totals.of(report) for report in reports}
        with self._lock:
            self._looks.append(_Look(time.time(), time.monotonic(), totals))

    def view(self) -> dict[str, Any]:
        """Return what ``GET /api/history`` answers."""
        with self._lock:
            looks = list(self._looks)
        told = looks[-_POINTS:]
        before = [None, *looks[:-1]][-len(told) :] if told else []
        numbers = told[-1].totals if told else {}
        return {
            "interval": INTERVAL,
            "times": [look.unix for look in told],
            "sessions": {str(number): _series(number, told, before) for number in numbers},
        }


def _series(number: int, told: list[_Look], before: list[_Look | None]) -> dict[str, list[Any]]:
    points = [_point(number, look, last) for look, last in zip(told, before, strict=True)]
    return {name: [point.get(name) for point in points] for name in _NAMES}


_NAMES = ("samples_per_second", "waited", "hit_rate", "cached", "memory", "disk")


def _point(number: int, look: _Look, last: _Look | None) -> dict[str, float | None]:
    now = look.totals.get(number)
    if now is None:
        return {}
    point: dict[str, float | None] = {"cached": now.cached, "memory": now.memory, "disk": now.disk}
    then = last.totals.get(number) if last else None
    if last is None or then is None:
        return point
    seconds = look.clock - last.clock
    hits, misses, waited = now.hits - then.hits, now.misses - then.misses, now.waited - then.waited
    if seconds > 0 and min(hits, misses, waited) >= 0:
        point["samples_per_second"] = (hits + misses) / seconds
        point["waited"] = waited / seconds
        point["hit_rate"] = hits / (hits + misses) if hits + misses else None
    return point
