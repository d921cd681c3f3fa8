"""Samples that draw random numbers as they are read: never frozen, and drawn as torch draws them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import secrets
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, finish, rarely
from samples import constant_row
from sources import Samples
from torch.utils.data import DataLoader, Dataset, get_worker_info

import hotset
from hotset.session import sessions

LENGTH = 60
EPOCHS = 3


class Augmented(Dataset[Any]):
    """Augments a minority of its samples as it reads them, as one does with the rare classes."""

    def __init__(self, minority: set[int], kind: str) -> None:
        self.minority = minority
        self.kind = kind
        self.numpy_rng = np.random.default_rng(5)
        self.torch_rng = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return LENGTH

    def factor(self) -> float:
        if self.kind == "random":
            return random.uniform(0.6, 1.4)
        if self.kind == "numpy":
            return float(np.random.uniform(0.6, 1.4))
        if self.kind == "torch":
            return float(torch.empty(1).uniform_(0.6, 1.4))
        if self.kind == "own numpy":
            return float(self.numpy_rng.uniform(0.6, 1.4))
        return float(torch.rand(1, generator=self.torch_rng))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.arange(4.0) + index
        return (x * self.factor() if index in self.minority else x), index


KINDS = ["random", "numpy", "torch", "own numpy", "own torch"]
MINORITIES = {
    "every twentieth": set(range(3, LENGTH, 20)),
    "the first ones": {0, 1, 2},
    "neighbours in the middle": {28, 29, 30},
    "the last one": {LENGTH - 1},
}


def seed(number: int = 0) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def states() -> list[bytes]:
    key = np.random.get_state(legacy=False)
    return [repr(random.getstate()).encode(), repr(key).encode(), torch.get_rng_state().numpy().tobytes()]


def run(loader: Any, epochs: int = EPOCHS) -> list[Any]:
    """Everything that a training sees: batches of all epochs, and the generators' states after each epoch."""
    seen: list[Any] = []
    for _ in range(epochs):
        seen += [[part.tolist() for part in batch] for batch in loader]
        seen.append(states())
    return seen


def cached_of(dataset: Any, **options: Any) -> Any:
    return hotset.cache(dataset, **{"memory": "4MiB", **options})


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*draws? random numbers", category=hotset.HotsetWarning)
        yield


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(itertools.product(KINDS, [0, 2]), ("numpy", 2), ("torch", 2), ("own numpy", 2)),
)
def test_batches_and_states_equal_torchs_without_a_cache(kind: str, workers: int) -> None:
    minorities = list(MINORITIES.values())
    for minority in [minorities[KINDS.index(kind) % 4]] if workers else minorities:
        options: dict[str, Any] = {"batch_size": 10, "shuffle": True, "num_workers": workers}
        seed()
        expected = run(DataLoader(Augmented(minority, kind), **options))
        with cached_of(Augmented(minority, kind)) as cached:
            seed()
            assert run(hotset.DataLoader(cached, **options)) == expected
            stats = cached.stats()
            assert (stats.cached, stats.uncached) == (LENGTH - len(minority), len(minority))
            assert cached.check() == []


@pytest.mark.parametrize(
    ("kind", "workers"), rarely(itertools.product(["random", "own numpy"], [0, 2]), ("random", 2))
)
def test_draws_through_torchs_own_loader_equal_those_without_a_cache(kind: str, workers: int) -> None:
    minority = MINORITIES["every twentieth"]
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": workers}
    seed()
    expected = run(DataLoader(Augmented(minority, kind), **options))
    with cached_of(Augmented(minority, kind)) as cached:
        seed()
        assert run(DataLoader(cached, **options)) == expected
        assert cached.stats().uncached == len(minority)


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(itertools.product(["random", "own numpy", "own torch"], [0, 2]), ("own numpy", 2), ("random", 2)),
)
def test_a_job_resumes_in_mid_epoch_with_the_same_draws(kind: str, workers: int) -> None:
    """From before and after the first draw of the pass, in the first pass and in a later one."""
    minority = {28, 29, 30, 44, 45}
    options: dict[str, Any] = {"batch_size": 6, "num_workers": workers}
    for passes, consumed in [(0, 3), (0, 5), (1, 6)]:
        with cached_of(Augmented(minority, kind)) as first, cached_of(Augmented(minority, kind)) as second:
            loader = hotset.DataLoader(first, **options)
            seed()
            for _ in range(passes):
                list(loader)
            batches = iter(loader)
            for _ in range(consumed):
                next(batches)
            state = loader.state_dict()
            rest = [[part.tolist() for part in batch] for batch in batches]
            resumed = hotset.DataLoader(second, **options)
            seed(9)
            resumed.load_state_dict(state)
            assert [[part.tolist() for part in batch] for batch in resumed] == rest


