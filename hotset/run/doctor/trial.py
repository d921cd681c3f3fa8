"""What a cache of the program's dataset would hold and give, tried in a fork of the program.

The fork has the dataset as the program has it, and may do with it what it likes: the program's own
generators, files and caches stay as they are. It reads for some seconds, with torch's threads held to one and
the program's own workers stopped, and writes one dictionary:

==========  ==============================================================================================
``plan``    of :func:`hotset.cache` over the whole dataset, as :meth:`hotset.dataset.plan.Plan.to_dict`
``refused`` in place of it, the sentence with which hotset.cache refuses
``loaders`` rates of loaders by themselves: ``cached-N`` with N workers over samples that are in the cache,
            ``plain-1`` torch's with one worker over the dataset as it is, ``plain-0`` without, if the program
            has workers
==========  ==============================================================================================

A loader's rate is measured over a second or two, in passes as long as the program's own, without the first
batch of each worker. What else a pass begins with counts as it does in the program: new workers touch the
memory of their first batches for the first time, which is a third of a short pass over large samples.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import secrets
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler, Subset

import hotset
from hotset.dataset.stream_source import is_stream
from hotset.run.doctor import watch
from hotset.session.job import JOB
from hotset.units import format_seconds

__all__ = ["in_fork"]

_PATIENCE_SECONDS = 60.0
_FILL_SECONDS, _RATE_SECONDS, _LONGEST_SECONDS = 3.0, 1.5, 5.0
_LEAST_BATCHES, _MOST_BATCHES = 4, 2_000
_READY_BATCHES, _LONGEST_REST_SECONDS = 7, 0.3
_MOST_TRIED = 20_000  # samples


def in_fork(settings: watch.Settings) -> str:
    """Try in a child process, and wait for it; returns JSON, one line."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        _child(settings, told)
    os.close(told)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    parts: list[bytes] = []
    os.set_blocking(ready, False)
    try:
        while time.monotonic() < deadline:
            try:
                part = os.read(ready, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            parts.append(part)
            # Its helpers, or those of the dataset, may have the pipe for longer than it lives.
            if not part or part.endswith(b"\n"):
                break
        else:
            return _refusal(f"the trial took longer than {format_seconds(_PATIENCE_SECONDS)}")
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = b"".join(parts).decode()
    return text if text.endswith("\n") else _refusal("the process that tried it died")


def _refusal(sentence: str) -> str:
    return json.dumps({"refused": sentence, "loaders": {}}) + "\n"


def _child(settings: watch.Settings, told: int) -> None:
    """In the fork: try, say what came out, and end without the program's own endings."""
    try:
        watch.watch_no_more()
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
        text = json.dumps(_tried(settings)) + "\n"
        with open(told, "w") as file:
            file.write(text)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(told, _refusal(_sentence(error)).encode())
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(0)


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, hotset.HotsetError) else f"{type(error).__name__}: {text}"


def _tried(settings: watch.Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"loaders": {}}
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
        _try_cache(settings, found)
        _try_plain(settings, found)
    return found


def _try_cache(settings: watch.Settings, found: dict[str, Any]) -> None:
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
            for workers in (
                {settings.workers, len(os.sched_getaffinity(0))} if plan.live else {settings.workers}
            ):
                loader = _loader(hotset.DataLoader, cached, settings, workers, count)
                found["loaders"][f"cached-{workers}"] = _rate(loader, workers, settings)._asdict()
    except Exception as error:
        found["refused"] = _sentence(error)


def _try_plain(settings: watch.Settings, found: dict[str, Any]) -> None:
    """torch's loader: what it takes to hand a batch over, and samples that need not be handed over."""
    for workers in {1} if settings.workers == 0 else {0, 1}:
        with contextlib.suppress(Exception):
            loader = _loader(DataLoader, settings.dataset, settings, workers, len(settings.dataset))
            found["loaders"][f"plain-{workers}"] = _rate(loader, workers, settings)._asdict()


