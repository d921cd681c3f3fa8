"""The order of an epoch's batches, drawn at the moments at which torch's DataLoader draws it.

A sampler draws random numbers, from the global generator unless it was given another one, and a training step
draws too (dropout). The order of these draws decides their results. torch's loader asks its sampler

- without workers: for one batch in each ``next()``;
- with workers: it calls ``iter()`` twice, draws ``workers x prefetch_factor`` batches in ``iter(loader)``,
  and draws one more before it hands over each batch;

and draws a base seed in between, except when it uses persistent workers again. :class:`BatchOrder` makes the
same calls in the consumer's thread at the same moments. The thread that gathers ahead may see the later
batches that are known without a draw: with workers the batches drawn already, and with torch's own
``RandomSampler``, ``SequentialSampler`` and ``DistributedSampler`` the whole epoch, as one array, without
Python code for each index.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from hotset.loader.stream_order import StreamSampler

__all__ = ["BatchOrder", "WholeEpoch", "draw_base_seed", "whole_epoch"]


_LONGEST_ORDER = 1 << 22  # indices, of a sampler that draws more than a dataset has


class BatchOrder:
    """The batches of one epoch, as sequences of indices.

    Args:
        ahead: how many batches torch would draw before the first ``next()``: 0 without workers.
        fresh: whether workers, if any, are started for this epoch (so a base seed is drawn).
        arrays: whether a batch may be an array instead of the sampler's list.

    Attributes:
        seeded_by: draws the base seed that was drawn; None if none was.
    """

    def __init__(
        self, batches: Any, *, ahead: int, generator: torch.Generator | None, fresh: bool, arrays: bool
    ) -> None:
        self._order = batches
        self._ahead = ahead
        self._arrays = arrays
        self._drawn: deque[Any] = deque()
        self._batches = self._begin(batches)
        self.seeded_by: torch.Generator | None = None
        if fresh:
            self.seeded_by = (generator or torch.default_generator).clone_state()
            draw_base_seed(generator)
            if ahead:
                self._batches = self._begin(batches)
        for _ in range(ahead):
            self._draw()

    def _begin(self, batches: Any) -> Iterator[Any]:
        whole = whole_epoch(batches) if self._arrays else None
        return whole if whole is not None else iter(batches)

    def __len__(self) -> int:
        """How many batches there are, or were when it began.

        Raises:
            TypeError: the sampler has no length.
        """
        return len(self._order)

    def _draw(self) -> None:
        try:
            self._drawn.append(next(self._batches))
        except StopIteration:
            return

    def begin(self) -> None:
        """Make the draws with which a resumed sampler begins now, instead of with the first batch."""
        begin = getattr(self._batches, "begin", None)
        if begin is not None:
            begin()

    def take(self) -> Any:
        """Return the next batch's indices.

        Raises:
            StopIteration: the epoch is over.
        """
        if not self._ahead:
            return next(self._batches)
        if not self._drawn:
            raise StopIteration
        return self._drawn.popleft()

    def top_up(self) -> None:
        """Draw one more batch, as torch does when it hands over a batch, or the exception in its place."""
        if self._ahead:
            self._draw()

    def peek(self, distance: int) -> Any | None:
        """The indices of a later batch, 0 for the next one; None if that is not known without a draw."""
        if distance < len(self._drawn):
            return self._drawn[distance]
        if isinstance(self._batches, WholeEpoch):
            return self._batches.peek(distance - len(self._drawn))
        return None


def draw_base_seed(generator: torch.Generator | None) -> None:
    """Draw what torch's loader draws to seed its workers, and draws without workers too."""
    torch.empty((), dtype=torch.int64).random_(generator=generator).item()


class WholeEpoch:
    """Batches of torch's own samplers, cut from one array; the array is drawn with the first batch.

    A program may set another ``batch_size`` on the batch sampler in mid-epoch. torch's asks for it with each
    batch, or with the first one alone if it drops the last: so does this.
    """

    def __init__(self, draw: Callable[[], Any], batches: BatchSampler, start: int) -> None:
        self._draw_order = draw
        self._order: Any = None
        self._at = start
        self._batches = batches
        self._drop_last = False
        self._fixed_size: int | None = None

    @property
    def batch_size(self) -> int:
        """The size of all batches but perhaps the last, as it is now."""
        return self._fixed_size or self._batches.batch_size

    def __iter__(self) -> WholeEpoch:
        return self

    def begin(self) -> None:
        if self._order is None:
            self._drop_last = self._batches.drop_last
            self._fixed_size = self._batches.batch_size if self._drop_last else None
            self._order = self._draw_order()

    def __next__(self) -> Any:
        self.begin()
        batch = self.peek(0)
        if batch is None:
            raise StopIteration
        self._at += len(batch)
        return batch

    def peek(self, distance: int) -> Any | None:
        if self._order is None:
            return None
        size = self.batch_size
        start = self._at + distance * size
        batch = self._order[start : start + size]
        if len(batch) == 0 or (self._drop_last and len(batch) < size):
            return None
        return batch


def whole_epoch(batches: Any, start: int = 0) -> WholeEpoch | None:
    """The epoch's batches from sample ``start`` on, cut from one array that is drawn with the first batch.

    None for a sampler that may draw later in the epoch, as the order of draws matters.
    """
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    if type(sampler) is SequentialSampler:
        count = len(sampler.data_source)
        return WholeEpoch(lambda: np.arange(count), batches, start)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None:
        count, wanted = len(sampler.data_source), sampler.num_samples
        if count and wanted <= max(count, _LONGEST_ORDER):
            return WholeEpoch(lambda: _permutations(count, wanted), batches, start)
    if type(sampler) is StreamSampler and sampler.draws_globally:
        return WholeEpoch(sampler.order, batches, start)
    if type(sampler) is DistributedSampler:  # it draws all at once, from a generator of its own
        return WholeEpoch(lambda: np.fromiter(sampler, np.int64, len(sampler)), batches, start)
    return None


def _permutations(count: int, wanted: int) -> Any:
    """The order of a ``RandomSampler``: it draws a seed from the global generator, the rest from its own."""
    generator = torch.Generator()
    generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    rounds = [torch.randperm(count, generator=generator).numpy() for _ in range(math.ceil(wanted / count))]
    return rounds[0] if wanted == count else np.concatenate(rounds)[:wanted]
