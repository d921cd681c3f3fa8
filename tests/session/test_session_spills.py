"""Spill folders: private, known, on a disk of this machine, and nothing in them is trusted by its name."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
from helpers import is_a_sentence
from samples import mapping
from session_places import MIB, N, read_all, reboot
from sources import Samples
from stores import store_of

import hotset
from hotset import HotsetWarning
from hotset.errors import FolderError, SessionError
from hotset.session import sessions
from hotset.session import spill_dirs as spills

pytestmark = pytest.mark.usefixtures("runtime")


def test_a_spill_folder_is_private_and_known(disk: str) -> None:
    session = sessions.create("a", memory=1, spill=disk)
    assert session.spill == disk
    assert spills.spill_path(disk).stat().st_mode & 0o777 == 0o700
    sessions.create("b", memory=1, spill=disk)
    assert spills.known_folders() == [disk]
    shutil.rmtree(disk)
    assert spills.known_folders() == []


@pytest.mark.parametrize("trap", ["symlink", "file", "open", "foreign"])
def test_a_spill_folder_that_is_not_ours_alone_is_refused(trap: str, disk: str, tmp_path: Path) -> None:
    own = spills.spill_path(disk)
    own.parent.mkdir()
    if trap == "symlink":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif trap == "file":
        own.touch(mode=0o600)
    else:
        own.mkdir()
        own.chmod(0o755 if trap == "open" else 0o700)
    if trap == "foreign":
        try:
            os.chown(own, 12345, 12345)
        except PermissionError:
            pytest.skip("only root gives folders away")
    with pytest.raises(FolderError) as refused:
        sessions.create("a", memory=1, spill=disk)
    assert str(own) in str(refused.value)
    assert is_a_sentence(str(refused.value))
    assert sessions.sessions() == []


def test_a_folder_in_which_none_can_be_made_is_not_said_to_be_missing() -> None:
    with pytest.raises(SessionError, match="no folder can be made in it") as refused:
        sessions.create("a", memory=MIB, spill="/proc")
    assert is_a_sentence(str(refused.value))
    with pytest.raises(SessionError, match="there is no folder /no/such"):
        sessions.create("a", memory=MIB, spill="/no/such/folder")


@pytest.mark.parametrize(
    ("trap", "said"),
    [
        ("symlink", "cannot be used"),
        ("hard link", "cannot be used"),
        ("open", "cannot be used"),
        ("out of date", "an audit had found"),
    ],
)
def test_a_spill_file_that_is_not_ours_alone_or_out_of_date_is_not_served_after_a_reboot(
    trap: str, said: str, disk: str, runtime: Path, tmp_path: Path
) -> None:
    sessions.create("a", memory=MIB, spill=disk, persist=True)
    with hotset.cache(Samples(mapping, N), session="a") as cached:
        read_all(cached, mapping)
        if trap == "out of date":
            assert store_of(cached).invalidate()
    (file,) = spills.spill_path(disk).glob("*.spill")
    if trap == "symlink":
        file.rename(tmp_path / "moved")
        file.symlink_to(tmp_path / "moved")
    elif trap == "hard link":
        os.link(file, tmp_path / "second name")
    elif trap == "open":
        os.chown(file, 12345, 12345)
    reboot(runtime)
    with pytest.warns(HotsetWarning, match=said) as told:
        cached = hotset.cache(Samples(mapping, N), session="a")
    with cached:
        assert is_a_sentence(str(told[-1].message))
        assert cached.stats().cached == 0
        read_all(cached, mapping)


MOUNTS = """\
1 0 0:1 / / rw - ext4 /dev/a rw
2 1 0:2 / /mnt/far rw,nosuid shared:1 - {kind} server:/x rw
3 2 0:3 / /mnt/far/near rw - xfs /dev/b rw
4 1 0:4 / /mnt/with\\040space rw - {kind} server:/y rw
"""


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "9p", "lustre", "fuse.sshfs"])
def test_a_network_file_system_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MOUNTS.format(kind=kind).encode()
    monkeypatch.setattr(spills, "open", lambda *_, **__: io.BytesIO(text), raising=False)
    for far in ("/mnt/far", "/mnt/far/deeper", "/mnt/with space/x"):
        with pytest.raises(SessionError, match=f"network \\({kind}\\)") as refused:
            sessions.create("a", memory=1, spill=far)
        assert is_a_sentence(str(refused.value))
        assert not os.path.exists(far)
    for place, found in (("/mnt/far/near/x", "xfs"), ("/mnt/farther", "ext4"), ("/mnt/nowhere/../far", kind)):
        assert spills._file_system(place) == found


def test_a_network_file_system_is_known_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = MOUNTS.format(kind="nfs4").replace("/mnt/far ", "/mnt/dätä ").encode()
    monkeypatch.setattr(spills, "open", lambda *_, **__: io.BytesIO(text), raising=False)
    assert spills._file_system("/mnt/dätä/x") == "nfs4"


def test_a_cache_of_ones_own_is_not_spilled_to_a_network_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spills, "_file_system", lambda folder: "nfs")
    with pytest.warns(HotsetWarning, match=r"network \(nfs\)"):
        cached = hotset.cache(Samples(mapping, N), memory=0, spill="/mnt/nowhere")
    cached.close()
