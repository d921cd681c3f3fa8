"""Recorders: what a dataset does with its own chains of transforms, seen by reading a few samples.

A :class:`Recorder` takes the place of a chain in a copy of the dataset while a sample is read. It shows how
often the chain is called, with what, from where, and where in the sample its results are: these are the very
objects that the recorder returned. A dataset that copies or processes them has them nowhere.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from hotset._interrupts import own_errors
from hotset.dataset.chain_calls import ATOMS, SamplePath, places_of
from hotset.dataset.pipeline import Chain, Pipeline, Transform
from hotset.dataset.planning.call_sites import CallSite, call_sites, reaction
from hotset.dataset.source_reader import seconds_in_groups, spread
from hotset.dataset.transform_attributes import TRANSFORM_NAMES, CopiedAttributes, with_transforms
from hotset.determinism.aliasing import have_common_memory, owns_all
from hotset.determinism.chain import Values, leaves, takes_keywords
from hotset.determinism.equality import content_digests
from hotset.determinism.fingerprint.content_hash import mapped_files
from hotset.determinism.objects.safe_access import attributes_of
from hotset.determinism.timing import typical

__all__ = ["RecordedSamples", "Recorder", "find_paths", "passes_shared_objects", "recorded"]

_SAMPLES = 4
_READ_SECONDS = 0.25
_PARTS = 8
_MOST_TIMES = 500  # in a row with one value: crops of one picture are some tens
_MOST_EQUAL = 20_000  # of numbers and strings


class Recorder(Chain):
    """Replaces a dataset's own chain while a sample is read, and records its inputs and outputs.

    It always returns a copy, as the dataset may process the output further in place. A dataset that calls its
    chain with one value until it likes what a random transform made of it would never end: it gets an error.

    Attributes:
        inputs: for each call the value, :class:`Values`, or the dict of values that were given by name.
        keywords: for each call these names; none for values without names.
        refused: the arguments of each call that it refuses: with names that its chain does not return, or
            without a value.
        given_dataset: whether it was called with the dataset itself, which it refuses as well: to copy and to
            compare all that a dataset holds may take hours.
        first_called, last_called: when it was called, to tell which of two chains comes first.
        callers: for each call, where it came from.
        outputs: for each call what was returned.
        digests: for each output its digests at that time.
        seconds: the sum over all calls.
    """

    def __init__(self, parts: Sequence[Transform], takes_names: bool, name: str) -> None:
        super().__init__(parts, copies=True)
        self._attribute = name
        self.inputs: list[Any] = []
        self.keywords: list[tuple[str, ...]] = []
        self.refused: list[dict[str, Any]] = []
        self.given_dataset = False
        self._takes_names = takes_names
        self.callers: list[tuple[CallSite, ...]] = []
        self.outputs: list[Any] = []
        self.digests: list[dict[str, bytes]] = []
        self.first_called = self.last_called = 0
        self.seconds = 0.0
        self._last: Any = None
        self._times_last = 0

    def __call__(self, *values: Any, **named: Any) -> Any:
        if any(map(self._is_held_by, _with_parts((*values, *named.values())))):
            self.given_dataset = True
            raise TypeError("called with the dataset")
        if bool(named) == bool(values) or (named and not self._takes_names):
            self.refused.append(named)
            raise TypeError("called with keywords")
        first = next(iter((*values, *named.values())))
        if first is self._last:
            self._times_last += 1
            if self._times_last > _MOST_TIMES and self._is_tried_again(first):
                raise RuntimeError("called again and again with one value")
        else:
            self._last, self._times_last = first, 1
        self.last_called = time.perf_counter_ns()
        self.first_called = self.first_called or self.last_called
        self.inputs.append(named or (values[0] if len(values) == 1 else Values(values)))
        self.keywords.append(tuple(named))
        self.callers.append(call_sites(recorded.__code__))
        output = _as_new(super().__call__(*values, **named))
        self.outputs.append(output)
        self.digests.append(content_digests(output))
        self.seconds += (time.perf_counter_ns() - self.last_called) / 1e9
        return output

    def _is_tried_again(self, value: Any) -> bool:
        """Whether the dataset calls the chain with one value until it likes what it gets, as it seems.

        Equal numbers and strings, such as the tags of a text, may be one object: there its code tells.
        """
        if not isinstance(value, ATOMS) or self._times_last > _MOST_EQUAL:
            return True
        return self._times_last == _MOST_TIMES + 1 and reaction(self.callers[-1], self._attribute) is not None

    def _is_held_by(self, value: Any) -> bool:
        """Whether this is the copy of the dataset in which the recorder is: as an attribute, or in a list."""
        for held in (attributes_of(value) or {}).values():
            if held is self or (type(held) in (list, tuple) and any(each is self for each in held[:1])):
                return True
        return False


def recorded(
    pipeline: Pipeline, index: int, prefixes: Sequence[Sequence[Transform] | None]
) -> tuple[Any, list[Recorder]]:
    """Read a sample with these first parts in place of the dataset's own chains; None leaves a chain there.

    Returns:
        The sample, and the recorder of each chain. If the dataset raises after all recorders were called, or
        after one was called with keywords or with the dataset, the exception is returned in place of the
        sample: the dataset may not accept what the recorder returned.

    Raises:
        Exception: what the dataset raises before that.
    """
    recorders = [
        Recorder(parts or (), all(map(takes_keywords, map(type, leaves(attribute.chain)))), attribute.name)
        for attribute, parts in zip(pipeline.attributes, prefixes, strict=True)
    ]
    named = {
        attribute.name: recorder
        for attribute, recorder, parts in zip(pipeline.attributes, recorders, prefixes, strict=True)
        if parts is not None
    }
    twin = with_transforms(pipeline.dataset, named)
    # The next copy shares what this one has put into containers, so it needs the attributes that go with it.
    read = CopiedAttributes(twin, pipeline.dataset)
    try:
        return twin[index], recorders
    except own_errors() as error:
        refused = any(recorder.refused or recorder.given_dataset for recorder in recorders)
        if refused or all(recorder.outputs for recorder in named.values()):
            return error, recorders
        raise
    finally:
        read.follow()


def _with_parts(values: tuple[Any, ...]) -> Iterator[Any]:
    """Values, and what tuples, lists and dicts among them begin with."""
    for value in values:
        yield value
        if isinstance(value, (list, tuple, dict)):
            yield from itertools.islice(value.values() if isinstance(value, dict) else value, _PARTS)


def _as_new(value: Any) -> Any:
    """A string as another object: a copy is the same one, which the sample or another chain may get, too."""
    return value[:1] + value[1:] if type(value) is str and len(value) > 1 else value


def find_paths(sample: Any, recorder: Recorder) -> tuple[SamplePath, ...] | None:
    """The path of each of a chain's results in the sample; None unless each is there exactly once."""
    if recorder.refused or not recorder.outputs or len(recorder.outputs) < len(recorder.inputs):
        return None
    results: list[Any] = []
    if len(set(recorder.keywords)) > 1:
        return None
    named = recorder.keywords[0]
    for inputs, output, before in zip(recorder.inputs, recorder.outputs, recorder.digests, strict=True):
        now = content_digests(output)
        if any(now.get(part, digest) != digest for part, digest in before.items() if part):
            return None  # changed in place since; something added to the sample itself changes no result
        if named:
            if (len(named) > 1 and len(recorder.outputs) > 1) or {*named} != {*output}:
                return None
            results += [output[name] for name in named]
        elif not isinstance(inputs, Values):
            results.append(output)
        elif len(recorder.outputs) == 1 and isinstance(output, tuple) and len(output) == len(inputs):
            results += output
        else:
            return None
    found = places_of(sample, results)
    paths = tuple(each[0] for each in found if len(each) == 1)
    return paths if len(paths) == len(results) == len(set(paths)) else None


