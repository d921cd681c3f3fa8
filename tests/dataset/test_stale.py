"""Jobs that share a session but differ: each gets its own samples, whatever the difference is."""

from __future__ import annotations

import bz2
import colorsys
import contextvars
import gzip
import importlib
import io
import mmap
import os
import queue
import shutil
import socket
import sqlite3
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, is_a_sentence, recorded, rng_states
from kills import in_child
from torch.utils.data import Dataset

import hotset
from hotset.determinism.fingerprint.fingerprint import fingerprint
from hotset.session import sessions
from hotset.session.reports import report

N = 24
ROW = 64


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="test-hotset-", dir="/dev/shm"))
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield folder
    shutil.rmtree(folder)


# ---- two files, and what stands for them -----------------------------------------------------------------


class Records(Dataset[torch.Tensor]):
    """Records of ``ROW`` bytes, as ``read(handle, index)`` gives them: nothing here names a file."""

    def __init__(self, handle: Any, read: Callable[[Any, int], bytes]) -> None:
        self.handle, self.read = handle, read

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(self.read(self.handle, range(N)[index])), dtype=torch.uint8)


def at(index: int) -> slice:
    return slice(index * ROW, (index + 1) * ROW)


def sliced(handle: Any, index: int) -> bytes:
    return bytes(handle[at(index)])


def sought(handle: Any, index: int) -> bytes:
    handle.seek(index * ROW)
    return handle.read(ROW)  # type: ignore[no-any-return]


def mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def anonymous(path: Path) -> mmap.mmap:
    memory = mmap.mmap(-1, N * ROW)
    memory[:] = path.read_bytes()
    return memory


def unlinked(path: Path) -> Any:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    file.write(path.read_bytes())
    return file


def zipped(path: Path) -> Any:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        archive.write(path, "data")
    return zipfile.ZipFile(path.with_suffix(".zip"))


def compressed(module: Any) -> Callable[[Path], Any]:
    def make(path: Path) -> Any:
        packed = path.with_suffix(f".{module.__name__}")
        with module.open(packed, "wb") as file:
            file.write(path.read_bytes())
        return module.open(packed, "rb")

    return make


def database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path.with_suffix(".db"))
    connection.execute("create table records (i integer, data blob)")
    data = path.read_bytes()
    connection.executemany("insert into records values (?, ?)", [(i, data[at(i)]) for i in range(N)])
    connection.commit()
    return connection


def in_database(connection: sqlite3.Connection, index: int) -> bytes:
    return connection.execute("select data from records where i = ?", (index,)).fetchone()[0]  # type: ignore[no-any-return]


def queued(path: Path) -> queue.Queue[Any]:
    pool: queue.Queue[Any] = queue.Queue()
    pool.put(mapped(path))
    return pool


class Reader(threading.Thread):
    """A thread of the user's that keeps what it has read."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.data = path.read_bytes()


HANDLES: list[tuple[str, Callable[[Path], Any], Callable[[Any, int], bytes]]] = [
    ("mmap", mapped, sliced),
    ("anonymous mmap", anonymous, sliced),
    ("view of an mmap", lambda path: memoryview(mapped(path)), sliced),
    ("memmap", lambda path: np.memmap(path, np.uint8, "r"), sliced),
    ("buffered file", lambda path: path.open("rb"), sought),
    ("unbuffered file", lambda path: path.open("rb", buffering=0), sought),
    ("file that has no name", unlinked, sought),
    ("gzip", compressed(gzip), sought),
    ("bz2", compressed(bz2), sought),
    ("zip", zipped, lambda archive, index: archive.read("data")[at(index)]),
    ("sqlite3", database, in_database),
    ("queue of readers", queued, lambda pool, index: bytes(pool.queue[0][at(index)])),
    ("user's thread", Reader, lambda thread, index: thread.data[at(index)]),
    (
        "from_file",
        lambda path: torch.from_file(str(path), size=N * ROW, dtype=torch.uint8),
        lambda tensor, index: bytes(tensor[at(index)].tolist()),
    ),
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of one size and one date."""
    rng = np.random.default_rng(0)
    paths = tmp_path / "train.bin", tmp_path / "val.bin"
    for path in paths:
        path.write_bytes(rng.integers(0, 255, N * ROW, np.uint8).tobytes())
        os.utime(path, ns=(10**18, 10**18))
    return paths


