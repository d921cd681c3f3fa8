"""``hotset top``: the numbers of the status page in a terminal, and those of jobs that use no session.

Such jobs are found in the catalog of this machine, so that no server need run for them.

A frame is a function of the answers of ``/api/status`` and ``/api/history`` and of the terminal's size.
Columns that do not fit are left out, the least important first, and so are rows, with a line that counts
them. The server on the port is looked up again for each frame, as another one may have replaced it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hotset._warnings import printable
from hotset.cli.client import client
from hotset.cli.session import console
from hotset.server.pidfile import ServerError
from hotset.session.reports import report_jobs
from hotset.units import format_bytes

__all__ = ["frame", "top"]

_NOTHING = "-"

Answer = dict[str, Any]


def top(port: int, interval: float, once: bool) -> None:
    """Show the sessions of a server and their caches, and those of jobs without a session, until Ctrl-C.

    Without a terminal it prints one frame. If the server ends, it shows that, and waits for the next server.
    Where no server runs, it shows the jobs. A frame is shown for ``interval`` seconds; with ``once``, one is
    printed.

    Raises:
        ServerError: no server answers on that port at the start, and no job has a cache.
        FolderError: the runtime folder, or a file in it, is not safely this user's own.
    """
    terminal, jobs, trouble = console(), _Jobs(), ""
    status: Answer | None = None
    history: Answer = {"sessions": {}}
    try:
        status, history = _look(port)
    except ServerError as error:
        trouble = str(error)
        if not jobs.rows():
            raise
    if once or not terminal.is_terminal:
        terminal.print(frame(status, history, jobs.rows(), width=terminal.width))
        return
    try:
        with Live(console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                size = {"width": terminal.width, "height": terminal.height}
                shown = frame(status, history, jobs.rows(), trouble=trouble, **size)
                live.update(shown, refresh=True)
                time.sleep(interval)
                try:
                    (status, history), trouble = _look(port), ""
                except ServerError as error:
                    trouble = trouble or f"{time.strftime('%H:%M:%S')} {error}"
    except KeyboardInterrupt:
        return


def _look(port: int) -> tuple[Answer, Answer]:
    server = client(port)
    return server.call("GET", "/api/status"), server.call("GET", "/api/history")


class _Jobs:
    """The caches of jobs that use no session, as rows; speeds are those since the look before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int, float]] = {}

    def rows(self) -> list[_Row]:
        found, now = [], time.monotonic()
        seen: dict[int, tuple[float, int, float]] = {}
        for cache in report_jobs():
            served = cache.hits + cache.peer_hits + cache.misses
            row = _cache_row(asdict(cache))
            seen[cache.id] = (now, served, cache.waited_seconds)
            if cache.id in self._before and now > self._before[cache.id][0]:
                since, served_before, waited_before = self._before[cache.id]
                row.cells["samples/s"] = f"{(served - served_before) / (now - since):,.0f}"
                row.cells["wait s/s"] = f"{(cache.waited_seconds - waited_before) / (now - since):.3f}"
            row.cells["state"] = f"process {cache.process}" if cache.state == "ok" else row.cells["state"]
            found.append(row)
        self._before = seen
        return found


def frame(
    status: Answer | None,
    history: Answer,
    jobs: Sequence[_Row] = (),
    *,
    width: int,
    height: int | None = None,
    trouble: str = "",
) -> RenderableType:
    """Return one frame, for :meth:`rich.console.Console.print`.

    Args:
        status, history: the answers of the API; None for no server.
        jobs: rows of caches that are in no session.
        width, height: columns and lines of the terminal; None: any number of lines.
        trouble: what is wrong with the server, as a sentence.

    Example:
        >>> memory = {"limit": 1 << 30, "used": 0}
        >>> server = {"version": "1.0", "host": "127.0.0.1", "port": 50052, "pid": 7, "started": 0.0}
        >>> status = server | {"memory": memory, "spill": None, "sessions": []}
        >>> from rich.console import Console
        >>> Console(width=60).print(frame(status, {"sessions": {}}, width=60).renderables[-1])
        There are no sessions; make one with `hotset session create
        NAME --memory 8GiB`.
    """
    parts: list[RenderableType] = [_server_line(status)] if status is not None else []
    if trouble:
        parts.append(Text(trouble, "bold red"))
    parts += [_budgets(status, width), Text()] if status is not None else []
    rows = _rows(status, history) if status is not None else []
    if jobs:
        rows += [_Row("jobs without a session", "bold", {}), *jobs]
    if not rows:
        parts.append(Text("There are no sessions; make one with `hotset session create NAME --memory 8GiB`."))
        return Group(*parts)
    room = None if height is None else max(2, height - 9)
    parts.append(_table(rows if room is None else rows[:room], width))
    if room is not None and len(rows) > room:
        parts.append(Text(f"and {len(rows) - room} more rows; enlarge the terminal to see them", "dim"))
    return Group(*parts)


