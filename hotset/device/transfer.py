"""Transfers: the ways by which batches get to a device.

A batch is *sent*, ahead of use, and later *received*. On the CPU there is nothing to do. To a GPU the copies
run on a stream of their own, beside the step:

    copy stream      ── copy k+1 ── copy k+2 ──┐ event
    step's stream    ── step k ────────────────┴─ waits for k+1's event ── step k+1 ──

- The consumer's stream waits for the event of its batch. The host runs ahead of the steps, but not without
  end: each batch whose step has not ended takes the device's memory. An event is recorded behind each step.
  Before a batch is sent, the host waits until at most ``steps`` steps have not ended, or until the batches of
  these take at most ``_PENDING_BYTES``.
- The *host's* memory of a batch is held until its event has passed: a block that goes back to its pool
  earlier is written to while it is copied. Copies are asynchronous from page-locked memory only. Batches that
  lie in other memory are brought there first, into torch's own page-locked allocator; ``pin_memory=True`` on
  the loader saves that copy, as batches are then made there.
- The *device's* memory comes from torch's allocator, on the copy stream, and is marked as used by the
  consumer's stream when received: once the consumer has dropped it and both streams have passed it, it is
  used again. A fixed ring of buffers was rejected: a consumer that keeps a batch would see it overwritten.
- All copies to a device use one stream, as torch's allocator keeps memory for each stream apart.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from hotset.device.trees import map_tensors, memory_of, tensors_of

__all__ = ["HostTransfer", "StreamTransfer", "Transfer", "resolve_device", "transfer_to"]

# The batches whose steps have not ended may take as many bytes, however many batches these are.
_PENDING_BYTES = 256 << 20


class Transfer(Protocol):
    """A way to a device.

    Attributes:
        ahead: whether it is worth sending batches ahead of use.
    """

    ahead: bool

    def send(self, batch: Any) -> Any:
        """Begin to bring a batch to the device; returns the argument of :meth:`receive`."""

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
    """A batch on its way.

    Attributes:
        event: behind its copies; None if there is nothing to copy.
        size: bytes that its copies take on the device.
    """

    batch: Any
    event: Any
    size: int


class StreamTransfer:
    """To a GPU, by a stream of its own.

    Args:
        device: the GPU.
        steps: how many steps may not have ended when another batch is sent, if their batches are large.
        api: ``torch.cuda``, or what stands for it in a test.
    """

    ahead = True

    def __init__(self, device: torch.device, steps: int = 4, api: Any = torch.cuda) -> None:
        self._device = resolve_device(device)
        self._steps = steps
        self._api = api
        self._stream = _copy_stream(self._device, api)
        # The event behind each copy under way, and the host's memory that it reads.
        self._copying: deque[tuple[Any, Any]] = deque()
        self._last_size = 0  # of the batch that was handed over last
        # The event behind each step that has not ended, and the bytes that its batch takes on the device.
        self._pending: deque[tuple[Any, int]] = deque()
        self._pending_bytes = 0

    def send(self, batch: Any) -> _Sent:
        self._wait_for_steps()
        if all(tensor.device == self._device for tensor in tensors_of(batch)):  # it was gathered there
            return _Sent(map_tensors(lambda tensor: tensor, batch), None, 0)
        host: list[torch.Tensor] = []
        with self._api.stream(self._stream):
            try:
                moved = map_tensors(lambda tensor: self._copy(tensor, host), batch)
            finally:
                # Where one of the copies cannot be made, those before it are under way all the same.
                event = self._stream.record_event()
                self._copying.append((event, host))
        self._release_copied()
        return _Sent(moved, event, sum(one.nbytes for tensor in host for one in memory_of(tensor)))

    def _wait_for_steps(self) -> None:
        pending = self._pending
        while pending and pending[0][0].query():
            self._pending_bytes -= pending.popleft()[1]
        while len(pending) > self._steps and self._pending_bytes > _PENDING_BYTES:
            pending[0][0].synchronize()
            self._pending_bytes -= pending.popleft()[1]

    def _copy(self, tensor: torch.Tensor, host: list[torch.Tensor]) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if tensor.layout is not torch.strided:
            host.append(tensor)
            return tensor.to(self._device)  # of several tensors, which are not page-locked
        if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        host.append(tensor)
        return tensor.to(self._device, non_blocking=True)

    def receive(self, sent: _Sent) -> Any:
        stream = self._api.current_stream(self._device)
        if self._last_size:  # its step is issued, as the next batch is asked for
            self._pending.append((stream.record_event(), self._last_size))
            self._pending_bytes += self._last_size
        self._last_size = sent.size
        if sent.event is not None:
            stream.wait_event(sent.event)
        for tensor in tensors_of(sent.batch):
            for one in memory_of(tensor):
                if one.device == self._device:
                    one.record_stream(stream)
        self._release_copied()
        return sent.batch

    def _release_copied(self) -> None:
        """Drop the host's memory of the copies that have ended; they end in the order in which they began."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()

    def close(self) -> None:
        while self._copying:
            self._copying[0][0].synchronize()
            self._copying.popleft()
        self._pending.clear()
        self._pending_bytes = self._last_size = 0

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


@functools.cache
def _copy_stream(device: torch.device, api: Any) -> Any:
    """The stream of all copies to a device."""
    return api.Stream(device)


def transfer_to(device: torch.device, depth: int = 2) -> Transfer:
    """The way to a device for batches that are sent up to ``depth`` ahead of use."""
    return StreamTransfer(device, depth + 2) if device.type == "cuda" else HostTransfer(device)
