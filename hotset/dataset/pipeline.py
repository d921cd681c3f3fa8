"""The source: where a sample comes from, up to the cut, and what is done to it live, after the cut.

::

    dataset[i] ── its own transforms, first part ── `transform=`, first part ──│── the rest, for each use
    ╰────────────────────────── read(i), cached ──────────────────────────────╯  ╰──────── live ────────╯

A chain given as ``transform=`` takes whole samples, so cutting it is easy. A data set's own transforms
(:mod:`hotset.dataset.transform_attributes`) take *parts* of the sample, the picture, say, and not the label,
and are called inside ``__getitem__``. So the data set is copied shallowly, the copy is given only a chain's
first part, and
a sample is read to see where in it the results turn up: the rest of the chain then works on these places of
the cached sample. Where a result turns up nowhere, or more than once, because the data set goes on working
on it, the chain cannot be cut there: it stays whole, and its results are cached or none.

What the data set hands out may be its own still: an item of a list, a view of a tensor. A sample is the
reader's before anything works on it (:mod:`hotset.determinism.aliasing`); and a chain inside ``__getitem__``
that was seen to work in place gets copies. So the data set stays as it was, however often a sample is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from hotset._warnings import Warner
from hotset.dataset.transform_attributes import TransformAttribute, transform_attributes_of, with_transforms
from hotset.determinism.aliasing import copied, owned, owns_all
from hotset.determinism.chain import Values, applied, cut, leaves
from hotset.determinism.equality import changeable
from hotset.errors import ArgumentError

__all__ = [
    "Chain",
    "Cuts",
    "Pipeline",
    "Recorder",
    "SamplePath",
    "Source",
    "chain_of",
    "find_paths",
    "gives_its_own",
    "recorded",
]

Transform = Callable[..., Any]
# Where something is in a sample: keys from the root.
SamplePath = tuple[Any, ...]


@dataclass(frozen=True)
class Pipeline:
    """A data set and its chains, before it is known where to cut.

    Attributes:
        dataset: the user's.
        sites: its own chains.
        given: the chain given as ``transform=``.
    """

    dataset: Any
    sites: tuple[TransformAttribute, ...]
    given: tuple[Transform, ...]

    @property
    def steps(self) -> list[Any]:
        """The leaf transforms of all chains, in the order of the plan's rows."""
        return [*(step for site in self.sites for step in leaves(site.chain)), *leaves(self.given)]

    @classmethod
    def of(cls, dataset: Any, transform: Transform | Sequence[Transform] | None) -> Pipeline:
        """Find the chains.

        Raises:
            ArgumentError: the data set is iterable, has no length, or is empty; a transform cannot be called.
        """
        _require_map_style(dataset)
        return cls(dataset, transform_attributes_of(dataset), chain_of(transform))

    def cut(self, cuts: Cuts) -> Source:
        """Cut each chain where it is said."""
        prefixes: dict[str, Chain] = {}
        cached: list[Any] = []
        live: list[Transform] = []
        found = zip(self.sites, cuts.own, cuts.places, cuts.in_place, strict=True)
        for site, count, places, in_place in found:
            before, after = cut(site.chain, count)
            cached += before
            if after or in_place:
                prefixes[site.name] = Chain(before, copies=in_place)
            if after:
                live.append(At(places, after))
        before, after = cut(self.given, cuts.given)
        dataset = with_transforms(self.dataset, prefixes)
        return Source(dataset, tuple(cached), tuple(before), (*live, *after))


@dataclass(frozen=True)
class Cuts:
    """Where chains are cut.

    Attributes:
        own: for each of the data set's own chains how many leaf transforms are cached.
        places: for each of them where in the sample its results are; empty for one that is not cut.
        given: how many leaf transforms of ``transform=`` are cached; 0 where one of the own ones is live.
        in_place: for each of the own chains whether it was seen to change what it is given, and gets copies.
    """

    own: tuple[int, ...]
    places: tuple[tuple[SamplePath, ...], ...]
    given: int
    in_place: tuple[bool, ...]

    @property
    def where(self) -> list[Any]:
        """What decides about the content of a sample, as JSON's types."""
        return [list(self.own), [[list(place) for place in places] for places in self.places], self.given]

    def to_json(self) -> list[Any]:
        """As JSON's types."""
        return [*self.where, list(self.in_place)]

    @classmethod
    def from_json(cls, value: Any) -> Cuts:
        """Read what :meth:`to_json` gave; or :attr:`where`, as it stands in caches of earlier versions."""
        own, places, given, *rest = value
        in_place = rest[0] if rest else [False] * len(own)
        tuples = tuple(tuple(tuple(place) for place in each) for each in places)
        return cls(tuple(own), tuples, given, tuple(in_place))


