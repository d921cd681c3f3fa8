"""What a dataset opens or notes as it is read first: planning leaves it as it was, for each process."""

from __future__ import annotations

import functools
import importlib
import itertools
import mmap
import operator
import os
import pickle
import random
import threading
import time
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, rarely
from sources import Handle, ReadLog
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, get_worker_info

import hotset
from hotset.dataset import audit

N = 12


class Opens(Dataset[Any]):
    """Opens its file when it is read first, and notes by which process."""

    def __init__(self, log: ReadLog, path: Path, transform: Any = None) -> None:
        self.log = log
        self.path = path
        self.file: Any = None
        self.reads = 0
        self.transform = transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.log.add(os.getpid())
            self.file = Handle(self.path)
        self.reads += 1
        value = torch.tensor(list(os.pread(self.file.descriptor, 4, 4 * index)))
        return value if self.transform is None else self.transform(value)


class Wrapping(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.parts = {"inner": inner}

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.parts["inner"][index]


def jittered(value: torch.Tensor) -> torch.Tensor:
    return value + random.random()


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "opened")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "samples"
    file.write_bytes(bytes(range(4 * N)))
    return file


WRAPPED = {
    "itself": lambda dataset: dataset,
    "in a Subset": lambda dataset: Subset(dataset, range(N)),
    "in a ConcatDataset": lambda dataset: ConcatDataset([dataset]),
    "in a StackDataset": lambda dataset: StackDataset(x=dataset, y=range(N)),
    "in another": lambda dataset: Subset(Wrapping(dataset), range(N)),
}


CASES = [(wrapped, None) for wrapped in WRAPPED]
CASES += [("itself", jittered), ("in a Subset", jittered), ("in a ConcatDataset", jittered)]


@pytest.mark.parametrize(("wrapped", "transform"), CASES)
def test_each_worker_opens_its_own_and_the_main_process_none(
    wrapped: str, transform: Any, log: ReadLog, path: Path
) -> None:
    dataset = Opens(log, path, transform)
    before = dict(vars(dataset))
    with hotset.cache(WRAPPED[wrapped](dataset), memory="1MiB", key="x") as cached:
        assert vars(dataset) == before
        assert log.total() > 0, "planning has read"
        pickle.loads(pickle.dumps(cached)).close()
        log.reset()
        found = list(hotset.DataLoader(cached, batch_size=2, num_workers=2))
        assert len(found) == N // 2
        assert os.getpid() not in log.counts()
        assert set(log.counts().values()) == {1}


@pytest.mark.parametrize(("wrapped", "transform"), rarely(CASES, *CASES[:2], CASES[-1]))
def test_an_audit_in_the_main_process_leaves_no_file_open_that_workers_would_share(
    wrapped: str, transform: Any, log: ReadLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)
    dataset = Opens(log, path, transform)
    before = dict(vars(dataset))
    with hotset.cache(WRAPPED[wrapped](dataset), memory="1MiB", key="x") as cached:
        loader = hotset.DataLoader(cached, batch_size=2, num_workers=2)
        list(loader)
        log.reset()
        for _ in range(2):
            list(loader)
            cached[3]
        assert os.getpid() in log.counts(), "hits were audited here"
        assert vars(dataset) == before
        log.reset()
        list(DataLoader(dataset, batch_size=2, num_workers=2))
        assert set(log.counts().values()) == {1}
        assert len(log.counts()) == 2


@pytest.mark.parametrize("loader", [DataLoader, hotset.DataLoader])
@pytest.mark.parametrize("wrapped", ["itself", "in a Subset", "in a ConcatDataset"])
def test_what_the_copy_with_a_cut_chain_opens_is_the_datasets_too(
    wrapped: str, loader: Any, log: ReadLog, path: Path
) -> None:
    dataset = Opens(log, path, jittered)
    with hotset.cache(WRAPPED[wrapped](dataset), memory="1MiB") as cached:
        log.reset()
        for _ in range(3):
            list(loader(cached, batch_size=2))
            dataset[3]
        assert log.total() == 1
        assert cached.stats().cached == N


