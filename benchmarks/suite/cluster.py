"""One cache over several machines, against reading the storage that they share.

The machines are Ray nodes on this one (:mod:`benchmarks.cluster_nodes`), their ranks are actors, and the
storage is a throttle: 200 MB/s for all of them together, 5 ms for each read. Every figure is a ratio to what
was measured beside it, or a count, or seconds that the issue bounds.

What is measured is unkind to hotset where the nodes share a few cores: on machines of their own, one rank's
decryption does not wait for another's, and who reads the throttled storage, which costs no processor time,
gains nothing by that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster_estimate import Rates, estimate
from benchmarks.cluster_nodes import Nodes, ray_nodes
from benchmarks.cluster_rank import BATCH, Noise, Rank
from benchmarks.cluster_wire import FAIR, HOTSET, OBJECTS, PLAIN, compared
from benchmarks.harness import Comparison, Outcome, Row, Spread, Target, compare, explain
from benchmarks.settings import Settings
from benchmarks.throttle import Throttle
from benchmarks.truth import WrongData

__all__ = ["cluster"]

_NODES = 3
_BANDWIDTH, _LATENCY = 200e6, 5e-3
_WORKERS = (0, 2)
# Shares are drawn by chance: of 4,000 samples the largest third is about 3 % larger than a third, and records
# have headers. With exactly three times one node's budget, some samples have no room anywhere.
_FITS, _EXACT = 2.8, 3.0
_IMAGES, _PIECES = "150 KB", "32 KB"
_RECORDS = {_IMAGES: (4_000, 150_528), _PIECES: (8_000, 32_768)}
_QUICK_RECORDS = {_IMAGES: (240, 4_096), _PIECES: (240, 1_024)}
_WIRE = {"1 KB": (1_000, 64), _PIECES: (32_768, 64), _IMAGES: (150_528, 64), "1 MB": (1 << 20, 16)}
_PACED_SECONDS = 8.0  # of an epoch in which machines come and go; longer than it takes to be missed
_JOIN_SECONDS = 40.0
_CLUSTERS = (8, 64)
_EACH = 100e9
_NETWORK = 1.25e9  # 10 Gbit/s


class _Failed(Exception):
    """Something could not be measured; the message says why."""


class _Job(NamedTuple):
    """A dataset, opened by all ranks."""

    source: Noise
    link: Throttle
    ranks: list[Any]
    opening: float


def cluster(settings: Settings) -> Outcome:
    """The figures of a cache over several machines; see the module's docstring."""
    outcome = Outcome()
    outcome.notes.append(
        f"{_NODES} Ray nodes on one machine: their ranks, their servers and whoever else is here share "
        f"{os.cpu_count()} cores and one memory; the storage is a throttle ({_BANDWIDTH / 1e6:.0f} MB/s for "
        f"all, {_LATENCY * 1e3:.0f} ms a read)."
    )
    with ray_nodes(_NODES, (80 << 20) if settings.quick else (512 << 20)) as nodes:
        rates = {}
        with _guarded(outcome, "records between two processes"):
            rates["peer"] = _wire(nodes, settings, outcome)
        records = _QUICK_RECORDS if settings.quick else _RECORDS
        for name, (count, size) in records.items():
            with _guarded(outcome, f"{name}: a job on all nodes"), _opened(nodes, count, size, _FITS) as job:
                _epochs(nodes, job, name, settings, outcome)
                if name == _IMAGES:
                    rates["local"] = _local(nodes, job, settings, outcome)
        count, size = records[_IMAGES]
        with _guarded(outcome, "exactly three times"), _opened(nodes, count, size, _EXACT) as job:
            _reads(nodes, job, f"{_IMAGES}, data {_EXACT:g} times one node's budget", outcome)
        # Last, as it leaves two nodes; and with room, as what has none comes from the source in any case.
        count, size = records[_PIECES]
        with _guarded(outcome, "machines that come and go"), _opened(nodes, count, size, _FITS) as job:
            _epoch(nodes, job, 0)
            joined = _join(nodes, job, settings, outcome)
            _deaths(nodes, job, joined, settings, outcome)
    if len(rates) == 2:
        _on_paper(rates["local"], rates["peer"], outcome)
    return outcome


