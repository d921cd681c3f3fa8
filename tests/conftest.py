"""What every test stands on: torchvision importable on a CPU-only torch, and a machine left as it was found.

After each test nothing of it may remain: no child process, no thread, no memory segment, no file in the
runtime folder. A leak that only shows in the next day's ``df /dev/shm`` shows here in the test that made it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in every child: threads of its teams that wait for another must not spin.
# Where cores are short a step takes thirty times as long with that, and so do all others' steps.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# torch 2.6 starts processes that compile as soon as torch.compile is called, and they stay.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from helpers import eventually, memory_files, seed_everything
from large_pages import use_large_pages
from programs import Programs, fork_by_default
from session_places import own_runtime

from benchmarks.operators import define_torchvision_operators

define_torchvision_operators()
fork_by_default()
# torch notes a traceback of all of pytest whenever it seeds a device that is not there: a quarter of what a
# loader's worker takes.
for device in (torch.cuda, torch.xpu, torch.mtia):
    device.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]
gc.disable()  # until all is collected, which leaves hardly any garbage
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Python's own servants live until the interpreter ends: two processes for spawn and forkserver, and the
# thread that hands descriptors to other processes (of a sampler's tensors, for one).
_SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SERVING_THREAD = "(_serve)"

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file all of whose tests are left out, for the sake of what it imports."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    found = re.search(
        r"^pytestmark = .*pytest\.mark\.(benchmark|chaos|compatibility)\b", collection_path.read_text(), re.M
    )
    return True if found and f"not {found[1]}" in config.option.markexpr else None


# Files that take longest come first, so that no worker is left alone with one of them at the end. Then comes
# what forks most, as long as processes are small, and last what imports many libraries and makes them large.
_FIRST = (
    "run/test_doctor.py",
    *("docs/test_example_cluster.py", "server/test_server_connections.py"),
    *("cluster/test_cluster_ray.py", "run/test_decoders.py", "run/test_pillow.py"),
)
_FOLDERS = ("docs", "cluster", "session", "loader", "dataset", "store", "demo", "server", "cli")
_LAST = (
    *("dataset/test_cache_sources.py", "dataset/test_set_attributes.py", "dataset/test_stale.py"),
    *("dataset/test_batched.py", "dataset/test_transform_attributes.py", "docs/test_docstrings.py"),
    *("loader/test_loader_subclasses.py", "docs/test_examples_sessions.py"),
    *("store/test_gather.py", "store/test_schema.py", "dataset/test_audit.py", "dataset/test_cut_search.py"),
    *("dataset/test_cache_dataset.py", "determinism/test_chain.py", "determinism/test_libraries.py"),
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each worker begin with other files: what one has compiled, which takes long, the others read."""
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker and isinstance(collector, pytest.Directory):
        found = report.result
        at = len(found) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = found[at:] + found[:at]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent

    @functools.cache
    def rank(path: Path) -> tuple[int, int, str]:
        path = path.relative_to(folder) if path.is_relative_to(folder) else path
        if str(path) in _FIRST:
            return 0, _FIRST.index(str(path)), ""
        if str(path) in _LAST:
            return 2, _LAST.index(str(path)), ""
        place = _FOLDERS.index(path.parts[0]) if path.parts[0] in _FOLDERS else len(_FOLDERS)
        return 1, place, str(path)

    items.sort(key=lambda item: rank(item.path))


def pytest_collection_finish() -> None:
    _let_logs_reach_the_root()
    _pass_over_libraries()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    if len(sys.modules) > _modules_passed_over + 100:  # a test has imported more libraries
        _pass_over_libraries()


_modules_passed_over = 0


def _pass_over_libraries() -> None:
    """Have the collector pass over what is imported, and forks over its page tables: both take long."""
    global _modules_passed_over
    _modules_passed_over = len(sys.modules)
    gc.collect()
    gc.freeze()
    use_large_pages()


