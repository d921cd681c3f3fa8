"""A step that takes as long as the program's, and as much of the cores, but computes nothing.

A loader by itself is not the loader of a training. Where the training process copies batches in a thread of
its own, that has the length of a step to do so; workers have one core less while a step computes; and a batch
lives until the next has come, so that other memory is written to. So the trial goes through a loader as the
program does, with this in place of its step.

A step that computes for a part of its length does so first, and then rests, as one that waits for a device.
One that takes more processor time than it is long has threads. What a step takes of the memory's bandwidth
is not known, and is left out.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial

import torch

from hotset.run.doctor.loop import StepLength
from hotset.store.torch_threads import HelperThread

__all__ = ["StandIn"]

_ELEMENTS = 1 << 12  # of an operation that takes some microseconds, in which other threads can run
_TRIES, _TRY_SECONDS = 9, 0.3


class StandIn:
    """A step of this length, to be called in the training's place.

    Example:
        >>> step = StandIn(StepLength(seconds=3e-3, cpu=1e-3))
        >>> begin = time.perf_counter()
        >>> step()
        >>> 1e-3 < time.perf_counter() - begin < 1.0
        True
    """

    def __init__(self, length: StepLength) -> None:
        share = length.cpu / length.seconds if length.seconds > 0.0 else 0.0
        threads = max(1, math.ceil(share - 0.5))
        self._others = [HelperThread[None](f"hotset-step-{number}") for number in range(1, threads)]
        self._busy = min(length.cpu / threads, length.seconds)
        self._rest = length.seconds - self._busy
        # A rest takes longer than it is asked to, by what the kernel takes to wake a process.
        tries = min(_TRIES, int(_TRY_SECONDS / max(length.seconds, 1e-6)))
        late = statistics.median([self._timed() - length.seconds for _ in range(tries)] or [0.0])
        self._rest = max(self._rest - max(late, 0.0), 0.0)

    def _timed(self) -> float:
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin

    def __call__(self) -> None:
        for other in self._others:
            other.ask(partial(_compute, self._busy))
        _compute(self._busy)
        if self._rest:
            time.sleep(self._rest)
        for other in self._others:
            other.next()


def _compute(seconds: float) -> None:
    """Take so much processor time in this thread."""
    end = time.thread_time() + seconds
    some = torch.ones(_ELEMENTS)
    while time.thread_time() < end:
        some.add_(1.0)
