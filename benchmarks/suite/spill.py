"""Spill: a session whose samples lie on a disk, against the same bytes in a plain file there.

*Whole.* No sample is in memory. Batches in random order, against reading the file from its beginning to its
end, four megabytes at a time: as fast as that disk gives. The page cache is dropped before each, or memory
would be measured; what the host behind a virtual disk keeps, it keeps for both, and a larger size tells how
much that is.

*Half.* Of three sessions the first has room in memory for all samples, the second for half of them, and the
third for none; here too nothing is in the page cache.

*Tiny rows.* Rows of 210 bytes, all of them spilled, against the pipeline without a cache, which has them in
memory: with the page cache as it is, as a training would find it, and dropped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import data, hotset_entries, peers
from benchmarks.harness import Epochs, Measure, Outcome, Spread, compare
from benchmarks.peers import Epoch
from benchmarks.session_job import BATCH, new_session
from benchmarks.settings import Settings
from benchmarks.suite.contest import lead
from benchmarks.truth import RowTruth, WrongData

__all__ = ["Disk", "sequential", "spill", "spill_half", "spill_large", "spill_tiny"]

FILE = "a plain file, from beginning to end"
SPILLED = "all spilled, random order"
SPILLED_WORKERS = "all spilled, random order, 2 workers"

MEMORY = "all in memory"
HALF = "half in memory, half spilled"

NONE = "torch's DataLoader, no cache"
AS_IT_IS = "all spilled"
DROPPED = "all spilled, page cache dropped"

_DROP = Path("/proc/sys/vm/drop_caches")
_READ_BYTES = 4 << 20
_IMAGE_BYTES = 3 * 224 * 224
_SMALL_BATCH = 256
_PAIRS = 7
# What the host behind a virtual disk is least likely to keep.
_LARGE = 10


class Disk:
    """A folder on a disk, with spilled records and plain files in it, none of which the page cache keeps.

    Attributes:
        drops: whether the whole page cache could be dropped, for which one has to be root; of the folder's
            files it is asked to forget what it has in any case.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.drops = False
        self.forget()

    def forget(self) -> None:
        """Drop the page cache."""
        os.sync()
        for file in self.folder.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        with contextlib.suppress(OSError):
            _DROP.write_text("1")
            self.drops = True

    def cold(self, measure: Callable[[], float]) -> float:
        """What is measured with nothing in the page cache."""
        self.forget()
        return measure()


def spill(settings: Settings) -> Outcome:
    """Random batches from the disk: at least 0.7x of what a plain file gives."""
    return _whole(settings, 96 if settings.quick else 4_000)


def spill_large(settings: Settings) -> Outcome:
    """The same with ten times as many bytes."""
    return _whole(settings, 200 if settings.quick else 4_000 * _LARGE)


def _whole(settings: Settings, count: int) -> Outcome:
    with ExitStack() as stack:
        disk = Disk(settings.out / "spill")
        plain = stack.enter_context(_plain_file(disk.folder, count))
        cached, epoch = _session_of(stack, disk, data.Generated(count), 0, 0)
        with_workers = hotset_entries.loader(stack, cached, BATCH, 2)
        found = compare(
            {
                FILE: partial(disk.cold, partial(sequential, plain)),
                SPILLED: partial(disk.cold, partial(_megabytes, epoch, cached)),
                SPILLED_WORKERS: partial(disk.cold, partial(_megabytes, with_workers, cached)),
            },
            FILE,
            2 if settings.quick else _PAIRS,
            title=f"{count * _IMAGE_BYTES / 1e6:,.0f} MB on a disk, rows of 150 KB, batch {BATCH}",
            unit="MB/s",
            subjects=(SPILLED, SPILLED_WORKERS),
            limits=(FILE,),
        )
    return Outcome([found], [lead(f"{SPILLED}: {found.title}", found, SPILLED, FILE, 0.7)], _told(disk))


