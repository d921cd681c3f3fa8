"""What a cache of the program's dataset would hold and give, tried in a fork of the program.

The fork has the dataset as the program has it, and may do with it what it likes: the program's own
generators, files and caches stay as they are. It reads for some seconds, with torch's threads held to one and
the program's own workers stopped, and writes one dictionary, on a line for each time that it knows more:

==========  ==============================================================================================
``plan``    of :func:`hotset.cache` over the whole dataset, as its ``plan.to_dict()`` gives it
``refused`` in place of it, the sentence with which hotset.cache refuses
``late``    whether that is because the trial did not come to its end
``forks``   whether the program's workers are forks of it, as those of the trial are
``given``   arguments of the program's loader that it, or a library's own kind of loader, has set
``loaders`` rates of loaders by themselves: ``cached-N`` with N workers over samples that are in the cache,
            ``torch-N`` torch's over these, with the program's N workers; ``plain-N`` torch's over the
            dataset as it is, with the program's workers, or one if it has none, and without; ``run-N``
            torch's below ``hotset run``, with the program's N
``run``     what that has kept: see :mod:`hotset.run.doctor.run_trial`
``failed``  why one of the latter two gave no batch, by the same names
==========  ==============================================================================================

The rates are those of :mod:`hotset.run.doctor.measured`; over a cache there is a second one, with a stand-in
for the program's step between the batches: see :mod:`hotset.run.doctor.stand_in`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import os
import random
import secrets
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, default_collate, default_convert

import hotset
from hotset.dataset.parent_death import ParentDeathSignal, parent_death_signal
from hotset.dataset.streams.source import is_stream
from hotset.run.doctor.loop import LoaderSettings, StepLength
from hotset.run.doctor.measured import (
    FILL_SECONDS,
    LEAST_BATCHES,
    MOST_TRIED,
    WORKER_SECONDS,
    MeasuredLoader,
    seconds_of,
    sentence_of,
)
from hotset.run.doctor.run_trial import try_run
from hotset.run.doctor.stand_in import StandIn
from hotset.session.job import JOB
from hotset.units import format_seconds

__all__ = ["in_fork"]

_PATIENCE_SECONDS = 60.0


def in_fork(
    settings: LoaderSettings, step: StepLength | None, *, drops: bool = False, decodes: bool = False
) -> str:
    """Try in a child process, and wait for it.

    Args:
        step: the program's, for a batch, beside no workers; None if that is not known.
        drops: whether that has the time in which it gives the memory of a batch back.
        decodes: whether it calls functions that ``hotset run`` knows.

    Returns:
        JSON, one line.
    """
    reader, writer = os.pipe()
    program = parent_death_signal()
    child = os.fork()
    if child == 0:
        _child(settings, step, drops, decodes, writer, program)
    os.close(writer)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    try:
        lines = _read(reader, deadline).split("\n")
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if lines[-2:] == ["", ""]:
        return lines[-3]
    reason = "the process that tried it died"
    if time.monotonic() >= deadline:
        reason = f"the trial took longer than {format_seconds(_PATIENCE_SECONDS)}"
    # The loaders that were tried before are known.
    found = json.loads(lines[-2]) if lines[1:] else {"loaders": {}}
    return json.dumps({**found, "refused": reason, "late": True})


def _read(reader: int, deadline: float) -> str:
    """Read lines until there is an empty one, which is the last."""
    parts: list[bytes] = []
    os.set_blocking(reader, False)
    while time.monotonic() < deadline:
        try:
            parts.append(os.read(reader, 1 << 16))
        except BlockingIOError:
            time.sleep(0.02)
            continue
        # Its helpers, or those of the dataset, may have the pipe for longer than it lives.
        if not parts[-1] or b"".join(parts[-2:]).endswith(b"\n\n"):
            break
    return b"".join(parts).decode()


def _child(
    settings: LoaderSettings,
    step: StepLength | None,
    drops: bool,
    decodes: bool,
    writer: int,
    program: ParentDeathSignal,
) -> None:
    """In the fork: try, say what came out, and end without the program's own endings, or with the program."""
    try:
        program.arm_in_worker(0)
        # Of torch's loaders: this process has no workers that could have died.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ[JOB] = secrets.token_hex(8)  # the program's own caches are not this process's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        logging.disable()  # the program's log may be a file
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # they are the program's
        torch.set_num_threads(1)
        gc.freeze()  # what hotset has imported must not make workers look at all objects: see sitecustomize
        warnings.simplefilter("ignore")
        for found in _tried(settings, step, drops, decodes):
            os.write(writer, f"{json.dumps(found)}\n".encode())
        _kill_workers()
        os.write(writer, b"\n")  # whoever reads this kills this process
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(writer, f"{json.dumps({'refused': sentence_of(error), 'loaders': {}})}\n\n".encode())
    finally:
        _kill_workers()
        os._exit(0)


