"""A watch over all reading for a cache: which samples draw random numbers as they are read?

A probe reads a few samples. If a dataset augments its rare classes, a twentieth of its samples draw, and a
probe of a few may miss them. But every sample that goes into a cache is read once, so all of that reading is
watched: the states of all generators are compared after every few samples::

    begin ── a few are read ── drew? no ── a few more ── drew? yes: put back ── each again, alone ── drew? ...

When :meth:`DrawWatch.drew` returns True, it has put all generators back to their states at
:meth:`DrawWatch.begin`. So reading for a cache leaves no trace, and the process that serves the sample draws
what it would have drawn without a cache.

A comparison costs 5 microseconds, and about 40 between two decoded pictures: up to a percent of decoding one.
To find the generators that objects hold takes milliseconds. That is repeated only if an attribute of the
dataset, of a transform, or of an object that these hold directly has changed its type, as when a generator is
made at its first use.

Another thread may have drawn meanwhile, for mixup in the training loop while a queue reads ahead, for
example. Where other threads run, the samples are read once more to find out: a sample that draws does so each
time. If the samples turn out not to draw, no state is put back, as that thread would draw the same numbers
twice.

A generator that is seeded by the system for one draw and then dropped leaves no state to compare.
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
_REPEATS = 2  # further readings, to tell a sample that draws from a thread that drew at the same time


class DrawWatch:
    """Tells whether reading has moved a generator, and puts the generators back. Can be pickled.

    Args:
        holders: objects that may hold generators: the dataset, its transforms.

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
        """From here on, compare with the present states."""
        if self._generators is None:
            self._generators = Generators(self._holders)
            self._settle()
        else:
            self._generators.note()

    def drew(self, read_again: Callable[[], object] | None = None) -> bool:
        """Whether reading has moved a generator since :meth:`begin`, and again each time it was repeated.

        If it has, all generators are put back to their states at :meth:`begin`. If not, the next call
        compares with the present states.

        Args:
            read_again: reads the same samples once more. It is called at most twice, and only where another
                thread may have drawn.
        """
        assert self._generators is not None, "begin() comes first"
        if not self._moved():
            return False
        began = self._generators.noted()
        if read_again is not None and threading.active_count() > 1:
            for _ in range(_REPEATS):
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
            # A generator that was made meanwhile counts as having drawn; its first state cannot be known.
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
    """The holders, and the objects with attributes that they hold, two levels deep; at most 64 in all."""
    chains: Iterator[Any] = (each if type(each) in (list, tuple) else (each,) for each in holders)
    level = list(itertools.chain.from_iterable(chains))
    seen: dict[int, object] = {}
    for _ in range(_DEEP):
        level = [each for each in level if _has_attributes(each) and id(each) not in seen]
        for each in level[: _NEAR - len(seen)]:
            seen[id(each)] = each
            yield each
        level = [value for each in level[:_NEAR] for value in attributes(each).values()]
