"""A trial runs one transform on real samples: it finds what structure cannot tell, and leaves no trace.

A trial can only *demote* (it uses :mod:`hotset.determinism.draws.probe`): it finds a generator that moves,
two outputs that differ, and state on the transform that changes with each call. A transform with a counter
that no output shows yet, or with a running mean, is another one after each call, so that its later outputs
are unknown. State that the first call builds, and that then stays, does not count.

The trial never copies the transform itself, because a copy's generator is not the one that moves. It copies
the *inputs* for each call, as a transform may work in place. Afterwards it restores the transform's state,
and that of the user's objects, classes and functions that it reaches: attributes, globals and names of
enclosing functions get their old values; lists, dicts, sets, arrays and tensors among them get their old
contents, as far as there is room. An iterator that has gone on (``itertools.count``) cannot be put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hotset._interrupts import own_errors
from hotset.determinism.aliasing import copied
from hotset.determinism.chain import applied
from hotset.determinism.draws.probe import probe
from hotset.determinism.draws.rng import Generators
from hotset.determinism.equality import changed_place, content_digests
from hotset.determinism.objects.held_values import Room
from hotset.determinism.objects.names import Names
from hotset.determinism.objects.object_graph import held_objects, reached_by_code
from hotset.determinism.objects.thread_names import named_by_threads
from hotset.determinism.timing import Timed

__all__ = ["Trial", "alters_input", "attempt", "output_and_seconds"]

_REPEATS = 16
_TIMING_SECONDS = 0.02
_FEW, _SECONDS_OF_FEW = 3, 0.2


@dataclass(frozen=True)
class Trial:
    """What a transform did with some samples.

    Attributes:
        outputs: its first output for each input.
        seconds: the typical time of a call.
        doubts: a sentence for each sign that its outputs vary; and one if it only draws.
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
        settled = content_digests(step)
        calls = int(seconds / max(first.seconds * len(inputs), 1e-6)) - 2
        # After an even number of passes the last call was for the first input, as after the first two: a
        # transform that only remembers its last input (MONAI's readers do) has the same state.
        again = probe(call, range(len(inputs)), (step,), repeats=2 * max(1, min(calls, _REPEATS - 2) // 2))
        place = changed_place(settled, content_digests(step))
    differs = [*first.differs, *again.differs][:1]
    moved = dict.fromkeys((*first.moved, *again.moved))
    outputs = tuple(f"its output differs from call to call ({text})" for text in differs)
    changed = () if place is None else (f"it changes itself with each call (at {place or 'its own value'})",)
    # Then it may draw a number that it does not use, as a resize to one size of one does: the user can tell.
    alike = ("its outputs were alike",) if moved and not differs else ()
    return Trial(first.samples, timed.seconds, (*moved, *outputs, *alike, *changed))


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
    kept = [
        Names(owner, Room.of_one() if owner is step else Room.outside(), code=True, shared=owner is step)
        for step in steps
        for owner in {id(each): each for each in (*held_objects(step), *reached_by_code(step))}.values()
    ]
    threads = named_by_threads()
    try:
        yield
    finally:
        threads |= named_by_threads()
        for each in kept:
            each.put_back(threads)
