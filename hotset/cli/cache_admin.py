"""``hotset cache-admin``: the command line of MindSpore's ``cache_admin`` (renamed ``dataset-cache`` since).

Scripts written for ``cache_admin`` run unchanged if ``cache_admin`` is a shell function or a one-line script
that runs this command (docs/server.md has both). It takes the same options, prints the same lines, and exits
with code 1 and a sentence where the original does. Scripts rely most on this: the session's number is the
last word of the last line of ``-g``.

Where the two servers differ, the option is accepted and checked:

==================  ======================================================================================
``-w`` workers      of the reference's server, which hands out samples; this one never touches them
``-h`` hostname     127.0.0.1 (or localhost) alone, as with the reference; ``hotset start`` takes others
``-l`` loglevel     0 debug, 1 info, 2 warning, 3 error, 4 critical
``Numa hit``        rows read by processes on the node that has them: all that were read where there is one
                    node, and ``n/a`` where there are several, as that is not counted
==================  ======================================================================================
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hotset.cli.client import client
from hotset.cli.server import start, stop
from hotset.errors import ArgumentError, HotsetError
from hotset.server.options import LEVELS, Options
from hotset.server.pidfile import DEFAULT_PORT, find

__all__ = ["main"]

_LARGEST_SESSION = (1 << 32) - 1
_MOST_WORKERS = max(os.cpu_count() or 1, 100)
_COLUMNS = {
    "Session": 12,
    "Cache Id": 12,
    "Mem cached": 12,
    "Disk cached": 12,
    "Avg cache size": 16,
    "Numa hit": 10,
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code.

    Raises:
        SystemExit: with 0, for ``--help``.
    """
    try:
        told = _parser().parse_args(arguments)
        _check(told)
        return _run(told)
    except HotsetError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a working directory that is gone
        print(f"The machine does not allow it: {error}.", file=sys.stderr)
        return 1


def _run(told: argparse.Namespace) -> int:
    if told.start:
        _start(told)
    elif told.stop:
        stop(told.port)
        print(f"Cache server on port {told.port} has been stopped successfully.")
    elif told.generate_session:
        session = client(told.port).call("POST", "/api/sessions", {})
        print(f"Session created for server on port {told.port}: {session['number']}")
    elif told.destroy_session is not None:
        return _destroy(told.port, told.destroy_session)
    elif told.list_sessions:
        _list(told.port)
    else:
        _tell_of_server(told.port)
    return 0


def _start(told: argparse.Namespace) -> None:
    place = start(Options.parse(port=told.port, spill=told.spilldir, level=LEVELS[told.loglevel]))
    print("Cache server startup completed successfully!")
    print(
        f"The cache server daemon has been created as process id {place.pid} "
        f"and is listening on port {place.port}"
    )
    print("\nRecommendation:")
    print(
        "Since the server is detached into its own daemon process, monitor the server logs "
        f"(under {place.log}) for any issues that may happen after startup"
    )


def _destroy(port: int, numbers: list[int]) -> int:
    server, code = client(port), 0
    own = {session["number"] for session in _sessions(port)}
    for number in numbers:
        if number in own:
            server.call("DELETE", f"/api/sessions/{number}")
            print(f"Drop session successfully for server on port {port}")
        else:
            print(
                f"The server on port {port} has no session {number}; --list_sessions lists them.",
                file=sys.stderr,
            )
            code = 1
    return code


def _list(port: int) -> None:
    found = _sessions(port)
    print(f"Listing sessions for server on port {port}\n")
    if not found:
        print("No active sessions.")
        return
    print("".join(name.rjust(width) for name, width in _COLUMNS.items()))
    one_node = len(glob.glob("/sys/devices/system/node/node[0-9]*")) <= 1
    rows = [row for session in found for row in _rows(session, one_node)]
    for row in rows:
        print("".join(value.rjust(width) for value, width in zip(row, _COLUMNS.values(), strict=True)))


def _rows(session: dict[str, Any], one_node: bool) -> list[list[str]]:
    number, spills = str(session["number"]), session["disk"]["folder"] is not None
    if not session["caches"]:
        return [[number, *["n/a"] * 5]]
    return [
        [
            number,
            str(cache["id"]),
            str(cache["cached"] - cache["spilled"]),
            str(cache["spilled"]) if spills else "n/a",
            str(round(cache["mean_bytes"])) if cache["cached"] else "n/a",
            str(cache["hits"] + cache["peer_hits"] + cache["misses"]) if one_node else "n/a",
        ]
        for cache in session["caches"]
    ]


