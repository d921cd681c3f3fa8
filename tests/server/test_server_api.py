"""The API of a running server: what it answers, whom it refuses, and that nothing sent to it breaks it."""

from __future__ import annotations

import hashlib
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from helpers import eventually, is_a_sentence, rarely
from server_process import Server, running

from hotset.cluster.membership import Keys, Member, Membership, write_membership
from hotset.cluster.peer_stats import PeerStats, PeerStatsFile, make_peer_stats

READS = ["/", "/api/status", "/api/sessions", "/api/history", "/metrics", "/openapi.json"]
CHANGES = [
    ("POST", "/api/sessions"),
    ("PATCH", "/api/sessions/kept"),
    ("DELETE", "/api/sessions/kept"),
    ("POST", "/api/stop"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "spill").mkdir()
    with running(folder, "--spill", str(folder / "spill")) as server:
        server.make(name="kept", memory="1MiB")
        yield server


def names(server: Server) -> list[str]:
    return [session["name"] for session in server.ask("GET", "/api/sessions").json]


def test_a_session_from_its_making_to_its_end(server: Server) -> None:
    made = server.make(name="one", memory="2MiB", ttl="1.5h", spill=None)
    assert made["memory"] == {"limit": 2 << 20, "used": 0, "unused": 0}
    assert made["disk"] == {"folder": None, "used": 0}
    assert (made["ttl"], made["server"], made["caches"]) == (5400.0, server.port, [])
    assert server.ask("GET", "/api/sessions/one").json == made
    assert server.ask("GET", f"/api/sessions/{made['number']}").json == made
    assert made in server.ask("GET", "/api/status").json["sessions"]
    freed = server.ask("DELETE", f"/api/sessions/{made['number']}", token=True)
    assert (freed.status, freed.json) == (200, {"freed": 0})
    gone = server.ask("GET", "/api/sessions/one")
    assert gone.status == 404
    assert is_a_sentence(gone.error)


def test_a_session_is_resized_within_the_servers_budget(server: Server) -> None:
    server.make(name="grows", memory="2MiB")
    found = server.ask("PATCH", "/api/sessions/grows", {"memory": "3MiB"}, token=True)
    assert found.status == 200, found.error
    assert found.json["session"]["memory"] == {"limit": 3 << 20, "used": 0, "unused": 0}
    assert (found.json["dropped"], found.json["over"]) == ([], 0)
    assert server.ask("GET", "/api/sessions/grows").json == found.json["session"]
    for memory in ("1000TiB", "many", -1):
        refused = server.ask("PATCH", "/api/sessions/grows", {"memory": memory}, token=True)
        assert refused.status == 400
        assert is_a_sentence(refused.error)
    assert "the server" in server.ask("PATCH", "/api/sessions/grows", {"memory": "1000TiB"}, token=True).error
    assert server.ask("PATCH", "/api/sessions/nobody", {"memory": 1}, token=True).status == 404
    assert server.ask("GET", "/api/sessions/grows").json == found.json["session"]
    assert server.ask("DELETE", "/api/sessions/grows", token=True).status == 200


def test_a_session_that_machines_share_tells_of_them(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(server.folder))
    made = server.make(name="shared", memory="1MiB")
    assert made["machines"] == []
    members = [Member(name, "10.0.0.7", "tcp://10.0.0.7:1", "k" * 40, 5 << 30) for name in ("one", "two")]
    write_membership(made["number"], Membership("two", Keys(b"p" * 40, b"s" * 40), tuple(members)))
    make_peer_stats(made["number"])
    traffic = PeerStats(received=3, bytes=30, stored=2, failures=1, answers=2, seconds=0.5)
    PeerStatsFile(made["number"]).add({"one": traffic}, now=True)

    found = server.ask("GET", "/api/sessions/shared").json
    one, two = found["machines"]
    assert one == {
        "name": "one",
        "host": "10.0.0.7",
        "capacity": 5 << 30,
        "me": False,
        "latency": 0.25,
        "received": 3,
        "bytes": 30,
        "stored": 2,
        "unsound": 0,
        "failures": 1,
    }
    assert (two["name"], two["me"], two["received"]) == ("two", True, None)
    assert found in server.ask("GET", "/api/status").json["sessions"]
    told = server.ask("GET", "/metrics").text
    assert 'hotset_peer_records_total{machine="one",session="shared"} 3.0' in told
    assert "s" * 40 not in told + str(server.ask("GET", "/api/status").json), "a secret key stays where it is"
    described = server.ask("GET", "/openapi.json").json["components"]["schemas"]
    assert set(described["MachineView"]["properties"]) == set(one)
    assert server.ask("DELETE", "/api/sessions/shared", token=True).status == 200


def test_a_session_without_arguments_has_the_servers_budget_and_folder(server: Server) -> None:
    made = server.make()
    assert made["name"] == str(made["number"])
    assert made["memory"]["limit"] == 64 << 20
    assert made["disk"]["folder"] == server.ask("GET", "/api/status").json["spill"]["folder"]
    assert server.ask("DELETE", f"/api/sessions/{made['name']}", token=True).status == 200


def test_a_taken_name_is_a_conflict(server: Server) -> None:
    answer = server.ask("POST", "/api/sessions", {"name": "kept"}, token=True)
    assert answer.status == 409
    assert is_a_sentence(answer.error)


BAD: list[tuple[dict[str, Any], int]] = [
    ({"name": "../x"}, 400),
    ({"name": ""}, 400),
    ({"name": ".hidden"}, 400),
    ({"name": "a/b"}, 400),
    ({"name": "nul\0"}, 400),
    ({"name": "\ud800"}, 400),
    ({"name": "gr\u00fc\u00df \u202e"}, 400),
    ({"name": "x" * 10_000}, 400),
    ({"name": "12345"}, 400),
    ({"name": 5}, 422),
    ({"memory": "12 parsecs"}, 400),
    ({"memory": -1}, 400),
    ({"memory": 1 << 70}, 400),
    ({"memory": True}, 422),
    ({"memory": "9" * 10_000}, 400),
    ({"ttl": "soon"}, 400),
    ({"ttl": 0}, 400),
    ({"ttl": "x" * 10_000}, 400),
    ({"spill": "relative"}, 400),
    ({"spill": "/nul\0"}, 400),
    ({"spill": "/\ud800"}, 400),
    ({"spill": "/proc/no"}, 400),
    ({"spill": "/" + "x" * 10_000}, 400),
    ({"persist": True, "spill": None}, 400),
    ({"persist": "yes"}, 422),
    ({"unknown\n": 1}, 422),
]


@pytest.mark.parametrize(("wanted", "status"), BAD, ids=[repr(wanted)[:40] for wanted, _ in BAD])
def test_what_cannot_be_made_is_refused_with_a_sentence(
    server: Server, wanted: dict[str, Any], status: int
) -> None:
    before = names(server)
    answer = server.ask("POST", "/api/sessions", wanted, token=True)
    assert answer.status == status, answer.text
    assert is_a_sentence(answer.error)
    assert len(answer.error) < 1000
    assert answer.error.isprintable()
    assert names(server) == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"ttl": NaN}', b'{"ttl": 1e999}', b"\xff", b"[" * 9000])