@pytest.mark.parametrize(
    ("handle", "read"), [case[1:] for case in HANDLES], ids=[case[0] for case in HANDLES]
)
def test_two_files_behind_one_type_are_two_datasets(
    handle: Callable[[Path], Any], read: Callable[[Any, int], bytes], files: tuple[Path, Path]
) -> None:
    sessions.create("shared", memory=1 << 20)
    handles = [handle(path) for path in files]
    for path, opened in zip(files, handles, strict=True):
        with hotset.cache(Records(opened, read), session="shared") as cached:
            for _ in range(2):
                assert all(bytes(cached[i].tolist()) == path.read_bytes()[at(i)] for i in range(N))
            assert cached.stats().cached == N
    assert fingerprint(handles[0]).digest == fingerprint(handles[0]).digest
    assert fingerprint(handles[0]).unknowns == ()
    for opened in handles:
        if isinstance(opened, (io.IOBase, zipfile.ZipFile, sqlite3.Connection)):
            opened.close()


def from_descriptor(descriptor: int, index: int) -> bytes:
    return os.pread(descriptor, ROW, index * ROW)


def test_a_descriptor_of_another_file_is_another_dataset(files: tuple[Path, Path]) -> None:
    sessions.create("shared", memory=1 << 20)
    numbers = set()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        numbers.add(descriptor)
        with hotset.cache(Records(descriptor, from_descriptor), session="shared") as cached:
            assert all(bytes(cached[i].tolist()) == path.read_bytes()[at(i)] for i in range(N))
        os.close(descriptor)
    assert len(numbers) == 1, "one number was to stand for both"


def test_the_content_of_a_file_that_is_only_written_to_does_not_count(tmp_path: Path) -> None:
    with (tmp_path / "log").open("a") as log:
        before = fingerprint([log]).digest
        print("a sample was read", file=log, flush=True)
        assert fingerprint([log]).digest == before


def test_a_mapped_large_file_is_not_read_and_its_date_counts(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(range(256)) * (65 << 12))
    views: list[Callable[[], Any]] = [
        lambda: np.memmap(path, np.uint16, "r"),
        lambda: np.memmap(path, np.uint16, "r").reshape(-1, 1024)[:, ::-1],
        lambda: mapped(path),
        lambda: torch.from_file(str(path), size=65 << 20, dtype=torch.uint8),
    ]
    before = [fingerprint(make()).digest for make in views]
    assert before == [fingerprint(make()).digest for make in views]
    assert len(set(before)) == len(before)
    os.utime(path, ns=(10**18, 10**18))
    assert not set(before) & {fingerprint(make()).digest for make in views}
    private = np.memmap(path, np.uint8, "c")
    untouched = fingerprint(private).digest
    private[12345] = 99
    assert fingerprint(private).digest != untouched, "its pages are no longer the file's"


def test_an_indescribable_dataset_is_not_shared_in_a_session_with_a_warning(files: tuple[Path, Path]) -> None:
    sessions.create("shared", memory=1 << 20)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data = {"data": mapped(files[0]), "connection": ours}
        with recorded() as told:
            cached: Any = hotset.cache(
                Records(data, lambda held, index: bytes(held["data"][at(index)])), session="shared"
            )
        (sentence,) = [str(each.message) for each in told]
        assert is_a_sentence(sentence)
        assert "socket.socket could not be described" in sentence
        assert "key=" in sentence
        with cached:
            assert [bytes(cached[i].tolist()) for i in range(N)] == [
                files[0].read_bytes()[at(i)] for i in range(N)
            ]
            assert cached.stats().cached == N
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hotset.cache(Records(data["data"], sliced), session="shared", key="named").close()
    assert len(report(sessions.find("shared")).caches) == 1, "only what has a key is the session's"


# ---- one program, two jobs that are not alike ------------------------------------------------------------


class Made:
    """``make(i)``."""

    def __init__(self, make: Callable[[int], Any], **state: Any) -> None:
        self.make = make
        self.__dict__.update(state)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.make(range(N)[index])


class ByVariable(Made):
    def __init__(self) -> None:
        self.variable = "DATA_SCALE"

    def __getitem__(self, index: int) -> Any:
        return scale_of(self.variable) * index


def scale_of(name: str) -> float:
    return float(os.environ[name])


variables = os.environ
scale = contextvars.ContextVar("scale", default=1.0)
TABLE = {"scale": 1}


