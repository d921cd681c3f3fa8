"""Records between machines: each machine a process, over TCP, with keys; and all that goes wrong there.

Whatever a peer does, asking it gives sound records or none, in bounded time, and one warning.

No time passes here unless a test has it pass: how long a peer that fails is left alone is by a clock that
stands still, and who is silent is not missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from helpers import Clock, difference, eventually
from kills import child, ended, in_child, kill, stop
from stores import ids, opened

zmq = pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from hotset._warnings import Warner  # noqa: E402
from hotset.cluster import (  # noqa: E402
    backoff,
    protocol,
    sockets,
)
from hotset.cluster import server as serving  # noqa: E402
from hotset.cluster.batch_fetch import pack  # noqa: E402
from hotset.cluster.client import Connections, Peer, PendingRequest  # noqa: E402
from hotset.cluster.membership import Keys  # noqa: E402
from hotset.cluster.protocol import Operation, Status  # noqa: E402
from hotset.cluster.sealing import Credentials, GivenKeys, Sealing, joined  # noqa: E402
from hotset.cluster.server import RecordServer, ServerStats  # noqa: E402
from hotset.cluster.sockets import SPARE  # noqa: E402
from hotset.cluster.store_service import StoreService, cache_of  # noqa: E402
from hotset.cluster.wire_records import ABSENT, TRUNCATED, Bytes, CacheIdentity, Longs, WireRecords  # noqa: E402
from hotset.errors import HotsetWarning  # noqa: E402
from hotset.store import format as fmt  # noqa: E402
from hotset.store.format import Live  # noqa: E402
from hotset.store.record_batch import RecordBatch  # noqa: E402
from hotset.store.store import Store  # noqa: E402

HERE = "127.0.0.1"
FINGERPRINT = b"0123456789abcdef"
SERVER, ASKER, STRANGER = Keys.new(), Keys.new(), Keys.new()
SOON = 60.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the peers' rests."""
    clock = Clock()
    monkeypatch.setattr(backoff, "time", clock)
    monkeypatch.setattr(sockets, "_HEARTBEAT", 0)
    monkeypatch.setattr(sockets, "_HANDSHAKE", 0)
    return clock


class Fake:
    """A service of rows that are their sample's number over and over, and that does as it is told."""

    clears = 0

    def __init__(self, meanwhile: Callable[[Longs], object] = lambda wanted: None, width: int = 64) -> None:
        self.cache = CacheIdentity.of(FINGERPRINT, samples=1000, stride=16 + width, schema="fake")
        self._meanwhile = meanwhile

    def take(self, wanted: Longs, memory: Bytes, *, claim: bool = False) -> WireRecords:
        self._meanwhile(wanted)
        # In the memory that is sent from, which is used again once it was.
        rows = memory[: len(wanted) * self.cache.stride].reshape(len(wanted), -1)
        rows[:] = wanted.astype("<u1")[:, None]
        rows[:, 16:24] = 0  # no tail
        for sample, row in zip(wanted.tolist(), rows, strict=True):
            length = len(row) - fmt.RECORD_HEADER
            crc = fmt.checksum(sample, length, 0, row[16:].data, None)
            row[:12] = np.array([length, 0, crc], "<u4").view(np.uint8)
        none = np.zeros(len(wanted), np.int64)
        return WireRecords(none, RecordBatch(wanted, none, rows, np.empty((0, 256), np.uint8)))

    def put(self, wanted: Longs, records: WireRecords, clears: int) -> Any:
        raise OSError("this service is read only")


class Machine:
    """A process that serves, its endpoint, and what it has served."""

    def __init__(self, body: Callable[[], RecordServer]) -> None:
        self._ours, theirs = socket.socketpair()

        def run() -> None:
            with body() as serving:
                theirs.sendall(serving.endpoint.encode())
                while theirs.recv(1) == b"?":
                    theirs.sendall(repr(dataclasses.asdict(serving.served)).encode())

        self.pid = child(run)
        theirs.close()
        self._ours.settimeout(SOON)
        self.endpoint = self._ours.recv(1000).decode()

    @property
    def served(self) -> ServerStats:
        self._ours.sendall(b"?")
        return ServerStats(**eval(self._ours.recv(10_000)))

    def end(self) -> None:
        """End it, if it was not killed."""
        with self._ours, contextlib.suppress(ProcessLookupError, ChildProcessError, BrokenPipeError):
            os.kill(self.pid, signal.SIGCONT)
            self._ours.sendall(b".")
            assert ended(self.pid, SOON) == 0


@contextlib.contextmanager
def machine(body: Callable[[], RecordServer]) -> Iterator[Machine]:
    made = Machine(body)
    try:
        yield made
    finally:
        made.end()


def fake(
    service: Fake | None = None, keys: Keys | None = SERVER, address: str = HERE
) -> Callable[[], RecordServer]:
    """A body that serves a fake service to whom ``ASKER`` stands for."""
    service = service or Fake()
    return lambda: RecordServer(address, {FINGERPRINT: service}, keys, {ASKER.public})


@contextlib.contextmanager
def asker(
    endpoint: str, keys: Keys | None = ASKER, server: Keys | None = SERVER, name: str = "machine-1"
) -> Iterator[Peer]:
    with contextlib.closing(Connections(keys, Warner())) as connections:
        yield connections.add(name, endpoint, None if server is None else server.public)


