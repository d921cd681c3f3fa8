"""Cycle through a loader without end, as far as each call wants, and keep count of passes and batches.

A pass begins when its first batch is wanted, not when the last batch of the pass before was taken: the
model's draws of that step come before the sampler's. A sampler that divides or shuffles by epoch
(``set_epoch``) gets the number of each new pass here, as the user's loop does not see where passes begin.

Where all samples are resident on the device, the cycle gives rows instead of batches, those of many steps at
once: one upload for all of them. Not those of a whole call: the device would idle until the host has them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset.device.gpu_cache import ResidentBatches
from hotset.device.queue import DeviceQueue, QueuePass
from hotset.errors import ArgumentError, StateError

__all__ = ["BatchCycle", "StepInput"]

_UPLOADED_AT_ONCE = 64  # rows of this many steps, which the host finds in one or two milliseconds


class StepInput(NamedTuple):
    """What a step runs on.

    Attributes:
        batch: on the device; the numbers of rows, int64, if ``resident`` is given.
        resident: the resident samples whose rows these are.
    """

    batch: Any
    resident: ResidentBatches | None = None


class BatchCycle:
    """Batches of a queue without end; ``own`` says whether this object closes the queue."""

    def __init__(self, queue: DeviceQueue[Any], own: bool = True) -> None:
        self.queue = queue
        self._own = own
        self._pass: QueuePass[Any] | None = None
        self._passes = 0
        self._taken = 0
        self._empty = True  # whether the pass has given nothing so far, not even an exception
        self._epoch_set: Any = None  # the epoch of the loader or sampler as the pass began
        self._ready: deque[tuple[StepInput, Any]] = deque()  # each with the loader's state before it
        self._found: list[tuple[Any, Any]] = []  # rows that come after these, likewise, to be uploaded
        self._ended: Exception | None = None  # what ended these early

    @property
    def length(self) -> int | None:
        """Batches of a pass; None if the loader cannot tell."""
        try:
            return len(self.queue)
        except (TypeError, NotImplementedError):
            return None

    @property
    def epoch(self) -> int:
        """Passes that were completed."""
        return self._passes + (self._taken > 0 and self._taken == self.length)

    @property
    def step(self) -> int:
        """Batches of the current pass that were taken; 0 at its end."""
        return 0 if self._taken == self.length else self._taken

    @property
    def may_end(self) -> bool:
        """Whether the batch that was taken last may be the last of its pass."""
        return self.length in (None, self._taken)

    def take(self, wanted: int) -> StepInput:
        """The next batch.

        Args:
            wanted: how many the caller is going to take, this one counted.

        Raises:
            ArgumentError: the loader gives nothing at all.
            Exception: what the loader raises.
        """
        resident = self._ready[0][0].resident if self._ready else None
        if resident is not None and not resident.is_current:
            self.load_state_dict(self.state_dict())  # the cache was cleared: these rows are found anew
        while not self._ready:
            if not self._fetch(wanted):
                self._end_pass()
        taken, _ = self._ready.popleft()
        self._taken += 1
        if taken.resident is not None:
            assert self._pass is not None
            self._pass.count(taken.batch)
        return taken

    def give_way(self) -> None:
        """See :meth:`hotset.device.queue.QueuePass.give_way`."""
        if self._pass is not None:
            self._pass.give_way()

    def _fetch(self, wanted: int) -> bool:
        """Have something ready; False if the pass is over."""
        try:
            if self._ended is not None:
                error, self._ended = self._ended, None
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame: together they would hold the workers
            if self._pass is None:
                self._begin_pass()
            assert self._pass is not None
            resident = self._pass.resident
            if resident is not None and resident.cache.complete:
                self._fetch_rows(resident, wanted)
            else:
                self._ready.append((StepInput(next(self._pass)), None))
        except StopIteration:
            return False
        except Exception:
            self._empty = False
            raise
        self._empty = self._empty and not self._ready
        return True

    def _fetch_rows(self, resident: ResidentBatches, wanted: int) -> None:
        """Rows for what a call wants next of this pass, in one upload."""
        wanted = min(wanted, _UPLOADED_AT_ONCE)
        found = self._found  # some are there already if the last call was interrupted
        rest: list[tuple[StepInput, Any]] = []
        loader = self.queue.loader
        while len(found) < wanted and not rest:
            state = loader.state_dict() if hasattr(loader, "state_dict") else None
            try:
                rows = resident.rows()
                if rows is None:
                    rest.append((StepInput(resident.build()), state))
                else:
                    found.append((rows, state))
            except Exception as error:
                self._ended = error
                break
        if found:
            together = resident.cache.upload(np.concatenate([rows for rows, _ in found]))
            parts = torch.split(together, [len(rows) for rows, _ in found])
            of_rows = zip(parts, found, strict=True)
            rest = [*((StepInput(part, resident), state) for part, (_, state) in of_rows), *rest]
        # No call, so no interrupt, lies between the two.
        self._ready += rest
        self._found = []

    def _begin_pass(self) -> None:
        sampler = _with_epochs(self.queue.loader)
        # A pass that continues from a state was given its epoch when it began.
        if self._passes and not self._taken and sampler is not None:
            epoch = getattr(sampler, "epoch", None)
            if epoch is None:
                sampler.set_epoch(self._passes)
            elif epoch == self._epoch_set or self._epoch_set is None:  # else the user has set it
                sampler.set_epoch(epoch + 1)
        self._pass = iter(self.queue)
        self._epoch_set = getattr(sampler, "epoch", None)

    def _end_pass(self) -> None:
        self._pass = None
        if self._empty:
            raise ArgumentError(
                f"the {type(self.queue.loader).__name__} gave no batch in a whole pass: it is empty, or an "
                "iterator that is used up; give a loader that can be iterated over again."
            )
        self._passes += 1
        self._taken, self._empty = 0, True

    # ---- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in plain values.

        Raises:
            StateError: the loader cannot say where it stands.
        """
        ahead = next((state for _, state in [*self._ready, *self._found]), None)
        loader = ahead if ahead is not None else self.queue.state_dict()
        return {"passes": self._passes, "taken": self._taken, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where that state was taken.

        Raises:
            StateError: it is not such a state, or the loader cannot continue from it.
        """
        try:
            passes, taken, loader = int(state["passes"]), int(state["taken"]), state["loader"]
        except (TypeError, KeyError, ValueError) as error:
            raise StateError(
                f"state must be what Sink.state_dict() returned, and is something else or damaged: {error!r}."
            ) from error
        self.close()
        self.queue.load_state_dict(loader)
        self._passes, self._taken = passes, taken
        self._empty = taken == 0
        self._epoch_set = None

    def close(self) -> None:
        """End the pass under way."""
        self._passes = self.epoch
        self._pass, self._ended = None, None
        self._taken, self._empty = 0, True
        self._ready.clear()
        self._found = []
        if self._own:
            self.queue.close()
        else:
            self.queue.end_pass()


def _with_epochs(loader: Any) -> Any:
    """The loader or sampler with ``set_epoch``; None if there is none."""
    batches = getattr(loader, "batch_sampler", None)
    places = (loader, batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    return next((one for one in places if hasattr(one, "set_epoch")), None)
