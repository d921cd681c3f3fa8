"""Whether what is cached of a dataset is random, and what follows: refused, believed, or cached in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from hotset._interrupts import own_errors
from hotset.dataset.format_transform import columns_with_gaps, row_of
from hotset.dataset.pipeline import Source
from hotset.dataset.streams.source import as_worker
from hotset.dataset.transform_attributes import transform_attributes_of
from hotset.dataset.wrapped_datasets import datasets_in
from hotset.determinism.declare import declared
from hotset.determinism.draws.draw_watch import others_run
from hotset.determinism.draws.probe import Probe, probe
from hotset.determinism.draws.rng import Generators
from hotset.determinism.equality import content_digests, differs
from hotset.determinism.objects.code_dependencies import names_in
from hotset.determinism.objects.held_values import holds_iterator
from hotset.determinism.objects.reading_names import reading_code
from hotset.determinism.objects.safe_access import attributes_of, is_a
from hotset.errors import NotCacheable

__all__ = ["DECODED_ALONE", "judge_source", "refuse_if_in_order", "refuse_if_of_worker"]

# What helps where no part of the samples can be cached.
DECODED_ALONE = (
    "keep what its decoder returns, with `hotset run`, which needs no changed line, or with hotset.memo"
)
_SEEDS = frozenset({"seed", "manual_seed", "seed_everything", "set_rng_state", "setstate", "set_state"})


def judge_source(
    dataset: Any, source: Source, probed: Probe, *, stored: bool, draws_live: bool
) -> tuple[list[str], bool]:
    """Refuse a random source, unless it is declared deterministic, or only some of its samples draw.

    Args:
        dataset: the user's dataset.
        source: the same, with its cached transforms.
        probed: what a probe of the source saw.
        stored: whether any of the samples that it read can be stored: what is never stored is never frozen.
        draws_live: whether a live transform may draw, so that it matters how generators are seeded.

    Returns:
        Notes for the plan, and whether a declaration is believed against what the probe saw.

    Raises:
        NotCacheable: says what was seen, and what to do.
    """
    if not stored and not probed.moved and not _changes_in_place(source.dataset, probed.differing):
        return ["the samples that were read cannot be cached, so they were not compared"], False
    notes, believed = _judge(dataset, source, probed)
    if draws_live and declared(dataset) != "deterministic" and _seeds_in_workers(dataset):
        raise NotCacheable(
            f"{type(dataset).__name__} seeds generators as it reads in a loader's worker (its code names "
            "get_worker_info): a worker that finds all samples in the cache would not, and live transforms "
            "would draw other numbers than without it. Seed them in the loader's worker_init_fn; or, if that "
            "does not matter, declare it: hotset.deterministic(dataset)."
        )
    if not believed and not probed.drawing:
        _judge_batches(dataset, source)
    return notes, believed


def refuse_if_in_order(dataset: Any, probed: Probe, moved: Sequence[str]) -> None:
    """Refuse a dataset that seems to be made to be read from its first sample to its last alone.

    It keeps the part of the data that it has come to, and fails, or returns something else, for a sample of
    another part. A cache reads samples in any order, and leaves out those that it holds.

    Args:
        dataset: the user's dataset.
        probed: what a probe of it saw.
        moved: its attributes that reading has changed.

    Raises:
        NotCacheable: at least half of the samples could not be read, and reading changes attributes.
    """
    failed, read = probed.failed, len(probed.samples)
    if not moved or len(failed) < read or declared(dataset) == "deterministic":
        return
    index, error = next(iter(failed.items()))
    raise NotCacheable(
        f"{len(failed)} of {len(failed) + read} samples of {type(dataset).__name__}, spread over it, could "
        f"not be read (sample {index} raised {type(error).__name__}: {error}), and reading changes "
        f"{' and '.join(moved[:3])}, so a sample seems to need those before it to be read first; a cache "
        "reads in another order. Let __getitem__ find what it needs by the index alone; or, if these samples "
        "cannot be read in any order, declare it: hotset.deterministic(dataset)."
    ) from error


def refuse_if_of_worker(dataset: Any, source: Source, probed: Probe, forget: Callable[[], None]) -> None:
    """Refuse a dataset of which a sample is another where its reading is told that this process is a worker.

    The first and the last sample are compared, if the code that reads samples asks for the worker at all.

    Args:
        dataset: the user's dataset.
        source: the same, with its cached transforms.
        probed: what a probe of the source saw.
        forget: puts back what reading has set.

    Raises:
        NotCacheable: says how a sample differs.
    """
    if declared(dataset) == "deterministic" or "get_worker_info" not in _names_in_reading(dataset):
        return
    with Generators((dataset,)) as generators:

        def read(index: int, worker: int, workers: int) -> Any:
            try:
                with as_worker(worker, workers, source.dataset):
                    return source.read(index)
            finally:
                forget()
                generators.restore()

        for index in sorted({0, len(dataset) - 1} - set(probed.drawing)):
            try:
                found = differs(read(index, 0, 1), read(index, 1, 2))
            except own_errors():  # a sample that cannot be read may never be asked for
                continue
            if found:
                raise NotCacheable(
                    f"{type(dataset).__name__} returns another sample in a loader's worker than in the main "
                    f"process (sample {index}: {found}; its code names get_worker_info), and a cache serves "
                    "all processes. Let a sample depend on its index alone, and move what depends on the "
                    "worker to transform=[...]; or, if the differences do not matter, declare it: "
                    "hotset.deterministic(dataset)."
                )


def _judge(dataset: Any, source: Source, probed: Probe) -> tuple[list[str], bool]:
    kind = type(dataset).__name__
    seen = (*probed.moved, *probed.differs[:2])  # one sample that differs is enough
    read, drawing = len(probed.samples), probed.drawing
    if not seen:
        some = f"the {read} samples that were read twice were" if read > 1 else "the sample that was read was"
        return [f"{some} alike, and no random number generator moved"], False
    believed = "declared deterministic" if declared(dataset) == "deterministic" else None
    is_random = believed is None and _is_random(source.dataset, drawing or (0,))
    if source.prefix and believed is None and not is_random:
        believed = "the cached transforms are declared deterministic"
    if believed is not None:
        return [f"{believed}, although {text}: draws differ from an uncached run" for text in seen], True
    if is_random and 0 < len(drawing) < read and not probed.differing:
        return [
            f"{len(drawing)} of the {read} samples that were read draw random numbers "
            f"(sample {drawing[0]}, for example: {seen[0]}): such samples come from the source for "
            "each use, and the others are cached"
        ], False
    if not probed.moved and _changes_in_place(source.dataset, probed.differing):
        raise NotCacheable(
            f"{kind}.__getitem__ changes in place what the dataset holds, so that each reading of a sample "
            f"returns another one ({'; '.join(seen)}). Let it work on a copy (`x = x / 2` instead of "
            "`x /= 2`, or .copy() and .clone()), and make the dataset anew: the samples that hotset has read "
            "are changed."
        )
    if not probed.differs:
        raise NotCacheable(
            f"reading a sample of {kind} moves a random number generator ({'; '.join(seen)}), though two "
            "readings were alike. If samples depend on what is drawn, move that part to transform=[...]; if "
            "none does (it seeds the generator, or throws away what it draws), declare it: "
            "hotset.deterministic(dataset)."
            + (" If another thread has drawn, call hotset.cache while none does." if others_run() else "")
        )
    raise NotCacheable(
        f"{kind} returns another sample each time ({'; '.join(seen)}), and a cache would repeat one draw in "
        f"all epochs. {_parts_first(dataset)} the random part to transform=[...], after the part to be "
        f"cached; or {DECODED_ALONE}; or, if the differences do not matter, declare it: "
        "hotset.deterministic(dataset)."
    )


def _parts_first(dataset: Any) -> str:
    """Begins the advice: what a dataset is made of may be cached where the whole cannot."""
    kind = type(dataset)
    if kind is ConcatDataset:
        return "Cache its parts: ConcatDataset([hotset.cache(part), ...]). Or move"
    if kind is StackDataset:
        return "Cache its parts: StackDataset(hotset.cache(part), ...). Or move"
    held = attributes_of(dataset) or {}
    read = reading_code(dataset).names  # a dataset may keep one that it only takes its arrays from
    parts = [name for name, value in held.items() if is_a(value, Dataset) and value is not dataset]
    for iterator in (name for name, value in held.items() if holds_iterator(value)):
        if read is None or iterator in read:  # nobody can put back what was taken from it
            before = f"cache its {parts[0]!r} before you make it. Or move" if parts else "move"
            return (
                f"It holds an iterator ({iterator!r}), from which hotset has taken what training would get: "
                f"make the dataset anew, and {before}"
            )
    name = next((name for name in parts if read is None or name in read), None)
    if name is None or kind is Subset:
        return "Move"
    return (
        f"If it composes samples that it takes by index from its {name!r}, cache that dataset alone: "
        f"dataset.{name} = hotset.cache(dataset.{name}, ...). Otherwise move"
    )


def _seeds_in_workers(dataset: Any) -> bool:
    """Whether the code that reads samples, without the chains, asks for the worker and sets a seed."""
    names = _names_in_reading(dataset)
    return "get_worker_info" in names and not names.isdisjoint(_SEEDS)


def _names_in_reading(dataset: Any) -> frozenset[str]:
    """The names in the code that reads samples, without the chains."""
    chains = {attribute.name for attribute in transform_attributes_of(dataset)}
    functions = [one for each in datasets_in(dataset) for one in reading_code(each, chains).functions]
    return frozenset[str]().union(*(names_in(one.__code__) for one in functions))


def _changes_in_place(dataset: Any, indices: Sequence[int]) -> bool:
    """Whether reading one of these samples changes what an earlier reading has returned."""
    for index in indices[:2]:
        sample = dataset[index]
        before = content_digests(sample)
        dataset[index]
        if content_digests(sample) != before:
            return True
    return False


def _judge_batches(dataset: Any, source: Source) -> None:
    """Refuse a dataset whose ``__getitems__``, which torch's loader prefers, returns other samples.

    The cache reads other batches than the loader asks for. A batch of two is compared: what is computed from
    a whole batch may be right for a batch of one. Rows of Hugging Face datasets are not compared with those
    of ``__getitem__``: in numpy's format a float is float64 in a row, and float32 in a batch.

    Raises:
        NotCacheable: says what to do.
    """
    inner = source.dataset
    while type(inner) is Subset:  # has a __getitems__ of its own, which calls the dataset's if there is one
        inner = inner.dataset
    if declared(dataset) == "deterministic" or not getattr(inner, "__getitems__", None):
        return
    if gaps := columns_with_gaps(inner):
        raise NotCacheable(
            f"column {gaps[0]!r} of {type(dataset).__name__} has whole numbers and None, which its format "
            "makes floats in batches that have a None, so a row is another in other batches; fill in what is "
            f"missing, or cast the column: dataset.cast_column({gaps[0]!r}, datasets.Value('float32'))."
        )
    read = source.dataset.__getitems__

    def read_one(index: int) -> Any:
        return row_of(source.dataset, index)

    indices = sorted({0, len(dataset) - 1})
    # Backwards as well: it may return them in the order of the file.
    if not all(_batch_is_alike(source.dataset, read, read_one, order) for order in (indices, indices[::-1])):
        kind = type(dataset).__name__
        raise NotCacheable(
            f"{kind}.__getitems__ returns other samples than {kind}.__getitem__, or draws random numbers; "
            "torch's loader uses the first, the cache the second. Let both return the same, and move what is "
            "computed from a whole batch to collate_fn; or, if the differences do not matter, declare it: "
            "hotset.deterministic(dataset)."
        )


def _batch_is_alike(
    dataset: Any, read: Callable[..., Any], read_one: Callable[..., Any], indices: Sequence[int]
) -> bool:
    """Whether samples that are read together are those that are read one by one, and none of it draws."""
    with Generators((dataset,)) as generators:
        try:
            together = list(read(list(indices)))
            if generators.moved() or len(together) != len(indices):
                return False
            # One by one, as a dataset may fill the same array for each of them.
            return all(
                differs(read_one(index), one) is None for index, one in zip(indices, together, strict=True)
            )
        except own_errors():  # a sample that cannot be read may never be asked for
            return True


def _is_random(dataset: Any, indices: Sequence[int]) -> bool:
    """Whether the dataset itself, without the cached transforms, is random for these samples."""
    read: Callable[[int], Any] = dataset.__getitem__
    alone = probe(read, indices, (dataset,))
    return bool(alone.moved or alone.differs)