class TakesFromItsOptions(Opens):
    """Takes an element out of a dict in its options as it opens its file, as BasicSR's datasets do."""

    def __init__(self, log: ReadLog, path: Path) -> None:
        super().__init__(log, path)
        self.options = {"scale": 4, "backend": {"type": "lmdb", "keys": ["lq", "gt"]}, "mean": [0.5, 0.5]}
        self.backend = self.options["backend"]

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            del self.backend["type"]
        return super().__getitem__(index)


def test_an_audit_puts_back_what_the_dicts_of_a_dict_held(
    log: ReadLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)
    dataset = TakesFromItsOptions(log, path)
    with hotset.cache(dataset, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=2, num_workers=2)
        for _ in range(3):
            list(loader)
        assert cached.stats().audited > 0
        assert dataset.file is None
        assert dataset.options == TakesFromItsOptions(log, path).options
        assert dataset.backend is dataset.options["backend"]


class Appends(Dataset[Any]):
    """Keeps each sample that it has read, and their number."""

    def __init__(self, kept: int) -> None:
        self.kept = [0] * kept
        self.number = kept

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        self.kept.append(index)
        self.number += 1
        return index


@pytest.mark.parametrize("kept", [0, 1000], ids=["few", "many"])
def test_an_audit_leaves_what_a_dataset_counts_consistent(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)
    dataset = Appends(kept)
    with hotset.cache(dataset, memory="1MiB", key="x") as cached:
        loader = hotset.DataLoader(cached, batch_size=2)
        for _ in range(3):
            list(loader)
        assert cached.stats().audited > 0
        assert len(dataset.kept) == dataset.number >= kept + N


class OpensOnce(Dataset[Any]):
    """Opens what it reads from at the first read, and then uses it."""

    opened: Any = None

    def __init__(self) -> None:
        self.between: Callable[[int], Any] | None = None  # called, if it is set, between the two

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if self.opened is None:
            self.opened = list(range(N))
        if self.between is not None:
            self.between(index)
        return self.opened[index]


def test_an_audit_takes_nothing_from_another_thread_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)
    dataset, reads, is_audited = OpensOnce(), threading.Event(), threading.Event()
    others: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as pool, hotset.cache(dataset, memory="1MiB", key="x") as cached:

        def between(index: int) -> None:
            if index == 0:  # this is the audit
                others.append(pool.submit(cached.__getitem__, N - 1))
                assert reads.wait(60)
            else:
                reads.set()
                assert is_audited.wait(60)

        assert cached[0] == 0
        dataset.opened, dataset.between = None, between
        assert cached[0] == 0
        is_audited.set()
        assert [other.result() for other in others] == [N - 1]


def test_threads_use_what_the_first_read_has_opened(log: ReadLog, path: Path) -> None:
    dataset = Opens(log, path)
    with hotset.cache(dataset, memory="1MiB", key="x", concurrency=8) as cached:
        log.reset()
        found = [value for batch in hotset.DataLoader(cached, batch_size=6) for value in batch[:, 0].tolist()]
        assert found == list(range(0, 4 * N, 4))
        assert log.total() == 1


class Remembers(Dataset[Any]):
    """Describes a container by other attributes: both must be put back, or neither."""

    def __init__(self) -> None:
        self.known: dict[int, torch.Tensor] = {}
        self.last: int | None = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.known:
            assert self.last in self.known
        self.last = index
        return self.known.setdefault(index, torch.tensor(index))


def test_a_dataset_that_remembers_what_it_has_read_is_left_alone() -> None:
    expected = list(DataLoader(Remembers(), batch_size=4))
    with hotset.cache(Remembers(), memory="1MiB", key="x") as cached:
        assert all(map(torch.equal, hotset.DataLoader(cached, batch_size=4), expected))