def _tell_of_server(port: int) -> None:
    status = client(port).call("GET", "/api/status")
    place = find(port)
    level = LEVELS.index(place.level) if place else "n/a"
    line = "-" * 40
    rows = {
        "hostname": status["host"],
        "port": port,
        "number of workers": "n/a",
        "log level": level,
        "spill dir": status["spill"]["folder"] if status["spill"] else "None",
    }
    print(f"Cache Server Configuration: \n{line}\n{'config name':>20}{'value':>15}\n{line}")
    for name, value in rows.items():
        print(f"{name:>20}{value:>15}")
    print(f"{line}\nActive sessions: ")
    own = [str(session["number"]) for session in status["sessions"] if session["server"] == port]
    if own:
        print("  ".join(own))
        print("(Please use 'cache_admin --list_sessions' to get detailed info of sessions.)")
    else:
        print("No active sessions.")


def _sessions(port: int) -> list[dict[str, Any]]:
    found = client(port).call("GET", "/api/sessions")
    return [session for session in found if session["server"] == port]


def _check(told: argparse.Namespace) -> None:
    """Check every value, for whichever command, as the reference does."""
    if told.hostname not in ("127.0.0.1", "localhost"):
        raise ArgumentError(
            f"Hostname must be 127.0.0.1, got {told.hostname!r}; for another address use "
            "`hotset start --host`."
        )
    if not 1025 <= told.port <= 65535:
        raise ArgumentError(f"Port must be in 1025 to 65535, got {told.port}; choose another.")
    if told.workers is not None and not 1 <= told.workers <= _MOST_WORKERS:
        raise ArgumentError(
            f"Number of workers must be in 1 to {_MOST_WORKERS}, got {told.workers}; leave the option out."
        )
    if not 0 <= told.loglevel < len(LEVELS):
        raise ArgumentError(f"Log level must be in 0 to {len(LEVELS) - 1}, got {told.loglevel}; 1 is info.")
    for number in told.destroy_session or ():
        if not 1 <= number <= _LARGEST_SESSION:
            raise ArgumentError(f"A session's number must be in 1 to {_LARGEST_SESSION}, got {number}.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(
            f"{message[:1].upper()}{message[1:]}; `hotset cache-admin --help` lists the options."
        )


class _Once(argparse.Action):
    """An option that may be given once."""

    def __call__(
        self, parser: argparse.ArgumentParser, told: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        given: set[str] = told.__dict__.setdefault("_given", set())
        if self.dest in given:
            raise ArgumentError(f"{option} was given more than once; give it once.")
        given.add(self.dest)
        setattr(told, self.dest, self.const if self.nargs == 0 else value)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hotset cache-admin",
        description="The command line of MindSpore's cache_admin, for hotset's cache server.",
        add_help=False,  # -h is the host name
        allow_abbrev=False,
    )
    commands = parser.add_mutually_exclusive_group(required=True)
    flag: dict[str, Any] = {"action": _Once, "nargs": 0, "const": True, "default": False}
    commands.add_argument("--start", help="start a server", **flag)
    commands.add_argument("--stop", help="stop it and destroy its sessions", **flag)
    commands.add_argument("-g", "--generate_session", help="create a session", **flag)
    commands.add_argument(
        "-d", "--destroy_session", metavar="ID", help="destroy sessions", action=_Once, type=int, nargs="+"
    )
    commands.add_argument("--list_sessions", help="list sessions and their caches", **flag)
    commands.add_argument("--server_info", help="show the server's configuration", **flag)
    commands.add_argument("--help", help="show this help and exit", action="help")
    once: dict[str, Any] = {"action": _Once}
    parser.add_argument("-h", "--hostname", help="127.0.0.1", default="127.0.0.1", **once)
    parser.add_argument("-p", "--port", help="1025 to 65535", type=int, default=DEFAULT_PORT, **once)
    parser.add_argument("-w", "--workers", help="accepted and ignored", type=int, **once)
    parser.add_argument("-s", "--spilldir", help="folder for samples that do not fit into memory", **once)
    parser.add_argument("-l", "--loglevel", help="0 to 4, 1 is info", type=int, default=1, **once)
    return parser
