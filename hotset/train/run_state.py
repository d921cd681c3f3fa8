"""A training run as callbacks see it: where it stands, what the losses were, and the wish to stop.

The host learns of progress at the end of each *sink*: of 1 step without sinking, of K with it. Losses stay on
the device until one is read; all of a sink's then come in one copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hotset.errors import ArgumentError, StateError
from hotset.train.checkpoint import write

__all__ = ["RunState", "rank_of_job"]


@dataclass(eq=False)
class RunState:
    """What a callback is given. All counts are of steps that have really been done.

    Attributes:
        model: the :class:`hotset.Model` that trains.
        loader: the data, as they were given to it.
        epochs: that this call is to train in all.
        epoch: the one under way, from 1; 0 in an evaluation of its own.
        step: training steps of the model so far, over all its calls.
        steps_in_epoch: how many there are in an epoch; None if the loader has no length.
        losses: of the last sink's steps, ``(steps,)``, on the device.
        metrics: values by name, of the last evaluation in :meth:`Model.fit` or :meth:`Model.eval`.
        stopping: whether a stop was requested.
    """

    model: Any
    loader: Any
    epochs: int = 0
    epoch: int = 0
    step: int = 0
    steps_in_epoch: int | None = None
    losses: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    metrics: dict[str, Any] = field(default_factory=dict)
    stopping: bool = False
    # The rest belongs to the training loop.
    epochs_done: int = field(default=0, repr=False)  # epochs that are over
    trained: bool = field(default=False, repr=False)  # of the one under way, all but its evaluation is over
    done: int = field(init=False, repr=False)  # steps that are done; callbacks may be told of an earlier one
    before: int = field(init=False, repr=False)  # steps that were done before this sink was made
    data: dict[str, Any] | None = field(default=None, repr=False)  # where in the data to go on
    epoch_began: int = field(init=False, repr=False)  # the step after which the epoch began
    numbers: list[float] | None = field(default=None, repr=False)  # the losses, once they were read
    at: int = field(default=-1, repr=False)  # which of the losses is the current one
    # Makes a checkpoint.
    content: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.done = self.before = self.epoch_began = self.step

    @property
    def network(self) -> nn.Module:
        """The model's network."""
        network: nn.Module = self.model.network
        return network

    @property
    def optimizer(self) -> Any:
        """The model's optimizer."""
        return self.model.optimizer

    @property
    def step_in_epoch(self) -> int:
        """Steps done of the epoch under way."""
        return self.step - self.epoch_began

    @property
    def loss(self) -> float:
        """The loss of the step that the callback is told of; NaN before the first.

        Reading it waits for the device to come to the sink's end.
        """
        if self.numbers is None:
            self.numbers = self.losses.tolist()
        return self.numbers[self.at] if self.numbers else float("nan")

    def request_stop(self) -> None:
        """End the training at the end of this sink. With several ranks, all of them must ask."""
        self.stopping = True

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write all that :meth:`Model.load_checkpoint` needs to go on from here; atomically.

        In ``on_step_end`` that is the end of the step's sink.

        Raises:
            StateError: the loader cannot say where it stands.
            ArgumentError: it is an evaluation, and there is nothing to go on with.
            OSError, RuntimeError: the file cannot be written (torch raises the latter for a full disk).
        """
        write(path, self.checkpoint())

    def checkpoint(self) -> dict[str, Any]:
        """What :meth:`save_checkpoint` writes; its tensors are the network's own, not copies.

        Raises:
            as :meth:`save_checkpoint`.
        """
        if self.content is None:
            raise ArgumentError(
                "a checkpoint can be made during training only; call this in a callback of train() or fit()."
            )
        return self.content()

    # ---- for the loop --------------------------------------------------------------------------------

    def take(self, losses: torch.Tensor) -> None:
        """Take the losses of a sink that has ended."""
        self.losses, self.numbers, self.at = losses, None, -1
        self.done += len(losses)
        self.step = self.done

    def look_at(self, number: int) -> None:
        """Have callbacks see the sink's step of this number, from 0."""
        self.at = number
        self.step = self.done - len(self.losses) + number + 1

    def position(self) -> dict[str, Any]:
        """Where it stands, in plain values."""
        begun = self.epochs_done < self.epoch
        step_in_epoch = self.done - self.epoch_began if begun else 0
        found = {"epochs": self.epochs_done, "step_in_epoch": step_in_epoch, "step": self.done}
        # Of a loader without a length the counts do not tell it.
        return {**found, "trained": True} if begun and self.trained else found

    def go_to(self, position: dict[str, Any]) -> None:
        """Stand where another run stood.

        Raises:
            StateError: the position is damaged.
        """
        counts: list[Any] = [position.get(name) for name in ("epochs", "step_in_epoch", "step")]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise StateError("the checkpoint is damaged: it does not say at which step it was made.")
        self.epochs_done, step_in_epoch, self.done = counts
        self.epoch, self.step, self.before = self.epochs_done, self.done, self.done
        self.epoch_began = self.done - step_in_epoch
        self.trained = position.get("trained") is True


def rank_of_job() -> tuple[int, int]:
    """This process's rank and the number of ranks: ``(0, 1)`` where ``torch.distributed`` is not in use.

    Example:
        >>> rank_of_job()
        (0, 1)
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
