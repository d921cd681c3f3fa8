"""Threads, and how many of them torch uses.

torch runs larger operations on a team of OpenMP threads, whose members spin while they wait for the next
one: beside a busy process that has cost 400 times what the copying took. So a thread of ours has a team of
one, and copies in the user's thread are made by it alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["one_thread", "start_thread"]

T = TypeVar("T")


def one_thread(run: Callable[[], T]) -> T:
    """Return what ``run()`` does, with torch kept to this thread meanwhile.

    No ``with`` block: whatever Python code ends that, an interrupt may come before its first line, and leave
    the user's training with one thread. The ``finally`` here begins with a call of C code.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return run()
    try:
        torch.set_num_threads(1)
        return run()
    finally:
        torch.set_num_threads(threads)


def start_thread(name: str, run: Callable[..., None], *arguments: Any) -> None:
    """Run ``run(*arguments)`` in a daemon thread in which torch uses one thread only."""
    threads = torch.get_num_threads()  # asked for now, the caller's own number is fixed
    started = threading.Event()

    def begin() -> None:
        torch.set_num_threads(1)
        # A thread's number is set from the process-wide default when it first asks: let that happen now,
        # while the default is ours.
        torch.get_num_threads()
        started.set()
        run(*arguments)

    threading.Thread(target=begin, name=name, daemon=True).start()
    started.wait()
    # The thread has set its own number of threads, and with it the default of threads yet to come.
    torch.set_num_threads(threads)
