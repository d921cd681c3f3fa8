"""Reading a few real samples under watch: does the source draw random numbers, is it the same each time?

A probe can only *demote*. That two readings agree proves nothing (a crop of exactly the image's size agrees),
that they differ proves everything. So it looks for every sign at once:

1. *A generator's state moved*, global or held by the source: see :mod:`hotset.determinism.rng`.
2. *Two readings of one sample differ.* The indices are read in order, then backwards, and so on. Each way
   back begins with its first index twice, so that it is read three times in a row, which catches what
   changes with every call; the others are read at ever larger distances, all even ones, and after another
   neighbour, which catches what changes with the calls in between (a counter modulo anything, a memory of
   the sample before).
3. *A second reading is the first, changed in place*: the source works on what it holds, and comparing the two
   readings compares an object with itself. So a digest of the first is taken before the second is read. (One
   buffer filled anew for each sample is no fault: reading the sample again makes it what it was.)

No generator is put back in between, as that would hide a source that differs only because its generator
moves on. At the end, and when the source raises,
every generator gets its state back: a program that builds a cache draws what it would have drawn without.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.determinism.draw_watch import DrawWatch
from hotset.determinism.equality import changeable, same
from hotset.determinism.rng import Generators

__all__ = ["Probe", "probe", "same"]


@dataclass(frozen=True)
class Probe:
    """What was seen while samples were read.

    Attributes:
        samples: the first reading of each index that was read, in the order of the indices.
        seconds: the mean time of a first reading; 0.0 if there was none.
        moved: a sentence for each generator whose state moved; empty is good.
        differs: a sentence for each sample whose readings differ; empty is good.
        drawing: the indices whose reading moves a generator.
        frozen: as ``differs``, without those.
    """

    samples: list[Any]
    seconds: float
    moved: tuple[str, ...]
    differs: tuple[str, ...]
    drawing: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()


class _Reading(NamedTuple):
    asked: int
    sample: Any
    digests: dict[str, bytes]
    seconds: float


def probe(
    read: Callable[[int], object],
    indices: Sequence[int],
    holders: Sequence[object] = (),
    repeats: int = 2,
    seconds: float = float("inf"),
    forgive: tuple[type[Exception], ...] = (),
) -> Probe:
    """Read each index ``repeats`` times, to and fro; report what gave itself away.

    Args:
        read: returns the sample of an index.
        indices: which to read.
        holders: objects on which generators may hang: the dataset, its transforms, functions.
        repeats: readings of each index, at least 1.
        seconds: about how long the first readings may take, of at least two indices. Each way back may take
            a tenth of that, and reads the last and the first index at least.
        forgive: a reading that raises one of these is left out, unless nothing can be read.

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
    readings: list[_Reading] = []
    differs: dict[int, str] = {}
    try:
        begun = time.perf_counter()
        for reading in _readings(read, indices, forgive):
            readings.append(reading)
            if len(readings) == 1:
                generators.look_again(reach)
            elif time.perf_counter() - begun > seconds:
                break
        for number in range(1, repeats):
            way = readings[:: -1 if number % 2 else 1]
            _read_again(read, [*way[:1], *way], seconds / 10, forgive, differs)
        moved = generators.moved()
        generators.restore()
        drawing = _drawing(read, [reading.asked for reading in readings], reach, forgive) if moved else ()
    finally:
        generators.restore()
    mean = sum(reading.seconds for reading in readings) / max(1, len(readings))
    samples = [reading.sample for reading in readings]
    others = tuple(told for index, told in differs.items() if index not in drawing)
    return Probe(samples, mean, moved, tuple(differs.values()), drawing, others)


def _drawing(
    read: Callable[[int], object],
    indices: Sequence[int],
    reach: Sequence[object],
    forgive: tuple[type[Exception], ...],
) -> tuple[int, ...]:
    """Those of these indices whose reading moves a generator, each read once more, alone."""

    def read_one(index: int) -> None:
        with contextlib.suppress(*forgive):
            read(index)

    watch, found = DrawWatch(reach), []
    watch.begin()
    for index in indices:
        read_one(index)
        if watch.drew(functools.partial(read_one, index)):
            found.append(index)
    return tuple(found)


def _readings(
    read: Callable[[int], object], indices: Sequence[int], forgive: tuple[type[Exception], ...]
) -> Iterator[_Reading]:
    """The first readings.

    Raises:
        Exception: the first that ``read`` raised and that is not forgiven, or if nothing could be read.
    """
    failed: Exception | None = None
    any_read = False
    for index in indices:
        begun = time.perf_counter()
        try:
            sample = read(index)
        except forgive as error:
            failed = failed or error
            continue
        took = time.perf_counter() - begun
        any_read = True
        yield _Reading(index, sample, changeable(sample), took)
    if failed and not any_read:
        raise failed


def _read_again(
    read: Callable[[int], object],
    way: Sequence[_Reading],
    seconds: float,
    forgive: tuple[type[Exception], ...],
    differs: dict[int, str],
) -> None:
    """Compare another reading of each with its first; where time is short, at both ends of the way only."""
    begun = time.perf_counter()
    for place, (index, first, digests, _) in enumerate(way):
        if 0 < place < len(way) - 1 and time.perf_counter() - begun > seconds:
            continue
        with contextlib.suppress(*forgive):
            told = _differs(index, first, digests, read(index))
            if told:
                differs.setdefault(index, told)


def _differs(index: int, first: object, digests: dict[str, bytes], again: object) -> str | None:
    """A sentence about how another reading differs from the first, or None."""
    found = same(first, again)
    if found:
        return f"sample {index}, {found}"
    now = changeable(again)
    for place in digests | now:
        if digests.get(place) != now.get(place):
            where = f", at {place}" if place else ""
            return f"sample {index}{where}: changed in place as it was read again"
    return None
