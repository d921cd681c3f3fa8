"""The order of a recorded stream: a sampler that can be made before the stream has a length.

torch's ``RandomSampler`` asks for the length when it is made, and a stream has none before it was read.
:class:`StreamSampler` asks when a pass begins. Its orders are those of torch's samplers:

================  ============================================================================================
one rank          ``RandomSampler`` or ``SequentialSampler``, draw for draw
several ranks     each sample goes to one rank: every so many-th of one order, which is drawn from the epoch's
                  number as ``DistributedSampler`` does it, but filled up with no sample twice
================  ============================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from hotset.dataset.streams.cached_stream import CachedStream, passes_of

__all__ = ["StreamSampler", "with_stream_order"]


class StreamSampler(Sampler[int]):
    """The sampler of a loader over a cached stream.

    Args:
        shuffle: whether the order is drawn anew in each epoch.
        generator: draws it; None for torch's global one. With several ranks the epoch's number does.

    Attributes:
        epoch: decides the order with several ranks. A loader counts it up with each pass, unless
            :meth:`set_epoch` was called since the last one.
    """

    def __init__(
        self, stream: CachedStream[Any], *, shuffle: bool, generator: torch.Generator | None
    ) -> None:
        self.stream = stream
        self.shuffle = shuffle
        self.generator = generator
        self.epoch = 0
        self._is_set = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next pass belongs to."""
        self.epoch = epoch
        self._is_set = True

    def settle(self) -> None:
        """Decide the epoch of the next pass, as it begins, or as a state is taken that names it."""
        self.epoch += 0 if self._is_set else 1
        self._is_set = True

    def pass_began(self) -> None:
        """Have the next pass count the epoch up, unless it is set; called by the loader."""
        self._is_set = False

    @property
    def division(self) -> tuple[int, int]:
        """The number of this process among the ranks that share the samples, and how many these are."""
        return passes_of(self.stream).ranks()

    @property
    def draws_globally(self) -> bool:
        """Whether the order is drawn from torch's global generator, or not drawn."""
        return self.generator is None

    def order(self) -> npt.NDArray[np.int64]:
        """The indices of one pass, in order.

        Raises:
            TypeError: the stream was not read yet: another loader than hotset's has taken this sampler.
        """
        passes = passes_of(self.stream)
        if not passes.has_index(in_part=True):
            passes.require_index("index")
        rank, ranks = self.division
        count = len(passes.ids())
        if not self.shuffle or not count:
            return np.arange(rank, count, ranks)
        if ranks == 1:
            return np.fromiter(RandomSampler(range(count), generator=self.generator), np.int64, count)
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(self.epoch), device="cpu")
        return drawn.numpy()[rank::ranks]

    def __iter__(self) -> Iterator[int]:
        yield from self.order().tolist()  # draws with the first index, as torch's sampler does

    def __len__(self) -> int:
        """How many samples a pass has from the cache; before that, as many as the stream says that it has.

        Raises:
            TypeError: it was not read yet, and does not say.
        """
        passes = passes_of(self.stream)
        if not passes.has_index(in_part=True):
            return passes.stated_length()
        rank, ranks = self.division
        return len(range(rank, len(passes.ids()), ranks))


def with_stream_order(
    stream: CachedStream[Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """A loader's arguments, with a :class:`StreamSampler` if none of them is a sampler."""
    given = inspect.signature(DataLoader.__init__).bind(None, stream, *arguments, **named).arguments
    del given["self"], given["dataset"]
    if given.get("sampler") is None and given.get("batch_sampler") is None:
        shuffle = bool(given.pop("shuffle", False))
        given["sampler"] = StreamSampler(stream, shuffle=shuffle, generator=given.get("generator"))
    return given
