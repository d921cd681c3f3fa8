"""An iterable read ahead in a thread.

A DataLoader prepares its batches in workers or threads of its own, and draws random numbers where it is
asked for the next one: it is asked in the consumer's thread, as a thread of ours would race the model's
dropout. Any other iterable (a generator that reads a socket, a list) has nobody who works for it, so a thread
does, up to ``depth`` batches ahead. An iterable that draws from global generators wants ``depth=0``.

What it raises is raised at the consumer when its turn comes, with its own traceback. The thread ends with
the iterable, or with the iterator; it holds nothing of the latter, so that a consumer that just stops leaves
no thread behind.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from typing import Any

from hotset.store.torch_threads import start_thread

__all__ = ["PrefetchThread"]


class _End:
    """What the thread puts last: the exception that ended it, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class PrefetchThread:
    """Iterator over an iterable that a thread reads ahead.

    Args:
        iterable: it; ``iter()`` of it is called in the thread too.
        depth: how many items may wait, at least 1.
    """

    def __init__(self, iterable: Iterable[Any], depth: int) -> None:
        # SimpleQueue.put may be called by a destructor that runs inside another put; Queue's may not.
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over = False
        for _ in range(depth):
            self._asked.put(True)
        start_thread("hotset-ahead", _read, iterable, self._asked, self._made)

    @property
    def waiting(self) -> int:
        """How many items wait to be taken."""
        return self._made.qsize()

    def __iter__(self) -> PrefetchThread:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        item = self._made.get()
        if not isinstance(item, _End):
            self._asked.put(True)
            return item
        self._over = True
        try:
            raise item.error or StopIteration
        finally:
            del item  # its traceback holds this frame, and who reads waits for no garbage collector

    def stop(self) -> None:
        """Have the thread end, after the item that it is reading."""
        self._asked.put(False)

    def __del__(self) -> None:
        self.stop()


def _read(iterable: Iterable[Any], asked: queue.SimpleQueue[bool], made: queue.SimpleQueue[Any]) -> None:
    ended: BaseException | None = None
    iterator: Iterator[Any] | None = None
    try:
        iterator = iter(iterable)
        while asked.get():
            made.put(next(iterator))
    except StopIteration:
        pass
    except BaseException as error:
        ended = error
    try:
        # A generator's `finally` runs here and now, not when somebody collects it.
        close = getattr(iterator, "close", None)
        if close is not None and iterator is not iterable:
            close()
    except BaseException as error:
        ended = ended or error
    made.put(_End(ended))
    del ended  # its traceback holds this frame
