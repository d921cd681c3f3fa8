"""The prefetch queue: what a process and its prefetch workers exchange, in shared memory.

::

    number of the newest list ── odd while it is written
    its length
    a row for each worker ────── the list that it is done with; its errors: reported, taken
    an area for each worker ──── its error, until it is raised
    the list ─────────────────── ids, in the order in which they are wanted
    the marks ────────────────── for each position in the list: the number of the list it was given up in

It is a sparse memfd, in which each part has more room than it can need. No process waits for another: the
main process overwrites the list at any time, and a worker that finds another number after reading than before
reads it again. What a worker reports stays there until the main process reads it; checking costs a look at
one word.

A process that attaches to the queue dies with the main process (:mod:`hotset.dataset.parent_death`), and ends
when the main process closes the queue.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch._utils import ExceptionWrapper

from hotset.dataset.parent_death import ParentDeathSignal, parent_death_signal
from hotset.store import locks
from hotset.store.claims import Ids
from hotset.store.segment import Words
from hotset.store.standard_streams import beyond_standard

__all__ = ["PrefetchQueue", "QueueAddress"]

# Words, and words in a row.
_NUMBER, _LENGTH, _ROWS = 0, 1, 8
_CLOSED = -1  # in place of a list's number
_DONE, _REPORTED, _RAISED, _ROW = 0, 1, 2, 8
# Bytes.
_ERRORS_AT, _ERROR_AREA = 1 << 24, 1 << 17
_LIST_AT, _MARKS_AT, _END = 1 << 36, 1 << 40, 1 << 41
_LONGEST_ERROR = _ERROR_AREA // 8  # characters, of up to four bytes


class QueueAddress(NamedTuple):
    """Where workers find a queue: the main process, its descriptor of the memory, and the memory's inode."""

    parent: ParentDeathSignal
    fd: int
    inode: int
    processes: int


class PrefetchQueue:
    """A queue that the main process makes with :meth:`create`, and workers see through :meth:`attach`.

    Attributes:
        done: for each worker, the number of the last list that it is done with.
        reported: for each worker, how many errors it has reported.
        raised: for each worker, how many of these the main process has taken.
    """

    def __init__(self, fd: int, parent_dead: int | None, processes: int) -> None:
        self._fd, self._file = fd, locks.file_of(fd)
        self._parent_dead = parent_dead
        self._process = os.getpid()
        self._processes = processes
        words: Words = np.frombuffer(mmap.mmap(fd, 8 * (_ROWS + processes * _ROW)), np.int64)
        rows = words[_ROWS:].reshape(processes, _ROW)
        self._words = words
        self.done, self.reported, self.raised = rows[:, _DONE], rows[:, _REPORTED], rows[:, _RAISED]

    @classmethod
    @beyond_standard()
    def create(cls, processes: int) -> PrefetchQueue:
        """Make an empty queue for this many workers.

        Raises:
            OSError: no descriptor is left.
        """
        fd = os.memfd_create("hotset-prefetch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _END)
            return cls(fd, None, processes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    @beyond_standard()
    def attach(cls, address: QueueAddress) -> PrefetchQueue:
        """Attach to a queue in a worker, which dies with the queue's process from now on.

        Raises:
            OSError: that process, or its queue, is gone.
        """
        parent_dead = address.parent.arm()
        fd = os.open(f"/proc/{address.parent.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_ino != address.inode:
            raise OSError("the queue that this worker was started for is gone")
        return cls(fd, parent_dead, address.processes)

    @property
    def address(self) -> QueueAddress:
        """How workers find this queue while this process lives."""
        return QueueAddress(parent_death_signal(), self._fd, os.fstat(self._own_fd()).st_ino, self._processes)

    # ---- lists ---------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The newest list's number: even, but odd while it is written, and at the end; 0 if there is none."""
        return int(self._words[_NUMBER])

    @property
    def is_closed(self) -> bool:
        """Whether the main process has closed it."""
        return self.number == _CLOSED

    def post(self, ids: Ids) -> None:
        """Replace the list, in the main process.

        Raises:
            OSError: there is no memory for it.
        """
        written = self.number | 1  # it is odd already if an interrupt came while the last list was written
        self._words[_NUMBER] = written
        self._write(np.ascontiguousarray(ids, np.int64).tobytes(), _LIST_AT)
        self._words[_LENGTH] = len(ids)
        self._words[_NUMBER] = written + 1

    def newest(self) -> tuple[int, Ids] | None:
        """Return the newest list's number and ids; None if it is being written.

        On machines that reorder loads this could be a mixture of two lists. That does no harm, as every id in
        it was requested at some time.
        """
        number = self.number
        ids = self._read(_LIST_AT, int(self._words[_LENGTH]))
        return (number, ids) if number % 2 == 0 and number == self.number else None

    def give_up(self, number: int, position: int) -> None:
        """Mark a position of this list, so that no worker tries it again; later lists are not affected."""
        self._write(number.to_bytes(8, "little"), _MARKS_AT + 8 * position)

    def given_up(self, number: int, positions: Ids) -> npt.NDArray[np.bool_]:
        """Which of these positions of a list are marked; they must be ascending, and at least one."""
        first, last = int(positions[0]), int(positions[-1])
        marks = self._read(_MARKS_AT + 8 * first, last + 1 - first)
        given_up: npt.NDArray[np.bool_] = marks[positions - first] == number
        return given_up

    # ---- errors --------------------------------------------------------------------------------------

    def report(self, worker: int, error: Any) -> None:
        """Store an error (an ``ExceptionWrapper``), unless this worker's last one was not taken yet."""
        if self.reported[worker] != self.raised[worker]:
            return
        error.exc_msg = error.exc_msg[-_LONGEST_ERROR:]
        try:
            data = pickle.dumps(error)
        except Exception:  # a class defined in a function; the traceback names it
            error.exc_type = RuntimeError
            data = pickle.dumps(error)
        self._write(data, _ERRORS_AT + worker * _ERROR_AREA)
        self.reported[worker] += 1

    def take_error(self) -> ExceptionWrapper | None:
        """Remove and return an error, in the main process; None if there is none, in 1 to 2 microseconds."""
        unraised = self.reported != self.raised
        if not unraised.any():
            return None
        worker = int(unraised.argmax())
        try:
            data = os.pread(self._own_fd(), _ERROR_AREA, _ERRORS_AT + worker * _ERROR_AREA)
        except OSError:  # the program has closed it
            return None
        self.raised[worker] += 1
        error: ExceptionWrapper = pickle.loads(data)
        return error

    # ---- life ----------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Wait, in a worker; ends the process if the main process has ended, or has closed the queue."""
        assert self._parent_dead is not None
        if self.is_closed or select.select([self._parent_dead], [], [], seconds)[0]:
            os._exit(0)

    def close(self) -> None:
        """Close the memory, in the main process, and in a child that was forked from it.

        The mapping is freed with its last view.
        """
        if self._process == os.getpid():
            self._words[_NUMBER] = _CLOSED
        locks.close_own(self._fd, self._file)

    def _read(self, offset: int, count: int) -> Words:
        words: Words = np.frombuffer(os.pread(self._own_fd(), 8 * count, offset), np.int64)
        return words

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._own_fd(), view, offset)
            view, offset = view[written:], offset + written

    def _own_fd(self) -> int:
        """The descriptor, if the program has not closed it, and given its number to another file."""
        return locks.own(self._fd, self._file)
