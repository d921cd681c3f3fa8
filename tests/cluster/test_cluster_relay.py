"""The way around a closed port: a stand-in on the loopback address, and another way to who is behind it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import difference, eventually
from samples import big_image_and_label as image
from stores import ids, in_child, opened

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")


from hotset.cluster import node as nodes
from hotset.cluster import sockets
from hotset.cluster import store_service as shelves
from hotset.cluster.client import Peer, PeerClients
from hotset.cluster.directory import Described, HeartbeatReply
from hotset.cluster.encode_records import pack
from hotset.cluster.keys import Keys
from hotset.cluster.membership import Member, read_membership
from hotset.cluster.node import Node
from hotset.cluster.relay import Relays, reachable
from hotset.cluster.store_service import StoreService, StoreServices
from hotset.cluster.wire_records import Bytes, CacheIdentity, Longs, WireRecords
from hotset.errors import HotsetWarning
from hotset.session import sessions
from hotset.store.record_batch import ReceivedRecords
from hotset.store.store import Store

FINGERPRINT = b"0123456789abcdef"
SOON = 60.0
KEYS, STRANGER = Keys.new(), Keys.new()
FAR = Member("far", "10.9.8.7", "tcp://10.9.8.7:1", "k" * 40, 100, "hotset-one-far")


@pytest.fixture(autouse=True)
def _nobody_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "LEASE", 600.0)
    monkeypatch.setattr(sockets, "_HEARTBEAT", 0)
    monkeypatch.setattr(sockets, "_HANDSHAKE", 0)


class ByHand:
    """A way to another machine's shelf, which counts what goes over it, and breaks as it is told."""

    def __init__(self, shelf: StoreService) -> None:
        self.shelf, self.calls, self.broken = shelf, list[str](), False

    def _go(self, what: str, member: Member) -> None:
        assert member == FAR
        self.calls.append(what)
        if self.broken:
            raise TimeoutError("Ray is not there")

    def take(self, member: Member, cache: CacheIdentity, wanted: Longs, claim: bool) -> WireRecords:
        self._go("claim" if claim else "take", member)
        return self.shelf.take(wanted, np.empty(1 << 20, np.uint8), claim=claim)

    def put(self, member: Member, cache: CacheIdentity, wanted: Longs, records: WireRecords) -> Any:
        self._go("put", member)
        return self.shelf.put(wanted, records)

    def clear(self, member: Member, cache: CacheIdentity, clears: int) -> bool:
        self._go("clear", member)
        return self.shelf.clear(clears)


@contextlib.contextmanager
def relayed(keys: Keys = KEYS) -> Iterator[tuple[Peer, ByHand, Store, Relays]]:
    """A peer that is a stand-in for the machine ``FAR``, which has samples 0 to 9 of 20."""
    with opened(image, 20) as store:
        store.fill(ids(range(10)), image)
        shelf = StoreService(store, FINGERPRINT)
        remote = ByHand(shelf)
        relays = Relays({FINGERPRINT: shelf}, KEYS, remote)
        try:
            member = relays.stand_in(FAR)
            with PeerClients(keys) as peers:
                yield peers.add("far", member.endpoint, member.key.encode()), remote, store, relays
        finally:
            relays.close()


def wait(ticket: Any) -> Any:
    return ticket.wait(time.monotonic() + SOON)


def words_of(ticket: Any) -> list[int] | None:
    found = ticket.words(time.monotonic() + 10)
    return None if found is None else found.tolist()


def test_records_come_and_go_through_a_stand_in() -> None:
    with relayed() as (peer, remote, store, _):
        cache = remote.shelf.cache
        answer = wait(peer.ask(cache, ids(3, 12, 7)))
        assert answer.present.tolist() == [True, False, True]
        lines = answer.lines[answer.present]
        found = ReceivedRecords(ids(3, 7), lines, answer.rows, answer.tails).samples(store.schema)
        assert [difference(found[i], image(i)) for i in (3, 7)] == [None, None]
        assert wait(peer.ask(cache, ids(12), claim=True)).answered
        assert wait(peer.ask(cache, ids(12), claim=True)).promised.all(), "the claim came through"
        records = remote.shelf.take(ids(3), np.empty(1 << 20, np.uint8))
        remote.shelf.end_leases(ids(12))  # a clear waits for who is reading
        assert store.clear()
        assert wait(peer.put(cache, ids(3), records)).present.all()
        assert store.holds(ids(3))
        assert words_of(peer.clear(cache, 1)) == [1]
        assert not store.holds(ids(3))
        assert remote.calls == ["take", "claim", "claim", "put", "clear"]


