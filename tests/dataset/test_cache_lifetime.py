"""The life of a cache: pickled, inherited, orphaned, counted, cleared and closed."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Walkers, difference, equal_batches, eventually, rarely, recorded
from kills import gone, in_child
from live import draw_all
from samples import kilobyte, mapping, number, ragged
from sources import Counting, ReadLog, Samples
from torch.utils.data import DataLoader

import hotset

N = 120


# Pickling


@pytest.mark.parametrize("method", rarely(["fork", "spawn", "forkserver"], "spawn"))
def test_a_child_shares_the_cache_however_it_is_started(method: str, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(mapping, 40, log)) as cached:
        for i in range(20):
            cached[i]
        log.reset()
        before = cached.stats()
        walkers = Walkers(cached, [range(40)], mapping, method)
        walkers.go()
        walkers.finish()
        assert set(log.counts()) <= set(range(20, 40))
        assert len(log.counts()) >= 4
        assert max(log.counts().values()) == 1
        log.reset()
        for i in range(40):
            equal_batches(cached[i], mapping(i))
        assert log.total() == 0  # what the child filled is a hit here
        after = cached.stats()
        assert (after.hits - before.hits) + (after.misses - before.misses) == 80
        assert cached.check() == []


def test_a_pickled_copy_in_the_same_process_is_the_same_cache(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(mapping, 20, log), transform=[draw_all]) as cached:
        for i in range(20):
            cached[i]
        log.reset()
        with pickle.loads(pickle.dumps(cached)) as twin:
            assert len(twin) == 20
            for i in range(20):
                equal_batches(twin[i]["sample"]["sample"]["sample"], mapping(i))
            assert twin.stats().cached == 20
        assert log.total() == 0
        equal_batches(cached[3]["sample"]["sample"]["sample"], mapping(3))


def _warned(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    with recorded() as caught:
        result = action()
    assert all(issubclass(w.category, hotset.HotsetWarning) for w in caught)
    return result, [str(w.message) for w in caught]


def _read_all_twice(data: bytes, make: Callable[[int], Any]) -> Any:
    cached = pickle.loads(data)
    for _ in range(2):
        for i in range(len(cached)):
            equal_batches(cached[i], make(i))
    return cached


def test_a_copy_unpickled_after_its_owners_death_is_an_empty_cache_with_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "cache.pickle"

    def owner() -> None:
        cached = hotset.cache(Samples(mapping, 20))
        for i in range(20):
            cached[i]
        file.write_bytes(pickle.dumps(cached))
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        owner()
    os.waitpid(pid, 0)
    cached, said = _warned(lambda: _read_all_twice(file.read_bytes(), mapping))
    assert len(said) == 1, said
    assert said[0].rstrip().endswith(".")
    # Its loader works as well, and says no more.
    batches, said = _warned(lambda: list(hotset.DataLoader(cached, batch_size=4, num_workers=2)))
    equal_batches(batches, list(DataLoader(Samples(mapping, 20), batch_size=4)))
    assert said == []
    assert cached.check() == []
    cached.close()
    hotset.cache(Samples(number, 5)).close()  # the next start sweeps what the owner has left


def test_a_copy_unpickled_after_close_is_an_empty_cache_with_one_warning() -> None:
    cached = hotset.cache(Samples(mapping, 20))
    for i in range(20):
        cached[i]
    data = pickle.dumps(cached)
    cached.close()
    del cached
    gc.collect()
    again, said = _warned(lambda: _read_all_twice(data, mapping))
    assert len(said) == 1, said
    again.close()


def test_the_cache_of_a_killed_owner_is_freed_by_the_next_start(runtime_folder: Path) -> None:
    pid = os.fork()
    if pid == 0:
        cached = hotset.cache(Samples(mapping, 20))
        cached[3]
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    hotset.cache(Samples(number, 5)).close()
    assert [path.name for path in runtime_folder.rglob("*") if path.is_file()] == []


def _orphan(cached: Any, log: ReadLog, ready: Path, done: Path) -> None:
    """Read on after the parent's death, report what was wrong and what came from the source, and end."""
    parent = os.getppid()
    cached[0]
    ready.write_text(str(os.getpid()))
    eventually(lambda: os.getppid() != parent, 60)
    wrong = [i for i in range(40) if difference(cached[i], mapping(i))]
    part = done.with_suffix(".part")
    part.write_text(json.dumps([wrong, sorted(log.order())]))
    part.rename(done)
    os._exit(0)


