"""The source: where a sample comes from, up to the cut, and what is done to it live, after the cut.

::

    dataset[i] ── its own transform, first part ── `transform=`, first part ──│── the rest, for each use
    ╰───────────────────────── read(i), cached ──────────────────────────────╯  ╰──────── live ────────╯

A chain is cut after its leading transforms that are deterministic, declared so or by the structure of their
library (:mod:`hotset.determinism.verdict`), and that draw nothing. Containers are opened, and cut in their
middle. A chain given as ``transform=`` takes whole samples, so cutting it is easy. A data set's own
``transform`` takes a *part* of the sample (the picture, not the label), and is called inside ``__getitem__``.
So the data set is copied shallowly, the copy is given only the chain's first part, and one sample is read to
see where in it the result turns up: the rest of the chain then works on that place of the cached sample.
Where it turns up nowhere, or more than once, because the data set goes on working on it, the chain cannot be
cut and stays whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from hotset.determinism.chain import cut, leaves
from hotset.determinism.verdict import verdict_of
from hotset.errors import ArgumentError

__all__ = ["Source", "chain_of"]

Transform = Callable[[Any], Any]


class _Chain:
    """Transforms applied one after the other; stands in for a data set's own transform."""

    def __init__(self, parts: Sequence[Transform]) -> None:
        self.parts = tuple(parts)

    def __call__(self, value: Any) -> Any:
        for part in self.parts:
            value = part(value)
        return value


class _Trace(_Chain):
    """A chain that keeps what it returned, to be found again in the sample."""

    def __init__(self, parts: Sequence[Transform]) -> None:
        super().__init__(parts)
        self.returned: list[Any] = []

    def __call__(self, *values: Any, **named: Any) -> Any:
        if named or len(values) != 1:
            raise _CalledOtherwise
        value = super().__call__(*values)
        self.returned.append(value)
        return value


class _CalledOtherwise(Exception):
    """The data set calls its transform with keywords (albumentations'), or with several values."""


@dataclass(frozen=True)
class Source:
    """A data set and its chain, cut in two.

    Attributes:
        dataset: gives samples by number; its own transform is its first part only, if it was cut.
        inner: transforms that the data set itself still applies.
        prefix: transforms of whole samples that are cached with it.
        live: transforms applied to each use of a sample.
        place: where in the sample the live ones work: keys from the root; None for the whole sample.
        notes: sentences for the plan.
    """

    dataset: Any
    inner: tuple[Transform, ...]
    prefix: tuple[Transform, ...]
    live: tuple[Transform, ...]
    place: tuple[Any, ...] | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, dataset: Any, transform: Transform | Sequence[Transform] | None) -> Source:
        """Cut a data set's chain, or the chain given for it.

        Raises:
            ArgumentError: the data set is iterable, has no length, or is empty.
        """
        _require_map_style(dataset)
        given = chain_of(transform)
        own = _own_chain(dataset)
        source = _cut_own(dataset, own) if own is not None else cls(dataset, (), (), (), None)
        if source.live:
            if source.place is not None and given:
                # Whole-sample transforms follow part-of-sample ones: they go live behind them as one.
                steps: tuple[Transform, ...] = (_At(source.place, source.live), *given)
                return replace(source, live=steps, place=None)
            return replace(source, live=(*source.live, *given))
        prefix, live = cut(given, _leading(given))
        return replace(source, prefix=tuple(prefix), live=tuple(live))

    def read(self, index: int) -> Any:
        """Read one sample and take it as far as it is cached."""
        sample = self.dataset[index]
        for step in self.prefix:
            sample = step(sample)
        return sample

    def finish(self, sample: Any) -> Any:
        """Apply the live transforms to a sample that is the caller's own."""
        if not self.live:
            return sample
        if self.place is not None:
            return _At(self.place, self.live)(sample)
        for step in self.live:
            sample = step(sample)
        return sample


