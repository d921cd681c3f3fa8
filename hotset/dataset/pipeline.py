"""The pipeline of a dataset: what is cached of it, up to the cut, and what runs live, after the cut.

::

    dataset[i] ── its own transforms, first part ── `transform=`, first part ──│── the rest, for each use
    ╰────────────────────────── read(i), cached ──────────────────────────────╯  ╰──────── live ────────╯

A chain given as ``transform=`` takes whole samples, so cutting it is easy. A dataset's own transforms
(:mod:`hotset.dataset.transform_attributes`) take *parts* of the sample (the picture, but not the label) and
are called inside ``__getitem__``. So the dataset is copied shallowly, the copy gets only a chain's first
part, and a sample is read to find the paths at which the results are in it: the rest of the chain then works
on these parts of the cached sample. If a result is found nowhere, or more than once, because the dataset
processes it further, the chain cannot be cut there: it stays whole, and is cached as a whole or not at all.

For a rare sample, the dataset may call a chain another number of times than for those that were tried (a
class has no augmentation, a picture has a box more), or process its results further (one class gets noise).
So calls are noted: if a result is not at its path, or is not what it was, the sample is read whole each time,
with all of its chains. So is a sample that draws random numbers: it is read in its turn for each use.

A step of ``transform=`` may take several samples at once (:mod:`hotset.determinism.batched`): samples that
are read together pass it together.

What the dataset returns may still belong to it: an item of a list, a view of a tensor. A sample is copied
unless the reader alone can reach it (:mod:`hotset.determinism.aliasing`), and a chain inside ``__getitem__``
that was seen to work in place gets copies. So the dataset does not change, however often a sample is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hotset._interrupts import own_errors
from hotset._warnings import Warner
from hotset.dataset.chain_calls import ChainCall, SamplePath, are_at, note, noted, value_at
from hotset.dataset.format_transform import row_of, without_format_transform
from hotset.dataset.streams.source import StreamSource
from hotset.dataset.transform_attributes import TransformAttribute, transform_attributes_of, with_transforms
from hotset.determinism.aliasing import copied, owned
from hotset.determinism.batch_transform import BatchTransform
from hotset.determinism.batched import Batched
from hotset.determinism.chain import Values, applied, cut, is_list, leaves
from hotset.errors import ArgumentError, NotCacheable
from hotset.store.fill import IN_TURN

__all__ = [
    "UNUSED",
    "ApplyAt",
    "CannotBeCut",
    "Chain",
    "ChainCut",
    "Cuts",
    "Pipeline",
    "SampleStopped",
    "Source",
    "chain_of",
    "stopped",
    "transformed",
]

Transform = Callable[..., Any]


class SampleStopped(RuntimeError):
    """Reading a sample raised StopIteration, which an iterator on its way would take for its own end.

    Whoever hands the sample or batch over raises the StopIteration again: :func:`stopped`.
    """


class CannotBeCut(NotCacheable):
    """A dataset does not treat its chains as it did in the samples that were tried."""


def stopped(error: SampleStopped) -> StopIteration:
    """What the dataset raised; from a loader's worker only its text has come."""
    cause = error.__cause__
    return cause if isinstance(cause, StopIteration) else StopIteration(*error.args)


UNUSED = -1


