"""A step that takes as long as the program's, and as much of the cores, but computes nothing.

A loader by itself is not the loader of a training. Where the training process copies batches in a thread of
its own, that has the length of a step to do so; workers have one core less while a step computes; and a batch
lives until the next has come, so that other memory is written to. So the trial goes through a loader as the
program does, with this in place of its step.

A step that computes for a part of its length does so first, and then rests, as one that waits for a device.
What a step takes of the memory's bandwidth is not known, and is left out, and so is what other threads of the
program compute. A step in which the process takes more than a core and a fifth has no stand-in: OpenMP's
threads spin where they wait, and how much of that is work is not known.
"""

from __future__ import annotations

import statistics
import time

import torch

from hotset.run.doctor.loop import ONE_THREAD, StepLength

__all__ = ["StandIn"]

_ELEMENTS = 1 << 12  # of an operation that takes some microseconds
_TRIES, _TRY_SECONDS = 9, 0.3
_LONGEST_SECONDS = 0.5  # a longer step leaves no doubt that a cache keeps up with it


class StandIn:
    """A step of this length, to be called in the training's place.

    Example:
        >>> step = StandIn(StepLength(seconds=3e-3, cpu=1e-3, thread=1e-3))
        >>> begin = time.perf_counter()
        >>> step()
        >>> 1e-3 < time.perf_counter() - begin < 1.0
        True
    """

    def __init__(self, length: StepLength) -> None:
        self._busy = min(length.thread, length.seconds)
        self._rest = length.seconds - self._busy
        # A rest takes longer than it is asked to, by what the kernel takes to wake a process.
        tries = min(_TRIES, int(_TRY_SECONDS / max(length.seconds, 1e-6)))
        late = statistics.median([self._timed() - length.seconds for _ in range(tries)] or [0.0])
        self._rest = max(self._rest - max(late, 0.0), 0.0)

    @classmethod
    def of(cls, length: StepLength) -> StandIn | None:
        """The stand-in of such a step; None if there is none."""
        if length.seconds > _LONGEST_SECONDS or length.cpu > ONE_THREAD * length.seconds:
            return None
        return cls(length)

    def _timed(self) -> float:
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin

    def __call__(self) -> None:
        _compute(self._busy)
        if self._rest:
            time.sleep(self._rest)


def _compute(seconds: float) -> None:
    """Take so much processor time in this thread."""
    end = time.thread_time() + seconds
    some = torch.ones(_ELEMENTS, device="cpu")
    while time.thread_time() < end:
        some.add_(1.0)
