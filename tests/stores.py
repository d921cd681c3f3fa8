"""A store to play with, and child processes that may die: what the tests of the bytes share.

A child here is a bare fork that never returns into the test: it runs a body and ends with ``os._exit``, so
that nothing of pytest runs twice. Whoever waits for one waits within a bound, and kills it after that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from helpers import difference, eventually

from hotset.store.claims import Ids
from hotset.store.format import PRESENT, Live
from hotset.store.ring import attach_store
from hotset.store.schema import Schema
from hotset.store.segment import Address
from hotset.store.store import Store

Make = Callable[[int], Any]


def ids(*numbers: int | Iterable[int]) -> npt.NDArray[np.int64]:
    """Sample numbers as the store takes them: ``ids(3, range(5, 8))``."""
    found: list[int] = []
    for number in numbers:
        found += [number] if isinstance(number, int) else number
    return np.array(found, np.int64)


@contextlib.contextmanager
def opened(
    make: Make,
    n: int,
    limit: int = 1 << 24,
    *,
    first: Iterable[int] = (0, 1),
    path: Path | str | None = None,
    as_lies: bool = True,
) -> Iterator[Store]:
    """An empty store of ``n`` samples ``make(i)``, whose schema comes from the samples ``first``."""
    schema = Schema.infer([make(i) for i in first], as_lies=as_lies)
    where = None if path is None else str(path)
    with contextlib.closing(Store.create(schema, n, limit, about={"name": "test"}, path=where)) as store:
        yield store


@contextlib.contextmanager
def attached(where: Store | Address | Path | str) -> Iterator[Store]:
    """Another view of a store, with its own membership: what another process has."""
    if isinstance(where, Store):
        where = where.segment.address
    with contextlib.closing(attach_store(str(where) if isinstance(where, Path) else where)) as store:
        yield store


class _Telling(np.ndarray):  # type: ignore[type-arg]
    """Live words that tell when the clear generation is counted up."""

    tell: Callable[[], object] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)  # type: ignore[no-untyped-call]
        tell, self.tell = self.tell, None
        if key == Live.CLEAR_GENERATION and tell is not None:
            tell()


def clear_and_meanwhile(store: Store, act: Callable[[], object]) -> None:
    """Clear a store, and do something in its midst, with the clear generation new and the words still old."""
    before, live = store.segment.live, store.segment.live.view(_Telling)
    live.tell = act
    store.segment.live = live
    assert store.clear()
    store.segment.live = before


def stored(store: Store, wanted: Ids | None = None) -> dict[int, Any]:
    """The samples that the store holds, as it gives them out one by one."""
    found = {}
    for sample in (np.arange(len(store)) if wanted is None else wanted).tolist():
        if store.present(ids(sample)).all():
            samples = store.read(ids(sample))
            assert samples is not None
            found[sample] = samples[0]
    return found


def count(store: Store) -> int:
    """How many samples the store holds."""
    return int((store.segment.index >= PRESENT).sum())


def wrong(found: dict[int, Any], make: Make) -> dict[int, str]:
    """Of these samples, those that are not what ``make`` gives, and how they differ."""
    found = {sample: difference(value, make(sample)) for sample, value in found.items()}
    return {sample: sentence for sample, sentence in found.items() if sentence is not None}


def die() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def child(body: Callable[[], object]) -> int:
    """Run ``body`` in a forked child; returns its pid. It ends with 0, or with 1 and a traceback."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # torch's other threads were not forked, and would be waited for
            vars(forkserver)["_forkserver"]._forkserver_pid = None  # an earlier test's
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int, within: float = 100.0) -> int:
    """Wait for a child; its exit code, or minus the signal that ended it. Killed and failed after that."""
    status = 0

    def gone() -> bool:
        nonlocal status
        done, status = os.waitpid(pid, os.WNOHANG)
        return done == pid

    if not eventually(gone, within):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError(f"the child was still at it after {within:.0f} s")
    return os.waitstatus_to_exitcode(status)


def in_child(body: Callable[[], object], within: float = 100.0) -> None:
    """Run ``body`` in a forked child, and fail unless it ends well within a bound."""
    code = ended(child(body), within)
    assert code == 0, f"the child ended with {code}"


@contextlib.contextmanager
def lingering(body: Callable[[], object]) -> Iterator[int]:
    """A child that has run ``body`` and lives on until the block ends, or until it is killed inside it.

    What ``body`` returns lives as long.
    """
    ready, tell = os.pipe()

    def run() -> None:
        os.close(ready)
        kept = body()
        os.write(tell, b"k")
        while kept is not run:
            signal.pause()

    pid = child(run)
    os.close(tell)
    try:
        told = os.read(ready, 1)
        os.close(ready)
        assert told == b"k", "the child failed before it was ready"
        yield pid
    finally:
        kill(pid)


def kill(pid: int) -> None:
    """SIGKILL a child and reap it; nothing happens if that was done already."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stop(pid: int) -> None:
    """SIGSTOP a child, and return once it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pause(seconds: float) -> None:
    """Let a time of the library's own go by, such as the half second after which it looks for room again."""
    time.sleep(seconds)
