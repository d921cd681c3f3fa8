"""Where the server on a port is found, and the lock that keeps it the only one.

A server has three files in the runtime folder, which is this user's alone:

=======================  ==============================================================================
``server-<port>.json``   process, host, port, log file, log level; **its lock is the server's life**
``server-<port>.token``  the token, made anew at each start
``server-<port>.log``    the log, of bounded size; it stays when the server has gone
=======================  ==============================================================================

::

    open or make ── lock ── still named? ── token ── publish ──> answer ──> remove both ──> gone: unlock

A killed server leaves its files; without the lock they mean nothing, and the next server on that port takes
them over. The process number in the file is for the user: by now it may be another process's, or another
container's. If a client finds the lock without valid content, the server is still starting.

Functions that open the runtime folder or its files raise FolderError if these are not safely this user's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hotset.errors import HotsetError
from hotset.session.runtime_dir import (
    is_named,
    open_or_create,
    opened,
    runtime,
    runtime_folder,
    write,
)
from hotset.store import locks

__all__ = [
    "DEFAULT_PORT",
    "Claim",
    "Place",
    "ServerError",
    "alone",
    "already_running",
    "claim",
    "ending",
    "find",
    "is_claimed",
    "log_path",
    "open_log",
    "read_token",
    "running",
]

DEFAULT_PORT = 50052

_LIFE = 0  # the byte of the file whose lock means that the server is alive
_LARGEST = 1 << 16
_CLAIM = re.compile(r"server-(\d{1,5})\.json")


class ServerError(HotsetError, OSError):
    """No server answers, it refused, or it cannot be started."""


def already_running(port: int) -> ServerError:
    """Return the error for a port on which a server runs already."""
    return ServerError(
        f"A server on port {port} runs already; stop it with `hotset stop --port {port}`, or choose another "
        "port."
    )


@dataclass(frozen=True)
class Place:
    """Where a server answers.

    Attributes:
        pid: its process, in its own process namespace.
        host, port: its address.
        log: its log file; None if it writes to a terminal.
        level: its log level: debug, info, warning, error or critical.
    """

    pid: int
    host: str
    port: int
    log: str | None
    level: str

    @property
    def url(self) -> str:
        """Its address in a browser.

        Example:
            >>> Place(1, "::1", 50052, None, "info").url
            'http://[::1]:50052'
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def log_path(port: int) -> Path:
    """Where a daemon on this port writes its log."""
    return runtime_folder() / f"server-{port}.log"


def find(port: int) -> Place | None:
    """Return where the server on this port is; None if there is none, or it is still starting."""
    content = _read(port, "json", only_locked=True)
    try:
        return Place(**json.loads(content)) if content else None
    except (TypeError, ValueError):
        return None


def running() -> list[int]:
    """The ports of the servers that run, answering or not."""
    names = [_CLAIM.fullmatch(name) for name in os.listdir(runtime_folder())]
    return [port for port in sorted(int(name[1]) for name in names if name) if is_claimed(port)]


def is_claimed(port: int) -> bool:
    """Whether a server runs on this port, answering or not."""
    return _read(port, "json", only_locked=True) is not None


@contextlib.contextmanager
def ending(port: int) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the process of this port's present server has ended."""
    with contextlib.ExitStack() as stack:
        fd = None
        with contextlib.suppress(FileNotFoundError), runtime() as folder:
            fd = stack.enter_context(opened(folder, f"server-{port}.json"))
        # On the file itself: its name goes before the process does.
        yield lambda: fd is None or not locks.is_locked(fd, _LIFE)


def read_token(port: int) -> str:
    """Return the token of the server of this port; empty if there is none."""
    return (_read(port, "token") or b"").decode("ascii", "replace")


class Claim:
    """A port's files, held by its server; see :func:`claim`."""

    def __init__(self, fd: int, token: str) -> None:
        self._fd = fd
        self.token = token

    def publish(self, place: Place) -> None:
        """Write where the server listens."""
        content = json.dumps(asdict(place)).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, content, 0)


@contextlib.contextmanager
def claim(port: int) -> Iterator[Claim]:
    """Claim this port for the one server, with a new token, for as long as the block runs.

    Another process can claim the port after the block. The lock stays until this process has ended, which
    ``hotset stop`` waits for.

    Raises:
        ServerError: another server has it.
        OSError: the file system refuses.
    """
    with alone(port) as (folder, fd):
        _remove(folder, f"server-{port}.token")
        import secrets  # its import takes longer than all else here, and clients do without

        token = secrets.token_urlsafe(32)
        with opened(folder, f"server-{port}.token", create=True) as token_file:
            write(token_file, token.encode())
        yield Claim(fd, token)


@contextlib.contextmanager
def alone(port: int) -> Iterator[tuple[int, int]]:
    """Keep servers off this port while a block runs, which gets the folder and the locked file.

    Nothing is written, so this needs no room. At the end both files are removed.

    Raises:
        ServerError: a server has the port.
        OSError: the file system refuses.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(runtime())
        file = f"server-{port}.json"
        fd = _lock(folder, file, port)
        # The name is removed under the lock: a process that opened the file before starts again.
        stack.callback(_remove, folder, file)
        stack.callback(_remove, folder, f"server-{port}.token")
        os.ftruncate(fd, 0)
        yield folder, fd


def open_log(port: int) -> int:
    """Return a descriptor of the log of this port that writes at its end."""
    with runtime() as folder:
        fd = open_or_create(folder, f"server-{port}.log")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _lock(folder: int, file: str, port: int) -> int:
    while True:
        fd = open_or_create(folder, file)
        try:
            if not locks.try_lock(fd, _LIFE):
                raise already_running(port)
            if is_named(fd, folder, file):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _read(port: int, suffix: str, *, only_locked: bool = False) -> bytes | None:
    with (
        contextlib.suppress(FileNotFoundError),
        runtime() as folder,
        opened(folder, f"server-{port}.{suffix}") as fd,
    ):
        return None if only_locked and not locks.is_locked(fd, _LIFE) else os.pread(fd, _LARGEST, 0)
    return None


def _remove(folder: int, file: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file, dir_fd=folder)
