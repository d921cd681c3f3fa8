"""``hotset.Window``: how much of a data set is resident in memory, and the sizes that follow from it.

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
    """How much of a data set is resident in memory, and how fast that part wanders over all of it.

    In an epoch exactly the N residents are used: ``len(cached)`` is N. Meanwhile R = ceil(N * replace) others
    are prepared by processes in the background; at the boundary they go in, and the R longest-resident leave.
    Where preparing keeps up, every sample is used within ceil((D - N) / R) + 1 epochs of a data set of D.

    Attributes:
        resident: N: a count (int), a fraction of the data set (float), or an amount of memory, such as
            ``"20GiB"``, which then also holds those being prepared; ``"50%"`` is of the memory that is free.
        replace: the share of the residents that is replaced after an epoch, 0 to 1; 0 never replaces.
            ``"auto"``: as many as were prepared in the meantime, up to half.
        shuffle: whether the order is random, that in which samples come in and that in which an epoch uses
            them: a pure function of ``seed``, the epoch, and how many have left.
        seed: of that order.
        wait: whether a boundary waits until all R are ready. Without, those that are ready go in, the others
            are made up later, and training never waits.
        prefill: whether the residents are read before the first epoch, showing progress; without, the first
            epoch reads them as it goes.

    Raises:
        ArgumentError: a value outside its range.
        QuantityError: ``resident`` is a text that is no amount of memory.

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
        # With any data set these are wrong; sizes that depend on it are looked at when there is one.
        resident_count(self.resident, self.replace, sys.maxsize, sample_bytes=1e-9)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ArgumentError(f"seed={self.seed!r} is no whole number; give an int.")
        if self.wait and self.replace == AUTO:
            raise ArgumentError(
                'replace="auto" takes what is ready, so that there is nothing to wait for; give a rate.'
            )


class Sizes(NamedTuple):
    """A window's sizes for one data set; JSON's types.

    Attributes:
        samples: D, of the data set.
        resident: N.
        replaced: R, or the most with ``"auto"``.
        ahead: for how many beside the residents there is room.
        seed, shuffle: the order's.
        auto: whether what is ready goes in, and nothing is ever late.
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
        """The sizes for a data set of so many samples.

        Raises:
            ArgumentError: an amount of memory is not enough for one sample and those being prepared.
        """
        resident = resident_count(window.resident, window.replace, samples, sample_bytes=sample_bytes)
        replaced = replaced_count(resident, window.replace, samples)
        ahead = ahead_count(resident, window.replace, samples)
        auto = window.replace == AUTO
        return cls(samples, resident, replaced, ahead, window.seed, window.shuffle, auto)

    @property
    def slots(self) -> int:
        """How many samples there is room for."""
        return self.resident + self.ahead

    def due(self, behind: int) -> int:
        """How many samples are to go in at the next boundary, when so many are behind."""
        return self.ahead if self.auto else min(self.replaced + behind, self.ahead)

    def moved(self, now: WindowState, epoch: int, ready: int) -> WindowState:
        """Where the window stands once an epoch has begun.

        Args:
            now: where it stands.
            epoch: its number, from 0 on.
            ready: how many of those that are due go in. Before the first epoch none are.
        """
        if not now.epoch:
            return now._replace(epoch=epoch + 1)
        if self.auto:
            return now._replace(epoch=epoch + 1, cursor=now.cursor + ready)
        # More may be behind than there is room for at once: it is all made up, a part at a time.
        behind = now.behind + self.replaced - ready
        late = now.late + max(self.replaced - ready, 0)
        return WindowState(now.loads, epoch + 1, now.cursor + ready, behind, late)

    def leads(self, then: WindowState, now: WindowState) -> bool:
        """Whether a window that stood there stands here when no epoch, or one, has begun since."""
        moved, behind = now.cursor - then.cursor, now.behind - then.behind
        if now.epoch == then.epoch:
            return moved == behind == 0
        fits = self.auto or moved + behind == self.replaced
        return now.epoch == then.epoch + 1 and 0 <= moved <= self.ahead and fits

    @property
    def epochs_until_all_seen(self) -> int | None:
        """How many epochs use every sample, where preparing keeps up; None for never."""
        return epochs_until_all_seen(self.samples, self.resident, self.replaced)

    def policy(self) -> RunningWindow:
        """Which samples are resident, and which come next."""
        return RunningWindow(self.samples, self.resident, self.ahead, self.seed, self.shuffle)