def test_bodies_that_are_no_session_are_refused(server: Server, body: bytes) -> None:
    answer = server.ask("POST", "/api/sessions", body, token=True)
    assert answer.status in (400, 422), answer.text
    assert is_a_sentence(answer.error)


@pytest.mark.parametrize(
    "which", ["..%2F..%2Fetc", "%00", "%0a", "x" * 10_000, "%ff%fe", "%F0%9F%90%8D", "0", "-1"]
)
def test_odd_names_are_not_found(server: Server, which: str) -> None:
    for method in ("GET", "DELETE"):
        answer = server.ask(method, f"/api/sessions/{which}", token=True)
        assert answer.status == 404
        assert is_a_sentence(answer.error)


# Whom it refuses


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {token}", "Bearer {token}x", "{token}"]
)
def test_without_the_token_nothing_changes(
    server: Server, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.format(token=server.token)}
    answer = server.ask(method, path, {}, headers=headers)
    assert answer.status == 401
    assert is_a_sentence(answer.error)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "kept" in names(server)


def test_a_token_in_the_url_is_none(server: Server) -> None:
    for name in ("token", "access_token", "Authorization"):
        assert server.ask("POST", f"/api/stop?{name}={server.token}").status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "", "127.0.0.1.evil.example"]
)
@pytest.mark.parametrize("path", ["/", "/api/status"])
def test_other_names_for_this_address_are_refused(server: Server, host: str, path: str) -> None:
    answer = server.ask("GET", path, headers={"Host": host.format(port=server.port)})
    assert answer.status == 403
    assert is_a_sentence(answer.error)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:{port}", "[::1]:{port}"])
def test_its_own_names_are_not(server: Server, host: str) -> None:
    assert server.ask("GET", "/api/status", headers={"Host": host.format(port=server.port)}).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example", ""]
)
def test_pages_of_other_origins_are_refused_with_and_without_the_token(server: Server, origin: str) -> None:
    for method, path in [*CHANGES, ("GET", "/api/status")]:
        assert server.ask(method, path, {}, token=True, headers={"Origin": origin}).status == 403
    assert "kept" in names(server)


def test_its_own_page_is_not(server: Server) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    assert (
        server.ask("POST", "/api/sessions", {"name": "x y"}, token=True, headers={"Origin": origin}).status
        == 400
    )


