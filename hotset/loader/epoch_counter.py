"""Counts one epoch as its batches are handed over, for the summary that the user sees.

While an epoch fills the cache, a line every half minute says how far that is, and when it will be done. At
the end comes the summary. All lines go to the logger ``hotset``, at level INFO.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from hotset.dataset.cached_dataset import current_of
from hotset.loader.epoch_summary import EpochSummary
from hotset.units import format_bytes, format_seconds

__all__ = ["EpochCounter"]

_WORTH_TELLING = 0.05
_FILLING_SECONDS = 30.0  # between two lines about filling; a shorter epoch has none

_log = logging.getLogger("hotset")


class EpochCounter(EpochSummary):
    """A summary with what a loader calls to count.

    Args:
        number: of the pass, from 0.
        batches_expected: length of the loader.
        caches: the cached datasets behind the loader.
    """

    def __init__(self, number: int, batches_expected: int, caches: list[Any]) -> None:
        super().__init__(number, batches_expected, caches)
        self._told = 0.0  # how much of ``waited`` is in the cache's counters
        # When filling was looked at last, and how many samples were stored then.
        self._filling = time.perf_counter(), self._stored()

    def _stored(self) -> int:
        return sum(current_of(cached).access.stored() for cached in self._caches)

    def count(self, samples: int, waited: float) -> None:
        """Count a batch that is handed over."""
        self.batches += 1
        self.samples += samples
        self.waited += waited
        if self.waited - self._told > _WORTH_TELLING:
            self._tell()
        if time.perf_counter() - self._filling[0] >= _FILLING_SECONDS:
            self._tell_of_filling()
        if self.batches == self.batches_expected:
            self.end()  # a consumer that knows the length may not ask for a batch after the last

    def end(self) -> None:
        """End the pass: from now on the figures do not change."""
        if self._seconds is None:
            self._hit_rate = self.hit_rate
            self._tell()
            self._seconds = self.seconds
            _log.info("%s", self)
            for cached in self._caches:
                current_of(cached).access.warn_of_draws()

    def _tell(self) -> None:
        """Add the waiting to a counter that other processes read; not for each batch: that would be slow."""
        if self._caches:
            current_of(self._caches[0]).access.count_waiting(self.waited - self._told)
        self._told = self.waited

    def _tell_of_filling(self) -> None:
        """Log how far the caches are filled, if samples were stored since this was looked at last."""
        (since, before), self._filling = self._filling, (time.perf_counter(), self._stored())
        now, stored = self._filling
        done = [cached.stats() for cached in self._caches]
        cached, size = sum(each.cached for each in done), sum(each.bytes for each in done)
        plans = [cached.plan for cached in self._caches]
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
