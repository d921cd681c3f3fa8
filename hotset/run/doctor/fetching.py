"""What a sample costs in the process that makes it: clocks around each fetch, collate and decoder.

The first batch of a process is left out of all sums: it pays for opening files. While the clocks rest
(:class:`~.clocks.Rests`), samples are only counted; what the others took is scaled to all.

A worker that is stopped for a step that is measured alone does not notice that. So those of its fetches that
waited longest are written with the time: what they waited while it was stopped is no waiting of theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from hotset.run.doctor.clocks import Rests

__all__ = ["Fetching", "Resting", "WorkerWatch"]

# The kernel takes 5 ms to say the memory of a worker; in workers that live for a second that would be much.
_MEMORY_AFTER_SECONDS, _MEMORY_SECONDS = 2.0, 5.0
_LONGEST = 64  # fetches that are written: each stop is in one of each worker's
_REST = 1_200.0  # three times as long as the loop's: before they are read, and after, much is called


@dataclasses.dataclass
class _Sums:
    """The samples for which the clocks were read, and what making them took, in seconds."""

    samples: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    collate_cpu: float = 0.0


class Fetching:
    """What this process does to make batches of one loader."""

    def __init__(self) -> None:
        self._sums = _Sums()
        self.decoders: dict[str, list[float]] = {}  # name: calls, processor seconds, bytes
        self.rests = Rests(_REST)
        self._longest: list[tuple[float, float, float]] = []  # a heap: without the processor, begun, ended
        self._samples = 0  # all
        self._batches = 0
        self._entered = 0.0, 0.0  # the time, and this thread's processor time
        self._decoding = self._is_clocked = False
        self._begun: dict[str, float] | None = None
        self._memory: list[tuple[float, float]] = []  # when it was read first, and last, and the bytes
        self._memory_at = 0.0  # when to read it next

    def begin(self, fetcher: Any, begun: float) -> bool:
        """torch's ``fetcher`` was called at this time to make a batch; whether the clocks are read for it."""
        self._is_clocked = not self.rests.now(begun)
        if self._is_clocked:
            if not isinstance(fetcher.collate_fn, _TimedCollate):
                fetcher.collate_fn = _TimedCollate(fetcher.collate_fn, self)
            self._entered = time.perf_counter(), time.thread_time()
            self.rests.spent(self._entered[0] - begun)
        return self._is_clocked

    def end(self, fetcher: Any, indices: Any) -> None:
        """It has made one of these indices."""
        samples = len(indices) if fetcher.auto_collation else 1
        if not self._is_clocked:
            self.made(samples)
            return
        wall, cpu = self._entered
        now = time.perf_counter()
        cpu = time.thread_time() - cpu
        self._is_clocked = False
        if self._begun is None:
            self._sums = _Sums()
            self.decoders.clear()
            self._begun = _process_figures()
            self._memory_at = self._begun["wall"] + _MEMORY_AFTER_SECONDS
            return
        self.made(samples)
        self._sums.samples += samples
        self._sums.wall += now - wall
        self._sums.cpu += cpu
        add = heapq.heappush if len(self._longest) < _LONGEST else heapq.heappushpop
        add(self._longest, (now - wall - cpu, wall, now))
        self.rests.spent(time.perf_counter() - now)
        self.rests.count(now)

    def made(self, samples: int) -> None:
        """A batch of so many samples was made, after the first."""
        self._batches += 1
        self._samples += samples

    def collate(self, plain: Callable[[Any], Any], samples: Any) -> Any:
        """Call the loader's collate function."""
        if not self._is_clocked:
            return plain(samples)
        before = time.perf_counter()
        begin = time.thread_time()
        self.rests.spent(2.0 * (time.perf_counter() - before))  # here, and below
        try:
            return plain(samples)
        finally:
            self._sums.collate_cpu += time.thread_time() - begin

    def decode(self, name: str, call: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """Call a decoder between two readings of the clocks; one within another counts once."""
        if self._decoding or threading.current_thread() is not threading.main_thread():
            return call()
        self._decoding = True
        before = time.perf_counter()
        begin = time.thread_time()
        self.rests.spent(time.perf_counter() - before)
        try:
            value = call()
        finally:
            self._decoding = False
            before = time.perf_counter()
            taken = time.thread_time() - begin
        row = self.decoders.get(name)
        if row is None:
            row = self.decoders[name] = [0.0, 0.0, 0.0]
        row[0] += 1.0
        row[1] += taken
        row[2] += size(value)
        self.rests.spent(time.perf_counter() - before)
        return value

    @property
    def is_unread(self) -> bool:
        """Whether this process has made batches, and not read its memory."""
        return self._begun is not None and not self._memory

    def to_json(self, *, memory: bool) -> dict[str, Any] | None:
        """What is known so far.

        Args:
            memory: whether to read this process's memory now, even if that is not due.
        """
        if self._begun is None:
            return None
        now = _process_figures()
        if memory or now["wall"] > self._memory_at:
            self._memory_at = now["wall"] + _MEMORY_SECONDS
            self._memory = [*self._memory[:1], *((now["wall"], size) for size in _memory())]
        figures = {name: [value, now.get(name)] for name, value in self._begun.items()}
        all_of_them = self._samples / self._sums.samples if self._sums.samples else 1.0
        return {
            **{name: all_of_them * value for name, value in dataclasses.asdict(self._sums).items()},
            "batches": self._batches,
            "longest": [each[1:] for each in self._longest],
            "scale": all_of_them,
            "decoders": {name: [all_of_them * value for value in row] for name, row in self.decoders.items()},
            "process": figures,
            "memory": self._memory,
        }


class _TimedCollate:
    """The loader's collate function, timed."""

    def __init__(self, plain: Callable[[Any], Any], fetching: Fetching) -> None:
        self.plain = plain
        self._fetching = fetching

    def __call__(self, samples: Any) -> Any:
        return self._fetching.collate(self.plain, samples)


@dataclasses.dataclass(slots=True)
class Resting:
    """The fetcher that has made a batch last, while its clocks rest: there is only counting to do.

    To call all that is below would take 1 % of batches of 2 ms, as the processor has forgotten it since the
    last one.
    """

    fetcher: Callable[[], Any]  # a weak reference
    fetching: Fetching
    until: float


class WorkerWatch:
    """Watches each fetch of a process: of a worker of a loader, or for a loop without workers.

    Attributes:
        fetching: what is known of a worker's own, which are all of one loader.
        resting: the last fetcher whose clocks rested; None if there was none.
    """

    def __init__(self, write_soon: Callable[[], bool]) -> None:
        self.fetching = Fetching()
        self.resting: Resting | None = None
        self._write_soon = write_soon
        self._of_loops: weakref.WeakKeyDictionary[Any, Fetching] = weakref.WeakKeyDictionary()
        self._inside: Fetching | None = None  # a fetch whose clocks are read

    def count_for(self, fetching: Fetching, fetcher: Any) -> None:
        """What ``fetcher`` does is a loop's that has no workers."""
        self._of_loops[fetcher] = fetching

    def fetch(self, fetcher: Any, plain: Callable[[Any, Any], Any], indices: Any, begun: float) -> Any:
        """A fetch, which was called at this time."""
        if threading.current_thread() is not threading.main_thread():
            return plain(fetcher, indices)
        outer, fetching = self._inside, self._of_loops.get(fetcher, self.fetching)
        try:
            # Where samples are small, contextlib.suppress takes as much as the clocks.
            try:  # noqa: SIM105
                self._inside = fetching if fetching.begin(fetcher, begun) else None
            except Exception:  # watching that fails
                pass
            value = plain(fetcher, indices)
            try:
                fetching.end(fetcher, indices)
                self._write_soon()
                if fetching.rests.now(begun):
                    self.resting = Resting(weakref.ref(fetcher), fetching, fetching.rests.until)
            except Exception:
                pass
            return value
        finally:
            self._inside = outer

    def decode(self, name: str, call: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """A decoder is called; see :data:`~.decoding.Decode`."""
        return call() if self._inside is None else self._inside.decode(name, call, size)


def _process_figures() -> dict[str, float]:
    """What the kernel says of this process: each figure that it does not say is left out."""
    found: dict[str, float] = {"wall": time.perf_counter(), "cpu": time.process_time()}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/schedstat") as file:
        found["queued"] = int(file.read().split()[1]) / 1e9
    with contextlib.suppress(OSError, ValueError), open("/proc/self/io") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("rchar", "read_bytes"):
                found[name] = int(value)
    return found


def _memory() -> list[float]:
    """The bytes of this process, where what it shares with others counts in part; empty if unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps_rollup") as file:
        return [1024.0 * int(line.split()[1]) for line in file if line.startswith("Pss:")]
    return []
