"""What machines that share a session agree on, without a machine: directory, membership, records, leases.

The clocks of the directory and of leases are the test's own. Leases are those of real stores, with claims by
other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from helpers import Clock, difference, eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from kills import child, ended, in_child, lingering
from session_places import old
from stores import attached, count, ids, opened, stored, wrong

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from hotset.cluster import batch_fetch, membership, protocol, store_service
from hotset.cluster import directory as directory_module
from hotset.cluster.directory import (
    FORMER,
    PREPARING,
    SILENT,
    Described,
    Directory,
    Heartbeat,
    HeartbeatReply,
)
from hotset.cluster.membership import (
    Keys,
    Member,
    Membership,
    MembershipFile,
    read_membership,
    write_membership,
)
from hotset.cluster.store_service import StoreService
from hotset.cluster.wire_records import ABSENT, FULL, PENDING, TRUNCATED, WireRecords
from hotset.session import recovery, sessions
from hotset.session.session_files import retire
from hotset.store import fill
from hotset.store.leaves.schema import Schema
from hotset.store.store import Store

FINGERPRINT = b"0123456789abcdef"
MIB = 1 << 20


# ---- the directory -------------------------------------------------------------------------------------


def member(name: str, port: int = 1, capacity: int = 100) -> Member:
    return Member(name, "127.0.0.1", f"tcp://127.0.0.1:{port}", "k" * 40, capacity)


def described(meeting: str, samples: int = 10) -> Described:
    return Described(meeting, samples, {"kind": "tensor"}, {"name": "Test", "fingerprint": "f" * 32})


class Talk:
    """A directory, what time it is, and who says what to it."""

    def __init__(self, expected: int = 0) -> None:
        self.now = 1000.0
        self.expected = expected
        self.restart()

    def restart(self) -> None:
        self.directory = Directory(lambda: self.expected, lambda: self.now)

    def beat(
        self,
        name: str,
        *caches: str,
        news: tuple[Described, ...] = (),
        port: int = 1,
        knows: Iterable[str] = ("a", "b", "c"),
        clears: dict[str, int] | None = None,
    ) -> HeartbeatReply:
        said = Heartbeat(member(name, port), frozenset(knows), caches, news, clears or {}, {"requests": port})
        return self.directory.beat(said)

    def names(self) -> list[str] | None:
        members = self.directory.members()
        return None if members is None else [each.name for each in members]

    def gathered(self, *names: str) -> Talk:
        self.expected = len(names)
        for name in names:
            self.beat(name)
        assert self.names() == sorted(names)
        return self


def test_nobody_is_told_of_half_of_the_machines() -> None:
    talk = Talk(expected=3)
    assert talk.names() is None
    assert talk.beat("b").members is None
    talk.now += 1
    assert talk.beat("a").members is None
    heard = talk.beat("c").members
    assert heard == (member("a"), member("b"), member("c"))
    talk.expected = 5  # machines that come later are not waited for
    assert talk.names() == ["a", "b", "c"]


def test_machines_that_do_not_come_are_not_waited_for_for_ever() -> None:
    for expected in (0, 4):
        talk, asked = Talk(expected), 0
        while talk.beat("a").members is None:
            talk.beat("b")
            talk.now += 1
            asked += 1
            assert asked < 60
        assert asked >= 10, "who comes a few seconds later would move samples"
        assert talk.names() == ["a", "b"]


def test_who_is_silent_has_left_and_may_come_back() -> None:
    talk = Talk().gathered("a", "b", "c")
    talk.now += SILENT - 0.1
    talk.beat("a")
    talk.beat("b")
    assert talk.names() == ["a", "b", "c"], "a beat may be late"
    talk.now += 0.2
    assert [each.name for each in talk.beat("a").members or ()] == ["a", "b"]
    assert talk.names() == ["a", "b"]
    assert [each["name"] for each in talk.directory.status()] == ["a", "b"]
    talk.beat("c", port=7)
    assert talk.directory.members() == (member("a"), member("b"), member("c", port=7))


def test_a_directory_that_was_cut_off_gathers_anew() -> None:
    """Most machines fall silent at once: rather its own cable was pulled. Its list would move all samples."""
    talk = Talk().gathered("a", "b", "c")
    talk.now += 0.5
    talk.beat("b")  # whose last one it is, as the others' were before
    for _ in range(40):
        talk.now += 1
        assert talk.beat("c").members in (None, (member("a"), member("b"), member("c")))
    assert talk.names() is None
    assert talk.beat("a").members is None, "b is not heard yet"
    assert talk.beat("b").members in (None, (member("a"), member("b"), member("c")))
    talk.beat("a")
    assert talk.names() == ["a", "b", "c"]


def test_where_most_machines_are_lost_the_rest_go_on_in_the_end() -> None:
    for expected in (1, 3):  # Ray has seen that they are dead, or never does
        talk, passed = Talk().gathered("a", "b", "c"), 0
        talk.expected = expected
        while talk.names() != ["c"]:
            talk.now += 1
            talk.beat("c")
            passed += 1
            assert passed < (10 if expected == 1 else 150)


def test_who_comes_back_prepares_anew() -> None:
    talk = Talk().gathered("a", "b")
    talk.directory.publish(described("one"))
    talk.beat("c")  # and leaves before it has joined
    talk.now += SILENT + 0.1
    talk.beat("a", "one")
    assert talk.names() == ["a"]
    talk.beat("b")
    assert talk.names() == ["a"], "it was in before, and has not got the cache"
    talk.beat("b", "one")
    assert talk.names() == ["a", "b"]


def test_a_machine_that_comes_back_at_another_port_is_told_of() -> None:
    talk = Talk().gathered("a", "b")
    talk.beat("b", port=9)
    assert talk.beat("a").members == (member("a"), member("b", port=9))


def test_who_comes_makes_its_part_of_all_caches_before_it_joins() -> None:
    talk = Talk().gathered("a", "b")
    one, two = described("one"), described("two")
    talk.directory.publish(one)
    assert talk.beat("a", "one", news=(two,)).caches == (two,), "of all that it has not got"
    talk.beat("a", "one", "two")
    assert talk.beat("c").caches == (one, two)
    assert talk.names() == ["a", "b"], "b is in, though it has not got them yet"
    assert talk.beat("c", "one").caches == (two,)
    assert talk.names() == ["a", "b"]
    assert talk.beat("c", "one", "two").caches == ()
    assert talk.names() == ["a", "b", "c"]
    talk.directory.publish(described("three"))
    talk.beat("c", "one", "two")
    assert talk.names() == ["a", "b", "c"], "a new cache puts nobody out"


def test_who_comes_is_let_in_by_all_before_it_joins() -> None:
    talk = Talk(expected=2)
    assert talk.beat("a", knows="a").keys == {"a": "k" * 40}
    assert talk.beat("b", knows="b") == HeartbeatReply({"a": "k" * 40, "b": "k" * 40}, None, (), (), (), {})
    assert talk.beat("b", knows="ab").members is None, "a has not heard of b, and would not let it in"
    assert talk.beat("a", knows="ab").members == (member("a"), member("b"))
    assert sorted(talk.beat("c", knows="c").keys) == ["a", "b", "c"]
    talk.beat("c", knows="abc")
    talk.beat("a", knows="abc")
    assert talk.names() == ["a", "b"]
    talk.beat("b", knows="abc")
    assert talk.names() == ["a", "b", "c"]


def test_who_has_what_was_cleared_forgets_it_before_it_joins() -> None:
    talk = Talk().gathered("a", "b")
    one = described("one")
    assert talk.beat("a", "one", news=(one,)).clears == {}
    talk.beat("b", "one", clears={"one": 1})  # and so on, while b is away
    talk.now += SILENT + 0.1
    assert talk.beat("a", "one", clears={"one": 2}).clears == {}
    for _ in range(2 * int(PREPARING)):
        talk.now += 1
        talk.beat("a", "one", clears={"one": 2})
        assert talk.beat("b", "one", clears={"one": 1}).clears == {"one": 2}
        assert talk.names() == ["a"], "it could not clear it so far"
    assert talk.beat("b", "one", clears={"one": 2}).clears == {}
    assert talk.names() == ["a", "b"]
    talk.beat("c")
    assert talk.beat("c").clears == {"one": 2}, "what it makes is as new as the others'"
    for _ in range(int(PREPARING) + 1):
        talk.now += 1
        talk.beat("a", "one", clears={"one": 3})
        talk.beat("b", "one", clears={"one": 2})
        talk.beat("c")
    assert talk.names() == ["a", "b", "c"], "who has none of it has nothing to forget; and b is in"


def test_a_new_directory_hears_how_often_was_cleared() -> None:
    talk = Talk().gathered("a", "b")
    talk.restart()
    talk.beat("a", "one", clears={"one": 5}, news=(described("one"),))
    assert talk.beat("b", "one").clears == {"one": 5}
    assert talk.beat("b", "one", clears={"one": 4}).clears == {"one": 5}


def test_who_cannot_make_a_cache_joins_without_it() -> None:
    talk = Talk().gathered("a")
    talk.directory.publish(described("one"))
    talk.beat("b")
    for _ in range(int(PREPARING)):
        talk.now += 1
        talk.beat("a", "one")
        talk.beat("b")
        assert talk.names() == ["a"]
    talk.now += 0.5
    talk.beat("b")
    assert talk.names() == ["a", "b"]


def test_a_directory_that_begins_again_is_filled_by_beats() -> None:
    talk = Talk().gathered("a", "b")
    one = described("one")
    talk.beat("a", news=(one,))
    talk.beat("a", "one")
    talk.beat("b", "one")
    talk.restart()
    heard = talk.beat("a", "one")
    assert (heard.members, heard.caches, heard.unknown) == (None, (), ("one",))
    assert talk.beat("b").members == (member("a"), member("b"))
    assert talk.directory.plan("one", "x") is True, "nobody has told it yet"
    assert talk.beat("a", "one", news=(one,)).unknown == ()
    assert talk.beat("b").caches == (one,)
    assert talk.directory.plan("one", "y") == one


def test_one_makes_a_plan_for_all() -> None:
    talk = Talk()
    directory = talk.directory
    assert directory.plan("one", "x") is True
    assert directory.plan("one", "y") is False
    assert directory.plan("two", "y") is True, "of another dataset"
    assert directory.plan("one", "x") is True, "its question was answered, and the answer was lost"
    directory.give_up("one", "y")
    assert directory.plan("one", "y") is False, "it is not y's to give up"
    directory.give_up("one", "x")
    directory.give_up("one", "x")
    assert directory.plan("one", "y") is True
    directory.publish(described("one", samples=10))
    directory.publish(described("one", samples=11))
    assert directory.plan("one", "z") == described("one", samples=10), "the first to say so is right"
    directory.give_up("one", "y")
    assert directory.plan("one", "z") == described("one", samples=10)


def test_who_dies_over_a_plan_is_waited_for_for_a_while() -> None:
    talk = Talk()
    assert talk.directory.plan("one", "x") is True
    talk.now += directory_module._PLANNING - 1
    assert talk.directory.plan("one", "y") is False
    talk.now += 2
    assert talk.directory.plan("one", "y") is True
    assert talk.directory.plan("one", "x") is False, "it is y's now"


def test_what_machines_lack_is_counted() -> None:
    talk = Talk().gathered("a", "b", "c")
    talk.directory.publish(described("one"))
    assert talk.directory.lack("one") == 3
    talk.beat("a", "one")
    assert talk.directory.lack("one") == 2
    talk.beat("b", "one")
    talk.beat("c", "one")
    assert talk.directory.lack("one") == 0


def test_status_is_by_name_with_the_seconds_of_silence() -> None:
    talk = Talk().gathered("b", "a")
    talk.now += 2
    talk.beat("a", port=5)
    first, second = talk.directory.status()
    assert (first["name"], first["silent"], first["requests"]) == ("a", 0.0, 5)
    assert (second["name"], second["silent"], second["capacity"]) == ("b", 2.0, 100)


def test_a_cache_is_described_without_what_is_one_machines_own() -> None:
    metadata = {
        "name": "Test", "fingerprint": "f" * 32, "cuts": [1], "schema": {"kind": "tensor"}, "meeting": "m",
        "spill": {"path": "/here"},
    }  # fmt: skip
    found = Described.of("m", 7, metadata)
    assert found == Described(
        "m", 7, {"kind": "tensor"}, {"name": "Test", "fingerprint": "f" * 32, "cuts": [1]}
    )
    assert found.fingerprint == "f" * 32
    assert "schema" in metadata, "the segment's own metadata stay as they are"


# ---- membership -----------------------------------------------------------------------------------------

KEYS = Keys.new()


def membership_of(*names: str, capacity: int = 100) -> Membership:
    return Membership("a", KEYS, tuple(member(name, capacity=capacity) for name in names))


@pytest.mark.usefixtures("runtime")
def test_a_membership_is_read_as_it_was_written(runtime: Path) -> None:
    assert read_membership(7) is None
    write_membership(7, membership_of("b", "a"))
    assert read_membership(7) == Membership("a", KEYS, (member("a"), member("b")))
    assert read_membership(8) is None
    write_membership(7, membership_of("a", "b", "c"))
    assert read_membership(7) == membership_of("a", "b", "c")
    assert os.listdir(runtime) == ["7.cluster"], "nothing else is left"
    assert (runtime / "7.cluster").stat().st_mode & 0o777 == 0o600, "there is a secret in it"
    assert KEYS.secret.decode() not in repr(read_membership(7))


def test_a_membership_is_replaced_as_a_whole(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads while it is written sees the one or the other; who had the old one open reads that on."""
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.0)
    few, many = membership_of("a", "b"), membership_of(*(f"machine-{number:04d}" for number in range(400)))
    write_membership(7, few)
    stop, seen = runtime / "stop", MembershipFile(7)
    assert seen.current() == few

    def look() -> bool:
        found.extend(seen.current() for _ in range(100))
        return len(found) > 300 and many in found

    def write() -> None:
        while not stop.exists():
            write_membership(7, many)
            write_membership(7, few)

    with open(runtime / "7.cluster", "rb") as before:
        pid = child(write)
        found: list[Membership | None] = []
        try:
            assert eventually(look)
        finally:
            stop.touch()
            assert ended(pid) == 0
        assert all(one in (few, many) for one in found)
        assert len(json.load(before)["members"]) == 2


