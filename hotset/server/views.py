"""Reports of sessions and caches as plain JSON values: what the API answers and ``hotset session`` prints."""

from __future__ import annotations

from typing import Any

from hotset.session.reports import CacheReport, SessionReport

__all__ = ["session_view"]


def session_view(report: SessionReport) -> dict[str, Any]:
    """Return a session and its caches; amounts in bytes, times in seconds, ``created`` in Unix time."""
    session = report.session
    return {
        "number": session.number,
        "name": session.name,
        "memory": {"limit": session.memory, "used": report.memory},
        "disk": {"folder": session.spill, "used": report.disk},
        "persist": session.persist,
        "ttl": session.ttl,
        "created": session.created,
        "in_use": report.in_use,
        "server": session.server,
        "caches": [_cache_view(cache) for cache in report.caches],
    }


def _cache_view(cache: CacheReport) -> dict[str, Any]:
    reads = cache.hits + cache.misses
    return {
        "id": cache.id,
        "name": cache.name,
        "samples": cache.samples,
        "cached": cache.cached,
        "spilled": cache.spilled,
        "memory": cache.memory,
        "disk": cache.disk,
        "limit": cache.limit,
        "mean_bytes": cache.mean_bytes,
        "hits": cache.hits,
        "misses": cache.misses,
        "hit_rate": cache.hits / reads if reads else None,
        "fill_seconds": cache.fill_seconds,
        "waited_seconds": cache.waited_seconds,
        "processes": cache.processes,
        "state": cache.state,
    }
