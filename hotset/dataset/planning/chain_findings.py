"""What is known of each chain of a dataset: which of its transforms may be cached, and whether it can be cut.

Each of a dataset's own chains is judged by :func:`hotset.split` on the values that it is really called with:
samples are read with recorders in place of the chains, and with those chains that stay whole where they are
called before it. A chain stays whole, and is cached if all of it may
be, where the dataset calls it with keywords (if it is not albumentations'), processes its results further,
accepts no recorder in its place, or may call it again or go on without it
(:mod:`hotset.dataset.planning.call_sites`). A chain given as ``transform=`` is judged on whole samples, if
nothing before it is live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset._interrupts import own_errors
from hotset._warnings import printable
from hotset.dataset.pipeline import Chain, Pipeline
from hotset.dataset.planning.call_sites import reaction
from hotset.dataset.planning.recorder import RecordedSamples, Recorder, find_paths, passes_shared_objects
from hotset.dataset.planning.source_judgement import DECODED_ALONE
from hotset.dataset.transform_attributes import TRANSFORM_NAMES, with_transforms
from hotset.determinism.batch_transform import BatchTransform
from hotset.determinism.batch_trial import mixed_rows, try_together
from hotset.determinism.chain import Values, is_list, leaves
from hotset.determinism.declare import declared
from hotset.determinism.split import Split, split
from hotset.determinism.trial import alters_input
from hotset.determinism.verdict import Verdict, verdict_of
from hotset.errors import NotCacheable
from hotset.store.leaves.instances import plain_attributes
from hotset.store.leaves.sparse_tensors import sparse_parts

__all__ = ["ChainFindings", "ChainJudge", "Findings", "size_of"]

_DEEPEST = 20  # an object may refer to itself


class ChainFindings(NamedTuple):
    """What is known of one chain.

    Attributes:
        chain: the chain.
        split: how it was judged; None if it was not called, or a transform before it is live.
        values: what it was called with.
        around: bytes of the sample without these values.
        whole: whether it cannot be cut.
        in_place: whether its cacheable part changes its input.
        calls: how often it is called for a sample, each time with one value if that is more than once.
        note: why it cannot be cut, as a sentence; empty if it can, or where no note was taken.
    """

    chain: Any
    split: Split | None = None
    values: Sequence[Any] = ()
    around: float = 0.0
    whole: bool = False
    in_place: bool = False
    calls: int = 1
    note: str = ""

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


class Findings(NamedTuple):
    """What is known of all chains.

    Attributes:
        own: of the dataset's own chains.
        given: of the chain given as ``transform=``.
    """

    own: tuple[ChainFindings, ...]
    given: ChainFindings


class ChainJudge:
    """Reads a few samples, and judges the chains by what they were called with for these.

    Attributes:
        pipeline: the dataset and its chains.
        strict: whether what only a trial shows to be deterministic stays live.
        class_name: the dataset's, for messages.
        reads: the samples that were read, with what their chains were called with.
        order: the numbers of the dataset's own chains, in the order in which it calls them.
    """

    def __init__(self, pipeline: Pipeline, strict: bool) -> None:
        self.pipeline = pipeline
        self.strict = strict
        self.class_name = type(pipeline.dataset).__name__
        self.reads = RecordedSamples(pipeline)
        self._left: set[int] = set()  # chains that stay whole, and in their place while the others are judged
        recorders = self.reads.recorders[0] if self.reads.recorders else []
        called = {number: recorder.first_called for number, recorder in enumerate(recorders)}
        self.order = sorted(
            range(len(pipeline.attributes)), key=lambda number: called.get(number) or math.inf
        )

    @property
    def sample(self) -> Any:
        """The first sample that was read, or the exception in its place; None if none was read."""
        return self.reads.samples[0] if self.reads.samples else None

    def judge(self) -> Findings:
        """Judge all chains, in the order in which they are applied.

        Raises:
            NotCacheable: see :meth:`keep_whole`.
            Exception: what the dataset or a transform raises on all samples.
        """
        found: dict[int, ChainFindings] = {}
        for number in self.order:
            found[number] = self._judge_own(number)
            if found[number].whole and found[number].calls and len(found) < len(self.order):
                self._leave(number)
        own = tuple(found[number] for number in range(len(found)))
        return Findings(own, self._judge_given(own))

    def _leave(self, number: int) -> None:
        """Read samples with this chain in its place: the others may be called with what it returns."""
        if self.reads.refusal is None:
            self._left.add(number)
            self.reads = RecordedSamples(self.pipeline, self._left)

    def keep_all_whole(self, found: Findings) -> Findings:
        """Keep all of the dataset's own chains whole, as samples differ when they are cut.

        Raises:
            NotCacheable: see :meth:`keep_whole`.
        """
        kept = []
        for number, own in enumerate(found.own):
            name, chain = self.pipeline.attributes[number]
            in_turn = "does not apply its list in turn, " if is_list(chain) else ""
            why = (
                f"{self.class_name} gives other samples if its {name} runs after the rest of the reading (it "
                f"{in_turn}draws numbers itself, sets a seed for it, puts a generator back, or looks at what "
                "it returns)"
            )
            can_be_cut = own.calls and not own.whole
            kept.append(self.keep_whole(own, number, why) if can_be_cut else own)
        return Findings(tuple(kept), self._judge_given(kept))

    def _judge_own(self, number: int) -> ChainFindings:
        """Judge one of the dataset's own chains, and find out whether it can be cut."""
        name, chain = self.pipeline.attributes[number]
        unknown = ChainFindings(chain)
        if self.reads.refusal is not None:
            why = f"{self.class_name} accepts nothing in place of its {name} ({self.reads.refusal})"
            return self.keep_whole(unknown, number, why)
        recorders = [recorders[number] for recorders in self.reads.recorders]
        try:
            return self._judge_called(number, recorders)
        except own_errors() as error:
            if isinstance(error, NotCacheable) or not self._reads_any():
                raise
            what = f"{type(error).__name__} ({printable(str(error))})"
            why = f"{self.class_name} catches what its {name} raises, {what}"
            return self.keep_whole(unknown, number, why)

    def _reads_any(self) -> bool:
        """Whether the dataset itself can read one of the samples."""
        for index in self.reads.indices:
            try:
                self.pipeline.dataset[index]
            except own_errors():
                continue
            return True
        return False

    def _judge_called(self, number: int, recorders: Sequence[Recorder]) -> ChainFindings:
        """Judge one of the dataset's own chains by what it is called with.

        Raises:
            Exception: what the chain raises on all values.
        """
        name, chain = self.pipeline.attributes[number]
        unknown = ChainFindings(chain)
        values = [value for recorder in recorders for value in recorder.inputs]
        refused = [named for recorder in recorders for named in recorder.refused]
        if any(recorder.given_dataset for recorder in recorders):
            return self.keep_whole(unknown, number, f"{self.class_name} gives its {name} the dataset itself")
        if name not in TRANSFORM_NAMES and not values and not refused:
            return unknown._replace(whole=True, calls=0)
        if refused:
            why = f"{self.class_name} calls its {name} with keywords"
            return self.keep_whole(unknown, number, why, [lambda keywords: chain(**keywords)], refused)
        # A chain that cannot be cut is tried as well: if it is random, it must not be cached as a whole.
        findings = ChainFindings(chain, self._split(chain, values), values) if values else unknown
        why = self._why_not_cut(number, recorders)
        if why:
            return self.keep_whole(findings, number, f"{self.class_name} {why}")
        first = recorders[0].inputs
        return self._whole_if_used(self._measured(findings._replace(calls=len(first)), first), number)

    def _why_not_cut(self, number: int, recorders: Sequence[Recorder]) -> str:
        """What the dataset does with a chain so that it cannot be cut; empty if it can."""
        name = self.pipeline.attributes[number].name
        times = {len(recorder.inputs) for recorder in recorders}
        if times == {0}:
            return f"does not call its {name}"
        if self._is_called_for_each(number):
            return ""
        if len(times) > 1:
            return f"calls its {name} more often for some samples than for others"
        is_read = not isinstance(self.sample, Exception)
        if times == {1} and is_read and find_paths(self.sample, recorders[0]) is not None:
            return ""
        return f"processes the results of its {name} further, or gives it several values"

    def _whole_if_used(self, findings: ChainFindings, number: int) -> ChainFindings:
        """Keep a chain whole that the dataset's code may call again, or go on without, if only rarely.

        Raises:
            NotCacheable: see :meth:`keep_whole`.
        """
        name, chain = self.pipeline.attributes[number]
        sites = dict.fromkeys(site for each in self.reads.recorders for site in each[number].callers)
        found = next(filter(None, (reaction(site, name) for site in sites)), None)
        if found is None:
            return findings
        if findings.cacheable == len(leaves(chain)):
            return findings._replace(whole=True)
        return self.keep_whole(findings, number, f"{self.class_name} {found}")

    def _measured(self, findings: ChainFindings, first: Sequence[Any]) -> ChainFindings:
        """Findings on a chain that can be cut, with what the first sample shows.

        Args:
            findings: the chain's.
            first: what the chain was called with for the first sample.
        """
        around = size_of(self.sample) - sum(map(size_of, first))
        steps = leaves(findings.chain)[: findings.cacheable]
        in_place = alters_input(steps, findings.values)
        return findings._replace(around=around, in_place=in_place)

    def _is_called_for_each(self, number: int) -> bool:
        """Whether a chain is called for several values, one by one, in the same way for each sample."""
        found = set()
        for sample, recorders in zip(self.reads.samples, self.reads.recorders, strict=True):
            recorder = recorders[number]
            alone = not any(isinstance(value, Values) for value in recorder.inputs)
            known = alone and not isinstance(sample, Exception)
            found.add(find_paths(sample, recorder) if known and len(recorder.inputs) > 1 else None)
        return len(found) == 1 and None not in found

    def _judge_given(self, own: Sequence[ChainFindings]) -> ChainFindings:
        """Split the chain given as ``transform=``, if all of the chains before it may be cached."""
        given = self.pipeline.given
        if not given or any(each.cacheable < len(leaves(each.chain)) for each in own):
            return ChainFindings(given)
        samples = self._samples(own)
        found = self._split(given, samples)
        first = leaves(given)[0]
        if found.count and isinstance(first, BatchTransform) and declared(first) != "deterministic":
            why = mixed_rows(first, samples, found.outputs[0])
            if why is not None:
                verdict = replace(found.verdicts[0], kind="random", evidence=why)
                verdicts = (verdict, *found.verdicts[1:])
                found = Split((), given, verdicts, 0, (), ())
        try_together(leaves(given), samples, found.outputs)
        return ChainFindings(given, found, samples)

    def keep_whole(
        self,
        findings: ChainFindings,
        number: int,
        why: str,
        steps: Sequence[Any] | None = None,
        values: Sequence[Any] | None = None,
    ) -> ChainFindings:
        """Keep a chain whole that cannot be cut: it is cached as a whole or not at all.

        Such a chain gets no copies: a dataset that ignores its result expects it to work in place.

        Args:
            findings: what is known of it.
            number: its place among the dataset's own chains.
            why: a phrase: why it cannot be cut.
            steps: its transforms, as they take ``values``; None: those of its chain.
            values: what they were called with; None: what is known of it.

        Raises:
            NotCacheable: it has a transform that is known to be random, or changes what the dataset holds.
        """
        steps = leaves(findings.chain) if steps is None else steps
        values = findings.values if values is None else values
        for verdict in findings.verdicts:
            if verdict.kind == "random" and declared(self.pipeline.dataset) != "deterministic":
                raise NotCacheable(
                    f"{verdict.name} is random ({verdict.evidence}), and {why}, so the chain cannot be cut "
                    "before it, and one draw would be cached; give the chain as transform=[...] to "
                    f"hotset.cache instead, with what the dataset does around it; or {DECODED_ALONE}."
                )
        if alters_input(steps, values) and any(
            passes_shared_objects(self.pipeline, index, self._left)[number] for index in self.reads.indices
        ):
            name = self.pipeline.attributes[number].name
            raise NotCacheable(
                f"{name} of {self.class_name} changes in place what the dataset holds, so samples change "
                f"with each reading, and {why}, so it cannot get copies; give the chain as transform=[...] "
                "to hotset.cache instead, or have it work on a copy."
            )
        note = f"{why}, so the chain cannot be cut; to have it cut, give it as transform="
        return findings._replace(whole=True, in_place=False, note=note)

    def _split(self, chain: Any, values: list[Any]) -> Split:
        try:
            return split(chain, values, self.strict)
        except own_errors() as error:
            # One sample may be unreadable, and may never be asked for.
            for value in values:
                try:
                    return split(chain, [value], self.strict)
                except own_errors():
                    continue
            raise error

    def _samples(self, own: Sequence[ChainFindings]) -> list[Any]:
        """The samples as the dataset returns them with its own chains, without those that it cannot read.

        Raises:
            Exception: what the dataset raises, if it can read none.
        """
        samples: list[Any] = []
        error: Exception | None = None
        copying = {
            attribute.name: Chain(leaves(attribute.chain), copies=True)
            for attribute, found in zip(self.pipeline.attributes, own, strict=True)
            if found.in_place
        }
        dataset = with_transforms(self.pipeline.dataset, copying)
        for index in self.reads.indices:
            try:
                samples.append(dataset[index])
            except own_errors() as raised:
                error = error or raised
        if not samples:
            assert error is not None
            raise error
        return samples


def size_of(value: Any, depth: int = 0) -> float:
    """About how many bytes a value takes when it is stored; ``depth``: of it in what is asked for."""
    if depth > _DEEPEST:
        return 8
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return size_of(sparse_parts(value), depth)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(size_of(part, depth + 1) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(size_of(part, depth + 1) for part in value)
    if hasattr(value, "getbands") and hasattr(value, "size"):  # a PIL image
        width, height = value.size
        deep = {"1": 1, "I": 4, "F": 4, "I;16": 2}.get(value.mode, len(value.getbands()))
        return float(width * height * deep)
    held = plain_attributes(value)  # of a sample of a class of the user's
    return 8 if held is None else size_of(held, depth)
