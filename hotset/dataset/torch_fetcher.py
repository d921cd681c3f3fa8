"""Which pass of torch's DataLoader asks for a sample: the one whose fetcher is among the callers.

Without workers, torch's loader tells a dataset nothing as a pass begins: some samplers ask for the length,
but not ``WeightedRandomSampler``, and none through a ``Subset`` or a dataset of the user's around the cached
one. Each pass has a fetcher of its own, though, and it is the fetcher that asks for samples. To look for it
among the callers takes a tenth of a microsecond for each. (To replace a method of torch's would change the
program.) A dataset that reads samples in threads of its own has no fetcher among the callers: what changes
of the dataset counts there once the length is asked for.
"""

from __future__ import annotations

import sys

from torch.utils.data._utils import fetch

__all__ = ["calling_fetcher"]

# None in a version of torch that has it elsewhere: then no pass is known by its fetcher.
_FETCH_MAP, _FETCH_ITERABLE = (
    getattr(getattr(getattr(fetch, f"_{kind}DatasetFetcher", None), "fetch", None), "__code__", None)
    for kind in ("Map", "Iterable")
)
_FARTHEST = 50  # callers in between: of datasets around one another, and what those call


def calling_fetcher() -> object | None:
    """The fetcher of torch's loader, in this process, that asks for a sample now; None if none does."""
    frame = sys._getframe(1)
    for _ in range(_FARTHEST):
        if frame.f_code is _FETCH_MAP or frame.f_code is _FETCH_ITERABLE:
            fetcher: object = frame.f_locals.get("self")
            return fetcher
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
