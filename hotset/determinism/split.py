"""The split: a chain's longest beginning that is safe to cache, with a verdict on every transform.

For each leaf of the chain, from the first on, evidence is asked for in this order:

1. what is declared or said by the transform itself, then its library's structure
   (:mod:`hotset.determinism.verdict`);
2. a trial on real samples (:mod:`hotset.determinism.trial`), which can only demote. What is *declared*
   deterministic is believed without one.

The prefix ends before the first transform that is random, or unknown and doubtful. One that is unknown and
behaved in its trial is accepted, and its verdict says that it was only *probed*; ``strict`` leaves it live.
What comes after the cut is live whatever it is, so it is judged by structure alone, and never run.
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
        prefix: what may be cached: callables to be applied in order. Containers of the chain that lie wholly
            in it are themselves; one that is cut in its middle is two containers.
        suffix: the rest, live for each use.
        verdicts: one for each leaf transform, in order.
        count: how many leaves the prefix has.
        seconds: for each leaf of the prefix the mean time of a call.
        outputs: for each leaf of the prefix what it made of the samples.
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
        samples: a few real samples, as they come to the chain's first transform; at least one. They are not
            changed.
        strict: leave a transform live that nothing is known of, though it behaved in its trial.

    Raises:
        ArgumentError: there are no samples, or a part of the chain cannot be called.
        Exception: what a transform of the prefix raises on one of the samples, untouched.

    Example:
        >>> import random
        >>> def brighten(x): return x + 1
        >>> def jitter(x): return x * random.random()
        >>> found = split([brighten, jitter, abs], samples=[1.0, 2.0])
        >>> [step.__name__ for step in found.prefix], [step.__name__ for step in found.suffix]
        (['brighten'], ['jitter', 'abs'])
        >>> for verdict in found.verdicts[:2]: print(verdict.name, verdict.kind, verdict.evidence[:27])
        brighten unknown probed: of no known library
        jitter random random's global state moved
    """
    if not len(samples):
        raise ArgumentError("a chain is split by looking at what it does: give split() at least one sample.")
    steps = leaves(chain)
    for step in steps:
        if not callable(step):
            raise ArgumentError(f"a chain holds callables, and {step!r} is none.")
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
        if verdict.kind == "random":
            verdicts.append(verdict)
            break
        verdicts.append(verdict)
        seconds.append(tried.seconds)
        outputs.append(tried.outputs)
        inputs = tried.outputs
    count = len(outputs)
    verdicts += [verdict_of(step) for step in steps[len(verdicts) :]]
    prefix, suffix = cut(chain, count)
    return Split(tuple(prefix), tuple(suffix), tuple(verdicts), count, tuple(seconds), tuple(outputs))


def _after_trial(verdict: Verdict, doubts: tuple[str, ...]) -> Verdict:
    if declared(verdict.step) == "deterministic":
        note = f", although {doubts[0]}: draws differ from an uncached run" if doubts else ""
        return replace(verdict, evidence=verdict.evidence + note)
    if doubts:
        known = f", although {verdict.evidence}" if verdict.kind == "deterministic" else ""
        return replace(verdict, kind="random", evidence="; ".join(doubts) + known)
    if verdict.kind == "unknown":
        told = "probed: of no known library, but its outputs were alike and no generator moved"
        return replace(verdict, evidence=told)
    return verdict
