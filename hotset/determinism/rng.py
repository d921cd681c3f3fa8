"""Random number generators: the global ones, and those held anywhere on an object; watched and put back.

Caching freezes what a generator would have drawn, so before anything is cached, samples are read under watch:
a generator whose state moved is the surest sign of randomness, surer than outputs that differ (a flip with
p=0.5 gives two equal outputs every other time). The global generators are three. The others hang somewhere on
the dataset: on an attribute, in a list of augmenters, in a closure, as a default argument, on a base class,
or in the module that its methods look into.

They are found by :mod:`hotset.determinism.object_graph`, which never copies: a copy's generator moves, the
original's does not, and a probe of the copy would call it deterministic.
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

from hotset.determinism.object_graph import within_reach

__all__ = ["GLOBAL", "Generators", "access"]

_KINDS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)

_Look = Callable[[], bytes | None]


class _Watched:
    """One generator: what to call it, how to read and set its state, and the state that it is compared with.

    Args:
        name: of it, for people.
        get, set: read and set its state.
        look: returns bytes that change whenever the state does, at less cost; None if there is no such thing.
    """

    def __init__(
        self, name: str, get: Callable[[], Any], set: Callable[[Any], object], look: _Look | None = None
    ) -> None:
        self.name, self.get, self.set, self._look = name, get, set, look
        self._take()

    def note(self) -> None:
        """Compare with the state as it is now from here on."""
        if self.moved():
            self._take()

    def _take(self) -> None:
        self.state = self.get()
        # Of two normal deviates that numpy draws together the second lies beside what is looked at.
        beside = isinstance(self.state, dict) and self.state.get("has_gauss")
        self._looked = self._look() if self._look is not None and not beside else None

    def moved(self) -> bool:
        if self._look is not None and self._looked is not None and (looked := self._look()) is not None:
            return looked != self._looked
        return _differ(self.state, self.get())


class Generators:
    """The states of the global generators and of all that ``holders`` hold, as they are now.

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
        self._watched: dict[int, _Watched] = {}
        self._kept: list[object] = []
        for number, (module, get, put, look) in enumerate(_global_generators()):
            # Numbers below zero are nobody's id.
            self._watched[-1 - number] = _Watched(_global_name(module), get, put, look)
        self._global = {id(generator) for generator in _behind_the_globals()}
        self.look_again(holders)

    def look_again(self, holders: Sequence[object]) -> bool:
        """Watch also those that came into being since, a generator made at the first read say; any found?"""
        before = len(self._watched)
        for path, found in within_reach(holders, _KINDS):
            generator = getattr(found, "bit_generator", found)  # several numpy Generators may share one
            if id(generator) in self._watched or id(found) in self._global:
                continue
            accessors = access(found)
            if accessors is not None:
                kind = f"{type(found).__module__.split('.')[0]}.{type(found).__name__}"
                self._watched[id(generator)] = _Watched(f"{path} (a {kind})", *accessors, _look_at(found))
                self._kept.append(generator)  # an id is only a name while its object lives
        return len(self._watched) > before

    def note(self) -> None:
        """Take the states as they are now for those that :meth:`moved` and :meth:`restore` go by."""
        for watched in self._watched.values():
            watched.note()

    @property
    def any_moved(self) -> bool:
        """Whether :meth:`moved` has anything to say."""
        return any(watched.moved() for watched in self._watched.values())

    def moved(self) -> tuple[str, ...]:
        """Return a sentence for each generator whose state is another than when it was seen or noted."""
        return tuple(f"{watched.name} moved" for watched in self._watched.values() if watched.moved())

    def states(self) -> dict[str, Any]:
        """The states of all generators as they are now, by name, for :meth:`put` in another process."""
        return {name: watched.get() for name, watched in self._named().items()}

    def noted(self) -> dict[str, Any]:
        """The states that :meth:`moved` goes by, of all generators by name."""
        return {name: watched.state for name, watched in self._named().items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Set the generators that have one of these names; objects of the same make have the same names."""
        for name, watched in self._named().items():
            if name in states:
                watched.set(states[name])

    def _named(self) -> dict[str, _Watched]:
        # Two that are reached by one path (the same name on two classes) are told apart by their order.
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
            watched.set(watched.state)


def _global_name(module: str) -> str:
    return f"{module}'s global state"


def _global_generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object], _Look | None]]:
    inner = _look_at(random.random.__self__)  # type: ignore[attr-defined]
    yield "random", random.getstate, random.setstate, inner
    behind = _look_at(np.random.rand.__self__)  # type: ignore[attr-defined]
    yield "numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state, behind
    yield "torch", torch.get_rng_state, torch.set_rng_state, _look_at(torch.default_generator)


_MT19937_KEY = 624 * 4


def _look_at(generator: Any) -> _Look | None:
    """Read the memory of a Mersenne Twister; None for what is another, or is laid out otherwise.

    To ask for the state, 624 numbers, takes numpy forty microseconds and `random` ten, several times as much
    once decoding a picture has filled the processor's cache; and this one or two. torch's answers at once.
    """
    if isinstance(generator, torch.Generator):
        return functools.partial(_bytes_of_torch, generator)
    return _look_at_random(generator) if isinstance(generator, random.Random) else _look_at_numpy(generator)


def _look_at_random(generator: random.Random) -> _Look | None:
    if type(generator).getstate is not random.Random.getstate or not _holds_its_state():
        return None
    memory = _memory(id(generator) + object.__basicsize__, _RANDOM_BYTES)

    def look() -> bytes | None:
        # The second of two normal deviates is kept apart.
        return memory.raw if generator.gauss_next is None else None  # type: ignore[attr-defined]

    return look


_RANDOM_BYTES = _random.Random.__basicsize__ - object.__basicsize__


@functools.cache
def _holds_its_state() -> bool:
    """Whether the memory of one of `random`'s generators follows its state; tried on one."""
    tried = random.Random(1)
    memory, seen = _memory(id(tried) + object.__basicsize__, _RANDOM_BYTES), []
    for state in (tried.getstate(), random.Random(2).getstate(), tried.getstate()):
        tried.setstate(state)
        seen.append(memory.raw)
        tried.random()
        seen.append(memory.raw)
    return seen[:2] == seen[4:] and len(set(seen)) == 4


def _look_at_numpy(generator: Any) -> _Look | None:
    holds = "bit_generator" if isinstance(generator, np.random.Generator) else "_bit_generator"
    bits = generator if isinstance(generator, np.random.BitGenerator) else getattr(generator, holds, None)
    if type(bits) is not np.random.MT19937:
        return None
    memory = _memory(bits.ctypes.state_address, _MT19937_KEY + 4)
    state = bits.state["state"]
    there = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    if memory.raw != there:
        return None

    def look() -> bytes | None:
        if generator is not bits and getattr(generator, holds) is not bits:
            return None  # numpy lets a user put another one in its place
        return memory.raw

    return look


def _bytes_of_torch(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return _memory(state.data_ptr(), state.numel()).raw  # half of what it takes by way of numpy


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """So many bytes there; whoever looks keeps what they belong to."""
    return (ctypes.c_char * size).from_address(address)


def _differ(one: Any, other: Any) -> bool:
    """Whether two states of one generator differ."""
    if isinstance(one, Mapping):
        return one.keys() != other.keys() or any(_differ(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() != other.tobytes())
    return bool(one != other)  # random's are 625 plain numbers, which need not be looked at one by one


GLOBAL = tuple(_global_name(module) for module in ("random", "numpy.random", "torch"))
"""The names of the global generators among :meth:`Generators.states`."""


def _behind_the_globals() -> Iterator[object]:
    """The objects behind the module functions, which an attribute may hold as well."""
    yield from (random.random.__self__, torch.default_generator)  # type: ignore[attr-defined]
    yield from (np.random.rand.__self__, np.random.random.__self__)  # type: ignore[attr-defined]


def access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How to read and set its state; None for what is no generator, or has no state."""
    if not issubclass(type(generator), _KINDS) or isinstance(generator, random.SystemRandom):
        return None  # the system's entropy has none: only differing outputs show it
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, np.random.RandomState):
        return lambda: generator.get_state(legacy=False), generator.set_state
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
