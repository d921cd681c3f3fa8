"""Servers' budgets: what the sessions of one server may hold together.

A server has a quota in the runtime folder, like a session (:mod:`hotset.session.quota`), whose members are
its sessions. Whoever opens a session's quota has it stand under the server's, so that room is asked for in
both; the server itself is not asked, and need not run:

::

    server-50052.ledger     limit 60 GB     row 0: session 42, 31 GB     row 1: session 77, 20 GB
                                                   │
    42.session              limit 50 GB     row 0: its first cache, 30 GB     row 1: its second, 1 GB

A server that is not there, or that a session has not entered, bounds nothing. A session that was made again
after a reboot enters when its server has begun anew (:mod:`hotset.session.recovery`).
"""

from __future__ import annotations

import contextlib

from hotset.errors import SessionError
from hotset.session.file_names import runtime, unlink
from hotset.session.quota import Quota

__all__ = ["drop", "enter", "leave", "limit", "set_limit", "stand_under"]


def set_limit(port: int, memory: int) -> None:
    """Say what the sessions of a server may hold together; makes its quota if there is none.

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
        except SessionError:  # damaged; the server that has the port is alone with it
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
    """Have a session count in its server's budget, if it belongs to one and that has a budget.

    Args:
        folder: the runtime folder.
        port: the server's.
        number: the session's.
    """
    if port is None:
        return
    try:
        opened = _quota(folder, port)
    except (
        FileNotFoundError,
        SessionError,
    ):  # one that is damaged bounds nothing, until its server begins anew
        return
    with opened as quota, quota.lock():
        quota.enter(number)


def leave(port: int | None, number: int) -> None:
    """Have a session count no more, and what it held be free for others."""
    if port is None:
        return
    with contextlib.suppress(OSError), runtime() as folder, _quota(folder, port) as quota:
        row = quota.members().get(number)
        if row is not None:
            quota.leave(row)


def stand_under(folder: int, port: int, number: int, quota: Quota) -> None:
    """Have a session's quota take no more than its server's has to give, if it has entered there."""
    with contextlib.suppress(OSError):
        parent = Quota(folder, _file(port))
        row = parent.members().get(number)
        if row is not None:
            quota.stand_under(parent, row)
        else:
            parent.close()


def _quota(folder: int, port: int) -> contextlib.closing[Quota]:
    return contextlib.closing(Quota(folder, _file(port)))


def _file(port: int) -> str:
    return f"server-{port}.ledger"
