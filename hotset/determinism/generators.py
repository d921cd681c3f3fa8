"""Random number generators: the global ones, and those held anywhere on an object; watched and put back.

Caching freezes what a generator would have drawn, so before anything is cached, samples are read under watch:
a generator whose state moved is the surest sign of randomness, surer than outputs that differ (a flip with
p=0.5 gives two equal outputs every other time). The global generators are three. The others hang somewhere on
the data set: on an attribute, in a list of augmenters, in a closure, as a default argument, on a base class,
or in the module that its methods look into.

The search goes breadth first, so that what is near is found before the bounds are reached, and looks at
attributes without running any code of the object. It never copies: a copy's generator moves, the original's
does not, and a probe of the copy would call it deterministic.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset.determinism.code import loaded_globals
from hotset.determinism.equality import same
from hotset.determinism.objects import attributes

__all__ = ["Generators", "access"]

_KINDS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_NAMED = (type, types.FunctionType)
_OBJECTS = 50_000
_DEPTH = 16
_OF_ONE_CONTAINER = 256
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, torch.Tensor, np.ndarray})
# Their classes hold no generator, and have thousands of attributes.
_LIBRARIES = sys.stdlib_module_names | {"builtins", "numpy", "torch"}


@dataclass(frozen=True)
class _Watched:
    """One generator: what to call it, and how to read and set its state."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    state: Any

    @classmethod
    def of(cls, name: str, get: Callable[[], Any], set: Callable[[Any], object]) -> _Watched:
        return cls(name, get, set, get())

    def moved(self) -> bool:
        now = self.get()
        if isinstance(now, tuple):  # random's: 625 plain numbers, which need not be looked at one by one
            return bool(now != self.state)
        return same(self.state, now) is not None


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
        for number, (module, get, put) in enumerate(_global_generators()):
            # Numbers below zero are nobody's id.
            self._watched[-1 - number] = _Watched.of(f"{module}'s global state", get, put)
        self._global = {id(generator) for generator in _behind_the_globals()}
        self.look_again(holders)

    def look_again(self, holders: Sequence[object]) -> None:
        """Watch also those that came into being since, a generator made at the first read say."""
        for path, found in _held(holders):
            generator = getattr(found, "bit_generator", found)  # several numpy Generators may share one
            if id(generator) in self._watched or id(found) in self._global:
                continue
            accessors = access(found)
            if accessors is not None:
                kind = f"{type(found).__module__.split('.')[0]}.{type(found).__name__}"
                self._watched[id(generator)] = _Watched.of(f"{path} (a {kind})", *accessors)
                self._kept.append(generator)  # an id is only a name while its object lives

    def moved(self) -> tuple[str, ...]:
        """Return a sentence for each generator whose state is another than when it was first seen."""
        return tuple(f"{watched.name} moved" for watched in self._watched.values() if watched.moved())

    def states(self) -> dict[str, Any]:
        """The states of all generators as they are now, by name, for :meth:`put` in another process."""
        return {name: watched.get() for name, watched in self._named().items()}

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
        """Put every generator back to the state in which it was first seen."""
        for watched in self._watched.values():
            watched.set(watched.state)


def _global_generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    yield "random", random.getstate, random.setstate
    yield "numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state
    yield "torch", torch.get_rng_state, torch.set_rng_state


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


def _held(holders: Sequence[object]) -> Iterator[tuple[str, object]]:
    """Every generator within reach of the holders, with the path that leads to it, from the first of them."""
    seen: dict[int, object] = {}  # and kept, as an id is only a name while its object lives
    # A chain given as one holder is named after its parts: "Flip.rng", not "tuple[1].rng".
    chains: Iterator[Any] = (holder if type(holder) in (list, tuple) else (holder,) for holder in holders)
    for holder in itertools.chain.from_iterable(chains):
        queue: deque[tuple[str, Any, int]] = deque([(_name(holder), holder, 0)])
        bound = len(seen) + _OBJECTS
        while queue and len(seen) < bound:
            path, node, depth = queue.popleft()
            if type(node) in _ATOMS or id(node) in seen:
                continue
            seen[id(node)] = node
            if issubclass(type(node), _KINDS):
                yield path, node
            elif depth < _DEPTH:
                for label, child in _reachable(node):
                    # What hangs on a class is named after it: an instance may have one of that name as well.
                    here = child.__qualname__ if issubclass(type(child), type) else path + label
                    queue.append((here, child, depth + 1))


def _name(holder: Any) -> str:
    if issubclass(type(holder), types.MethodType):
        return _name(holder.__self__)
    return str(holder.__qualname__ if issubclass(type(holder), _NAMED) else type(holder).__qualname__)


def _reachable(node: Any) -> Iterator[tuple[str, Any]]:
    """What hangs on one object, each with what leads to it in the path.

    Asks ``type(node)`` throughout: ``isinstance`` would read the object's own ``__class__`` too.
    """
    kind = type(node)
    if issubclass(kind, types.ModuleType):
        return
    if issubclass(kind, type):
        yield from _of_class(node)
        return
    if issubclass(kind, types.FunctionType):
        yield from _of_function(node)
    elif issubclass(kind, types.MethodType):
        yield from (("", node.__self__), ("", node.__func__))
    elif issubclass(kind, (types.BuiltinMethodType, types.MethodWrapperType)):
        yield ".__self__", node.__self__
    elif issubclass(kind, functools.partial):
        yield from ((".func", node.func), (".args", node.args), (".keywords", node.keywords))
    elif issubclass(kind, (staticmethod, classmethod)):
        yield "", node.__func__
    elif issubclass(kind, property):
        yield from (("", accessor) for accessor in (node.fget, node.fset) if accessor)
    elif issubclass(kind, _CONTAINERS):
        yield from _of_container(node)
    for name, value in attributes(node).items():
        yield f".{name}", value
    for cls in kind.__mro__:
        yield "", cls


def _of_class(cls: type) -> Iterator[tuple[str, Any]]:
    if cls.__module__.split(".")[0] not in _LIBRARIES:
        for name, value in list(vars(cls).items()):
            yield f".{name}", value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # a cell that nothing was put into yet
            continue
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from ((f"({name}=)", value) for name, value in zip(positional[::-1], defaults[::-1], strict=False))
    yield from ((f"({name}=)", value) for name, value in (function.__kwdefaults__ or {}).items())
    for name, *_ in loaded_globals(code):
        value = function.__globals__.get(name)
        module = value.__module__ if issubclass(type(value), _NAMED) else type(value).__module__
        # Of a module's globals, what draws or may hold it, and what is of the same module: the rest of the
        # world is libraries.
        if issubclass(type(value), (*_KINDS, *_CONTAINERS)) or module == function.__module__:
            yield f" -> {name}", value


def _of_container(node: Any) -> Iterator[tuple[str, Any]]:
    """Its elements; of a large one, evenly spread ones. A list of a million paths is passed by at once.

    Read by the container's own methods, as those of a subclass may compute what they return.
    """
    base = next(base for base in _CONTAINERS if issubclass(type(node), base))
    if set(map(type, base.values(node) if base is dict else base.__iter__(node))) <= _ATOMS:
        return
    labelled = base.items(node) if base is dict else enumerate(base.__iter__(node))
    step = max(1, base.__len__(node) // _OF_ONE_CONTAINER)
    for label, value in itertools.islice(labelled, 0, None, step):
        yield f"[{label!r}]", value
