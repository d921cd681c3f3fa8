"""Shortage: why samples stay uncached, as the user is told of it, once for all processes.

A few samples that cannot be cached are nobody's worry; a hundredth of them is. Samples that draw random
numbers may be few: the user may not know that anything is drawn there, and can have their other part cached.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hotset.store.format import PRESENT, Live
from hotset.store.store import Store

__all__ = ["draws", "first_to_tell", "shortage"]

_MISFITS_WORTH_TELLING = 16
_NAMED = 8


def shortage(store: Store, used: int, samples: int, mismatches: Collection[int]) -> str | None:
    """Return a sentence without its full stop, with the knob to turn; None if it is not worth telling.

    Args:
        store: in which not everything is.
        used: samples that are to be cached: all, or a window's residents.
        samples: length of the data set.
        mismatches: the samples that this process has met and that cannot be cached, by the user's numbers.
    """
    if store.why_full is not None:
        if store.room.why_full is None:  # memory has room, and the disk was to have all of them too
            return f"not every sample is kept on the disk: {store.why_full}"
        cached = int((store.segment.index >= PRESENT).sum())
        return f"{cached:,} of {used:,} samples are cached, and no more fit: {store.why_full}"
    if len(mismatches) < max(_MISFITS_WORTH_TELLING, samples // 100):
        return None
    reason = next(iter(store.filler.mismatches.values()))
    return (
        f"{len(mismatches):,} samples and more stay uncached: sample {next(iter(mismatches))} "
        "cannot be cached: "
        f"{reason}"
    )


def draws(drawing: Sequence[int], used: int, *, complete: bool) -> str:
    """Return a sentence about samples that draw random numbers, with what to do; without its full stop.

    Args:
        drawing: which do, as far as is known, by the user's numbers; at least one.
        used: samples that are to be cached: all, or a window's residents.
        complete: whether all others are known not to.

    Example:
        >>> print(draws([17], 400, complete=True)[:59])
        1 sample (17) draws random numbers when it is read, so it c
    """
    count = len(drawing)
    some = ", ".join(map(str, drawing[:_NAMED])) + (", ..." if count > _NAMED else "")
    so_far = "" if complete else " so far"
    one = count == 1
    told = (
        f"{count:,} sample{'' if one else 's'}{so_far} ({some}) draw{'s' if one else ''} random numbers when "
        f"{'it is' if one else 'they are'} read, so {'it comes' if one else 'they come'} from the source in "
        "each use; "
    )
    if count > used // 2:
        told += f"that is most of the {used:,}, so a cache is of little use. "
    else:
        told += "the rest stays cached. "
    return f"{told}Move what is random to transform=[...], to have what comes before it cached too"


def first_to_tell(store: Store, what: int = Live.TOLD) -> bool:
    """Whether nobody has told yet: workers run out of room at the same moment, and one is to say so.

    Args:
        store: whose live words say what was told.
        what: which of them.
    """
    live = store.segment.live
    with store.member.short_lock():
        told, live[what] = int(live[what]), 1
    return not told
