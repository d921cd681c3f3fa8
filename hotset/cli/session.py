"""``hotset session``: create, list, show and resize sessions, as the API answers and as text.

If a server runs, it owns a new session and destroys it when it stops. Without a server no process owns the
session, which lasts until it is destroyed, expires, or the machine is switched off. Everything else is the
same with and without a server: sessions are files of this user, so the command changes them itself.
"""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotset._warnings import printable
from hotset.cli.client import client
from hotset.cli.server import the_port
from hotset.server.parsing import parse_seconds
from hotset.server.pidfile import running
from hotset.server.views import resized_view, session_view
from hotset.session import reports, sessions
from hotset.units import format_bytes

__all__ = [
    "console",
    "create",
    "describe",
    "list_all",
    "print_status",
    "resize",
    "resized_text",
    "sessions_table",
    "show",
]


def create(
    name: str, *, memory: str | None, spill: str | None, ttl: str | None, persist: bool, port: int | None
) -> dict[str, Any]:
    """Create a session; return it as the API shows it.

    Args:
        port: the port of the server that will own it. None: the server that runs (of several, the one on the
            default port), or none if none runs.

    Raises:
        HotsetError: it cannot be created as requested, or no server runs on that port.

    Warns:
        HotsetWarning: the runtime folder's file system has less than ``memory``.
    """
    spill = os.path.abspath(spill) if spill else spill
    if port is not None or running():
        wanted = {"name": name, "memory": memory, "ttl": ttl, "spill": spill, "persist": persist}
        given = {key: value for key, value in wanted.items() if value is not None}
        made: dict[str, Any] = client(the_port(port)).call("POST", "/api/sessions", given)
        if memory is not None:
            sessions.warn_if_too_much(made["memory"]["limit"])  # the server's own warning is in its log
        return made
    session = sessions.create(
        name,
        memory=memory,
        spill=spill,
        ttl=None if ttl is None else parse_seconds(ttl),
        persist=persist,
    )
    return session_view(reports.report(session))


def list_all() -> list[dict[str, Any]]:
    """Return every session of this user on this machine, oldest first."""
    return [session_view(report) for report in reports.report_all()]


def show(which: str) -> dict[str, Any]:
    """Return one session, by name or number.

    Raises:
        SessionError: there is none.
    """
    return session_view(reports.report(sessions.find(which)))


def resize(which: str, memory: str) -> dict[str, Any]:
    """Change a session's memory limit; return the outcome, as the API shows it.

    Raises:
        HotsetError: there is no such session, or it cannot have that limit.
    """
    return resized_view(sessions.resize(which, memory))


def resized_text(found: dict[str, Any]) -> str:
    """The outcome of a resize, as text."""
    session = found["session"]
    name, memory = printable(session["name"]), session["memory"]
    lines = [f"Session {name} may hold {format_bytes(memory['limit'])} from now on."]
    for dropped in found["dropped"]:
        lines.append(
            f"Dropped the unused cache {printable(dropped['name'])}: {format_bytes(dropped['bytes'])} freed."
        )
    if found["over"]:
        lines.append(
            f"It holds {format_bytes(found['over'])} more than that, in caches that are in use or pinned; no "
            "samples are added until it holds less."
        )
    return "\n".join(lines)


def sessions_table(found: list[dict[str, Any]]) -> Table:
    """A line for each session."""
    table = Table("session", "number", "memory", "of", "unused", "disk", "caches", "cached", "hits", "use")
    table.add_column("server")
    for session in found:
        caches = session["caches"]
        hits = sum(cache["hits"] + cache["peer_hits"] for cache in caches)
        served = hits + sum(cache["misses"] for cache in caches)
        table.add_row(
            Text(printable(session["name"])),
            str(session["number"]),
            format_bytes(session["memory"]["used"]),
            format_bytes(session["memory"]["limit"]),
            format_bytes(session["memory"]["unused"]) if session["memory"]["unused"] else "-",
            format_bytes(session["disk"]["used"]) if session["disk"]["folder"] else "-",
            str(len(caches)),
            f"{sum(cache['cached'] for cache in caches):,}",
            f"{hits / served:.1%}" if served else "-",
            "in use" if session["in_use"] else "-",
            str(session["server"] or "-"),
        )
    return table


