"""NamedLocks: one at a time, whoever dies; bounded; and nothing left behind."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from helpers import descriptors
from kills import child, ended, in_child, kill, lingering

from hotset.errors import FolderError
from hotset.session.catalog import gc
from hotset.session.named_lock import LOCK_FILE, NamedLocks

A, B = "a" * 32, "b" * 32


pytestmark = pytest.mark.usefixtures("runtime")


def holder(*names: str) -> AbstractContextManager[int]:
    """A process that has these locks until it is killed."""

    def hold() -> NamedLocks:
        locks = NamedLocks(names, 60)
        assert locks.__enter__()
        return locks

    return lingering(hold)


def test_one_has_it_at_a_time_and_nothing_is_left(runtime: Path, tmp_path: Path) -> None:
    """Also who makes the file that another has just removed, and who finds its own gone again."""
    inside = tmp_path / "inside"

    def take_many() -> None:
        for _ in range(150):
            with NamedLocks([A], 60) as mine:
                fd = os.open(inside, os.O_CREAT | os.O_EXCL)
                os.close(fd)
                inside.unlink()
                assert mine

    children = [child(take_many) for _ in range(5)]
    assert [ended(pid) for pid in children] == [0] * 5
    assert os.listdir(runtime) == []


def test_waiting_is_bounded_and_another_name_is_another_lock(runtime: Path) -> None:
    with holder(A):
        with NamedLocks([A], 0.1) as mine:
            assert not mine
        with NamedLocks([B, A], 0.1) as mine:
            assert not mine
        assert os.listdir(runtime) == [LOCK_FILE], "what was had of several is given back"
        with NamedLocks([B], 0.1) as mine:
            assert mine


def test_a_killed_holders_lock_is_free(runtime: Path) -> None:
    with holder(A) as pid:
        kill(pid)
        with NamedLocks([A], 60) as mine:
            assert mine
    assert os.listdir(runtime) == []


def test_a_killed_holders_file_is_collected_and_a_living_ones_is_not(runtime: Path) -> None:
    with holder(A) as pid:
        assert gc() == []
        assert os.listdir(runtime) == [LOCK_FILE]
        kill(pid)
        (sentence,) = gc()
        assert LOCK_FILE in sentence
    assert os.listdir(runtime) == []


def test_an_exception_ends_the_lock(runtime: Path) -> None:
    with pytest.raises(KeyError), NamedLocks([A, B], 1):
        raise KeyError
    assert os.listdir(runtime) == []


def test_a_forked_child_has_no_lock_and_ends_none(runtime: Path) -> None:
    before = descriptors()
    with NamedLocks([A], 1) as mine:
        assert mine

        def leave() -> None:
            with NamedLocks([A], 0) as its:
                assert not its

        in_child(leave)
        # A child that leaves the parent's block itself, as an exception in it does.
        pid = os.fork()
        if pid == 0:
            break_out = True
        else:
            break_out = False
            assert ended(pid) == 0
            assert os.listdir(runtime) == [LOCK_FILE]
            with NamedLocks([A], 0) as its:
                assert not its
    if break_out:
        os._exit(0)
    assert os.listdir(runtime) == []
    assert descriptors() == before


def test_a_folder_that_is_not_ours_is_told(runtime: Path) -> None:
    runtime.chmod(0o755)
    with pytest.raises(FolderError), NamedLocks([A], 1):
        pass
    runtime.chmod(0o700)