@dataclass(frozen=True)
class Source:
    """A data set and its chains, cut in two.

    Attributes:
        dataset: gives samples by number; its own transforms are their first parts only, where they were cut.
        inner: transforms that the data set itself still applies.
        prefix: transforms of whole samples that are cached with it.
        live: transforms applied to each use of a sample.
    """

    dataset: Any
    inner: tuple[Transform, ...]
    prefix: tuple[Transform, ...]
    live: tuple[Transform, ...]

    @property
    def random_parts(self) -> list[Any]:
        """What may draw random numbers when a sample is used: the live part, and what is read each time."""
        return [part for part in (self.live, self.dataset, self.prefix) if part != ()]

    def read(self, index: int) -> Any:
        """Read one sample and take it as far as it is cached; it is the caller's own.

        A step's result is looked at as well: a step may look it up in a table of its own.
        """
        sample = owned(self.dataset[index], _tell_of_refused)
        for step in self.prefix:
            sample = owned(step(sample), _tell_of_refused)
        return sample

    def finish(self, sample: Any) -> Any:
        """Apply the live transforms to a sample that is the caller's own."""
        for step in self.live:
            sample = step(sample)
        return sample


_tell_once = Warner()


def _tell_of_refused(part: object, error: Exception) -> None:
    """Say, once in this process, that the transforms get something that is the data set's still."""
    kind = type(part).__name__
    _tell_once(
        f"the samples hold a {kind}, which cannot be copied ({error}), so transforms get the data set's own: "
        "one that works in place on it changes the data set. Let the data set give arrays or tensors.",
        kind,
    )


class Chain:
    """Transforms applied one after the other; stands in for a data set's own.

    Args:
        parts: they.
        copies: apply them to copies. (The data set's ``__getitem__`` refers to what it gives to its chain, so
            that it cannot be seen whether anybody else does.)
    """

    def __init__(self, parts: Sequence[Transform], copies: bool = False) -> None:
        self.parts = tuple(parts)
        self._copies = copies

    def __call__(self, *values: Any) -> Any:
        if self._copies:
            values = copied(values, _tell_of_refused)
        value = values[0] if len(values) == 1 else Values(values)
        for part in self.parts:
            value = applied(part, value)
        return tuple(value) if isinstance(value, Values) else value


class At:
    """Applies transforms to one place of a sample, or to several at once."""

    def __init__(self, places: Sequence[SamplePath], steps: Sequence[Transform]) -> None:
        self.places = tuple(places)
        self.steps = tuple(steps)

    def __call__(self, sample: Any) -> Any:
        values = [_get(sample, place) for place in self.places]
        made = Chain(self.steps)(*values)
        for place, value in zip(self.places, made if len(values) > 1 else [made], strict=True):
            sample = _put(sample, place, value)
        return sample


def _get(sample: Any, place: SamplePath) -> Any:
    for key in place:
        sample = sample[key]
    return sample


def _put(sample: Any, place: SamplePath, value: Any) -> Any:
    """The sample with another value there; dicts and lists, which are the caller's own, are changed."""
    if not place:
        return value
    key, rest = place[0], place[1:]
    if isinstance(sample, tuple):
        parts = list(sample)
        parts[key] = _put(parts[key], rest, value)
        return type(sample)._make(parts) if hasattr(sample, "_make") else tuple(parts)
    sample[key] = _put(sample[key], rest, value)
    return sample


# Looking into a data set


class Recorder(Chain):
    """Stands in for a data set's own chain while a sample is read, and keeps what came in and went out.

    What it returns is a copy in any case: the data set may go on working on it in place.

    Attributes:
        came: for each call the value, or :class:`Values`.
        named: for each call with keywords, as albumentations' chains are called, what came with them.
        begun: when it was called last, to tell which of two chains comes first.
        went: for each call what was returned.
        digests: and what that was like then.
        spent: seconds that all calls took together.
    """

    def __init__(self, parts: Sequence[Transform] = ()) -> None:
        super().__init__(parts, copies=True)
        self.came: list[Any] = []
        self.named: list[dict[str, Any]] = []
        self.went: list[Any] = []
        self.digests: list[dict[str, bytes]] = []
        self.begun = 0
        self.spent = 0.0

    @property
    def otherwise(self) -> bool:
        """Whether it was called with keywords, or without a value."""
        return bool(self.named)

    def __call__(self, *values: Any, **named: Any) -> Any:
        if named or not values:
            self.named.append(named)
            raise TypeError("called with keywords")
        self.begun = time.perf_counter_ns()
        self.came.append(values[0] if len(values) == 1 else Values(values))
        made = super().__call__(*values)
        self.went.append(made)
        self.digests.append(changeable(made))
        self.spent += (time.perf_counter_ns() - self.begun) / 1e9
        return made


