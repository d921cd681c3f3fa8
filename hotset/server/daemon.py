"""The server's process, from its claim on the port to its end.

::

    claim the port ─ bind ─ budget, recovery ─ answer ........ destroy sessions ─ give the port back
          │            │                          ^                   ^
          └────────────┴── fails: a sentence,     │                   ├── POST /api/stop
                           exit code 2            └ chores            └── SIGTERM, SIGINT: the same

An orderly end is the end of its sessions: what they hold is memory, which whoever ends the server wants back.
Killed with -9 it leaves them as they are; jobs do not notice, and the next server of that port has them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from pathlib import Path

import uvicorn

from hotset.errors import HotsetError
from hotset.server import log
from hotset.server.app import make_app
from hotset.server.connections import BACKLOG, Connection
from hotset.server.history import History
from hotset.server.housekeeping import Housekeeper
from hotset.server.options import Options
from hotset.server.pidfile import ServerError, claim, log_path
from hotset.server.request_auth import Guard, content_policy
from hotset.server.session_service import SessionService

__all__ = ["serve"]

_log = logging.getLogger(__name__)
_FAREWELL_SECONDS = 5


def serve(options: Options) -> int:
    """Serve until told to stop; return the process's exit code.

    With ``options.logs_to_file`` standard error must be the log file.
    """
    os.umask(0o077)
    log.set_up(options.level, file=options.logs_to_file)
    try:
        with claim(options.port) as claimed, _bind(options) as listener:
            keeper = SessionService(options, str(log_path(options.port)) if options.logs_to_file else None)
            server = _make_server(options, keeper, claimed.token)
            claimed.tell(keeper.place)
            keeper.begin()
            _log.info("server %d begins at %s", os.getpid(), keeper.place.url)
            server.run(sockets=[listener])
            keeper.end()
            _log.info("server %d ends", os.getpid())
    except (HotsetError, OSError) as error:
        _log.critical("%s", error)
        return 2
    return 0


class _Server(uvicorn.Server):
    """A server with its housekeeper, which starts when the server answers and ends before it."""

    def __init__(self, config: uvicorn.Config, keeper: SessionService, history: History) -> None:
        super().__init__(config)
        self._chores = Housekeeper(keeper, history)
        # uvicorn restores the old handlers and raises the signal again that ended it. These are the old
        # handlers, so that the process continues to its own end. They also apply before it listens.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    async def main_loop(self) -> None:
        with self._chores:
            await super().main_loop()

    def _end(self, *_: object) -> None:
        self.should_exit = True


def _make_server(options: Options, keeper: SessionService, token: str) -> uvicorn.Server:
    history = History()
    page = (Path(__file__).parent / "page.html").read_text("utf-8")

    def stop() -> None:
        server.should_exit = True

    app = Guard(make_app(keeper, history, page, stop), options, token, content_policy(page))
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        backlog=BACKLOG,
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
    server = _Server(config, keeper, history)
    return server


def _bind(options: Options) -> socket.socket:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServerError(
            f"host must be an address of this machine, got {options.host} ({error.strerror}); choose another."
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