def test_live_transforms_draw_between_the_reading_of_samples() -> None:
    minority = MINORITIES["every twentieth"]
    seed()
    expected = run(DataLoader(Noisy(Augmented(minority, "torch")), batch_size=7))
    with cached_of(Augmented(minority, "torch"), transform=[noise]) as cached:
        seed()
        assert run(hotset.DataLoader(cached, batch_size=7)) == expected


@hotset.nondeterministic
def noise(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    return sample[0] + torch.rand(4), sample[1]


class Noisy(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return noise(self.dataset[index])


def test_a_sample_that_is_twice_in_one_batch_draws_twice() -> None:
    order = [3, 3, 0, 23, 3, 0]
    seed()
    expected = run(DataLoader(Augmented({3, 23}, "numpy"), batch_size=6, sampler=order))
    with cached_of(Augmented({3, 23}, "numpy")) as cached:
        seed()
        assert run(hotset.DataLoader(cached, batch_size=6, sampler=order)) == expected


def test_one_warning_says_how_many_samples_draw_and_which() -> None:
    with cached_of(Augmented({17, 20, 41}, "random")) as cached:
        assert "8 samples that were read twice were alike, and no random number generator moved" in str(
            cached.plan
        )
        with pytest.warns(hotset.HotsetWarning) as told:
            run(hotset.DataLoader(cached, batch_size=6, num_workers=2))
    # Newer Pythons warn of forks beside threads as well.
    (sentence,) = [str(each.message) for each in told if each.category is hotset.HotsetWarning]
    assert "3 samples (17, 20, 41) draw random numbers" in sentence
    assert "transform=" in sentence


def test_the_plan_says_which_samples_the_probe_found_to_draw() -> None:
    with cached_of(Augmented({LENGTH - 1}, "random")) as cached:
        assert "1 of the 8 samples that were read draw random numbers" in str(cached.plan)
    with pytest.raises(hotset.NotCacheable):
        cached_of(Augmented(set(range(LENGTH)), "random"))


def test_a_window_freezes_no_draw() -> None:
    minority = set(range(3, LENGTH, 7))
    with cached_of(
        Augmented(minority, "random"), window=hotset.Window(resident=30, replace=0.3, wait=True)
    ) as cached:
        loader = hotset.DataLoader(cached, batch_size=6, num_workers=1, persistent_workers=True)
        seen: dict[int, set[float]] = {}
        uses: dict[int, int] = {}
        for _ in range(8):
            for x, y in loader:
                for value, index in zip(x[:, 3].tolist(), y.tolist(), strict=True):
                    seen.setdefault(index, set()).add(value)
                    uses[index] = uses.get(index, 0) + 1
        assert any(uses[index] > 1 for index in minority & uses.keys())
        for index, count in uses.items():
            assert len(seen[index]) == (count if index in minority else 1)
        assert cached.check() == []


def test_a_second_job_of_a_session_draws_too(monkeypatch: pytest.MonkeyPatch) -> None:
    minority = MINORITIES["every twentieth"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setenv("HOTSET_RUNTIME_DIR", folder)
        session = sessions.create("two-jobs", memory=64 << 20)
        for number in range(2):
            seed(number)
            expected = run(DataLoader(Augmented(minority, "random"), batch_size=6))
            with hotset.cache(Augmented(minority, "random"), session="two-jobs") as cached:
                assert cached.stats().cached == (LENGTH - len(minority) if number else 0)
                seed(number)
                assert run(hotset.DataLoader(cached, batch_size=6)) == expected
                assert cached.stats().uncached == len(minority)
                assert cached.check() == []
        sessions.destroy(session)


def _tells(name: str, workers: int, told: Any) -> None:
    """A job: what it is told in three epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hotset.HotsetWarning)
        with hotset.cache(Augmented({17, 20, 41}, "random"), session=name) as cached:
            run(hotset.DataLoader(cached, batch_size=6, num_workers=workers))
    told.put([str(each.message) for each in caught if "draw" in str(each.message)])


@pytest.mark.parametrize("workers", [0, 2])
def test_each_job_of_a_session_is_told_once(workers: int, runtime: Path) -> None:
    context = multiprocessing.get_context("fork")
    session = sessions.create("told", memory=64 << 20)
    for _ in range(3):
        told: Any = context.SimpleQueue()
        job = context.Process(target=_tells, args=("told", workers, told))
        job.start()
        [sentence] = told.get()
        finish(job)
        assert "3 samples (17, 20, 41) draw random numbers" in sentence
    sessions.destroy(session)


def test_processes_that_race_for_the_same_samples_draw_each_for_itself() -> None:
    context = multiprocessing.get_context("fork")
    minority = MINORITIES["every twentieth"]
    with cached_of(Augmented(minority, "random")) as cached:
        results: Any = context.Queue()
        racers = [context.Process(target=_race, args=(cached, number, results)) for number in range(3)]
        for racer in racers:
            racer.start()
        got = dict(results.get(timeout=60) for _ in racers)
        for racer in racers:
            racer.join()
        for number, seen in got.items():
            seed(number)
            assert seen == run(DataLoader(Augmented(minority, "random"), batch_size=6))
        assert cached.stats().uncached == len(minority)
        assert cached.check() == []


def _race(cached: Any, number: int, results: Any) -> None:
    seed(number)
    results.put((number, run(hotset.DataLoader(cached, batch_size=6))))


class Seeding(Samples):
    """Seeds a generator with its number for some samples, as recipes for "deterministic augmentation" do."""

    def __getitem__(self, index: int) -> Any:
        if index % 20 == 3:
            random.seed(index)
        return super().__getitem__(index)


def test_a_generator_that_is_seeded_while_reading_stays_seeded() -> None:
    seed()
    expected = run(DataLoader(Seeding(constant_row, LENGTH), batch_size=6))
    with cached_of(Seeding(constant_row, LENGTH)) as cached:
        seed()
        assert run(hotset.DataLoader(cached, batch_size=6)) == expected


class Late(Augmented):
    """Makes its generator when it first needs it."""

    def factor(self) -> float:
        if self.kind == "late":
            self.late = np.random.default_rng(7)
            self.kind = "made"
        return float(self.late.uniform(0.6, 1.4))


def test_a_generator_that_is_made_at_its_first_draw_is_found() -> None:
    with cached_of(Late({28, 29, 30}, "late")) as cached:
        epochs = [
            dict(zip(y.tolist(), x[:, 1].tolist(), strict=True))
            for _ in range(2)
            for x, y in hotset.DataLoader(cached, batch_size=LENGTH)
        ]
        assert all(epochs[0][index] != epochs[1][index] for index in (28, 29, 30))
        assert cached.stats().cached == LENGTH - 3


class Needed(Samples):
    """Rare samples draw from a generator that is made when it is first needed, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(constant_row, LENGTH)
        self.way, self.rng, self.is_ready, self.ready = way, None, False, {"rng": False}

    def generator(self) -> Any:
        if self.way == "none":
            self.rng = self.rng or random.Random(torch.initial_seed())
        elif self.way == "absent" and not hasattr(self, "late"):
            self.late = random.Random(5)
        elif self.way == "flag" and not self.is_ready:
            self.rng, self.is_ready = random.Random(5), True
        elif self.way == "in a dict" and not self.ready["rng"]:  # which is not put back: nor is the generator
            self.rng, self.ready["rng"] = random.Random(5), True
        return self.late if self.way == "absent" else self.rng

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index).double()
        return row + self.generator().random() if index % 20 == 7 else row


@pytest.mark.parametrize(
    ("way", "workers"),
    rarely(itertools.product(["none", "absent", "flag"], [0, 2]), ("none", 2), ("absent", 2)),
)
def test_a_generator_that_a_rare_sample_makes_draws_what_it_would_without_a_cache(
    way: str, workers: int
) -> None:
    def trained(loader: Any) -> list[Any]:
        seed()
        return run(loader)

    expected = trained(DataLoader(Needed(way), batch_size=6, num_workers=workers))
    with cached_of(Needed(way)) as cached:
        assert trained(hotset.DataLoader(cached, batch_size=6, num_workers=workers)) == expected
        assert cached.stats().cached == len([index for index in range(LENGTH) if index % 20 != 7])


class Noise:
    """An augmentation that makes its generator when it is called first."""

    rng: Any = None

    def draw(self) -> float:
        self.rng = self.rng or random.Random(5)
        return float(self.rng.random())


RNG: Any = None
RNGS: dict[str, random.Random] = {}
LOCAL = threading.local()


def draw_from_global() -> float:
    global RNG
    RNG = RNG or random.Random(5)
    return float(RNG.random())


def draw_from_local() -> float:
    if not hasattr(LOCAL, "rng"):
        LOCAL.rng = random.Random(5)
    return float(LOCAL.rng.random())


def draw_from_function() -> float:
    if not hasattr(draw_from_function, "rng"):
        draw_from_function.rng = random.Random(5)  # type: ignore[attr-defined]
    return float(draw_from_function.rng.random())  # type: ignore[attr-defined]


def draw_from_enclosing() -> Callable[[], float]:
    rng = None

    def draw() -> float:
        nonlocal rng
        rng = rng or random.Random(5)
        return rng.random()

    return draw


@functools.lru_cache
def bounded() -> random.Random:
    return random.Random(5)


@functools.cache
def unbounded() -> random.Random:
    return random.Random(5)


class Elsewhere(Samples):
    """Rare samples draw from a generator that is made at that time, and not kept in an attribute."""

    rng: Any = None

    def __init__(self, way: str) -> None:
        super().__init__(constant_row, LENGTH)
        self.way, self.rngs = way, dict[int, random.Random]()
        self.augmentations = {"common": [], "rare": [Noise(), Noise()]}
        self.from_enclosing = draw_from_enclosing()
        for place in (RNGS, vars(LOCAL), vars(draw_from_function)):
            place.clear()
        for memo in (bounded, unbounded):
            memo.cache_clear()
        global RNG
        RNG = type(self).rng = None

    def draw(self) -> float:
        if self.way == "an object in a list":
            return self.augmentations["rare"][1].draw()
        if self.way == "a dict by processes":
            return self.rngs.setdefault(os.getpid(), random.Random(5)).random()
        if self.way == "a dict of the module":
            return RNGS.setdefault("rng", random.Random(5)).random()
        if self.way == "the class":
            type(self).rng = self.rng or random.Random(5)
            return float(self.rng.random())
        draws: dict[str, Callable[[], float]] = {
            "a global": draw_from_global,
            "an enclosing name": self.from_enclosing,
            "a function": draw_from_function,
            "a local of the thread": draw_from_local,
            "a memo": lambda: bounded().random(),
            "a memo without bound": lambda: unbounded().random(),
        }
        return draws[self.way]()

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index).double()
        return row + self.draw() if index % 20 == 7 else row


PLACES = [
    *("an object in a list", "a dict by processes", "a dict of the module", "the class", "a global"),
    *("an enclosing name", "a function", "a local of the thread", "a memo", "a memo without bound"),
]


@pytest.mark.parametrize(
    ("way", "workers"),
    rarely(itertools.product(PLACES, [0, 2]), *((way, 2) for way in PLACES if "dict by" not in way)),
)
def test_a_generator_that_a_rare_sample_makes_is_found_wherever_it_is_kept(way: str, workers: int) -> None:
    def trained(loader: Any) -> list[Any]:
        seed()
        return [run(loader) for _ in range(2)]

    expected = trained(DataLoader(Elsewhere(way), batch_size=6, num_workers=workers))
    with cached_of(Elsewhere(way)) as cached:
        assert trained(hotset.DataLoader(cached, batch_size=6, num_workers=workers)) == expected
        assert cached.stats().cached == len([index for index in range(LENGTH) if index % 20 != 7])


class Replacing(Samples):
    """Samples put another generator in the place of the one that there was; rare ones draw from it."""

    def __init__(self, way: str) -> None:
        super().__init__(constant_row, LENGTH)
        self.way, self.rng, self.worker = way, np.random.default_rng(0), -1

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index).double()
        worker = torch.utils.data.get_worker_info()
        if self.way == "by worker" and worker is not None and self.worker != worker.id:
            self.rng, self.worker = np.random.default_rng([5, worker.id]), worker.id
        if self.way == "by index":
            self.rng = np.random.default_rng(index)
        elif index % 20 != 7:
            return row
        row += self.rng.random()
        if self.way == "by itself":
            self.rng = np.random.default_rng(self.rng.integers(1 << 30))
        return row