def test_a_damaged_or_foreign_membership_is_none(runtime: Path) -> None:
    write_membership(7, membership_of("a", "b"))
    file = runtime / "7.cluster"
    whole = file.read_bytes()
    said = json.loads(whole)
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        assert read_membership(7) is None
    others: list[Any] = [
        [], 5, None, "text", {}, {**said, "members": 5}, {**said, "members": [["a"]]},
        {**said, "members": [5]}, {key: said[key] for key in said if key != "secret"},
    ]  # fmt: skip
    for other in others:
        file.write_text(json.dumps(other))
        assert read_membership(7) is None, other
    file.write_bytes(b"\xff\xfe" + whole)
    assert read_membership(7) is None
    file.write_bytes(whole)
    assert read_membership(7) == membership_of("a", "b")
    file.chmod(0o644)
    assert read_membership(7) is None, "others may have written it"
    file.rename(runtime / "elsewhere")
    file.symlink_to(runtime / "elsewhere")
    assert read_membership(7) is None


def test_a_process_reads_it_again_and_keeps_the_last(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.0)
    seen = MembershipFile(7)
    assert seen.current() is None
    write_membership(7, membership_of("a", "b"))
    first = seen.current()
    assert first == membership_of("a", "b")
    assert seen.current() is first, "the same object, so that nobody places the samples anew"
    write_membership(7, membership_of("a", "b", "c"))
    assert seen.current() == membership_of("a", "b", "c")
    (runtime / "7.cluster").write_text("{")
    assert seen.current() == membership_of("a", "b", "c")
    (runtime / "7.cluster").unlink()
    assert seen.current() == membership_of("a", "b", "c")
    write_membership(7, membership_of("a"))
    assert seen.current() == membership_of("a")


