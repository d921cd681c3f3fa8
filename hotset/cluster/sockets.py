"""Sockets and keys: what both ends of a connection between machines set alike, and which clients are let in.

Every machine has a pair of keys. A server accepts only the public keys on its list, and a client
knows the server's public key, so each end is sure of the other (CURVE, https://rfc.zeromq.org/spec/26/). Over
such a connection a client only gets what it needs for another one, on which records pass, sealed
(:mod:`hotset.cluster.sealing`); there a password keeps strangers from sending anything. Without keys (None)
any process that reaches the address may ask: for networks that encrypt by themselves.

Whether a key or a password is right is asked at one address of a context, for all of its sockets (ZAP,
https://rfc.zeromq.org/spec/27/); the serving thread answers there.

Heartbeats bound what the dead and the stopped hold: a connection that is silent for `SILENCE` is closed, and
what was waiting to be sent over it is freed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import zmq
from zmq.utils import z85

from hotset.cluster.membership import Keys
from hotset.cluster.protocol import LONGEST
from hotset.cluster.sealing import SEAL, Credentials

__all__ = [
    "SILENCE",
    "SPARE",
    "ZapAuthenticator",
    "ask_by_curve",
    "ask_by_password",
    "close",
    "open_socket",
    "require_descriptors",
    "serve_by_curve",
    "serve_by_password",
]

# Milliseconds. One is asked for often enough that two of them may get lost.
SILENCE = 1500
# A context takes eight descriptors, a connection six.
SPARE = 32
_HEARTBEAT = 500
_HANDSHAKE = 2000
_ZAP = "inproc://zeromq.zap.01"


def open_socket(context: zmq.Context[Any], kind: int, address: str) -> Any:
    """Make a socket that closes at once, and takes nothing that is larger than a sealed message.

    Args:
        context: of this process.
        kind: ``zmq.ROUTER`` serves, ``zmq.DEALER`` asks.
        address: decides between IPv4 and IPv6.
    """
    socket: Any = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = SEAL + LONGEST
    socket.heartbeat_ivl = _HEARTBEAT
    socket.heartbeat_timeout = SILENCE
    socket.handshake_ivl = _HANDSHAKE
    socket.ipv6 = "[" in address
    return socket


def serve_by_curve(socket: Any, keys: Keys) -> None:
    """Let in clients whose public keys are allowed."""
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_server = True
    _ask_first(socket)


def ask_by_curve(socket: Any, keys: Keys, server: bytes | None) -> None:
    """Connect to none but the server with this public key."""
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_serverkey = server


def serve_by_password(socket: Any) -> None:
    """Let in clients that were given credentials."""
    socket.plain_server = True
    _ask_first(socket)


def ask_by_password(socket: Any, credentials: Credentials) -> None:
    """Connect with these credentials."""
    socket.plain_username, socket.plain_password = credentials.connection, credentials.password


def _ask_first(socket: Any) -> None:
    # Fail closed: without an answer from the authenticator no client is let in.
    socket.zap_domain, socket.zap_enforce_domain = b"hotset", True


def require_descriptors() -> None:
    """Refuse to go on where few descriptors are left.

    Call this before a context or a socket is made: if ZeroMQ gets none for its own threads, it ends the whole
    process.

    Raises:
        OSError: ``SPARE`` more cannot be opened.
    """
    opened: list[int] = []
    try:
        while len(opened) < SPARE:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in opened:
            os.close(fd)


def close(context: zmq.Context[Any], *sockets: Any) -> None:
    """Close sockets, then the context; what is not sent yet is dropped."""
    for socket in sockets:
        socket.close(0)
    context.term()


class ZapAuthenticator:
    """Decides which clients may connect. Make it before any socket of the context is bound.

    Args:
        context: whose sockets it is for; a context has one authenticator.
        allowed: public keys that are let in; looked at anew with each connection.
        admits: whether a name and a password are right.

    Attributes:
        socket: poll it; when something has come, call :meth:`admit`.
        strangers: connections that were not let in.
    """

    def __init__(
        self, context: zmq.Context[Any], allowed: Collection[bytes], admits: Callable[[bytes, bytes], bool]
    ) -> None:
        self._allowed = allowed
        self._admits = admits
        self.strangers = 0
        self.socket: Any = context.socket(zmq.REP)
        self.socket.bind(_ZAP)

    def admit(self) -> None:
        """Answer a request of ZAP, whose last frames are the public key, or name and password."""
        version, number, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        known = False
        if mechanism == b"CURVE" and len(credentials) == 1:
            known = z85.encode(credentials[0]) in self._allowed
        elif mechanism == b"PLAIN" and len(credentials) == 2:
            known = self._admits(*credentials)
        self.strangers += not known
        code, text = (b"200", b"OK") if known else (b"400", b"a key that is not allowed")
        self.socket.send_multipart([version, number, code, text, b"", b""])
