"""Sessions: names, ledgers and quotas, spill folders, lives and deaths, and what is left after a reboot."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import equal_batches, is_a_sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import constant_row, jpeg_like, kilobyte, mapping
from sources import Samples
from stores import child, ended, kill, lingering, pause

import hotset
from hotset import HotsetWarning
from hotset.errors import FolderError, HotsetError, SessionError
from hotset.session import registry, sessions, spills
from hotset.session.ledger import Ledger
from hotset.session.reports import report
from hotset.store.format import LIVE_AT, Live
from hotset.store.segment import Segment

N = 40
PORT = 50123
MIB = 1 << 20


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in memory, which is where it is; it goes with what is in it."""
    folder = Path(tempfile.mkdtemp(prefix="test-hotset-", dir="/dev/shm"))
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return str(tmp_path / "spill")


def reboot(runtime: Path) -> None:
    """Memory is gone, and what lies on a disk is not."""
    shutil.rmtree(runtime)
    runtime.mkdir(mode=0o700)


def spilled(disk: str) -> list[str]:
    own = spills.spill_path(disk)
    return sorted(os.listdir(own)) if own.is_dir() else []


def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a minute had passed: nobody is in the midst of anything any more."""
    monkeypatch.setattr(sessions, "_YOUNG_SECONDS", -1.0)


def read_all(cached: Any, make: Callable[[int], Any], n: int = N) -> None:
    equal_batches([cached[i] for i in range(n)], [make(i) for i in range(n)])


def taken(segment: Segment) -> int:
    live = segment.live
    return segment.geometry.taken(int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT]))


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
        ({"memory": -1}, "=-1"), ({"ttl": 0.0}, "time to live"), ({"ttl": float("nan")}, "time to live"),
        ({"ttl": float("inf")}, "time to live"), ({"persist": True}, "spill folder"),
        ({"spill": "/dev/null/x"}, "/dev/null/x"), ({"spill": "/tmp/odd\nname"}, "odd characters"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(more: dict[str, Any], match: str, runtime: Path) -> None:
    with pytest.raises(SessionError, match=match) as refused:
        sessions.create("odd", **{"memory": 1000, **more})
    assert is_a_sentence(str(refused.value))
    assert os.listdir(runtime) == []


def test_of_eight_processes_that_create_one_name_one_does(runtime: Path) -> None:
    def create() -> None:
        with contextlib.suppress(SessionError):
            sessions.create("one", memory=1000)
            os._exit(7)

    codes = [ended(pid) for pid in [child(create) for _ in range(8)]]
    assert sorted(codes) == [0] * 7 + [7]
    assert [session.name for session in sessions.sessions()] == ["one"]
    assert os.listdir(runtime) == [sessions.find("one").file]


# Spill folders


def test_a_spill_folder_is_private_and_known(disk: str) -> None:
    session = sessions.create("a", memory=1, spill=disk)
    assert session.spill == disk
    assert spills.spill_path(disk).stat().st_mode & 0o777 == 0o700
    sessions.create("b", memory=1, spill=disk)
    assert spills.known_folders() == [disk]
    shutil.rmtree(disk)
    assert spills.known_folders() == []


@pytest.mark.parametrize("trap", ["symlink", "file", "open", "foreign"])
def test_a_spill_folder_that_is_not_ours_alone_is_refused(trap: str, disk: str, tmp_path: Path) -> None:
    own = spills.spill_path(disk)
    own.parent.mkdir()
    if trap == "symlink":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif trap == "file":
        own.touch(mode=0o600)
    else:
        own.mkdir()
        own.chmod(0o755 if trap == "open" else 0o700)
    if trap == "foreign":
        try:
            os.chown(own, 12345, 12345)
        except PermissionError:
            pytest.skip("only root gives folders away")
    with pytest.raises(FolderError) as refused:
        sessions.create("a", memory=1, spill=disk)
    assert str(own) in str(refused.value)
    assert is_a_sentence(str(refused.value))
    assert sessions.sessions() == []


@pytest.mark.parametrize("trap", ["symlink", "hard link", "open"])
def test_a_spill_file_that_is_not_ours_alone_is_not_served(
    trap: str, disk: str, runtime: Path, tmp_path: Path
) -> None:
    sessions.create("a", memory=MIB, spill=disk, persist=True)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
    (file,) = spills.spill_path(disk).glob("*.spill")
    if trap == "symlink":
        file.rename(tmp_path / "moved")
        file.symlink_to(tmp_path / "moved")
    elif trap == "hard link":
        os.link(file, tmp_path / "second name")
    else:
        os.chown(file, 12345, 12345)
    reboot(runtime)
    with pytest.warns(HotsetWarning, match="cannot be used") as told:
        cached = hotset.cache(Samples(mapping, N), session="a")
    with cached:
        assert is_a_sentence(str(told[-1].message))
        assert cached.stats().cached == 0
        read_all(cached, mapping)


MOUNTS = """\
1 0 0:1 / / rw - ext4 /dev/a rw
2 1 0:2 / /mnt/far rw,nosuid shared:1 - {kind} server:/x rw
3 2 0:3 / /mnt/far/near rw - xfs /dev/b rw
4 1 0:4 / /mnt/with\\040space rw - {kind} server:/y rw
"""


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "9p", "lustre", "fuse.sshfs"])
def test_a_network_file_system_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spills, "open", lambda *_, **__: io.StringIO(MOUNTS.format(kind=kind)), raising=False)
    for far in ("/mnt/far", "/mnt/far/deeper", "/mnt/with space/x"):
        with pytest.raises(SessionError, match=f"network \\({kind}\\)") as refused:
            sessions.create("a", memory=1, spill=far)
        assert is_a_sentence(str(refused.value))
        assert not os.path.exists(far)
    for place, found in (("/mnt/far/near/x", "xfs"), ("/mnt/farther", "ext4"), ("/mnt/nowhere/../far", kind)):
        assert spills._file_system(place) == found


def test_a_network_file_system_is_known_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = MOUNTS.format(kind="nfs4").replace("/mnt/far ", "/mnt/dätä ")
    monkeypatch.setattr(spills, "open", lambda *_, **__: io.StringIO(text), raising=False)
    assert spills._file_system("/mnt/dätä/x") == "nfs4"


def test_a_cache_of_ones_own_is_not_spilled_to_a_network_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spills, "_file_system", lambda folder: "nfs")
    with pytest.warns(HotsetWarning, match=r"network \(nfs\)"):
        cached = hotset.cache(Samples(mapping, N), memory=0, spill="/mnt/nowhere")
    cached.close()


# Ledgers


def ledger(runtime: Path, file: str = "1.session", limit: int = 1000) -> Ledger:
    folder = os.open(runtime, os.O_RDONLY)
    try:
        if not (runtime / file).exists():
            Ledger.create(folder, file, {"for": "tests"}, limit)
        return Ledger(folder, file)
    finally:
        os.close(folder)


def test_a_ledger_bounds_its_members_together(runtime: Path) -> None:
    with contextlib.closing(ledger(runtime)) as book, contextlib.closing(ledger(runtime)) as same:
        one, two = book.enter(11), same.enter(22)
        assert (book.enter(22), same.members()) == (two, {11: one, 22: two})
        assert book.take(one, 600)
        assert not same.take(two, 401)
        assert (same.left(two), same.held) == (400, 600)
        assert same.take(two, 400)
        assert not book.take(one, 601)
        assert book.take(one, 100)
        assert same.left(two) == 900
        same.limit = 50  # what is there stays, and nothing is added
        assert (book.left(one), book.left(two)) == (0, 0)
        assert not book.take(one, 101)
        assert book.take(one, 99)
        book.leave(two)
        assert (same.held, same.members()) == (99, {11: one})


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 1200)), max_size=40))
def test_no_order_of_taking_exceeds_any_limit(steps: list[tuple[int, int, int]]) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-hotset-") as place,
        contextlib.ExitStack() as s,
    ):
        path = Path(place)
        books = [s.enter_context(contextlib.closing(ledger(path, f"{n}.session", 900))) for n in (1, 2)]
        for number, book in enumerate(books):
            above = ledger(path, "server-1.ledger", 1500)
            book.stand_under(above, above.enter(number + 1))
        server = s.enter_context(contextlib.closing(ledger(path, "server-1.ledger")))
        rows = [[book.enter(100 + member) for member in range(3)] for book in books]
        model = [[0, 0, 0], [0, 0, 0]]
        for which, member, amount in steps:
            after = sum(model[which]) - model[which][member] + amount
            fits = after <= 900 and after + sum(model[1 - which]) <= 1500
            fits = fits or amount <= model[which][member]
            left = books[which].left(rows[which][member])
            assert books[which].take(rows[which][member], amount) == fits
            assert fits == (amount <= max(left, model[which][member]))
            model[which][member] = amount if fits else model[which][member]
            assert [book.held for book in books] == [sum(one) for one in model]
            assert server.held == sum(map(sum, model))


def test_a_ledger_is_held_by_forks_by_themselves(runtime: Path) -> None:
    with contextlib.closing(ledger(runtime)) as other:
        book = ledger(runtime)
        book.use()
        with lingering(lambda: None):
            assert other.in_use
            book.close()
            del book
            assert other.in_use, "the child uses it too"
        assert not other.in_use


def test_a_ledger_that_was_closed_uses_nothing(runtime: Path) -> None:
    with contextlib.closing(ledger(runtime)) as other:
        book = ledger(runtime)
        book.use()
        book.close()
        found = other.in_use
        del book
    assert not found


def test_a_lock_of_a_stopped_process_is_not_waited_for_for_long(runtime: Path) -> None:
    book = ledger(runtime)

    def hold() -> None:
        held = ledger(runtime).lock()
        held.__enter__()
        stack.append(held)

    stack: list[Any] = []
    with contextlib.closing(book), lingering(hold):
        start = time.monotonic()
        assert not book.take(book.enter(1), 1)
        assert time.monotonic() - start < 20
    with contextlib.closing(ledger(runtime)) as again:
        assert again.take(again.enter(1), 1), "the lock ends with its holder"


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b"\xff" * 12288, b"[]".ljust(12288), b"{}".ljust(12288)]
)
def test_what_is_no_ledger_is_passed_over(content: bytes, runtime: Path) -> None:
    session = sessions.create("a", memory=1)
    (runtime / "5.session").write_bytes(content)
    (runtime / "5.session").chmod(0o600)
    assert sessions.sessions() == [session]


def test_511_caches_are_one_too_many_in_a_sentence(runtime: Path) -> None:
    with contextlib.closing(ledger(runtime)) as book:
        for member in range(1, 511):
            book.enter(member)
        with pytest.raises(SessionError, match="510") as refused:
            book.enter(511)
        assert is_a_sentence(str(refused.value))


# Quotas


def fill_through(key: str, make: Any, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(400)
    cached = hotset.cache(Samples(make, 400), session="a", key=key)
    cached.tell = lambda sentence: None
    for i in order.tolist():
        equal_batches(cached[i], make(i))
    cached.close()


@pytest.mark.parametrize("spill", [False, True])
def test_caches_of_a_session_never_hold_more_than_its_memory(spill: bool, disk: str) -> None:
    memory = 300_007
    session = sessions.create("a", memory=memory, spill=disk if spill else None)
    makes: dict[str, Any] = {"one": kilobyte, "two": jpeg_like, "three": mapping}
    orders = random.Random(3)
    wanted = [(key, make, seed) for seed in range(2) for key, make in makes.items()]
    pids = [child(functools.partial(fill_through, *one)) for one in wanted]
    deadline, highest = time.monotonic() + 60, 0
    try:
        while pids and time.monotonic() < deadline:
            highest = max(highest, report(session).memory)
            if len(pids) == 6 and highest > memory // 3:
                kill(pids.pop(orders.randrange(6)))
            pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.002)
    finally:
        for pid in pids:
            kill(pid)
    found = report(session)
    assert 0.8 * memory < highest <= memory
    assert found.memory <= memory
    assert not found.in_use
    with sessions.open_ledger(session) as book:
        assert found.memory <= book.held <= memory
    assert bool(found.disk) == spill
    assert all(cache.state == "ok" and cache.cached for cache in found.caches)
    if spill:
        # A lock that could not be had in two seconds leaves a chunk to the next who reads it.
        assert min(cache.cached for cache in found.caches) > 300
    for key, make in makes.items():
        with hotset.cache(Samples(make, 400), session="a", key=key) as cached:
            assert cached.check() == []


def test_a_caches_own_memory_and_spill_narrow_its_share(disk: str) -> None:
    session = sessions.create("a", memory=MIB, spill=disk)
    with hotset.cache(Samples(kilobyte, N), session="a", memory="10KiB", key="small") as cached:
        read_all(cached, kilobyte)
        assert taken(cached.store.segment) <= 10 << 10  # type: ignore[union-attr]
        assert 0 < cached.stats().spilled < N
    with hotset.cache(Samples(kilobyte, N), session="a", memory="10KiB", spill=False, key="no") as cached:
        with pytest.warns(HotsetWarning, match="no more fit"):
            read_all(cached, kilobyte)
        assert cached.stats().spilled == 0
        assert cached.stats().cached < N
    found = report(session)
    assert [cache.disk > 0 for cache in found.caches] == [cache.spilled > 0 for cache in found.caches]
    assert found.memory <= 20 << 10


def test_a_servers_budget_bounds_its_sessions_together(disk: str) -> None:
    sessions.set_server_budget(PORT, 60_000)
    assert sessions.server_limit(PORT) == 60_000
    found = [sessions.create(name, memory=50_000, spill=disk, server=PORT) for name in "ab"]
    caches = [hotset.cache(Samples(kilobyte, 60), session=name) for name in "ab"]
    for cached in caches:
        read_all(cached, kilobyte, 60)
    held = [report(session).memory for session in found]
    assert 40_000 < held[0] <= 50_000
    assert 50_000 < sum(held) <= 60_000
    sessions.destroy(found[0])
    with pytest.warns(HotsetWarning, match="was destroyed"):
        read_all(caches[0], kilobyte, 60)
    caches[1].clear()
    pause(0.6)  # it looks for room again after half a second
    read_all(caches[1], kilobyte, 60)
    assert 40_000 < report(found[1]).memory <= 50_000, "what is destroyed is free for others"
    for cached in caches:
        cached.close()
    sessions.destroy(found[1])
    sessions.drop_server(PORT)
    assert sessions.server_limit(PORT) is None


def test_a_session_without_an_amount_takes_its_servers() -> None:
    sessions.set_server_budget(PORT, 12_345)
    sessions.set_server_budget(PORT, 54_321)
    assert sessions.create(server=PORT).memory == 54_321
    assert sessions.create().memory > MIB


def test_what_is_cleared_is_free_for_others() -> None:
    def cached_by_the_second() -> int:
        sessions.create("a", memory=45_000)
        with (
            hotset.cache(Samples(kilobyte, N), session="a", key="one") as one,
            hotset.cache(Samples(kilobyte, N), session="a", key="two") as two,
        ):
            read_all(one, kilobyte)
            one.clear()
            two.tell = lambda sentence: None
            read_all(two, kilobyte)
            return two.stats().cached

    assert cached_by_the_second() == N


def test_a_straggler_of_a_destroyed_session_takes_nothing_from_the_next() -> None:
    sessions.set_server_budget(PORT, 1000)
    first = sessions.create("first", memory=1000, server=PORT)
    with sessions.open_ledger(first) as straggler:
        row = straggler.enter(1)
        sessions.destroy(first)
        with sessions.open_ledger(sessions.create("second", memory=1000, server=PORT)) as book:
            assert book.take(book.enter(2), 900)
            straggler.take(row, 1)
            parent = book._parent
            assert parent is not None
            assert parent[0].held == 900


# Ends


def test_destroying_gives_memory_and_disk_back_under_jobs_that_read(disk: str, runtime: Path) -> None:
    session = sessions.create("a", memory=150_000, spill=disk)
    cached = hotset.cache(Samples(constant_row, N), session="a", memory=130_000)
    assert cached.store is not None
    assert cached.store.spill is not None
    read_all(cached, constant_row, 10)
    first, second = cached.store.segment, cached.store.spill.segment

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


def steps_of(body: Callable[[], object], die_at: int) -> int:
    """Run in a child, which dies before its ``die_at``-th change of a file; its exit code."""

    def run() -> None:
        left = [die_at]

        def dying(call: Any) -> Any:
            def wrapped(*arguments: Any, **more: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **more)

            return wrapped

        for name in ("open", "write", "pwrite", "rename", "unlink", "mkdir", "posix_fallocate", "fsync"):
            setattr(os, name, dying(getattr(os, name)))
        body()

    return ended(child(run))


@pytest.mark.parametrize("action", ["create", "destroy"])
def test_a_death_at_any_step_leaves_nothing_that_is_not_found(
    action: str, disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the session is there and whole, or destroying it again and recovering leaves nothing."""
    old(monkeypatch)
    for step in range(1, 400):
        if action == "create":
            code = steps_of(lambda: sessions.create("a", memory=MIB, spill=disk, persist=True), step)
        else:
            session = sessions.create("a", memory=MIB, spill=disk)
            place = f"{session.number}-{'0' * 32}-{'1' * 16}"
            (runtime / f"{place}.cache").touch(mode=0o600)
            (spills.spill_path(disk) / f"{place}.spill").touch(mode=0o600)
            code = steps_of(lambda session=session: sessions.destroy(session), step)  # type: ignore[misc]
        sessions.recover()
        for session in sessions.sessions():
            sessions.destroy(session)
        sessions.recover()
        registry.gc()
        assert os.listdir(runtime) == [], step
        unfinished = [file for file in spilled(disk) if not file.endswith(".json")]
        assert unfinished == [], step
        for file in spilled(disk):
            (spills.spill_path(disk) / file).unlink()
        if code == 0:
            break
    else:
        raise AssertionError("it never ends")
    assert step > 10


