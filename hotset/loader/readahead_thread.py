"""Fetching: what later batches need from a disk is asked for in a thread, as asking may take as long.

The kernel is told which parts of a file are wanted soon, and fetches them in parallel. But its queue is
short: who tells it of more than it has room for waits, for up to half of the time that an epoch takes. The
consumer's thread has better things to do. This one holds nothing of the loader, and ends when it is told.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Fetching"]


class Fetching:
    """A thread that announces indices to a disk, in order.

    Args:
        announce: tells the disk of a batch's indices.
    """

    def __init__(self, announce: Callable[[Any], None]) -> None:
        # SimpleQueue.put may be called by a destructor that runs inside another put; Queue's may not.
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(
            target=_announce_all, args=(self._asked, announce), name="hotset-fetch", daemon=True
        ).start()

    def ask(self, indices: Any) -> None:
        """Have these indices' samples fetched, after those that were asked for before."""
        self._asked.put(indices)

    def stop(self) -> None:
        """End, once what was asked for is announced."""
        self._asked.put(None)


def _announce_all(asked: queue.SimpleQueue[Any], announce: Callable[[Any], None]) -> None:
    while (indices := asked.get()) is not None:
        try:
            announce(indices)
        except Exception:  # a hint: whoever needs the sample finds out for himself what is wrong
            continue
