"""What all processes of this machine together have got from each other machine, and given to it.

It is a file beside the session's quota, with one row for each machine that was ever asked::

    <number>.traffic      1,024 rows of 128 B:  name, 48 B | ten counters, i64

Processes add to it now and then what they have counted since (:class:`PeerStatsFile`), under its lock, as
there is no atomic addition. Counting must not slow down what is counted: a process that cannot have the lock
at once adds its counts the next time, and only a process that ends waits for the lock, for 0.2 s at most.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hotset.session.runtime_dir import opened, runtime
from hotset.session.session_files import peer_stats_file
from hotset.store import locks

__all__ = ["PeerStats", "PeerStatsFile", "make_peer_stats", "read_peer_stats"]


@dataclass
class PeerStats:
    """What passed between this process and one peer.

    Attributes:
        asked: samples asked for.
        received: records received, verified.
        bytes: of those records.
        stored: records that the peer took.
        unsound: records that were damaged, or another sample's.
        refused: requests that the peer refused: it has no such cache, or had too many requests.
        late: answers that came after the wait for them had ended.
        failures: how often the peer failed (:mod:`hotset.cluster.client`).
        answers: answers that came in time.
        seconds: from asking to the answer being there, summed over those.
        why: what the last failure was, as the end of a sentence; empty if there was none.
    """

    asked: int = 0
    received: int = 0
    bytes: int = 0
    stored: int = 0
    unsound: int = 0
    refused: int = 0
    late: int = 0
    failures: int = 0
    answers: int = 0
    seconds: float = 0.0
    why: str = ""

    @property
    def latency(self) -> float | None:
        """Mean seconds from asking to the answer being there; None before the first."""
        return self.seconds / self.answers if self.answers else None


_COUNTED = [field.name for field in fields(PeerStats) if field.name not in ("seconds", "why")]
_ROW = np.dtype([("name", "S48"), ("counts", "<i8", len(_COUNTED)), ("nanoseconds", "<i8")])
_ROWS = 1024
_EVERY_SECONDS = 0.5
_PATIENCE = 0.2
_SHORT = 0


def make_peer_stats(number: int) -> None:
    """Make a session's statistics file, if there is none.

    Raises:
        OSError: it cannot be made.
    """
    with (
        runtime() as folder,
        contextlib.suppress(FileExistsError),
        opened(folder, peer_stats_file(number), create=True) as fd,
    ):
        os.posix_fallocate(fd, 0, _ROWS * _ROW.itemsize)


def read_peer_stats(number: int) -> dict[str, PeerStats]:
    """What passed between this machine and each other one, by its name.

    Raises:
        OSError: there is no such file.
    """
    with runtime() as folder, opened(folder, peer_stats_file(number)) as fd:
        return {row["name"].decode(errors="replace"): _traffic(row) for row in _rows(fd) if row["name"]}


def _traffic(row: Any) -> PeerStats:
    counts = dict(zip(_COUNTED, row["counts"].tolist(), strict=True))
    return PeerStats(**counts, seconds=int(row["nanoseconds"]) / 1e9)


def _rows(fd: int) -> Any:
    size = _ROWS * _ROW.itemsize
    return np.frombuffer(bytearray(os.pread(fd, size, 0).ljust(size, b"\0")), _ROW)


class PeerStatsFile:
    """Adds what one process has counted to a session's statistics file."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._added: dict[str, tuple[PeerStats, Any]] = {}  # what was counted when it was added last
        self._last = time.monotonic()

    def add(self, traffics: dict[str, PeerStats], *, now: bool = False) -> None:
        """Add what was counted since the last time, if that is half a second ago; ``now``: in any case."""
        if not now and time.monotonic() - self._last < _EVERY_SECONDS:
            return
        self._last = time.monotonic()
        file = peer_stats_file(self._number)
        with contextlib.suppress(OSError), runtime() as folder, opened(folder, file) as fd:
            if not locks.lock(fd, _SHORT, _PATIENCE if now else 0.0):
                return
            rows = _rows(fd)
            for name, traffic in traffics.items():
                self._add_one(rows, name, traffic)
            os.pwrite(fd, rows.data, 0)

    def _add_one(self, rows: Any, name: str, traffic: PeerStats) -> None:
        counted = np.array([*(getattr(traffic, field) for field in _COUNTED), int(traffic.seconds * 1e9)])
        of, before = self._added.get(name, (traffic, 0))
        new = counted - (before if of is traffic else 0)
        entry = name.encode()[:48]
        free = np.flatnonzero((rows["name"] == entry) | (rows["name"] == b""))
        if new.any() and len(free):
            rows["name"][free[0]] = entry
            rows["counts"][free[0]] += new[:-1]
            rows["nanoseconds"][free[0]] += new[-1]
            self._added[name] = traffic, counted