def brought(cache: CacheIdentity, store: Store, *numbers: int) -> WireRecords:
    return pack(cache, store.schema, {number: image(number) for number in numbers})[1]


def test_a_way_that_is_broken_is_a_machine_that_fails() -> None:
    with relayed() as (peer, remote, _, _):
        remote.broken = True
        with pytest.warns(HotsetWarning, match="could not get at its own records"):
            answer = wait(peer.ask(remote.shelf.cache, ids(3)))
        assert not answer.answered
        assert not answer.present.any()


def test_a_stand_in_lets_in_this_machine_alone() -> None:
    with relayed(STRANGER) as (peer, remote, _, _):
        with pytest.warns(HotsetWarning, match="does not let this machine's key in"):
            assert not wait(peer.ask(remote.shelf.cache, ids(3))).answered
        assert remote.calls == []


def test_a_stand_in_is_on_the_loopback_address_and_ends_with_its_machine() -> None:
    with relayed() as (peer, remote, _, relays):
        assert peer.endpoint.startswith("tcp://127.0.0.1:")
        assert relays.stand_in(FAR).endpoint == peer.endpoint, "one for each machine"
        assert relays.stand_in(FAR).patience > FAR.patience
        assert wait(peer.ask(remote.shelf.cache, ids(3))).answered
        relays.keep(())
        with pytest.warns(HotsetWarning, match="has closed the connection|does not listen"):
            assert not wait(peer.ask(remote.shelf.cache, ids(3))).answered


def test_a_stand_in_says_that_a_clear_is_to_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with relayed() as (peer, remote, _, _):
        monkeypatch.setattr(remote.shelf, "clear", lambda clears: False)
        ticket = peer.clear(remote.shelf.cache, 1)
        assert words_of(ticket) is None
        assert ticket.is_refused_for_now
        monkeypatch.undo()
        ticket = peer.clear(remote.shelf.cache, 1)
        assert words_of(ticket) == [1], "at once, and without a warning"
        assert not ticket.is_refused_for_now


def machines(count: int) -> list[Member]:
    return [FAR._replace(name=f"far-{i}", endpoint=f"tcp://10.9.8.7:{i + 1}") for i in range(count)]