def wait(request: PendingRequest, within: float = SOON) -> tuple[WireRecords, Bytes]:
    rows = np.full((len(request.ids), request.cache.stride), 255, np.uint8)
    answer = request.wait(time.monotonic() + within)
    rows[answer.present] = answer.batch.rows
    return answer, rows


def fetch(peer: Peer, cache: CacheIdentity, wanted: Longs, within: float = SOON) -> tuple[WireRecords, Bytes]:
    return wait(peer.ask(cache, wanted), within)


def gets(peer: Peer, cache: CacheIdentity, *wanted: int) -> bool:
    """Whether all these samples of a fake service come, and are what they must be."""
    answer, rows = fetch(peer, cache, ids(*wanted))
    assert (rows[answer.present][:, 24:] == ids(*wanted)[answer.present, None] % 256).all()
    return bool(answer.present.all())


def refuses(peer: Peer, cache: CacheIdentity, why: str, within: float = SOON) -> None:
    """Fail unless the peer's samples are absent, with one warning that says why."""
    with pytest.warns(HotsetWarning, match=why) as told:
        answer, rows = fetch(peer, cache, ids(1, 2), within)
    assert len(told) == 1
    assert not answer.present.any()
    assert (rows == 255).all(), "something was written over the caller's memory"


def unanswered(request: PendingRequest) -> None:
    """Let the deadline of a request pass, to which no answer can have come; fails unless that is told of."""
    with pytest.warns(HotsetWarning, match="has not answered in time") as told:
        answer, rows = wait(request, within=0.0)
    assert len(told) == 1
    assert not answer.present.any()
    assert (rows == 255).all(), "something was written over the caller's memory"


# ---- a real store --------------------------------------------------------------------------------------


def with_tails(index: int) -> dict[str, Any]:
    return {**samples.mapping(index), "text": "x" * (index * 37 % 900)}


@pytest.mark.parametrize("make", [samples.big_image_and_label, with_tails])
def test_records_of_a_store_arrive_as_they_lie_there(make: samples.Callable[[int], Any]) -> None:
    with opened(make, 40) as alike:
        schema, cache = alike.schema, cache_of(alike, FINGERPRINT)
    there = [i for i in range(40) if i % 3]

    def body() -> RecordServer:
        store = stack.enter_context(opened(make, 40))
        store.fill(ids(there), make)
        return RecordServer(HERE, {FINGERPRINT: StoreService(store, FINGERPRINT)}, SERVER, {ASKER.public})

    with contextlib.ExitStack() as stack, machine(body) as other, asker(other.endpoint) as peer:
        wanted = np.random.default_rng(0).permutation(40)
        answer, rows = fetch(peer, cache, wanted)
        assert sorted(wanted[answer.present].tolist()) == there
        assert (rows[~answer.present] == 255).all()
        came = answer.batch.samples(schema)
        assert list(came) == wanted[answer.present].tolist()
        for sample, found in came.items():
            assert difference(found, make(sample)) is None
        assert peer.traffic.received == len(there)
        assert other.served.records == len(there)


def test_nothing_from_before_a_clear_comes_from_or_to_a_machine() -> None:
    make = samples.big_image_and_label
    with opened(make, 40) as alike:
        schema, before = alike.schema, cache_of(alike, FINGERPRINT)
    after = dataclasses.replace(before, clears=3)

    def body() -> RecordServer:
        store = stack.enter_context(opened(make, 40))
        store.fill(ids(1, 2), make)
        return RecordServer(HERE, {FINGERPRINT: StoreService(store, FINGERPRINT)}, SERVER, {ASKER.public})

    with contextlib.ExitStack() as stack, machine(body) as other, asker(other.endpoint) as peer:

        def has(sample: int) -> bool:
            return bool(fetch(peer, after, ids(sample))[0].present.all())

        def bring(cache: CacheIdentity, sample: int) -> None:
            ((wanted, records),) = pack(schema, {sample: make(sample)})
            peer.put(cache, wanted, records).wait(time.monotonic() + SOON)

        assert fetch(peer, before, ids(1, 2))[0].present.all()
        assert not has(1), "the clear has come with the request"
        bring(before, 1)
        assert not has(1), "it was read before the clear"
        bring(after, 1)
        assert has(1)
        assert not has(2), "it was cleared once"


