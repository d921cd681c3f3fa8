"""``hotset top``: a frame for any answer and any width, and the program in a real terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import GIB, FakeServer, cache, history, moving, session
from helpers import is_a_sentence
from rich.cells import cell_len
from rich.console import Console
from torch.utils.data import TensorDataset

import hotset
from hotset.cli.top import frame, top
from hotset.errors import HotsetError
from hotset.server.pidfile import Place, claim
from hotset.session.reports import report_jobs


def status(sessions: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    return {
        "version": "1.2.3",
        "pid": 77,
        "host": "127.0.0.1",
        "port": 50052,
        "started": time.time() - 93_700,
        "log": None,
        "memory": {"limit": 200 * GIB, "used": 50 * GIB},
        "spill": {"folder": "/nvme", "used": 3 * GIB, "free": 700 * GIB},
        "sessions": sessions,
    } | changed


def drawn(answer: dict[str, Any], told: dict[str, Any], width: int = 160, **options: Any) -> list[str]:
    """A frame's lines, as a terminal without colours has them."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(frame(answer, told, width=width, **options))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_frame_has_the_server_its_budgets_and_a_row_for_everything() -> None:
    sessions = moving(100)
    told = history(100, sessions)
    lines = drawn(status(sessions), told)
    text = "\n".join(lines)
    assert lines[0] == "hotset 1.2.3  127.0.0.1:50052  process 77  up 1 d 2 h"
    assert re.search(r"^memory ━{15} +50 GiB of 200 GiB$", text, re.MULTILINE), "a quarter of the bar of 60"
    assert re.search(r"^disk .* 3 GiB, 700 GiB free$", text, re.MULTILINE)
    speed = told["sessions"]["88120"]["samples_per_second"][-1]
    waited = told["sessions"]["88120"]["waited"][-1]
    sweep = next(line for line in lines if line.startswith("sweep"))
    cells = ["sweep", "50,212", "50,484", "99.1%", f"{speed:,.0f}", f"{waited:.3f}"]
    cells += ["17.9 GiB of 24 GiB", "0 B", "4", "in use"]
    assert re.split(r" {2,}", sweep) == cells
    below = lines[lines.index(sweep) + 1 :]
    assert re.split(r" {2,}", below[0].strip())[:3] == ["CIFAR10", "50,000", "50,000"]
    assert below[1].split()[-1] == "stale"
    assert re.split(r" {2,}", below[2])[3:6] == ["-", "-", "-"], (
        "eval has done nothing: not zero, but unknown"
    )


@pytest.mark.parametrize("width", [*range(40, 121, 8), 160])
def test_columns_that_do_not_fit_are_left_out_whole(width: int) -> None:
    sessions = moving(100)
    lines = drawn(status(sessions), history(100, sessions), width)
    assert max(cell_len(line) for line in lines) <= width
    table = lines[lines.index("") + 1 :]
    assert "…" not in "".join(table)
    titles = re.split(r" {2,}", table[0])
    assert titles[:2] == ["session, cache", "cached"]
    assert "hit rate" in titles
    assert ("disk" in titles) <= ("processes" in titles) <= ("samples/s" in titles)
    assert ("disk" in titles) == (width >= 115)


def test_a_low_terminal_gets_fewer_rows_and_says_so() -> None:
    sessions = moving(100)
    for height in range(12, 17):
        lines = drawn(status(sessions), history(100, sessions), height=height, trouble="Gone.")
        assert len(lines) <= height
        shown = sum(line.startswith(("  ", "imagenet", "sweep", "eval")) for line in lines)
        hidden = re.findall(r"and (\d) more rows", lines[-1])
        assert shown + int(hidden[0] if hidden else 0) == 7


def test_names_can_neither_mark_up_nor_move_the_cursor() -> None:
    caches = [cache(1, "[red]C[/red]\x1b]0;x\x07", 1, 1, state="No\x1b[31m, it is torn.")]
    made = session(1, "[bold]a\x1b[2Jb\nc", GIB, caches)
    text = "\n".join(drawn(status([made]), {"sessions": {}}))
    assert "[bold]a\\x1b[2Jb\\nc" in text
    assert "[red]C[/red]\\x1b]0;x\\x07" in text
    assert "No\\x1b[31m, it is torn." in text
    assert "\x1b" not in text


def test_without_sessions_spill_or_history_there_is_a_frame_too() -> None:
    lines = drawn(status([], spill=None), {"sessions": {}})
    assert "hotset session create" in lines[-1]
    assert not any(line.startswith("disk") for line in lines)
    unknown = {"folder": "/nvme", "used": GIB, "free": None}
    assert any(line.endswith(" 1 GiB") for line in drawn(status([], spill=unknown), {"sessions": {}}))


