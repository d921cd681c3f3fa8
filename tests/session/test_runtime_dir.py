"""The runtime folder: where it is, and that each trap in it is refused."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from helpers import descriptors, often

from hotset.errors import ArgumentError, FolderError
from hotset.session import runtime_dir as module
from hotset.session.runtime_dir import open_at, open_folder, runtime, runtime_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a runtime folder that does not exist yet."""
    place = tmp_path / "runtime"
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(place))
    return place


@pytest.fixture
def folder(place: Path) -> Path:
    return runtime_folder()


def open_file(name: str, *, create: bool = False) -> int:
    """Open a file of the runtime folder."""
    with runtime() as opened:
        return open_at(opened, name, create=create)


def refused(call: object, why: str) -> None:
    """Assert that the call is refused for that reason, names the knob, and leaves no descriptor open."""
    assert callable(call)
    before = descriptors()
    with pytest.raises(FolderError, match=why) as error:
        call()
    assert "HOTSET_RUNTIME_DIR" in str(error.value)
    assert descriptors() == before


# Where it is


def test_it_is_made_private_and_found_again(place: Path) -> None:
    old = os.umask(0)
    try:
        assert runtime_folder() == place
        os.close(open_file("one", create=True))
    finally:
        os.umask(old)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "one").stat().st_mode) == 0o600
    assert runtime_folder() == place


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", "here/")
    assert runtime_folder() == tmp_path / "here"


def test_without_the_variable_it_is_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/var/tmp")
    user = os.geteuid()
    assert list(map(str, module._places())) == [
        f"/dev/shm/hotset-{user}",
        "/run/user/7/hotset",
        f"/var/tmp/hotset-{user}",
    ]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert len(list(module._places())) == 2


def test_the_next_place_is_taken_when_one_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_places", lambda: iter([tmp_path / "no" / "such", tmp_path / "second"]))
    assert runtime_folder() == tmp_path / "second"


def test_a_trap_is_not_passed_over_for_the_next_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").symlink_to(tmp_path)
    monkeypatch.setattr(module, "_places", lambda: iter([tmp_path / "first", tmp_path / "second"]))
    refused(runtime_folder, "first is a symlink")
    assert not (tmp_path / "second").exists()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "no" / "such"))
    refused(runtime_folder, "cannot be created")


# Traps in place of the folder


def test_a_symlink_in_place_of_the_folder_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "target")
    refused(runtime_folder, "is a symlink")
    refused(open_folder, "is a symlink")
    refused(lambda: open_file("one", create=True), "is a symlink")
    assert not any((tmp_path / "target").iterdir())


def test_a_symlink_is_refused_also_with_a_slash_behind_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "target")
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", f"{place}/")
    refused(runtime_folder, "is a symlink")


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o740, 0o777])
def test_a_folder_open_to_others_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    refused(runtime_folder, f"is open to other users .mode {mode:04o}")
    folder.chmod(0o700)
    assert runtime_folder() == folder


@as_root
def test_another_users_folder_is_refused(folder: Path) -> None:
    os.chown(folder, 12345, -1)
    refused(runtime_folder, "belongs to another user .uid 12345")


def test_a_file_in_place_of_the_folder_is_refused(place: Path) -> None:
    place.touch(mode=0o600)
    refused(runtime_folder, "cannot be opened")


# Traps in place of a file


def test_a_file_is_made_once_and_opened_for_reading_and_writing(folder: Path) -> None:
    fd = open_file("one", create=True)
    os.write(fd, b"written")
    again = open_file("one")
    assert os.pread(again, 99, 0) == b"written"
    assert not os.get_inheritable(again)
    os.close(fd)
    os.close(again)
    with pytest.raises(FileExistsError):
        open_file("one", create=True)
    with pytest.raises(FileNotFoundError):
        open_file("two")


@pytest.mark.parametrize("create", [False, True])
def test_a_symlink_in_place_of_a_file_is_not_followed(folder: Path, tmp_path: Path, create: bool) -> None:
    (tmp_path / "target").touch(mode=0o600)
    (folder / "one").symlink_to(tmp_path / "target")
    (folder / "two").symlink_to(tmp_path / "nowhere")
    if create:
        for name in ("one", "two"):
            with pytest.raises(FileExistsError):
                open_file(name, create=True)
        assert not (tmp_path / "nowhere").exists()
    else:
        refused(lambda: open_file("one"), "one is a symlink")
        refused(lambda: open_file("two"), "two is a symlink")


def test_a_hard_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "target").touch(mode=0o600)
    (folder / "one").hardlink_to(tmp_path / "target")
    refused(lambda: open_file("one"), "has 2 names")
    (tmp_path / "target").unlink()
    os.close(open_file("one"))


@as_root
def test_another_users_file_is_refused(folder: Path) -> None:
    os.close(open_file("one", create=True))
    os.chown(folder / "one", 12345, -1)
    refused(lambda: open_file("one"), "belongs to another user .uid 12345")


@pytest.mark.parametrize("mode", [0o660, 0o604, 0o611])
def test_a_file_open_to_others_is_refused(folder: Path, mode: int) -> None:
    os.close(open_file("one", create=True))
    (folder / "one").chmod(mode)
    refused(lambda: open_file("one"), f"is open to other users .mode {mode:04o}")


def test_a_fifo_a_socket_and_a_folder_are_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "fifo", 0o600)
    (folder / "folder").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as unix:
        # The folder's own path may be longer than an address of a socket may be.
        fd = open_folder()
        unix.bind(f"/proc/self/fd/{fd}/socket")
        os.close(fd)
        refused(lambda: open_file("fifo"), "is not a regular file")
        refused(lambda: open_file("socket"), "is a socket")
        refused(lambda: open_file("folder"), "is a folder")


def test_a_folder_that_was_swapped_after_it_was_opened_is_not_the_one_used(
    folder: Path, tmp_path: Path
) -> None:
    fd = open_folder()
    folder.rename(tmp_path / "moved")
    folder.mkdir(mode=0o700)
    os.close(open_at(fd, "one", create=True))
    os.close(fd)
    assert (tmp_path / "moved" / "one").exists()
    assert not any(folder.iterdir())


def test_swapping_a_file_for_a_symlink_never_gets_the_links_target_opened(
    folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.touch(mode=0o600)
    os.close(open_file("real", create=True))
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            (folder / "link").symlink_to(target)
            os.rename(folder / "link", folder / "one")
            (folder / "copy").touch(mode=0o600)
            os.rename(folder / "copy", folder / "one")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        forbidden = target.stat().st_ino
        opened = refusals = 0
        while min(opened, refusals) < often(60, 400):
            try:
                fd = open_file("one")
            except FileNotFoundError:
                continue
            except FolderError:
                refusals += 1
                continue
            opened += 1
            assert os.fstat(fd).st_ino != forbidden
            os.close(fd)
    finally:
        over.set()
        swapper.join()


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../a", "/etc/passwd", "a b", "a\n", "a\0", "ä", "a" * 101]
)
def test_a_name_that_could_lead_elsewhere_is_refused(folder: Path, name: str) -> None:
    for create in (False, True):
        with pytest.raises(ArgumentError, match="is not a name"):
            open_file(name, create=create)
    assert not any(folder.iterdir())


def test_the_longest_name_is_accepted(folder: Path) -> None:
    os.close(open_file("a" * 94 + ".B-_9z", create=True))
    assert len(os.listdir(folder)) == 1
