"""NamedLocks: one at a time, whoever dies; bounded; and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import eventually

from hotset.errors import FolderError
from hotset.session.catalog import gc
from hotset.session.named_lock import LOCK_FILE, NamedLocks

A, B = "a" * 32, "b" * 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(folder))
    return folder


def fork(body: Callable[[], object]) -> int:
    """Run ``body`` in a child; its exit status is 0 if it returned something true."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if body() else 1
        os._exit(code)
    return pid


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def holder(told: Path, *names: str) -> Iterator[int]:
    """A process that has these turns until it is killed."""

    def hold() -> None:
        with NamedLocks(names, 60) as mine:
            told.write_text(str(mine))
            signal.pause()

    pid = fork(hold)
    try:
        assert eventually(lambda: told.exists() and told.read_text() == "True")
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        told.unlink()


def test_one_has_it_at_a_time_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    """Also who makes the file that another has just removed, and who finds its own gone again."""
    inside = tmp_path / "inside"

    def take_many() -> bool:
        for _ in range(150):
            with NamedLocks([A], 60) as mine:
                fd = os.open(inside, os.O_CREAT | os.O_EXCL)
                os.close(fd)
                inside.unlink()
                if not mine:
                    return False
        return True

    children = [fork(take_many) for _ in range(5)]
    assert [status(pid) for pid in children] == [0] * 5
    assert os.listdir(folder) == []


def test_waiting_is_bounded_and_another_name_is_another_turn(folder: Path, tmp_path: Path) -> None:
    with holder(tmp_path / "told", A):
        with NamedLocks([A], 0.1) as mine:
            assert not mine
        with NamedLocks([B, A], 0.1) as mine:
            assert not mine
        assert os.listdir(folder) == [LOCK_FILE], "what was had of several is given back"
        with NamedLocks([B], 0.1) as mine:
            assert mine


def test_a_killed_holders_turn_is_free(folder: Path, tmp_path: Path) -> None:
    with holder(tmp_path / "told", A) as pid:
        os.kill(pid, signal.SIGKILL)
        with NamedLocks([A], 60) as mine:
            assert mine
    assert os.listdir(folder) == []


def test_a_killed_holders_file_is_collected_and_a_living_ones_is_not(folder: Path, tmp_path: Path) -> None:
    with holder(tmp_path / "told", A) as pid:
        assert gc() == []
        assert os.listdir(folder) == [LOCK_FILE]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        (sentence,) = gc()
        assert LOCK_FILE in sentence
    assert os.listdir(folder) == []


def test_an_exception_ends_the_turn(folder: Path) -> None:
    with pytest.raises(KeyError), NamedLocks([A, B], 1):
        raise KeyError
    assert os.listdir(folder) == []


def test_a_forked_child_has_no_turn_and_ends_none(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with NamedLocks([A], 1) as mine:
        assert mine

        def leave() -> bool:
            with NamedLocks([A], 0) as its:
                return not its

        assert status(fork(leave)) == 0
        # A child that leaves the parent's block itself, as an exception in it does.
        pid = os.fork()
        if pid == 0:
            break_out = True
        else:
            break_out = False
            assert status(pid) == 0
            assert os.listdir(folder) == [LOCK_FILE]
            with NamedLocks([A], 0) as its:
                assert not its
    if break_out:
        os._exit(0)
    assert os.listdir(folder) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_ours_is_told(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(FolderError), NamedLocks([A], 1):
        pass
    folder.chmod(0o700)
