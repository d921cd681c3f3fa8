"""Requests to the server: how long each is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hotset.cli import client
from hotset.server.pidfile import Place, ServerError

_PATIENCE = 0.2


class _Slow(BaseHTTPRequestHandler):
    """Answers after more than the patience for a look."""

    def _answer(self) -> None:
        time.sleep(3 * _PATIENCE)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = do_PATCH = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def slow(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[client.Client]:
    monkeypatch.setattr(client, "_SECONDS", _PATIENCE)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield client.Client(Place(1, "127.0.0.1", server.server_port, None, "info"))
        server.shutdown()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/stop"),  # it destroys all sessions before it answers
        ("POST", "/api/sessions"),  # it destroys those that have expired
        ("PATCH", "/api/sessions/one"),
        ("DELETE", "/api/sessions/one"),
    ],
)
def test_what_may_free_memory_has_longer_to_answer(slow: client.Client, method: str, path: str) -> None:
    assert slow.call(method, path) == {}


def test_a_look_is_answered_soon_or_not_at_all(slow: client.Client) -> None:
    with pytest.raises(ServerError, match="has not answered for 0 s"):
        slow.call("GET", "/api/status")
