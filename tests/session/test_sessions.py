"""Sessions: names, what is refused, and how they end: destroyed under jobs, or because nobody uses them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import is_a_sentence, recorded
from kills import child, ended, lingering
from samples import constant_row, mapping
from session_places import MIB, N, read_all, spilled
from sources import Samples
from stores import store_of

import hotset
from hotset import HotsetWarning
from hotset.errors import HotsetError, SessionError
from hotset.session import sessions
from hotset.session.named_lock import NamedLocks

pytestmark = pytest.mark.usefixtures("runtime")


# Names


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "_", "-", "x" * 100, "7up", "1e3", "0x10"])
def test_a_session_is_found_by_its_name_and_by_its_number(name: str) -> None:
    session = sessions.create(name, memory=1000)
    assert 1 <= session.number < 1 << 32
    for which in (name, session.number, str(session.number)):
        assert sessions.find(which) == session
    assert sessions.sessions() == [session]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../up",
        "a/b",
        ".hidden",
        "a b",
        "a\n",
        "a\0b",
        "ü",
        "x" * 101,
        "y" * 10_240,
        "7",
        "0" * 9,
    ],
)
def test_other_names_are_refused_in_a_sentence(name: str, runtime: Path) -> None:
    with pytest.raises(SessionError) as refused:
        sessions.create(name, memory=1000)
    assert is_a_sentence(str(refused.value))
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()
    with pytest.raises(SessionError) as unknown:
        sessions.find(name)
    assert len(str(unknown.value)) < 400
    assert os.listdir(runtime) == []


def test_a_session_without_a_name_is_called_by_its_number() -> None:
    one, other = sessions.create(memory=1), sessions.create(memory=1)
    assert one.name == str(one.number) != other.name
    assert sessions.find(one.name) == one
    with pytest.raises(SessionError, match=one.name):
        sessions.find("nobody")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"memory": -1}, "got -1"), ({"ttl": 0.0}, "ttl must be"), ({"ttl": float("nan")}, "ttl must be"),
        ({"ttl": float("inf")}, "ttl must be"), ({"persist": True}, "spill folder"),
        ({"ttl": "1h"}, "got '1h'"), ({"name": 5}, "got '5'"),
        ({"spill": "/dev/null/x"}, "/dev/null/x"), ({"spill": "/tmp/odd\nname"}, "odd characters"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(more: dict[str, Any], match: str, runtime: Path) -> None:
    with pytest.raises(SessionError, match=match) as refused:
        sessions.create(**{"name": "odd", "memory": 1000, **more})
    assert is_a_sentence(str(refused.value))
    assert os.listdir(runtime) == []


def test_memory_is_given_as_anywhere_else() -> None:
    session = sessions.create("a", memory="8MiB")
    assert session.memory == 8 * MIB
    assert sessions.resize("a", "10MiB").session.memory == 10 * MIB
    for amount in ("8 parsecs", 1.5):
        for ask in (lambda: sessions.create("b", memory=amount), lambda: sessions.resize("a", amount)):  # noqa: B023
            with pytest.raises(hotset.QuantityError, match="memory must be") as refused:
                ask()
            assert is_a_sentence(str(refused.value))
    assert sessions.find("a").memory == 10 * MIB


def test_a_session_can_be_given_where_its_name_can() -> None:
    session = sessions.create("a", memory=MIB)
    for given in (session, "a", session.number):
        with hotset.cache(Samples(constant_row, 4), session=given) as cached:
            assert [len(cached[i]) for i in range(4)]
            assert cached.stats().misses == 4  # by all of them
        with hotset.memo(divmod, session=given) as kept:
            assert kept(7, 2) == (3, 1)
            assert kept.stats().computed == 1
    sessions.destroy("a")
    with pytest.raises(SessionError, match="no session 'a'"):
        sessions.destroy("a")


def test_a_function_that_is_memoised_in_a_session_is_computed_once_that_is_destroyed() -> None:
    with contextlib.ExitStack() as memos:
        for _ in range(2):
            sessions.create("a", memory=MIB)
            kept = memos.enter_context(hotset.memo(divmod, session="a"))
            assert [kept(7, 2) for _ in range(3)] == [(3, 1)] * 3
            assert kept.stats().computed == 1
            sessions.destroy("a")
            assert kept.check() == []
            with recorded() as caught:
                assert [kept(7, 2) for _ in range(3)] == [(3, 1)] * 3
                assert kept(9, 2) == (4, 1)
            (warning,) = caught
            assert "session 'a', which keeps results of functions, was destroyed" in str(warning.message)
            assert is_a_sentence(str(warning.message))


def test_a_function_that_is_memoised_in_a_session_anew_is_kept_though_another_has_not_been_called_since() -> (
    None
):
    sessions.create("a", memory=MIB)
    with hotset.memo(divmod, session="a") as old:
        assert old(7, 2) == (3, 1)
        sessions.destroy("a")
        sessions.create("a", memory=MIB)
        with recorded() as caught, hotset.memo(divmod, session="a") as kept:
            assert [kept(7, 2) for _ in range(3)] == [(3, 1)] * 3
            assert kept.stats().computed == 1
        assert "session 'a'" in str(caught[0].message)
    sessions.destroy("a")


def test_of_eight_processes_that_create_one_name_one_does(runtime: Path) -> None:
    def create() -> None:
        with contextlib.suppress(SessionError):
            sessions.create("one", memory=1000)
            os._exit(7)

    codes = [ended(pid) for pid in [child(create) for _ in range(8)]]
    assert sorted(codes) == [0] * 7 + [7]
    assert [session.name for session in sessions.sessions()] == ["one"]
    assert os.listdir(runtime) == [sessions.find("one").file]


def test_while_another_makes_or_destroys_one_nobody_else_does(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = sessions.create("there", memory=1)
    held = sessions.one_at_a_time()
    with lingering(held.__enter__):
        monkeypatch.setattr(sessions, "_LOCK_SECONDS", 0.2)
        for act in (lambda: sessions.create("a", memory=1), lambda: sessions.destroy(there)):
            with pytest.raises(SessionError, match="creating or destroying a session") as refused:
                act()
            assert is_a_sentence(str(refused.value))
        assert sessions.sessions() == [there]


# What cannot be made


@pytest.mark.parametrize("what", ["too much", "full"])
def test_a_session_that_cannot_be_made_is_a_sentence_and_leaves_nothing(
    what: str, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if what == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SessionError) as refused:
        sessions.create("a", memory=MIB if what == "full" else 1 << 70, spill=disk, persist=True)
    monkeypatch.undo()
    assert is_a_sentence(str(refused.value))
    assert spilled(disk) == []
    assert sessions.sessions() == []


def test_a_cache_that_cannot_be_made_leaves_no_file(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(geometry: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    sessions.create("a", memory=MIB, spill=disk)
    monkeypatch.setattr("hotset.store.store.require_index_room", refuse)
    with pytest.warns(HotsetWarning, match="no cache can be made"):
        hotset.cache(Samples(mapping, N), session="a").close()
    assert spilled(disk) == []


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b"\xff" * 12288, b"[]".ljust(12288), b"{}".ljust(12288)]
)
def test_what_is_no_ledger_is_passed_over(content: bytes, runtime: Path) -> None:
    session = sessions.create("a", memory=1)
    (runtime / "5.session").write_bytes(content)
    (runtime / "5.session").chmod(0o600)
    assert sessions.sessions() == [session]


# Ends


def test_destroying_gives_memory_and_disk_back_under_jobs_that_read(disk: str, runtime: Path) -> None:
    session = sessions.create("a", memory=150_000, spill=disk)
    cached = hotset.cache(Samples(constant_row, N), session="a", memory=130_000)
    read_all(cached, constant_row, 10)
    first, second = store_of(cached).segment, store_of(cached).spill.segment

    def blocks() -> tuple[int, int]:
        return tuple(512 * os.fstat(one.fd).st_blocks - one.geometry.rows_at for one in (first, second))  # type: ignore[return-value]

    before = blocks()
    assert before[0] >= 65_536
    assert before[1] >= 8 * 65_536
    freed = sessions.destroy(session)
    assert freed >= 10 * 65_536
    after = blocks()
    assert after[0] <= 4096
    assert after[1] <= 4096
    assert os.listdir(runtime) == spilled(disk) == []
    with pytest.warns(HotsetWarning, match="was destroyed") as told:
        read_all(cached, constant_row)
    assert len(told) == 1
    assert is_a_sentence(str(told[0].message))
    with pytest.raises(HotsetError, match="was destroyed"):
        cached.clear()
    cached.close()
    with pytest.raises(SessionError):
        sessions.destroy(session)


@pytest.mark.parametrize("persist", [True, False])
def test_destroying_says_when_a_disk_will_bring_the_session_back(persist: bool, disk: str) -> None:
    """As where the disk is unmounted, or has become read-only after errors."""
    session = sessions.create("a", memory=MIB, spill=disk, persist=persist)
    os.rename(disk, f"{disk}-unmounted")
    with recorded() as told:
        sessions.destroy(session)
        assert sessions.sessions() == []
    os.rename(f"{disk}-unmounted", disk)
    assert sessions.sessions() == ([session] if persist else [])
    assert len(told) == persist
    if persist:
        assert is_a_sentence(str(told[0].message))
        with recorded() as told:
            sessions.destroy(session)
        assert sessions.sessions() == told == []


def test_a_session_expires_when_nobody_uses_it() -> None:
    session = sessions.create("a", memory=MIB, ttl=100.0)
    for_ever = sessions.create("b", memory=MIB)
    path = Path(os.environ["HOTSET_RUNTIME_DIR"]) / session.file
    with hotset.cache(Samples(mapping, N), session="a"):
        os.utime(path, (0, 0))
        assert sessions.expire() == []
        assert path.stat().st_mtime > 0, "it is used now"
    assert sessions.expire() == []

    def use() -> None:
        held.append(hotset.cache(Samples(mapping, N), session="a"))

    held: list[Any] = []
    with lingering(use):
        os.utime(path, (0, 0))
        assert sessions.expire() == []
    os.utime(path, (0, 0))
    (sentence,) = sessions.expire()
    assert is_a_sentence(sentence)
    assert "'a'" in sentence
    assert sessions.sessions() == [for_ever]


def test_a_session_that_comes_into_use_as_it_expires_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    session = sessions.create("a", memory=MIB, ttl=100.0)
    one_at_a_time = sessions.one_at_a_time

    def use_first() -> NamedLocks:
        held.append(hotset.cache(Samples(mapping, N), session="a"))
        return one_at_a_time()

    held: list[Any] = []
    monkeypatch.setattr(sessions, "one_at_a_time", use_first)
    os.utime(Path(os.environ["HOTSET_RUNTIME_DIR"]) / session.file, (0, 0))
    assert sessions.expire() == []
    assert sessions.sessions() == [session]
    held[0].close()


def test_a_session_does_not_expire_while_a_job_plans_its_cache() -> None:
    session = sessions.create("a", memory=MIB, ttl=100.0)

    def read(index: int) -> Any:
        os.utime(Path(os.environ["HOTSET_RUNTIME_DIR"]) / session.file, (0, 0))
        assert sessions.expire() == []
        return mapping(index)

    with hotset.cache(Samples(read, N), session="a", key="samples") as cached:
        read_all(cached, mapping)
        assert cached.stats().cached == N