def has(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


def test_stand_ins_for_many_machines_cost_little_each() -> None:
    def job() -> None:
        relays = Relays({}, KEYS, Nowhere())
        relays.stand_in(FAR)
        files, threads = has("fd"), has("task")
        for member in machines(20):
            assert relays.stand_in(member).endpoint.startswith("tcp://127.0.0.1:")
        assert has("fd") - files <= 4 * 20
        assert has("task") - threads <= 20
        relays.close()
        assert has("fd") < files
        assert eventually(lambda: has("task") <= 2), "this one, and what pyzmq has"

    in_child(job)


def test_where_descriptors_run_out_there_are_fewer_stand_ins_and_the_node_lives() -> None:
    def job() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
        with relayed() as (peer, remote, _, relays):
            assert wait(peer.ask(remote.shelf.cache, ids(3))).present.all()
            reached = [relays.stand_in(member) for member in machines(100)]
            refused = [member for member in machines(100) if member in reached]
            assert 10 < len(refused) < 90
            assert relays.stand_in(refused[0]) == refused[0]
            assert wait(peer.ask(remote.shelf.cache, ids(3))).present.all(), "those that there are serve"
            relays.keep([FAR])
            assert relays.stand_in(refused[0]) != refused[0], "there is room again"

    in_child(job)


def test_what_listens_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        here = FAR._replace(endpoint=f"tcp://127.0.0.1:{server.getsockname()[1]}")
        there = FAR._replace(endpoint=f"tcp://127.0.0.1:{closed.getsockname()[1]}")
        assert reachable([here, there, FAR._replace(endpoint="nonsense")]) == {here.endpoint}
    assert reachable([]) == set()


class Nowhere:
    def take(self, *_: Any) -> Any: ...
    def put(self, *_: Any) -> Any: ...
    def clear(self, *_: Any) -> Any: ...


@contextlib.contextmanager
def with_a_far_one(
    monkeypatch: pytest.MonkeyPatch, opens: list[bool]
) -> Iterator[tuple[Node, Callable[[], Member]]]:
    """A node, and how it has written down a machine of which ``opens`` says whether its port does."""
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(nodes, "_LOOK_SECONDS", 0.3)
    monkeypatch.setattr(nodes, "reachable", lambda new: {m.endpoint for m in new if opens[-1]})

    def beat(said: Any) -> HeartbeatReply:
        keys = {said.member.name: said.member.key, "far": FAR.key}
        return HeartbeatReply(keys, tuple(sorted((said.member, FAR))), (), (), (), {})

    def far() -> Member:
        assert eventually(lambda: read_membership(made.session.number) is not None)
        roster = read_membership(made.session.number)
        assert roster is not None
        found = {member.name: member for member in roster.members}
        assert found[made.member.name] == made.member, "itself it reaches"
        return found["far"]

    with Node("one", 1 << 20, "127.0.0.1", beat, Nowhere()) as made:
        yield made, far
        made.destroy()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_node_stands_in_for_who_cannot_be_reached(
    is_open: bool, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_a_far_one(monkeypatch, [is_open]) as (_, far):
        assert (far() == FAR) is is_open
        assert far().endpoint.startswith("tcp://127.0.0.1:") is not is_open


def test_a_port_may_be_closed_later_and_opened_again(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = [True]
    with with_a_far_one(monkeypatch, opens) as (_, far):
        for is_open in (True, False, True):
            opens.append(is_open)
            assert eventually(lambda wanted=is_open: (far() == FAR) is wanted)  # type: ignore[misc]


class Alone:
    """A directory that knows of one machine, the one that beats."""

    def __init__(self) -> None:
        self.beats = 0

    def beat(self, said: Any) -> HeartbeatReply:
        self.beats += 1
        return HeartbeatReply({said.member.name: said.member.key}, (said.member,), (), (), (), {})

    def goes_on(self) -> bool:
        begun = self.beats
        return eventually(lambda: self.beats > begun + 2)


@pytest.mark.parametrize("of", [(nodes, "open_ledger"), (StoreServices, "end_leases"), (Alone, "beat")])
def test_a_node_outlives_what_goes_wrong_in_a_beat(
    of: tuple[Any, str], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.02)
    post, failures = Alone(), []

    def fail(*_: Any) -> Any:
        failures.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with Node("one", 1 << 20, "127.0.0.1", lambda said: post.beat(said)) as made:
        assert post.goes_on()
        session = made.session
        with monkeypatch.context() as patch:
            patch.setattr(*of, fail)
            assert eventually(lambda: len(failures) > 2)
            assert of[1] == "beat" or post.goes_on(), "it is heard all the same"
        assert post.goes_on()
        assert made.session == session, "nothing has happened to it"
        assert made.member.capacity > 0
        made.destroy()


class Strange(Alone):
    """One that tells of a cache that cannot be made here."""

    def beat(self, said: Any) -> HeartbeatReply:
        return super().beat(said)._replace(caches=(Described("there", 10, {}, {}),))


def test_a_node_that_cannot_make_a_cache_knows_who_is_there(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("whatever the import of a sample's type may raise")

    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(Node, "_make", fail)
    with Node("one", 1 << 20, "127.0.0.1", Strange().beat) as made:
        assert eventually(lambda: read_membership(made.session.number) is not None)
        made.destroy()


def test_a_session_that_has_expired_is_made_anew(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(nodes, "_TTL", 0.1)
    post = Alone()
    with Node("one", 1 << 20, "127.0.0.1", post.beat) as made:
        assert eventually(lambda: read_membership(made.session.number) is not None)
        first, member = made.session, made.member
        roster = read_membership(first.number)
        assert eventually(sessions.expire), "nobody has used it"
        assert eventually(lambda: made.session != first)
        assert sessions.find("one") == made.session
        assert made.session.memory == first.memory
        assert eventually(lambda: made.member == member), "the same machine, which holds as much"
        assert eventually(lambda: read_membership(made.session.number) == roster)
        made.destroy()
        assert post.goes_on()
        assert sessions.sessions() == [], "that was on purpose"


def test_another_node_s_relay_is_served_what_is_sound(runtime: Path) -> None:
    with opened(image, 20) as store, Node("one", 1 << 24, "127.0.0.1", lambda said: None) as made:  # type: ignore[arg-type,return-value]
        store.fill(ids(range(10)), image)
        shelf = StoreService(store, FINGERPRINT)
        with pytest.raises(OSError, match="no such cache"):
            made.take(shelf.cache, ids(1), False)
        made._shelves.add(shelf, store)
        records = made.take(shelf.cache, ids(1, 15), False)
        assert (records.generations >= 0).tolist() == [True, False]
        bent: Bytes = records.rows.copy()
        bent[0, -1] ^= 1
        assert store.clear()
        assert not made.put(shelf.cache, ids(1, 15), records._replace(rows=bent)).any()
        assert made.put(shelf.cache, ids(1, 15), records).tolist() == [True, False]
        assert made.clear(shelf.cache, 1)
        assert not store.holds(ids(1))
        made.destroy()
