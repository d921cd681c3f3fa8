"""What a process does with a warm cache in the benchmark "attach"; :func:`second` runs in the second one.

That one is spawned, not forked: nothing is mapped in it that it has not mapped itself.
"""

from __future__ import annotations

import resource
import time
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Unfit
from benchmarks.truth import WrongData
from hotset.store.format import Live

__all__ = ["Answer", "Epoch", "Reader", "second"]


class Epoch(NamedTuple):
    """One epoch: its samples, how long it took, and the page faults of the whole process meanwhile."""

    samples: int
    seconds: float
    faults: int

    @property
    def speed(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


class Answer(NamedTuple):
    """What the second process measured.

    Attributes:
        mapping: seconds that mapping the pages ahead took, 0 where it did not.
        mapped: bytes of the rows.
        epochs: its first and its second.
    """

    mapping: float
    mapped: int
    epochs: tuple[Epoch, Epoch]


class Reader:
    """Times epochs of a cache that holds everything, in the process that has made it.

    Args:
        cached: a cached :class:`benchmarks.data.Generated`.
        batch: samples of a batch.
    """

    def __init__(self, cached: Any, batch: int) -> None:
        from hotset import DataLoader

        self._cached = cached
        self._loader = DataLoader(cached, batch_size=batch, shuffle=True)

    def epoch(self) -> Epoch:
        """Run one epoch.

        Raises:
            WrongData: its last batch holds other samples than the source has, or the epoch too few.
            Unfit: the cache was asked for a sample that it does not hold.
        """
        last, count = None, 0
        misses, faults = self._cached.stats().misses, _faults()
        start = time.perf_counter()
        for last in self._loader:
            count += len(last[1])
        elapsed = time.perf_counter() - start
        faults = _faults() - faults
        if self._cached.stats().misses != misses:
            raise Unfit("samples came from the source")
        if last is None or count != len(self._cached):
            raise WrongData(f"an epoch of {count} samples")
        for picture, i in zip(last[0], last[1].tolist(), strict=True):
            if not torch.equal(picture, self._cached.dataset[i][0]):
                raise WrongData(f"sample {i} differs from its original")
        return Epoch(count, elapsed, faults)


def second(cached: Any, batch: int, ahead: bool, answers: Any) -> None:
    """Map the rows first if ``ahead``, run two epochs, and send an :class:`Answer` down the pipe ``answers``.

    What breaks it is sent instead.
    """
    torch.set_num_threads(1)
    try:
        segment = cached.store.segment
        geometry = segment.geometry
        mapped = int(segment.live[Live.ROWS_NEXT]) * geometry.stride
        start = time.perf_counter()
        if ahead:
            segment.populate(geometry.rows_at, mapped)
        mapping = time.perf_counter() - start if ahead else 0.0
        reader = Reader(cached, batch)
        answers.send(Answer(mapping, mapped, (reader.epoch(), reader.epoch())))
        cached.close()
    except Exception as error:
        answers.send(error)


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt
