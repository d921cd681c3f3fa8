"""A trial runs one transform on real samples: it finds what structure cannot tell, and leaves no trace.

A trial can only *demote* (it uses :mod:`hotset.determinism.draws.probe`): it finds a generator that moves,
two outputs that differ, and state on the transform that changes with each call. A transform with a counter
that no output shows yet, or with a running mean, is another one after each call, so that its later outputs
are unknown. State that the first call builds, and that then stays, does not count.

The trial never copies the transform itself, because a copy's generator is not the one that moves. It copies
the *inputs* for each call, as a transform may work in place. Afterwards it restores the transform's state,
and that of the user's objects, classes and functions that it reaches: attributes, globals and names of
enclosing functions get their old values; lists, dicts, sets, arrays and tensors among them get their old
contents, one level deep. An iterator that has gone on (``itertools.count``) cannot be put back.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset._interrupts import own_errors
from hotset.determinism.aliasing import copied
from hotset.determinism.chain import applied
from hotset.determinism.draws.probe import probe
from hotset.determinism.draws.rng import Generators
from hotset.determinism.equality import content_digests
from hotset.determinism.objects.code_dependencies import loaded_globals
from hotset.determinism.objects.object_graph import attributes, held_objects, reached_by_code
from hotset.determinism.objects.safe_access import UNSET, attributes_of, content_of_cell
from hotset.determinism.timing import Timed

__all__ = ["Trial", "alters_input", "attempt", "output_and_seconds"]

_REPEATS = 16
_TIMING_SECONDS = 0.02
_FEW, _SECONDS_OF_FEW = 3, 0.2
_COPIED = (list, dict, set, np.ndarray, torch.Tensor)
_LARGE = 1 << 20  # bytes


@dataclass(frozen=True)
class Trial:
    """What a transform did with some samples.

    Attributes:
        outputs: its first output for each input.
        seconds: the typical time of a call.
        doubts: a sentence for each sign that its outputs vary.
    """

    outputs: list[Any]
    seconds: float
    doubts: tuple[str, ...]


def attempt(step: Callable[[Any], Any], inputs: Sequence[Any], seconds: float) -> Trial:
    """Apply a transform to each input several times, and watch it.

    Args:
        step: the transform.
        inputs: real samples, as they reach it; they are copied for each call.
        seconds: about how long this may take. Each input is tried at least 4 and at most 16 times.

    Raises:
        Exception: whatever the transform raises, unchanged; all state is put back in this case too.

    Example:
        >>> import random
        >>> attempt(lambda x: x + random.random(), [1.0], seconds=0.1).doubts[0]
        "random's global state moved"
    """
    timed = Timed(lambda value: applied(step, value))  # without the copying

    def call(i: int) -> Any:
        return timed(copied(inputs[i]))

    with _untouched([step]):
        first = probe(call, range(len(inputs)), (step,), repeats=2)
        settled = _digests(step)
        calls = int(seconds / max(first.seconds * len(inputs), 1e-6)) - 2
        # After an even number of passes the last call was for the first input, as after the first two: a
        # transform that only remembers its last input (MONAI's readers do) has the same state.
        again = probe(call, range(len(inputs)), (step,), repeats=2 * max(1, min(calls, _REPEATS - 2) // 2))
        changed = _change(settled, _digests(step))
    differs = [*first.differs, *again.differs][:1]
    moved = dict.fromkeys((*first.moved, *again.moved))
    outputs = tuple(f"its output differs from call to call ({text})" for text in differs)
    return Trial(first.samples, timed.seconds, (*moved, *outputs, *changed))


def output_and_seconds(step: Callable[..., Any], value: Any) -> tuple[Any, float]:
    """Return a transform's output for a value, and the typical time of a call; leaves no trace.

    The transform may be random. It is called for about twenty milliseconds, with other draws each time, and
    the first output is returned. There are three calls even if they take longer, up to 0.2 s: one of them may
    have waited for an import, or for the processor.

    Raises:
        Exception: whatever the transform raises, unchanged; all state is put back in this case too.
    """
    timed = Timed(lambda own: applied(step, own))
    with _untouched([step]), Generators([step]):
        made = timed(copied(value))
        while not _are_enough(timed.times):
            timed(copied(value))
        return made, timed.seconds


def _are_enough(times: list[float]) -> bool:
    bound = _TIMING_SECONDS if len(times) >= _FEW else _SECONDS_OF_FEW
    return len(times) >= _REPEATS or sum(times) >= bound


def alters_input(steps: Sequence[Callable[..., Any]], values: Sequence[Any]) -> bool:
    """Whether transforms, applied one after the other, change one of these inputs of the first in place.

    Leaves no trace. A value for which a transform raises does not count: that is reported elsewhere.

    Example:
        >>> alters_input([sorted], [[2, 1]]), alters_input([list.sort], [[1], [2, 1]])
        (False, True)
    """
    with _untouched(steps), Generators([steps]):
        return any(_alters(steps, copied(value)) for value in values)


def _alters(steps: Sequence[Callable[..., Any]], value: Any) -> bool:
    before = content_digests(value)
    made = value
    try:
        for step in steps:
            made = applied(step, made)
    except own_errors():
        return False
    return content_digests(value) != before


@contextlib.contextmanager
def _untouched(steps: Sequence[Any]) -> Iterator[None]:
    """Put back afterwards what transforms hold and reach."""
    reached = [
        _Names(owner, whole=owner is step)
        for step in steps
        for owner in {id(each): each for each in (*held_objects(step), *reached_by_code(step))}.values()
    ]
    try:
        yield
    finally:
        for each in reached:
            each.put_back()


def _digests(step: Any) -> dict[str, bytes]:
    return {} if not attributes(step) and attributes_of(step) is None else content_digests(step)


def _change(before: dict[str, bytes], now: dict[str, bytes]) -> tuple[str, ...]:
    """A sentence that names one attribute that has changed; empty if none has."""
    for place in before | now:
        if before.get(place) != now.get(place):
            return (f"it changes itself with each call (at {place or 'its own value'})",)
    return ()


class _Names:
    """The attributes of an object or class; the globals and enclosing names that a function reads.

    Args:
        owner: the object, class or function.
        whole: copy contents of any size; otherwise those that are not large.
    """

    def __init__(self, owner: Any, *, whole: bool) -> None:
        self._owner = owner
        self._values = _values(owner)
        self._contents: dict[Any, Any] = {}
        for name, value in self._values.items():
            with contextlib.suppress(Exception):  # of a stranger's code: it keeps what it holds
                if issubclass(type(value), _COPIED) and (whole or _size(value) <= _LARGE):
                    is_tensor = issubclass(type(value), torch.Tensor)
                    self._contents[name] = value.detach().clone() if is_tensor else copy.copy(value)

    def put_back(self) -> None:
        now = _values(self._owner)
        for name in set(now) - set(self._values):
            _set(self._owner, name)
        for name, value in self._values.items():
            if name not in now or now[name] is not value:
                _set(self._owner, name, value)
            if name in self._contents:
                _refill(value, self._contents[name])


def _values(owner: Any) -> dict[Any, Any]:
    """What an owner's names stand for. Of a function, a global's name is in a tuple, a cell has a number."""
    if issubclass(type(owner), type):
        return {name: value for name, value in vars(owner).items() if not name.startswith(("__", "_hotset"))}
    found: dict[Any, Any] = {**attributes(owner)}
    if issubclass(type(owner), types.FunctionType):
        read = {names[0] for names in loaded_globals(owner.__code__)}
        found.update({(name,): owner.__globals__[name] for name in read & owner.__globals__.keys()})
        cells = dict(enumerate(map(content_of_cell, owner.__closure__ or ())))
        found.update((number, content) for number, content in cells.items() if content is not UNSET)
    return found


def _set(owner: Any, name: Any, value: Any = UNSET) -> None:
    """Have a name stand for a value again, or for nothing."""
    if isinstance(name, int):
        owner, name = owner.__closure__[name], "cell_contents"
    if isinstance(name, tuple):
        names, (name,) = owner.__globals__, name
        names.pop(name) if value is UNSET else names.update({name: value})
    else:
        kind: Any = type if issubclass(type(owner), type) else object
        kind.__delattr__(owner, name) if value is UNSET else kind.__setattr__(owner, name, value)


def _size(value: Any) -> int:
    """The bytes of an array or tensor, about those of the references in another container."""
    return int(value.nbytes) if isinstance(value, (np.ndarray, torch.Tensor)) else 8 * len(value)


def _refill(value: Any, content: Any) -> None:
    """Give a container, array or tensor its old content again."""
    kind = type(value)
    if issubclass(kind, list):
        value[:] = content
    elif issubclass(kind, (dict, set)):
        value.clear()
        value.update(content)
    elif issubclass(kind, np.ndarray):
        np.copyto(value, content, casting="unsafe")
    elif not value.requires_grad:
        with torch.no_grad():
            value.copy_(content)
