"""Threads of ours, and torch's: a helper thread has a team of one, and nobody else's team changes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import equal_batches, eventually
from torch.utils.data import DataLoader, TensorDataset

import hotset
from hotset.store.torch_threads import HelperThread, one_thread


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """Three threads, which no default is, here and for threads to come."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_new_thread(ask: Callable[[], Any]) -> Any:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: found.put(ask()))
    thread.start()
    return found.get(timeout=60)


def test_a_helper_thread_has_a_team_of_one_and_others_keep_theirs() -> None:
    thread: HelperThread[int] = HelperThread("hotset-test")
    thread.ask(torch.get_num_threads)
    assert thread.next() == 1
    assert torch.get_num_threads() == 3
    assert in_a_new_thread(torch.get_num_threads) == 3


def test_a_thread_that_has_not_used_torch_yet_keeps_its_team_too() -> None:
    def start_one() -> int:
        HelperThread("hotset-test").post(lambda: None)
        return torch.get_num_threads()

    assert in_a_new_thread(start_one) == 3
    assert in_a_new_thread(torch.get_num_threads) == 3


def test_a_helper_thread_is_named_and_holds_no_process_back() -> None:
    go = threading.Event()
    helper: HelperThread[Any] = HelperThread("hotset-test")
    helper.post(lambda: go.wait(60))
    (thread,) = [one for one in threading.enumerate() if one.name == "hotset-test"]
    assert thread.daemon
    go.set()
    del helper
    assert eventually(lambda: not thread.is_alive())


def test_a_helper_thread_gives_results_and_errors_in_order_and_drops_what_nobody_asked_for() -> None:
    helper: HelperThread[Any] = HelperThread("hotset-test")
    assert helper.pending == 0
    helper.ask(lambda: "first")
    helper.post(lambda: 1 / 0)
    helper.ask(lambda: 1 / 0)
    helper.ask(lambda: "last")
    assert helper.pending == 3
    assert helper.next() == "first"
    with pytest.raises(ZeroDivisionError):
        helper.next()
    assert helper.next() == "last"
    assert helper.pending == 0


def test_a_helper_thread_ends_with_its_last_job_and_begins_anew() -> None:
    ended: list[str] = []
    helper: HelperThread[str] = HelperThread(
        "hotset-test", lambda: ended.append(threading.current_thread().name)
    )
    helper.stop()
    assert not ended, "it never began"
    for count in (1, 2):
        helper.ask(lambda: "done")
        assert helper.next() == "done"
        helper.stop()
        assert eventually(lambda: ended == ["hotset-test"] * count)  # noqa: B023


def test_finishing_waits_for_the_last_job_and_raises_what_one_raised() -> None:
    done: list[int] = []
    helper: HelperThread[None] = HelperThread("hotset-test")
    helper.finish()
    helper.ask(lambda: time.sleep(0.05))
    helper.ask(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    helper.ask(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        helper.finish()
    assert done == [1]
    assert helper.pending == 0
    assert not any(thread.name == "hotset-test" for thread in threading.enumerate())


def test_a_forked_child_has_a_helper_thread_of_its_own() -> None:
    helper: HelperThread[int] = HelperThread("hotset-test")
    helper.ask(os.getpid)

    def in_child() -> None:
        assert helper.pending == 0
        helper.ask(os.getpid)
        assert helper.next() == os.getpid()

    process = multiprocessing.get_context("fork").Process(target=in_child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert helper.next() == os.getpid()


def test_one_thread_is_for_a_while() -> None:
    def threads() -> list[int]:
        inner = one_thread(torch.get_num_threads)
        return [inner, torch.get_num_threads()]

    assert one_thread(threads) == [1, 1]
    assert torch.get_num_threads() == 3

    def failing() -> None:
        raise KeyError("in the midst")

    with pytest.raises(KeyError):
        one_thread(failing)
    assert torch.get_num_threads() == 3


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the user's limit of processes was reached."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_threads")
def test_without_threads_jobs_run_where_they_are_asked_for() -> None:
    ended: list[bool] = []
    helper: HelperThread[int] = HelperThread("hotset-test", lambda: ended.append(True))
    helper.ask(torch.get_num_threads)
    helper.post(lambda: 1 / 0)
    helper.ask(lambda: 1 // 0)
    assert helper.pending == 2
    assert helper.next() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError):
        helper.finish()
    assert ended == [True]


@pytest.mark.usefixtures("no_threads")
def test_without_threads_training_goes_on() -> None:
    """They fill, gather ahead, map what another has cached, read ahead, and watch for stalls."""
    data = TensorDataset(torch.arange(3.0).repeat(100, 20_000))
    expected = list(DataLoader(data, batch_size=10))
    with hotset.cache(data, memory="64MiB") as cached:
        for _ in range(2):
            equal_batches(list(hotset.DataLoader(cached, batch_size=10)), expected)
        with hotset.cache(data, memory="64MiB") as joined:
            equal_batches(list(hotset.DataLoader(joined, batch_size=10)), expected)
    equal_batches(list(hotset.DeviceQueue(DataLoader(data, batch_size=10), device="cpu")), expected)
