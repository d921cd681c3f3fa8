"""What the processes of a watched program have written, put together: per sample, over all workers.

:mod:`hotset.run.doctor.watch` writes it. A training of several ranks is looked at as one: their rates are
added up, and what a sample costs is a mean over all. Of several loaders, of training and of validation, the
one that has taken the most time is told of, and what its own workers have done.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hotset.policy.throughput import Fetch, Step
from hotset.run.doctor.loop import LEAST_BATCHES, LoopSums, StepLength, step_alone
from hotset.run.ledger import TRIAL, WATCHED

__all__ = [
    "Decoder",
    "Observed",
    "decodes_any",
    "empty_loader",
    "read",
    "takes_batches",
    "training_processes",
]


class Decoder(NamedTuple):
    """A function that decodes: calls, processor seconds and bytes a sample."""

    name: str
    calls: float
    cpu: float
    bytes: float


class Observed(NamedTuple):
    """A training, as it was watched.

    Attributes:
        dataset: the name of its class.
        length: of the dataset; None if it has none.
        batch_size: samples in a batch.
        workers: of the loader, for each rank.
        ranks: processes that train.
        steps: that were counted.
        wait: seconds a step in which the loop waited for a batch, or for the loader's workers to start or to
            end, as far as that falls to a step of a whole epoch.
        step: the rest of a step, a sample, as if no worker ran beside it, and no less than its GPU takes.
        step_drops: whether that has the time in which it gives the memory of the batch before back.
        gpu: seconds a step that it takes on the GPU; None if none was used.
        step_beside: its seconds a step, as it was beside the workers.
        step_beside_cpu: the processor time in that, of all threads.
        epoch_samples: of a pass of one rank, as the loop goes through it; None if that is not known.
        first_wait: seconds until the first batch of a pass was there, typically.
        fetch: what a sample costs in its worker, and to hand over.
        collate: processor seconds of that which are the collate function's, a sample.
        decoders: of that, the functions that decode.
        read_bytes: bytes a sample that were read by calls of the system; None if the kernel does not say.
        disk_bytes: bytes of them that came from a disk.
        memory: bytes that each worker has for itself; None without workers.
        growth: bytes a second by which that grew.
        trial: what was tried: see :mod:`hotset.run.doctor.trial`.
        elsewhere: the share of the time that loops over other loaders take, 0 to 1.
        others: processors that other programs took meanwhile; None if that is not known.
    """

    dataset: str
    length: int | None
    batch_size: float
    workers: int
    ranks: int
    steps: int
    wait: float
    step: Step
    step_drops: bool
    gpu: float | None
    step_beside: float
    step_beside_cpu: float
    epoch_samples: float | None
    first_wait: float
    fetch: Fetch
    collate: float
    decoders: tuple[Decoder, ...]
    read_bytes: float | None
    disk_bytes: float | None
    memory: float | None
    growth: float | None
    trial: dict[str, Any]
    elsewhere: float = 0.0
    others: float | None = None

    @property
    def rate(self) -> float:
        """Samples a second, of all ranks."""
        seconds = self.wait + self.step_beside
        return self.ranks * self.batch_size / seconds if seconds else 0.0

    def tried(self, kind: str, workers: int) -> dict[str, float] | None:
        """What was tried of a loader of this kind with so many workers: see :mod:`.trial`."""
        row: dict[str, float] | None = self.trial["loaders"].get(f"{kind}-{workers}")
        return row

    @property
    def may_have_workers(self) -> bool:
        """Whether a worker could read the dataset: the program has some, or one was tried.

        One may lack a thread or a device of the training process, or read all of a stream that others read.
        """
        return self.workers > 0 or self.tried("plain", 1) is not None

    @property
    def waited(self) -> float:
        """The share of the time in which the loop waited, 0 to 1."""
        seconds = self.wait + self.step_beside
        return self.wait / seconds if seconds else 0.0


def read(ledger: str) -> Observed | None:
    """What was watched; None if there was no loader, or fewer than three batches that count."""
    processes = _processes(ledger)
    loops = [
        loop
        for process in processes
        for loop in process["loops"]
        if loop["sums"].get("steps") and loop["sums"].get("batches", 0.0) >= LEAST_BATCHES
    ]
    if not loops:
        return None
    main = max(loops, key=_seconds)
    # The other ranks' loops over the same data.
    mine = [loop for loop in loops if loop["facts"] == main["facts"]]
    trial: dict[str, Any] = {"loaders": {}}
    with contextlib.suppress(OSError, ValueError):
        trial = json.loads(Path(ledger, TRIAL).read_text())
    every = [loop for process in processes for loop in process["loops"]]
    elsewhere = 1.0 - sum(map(_seconds, mine)) / sum(map(_seconds, every))
    return _put_together(main["facts"], mine, _fetching(mine, processes), trial)._replace(elsewhere=elsewhere)


def _processes(ledger: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path(ledger).glob(f"{WATCHED}*.json"))]


def decodes_any(ledger: str) -> bool:
    """Whether a process of the program calls functions that ``hotset run`` knows."""
    found = _processes(ledger)
    fetching = [
        one["fetching"] for one in (*found, *(loop for process in found for loop in process["loops"]))
    ]
    return any(one and one["decoders"] for one in fetching)


def training_processes(ledger: str) -> list[int]:
    """Those processes that take batches, and live."""
    pids = [process["pid"] for process in _processes(ledger) if process["loops"]]
    # A process in a container has its number there: the environment says whether this is the same one.
    return [pid for pid in pids if os.fsencode(ledger) in _environment(pid)]


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def takes_batches(ledger: str) -> bool:
    """Whether a process of the program has made a loader's iterator."""
    return any(process["loops"] for process in _processes(ledger))


