"""Connections to the server that ask nothing, or not all of it: whoever does ask is answered."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator

import pytest
from helpers import eventually
from server_process import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As a shell starts it that allows 256 descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        made = running(tmp_path_factory.mktemp("server"))
        server = made.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    yield server
    made.__exit__(None, None, None)


def connected(server: Server, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; waits for that, up to a minute."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.chaos  # the tests around this one have a few connections that say nothing
@pytest.mark.parametrize("sent", [b"", b"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_status_is_told_beside_300_idle_connections(server: Server, sent: bytes) -> None:
    idle = [connected(server, sent) for _ in range(300)]
    # By a client that does not wait for the time after which those would go by themselves.
    asking = connected(server, b"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    asking.settimeout(5)
    answer = asking.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    status = server.hotset("status", "--port", str(server.port), "--json")
    assert json.loads(status.stdout)["pid"] == server.pid
    for connection in [*idle, asking]:
        connection.close()


def test_a_request_that_does_not_come_whole_is_given_up_though_bytes_trickle(server: Server) -> None:
    half = b"POST /api/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20\r\n"
    authorized = f"Authorization: Bearer {server.token}\r\n".encode()
    kinds = [b"", half, half + authorized + b"\r\n", half + authorized + b'\r\n{"name": "ha']
    waiting = [connected(server, sent) for sent in kinds]
    trickle = connected(server, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")

    def gone() -> bool:
        try:
            trickle.sendall(b"x")
        except OSError:
            return True
        return False

    assert eventually(gone)
    assert [is_closed(connection) for connection in waiting] == [True] * len(kinds)
    assert server.ask("GET", "/api/sessions").json == []
    for connection in [*waiting, trickle]:
        connection.close()


def test_a_connection_is_used_again_and_closed_when_nothing_more_is_asked(server: Server) -> None:
    connection = connected(server)
    for _ in range(3):
        connection.sendall(b"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["pid"]) == (200, server.pid)
    assert is_closed(connection)
    connection.close()


@pytest.mark.chaos  # a client waits ten seconds
def test_a_client_of_a_stopped_server_says_how_it_goes_on(server: Server) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        told = server.hotset("status", "--port", str(server.port), "--json")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert told.returncode == 2
    assert f"kill -CONT {server.pid}" in told.stderr
    assert server.hotset("status", "--port", str(server.port), "--json").returncode == 0