def recorded(
    uncut: Pipeline, index: int, prefixes: Sequence[Sequence[Transform]]
) -> tuple[Any, list[Recorder]]:
    """Read a sample with these first parts in place of the data set's own chains.

    Returns:
        The sample, and for each chain its recorder. The sample is the exception, where there was one after
        all recorders were called, or one was called otherwise: the data set may not like what it gets back.

    Raises:
        Exception: what the data set raises before that.
    """
    recorders = [Recorder(parts) for parts in prefixes]
    named = {site.name: recorder for site, recorder in zip(uncut.sites, recorders, strict=True)}
    try:
        return with_transforms(uncut.dataset, named)[index], recorders
    except Exception as error:
        if any(recorder.otherwise for recorder in recorders) or all(r.went for r in recorders):
            return error, recorders
        raise


def find_paths(sample: Any, recorder: Recorder) -> tuple[SamplePath, ...] | None:
    """Where in a sample the results of its chain are, each in one place; None if that is not so."""
    if recorder.otherwise or len(recorder.went) != 1:
        return None
    came, made = recorder.came[0], recorder.went[0]
    now, before = changeable(made), recorder.digests[0]
    if any(now.get(part, digest) != digest for part, digest in before.items() if part):
        return None  # changed in place since; something added to the sample itself is no change of the result
    results = [made]
    if isinstance(came, Values):
        if not isinstance(made, tuple) or len(made) != len(came):
            return None
        results = list(made)
    found = [_find(sample, result) for result in results]
    places = tuple(each[0] for each in found if len(each) == 1)
    return places if len(places) == len(results) == len(set(places)) else None


def gives_its_own(uncut: Pipeline, index: int) -> list[bool]:
    """For each of a data set's own chains whether it is given what somebody else refers to as well.

    The data set's ``__getitem__`` does as long as it runs; so this is asked when it is over.
    """
    _, recorders = recorded(uncut, index, [()] * len(uncut.sites))
    given: list[list[Any]] = []
    while recorders:
        recorder = recorders.pop(0)
        came = [value for each in recorder.came for value in (each if isinstance(each, Values) else [each])]
        came += [value for named in recorder.named for value in named.values()]
        given.append(list({id(value): value for value in came}.values()))
    del recorder, came, _
    return [not owns_all(values) for values in given]


def _find(sample: Any, wanted: Any, depth: int = 0) -> list[SamplePath]:
    """Every place in a sample where this very object is."""
    if sample is wanted:
        return [()]
    if depth > 4:
        return []
    items: Any = ()
    if type(sample) is dict:
        items = sample.items()
    elif isinstance(sample, (list, tuple)):
        items = enumerate(sample)
    return [(key, *rest) for key, part in items for rest in _find(part, wanted, depth + 1)]


def chain_of(transform: Transform | Sequence[Transform] | None) -> tuple[Transform, ...]:
    """A chain as a tuple: of one transform or container, or of a list or tuple of them.

    Raises:
        ArgumentError: a part cannot be called.
    """
    if transform is None:
        return ()
    parts = tuple(transform) if isinstance(transform, (list, tuple)) else (transform,)
    for part in leaves(parts):
        if not callable(part):
            raise ArgumentError(f"transform= takes callables, and {part!r} is none.")
    return parts


def _require_map_style(dataset: Any) -> None:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise ArgumentError(
            f"hotset.cache needs a data set, with dataset[i] and len(dataset), and {kind} is none."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ArgumentError(
            f"hotset.cache needs a data set that gives sample i as dataset[i], and {kind} is iterable only; "
            "load it with hotset.DataLoader as it is."
        )
    if not hasattr(dataset, "__len__"):
        raise ArgumentError(f"hotset.cache needs a data set with a length, and {kind} has none.")
    if len(dataset) == 0:
        raise ArgumentError(f"the data set ({kind}) is empty: there is nothing to cache.")
