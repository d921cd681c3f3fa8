"""The audit finds frozen and stale samples while they are used, names the cause, and stops serving them."""

from __future__ import annotations

import ctypes
import itertools
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers import difference, equal_batches, is_a_sentence, rarely, recorded, rng_states, seed_everything
from samples import image_and_label
from sources import FolderLike, ReadLog, Samples, TextFiles, Transformed
from torch.utils.data import Dataset

import hotset
from hotset.dataset import audit
from hotset.dataset.dataset_proxy import current_of
from hotset.dataset.pipeline import Cuts, Pipeline

N = 40


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit every batch, at any cost."""
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)


def unseen(end: int) -> int:
    """A number from the system's entropy, of which Python sees nothing: no generator moves."""
    return torch.Generator().seed() % end


class LaterRandom:
    """Deterministic while it is probed; once armed it draws so that nothing but its output shows it."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self, sample: Any) -> Any:
        image, label = sample
        return image, label + (unseen(10**6) if self.flag.exists() else 0)


class LaterRandomImage(LaterRandom):
    def __call__(self, image: Any) -> Any:
        return image + (unseen(10**6) if self.flag.exists() else 0)


def plain(sample: Any) -> Any:
    return sample


def warm(dataset: Any, **loader: Any) -> hotset.DataLoader[Any]:
    made = hotset.DataLoader(dataset, batch_size=8, **loader)
    list(made)
    return made


@pytest.mark.parametrize(("live", "workers"), rarely(itertools.product([False, True], [0, 2]), (False, 2)))
def test_a_frozen_transform_is_named_and_the_cache_stops_serving(
    tmp_path: Path, workers: int, live: bool
) -> None:
    flag = tmp_path / "armed"
    frozen = hotset.deterministic(LaterRandom(flag))
    chain = [plain, frozen, *([_live] if live else [])]
    with hotset.cache(Samples(image_and_label, N), transform=chain) as cached:
        loader = warm(cached, num_workers=workers)
        list(loader)
        assert cached.stats().cached == N
        flag.touch()
        with recorded() as told:
            list(loader)
            list(loader)
        sentences = [str(each.message) for each in told]
        assert len(sentences) == 1, sentences
        assert "LaterRandom returns another output each time" in sentences[0]
        assert is_a_sentence(sentences[0])
        assert cached.stats().cached == 0
        seen = {tuple(int(y) for _, labels in loader for y in labels) for _ in range(3)}
        assert len(seen) == 3, "labels are drawn anew in each epoch from now on"


def _live(sample: Any) -> Any:
    return sample[0] + random.randrange(3), sample[1]


def test_a_frozen_transform_inside_the_dataset_is_named(tmp_path: Path) -> None:
    flag = tmp_path / "armed"
    from torchvision.transforms import Compose

    source = FolderLike(N, Compose([plain, hotset.deterministic(LaterRandomImage(flag)), _jitter]))
    with hotset.cache(source) as cached:
        assert cached.plan.live == ("_jitter",)
        loader = warm(cached)
        flag.touch()
        with pytest.warns(hotset.HotsetWarning, match="LaterRandomImage returns another output each time"):
            list(loader)


def _jitter(image: torch.Tensor) -> torch.Tensor:
    return image + random.randrange(3)


def test_a_changed_file_is_found_and_its_new_content_served(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}" for i in range(8)]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i] * 5))
    with hotset.cache(TextFiles(files)) as cached:
        loader = warm(cached)
        for path in files:
            path.write_bytes(b"other")
        with pytest.warns(hotset.HotsetWarning, match="TextFiles depends on has changed since: a file"):
            list(loader)
        for i in range(8):
            equal_batches(cached[i], TextFiles(files)[i])


class OpenedLate(Dataset[Any]):
    """Opens its file when it reads first, as each worker is to have its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        self.file.seek(index)
        return torch.tensor(list(self.file.read(1)))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_after_a_difference_no_file_is_left_open_that_workers_would_share(tmp_path: Path) -> None:
    file, later = tmp_path / "numbers", list(range(100, 100 + N))
    file.write_bytes(bytes(range(N)))
    dataset = OpenedLate(file)
    with hotset.cache(dataset, memory="1MiB", key="numbers") as cached:
        loader = warm(cached, num_workers=2)
        file.write_bytes(bytes(later))
        with pytest.warns(hotset.HotsetWarning, match="differs from what was cached"):
            found = torch.cat(list(loader))  # made in this process, as all was cached
        assert found.flatten().tolist() == later
        assert dataset.file is None


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("make", [hotset.DataLoader, torch.utils.data.DataLoader])
def test_what_shows_the_difference_is_not_served_itself(tmp_path: Path, make: Any, live: bool) -> None:
    """A change of all samples between two passes is then seen from the first batch on."""
    table = tmp_path / "table"
    table.write_text("1")
    chain = [lambda index: int(table.read_text()) * 100 + index, *([_shaken] if live else [])]
    with hotset.cache(list(range(N)), transform=chain) as cached:
        loader = make(cached, batch_size=8)
        list(loader)
        table.write_text("2")
        with pytest.warns(hotset.HotsetWarning, match="differs from what was cached"):
            seen = torch.cat(list(loader))
        assert seen.tolist() == list(range(200, 200 + N))
        assert cached[3] == 203


