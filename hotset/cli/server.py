"""``hotset start`` and ``stop``: the cache server as a daemon.

The daemon is a new process in a process session of its own, so that closing the terminal does not end it. Its
output goes to the log file, and it inherits no open file of the caller. ``start`` returns once the daemon has
answered a request, or reports why the daemon ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from hotset.cli.client import Client, client, no_server
from hotset.server.options import Options
from hotset.server.pidfile import (
    DEFAULT_PORT,
    Place,
    ServerError,
    already_running,
    ending,
    find,
    is_claimed,
    log_path,
    open_log,
    read_token,
    running,
)
from hotset.session.runtime_dir import KNOB, runtime_folder

__all__ = ["start", "stop", "the_port", "token"]

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_PAUSE = 0.02


def the_port(port: int | None) -> int:
    """Return ``port`` if it is given, else the port of the server that runs.

    If no server runs, or one of several uses the default port, it is the default port.

    Raises:
        ServerError: several servers run, none of them on the default port.
    """
    if port is not None:
        return port
    ports = running()
    if not ports or DEFAULT_PORT in ports:
        return DEFAULT_PORT
    if len(ports) > 1:
        there = ", ".join(map(str, ports))
        raise ServerError(f"Several servers run, on the ports {there}; choose one with `--port`.")
    return ports[0]


def start(options: Options) -> Place:
    """Start a daemon; return where it listens.

    Raises:
        ServerError: it did not start; the message has the last line of its log.
    """
    if is_claimed(options.port):
        raise already_running(options.port)
    log = open_log(options.port)
    try:
        begin = os.fstat(log).st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "hotset.server", options.argument()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            # The folder in effect here: its name may be relative to the working directory.
            env={**os.environ, KNOB: str(runtime_folder())},
        )
        deadline = time.monotonic() + _START_SECONDS
        while (place := _answering(options.port, process.pid)) is None:
            if process.poll() is not None:
                last = _last(log, begin, options.port)
                raise ServerError(f"The server did not start. The last line of its log: {last}")
            if time.monotonic() > deadline:
                process.terminate()
                raise ServerError(
                    f"The server has not answered for {_START_SECONDS:.0f} s and was terminated. "
                    f"The last line of its log: {_last(log, begin, options.port)}"
                )
            time.sleep(_PAUSE)
    finally:
        os.close(log)
    process.returncode = 0  # or Popen would warn that the child still runs
    return place


def stop(port: int) -> Place:
    """Stop the server on this port, which destroys its sessions; return where it was, once it has ended.

    Raises:
        ServerError: there is none, or it does not end.
    """
    server = client(port)
    with ending(port) as has_gone:
        server.call("POST", "/api/stop")
        deadline = time.monotonic() + _STOP_SECONDS
        while not has_gone():
            if time.monotonic() > deadline:
                raise ServerError(
                    f"The server on port {port} (process {server.place.pid}) has not ended within "
                    f"{_STOP_SECONDS:.0f} s; end it with `kill -9 {server.place.pid}`."
                )
            time.sleep(_PAUSE)
    return server.place


def token(port: int) -> str:
    """Return the token of the server on this port.

    Raises:
        ServerError: there is no server.
    """
    if not is_claimed(port):
        raise no_server(port)
    return read_token(port)


def _answering(port: int, pid: int) -> Place | None:
    place = find(port)
    if place is not None and place.pid == pid:
        with contextlib.suppress(ServerError):
            Client(place).call("GET", "/api/status")
            return place
    return None


def _last(log: int, begin: int, port: int) -> str:
    """The last line that was written since ``begin``; an older one would be another start's."""
    lines = os.pread(log, 1 << 16, max(begin, os.fstat(log).st_size - (1 << 16))).decode("utf-8", "replace")
    written = [line for line in lines.splitlines() if line.strip()]
    if written:
        return written[-1].strip()
    return f"there is none; is there room for {log_path(port)}?"
