"""Going round a loader without end, as far as each call wants, and saying how far that was.

A pass begins when its first batch is wanted, not when the last batch of the pass before was taken: the
model's draws of that step come before the sampler's. What deals or shuffles by epoch (``set_epoch``) is told
of each new pass, as nobody else could.

Where all samples are resident on the device, what is drawn is not batches but rows, all that a call wants at
once: one upload for many steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset.device.queue import DeviceQueue
from hotset.device.resident import Serving
from hotset.errors import ArgumentError, StateError

__all__ = ["Drawn", "Rounds"]


class Drawn(NamedTuple):
    """What a step runs on.

    Attributes:
        batch: on the device; rows (int64) if ``serving`` is given.
        serving: the resident samples that these are rows of.
    """

    batch: Any
    serving: Serving | None = None


class Rounds:
    """Batches without end.

    Args:
        queue: where they come from.
    """

    def __init__(self, queue: DeviceQueue[Any]) -> None:
        self.queue = queue
        self._pass: Iterator[Any] | None = None
        self._passes = 0
        self._taken = 0
        self._empty = True  # whether the pass has given nothing so far
        self._rows: deque[tuple[Any, Any, Serving]] = deque()

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

    def draw(self, wanted: int) -> Drawn:
        """The next batch.

        Args:
            wanted: how many the caller is going to draw, this one counted.

        Raises:
            ArgumentError: the loader gives nothing at all.
            Exception: what the loader raises.
        """
        while True:
            if not self._rows:
                drawn = self._draw_one(wanted)
                if drawn is None:
                    continue
            else:
                rows, _, serving = self._rows.popleft()
                drawn = Drawn(rows, serving)
            self._taken += 1
            return drawn

    def _draw_one(self, wanted: int) -> Drawn | None:
        """A batch; None if a pass ended, or if rows were drawn instead."""
        if self._pass is None:
            if self._passes:
                _tell_next_epoch(self.queue.loader)
            self._pass = iter(self.queue)
        serving = self._pass.serving  # type: ignore[attr-defined]
        try:
            if serving is not None and serving.complete:
                return self._draw_rows(serving, wanted)
            batch = next(self._pass)
        except StopIteration:
            self._end_pass()
            return None
        self._empty = False
        return Drawn(batch)

    def _draw_rows(self, serving: Serving, wanted: int) -> Drawn | None:
        drawn: list[Any] = []
        states: list[Any] = []
        batch: Any = None
        loader = self.queue.loader
        while len(drawn) < wanted:
            state = loader.state_dict() if hasattr(loader, "state_dict") else None
            try:
                rows = serving.rows()
            except StopIteration:
                if drawn:
                    break  # found again by the next draw
                raise
            if rows is None:
                batch = serving.build()
                break
            drawn.append(rows)
            states.append(state)
        self._empty = False
        if drawn:
            lengths = [len(rows) for rows in drawn]
            together = serving.upload(np.concatenate(drawn))
            parts = torch.split(together, lengths)
            self._rows.extend((part, state, serving) for part, state in zip(parts, states, strict=True))
        return Drawn(batch) if batch is not None else None

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
        ahead = self._rows[0][1] if self._rows else None
        loader = ahead if ahead is not None else self.queue.state_dict()
        return {"passes": self._passes, "taken": self._taken, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where that state was taken.

        Raises:
            StateError: it is no such state, or the loader cannot go on from it.
        """
        try:
            passes, taken, loader = int(state["passes"]), int(state["taken"]), state["loader"]
        except (TypeError, KeyError, ValueError) as error:
            raise StateError(f"this is no state of a sink, or it is damaged: {error!r}.") from error
        self.close()
        self.queue.load_state_dict(loader)
        self._passes, self._taken = passes, taken
        self._empty = taken == 0

    def close(self) -> None:
        """End the pass under way."""
        self._pass = None
        self._rows.clear()
        self.queue.close()


def _tell_next_epoch(loader: Any) -> None:
    for thing in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        set_epoch = getattr(thing, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(int(getattr(thing, "epoch", 0)) + 1)
            return
