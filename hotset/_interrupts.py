"""Errors that come from outside of the code that runs: those that the handler of a signal raises.

Such a handler may raise after any instruction: an alarm's TimeoutError, the RuntimeError by which torch says
that a loader's worker was killed. Planning goes on after errors of the dataset and its transforms. Where it
runs these, or compares what they return, it catches :func:`own_errors`: an error from outside ends it, as it
would end what runs without hotset, and says nothing of the transform in which it came.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

__all__ = ["own_errors"]


def own_errors(kinds: tuple[type[Exception], ...] = (Exception,)) -> tuple[type[Exception], ...]:
    """For an ``except``: errors of these kinds, but none if the handler of a signal has raised what came.

    Example:
        >>> try:
        ...     {}["a"]
        ... except own_errors() as error:
        ...     print(repr(error))
        KeyError('a')
    """
    error = sys.exc_info()[1]
    inner = error.__traceback__ and error.__traceback__.tb_next if error is not None else None
    if inner is None:  # raised where it is caught
        return kinds
    handlers = set(_handlers())
    while inner is not None:
        if inner.tb_frame.f_code in handlers:
            return ()
        inner = inner.tb_next
    return kinds


def _handlers() -> Iterator[CodeType]:
    """The code of the functions of Python that handle signals in this process."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):  # not one of the constants
            for function in (handler, getattr(handler, "__func__", None), type(handler).__call__):
                code = getattr(function, "__code__", None)
                if isinstance(code, CodeType):
                    yield code
