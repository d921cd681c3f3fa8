"""What a newcomer notices of the command line at once: versions, ports, slips of the pen, warnings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import is_a_sentence
from programs import Programs
from server_process import environment_in, free_port, run, running
from torch.utils.data import TensorDataset

import hotset
from hotset.cli.main import main
from hotset.errors import SessionError
from hotset.server import leftover_files
from hotset.server import pidfile as place
from hotset.session import sessions

DOCS = Path(hotset.__file__).parent.parent / "docs"


def test_the_version_is_said() -> None:
    assert run("--version").stdout == f"hotset {hotset.__version__}\n"


def test_python_runs_the_package_as_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotset", "--version"], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, f"hotset {hotset.__version__}\n")


def test_without_a_command_there_is_help() -> None:
    done = run()
    assert "Usage: hotset" in done.stdout + done.stderr


def test_the_one_server_is_found_whatever_its_port(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        assert server.port != place.DEFAULT_PORT
        made = server.hotset("session", "create", "one", "--memory", "1MiB")
        assert f"the server of port {server.port}" in made.stdout
        assert json.loads(server.hotset("status", "--json").stdout)["port"] == server.port
        done = server.hotset("stop")
        assert f"port {server.port}" in done.stdout, done.stderr
        assert server.hotset("session", "list", "--json").stdout.strip() == "[]"
        nobody = server.hotset("session", "create", "two", "--memory", "1MiB")
        assert "nobody" in nobody.stdout


@pytest.mark.chaos  # two servers; the test above has one
def test_of_several_servers_one_must_be_named(tmp_path: Path) -> None:
    with running(tmp_path) as one, running(tmp_path) as two:
        for command in (["stop"], ["session", "create", "x"]):
            done = one.hotset(*command)
            assert done.returncode == 2
            assert is_a_sentence(done.stderr.strip())
            assert all(str(server.port) in done.stderr for server in (one, two))
        assert (
            one.hotset("session", "create", "x", "--memory", "1MiB", "--port", str(two.port)).returncode == 0
        )


def test_where_none_runs_that_is_said(tmp_path: Path) -> None:
    done = run("stop", environment=environment_in(tmp_path))
    assert done.returncode == 2
    assert "No server runs" in done.stderr


def test_a_slip_of_the_pen_makes_no_folders(tmp_path: Path) -> None:
    environment = environment_in(tmp_path)
    slip = tmp_path / "nmve" / "hotset"
    done = run("session", "create", "x", "--spill", str(slip), environment=environment)
    assert done.returncode == 2
    assert str(slip.parent) in done.stderr
    assert is_a_sentence(done.stderr.strip())
    assert not slip.parent.exists()
    (tmp_path / "nvme").mkdir()
    done = run("session", "create", "x", "--spill", str(tmp_path / "nvme" / "new"), environment=environment)
    assert done.returncode == 0, "the last one is made"


def test_a_slip_of_the_pen_in_spill_is_an_error(tmp_path: Path) -> None:
    slip = tmp_path / "nmve" / "hotset"
    with pytest.raises(hotset.ArgumentError, match=re.escape(str(slip.parent))) as caught:
        hotset.cache(TensorDataset(torch.arange(4)), spill=slip)
    assert is_a_sentence(str(caught.value))
    assert not slip.parent.exists()


def test_the_space_that_a_spill_leaves_free_is_said() -> None:
    assert "64 MiB" in " ".join(run("session", "create", "--help").stdout.replace("│", " ").split())
    assert "64 MiB" in (DOCS / "sessions.md").read_text()


def test_what_a_command_warns_of_is_a_sentence_alone(tmp_path: Path) -> None:
    done = run("session", "create", "x", "--memory", "1000TiB", environment=environment_in(tmp_path))
    [line] = done.stderr.splitlines()
    assert line.startswith("Warning: memory=")
    assert ".py" not in line


def test_a_warning_in_a_program_of_typers_points_at_the_users_line(
    programs: Programs, tmp_path: Path
) -> None:
    """The user's own command line, with their own function under a decorator of torch's."""
    program = tmp_path / "mine.py"
    program.write_text(
        "import torch, typer\n"
        "from hotset.session import sessions\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "@torch.no_grad()\n"
        "def main():\n"
        "    sessions.create('x', memory=1 << 50)  # here\n"
        "app()\n"
    )
    done = programs.run([str(program)], tmp_path, environment_in(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{program}:7: HotsetWarning" in done.stderr


def test_a_warning_with_no_line_of_the_users_in_it_points_at_the_program(tmp_path: Path) -> None:
    """hotset's function is the command itself, so that the only line of theirs is the one that runs it."""
    program = tmp_path / "mine.py"
    program.write_text(
        "import typer\n"
        "from hotset._warnings import warn\n"
        "app = typer.Typer()\n"
        "app.command()(warn)\n"
        "app(['something'])  # here\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert f"{program}:5: HotsetWarning: something" in done.stderr


def test_a_killed_servers_log_stays_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    with running(tmp_path) as server:
        server.kill()
        assert server.hotset("gc").returncode == 0
        assert "begins at" in server.log
        log = server.folder / f"server-{server.port}.log"
        assert os.listdir(server.folder) == [log.name]
        day_ago = time.time() - 86401
        os.utime(log, (day_ago, day_ago))
        assert any("log" in sentence for sentence in leftover_files.collect())
        assert os.listdir(server.folder) == []


def test_cache_admin_as_the_page_says_is_found_by_scripts(tmp_path: Path) -> None:
    """Both ways of docs/server.md, each used by a script that is started, not sourced."""
    page = (DOCS / "server.md").read_text()
    function, file = re.findall(r"```bash\n(.+)\n```", page)
    bin_, home = tmp_path / "bin", tmp_path / "home"
    for folder in (bin_, home / ".local/bin"):
        folder.mkdir(parents=True)
    (bin_ / "hotset").write_text(f'#!/bin/sh\nexec {sys.executable} -m hotset "$@"\n')
    (bin_ / "hotset").chmod(0o755)
    path = f"{bin_}:{home}/.local/bin:{os.environ['PATH']}"
    environment = {**environment_in(tmp_path), "HOME": str(home), "PATH": path}
    use = f"cache_admin --server_info -p {free_port()}"
    for shell, before in (("bash", function), ("sh", file)):
        script = tmp_path / f"script.{shell}"
        script.write_text(f"#!/usr/bin/env {shell}\n{use}\n")
        script.chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", f"{before}\n{script}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 1
        assert "No server runs" in done.stderr


def test_a_session_whose_disk_is_not_mounted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_in(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SessionError, match="mount the disk"):
        sessions.create("x", memory=1 << 20, spill=str(tmp_path / "disk" / "spill"))


def test_check_shows_what_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a session's cache, and of this process's own, whose file there has no name."""
    for name, value in environment_in(tmp_path).items():
        monkeypatch.setenv(name, value)
    disk = tmp_path / "disk"
    samples = TensorDataset(torch.arange(4000.0).repeat(500, 1))  # 8 MB, of which memory has room for one
    sessions.create("x", memory=1 << 20, spill=str(disk))
    with (
        hotset.cache(samples, session="x") as kept,
        hotset.cache(samples, memory="1MiB", spill=disk) as own,
    ):
        for cached in (kept, own):
            for _ in hotset.DataLoader(cached, batch_size=100):
                pass
        done = run("check", environment=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"limit\s*┃\s*disk", done.stdout)
    rows = [line for line in done.stdout.splitlines() if "TensorDataset" in line]
    assert len(rows) == 2
    for row in rows:
        *_, limit, disk_column = (cell.strip() for cell in row.strip("│ ").split("│"))
        assert (limit, disk_column[-3:]) == ("1 MiB", "MiB"), row
        assert 6 < float(disk_column.split()[0]) < 10


@pytest.mark.parametrize("command", [("session", "create", "e"), ("start",)])
def test_an_empty_spill_folder_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    """A variable that is not set: the folder would be the one that the shell is in."""
    done = run(*command, "--spill", "", environment=environment_in(tmp_path))
    assert done.returncode == 2
    assert "must be a path" in done.stderr
    assert is_a_sentence(done.stderr.strip())


@pytest.mark.parametrize("command", [["session", "list"], ["session", "create", "e"], ["start"]])
def test_without_proc_nothing_of_a_session_is_begun(
    command: list[str], runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hotset.store.locks.can_reopen", lambda: False)
    monkeypatch.setattr(sys, "argv", ["hotset", *command])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert is_a_sentence(capsys.readouterr().err.strip())
    assert list(runtime.iterdir()) == []


def test_what_the_machine_does_not_allow_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hotset", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert is_a_sentence(done.stderr.strip())


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_program_is_not_begun_in_a_folder_that_is_gone(command: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    inside = f"import os, shutil, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
    program = inside + "from hotset.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, command, "--", "echo", "begun"],
        # As for the program itself: where the working folder is a place for modules, some cannot be imported.
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert is_a_sentence(done.stderr.strip())
