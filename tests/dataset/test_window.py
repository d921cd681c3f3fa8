"""``hotset.Window`` as users see it: which samples an epoch has, when others enter, and what goes wrong.

The truth is written here without the cache: :class:`Reference` reads the policy's order from the source, and
torch's own loader makes batches of it. Nothing is timed. Where preparing is to be slow, the source waits at a
gate until the test opens it; where it is to keep up, the test waits until what is due is there, or the window
itself does (``wait=True``), so that the cursor is certain.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import pickle
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers import (
    all_pairs,
    difference,
    equal_batches,
    eventually,
    failure,
    is_a_sentence,
    leaves,
    rarely,
    recorded,
    rng_states,
    scribble,
    seed_everything,
    taken_apart,
)
from live import draw_all
from resuming import check, deterministic_halve, through_a_checkpoint, training
from samples import big_image_and_label, image_and_label, mapping, nested, opaque, ragged, text
from sources import Counting, PlainError, Raising, ReadLog, Samples
from stores import store_of
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader

import hotset
from hotset.dataset import active_window as residents
from hotset.dataset.dataset_proxy import current_of
from hotset.dataset.window import Sizes
from hotset.errors import ArgumentError, HotsetWarning, QuantityError, StateError
from hotset.policy.window import RunningWindow, epoch_order
from hotset.store import locks
from hotset.store.ring import WindowState

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("patient"),
]

# Of 24 samples 8 are resident, and 2 are replaced: all are seen within 9 epochs, and a cycle has 12.
D, N, R = 24, 8, 2
QUARTER = hotset.Window(N, replace=0.25, wait=True)
Make = Callable[..., Any]


def tagged(index: int) -> tuple[torch.Tensor, int]:
    return image_and_label(index)[0], index


class Gated(Dataset[Any]):
    """Samples with gates: a process that reads one waits until its gate opens, and writes down its number."""

    def __init__(self, folder: Path, n: int = D) -> None:
        self._hotset_folder = folder  # no part of what the samples are
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        gate = self._hotset_folder / f"shut-{index}"
        if gate.exists():
            (self._hotset_folder / f"waited-{os.getpid()}").touch()
            assert eventually(lambda: not gate.exists()), f"nobody opens the gate of {index}"
        return tagged(index)

    def shut(self, samples: Sequence[int]) -> None:
        for sample in samples:
            (self._hotset_folder / f"shut-{sample}").touch()

    def open(self) -> None:
        for gate in self._hotset_folder.glob("shut-*"):
            gate.unlink()

    def waited(self) -> set[int]:
        return {int(path.name.split("-")[1]) for path in self._hotset_folder.glob("waited-*")}


class Reference(Dataset[Any]):
    """A window without a cache: the policy's samples, read from the source each time."""

    def __init__(self, source: Any, window: hotset.Window, transforms: Sequence[Any] = ()) -> None:
        sizes = hotset.dataset.window.Sizes.of(window, len(source), 1)
        self.source, self.window, self.transforms = source, window, list(transforms)
        self.policy = RunningWindow(len(source), sizes.resident, sizes.ahead, window.seed, window.shuffle)
        self.at(0, 0)

    def at(self, epoch: int, cursor: int) -> Reference:
        members = self.policy.entries(cursor, self.policy.resident)
        if self.window.shuffle:
            members = members[epoch_order(self.window.seed, epoch, cursor, len(members))]
        self.order: list[int] = members.tolist()
        return self

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        sample = self.source[self.order[index]]
        for transform in self.transforms:
            sample = transform(sample)
        return sample


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes caches with a window, and closes all of them."""
    made: list[Any] = []

    def make(source: Any = None, window: hotset.Window = QUARTER, **arguments: Any) -> Any:
        source = Samples(tagged, D) if source is None else source
        made.append(hotset.cache(source, window=window, **arguments))
        return made[-1]

    yield make
    for cached in made:
        cached.close()


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    source = Gated(tmp_path)
    yield source
    source.open()


def loader_over(cached: Any, **options: Any) -> Any:
    return hotset.DataLoader(cached, **{"batch_size": 4, **options})


def numbers(batches: Any) -> list[int]:
    """The numbers of the samples in these batches of :func:`tagged`, each of which must be whole."""
    found = []
    for images, labels in batches:
        for image, label in zip(images, labels.tolist(), strict=True):
            equal_batches((image, label), tagged(label))
            found.append(label)
    return found


def cursor_of(cached: Any) -> int:
    found: int = cached.stats().replaced
    return found


def memory_of(cached: Any) -> int:
    """Bytes of the records: the whole segment without its index."""
    segment = store_of(cached).segment
    taken: int = 512 * os.fstat(segment.fd).st_blocks - segment.geometry.rows_at
    return taken


def ready(cached: Any, count: int = R) -> None:
    """Wait until this many of the next samples are cached."""
    after = cursor_of(cached) + len(cached)
    assert eventually(lambda: store_of(cached).settled(np.arange(after, after + count)).all())


def incoming(cached: Any, count: int) -> list[int]:
    """The numbers of the next samples."""
    after = cursor_of(cached) + len(cached)
    return [current_of(cached).window.sample(entry) for entry in range(after, after + count)]


# ---- what an epoch has -------------------------------------------------------------------------------


def test_the_example_of_claras_documentation_holds(make: Make) -> None:
    """100 samples, 50 of them resident, a tenth replaced: 5 come in at each boundary."""
    window = hotset.Window(50, replace=0.1, wait=True)
    cached = make(Samples(tagged, 100), window)
    loader, reference = loader_over(cached, batch_size=10), Reference(Samples(tagged, 100), window)
    assert (len(cached), len(loader)) == (50, 5)
    seen: set[int] = set()
    before: list[int] = []
    for epoch in range(14):
        used = numbers(loader)
        assert used == reference.at(epoch, 5 * epoch).order
        assert len(set(used)) == 50
        assert len(set(used) - set(before)) == (5 if epoch else 50)
        before = used
        seen |= set(used)
        assert (len(seen) == 100) == (epoch >= 10), "all are seen within ceil((100 - 50) / 5) + 1 = 11 epochs"
    assert cached.stats().late == 0


def test_without_shuffling_it_slides_and_a_cycle_has_each_sample_as_often(make: Make) -> None:
    cached = make(window=hotset.Window(N, replace=0.25, shuffle=False, wait=True))
    loader = loader_over(cached)
    epochs = [numbers(loader) for _ in range(25)]
    assert epochs == [[(R * epoch + place) % D for place in range(N)] for epoch in range(25)]
    assert Counter(itertools.chain(*epochs[12:24])) == dict.fromkeys(range(D), N // R)


def test_in_a_shuffled_cycle_each_sample_comes_in_once(make: Make) -> None:
    loader = loader_over(make())
    epochs = [set(numbers(loader)) for _ in range(33)]
    came = [sorted(after - before) for before, after in itertools.pairwise(epochs)]
    # The entries of the second cycle are 24 to 47, and the first boundary lets 8 and 9 in.
    for cycle in (came[8:20], came[20:32]):
        assert sorted(itertools.chain(*cycle)) == list(range(D))
    assert came[8:20] != came[20:32], "each cycle is permuted anew"


def test_the_longest_resident_leave(make: Make) -> None:
    loader = loader_over(make())
    epochs = [set(numbers(loader)) for _ in range(20)]
    stays: Counter[int] = Counter()
    for before, after in itertools.pairwise(epochs):
        stays.update(before)
        for left in before - after:
            assert stays.pop(left) <= N // R
        assert not after & (before - after)
        assert all(stays[sample] < N // R for sample in after & before)


def test_another_seed_is_another_order_and_none_is_the_same(make: Make) -> None:
    def epochs(**options: Any) -> list[list[int]]:
        loader = loader_over(make(window=hotset.Window(N, replace=0.25, wait=True, **options)))
        return [numbers(loader) for _ in range(3)]

    assert epochs() == epochs(seed=0) != epochs(seed=1)
    assert sorted(epochs(seed=5)[2]) != epochs(seed=5)[2]


@pytest.mark.parametrize(
    ("resident", "replace", "replaced"),
    [(8, 0.25, 2), (8, 0.26, 3), (1 / 3, 0.25, 2), (8, 1.0, 8), (8, 1, 8), (20, 0.5, 4), (1, 0.01, 1)],
)
def test_sizes(resident: float, replace: float, replaced: int, make: Make) -> None:
    """R is ceil(N * replace), but at most the number of samples outside the window."""
    cached = make(window=hotset.Window(resident, replace=replace, wait=True))
    loader = loader_over(cached)
    n = int(resident) if resident >= 1 else 8
    assert len(cached) == n
    for epoch in range(4):
        assert len(set(numbers(loader))) == n
        assert cursor_of(cached) == epoch * replaced


def test_memory_as_size_holds_those_being_prepared_too(make: Make) -> None:
    source = Samples(big_image_and_label, 100)
    with hotset.cache(source, window=hotset.Window(1)) as probe:
        each = probe.plan.sample_bytes
    assert each > 3 * 64 * 64
    given = 30 * each + each // 2
    cached = make(source, hotset.Window(str(given), replace=0.1, wait=True))
    assert (len(cached), cached.plan.window.ahead) == (24, 6)
    loader = loader_over(cached)
    for _ in range(20):
        assert len({int(label) for _, labels in loader for label in labels}) == 24
    assert memory_of(cached) <= given + 4096
    assert cached.check() == []


def test_nothing_is_replaced_at_rate_0(make: Make) -> None:
    children = psutil.Process().children()
    cached = make(window=hotset.Window(N, replace=0))
    loader = loader_over(cached)
    first = numbers(loader)
    for _ in range(4):
        again = numbers(loader)
        assert sorted(again) == sorted(first)
        assert again != first, "the order is another one"
    assert psutil.Process().children() == children, "nobody prepares anything"
    assert (cached.stats().hits, cached.stats().misses) == (4 * N, N)
    assert "never used" in str(cached.plan)


def test_each_sample_is_read_once_ahead_of_its_use(make: Make, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    cached = make(Counting(tagged, D, log), hotset.Window(N, replace=0.25))
    log.reset()
    loader = loader_over(cached)
    for epoch in range(9):
        numbers(loader)
        assert cursor_of(cached) == epoch * R
        ready(cached)
    assert log.counts() == Counter(current_of(cached).window.sample(entry) for entry in range(8 * R + N + R))
    stats = cached.stats()
    assert (stats.cached, stats.uncached, stats.late) == (N, 0, 0)
    assert (stats.hits, stats.misses) == (8 * N, N), "what is read ahead is there when it is used"


def test_the_plan_says_what_the_window_does(make: Make) -> None:
    cached = make()
    assert (cached.plan.used, cached.plan.steps_per_epoch(4)) == (N, 2)
    assert "8 of 24 samples are resident, 2 are replaced" in str(cached.plan)
    assert "all are seen after 9 epochs" in str(cached.plan)


# ---- bit for bit -------------------------------------------------------------------------------------


def run(loader: Any, begin: Callable[[int], Any], epochs: int = 4) -> list[Any]:
    """Batches, and the states of all generators after each of them."""
    seed_everything(7)
    found = []
    for epoch in range(epochs):
        begin(epoch)
        for batch in loader:
            found.append((batch, rng_states()))
    return found


def compare(
    make: Make, suffix: list[Any], workers: int, method: str | None = None, *, ours: bool = True, epochs: int
) -> None:
    """Compare samples, order, types, the live part's draws, and all generators with and without the cache."""
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "num_workers": workers}
    reference = Reference(Samples(tagged, D), QUARTER, [deterministic_halve, *suffix])
    expected = run(TorchDataLoader(reference, **options), lambda e: reference.at(e, R * e), epochs)
    cached = make(transform=[deterministic_halve, *suffix])
    kind, begin = (hotset.DataLoader, lambda _: None) if ours else (TorchDataLoader, cached.set_epoch)
    got = run(kind(cached, **options, multiprocessing_context=method), begin, epochs)
    equal_batches(got, expected, "batches")
    assert cursor_of(cached) == R * (epochs - 1)


