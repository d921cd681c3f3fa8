"""The throttled source: one link for all processes, whose schedule is exact under a clock that stands still.

Nothing here is timed. With a clock that stands still the k-th of equal requests ends at ``latency + k * size
/ bandwidth``, whoever made it, so every process's answers together must be exactly those times, each once.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import finish
from torch.utils.data import Dataset

import hotset
from benchmarks import throttle
from benchmarks.throttle import Counts, Throttle
from hotset.determinism.fingerprint.fingerprint import fingerprint
from hotset.store.locks import lock

SECOND = 10**9
LATENCY = 0.25
SIZE = 500
RATE = 1_000_000
EACH = SIZE * SECOND // RATE  # nanoseconds that a request takes of the link
REQUESTS = 200


def standing_still() -> int:
    return 0


def dying() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


class Watch:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0
        self.slept: list[float] = []

    def clock(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += round(seconds * SECOND)


def frozen(tmp_path: Path, **changes: Any) -> Throttle:
    standard: dict[str, Any] = {"bytes_per_second": RATE, "latency_seconds": LATENCY, "clock": standing_still}
    return Throttle(tmp_path / "link", **standard | changes)


def book(link: Throttle, gate: Any, answers: Any) -> None:
    gate.wait(60)
    answers.put([link.book(SIZE) for _ in range(REQUESTS)])


def book_for_ever(link: Throttle, begun: Any) -> None:
    while True:
        link.book(SIZE)
        begun.set()


def book_once(link: Throttle) -> None:
    link.book(SIZE)


@pytest.mark.parametrize(
    ("processes", "method"),
    [(1, "fork"), pytest.param(2, "spawn", marks=pytest.mark.chaos), (4, "fork")],
)
def test_any_number_of_processes_share_one_link(tmp_path: Path, processes: int, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    gate, answers = context.Event(), context.SimpleQueue()
    link = frozen(tmp_path)
    children = [context.Process(target=book, args=(link, gate, answers)) for _ in range(processes)]
    for child in children:
        child.start()
    gate.set()
    ends = sorted(end for _ in children for end in answers.get())
    finish(*children)
    # One request after the other without a gap, and one latency for all: they overlap.
    total = processes * REQUESTS
    assert ends == [LATENCY * SECOND + k * EACH for k in range(1, total + 1)]
    assert link.counts() == Counts(total, total * SIZE)


def test_threads_of_a_process_share_it_too(tmp_path: Path) -> None:
    link = frozen(tmp_path)
    ends: list[int] = []
    threads = [
        threading.Thread(target=lambda: ends.extend(link.book(SIZE) for _ in range(100))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == [LATENCY * SECOND + k * EACH for k in range(1, 401)]


def test_a_lone_reader_pays_the_latency_for_each_request(tmp_path: Path) -> None:
    watch = Watch()
    link = frozen(tmp_path, clock=watch.clock, sleep=watch.sleep)
    (tmp_path / "sample").write_bytes(bytes(range(250)) * 2)
    for _ in range(3):
        assert link.read(tmp_path / "sample") == bytes(range(250)) * 2
    assert watch.slept == pytest.approx([LATENCY + EACH / SECOND] * 3)


def test_a_pause_saves_nothing_up(tmp_path: Path) -> None:
    watch = Watch()
    link = frozen(tmp_path, clock=watch.clock)
    link.book(SIZE)
    watch.now = 60 * SECOND
    ends = [link.book(SIZE) for _ in range(3)]
    assert ends == [60 * SECOND + LATENCY * SECOND + k * EACH for k in (1, 2, 3)]


def test_what_arrived_meanwhile_is_not_slept_for(tmp_path: Path) -> None:
    slept: list[float] = []
    times = iter([0, 60 * SECOND])
    frozen(tmp_path, clock=times.__next__, sleep=slept.append).transfer(SIZE)
    assert slept == []


def test_a_process_killed_in_the_midst_of_booking_leaves_link_and_counts_whole(tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("fork")
    child = context.Process(target=book_once, args=(frozen(tmp_path, clock=dying),))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    link = frozen(tmp_path)
    assert link.counts() == Counts(0, 0)
    assert link.book(SIZE) == LATENCY * SECOND + EACH


def test_processes_killed_anywhere_leave_link_and_counts_whole(tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("fork")
    link = frozen(tmp_path)
    for k in range(8):
        begun = context.Event()
        child = context.Process(target=book_for_ever, args=(link, begun))
        child.start()
        assert begun.wait(60)
        time.sleep(k * 7e-4)
        child.kill()
        child.join(60)
    requests, size = link.counts()
    assert size == requests * SIZE
    # The schedule and the counts tell of the same requests, the last one with them.
    assert link.book(SIZE) == LATENCY * SECOND + (requests + 1) * EACH


def test_a_process_forked_in_the_midst_of_booking_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[int] = []

    def forking() -> int:
        if not children:
            children.append(os.fork())
            if children == [0]:
                signal.pause()
        return 0

    link = frozen(tmp_path, clock=forking)
    try:
        link.book(SIZE)
        assert link.book(SIZE) == LATENCY * SECOND + 2 * EACH
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_a_state_that_stays_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = frozen(tmp_path)
    monkeypatch.setattr(throttle, "_PATIENCE_SECONDS", 0.02)
    fd = os.open(tmp_path / "link", os.O_RDWR)
    try:
        assert lock(fd, 0, 0)
        with pytest.raises(TimeoutError, match="resume or end the process"):
            link.book(SIZE)
    finally:
        os.close(fd)
    assert link.counts() == Counts(0, 0)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_an_impossible_bandwidth_is_refused(tmp_path: Path, rate: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_second must"):
        frozen(tmp_path, bytes_per_second=rate)
    assert not (tmp_path / "link").exists()


@pytest.mark.parametrize("latency", [-0.1, float("inf"), float("nan")])
def test_an_impossible_latency_is_refused(tmp_path: Path, latency: float) -> None:
    with pytest.raises(ValueError, match="latency_seconds must"):
        frozen(tmp_path, latency_seconds=latency)


def test_bad_sizes_and_places_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    link = frozen(tmp_path)
    with pytest.raises(ValueError, match="-1 bytes"):
        link.book(-1)
    with pytest.raises(FileNotFoundError):
        link.read(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        frozen(tmp_path / "no folder")
    assert link.counts() == Counts(0, 0)


class Remote(Dataset[int]):
    """Samples that pass a link."""

    def __init__(self, link: Throttle) -> None:
        self.link = link

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        self.link.transfer(SIZE)
        return i


@pytest.mark.usefixtures("patient")
def test_a_cache_reads_each_sample_of_it_once(tmp_path: Path) -> None:
    link = frozen(tmp_path, latency_seconds=0.0, bytes_per_second=10**9, clock=time.monotonic_ns)
    with hotset.cache(Remote(link), memory="1MiB") as cached:
        before = link.counts().requests  # the samples that were looked at beforehand
        loader = hotset.DataLoader(cached, batch_size=5, shuffle=True, num_workers=2)
        for _ in range(2):
            assert sorted(i for batch in loader for i in batch.tolist()) == list(range(40))
        assert link.counts().requests - before == 40
        del loader


def test_requests_do_not_change_what_a_data_set_is(tmp_path: Path) -> None:
    link = frozen(tmp_path)
    before = fingerprint(Remote(link)), pickle.dumps(link)
    link.book(SIZE)
    assert (fingerprint(Remote(link)), pickle.dumps(link)) == before
    assert fingerprint(Remote(frozen(tmp_path, bytes_per_second=2 * RATE))) != before[0]
