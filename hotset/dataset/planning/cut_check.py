"""Whether a dataset's own chains may be cut at all: samples are read whole and cut, and compared.

A cut moves the rest of a chain behind the reading of the sample. What the dataset does around its chain then
comes too early: it sets a seed and puts the generator back (``torch.random.fork_rng``), so that each sample
has its own fixed crop; it puts a generator back between two chains, so that a picture and its mask get the
same crop. No generator shows that, and the results are in the sample unchanged. But a sample that is read
both ways from the same states of all generators differs then, or leaves other states.

A dataset that seeds a generator for each sample leaves it seeded, also when it is read cut. It is refused for
that, unless it is declared. Then a hit, for which nothing is read, would draw other numbers than the sample
has: so it is not cut either.

A sample that cannot be read whole, or differs in two whole readings from the same states, tells nothing. What
the dataset does rarely, after a look at the result, shows in its code:
:mod:`hotset.dataset.planning.call_sites`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hotset._interrupts import own_errors
from hotset.dataset.pipeline import ApplyAt, Chain, Cuts, Pipeline, Source, chain_of
from hotset.dataset.planning.recorder import passes_shared_objects
from hotset.dataset.transform_attributes import called_with, with_transforms
from hotset.determinism.aliasing import copied
from hotset.determinism.declare import declared
from hotset.determinism.draws.rng import Generators
from hotset.determinism.equality import differs

__all__ = ["differs_when_cut"]

_SECONDS = 0.25
_ROUNDS = 8
_Read = tuple[Any, dict[str, Any]]  # a sample, and the states of generators that reading it left


def differs_when_cut(pipeline: Pipeline, cuts: Cuts, indices: Sequence[int]) -> bool:
    """Whether one of these samples is another, or draws otherwise, with the dataset's own chains cut."""
    cut = pipeline.cut(cuts)
    live = tuple(step for step in cut.live if isinstance(step, ApplyAt))
    if not live:
        return False
    cut = replace(cut, prefix=(), live=live, calls={})
    chains = {  # what works in place must not change what the dataset holds
        pipeline.attributes[number].name: _given_copies(pipeline.attributes[number].chain)
        for number in _get_what_is_held(pipeline, cuts, indices)
    }
    whole = Source(with_transforms(pipeline.dataset, chains), (), (), ())
    generators = Generators([pipeline.dataset])
    believed = declared(pipeline.dataset) == "deterministic"
    before = generators.noted()
    begun = time.perf_counter()
    try:
        for index in [*indices] * _ROUNDS:
            first, other = _reading(whole, index, generators), _reading(cut, index, generators)
            if first is not None:
                if differs(first, other, across=True) is not None:
                    again = _reading(whole, index, generators)
                    if differs(first, again, across=True) is None:
                        return True
                generators.put(first[1])  # so that the next one draws otherwise, as in training
                generators.note()
                if believed and _seeds(whole, cut, index, generators, first):
                    return True
            if time.perf_counter() - begun > _SECONDS:
                break
    finally:
        generators.put(before)
    return False


def _get_what_is_held(pipeline: Pipeline, cuts: Cuts, indices: Sequence[int]) -> list[int]:
    """The numbers of the chains to be cut that may be called with objects that the dataset holds.

    The others need no copies, and stay what they are.
    """
    cut = [number for number, own in enumerate(cuts.own) if own.paths or own.in_place]
    left = {*range(len(cuts.own))} - {*cut}
    try:
        passed = [passes_shared_objects(pipeline, index, left) for index in indices]
    except own_errors():  # training may never ask for it
        return cut
    return [number for number in cut if any(each[number] for each in passed)]


def _given_copies(chain: Any) -> Any:
    """A chain that works on copies. It is of the chain's class, for which a dataset may ask, to seed it."""
    with contextlib.suppress(Exception):
        if callable(chain):
            return called_with(chain, copied)
    return Chain(chain_of(chain), copies=True)


def _seeds(whole: Source, cut: Source, index: int, generators: Generators, first: _Read) -> bool:
    """Whether the dataset seeds, for this sample, all generators from which the live part draws.

    Args:
        first: a reading of the whole sample, which left the generators in their present states.
    """
    drawn = _drawn_live(cut, index, generators)
    again = _reading(whole, index, generators) if drawn else None
    if again is None or not _alike(first[0], again[0]):
        return False
    return all(_alike(first[1].get(name), again[1].get(name)) for name in drawn)


def _drawn_live(cut: Source, index: int, generators: Generators) -> list[str]:
    """The names of the generators from which the live part draws, as it does after a hit."""
    before = generators.noted()
    try:
        sample = cut.read_cut(index)
        generators.restore()
        cut.finish(sample)
        return [name for name, state in generators.states().items() if not _alike(state, before.get(name))]
    except own_errors():  # training may never ask for it
        return []
    finally:
        generators.restore()


def _alike(one: Any, other: Any) -> bool:
    return differs(one, other, across=True) is None


def _reading(source: Source, index: int, generators: Generators) -> _Read | None:
    """A sample, and the states that reading it left, which are put back; None if it cannot be read."""
    try:
        return source.finish(source.read_cut(index)), generators.states()
    except own_errors():  # training may never ask for it
        return None
    finally:
        generators.restore()
