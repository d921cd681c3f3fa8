"""A probe reads a few real samples under watch: does the source draw random numbers, or vary otherwise?

A probe can only *demote*. Two equal readings prove nothing (a crop of exactly the image's size returns equal
ones); two readings that differ prove that the source varies. So the probe looks for each of these signs:

1. *A generator's state moved*, global or held by the source: see :mod:`hotset.determinism.draws.rng`.
2. *Two readings of one sample differ.* The probe reads the indices in order, then backwards, and so on. Each
   pass begins with its first index twice, so that this sample is read three times in a row: that catches what
   changes with every call. The others are read at ever larger, always even distances, and after another
   neighbour: that catches what changes with the calls in between (a counter modulo anything, a memory of the
   sample before).
3. *The second reading is the first object, changed in place*: the source works on what it holds, and
   comparing the two readings would compare an object with itself. So the probe takes a digest of the first
   before it reads the second. (A source that fills one buffer anew for each sample is not at fault: reading
   the sample again makes the buffer what it was.)

The probe puts no generator back between readings, as that would hide a source that differs only because its
generator moves on. If none has moved, it moves the global ones itself before it reads again: a source that
draws and puts the state back (``torch.random.fork_rng``) then draws something else. At the end, and when the
source raises, it puts every generator back: a program that builds a cache draws what it would have drawn
without.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset._interrupts import own_errors
from hotset.determinism.draws.draw_watch import DrawWatch
from hotset.determinism.draws.rng import Generators
from hotset.determinism.equality import changed_place, content_digests, differs

__all__ = ["Probe", "probe"]


@dataclass(frozen=True)
class Probe:
    """What was seen while samples were read.

    Attributes:
        samples: the first reading of each index that was read, in the order of the indices.
        seconds: the mean time of a first reading; 0.0 if there was none.
        moved: a sentence for each generator whose state moved.
        differs: a sentence for each sample whose readings differ.
        drawing: the indices whose reading moves a generator.
        differing: the indices of the samples whose readings differ, without those in ``drawing``: a cache of
            all samples but those in ``drawing`` would freeze these.
        failed: what the first reading of an index raised that is left out, by index.
    """

    samples: list[Any]
    seconds: float
    moved: tuple[str, ...]
    differs: tuple[str, ...]
    drawing: tuple[int, ...] = ()
    differing: tuple[int, ...] = ()
    failed: dict[int, Exception] = field(default_factory=dict)


class _Reading(NamedTuple):
    sample_index: int
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
    """Read each index ``repeats`` times, forwards and backwards by turns; report every sign of variation.

    Args:
        read: returns the sample of an index.
        indices: which to read.
        holders: objects that may hold generators: the dataset, its transforms, functions.
        repeats: readings of each index, at least 1.
        seconds: about how long the first readings may take; at least two indices are read. Each later pass
            may take a tenth of that, and reads at least the first and the last index.
        forgive: a reading that raises one of these is left out, unless nothing can be read.

    Returns:
        A :class:`Probe`. All generators have the state that they had before.

    Raises:
        Exception: whatever ``read`` raises, unchanged; the generators are put back in this case too.

    Example:
        >>> import random
        >>> probe(lambda i: i + random.random(), [0]).moved
        ("random's global state moved",)
    """
    holders = [*holders, read]
    generators = Generators(holders)
    readings: list[_Reading] = []
    differs: dict[int, str] = {}
    failed: dict[int, Exception] = {}
    at_first: dict[str, Any] | None = None  # the generators' states, if the probe has moved them
    try:
        begun = time.perf_counter()
        for reading in _readings(read, indices, forgive, failed):
            readings.append(reading)
            if len(readings) == 1:
                generators.look_again(holders)
            elif time.perf_counter() - begun > seconds:
                break
        moved = generators.moved()
        if repeats > 1 and not moved:
            at_first = generators.noted()
            _draw_from_globals()
            generators.note()
        for number in range(1, repeats):
            order = readings[:: -1 if number % 2 else 1]
            _read_again(read, [*order[:1], *order], seconds / 10, forgive, differs)
        moved = moved or generators.moved()
        drawing: tuple[int, ...] = ()
        if moved or differs:
            generators.restore()
            drawing = _drawing(read, [reading.sample_index for reading in readings], holders, forgive)
    finally:
        generators.restore()
        if at_first is not None:
            generators.put(at_first)
    mean = sum(reading.seconds for reading in readings) / max(1, len(readings))
    samples = [reading.sample for reading in readings]
    differing = tuple(index for index in differs if index not in drawing)
    return Probe(samples, mean, moved, tuple(differs.values()), drawing, differing, failed)


def _draw_from_globals() -> None:
    """Move the global generators, of torch that of the CPU whatever its default device is."""
    random.random(), np.random.random_sample(), torch.rand((), device="cpu")


def _drawing(
    read: Callable[[int], object],
    indices: Sequence[int],
    holders: Sequence[object],
    forgive: tuple[type[Exception], ...],
) -> tuple[int, ...]:
    """Read each index once more, alone; return those whose reading moves a generator."""

    def read_one(index: int) -> object:
        try:
            return read(index)
        except own_errors(forgive):
            return None

    watch, found = DrawWatch(holders), []
    _draw_from_globals()  # or a sample that seeds a generator may find it seeded so already
    watch.begin()
    for index in indices:
        if watch.drew(read_one(index), functools.partial(read_one, index)):
            found.append(index)
    return tuple(found)


def _readings(
    read: Callable[[int], object],
    indices: Sequence[int],
    forgive: tuple[type[Exception], ...],
    failed: dict[int, Exception],
) -> Iterator[_Reading]:
    """The first reading of each index; ``failed`` gets what it raised, if it is left out.

    Raises:
        Exception: what ``read`` raised and ``forgive`` does not name; what it raised first, if nothing could
            be read.
    """
    any_read = False
    for index in indices:
        begun = time.perf_counter()
        try:
            sample = read(index)
        except own_errors(forgive) as error:
            failed[index] = error
            continue
        took = time.perf_counter() - begun
        any_read = True
        yield _Reading(index, sample, content_digests(sample), took)
    if failed and not any_read:
        raise next(iter(failed.values()))


def _read_again(
    read: Callable[[int], object],
    order: Sequence[_Reading],
    seconds: float,
    forgive: tuple[type[Exception], ...],
    differs: dict[int, str],
) -> None:
    """Compare another reading of each with its first; once the time is over, only that of the last index."""
    begun = time.perf_counter()
    for number, (index, first, digests, _) in enumerate(order):
        if 0 < number < len(order) - 1 and time.perf_counter() - begun > seconds:
            continue
        try:
            sentence = _differs(index, first, digests, read(index))
        except own_errors(forgive):
            continue
        if sentence:
            differs.setdefault(index, sentence)


def _differs(index: int, first: object, digests: dict[str, bytes], again: object) -> str | None:
    """A sentence about how another reading differs from the first, or None."""
    found = differs(first, again)
    if found:
        return f"sample {index}, {found}"
    place = changed_place(digests, content_digests(again))
    if place is None:
        return None
    where = f", at {place}" if place else ""
    return f"sample {index}{where}: changed in place as it was read again"
