"""A stream as the planner and the store see it: a dataset with an index, over an iterable that has none.

The planner wants a few real samples, and a look at whether reading them twice gives the same. A stream is
begun twice for that, on a copy, with other states of the random number generators, and a second of its first
samples is compared (:meth:`StreamSource.look`):

=====================================================  =======================================================
both runs give the same samples, and nothing draws     content and order are fixed. From then on a draw is
                                                       noticed: the part is not recorded beyond it
the order differs, and some samples occur in both      it is shuffled: the order of the first pass is recorded
the same, with generators of the run's own             if these were seeded anew, they are watched: a part is
                                                       recorded up to where one draws
no sample occurs in both, or the same key comes with   refused: content that is random would be the same in
other content                                          all epochs
=====================================================  =======================================================

A shuffle of WebDataset's is left out of that copy: with shards in another order, two runs have no sample in
common. Neither it nor the share of one rank counts for the fingerprint, as all ranks and jobs record the same
samples into one cache.

**By index**: sample ids count through the parts of the stream (:mod:`hotset.store.stream_parts`). Recorded
samples never come back here. A record that was lost (a damaged disk, a session that was destroyed in the
midst of an epoch) does: the stream is run up to that sample, as the worker that read it would.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import os
import shutil
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from hotset._warnings import Warner
from hotset.determinism import entropy
from hotset.determinism.declare import declared
from hotset.determinism.equality import changeable
from hotset.determinism.object_graph import within_reach
from hotset.determinism.rng import GLOBAL, KINDS, Generators, access
from hotset.errors import ArgumentError, NotCacheable

if TYPE_CHECKING:  # it reads the first samples from here
    from hotset.dataset.planner import PlanResult

__all__ = ["PLANNED", "Look", "StreamSource", "as_worker", "held_by_run", "is_stream", "run"]

# How many samples the planner gets.
PLANNED = 8
_SPARE_IDS = 4096
_BYTES_PER_ID = 128  # a sixteenth of the room, at most, is index
_LOOK_SECONDS = 1.0
_LOOK_SAMPLES = 256
_MOST_OF_A_RUN = 64  # generators and iterators that are looked into for what a run holds


def is_stream(dataset: object) -> bool:
    """Whether a dataset can only be iterated over.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> is_stream(iter([])), is_stream(TensorDataset(torch.arange(3)))
        (True, False)
    """
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__")


def run(stream: Any) -> Iterator[Any]:
    """Begin the stream once more, as torch's loader would; a node of torchdata from its beginning."""
    if hasattr(stream, "reset") and isinstance(stream, Iterator):
        stream.reset()  # type: ignore[attr-defined]
    return iter(stream)


class Look(NamedTuple):
    """What two runs of a stream showed.

    Attributes:
        samples: the first, at most :data:`PLANNED`.
        seconds: the mean time that one takes.
        draws: whether reading moves a random number generator, or gives another order.
        note: a sentence for the plan.
        warning: a sentence for the user; None if there is nothing to say.
        entropy: whether reading takes entropy that the first samples do not depend on.
        own: whether a run has generators of its own that are seeded anew each time.
        shuffled: whether another run gives another order.
    """

    samples: list[Any]
    seconds: float
    draws: bool
    note: str
    warning: str | None
    entropy: bool = True
    own: bool = False
    shuffled: bool = False


class _Run(NamedTuple):
    """The first samples of a run.

    Attributes:
        given: the samples.
        seconds: the mean time that one took.
        entropy: whether entropy was taken after the first one.
        states: of the generators that the run itself holds.
    """

    given: list[_Given]
    seconds: float
    entropy: bool
    states: list[Any]


class _Given(NamedTuple):
    """A sample of a run: itself, if it is one of the first; a digest of it; a digest of each of its parts."""

    sample: Any
    digest: bytes
    parts: dict[str, bytes]


