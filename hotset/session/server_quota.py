"""A server's quota: what the sessions of one server may hold together.

A server has a quota file in the runtime folder, like a session (:mod:`hotset.session.quota`), whose members
are its sessions. A process that opens a session's quota puts it under the server's, so that room is taken in
both. The server itself takes no part in this, and need not run:

::

    server-50052.ledger     limit 60 GB     row 0: session 42, 31 GB     row 1: session 77, 20 GB
                                                   │
    42.session              limit 50 GB     row 0: its first cache, 30 GB     row 1: its second, 1 GB

Without a server's quota, or before a session has entered it, nothing but the session's own limit applies. A
session that was created again after a reboot enters once its server has started again
(:mod:`hotset.session.recovery`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from hotset.errors import SessionError
from hotset.session.quota import Quota
from hotset.session.runtime_dir import runtime
from hotset.session.session_files import unlink

__all__ = ["drop", "enter", "keep", "leave", "limit", "put_under_server", "set_limit"]


def set_limit(port: int, memory: int) -> None:
    """Set what the sessions of a server may hold together; creates its quota if there is none.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    with runtime() as folder:
        try:
            with _quota(folder, port) as quota:
                quota.limit = memory
            return
        except FileNotFoundError:
            pass
        except SessionError:  # damaged; only the server that holds the port uses it
            unlink(folder, _file(port))
        Quota.create(folder, _file(port), {"port": port}, memory)


def limit(port: int) -> int | None:
    """Return what the sessions of a server may hold together; None if there is no such server."""
    with runtime() as folder, contextlib.suppress(OSError), _quota(folder, port) as quota:
        return quota.limit
    return None


def drop(port: int) -> None:
    """Remove a server's quota, once its sessions are destroyed."""
    with runtime() as folder:
        unlink(folder, _file(port))


def enter(folder: int, port: int | None, number: int) -> None:
    """Enter a session in its server's quota, if it belongs to a server and that has a quota."""
    if port is None:
        return
    try:
        opened = _quota(folder, port)
    except (FileNotFoundError, SessionError):
        return  # a damaged one has no effect until its server starts again
    with opened as quota, quota.lock():
        quota.enter(number)


def leave(port: int | None, number: int) -> None:
    """Remove a session from its server's quota, so that others can use what it held."""
    if port is None:
        return
    with contextlib.suppress(OSError), runtime() as folder, _quota(folder, port) as quota:
        row = quota.members().get(number)
        if row is not None:
            quota.leave(row)


def keep(folder: int, port: int, numbers: Collection[int]) -> None:
    """Remove all sessions but these from a server's quota: a process may have died before it made one."""
    with contextlib.suppress(OSError), _quota(folder, port) as quota:
        for number, row in quota.members().items():
            if number not in numbers:
                quota.leave(row)


def put_under_server(folder: int, port: int, number: int, quota: Quota) -> None:
    """Put a session's quota under its server's, which bounds it then, if the session has entered that."""
    with contextlib.suppress(OSError):
        parent = Quota(folder, _file(port))
        row = parent.members().get(number)
        if row is not None:
            quota.set_parent(parent, row, number)
        else:
            parent.close()


def _quota(folder: int, port: int) -> contextlib.closing[Quota]:
    return contextlib.closing(Quota(folder, _file(port)))


def _file(port: int) -> str:
    return f"server-{port}.ledger"
