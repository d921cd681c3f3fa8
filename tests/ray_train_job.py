"""A job of Ray Train's on two machines: ``python tests/ray_train_job.py FOLDER``.

One rank on each machine, as ``TorchTrainer`` starts them. One of them is killed in the midst of an epoch,
soon after a checkpoint, so that Ray Train starts both again. What came of it is printed, a line of JSON for
each start of each rank and a last one of the job, for ``test_cluster_train`` to look at: nothing is judged
here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# How often Ray Train looks after its workers; two seconds by default, and there are many such looks.
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from helpers import difference, seed_everything
from live import flip_and_crop
from ray.train.torch import TorchTrainer
from ray_machines import Machines
from ray_patient import HOOK
from ray_rank import BATCH, SAMPLES, Picture, Rank, SharedLog
from sources import Samples, Transformed
from torch.utils.data import DataLoader, DistributedSampler

import hotset
from hotset.cluster import ray_join as joining

SESSION = "trained"
RANKS = 2
# Two thirds of the data: no machine has room for all.
MEMORY = SAMPLES * (3 * 32 * 32 + 24) * 2 // 3
PREPARED, BROKEN = 3, 4  # numbers of epochs
SAVED_AT, DIES_AT = 10, 13  # batches into the broken one


class Trained:
    """One start of one rank."""

    def __init__(self, folder: str) -> None:
        context = ray.train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.log = SharedLog(folder, 0)
        self.all = Rank(folder)

    def cache(self) -> dict[str, Any]:
        told = self.all.cache(0, SESSION, str(MEMORY))
        self.cached = self.all._cached[0]
        return told

    def counted(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What all ranks find at once, with the reads of all of them."""
        dist.barrier()
        if self.rank == 0:
            self.log.reset()
        dist.barrier()
        found = read()
        dist.barrier()
        counts = self.log.counts()
        return {**found, "reads": counts.total(), "most": max(counts.values(), default=0)}

    def epoch(self, number: int, workers: int = 0) -> dict[str, Any]:
        """By a sampler and a loader as on one machine."""
        return self.counted(lambda: self.all.epoch(number, self.rank, self.world, workers=workers))

    def sampler(self, number: int) -> Any:
        """This rank's part of an epoch."""
        made: Any = DistributedSampler(range(SAMPLES), self.world, self.rank)  # type: ignore[arg-type]
        made.set_epoch(number)
        return made

    def expected(self, number: int, workers: int = 0) -> list[Any]:
        """The batches of an epoch by torch's loader, without a cache."""
        uncached: Any = Transformed(Samples(Picture(0), SAMPLES), [flip_and_crop])
        seed_everything(number)
        return list(DataLoader(uncached, BATCH, sampler=self.sampler(number), num_workers=workers))

    def prepared(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """An epoch of a loader as Ray Train prepares it."""
        ready: Any = ray.train.torch.prepare_data_loader(loader)
        ready.sampler.set_epoch(PREPARED)
        expected = self.expected(PREPARED)

        def read() -> dict[str, Any]:
            seed_everything(PREPARED)
            return differing(list(ready), expected)

        return {**self.counted(read), "by": type(getattr(ready, "_dataloader", ready)).__module__}

    def begin(self) -> None:
        """An epoch that one rank does not survive."""
        loader = hotset.DataLoader(self.cached, BATCH, sampler=self.sampler(BROKEN), num_workers=2)
        seed_everything(BROKEN)
        for number, _ in enumerate(loader, 1):
            if number == SAVED_AT:
                self.report({"batches": number}, loader.state_dict())
            if self.rank == 1 and number == DIES_AT:
                ray.train.get_all_reported_checkpoints()  # waits until Ray Train has them
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def go_on(self, saved: ray.train.Checkpoint) -> dict[str, Any]:
        """The rest of that epoch."""
        with saved.as_directory() as folder:
            state = torch.load(f"{folder}/{self.rank}.pt")
        loader = hotset.DataLoader(self.cached, BATCH, sampler=self.sampler(BROKEN), num_workers=2)
        loader.load_state_dict(state)
        expected = self.expected(BROKEN, workers=2)[SAVED_AT:]
        found = self.counted(lambda: differing(list(loader), expected))
        self.report({"batches": SAVED_AT + len(expected)}, loader.state_dict())
        return found

    def report(self, metrics: dict[str, Any], state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, f"{folder}/{self.rank}.pt")
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def differing(got: list[Any], expected: list[Any]) -> dict[str, Any]:
    pairs = zip(got, expected, strict=False)
    wrong = [sentence for one, other in pairs if (sentence := difference(one, other)) is not None]
    return {"wrong": wrong[:2], "all": len(got) == len(expected)}


def train(config: dict[str, Any]) -> None:
    it = Trained(config["folder"])
    said: dict[str, Any] = {"rank": it.rank, "machine": ray.get_runtime_context().get_node_id()}
    said["cache"] = it.cache()
    saved = ray.train.get_checkpoint()
    if saved is None:
        said["cold"], said["warm"], said["workers"] = it.epoch(0), it.epoch(1), it.epoch(2, workers=2)
        shuffled, shared = {"shuffle": True}, {"sampler": DistributedSampler(it.cached)}
        said["torch"] = it.prepared(DataLoader(it.cached, BATCH, **shuffled))
        said["hotset"] = it.prepared(hotset.DataLoader(it.cached, BATCH, **shared))
        said["hotset, shuffled"] = it.prepared(hotset.DataLoader(it.cached, BATCH, **shuffled))
    else:
        said["rest"] = it.go_on(saved)
    with open(f"{config['folder']}/said-{it.rank}", "a") as lines:
        lines.write(json.dumps(said) + "\n")
    if saved is None:
        it.begin()


def fit(folder: Path) -> dict[str, Any]:
    """Train; what Ray Train says of it."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=RANKS, placement_strategy="STRICT_SPREAD"),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    try:
        return {"metrics": trainer.fit().metrics}
    except Exception:
        return {"raised": traceback.format_exc()}


def main(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints
    SharedLog(folder, 0).reset()
    begun = time.monotonic()
    with Machines() as machines:
        for _ in range(RANKS):
            machines.add()
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(machines.address, namespace="a job", runtime_env=HOOK, **quiet)
        job = fit(folder)
        job["held"] = [machine.taken() for machine in machines.all]
        with contextlib.suppress(hotset.ClusterError):
            job["freed"] = joining.stop(machines.address, SESSION)
        job["left"] = [machine.taken() for machine in machines.all]
    job["seconds"] = round(time.monotonic() - begun, 1)
    for rank in range(RANKS):
        with contextlib.suppress(FileNotFoundError):
            answers.write((folder / f"said-{rank}").read_text())
    print(json.dumps({"rank": None, **job}), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