@pytest.mark.parametrize(("owner", "step"), [(StoreService, "put"), (Store, "insert")])
def test_what_is_brought_as_a_machine_is_cleared_is_not_stored(
    owner: type, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = samples.big_image_and_label
    real = getattr(owner, step)

    def clear_and_go_on(self: Any, *arguments: Any) -> Any:
        if not store.segment.live[Live.CLEARS]:
            assert store.clear(clears=1)  # as another process of that machine does
        return real(self, *arguments)

    monkeypatch.setattr(owner, step, clear_and_go_on)
    with opened(make, 40) as store:
        before = cache_of(store, FINGERPRINT)
        ((wanted, records),) = pack(store.schema, {1: make(1)})
        services = {FINGERPRINT: StoreService(store, FINGERPRINT)}
        with RecordServer(HERE, services, SERVER, {ASKER.public}) as other, asker(other.endpoint) as peer:
            for clears, stored in (0, False), (1, True):
                cache = dataclasses.replace(before, clears=clears)
                answer = peer.put(cache, wanted, records).wait(time.monotonic() + SOON)
                assert answer.present.tolist() == [stored]
                assert store.present(ids(1)).tolist() == [stored]


@pytest.mark.parametrize("make", [samples.big_image_and_label, with_tails])
def test_records_that_are_brought_are_stored(make: samples.Callable[[int], Any]) -> None:
    def body() -> RecordServer:
        store = stack.enter_context(opened(make, 40))
        return RecordServer(HERE, {FINGERPRINT: StoreService(store, FINGERPRINT)}, SERVER, {ASKER.public})

    with contextlib.ExitStack() as stack, machine(body) as other, opened(make, 40) as mine:
        mine.fill(ids(range(20)), make)
        service = StoreService(mine, FINGERPRINT)
        wanted = ids(3, 30, 7, 5)
        brought = service.take(wanted, np.empty(1 << 20, np.uint8))
        with asker(other.endpoint) as peer:
            stored = peer.put(service.cache, wanted, brought).wait(time.monotonic() + SOON)
            assert stored.present.tolist() == [True, False, True, True], other.served.problem
            back, _ = fetch(peer, service.cache, wanted)
            assert back.present.tolist() == [True, False, True, True]
            damaged = brought._replace(batch=brought.batch._replace(rows=brought.batch.rows.copy()))
            damaged.batch.rows[1, -1] ^= 1
            stored = peer.put(service.cache, ids(13, 30, 17, 15), damaged).wait(time.monotonic() + SOON)
            assert not stored.present.any(), "a record was stored as another sample's"
            assert other.served.unsound == 3
        came = back.batch.samples(mine.schema)
        assert list(came) == [3, 7, 5]
        for sample, found in came.items():
            assert difference(found, make(sample)) is None


def test_a_sample_that_is_stored_while_it_is_looked_up_is_whole_or_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(samples.kilobyte, 10) as store:
        store.fill(ids(0), samples.kilobyte)
        service, real = StoreService(store, FINGERPRINT), store.present

        def present(wanted: Longs) -> Any:
            store.fill(wanted, samples.kilobyte)
            return real(wanted)

        monkeypatch.setattr(store, "present", present)
        found = service.take(ids(0, 3), np.empty(1 << 20, np.uint8))
        assert found.verified().present.tolist() == found.present.tolist()
        assert found.present[0]


@pytest.mark.parametrize("make", [samples.kilobyte, with_tails])
def test_what_has_no_room_in_an_answer_is_left_for_the_next(make: samples.Callable[[int], Any]) -> None:
    with opened(make, 10) as store:
        store.fill(ids(range(8)), make)
        service = StoreService(store, FINGERPRINT)
        wanted, memory, got = ids(range(10)), np.empty(2500, np.uint8), []
        while len(wanted):
            records = service.take(wanted, memory)
            assert records.batch.rows.nbytes + records.batch.tails.nbytes <= len(memory)
            assert records.verified().present.tolist() == records.present.tolist()
            got += wanted[records.generations >= 0].tolist()
            wanted = wanted[records.generations == TRUNCATED]
        assert got == list(range(8))
        # A record that no answer can hold is absent, or it would be asked for again for ever.
        assert (service.take(ids(7), np.empty(100, np.uint8)).generations == ABSENT).all()
        assert store.clear()
        assert (service.take(ids(range(10)), memory).generations == ABSENT).all()


# ---- strangers -----------------------------------------------------------------------------------------


def test_strangers_get_nothing() -> None:
    cache = Fake().cache
    with machine(fake()) as other:
        with asker(other.endpoint, keys=STRANGER) as peer:
            refuses(peer, cache, "does not let this machine's key in")
        with asker(other.endpoint, keys=None, server=None) as peer:
            refuses(peer, cache, "machine-1 .* (handshake|ZeroMQ|closed)")
        with asker(other.endpoint, server=STRANGER) as peer:
            refuses(peer, cache, "machine-1 .* (handshake|ZeroMQ|closed)")
        with contextlib.closing(
            socket.create_connection((HERE, int(other.endpoint.rpartition(":")[2])))
        ) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with asker(other.endpoint) as peer:
            assert gets(peer, cache, 1, 2, 3)
        served = other.served
        assert served.requests == 1
        assert served.strangers >= 1, "it tries again until it is told"


@contextlib.contextmanager
def relayed(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """Servers that are made meanwhile send their clients through somebody who writes down what passes for
    records, and changes what the server sends.
    """
    give = GivenKeys.give

    def pump(source: socket.socket, to: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with path.open("ab") as seen:
                    seen.write(data)
                to.sendall(change(data))

    def relay(listener: socket.socket, port: int) -> None:
        while True:
            near = listener.accept()[0]
            far = socket.create_connection((HERE, port))
            for arguments in ((near, far, bytes), (far, near, change)):
                threading.Thread(target=pump, args=arguments, daemon=True).start()

    def giving(keys: GivenKeys, port: int) -> Credentials:
        listener = socket.create_server((HERE, 0))
        threading.Thread(target=relay, args=(listener, port), daemon=True).start()
        return give(keys, listener.getsockname()[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GivenKeys, "give", giving)
        yield


def test_nothing_of_a_record_can_be_seen_on_its_way(tmp_path: Path) -> None:
    cache = Fake(width=4000).cache
    with (
        relayed(tmp_path / "seen", bytes),
        machine(fake(Fake(width=4000))) as other,
        asker(other.endpoint) as peer,
    ):
        assert gets(peer, cache, 1, 2, 3)
    seen = (tmp_path / "seen").read_bytes()
    assert len(seen) > 3 * 4000
    for known in (bytes([2]) * 16, FINGERPRINT, b"hotpeer", ids(1, 2, 3).tobytes()):
        assert known not in seen


def test_a_sealed_answer_that_is_changed_is_not_taken(tmp_path: Path) -> None:
    def change(data: bytes) -> bytes:
        middle = len(data) // 2  # in the rows
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if middle > 1000 else data

    cache = Fake(width=4000).cache
    with (
        relayed(tmp_path / "seen", change),
        machine(fake(Fake(width=4000))) as other,
        asker(other.endpoint) as peer,
    ):
        refuses(peer, cache, "has sent a message that is not sealed for this process")


def test_strangers_get_nothing_where_records_are_served() -> None:
    """Without a password, with one that was overheard, and with a request that was overheard."""
    cache = Fake().cache
    told: Any = multiprocessing.SimpleQueue()
    give = GivenKeys.give

    def giving(keys: GivenKeys, port: int) -> Credentials:
        drawn = give(keys, port)
        told.put(tuple(drawn))
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GivenKeys, "give", giving)
        with machine(fake()) as other, asker(other.endpoint) as peer:
            assert gets(peer, cache, 1)
            credentials = Credentials(*told.get())
            context: Any = zmq.Context()
            bare, guessing, inside = raws = [context.socket(zmq.DEALER) for _ in range(3)]
            sockets.ask_by_password(guessing, credentials._replace(password=bytes(16)))
            sockets.ask_by_password(inside, credentials)
            # What the peer itself has sent, as it was the first on this connection.
            asked = protocol.get(1, cache, ids(1))
            overheard = Sealing(credentials, serves=False).seal(joined(asked))
            for raw in raws:
                raw.linger = 0
                raw.connect(f"tcp://{HERE}:{credentials.port}")
                raw.send(b"".join(asked))
                raw.send(overheard)
            assert eventually(lambda: other.served.refused == 2 and other.served.strangers >= 1)
            assert not inside.poll(50)
            assert not bare.poll(0)
            assert not guessing.poll(0)
            for raw in raws:
                raw.close()
            context.term()
            assert gets(peer, cache, 2, 3), "it goes on with whoever has the key"
            assert other.served.requests == 2


def test_what_is_asked_before_there_is_a_key_is_answered() -> None:
    cache = Fake().cache
    with machine(fake()) as other, asker(other.endpoint) as peer:
        requests = [peer.ask(cache, ids(number)) for number in range(10)]
        for number, request in enumerate(requests):
            answer, rows = wait(request)
            assert answer.present.all()
            assert (rows[0, 24:] == number).all()


def test_it_is_bound_to_the_one_address() -> None:
    with machine(fake(address="127.0.0.5")) as other:
        assert other.endpoint.startswith("tcp://127.0.0.5:")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(other.endpoint.rpartition(":")[2])))
    with pytest.raises(OSError, match=r"192\.0\.2\.1 cannot be served from"):
        RecordServer("192.0.2.1", {}, SERVER, ())


# ---- peers that are others than they should be ---------------------------------------------------------


def test_another_fingerprint_and_another_layout_are_refused() -> None:
    cache = Fake().cache
    with machine(fake()) as other:
        with asker(other.endpoint) as peer:
            refuses(
                peer, dataclasses.replace(cache, fingerprint=b"another one, yes"), "no cache of this finger"
            )
            assert gets(peer, cache, 1, 2), "the caches that both have do not suffer"
            answer, _ = fetch(peer, dataclasses.replace(cache, fingerprint=b"another one, yes"), ids(1))
            assert not answer.present.any()
            assert peer.traffic.refused == 1, "it is not asked again at once"
        with asker(other.endpoint) as peer:
            refuses(peer, dataclasses.replace(cache, layout=bytes(16)), "in another way")
        assert other.served.requests == 1


def test_another_version_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(fake()) as other, asker(other.endpoint) as peer:
        monkeypatch.setattr(protocol, "VERSION", 5)
        refuses(peer, Fake().cache, "uses version 4 of hotset's messages, and this process uses version 5")
        assert other.served.requests == 0


def test_a_version_that_sends_several_frames_is_answered_with_this_ones() -> None:
    """As versions up to 3 do: without keys, as with keys they ask for one first, which is one frame."""
    cache = Fake().cache
    header, *more = protocol.get(7, cache, ids(1))
    with machine(fake(keys=None)) as other, asker(other.endpoint, keys=None, server=None) as peer:
        context: Any = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.linger = 0
        raw.connect(other.endpoint)
        for version in (b"\3\0", b"\4\0"):
            raw.send_multipart([header[:8] + version + header[10:], *more])
            assert raw.poll(SOON * 1000)
            (answer,) = raw.recv_multipart()
            head, rest = protocol.parse_head(answer, answers=True)
            assert (head.number, head.status, len(answer), len(rest)) == (7, Status.MALFORMED, 64, 0)
        raw.close()
        context.term()
        assert gets(peer, cache, 1, 2)


def test_an_answer_of_several_frames_is_of_another_version() -> None:
    def old(message: bytes) -> list[bytes]:
        return [message[:8] + b"\3\0" + message[10:64], message[64:80], message[80:240], b""]

    with (
        machine(fake(keys=None)) as other,
        between(other.endpoint, lambda message: [old(message)]) as endpoint,
        asker(endpoint, keys=None, server=None) as peer,
    ):
        refuses(peer, Fake().cache, "uses version 3 of hotset's messages, and this process uses version 4")


def test_a_service_that_fails_serves_nothing_and_the_others_go_on() -> None:
    broken, whole = b"b" * 16, Fake()
    caches = {}

    def fail(wanted: Longs) -> None:
        raise OSError("the session is gone")

    service = Fake(fail)
    service.cache = dataclasses.replace(service.cache, fingerprint=broken)
    caches = {broken: service, FINGERPRINT: whole}
    with (
        machine(lambda: RecordServer(HERE, caches, SERVER, {ASKER.public})) as other,
        asker(other.endpoint) as peer,
    ):
        refuses(peer, service.cache, "could not get at its own records")
        assert gets(peer, whole.cache, 1, 2)
        assert other.served.problem == "OSError: the session is gone"


def test_without_memory_for_a_moment_a_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scarce(serving._Buffer):
        made = 0

        def __init__(self) -> None:
            Scarce.made += 1
            if Scarce.made == 1:
                raise MemoryError
            super().__init__()

    monkeypatch.setattr(serving, "_Buffer", Scarce)
    cache = Fake().cache
    with machine(fake()) as other, asker(other.endpoint) as peer:
        answer, _ = fetch(peer, cache, ids(1))
        assert not answer.present.any()
        assert (peer.traffic.refused, peer.traffic.failures) == (1, 0)
        assert gets(peer, cache, 1, 2), "at once"


def test_a_request_that_goes_wrong_in_any_way_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, asked = protocol.parse_head, []

    def fail(message: Any, *, answers: bool) -> Any:
        asked.append(answers)
        if asked.count(False) == 1 and not answers:
            raise MemoryError("nothing is left")
        return read(message, answers=answers)

    monkeypatch.setattr(protocol, "parse_head", fail)
    cache = Fake().cache
    with machine(fake()) as other:
        with asker(other.endpoint) as peer:
            request = peer.ask(cache, ids(1, 2))
            assert eventually(lambda: other.served.problem)
            unanswered(request)
        with asker(other.endpoint) as peer:
            assert gets(peer, cache, 1, 2)
        assert other.served.problem == "MemoryError: nothing is left"


# ---- a man in the middle -------------------------------------------------------------------------------

# Of an answer: the messages that are sent in its place, or their frames.
Change = Callable[[bytes], Sequence[bytes | list[bytes]]]


@contextlib.contextmanager
def between(endpoint: str, change: Change) -> Iterator[str]:
    """Somebody between asker and server who changes answers. (With keys, nobody can: they are encrypted.)"""
    context: Any = zmq.Context()
    front, back, halt = context.socket(zmq.ROUTER), context.socket(zmq.DEALER), threading.Event()
    front.linger = back.linger = 0
    port = front.bind_to_random_port(f"tcp://{HERE}")
    back.connect(endpoint)

    def run() -> None:
        identity = b""
        while not halt.is_set():
            if front.poll(5):
                identity, message = front.recv_multipart()
                back.send(message)
            if back.poll(5):
                for answer in change(back.recv()):
                    front.send_multipart([identity, *([answer] if isinstance(answer, bytes) else answer)])
        front.close()
        back.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://{HERE}:{port}"
    finally:
        halt.set()
        thread.join()
        context.term()


# Where these begin in an answer about two samples of a fake service, whose rows have 80 bytes.
ENTRIES, ROWS = 64, 64 + 2 * 8


def flip(at: int) -> Change:
    def change(message: bytes) -> list[bytes]:
        changed = bytearray(message)
        changed[at] ^= 1
        return [bytes(changed)]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flip(0), "not a message of hotset's"),
        (flip(8), "uses version 5"),
        (flip(10), "unknown operation|does not fit the request"),
        (flip(12), "does not fit the request"),
        (flip(24), "does not fit the request"),
        (flip(40), "does not fit the request"),
        (flip(ENTRIES), "1 records whose checksums"),
        (flip(ENTRIES + 3), "entry that is not valid|bytes of records"),
        (flip(ENTRIES + 4), "sent 192 bytes of records, where its entries say 448"),
        (flip(ROWS + 30), "1 records whose checksums"),
        (
            lambda said: [said[:ROWS] + said[ROWS + 80 :][:80] + said[ROWS:][:80] + said[ROWS + 160 :]],
            "2 records whose checks",
        ),
        (lambda said: [said[: ENTRIES + 8]], "sent 1 entries, where its header says 2"),
        (lambda said: [said[:ROWS]], "sent 0 bytes of records, where its entries say 192"),
        (lambda said: [said + b"x"], "sent 193 bytes of records, where its entries say 192"),
        (lambda said: [b"what?"], "not a message of hotset's"),
        (lambda said: [[said[:ROWS], said[ROWS:]]], "sent 0 bytes of records, where its entries say 192"),
    ],
)
def test_a_changed_answer_gives_no_wrong_sample(change: Change, why: str) -> None:
    cache = Fake().cache
    with (
        machine(fake(keys=None)) as other,
        between(other.endpoint, change) as endpoint,
        asker(endpoint, keys=None, server=None) as peer,
    ):
        with pytest.warns(HotsetWarning, match=why) as told:
            answer, rows = fetch(peer, cache, ids(1, 2))
        assert len(told) == 1
        assert int(answer.present.sum()) == (1 if why.startswith("1 records") else 0)
        assert (rows[~answer.present] == 255).all()
        assert (rows[answer.present][:, 24:] == ids(1, 2)[answer.present, None]).all()
        assert peer.traffic.unsound or peer.traffic.failures == 1