class Notes(Dataset[Any]):
    """Notes what it has read in containers of all kinds, and may draw from what it noted, as mosaics do."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self.read = [3]
        self.pictures: list[torch.Tensor | None] = [None] * N
        self.by_index = {3: 0}
        self.ever = {3}
        self.last = deque([3], maxlen=2)
        self.ordered = OrderedDict({3: 0})
        self.counts: defaultdict[int, int] = defaultdict(int)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        self.pictures[index] = picture = torch.tensor(index)
        self.read.append(index)
        self.by_index[index] = len(self.read)
        self.ever.add(index)
        self.last.append(index)
        self.ordered[index] = 0
        self.ordered.move_to_end(3)
        self.counts[index] += 1
        return picture + random.choice(self.read) if self.draws else picture


@pytest.mark.parametrize("draws", [False, True], ids=["cached", "refused"])
def test_what_a_dataset_notes_of_its_reading_is_as_it_was(draws: bool) -> None:
    dataset, expected = Notes(draws), vars(Notes(draws))
    held = dict(vars(dataset))
    if draws:
        with pytest.raises(hotset.NotCacheable):
            hotset.cache(dataset, memory="1MiB", key="x")
    else:
        hotset.cache(dataset, memory="1MiB", key="x").close()
    assert vars(dataset) == expected
    assert all(vars(dataset)[name] is value for name, value in held.items())


class Numbers(list[int]):
    """A class of the user's, whose methods may do more than those of a list."""


class Bytes(Remembers):
    """Says in another attribute how long its bytes are, of which there are too many to keep a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = bytearray(5 << 20)
        self.length = len(self.bytes)

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.length == len(self.bytes)
        self.bytes += b"x"
        self.length += 1
        return super().__getitem__(index)


class Newest(Remembers):
    """Says in another attribute what its list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.list = Numbers([0])
        self.newest = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.list == [self.newest]
        self.list[0] = self.newest = index + 1  # planning reads sample 0 last
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [Bytes, Newest])
def test_a_container_that_cannot_be_filled_again_is_left_with_what_describes_it(kind: Any) -> None:
    expected = list(DataLoader(kind(), batch_size=4))
    with hotset.cache(kind(), memory="1MiB", key="x") as cached:
        assert all(map(torch.equal, hotset.DataLoader(cached, batch_size=4), expected))


class Attaches(Dataset[Any]):
    """Has no attribute for its file before it is read first."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        if not hasattr(self, "opened_by"):
            self.opened_by = os.getpid()
        return torch.tensor(index)


def test_an_attribute_that_reading_has_made_is_gone() -> None:
    dataset = Attaches()
    with hotset.cache(dataset, memory="1MiB"):
        assert vars(dataset) == {}


@hotset.deterministic
class Loads:
    """A transform that loads what it needs when it is called first, and counts its calls."""

    def __init__(self) -> None:
        self.calls, self.weights = 0, None

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.weights is None:
            self.weights = torch.ones(4)
        return value + self.weights


def test_planning_leaves_transforms_as_they_were() -> None:
    loads = Loads()
    before = dict(vars(loads))
    source = [torch.full((4,), float(number)) for number in range(N)]
    with hotset.cache(source, transform=[loads], memory="1MiB") as cached:
        assert vars(loads) == before
        assert "Loads" in str(cached.plan)


class Warms:
    """A transform whose strength grows with its calls."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, torch.zeros(4)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return value * min(1.0, self.calls / 100)


class Chain:
    """A container of transforms that no library knows."""

    def __init__(self, *steps: Any) -> None:
        self.steps = {"train": list(steps)}

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        for step in self.steps["train"]:
            value = step(value)
        return value


def test_planning_leaves_transforms_within_a_transform_as_they_were() -> None:
    warms = Warms()
    source = [torch.full((4,), float(number)) for number in range(N)]
    with hotset.cache(source, transform=[Chain(warms)], memory="1MiB") as cached:
        assert warms.calls == 0
        assert torch.equal(warms.seen, torch.zeros(4))
        assert [cached[1][0].item() for _ in range(3)] == pytest.approx([0.01, 0.02, 0.03])


class Own:
    """An object of the user's, which the dataset holds."""

    def __init__(self) -> None:
        self.state = 1
        self.counts = {"reads": [0]}


