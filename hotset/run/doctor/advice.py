"""What would help a training, in samples a second: each thing that could be changed, by arithmetic.

:mod:`hotset.policy.throughput` does the arithmetic with costs that were watched and rates that were tried.
How far its rate for the program as it is differs from the rate that was measured is a factor of all others in
which the same loader works, as memory and processors that are shared with other programs are not in it.

What cannot be known is said: see :attr:`Report.unknown`.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

from hotset.policy.throughput import (
    Fetch,
    Loader,
    Step,
    best_workers,
    loader_with,
    mixed,
    training_rate,
    with_start,
)
from hotset.run.doctor.observed import Observed
from hotset.units import format_bytes

__all__ = ["WORTH", "Advice", "Prediction", "Report", "as_json", "judge"]

WORTH = 1.05  # a smaller gain is not advised
_ALIKE = 0.03  # of two gains that differ by less, the one that takes less memory is better
_LEAST_BATCHES_OF_A_WORKER = 4
_SMALLER = 0.5  # a transform that leaves more of a sample is not worth another order
_ROOM = 1.1  # of the samples' bytes, by the size of a few: others may be larger
_WHOLE = 0.8  # of the samples in an epoch: the rest may be dropped
_FEW_OTHERS = 0.2  # processors that other programs may take
_FACTOR = (0.75, 1.33)  # beyond these the arithmetic has missed what bounds the program


class Advice(NamedTuple):
    """Something to change.

    Attributes:
        line: what to write.
        samples_per_second: with it, of all ranks.
        gain: that, as a multiple of the program as it is.
        bytes: of memory that it takes more, on the machine; None if that is not known.
        note: what to know before.
    """

    line: str
    samples_per_second: float
    gain: float
    bytes: float | None
    note: str


class Prediction(NamedTuple):
    """What follows from the figures.

    Attributes:
        modelled: the rate of the program as it is, by arithmetic.
        limit: the rate of the steps alone: no loader can give more.
        workers: the best number, for each rank.
        workers_rate: with it.
        cached: with hotset.cache, hotset.DataLoader and the program's number of workers; None if not known.
        cached_bytes: what the cache holds in all.
        fits: the share of the samples that fit, 0 to 1.
    """

    modelled: float
    limit: float
    workers: int
    workers_rate: float
    cached: float | None
    cached_bytes: int | None
    fits: float


class Report(NamedTuple):
    """All that is said of a program.

    Attributes:
        seen: how it was watched.
        predicted: what the figures say of the program as it is, of other workers, and of a cache.
        advised: everything that could be changed, the best first; those that gain nothing come last.
        unknown: sentences about what is not known.
        in_doubt: whether more may be gained than is known: the trial was held up, or did not come to its end,
            or the program is not as fast as arithmetic says.
    """

    seen: Observed
    predicted: Prediction
    advised: list[Advice]
    unknown: list[str]
    in_doubt: bool


def judge(seen: Observed, command: str, cores: int | None = None) -> Report:
    """What is said of a program.

    Args:
        cores: the processors that it may use; None for those of this process.
    """
    model = _Model(seen, cores or len(os.sched_getaffinity(0)))
    held_up = _of_busy_trial(model)
    return Report(
        seen=seen,
        predicted=_predict(model),
        advised=_advise(model, command),
        unknown=[*held_up, *_unknown(model)],
        in_doubt=bool(held_up or seen.trial.get("late") or _untried(seen) or model.is_missed),
    )


class _Model:
    """The rates of one program, with the factor by which arithmetic misses it."""

    def __init__(self, seen: Observed, cores: int) -> None:
        self.seen = seen
        self.cores = cores / seen.ranks  # of each rank
        self.fetch = _with_transport(seen)
        without, beside = seen.tried("plain", 0), seen.tried("plain", max(seen.workers, 1))
        # A worker writes into shared memory, which is touched for the first time in each batch.
        self._without: Loader | None = None
        if seen.workers and without is not None:
            self._without = Loader(without["rate"], 0.0, without["cpu"], overlaps=False)
        # And the step gives a batch's memory back, which takes longer if that is shared.
        self._release = [0.0 if row is None else row["release"] for row in (without, beside)]
        self._step = _longer(seen.step, -self._release[seen.workers > 0]) if seen.step_drops else seen.step
        self._start = 0.0 if beside is None else beside["start"] / max(seen.workers, 1)  # of each worker
        self._later = _start_beyond_forks(seen, beside)
        self.modelled = self._plain(seen.workers)
        measured = seen.rate / seen.ranks
        # Where the program is slower than that, other programs may hold it up: they would with other workers,
        # too. Where it is much faster, what was tried was held up, and the rest of the ratio is not a gain.
        self.factor = min(measured / self.modelled, _FACTOR[1]) if self.modelled else 1.0

    def _plain(self, workers: int) -> float:
        loader = loader_with(workers, self.fetch, self.cores)
        if workers == 0 and self._without is not None:
            loader = self._without
        rate = training_rate(loader, _longer(self._step, self._release[workers > 0]), self.cores)
        return with_start(rate, workers * self._start + (workers > 0) * self._later)

    def plain(self, workers: int) -> float:
        """Samples a second of a rank, with torch's loader."""
        if workers == self.seen.workers:
            return self.seen.rate / self.seen.ranks
        return min(self.factor * self._plain(workers), self.limit)

    def persistent(self) -> float:
        """Samples a second of a rank whose workers are started once, and not for each pass."""
        seconds = self.seen.ranks / self.seen.rate
        started = self.seen.workers * self._start + (self.seen.workers > 0) * self._later
        return min(1.0 / max(seconds - started, 0.1 * seconds), self.limit)

    @property
    def is_missed(self) -> bool:
        """Whether arithmetic misses the program's rate by so much that the gains may be wrong."""
        low, high = _FACTOR
        return not low <= self.seen.rate / (self.seen.ranks * self.modelled) <= high

    @property
    def limit(self) -> float:
        seconds = self._step.seconds
        return 1.0 / seconds if seconds else float("inf")

    def best(self) -> int:
        """The number of workers of each rank that is best."""
        if not self.seen.may_have_workers:
            return 0
        return best_workers(
            self.fetch,
            self.seen.step,
            self.cores,
            most=self._most(),
            without=self._without,
            start=self._start,
        )[0]

    def _most(self) -> int | None:
        """Workers that give fewer batches an epoch do not pay for their start."""
        if self.seen.length is None:
            return None
        batches = self.seen.length / self.seen.batch_size / self.seen.ranks
        return max(self.seen.workers, int(batches / _LEAST_BATCHES_OF_A_WORKER))

    def cached(self, workers: int, fits: float, spared: float = 0.0) -> float | None:
        """Samples a second of a rank with a cache that holds this share of the samples.

        Args:
            workers: a number that was tried.
            fits: the share, 0 to 1.
            spared: seconds of a sample's live transforms that would be cached, too.
        """
        row = self.seen.tried("cached", workers)
        if row is None:
            return None
        live = any(not one["cached"] for one in self.seen.trial["plan"]["transforms"])
        return self._with_hits(row, workers, workers > 0 or not live, fits, spared)

    def as_it_is(self, kind: str, fits: float = 1.0) -> float | None:
        """Samples a second of a rank with the loader that the program has; None if that was not tried.

        Args:
            kind: ``"torch"`` over a cache, ``"run"`` below ``hotset run``, ``"plain"`` in the trial.
            fits: the share of the samples that the cache, or what the decoders return, has room for.
        """
        workers, seen, step = self.seen.workers, self.seen, self._step
        row = seen.tried(kind, workers)
        if row is None:
            return None
        if workers and not row["training"]:
            # Threads of the step that spin beside workers will do so then, too.
            beside = Step(seen.step_beside / seen.batch_size, seen.step_beside_cpu / seen.batch_size)
            step = beside if beside.seconds > step.seconds else step
        return self._with_hits(row, workers, workers > 0, fits, step=step)

    def _with_hits(
        self,
        row: dict[str, float],
        workers: int,
        overlaps: bool,
        fits: float,
        spared: float = 0.0,
        step: Step | None = None,
    ) -> float:
        """With a loader whose hits were tried."""
        hits = Loader(row["rate"], row["main"], row["cpu"], overlaps)
        step = _longer(self._step if step is None else step, row["release"])
        seconds = max(1.0 / hits.alone - spared / max(workers, 1), 0.1 / hits.alone)
        less = hits._replace(alone=1.0 / seconds, cpu=max(hits.cpu - spared, 0.1 * hits.cpu))
        loader = mixed(less, loader_with(workers, self.fetch, self.cores), fits) if fits < 1.0 else less
        # What the trial had with the program's step counts: arithmetic misses it by so much for each hit.
        missed = (
            1.0 / row["training"] - 1.0 / training_rate(hits, step, self.cores) if row["training"] else 0.0
        )
        seconds = 1.0 / training_rate(loader, step, self.cores) + fits * missed + (workers > 0) * self._later
        return min(1.0 / max(seconds, 1e-9), self.limit)