def passes_shared_objects(pipeline: Pipeline, index: int, left: Collection[int]) -> list[bool]:
    """For each of a dataset's own chains, whether its input is also referred to by another object.

    ``__getitem__`` itself refers to the input while it runs, so the references are counted after it returned.
    Who else refers to the array below ``torch.from_numpy(array)`` is not known: such an input is another's if
    its memory is a file's, or if it has the same memory when it is read once more.

    Args:
        left: numbers of chains that stay where they are, and of which this is not known.
    """
    given = _given_values(pipeline, index, left)
    foreign: list[list[torch.Tensor]] = [[] for _ in given]
    shared = [not owns_all(values, found) for values, found in zip(given, foreign, strict=True)]
    if not any(foreign):
        return shared
    shared = [known or any(map(_is_of_file, found)) for known, found in zip(shared, foreign, strict=True)]
    again = _given_values(pipeline, index, left)
    for number, values in enumerate(again):
        owns_all(values, foreign[number])
    return [known or have_common_memory(found) for known, found in zip(shared, foreign, strict=True)]


def _is_of_file(tensor: torch.Tensor) -> bool:
    return bool(mapped_files([(tensor.data_ptr(), max(tensor.nbytes, 1))]))


def _given_values(pipeline: Pipeline, index: int, left: Collection[int]) -> list[list[Any]]:
    """What a dataset calls each of its own chains with, each object once, referred to by this list alone."""
    _, recorders = recorded(pipeline, index, _recorders_but(left, len(pipeline.attributes)))
    given: list[list[Any]] = []
    while recorders:
        recorder = recorders.pop(0)
        inputs = [
            value
            for each, named in zip(recorder.inputs, recorder.keywords, strict=True)
            for value in (each.values() if named else each if isinstance(each, Values) else [each])
        ]
        inputs += [value for named in recorder.refused for value in named.values()]
        given.append(list({id(value): value for value in inputs}.values()))
    del recorder, inputs, _
    return given