@pytest.mark.parametrize(("way", "workers"), [("by worker", 2), ("by itself", 0), ("by index", 0)])
def test_a_generator_that_takes_anothers_place_is_followed(way: str, workers: int) -> None:
    def trained(loader: Any) -> list[Any]:
        seed()
        return [run(loader) for _ in range(3)]

    expected = trained(DataLoader(Replacing(way), batch_size=6, num_workers=workers))
    with cached_of(Replacing(way)) as cached:
        assert trained(hotset.DataLoader(cached, batch_size=6, num_workers=workers)) == expected
        stored = [index for index in range(LENGTH) if way == "by index" or index % 20 != 7]
        assert cached.stats().cached == len(stored)


@pytest.mark.parametrize("name", ["Thread-1 (_serve)", "Thread-1 (train)"])
def test_threads_that_run_no_code_of_the_users_do_not_count(name: str) -> None:
    """Another one may have made the generator, which it is then left; so the first draw is lost."""
    seed()
    expected = run(DataLoader(Needed("flag"), batch_size=6))
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name=name)
    thread.start()
    try:
        with cached_of(Needed("flag")) as cached:
            seed()
            assert (run(hotset.DataLoader(cached, batch_size=6)) == expected) == ("serve" in name)
    finally:
        done.set()
        thread.join()


