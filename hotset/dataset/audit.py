"""The audit: now and then a hit is read again from the source, and compared with what the cache has.

Verdicts and probes examine a few samples for a second; the audit goes on as long as the cache is used. A
process may spend a hundredth of the elapsed time on it: the slower the training steps are, the more samples
per epoch are audited. Generators are restored, so the program draws the same numbers as without audits.

Workers that live for one epoch may end before they have the time budget for a slow sample: so a new worker
begins with its job's budget up to then, for as many workers as there are, less what all processes have spent.

If the source no longer returns what was cached, either the sample is random, or something that it depends on
has changed: a file, a parameter, code, or an object that reading itself changes (a tokenizer that adds words
to its vocabulary). Reading the sample once more tells which of the two.

A process that joins a cache of another job compares a few samples at once (:func:`first_difference`): a
fingerprint covers code and objects, but not what a service or a clock returns.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from hotset.dataset.audit_budget import AuditBudget
from hotset.dataset.held_attributes import HeldAttributes, outer_code
from hotset.dataset.pipeline import Pipeline, Source
from hotset.dataset.planning.recorder import recorded
from hotset.determinism.aliasing import copied
from hotset.determinism.chain import applied, leaves
from hotset.determinism.draws.draw_watch import DrawWatch
from hotset.determinism.draws.rng import Generators
from hotset.determinism.equality import differs
from hotset.determinism.verdict import name_of
from hotset.store.claims import Ids
from hotset.store.format import PRESENT
from hotset.store.store import Store

__all__ = ["Audit", "first_difference"]

_SHARE = 0.01
_REPEATS = 16
_FIRST_SECONDS = 1.0
# Knuth's multiplicative hash: chooses the sample of a batch without drawing from any generator.
_GOLDEN = 2654435761


class Audit:
    """Decides in one process when to audit, and does it. It pickles, for the workers of a job.

    Args:
        seconds: about how long reading a sample takes.
        spent: the seconds that all processes have spent on audits of this cache before.

    Attributes:
        last_seconds: what the last audit took.
    """

    def __init__(self, source: Source, seconds: float, spent: float = 0.0) -> None:
        self._source = source
        self._cost = seconds
        self._share = _SHARE  # a spawned process has the share of the one that sent it this
        self._begun = time.monotonic()
        self._spent_before = spent
        self._process = 0
        self._budget = AuditBudget(self._share)
        self._audits = 0
        self._watch: DrawWatch | None = None
        self._outside: list[Any] = []
        self.last_seconds = 0.0

    def due(self, hits: int, spent: Callable[[], float] = float) -> int | None:
        """Which of a batch's hits is to be audited now; None for none.

        Args:
            spent: returns the seconds that all processes have spent on audits of this cache up to now.
        """
        if self._process != os.getpid():
            self._process = os.getpid()
            self._budget = AuditBudget(self._share, self._inherited(spent()))
        if not self._budget.covers(self._cost) or not hits:
            return None
        self._audits += 1
        return (self._audits * _GOLDEN + self._process) % (1 << 32) % hits

    def _inherited(self, spent: float) -> float:
        """The job's budget from before this process began, less what all processes have spent."""
        worker = get_worker_info()
        processes = 1 if worker is None else worker.num_workers
        earned = self._share * (time.monotonic() - self._begun) * processes
        return max(0.0, earned - (spent - self._spent_before))

    def differs(
        self, cached: Any, index: int, is_only_reader: Callable[[], bool] = lambda: True
    ) -> str | None:
        """Compare a cached sample with what the source returns now.

        It raises nothing, moves no generator and leaves no file open: training goes on, whatever it finds.

        Args:
            is_only_reader: whether no other thread reads samples, which may use a file that was opened here,
                or have opened one meanwhile: then what reading has set stays.

        Returns:
            A warning if they differ; None if they are equal, or the sample cannot be read now.
        """
        begun = time.monotonic()
        if self._watch is None:
            self._watch = DrawWatch(self._source.read_parts)
            self._outside = outer_code(self._source.dataset, self._source.cached_steps)
        held = HeldAttributes.near(self._source.dataset, self._source.cached_steps, self._outside)
        self._watch.begin()
        read: list[Any] = []
        try:
            read.append(self._source.read(index))
            found = differs(cached, read[0], across=True)
            if not found:
                return None
            return (
                f"sample {index} differs from what was cached of it ({found}), as {self._why(index)}. "
                "All samples come from the source from now on. If what has changed stays as it is now, call "
                "clear(); declare what is random, or changes as it reads, with hotset.nondeterministic, so "
                "that it stays live."
            )
        except Exception:  # a sample that cannot be read now may be unchanged
            return None
        finally:
            self._put_generators_back(read, index)
            if is_only_reader():
                held.put_back()
            self.last_seconds = time.monotonic() - begun
            self._budget.spend(self.last_seconds)
            self._cost = max(self.last_seconds, self._cost / 2)

    def _put_generators_back(self, read: list[Any], index: int) -> None:
        """Put generators back if reading has moved them, and not another thread, which would draw twice."""
        assert self._watch is not None
        try:
            self._watch.drew(*((read[0], functools.partial(self._source.read, index)) if read else ()))
        except Exception:  # it cannot be read again
            self._watch.begin()

    def _why(self, index: int) -> str:
        try:
            return _why_it_differs(self._source, index)
        except Exception as error:
            return f"the source returns another sample now (reading it again raised {type(error).__name__})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": 0, "_watch": None, "_outside": []}