def test_an_answer_that_is_replayed_is_dropped() -> None:
    """Twice at once, and instead of a later one; over CURVE neither could be sent."""
    seen: list[bytes] = []

    def replay(message: bytes) -> list[bytes]:
        seen.append(message)
        return [seen[0], seen[0], message]

    cache = Fake().cache
    with (
        machine(fake(keys=None)) as other,
        between(other.endpoint, replay) as endpoint,
        asker(endpoint, keys=None, server=None) as peer,
        warnings.catch_warnings(),
    ):
        assert gets(peer, cache, 1, 2)
        assert gets(peer, cache, 3, 4)
        assert gets(peer, cache, 5)
        assert eventually(lambda: peer.poll(0.01) or peer.traffic.late == 6)


def test_answers_in_another_order_find_their_requests() -> None:
    held: list[bytes] = []

    def swap(message: bytes) -> list[bytes]:
        held.append(message)
        return held[::-1] if len(held) == 2 else []

    cache = Fake().cache
    with (
        machine(fake(keys=None)) as other,
        between(other.endpoint, swap) as endpoint,
        asker(endpoint, keys=None, server=None) as peer,
    ):
        one, two = peer.ask(cache, ids(1, 2)), peer.ask(cache, ids(3, 4))
        for request, wanted in ((one, [1, 2]), (two, [3, 4])):
            answer, rows = wait(request)
            assert answer.present.all()
            assert rows[:, 30].tolist() == wanted