class Noting(Dataset[Any]):
    """Notes what it reads in objects, containers and arrays that it holds; random, if ``draws``."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self.own, self.seen, self.last = Own(), np.zeros(N), torch.zeros(2)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> float:
        self.own.state = self.own.state * 1103515245 % 2**31
        self.seen[index] += 1
        self.last += index
        self.own.counts["reads"][0] += 1
        return self.own.state / 2**31 if self.draws else float(index)


@pytest.mark.parametrize("refused", [False, True])
def test_planning_leaves_objects_and_arrays_that_a_dataset_holds_as_they_were(refused: bool) -> None:
    dataset = Noting(draws=refused)
    if refused:
        with pytest.raises(hotset.NotCacheable):
            hotset.cache(dataset, memory="1MiB")
    else:
        hotset.cache(dataset, memory="1MiB").close()
    assert dataset.own.state == 1
    assert dataset.own.counts == {"reads": [0]}
    assert not dataset.seen.any()
    assert not dataset.last.any()


class OpensForEachWorker(Dataset[Any]):
    """Keeps its files in a dict, and beside it what goes with them."""

    def __init__(self) -> None:
        self.files: dict[Any, list[int]] = {}
        self.members: Any = None
        self.transform = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5))

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        number = None if worker is None else worker.id
        if number not in self.files:
            self.files[number] = list(range(N))
            self.members = {f"{i}.jpg": i for i in range(N)}
        member = self.files[number][self.members[f"{index}.jpg"]]
        return self.transform(torch.full((8,), float(member)))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_keeps_in_a_dict_and_beside_it_stays_together(workers: int) -> None:
    def epochs(dataset: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = hotset.DataLoader(dataset, batch_size=4, num_workers=workers)
        return [list(loader) for _ in range(2)]

    expected = epochs(OpensForEachWorker())
    dataset = OpensForEachWorker()
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert (dataset.files, dataset.members) == ({}, None)
        equal_batches(epochs(cached), expected)
        assert cached.stats().cached == N


def test_what_a_thread_of_the_dataset_sets_while_it_is_read_is_left_alone() -> None:
    """As MONAI's SmartCacheDataset has one, and waits for the flag that it sets."""

    class Replaced(Dataset[int]):
        def __init__(self) -> None:
            self.is_done = False
            self.was_read, self.was_set = threading.Event(), threading.Event()
            self.thread = threading.Thread(target=self.replace, daemon=True)
            self.ends = threading.Event()
            self.thread.start()

        def replace(self) -> None:
            self.was_read.wait()
            self.is_done = True
            self.was_set.set()
            self.ends.wait()

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            self.was_read.set()
            self.was_set.wait()
            return index

    dataset = Replaced()
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert dataset.is_done
        assert next(iter(hotset.DataLoader(cached, batch_size=4))).tolist() == [0, 1, 2, 3]
    dataset.ends.set()


class Outside(Dataset[torch.Tensor]):
    """Opens its file once for each process, and keeps it outside of itself."""

    file: Any = None

    def __init__(self, path: Path, get: Callable[[Path], Any]) -> None:
        self.path, self.get = path, get

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(os.pread(self.get(self.path).descriptor, 4, 4 * range(N)[index])))


HANDLES: dict[Path, Handle] = {}
FILE: Handle | None = None


def in_a_dict(path: Path) -> Handle:
    if path not in HANDLES:
        HANDLES[path] = Handle(path)
    return HANDLES[path]


def in_a_global(path: Path) -> Handle:
    global FILE
    FILE = FILE or Handle(path)
    return FILE


def in_the_class(path: Path) -> Handle:
    Outside.file = Outside.file or Handle(path)
    return Outside.file  # type: ignore[no-any-return]


SHELF: Any = types.ModuleType("shelf_of_handles")  # a module of the user's, whose names it uses by its own
SHELF.file = None
SHELF.handles = {}


def in_another_module(path: Path) -> Handle:
    if SHELF.file is None:
        SHELF.file = SHELF.handles[path] = SHELF.first = Handle(path)
    return SHELF.file  # type: ignore[no-any-return]


@functools.cache
def memoised(path: Path) -> Handle:
    return Handle(path)


