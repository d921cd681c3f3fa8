"""An error in the user's dataset is raised as torch's DataLoader raises it: at once, and unchanged."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    equal_batches,
    failure,
    is_a_sentence,
    rarely,
    recorded,
    rng_states,
    seed_everything,
    taken_apart,
)
from samples import (
    image_and_label,
    none_inside,
    odd_at_seven,
    other_dtype_at_500,
    other_shape_at_500,
    other_tree_at_500,
    ragged,
)
from sources import (
    KillsItsWorker,
    Listed,
    ListedBatches,
    PlainError,
    Raising,
    RaisingKey,
    RaisingTwo,
    Samples,
    SlowInWorkers,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import hotset

N = 22


def story(loader: Iterable[Any]) -> list[Any]:
    """All batches of an epoch, with the name of the error in place of a batch that failed."""
    seen: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            seen.append(next(iterator))
        except StopIteration:
            return seen
        except Exception as error:
            found = taken_apart(error)
            seen.append((found.kind.__name__, found.last_line))


@pytest.mark.parametrize(
    ("kind", "workers"), rarely(itertools.product([Raising, RaisingKey, RaisingTwo], [0, 2]), (RaisingKey, 2))
)
def test_the_failed_batch_raises_and_the_others_come_as_in_torch(
    kind: type[Raising], workers: int, tmp_path: Path
) -> None:
    source = kind(image_and_label, N, 9, tmp_path / "armed")
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    with hotset.cache(source) as cached:
        source.arm()
        expected = story(DataLoader(source, **options))
        assert [type(part) for part in expected].count(tuple) == 1
        loader = hotset.DataLoader(cached, **options)
        for state in ("cold", "warm but for the broken one"):
            equal_batches(story(loader), expected, state)
        source.disarm()
        equal_batches(list(loader), list(DataLoader(source, **options)), "mended")


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_batches_after_a_failed_one_come_where_workers_would_make_few_ahead(
    ahead: int, tmp_path: Path
) -> None:
    """The pass begins with all samples cached, so no worker is started for it."""
    source = Raising(image_and_label, N, 9, tmp_path / "armed")
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "prefetch_factor": ahead}
    with hotset.cache(source) as cached:
        cached.fill()
        source.arm()
        expected = story(DataLoader(source, batch_size=4))
        loader = hotset.DataLoader(cached, **options)
        batches = iter(loader)
        cached.clear()
        equal_batches(story(batches), expected)


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_batch_is_tried_again_until_a_later_one_was_handed_over(
    workers: int, is_cached: bool, tmp_path: Path
) -> None:
    source = Raising(image_and_label, N, 9, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        make = partial(hotset.DataLoader, cached if is_cached else source, batch_size=4, num_workers=workers)
        loader = make()
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        with pytest.raises(PlainError):
            next(batches)
        at_the_failed_one = loader.state_dict()
        next(batches)
        after_the_next = loader.state_dict()

        def resumes(state: dict[str, Any], rest: range) -> None:
            resumed = make()
            resumed.load_state_dict(state)
            equal_batches(list(resumed), list(DataLoader(Subset(source, rest), batch_size=4)))

        resumes(after_the_next, range(16, N))
        source.disarm()
        resumes(after_the_next, range(16, N))
        resumes(at_the_failed_one, range(8, N))


@hotset.nondeterministic
def _live(sample: Any) -> Any:
    return sample


class SecondPartVaries(Dataset[Any]):
    """Samples that default_collate refuses to put together, after it has put together their first parts."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 18,), float(index)), torch.zeros(1 + index % 2)


class RaisingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(4)
        raise ValueError("no second sample")


