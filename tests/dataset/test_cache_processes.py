"""One copy per machine: processes share a cache, fill it together, die, stop, and outlive it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Walkers, equal_batches, eventually, finish, in_threads, often, rarely
from kills import child, ended, gone
from live import draw_all
from samples import constant_row, image_and_label, mapping, ragged
from sources import Counting, ReadLog, Samples, Stalling
from torch.utils.data import DataLoader, get_worker_info

import hotset
from hotset.session import recovery

N = 120


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up a stopped process soon; no test here depends on how soon."""
    monkeypatch.setattr("hotset.store.fill._PATIENCE_SECONDS", 0.3)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("order", rarely(["sequential", "shuffled"], "sequential"))
def test_four_processes_in_one_order_read_each_sample_once(order: str, tmp_path: Path) -> None:
    """Without claims four of them read it 3.99 times."""
    log = ReadLog(tmp_path / "reads")
    indices = list(range(N))
    if order == "shuffled":
        random.Random(4).shuffle(indices)
    with hotset.cache(Counting(mapping, N, log, seconds=0.002)) as cached:
        log.reset()
        walkers = Walkers(cached, [indices] * 4, mapping)
        walkers.go()
        walkers.finish()
        assert set(log.counts().values()) == {1}
        assert log.total() >= N - 16
        assert cached.stats().cached == N
        assert cached.check() == []


