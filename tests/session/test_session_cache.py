"""Jobs that share a session: who comes second reads nothing, nobody gets another's samples, and it may go."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    Walkers,
    equal_batches,
    eventually,
    is_a_sentence,
    rarely,
    recorded,
    rng_states,
    seed_everything,
)
from kills import child, ended, in_child, kill
from live import draw_all, halve
from programs import Programs
from samples import big_image_and_label, image_and_label, jpeg_like, kilobyte, mapping
from session_places import read_all
from sources import PlainError, ReadLog, Samples
from stores import store_of
from torch.utils.data import DataLoader

import hotset
from hotset import HotsetWarning, Window
from hotset.dataset.dataset_proxy import current_of
from hotset.errors import ArgumentError, NotCacheable, QuantityError, SegmentError, SessionError
from hotset.loader import epoch_summary, state
from hotset.loader import local_batches as local
from hotset.session import find_or_create, reports, session_files, sessions
from hotset.session import spill_dirs as spills
from hotset.session.reclaim import reclaim
from hotset.session.reports import report
from hotset.session.session_definition import open_quota
from hotset.session.session_files import retire
from hotset.store.format import DESTROYED, ROW_MASK, Live
from hotset.store.segment import Segment

pytestmark = pytest.mark.usefixtures("patient")

N = 48
MIB = 1 << 20
LOOKS = 4  # by who joins what another job has made
DECIDING = 24  # readings of eight samples, by who comes first
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in memory, which is where it is; it goes with what is in it."""
    folder = Path(tempfile.mkdtemp(prefix="test-hotset-", dir="/dev/shm"))
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for variable in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return str(tmp_path / "spill")


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "reads")


class Counted(Samples):
    """Samples whose every read is logged; neither the log nor what a read takes is part of what they are."""

    def __init__(self, make: Callable[[int], Any], log: ReadLog, n: int = N, seconds: float = 0.0) -> None:
        super().__init__(make, n)
        self._hotset_log, self._hotset_seconds = log, seconds

    def __getitem__(self, index: int) -> Any:
        self._hotset_log.add(index)
        time.sleep(self._hotset_seconds)
        return super().__getitem__(index)


def job(make: Callable[[int], Any], log: ReadLog, order: Any = range(N), **arguments: Any) -> None:
    """All that a job does, in a process of its own."""
    with hotset.cache(Counted(make, log, **arguments), session="shared") as cached:
        for i in order:
            equal_batches(cached[i], make(i))


# Second jobs


@pytest.mark.parametrize("memory", [MIB, 3000, 0])
def test_a_second_job_reads_a_few_samples_to_compare(memory: int, log: ReadLog, disk: str) -> None:
    session = sessions.create("shared", memory=memory, spill=disk)
    in_child(lambda: job(mapping, log))
    assert 2 * N >= log.total() >= N
    assert not report(session).in_use
    log.reset()
    in_child(lambda: job(mapping, log))
    with hotset.cache(Counted(mapping, log), session=session.number) as cached:
        read_all(cached, mapping)
        assert "session" in str(cached.plan)
        assert cached.stats().cached == N
        assert cached.check() == []
        (found,) = report(session).caches
        assert (found.cached, found.spilled, found.samples) == (N, cached.stats().spilled, N)
        assert (found.spilled > 0) == (memory < MIB)
        assert found.memory <= memory
        assert found.hits == 2 * N
    assert log.total() <= 2 * LOOKS


class Restless(Counted):
    """Its readings move a generator once a file is there; no sample depends on that."""

    def __getitem__(self, index: int) -> Any:
        if Path(self._hotset_log.path + ".restless").exists():
            random.random()
        return super().__getitem__(index)


def test_to_compare_with_another_jobs_samples_moves_no_generator(log: ReadLog) -> None:
    def first() -> None:
        with hotset.cache(Restless(mapping, log), session="shared") as cached:
            read_all(cached, mapping)

    sessions.create("shared", memory=MIB)
    in_child(first)
    log.reset()
    Path(log.path + ".restless").touch()
    before = rng_states()
    with hotset.cache(Restless(mapping, log), session="shared") as cached:
        assert 0 < log.total() <= LOOKS
        assert rng_states() == before
        assert cached.stats().cached == N


