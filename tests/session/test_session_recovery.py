"""What crashes and reboots leave of sessions: it is found, put right or gone on from; nothing else goes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import is_a_sentence
from kills import child, ended, in_child
from samples import jpeg_like, kilobyte, mapping
from session_places import MIB, N, old, read_all, reboot, spilled
from sources import Samples
from stores import store_of

import hotset
from hotset import HotsetWarning
from hotset.dataset.dataset_proxy import current_of
from hotset.session import catalog, recovery, sessions
from hotset.session import server_quota as servers
from hotset.session import spill_dirs as spills
from hotset.session.named_lock import NamedLocks
from hotset.session.quota import Quota
from hotset.session.reports import report
from hotset.session.session_definition import Session, open_quota
from hotset.store.format import HEADER_BYTES, LIVE_AT, Live

pytestmark = pytest.mark.usefixtures("runtime")


# Crashes


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
        recovery.recover()
        for session in sessions.sessions():
            sessions.destroy(session)
        recovery.recover()
        catalog.gc()
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
    with open_quota(session) as book:
        book.end()
    assert recovery.recover() != []
    assert sessions.sessions() == []


def test_a_definition_that_was_not_written_to_its_end_is_removed(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(monkeypatch)
    sessions.create("a", memory=1, spill=disk)
    (spills.spill_path(disk) / "77.session.json").touch(mode=0o600)
    assert len(recovery.recover()) == 1
    assert spilled(disk) == []


def test_a_file_that_lost_its_process_before_its_name_is_removed(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no nameless files one has a name for a moment; a kill may come in it."""
    old(monkeypatch)
    sessions.create("a", memory=1, spill=disk)
    (spills.spill_path(disk) / ("0123456789abcdef" * 2)).touch(mode=0o600)
    assert len(recovery.recover()) == 1
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
        first = recovery.recover()
        assert len(first) == 1, "the others are young: somebody may be making them"
        old(monkeypatch)
        told = first + recovery.recover()
        assert len(told) == 5
        assert all(is_a_sentence(sentence) for sentence in told)
        gone_now = kept - {*os.listdir(runtime), *spilled(disk)}
        assert gone_now == {sentence.split()[1].rstrip(":") for sentence in told}
        read_all(cached, kilobyte)
        assert cached.stats().cached == N
    assert sessions.find("a") == session


