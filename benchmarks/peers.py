"""What a user might pick instead, each in the configuration that served it best here.

Every entry is a function of the rows (and, for the live ones, of a random suffix) which returns a function
that begins an epoch. What is missing is imported inside, so that its absence is one line in the table.

The best configurations, found by trying: persistent workers throughout (a start costs 20 to 50 ms a
worker); MONAI without copies of its cached items (``copy_cache=False``, as no transform here writes them)
and with torch's collate, its own being slower; stocaching as its documentation has it, filled before.
FFCV and tf.data are in :mod:`benchmarks.outside`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.data import Sample, Samples
from benchmarks.harness import batches

__all__ = ["Epoch", "bare_loop", "closing", "limit", "loader", "monai", "ram", "ram_batched", "stocaching"]

Epoch = Callable[[], Iterable[Any]]
Suffix = Callable[[Sample], Sample]

# Blocks that the limit writes into by turns, as many as hotset's loader uses by default. Few blocks stay
# in the last-level cache.
RING_BLOCKS = 3
# Permutations for the limit, drawn before: the sampler is a loader's work, and no part of the limit.
_PERMUTATIONS = 4


def limit(rows: torch.Tensor, batch_size: int) -> Epoch:
    """The limit: ``index_select(out=)`` in one thread into a ring of blocks, and nothing else."""
    blocks = [
        (
            torch.zeros(batch_size, *rows.shape[1:], dtype=rows.dtype),
            torch.zeros(batch_size, dtype=torch.int64),
        )
        for _ in range(RING_BLOCKS)
    ]
    labels = torch.arange(len(rows))
    orders = [torch.split(torch.randperm(len(rows)), batch_size) for _ in range(_PERMUTATIONS)]
    turn = 0

    def epoch() -> Iterator[Any]:
        nonlocal turn
        turn += 1
        for k, ids in enumerate(orders[turn % _PERMUTATIONS]):
            x, y = blocks[k % RING_BLOCKS]
            if len(ids) < batch_size:
                x, y = x[: len(ids)], y[: len(ids)]
            torch.index_select(rows, 0, ids, out=x)
            torch.index_select(labels, 0, ids, out=y)
            yield x, y

    return epoch


def in_shared_memory(rows: torch.Tensor) -> torch.Tensor:
    """A copy in a memfd: memory that processes can share, whose pages are small unless the kernel is told."""
    fd = os.memfd_create("rows")
    try:
        os.ftruncate(fd, rows.nbytes)
        shared = torch.frombuffer(mmap.mmap(fd, rows.nbytes), dtype=rows.dtype).view(rows.shape)
    finally:
        os.close(fd)
    return shared.copy_(rows)


def bare_loop(samples: Sequence[torch.Tensor], batch_size: int, *, shared: bool = False) -> Epoch:
    """Ragged batches by a loop of slice copies into a ring, memoryviews being the fastest slices."""
    together = torch.cat(list(samples))
    source = (in_shared_memory(together) if shared else together).numpy().data
    lengths = [len(sample) for sample in samples]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    room = max(lengths) * batch_size
    blocks = [torch.zeros(room, dtype=torch.uint8) for _ in range(RING_BLOCKS)]
    views = [block.numpy().data for block in blocks]

    def epoch() -> Iterator[Any]:
        order = torch.randperm(len(starts)).tolist()
        for k, ids in enumerate(batches(order, batch_size)):
            target, offsets, place = views[k % RING_BLOCKS], [0], 0
            for i in ids:
                start, end = starts[i], ends[i]
                after = place + end - start
                target[place:after] = source[start:end]
                place = after
                offsets.append(place)
            yield (blocks[k % RING_BLOCKS][:place], offsets), ids

    return epoch


def loader(
    stack: ExitStack,
    dataset: Dataset[Any],
    batch_size: int,
    workers: int,
    collate: Callable[[Any], Any] | None = None,
    loader_type: type[DataLoader[Any]] = DataLoader,
) -> Epoch:
    """torch's DataLoader over ``dataset``, or one of its subclasses, shuffled, with workers that stay."""
    made = loader_type(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate,
    )
    return closing(stack, made)


def closing(stack: ExitStack, made: DataLoader[Any]) -> Epoch:
    """Begin epochs of ``made``; stop its workers when the stack unwinds."""
    held = [made]

    def close() -> None:
        held.clear()
        # An iterator that waits in a reference cycle would be collected in a worker that is forked later,
        # where torch's clean-up of another process's workers fails noisily.
        gc.collect()

    stack.callback(close)
    return lambda: iter(held[0])


def ram(
    stack: ExitStack, rows: torch.Tensor, batch_size: int, workers: int, suffix: Suffix | None = None
) -> Epoch:
    """A tensor in memory, and torch's DataLoader. Forked workers share the tensor's pages."""
    return loader(stack, Samples(rows, suffix), batch_size, workers)


class _BatchedRows(Dataset[Any]):
    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        picked = torch.tensor(ids)
        return self._rows.index_select(0, picked), picked


def ram_batched(stack: ExitStack, rows: torch.Tensor, batch_size: int, workers: int) -> Epoch:
    """A tensor in memory, with ``__getitems__``: a batch is one ``index_select``, into fresh memory."""
    return loader(stack, _BatchedRows(rows), batch_size, workers, collate=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Stocaching(Dataset[Sample]):
    """The example of stocaching's documentation, over rows in memory."""

    def __init__(self, rows: torch.Tensor, suffix: Suffix | None) -> None:
        from stocaching import SharedCache

        self._rows = rows
        self._suffix = suffix
        with contextlib.redirect_stdout(io.StringIO()):
            self._cache = SharedCache(
                size_limit_gib=(rows.nbytes + len(rows) >> 30) + 1,
                dataset_len=len(rows),
                data_dims=tuple(rows.shape[1:]),
                dtype=rows.dtype,
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Sample:
        x = self._cache.get_slot(i)
        if x is None:
            x = self._rows[i]
            self._cache.set_slot(i, x)
        return self._suffix((x, i)) if self._suffix is not None else (x, i)


def stocaching(
    stack: ExitStack, rows: torch.Tensor, batch_size: int, workers: int, suffix: Suffix | None = None
) -> Epoch:
    """stocaching's SharedCache, and torch's DataLoader."""
    return loader(stack, _Stocaching(rows, suffix), batch_size, workers)


def monai(
    stack: ExitStack,
    rows: torch.Tensor,
    batch_size: int,
    workers: int,
    suffix: Suffix | None = None,
    thread: bool = False,
) -> Epoch:
    """MONAI's CacheDataset, with torch's DataLoader or MONAI's ThreadDataLoader."""
    from monai.data.dataset import CacheDataset
    from monai.data.thread_buffer import ThreadDataLoader
    from monai.transforms.compose import Compose
    from monai.transforms.traits import RandomizableTrait
    from monai.transforms.transform import Transform

    class Load(Transform):
        def __call__(self, i: int) -> Sample:
            return rows[i], i

    class Live(Transform, RandomizableTrait):
        def __call__(self, sample: Sample) -> Sample:
            assert suffix is not None
            return suffix(sample)

    # Without map_items=False a Compose takes a sample that is a tuple for a list of samples.
    steps = Compose([Load(), Live()] if suffix is not None else [Load()], map_items=False)
    cached = CacheDataset(range(len(rows)), steps, num_workers=2, progress=False, copy_cache=False)
    if not thread:
        return loader(stack, cached, batch_size, workers)
    made = ThreadDataLoader(
        cached, batch_size=batch_size, shuffle=True, num_workers=0, collate_fn=default_collate
    )
    return closing(stack, made)
