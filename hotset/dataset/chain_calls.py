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
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hotset.determinism.aliasing import copied
from hotset.determinism.equality import differs
from hotset.determinism.objects.safe_access import loaded_class

__all__ = [
    "ATOMS",
    "ChainCall",
    "Made",
    "Result",
    "SamplePath",
    "are_at",
    "note",
    "noted",
    "places_of",
    "value_at",
]

# Where a value is in a sample: keys from the root.
SamplePath = tuple[Any, ...]
# How a dataset calls a chain of its own: the attribute, and the names with which it gives the values.
ChainCall = tuple[str, ...]

_DEEPEST = 4
ATOMS = (int, float, complex, str, bytes, type(None))  # of which one object may be two values


class Result:
    """What one call returned, and how to tell whether it was changed since."""

    def __init__(self, value: Any, warn: Callable[[object, Exception], None]) -> None:
        self.value = value
        self._look = _picture if _mark(value) else _bytes
        self._before = self._look(value)
        self._copy = copied(value, warn) if self._before is None else None

    def is_unchanged(self) -> bool:
        """Whether it has the content that it had."""
        if self._before is None:
            return differs(self._copy, self.value) is None
        now = self._look(self.value)
        same = now is not None and len(now) == len(self._before) and all(map(operator.is_, self._before, now))
        return same or differs(self._before, now) is None


# The results of all calls of each chain, in order.
Made = dict[ChainCall, list[Result]]


def _mark(value: Any) -> bool:
    """Mark a picture of Pillow's that is in memory of its own; returns whether it is one.

    One that is read-only already shares its memory with a file or an array, by which it may change.
    """
    if not _is_picture(value) or getattr(value, "_im", None) is None or value.readonly:
        return False
    value.readonly = 1
    _reading.marked.append((value, value.im))
    return True


def _is_picture(value: Any) -> bool:
    return isinstance(value, loaded_class("PIL.Image", "Image"))


def _picture(image: Any) -> tuple[Any, ...]:
    """All that changes with a marked picture's content."""
    return image.im, bool(image.readonly), image.mode, image.getpalette(), *image.info, *image.info.values()


def _bytes(value: Any) -> tuple[Any, ...] | None:
    """All of a plain array's content, or tensor's, which is compared five times as fast as a copy of it."""
    learns = False
    if type(value) is torch.Tensor:
        learns = value.requires_grad
        try:  # not .numpy(): after that the user's tensor could not be resized any more
            value = np.from_dlpack(value.detach())
        except (TypeError, RuntimeError, BufferError):  # numpy has no such array
            return None
    if type(value) is not np.ndarray or value.dtype.hasobject:
        return None
    return learns, value.dtype, value.shape, value.strides, value.ravel("K").tobytes()


class _Reading(threading.local):
    """What the chains of the dataset that this thread reads have returned; None while it reads none.

    With it the pictures that are marked meanwhile, each with its pixels.
    """

    def __init__(self) -> None:
        self.made: Made | None = None
        self.marked: list[tuple[Any, Any]] = []


_reading = _Reading()


@contextlib.contextmanager
def noted() -> Iterator[Made]:
    """Note calls of chains that have a name; a dataset that is read within another has notes of its own.

    The notes and marks are gone afterwards, and with them all references to results.
    """
    outer = _reading.made, _reading.marked
    made = Made()
    marked: list[tuple[Any, Any]] = []
    _reading.made, _reading.marked = made, marked
    try:
        yield made
    finally:
        _reading.made, _reading.marked = outer
        while marked:
            _unmark(*marked.pop())
        made.clear()


def _unmark(picture: Any, pixels: Any) -> None:
    if picture.im is pixels:  # others come with a mark of their own
        picture.readonly = 0


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
    if _is_picture(value):
        value.load()  # not twice from one file
        kind: Any = type(value)
        other = kind.__new__(kind)
        vars(other).update(vars(value))
        if any(picture is value for picture, _ in _reading.marked):
            other.readonly = 0
        _mark(value)  # when the dataset writes into its own, that gets other memory
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
        found = places_of(sample, list(values))
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return len(found) == len(paths) and all(
        path in places and (len(places) == 1 or isinstance(value, ATOMS))
        for path, places, value in zip(paths, found, values, strict=True)
    )


def places_of(sample: Any, targets: Sequence[Any]) -> list[list[SamplePath]]:
    """For each of these very objects every path at which it is in a sample, which is gone through once."""
    found: dict[int, list[SamplePath]] = {id(target): [] for target in targets}
    _look_for(found, sample, ())
    return [found[id(target)] for target in targets]


def _look_for(found: Mapping[int, list[SamplePath]], part: Any, path: SamplePath) -> None:
    if id(part) in found:
        found[id(part)].append(path)
        return
    items: Any = ()
    if len(path) > _DEEPEST:
        return
    if type(part) is dict:
        items = part.items()
    elif isinstance(part, (list, tuple)):
        items = enumerate(part)
    for key, inner in items:
        _look_for(found, inner, (*path, key))


def value_at(sample: Any, path: SamplePath) -> Any:
    """The value at a path of a sample."""
    for key in path:
        sample = sample[key]
    return sample
