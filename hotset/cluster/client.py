"""The client: this process's way to the records of other machines.

::

    ask(cache, ids) ──> PendingRequest ──> wait(deadline)      several requests of one peer in flight
                                              │ verified: where the answer lies, to be copied by the caller
                                              └ or absent: the caller reads the source

A request never raises because of a peer. A peer *fails* when it is not there, refuses this machine's key, has
another version, or lets a deadline pass. The process then sends it nothing for half a second, twice as long
after each further failure in a row, half a minute at most, and its samples are absent meanwhile; where the
peer has no such cache, this holds for that cache alone. All of that is counted, and the user is warned once
for each peer.

Answers are verified. An answer that does not fit its request is a failure of the peer; a record that is
damaged, or another sample's, is absent, and counted.

With keys, a process first asks over CURVE for the credentials of a connection for records
(:mod:`hotset.cluster.sealing`), and keeps its requests until it has them.

An answer is known by its request's number, which begins at random for each connection. An answer to a request
that is no longer held (peers hold them weakly) is dropped, and so is one from before a restart.

There is no thread here: a process looks at its sockets while it waits for a request. A peer belongs to the
thread that uses it. A forked child makes sockets of its own when it first asks. It leaves the inherited ones
untouched, as closing them would end the parent's connections, and requests from before the fork are absent.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from hotset.cluster import protocol
from hotset.cluster.backoff import Backoff
from hotset.cluster.membership import PATIENCE, Keys, Membership, MembershipFile, Owned
from hotset.cluster.peer_stats import PeerStats, PeerStatsFile, read_peer_stats
from hotset.cluster.protocol import Head, Malformed, Message, Operation, Status
from hotset.cluster.sealing import SEAL, Credentials, Sealing, Unsealable, joined
from hotset.cluster.sockets import ask_by_curve, ask_by_password, close, open_socket, require_descriptors
from hotset.cluster.wire_records import UNANSWERED, CacheIdentity, Longs, WireRecords

__all__ = ["Connections", "Peer", "PendingRequest", "SessionPeers"]

T = TypeVar("T")

_IN_FLIGHT = 16  # what the server queues for one client
# Bytes. By default glibc gives memory back to the kernel where more of it is free than twice the largest
# block that was freed; the pages of the next answers are then taken anew, and a client takes up to a third
# longer. Blocks of up to 32 MB count (mallopt(3), M_MMAP_THRESHOLD).
_FREED = 31 << 20

_ENDS: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "has closed the connection, or died",
    zmq.EVENT_CONNECT_RETRIED: "does not listen at its address",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "has broken off the handshake, as a machine with other keys does",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "does not speak ZeroMQ with our keys",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "does not let this machine's key in",
}

# What forked children inherited: kept from being collected, which would close the parent's sockets.
_inherited: list[Any] = []


class PendingRequest:
    """A request that was sent, or was not; see :meth:`wait`."""

    def __init__(self, peer: Peer, cache: CacheIdentity, ids: Longs, operation: Operation) -> None:
        self._peer, self.cache, self.ids, self.operation = peer, cache, ids, operation
        self._pid = os.getpid()
        self._asked_at = time.monotonic()
        self.head: Head | None = None  # of the answer, and what follows it
        self.body: Message | None = None
        self.is_lost = False

    @property
    def name(self) -> str:
        """The peer's name."""
        return self._peer.name

    @property
    def is_refused_for_now(self) -> bool:
        """Whether the peer has answered that it is busy: it may be asked again at once."""
        return self.head is not None and self.head.status is Status.BUSY

    def wait(self, deadline: float) -> WireRecords:
        """Wait for the answer, and verify its records; without an answer, all samples are ``UNANSWERED``.

        The peer has failed if the deadline, of :func:`time.monotonic`, passes.
        """
        found = self._answered(deadline, self._parse)
        if found is None:
            return WireRecords.none(len(self.ids), self.cache.stride, UNANSWERED)
        if self.operation is Operation.PUT:
            self._peer.traffic.stored += int(np.count_nonzero(found.present))
            return found
        return self._verified(found)

    def words(self, deadline: float) -> Longs | None:
        """Wait, as :meth:`wait` does, for the words that answer words; None if there are none."""
        return self._answered(deadline, protocol.parse_words)

    def _answered(self, deadline: float, parse: Callable[[Head, Message], T]) -> T | None:
        peer = self._peer
        if self._pid != os.getpid():
            self.is_lost = True
        while self.body is None and not self.is_lost:
            left = deadline - time.monotonic()
            peer.poll(max(left, 0.0))
            if left <= 0 and self.body is None and not self.is_lost:
                self.is_lost = True
                peer.fail("has not answered in time")
        if self.body is None or self.head is None:
            return None
        body, self.body, self.is_lost = self.body, None, True
        if self.head.status not in (Status.OK, Status.MALFORMED):
            peer.note_refusal(self.head.status, self.cache)
            return None
        try:
            if self.head.status is not Status.OK:
                raise Malformed(self.head.status.sentence)
            said = (self.head.operation, self.head.fingerprint, self.head.layout, self.head.samples)
            if said != (self.operation, self.cache.fingerprint, self.cache.layout, len(self.ids)):
                raise Malformed("has sent an answer that does not fit the request")
            found = parse(self.head, body)
        except Malformed as error:
            peer.fail(str(error))
            return None
        peer.note_answer(time.monotonic() - self._asked_at, self.cache)
        return found

    def _parse(self, head: Head, body: Message) -> WireRecords:
        bare = self.operation is Operation.PUT
        return protocol.parse_records(head, body, self.ids, self.cache, bare=bare)

    def _verified(self, records: WireRecords) -> WireRecords:
        """The sound ones of these records: nothing else ever reaches the caller."""
        found = records.verified()
        wrong = len(records.batch.ids) - len(found.batch.ids)
        if wrong:
            self._peer.note_unsound(wrong)
        self._peer.traffic.received += len(found.batch.ids)
        self._peer.traffic.bytes += found.batch.rows.nbytes + found.batch.tails.nbytes
        return found


