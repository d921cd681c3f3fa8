"""How a loader reads what has no index: a stream in its first pass, and the rest of one that did not fit.

Both are read by a loader of torch's over a :class:`hotset.dataset.streams.recording.StreamRecording`, which
records what goes by, or passes over what is recorded. That loader has the arguments of the loader that reads
the stream. Only the number of workers may differ: a stream is divided among its workers, so the rest of it
has to be read by as many as recorded it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from hotset.dataset.streams.cached_stream import CachedStream, followed_passes, passes_of
from hotset.dataset.streams.recording import StreamRest
from hotset.loader.state import EpochProgress
from hotset.loader.stream_order import StreamSampler
from hotset.loader.torch_batches import TorchBatches
from hotset.loader.worker_process import torch_loader

__all__ = ["batches_of", "loader_of_rest", "rest_of_stream", "warn_of_order"]


def warn_of_order(stream: CachedStream[Any], sampler: Any, batch_size: int | None, *, is_read: bool) -> None:
    """Warn of batches made of batches, and of an order that does not hold for the pass that begins.

    Args:
        stream: that the pass is over.
        is_read: whether the stream has an index, at least for a part of it.
    """
    passes = passes_of(stream)
    name = passes.name
    if batch_size is not None and passes.batch_size:
        passes.warn(
            f"{name} gives batches of {passes.batch_size} samples, and the loader makes batches of "
            "these; leave batches to the loader, or pass batch_size=None.",
            "batches",
        )
    if is_read:
        if isinstance(sampler, StreamSampler) and not sampler.shuffle:
            passes.tell_of_order()
    elif not isinstance(sampler, StreamSampler) and batch_size is not None:
        passes.warn(
            f"the first pass over {name} comes in the stream's own order, as it is recorded in it; sampler= "
            "holds from the second on. Call fill() first to have it hold in the first, too.",
            "order",
        )
    elif isinstance(sampler, StreamSampler) and sampler.shuffle:
        passes.warn(
            f"the first pass over {name} comes in the stream's own order, as it is recorded in it; "
            "shuffle=True holds from the second on. Call fill() first to shuffle the first, too.",
            "order",
        )


def loader_of_rest(
    loader: TorchDataLoader[Any], stream: CachedStream[Any], rest: StreamRest
) -> TorchDataLoader[Any]:
    """torch's loader over the samples that were not recorded as a pass began.

    Args:
        loader: the user's.
        stream: that it reads.
        rest: those samples.
    """
    workers = rest.workers
    if {workers, loader.num_workers} <= {0, 1}:
        workers = loader.num_workers  # one worker divides nothing
    elif workers != loader.num_workers:
        passes_of(stream).warn(
            f"{workers} worker{'s' * (workers != 1)} divided {passes_of(stream).name} as it was "
            f"recorded, so as many read the rest of it, in place of {loader.num_workers}.",
            "rest",
        )
    # torch's loader over the whole stream draws one seed for an epoch's workers, and that is drawn.
    changed: dict[str, Any] = {"generator": _apart_from(loader.generator)}
    if workers != loader.num_workers:  # what goes with these is left out
        changed |= {"num_workers": workers, "timeout": 0, "multiprocessing_context": None}
        changed |= {"prefetch_factor": None, "persistent_workers": False}
    recording = followed_passes(stream).recording(workers, rest=rest)
    return torch_loader(loader, recording, loader.batch_size, loader.drop_last, **changed)


def rest_of_stream(
    make: Callable[[], TorchDataLoader[Any]], rest: StreamRest, run: EpochProgress, skip: int
) -> Iterator[Any]:
    """The batches of samples that were not recorded as a pass began; the first ``skip`` are dropped.

    Args:
        make: makes torch's loader over them.
        rest: those samples.
        run: the pass.
        skip: how many batches of them were consumed before.
    """
    made = make()
    sizes = rest.sizes(made.batch_size, drop_last=made.drop_last)
    return TorchBatches(iter(made), run, sizes, made.batch_size or 1, skip, workers=made.num_workers > 0)


def batches_of(samples: int, sizes: Iterable[int]) -> int:
    """How many batches of these sizes hold so many samples.

    Example:
        >>> batches_of(5, [4, 4, 2]), batches_of(-1, [4])
        (2, 0)
    """
    return sum(before < samples for before in itertools.accumulate(sizes, initial=0))


def _apart_from(generator: torch.Generator | None) -> torch.Generator:
    """A generator that follows from another one's state, and gives other numbers than it will give."""
    apart = (generator or torch.default_generator).clone_state()
    return apart.manual_seed(int(torch.randint(1 << 62, (), generator=apart, device=apart.device)))
