"""What a cache of the program's dataset would hold and give, tried in a fork of the program.

The fork has the dataset as the program has it, and may do with it what it likes: the program's own
generators, files and caches stay as they are. It reads for some seconds, with torch's threads held to one and
the program's own workers stopped, and writes one dictionary, on a line for each time that it knows more:

==========  ==============================================================================================
``plan``    of :func:`hotset.cache` over the whole dataset, as :meth:`hotset.dataset.plan.Plan.to_dict`
``refused`` in place of it, the sentence with which hotset.cache refuses
``loaders`` rates of loaders by themselves: ``cached-N`` with N workers over samples that are in the cache,
            ``plain-N`` torch's over the dataset as it is, with the program's workers, or one if it has none,
            and without
``failed``  why one of the latter gave no batch, by the same names
==========  ==============================================================================================

A loader's rate is measured over a second or two, in passes as long as the program's own, without the first
batch of each worker. What else a pass begins and ends with counts as it does in the program: new workers
touch the memory of their first batches for the first time, and it takes a tenth of a short pass until they
have ended. Over a cache there is a second rate, with a stand-in for the program's step between the batches:
see :mod:`hotset.run.doctor.stand_in`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import secrets
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, Subset

import hotset
from hotset.dataset.stream_source import is_stream
from hotset.loader.batch_order import whole_epoch
from hotset.run.doctor.loop import LoaderSettings, StepLength, left_out
from hotset.run.doctor.stand_in import StandIn
from hotset.session.job import JOB
from hotset.units import format_seconds

__all__ = ["in_fork"]

_PATIENCE_SECONDS = 60.0
_WORKER_SECONDS = 20  # a worker that gives no batch for as long waits for a thread or a lock that it lacks
_FILL_SECONDS, _RATE_SECONDS, _LONGEST_SECONDS = 3.0, 1.5, 5.0
_LEAST_BATCHES, _MOST_BATCHES = 4, 2_000
_READY_BATCHES, _LONGEST_REST_SECONDS = 7, 0.3
_MOST_TRIED = 20_000  # samples


def in_fork(settings: LoaderSettings, step: StepLength | None) -> str:
    """Try in a child process, and wait for it.

    Args:
        settings: of the program's loader.
        step: the program's, for a batch, beside no workers; None if that is not known.

    Returns:
        JSON, one line.
    """
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        _child(settings, step, told)
    os.close(told)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    try:
        lines = _read(ready, deadline).split("\n")
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if lines[-2:] == ["", ""]:
        return lines[-3]
    reason = "the process that tried it died"
    if time.monotonic() >= deadline:
        reason = f"the trial took longer than {format_seconds(_PATIENCE_SECONDS)}"
    # The loaders that were tried before are known.
    return json.dumps({**(json.loads(lines[-2]) if lines[1:] else {"loaders": {}}), "refused": reason})


def _read(ready: int, deadline: float) -> str:
    """Read lines until there is an empty one, which is the last."""
    parts: list[bytes] = []
    os.set_blocking(ready, False)
    while time.monotonic() < deadline:
        try:
            parts.append(os.read(ready, 1 << 16))
        except BlockingIOError:
            time.sleep(0.02)
            continue
        # Its helpers, or those of the dataset, may have the pipe for longer than it lives.
        if not parts[-1] or b"".join(parts[-2:]).endswith(b"\n\n"):
            break
    return b"".join(parts).decode()


def _child(settings: LoaderSettings, step: StepLength | None, told: int) -> None:
    """In the fork: try, say what came out, and end without the program's own endings."""
    try:
        # Of torch's loaders: this process has no workers that could have died.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ[JOB] = secrets.token_hex(8)  # the program's own caches are not this process's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # they are the program's
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        for found in _tried(settings, step):
            os.write(told, f"{json.dumps(found)}\n".encode())
        os.write(told, b"\n")
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(told, f"{json.dumps({'refused': _sentence(error), 'loaders': {}})}\n\n".encode())
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(0)


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    if "in DataLoader worker process" in lines[0]:  # the worker's traceback follows
        return lines[-1]
    return lines[0] if isinstance(error, hotset.HotsetError) else f"{type(error).__name__}: {lines[0]}"


def _tried(settings: LoaderSettings, step: StepLength | None) -> Iterator[dict[str, Any]]:
    """What is known so far, once more after what may take too long."""
    found: dict[str, Any] = {"loaders": {}, "failed": {}}
    if settings.batch_size is None:
        found["refused"] = (
            "the loader has batch_size=None: rates of samples cannot be told from rates of batches"
        )
    elif isinstance(settings.dataset, (hotset.CachedDataset, hotset.CachedStream)):
        found["refused"] = "the dataset is cached already"
    elif is_stream(settings.dataset):
        found["refused"] = (
            "the dataset can only be iterated over. hotset.cache records it in its first pass, and later "
            "epochs come from memory, but a trial would have to read all of it; see docs/streams.md"
        )
    else:
        # What a program with workers does not do itself comes last: it may change what the program's own
        # functions keep, of which new workers have a copy.
        workers = max(settings.workers, 1)
        release = _try_plain(settings, workers, found)
        if "timed out" in found["failed"].get(f"plain-{workers}", ""):
            found["refused"] = f"a worker that was tried gave no batch within {_WORKER_SECONDS} s"
            yield found
            return
        if not settings.workers:
            release = _try_plain(settings, 0, found)
        yield found
        _try_cache(settings, _without(release, settings, step), found)
        if settings.workers:
            _try_plain(settings, 0, found)
    yield found