def test_answers_in_flight_are_not_written_over() -> None:
    """More of them than there are buffers, and larger than what is copied before it is sent."""
    service = Fake(width=300_000)
    with machine(fake(service)) as other, asker(other.endpoint) as peer:
        requests = [peer.ask(service.cache, ids(range(k, k + 40))) for k in range(12)]
        for k, request in enumerate(requests):
            answer, rows = wait(request)
            assert answer.present.all()
            assert (rows[:, 24:] == ids(range(k, k + 40))[:, None]).all()


# ---- peers that are slow, stopped, dead, or not the same any more --------------------------------------


def test_an_answer_that_comes_late_is_dropped_and_the_peer_is_left_alone(clock: Clock) -> None:
    begun, gate = multiprocessing.Event(), multiprocessing.Event()

    def dawdle(wanted: Longs) -> None:
        if wanted[0] == 1:
            begun.set()
            assert gate.wait(SOON)

    cache = Fake().cache
    with machine(fake(Fake(dawdle))) as other, asker(other.endpoint) as peer:
        assert gets(peer, cache, 5)
        abandoned = peer.ask(cache, ids(3, 4))
        del abandoned
        assert gets(peer, cache, 6), "what nobody waits for must not get in the way"
        assert peer.traffic.late == 1
        request = peer.ask(cache, ids(1, 2))
        assert begun.wait(SOON)
        unanswered(request)
        gate.set()
        assert eventually(lambda: other.served.requests == 4)
        clock.now += 0.4
        assert peer.is_backing_off
        answer, _ = fetch(peer, cache, ids(7))
        assert not answer.present.any()
        clock.now += 0.2
        assert not peer.is_backing_off
        assert gets(peer, cache, 7)
        assert other.served.requests == 5, "it was asked while it was left alone"
        assert (peer.traffic.failures, peer.traffic.why) == (1, "has not answered in time")


