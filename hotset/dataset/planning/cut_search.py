"""The search for the cut: how far into its chains a dataset is cached, decided on a few of its samples.

What is known of each chain (:mod:`hotset.dataset.planning.chain_findings`) says which cuts are allowed.
The cut is the last one that is allowed, unless an earlier one is clearly cheaper with the memory there is
(:mod:`hotset.policy.cut_point`), or the user gave ``cut=``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotset._interrupts import own_errors
from hotset.dataset.pipeline import UNUSED, ChainCut, Cuts, Pipeline
from hotset.dataset.plan import Row
from hotset.dataset.planning.chain_findings import ChainFindings, ChainJudge, Findings, size_of
from hotset.dataset.planning.cut_check import differs_when_cut
from hotset.dataset.planning.recorder import Recorder, find_paths, recorded
from hotset.dataset.transform_attributes import TRANSFORM_NAMES
from hotset.determinism.batched import Batched
from hotset.determinism.chain import Values, leaves
from hotset.determinism.draws.rng import Generators
from hotset.determinism.trial import output_and_seconds
from hotset.determinism.verdict import name_of
from hotset.errors import ArgumentError, NotCacheable
from hotset.policy.cut_point import cheapest_cut, share_that_fits
from hotset.units import format_bytes

__all__ = ["CutChoice", "choose"]

_LIVE_SECONDS = 0.5
# Of a dataset's own chains, the one whose transforms `cut=` counts.
_MAIN = ("transform", "transforms")


@dataclass(frozen=True)
class CutChoice:
    """Where the chains are cut.

    Attributes:
        cuts: for :meth:`Pipeline.cut`.
        rows: for the plan: the dataset, then its transforms in the order in which they are applied.
        notes: sentences about how this was decided.
        probed: whether a transform is cached for which a trial is the only evidence.
    """

    cuts: Cuts
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    probed: bool


def choose(pipeline: Pipeline, limit: float, strict: bool, user_cut: int | None) -> CutChoice:
    """Find where to cut.

    Args:
        pipeline: the dataset and its chains.
        limit: the bytes that the cache may take.
        strict: leave live what only a trial shows to be deterministic.
        user_cut: the user's ``cut=``: how many transforms, the dataset's own first, are to be cached.

    Raises:
        NotCacheable: a random transform can neither be cut off nor cached, or ``user_cut`` includes one.
        ArgumentError: ``user_cut`` is not between 0 and the number of transforms.
        Exception: what the dataset or a transform raises on all samples.
    """
    # A source that is declared may draw. The program must go on with the draws it had without a cache.
    with Generators([pipeline.dataset, pipeline.given]):
        judge = ChainJudge(pipeline, strict)
        found = judge.judge()
        choice = _CutSearch(judge, found).choose(limit, user_cut)
        if differs_when_cut(pipeline, choice.cuts, judge.reads.indices):
            choice = _CutSearch(judge, judge.keep_all_whole(found)).choose(limit, user_cut)
        return choice


class _CutSearch:
    """Chooses the cut by what is known of each chain."""

    def __init__(self, judge: ChainJudge, found: Findings) -> None:
        self._judge = judge
        self._pipeline = judge.pipeline
        self._class_name = judge.class_name
        self._own, self._given = found

    def choose(self, limit: float, user_cut: int | None) -> CutChoice:
        """Decide, and look for the results of the chains that are cut in the sample."""
        if user_cut is not None:
            counts, given, note = self._user_cut(user_cut)
        else:
            counts, given, note = self._cheapest(limit)
        own, cuts = self._cut(counts, given)
        if user_cut is not None and (*(each.cached for each in cuts.own), cuts.given) != (*counts, given):
            raise ArgumentError(
                f"cut={user_cut} is not possible: {self._class_name}'s own chain cannot be cut there, or a "
                "live part comes before; leave out cut=, or give the chain as transform=."
            )
        self._require_batched_cached(cuts.given)
        rows = _rows(self._judge, Findings(tuple(own), self._given), cuts)
        probed = any(row.cached and row.kind == "unknown" for row in rows)
        notes = [found.note for found in own] + [note]
        return CutChoice(cuts, rows, tuple(filter(None, notes)), probed)

    def _require_batched_cached(self, given: int) -> None:
        """Refuse a ``hotset.batched`` that would be live.

        Raises:
            NotCacheable: says why it would.
        """
        steps = leaves(self._pipeline.given)
        for number, step in enumerate(steps):
            if not isinstance(step, Batched) or number < given:
                continue
            verdicts = self._given.verdicts[: number + 1]
            stay_live = ("random", "unknown") if self._judge.strict else ("random",)
            found = [verdict for verdict in verdicts if verdict.kind in stay_live]
            why = f"{self._class_name}'s own transforms, which come before it, are cut"
            if found:
                why = f"{found[0].name} is {found[0].kind} ({found[0].evidence})"
            raise NotCacheable(
                f"{step!r} must be cached, as it would get single samples at each use, but {why}. Put it "
                "before everything that is random or stays live."
            )

    def _main(self) -> int | None:
        """The number of the dataset's own chain whose transforms ``cut=`` counts."""
        names = [attribute.name for attribute in self._pipeline.attributes]
        others = [n for n, name in enumerate(names) if name not in TRANSFORM_NAMES and self._own[n].calls]
        return next((n for n, name in enumerate(names) if name in _MAIN), others[0] if others else None)

    def _all_cacheable(self) -> list[int]:
        """How many transforms of each of the dataset's own chains may be cached."""
        return [own.cacheable if own.calls else UNUSED for own in self._own]

    def _user_cut(self, user_cut: int) -> tuple[list[int], int, str]:
        """The user's cut: as :meth:`_cheapest`.

        Raises:
            ArgumentError, NotCacheable: see :func:`choose`.
        """
        counts, main = self._all_cacheable(), self._main()
        own = leaves(self._own[main].chain) if main is not None else []
        steps = [*own, *leaves(self._pipeline.given)]
        if not 0 <= user_cut <= len(steps):
            raise ArgumentError(
                f"cut= must be an int between 0 and {len(steps)}, the number of transforms "
                f"({', '.join(map(name_of, steps)) or 'there are none'}), got {user_cut!r}."
            )
        verdicts = [*(self._own[main].verdicts if main is not None else []), *self._given.verdicts]
        for verdict in verdicts[:user_cut]:
            if verdict.kind == "random":
                raise NotCacheable(
                    f"cut={user_cut} would cache {verdict.name}, which is random ({verdict.evidence}); cut "
                    "before it, or if it returns the same each time, declare it: hotset.deterministic(...)."
                )
        if main is not None:
            counts[main] = min(user_cut, len(own))
        note = f"cut after {user_cut} of {len(steps)} transforms, as cut={user_cut} says"
        return counts, max(user_cut - len(own), 0), note

    def _cheapest(self, limit: float) -> tuple[list[int], int, str]:
        """The cut that makes an epoch cheapest.

        Returns:
            How many transforms of each of the dataset's own chains to cache, and how many of ``transform=``;
            a sentence about it, or an empty one.
        """
        counts, main, given = self._all_cacheable(), self._main(), self._given.cacheable
        own = self._own[main] if main is not None and not self._own[main].whole else None
        if not given and (main is None or not counts[main]):
            return counts, 0, ""
        best, note = self._cheapest_of(own, given, limit)
        if main is None or own is None:
            return counts, best, note
        first, counts[main] = counts[main], min(best, counts[main])
        return counts, max(best - first, 0), note

    def _cheapest_of(self, own: ChainFindings | None, given: int, limit: float) -> tuple[int, str]:
        """How many transforms, of ``own`` and then of ``transform=``, to cache; and a sentence about it."""
        seconds: list[float] = []
        sizes: list[float] = [size_of(self._judge.sample)]
        steps: list[Any] = []
        if own is not None and own.split is not None:
            split = own.split
            seconds += [own.calls * each for each in split.seconds]
            sizes += [own.around + own.calls * size_of(output[0]) for output in split.outputs]
            steps += [verdict.step for verdict in split.verdicts[: split.count]]
        if given and self._given.split is not None:
            split = self._given.split
            sizes[-1] = size_of(self._given.values[0])
            seconds += split.seconds
            sizes += [size_of(output[0]) for output in split.outputs]
            steps += [verdict.step for verdict in split.verdicts[: split.count]]
        samples = len(self._pipeline.dataset)
        least = max((n for n, step in enumerate(steps, 1) if isinstance(step, Batched)), default=0)
        best = cheapest_cut(self._judge.reads.seconds, seconds, sizes, samples, limit, least)
        note = ""
        if best < len(seconds):
            fit, later = (share_that_fits(samples, sizes[cut], limit) for cut in (best, -1))
            note = (
                f"cut before {name_of(steps[best])}, although it may be cached: a sample takes "
                f"{format_bytes(sizes[best])} there and {format_bytes(sizes[-1])} at the end, so {fit:.0%} "
                f"of the samples fit instead of {later:.0%}"
            )
        return best, note

    def _cut(self, counts: list[int], given: int) -> tuple[list[ChainFindings], Cuts]:
        """Cut the chains after so many transforms, and find their results in the sample.

        A chain whose results are not there is kept whole; after one that is cut, ``transform=`` stays live.

        Returns:
            What is known of the dataset's own chains now; and the cuts.
        """
        own = list(self._own)
        cuts = [ChainCut(count, in_place=each.in_place) for count, each in zip(counts, own, strict=True)]
        cut = [n for n, each in enumerate(own) if UNUSED < counts[n] < len(leaves(each.chain))]
        if not cut:
            return own, Cuts(tuple(cuts), given)
        prefixes = [
            None if count == UNUSED or each.whole else tuple(leaves(each.chain)[:count])
            for each, count in zip(own, counts, strict=True)
        ]
        sample, recorders = self._recorded(prefixes)
        for n in cut:
            paths = None if isinstance(sample, Exception) else find_paths(sample, recorders[n])
            # Live parts run in the order of `attributes`. In another order they would draw other numbers.
            late = any(recorders[n].first_called < recorders[m].last_called for m in cut if m < n)
            as_many = paths is not None and self._gives_as_many(n, counts[n], recorders[n], len(paths))
            if paths is None or late or not as_many or own[n].whole:
                name = self._pipeline.attributes[n].name
                why = f"{self._class_name} processes the results of its {name} further"
                own[n] = self._judge.keep_whole(own[n], n, why)
                cuts[n] = ChainCut(own[n].cacheable)
            else:
                for_each = own[n].calls > 1 and bool(paths)
                cuts[n] = ChainCut(counts[n], paths, recorders[n].keywords[0], own[n].in_place, for_each)
                given = 0
        return own, Cuts(tuple(cuts), given)

    def _recorded(self, prefixes: Sequence[Sequence[Any] | None]) -> tuple[Any, list[Recorder]]:
        """The first of the samples that these parts of the chains can process, and what they did with it.

        Raises:
            Exception: what they raise, if they can process none.
        """
        error: Exception | None = None
        for index in self._judge.reads.indices:
            try:
                return recorded(self._pipeline, index, prefixes)
            except own_errors() as raised:  # training may never ask for it
                error = error or raised
        assert error is not None
        raise error

    def _gives_as_many(self, number: int, count: int, recorder: Recorder, paths: int) -> bool:
        """Whether the live part of a chain that takes several values returns as many."""
        if paths == 1 or self._own[number].calls > 1:
            return True
        keywords = recorder.keywords[0]
        values: Any = recorder.outputs[0] if keywords else Values(recorder.outputs[0])
        for step in leaves(self._own[number].chain)[count:]:
            values, _ = _tried(step, values)
        if keywords:
            return isinstance(values, dict) and values.keys() >= {*keywords}
        return isinstance(values, Values) and len(values) == paths