@dataclass(frozen=True)
class Pipeline:
    """A dataset and its chains, before it is decided where to cut them.

    Attributes:
        dataset: the user's dataset; one of Hugging Face's without its format transform.
        attributes: the dataset's own chains.
        given: the chain given as ``transform=``, after that format transform.
    """

    dataset: Any
    attributes: tuple[TransformAttribute, ...]
    given: tuple[Transform, ...]

    @property
    def name(self) -> str:
        """The name of the dataset's class."""
        return self.dataset.name if isinstance(self.dataset, StreamSource) else type(self.dataset).__name__

    def steps(self, cuts: Cuts | None = None) -> list[Any]:
        """The leaf transforms of all chains, or of those that are used; in the order of the plan's rows."""
        unused = [n for n, own in enumerate(cuts.own) if own.cached == UNUSED] if cuts is not None else []
        chains = [attribute.chain for n, attribute in enumerate(self.attributes) if n not in unused]
        return [step for chain in (*chains, self.given) for step in leaves(chain)]

    @classmethod
    def of(cls, dataset: Any, transform: Transform | Sequence[Transform] | None) -> Pipeline:
        """Find the chains.

        Raises:
            ArgumentError: the dataset has no index or no length, or is empty; a transform is not callable;
                a ``hotset.batched`` is among the dataset's own transforms.
        """
        _require_map_style(dataset)
        dataset, of_format = without_format_transform(dataset)
        given = chain_of(transform)
        own = transform_attributes_of(dataset)
        for attribute in own:
            if any(isinstance(step, Batched) for step in leaves(attribute.chain)):
                raise ArgumentError(
                    f"hotset.batched must be in transform= of hotset.cache, got it in {attribute.name} of "
                    f"{type(dataset).__name__}, which transforms one sample at a time."
                )
        return cls(dataset, own, given if of_format is None else (of_format, *given))

    def cut(self, cuts: Cuts) -> Source:
        """Cut each chain as ``cuts`` says."""
        prefixes: dict[str, Chain] = {}
        calls: dict[ChainCall, list[Sequence[SamplePath]]] = {}
        cached: list[Any] = []
        live: list[Transform] = []
        for attribute, own in zip(self.attributes, cuts.own, strict=True):
            if own.cached == UNUSED:
                cached.append(attribute.chain)  # a rare sample may use it
                continue
            before, after = cut(attribute.chain, own.cached)
            cached += before
            if after or own.in_place:
                prefixes[attribute.name] = Chain(before, own.in_place, attribute.name if after else None)
            if not after:
                continue
            together: list[Sequence[SamplePath]]
            together = [(path,) for path in own.paths] if own.for_each else [own.paths]
            call = (attribute.name, *own.keywords)
            calls[call] = together
            live += [ApplyAt(each, after, own.keywords) for each in together]
        before, after = cut(self.given, cuts.given)
        dataset = with_transforms(self.dataset, prefixes)
        prefix = tuple(_with_batched_alone(before))
        return Source(dataset, tuple(cached), prefix, (*live, *after), self.dataset, calls)


class ChainCut(NamedTuple):
    """Where one of the dataset's own chains is cut.

    Attributes:
        cached: how many of its leaf transforms are; :data:`UNUSED` if it was not called as samples were
            read.
        paths: where its results are in the sample; empty if it is not cut.
        keywords: the names with which the dataset gives it the values at these paths; empty if it gets them
            without names.
        in_place: whether it was seen to change its input, so that it gets copies.
        for_each: whether it is called several times for a sample, with one value each: once for each path, in
            their order. Any other is called once, with the values at all paths.
    """

    cached: int
    paths: tuple[SamplePath, ...] = ()
    keywords: tuple[str, ...] = ()
    in_place: bool = False
    for_each: bool = False


class Cuts(NamedTuple):
    """Where chains are cut.

    Attributes:
        own: the dataset's own chains.
        given: how many leaf transforms of ``transform=`` are cached; 0 if part of an own chain is live.
    """

    own: tuple[ChainCut, ...]
    given: int

    @property
    def where(self) -> list[Any]:
        """The fields that decide what a cached sample contains, as JSON types."""
        return [[[each.cached, each.paths, each.for_each] for each in self.own], self.given]

    @classmethod
    def from_json(cls, value: Any) -> Cuts:
        """Those that JSON has made lists of."""
        own, given = value
        return cls(
            tuple(
                ChainCut(cached, tuple(map(tuple, paths)), tuple(keywords), in_place, for_each)
                for cached, paths, keywords, in_place, for_each in own
            ),
            given,
        )


