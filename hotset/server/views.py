"""Reports of sessions and caches as plain JSON values: what the API answers and ``hotset session`` prints.

Where several machines share a session, they are read from what this one has written down of them, the roster
and the tally. No other machine is asked, so a look costs the same whatever has become of them.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any, NamedTuple

from hotset.cluster.membership import Member, read_membership
from hotset.cluster.peer_stats import PeerStats
from hotset.cluster.peer_stats_file import read_tally
from hotset.session.reports import CacheReport, SessionReport, report
from hotset.session.sessions import Resized

__all__ = ["Machine", "machines_of", "resized_view", "session_view"]

_COUNTED = ("received", "bytes", "stored", "unsound", "failures")


class Machine(NamedTuple):
    """A machine that shares a session.

    Attributes:
        member: it.
        traffic: what passed between it and this machine, since the session began; None: it is this machine.
    """

    member: Member
    traffic: PeerStats | None


def machines_of(number: int) -> list[Machine]:
    """Return the machines that share a session, by name; none of a session that is this machine's alone."""
    roster = read_membership(number)
    if roster is None:
        return []
    tally: dict[str, PeerStats] = {}
    with contextlib.suppress(OSError, ValueError):  # not made yet, or not whole yet
        tally = read_tally(number)
    return [
        Machine(member, None if member.name == roster.me else tally.get(member.name, PeerStats()))
        for member in roster.members
    ]


def session_view(seen: SessionReport) -> dict[str, Any]:
    """Return a session with its caches and machines.

    Amounts are bytes, times seconds, ``created`` is Unix time. What passes between two machines is None of
    this one itself, which is marked as ``me``.
    """
    session = seen.session
    return {
        "number": session.number,
        "name": session.name,
        "memory": {"limit": session.memory, "used": seen.memory, "unused": seen.unused},
        "disk": {"folder": session.spill, "used": seen.disk},
        "persist": session.persist,
        "ttl": session.ttl,
        "created": session.created,
        "in_use": seen.in_use,
        "server": session.server,
        "caches": [_cache_view(cache) for cache in seen.caches],
        "machines": [_machine_view(machine) for machine in machines_of(session.number)],
    }


def resized_view(resized: Resized) -> dict[str, Any]:
    """Return what came of a resize."""
    return {
        "session": session_view(report(resized.session)),
        "dropped": [asdict(dropped) for dropped in resized.dropped if dropped.bytes],
        "over": resized.over,
    }


def _cache_view(cache: CacheReport) -> dict[str, Any]:
    served = cache.hits + cache.peer_hits + cache.misses
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
        "peer_hits": cache.peer_hits,
        "misses": cache.misses,
        "hit_rate": cache.hit_rate if served else None,
        "fill_seconds": cache.fill_seconds,
        "waited_seconds": cache.waited_seconds,
        "processes": cache.processes,
        "in_use": cache.in_use,
        "pinned": cache.pinned,
        "state": cache.state,
    }


def _machine_view(machine: Machine) -> dict[str, Any]:
    member, traffic = machine
    return {
        "name": member.name,
        "host": member.host,
        "capacity": member.capacity,
        "me": traffic is None,
        "latency": traffic.latency if traffic is not None and traffic.answers else None,
        **{name: None if traffic is None else getattr(traffic, name) for name in _COUNTED},
    }
