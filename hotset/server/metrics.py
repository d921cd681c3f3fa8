"""Sessions and caches for Prometheus, read when they are scraped.

Nothing is counted here: the caches count themselves, a session's file counts the traffic between machines,
and a collector turns both into samples. A cache's counters end with it. The numbers of sessions, caches and
machines are bounded, because each is a time series for the scraper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

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


class Metrics:
    """What ``GET /metrics`` answers.

    Args:
        options: the server's.
        reports: reads the reports of all sessions.
    """

    def __init__(self, options: Options, reports: Callable[[], list[SessionReport]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Sessions(options, reports))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Sessions(Collector):
    def __init__(self, options: Options, reports: Callable[[], list[SessionReport]]) -> None:
        self._options, self._reports = options, reports

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
        for name, text, read in _OF_SESSION:
            gauge = GaugeMetricFamily(f"hotset_session_{name}", text, labels=["session"])
            for report in shown:
                gauge.add_metric([report.session.name], float(read(report)))
            yield gauge

        caches = [(report.session.name, cache) for report in shown for cache in report.caches][:_MOST_CACHES]
        labels = ["session", "cache"]
        info = GaugeMetricFamily("hotset_cache_info", "Class of its dataset.", labels=[*labels, "dataset"])
        for session, cache in caches:
            info.add_metric([session, str(cache.id), printable(cache.name)], 1.0)
        yield info
        for name, text, of_cache in _OF_CACHE:
            gauge = GaugeMetricFamily(f"hotset_cache_{name}", text, labels=labels)
            for session, cache in caches:
                gauge.add_metric([session, str(cache.id)], float(of_cache(cache)))
            yield gauge
        for name, text, of_cache in _COUNTED:
            counter = CounterMetricFamily(f"hotset_{name}", text, labels=labels)
            for session, cache in caches:
                counter.add_metric([session, str(cache.id)], float(of_cache(cache)))
            yield counter
        yield from _machines(shown)


def _machines(shown: list[SessionReport]) -> Iterator[Metric]:
    found = [
        (report.session.name, printable(member.name), traffic)
        for report in shown
        for member, traffic in machines_of(report.session.number)
        if traffic is not None
    ][:_MOST_MACHINES]
    for name, text, read in _OF_MACHINE:
        counter = CounterMetricFamily(f"hotset_peer_{name}", text, labels=["session", "machine"])
        for session, machine, traffic in found:
            counter.add_metric([session, machine], float(read(traffic)))
        yield counter


def _gauge(name: str, text: str, value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text)
    gauge.add_metric([], float(value))
    return gauge