@pytest.mark.parametrize(
    ("workers", "suffix", "ours"),
    rarely(all_pairs([0, 2], [[], [draw_all]], [True, False]), (2, [], False)),
)
def test_with_and_without_the_cache_bit_for_bit(
    workers: int, suffix: list[Any], ours: bool, make: Make
) -> None:
    compare(make, suffix, workers, "fork" if workers else None, ours=ours, epochs=4)


@pytest.mark.chaos
def test_unlike_monais_window_it_works_in_spawned_workers(make: Make) -> None:
    """SmartCacheDataset holds a lock that cannot be pickled."""
    compare(make, [draw_all], 1, "spawn", epochs=2)
    lines = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # which a zombie counts as
            lines.append(child.cmdline())
    helpers = [line for line in lines if any("spawn_main" in word for word in line)]
    assert len(helpers) == 1, "which are started as the workers are"


@pytest.mark.parametrize("sample", [mapping, nested, ragged, text])
def test_a_hit_is_indistinguishable_from_a_miss(sample: Any, make: Make) -> None:
    """Over two cycles: rows are used again, but samples that were handed out do not change."""
    cached = make(Samples(sample, D))
    reference = Reference(Samples(sample, D), QUARTER)
    for epoch in range(26):
        cached.set_epoch(epoch)
        reference.at(epoch, R * epoch)
        for place in (*range(N), -1, np.int64(3)):
            got = cached[int(place) if place < 0 else place]
            assert difference(got, reference[int(place)]) is None
            scribble(got)
    assert cached.stats().hits > 20 * N
    assert cached.check() == []