def _server_line(status: Answer) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("hotset ", "bold")
    host, up = printable(status["host"]), _span(time.time() - status["started"])
    line.append(f"{status['version']}  {host}:{status['port']}  process {status['pid']}  up {up}")
    return line


def _budgets(status: Answer, width: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    memory, spill = status["memory"], status["spill"]
    bars = [("memory", "blue", memory["used"], memory["limit"], f" of {format_bytes(memory['limit'])}")]
    if spill is not None:
        free = spill["free"] or 0
        room = "" if spill["free"] is None else f", {format_bytes(free)} free"
        bars.append(("disk", "magenta", spill["used"], spill["used"] + free, room))
    for label, colour, used, whole, rest in bars:
        bar = ProgressBar(max(whole, 1), used, max(4, min(60, width - 40)), complete_style=colour)
        grid.add_row(label, bar, Text(f"{format_bytes(used)}{rest}"))
    return grid


# The table: a row for each session, and below it one for each of its caches


@dataclass(frozen=True)
class _Row:
    """A session, or one of its caches: the values of the columns, as text."""

    name: str
    style: str
    cells: dict[str, str]


_COLUMNS = ("cached", "of", "hit rate", "samples/s", "wait s/s", "memory", "disk", "processes", "state")
_GO_FIRST = ("disk", "processes", "memory", "state", "of", "wait s/s", "samples/s", "hit rate")
_GAP = 2
_LONGEST_CELL = 40


def _rows(status: Answer, history: Answer) -> list[_Row]:
    rows = []
    for session in status["sessions"]:
        series = history["sessions"].get(str(session["number"]), {})
        rows.append(_session_row(session, series))
        rows += [_cache_row(cache) for cache in session["caches"]]
    return rows


def _session_row(session: Answer, series: dict[str, list[float | None]]) -> _Row:
    caches: list[Answer] = session["caches"]

    def total(name: str) -> int:
        return sum(cache[name] for cache in caches)

    memory, hits = session["memory"], total("hits") + total("peer_hits")
    cells = {
        "cached": f"{total('cached'):,}",
        "of": f"{total('samples'):,}",
        "hit rate": _share(hits, hits + total("misses")),
        "samples/s": _now(series, "samples_per_second", lambda value: f"{value:,.0f}"),
        "wait s/s": _now(series, "waited", lambda value: f"{value:.3f}"),
        "memory": f"{format_bytes(memory['used'])} of {format_bytes(memory['limit'])}",
        "disk": format_bytes(session["disk"]["used"]),
        "processes": f"{total('processes'):,}",
        "state": "in use" if session["in_use"] else "idle",
    }
    return _Row(printable(session["name"]), "bold", cells)


def _cache_row(cache: Answer) -> _Row:
    well = cache["state"] == "ok"
    cells = {
        "cached": f"{cache['cached']:,}",
        "of": f"{cache['samples']:,}",
        "hit rate": _NOTHING if cache["hit_rate"] is None else f"{cache['hit_rate']:.1%}",
        "memory": format_bytes(cache["memory"]),
        "disk": format_bytes(cache["disk"]),
        "processes": f"{cache['processes']:,}",
        "state": "stale" if cache["state"] == "invalidated" else printable(cache["state"]),
    }
    return _Row(f"  {printable(cache['name'])}", "" if well else "red", cells)


def _table(rows: list[_Row], width: int) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    shown = _fitting(rows, width)
    table.add_column("session, cache", no_wrap=True, overflow="ellipsis", max_width=_LONGEST_CELL)
    for title in shown:
        side: Literal["left", "right"] = "left" if title == "state" else "right"
        table.add_column(title, justify=side, no_wrap=True, overflow="ellipsis", max_width=_LONGEST_CELL)
    for row in rows:
        # Text, because a name may look like rich's markup.
        cells = [Text(row.cells.get(title, "")) for title in shown]
        table.add_row(Text(row.name), *cells, style=row.style)
    return table


def _fitting(rows: list[_Row], width: int) -> list[str]:
    """The columns that fit beside the names, in their order."""

    def widest(*texts: str) -> int:
        return min(_LONGEST_CELL, max(cell_len(text) for text in texts)) + _GAP

    widths = {title: widest(title, *(row.cells.get(title, "") for row in rows)) for title in _COLUMNS}
    room = width - widest("session, cache", *(row.name for row in rows)) + _GAP
    for title in _GO_FIRST:
        if sum(widths.values()) > room:
            del widths[title]
    return list(widths)


def _now(series: dict[str, list[float | None]], name: str, text: Callable[[float], str]) -> str:
    last = (series.get(name) or [None])[-1]
    return _NOTHING if last is None else text(last)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else _NOTHING


def _span(seconds: float) -> str:
    minutes = max(0, int(seconds)) // 60
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
