"""Membership: which machines share a session, and which of them owns a sample.

Only a machine's node (:mod:`hotset.cluster.node`) asks the directory which machines there are. It
writes the answer to a file beside the session's quota, and every process of the machine reads that
file, loader workers too. None of them needs Ray, and the last file holds when Ray ends. ::

    <number>.cluster      in the runtime folder: JSON, this user's alone, as it has this machine's secret key

The file is replaced as a whole, so a reader sees one version or the next. It alone holds the machine's name,
which stays the same as long as the session's memory is there, however often node and Ray restart; and with
the name stays what the machine owns.

**Owners** are computed (:mod:`hotset.policy.rendezvous`), from the machines' names and capacities. Shares are
drawn, so one machine's share is a hundredth too large and another's too small: a sample for which its owner
has no room goes to the next machine in the sample's order, or to the one after that. No further ones are
tried: where the data are larger than all memories together, each of them would refuse most of the samples, in
every epoch.

Nothing here needs ZeroMQ, but for drawing a pair of keys.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.policy.rendezvous import Placement
from hotset.session.runtime_dir import new_file, opened, runtime, write
from hotset.session.session_files import membership_file
from hotset.store.claims import Ids

__all__ = [
    "PATIENCE",
    "Keys",
    "Member",
    "Membership",
    "MembershipFile",
    "Owned",
    "read_membership",
    "write_membership",
]

# Some samples of one machine: its name, and which.
Owned = tuple[str, Ids]

PATIENCE = 1.5
# How many machines after its owner are asked to keep a sample.
_FURTHER = 2
_LOOK_SECONDS = 0.25
_TRIES = 3


class Keys(NamedTuple):
    """A machine's pair of CURVE keys, in Z85 (40 characters each).

    Example:
        >>> len(Keys.new().public)
        40
    """

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Keys:
        """Draw a new pair."""
        import zmq

        return cls(*zmq.curve_keypair())

    def __repr__(self) -> str:
        """The public half alone: keys end up in logs."""
        return f"Keys({self.public.decode()})"


class Member(NamedTuple):
    """A machine that shares the session.

    Attributes:
        name: of the machine; stays the same as long as the machine keeps the session's memory.
        host: its address in the cluster.
        endpoint: where its node serves, ``"tcp://10.0.0.7:41173"``.
        key: its public key; Z85.
        capacity: bytes that it can hold.
        patience: how many seconds others wait for an answer of it.
    """

    name: str
    host: str
    endpoint: str
    key: str
    capacity: int
    patience: float = PATIENCE


@dataclass(frozen=True)
class Membership:
    """The machines that share a session, as one of them knows them, and the owners of its samples.

    Attributes:
        me: this machine's name.
        keys: its own.
        members: all machines, this one included, by name.
        former: the machines before the last of them came or left; none if that is long ago.
    """

    me: str
    keys: Keys
    members: tuple[Member, ...]
    former: tuple[Member, ...] = ()

    @functools.cached_property
    def by_name(self) -> dict[str, Member]:
        """The machines, by name."""
        return {member.name: member for member in self.members}

    def others(self, ids: Ids) -> list[Owned]:
        """The other machines that own some of these samples, and which."""
        return self._others(self._placement, self.members, ids)

    def formerly(self, ids: Ids) -> list[Owned]:
        """The other machines that owned some of these samples before the last change, and which."""
        return self._others(self._former_placement, self.former, ids)

    def after(self, ids: Ids, turn: int) -> list[Owned]:
        """The machines that come ``turn`` places after these samples' owners, this one too; with samples."""
        if self._placement is None or turn > _FURTHER or not len(ids):
            return []
        order = self._placement.order(ids, turn + 1)
        return _grouped(self.members, ids, order[:, turn]) if order.shape[1] > turn else []

    def _others(self, placement: Placement | None, members: tuple[Member, ...], ids: Ids) -> list[Owned]:
        if placement is None or not len(ids):
            return []
        owned = _grouped(members, ids, placement.owners(ids))
        return [(name, some) for name, some in owned if name != self.me]

    @functools.cached_property
    def _placement(self) -> Placement | None:
        return _placement(self.members)

    @functools.cached_property
    def _former_placement(self) -> Placement | None:
        return _placement(self.former)


def _placement(members: tuple[Member, ...]) -> Placement | None:
    """The owners of samples among these machines; None while none of them can hold anything."""
    capacities = [member.capacity for member in members]
    return Placement([member.name for member in members], capacities) if any(capacities) else None


def _grouped(members: tuple[Member, ...], ids: Ids, owners: Ids) -> list[Owned]:
    return [(members[number].name, ids[owners == number]) for number in np.unique(owners).tolist()]


def write_membership(number: int, membership: Membership) -> None:
    """Write down which machines share a session, in place of what was written last.

    Raises:
        OSError: the runtime folder cannot be written to.
    """
    public, secret = (key.decode() for key in membership.keys)
    said = {
        "me": membership.me,
        "public": public,
        "secret": secret,
        "members": membership.members,
        "former": membership.former,
    }
    with runtime() as folder, new_file(folder, membership_file(number)) as fd:
        write(fd, json.dumps(said).encode())


def read_membership(number: int) -> Membership | None:
    """Return which machines share a session; None if there is no file that can be read."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            try:
                with (
                    runtime() as folder,
                    opened(folder, membership_file(number)) as fd,
                    open(fd, "rb", closefd=False) as file,
                ):
                    return _parsed(json.load(file))
            except FileNotFoundError:  # or the file was replaced between two looks
                continue
        return None
    return None


def _parsed(said: Any) -> Membership:
    members, former = (tuple(sorted(map(_member, said[key]))) for key in ("members", "former"))
    return Membership(said["me"], Keys(said["public"].encode(), said["secret"].encode()), members, former)


def _member(said: Any) -> Member:
    name, host, endpoint, key, capacity, patience = said
    return Member(str(name), str(host), str(endpoint), str(key), int(capacity), float(patience))


class MembershipFile:
    """A session's membership as one process sees it, read again when it was written anew."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._looked = float("-inf")
        self._seen: tuple[int, int] | None = None
        self._membership: Membership | None = None

    def current(self) -> Membership | None:
        """The membership of a moment ago; the last one that was read if the file is gone."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with contextlib.suppress(OSError), runtime() as folder:
                status = os.stat(membership_file(self._number), dir_fd=folder, follow_symlinks=False)
                seen = status.st_ino, status.st_mtime_ns
                if seen != self._seen and (found := read_membership(self._number)) is not None:
                    # Only now: a file that could not be read, for want of descriptors, is read the next time.
                    self._membership, self._seen = found, seen
        return self._membership
