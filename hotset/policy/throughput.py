"""The throughput of a training, in samples a second, from the cost of a sample in its workers and its steps.

A loader feeds a step. Both need processor time; a worker may also wait for a disk or a network, and a step
for a device. With N workers on C cores, three rates bound the training, all in samples a second::

    workers    N / (cpu + blocked + send)           N samples are made at once
    main       1 / (receive + step)                 the training process does one thing after the other
    cores      C / (cpu + send + receive + step_cpu)   nothing runs without a core

The least of them counts. Close to each other they also hinder each other: a queue of finite length runs empty
now and then, and processes wait for a core that another one has for a moment. So the bounds are combined as
``(a**-k + b**-k + c**-k) ** (-1/k)`` with k = 8, which is a twelfth less than the least of two equal bounds.
Without workers nothing overlaps: a sample takes its own time and its step's.

The bounds are those of operational analysis (Denning and Buzen, "The operational analysis of queueing network
models", 1978); that a pipeline's rate follows from measured costs of its parts is shown by Plumber (Kuchnik
et al., MLSys 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Fetch", "Loader", "Step", "best_workers", "loader_with", "mixed", "training_rate", "with_start"]

_SHARPNESS = 8
# Fewer workers that reach this share of the best rate are better than more, which take memory.
_NEARLY_BEST = 0.98
_MOST_WORKERS_PER_CORE = 16


class Fetch(NamedTuple):
    """What a sample costs where it is made; seconds.

    Attributes:
        cpu: processor time to read, decode, transform and collate it.
        blocked: time in which the process waits for something that is no processor.
        send: processor time to send it to the training process, in the worker.
        receive: processor time to receive it there.
    """

    cpu: float
    blocked: float = 0.0
    send: float = 0.0
    receive: float = 0.0


class Loader(NamedTuple):
    """A loader by itself.

    Attributes:
        alone: samples a second while nothing else runs.
        main: seconds a sample in which the training's own thread is busy with it.
        cpu: seconds of processor time a sample, in all processes.
        overlaps: whether it goes on while the training computes.
    """

    alone: float
    main: float
    cpu: float
    overlaps: bool


class Step(NamedTuple):
    """The rest of the training: seconds a sample, and the processor time in them, over all its threads."""

    seconds: float
    cpu: float


def _least(*bounds: float) -> float:
    """The least of the bounds, and somewhat less where others are close."""
    least = min(bounds)
    if least <= 0.0:
        return 0.0
    return least * math.pow(sum((least / bound) ** _SHARPNESS for bound in bounds), -1 / _SHARPNESS)


def _inverse(value: float) -> float:
    """Samples a second from seconds a sample, or the other way round; infinite for 0."""
    return 1.0 / value if value > 0.0 else float("inf")


def loader_with(workers: int, fetch: Fetch, cores: float) -> Loader:
    """The loader that makes samples of this cost with ``workers`` workers.

    Example:
        >>> two = loader_with(2, Fetch(cpu=1e-3), cores=4)
        >>> round(two.alone), two.overlaps
        (1999, True)
        >>> waits = Fetch(cpu=0.0, blocked=20e-3)  # a source behind a network
        >>> [round(loader_with(workers, waits, cores=2).alone) for workers in (0, 1, 16)]
        [50, 50, 800]
    """
    busy = fetch.cpu + fetch.blocked
    if workers == 0:
        return Loader(_inverse(busy), busy, fetch.cpu, overlaps=False)
    cpu = fetch.cpu + fetch.send + fetch.receive
    alone = _least(workers * _inverse(busy + fetch.send), cores * _inverse(cpu), _inverse(fetch.receive))
    return Loader(alone, fetch.receive, cpu, overlaps=True)


def training_rate(loader: Loader, step: Step, cores: float) -> float:
    """Samples a second of a training: this loader together with the rest.

    Example:
        >>> made = loader_with(4, Fetch(cpu=4e-3), cores=8)
        >>> round(training_rate(made, Step(seconds=10e-3, cpu=0.0), cores=8))  # the step is slower
        100
        >>> round(training_rate(made._replace(overlaps=False), Step(1e-3, 1e-3), cores=8))
        500
    """
    if not loader.overlaps:
        return _inverse(_inverse(loader.alone) + step.seconds)
    return _least(loader.alone, _inverse(loader.main + step.seconds), cores * _inverse(loader.cpu + step.cpu))


def with_start(rate: float, start: float) -> float:
    """Samples a second of whole epochs: their start adds ``start`` seconds to each sample.

    Example:
        >>> round(with_start(1000.0, 1e-3))
        500
    """
    return rate / (1.0 + rate * start) if rate < math.inf else _inverse(start)


def mixed(hits: Loader, misses: Loader, share: float) -> Loader:
    """A loader of which ``share`` of the samples, 0 to 1, are hits.

    Example:
        >>> hit, miss = Loader(10_000.0, 0.0, 0.0, True), Loader(100.0, 0.0, 0.0, True)
        >>> round(mixed(hit, miss, 0.9).alone)
        917
    """
    seconds = share * _inverse(hits.alone) + (1.0 - share) * _inverse(misses.alone)
    main = share * hits.main + (1.0 - share) * misses.main
    cpu = share * hits.cpu + (1.0 - share) * misses.cpu
    return Loader(_inverse(seconds), main, cpu, overlaps=hits.overlaps or misses.overlaps)


def best_workers(
    fetch: Fetch,
    step: Step,
    cores: float,
    *,
    most: int | None = None,
    without: Loader | None = None,
    start: float = 0.0,
) -> tuple[int, float]:
    """The least number of workers whose rate is nearly the best, and that rate.

    Workers that could run while all cores are taken only hinder each other: on two cores three of them
    decoded 5 % less than two. So there are no more than keep the cores busy, with those that wait meanwhile.

    Args:
        fetch: the cost of a sample.
        step: the rest of the training.
        cores: that this training process and its workers have.
        most: that many workers at most.
        without: the loader without workers, if it is known by itself.
        start: seconds a sample, over an epoch, that it takes to start each worker.

    Example:
        >>> best_workers(Fetch(cpu=3e-3, send=0.0), Step(1e-3, 0.0), cores=8)[0]
        4
        >>> best_workers(Fetch(cpu=3e-3, send=0.0), Step(1e-3, 0.0), cores=8, start=2e-4)[0]
        3
        >>> best_workers(Fetch(cpu=1e-6, send=30e-6, receive=30e-6), Step(1e-3, 0.0), cores=8)[0]
        0
    """
    busy = fetch.cpu + fetch.send
    for_each_core = 1.0 + fetch.blocked / busy if busy > 0.0 else math.inf
    bound = max(1, round(cores * min(for_each_core, _MOST_WORKERS_PER_CORE)))
    bound = bound if most is None else min(bound, most)
    loaders = [loader_with(count, fetch, cores) for count in range(bound + 1)]
    if without is not None:
        loaders[0] = without
    rates: Sequence[float] = [
        with_start(training_rate(loader, step, cores), count * start) for count, loader in enumerate(loaders)
    ]
    enough = _NEARLY_BEST * max(rates)
    found = next(count for count, rate in enumerate(rates) if rate >= enough)
    return found, rates[found]