# The program


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server that is found by its port and answers only who has its token."""
    with FakeServer(guarded=True) as server, claim(server.port) as claimed:
        server.token = claimed.token
        claimed.publish(Place(os.getpid(), "127.0.0.1", server.port, None, "info"))
        yield server


def test_once_prints_one_frame(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    top(fake.port, 0.01, True)
    printed = capsys.readouterr().out
    assert printed.count("session, cache") == 1
    assert "imagenet" in printed
    assert "\x1b" not in printed
    assert [request.path for request in fake.requests] == ["/api/status", "/api/history"]


def test_what_is_no_terminal_gets_one_frame_too(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    top(fake.port, 0.01, False)
    assert capsys.readouterr().out.count("session, cache") == 1


def test_a_server_that_is_not_there_or_refuses_is_a_sentence(fake: FakeServer) -> None:
    with pytest.raises(HotsetError, match="No server runs on port 1;") as raised:
        top(1, 0.01, True)
    assert is_a_sentence(str(raised.value))
    fake.token = "another"
    with pytest.raises(HotsetError, match="answers only who knows its token"):
        top(fake.port, 0.01, False)
    fake.stop()
    try:
        with pytest.raises(HotsetError, match="does not answer"):
            top(fake.port, 0.01, False)
    finally:
        fake.start()


def test_the_command_ends_with_2_and_a_sentence_where_no_server_is() -> None:
    program = "import sys; sys.argv[0] = 'hotset'; from hotset.cli.main import main; main()"
    command = [sys.executable, "-c", program, "top", "--once", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert is_a_sentence(done.stderr)
    assert done.stdout == ""


class Terminal:
    """``hotset top`` in a terminal of its own."""

    def __init__(self, port: int, *, once: bool = False) -> None:
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 130, 0, 0))
        code = f"from hotset.cli.top import top; top({port}, 0.05, {once})"
        # The terminal is the program's own, so that Ctrl-C typed into it reaches the program alone.
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                f"import fcntl; fcntl.ioctl(0, {termios.TIOCSCTTY}, 0); {code}",
            ],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "130", "LINES": "30"},
        )
        os.close(slave)
        self.heard = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read until a pattern comes; what was read up to its end is forgotten."""
        deadline = time.monotonic() + 60
        while (found := re.search(pattern, self.heard)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} never came: {self.heard[-2000:]!r}"
            self._read()
        self.heard = self.heard[found.end() :]
        return found

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 0.2)[0]:
            return True
        try:
            self.heard += os.read(self.master, 65_536).decode("utf-8", "replace")
        except OSError:
            return False  # the other side is closed
        return True

    def type(self, character: bytes) -> None:
        os.write(self.master, character)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        deadline = time.monotonic() + 60
        while self._read():
            assert time.monotonic() < deadline, "it does not end"
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(60)
        os.close(self.master)


def test_in_a_terminal_it_follows_the_server_until_ctrl_c(fake: FakeServer) -> None:
    terminal = Terminal(fake.port)
    try:
        terminal.until(r"\x1b\[\?1049h")
        counts = [terminal.until(r"ImageFolder\D+([\d,]+)\D+1,281,167")[1] for _ in range(3)]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1], "the numbers move"
        fake.stop()
        terminal.until("does not answer")
        terminal.until("imagenet")
        fake.start()
        terminal.until(r"up 1 d 2 h\s*(\x1b\[\d+m)*\s*\x1b\[0m\s*memory|up 1 d 2 h\s*memory")
        terminal.type(b"\x03")
        assert terminal.end() == 0
        assert "\x1b[?1049l" in terminal.heard, "the screen is given back"
        assert "Traceback" not in terminal.heard
    finally:
        terminal.close()


def test_once_in_a_terminal_prints_and_ends(fake: FakeServer) -> None:
    terminal = Terminal(fake.port, once=True)
    try:
        assert terminal.end() == 0
        assert terminal.heard.count("session, cache") == 1
        assert "\x1b[?1049h" not in terminal.heard, "what was printed stays on the screen"
    finally:
        terminal.close()


def test_jobs_without_a_session_are_shown_without_a_server(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(HotsetError):
        top(1, 1.0, once=True)
    with hotset.cache(TensorDataset(torch.arange(40)), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        for _ in range(2):
            list(loader)
        top(1, 1.0, once=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "TensorDataset" in line]
    assert re.split(r" {2,}", line.strip())[:4] == ["TensorDataset", "40", "40", "50.0%"]
    assert f"process {os.getpid()}" in line
    with pytest.raises(HotsetError):
        top(1, 1.0, once=True)


def test_a_jobs_speed_is_that_since_the_look_before(runtime: Path) -> None:
    from hotset.cli.top import _Jobs

    jobs = _Jobs()
    with hotset.cache(TensorDataset(torch.arange(40)), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        list(loader)
        assert "samples/s" not in jobs.rows()[0].cells
        list(loader)
        (row,) = jobs.rows()
        assert float(row.cells["samples/s"].replace(",", "")) > 0
        (row,) = jobs.rows()
        assert row.cells["samples/s"] == "0"


def test_of_caches_of_one_name_each_has_a_speed_of_its_own(runtime: Path) -> None:
    """As those of training and of validation."""
    from hotset.cli.top import _Jobs

    jobs = _Jobs()
    with (
        hotset.cache(TensorDataset(torch.arange(40)), memory="1MiB") as train,
        hotset.cache(TensorDataset(torch.arange(30)), memory="1MiB") as valid,
    ):
        list(hotset.DataLoader(train, batch_size=8)), list(hotset.DataLoader(valid, batch_size=8))
        for _ in range(2):
            rows = jobs.rows()
        assert [row.cells["of"] for row in rows] == ["40", "30"]
        assert [row.cells["samples/s"] for row in rows] == ["0", "0"]
        assert {row.cells["state"] for row in rows} == {f"process {os.getpid()}"}


def test_what_a_job_has_on_disk_is_counted(runtime: Path, tmp_path: Path) -> None:
    rows = TensorDataset(torch.zeros(512, 1024))
    with hotset.cache(rows, memory="1MiB", spill=str(tmp_path)) as cached:
        list(hotset.DataLoader(cached, batch_size=64))
        (job,) = report_jobs()
        assert job.cached == 512
        assert job.disk >= job.spilled * 4096 > 0