class Peer:
    """One other machine. Made by :meth:`Connections.add`.

    Attributes:
        name: of the machine, for messages to the user.
        endpoint: where it serves.
        traffic: counters.
        connections: to which it belongs.
    """

    def __init__(self, connections: Connections, name: str, endpoint: str, key: bytes | None) -> None:
        self.name, self.endpoint, self.traffic = name, endpoint, PeerStats()
        self.connections, self._key = connections, key
        self._pid = os.getpid()
        self._socket: Any = None
        self._events: Any = None
        self._sealing: Sealing | None = None
        self._unsent: list[list[Any]] | None = None  # while credentials are on their way
        self._number = 0
        self._open: weakref.WeakValueDictionary[int, PendingRequest] = weakref.WeakValueDictionary()
        self._backoff = Backoff()
        self._backoffs: defaultdict[bytes, Backoff] = defaultdict(Backoff)

    @property
    def is_backing_off(self) -> bool:
        """Whether this process sends it nothing at the moment."""
        return self._backoff.is_active

    def ask(self, cache: CacheIdentity, ids: Longs, *, claim: bool = False) -> PendingRequest:
        """Ask for records of these samples; sends at once, and never waits.

        Args:
            cache: as this process knows it.
            claim: whether this process will read the absent samples, and send them.
            ids: int64, at most ``protocol.MOST``; where their records have more than ``protocol.LARGEST``
                bytes, the rest is ``truncated`` and has to be asked for again.
        """
        self.traffic.asked += len(ids)
        operation = Operation.CLAIM if claim else Operation.GET
        request = PendingRequest(self, cache, ids, operation)
        return self._sent(request, lambda number: protocol.get(number, cache, ids, operation))

    def clear(self, cache: CacheIdentity, clears: int) -> PendingRequest:
        """Ask it to forget every record of a cache (:meth:`StoreService.clear`); words answer if it has."""
        word = np.array([clears])
        request = PendingRequest(self, cache, word, Operation.CLEAR)
        return self._sent(request, lambda number: protocol.clear(number, cache, word))

    def put(self, cache: CacheIdentity, ids: Longs, records: WireRecords) -> PendingRequest:
        """Send records of these samples, of as many bytes as :func:`protocol.put` allows; never waits."""
        request = PendingRequest(self, cache, ids, Operation.PUT)
        return self._sent(request, lambda number: protocol.put(number, cache, ids, records))

    def _sent(self, request: PendingRequest, parts: Callable[[int], list[Any]]) -> PendingRequest:
        """The request, sent if that is possible, and lost otherwise."""
        if self._pid != os.getpid():
            self._leave_to_parent()
        backs_off = self.is_backing_off or self._backoffs[request.cache.fingerprint].is_active
        if backs_off or len(self._open) >= _IN_FLIGHT:
            request.is_lost = True
            return request
        try:
            if self._socket is None:
                self._connect()
        except (OSError, zmq.ZMQError) as error:
            request.is_lost = True
            self.fail(f"cannot be connected to: {error}")
            return request
        number = self._number = (self._number + 1) % (1 << 64)
        self._open[number] = request
        self._send(parts(number))
        return request

    def _send(self, parts: list[Any]) -> None:
        if self._unsent is not None:
            self._unsent.append(parts)
            return
        run = joined(parts)
        message = run[SEAL:] if self._sealing is None else self._sealing.seal(run)
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            self.fail("takes no more requests")

    def _connect(self) -> None:
        require_descriptors()
        self._number = int.from_bytes(os.urandom(8), "little")
        self._open_socket(self.endpoint)
        keys = self.connections.keys
        if keys is not None:
            ask_by_curve(self._socket, keys, self._key)
            self._unsent = []
        self._socket.connect(self.endpoint)
        if keys is not None:
            self._socket.send(b"".join(protocol.key(self._number)), zmq.NOBLOCK)

    def _open_socket(self, endpoint: str) -> None:
        self._socket = open_socket(self.connections.context(), zmq.DEALER, endpoint)
        self._events = self._socket.get_monitor_socket(sum(_ENDS))

    def _connect_for_records(self, message: Message) -> None:
        """Take credentials, connect with them, and send what was asked for meanwhile.

        Raises:
            Malformed: there are none in the message.
        """
        _, body = protocol.parse_head(message, answers=True)
        try:
            credentials = Credentials.parse(body)
        except Unsealable:
            raise Malformed("has not sent the credentials that it was asked for") from None
        self._close_sockets()
        endpoint = f"{self.endpoint.rpartition(':')[0]}:{credentials.port}"
        self._open_socket(endpoint)
        ask_by_password(self._socket, credentials)
        self._socket.connect(endpoint)
        self._sealing = Sealing(credentials, serves=False)
        unsent, self._unsent = self._unsent or [], None
        for each in unsent:
            if self._socket is not None:  # it is closed where one cannot be sent
                self._send(each)

    def poll(self, timeout: float) -> None:
        """Receive the answers that have arrived; wait up to ``timeout`` seconds if there are none."""
        if self._socket is None:
            return
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(timeout * 1000)))
        while self._socket is not None and self._socket in ready:  # it is another one with credentials
            try:
                self._receive(self._socket.recv_multipart(zmq.NOBLOCK, copy=False)[0].buffer)
            except zmq.Again:
                break
        if self._socket is not None and self._events in ready:
            event = parse_monitor_message(self._events.recv_multipart())
            self.fail(_ENDS[event["event"]])

    def _receive(self, message: memoryview) -> None:
        try:
            if self._unsent is not None:
                self._connect_for_records(message)
                return
            if self._sealing is not None:
                message = self._sealing.open(message)
            head, body = protocol.parse_head(message, answers=True)
        except (Malformed, OSError, zmq.ZMQError) as error:
            self.fail(str(error))
            return
        except Unsealable:
            self.fail("has sent a message that is not sealed for this process")
            return
        request = self._open.pop(head.number, None)
        if request is None or request.is_lost:
            self.traffic.late += 1
            return
        request.head, request.body = head, body

    def fail(self, why: str) -> None:
        """Note that the peer fails, warn of it once, and leave it alone for a while.

        Its connection is closed; whatever else is on its way is lost.
        """
        self._disconnect()
        self.traffic.failures += 1
        self.traffic.why = why
        self._backoff.begin()
        self._warn(f"{self.name} ({self.endpoint}) {why}")

    def note_unsound(self, count: int) -> None:
        """Note records that were damaged, or another sample's."""
        self.traffic.unsound += count
        self._warn(f"{self.name} ({self.endpoint}) has sent {count} records whose checksums do not fit")

    def note_refusal(self, status: Status, cache: CacheIdentity) -> None:
        """Note that it has answered, though not with records of this cache."""
        self.traffic.refused += 1
        if status is not Status.BUSY:
            self._backoffs[cache.fingerprint].begin()
            self._warn(f"{self.name} ({self.endpoint}) {status.sentence}")

    def note_answer(self, seconds: float, cache: CacheIdentity) -> None:
        """Note that it has answered, and after how many seconds."""
        self._backoff = Backoff()
        self._backoffs.pop(cache.fingerprint, None)
        self.traffic.answers += 1
        self.traffic.seconds += seconds

    def _warn(self, sentence: str) -> None:
        self.connections.warn(
            f"{sentence}. Its samples come from the source meanwhile; it is asked again now and then.",
            self.name,
        )

    def _disconnect(self) -> None:
        for request in list(self._open.values()):
            request.is_lost = True
        self._open.clear()
        self._sealing = self._unsent = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._socket is not None:
            if self._events is not None:
                self._socket.disable_monitor()
                self._events.close(0)
            self._socket.close()
            self._socket = self._events = None

    def _leave_to_parent(self) -> None:
        _inherited.extend((self._socket, self._events))
        self._socket = self._events = None
        self._sealing = self._unsent = None
        self._open.clear()
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the connection; open requests are absent."""
        if self._pid == os.getpid():
            self._disconnect()


class Connections:
    """This process's connections to other machines, with one set of keys.

    Args:
        keys: this machine's; None: no keys (:mod:`hotset.cluster.sockets`).
        warn: gets a sentence of what is wrong with a machine, and its name.

    Attributes:
        peers: the machines, by name.
    """

    def __init__(self, keys: Keys | None, warn: Callable[[str, str], object]) -> None:
        self.keys, self.warn = keys, warn
        self.peers: dict[str, Peer] = {}
        self._pid = os.getpid()
        self._context: zmq.Context[Any] | None = None

    def add(self, name: str, endpoint: str, key: bytes | None) -> Peer:
        """Return the peer of this name, which serves there with that public key.

        One that was known under this name, and has moved or restarted, is closed.
        """
        known = self.peers.get(name)
        if known is not None:
            known.close()
        peer = self.peers[name] = Peer(self, name, endpoint, key)
        return peer

    def context(self) -> zmq.Context[Any]:
        """ZeroMQ's context of this process, whose only threads are its own for input and output."""
        if self._context is None or self._pid != os.getpid():
            _inherited.append(self._context)
            self._context, self._pid = zmq.Context(), os.getpid()
            np.empty(_FREED, np.uint8)  # and freed: what answers came in is kept for the next ones
        return self._context

    def close(self) -> None:
        """Close all connections, at once; nothing happens in a forked child that has asked no peer."""
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()
        if self._context is not None and self._pid == os.getpid():
            close(self._context)
            self._context = None


