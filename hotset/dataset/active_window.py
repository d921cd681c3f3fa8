"""The residents: a window in motion. One part of the data is trained on while the next is prepared.

::

    epoch e        training uses the N residents ── meanwhile helpers prepare those that come next
    boundary       begin(e + 1): as many as are ready go in, the longest-resident leave: the cursor moves
    epoch e + 1    ...

**One cursor.** It is a word in shared memory, moved under the store's short lock by the first process that
comes to the boundary; the others find it moved and take it as it is. Each main process puts its epoch and
cursor into its own slot, where its workers read them: ranks may be some batches apart.

**Ready** are the next samples up to the first that is missing. So the order never depends on speed; speed
only decides how far the cursor goes. What is late is due again at the next boundary, together with that
one's own R. A sample that cannot be read, or cannot be stored, is not waited for: it comes in, and is read
from the source when it is used, as it would be without a cache. Where no resident is in memory (after a
restart) nothing is lost by moving on, and all that are due go in.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset._progress import counted
from hotset.dataset.prefetch_pool import PrefetchPool
from hotset.dataset.window import Sizes
from hotset.errors import StateError
from hotset.policy.window import epoch_order
from hotset.store.claims import Ids
from hotset.store.format import Live, Slot
from hotset.store.ring import Ring, WindowState

__all__ = ["ActiveWindow", "WindowPosition", "positions_of"]

_PROGRESS_SECONDS = 0.1
_STARTING_SECONDS = 1.0
# Entries are looked up this many at a time: the arithmetic takes a tenth of a millisecond for one, too.
_BLOCK = 4096


class WindowPosition(NamedTuple):
    """Where a window stands.

    Attributes:
        epoch: the last one that was begun; -1 before the first.
        cursor: how many samples have left.
        behind: how many of those that were due have not come in.
    """

    epoch: int
    cursor: int
    behind: int


class ActiveWindow:
    """The window over one data set, as this process sees it.

    Args:
        sizes: of the window.
        wait, prefill: see :class:`Window`.
        ring: holds the entries; None if nothing can be cached.
        read: gives the sample of a number of the data set, up to the cut.
        name: of the data set, for people.
    """

    def __init__(
        self,
        sizes: Sizes,
        ring: Ring | None,
        read: Callable[[int], Any],
        name: str,
        *,
        wait: bool = False,
        prefill: bool = False,
    ) -> None:
        self.sizes = sizes
        self._policy = sizes.policy()
        self._read = read
        self._name = name
        self._wait = wait
        self._prefill = prefill
        self._background: PrefetchPool | None = None
        self._pid = os.getpid()
        # The slot of the process that announces epochs; its workers inherit the number.
        self._slot = -1
        self._here = WindowPosition(-1, 0, 0)
        self._offset: int | None = None
        self._announced = False
        self._order: tuple[tuple[int, int], Ids] | None = None
        self._samples: dict[int, Ids] = {}
        self._served: float = 0
        self._started = 0.0
        # Epoch and cursor where nothing can be cached, and there is no slot to put them: workers may stay.
        self._bare = _words() if ring is None else None
        if ring is not None:
            self._settle(ring)

    # ---- which samples -------------------------------------------------------------------------------

    def entries(self, positions: Ids | None, ring: Ring | None) -> Ids:
        """The entries at these positions of the epoch, or at all of them."""
        epoch, cursor = self._epoch_and_cursor(ring)
        if self._order is None or self._order[0] != (epoch, cursor):
            places = np.arange(self.sizes.resident)
            if self.sizes.shuffle:
                places = epoch_order(self.sizes.seed, epoch, cursor, self.sizes.resident)
            self._order = ((epoch, cursor), cursor + places)
        order = self._order[1]
        return order if positions is None else order[positions]

    def sample(self, entry: int) -> int:
        """The number in the data set of the sample that an entry is."""
        block, place = divmod(entry, _BLOCK)
        if block not in self._samples:
            if len(self._samples) > self.sizes.slots // _BLOCK + 2:
                self._samples.clear()
            self._samples[block] = self._policy.entries(block * _BLOCK, _BLOCK)
        return int(self._samples[block][place])

    def read(self, entry: int) -> Any:
        """Read the sample that an entry is, as far as it is cached."""
        return self._read(self.sample(entry))

    def cursor(self, ring: Ring | None) -> int:
        """How many samples have left the window."""
        return self._epoch_and_cursor(ring)[1]

    def reading(self, read: Callable[[int], Any]) -> ActiveWindow:
        """The same window, as this process sees it, whose samples are read so."""
        other = copy.copy(self)
        other._read = read
        return other

    def _epoch_and_cursor(self, ring: Ring | None) -> tuple[int, int]:
        """Of the process that announces epochs: this one, or the one whose worker this is."""
        if ring is None and self._bare is not None:
            return int(self._bare[0]), int(self._bare[1])
        if ring is None or self._slot < 0 or (self._pid == os.getpid() and ring.member.slot == self._slot):
            return max(self._here.epoch, 0), self._here.cursor
        row = ring.segment.slots[self._slot]
        return max(int(row[Slot.EPOCH]), 0), int(row[Slot.CURSOR])

    # ---- boundaries ----------------------------------------------------------------------------------

    def begin_next(
        self, ring: Ring | None, processes: int, context: Any, tell: Callable[[str], None]
    ) -> None:
        """Begin the epoch after the last one, unless the user has announced one since."""
        if not self._announced:
            self.begin(self._here.epoch + 1, ring, processes, context, tell)
        self._announced = False

    def announce(self, epoch: int, ring: Ring | None, tell: Callable[[str], None]) -> None:
        """Begin an epoch because the user says so; a loader that begins a pass next does not do it again."""
        self.begin(epoch, ring, 1, None, tell)
        self._announced = True

    def begin(
        self, epoch: int, ring: Ring | None, processes: int, context: Any, tell: Callable[[str], None]
    ) -> None:
        """Begin an epoch in this process: the cursor moves if no other process has moved it there already.

        Args:
            epoch: its number; the one under way changes nothing.
            ring: the store.
            processes: helpers that prepare samples from now on, if none do yet.
            context: how these are started.
            tell: gets the sentence about samples that were late, once for all processes.

        Raises:
            Exception: what the data set has raised in a helper.
        """
        if epoch == self._here.epoch:
            return
        if ring is None:  # nothing is kept, so nothing is waited for
            moves = self.sizes.replaced if self._here.epoch >= 0 else 0
            self._stand(WindowPosition(epoch, self._here.cursor + moves, 0))
            return
        self._settle(ring)
        first = self._background is None
        self._start_workers(ring, processes, context)
        self.raise_errors()
        live = ring.segment.live
        if self._offset is None:  # a job that comes later counts from 0, where others are far ahead
            self._offset = max(int(live[Live.EPOCH]) - 1 - epoch, 0)
        elif epoch < self._here.epoch:  # counted from 0 again: another training, whose epochs are new ones
            self._offset += self._here.epoch + 1 - epoch
        number = epoch + self._offset
        # The word counts from 1, so that 0 is: none has begun yet, and nothing is due.
        if self._wait and not ring.invalidated and 0 < int(live[Live.EPOCH]) <= number:
            due = self._due(ring)
            ring.fill(due[~ring.settled(due)], self.read, keep=False)
        self._move(ring, number, tell)
        self._here = WindowPosition(epoch, int(live[Live.CURSOR]), int(live[Live.BEHIND]))
        self._say_where(ring)
        if self._background is not None:
            if self._prefill and first:
                self._fill_first(ring)
            self._background.request(self._due(ring))

    def prepare(self, ring: Ring | None, processes: int, context: Any) -> None:
        """Have the samples prepared that are due at the next boundary; see :meth:`begin`."""
        if ring is not None:
            self._start_workers(ring, processes, context)
            if self._background is not None:
                self._background.request(self._due(ring))

    def _start_workers(self, ring: Ring, processes: int, context: Any) -> None:
        """Have helpers, if there are none and they will have something to do."""
        if ring.invalidated:
            self.close()
        elif self._background is None and self.sizes.replaced + self._prefill:
            self._background = PrefetchPool(ring, self.read, processes=processes, context=context)
            self._started = time.monotonic()

    def _due(self, ring: Ring) -> Ids:
        """The entries that are to go in at the next boundary."""
        now = WindowState.of(ring)
        return _run(now.cursor + self.sizes.resident, self.sizes.due(now.behind))

    def _move(self, ring: Ring, epoch: int, tell: Callable[[str], None]) -> None:
        """Move the cursor, if no other process has moved it there already."""
        with ring.member.short_lock() as held:
            now = WindowState.of(ring)
            if held and epoch >= now.epoch:
                due = self._due(ring)
                settled = ring.settled(due)
                ready = len(due) if settled.all() else int(settled.argmin())
                fresh = not ring.settled(_run(now.cursor, self.sizes.resident)).any()
                after = self.sizes.moved(now, epoch, len(due) if self._wait or fresh else ready)
                after.put(ring)
                self._tell_late(ring, now, after, tell)

    def _tell_late(
        self, ring: Ring, before: WindowState, after: WindowState, tell: Callable[[str], None]
    ) -> None:
        live = ring.segment.live
        # Once, or in the first moments, is no more than helpers that were just started.
        if self.sizes.auto or not before.behind or time.monotonic() <= self._started + _STARTING_SECONDS:
            return
        due = self.sizes.due(before.behind)
        late = due - (after.cursor - before.cursor)
        if late and not live[Live.LATE_TOLD]:
            live[Live.LATE_TOLD] = 1
            tell(
                f"{self._name}: {late:,} of the {due:,} samples that were to go into the window were not "
                "ready, as preparing them takes longer than an epoch; they go in at later boundaries. Lower "
                '`replace=`, set it to "auto", or give the loader more workers.'
            )

    def _fill_first(self, ring: Ring) -> None:
        """Fill the residents before the first epoch, and show how far that is."""
        assert self._background is not None
        wanted = _run(self._here.cursor, self.sizes.resident)
        self._background.request(wanted)
        with counted(self._name, len(wanted), "samples") as show:
            while not (settled := ring.settled(wanted)).all() and not self._background.idle:
                self.raise_errors()
                show(int(settled.sum()))
                time.sleep(_PROGRESS_SECONDS)
            show(int(settled.sum()))
        self.raise_errors()

    def count(self, samples: int, ring: Ring | None, tell: Callable[[str], None]) -> None:
        """Count samples that a loader of another kind has taken; tell the user if it announces no epochs."""
        self._served += samples
        if 2 * self.sizes.resident < self._served < math.inf:
            begun = self._here.epoch >= 0 or (ring is not None and ring.segment.live[Live.EPOCH])
            if self.sizes.replaced and not begun:
                tell(
                    f"{self._name} was read twice over and no epoch was announced, so its window stands "
                    "still: call set_epoch(epoch) on it before each epoch, or use hotset.DataLoader, which "
                    "does so."
                )
            self._served = math.inf

    def raise_errors(self) -> None:
        """Raise, once, what the data set has raised in a helper. Costs a microsecond or two if nothing."""
        if self._background is not None:
            self._background.raise_errors()

    # ---- going on ------------------------------------------------------------------------------------

    @property
    def position(self) -> WindowPosition:
        """Where the window stands for this process."""
        return self._here

    def state(self) -> list[int]:
        """Where the window stands, after what tells it from another, as plain numbers."""
        epoch, cursor, behind = self._here
        return [*map(int, self.sizes), epoch + 1, cursor, behind]

    def go_to(self, position: WindowPosition, ring: Ring | None) -> None:
        """Take up a window where it stood."""
        self._stand(position)
        self._offset, self._announced = 0, False
        if ring is None:
            return
        self._settle(ring)
        self.close()  # the helpers are filling what was due elsewhere, and must not go on after the clear
        now = WindowState.of(ring)
        to = WindowState(now.loads + 1, position.epoch + 1, position.cursor, position.behind, now.late)
        # Another rank may have loaded it, and begun: what has come in since is not to be forgotten.
        if not self.sizes.leads(to, now):
            to.put_back(ring)
        self._say_where(ring)

    def _stand(self, position: WindowPosition) -> None:
        """Be there; for workers, too, that have nothing else to look at."""
        self._here = position
        if self._bare is not None:
            self._bare[0], self._bare[1] = max(position.epoch, 0), position.cursor

    def _say_where(self, ring: Ring) -> None:
        """Tell this process's workers which epoch they are in."""
        row = ring.member.row
        row[Slot.CURSOR], row[Slot.EPOCH] = self._here.cursor, self._here.epoch

    def _settle(self, ring: Ring) -> None:
        """Have the slot from which this process's workers read the epoch."""
        self._pid, self._slot = os.getpid(), ring.member.slot

    def close(self) -> None:
        """End the helpers."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_background": None, "_order": None}


def positions_of(states: list[list[int]], now: list[list[int]]) -> tuple[WindowPosition, ...]:
    """Where each window stood when its state was taken.

    Args:
        states, now: what :meth:`ActiveWindow.state` gave then, and gives now.

    Raises:
        StateError: they are other windows.
    """
    known = len(Sizes._fields)
    if [state[:known] for state in states] != [state[:known] for state in now]:
        raise StateError(
            "the state is of a loader over another window (its size, rate, seed or order differ); load it "
            "into a loader over a window with the same parameters."
        )
    return tuple(WindowPosition(epoch - 1, *rest) for epoch, *rest in (state[known:] for state in states))


def _run(first: int, count: int) -> Ids:
    return np.arange(first, first + count, dtype=np.int64)


def _words() -> torch.Tensor:
    """Two words that workers share, whichever way they are started."""
    words = torch.zeros(2, dtype=torch.int64)
    with contextlib.suppress(RuntimeError):  # a full /dev/shm: workers that persist stay in the first epoch
        words.share_memory_()  # type: ignore[no-untyped-call]
    return words
