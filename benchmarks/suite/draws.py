"""What it costs to watch all reading for random draws: the first epoch of JPEGs, with the watch and without.

The watch compares the states of all generators after every few samples that are read, a few thousandths of
the time that these take, while two epochs of one loader differ by hundredths. So the two caches are filled
side by side, a batch of the same files each in turn, by processor time and in this process; and the watch's
own time is taken as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils.data import Subset

from benchmarks import data
from benchmarks.harness import Outcome, Spread, Target, compare
from benchmarks.settings import Settings
from benchmarks.truth import WrongData
from hotset.dataset.dataset_proxy import current_of
from hotset.store.fill import NoDrawWatch

__all__ = ["draws"]

WATCHED = "hotset.cache"
UNWATCHED = "the same without the watch"
_BATCH = 16
_FILES = 1024


class _Timed:
    """The watch, with the time that it takes."""

    def __init__(self, watch: Any) -> None:
        self._watch = watch
        self.seconds = 0.0

    def begin(self) -> None:
        start = time.thread_time()
        self._watch.begin()
        self.seconds += time.thread_time() - start

    def drew(self, read: object = None, read_again: Callable[[], object] | None = None) -> bool:
        start = time.thread_time()
        drew: bool = self._watch.drew(read, read_again)
        self.seconds += time.thread_time() - start
        return drew


def draws(settings: Settings) -> Outcome:
    """Watching all reading for random draws costs under 1% of a first epoch of JPEGs."""
    files = data.photographs(settings.out, settings.photographs)[:_FILES]
    pictures = data.Photographs(files)
    shares: list[float] = []
    rounds = _Rounds(pictures, shares)
    title = "First epoch, JPEGs decoded and resized, no workers: the watch for random draws"
    found = compare(
        {UNWATCHED: lambda: rounds.take(UNWATCHED), WATCHED: lambda: rounds.take(WATCHED)},
        UNWATCHED,
        settings.pairs,
        title=title,
        unit="s",
        subjects=(WATCHED,),
        limits=(UNWATCHED,),
        lower_is_better=True,
    )
    share = Target(
        "the watch's own time, as a share of a first epoch of JPEGs", Spread.of(shares), 0.01, at_least=False
    )
    return Outcome([found], [share], [])


class _Rounds:
    """Both figures of a round are measured at once, when the first of them is asked for."""

    def __init__(self, pictures: Any, shares: list[float]) -> None:
        self._pictures = pictures
        self._shares = shares
        self._left: dict[str, float] = {}

    def take(self, name: str) -> float:
        if name not in self._left:
            self._left = self._measure()
        return self._left.pop(name)

    def _measure(self) -> dict[str, float]:
        from hotset import cache

        spent = dict.fromkeys((UNWATCHED, WATCHED), 0.0)
        count = len(self._pictures)
        with ExitStack() as stack:
            caches: dict[str, Any] = {}
            for name in spent:
                # With a key of its own: one dataset has one cache in a job.
                dataset = Subset(self._pictures, range(count))
                caches[name] = stack.enter_context(cache(dataset, key=name))
            fillers = {name: current_of(cached).store.filler for name, cached in caches.items()}
            timed = fillers[WATCHED].watch = _Timed(fillers[WATCHED].watch)
            fillers[UNWATCHED].watch = NoDrawWatch()
            for turn, start in enumerate(range(0, count, _BATCH)):
                batch = list(range(start, min(start + _BATCH, count)))
                for name in list(spent)[:: -1 if turn % 2 else 1]:
                    begun = time.process_time()
                    caches[name].__getitems__(batch)
                    spent[name] += time.process_time() - begun
            for name, cached in caches.items():
                if cached.stats().cached != count:
                    raise WrongData(f"{name}: {cached.stats().cached} of {count} photographs were cached")
        if not timed.seconds:
            raise WrongData("the watch was never asked")
        self._shares.append(timed.seconds / spent[WATCHED])
        return spent
