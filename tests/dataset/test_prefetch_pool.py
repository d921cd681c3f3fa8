"""The prefetch pool: order, sharing, newer lists, errors, and the deaths of processes.

Workers are real processes. To meet one in the midst of a read, a test waits until the source says so.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import eventually, failure, is_a_sentence, rarely, rng_states, seed_everything
from kills import child, gone, in_child, kill
from samples import image_and_label, opaque
from sources import Counting, PlainError, ReadLog, Stalling, TwoArgumentError
from stores import count, ids, opened, stored, wrong

from hotset.dataset.prefetch.pool import PrefetchPool
from hotset.dataset.prefetch.queue import PrefetchQueue
from hotset.errors import HotsetWarning
from hotset.store.store import Store

pytestmark = pytest.mark.usefixtures("patient")
N = 120
TESTS = Path(__file__).parents[1]


@contextlib.contextmanager
def filling(
    store: Store, read: Callable[[int], Any], processes: int = 1, context: Any = None
) -> Iterator[PrefetchPool]:
    with contextlib.closing(PrefetchPool(store, read, processes=processes, context=context)) as pool:
        yield pool


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "reads")


def pids(of: int | None = None) -> set[int]:
    """The helpers of a process: its children, without Python's own."""
    return {
        process.pid
        for process in psutil.Process(of).children()
        if not any("from multiprocessing" in word and "spawn_main" not in word for word in process.cmdline())
    }


def settled(pool: PrefetchPool) -> bool:
    return eventually(lambda: pool.idle)


class Held:
    """Counts reads; from sample 20 on, a read waits for as long as the marker exists."""

    def __init__(self, log: ReadLog, marker: Path) -> None:
        self.log, self.marker = log, marker
        marker.touch()

    def __call__(self, index: int) -> Any:
        self.log.add(index)
        assert index < 20 or eventually(lambda: not self.marker.exists())
        return image_and_label(index)

    def held(self) -> int:
        """How many processes are reading."""
        return sum(index >= 20 for index in self.log.order())


# Filling


@pytest.mark.parametrize("method", rarely(["fork", "spawn", "forkserver"], "spawn", "forkserver"))
def test_samples_come_in_the_order_asked_for(method: str, log: ReadLog) -> None:
    order = random.Random(1).sample(range(N), 60)
    with opened(image_and_label, N) as store:
        with filling(store, Counting(image_and_label, N, log).__getitem__, context=method) as pool:
            states = rng_states()
            assert pool.idle
            pool.request(ids(order))
            assert settled(pool)
            pool.raise_errors()
            assert rng_states() == states
        assert log.order() == order
        assert wrong(stored(store, ids(order)), image_and_label) == {}
        assert count(store) == 60
        assert store.check() == []


def test_a_context_may_be_an_object_and_must_be_known(log: ReadLog) -> None:
    context = multiprocessing.get_context("fork")
    with opened(image_and_label, 4) as store:
        with filling(store, image_and_label, context=context) as pool:
            pool.request(ids(range(4)))
            assert settled(pool)
            assert store.holds()
        with pytest.raises(ValueError, match="teleport"):
            PrefetchPool(store, image_and_label, processes=1, context="teleport")


def test_three_helpers_and_the_main_process_read_each_sample_once(log: ReadLog) -> None:
    order = random.Random(2).sample(range(300), 300)
    together, main = multiprocessing.get_context("fork").Barrier(3), os.getpid()
    begun: list[int] = []

    def read(index: int) -> Any:
        log.add(index)
        if os.getpid() != main and not begun:
            begun.append(index)
            together.wait(60)  # none is the last to begin, and finds nothing left
        return image_and_label(index)

    with opened(image_and_label, 300) as store, filling(store, read, 3) as pool:
        pool.request(ids(order))
        assert eventually(lambda: log.total() >= 3)
        store.fill(ids(order), read, keep=False)
        assert store.holds()
        assert settled(pool)
        assert set(log.counts().values()) == {1}
        assert log.total() == 300
        children = pids()
        helpers = [row for row in store.segment.slots.tolist() if row[1] in children and row[8]]
        assert len(helpers) == 3, "each helper has read something"
        assert wrong(stored(store), image_and_label) == {}


