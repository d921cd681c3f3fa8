"""The first epoch: filling the cache must not cost more than what blocks save.

Each timing begins with nothing: a new cache, a new loader, new workers. What ``hotset.cache`` itself takes
(fingerprint and probe, once per training) is told apart. An epoch of these photographs takes seconds, so
it is timed once a round. The epoch that is timed only fills; the next one, untimed, reads back what it
filled, and that is compared with the truth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from benchmarks import data, hotset_entries, peers
from benchmarks.harness import Comparison, Epochs, Outcome, Spread, Target, compare
from benchmarks.peers import Epoch
from benchmarks.settings import Settings
from benchmarks.truth import RowTruth, Truth, WrongData

__all__ = ["first_epoch"]

TORCH = "torch's DataLoader, no cache"
HOTSET = "hotset.DataLoader, empty cache"
UNMODIFIED = "torch's DataLoader, empty hotset.cache"


def first_epoch(settings: Settings) -> Outcome:
    """JPEGs decoded and resized by 2 workers: at most 1.00x of no cache, 1.10x unmodified.

    And rows of 210 B, where a row costs next to nothing and a cache can only lose.
    """
    files = data.photographs(settings.out, settings.photographs)
    pictures = data.Photographs(files)
    truth = RowTruth(np.stack([pictures[i][0].numpy() for i in range(len(pictures))]))
    outcome = _first(settings, "First epoch, JPEGs decoded and resized, 2 workers", pictures, truth, 64)

    rows = data.byte_rows(settings.small_rows)
    small = _first(
        settings, "First epoch, rows of 210 B, 2 workers", data.Samples(rows), RowTruth(rows.numpy()), 256
    )
    outcome.comparisons += small.comparisons
    outcome.notes += small.notes
    return outcome


def _first(settings: Settings, title: str, dataset: Dataset[Any], truth: Truth, batch: int) -> Outcome:
    opened: list[float] = []

    def through_hotset(stack: ExitStack) -> tuple[Epoch, Any]:
        from hotset import cache

        start = time.perf_counter()
        cached = stack.enter_context(cache(dataset))
        opened.append(time.perf_counter() - start)
        return hotset_entries.loader(stack, cached, batch, 2), cached

    def through_torch(stack: ExitStack) -> tuple[Epoch, Any]:
        from hotset import cache

        cached = stack.enter_context(cache(dataset))
        return peers.loader(stack, cached, batch, 2), cached

    def without(stack: ExitStack) -> tuple[Epoch, Any]:
        return peers.loader(stack, dataset, batch, 2), None

    found = compare(
        {
            TORCH: _FirstEpoch(without, truth),
            HOTSET: _FirstEpoch(through_hotset, truth),
            UNMODIFIED: _FirstEpoch(through_torch, truth),
        },
        TORCH,
        settings.pairs,
        title=title,
        subjects=(HOTSET, UNMODIFIED),
    )
    notes = []
    if opened:
        took = Spread.of(opened)
        notes.append(
            f"{title}: hotset.cache(...) itself took {took.median:.3f} s, which is not in the figures"
        )
    return Outcome([found], [_at_most(found, HOTSET, 1.0), _at_most(found, UNMODIFIED, 1.1)], notes)


def _at_most(found: Comparison, name: str, bound: float) -> Target:
    text = f"{found.title}: {name}, its time as a multiple of no cache's"
    reason = found.rows[name].unfit or found.rows[TORCH].unfit
    return Target(text, found.ratio(TORCH, name), bound, at_least=False, reason=reason)


class _FirstEpoch:
    """A contestant that opens everything anew for each timing, and closes it."""

    def __init__(self, opening: Callable[[ExitStack], tuple[Epoch, Any]], truth: Truth) -> None:
        self._opening = opening
        self._truth = truth

    def __call__(self) -> float:
        with ExitStack() as stack:
            epoch, cached = self._opening(stack)
            last = None
            start = time.perf_counter()
            for batch in epoch():
                last = batch
            elapsed = time.perf_counter() - start
            if last is None:
                raise WrongData("an epoch without batches")
            self._truth.check(last)
            if cached is not None:
                hotset_entries.require_filled(cached)
                Epochs(epoch, self._truth).verify()
        return self._truth.size / elapsed
