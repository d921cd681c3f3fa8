"""A rank of a job in the tests over a Ray cluster: in an actor, in a task, or in a process of its own.

It compares every batch that it gets with that of an uncached loader that has the same sampler and the same
seeds. :func:`main` is a rank that is no worker of Ray's, as under torchrun: it takes orders from its standard
input, a line of JSON each, ``["epoch", {"number": 1}]``, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers import difference, eventually, seed_everything
from live import flip_and_crop
from ray_patient import PATIENCE, be_patient
from sources import ReadLog, Samples, Transformed
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hotset
from hotset.cluster import peer_stats
from hotset.cluster import ray_join as joining
from hotset.dataset import audit
from hotset.dataset.dataset_proxy import current_of

SAMPLES = 3000
BYTES = 3 * 32 * 32
BATCH = 32


class Picture:
    """Sample ``index`` of data number ``data``: pixels that only it has, and its number."""

    def __init__(self, data: int) -> None:
        self.data = data

    def __call__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.arange(BYTES) * (2 * index + 1) + self.data * 101
        pixels[:4] = torch.tensor([index, index >> 8, self.data, 0])
        return (pixels % 256).to(torch.uint8).reshape(3, 32, 32), index


class SharedLog(ReadLog):
    """Reads of one dataset by all ranks of all jobs of a run; whoever counts them begins it by ``reset``."""

    def __init__(self, folder: Path | str, data: int) -> None:
        self.path = f"{folder}/reads-{data}"


class Pictures(Dataset[Any]):
    """A dataset whose reads are written down. The log changes, so it must not be in the fingerprint."""

    def __init__(self, data: int, log: SharedLog) -> None:
        self.make = Picture(data)
        self._hotset_log = log

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        index = range(SAMPLES)[index]
        self._hotset_log.add(index)
        return self.make(index)


class Rank:
    """One rank.

    Args:
        folder: of this run's logs.
    """

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        audit._SHARE = 0.0  # reads are counted here, and these are on purpose
        joining.ANSWER_SECONDS = joining._READY_SECONDS = peer_stats._PATIENCE = PATIENCE
        joining._JOIN_SECONDS = 3 * PATIENCE  # in which Ray starts the processes of the nodes
        self.folder = folder
        self._cached: dict[int, Any] = {}

    def cache(self, data: int, session: str, memory: str = "auto", address: str = "auto") -> dict[str, Any]:
        """Cache a dataset; says which warnings there were, or the error of hotset's."""
        source = Pictures(data, SharedLog(self.folder, data))
        with _caught() as told:
            try:
                self._cached[data] = hotset.cache(
                    source, transform=flip_and_crop, cluster=address, session=session, memory=memory
                )
            except hotset.HotsetError as error:
                return {"error": str(error), "kind": type(error).__name__}
        return {"told": told, "error": None}

    def epoch(
        self, number: int, rank: int = 0, world: int = 1, data: int = 0, workers: int = 0, hold: str = ""
    ) -> dict[str, Any]:
        """Read this rank's part of an epoch; says what was wrong with it.

        Args:
            number: of the epoch.
            rank: whose part it is, of ``world`` ranks.
            data: which dataset.
            workers: of the loaders.
            hold: stop after the fifth batch, until :func:`let_go` is called with this.
        """
        make, cached = Picture(data), self._cached[data]
        sampler: Any = DistributedSampler(range(SAMPLES), world, rank, seed=5)  # type: ignore[arg-type]
        sampler.set_epoch(number)
        uncached: Any = Transformed(Samples(make, SAMPLES), [flip_and_crop])
        seed_everything(number)
        expected = list(DataLoader(uncached, BATCH, sampler=sampler, num_workers=workers))
        before = cached.stats()
        wrong, count = [], 0
        with _caught() as told:
            seed_everything(number)
            for got in hotset.DataLoader(cached, batch_size=BATCH, sampler=sampler, num_workers=workers):
                found = difference(got, expected[count]) if count < len(expected) else "one batch too many"
                wrong += [f"batch {count}: {found}"] if found else []
                count += 1
                if hold and count == 5:
                    _wait_at(hold, rank)
        after = cached.stats()
        return {
            "wrong": wrong[:2],
            "batches": count,
            "all": count == len(expected) == -(-len(sampler) // BATCH),
            "told": told,
            "peer_hits": after.peer_hits - before.peer_hits,
        }

    def members(self) -> list[list[Any]]:
        """Name, endpoint and key of each machine, as this one has them written down."""
        known = self._membership()
        return [] if known is None else [[m.name, m.endpoint, m.key] for m in known.members]

    def machine(self) -> str:
        """The name of the machine that it is on."""
        known = self._membership()
        assert known is not None
        return str(known.me)

    def _membership(self) -> Any:
        """Which machines there are, as this one knows it now: it looks before it asks one, and not sooner."""
        peers = current_of(self._cached[0]).remote._peers
        peers.refresh()
        return peers.membership

    def held(self, data: int = 0) -> int:
        """How many samples of a dataset this machine has."""
        return int(self._cached[data].stats().cached)

    def damage(self) -> list[str]:
        """What is wrong with this machine's memory."""
        return [problem for cached in self._cached.values() for problem in cached.check()]

    def close(self) -> None:
        """Let go of all caches."""
        for cached in self._cached.values():
            cached.close()
        self._cached.clear()

    def forget_ray(self) -> None:
        """Disconnect from Ray, and have no such package any more."""
        import ray

        ray.shutdown()
        sys.modules["ray"] = None  # type: ignore[assignment]


def _wait_at(hold: str, rank: int) -> None:
    Path(f"{hold}-{rank}").touch()
    assert eventually(Path(hold).exists, PATIENCE), "nobody let the ranks go on"


def all_wait(hold: str, *ranks: int) -> bool:
    """Whether these ranks stand in the midst of their epoch, within a bound."""
    return eventually(lambda: all(os.path.exists(f"{hold}-{rank}") for rank in ranks), PATIENCE)


def let_go(hold: str) -> None:
    Path(hold).touch()


@contextlib.contextmanager
def _caught() -> Iterator[list[str]]:
    """hotset's warnings, as they come, but for those of two threads at once."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(one.message) for one in caught if issubclass(one.category, hotset.HotsetWarning)]


def main() -> None:
    be_patient()
    rank = Rank(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # what others print
    for line in sys.stdin:
        order, arguments = json.loads(line)
        start = time.monotonic()
        try:
            answer = {"answer": getattr(rank, order)(**arguments)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        answer["seconds"] = round(time.monotonic() - start, 2)
        os.write(answers, json.dumps(answer).encode() + b"\n")
    rank.close()