@contextlib.contextmanager
def _guarded(outcome: Outcome, what: str) -> Iterator[None]:
    """Keep the other figures where one cannot be measured."""
    try:
        yield
    except Exception as error:
        outcome.targets.append(Target(what, None, 0, reason=explain(error)))


@contextlib.contextmanager
def _opened(nodes: Nodes, count: int, size: int, times: float) -> Iterator[_Job]:
    """A dataset ``times`` as large as each node's budget, which a rank on each of the nodes has opened."""
    import ray

    with tempfile.TemporaryDirectory() as folder:
        link = Throttle(Path(folder, "link"), _BANDWIDTH, _LATENCY)
        source = Noise(count, size, link)
        ranks = [nodes.place(number, Rank, number, _NODES) for number in range(_NODES)]
        try:
            opening = max(nodes.together(ranks, "open", source, nodes.session, int(count * size / times)))
            nodes.wait_for(_NODES)
            yield _Job(source, link, ranks, opening)
        finally:
            nodes.end_session()
            for rank in ranks:
                ray.kill(rank)


def _epoch(nodes: Nodes, job: _Job, number: int, **how: Any) -> float:
    """One epoch of all ranks, each sample once; returns the seconds of the slowest.

    Raises:
        WrongData: a sample is missing, came twice, or is another.
        _Failed: a rank was warned.
    """
    parts = nodes.together(job.ranks, "epoch", number, **how)
    # Ranks have equally many samples, so a few may come twice.
    if {i for part in parts for i in part.ids} != set(range(len(job.source))):
        raise WrongData("an epoch without some of its samples")
    if told := [sentence for part in parts for sentence in part.told if "no more fit" not in sentence]:
        raise _Failed(told[0])
    slowest: float = max(part.seconds for part in parts)
    return slowest


# ---- what the source gives -------------------------------------------------------------------------------


def _reads(nodes: Nodes, job: _Job, name: str, outcome: Outcome) -> float:
    """The source's reads in the first epoch, with opening's, and later; returns the first's seconds.

    Later ones are told apart: those for want of a sample, and the audit's, which reads one hit in a thousand
    anew to see whether the source still gives the same.
    """
    count = len(job.source)
    first = _epoch(nodes, job, 0, checked=True)
    reads = job.link.counts().requests
    later: list[float] = []
    before = sum(nodes.together(job.ranks, "misses"))
    for number in (1, 2):
        _epoch(nodes, job, number, checked=True)
        later.append(float(sum(nodes.together(job.ranks, "misses")) - before - sum(later)))
    audited = job.link.counts().requests - reads - sum(later)
    outcome.notes.append(f"{name}: the audit has read {audited:,.0f} of {2 * count:,} hits anew.")
    ratio = Spread.of([reads / count])
    outcome.targets += [
        Target(f"{name}: source reads of the first epoch, to the samples", ratio, 1.02, at_least=False),
        Target(f"{name}: source reads of a later epoch", Spread.of(later), 0, at_least=False, unit="reads"),
    ]
    return first


