"""A cached run is bit for bit what the same DataLoader gives without the cache.

Three epochs (cold, warm, warm; two of workers that end with an epoch) are recorded from torch's DataLoader
on the plain dataset: every batch, and the states of ``random``, ``numpy.random``, ``torch`` and the loader's
own generator after ``iter()``, after each batch and after the epoch. Then the same is recorded from hotset's,
and the two must be equal to the bit.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, rarely, rng_states
from live import (
    HeldGenerator,
    draw_all,
    draw_numpy,
    draw_random,
    draw_torch,
    flip_and_crop,
    halve,
    reseed_worker,
    tag_worker,
)
from observed import EPOCHS, compare, record
from samples import (
    bfloat_and_half,
    clip_and_label,
    image_and_label,
    mapping,
    named,
    number,
    ordered_mapping,
    permuted,
    poster_and_label,
    same_content,
    small_float,
    text,
    token_ids,
)
from sources import Batched, Counting, GlobalDraws, Listed, ListedBatches, ReadLog, Samples, Transformed
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

import hotset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

N = 22  # not a multiple of the batch size: the last batch is short
Options = Callable[[Any], dict[str, Any]]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Options] = {
    "sequential": lambda ds: {"batch_size": 4},
    "shuffle": lambda ds: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda ds: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": lambda ds: {"batch_size": 4, "shuffle": True, "generator": _generator(5)},
    "replacement": lambda ds: {
        "batch_size": 4,
        "sampler": RandomSampler(ds, replacement=True, num_samples=17),
    },
    "some_of_all": lambda ds: {"batch_size": 4, "sampler": RandomSampler(ds, num_samples=N - 7)},
    "more_than_all": lambda ds: {"batch_size": 4, "sampler": RandomSampler(ds, num_samples=2 * N + 3)},
    "weighted": lambda ds: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler(np.arange(1, N + 1).tolist(), 19),
    },
    "weighted_own_generator": lambda ds: {
        "batch_size": 5,
        "sampler": WeightedRandomSampler(range(1, N + 1), 19, generator=_generator(6)),
    },
    "draws_each_index": lambda ds: {"batch_size": 4, "sampler": GlobalDraws(N, 18)},
    "distributed": lambda ds: {
        "batch_size": 4,
        "sampler": DistributedSampler(ds, num_replicas=2, rank=1, shuffle=True, seed=3),
    },
    "batch_sampler": lambda ds: {
        "batch_sampler": ListedBatches([[3], [1, 0, 2], list(range(9, 21)), [5, 5]])
    },
    "tensor_indices": lambda ds: {"batch_size": 4, "sampler": Listed([*torch.randperm(N), np.int64(3), -1])},
    "one_by_one": lambda ds: {"batch_size": None, "shuffle": True},
    "batch_of_one": lambda ds: {"batch_size": 1, "shuffle": True},
    "one_big_batch": lambda ds: {"batch_size": 100},
}

SUFFIXES: dict[str, Callable[[], list[Callable[[Any], Any]]]] = {
    "no suffix": list,
    "random": lambda: [draw_random],
    "numpy": lambda: [draw_numpy],
    "torch": lambda: [draw_torch],
    "all": lambda: [flip_and_crop, draw_all],
    "held": lambda: [HeldGenerator()],
}


def check_equal(
    source: Callable[[], Dataset[Any]],
    suffix: Callable[[], list[Callable[[Any], Any]]],
    options: Options,
    *,
    reference: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Record some epochs of both loaders, each over a dataset and transforms of its own, and compare.

    ``reference`` are the arguments of torch's loader that differ.
    """

    def plain() -> DataLoader[Any]:
        dataset = Transformed(source(), suffix())
        return DataLoader(dataset, **options(dataset), **{**more, **(reference or {})})

    transforms = suffix()
    with hotset.cache(source(), transform=transforms or None, memory="64MiB") as cached:

        def ours() -> DataLoader[Any]:
            return hotset.DataLoader(cached, **options(cached), **more)

        expected = record(plain)
        got = record(ours)
        compare(got, expected)
        assert len({moment for moment, _, batch in expected if batch is not None}) >= EPOCHS


