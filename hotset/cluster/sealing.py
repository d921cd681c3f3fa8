"""Sealed messages: records between machines, encrypted and authenticated with AES-GCM.

ZeroMQ's own encryption, CURVE, is arithmetic in software and keeps a core busy on either side at 0.7 GB/s;
processors have instructions for AES-GCM (NIST SP 800-38D), and OpenSSL uses them. So CURVE does what it is
there for, which is to authenticate both ends, and transmits a key; records pass on a second connection, under
that key::

    client ──CURVE──> "a key, please"           only for machines that the cluster knows
           <─CURVE──  connection | password | key | port
           ──PLAIN──> connection, password      a connection of strangers ends here
           ══AES-GCM══ requests and answers

    a sealed message   seal | message, encrypted
    seal               +0 connection 16 B | +16 count u64 | +24 tag 16 B

A message is sealed and opened where it lies: room for its seal is left in front of it.

Each connection has a key of its own, which is never stored: an attacker who records the messages cannot read
them later with the keys of the machines. The nonce is made of direction and count, so none comes twice under
one key. A message that was changed, cut short, or sent again does not open, as each message must have a
higher count than the one before.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

__all__ = ["SEAL", "Credentials", "GivenKeys", "Sealing", "Unsealable", "joined"]

_SEAL = struct.Struct("<16sQ16s")
SEAL = _SEAL.size
_CREDENTIALS = struct.Struct("<16s16s32sH")
_ASKS, _ANSWERS = b"ask ", b"tell"
# Connections whose keys a server remembers: more than it has descriptors for.
_MOST = 1 << 14


class Unsealable(ValueError):
    """A message that was not sealed with this connection's key, or is not the next one."""


class Credentials(NamedTuple):
    """What a client gets over CURVE, to connect for records.

    Attributes:
        connection: 16 bytes; its name.
        password: 16 bytes; opens the door, not the messages: it passes unencrypted.
        key: 32 bytes, of AES-256.
        port: where records are asked for.
    """

    connection: bytes
    password: bytes
    key: bytes
    port: int

    @classmethod
    def new(cls, port: int) -> Credentials:
        """Draw new credentials."""
        return cls(os.urandom(16), os.urandom(16), os.urandom(32), port)

    def packed(self) -> bytes:
        """The credentials as they travel."""
        return _CREDENTIALS.pack(*self)

    @classmethod
    def parse(cls, said: bytes | memoryview) -> Credentials:
        """Read credentials that a server has sent.

        Raises:
            Unsealable: they have another length.
        """
        if len(said) != _CREDENTIALS.size:
            raise Unsealable
        return cls(*_CREDENTIALS.unpack(said))

    def __repr__(self) -> str:
        """Without its secrets: these end up in logs."""
        return f"Credentials({self.connection.hex()})"


def joined(parts: Sequence[Any], memory: npt.NDArray[np.uint8] | None = None) -> memoryview:
    """Lay the parts of a message side by side, behind room for its seal.

    Args:
        parts: buffers of bytes.
        memory: to lay them out in, in place of new memory. A part may lie in it where it belongs, and is not
            copied then.
    """
    size = SEAL + sum(map(len, parts))
    run = np.empty(size, np.uint8) if memory is None else memory[:size]
    at = SEAL
    for part in parts:
        run[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return run.data


class Sealing:
    """One end of a connection, the server's if it ``serves``. Used by one thread at a time.

    Example:
        >>> given = Credentials.new(port=1)
        >>> client, server = Sealing(given, serves=False), Sealing(given, serves=True)
        >>> sealed = client.seal(joined([b"header", b"ids"]))
        >>> again = sealed.tobytes()
        >>> bytes(server.open(sealed))
        b'headerids'
        >>> server.open(memoryview(bytearray(again)))  # once more
        Traceback (most recent call last):
            ...
        hotset.cluster.sealing.Unsealable
    """

    def __init__(self, credentials: Credentials, *, serves: bool) -> None:
        self._connection = credentials.connection
        self._key = algorithms.AES(credentials.key)
        self._out, self._in = (_ANSWERS, _ASKS) if serves else (_ASKS, _ANSWERS)
        self._sent = self._received = 0

    def seal(self, run: memoryview) -> memoryview:
        """Encrypt a message that lies behind room for its seal, as :func:`joined` lays it out."""
        self._sent += 1
        message = run[SEAL:]
        cipher = Cipher(self._key, modes.GCM(_nonce(self._out, self._sent))).encryptor()
        cipher.update_into(message, message)
        cipher.finalize()
        _SEAL.pack_into(run, 0, self._connection, self._sent, cipher.tag)
        return run

    def open(self, sealed: memoryview) -> memoryview:
        """Decrypt a message where it lies. ZeroMQ's received frames can be written to.

        (Decrypted into memory beside them, they are given back at once, and the next ones' pages have to be
        taken anew: a third of the time.)

        Raises:
            Unsealable: it is not what the other end has sealed next, or later.
        """
        _, count, tag = _seal_of(sealed)
        if count <= self._received:
            raise Unsealable
        message = sealed[SEAL:]
        cipher = Cipher(self._key, modes.GCM(_nonce(self._in, count), tag)).decryptor()
        cipher.update_into(message, message)
        try:
            cipher.finalize()
        except InvalidTag:
            raise Unsealable from None
        self._received = count
        return message.toreadonly()


class GivenKeys:
    """What a server has given to its clients; of more than it can have, the ones that were used last."""

    def __init__(self) -> None:
        self._given: OrderedDict[bytes, tuple[Credentials, Sealing]] = OrderedDict()

    def give(self, port: int) -> Credentials:
        """Draw credentials for one more connection."""
        drawn = Credentials.new(port)
        self._given[drawn.connection] = drawn, Sealing(drawn, serves=True)
        if len(self._given) > _MOST:
            self._given.popitem(last=False)
        return drawn

    def admits(self, connection: bytes, password: bytes) -> bool:
        """Whether these were given to a client."""
        known = self._given.get(connection)
        return known is not None and hmac.compare_digest(known[0].password, password)

    def of(self, sealed: memoryview) -> Sealing:
        """The sealing of the connection that a message names.

        Raises:
            Unsealable: it names none.
        """
        connection = _seal_of(sealed)[0]
        if connection not in self._given:
            raise Unsealable
        self._given.move_to_end(connection)
        return self._given[connection][1]


def _seal_of(sealed: memoryview) -> tuple[bytes, int, bytes]:
    if len(sealed) < SEAL:
        raise Unsealable
    return _SEAL.unpack_from(sealed)


def _nonce(direction: bytes, count: int) -> bytes:
    return direction + count.to_bytes(8, "little")
