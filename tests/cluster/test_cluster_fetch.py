"""Fetching a batch: who is asked for a sample, in which order, and what becomes of one that has no room.

The logic first, over four stores in one process and messages that are calls; then real processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import in_threads, interrupted_everywhere
from kills import in_child
from samples import big_image_and_label as image
from stores import ids, store_of
from torch.utils.data.distributed import DistributedSampler

from hotset.dataset.dataset_proxy import current_of

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

import machines
from machines import NEVER, town

import hotset
from hotset.cluster import batch_fetch, protocol, remote_cache, store_service
from hotset.cluster.batch_fetch import BatchFetch, Fetched
from hotset.cluster.client import SessionPeers
from hotset.cluster.membership import PATIENCE, Keys, Member, Membership
from hotset.cluster.remote_cache import RemoteCache
from hotset.cluster.store_service import StoreService
from hotset.cluster.wire_records import ABSENT, FULL, CacheIdentity, Longs, WireRecords
from hotset.policy.rendezvous import Placement
from hotset.store.format import LINE
from hotset.store.leaves.schema import Schema
from hotset.store.store import Store

D = 240

# ---- what an owner has no room for -----------------------------------------------------------------------

FOUR = ("a", "b", "c", "d")
SMALL, LARGE = 1, 60  # lines of a tail


class Request:
    """A request to a store's service, which is answered when it is waited for."""

    def __init__(self, name: str, wanted: Longs, answer: Callable[[], WireRecords]) -> None:
        self.name, self.ids, self._answer = name, wanted, answer

    def wait(self, deadline: float) -> WireRecords:
        return self._answer()


