"""Who has a cache's memory open: listed as long as they live, and believed only as far as the inode goes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import eventually, is_a_sentence
from typer.testing import CliRunner

from hotset.cli.main import app
from hotset.session import reports
from hotset.session.catalog import CatalogHandle, entries, find, register
from hotset.store.format import Geometry
from hotset.store.segment import Segment

HEAD, LINE, PLACES = 4096, 64, 256


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("COLUMNS", "200")
    return folder


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(Geometry(8, 64, 8, 0, 0), limit=1 << 20)
    yield segment
    segment.close()


def listed(segment: Segment, name: str = "thing") -> CatalogHandle:
    """List a memory whose maker has gone: process 1 << 30 is nobody."""
    return register(segment.address._replace(pid=1 << 30, fd=3), name)


@contextlib.contextmanager
def child(nonce: str, memory: int, told: Path) -> Iterator[int]:
    """A process that joins with this descriptor of the memory, until it is killed."""
    pid = os.fork()
    if pid == 0:
        told.write_text(str(CatalogHandle(nonce, "x").join(memory)))
        signal.pause()
    try:
        assert eventually(lambda: told.exists() and told.read_text() == "True")
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_holder_that_dies_while_it_is_looked_at_is_no_damage(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = listed(segment)
    address_of = reports.address_of
    with child(own.nonce, segment.fd, tmp_path / "told") as pid:

        def then_it_dies(entry: Any) -> Any:
            address = address_of(entry)
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda: not os.path.exists(f"/proc/{pid}/fd/{segment.fd}"))
            return address

        monkeypatch.setattr(reports, "address_of", then_it_dies)
        (report,) = reports.check_caches()
        assert (report.state, report.problems) == ("out of reach", ())


def test_a_cache_is_reached_through_whoever_has_it_open(segment: Segment, tmp_path: Path) -> None:
    own = listed(segment)
    assert entries()[0].at is None
    assert find(own.nonce) is None
    with child(own.nonce, segment.fd, tmp_path / "told") as pid:
        assert entries()[0].at == (pid, segment.fd)
        assert entries()[0].path == f"/proc/{pid}/fd/{segment.fd}"
        found = find(own.nonce)
        assert found is not None
        assert found.at == (pid, segment.fd)
        (report,) = reports.check_caches()
        assert report.counts is not None
        assert (report.state, report.counts.samples) == ("ok", 8)
    assert entries()[0].at is None
    (report,) = reports.check_caches()
    assert report.state == "out of reach"
    assert own.join(segment.fd)
    assert entries()[0].at == (os.getpid(), segment.fd)
    own.close()
    assert find(own.nonce) is None


def test_places_are_used_again_so_that_the_file_does_not_grow(
    segment: Segment, folder: Path, tmp_path: Path
) -> None:
    own = listed(segment)
    for number in range(5):
        with child(own.nonce, segment.fd, tmp_path / f"told {number}") as pid:
            assert entries()[0].at == (pid, segment.fd)
            assert (folder / f"{own.nonce}.json").stat().st_size == HEAD + LINE
    own.close()


def test_joining_again_takes_no_second_place(segment: Segment, folder: Path) -> None:
    own = listed(segment)
    for _ in range(3):
        assert own.join(segment.fd)
    assert (folder / f"{own.nonce}.json").stat().st_size == HEAD + LINE
    own.close()
    assert not own.join(segment.fd)


def test_without_a_free_place_a_holder_still_keeps_the_cache_alive(segment: Segment, folder: Path) -> None:
    first = listed(segment)
    others = [CatalogHandle(first.nonce, "x") for _ in range(PLACES + 1)]
    assert all(other.join(segment.fd) for other in others)
    assert (folder / f"{first.nonce}.json").stat().st_size == HEAD + LINE * PLACES
    for handle in [first, *others[:-1]]:
        handle.close()
    assert entries()[0].alive
    others[-1].close()
    assert os.listdir(folder) == []


def test_lines_that_mean_nothing_are_passed_over(segment: Segment, folder: Path) -> None:
    own = listed(segment)
    here = os.stat("/proc/self/ns/pid").st_ino
    other = os.memfd_create("other")
    lines = [
        b"half a li",
        b"\xff\xfe 1 2",
        b"9" * 63,
        f"{os.getpid()} {segment.fd} {here + 1}".encode(),  # of another container
        f"{os.getpid()} {other} {here}".encode(),  # another file by now
        f"-1 -1 {here}".encode(),
    ]
    with open(folder / f"{own.nonce}.json", "r+b") as file:
        for place, line in enumerate(lines):
            file.seek(HEAD + place * LINE)
            file.write(line.ljust(LINE - 1) + b"\n")
    assert (entries()[0].at, entries()[0].problem) == (None, "")
    with open(folder / f"{own.nonce}.json", "r+b") as file:
        file.seek(HEAD + len(lines) * LINE)
        file.write(f"{os.getpid()} {segment.fd} {here}".encode())
    assert entries()[0].at == (os.getpid(), segment.fd)
    os.close(other)
    own.close()


def test_a_forked_child_is_listed_as_itself(segment: Segment) -> None:
    own = listed(segment)
    assert own.join(segment.fd)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"1" if own.join(segment.fd) else b"0")
        signal.pause()
    try:
        assert os.read(told, 1) == b"1"
        own.close()
        assert entries()[0].at == (os.getpid(), segment.fd), "the descriptor is still open here"
        memory = segment.fd
        segment.close()
        assert entries()[0].at == (pid, memory)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)


# What the command line shows of a label


@pytest.mark.parametrize(
    "name", ["[red]x[/red]", "a\x1b[2Jb", "line\nbreak", ":smile:", "\udc80", "[/nonsense]"]
)
def test_a_label_cannot_play_with_the_terminal(name: str, segment: Segment) -> None:
    own = listed(segment, name)
    assert own.join(segment.fd)
    done = CliRunner().invoke(app, ["check"])
    assert done.exit_code == 0, done.output
    shown = name.encode("unicode_escape").decode() if not name.isprintable() else name
    assert shown in done.output
    assert "\x1b" not in done.output
    segment.index[0] = (1 << 62) | (1 << 39)  # a damaged word: the problem names the cache too
    done = CliRunner().invoke(app, ["check"])
    assert done.exit_code == 1
    assert f"{shown}: " in done.output
    assert "\x1b" not in done.output
    own.close()


def test_the_sentence_of_the_collector_shows_a_label_in_quotes(segment: Segment) -> None:
    pid = os.fork()
    if pid == 0:
        own = listed(segment, "a\x1b[2Jb\n")
        assert own.joined
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    done = CliRunner().invoke(app, ["gc"])
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert is_a_sentence(done.output)
    assert done.output.count("\n") == 1
