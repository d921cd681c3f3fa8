"""``hotset cache-admin``: the reference's lines, its script unchanged, and every illegal use of it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import is_a_sentence
from server_process import Server, environment_in, free_port, run, running

from hotset.cli import cache_admin

# As the reference prints it, word for word.
CACHE_UTIL = """\
bootup_cache_server()
{
  echo "Booting up cache server..."
  result=$(cache_admin --start 2>&1)
  echo "${result}"
}

generate_cache_session()
{
  result=$(cache_admin -g | awk 'END {print $NF}')
  echo "${result}"
}
"""
HOTSET = f'{sys.executable} -c "from hotset.cli.main import main; main()"'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


Admin = Callable[..., tuple[int, str, str]]


@pytest.fixture
def admin(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Admin:
    """Runs a command in this process, at the server's port; returns exit code, output and errors."""
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(server.folder))

    def command(*arguments: str, port: int = server.port) -> tuple[int, str, str]:
        code = cache_admin.main(["-p", str(port), *arguments] if port else arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def test_the_number_of_a_session_is_the_last_word(admin: Admin, server: Server) -> None:
    code, out, err = admin("-g")
    assert (code, err) == (0, "")
    said = re.fullmatch(rf"Session created for server on port {server.port}: (\d+)\n", out)
    assert said
    assert 1 <= int(said[1]) < 1 << 32
    dropped = f"Drop session successfully for server on port {server.port}\n"
    assert admin("--destroy_session", said[1]) == (0, dropped, "")
    assert admin("--list_sessions")[1].splitlines() == [
        f"Listing sessions for server on port {server.port}",
        "",
        "No active sessions.",
    ]


def test_several_are_destroyed_and_an_unknown_one_is_told(admin: Admin, server: Server) -> None:
    numbers = [str(server.make()["number"]) for _ in range(2)]
    code, out, err = admin("-d", numbers[0], "4294967295", numbers[1])
    assert code == 1
    assert len(out.splitlines()) == 2
    assert "4294967295" in err
    assert is_a_sentence(err)
    assert server.ask("GET", "/api/sessions").json == []


def test_sessions_of_nobody_are_not_the_servers(admin: Admin, server: Server) -> None:
    make = (
        "from hotset.session import sessions; sessions.create('nobodys', memory=1 << 20)"  # as a program does
    )
    subprocess.run([sys.executable, "-c", make], env=server.environment, check=True, timeout=200)
    [session] = server.ask("GET", "/api/sessions").json
    assert "No active sessions." in admin("--list_sessions")[1]
    assert admin("-d", str(session["number"]))[0] == 1
    assert server.hotset("session", "destroy", "nobodys").returncode == 0


def cache(**more: Any) -> dict[str, Any]:
    empty = {"id": 3618046178, "cached": 0, "spilled": 0, "mean_bytes": 0.0, "hits": 0, "misses": 0}
    empty["peer_hits"] = 0
    return {**empty, **more}


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_list_has_the_references_columns(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    filled = cache(cached=5, mean_bytes=12441.6, misses=5)
    spilled = cache(id=7, cached=50, spilled=20, mean_bytes=100.0, hits=400, misses=50)
    sessions = [
        {"number": 1493732251, "disk": {"folder": None}, "caches": [filled]},
        {"number": 5, "disk": {"folder": "/nvme"}, "caches": [spilled, cache(id=8)]},
        {"number": 6, "disk": {"folder": None}, "caches": []},
    ]
    monkeypatch.setattr(cache_admin, "_sessions", lambda port: sessions)
    monkeypatch.setattr(cache_admin.glob, "glob", lambda pattern: ["node"] * nodes)
    lines = admin("--list_sessions", port=0)[1].splitlines()
    assert lines[:2] == ["Listing sessions for server on port 50052", ""]
    cells = [re.split(r" {2,}| (?=Disk cached)", line.strip()) for line in lines[2:]]
    assert cells[0] == ["Session", "Cache Id", "Mem cached", "Disk cached", "Avg cache size", "Numa hit"]
    counts = ["5", "450", "0"] if nodes == 1 else ["n/a"] * 3
    assert cells[1:] == [
        ["1493732251", "3618046178", "5", "n/a", "12442", counts[0]],
        ["5", "7", "30", "20", "100", counts[1]],
        ["5", "8", "0", "0", "n/a", counts[2]],
        ["6", "n/a", "n/a", "n/a", "n/a", "n/a"],
    ]
    assert len({len(line) for line in lines[2:]}) == 1


def test_the_server_tells_of_itself(admin: Admin, server: Server) -> None:
    number = server.make()["number"]
    code, out, _ = admin("--server_info")
    assert code == 0
    facts = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[4:9])
    assert {name.strip(): value for name, value in facts.items()} == {
        "hostname": "127.0.0.1",
        "port": str(server.port),
        "number of workers": "n/a",
        "log level": "1",
        "spill dir": "None",
    }
    assert str(number) in out
    assert admin("-d", str(number))[0] == 0


# Illegal uses. "{port}" is the port of the server that runs, "{free}" one without.

ILLEGAL = [
    "--start --stop",
    "-g --list_sessions",
    "--start --start",
    "",
    "--port 50082",
    "-p --start",
    "-p {free} --start --not_exist_cmd",
    "-p {free} -p {free} --stop",
    "--start -p 0",
    "--start -p -1",
    "--start -p 1024",
    "--start -p 65536",
    "--start -p illegal",
    "--start -p 1.5",
    "--start -p",
    "--start -p {port}",
    "--start -p {taken}",
    "--start -p {free} -w 0",
    "--start -p {free} -w -1",
    "--start -p {free} -w 9999999",
    "--start -p {free} -w illegal",
    "--start -p {free} -w",
    "--start -p {free} -s",
    "--start -p {free} -s /path_that_does_not_exist",
    "--start -p {free} -s {file}",
    "--start -p {free} -s /proc",
    "--start -p {free} -l -1",
    "--start -p {free} -l 5",
    "--start -p {free} -l info",
    "--start -p {free} -l",
    "--start -p {free} -h 0.0.0.0",
    "--start -p {free} -h illegal",
    "--start -p {free} -h",
    "--start -p {free} -h --hostname",
    "--start -p {free} -h --hostname 127.0.0.1",
    "--stop -p {free}",
    "-g -p {free}",
    "-g 1 -p {port}",
    "--list_sessions -p {free}",
    "--server_info -p {free}",
    "-d -p {port}",
    "-d -2 -p {port}",
    "-d 0 -p {port}",
    "-d 4294967296 -p {port}",
    "-d illegal -p {port}",
    "-d 99999 -p {port}",
    "-d 99999 -p {free}",
    "--gen -p {port}",
]


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_uses_end_with_1_and_a_sentence(
    line: str, admin: Admin, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = {"port": server.port, "free": free_port(), "taken": other.getsockname()[1]}
        arguments = line.format(**ports, file=file).split()
        if "{taken}" in line:  # makes a process, which must not be this one's child
            done = server.hotset("cache-admin", *arguments)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            code, out, err = admin(*arguments, port=0)
    assert (code, out) == (1, "")
    assert is_a_sentence(err)
    assert len(err.splitlines()) == 1
    assert server.ask("GET", "/api/sessions").json == []


def test_more_workers_than_the_machine_has_are_too_many(admin: Admin) -> None:
    code, _, err = admin("--start", "-w", str(cache_admin._MOST_WORKERS + 1), port=0)
    assert code == 1
    assert f"1 to {cache_admin._MOST_WORKERS}" in err


def test_what_the_system_refuses_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cache_admin.main(["--start", "-p", "50999", "-s", "spill"]) == 1
    assert capsys.readouterr().err == "The machine does not allow it: [Errno 2] No such file or directory.\n"


def test_help_lists_every_option() -> None:
    done = run("cache-admin", "--help")
    assert done.returncode == 0
    options = "--start --stop -g --generate_session -d --destroy_session --list_sessions --server_info"
    options += " -h --hostname -p --port -w --workers -s --spilldir -l --loglevel --help"
    assert set(options.split()) <= set(re.findall(r"(?<!\S)--?\w+", done.stdout))


def test_the_references_script_runs_unchanged_where_it_is_sourced(tmp_path: Path) -> None:
    """With the port of a server of its own, as the default one may be somebody's on this machine."""
    port = free_port()
    (tmp_path / "cache_util.sh").write_text(CACHE_UTIL)
    script = f"""shopt -s expand_aliases
alias cache_admin='{HOTSET} cache-admin -p {port}'
source {tmp_path}/cache_util.sh
bootup_cache_server
CACHE_SESSION_ID=$(generate_cache_session)
echo "id $CACHE_SESSION_ID"
cache_admin --stop
"""
    environment = environment_in(tmp_path)
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["Booting up cache server...", "Cache server startup completed successfully!"]
    created = r"The cache server daemon has been created as process id \d+ and is listening on port (\d+)"
    said = re.fullmatch(created, lines[2])
    assert said
    assert int(said[1]) == port
    assert lines[3:5] == ["", "Recommendation:"]
    assert lines[5].startswith("Since the server is detached into its own daemon process, monitor the server")
    assert 1 <= int(lines[6].removeprefix("id ")) < 1 << 32
    assert lines[7:] == [f"Cache server on port {port} has been stopped successfully."]


def test_the_references_script_runs_unchanged_with_a_wrapper(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache_util.sh").write_text(CACHE_UTIL)
    wrapper = tmp_path / "cache_admin"
    wrapper.write_text(f'#!/bin/bash\nexec {HOTSET} cache-admin -p {server.port} "$@"\n')
    wrapper.chmod(0o755)
    environment = {**server.environment, "PATH": f"{tmp_path}:{server.environment['PATH']}"}
    script = "source cache_util.sh; cache_admin -d $(generate_cache_session)"
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"Drop session successfully for server on port {server.port}\n"


def test_a_call_imports_nothing_that_is_slow(server: Server) -> None:
    code = (
        "import sys, atexit\n"
        "slow = {'torch', 'numpy', 'fastapi', 'starlette', 'pydantic', 'uvicorn', 'rich.table'}\n"
        "atexit.register(lambda: print(*sorted(slow & set(sys.modules)), 'end'))\n"
        f"sys.argv[1:] = ['cache-admin', '-p', '{server.port}', '--list_sessions']\n"
        "from hotset.cli.main import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=server.environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "end"
