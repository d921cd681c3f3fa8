"""The limit of what a batch's way between processes can be: a bare loop of sends and receives over TCP.

One end sends bytes that lie there already, the other receives them into a ring of blocks that is there
already; four batches are asked for ahead. With a key both ends run the cipher of hotset's connections over
each batch where it lies, and that is all that such a loop does besides: no record is looked up, copied or
verified. What is lost by that no cache between machines can have if its records pass encrypted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

__all__ = ["receiver", "send"]

_IN_FLIGHT = 4
_RING = 4


def send(server: socket.socket, size: int, key: bytes | None = None) -> None:
    """Accept one connection, and send it batches of so many bytes until it ends.

    Args:
        server: that listens.
        size: bytes of a batch.
        key: of AES, with which each batch is encrypted; None: none is.
    """
    ring = [np.ones(size, np.uint8).data for _ in range(_RING if key else 1)]
    turn = 0
    connection, _ = server.accept()
    with connection:
        while ordered := connection.recv(64):
            for _ in ordered:
                batch = ring[turn % len(ring)]
                turn += 1
                _cipher(key, batch)
                connection.sendall(batch)


def receiver(connection: socket.socket, size: int, key: bytes | None = None) -> Callable[[], int]:
    """What receives the next batch, and returns its bytes.

    Args:
        connection: to what :func:`send` serves.
        size, key: as there.
    """
    ring = [np.zeros(size, np.uint8).data for _ in range(_RING)]
    turn = 0
    connection.sendall(b"n" * _IN_FLIGHT)

    def received() -> int:
        nonlocal turn
        into, got = ring[turn % _RING], 0
        while got < size:
            got += connection.recv_into(into[got:])
        connection.sendall(b"n")
        turn += 1
        _cipher(key, into)
        return size

    return received


def _cipher(key: bytes | None, batch: memoryview) -> None:
    """Run AES-GCM over a batch, where it lies; to decrypt is the same arithmetic."""
    if key is not None:
        encryptor = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()
        encryptor.update_into(batch, batch)
        encryptor.finalize()
