"""Transfers: the ways by which batches get to a device.

A batch is *sent*, ahead of use, and later *received*. On the CPU there is nothing to do. To a GPU the copies
run on a stream of their own, beside the step:

    copy stream      ── copy k+1 ── copy k+2 ──┐ event
    step's stream    ── step k ────────────────┴─ waits for k+1's event ── step k+1 ──

- The consumer's stream waits for the event of its batch, the host for nothing.
- The *host's* memory of a batch is held until its event has passed: a block that goes back to its pool
  earlier is written to while it is copied. Copies are asynchronous from page-locked memory only. Batches that
  lie in other memory are brought there first, into torch's own page-locked allocator; ``pin_memory=True`` on
  the loader saves that copy, as batches are then made there.
- The *device's* memory comes from torch's allocator, on the copy stream, and is marked as used by the
  consumer's stream when received: dropped, it is recycled once both have passed, a ring of as many banks as
  there are batches under way. A fixed ring of banks was rejected: a consumer that keeps a batch
  would see it overwritten.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from hotset.device.trees import map_tensors, tensors_of

__all__ = ["HostTransfer", "StreamTransfer", "Transfer", "resolve_device", "transfer_to"]


class Transfer(Protocol):
    """A way to a device.

    Attributes:
        ahead: whether it is worth sending batches ahead of use.
    """

    ahead: bool

    def send(self, batch: Any) -> Any:
        """Begin to bring a batch to the device; returns what :meth:`receive` is to be given."""

    def receive(self, sent: Any) -> Any:
        """The batch on the device, for the current stream."""

    def close(self) -> None:
        """Wait until no host memory is read any more."""


class HostTransfer:
    """To the CPU, or to a device whose copies are not asynchronous."""

    ahead = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, batch: Any) -> Any:
        if self._device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self._device), batch)

    def receive(self, sent: Any) -> Any:
        return sent

    def close(self) -> None:
        """Nothing is under way."""


class _Sent(NamedTuple):
    batch: Any
    event: Any


class StreamTransfer:
    """To a GPU, by a stream of its own.

    Args:
        device: the GPU.
        api: ``torch.cuda``, or what stands for it in a test.
    """

    ahead = True

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self._device = device
        self._api = api
        self._stream = api.Stream(device)
        self._held: deque[tuple[Any, Any]] = deque()

    def send(self, batch: Any) -> _Sent:
        host: list[torch.Tensor] = []
        with self._api.stream(self._stream):
            try:
                moved = map_tensors(lambda tensor: self._copy(tensor, host), batch)
            finally:
                # Where one of the copies cannot be made, those before it are under way all the same.
                event = self._stream.record_event()
                self._held.append((event, host))
        self._let_go()
        return _Sent(moved, event)

    def _copy(self, tensor: torch.Tensor, host: list[torch.Tensor]) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        host.append(tensor)
        return tensor.to(self._device, non_blocking=True)

    def receive(self, sent: _Sent) -> Any:
        stream = self._api.current_stream(self._device)
        stream.wait_event(sent.event)
        for tensor in tensors_of(sent.batch):
            if tensor.device == self._device:
                tensor.record_stream(stream)
        self._let_go()
        return sent.batch

    def _let_go(self) -> None:
        """Drop the host's memory of the copies that have ended; they end in the order in which they began."""
        while self._held and self._held[0][0].query():
            self._held.popleft()

    def close(self) -> None:
        while self._held:
            event, _ = self._held[0]
            event.synchronize()
            self._held.popleft()

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        with suppress(Exception):  # an error here was raised where the copy was made
            self.close()


def resolve_device(device: Any) -> torch.device:
    """The device that was asked for; None: the machine's accelerator if there is one, else the CPU.

    Raises:
        RuntimeError: torch does not know it.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    found = torch.device(device)
    if str(found) == "cuda":
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def transfer_to(device: torch.device) -> Transfer:
    """The way to a device."""
    return StreamTransfer(device) if device.type == "cuda" else HostTransfer(device)
