"""The progress bar of a training: a callback like any other, and nothing at all where there is no terminal.

A loss is read from the device a few times a second at most: reading waits for the device, and the host should
not.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hotset._progress import progress_bar
from hotset.train.callbacks import Callback
from hotset.train.distributed import rank_of_job
from hotset.train.run_state import RunState

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["Bar", "bars"]

_BETWEEN_LOSSES = 0.25  # seconds


def bars(progress: bool, held: ExitStack) -> list[Callback]:
    """The bar, to be closed with ``held``, if one is wanted and somebody is there to see it."""
    shown = progress and rank_of_job()[0] == 0 and sys.stdout is not None and sys.stdout.isatty()
    return [held.enter_context(Bar())] if shown else []


class Bar(Callback):
    """One bar for the epoch under way: its number, steps, steps a second, the last loss.

    It stands on the terminal that is ``sys.stdout``; what is printed meanwhile comes above it.
    """

    def __init__(self) -> None:
        # Not above: most processes show no bar, and rich takes a while to be imported.
        from rich.console import Console

        self._progress = progress_bar(Console(highlight=False), "steps", 5.0, "loss")
        self._task: TaskID | None = None
        self._loss = ""
        self._read = 0.0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_epoch_begin(self, run: RunState) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(
            f"epoch {run.epoch}/{run.epochs}",
            total=run.steps_in_epoch,
            completed=run.step_in_epoch,
            loss=self._loss,
        )

    def on_sink_end(self, run: RunState) -> None:
        now = time.monotonic()
        if now - self._read > _BETWEEN_LOSSES:
            self._loss = f"loss {run.loss:.4g}"
            self._read = time.monotonic()
        assert self._task is not None
        self._progress.update(self._task, completed=run.step_in_epoch, loss=self._loss)

    def on_epoch_end(self, run: RunState) -> None:
        assert self._task is not None
        self._loss = f"loss {run.loss:.4g}"
        self._progress.update(self._task, total=run.step_in_epoch, loss=self._loss)
