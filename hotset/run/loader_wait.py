"""How long main processes wait for torch's DataLoader: the time in its iterator's ``__next__``.

A wrapper around ``__next__`` would be a line in every traceback that a dataset causes, and would shift the
line that torch's warnings point at. But ``__next__`` runs in ``torch.autograd.profiler.record_function``,
which it looks up in its module's globals. It gets globals of its own, in which ``torch`` gives that one name
another meaning; its code is torch's.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from hotset.run.environment import LEDGER
from hotset.run.import_hook import Hook

__all__ = ["hooks", "read_waits"]

_FORM = struct.Struct("dd")  # seconds, batches


def hooks() -> Iterator[tuple[str, Hook]]:
    """The hook that measures."""
    yield "torch.utils.data.dataloader", _measure


def _measure(module: Any) -> None:
    iterator = module._BaseDataLoaderIter
    plain = iterator.__next__
    if "record_function" not in plain.__code__.co_names or not os.environ.get(LEDGER):
        return
    timed = types.FunctionType(
        plain.__code__,
        {**plain.__globals__, "torch": _Torch()},
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    timed.__dict__.update(plain.__dict__)
    timed.__qualname__, timed.__doc__ = plain.__qualname__, plain.__doc__
    timed.__module__, timed.__annotations__ = plain.__module__, plain.__annotations__
    # What is iterated by its name is called by it: torch has ``next = __next__`` nowhere.
    iterator.__next__ = timed


class _Torch:
    """``torch`` as the iterator's ``__next__`` sees it, in which one function is ours."""

    def __getattr__(self, name: str) -> Any:
        return self if name in ("autograd", "profiler") else getattr(sys.modules["torch"], name)

    @staticmethod
    def record_function(name: str) -> Any:
        return _Timed(sys.modules["torch"].autograd.profiler.record_function(name))


class _Timed:
    """A context manager around torch's that adds the time in it to the ledger."""

    __slots__ = ("_inner", "_start")

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> Any:
        self._start = time.perf_counter()
        return self._inner.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        result = self._inner.__exit__(kind, error, trace)
        _note(time.perf_counter() - self._start, 0.0 if kind else 1.0)
        return result


_row: tuple[int, mmap.mmap] | None = None  # of the process that has this id


def _note(seconds: float, batches: float) -> None:
    """Add to this process's row. A loader in a worker counts as well: nobody else waits for it."""
    global _row
    try:
        if _row is None or _row[0] != os.getpid():
            _row = os.getpid(), _open(os.path.join(os.environ[LEDGER], f"wait-{os.getpid()}"))
        waited, count = _FORM.unpack_from(_row[1])
        _FORM.pack_into(_row[1], 0, waited + seconds, count + batches)
    except (OSError, KeyError, ValueError):
        pass


def _open(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, _FORM.size)
        return mmap.mmap(file, _FORM.size)
    finally:
        os.close(file)


def read_waits(ledger: str) -> list[tuple[float, int]]:
    """Seconds waited and batches of each process that had a loader."""
    found = []
    for name in os.listdir(ledger):
        if name.startswith("wait-"):
            with open(os.path.join(ledger, name), "rb") as file:
                content = file.read(_FORM.size)
            if len(content) == _FORM.size:
                waited, count = _FORM.unpack(content)
                found.append((waited, int(count)))
    return sorted(found, reverse=True)