def _epochs(nodes: Nodes, job: _Job, name: str, settings: Settings, outcome: Outcome) -> None:
    """Epochs with the cluster's memory, against reading the source."""
    first = _reads(nodes, job, f"{name}, data {_FITS:g} times one node's budget", outcome)
    numbers = iter(range(3, 1_000))

    def epoch(through: str, workers: int) -> Callable[[], float]:
        return lambda: _epoch(nodes, job, next(numbers), through=through, workers=workers)

    ways = [(through, workers) for workers in _WORKERS for through in ("source", "hotset")]
    entries = {f"{through}, {workers} workers": (through, workers) for through, workers in ways}
    found = compare(
        {entry: epoch(*how) for entry, how in entries.items()},
        f"source, {_WORKERS[-1]} workers",
        2 if settings.quick else 3,
        title=f"an epoch of {len(job.source):,} samples of {name} on {_NODES} nodes",
        unit="s",
        subjects=tuple(entry for entry in entries if entry.startswith("hotset")),
        lower_is_better=True,
    )
    outcome.comparisons.append(found)
    for workers in _WORKERS:
        ours, theirs = f"hotset, {workers} workers", f"source, {workers} workers"
        reason = found.rows[ours].unfit or found.rows[theirs].unfit
        text = f"{name}, {workers} workers a rank: a later epoch, to reading the source"
        outcome.targets.append(Target(text, found.lead(ours, theirs), 5, reason=reason))
    alone = _median(found.rows[f"source, {_WORKERS[0]} workers"])
    outcome.notes.append(
        f"{name}: opening took {job.opening:.1f} s; the first epoch, without workers, {first:.1f} s: "
        f"{first / alone:.2f} times the source's own."
    )


# ---- what machines send each other -----------------------------------------------------------------------


def _wire(nodes: Nodes, settings: Settings, outcome: Outcome) -> float:
    """Ways of records between two processes; returns the bytes a second of hotset's own."""
    rate = 0.0
    for name, (size, batch) in _WIRE.items():
        found = compared(nodes, size, 4 if settings.quick else batch, settings.pairs, settings.seconds)
        outcome.comparisons.append(found)
        for ours in (HOTSET, FAIR):
            for other, bound in ((PLAIN, 0.7), (OBJECTS, 3.0)):
                reason = found.rows[ours].unfit or found.rows[other].unfit
                text = f"{name}: {ours}, to {other}"
                outcome.targets.append(Target(text, found.ratio(ours, other), bound, reason=reason))
        if name == _IMAGES:
            rate = _median(found.rows[HOTSET]) * 1e6
    return rate


def _local(nodes: Nodes, job: _Job, settings: Settings, outcome: Outcome) -> float:
    """What a machine holds, with and without ``cluster=``; returns the bytes a second with it."""
    found: Comparison = nodes.together(job.ranks[:1], "local", settings.pairs, settings.seconds)[0]
    outcome.comparisons.append(found)
    ratio = found.ratio("with cluster=", "alone")
    reason = found.rows["with cluster="].unfit or found.rows["alone"].unfit
    outcome.targets.append(Target("local hits, to those without cluster=", ratio, 1.0, reason=reason))
    return _median(found.rows["with cluster="]) * 1e6


# ---- machines that come and go ---------------------------------------------------------------------------


def _paced(job: _Job, settings: Settings) -> float:
    """Seconds of a pause that make an epoch last long enough to see what follows a death."""
    steps = len(job.source) / _NODES / BATCH
    return (1.0 if settings.quick else _PACED_SECONDS) / steps


def _join(nodes: Nodes, job: _Job, settings: Settings, outcome: Outcome) -> int:
    """A machine that comes while epochs run: seconds until it has sent a record; returns its number."""
    import ray

    known, numbers, pause = set(nodes.members()), iter(range(3, 1_000)), _paced(job, settings)
    reads = job.link.counts().requests

    def begin() -> list[Any]:
        number = next(numbers)
        return [rank.epoch.remote(number, checked=True, pause=pause / 4) for rank in job.ranks]

    running = begin()
    start = time.perf_counter()
    joined = nodes.add()
    adding = time.perf_counter() - start
    serves = None
    while serves is None and time.perf_counter() - start < _JOIN_SECONDS:
        newcomers = [said for name, said in nodes.members().items() if name not in known]
        if any(said["served"]["records"] for said in newcomers):
            serves = time.perf_counter() - start
        done, _ = ray.wait(running, num_returns=len(running), timeout=0.1)
        if len(done) == len(running):
            ray.get(running)
            running = begin()
    ray.get(running)
    owned = sum(said["cached"] for name, said in nodes.members().items() if name not in known)
    measured = Spread.of([serves]) if serves is not None else None
    reason = f"it has sent no record in {_JOIN_SECONDS:g} s"
    text = "seconds from add_node until a joining machine has sent a record"
    outcome.targets.append(Target(text, measured, 10, at_least=False, unit="s", reason=reason))
    outcome.notes.append(
        f"add_node itself took {adding:.1f} s; {time.perf_counter() - start:.0f} s after its beginning, and "
        f"{next(numbers) - 3} epochs, the machine held {owned:,} of {len(job.source):,} samples, and the "
        f"source had been read {job.link.counts().requests - reads:,} times."
    )
    return joined


