"""A summary of one epoch, in one line: samples per second, hit rate, and how long the trainer waited.

While an epoch fills the cache, a line every half minute says how far that is, and when it will be done. All
lines go to the logger ``hotset``, at level INFO.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from hotset.dataset.dataset_proxy import current_of
from hotset.dataset.sample_access import SampleAccess
from hotset.errors import ArgumentError
from hotset.units import format_bytes, format_seconds

__all__ = ["EpochSummary"]

_WORTH_TELLING = 0.05
_FILLING_SECONDS = 30.0  # between two lines about filling; a shorter epoch has none

_log = logging.getLogger("hotset")


class EpochSummary:
    """Counts of one pass over a loader; ``str()`` gives the line, which is also logged at level INFO.

    Attributes:
        number: of the pass, from 0.
        batches_expected: length of the loader.
        batches: batches handed over so far.
        samples: samples in them.
        seconds: from the pass's beginning to its end, or to now.
        waited: seconds that the consumer spent waiting for a batch, or for workers to start.
        hit_rate: share of the samples that came from the cache, over all processes that use it.
    """

    def __init__(self, number: int, batches_expected: int, caches: list[Any]) -> None:
        self.number = number
        self.batches_expected = batches_expected
        self.batches = 0
        self.samples = 0
        self.waited = 0.0
        self._caches = caches
        self._told = 0.0  # how much of ``waited`` is in the cache's counters
        self._before = self._served()
        self._begin = time.perf_counter()
        self._filling = self._begin, self._stored()  # when that was looked at last, and how many were stored
        self._seconds: float | None = None
        self._hit_rate: float | None = None

    @property
    def _currents(self) -> list[SampleAccess]:
        """What samples are read by now, asked past the caches: that would follow what a method has set."""
        return [current_of(cached) for cached in self._caches]

    def _served(self) -> tuple[int, int]:
        served = [each.served() for each in self._currents]
        return sum(hits for hits, _ in served), sum(misses for _, misses in served)

    def _stored(self) -> int:
        return sum(each.stored() for each in self._currents)

    @property
    def seconds(self) -> float:
        return self._seconds if self._seconds is not None else time.perf_counter() - self._begin

    @property
    def hit_rate(self) -> float:
        if self._hit_rate is not None:
            return self._hit_rate
        (hits, misses), (hits_before, misses_before) = self._served(), self._before
        served = hits - hits_before + misses - misses_before
        return (hits - hits_before) / served if served else 0.0

    def _began(self) -> None:
        """Count as waiting what it took to begin: a fork server takes seconds to start."""
        self.waited += time.perf_counter() - self._begin

    def _count(self, samples: int, waited: float) -> None:
        """Count a batch that is handed over."""
        self.batches += 1
        self.samples += samples
        self.waited += waited
        if self.waited - self._told > _WORTH_TELLING:
            self._tell()
        if time.perf_counter() - self._filling[0] >= _FILLING_SECONDS:
            self._tell_of_filling()
        if self.batches == self.batches_expected:
            self._end()  # a consumer that knows the length may not ask for a batch after the last

    def _end(self) -> None:
        """End the pass: from now on the figures do not change."""
        if self._seconds is None:
            self._hit_rate = self.hit_rate
            self._tell()
            self._seconds = time.perf_counter() - self._begin
            _log.info("%s", self)
            for each in self._currents:
                each.warn_of_draws()

    def _tell(self) -> None:
        """Add the waiting to a counter that other processes read; not for each batch: that would be slow."""
        for each in self._currents[:1]:
            each.count_waiting(self.waited - self._told)
        self._told = self.waited

    def _tell_of_filling(self) -> None:
        """Log how far the caches are filled, if samples were stored since this was looked at last."""
        (since, before), self._filling = self._filling, (time.perf_counter(), self._stored())
        now, stored = self._filling
        done = [each.stats() for each in self._currents]
        cached, size = sum(each.cached for each in done), sum(each.bytes for each in done)
        plans = [each.plan for each in self._currents]
        aims = [round(plan.used * (1.0 - plan.refused if plan.spill else plan.fits)) for plan in plans]
        rate = (stored - before) / (now - since)
        if rate <= 0.0 or cached >= sum(aims):
            return
        wanted = sum(aim * plan.sample_bytes for aim, plan in zip(aims, plans, strict=True))
        _log.info(
            "epoch %d: %s of %s samples are cached (%s of about %s), %s more a second; "
            "the cache is filled in about %s",
            *(self.number, f"{cached:,}", f"{sum(aims):,}", format_bytes(size), format_bytes(wanted)),
            *(f"{rate:,.3g}", format_seconds((sum(aims) - cached) / rate)),
        )

    def log_to(self, writer: Any, step: int | None = None) -> None:
        """Write the pass's figures to a logger, as scalars like any other.

        They are ``hotset/waited`` (seconds that training waited for batches), ``hotset/waited_fraction`` (of
        the pass, 0 to 1), ``hotset/hit_rate`` (0 to 1) and ``hotset/samples_per_second``.

        Args:
            writer: TensorBoard's ``SummaryWriter``, a run of Weights & Biases, or a logger of Lightning's:
                any object with ``add_scalar(name, value, step)``, ``log_metrics(dict, step=)`` or
                ``log(dict, step=)``.
            step: where on the axis of steps; the number of the pass by default. W&B counts its own steps if
                none is given.

        Raises:
            ArgumentError: ``writer`` has none of these methods.

        Example:
            >>> class Writer:
            ...     def add_scalar(self, name, value, step):
            ...         print(name, value, step)
            >>> summary = EpochSummary(3, 0, [])
            >>> summary._end()
            >>> summary.log_to(Writer())
            hotset/waited 0.0 3
            hotset/waited_fraction 0.0 3
            hotset/hit_rate 0.0 3
            hotset/samples_per_second 0.0 3
        """
        seconds = self.seconds
        values = {
            "hotset/waited": self.waited,
            "hotset/waited_fraction": min(self.waited / seconds, 1.0) if seconds else 0.0,
            "hotset/hit_rate": self.hit_rate,
            "hotset/samples_per_second": self.samples / seconds if seconds else 0.0,
        }
        if hasattr(writer, "add_scalar"):
            for name, value in values.items():
                writer.add_scalar(name, value, self.number if step is None else step)
        elif hasattr(writer, "log_metrics"):
            writer.log_metrics(values, step=self.number if step is None else step)
        elif hasattr(writer, "log"):
            writer.log(values) if step is None else writer.log(values, step=step)
        else:
            raise ArgumentError(
                "writer must have add_scalar() as TensorBoard's SummaryWriter has it, log_metrics() as "
                f"Lightning's loggers, or log() as a run of W&B, got {type(writer).__name__}; write "
                "to_dict() yourself."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of ``number, batches_expected, batches, samples, seconds, waited, hit_rate``.

        Times are in seconds; ``hit_rate`` is 0 to 1.
        """
        names = ("number", "batches_expected", "batches", "samples", "seconds", "waited", "hit_rate")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        rate = self.samples / self.seconds if self.seconds else 0.0
        return (
            f"epoch {self.number}: {self.samples:,} samples in {self.seconds:.2f} s ({rate:,.0f}/s), "
            f"{self.hit_rate:.1%} from the cache, waited {self.waited:.2f} s"
        )

    __repr__ = __str__
