"""Windows: what the filler costs an epoch, and MONAI's SmartCacheDataset on the same volumes.

*The filler's cost.* Two windows of the same pictures take turns: one of which a tenth is replaced after
each epoch, and one that stands still, which is nothing but a cache. Between batches the consumer computes for
two milliseconds, as training would, so that a core is idle now and then; where it computes nothing and two
workers crop, both cores are busy, and what the filler takes is missing elsewhere. Samples that were late are
told: a filler that does not keep up costs less than one that does.

*MONAI.* The same files, transforms, batches and workers: see :mod:`benchmarks.volumes`. Steps a second, with
the same computing in between, and what the process tree takes in memory (:mod:`benchmarks.window_job`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import volumes
from benchmarks.data import CROP, Generated, flip_and_crop
from benchmarks.harness import Comparison, Measure, Outcome, Spread, Target, compare
from benchmarks.jobs import run_once
from benchmarks.peers import Epoch, closing
from benchmarks.settings import Settings
from benchmarks.suite.contest import guarded, lead
from benchmarks.truth import CropTruth, RowTruth, Truth, WrongData
from benchmarks.window_job import HOTSET, MONAI, NONE

__all__ = ["Turns", "Work", "window", "window_monai"]

STILL = "replace = 0"
RUNNING = f"replace = {volumes.RATE:g}"
_WORK_SECONDS = 2e-3
_BATCH = 8
# What is to be told apart is a few per cent, and a round on a shared machine is off by more.
_ROUNDS = 12
# Sizes hardly differ from one round to the next.
_MEMORY_ROUNDS = 2


def window(settings: Settings) -> Outcome:
    """A window that runs while a core is idle now and then: 0.95 of the speed of one that stands still."""
    dataset = Generated(settings.images)
    rows = np.stack([np.asarray(dataset[i][0]) for i in range(len(dataset))])
    outcome = Outcome()
    for workers in (0, 2):
        for live in (False, True):
            found, late = _cost(settings, dataset, rows, workers, live, _WORK_SECONDS)
            outcome.comparisons.append(found)
            outcome.targets.append(lead(found.title, found, RUNNING, STILL, 0.95))
            outcome.notes.append(late)
    found, late = _cost(settings, dataset, rows, 2, True, 0.0)
    outcome.comparisons.append(found)
    ratio = found.lead(RUNNING, STILL)
    if ratio is not None:
        outcome.notes.append(f"{late}, by the clock {ratio.median:.2f}x of a window that stands still")
    return outcome


def window_monai(settings: Settings) -> Outcome:
    """1.5 times the steps of MONAI's SmartCacheDataset, in less memory."""
    speed, memory = _speed(settings), _memory(settings)
    return Outcome(
        speed.comparisons + memory.comparisons, speed.targets + memory.targets, speed.notes + memory.notes
    )


class Work:
    """Computes about as long as it is told to, in one thread: always as many multiplications."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.full((192, 192), 1 / 192)
        self._times = 1
        if seconds:
            self()
            self._times = max(1, round(seconds / min(self._timed() for _ in range(50))))
        else:
            self._times = 0

    def _timed(self) -> float:
        start = time.perf_counter()
        self()
        return time.perf_counter() - start

    def __call__(self) -> None:
        for _ in range(self._times):
            torch.mm(self._matrix, self._matrix)


class Turns:
    """A window as a contestant: called, it times whole epochs, in batches a second.

    The first time it checks an epoch before; later only the last batch, so that turns can be short and many.

    Args:
        epoch: begins an epoch.
        truth: what batches must hold.
        resident: how many samples an epoch has, none of them twice.
        seconds: of one timing, at least; whole epochs.
        work: what the consumer does with a batch.

    Attributes:
        processor: seconds of processor time that this process took for a batch, in each timing. Neighbours
            on a shared machine hardly move it.
    """

    def __init__(self, epoch: Epoch, truth: Truth, resident: int, seconds: float, work: Work) -> None:
        self._epoch = epoch
        self._truth = truth
        self._resident = resident
        self._seconds = seconds
        self._work = work
        self._checked = False
        self.processor: list[float] = []

    def __call__(self) -> float:
        if not self._checked:
            self.verify()
        count, elapsed, last = 0, 0.0, None
        start, processor = time.perf_counter(), time.process_time()
        while elapsed < self._seconds:
            for batch in self._epoch():
                last = batch
                self._work()
                count += 1
            elapsed = time.perf_counter() - start
        self.processor.append((time.process_time() - processor) / count)
        self._truth.check(last)
        return count / elapsed

    def verify(self) -> None:
        """Compare a whole epoch with the truth.

        Raises:
            WrongData: a sample differs, is missing, or came twice.
        """
        seen = [i for batch in self._epoch() for i in self._truth.check(batch)]
        if len(seen) != self._resident or len(set(seen)) != self._resident:
            raise WrongData(f"an epoch of {len(seen)} samples, {len(set(seen))} of them different")
        self._checked = True


# ---- the filler's cost -----------------------------------------------------------------------------------


def _cost(
    settings: Settings, dataset: Generated, rows: Any, workers: int, live: bool, seconds: float
) -> tuple[Comparison, str]:
    """Compare the two windows; say how many samples were late."""
    import hotset

    resident = len(dataset) // 3
    cut = [flip_and_crop] if live else None
    truth: Truth = CropTruth(rows, CROP) if live else RowTruth(rows)
    caches: dict[str, Any] = {}
    turns: dict[str, Turns] = {}
    with ExitStack() as stack:

        def opened(name: str, rate: float) -> Measure:
            sizes = hotset.Window(resident, replace=rate, prefill=True)
            cached = stack.enter_context(hotset.cache(dataset, transform=cut, window=sizes))
            caches[name] = cached
            loader = hotset.DataLoader(cached, _BATCH, num_workers=workers, persistent_workers=workers > 0)
            begin = closing(stack, loader)
            turns[name] = Turns(begin, truth, resident, 3 * settings.seconds, Work(seconds))
            return turns[name]

        contestants = {STILL: guarded(opened, STILL, 0.0), RUNNING: guarded(opened, RUNNING, volumes.RATE)}
        title = f"A window of images, {workers} workers, {'live crop' if live else 'nothing live'}" + (
            "" if seconds else ", nothing computed"
        )
        found = compare(
            contestants,
            STILL,
            settings.pairs if settings.quick else _ROUNDS,
            title=title,
            unit="batches/s",
            subjects=(RUNNING,),
            limits=(STILL,),
        )
        if reason := found.rows[RUNNING].unfit or found.rows[STILL].unfit:
            return found, reason
        cached = caches[RUNNING]
        left = cached.stats().replaced
        pairs = zip(turns[STILL].processor, turns[RUNNING].processor, strict=True)
        processor = Spread.of(still / running for still, running in pairs)
        return found, (
            f"{title}: {left:,} samples went in, {cached.stats().late:,} were late; by the processor time of "
            f"this process {processor.median:.2f}x"
        )


# ---- MONAI -----------------------------------------------------------------------------------------------


def _speed(settings: Settings) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        items = volumes.write(Path(folder), settings.volumes, settings.volume_side)
        for workers in (0, 2):
            found, replaced = _beside_monai(settings, items, workers)
            outcome.comparisons.append(found)
            text = f"{found.title}: 1.5x MONAI's steps"
            outcome.targets.append(lead(text, found, HOTSET, MONAI, 1.5))
            outcome.notes.append(replaced)
    return outcome


def _beside_monai(settings: Settings, items: list[dict[str, Any]], workers: int) -> tuple[Comparison, str]:
    import hotset

    crop, resident = settings.volume_side // 2, len(items) // 2
    truth, work = volumes.VolumeTruth(items, crop), Work(_WORK_SECONDS)
    with ExitStack() as stack:
        seconds = 3 * settings.seconds

        def ours() -> Measure:
            sizes = hotset.Window(resident, replace=volumes.RATE, prefill=True)
            cached: Any = stack.enter_context(hotset.cache(volumes.volumes(items, crop), window=sizes))
            told.append(lambda: f"{cached.stats().replaced} ({cached.stats().late} late)")
            return Turns(volumes.running_window(stack, cached, workers), truth, resident, seconds, work)

        def theirs() -> Measure:
            epoch, _ = volumes.monai_window(stack, items, crop, resident, workers)
            return Turns(epoch, truth, resident, seconds, work)

        told: list[Callable[[], str]] = []
        title = f"A window of {resident} of {len(items)} volumes, {workers} workers"
        found = compare(
            {HOTSET: guarded(ours), MONAI: guarded(theirs)},
            MONAI,
            settings.pairs,
            title=title,
            unit="steps/s",
            subjects=(HOTSET,),
        )
        return found, f"{title}: hotset replaced {''.join(tell() for tell in told)}; MONAI waits for all"


def _memory(settings: Settings) -> Outcome:
    """What all processes take together, pages in flight between them included."""
    outcome = Outcome()
    for ranks in (2,) if settings.quick else (1, 4):
        found = compare(
            {name: partial(_job, settings, name, ranks) for name in (NONE, HOTSET, MONAI)},
            NONE,
            1 if settings.quick else _MEMORY_ROUNDS,
            title=f"Memory with a window of volumes, {ranks} processes x 2 workers",
            unit="MiB",
            subjects=(HOTSET,),
            limits=(NONE,),
            lower_is_better=True,
            warm_up=False,
        )
        outcome.comparisons.append(found)
        reason = found.rows[HOTSET].unfit or found.rows[MONAI].unfit
        text = f"{found.title}: hotset's as a multiple of MONAI's"
        outcome.targets.append(Target(text, found.ratio(HOTSET, MONAI), 1.0, at_least=False, reason=reason))
    return outcome


def _job(settings: Settings, kind: str, ranks: int) -> float:
    sizes = (str(ranks), str(settings.volumes), str(settings.volume_side))
    answer = run_once("benchmarks.window_job", kind, *sizes)
    return float(answer["pss"] + answer["unmapped"]) / 2**20
