"""The relay: records of a machine whose port is closed to this one, carried by Ray's objects instead.

A process asks in one way only, over ZeroMQ (:mod:`hotset.cluster.client`). Where another machine's node
cannot be connected to, although its beats are heard, this machine's node stands in for it at a port of its
own, on the loopback address alone, and the roster names that one::

    process ──ZeroMQ, loopback──> relay in this machine's node ──Ray: one object a batch──> the owner's node

It is slower (a copy through Ray's object store, and one request at a time for each machine), and needs
nothing that a Ray cluster has not got. Each stand-in has a thread and a few descriptors of its own, and all
of them one context: there may be as many as there are machines. Where too few descriptors are left for
another one, there is none: who asks that machine gets nothing, and reads its source.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotset.cluster.auth import Hall
from hotset.cluster.keys import Keys
from hotset.cluster.membership import Member
from hotset.cluster.server import Serving, Shelf
from hotset.cluster.sockets import require_descriptors
from hotset.cluster.wire_records import Bytes, CacheIdentity, Longs, WireRecords

__all__ = ["Relays", "Remote", "reachable"]

_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 0.5
_AT_ONCE = 16
# Objects of more than 100 KB went from one of Ray's stores to another in up to a second.
_PATIENCE = 5.0


class Remote(Protocol):
    """Another machine's node, by another way than its port."""

    def take(self, member: Member, cache: CacheIdentity, ids: Longs, claim: bool) -> WireRecords:
        """See :meth:`Shelf.take`; raises whatever goes wrong."""
        ...

    def clear(self, member: Member, cache: CacheIdentity, clears: int) -> bool:
        """See :meth:`Shelf.clear`; raises whatever goes wrong."""
        ...

    def put(
        self, member: Member, cache: CacheIdentity, ids: Longs, records: WireRecords
    ) -> npt.NDArray[np.bool_]:
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
    except (OSError, ValueError):  # nobody there, or no address
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
        self._hall: Hall | None = None  # made with the first of them

    def stand_in(self, member: Member) -> Member:
        """The machine as this machine's processes reach it; itself, where a stand-in can have no port."""
        if member not in self._servings:
            try:
                self._servings[member] = self._serving(member)
            except OSError:
                return member
        endpoint, key = self._servings[member].endpoint, self._keys.public.decode()
        return member._replace(endpoint=endpoint, key=key, patience=_PATIENCE)

    def _serving(self, member: Member) -> Serving:
        if self._hall is None:
            require_descriptors()
            self._hall = Hall({self._keys.public})
        shelves = _RemoteShelves(self._shelves, member, self._remote)
        return Serving(_LOOPBACK, shelves, self._keys, hall=self._hall)

    def keep(self, members: Collection[Member]) -> None:
        """End the stand-ins of all but these."""
        for member in [known for known in self._servings if known not in members]:
            self._servings.pop(member).close()

    def close(self) -> None:
        """End them all."""
        self.keep(())
        if self._hall is not None:
            self._hall.close()
            self._hall = None


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

    def __init__(self, cache: CacheIdentity, member: Member, remote: Remote) -> None:
        self.cache = cache
        self._member, self._remote = member, remote

    def take(self, ids: Longs, memory: Bytes, *, claim: bool) -> WireRecords:
        return self._remote.take(self._member, self.cache, ids, claim)

    def clear(self, clears: int) -> bool:
        return self._remote.clear(self._member, self.cache, clears)

    def put(self, ids: Longs, records: WireRecords) -> npt.NDArray[np.bool_]:
        return self._remote.put(self._member, self.cache, ids, records)