class StreamSource(Dataset[Any]):
    """A stream with indices. It pickles if the stream does.

    Attributes:
        described: the stream without what orders it or divides it among ranks: its content.
    """

    def __init__(self, stream: Any) -> None:
        # Attributes with this prefix are no part of a fingerprint.
        self._hotset_stream = stream
        self._hotset_look: Look | None = None
        self._hotset_parts = self._hotset_workers = 0  # until it is planned
        self._hotset_runs: dict[int, tuple[Iterator[Any], int]] = {}
        self._hotset_warn = Warner()
        self.described = unordered(stream)
        if isinstance(stream, IterDataPipe):
            raise NotCacheable(
                f"{_name(stream)} is a data pipe, which torch's loader itself divides and shuffles, so "
                "hotset cannot run it as torch would; write it as a torch.utils.data.IterableDataset."
            )
        if (
            isinstance(stream, Iterator)
            and not isinstance(stream, IterableDataset)
            and not hasattr(stream, "reset")
        ):
            raise ArgumentError(
                f"dataset must be an iterable that can be run again, got {_name(stream)}, which ends for "
                "good; "
                "wrap it in a torch.utils.data.IterableDataset whose __iter__ begins it anew."
            )

    @property
    def stream(self) -> Any:
        """The user's stream."""
        return self._hotset_stream

    @property
    def name(self) -> str:
        """The name of the stream's class."""
        return _name(self._hotset_stream)

    # ---- for the planner -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return PLANNED

    def look(self) -> Look:
        """Read the first samples, twice.

        Raises:
            ArgumentError: there are none.
            NotCacheable: the samples are others in each run.
            Exception: what the stream raises.
        """
        if self._hotset_look is None:
            self._hotset_look = _look(self.described, self.name, declared(self._hotset_stream))
        return self._hotset_look

    # ---- by sample id --------------------------------------------------------------------------------

    def divided(self, parts: int, workers: int) -> None:
        """Set how sample ids count: through so many parts, of which each rank has ``workers``."""
        self._hotset_parts, self._hotset_workers = parts, workers

    def __getitem__(self, index: int) -> Any:
        if self._hotset_parts:
            return self._read(index)
        samples = self.look().samples
        return samples[index % len(samples)]

    def planned(self, result: PlanResult, *, alone: bool) -> PlanResult:
        """The plan of this stream, from a plan that was made with its first samples.

        From now on an index is a sample id. The cache has room for as many ids as records fit, twice: ids
        count through all parts, and some parts are longer than others.

        Args:
            result: the plan.
            alone: whether no other process can use the cache.
        """
        look, plan = self.look(), result.plan
        self._hotset_look = None
        self.divided(1, 1)
        room = plan.limit
        if plan.spill is not None:
            with contextlib.suppress(OSError):
                room += shutil.disk_usage(os.path.dirname(plan.spill) or "/").free
        size = max(plan.sample_bytes, result.schema.stride if result.schema is not None else 1)
        first, *steps = plan.rows
        plan = replace(
            plan,
            samples=min(2 * room // size, room // _BYTES_PER_ID) + _SPARE_IDS,
            sample_seconds=plan.sample_seconds + look.seconds,
            rows=(first._replace(name=self.name, seconds=look.seconds), *steps),
            audited=False,
            stream=True,
            notes=(look.note, *plan.notes[1:]),  # the first is about reading the first samples twice
            warnings=(*plan.warnings, *((look.warning,) if look.warning is not None else ())),
        )
        return result._replace(
            plan=plan,
            metadata={
                "stream_draws": look.draws,
                "stream_entropy": look.entropy,
                "stream_own": look.own,
                "stream_shuffled": look.shuffled or _has_shuffle(self._hotset_stream),
                "stream_alone": alone,
                "stream_batches": _batch_size(look.samples),
            },
        )

    def _read(self, sample: int) -> Any:
        position, part = divmod(sample, self._hotset_parts)
        worker = part % self._hotset_workers
        self._hotset_warn(
            f"a recorded sample of {self.name} was lost, and the stream is run up to it, which takes long; "
            "look at the disk or the session that held it.",
            "lost",
        )
        samples, at = self._hotset_runs.pop(part, (iter(()), position + 1))
        if at > position:
            samples, at = run(self._hotset_stream), 0
        with as_worker(worker, self._hotset_workers, self._hotset_stream):
            for found in samples:
                at += 1
                if at > position:
                    self._hotset_runs[part] = (samples, at)
                    return found
        raise NotCacheable(
            f"{self.name} ended before its sample number {position}, which it has given before; a stream "
            "that "
            "is cached must give the same samples in each run."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hotset_runs": {}}


@contextlib.contextmanager
def as_worker(worker: int, workers: int, dataset: Any) -> Iterator[None]:
    """Have ``get_worker_info()`` say that this process is this worker of a loader; with 1 worker, of none."""
    before = torch_worker._worker_info
    if workers > 1:
        seed = torch.initial_seed()
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=workers, seed=seed, dataset=dataset
        )
    try:
        yield
    finally:
        torch_worker._worker_info = before


# ---- looking at a stream ---------------------------------------------------------------------------------


def _look(stream: Any, name: str, declaration: str | None) -> Look:
    if declaration == "nondeterministic":
        raise NotCacheable(
            f"{name} is declared @hotset.nondeterministic, so nothing of it may be cached; move its random "
            "part to transform=."
        )
    plain = _copy(stream)
    generators = Generators([plain])
    try:
        one = _first(plain)
        moved, first, seconds = generators.moved(), one.given, one.seconds
        if not first:
            raise ArgumentError(f"{name} must give at least one sample, got none; check its files.")
        # Generators go on from where the first run left them: a stream that draws differs.
        other = _first(plain, most=len(first))
        again = other.given
    finally:
        generators.restore()
    samples = [each.sample for each in first[:PLANNED]]
    before, after = [each.digest for each in first], [each.digest for each in again]
    common = len(set(before) & set(after))
    if declaration == "deterministic":
        note = "the stream is declared deterministic"
        return Look(samples, seconds, True, note, None, shuffled=before[: len(after)] != after)
    if not again:
        raise NotCacheable(
            f"{name} gave samples in its first run and none in its second, so it can be read only once, and "
            "hotset has read its beginning to find that out; make it anew, and have __iter__ begin it from "
            "its first sample."
        )
    if before[: len(again)] == after:  # the second run may have been slower
        note = f"two runs of the stream began with the same {len(again):,} samples"
        return Look(
            samples,
            seconds,
            bool(moved),
            note if moved else f"{note}, and nothing was drawn",
            None,
            entropy=one.entropy or other.entropy,
            own=_differ(one.states, other.states),
        )
    _refuse_random_content(name, first, again)
    note = (
        f"{common:,} of the first {len(first):,} samples occurred in a second run, in another order: the "
        "order "
        "of the first pass is recorded"
    )
    told = _order_warning(name) if common < len(first) else None
    return Look(samples, seconds, True, note, told, shuffled=True)


def _order_warning(name: str) -> str:
    return (
        f"{name} gives its samples in another order in each run, so hotset cannot tell by comparing them "
        "whether they also differ in content; random transforms inside the stream would give the same result "
        "in all epochs: move them to transform=[...]. If it has none, declare it: "
        f"hotset.deterministic({name})."
    )


def _refuse_random_content(name: str, first: list[_Given], again: list[_Given]) -> None:
    """Refuse a stream of whose samples two runs show that they differ in more than their order.

    Raises:
        NotCacheable: no sample occurs in both; or most come at the same place, and others differ there; or a
            part that names each sample (a key, a path) occurs in both, and the rest of the sample differs.
    """
    count = min(len(first), len(again))
    alike = sum(a.digest == b.digest for a, b in zip(first, again, strict=False))
    common = {each.digest for each in first} & {each.digest for each in again}
    if not common:
        seen = f"of the first {len(first):,}, none occurred in a second run"
    elif len(common) < count and alike > max(1, count // 20):
        seen = (
            f"of the first {count:,}, {count - alike:,} were others in a second run, and the rest came again"
        )
    elif _contradicts(first, again):
        seen = "samples with the same key differed between two runs"
    else:
        return
    raise NotCacheable(
        f"{name} gives other samples in each run ({seen}), and a cache would repeat one draw in all epochs. "
        "Move "
        "random transforms out of the stream, to transform=[...]; or, if only the order differs, declare it: "
        f"hotset.deterministic({name})."
    )


def _contradicts(first: list[_Given], again: list[_Given]) -> bool:
    """Whether a sample came twice with the same name, and otherwise another content."""
    for place in first[0].parts:
        names = {each.parts[place]: each.digest for each in first if place in each.parts}
        if len(names) < len(first):
            continue  # not all samples have another value there
        for each in again:
            digest = names.get(each.parts.get(place, b""))
            if digest is not None and digest != each.digest:
                return True
    return False


def _first(stream: Any, most: int = _LOOK_SAMPLES) -> _Run:
    """Read the first samples of a run."""
    found: list[_Given] = []
    begun = before = time.perf_counter()
    spent, taken = 0.0, 0
    samples = run(stream)
    while len(found) < most and (len(found) < 2 or before - begun < _LOOK_SECONDS):
        try:
            sample = next(samples)
        except StopIteration:
            break
        except Exception:
            if not found:
                raise
            break  # training may never come to it, or meets it in its turn
        spent += time.perf_counter() - before
        parts = changeable(sample)
        whole = hashlib.blake2b(digest_size=16)
        for place, digest in parts.items():
            whole.update(place.encode() + b"\0" + digest)
        kept = copy.deepcopy(sample) if len(found) < PLANNED else None
        found.append(_Given(kept, whole.digest(), parts))
        if len(found) == 1:  # the run has seeded what it seeds
            taken = entropy.taken()
        before = time.perf_counter()
    states = list(Generators(held_by_run(samples, stream)).states().values())
    took = bool(found) and entropy.taken() != taken
    with contextlib.suppress(AttributeError):
        samples.close()  # type: ignore[attr-defined]
    return _Run(found, spent / max(len(found), 1), took, states[len(GLOBAL) :])


def held_by_run(samples: Iterator[Any], stream: Any) -> list[Any]:
    """The random number generators that a run of a stream has beside the stream's own.

    They are in variables of generator functions, which wait for the next sample to be asked for, and these in
    each other, or in ``map``, ``zip`` and the like.
    """
    held: list[Any] = []
    seen: set[int] = {id(stream)}
    left: deque[Any] = deque([samples])
    while left and len(seen) < _MOST_OF_A_RUN:
        each = left.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, types.GeneratorType):
            frame = each.gi_frame
            left.extend([*(frame.f_locals.values() if frame is not None else ()), each.gi_yieldfrom])
        elif isinstance(each, Iterator) and type(each).__module__ in ("builtins", "itertools"):
            left.extend(gc.get_referents(each))
        else:
            held.append(each)
    known = {id(found) for _, found in within_reach([stream], KINDS)}
    found = [found for _, found in within_reach(held, KINDS) if id(found) not in known]
    return [generator for generator in found if access(generator) is not None]


def _differ(one: list[Any], other: list[Any]) -> bool:
    """Whether generators that two runs made for themselves have other states."""
    return [changeable(each) for each in one] != [changeable(each) for each in other]


def _batch_size(samples: list[Any]) -> int:
    """The length that all arrays of all samples but the last have in common, if one is flat, as labels
    are.
    """
    found: set[int] = set()
    is_flat = False
    for sample in samples[:-1]:
        parts = sample.values() if isinstance(sample, dict) else sample
        if not isinstance(parts, (tuple, list)) and not isinstance(sample, dict):
            return 0
        arrays = [part for part in parts if isinstance(part, (torch.Tensor, np.ndarray))]
        if len(arrays) < 2 or any(part.ndim == 0 for part in arrays):
            return 0
        found.update(len(part) for part in arrays)
        is_flat |= any(part.ndim == 1 for part in arrays)
    return found.pop() if is_flat and len(found) == 1 and found != {1} else 0


def _copy(stream: Any) -> Any:
    """A copy that can be run without a trace in the stream; the stream itself if it cannot be copied."""
    try:
        return copy.deepcopy(stream)
    except Exception:
        return stream


def unordered(stream: Any) -> Any:
    """A stream's content: a copy without WebDataset's shuffles, and without one rank's share of it."""
    stages = getattr(stream, "pipeline", None)
    if isinstance(stages, list) and _is_of("webdataset", stream):
        plain = _shallow(stream)
        plain.pipeline = [stage for stage in stages if not _is_shuffle(stage)]
        if hasattr(plain, "seed"):
            plain.seed = 0
        return plain
    if _is_of("datasets", stream) and hasattr(stream, "_distributed"):
        plain = _shallow(stream)
        plain._distributed = None
        plain._epoch = 0
        for attribute in vars(plain):
            if attribute.endswith("_hffs_cache"):  # file systems, which each process names otherwise
                setattr(plain, attribute, {})
        return plain
    return stream


def _shallow(stream: Any) -> Any:
    """A shallow copy. Not by ``copy.copy``: a ``__setstate__`` may have two objects share their
    attributes.
    """
    plain = object.__new__(type(stream))
    plain.__dict__.update(stream.__dict__)
    return plain


def _has_shuffle(stream: Any) -> bool:
    """Whether WebDataset shuffles it, which the copy that is looked at does not."""
    stages = getattr(stream, "pipeline", None)
    return isinstance(stages, list) and any(map(_is_shuffle, stages))


def _is_shuffle(stage: Any) -> bool:
    function: Callable[..., Any] | None = getattr(stage, "f", None)
    return type(stage).__name__ == "detshuffle" or getattr(function, "__name__", "") == "_shuffle"


def _is_of(package: str, thing: object) -> bool:
    return any(cls.__module__.partition(".")[0] == package for cls in type(thing).__mro__)


def _name(stream: object) -> str:
    return type(stream).__name__
