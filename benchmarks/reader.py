"""Timed epochs of a full cache, in a process that has just come to it or has long been there.

What such a process pays for is page tables: the memory is there, and it has not mapped it yet. So an epoch
is told with the page faults that it took, and :func:`map_ahead` maps everything in one call before.
"""

from __future__ import annotations

import resource
import time
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Unfit
from benchmarks.truth import WrongData
from hotset.dataset.dataset_proxy import current_of
from hotset.store.format import Live

__all__ = ["Epoch", "Mapping", "Reader", "map_ahead"]


class Epoch(NamedTuple):
    """One epoch: its samples, how long it took, and the page faults of the whole process meanwhile."""

    samples: int
    seconds: float
    faults: int

    @property
    def speed(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


class Mapping(NamedTuple):
    """Bytes of the cached rows, and the seconds that mapping them ahead took, 0 where it was not done."""

    size: int
    seconds: float


def map_ahead(cached: Any, ahead: bool) -> Mapping:
    """Map all rows of a cache if ``ahead``, and say in any case how much they are."""
    segment = current_of(cached).store.segment
    geometry = segment.geometry
    size = int(segment.live[Live.ROWS_NEXT]) * geometry.stride
    start = time.perf_counter()
    if ahead:
        segment.populate(geometry.rows_at, size)
    return Mapping(size, time.perf_counter() - start if ahead else 0.0)


class Reader:
    """Times epochs of a cache that holds everything.

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


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt
