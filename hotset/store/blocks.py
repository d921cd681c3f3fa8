"""Blocks: memory for batches, recycled exactly when the last view of a batch dies.

Copying a batch costs a fraction of what the page faults of fresh memory cost (25 GB/s against 1.3 GB/s
measured), so a loader uses a few blocks that stay mapped, and, last in first out, in the processor's cache::

    free ── take ──> taken ── new_array ──> in use ── its last view dies ──> free
      ^                └── give_back ──┐
      └────────────────────────────────┘

A block in use has a ctypes array over the pool's mapping, and tensors are made over that array. The array
dies with the last tensor, slice, numpy view or storage that refers to it. The callback of a weak reference
then puts that reference on a list, from which the next :meth:`BlockPool.take` frees the block.

The callback runs in any thread, inside the allocation or collection that dropped the last view. So it takes
no lock, and is the list's own ``append``: an interrupt inside Python code would be lost there, and the block
with it.

Fork: private pools (``MAP_PRIVATE``) are copied on write, so child and parent each keep what they saw.
Pools that workers write into are shared, and a child might still read a batch that its parent has dropped. So
blocks that are in use at a fork are never recycled, unless the fork makes the pool's own workers, which read
no batches. A pool belongs to the process that made it; a child makes its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
import weakref
from typing import Any

from hotset.store import locks, memory_limits
from hotset.store.format import PAGE
from hotset.store.segment import Address
from hotset.store.standard_streams import beyond_standard

__all__ = ["BlockPool", "Blocks", "SharedBlocks", "making_workers"]

# Address space for the blocks of a shared pool; only those in use ever take memory.
_MOST_BLOCKS = 1 << 14
_MOST_BYTES = 1 << 44
# Of a limited address space (`ulimit -v`, a batch system's limit), of which the program needs the rest.
_SHARE = 1 / 16

_array_types: dict[int, Any] = {}


def _array_type(size: int) -> Any:
    kind = _array_types.get(size)
    if kind is None:
        kind = _array_types[size] = ctypes.c_uint8 * size
    return kind


class _ArrayRef(weakref.ref[Any]):
    """A weak reference to the array of a block in use."""

    __slots__ = ("number",)
    number: int


class BlockPool:
    """Blocks of one size in one mapping.

    Args:
        block_bytes: bytes of a block; rounded up to pages.
        shared: workers write into the blocks: they are in a memfd, at :attr:`address`.

    Attributes:
        block_bytes: bytes of each block.

    Raises:
        OSError: the limits of this process leave no room for a shared pool.
    """

    def __init__(self, block_bytes: int, *, shared: bool = False) -> None:
        self.block_bytes = max(-(-block_bytes // PAGE), 1) * PAGE
        self._numbers = itertools.count()
        self._shared = shared
        self._pid = os.getpid()
        self._free: list[int] = []
        self._taken: set[int] = set()
        self._in_use: dict[int, _ArrayRef] = {}
        self._dead: list[_ArrayRef] = []  # whose arrays have died
        self._maps: dict[int, mmap.mmap] = {}
        self._fd = -1
        if shared:
            with beyond_standard():
                self._fd = os.memfd_create("hotset-blocks", os.MFD_CLOEXEC)
            self._file = locks.file_of(self._fd)
            weakref.finalize(self, locks.close_own, self._fd, self._file).atexit = False
            most = max(min(_MOST_BLOCKS, _MOST_BYTES // self.block_bytes), 64)
            self._most = min(most, memory_limits.mappable(_SHARE) // self.block_bytes)
            if not self._most:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.ftruncate(self._fd, self.block_bytes * self._most)
            with beyond_standard():
                self._maps[0] = mmap.mmap(self._fd, self.block_bytes * self._most)
            _shared_pools.add(self)

    @property
    def address(self) -> Address:
        """Where workers find a shared pool's memory (its nonce is empty: the inode identifies it)."""
        fd = locks.own(self._fd, self._file)
        return Address(self._pid, fd, os.fstat(fd).st_ino, b"")

    @property
    def is_ours(self) -> bool:
        """Whether this process made the pool: after a fork the child needs its own."""
        return self._pid == os.getpid()

    @property
    def is_reachable(self) -> bool:
        """Whether workers find this shared pool: not once the program has closed its descriptor."""
        return self.is_ours and locks.file_of(self._fd) == self._file

    def take(self) -> int:
        """Return the number of a free block, making one if there is none. Never waits.

        The block is this caller's until :meth:`give_back`, or, after :meth:`new_array`, until its last view
        dies.

        Raises:
            MemoryError: as many blocks are in use as a shared pool has.
        """
        self._free_dead()
        try:
            number = self._free.pop()
            self._taken.add(number)
            return number
        except IndexError:
            number = next(self._numbers)  # atomic, like the pop: threads may share a pool
        if not self._shared:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            block = self._maps[number] = mmap.mmap(-1, self.block_bytes, flags=flags)
            with contextlib.suppress(OSError):  # a kernel without them
                # With small pages a tenth of a copy's time goes into looking up their addresses.
                block.madvise(mmap.MADV_HUGEPAGE)
        elif number >= self._most:
            raise MemoryError(
                f"{self._most:,} batches are held at once, more than a pool of blocks holds; "
                "copy what you keep with `.clone()`."
            )
        self._taken.add(number)
        return number

    def new_array(self, number: int) -> Any:
        """Return an array over a taken block; when the last view of it dies, the block is free again."""
        if self._shared:
            array = _array_type(self.block_bytes).from_buffer(self._maps[0], number * self.block_bytes)
        else:
            array = _array_type(self.block_bytes).from_buffer(self._maps[number])
        reference = _ArrayRef(array, self._dead.append)
        reference.number = number
        self._in_use[number] = reference
        self._taken.discard(number)
        return array

    def _free_dead(self) -> None:
        """Free the blocks whose last views have died."""
        while self._dead:
            try:
                dead = self._dead.pop(0)  # so that the last one is on top of the free ones
            except IndexError:  # another thread was faster
                return
            # A fork may have retired the block, or a child's copy of this object has made another array.
            if self._in_use.get(dead.number) is dead:
                del self._in_use[dead.number]
                self._free.append(dead.number)

    def array_of(self, number: int) -> Any:
        """Return the array of a block; makes one unless the block is in use."""
        self._free_dead()
        reference = self._in_use.get(number)
        array = reference() if reference is not None else None
        if array is not None:
            return array
        with contextlib.suppress(ValueError):
            self._free.remove(number)
        return self.new_array(number)

    def give_back(self, number: int) -> None:
        """Free a taken block; does nothing if the block is in use."""
        if number in self._taken:
            self._taken.discard(number)
            self._free.append(number)

    def trim(self, kept_bytes: int = 0) -> None:
        """Return the memory of a shared pool's free blocks to the kernel; they can be taken as before.

        Args:
            kept_bytes: bytes of free blocks that keep their memory: of those that are taken next.
        """
        self._free_dead()
        for number in self._free[: max(len(self._free) - kept_bytes // self.block_bytes, 0)]:
            self._maps[0].madvise(mmap.MADV_REMOVE, number * self.block_bytes, self.block_bytes)

    def retire(self) -> None:
        """Never recycle the blocks that are in use now: another process may read them."""
        self._free_dead()
        self._in_use.clear()


class Blocks:
    """Blocks of a private pool; one that is too small, or a parent's, gives way to another."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None

    def array(self, size: int) -> Any:
        """Return an array over a block of at least so many bytes, recycled when its last view dies."""
        pool = self._pool
        if pool is None or not pool.is_ours or pool.block_bytes < size:
            # Batches vary in size: a quarter more, so that not every larger one needs a new pool.
            pool = self._pool = BlockPool(size if pool is None else size + size // 4)
        return pool.new_array(pool.take())


_shared_pools: weakref.WeakSet[BlockPool] = weakref.WeakSet()
# Its owner is the thread that makes workers. A flag would have to be reset, and an interrupt may come before
# that; the lock is released by C code, before which no interrupt comes.
_making: Any = threading.RLock()


def _before_fork() -> None:
    if not _making._is_owned():
        for pool in list(_shared_pools):
            pool.retire()


def _after_fork_in_child() -> None:
    global _making
    _making = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def making_workers() -> contextlib.AbstractContextManager[object]:
    """Forks inside this block make loader workers, which do not read the batches of their parent."""
    return _making  # type: ignore[no-any-return]


class SharedBlocks:
    """A shared pool as a worker sees it: memory to write batches into.

    Raises:
        OSError: the pool's process is gone; or this process has no address space left (``ENOMEM``).
    """

    @beyond_standard()
    def __init__(self, address: Address, block_bytes: int) -> None:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if status.st_ino != address.inode:
                raise OSError(f"process {address.pid} has closed its pool of blocks")
            self._map = mmap.mmap(fd, status.st_size)
        finally:
            os.close(fd)
        self.block_bytes = block_bytes

    def array(self, number: int) -> Any:
        """Return the block's memory."""
        return _array_type(self.block_bytes).from_buffer(self._map, number * self.block_bytes)
