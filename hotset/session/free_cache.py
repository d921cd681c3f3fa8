"""Free a cache's memory while processes still use the cache.

A file's pages live as long as a process has it mapped, so removing its name frees nothing while a job runs.
The cache is emptied first: its era becomes odd and it is marked as invalidated, so that no process starts to
read. Processes that are copying are waited for, and reject their copies. Then the pages are freed. (If a
process is stopped while it copies, the pages stay until it ends: touching a freed page would be SIGBUS on a
full file system.) A late writer may store one more chunk, which is freed with the file.
"""

from __future__ import annotations

import contextlib
import os

from hotset.store.claims import Participant
from hotset.store.format import LIVE_AT, Live
from hotset.store.segment import Segment

__all__ = ["DESTROYED", "is_retired", "retire"]

_READERS_SECONDS = 5.0
_BLOCK = 512  # the unit of st_blocks, whatever the file system's own is

DESTROYED = 2  # in the live word INVALIDATED: its session was destroyed, or the cache was dropped


def retire(path: str) -> int:
    """Empty the cache in this file for good; return the bytes freed.

    If a process is stopped while it reads the cache, nothing is freed: the memory is freed when the last
    process that has it mapped ends.

    Raises:
        SegmentError: there is no usable cache.
    """
    segment = Segment.attach(path)
    member = Participant(segment)
    try:
        live, geometry = segment.live, segment.geometry
        # Also without the lock, whose holder may be stopped: these words only take samples away.
        with member.short_lock():
            live[Live.INVALIDATED] = DESTROYED
            live[Live.ERA] |= 1
            segment.index[:] = 0
        taken = os.fstat(segment.fd).st_blocks
        if member.unread(_READERS_SECONDS):
            with contextlib.suppress(OSError):
                segment.discard(geometry.rows_at, geometry.size - geometry.rows_at)
        return max(taken - os.fstat(segment.fd).st_blocks, 0) * _BLOCK
    finally:
        member.leave()
        segment.close()


def is_retired(path: str) -> bool:
    """Whether the cache in this file was emptied for good, and only its file is still there."""
    try:
        with open(path, "rb") as file:
            word = os.pread(file.fileno(), 8, LIVE_AT + 8 * Live.INVALIDATED)
    except OSError:
        return False
    return int.from_bytes(word, "little") == DESTROYED
