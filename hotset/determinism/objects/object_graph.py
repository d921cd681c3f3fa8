"""The objects that an object reaches: through attributes, closures, defaults, base classes, globals.

A transform's generator, or a training step's optimizer, may be in an attribute, a list of augmenters, a
closure, a default argument, a base class, or a global that a method uses. The search is breadth first, so
that it finds near objects before it reaches its bounds. It reads attributes without running any code of the
object, and never copies.

:func:`attributes` reads one object from outside: its own ``__getattr__``, properties and ``__eq__`` do not
run. An object written in Python *is* its attributes: its ``__dict__`` and its slots. One with a base written
in C (``datetime``, ``Decimal``, a pyarrow table) also holds data that only that base can read.
:func:`~hotset.store.leaves.instances.solid_base` tells the two apart.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import math
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hotset.determinism.objects.code_dependencies import (
    imported_by,
    installed,
    is_users,
    loaded_globals,
    names_in,
    package_of,
    replaced_by_users,
)
from hotset.determinism.objects.memos import MEMO, kept_by
from hotset.determinism.objects.safe_access import UNSET, content_of_cell, is_opaque, shown, values_of
from hotset.store.leaves.instances import slots_of

__all__ = [
    "attributes",
    "held_functions",
    "held_objects",
    "loaded_by",
    "parts_of_chains",
    "reached_by_code",
    "within_reach",
]

Kinds = tuple[type, ...]

_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_NAMED = (type, types.FunctionType)
_CALLED = (types.MethodType, functools.partial, staticmethod, classmethod)
_OBJECTS = 50_000
_HELD = 1_000
_REACHED = 5_000
_DEPTH = 16
_OF_ONE_CONTAINER = 256
# From one logger all others of the process can be reached.
_LOGGERS = {logging.Logger, logging.RootLogger}
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, torch.Tensor, np.ndarray} | _LOGGERS
)
_BARE = _ATOMS - {torch.Tensor} - _LOGGERS  # objects of these have no attributes
# Classes of these hold none of the objects that are looked for, but for what users have put into them, and
# have thousands of attributes.
_LIBRARIES = sys.stdlib_module_names | {"PIL", "builtins", "datasets", "hotset", "numpy", "pyarrow", "torch"}


def within_reach(holders: Sequence[object], kinds: Kinds) -> Iterator[tuple[str, object]]:
    """Every object of these kinds that the holders reach, with the path to it, near ones first.

    Args:
        holders: where to begin; for a list or tuple, its elements.
        kinds: classes. The search does not continue into an object that it finds.

    Example:
        >>> import random
        >>> rng = random.Random(1)
        >>> def flip(image): return image[::-1] if rng.random() < 0.5 else image
        >>> [path for path, _ in within_reach([flip], (random.Random,))]
        ['flip -> rng']
    """
    seen: dict[int, object] = {}  # keeps the objects alive, as ids are reused
    for holder in parts_of_chains(holders):
        for path, node in _walk(holder, _OBJECTS, kinds, seen, _name(holder), deepest=_DEPTH):
            if issubclass(type(node), kinds):
                yield path, node


def parts_of_chains(holders: Iterable[object]) -> Iterator[Any]:
    """The holders, of a list or tuple its elements: a generator is named "Flip.rng", not "tuple[1].rng"."""
    for holder in holders:
        yield from holder if type(holder) in (list, tuple) else (holder,)  # type: ignore[misc]


def loaded_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function refers to: its closure, its defaults, and its globals without what is a library's own.

    Example:
        >>> scale = 2
        >>> def double(x): return x * scale
        >>> list(loaded_by(double))
        [2]
    """
    return (value for _, value in _of_function(function))


def held_objects(holder: object, kinds: Kinds = ()) -> Iterator[Any]:
    """The object itself, and those of the user's classes that it holds in attributes and containers.

    Near ones come first, a thousand at most. Those that only code reaches, through a closure or a global, are
    left out, and what hotset's own objects hold.

    Args:
        holder: where to begin.
        kinds: classes of libraries whose objects count as well.

    Example:
        >>> chain = types.SimpleNamespace(steps=[types.SimpleNamespace(calls=0)])
        >>> list(held_objects(chain, (types.SimpleNamespace,))) == [chain, *chain.steps]
        True
    """
    if issubclass(type(holder), _NAMED):
        return
    for _, node in _walk(holder, _HELD, hotsets=False, code=False):
        kind = type(node)
        if node is holder or issubclass(kind, kinds) or (not issubclass(kind, _CALLED) and is_users(node)):
            yield node


