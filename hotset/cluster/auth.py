"""The door: who is let in to the sockets of a context, and a thread that minds it where theirs are busy.

Whether a key is allowed is asked at one address of a context, for all of its sockets (ZAP,
https://rfc.zeromq.org/spec/27/). Who serves from memory minds it beside that. Relays wait for other machines,
and there may be many: they have one context together, and a thread that does nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from typing import Any

import zmq
from zmq.utils import z85

from hotset.cluster.sockets import close

__all__ = ["Hall", "ZapAuthenticator"]

_ZAP = "inproc://zeromq.zap.01"


class ZapAuthenticator:
    """Says whether who connects may. To be made before any socket of the context is bound.

    Args:
        context: whose sockets it is for; there is one door to each.
        allowed: public keys of who is let in; looked at anew with each connection.

    Attributes:
        socket: to be polled; if there is something, :meth:`admit`.
        strangers: connections that were not let in.
    """

    def __init__(self, context: zmq.Context[Any], allowed: Collection[bytes]) -> None:
        self._allowed = allowed
        self.strangers = 0
        self.socket: Any = context.socket(zmq.REP)
        self.socket.bind(_ZAP)

    def admit(self) -> None:
        """Answer a request of ZAP, whose last frame is the public key."""
        version, number, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        known = key in self._allowed
        self.strangers += not known
        code, text = (b"200", b"OK") if known else (b"400", b"a key that is not allowed")
        self.socket.send_multipart([version, number, code, text, key, b""])


class Hall:
    """A context with one thread for input and output, and its door, which a thread of its own minds.

    Args:
        allowed: public keys of who is let in.

    Attributes:
        context: for sockets, which are closed before it is.
    """

    def __init__(self, allowed: Collection[bytes]) -> None:
        self._pid = os.getpid()
        self.context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._door = ZapAuthenticator(self.context, allowed)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="hotset door", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop, zmq.POLLIN)
        poller.register(self._door.socket, zmq.POLLIN)
        try:
            while self._stop not in dict(poller.poll()):
                self._door.admit()
        finally:
            close(self.context, self._door.socket)

    def close(self) -> None:
        """Let nobody in any more. Nothing happens in a forked child."""
        if self._pid == os.getpid():
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
