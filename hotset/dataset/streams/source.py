"""A stream as the planner and the store see it: a dataset with an index, over an iterable that has none.

**For the planner** an index is the number of one of the first samples, which
:mod:`hotset.dataset.streams.probe` has read. What orders the stream, and one rank's share of it, do not count
for the fingerprint, as all ranks and jobs record the same samples into one cache.

**For the store** an index is a sample id, which counts through the parts of the stream
(:mod:`hotset.store.stream_parts`). Recorded samples never come back here. A record that was lost (a damaged
disk, a session that was destroyed in the midst of an epoch) does: the stream is run up to that sample, as the
worker that read it would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from hotset._warnings import Warner
from hotset.dataset.streams.libraries import is_node, run, without_order
from hotset.dataset.streams.probe import PLANNED, StreamProbe, probe_stream
from hotset.determinism.declare import declared
from hotset.errors import ArgumentError, NotCacheable

__all__ = ["StreamSource", "as_worker", "is_stream"]


def is_stream(dataset: object) -> bool:
    """Whether a dataset can only be iterated over.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> is_stream(iter([])), is_stream(TensorDataset(torch.arange(3)))
        (True, False)
    """
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__")


class StreamSource(Dataset[Any]):
    """A stream with indices. It pickles if the stream does.

    Attributes:
        described: the stream without what orders it or divides it among ranks: its content.
        by_epoch: whether another epoch gives other samples, as far as its probe has shown.
    """

    def __init__(self, stream: Any) -> None:
        # Attributes with this prefix are no part of a fingerprint.
        self._hotset_stream = stream
        self._hotset_probe: StreamProbe | None = None
        self._hotset_by_epoch = False
        self._hotset_parts = self._hotset_workers = 0  # until it is planned
        self._hotset_runs: dict[int, tuple[Iterator[Any], int]] = {}
        self._hotset_warn = Warner()
        self.described = without_order(stream)
        if isinstance(stream, IterDataPipe):
            raise NotCacheable(
                f"{_name(stream)} is a data pipe, which torch's loader itself divides and shuffles, so "
                "hotset cannot run it as torch would; write it as a torch.utils.data.IterableDataset."
            )
        if isinstance(stream, Iterator) and not isinstance(stream, IterableDataset) and not is_node(stream):
            raise ArgumentError(
                f"dataset must be an iterable that can be run again, got {_name(stream)}, which ends for "
                "good; wrap it in a torch.utils.data.IterableDataset whose __iter__ begins it anew."
            )

    @property
    def stream(self) -> Any:
        """The user's stream."""
        return self._hotset_stream

    @property
    def name(self) -> str:
        """The name of the stream's class."""
        return _name(self._hotset_stream)

    @property
    def by_epoch(self) -> bool:
        return self._hotset_by_epoch

    # ---- for the planner -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return PLANNED

    def probe(self) -> StreamProbe:
        """Read the first samples in two runs, unless that was done.

        Raises:
            ArgumentError, NotCacheable, Exception: see :func:`~hotset.dataset.streams.probe.probe_stream`.
        """
        if self._hotset_probe is None:
            self._hotset_probe = probe_stream(self.described, self.name, declared(self._hotset_stream))
            self._hotset_by_epoch = self._hotset_probe.by_epoch
        return self._hotset_probe

    # ---- by sample id --------------------------------------------------------------------------------

    def divided(self, parts: int, workers: int) -> None:
        """Let an index be a sample id from now on, and no longer the number of one of the first samples.

        Args:
            parts: through how many parts sample ids count.
            workers: how many of these each rank has.
        """
        self._hotset_parts, self._hotset_workers = parts, workers
        self._hotset_probe = None

    def __getitem__(self, index: int) -> Any:
        if self._hotset_parts:
            return self._read(index)
        samples = self.probe().samples
        return samples[index % len(samples)]

    def _read(self, sample: int) -> Any:
        position, part = divmod(sample, self._hotset_parts)
        worker = part % self._hotset_workers
        self._hotset_warn(
            f"a recorded sample of {self.name} is no longer in the cache, and the stream is run up to it, "
            "which takes long; the cache was closed, its session was destroyed, or its disk is damaged.",
            "lost",
        )
        samples, at = self._hotset_runs.pop(part, (iter(()), position + 1))
        with as_worker(worker, self._hotset_workers, self._hotset_stream):
            if at > position:
                samples, at = run(self._hotset_stream), 0  # here, as it may divide itself at once
            for found in samples:
                at += 1
                if at > position:
                    self._hotset_runs[part] = (samples, at)
                    return found
        raise NotCacheable(
            f"{self.name} ended before its sample number {position}, which it has given before; a stream "
            "that is cached must give the same samples in each run."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hotset_runs": {}}


@contextlib.contextmanager
def as_worker(worker: int, workers: int, dataset: Any) -> Iterator[None]:
    """Have ``get_worker_info()`` say that this process is this worker of a loader; with 1 worker, of none.

    Example:
        >>> with as_worker(1, 2, [10, 20]):
        ...     torch.utils.data.get_worker_info().id
        1
    """
    before, info = torch_worker._worker_info, None
    if workers > 1:
        seed = torch.initial_seed()
        info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
    torch_worker._worker_info = info  # None even in a worker of a loader, which has another division
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _name(stream: object) -> str:
    return type(stream).__name__