class Peer:
    """A machine's store, as another one's fetch asks it."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.service = StoreService(store, bytes(16))
        self.answer_bytes = 1 << 20
        self.asked: list[list[int]] = []

    def ask(self, cache: CacheIdentity, wanted: Longs, *, claim: bool = False) -> Request:
        self.asked.append(wanted.tolist())
        protocol.get(0, cache, wanted)  # refuses more than one message may have

        def answer() -> WireRecords:
            return self.service.take(wanted, np.empty(self.answer_bytes, np.uint8), claim=claim).verified()

        return Request(self.name, wanted, answer)

    def put(self, cache: CacheIdentity, brought: Longs, records: WireRecords) -> Request:
        protocol.put(0, cache, brought, records)
        good = records.verified().present

        def answer() -> WireRecords:
            there = self.service.put(brought, records, 0)
            generations = np.where(there, 0, np.where(good, FULL, ABSENT))
            return WireRecords.none(0, cache.stride)._replace(generations=generations)

        return Request(self.name, brought, answer)


class Four:
    """Four machines without processes; ``limits`` says what some may hold, all others hold anything."""

    def __init__(self, **limits: int) -> None:
        schema = Schema.infer([self.text(0), self.text(1)], keep_order=True)
        self.reads: list[int] = []
        self.members = tuple(Member(name, "", "", "", 1 << 20) for name in FOUR)
        self.peers = {
            name: Peer(name, Store.create(schema, D, limits.get(name, 1 << 20), about={"name": "test"}))
            for name in FOUR
        }
        orders = Placement(FOUR, [1] * 4).order(np.arange(D), 4).tolist()
        self.orders = ["".join(FOUR[number] for number in order) for order in orders]

    @staticmethod
    def text(index: int) -> str:
        return f"{index} ".ljust((LARGE if index % 5 == 4 else SMALL) * LINE - 1, "x")

    def sample(self, order: str, large: bool = False) -> int:
        """One whose owner, and those that come next, are these."""
        return next(
            i for i in range(D) if self.orders[i].startswith(order) and (i % 5 == 4) == large and i > 1
        )

    def _read(self, index: int) -> str:
        self.reads.append(index)
        return self.text(index)

    def fetch(self, me: str, *, keeps: bool = False, former: str = "") -> BatchFetch:
        peer = self.peers[me]
        peers: Any = SessionPeers(0)
        before = tuple(member for member in self.members if member.name in former)
        peers.membership = Membership(me, Keys(b"", b""), self.members, before)
        peers.by_name = {name: other for name, other in self.peers.items() if name != me}
        store = peer.store
        generation = store.clear_generation()
        return BatchFetch(peers, peer.service.cache, store, generation, self._read, lambda count: keeps)

    def bring(self, me: str, *wanted: int) -> Fetched:
        return self.fetch(me).run(np.array(sorted(wanted)), [])

    def holders(self, index: int) -> str:
        return "".join(name for name in FOUR if self.peers[name].store.holds(np.array([index])))


@contextlib.contextmanager
def four(**limits: int) -> Iterator[Four]:
    made = Four(**limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_service, "LEASE", NEVER)
        try:
            yield made
        finally:
            for peer in made.peers.values():
                peer.store.close()


@pytest.mark.parametrize(
    ("order", "full", "holder"),
    [("bcd", "", "b"), ("bcd", "b", "c"), ("bcd", "bc", "d"), ("abc", "a", "b"), ("abc", "ab", "c")],
)
def test_the_next_machine_with_room_keeps_it_and_all_find_it_there(
    order: str, full: str, holder: str
) -> None:
    with four(**dict.fromkeys(full, 0)) as made:
        wanted = made.sample(order)
        found = made.bring("a", wanted)
        assert found.read == {wanted: made.text(wanted)}
        assert not found.unkept
        assert made.holders(wanted) == holder
        for name in FOUR:
            if name != holder:
                assert made.bring(name, wanted).ids().tolist() == [wanted]
        assert made.reads == [wanted]


def test_what_three_machines_have_no_room_for_is_read_and_kept_nowhere() -> None:
    with four(b=0, c=0, d=0) as made:
        wanted = made.sample("bcd")
        found = made.bring("a", wanted)
        assert found.read == {wanted: made.text(wanted)}
        assert found.unkept, "which is told"
        assert made.holders(wanted) == ""


@pytest.mark.parametrize("order", ["bac", "bca"])
def test_where_the_asker_itself_comes_next_it_is_left_to_its_store(order: str) -> None:
    with four(b=0, c=0) as made:
        wanted = made.sample(order)
        found = made.bring("a", wanted)
        assert found.ids().tolist() == []
        assert not found.unkept


def test_what_two_machines_have_no_room_for_comes_in_the_order_of_its_numbers() -> None:
    with four(b=0, c=0) as made:
        wanted = [sample for sample in range(D) if made.orders[sample] in ("bcda", "cbda")]
        made.peers["d"].store.fill(np.array(wanted), made.text)
        (found,) = made.bring("a", *wanted).records
        assert found.ids.tolist() == wanted, "as a gather looks for them"


def test_all_that_was_asked_ahead_is_waited_for_together() -> None:
    with four() as made:
        waits: list[float] = []
        wanted = np.array([made.sample("bc")])

        class Watched(Request):
            def wait(self, deadline: float) -> WireRecords:
                waits.append(deadline)
                return super().wait(deadline)

        peers = made.peers.values()
        requests: Any = [
            Watched(peer.name, wanted, peer.ask(peer.service.cache, wanted)._answer) for peer in peers
        ]
        made.fetch("a").run(wanted, requests[1:])
        assert len(waits) == 3
        assert len(set(waits)) == 1, "one deadline, and not one after the other"


def test_patience_begins_anew_with_each_answer_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with four() as made:
        now, left = [100.0], []
        clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter_ns=time.perf_counter_ns)
        monkeypatch.setattr(batch_fetch, "time", clock)

        class Slow(Request):
            def wait(self, deadline: float) -> WireRecords:
                left.append(deadline - now[0])
                now[0] += 1.0
                return super().wait(deadline)

        peer, wanted = made.peers["b"], np.array([made.sample("bc")])
        answer = peer.ask(peer.service.cache, wanted)._answer
        requests: Any = [Slow("b", wanted, answer) for _ in range(3)]
        made.fetch("a").run(wanted, requests)
        assert left == [PATIENCE] * 3
        left.clear()
        put = peer.put
        monkeypatch.setattr(peer, "put", lambda *sent: Slow("b", sent[1], put(*sent)._answer))
        let_messages_have(1, monkeypatch)
        following = [i for i in range(D) if made.orders[i].startswith("ab")][:3]
        assert made.fetch("a").pass_on({i: made.text(i) for i in following})
        assert left == [PATIENCE] * 3, "it has to answer each put, too"


def test_what_is_larger_than_any_answer_is_read_at_once() -> None:
    with four() as made:
        wanted = np.array([made.sample("bc", large=True)])
        peer = made.peers["b"]
        peer.store.fill(wanted, made.text)
        memory = np.empty(LARGE * LINE // 2, np.uint8)
        for _ in range(2):
            found = peer.service.take(wanted, memory, claim=True)
            assert found.generations.tolist() == [ABSENT]


def test_where_the_asker_comes_next_and_is_full_the_one_after_it_keeps_it() -> None:
    with four(a=0, b=0) as made:
        wanted = made.sample("bac")
        assert not made.bring("a", wanted).unkept
        assert made.holders(wanted) == "c"


@pytest.mark.parametrize(
    ("order", "small", "holder"), [("bac", "b", "a"), ("bac", "ab", "c"), ("bcd", "bc", "d")]
)
def test_what_turns_out_too_large_for_who_promised_to_keep_it_goes_further(
    order: str, small: str, holder: str
) -> None:
    with four(**dict.fromkeys(small, LARGE // 2 * LINE)) as made:
        wanted = made.sample(order, large=True)
        found = made.bring("a", wanted)
        assert not found.unkept
        assert made.holders(wanted) == holder
        assert made.reads == [wanted]


def let_messages_have(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, at most."""
    for module in (protocol, batch_fetch):
        monkeypatch.setattr(module, "MOST", most)


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    let_messages_have(3, monkeypatch)