def _deaths(nodes: Nodes, job: _Job, joined: int, settings: Settings, outcome: Outcome) -> None:
    """The longest steps of ranks when a machine dies, and when one falls silent."""
    _kill(nodes, job, _NODES - 1, signal.SIGKILL, "kill -9 of a node with a rank on it", settings, outcome)
    nodes.remove(_NODES - 1)
    nodes.wait_for(_NODES)
    rest = job._replace(ranks=job.ranks[: _NODES - 1])
    _kill(nodes, rest, joined, signal.SIGSTOP, "a node that falls silent (SIGSTOP)", settings, outcome)
    nodes.kill(joined)
    nodes.remove(joined)


def _kill(
    nodes: Nodes, job: _Job, victim: int, kind: int, what: str, settings: Settings, outcome: Outcome
) -> None:
    """Send all of a node's processes a signal in the middle of an epoch."""
    import ray

    survivors = [rank for number, rank in enumerate(job.ranks) if number != victim]
    half = Path(nodes.folders[0], f"half.{kind}")
    pause, number = _paced(job, settings), 100 + kind
    running = [rank.epoch.remote(number, checked=True, pause=pause, half=half) for rank in job.ranks]
    while not half.exists():
        time.sleep(0.01)
    nodes.kill(victim, kind)
    reads = job.link.counts().requests
    parts = ray.get(running[: len(survivors)])
    for part in parts:
        if len(set(part.ids)) != len(part.ids) or len(part.ids) < len(job.source) // _NODES:
            raise WrongData("a surviving rank's part of the epoch is not whole")
    longest = sorted(part.longest for part in parts)
    # The worst of them is what is promised, and no median.
    measured = Spread(longest[-1], longest[0], longest[-1])
    text = f"{what}: the longest step of a surviving rank"
    outcome.targets.append(Target(text, measured, 2, at_least=False, unit="s"))
    told = sum(len(part.told) for part in parts)
    outcome.notes.append(
        f"{what}: {sum(len(part.ids) for part in parts):,} samples were all right; {told} warnings; the "
        f"source was read {job.link.counts().requests - reads:,} times in the rest of the epoch."
    )


# ---- on paper --------------------------------------------------------------------------------------------


def _on_paper(local: float, peer: float, outcome: Outcome) -> None:
    """The epochs of clusters that are not here; see :mod:`benchmarks.cluster_estimate`."""
    rates = Rates(local, peer, _NETWORK, _BANDWIDTH)
    g, p, b, s = (f"{rate / 1e6:,.0f}" for rate in rates)
    outcome.notes.append(
        "on paper: later(N) = max(c/N / g + c (N-1)/N / p, c (N-1)/N / b), c = D/N; source(N) = D / s; "
        f"g = {g}, p = {p}, b = {b} (10 Gbit/s, assumed), s = {s} MB/s."
    )
    for machines in _CLUSTERS:
        size = machines * _EACH
        found = estimate(machines, size, rates)
        outcome.notes.append(
            f"on paper: {machines} machines, {size / 1e9:,.0f} GB: {found.source:,.0f} s from the source, "
            f"{found.first:,.0f} s in the first epoch, {found.later:,.0f} s in each later one "
            f"({found.source / found.later:,.0f}x)."
        )


def _median(row: Row) -> float:
    return Spread.of(row.figures).median if row.figures else float("nan")