def test_who_fails_again_is_left_alone_for_longer_until_it_does_well(clock: Clock) -> None:
    cache = Fake().cache
    with machine(fake()) as other, asker(other.endpoint) as peer:
        assert gets(peer, cache, 1)
        peer.connections.warn = lambda sentence, name: None
        for seconds in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            peer.fail("is away")
            clock.now += seconds - 0.1
            assert peer.is_backing_off
            clock.now += 0.2
            assert not peer.is_backing_off
        assert gets(peer, cache, 2)
        peer.fail("is away")
        clock.now += 0.6
        assert not peer.is_backing_off


def test_a_stopped_peer_costs_the_deadline_once(clock: Clock) -> None:
    cache = Fake().cache
    with machine(fake()) as other, asker(other.endpoint) as peer:
        assert gets(peer, cache, 1)
        stop(other.pid)
        refuses(peer, cache, "has not answered in time", within=0.1)
        assert peer.ask(cache, ids(2)).is_lost, "nobody waits for what is not asked"
        assert not gets(peer, cache, 2)
        os.kill(other.pid, signal.SIGCONT)
        clock.now += 0.6
        assert gets(peer, cache, 3)


def test_a_stopped_peer_is_missed_long_before_the_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_HEARTBEAT", 100)
    monkeypatch.setattr(sockets, "SILENCE", 300)
    cache = Fake().cache

    def answers() -> bool:
        clock.now += 60
        return gets(peer, cache, 1)

    with machine(fake()) as other, asker(other.endpoint) as peer:
        peer.connections.warn = lambda sentence, name: None  # it may be so busy that it is missed before
        assert eventually(answers)
        stop(other.pid)
        answer, _ = fetch(peer, cache, ids(2), within=600)
        assert not answer.present.any()
        assert peer.traffic.why == "has closed the connection, or died"


