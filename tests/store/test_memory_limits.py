"""Headroom: which limits count, what counts as used, and that obeying it keeps a process alive."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import eventually

from hotset.store import memory_limits as memory
from hotset.store.memory_limits import Headroom, Limits, headroom, tmpfs_free

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED = "9223372036854771712\n"

MEMINFO = (
    f"MemTotal:  {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {40 * GIB // 1024} kB\nCached: 7 kB\n"
)
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER_MOUNTS = (
    "23 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "broken line\n"
)

Machine = Callable[..., Limits]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a function that writes files below a fake root and returns the limits seen there."""

    def write(*, cgroup: str, mounts: str, meminfo: str = MEMINFO) -> Limits:
        files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": OTHER_MOUNTS + mounts}
        for path, text in {**files, "proc/meminfo": meminfo}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return Limits(str(tmp_path))

    return write


def v1(folder: Path, limit: int | str, used: int = 0, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    # The lines without "total_" are the group's own, without its children's, and must not be read.
    (folder / "memory.stat").write_text(
        f"cache 1\ninactive_file 7\nactive_file 7\ntotal_cache 9\n"
        f"total_inactive_file {cache // 4}\ntotal_active_file {cache - cache // 4}\ntotal_shmem 5\n"
    )


def v2(folder: Path, limit: int | str, used: int = 0, cache: int = 0, high: int | str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\nfile 9\nshmem 3\ninactive_anon 5\ninactive_file {cache // 4}\n"
        f"active_file {cache - cache // 4}\nworkingset_activate_file 77\n"
    )


MACHINE = Headroom(39 * GIB, 64 * GIB, "the machine's memory")


def test_without_control_groups_the_machine_is_the_bound(machine: Machine) -> None:
    assert machine(cgroup="", mounts="").headroom() == MACHINE


def test_version_2_limit_less_what_is_used_and_not_reclaimable(machine: Machine, tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", 10 * GIB, used=4 * GIB, cache=GIB)
    free = machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/")).headroom()
    assert free == Headroom(7 * GIB - 10 * GIB * 3 // 100, 10 * GIB, "control group /job (memory.max)")


def test_version_1_limit_less_what_is_used_and_not_reclaimable(machine: Machine, tmp_path: Path) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory/job", 10 * GIB, used=4 * GIB, cache=GIB)
    limits = machine(cgroup="7:cpu:/elsewhere\n4:memory:/job\n", mounts=V1_MOUNT.format(root="/"))
    assert limits.headroom() == Headroom(
        7 * GIB - 10 * GIB * 3 // 100, 10 * GIB, "control group /job (memory.limit_in_bytes)"
    )


def test_mapped_files_are_not_reclaimable_and_shared_memory_is_not_mapped_files(
    machine: Machine, tmp_path: Path
) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", 10 * GIB, used=4 * GIB, cache=2 * GIB)
    with (tmp_path / "sys/fs/cgroup/job/memory.stat").open("a") as stat:
        stat.write(f"file_mapped {GIB + 3}\n")
    free = machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/")).headroom()
    assert free.bytes == 7 * GIB - 10 * GIB * 3 // 100


def test_hybrid_layout_takes_the_hierarchy_that_has_the_memory_controller(
    machine: Machine, tmp_path: Path
) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory/job", 3 * GIB)
    unified = tmp_path / "sys/fs/cgroup/unified/job"
    unified.mkdir(parents=True)
    (unified / "cgroup.procs").write_text("1\n")
    v2_mount = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    limits = machine(cgroup="4:memory:/job\n0::/job\n", mounts=v2_mount + V1_MOUNT.format(root="/"))
    assert limits.headroom().what == "control group /job (memory.limit_in_bytes)"


def test_controllers_that_are_mounted_together_are_told_apart(machine: Machine, tmp_path: Path) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory/job", 3 * GIB)
    mount = V1_MOUNT.format(root="/").replace("rw,memory", "rw,cpu,memory")
    assert machine(cgroup="4:cpu,memory:/job\n", mounts=mount).headroom().limit == 3 * GIB


@pytest.mark.parametrize("tight", ["", "/pod", "/pod/job", "/pod/job/step"])
@pytest.mark.parametrize("version", [1, 2])
def test_every_ancestor_up_to_the_mount_counts(
    machine: Machine, tmp_path: Path, tight: str, version: int
) -> None:
    top = tmp_path / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
    for path in ("", "/pod", "/pod/job", "/pod/job/step"):
        limit = 5 * GIB if path == tight else UNLIMITED if version == 1 else "max"
        (v1 if version == 1 else v2)(Path(f"{top}{path}"), limit, used=GIB)
    limits = (
        machine(cgroup="4:memory:/pod/job/step\n", mounts=V1_MOUNT.format(root="/"))
        if version == 1
        else machine(cgroup="0::/pod/job/step\n", mounts=V2_MOUNT.format(root="/"))
    )
    free = limits.headroom()
    assert free.limit == 5 * GIB
    assert free.what.startswith(f"control group {tight or '/'} (")


def test_the_tightest_is_what_has_least_left_not_the_lowest_limit(machine: Machine, tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/pod", 20 * GIB, used=19 * GIB)
    v2(tmp_path / "sys/fs/cgroup/pod/job", 10 * GIB, used=GIB)
    free = machine(cgroup="0::/pod/job\n", mounts=V2_MOUNT.format(root="/")).headroom()
    assert free.what == "control group /pod (memory.max)"


def test_unlimited_groups_leave_the_machine_as_the_bound(machine: Machine, tmp_path: Path) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory/job", UNLIMITED, used=63 * GIB)
    v2(tmp_path / "sys/fs/cgroup/job", "max", used=63 * GIB)
    mounts = V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/")
    assert machine(cgroup="4:memory:/job\n0::/job\n", mounts=mounts).headroom() == MACHINE


def test_memory_high_bounds_like_memory_max(machine: Machine, tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", 10 * GIB, high=2 * GIB, used=GIB)
    free = machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/")).headroom()
    assert (free.limit, free.what) == (2 * GIB, "control group /job (memory.high)")


def test_a_container_whose_mount_begins_at_its_own_group(machine: Machine, tmp_path: Path) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory", 3 * GIB)
    v1(tmp_path / "sys/fs/cgroup/memory/inner", UNLIMITED)
    limits = machine(cgroup="4:memory:/docker/c1/inner\n", mounts=V1_MOUNT.format(root="/docker/c1"))
    assert limits.headroom().what == "control group /docker/c1 (memory.limit_in_bytes)"


def test_a_mount_that_begins_at_another_group_is_no_bound(machine: Machine, tmp_path: Path) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory", 3 * GIB)
    limits = machine(cgroup="4:memory:/docker/c2\n", mounts=V1_MOUNT.format(root="/docker/c1"))
    assert limits.headroom() == MACHINE


def test_of_two_mounts_the_one_that_shows_more_ancestors(machine: Machine, tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/pod", 3 * GIB)
    v2(tmp_path / "sys/fs/cgroup/pod/job", "max")
    v2(tmp_path / "mnt/job", "max")
    narrow = V2_MOUNT.format(root="/pod/job").replace("/sys/fs/cgroup", "/mnt/job")
    for mounts in (narrow + V2_MOUNT.format(root="/"), V2_MOUNT.format(root="/") + narrow):
        assert machine(cgroup="0::/pod/job\n", mounts=mounts).headroom().limit == 3 * GIB


def test_a_process_outside_of_its_namespace_and_mount_is_not_bounded_by_the_mount(
    machine: Machine, tmp_path: Path
) -> None:
    v2(tmp_path / "sys/fs/cgroup", 3 * GIB)
    limits = machine(cgroup="0::/../sibling\n", mounts=V2_MOUNT.format(root="/"))
    assert limits.headroom() == MACHINE


def test_a_process_outside_of_its_namespace_but_inside_the_mount(machine: Machine, tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/sibling", 3 * GIB)
    limits = machine(cgroup="0::/../sibling\n", mounts=V2_MOUNT.format(root="/.."))
    assert limits.headroom().limit == 3 * GIB


def test_a_namespace_newer_than_the_mount_is_found_by_process_id(machine: Machine, tmp_path: Path) -> None:
    for number, pid in ((1, 1), (2, os.getpid()), (3, 3)):
        v2(tmp_path / f"sys/fs/cgroup/pod/c{number}/step", number * GIB)
        (tmp_path / f"sys/fs/cgroup/pod/c{number}/step/cgroup.procs").write_text(f"9\n{pid}\n")
    v2(tmp_path / "sys/fs/cgroup", "max")
    limits = machine(cgroup="0::/step\n", mounts=V2_MOUNT.format(root="/../.."))
    assert limits.headroom().limit == 2 * GIB


def test_mount_points_and_group_names_with_spaces_colons_and_stars(machine: Machine, tmp_path: Path) -> None:
    v1(tmp_path / "my cgroups/memory/a:b *[c]", 3 * GIB)
    mount = V1_MOUNT.format(root="/").replace("/sys/fs/cgroup", r"/my\040cgroups")
    assert machine(cgroup="4:memory:/a:b *[c]\n", mounts=mount).headroom().limit == 3 * GIB


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_a_group_without_its_files_is_skipped(machine: Machine, tmp_path: Path, missing: str) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", 3 * GIB)
    (tmp_path / "sys/fs/cgroup/job" / missing).unlink()
    assert machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/")).headroom() == MACHINE


def test_without_memory_stat_nothing_counts_as_reclaimable(machine: Machine, tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", 3 * GIB, used=GIB, cache=GIB)
    (tmp_path / "sys/fs/cgroup/job/memory.stat").unlink()
    free = machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/")).headroom()
    assert free.bytes == 2 * GIB - 3 * GIB * 3 // 100


@pytest.mark.parametrize("odd", ["", "plenty", "-1", "1 2", "0x10", "\x00\xff"])
def test_an_odd_limit_is_skipped(machine: Machine, tmp_path: Path, odd: str) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", odd)
    assert machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/")).headroom() == MACHINE


@pytest.mark.parametrize(
    "odd", ["", "\n\n", "no colons\n", "::::\n0::\n", "4:memory\n", "\udcff:memory:/\udcff"]
)
def test_odd_lists_of_groups_and_mounts_are_skipped(machine: Machine, tmp_path: Path, odd: str) -> None:
    limits = machine(cgroup="", mounts="")
    (tmp_path / "proc/self/cgroup").write_bytes(os.fsencode(odd))
    (tmp_path / "proc/self/mountinfo").write_bytes(os.fsencode(odd) + b" - - cgroup2\n- cgroup2 x y\n")
    assert limits.headroom() == MACHINE


def test_without_proc_there_is_still_an_answer(tmp_path: Path) -> None:
    free = Limits(str(tmp_path)).headroom()
    assert free.limit == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= free.bytes < free.limit
    assert free.what == "the machine's memory"


@pytest.mark.parametrize(
    ("limit", "margin"),
    [(100 * MIB, 64 * MIB), (4 * GIB, 4 * GIB * 3 // 100), (50 * GIB, GIB)],
)
def test_the_margin(machine: Machine, tmp_path: Path, limit: int, margin: int) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", limit)
    meminfo = MEMINFO.replace(str(40 * GIB // 1024), str(60 * GIB // 1024))
    limits = machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/"), meminfo=meminfo)
    assert limits.headroom().bytes == limit - margin


def test_a_group_over_its_limit_has_nothing_left_and_never_less(machine: Machine, tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/job", 0, used=GIB)
    free = machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/")).headroom()
    assert free == Headroom(0, 0, "control group /job (memory.max)")


def test_limits_usage_and_membership_are_followed(machine: Machine, tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    v2(group, "max")
    limits = machine(cgroup="0::/job\n", mounts=V2_MOUNT.format(root="/"))
    assert limits.headroom() == MACHINE
    v2(group, 10 * GIB, used=GIB)
    before = limits.headroom()
    assert before.limit == 10 * GIB
    v2(group, 10 * GIB, used=2 * GIB)
    assert limits.headroom().bytes == before.bytes - GIB
    v2(tmp_path / "sys/fs/cgroup/other", 3 * GIB)
    (tmp_path / "proc/self/cgroup").write_text("0::/other\n")
    assert limits.headroom().limit == 3 * GIB
    shutil.rmtree(tmp_path / "sys/fs/cgroup/other")
    assert limits.headroom() == MACHINE


def test_here_it_is_between_nothing_and_the_limit() -> None:
    free = headroom()
    assert 0 <= free.bytes < free.limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_tmpfs_free_is_what_the_file_system_has_left(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert abs(tmpfs_free(str(tmp_path)) - status.f_bavail * status.f_frsize) < GIB
    with pytest.raises(FileNotFoundError):
        tmpfs_free(str(tmp_path / "nowhere"))


def test_a_tmpfs_without_a_size_is_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    unsized = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: unsized)
    monkeypatch.setattr(memory, "headroom", lambda: Headroom(123, 456, "the machine's memory"))
    assert tmpfs_free("/dev/shm") == 123


# In a real control group


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """Make a control group with that limit below this process's own, or skip the test."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {controllers: path for _, controllers, path in lines}
    if "memory" in own:
        group, file = Path(f"/sys/fs/cgroup/memory{own['memory']}"), "memory.limit_in_bytes"
    else:
        group, file = Path(f"/sys/fs/cgroup{own.get('', '/')}"), "memory.max"
    group /= f"hotset-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / file).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no limit can be set on a control group here: {error}")
        yield group
    finally:
        remove(group)


def remove(group: Path) -> None:
    """Its processes were waited for, but the kernel counts them out a little later."""

    def removed() -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    assert eventually(removed)


def run_in(group: Path, code: str, *wrapper: str) -> str:
    """Run Python code by a process inside the group; returns what it prints."""
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    command = ["sh", "-c", enter, str(group), *wrapper, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


REPORT = (
    "from hotset.store.memory_limits import headroom; h = headroom(); "
    "print(h.bytes, h.limit, h.what, sep='|')"
)


def test_a_real_group_is_found_and_its_limit_counts() -> None:
    with control_group(256 * MIB) as group:
        left, limit, what = run_in(group, REPORT).split("|")
        assert int(limit) == 256 * MIB
        assert f"{group.name} (memory." in what
        assert 100 * MIB < int(left) <= 224 * MIB


def test_a_real_group_is_found_from_a_nested_one_and_from_a_newer_namespace() -> None:
    unshare = shutil.which("unshare")
    with control_group(256 * MIB) as group:
        inner = group / "inner"
        inner.mkdir()
        try:
            assert run_in(inner, REPORT).split("|")[1] == str(256 * MIB)
            if unshare is None or subprocess.run([unshare, "-C", "true"], capture_output=True).returncode:
                pytest.skip("no cgroup namespace can be made here")
            assert run_in(inner, REPORT, unshare, "-C").split("|")[1] == str(256 * MIB)
        finally:
            remove(inner)


def test_who_takes_no_more_than_the_headroom_is_not_killed(tmp_path: Path) -> None:
    # Fills shared memory inside the group, and page cache beside it, which must not count.
    fill = f"""
import os, tempfile
from hotset.store.memory_limits import headroom
with tempfile.TemporaryFile(dir={str(tmp_path)!r}) as file:
    file.write(bytes({24 * MIB}))
    file.flush()
    os.fsync(file.fileno())
    fd, taken = os.memfd_create("fill"), 0
    while headroom().bytes >= {2 * MIB}:
        os.posix_fallocate(fd, taken, {2 * MIB})
        taken += {2 * MIB}
print(taken)
"""
    with control_group(160 * MIB) as group:
        taken = int(run_in(group, fill))
    assert 64 * MIB < taken <= 128 * MIB
