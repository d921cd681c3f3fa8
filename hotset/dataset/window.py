"""``hotset.Window``: how much of a dataset is resident in memory, and the sizes that follow from it.

The arithmetic is :mod:`hotset.policy.window`'s, the motion :mod:`hotset.dataset.active_window`'s.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

from hotset.errors import ArgumentError
from hotset.policy.window import (
    AUTO,
    RunningWindow,
    ahead_count,
    epochs_until_all_seen,
    replaced_count,
    resident_count,
)
from hotset.store.ring import WindowState

__all__ = ["Sizes", "Window"]


@dataclass(frozen=True)
class Window:
    """How much of a dataset is resident in memory, and how fast that part moves over all of it.

    An epoch uses exactly the N residents: ``len(cached)`` is N. Meanwhile background processes prepare
    R = ceil(N * replace) others; at the boundary between epochs they replace the R longest-resident ones.
    If preparing keeps up, every sample of a dataset of D is used within ceil((D - N) / R) + 1 epochs.

    Attributes:
        resident: N: a count (int), a fraction of the dataset (float), or an amount of memory, such as
            ``"20GiB"``, which then includes those being prepared; ``"50%"`` is of the memory that is free.
        replace: the share of the residents that is replaced after an epoch, 0 to 1; 0 never replaces.
            ``"auto"``: as many as were prepared in the meantime, up to half.
        shuffle: whether the order is random, both in which samples enter and in which an epoch uses them. It
            is a pure function of ``seed``, the epoch, and how many samples have left.
        seed: the seed of that order.
        wait: whether a boundary waits until all R are ready. If not, those that are ready enter, the others
            enter at later boundaries, and training never waits.
        prefill: whether the residents are read before the first epoch, with a progress bar; if not, the first
            epoch reads them as it goes.

    Raises:
        ArgumentError: a value is outside its range.
        QuantityError: ``resident`` is a string, but not an amount of memory.

    Example:
        >>> import hotset, torch
        >>> from torch.utils.data import TensorDataset
        >>> cached = hotset.cache(TensorDataset(torch.arange(100)), window=Window(50, replace=0.1))
        >>> loader = hotset.DataLoader(cached, batch_size=10)
        >>> sum(len(batch) for batch, in loader)
        50
        >>> cached.close()
    """

    resident: float | str
    replace: float | str = 0.1
    shuffle: bool = True
    seed: int = 0
    wait: bool = False
    prefill: bool = False

    def __post_init__(self) -> None:
        # Checks what is wrong for any dataset; Sizes.of checks the rest.
        resident_count(self.resident, self.replace, sys.maxsize, sample_bytes=1e-9)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ArgumentError(f"seed= must be an int, from which the order follows, got {self.seed!r}.")
        if self.wait and self.replace == AUTO:
            raise ArgumentError(
                'wait=True needs a rate: replace="auto" takes the samples that are ready, and never waits; '
                "give replace= a number, or leave out wait=."
            )


class Sizes(NamedTuple):
    """A window's sizes for one dataset, as JSON types.

    Attributes:
        samples: D, the length of the dataset.
        resident: N.
        replaced: R; with ``"auto"`` its maximum.
        ahead: for how many samples there is room besides the residents.
        seed, shuffle: see :class:`Window`.
        auto: whether as many as are ready enter, and none is ever late.
    """

    samples: int
    resident: int
    replaced: int
    ahead: int
    seed: int
    shuffle: bool
    auto: bool

    @classmethod
    def of(cls, window: Window, samples: int, sample_bytes: float) -> Sizes:
        """The sizes for a dataset of this many samples.

        Raises:
            ArgumentError: the amount of memory is too small for one resident and those being prepared.
        """
        resident = resident_count(window.resident, window.replace, samples, sample_bytes=sample_bytes)
        replaced = replaced_count(resident, window.replace, samples)
        ahead = ahead_count(resident, window.replace, samples)
        auto = window.replace == AUTO
        return cls(samples, resident, replaced, ahead, window.seed, window.shuffle, auto)

    @property
    def slots(self) -> int:
        """The number of samples that fit, residents and prepared ones."""
        return self.resident + self.ahead

    def due(self, behind: int) -> int:
        """How many samples are to enter at the next boundary, if this many are behind."""
        return self.ahead if self.auto else min(self.replaced + behind, self.ahead)

    def moved(self, now: WindowState, epoch: int, ready: int) -> WindowState:
        """The window's state after an epoch has begun.

        Args:
            now: its state before.
            epoch: the epoch's number, from 0 on.
            ready: how many of the due samples enter. Before the first epoch none are due.
        """
        if not now.epoch:
            return now._replace(epoch=epoch + 1)
        if self.auto:
            return now._replace(epoch=epoch + 1, cursor=now.cursor + ready)
        # More may be behind than fit at once: they enter over several boundaries.
        behind = now.behind + self.replaced - ready
        late = now.late + max(self.replaced - ready, 0)
        return WindowState(now.loads, epoch + 1, now.cursor + ready, behind, late)

    def leads(self, then: WindowState, now: WindowState) -> bool:
        """Whether a window in state ``then`` is in state ``now`` if at most one epoch has begun since."""
        moved, behind = now.cursor - then.cursor, now.behind - then.behind
        if now.epoch == then.epoch:
            return moved == behind == 0
        fits = self.auto or moved + behind == self.replaced
        return now.epoch == then.epoch + 1 and 0 <= moved <= self.ahead and fits

    @property
    def epochs_until_all_seen(self) -> int | None:
        """How many epochs use every sample, if preparing keeps up; None for never."""
        return epochs_until_all_seen(self.samples, self.resident, self.replaced)

    def policy(self) -> RunningWindow:
        """The policy: which samples are resident, and which enter next."""
        return RunningWindow(self.samples, self.resident, self.ahead, self.seed, self.shuffle)