def _start_beyond_forks(seen: Observed, beside: dict[str, float] | None) -> float:
    """What workers that are no forks of the program take longer to start, in seconds a sample of a pass.

    Args:
        beside: what was tried of the program's loader, with forks.
    """
    if seen.trial.get("forks", True) or beside is None or not seen.epoch_samples:
        return 0.0
    forked = beside["start"] * seen.epoch_samples + seen.batch_size * (seen.fetch.cpu + seen.fetch.blocked)
    return max(seen.first_wait - forked, 0.0) / seen.epoch_samples


def _longer(step: Step, seconds: float) -> Step:
    """A step that takes so much longer, or shorter, but nine tenths at most."""
    return Step(max(step.seconds + seconds, 0.1 * step.seconds), max(step.cpu + seconds, 0.1 * step.cpu))


def _with_transport(seen: Observed) -> Fetch:
    """The cost of a sample, with what it costs to hand it over, which was tried with a worker at least."""
    row = seen.tried("plain", max(seen.workers, 1))
    if row is None:
        return seen.fetch
    if seen.workers:
        return seen.fetch._replace(receive=row["main"])
    send = max(row["cpu"] - row["main"] - seen.fetch.cpu, 0.0)
    return seen.fetch._replace(send=send, receive=row["main"])


def _predict(model: _Model) -> Prediction:
    seen, workers = model.seen, model.best()
    plan = seen.trial.get("plan")
    cached = model.cached(seen.workers, plan["fits"]) if plan else None
    return Prediction(
        modelled=seen.ranks * model.modelled,
        limit=seen.ranks * model.limit,
        workers=workers,
        workers_rate=seen.ranks * model.plain(workers),
        cached=None if cached is None else seen.ranks * cached,
        cached_bytes=plan["total_bytes"] if plan else None,
        fits=plan["fits"] if plan else 0.0,
    )


def _advise(model: _Model, command: str) -> list[Advice]:
    found = [*_of_workers(model), *_of_starts(model)]
    found += [*_of_run(model, command), *_of_cache(model), *_of_earlier(model)]
    best = max((one.samples_per_second for one in found), default=0.0)

    def rank(one: Advice) -> tuple[float, float]:
        nearly = one.samples_per_second >= (1.0 - _ALIKE) * best
        return (0.0 if nearly else 1.0 - one.samples_per_second / best, one.bytes or 0.0)

    return sorted(found, key=rank)


def _advice(model: _Model, line: str, rate: float, size: float | None, note: str = "") -> Advice:
    all_ranks = model.seen.ranks * rate
    return Advice(line, all_ranks, all_ranks / model.seen.rate if model.seen.rate else 1.0, size, note)


def _of_workers(model: _Model) -> list[Advice]:
    workers, seen = model.best(), model.seen
    if workers == seen.workers:
        return []
    more = (workers - seen.workers) * seen.ranks
    size = None if seen.memory is None else max(0.0, more * seen.memory)
    note = "random transforms draw other numbers, as torch seeds each worker"
    if seen.length is None:
        note = "a stream needs as many shards as workers, and gives its samples in another order"
    return [_advice(model, f"num_workers={workers}", model.plain(workers), size, note)]


def _of_starts(model: _Model) -> list[Advice]:
    """With workers that stay for all epochs."""
    if not model.seen.workers or not model.seen.rate:
        return []
    note = (
        "workers are started once; from the second epoch on random transforms draw other numbers, and the "
        "workers do not see what the program changes in the dataset"
    )
    return [_advice(model, "persistent_workers=True", model.persistent(), 0.0, note)]


def _of_run(model: _Model, command: str) -> list[Advice]:
    """With the decoders' results kept."""
    seen, kept = model.seen, model.seen.trial.get("run")
    if not kept or not seen.decoders:
        return []
    plan, size = seen.trial.get("plan"), kept["bytes"] * (seen.length or 0)
    fits = min(1.0, plan["room"] / size) if plan and size else 1.0
    rate = model.as_it_is("run", fits)
    if rate is None:
        return []
    note = f"{_from(seen)}; keeps what {seen.decoders[0].name} returns"
    if fits < 1.0:
        size, note = fits * size, f"{note}, of {fits:.0%} of the samples"
    return [_advice(model, f"hotset run -- {command}", rate, size or None, note)]


