"""Loops that do not run to the end, and other promises of torch's loader.

Most tests are scripts: the same function drives torch's DataLoader over the plain dataset and hotset's over
the cached one from the same seeds, twice (cold, then warm), and the results must be equal.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import (
    all_pairs,
    difference,
    equal_batches,
    eventually,
    failure,
    in_threads,
    interrupted_everywhere,
    leaves,
    rarely,
    recorded,
    rng_states,
    seed_everything,
)
from kills import in_child
from live import WritesWorker, describe_samples, draw_all, keep_first
from resuming import ORDERS, training
from samples import (
    big_image_and_label,
    image_and_label,
    mapping,
    named,
    number,
    object_array,
    opaque,
    poster_and_label,
    ragged_pair,
    text,
)
from sources import Counting, Listed, ReadLog, Samples, Streamed, TextFiles, Transformed
from torch.utils.data import DataLoader, Subset, default_collate

import hotset

N = 22
Script = Callable[[DataLoader[Any]], list[Any]]


def same_story(
    script: Script, make: Callable[[int], Any] = image_and_label, live: bool = False, **options: Any
) -> None:
    """Run the script over both loaders, cold and warm, and compare all that it returns."""
    options.setdefault("batch_size", 4)
    suffix = [draw_all] if live else []
    with hotset.cache(Samples(make, N), transform=suffix or None) as cached:
        plain = DataLoader(Transformed(Samples(make, N), suffix), **options)
        ours = hotset.DataLoader(cached, **options)
        for state in ("cold", "warm"):
            seed_everything(77)
            expected = script(plain)
            seed_everything(77)
            equal_batches(script(ours), expected, state)


def break_early(loader: DataLoader[Any]) -> list[Any]:
    seen: list[Any] = []
    for count, batch in enumerate(loader):
        seen.append(batch)
        if count == 2:
            break
    seen.append(rng_states())
    return [*seen, *loader, rng_states()]


def break_at_once(loader: DataLoader[Any]) -> list[Any]:
    for _ in range(2):
        iter(loader)
    return [next(iter(loader)), rng_states()]


def nested(loader: DataLoader[Any]) -> list[Any]:
    seen: list[Any] = []
    for count, outer in enumerate(loader):
        seen.append(outer)
        if count == 1:
            seen.extend(loader)
    return [*seen, rng_states()]


def two_at_once(loader: DataLoader[Any]) -> list[Any]:
    first, second = iter(loader), iter(loader)
    seen = [next(first), next(second), next(second), next(first), rng_states()]
    return [*seen, *zip(first, second, strict=False), rng_states()]


def exhausted(loader: DataLoader[Any]) -> list[Any]:
    iterator: Any = iter(loader)
    seen: list[Any] = [len(iterator), *iterator]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    return [*seen, iter(iterator) is iterator, rng_states()]


@pytest.mark.parametrize(
    ("script", "live", "workers"),
    rarely(
        all_pairs([break_early, break_at_once, nested, two_at_once, exhausted], [False, True], [0, 2]),
        (two_at_once, True, 2),  # as nested
    ),
)
def test_iterators_behave_as_torchs(script: Script, live: bool, workers: int) -> None:
    same_story(script, live=live, shuffle=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_has_no_length_where_the_sampler_has_none(workers: int) -> None:
    """With one of 0 it would be false."""

    def lengths(loader: DataLoader[Any]) -> list[Any]:
        return [failure(lambda: len(iter(loader))).text]  # type: ignore[arg-type]

    same_story(lengths, sampler=reversed(range(N)), num_workers=workers)


@pytest.mark.parametrize("live", [False, True])
def test_breaking_early_with_persistent_workers(live: bool) -> None:
    same_story(break_early, live=live, shuffle=True, num_workers=2, persistent_workers=True)


@pytest.mark.parametrize(
    ("persistent", "live", "loader_type"),
    all_pairs([False, True], [False, True], [DataLoader, hotset.DataLoader]),
)
def test_dropping_a_loader_ends_its_workers_at_once(
    persistent: bool, live: bool, loader_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the garbage collector runs, which then waits five seconds for each worker."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 600.0)  # those five seconds
    servants = set(psutil.Process().children())  # of earlier tests: forkserver and the like

    def workers() -> set[psutil.Process]:
        return set(psutil.Process().children()) - servants

    with hotset.cache(Samples(image_and_label, N), transform=[draw_all] if live else None) as cached:
        gc.collect()
        gc.disable()
        try:
            loader = loader_type(cached, batch_size=2, num_workers=2, persistent_workers=persistent)
            for _ in range(2):
                iterator = iter(loader)
                next(iterator)
                if persistent:
                    list(iterator)
                del iterator
            del loader
            assert eventually(lambda: not workers()), workers()
        finally:
            monkeypatch.undo()
            gc.enable()


@pytest.mark.usefixtures("patient")
def test_breaking_early_and_running_again_reads_each_sample_about_once(tmp_path: Path) -> None:
    """Interrupt and rerun, as with MindSpore. Only samples in flight at the break may be read twice."""
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(image_and_label, 60, log, seconds=0.001)) as cached:
        log.reset()
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=2)
        for count, _ in enumerate(loader):
            if count == 5:
                break
        equal_batches(list(loader), list(DataLoader(Samples(image_and_label, 60), batch_size=4)))
        in_flight = 2 * 2 * 4
        assert 60 - 8 <= log.total() <= 60 + in_flight
        assert cached.stats().cached == 60


def test_it_is_torchs_loader_with_every_argument_of_it() -> None:
    assert issubclass(hotset.DataLoader, DataLoader)
    ours = inspect.signature(hotset.DataLoader.__init__).parameters
    theirs = inspect.signature(DataLoader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [(p.kind, p.default) for p in theirs.values()] == [(ours[n].kind, ours[n].default) for n in theirs]


def test_attributes_are_the_users_arguments() -> None:
    with hotset.cache(Samples(image_and_label, N)) as cached:
        sampler = Listed([1, 2, 3])
        loader = hotset.DataLoader(
            cached,
            2,
            sampler=sampler,
            num_workers=2,
            collate_fn=keep_first,
            drop_last=True,
            prefetch_factor=3,
        )
        assert loader.dataset is cached
        assert loader.sampler is sampler
        assert loader.collate_fn is keep_first
        assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (2, 2, 3)
        assert (loader.drop_last, loader.persistent_workers, loader.timeout) == (True, False, 0)
        assert len(loader) == 1


@pytest.mark.parametrize(
    ("count", "drop_last", "batch_size"), [(22, False, 4), (22, True, 4), (20, False, 4), (3, True, 4)]
)
def test_length_is_torchs(count: int, drop_last: bool, batch_size: int) -> None:
    with hotset.cache(Samples(number, count)) as cached:
        options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
        ours = hotset.DataLoader(cached, **options)
        assert len(ours) == len(DataLoader(Samples(number, count), **options)) == len(list(ours))


@pytest.mark.parametrize(
    "wrong",
    [
        {"shuffle": True, "sampler": Listed([1])},
        {"batch_size": 3, "batch_sampler": Listed([[1]])},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"num_workers": -1},
        {"timeout": -1},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"num_workers": 1, "multiprocessing_context": "teleport"},
    ],
)
def test_wrong_arguments_get_torchs_own_error(wrong: dict[str, Any]) -> None:
    with hotset.cache(Samples(number, 4)) as cached:
        theirs = failure(lambda: DataLoader(Samples(number, 4), **wrong))
        ours = failure(lambda: hotset.DataLoader(cached, **wrong))
        assert (ours.kind, ours.text) == (theirs.kind, theirs.text)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets_pass_through(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "drop_last": True}
    equal_batches(list(hotset.DataLoader(Streamed(N), **options)), list(DataLoader(Streamed(N), **options)))


@pytest.mark.parametrize("workers", [0, 2])
def test_uncached_datasets_pass_through(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "shuffle": True}
    seed_everything(1)
    expected = [*DataLoader(Samples(mapping, N), **options), rng_states()]
    seed_everything(1)
    equal_batches([*hotset.DataLoader(Samples(mapping, N), **options), rng_states()], expected)


@pytest.mark.filterwarnings("ignore::hotset.errors.HotsetWarning")  # that opaque objects stay uncached
@pytest.mark.parametrize(
    ("make", "workers"),
    rarely(itertools.product([named, text, opaque, object_array], [0, 2]), (named, 2), (object_array, 2)),
)
def test_collate_functions_are_handed_the_samples_themselves(
    make: Callable[[int], Any], workers: int
) -> None:
    same_story(list, make, collate_fn=describe_samples, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_may_return_anything(workers: int) -> None:
    same_story(list, collate_fn=keep_first, num_workers=workers, live=True)


@pytest.mark.parametrize(
    ("make", "workers"),
    rarely(itertools.product([mapping, named, text, number], [0, 2]), (named, 2), (number, 2)),
)
def test_batch_size_none_gives_single_samples(make: Callable[[int], Any], workers: int) -> None:
    same_story(list, make, batch_size=None, num_workers=workers)


@pytest.mark.parametrize("live", [False, True])
def test_order_may_be_given_up_but_no_batch_lost(live: bool) -> None:
    with hotset.cache(Samples(number, 60), transform=[_plus_one] if live else None) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=2, in_order=False)
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == [number(i) + live for i in range(60)]


def _plus_one(sample: int) -> int:
    return sample + 1


@hotset.nondeterministic
def _slowly_enlarged(sample: int) -> torch.Tensor:
    time.sleep(0.005)
    return torch.full((400_000,), float(sample))


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_may_be_larger_than_foreseen_while_training_waits_for_them(persistent: bool) -> None:
    with hotset.cache(Samples(number, 60), transform=[_slowly_enlarged]) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=2, persistent_workers=persistent)
        for count in (15, 2, 15):
            ends = torch.cat(list(itertools.islice(loader, count)))[:, ::99_999]
            assert ends.tolist() == [[number(i)] * 5 for i in range(4 * count)]


def _worker_reports(folder: Path, loader: DataLoader[Any]) -> list[str]:
    seed_everything(3)
    list(loader)
    reports = sorted(path.read_text() for path in folder.iterdir())
    for path in folder.iterdir():
        path.unlink()
    return reports


@pytest.mark.parametrize("live", [False, True])
def test_worker_init_fn_runs_in_each_worker_and_sees_the_users_dataset(live: bool, tmp_path: Path) -> None:
    suffix = [draw_all] if live else []
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "worker_init_fn": WritesWorker(tmp_path)}
    with hotset.cache(Samples(image_and_label, N), transform=suffix or None) as cached:
        theirs = _worker_reports(
            tmp_path, DataLoader(Transformed(Samples(image_and_label, N), suffix), **options)
        )
        ours = _worker_reports(tmp_path, hotset.DataLoader(cached, **options))
        assert len(ours) == 2
        assert ours == [report.replace("Transformed", type(cached).__name__) for report in theirs]
        # A Subset is unwrapped inside, and still what the user gave.
        ours = _worker_reports(tmp_path, hotset.DataLoader(Subset(cached, [1, 2, 3]), **options))
        assert all(" Subset 3 " in report for report in ours)


@pytest.mark.parametrize("workers", [0, 2])
def test_pin_memory_is_as_in_torch(workers: int) -> None:
    def run(loader: DataLoader[Any]) -> tuple[list[Any], list[str]]:
        with recorded() as caught:
            batches = list(loader)
        return batches, [str(warning.message) for warning in caught]

    options: dict[str, Any] = {"batch_size": 4, "pin_memory": True, "num_workers": workers}
    with hotset.cache(Samples(mapping, N)) as cached:
        expected, warned = run(DataLoader(Samples(mapping, N), **options))
        for _ in range(2):
            batches, ours = run(hotset.DataLoader(cached, **options))
            # torch 2.6 does not warn that nothing is pinned; hotset does.
            assert ours == warned or (not warned and all("no accelerator" in one for one in ours))
            assert [b["image"].is_pinned() for b in batches] == [b["image"].is_pinned() for b in expected]
            equal_batches(batches, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_may_run_in_any_thread(workers: int) -> None:
    with hotset.cache(Samples(number, 60)) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=workers)
        seen: list[list[int]] = []

        def epoch() -> None:
            seen.append(torch.cat(list(loader)).tolist())

        for _ in range(2):
            thread = threading.Thread(target=epoch)
            thread.start()
            thread.join(60)
        assert seen == [[number(i) for i in range(60)]] * 2


@pytest.mark.parametrize(("make", "size"), [(poster_and_label, 4), (number, 2)])
def test_after_an_interrupt_an_iterator_goes_on_without_the_batch_that_was_under_way(
    make: Callable[[int], Any], size: int
) -> None:
    """As torch's without workers. Large batches are gathered ahead, small ones several at once."""

    under_way: Any = None
    rest: list[Any] = []

    def begin() -> None:
        nonlocal under_way
        under_way = iter(loader)
        equal_batches([next(under_way), next(under_way)], batches[:2])
        rest.clear()

    def read_on(thread: int) -> None:
        rest.extend(under_way)

    with hotset.cache(Samples(make, N)) as cached:
        loader = hotset.DataLoader(cached, batch_size=size)
        for _ in range(2):
            batches = list(loader)
        begin()
        for _ in interrupted_everywhere(lambda: rest.append(next(under_way))):
            in_threads(1, read_on)
            equal_batches(rest, batches[2:] if len(rest) == len(batches) - 2 else batches[3:])
            begin()


