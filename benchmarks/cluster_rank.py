"""A rank of a job on several machines: an actor that opens the shared cache and runs epochs of its part.

The source stands for storage that all machines share: 200 MB/s between them, 5 ms for each read. It makes its
samples on the spot, out of noise in memory, so that reading costs no processor time beyond that; sample i is
a piece of noise that begins 8 i bytes in, and no two are alike.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from benchmarks.harness import Comparison, compare
from benchmarks.throttle import Throttle
from benchmarks.truth import WrongData
from hotset.dataset.dataset_proxy import current_of

__all__ = ["BATCH", "Epoch", "Noise", "Rank"]

BATCH = 32
_APART = 8


class Noise(Dataset[tuple[torch.Tensor, int]]):
    """``(bytes, i)`` by way of a throttled link.

    Args:
        count: samples.
        size: bytes of each.
        link: that every read passes; None: none.
    """

    def __init__(self, count: int, size: int, link: Throttle | None = None) -> None:
        self._count, self.size, self._link = count, size, link
        noise = np.random.default_rng(0).integers(0, 256, size + _APART * count, dtype=np.uint8)
        self._noise = torch.from_numpy(noise)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if not 0 <= i < self._count:
            raise IndexError(i)
        if self._link is not None:
            self._link.transfer(self.size)
        return self.truth(i).clone(), i

    def truth(self, i: int) -> torch.Tensor:
        """What sample ``i`` must hold."""
        return self._noise[_APART * i : _APART * i + self.size]

    def check(self, batch: Any) -> list[int]:
        """Return the samples of a batch.

        Raises:
            WrongData: one holds something else.
        """
        ids: list[int] = batch[1].tolist()
        for row, i in zip(batch[0], ids, strict=True):
            if not torch.equal(row, self.truth(i)):
                raise WrongData(f"sample {i} differs from its original")
        return ids


class Epoch(NamedTuple):
    """A rank's part of an epoch.

    Attributes:
        ids: of the samples, in their order; all compared with the truth if that was asked for.
        seconds: of the epoch, or with a pause after each step, of its steps alone.
        longest: seconds of the longest step, without its pause.
        told: warnings.
    """

    ids: list[int]
    seconds: float
    longest: float
    told: list[str]


class Rank:
    """A rank; runs in an actor on its node.

    Args:
        rank: number.
        ranks: how many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        torch.set_num_threads(1)
        self._rank, self._ranks = rank, ranks
        self._source: Noise | None = None
        self._cached: Any = None
        self._loaders: dict[tuple[str, int], Any] = {}

    def open(self, source: Noise, session: str, memory: int) -> float:
        """Cache a source together with the other machines; return the seconds that takes."""
        import hotset

        self._loaders.clear()
        self._source = source
        start = time.perf_counter()
        self._cached = hotset.cache(source, cluster="auto", session=session, memory=memory, key=session)
        return time.perf_counter() - start

    def cached(self) -> int:
        """How many samples this machine holds."""
        return int(self._cached.stats().cached)

    def misses(self) -> int:
        """How many samples this machine's processes have read from the source because nobody had them."""
        return int(self._cached.stats().misses)

    def epoch(
        self,
        number: int,
        *,
        through: str = "hotset",
        workers: int = 0,
        checked: bool = False,
        pause: float = 0.0,
        half: Path | None = None,
    ) -> Epoch:
        """Run this rank's part of an epoch.

        Args:
            number: of the epoch.
            through: ``"hotset"``, or ``"source"``: torch's DataLoader and the throttled source.
            workers: of the loader; they stay from epoch to epoch.
            checked: compare every sample with the truth, and not the last batch alone.
            pause: seconds after each step, which stand for training.
            half: a file that is made when half of the epoch has passed.
        """
        assert self._source is not None
        loader = self._loader(through, workers)
        loader.sampler.set_epoch(number)
        ids: list[int] = []
        steps: list[float] = []
        batch = None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            begin = start = time.perf_counter()
            for batch in loader:
                steps.append(time.perf_counter() - start)
                ids += self._source.check(batch) if checked else batch[1].tolist()
                if pause:
                    time.sleep(pause)
                if half is not None and len(steps) == len(loader) // 2:
                    half.touch()
                start = time.perf_counter()
            seconds = start - begin
        self._source.check(batch)
        return Epoch(
            ids, sum(steps) if pause else seconds, max(steps), [str(told_.message) for told_ in told]
        )

    def _loader(self, through: str, workers: int) -> Any:
        import hotset

        if (through, workers) not in self._loaders:
            kind: Any = hotset.DataLoader if through == "hotset" else DataLoader
            dataset: Any = self._cached if through == "hotset" else self._source
            sampler: Any = DistributedSampler(dataset, self._ranks, self._rank, shuffle=True, seed=1)
            self._loaders[through, workers] = kind(
                dataset,
                batch_size=BATCH,
                sampler=sampler,
                num_workers=workers,
                persistent_workers=workers > 0,
            )
        return self._loaders[through, workers]

    def local(self, pairs: int, seconds: float) -> Comparison:
        """Epochs of what this machine holds, through the shared cache and one without ``cluster=``."""
        import hotset

        assert self._source is not None
        size = self._source.size
        store = current_of(self._cached).store
        here = np.flatnonzero(store.present(np.arange(len(self._source)))).tolist()
        quick = Noise(len(self._source), size)
        with hotset.cache(quick, memory=2 * len(here) * size + (8 << 20), key="alone") as alone:
            current_of(alone).fill(np.array(here))
            contestants = {
                name: _rate(hotset.DataLoader(Subset(cached, here), BATCH, shuffle=True), seconds)
                for name, cached in (("alone", alone), ("with cluster=", self._cached))
            }
            return compare(
                contestants,
                "alone",
                pairs,
                title=f"batches of {BATCH} samples of {size:,} bytes that this machine holds",
                unit="MB/s of processor time",
                subjects=("with cluster=",),
            )


def _rate(loader: Any, seconds: float) -> Any:
    """What measures the MB/s of whole epochs, in processor time: nothing here waits for anybody.

    By the clock, whoever else runs on the machine made each of two equal loaders up to twice as fast.
    """

    def once() -> float:
        moved, start = 0, time.process_time()
        while (taken := time.process_time() - start) < seconds:
            moved += sum(batch[0].nbytes for batch in loader)
        return moved / taken / 1e6

    return once
