"""Calls of a dataset's own chains, noted while a sample is read: is each result in it as it was returned?

What a cut chain has returned waits in the cached sample for the rest of the chain. A few samples have shown
the planner where that is. For a rare one the dataset may do something else: call the chain another number of
times, process what it returned, write into it. So each call leaves a copy of its result, and after the
reading each result must be at its path and nowhere else, the very object, with the same content. A picture of
Pillow's is not copied: it is marked read-only, and Pillow takes the mark off when it writes to it.

A chain of which nothing is cached has its input as its result. The dataset gets another object of the same
content then, or ``(original, result)`` and ``(result, original)`` would look alike.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hotset.determinism.aliasing import copied
from hotset.determinism.equality import same

__all__ = ["ChainCall", "Made", "Result", "SamplePath", "are_at", "note", "noted", "places_of", "value_at"]

# Where a value is in a sample: keys from the root.
SamplePath = tuple[Any, ...]
# How a dataset calls a chain of its own: the attribute, and the names with which it gives the values.
ChainCall = tuple[str, ...]

_DEEPEST = 4
_ATOMS = (int, float, complex, str, bytes, type(None))  # of which one object may be two values


class Result:
    """What one call returned, and how to tell whether it was changed since."""

    def __init__(self, value: Any, warn: Callable[[object, Exception], None]) -> None:
        self.value = value
        self._marked = _marked(value)
        self._bytes = _bytes(value)
        by_copy = self._marked is None and self._bytes is None
        self._before = copied(value, warn) if by_copy else None

    def is_unchanged(self) -> bool:
        """Whether it has the content that it had; takes the mark off a picture."""
        if self._bytes is not None:
            return _bytes(self.value) == self._bytes
        if self._marked is None:
            return same(self._before, self.value) is None
        core, info, mark = self._marked
        unchanged = self.value.im is core and bool(self.value.readonly) and self.value.info == info
        if unchanged:
            self.value.readonly = mark
        return unchanged


# The results of all calls of each chain, in order.
Made = dict[ChainCall, list[Result]]


def _marked(value: Any) -> tuple[Any, dict[Any, Any], int] | None:
    """Mark a picture of Pillow's that is in memory; returns its pixels, ``info`` and former mark."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(value, pillow.Image) or getattr(value, "_im", None) is None:
        return None
    mark, value.readonly = value.readonly, 1
    return value.im, dict(value.info), mark


def _bytes(value: Any) -> tuple[Any, ...] | None:
    """All of a plain array's content, or tensor's, which is compared five times as fast as a copy of it."""
    if type(value) is torch.Tensor:
        try:
            value = value.detach().numpy()
        except (TypeError, RuntimeError):  # numpy has no such array
            return None
    if type(value) is not np.ndarray or value.dtype.hasobject:
        return None
    return value.dtype, value.shape, value.strides, value.ravel("K").tobytes()


class _Reading(threading.local):
    """What the chains of the dataset that this thread reads have returned; None while it reads none."""

    made: Made | None = None


_reading = _Reading()


@contextlib.contextmanager
def noted() -> Iterator[Made]:
    """Note calls of chains that have a name; a dataset that is read within another has notes of its own."""
    outer, made = _reading.made, Made()
    _reading.made = made
    try:
        yield made
    finally:
        _reading.made = outer


def note(call: ChainCall, given: Sequence[Any], made: Any, warn: Callable[[object, Exception], None]) -> Any:
    """Note what a call makes, if a sample is being read; returns what the dataset is to get.

    Args:
        call: the call.
        given: the values that it got.
        made: one value, a tuple of several, or a dict of those that were given by name.
        warn: warns of an object that cannot be copied.
    """
    if _reading.made is None:
        return made
    known = set(map(id, given))
    if isinstance(made, dict) and call[1:]:
        made = {name: _another(value, warn) if id(value) in known else value for name, value in made.items()}
    elif isinstance(made, tuple) and len(given) > 1:
        made = tuple(_another(value, warn) if id(value) in known else value for value in made)
    elif id(made) in known:
        made = _another(made, warn)
    _reading.made.setdefault(call, []).append(Result(made, warn))
    return made


def _another(value: Any, warn: Callable[[object, Exception], None]) -> Any:
    """Another object of the same content, in the same memory if it is an array, a tensor or a picture."""
    if isinstance(value, np.ndarray):
        return value.view()
    if isinstance(value, torch.Tensor) and not value.requires_grad and not getattr(value, "__dict__", None):
        return value.detach()
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        kind: Any = type(value)
        other = kind.__new__(kind)
        vars(other).update(vars(value))
        return other
    return copied(value, warn)


def are_at(
    calls: Mapping[ChainCall, Sequence[Sequence[SamplePath]]], samples: Sequence[Any], made: Made
) -> bool:
    """Whether the chains were called as they should, and all results are in the samples, unchanged.

    Args:
        calls: for each chain, and for each call of it for one sample, the paths of its results.
        samples: the samples that were read, in their order.
        made: the results that were noted meanwhile.
    """
    if any(len(results) != len(calls.get(call, ())) * len(samples) for call, results in made.items()):
        return False
    for call, together in calls.items():
        results = iter(made.get(call, ()))
        for sample in samples:
            for paths, result in zip(together, results, strict=False):
                if not (_is_at(sample, paths, call[1:], result.value) and result.is_unchanged()):
                    return False
    return made.keys() == calls.keys()


def _is_at(sample: Any, paths: Sequence[SamplePath], names: Sequence[str], result: Any) -> bool:
    try:
        values = [result[name] for name in names] if names else result if len(paths) > 1 else [result]
        found = [places_of(sample, value) for value in values]
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return len(found) == len(paths) and all(
        path in places and (len(places) == 1 or isinstance(value, _ATOMS))
        for path, places, value in zip(paths, found, values, strict=True)
    )


def places_of(sample: Any, target: Any, depth: int = 0) -> list[SamplePath]:
    """Every path at which this very object is in a sample."""
    if sample is target:
        return [()]
    if depth > _DEEPEST:
        return []
    items: Any = ()
    if type(sample) is dict:
        items = sample.items()
    elif isinstance(sample, (list, tuple)):
        items = enumerate(sample)
    return [(key, *rest) for key, part in items for rest in places_of(part, target, depth + 1)]


def value_at(sample: Any, path: SamplePath) -> Any:
    """The value at a path of a sample."""
    for key in path:
        sample = sample[key]
    return sample