def spill_half(settings: Settings) -> Outcome:
    """Half of the samples in memory, against all and none."""
    count = 96 if settings.quick else 4_000
    with ExitStack() as stack:
        disk = Disk(settings.out / "spill")
        contestants: dict[str, Measure] = {}
        # A row is more than its picture: half of the rows do not fit in half of the pictures' bytes.
        row = _IMAGE_BYTES + 512
        for name, memory in ((MEMORY, 4 * count * row), (HALF, count // 2 * row), (SPILLED, 0)):
            cached, epoch = _session_of(stack, disk, data.Generated(count), memory, 0)
            contestants[name] = partial(disk.cold, partial(_megabytes, epoch, cached))
        found = compare(
            contestants,
            SPILLED,
            2 if settings.quick else _PAIRS,
            title=f"{count * _IMAGE_BYTES / 1e6:,.0f} MB in a session, batch {BATCH}",
            unit="MB/s",
            subjects=(MEMORY, HALF, SPILLED),
        )
    figures = [found.rows[name].figures for name in (MEMORY, HALF, SPILLED)]
    notes = _told(disk)
    if all(figures):
        shares = Spread.of((1 / a + 1 / b) / 2 * half for a, half, b in zip(*figures, strict=True))
        notes.append(f"half and half: {shares.median:.2f}x the speed that lies between the other two")
    return Outcome([found], [], notes)


def spill_tiny(settings: Settings) -> Outcome:
    """Rows of 210 B, all of them spilled: never slower than without a cache."""
    rows = data.byte_rows(settings.small_rows)
    outcome = Outcome()
    for workers in (0, 2):
        with ExitStack() as stack:
            disk = Disk(settings.out / "spill")
            samples, truth = data.Samples(rows), RowTruth(rows.numpy())
            _, epoch = _session_of(stack, disk, samples, 0, workers, _SMALL_BATCH)
            found = compare(
                {
                    NONE: Epochs(
                        peers.loader(stack, samples, _SMALL_BATCH, workers), truth, settings.seconds
                    ),
                    AS_IT_IS: Epochs(epoch, truth, settings.seconds),
                    DROPPED: _Cold(disk, epoch, len(rows)),
                },
                NONE,
                2 if settings.quick else _PAIRS,
                title=f"{len(rows):,} rows of 210 B, {workers} workers, batch {_SMALL_BATCH}",
                subjects=(AS_IT_IS, DROPPED),
            )
        outcome.comparisons.append(found)
        outcome.targets += [lead(f"{n}: {found.title}", found, n, NONE, 1.0) for n in (AS_IT_IS, DROPPED)]
    return outcome


class _Cold:
    """An epoch with nothing in the page cache: samples a second."""

    def __init__(self, disk: Disk, epoch: Epoch, count: int) -> None:
        self._disk, self._epoch, self._count = disk, epoch, count

    def __call__(self) -> float:
        self._disk.forget()
        return self._count / _seconds(self._epoch, self._count)[0]


@contextlib.contextmanager
def _plain_file(folder: Path, count: int) -> Any:
    path = folder / "plain"
    try:
        with path.open("wb") as file:
            for _ in range(count):
                file.write(os.urandom(_IMAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def sequential(path: Path) -> float:
    """Read a file from beginning to end: MB/s."""
    buffer = bytearray(_READ_BYTES)
    total = 0
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, [buffer]):
            total += count
    finally:
        os.close(fd)
    return total / (time.perf_counter() - start) / 1e6


def _session_of(
    stack: ExitStack, disk: Disk, dataset: Any, memory: int, workers: int, batch: int = BATCH
) -> tuple[Any, Epoch]:
    """A dataset in a session of so many bytes of memory, filled, and how its epochs begin."""
    from hotset import cache

    session = stack.enter_context(new_session(memory, disk.folder))
    cached = stack.enter_context(cache(dataset, session=session))
    with ExitStack() as filling:
        for _ in hotset_entries.loader(filling, cached, batch, 2)():
            pass
    hotset_entries.require_filled(cached)
    return cached, hotset_entries.loader(stack, cached, batch, workers)


def _megabytes(epoch: Epoch, cached: Any) -> float:
    """One epoch: MB/s of pictures."""
    seconds, last = _seconds(epoch, len(cached))
    for picture, i in zip(last[0], last[1].tolist(), strict=True):
        if not torch.equal(picture, cached.dataset[i][0]):
            raise WrongData(f"sample {i} differs from its original")
    return len(cached) * _IMAGE_BYTES / seconds / 1e6


def _seconds(epoch: Epoch, count: int) -> tuple[float, Any]:
    seen, batch = 0, None
    start = time.perf_counter()
    for batch in epoch():
        seen += len(batch[1])
    elapsed = time.perf_counter() - start
    if seen != count:
        raise WrongData(f"an epoch of {seen} samples")
    return elapsed, batch


def _told(disk: Disk) -> list[str]:
    if disk.drops:
        return []
    return ["the page cache could not be dropped as a whole (one has to be root), only asked to forget files"]