def test_what_a_job_of_another_runtime_folder_has_on_a_disk_is_left_alone(
    disk: str, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where containers, or programs with a HOTSET_RUNTIME_DIR of their own, share a disk."""
    sessions.create("a", memory=20_000, spill=disk)
    with hotset.cache(Samples(kilobyte, N), session="a") as cached:
        read_all(cached, kilobyte)
        before = spilled(disk)
        old(monkeypatch)
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "other"))
            assert recovery.gc() == []
        assert spilled(disk) == before != []
    with hotset.cache(Samples(kilobyte, N), session="a") as cached:
        assert cached.stats().cached == N
    sessions.destroy("a")


def test_a_disk_that_fails_keeps_no_other_session_from_being_found(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system that has shut itself down after errors: its folder can be opened, and not listed."""
    sessions.create("a", memory=MIB, spill=disk, persist=True)
    other = sessions.create("b", memory=MIB, spill=str(tmp_path / "other"), persist=True)
    listed = os.listdir

    def failing(folder: Any) -> list[str]:
        if isinstance(folder, int) and os.readlink(f"/proc/self/fd/{folder}") == str(spills.spill_path(disk)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listed(folder)

    monkeypatch.setattr(os, "listdir", failing)
    assert sessions.find("b") == other
    with hotset.cache(Samples(mapping, N), session="b") as cached:
        read_all(cached, mapping)
        assert cached.stats().cached == N
    assert recovery.recover() == []


@pytest.mark.parametrize(
    "wrong",
    [{"memory": -1}, {"memory": 1 << 70}, {"created": "today"}, {"ttl": "1h"}, {"name": 7}, {"server": "a"}],
    ids=str,
)
def test_a_definition_that_cannot_be_hides_no_other_session(
    wrong: dict[str, Any], disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that somebody has edited."""
    sessions.create("a", memory=MIB, spill=disk, persist=True)
    (definition,) = spills.spill_path(disk).glob("*.session.json")
    definition.write_text(json.dumps(json.loads(definition.read_text()) | wrong))
    reboot(runtime)
    other = sessions.create("b", memory=MIB)
    assert sessions.sessions() == [other]
    assert sessions.expire() == []
    old(monkeypatch)
    assert len(recovery.recover()) == 1
    assert spilled(disk) == []
    assert sessions.sessions() == [other]


# Reboots


def persisted(disk: str, make: Any = mapping, n: int = N, **more: Any) -> Session:
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
        assert recovery.recover() == []
        with hotset.cache(Samples(mapping, N), session="a") as cached:
            current_of(cached).source.dataset.make = None  # whoever reads the source fails
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


def test_what_persists_is_kept_however_long_no_job_comes_for_it(
    disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persisted(disk)
    reboot(runtime)
    old(monkeypatch)
    assert recovery.gc() == []
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        assert cached.stats().cached == N


def test_a_session_that_does_not_persist_is_gone_after_a_reboot(
    disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions.create("a", memory=0, spill=disk)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
    reboot(runtime)
    old(monkeypatch)
    assert sessions.sessions() == []
    assert len(recovery.recover()) == 1
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
        store_of(cached).invalidate()
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
        found = store_of(cached).segment.taken
    del cached
    assert found <= 4096


def test_what_was_kept_and_cannot_be_opened_now_stays(
    disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persisted(disk, kilobyte)
    reboot(runtime)
    plain = os.open

    def refusing(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".spill"):
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        with pytest.warns(HotsetWarning, match="for this job alone.*kept on disk.*Too many open files"):
            alone = hotset.cache(Samples(kilobyte, N), session="a")
        with alone:
            read_all(alone, kilobyte)
    with hotset.cache(Samples(kilobyte, N), session="a") as cached:
        assert cached.stats().cached == N
        read_all(cached, kilobyte)


def test_a_cache_that_cannot_be_opened_now_is_not_made_a_second_time(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions.create("a", memory=1 << 20)
    with hotset.cache(Samples(kilobyte, N), session="a") as cached:
        read_all(cached, kilobyte)
    plain, refused = os.open, 0

    def refusing(path: Any, *rest: Any, **more: Any) -> int:
        nonlocal refused
        if str(path).endswith(".cache") and not refused:
            refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        with pytest.warns(
            HotsetWarning, match="for this job alone.*cannot be opened now.*Too many open files"
        ):
            alone = hotset.cache(Samples(kilobyte, N), session="a")
        with alone:
            read_all(alone, kilobyte)
    assert refused
    assert [cache.cached for cache in report(session).caches] == [N]
    with hotset.cache(Samples(kilobyte, N), session="a") as cached:
        assert cached.stats().cached == N


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
    recovery.recover()
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


def test_who_waited_to_restore_a_session_does_not_make_it_again(
    disk: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions.create("a", memory=MIB, spill=disk, persist=True)
    reboot(runtime)
    made = []

    def late(names: list[str], patience: float) -> Any:
        monkeypatch.setattr("hotset.session.session_definition.NamedLocks", NamedLocks)
        assert sessions.sessions() == [session]
        made.append((runtime / session.file).stat().st_ino)
        return NamedLocks(names, patience)

    monkeypatch.setattr("hotset.session.session_definition.NamedLocks", late)
    assert sessions.sessions() == [session]
    assert made == [(runtime / session.file).stat().st_ino]


@pytest.mark.parametrize("first", ["the session", "its server"])
def test_a_server_that_begins_after_a_reboot_bounds_the_sessions_that_it_had(
    first: str, disk: str, runtime: Path
) -> None:
    session = sessions.create("a", memory=MIB, spill=disk, persist=True, server=50123)
    reboot(runtime)
    if first == "the session":
        assert sessions.sessions() == [session]
    servers.set_limit(50123, 1000)
    if first == "the session":
        assert recovery.recover() == []
    assert sessions.sessions() == [session]
    with open_quota(session) as book:
        assert book.left(book.enter(1)) == 1000


def places_of(runtime: Path, port: int) -> list[int]:
    """The sessions that a server's quota names."""
    folder = os.open(runtime, os.O_RDONLY)
    try:
        with contextlib.closing(Quota(folder, f"server-{port}.ledger")) as book:
            return sorted(book.members())
    finally:
        os.close(folder)


def test_a_session_whose_maker_died_leaves_its_servers_quota(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.set_limit(50123, MIB)
    session = sessions.create("a", memory=MIB, server=50123)

    def make() -> None:
        monkeypatch.setattr(sessions, "write_down", lambda *_: os._exit(0))
        sessions.create("b", memory=MIB, server=50123)

    in_child(make)
    assert len(places_of(runtime, 50123)) == 2
    recovery.gc()
    assert places_of(runtime, 50123) == [session.number]
    sessions.destroy(session)
    servers.drop(50123)


# Damaged quotas


def damage(path: Path, how: str) -> None:
    with path.open("r+b") as file:
        if how == "short":
            file.truncate(100)
        else:
            file.seek(HEADER_BYTES if how == "metadata" else 0)
            file.write(os.urandom(16 if how == "metadata" else 512))


@pytest.mark.parametrize("how", ["short", "overwritten"])
def test_a_damaged_ledger_is_removed_once_nobody_uses_it(how: str, runtime: Path) -> None:
    session = sessions.create("a", memory=MIB)
    cached = hotset.cache(Samples(kilobyte, N), session="a")
    read_all(cached, kilobyte)
    if how == "short":  # what is mapped goes with its file
        cached.close()
    damage(runtime / session.file, how)
    if how == "overwritten":
        before = sorted(os.listdir(runtime))
        assert recovery.gc() == []
        assert sorted(os.listdir(runtime)) == before
        read_all(cached, kilobyte)
        cached.close()
    told = recovery.gc()
    assert any(session.file in sentence and is_a_sentence(sentence) for sentence in told), told
    assert os.listdir(runtime) == []


@pytest.mark.parametrize("how", ["short", "overwritten", "metadata"])
def test_a_damaged_cache_of_a_session_is_removed_once_nobody_uses_it(how: str, runtime: Path) -> None:
    session = sessions.create("a", memory=MIB)
    cached = hotset.cache(Samples(kilobyte, N), session="a")
    read_all(cached, kilobyte)
    (file,) = [name for name in os.listdir(runtime) if name.endswith(".cache")]
    if how == "short":
        cached.close()
    damage(runtime / file, how)
    if how != "short":
        assert recovery.gc() == []
        read_all(cached, kilobyte)
        cached.close()
    other = hotset.cache(Samples(kilobyte, N + 1), session="a")
    told = recovery.gc()
    assert any(file in sentence and is_a_sentence(sentence) for sentence in told), told
    left = [name for name in os.listdir(runtime) if name.endswith(".cache")]
    assert len(left) == 1
    assert left != [file]
    other.close()
    sessions.destroy(session)


def test_a_server_begins_beside_its_damaged_ledger(runtime: Path) -> None:
    servers.set_limit(50052, MIB)
    session = sessions.create("a", memory=MIB, server=50052)
    damage(runtime / "server-50052.ledger", "short")
    recovery.recover()
    servers.set_limit(50052, 2 * MIB)
    recovery.recover()
    assert servers.limit(50052) == 2 * MIB
    sessions.destroy(session)
    servers.drop(50052)
    assert os.listdir(runtime) == []