def _from(seen: Observed) -> str:
    """From when on the cache gives that."""
    if seen.epoch_samples is None or not seen.length:
        return "from the second epoch on"
    share = seen.ranks * seen.epoch_samples / seen.length
    if share >= _WHOLE:
        return "from the second epoch on"
    return f"once all samples were read: an epoch here reads {share:.0%} of them"


def _of_cache(model: _Model) -> list[Advice]:
    """With a cache of the dataset: in hotset's loader, for each number of workers tried, and in torch's."""
    seen, plan = model.seen, model.seen.trial.get("plan")
    if not plan:
        return []
    total, fits = plan["total_bytes"], plan["fits"]
    memory, size = format_bytes(_ROOM * total).replace(" ", ""), min(total, plan["room"])
    call = f'hotset.cache(dataset, memory="{memory}")'
    found = []
    for key in sorted(seen.trial["loaders"]):
        kind, _, workers = key.partition("-")
        rate = model.cached(int(workers), fits) if kind == "cached" else None
        if rate is not None:
            line = f"{call}, hotset.DataLoader(..., num_workers={workers})"
            note = _from(seen)
            if seen.trial.get("given"):  # a library's own kind of loader sets these by itself
                note += f"; with {' and '.join(seen.trial['given'])}, as the program's loader has"
            if fits < 1.0:
                note += f"; {fits:.0%} of the samples fit"
            found += [_advice(model, line, rate, size, note), *_of_rest(model, int(workers))]
    rate = model.as_it_is("torch", fits)
    if rate is not None:
        note = f"{_from(seen)}; for a loader that a library makes, such as timm's or the Trainer's"
        found.append(_advice(model, f"{call}, with the loader as it is", rate, size, note))
    return found


def _of_rest(model: _Model, workers: int) -> list[Advice]:
    """Where not all samples fit: with the others on a disk, or in a window."""
    plan = model.seen.trial["plan"]
    rate = model.cached(workers, 1.0) if plan["fits"] < 1.0 else None
    if rate is None:
        return []
    total, size = plan["total_bytes"], min(plan["total_bytes"], plan["room"])
    return [
        _advice(
            model,
            f'hotset.cache(dataset, spill="/a/disk"), hotset.DataLoader(..., num_workers={workers})',
            rate,
            size,
            f"at most: the disk's speed was not measured; {format_bytes(total - size)} go there",
        ),
        _advice(
            model,
            "hotset.cache(dataset, window=hotset.Window(...))",
            rate,
            size,
            "trains on a part at a time: another order of samples than now",
        ),
    ]


class _Earlier(NamedTuple):
    """A transform that makes samples smaller, behind the first random one.

    Attributes:
        name, first: its name, and that of the first random one.
        share: the size of a sample after it, of that before it.
        seconds: that it takes.
    """

    name: str
    first: str
    share: float
    seconds: float


def _shrinks_late(plan: dict[str, Any]) -> _Earlier | None:
    """The transform that would make the cache smallest if it came before the random ones."""
    live = list(itertools.dropwhile(lambda row: row["cached"], plan["transforms"]))
    found = [
        _Earlier(row["name"], live[0]["name"], row["bytes"] / before["bytes"], row["seconds"] or 0.0)
        for before, row in itertools.pairwise(live)
        if row["kind"] == "deterministic" and row["bytes"] and before["bytes"]
    ]
    found = [one for one in found if one.share <= _SMALLER]
    return min(found, key=lambda one: one.share, default=None)


def _of_earlier(model: _Model) -> list[Advice]:
    """With a transform that makes samples smaller before the first random one."""
    seen, plan = model.seen, model.seen.trial.get("plan")
    earlier = _shrinks_late(plan) if plan else None
    if not plan or earlier is None:
        return []
    size = earlier.share * plan["total_bytes"]
    fits = min(1.0, plan["room"] / size) if size else 1.0
    rate = model.cached(seen.workers, fits, earlier.seconds)
    if rate is None:
        return []
    line = f"{earlier.name} before {earlier.first}, with hotset.cache"
    note = f"{_from(seen)}; other samples than now, as {earlier.first} then works on smaller ones"
    return [_advice(model, line, rate, min(size, plan["room"]), note)]


def _of_busy_trial(model: _Model) -> list[str]:
    """What was tried is compared with what was watched before it: if the machine was as busy, they agree."""
    seen, tried = model.seen, model.as_it_is("plain")
    if tried is None or seen.ranks > 1 or tried >= _FACTOR[0] * seen.rate:
        return []
    return [
        f"The program's own loader gave {tried:,.0f} samples/s when it was tried, and {seen.rate:,.0f} "
        "before: the trial was held up, such as by other programs on the machine, so more may be gained than "
        "this says; run it again."
    ]