def empty_loader(ledger: str) -> str:
    """What is known of a loader that gave no batch, if there were only such ones; empty otherwise."""
    loops = [loop for process in _processes(ledger) for loop in process["loops"]]
    if not loops or any(loop["first_waits"] for loop in loops):
        return ""
    facts = loops[0]["facts"]
    size = "" if facts["length"] is None else f" of {facts['length']:,} samples"
    batch = "" if facts["batch_size"] is None else f" in batches of {facts['batch_size']:,}"
    return f"{facts['dataset']}{size}{batch}"


def _fetching(loops: list[dict[str, Any]], processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the loops' workers have done, and what they did themselves if they have none."""
    stops: dict[int, list[list[float]]] = {}
    for loop in loops:
        for pid in loop["workers"]:
            stops.setdefault(pid, []).extend(loop.get("stops", ()))
    found = [
        _without_stops(process["fetching"], stops[process["pid"]])
        for process in processes
        if process["fetching"] and process["pid"] in stops
    ]
    return [*found, *(loop["fetching"] for loop in loops if loop["fetching"])]


def _without_stops(fetching: dict[str, Any], stops: list[list[float]]) -> dict[str, Any]:
    """What a worker has done, without the time in which it was stopped for a step that was measured alone."""
    within = (
        min(ended, go_on) - max(begun, stopped)
        for begun, ended in fetching.get("longest", ())
        for stopped, go_on in stops
    )
    stopped = fetching.get("scale", 1.0) * sum(seconds for seconds in within if seconds > 0.0)
    return {**fetching, "wall": fetching["wall"] - stopped}


def _seconds(loop: dict[str, Any]) -> float:
    sums = (loop["sums"].get(name, 0.0) for name in ("wait", "step", "end"))
    return float(sum(loop["first_waits"]) + sum(sums))


def _put_together(
    facts: dict[str, Any], loops: list[dict[str, Any]], fetching: list[dict[str, Any]], trial: dict[str, Any]
) -> Observed:
    fetches = _Fetches(fetching, facts["workers"])
    batch = fetches.batch_size or facts["batch_size"] or 1
    sums = LoopSums.total(loop["sums"] for loop in loops)
    steps, batches = sums.steps, sums.batches
    step_beside = sums.step / steps
    wait = (sums.wait + sums.end) / batches if batches else 0.0
    wait += _start(loops, wait, step_beside)
    receive = sums.wait_thread / sums.clocked_batches / batch if sums.clocked_batches else 0.0
    if facts["workers"] == 0:
        # The fetch is in the wait; what is beside it is torch's own, and takes no worker.
        receive = 0.0
    lengths = _step_lengths(loops, "steps"), _step_lengths(loops, "alone")
    alone, drops = step_alone(StepLength.mean(sums), *lengths)
    gpu = sums.gpu / sums.gpu_steps if sums.gpu_steps else None
    return Observed(
        dataset=facts["dataset"],
        length=facts["length"],
        batch_size=batch,
        workers=facts["workers"],
        ranks=len(loops),
        steps=round(steps),
        wait=wait,
        # The program may go on to the next batch while the GPU computes, but in the end it waits for it.
        step=Step(max(alone.seconds, gpu or 0.0) / batch, alone.cpu / batch),
        step_drops=drops and alone.seconds > (gpu or 0.0),
        gpu=gpu,
        step_beside=step_beside,
        step_beside_cpu=StepLength.mean(sums).cpu,
        epoch_samples=None if loops[0]["pass_batches"] is None else batch * loops[0]["pass_batches"],
        first_wait=statistics.median([wait for loop in loops for wait in loop["first_waits"]] or [0.0]),
        fetch=fetches.cost._replace(receive=receive),
        collate=fetches.collate,
        decoders=fetches.decoders,
        read_bytes=fetches.figure("rchar"),
        disk_bytes=fetches.figure("read_bytes"),
        memory=fetches.memory,
        growth=fetches.growth,
        trial=trial,
    )


def _start(loops: list[dict[str, Any]], wait: float, step: float) -> float:
    """What the start of a pass adds to each of its batches, in seconds.

    Until the batches that are left out were there, with a step after the last of them, it took longer than as
    many batches do later.
    """
    added = []
    for loop in loops:
        if loop["starts"] and loop["pass_batches"]:
            longer = statistics.median(loop["starts"]) + step - loop["left_out"] * (wait + step)
            added.append(longer / max(loop["pass_batches"], 1.0))
    return statistics.fmean(added) if added else 0.0


def _step_lengths(loops: Sequence[dict[str, Any]], name: str) -> list[StepLength]:
    return [StepLength(*one) for loop in loops for one in loop[name]]


class _Fetches:
    """What making samples costs, over all processes that make them."""

    def __init__(self, processes: Sequence[dict[str, Any]], workers: int) -> None:
        self._processes = [one for one in processes if one.get("samples")]
        self._workers = workers
        self.samples = sum(one["samples"] for one in self._processes) or 1.0
        batches = sum(one["batches"] for one in self._processes)
        self.batch_size = self.samples / batches if batches else 0.0
        self.collate = self._sum("collate_cpu") / self.samples

    def _sum(self, name: str) -> float:
        return sum(float(one.get(name, 0.0)) for one in self._processes)

    def _since(self, name: str) -> list[float]:
        """By how much a figure of the kernel's has grown in each process."""
        pairs = [one["process"].get(name) for one in self._processes]
        return [now - then for then, now in (pair for pair in pairs if pair) if now is not None]

    def figure(self, name: str) -> float | None:
        grown = self._since(name)
        return sum(grown) / self.samples if grown else None

    @property
    def cost(self) -> Fetch:
        cpu, wall, ran = self._sum("cpu"), self._sum("wall"), sum(self._since("cpu"))
        # A worker does nothing else: what it waited for a processor, it waited within a fetch, nearly. A
        # process that trains waits for one in its steps, too: as often as it runs.
        share = 1.0 if self._workers else min(cpu / ran, 1.0) if ran else 0.0
        queued = min(share * sum(self._since("queued")), max(wall - cpu, 0.0))
        send = max(ran - cpu, 0.0) if self._workers else 0.0
        blocked = max(wall - cpu - queued, 0.0)
        return Fetch(cpu / self.samples, blocked / self.samples, send / self.samples)

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        sums: dict[str, list[float]] = {}
        for one in self._processes:
            for name, row in one["decoders"].items():
                sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 3), row, strict=True)]
        found = [
            Decoder(name, calls / self.samples, cpu / self.samples, size / self.samples)
            for name, (calls, cpu, size) in sums.items()
        ]
        return tuple(sorted(found, key=lambda one: -one.cpu))

    @property
    def memory(self) -> float | None:
        sizes = [one["memory"][-1][1] for one in self._processes if one["memory"]]
        return statistics.median(sizes) if sizes and self._workers else None

    @property
    def growth(self) -> float | None:
        rates = []
        for one in self._processes:
            if len(one["memory"]) > 1:
                (begin, before), (end, after) = one["memory"]
                rates.append((after - before) / (end - begin))
        return statistics.median(rates) if rates and self._workers else None