def _count(settings: watch.Settings, seconds: float, size: int, room: int) -> int:
    """How many samples to try: as many as are read in some seconds, and fit."""
    batch = settings.batch_size or 1
    count = int(_FILL_SECONDS / max(seconds, 1e-6))
    count = min(max(count, _LEAST_BATCHES * batch), _MOST_TRIED, len(settings.dataset))
    return min(count, room // (2 * max(size, 1)))


class _Endless(Sampler[int]):
    """Indices in an order drawn anew in each round."""

    def __init__(self, count: int, batch_size: int) -> None:
        self._count, self._rounds = count, max(1, _MOST_BATCHES * batch_size // count) + 1

    def __len__(self) -> int:
        return self._count * self._rounds

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._rounds):
            yield from torch.randperm(self._count).tolist()


def _loader(
    kind: Callable[..., Any], dataset: Any, settings: watch.Settings, workers: int, count: int
) -> Iterable[Any]:
    size = settings.batch_size or 1
    more: dict[str, Any] = {"worker_init_fn": settings.worker_init_fn} if workers else {}
    loader: Iterable[Any] = kind(
        dataset,
        batch_size=size,
        sampler=_Endless(count, size),
        num_workers=workers,
        collate_fn=settings.collate_fn,
        multiprocessing_context="fork" if workers else None,
        drop_last=True,
        **more,
    )
    return loader


class _Measured(NamedTuple):
    """A loader by itself.

    Attributes:
        rate: samples a second.
        main: seconds a sample in which the main thread is busy with a batch that is ready.
        cpu: processor seconds a sample, of all processes.
        release: seconds a sample that the main thread takes to give back a batch's memory. A loop does so
            within its step, when it has the next batch.
    """

    rate: float
    main: float
    cpu: float
    release: float


class _Pass(NamedTuple):
    """What was measured of a pass, or of several: batches, and seconds."""

    batches: int
    seconds: float
    cpu: float
    release: float


def _rate(loader: Iterable[Any], workers: int, settings: watch.Settings) -> _Measured:
    size, passes, begin = settings.batch_size or 1, [], time.perf_counter()
    while True:
        batches = iter(loader)
        passes.append(_pass(batches, workers, settings.batches))
        count, seconds, cpu, release = (sum(each) for each in zip(*passes, strict=True))
        if count == 0:
            raise RuntimeError("the dataset gave no batch when it was tried")
        enough = seconds >= _RATE_SECONDS and count >= _LEAST_BATCHES
        if enough or time.perf_counter() - begin >= _LONGEST_SECONDS:
            break
    samples = count * size
    ready = _seconds_if_ready(batches, seconds / count) / size
    return _Measured(samples / seconds, ready, cpu / samples, release / samples)


def _pass(batches: Iterator[Any], workers: int, length: int | None) -> _Pass:
    """A pass of so many batches, or as many as are needed of one without end."""
    left_out = watch.left_out(length, workers)
    for _ in range(left_out):
        next(batches, None)
    begin, cpu, count, release = time.perf_counter(), _processor_seconds(), 0, 0.0
    while length is None or count < max(length - left_out, 1):
        if time.perf_counter() - begin >= _RATE_SECONDS and count >= _LEAST_BATCHES:
            break
        batch = next(batches, None)
        if batch is None:
            break
        count += 1
        there = time.perf_counter()
        del batch
        release += time.perf_counter() - there
    return _Pass(count, time.perf_counter() - begin, _processor_seconds() - cpu, release)


def _seconds_if_ready(batches: Iterator[Any], each: float) -> float:
    """How long the main thread takes to get a batch that waits for it: after a rest, one is there.

    That is more than its processor time: it asks the worker for the memory's descriptor, and waits for it.
    """
    lengths = []
    for _ in range(_READY_BATCHES):
        time.sleep(min(3.0 * each + 2e-3, _LONGEST_REST_SECONDS))
        begin = time.perf_counter()
        next(batches, None)
        lengths.append(time.perf_counter() - begin)
    return statistics.median(lengths)


def _processor_seconds() -> float:
    """Of this process and its workers."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total