def describe(session: dict[str, Any]) -> RenderableType:
    """One session, its caches, and the machines that share it."""
    facts = Table.grid(padding=(0, 2))
    disk = session["disk"]
    of = f"{format_bytes(session['memory']['used'])} of {format_bytes(session['memory']['limit'])}"
    facts.add_row("session", Text(f"{printable(session['name'])} ({session['number']})"))
    unused = session["memory"]["unused"]
    facts.add_row("memory", f"{of}, {format_bytes(unused)} of it unused" if unused else of)
    spills = f"{format_bytes(disk['used'])} in {printable(disk['folder'])}" if disk["folder"] else "none"
    facts.add_row("disk", Text(spills + (", kept after a reboot" if session["persist"] else "")))
    ttl = session["ttl"]
    facts.add_row("expires", "never" if ttl is None else f"{_time_text(ttl)} after its last use")
    server = session["server"]
    facts.add_row("owner", "nobody" if server is None else f"the server of port {server}")
    facts.add_row("in use", "yes" if session["in_use"] else "no")
    parts: list[RenderableType] = [facts]
    parts.append(_caches(session["caches"]) if session["caches"] else "It has no caches yet.")
    if session["machines"]:
        parts.append(_machines(session["machines"]))
    return Group(*parts)


def _caches(caches: list[dict[str, Any]]) -> Table:
    table = Table("cache", "id", "samples", "cached", "on disk", "memory", "disk", "a sample", "hits", "use")
    table.add_column("state")
    for cache in caches:
        rate = cache["hit_rate"]
        table.add_row(
            Text(printable(cache["name"])),
            str(cache["id"]),
            f"{cache['samples']:,}",
            f"{cache['cached']:,}",
            f"{cache['spilled']:,}",
            format_bytes(cache["memory"]),
            format_bytes(cache["disk"]),
            format_bytes(cache["mean_bytes"]),
            "-" if rate is None else f"{rate:.1%}",
            " ".join(word for word in ("in use", "pinned") if cache[word.replace(" ", "_")]) or "-",
            Text(printable(cache["state"])),
        )
    return table


def _machines(machines: list[dict[str, Any]]) -> Table:
    table = Table("machine", "address", "can hold", "samples", "bytes", "latency", "stored", "failures")
    for machine in machines:
        name, latency = printable(machine["name"]), machine["latency"]
        passed = ["-"] * 5
        if not machine["me"]:
            passed = [
                f"{machine['received']:,}",
                format_bytes(machine["bytes"]),
                "-" if latency is None else f"{latency * 1e3:.1f} ms",
                f"{machine['stored']:,}",
                f"{machine['failures']:,}",
            ]
        table.add_row(
            Text(f"{name} (this machine)" if machine["me"] else name),
            Text(printable(machine["host"])),
            format_bytes(machine["capacity"]),
            *passed,
        )
    return table


def print_status(status: dict[str, Any]) -> None:
    """Print the answer to ``GET /api/status``."""
    facts = Table.grid(padding=(0, 2))
    memory, spill = status["memory"], status["spill"]
    facts.add_row("server", f"hotset {status['version']}, process {status['pid']}")
    facts.add_row("address", Text(f"{status['host']} port {status['port']}"))
    facts.add_row("memory", f"{format_bytes(memory['used'])} of {format_bytes(memory['limit'])}")
    if spill:
        free = "unknown" if spill["free"] is None else format_bytes(spill["free"])
        facts.add_row("spill", Text(f"{format_bytes(spill['used'])} in {spill['folder']}, {free} free"))
    facts.add_row("log", Text(status["log"] or "its terminal"))
    out = console()
    out.print(facts)
    out.print(sessions_table(status["sessions"]) if status["sessions"] else "There are no sessions.")


def _time_text(seconds: float) -> str:
    """A time in the largest whole unit.

    Example:
        >>> _time_text(86400), _time_text(90)
        ('1 d', '90 s')
    """
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:,.0f} s"


def console() -> Console:
    """The console for tables; without a terminal it is wide enough for all columns."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=160)
