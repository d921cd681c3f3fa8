"""The relay: records of a machine whose port is closed to this one, carried by Ray's objects instead.

A process asks in one way only, over ZeroMQ (:mod:`hotset.cluster.asking`). Where another machine's node
cannot be connected to, although its beats are heard, this machine's node stands in for it at a port of its
own, on the loopback address alone, and the roster names that one::

    process ──ZeroMQ, loopback──> relay in this machine's node ──Ray: one object a batch──> the owner's node

It is slower (a copy through Ray's object store, and one request at a time for each machine), and needs
nothing that a Ray cluster has not got.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotset.cluster.keys import Keys
from hotset.cluster.messages import Bytes, Cache, Longs, Records
from hotset.cluster.roster import Member
from hotset.cluster.serving import Serving, Shelf

__all__ = ["Relays", "Remote", "reachable"]

_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 0.5
_AT_ONCE = 16
# Objects of more than 100 KB went from one of Ray's stores to another in up to a second.
_PATIENCE = 5.0


class Remote(Protocol):
    """Another machine's node, by another way than its port."""

    def take(self, member: Member, cache: Cache, ids: Longs, claim: bool) -> Records:
        """See :meth:`Shelf.take`; raises whatever goes wrong."""
        ...

    def clear(self, member: Member, cache: Cache) -> None:
        """See :meth:`Shelf.clear`; raises whatever goes wrong."""
        ...

    def put(self, member: Member, cache: Cache, ids: Longs, records: Records) -> npt.NDArray[np.bool_]:
        """See :meth:`Shelf.put`; raises whatever goes wrong."""
        ...


def reachable(members: Collection[Member]) -> set[str]:
    """The endpoints of those of these machines that can be connected to."""
    if not members:
        return set()
    endpoints = [member.endpoint for member in members]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        opens = list(threads.map(_opens, endpoints))
    return {endpoint for endpoint, is_open in zip(endpoints, opens, strict=True) if is_open}


def _opens(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


class Relays:
    """This machine's stand-ins for others.

    Args:
        shelves: this machine's caches by fingerprint, which say how records are laid out.
        keys: this machine's, with which alone its processes are let in.
        remote: the way to the others.
    """

    def __init__(self, shelves: Mapping[bytes, Shelf], keys: Keys, remote: Remote) -> None:
        self._shelves, self._keys, self._remote = shelves, keys, remote
        self._servings: dict[Member, Serving] = {}

    def stand_in(self, member: Member) -> Member:
        """The machine as this machine's processes reach it.

        Raises:
            OSError: no port can be had for it.
        """
        serving = self._servings.get(member)
        if serving is None:
            shelves = _RemoteShelves(self._shelves, member, self._remote)
            serving = Serving(_LOOPBACK, shelves, self._keys, {self._keys.public})
            self._servings[member] = serving
        key = self._keys.public.decode()
        return member._replace(endpoint=serving.endpoint, key=key, patience=_PATIENCE)

    def keep(self, members: Collection[Member]) -> None:
        """End the stand-ins of all but these."""
        for member in [known for known in self._servings if known not in members]:
            self._servings.pop(member).close()

    def close(self) -> None:
        """End them all."""
        self.keep(())


class _RemoteShelves(Mapping[bytes, Shelf]):
    def __init__(self, shelves: Mapping[bytes, Shelf], member: Member, remote: Remote) -> None:
        self._shelves, self._member, self._remote = shelves, member, remote

    def __getitem__(self, fingerprint: bytes) -> Shelf:
        return _RemoteShelf(self._shelves[fingerprint].cache, self._member, self._remote)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._shelves)

    def __len__(self) -> int:
        return len(self._shelves)


class _RemoteShelf:
    """A cache of another machine, as its relay serves it."""

    def __init__(self, cache: Cache, member: Member, remote: Remote) -> None:
        self.cache = cache
        self._member, self._remote = member, remote

    def take(self, ids: Longs, memory: Bytes, *, claim: bool) -> Records:
        return self._remote.take(self._member, self.cache, ids, claim)

    def clear(self) -> None:
        self._remote.clear(self._member, self.cache)

    def put(self, ids: Longs, records: Records) -> npt.NDArray[np.bool_]:
        return self._remote.put(self._member, self.cache, ids, records)
