"""Copying: batches that are looked up and laid out already are copied in a thread, ahead of use.

Between two copies the thread needs the interpreter for microseconds, not for as long as the consumer holds
it. It draws nothing, holds nothing of the iterator that asks, and ends when that does. What goes wrong in it
is raised at the consumer's next batch.
"""

from __future__ import annotations

import queue

from hotset.store.gather import Copy
from hotset.store.torch_threads import start_thread

__all__ = ["Copying"]


class Copying:
    """A thread that runs the copies it is asked for, in order.

    Attributes:
        pending: how many were asked for and not taken.
    """

    def __init__(self) -> None:
        self.pending = 0
        # SimpleQueue.put may be called by a destructor that runs inside another put; Queue's may not.
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[_Made] = queue.SimpleQueue()
        start_thread("hotset-gather", _copy_loop, self._asked, self._made)

    def ask(self, copy: Copy | None) -> None:
        self._asked.put((copy,))
        self.pending += 1

    def next(self) -> Copy | None:
        made = self._made.get()
        self.pending -= 1
        if isinstance(made, BaseException):
            raise made
        return made

    def stop(self) -> None:
        self._asked.put(None)


# A copy to run (None: nothing to copy, the batch is made otherwise), or the end.
_Asked = tuple[Copy | None] | None
_Made = Copy | BaseException | None


def _copy_loop(asked: queue.SimpleQueue[_Asked], made: queue.SimpleQueue[_Made]) -> None:
    while (job := asked.get()) is not None:
        (copy,) = job
        try:
            if copy is not None:
                copy.run()
            made.put(copy)
        except BaseException as error:
            made.put(error)
        del job, copy  # or the last batch's block would stay lent until the next one comes