def test_a_killed_peer_is_noticed_long_before_the_deadline(clock: Clock) -> None:
    cache = Fake().cache
    with machine(fake()) as other, asker(other.endpoint) as peer:
        assert gets(peer, cache, 1)
        stop(other.pid)
        one, two = peer.ask(cache, ids(1)), peer.ask(cache, ids(2))
        kill(other.pid)
        with pytest.warns(HotsetWarning, match="closed the connection, or died"):
            answer, _ = wait(one, within=600)
        assert not answer.present.any()
        answer, _ = wait(two, within=600)
        assert not answer.present.any()
        assert peer.traffic.failures == 1
        clock.now += 0.6
        assert not gets(peer, cache, 3), "nobody is there"
        assert peer.traffic.why == "does not listen at its address"


def test_a_peer_that_restarts_with_another_key_serves_who_knows_it(clock: Clock) -> None:
    cache = Fake().cache
    with machine(fake()) as other, asker(other.endpoint) as peer:
        assert gets(peer, cache, 1)
        kill(other.pid)
        port = other.endpoint.rpartition(":")[2]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hotset.cluster.server._ANY_PORT", port)
            again = Machine(fake(keys=STRANGER))
        try:
            assert again.endpoint == other.endpoint
            refuses(peer, cache, "machine-1")
            for _ in range(2):
                clock.now += 60
                assert not gets(peer, cache, 1), "a machine with another key was believed"
            moved = peer.connections.add("machine-1", again.endpoint, STRANGER.public)
            assert gets(moved, cache, 1)
        finally:
            again.end()


def test_a_stopped_asker_does_not_hold_up_the_others() -> None:
    """More answers than there are buffers wait for it, each larger than what sockets hold."""
    service = Fake(width=100_000)
    out, into = os.pipe()
    with machine(fake(service)) as other:

        def greedy() -> None:
            with asker(other.endpoint) as peer:
                requests = [peer.ask(service.cache, ids(range(100))) for _ in range(8)]
                wait(requests[0])
                os.write(into, b"k")
                signal.pause()

        pid = child(greedy)
        try:
            assert os.read(out, 1) == b"k"
            stop(pid)
            with asker(other.endpoint) as peer:
                for _ in range(5):
                    assert gets(peer, service.cache, *range(100))
        finally:
            kill(pid)
            os.close(out)
            os.close(into)


def test_too_many_requests_are_refused_and_the_peer_is_not_to_blame() -> None:
    cache = Fake().cache
    asked = b"".join(protocol.get(1, cache, ids(1)))
    with (
        machine(fake(Fake(lambda wanted: time.sleep(0.02)), keys=None)) as other,
        asker(other.endpoint, keys=None, server=None) as peer,
    ):
        context: Any = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.linger = 0
        raw.connect(other.endpoint)

        def is_flooded() -> bool:
            for _ in range(40):
                raw.send(asked)
            return other.served.refused > 0

        assert eventually(is_flooded)
        refused, _ = protocol.parse_head(raw.recv(), answers=True)
        assert refused.status in (Status.BUSY, Status.OK)
        raw.close()
        context.term()
        requests = [peer.ask(cache, ids(k)) for k in range(20)]
        assert sum(request.is_lost for request in requests) == 4, "more in flight than the other end queues"
        assert not peer.traffic.failures
        peer.note_refusal(Status.BUSY, cache)
        assert not peer.is_backing_off
        assert peer.traffic.refused == 1


# ---- forks, and the end --------------------------------------------------------------------------------


def test_a_forked_child_asks_by_itself() -> None:
    cache = Fake().cache
    with machine(fake()) as other, asker(other.endpoint) as peer:
        assert gets(peer, cache, 1)
        pending = peer.ask(cache, ids(9))

        def in_child() -> None:
            answer, _ = wait(pending)
            assert not answer.present.any(), "a child took its parent's answer"
            for k in range(5):
                assert gets(peer, cache, k)
            assert not peer.traffic.failures
            peer.connections.close()

        assert ended(child(in_child)) == 0
        answer, rows = wait(pending)
        assert answer.present.all()
        assert rows[0, 30] == 9
        assert gets(peer, cache, 1)
        # A child that never asks closes nothing of its parent's either.
        assert ended(child(peer.connections.close)) == 0
        assert gets(peer, cache, 2)


