"""The options of a server, checked before its process is started."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from dataclasses import asdict, dataclass

from hotset._warnings import printable
from hotset.errors import ArgumentError
from hotset.server.parsing import parse_share
from hotset.server.pidfile import DEFAULT_PORT
from hotset.session.spill_dirs import make_spill
from hotset.store.memory_limits import headroom

__all__ = ["LEVELS", "Options"]

LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Options:
    """A server's options.

    Attributes:
        host: name or address of *one* interface, which clients must use too: requests with another
            ``Host`` are refused, so no request could reach "every interface" (0.0.0.0).
        port: 1 to 65535.
        memory: bytes that its sessions may hold together.
        spill: folder for what its sessions spill, unless they name their own; None: they spill nothing.
        level: of its log, one of :data:`LEVELS`.
        logs_to_file: False to write the log to the terminal.
    """

    host: str
    port: int
    memory: int
    spill: str | None
    level: str
    logs_to_file: bool

    @classmethod
    def parse(
        cls,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        memory: str = "80%",
        spill: str | None = None,
        level: str = "info",
        logs_to_file: bool = True,
    ) -> Options:
        """Check the options of the command line.

        Args:
            memory: bytes, or a percentage of the machine's memory or its control group's limit.
            spill: a folder that exists and is writable; a relative path starts at the working directory.

        Raises:
            QuantityError, ArgumentError: an option is invalid.
            SessionError, FolderError: the spill folder cannot be used.

        Example:
            >>> Options.parse(port=50060, memory="64MiB").memory
            67108864
        """
        host = host.lower()  # as in the requests, where case does not count
        if not host or not host.isascii() or not all(c.isalnum() or c in ".-_:" for c in host):
            raise ArgumentError(
                f"host must be a name or an address such as 127.0.0.1, got {printable(host)!r}."
            )
        address = _address(host)
        if address is not None and address.is_unspecified:
            raise ArgumentError(
                f"host must be one name or address by which clients reach the server, got {host!r}, which "
                "is every interface."
            )
        if not 1 <= port <= 65535:
            raise ArgumentError(f"port must be in 1 to 65535, got {port}.")
        if level not in LEVELS:
            raise ArgumentError(f"log level must be one of {', '.join(LEVELS)}, got {printable(level)!r}.")
        limit = headroom().limit
        return cls(host, port, parse_share(memory, limit), _folder(spill), level, logs_to_file)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        address = _address(self.host)
        return self.host == "localhost" if address is None else address.is_loopback

    def argument(self) -> str:
        """Return them as the argument of ``python -m hotset.server``."""
        return json.dumps(asdict(self))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that is meant by numbers, in each form in which the system takes it; None for a name.

    Example:
        >>> _address("0"), _address("127.1"), _address("gpu7.example")
        (IPv4Address('0.0.0.0'), IPv4Address('127.0.0.1'), None)
    """
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    address = ipaddress.ip_address(found[0][4][0])
    return getattr(address, "ipv4_mapped", None) or address


def _folder(spill: str | None) -> str | None:
    if spill is None:
        return None
    if not spill:
        raise ArgumentError("a spill folder must be a path, got ''; name one, or leave it out.")
    path = os.path.abspath(spill)
    if not os.path.isdir(path):
        raise ArgumentError(
            f"the spill folder {printable(path)!r} does not exist; create it, or choose another."
        )
    make_spill(path)  # fails for root too, for example on /proc
    return path
