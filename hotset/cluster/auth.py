"""The door: who is let in to the sockets of a context.

Whether a key is allowed is asked at one address of a context, for all of its sockets (ZAP,
https://rfc.zeromq.org/spec/27/). The serving thread answers there, beside its own socket.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import zmq
from zmq.utils import z85

__all__ = ["ZapAuthenticator"]

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
