"""What a server is told at its start, checked before a process is made for it."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from hotset._warnings import printable
from hotset.errors import ArgumentError
from hotset.server.parsing import parse_share
from hotset.server.pidfile import DEFAULT_PORT
from hotset.session.spill_dirs import open_spill
from hotset.store.memory_limits import headroom

__all__ = ["LEVELS", "Options"]

LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Options:
    """A server's options.

    Attributes:
        host: name or address of *one* interface, by which clients name it too: requests with another
            ``Host`` are refused, so "every interface" (0.0.0.0) would be an address that nobody may use.
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
        """Check what a person typed.

        Args:
            memory: bytes, or a percentage of the machine's memory or its control group's limit.
            spill: a folder that is there and may be written to; relative paths count from here.

        Raises:
            QuantityError, ArgumentError: an option is not what it may be.
            SessionError, FolderError: nothing can be spilled to that folder.

        Example:
            >>> Options.parse(port=50060, memory="64MiB").memory
            67108864
        """
        host = host.lower()  # as in the requests, where case does not count
        if _is_wildcard(host):
            raise ArgumentError(
                f"host={host!r} is every interface, which no request can name; give the one name or address "
                "by which clients reach the server."
            )
        if not host or not host.isascii() or not all(c.isalnum() or c in ".-_:" for c in host):
            raise ArgumentError(f"host={printable(host)!r} is no name or address; give 127.0.0.1, say.")
        if not 1 <= port <= 65535:
            raise ArgumentError(f"port={port} is no port; give one from 1 to 65535.")
        if level not in LEVELS:
            raise ArgumentError(f"log level {printable(level)!r} is none of {', '.join(LEVELS)}.")
        limit = headroom().limit
        return cls(host, port, parse_share(memory, limit), _folder(spill), level, logs_to_file)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def arguments(self) -> list[str]:
        """Return them as the arguments of ``python -m hotset.server``."""
        spill = ["--spill", self.spill] if self.spill else []
        log = ["--log-file"] if self.logs_to_file else []
        return [
            *("--host", self.host, "--port", str(self.port), "--memory", str(self.memory)),
            *("--log-level", self.level, *spill, *log),
        ]


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _folder(spill: str | None) -> str | None:
    if spill is None:
        return None
    path = os.path.abspath(spill)
    if not os.path.isdir(path):
        raise ArgumentError(
            f"the spill folder {printable(path)!r} is not there; make it, or give another one."
        )
    os.close(open_spill(path, make=True))  # whoever may write everywhere fails here too, on /proc, say
    return path
