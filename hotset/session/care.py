"""Looking after the caches on this machine: which there are, what they hold, and whether they are sound.

A cache that only another container's processes hold is listed, because its file's lock shows that it
lives, and cannot be opened from here, because its memory has no name: it is reported as out of reach, and
left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hotset.errors import SegmentError
from hotset.session import registry
from hotset.session.share import address_of
from hotset.store.check import check_segment
from hotset.store.format import PRESENT, Live
from hotset.store.segment import Segment

__all__ = ["Report", "reports"]


@dataclass(frozen=True)
class Report:
    """What was found of one cache.

    Attributes:
        entry: how it is listed.
        state: ``ok``, ``damaged``, ``dead`` (nobody holds it: ``hotset gc`` frees it) or ``out of reach``.
        samples: length of its data set; 0 if it could not be opened.
        cached: how many of them it holds.
        bytes: memory that it has taken for them.
        limit: memory that it may take.
        problems: a sentence for each.
    """

    entry: registry.Entry
    state: str
    samples: int = 0
    cached: int = 0
    bytes: int = 0
    limit: int = 0
    problems: tuple[str, ...] = ()


def reports() -> Iterator[Report]:
    """Open every listed cache within reach, and verify every record in it.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    for entry in registry.entries():
        yield _report(entry)


def _report(entry: registry.Entry) -> Report:
    if entry.problem:
        return Report(entry, "damaged", problems=(entry.problem,))
    if not entry.alive:
        return Report(entry, "dead")
    if entry.at is None:
        return Report(entry, "out of reach")
    try:
        segment = Segment.attach(address_of(entry))
    except SegmentError as error:
        return Report(entry, "damaged", problems=(str(error),))
    try:
        problems = tuple(check_segment(segment))
        live = segment.live
        return Report(
            entry,
            "damaged" if problems else "ok",
            samples=segment.geometry.samples,
            cached=int((segment.index >= PRESENT).sum()),
            bytes=segment.geometry.taken(int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT])),
            limit=int(live[Live.LIMIT]),
            problems=problems,
        )
    finally:
        segment.close()
