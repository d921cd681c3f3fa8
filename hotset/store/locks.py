"""Locks on single bytes of a file, which the kernel drops when their holder dies.

They are *open file description* locks (``F_OFD_SETLK``): a lock belongs to what one ``open()`` made, and
ends when the last descriptor of that description closes, so also on ``kill -9``. The alternatives:

- POSIX record locks (``F_SETLK``) belong to a process and vanish as soon as *any* descriptor of that file
  closes, for example one that a library opened and closed;
- ``flock`` covers a whole file, and this system wants thousands of locks in one;
- semaphores and mutexes in shared memory are not released by a death (robust ones need compiled code).

Which locks exclude each other follows from "belongs to a description":

====================================================  =====================================================
two descriptions, in one process or in two            exclude each other
threads, or a parent and its forked child,            do **not**: each sees the lock as its own, and
on one description                                    either can drop it with :func:`unlock`
a forked child closes the inherited descriptor        the parent's lock stays
the parent dies, a forked child still has a copy      **stays locked** until that child closes it too
====================================================  =====================================================

So every process opens a description of its own (:func:`reopen`), and a forked child closes the inherited
descriptors: otherwise it keeps its dead parent "alive". Threads that exclude each other have one each, so no
``threading.Lock`` stands beside a file's lock, for a fork to catch. :class:`FileLock` does all of this.

**Interrupts.** A signal's handler, and with it ``KeyboardInterrupt``, runs in the main thread wherever a
Python function begins, a loop goes round or a call returns. So a lock that is given back by a Python function
(an ``__exit__``, a generator's ``finally``) may stay taken: the exception comes before its first line. A
``with`` block over a :class:`Held` is left by *one call of C code*, which no handler comes before; entering
it is Python, which undoes what it did if it is interrupted. Only the kernel knows which locks are held: no
count or flag is kept beside it.

Nothing here waits in the kernel (``F_OFD_SETLKW``): a holder that was stopped by SIGSTOP or a debugger
would hang everyone behind it for ever. :func:`lock` tries, sleeps and tries again up to its deadline.

A byte need not exist in the file: locks may lie beyond its end.

A program that closes all descriptors (:func:`os.closerange`, as one that becomes a daemon does) ends the
locks too, and what it opens next gets their numbers. So a number is used only while the file behind it is the
one that it was (:func:`own`): nothing of the program's is locked, written to or closed, and what needs a lock
gets an ``OSError``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import operator
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable

from hotset.store.standard_streams import beyond_standard

__all__ = [
    "Description",
    "FileLock",
    "Held",
    "Pauses",
    "can_reopen",
    "close_own",
    "file_of",
    "is_locked",
    "is_shared",
    "lock",
    "own",
    "reopen",
    "try_lock",
    "unlock",
]

# struct flock on 64-bit Linux: l_type, l_whence, (4 bytes of padding), l_start, l_len, l_pid, (4 more).
# l_pid must be zero for these commands, or the kernel answers EINVAL.
_FLOCK = struct.Struct("@hhqqi4x")
_pack = _FLOCK.pack

# fcntl() as `with` calls an __exit__: with the three arguments that tell of an exception, which it ignores.
# PyDLL keeps the interpreter's lock: giving it up and getting it back costs more than the call.
_fcntl = ctypes.PyDLL(None).fcntl
_fcntl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, *[ctypes.py_object] * 3]
_fcntl.restype = None


File = tuple[int, int]  # device and inode


class Pauses:
    """The pauses between attempts at something that another process holds up: each twice as long as the last.

    Args:
        patience: seconds until there are no more of them.
        first, longest: seconds. As they are, the first is shorter than a claim is held, and the longest short
            beside the time to read a sample.
    """

    def __init__(self, patience: float, first: float = 20e-6, longest: float = 2e-3) -> None:
        self._deadline = time.monotonic() + patience
        self._next, self._longest = first, longest

    @property
    def are_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._deadline

    def pause(self) -> bool:
        """Sleep; False, and no sleep, if the time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next, left))
        self._next = min(2 * self._next, self._longest)
        return True