def test_a_generator_stays_where_something_else_says_that_it_was_made() -> None:
    with cached_of(Needed("in a dict")) as cached:
        first, second = (run(hotset.DataLoader(cached, batch_size=6)) for _ in range(2))
        assert first != second


class Building(Needed):
    """Makes its generator at the first reading, and draws from it nowhere."""

    def __getitem__(self, index: int) -> Any:
        self.generator()
        return Samples.__getitem__(self, index)


def test_a_generator_that_is_only_made_costs_no_sample() -> None:
    with cached_of(Building("none")) as cached:
        cached.fill()
        assert cached.stats().cached == LENGTH


def test_a_source_declared_deterministic_is_believed() -> None:
    with cached_of(Declared({17}, "random")) as cached:
        first, second = ([x for x, _ in hotset.DataLoader(cached)] for _ in range(2))
        assert torch.equal(first[17], second[17])


@hotset.deterministic
class Declared(Augmented):
    pass


class Interrupted(Samples):
    """While the samples of ``among`` are read for the first time, another thread draws."""

    def __init__(self, among: set[int], drawn: list[float]) -> None:
        super().__init__(constant_row, LENGTH)
        self.among = set(among)
        self.drawn = drawn

    def __getitem__(self, index: int) -> Any:
        if index in self.among:
            self.among.discard(index)
            thread = threading.Thread(target=lambda: self.drawn.append(random.random()))
            thread.start()
            thread.join()
        return super().__getitem__(index)


