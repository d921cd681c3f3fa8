"""The list of caches: who is alive in it, and that nothing which lives is ever removed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import descriptors, eventually, rarely
from kills import die, in_child, lingering

from hotset.errors import FolderError, HotsetWarning
from hotset.session.catalog import CatalogHandle, entries, gc, register
from hotset.store import locks
from hotset.store.segment import Address

NONCE = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32
KEPT: list[CatalogHandle] = []

OWN = """
import os, sys
from hotset.session.catalog import register
from hotset.store.segment import Address
fd = os.memfd_create("cache")
own = register(Address(os.getpid(), fd, os.fstat(fd).st_ino, bytes.fromhex(sys.argv[1])), "owned")
"""
JOIN = """
import sys
from hotset.session.catalog import CatalogHandle
own = CatalogHandle(sys.argv[1], "owned")
assert own.join()
"""
WAIT = """
print("ready", flush=True)
sys.stdin.readline()
"""
GC = """
import json
from hotset.session.catalog import entries, gc
print(json.dumps([gc(), [[entry.alive, entry.path] for entry in entries()]]))
"""


pytestmark = pytest.mark.usefixtures("runtime")


@contextlib.contextmanager
def process(code: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run Python code in a process of its own until it says that it is ready; kill it at the end."""
    command = [*wrapper, sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


def listed(nonce: str = NONCE, name: str = "a cache") -> CatalogHandle:
    """List a cache of this process that has no memory behind it."""
    return register(Address(os.getpid(), 0, 1, bytes.fromhex(nonce)), name)


def keep_listed() -> None:
    """List a cache that nothing closes before the process ends."""
    KEPT.append(listed())
    assert entries()[0].alive


def make(runtime: Path, file: str, content: str = "{}", *, age: float = 0) -> Path:
    path = runtime / file
    path.touch(mode=0o600)
    path.write_text(content)
    os.utime(path, (time.time() - age,) * 2)
    return path


# Listing


def test_a_cache_is_listed_with_all_that_is_needed_to_reach_it(runtime: Path) -> None:
    with process(OWN + "os.write(fd, b'its memory')" + WAIT, NONCE) as owner:
        (entry,) = entries()
        assert (entry.pid, entry.nonce, entry.name, entry.problem) == (owner.pid, NONCE, "owned", "")
        assert entry.alive
        assert entry.pidns == os.stat("/proc/self/ns/pid").st_ino
        assert entry.path == f"/proc/{owner.pid}/fd/{entry.fd}"
        assert Path(entry.path).read_bytes() == b"its memory"
        assert abs(entry.created - time.time()) < 600
    assert os.listdir(runtime) == [f"{NONCE}.json"]
    assert (runtime / f"{NONCE}.json").stat().st_mode & 0o777 == 0o600


def test_the_path_is_not_given_when_the_descriptor_means_another_file_by_now(runtime: Path) -> None:
    fd = os.memfd_create("cache")
    own = register(Address(os.getpid(), fd, os.fstat(fd).st_ino, bytes.fromhex(NONCE)), "x")
    assert entries()[0].path
    os.close(fd)
    assert entries()[0].path is None
    assert os.memfd_create("another") == fd
    assert entries()[0].path is None
    assert entries()[0].alive
    own.close()
    os.close(fd)


def test_the_path_is_not_given_when_the_process_id_counts_in_another_namespace(runtime: Path) -> None:
    fd = os.memfd_create("cache")
    own = register(Address(os.getpid(), fd, os.fstat(fd).st_ino, bytes.fromhex(NONCE)), "x")
    file = runtime / f"{NONCE}.json"
    there = json.loads(file.read_text())
    file.write_text(json.dumps(there | {"pidns": there["pidns"] + 1}))
    assert entries()[0].path is None
    file.write_text(json.dumps(there))
    assert entries()[0].path is not None
    own.close()
    os.close(fd)


def test_the_list_is_in_order_of_making() -> None:
    own = [listed(nonce=letter * 32) for letter in "cab"]
    assert [entry.nonce[0] for entry in entries()] == ["c", "a", "b"]
    del own


def test_a_long_or_odd_label_is_no_obstacle() -> None:
    own = listed(name="ä\udc80\n" * 1000)
    assert entries()[0].name.startswith("ä\udc80\nä")
    assert len(entries()[0].name) == 200
    own.close()


# Life and death


def test_what_a_killed_owner_left_is_found_and_removed(runtime: Path) -> None:
    with process(OWN + WAIT, NONCE) as owner:
        assert gc() == []
        kill(owner)
        (entry,) = entries()
        assert not entry.alive
        assert entry.path is None
        (sentence,) = gc()
        assert NONCE in sentence
        assert "'owned'" in sentence
        assert str(owner.pid) in sentence
    assert os.listdir(runtime) == []


def test_a_stopped_owner_is_alive() -> None:
    with process(OWN + WAIT, NONCE) as owner:
        owner.send_signal(signal.SIGSTOP)
        assert gc() == []
        assert entries()[0].alive


@pytest.mark.parametrize("end", ["own.close()", "del own", "", "own.close(); own.close()"])
def test_an_owner_that_ends_in_order_leaves_nothing(runtime: Path, end: str) -> None:
    with process(OWN + WAIT + end, NONCE) as owner:
        assert os.listdir(runtime) == [f"{NONCE}.json"]
        owner.communicate("\n")
        assert owner.returncode == 0
    assert os.listdir(runtime) == []


@pytest.mark.parametrize("method", rarely(["fork", "forkserver"], "forkserver"))
def test_an_owner_that_multiprocessing_has_started_leaves_nothing(runtime: Path, method: str) -> None:
    owner = multiprocessing.get_context(method).Process(target=keep_listed)
    owner.start()
    owner.join()
    assert owner.exitcode == 0
    assert os.listdir(runtime) == []


def test_a_cache_stays_listed_until_its_last_process_ends(runtime: Path) -> None:
    with process(OWN + WAIT, NONCE) as owner, process(JOIN + WAIT, NONCE) as second:
        kill(owner)
        assert gc() == []
        (entry,) = entries()
        assert entry.alive
        assert entry.path is None
        second.communicate("\n")
        assert second.returncode == 0
        assert os.listdir(runtime) == []


def test_a_cache_whose_last_process_was_killed_is_stale(runtime: Path) -> None:
    with process(OWN + WAIT, NONCE) as owner, process(JOIN + WAIT, NONCE) as second:
        owner.communicate("\n")
        assert gc() == []
        kill(second)
        assert len(gc()) == 1
    assert os.listdir(runtime) == []


def test_the_last_to_close_removes_the_file_and_the_others_do_not(runtime: Path) -> None:
    first = listed()
    second = CatalogHandle(NONCE, "x")
    assert second.join()
    assert second.join()
    first.close()
    assert not first.joined
    assert entries()[0].alive
    second.close()
    assert os.listdir(runtime) == []


def test_when_all_close_at_once_one_of_them_removes_the_file(runtime: Path) -> None:
    for _ in range(150):
        shares = [listed(), *(CatalogHandle(NONCE, "x") for _ in range(3))]
        assert all(share.join(memory=0) for share in shares)
        start = threading.Barrier(len(shares))

        def close(share: CatalogHandle, start: threading.Barrier = start) -> None:
            start.wait()
            share.close()

        threads = [threading.Thread(target=close, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.listdir(runtime) == []


def test_joining_what_is_gone_is_told(runtime: Path) -> None:
    before = descriptors()
    assert not CatalogHandle(NONCE, "x").join()
    own = listed()
    (runtime / f"{NONCE}.json").chmod(0o666)
    assert not CatalogHandle(NONCE, "x").join()
    own.close()
    shutil.rmtree(runtime)
    assert not CatalogHandle(NONCE, "x").join()
    assert descriptors() == before


def test_who_joins_after_the_collector_looked_comes_too_late(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(runtime, f"{NONCE}.json")
    before = descriptors()

    def late(fd: int, byte: int, shared: bool = False, length: int = 1) -> bool:
        path.unlink(missing_ok=True)
        return locks_try_lock(fd, byte, shared)

    locks_try_lock = locks.try_lock
    monkeypatch.setattr(locks, "try_lock", late)
    assert not CatalogHandle(NONCE, "x").join()
    assert descriptors() == before


def test_a_pickle_carries_nonce_and_name_and_no_share() -> None:
    own = listed(name="label")
    copy = pickle.loads(pickle.dumps(own))
    assert (copy.nonce, copy.name, copy.joined) == (NONCE, "label", False)
    assert copy.join()
    own.close()
    assert entries()[0].alive
    copy.close()


# Forks


def test_a_forked_child_has_left_and_leaves_the_parents_share_alone(runtime: Path) -> None:
    own = listed()

    def leave() -> None:
        assert not own.joined
        own.close()

    in_child(leave)
    assert own.joined
    assert os.listdir(runtime) == [f"{NONCE}.json"]
    assert entries()[0].alive
    own.close()


def test_a_child_forked_behind_pythons_back_does_not_drop_the_parents_share(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = listed()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    other = locks.reopen(own._share.value)
    keep = os.dup(own._share.value)
    own.close()
    assert locks.is_locked(other, 0)
    assert os.listdir(runtime) == [f"{NONCE}.json"]
    os.close(other)
    os.close(keep)


def test_a_forked_child_does_not_keep_its_dead_parents_cache_alive(runtime: Path) -> None:
    fork = """
import signal
child = os.fork()
if child == 0:
    signal.pause()
print("ready", child, sep="\\n", flush=True)
signal.pause()
"""
    with process(OWN + fork, NONCE) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            kill(owner)
            # The child may be still at its first line after the fork.
            assert eventually(lambda: not entries()[0].alive)
            os.kill(child, 0)
            assert len(gc()) == 1
        finally:
            os.kill(child, signal.SIGKILL)
    assert os.listdir(runtime) == []


def test_a_forked_child_that_joined_keeps_the_cache_listed() -> None:
    own = listed()
    with lingering(lambda: own.join() or die()):
        own.close()
        assert gc() == []
        assert entries()[0].alive
    assert len(gc()) == 1


# Failing never fails the caller


def inert(own: CatalogHandle) -> bool:
    return not own.joined and not own.join() and own.close() is None  # type: ignore[func-returns-value]


def test_a_folder_that_cannot_be_used_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "no" / "such"))
    with pytest.warns(HotsetWarning, match="HOTSET_RUNTIME_DIR") as warned:
        own = listed()
    assert len(warned) == 1
    assert warned[0].filename == __file__, "the warning points at who registers"
    assert inert(own)
    for look in (entries, gc):
        with pytest.raises(FolderError, match="HOTSET_RUNTIME_DIR"):
            look()


def test_a_full_disk_is_one_warning_and_leaves_no_temporary_file(runtime: Path) -> None:
    # A limit on the size of files stands for the full disk: the write fails, and the process lives.
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))" + OWN + "print(own.joined)"
    done = subprocess.run([sys.executable, "-c", code, NONCE], capture_output=True, text=True, timeout=200)
    assert done.stdout == "False\n"
    assert done.stderr.count("HotsetWarning") == 1
    assert os.listdir(runtime) == []


# What the collector removes, and what it does not


def test_files_of_others_and_young_ones_are_left_alone(runtime: Path) -> None:
    hour = 3600
    for file in ("notes.txt", "package.json", f"{NONCE.upper()}X.json", f"{NONCE}.json.bak", "0.new"):
        make(runtime, file, age=hour)
    (runtime / f"{NONCE}.json").mkdir()
    (runtime / f"{OTHER}.json").symlink_to(runtime / "notes.txt")
    make(runtime, f"{NONCE}.00000000.new", "", age=1)
    before = sorted(os.listdir(runtime))
    assert gc() == []
    assert sorted(os.listdir(runtime)) == before
    assert [entry.alive for entry in entries()] == [False, False]
    assert [entry.file for entry in entries() if "symlink" in entry.problem] == [f"{OTHER}.json"]


def test_a_temporary_file_is_removed_when_it_is_old_and_nobody_holds_it(runtime: Path) -> None:
    path = make(runtime, f"{NONCE}.00000000.new", "", age=3600)
    fd = os.open(path, os.O_RDWR)
    holder = locks.reopen(fd)
    assert locks.try_lock(holder, 0, shared=True)
    assert gc() == []
    os.close(holder)
    os.close(fd)
    (sentence,) = gc()
    assert path.name in sentence
    assert os.listdir(runtime) == []


def test_a_creator_whose_temporary_file_was_collected_makes_another(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Path] = []

    def lose(fd: int, byte: int, shared: bool = False, length: int = 1) -> bool:
        for path in runtime.glob("*.new") if len(lost) < 2 else ():
            lost.append(path)
            path.unlink()
        return try_lock(fd, byte, shared, length)

    try_lock = locks.try_lock
    before = descriptors()
    monkeypatch.setattr(locks, "try_lock", lose)
    own = listed()
    assert len(lost) == 2
    assert own.joined
    assert entries()[0].alive
    own.close()
    assert descriptors() == before


def test_a_file_is_never_listed_before_it_is_locked_and_whole(runtime: Path) -> None:
    collect = """
import select, sys
from hotset.session.catalog import entries, gc
print("ready", flush=True)
bad = []
while not select.select([sys.stdin], [], [], 0)[0]:
    bad += [entry for entry in entries() if entry.problem or not entry.alive] + gc()
print(bad)
"""
    with process(collect) as collector:
        own = [listed(nonce=f"{number:032x}") for number in range(300)]
        assert collector.communicate("\n")[0] == "[]\n"
    assert len(os.listdir(runtime)) == len(own)


def test_a_file_that_took_the_name_since_is_not_removed(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(runtime, f"{NONCE}.json")

    def swap(fd: int, byte: int, shared: bool = False, length: int = 1) -> bool:
        make(runtime, "new").rename(path)
        return try_lock(fd, byte, shared, length)

    try_lock = locks.try_lock
    monkeypatch.setattr(locks, "try_lock", swap)
    assert gc() == []
    assert path.exists()


def test_two_collectors_at_once_remove_each_file_once(runtime: Path) -> None:
    for number in range(200):
        make(runtime, f"{number:032x}.json")
    code = "import sys" + WAIT + GC
    with process(code) as first, process(code) as second:
        for collector in (first, second):
            assert collector.stdin is not None
            collector.stdin.write("\n")
            collector.stdin.flush()
        sentences = []
        for collector in (first, second):
            sentences += json.loads(collector.communicate()[0])[0]
    assert len(sentences) == len(set(sentences)) == 200
    assert os.listdir(runtime) == []


GOOD = {
    "format": 2,
    "kind": "memfd",
    "pid": 1,
    "fd": 3,
    "inode": 5,
    "nonce": NONCE,
    "name": "x",
    "created": 1.5,
    "pidns": 7,
    "key": "k",
    "groups": ["a", "b"],
}


def test_a_file_as_the_format_says_has_no_problem(runtime: Path) -> None:
    make(runtime, f"{NONCE}.json", json.dumps(GOOD))
    (entry,) = entries()
    assert (entry.problem, entry.alive, entry.pid, entry.created) == ("", False, 1, 1.5)
    assert (entry.key, entry.groups) == ("k", ("a", "b"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "\udcff\udcfe",
        "[" * 60_000,
        "9" * 5000,
        "[]",
        "{}",
        json.dumps(GOOD)[:-9],
        json.dumps(GOOD | {"groups": "ab"}),
        json.dumps(GOOD | {"format": 1}),
        json.dumps(GOOD | {"kind": "tmpfs"}),
        json.dumps(GOOD | {"pid": "1"}),
        json.dumps(GOOD | {"fd": True}),
        json.dumps(GOOD | {"created": None}),
        json.dumps({**GOOD, "inode": 1.5}),
        json.dumps(GOOD | {"nonce": OTHER}),
        json.dumps({key: value for key, value in GOOD.items() if key != "name"}),
    ],
)
def test_a_damaged_file_is_listed_with_its_problem_and_removed_when_nobody_holds_it(
    runtime: Path, content: str
) -> None:
    path = make(runtime, f"{NONCE}.json", "")
    path.write_bytes(os.fsencode(content))
    fd = os.open(path, os.O_RDWR)
    holder = locks.reopen(fd)
    assert locks.try_lock(holder, 0, shared=True)
    (entry,) = entries()
    assert entry.problem.endswith(".")
    assert (entry.alive, entry.path) == (True, None)
    assert gc() == []
    os.close(holder)
    os.close(fd)
    assert not entries()[0].alive
    (sentence,) = gc()
    assert path.name in sentence
    assert os.listdir(runtime) == []


# Containers


def test_a_collector_in_another_process_namespace_removes_only_what_is_dead(runtime: Path) -> None:
    unshare = shutil.which("unshare")
    contained = (unshare or "unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if unshare is None or subprocess.run([*contained, "true"], capture_output=True).returncode:
        pytest.skip("no process namespace can be made here")

    def collect(*wrapper: str) -> Any:
        done = subprocess.run([*wrapper, sys.executable, "-c", GC], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    # From inside, a cache outside: its pid is not there, or is another process.
    with process(OWN + WAIT, NONCE) as owner:
        assert collect(*contained) == [[], [[True, None]]]
        assert entries()[0].path is not None
        kill(owner)
        removed, left = collect(*contained)
        assert (len(removed), left) == (1, [])
    # From outside, a cache inside: its pid there is 1, which is somebody else here.
    with process(OWN + WAIT, OTHER, wrapper=contained) as owner:
        assert entries()[0].pid == 1
        assert collect() == [[], [[True, None]]]
        kill(owner)
        # The namespace's processes die with its first one, a moment after what started it.
        assert eventually(lambda: not entries()[0].alive)
        assert len(collect()[0]) == 1
    assert os.listdir(runtime) == []