def _try_plain(settings: LoaderSettings, workers: int, found: dict[str, Any]) -> float:
    """torch's loader: what it takes to hand a batch over, or samples that need not be handed over.

    Returns:
        Seconds a sample to give back a batch's memory; 0.0 if that was not tried.
    """
    try:
        measured = _Loader(DataLoader, settings.dataset, settings, workers).alone()
    except Exception as error:
        found["failed"][f"plain-{workers}"] = _sentence(error)
        return 0.0
    found["loaders"][f"plain-{workers}"] = measured._asdict()
    return measured.release


def _without(release: float, settings: LoaderSettings, step: StepLength | None) -> StandIn | None:
    """The step without the time in which it gives back torch's batch; over a cache it gives back another."""
    if step is None:
        return None
    spared = release * (settings.batch_size or 1)
    return StandIn.of(StepLength(*(max(each - spared, 0.0) for each in step)))


def _try_cache(settings: LoaderSettings, step: StandIn | None, found: dict[str, Any]) -> None:
    try:
        with hotset.cache(settings.dataset, memory="auto") as cached:
            plan = cached.plan
            found["plan"] = plan.to_dict()
        count = _count(settings, plan.sample_seconds + plan.live_seconds, plan.sample_bytes, plan.room)
        if count == 0 or plan.fits == 0.0:
            return
        part = Subset(settings.dataset, random.Random(0).sample(range(plan.samples), count))
        with hotset.cache(part, memory=round(1.2 * count * plan.sample_bytes) + (64 << 20)) as cached:
            cached.fill()
            more = {len(os.sched_getaffinity(0))} if plan.live else set()
            for workers in sorted({settings.workers, *more}, reverse=True):
                loader = _Loader(hotset.DataLoader, cached, settings, workers)
                measured = loader.alone()
                if step is not None:
                    measured = measured._replace(training=loader.with_steps(step))
                found["loaders"][f"cached-{workers}"] = measured._asdict()
    except Exception as error:
        found["refused"] = _sentence(error)


def _count(settings: LoaderSettings, seconds: float, size: int, room: int) -> int:
    """How many samples to try: as many as are read in some seconds, and fit."""
    batch = settings.batch_size or 1
    count = int(_FILL_SECONDS / max(seconds, 1e-6))
    count = min(max(count, _LEAST_BATCHES * batch), _MOST_TRIED, len(settings.dataset))
    return min(count, room // (2 * max(size, 1)))


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
    order = RandomSampler(range(count), num_samples=length)
    return order if whole_epoch(settings.order) is not None else _Unknown(order)


class _Measured(NamedTuple):
    """A loader by itself.

    Attributes:
        rate: samples a second.
        main: seconds a sample in which the main thread is busy with a batch that is ready.
        cpu: processor seconds a sample, of all processes.
        release: seconds a sample that the main thread takes to give back a batch's memory. A loop does so
            within its step, when it has the next batch.
        training: samples a second with a stand-in for the program's step; None if that was not tried.
    """

    rate: float
    main: float
    cpu: float
    release: float
    training: float | None = None


class _Pass(NamedTuple):
    """What was measured of a pass, or of several: batches, and seconds."""

    batches: int
    seconds: float
    cpu: float
    release: float


class _Loader:
    """A loader with the program's settings, over a dataset, whose passes are as long as the program's."""

    def __init__(
        self, kind: Callable[..., Any], dataset: Any, settings: LoaderSettings, workers: int
    ) -> None:
        self._batch_size = settings.batch_size or 1
        batches = settings.batches or _MOST_BATCHES
        self._left_out = left_out(settings.batches, workers)
        more: dict[str, Any] = {}
        if workers:
            more = {"worker_init_fn": settings.worker_init_fn, "timeout": _WORKER_SECONDS}
        self._batches: Iterable[Any] = kind(
            dataset,
            batch_size=self._batch_size,
            sampler=_order(settings, len(dataset), batches * self._batch_size),
            num_workers=workers,
            collate_fn=settings.collate_fn,
            multiprocessing_context="fork" if workers else None,
            drop_last=True,
            **more,
        )

    def alone(self) -> _Measured:
        """Its figures, with nothing between the batches."""
        sums = self._passes(None)
        samples = sums.batches * self._batch_size
        ready = self._seconds_if_ready(sums.seconds / sums.batches) / self._batch_size
        return _Measured(samples / sums.seconds, ready, sums.cpu / samples, sums.release / samples)

    def with_steps(self, step: StandIn) -> float:
        """Samples a second with this step after each batch."""
        sums = self._passes(step)
        return sums.batches * self._batch_size / sums.seconds

    def _passes(self, step: StandIn | None) -> _Pass:
        passes, begin = [], time.perf_counter()
        while True:
            passes.append(self._pass(step))
            sums = _Pass(*(sum(each) for each in zip(*passes, strict=True)))
            if sums.batches == 0:
                raise RuntimeError("the dataset gave no batch when it was tried")
            enough = sums.seconds >= _RATE_SECONDS and sums.batches >= _LEAST_BATCHES
            if enough or time.perf_counter() - begin >= _LONGEST_SECONDS:
                return sums

    def _pass(self, step: StandIn | None) -> _Pass:
        """A pass to its end, or of some seconds of a long one."""
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
            if count >= _LEAST_BATCHES and time.perf_counter() - begin >= _RATE_SECONDS:
                break
        if count <= 0:
            return _Pass(0, 0.0, 0.0, 0.0)
        return _Pass(count, time.perf_counter() - begin, _processor_seconds() - cpu, release)

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
