"""Who has a cache's memory open: listed as long as they live, and believed only as far as the inode goes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from helpers import eventually, is_a_sentence
from kills import die, lingering
from typer.testing import CliRunner

from hotset.cli.main import app
from hotset.session import reports
from hotset.session.catalog import CatalogHandle, entries, find, register
from hotset.store.format import Geometry
from hotset.store.segment import Segment

HEAD, LINE, PLACES = 4096, 64, 256


@pytest.fixture(autouse=True)
def _wide(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(Geometry(8, 64, 8, 0, 0), limit=1 << 20)
    yield segment
    segment.close()


def listed(segment: Segment, name: str = "thing") -> CatalogHandle:
    """List a memory whose maker has gone: process 1 << 30 is nobody."""
    return register(segment.address._replace(pid=1 << 30, fd=3), name)


def joined(handle: CatalogHandle, memory: int) -> AbstractContextManager[int]:
    """A process that has joined with this descriptor of the memory, until it is killed."""
    return lingering(lambda: handle if handle.join(memory) else die())


def test_a_holder_that_dies_while_it_is_looked_at_is_no_damage(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = listed(segment)
    address_of = reports.address_of
    with joined(CatalogHandle(own.nonce, "x"), segment.fd) as pid:

        def then_it_dies(entry: Any) -> Any:
            address = address_of(entry)
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda: not os.path.exists(f"/proc/{pid}/fd/{segment.fd}"))
            return address

        monkeypatch.setattr(reports, "address_of", then_it_dies)
        (report,) = reports.check_caches()
        assert (report.state, report.problems) == ("out of reach", ())


def test_a_cache_is_reached_through_whoever_has_it_open(segment: Segment) -> None:
    own = listed(segment)
    assert entries()[0].at is None
    assert find(own.nonce) is None
    with joined(CatalogHandle(own.nonce, "x"), segment.fd) as pid:
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


def test_places_are_used_again_so_that_the_file_does_not_grow(segment: Segment, runtime: Path) -> None:
    own = listed(segment)
    for _ in range(5):
        with joined(CatalogHandle(own.nonce, "x"), segment.fd) as pid:
            assert entries()[0].at == (pid, segment.fd)
            assert (runtime / f"{own.nonce}.json").stat().st_size == HEAD + LINE
    own.close()


def test_joining_again_takes_no_second_place(segment: Segment, runtime: Path) -> None:
    own = listed(segment)
    for _ in range(3):
        assert own.join(segment.fd)
    assert (runtime / f"{own.nonce}.json").stat().st_size == HEAD + LINE
    own.close()
    assert not own.join(segment.fd)


def test_without_a_free_place_a_holder_still_keeps_the_cache_alive(segment: Segment, runtime: Path) -> None:
    first = listed(segment)
    others = [CatalogHandle(first.nonce, "x") for _ in range(PLACES + 1)]
    assert all(other.join(segment.fd) for other in others)
    assert (runtime / f"{first.nonce}.json").stat().st_size == HEAD + LINE * PLACES
    for handle in [first, *others[:-1]]:
        handle.close()
    assert entries()[0].alive
    others[-1].close()
    assert os.listdir(runtime) == []


def test_lines_that_mean_nothing_are_passed_over(segment: Segment, runtime: Path) -> None:
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
    with open(runtime / f"{own.nonce}.json", "r+b") as file:
        for place, line in enumerate(lines):
            file.seek(HEAD + place * LINE)
            file.write(line.ljust(LINE - 1) + b"\n")
    assert (entries()[0].at, entries()[0].problem) == (None, "")
    with open(runtime / f"{own.nonce}.json", "r+b") as file:
        file.seek(HEAD + len(lines) * LINE)
        file.write(f"{os.getpid()} {segment.fd} {here}".encode())
    assert entries()[0].at == (os.getpid(), segment.fd)
    os.close(other)
    own.close()


def test_a_forked_child_is_listed_as_itself(segment: Segment) -> None:
    own = listed(segment)
    assert own.join(segment.fd)
    with joined(own, segment.fd) as pid:
        own.close()
        assert entries()[0].at == (os.getpid(), segment.fd), "the descriptor is still open here"
        memory = segment.fd
        segment.close()
        assert entries()[0].at == (pid, memory)


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
    with lingering(lambda: listed(segment, "a\x1b[2Jb\n")):
        assert entries()[0].alive
    done = CliRunner().invoke(app, ["gc"])
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert is_a_sentence(done.output)
    assert done.output.count("\n") == 1
