"""The server: a thread that answers other machines' requests from this machine's caches, and takes puts.

::

    ROUTER ──> opened ──> header parsed ──> waiting ──> a buffer is free ──> records copied into it, sealed
                  │            │               │                             there, and sent from it;
                  └─ dropped   └─ refused      └─ more than 16 of one        tracker done: free again
                                                  client: refused, as busy
    ROUTER, CURVE ──> credentials for the other one (:mod:`hotset.cluster.sealing`)

A record is copied once, as the store's memory may be used again: to where it belongs in the answer, behind
room for seal, header and entries. ZeroMQ sends the answer from there, until a tracker says that it has left.
(Sending each record from where it lies would take a frame each, and would keep a window from using those rows
again.)

Everything has a bound: samples and bytes of a message, requests that wait, and buffers. One client may have
two buffers at a time, so a client that stopped reading does not block the others; it is cut off when its
heartbeat fails, and its buffers are free again.

The server is bound to the one address that it is given. The same thread decides which clients are let in, by
the list of allowed keys and the passwords that it gave them
(:class:`hotset.cluster.sockets.ZapAuthenticator`); strangers get no byte of an answer.

Whatever goes wrong with one request, the thread continues with the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import zmq

from hotset.cluster import protocol
from hotset.cluster.membership import Keys
from hotset.cluster.protocol import LARGEST, MOST, Head, Malformed, Operation, Status, records_at
from hotset.cluster.sealing import SEAL, GivenKeys, Sealing, Unsealable, joined
from hotset.cluster.sockets import (
    ZapAuthenticator,
    close,
    open_socket,
    require_descriptors,
    serve_by_curve,
    serve_by_password,
)
from hotset.cluster.store_service import StoreService
from hotset.cluster.wire_records import ABSENT, FULL, Bytes, Longs, WireRecords

__all__ = ["RecordServer", "ServerStats"]

_BUFFERS = 4
_BUFFERS_EACH = 2
_WAITING_EACH = 16
_AT_ONCE = 64  # requests read in one go, between looks at which clients want to be let in
# Bytes of an answer. Smaller ones are copied once more, which costs less than a tracker: pyzmq wakes a thread
# of its own when the answer has left. (The default, 64 KiB, is just below 64 records of 1 KB.)
_COPIED = 128 << 10
_ANY_PORT = "*"


@dataclass
class ServerStats:
    """What was served so far.

    Attributes:
        requests: that were answered.
        records: that were sent.
        bytes: of those records.
        stored: records that other machines sent and that were stored.
        unsound: records that other machines sent, damaged or another sample's.
        refused: requests that were refused: malformed, unsealed, for another cache, or while the server was
            busy.
        dropped: answers that the client did not wait for.
        strangers: connections that were not let in.
        problem: what a store raised last, in words; empty if none did.
    """

    requests: int = 0
    records: int = 0
    bytes: int = 0
    stored: int = 0
    unsound: int = 0
    refused: int = 0
    dropped: int = 0
    strangers: int = 0
    problem: str = ""


class _Busy(Exception):
    """The server is busy; the client may retry."""


class _Client(NamedTuple):
    """Where an answer goes: the connection, and how what passes on it is sealed; None if it is not."""

    name: bytes
    sealing: Sealing | None


class _Request(NamedTuple):
    client: _Client
    head: Head
    body: protocol.Message


class _Buffer:
    """Memory that answers are sent from, one at a time. Its pages are taken as they are first used."""

    def __init__(self) -> None:
        self.memory = np.empty(SEAL + records_at(MOST) + LARGEST, np.uint8)
        self.client = b""
        self.sent: zmq.MessageTracker | None = None

    def room(self, samples: int) -> Bytes:
        """Where the records of an answer about so many samples belong."""
        return self.memory[SEAL + records_at(samples) :][:LARGEST]

    @property
    def is_free(self) -> bool:
        return self.sent is None or self.sent.done


class RecordServer:
    """Serves caches to other machines, until closed.

    Args:
        address: of this machine in the cluster, to which alone it is bound (``"10.0.0.7"``, ``"::1"``).
        services: the caches by fingerprint; looked at anew with each request.
        keys: this machine's; None: no keys at all (:mod:`hotset.cluster.sockets`).
        allowed: public keys that are let in; looked at anew with each connection.

    Attributes:
        endpoint: where others reach it, ``"tcp://10.0.0.7:41173"``; the port is the system's choice.
        served: counters.

    Raises:
        OSError: it cannot be bound to that address, or there are few descriptors left.
    """

    def __init__(
        self,
        address: str,
        services: Mapping[bytes, StoreService],
        keys: Keys | None,
        allowed: Collection[bytes] = (),
    ) -> None:
        require_descriptors()
        self.served = ServerStats()
        self._services = services
        self._pid = os.getpid()
        self._context: zmq.Context[Any] = zmq.Context(io_threads=min(4, os.cpu_count() or 1))
        self._given = GivenKeys()
        # Before an address is bound, so that the first client is asked for a key too.
        self._authenticator = ZapAuthenticator(self._context, allowed, self._given.admits)
        where = f"tcp://{f'[{address}]' if ':' in address else address}:"
        self._socket = open_socket(self._context, zmq.ROUTER, where)
        self._socket.router_mandatory = True
        self._socket.copy_threshold = _COPIED
        self._key_socket: Any = None
        try:
            if keys is not None:
                serve_by_password(self._socket)
                self._key_socket = open_socket(self._context, zmq.ROUTER, where)
                serve_by_curve(self._key_socket, keys)
                self._key_socket.bind(where + _ANY_PORT)
            self._socket.bind(where + "*")
        except zmq.ZMQError as error:
            self._close()
            raise OSError(error.errno, f"{address} cannot be served from ({error})") from error
        self._port = int(self._socket.last_endpoint.rpartition(b":")[2].rstrip(b"\0"))
        first = self._socket if self._key_socket is None else self._key_socket
        self.endpoint: str = first.last_endpoint.decode()
        self._stop = os.eventfd(0)
        self._buffers: list[_Buffer] = []
        self._waiting: deque[_Request] = deque()
        self._thread = threading.Thread(target=self._run, name="hotset serving", daemon=True)
        self._thread.start()

    def __enter__(self) -> RecordServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; clients find out at once. Nothing happens in a forked child, or a second time."""
        if self._pid != os.getpid() or self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._stop, self._socket, self._authenticator.socket, self._key_socket):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        try:
            while True:
                # What waits for a buffer is looked at each millisecond: trackers cannot be polled.
                ready = dict(poller.poll(1 if self._waiting else None))
                if self._stop in ready:
                    return
                try:
                    self._go_on(ready)
                except Exception as error:  # without memory, say: that request is lost, and no other
                    self.served.problem = f"{type(error).__name__}: {error}"
        finally:
            self._close()

    def _go_on(self, ready: Mapping[Any, int]) -> None:
        if self._authenticator.socket in ready:
            self._authenticator.admit()
            self.served.strangers = self._authenticator.strangers
        if self._key_socket is not None and self._key_socket in ready:
            self._give_key()
        if self._socket in ready:
            self._read()
        self._answer()

    def _close(self) -> None:
        sockets = (self._socket, self._key_socket, self._authenticator.socket)
        close(self._context, *(socket for socket in sockets if socket is not None))

    def _give_key(self) -> None:
        """Give a client what it needs to connect for records."""
        client, message, *_ = self._key_socket.recv_multipart()
        answer: list[Any] | None
        try:
            head, body = protocol.parse_head(message, answers=False)
            if head.operation is not Operation.KEY or body:
                raise Malformed("has asked for something other than a key")
            answer = protocol.key_answer(head, self._given.give(self._port).packed())
        except Malformed:
            self.served.refused += 1
            answer = protocol.refusal_of(message)
        if answer is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._key_socket.send_multipart([client, b"".join(answer)], zmq.NOBLOCK)

    def _read(self) -> None:
        """Read what came, and queue it or refuse it."""
        waiting = Counter(request.client.name for request in self._waiting)
        for _ in range(_AT_ONCE):
            try:
                name, frame, *_ = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message, sealing = frame.buffer, None
            try:
                if self._key_socket is not None:
                    sealing = self._given.of(message)
                    message = sealing.open(message)
            except Unsealable:  # a stranger's, or sent again: no answer
                self.served.refused += 1
                continue
            client = _Client(name.bytes, sealing)
            try:
                request = _Request(client, *protocol.parse_head(message, answers=False))
            except Malformed:
                self._refuse(client, protocol.refusal_of(message))
                continue
            waiting[client.name] += 1
            if waiting[client.name] > _WAITING_EACH:
                self._refuse(client, protocol.refusal(request.head, Status.BUSY))
            else:
                self._waiting.append(request)

    def _answer(self) -> None:
        """Answer what can be answered now, in order; one without a free buffer waits, and blocks none."""
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            try:
                buffer = self._buffer(request.client.name)
            except MemoryError:
                self._refuse(request.client, protocol.refusal(request.head, Status.BUSY))
                continue
            if buffer is None:
                self._waiting.append(request)
                continue
            parts = self._parts(request, buffer)
            buffer.client, buffer.sent = request.client.name, self._send(request.client, parts, buffer.memory)

    def _buffer(self, client: bytes) -> _Buffer | None:
        """A buffer for this client; None if it has enough, or none is free.

        Raises:
            MemoryError: there is no memory for another one.
        """
        taken = [buffer for buffer in self._buffers if not buffer.is_free]
        if sum(buffer.client == client for buffer in taken) >= _BUFFERS_EACH:
            return None
        for buffer in self._buffers:
            if buffer.is_free:
                return buffer
        if len(self._buffers) == _BUFFERS:
            return None
        self._buffers.append(_Buffer())
        return self._buffers[-1]

    def _parts(self, request: _Request, buffer: _Buffer) -> list[Any]:
        """The answer to one request, or its refusal."""
        head = request.head
        service = self._services.get(head.fingerprint)
        if service is None or service.cache.layout != head.layout:
            self.served.refused += 1
            return protocol.refusal(head, Status.UNKNOWN if service is None else Status.LAYOUT)
        try:
            parts = self._parts_of(service, request, buffer)
            self.served.requests += 1
            return parts
        except Malformed:
            status = Status.MALFORMED
        except _Busy:
            status = Status.BUSY
        except Exception as error:  # a cache that is closed or destroyed under it: the others go on
            self.served.problem = f"{type(error).__name__}: {error}"
            status = Status.FAILED
        self.served.refused += 1
        return protocol.refusal(head, status)

    def _parts_of(self, service: StoreService, request: _Request, buffer: _Buffer) -> list[Any]:
        head = request.head
        if head.operation is Operation.KEY:
            raise Malformed("has asked for a key on a connection for records")
        if head.operation is Operation.CLEAR:
            said = _cleared(service, protocol.parse_words(head, request.body))
            return protocol.words_answer(head, service.cache, said)
        return protocol.answer(head, service.cache, self._records(service, request, buffer))

    def _records(self, service: StoreService, request: _Request, buffer: _Buffer) -> WireRecords:
        head, cache = request.head, service.cache
        ids, rest = protocol.parse_ids(head, request.body, cache)
        if head.clears > service.clears and not service.clear(head.clears):
            raise _Busy
        if head.operation is not Operation.PUT:
            room = buffer.room(len(ids))
            records = service.take(ids, room, claim=head.operation is Operation.CLAIM)
            self.served.records += len(records.batch.ids)
            self.served.bytes += records.batch.rows.nbytes + records.batch.tails.nbytes
            return records
        sent = protocol.parse_records(head, rest, ids, cache)
        good = sent.verified()
        self.served.unsound += len(sent.batch.ids) - len(good.batch.ids)
        there = service.put(ids, good, head.clears)
        self.served.stored += int(np.count_nonzero(there))
        # What is sound and not there had no room.
        missing = np.where(good.present, FULL, ABSENT)
        return WireRecords.none(0, cache.stride)._replace(generations=np.where(there, 0, missing))

    def _refuse(self, client: _Client, parts: list[Any] | None) -> None:
        self.served.refused += 1
        if parts is not None:
            self._send(client, parts)

    def _send(
        self, client: _Client, parts: list[Any], memory: Bytes | None = None
    ) -> zmq.MessageTracker | None:
        """Send an answer, or drop it if the client does not read; returns a tracker of the sending.

        Args:
            parts: of the answer.
            memory: to send it from, which parts of it may lie in; new memory if not given.
        """
        run = joined(parts, memory)
        message = run[SEAL:] if client.sealing is None else client.sealing.seal(run)
        try:
            sent: zmq.MessageTracker = self._socket.send_multipart(
                [client.name, message], zmq.NOBLOCK, copy=False, track=True
            )
            return sent
        except zmq.ZMQError:
            self.served.dropped += 1
            return None


def _cleared(service: StoreService, words: Longs) -> Longs:
    """Clear a service, and give the words back."""
    if len(words) != 1 or words[0] < 0:
        raise Malformed("has not said how often the cache was cleared")
    if not service.clear(int(words[0])):
        raise _Busy
    return words
