"""``hotset cluster``: sessions that the machines of a Ray cluster share, as they are now.

What is told comes from the session's directory, which every machine tells of itself once a second.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotset._warnings import printable
from hotset.errors import ClusterError
from hotset.units import format_bytes

__all__ = ["described", "status", "stop"]


def status(address: str, session: str | None) -> dict[str, list[dict[str, Any]]]:
    """What each machine says of itself, for each session, or for one.

    Raises:
        ClusterError: the cluster cannot be reached, or there is no such session in it.
    """
    joining = _joining()
    names = joining.sessions(address) if session is None else [session]
    return {name: joining.status(address, name) for name in names}


def stop(address: str, session: str) -> int:
    """End a session on all machines; returns the bytes that are freed.

    Raises:
        ClusterError: the cluster cannot be reached, or there is no such session in it.
    """
    freed: int = _joining().stop(address, session)
    return freed


def described(found: dict[str, list[dict[str, Any]]]) -> RenderableType:
    """Sessions and their machines, then what passed between these."""
    if not found:
        return "No session is shared by the machines of this Ray cluster."
    parts: list[RenderableType] = []
    for session, machines in found.items():
        parts += [Text(f"session {printable(session)}"), _machines(machines)]
        if any(machine.get("peers") for machine in machines):
            parts.append(_traffic(machines))
    return Group(*parts)


def _machines(machines: list[dict[str, Any]]) -> Table:
    table = Table(
        "machine", "address", "memory", "of", "cached", "local", "peers", "source", "served", "seen"
    )
    for machine in machines:
        peers = sum(peer["received"] for peer in machine.get("peers", {}).values())
        table.add_row(
            Text(printable(machine["name"])),
            Text(printable(machine["endpoint"].removeprefix("tcp://"))),
            format_bytes(machine.get("memory", 0)),
            format_bytes(machine["capacity"]),
            f"{machine.get('cached', 0):,}",
            f"{machine.get('hits', 0):,}",
            f"{peers:,}",
            f"{machine.get('misses', 0):,}",
            format_bytes(machine["served"]["bytes"]),
            f"{machine['silent']:.1f} s ago",
        )
    return table


def _traffic(machines: list[dict[str, Any]]) -> Table:
    table = Table("to", "from", "samples", "bytes", "an answer", "brought", "failures")
    for machine in machines:
        for name, peer in machine.get("peers", {}).items():
            latency = f"{peer['seconds'] / peer['answers'] * 1e3:.1f} ms" if peer["answers"] else "-"
            table.add_row(
                Text(printable(machine["name"])),
                Text(printable(name)),
                f"{peer['received']:,}",
                format_bytes(peer["bytes"]),
                latency,
                f"{peer['stored']:,}",
                f"{peer['failures']:,}",
            )
    return table


def _joining() -> Any:
    try:
        from hotset.cluster import ray_join as joining
    except ImportError as error:
        raise ClusterError(
            f"this needs {error.name}, which is not installed here; run `pip install 'hotset[ray]'`."
        ) from error
    return joining