def first_difference(
    source: Source, store: Store, ids: Ids | None = None, index_of: Callable[[int], int] = int
) -> str | None:
    """Compare a few samples of a cache that another job has filled with what the source returns here.

    These are the first and the last cached sample, and two between them that vary from call to call; after a
    second no further one is read. Generators, and what reading opens or notes, are restored.

    Args:
        ids: the sample ids in question; all by default.
        index_of: returns the index in the dataset of a sample id.

    Returns:
        A phrase that names a sample and how it differs; None if all are equal, or cannot be read now.
    """
    ids = np.arange(len(store)) if ids is None else ids
    cached = ids[store.words(ids) >= PRESENT]
    if not len(cached):
        return None
    begun, varied = time.monotonic(), time.time_ns() * _GOLDEN
    positions = (0, len(cached) - 1, varied % len(cached), (varied >> 32) % len(cached))
    steps = source.cached_steps
    with Generators(source.read_parts):
        held = HeldAttributes.of(source.dataset, steps, outside=outer_code(source.dataset, steps))
        try:
            for sample_id in dict.fromkeys(int(cached[position]) for position in positions):
                copies = store.read(np.array([sample_id]))
                if copies is None:
                    continue
                try:
                    found = differs(copies[0], source.read(index_of(sample_id)), across=True)
                except Exception:  # a sample that cannot be read now may be unchanged
                    continue
                if found:
                    return f"sample {index_of(sample_id)} ({found})"
                if time.monotonic() - begun > _FIRST_SECONDS:
                    break
        finally:
            held.put_back()
    return None


def _why_it_differs(source: Source, index: int) -> str:
    """A phrase that names the transform, or the dataset, because of which a sample differs now.

    Example:
        >>> import random
        >>> from hotset.dataset.pipeline import Cuts
        >>> frozen = Pipeline([1.0, 2.0], (), (lambda x: x + random.random(),)).cut(Cuts((), 1))
        >>> _why_it_differs(frozen, 0)
        '<lambda> returns another output each time'
    """
    pipeline = Pipeline.of(source.dataset, None)
    _, recorders = recorded(pipeline, index, [()] * len(pipeline.attributes))
    for attribute, recorder in zip(pipeline.attributes, recorders, strict=True):
        steps = leaves(list(attribute.chain.parts) if hasattr(attribute.chain, "parts") else attribute.chain)
        found = _random_one(steps, recorder.inputs[0]) if len(recorder.inputs) == 1 else None
        if found is not None:
            return f"{found} returns another output each time"
    sample = source.dataset[index]
    if any(differs(sample, source.dataset[index]) for _ in range(_REPEATS)):
        return f"{type(source.dataset).__name__} returns another sample each time"
    found = _random_one(leaves(source.prefix), sample)
    if found is not None:
        return f"{found} returns another output each time"
    names = [type(source.dataset).__name__, *map(name_of, source.cached_steps)]
    return (
        f"something that {' -> '.join(names)} depends on has changed since: a file, a parameter, code, a "
        "global, or an object that reading itself changes"
    )


def _random_one(steps: Sequence[Any], value: Any) -> str | None:
    """The name of the first of these transforms that does not return the same output again."""
    for step in steps:
        output = applied(step, copied(value))
        if any(differs(output, applied(step, copied(value))) for _ in range(_REPEATS)):
            return name_of(step)
        value = output
    return None