# "all" draws what the three draw: each of them meets every third sampler, and all of them in `make chaos`.
# So do a generator that is held, and "all", every other one.
IN_PROCESS = list(itertools.product(SAMPLERS, SUFFIXES))
SINGLE = [
    (sampler, suffix)
    for at, sampler in enumerate(SAMPLERS)
    for number, suffix in enumerate(("random", "numpy", "torch"))
    if at % 3 != number
] + [(sampler, ("all", "held")[at % 2]) for at, sampler in enumerate(SAMPLERS)]


@pytest.mark.parametrize(("sampler", "suffix"), rarely(IN_PROCESS, *SINGLE))
def test_equal_in_process(sampler: str, suffix: str) -> None:
    check_equal(lambda: Samples(image_and_label, N), SUFFIXES[suffix], SAMPLERS[sampler])


@pytest.mark.parametrize("workers", [0, 2])
def test_lists_of_numbers_are_equal(workers: int) -> None:
    check_equal(lambda: Samples(token_ids, N), list, SAMPLERS["shuffle"], num_workers=workers)


FORKED = [(sampler, "no suffix") for sampler in SAMPLERS] + [
    ("shuffle", "held"),
    ("generator", "all"),
    ("weighted", "all"),
    ("draws_each_index", "all"),
    ("batch_sampler", "all"),
    ("one_by_one", "all"),
]


# Without a suffix, the main process gathers from the second epoch on: a few kinds of samplers show that.
_SHOWN_BY = ("shuffle", "some_of_all", "weighted_own_generator", "tensor_indices", "one_by_one")
FORKED_RARELY = [
    *[(sampler, "no suffix") for sampler in SAMPLERS if sampler not in _SHOWN_BY],
    ("generator", "all"),
    ("weighted", "all"),
]


@pytest.mark.parametrize(("sampler", "suffix"), rarely(FORKED, *FORKED_RARELY))
def test_equal_with_forked_workers(sampler: str, suffix: str) -> None:
    check_equal(
        lambda: Samples(image_and_label, N),
        SUFFIXES[suffix],
        SAMPLERS[sampler],
        num_workers=2,
        multiprocessing_context="fork",
    )


@pytest.mark.parametrize(
    ("sampler", "suffix"),
    [pytest.param("shuffle", "no suffix", marks=pytest.mark.chaos), ("draws_each_index", "all")],
)
def test_equal_with_spawned_workers(sampler: str, suffix: str) -> None:
    check_equal(
        lambda: Samples(image_and_label, N),
        SUFFIXES[suffix],
        SAMPLERS[sampler],
        num_workers=1,
        multiprocessing_context="spawn",
        persistent_workers=True,
        reference={"multiprocessing_context": "fork"},
    )


@pytest.mark.parametrize(
    ("suffix", "prefetch"),
    rarely([("no suffix", 1), ("no suffix", 3), ("all", 3), ("held", 1)], ("no suffix", 3), ("held", 1)),
)
def test_equal_with_persistent_workers_and_another_prefetch(suffix: str, prefetch: int) -> None:
    check_equal(
        lambda: Samples(image_and_label, N),
        SUFFIXES[suffix],
        SAMPLERS["draws_each_index"],
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=prefetch,
    )


@pytest.mark.parametrize("workers", rarely([1, 3], 1))
def test_suffix_runs_in_the_worker_that_torch_would_choose(workers: int) -> None:
    check_equal(
        lambda: Samples(image_and_label, N),
        lambda: [hotset.nondeterministic(tag_worker)],
        SAMPLERS["shuffle"],
        num_workers=workers,
    )


def test_equal_when_worker_init_fn_reseeds() -> None:
    check_equal(
        lambda: Samples(image_and_label, N),
        SUFFIXES["all"],
        SAMPLERS["shuffle"],
        num_workers=2,
        worker_init_fn=reseed_worker,
    )


@pytest.mark.parametrize(
    ("sampler", "workers"),
    rarely(
        itertools.product(["shuffle", "draws_each_index", "weighted", "batch_sampler"], [0, 2]),
        ("shuffle", 2),
        ("weighted", 2),
    ),
)
def test_equal_for_batches_large_enough_for_a_thread(sampler: str, workers: int) -> None:
    check_equal(lambda: Samples(poster_and_label, N), list, large(SAMPLERS[sampler]), num_workers=workers)