def test_long_bodies_are_refused_said_or_not(server: Server) -> None:
    longest = b'{"name": "x"}'.ljust(64 << 10)
    assert server.ask("POST", "/api/sessions", longest + b" ", token=True).status == 413
    made = server.ask("POST", "/api/sessions", longest, token=True)
    assert made.status == 201
    assert server.ask("DELETE", "/api/sessions/x", token=True).status == 200
    chunk = b"8000\r\n" + bytes(0x8000) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"POST /api/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n"
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + 3 * chunk)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", path, 200) for path in READS]
    + [("GET", "/no", 404), ("PUT", "/api/status", 405), ("POST", "/no", 401)],
)
def test_every_answer_carries_the_same_defences(server: Server, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path, token=method == "PUT")
    assert answer.status == status
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert all(source.startswith("'sha256-") for source in policy[kind].split())
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert "server" not in answer.headers
    if status >= 400:
        assert is_a_sentence(answer.error)


# Whatever is sent


def test_the_history_grows(server: Server) -> None:
    number = str(server.ask("GET", "/api/sessions/kept").json["number"])

    def is_known() -> bool:
        points = server.ask("GET", "/api/history").json["sessions"].get(number)
        return bool(points) and points["samples_per_second"][-1] is not None

    assert eventually(is_known)
    found = server.ask("GET", "/api/history").json
    assert found["interval"] == 2.0
    assert {len(points) for points in found["sessions"][number].values()} == {len(found["times"])}
    assert found["sessions"][number]["samples_per_second"][-1] == 0
    assert found["sessions"][number]["hit_rate"][-1] is None


def test_many_at_once_make_one_session(server: Server) -> None:
    statuses: list[int] = []

    def make() -> None:
        statuses.append(server.ask("POST", "/api/sessions", {"name": "raced"}, token=True).status)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [201, *[409] * 7]
    assert server.ask("DELETE", "/api/sessions/raced", token=True).status == 200


def test_the_description_names_the_fields_that_must_be_sent_and_that_are_always_answered(
    server: Server,
) -> None:
    schemas = server.ask("GET", "/openapi.json").json["components"]["schemas"]
    asked = {"NewSession": set(), "Change": {"memory"}}
    for name, schema in schemas.items():
        expected = asked.get(name, set(schema["properties"]))
        assert set(schema.get("required", ())) == expected, name
    session = server.ask("GET", "/api/sessions/kept").json
    answers = {
        "Status": server.ask("GET", "/api/status").json,
        "History": server.ask("GET", "/api/history").json,
        "SessionView": session,
        "SessionMemory": session["memory"],
        "Disk": session["disk"],
        "Error": server.ask("GET", "/api/sessions/nobody").json,
    }
    for name, answer in answers.items():
        assert set(schemas[name]["required"]) == set(answer), name
    refused = server.ask("PATCH", "/api/sessions/kept", {}, token=True)
    assert refused.status == 422
    assert "memory" in refused.error


@pytest.mark.parametrize("authorised", rarely([True, False], False))
def test_it_keeps_to_its_own_description(server: Server, authorised: bool, tmp_path: Path) -> None:
    """Seeded requests made from /openapi.json, legal and not: no 5xx, and every answer as described."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own dependencies
        import schemathesis
        from schemathesis.checks import not_a_server_error
        from schemathesis.specs.openapi.checks import (
            content_type_conformance,
            response_schema_conformance,
            status_code_conformance,
        )

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    headers = {"Authorization": f"Bearer {server.token}"} if authorised else {}
    operations = [found.ok() for found in schema.get_all_operations()]
    tried = {f"{operation.method.upper()} {operation.path}" for operation in operations}
    assert tried == {
        *("GET /", "GET /api/status", "GET /api/history", "GET /metrics", "POST /api/stop"),
        *("GET /api/sessions", "POST /api/sessions"),
        *("GET /api/sessions/{which}", "PATCH /api/sessions/{which}", "DELETE /api/sessions/{which}"),
    }

    for operation in operations:
        if authorised and operation.path == "/api/stop":
            continue  # it would
        modes = list(schemathesis.GenerationMode)
        strategy = operation.as_strategy(generation_mode=modes[0]) | operation.as_strategy(
            generation_mode=modes[1]
        )

        @hypothesis.seed(1234)
        @hypothesis.settings(
            max_examples=30 if "session" in operation.path else 4,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and str(case.body.get("spill", "")).startswith("/"):
                # Folders are made where they are asked for: not on this machine's root.
                digest = hashlib.sha1(repr(case.body["spill"]).encode()).hexdigest()
                case.body["spill"] = str(tmp_path / digest)
            case.call_and_validate(headers=headers, checks=checks, timeout=60)

        send()
    assert server.ask("GET", "/api/status").json["pid"] == server.pid
    assert "Traceback" not in server.log