@dataclass(frozen=True)
class Source:
    """A dataset and its chains, cut in two.

    Attributes:
        dataset: gives samples by index; applies only the first parts of its own chains that were cut.
        inner: the transforms that the dataset itself still applies.
        prefix: the transforms of whole samples that are cached; a :class:`Batched` is in no container.
        live: the transforms that are applied to each use of a sample.
        whole: the dataset with its own chains whole.
        calls: for each of the dataset's chains that are cut, and each call of it for one sample, the paths at
            which its results are.
        otherwise: the indices of samples of which that is not true.
        stores: whether samples are cached; if they are not, and no transform follows, they are given as the
            dataset returns them, the objects that it holds too.
    """

    dataset: Any
    inner: tuple[Transform, ...]
    prefix: tuple[Transform, ...]
    live: tuple[Transform, ...]
    whole: Any = None
    calls: Mapping[ChainCall, Sequence[Sequence[SamplePath]]] = field(default_factory=dict)
    otherwise: set[int] = field(default_factory=set)
    stores: bool = True

    @property
    def cached_steps(self) -> list[Any]:
        """The leaf transforms that run as a sample is read for the cache, in order."""
        return leaves((*self.inner, *self.prefix))

    @property
    def read_parts(self) -> list[Any]:
        """What may draw random numbers when a sample is read: the whole chains, too, if some are cut."""
        return [self.dataset, *filter(None, (self.prefix,)), *([self.whole] if self.calls else [])]

    @property
    def random_parts(self) -> list[Any]:
        """What may draw random numbers when a sample is used: the live part, and samples read each time."""
        return [*filter(None, (self.live,)), *self.read_parts]

    @property
    def batched(self) -> list[Batched]:
        """The steps that take several samples at once."""
        return [step for step in self.prefix if isinstance(step, Batched)]

    def halves(self) -> tuple[Source, tuple[Transform, ...]]:
        """What reads each sample by itself, and the cached transforms from the first batched one on."""
        first = next((n for n, step in enumerate(self.prefix) if isinstance(step, Batched)), len(self.prefix))
        return replace(self, prefix=self.prefix[:first]), self.prefix[first:]

    def read(self, index: int) -> Any:
        """Read one sample and apply the cached transforms. The caller owns the result, if any is stored.

        :data:`IN_TURN` is returned for a sample that must be read whole (:meth:`read_whole`).

        Each transform's output is copied if needed as well: it may come from a table in the transform.

        Raises:
            SampleStopped: the dataset or a transform raised StopIteration.
        """
        try:
            if self._gives_on:
                return row_of(self.dataset, index)
            if index not in self.otherwise:
                return self.read_cut(index)
        except StopIteration as stop:
            raise SampleStopped(*stop.args) from stop
        except CannotBeCut:
            self.otherwise.add(index)
        return IN_TURN

    def read_cut(self, index: int) -> Any:
        """As :meth:`read`, but there is an error for a sample that must be read whole.

        Raises:
            CannotBeCut: the dataset does not treat its chains as planned in this sample.
            StopIteration: the dataset or a transform raised it.
        """
        if not self.calls:
            return self._transformed(owned(row_of(self.dataset, index), _warn_of_uncopied))
        found: list[Any] = []  # taken from it, so that no variable refers to the sample any more
        with noted() as made:
            try:
                found.append(row_of(self.dataset, index))
            except own_errors() as error:
                if made:  # it may not accept what its chain has returned
                    raise self._cannot_be_cut(index) from error
                raise
            planned = are_at(self.calls, found, made)
        if not planned:
            raise self._cannot_be_cut(index)
        return self._transformed(owned(found.pop(), _warn_of_uncopied))

    def _cannot_be_cut(self, index: int) -> CannotBeCut:
        kind = type(self.whole).__name__
        return CannotBeCut(
            f"{kind} calls its transforms in another way in sample {index}, or works on what they return; "
            "give them as transform=[...] to hotset.cache."
        )

    def read_whole(self, index: int) -> Any:
        """As :meth:`read`, with all of the dataset's own chains, in the turn of this use, as it may draw."""
        return WholeSample(self._uncut().read(index)) if self.calls else self.read(index)

    def read_many_whole(self, indices: Sequence[int]) -> Iterator[Any]:
        """As :meth:`read_whole`, for several samples, as :meth:`read_many` reads them."""
        return map(WholeSample, self._uncut().read_many(indices)) if self.calls else self.read_many(indices)

    def _uncut(self) -> Source:
        return replace(self, dataset=self.whole, calls={}, otherwise=set())

    def read_many(self, indices: Sequence[int]) -> Iterator[Any]:
        """As :meth:`read`, for several samples: with the dataset's ``__getitems__``, if it has one.

        The planner has compared what the two return. If ``__getitems__`` raises, each sample is read by
        itself, so that the exception comes at the sample that it is about.

        Raises:
            ArgumentError: ``__getitems__`` returned more or fewer samples than it was asked for.
        """
        if self.batched:
            alone, together = self.halves()
            return transformed(alone.read_many(indices), together)
        return self._read_group(indices)

    def _read_group(self, indices: Sequence[int]) -> Iterator[Any]:
        several = getattr(self.dataset, "__getitems__", None)
        if several is None or not self.otherwise.isdisjoint(indices):  # their draws are those of the whole
            yield from map(self.read, indices)
            return
        found: list[Any] | None = None
        planned = False
        try:
            with noted() as made:
                found = list(several(list(indices)))
                planned = are_at(self.calls, found, made)
        except own_errors() as error:
            if self.calls:
                pass  # it may not accept what its chain has returned for one of them
            elif len(indices) > 1:
                for index in indices:
                    yield from self._read_group([index])
                return
            elif isinstance(error, StopIteration):
                raise SampleStopped(*error.args) from error
            else:
                raise
        if found is not None and len(found) != len(indices):
            kind = type(self.dataset).__name__
            raise ArgumentError(
                f"{kind}.__getitems__ must return one sample for each index, got {len(found)} samples for "
                f"{len(indices)} indices."
            )
        if found is None or not planned:
            del found
            yield from map(self.read, indices)
            return
        found.reverse()  # taken from the end, so that no list refers to a sample any more
        while found:
            yield found.pop() if self._gives_on else self._transformed(owned(found.pop(), _warn_of_uncopied))

    @property
    def _gives_on(self) -> bool:
        """Whether samples are the dataset's own, as without hotset: nothing here may change them."""
        return not (self.stores or self.prefix or self.live)

    def of_stream(self, samples: Iterator[Any]) -> Any:
        """As :meth:`read`, for the next sample of an iterator.

        Raises:
            StopIteration: there is none.
        """
        if not self.prefix and not self.live:
            return next(samples)  # it is stored before the user gets it, and nothing changes it before that
        return self._transformed(owned(next(samples), _warn_of_uncopied))

    def _transformed(self, sample: Any) -> Any:
        for step in self.prefix:
            sample = owned(applied(step, sample), _warn_of_uncopied)
        return sample

    def finish(self, sample: Any) -> Any:
        """Apply the live transforms to a sample that the caller owns."""
        steps = self.live
        if type(sample) is WholeSample:
            sample, steps = sample.value, tuple(step for step in steps if not isinstance(step, ApplyAt))
        for step in steps:
            sample = applied(step, sample)
        return sample

    def finish_batch(self, samples: Iterable[Any]) -> list[Any]:
        """Apply the live transforms to the samples of a batch, each of which the caller owns, in order."""
        first = self.live[0] if self.live else None
        if not isinstance(first, BatchTransform):
            # Each sample is finished before the next is taken: reading that one may draw.
            return [self.finish(sample) for sample in samples]
        rest = replace(self, live=self.live[1:])
        return [rest.finish(sample) for sample in first.many(list(samples))]


