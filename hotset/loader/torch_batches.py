"""A pass by torch's own loader, counted as it is handed over, so that it can be resumed.

torch's loader cannot start in the middle. To resume a pass, it begins again under the old random states, and
the batches that were consumed are made and dropped.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch._utils import ExceptionWrapper

from hotset.loader.index_route import samples_in
from hotset.loader.state import EpochProgress

__all__ = ["FollowedBy", "RecordedOrder", "TorchBatches", "clear_reraising_frame"]


def clear_reraising_frame(error: BaseException) -> bool:
    """Clear the frame in which torch has raised a worker's exception again; whether there is one.

    The frame's local variable is the exception, whose traceback holds the frame, and by those around it the
    loader. As such a cycle only Python's collector finds it, which closes queues first: then torch's iterator
    waits for five seconds for each of its workers, whenever that happens to be.
    """
    reraise = ExceptionWrapper.reraise.__code__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is reraise:
            frame.clear()
            return True
    return False


class RecordedOrder:
    """A loader's order that records how many samples each batch has, as it is drawn.

    Args:
        order: the loader's batch sampler, or its sampler with ``batch_size=None``.
        begin: begins it with the draws of the pass that is resumed; None if ``iter()`` does.

    Attributes:
        sizes: the sizes of the batches that were drawn and not handed over yet.
    """

    def __init__(self, order: Any, begin: Callable[[Any], Iterator[Any]] | None) -> None:
        self._order = order
        self._begin = begin
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.sizes.clear()
        if self._begin is None:
            return self._drawn(iter(self._order))
        begun = self._begin(self._order)
        first = list(itertools.islice(begun, 1))  # now, as it may draw, and torch's loader draws as well
        return self._drawn(itertools.chain(first, begun))

    def began(self) -> None:
        """The pass has begun: that of persistent workers who are used again begins with draws of its own."""
        self._begin = None

    def _drawn(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            self.sizes.append(samples_in(index))
            yield index

    def __len__(self) -> int:
        return len(self._order)


class TorchBatches:
    """Iterator over the batches of torch's own loader, which counts them.

    To resume a pass, it makes the batches that were consumed and drops them. One that raised an exception was
    consumed as well, if the program went on to the next.

    Args:
        workers: whether workers make the batches.
        sizes: of the batches that were made and not handed over yet, as far as they are known; where they
            are not, as in the first pass over a stream, a batch counts as full.
        size: how many samples a full batch has.
        measured: whether the summary takes the size of such a batch from the batch, as torch's own
            ``default_collate`` has made it; the pass, and so its state, counts it as full all the same.
        ended: called at the end of the pass.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        run: EpochProgress,
        sizes: deque[int] | None,
        size: int,
        skip: int | None = None,
        ended: Callable[[], None] | None = None,
        *,
        workers: bool,
        measured: bool = False,
    ) -> None:
        self._batches = batches
        self._workers = workers
        self._run = run
        self._sizes = sizes
        self._measured = measured and sizes is None
        self._size = size
        self._ended = ended
        for _ in range(run.batches if skip is None else skip):
            try:
                next(batches)
            except StopIteration:
                break
            except Exception as error:
                if not self._took_batch(error):
                    raise
            self._samples()

    def _samples(self) -> int:
        """How many samples the batch has that was made last."""
        return self._sizes.popleft() if self._sizes else self._size

    def _took_batch(self, error: BaseException) -> bool:
        """Whether this came in place of a batch: a time-out, or an interrupt of the waiting, takes none."""
        if not self._workers:
            return self._sizes is None or bool(self._sizes)  # else the sampler has raised it
        return clear_reraising_frame(error)

    def __iter__(self) -> TorchBatches:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._run.end()
            if self._ended is not None:
                self._ended()
            raise
        except BaseException as error:
            if self._took_batch(error):  # others may follow
                self._run.failed(self._samples())
            raise
        samples = self._samples()
        self._run.count(samples, start, _rows(batch) if self._measured else None)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _rows(batch: Any) -> int:
    """How many samples are in a batch of ``default_collate``: the length of the first thing in it."""
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
        if isinstance(first, (str, bytes)):  # these are collected in a list
            return len(batch)
        batch = first
    return len(batch)


class FollowedBy:
    """Iterator over the batches of a pass in two parts: the second is begun when the first has ended."""

    def __init__(self, first: Iterator[Any], then: Callable[[], Iterator[Any]]) -> None:
        self._batches = first
        self._then: Callable[[], Iterator[Any]] | None = then
        self._first_has_ended = False

    def __iter__(self) -> FollowedBy:
        return self

    def __next__(self) -> Any:
        if not self._first_has_ended:
            try:
                return next(self._batches)
            except StopIteration:
                self._first_has_ended = True
        if self._then is not None:
            # If it cannot be begun now, as workers cannot be started, the next call tries again.
            self._batches, self._then = self._then(), None
        return next(self._batches)
