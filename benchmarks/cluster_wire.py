"""Batches of records between two processes on two Ray nodes: by ZeroMQ, as Ray objects, and over bare TCP.

All bring as many bytes, those of hotset and Ray out of the same store; four requests are in flight.

=============== =========================================================================================
TCP copy loop   sends bytes that lie there already, and receives them into memory that is there already:
                no record is looked up, copied out of the store, verified or encrypted
encrypted       the same with hotset's cipher at both ends (:mod:`benchmarks.tcp_loop`)
ZeroMQ          what hotset does: copied out of the store, encrypted, sent, decrypted, verified
without keys    the same without encryption
Ray objects     an actor's method copies the rows out of the store and returns them: an object for each batch,
                which Ray moves to the asker's object store, where they are used as they lie, unverified
=============== =========================================================================================
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import tcp_loop
from benchmarks.cluster_nodes import Nodes
from benchmarks.cluster_rank import Noise
from benchmarks.harness import Comparison, Unfit, compare
from hotset.cluster.client import Connections, PendingRequest
from hotset.cluster.membership import Keys
from hotset.cluster.server import RecordServer
from hotset.cluster.store_service import StoreService
from hotset.store.leaves.schema import Schema
from hotset.store.store import Store

__all__ = ["FAIR", "HOTSET", "OBJECTS", "PLAIN", "compared"]

PLAIN, ENCRYPTED = "TCP copy loop", "TCP copy loop, encrypted"
HOTSET, FAIR, OBJECTS = "ZeroMQ", "ZeroMQ without keys", "Ray objects"
_IN_FLIGHT = 4
_FINGERPRINT = bytes(16)
_HERE = "127.0.0.1"
_KEY = bytes(range(32))  # of the encrypted loop
_MOST = 1 << 26


def compared(nodes: Nodes, size: int, batch: int, pairs: int, seconds: float) -> Comparison:
    """Compare the ways of batches of so many records of ``size`` bytes, from node 1 to node 0.

    Args:
        nodes: with an object store each that holds eight batches.
        size: bytes of a record.
        batch: records of a batch.
        pairs: rounds.
        seconds: of one timing.
    """
    import ray

    keys = Keys.new()
    owner = nodes.place(1, _Owner, size, batch, keys.public)
    asker = nodes.place(0, _Asker, owner, ray.get(owner.addresses.remote()), keys)
    try:
        found: Comparison = ray.get(asker.compare.remote(size, batch, pairs, seconds))
        return found
    finally:
        for actor in (asker, owner):
            ray.kill(actor)


class _Owner:
    """The machine that has the records; runs in an actor."""

    def __init__(self, size: int, batch: int, allowed: bytes) -> None:
        count = batch * max(2, min(16, _MOST // (batch * size)))
        source = Noise(count, size)
        schema = Schema.infer([source.truth(0), source.truth(1)], keep_order=True)
        limit = 2 * count * schema.stride + (8 << 20)
        self._store = Store.create(schema, count, limit, about={"name": "bench"})
        self._store.fill(np.arange(count), source.truth, keep=False)
        self._shelf = StoreService(self._store, _FINGERPRINT)
        self._memory = np.empty(batch * schema.stride, np.uint8)
        keys = Keys.new()
        shelves = {_FINGERPRINT: self._shelf}
        self._keyed = RecordServer(_HERE, shelves, keys, {allowed})
        self._bare = RecordServer(_HERE, shelves, None)
        self._batch_bytes = batch * schema.stride
        loops = {PLAIN: self._loop(None), ENCRYPTED: self._loop(_KEY)}
        self._said = {
            HOTSET: self._keyed.endpoint,
            FAIR: self._bare.endpoint,
            **loops,
            "key": keys.public,
            "cache": self._shelf.cache,
        }

    def addresses(self) -> dict[str, Any]:
        """Where each way begins."""
        return self._said

    def rows(self, ids: Any) -> Any:
        """The records of these samples, as an object."""
        return self._shelf.take(ids, np.empty(self._batch_bytes, np.uint8)).batch.rows

    def _loop(self, key: bytes | None) -> int:
        """Begin to serve a loop; returns its port."""
        server = socket.create_server((_HERE, 0))
        sending = threading.Thread(target=tcp_loop.send, args=(server, self._batch_bytes, key), daemon=True)
        sending.start()
        return int(server.getsockname()[1])


class _Asker:
    """The machine that lacks them; runs in an actor."""

    def __init__(self, owner: Any, where: dict[str, Any], keys: Keys) -> None:
        self._owner, self._where, self._keys = owner, where, keys

    def compare(self, size: int, batch: int, pairs: int, seconds: float) -> Comparison:
        """Compare the ways."""
        cache = self._where["cache"]
        draw = np.random.default_rng(0)

        def ids() -> Any:
            return draw.permutation(cache.samples)[:batch]

        with contextlib.ExitStack() as stack:
            ways = {
                PLAIN: self._plain(stack, PLAIN, batch * cache.stride, None),
                ENCRYPTED: self._plain(stack, ENCRYPTED, batch * cache.stride, _KEY),
                HOTSET: self._asked(stack, HOTSET, self._keys, ids),
                FAIR: self._asked(stack, FAIR, None, ids),
                OBJECTS: self._objects(ids),
            }
            return compare(
                {name: _rate(way, seconds) for name, way in ways.items()},
                PLAIN,
                pairs,
                title=f"batches of {batch} records of {size:,} bytes, between two Ray nodes",
                unit="MB/s",
                subjects=(HOTSET, FAIR),
                limits=(PLAIN, ENCRYPTED),
            )

    def _plain(self, stack: contextlib.ExitStack, way: str, size: int, key: bytes | None) -> Iterator[int]:
        connection = stack.enter_context(socket.create_connection((_HERE, self._where[way])))
        received = tcp_loop.receiver(connection, size, key)
        while True:
            yield received()

    def _asked(
        self, stack: contextlib.ExitStack, way: str, keys: Keys | None, ids: Callable[[], Any]
    ) -> Iterator[int]:
        peers = Connections(keys, lambda why, name: None)
        stack.callback(peers.close)
        peer = peers.add("owner", self._where[way], self._where["key"] if keys is not None else None)
        asked: deque[PendingRequest] = deque()
        while True:
            while len(asked) < _IN_FLIGHT:
                asked.append(peer.ask(self._where["cache"], ids()))
            answer = asked.popleft().wait(time.monotonic() + 10)
            if not answer.present.all():
                raise Unfit(f"records are missing: {peer.traffic.why}")
            yield answer.batch.rows.nbytes

    def _objects(self, ids: Callable[[], Any]) -> Iterator[int]:
        import ray

        asked: deque[Any] = deque()
        while True:
            while len(asked) < _IN_FLIGHT:
                asked.append(self._owner.rows.remote(ids()))
            yield ray.get(asked.popleft()).nbytes


def _rate(way: Iterator[int], seconds: float) -> Callable[[], float]:
    """What measures the MB/s of batches as they come."""

    def once() -> float:
        moved, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < seconds:
            moved += next(way)
        return moved / taken / 1e6

    return once