class Memoised:
    """A method whose results are kept, also a special one."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def __call__(self, path: Path) -> Handle:
        return Handle(path)


def _kept() -> list[Any]:
    """What is kept outside of a dataset now."""
    shelf = [SHELF.file, dict(SHELF.handles), hasattr(SHELF, "first")]
    return [
        dict(HANDLES),
        FILE,
        Outside.file,
        shelf,
        memoised.cache_info().currsize,
        _called.cache_info().currsize,
    ]


_called: Any = vars(Memoised)["__call__"]


@pytest.mark.parametrize(
    "get", [in_a_dict, in_a_global, in_the_class, in_another_module, memoised, Memoised()]
)
@pytest.mark.parametrize("audited", [False, True], ids=["planned", "audited"])
def test_what_code_keeps_outside_of_the_dataset_is_put_back(
    get: Callable[[Path], Handle], audited: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked worker would share the file with others, and read at their places."""
    before = _kept()
    assert before == [{}, None, None, [None, {}, False], 0, 0]
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    with hotset.cache(Outside(path, get), memory="1MiB") as cached:
        assert _kept() == before
        if audited:
            list(DataLoader(cached, num_workers=1))
            assert [sample[0].tolist() for sample in DataLoader(cached)][1] == list(range(4, 8))
            assert cached.stats().audited
            assert _kept() == before


def test_what_was_kept_before_planning_stays(path: Path) -> None:
    for get in (in_a_dict, in_a_global, in_the_class, memoised):
        get(path)
    before = _kept()
    with hotset.cache(Outside(path, memoised), memory="1MiB") as cached:
        list(DataLoader(cached))
        assert _kept() == before
    globals().update(FILE=None)
    HANDLES.clear()
    memoised.cache_clear()
    Outside.file = None


@functools.cache
def kept_dicts(path: Path | int) -> Any:
    return {path: path} if isinstance(path, int) else Handle(path)


@functools.lru_cache(maxsize=4)
def few_dicts(path: Path | int) -> Any:
    return {path: path} if isinstance(path, int) else Handle(path)


@pytest.mark.parametrize("get", [kept_dicts, few_dicts])
def test_what_a_memo_kept_before_stays_in_it_alone(get: Any, path: Path) -> None:
    for number in range(6):
        get(number)
    size, newest = get.cache_info().currsize, get(5)
    with hotset.cache(Outside(path, get), memory="1MiB") as cached:
        assert get.cache_info().currsize in (size, size - 1), "for the file, the oldest one was dropped"
        assert get(5) is newest
        misses = get.cache_info().misses
        assert get(path) is not None
        assert get.cache_info().misses == misses + 1, "the file is opened anew"
        list(DataLoader(cached, num_workers=1))
        for number in range(20):
            assert get(number) == {number: number}
        assert get.cache_info().currsize == (get.cache_info().maxsize or 21)
    get.cache_clear()


READINGS = torch.zeros(1, dtype=torch.int64).share_memory_()
WRITTEN = np.frombuffer(mmap.mmap(-1, 8), np.int64)


class CountsReadings(Dataset[int]):
    """Counts its readings in all processes."""

    def __init__(self) -> None:
        self.written = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        READINGS.add_(1)
        WRITTEN[0] += 1
        self.written[0] += 1
        return index


def test_memory_that_other_processes_write_to_is_not_put_back() -> None:
    """What one of them has written meanwhile would be lost."""
    dataset = CountsReadings()
    with hotset.cache(dataset, memory="1MiB"):
        assert READINGS.item() == WRITTEN[0] == dataset.written[0] > 0


NOTED: dict[str, Any] = {"read": {"samples": [], "sums": np.zeros(2), "last": deque(maxlen=1)}}
WEIGHTS = torch.nn.Parameter(torch.ones(2))
TEXTS = np.array(["none", None], object)
with torch.inference_mode():
    MEANS = torch.zeros(2)


