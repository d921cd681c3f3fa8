"""The loader that a sink reads, made to have a state and to show where a pass ends.

==========================  ================================================================================
torch's own DataLoader      has no state. ``hotset.DataLoader`` with the same attributes gives the same
                            batches and has one, so that one is read
a loader without a length   a sink goes round the data without end, and would find the end of a pass one step
                            late. Here :class:`PassOver` is raised there, and the next step begins a new pass
all others                  as they are
==========================  ================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from hotset.device.queue import DeviceQueue
from hotset.errors import ArgumentError
from hotset.loader.loader import DataLoader

__all__ = ["PassOver", "Passes", "batches_of", "length_of", "queue_of", "source_of", "steps_of_sink"]


class PassOver(Exception):
    """A pass over the data is over; the next batch begins another."""


def length_of(loader: Any) -> int | None:
    """Batches of a pass; None if the loader has no length.

    Raises:
        ArgumentError: it is empty.
    """
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return None
    if length == 0:
        raise ArgumentError(f"this {type(loader).__name__} has no batches; give a loader that is not empty.")
    return length


def steps_of_sink(sinking: Any, sink_size: Any, loader: Any) -> int | None:
    """Steps of an epoch if ``sink_size`` says them; None if an epoch is a pass over the loader.

    Raises:
        ArgumentError: they are not valid.
    """
    if not isinstance(sinking, bool):
        raise ArgumentError(f"dataset_sink_mode must be True or False, got {sinking!r}.")
    whole = isinstance(sink_size, int) and not isinstance(sink_size, bool)
    if not whole or sink_size == 0 or sink_size < -1:
        raise ArgumentError(
            f"sink_size must be a number of steps, 1 or more, or -1 for a pass over the data, got "
            f"{sink_size!r}."
        )
    if sinking and sink_size == -1 and length_of(loader) is None:
        raise ArgumentError(
            f"this {type(loader).__name__} has no length, and sink_size=-1 is as many steps as it has "
            "batches; give sink_size."
        )
    return sink_size if sinking and sink_size > 0 else None


def queue_of(loader: Any, device: torch.device) -> DeviceQueue[Any]:
    """The queue of a loader's batches on the device; the loader, if it is one.

    Raises:
        ArgumentError: it cannot be iterated over, or is a queue to another device.
    """
    if not isinstance(loader, DeviceQueue):
        return DeviceQueue(_with_state(loader), device=device)
    if loader.device != device:
        raise ArgumentError(
            f"the queue's batches are on {loader.device}, and the network is on {device}; give one of them "
            "the device of the other."
        )
    return loader


def source_of(queue: DeviceQueue[Any]) -> DeviceQueue[Any]:
    """What a sink reads, where an epoch is a pass over ``queue``."""
    return queue if length_of(queue) is not None else DeviceQueue(Passes(queue), depth=0, device=queue.device)


def batches_of(queue: DeviceQueue[Any]) -> Iterator[Any]:
    """One pass; an exception ends the queue's threads, too."""
    try:
        yield from queue
    except BaseException:
        queue.close()
        raise


def _with_state(loader: Any) -> Any:
    """torch's own DataLoader as hotset's; any other loader as it is."""
    if type(loader) is not TorchDataLoader:
        return loader
    # As if unpickled: what the loader was made from, and nothing that it has made since.
    able: DataLoader[Any] = DataLoader.__new__(DataLoader)
    able.__dict__.update({**loader.__dict__, "_iterator": None})
    return able


class Passes:
    """A queue read pass after pass, by one iterator that raises :class:`PassOver` between two."""

    def __init__(self, queue: DeviceQueue[Any]) -> None:
        self._queue = queue
        self._pass: Iterator[Any] | None = None

    def __iter__(self) -> Passes:
        return self

    def __next__(self) -> Any:
        if self._pass is None:
            self._pass = iter(self._queue)
        try:
            return next(self._pass)
        except StopIteration:
            self._pass = None
            raise PassOver from None

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`hotset.DeviceQueue.state_dict`."""
        return self._queue.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`hotset.DeviceQueue.load_state_dict`."""
        self._pass = None
        self._queue.load_state_dict(state)
