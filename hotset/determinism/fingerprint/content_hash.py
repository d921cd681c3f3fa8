"""The bytes of arrays, tensors and buffers: all of them, at about the speed of memory.

If a few rows have changed in an array of gigabytes, its samples are others, so no byte is left out.
Cryptographic hashes read 1 to 2 GB/s. Here, 64-bit words run through 32,768 lanes side by side, and blake2b
hashes only the final values of the lanes. Each word changes its lane to ``mix(lane ^ word)``, where ``mix``
multiplies by an odd number and folds the upper half onto the lower. Both steps are invertible: two sequences
that differ in one word always end in different values, and two that differ in several words end in the same
value with the chance of 64 random bits. (A sum of words, as in a record's checksum, would not notice two rows
that have changed places.)

**A mapped large file is not read.** Token files and embeddings may be larger than memory. An array, tensor or
buffer over such a file, however it was made (``mmap``, ``np.memmap``, ``torch.from_file``,
``torch.load(mmap=True)``, a ``memoryview`` of one of these), is found by its address in ``/proc/self/maps``,
and is described by the file's path, size and date, and the offset in it. If the process has written to
private pages of it, its bytes are not the file's, and hotset reads them.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.determinism.equality import array_bytes

__all__ = ["READ_WHOLE", "FileRange", "digest_of_bytes", "file_behind", "mapped_files"]

Array = npt.NDArray[Any]

# blake2b takes about a millisecond for this much.
_DIRECT = 1 << 20
_PIECE = 32 << 20
_LANES = 1 << 15
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_HALF = np.uint64(32)
# A file's content says more than its date; up to this size it is read fast enough.
READ_WHOLE = 64 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ (\d+) +(/.*)")
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


class FileRange(NamedTuple):
    """The range of a file that an array maps.

    Attributes:
        path: of the file.
        size: of the file, in bytes.
        changed: when the file was changed, in nanoseconds.
        offset: of the array's first element, in bytes.
    """

    path: str
    size: int
    changed: int
    offset: int


def digest_of_bytes(array: Array) -> bytes:
    """Return 16 bytes for the content of an array of one plain dtype, in the order of its indices.

    Example:
        >>> rows = np.arange(6.0).reshape(2, 3)
        >>> digest_of_bytes(rows) == digest_of_bytes(np.asfortranarray(rows)) != digest_of_bytes(rows + 1)
        True
    """
    digest = hashlib.blake2b(digest_size=16)
    for piece in _pieces(array):
        _put(digest, array_bytes(piece).reshape(-1))
    return digest.digest()


def _pieces(array: Array) -> Iterator[Array]:
    """The array's elements in order, in pieces that depend only on its shape; copied if not contiguous."""
    if array.nbytes <= _PIECE or not array.ndim:
        yield np.ascontiguousarray(array)
        return
    rows = _PIECE * len(array) // array.nbytes
    if rows:
        starts = range(0, len(array), rows)
        yield from (np.ascontiguousarray(array[start : start + rows]) for start in starts)
    else:
        for row in array:
            yield from _pieces(row)


def _put(digest: Any, data: Array) -> None:
    whole = data.nbytes // (8 * _LANES) if data.nbytes > _DIRECT else 0
    if whole:
        lanes, shifted = np.zeros(_LANES, np.uint64), np.empty(_LANES, np.uint64)
        for words in data[: whole * 8 * _LANES].view(np.uint64).reshape(whole, _LANES):
            np.bitwise_xor(lanes, words, out=lanes)
            np.multiply(lanes, _ODD, out=lanes)
            np.right_shift(lanes, _HALF, out=shifted)
            np.bitwise_xor(lanes, shifted, out=lanes)
        digest.update(lanes)
    digest.update(np.ascontiguousarray(data[whole * 8 * _LANES :]))


def file_behind(array: Array) -> FileRange | None:
    """Return the range of a file that a large array maps; None if it is small or does not map a file."""
    if array.nbytes <= READ_WHOLE:
        return None
    steps = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    first = int(array.__array_interface__["data"][0])
    low = first + sum(step for step in steps if step < 0)
    high = first + sum(step for step in steps if step > 0) + array.itemsize
    found = mapped_files([(low, high - low)])
    return found[0]._replace(offset=found[0].offset + first - low) if found else None


def mapped_files(spans: Sequence[tuple[int, int]]) -> list[FileRange] | None:
    """Return the range of a file behind each span of memory.

    None if one of them does not map a file, or holds other bytes than the file.

    Args:
        spans: address and size of each, in bytes.
    """
    found: list[FileRange] = []
    files: dict[str, os.stat_result] = {}
    try:
        mappings, written = _mappings(), None
        for address, size in spans:
            run = _mapped_at(mappings, address, address + size)
            if not run:
                return None
            if any(mapping.private for mapping in run):
                written = _written() if written is None else written
                if any((mapping.begin, mapping.end) in written for mapping in run):
                    return None
            first = run[0]
            if first.path not in files:
                files[first.path] = os.stat(first.path)
            about = files[first.path]
            if about.st_ino != first.inode:
                return None  # another file has the name now
            offset = first.offset + address - first.begin
            found.append(FileRange(first.path, about.st_size, about.st_mtime_ns, offset))
    except (OSError, ValueError):  # there is no /proc, or a file was deleted
        return None
    return found


class _Mapping(NamedTuple):
    """A line of ``/proc/self/maps`` about a file: addresses, offset in the file, inode and path."""

    begin: int
    end: int
    private: bool
    offset: int
    inode: int
    path: str


def _mappings() -> list[_Mapping]:
    """The mappings of files, by address."""
    with open("/proc/self/maps") as lines:
        return [
            _Mapping(int(m[1], 16), int(m[2], 16), m[3][3] == "p", int(m[4], 16), int(m[5]), m[6])
            for m in map(_MAPPING.match, lines)
            if m is not None
        ]


def _mapped_at(mappings: Sequence[_Mapping], low: int, high: int) -> list[_Mapping]:
    """The adjacent mappings of one file that cover these addresses; empty if there are none."""
    run: list[_Mapping] = []
    start = max(bisect.bisect_right(mappings, low, key=attrgetter("begin")) - 1, 0)
    for mapping in itertools.islice(mappings, start, None):
        at = run[-1].end if run else low
        if not mapping.begin <= at < mapping.end:
            return []
        run.append(mapping)
        first = run[0]
        if (mapping.path, mapping.inode) != (first.path, first.inode) or (
            mapping.offset - mapping.begin != first.offset - first.begin
        ):
            return []
        if mapping.end >= high:
            return run
    return []


def _written() -> set[tuple[int, int]]:
    """The mappings that have private pages to which this process has written."""
    found, mapping = set(), (0, 0)
    with open("/proc/self/smaps") as lines:
        for line in lines:
            entry = _RANGE.match(line)
            if entry is not None:
                mapping = int(entry[1], 16), int(entry[2], 16)
            elif line.startswith("Anonymous:") and line.split()[1] != "0":
                found.add(mapping)
    return found
