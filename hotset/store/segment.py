"""A segment: one sparse file, mapped whole, with numpy views of its words.

The same class serves every tier:

=================  ===========================================================================================
a memfd            private caches, and the ranks of one job. It has no name, so nothing can be left behind;
                   other processes of the same user reach it through ``/proc/<pid>/fd/<fd>``, and identify it
                   by inode and nonce. It is sealed against shrinking, which would turn touches into SIGBUS
a file, tmpfs      the caches of a session, which outlive jobs
a nameless file    what a private cache spills to a disk: it ends with the last process that has it open
a file, disk       what a session spills
=================  ===========================================================================================

Records in memory (the first two) are trusted: they are not older than the machine's last boot, only this
user's processes have written them, and an index word is published after its record. Records on a disk are
verified: a disk may return anything.

Creating a segment touches its header and nothing else: a 100 GiB one costs microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
import stat
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store import locks, memory_limits
from hotset.store.format import (
    HEADER_BYTES,
    LIVE_AT,
    LIVE_WORDS,
    METADATA_CRC_AT,
    SLOT_WORDS,
    SLOTS,
    Geometry,
    Live,
    Slot,
    pack_header,
    unpack_header,
)
from hotset.store.standard_streams import beyond_standard

__all__ = ["Address", "Segment", "attach_second", "read_metadata", "require_index_room"]

Words = npt.NDArray[np.int64]

_libc = ctypes.CDLL(None)

_LARGEST_METADATA = 16 << 20
_MADV_POPULATE_READ = 22


class Address(NamedTuple):
    """Where another process finds a memfd: a process that has it open, the descriptor there, its identity."""

    pid: int
    fd: int
    inode: int
    nonce: bytes


class Segment:
    """A mapped segment file. Make one with :meth:`create`, or :meth:`attach` to an existing one.

    Attributes:
        fd: descriptor of the file; never used for locks (see :mod:`hotset.store.locks`).
        geometry: sizes and offsets.
        metadata: the JSON object stored with it.
        nonce: 16 random bytes that identify it.
        buffer: the whole mapping.
        live: the header's live words (see :class:`hotset.store.format.Live`).
        slots: array of shape (1024, 24).
        index: array of shape (samples,).
        trusted: True in memory; records on a disk, which may be damaged, are verified at their first use.
        bounded: whether the size of a file system bounds it, besides the machine's memory.
    """

    def __init__(self, fd: int, geometry: Geometry, nonce: bytes, *, named: bool) -> None:
        self.fd = fd
        self._file = locks.file_of(fd)
        self.geometry = geometry
        self.nonce = nonce
        self.trusted = _is_in_memory(fd)
        self.bounded = named or not self.trusted
        self.metadata: dict[str, Any] = read_metadata(fd, geometry)
        self.buffer = mmap.mmap(fd, geometry.size)
        self.live: Words = np.frombuffer(self.buffer, np.int64, LIVE_WORDS, LIVE_AT)
        self.slots: Words = np.frombuffer(
            self.buffer, np.int64, SLOTS * SLOT_WORDS, geometry.slots_at
        ).reshape(SLOTS, SLOT_WORDS)
        self.index: Words = np.frombuffer(self.buffer, np.int64, geometry.samples, geometry.index_at)

    @classmethod
    @beyond_standard()
    def create(
        cls,
        geometry: Geometry,
        metadata: bytes = b"",
        *,
        path: str | None = None,
        folder: str | None = None,
        limit: int,
    ) -> Segment:
        """Create a segment of that geometry, a memfd unless ``path`` or ``folder`` is given.

        Args:
            geometry: with ``geometry.metadata == len(metadata)``.
            metadata: a JSON object, encoded.
            path: a new file on a tmpfs or a disk, which must not exist.
            folder: a folder of the disk on which a nameless file is created.
            limit: bytes that its extents may take together.

        Raises:
            OSError: the file cannot be created.
        """
        nameless = path is None and folder is None
        if nameless:
            fd = os.memfd_create("hotset", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        elif path is not None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        else:
            assert folder is not None
            fd = _open_nameless(folder)
        try:
            os.ftruncate(fd, geometry.size)
            if nameless:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            else:
                # All bytes before the first row may be touched at any time: on a full file system there must
                # be an error now, not SIGBUS then.
                os.posix_fallocate(fd, 0, geometry.rows_at)
            nonce = secrets.token_bytes(16)
            # The header is written last: a file without it is not a segment yet.
            os.pwrite(fd, metadata, HEADER_BYTES)
            os.pwrite(fd, limit.to_bytes(8, "little"), LIVE_AT + 8 * Live.LIMIT)
            os.pwrite(fd, zlib.crc32(metadata).to_bytes(4, "little"), METADATA_CRC_AT)
            os.pwrite(fd, pack_header(geometry, nonce), 0)
            return cls(fd, geometry, nonce, named=path is not None)
        except BaseException:
            os.close(fd)
            if path is not None:
                os.unlink(path)
            raise

    @classmethod
    @beyond_standard()
    def attach(cls, where: str | Address) -> Segment:
        """Map an existing segment: a file's path, or a memfd's :class:`Address`.

        Raises:
            SegmentError: it is gone, truncated, forged, damaged, or not the one that the address names.
        """
        path = where if isinstance(where, str) else f"/proc/{where.pid}/fd/{where.fd}"
        name = where if isinstance(where, str) else "the cache's shared memory"
        follow = 0 if isinstance(where, Address) else os.O_NOFOLLOW
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | follow)
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            raise SegmentError(f"{name} cannot be opened: {error}.") from error
        try:
            return cls._attach(fd, where, name)
        except SegmentError:
            os.close(fd)
            raise
        except (OSError, ValueError, OverflowError, MemoryError, RecursionError) as error:
            os.close(fd)
            raise SegmentError(f"{name} is not a usable hotset segment: {error}.") from error

    @classmethod
    def _attach(cls, fd: int, where: str | Address, name: str) -> Segment:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SegmentError(f"{name} is not a usable hotset segment: it must be a regular file.")
        if status.st_uid != os.geteuid() or (isinstance(where, str) and status.st_nlink != 1):
            raise SegmentError(
                f"{name} is not safe to use: this user must own it, and it must have no other hard link."
            )
        if isinstance(where, Address) and status.st_ino != where.inode:
            raise SegmentError(f"{name} is gone: process {where.pid} has another file there now.")
        geometry, nonce = unpack_header(os.pread(fd, HEADER_BYTES, 0), status.st_size, name)
        if isinstance(where, Address) and nonce != where.nonce:
            raise SegmentError(f"{name} is gone: process {where.pid} has another cache there now.")
        return cls(fd, geometry, nonce, named=isinstance(where, str))

    @property
    def address(self) -> Address:
        """Where another process of this user finds this segment while this process lives."""
        return Address(os.getpid(), self.fd, os.fstat(self.own_fd()).st_ino, self.nonce)

    @property
    def used_index(self) -> Words:
        """The index words that may name anything: all, or of a stream those whose sample ids are in use."""
        count = int(self.live[Live.STREAM_IDS])
        return self.index[:count] if count else self.index

    @property
    def samples(self) -> int:
        """The length of the dataset; of a stream, how many samples it gave so far."""
        if not self.live[Live.STREAM_IDS]:
            return self.geometry.samples
        return int(self.slots[:, Slot.PART_GIVEN].sum())

    @property
    def clear_generation(self) -> int | None:
        """The clear generation; None during a clear, and once the segment is invalidated."""
        clear_generation = int(self.live[Live.CLEAR_GENERATION])
        return None if clear_generation % 2 or self.live[Live.INVALIDATED] else clear_generation

    @property
    def is_being_cleared(self) -> bool:
        """Whether a process is clearing it, or has died over that: no record may be published now."""
        return bool(self.live[Live.CLEAR_GENERATION] & 1)

    @property
    def taken(self) -> int:
        """Bytes that records have taken, or that processes have reserved for them."""
        return self.geometry.taken(int(self.live[Live.ROWS_NEXT]), int(self.live[Live.LINES_NEXT]))

    def reserve(self, offset: int, length: int) -> bool:
        """Allocate memory or disk space for ``length`` bytes at ``offset``; False if there is none.

        To be called before the first touch: a write to a page that a full tmpfs cannot allocate is SIGBUS.
        """
        try:
            os.posix_fallocate(self.own_fd(), offset, length)
        except OSError as error:
            if error.errno == errno.EINVAL or self.fd < 0:
                raise  # a length that cannot be allocated, or closed: a bug
            return False  # the file system is full, failing or read-only, or the program closed this
        return True

    def own_fd(self) -> int:
        """The descriptor, once it is known to be this file's still.

        Raises:
            OSError: see :func:`hotset.store.locks.own`.
        """
        return locks.own(self.fd, self._file)

    def write(self, data: memoryview, offset: int) -> None:
        """Write to the file, not through the mapping, so that its pages are not faulted in.

        Raises:
            OSError: the file system cannot store it, or this segment is closed.
        """
        while len(data):
            written = os.pwrite(self.own_fd(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, offset: int, into: memoryview) -> bool:
        """Read from the file, not through the mapping; False if that fails: a broken disk, a closed file."""
        while len(into):
            try:
                count = os.preadv(self.own_fd(), [into], offset)
            except OSError:
                return False
            if not count:
                return False
            into, offset = into[count:], offset + count
        return True

    def read_ahead(self, offset: int, length: int) -> None:
        """Have the kernel begin to read these bytes from the disk, without waiting for them."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_WILLNEED)

    def populate(self, offset: int, length: int) -> None:
        """Map these pages into this process now, so that no later touch faults (Linux 5.14)."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        # Not mmap's own method, which holds the interpreter meanwhile. An older kernel refuses, and pages are
        # mapped at their first touch.
        address = ctypes.c_void_p(self.live.ctypes.data - LIVE_AT + start)
        size = ctypes.c_size_t(offset + length - start)
        _libc.madvise(address, size, _MADV_POPULATE_READ)

    def discard(self, offset: int, length: int) -> None:
        """Free the memory of these whole pages; they read as zeros from then on."""
        if length > 0:
            self.buffer.madvise(mmap.MADV_REMOVE, offset, length)

    def close(self) -> None:
        """Close the descriptor. The mapping itself ends with the last view of it."""
        fd, self.fd = self.fd, -1
        locks.close_own(fd, self._file)


def require_index_room(geometry: Geometry) -> None:
    """Refuse a segment whose index alone is too large: any word of it may be touched at any time.

    Raises:
        OSError: there is not that much memory; this is not checked again later.
    """
    free = memory_limits.headroom()
    if geometry.rows_at > free.bytes:
        raise OSError(
            errno.ENOMEM,
            f"the index of {geometry.samples:,} samples takes {geometry.rows_at:,} bytes of memory, "
            f"and {free.what} has {free.bytes:,} to give",
        )


def attach_second(where: str | Address, said: dict[str, Any]) -> Segment:
    """Attach to a cache's second segment, on a disk.

    Args:
        where: the first one's place. A process that has the first open has the second open as well.
        said: what the first one's metadata say of it: its path, or its inode and nonce if it has no name.

    Raises:
        SegmentError: it is gone, or damaged.
    """
    if "path" in said:
        return Segment.attach(str(said["path"]))
    if isinstance(where, Address):
        inode, nonce = int(said["inode"]), bytes.fromhex(said["nonce"])
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{where.pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{where.pid}/fd/{fd}").st_ino == inode:
                        return Segment.attach(Address(where.pid, int(fd), inode, nonce))
    raise SegmentError("the cache's spill file is out of reach: the process that had it open has closed it.")


def _is_in_memory(fd: int) -> bool:
    """Whether a file's pages are memory: only such files (memfds, tmpfs) have seals."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _open_nameless(folder: str) -> int:
    """Create a file in that folder that never has a name, or loses it at once."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    path = f"{folder}/{secrets.token_hex(16)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd


def read_metadata(fd: int, geometry: Geometry) -> dict[str, Any]:
    """The metadata, read and not mapped, so that a segment that is refused leaves no mapping behind.

    Raises:
        ValueError: they are damaged, or not a JSON object.
    """
    if geometry.metadata > _LARGEST_METADATA:
        raise ValueError(
            f"its metadata must be at most {_LARGEST_METADATA:,} bytes, got {geometry.metadata:,}"
        )
    raw = os.pread(fd, geometry.metadata, HEADER_BYTES)
    if zlib.crc32(raw) != int.from_bytes(os.pread(fd, 4, METADATA_CRC_AT), "little"):
        raise ValueError("its metadata's checksum does not match")
    metadata = json.loads(raw) if raw else {}
    if not isinstance(metadata, dict):
        raise ValueError("its metadata must be a JSON object")
    return metadata
