"""The audit: now and then a hit is computed anew, and compared with what the cache has.

Verdicts and probes look at a few samples for a second; the audit looks for as long as the cache is used.
About one hit in a thousand is read from the source again, where that takes no more than a hundredth of the
time: an audit waits until it has earned what it will cost. Generators are put back, so that nobody notices.

A record that the source no longer gives means that something was frozen that is random, or that a file, a
parameter or the code has changed. Which of the two is found out by reading it once more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hotset.data.source import Source, Uncut, recorded
from hotset.determinism.chain import applied, leaves
from hotset.determinism.equality import same
from hotset.determinism.generators import Generators
from hotset.determinism.owned import copied
from hotset.determinism.verdict import name_of

__all__ = ["Audit", "why_it_differs"]

_ONE_IN = 1000
_SHARE = 0.01
_REPEATS = 16
# Knuth's multiplicative hash: which sample of a batch is looked at, without drawing from any generator.
_GOLDEN = 2654435761


class Audit:
    """Decides in one process when to look, and looks.

    Args:
        source: the data set and its chains, cut.
        seconds: about what reading a sample takes.
    """

    def __init__(self, source: Source, seconds: float) -> None:
        self._source = source
        self._cost = seconds
        self._hits = 0
        self._looks = 0
        self._spent = 0.0
        self._since = 0.0
        self._generators: Generators | None = None

    def due(self, hits: int) -> int | None:
        """Count the hits of a batch; which of them is to be looked at now, None for none."""
        if not self._since:
            self._since = time.monotonic()
        self._hits += hits
        if self._hits < _ONE_IN or not hits:
            return None
        if self._spent + self._cost > _SHARE * (time.monotonic() - self._since):
            return None
        self._hits = 0
        self._looks += 1
        return self._looks * _GOLDEN % (1 << 32) % hits

    def differs(self, cached: Any, index: int) -> str | None:
        """What to tell if a cached sample is another than the source gives now; None if it is not.

        Nothing is raised, and no generator moves: training goes on, whatever is found.

        Args:
            cached: the caller's copy of it.
            index: its number in the data set.
        """
        begun = time.monotonic()
        if self._generators is None:
            self._generators = Generators([self._source.dataset, self._source.prefix])
        states = self._generators.states()
        try:
            found = same(cached, self._source.read(index), across=True)
            if not found:
                return None
            return (
                f"sample {index} is not what was cached of it any more ({found}), as {self._why(index)}. "
                "All samples come from the source from now on. Declare what is random with "
                "hotset.nondeterministic, so that it stays live, or call clear() to cache them anew."
            )
        except Exception:  # what cannot be read now may have been right all the same
            return None
        finally:
            self._generators.put(states)
            cost = time.monotonic() - begun
            self._spent += cost
            self._cost = max(cost, self._cost / 2)

    def _why(self, index: int) -> str:
        try:
            return why_it_differs(self._source, index)
        except Exception as error:
            return f"the source gives another now (and {type(error).__name__} when it was asked why)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hits": 0, "_looks": 0, "_spent": 0.0, "_since": 0.0, "_generators": None}


def why_it_differs(source: Source, index: int) -> str:
    """A phrase that names the transform, or the data set, whose fault it is that a sample is another now.

    Example:
        >>> import random
        >>> from hotset.data.source import Cuts
        >>> frozen = Uncut([1.0, 2.0], (), (lambda x: x + random.random(),)).cut(Cuts((), (), 1, ()))
        >>> why_it_differs(frozen, 0)
        '<lambda> gives another output each time'
    """
    uncut = Uncut.of(source.dataset, None)
    _, recorders = recorded(uncut, index, [()] * len(uncut.sites))
    for site, recorder in zip(uncut.sites, recorders, strict=True):
        steps = leaves(list(site.chain.parts) if hasattr(site.chain, "parts") else site.chain)
        found = _random_one(steps, recorder.came[0]) if len(recorder.came) == 1 else None
        if found is not None:
            return f"{found} gives another output each time"
    sample = source.dataset[index]
    if any(same(sample, source.dataset[index]) for _ in range(_REPEATS)):
        return f"{type(source.dataset).__name__} gives another sample each time"
    found = _random_one(leaves(source.prefix), sample)
    if found is not None:
        return f"{found} gives another output each time"
    names = [type(source.dataset).__name__, *map(name_of, leaves((*source.inner, *source.prefix)))]
    return f"a file, a parameter or the code of {' -> '.join(names)} has changed since it was cached"


def _random_one(steps: Sequence[Any], value: Any) -> str | None:
    """The first of these transforms that does not give the same twice."""
    for step in steps:
        made = applied(step, copied(value))
        if any(same(made, applied(step, copied(value))) for _ in range(_REPEATS)):
            return name_of(step)
        value = made
    return None
