"""How samples are read from the source for the cache: one by one, in groups, or several at once in threads.

::

    the dataset has __getitems__     a group in one call
    concurrency=16                   up to sixteen at once, each in a thread: for a source that waits
    otherwise                        one after the other

    transform= has a hotset.batched  then the samples pass it in groups, in the caller's thread

Samples come in the order in which they were asked for, and what reading one raises is raised in its turn. So
a batch, an error and a claim are the same in all ways. A single sample is always read in the caller's
thread; so are samples that draw random numbers, which are used in their turn and never stored.

The first sample that a process reads is read in the caller's thread, too: many datasets open what they read
from then, and threads would open it several times.

The threads live as long as one call: to start sixteen takes a millisecond, beside reads of twenty, and a
process that forks has none of them.

Not every dataset can be read by several threads: a database connection belongs to the thread that opened it,
a file has one position. If a sample raises in a thread, and not when the caller's own thread reads it again,
the process reads all further samples one after the other. Two threads that move one file's position give
wrong bytes without any exception: that is why ``concurrency=`` is left to the user.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from hotset.dataset.pipeline import Source, transformed
from hotset.determinism.draws import entropy
from hotset.determinism.draws.rng import Generators
from hotset.determinism.timing import Timed
from hotset.store.fill import Read

__all__ = ["NotingReader", "SourceReader", "seconds_in_groups", "spread"]

_GROUP = 64
_GROUP_SECONDS = 0.1


class SourceReader:
    """Reads samples up to the cut, by their indices in the dataset. It pickles.

    Args:
        source: the dataset and its transforms, cut.
        concurrency: how many samples are read at once.

    Attributes:
        calls: how many samples this process was asked for so far.
        threads: the same; 1 once a sample could not be read in a thread, but could be read alone.
        trouble: a sentence for the user that says so; None before.
    """

    def __init__(self, source: Source, concurrency: int) -> None:
        self._source = source
        self._alone, self._together = source.halves()
        self._batch = max((step.size for step in source.batched), default=1)
        self.threads = concurrency
        self.trouble: str | None = None
        self.calls = 0
        self._process: int | None = None  # the process in which a first sample was read

    @property
    def at_once(self) -> int:
        """How many samples are to be asked for together."""
        return max(self.threads, self._batch)

    @property
    def in_groups(self) -> bool:
        """Whether the dataset itself reads several samples together."""
        return bool(getattr(self._source.dataset, "__getitems__", None))

    @property
    def cuts(self) -> bool:
        """Whether chains of the dataset's own are cut."""
        return bool(self._source.calls)

    def __call__(self, index: int) -> Any:
        self.calls += 1
        return self._source.read(index)

    def whole(self, index: int) -> Any:
        """Read a sample that is not to be cached, and may draw: nothing of the dataset's is cut."""
        self.calls += 1
        return self._source.read_whole(index)

    def many_whole(self, indices: Sequence[int]) -> Iterator[Any]:
        """As :meth:`whole`, for several samples, which come in order."""
        self.calls += len(indices)
        return self._source.read_many_whole(indices)

    def many(self, indices: Sequence[int]) -> Iterator[Any]:
        """Read several samples; they come in order."""
        self.calls += len(indices)
        if self.threads > 1 and len(indices) > 1:
            return transformed(self._in_threads(indices), self._together)
        return self._source.read_many(indices)

    def _in_threads(self, indices: Sequence[int]) -> Iterator[Any]:
        if self._process != os.getpid():
            self._process = os.getpid()
            yield self._alone.read(indices[0])
            indices = indices[1:]
        threads = min(self.threads, len(indices))
        # Otherwise torch starts a team of OpenMP threads in each, and the teams slow each other down.
        pool = ThreadPoolExecutor(threads, "hotset-read", partial(torch.set_num_threads, 1))
        try:
            futures = [pool.submit(self._read_in_thread, index) for index in indices]
            for index, future in zip(indices, futures, strict=True):
                error = future.exception()
                if error is None:
                    value, calls = future.result()
                    entropy.add(calls)
                    yield value
                elif isinstance(error, Exception):
                    yield self._read_alone(index, error)
                else:
                    raise error
        finally:
            # Reads that have begun are waited for: they use the dataset, which is the caller's again then.
            pool.shutdown(cancel_futures=True)

    def _read_in_thread(self, index: int) -> tuple[Any, int]:
        """A sample, and how often its reading has taken entropy."""
        before = entropy.taken()
        value = self._alone.read(index)
        return value, entropy.taken() - before

    def _read_alone(self, index: int, error: Exception) -> Any:
        """Read a sample again that could not be read in a thread."""
        value = self._alone.read(index)  # raises as without threads, unless the thread was at fault
        if self.threads > 1:
            self.threads = 1
            kind = type(self._source.dataset).__name__
            self.trouble = (
                f"{kind} does not bear concurrency=: sample {index} raised {type(error).__name__} ({error}) "
                "in a thread, and could be read alone. Its samples are read one after the other from now on; "
                "leave concurrency= out, or let the dataset open what it reads from once for each thread."
            )
        return value


class NotingReader:
    """Reads samples with another reader, and notes which sample raised which exception.

    Args:
        read: the other reader.
        failed: receives the exceptions, by sample id.
    """

    def __init__(self, read: Read, failed: dict[int, Exception]) -> None:
        self._read = read
        self._failed = failed
        self.at_once = getattr(read, "at_once", 1)

    def __call__(self, sample: int) -> Any:
        (value,) = self.many([sample])
        return value

    def many(self, samples: Sequence[int]) -> Iterator[Any]:
        """Read several samples; they come in order."""
        many = getattr(self._read, "many", None)
        values = iter(map(self._read, samples) if many is None else many(samples))
        for sample in samples:
            try:
                yield next(values)
            except Exception as error:
                self._failed[sample] = error
                raise


def spread(length: int, count: int) -> list[int]:
    """At most so many indices, evenly spread over a dataset of this length, from both ends inwards.

    In sorted datasets, lengths and shapes differ most between the ends.

    Example:
        >>> spread(10, 4), spread(2, 4)
        ([0, 9, 3, 6], [0, 1])
    """
    indices = {place * (length - 1) // (count - 1) for place in range(count)}
    return sorted(indices, key=lambda index: (min(index, length - 1 - index), index))


def seconds_in_groups(read: Callable[[list[int]], Any], alone: float, length: int) -> float:
    """The seconds that a sample takes where a group of them is read at once, as a fill does.

    Args:
        read: reads several samples by their indices.
        alone: the seconds for a sample that is read by itself; returned if groups are no faster.
    """
    count = min(_GROUP, length, int(_GROUP_SECONDS / max(alone, 1e-6)))
    if count < 2:
        return alone
    indices = sorted(spread(length, count))
    timed = Timed(read)
    with Generators((read,)), contextlib.suppress(Exception):  # one that is not read may never be asked for
        for _ in range(2):  # what is imported or opened at first counts once
            timed(indices)
        return min(alone, *(each / count for each in timed.times))
    return alone
