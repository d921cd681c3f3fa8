"""The system's entropy: how often this process has taken some, as far as that goes through Python.

A generator that is made and dropped in one expression (``np.random.default_rng().random()``) leaves no state
to compare, but its seed comes from the system. So hotset wraps the functions that fetch it, once in each
process that watches reading, to count their calls:

=====================  ====================================================================================
``os.urandom``         itself, ``uuid.uuid4``, ``secrets``, ``random.SystemRandom``, and the generators of
                       numpy that are made without a seed
``os.getrandom``       itself
``random.Random.seed`` ``random.Random()``, where the seed is None
=====================  ====================================================================================

A call alone proves nothing: names of temporary files and ids of requests are made of entropy too. So
:class:`~hotset.determinism.draws.draw_watch.DrawWatch` reads the sample once more when the count has risen,
and compares.

Not seen: ``torch.Generator().seed()``, which is compiled code, the file ``/dev/urandom``, and a function that
the user's module has imported by name before (``from os import urandom``).
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["add", "taken"]


class _Calls(threading.local):
    """For each thread: torch's workers take entropy in another one, as they send batches."""

    count = 0


_calls = _Calls()


def taken() -> int:
    """A number that has risen if this thread has taken entropy since it was asked for last."""
    _count_from_now_on()
    return _calls.count


def add(calls: int) -> None:
    """Count calls that another thread has made on behalf of this one."""
    _calls.count += calls


@functools.cache
def _count_from_now_on() -> None:
    seed = random.Random.seed

    @functools.wraps(seed)
    def counted_seed(self: random.Random, a: Any = None, *args: Any, **named: Any) -> None:
        _calls.count += a is None
        seed(self, a, *args, **named)

    os.urandom = random._urandom = _counted(os.urandom)  # type: ignore[attr-defined]
    if hasattr(os, "getrandom"):
        os.getrandom = _counted(os.getrandom)
    random.Random.seed = counted_seed  # type: ignore[method-assign]


def _counted(function: Callable[..., bytes]) -> Callable[..., bytes]:
    @functools.wraps(function)
    def counted(*args: Any, **named: Any) -> bytes:
        _calls.count += 1
        return function(*args, **named)

    counted.__module__ = "os"  # by which it is pickled
    return counted
