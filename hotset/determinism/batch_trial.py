"""A trial with several samples at once: is a result the same whatever else is in its batch?

A cache keeps the result of each sample by itself. So hotset caches a transform that takes several samples in
one call only if it returns for each of them what it returns for that sample alone: it may pad to the longest
row of a batch, or normalise over it. A trial calls it both ways, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hotset.determinism.aliasing import copied
from hotset.determinism.batch_transform import BatchTransform
from hotset.determinism.batched import Batched
from hotset.determinism.declare import declared
from hotset.determinism.equality import differs
from hotset.errors import NotCacheable

__all__ = ["mixed_rows", "try_together"]

_ROUNDING = 0.01


def try_together(steps: Sequence[Any], samples: Sequence[Any], found: Sequence[list[Any]]) -> None:
    """Try each ``hotset.batched`` of a chain on several samples at once, as a fill will.

    Args:
        steps: the chain's transforms.
        samples: as they reach the first.
        found: for each transform, its output for each sample alone.

    Raises:
        NotCacheable: its result for a sample depends on the others, by more than rounding.
        Exception: what it raises for several samples; an ArgumentError if it returns another number of rows.
    """
    inputs = samples
    for step, outputs in zip(steps, found, strict=False):
        if isinstance(step, Batched) and step.size > 1 and declared(step) != "deterministic":
            count = min(step.size, max(len(inputs), 2))
            some = [n % len(inputs) for n in range(count)]
            together = step.many(copied([inputs[n] for n in some]))
            if not _same_but_for_rounding([outputs[n] for n in some], together):
                raise NotCacheable(
                    f"{step!r} must return the same row for a sample whatever else is in its batch, got "
                    f"other rows for {count} samples at once than for each alone; leave padding and "
                    "normalising over the batch to collate_fn, or give it size=1."
                )
        inputs = outputs


def mixed_rows(step: BatchTransform, rows: list[Any], alone: list[Any]) -> str | None:
    """A phrase: how the results for rows in one batch differ from those for each alone; None if they do not.

    A transform that pads to the longest row of a batch cannot be cached row by row.
    """
    if len(rows) < 2:
        return "only one row could be read in time, so it is not known whether rows of a batch are mixed"
    for batch in (rows, rows[::-1]):
        try:
            together = step.many(copied(batch))
        except Exception as error:  # it may be made for batches of another size
            return f"a batch of {len(rows)} rows raised {type(error).__name__}"
        found = differs(together, alone if batch is rows else alone[::-1])
        if found is not None:
            return f"its result for a row depends on the other rows of the batch ({found})"
    return None


def _same_but_for_rounding(one: Any, other: Any) -> bool:
    """Whether two results are the same but for the rounding of floating-point numbers.

    A network may round otherwise for a batch of another size, by less than a hundredth of the largest value.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same_but_for_rounding(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same_but_for_rounding, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.dtype.kind in "biufc":
        return _same_but_for_rounding(torch.from_numpy(one.copy()), torch.from_numpy(other.copy()))
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return differs(one, other) is None
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() and one.numel()):
        return torch.equal(one, other)
    exact, found = one.detach().double(), other.detach().double()
    largest = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
    return torch.allclose(found, exact, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True)