def _open_and_close() -> None:
    def once() -> None:
        with (
            RecordServer(HERE, {FINGERPRINT: service}, SERVER, {ASKER.public}) as serving,
            asker(serving.endpoint) as peer,
        ):
            assert gets(peer, service.cache, 1, 2)
            peer.ask(service.cache, ids(1))
            counts.append(len(os.listdir("/proc/self/task")))
        serving.close()
        peer.connections.close()

    service, counts = Fake(width=100_000), [0]
    once()  # and pyzmq's own collector of what was sent without a copy starts, and stays
    assert eventually(lambda: len(os.listdir("/proc/self/task")) < counts[-1])
    before, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
        assert counts[-1] > before
        assert eventually(lambda: len(os.listdir("/proc/self/task")) <= before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotset")]
    assert len(os.listdir("/proc/self/fd")) == files


def test_closing_leaves_no_thread_and_no_file() -> None:
    assert ended(child(_open_and_close)) == 0


class _Ends:
    """A server and a client in this process, with answers and puts on their way that nobody waits for."""

    def __init__(self, keys: Keys | None) -> None:
        service, wanted = Fake(width=3 << 20), ids(1, 2, 3)
        self.server = fake(service, keys)()
        self.client = Connections(None if keys is None else ASKER, lambda why, name: None)
        peer = self.client.add("machine-1", self.server.endpoint, SERVER.public)
        brought = service.take(wanted, np.empty(len(wanted) * service.cache.stride, np.uint8))
        assert wait(peer.ask(service.cache, wanted[:1]))[0].present.all(), peer.traffic.why
        self.requests = [
            request
            for _ in range(2)
            for request in (peer.ask(service.cache, wanted), peer.put(service.cache, wanted, brought))
        ]


def _close_in_the_midst() -> None:
    """Of messages of several frames, libzmq has ended the process in most runs of this."""
    for keys in (None, SERVER):
        for n in range(24):
            ends = _Ends(keys)
            time.sleep(0.0005 * n)
            closing = [threading.Thread(target=end.close) for end in (ends.server, ends.client)]
            for one in closing:
                one.start()
            for one in closing:
                one.join()


def test_both_ends_may_close_with_answers_half_sent() -> None:
    """Else of the ranks that end together one is aborted now and then."""
    in_child(_close_in_the_midst)


_FAULTS = """
import resource
import numpy as np
from hotset.cluster.client import Connections

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    answers = [np.ones(8 << 20, np.uint8) for _ in range(4)]
    del answers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

Connections(None, print).context()
print(*(faults() for _ in range(4)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc keeps what it likes")
def test_answers_come_to_where_others_were_before() -> None:
    """The next pages are not taken anew from the kernel: each takes as long as to copy it does."""
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    first, *later = map(int, done.stdout.split())
    assert first > 1000
    assert max(later) < 100


def test_closing_does_not_wait_for_who_does_not_answer() -> None:
    with machine(fake()) as other:
        stop(other.pid)

        def job() -> None:
            with asker(other.endpoint) as peer:
                request = peer.ask(Fake().cache, ids(1))
            answer, _ = wait(request)
            assert not answer.present.any()

        in_child(job)  # which fails if it hangs


def test_keys_do_not_show_their_secret() -> None:
    assert SERVER.secret.decode() not in repr(SERVER)
    assert SERVER.public.decode() in repr(SERVER)


def test_operations_that_are_no_gets_have_no_rows() -> None:
    """A service that cannot be written refuses, and its peer goes on."""
    service = Fake()
    with machine(fake()) as other, asker(other.endpoint) as peer:
        brought = service.take(ids(1, 2), np.empty(1000, np.uint8))
        request = peer.put(service.cache, ids(1, 2), brought)
        assert request.operation is Operation.PUT
        with pytest.warns(HotsetWarning, match="could not get at its own records"):
            answer = request.wait(time.monotonic() + SOON)
        assert not answer.present.any()
        assert other.served.problem == "OSError: this service is read only"


# ---- no descriptors ------------------------------------------------------------------------------------


def leave_descriptors(count: int) -> None:
    """Have so many descriptors left in this process, and no more."""
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, highest + 1 + count))
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    for fd in opened[-count:] if count else []:
        os.close(fd)


@pytest.mark.parametrize("left", [0, 3, 9, 20, 31])
def test_a_process_with_few_descriptors_left_reads_its_source(left: int) -> None:
    """Where ZeroMQ gets none for its threads, it ends the process: so it is not asked for any."""
    with machine(fake()) as other:

        def job() -> None:
            with asker(other.endpoint) as peer:
                leave_descriptors(left)
                refuses(peer, Fake().cache, "Too many open files")

        in_child(job)


def test_a_process_with_enough_descriptors_left_asks() -> None:
    with machine(fake()) as other:

        def job() -> None:
            with asker(other.endpoint) as peer:
                leave_descriptors(SPARE)
                assert gets(peer, Fake().cache, 1, 2)

        in_child(job)


def test_an_endpoint_that_is_none_is_a_failure_of_its_machine() -> None:
    with asker("nonsense") as peer:
        refuses(peer, Fake().cache, "cannot be connected to")