def held_functions(holder: object) -> Iterator[types.FunctionType]:
    """The user's functions that an object holds as :func:`held_objects` says, in methods and partials too."""
    for _, node in _walk(holder, _HELD, (types.FunctionType,), hotsets=False, code=False):
        if type(node) is types.FunctionType and is_users(node):
            yield node


def reached_by_code(holder: object) -> Iterator[Any]:
    """The user's functions, classes and objects that the holder reaches, also through code; near ones first.

    It looks at five thousand objects at most, and at none of hotset's.

    Example:
        >>> held = types.SimpleNamespace(calls=0)
        >>> list(reached_by_code(functools.partial(max, held)))
        [namespace(calls=0)]
    """
    for _, node in _walk(holder, _REACHED, hotsets=False):
        kind = type(node)
        if issubclass(kind, _NAMESPACES) or (not issubclass(kind, _CALLED) and is_users(node)):
            yield node


def _walk(
    holder: Any,
    most: int,
    kinds: Kinds = (),
    seen: dict[int, object] | None = None,
    name: str = "",
    *,
    deepest: float = math.inf,
    hotsets: bool = True,
    code: bool = True,
) -> Iterator[tuple[str, Any]]:
    """The holder and all that it reaches but atoms and modules, near ones first, each with the path to it.

    Args:
        holder: where to begin.
        most: how many objects to look at.
        kinds: of the objects that are searched for: the walk does not continue into one.
        seen: what was looked at already, by id.
        name: of the holder, with which the paths begin.
        deepest: how far from the holder it goes.
        hotsets: whether to hotset's own objects, too; to the holder in any case.
        code: whether to functions and classes of other kinds, too.
    """
    seen = {} if seen is None else seen
    queue: deque[tuple[str, Any, int]] = deque([(name, holder, 0)])
    bound = len(seen) + most
    passed_over = {id(kind) for kind in _ATOMS if not issubclass(kind, kinds)}
    while queue and len(seen) < bound:
        path, node, depth = queue.popleft()
        if id(node) in seen or is_opaque(node):
            continue
        kind = type(node)
        found = issubclass(kind, kinds)
        if not found and (kind in _ATOMS or issubclass(kind, types.ModuleType)):
            continue
        if depth and not hotsets and package_of(node if issubclass(kind, _NAMED) else kind) == "hotset":
            continue
        seen[id(node)] = node
        if depth and issubclass(kind, type):
            # Attributes of a class are named after it: an instance may have one of that name as well.
            path = node.__qualname__
        yield path, node
        if depth < deepest and not found:
            for label, child in _reachable(node, kinds):
                if id(type(child)) in passed_over or id(child) in seen:  # as most are; a path costs time
                    continue
                if code or not issubclass(type(child), _NAMED) or issubclass(type(child), kinds):
                    queue.append((path + label, child, depth + 1))


def _name(holder: Any) -> str:
    if issubclass(type(holder), types.MethodType):
        return _name(holder.__self__)
    return str(holder.__qualname__ if issubclass(type(holder), _NAMED) else type(holder).__qualname__)


def _reachable(node: Any, kinds: Kinds) -> Iterator[tuple[str, Any]]:
    """The objects that one object refers to, each with its part of the path.

    Asks ``type(node)`` throughout: ``isinstance`` would read the object's own ``__class__`` too.
    """
    kind = type(node)
    if issubclass(kind, type):
        yield from _of_class(node)
        return
    if type(kind) is type and kind in _CONTAINERS:  # a built-in one, which has nothing else
        yield from _of_container(node, kinds)
        return
    if package_of(kind) == "numba" and "__wrapped__" in (held := attributes(node)):
        # A compiled function holds the compiler, with tens of thousands of objects.
        yield "", held["__wrapped__"]
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
        yield from _of_container(node, kinds)
    elif kind is MEMO and kinds:
        yield from (("()", each) for each in kept_by(node, _OF_ONE_CONTAINER))
    for name, value in attributes(node).items():
        yield f".{name}", value
    for cls in kind.__mro__:
        yield "", cls


