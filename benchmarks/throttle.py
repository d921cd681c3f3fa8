"""A throttled source: files of this disk, at the pace of storage behind a network. It *stands for* remote
storage and is none: the bytes come from where they lie, and each request is made to wait.

One file holds the state of one link, and all that open it share that link: threads, workers, ranks,
jobs that know nothing of each other. The model has two figures. Each request waits for the *latency*, all of
them at once; then its bytes pass the link, one request after the other, at the *bandwidth*::

    request A   |-- latency --|== bytes ==|
    request B     |-- latency --|- - - - -|=== bytes ===|
    request C                                |-- latency --|== bytes ==|

So the state is a single time, when the link is free next. A request of ``n`` bytes, made at ``now``, begins
at ``max(now + latency, free)``, ends ``n / bandwidth`` later, and leaves that end for the next one. A bucket
of tokens that the link fills was rejected: it lets a burst pass at once after a pause, which no link does.

**Processes that die.** A request is booked first and waited for afterwards. The booking happens under a lock
that the kernel drops with its holder, and is one ``pwrite`` of all the words: a killed process has booked or
it has not. What it had booked stays booked, as a server goes on sending to a client that is gone.

The file is opened anew for each request. That takes microseconds beside the milliseconds that are stood for,
and in return nothing is held that a fork, a pickle, or a thread could get wrong.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hotset.store.locks import lock, unlock

__all__ = ["Counts", "Throttle"]

# The nanosecond at which the link is free, requests, bytes: an empty file is a link that was never used.
_STATE = struct.Struct("<qqq")
_PATIENCE_SECONDS = 10.0
_SECOND = 10**9


class Counts(NamedTuple):
    """What has passed a link since its file was made, over all processes."""

    requests: int
    bytes: int


class Throttle:
    """A link that all processes of this machine share, by the name of its file.

    It can be pickled, and used by any number of threads and processes at once.

    Args:
        file: the link's state. Made where missing, in a folder that is there; the caller removes it. Its
            times are those since the machine was started, so it must not outlast that: a temporary folder.
        bytes_per_second: the bandwidth, of all requests together.
        latency_seconds: from a request to its first byte, on a link that is free.
        clock: gives nanoseconds, the same in all processes.
        sleep: waits for so many seconds.

    Raises:
        ValueError: a bandwidth that is not above zero, or a latency that is negative.
        OSError: the file can be neither opened nor made.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     link = Throttle(f"{folder}/link", bytes_per_second=10**9, latency_seconds=0.001)
        ...     _ = Path(folder, "sample").write_bytes(b"pixels")
        ...     link.read(f"{folder}/sample"), link.counts()
        (b'pixels', Counts(requests=1, bytes=6))
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        bytes_per_second: float,
        latency_seconds: float = 0.0,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not 0 < bytes_per_second < float("inf"):
            raise ValueError(f"bytes_per_second must be above 0, got {bytes_per_second}.")
        if not 0 <= latency_seconds < float("inf"):
            raise ValueError(f"latency_seconds must be 0 or more, got {latency_seconds}.")
        # As numbers, because a path counts in a dataset's fingerprint with the file's date, and this one's
        # changes with every request.
        self._path = tuple(os.fsencode(os.path.abspath(file)))
        self._bytes_per_second = bytes_per_second
        self._latency = round(latency_seconds * _SECOND)
        self._clock = clock
        self._sleep = sleep
        self.counts()

    @property
    def _file(self) -> str:
        return os.fsdecode(bytes(self._path))

    def read(self, path: str | os.PathLike[str]) -> bytes:
        """Return what is in the file ``path``, once the link has passed it.

        Raises:
            OSError: the file cannot be read.
            TimeoutError: see :meth:`book`.
        """
        content = Path(path).read_bytes()
        self.transfer(len(content))
        return content

    def transfer(self, size: int) -> None:
        """Wait for as long as a request of ``size`` bytes takes, for a source that reads no files.

        Raises:
            TimeoutError: see :meth:`book`.
        """
        ready = self.book(size)
        # Until a time, not for a time: what one sleep lasts too long does not add up over requests.
        if (left := ready - self._clock()) > 0:
            self._sleep(left / _SECOND)

    def book(self, size: int) -> int:
        """Enter a request of ``size`` bytes, made now; return the clock's time when its last byte is there.

        Raises:
            ValueError: a size below zero.
            TimeoutError: another process held the link's state for ten seconds, which takes microseconds: it
                was stopped there.
        """
        if size < 0:
            raise ValueError(f"a request of {size} bytes; give a size of 0 or more.")
        with self._opened() as fd:
            free, requests, total = _load(fd)
            begin = max(self._clock() + self._latency, free)
            end = begin + round(size * _SECOND / self._bytes_per_second)
            os.pwrite(fd, _STATE.pack(end, requests + 1, total + size), 0)
        return end

    def counts(self) -> Counts:
        """Return the requests and bytes so far, of all processes, the dead ones too."""
        with self._opened() as fd:
            return Counts(*_load(fd)[1:])

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        # A description of this request's own: a lock belongs to one, so threads exclude each other as well.
        fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not lock(fd, 0, _PATIENCE_SECONDS):
                raise TimeoutError(
                    f"the state of the link in {self._file} has been locked for "
                    f"{_PATIENCE_SECONDS:g} s; resume or end the process that was stopped with it."
                )
            try:
                yield fd
            finally:
                # By hand: a child that was forked meanwhile holds a copy of the descriptor, and so the lock.
                unlock(fd, 0)
        finally:
            os.close(fd)


def _load(fd: int) -> tuple[int, int, int]:
    free, requests, total = _STATE.unpack(os.pread(fd, _STATE.size, 0) or bytes(_STATE.size))
    return free, requests, total