def test_the_number_of_torchs_threads_is_left_as_it_was() -> None:
    def counted() -> list[int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join(60)
        return [*found, torch.get_num_threads()]

    before = counted()
    torch.set_num_threads(3)
    try:
        with hotset.cache(Samples(poster_and_label, 24)) as cached:
            for size in (1, 8):
                loader = hotset.DataLoader(cached, batch_size=size)
                for _ in range(2):
                    for _ in loader:
                        assert counted() == [3, 3]
        assert counted() == [3, 3]
    finally:
        torch.set_num_threads(before[1])


def test_two_threads_may_each_run_an_epoch_of_one_cache() -> None:
    with hotset.cache(Samples(image_and_label, 200)) as cached:
        expected = list(DataLoader(Samples(image_and_label, 200), batch_size=7))
        wrong: list[str | None] = []

        def epochs() -> None:
            loader = hotset.DataLoader(cached, batch_size=7)
            wrong.extend(difference(list(loader), expected) for _ in range(4))

        threads = [threading.Thread(target=epochs) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == [None] * 8


def test_two_shards_share_one_cache_unlike_one_cache_per_rank(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(image_and_label, 40, log)) as cached:
        log.reset()
        shards = [Subset(cached, list(range(rank, 40, 2))) for rank in range(2)]
        for _ in range(2):
            for rank, shard in enumerate(shards):
                batches = list(hotset.DataLoader(shard, batch_size=5))
                truth = [image_and_label(i) for i in range(rank, 40, 2)]
                equal_batches(batches, [default_collate(truth[i : i + 5]) for i in range(0, 20, 5)])
        assert max(log.counts().values()) == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_clear_reaches_running_workers_so_that_nothing_stale_is_served(
    persistent: bool, tmp_path: Path
) -> None:
    """In MONAI, persistent workers serve stale data for ever."""
    files = [tmp_path / f"{i}.txt" for i in range(12)]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i, 1]))
    with hotset.cache(TextFiles(files)) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=2, persistent_workers=persistent)
        list(loader)
        for i, path in enumerate(files):
            path.write_bytes(bytes([i, 2]))
        cached.clear()
        for _ in range(2):
            data = torch.cat([batch[0] for batch in loader])
            assert data.tolist() == [[i, 2] for i in range(12)]