def _let_logs_reach_the_root() -> None:
    """Loggers that do not reach the root, as torch's, get pytest's handlers six times a test."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime folder of this run's own, so that caches of other runs on the machine are not in it."""
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    before = os.environ.get("HOTSET_RUNTIME_DIR")
    os.environ["HOTSET_RUNTIME_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["HOTSET_RUNTIME_DIR"]
    else:
        os.environ["HOTSET_RUNTIME_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def _unhurried() -> Iterator[None]:
    """What a cache is planned from is looked at in full, however long a busy machine takes for that.

    Transforms are tried six times, which is more than the four of a machine that is short of time.
    """
    from hotset.determinism.fingerprint.fingerprint import fingerprint

    budgets = (
        "dataset.planning.recorder._READ_SECONDS",
        "dataset.planning.cut_search._LIVE_SECONDS",
        "dataset.planning.planner._PROBE_SECONDS",
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in (*budgets, "determinism.split._SECONDS"):
            patch.setattr(f"hotset.{name}", 600.0)
        patch.setitem(fingerprint.__kwdefaults__, "seconds", 600.0)
        patch.setattr("hotset.determinism.trial._REPEATS", 6)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_audits() -> Iterator[None]:
    """Audits read samples at times of their own, and tests count readings: they run where a test asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotset.dataset.audit._SHARE", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _libraries_as_installed() -> Iterator[Callable[[set[str]], list[Any]]]:
    """No functions of the user's are looked for in libraries' modules, but with :func:`patched_libraries`.

    For each cache that takes hold of 30,000 objects, in thousands of pages that are shared with forked
    workers until then: a sixth of what tests of small caches cost.
    """
    environment = importlib.import_module("hotset.determinism.fingerprint.environment")
    with pytest.MonkeyPatch.context() as patch:
        find = environment._patched
        patch.setattr(environment, "_patched", lambda packages: [])
        yield find


@pytest.fixture
def patched_libraries(
    monkeypatch: pytest.MonkeyPatch, _libraries_as_installed: Callable[[set[str]], list[Any]]
) -> None:
    """Functions of the user's are looked for in libraries' modules, as ever; in forked children, too."""
    monkeypatch.setattr("hotset.determinism.fingerprint.environment._patched", _libraries_as_installed)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs that import torch, which is imported once for all of them."""
    with Programs() as programs:
        yield programs


@pytest.fixture
def runtime_folder(_own_runtime_folder: Path) -> Path:
    return _own_runtime_folder


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test's own, in memory, for what goes on in sessions."""
    with own_runtime(tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives up a process that stands still, nor ends its probe early, and so nothing is read twice.

    For tests that count reads: a machine may stand still for longer than the two seconds that users wait.
    Children that are forked later have this too.
    """
    for module in ("store.fill", "store.slots"):
        monkeypatch.setattr(f"hotset.{module}._PATIENCE_SECONDS", 60.0)
    for module in ("store.claims", "session.quota"):
        monkeypatch.setattr(f"hotset.{module}._LOCK_SECONDS", 60.0)
    monkeypatch.setattr("hotset.dataset.planning.planner._PROBE_SECONDS", 600.0)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short name: sockets that processes meet at have room for 107 characters."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """A spill folder."""
    return str(tmp_path / "spill")


def _below(process: int | str) -> list[int]:
    """The processes below one, as the kernel lists them: psutil reads what all of the machine's are."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                    found += [int(child), *_below(child)]
    return found


# Some kernels have no such lists.
_LISTED = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def _has_children() -> bool:
    """Whether this process has children: the kernel knows, while a list takes a walk through ``/proc``."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> set[str]:
    found: set[str] = set()
    if not _has_children():
        return found
    numbers = (
        _below("self") if _LISTED else [child.pid for child in psutil.Process().children(recursive=True)]
    )
    for number in numbers:
        try:
            child = psutil.Process(number)
            line = " ".join(child.cmdline())
            if not any(servant in line for servant in _SERVANTS):
                # Its state would tell one process from itself: asleep now, and running before.
                ended = "ended, " if child.status() == psutil.STATUS_ZOMBIE else ""
                found.add(f"process {number}: {ended}{line[:60]}")
        except psutil.NoSuchProcess:
            continue
    return found


def _shared_memory() -> set[str]:
    """Entries of ``/dev/shm`` that are hotset's, but for the default runtime folder of other runs."""
    return {
        f"/dev/shm/{name}"
        for name in os.listdir("/dev/shm")
        if name.startswith("hotset") and name != f"hotset-{os.geteuid()}"
    }


@pytest.fixture(autouse=True)
def _nothing_left_behind(_own_runtime_folder: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    seed_everything()

    def present() -> set[str]:
        files = {f"runtime file {path.name}" for path in _own_runtime_folder.rglob("*") if path.is_file()}
        threads = {
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if thread.is_alive() and not thread.name.endswith(_SERVING_THREAD)
        }
        return _children() | memory_files() | _shared_memory() | files | threads

    before = present()
    yield
    if request.node.stash.get(_failed, False):
        return  # the traceback holds on to everything that the test had
    request.node.funcargs.clear()  # else they would live until after this
    left: set[str] = set()

    def clean() -> bool:
        nonlocal left
        left = present() - before
        return not left

    if not clean():
        gc.collect()  # a loader and its workers may sit in a reference cycle, as with torch's
        assert eventually(clean), f"left behind: {sorted(left)}"
