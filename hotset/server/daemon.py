"""The server's process, from its claim on the port to its end.

::

    claim the port ─ bind ─ budget, recovery ─ answer ........ destroy sessions ─ give the port back
          │            │                          ^                   ^
          └────────────┴── fails: a sentence,     │                   ├── POST /api/stop
                           exit code 2            └ housekeeping      └── SIGTERM, SIGINT: the same

An orderly end is the end of its sessions: their memory is what the user who ends the server wants back. A
server that is killed with -9 leaves them as they are; jobs do not notice, and the next server on that port
takes them over.

Every two seconds a thread cleans up and records the history. A task that fails is logged, once for each new
reason, and tried again two seconds later: no failure there ends the server.

A connection costs a descriptor, of which the server has few where a shell allows 256. So there is a limit,
and at the limit the connection that has waited longest, with no request under way, makes room for the next:
a client that asks is answered, however many sit idle.

=================================  ========================================================================
a request, from its first byte or  has come whole, header and body, within 10 s, or the connection is closed:
from the connection's beginning    a byte now and then does not keep it open
the next one on a connection       begins within 5 s of the last answer (uvicorn's own)
an answer                          is short: it fits into the socket's buffer
=================================  ========================================================================
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hotset.errors import HotsetError
from hotset.server import log
from hotset.server.app import make_app
from hotset.server.history import INTERVAL, History
from hotset.server.options import Options
from hotset.server.pidfile import ServerError, claim, log_path
from hotset.server.request_auth import Guard, content_policy
from hotset.server.session_service import SessionService
from hotset.session.reports import report_all

__all__ = ["Housekeeper", "serve"]

_log = logging.getLogger(__name__)
_FAREWELL_SECONDS = 5

# What asyncio accepts at once comes on top of the limit.
_BACKLOG = 64
_MOST_CONNECTIONS = 64
_REQUEST_SECONDS = 10.0


def serve(options: Options) -> int:
    """Serve until told to stop; return the process's exit code.

    With ``options.logs_to_file`` standard error must be the log file.
    """
    os.umask(0o077)
    log.set_up(options.level, file=options.logs_to_file)
    try:
        with claim(options.port) as claimed, _bind(options) as listener:
            service = SessionService(options, str(log_path(options.port)) if options.logs_to_file else None)
            server = _make_server(options, service, claimed.token)
            claimed.publish(service.place)
            service.begin()
            _log.info("server %d begins at %s", os.getpid(), service.place.url)
            server.run(sockets=[listener])
            service.end()
            _log.info("server %d ends", os.getpid())
    except (HotsetError, OSError) as error:
        _log.critical("%s", error)
        return 2
    return 0


class _Server(uvicorn.Server):
    """A server with its housekeeper, which starts when the server answers and ends before it."""

    def __init__(self, config: uvicorn.Config, service: SessionService, history: History) -> None:
        super().__init__(config)
        self._housekeeper = Housekeeper(service, history)
        # uvicorn restores the old handlers and raises the signal again that ended it. These are the old
        # handlers, so that the process continues to its own end. They also apply before it listens.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    async def main_loop(self) -> None:
        with self._housekeeper:
            await super().main_loop()

    def _end(self, *_: object) -> None:
        self.should_exit = True


def _make_server(options: Options, service: SessionService, token: str) -> uvicorn.Server:
    history = History()
    page = (Path(__file__).parent / "page.html").read_text("utf-8")

    def stop() -> None:
        server.should_exit = True

    app = Guard(make_app(service, history, page, stop), options, token, content_policy(page))
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=_Connection,
        backlog=_BACKLOG,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=None,
        # A line for each poll of the page would hide the others, so only for debugging.
        access_log=options.level == "debug",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_FAREWELL_SECONDS,
    )
    server = _Server(config, service, history)
    return server


def _bind(options: Options) -> socket.socket:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM
        )
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: part of the name is empty, or too long
        why = error.strerror if isinstance(error, OSError) else error
        raise ServerError(
            f"host must be an address of this machine, got {options.host} ({why}); choose another."
        ) from error
    try:
        # A port whose last server has just ended can be bound again; one that is listened on cannot.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"cannot listen on port {options.port} of {options.host} ({error.strerror}); "
            "choose another port, or stop the program that uses it."
        ) from error
    return listener


# ---- housekeeping ----------------------------------------------------------------------------------


class Housekeeper:
    """A thread that cleans up and records the history for as long as the ``with`` block runs."""

    def __init__(self, service: SessionService, history: History) -> None:
        self._service, self._history = service, history
        self._over = threading.Event()
        self._reasons: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="hotset housekeeping", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.do("cleaning", self._service.clean)
            self.do("looking at the sessions", lambda: self._history.add(report_all()))
            if self._over.wait(INTERVAL):
                return

    def do(self, what: str, task: Callable[[], object]) -> None:
        """Run one task; what it raises is logged."""
        try:
            task()
        except Exception as error:
            reason = repr(error)
            if self._reasons.get(what) != reason:
                _log.exception("%s failed, and is tried again", what)
            self._reasons[what] = reason
        else:
            self._reasons.pop(what, None)


# ---- connections -----------------------------------------------------------------------------------


class _Connection(H11Protocol):
    """One connection of the server's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._closing: asyncio.TimerHandle | None = None  # while a request is waited for
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._await_request()
        if len(self.connections) > _MOST_CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, _Connection) and not one._is_served]
            min(waiting, key=lambda one: one._since)._close()

    def data_received(self, data: bytes) -> None:
        self._await_request()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_awaiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        super().connection_lost(exc)

    @property
    def _is_served(self) -> bool:
        """Whether a request has come whole, and its answer is still to come."""
        return self._closing is None and self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        if self._closing is None:
            self._closing = self.loop.call_later(_REQUEST_SECONDS, self._close)

    def _stop_awaiting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def _close(self) -> None:
        self.connections.discard(self)  # now: more may be accepted before it has gone
        self.transport.abort()