def _untried(seen: Observed) -> bool:
    """Whether the program ended, by itself or by Ctrl-C, before a cache was tried."""
    return not (seen.trial.get("plan") or seen.trial.get("refused"))


def _unknown(model: _Model) -> list[str]:
    found, seen = [], model.seen
    refused = seen.trial.get("refused")
    if refused:
        found.append(f"What hotset.cache would give is not known: {refused.rstrip('.')}.")
    elif _untried(seen):
        found.append("What hotset.cache would give is not known: the program ended before it could be tried.")
    if not seen.may_have_workers:
        why = (
            seen.trial.get("failed", {}).get("plain-1") or refused or "the program ended before one was tried"
        )
        found.append(f"What workers would give is not known: {why.rstrip('.')}.")
    found += _of_decoders(seen)
    found += _of_gpu(seen)
    if seen.others is not None and seen.others > _FEW_OTHERS:
        found.append(
            f"Other programs took {seen.others:.1f} of this machine's {os.cpu_count()} processors meanwhile, "
            "and all rates are those of a machine that is as busy: run it again if it will not be."
        )
    if model.is_missed:
        modelled = seen.ranks * model.modelled
        found.append(
            f"By arithmetic the program as it is gives {modelled:,.0f} samples/s, but it gave "
            f"{seen.rate:,.0f}: something that is not seen here counts, such as other programs on the "
            "machine, so the gains may be wrong."
        )
    return found


def _of_decoders(seen: Observed) -> list[str]:
    kept = seen.trial.get("run")
    if not seen.decoders:
        return ["No decoder that hotset knows was called, so what hotset run would give is not known."]
    if not kept:
        why = (
            seen.trial.get("failed", {}).get(f"run-{seen.workers}")
            or seen.trial.get("refused")
            or "the program ended before it could be tried"
        )
        return [f"What hotset run would give is not known: {why.rstrip('.')}."]
    if not kept["called"]:
        return [
            "What hotset run would give is not known: the loader that was tried called no decoder that "
            "hotset knows."
        ]
    if not kept["hits"]:
        why = f": {kept['left_alone'].rstrip('.')}" if kept["left_alone"] else ""
        return [f"hotset run would keep nothing that {kept['called']} returns{why}."]
    return []


def _of_gpu(seen: Observed) -> list[str]:
    if seen.gpu is None:
        return []
    idle = max(0.0, seen.wait + seen.step_beside - seen.gpu) / max(seen.wait + seen.step_beside, 1e-9)
    return [
        f"What a DeviceQueue or sunk steps would give is not known: between its steps the GPU is idle for "
        f"{idle:.0%} of the time, of which the copies of batches are a part."
    ]


def as_json(report: Report) -> dict[str, Any]:
    """What ``--json`` prints; the keys are stable."""
    seen, predicted = report.seen, report.predicted
    return {
        "now": {
            "samples_per_second": seen.rate,
            "modelled_samples_per_second": predicted.modelled,
            "waited_fraction": seen.waited,
            "steps": seen.steps,
            "step_seconds": seen.step_beside,
            "gpu_step_seconds": seen.gpu,
            "wait_seconds": seen.wait,
            "first_batch_seconds": seen.first_wait,
            "elsewhere_fraction": seen.elsewhere,
            "others_processors": seen.others,
            "batch_size": seen.batch_size,
            "num_workers": seen.workers,
            "ranks": seen.ranks,
            "limit_samples_per_second": predicted.limit,
        },
        "sample": {
            **seen.fetch._asdict(),
            "collate": seen.collate,
            "decoders": [one._asdict() for one in seen.decoders],
            "read_bytes": seen.read_bytes,
            "disk_bytes": seen.disk_bytes,
        },
        "workers": {"bytes": seen.memory, "growth_bytes_per_second": seen.growth},
        "cached": {
            "samples_per_second": predicted.cached,
            "bytes": predicted.cached_bytes,
            "fits": predicted.fits,
            "refused": seen.trial.get("refused"),
            "plan": seen.trial.get("plan"),
        },
        "num_workers": {"best": predicted.workers, "samples_per_second": predicted.workers_rate},
        "advice": [one._asdict() for one in report.advised if one.gain >= WORTH],
        "unknown": report.unknown,
    }