class NotesOutside(Dataset[int]):
    """Notes what it has read in globals of all kinds, and in what these hold."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        read = NOTED["read"]
        read["samples"].append(index)
        read["sums"] += 1
        read["last"].append(index)
        TEXTS[0] = str(index)
        with torch.inference_mode():
            MEANS.add_(1)
            WEIGHTS.mul_(2)
        return index


@pytest.mark.parametrize("audited", [False, True], ids=["planned", "audited"])
def test_what_globals_hold_at_any_depth_is_put_back(audited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    held = (NOTED["read"], *NOTED["read"].values())

    def is_as_it_was() -> bool:
        read = NOTED["read"]
        same = all(map(operator.is_, held, (read, *read.values())))
        found = (read["samples"], list(read["last"]), *read["sums"], *TEXTS, *MEANS, *WEIGHTS.tolist())
        return same and found == ([], [], 0, 0, "none", None, 0, 0, 1, 1)

    with hotset.cache(NotesOutside(), memory="1MiB") as cached:
        assert is_as_it_was()
        if audited:
            list(DataLoader(cached, num_workers=1))
            list(DataLoader(cached))
            assert cached.stats().audited
            assert is_as_it_was()


COLLECTED: list[int] = []
SHELF_OF_LISTS = {"collected": COLLECTED}
COUNTS: dict[str, int] = {}
LATEST = 0


class Progress:
    steps = 0


class Reports(Dataset[torch.Tensor]):
    """Names what a thread of the program writes, and writes to some of it."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        COUNTS["read"] = COUNTS.get("read", 0) + 1
        time.sleep(0.002)
        return torch.tensor(index + 0 * (len(SHELF_OF_LISTS["collected"]) + LATEST + Progress.steps))


def _collect(number: int) -> None:
    global LATEST
    LATEST = number
    Progress.steps += 1
    COUNTS["collected"] = number
    COLLECTED.append(number)


@pytest.mark.parametrize("audited", [False, True], ids=["planned", "audited"])
def test_what_a_thread_of_the_program_writes_meanwhile_stays(
    audited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A global that it shares with the dataset is not as it was before planning."""
    ends = threading.Event()
    COLLECTED.clear()
    Progress.steps = 0
    monkeypatch.setattr(audit, "_SHARE", 1e9 if audited else 0)

    def collect() -> None:
        for number in itertools.count(1):
            _collect(number)
            if ends.wait(0.0005):
                break

    thread = threading.Thread(target=collect)
    thread.start()
    seen = []
    try:
        with hotset.cache(Reports(), memory="1MiB") as cached:
            seen.append(len(COLLECTED))
            for _ in range(2 if audited else 0):
                list(DataLoader(cached, batch_size=2))
                seen.append(len(COLLECTED))
    finally:
        ends.set()
        thread.join()
    assert seen == sorted(seen)
    assert seen[0] > 0
    last = len(COLLECTED)
    assert list(range(1, last + 1)) == COLLECTED
    assert (LATEST, Progress.steps, COUNTS["collected"]) == (last, last, last)


class Registry(OrderedDict[str, int]):
    """Takes what is new, and gives up nothing."""

    def clear(self) -> None:
        raise RuntimeError("nothing of this is given up")

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("one by one")

    def __setitem__(self, name: str, value: int) -> None:
        if name in self or value < 0:
            raise RuntimeError("what is there stays")
        super().__setitem__(name, value)


REGISTRY = Registry()
REGISTRY["first"] = 1
OrderedDict.__setitem__(REGISTRY, "unknown", -1)


class Registers(Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        REGISTRY[f"sample {index}"] = index
        return index


def test_a_container_whose_class_refuses_to_be_emptied_is_put_back() -> None:
    with hotset.cache(Registers(), memory="1MiB"):
        assert list(REGISTRY.items()) == [("first", 1), ("unknown", -1)]


def test_a_container_of_a_librarys_class_that_is_more_than_its_elements_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the dicts of sortedcontainers, whose keys are in a list as well: they would not go together."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "ordered_tables.py").write_text(
        "class Table(dict):\n"
        "    def __init__(self):\n"
        "        self.keys_in_order = []\n"
        "    def add(self, key, value):\n"
        "        self[key] = value\n"
        "        self.keys_in_order = sorted(self)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    table = importlib.import_module("ordered_tables").Table()

    class Tabulates(Dataset[int]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> int:
            table.add(index, index)
            return index

    with hotset.cache(Tabulates(), memory="1MiB"):
        assert table.keys_in_order == sorted(table) != []


class TimesSparse:
    def __init__(self) -> None:
        self.diagonal = (2 * torch.eye(4)).to_sparse()

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.diagonal, value[:, None].float())[:, 0]


def test_a_transform_may_hold_a_sparse_tensor(log: ReadLog, path: Path) -> None:
    """Not all of torch's functions take one."""
    dataset = Opens(log, path, TimesSparse())
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert cached[1].tolist() == [8, 10, 12, 14]
