"""What ``hotset run`` would give, tried: the decoders keep what they return, and torch's loader is measured.

What a hit costs follows from the decoder, from what it returns and from whether the worker is new, which
touches all memory for the first time. And some calls are left alone, such as those that read from memory. So
the loader reads some samples, and then those once more, below the hooks of ``hotset run`` itself, in a store
of the trial's own. ``found["run"]`` says what came of it:

================  ========================================================================================
``hits``          calls that found what was kept
``bytes``         kept for a sample
``called``        the decoder that was called most; empty if none was
``left_alone``    why its calls were left alone, the most frequent reason; empty if none was
================  ========================================================================================
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Subset

from hotset.run.doctor.decoding import keep_decoders
from hotset.run.doctor.loop import LoaderSettings
from hotset.run.doctor.measured import (
    FILL_SECONDS,
    LEAST_BATCHES,
    MOST_TRIED,
    MeasuredLoader,
    arguments_of,
    seconds_of,
    sentence_of,
)
from hotset.run.doctor.stand_in import StandIn
from hotset.run.environment import LEDGER, Options, watch_options_here
from hotset.run.kept import attach
from hotset.run.ledger import ATTACHED, Ledger, read_left

__all__ = ["try_run"]


def try_run(settings: LoaderSettings, step: StandIn | None, found: dict[str, Any]) -> None:
    """Try it, and note in ``found`` the loader's rates and what was kept."""
    options = watch_options_here()
    if options is None:
        return
    os.environ[LEDGER] = options.ledger
    Ledger(options.ledger).mark(ATTACHED)  # else the store would be waited for
    store = attach(Options())
    try:
        with keep_decoders():
            part = _filled(settings)
            loader = MeasuredLoader(DataLoader, part, settings, settings.workers)
            rates = loader.measure(step)
        kept, left = store.functions(), read_left(options.ledger)
        calls = Counter({name: stats.calls for name, stats in kept})
        for (name, _), count in left.items():
            calls[name] += count
        called = max(calls, key=calls.__getitem__, default="")
        reasons = {reason: count for (name, reason), count in left.items() if name == called}
        found["run"] = {
            "hits": sum(stats.hits for _, stats in kept),
            "bytes": sum(stats.bytes for _, stats in kept) / len(part),
            "called": called,
            "left_alone": max(reasons, key=reasons.__getitem__, default=""),
        }
        if found["run"]["hits"]:
            found["loaders"][f"run-{settings.workers}"] = rates
    except Exception as error:
        found["failed"][f"run-{settings.workers}"] = sentence_of(error)
    finally:
        del os.environ[LEDGER]
        store.leave()


def _filled(settings: LoaderSettings) -> Subset[Any]:
    """The samples that were read in some seconds, and those that workers had begun by then."""
    size, length = settings.batch_size or 1, len(settings.dataset)
    part = Subset(settings.dataset, random.Random(0).sample(range(length), min(length, MOST_TRIED)))
    begin, count, seconds = time.perf_counter(), 0, seconds_of(FILL_SECONDS)

    def batches() -> Iterator[list[int]]:
        for first in range(0, len(part) - size + 1, size):
            if count >= LEAST_BATCHES and time.perf_counter() - begin >= seconds:
                break
            yield list(range(first, first + size))

    for _ in DataLoader(part, batch_sampler=batches(), **arguments_of(settings, settings.workers)):
        count += 1
    return Subset(part, range(count * size))
