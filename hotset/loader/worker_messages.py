"""Messages: how a batch that a worker has written into a shared block arrives in the main process.

A message holds the batch's tree, with a :class:`TensorRef` in place of each tensor, and is pickled like
anything else that a worker returns. Unpickling it first takes over the block, and then replaces each
reference by a tensor, a view of the block. So tensors are never sent, and a block is recycled in any case:
also when the message is dropped unread, as torch does with batches that persistent workers made ahead.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from hotset.dataset.sample_access import Told
from hotset.store.blocks import BlockPool

__all__ = ["NO_BLOCK", "BatchMessage", "TensorRef", "WorkerReport", "message_pool"]

# The number of the block of a batch that has none.
NO_BLOCK = -1

_pools: weakref.WeakValueDictionary[int, BlockPool] = weakref.WeakValueDictionary()
# The memory of the block whose message this thread is unpickling; messages are not nested.
_opening = threading.local()


def message_pool(block_bytes: int) -> BlockPool:
    """A shared pool whose blocks messages can refer to."""
    pool = BlockPool(block_bytes, shared=True)
    _pools[pool.address.inode] = pool
    return pool


class TensorRef:
    """Where in the block a tensor lies; unpickled, it is that tensor."""

    __slots__ = ("dtype", "offset", "shape")

    def __init__(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.offset = offset
        self.dtype = dtype
        self.shape = shape

    def __reduce__(self) -> Any:
        return _tensor_at, (self.offset, self.dtype, self.shape)

    def unbind(self) -> _RowsRef:
        """Return what becomes a list of the tensor's rows."""
        return _RowsRef(self)


def _tensor_at(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    return torch.frombuffer(_opening.array, dtype=dtype, count=count, offset=offset).view(shape)


class _RowsRef:
    """Where in the block a tensor lies; unpickled, it is a list of the rows of that tensor."""

    def __init__(self, tensor: TensorRef) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        return _rows_of, (self._tensor,)


def _rows_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.unbind())


class _BlockRef:
    """The first part of a message: unpickling it takes over the block, so that it is recycled in any case."""

    def __init__(self, pool: int, block: int) -> None:
        self.pool = pool
        self.block = block

    def __reduce__(self) -> Any:
        return _open, (self.pool, self.block)


def _open(pool: int, block: int) -> Any:
    if block == NO_BLOCK:
        return None
    owner = _pools.get(pool)
    if owner is None:
        raise RuntimeError("a batch arrived for a pool of blocks that is gone")
    _opening.array = owner.array_of(block)
    return None


class WorkerReport(NamedTuple):
    """What a worker reports with a batch.

    Attributes:
        task: the number of the task that it answers.
        worker: the worker's number.
        needed: how many bytes the whole batch takes in a block.
        samples: how many samples the batch has.
        told: warnings for the main process to give, each with the number of the cache that it is of.
        states: of the worker's generators after the batch, if it has a live part.
    """

    task: int
    worker: int
    needed: int
    samples: int
    told: tuple[tuple[int, Told], ...]
    states: Any


class BatchMessage:
    """A batch on its way from a worker.

    Attributes:
        pool, block: where its tensors lie; with :data:`NO_BLOCK`, they are sent as torch sends them.
        batch: the batch; its tensors are views of the block once the message has arrived.
        report: what the worker reports with it.
    """

    def __init__(self, pool: int, block: int, batch: Any, report: WorkerReport) -> None:
        self.pool = pool
        self.block = block
        self.batch = batch
        self.report = report

    def __reduce__(self) -> Any:
        # Arguments are unpickled in order: the block is open when its tensors are made.
        opener = _BlockRef(self.pool, self.block)
        return _received, (opener, self.pool, self.block, self.batch, self.report)

    def pin_memory(self, device: Any = None) -> BatchMessage:
        """Called by the inner loader's pin-memory thread; the block is free once this message is dropped."""
        batch = pin_memory(self.batch, device)  # type: ignore[no-untyped-call]
        return BatchMessage(self.pool, self.block, batch, self.report)


def _received(opened: None, pool: int, block: int, batch: Any, report: WorkerReport) -> BatchMessage:
    _opening.array = None
    return BatchMessage(pool, block, batch, report)