def file_of(fd: int, fstat: Callable[[int], os.stat_result] = os.fstat) -> File | None:
    """Which file is behind ``fd``; None if it is closed."""
    # Bound above, here and below: when the interpreter ends, this module's own names may be gone already.
    try:
        status = fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def own(fd: int, file: File | None) -> int:
    """Return ``fd``, once it is known to be still of that file.

    Raises:
        OSError: the program has closed it, and it is another file's now, or nobody's.
    """
    if fd < 0 or file_of(fd) != file:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return fd


def close_own(
    fd: int,
    file: File | None,
    file_of: Callable[[int], File | None] = file_of,
    close: Callable[[int], None] = os.close,
) -> None:
    """Close ``fd``, if it is still of that file."""
    if fd >= 0 and file_of(fd) == file:
        close(fd)


@beyond_standard()
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


def can_reopen() -> bool:
    """Whether ``/proc`` is mounted: without it no process has its own locks, or reaches another's memory.

    One that shows the processes of another namespace (``unshare --pid`` without ``--mount-proc``) does not
    count: what it has under the number of a process here is somebody else's.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def try_lock(fd: int, byte: int, shared: bool = False, length: int = 1) -> bool:
    """Lock ``byte`` for the description of ``fd``; False if another one's lock is in the way.

    With ``length`` it is that many bytes from there on, and with ``length=0`` all of them.

    Never waits. A shared lock goes together with other shared locks (``fd`` must be readable), an
    exclusive one with none (``fd`` must be writable). For a description that holds the byte already
    the result is True, and its lock changes to the kind asked for.

    Raises:
        OSError: anything but contention: a closed ``fd``, a negative ``byte``, no lock memory left.
    """
    try:
        kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(kind, os.SEEK_SET, byte, length, 0))
    except BlockingIOError:
        return False
    return True


def unlock(fd: int, byte: int, length: int = 1) -> None:
    """Drop this description's lock of ``byte``; nothing happens if it has none. See :func:`try_lock`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_UNLCK, os.SEEK_SET, byte, length, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether *another* description holds ``byte``, shared or exclusive. Own locks do not count.

    The answer may be out of date when it arrives; to act on "it is free", take it with :func:`try_lock`.
    """
    return _kind_held(fd, byte) != fcntl.F_UNLCK


def is_shared(fd: int, byte: int) -> bool:
    """Whether *another* description holds ``byte`` shared; see :func:`is_locked`."""
    return _kind_held(fd, byte) == fcntl.F_RDLCK


def _kind_held(fd: int, byte: int) -> int:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return int(_FLOCK.unpack(answer)[0])


def lock(fd: int, byte: int, timeout: float) -> bool:
    """Lock ``byte`` exclusively, waiting up to ``timeout`` seconds; False if it was still taken then.

    It tries at least once, also with a timeout of zero, and once more when the time is over. Waiters are
    not served in order: the process that tries first after the release gets the lock.

    Raises:
        OSError: as :func:`try_lock`.
    """
    if try_lock(fd, byte):
        return True
    pauses = Pauses(timeout)
    while pauses.pause():
        if try_lock(fd, byte):
            return True
    return False


class Description:
    """A descriptor, by its number; it is closed with this object, and in a forked child.

    Locks are taken once it is in here, so that an interrupt leaves at worst a descriptor without a lock.

    Attributes:
        value: the number; -1 when it is closed.
    """

    _fd = -1
    _file: File | None = None

    def __init__(self, fd: int = -1) -> None:
        self.value = fd
        _descriptions.add(self)

    @property
    def value(self) -> int:
        return self._fd

    @value.setter
    def value(self, fd: int) -> None:
        self._fd, self._file = fd, file_of(fd)

    _as_parameter_ = property(operator.attrgetter("_fd"))  # what ctypes passes for it

    def own(self) -> Description:
        """Return itself.

        Raises:
            OSError: see :func:`own`.
        """
        own(self._fd, self._file)
        return self

    def close(self, close_own: Callable[[int, File | None], None] = close_own) -> None:
        """Close it, and with it end all its locks."""
        fd, self._fd = self._fd, -1
        close_own(fd, self._file)

    def __del__(self) -> None:
        self.close()


class Held:
    """A file's byte, locked while a ``with`` block runs, which no interrupt leaves locked.

    The block gets False if another description still holds the byte after ``patience`` seconds. Blocks over
    one byte of one description must not lie within each other: the inner one's end would unlock it.

    Args:
        description: by which it is locked; it lives as long as the block.
        byte: which.
        shared: others may have it too, shared.
        patience: seconds.
        length: how many bytes the block's end unlocks; 0: all from this one on.
    """

    def __init__(
        self,
        description: Description,
        byte: int,
        *,
        shared: bool = False,
        patience: float = 0.0,
        length: int = 1,
    ) -> None:
        self.description = description
        self.byte = byte
        self._shared = shared
        self._patience = patience
        nothing = _pack(fcntl.F_UNLCK, os.SEEK_SET, byte, length, 0)
        self._unlock = functools.partial(_fcntl, description, fcntl.F_OFD_SETLK, nothing)

    def take(self) -> bool:
        """Lock the byte; the block's end, or an exception in here, unlocks it.

        Raises:
            OSError: as :func:`try_lock`.
        """
        if self._shared:
            return try_lock(self.description.value, self.byte, shared=True)
        return lock(self.description.value, self.byte, self._patience)

    def __enter__(self) -> bool:
        try:
            return self.take()
        except BaseException:
            self._unlock(None, None, None)
            raise

    # Found by C code alone, and C code itself: see the module's description.
    __exit__ = property(operator.attrgetter("_unlock"))


class FileLock:
    """The locks of one object on the bytes of one file, by descriptions that it opens when they are needed.

    ==================  =================================  =====================================
    a lock lasts for    it belongs to                      it ends with
    ==================  =================================  =====================================
    the object's life   :meth:`process`, :func:`try_lock`  :func:`unlock`, :meth:`close`, the process
    a ``with`` block    :meth:`thread`, :class:`Held`      the block
    ==================  =================================  =====================================

    A forked child starts without any: its copies of the descriptors are closed, its parent keeps the locks,
    and ``forked`` is called. In the child, that is the place to lock again and to renew a ``threading.Lock``.

    Args:
        file: returns a descriptor of the file. It must not hold a reference to the owner of this object.
        forked: a method of the owner, which is referenced weakly; an OSError in it is ignored.
    """

    def __init__(self, file: Callable[[], int], forked: Callable[[], object] | None = None) -> None:
        self._file = file
        self._forked = weakref.WeakMethod(forked) if forked is not None else None
        self._process = os.getpid()
        # By thread, whose number is used again after its end; 0 is no thread's, and stands for the process.
        self._own: dict[int, Description] = {}
        _file_locks.add(self)

    def process(self) -> Description:
        """Return the description of this process, by which no block locks anything.

        Raises:
            OSError: as :func:`reopen` and :func:`own`.
        """
        return self._description(0)

    def thread(self) -> Description:
        """Return the description of this thread, for :class:`Held`.

        Raises:
            OSError: as :func:`reopen` and :func:`own`.
        """
        return self._description(threading.get_ident())

    def _description(self, of: int) -> Description:
        self.notice_fork()
        description = self._own.get(of)
        if description is None:
            # Two threads may come here for the process: one call of C code keeps the first one's.
            description = self._own.setdefault(of, Description(reopen(self._file())))
        return description.own()

    def close(self) -> None:
        """Close them all, and with them end all locks; they are opened anew when they are needed."""
        while self._own:
            self._own.popitem()[1].close()

    def notice_fork(self) -> None:
        """Do what ``os.fork()`` does in a child, unless that was done.

        An interrupt in there is dropped by Python, and the rest is left out.
        """
        if self._process != os.getpid():
            self.close()
            self.after_fork()

    def after_fork(self) -> None:
        """Call ``forked``; ``os.fork()`` calls this in the child, where all descriptions are closed."""
        self._process = os.getpid()
        forked = self._forked() if self._forked is not None else None
        if forked is not None:
            with contextlib.suppress(OSError):
                forked()


_descriptions: weakref.WeakSet[Description] = weakref.WeakSet()
_file_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for description in list(_descriptions):
        description.close()
    file_locks = list(_file_locks)
    for file_lock in file_locks:
        file_lock.close()
    for file_lock in file_locks:
        file_lock.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