class SessionPeers:
    """The other machines of a session, as one process asks them. Used by one thread at a time.

    What passes between this machine and the others is added to the session's statistics file.

    Attributes:
        by_name: the other machines.
        membership: which machines there are, and the owners of samples, as of the last :meth:`refresh`; None
            until this machine knows.
        troubles: what is wrong with machines, and their names; the caller warns the user.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._file = MembershipFile(number)
        self._connections: Connections | None = None
        self._stats_file = PeerStatsFile(number)
        self.by_name: dict[str, Peer] = {}
        self.membership: Membership | None = None
        self.troubles: list[tuple[str, str]] = []

    def refresh(self) -> None:
        """Read which machines there are; make a peer for each that has come, close those that have left."""
        now, known = self._file.current(), self.membership
        if now is None or known is now:
            return
        connections = self._connections
        if connections is None or known is None or known.keys != now.keys:
            self.close()
            connections = self._connections = Connections(now.keys, lambda *one: self.troubles.append(one))
            self.by_name = connections.peers
        there = {name: member for name, member in now.by_name.items() if name != now.me}
        for name in self.by_name.keys() - there.keys():
            self.by_name.pop(name).close()
        for name, member in there.items():
            peer = self.by_name.get(name)
            if peer is None or peer.endpoint != member.endpoint:
                self.count(now=peer is not None)
                connections.add(name, member.endpoint, member.key.encode())
        self.membership = now

    @property
    def known(self) -> Membership:
        """The membership, where there is one."""
        assert self.membership is not None
        return self.membership

    @property
    def capacity(self) -> int:
        """Bytes that this machine can hold."""
        me = self.known.by_name.get(self.known.me)
        return me.capacity if me is not None else 0

    def patience(self, name: str) -> float:
        """How many seconds to wait for an answer of this machine."""
        member = self.known.by_name.get(name)
        return member.patience if member is not None else PATIENCE

    def ask(self, cache: CacheIdentity, owned: list[Owned], *, claim: bool = False) -> list[PendingRequest]:
        """Ask these machines for their samples, all at once, and in as many messages as that takes."""
        return [
            self.by_name[name].ask(cache, part, claim=claim)
            for name, ids in owned
            for part in protocol.parts(cache, ids)
        ]

    def former(self, ids: Longs) -> list[Owned]:
        """The machines that owned these samples before the last change and are still there, and which."""
        return [(name, some) for name, some in self.known.formerly(ids) if name in self.by_name]

    def gone(self) -> list[str]:
        """The machines that left a short while ago, by name: they may come back with what they had."""
        here = {*self.by_name, self.known.me} if self.membership is not None else set()
        former = self.membership.former if self.membership is not None else ()
        return [member.name for member in former if member.name not in here]

    def count(self, *, now: bool = False) -> None:
        """Add what was counted to the file, if that was not just done; ``now``: in any case."""
        self._stats_file.add({name: peer.traffic for name, peer in self.by_name.items()}, now=now)

    def traffic(self) -> dict[str, PeerStats]:
        """What passed between this machine and each other one, for all caches of the session; by name."""
        with contextlib.suppress(OSError):
            return read_peer_stats(self._number)
        return {}

    def close(self) -> None:
        """Close all connections."""
        if self._connections is not None:
            self.count(now=True)
            self._connections.close()
        self._connections, self.membership, self.by_name = None, None, {}
