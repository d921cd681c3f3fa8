"""The probe of a stream: two runs of it are begun, and their first samples compared.

A dataset with an index is probed by reading samples twice (:mod:`hotset.determinism.draws.probe`). Of a
stream, two runs are begun instead, on a copy, with other states of the random number generators, and what
they give in about a second is compared:

=====================================================  =======================================================
both runs give the same samples, and nothing draws     content and order are fixed. From then on a draw is
                                                       noticed: the part is not recorded beyond it
the order differs, and some samples occur in both      it is shuffled: the order of the first pass is recorded
the same, with generators of the run's own             if these were seeded anew, they are watched: a part is
                                                       recorded up to where one draws
no sample occurs in both, or the same key comes with   refused: content that is random would be the same in
other content                                          all epochs
=====================================================  =======================================================

A stream of a class of the user's that has a ``set_epoch`` is begun once more in another epoch. If that gives
other samples, and not only another order, a change of the epoch counts as any other change of the stream.

A shuffle of WebDataset's is left out of that copy: with shards in another order, two runs have no sample in
common.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import time
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset._interrupts import own_errors
from hotset.dataset.streams.libraries import batch_size_of, epoch_kept, is_hugging_face, may_reorder, run
from hotset.determinism.aliasing import copied
from hotset.determinism.draws import entropy
from hotset.determinism.draws.rng import GLOBAL, KINDS, Generators, access
from hotset.determinism.equality import content_digests
from hotset.determinism.objects.object_graph import within_reach
from hotset.errors import ArgumentError, NotCacheable
from hotset.store.store import Store

__all__ = ["PLANNED", "StreamFacts", "StreamProbe", "held_by_run", "probe_stream"]

# How many samples the planner gets.
PLANNED = 8
_SECONDS = 1.0
_SAMPLES = 256
_MOST_OF_A_RUN = 64  # generators and iterators that are looked into for what a run holds


class StreamFacts(NamedTuple):
    """What the passes over a stream need to know of it; kept in the metadata of its cache.

    Attributes:
        draws: whether reading moves a random number generator, or gives another order.
        entropy: whether reading takes entropy that the first samples do not depend on.
        own: whether a run has generators of its own that are seeded anew each time.
        shuffled: whether another run gives another order.
        repeats: whether it gives the same order as before if the generators have the same states.
        by_epoch: whether another epoch may give another order.
        batch_size: how many samples each item holds, if the stream says so; otherwise 0.
        alone: whether no other process can use the cache.
    """

    draws: bool = True
    entropy: bool = True
    own: bool = False
    shuffled: bool = False
    repeats: bool = True
    by_epoch: bool = False
    batch_size: int = 0
    alone: bool = True

    @classmethod
    def of(cls, store: Store) -> StreamFacts:
        """Those of the stream that this store records."""
        return cls(**store.segment.metadata["stream"])


class StreamProbe(NamedTuple):
    """What two runs of a stream showed.

    Attributes:
        samples: the first, at most :data:`PLANNED`.
        seconds: the mean time that reading one takes.
        facts: what its passes need to know, as far as it is known.
        note: a sentence for the plan.
        warning: a sentence for the user; None if there is nothing to say.
        by_epoch: whether another epoch gives other samples.
    """

    samples: list[Any]
    seconds: float
    facts: StreamFacts
    note: str
    warning: str | None = None
    by_epoch: bool = False


class _Sample(NamedTuple):
    """A sample of a run.

    Attributes:
        sample: a copy of it, if it is one of the first :data:`PLANNED`; otherwise None.
        digest: of the whole sample.
        parts: the digest of each part, by its place in the tree.
    """

    sample: Any
    digest: bytes
    parts: dict[str, bytes]


class _Run(NamedTuple):
    """The first samples of a run.

    Attributes:
        read: the samples.
        seconds: the mean time that reading one took.
        entropy: whether entropy was taken after the first one.
        states: of the generators that the run itself holds, after the first sample; and after the last one
            that was read, unless the run had come to its end and holds nothing any more.
    """

    read: list[_Sample]
    seconds: float
    entropy: bool
    states: list[list[Any]]

    @property
    def digests(self) -> list[bytes]:
        """Of the samples, in order."""
        return [each.digest for each in self.read]


def probe_stream(stream: Any, name: str, declaration: str | None) -> StreamProbe:
    """Read the first samples of a stream in two runs, and compare them.

    Args:
        stream: the content of the user's: see :func:`~hotset.dataset.streams.libraries.without_order`.
        name: of the stream's class, for messages.
        declaration: what the user declares of the stream.

    Raises:
        ArgumentError: there are no samples.
        NotCacheable: the samples are others in each run.
        Exception: what the stream raises.
    """
    if declaration == "nondeterministic":
        raise NotCacheable(
            f"{name} is declared @hotset.nondeterministic, so nothing of it may be cached; move its random "
            "part to transform=."
        )
    plain = _copy(stream)
    with epoch_kept(plain), Generators([plain]) as generators:
        first = _first_samples(plain)
        if not first.read:
            raise ArgumentError(f"{name} must give at least one sample, got none; check its files.")
        moved = generators.any_moved
        # Generators go on from where the first run left them: a stream that draws differs.
        second = _first_samples(plain, most=len(first.read))
        note, warning = "the stream is declared deterministic", None
        facts = StreamFacts(shuffled=not _are_alike(first, second))
        if declaration != "deterministic":
            note, warning, facts = _compared(name, first, second, moved)
        repeats = not facts.shuffled or plain is stream or _repeats(stream, first, generators)
        is_tried = declaration is None and plain is not stream
        by_epoch, reorders = _in_another_epoch(plain, first) if is_tried else (False, may_reorder(stream))
    samples = [each.sample for each in first.read[:PLANNED]]
    size = batch_size_of(stream)
    size = size if _are_batches(samples, size) else 0
    facts = facts._replace(repeats=repeats, by_epoch=reorders, batch_size=size)
    return StreamProbe(samples, first.seconds, facts, note, warning, by_epoch)


def _are_alike(first: _Run, second: _Run) -> bool:
    """Whether both runs began with the same samples; the second may have been slower, and have fewer."""
    return second.digests == first.digests[: len(second.read)]


def _repeats(stream: Any, first: _Run, generators: Generators) -> bool:
    """Whether a run gives the same again from the states that the generators had before the first one."""
    generators.restore()
    return _are_alike(first, _first_samples(_copy(stream), most=len(first.read)))


def _in_another_epoch(stream: Any, first: _Run) -> tuple[bool, bool]:
    """Whether another epoch gives other samples, and whether it may give another order."""
    if not may_reorder(stream) or is_hugging_face(stream):
        return False, may_reorder(stream)
    epoch = getattr(stream, "epoch", 0)
    stream.set_epoch(epoch + 1 if isinstance(epoch, int) else 1)
    again = _first_samples(stream, most=len(first.read))
    return _others(first.read, again.read) is not None, not _are_alike(first, again)


def _compared(name: str, first: _Run, second: _Run, moved: bool) -> tuple[str, str | None, StreamFacts]:
    """What two runs show: a note for the plan, a warning if there is one, and the facts.

    Args:
        moved: whether the first run has moved a generator.

    Raises:
        NotCacheable: the samples are others in each run.
    """
    if not second.read:
        raise NotCacheable(
            f"{name} gave samples in its first run and none in its second, so it can be read only once, and "
            "hotset has read its beginning to find that out; make it anew, and have __iter__ begin it from "
            "its first sample."
        )
    if _are_alike(first, second):
        note = f"two runs of the stream began with the same {len(second.read):,} samples"
        took_entropy = first.entropy or second.entropy
        facts = StreamFacts(draws=moved, entropy=took_entropy, own=_differ(first, second))
        return note if moved else f"{note}, and nothing was drawn", None, facts
    if (seen := _others(first.read, second.read)) is not None:
        raise NotCacheable(
            f"{name} gives other samples in each run ({seen}), and a cache would repeat one draw in all "
            "epochs. Move random transforms out of the stream, to transform=[...]; or, if only the order "
            f"differs, declare it: hotset.deterministic({name})."
        )
    total, common = len(first.read), len({*first.digests} & {*second.digests})
    note = (
        f"{common:,} of the first {total:,} samples occurred in a second run, in another order: the order of "
        "the first pass is recorded"
    )
    return note, _order_warning(name) if common < total else None, StreamFacts(shuffled=True)


def _order_warning(name: str) -> str:
    return (
        f"{name} gives its samples in another order in each run, so hotset cannot tell by comparing them "
        "whether they also differ in content; random transforms inside the stream would give the same result "
        "in all epochs: move them to transform=[...]. If it has none, declare it: "
        f"hotset.deterministic({name})."
    )


def _others(first: list[_Sample], again: list[_Sample]) -> str | None:
    """How two runs show that their samples differ in more than their order; None if they do not.

    No sample occurs in both; or most come at the same place, and others differ there; or a part that names
    each sample (a key, a path) occurs in both, and the rest of the sample differs.
    """
    count = len(again)  # no more than of the first
    alike = sum(a.digest == b.digest for a, b in zip(first, again, strict=False))
    common = {each.digest for each in first} & {each.digest for each in again}
    if not common:
        return f"of the first {len(first):,}, none occurred in a second run"
    if len(common) < count and alike > max(1, count // 20):
        return (
            f"of the first {count:,}, {count - alike:,} were others in a second run, and the rest came again"
        )
    return "samples with the same key differed between two runs" if _contradicts(first, again) else None


def _contradicts(first: list[_Sample], again: list[_Sample]) -> bool:
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


def _first_samples(stream: Any, most: int = _SAMPLES) -> _Run:
    """Read the first samples of a run."""
    found: list[_Sample] = []
    begun = before = time.perf_counter()
    spent, taken = 0.0, 0
    states: list[list[Any]] = []
    samples = run(stream)
    while len(found) < most and (len(found) < 2 or before - begun < _SECONDS):
        try:
            sample = next(samples)
        except StopIteration:
            break
        except own_errors():
            if not found:
                raise
            break  # training may never come to it, or meets it in its turn
        spent += time.perf_counter() - before
        parts = content_digests(sample)
        whole = hashlib.blake2b(digest_size=16)
        for place, digest in parts.items():
            whole.update(place.encode() + b"\0" + digest)
        kept = copied(sample) if len(found) < PLANNED else None
        found.append(_Sample(kept, whole.digest(), parts))
        if len(found) == 1:  # the run has seeded what it seeds
            taken = entropy.taken()
            states.append(_states(samples, stream))
        before = time.perf_counter()
    else:
        states.append(_states(samples, stream))
    took = entropy.taken() != taken
    if isinstance(samples, types.GeneratorType):  # another iterator may be the stream's own, such as its file
        samples.close()
    return _Run(found, spent / max(len(found), 1), took, states)


def _states(samples: Iterator[Any], stream: Any) -> list[Any]:
    """The states of the generators that a run holds."""
    return list(Generators(held_by_run(samples, stream)).states().values())[len(GLOBAL) :]


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


def _differ(one: _Run, other: _Run) -> bool:
    """Whether generators that two runs made for themselves had other states at the same sample."""
    places = None if len(one.read) == len(other.read) else 1  # the slower run was read less far
    return any(
        [content_digests(each) for each in states] != [content_digests(each) for each in others]
        for states, others in zip(one.states[:places], other.states[:places], strict=False)
    )


def _are_batches(samples: list[Any], size: int) -> bool:
    """Whether all arrays and lists of all samples but the last have this length."""
    for sample in samples[:-1]:
        parts = sample.values() if isinstance(sample, dict) else sample
        if not isinstance(parts, (tuple, list)) and not isinstance(sample, dict):
            return False
        rows = [part for part in parts if isinstance(part, (torch.Tensor, np.ndarray, list))]
        if not rows or any(getattr(part, "ndim", 1) == 0 or len(part) != size for part in rows):
            return False
    return size > 1


def _copy(stream: Any) -> Any:
    """A copy that can be run without a trace in the stream; the stream itself if it cannot be copied."""
    try:
        return copy.deepcopy(stream)
    except own_errors():
        return stream