@pytest.mark.parametrize("suffix", ["no suffix", "torch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_clips_lie_in_a_batch_as_torch_lays_them(workers: int, suffix: str) -> None:
    """Without workers in the order that they have in memory, with workers in C order."""
    check_equal(
        lambda: Samples(clip_and_label, N),
        SUFFIXES[suffix],
        large(SAMPLERS["shuffle"]),
        num_workers=workers,
    )


@pytest.mark.parametrize("collate", [None, hotset.collate.pad(0)])
def test_warm_clips_need_no_workers(collate: Callable[[list[Any]], Any] | None) -> None:
    with hotset.cache(Samples(clip_and_label, N), memory="64MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=2, collate_fn=collate)
        for started in (2, 0):
            batches = iter(loader)
            next(batches)
            assert len(multiprocessing.active_children()) == started
            for clips, _ in batches:
                assert clips.is_contiguous()


def large(options: Options) -> Options:
    """The same, in batches of eight: 2.4 MB of :func:`poster_and_label`."""

    def made(dataset: Any) -> dict[str, Any]:
        found = options(dataset)
        return {**found, "batch_size": 8} if "batch_size" in found else found

    return made


KINDS = [mapping, ordered_mapping, named, text, bfloat_and_half, permuted]


@pytest.mark.parametrize(
    ("make", "workers"),
    [(make, 0) for make in (*KINDS, same_content, number, small_float)]
    + rarely([(make, 2) for make in KINDS], (ordered_mapping, 2), (text, 2)),
)
def test_equal_for_every_kind_of_sample(make: Callable[[int], Any], workers: int) -> None:
    check_equal(lambda: Samples(make, N), list, SAMPLERS["shuffle"], num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_equal_for_a_source_that_reads_whole_batches(workers: int) -> None:
    check_equal(lambda: Batched(image_and_label, N), list, SAMPLERS["shuffle"], num_workers=workers)


@pytest.mark.parametrize(
    ("suffix", "workers"), rarely(itertools.product(["no suffix", "all"], [0, 2]), ("no suffix", 2))
)
def test_equal_after_a_declared_prefix(suffix: str, workers: int) -> None:
    check_equal(
        lambda: Samples(image_and_label, N),
        lambda: [hotset.deterministic(halve), *SUFFIXES[suffix]()],
        SAMPLERS["shuffle"],
        num_workers=workers,
    )


Make = Callable[[Dataset[Any]], Any]


def _subset(make: Make, uncached: Make) -> Any:
    return Subset(make(Samples(image_and_label, N)), [5, 3, 3, 21, 0, 8, 13, 12, 1])


def _subset_of_subset(make: Make, uncached: Make) -> Any:
    return Subset(Subset(make(Samples(image_and_label, N)), list(range(20, 2, -2))), [3, 1, 4, 1, 5])


def _concat(make: Make, uncached: Make) -> Any:
    return ConcatDataset([make(Samples(image_and_label, 7)), make(Samples(image_and_label, 9))])


def _concat_with_an_uncached_one(make: Make, uncached: Make) -> Any:
    return ConcatDataset([make(Samples(image_and_label, 7)), uncached(Samples(image_and_label, 5))])


def _concat_of_one_cache_twice(make: Make, uncached: Make) -> Any:
    once = make(Samples(image_and_label, 7))
    return ConcatDataset([once, Subset(once, [1, 2]), once])


def _random_split(make: Make, uncached: Make) -> Any:
    dataset = make(Samples(image_and_label, N))
    return torch.utils.data.random_split(dataset, [15, 7], generator=_generator(8))[0]


def _subset_of_concat(make: Make, uncached: Make) -> Any:
    return Subset(_concat(make, uncached), [15, 0, 7, 6, 8, 3])


def _concat_of_different_kinds(make: Make, uncached: Make) -> Any:
    """Batches of four never mix the kinds, as 16 and 8 are multiples of four."""
    return ConcatDataset([make(Samples(small_float, 16)), make(Samples(number, 8))])


WRAPPED = [
    _subset, _subset_of_subset, _concat, _concat_with_an_uncached_one, _concat_of_one_cache_twice,
    _random_split, _subset_of_concat,
]  # fmt: skip


def check_wrapped(wrap: Callable[[Make, Make], Any], suffix: list[Any], **options: Any) -> None:
    caches: list[Any] = []

    def caching(source: Dataset[Any]) -> Any:
        caches.append(hotset.cache(source, transform=suffix or None))
        return caches[-1]

    def plain(source: Dataset[Any]) -> Any:
        return Transformed(source, suffix)

    expected = record(lambda: DataLoader(wrap(plain, plain), **options))
    cached = wrap(caching, plain)
    compare(record(lambda: hotset.DataLoader(cached, **options)), expected)
    for cache in caches:
        cache.close()


@pytest.mark.parametrize(
    ("wrap", "suffix", "workers"),
    [(wrap, suffix, 0) for wrap in WRAPPED for suffix in ("no suffix", "all")]
    + rarely(
        [(wrap, ("no suffix", "all")[number % 2], 2) for number, wrap in enumerate(WRAPPED)],
        (_subset, "no suffix", 2),
        (_subset_of_subset, "all", 2),
        (_concat, "no suffix", 2),
        (_concat_of_one_cache_twice, "no suffix", 2),
        (_random_split, "all", 2),
        (_subset_of_concat, "no suffix", 2),
    ),
)
def test_equal_through_torchs_own_wrappers(wrap: Callable[..., Any], suffix: str, workers: int) -> None:
    check_wrapped(wrap, SUFFIXES[suffix](), batch_size=4, shuffle=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_equal_for_a_concatenation_of_different_kinds_of_samples(workers: int) -> None:
    check_wrapped(_concat_of_different_kinds, [], batch_size=4, num_workers=workers)


@pytest.mark.parametrize(
    ("suffix", "workers"), rarely(itertools.product(["no suffix", "all"], [0, 2]), ("no suffix", 2))
)
def test_torchs_unmodified_loader_over_a_cache_is_equal_too(suffix: str, workers: int) -> None:
    plain = Transformed(Samples(image_and_label, N), SUFFIXES[suffix]())
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    with hotset.cache(Samples(image_and_label, N), transform=SUFFIXES[suffix]() or None) as cached:
        expected = record(lambda: DataLoader(plain, **options))
        compare(record(lambda: DataLoader(cached, **options)), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_row_order_stays_without_shuffle_unlike_mindspore(workers: int) -> None:
    with hotset.cache(Samples(number, 500)) as cached:
        loader = hotset.DataLoader(cached, batch_size=7, num_workers=workers)
        for _ in range(3):
            assert torch.cat(list(loader)).tolist() == [number(i) for i in range(500)]


@pytest.mark.parametrize("suffix", ["random", "numpy", "torch", "all", "held"])
def test_live_draws_differ_from_epoch_to_epoch(suffix: str) -> None:
    with hotset.cache(Samples(image_and_label, N), transform=SUFFIXES[suffix]()) as cached:
        loader = hotset.DataLoader(cached, batch_size=N)
        first, second, third = (next(iter(loader)) for _ in range(3))
        assert difference(first, second) is not None
        assert difference(second, third) is not None


def test_building_a_cache_moves_no_rng_and_makes_no_live_draw() -> None:
    suffix = HeldGenerator()
    states = rng_states(), str(suffix.rng.bit_generator.state), suffix.generator.get_state().tolist()
    with hotset.cache(Samples(image_and_label, N), transform=[draw_all, suffix]):
        after = rng_states(), str(suffix.rng.bit_generator.state), suffix.generator.get_state().tolist()
        assert after == states
        assert suffix.calls == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_warm_epochs_read_nothing_from_the_source(workers: int, tmp_path: Any) -> None:
    """All comparisons above would also hold without a cache; this test shows that there is one."""
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(image_and_label, N, log)) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, shuffle=True, num_workers=workers)
        list(loader)
        assert log.total() >= N
        log.reset()
        for _ in range(2):
            list(loader)
        assert log.total() == 0
