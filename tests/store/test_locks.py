"""Byte locks: who excludes whom, and what becomes of a lock when a process forks, closes or dies."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from helpers import in_threads
from kills import kill, lingering

from hotset.store import locks
from hotset.store.locks import is_locked, lock, reopen, try_lock, unlock


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("locks")
    yield fd
    os.close(fd)


@pytest.fixture
def other(fd: int) -> Iterator[int]:
    other = reopen(fd)
    yield other
    os.close(other)


def test_two_descriptions_in_one_process_exclude_each_other(fd: int, other: int) -> None:
    assert try_lock(fd, 7)
    assert not try_lock(other, 7)
    assert not try_lock(other, 7, shared=True)
    unlock(fd, 7)
    assert try_lock(other, 7)


def test_only_the_byte_asked_for_is_locked(fd: int, other: int) -> None:
    assert try_lock(fd, 7)
    assert not try_lock(other, 7)
    assert try_lock(other, 6)
    assert try_lock(other, 8)
    unlock(fd, 6)
    assert is_locked(fd, 6)


def test_a_byte_far_beyond_the_end_of_the_file_can_be_locked(fd: int, other: int) -> None:
    assert try_lock(fd, 1 << 40)
    assert not try_lock(other, 1 << 40)
    assert try_lock(other, 0)


def test_shared_locks_go_together_and_shut_out_an_exclusive_one(fd: int, other: int) -> None:
    assert try_lock(fd, 0, shared=True)
    assert try_lock(other, 0, shared=True)
    assert not try_lock(other, 0)
    unlock(fd, 0)
    assert try_lock(other, 0)


def test_is_locked_sees_others_but_not_itself(fd: int, other: int) -> None:
    assert not is_locked(fd, 3)
    assert try_lock(fd, 3)
    assert not is_locked(fd, 3)
    assert is_locked(other, 3)
    assert try_lock(fd, 3, shared=True)
    assert is_locked(other, 3)
    unlock(fd, 3)
    assert not is_locked(other, 3)


def test_unlock_leaves_another_descriptions_lock_alone(fd: int, other: int) -> None:
    assert try_lock(fd, 3)
    unlock(other, 3)
    assert is_locked(other, 3)


def test_closing_another_descriptor_of_the_file_drops_nothing(fd: int, other: int) -> None:
    assert try_lock(fd, 1)
    os.close(reopen(fd))
    os.close(os.dup(fd))
    assert is_locked(other, 1)


def test_a_killed_holder_releases(fd: int) -> None:
    def hold() -> None:
        own = reopen(fd)
        assert try_lock(own, 5)

    with lingering(hold) as pid:
        assert not try_lock(fd, 5)
        kill(pid)
        assert try_lock(fd, 5)


def test_a_forked_child_that_closes_its_copy_does_not_release_the_parents(fd: int, other: int) -> None:
    assert try_lock(fd, 5)
    with lingering(lambda: os.close(fd)):
        assert is_locked(other, 5)
    assert is_locked(other, 5)


def test_a_forked_copy_keeps_the_lock_after_the_holder_is_gone(fd: int) -> None:
    holder = reopen(fd)
    assert try_lock(holder, 5)
    with lingering(lambda: None) as pid:
        os.close(holder)
        assert is_locked(fd, 5)
        kill(pid)
        assert not is_locked(fd, 5)


def test_a_forked_child_is_not_excluded_by_the_description_it_shares(fd: int) -> None:
    assert try_lock(fd, 5)

    def take() -> None:
        assert try_lock(fd, 5)

    with lingering(take):
        pass


def test_pauses_double_up_to_the_longest_and_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(locks, "time", clock)
    pauses = locks.Pauses(10.0, first=1.0, longest=3.0)
    while pauses.pause():
        assert not pauses.are_over or sum(slept) == 10.0
    assert slept == [1.0, 2.0, 3.0, 3.0, 1.0]
    assert pauses.are_over


def test_a_stopped_holder_is_not_waited_for_past_the_deadline(fd: int) -> None:
    def hold() -> None:
        assert try_lock(reopen(fd), 5)

    with lingering(hold) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert not lock(fd, 5, timeout=0.05)
        assert not lock(fd, 5, timeout=0)
        assert lock(fd, 6, timeout=0)


def test_lock_gets_the_byte_when_the_holder_lets_go(fd: int) -> None:
    def hold() -> None:
        own = reopen(fd)
        assert try_lock(own, 5)
        signal.signal(signal.SIGUSR1, lambda *_: unlock(own, 5))

    with lingering(hold) as pid:
        assert not lock(fd, 5, timeout=0)
        os.kill(pid, signal.SIGUSR1)
        assert lock(fd, 5, timeout=60)


def test_no_two_processes_are_ever_in_the_locked_section_together(fd: int) -> None:
    # Each adds 1 with a read, a pause and a write; a lost update shows as a sum that is too small.
    # They start together, when the last copy of the pipe's other end closes.
    os.ftruncate(fd, 8)
    start, hold_back = os.pipe()
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(hold_back)
                own = reopen(fd)
                os.read(start, 1)
                for _ in range(200):
                    assert lock(own, 100, timeout=60)
                    count = int.from_bytes(os.pread(own, 8, 0), "little")
                    os.sched_yield()
                    os.pwrite(own, (count + 1).to_bytes(8, "little"), 0)
                    unlock(own, 100)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    os.close(hold_back)
    os.close(start)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert int.from_bytes(os.pread(fd, 8, 0), "little") == 800


def test_reopen_is_for_reading_and_writing_and_not_inherited(fd: int, other: int) -> None:
    assert other != fd
    assert os.fstat(other).st_ino == os.fstat(fd).st_ino
    assert not os.get_inheritable(other)
    assert os.pwrite(other, b"x", 0) == 1
    assert os.pread(other, 1, 0) == b"x"


def test_reopen_works_on_a_file_that_was_unlinked(tmp_path: object) -> None:
    fd = os.open(f"{tmp_path}/gone", os.O_RDWR | os.O_CREAT)
    os.unlink(f"{tmp_path}/gone")
    again = reopen(fd)
    assert try_lock(fd, 0)
    assert not try_lock(again, 0)
    os.close(fd)
    os.close(again)


def test_what_is_not_contention_is_raised(fd: int) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        try_lock(fd, -1)
    closed = reopen(fd)
    os.close(closed)
    for call in (try_lock, unlock, is_locked):
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            call(closed, 0)
    with pytest.raises(FileNotFoundError):
        reopen(closed)


class Interrupt(BaseException):
    pass


# After torch.compile, of another test, 3.14 calls __enter__ so that an interrupt may come before the block.
@pytest.mark.skipif(sys.version_info[:2] == (3, 14), reason="python/cpython#148874, mended in 3.15")
@pytest.mark.parametrize("shared", [False, True])
def test_a_block_that_is_interrupted_at_any_instant_leaves_nothing_locked(shared: bool) -> None:
    """Looked at after each interrupt, while its exception, with all frames, is still there.

    The thread opens its descriptor before: an interrupt between an open and the assignment of what
    it gave would leave that one descriptor behind.
    """
    fd = os.memfd_create("test")
    file = locks.FileLock(lambda: fd)
    file.thread()
    armed = False

    def interrupt(*_: object) -> None:
        if armed:
            raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    left = []
    try:
        for number in range(1000):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 2e-4 + 1e-6 * (number % 83))
                while True:
                    with locks.Held(file.thread(), 5, shared=shared) as held:
                        assert held
            except Interrupt:
                armed = False
                if locks.is_locked(fd, 5):
                    left.append(number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        file.close()
        os.close(fd)
    assert left == []


def test_threads_exclude_each_other_and_a_forked_child_unlocks_nothing() -> None:
    fd = os.memfd_create("test")
    file = locks.FileLock(lambda: fd)
    inside = most = 0

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(200):
            with locks.Held(file.thread(), 5, patience=60) as held:
                assert held
                inside += 1
                most = max(most, inside)
                inside -= 1

    in_threads(4, work)
    assert most == 1
    with locks.Held(file.thread(), 5):
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert locks.is_locked(fd, 5)
    if not pid:  # which has left the block
        os._exit(0 if locks.is_locked(fd, 5) else 1)
    assert not locks.is_locked(fd, 5)
    file.close()
    os.close(fd)