def _shaken(number: int) -> int:
    return number + random.randrange(3) * 0


def test_all_processes_stop_serving(tmp_path: Path) -> None:
    """If one rank finds a difference, all that share the cache stop serving; here another attachment does."""
    import pickle

    flag = tmp_path / "armed"
    chain = [hotset.deterministic(LaterRandom(flag))]
    with hotset.cache(Samples(image_and_label, N), transform=chain) as cached:
        other = pickle.loads(pickle.dumps(cached))
        loader = warm(cached)
        assert current_of(other).store is not None
        flag.touch()
        with pytest.warns(hotset.HotsetWarning):
            list(loader)
        assert current_of(other).store is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert other[3][1] != other[3][1]
        other.close()


def test_an_audit_that_agrees_changes_nothing_and_moves_no_generator(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")

    def logged(index: int) -> Any:
        log.add(index)
        return image_and_label(index)

    source, chain = Samples(logged, N), [plain, _live]

    def run(dataset: Any) -> Any:
        seed_everything(3)
        loader = hotset.DataLoader(dataset, batch_size=8, shuffle=True)
        return [(list(loader), rng_states()) for _ in range(4)]

    expected = run(Transformed(Samples(image_and_label, N), chain))
    with hotset.cache(source, transform=chain) as cached:
        log.reset()
        got = run(cached)
        assert log.total() > N, "hits were audited"
        assert cached.stats().cached == N
    equal_batches(got, expected)


def test_a_transform_declared_against_the_evidence_is_not_audited() -> None:
    """The user has seen the draws, and wants them frozen."""

    def drawn(index: int) -> Any:
        return torch.tensor(random.random()), index

    with hotset.cache(hotset.deterministic(Samples(drawn, N))) as cached:
        assert not cached.plan.audited
        first = list(warm(cached))
        assert difference(list(hotset.DataLoader(cached, batch_size=8)), first) is None


def test_a_source_that_can_no_longer_be_read_is_not_a_difference(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}" for i in range(4)]
    for path in files:
        path.write_bytes(b"12345")
    with hotset.cache(TextFiles(files)) as cached:
        loader = warm(cached)
        for path in files:
            path.unlink()
        assert len(list(loader)) == 1
        assert cached.stats().cached == 4


def test_a_window_is_audited_with_the_samples_of_its_entries(tmp_path: Path) -> None:
    flag = tmp_path / "armed"
    chain = [hotset.deterministic(LaterRandom(flag))]
    servants = set(psutil.Process().children())  # of earlier tests: forkserver and the like
    window = hotset.Window(10, replace=0.2, wait=True)
    with hotset.cache(Samples(image_and_label, N), transform=chain, window=window) as cached:
        loader = hotset.DataLoader(cached, batch_size=5)
        for _ in range(6):
            list(loader)
        assert cached.stats().cached == 10
        flag.touch()
        with pytest.warns(hotset.HotsetWarning, match="LaterRandom"):
            list(loader)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            labels = [int(y) % 10**6 for _, ys in loader for y in ys]
            cursor = cached.stats().replaced
            list(loader)
        assert len(labels) == 10
        assert cached.stats().replaced == cursor + 2, "it moves on, over the source"
        assert set(psutil.Process().children()) <= servants, "and nobody prepares what nobody would read"


def _padded() -> Any:
    from monai.data import Dataset as MonaiDataset
    from monai.transforms import Compose, EnsureTyped, SpatialPadd

    items = [{"image": np.full((1, 4, 4), float(i), np.float32)} for i in range(16)]
    return MonaiDataset(items, Compose([EnsureTyped("image"), SpatialPadd("image", (6, 6))]))


@pytest.mark.chaos  # MONAI is imported for seconds
def test_monais_traces_of_another_process_are_not_a_difference() -> None:
    """A MetaTensor holds the address of each transform that it went through: another one in each process."""
    import pickle

    with hotset.cache(_padded()) as cached:
        for i in range(16):
            cached[i]
        other = pickle.loads(pickle.dumps(cached))  # has its own transforms, as a spawned worker has
        ours = cached[3]["image"].applied_operations[0]["id"]
        theirs = current_of(other).source.read(3)["image"].applied_operations[0]["id"]
        assert ours != theirs
        assert other.__getitems__(list(range(8)))[3]["image"].applied_operations[0]["id"] == ours
        assert current_of(other).store is not None
        cached.dataset.data[3]["image"] = np.zeros((1, 4, 4), np.float32)
        with pytest.warns(hotset.HotsetWarning, match="values"):
            cached.__getitems__([3])
        other.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time, in what no audit puts back, for an audit without a limit."""
    monkeypatch.setattr(audit, "_SHARE", 0.01)
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 0.5)
    now = (ctypes.c_double * 1)(100.0)
    monkeypatch.setattr(audit.time, "monotonic", lambda: now[0])
    return now


def auditor_of(clock: list[float], seconds: float) -> Any:
    """An auditor of samples that take this many seconds each."""

    def slow(index: int) -> Any:
        clock[0] += seconds
        return image_and_label(index)

    return audit.Audit(Pipeline.of(Samples(slow, N), None).cut(Cuts((), 0)), seconds=seconds)


def looks_of(auditor: Any, clock: list[float], batches: int, step: float) -> int:
    looks = 0
    for _ in range(batches):
        clock[0] += step
        place = auditor.due(64)
        if place is not None:
            assert 0 <= place < 64
            assert auditor.differs(image_and_label(0), 0) is None
            looks += 1
    return looks


@pytest.mark.parametrize(
    ("step", "seconds"),
    rarely([(0.01, 0.5), (0.0005, 0.005), (0.0005, 1e-4), (0.5, 0.005)], (0.5, 0.005)),
)
def test_audits_take_a_hundredth_of_the_time_whatever_the_loop_does(
    clock: list[float], step: float, seconds: float
) -> None:
    auditor, begun = auditor_of(clock, seconds), clock[0]
    batches = 2000 if step == 0.5 else 20_000  # of slow steps each is audited
    looks = looks_of(auditor, clock, batches, step)
    earned = 0.01 * (clock[0] - begun) / seconds
    assert 0.9 * min(earned, batches) - 1 <= looks <= earned + 1


def test_with_slow_steps_every_batch_is_audited(clock: list[float]) -> None:
    assert looks_of(auditor_of(clock, 0.005), clock, 100, step=1.0) == 100


def test_a_long_pause_allows_half_a_second_of_audits(clock: list[float]) -> None:
    auditor = auditor_of(clock, 0.01)
    clock[0] += 40_000.0
    assert looks_of(auditor, clock, 1000, step=0.0) == 50


def test_workers_of_one_epoch_audit_slow_samples_too(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor, spent, looks = auditor_of(clock, 0.1), 0.0, 0
    for epoch in range(200):  # of a second: none of its workers earns a look by itself
        monkeypatch.setattr(audit.os, "getpid", lambda epoch=epoch: 10_000 + epoch)
        auditor._process = 0
        for _ in range(10):
            clock[0] += 0.1
            if auditor.due(8, lambda: spent) is not None:  # noqa: B023
                auditor.differs(image_and_label(0), 0)
                spent, looks = spent + auditor.last_seconds, looks + 1
    assert 17 <= looks <= 21, "twenty seconds of two hundred would be a tenth"


@pytest.mark.parametrize("workers", [0, 2])
def test_audits_are_counted_over_all_processes(workers: int) -> None:
    with hotset.cache(Samples(image_and_label, N)) as cached:
        loader = warm(cached, num_workers=workers)
        for _ in range(3):
            list(loader)
        stats = cached.stats()
        assert 0 < stats.audited <= stats.hits
        assert stats.audit_rate == stats.audited / stats.hits


def test_the_audited_sample_varies_without_drawing() -> None:
    source = Pipeline.of(Samples(image_and_label, N), None).cut(Cuts((), 0))
    auditor = audit.Audit(source, 0.0)
    before = rng_states()
    places = set()
    for hits in range(2, 200):
        place = auditor.due(hits)
        if place is not None:
            auditor.differs(image_and_label(0), 0)
            places.add(place)
    assert len(places) > 20
    assert rng_states() == before


def test_every_place_of_a_batch_is_audited_at_some_time() -> None:
    source = Pipeline.of(Samples(image_and_label, N), None).cut(Cuts((), 0))
    auditor = audit.Audit(source, 0.0)
    auditor.due(64)
    assert len({auditor.due(64) for _ in range(1000)} - {None}) == 64


def test_finding_out_why_moves_no_generator_and_raises_nothing(tmp_path: Path) -> None:
    """The source raises once a difference was found: the warning comes, then what reading it raises."""
    flag, asked = tmp_path / "armed", tmp_path / "asked"

    def failing(index: int) -> Any:
        if flag.exists() and asked.exists():
            raise OSError("the disk is gone")
        if flag.exists():
            asked.touch()
            return random.random()
        return float(index)

    with hotset.cache(Samples(failing, N)) as cached:
        loader = warm(cached)
        flag.touch()
        before = rng_states()
        with (
            pytest.warns(hotset.HotsetWarning, match="reading it again raised OSError"),
            pytest.raises(OSError, match="the disk is gone"),
        ):
            next(iter(cached_batches(cached)))
        assert rng_states() == before
        assert current_of(cached).store is None
        assert len(loader) == N // 8


def cached_batches(cached: Any) -> Any:
    """Batches of ten hits each, read without a loader, which would draw a seed."""
    return (cached.__getitems__(list(range(start, start + 10))) for start in range(0, N, 10))


def test_after_a_clear_samples_are_cached_anew(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}" for i in range(8)]
    for path in files:
        path.write_bytes(b"first")
    with hotset.cache(TextFiles(files)) as cached:
        loader = warm(cached)
        for path in files:
            path.write_bytes(b"other")
        with pytest.warns(hotset.HotsetWarning, match="has changed"):
            list(loader)
        assert current_of(cached).store is None
        cached.clear()
        list(loader)
        assert cached.stats().cached == 8
        equal_batches(list(loader), list(hotset.DataLoader(TextFiles(files), batch_size=8)))
        assert cached.check() == []


class Resizes(Samples):
    """Reading resizes what the dataset holds, so that it cannot be put back."""

    def __init__(self) -> None:
        super().__init__(lambda index: torch.full((3,), float(index)), 8)
        self.array, self.tensor = np.zeros(3), torch.zeros(3)

    def __getitem__(self, index: int) -> Any:
        self.array.resize(index + 1, refcheck=False)
        self.tensor.resize_(index + 2)
        return super().__getitem__(index)


def test_a_dataset_whose_reading_resizes_what_it_holds_is_cached_and_audited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "_SHARE", 1e9)  # each hit
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)
    with hotset.cache(Resizes(), memory="1MiB") as cached:
        for _ in range(3):
            assert [float(cached[index][0]) for index in range(8)] == list(range(8))
        assert cached.stats().audited > 0
        assert cached.stats().hits == 16
