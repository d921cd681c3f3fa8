"""The rest of an interrupted pass: the batches that its sampler would still have given.

A sampler's order is drawn, not stored, so a saved position is a few numbers: how many batches and how many
samples were consumed. To resume, the sampler draws the same order again, and the beginning of the order is
skipped. How much of it depends on what cuts the order into batches:

===============================  ==========================================================================
torch's BatchSampler             The pass resumes at sample number ``samples``, in batches of the present
                                 size.
another, or ``batch_size=None``  It resumes at batch number ``batches``.
torch's, and the number of       The order of all ranks' samples, from number ``dealt`` on, is divided anew
ranks has changed                among the present ranks (``DistributedSampler`` only); this rank resumes at
                                 number ``samples`` of its part.
===============================  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler

from hotset.loader.batch_order import whole_epoch
from hotset.loader.stream_order import StreamSampler

__all__ = ["BatchCut", "EpochPosition", "RemainingBatches", "cut_of"]


class BatchCut(NamedTuple):
    """How a loader cuts the order into batches.

    Attributes:
        sampler, batch_sampler: the names of their classes.
        batch_size: None with a batch sampler of the user's.
        ranks: among how many processes a DistributedSampler, or a stream's own, divides the order; 0 with any
            other sampler.
        rank: the number of this process among them.
    """

    sampler: str
    batch_sampler: str
    batch_size: int | None
    ranks: int
    rank: int


class EpochPosition(NamedTuple):
    """How much of a pass was consumed.

    Attributes:
        batches: consumed by this rank.
        samples: consumed by this rank, since the order was last divided among the ranks.
        dealt: consumed by all ranks before that; 0 if only the sampler has divided it.
    """

    batches: int
    samples: int
    dealt: int = 0

    def under(self, was: BatchCut, now: BatchCut) -> EpochPosition:
        """The same position for another number of ranks."""
        if was.ranks == now.ranks:
            return self
        return EpochPosition(self.batches, 0, self.dealt + self.samples * was.ranks)


def cut_of(batches: Any, sampler: Any) -> BatchCut:
    """The cut of a loader with this batch sampler and this sampler."""
    inner = getattr(batches, "sampler", sampler)
    rank, ranks = 0, 0
    if isinstance(inner, DistributedSampler):
        rank, ranks = inner.rank, inner.num_replicas
    elif isinstance(inner, StreamSampler) and inner.division[1] > 1:
        rank, ranks = inner.division
    return BatchCut(
        sampler=type(inner).__name__,
        batch_sampler=type(batches).__name__,
        batch_size=batches.batch_size if type(batches) is BatchSampler else None,
        ranks=ranks,
        rank=rank,
    )


class RemainingBatches:
    """Takes the place of the loader's batch sampler in a resumed pass.

    Args:
        batches: the loader's batch sampler; its sampler with ``batch_size=None``.
        position: how far the pass had come, converted to the present number of ranks.
        begin: begins a sampler with the random states with which the interrupted pass began it; None if this
            loader makes the same draws in any case.
        by_samples: whether it resumes at a number of samples, not of batches.
    """

    def __init__(
        self,
        batches: Any,
        position: EpochPosition,
        begin: Callable[[Any], Iterator[Any]] | None,
        *,
        by_samples: bool,
    ) -> None:
        self._by_samples = by_samples
        self._batches = batches
        self._position = position
        self._begin = begin

    @property
    def redraws(self) -> bool:
        """Whether a base seed has been drawn when ``iter()`` returns, if one is drawn at all."""
        return self._begin is not None

    def __iter__(self) -> Any:
        if self._begin is None:
            return self._begun_by(iter)
        rest = self._begun_by(self._begin)
        rest.begin()  # now, with the random states that this sampler would have found
        return rest

    def _begun_by(self, begin: Callable[[Any], Iterator[Any]]) -> Any:
        batches, position = self._batches, self._position
        if not self._by_samples:
            return _Skipping(begin(batches), position.batches)
        begin(batches)  # for its draws only: torch's BatchSampler does nothing before its first next()
        whole = whole_epoch(batches, position.samples) if not position.dealt else None
        if whole is not None:
            return whole
        indices = _lazily(self._dealt_anew() if position.dealt else batches.sampler)
        return _Skipping(indices, position.samples, self._cut)

    def __len__(self) -> int:
        batches, position = self._batches, self._position
        if not self._by_samples:
            whole: int = len(batches)
            return max(whole - position.batches, 0)
        order: Any = self._dealt_anew() if position.dealt else batches.sampler
        left = len(order) - position.samples
        cut = math.floor if batches.drop_last else math.ceil
        whole = cut(left / batches.batch_size)
        return max(whole, 0)

    def _cut(self, indices: Iterator[Any]) -> Iterator[Any]:
        return iter(BatchSampler(indices, self._batches.batch_size, self._batches.drop_last))

    def _dealt_anew(self) -> list[int]:
        """This rank's part of the samples that all ranks together had left; all parts have one length."""
        sampler: DistributedSampler[Any] = self._batches.sampler
        alone: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        alone.set_epoch(sampler.epoch)
        left = list(alone)[self._position.dealt :]
        if sampler.drop_last:
            left = left[: len(left) // sampler.num_replicas * sampler.num_replicas]
        elif left:  # DistributedSampler, too, fills the parts up with samples from the beginning
            left += (left * sampler.num_replicas)[: -len(left) % sampler.num_replicas]
        return left[sampler.rank :: sampler.num_replicas]


def _lazily(sampler: Any) -> Iterator[Any]:
    """The sampler's indices; its ``iter()``, which may draw, waits for the first, as in a BatchSampler."""
    yield from sampler


class _Skipping:
    """An iterator without its first ``count`` elements, which the first ``next()`` skips.

    Not ``iter()``: a sampler draws with its first ``next()``, and torch's loader draws before that.

    Args:
        then: makes an iterator of the elements that are left.
    """

    def __init__(
        self,
        elements: Iterator[Any],
        count: int,
        then: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> None:
        self._elements = elements
        self._count = count
        self._then = then
        self._begun = False

    def begin(self) -> None:
        """Skip them now."""
        if not self._begun:
            self._begun = True
            for _ in islice(self._elements, self._count):
                pass
            self._elements = self._then(self._elements)

    def __iter__(self) -> _Skipping:
        return self

    def __next__(self) -> Any:
        self.begin()
        return next(self._elements)
