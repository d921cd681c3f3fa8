"""The active window: training uses one part of the data while the next is prepared.

::

    epoch e        training uses the N residents ── meanwhile workers prepare those that come next
    boundary       begin(e + 1): as many as are ready enter, the longest-resident leave: the cursor moves
    epoch e + 1    ...

**One cursor.** It is a word in shared memory. The first process that reaches the boundary moves it, under the
store's short lock; the others find it moved and take it. Each main process writes its epoch and cursor into
its own slot, where its workers read them, as ranks may be some batches apart.

**Ready** are the next samples up to the first that is missing. So the order never depends on speed; speed
only determines how far the cursor moves. A late sample is due again at the next boundary, together with that
boundary's own R. The window does not wait for a sample that cannot be read or stored: it enters, and is read
from the source when it is used, as without a cache. If no resident is in memory (after a restart), all due
samples enter, as moving on loses nothing.
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

from hotset._progress import counting_bar
from hotset._warnings import warn
from hotset.dataset.attachment import Attachment
from hotset.dataset.prefetch.pool import PrefetchPool
from hotset.dataset.window import Sizes
from hotset.errors import StateError
from hotset.policy.window import epoch_order
from hotset.store.claims import Ids
from hotset.store.format import Live, Slot
from hotset.store.ring import Ring, WindowState

__all__ = ["ActiveWindow", "WindowPosition", "positions_of"]

_PROGRESS_SECONDS = 0.1
_STARTING_SECONDS = 1.0
# Entries are computed in blocks of this size: a single one takes a tenth of a millisecond, too.
_BLOCK = 4096


class WindowPosition(NamedTuple):
    """The position of a window.

    Attributes:
        epoch: the last epoch that was begun; -1 before the first.
        cursor: how many samples have left.
        behind: how many of the due samples have not entered.
    """

    epoch: int
    cursor: int
    behind: int


class ActiveWindow:
    """The window over one dataset, as this process sees it.

    Args:
        wait, prefill: see :class:`Window`.
        attachment: how this process reaches the ring that holds the entries, if anything can be cached.
        read: returns the sample at an index of the dataset, up to the cut.
    """

    def __init__(
        self,
        sizes: Sizes,
        attachment: Attachment,
        read: Callable[[int], Any],
        name: str,
        *,
        wait: bool,
        prefill: bool,
    ) -> None:
        self.sizes = sizes
        self._policy = sizes.policy()
        self._attachment = attachment
        self._read = read
        self._name = name
        self._wait = wait
        self._prefill = prefill
        self._pool: PrefetchPool | None = None
        self._pid = os.getpid()
        # The slot of the process that announces epochs; its workers inherit its number.
        self._slot = -1
        self._position = WindowPosition(-1, 0, 0)
        self._offset: int | None = None
        self._announced = False
        self._order: tuple[tuple[int, int], Ids] | None = None
        self._samples: dict[int, Ids] = {}
        self._served: float = 0
        self._started = 0.0
        self._told_that_it_stays = False
        ring = self.ring
        # Epoch and cursor if nothing can be cached, as there is no slot then: workers may be persistent.
        self._epoch_words = _words() if ring is None else None
        if ring is not None:
            self._remember_slot(ring)

    @property
    def ring(self) -> Ring | None:
        """The ring with the window's cursor, even if no samples are served from it any more."""
        store = self._attachment.store()
        return store if isinstance(store, Ring) else None

    # ---- which samples -------------------------------------------------------------------------------

    def entries(self, positions: Ids | None) -> Ids:
        """The entries at these positions of the epoch, or at all of them."""
        epoch, cursor = self._epoch_and_cursor()
        if self._order is None or self._order[0] != (epoch, cursor):
            offsets = np.arange(self.sizes.resident)
            if self.sizes.shuffle:
                offsets = epoch_order(self.sizes.seed, epoch, cursor, self.sizes.resident)
            self._order = ((epoch, cursor), cursor + offsets)
        order = self._order[1]
        return order if positions is None else order[positions]

    def held(self) -> Ids:
        """The entries that the ring may hold: the residents, and those that come next."""
        return _run(self.cursor(), self.sizes.slots)

    def sample(self, entry: int) -> int:
        """The index in the dataset of an entry's sample."""
        block, offset = divmod(entry, _BLOCK)
        if block not in self._samples:
            if len(self._samples) > self.sizes.slots // _BLOCK + 2:
                self._samples.clear()
            self._samples[block] = self._policy.entries(block * _BLOCK, _BLOCK)
        return int(self._samples[block][offset])

    def read(self, entry: int) -> Any:
        """Read an entry's sample, up to the cut."""
        return self._read(self.sample(entry))

    def cursor(self) -> int:
        """How many samples have left the window."""
        return self._epoch_and_cursor()[1]

    def reading(self, read: Callable[[int], Any], attachment: Attachment) -> ActiveWindow:
        """The same window with another function that reads samples, and another store."""
        other = copy.copy(self)
        other._read, other._attachment = read, attachment
        return other

    def _epoch_and_cursor(self) -> tuple[int, int]:
        """Epoch and cursor of the process that announces epochs: this one, or this worker's parent."""
        ring = self.ring
        if ring is None and self._epoch_words is not None:
            return int(self._epoch_words[0]), int(self._epoch_words[1])
        if (
            ring is None
            or self._slot < 0
            or (self._pid == os.getpid() and ring.participant.slot == self._slot)
        ):
            return max(self._position.epoch, 0), self._position.cursor
        row = ring.segment.slots[self._slot]
        return max(int(row[Slot.EPOCH]), 0), int(row[Slot.CURSOR])

    # ---- boundaries ----------------------------------------------------------------------------------

    def begin_next(self, processes: int, context: Any) -> None:
        """Begin the next epoch, unless the user has announced one since the last."""
        ring = self.ring
        if not self._announced:
            self.begin(self._position.epoch + 1, processes, context)
        elif ring is not None and self._start_workers(ring, processes, context):
            assert self._pool is not None
            self._pool.request(self._due(ring))
        self._announced = False

    def announce(self, epoch: int) -> None:
        """Begin an epoch for the user; a loader that starts next does not begin another.

        Which loader that is, is not known yet, so one prefetch worker begins.
        """
        self.begin(epoch, 1, None)
        self._announced = True

    def begin(self, epoch: int, processes: int, context: Any) -> None:
        """Begin an epoch in this process, and move the cursor unless another process has done so.

        Args:
            epoch: its number; the current one has no effect.
            processes: how many prefetch workers to start, if there are none yet.

        Warns:
            HotsetWarning: samples are late; once for all processes.

        Raises:
            Exception: what the dataset has raised in a prefetch worker.
        """
        if epoch == self._position.epoch:
            return
        ring = self.ring
        if ring is None:  # nothing can be cached
            moves = self.sizes.replaced if self._position.epoch >= 0 else 0
            self._set_position(WindowPosition(epoch, self._position.cursor + moves, 0))
            return
        self._remember_slot(ring)
        first = self._pool is None
        self._start_workers(ring, processes, context)
        self.raise_errors()
        live = ring.segment.live
        if self._offset is None:  # this job counts from 0, while other jobs of the window are ahead
            self._offset = max(int(live[Live.WINDOW_EPOCH]) - 1 - epoch, 0)
        elif epoch < self._position.epoch:  # counted from 0 again: another training, with new epochs
            self._offset += self._position.epoch + 1 - epoch
        number = epoch + self._offset
        # The word counts from 1; 0 means that no epoch has begun, so nothing is due.
        if self._wait and not ring.invalidated and 0 < int(live[Live.WINDOW_EPOCH]) <= number:
            due = self._due(ring)
            ring.fill(due[~ring.settled(due)], self.read, keep=False)
        self._move(ring, number)
        self.raise_errors()  # a sample that entered because a worker has just given it up
        self._position = WindowPosition(epoch, int(live[Live.WINDOW_CURSOR]), int(live[Live.WINDOW_BEHIND]))
        self._publish_position(ring)
        if self._pool is not None:
            if self._prefill and first:
                self._fill_first(ring)
            self._pool.request(self._due(ring))

    def prepare(self, processes: int, context: Any) -> None:
        """Go on with the present epoch: have the samples prepared that are due at the next boundary.

        See :meth:`begin`. If the user has announced this epoch, that does not count for the next one.
        """
        self._announced = False
        ring = self.ring
        if ring is not None:
            self._start_workers(ring, processes, context)
            if self._pool is not None:
                self._pool.request(self._due(ring))

    def _start_workers(self, ring: Ring, processes: int, context: Any) -> bool:
        """Make a pool of prefetch workers, if samples will be due; returns whether it is another one now.

        One with fewer workers, or no start method, gives way: no loader was known, or another one, when it
        was made.
        """
        if ring.invalidated:
            self.close()
            return False
        pool = self._pool
        named = pool is not None and pool.context is None and context is not None
        if pool is not None and (pool.processes < processes or named):
            self.raise_errors()
            self.close()
        if self._pool is not None or not self.sizes.replaced + self._prefill:
            return False
        self._pool = PrefetchPool(ring, self.read, processes=processes, context=context)
        self._started = time.monotonic()
        return True

    def _due(self, ring: Ring) -> Ids:
        """The entries that are to enter at the next boundary."""
        now = WindowState.of(ring)
        return _run(now.cursor + self.sizes.resident, self.sizes.due(now.behind))

    def _move(self, ring: Ring, epoch: int) -> None:
        """Move the cursor, if no other process has moved it there already.

        Warns:
            HotsetWarning: it cannot be moved, so the last epoch's samples come again; once in this process.
        """
        with ring.participant.short_lock() as held:
            now = WindowState.of(ring)
            stays = not held and epoch >= now.epoch > 0 and self.sizes.replaced > 0
            if held and epoch >= now.epoch:
                due = self._due(ring)
                settled = ring.settled(due)
                ready = len(due) if settled.all() else int(settled.argmin())
                fresh = not ring.settled(_run(now.cursor, self.sizes.resident)).any()
                after = self.sizes.moved(now, epoch, len(due) if self._wait or fresh else ready)
                after.put(ring)
                self._warn_late(ring, now, after)
        if stays and not ring.invalidated and not self._told_that_it_stays:
            self._told_that_it_stays = True
            warn(
                f"{self._name}: its window does not move, and this epoch has the samples of the last one, as "
                "this process cannot lock the cache: another process that has it is stopped, or this program "
                "has closed its descriptors (os.closerange). Let that process go on, or make the cache "
                "after that."
            )

    def _warn_late(self, ring: Ring, before: WindowState, after: WindowState) -> None:
        live = ring.segment.live
        # Once, or in the first second, the reason may be that the workers were just started.
        if self.sizes.auto or not before.behind or time.monotonic() <= self._started + _STARTING_SECONDS:
            return
        due = self.sizes.due(before.behind)
        late = due - (after.cursor - before.cursor)
        if late and not live[Live.WARNED_LATE]:
            live[Live.WARNED_LATE] = 1
            warn(
                f"{self._name}: {late:,} of the {due:,} samples that were to enter the window were not "
                "ready, as preparing them takes longer than an epoch; they enter at later boundaries. Lower "
                '`replace=`, set it to "auto", or give the loader more workers.'
            )

    def _fill_first(self, ring: Ring) -> None:
        """Read the residents before the first epoch, with a progress bar."""
        assert self._pool is not None
        residents = _run(self._position.cursor, self.sizes.resident)
        self._pool.request(residents)
        with counting_bar(self._name, len(residents)) as show:
            while not (settled := ring.settled(residents)).all() and not self._pool.idle:
                self.raise_errors()
                show(int(settled.sum()))
                time.sleep(_PROGRESS_SECONDS)
            show(int(settled.sum()))
        self.raise_errors()

    def count(self, samples: int) -> None:
        """Count samples that another kind of loader has taken; warn if no epochs are announced."""
        self._served += samples
        if 2 * self.sizes.resident < self._served < math.inf:
            ring = self.ring
            begun = self._position.epoch >= 0 or (ring is not None and ring.segment.live[Live.WINDOW_EPOCH])
            if self.sizes.replaced and not begun:
                warn(
                    f"{self._name} was read twice and no epoch was announced, so its window does not move: "
                    "call set_epoch(epoch) on it before each epoch, or use hotset.DataLoader, which does so."
                )
            self._served = math.inf

    def raise_errors(self) -> None:
        """Raise, once, an error of the dataset in a prefetch worker. Takes 1 to 2 us if there is none."""
        if self._pool is not None:
            self._pool.raise_errors()

    # ---- resuming ------------------------------------------------------------------------------------

    @property
    def position(self) -> WindowPosition:
        """The window's position in this process."""
        return self._position

    def state(self) -> list[int]:
        """The window's sizes and its position, as plain numbers."""
        epoch, cursor, behind = self._position
        return [*map(int, self.sizes), epoch + 1, cursor, behind]

    def go_to(self, position: WindowPosition) -> None:
        """Continue the window at this position."""
        self._set_position(position)
        self._offset, self._announced = 0, False
        ring = self.ring
        if ring is None:
            return
        self._remember_slot(ring)
        self.close()  # the workers prepare what was due at the old position, and must stop before the clear
        now = WindowState.of(ring)
        to = WindowState(now.loads + 1, position.epoch + 1, position.cursor, position.behind, now.late)
        # Another rank may have loaded the state and begun: keep the samples that have entered since.
        to.put_back(ring, self.sizes.leads)
        self._publish_position(ring)

    def _set_position(self, position: WindowPosition) -> None:
        """Set the position, for workers too if there is no slot."""
        self._position = position
        if self._epoch_words is not None:
            self._epoch_words[0], self._epoch_words[1] = max(position.epoch, 0), position.cursor

    def _publish_position(self, ring: Ring) -> None:
        """Tell this process's workers which epoch they are in."""
        row = ring.participant.row
        row[Slot.CURSOR], row[Slot.EPOCH] = self._position.cursor, self._position.epoch

    def _remember_slot(self, ring: Ring) -> None:
        """Remember the slot from which this process's workers read the epoch."""
        self._pid, self._slot = os.getpid(), ring.participant.slot

    def close(self) -> None:
        """Kill the prefetch workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_order": None}


def positions_of(states: list[list[int]], now: list[list[int]]) -> tuple[WindowPosition, ...]:
    """The position of each window when its state was saved.

    Args:
        states, now: what :meth:`ActiveWindow.state` returned then, and returns now.

    Raises:
        StateError: the windows differ.
    """
    known = len(Sizes._fields)
    if [state[:known] for state in states] != [state[:known] for state in now]:
        raise StateError(
            "the state is of a loader over another window (its size, rate, seed or order differs); load it "
            "into a loader over a window with the same parameters."
        )
    return tuple(WindowPosition(epoch - 1, *rest) for epoch, *rest in (state[known:] for state in states))


def _run(first: int, count: int) -> Ids:
    return np.arange(first, first + count, dtype=np.int64)


def _words() -> torch.Tensor:
    """Two words that workers share, with any start method."""
    words = torch.zeros(2, dtype=torch.int64, device="cpu")
    with contextlib.suppress(RuntimeError):  # /dev/shm is full: persistent workers stay in the first epoch
        words.share_memory_()  # type: ignore[no-untyped-call]
    return words