@pytest.mark.filterwarnings("ignore::hotset.HotsetWarning")
@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_workers_give_batches_under_a_limit_of_the_shell(limit: str) -> None:
    """``ulimit -f`` and ``ulimit -v``, which batch systems set: with fewer blocks than batches, or none."""

    def body() -> None:
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        most = 256 << 10 if limit == "RLIMIT_FSIZE" else address_space + (256 << 20)
        resource.setrlimit(getattr(resource, limit), (most, most))
        expected = list(DataLoader(Samples(big_image_and_label, 80), batch_size=2))
        with hotset.cache(Samples(big_image_and_label, 80), memory="16MiB") as cached:
            loader = hotset.DataLoader(cached, batch_size=2, num_workers=2)
            kept = [list(loader) for _ in range(2)]  # held, all of them
            for batches in kept:
                equal_batches(batches, expected)

    in_child(body)


@hotset.nondeterministic
def with_what_the_collector_looks_at(sample: Any) -> Any:
    return sample, len(gc.get_objects())


def test_a_workers_collector_does_not_look_at_what_the_fork_has_inherited() -> None:
    """To look at an object copies its page, in each new worker again."""
    here = len(gc.get_objects())
    with hotset.cache(
        Samples(number, 8), transform=[with_what_the_collector_looks_at], memory="16MiB"
    ) as cached:
        for _, objects in hotset.DataLoader(cached, batch_size=4, num_workers=1):
            assert int(objects.max()) < here / 2