def test_batches_stay_as_they_were_when_their_samples_have_left(make: Make) -> None:
    loader = loader_over(make())
    kept = [batch for _ in range(14) for batch in loader]
    assert len(numbers(kept)) == 14 * N
    assert all(leaf.numel() == 0 or leaf.add_(1) is leaf for batch in kept for leaf in leaves(batch))


def test_samples_of_any_size_over_many_laps_within_the_memory(make: Make) -> None:
    """Ragged records of 1 to 13 lines: samples that have left make room for the next."""
    given = 200_000
    cached = make(Samples(_rope, 60), hotset.Window(12, replace=0.5, wait=True), memory=given)
    loader = hotset.DataLoader(cached, batch_size=4, collate_fn=hotset.collate.pad(), num_workers=0)
    for _ in range(60):  # six cycles, fifteen laps
        lengths = {int(label) for _, labels in _unpadded(loader) for label in labels}
        assert len(lengths) == 12
    assert cursor_of(cached) == 59 * 6
    assert memory_of(cached) <= given + 4096
    assert cached.stats().hits > 40 * 12
    assert cached.check() == []


def _rope(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((50 + index * 37 % 700,), index + 1, dtype=torch.int32), index


def _unpadded(loader: Any) -> Iterator[Any]:
    for ropes, labels in loader:
        for rope, label in zip(ropes, labels.tolist(), strict=True):
            kept = rope[rope != 0]
            equal_batches((kept.clone(), label), _rope(label))
        yield ropes, labels


# ---- preparing too slowly ----------------------------------------------------------------------------


def test_late_samples_are_counted_warned_of_once_and_added_later_without_waiting(
    make: Make, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residents, "_STARTING_SECONDS", 0.0)
    cached = make(gated, hotset.Window(N, replace=0.25))
    gated.shut(incoming(cached, D - N))
    loader = loader_over(cached)
    first = numbers(loader)
    assert eventually(gated.waited), "a helper stands before a gate"
    assert sorted(numbers(loader)) == sorted(first), "read once, as by helpers that were just started"
    assert (cached.stats().late, cursor_of(cached)) == (2, 0)
    with pytest.warns(HotsetWarning, match="4 of the 4 samples .* were not ready") as told:
        assert sorted(numbers(loader)) == sorted(first)
    assert len(told) == 1
    assert is_a_sentence(str(told[0].message))
    assert "replace=" in str(told[0].message)
    assert (cached.stats().late, cursor_of(cached)) == (4, 0)
    numbers(loader)
    assert os.getpid() not in gated.waited(), "training has not waited"
    gated.open()
    assert (cached.stats().late, current_of(cached).window.position.behind) == (6, 6)
    cursors = []
    for _ in range(5):  # there is room for two more beside the two of each boundary
        ready(cached, min(R + current_of(cached).window.position.behind, 2 * R))
        used = numbers(loader)
        cursors.append(cursor_of(cached))
    assert cursors == [4, 8, 12, 14, 16], "all of it is made up: 8 boundaries, 2 at each"
    assert len(set(used) - set(first)) > 4
    assert (cached.stats().late, current_of(cached).window.position.behind) == (6, 0)


def test_a_window_that_cannot_move_says_that_its_samples_come_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that has the cache may be stopped while it holds the lock under which windows move."""
    monkeypatch.setattr("hotset.store.claims._LOCK_SECONDS", 0.05)
    cached = make(Samples(tagged, D), hotset.Window(N, replace=0.25, wait=True))
    loader = loader_over(cached)
    first = numbers(loader)
    description = locks.Description(locks.reopen(store_of(cached).segment.fd))
    with locks.Held(description, 0, patience=10.0) as held:  # a process that reads ahead may have it now
        assert held
        with recorded() as caught:
            assert sorted(numbers(loader)) == sorted(numbers(loader)) == sorted(first)
        (told,) = {str(w.message) for w in caught}
        assert "its window does not move" in told
        assert is_a_sentence(told)
    monkeypatch.setattr("hotset.store.claims._LOCK_SECONDS", 60.0)  # that process again
    with recorded() as caught:
        assert sorted(numbers(loader)) != sorted(first)
    assert not caught


def test_samples_that_are_ready_enter_without_the_late_ones(make: Make, gated: Gated) -> None:
    cached = make(gated, hotset.Window(N, replace=0.5))
    gated.shut(incoming(cached, 8)[2:3])
    # A helper may read them together with the one that waits.
    current_of(cached).fill(np.arange(N, N + 2), keep=False)
    current_of(cached).fill(np.arange(N + 3, N + 4), keep=False)
    loader = loader_over(cached)
    first = numbers(loader)
    again = numbers(loader)
    assert (cursor_of(cached), cached.stats().late) == (2, 2), "up to the first that is missing"
    assert set(again) - set(first) == set(map(current_of(cached).window.sample, (N, N + 1)))


def test_with_wait_the_boundary_waits(make: Make, gated: Gated) -> None:
    cached = make(gated)
    gated.shut(incoming(cached, R))
    loader = loader_over(cached)
    first = numbers(loader)
    assert eventually(gated.waited)
    at_the_boundary = threading.Event()

    def opening() -> None:
        at_the_boundary.wait(60)
        gated.open()

    opener = threading.Thread(target=opening)
    opener.start()
    at_the_boundary.set()
    second = numbers(loader)
    opener.join()
    assert (cursor_of(cached), cached.stats().late) == (R, 0)
    assert len(set(second) - set(first)) == R


def test_with_wait_the_cursor_is_certain_though_something_cannot_be_kept(make: Make) -> None:
    cached = make()
    # Far ahead, in the slots of what comes at the fifth boundary.
    current_of(cached).fill(np.arange(30, 32), keep=False)
    loader = loader_over(cached)
    reference = Reference(Samples(tagged, D), QUARTER)
    for epoch in range(12):
        assert numbers(loader) == reference.at(epoch, R * epoch).order
    assert cached.stats().late == 0


def test_auto_takes_what_is_ready_up_to_half_and_nothing_is_late(make: Make, gated: Gated) -> None:
    cached = make(gated, hotset.Window(N, replace="auto"))
    loader = loader_over(cached)
    gated.shut(incoming(cached, 5)[3:])
    # A helper may read them together with the one that waits.
    current_of(cached).fill(np.arange(N, N + 3), keep=False)
    first = numbers(loader)
    second = numbers(loader)
    assert cursor_of(cached) == 3
    assert len(set(second) - set(first)) == 3
    third = numbers(loader)
    assert cursor_of(cached) == 3
    assert sorted(third) == sorted(second)
    gated.open()
    ready(cached, 4)
    numbers(loader)
    assert cursor_of(cached) == 7, "half of the residents, and no more"
    assert cached.stats().late == 0


def test_the_first_epoch_fills_the_window_and_helpers_do_not_overtake_it(make: Make, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    cached = make(Counting(tagged, D, log), hotset.Window(N, replace=0.25))
    log.reset()
    batches = iter(loader_over(cached))
    next(batches)
    residents = current_of(cached).window
    assert set(log.order()) <= set(incoming(cached, R)) | {
        residents.sample(int(entry)) for entry in residents.entries(np.arange(N))
    }
    assert log.total() >= 4
    list(batches)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("workers", [0, 2])
def test_prefill_fills_before_the_first_epoch_and_shows_how_far_it_is(
    workers: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReadLog(tmp_path / "reads")
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    cached = make(Counting(tagged, D, log), hotset.Window(N, replace=0.25, prefill=True))
    log.reset()
    batches = iter(loader_over(cached, num_workers=workers))
    assert cached.stats().cached == N
    assert set(log.counts()) >= {current_of(cached).window.sample(entry) for entry in range(N)}
    assert re.search(r"Counting .*0/8.*8/8", shown.getvalue(), re.DOTALL)
    assert len(numbers(batches)) == N
    assert cached.stats().hits == N
    assert max(log.counts().values()) == 1


@pytest.mark.parametrize("first", [0, 1, 7])
@pytest.mark.parametrize("replace", [0, 0.25])
def test_prefill_whatever_the_first_epoch_is_called(replace: float, first: int, make: Make) -> None:
    cached = make(window=hotset.Window(N, replace=replace, prefill=True))
    cached.set_epoch(first)
    assert (cached.stats().cached, cursor_of(cached)) == (N, 0)
    numbers(loader_over(cached))
    assert (cached.stats().hits, cached.stats().misses) == (N, 0)


def test_prefill_shows_no_progress_without_a_terminal(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    numbers(loader_over(make(window=hotset.Window(N, replace=0.25, prefill=True))))
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_source_while_prefilling_is_raised(make: Make, tmp_path: Path) -> None:
    source = Raising(tagged, D, 0, tmp_path / "armed")
    window = hotset.Window(N, replace=0.25, prefill=True)
    source.index = int(RunningWindow(D, N, 2 * R).entries(3, 1)[0])
    cached = make(source, window)
    source.arm()
    found = failure(lambda: next(iter(loader_over(cached))))
    assert found.kind is PlainError
    assert "misbehave" in found.text


# ---- epochs ------------------------------------------------------------------------------------------


def test_set_epoch_moves_the_window_once_for_each_epoch(make: Make) -> None:
    with pytest.warns(HotsetWarning, match="nothing of Samples can be cached"):
        uncached = make(Samples(opaque, D))
    for epoch in (0, 0, 1, 1, 2, 5):
        uncached.set_epoch(epoch)
    assert cursor_of(uncached) == 3 * R
    cached = make()
    reference = Reference(Samples(tagged, D), QUARTER)
    loader = TorchDataLoader(cached, batch_size=4)
    cursors = []
    for epoch in (0, 0, 1, 1, 2, 5):
        cached.set_epoch(epoch)
        cursors.append(cursor_of(cached))
        assert numbers(loader) == reference.at(epoch, cursors[-1]).order
    assert cursors == [0, 0, 2, 2, 4, 6]


def test_an_epoch_begun_by_set_epoch_is_not_begun_again_by_the_loader(make: Make) -> None:
    cached = make()
    loader = loader_over(cached)
    cached.set_epoch(0)
    cached.set_epoch(1)
    numbers(loader)
    assert (current_of(cached).window.position.epoch, cursor_of(cached)) == (1, R)
    numbers(loader)
    assert (current_of(cached).window.position.epoch, cursor_of(cached)) == (2, 2 * R)
    cached.set_epoch(3)
    numbers(loader)
    assert (current_of(cached).window.position.epoch, cursor_of(cached)) == (3, 3 * R)


def test_an_epoch_that_is_resumed_and_announced_is_followed_by_the_next(make: Make) -> None:
    loader = loader_over(make())
    numbers(loader)
    training(batches := iter(loader), 2)
    state = through_a_checkpoint(loader.state_dict())
    expected = [numbers(batches), numbers(loader), numbers(loader)]
    again = make()
    loader = loader_over(again)
    loader.load_state_dict(state)
    again.set_epoch(1)
    assert [numbers(loader) for _ in range(3)] == expected


def test_the_window_continues_if_epochs_are_counted_from_0_again(make: Make) -> None:
    """A second training in one process: its epochs continue the window."""
    cached = make()
    for epoch in (0, 1, 2, 0, 1, 2, 3):
        cached.set_epoch(epoch)
        assert len(numbers(TorchDataLoader(cached, batch_size=4))) == N
    assert cursor_of(cached) == 6 * R


def test_a_loader_that_never_sets_the_epoch_gets_one_warning(make: Make) -> None:
    cached = make()
    loader = TorchDataLoader(cached, batch_size=4)
    first = numbers(loader)
    assert numbers(loader) == first
    with pytest.warns(HotsetWarning, match=r"set_epoch.*hotset\.DataLoader") as told:
        assert numbers(loader) == first
    assert len(told) == 1
    assert is_a_sentence(str(told[0].message))
    for _ in range(3):
        assert numbers(loader) == first
    cached.set_epoch(0)
    cached.set_epoch(1)
    assert len(set(numbers(loader)) - set(first)) == R


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_sets_epochs_gets_no_warning(workers: int, make: Make) -> None:
    cached = make()
    loader = TorchDataLoader(cached, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(6):
        cached.set_epoch(epoch)
        numbers(loader)
    for _ in range(4):
        numbers(loader_over(cached))


@pytest.mark.parametrize("kind", [hotset.DataLoader, TorchDataLoader])
def test_a_pass_that_is_left_early_is_followed_by_the_next(kind: Any, make: Make) -> None:
    cached = make()
    reference = Reference(Samples(tagged, D), QUARTER)
    loader = kind(cached, batch_size=2, num_workers=2, persistent_workers=True)
    for epoch in range(6):
        cached.set_epoch(epoch)
        expected = reference.at(epoch, R * epoch).order
        batches = iter(loader)
        took = numbers(itertools.islice(batches, epoch))
        assert took == expected[: 2 * epoch]


def test_subsets_and_concatenations(make: Make) -> None:
    """Each window behind a dataset moves by itself; indices are places in their epochs."""
    other = hotset.Window(6, replace=0.5, seed=3, wait=True)
    first, second = make(), make(Samples(tagged, 40), other)
    both = ConcatDataset([Subset(first, [5, 0, 3, 3]), second])
    loader = loader_over(both, batch_size=3)
    a, b = Reference(Samples(tagged, D), QUARTER), Reference(Samples(tagged, 40), other)
    for epoch in range(5):
        order = a.at(epoch, R * epoch).order
        expected = [order[i] for i in (5, 0, 3, 3)] + b.at(epoch, 3 * epoch).order
        assert numbers(loader) == expected
    assert (cursor_of(first), cursor_of(second)) == (4 * R, 4 * 3)


def test_one_window_twice_behind_a_dataset_moves_once(make: Make) -> None:
    cached = make()
    both = ConcatDataset([Subset(cached, [0, 1, 2, 3]), Subset(cached, [4, 5, 6, 7])])
    loader = loader_over(both)
    reference = Reference(Samples(tagged, D), QUARTER)
    for epoch in range(4):
        assert numbers(loader) == reference.at(epoch, R * epoch).order


# ---- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_preparing_reaches_the_caller_and_training_can_continue(
    workers: int, make: Make, tmp_path: Path
) -> None:
    source = Raising(tagged, D, int(RunningWindow(D, N, 2 * R).entries(N + 1, 1)[0]), tmp_path / "armed")
    cached = make(source, hotset.Window(N, replace=0.25))
    source.arm()
    loader = loader_over(cached, num_workers=workers)
    raised: list[Any] = []

    def until_it_is_raised() -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HotsetWarning)
            try:
                numbers(loader)
            except PlainError as error:
                raised.append(taken_apart(error).text)
        return bool(raised)

    assert eventually(until_it_is_raised)
    (said,) = raised
    assert f"sample {source.index} is broken" in said
    assert "in misbehave" in said, "with its own traceback"
    assert "prefetch worker" in said or "worker process" in said
    source.disarm()
    before = cursor_of(cached)

    def goes_on() -> bool:
        try:
            return len(numbers(loader)) == N and cursor_of(cached) >= before + 4
        except PlainError:
            return False  # another process had met the sample before it was mended

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HotsetWarning)
        assert eventually(goes_on)


def test_an_error_while_preparing_is_raised_with_the_next_batch(make: Make, tmp_path: Path) -> None:
    source = Raising(tagged, D, int(RunningWindow(D, N, 2 * R).entries(N, 1)[0]), tmp_path / "armed")
    cached = make(source, hotset.Window(N, replace=0.25))
    source.arm()
    batches = iter(loader_over(cached, batch_size=1))
    assert eventually(lambda: current_of(cached).window._pool.idle)
    found = failure(lambda: next(batches))
    assert found.kind is PlainError
    assert "prefetch worker" in found.text


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_preparing_takes_no_batch(workers: int, make: Make, tmp_path: Path) -> None:
    source = Raising(tagged, D, int(RunningWindow(D, N, 2 * R).entries(N, 1)[0]), tmp_path / "armed")
    expected = numbers(loader_over(make(), batch_size=1))
    cached = make(source, hotset.Window(N, replace=0.25))
    source.arm()
    loader = loader_over(cached, batch_size=1, num_workers=workers)
    batches, found = iter(loader), list[Any]()
    counted = []  # by the state, and here, as an error came
    while len(found) < len(expected):
        try:
            found.append(next(batches))
        except PlainError:
            counted.append((loader.state_dict()["batches"], len(found)))
        assert eventually(lambda: current_of(cached).window._pool.idle)
    assert len(counted) == 1
    assert counted[0][0] == counted[0][1]
    assert numbers(found) == expected
    assert next(batches, None) is None


class RaisingLate(Raising):
    """Raises once a gate is open, and waits for that."""

    def misbehave(self) -> None:
        gate = Path(f"{self.marker}.shut")
        assert eventually(lambda: not gate.exists())
        super().misbehave()


def test_an_error_that_comes_as_the_window_moves_is_raised_before_its_sample_is_used(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = RaisingLate(tagged, D, int(RunningWindow(D, N, 2 * R).entries(N + 1, 1)[0]), tmp_path / "armed")
    cached = make(source, hotset.Window(N, replace=0.25))
    source.arm()
    gate = Path(f"{source.marker}.shut")
    gate.touch()
    loader = loader_over(cached)
    assert len(numbers(loader)) == N
    move = residents.ActiveWindow._move

    def move_late(self: Any, *given: Any) -> None:
        gate.unlink()
        assert eventually(lambda: self._pool.idle)
        move(self, *given)

    monkeypatch.setattr(residents.ActiveWindow, "_move", move_late)
    found = failure(lambda: next(iter(loader)))
    assert found.kind is PlainError
    assert "prefetch worker" in found.text
    source.disarm()
    monkeypatch.undo()
    assert len(numbers(loader)) == N


def test_a_sample_that_can_never_be_read_does_not_hold_the_window_up(make: Make, tmp_path: Path) -> None:
    """It enters, and raises when it is used, as without a cache; the samples after it enter as well."""
    source = Raising(tagged, D, int(RunningWindow(D, N, 2 * R).entries(N, 1)[0]), tmp_path / "armed")
    cached = make(source, hotset.Window(N, replace=0.25))
    source.arm()
    loader = loader_over(cached)
    raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HotsetWarning)
        for _ in range(40):
            try:
                numbers(loader)
            except PlainError as error:
                taken_apart(error)
                raised += 1
            assert eventually(lambda: current_of(cached).window._pool.idle)
            if cursor_of(cached) >= 12:
                break
    assert raised >= 2
    assert cursor_of(cached) >= 12, "it has come and left again"


def test_a_dataset_that_shrinks_raises_its_own_error(make: Make, tmp_path: Path) -> None:
    source = Shrinking(tmp_path / "shrunk")
    cached = make(source, hotset.Window(N, replace=0.5, shuffle=False))
    loader = loader_over(cached)
    numbers(loader)
    (tmp_path / "shrunk").touch()
    raised: list[str] = []

    def until_it_is_raised() -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HotsetWarning)
            try:
                numbers(loader)
            except IndexError as error:
                raised.append(taken_apart(error).text)
        return bool(raised)

    assert eventually(until_it_is_raised)
    assert "there are only 10 now" in raised[0]


class Shrinking(Dataset[Any]):
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __len__(self) -> int:
        return 10 if os.path.exists(self.marker) else D

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(f"there are only {len(self)} now, and no {index}")
        return tagged(index)


def test_a_window_has_n_samples_and_refuses_other_indices(make: Make) -> None:
    cached = make()
    equal_batches(cached[-1], cached[N - 1])
    equal_batches(cached.__getitems__([-1, 0]), [cached[7], cached[0]])
    for index in (N, D - 1, -N - 1):
        with pytest.raises(IndexError, match="8 resident samples"):
            cached[index]
        with pytest.raises(IndexError):
            cached.__getitems__([0, index])
    cached.set_epoch(0)
    assert len(list(cached)) == N


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"resident": 0}, ArgumentError),
        ({"resident": -3}, ArgumentError),
        ({"resident": 0.0}, ArgumentError),
        ({"resident": 1.5}, ArgumentError),
        ({"resident": True}, ArgumentError),
        ({"resident": float("nan")}, ArgumentError),
        ({"resident": None}, ArgumentError),
        ({"resident": "plenty"}, QuantityError),
        ({"replace": -0.1}, ArgumentError),
        ({"replace": 1.01}, ArgumentError),
        ({"replace": 2}, ArgumentError),
        ({"replace": float("nan")}, ArgumentError),
        ({"replace": "much"}, ArgumentError),
        ({"replace": None}, ArgumentError),
        ({"seed": 1.5}, ArgumentError),
        ({"replace": "auto", "wait": True}, ArgumentError),
    ],
)
def test_impossible_windows_are_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    found = failure(lambda: hotset.Window(**{"resident": N, **wrong}))
    assert found.kind is error
    assert is_a_sentence(found.text), found.text


def test_memory_for_not_even_one_sample_is_refused(make: Make) -> None:
    found = failure(lambda: make(window=hotset.Window("40B")))
    assert found.kind is ArgumentError
    assert is_a_sentence(found.text)


def test_a_window_argument_of_another_type_is_refused_with_a_sentence() -> None:
    found = failure(lambda: hotset.cache(Samples(tagged, D), window=50))  # type: ignore[arg-type]
    assert found.kind is hotset.ArgumentError
    assert is_a_sentence(found.text)
    assert "hotset.Window(resident=50)" in found.text


@pytest.mark.parametrize("resident", [D + 1, 10**12])
def test_more_residents_than_samples_give_a_warning_and_all_are_cached(resident: int, make: Make) -> None:
    with pytest.warns(HotsetWarning, match="more than the 24 samples there are, so all are cached") as told:
        _has_all(make(window=hotset.Window(resident)))
    assert len(told) == 1
    assert is_a_sentence(str(told[0].message))


@pytest.mark.parametrize("resident", [D, 1.0, "1GiB"])
def test_a_window_as_large_as_the_data_caches_all(resident: Any, make: Make) -> None:
    _has_all(make(window=hotset.Window(resident)))


def test_the_memory_of_a_window_as_large_as_the_data_is_the_windows(make: Make) -> None:
    source = Samples(big_image_and_label, 100)
    with recorded() as told:
        cached = make(source, hotset.Window("64MiB"), memory="200KiB")
        _ = [cached[index] for index in range(100)]
    assert cached.stats().cached == 100
    assert told == []


def _has_all(cached: Any) -> None:
    assert len(cached) == D
    loader = loader_over(cached)
    for _ in range(3):
        assert numbers(loader) == list(range(D))
    assert cached.stats().cached == D
    cached.set_epoch(4)


def test_residents_without_memory_give_a_warning_and_come_from_the_source(make: Make) -> None:
    source = Samples(big_image_and_label, 100)
    with pytest.warns(HotsetWarning, match=r"window of 50 samples.*Lower `resident=`"):
        cached = make(source, hotset.Window(50, replace=0.1, wait=True), memory="200KiB")
    loader = loader_over(cached)
    reference = Reference(source, hotset.Window(50, replace=0.1, wait=True))
    with recorded() as told:
        for epoch in range(4):
            equal_batches([*loader], [*TorchDataLoader(reference.at(epoch, 5 * epoch), batch_size=4)])
    assert len(told) <= 1
    assert all("resident" in str(one.message) for one in told)
    assert 0 < cached.stats().cached < 50
    assert cached.check() == []


@pytest.mark.parametrize(
    ("cores", "workers", "helpers"), [(8, 0, 1), (8, 3, 3), (2, 2, 1), (1, 4, 1), (4, 9, 3)]
)
def test_there_are_as_many_helpers_as_workers_and_a_core_is_left(
    cores: int, workers: int, helpers: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    begun: list[int] = []
    cached = make()
    monkeypatch.setattr(
        type(current_of(cached).window),
        "begin_next",
        lambda self, processes, context: begun.append(processes),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=workers)
        next(iter(loader))
    assert begun == [helpers]


def test_set_epoch_before_a_loader_begins_does_not_decide_on_the_helpers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def helpers() -> list[str]:
        return [type(each).__name__ for each in multiprocessing.active_children() if "fill" in each.name]

    cached = make()
    cached.set_epoch(0)
    assert len(helpers()) == 1
    for workers, context in ((2, "spawn"), (3, "spawn"), (0, None)):
        next(iter(loader_over(cached, num_workers=workers, multiprocessing_context=context)))
        assert helpers() == ["SpawnProcess"] * (workers or 3)
        cached.set_epoch(workers + 1)


def test_entries_far_ahead_never_hold_the_window_up(make: Make) -> None:
    """A helper of another process may fill them, from a list made before the window was moved back."""
    cached = make(Samples(tagged, D), QUARTER)
    current_of(cached).fill(np.arange(30, 32), keep=False)
    loader = loader_over(cached)
    for epoch in range(8):
        assert len(numbers(loader)) == N
        assert cursor_of(cached) == R * epoch
    assert cached.stats().late == 0


def test_a_resumed_pass_prepares_the_next_boundary(make: Make) -> None:
    first = make(Samples(tagged, D), hotset.Window(N, replace=0.25))
    loader = loader_over(first)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    second = make(Samples(tagged, D), hotset.Window(N, replace=0.25))
    again = loader_over(second)
    again.load_state_dict(state)
    list(again)
    ready(second)
    list(again)
    assert cursor_of(second) == R
    assert second.stats().late == 0


@pytest.mark.parametrize("kind", [hotset.DataLoader, TorchDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_window_over_uncacheable_samples_moves_and_reads_the_source(
    workers: int, kind: Any, make: Make
) -> None:
    """With persistent workers too, which have no cache to read the position from."""
    source = Samples(_opaque_and_label, D)
    with pytest.warns(HotsetWarning, match="nothing of Samples can be cached"):
        cached = make(source)
    reference = Reference(source, QUARTER)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = kind(cached, batch_size=4, collate_fn=list, **options)
    for epoch in range(4):
        if kind is TorchDataLoader:
            cached.set_epoch(epoch)
        labels = [label for batch in loader for _, label in batch]
        assert labels == reference.at(epoch, R * epoch).order
    del loader  # with its workers, for which the end of the test would wait


class Together(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_a_window_over_uncacheable_samples_that_come_in_batches_resumes(make: Make) -> None:
    def loader() -> hotset.DataLoader[Any]:
        with pytest.warns(HotsetWarning, match="nothing of Together can be cached"):
            cached = make(Together(_opaque_and_label, D))
        return hotset.DataLoader(cached, batch_size=4, collate_fn=list)

    def labels(batches: Any) -> list[int]:
        return [label for batch in batches for _, label in batch]

    first, second = loader(), loader()
    reference = Reference(Samples(_opaque_and_label, D), QUARTER)
    assert labels(first) == reference.at(0, 0).order
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert labels(second) == labels(batches) == reference.at(1, R).order[4:]
    assert labels(second) == reference.at(2, 2 * R).order


def test_a_full_shared_memory_fails_no_window(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    source = Samples(_opaque_and_label, D)
    with pytest.warns(HotsetWarning, match="nothing of Samples can be cached"):
        cached = make(source)
    reference = Reference(source, QUARTER)
    loader = hotset.DataLoader(cached, batch_size=4, collate_fn=list)
    for epoch in range(3):
        labels = [label for batch in loader for _, label in batch]
        assert labels == reference.at(epoch, R * epoch).order


def _opaque_and_label(index: int) -> Any:
    return opaque(index)[1], index


@pytest.mark.filterwarnings("ignore:.*stay uncached:hotset.HotsetWarning")
def test_samples_of_another_form_come_from_the_source_without_delay(make: Make) -> None:
    cached = make(Samples(_sometimes_odd, D), hotset.Window(N, replace=0.25))
    reference = Reference(Samples(_sometimes_odd, D), QUARTER)
    loader = hotset.DataLoader(cached, batch_size=4, collate_fn=list)
    for epoch in range(14):
        got = [sample for batch in loader for sample in batch]
        expected = reference.at(epoch, cursor_of(cached))
        equal_batches(got, [expected[place] for place in range(N)])
        ready(cached)
    assert cursor_of(cached) == 13 * R
    assert cached.stats().late == 0


def _sometimes_odd(index: int) -> Any:
    return (tagged(index)[0], index if index % 12 else f"odd {index}")


def test_a_cleared_window_is_filled_again(make: Make) -> None:
    cached = make()
    loader = loader_over(cached)
    reference = Reference(Samples(tagged, D), QUARTER)
    for epoch in range(6):
        if epoch in (2, 4):
            cached.clear()
            assert cached.stats().cached == 0
        assert numbers(loader) == reference.at(epoch, R * epoch).order
        assert cached.stats().cached == N
    assert cached.check() == []


def test_a_closed_window_reads_the_source(make: Make) -> None:
    children = psutil.Process().children()
    cached = make()
    loader = loader_over(cached)
    reference = Reference(Samples(tagged, D), QUARTER)
    numbers(loader)
    cached.close()
    cached.close()
    assert numbers(loader) == reference.at(1, R).order
    assert numbers(loader) == reference.at(2, 2 * R).order
    assert psutil.Process().children() == children


# ---- going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "persistent", "stop"),
    rarely(
        [
            (workers, persistent, stop)
            for workers, persistent in ((0, False), (2, False), (2, True))
            for stop in (0, 2, None)
        ],
        (0, False, 2),
        (2, False, 0),
        (2, False, None),
        (2, True, 0),
        (2, True, 2),
    ),
)
def test_a_state_is_resumed_with_a_cold_cache(
    stop: int | None, workers: int, persistent: bool, make: Make
) -> None:
    """In mid-epoch and between two: the rest of the epoch and two more, with live draws."""
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "num_workers": workers}

    def loader() -> Any:
        return hotset.DataLoader(
            make(transform=[deterministic_halve, draw_all]), persistent_workers=persistent, **options
        )

    check(loader, stop, [None, None], passes=2)


def test_late_samples_are_part_of_the_state(make: Make, gated: Gated) -> None:
    window = hotset.Window(N, replace=0.25)
    cached = make(gated, window)
    gated.shut(incoming(cached, D - N))
    loader = loader_over(cached)
    numbers(loader)
    numbers(loader)
    state = through_a_checkpoint(loader.state_dict())
    gated.open()
    again = make(gated, window)
    loader = loader_over(again)
    loader.load_state_dict(state)
    assert current_of(again).window.position == current_of(cached).window.position == (1, 0, 2)
    numbers(loader)
    assert cursor_of(again) == 4, "in a cold cache there is nothing to wait for: what was late goes in"


def test_an_earlier_state_is_resumed_in_the_same_cache(make: Make) -> None:
    """An earlier state is loaded after the window has moved on: it moves back, and serves right samples."""
    cached = make()
    loader = loader_over(cached, batch_size=2)
    batches = iter(loader)
    training(batches, 2)
    state = through_a_checkpoint(loader.state_dict())
    expected = [numbers(batches)] + [numbers(loader) for _ in range(10)]
    loader.load_state_dict(state)
    assert numbers(loader) == expected[0]
    for used in expected[1:]:
        assert numbers(loader) == used
        assert cached.stats().cached == N, "nothing that is further on is in the way"
    assert cached.check() == []


def test_a_state_that_another_rank_has_loaded_removes_no_samples(make: Make) -> None:
    """Ranks load one state one after the other, and the first may have begun its epoch by then."""
    first = make()
    with pickle.loads(pickle.dumps(first)) as second:
        loaders = [loader_over(first), loader_over(second)]
        assert numbers(loaders[0]) == numbers(loaders[1])
        state = through_a_checkpoint(loaders[0].state_dict())
        expected = [numbers(loaders[0]), numbers(loaders[0])]
        for loader in loaders:
            loader.load_state_dict(state)
            assert numbers(loader) == expected[0]
            assert first.stats().cached == N
        assert [numbers(loader) for loader in loaders] == [expected[1]] * 2
        assert cursor_of(first) == cursor_of(second) == 2 * R


def test_a_rank_that_is_slow_to_load_a_state_moves_no_window_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has loaded it, and read an epoch, since this one saw that the window has to go back."""
    first = make()
    with pickle.loads(pickle.dumps(first)) as second:
        loaders = [loader_over(first), loader_over(second)]
        numbers(loaders[0])
        state = through_a_checkpoint(loaders[0].state_dict())
        expected = [numbers(loaders[0]) for _ in range(2)]
        leads, began = Sizes.leads, []

        def overtaken(self: Sizes, then: WindowState, now: WindowState) -> bool:
            found = leads(self, then, now)
            monkeypatch.setattr(Sizes, "leads", leads)
            if not began:
                loaders[0].load_state_dict(state)
                assert numbers(loaders[0]) == expected[0]
                began.append(WindowState.of(store_of(first)))
            return found

        monkeypatch.setattr(Sizes, "leads", overtaken)
        loaders[1].load_state_dict(state)
        assert began == [WindowState.of(store_of(first))]
        assert first.stats().cached == N
        assert numbers(loaders[1]) == expected[0]
        assert [numbers(loader) for loader in loaders] == [expected[1]] * 2


def test_a_window_moves_one_epoch_ahead_and_no_further() -> None:
    sizes = Sizes.of(QUARTER, D, 1)
    at = WindowState(1, 3, 2 * R, 0, 0)
    for epoch, cursor, behind, leads in [
        (3, 2 * R, 0, True),
        (3, 2 * R + 1, 0, False),
        (3, 2 * R - 1, 1, False),
        (4, 3 * R, 0, True),
        (4, 3 * R - 1, 1, True),
        (4, 2 * R, R, True),
        (4, 2 * R, 0, False),
        (4, 3 * R + 1, 0, False),
        (5, 4 * R, 0, False),
        (5, 3 * R, 0, False),
        (2, R, 0, False),
    ]:
        assert sizes.leads(at, WindowState(0, epoch, cursor, behind, 9)) == leads


@pytest.mark.parametrize(
    "other",
    [
        hotset.Window(N, replace=0.25, wait=True, seed=1),
        hotset.Window(N, replace=0.5, wait=True),
        hotset.Window(N, replace=0.25, wait=True, shuffle=False),
        hotset.Window(N, replace="auto"),
        hotset.Window(N - 1, replace=0.25, wait=True),
        None,
    ],
)
def test_a_state_of_another_window_is_refused(other: Any, make: Make) -> None:
    cached = make(key="same")
    state = through_a_checkpoint(loader_over(cached).state_dict())
    with hotset.cache(Samples(tagged, D), window=other, key="same") as cached:
        found = failure(lambda: loader_over(cached).load_state_dict(state))
    assert found.kind is StateError
    assert is_a_sentence(found.text), found.text
    with hotset.cache(Samples(tagged, D), window=other, key="same") as cached:
        backwards = loader_over(cached).state_dict()
    found = failure(lambda: loader_over(make(key="same")).load_state_dict(backwards))
    assert found.kind is StateError


def test_a_pickled_cache_shares_the_window(make: Make) -> None:
    cached = make()
    loader = loader_over(cached)
    numbers(loader)
    expected = numbers(loader)
    with pickle.loads(pickle.dumps(cached)) as other:
        assert len(other) == N
        assert [other[place][1] for place in range(N)] == expected
        assert other.stats().cached == N
        hits = cached.stats().hits
        other[0]
        assert cached.stats().hits == hits + 1


# ---- the faults of MONAI's SmartCacheDataset: each of these fails there -------------------------------


def test_unlike_monais_update_cache_a_boundary_does_not_block(make: Make, gated: Gated) -> None:
    """MONAI's ``update_cache()`` waits for the replacement for any time; here the gates stay shut."""
    cached = make(gated, hotset.Window(N, replace=0.25))
    gated.shut(incoming(cached, D - N))
    loader = loader_over(cached)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HotsetWarning)
        assert [len(numbers(loader)) for _ in range(5)] == [N] * 5
    assert os.getpid() not in gated.waited()


