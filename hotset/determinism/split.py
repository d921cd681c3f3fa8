"""The split: a chain's longest beginning that is safe to cache, with a verdict on every transform.

Each leaf of the chain is judged, from the first on:

1. by its declaration, its own ``is_deterministic``, or its library's structure
   (:mod:`hotset.determinism.verdict`);
2. by a trial on real samples (:mod:`hotset.determinism.trial`), which can only demote it. A transform that is
   *declared* deterministic keeps that verdict, whatever its trial shows.

The prefix ends before the first transform that is random, or that is unknown and showed a doubt in its trial.
An unknown transform without a doubt is accepted, and its verdict says that it was only *probed*; ``strict``
leaves it live. Transforms after the cut are live in any case, so they are judged without a trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotset.determinism.chain import cut, leaves
from hotset.determinism.declare import declared
from hotset.determinism.trial import attempt
from hotset.determinism.verdict import Verdict, verdict_of
from hotset.errors import ArgumentError

__all__ = ["Split", "split"]

_SECONDS = 1.0


@dataclass(frozen=True)
class Split:
    """A chain cut in two.

    Attributes:
        prefix: what may be cached: callables to be applied in order. A container of the chain that lies
            wholly in it is there as it is; one that is cut in its middle is there as a part of it.
        suffix: the rest, run for each use.
        verdicts: one for each leaf transform, in order.
        count: how many leaves the prefix has.
        seconds: for each leaf of the prefix the typical time of a call.
        outputs: for each leaf of the prefix its outputs, one for each sample.
    """

    prefix: tuple[Callable[[Any], Any], ...]
    suffix: tuple[Callable[[Any], Any], ...]
    verdicts: tuple[Verdict, ...]
    count: int
    seconds: tuple[float, ...]
    outputs: tuple[list[Any], ...]

    def __str__(self) -> str:
        """A line for each transform, with the cut between two of them."""
        width = max((len(verdict.name) for verdict in self.verdicts), default=0)
        lines = [f"{v.name:<{width}}  {v.kind:<13}  {v.evidence}" for v in self.verdicts]
        lines.insert(self.count, "-" * width + "  cut: above is cached, below is live")
        return "\n".join(lines)


def split(chain: Any, samples: Sequence[Any], strict: bool = False) -> Split:
    """Find the longest beginning of a chain that gives the same output for the same input, always.

    Args:
        chain: a transform, a container of torchvision's, MONAI's, albumentations', kornia's or torch.nn's, or
            a list or tuple of these, to any depth.
        samples: a few real samples, as they reach the chain's first transform; at least one. They are not
            changed.
        strict: leave every unknown transform live, even if its trial shows no doubt.

    Raises:
        ArgumentError: there are no samples, or a part of the chain cannot be called.
        Exception: what a transform of the prefix raises on one of the samples, unchanged.

    Example:
        >>> import random
        >>> def brighten(x): return x + 1
        >>> def jitter(x): return x * random.random()
        >>> found = split([brighten, jitter, abs], samples=[1.0, 2.0])
        >>> [step.__name__ for step in found.prefix], [step.__name__ for step in found.suffix]
        (['brighten'], ['jitter', 'abs'])
        >>> [(verdict.name, verdict.kind) for verdict in found.verdicts]
        [('brighten', 'unknown'), ('jitter', 'random'), ('abs', 'unknown')]
    """
    if not len(samples):
        raise ArgumentError("samples must not be empty: the transforms are tried on them.")
    steps = leaves(chain)
    for step in steps:
        if not callable(step):
            raise ArgumentError(f"a chain must hold callables only, got {step!r} in it.")
    verdicts, seconds, outputs = _judge_prefix(steps, samples, strict)
    count = len(outputs)
    verdicts += [verdict_of(step) for step in steps[len(verdicts) :]]
    prefix, suffix = cut(chain, count)
    return Split(tuple(prefix), tuple(suffix), tuple(verdicts), count, tuple(seconds), tuple(outputs))


def _judge_prefix(
    steps: Sequence[Callable[[Any], Any]], samples: Sequence[Any], strict: bool
) -> tuple[list[Verdict], list[float], list[list[Any]]]:
    """Try each transform on the outputs of the one before it, up to the first that cannot be cached.

    Returns:
        (verdicts, seconds, outputs): the latter two for each transform of the prefix, the verdicts also for
        the one after it if its trial demoted it.
    """
    verdicts: list[Verdict] = []
    seconds: list[float] = []
    outputs: list[list[Any]] = []
    inputs = list(samples)
    deadline = time.perf_counter() + _SECONDS
    for number, step in enumerate(steps):
        verdict = verdict_of(step)
        if verdict.kind == "random" or (strict and verdict.kind == "unknown"):
            break
        left = max(deadline - time.perf_counter(), 0.0) / (len(steps) - number)
        tried = attempt(step, inputs, left)
        verdict = _after_trial(verdict, tried.doubts)
        verdicts.append(verdict)
        if verdict.kind == "random":
            break
        seconds.append(tried.seconds)
        outputs.append(tried.outputs)
        inputs = tried.outputs
    return verdicts, seconds, outputs


def _after_trial(verdict: Verdict, doubts: tuple[str, ...]) -> Verdict:
    """The verdict that follows from the one before the trial and the doubts that the trial raised."""
    if declared(verdict.step) == "deterministic":
        note = f", although {doubts[0]}: draws differ from an uncached run" if doubts else ""
        return replace(verdict, evidence=verdict.evidence + note)
    if doubts:
        known = f", although {verdict.evidence}" if verdict.kind == "deterministic" else ""
        return replace(verdict, kind="random", evidence="; ".join(doubts) + known)
    if verdict.kind == "unknown":
        evidence = (
            "probed: not from a library that hotset knows, but its outputs were alike and no generator moved"
        )
        return replace(verdict, evidence=evidence)
    return verdict