def test_children_of_a_killed_owner_keep_the_cache(tmp_path: Path) -> None:
    """The kernel keeps shared memory for as long as a process maps it."""
    log = ReadLog(tmp_path / "reads")
    ready, done = tmp_path / "ready", tmp_path / "done"
    owner = os.fork()
    if owner == 0:
        cached = hotset.cache(Counting(mapping, 40, log))
        for i in range(30):
            cached[i]
        log.reset()
        if os.fork() == 0:
            _orphan(cached, log, ready, done)
        time.sleep(600)
    assert eventually(ready.exists, 60)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert eventually(done.exists, 60)
    wrong, read = json.loads(done.read_text())
    assert wrong == []
    assert set(read) <= set(range(30, 40))
    assert eventually(lambda: gone(int(ready.read_text())))
    hotset.cache(Samples(number, 5)).close()  # the next start sweeps what the two have left


def test_a_child_that_ends_leaves_its_parents_cache(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(mapping, 20, log)) as cached:
        for i in range(20):
            cached[i]
        log.reset()

        def child() -> None:
            cached[1]
            cached.close()

        in_child(child)
        walkers = Walkers(cached, [range(20)], mapping)
        walkers.go()
        walkers.finish()
        for i in range(20):
            equal_batches(cached[i], mapping(i))
        assert log.total() == 0


# Counters


def test_stats_count_over_all_processes() -> None:
    with hotset.cache(Samples(kilobyte, N)) as cached:
        start = cached.stats()
        assert (start.cached + start.uncached, start.spilled) == (N, 0)
        walkers = Walkers(cached, [range(0, N, 2), range(1, N, 2)], kilobyte)
        walkers.go()
        walkers.finish()
        middle = cached.stats()
        assert (middle.hits - start.hits) + (middle.misses - start.misses) == N
        assert N - 16 <= middle.misses - start.misses <= N
        assert (middle.cached, middle.uncached, middle.spilled) == (N, 0, 0)
        assert N * 1000 <= middle.bytes <= N * (1000 + 64 + 8) + 4096
        assert middle.fill_seconds > 0
        for i in range(N):
            cached[i]
        end = cached.stats()
        assert (end.hits - middle.hits, end.misses - middle.misses) == (N, 0)
        assert end.hit_rate == pytest.approx(end.hits / (end.hits + end.misses))
        assert end.fill_seconds == middle.fill_seconds


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_stats_count_what_a_loader_served(workers: int, live: bool) -> None:
    with hotset.cache(Samples(kilobyte, N), transform=[draw_all] if live else None) as cached:
        loader = hotset.DataLoader(cached, batch_size=7, shuffle=True, num_workers=workers)
        before = cached.stats()
        list(loader)
        cold = cached.stats()
        assert cold.hits + cold.misses - before.hits - before.misses == N
        assert cold.misses - before.misses >= N - 16
        list(loader)
        list(loader)
        warm = cached.stats()
        assert (warm.hits - cold.hits, warm.misses - cold.misses) == (2 * N, 0)
        assert warm.cached == N


def test_clear_empties_the_cache_in_all_processes(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(mapping, 20, log)) as cached:
        held = [cached[i] for i in range(20)] + [cached[i] for i in range(20)]
        walkers = Walkers(cached, [range(20)], mapping)  # attached by now, reading after the clear
        cached.clear()
        assert cached.stats().cached == 0
        assert cached.check() == []
        log.reset()
        walkers.go()
        walkers.finish()
        assert sorted(log.order()) == list(range(20))
        for _ in range(2):
            for i in range(20):
                equal_batches(cached[i], mapping(i))
        assert log.total() == 20
        assert cached.stats().cached == 20
        equal_batches(held, [mapping(i) for i in range(20)] * 2)


def test_clear_frees_memory_for_other_samples() -> None:
    with hotset.cache(Samples(kilobyte, 400), memory="300KB") as cached:
        for _ in range(3):
            for i in range(200):
                equal_batches(cached[i], kilobyte(i))
            assert cached.stats().cached == 200
            cached.clear()
        for i in range(200, 400):
            cached[i]
        assert cached.stats().cached == 200


def test_closing_twice_and_in_any_order_is_harmless() -> None:
    cached = hotset.cache(Samples(number, 10))
    iterator = iter(hotset.DataLoader(cached, batch_size=2))
    assert torch.equal(next(iterator), torch.tensor([0, 3]))
    cached.close()
    cached.close()
    del iterator


def test_many_caches_live_side_by_side() -> None:
    caches = [hotset.cache(Samples(make, 12)) for make in (number, mapping, kilobyte, ragged) * 5]
    for _ in range(2):
        for cached, make in zip(caches, (number, mapping, kilobyte, ragged) * 5, strict=True):
            for i in range(12):
                equal_batches(cached[i], make(i))
    for cached in caches[::2] + caches[1::2]:
        cached.close()