def test_unlike_monais_a_restart_repeats_no_items(make: Make) -> None:
    """In MONAI ``[2, 3, 4, 5]`` becomes ``[4, 5, 4, 5]`` after shutdown and start."""
    window = hotset.Window(4, replace=0.5, shuffle=False, wait=True)
    first = make(Samples(tagged, 8), window)
    loader = loader_over(first)
    assert [numbers(loader) for _ in range(2)] == [[0, 1, 2, 3], [2, 3, 4, 5]]
    state = loader.state_dict()
    first.close()
    loader = loader_over(make(Samples(tagged, 8), window))
    loader.load_state_dict(state)
    assert [numbers(loader) for _ in range(3)] == [[4, 5, 6, 7], [6, 7, 0, 1], [0, 1, 2, 3]]


def test_unlike_monais_an_exception_in_the_replacer_does_not_hang(make: Make, tmp_path: Path) -> None:
    """In MONAI the replacement thread dies of it, and ``update_cache()`` waits for the thread for ever."""
    source = Raising(tagged, D, int(RunningWindow(D, N, 2 * R).entries(N, 1)[0]), tmp_path / "armed")
    cached = make(source)
    source.arm()
    loader = loader_over(cached)
    found = failure(lambda: [numbers(loader) for _ in range(3)])
    assert found.kind is PlainError
    source.disarm()
    raised = 0
    for _ in range(7):
        try:
            assert len(numbers(loader)) == N
        except PlainError as error:
            taken_apart(error)
            raised += 1
    assert raised <= 1, "the helper had met it too"
    assert cursor_of(cached) >= 5 * R


@pytest.mark.parametrize("kind", [hotset.DataLoader, TorchDataLoader])
def test_unlike_monais_persistent_workers_see_the_window_move(kind: Any, make: Make) -> None:
    """In MONAI they have a copy of the first epoch's cache, and serve it for ever."""
    cached = make(transform=[deterministic_halve, draw_all])
    loader = kind(cached, batch_size=2, num_workers=2, persistent_workers=True)
    reference = Reference(Samples(tagged, D), QUARTER)
    for epoch in range(6):
        if kind is TorchDataLoader:
            cached.set_epoch(epoch)
        labels = [int(label) for batch in loader for label in _labels(batch)]
        assert labels == reference.at(epoch, R * epoch).order


def _labels(batch: Any) -> Any:
    while isinstance(batch, dict):
        batch = batch["sample"]
    return batch[1]
