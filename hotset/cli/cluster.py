"""``hotset cluster``: the state of sessions that the machines of a Ray cluster share.

It comes from the session's directory, to which every machine reports once a second.
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
    """What each machine reports of itself, for all sessions or for one.

    Raises:
        ClusterError: the cluster cannot be reached, or there is no such session in it.
    """
    joining = _joining()
    names = joining.sessions(address) if session is None else [session]
    return {name: joining.status(address, name) for name in names}


def stop(address: str, session: str) -> int:
    """Destroy a session on all machines; return the bytes freed.

    Raises:
        ClusterError: the cluster cannot be reached, or there is no such session in it.
    """
    freed: int = _joining().stop(address, session)
    return freed


def described(found: dict[str, list[dict[str, Any]]]) -> RenderableType:
    """Tables of sessions, their machines, and the traffic between these."""
    if not found:
        return "The machines of this Ray cluster share no session."
    parts: list[RenderableType] = []
    for session, machines in found.items():
        parts += [Text(f"session {printable(session)}"), _machines(machines)]
        wrong = {machine["name"]: machine["error"] for machine in machines if "error" in machine}
        parts += [Text(f"{printable(name)}: {printable(error)}") for name, error in wrong.items()]
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
    table = Table("to", "from", "samples", "bytes", "latency", "stored", "failures")
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
            f"`hotset cluster` needs {error.name}, which is not installed; run `pip install 'hotset[ray]'`."
        ) from error
    return joining
