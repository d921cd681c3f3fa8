"""The files that sessions consist of: what they are called, and how they are removed.

::

    runtime folder     <number>.session                   the quota, whose head says what the session is
    (memory)           <number>-<key>-<nonce>.cache       a segment: one cache, filled by its readers
                       server-<port>.ledger               what the sessions of a server hold together
                       <number>.cluster                   which machines share the session, if several do
                       <number>.traffic                   what passed between this machine and the others

    spill folder       <number>-<key>-<nonce>.spill       a cache's records that memory has no room for
    (disk)             <number>.session.json              what the session is, if it outlives a reboot

All but a spill file have eight random digits and ``.new`` behind their names until they are whole. A name
says whose the file is, so a file whose session or cache is gone is recognized without opening it.

A file's pages live as long as a process has it mapped, so removing a cache's name frees nothing while a job
runs. The cache is emptied first: its clear generation becomes odd and it is marked as destroyed, so that no
process starts to read. Processes that are copying are waited for, and reject their copies. Then the pages are
freed. (If a process is stopped while it copies, the pages stay until it ends: touching a freed page would be
SIGBUS on a full file system.) A late writer may store one more chunk, which is freed with the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib

from hotset.errors import SegmentError
from hotset.session.spill_dirs import opened_spill
from hotset.store.claims import Participant
from hotset.store.format import DESTROYED, LIVE_AT, Live
from hotset.store.segment import Segment

__all__ = [
    "CACHE",
    "DEFINITION",
    "QUOTA",
    "SERVER_QUOTA",
    "SHARED",
    "caches_of",
    "id_of",
    "is_retired",
    "is_there",
    "member_of",
    "membership_file",
    "peer_stats_file",
    "remove_cache",
    "remove_caches",
    "remove_spilled",
    "retire",
    "unlink",
]

QUOTA = re.compile(r"(\d{1,10})\.session")
CACHE = re.compile(r"(\d{1,10})-([0-9a-f]{32})-([0-9a-f]{16})\.(cache|spill)")
DEFINITION = re.compile(r"(\d{1,10})\.session\.json")
SHARED = re.compile(r"(\d{1,10})\.(?:cluster|traffic)")
SERVER_QUOTA = re.compile(r"server-(\d{1,5})\.ledger")

_READERS_SECONDS = 5.0
_BLOCK = 512  # the unit of st_blocks, whatever the file system's own is


def membership_file(number: int) -> str:
    """Name of the file that says which machines share a session."""
    return f"{number}.cluster"


def peer_stats_file(number: int) -> str:
    """Name of the file that counts what passes between machines."""
    return f"{number}.traffic"


def id_of(file: str) -> int:
    """32 bits by which users name a cache."""
    return zlib.crc32(file.encode()) or 1


def member_of(file: str) -> int:
    """The cache's number in its session's quota: above zero, which means a free row."""
    found = CACHE.fullmatch(file)
    assert found is not None
    return int(found[3], 16) >> 2 | 1


def caches_of(number: int, files: list[str]) -> list[str]:
    """Return those of these files that are caches of this session, in memory or on disk."""
    return [file for file in files if (name := CACHE.fullmatch(file)) and int(name[1]) == number]


def is_there(folder: int, file: str) -> bool:
    """Whether there is anything of that name."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(file, dir_fd=folder, follow_symlinks=False)
        return True
    return False


def unlink(folder: int, file: str) -> None:
    """Remove a file's name, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file, dir_fd=folder)


def remove_caches(folder: int, number: int, spill: str | None) -> int:
    """Remove all caches of a session, in memory and on disk; returns the bytes freed."""
    freed = sum(remove_cache(folder, file) for file in caches_of(number, os.listdir(folder)))
    if spill is not None:
        with contextlib.suppress(OSError):
            with opened_spill(spill) as place:
                files = caches_of(number, os.listdir(place))
            for file in files:
                freed += remove_spilled(spill, file)
    return freed


def remove_cache(folder: int, file: str, spill: str | None = None) -> int:
    """Empty a cache, also while processes use it, and remove its file; returns the bytes freed.

    What it has in the folder ``spill`` is removed too; None keeps its records on disk, if there are any.
    """
    freed = 0
    # Emptied for good before its disk goes: a process that looks meanwhile finds no cache without its disk.
    with contextlib.suppress(SegmentError, OSError):
        freed += retire(f"/proc/self/fd/{folder}/{file}")
    # The disk before the cache's file: a reboot would find it there, and take it for what was kept.
    if spill is not None:
        with contextlib.suppress(OSError):
            freed += remove_spilled(spill, file.removesuffix("cache") + "spill")
    unlink(folder, file)
    return freed


def remove_spilled(spill: str, file: str) -> int:
    """Remove a file of a spill folder; returns the bytes freed."""
    freed = 0
    with opened_spill(spill) as place:
        # Its disk space is freed now, also while a job has it open.
        if file.endswith(".spill"):
            with contextlib.suppress(OSError, SegmentError):
                freed = retire(f"/proc/self/fd/{place}/{file}")
        unlink(place, file)
    return freed


def retire(path: str) -> int:
    """Empty the cache in this file for good; return the bytes freed.

    If a process is stopped while it reads the cache, nothing is freed: the memory is freed when the last
    process that has it mapped ends.

    Raises:
        SegmentError: there is no usable cache.
    """
    segment = Segment.attach(path)
    participant = Participant(segment)
    try:
        live, geometry = segment.live, segment.geometry
        # Also without the lock, whose holder may be stopped: these words only take samples away.
        with participant.short_lock():
            live[Live.INVALIDATED] = DESTROYED
            live[Live.CLEAR_GENERATION] |= 1
            segment.used_index[:] = 0
        taken = os.fstat(segment.fd).st_blocks
        if participant.wait_for_readers(_READERS_SECONDS):
            with contextlib.suppress(OSError):
                segment.discard(geometry.rows_at, geometry.size - geometry.rows_at)
        return max(taken - os.fstat(segment.fd).st_blocks, 0) * _BLOCK
    finally:
        participant.leave()
        segment.close()


def is_retired(path: str) -> bool:
    """Whether the cache in this file was emptied for good, and only its file is still there."""
    try:
        with open(path, "rb") as file:
            word = os.pread(file.fileno(), 8, LIVE_AT + 8 * Live.INVALIDATED)
    except OSError:
        return False
    return int.from_bytes(word, "little") == DESTROYED
