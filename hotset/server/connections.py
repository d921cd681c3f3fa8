"""Connections: how many there are, and for how long one may keep the server waiting.

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
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BACKLOG", "Connection"]

# What asyncio accepts at once comes on top of the limit.
BACKLOG = 64

_MOST = 64
_REQUEST_SECONDS = 10.0


class Connection(H11Protocol):
    """One connection of the server's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._closing: asyncio.TimerHandle | None = None  # while a request is waited for
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._await_request()
        if len(self.connections) > _MOST:
            waiting = [one for one in self.connections if isinstance(one, Connection) and not one._is_served]
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