def inferred(loader: DataLoader[Any]) -> list[Any]:
    """What comes in inference mode, as a validation loop reads it."""
    with torch.inference_mode():
        return [(batch, [part.is_inference() for part in batch]) for batch in loader]


def peeked(loader: DataLoader[Any]) -> list[Any]:
    """The first batch is taken in inference mode, and the others are trained on."""
    batches = iter(loader)
    with torch.inference_mode():
        first = next(batches)
    weight = torch.ones((), requires_grad=True)
    found = [first]
    for pictures, labels in batches:
        (weight * pictures).sum().backward()
        found.append((pictures, labels, pictures.is_inference()))
    return [*found, weight.grad]


@pytest.mark.parametrize("make", [image_and_label, poster_and_label])
@pytest.mark.parametrize("script", [inferred, peeked])
def test_batches_are_inference_tensors_where_those_of_torch_are(
    script: Script, make: Callable[[int], Any]
) -> None:
    same_story(script, make, batch_size=8)


def test_ragged_batches_are_made_in_inference_mode() -> None:
    with hotset.cache(Samples(ragged_pair, N), memory="4MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8, collate_fn=hotset.collate.pad(0))
        expected = list(loader)
        for _ in range(2):
            equal_batches([batch for batch, _ in inferred(loader)], expected)
            equal_batches(list(loader), expected)


@pytest.mark.parametrize("order", ["shuffle", "eager batches"])
def test_persistent_workers_that_a_later_pass_needs_first_draw_as_torchs(order: str) -> None:
    def passes(loader: Any, change: Any) -> list[Any]:
        seed_everything()
        found = []
        for turn in range(3):
            if turn == 1:
                change()
            found += [training(loader), rng_states()]
        return found

    source = Samples(image_and_label, N)
    options = {"num_workers": 2, "persistent_workers": True}
    expected = passes(DataLoader(source, **options, **ORDERS[order]()), lambda: None)
    with hotset.cache(source, memory="4MiB") as cached:
        cached.fill()  # so that the first pass needs no workers
        equal_batches(passes(hotset.DataLoader(cached, **options, **ORDERS[order]()), cached.clear), expected)


def test_all_samples_in_one_batch_come_in_a_block_whatever_size_is_passed() -> None:
    """torch's own way of sending a batch gives tensors in torch's shared memory."""
    with hotset.cache(Samples(big_image_and_label, N), transform=[draw_all], memory="4MiB") as cached:
        for size in (N, 10**9):
            for batch in hotset.DataLoader(cached, batch_size=size, num_workers=1):
                assert not any(part.is_shared() for part in leaves(batch)), size
