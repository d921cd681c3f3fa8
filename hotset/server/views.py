"""Reports of sessions and caches as the API answers and ``hotset session`` prints them.

The dataclasses here, with :class:`~hotset.session.reports.CacheReport`, are the types of the API's answers.
If several machines share a session, they are read from files of this machine, which list them and count what
they have sent. No other machine is asked, so a report costs the same whether they answer or not.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hotset.cluster.membership import Member, read_membership
from hotset.cluster.peer_stats import PeerStats, read_peer_stats
from hotset.session.reclaim import Dropped
from hotset.session.reports import CacheReport, SessionReport, report
from hotset.session.sessions import Resized

__all__ = ["Amount", "Machine", "ResizedView", "SessionView", "machines_of", "resized_view", "session_view"]


class Machine(NamedTuple):
    """A machine that shares a session, and what has passed between it and this one; None for this one."""

    member: Member
    traffic: PeerStats | None


def machines_of(number: int) -> list[Machine]:
    """Return the machines that share a session, by name; none if it is this machine's alone."""
    membership = read_membership(number)
    if membership is None:
        return []
    stats: dict[str, PeerStats] = {}
    with contextlib.suppress(OSError, ValueError):  # not made yet, or not whole yet
        stats = read_peer_stats(number)
    return [
        Machine(member, None if member.name == membership.me else stats.get(member.name, PeerStats()))
        for member in membership.members
    ]


@dataclass(frozen=True)
class Amount:
    """Bytes of memory."""

    limit: int
    used: int


@dataclass(frozen=True)
class SessionMemory(Amount):
    """Bytes of memory; ``unused`` of those that are used make room for others when it is needed."""

    unused: int


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, and where; no folder if nothing is spilled."""

    folder: str | None
    used: int


@dataclass(frozen=True)
class MachineView:
    """A machine that shares a session: the bytes that it can hold, and what it has sent to this one (``me``).

    ``received`` records of ``bytes`` came from it, verified, besides those that were ``unsound``; it took
    ``stored`` records that were sent to it. ``latency`` is its mean seconds until an answer. What passes
    between two machines is null for this one.
    """

    name: str
    host: str
    capacity: int
    me: bool
    received: int | None = None
    bytes: int | None = None
    latency: float | None = None
    stored: int | None = None
    unsound: int | None = None
    failures: int | None = None


@dataclass(frozen=True)
class SessionView:
    """A session and its caches; no machines unless several share it.

    Amounts are bytes, times seconds, ``created`` is Unix time.
    """

    number: int
    name: str
    memory: SessionMemory
    disk: Disk
    persist: bool
    ttl: float | None
    created: float
    in_use: bool
    server: int | None
    caches: list[CacheReport]
    machines: list[MachineView]


@dataclass(frozen=True)
class ResizedView:
    """The session as it is now, what made room, and the bytes in use or pinned beyond its new limit."""

    session: SessionView
    dropped: list[Dropped]
    over: int


def session_view(seen: SessionReport) -> dict[str, Any]:
    """Return a :class:`SessionView` as JSON values."""
    return asdict(_session(seen))


def resized_view(resized: Resized) -> dict[str, Any]:
    """Return a :class:`ResizedView` as JSON values."""
    dropped = [dropped for dropped in resized.dropped if dropped.bytes]
    return asdict(ResizedView(_session(report(resized.session)), dropped, resized.over))


def _session(seen: SessionReport) -> SessionView:
    session = seen.session
    return SessionView(
        number=session.number,
        name=session.name,
        memory=SessionMemory(session.memory, seen.memory, seen.unused),
        disk=Disk(session.spill, seen.disk),
        persist=session.persist,
        ttl=session.ttl,
        created=session.created,
        in_use=seen.in_use,
        server=session.server,
        caches=list(seen.caches),
        machines=[_machine(machine) for machine in machines_of(session.number)],
    )


def _machine(machine: Machine) -> MachineView:
    member, traffic = machine
    if traffic is None:
        return MachineView(member.name, member.host, member.capacity, me=True)
    return MachineView(
        member.name,
        member.host,
        member.capacity,
        me=False,
        received=traffic.received,
        bytes=traffic.bytes,
        latency=traffic.latency,
        stored=traffic.stored,
        unsound=traffic.unsound,
        failures=traffic.failures,
    )