_warn_once = Warner()


class WholeSample:
    """A sample to which the dataset has applied all of its own chains, those that are cut too."""

    def __init__(self, value: Any) -> None:
        self.value = value


def transformed(samples: Iterator[Any], steps: Sequence[Transform]) -> Iterator[Any]:
    """Apply cached transforms, some of which take several samples at once, to samples that come in order."""
    for step in steps:
        samples = _together(step, samples) if isinstance(step, Batched) else _each(step, samples)
    return samples


def _each(step: Transform, samples: Iterator[Any]) -> Iterator[Any]:
    for sample in samples:
        yield owned(applied(step, sample), _warn_of_uncopied)


def _together(step: Batched, samples: Iterator[Any]) -> Iterator[Any]:
    """Apply a step to as many samples at once as it takes; an exception comes at the sample it is about."""
    failed: Exception | None = None
    while failed is None:
        group: list[Any] = []
        try:
            group += itertools.islice(samples, step.size)
        except Exception as error:
            failed = error
        if not group and failed is None:
            return
        yield from _rows_of(step, group)
    raise failed


def _rows_of(step: Batched, group: list[Any]) -> Iterator[Any]:
    try:
        rows = step.many(group) if group else []
    except (ArgumentError, NotCacheable):
        raise
    except own_errors() as error:
        if len(group) == 1:
            raise
        for sample in group:
            yield owned(applied(step, sample), _warn_of_uncopied)
        _warn_once(
            f"{step!r} raised {type(error).__name__} ({error}) for {len(group)} samples at once, and not for "
            "each of them, so it got them one by one, which is slower; give it a smaller size=.",
            repr(step),
        )
        return
    rows.reverse()  # taken from the end, so that no list refers to a row any more
    while rows:
        yield owned(rows.pop(), _warn_of_uncopied)