def test_draws_of_another_thread_do_not_count_as_the_samples() -> None:
    """As mixup in the training loop, while a queue reads ahead. That thread must not draw a number twice."""
    drawn: list[float] = []
    source = Interrupted({20, 21, 40}, drawn)
    ended = threading.Event()
    training = threading.Thread(target=ended.wait)
    training.start()
    try:
        with hotset.cache(source, memory="64MiB") as cached:
            random.seed(7)
            batches = list(hotset.DataLoader(cached, batch_size=8))
            assert (cached.stats().cached, cached.stats().uncached) == (LENGTH, 0)
        equal_batches(batches, list(DataLoader(Samples(constant_row, LENGTH), batch_size=8)))
        random.seed(7)
        assert drawn == [random.random() for _ in range(3)]
    finally:
        ended.set()
        training.join()


@contextlib.contextmanager
def drawing_all_the_time() -> Iterator[list[float]]:
    """Another thread draws, some thousand numbers a second, as noise in a training loop on the CPU does."""
    drawn: list[float] = []
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(2e-4):
            drawn.append(random.random())

    random.seed(7)
    training = threading.Thread(target=draw)
    training.start()
    try:
        yield drawn
    finally:
        ended.set()
        training.join()
    random.seed(7)
    assert len(drawn) > 100
    assert drawn == [random.random() for _ in drawn], "a number was drawn twice, or none in its place"