class RaisingSamples(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise ValueError("no sample 9")
        return torch.full((4,), float(index))


@pytest.mark.parametrize("source", [RaisingSamples(), RaisingStream()])
@pytest.mark.parametrize("cache", [hotset.cache, contextlib.nullcontext])
def test_workers_end_with_a_loop_that_an_exception_of_one_ends(cache: Any, source: Any) -> None:
    """Without the collector: as it frees a loader of torch's, the program waits five seconds a worker."""
    with recorded(), cache(source) as dataset:
        gc.disable()
        try:
            with contextlib.suppress(ValueError):
                list(hotset.DataLoader(dataset, batch_size=4, num_workers=2))
            assert multiprocessing.active_children() == []
        finally:
            gc.enable()


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_fail_in_workers_keep_no_memory(persistent: bool) -> None:
    with hotset.cache(SecondPartVaries(), transform=[_live], memory="128MiB") as cached:
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent}
        batches = ListedBatches([[at, at + 1 + at % 4 // 2] for at in range(44)])
        loader = hotset.DataLoader(cached, batch_sampler=batches, **options)
        for _ in range(2):
            made, iterator = 0, iter(loader)
            for _ in range(len(batches)):
                with contextlib.suppress(RuntimeError):
                    next(iterator)
                    made += 1
            assert made == len(batches) // 2
            assert memory_of_blocks() < 40 << 20


def memory_of_blocks() -> int:
    """Bytes of the shared blocks of this process."""
    links = {each: os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
    files = [each.stat() for each, link in links.items() if "hotset-blocks" in link]
    return sum(status.st_blocks * 512 for status in files)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_cache_the_samples_of_a_failed_batch_do_not_count(workers: int, tmp_path: Path) -> None:
    """N is no multiple of the batch: the last batch has fewer samples than the one that failed."""
    source = Raising(image_and_label, N, 9, tmp_path / "armed")
    source.arm()
    loader = hotset.DataLoader(source, batch_size=4, num_workers=workers)
    story(loader)
    assert loader.last_epoch is not None
    assert (loader.last_epoch.batches, loader.last_epoch.samples) == (5, N - 4)


def test_an_error_in_a_worker_is_the_users_own_with_the_workers_traceback(tmp_path: Path) -> None:
    source = Raising(image_and_label, N, 9, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        found = failure(lambda: list(hotset.DataLoader(cached, batch_size=4, num_workers=2)))
        assert found.kind is PlainError
        assert found.text.startswith(
            "Caught PlainError in DataLoader worker process 0.\nOriginal Traceback (most recent call last)"
        )
        assert "in misbehave" in found.text
        assert found.last_line.endswith("PlainError: sample 9 is broken")


def test_an_error_without_workers_is_the_users_own_with_its_own_traceback(tmp_path: Path) -> None:
    source = Raising(image_and_label, N, 9, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        for read in (lambda: cached[9], lambda: list(hotset.DataLoader(cached, batch_size=4))):
            found = failure(read)
            assert found.kind is PlainError
            assert found.text == "sample 9 is broken"
            assert found.frames[-1] == "misbehave"


def _broken_suffix(sample: Any) -> Any:
    if sample[1] == 9:
        raise PlainError("the transform is broken")
    return sample


def _jitter(sample: Any) -> Any:
    return sample[0] + torch.rand(()), sample[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_before_a_broken_one_draw_as_in_torch(workers: int, tmp_path: Path) -> None:
    source = RaisingTwo(image_and_label, N, 9, tmp_path / "armed")
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}

    class Uncached(Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            return _jitter(source[index])

    def seen(loader: DataLoader[Any]) -> list[Any]:
        seed_everything(3)
        return [story(loader), torch.rand(2), story(loader)]

    with hotset.cache(source, transform=[_jitter]) as cached:
        source.arm()
        expected = seen(DataLoader(Uncached(), **options))
        assert [type(part) for part in expected[0]].count(tuple) == 1
        equal_batches(seen(hotset.DataLoader(cached, **options)), expected, "cold")
        equal_batches(seen(DataLoader(cached, **options)), expected, "torch's own loader")


def test_timeout_without_workers_is_refused_as_in_torch() -> None:
    with hotset.cache(Samples(image_and_label, 10)) as cached:
        for loader in (DataLoader(cached, timeout=5), hotset.DataLoader(cached, timeout=5)):
            with pytest.raises(AssertionError):
                iter(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_live_transform_is_the_users_own(workers: int) -> None:
    with hotset.cache(Samples(image_and_label, 10), transform=[_broken_suffix]) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=workers)
        for _ in range(2):
            found = failure(lambda: list(loader))
            assert found.kind is PlainError
            assert "the transform is broken" in found.last_line


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker_is_torchs_own_error_and_the_cache_lives_on(persistent: bool, tmp_path: Path) -> None:
    source = KillsItsWorker(image_and_label, N, 9, tmp_path / "armed")
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": persistent}
    with hotset.cache(source) as cached:
        source.arm()
        loader = hotset.DataLoader(cached, **options)
        found = failure(lambda: list(loader))
        assert found.kind is RuntimeError
        assert re.search(r"DataLoader worker \(pid(\(s\))? \d+.*\) (is killed|exited unexp)", found.text)
        source.disarm()
        assert cached.check() == []
        again = hotset.DataLoader(cached, **options)
        for _ in range(2):
            equal_batches(list(again), list(DataLoader(source, batch_size=4)))
        assert cached.stats().cached == N
        assert cached.check() == []


def test_without_a_cache_a_time_out_takes_no_batch(tmp_path: Path) -> None:
    source = SlowInWorkers(image_and_label, N, 9, tmp_path / "armed")
    source.arm()
    loader = hotset.DataLoader(source, batch_size=4, num_workers=2, timeout=1)
    iterator = iter(loader)
    assert "timed out" in failure(lambda: list(iterator)).text
    source.disarm()
    next(iterator)
    state, resumed = loader.state_dict(), hotset.DataLoader(source, batch_size=4, num_workers=2)
    resumed.load_state_dict(state)
    equal_batches(list(resumed), list(iterator))
    assert loader.last_epoch is not None
    assert (loader.last_epoch.batches, loader.last_epoch.samples) == (6, N)


def test_timeout_is_torchs_own_error(tmp_path: Path) -> None:
    source = SlowInWorkers(image_and_label, N, 9, tmp_path / "armed")
    with hotset.cache(source) as cached:
        source.arm()
        expected = list(DataLoader(source, batch_size=4))
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=2, timeout=1)
        iterator, seen = iter(loader), list[Any]()
        found = failure(lambda: seen.extend(iterator))
        assert (found.kind, found.text) == (RuntimeError, "DataLoader timed out after 1 seconds")
        equal_batches(seen, expected[: min(len(seen), 2)])  # both, but for a worker that is slow to begin
        source.disarm()
        loader.timeout = 60
        equal_batches(list(loader), expected)


@pytest.mark.filterwarnings("ignore::hotset.errors.HotsetWarning")  # that one sample stays uncached
@pytest.mark.parametrize(
    ("make", "workers"),
    rarely(
        itertools.product([none_inside, ragged, odd_at_seven, other_dtype_at_500], [0, 2]),
        (ragged, 2),
        (odd_at_seven, 2),
    ),
)
def test_samples_that_default_collate_refuses_raise_the_same_error_cold_and_warm(
    make: Callable[[int], Any], workers: int
) -> None:
    """None and mixed shapes have no batch; the gather must not invent one."""

    def outcomes(dataset: Dataset[Any], loader_type: Any) -> list[Any]:
        seed_everything()
        seen: list[Any] = []
        # Many more batches than workers take ahead, so that one lost to a failed one would be missed.
        batches = ListedBatches([[1, 2, 3], [6, 7, 8], [499, 500, 501], [0, 4]] * 5)
        iterator = iter(loader_type(dataset, batch_sampler=batches, num_workers=workers))
        while True:
            try:
                seen.append(next(iterator))
            except StopIteration:
                return [*seen, rng_states()]
            except Exception as error:
                found = taken_apart(error)
                seen.append((found.kind.__name__, found.last_line))

    expected = outcomes(Samples(make, 600), DataLoader)
    with hotset.cache(Samples(make, 600)) as cached:
        for state in ("cold", "warm", "warm again"):
            equal_batches(outcomes(cached, hotset.DataLoader), expected, state)


@pytest.mark.parametrize("make", [other_shape_at_500, other_dtype_at_500, other_tree_at_500])
def test_sample_500_of_another_kind_is_served_right_and_cached(make: Callable[[int], Any]) -> None:
    with hotset.cache(Samples(make, 600)) as cached:
        with recorded() as caught:
            for _ in range(2):
                for i in range(600):
                    equal_batches(cached[i], make(i), f"sample {i}")
        assert caught == []
        assert cached.stats().cached == 600
        assert cached.stats().uncached == 0
        alone = ListedBatches([[499, 3], [500]])
        expected = list(DataLoader(Samples(make, 600), batch_sampler=alone))
        for workers in (0, 2):
            loader = hotset.DataLoader(cached, batch_sampler=alone, num_workers=workers)
            equal_batches(list(loader), expected)
        assert cached.check() == []


@pytest.mark.parametrize("index", [N, -N - 1, 10**9, 2**63, 2**64 - 1, -(2**70)])
def test_an_index_out_of_range_is_the_sources_own_error(index: int) -> None:
    source = Samples(image_and_label, N)
    with hotset.cache(source) as cached:
        assert failure(lambda: cached[index]).text == failure(lambda: source[index]).text
        batches = ListedBatches([[0, 1], [1, index]])
        for _ in range(2):
            for workers in (0, 2):
                loader = hotset.DataLoader(cached, batch_sampler=batches, num_workers=workers)
                assert failure(partial(list, loader)).kind is IndexError
            for i in range(N):
                cached[i]


class GoesRound(Dataset[Any]):
    """Takes every integer."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(int(index) % N)


def test_an_array_of_indices_beyond_64_bits_with_a_sign_is_what_it_is_in_torch() -> None:
    batches = [np.array([2**64 - 1, 3], np.uint64), [2**63, 3], [2**64 - 1, 3], [2**70, 3]]
    expected = list(DataLoader(GoesRound(), batch_sampler=batches))
    with hotset.cache(GoesRound(), memory="1MiB") as cached:
        for _ in ("cold", "warm"):
            equal_batches(list(hotset.DataLoader(cached, batch_sampler=batches)), expected)
            cached.fill()


def test_iterating_the_dataset_itself_ends_as_the_sources_does() -> None:
    """Python iterates anything with ``[i]`` until IndexError."""
    with hotset.cache(Samples(image_and_label, N)) as cached:
        equal_batches(list(iter(cached)), list(iter(Samples(image_and_label, N))))


def test_an_error_at_the_very_first_sample_is_still_the_users_own(tmp_path: Path) -> None:
    """Building a cache may read samples; if one of them raises, the user must get that error."""
    for index in range(8):
        source = Raising(image_and_label, 8, index, tmp_path / "armed")
        source.arm()
        with pytest.raises(PlainError, match="is broken"), hotset.cache(source) as cached:
            list(hotset.DataLoader(cached, batch_size=2))
        source.disarm()


class Failing(Listed):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise PlainError("the sampler is broken")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_sampler_raises_in_the_consumers_loop(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 2, "sampler": Failing(range(9)), "num_workers": workers}
    with hotset.cache(Samples(image_and_label, N)) as cached:
        expected = until_failure(DataLoader(Samples(image_and_label, N), **options))
        assert expected[-1] == ("PlainError", "the sampler is broken")
        for _ in range(2):
            equal_batches(until_failure(hotset.DataLoader(cached, **options)), expected)


def until_failure(loader: DataLoader[Any]) -> list[Any]:
    seen: list[Any] = []
    try:
        for batch in loader:
            seen.append(batch)
    except Exception as error:
        found = taken_apart(error)
        seen.append((found.kind.__name__, found.text))
    return seen


@pytest.mark.parametrize("generator", [3, "cpu", np.random.default_rng(3)], ids=["int", "text", "numpy"])
def test_a_generator_that_is_none_of_torchs_is_refused_where_the_loader_is_made(generator: Any) -> None:
    source = Samples(image_and_label, N)
    with hotset.cache(source) as cached:
        for dataset in (source, cached):
            with pytest.raises(hotset.ArgumentError, match=r"generator= must be a torch\.Generator, got"):
                hotset.DataLoader(dataset, shuffle=True, generator=generator)
        loader = hotset.DataLoader(cached, generator=torch.Generator().manual_seed(3))
        with pytest.raises(hotset.ArgumentError, match="manual_seed"):
            loader.generator = generator
        loader.generator = None
        assert len(list(loader)) == N


def test_threads_of_tokio_which_forked_workers_lack_are_warned_of() -> None:
    cached = hotset.cache(TensorDataset(torch.arange(8)), memory="1MiB")
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("tokio-rt-worker")
        begun.set()
        ended.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        begun.wait()
        with pytest.warns(hotset.HotsetWarning, match='multiprocessing_context="spawn"') as told:
            list(hotset.DataLoader(cached, batch_size=4, num_workers=1))
        (warning,) = [one for one in told if one.category is hotset.HotsetWarning]
        cached.clear()
        list(hotset.DataLoader(cached, batch_size=4, num_workers=1))  # it is said once
        assert is_a_sentence(str(warning.message))
    finally:
        ended.set()
        thread.join()
        cached.close()
    list(hotset.DataLoader(cached, batch_size=4, num_workers=1))
