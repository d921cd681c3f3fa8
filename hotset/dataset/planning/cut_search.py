"""The search for the cut: how far into its chains a dataset is cached, decided on a few of its samples.

Each of a dataset's own chains is judged by :func:`hotset.split` on the values that it is really called with:
samples are read with recorders in place of the chains. A chain stays whole, and is cached if all of it may
be, where the dataset calls it with keywords (if it is not albumentations'), processes its results further,
accepts no recorder in its place, or may call it again or go on without it
(:mod:`hotset.dataset.planning.call_sites`). A chain given as ``transform=`` is judged on whole samples, if
nothing before it is live.

The cut is the last one that is allowed, unless an earlier one is clearly cheaper with the memory there is
(:mod:`hotset.policy.cut_point`), or the user gave ``cut=``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset._warnings import printable
from hotset.dataset.chain_calls import SamplePath
from hotset.dataset.pipeline import UNUSED, Chain, ChainCut, Cuts, Pipeline
from hotset.dataset.plan import Row
from hotset.dataset.planning.call_sites import reaction
from hotset.dataset.planning.cut_check import differs_when_cut
from hotset.dataset.planning.recorder import (
    RecordedSamples,
    Recorder,
    find_paths,
    passes_shared_objects,
    recorded,
)
from hotset.dataset.transform_attributes import TRANSFORM_NAMES, with_transforms
from hotset.determinism.batch_transform import BatchTransform
from hotset.determinism.batch_trial import mixed_rows, try_together
from hotset.determinism.batched import Batched
from hotset.determinism.chain import Values, leaves
from hotset.determinism.declare import declared
from hotset.determinism.draws.rng import Generators
from hotset.determinism.split import Split, split
from hotset.determinism.trial import alters_input, output_and_seconds
from hotset.determinism.verdict import Verdict, name_of, verdict_of
from hotset.errors import ArgumentError, NotCacheable
from hotset.policy.cut_point import cheapest_cut
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
    generators = Generators([pipeline.dataset, pipeline.given])
    try:
        found = _CutSearch(pipeline, strict)
        found.judge()
        choice = found.choose(limit, user_cut)
        if differs_when_cut(pipeline, choice.cuts, found.indices):
            found.keep_all_whole()
            choice = found.choose(limit, user_cut)
        return choice
    finally:
        generators.restore()


class _ChainFindings(NamedTuple):
    """What is known of one chain.

    Attributes:
        chain: the chain.
        split: how it was judged; None if it was not called, or a transform before it is live.
        values: what it was called with.
        around: bytes of the sample without these values.
        whole: whether it cannot be cut.
        in_place: whether its cacheable part changes its input.
        calls: how often it is called for a sample, each time with one value if that is more than once.
    """

    chain: Any
    split: Split | None = None
    values: Sequence[Any] = ()
    around: float = 0.0
    whole: bool = False
    in_place: bool = False
    calls: int = 1

    @property
    def cacheable(self) -> int:
        """How many of its transforms may be cached."""
        if self.whole:
            return len(leaves(self.chain))
        return self.split.count if self.split is not None else 0

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """The verdicts on its transforms, from a trial or without one."""
        if self.split is not None:
            return self.split.verdicts
        return [verdict_of(step) for step in leaves(self.chain)]


class _CutSearch:
    """Collects findings about each chain, then chooses the cut."""

    def __init__(self, pipeline: Pipeline, strict: bool) -> None:
        self._pipeline = pipeline
        self._strict = strict
        self.notes: list[str] = []
        self._own: list[_ChainFindings] = []
        self._given = _ChainFindings(pipeline.given)
        self._reads = RecordedSamples(pipeline)

    @property
    def _class_name(self) -> str:
        return type(self._pipeline.dataset).__name__

    @property
    def _sample(self) -> Any:
        """The first sample that was read, or the exception in its place; None if none was read."""
        return self._reads.samples[0] if self._reads.samples else None

    @property
    def indices(self) -> list[int]:
        """Of the samples that were read."""
        return self._reads.indices

    # ---- judging -------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Judge all chains, in the order in which they are applied."""
        for number in range(len(self._pipeline.attributes)):
            self._own.append(self._judge_own(number))
        self._judge_given()

    def keep_all_whole(self) -> None:
        """Keep all of the dataset's own chains whole, as samples differ when they are cut.

        Raises:
            NotCacheable: see :meth:`_keep_whole`.
        """
        for number, own in enumerate(self._own):
            if own.calls and not own.whole:
                why = (
                    f"{self._class_name} gives other samples if its {self._pipeline.attributes[number].name} "
                    "runs after the rest of the reading (it draws numbers itself, sets a seed for it, puts a "
                    "generator back, or looks at what it returns)"
                )
                self._own[number] = self._keep_whole(own, number, why, leaves(own.chain), own.values)
        self._judge_given()

    def _judge_own(self, number: int) -> _ChainFindings:
        """Judge one of the dataset's own chains, and find out whether it can be cut."""
        name, chain = self._pipeline.attributes[number]
        unknown = _ChainFindings(chain)
        if self._reads.refusal is not None:
            why = f"{self._class_name} accepts nothing in place of its {name} ({self._reads.refusal})"
            return self._keep_whole(unknown, number, why, (), ())
        recorders = [recorders[number] for recorders in self._reads.recorders]
        try:
            return self._judge_called(number, recorders)
        except Exception as error:
            if isinstance(error, NotCacheable) or not self._reads_any():
                raise
            what = f"{type(error).__name__} ({printable(str(error))})"
            why = f"{self._class_name} catches what its {name} raises, {what}"
            return self._keep_whole(unknown, number, why, (), ())

    def _reads_any(self) -> bool:
        """Whether the dataset itself can read one of the samples."""
        for index in self._reads.indices:
            with contextlib.suppress(Exception):
                self._pipeline.dataset[index]
                return True
        return False

    def _judge_called(self, number: int, recorders: Sequence[Recorder]) -> _ChainFindings:
        """Judge one of the dataset's own chains by what it is called with.

        Raises:
            Exception: what the chain raises on all values.
        """
        name, chain = self._pipeline.attributes[number]
        unknown = _ChainFindings(chain)
        values = [value for recorder in recorders for value in recorder.inputs]
        irregular = any(recorder.irregular for recorder in recorders)
        if name not in TRANSFORM_NAMES and not values and not irregular:
            return unknown._replace(whole=True, calls=0)
        if self._is_called_for_each(number):
            first = recorders[0].inputs
            findings = _ChainFindings(chain, self._split(chain, values), values, calls=len(first))
            return self._whole_if_used(self._measured(findings, first), number)
        if irregular:
            why = f"{self._class_name} calls its {name} with keywords"
            calls = [each for recorder in recorders for each in recorder.refused]
            return self._keep_whole(unknown, number, why, [lambda keywords: chain(**keywords)], calls)
        # A chain that cannot be cut is tried as well: if it is random, it must not be cached as a whole.
        findings = _ChainFindings(chain, self._split(chain, values), values) if values else unknown
        times = {len(recorder.inputs) for recorder in recorders}
        why = ""
        if not values:
            why = f"{self._class_name} does not call its {name}"
        elif len(times) > 1:
            why = f"{self._class_name} calls its {name} more often for some samples than for others"
        elif (
            times != {1}
            or isinstance(self._sample, Exception)
            or find_paths(self._sample, recorders[0]) is None
        ):
            why = (
                f"{self._class_name} processes the results of its {name} further, or gives it several values"
            )
        if why:
            return self._keep_whole(findings, number, why, leaves(chain), values)
        return self._whole_if_used(self._measured(findings, values[:1]), number)

    def _whole_if_used(self, findings: _ChainFindings, number: int) -> _ChainFindings:
        """Keep a chain whole that the dataset's code may call again, or go on without, if only rarely.

        Raises:
            NotCacheable: see :meth:`_keep_whole`.
        """
        name, chain = self._pipeline.attributes[number]
        sites = dict.fromkeys(site for each in self._reads.recorders for site in each[number].callers)
        found = next(filter(None, (reaction(site, name) for site in sites)), None)
        if found is None:
            return findings
        if findings.cacheable == len(leaves(chain)):
            return findings._replace(whole=True)
        return self._keep_whole(
            findings, number, f"{self._class_name} {found}", leaves(chain), findings.values
        )

    def _measured(self, findings: _ChainFindings, first: Sequence[Any]) -> _ChainFindings:
        """Findings on a chain that can be cut, with what the first sample shows.

        Args:
            findings: the chain's.
            first: what the chain was called with for the first sample.
        """
        around = _size_of(self._sample) - sum(map(_size_of, first))
        steps = leaves(findings.chain)[: findings.cacheable]
        in_place = any(alters_input(steps, value) for value in findings.values)
        return findings._replace(around=around, in_place=in_place)

    def _is_called_for_each(self, number: int) -> bool:
        """Whether a chain is called for several values, one by one, in the same way for each sample."""
        found = set()
        for sample, recorders in zip(self._reads.samples, self._reads.recorders, strict=True):
            recorder = recorders[number]
            alone = not any(isinstance(value, Values) for value in recorder.inputs)
            known = alone and not isinstance(sample, Exception)
            found.add(find_paths(sample, recorder) if known and len(recorder.inputs) > 1 else None)
        return len(found) == 1 and None not in found

    def _judge_given(self) -> None:
        """Split the chain given as ``transform=``, if everything before it may be cached."""
        if not self._pipeline.given:
            return
        if any(own.cacheable < len(leaves(own.chain)) for own in self._own):
            return
        samples = self._samples()
        found = self._split(self._pipeline.given, samples)
        first = leaves(self._pipeline.given)[0]
        if found.count and isinstance(first, BatchTransform) and declared(first) != "deterministic":
            why = mixed_rows(first, samples, found.outputs[0])
            if why is not None:
                verdict = replace(found.verdicts[0], kind="random", evidence=why)
                verdicts = (verdict, *found.verdicts[1:])
                found = Split((), self._pipeline.given, verdicts, 0, (), ())
        try_together(leaves(self._pipeline.given), samples, found.outputs)
        self._given = _ChainFindings(self._pipeline.given, found, samples)

    def _samples(self) -> list[Any]:
        """The samples as the dataset returns them with its own chains, without those that it cannot read.

        Raises:
            Exception: what the dataset raises, if it can read none.
        """
        samples: list[Any] = []
        error: Exception | None = None
        chains = zip(self._pipeline.attributes, self._own, strict=True)
        copying = {
            attribute.name: Chain(leaves(attribute.chain), copies=True)
            for attribute, own in chains
            if own.in_place
        }
        dataset = with_transforms(self._pipeline.dataset, copying)
        for index in self._reads.indices:
            try:
                samples.append(dataset[index])
            except Exception as raised:
                error = error or raised
        if not samples:
            assert error is not None
            raise error
        return samples

    def _keep_whole(
        self, findings: _ChainFindings, number: int, why: str, steps: Sequence[Any], values: Sequence[Any]
    ) -> _ChainFindings:
        """Keep a chain whole that cannot be cut: it is cached as a whole or not at all.

        Such a chain gets no copies: a dataset that ignores its result expects it to work in place.

        Args:
            findings: what is known of it.
            number: its place among the dataset's own chains.
            why: a phrase: why it cannot be cut.
            steps: its transforms, as they take ``values``.
            values: what they were called with.

        Raises:
            NotCacheable: it has a transform that is known to be random, or changes what the dataset holds.
        """
        for verdict in findings.verdicts:
            if verdict.kind == "random" and declared(self._pipeline.dataset) != "deterministic":
                raise NotCacheable(
                    f"{verdict.name} is random ({verdict.evidence}), and {why}, so the chain cannot be cut "
                    "before it, and one draw would be cached; give the chain as transform=[...] to "
                    "hotset.cache instead, with what the dataset does around it."
                )
        if any(alters_input(steps, value) for value in values) and any(
            passes_shared_objects(self._pipeline, index)[number] for index in self._reads.indices
        ):
            name = self._pipeline.attributes[number].name
            raise NotCacheable(
                f"{name} of {self._class_name} changes in place what the dataset holds, so samples change "
                f"with each reading, and {why}, so it cannot get copies; give the chain as transform=[...] "
                "to hotset.cache instead, or have it work on a copy."
            )
        self.notes.append(f"{why}, so the chain cannot be cut; to have it cut, give it as transform=")
        return findings._replace(whole=True, in_place=False)

    def _split(self, chain: Any, values: list[Any]) -> Split:
        try:
            return split(chain, values, self._strict)
        except Exception as error:
            # One sample may be unreadable, and may never be asked for.
            for value in values:
                try:
                    return split(chain, [value], self._strict)
                except Exception:
                    continue
            raise error

    # ---- choosing ------------------------------------------------------------------------------------

    def choose(self, limit: float, user_cut: int | None) -> CutChoice:
        """Decide, and look for the results of the chains that are cut in the sample."""
        counts = [own.cacheable if own.calls else UNUSED for own in self._own]
        given = self._given.cacheable
        main = self._main()
        cuttable = main is not None and not self._own[main].whole
        first = counts[main] if main is not None else 0
        if user_cut is not None:
            counts, given = self._apply_user_cut(user_cut, counts, main)
        elif first + given:
            best = self._cheapest(self._own[main] if main is not None and cuttable else None, given, limit)
            if main is not None and cuttable and best < first:
                counts[main], given = best, 0
            else:
                given = best - (first if cuttable else 0)
        intended = (*counts, given)
        paths, keywords, given = self._result_paths(counts, given)
        if user_cut is not None and (*counts, given) != intended:
            raise ArgumentError(
                f"cut={user_cut} is not possible: {self._class_name}'s own chain cannot be cut there, or a "
                "live part comes before; leave out cut=, or give the chain as transform=."
            )
        self._require_batched_cached(given)
        own = (
            ChainCut(count, where, names, found.in_place, found.calls > 1 and bool(where))
            for count, where, names, found in zip(counts, paths, keywords, self._own, strict=True)
        )
        cuts = Cuts(tuple(own), given)
        rows = self._rows(cuts)
        probed = any(row.cached and row.kind == "unknown" for row in rows)
        return CutChoice(cuts, rows, tuple(self.notes), probed)

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
            found = [v for v in verdicts if v.kind == "random" or (self._strict and v.kind == "unknown")]
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

    def _apply_user_cut(self, user_cut: int, counts: list[int], main: int | None) -> tuple[list[int], int]:
        """Take the user's cut.

        Raises:
            ArgumentError, NotCacheable: see :func:`choose`.
        """
        own = leaves(self._own[main].chain) if main is not None else []
        steps = [*own, *leaves(self._pipeline.given)]
        if isinstance(user_cut, bool) or not isinstance(user_cut, int) or not 0 <= user_cut <= len(steps):
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
        self.notes.append(f"cut after {user_cut} of {len(steps)} transforms, as cut={user_cut} says")
        if main is not None:
            counts[main] = min(user_cut, len(own))
        return counts, max(user_cut - len(own), 0)

    def _cheapest(self, own: _ChainFindings | None, given: int, limit: float) -> int:
        """How many transforms, the main chain's and then those of ``transform=``, to cache."""
        seconds: list[float] = []
        sizes: list[float] = [_size_of(self._sample)]
        steps: list[Any] = []
        if own is not None and own.split is not None:
            split = own.split
            seconds += [own.calls * each for each in split.seconds]
            sizes += [own.around + own.calls * _size_of(output[0]) for output in split.outputs]
            steps += [verdict.step for verdict in split.verdicts[: split.count]]
        if given and self._given.split is not None:
            split = self._given.split
            sizes[-1] = _size_of(self._given.values[0])
            seconds += split.seconds
            sizes += [_size_of(output[0]) for output in split.outputs]
            steps += [verdict.step for verdict in split.verdicts[: split.count]]
        samples = len(self._pipeline.dataset)
        least = max((n for n, step in enumerate(steps, 1) if isinstance(step, Batched)), default=0)
        best = cheapest_cut(self._reads.seconds, seconds, sizes, samples, limit, least)
        if best < len(seconds):
            fit, later = (min(1.0, limit / (samples * sizes[cut])) for cut in (best, -1))
            self.notes.append(
                f"cut before {name_of(steps[best])}, although it may be cached: a sample takes "
                f"{format_bytes(sizes[best])} there and {format_bytes(sizes[-1])} at the end, so {fit:.0%} "
                f"of the samples fit instead of {later:.0%}"
            )
        return best

    def _result_paths(
        self, counts: list[int], given: int
    ) -> tuple[tuple[tuple[SamplePath, ...], ...], tuple[tuple[str, ...], ...], int]:
        """Where the results of the cut chains are in the sample; a chain without such paths stays whole.

        Returns:
            For each chain these paths, and the names with which it gets the values there; how many leaves of
            ``transform=`` may still be cached.
        """
        prefixes = [
            None if count == UNUSED else () if own.whole else tuple(leaves(own.chain)[:count])
            for own, count in zip(self._own, counts, strict=True)
        ]
        paths: list[tuple[SamplePath, ...]] = [()] * len(counts)
        keywords: list[tuple[str, ...]] = [()] * len(counts)
        cut = [n for n, own in enumerate(self._own) if UNUSED < counts[n] < len(leaves(own.chain))]
        if cut:
            sample, recorders = recorded(self._pipeline, self._reads.indices[0], prefixes)
            for n in cut:
                found = None if isinstance(sample, Exception) else find_paths(sample, recorders[n])
                # Live parts run in the order of `attributes`. In another order they would draw other numbers.
                late = any(recorders[n].first_called < recorders[m].last_called for m in cut if m < n)
                as_many = found is not None and self._gives_as_many(n, counts[n], recorders[n], len(found))
                if found is None or late or not as_many or self._own[n].whole:
                    name = self._pipeline.attributes[n].name
                    why = f"{self._class_name} processes the results of its {name} further"
                    steps = leaves(self._own[n].chain)
                    self._own[n] = self._keep_whole(self._own[n], n, why, steps, self._own[n].values)
                    counts[n] = self._own[n].cacheable
                else:
                    paths[n], keywords[n] = found, recorders[n].keywords[0]
                    given = 0
        return tuple(paths), tuple(keywords), given

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

    # ---- reporting -------------------------------------------------------------------------------------

    def _rows(self, cuts: Cuts) -> tuple[Row, ...]:
        known = self._sample is not None and not isinstance(self._sample, Exception)
        size = int(_size_of(self._sample)) if known else None
        rows = [Row(self._class_name, "source", "the dataset", self._reads.seconds or None, size, True)]
        deadline = time.perf_counter() + _LIVE_SECONDS
        for findings, own in zip(self._own, cuts.own, strict=True):
            rows += self._rows_of(findings, own.cached, deadline)
        rows += self._rows_of(self._given, cuts.given, deadline)
        return tuple(rows)

    def _rows_of(self, findings: _ChainFindings, count: int, deadline: float) -> list[Row]:
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
            size = None if output is None else int(findings.around + _size_of(output))
            rows.append(Row(verdict.name, verdict.kind, verdict.evidence, seconds, size, number < count))
            value = output
        return rows


# ---- measuring ------------------------------------------------------------------------------------------


def _tried(step: Callable[..., Any], value: Any) -> tuple[Any, float | None]:
    """A live transform's output for a value, and its time; (None, None) if it raises."""
    try:
        return output_and_seconds(step, value)
    except Exception:
        return None, None


def _size_of(value: Any) -> float:
    """About how many bytes a value takes when it is stored."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size_of, value))
    if hasattr(value, "getbands") and hasattr(value, "size"):  # a PIL image
        width, height = value.size
        deep = {"1": 1, "I": 4, "F": 4, "I;16": 2}.get(value.mode, len(value.getbands()))
        return float(width * height * deep)
    return 8
