"""A trial runs one transform on real samples: it finds what structure cannot tell, and leaves no trace.

A trial can only *demote* (it uses :mod:`hotset.determinism.probe`): it finds a generator that moves, two
outputs that differ, and state on the transform that changes with each call. A transform with a counter that
no output shows yet, or with a running mean, is another one after each call, so that its later outputs are
unknown. State that the first call builds, and that then stays, does not count.

The trial never copies the transform itself, because a copy's generator is not the one that moves. It copies
the *inputs* for each call, as a transform may work in place. Afterwards it restores the transform's state,
and that of the objects of the user's classes that it holds: attributes get their old values; lists, dicts,
sets, arrays and tensors among them get their old contents, one level deep.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset.determinism.aliasing import copied
from hotset.determinism.chain import applied
from hotset.determinism.equality import content_digests
from hotset.determinism.object_graph import attributes, held_objects
from hotset.determinism.outside import dict_of
from hotset.determinism.probe import probe
from hotset.determinism.rng import Generators
from hotset.determinism.timing import Timed

__all__ = ["Trial", "alters_input", "attempt", "output_and_seconds"]

_REPEATS = 16
_TIMING_SECONDS = 0.02
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
    before = _State(step)

    def call(i: int) -> Any:
        return timed(copied(inputs[i]))

    try:
        first = probe(call, range(len(inputs)), (step,), repeats=2)
        settled = _State(step)
        calls = int(seconds / max(first.seconds * len(inputs), 1e-6)) - 2
        # After an even number of passes the last call was for the first input, as after the first two: a
        # transform that only remembers its last input (MONAI's readers do) has the same state.
        again = probe(call, range(len(inputs)), (step,), repeats=2 * max(1, min(calls, _REPEATS - 2) // 2))
        changed = settled.changed()
    finally:
        before.put_back()
    differs = [*first.differs, *again.differs][:1]
    moved = dict.fromkeys((*first.moved, *again.moved))
    outputs = tuple(f"its output differs from call to call ({text})" for text in differs)
    return Trial(first.samples, timed.seconds, (*moved, *outputs, *changed))


def output_and_seconds(step: Callable[..., Any], value: Any) -> tuple[Any, float]:
    """Return a transform's output for a value, and the typical time of a call; leaves no trace.

    The transform may be random. It is called for about twenty milliseconds, with other draws each time, and
    the first output is returned.

    Raises:
        Exception: whatever the transform raises, unchanged; all state is put back in this case too.
    """
    before, generators = _State(step), Generators([step])
    timed = Timed(lambda own: applied(step, own))
    try:
        made = timed(copied(value))
        while len(timed.times) < _REPEATS and sum(timed.times) < _TIMING_SECONDS:
            timed(copied(value))
        return made, timed.seconds
    finally:
        generators.restore()
        before.put_back()


def alters_input(steps: Sequence[Callable[..., Any]], value: Any) -> bool:
    """Whether transforms, applied one after the other, change the input of the first in place.

    Leaves no trace. Returns False if a transform raises: that is reported elsewhere.

    Example:
        >>> alters_input([sorted], [2, 1]), alters_input([list.sort], [2, 1])
        (False, True)
    """
    own = copied(value)
    before, states, generators = content_digests(own), [_State(step) for step in steps], Generators([steps])
    try:
        made = own
        for step in steps:
            made = applied(step, made)
    except Exception:
        return False
    finally:
        generators.restore()
        for state in states:
            state.put_back()
    return content_digests(own) != before


class _State:
    """The attributes of a transform and of the objects that it holds, to be compared and restored."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self._values = attributes(step)
        self._held = [_Attributes(owner, whole=owner is step) for owner in held_objects(step)]
        self._digests = self._look()

    def _look(self) -> dict[str, bytes]:
        return {} if not self._values and dict_of(self._step) is None else content_digests(self._step)

    def changed(self) -> tuple[str, ...]:
        """A sentence that names one attribute that has changed since; empty if none has."""
        now = self._look()
        for place in self._digests | now:
            if self._digests.get(place) != now.get(place):
                return (f"it changes itself with each call (at {place or 'its own value'})",)
        return ()

    def put_back(self) -> None:
        for held in self._held:
            held.put_back()


class _Attributes:
    """The attributes of one object.

    Args:
        owner: the object.
        whole: copy contents of any size; otherwise those that are not large.
    """

    def __init__(self, owner: Any, *, whole: bool) -> None:
        self._owner = owner
        self._values = attributes(owner)
        self._contents: dict[str, Any] = {}
        for name, value in self._values.items():
            with contextlib.suppress(Exception):  # of a stranger's code: it keeps what it holds
                if issubclass(type(value), _COPIED) and (whole or _size(value) <= _LARGE):
                    is_tensor = issubclass(type(value), torch.Tensor)
                    self._contents[name] = value.detach().clone() if is_tensor else copy.copy(value)

    def put_back(self) -> None:
        now = attributes(self._owner)
        for name in set(now) - set(self._values):
            object.__delattr__(self._owner, name)
        for name, value in self._values.items():
            if now.get(name) is not value:
                object.__setattr__(self._owner, name, value)
            if name in self._contents:
                _refill(value, self._contents[name])


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