def _of_class(cls: type) -> Iterator[tuple[str, Any]]:
    held = replaced_by_users(vars(cls)) if package_of(cls) in _LIBRARIES else list(vars(cls).items())
    for name, value in held:
        yield f".{name}", value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if (content := content_of_cell(cell)) is not UNSET:
            yield f".{name}", content
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from ((f"({name}=)", value) for name, value in zip(positional[::-1], defaults[::-1], strict=False))
    yield from ((f"({name}=)", value) for name, value in (function.__kwdefaults__ or {}).items())
    for name, *names in loaded_globals(code):
        value, label = function.__globals__.get(name), f" -> {name}"
        while names and isinstance(value, types.ModuleType) and _is_searched(value):
            label += f".{names[0]}"
            value = vars(value).get(names.pop(0))
        if _may_hold(value, function):
            yield label, value
    for imported in imported_by(function):
        module = sys.modules.get(imported)
        if isinstance(module, types.ModuleType) and installed(imported) is None:
            for name in sorted(names_in(code) & vars(module).keys()):
                if _may_hold(vars(module)[name], function):
                    yield f" -> {imported}.{name}", vars(module)[name]


def _is_searched(module: types.ModuleType) -> bool:
    return str(module.__name__).partition(".")[0] not in _LIBRARIES


def _may_hold(value: Any, function: types.FunctionType) -> bool:
    """Whether the search goes on into this global of a function.

    Into every object: a library's transform that has a name in the user's module has state of the user's. Of
    functions and classes, only into those of the function's own module and the user's other ones, and into
    those that a library made for the user, which keep his objects in their closure.
    """
    if not issubclass(type(value), (*_NAMED, types.ModuleType)):
        return True
    if issubclass(type(value), types.ModuleType) or is_opaque(value):
        return False
    if str(value.__module__) == function.__module__ or is_users(value):
        return True
    made = issubclass(type(value), types.FunctionType) and value.__closure__ is not None
    return made and package_of(value) not in _LIBRARIES


def _of_container(node: Any, kinds: Kinds) -> Iterator[tuple[str, Any]]:
    """A container's elements; of a large one, evenly spread ones. A list of a million paths is skipped.

    They are read by the methods of the built-in type, as those of a subclass may compute what they return.
    """
    base = next(base for base in _CONTAINERS if issubclass(type(node), base))
    try:
        held = set(map(type, values_of(node)))
    except Exception:  # of a class that has no hash
        held = {object}
    if held <= _ATOMS and not any(issubclass(kind, kinds) for kind in held):
        return
    labelled = base.items(node) if base is dict else enumerate(base.__iter__(node))
    step = max(1, base.__len__(node) // _OF_ONE_CONTAINER)
    for number, (label, value) in enumerate(itertools.islice(labelled, 0, None, step)):
        # An optimizer keeps its state by tensors, whose text waits for the device.
        text = f"{type(label).__name__} {number}" if issubclass(type(label), torch.Tensor) else shown(label)
        yield f"[{text}]", value


# ---- one object ------------------------------------------------------------------------------------------


def attributes(obj: object) -> dict[str, Any]:
    """Return the instance attributes of ``obj`` by name, also those in slots; unset slots are left out.

    The dict is new, its values are the object's own; it is empty if ``obj`` has no attributes. What hotset
    keeps in the user's objects, or for them, is left out: attributes whose names begin with ``_hotset``.

    They are the object's own, and of a class what the class holds. For a weak proxy there are none, whereas
    :func:`~hotset.determinism.objects.safe_access.attributes_of` returns those of what it stands for.

    Example:
        >>> attributes(types.SimpleNamespace(size=3))
        {'size': 3}
    """
    found: dict[str, Any] = {}
    if is_opaque(obj) or type(obj) in _BARE:
        return found
    for name, slot in slots_of(obj).items():
        with contextlib.suppress(AttributeError, TypeError):  # it is unset, or of another class
            found[name] = slot.__get__(obj)
    with contextlib.suppress(Exception):  # it has only slots, or no attributes, or hides them
        # Of a threading.local, those of this thread: only its class tells them.
        of_thread = issubclass(type(obj), threading.local)
        found.update(vars(obj) if of_thread else object.__getattribute__(obj, "__dict__"))
    return {name: value for name, value in found.items() if not str(name).startswith("_hotset")}