@pytest.mark.usefixtures("patient")
def test_four_loaders_in_one_order_read_each_sample_once(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    context = multiprocessing.get_context("fork")
    with hotset.cache(Counting(image_and_label, N, log, seconds=0.002)) as cached:
        log.reset()
        processes = [context.Process(target=_one_epoch, args=(cached,)) for _ in range(4)]
        for process in processes:
            process.start()
        finish(*processes)
        assert set(log.counts().values()) == {1}
        assert cached.stats().cached == N


def _one_epoch(cached: Any) -> None:
    expected = list(DataLoader(Samples(image_and_label, N), batch_size=8))
    equal_batches(list(hotset.DataLoader(cached, batch_size=8, num_workers=1)), expected)


def test_all_is_cached_right_after_the_first_epoch_unlike_mindspores_late_writes() -> None:
    for live in (False, True):
        with hotset.cache(Samples(ragged, N), transform=[draw_all] if live else None) as cached:
            for _ in hotset.DataLoader(cached, batch_size=7, num_workers=2, collate_fn=list):
                pass
            assert cached.stats().cached == N
            assert cached.check() == []


@pytest.mark.parametrize("make", [constant_row, ragged])
def test_no_reader_sees_a_torn_sample_while_others_fill_unlike_stocaching(make: Callable[[int], Any]) -> None:
    orders = []
    for seed in range(3):
        order = list(range(N)) * 4
        random.Random(seed).shuffle(order)
        orders.append(order)
    with hotset.cache(Samples(make, N)) as cached:
        walkers = Walkers(cached, orders, make)
        walkers.go()
        walkers.finish()
        assert cached.check() == []


def test_ten_threads_share_a_cache() -> None:
    with hotset.cache(Samples(mapping, N)) as cached:

        def read(number: int) -> None:
            order = [random.Random(number).randrange(N) for _ in range(often(100, 500))]
            for i in order:
                equal_batches(cached[i], mapping(i))

        in_threads(10, read)
        assert cached.check() == []


def test_two_threads_that_miss_one_index_both_get_it_unlike_stocaching(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(mapping, N, log, seconds=0.01)) as cached:
        log.reset()

        def read(_: int) -> None:
            for i in range(40, 60):
                equal_batches(cached[i], mapping(i))

        in_threads(4, read)
        assert cached.stats().cached >= 20
        assert cached.check() == []


# Death and standstill


@pytest.mark.usefixtures("patient")
def test_a_process_killed_while_it_reads_a_sample_holds_up_no_other(tmp_path: Path) -> None:
    source = Stalling(mapping, N, 51, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        claimant = Walkers(cached, [[51]], mapping)
        claimant.go()
        assert source.stalled_pid() == claimant.processes[0].pid
        others = Walkers(cached, [range(N), range(N)], mapping)
        others.go()
        os.kill(source.stalled_pid(), signal.SIGKILL)
        claimant.processes[0].join()
        others.finish()
        assert cached.stats().cached == N
        assert cached.check() == []


def test_the_claim_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    source = Stalling(mapping, N, 51, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        claimant = Walkers(cached, [[51]], mapping)
        claimant.go()
        os.kill(source.stalled_pid(), signal.SIGKILL)
        claimant.processes[0].join()
        for _ in range(2):
            equal_batches(cached[51], mapping(51))
        assert cached.stats().cached >= 1
        before = cached.stats()
        equal_batches(cached[51], mapping(51))
        assert cached.stats().hits == before.hits + 1
        assert cached.check() == []


@pytest.mark.usefixtures("impatient")
def test_a_stopped_process_with_a_claim_holds_up_others_for_a_bounded_time(tmp_path: Path) -> None:
    source = Stalling(mapping, N, 51, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        claimant = Walkers(cached, [[51, 52]], mapping)
        claimant.go()
        pid = source.stalled_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            others = Walkers(cached, [range(N), range(N)], mapping)
            others.go()
            others.finish()
            equal_batches(cached[51], mapping(51))
        finally:
            source.disarm()
            os.kill(pid, signal.SIGCONT)
        # It goes on where it was, and must not undo or tear what was done meanwhile.
        claimant.finish()
        for i in range(N):
            equal_batches(cached[i], mapping(i))
        assert cached.stats().cached == N
        assert cached.check() == []


@pytest.mark.usefixtures("impatient")
def test_a_loader_continues_beside_a_stopped_process_with_a_claim(tmp_path: Path) -> None:
    source = Stalling(image_and_label, N, 51, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        claimant = Walkers(cached, [[51]], image_and_label)
        claimant.go()
        pid = source.stalled_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            for workers in (0, 2):
                loader = hotset.DataLoader(cached, batch_size=8, num_workers=workers)
                equal_batches(list(loader), list(DataLoader(Samples(image_and_label, N), batch_size=8)))
        finally:
            source.disarm()
            os.kill(pid, signal.SIGCONT)
        claimant.finish()


def test_fillers_killed_at_any_moment_leave_a_clean_cache() -> None:
    with hotset.cache(Samples(constant_row, N)) as cached:
        chance = random.Random(11)
        for _ in range(8):
            order = list(range(N))
            chance.shuffle(order)
            victims = Walkers(cached, [order, order[::-1]], constant_row)
            victims.go()
            time.sleep(chance.random() * 0.02)
            for process in victims.processes:
                process.kill()
                process.join()
            assert cached.check() == []
            for i in order[:20]:
                equal_batches(cached[i], constant_row(i))
        survivors = Walkers(cached, [range(N)] * 2, constant_row)
        survivors.go()
        survivors.finish()
        assert cached.stats().cached == N
        assert cached.check() == []


class KillsItsMaker:
    """Kills the process that started a worker, while the worker starts."""

    def __init__(self, maker: int, told: Path) -> None:
        self.maker = maker
        self.told = told

    def __call__(self, worker: int) -> None:
        self.told.write_text(str(os.getpid()))
        os.kill(self.maker, signal.SIGKILL)
        assert eventually(lambda: gone(self.maker))


@pytest.mark.parametrize("method", rarely(["fork", "spawn", "forkserver"], "spawn", "forkserver"))
def test_a_worker_ends_if_its_parent_is_killed_as_it_starts(method: str, tmp_path: Path) -> None:
    """torch's own worker then takes the process that adopts it for its parent, and waits for ever."""
    told = tmp_path / "worker"

    def job() -> None:
        cached = hotset.cache(Samples(mapping, 8), transform=[live])
        begins = KillsItsMaker(os.getpid(), told)
        context = multiprocessing.get_context(method)
        loader = hotset.DataLoader(
            cached, batch_size=4, num_workers=1, worker_init_fn=begins, multiprocessing_context=context
        )
        for _ in loader:
            pass

    assert ended(child(job)) == -signal.SIGKILL
    worker = int(told.read_text())
    ends = eventually(lambda: gone(worker))
    if not ends:
        os.kill(worker, signal.SIGKILL)
    assert ends
    assert recovery.gc(), "what a killed process leaves is found"


def test_a_worker_with_unread_batches_ends_if_its_parent_is_killed(tmp_path: Path) -> None:
    """Its queue's thread waits for room in a pipe, whose other end the worker itself has open as well."""
    told = tmp_path / "worker"

    def job() -> None:
        cached = hotset.cache(Samples(mapping, 64), transform=[Bulky(told)])
        batches = iter(hotset.DataLoader(cached, batch_size=1, num_workers=1, prefetch_factor=16))
        next(batches)
        assert eventually(lambda: len(told.read_text().split()) > 10)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(child(job)) == -signal.SIGKILL
    worker = int(told.read_text().split()[-1])
    ends = eventually(lambda: gone(worker))
    if not ends:
        os.kill(worker, signal.SIGKILL)
    assert ends
    assert recovery.gc(), "what a killed process leaves is found"


@pytest.mark.parametrize("method", rarely(["fork", "spawn", "forkserver"], "spawn", "forkserver"))
def test_a_worker_that_reads_ends_if_its_parent_is_killed(method: str, tmp_path: Path) -> None:
    told = tmp_path / "worker"
    count = 2 if method == "fork" else 1  # others import torch

    def job() -> None:
        cached = hotset.cache(Samples(mapping, 8), transform=[Hanging(told)])
        context = multiprocessing.get_context(method)
        batches = hotset.DataLoader(cached, batch_size=4, num_workers=count, multiprocessing_context=context)
        held = iter(batches)
        assert eventually(lambda: told.exists() and len(told.read_text().split()) == count)
        os.kill(os.getpid(), signal.SIGKILL)
        del held

    assert ended(child(job)) == -signal.SIGKILL
    workers = [int(pid) for pid in told.read_text().split()]
    ends = eventually(lambda: all(map(gone, workers)))
    for worker in workers if not ends else ():
        os.kill(worker, signal.SIGKILL)
    assert ends
    assert recovery.gc(), "what a killed process leaves is found"


@hotset.nondeterministic
class Hanging:
    """In a worker, reading waits for a disk that is gone."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __call__(self, sample: Any) -> Any:
        if get_worker_info() is not None:
            with self.told.open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(1000)
        return sample


@hotset.nondeterministic
def live(sample: Any) -> Any:
    return sample


@hotset.nondeterministic
class Bulky:
    """Makes each sample large, and of a kind that is sent through a pipe."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __call__(self, sample: Any) -> Any:
        with self.told.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return "x" * 300_000