class _At:
    """Applies transforms to one place of a sample."""

    def __init__(self, place: tuple[Any, ...], steps: Sequence[Transform]) -> None:
        self.place = place
        self.steps = tuple(steps)

    def __call__(self, sample: Any) -> Any:
        return self._apply(sample, self.place)

    def _apply(self, value: Any, place: tuple[Any, ...]) -> Any:
        if not place:
            for step in self.steps:
                value = step(value)
            return value
        key, rest = place[0], place[1:]
        if isinstance(value, tuple):
            parts = list(value)
            parts[key] = self._apply(parts[key], rest)
            return type(value)._make(parts) if hasattr(value, "_make") else tuple(parts)
        value[key] = self._apply(value[key], rest)
        return value


def chain_of(transform: Transform | Sequence[Transform] | None) -> tuple[Transform, ...]:
    """A chain as a tuple: of one transform or container, or of a list or tuple of them.

    Raises:
        ArgumentError: a part cannot be called.
    """
    if transform is None:
        return ()
    parts = tuple(transform) if isinstance(transform, (list, tuple)) else (transform,)
    for part in leaves(parts):
        if not callable(part):
            raise ArgumentError(f"transform= takes callables, and {part!r} is none.")
    return parts


def _leading(chain: Any) -> int:
    """How many leaf transforms at the beginning are known to be deterministic, and draw nothing."""
    steps = leaves(chain)
    for count, step in enumerate(steps):
        verdict = verdict_of(step)
        if verdict.kind != "deterministic" or verdict.draws:
            return count
    return len(steps)


def _require_map_style(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ArgumentError(
            f"hotset.cache needs a data set that gives sample i as dataset[i], and {kind} is iterable only; "
            "load it with hotset.DataLoader as it is."
        )
    if not hasattr(dataset, "__len__"):
        raise ArgumentError(f"hotset.cache needs a data set with a length, and {kind} has none.")
    if len(dataset) == 0:
        raise ArgumentError(f"the data set ({kind}) is empty: there is nothing to cache.")


def _own_chain(dataset: Any) -> Any | None:
    transform = getattr(dataset, "transform", None)
    return transform if callable(transform) or isinstance(transform, (list, tuple)) else None


def _cut_own(dataset: Any, chain: Any) -> Source:
    """Cut a data set's own transform, if its result can be found in the sample."""
    whole = Source(dataset, chain_of(chain), (), (), None)
    prefix, live = cut(chain, _leading(chain))
    if not live:
        return whole
    trace = _Trace(prefix)
    try:
        sample = _with_transform(dataset, trace)[0]
    except _CalledOtherwise:
        note = (
            f"{type(dataset).__name__} calls its transform with keywords or several values, so the chain "
            "cannot be cut; give it as transform= to have it cut"
        )
        return replace(whole, notes=(note,))
    places = _find(sample, trace.returned[0]) if len(trace.returned) == 1 else []
    if len(places) != 1:
        note = (
            f"{type(dataset).__name__} goes on working on what its transform returns, so the chain cannot be "
            "cut there; give it as transform= to have it cut"
        )
        return replace(whole, notes=(note,))
    shortened = _with_transform(dataset, _Chain(prefix))
    return Source(shortened, tuple(prefix), (), tuple(live), places[0])


def _with_transform(dataset: Any, transform: Transform) -> Any:
    """A shallow copy of a data set with another transform, also where torchvision keeps it twice."""
    twin = copy.copy(dataset)
    original = dataset.transform
    twin.transform = transform
    pair = getattr(dataset, "transforms", None)
    if pair is not None and getattr(pair, "transform", None) is original:
        twin.transforms = copy.copy(pair)
        twin.transforms.transform = transform
    return twin


def _find(sample: Any, wanted: Any, depth: int = 0) -> list[tuple[Any, ...]]:
    """Every place in a sample where this very object is."""
    if sample is wanted:
        return [()]
    if depth > 4:
        return []
    items: Any = ()
    if type(sample) is dict:
        items = sample.items()
    elif isinstance(sample, (list, tuple)):
        items = enumerate(sample)
    return [(key, *rest) for key, part in items for rest in _find(part, wanted, depth + 1)]
