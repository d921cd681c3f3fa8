"""How long main processes wait for torch's DataLoader: the time in its iterator's ``__next__``.

A wrapper around ``__next__`` would be a line in every traceback that a dataset causes, and would shift the
line that torch's warnings point at. But ``__next__`` runs in ``torch.autograd.profiler.record_function``,
which it looks up in its module's globals. It gets globals of its own, in which ``torch`` gives that one name
another meaning; its code is torch's.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from hotset.run.import_hook import Hook
from hotset.run.ledger import ledger_here

__all__ = ["Observer", "WaitSums", "Waits", "hooks", "read_waits"]

_FORM = struct.Struct("ddd")  # of Waits


class Waits(NamedTuple):
    """How one process waited for its loaders.

    Attributes:
        waited: the seconds in which it did.
        batches: that it got.
        seconds: from where it first asked for a batch to where it last got one: what came before, such as
            imports, is not training.
    """

    waited: float
    batches: float
    seconds: float


class Observer(Protocol):
    """What is called around each ``__next__``, with torch's iterator."""

    def made(self, iterator: Any) -> None:
        """It is made: its workers are not started yet."""

    def before(self, iterator: Any) -> None:
        """The loop asks for a batch."""

    def after(self, iterator: Any, seconds: float, failed: bool, batch: Callable[[], Any]) -> None:
        """It got one after so many seconds; or ``failed``: the pass ended, or an exception was raised.

        ``batch`` returns what it got, or None if that is not known.
        """


def hooks(observers: Sequence[Observer]) -> Iterator[tuple[str, Hook]]:
    """The hook that calls the observers."""
    yield "torch.utils.data.dataloader", functools.partial(_measure, observers)


def _measure(observers: Sequence[Observer], module: Any) -> None:
    iterator = module._BaseDataLoaderIter
    plain = iterator.__next__
    if "record_function" not in plain.__code__.co_names:
        return
    timed = types.FunctionType(
        plain.__code__,
        {**plain.__globals__, "torch": _Torch(observers)},
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    timed.__dict__.update(plain.__dict__)
    timed.__qualname__, timed.__doc__ = plain.__qualname__, plain.__doc__
    timed.__module__, timed.__annotations__ = plain.__module__, plain.__annotations__
    # torch calls the method by this name alone: it has ``next = __next__`` nowhere.
    iterator.__next__ = timed

    def make(cls: type, *args: Any, **named: Any) -> Any:
        # Not a wrapper of ``__init__``, for the same reason: this has returned when that begins.
        made: Any = object.__new__(cls)
        for observer in observers:
            observer.made(made)
        return made

    iterator.__new__ = staticmethod(make)


class _Torch:
    """``torch`` as the iterator's ``__next__`` sees it, in which one function is ours."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.autograd = self.profiler = self

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"], name)

    def record_function(self, name: str) -> Any:
        inner = sys.modules["torch"].autograd.profiler.record_function(name)
        return _Timed(inner, self._observers, sys._getframe(1).f_locals["self"])


class _Timed:
    """A context manager around torch's that tells the observers of the time in it."""

    __slots__ = ("_inner", "_iterator", "_observers", "_start")

    def __init__(self, inner: Any, observers: Sequence[Observer], iterator: Any) -> None:
        self._inner, self._observers, self._iterator = inner, observers, iterator

    def __enter__(self) -> Any:
        for observer in self._observers:
            observer.before(self._iterator)
        self._start = time.perf_counter()
        return self._inner.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        result = self._inner.__exit__(kind, error, trace)
        seconds = time.perf_counter() - self._start
        frame = sys._getframe(1)  # of ``__next__``, in which the batch has this name
        for observer in self._observers:
            observer.after(self._iterator, seconds, kind is not None, lambda: frame.f_locals.get("data"))
        return result


class WaitSums:
    """The observer of ``hotset run``: the sums of a process, in the ledger."""

    def made(self, iterator: Any) -> None:
        pass

    def before(self, iterator: Any) -> None:
        pass

    def after(self, iterator: Any, seconds: float, failed: bool, batch: Callable[[], Any]) -> None:
        _note(seconds, 0.0 if failed else 1.0)


_row: tuple[int, mmap.mmap, float] | None = None  # of the process that has this id, and when it began


def _note(seconds: float, batches: float) -> None:
    """Add to this process's row. A loader that is used inside a worker counts for that worker."""
    global _row
    try:
        now = time.perf_counter()
        if _row is None or _row[0] != os.getpid():
            _row = os.getpid(), _open(ledger_here().path(f"wait-{os.getpid()}")), now - seconds
        waited, count, _ = _FORM.unpack_from(_row[1])
        _FORM.pack_into(_row[1], 0, waited + seconds, count + batches, now - _row[2])
    except (OSError, ValueError):
        pass


def _open(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, _FORM.size)
        return mmap.mmap(file, _FORM.size)
    finally:
        os.close(file)


def read_waits(ledger: str) -> list[Waits]:
    """Of each process that had a loader, the one that waited most first."""
    found = []
    with contextlib.suppress(OSError):  # the program may have emptied the temporary folder
        for name in os.listdir(ledger):
            if name.startswith("wait-"):
                with open(os.path.join(ledger, name), "rb") as file:
                    content = file.read(_FORM.size)
                if len(content) == _FORM.size:
                    found.append(Waits(*_FORM.unpack(content)))
    return sorted(found, reverse=True)
