"""The choice: how far into its chains a data set is cached, found out on a few of its samples.

Each of a data set's own chains is judged by :func:`hotset.split` on what really arrives at it: samples are
read with recorders in the chains' places. Where they are called otherwise than with values, or the data set
goes on working on what they return, a chain stays whole, and is cached if all of it may be. A chain given as
``transform=`` is judged on whole samples, if nothing before it is live.

Within what may be cached, the cut is the last possible one, unless an earlier one is clearly cheaper under
the memory there is (:mod:`hotset.policy.cut_point`), or the user has said ``cut=``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset.dataset.pipeline import (
    Chain,
    Cuts,
    Pipeline,
    Recorder,
    SamplePath,
    find_paths,
    gives_its_own,
    recorded,
)
from hotset.dataset.transform_attributes import with_transforms
from hotset.determinism.chain import Values, leaves
from hotset.determinism.declare import declared
from hotset.determinism.rng import Generators
from hotset.determinism.split import Split, split
from hotset.determinism.trial import alters, once, typical
from hotset.determinism.verdict import Verdict, name_of, verdict_of
from hotset.errors import ArgumentError, NotCacheable
from hotset.policy.cut_point import cheapest_cut
from hotset.units import format_bytes

__all__ = ["CutChoice", "Row", "choose"]

_SAMPLES = 4
_READ_SECONDS = 0.25
_LIVE_SECONDS = 0.5
# Of the chains that a data set holds, the one whose transforms are counted by `cut=`.
_MAIN = ("transform", "transforms")


class Row(NamedTuple):
    """A line of the plan: a transform, or the data set itself.

    Attributes:
        name: of the transform.
        kind: ``"deterministic"``, ``"random"``, ``"unknown"``; ``"source"`` for the data set.
        evidence: how that is known.
        seconds: that it takes for a sample; None if it was not run.
        bytes: of a sample after it; None if it was not run.
        cached: whether it runs once a sample, before the cut.
    """

    name: str
    kind: str
    evidence: str
    seconds: float | None
    bytes: int | None
    cached: bool


@dataclass(frozen=True)
class CutChoice:
    """Where the chains are cut.

    Attributes:
        cuts: for :meth:`Pipeline.cut`.
        rows: for the plan: the data set, then its transforms in the order in which they are applied.
        notes: sentences about how this was decided.
        probed: whether something is cached of which nothing is known but that it behaved in its trial.
    """

    cuts: Cuts
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    probed: bool


def choose(uncut: Pipeline, limit: float, strict: bool, wanted: int | None) -> CutChoice:
    """Find where to cut.

    Args:
        uncut: the data set and its chains.
        limit: bytes that the cache may take.
        strict: leave live what is only known by its trial.
        wanted: the user's ``cut=``: how many transforms, the data set's own first, are to be cached.

    Raises:
        NotCacheable: a random transform can neither be cut off nor cached, or ``wanted`` goes beyond one.
        ArgumentError: ``wanted`` is no number of transforms.
        Exception: what the data set or a transform raises on all samples.
    """
    # The source may draw, if that is declared; who builds a cache draws what he would have drawn without.
    generators = Generators([uncut.dataset, uncut.given])
    try:
        found = _Finder(uncut, strict)
        for number in range(len(uncut.sites)):
            found.judge_own(number)
        found.judge_given()
        return found.choose(limit, wanted)
    finally:
        generators.restore()


class _Named:
    """A chain that is called with keywords, as one that takes a dict of them."""

    def __init__(self, chain: Any) -> None:
        self._chain = chain

    def __call__(self, named: dict[str, Any]) -> Any:
        return self._chain(**named)


class _Looked(NamedTuple):
    """What is known of one chain.

    Attributes:
        chain: it.
        split: how it was judged; None if nothing is known to arrive at it, or something before it is live.
        values: what arrived at it.
        around: bytes of the sample without that.
        whole: whether it cannot be cut.
        in_place: whether what may be cached of it changes what it is given.
    """

    chain: Any
    split: Split | None = None
    values: Sequence[Any] = ()
    around: float = 0.0
    whole: bool = False
    in_place: bool = False

    @property
    def cacheable(self) -> int:
        """How many of its transforms may be cached."""
        if self.whole:
            return len(leaves(self.chain))
        return self.split.count if self.split is not None else 0

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """What is known of its transforms, with a trial or without."""
        if self.split is not None:
            return self.split.verdicts
        return [verdict_of(step) for step in leaves(self.chain)]


class _Finder:
    """Gathers what is known about each chain, then chooses."""

    def __init__(self, uncut: Pipeline, strict: bool) -> None:
        self._uncut = uncut
        self._strict = strict
        self.notes: list[str] = []
        self._own: list[_Looked] = []
        self._given = _Looked(uncut.given)
        self._read_seconds = 0.0
        self._times: list[float] = []
        self._sample: Any = None
        self._indices: list[int] = []
        if uncut.sites or uncut.given:
            self._read()

    def _read(self) -> None:
        """Read a few samples with recorders in place of the data set's own chains."""
        length = len(self._uncut.dataset)
        spread = sorted({place * (length - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)})
        self._reads: list[tuple[Any, list[Any]]] = []
        error: Exception | None = None
        begin = time.perf_counter()
        for index in sorted(spread, key=lambda place: min(place, length - 1 - place)):
            if self._reads and time.perf_counter() - begin > _READ_SECONDS:
                break
            try:
                self._reads.append(self._read_one(index))
                self._indices.append(index)
            except Exception as raised:  # a sample that cannot be read may never be asked for
                error = error or raised
        if not self._reads:
            assert error is not None
            raise error
        self._sample = self._reads[0][0]
        for index in self._indices * 3:  # for the time only
            if time.perf_counter() - begin > _READ_SECONDS:
                break
            with contextlib.suppress(Exception):
                self._read_one(index)
        self._read_seconds = typical(self._times)

    def _read_one(self, index: int) -> tuple[Any, list[Recorder]]:
        begun = time.perf_counter()
        sample, recorders = recorded(self._uncut, index, [()] * len(self._uncut.sites))
        spent = sum(recorder.spent for recorder in recorders)
        self._times.append(time.perf_counter() - begun - spent)
        return sample, recorders

    @property
    def _kind(self) -> str:
        return type(self._uncut.dataset).__name__

    # ---- judging -------------------------------------------------------------------------------------

    def judge_own(self, number: int) -> None:
        """Judge one of the data set's own chains, and look whether it can be cut."""
        site = self._uncut.sites[number]
        recorders = [recorders[number] for _, recorders in self._reads]
        values = [recorder.came[0] for recorder in recorders if len(recorder.came) == 1]
        if any(recorder.otherwise for recorder in recorders):
            why = f"{self._kind} calls its {site.name} with keywords"
            named = [each for recorder in recorders for each in recorder.named]
            self._own.append(self._whole(_Looked(site.chain), number, why, [_Named(site.chain)], named))
            return
        if len(values) < len(recorders):
            why = f"{self._kind} does not call its {site.name} once for each sample"
            several = [value for recorder in recorders for value in recorder.came]
            self._own.append(self._whole(_Looked(site.chain), number, why, leaves(site.chain), several))
            return
        # Tried also where it cannot be cut: what turns out to be random then must not be cached as a whole.
        looked = _Looked(site.chain, self._split(site.chain, values), values)
        if isinstance(self._sample, Exception) or find_paths(self._sample, recorders[0]) is None:
            why = f"{self._kind} goes on working on what its {site.name} returns, or gives it several values"
            self._own.append(self._whole(looked, number, why, leaves(site.chain), values))
        else:
            around = _size_of(self._sample) - _size_of(values[0])
            steps = leaves(site.chain)[: looked.cacheable]
            in_place = any(alters(steps, value) for value in values)
            self._own.append(looked._replace(around=around, in_place=in_place))

    def judge_given(self) -> None:
        """Split the chain given as ``transform=``, if everything before it may be cached."""
        if not self._uncut.given:
            return
        if any(own.cacheable < len(leaves(own.chain)) for own in self._own):
            return
        samples = self._samples()
        self._given = _Looked(self._uncut.given, self._split(self._uncut.given, samples), samples)

    def _samples(self) -> list[Any]:
        """The samples as the data set gives them with its own chains, those that it can give.

        Raises:
            Exception: what the data set raises, if it can give none.
        """
        samples: list[Any] = []
        error: Exception | None = None
        chains = zip(self._uncut.sites, self._own, strict=True)
        copying = {site.name: Chain(leaves(site.chain), copies=True) for site, own in chains if own.in_place}
        dataset = with_transforms(self._uncut.dataset, copying)
        for index in self._indices:
            try:
                samples.append(dataset[index])
            except Exception as raised:
                error = error or raised
        if not samples:
            assert error is not None
            raise error
        return samples

    def _whole(
        self, looked: _Looked, number: int, why: str, steps: Sequence[Any], values: Sequence[Any]
    ) -> _Looked:
        """A chain that cannot be cut: to be cached as a whole or not at all.

        Such a chain gets no copies: a data set that ignores what it returns means it to work in place.

        Args:
            looked: what is known of it.
            number: of its site.
            why: it cannot be cut.
            steps: its transforms, as they take what arrives at them.
            values: what arrived at them.

        Raises:
            NotCacheable: it has a transform that is known to be random, or changes what the data set holds.
        """
        for verdict in looked.verdicts:
            if verdict.kind == "random" and declared(self._uncut.dataset) != "deterministic":
                raise NotCacheable(
                    f"{verdict.name} is random ({verdict.evidence}), and {why}, so that it cannot be cut off "
                    "and would be frozen; give the chain as transform=[...] to hotset.cache instead."
                )
        if any(alters(steps, value) for value in values) and any(
            gives_its_own(self._uncut, index)[number] for index in self._indices
        ):
            raise NotCacheable(
                f"{self._uncut.sites[number].name} of {self._kind} changes in place what the data set holds, "
                f"which is another each time it is read then, and {why}, so that it cannot be given copies; "
                "give the chain as transform=[...] to hotset.cache instead, or have it work on a copy."
            )
        self.notes.append(f"{why}, so the chain cannot be cut; give it as transform= to have it cut")
        return looked._replace(whole=True, in_place=False)

    def _split(self, chain: Any, values: list[Any]) -> Split:
        try:
            return split(chain, values, self._strict)
        except Exception as error:
            # One sample may be bad, and may never be asked for.
            for value in values:
                try:
                    return split(chain, [value], self._strict)
                except Exception:
                    continue
            raise error

    # ---- choosing ------------------------------------------------------------------------------------

    def choose(self, limit: float, wanted: int | None) -> CutChoice:
        """Decide, and look whether the results of what is cut turn up in the sample."""
        counts = [own.cacheable for own in self._own]
        given = self._given.cacheable
        main = next((n for n, site in enumerate(self._uncut.sites) if site.name in _MAIN), None)
        cuttable = main is not None and not self._own[main].whole
        first = counts[main] if main is not None else 0
        if wanted is not None:
            counts, given = self._as_wanted(wanted, counts, main)
        elif first + given:
            best = self._cheapest(self._own[main] if main is not None and cuttable else None, given, limit)
            if main is not None and cuttable and best < first:
                counts[main], given = best, 0
            else:
                given = best - (first if cuttable else 0)
        asked = (*counts, given)
        places, given = self._places(counts, given)
        if wanted is not None and (*counts, given) != asked:
            raise ArgumentError(
                f"cut={wanted} cannot be, as {self._kind}'s own chain stays whole, or has a live part before "
                "it; leave out cut=, or give the chain as transform=."
            )
        in_place = tuple(own.in_place for own in self._own)
        cuts = Cuts(tuple(counts), places, given, in_place)
        rows = self._rows(cuts)
        probed = any(row.cached and row.kind == "unknown" for row in rows)
        return CutChoice(cuts, rows, tuple(self.notes), probed)

    def _as_wanted(self, wanted: int, counts: list[int], main: int | None) -> tuple[list[int], int]:
        """The user's cut.

        Raises:
            ArgumentError, NotCacheable: see :func:`choose`.
        """
        own = leaves(self._own[main].chain) if main is not None else []
        steps = [*own, *leaves(self._uncut.given)]
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= len(steps):
            raise ArgumentError(
                f"cut={wanted!r} is no number of transforms: there are {len(steps)} "
                f"({', '.join(map(name_of, steps)) or 'none'}); give 0 to {len(steps)}."
            )
        verdicts = [*(self._own[main].verdicts if main is not None else []), *self._given.verdicts]
        for verdict in verdicts[:wanted]:
            if verdict.kind == "random":
                raise NotCacheable(
                    f"cut={wanted} would cache {verdict.name}, which is random ({verdict.evidence}); cut "
                    "before it, or, if it gives the same each time, declare it: hotset.deterministic(...)."
                )
        self.notes.append(f"cut after {wanted} of {len(steps)} transforms, as cut={wanted} says")
        if main is not None:
            counts[main] = min(wanted, len(own))
        return counts, max(wanted - len(own), 0)

    def _cheapest(self, own: _Looked | None, given: int, limit: float) -> int:
        """How many transforms, the main chain's and then those of ``transform=``, to cache."""
        seconds: list[float] = []
        sizes: list[float] = [_size_of(self._sample)]
        names: list[str] = []
        if own is not None and own.split is not None:
            split = own.split
            seconds += split.seconds
            sizes += [own.around + _size_of(made[0]) for made in split.outputs]
            names += [verdict.name for verdict in split.verdicts[: split.count]]
        if given and self._given.split is not None:
            split = self._given.split
            sizes[-1] = _size_of(self._given.values[0])
            seconds += split.seconds
            sizes += [_size_of(made[0]) for made in split.outputs]
            names += [verdict.name for verdict in split.verdicts[: split.count]]
        samples = len(self._uncut.dataset)
        best = cheapest_cut(self._read_seconds, seconds, sizes, samples, limit)
        if best < len(seconds):
            fit, later = (min(1.0, limit / (samples * sizes[cut])) for cut in (best, -1))
            self.notes.append(
                f"cut before {names[best]}, although it may be cached: a sample takes "
                f"{format_bytes(sizes[best])} there and {format_bytes(sizes[-1])} at the end, so that "
                f"{fit:.0%} of them fit and not {later:.0%}"
            )
        return best

    def _places(self, counts: list[int], given: int) -> tuple[tuple[tuple[SamplePath, ...], ...], int]:
        """Where the results of the chains that are cut turn up; a chain whose do not stays whole."""
        prefixes = [
            () if own.whole else tuple(leaves(own.chain)[:count])
            for own, count in zip(self._own, counts, strict=True)
        ]
        places: list[tuple[SamplePath, ...]] = [()] * len(counts)
        cut = [n for n, own in enumerate(self._own) if counts[n] < len(leaves(own.chain))]
        if cut:
            sample, recorders = recorded(self._uncut, self._indices[0], prefixes)
            for n in cut:
                found = None if isinstance(sample, Exception) else find_paths(sample, recorders[n])
                # Live parts run in the order of the sites; where the data set has another, so have its draws.
                late = any(recorders[n].begun < recorders[m].begun for m in cut if m < n)
                as_many = found is not None and self._gives_as_many(n, counts[n], recorders[n], len(found))
                if found is None or late or not as_many:
                    why = f"{self._kind} goes on working on what its {self._uncut.sites[n].name} returns"
                    steps = leaves(self._own[n].chain)
                    self._own[n] = self._whole(self._own[n], n, why, steps, self._own[n].values)
                    counts[n] = self._own[n].cacheable
                else:
                    places[n] = found
                    given = 0
        return tuple(places), given

    def _gives_as_many(self, number: int, count: int, recorder: Recorder, places: int) -> bool:
        """Whether the live part of a chain that takes several values gives as many back."""
        if places == 1:
            return True
        values: Any = Values(recorder.went[0])
        for step in leaves(self._own[number].chain)[count:]:
            values, _ = _tried(step, values)
        return isinstance(values, Values) and len(values) == places

    # ---- telling -------------------------------------------------------------------------------------

    def _rows(self, cuts: Cuts) -> tuple[Row, ...]:
        known = self._sample is not None and not isinstance(self._sample, Exception)
        size = int(_size_of(self._sample)) if known else None
        rows = [Row(self._kind, "source", "the data set", self._read_seconds or None, size, True)]
        deadline = time.perf_counter() + _LIVE_SECONDS
        for looked, count in zip((*self._own, self._given), (*cuts.own, cuts.given), strict=True):
            rows += self._rows_of(looked, count, deadline)
        return tuple(rows)

    def _rows_of(self, looked: _Looked, count: int, deadline: float) -> list[Row]:
        rows: list[Row] = []
        value = looked.values[0] if looked.values else None
        known = looked.split.count if looked.split is not None else 0
        for number, verdict in enumerate(looked.verdicts):
            seconds: float | None = None
            made: Any = None
            if looked.split is not None and number < known:
                seconds, made = looked.split.seconds[number], looked.split.outputs[number][0]
            elif value is not None and (number == known or time.perf_counter() < deadline):
                made, seconds = _tried(verdict.step, value)
            size = None if made is None else int(looked.around + _size_of(made))
            rows.append(Row(verdict.name, verdict.kind, verdict.evidence, seconds, size, number < count))
            value = made
        return rows


# ---- measuring ------------------------------------------------------------------------------------------


def _tried(step: Callable[..., Any], value: Any) -> tuple[Any, float | None]:
    """What a live transform makes of a value, and how long it takes; it is not its turn to raise."""
    try:
        return once(step, value)
    except Exception:
        return None, None


def _size_of(value: Any) -> float:
    """About the bytes that a value takes when it is stored."""
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