def test_recovering_ends_what_was_half_destroyed(disk: str, runtime: Path) -> None:
    session = sessions.create("a", memory=MIB, spill=disk)
    with sessions.open_ledger(session) as book:
        book.end()
    assert sessions.recover() != []
    assert sessions.sessions() == []


def test_a_definition_that_was_not_written_to_its_end_is_removed(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(monkeypatch)
    sessions.create("a", memory=1, spill=disk)
    (spills.spill_path(disk) / "77.session.json").touch(mode=0o600)
    assert len(sessions.recover()) == 1
    assert spilled(disk) == []


def test_a_file_that_lost_its_process_before_its_name_is_removed(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no nameless files one has a name for a moment; a kill may come in it."""
    old(monkeypatch)
    sessions.create("a", memory=1, spill=disk)
    (spills.spill_path(disk) / ("0123456789abcdef" * 2)).touch(mode=0o600)
    assert len(sessions.recover()) == 1
    assert spilled(disk) == []


def test_recovering_removes_what_has_no_session_and_nothing_else(
    disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions.create("a", memory=20_000, spill=disk)
    with hotset.cache(Samples(kilobyte, N), session="a") as cached:
        read_all(cached, kilobyte)
        assert cached.stats().spilled > 0
        gone = f"123-{'0' * 32}-{'1' * 16}"
        for place, file in (
            (runtime, f"{gone}.cache"), (spills.spill_path(disk), f"{gone}.spill"),
            (spills.spill_path(disk), f"{session.number}-{'0' * 32}-{'1' * 16}.spill"),
            (runtime, f"{gone}.cache.0123abcd.new"), (runtime, "5.session.0123abcd.new"),
        ):  # fmt: skip
            (place / file).touch(mode=0o600)
        stranger = spills.spill_path(disk) / "notes.txt"
        stranger.touch()
        kept = {*os.listdir(runtime), *spilled(disk)}
        first = sessions.recover()
        assert len(first) == 1, "the others are young: somebody may be making them"
        old(monkeypatch)
        told = first + sessions.recover()
        assert len(told) == 5
        assert all(is_a_sentence(sentence) for sentence in told)
        gone_now = kept - {*os.listdir(runtime), *spilled(disk)}
        assert gone_now == {sentence.split()[1].rstrip(":") for sentence in told}
        read_all(cached, kilobyte)
        assert cached.stats().cached == N
    assert sessions.find("a") == session


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


# Reboots


def persisted(disk: str, make: Any = mapping, n: int = N, **more: Any) -> sessions.Session:
    session = sessions.create("a", memory=more.pop("session_memory", MIB), spill=disk, persist=True)
    with hotset.cache(Samples(make, N), session="a", **more) as cached:
        for i in range(n):
            cached[i]
    return session


@pytest.mark.parametrize("memory", [0, 5000, MIB])
def test_a_session_that_persists_is_there_after_a_reboot(memory: int, disk: str, runtime: Path) -> None:
    session = persisted(disk, n=N // 2, session_memory=memory)
    for _ in range(2):
        reboot(runtime)
        assert sessions.sessions() == [session]
        assert sessions.recover() == []
        with hotset.cache(Samples(mapping, N), session="a") as cached:
            cached.source.dataset.make = None  # whoever reads the source fails
            read_all(cached, mapping, N // 2)
            assert cached.stats().spilled == N // 2
            assert cached.check() == []
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)  # it goes on from there
        assert cached.stats().cached == N
        assert cached.check() == []
    reboot(runtime)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        assert cached.stats().cached == N
    assert sessions.destroy(session) > 0
    assert spilled(disk) == os.listdir(runtime) == []
    reboot(runtime)
    assert sessions.sessions() == []


def test_a_session_that_does_not_persist_is_gone_after_a_reboot(
    disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions.create("a", memory=0, spill=disk)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
    reboot(runtime)
    old(monkeypatch)
    assert sessions.sessions() == []
    assert len(sessions.recover()) == 1
    assert spilled(disk) == []


def test_another_data_set_is_not_served_what_was_kept(disk: str, runtime: Path) -> None:
    persisted(disk, kilobyte)
    reboot(runtime)
    with hotset.cache(Samples(jpeg_like, N), session="a") as cached:
        assert cached.stats().cached == 0
        read_all(cached, jpeg_like)
    with hotset.cache(Samples(kilobyte, N), session="a") as cached:
        assert cached.stats().cached == N
        read_all(cached, kilobyte)


def test_a_cache_that_was_found_stale_is_not_served_after_a_reboot(disk: str, runtime: Path) -> None:
    persisted(disk)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        cached.store.condemn()  # type: ignore[union-attr]
    del cached
    reboot(runtime)
    with pytest.warns(HotsetWarning, match="no longer gives"):
        again = hotset.cache(Samples(mapping, N), session="a")
    with again:
        found = again.stats().cached
    del again
    assert found == 0


def test_a_count_of_rows_that_the_disk_lost_gives_no_sample_anothers_row(disk: str, runtime: Path) -> None:
    """Pages of a file reach the disk in any order, and power may fail in between."""
    persisted(disk, kilobyte, n=N // 2, session_memory=0)
    reboot(runtime)
    (file,) = spills.spill_path(disk).glob("*.spill")
    with file.open("r+b") as writing:
        writing.seek(LIVE_AT + 8 * Live.ROWS_NEXT)
        writing.write(bytes(8))

    def wrong() -> list[int]:
        with hotset.cache(Samples(kilobyte, N), session="a") as cached:
            for i in [*range(N // 2), *range(N)]:
                cached[i]
            return [i for i in range(N) if not bool((cached[i] == kilobyte(i)).all())]

    assert wrong() == []


def test_a_caches_own_memory_is_kept_over_a_reboot(disk: str, runtime: Path) -> None:
    persisted(disk, kilobyte, n=0, memory="4KiB")
    reboot(runtime)
    with hotset.cache(Samples(kilobyte, N), session="a", memory="4KiB") as cached:
        read_all(cached, kilobyte)
        found = taken(cached.store.segment)  # type: ignore[union-attr]
    del cached
    assert found <= 4096


def test_what_was_kept_and_cannot_be_used_is_removed(
    disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(monkeypatch)
    persisted(disk)
    reboot(runtime)
    (file,) = spills.spill_path(disk).glob("*.spill")
    os.truncate(file, 100)
    with (
        pytest.warns(HotsetWarning, match="cannot be used, and is read again"),
        hotset.cache(Samples(mapping, N), session="a") as cached,
    ):
        read_all(cached, mapping)
    del cached
    sessions.recover()
    assert len([name for name in spilled(disk) if name.endswith(".spill")]) == 1


def test_processes_that_restore_a_session_at_once_have_one_ledger(disk: str, runtime: Path) -> None:
    session = sessions.create("a", memory=MIB, spill=disk, persist=True)
    reboot(runtime)
    inner, outer = os.pipe()

    def restore() -> None:
        sessions.sessions()
        os.write(outer, f"{(runtime / session.file).stat().st_ino}\n".encode())

    children = [child(restore) for _ in range(8)]
    assert [ended(one) for one in children] == [0] * 8
    found = os.read(inner, 4096).split()
    os.close(inner)
    os.close(outer)
    assert len(found) == 8
    assert set(found) == {str((runtime / session.file).stat().st_ino).encode()}