def test_a_thread_that_draws_all_the_time_draws_no_number_twice() -> None:
    with hotset.cache(Slow(), memory="64MiB") as cached, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it cannot always be told whose draws they are
        with drawing_all_the_time():
            batches = [list(hotset.DataLoader(cached, batch_size=8)) for _ in range(2)]
        for each in batches:
            equal_batches(each, list(DataLoader(Samples(constant_row, LENGTH), batch_size=8)))


def test_a_thread_that_draws_all_the_time_draws_no_number_twice_while_hits_are_audited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hotset.cache(Slow(), memory="64MiB") as cached:
        cached.fill()
        monkeypatch.setattr("hotset.dataset.audit_budget.AuditBudget.covers", lambda *_: True)
        with drawing_all_the_time():
            for _ in range(10):
                list(hotset.DataLoader(cached, batch_size=8))
        assert cached.stats().audited > 20


def test_a_sample_that_draws_beside_idle_threads_leaves_its_generator_where_it_was() -> None:
    ended = threading.Event()
    idle = threading.Thread(target=ended.wait)
    idle.start()
    try:
        with hotset.cache(Augmented({20, 41}, "random"), memory="64MiB") as cached, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            random.seed(3)
            got, state = list(hotset.DataLoader(cached, batch_size=8)), random.getstate()
        random.seed(3)
        equal_batches(got, list(DataLoader(Augmented({20, 41}, "random"), batch_size=8)))
        assert random.getstate() == state
    finally:
        ended.set()
        idle.join()


class Slow(Samples):
    def __init__(self) -> None:
        super().__init__(constant_row, LENGTH)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def test_threads_that_cache_at_once_do_not_take_what_planning_draws_for_samples_draws() -> None:
    """To judge one dataset, planning sets generators to other states while the other one may be judged."""
    both = threading.Barrier(2)

    def cached_here(_: int) -> Any:
        both.wait()
        return hotset.cache(Slow(), memory="1MiB")

    with ThreadPoolExecutor(2) as threads:
        for cached in list(threads.map(cached_here, range(2))):
            with cached:
                assert not cached.plan.warnings
                assert "no random number generator moved" in str(cached.plan)


def test_a_thread_that_draws_while_a_dataset_is_judged_is_thought_of() -> None:
    asked, drawn, ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    class Beside(Samples):
        """While a sample is read, another thread draws."""

        def __getitem__(self, index: int) -> Any:
            asked.release()
            drawn.acquire()
            return super().__getitem__(index)

    def draw() -> None:
        while asked.acquire() and not ended.is_set():
            random.random()
            drawn.release()

    training = threading.Thread(target=draw)
    training.start()
    try:
        with pytest.raises(
            hotset.NotCacheable, match=r"If another thread has drawn, call hotset\.cache while"
        ):
            hotset.cache(Beside(constant_row, LENGTH), memory="1MiB")
    finally:
        ended.set()
        asked.release()
        training.join()


FROM_ENTROPY: dict[str, Callable[[], float]] = {
    "default_rng": lambda: float(np.random.default_rng().uniform(0.6, 1.4)),
    "RandomState": lambda: float(np.random.RandomState().uniform(0.6, 1.4)),
    "PCG64": lambda: float(np.random.Generator(np.random.PCG64()).uniform(0.6, 1.4)),
    "Random": lambda: random.Random().uniform(0.6, 1.4),
    "SystemRandom": lambda: random.SystemRandom().uniform(0.6, 1.4),
    "secrets": lambda: float(secrets.randbelow(1 << 20)),
    "urandom": lambda: float(int.from_bytes(os.urandom(2), "little")),
    "getrandom": lambda: float(int.from_bytes(os.getrandom(2), "little")),
    "uuid4": lambda: float(uuid.uuid4().int % (1 << 20)),
}


