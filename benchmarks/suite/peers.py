"""Records from another process over TCP, against the same bytes sent and received and nothing else.

The limit is a plain copy loop (:mod:`benchmarks.tcp_loop`), bare, and with the cipher of hotset's
connections and nothing else. Hotset's path does the same for batches that are asked for by number, copies
records out of a store, and verifies each one's checksum; once with keys, which encrypt every byte on one side
and decrypt it on the other, and once without.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import tcp_loop
from benchmarks.harness import Outcome, Target, Unfit, compare
from benchmarks.settings import Settings
from hotset.store.leaves.schema import Schema
from hotset.store.store import Store

__all__ = ["peers"]

PLAIN, ENCRYPTED = "TCP copy loop", "TCP copy loop, encrypted"
_IN_FLIGHT = 4
_FINGERPRINT = bytes(16)
# Bytes of a sample, the most bytes of its tail, and samples of a batch.
_SHAPES = {
    "32 KB": (32_768, 0, 64),
    "150 KB": (150_528, 0, 64),
    "1 MB": (1 << 20, 0, 16),
    "256 B with tails": (256, 256, 64),
}


def _sample(size: int, tail: int) -> Callable[[int], Any]:
    def sample(index: int) -> Any:
        fixed = torch.full((size,), index % 251, dtype=torch.uint8)
        return (
            (fixed, torch.full((1 + index * 37 % tail,), index % 251, dtype=torch.uint8)) if tail else fixed
        )

    return sample


def peers(settings: Settings) -> Outcome:
    """Peer reads over ZeroMQ are at least 0.7 times a plain TCP copy loop of the same batches."""
    outcome = Outcome()
    for name, (size, tail, batch) in _SHAPES.items():
        make = _sample(size, tail)
        count = batch * (2 if settings.quick else max(8, min(64, (64 << 20) // (batch * size))))
        schema = Schema.infer([make(0), make(1)], keep_order=True)
        limit = 2 * count * (schema.stride + 2 * tail) + (1 << 22)
        with contextlib.closing(Store.create(schema, count, limit, about={"name": "bench"})) as store:
            store.fill(np.arange(count), make, keep=False)
            with (
                _plain(store, batch, settings, None) as plain,
                _plain(store, batch, settings, os.urandom(32)) as encrypted,
                _hotset(store, batch, settings, True) as keyed,
                _hotset(store, batch, settings, False) as bare,
            ):
                found = compare(
                    {PLAIN: plain, ENCRYPTED: encrypted, "with keys": keyed, "without keys": bare},
                    PLAIN,
                    settings.pairs,
                    title=f"batches of {batch} records of {name}, between two processes",
                    unit="MB/s",
                    subjects=("with keys", "without keys"),
                    limits=(PLAIN, ENCRYPTED),
                )
        outcome.comparisons.append(found)
        for entry in ("with keys", "without keys"):
            ratio = found.ratio(entry, PLAIN)
            text = f"{name}, {entry}: to a plain TCP copy loop"
            reason = found.rows[entry].unfit
            outcome.targets.append(Target(text, ratio, 0.7, reason=reason))
    return outcome


@contextlib.contextmanager
def _forked(body: Callable[[int], None]) -> Iterator[int]:
    """A process that runs ``body`` with one end of a socket pair until the block ends; yields the other."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ours.close()
            body(theirs.fileno())
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    try:
        yield ours.fileno()
    finally:
        ours.close()
        os.waitpid(pid, 0)


def _batch_bytes(store: Store, batch: int) -> int:
    """Mean bytes of the records of a batch, rows and tails."""
    live = int(store.stored_bytes)
    return live // len(store) * batch


def _rate(next_batch: Callable[[], int], seconds: float) -> float:
    """MB/s of calls that return how many bytes each has brought."""
    moved, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < seconds:
        moved += next_batch()
    return moved / taken / 1e6


@contextlib.contextmanager
def _plain(store: Store, batch: int, settings: Settings, key: bytes | None) -> Iterator[Callable[[], float]]:
    size = _batch_bytes(store, batch)

    def serve(end: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            os.write(end, str(server.getsockname()[1]).encode())
            tcp_loop.send(server, size, key)

    with _forked(serve) as end, socket.create_connection(("127.0.0.1", int(os.read(end, 16)))) as connection:
        received = tcp_loop.receiver(connection, size, key)
        yield lambda: _rate(received, settings.seconds)


@contextlib.contextmanager
def _hotset(store: Store, batch: int, settings: Settings, keyed: bool) -> Iterator[Callable[[], float]]:
    try:
        from hotset.cluster.client import Connections, PendingRequest
        from hotset.cluster.membership import Keys
        from hotset.cluster.server import RecordServer
        from hotset.cluster.store_service import StoreService
    except ImportError as error:
        why = f"not installed ({error.name})"

        def unfit() -> float:
            raise Unfit(why)

        yield unfit
        return
    shelf = StoreService(store, _FINGERPRINT)
    mine, theirs = (Keys.new(), Keys.new()) if keyed else (None, None)

    def serve(end: int) -> None:
        allowed = {mine.public} if mine else ()
        with RecordServer("127.0.0.1", {_FINGERPRINT: shelf}, theirs, allowed) as serving:
            os.write(end, serving.endpoint.encode())
            os.read(end, 1)

    with _forked(serve) as end, contextlib.closing(Connections(mine, lambda why, name: None)) as others:
        peer = others.add("other", os.read(end, 100).decode(), theirs.public if theirs else None)
        draw = np.random.default_rng(0)
        asked: deque[PendingRequest] = deque()

        def answered() -> int:
            while len(asked) < _IN_FLIGHT:
                asked.append(peer.ask(shelf.cache, draw.integers(0, len(store), batch)))
            answer = asked.popleft().wait(time.monotonic() + 10)
            if not answer.present.all():
                raise Unfit(f"records are missing: {peer.traffic.why}")
            return answer.batch.rows.nbytes + answer.batch.tails.nbytes

        yield lambda: _rate(answered, settings.seconds)
