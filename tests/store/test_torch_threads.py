"""Threads of ours, and torch's: a helper thread has a team of one, and nobody else's team changes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import eventually

from hotset.store.torch_threads import one_thread, start_thread


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
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    start_thread("hotset-test", lambda *given: found.put((*given, torch.get_num_threads())), "a", "b")
    assert found.get(timeout=60) == ("a", "b", 1)
    assert torch.get_num_threads() == 3
    assert in_a_new_thread(torch.get_num_threads) == 3


def test_a_thread_that_has_not_used_torch_yet_keeps_its_team_too() -> None:
    def start_one() -> int:
        start_thread("hotset-test", lambda: None)
        return torch.get_num_threads()

    assert in_a_new_thread(start_one) == 3
    assert in_a_new_thread(torch.get_num_threads) == 3


def test_a_helper_thread_is_named_and_holds_no_process_back() -> None:
    go = threading.Event()
    start_thread("hotset-test", go.wait, 60)
    (thread,) = [one for one in threading.enumerate() if one.name == "hotset-test"]
    assert thread.daemon
    go.set()
    assert eventually(lambda: not thread.is_alive())


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
