"""The server's life: start, status, stop, and what a killed one leaves to the next."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import eventually, is_a_sentence
from server_process import Server, environment_in, free_port, run, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> object:
    with running(tmp_path_factory.mktemp("server"), "--log-level", "debug") as server:
        yield server


def session_files(server: Server) -> list[str]:
    return [path.name for path in server.folder.iterdir() if path.suffix in (".session", ".ledger", ".cache")]


def test_start_tells_process_port_and_log_and_returns_when_it_answers(server: Server) -> None:
    assert str(server.pid) in server.said
    assert f"http://127.0.0.1:{server.port}" in server.said
    assert str(server.folder / f"server-{server.port}.log") in server.said
    assert server.ask("GET", "/api/status").json["pid"] == server.pid


def test_the_daemon_has_a_session_of_its_own_and_nothing_of_its_maker_open(server: Server) -> None:
    assert os.getsid(server.pid) == server.pid
    assert os.readlink(f"/proc/{server.pid}/cwd") == "/"
    assert os.readlink(f"/proc/{server.pid}/fd/0") == "/dev/null"
    for output in (1, 2):
        assert os.readlink(f"/proc/{server.pid}/fd/{output}").endswith(f"server-{server.port}.log")


def test_status_for_people_and_for_programs(server: Server) -> None:
    text = server.hotset("status", "--port", str(server.port))
    assert text.returncode == 0
    assert str(server.pid) in text.stdout
    assert "64 MiB" in text.stdout
    found = json.loads(server.hotset("status", "--port", str(server.port), "--json").stdout)
    assert found == server.ask("GET", "/api/status").json
    assert found["memory"] == {"limit": 64 << 20, "used": 0}


def test_the_token_is_printed_when_asked_for_and_nowhere_else(server: Server) -> None:
    server.make(name="looked_for")
    server.ask("GET", f"/api/sessions?token={'x' * 8}")
    token = server.token
    assert len(token) >= 40
    assert server.hotset("status", "--port", str(server.port), "--token").stdout == f"{token}\n"
    status = server.hotset("status", "--port", str(server.port), "--json")
    hidden = [server.said, status.stdout, server.ask("GET", "/").text, server.ask("GET", "/metrics").text]
    hidden += [Path(f"/proc/{server.pid}/{name}").read_text() for name in ("cmdline", "environ")]
    assert "looked_for" in server.log
    assert not any(token in text for text in [*hidden, server.log])
    for name in ("json", "token", "log"):
        assert (server.folder / f"server-{server.port}.{name}").stat().st_mode & 0o777 == 0o600


def test_a_second_server_of_the_port_is_refused(server: Server) -> None:
    done = server.hotset("start", "--port", str(server.port))
    assert done.returncode == 2
    assert is_a_sentence(done.stderr)
    assert "runs already" in done.stderr
    assert server.ask("GET", "/api/status").json["pid"] == server.pid


def test_a_port_of_another_program_is_told_with_the_last_line_of_the_log(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        environment = environment_in(tmp_path)
        done = run("start", "--port", port, "--memory", "1MiB", environment=environment)
    assert done.returncode == 2
    last = (tmp_path / "runtime" / f"server-{port}.log").read_text().splitlines()[-1]
    assert f"port {port} of 127.0.0.1" in last
    assert last in done.stderr
    # It has given its claim back, with the token.
    assert os.listdir(tmp_path / "runtime") == [f"server-{port}.log"]


@pytest.mark.parametrize("host", ["no-such-name.invalid", "two..dots"])
def test_a_host_that_is_no_address_is_refused(host: str, tmp_path: Path) -> None:
    done = run("start", "--port", str(free_port()), "--host", host, environment=environment_in(tmp_path))
    assert done.returncode == 2
    assert f"host must be an address of this machine, got {host} (" in done.stderr


@pytest.mark.parametrize("command", ["status", "stop"])
def test_without_a_server_there_is_a_sentence(command: str, tmp_path: Path) -> None:
    done = run(command, "--port", str(free_port()), environment=environment_in(tmp_path))
    assert done.returncode == 2
    assert "No server runs on port" in done.stderr
    assert done.stdout == ""


def test_stop_destroys_the_sessions_and_waits_for_the_end(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        # Without a server's ownership, as a program makes it, a session is nobody's, and stays.
        make = "from hotset.session import sessions; sessions.create('nobodys', memory=1 << 20)"
        subprocess.run([sys.executable, "-c", make], env=server.environment, check=True, timeout=200)
        server.make(name="mine")
        done = server.hotset("stop", "--port", str(server.port))
        assert done.returncode == 0, done.stderr
        assert server.has_gone()
        listed = json.loads(server.hotset("session", "list", "--json").stdout)
        assert [session["name"] for session in listed] == ["nobodys"]
        assert {f"server-{server.port}.{kind}" for kind in ("json", "token", "ledger")}.isdisjoint(
            os.listdir(server.folder)
        )


def test_a_signal_ends_it_like_stop(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.make(name="mine")
        os.kill(server.pid, signal.SIGTERM)
        assert eventually(server.has_gone)
        assert session_files(server) == []
        assert server.log.splitlines()[-1].endswith(f"server {server.pid} ends")


def test_the_next_server_has_the_sessions_of_a_killed_one(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        number = first.make(name="kept", memory="1MiB")["number"]
        old = first.token
        first.kill()
        # Its files mean nothing without its lock.
        assert "No server runs" in first.hotset("status", "--port", str(first.port)).stderr
        # And gc frees them, but for the session and its budget, and the log of its last hours.
        collected = first.hotset("gc").stdout
        assert collected.count(f"the server on port {first.port} has ended.") == 2
        kept = [f"server-{first.port}.{kind}" for kind in ("ledger", "log")]
        assert sorted(os.listdir(first.folder)) == [f"{number}.session", *kept]
        done = first.hotset("start", "--port", str(first.port), "--memory", "32MiB")
        assert done.returncode == 0, done.stderr
        at = json.loads((first.folder / f"server-{first.port}.json").read_text())
        second = Server(first.port, at["pid"], first.environment, done.stdout)
        try:
            found = second.ask("GET", "/api/status").json
            assert [(s["name"], s["number"], s["server"]) for s in found["sessions"]] == [
                ("kept", number, first.port)
            ]
            assert found["memory"]["limit"] == 32 << 20
            assert second.token != old
            refused = second.ask("POST", "/api/stop", headers={"Authorization": f"Bearer {old}"})
            assert refused.status == 401
        finally:
            os.kill(second.pid, signal.SIGTERM)
            assert eventually(second.has_gone)
        assert session_files(second) == []


def test_expired_sessions_go_by_themselves(server: Server) -> None:
    server.make(name="short", ttl=0.5)
    assert eventually(lambda: server.ask("GET", "/api/sessions/short").status == 404)
    assert eventually(lambda: "Destroyed session 'short'" in server.log)


def test_a_name_cannot_forge_a_line_of_the_log(server: Server) -> None:
    forged = "x\n2026-01-01 00:00:00,000 INFO forged"
    assert server.ask("POST", "/api/sessions", {"name": forged}, token=True).status == 400
    server.ask("DELETE", "/api/sessions/x%0A2026-01-01%20forged", token=True)
    assert not re.search(r"^2026-01-01", server.log, re.MULTILINE)
    assert all(line.isprintable() for line in server.log.splitlines())


def test_in_the_foreground_it_logs_to_the_terminal(tmp_path: Path) -> None:
    environment, port = environment_in(tmp_path), free_port()
    program = [sys.executable, "-c", "from hotset.cli.main import main; main()"]
    options = ["start", "--foreground", "--port", str(port), "--memory", "1MiB"]
    with subprocess.Popen(
        [*program, *options], env=environment, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 0
    assert f"server {process.pid} begins at http://127.0.0.1:{port}" in first
    assert f"server {process.pid} ends" in rest
    assert os.listdir(tmp_path / "runtime") == []


def test_the_daemon_imports_no_torch(server: Server) -> None:
    mapped = Path(f"/proc/{server.pid}/maps").read_text()
    assert "numpy" in mapped
    assert "torch" not in mapped


def test_a_server_that_has_no_room_for_its_log_says_where_room_is_needed(tmp_path: Path) -> None:
    environment, port = environment_in(tmp_path), free_port()
    start = f"ulimit -f 0; exec {shlex.quote(sys.executable)} -m hotset start --port {port}"
    done = subprocess.run(["sh", "-c", start], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.search(rf"is there room for .*server-{port}\.log\?$", done.stderr.strip())
