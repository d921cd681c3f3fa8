"""Random number generators, the global ones and those that objects hold: their states, compared and restored.

Caching freezes what a generator would have drawn. So before hotset caches anything, it reads samples and
compares the generators' states: a state that moved is the surest sign of randomness, surer than outputs that
differ (a flip with p=0.5 gives two equal outputs every other time). Three generators are global: those of
``random``, numpy and torch. The dataset holds the others: in an attribute, a list of augmenters, a closure, a
default argument, a base class, or a global that its methods read.

:mod:`hotset.determinism.objects.object_graph` finds them without copying anything: a copy's generator would
move instead of the original's, and a probe of the copy would call it deterministic.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hotset.determinism.libraries.albumentations import nothing_is_random
from hotset.determinism.objects.object_graph import within_reach
from hotset.determinism.objects.safe_access import loaded_class

__all__ = ["GLOBAL", "KINDS", "Generators", "access"]

KINDS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    np.random.SeedSequence,
    torch.Generator,
)

GLOBAL = ("random's global state", "numpy.random's global state", "torch's global state")
"""The names that the global generators have in :meth:`Generators.states`."""

_Look = Callable[[], bytes | None]
_MT19937_KEY = 624 * 4
_RANDOM_BYTES = _random.Random.__basicsize__ - object.__basicsize__


class _Watched:
    """One generator: its name, how to read and set its state, and the state that it is compared with.

    Args:
        name: for messages.
        get, put: read and set its state.
        look: returns bytes that change whenever the state does, faster than ``get``, or None if it cannot
            tell at the moment. None if there is no faster way.
    """

    def __init__(
        self, name: str, get: Callable[[], Any], put: Callable[[Any], object], look: _Look | None = None
    ) -> None:
        self.name, self.get, self.put, self._look = name, get, put, look
        self._take()

    def note(self) -> None:
        """From here on, compare with the present state."""
        if self.moved():
            self._take()

    def _take(self) -> None:
        self.state = self.get()
        # numpy draws two normal deviates at a time and keeps the second outside the memory that is looked at.
        kept_deviate = isinstance(self.state, dict) and self.state.get("has_gauss")
        self._looked = self._look() if self._look is not None and not kept_deviate else None

    def moved(self) -> bool:
        if self._look is not None and self._looked is not None and (looked := self._look()) is not None:
            return looked != self._looked
        return _differ(self.state, self.get())


class Generators:
    """The global generators and all that ``holders`` hold, with their states as they are now.

    At the end of a ``with`` block they are put back, as :meth:`restore` does.

    Example:
        >>> watched = Generators([])
        >>> _ = random.random()
        >>> watched.moved()
        ("random's global state moved",)
        >>> watched.restore()
        >>> watched.moved()
        ()
    """

    def __init__(self, holders: Sequence[object]) -> None:
        self._watched: dict[int, _Watched] = {}  # by id
        self._kept: dict[int, object] = {}  # as another object may get its id once it is gone
        self._later: set[int] = set()  # those that came in the place of another one
        self._gone: set[int] = set()  # those of them in whose place there is another one now
        for name, generator in zip(GLOBAL, _behind_the_globals(), strict=True):
            self._watch(name, generator)
        self.look_again(holders)

    def look_again(self, holders: Sequence[object]) -> bool:
        """Watch also generators that were made since, as at the first read; True if there are any."""
        before = len(self._watched)
        for path, found in _generators(holders):
            kind = f"(a {type(found).__module__.split('.')[0]}.{type(found).__name__})"
            self._watch(f"{path} {kind}", found)
            if (seeds := _seeds_of(found)) is not None:
                self._watch(f"{path}.bit_generator.seed_seq (a numpy.SeedSequence)", seeds)
        return len(self._watched) > before

    def _watch(self, name: str, found: Any) -> None:
        generator = getattr(found, "bit_generator", found)  # several numpy Generators may share one
        accessors = access(found)
        if id(generator) not in self._watched and accessors is not None:
            self._watched[id(generator)] = _Watched(name, *accessors, _look_at(found))
            self._kept[id(generator)] = generator

    def follow(self, before: Any, now: Any) -> None:
        """Watch also a generator that has come in the place of another one."""
        name = self._name_of(before)
        if name is None:
            return
        known = set(self._watched)
        self._watch(name, now)
        if (seeds := _seeds_of(now)) is not None:
            self._watch(f"{name}, its seed_seq", seeds)
        self._later |= self._watched.keys() - known
        self._gone |= self._later & _ids(before)
        self._gone -= _ids(now)

    def forget(self, held: Sequence[Any]) -> None:
        """Watch no more what came after the first in a place, and has gone: a sample may make its own.

        Args:
            held: what is in places now.
        """
        if not self._gone:
            return
        self._gone -= set[int]().union(*map(_ids, held))
        for gone in self._gone:
            del self._watched[gone], self._kept[gone]
        self._later -= self._gone
        self._gone.clear()

    def _name_of(self, generator: Any) -> str | None:
        watched = self._watched.get(id(getattr(generator, "bit_generator", generator)))
        return None if watched is None else watched.name

    def note(self) -> None:
        """From here on, :meth:`moved` compares with the present states, and :meth:`restore` restores them."""
        for watched in self._watched.values():
            watched.note()

    @property
    def any_moved(self) -> bool:
        """Whether a generator's state has changed since it was first seen or noted."""
        return any(watched.moved() for watched in self._watched.values())

    def moved(self) -> tuple[str, ...]:
        """Return a sentence for each generator whose state has changed since it was first seen or noted."""
        return tuple(f"{watched.name} moved" for watched in self._watched.values() if watched.moved())

    def states(self) -> dict[str, Any]:
        """The states of all generators as they are now, by name, for :meth:`put` in another process."""
        return {name: watched.get() for name, watched in self._named().items()}

    def noted(self) -> dict[str, Any]:
        """The states that :meth:`moved` compares with, of all generators by name."""
        return {name: watched.state for name, watched in self._named().items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Set the generators that these states name; a copy's generators have the original's names."""
        for name, watched in self._named().items():
            if name in states:
                watched.put(states[name])

    def _named(self) -> dict[str, _Watched]:
        # Two may be reached by the same path (two classes of one name): their order tells them apart.
        named: dict[str, _Watched] = {}
        for watched in self._watched.values():
            name, twin = watched.name, 2
            while name in named:
                name, twin = f"{watched.name} ({twin})", twin + 1
            named[name] = watched
        return named

    def restore(self) -> None:
        """Put every generator back to the state in which it was first seen, or noted."""
        for watched in self._watched.values():
            if watched.moved():  # to look takes a hundredth of what setting a Mersenne Twister's state takes
                watched.put(watched.state)

    def __enter__(self) -> Generators:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def _generators(holders: Sequence[object]) -> Iterator[tuple[str, object]]:
    """The generators that the holders reach, with their paths, but for those from which nothing is drawn."""
    kinds = loaded_class("albumentations.core.composition", "BaseCompose")
    for path, found in within_reach(holders, (*KINDS, *kinds)):
        if not issubclass(type(found), kinds):
            yield path, found
        elif not nothing_is_random(found):
            for inner, generator in within_reach([found], KINDS):
                yield path + inner.removeprefix(type(found).__qualname__), generator


def _behind_the_globals() -> tuple[Any, ...]:
    """The objects behind the modules' functions, in the order of :data:`GLOBAL`."""
    return random.random.__self__, np.random.rand.__self__, torch.default_generator  # type: ignore[attr-defined]


def _seeds_of(generator: Any) -> np.random.SeedSequence | None:
    """What a numpy generator seeds others from (``rng.spawn``): it counts them, and its state does not."""
    seeds = getattr(getattr(generator, "bit_generator", generator), "seed_seq", None)
    return seeds if isinstance(seeds, np.random.SeedSequence) else None


def _ids(generator: Any) -> set[int]:
    """By which a generator, and what it seeds others from, are known."""
    return {id(getattr(each, "bit_generator", each)) for each in (generator, _seeds_of(generator))} - {
        id(None)
    }


def _look_at(generator: Any) -> _Look | None:
    """A fast way to see whether a generator has moved: a function that reads its state's bytes.

    None for a generator other than torch's that is not a Mersenne Twister of the known layout.

    To return a Mersenne Twister's state, 624 numbers, takes numpy 40 microseconds and ``random`` 10, and
    several times as long once decoding a picture has filled the processor's cache. To read its memory takes
    one or two. torch's generators return their state fast enough.
    """
    if isinstance(generator, torch.Generator):
        return functools.partial(_bytes_of_torch, generator)
    if isinstance(generator, np.random.SeedSequence):
        return None
    return _look_at_random(generator) if isinstance(generator, random.Random) else _look_at_numpy(generator)


def _look_at_random(generator: random.Random) -> _Look | None:
    if type(generator).getstate is not random.Random.getstate or not _holds_its_state():
        return None
    memory = _memory(id(generator) + object.__basicsize__, _RANDOM_BYTES)

    def look() -> bytes | None:
        # gauss() draws two deviates and keeps the second here, where the memory does not show it.
        return memory.raw if generator.gauss_next is None else None  # type: ignore[attr-defined]

    return look


@functools.cache
def _holds_its_state() -> bool:
    """Whether the memory of a generator of ``random`` changes with its state, as seen with one of them."""
    tried = random.Random(1)
    memory, seen = _memory(id(tried) + object.__basicsize__, _RANDOM_BYTES), []
    for state in (tried.getstate(), random.Random(2).getstate(), tried.getstate()):
        tried.setstate(state)
        seen.append(memory.raw)
        tried.random()
        seen.append(memory.raw)
    return seen[:2] == seen[4:] and len(set(seen)) == 4


def _look_at_numpy(generator: Any) -> _Look | None:
    name = "bit_generator" if isinstance(generator, np.random.Generator) else "_bit_generator"
    bits = generator if isinstance(generator, np.random.BitGenerator) else getattr(generator, name, None)
    if type(bits) is not np.random.MT19937:
        return None
    memory = _memory(bits.ctypes.state_address, _MT19937_KEY + 4)
    state = bits.state["state"]
    expected = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    if memory.raw != expected:
        return None

    def look() -> bytes | None:
        if generator is not bits and getattr(generator, name) is not bits:
            return None  # the user has put another bit generator in its place
        return memory.raw

    return look


def _bytes_of_torch(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return _memory(state.data_ptr(), state.numel()).raw  # twice as fast as through numpy


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes at an address; the caller keeps the object alive that they belong to."""
    return (ctypes.c_char * size).from_address(address)


def _differ(one: Any, other: Any) -> bool:
    """Whether two states of one generator differ."""
    if isinstance(one, Mapping):
        return one.keys() != other.keys() or any(_differ(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() != other.tobytes())
    return bool(one != other)  # a state of ``random`` is a tuple of 625 numbers, compared in one go


def access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How to read and set a generator's state; None if the object is not a generator, or has no state."""
    if not issubclass(type(generator), KINDS) or isinstance(generator, random.SystemRandom):
        return None  # the system's entropy has no state: only outputs that differ show it
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, np.random.RandomState):
        return lambda: generator.get_state(legacy=False), generator.set_state
    if isinstance(generator, np.random.SeedSequence):
        # It cannot be set; but the state is what it can be made anew from.
        return lambda: generator.state, lambda state: np.random.SeedSequence.__init__(generator, **state)
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
