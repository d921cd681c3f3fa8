"""The parent-death signal: the kernel kills a process's children when it dies, however it dies.

It is a pipe whose only writing end is in the parent process. Nothing is ever written to it. A child that arms
the signal opens the reading end with ``O_ASYNC``, so that the kernel sends it SIGKILL when the last writing
end closes, even while the child blocks in a read from a disk that is gone.

Rejected: ``PR_SET_PDEATHSIG``, which follows the *thread* that forked, and a thread may end long before its
process. Also rejected: polling the parent's id. A read may take a minute; and a child that polls for the
first time after its parent died would take the process that adopted it for its parent, and live for ever.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from typing import NamedTuple

from hotset.store import locks
from hotset.store.standard_streams import beyond_standard

__all__ = ["ParentDeathSignal", "parent_death_signal"]

_GONE = "the parent process is gone"


class ParentDeathSignal(NamedTuple):
    """Where children find the pipe of a process, while that process lives; it pickles.

    Example:
        >>> parent = parent_death_signal()
        >>> child = os.fork()
        >>> if child == 0:
        ...     end = parent.arm()  # from now on it dies with its parent
        ...     os._exit(0)
        >>> os.waitpid(child, 0)[1]
        0
    """

    pid: int
    fd: int
    inode: int

    @beyond_standard()
    def arm(self) -> int:
        """Have the kernel kill this process when the parent dies.

        Returns:
            A descriptor that becomes readable when the parent dies.

        Raises:
            ProcessLookupError: the parent is gone already.
            OSError: no descriptor is left, or /proc hides the parent's descriptors.
        """
        try:
            end = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            if not locks.can_reopen():
                raise OSError("/proc is not mounted here") from None
            raise ProcessLookupError(_GONE) from None
        if os.fstat(end).st_ino != self.inode:
            os.close(end)
            raise ProcessLookupError(_GONE)
        fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        if select.select([end], [], [], 0)[0]:  # the parent died before the signal was armed
            os.close(end)
            raise ProcessLookupError(_GONE)
        return end

    def arm_in_worker(self, worker: int) -> None:
        """As :meth:`arm`, as the ``worker_init_fn`` of a loader; exits if the parent is gone already.

        Where the signal cannot be armed (no descriptor is left, for example), torch's own check remains.
        """
        try:
            self.arm()
        except ProcessLookupError:
            os._exit(1)
        except OSError:
            pass


_ends: list[tuple[int, locks.File | None]] = []


def parent_death_signal() -> ParentDeathSignal:
    """This process as a parent. Its pipe is made at first use, and lasts until the process ends.

    Raises:
        OSError: no descriptor is left.
    """
    # A program that has closed all descriptors has closed these, and what it opened since has their numbers.
    if not all(locks.file_of(fd) == file for fd, file in _ends):
        _close_ends()
    if not _ends:
        with beyond_standard():
            _ends.extend((fd, locks.file_of(fd)) for fd in os.pipe())
    fd = _ends[0][0]
    return ParentDeathSignal(os.getpid(), fd, os.fstat(fd).st_ino)


def _close_ends() -> None:
    """Close the ends; in a forked child, whose siblings would outlive the parent, those that it inherited."""
    while _ends:
        locks.close_own(*_ends.pop())


os.register_at_fork(after_in_child=_close_ends)
