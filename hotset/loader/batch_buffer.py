"""Batches that are collated into a block, as ``default_collate`` would collate them elsewhere.

A worker collates into a shared block, and sends references (:mod:`hotset.loader.worker_process`). The main
process collates large batches of live samples into blocks of its own (:class:`BlockCollate`): to fault in the
memory of a new batch of 19 MB takes as long as to fill it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from hotset.store.blocks import Blocks

__all__ = ["BatchBuffer", "BlockCollate", "as_it_is"]

_ALIGN = 64
_STACKED_IN_ORDER = 3  # dimensions up to which torch.stack gives batches in C order
_LARGE = 1 << 20  # bytes of a tensor; malloc seldom faults in the memory of a smaller one anew

# Kinds of values that are collated elsewhere and then copied to the buffer: a few bytes for each sample.
_NUMBERS = (int, float, (np.bool_, np.number, np.object_))


def _onto(buffer: BatchBuffer, function: Callable[..., Any]) -> Callable[..., Any]:
    def collated(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return buffer.put(function(batch, collate_fn_map=collate_fn_map))

    return collated


class BatchBuffer:
    """A block that a batch is written into, from its beginning on.

    Args:
        size: its bytes; 0 if there is no block.
        placed: makes what the batch has in place of a tensor in the block, at an offset.
        least: bytes of the smallest tensor that is put there.

    Attributes:
        needed: bytes that the whole batch takes.
    """

    def __init__(
        self, array: Any, size: int, placed: Callable[[torch.Tensor, int], Any], least: int = 1
    ) -> None:
        self.array = array
        self.size = size
        self.needed = 0
        self._placed = placed
        self._least = least

    def _room(self, size: int) -> int | None:
        """Offset of ``size`` bytes in the block; None if either is too small."""
        if size < self._least:
            return None
        at = -(-self.needed // _ALIGN) * _ALIGN
        self.needed = at + size
        return at if self.needed <= self.size else None

    def _view(self, at: int, dtype: torch.dtype, shape: Sequence[int], count: int) -> torch.Tensor:
        return torch.frombuffer(self.array, dtype=dtype, count=count, offset=at).view(tuple(shape))

    def whole(self, size: int) -> BatchBuffer | None:
        """The block, as memory for a gathered batch of ``size`` bytes."""
        self.needed = size
        return self if size <= self.size else None

    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A part of a gathered batch: see :class:`hotset.store.gather.Memory`."""
        if not size:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self.array, dtype=dtype, count=size // dtype.itemsize, offset=offset)

    def placed(self, done: torch.Tensor, offset: int) -> Any:
        """What the batch has in place of a finished column."""
        return self._placed(done, offset) if done.numel() else done

    def collate(self, samples: Any) -> Any:
        """The batch, as ``default_collate`` makes it."""
        kinds = {
            kind: _onto(self, function) if kind in _NUMBERS else function
            for kind, function in default_collate_fn_map.items()
        }
        return collate(samples, collate_fn_map={**kinds, torch.Tensor: self.stack})

    def stack(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        """Stack tensors in the block, as ``default_collate`` stacks them in memory of its own."""
        first = batch[0]
        if type(first).__module__.startswith("torchvision.tv_tensors."):
            batch = [tensor.as_subclass(torch.Tensor) for tensor in batch]
            first = batch[0]
        plain = all(
            type(t) is torch.Tensor
            and t.dtype == first.dtype
            and t.shape == first.shape
            and t.layout == torch.strided
            and t.device.type == "cpu"
            and not (t.requires_grad or t.is_quantized or t.is_nested)
            for t in batch
        ) and (_is_in_worker() or all(map(_is_stacked_in_order, batch)))
        count = len(batch) * first.numel() if plain else 0
        at = self._room(count * first.itemsize)
        if at is None:
            return default_collate_fn_map[torch.Tensor](batch, collate_fn_map=collate_fn_map)
        out = self._view(at, first.dtype, (len(batch), *first.shape), count)
        torch.stack(batch, 0, out=out)
        return self._placed(out, at)

    def put(self, made: Any) -> Any:
        """Copy a collated tensor to the block."""
        if type(made) is not torch.Tensor or made.device.type != "cpu":
            return made
        at = self._room(made.numel() * made.itemsize)
        if at is None:
            return made
        return self._placed(self._view(at, made.dtype, made.shape, made.numel()).copy_(made), at)

    def lay(self, made: Any) -> Any:
        """Copy the plain tensors of a user's batch to the block, and return it with references to them.

        Only if the batch consists of dicts, lists, tuples, tensors and plain values, each of them once, and
        not nested too deeply. Any other batch is sent as torch sends it, so that one object, or one memory,
        in the worker stays one.
        """
        tensors: list[torch.Tensor] = []
        if not _find_tensors(made, tensors, set(), _DEEPEST):
            return made
        together = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        alone = [t for t in tensors if together[t.untyped_storage().data_ptr()] == 1 and _fills_its_memory(t)]
        return _with_places(made, {id(tensor): self.put(tensor) for tensor in alone})


def _is_in_worker() -> bool:
    """Whether ``default_collate`` stacks into shared memory here: in C order whatever that of the tensors."""
    return get_worker_info() is not None


def _is_stacked_in_order(tensor: torch.Tensor) -> bool:
    """Whether ``torch.stack`` makes a batch in C order of such tensors; not of clips that lie as THWC."""
    return tensor.ndim <= _STACKED_IN_ORDER or tensor.is_contiguous()


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DEEPEST = 100  # where the limit of recursion is far


def _find_tensors(made: Any, tensors: list[torch.Tensor], known: set[int], depth: int) -> bool:
    """Find all tensors; False if an object is of another kind, or there twice, or deeper than ``depth``."""
    kind = type(made)
    if kind in _PLAIN:
        return True
    if id(made) in known or not depth:
        return False
    known.add(id(made))
    if kind is torch.Tensor:
        tensors.append(made)
        return made.layout is torch.strided and made.device.type == "cpu" and not made.is_nested
    if kind is dict:
        return all(type(k) in _PLAIN and _find_tensors(v, tensors, known, depth - 1) for k, v in made.items())
    return kind in (list, tuple) and all(_find_tensors(part, tensors, known, depth - 1) for part in made)


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor in memory of its own, which a :class:`TensorRef` describes in full."""
    shared = tensor.is_shared()  # type: ignore[no-untyped-call]
    return (
        not (shared or tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


def _with_places(made: Any, places: dict[int, Any]) -> Any:
    if type(made) is dict:
        return {key: _with_places(value, places) for key, value in made.items()}
    if type(made) is list:
        return [_with_places(part, places) for part in made]
    if type(made) is tuple:
        return tuple(_with_places(part, places) for part in made)
    return places.get(id(made), made)


class BlockCollate:
    """``default_collate`` into recycled blocks of this process, for tensors of a megabyte and more.

    A smaller one has memory of its own: a user who keeps the labels of all batches keeps no pictures.
    """

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._needed = 0  # bytes of the largest batch so far

    def __call__(self, samples: Any) -> Any:
        array = self._blocks.array(self._needed) if self._needed else b""
        buffer = BatchBuffer(array, len(array), as_it_is, _LARGE)
        batch = buffer.collate(samples)
        self._needed = max(self._needed, buffer.needed)
        return batch


def as_it_is(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """What a batch that stays in its process has in place of a tensor in its block: that tensor."""
    return tensor
