"""A trial runs one transform on real samples: it finds what structure cannot tell, and leaves no trace.

A trial can only *demote* (it uses :mod:`hotset.determinism.probe`): it finds a generator that moves, two
outputs that differ, and state on the transform that changes with each call. A transform with a counter that
no output shows yet, or with a running mean, is another one after each call, so that its later outputs are
unknown. State that the first call builds, and that then stays, does not count.

The transform itself is never copied, because a copy's generator is not the one that moves. Its *inputs* are
copied for each call, as a transform may work in place. Its state is restored after the trial: attributes get
their old values; lists, dicts, sets, arrays and tensors among them get their old contents, one level deep.

:class:`Timed` times all calls. The first call may import a library, another may wait for the disk or the
processor, and one such call among few would decide the mean. So the lowest and the highest quarter are left
out. The rest is averaged: a median would be wrong for a transform that works on every other sample only, and
so takes one of two times.

What a transform returns for a batch must be what it returns for each sample alone, or it cannot be cached
sample by sample: :func:`try_together` and :func:`mixed_rows` compare the two.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset.determinism.aliasing import copied
from hotset.determinism.batch_transform import BatchTransform
from hotset.determinism.batched import Batched, same_but_for_rounding
from hotset.determinism.chain import applied
from hotset.determinism.declare import declared
from hotset.determinism.equality import changeable, same
from hotset.determinism.object_graph import attributes
from hotset.determinism.probe import probe
from hotset.determinism.rng import Generators
from hotset.errors import NotCacheable

__all__ = ["Timed", "Trial", "alters", "attempt", "mixed_rows", "once", "try_together", "typical"]

_REPEATS = 16
_ONCE_SECONDS = 0.02
_COPIED = (list, dict, set, np.ndarray, torch.Tensor)


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

    before = _State(step)
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


def once(step: Callable[..., Any], value: Any) -> tuple[Any, float]:
    """Return a transform's output for a value, and the typical time of a call; leaves no trace.

    The transform may be random. It is called for about twenty milliseconds, with other draws each time; the
    first output is returned.

    Raises:
        Exception: whatever the transform raises, unchanged; all state is put back in this case too.
    """
    before, generators = _State(step), Generators([step])
    timed = Timed(lambda own: applied(step, own))
    try:
        made = timed(copied(value))
        while len(timed.times) < _REPEATS and sum(timed.times) < _ONCE_SECONDS:
            timed(copied(value))
        return made, timed.seconds
    finally:
        generators.restore()
        before.put_back()


def alters(steps: Sequence[Callable[..., Any]], value: Any) -> bool:
    """Whether transforms, applied one after the other, change the input of the first in place.

    Leaves no trace. Returns False if a transform raises: that is reported elsewhere.

    Example:
        >>> alters([sorted], [2, 1]), alters([list.sort], [2, 1])
        (False, True)
    """
    own = copied(value)
    before, states, generators = changeable(own), [_State(step) for step in steps], Generators([steps])
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
    return changeable(own) != before


class _State:
    """The attributes of a transform, to be compared and restored."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self._values = attributes(step)
        self._contents = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for name, value in self._values.items()
            if isinstance(value, _COPIED)
        }
        self._digests = self._look()

    def _look(self) -> dict[str, bytes]:
        return {} if not self._values and not hasattr(self._step, "__dict__") else changeable(self._step)

    def changed(self) -> tuple[str, ...]:
        """A sentence that names one attribute that has changed since; empty if none has."""
        now = self._look()
        for place in self._digests | now:
            if self._digests.get(place) != now.get(place):
                return (f"it changes itself with each call (at {place or 'its own value'})",)
        return ()

    def put_back(self) -> None:
        for name in set(attributes(self._step)) - set(self._values):
            object.__delattr__(self._step, name)
        for name, value in self._values.items():
            if attributes(self._step).get(name) is not value:
                object.__setattr__(self._step, name, value)
            if name in self._contents:
                _refill(value, self._contents[name])


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
    elif isinstance(value, np.ndarray):
        np.copyto(value, content, casting="unsafe")
    elif not value.requires_grad:
        with torch.no_grad():
            value.copy_(content)


# ---- several samples at once --------------------------------------------------------------------------


def try_together(steps: Sequence[Any], samples: Sequence[Any], found: Sequence[list[Any]]) -> None:
    """Try each ``hotset.batched`` of a chain on several samples at once, as a fill will.

    Args:
        steps: the chain's transforms.
        samples: as they reach the first.
        found: for each transform, its output for each sample alone.

    Raises:
        NotCacheable: its result for a sample depends on the others, by more than rounding.
        Exception: what it raises for several samples; an ArgumentError if it returns another number of rows.
    """
    inputs = samples
    for step, outputs in zip(steps, found, strict=False):
        if isinstance(step, Batched) and step.size > 1 and declared(step) != "deterministic":
            count = min(step.size, max(len(inputs), 2))
            some = [n % len(inputs) for n in range(count)]
            together = step.many(copied([inputs[n] for n in some]))
            if not same_but_for_rounding([outputs[n] for n in some], together):
                raise NotCacheable(
                    f"{step!r} must return the same row for a sample whatever else is in its batch, got "
                    f"other rows for {count} samples at once than for each alone; leave padding and "
                    "normalising over the batch to collate_fn, or give it size=1."
                )
        inputs = outputs


def mixed_rows(step: BatchTransform, rows: list[Any], alone: list[Any]) -> str | None:
    """A phrase: how the results for rows in one batch differ from those for each alone; None if they do not.

    A transform that pads to the longest row of a batch cannot be cached row by row.
    """
    if len(rows) < 2:
        return "only one row could be read in time, so it is not known whether rows of a batch are mixed"
    for batch in (rows, rows[::-1]):
        try:
            together = step.many(copied(batch))
        except Exception as error:  # it may be made for batches of another size
            return f"a batch of {len(rows)} rows raised {type(error).__name__}"
        found = same(together, alone if batch is rows else alone[::-1])
        if found is not None:
            return f"its result for a row depends on the other rows of the batch ({found})"
    return None


# ---- timing ----------------------------------------------------------------------------------------------


class Timed:
    """A function, and the times of its calls.

    Attributes:
        times: the seconds of each call that returned.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.times: list[float] = []

    def __call__(self, *values: Any) -> Any:
        begun = time.perf_counter()
        made = self._call(*values)
        self.times.append(time.perf_counter() - begun)
        return made

    @property
    def seconds(self) -> float:
        """See :func:`typical`."""
        return typical(self.times)


def typical(times: Sequence[float]) -> float:
    """Return the mean of the middle half of the times; 0.0 if there are none.

    Example:
        >>> typical([1.0, 1.0, 3.0, 100.0])
        2.0
    """
    dropped = min((len(times) + 1) // 4, (len(times) - 1) // 2)
    middle = sorted(times)[dropped : len(times) - dropped]
    return sum(middle) / len(middle) if middle else 0.0
