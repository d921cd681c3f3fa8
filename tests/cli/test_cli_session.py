"""``hotset session``: with a server and without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import is_a_sentence
from server_process import environment_in
from typer.testing import CliRunner

from hotset.cli import session as commands
from hotset.cli.main import app
from hotset.errors import HotsetError, HotsetWarning
from hotset.server import pidfile as place
from hotset.server.views import session_view
from hotset.session import reports, sessions
from hotset.session.session_definition import Session


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment_in(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def hotset(*arguments: str) -> str:
    """Output of a command that succeeds."""
    done = CliRunner().invoke(app, ["session", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def failing(*arguments: str) -> str:
    with pytest.raises(HotsetError) as caught:
        CliRunner().invoke(app, ["session", *arguments], catch_exceptions=False)
    assert is_a_sentence(str(caught.value))
    return str(caught.value)


def test_without_a_server_a_session_is_nobodys(folder: Path) -> None:
    spill = folder / "spill"
    said = hotset("create", "one", "--memory", "3MiB", "--spill", str(spill), "--ttl", "36h", "--persist")
    assert all(word in said for word in ("one", "3 MiB", str(spill), "36 h", "nobody", "kept after a reboot"))
    [found] = json.loads(hotset("list", "--json"))
    assert json.loads(hotset("show", "one", "--json")) == found
    assert json.loads(hotset("show", str(found["number"]), "--json")) == found
    assert found == session_view(reports.report(sessions.find("one")))
    assert (found["memory"]["limit"], found["ttl"], found["persist"], found["server"]) == (
        3 << 20,
        129600.0,
        True,
        None,
    )
    assert found["disk"] == {"folder": str(spill), "used": 0}
    assert str(found["number"]) in hotset("list")
    assert "Destroyed session one; 0 B freed." in hotset("destroy", "one")
    assert json.loads(hotset("list", "--json")) == []
    assert "There are no sessions" in hotset("list")


def test_a_relative_spill_folder_counts_from_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    hotset("create", "one", "--memory", "1MiB", "--spill", "here")
    assert sessions.find("one").spill == str(folder / "here")
    hotset("destroy", "one")


@pytest.mark.parametrize(
    "arguments",
    [
        ["create", "../x"],
        ["create", "a b"],
        ["create", "nul\0"],
        ["create", "x" * 10_000],
        ["create", "12345"],
        ["create", "x", "--memory", "12 parsecs"],
        ["create", "x", "--memory", "9" * 10_000],
        ["create", "x", "--ttl", "soon"],
        ["create", "x", "--persist"],
        ["create", "x", "--port", "1"],
        ["show", "nobody"],
        ["destroy", "../x"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_what_cannot_be_done_is_a_sentence(arguments: list[str]) -> None:
    assert len(failing(*arguments)) < 1000
    assert sessions.sessions() == []


def test_a_taken_name_is_told() -> None:
    hotset("create", "one", "--memory", "1MiB")
    assert "already" in failing("create", "one")
    hotset("destroy", "one")


def test_where_a_server_answers_the_session_is_its(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Fake:
        def call(self, method: str, path: str, body: Any = None) -> Any:
            asked.append((method, path, body))
            return {"number": 1, "memory": {"limit": 1 << 59 if body.get("memory") == "512PiB" else 1000}}

    monkeypatch.setattr(commands, "client", lambda port: asked.append(port) or Fake())
    with place.claim(place.DEFAULT_PORT):
        made = commands.create("one", memory="1GiB", spill="/nvme", ttl=None, persist=False, port=None)
    assert made["number"] == 1
    wanted = {"name": "one", "memory": "1GiB", "spill": "/nvme", "persist": False}
    assert asked == [place.DEFAULT_PORT, ("POST", "/api/sessions", wanted)]
    # And at a port that is named, whether or not the default one has a server.
    asked.clear()
    commands.create("one", memory=None, spill=None, ttl="1h", persist=False, port=50099)
    assert asked[0] == 50099
    assert asked[1][2] == {"name": "one", "ttl": "1h", "persist": False}
    assert sessions.sessions() == []
    # The server's own warning is in its log.
    with pytest.warns(HotsetWarning, match="524288 TiB") as told:
        commands.create("one", memory="512PiB", spill=None, ttl=None, persist=False, port=50099)
    assert len(told) == 1


def test_a_cache_is_described() -> None:
    found = reports.CacheReport(
        id=7,
        name="Images\x1b[31m",
        samples=1000,
        cached=250,
        spilled=50,
        mean_bytes=1024.0,
        hits=3,
        misses=1,
        hit_rate=0.75,
    )
    session = Session(9, "one", 1 << 30, "/nvme", False, None, 0.0, 50052)
    view = session_view(reports.SessionReport(session, True, 1 << 20, 2 << 20, (found,)))
    out = commands.console()
    with out.capture() as captured:
        out.print(commands.describe(view), commands.sessions_table([view]))
    shown = captured.get()
    for word in ("Images\\x1b[31m", "1,000", "250", "75.0%", "1 KiB", "server of port 50052", "in use", "ok"):
        assert word in shown
    assert "\x1b[31m" not in shown