def with_get(i: int) -> Any:
    return i * int(os.environ.get("DATA_SCALE", "1"))


def with_getenv(i: int) -> Any:
    return i * int(os.getenv("DATA_SCALE") or 1)


def with_another_name(i: int) -> Any:
    return i * float(variables["DATA_SCALE"])


def with_expanded(i: int) -> Any:
    return f"{i} {os.path.expandvars('${DATA_SCALE}x')}"


def in_default_dtype(i: int) -> Any:
    return torch.tensor(0.1 * i)


def on_default_device(i: int) -> Any:
    return torch.ones(2).device.type, i


def by_import_module(i: int) -> Any:
    return i * importlib.import_module("of_users_settings").SCALE


def by_name_in_modules(i: int) -> Any:
    return i * getattr(sys.modules["of_users_settings"], "SCALE")  # noqa: B009


def by_import(i: int) -> Any:
    import of_users_settings  # type: ignore[import-not-found]

    return i * of_users_settings.SCALE


def by_context(i: int) -> Any:
    return i * scale.get()


def by_library(i: int) -> Any:
    return colorsys.rgb_to_hsv(i / N, 0.5, 0.25)


def by_library_of_library(i: int) -> Any:
    from torch.utils.data import default_collate

    return default_collate([torch.tensor(i)])


def by_time_zone(i: int) -> Any:
    return time.localtime(3600 * i).tm_hour


def set_variable() -> None:
    os.environ["DATA_SCALE"] = "3"


def edit_settings() -> None:
    found = Path(sys.modules["of_users_settings"].__file__ or "")
    found.write_text("SCALE = 7\nOTHER = 1\n")
    sys.modules.pop("of_users_settings")
    importlib.invalidate_caches()
    importlib.import_module("of_users_settings")


def set_setting() -> None:
    sys.modules["of_users_settings"].SCALE = 9  # type: ignore[attr-defined]


def set_zone() -> None:
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def patch_library() -> None:
    colorsys.rgb_to_hsv = lambda r, g, b: (b, g, r)


def resized() -> Made:
    from torchvision.transforms import Resize

    return Made(Both(torch.arange(N * 16.0).view(N, 1, 4, 4), Resize(2)))


class Both:
    def __init__(self, pictures: torch.Tensor, transform: Any) -> None:
        self.pictures, self.transform = pictures, transform

    def __call__(self, index: int) -> Any:
        return self.transform(self.pictures[index])


def patch_function() -> None:
    import torchvision.transforms.functional as F

    F.resize = lambda image, *args, **kwargs: image[..., :2, :2] - 1


def patch_method() -> None:
    from torchvision.transforms import Resize

    Resize.forward = lambda self, image: image[..., :2, :2] - 2


JOBS: list[tuple[str, Callable[[], Any], Callable[[], object]]] = [
    ("variable in an attribute", ByVariable, set_variable),
    ("environ.get", lambda: Made(with_get), set_variable),
    ("getenv", lambda: Made(with_getenv), set_variable),
    ("environ by another name", lambda: Made(with_another_name), set_variable),
    ("expandvars", lambda: Made(with_expanded), set_variable),
    ("default dtype", lambda: Made(in_default_dtype), lambda: torch.set_default_dtype(torch.float64)),
    ("default device", lambda: Made(on_default_device), lambda: torch.set_default_device("meta")),
    ("import_module, edited", lambda: Made(by_import_module), edit_settings),
    ("import_module, set", lambda: Made(by_import_module), set_setting),
    ("sys.modules, edited", lambda: Made(by_name_in_modules), edit_settings),
    ("sys.modules, set", lambda: Made(by_name_in_modules), set_setting),
    ("import, set", lambda: Made(by_import), set_setting),
    ("context", lambda: Made(by_context), lambda: scale.set(2.0)),
    ("library that is patched", lambda: Made(by_library), patch_library),
    ("library that a library uses", resized, patch_function),
    ("method of a library", resized, patch_method),
    ("time zone", lambda: Made(by_time_zone), set_zone),
]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("DATA_SCALE", "1")
    monkeypatch.setenv("TZ", "UTC")
    (tmp_path / "of_users_settings.py").write_text("SCALE = 5\nOTHER = 1\n")
    importlib.invalidate_caches()
    importlib.import_module("of_users_settings")
    yield
    sys.modules.pop("of_users_settings")


