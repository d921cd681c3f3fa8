"""The roster: which machines share a session, as each of them has it written down.

Only a machine's node (:mod:`hotset.cluster.node`) talks with the others about who is there. What it has
learnt it writes to a file beside the session's ledger, and every process of the machine reads that, a
loader's workers among them: none of them needs Ray, and what was written last holds when Ray ends.

::

    <number>.cluster      in the runtime folder: JSON, this user's alone, as it has this machine's secret key

The file is replaced as a whole, so that who reads it sees one roster or the next. A machine's name is in it
and nowhere else: it stays the same while the session's memory is there, however often node and Ray restart,
and with it stays what the machine owns.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from typing import Any, NamedTuple

from hotset.cluster.keys import Keys
from hotset.session.file_names import roster_file, runtime, unlink
from hotset.session.runtime_dir import open_at

__all__ = ["PATIENCE", "Member", "Membership", "MembershipFile", "read_membership", "write_membership"]

PATIENCE = 1.5
_LOOK_SECONDS = 0.25
_TRIES = 3


class Member(NamedTuple):
    """A machine that shares the session.

    Attributes:
        name: of the machine, the same as long as it keeps the session's memory.
        host: its address in the cluster.
        endpoint: where its node serves, ``"tcp://10.0.0.7:41173"``.
        key: its public key; Z85.
        capacity: bytes that it can hold.
        patience: seconds that an answer of it is waited for.
    """

    name: str
    host: str
    endpoint: str
    key: str
    capacity: int
    patience: float = PATIENCE


class Membership(NamedTuple):
    """What a machine knows of a session that several share.

    Attributes:
        me: this machine's name.
        keys: its own.
        members: all machines, this one included, by name.
        former: those that there were before the last of them came or left; none if that is long ago.
    """

    me: str
    keys: Keys
    members: tuple[Member, ...]
    former: tuple[Member, ...] = ()


def write_membership(number: int, roster: Membership) -> None:
    """Write a session's roster down, in place of the last one.

    Raises:
        OSError: the runtime folder cannot be written to.
    """
    public, secret = (key.decode() for key in roster.keys)
    said = {
        "me": roster.me,
        "public": public,
        "secret": secret,
        "members": roster.members,
        "former": roster.former,
    }
    file = roster_file(number)
    with runtime() as folder:
        temporary = f"{file}.{secrets.token_hex(4)}.new"
        fd = open_at(folder, temporary, create=True)
        try:
            os.write(fd, json.dumps(said).encode())
            os.rename(temporary, file, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            unlink(folder, temporary)
            raise
        finally:
            os.close(fd)


def read_membership(number: int) -> Membership | None:
    """Return a session's roster; None if it has none that can be read."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            with runtime() as folder:
                try:
                    fd = open_at(folder, roster_file(number))
                except FileNotFoundError:  # or it was replaced between two looks
                    continue
            with open(fd, "rb") as file:
                return _parsed(json.load(file))
        return None
    return None


def _parsed(said: Any) -> Membership:
    members, former = (tuple(sorted(map(_member, said[key]))) for key in ("members", "former"))
    return Membership(said["me"], Keys(said["public"].encode(), said["secret"].encode()), members, former)


def _member(said: Any) -> Member:
    name, host, endpoint, key, capacity, *_, patience = said
    return Member(str(name), str(host), str(endpoint), str(key), int(capacity), float(patience))


class MembershipFile:
    """A session's roster as one process sees it, read again when it was written anew.

    Args:
        number: of the session.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._looked = float("-inf")
        self._seen: tuple[int, int] | None = None
        self._roster: Membership | None = None

    def current(self) -> Membership | None:
        """The roster as it was a moment ago; the last one that there was if it is gone."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with contextlib.suppress(OSError), runtime() as folder:
                status = os.stat(roster_file(self._number), dir_fd=folder, follow_symlinks=False)
                seen = status.st_ino, status.st_mtime_ns
                if seen != self._seen and (roster := read_membership(self._number)) is not None:
                    # Not before: what could not be read for want of descriptors is read with the next look.
                    self._roster, self._seen = roster, seen
        return self._roster
