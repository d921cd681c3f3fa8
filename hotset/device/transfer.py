"""Transfers: the ways by which batches get to a device.

A batch is *sent*, ahead of use, and later *received*. On the CPU there is nothing to do. To a GPU the copies
run on a stream of their own, beside the step:

    copy stream      ── copy k+1 ── copy k+2 ──┐ event
    step's stream    ── step k ────────────────┴─ waits for k+1's event ── step k+1 ──

- The consumer's stream waits for the event of its batch. The host runs ahead of the steps, but not without
  end: each batch whose step has not ended takes the device's memory. An event is recorded behind each step,
  and before a batch is sent, the host waits until no more steps are left than ``steps``, or than
  ``_AT_WORK`` bytes of batches have.
- The *host's* memory of a batch is held until its event has passed: a block that goes back to its pool
  earlier is written to while it is copied. Copies are asynchronous from page-locked memory only. Batches that
  lie in other memory are brought there first, into torch's own page-locked allocator; ``pin_memory=True`` on
  the loader saves that copy, as batches are then made there.
- The *device's* memory comes from torch's allocator, on the copy stream, and is marked as used by the
  consumer's stream when received: dropped, it is recycled once both have passed, a ring of as many banks as
  there are batches under way. A fixed ring of banks was rejected: a consumer that keeps a batch
  would see it overwritten.
- All that goes to a device goes by one stream: torch keeps memory apart for each stream that ever had some.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from hotset.device.trees import map_tensors, memory_of, tensors_of

__all__ = ["HostTransfer", "StreamTransfer", "Transfer", "copy_stream", "resolve_device", "transfer_to"]

# Bytes of batches whose steps may be to come, however many batches that are.
_AT_WORK = 256 << 20


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
    size: int  # bytes that it takes on the device


class _Step(NamedTuple):
    """What runs on a batch that was handed over, up to the next one."""

    event: Any
    size: int


class StreamTransfer:
    """To a GPU, by a stream of its own.

    Args:
        device: the GPU.
        steps: how many steps may be to come before another batch is sent, if their batches are large.
        api: ``torch.cuda``, or what stands for it in a test.
    """

    ahead = True

    def __init__(self, device: torch.device, steps: int = 4, api: Any = torch.cuda) -> None:
        self._device = resolve_device(device)
        self._steps = steps
        self._api = api
        self._stream = copy_stream(self._device, api)
        self._held: deque[tuple[Any, Any]] = deque()
        self._handed_over = 0  # the size of the last one
        self._at_work: deque[_Step] = deque()
        self._size_at_work = 0

    def send(self, batch: Any) -> _Sent:
        self._wait_for_steps()
        host: list[torch.Tensor] = []
        with self._api.stream(self._stream):
            try:
                moved = map_tensors(lambda tensor: self._copy(tensor, host), batch)
            finally:
                # Where one of the copies cannot be made, those before it are under way all the same.
                event = self._stream.record_event()
                self._held.append((event, host))
        self._let_go()
        return _Sent(moved, event, sum(one.nbytes for tensor in host for one in memory_of(tensor)))

    def _wait_for_steps(self) -> None:
        steps = self._at_work
        while steps and steps[0].event.query():
            self._size_at_work -= steps.popleft().size
        while len(steps) > self._steps and self._size_at_work > _AT_WORK:
            steps[0].event.synchronize()
            self._size_at_work -= steps.popleft().size

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
        if self._handed_over:  # its step is issued, as the next batch is asked for
            self._at_work.append(_Step(stream.record_event(), self._handed_over))
            self._size_at_work += self._handed_over
        self._handed_over = sent.size
        stream.wait_event(sent.event)
        for tensor in tensors_of(sent.batch):
            for one in memory_of(tensor):
                if one.device == self._device:
                    one.record_stream(stream)
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
        self._at_work.clear()
        self._size_at_work = self._handed_over = 0

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
def copy_stream(device: torch.device, api: Any = torch.cuda) -> Any:
    """The stream of all copies to a device."""
    return api.Stream(device)


def transfer_to(device: torch.device, depth: int = 2) -> Transfer:
    """The way to a device for batches that are sent so many ahead of use."""
    return StreamTransfer(device, depth + 2) if device.type == "cuda" else HostTransfer(device)
