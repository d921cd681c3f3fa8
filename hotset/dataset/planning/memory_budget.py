"""How much memory a cache may take, in bytes: ``memory=``, and a window's ``resident=``."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hotset.dataset.arguments import CacheOptions
from hotset.dataset.window import Sizes
from hotset.session.reclaim import room_of
from hotset.session.session_definition import Session
from hotset.store import memory_limits as machine
from hotset.units import format_bytes, parse_bytes

__all__ = ["held_by_others", "memory_limit", "own_memory", "window_sizes"]

# Of a limited address space (`ulimit -v`, a batch system's limit), of which the program needs the rest.
_SHARE = 1 / 2


def memory_limit(options: CacheOptions) -> tuple[int, list[str]]:
    """The bytes that the cache may take, and warnings about them.

    Raises:
        QuantityError: ``memory=`` is not an amount of memory.
    """
    room, memory = machine.headroom(), options.given.memory
    if options.session is not None:
        # Later jobs fill it as well: the memory that is free is checked when they do, and not here.
        most = options.session.memory
        return (most if memory == "auto" else min(own_memory(options), most)), []
    if memory == "auto":
        # The file is larger than what the cache may take: there is room in it for records of any form.
        return min(room.bytes // 2, machine.mappable(_SHARE) // 4), []
    limit = own_memory(options)
    if limit <= room.bytes:
        return limit, []
    return room.bytes, [
        f"memory={memory!r} is more than {room.what} has to give, so the machine would swap or kill; the "
        f"cache takes {format_bytes(room.bytes)} at most. Lower `memory=` or free some memory."
    ]


def held_by_others(session: Session | None, limit: int) -> int:
    """Bytes of a cache's limit in a session that are not available now; 0 without a session.

    The memory of caches that no process uses is available: they are freed where a cache needs room.
    """
    if session is None:
        return 0
    with contextlib.suppress(OSError):
        room = room_of(session)
        return max(limit - min(room.free, machine.headroom().bytes) - room.unused, 0)
    return 0


def own_memory(options: CacheOptions) -> int:
    """``memory`` in bytes; it must not be ``"auto"``. A percentage is of the memory that "auto" considers."""
    session = options.session
    whole = machine.headroom().bytes if session is None else session.memory
    return parse_bytes(options.given.memory, whole=lambda: whole)


def window_sizes(
    options: CacheOptions, samples: int, sample_bytes: int, limit: int
) -> tuple[Sizes | None, int, list[str]]:
    """A window's sizes, the bytes that it may take here, and what the user should know about them.

    Without a window: None, and the limit as it is.
    """
    window = options.given.window
    if window is None:
        return None, limit, []
    if isinstance(window.resident, str):  # a share is of what ``memory`` is of
        resident = parse_bytes(window.resident, name="resident", whole=lambda: machine.headroom().bytes)
        window = replace(window, resident=f"{resident}B")
    sizes = Sizes.of(window, samples, sample_bytes or 1)
    needed = sizes.slots * sample_bytes
    if isinstance(window.resident, str):  # in place of ``memory``, also where it has room for all
        limit = min(max(parse_bytes(window.resident, name="resident"), needed), machine.headroom().bytes)
    if sizes.resident == samples:
        larger = isinstance(window.resident, int) and window.resident > samples
        note = f"resident={window.resident!r} is more than the {samples:,} samples there are"
        sentence = f"{note}, so all are cached and none is replaced; lower it, or leave out window=."
        return None, limit, [sentence] if larger else []
    if needed <= limit:
        return sizes, limit, []
    return sizes, limit, [_too_small(sizes, needed, limit)]


def _too_small(sizes: Sizes, needed: int, available: int) -> str:
    return (
        f"a window of {sizes.resident:,} samples, and {sizes.ahead:,} prepared for the next epoch, takes "
        f"{format_bytes(needed)}, but only {format_bytes(available)} are available: samples that do not fit "
        "come from the source. Lower `resident=`, or raise `memory=` if there is more."
    )
