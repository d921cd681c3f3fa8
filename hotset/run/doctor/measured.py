"""A loader's rates, by itself and with a stand-in for the program's step, in passes as long as the program's.

A pass begins with starting workers and ends with ending them, and new workers touch the memory of their
first batches for the first time: a third of a short pass. So the rates are those of whole passes, of as many
batches as the program's have, even where only a part of one is gone through.

Where a program is watched shortly (``--seconds``), each part of a trial is shorter, too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import RandomSampler, Sampler

from hotset.errors import HotsetError
from hotset.loader.batch_order import whole_epoch
from hotset.run.doctor.loop import LoaderSettings, left_out
from hotset.run.doctor.stand_in import StandIn
from hotset.run.environment import watch_options_here

__all__ = [
    "FILL_SECONDS",
    "LEAST_BATCHES",
    "MOST_TRIED",
    "WORKER_SECONDS",
    "MeasuredLoader",
    "arguments_of",
    "seconds_of",
    "sentence_of",
]

WORKER_SECONDS = 20  # a worker that gives no batch for as long waits for a thread or a lock that it lacks
LEAST_BATCHES, _MOST_BATCHES = 4, 2_000
FILL_SECONDS, MOST_TRIED = 3.0, 20_000  # of a cache, and samples
# Indices that are drawn as a list, which takes 0.7 GB: where there are more, a program need not do so.
_MOST_LISTED = 1 << 24
_RATE_SECONDS, _LONGEST_SECONDS = 1.5, 5.0
_READY_BATCHES, _LONGEST_REST_SECONDS = 7, 0.3
# Watched for less, a program gets a trial that is shorter in proportion; than a tenth it would tell nothing.
_WATCHED_SECONDS, _LEAST_SHARE = 8.0, 0.1


def seconds_of(usual: float) -> float:
    """How long a part of the trial takes that usually takes so many seconds."""
    options = watch_options_here()
    share = 1.0 if options is None else options.seconds / _WATCHED_SECONDS
    return usual * min(max(share, _LEAST_SHARE), 1.0)


def arguments_of(settings: LoaderSettings, workers: int) -> dict[str, Any]:
    """A loader's arguments, as the program has them, but for its batches and its number of workers.

    Workers are forks, whatever the program's are: others know nothing of the trial, and the server that forks
    them is no child of the process that tries. What the program's take longer to start is added later.
    """
    forks = {"multiprocessing_context": "fork", "timeout": WORKER_SECONDS}
    more = {"worker_init_fn": settings.worker_init_fn, **forks} if workers else {}
    return {"num_workers": workers, "collate_fn": settings.collate_fn, **more}


class _Unknown(Sampler[int]):
    """The same order, from a sampler that hotset.DataLoader does not know."""

    def __init__(self, order: Sampler[int]) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


def _order(settings: LoaderSettings, count: int, length: int) -> Sampler[int]:
    """So many indices of a dataset of ``count`` samples, in orders drawn one after the other.

    With a sampler of torch's own, hotset.DataLoader knows later batches, and makes the next one meanwhile.
    """
    order = RandomSampler(range(count), replacement=count > _MOST_LISTED, num_samples=length)
    return order if whole_epoch(settings.order) is not None else _Unknown(order)


class _Measured(NamedTuple):
    """A loader by itself.

    Attributes:
        rate: samples a second, of whole passes.
        main: seconds a sample in which the main thread is busy with a batch that is ready.
        cpu: processor seconds a sample, of all processes.
        release: seconds a sample that the main thread takes to give back a batch's memory. A loop does so
            within its step, when it has the next batch.
        start: seconds a sample, of a whole pass, that starting the workers takes.
        training: samples a second with a stand-in for the program's step; None if that was not tried.
    """

    rate: float
    main: float
    cpu: float
    release: float
    start: float
    training: float | None = None


class _Pass(NamedTuple):
    """What was measured of a pass, or of several: batches, and seconds.

    Attributes:
        start: until the first batch of each worker was there, and used; these count nowhere else.
    """

    batches: int
    seconds: float
    cpu: float
    release: float
    start: float


class MeasuredLoader:
    """A loader with the program's settings, over a dataset, whose passes are as long as the program's."""

    def __init__(
        self, kind: Callable[..., Any], dataset: Any, settings: LoaderSettings, workers: int
    ) -> None:
        self._batch_size = settings.batch_size or 1
        self._length = settings.batches
        batches = settings.batches or _MOST_BATCHES
        self._left_out = left_out(settings.batches, workers)
        self._seconds, self._longest = seconds_of(_RATE_SECONDS), seconds_of(_LONGEST_SECONDS)
        self._batches: Iterable[Any] = kind(
            dataset,
            batch_size=self._batch_size,
            sampler=_order(settings, len(dataset), batches * self._batch_size),
            drop_last=True,
            **arguments_of(settings, workers),
        )

    def measure(self, step: StandIn | None) -> dict[str, float | None]:
        """Its figures with nothing between the batches, and its rate with this step, if there is one.

        Returns:
            The fields of :class:`_Measured`.
        """
        measured = self._alone()
        if step is not None:
            measured = measured._replace(training=self._rate(self._passes(step)))
        return measured._asdict()

    def _alone(self) -> _Measured:
        sums = self._passes(None)
        samples = sums.batches * self._batch_size
        ready = self._seconds_if_ready(sums.seconds / sums.batches) / self._batch_size
        start = self._start(sums) / self._batch_size
        return _Measured(self._rate(sums), ready, sums.cpu / samples, sums.release / samples, start)

    def _rate(self, sums: _Pass) -> float:
        """Samples a second, of a whole pass."""
        return self._batch_size / (sums.seconds / sums.batches + self._start(sums))

    def _start(self, sums: _Pass) -> float:
        """What the start adds to each batch of a whole pass, in seconds."""
        if self._length is None:
            return 0.0
        return max(sums.start - self._left_out * sums.seconds / sums.batches, 0.0) / self._length

    def _passes(self, step: StandIn | None) -> _Pass:
        """The sums of some passes, and their median start."""
        passes, begin = [], time.perf_counter()
        while True:
            passes.append(self._pass(step))
            sums = _Pass(*(sum(each) for each in zip(*passes, strict=True)))
            if sums.batches == 0:
                raise RuntimeError("the dataset gave no batch when it was tried")
            enough = sums.seconds >= self._seconds and sums.batches >= LEAST_BATCHES
            if enough or time.perf_counter() - begin >= self._longest:
                return sums._replace(start=statistics.median(each.start for each in passes))

    def _pass(self, step: StandIn | None) -> _Pass:
        """A pass to its end, or of some seconds of a long one."""
        made, start = time.perf_counter(), 0.0
        begin, cpu, count, release = 0.0, 0.0, -self._left_out, 0.0
        kept: list[Any] = [None]  # a batch goes when the next has come, as in a program
        for batch in self._batches:
            count += 1
            there = time.perf_counter()
            kept[0] = batch
            if count > 0:
                release += time.perf_counter() - there
            if step is not None:
                step()
            if count == 0:
                begin, cpu = time.perf_counter(), _processor_seconds()
                start = begin - made
            if count >= LEAST_BATCHES and time.perf_counter() - begin >= self._seconds:
                break
        if count <= 0:
            return _Pass(0, 0.0, 0.0, 0.0, 0.0)
        return _Pass(count, time.perf_counter() - begin, _processor_seconds() - cpu, release, start)

    def _seconds_if_ready(self, each: float) -> float:
        """How long the main thread takes to get a batch that waits for it: after a rest, one is there.

        That is more than its processor time: it asks the worker for the memory's descriptor, and waits.
        """
        batches, lengths = iter(self._batches), []
        for number in range(self._left_out + _READY_BATCHES):
            time.sleep(min(3.0 * each + 2e-3, _LONGEST_REST_SECONDS))
            begin = time.perf_counter()
            if next(batches, None) is None:
                break
            if number >= self._left_out:
                lengths.append(time.perf_counter() - begin)
        return statistics.median(lengths or [0.0])


def _processor_seconds() -> float:
    """Of this process and its workers, those that have ended among them."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for worker in multiprocessing.active_children():
        for thread in Path(f"/proc/{worker.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                total += int(thread.read_text().split()[0]) / 1e9
    return total


def sentence_of(error: BaseException) -> str:
    """What an error of a loader says, in one line."""
    lines = str(error).strip().splitlines() or [""]
    if "in DataLoader worker process" in lines[0]:  # the worker's traceback follows
        return lines[-1]
    return lines[0] if isinstance(error, HotsetError) else f"{type(error).__name__}: {lines[0]}"
