"""Locks on single bytes of a file, which the kernel drops when their holder dies.

They are *open file description* locks (``F_OFD_SETLK``): a lock belongs to what one ``open()`` made, and
ends when the last descriptor of that description closes, so also on ``kill -9``. What else was at hand:

- POSIX record locks (``F_SETLK``) belong to a process and vanish as soon as *any* descriptor of that file
  closes, for example one that a library opened and closed in passing;
- ``flock`` covers a whole file, and this system wants thousands of locks in one;
- semaphores and mutexes in shared memory are not released by a death (robust ones need compiled code).

Who excludes whom follows from "belongs to a description":

====================================================  =====================================================
two descriptions, in one process or in two            exclude each other
threads, or a parent and its forked child,            do **not**: each sees the lock as its own, and
on one description                                    either can drop it with :func:`unlock`
a forked child closes the inherited descriptor        the parent's lock stays
the parent dies, a forked child still has a copy      **stays locked** until that child closes it too
====================================================  =====================================================

So every process opens a description of its own (:func:`reopen`), and a forked child closes the inherited
descriptors: otherwise it keeps its dead parent "alive". Threads of a process need a ``threading.Lock``
besides.

Nothing here waits in the kernel (``F_OFD_SETLKW``): a holder that was stopped by SIGSTOP or a debugger
would hang everyone behind it for ever. :func:`lock` tries, sleeps and tries again up to its deadline.

A byte need not exist in the file: locks may lie beyond its end.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time

__all__ = ["is_locked", "lock", "reopen", "try_lock", "unlock"]

# struct flock on 64-bit Linux: l_type, l_whence, (4 bytes of padding), l_start, l_len, l_pid, (4 more).
# l_pid must be zero for these commands, or the kernel answers EINVAL.
_FLOCK = struct.Struct("@hhqqi4x")
_pack = _FLOCK.pack

# The first pause is shorter than a claim is held, the longest short beside the time to read a sample.
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 2e-3


def reopen(fd: int) -> int:
    """Return a descriptor of a new open file description of the file behind ``fd``.

    It is open for reading and writing, is not inherited across ``exec``, and is the caller's to close.
    The way is ``/proc/self/fd``, so it works for memfds and for files that were unlinked meanwhile.

    Raises:
        OSError: ``fd`` is not open, the file may not be written, or ``/proc`` is not mounted.

    Example:
        >>> first = os.memfd_create("example")
        >>> second = reopen(first)
        >>> try_lock(first, 0), try_lock(second, 0)
        (True, False)
        >>> os.close(first), os.close(second)
        (None, None)
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def try_lock(fd: int, byte: int, shared: bool = False) -> bool:
    """Lock ``byte`` for the description of ``fd``; False if another one's lock is in the way.

    Never waits. A shared lock goes together with other shared locks (``fd`` must be readable), an
    exclusive one with none (``fd`` must be writable). A description that holds the byte already is told
    True, and its lock changes to the kind asked for.

    Raises:
        OSError: anything but contention: a closed ``fd``, a negative ``byte``, no lock memory left.
    """
    try:
        fcntl.fcntl(
            fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        )
    except BlockingIOError:
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Drop this description's lock of ``byte``; nothing happens if it has none."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether *another* description holds ``byte``, shared or exclusive. Own locks do not count.

    The answer may be out of date when it arrives; to act on "nobody has it", take it with :func:`try_lock`.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def lock(fd: int, byte: int, timeout: float) -> bool:
    """Lock ``byte`` exclusively, waiting up to ``timeout`` seconds; False if it was still taken then.

    It tries at least once, also with a timeout of zero, and once more when the time is over. Waiters are
    not served in order: whoever tries first after the release gets it.

    Raises:
        OSError: as :func:`try_lock`.
    """
    if try_lock(fd, byte):
        return True
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE_S
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        if try_lock(fd, byte):
            return True
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return False
