"""A cache server in a process of its own, made as a user makes it, and requests to it, legal or not."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import eventually

SECONDS = 200


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``hotset ...`` as a process."""
    program = [sys.executable, "-c", "from hotset.cli.main import main; main()", *arguments]
    return subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
    )


def environment_in(folder: Path) -> dict[str, str]:
    """The environment of a user with a runtime folder and a state folder of their own."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    return {
        **os.environ,
        "HOTSET_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": str(folder / "state"),
        "COLUMNS": "200",
    }


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> str:
        sentence: str = self.json["error"]
        return sentence


@dataclass
class Server:
    """A running daemon."""

    port: int
    pid: int
    environment: dict[str, str]
    said: str

    @property
    def folder(self) -> Path:
        return Path(self.environment["HOTSET_RUNTIME_DIR"])

    @property
    def token(self) -> str:
        return (self.folder / f"server-{self.port}.token").read_text()

    @property
    def log(self) -> str:
        return (self.folder / f"server-{self.port}.log").read_text()

    def hotset(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, environment=self.environment)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request; ``body`` is bytes, or is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        sent = {"Authorization": f"Bearer {self.token}"} if token else {}
        sent |= {} if body is None else {"Content-Type": "application/json"}
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, content, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answer(
                answer.status,
                {name.lower(): value for name, value in answer.getheaders()},
                answer.read().decode(),
            )
        finally:
            connection.close()

    def make(self, **wanted: Any) -> dict[str, Any]:
        """Make a session."""
        answer = self.ask("POST", "/api/sessions", wanted, token=True)
        assert answer.status == 201, answer.text
        made: dict[str, Any] = answer.json
        return made

    def has_gone(self) -> bool:
        return not os.path.exists(f"/proc/{self.pid}/fd/0")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert eventually(self.has_gone)


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[Server]:
    """A daemon in these folders, and none of it afterwards."""
    environment, port = environment_in(folder), free_port()
    done = run("start", "--port", str(port), "--memory", "64MiB", *options, environment=environment)
    assert done.returncode == 0, done.stderr
    at = json.loads((Path(environment["HOTSET_RUNTIME_DIR"]) / f"server-{port}.json").read_text())
    server = Server(port, at["pid"], environment, done.stdout)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
        if not eventually(server.has_gone):
            server.kill()
            raise AssertionError(f"the server did not end by itself; its log:\n{server.log}")