def _recorders_but(left: Collection[int], count: int) -> list[tuple[()] | None]:
    """For :func:`recorded`: a recorder in place of each of so many chains, except of those that are left."""
    return [None if number in left else () for number in range(count)]


class RecordedSamples:
    """A few samples of a dataset, read with recorders in place of its own chains.

    If that fails for all, one is read without recorders: some datasets check the type of their chain.

    Args:
        pipeline: the dataset and its chains; nothing is read if there are none.
        left: the numbers of those of its own chains that stay where they are, and are not recorded.

    Raises:
        Exception: what the dataset raises on all samples.

    Attributes:
        samples: the samples, or the exceptions that :func:`recorded` returned in their place.
        recorders: for each sample, the recorder of each chain; none if it was read without.
        indices: of the samples.
        refusal: what the dataset raises when a recorder is in place of its chain; None if it accepts one.
        seconds: the typical time of reading a sample, without its chains; 0.0 if none was read.
    """

    def __init__(self, pipeline: Pipeline, left: Collection[int] = ()) -> None:
        self._pipeline = pipeline
        self.samples: list[Any] = []
        self.recorders: list[list[Recorder]] = []
        self.indices: list[int] = []
        self.refusal: Exception | None = None
        self._times: list[float] = []
        self._prefixes = _recorders_but(left, len(pipeline.attributes))
        if pipeline.attributes or pipeline.given:
            self._read()
        self.seconds = self._typical_seconds()

    def _read(self) -> None:
        begun = time.perf_counter()
        error: Exception | None = None
        failed: list[int] = []
        for index in spread(len(self._pipeline.dataset), _SAMPLES):
            if self.samples and time.perf_counter() - begun > _READ_SECONDS:
                break
            try:
                sample, recorders = self._timed(index)
            except own_errors() as raised:  # a sample that cannot be read may never be asked for
                error = error or raised
                failed.append(index)
                continue
            self._add(index, sample, recorders)
        if self.samples:
            self._repeat(begun)
            return
        assert error is not None
        # An attribute of another name may not be for the samples alone.
        named = [attribute.name in TRANSFORM_NAMES for attribute in self._pipeline.attributes]
        only_named = [
            prefix if is_named else None for prefix, is_named in zip(self._prefixes, named, strict=True)
        ]
        if only_named != self._prefixes:
            self._prefixes = only_named
            self._read()
        else:
            self._read_without_recorders(failed, error)

    def _add(self, index: int, sample: Any, recorders: list[Recorder]) -> None:
        self.samples.append(sample)
        self.recorders.append(recorders)
        self.indices.append(index)

    def _timed(self, index: int) -> tuple[Any, list[Recorder]]:
        begun = time.perf_counter()
        sample, recorders = recorded(self._pipeline, index, self._prefixes)
        spent = sum(recorder.seconds for recorder in recorders)
        self._times.append(time.perf_counter() - begun - spent)
        return sample, recorders

    def _repeat(self, begun: float) -> None:
        """Read the samples again, for a better measurement of the time."""
        for index in self.indices * 3:
            if time.perf_counter() - begun > _READ_SECONDS:
                break
            try:
                self._timed(index)
            except own_errors():
                continue

    def _read_without_recorders(self, indices: Sequence[int], error: Exception) -> None:
        """Read the first of these samples that the dataset can read with its own chains.

        Raises:
            Exception: what the dataset raises, if it can read none of them.
        """
        own: Exception | None = None
        for index in indices if self._pipeline.attributes else ():
            begun = time.perf_counter()
            try:
                sample = self._pipeline.dataset[index]
            except own_errors() as raised:
                own = own or raised
            else:
                self._times.append(time.perf_counter() - begun)
                self._add(index, sample, [])
                self.refusal = error
                return
        raise own or error

    def _typical_seconds(self) -> float:
        alone = typical(self._times)
        in_groups = getattr(self._pipeline.dataset, "__getitems__", None)
        if not self.samples or in_groups is None or self._pipeline.attributes:
            return alone
        return seconds_in_groups(in_groups, alone, len(self._pipeline.dataset))