def large_samples(made: Four, order: str) -> list[int]:
    """Three that do not fit into one message of twice their size."""
    return [i for i in range(D) if made.orders[i].startswith(order) and i % 5 == 4][:3]


@pytest.fixture
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_fetch, "LARGEST", int(1.5 * LARGE * LINE))


@pytest.mark.usefixtures("short_messages")
@pytest.mark.parametrize("passed_on", [False, True])
def test_what_is_larger_than_a_message_together_is_kept_all_the_same(passed_on: bool) -> None:
    with four(a=0) as made:
        wanted = large_samples(made, "ab" if passed_on else "b")
        if passed_on:
            assert made.fetch("a").pass_on({i: made.text(i) for i in wanted})
        else:
            made.bring("a", *wanted)
        assert [made.holders(i) for i in wanted] == ["b"] * 3


def test_what_a_former_owner_cannot_send_in_one_answer_comes_in_several() -> None:
    with four() as made:
        wanted = large_samples(made, "a")
        made.peers["b"].store.insert({i: made.text(i) for i in wanted}, 0)
        made.peers["b"].answer_bytes = int(1.5 * LARGE * LINE)
        made.fetch("a", former="b").run(np.array(wanted), [])
        assert made.reads == []


@pytest.mark.usefixtures("small_messages")
def test_former_owners_are_asked_for_more_samples_than_fit_into_a_message() -> None:
    with four() as made:
        home = [i for i in range(D) if made.orders[i].startswith("a")][:10]
        made.peers["b"].store.insert({i: made.text(i) for i in home}, 0)
        made.fetch("a", former="b").run(np.array(home), [])
        assert made.reads == []
        assert {made.holders(i) for i in home} == {"ab"}


@pytest.mark.usefixtures("small_messages")
def test_more_samples_than_fit_into_a_message_are_passed_on() -> None:
    with four(a=0) as made:
        home = [i for i in range(D) if made.orders[i].startswith("ab")][:10]
        assert made.fetch("a").pass_on({i: made.text(i) for i in home})
        assert {made.holders(i) for i in home} == {"b"}


