"""Reading a few real samples under watch: does the source draw random numbers, is it the same each time?

A probe can only *demote*. That two readings agree proves nothing (a crop of exactly the image's size agrees),
that they differ proves everything. So it looks for every sign at once:

1. *A generator's state moved*, global or held by the source: see :mod:`hotset.determinism.generators`.
2. *Two readings of one sample differ.* Each index is read several times in a row, which catches what changes
   with every call, and the first index once more at the very end, which catches what changes with the calls
   in between (a counter modulo two, a memory of the last sample).
3. *A second reading is the first, changed in place*: the source works on what it holds, and comparing the two
   readings compares an object with itself. So a digest of the first is taken before the second is read. (One
   buffer filled anew for each sample is no fault: reading the sample again makes it what it was.)

Everything is read in the order in which a user would read it; no generator is put back in between, as that
would hide a source that differs only because its generator moves on. At the end, and when the source raises,
every generator gets its state back: a program that builds a cache draws what it would have drawn without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.determinism.equality import changeable, same
from hotset.determinism.generators import Generators

__all__ = ["Probe", "probe", "same"]


@dataclass(frozen=True)
class Probe:
    """What was seen while samples were read.

    Attributes:
        samples: the first reading of each index, in the order of the indices.
        seconds: the mean time of a first reading; 0.0 if there was none.
        moved: a sentence for each generator whose state moved; empty is good.
        differs: a sentence for each sample whose readings differ; empty is good.
    """

    samples: list[Any]
    seconds: float
    moved: tuple[str, ...]
    differs: tuple[str, ...]


def probe(
    read: Callable[[int], object],
    indices: Sequence[int],
    holders: Sequence[object] = (),
    repeats: int = 2,
) -> Probe:
    """Read each index ``repeats`` times, and the first once more at the end; report what gave itself away.

    Args:
        read: returns the sample of an index.
        indices: which to read.
        holders: objects on which generators may hang: the data set, its transforms, functions.
        repeats: readings of each index in a row, at least 1.

    Returns:
        A :class:`Probe`. All generators have the state that they had before.

    Raises:
        Exception: whatever ``read`` raises, untouched; the generators have their states back then too.

    Example:
        >>> import random
        >>> probe(lambda i: i + random.random(), [0]).moved
        ("random's global state moved",)
    """
    reach = [*holders, read]
    generators = Generators(reach)
    samples: list[Any] = []
    differs: list[str] = []
    seconds = 0.0
    try:
        for index in indices:
            begun = time.perf_counter()
            first = read(index)
            seconds += time.perf_counter() - begun
            samples.append(first)
            digests = changeable(first)
            if len(samples) == 1:
                generators.look_again(reach)
                at_first = digests
            differs += _first(_differs(index, first, digests, read(index), "") for _ in range(repeats - 1))
        if samples:
            index, first = indices[0], samples[0]
            again = _differs(index, first, at_first, read(index), ", read again at the end")
            differs += _first([again])
        moved = generators.moved()
    finally:
        generators.restore()
    return Probe(samples, seconds / max(1, len(samples)), moved, tuple(differs))


def _first(found: Iterable[str | None]) -> list[str]:
    """At most one sentence, after all that the iterable reads was read."""
    return [sentence for sentence in found if sentence][:1]


def _differs(index: int, first: object, digests: dict[str, bytes], again: object, when: str) -> str | None:
    """A sentence about how another reading differs from the first, or None."""
    found = same(first, again)
    if found:
        return f"sample {index}{when}, {found}"
    now = changeable(again)
    for place in digests | now:
        if digests.get(place) != now.get(place):
            where = f", at {place}" if place else ""
            return f"sample {index}{when}{where}: changed in place as it was read again"
    return None
