"""The rest of a pass that was interrupted: the batches that its sampler would still have given.

A sampler's order is drawn, not stored, so a saved position is two numbers: how many batches and how many
samples were consumed. Going on means to let the sampler draw the same order again and to pass over its
beginning. Which beginning depends on what has changed since:

==============================  ===========================================================================
nothing that cuts batches       the sampler's batches, from number ``batches`` on
the batch size                  the sampler's samples, from number ``samples`` on, in batches of the new size
the number of ranks             the order of all ranks' samples, from number ``samples x ranks`` on, dealt
                                anew to the ranks there are now (``DistributedSampler`` only)
==============================  ===========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler

from hotset.data.draws import whole_epoch

__all__ = ["Cut", "Position", "Rest", "cut_of"]


class Cut(NamedTuple):
    """How a loader cuts the order into batches.

    Attributes:
        sampler, batch_sampler: the kinds of both, by name.
        batch_size: None with a batch sampler of the user's.
        ranks: how many processes share the order; 1 if the sampler does not say.
        rank: which of them this is.
    """

    sampler: str
    batch_sampler: str
    batch_size: int | None
    ranks: int
    rank: int


class Position(NamedTuple):
    """How much of a pass this rank has consumed, and under which cut."""

    batches: int
    samples: int
    cut: Cut


def cut_of(batches: Any, sampler: Any) -> Cut:
    """The cut of a loader with this batch sampler and this sampler."""
    inner = getattr(batches, "sampler", sampler)
    shared = inner if isinstance(inner, DistributedSampler) else None
    return Cut(
        sampler=type(inner).__name__,
        batch_sampler=type(batches).__name__,
        batch_size=batches.batch_size if type(batches) is BatchSampler else None,
        ranks=shared.num_replicas if shared is not None else 1,
        rank=shared.rank if shared is not None else 0,
    )


class Rest:
    """Stands in for the loader's batch sampler in the pass that goes on.

    Args:
        batches: the loader's batch sampler.
        position: how far the pass had come.
        cut: how the loader cuts the order now.
        rewind: called in each ``iter()``, to put the random states back to the pass's beginning.
    """

    def __init__(
        self, batches: Any, position: Position, cut: Cut, rewind: Callable[[], None] | None = None
    ) -> None:
        self._batches = batches
        self._position = position
        self._cut = cut
        self._rewind = rewind

    def __iter__(self) -> Iterator[Any]:
        if self._rewind is not None:
            self._rewind()
        batches, was, now = self._batches, self._position.cut, self._cut
        if was.ranks != now.ranks:
            return iter(BatchSampler(self._dealt_anew(), batches.batch_size, batches.drop_last))
        if was.batch_size != now.batch_size:
            indices = _Skipping(iter(batches.sampler), self._position.samples)
            return iter(BatchSampler(indices, batches.batch_size, batches.drop_last))
        whole = whole_epoch(batches, self._position.samples)
        return whole if whole is not None else _Skipping(iter(batches), self._position.batches)

    def __len__(self) -> int:
        batches, was, now = self._batches, self._position.cut, self._cut
        if was.ranks == now.ranks and was.batch_size == now.batch_size:
            return max(len(batches) - self._position.batches, 0)
        left = len(self._dealt_anew() if was.ranks != now.ranks else batches.sampler)
        left -= self._position.samples if was.ranks == now.ranks else 0
        cut = math.floor if batches.drop_last else math.ceil
        return max(int(cut(left / batches.batch_size)), 0)

    def _dealt_anew(self) -> list[int]:
        """This rank's share of what all ranks together had left, the shares of equal length."""
        sampler: DistributedSampler[Any] = self._batches.sampler
        alone: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        alone.set_epoch(sampler.epoch)
        left = list(alone)[self._position.samples * self._position.cut.ranks :]
        if sampler.drop_last:
            left = left[: len(left) // sampler.num_replicas * sampler.num_replicas]
        elif left:  # as DistributedSampler evens the shares out: with samples from the beginning
            left += (left * sampler.num_replicas)[: -len(left) % sampler.num_replicas]
        return left[sampler.rank :: sampler.num_replicas]


class _Skipping:
    """An iterator without its first ``count`` elements, which are passed over with the first ``next()``.

    Not in ``iter()``: a sampler draws with its first ``next()``, and torch's loader draws before that.
    """

    def __init__(self, elements: Iterator[Any], count: int) -> None:
        self._elements = elements
        self._count = count

    def begin(self) -> None:
        """Pass over them now."""
        for _ in islice(self._elements, self._count):
            pass
        self._count = 0

    def __iter__(self) -> _Skipping:
        return self

    def __next__(self) -> Any:
        self.begin()
        return next(self._elements)