def a_job(dataset: Any, before: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        before()
        own = dataset()
        expected = [own[i] for i in range(N)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # found to be another by what it is, and not by looking at samples
            with hotset.cache(dataset(), session="shared") as cached:
                for _ in range(2):
                    assert difference([cached[i] for i in range(N)], expected) is None
                assert cached.stats().cached == N

    return run


@pytest.mark.parametrize(("dataset", "other"), [case[1:] for case in JOBS], ids=[case[0] for case in JOBS])
def test_a_job_in_another_environment_gets_its_own_samples(
    dataset: Callable[[], Any], other: Callable[[], object], settings: None, patched_libraries: None
) -> None:
    sessions.create("shared", memory=1 << 20)
    job = a_job(dataset, lambda: None)
    in_child(lambda: (job(), job()))
    assert len(report(sessions.find("shared")).caches) == 1, "the same job twice has one cache"
    in_child(a_job(dataset, other))
    assert len(report(sessions.find("shared")).caches) == 2


def test_a_library_that_is_patched_while_the_program_runs_counts_for_as_long(
    monkeypatch: pytest.MonkeyPatch, patched_libraries: None
) -> None:
    before = fingerprint(resized())
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("torchvision.transforms.functional.resize", lambda image, *_, **__: image)
            assert fingerprint(resized()) != before
        assert fingerprint(resized()) == before


def test_environment_variables_that_the_code_does_not_name_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATA_SCALE", "1")
    before = fingerprint(Made(with_get))
    monkeypatch.setenv("ANOTHER_SCALE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert fingerprint(Made(with_get)) == before
    assert fingerprint(Made(by_context)).digest == fingerprint(Made(by_context)).digest
    monkeypatch.delenv("DATA_SCALE")
    assert fingerprint(Made(with_get)) != before


def per_rank(i: int) -> Any:
    return i, os.environ.get("LOCAL_RANK")


def test_rank_variables_do_not_count_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        seen.append(fingerprint(Made(per_rank)))
    assert seen[0] == seen[1]
    (note,) = seen[0].notes
    assert "LOCAL_RANK" in note
    assert "key=" in note


def test_a_few_changed_rows_of_a_large_array_are_another_dataset() -> None:
    rows = torch.zeros(70 << 10, 256)
    before = fingerprint(Made(None, rows=rows))  # type: ignore[arg-type]
    rows[54_321, 7] = 1e-30
    assert fingerprint(Made(None, rows=rows)).digest != before.digest  # type: ignore[arg-type]
    assert before.notes == ()


# ---- what no fingerprint sees ----------------------------------------------------------------------------


def composed(i: int) -> Any:
    return i * int(os.environ["_".join(["DATA", "SCALE"])]) + 1


def random_too(i: int) -> Any:
    return composed(i), np.random.default_rng(i).random()


@pytest.mark.parametrize("make", [composed, random_too])
def test_a_job_that_joins_anothers_cache_compares_samples_first(
    make: Callable[[int], Any], settings: None
) -> None:
    sessions.create("shared", memory=1 << 20)

    def job(told: list[str]) -> None:
        expected = [make(i) for i in range(N)]
        states = rng_states()
        with recorded() as warned:
            cached = hotset.cache(Made(make), session="shared")
        assert difference(rng_states(), states) is None
        with cached:
            for _ in range(2):
                assert difference([cached[i] for i in range(N)], expected) is None
            assert cached.stats().cached == N
            assert cached.stats().misses == N, "of this job or of the one that made it"
        sentences = [str(each.message) for each in warned]
        assert len(sentences) == len(told), sentences
        for sentence, part in zip(sentences, told, strict=True):
            assert part in sentence
            assert "key=" in sentence
            assert is_a_sentence(sentence)

    in_child(lambda: job([]))

    def elsewhere() -> None:
        os.environ["DATA_SCALE"] = "3"
        job(["is not what another job has cached"])

    in_child(elsewhere)
    in_child(lambda: job([]))  # where the first one was: its cache is as good as it was
    assert len(report(sessions.find("shared")).caches) == 1


def test_an_unreadable_source_at_joining_is_not_a_difference(settings: None) -> None:
    sessions.create("shared", memory=1 << 20)
    in_child(a_job(lambda: Made(composed), lambda: None))

    def without() -> None:
        del os.environ["DATA_SCALE"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with hotset.cache(Made(composed), session="shared") as cached:
                assert [cached[i] for i in range(N)] == [i + 1 for i in range(N)]

    in_child(without)
