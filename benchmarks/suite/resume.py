"""Saving the loader's state after every batch: what it adds to an epoch.

Two epochs of the same loader follow each other, one with ``state_dict()`` after every batch and one without,
in alternating order, and a ratio is formed in each pair. On a machine that is not idle the pairs differ by
more than the price. So the calls are timed within the epochs as well: their share of an epoch that does
nothing but iterate is an upper bound of their share of any training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.data import CROP, Samples, flip_and_crop, image_rows
from benchmarks.harness import Outcome, Spread, Target, compare
from benchmarks.hotset_entries import require_filled
from benchmarks.settings import Settings
from benchmarks.truth import CropTruth, RowTruth, Truth

__all__ = ["resume"]

WITHOUT = "without"
WITH = "state_dict() after every batch"
_BATCH = 64


def resume(settings: Settings) -> Outcome:
    """A state after every batch takes less than a hundredth of an epoch."""
    rows = image_rows(settings.images)
    outcome = Outcome()
    for title, workers, live in (
        ("images, 0 workers", 0, False),
        ("images, 2 workers", 2, False),
        (f"a live flip and crop to {CROP}, 2 workers", 2, True),
    ):
        truth: Truth = CropTruth(rows.numpy(), CROP) if live else RowTruth(rows.numpy())
        with ExitStack() as stack:
            loader = _open(stack, Samples(rows), workers, [flip_and_crop] if live else None)
            for batch in loader:
                truth.check(batch)
            saving = _Timed(loader, settings.seconds, save=True)
            found = compare(
                {WITHOUT: _Timed(loader, settings.seconds, save=False), WITH: saving},
                WITHOUT,
                settings.pairs,
                title=f"Saving, {title}, batch {_BATCH}",
                subjects=(WITH,),
                limits=(WITHOUT,),
            )
        outcome.comparisons.append(found)
        share = Target(f"{title}: of an epoch", Spread.of(saving.shares), 0.01, at_least=False, unit="x")
        outcome.targets.append(share)
        outcome.notes.append(f"{title}: state_dict() took {statistics.median(saving.calls) * 1e6:.1f} us")
    return outcome


def _open(stack: ExitStack, dataset: Any, workers: int, live: Sequence[Callable[..., Any]] | None) -> Any:
    """A loader whose workers stay, over a filled cache."""
    from hotset import DataLoader, cache

    cached = stack.enter_context(cache(dataset, transform=live))
    loader = DataLoader(
        cached, batch_size=_BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    for _ in loader:
        pass
    require_filled(cached)
    return loader


class _Timed:
    """Whole epochs as a contestant: samples/s.

    Attributes:
        shares: for each measurement, what part of its time was spent in ``state_dict()``.
        calls: seconds of every call.
    """

    def __init__(self, loader: Any, seconds: float, *, save: bool) -> None:
        self._loader = loader
        self._seconds = seconds
        self._save = save
        self.shares: list[float] = []
        self.calls: list[float] = []

    def __call__(self) -> float:
        calls: list[float] = []
        samples, elapsed, start = 0, 0.0, time.perf_counter()
        while elapsed < self._seconds:
            for batch in self._loader:
                samples += len(batch[1])
                if self._save:
                    before = time.perf_counter()
                    self._loader.state_dict()
                    calls.append(time.perf_counter() - before)
            elapsed = time.perf_counter() - start
        self.calls += calls
        self.shares.append(sum(calls) / elapsed)
        return samples / elapsed
