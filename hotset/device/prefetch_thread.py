"""An iterable that a thread reads ahead of its consumer.

The thread calls ``iter()`` of the iterable as well, and the iterator lives in the thread alone. What the
iterable raises is raised at the consumer when its turn comes, with its own traceback. The thread ends with
the iterable, or with the :class:`PrefetchThread`, of which it holds nothing: a consumer that stops early
leaves no thread behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hotset.store.torch_threads import HelperThread

__all__ = ["PrefetchThread"]


class PrefetchThread:
    """Iterator over an iterable that a thread reads ahead; up to ``depth`` items, at least 1, may wait."""

    def __init__(self, iterable: Iterable[Any], depth: int) -> None:
        self._reader = _Reader(iterable)
        self._thread: HelperThread[Any] = HelperThread("hotset-ahead", self._reader.close)
        self._over = False
        self._depth = depth
        for _ in range(depth):
            self._thread.ask(self._reader)

    def __iter__(self) -> PrefetchThread:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        while self._thread.pending < self._depth:
            self._thread.ask(self._reader)  # in place of one that an interrupt has kept from being asked for
        item = self._thread.next()
        if not isinstance(item, _End):
            self._thread.ask(self._reader)
            return item
        self.stop()
        try:
            raise item.error or StopIteration
        finally:
            del item  # its traceback holds this frame, which would live until the garbage collector runs

    def stop(self) -> None:
        """End the thread, after the item that it is reading; there are no more items."""
        self._over = True
        self._thread.stop()


class _End:
    """What comes after the last item: the exception that ended the iterable, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Reader:
    """What the thread calls for each item; the iterator lives in the thread alone."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._iterator: Iterator[Any] | None = None
        self._over = False
        # A thread begins with the first GPU as its current one, and its default stream, whichever the
        # consumer's are: a step would not wait for the kernels by which the iterable makes a batch.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def __call__(self) -> Any:
        if self._over:
            return _End(None)
        try:
            if self._iterator is None:
                if self._stream is not None:
                    torch.cuda.set_stream(self._stream)  # and its GPU
                self._iterator = iter(self._iterable)
            return next(self._iterator)
        except StopIteration:
            ended = _End(None)
        except BaseException as error:
            ended = _End(error)
        try:
            self.close()
        except BaseException as error:
            ended.error = ended.error or error
        try:
            return ended
        finally:
            del ended  # its traceback holds this frame

    def close(self) -> None:
        """Run a generator's ``finally`` here and now, not when its garbage is collected."""
        self._over = True
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None and iterator is not self._iterable:
            close()