def _with_batched_alone(steps: Sequence[Transform]) -> list[Transform]:
    """The same steps, with each :class:`Batched` outside of the container it was in."""
    parts: list[Transform] = []
    rest, passed = list(steps), 0
    for number, step in enumerate(leaves(steps)):
        if isinstance(step, Batched):
            before, after = cut(rest, number - passed)
            parts += [*before, step]
            _, rest = cut(after, 1)
            passed = number + 1
    return [*parts, *rest]


def _warn_of_uncopied(part: object, error: Exception) -> None:
    """Warn, once per process and type, that transforms get an object that the dataset still holds."""
    kind = type(part).__name__
    _warn_once(
        f"the samples hold a {kind}, which cannot be copied ({error}), so transforms get the dataset's own: "
        "a transform that works in place changes the dataset. Let the dataset return arrays or tensors.",
        kind,
    )


class Chain:
    """Transforms applied one after the other, in place of a dataset's own chain.

    Args:
        copies: apply them to copies. (``__getitem__`` holds a reference to the chain's input while it runs,
            so reference counts cannot tell whether the dataset holds one, too.)
        name: under which its calls are noted; None: they are not.
    """

    def __init__(self, parts: Sequence[Transform], copies: bool = False, name: str | None = None) -> None:
        self.parts = tuple(parts)
        self._copies = copies
        self._name = name

    def __call__(self, *values: Any, **named: Any) -> Any:
        call, given = (self._name or "", *named), (*values, *named.values())
        if self._copies:
            values, named = copied((values, named), _warn_of_uncopied)
        value: Any = named or (values[0] if len(values) == 1 else Values(values))
        for part in self.parts:
            value = part(**value) if named else applied(part, value)
        result = tuple(value) if isinstance(value, Values) else value
        return note(call, given, result, _warn_of_uncopied) if self._name is not None else result


class ApplyAt:
    """Applies transforms to the value at one path of a sample, or to several values at once."""

    def __init__(
        self, paths: Sequence[SamplePath], steps: Sequence[Transform], keywords: Sequence[str]
    ) -> None:
        self.paths = tuple(paths)
        self.steps = tuple(steps)
        self.keywords = tuple(keywords)

    def __call__(self, sample: Any) -> Any:
        values = [value_at(sample, path) for path in self.paths]
        chain = Chain(self.steps)
        if self.keywords:
            named = chain(**dict(zip(self.keywords, values, strict=True)))
            made = [named[keyword] for keyword in self.keywords]
        else:
            made = chain(*values) if len(values) > 1 else [chain(*values)]
        for path, value in zip(self.paths, made, strict=True):
            sample = _put(sample, path, value)
        return sample


def _put(sample: Any, path: SamplePath, value: Any) -> Any:
    """The sample with another value at this path; dicts and lists, which the caller owns, are changed."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(sample, tuple):
        parts = list(sample)
        parts[key] = _put(parts[key], rest, value)
        return getattr(sample, "_make", tuple)(parts)
    sample[key] = _put(sample[key], rest, value)
    return sample


def chain_of(transform: Transform | Sequence[Transform] | None) -> tuple[Transform, ...]:
    """A chain as a tuple: of one transform or container, or of a list or tuple of them.

    Raises:
        ArgumentError: a part is not callable.
    """
    if transform is None:
        return ()
    given: Any = transform
    parts: tuple[Transform, ...] = tuple(given) if is_list(given) else (given,)
    for part in leaves(parts):
        if not callable(part):
            raise ArgumentError(f"transform= must be a callable or a list of callables, got {part!r}.")
    return parts


def _require_map_style(dataset: Any) -> None:
    kind = type(dataset).__name__
    if issubclass(type(dataset), type) and not hasattr(type(dataset), "__len__"):
        raise ArgumentError(f"dataset must be an object, got the class {dataset.__name__}; make one of it.")
    if not hasattr(dataset, "__getitem__"):
        raise ArgumentError(
            f"hotset.cache needs a dataset with dataset[i] and len(dataset), got an object of type {kind}."
        )
    if not hasattr(dataset, "__len__"):
        raise ArgumentError(
            f"hotset.cache needs a dataset with a length, and {kind} has no __len__; give it one if its "
            "samples have numbers. A dataset that takes other indices (lists of cuts, names) cannot be "
            "cached: memoise what reads a sample, with hotset.memo."
        )
    if len(dataset) == 0:
        raise ArgumentError(f"hotset.cache needs at least one sample, and the dataset ({kind}) is empty.")
