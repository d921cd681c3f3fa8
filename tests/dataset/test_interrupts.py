"""Forks and interrupts at any instant: no child hangs on a lock, no interrupted process keeps one."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import often
from programs import Programs
from torch.utils.data import Dataset, IterableDataset

import hotset

COMMON = """
import gc
import os
import signal
import sys
import threading
import time
import warnings

import torch
from helpers import often
from stores import store_of
from torch.utils.data import Dataset

import hotset
from hotset.session import sessions

warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks in a process with threads
torch.set_num_threads(3)
N = 200


class Squares(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.full((512,), float(i * i))


def wrong(samples, indices):
    return [i for i, s in zip(indices, samples) if not torch.equal(s, Squares()[i])]
"""

FORKS = (
    COMMON
    + """
sessions.create("one", memory=16 << 20)
cached = hotset.cache(Squares(), session="one")
indices = list(range(0, N, 7))
over = threading.Event()


def read():
    torch.set_num_threads(1)
    while not over.is_set():
        assert wrong(cached.__getitems__(indices), indices) == []


def children():
    for number in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # which ends a child that hangs
            torch.set_num_threads(1)
            mine = [(i + number) % N for i in indices]
            os._exit(len(wrong(cached.__getitems__(mine), mine)))
        yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


readers = [threading.Thread(target=read) for _ in range(3)]
for reader in readers:
    reader.start()
try:
    bad = [status for status in children() if status]
finally:
    over.set()
for reader in readers:
    reader.join()
print(bad)
"""
)

INTERRUPTS = (
    COMMON
    + """
class Interrupt(BaseException):
    pass


armed = False


def interrupt(number, frame):
    if armed:
        raise Interrupt


def many(count, body):
    '''Interrupt the body at so many instants; what it says itself comes out.'''
    global armed
    signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    while interrupted < count:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + 0.003 * (interrupted % 97) / 97)
            armed = True
            body()
            armed = False
        except Interrupt as error:
            armed = False
            interrupted += 1
            kept.append(error)  # as a notebook does, with all its frames
            del kept[:-20]
    signal.setitimer(signal.ITIMER_REAL, 0)


def read():
    for batch in loader:
        pass


def fill():
    cached.clear()
    cached.__getitems__(list(range(N)))


def join():
    with hotset.cache(Squares(), session="two") as other:
        other[3]


def make():
    made = sessions.create(None, memory=1 << 20)
    sessions.destroy(made)


kept = []
one = sessions.create("one", memory=16 << 20)
two = sessions.create("two", memory=16 << 20)
cached = hotset.cache(Squares(), session="one")
loader = hotset.DataLoader(cached, batch_size=16)
for body in (fill, read, join, make):
    many(int(sys.argv[1]), body)

# Another process can have every lock, at once; nothing is held, and nothing is wrong.
pid = os.fork()
if pid == 0:
    signal.alarm(100)
    with store_of(cached).participant.short_lock() as held, sessions.one_at_a_time():
        os._exit(0 if held else 1)
print("locks", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print("wrong", wrong(cached.__getitems__(list(range(N))), range(N)), cached.check())
print("cached", cached.stats().cached)
print("threads", torch.get_num_threads())
freed = sessions.destroy(one)
print("freed", freed >= N * 512 * 4)
sessions.destroy(two)
"""
)


INTERRUPTED_FORK = (
    """
import os
import sys

armed = False


def interrupt(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.endswith("locks.py") and code.co_name == "_after_fork_in_child":
        sys.setprofile(None)
        raise KeyboardInterrupt  # which Python drops there


os.register_at_fork(after_in_child=lambda: sys.setprofile(interrupt if armed else None))
"""
    + COMMON
    + """
cached = hotset.cache(Squares())
cached.__getitems__(list(range(9)))
mine = store_of(cached).participant
slot, armed = mine.slot, True
with mine.short_lock():
    pid = os.fork()
    if pid == 0:
        with mine.short_lock() as held:
            os._exit(2 * held + (mine.slot == slot))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
)


def run(programs: Programs, program: str, tmp_path: Path, *arguments: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(program)
    done = programs.run([str(path), *arguments], tmp_path, {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_forked_while_threads_read_reads_too(
    programs: Programs, runtime: Path, tmp_path: Path
) -> None:
    assert run(programs, FORKS, tmp_path, str(often(30, 200))) == "[]\n"


def test_hundreds_of_interrupts_leave_nothing_held(programs: Programs, runtime: Path, tmp_path: Path) -> None:
    """Like Ctrl-C in a notebook, which keeps each exception with all its frames."""
    said = run(programs, INTERRUPTS, tmp_path, str(often(50, 200))).splitlines()
    assert said == ["locks 0", "wrong [] []", "cached 200", "threads 3", "freed True"]


def test_a_child_in_which_an_interrupt_came_first_has_locks_of_its_own(
    programs: Programs, runtime: Path, tmp_path: Path
) -> None:
    """With its parent's it would claim, and store, as if it were the parent."""
    assert run(programs, INTERRUPTED_FORK, tmp_path) == "0\n"


class Late(Exception):
    """What an alarm raises."""


def alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


@pytest.fixture
def raise_late() -> Iterator[Callable[[int], Callable[[], bool]]]:
    """Let the n-th alarm from now on raise; what it returns says whether that has come."""

    def set_alarm(number: int) -> Callable[[], bool]:
        alarms = itertools.count(1)
        raised = []

        def count(signum: int, frame: object) -> None:
            if next(alarms) == number:
                raised.append(number)
                raise Late

        signal.signal(signal.SIGALRM, count)
        return lambda: bool(raised)

    before = signal.getsignal(signal.SIGALRM)
    yield set_alarm
    signal.signal(signal.SIGALRM, before)


def doubled(row: torch.Tensor) -> torch.Tensor:
    alarm()
    return row * 2


def noisy(row: torch.Tensor) -> torch.Tensor:
    alarm()
    return row + torch.rand(())


class Squares(Dataset[Any]):
    """In its reading, and in both parts of its chain, an alarm may come."""

    def __init__(self) -> None:
        self.transforms = [doubled, noisy]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        alarm()
        row = torch.full((4,), float(i * i))
        for transform in self.transforms:
            row = transform(row)
        return row


class Letters(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        for letter in "abcdef":
            alarm()
            yield letter


@pytest.mark.parametrize(("make", "step"), [(Squares, often(19, 1)), (Letters, 1)])
def test_what_the_handler_of_a_signal_raises_is_not_taken_for_an_error_of_the_dataset(
    make: Callable[[], Any], step: int, raise_late: Callable[[int], Callable[[], bool]]
) -> None:
    """It ends planning, and no transform is random because of it."""
    for number in range(1, 1000, step):
        has_come = raise_late(number)
        try:
            hotset.cache(make(), memory="1MiB").close()
        except Late:
            continue
        assert not has_come()
        break
    assert number < 981