class Counts:
    """A transform that counts its calls, and so is another one once it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        return sample


class HoldsCounter:
    """A transform that holds an object of a library, which counts its calls."""

    def __init__(self) -> None:
        self.norms = [torch.nn.BatchNorm1d(1)]

    def __call__(self, sample: Any) -> Any:
        self.norms[0](torch.zeros(2, 1))
        return sample


@pytest.mark.parametrize("counter", [Counts, HoldsCounter])
def test_a_transform_that_counts_its_calls_is_the_same_in_the_second_job(
    log: ReadLog, counter: Callable[[], Any]
) -> None:
    def cached_of() -> Any:
        return hotset.cache(
            Counted(mapping, log), transform=[hotset.deterministic(counter())], session="shared"
        )

    def first() -> None:
        with cached_of() as cached:
            read_all(cached, mapping)

    sessions.create("shared", memory=MIB)
    in_child(first)
    log.reset()
    with cached_of() as cached:
        read_all(cached, mapping)
        assert cached.stats().cached == N
    assert log.total() <= 2 * LOOKS


def test_a_second_program_reads_a_few_samples_to_compare(
    log: ReadLog, programs: Programs, tmp_path: Path
) -> None:
    sessions.create("shared", memory=MIB)
    script = tmp_path / "job.py"
    script.write_text(RANK)
    with hotset.cache(Counted(mapping, log), session="shared") as cached:
        equal_batches([cached[i] for i in range(N)], [mapping(i) for i in range(N)])
    assert log.total() in range(N, 2 * N)
    log.reset()
    done = programs.run([str(script), log.path], tmp_path, environment())
    assert done.returncode == 0, done.stderr
    assert log.total() in range(LOOKS + 1)


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *(str(folder) for folder in Path(__file__).parents[:2])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


@pytest.mark.parametrize(
    ("order", "spill"),
    rarely(
        itertools.product(["one order", "own orders"], [False, True]),
        ("one order", True),
        ("own orders", False),
    ),
)
def test_four_jobs_at_once_read_each_sample_about_once(
    order: str, spill: bool, log: ReadLog, disk: str
) -> None:
    n = 160
    sessions.create("shared", memory=20_000 if spill else 4 * MIB, spill=disk if spill else None)
    seeds = [0] * 4 if order == "one order" else range(4)
    orders = [np.random.default_rng(seed).permutation(n).tolist() for seed in seeds]
    pids = [child(partial(job, jpeg_like, log, mine, n=n, seconds=1e-3)) for mine in orders]
    assert [ended(pid) for pid in pids] == [0] * 4
    assert set(log.counts()) == set(range(n))
    assert log.total() <= 1.05 * n + DECIDING
    with hotset.cache(Counted(jpeg_like, log, n), session="shared") as cached:
        assert cached.stats().cached == n
        assert (cached.stats().spilled > 0) == spill
        assert cached.check() == []


def test_a_job_killed_in_its_midst_holds_up_nobody(log: ReadLog, disk: str) -> None:
    sessions.create("shared", memory=20_000, spill=disk)
    for reads in (3, 20, 25, 40):
        pid = child(lambda: job(jpeg_like, log, range(N), seconds=3e-3))
        assert eventually(lambda reads=reads: log.total() >= reads)  # type: ignore[misc]
        kill(pid)
    in_child(lambda: job(jpeg_like, log))
    with hotset.cache(Counted(jpeg_like, log), session="shared") as cached:
        assert cached.stats().cached == N
        assert cached.check() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_in_a_session_gives_what_torchs_gives(workers: int, log: ReadLog, disk: str) -> None:
    sessions.create("shared", memory=300_000, spill=disk)
    options: Any = {"batch_size": 7, "shuffle": True}
    seed_everything()
    loader = DataLoader(Samples(big_image_and_label, N), **options)
    expected = [list(loader) for _ in range(2)]
    for second in (False, True):
        log.reset()
        seed_everything()
        with hotset.cache(Counted(big_image_and_label, log), session="shared") as cached:
            loader = hotset.DataLoader(cached, num_workers=workers, **options)
            for epoch in expected:
                equal_batches(list(loader), epoch)
            assert 0 < cached.stats().spilled < N
        assert (log.total() <= LOOKS) == second


@pytest.mark.parametrize("who", ["made", "joined"])
def test_a_cache_of_a_session_pickles(who: str, log: ReadLog) -> None:
    sessions.create("shared", memory=MIB)
    if who == "joined":
        in_child(lambda: job(mapping, log))
    log.reset()

    def reads() -> int:
        with hotset.cache(Counted(mapping, log), session="shared") as cached:
            read_all(cached, mapping)
            log.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                again = pickle.loads(pickle.dumps(cached))
                read_all(again, mapping)
            again.close()
            return log.total()

    assert reads() == 0


@pytest.mark.chaos  # forked ones do in many tests; a program of its own does in the test above
def test_spawned_workers_reach_a_session(log: ReadLog, disk: str) -> None:
    sessions.create("shared", memory=3000, spill=disk)
    in_child(lambda: job(mapping, log))
    log.reset()
    with hotset.cache(Counted(mapping, log), session="shared") as cached:
        walkers = Walkers(cached, [range(N)], mapping, "spawn")
        walkers.go()
        walkers.finish()
    assert log.total() <= LOOKS


def test_workers_that_outlive_their_loader_count_as_use(log: ReadLog) -> None:
    session = sessions.create("shared", memory=MIB, ttl=1000.0)
    with hotset.cache(Counted(mapping, log), session="shared") as cached:
        loader = hotset.DataLoader(cached, batch_size=8, num_workers=1, persistent_workers=True)
        for _ in range(2):
            equal_batches(list(loader), list(DataLoader(Samples(mapping, N), batch_size=8)))
        assert report(session).in_use
        del loader
    assert eventually(lambda: not report(session).in_use)


RANK = """
import os, sys, warnings
warnings.simplefilter("error")
import hotset
import hotset.store.fill
hotset.store.fill._PATIENCE_SECONDS = 60.0
import hotset.dataset.audit
hotset.dataset.audit._SHARE = 0.0
from samples import mapping
from helpers import equal_batches
from sources import ReadLog
from test_session_cache import Counted