class Dropped(Augmented):
    """Makes a generator for one draw, and drops it."""

    def factor(self) -> float:
        return FROM_ENTROPY[self.kind]()


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(
        itertools.product(FROM_ENTROPY, [0, 1]),
        *[(kind, 1) for kind in ("RandomState", "PCG64", "SystemRandom", "secrets", "uuid4")],
    ),
)
def test_a_generator_that_is_made_and_dropped_is_noticed(kind: str, workers: int) -> None:
    for minority in [MINORITIES["neighbours in the middle"], MINORITIES["the first ones"]][: 2 - workers]:
        with cached_of(Dropped(minority, kind)) as cached:
            loader = hotset.DataLoader(cached, batch_size=10, num_workers=workers)
            epochs = [
                {
                    index: x
                    for batch, y in loader
                    for x, index in zip(batch[:, 1].tolist(), y.tolist(), strict=True)
                }
                for _ in range(EPOCHS)
            ]
            assert all(len({epoch[index] for epoch in epochs}) == EPOCHS for index in minority)
            assert cached.stats().cached == LENGTH - len(minority)
            assert cached.check() == []


class Named(Samples):
    """Makes the name of a temporary file for each sample, as decoders of videos and clients of a store do."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        assert f"/tmp/{uuid.uuid4().hex}"
        return super().__getitem__(index)


def test_entropy_that_no_sample_depends_on_keeps_none_out_of_the_cache_and_costs_few_readings() -> None:
    count = 20_000
    source = Named(torch.tensor, count)
    with cached_of(source) as cached:
        before = source.reads
        equal_batches(
            list(hotset.DataLoader(cached, batch_size=500)),
            list(torch.arange(count).split(500)),
        )
        assert cached.stats().cached == count
        assert source.reads - before < 1.2 * count


class EachFifth(Augmented):
    """Draws at each fifth reading, whichever sample that is of."""

    readings = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.readings += 1
        x = torch.arange(4.0) + index
        return (x * self.factor() if self.readings % 5 == 0 and self.minority else x), index


@pytest.mark.parametrize("others", [False, True], ids=["alone", "other threads"])
def test_no_draw_is_kept_of_what_draws_at_some_readings(others: bool) -> None:
    """Reading such a sample again does not draw: beside other threads, what was read tells that it has."""
    source = EachFifth(set(), "random")
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    if others:
        other.start()
    try:
        with cached_of(source) as cached:
            source.minority = {1}
            for index in range(LENGTH):
                cached[index]
            source.minority = set()
            assert 0 < cached.stats().cached < LENGTH
            for index in range(LENGTH):
                assert torch.equal(cached[index][0], torch.arange(4.0) + index)
    finally:
        ended.set()
        if others:
            other.join()


class Once(Augmented):
    """Draws at one reading of all, whichever sample that is of."""

    readings, drawn_at = 0, -1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.readings += 1
        x = torch.arange(4.0) + index
        return (x * self.factor() if self.readings == self.drawn_at else x), index


def test_samples_are_not_kept_of_which_one_drew_and_none_again() -> None:
    """Read together, they moved a generator; read again, each alone, none does: any of them may be random."""
    source = Once(set(), "random")
    with cached_of(source) as cached:
        source.drawn_at = source.readings + LENGTH // 2
        list(hotset.DataLoader(cached, batch_size=LENGTH))
        assert source.drawn_at < source.readings
        before = source.readings
        (batch,) = hotset.DataLoader(cached, batch_size=LENGTH)
        assert source.readings > before
        assert torch.equal(batch[0], torch.arange(4.0) + torch.arange(LENGTH)[:, None])


class AlsoCounting(Augmented):
    """Draws for some samples, and counts in another one: no generator tells of that."""

    readings = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.readings += 1
        x, label = super().__getitem__(index)
        return (x + self.readings if index == LENGTH - 1 else x), label


def test_beside_samples_that_draw_one_that_differs_without_a_draw_is_refused() -> None:
    with pytest.raises(hotset.NotCacheable, match=r"returns another sample each time.*hotset run"):
        cached_of(AlsoCounting({0}, "random"))


def test_a_refusal_shows_the_call_and_not_what_hotset_did_in_it() -> None:
    with pytest.raises(hotset.NotCacheable) as refused:
        hotset.cache(AlsoCounting({0}, "random"))
    assert len(refused.traceback) == 2


class SeedsItsWorker(Dataset[Any]):
    """Seeds the generators of a worker as it reads first in it, as RAFT's datasets do."""

    def __init__(self) -> None:
        self.init_seed = False
        self.transform: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if not self.init_seed:
            worker = get_worker_info()
            if worker is not None:
                random.seed(worker.id)
                self.init_seed = True
        x = torch.arange(4.0) + index
        return x if self.transform is None else self.transform(x)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * random.uniform(0.6, 1.4)