def test_what_could_not_be_read_is_read_with_the_next_look(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of descriptors, say; the file itself is as it was."""
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.0)
    seen = MembershipFile(7)
    write_membership(7, membership_of("a"))
    assert seen.current() == membership_of("a")
    write_membership(7, membership_of("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(membership, "read_membership", lambda number: None)
        assert seen.current() == membership_of("a")
    assert seen.current() == membership_of("a", "b")


def test_it_is_not_looked_for_with_each_batch(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(membership, "time", clock)
    seen = MembershipFile(7)
    write_membership(7, membership_of("a", "b"))
    assert seen.current() == membership_of("a", "b")
    write_membership(7, membership_of("a", "b", "c"))
    clock.now += 0.2
    assert seen.current() == membership_of("a", "b")
    clock.now += 0.1
    assert seen.current() == membership_of("a", "b", "c")


def test_who_was_there_before_is_told_for_a_while() -> None:
    talk = Talk().gathered("a", "b")
    a, b, c = map(member, "abc")
    assert talk.beat("a").former == (), "they came together, and nobody has had anything before"
    for name in "cabc":
        talk.beat(name, knows="abc")
    assert talk.beat("a", knows="abc").former == (a, b)
    for _ in range(int(SILENT) + 2):
        talk.now += 1.0
        for name in "ac":
            heard = talk.beat(name, knows="abc")
    assert (heard.members, heard.former) == ((a, c), (a, b, c))
    for _ in range(int(FORMER / 5)):
        talk.now += 5.0
        for name in "ac":
            heard = talk.beat(name, knows="abc")
    assert (heard.members, heard.former) == ((a, c), ())


def test_a_membership_goes_with_its_session(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = sessions.create("one", memory=MIB)
    write_membership(session.number, membership_of("a"))
    assert recovery.recover() == []
    assert read_membership(session.number) is not None, "its session is there"
    sessions.destroy(session)
    assert os.listdir(runtime) == []
    write_membership(session.number, membership_of("a"))  # by a node that has not noticed
    (runtime / f"{session.number}.cluster.0123abcd.new").touch(0o600)
    recovery.recover()
    assert os.listdir(runtime) == [f"{session.number}.cluster.0123abcd.new"]
    old(monkeypatch)
    recovery.recover()
    assert os.listdir(runtime) == []


# ---- packed records ------------------------------------------------------------------------------------

MAKERS = [
    *(samples.kilobyte, samples.mapping, samples.ragged, samples.text, samples.nested, samples.number),
    samples.of_many_forms,
]


def sound(ids: Any, records: WireRecords) -> Any:
    """Which of these samples' records are there and sound, if they are taken to be these samples'."""
    return records._replace(batch=records.batch._replace(ids=ids[records.present])).verified().present


def unpacked(schema: Schema, found: WireRecords) -> list[Any]:
    return found.batch.read(schema)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MAKERS),
    st.lists(st.integers(0, 999), unique=True, min_size=1, max_size=20),
    st.booleans(),
)
def test_what_is_packed_is_sound_and_comes_out_as_it_was(
    make: Callable[[int], Any], numbers: list[int], keep_order: bool
) -> None:
    schema = Schema.infer([make(0), make(1)], keep_order=keep_order)
    ((found, records),) = batch_fetch.pack(schema, {number: make(number) for number in numbers})
    assert found.tolist() == numbers
    assert sound(found, records).all()
    for number, value in zip(numbers, unpacked(schema, records), strict=True):
        assert difference(value, make(number)) is None
    # The same bytes under another number are nobody's.
    assert not sound((found + 1) % 1000, records).any()


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 999), st.tuples(st.text(max_size=700), st.binary(max_size=700)), max_size=8
    )
)
def test_texts_of_any_length_travel(values: dict[int, tuple[str, bytes]]) -> None:
    schema = Schema.infer([("a", b"b"), ("", b"longer")], keep_order=True)
    values = values or {0: ("", b"")}
    ((found, records),) = batch_fetch.pack(schema, values)
    assert found.tolist() == list(values)
    assert sound(found, records).all()
    assert unpacked(schema, records) == list(values.values())


def test_what_cannot_be_kept_is_absent() -> None:
    schema = Schema.infer([samples.kilobyte(0)], keep_order=True)
    odd = {3: samples.kilobyte(3), 4: samples.Opaque(4), 5: samples.kilobyte(5), 6: samples.huge_int(6)}
    ((found, records),) = batch_fetch.pack(schema, odd, absent=[9])
    assert found.tolist() == [3, 5, 9, 4, 6]
    assert sound(found, records).tolist() == [True, True, False, False, False]
    assert [difference(a, odd[i]) for i, a in zip((3, 5), unpacked(schema, records), strict=True)] == [
        None
    ] * 2
    ((found, records),) = batch_fetch.pack(schema, {4: samples.Opaque(4)})
    assert (found.tolist(), records.generations.tolist(), records.batch.rows.nbytes) == ([4], [ABSENT], 0)


@pytest.mark.parametrize("make", [samples.kilobyte, samples.jpeg_like])
@pytest.mark.parametrize("most", [protocol.MOST, 3])
def test_no_message_is_too_large_and_all_together_have_every_sample(
    make: Callable[[int], Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_fetch, "LARGEST", 5000)
    monkeypatch.setattr(batch_fetch, "MOST", most)
    schema = Schema.infer([make(0), make(1)], keep_order=True)
    packed = list(batch_fetch.pack(schema, {number: make(number) for number in range(40)}, absent=[99]))
    there: list[int] = []
    for found, records in packed:
        assert len(found) <= most
        assert max(records.batch.rows.nbytes, records.batch.tails.nbytes) <= 5000
        assert np.array_equal(sound(found, records), records.generations >= 0)
        present = found[records.generations >= 0].tolist()
        for number, value in zip(present, unpacked(schema, records), strict=True):
            assert difference(value, make(number)) is None
        there += present
    assert there == list(range(40))
    assert 99 in packed[0][0]
    assert len(packed) <= -(-41 // min(most, 2)), "there was room for others"


# ---- leases --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of leases."""
    clock = Clock()
    monkeypatch.setattr(store_service, "time", clock)
    return clock


@contextlib.contextmanager
def served(limit: int = 1 << 24, n: int = 40) -> Iterator[tuple[Store, StoreService]]:
    with opened(samples.kilobyte, n, limit) as store:
        yield store, StoreService(store, FINGERPRINT)


def take(service: StoreService, *numbers: int, claim: bool = True) -> list[int]:
    """What each of these samples is: a state, or 0 for present."""
    records = service.take(ids(*numbers), np.empty(1 << 20, np.uint8), claim=claim)
    return np.minimum(records.generations, 0).tolist()  # type: ignore[no-any-return]


def brought(store: Store, *numbers: int) -> tuple[Any, WireRecords]:
    return next(batch_fetch.pack(store.schema, {number: samples.kilobyte(number) for number in numbers}))


def test_a_claim_is_granted_once() -> None:
    with served() as (store, service):
        assert take(service, 1, 2, claim=False) == [ABSENT, ABSENT]
        assert take(service, 1, 2) == [ABSENT, ABSENT], "who only asks has claimed nothing"
        assert take(service, 2, 3) == [PENDING, ABSENT]
        assert take(service, 1, 2, 3) == [PENDING, PENDING, PENDING]
        assert take(service, 1, 4, claim=False) == [ABSENT, ABSENT], "who does not claim is not to wait"
        store.fill(ids(5), samples.kilobyte)
        assert take(service, 5, 1) == [0, PENDING]


def test_what_a_clear_overtakes_is_not_sent() -> None:
    """The rows hold other samples' records by then."""
    with served() as (store, service), attached(store) as other:
        store.fill(ids(1, 2), samples.kilobyte)
        locate = store.locate

        def overtaken(*arguments: Any) -> Any:
            found = locate(*arguments)
            assert other.clear()
            other.fill(ids(2), samples.kilobyte)
            other.fill(ids(1), samples.kilobyte)
            return found

        store.locate = overtaken  # type: ignore[method-assign]
        assert take(service, 1, 2, claim=False) == [ABSENT, ABSENT]
        del store.locate
        assert take(service, 1, 2, claim=False) == [0, 0]


def test_what_a_process_here_reads_is_promised(tmp_path: Path) -> None:
    with opened(samples.kilobyte, 40, path=tmp_path / "store") as store:
        service = StoreService(store, FINGERPRINT)

        def claim() -> None:
            mine = Store.attach(str(tmp_path / "store"))
            assert mine.filler.claims.take(ids(1, 2), 2).tolist() == [1, 2]
            kept.append(mine)

        kept: list[Store] = []
        with lingering(claim):
            assert take(service, 1, 2, 3) == [PENDING, PENDING, ABSENT]
        assert take(service, 1, 2, 3) == [ABSENT, ABSENT, PENDING], "it has died"


def test_a_process_here_waits_for_what_another_machine_reads(tmp_path: Path) -> None:
    with opened(samples.kilobyte, 40, path=tmp_path / "store") as store:
        service = StoreService(store, FINGERPRINT)
        assert take(service, 1, 2) == [ABSENT, ABSENT]
        ready, tell = os.pipe()

        def fill() -> None:
            reads = []

            def read(sample: int) -> Any:
                reads.append(sample)
                os.write(tell, b"3")
                return samples.kilobyte(sample)

            with attached(tmp_path / "store") as mine:
                mine.fill(ids(1, 2, 3), read)
                # (When the claims are given back this process may be there before what was brought.)
                assert reads[0] == 3, "what others read comes last"
                assert wrong(stored(mine, ids(1, 2, 3)), samples.kilobyte) == {}

        pid = child(fill)
        try:
            assert os.read(ready, 1) == b"3"
            service.put(*brought(store, 1, 2), 0)
        finally:
            os.close(tell)
            os.close(ready)
            assert ended(pid) == 0
        assert wrong(stored(store), samples.kilobyte) == {}
        assert count(store) == 3


def test_a_lease_ends(clock: Clock) -> None:
    with served() as (store, service):
        assert take(service, 1, 2) == [ABSENT, ABSENT]
        clock.now += store_service.LEASE - 0.1
        assert take(service, 3) == [ABSENT]
        assert take(service, 1) == [PENDING]
        clock.now += 0.2
        assert take(service, 1, 3) == [ABSENT, PENDING], "the first one's time is over"
        assert take(service, 1) == [PENDING], "and it is another one's now"
        clock.now += store_service.LEASE + 0.1
        service.end_leases()
        assert (store.words(ids(1, 2, 3)) == 0).all(), "processes here may claim them"
        assert service._leases == {}


def test_a_lease_that_could_not_be_ended_is_ended_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (store, service):
        assert take(service, 1) == [ABSENT]
        with monkeypatch.context() as patch:
            patch.setattr(store.filler.claims, "release", raising(OSError("too many open files")))
            with pytest.raises(OSError, match="too many"):
                service.end_leases(ids(1))
        service.end_leases(ids(1))
        assert take(service, 1) == [ABSENT], "or it would be promised for ever"


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_clear_does_not_hold_up_others_where_somebody_reads(tmp_path: Path) -> None:
    with opened(samples.kilobyte, 40, path=tmp_path / "store") as store:
        service = StoreService(store, FINGERPRINT)
        store.fill(ids(5), samples.kilobyte)
        kept: list[Store] = []

        def claim() -> None:
            kept.append(Store.attach(str(tmp_path / "store")))
            kept[0].filler.claims.take(ids(1), 1)

        with lingering(claim):
            assert not service.clear(7)
            assert service.clears == 0
            assert store.holds(ids(5)), "it is whole"
        assert service.clear(7)
        assert service.clears == 7
        assert not store.holds(ids(5))


def test_what_was_destroyed_stays_so_whoever_clears_it(tmp_path: Path) -> None:
    with opened(samples.kilobyte, 40, path=tmp_path / "store") as store:
        store.fill(ids(5), samples.kilobyte)
        retire(str(tmp_path / "store"))
        assert StoreService(store, FINGERPRINT).clear(1)
        assert store.invalidated


def test_a_lease_is_shorter_than_anybody_waits() -> None:
    from hotset.cluster.membership import PATIENCE

    assert store_service.LEASE <= PATIENCE < fill._PATIENCE_SECONDS
    assert store_service._CLEAR_SECONDS < PATIENCE, "others' requests are not served meanwhile"


def test_what_is_brought_late_is_stored_too(clock: Clock) -> None:
    with served() as (store, service):
        assert take(service, 1, 2) == [ABSENT, ABSENT]
        clock.now += store_service.LEASE + 0.1
        service.end_leases()
        assert service.put(*brought(store, 1), 0).tolist() == [True]
        assert take(service, 2) == [ABSENT]  # by another machine
        assert service.put(*brought(store, 2), 0).tolist() == [True], "whoever is first"
        assert service.put(*brought(store, 2), 0).tolist() == [True], "the second one finds it there"
        assert take(service, 1, 2) == [0, 0]
        assert service._leases == {}
        assert wrong(stored(store), samples.kilobyte) == {}
        assert count(store) == 2


def test_what_nobody_claimed_may_be_brought() -> None:
    with served() as (store, service):
        assert service.put(*brought(store, 7, 8), 0).tolist() == [True, True]
        assert take(service, 7, 8) == [0, 0]


def test_what_has_no_room_is_nobodys_and_that_is_said() -> None:
    with served(limit=4 * MIB // 1024) as (store, service):
        room = 0
        while take(service, room) == [ABSENT]:
            assert service.put(*brought(store, room), 0).tolist() == [True]
            room += 1
        assert 0 < room < 8
        assert take(service, room, room + 1, 0) == [FULL, FULL, 0]
        assert take(service, room, claim=False) == [ABSENT], "who only asks is to ask nobody else"
        assert service.put(*brought(store, room), 0).tolist() == [False]
        assert count(store) == room
        assert (store.words(ids(range(room, 40))) == 0).all(), "a claim would make processes here wait"
        assert wrong(stored(store), samples.kilobyte) == {}
        assert store.clear()
        assert eventually(lambda: take(service, room) == [ABSENT]), "there is room again"


def test_who_has_nothing_to_bring_ends_its_lease() -> None:
    with served() as (store, service):
        assert take(service, 1, 2) == [ABSENT, ABSENT]
        ended = next(batch_fetch.pack(store.schema, {}, absent=[1]))
        assert service.put(*ended, 0).tolist() == [False]
        assert take(service, 1, 2) == [ABSENT, PENDING]
        assert service.put(*next(batch_fetch.pack(store.schema, {2: samples.Opaque(2)})), 0).tolist() == [
            False
        ]
        assert take(service, 2) == [ABSENT]


def test_a_cache_that_is_destroyed_or_cleared_takes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(samples.kilobyte, 40, path=path) as store:
        service = StoreService(store, FINGERPRINT)
        assert take(service, 1, 2) == [ABSENT, ABSENT]
        store.fill(ids(5), samples.kilobyte)
        service.end_leases(ids(1, 2))  # a clear waits for who is reading
        assert store.clear()
        assert take(service, 5, claim=False) == [ABSENT]
        assert service.put(*brought(store, 1), 0).tolist() == [True], "a clear forgets; it goes on"
        retire(str(path))
        assert take(service, 1, 2, 5) == [ABSENT] * 3, "everybody reads for himself"
        assert take(service, 1, 2, 5) == [ABSENT] * 3
        assert service.put(*brought(store, 2, 6), 0).tolist() == [False, False]
        service.end_leases()
        assert (store.segment.index == 0).all()


def test_what_is_left_for_the_next_answer_is_neither_absent_nor_claimed() -> None:
    with served() as (store, service):
        store.fill(ids(range(4)), samples.kilobyte)
        records = service.take(ids(range(5)), np.empty(2 * store.schema.stride, np.uint8), claim=True)
        assert np.minimum(records.generations, 0).tolist() == [0, 0, TRUNCATED, TRUNCATED, ABSENT]
        assert list(service._leases) == [4]


def test_claims_end_with_the_services_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim of the dead is void: nobody waits for it, or this would be for ever."""
    monkeypatch.setattr(fill, "_PATIENCE_SECONDS", 600.0)
    with opened(samples.kilobyte, 40, path=tmp_path / "store") as store:

        def serve() -> None:
            with attached(tmp_path / "store") as mine:
                assert take(StoreService(mine, FINGERPRINT), 1, 2) == [ABSENT, ABSENT]

        def go_on() -> None:
            with attached(tmp_path / "store") as mine:
                mine.fill(ids(1, 2), samples.kilobyte)

        in_child(serve)
        in_child(go_on)
        assert count(store) == 2
