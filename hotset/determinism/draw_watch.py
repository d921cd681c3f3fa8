"""A watch over reading: which samples draw random numbers as they are read, among all that are read.

A probe reads a few samples. A dataset that augments its rare classes draws for a twentieth of them, and two
readings of a few see nothing of it. But every sample that goes into a cache is read once, so all of that
reading is watched: the states of all generators are compared after every few samples::

    begin ── a few are read ── drew? no ── a few more ── drew? yes: put back ── each again, alone ── drew? ...

What has drawn is never undone twice: the states are those of :meth:`DrawWatch.begin` again once it is told,
so that reading for a cache leaves no trace, and whoever serves the sample draws what it would have drawn.

A comparison costs five microseconds, and some forty in the midst of decoding pictures, up to a percent of
one. To find the generators that objects hold costs milliseconds, and is done again where an attribute of the
dataset, of a transform, or of what these hold directly has another type than before, as when a generator is
made at its first use.

Where other threads run, one of them may have drawn meanwhile: from mixup in the training loop, say, while a
queue reads ahead. Reading once more tells them apart, as a sample that draws does so each time. If reading
is found to draw nothing, no state is put back, or that thread would draw the same numbers twice.

A generator that is made for one draw and dropped, from the system's entropy, leaves no state to compare.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hotset.determinism.object_graph import attributes
from hotset.determinism.rng import Generators

__all__ = ["DrawWatch"]

_NEAR, _DEEP = 64, 3
_ONCE_MORE = 2  # readings, to tell what draws from another thread that did so by chance at the same time


class DrawWatch:
    """Tells whether reading has moved a generator, and puts that back. It pickles.

    Args:
        holders: what generators may hang on: the dataset, its transforms.

    Example:
        >>> import random
        >>> watch = DrawWatch([])
        >>> watch.begin()
        >>> watch.drew()
        False
        >>> drawn = random.random()
        >>> watch.drew(), random.random() == drawn
        (True, True)
    """

    def __init__(self, holders: Sequence[object]) -> None:
        self._holders = list(holders)
        self._generators: Generators | None = None
        self._near: list[object] = []
        self._types: list[tuple[type, ...]] = []

    def begin(self) -> None:
        """Compare with the states as they are now."""
        if self._generators is None:
            self._generators = Generators(self._holders)
            self._settle()
        else:
            self._generators.note()

    def drew(self, read_again: Callable[[], object] | None = None) -> bool:
        """Whether reading has moved a generator since :meth:`begin`, and each time that it was repeated.

        If so, all generators are where they were then; if not, the next comparison is with the states as they
        are now.

        Args:
            read_again: reads the same once more; called, at most twice, where another thread may have drawn.
        """
        assert self._generators is not None, "begin() comes first"
        if not self._moved():
            return False
        began = self._generators.noted()
        if read_again is not None and threading.active_count() > 1:
            for _ in range(_ONCE_MORE):
                self._generators.note()
                read_again()
                if not self._moved():
                    return False
        self._generators.put(began)
        self._generators.note()
        return True

    def _moved(self) -> bool:
        assert self._generators is not None
        moved = self._generators.any_moved
        if self._types_of(self._near) != self._types:
            # One that was made meanwhile has drawn, as far as can be known; where it began cannot.
            moved |= self._generators.look_again(self._holders)
            self._settle()
        return moved

    def _settle(self) -> None:
        self._near = list(_near(self._holders))
        self._types = self._types_of(self._near)

    @staticmethod
    def _types_of(objects: Sequence[object]) -> list[tuple[type, ...]]:
        return [tuple(map(type, vars(each).values())) for each in objects]

    def __getstate__(self) -> dict[str, Any]:
        return {"_holders": self._holders, "_generators": None, "_near": [], "_types": []}


def _has_attributes(obj: object) -> bool:
    return type(getattr(obj, "__dict__", None)) is dict and not isinstance(obj, types.ModuleType)


def _near(holders: Sequence[object]) -> Iterator[object]:
    """The holders, and what is on their attributes, as far as that has some itself; dozens at most."""
    chains: Iterator[Any] = (each if type(each) in (list, tuple) else (each,) for each in holders)
    level = list(itertools.chain.from_iterable(chains))
    seen: dict[int, object] = {}
    for _ in range(_DEEP):
        level = [each for each in level if _has_attributes(each) and id(each) not in seen]
        for each in level[: _NEAR - len(seen)]:
            seen[id(each)] = each
            yield each
        level = [value for each in level[:_NEAR] for value in attributes(each).values()]