@pytest.mark.parametrize("own", [True, False])
def test_a_dataset_that_seeds_its_worker_is_not_cached_before_what_draws(own: bool) -> None:
    dataset = SeedsItsWorker()
    dataset.transform = scaled if own else None
    with pytest.raises(hotset.NotCacheable, match="worker_init_fn"):
        hotset.cache(dataset, memory="1MiB", transform=None if own else [scaled])
    dataset.transform = None
    with hotset.cache(dataset, memory="1MiB") as cached:
        plain, kept = (DataLoader(each, batch_size=6, num_workers=2) for each in (dataset, cached))
        for _ in range(EPOCHS):
            equal_batches(list(kept), list(plain))


class TwoPhases(Dataset[torch.Tensor]):
    """Augments in training alone, as many a dataset does; in its test it seeds a generator."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.phase == "train":
            return torch.full((2,), index) + random.random()
        np.random.seed(0)
        return torch.full((2,), index) + float(np.random.normal())


def test_the_declaration_that_is_advised_is_of_this_dataset_and_not_of_others_of_its_class() -> None:
    train, dataset = TwoPhases("train"), TwoPhases("test")
    with pytest.raises(hotset.NotCacheable) as refused:
        hotset.cache(dataset, memory="1MiB")
    advice = str(refused.value).rpartition("declare it: ")[2].rstrip(".")
    eval(advice, {"hotset": hotset, "dataset": dataset, "TwoPhases": TwoPhases})
    with hotset.cache(dataset, memory="1MiB") as cached:
        equal_batches([cached[3] for _ in range(2)], [dataset[3] for _ in range(2)])
        assert cached.stats().hits
    with pytest.raises(hotset.NotCacheable, match="returns another sample each time"):
        hotset.cache(train, memory="1MiB")


class AsksForTheWorker(Samples):
    """Opens a file in each worker, say; ``tells``: and puts the worker's number into its samples."""

    def __init__(self, tells: bool) -> None:
        super().__init__(constant_row, LENGTH)
        self.tells = tells
        self.opened: int | None = None

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        if self.opened is None:
            self.opened = -1 if worker is None else worker.id
        return super().__getitem__(index) + (self.opened if self.tells else 0)


def test_a_dataset_whose_samples_depend_on_the_worker_is_refused() -> None:
    source = AsksForTheWorker(tells=True)
    with pytest.raises(hotset.NotCacheable, match="another sample in a loader's worker"):
        hotset.cache(source, memory="64MiB")
    assert (source.opened, get_worker_info()) == (None, None)
    declared = hotset.deterministic(AsksForTheWorker(tells=True))
    with hotset.cache(declared, memory="64MiB") as cached:
        assert cached[3] is not None


def test_a_dataset_that_only_asks_for_the_worker_is_cached() -> None:
    source = AsksForTheWorker(tells=False)
    with hotset.cache(source, memory="64MiB") as cached:
        assert source.opened is None
        for _ in range(2):
            batches = list(hotset.DataLoader(cached, batch_size=8, num_workers=2))
            equal_batches(batches, list(DataLoader(Samples(constant_row, LENGTH), batch_size=8)))
        assert cached.stats().cached == LENGTH