def test_what_is_too_large_for_all_is_kept_nowhere_and_that_is_told() -> None:
    with four(**dict.fromkeys("bcd", LARGE // 2 * LINE)) as made:
        wanted = made.sample("bcd", large=True)
        assert made.bring("a", wanted).unkept
        assert made.holders(wanted) == ""


def test_what_another_one_promised_and_does_not_bring_is_read_and_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_fetch, "PATIENCE", 0.0)
    with four() as made:
        wanted = made.sample("b")
        made.peers["b"].ask(made.peers["b"].service.cache, np.array([wanted]), claim=True).wait(0.0)
        assert made.bring("a", wanted).read == {wanted: made.text(wanted)}
        assert made.holders(wanted) == "b"


def test_what_could_not_be_read_is_promised_no_longer() -> None:
    with four() as made:
        good, bad = sorted(made.sample(order) for order in ("bc", "bd"))

        def read(index: int) -> str:
            if index == bad:
                raise OSError("no such sample")
            return made.text(index)

        fetch = made.fetch("a")
        fetch._read = read
        with pytest.raises(OSError, match="no such sample"):
            fetch.run(ids(good, bad), [])
        fetch._settle()
        memory = np.empty(1 << 16, np.uint8)
        found = made.peers["b"].service.take(ids(good, bad), memory, claim=True).generations.tolist()
        assert found[0] >= 0
        assert found[1] == ABSENT, "who asks next may read it at once"


def test_what_others_own_is_read_as_many_at_once_as_the_source_is_best_asked_for() -> None:
    class Grouped:
        at_once = 16

        def __init__(self) -> None:
            self.groups: list[list[int]] = []

        def __call__(self, index: int) -> str:
            raise AssertionError("one by one")

        def many(self, indices: list[int]) -> Iterator[Any]:
            self.groups.append(indices)
            for index in indices:
                if index == bad:
                    raise OSError("no such sample")
                yield made.text(index)

    with four() as made:
        wanted = [i for i in range(D) if made.orders[i].startswith("b") and i > 1][:20]
        bad = wanted[12]
        fetch = made.fetch("a")
        fetch._read = read = Grouped()
        with pytest.raises(OSError, match="no such sample"):
            fetch.run(ids(*wanted), [])
        fetch._settle()
        assert [made.holders(i) for i in wanted] == ["b"] * 12 + [""] * 8
        bad = -1
        found = made.fetch("a")
        found._read = read
        assert found.run(ids(*wanted), []).read == {i: made.text(i) for i in wanted[12:]}
        assert read.groups == [wanted, wanted[12:]]
        assert [made.holders(i) for i in wanted] == ["b"] * 20


# ---- what is asked for before it is wanted -----------------------------------------------------------------


def remote_cache_of(made: Four, me: str, *, replicate: bool = False) -> RemoteCache:
    """A machine's way to the other three."""
    found = RemoteCache(0, bytes(16), replicate=replicate)
    peers: Any = made.fetch(me)._peers
    peers.refresh = peers.count = lambda **how: None  # there is no file of the membership, and no statistics
    found._peers = peers
    return found


def asked(made: Four) -> list[int]:
    """What the machines were asked for, however often."""
    return sorted(sample for peer in made.peers.values() for some in peer.asked for sample in some)


def test_what_was_asked_for_ahead_is_not_asked_for_again() -> None:
    with four() as made:
        here, *there = (made.sample(order) for order in ("bd", "bc", "c"))
        for name, sample in zip("abc", (here, *there), strict=True):  # a replica is here
            made.peers[name].store.fill(ids(sample), made.text)
        store, way = made.peers["a"].store, remote_cache_of(made, "a")
        batch = ids(there[1], here, there[0], there[1])  # in no order, one is here, and one comes twice
        way.prefetch(store, batch)
        assert asked(made) == sorted(there), "each once, and what is here not at all"
        assert sorted(way.fetch(store, batch, made.text).ids().tolist()) == sorted(there)
        assert asked(made) == sorted(there)
        assert sorted(way.fetch(store, batch, made.text).ids().tolist()) == sorted(there)
        assert asked(made) == sorted(2 * there), "what has come was for one batch"
        assert made.reads == []


def test_an_interrupted_fetch_is_followed_by_others() -> None:
    with four() as made:
        batch = ids(sorted(made.sample(order) for order in ("bd", "bc", "c")))
        store, way = made.peers["a"].store, remote_cache_of(made, "a")

        def fetch() -> None:
            way.fetch(store, batch, made.text)

        for _ in interrupted_everywhere(fetch):
            thread = threading.Thread(target=fetch, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()


def test_threads_that_ask_first_in_a_forked_child_make_one_set_of_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No thread uses the parent's, nor, with a lock of its own, those of another thread."""
    with four() as made:
        store, way = made.peers["a"].store, remote_cache_of(made, "a")
        begun: list[int] = []

        def begin(number: int) -> SessionPeers:
            begun.append(threading.get_ident())
            time.sleep(0.2)
            return SessionPeers(number)

        def of_the_parent() -> None:
            raise AssertionError("they are the parent's")

        def child() -> None:
            way._peers.refresh = of_the_parent  # type: ignore[method-assign]
            in_threads(3, lambda _: way.fetch(store, ids(made.sample("bd")), made.text).read.clear())
            assert len(begun) == 1

        monkeypatch.setattr(remote_cache, "SessionPeers", begin)
        in_child(child)


def test_only_what_has_no_room_here_is_passed_on() -> None:
    with four() as made:
        kept, other = made.sample("ab"), made.sample("ac")
        store = made.peers["a"].store
        store.fill(ids(kept), made.text)
        store.allocator.why_full = "its memory limit is reached"
        read, generation = {each: made.text(each) for each in (kept, other)}, store.clear_generation()
        assert remote_cache_of(made, "a").pass_on(store, read, generation)
        assert (made.holders(kept), made.holders(other)) == ("a", "c")


def test_what_was_read_before_a_clear_is_not_passed_on_after_it() -> None:
    with four() as made:
        other, store = made.sample("ac"), made.peers["a"].store
        read, generation = {other: made.text(other)}, store.clear_generation()
        assert store.clear()
        store.allocator.why_full = "its memory limit is reached"
        assert not remote_cache_of(made, "a").pass_on(store, read, generation)
        assert made.holders(other) == ""


@pytest.mark.parametrize("cleared", [False, True])
def test_what_was_asked_for_before_a_clear_is_not_kept_after_it(cleared: bool) -> None:
    with four() as made:
        wanted = made.sample("bcd")
        made.bring("c", wanted)
        fetch = made.fetch("a", keeps=True)
        if cleared:
            assert made.peers["a"].store.clear()
        assert fetch.run(np.array([wanted]), []).ids().tolist() == [wanted]
        assert made.holders(wanted) == ("b" if cleared else "ab")


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_asked_for_as_a_cache_is_cleared_is_not_kept_after_it(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with four() as made:
        wanted, store = made.sample("bcd"), made.peers["a"].store
        made.bring("c", wanted)
        way = remote_cache_of(made, "a", replicate=True)
        if ahead:
            way.prefetch(store, ids(wanted))

        class Cleared(BatchFetch):
            def __init__(self, *arguments: Any) -> None:
                assert store.clear(clears=1)  # as another process of the machine does
                super().__init__(*arguments)

        monkeypatch.setattr(remote_cache, "BatchFetch", Cleared)
        assert way.fetch(store, ids(wanted), made.text).ids().tolist() == [wanted]
        assert made.holders(wanted) == "b"
        monkeypatch.undo()
        way.fetch(store, ids(wanted), made.text)
        assert made.holders(wanted) == "ab"


class _Asking(machines._Trainer):
    def asks(self, dealt: bool) -> list[list[int]]:
        """What a loader whose order is known asks for ahead in an epoch."""
        found: list[list[int]] = []
        way = current_of(self._cached).remote
        prefetch = way.prefetch

        def heard(store: Store, wanted: Any) -> None:
            found.append(wanted.tolist())
            prefetch(store, wanted)

        way.prefetch = heard
        try:
            sampler: Any = DistributedSampler(self._cached, 1, 0, shuffle=False) if dealt else None
            for data, labels in hotset.DataLoader(self._cached, batch_size=10, sampler=sampler):
                batch = labels.tolist()
                assert self._differing(batch, list(zip(data, batch, strict=True))) == []
        finally:
            del way.prefetch
        return found


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_the_next_batch_is_asked_for_ahead_unless_it_is_gathered_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, dealt: bool
) -> None:
    monkeypatch.setattr(machines, "_Trainer", _Asking)
    with town(tmp_path, image, 120, count=count) as made:
        trainer = made.trainers()[0]
        later = np.arange(10, 120).reshape(-1, 10).tolist()
        assert trainer.call("asks", dealt) == later, "not all of any batch is here"
        assert made.reads() == 120
        found = trainer.call("asks", dealt)
        if count == 1:  # all is here, and several batches are gathered at once
            assert len(found) < len(later) // 2
        else:
            assert found == later
        assert made.reads() == 0


class _Full(machines._Trainer):
    def was_full(self) -> None:
        """As if a larger sample had once found no room."""
        store_of(self._cached).allocator.why_full = "it was full"


def test_nobody_is_told_that_no_more_fit_where_all_have_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_Trainer", _Full)
    with town(tmp_path, image, D, count=2) as made:
        trainer = made.trainers()[0]
        trainer.call("was_full")
        walk = trainer.walk(made.order(0))
        assert set.union(*(machine.holds() for machine in made.machines)) == set(range(D))
        assert walk.warnings == []
