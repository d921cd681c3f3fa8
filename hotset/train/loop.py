"""The order of events in training: epochs, sinks, steps, and what is told when.

An epoch is ``steps_in_epoch`` steps: those of a pass, or the sink's size. With sinking they are one sink;
without, each step is a sink of its own. A loader without a length says itself when the epoch is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.device.sink import Sink
from hotset.errors import ArgumentError
from hotset.train.callbacks import CallbackList
from hotset.train.epochs import PassOver
from hotset.train.run_state import RunState

__all__ = ["train"]


def train(
    run: RunState,
    sink: Sink,
    tell: CallbackList,
    *,
    sinking: bool,
    evaluate: Callable[[], dict[str, Any]] | None,
) -> None:
    """Train from where the run stands to the end of its last epoch, or until a stop is requested.

    Args:
        run: see :class:`RunState`.
        sink: does the steps; its outputs are those of all steps.
        tell: tells the callbacks.
        sinking: whether an epoch is one sink.
        evaluate: called at each epoch's end, gives the metrics.
    """
    while run.epochs_done < run.epochs and not run.stopping:
        run.epoch = run.epochs_done + 1
        tell("on_epoch_begin", run)
        if not _train_epoch(run, sink, tell, sinking):
            return
        if evaluate is not None:
            run.metrics = evaluate()
        # Before the callbacks: a checkpoint that one of them writes is of an epoch that is over.
        run.epochs_done = run.epoch
        tell("on_epoch_end", run)
        run.epoch_began = run.step


def _advance(run: RunState, sink: Sink, steps: int) -> torch.Tensor:
    """Run steps, from where a run stopped if this one goes on from it; returns their losses, ``(steps,)``.

    Only now, as a loader that is told where to go on does so in its next pass, and there may be no step left.
    """
    if run.data is not None:
        sink.load_state_dict(run.data)
        run.data = None
        run.before = run.done - sink.steps
    losses: torch.Tensor = sink(steps)
    return losses


def _train_epoch(run: RunState, sink: Sink, tell: CallbackList, sinking: bool) -> bool:
    """Train the rest of an epoch; False if a stop has cut it short."""
    whole = run.steps_in_epoch
    while whole is None or run.step_in_epoch < whole:
        try:
            losses = _advance(run, sink, whole - run.step_in_epoch if sinking and whole is not None else 1)
        except PassOver:
            if run.step_in_epoch == 0:
                raise ArgumentError(
                    "the loader gave no batch in a whole pass: it is empty, or an iterator that is used up; "
                    "give one that can be iterated over again."
                ) from None
            return True
        run.take(losses)
        tell.steps(run)
        tell("on_sink_end", run)
        if run.stopping:
            return run.step_in_epoch == whole
    return True