log = ReadLog.__new__(ReadLog)
log.path = sys.argv[1]
with hotset.cache(Counted(mapping, log), session="shared") as cached:
    equal_batches([cached[i] for i in range(48)], [mapping(i) for i in range(48)])
    os.write(1, b"ended well\\n")
"""


@pytest.mark.chaos
def test_ranks_of_torchrun_share_a_session(log: ReadLog, tmp_path: Path) -> None:
    session = sessions.create("shared", memory=MIB)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    ran = subprocess.run(
        [*command, script, log.path], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ended well") == 2
    assert log.total() <= 1.05 * N + DECIDING
    (found,) = report(session).caches
    assert found.cached == N


# Who is who


def test_two_transforms_in_one_session_stay_apart(log: ReadLog) -> None:
    session = sessions.create("shared", memory=MIB)
    for _ in range(2):
        log.reset()
        with (
            hotset.cache(Counted(image_and_label, log), session="shared") as plain,
            hotset.cache(Counted(image_and_label, log), transform=[halve], session="shared") as halved,
            hotset.cache(Counted(image_and_label, log), transform=[halve], session="shared", cut=0) as live,
        ):
            read_all(plain, image_and_label)
            read_all(halved, lambda i: halve(image_and_label(i)))
            read_all(live, lambda i: halve(image_and_label(i)))
    assert log.total() <= LOOKS
    assert len(report(session).caches) == 3


def test_a_cache_is_planned_with_no_more_than_its_sessions_memory() -> None:
    sessions.create("shared", memory=MIB)
    with hotset.cache(Samples(mapping, N), session="shared", memory="10MiB") as cached:
        assert cached.plan.limit == MIB


def test_a_live_part_shares_what_is_before_it(log: ReadLog) -> None:
    session = sessions.create("shared", memory=MIB)
    found = []
    for _ in range(2):
        log.reset()
        seed_everything()
        with hotset.cache(Counted(mapping, log), transform=[draw_all], session="shared") as cached:
            found.append([cached[i] for i in range(N)])
    assert log.total() <= LOOKS
    equal_batches(found[0], found[1])
    assert len(report(session).caches) == 1


def test_two_bodies_of_one_name_stay_apart() -> None:
    session = sessions.create("shared", memory=MIB)

    def body(factor: int) -> Any:
        scope: dict[str, Any] = {"__name__": "users"}
        exec(f"def make(i):\n    import torch\n    return torch.full((4,), i * {factor})", scope)
        return scope["make"]

    for factor in (2, 3, 2):
        make = body(factor)
        with hotset.cache(Samples(make, N), session="shared") as cached:
            read_all(cached, make)
    assert len(report(session).caches) == 2


def test_one_key_is_one_cache_and_another_another(log: ReadLog) -> None:
    session = sessions.create("shared", memory=MIB)
    for key in ("one", "two", "one", "../x" * 5000, "\udcff"):
        with hotset.cache(Counted(mapping, log), session="shared", key=key) as cached:
            read_all(cached, mapping)
    assert len(report(session).caches) == 4


def test_sessions_stay_apart(log: ReadLog) -> None:
    for name in ("shared", "other"):
        sessions.create(name, memory=MIB)
    in_child(lambda: job(mapping, log))
    with hotset.cache(Counted(mapping, log), session="other") as cached:
        assert cached.stats().cached == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"session": "shared", "window": Window(resident=5)}, ArgumentError),
        ({"spill": "/tmp", "window": Window(resident=5)}, ArgumentError),
        ({"session": "shared", "spill": "/tmp"}, ArgumentError),
        ({"spill": False}, ArgumentError),
        ({"session": "nobody"}, SessionError),
        ({"session": ""}, SessionError),
        ({"session": 0}, SessionError),
        ({"session": "../shared"}, SessionError),
        ({"session": "shared", "memory": "much"}, QuantityError),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(arguments: Any, error: Any, runtime: Path) -> None:
    sessions.create("shared", memory=MIB)
    before = os.listdir(runtime)
    with pytest.raises(error) as refused:
        hotset.cache(Samples(mapping, N), **arguments)
    assert is_a_sentence(str(refused.value))
    assert os.listdir(runtime) == before


@pytest.mark.parametrize("spill", [5, True, b"/tmp", ""])
def test_a_spill_that_is_no_folder_is_refused_in_a_sentence(
    spill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused() -> str:
        try:
            hotset.cache(Samples(mapping, N), spill=spill).close()
        except ArgumentError as error:
            return str(error)
        except Exception as error:
            return type(error).__name__
        return ""

    assert is_a_sentence(refused())


class Broken(Samples):
    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(2, "No such file or directory", f"{index}.png")


class Wrong(Samples):
    def __getitem__(self, index: int) -> Any:
        raise PlainError(f"sample {index} is broken")


class Draws(Samples):
    def __getitem__(self, index: int) -> Any:
        return np.random.rand(3)


@pytest.mark.parametrize(
    ("source", "error"), [(Wrong, PlainError), (Draws, NotCacheable), (Broken, FileNotFoundError)]
)
def test_a_data_sets_own_error_is_its_own(source: Any, error: Any, runtime: Path) -> None:
    sessions.create("shared", memory=MIB)
    before = sorted(os.listdir(runtime))
    with pytest.raises(error):
        hotset.cache(source(mapping, N), session="shared")
    assert sorted(os.listdir(runtime)) == before


def test_a_job_that_joins_a_condemned_cache_is_told() -> None:
    sessions.create("shared", memory=MIB)
    with hotset.cache(Samples(mapping, N), session="shared") as cached:
        read_all(cached, mapping)
        store_of(cached).invalidate()
    with recorded() as told, hotset.cache(Samples(mapping, N), session="shared") as cached:
        read_all(cached, mapping)
    del cached
    assert len(told) == 1


def test_a_full_disk_of_a_session_that_persists_is_told_as_what_it_is(disk: str) -> None:
    sessions.create("shared", memory=MIB, spill=disk, persist=True)

    def told() -> str:
        from test_spill import no_room

        with hotset.cache(Samples(mapping, N), session="shared") as cached:
            store_of(cached).spill.allocator._free = no_room
            with pytest.warns(HotsetWarning) as caught:
                read_all(cached, mapping)
            assert cached.stats().cached == N
        return str(caught[0].message)

    assert f"of {N} samples are cached, and no more fit" not in told()


# Ends


def test_jobs_end_well_when_their_session_goes(log: ReadLog, disk: str, runtime: Path) -> None:
    session = sessions.create("shared", memory=20_000, spill=disk)
    ready, tell = os.pipe()

    def body(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with recorded() as caught, hotset.cache(Counted(jpeg_like, log), session="shared") as cached:
            begun = False
            while current_of(cached).store is not None:
                i = int(rng.integers(N))
                equal_batches(cached[i], jpeg_like(i))
                if not begun and cached.stats().cached > N // 2:
                    os.write(tell, b"x")
                    begun = True
            read_all(cached, jpeg_like)
            assert cached.check() == []
        texts = [str(one.message) for one in caught]
        assert all("was destroyed" in text for text in texts), texts
        os.write(tell, bytes([len(texts)]))

    pids = [child(lambda seed=seed: body(seed)) for seed in range(2)]  # type: ignore[misc]
    for _ in pids:
        assert os.read(ready, 1) == b"x"
    assert sessions.destroy(session) > 0
    codes = [ended(pid) for pid in pids]
    os.close(tell)
    told = os.read(ready, 10)
    os.close(ready)
    assert codes == [0, 0]
    assert list(told) == [1, 1], "each is told, and once"
    assert os.listdir(runtime) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_ends_its_epoch_when_its_session_goes_and_comes_again(
    workers: int, log: ReadLog, disk: str
) -> None:
    session = sessions.create("shared", memory=20_000, spill=disk)
    seed_everything()
    expected = list(DataLoader(Samples(kilobyte, N), batch_size=4))
    with hotset.cache(Counted(kilobyte, log), session="shared") as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=workers)
        equal_batches(list(loader), expected)
        batches = iter(loader)
        found = [next(batches)]
        sessions.destroy(session)
        again = sessions.create("shared", memory=MIB)
        with recorded() as told:
            found += list(batches)
            equal_batches(found, expected)
            equal_batches(list(loader), expected)
        assert len(told) == 1
        assert "was destroyed" in str(told[0].message)
        with pytest.raises(SegmentError, match="was destroyed"):
            cached.clear()
    log.reset()
    with hotset.cache(Counted(kilobyte, log), session="shared") as cached:
        read_all(cached, kilobyte)
        assert cached.stats().cached == N
    assert log.total() >= N
    assert report(again).caches[0].cached == N


def test_a_session_that_is_being_destroyed_gets_no_cache(log: ReadLog, disk: str, runtime: Path) -> None:
    session = sessions.create("shared", memory=MIB, spill=disk)
    with open_quota(session) as book:
        book.end()
    with pytest.warns(HotsetWarning, match="for this job alone") as told:
        cached = hotset.cache(Counted(mapping, log), session="shared")
    with cached:
        assert is_a_sentence(str(told[0].message))
        read_all(cached, mapping)
        assert cached.stats().cached == N
    sessions.destroy(session)
    assert os.listdir(runtime) == []
    assert list(Path(disk).rglob("*.spill")) == []


def test_a_stopped_job_holds_up_nobody_for_ever(log: ReadLog, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions.create("shared", memory=MIB)
    monkeypatch.setattr("hotset.session.find_or_create.PATIENCE_SECONDS", 0.2)

    def stall() -> None:
        def never(*_: Any) -> None:
            os.write(tell, b"x")
            signal.pause()

        find_or_create._SessionCaches.find = never  # type: ignore[assignment]
        job(mapping, log)

    ready, tell = os.pipe()
    pid = child(stall)
    try:
        assert os.read(ready, 1) == b"x"
        with pytest.warns(HotsetWarning, match="has not ended for") as told:
            cached = hotset.cache(Counted(mapping, log), session="shared")
        with cached:
            assert is_a_sentence(str(told[0].message))
            read_all(cached, mapping)
    finally:
        kill(pid)
        os.close(ready)
        os.close(tell)


def test_a_copy_that_its_sessions_end_comes_into_is_no_sigbus(tmp_path: Path) -> None:
    """A reader is stopped before its copy; the session goes, and its memory to others, to the last page."""
    small = tmp_path / "small"
    small.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "test", small], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOTSET_RUNTIME_DIR", str(small))
            patch.setattr(session_files, "_READERS_SECONDS", 0.5)
            session = sessions.create("a", memory=4 * MIB)
            reader = child(lambda: stopped_in_its_copy())
            os.waitpid(reader, os.WUNTRACED)
            sessions.destroy(session)
            ballast = os.open(small / "ballast", os.O_WRONLY | os.O_CREAT)
            with contextlib.suppress(OSError):
                while True:
                    os.write(ballast, bytes(4096))
            os.close(ballast)
            os.kill(reader, signal.SIGCONT)
            assert ended(reader) == 0
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def stopped_in_its_copy() -> None:
    make = kilobyte
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cached = hotset.cache(Samples(make, N), session="a")
        read_all(cached, make)
        store = store_of(cached)
        block = store._block

        def stopping(size: int) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return block(size)

        store._block = stopping
        equal_batches(cached[3], make(3))


def test_mapping_ahead_takes_nothing_of_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    session = sessions.create("a", memory=64 * MIB)
    big = partial(torch.full, (MIB,), dtype=torch.uint8)
    with hotset.cache(Samples(big, 8), session="a") as cached:
        for i in range(8):
            cached[i]
    go, populate = threading.Event(), Segment.populate

    def late(segment: Segment, *where: Any) -> None:
        assert go.wait(60)
        populate(segment, *where)

    monkeypatch.setattr(Segment, "populate", late)
    with hotset.cache(Samples(big, 8), session="a") as cached:
        store = store_of(cached)
        assert sessions.destroy(session) > 8 * MIB
        go.set()
        for thread in threading.enumerate():
            if thread.name == "hotset-map":
                thread.join()
        assert os.fstat(store.segment.fd).st_blocks * 512 < MIB


def test_mapping_ahead_ends_with_a_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions.create("a", memory=64 * MIB)
    big = partial(torch.full, (MIB,), dtype=torch.uint8)
    with hotset.cache(Samples(big, 32), session="a") as cached:
        for i in range(32):
            cached[i]
    started, go, populate = threading.Event(), threading.Event(), Segment.populate

    def late(segment: Segment, *where: Any) -> None:
        started.set()
        assert go.wait(60)
        populate(segment, *where)

    monkeypatch.setattr(Segment, "populate", late)
    with hotset.cache(Samples(big, 32), session="a") as cached:
        store = store_of(cached)
        assert started.wait(60)
        cached.clear()
        go.set()
        for thread in threading.enumerate():
            if thread.name == "hotset-map":
                thread.join()
        assert os.fstat(store.segment.fd).st_blocks * 512 < 10 * MIB, "what was being mapped just then"


def test_what_was_destroyed_is_neither_cleared_nor_called_anything_else() -> None:
    session = sessions.create("a", memory=MIB)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
        store = store_of(cached)
        sessions.destroy(session)
        assert not store.clear()
        assert not store.invalidate()
        assert store.segment.live[Live.INVALIDATED] == DESTROYED
        with pytest.warns(HotsetWarning, match="its session was destroyed"):
            read_all(cached, mapping)


def test_the_check_takes_no_session_for_damaged_that_is_being_destroyed(
    monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    session = sessions.create("a", memory=20_000, spill=disk)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
    listdir, names = os.listdir, sessions.sessions

    def meanwhile() -> Any:
        found = names()
        monkeypatch.setattr(reports.os, "listdir", then)
        return found

    def then(folder: Any) -> Any:
        monkeypatch.setattr(reports.os, "listdir", listdir)
        files = listdir(folder)
        sessions.destroy(session)
        return files

    monkeypatch.setattr(reports.sessions, "sessions", meanwhile)
    assert list(reports.check_caches()) == []


def test_the_check_knows_what_is_half_destroyed(disk: str, runtime: Path) -> None:
    session = sessions.create("a", memory=20_000, spill=disk)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
    (cache,) = runtime.glob("*.cache")
    retire(str(cache))
    for file in spills.spill_path(disk).glob("*.spill"):
        file.unlink()  # and killed there
    assert [(one.state, one.problems) for one in reports.check_caches()] == [("dead", ())]
    assert sessions.destroy(session) >= 0


def test_the_check_takes_no_cache_for_damaged_that_makes_room(
    monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    session = sessions.create("a", memory=20_000, spill=disk)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
    assert [one.state for one in reports.check_caches()] == ["ok"]
    unlink, seen = os.unlink, []

    def looked_at(file: Any, **more: Any) -> None:
        unlink(file, **more)
        seen.append((Path(file).suffix, [(one.state, one.problems) for one in reports.check_caches()]))

    monkeypatch.setattr(os, "unlink", looked_at)
    assert reclaim(session, 1)
    assert seen == [(".spill", [("dead", ())]), (".cache", [])]


@pytest.mark.parametrize("live", [None, halve], ids=["gathered here", "made by workers"])
def test_what_lies_on_a_disk_is_announced_before_it_is_read(
    live: Any, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(
        Segment, "read_ahead", lambda segment, at, length: announced.append((at, at + length))
    )
    with hotset.cache(Samples(image_and_label, N), transform=live, memory=0, spill=disk, cut=0) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, shuffle=True, num_workers=2 if live else 0)
        list(loader)
        announced.clear()  # workers' own lists are theirs: what is in this one, the main process has said
        list(loader)
        store = store_of(cached)
        assert store.spill is not None
        geometry = store.spill.segment.geometry
        starts = (store.words(np.arange(N)) & ROW_MASK) * geometry.stride + geometry.rows_at

        def all_announced() -> bool:
            return all(
                any(begin <= start and start + geometry.stride <= end for begin, end in list(announced))
                for start in starts.tolist()
            )

        assert eventually(all_announced)


def test_who_joins_a_full_cache_maps_what_it_holds_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions.create("a", memory=64 * MIB)
    mapped: list[tuple[int, int]] = []
    monkeypatch.setattr(Segment, "populate", lambda segment, at, length: mapped.append((at, at + length)))
    big = partial(torch.full, (MIB,), dtype=torch.uint8)
    with hotset.cache(Samples(big, 8), session="a") as cached:
        for i in range(5):
            cached[i]
        assert mapped == [], "who fills it maps nothing"
    with hotset.cache(Samples(big, 8), session="a") as cached:
        store = store_of(cached)
        geometry, rows = store.segment.geometry, int(store.segment.live[Live.ROWS_NEXT])
        end = geometry.rows_at + rows * geometry.stride
        assert eventually(lambda: bool(mapped) and mapped[-1][1] == end)
    assert mapped[0][0] == geometry.rows_at
    assert all(one[1] == other[0] for one, other in pairwise(mapped))


def test_a_session_tells_how_long_its_consumers_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    session = sessions.create("a", memory=MIB)
    now = [0.0]

    def slow(index: int) -> Any:
        now[0] += 0.02
        return kilobyte(index)

    with hotset.cache(Samples(slow, N), session="a") as cached:
        for module in (local, state, epoch_summary):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        loader = hotset.DataLoader(cached, batch_size=8)
        list(loader)
        assert loader.last_epoch is not None
        waited = loader.last_epoch.waited
        (seen,) = report(session).caches
    assert seen.waited_seconds == pytest.approx(waited)
    # Once the pass is over, a few samples are read again: the clock that reading moves might be part of them.
    assert waited == pytest.approx(0.02 * N)