def _kill_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.kill()


def _tried(
    settings: LoaderSettings, step: StepLength | None, drops: bool, decodes: bool
) -> Iterator[dict[str, Any]]:
    """What is known so far, once more after what may take too long."""
    found: dict[str, Any] = {
        "forks": settings.forks,
        "given": _given(settings),
        "loaders": {},
        "failed": {},
    }
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
            found["refused"] = f"a worker that was tried gave no batch within {WORKER_SECONDS} s"
            yield found
            return
        if not settings.workers:
            release = _try_plain(settings, 0, found)
        yield found
        alone = _stand_in(step, release * settings.batch_size if drops else 0.0)
        _try_cache(settings, alone, found)
        yield found
        if decodes:
            try_run(settings, alone, found)
        if settings.workers:
            _try_plain(settings, 0, found)
    yield found


def _given(settings: LoaderSettings) -> list[str]:
    """The functions that the loader has and torch's would not have by itself, as arguments."""
    functions = {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn}
    return [
        f"{argument}={_named(function)}"
        for argument, function in functions.items()
        if function not in (None, default_collate, default_convert)
    ]


def _named(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"functools.partial({_named(function.func)}, ...)"
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _try_plain(settings: LoaderSettings, workers: int, found: dict[str, Any]) -> float:
    """torch's loader: what it takes to hand a batch over, or samples that need not be handed over.

    Returns:
        Seconds a sample to give back a batch's memory; 0.0 if that was not tried.
    """
    try:
        measured = MeasuredLoader(DataLoader, settings.dataset, settings, workers).measure(None)
    except Exception as error:
        found["failed"][f"plain-{workers}"] = sentence_of(error)
        return 0.0
    found["loaders"][f"plain-{workers}"] = measured
    return measured["release"] or 0.0


def _stand_in(step: StepLength | None, release: float) -> StandIn | None:
    """The step without what it takes to give back torch's batch: over a cache it gives back another."""
    if step is None:
        return None
    return StandIn.of(StepLength(*(max(each - release, 0.0) for each in step)))


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
                loader = MeasuredLoader(hotset.DataLoader, cached, settings, workers)
                found["loaders"][f"cached-{workers}"] = loader.measure(step)
            torchs = MeasuredLoader(DataLoader, cached, settings, settings.workers)
            found["loaders"][f"torch-{settings.workers}"] = torchs.measure(step)
    except Exception as error:
        found["refused"] = sentence_of(error)


def _count(settings: LoaderSettings, seconds: float, size: int, room: int) -> int:
    """How many samples to try: as many as are read in some seconds, and fit."""
    batch = settings.batch_size or 1
    count = int(seconds_of(FILL_SECONDS) / max(seconds, 1e-6))
    count = min(max(count, LEAST_BATCHES * batch), MOST_TRIED, len(settings.dataset))
    return min(count, room // (2 * max(size, 1)))