# ---- reporting ------------------------------------------------------------------------------------------


def _rows(judge: ChainJudge, found: Findings, cuts: Cuts) -> tuple[Row, ...]:
    known = judge.sample is not None and not isinstance(judge.sample, Exception)
    size = int(size_of(judge.sample)) if known else None
    rows = [Row(judge.class_name, "source", "the dataset", judge.reads.seconds or None, size, True)]
    deadline = time.perf_counter() + _LIVE_SECONDS
    for number in judge.order:
        rows += _rows_of(found.own[number], cuts.own[number].cached, deadline)
    return (*rows, *_rows_of(found.given, cuts.given, deadline))


def _rows_of(findings: ChainFindings, count: int, deadline: float) -> list[Row]:
    rows: list[Row] = []
    if not findings.calls:
        return rows
    value = findings.values[0] if findings.values else None
    known = findings.split.count if findings.split is not None else 0
    for number, verdict in enumerate(findings.verdicts):
        seconds: float | None = None
        output: Any = None
        if findings.split is not None and number < known:
            seconds, output = findings.split.seconds[number], findings.split.outputs[number][0]
        elif value is not None and (number == known or time.perf_counter() < deadline):
            output, seconds = _tried(verdict.step, value)
        size = None if output is None else int(findings.around + size_of(output))
        rows.append(Row(verdict.name, verdict.kind, verdict.evidence, seconds, size, number < count))
        value = output
    return rows


def _tried(step: Callable[..., Any], value: Any) -> tuple[Any, float | None]:
    """A live transform's output for a value, and its time; (None, None) if it raises."""
    try:
        return output_and_seconds(step, value)
    except own_errors():
        return None, None