def test_helpers_start_for_missing_samples_only_and_without_a_thread(log: ReadLog) -> None:
    with opened(image_and_label, N) as store, filling(store, image_and_label, 2) as pool:
        assert pids() == set()
        store.fill(ids(range(9)), image_and_label)
        pool.request(ids(range(9)))
        pool.request(ids())
        assert pids() == set(), "what is there already needs no helper"
        threads = len(os.listdir("/proc/self/task"))
        pool.request(ids(range(N)))
        assert settled(pool)
        assert len(pids()) == 2
        assert len(os.listdir("/proc/self/task")) == threads


def test_a_list_comes_after_one_whose_writing_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = PrefetchQueue.create(1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(queue):
        with monkeypatch.context() as patch:
            patch.setattr(PrefetchQueue, "_write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                queue.post(ids(1))
        assert queue.newest() is None
        queue.post(ids(2, 3))
        found = queue.newest()
        assert found is not None
        assert found[1].tolist() == [2, 3]


def test_a_file_that_has_got_the_queues_number_is_left_alone(log: ReadLog, tmp_path: Path) -> None:
    """A program that closes all descriptors, as one that becomes a daemon does, gets their numbers anew."""
    with opened(image_and_label, N) as store, (tmp_path / "mine").open("w+b") as mine:
        with filling(store, Counting(image_and_label, N, log).__getitem__) as pool:
            pool.request(ids(1))
            assert settled(pool)
            fd = pool._queue.address.fd
            os.dup2(mine.fileno(), fd)  # os.closerange, then open
            with pytest.warns(HotsetWarning, match="Nothing is prefetched any more"):
                pool.request(ids(2, 3))
            pool.raise_errors()
        os.close(fd)  # which is still there
    assert (tmp_path / "mine").stat().st_size == 0


def test_a_newer_list_is_noticed_between_chunks(log: ReadLog, tmp_path: Path) -> None:
    read = Held(log, tmp_path / "held")
    with opened(image_and_label, 5000) as store, filling(store, read) as pool:
        pool.request(ids(range(4000)))
        assert eventually(lambda: read.held() == 1)
        pool.request(ids(range(4990, 5000), 3000))
        before = log.total()
        read.marker.unlink()
        assert settled(pool)
        order = log.order()
        assert order[-11:] == [*range(4990, 5000), 3000]
        assert len(order) <= before + 64 + 11, "what is left of the older list is dropped"


def test_an_empty_list_stops_the_helpers_work(log: ReadLog, tmp_path: Path) -> None:
    read = Held(log, tmp_path / "held")
    with opened(image_and_label, 5000) as store, filling(store, read, 2) as pool:
        pool.request(ids(range(5000)))
        assert eventually(lambda: read.held() > 0)  # another may wait for what that one claimed
        pool.request(ids())
        before = log.total()
        read.marker.unlink()
        assert settled(pool)
        assert log.total() <= before + 2 * 64


def test_samples_that_others_read_are_skipped_until_those_die(tmp_path: Path, log: ReadLog) -> None:
    stalling = Stalling(image_and_label, 30, 3, tmp_path / "armed")
    stalling.arm()
    with opened(image_and_label, 30) as store:
        pid = child(lambda: store.fill(ids(3), stalling.__getitem__))
        try:
            assert stalling.stalled_pid() == pid
            with filling(store, Counting(image_and_label, 30, log).__getitem__) as pool:
                pool.request(ids(range(30)))
                assert eventually(lambda: count(store) == 29)
                time.sleep(0.1)
                assert 3 not in log.order()
                assert not pool.idle
                kill(pid)
                assert settled(pool)
                assert store.holds()
                assert log.order()[-1] == 3
        finally:
            kill(pid)


def test_samples_that_cannot_be_kept_are_read_once(log: ReadLog) -> None:
    with (
        opened(image_and_label, N) as store,
        filling(store, Counting(_odd, N, log).__getitem__) as pool,
    ):
        pool.request(ids(range(N)))
        assert settled(pool)
        assert count(store) == N - N // 10
        assert log.counts() == dict.fromkeys(range(N), 1)


def _odd(index: int) -> Any:
    return opaque(index) if index % 10 == 4 else image_and_label(index)


def test_without_room_helpers_read_nothing(log: ReadLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.store.allocator._RETRY_SECONDS", 600.0)
    read = Counting(image_and_label, 3000, log).__getitem__
    with opened(image_and_label, 3000, limit=1 << 15) as store, filling(store, read, 2) as pool:
        pool.request(ids(range(3000)))
        assert settled(pool)
        held = count(store)
        assert 0 < held < 1000
        assert log.total() <= held + 2 * 64


def test_helpers_do_not_draw_what_the_main_process_draws() -> None:
    with opened(_draws, 4) as store, filling(store, _draws) as pool:
        seed_everything()
        pool.request(ids(range(4)))
        assert settled(pool)
        (drawn,) = store.read(ids(0)) or []
        assert not (drawn == _draws(0)).any()


def _draws(_: int) -> torch.Tensor:
    import numpy as np

    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


# Errors


def _broken(index: int) -> Any:
    if index % 10 == 3:
        raise PlainError(f"sample {index} is broken")
    return image_and_label(index)


@pytest.mark.parametrize("processes", [1, 3])
def test_an_error_of_a_read_is_raised_once_and_the_others_are_filled(processes: int, log: ReadLog) -> None:
    read = Counting(_broken, 20, log, seconds=0.001).__getitem__
    with opened(image_and_label, 20) as store, filling(store, read, processes) as pool:
        pool.request(ids(range(9)))
        assert settled(pool)
        raised = failure(pool.raise_errors)
        assert raised.kind is PlainError
        assert raised.last_line == "sources.PlainError: sample 3 is broken"
        assert "in _broken" in raised.text
        assert "Traceback" in raised.text
        pool.raise_errors()
        assert count(store) == 8
        assert log.counts() == dict.fromkeys(range(9), 1)
        pool.request(ids(range(9)))
        assert settled(pool)
        assert log.counts()[3] == 2, "another list, another try"


def test_one_error_is_kept_until_it_is_raised_and_then_the_next(log: ReadLog) -> None:
    with opened(image_and_label, 50) as store, filling(store, _broken) as pool:
        pool.request(ids(range(50)))
        assert settled(pool)
        assert "sample 3 " in failure(pool.raise_errors).text
        pool.raise_errors()
        pool.request(ids(43, 13))
        assert settled(pool)
        assert "sample 43 " in failure(pool.raise_errors).text
        pool.raise_errors()


@pytest.mark.parametrize("kind", ["key", "two", "local", "long", "deep"])
def test_every_error_arrives_in_some_form(kind: str) -> None:
    class LocalError(Exception):
        pass

    def read(index: int) -> Any:
        if index:
            return image_and_label(index)
        if kind == "deep":
            return read(index)
        raise {
            "key": KeyError("no such key"),
            "two": TwoArgumentError("one", "other"),
            "local": LocalError("made in a function"),
            "long": PlainError("é" * 1_000_000),
        }[kind]

    expected = {"key": KeyError, "long": PlainError, "deep": RecursionError}.get(kind, RuntimeError)
    text = {"key": "no such key", "two": "'one', 'other'", "local": "LocalError: made in", "long": "éé"}
    with opened(image_and_label, 5) as store, filling(store, read) as pool:
        pool.request(ids(range(5)))
        assert settled(pool)
        raised = failure(pool.raise_errors)
        assert raised.kind is expected
        assert text.get(kind, "maximum recursion depth") in raised.text
        assert count(store) == 4


# Deaths


def test_a_killed_helper_is_started_again_with_one_warning(tmp_path: Path, log: ReadLog) -> None:
    stalling = Stalling(image_and_label, 40, 5, tmp_path / "armed")
    stalling.arm()
    with opened(image_and_label, 40) as store, filling(store, stalling.__getitem__) as pool:
        pool.request(ids(range(20)))
        assert not pool.idle
        os.kill(stalling.stalled_pid(), signal.SIGKILL)
        assert settled(pool), "the dead have nothing to do"
        with pytest.warns(HotsetWarning, match="killed by signal 9") as told:
            pool.request(ids(range(20)))
        assert is_a_sentence(str(told[0].message))
        assert settled(pool)
        assert store.holds(ids(range(20)))
        (pid,) = pids()
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: gone(pid))
        pool.request(ids(range(40)))
        assert settled(pool)
        assert store.holds()


def test_a_killed_helper_that_the_program_has_reaped_is_started_again(tmp_path: Path) -> None:
    stalling = Stalling(image_and_label, 40, 5, tmp_path / "armed")
    stalling.arm()
    with opened(image_and_label, 40) as store, filling(store, stalling.__getitem__) as pool:
        pool.request(ids(range(20)))
        pid = stalling.stalled_pid()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # as one that waits for any of its children does
        assert settled(pool), "the dead have nothing to do"
        with pytest.warns(HotsetWarning, match="exit code unknown"):
            pool.request(ids(range(20)))
        assert settled(pool)
        assert store.holds(ids(range(20)))
    # multiprocessing takes it for alive for ever; other tests look at what it lists.
    children = multiprocessing.process._children  # type: ignore[attr-defined]
    children -= {one for one in children if one.pid == pid}


def test_another_helper_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    stalling = Stalling(image_and_label, 40, 5, tmp_path / "armed")
    stalling.arm()
    with opened(image_and_label, 40) as store, filling(store, stalling.__getitem__, 2) as pool:
        pool.request(ids(range(40)))
        pid = stalling.stalled_pid()
        assert not pool.idle
        os.kill(pid, signal.SIGKILL)
        assert settled(pool)
        assert store.holds()


def _exits(index: int) -> Any:
    if index == 3 and not os.path.exists(os.environ["EXITED"]):
        Path(os.environ["EXITED"]).touch()
        sys.exit(7)
    return image_and_label(index)


def test_a_read_that_exits_ends_its_helper_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXITED", str(tmp_path / "exited"))
    with opened(image_and_label, 9) as store, filling(store, _exits) as pool:
        pool.request(ids(range(9)))
        assert settled(pool)
        with pytest.warns(HotsetWarning, match="exit code 7"):
            pool.request(ids(range(9)))
        assert settled(pool)
        assert store.holds()


def test_helpers_leave_interrupts_to_the_main_process() -> None:
    with opened(image_and_label, 9) as store, filling(store, image_and_label) as pool:
        pool.request(ids(range(4)))
        assert settled(pool)
        (pid,) = pids()
        os.kill(pid, signal.SIGINT)
        pool.request(ids(range(9)))
        assert settled(pool)
        assert store.holds()
        assert pids() == {pid}


def test_close_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    stalling = Stalling(image_and_label, 40, 5, tmp_path / "armed")
    stalling.arm()
    with opened(image_and_label, 40) as store:
        store.fill(ids(0), image_and_label)  # takes the store's own descriptor
        before = len(os.listdir("/proc/self/fd"))
        pool = PrefetchPool(store, stalling.__getitem__, processes=3)
        pool.request(ids(range(40)))
        stalling.stalled_pid()
        helpers = pids()
        assert len(helpers) == 3
        pool.close()
        pool.close()
        assert not any(psutil.pid_exists(pid) for pid in helpers)
        assert len(os.listdir("/proc/self/fd")) == before
        assert pool.idle
        pool.raise_errors()
        store.fill(ids(range(40)), image_and_label)
        assert store.holds(), "the claims of the killed are void"


def test_a_worker_whose_start_was_interrupted_does_not_outlive_the_pool() -> None:
    read, begun = os.pipe()
    fork: Any = multiprocessing.get_context("fork")

    class Interrupted(fork.Process):  # type: ignore[misc]
        def start(self) -> None:
            super().start()
            os.read(read, 1)
            raise KeyboardInterrupt

    class Context:
        Process = Interrupted

    def say(index: int) -> Any:
        os.write(begun, b"x")
        return image_and_label(index)

    with opened(image_and_label, N) as store, filling(store, say, context=Context()) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.request(ids(range(N)))
        assert len(pids()) == 1
        pool.close()
        assert eventually(lambda: not multiprocessing.active_children())
        Context.Process = fork.Process
        pool.request(ids(range(N)))
        assert settled(pool)
        assert store.holds()


def test_an_interrupted_close_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(image_and_label, N) as store, filling(store, image_and_label, 3) as pool:
        for finish in pool.close, lambda: pool.request(ids(range(N))):
            pool.request(ids(range(N)))
            assert settled(pool)
            with monkeypatch.context() as patched:
                patched.setattr(multiprocessing.process.BaseProcess, "kill", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    pool.close()
            store.clear()
            finish()
        assert settled(pool)
        assert store.holds()
        assert len(multiprocessing.active_children()) == 3
        pool.close()
        assert multiprocessing.active_children() == []


def test_a_pool_that_is_garbage_collected_is_closed() -> None:
    with opened(image_and_label, 9) as store:
        pool = PrefetchPool(store, image_and_label, processes=1)
        pool.request(ids(range(9)))
        assert len(pids()) == 1
        del pool
        assert pids() == set()


def test_a_forked_child_does_not_use_its_parents_helpers(tmp_path: Path) -> None:
    with opened(image_and_label, 20) as store, filling(store, image_and_label, 2) as pool:
        pool.request(ids(range(9)))
        assert settled(pool)
        helpers = pids()

        def use_the_pool() -> None:
            assert pool.idle
            pool.raise_errors()
            pool.close()

        in_child(use_the_pool)
        pool.request(ids(range(20)))
        assert settled(pool)
        assert store.holds()
        assert pids() == helpers


def test_a_forked_child_starts_helpers_of_its_own() -> None:
    with opened(image_and_label, 20) as store, filling(store, image_and_label) as pool:
        pool.request(ids(range(9)))
        assert settled(pool)

        def use_the_pool() -> None:
            pool.request(ids(range(20)))
            assert len(pids()) == 1
            assert settled(pool)
            assert store.holds()
            pool.close()

        in_child(use_the_pool)
        assert len(pids()) == 1


# What cannot be done


def test_a_dataset_that_cannot_be_pickled_gives_one_warning_and_is_not_prefetched() -> None:
    with (
        opened(image_and_label, 9) as store,
        filling(store, lambda i: image_and_label(i), 2, "spawn") as pool,
    ):
        with pytest.warns(HotsetWarning, match="multiprocessing_context") as told:
            pool.request(ids(range(9)))
        assert len(told) == 1
        assert is_a_sentence(str(told[0].message))
        pool.request(ids(range(9)))
        pool.raise_errors()
        assert pool.idle
        assert count(store) == 0


class _FailsToArrive:
    def __call__(self, index: int) -> Any:
        return image_and_label(index)

    def __reduce__(self) -> Any:
        return sys.exit, (1,)


def test_a_helper_that_cannot_begin_is_not_started_again() -> None:
    with opened(image_and_label, 9) as store, filling(store, _FailsToArrive(), 1, "spawn") as pool:
        pool.request(ids(range(9)))
        assert settled(pool)
        with pytest.warns(HotsetWarning, match="before it began"):
            pool.request(ids(range(9)))
        pool.request(ids(range(9)))
        assert pids() == set()
        assert count(store) == 0


def test_a_worker_gets_no_helpers_and_one_warning() -> None:
    with opened(image_and_label, 9) as store:

        def in_worker() -> None:
            multiprocessing.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
            with filling(store, image_and_label) as pool:
                with pytest.warns(HotsetWarning, match="the process that trains"):
                    pool.request(ids(range(9)))
                pool.request(ids(range(9)))

        in_child(in_worker)


def test_an_index_beyond_the_dataset_is_an_error() -> None:
    with opened(image_and_label, 9) as store, pytest.raises(IndexError):
        PrefetchPool(store, image_and_label, processes=1).request(ids(9))


# The end of the main process


@contextlib.contextmanager
def _program(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process with two helpers that read without end; it runs ``body``, and is then killed."""
    code = textwrap.dedent("""
        import os, signal, sys, time
        import torch
        from samples import image_and_label
        from stores import ids
        from hotset.dataset.prefetch.pool import PrefetchPool
        from hotset.store.leaves.schema import Schema
        from hotset.store.store import Store

        def read(i):
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(1000)

        signal.signal(signal.SIGTERM, lambda *_: None)  # a handler that helpers must not inherit
        schema = Schema.infer([image_and_label(0), image_and_label(1)], keep_order=True)
        store = Store.create(schema, 9, 1 << 20, about={"name": "test"})
        pool = PrefetchPool(store, read, processes=2, context="fork")  # no file holds this program
        pool.request(ids(range(9)))
        """)
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", code + textwrap.dedent(body)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def _line(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_helpers_do_not_outlive_a_killed_main_process_nor_its_other_children() -> None:
    body = """
        if os.fork() == 0:  # a child that lives on
            os.write(1, f"{-os.getpid()}\\n".encode())
        sys.stdin.read()
        os._exit(0)
        """
    with _program(body) as program:
        lines = [_line(program) for _ in range(3)]
        helpers, (other,) = [pid for pid in lines if pid > 0], [-pid for pid in lines if pid < 0]
        try:
            assert not any(gone(pid) for pid in helpers)
            program.kill()
            program.wait()
            assert eventually(lambda: all(gone(pid) for pid in helpers))
            assert not gone(other)
        finally:
            for pid in (*helpers, other):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_the_interpreter_ends_silently_and_ends_its_helpers() -> None:
    with _program("sys.stdin.read()") as program:
        helpers = [_line(program) for _ in range(2)]
        out, err = program.communicate(timeout=100)
    assert (program.returncode, out, err) == (0, "", "")
    assert eventually(lambda: all(gone(pid) for pid in helpers))
