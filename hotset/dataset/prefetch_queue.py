"""The board: what a process and its background helpers tell each other, in shared memory.

::

    number of the newest list ── odd while it is written
    its length
    a row for each helper ────── the list that it is done with; errors reported by it; raised of those
    an area for each helper ──── its error, until it is raised
    the list ─────────────────── ids, in the order in which they are wanted
    the marks ────────────────── beside each place of the list: the number of the list that it was given up in

It is a sparse memfd, in which each part has more room than it can need. Nobody waits for anybody: the main
process overwrites the list whenever it likes, and a helper that finds another number before and after reading
it reads it again. What a helper says stays there until it is looked at, and costs a look at one word.

Who attaches to it is tied to the main process's leash (:mod:`hotset.dataset.parent_death`), and dies with
that.
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
from hotset.store.claims import Ids
from hotset.store.segment import Words

__all__ = ["PrefetchQueue", "QueueAddress"]

# Words, and words in a row.
_NUMBER, _LENGTH, _ROWS = 0, 1, 8
_DONE, _REPORTED, _RAISED, _ROW = 0, 1, 2, 8
# Bytes.
_ERRORS_AT, _ERROR_AREA = 1 << 24, 1 << 17
_LIST_AT, _MARKS_AT, _END = 1 << 36, 1 << 40, 1 << 41
_LONGEST_ERROR = _ERROR_AREA // 8  # letters, of up to four bytes


class QueueAddress(NamedTuple):
    """Where helpers find a board: the main process's leash, its descriptor of the memory, and its inode."""

    leash: ParentDeathSignal
    fd: int
    inode: int
    processes: int


class PrefetchQueue:
    """A board, made by the main process with :meth:`create`, seen by helpers through :meth:`attach`.

    Attributes:
        done: for each helper, the number of the last list that it is done with.
        reported: for each helper, how many errors it has left.
        raised: for each helper, how many of those were taken away.
    """

    def __init__(self, fd: int, leash: int | None, processes: int) -> None:
        self._fd = fd
        self._leash = leash
        self._processes = processes
        words: Words = np.frombuffer(mmap.mmap(fd, 8 * (_ROWS + processes * _ROW)), np.int64)
        rows = words[_ROWS:].reshape(processes, _ROW)
        self._words = words
        self.done, self.reported, self.raised = rows[:, _DONE], rows[:, _REPORTED], rows[:, _RAISED]

    @classmethod
    def create(cls, processes: int) -> PrefetchQueue:
        """Make an empty board for so many helpers.

        Raises:
            OSError: no descriptor is left.
        """
        fd = os.memfd_create("hotset-board", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _END)
            return cls(fd, None, processes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, address: QueueAddress) -> PrefetchQueue:
        """Attach to a board, in a helper, which dies with the board's process from now on.

        Raises:
            OSError: that process is gone.
        """
        leash = address.leash.tie()
        fd = os.open(f"/proc/{address.leash.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_ino != address.inode:
            raise OSError("the board that a helper was started for is gone")
        return cls(fd, leash, address.processes)

    @property
    def address(self) -> QueueAddress:
        """How helpers find this board while this process lives."""
        return QueueAddress(parent_death_signal(), self._fd, os.fstat(self._fd).st_ino, self._processes)

    # ---- lists ---------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the newest list: even, and odd while it is being written; 0 if there is none."""
        return int(self._words[_NUMBER])

    def post(self, ids: Ids) -> None:
        """Put up a new list, in the main process.

        Raises:
            OSError: there is no memory for it.
        """
        self._words[_NUMBER] += 1
        _write(self._fd, np.ascontiguousarray(ids, np.int64).tobytes(), _LIST_AT)
        self._words[_LENGTH] = len(ids)
        self._words[_NUMBER] += 1

    def newest(self) -> tuple[int, Ids] | None:
        """Return the newest list's number and ids; None if it is being written.

        On machines that reorder what they load this could be a mixture of two lists, in which every id was
        asked for once: that does no harm.
        """
        number = self.number
        ids = self._read(_LIST_AT, int(self._words[_LENGTH]))
        return (number, ids) if number % 2 == 0 and number == self.number else None

    def give_up(self, number: int, place: int) -> None:
        """Mark a place of a list: no helper is to try it again. In a later list that means nothing."""
        _write(self._fd, number.to_bytes(8, "little"), _MARKS_AT + 8 * place)

    def given_up(self, number: int, places: Ids) -> npt.NDArray[np.bool_]:
        """Which of these places of a list, in ascending order and at least one, are marked."""
        first, last = int(places[0]), int(places[-1])
        marks = self._read(_MARKS_AT + 8 * first, last + 1 - first)
        given_up: npt.NDArray[np.bool_] = marks[places - first] == number
        return given_up

    # ---- errors --------------------------------------------------------------------------------------

    def report(self, helper: int, error: Any) -> None:
        """Leave an error (an ``ExceptionWrapper``), unless this helper's last one is still there."""
        if self.reported[helper] != self.raised[helper]:
            return
        error.exc_msg = error.exc_msg[-_LONGEST_ERROR:]
        try:
            letter = pickle.dumps(error)
        except Exception:  # a class that was made in a function; the traceback names it
            error.exc_type = RuntimeError
            letter = pickle.dumps(error)
        _write(self._fd, letter, _ERRORS_AT + helper * _ERROR_AREA)
        self.reported[helper] += 1

    def take_error(self) -> ExceptionWrapper | None:
        """Take an error away, in the main process; None, after a microsecond or two, if there is none."""
        unraised = self.reported != self.raised
        if not unraised.any():
            return None
        helper = int(unraised.argmax())
        letter = os.pread(self._fd, _ERROR_AREA, _ERRORS_AT + helper * _ERROR_AREA)
        self.raised[helper] += 1
        error: ExceptionWrapper = pickle.loads(letter)
        return error

    # ---- life ----------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Wait, in a helper, which ends here too if the main process has."""
        assert self._leash is not None
        if select.select([self._leash], [], [], seconds)[0]:
            os._exit(0)

    def close(self) -> None:
        """Close the memory, in the main process; the mapping goes with its last view."""
        os.close(self._fd)

    def _read(self, offset: int, count: int) -> Words:
        words: Words = np.frombuffer(os.pread(self._fd, 8 * count, offset), np.int64)
        return words


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
