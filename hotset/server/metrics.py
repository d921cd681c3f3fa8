"""Sessions and caches for Prometheus, read when they are scraped.

Nothing is counted here: the caches count themselves, a session's file counts the traffic between machines,
and a collector turns both into samples. A cache's counters end with it. The numbers of sessions, caches and
machines are bounded, because each is a time series for the scraper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotset._warnings import printable
from hotset.cluster.peer_stats import PeerStats
from hotset.server.options import Options
from hotset.server.views import machines_of
from hotset.session.reports import CacheReport, SessionReport

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

T = TypeVar("T")

_MOST_SESSIONS = 200
_MOST_CACHES = 1000
_MOST_MACHINES = 1000

_OF_SESSION: list[tuple[str, str, Callable[[SessionReport], float]]] = [
    ("memory_bytes", "Memory that the session's caches take.", lambda report: report.memory),
    ("memory_limit_bytes", "Memory that they may take together.", lambda report: report.session.memory),
    ("disk_bytes", "Disk that they take.", lambda report: report.disk),
    ("in_use", "1 while a process uses the session.", lambda report: report.in_use),
]
_OF_CACHE: list[tuple[str, str, Callable[[CacheReport], float]]] = [
    ("samples", "Length of the dataset.", lambda cache: cache.samples),
    ("cached_samples", "Samples in memory or on disk.", lambda cache: cache.cached),
    ("spilled_samples", "Of these on disk.", lambda cache: cache.spilled),
    ("memory_bytes", "Memory taken.", lambda cache: cache.memory),
    ("disk_bytes", "Disk taken.", lambda cache: cache.disk),
    ("processes", "Processes that have it open.", lambda cache: cache.processes),
    ("ok", "0 if the cache is invalidated or cannot be opened.", lambda cache: cache.state == "ok"),
]
_COUNTED: list[tuple[str, str, Callable[[CacheReport], float]]] = [
    ("cache_hits", "Samples served from the cache.", lambda cache: cache.hits),
    ("peer_hits", "Samples served from other machines' memory.", lambda cache: cache.peer_hits),
    ("cache_misses", "Samples read from the source.", lambda cache: cache.misses),
    ("cache_fill_seconds", "Time spent in the source.", lambda cache: cache.fill_seconds),
    ("cache_waited_seconds", "Time that consumers waited.", lambda cache: cache.waited_seconds),
]
_OF_MACHINE: list[tuple[str, str, Callable[[PeerStats], float]]] = [
    ("records", "Samples that the machine sent.", lambda traffic: traffic.received),
    ("bytes", "Bytes of them.", lambda traffic: traffic.bytes),
    ("failures", "Times that it did not answer as it should.", lambda traffic: traffic.failures),
    ("answers", "Answers that came in time.", lambda traffic: traffic.answers),
    ("seconds", "Time until they came.", lambda traffic: traffic.seconds),
]


class Metrics(Collector):
    """What ``GET /metrics`` answers; ``reports`` reads the reports of all sessions."""

    def __init__(self, options: Options, reports: Callable[[], list[SessionReport]]) -> None:
        self._options, self._reports = options, reports
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return []  # or registering would read all reports

    def collect(self) -> Iterator[Metric]:
        found = self._reports()
        own = sum(report.memory for report in found if report.session.server == self._options.port)
        yield _gauge("hotset_server_memory_bytes", "Memory that the server's sessions take.", own)
        limit = self._options.memory
        yield _gauge("hotset_server_memory_limit_bytes", "Memory that they may take together.", limit)
        yield _gauge("hotset_sessions", "Sessions of this user on this machine.", len(found))

        shown = found[:_MOST_SESSIONS]
        named = [([report.session.name], report) for report in shown]
        yield from _families(GaugeMetricFamily, "session_", _OF_SESSION, ["session"], named)

        caches = [
            ([report.session.name, str(cache.id)], cache) for report in shown for cache in report.caches
        ][:_MOST_CACHES]
        labels = ["session", "cache"]
        info = GaugeMetricFamily("hotset_cache_info", "Class of its dataset.", labels=[*labels, "dataset"])
        for names, cache in caches:
            info.add_metric([*names, printable(cache.name)], 1.0)
        yield info
        yield from _families(GaugeMetricFamily, "cache_", _OF_CACHE, labels, caches)
        yield from _families(CounterMetricFamily, "", _COUNTED, labels, caches)

        machines = [
            ([report.session.name, printable(member.name)], traffic)
            for report in shown
            for member, traffic in machines_of(report.session.number)
            if traffic is not None
        ][:_MOST_MACHINES]
        yield from _families(CounterMetricFamily, "peer_", _OF_MACHINE, ["session", "machine"], machines)


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    prefix: str,
    table: Sequence[tuple[str, str, Callable[[T], float]]],
    labels: list[str],
    rows: Sequence[tuple[list[str], T]],
) -> Iterator[Metric]:
    """A family of metrics for each line of a table; each row, its labels and what is read, is one sample."""
    for name, text, read in table:
        family = kind(f"hotset_{prefix}{name}", text, labels=labels)
        for names, whose in rows:
            family.add_metric(names, float(read(whose)))
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text)
    gauge.add_metric([], float(value))
    return gauge
