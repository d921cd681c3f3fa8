"""The leash: by which the kernel kills children of a process when that dies, however it does.

It is a pipe whose only writing end is in the process that made the children. Nothing is ever written to it.
A child that is tied to it has a reading end with ``O_ASYNC``, so that the kernel sends a signal, here
SIGKILL, when the last writing end closes; in the midst of a read from a disk that is gone, too.

Rejected: ``PR_SET_PDEATHSIG``, which looks at the *thread* that forked, and that may end long before its
process; and asking for the parent's id now and then. A read may take a minute; and who first asks when its
parent has just died takes whoever adopts orphans for its parent, and lives for ever.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from typing import NamedTuple

from hotset.store.locks import can_reopen

__all__ = ["ParentDeathSignal", "parent_death_signal"]

_GONE = "the process that this one is to die with is gone"


class ParentDeathSignal(NamedTuple):
    """Where a process's leash is found, while that lives; it pickles.

    Example:
        >>> leash = parent_death_signal()
        >>> child = os.fork()
        >>> if child == 0:
        ...     end = leash.tie()  # from now on it dies with its parent
        ...     os._exit(0)
        >>> os.waitpid(child, 0)[1]
        0
    """

    pid: int
    fd: int
    inode: int

    def tie(self) -> int:
        """Have this process die with that one; returns a descriptor that is readable once that is dead.

        Raises:
            ProcessLookupError: it is gone already.
            OSError: no descriptor is left, or what it has open is hidden from this process.
        """
        try:
            end = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            if not can_reopen():
                raise OSError("/proc is not mounted here") from None
            raise ProcessLookupError(_GONE) from None
        if os.fstat(end).st_ino != self.inode:
            os.close(end)
            raise ProcessLookupError(_GONE)
        fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        if select.select([end], [], [], 0)[0]:  # before the signal was ordered
            os.close(end)
            raise ProcessLookupError(_GONE)
        return end


_ends: tuple[int, int] | None = None


def parent_death_signal() -> ParentDeathSignal:
    """This process's leash, which is made at first use and lasts until its end.

    Raises:
        OSError: no descriptor is left.
    """
    global _ends
    if _ends is None:
        _ends = os.pipe()
    return ParentDeathSignal(os.getpid(), _ends[0], os.fstat(_ends[0]).st_ino)


def _let_go() -> None:
    """Close, in a forked child, the ends that it has inherited: they would hold its siblings alive."""
    global _ends
    if _ends is not None:
        for end in _ends:
            os.close(end)
        _ends = None


os.register_at_fork(after_in_child=_let_go)
