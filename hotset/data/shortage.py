"""Shortage: why samples stay uncached, as the user is told of it, once for all processes.

A few samples of another form are nobody's worry; a hundredth of them is.
"""

from __future__ import annotations

from collections.abc import Collection

from hotset.store.format import PRESENT, Live
from hotset.store.store import Store

__all__ = ["first_to_tell", "shortage"]

_MISFITS_WORTH_TELLING = 16


def shortage(store: Store, used: int, samples: int, misfits: Collection[int]) -> str | None:
    """Return a sentence without its full stop, with the knob to turn; None if it is not worth telling.

    Args:
        store: in which not everything is.
        used: samples that are to be cached: all, or a window's residents.
        samples: length of the data set.
        misfits: the samples that this process has met and that do not fit, by the user's numbers.
    """
    if store.why_full is not None:
        if store.room.why_full is None:  # memory has room, and the disk was to have all of them too
            return f"not every sample is kept on the disk: {store.why_full}"
        cached = int((store.segment.index >= PRESENT).sum())
        return f"{cached:,} of {used:,} samples are cached, and no more fit: {store.why_full}"
    if len(misfits) < max(_MISFITS_WORTH_TELLING, samples // 100):
        return None
    form = next(iter(store.filler.misfits.values()))
    return (
        f"{len(misfits):,} samples and more stay uncached: sample {next(iter(misfits))} does not fit the "
        f"first samples' form: {form}"
    )


def first_to_tell(store: Store) -> bool:
    """Whether nobody has told yet: workers run out of room at the same moment, and one is to say so."""
    live = store.segment.live
    with store.member.short_lock():
        told, live[Live.TOLD] = int(live[Live.TOLD]), 1
    return not told
