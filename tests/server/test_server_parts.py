"""The server's parts one by one: who is let in, history, metrics, housekeeping, log, options, the claim."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import eventually
from hypothesis import given
from hypothesis import strategies as st
from kills import in_child
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from sources import Samples
from stores import store_of

import hotset
from hotset._warnings import printable
from hotset.cli import session as said
from hotset.cluster.membership import Keys, Member, Membership, write_membership
from hotset.cluster.peer_stats import PeerStats, PeerStatsFile, make_peer_stats
from hotset.errors import ArgumentError, HotsetError
from hotset.server import history as history_module
from hotset.server import leftover_files, log
from hotset.server import pidfile as place
from hotset.server.app import make_app
from hotset.server.daemon import Housekeeper
from hotset.server.history import History
from hotset.server.metrics import Metrics
from hotset.server.options import Options
from hotset.server.parsing import parse_seconds, parse_share
from hotset.server.request_auth import LARGEST_BODY, Guard, content_policy
from hotset.server.session_service import Refusal, SessionService
from hotset.server.views import SessionView, session_view
from hotset.session import reports, sessions
from hotset.session import server_quota as servers
from hotset.session.reports import CacheReport, SessionReport
from hotset.session.session_definition import Session
from hotset.store.format import Slot

LOCAL = Options("127.0.0.1", 50052, 1 << 30, None, "info", True)
REMOTE = Options("cache.example", 50052, 1 << 30, None, "info", True)


# Who is let in


class Asked:
    """An application that remembers what reached it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert message["more_body"] is False
        self.bodies.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


def ask(
    options: Options, method: str, path: str, headers: list[tuple[str, str]], parts: list[bytes]
) -> tuple[int, list[bytes]]:
    """Status, and the bodies that came through the guard."""
    app, sent = Asked(), []
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": encoded}
    asyncio.run(Guard(app, options, "secret", content_policy(""))(scope, receive, send))
    assert (b"x-content-type-options", b"nosniff") in sent[0]["headers"]
    return sent[0]["status"], app.bodies


TOKEN = ("Authorization", "Bearer secret")
HOST = ("Host", "127.0.0.1:50052")
THERE = ("Host", "cache.example:50052")


@pytest.mark.parametrize(
    ("options", "method", "path", "headers", "status"),
    [
        (LOCAL, "GET", "/api/status", [HOST], 200),
        (LOCAL, "HEAD", "/", [HOST], 200),
        (LOCAL, "OPTIONS", "/", [HOST], 401),
        (LOCAL, "GET", "/", [], 403),
        (LOCAL, "GET", "/", [HOST, HOST], 403),
        (LOCAL, "POST", "/", [HOST, TOKEN], 200),
        (LOCAL, "POST", "/", [HOST, ("Authorization", "bearer secret")], 200),
        (LOCAL, "POST", "/", [HOST, ("Authorization", "Bearer s\xe4cret")], 401),
        (LOCAL, "POST", "/", [HOST, TOKEN, ("Authorization", "Bearer x")], 401),
        (LOCAL, "POST", "/", [HOST, TOKEN, ("Origin", "http://127.0.0.1:50052")], 200),
        (LOCAL, "POST", "/", [HOST, TOKEN, ("Origin", "http://localhost:50052")], 403),
        (LOCAL, "GET", "/", [THERE], 403),
        (REMOTE, "GET", "/", [THERE], 200),
        (REMOTE, "GET", "/", [("Host", "Cache.Example")], 200),
        (REMOTE, "GET", "/", [("Host", "cache.example:80")], 403),
        (REMOTE, "POST", "/", [THERE], 401),
        (REMOTE, "GET", "/api/status", [THERE], 401),
        (REMOTE, "GET", "/metrics", [THERE], 401),
        (REMOTE, "GET", "/openapi.json", [THERE], 401),
        (REMOTE, "GET", "/api/status", [HOST], 401),
        (REMOTE, "GET", "/api/status", [THERE, TOKEN], 200),
        (REMOTE, "POST", "/", [THERE, TOKEN, ("Origin", "https://cache.example:50052")], 200),
        (REMOTE, "POST", "/", [THERE, TOKEN, ("Origin", "https://cache.example")], 403),
    ],
)
def test_the_guard(
    options: Options, method: str, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    answered, reached = ask(options, method, path, headers, [b"ab", b"c"])
    assert answered == status
    assert reached == ([b"abc"] if status == 200 else [])


def test_bodies_are_bounded_to_the_byte() -> None:
    half = bytes(LARGEST_BODY // 2)
    assert ask(LOCAL, "POST", "/", [HOST, TOKEN], [half, half]) == (200, [half + half])
    assert ask(LOCAL, "POST", "/", [HOST, TOKEN], [half, half, b"x"]) == (413, [])


def test_the_policy_admits_the_pages_own_script_and_style() -> None:
    one, two = content_policy("<script>a</script>"), content_policy("<script>b</script><style>c</style>")
    assert one != two
    assert "style-src 'none'" in one
    assert "unsafe" not in two


def test_an_error_of_the_servers_own_is_a_sentence_too() -> None:
    class Broken(SessionService):
        def status(self) -> dict[str, Any]:
            raise ValueError("inside")

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    app = make_app(Broken(LOCAL, None), History(), "", lambda: None)
    scope = {"type": "http", "method": "GET", "path": "/api/status", "headers": [], "query_string": b""}
    with pytest.raises(ValueError, match="inside"):  # for the log
        asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 500
    assert "(ValueError)" in json.loads(sent[1]["body"])["error"]


# The history


def report(
    number: int, *, hits: int = 0, misses: int = 0, waited: float = 0.0, cached: int = 0, caches: int = 1
) -> SessionReport:
    session = Session(number, f"s{number}", 1 << 30, None, False, None, 0.0, 50052)
    cache = CacheReport(id=1, name="Data", samples=100, cached=cached, hits=hits, misses=misses)
    cache = CacheReport(**{**vars(cache), "waited_seconds": waited, "memory": 10 * cached, "disk": cached})
    found = tuple(CacheReport(**{**vars(cache), "id": number}) for number in range(caches))
    return SessionReport(session, True, 10 * cached * caches, cached * caches, found)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    read = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(history_module, "time", read)
    return now


def test_rates_are_differences_by_time(clock: list[float]) -> None:
    history = History()
    for at, found in [
        (0, [report(1, hits=10, misses=10, waited=1.0, cached=10)]),
        (2, [report(1, hits=40, misses=20, waited=1.5, cached=20), report(2)]),
        (6, [report(1, hits=40, misses=20, waited=1.5, cached=20), report(2)]),
        (8, [report(1, hits=0, misses=2, cached=2), report(2)]),
        (10, [report(1, hits=0, misses=2, cached=2, caches=2)]),
    ]:
        clock[0] = 1000.0 + at
        history.add(found)
    view = history.view()
    assert view["times"] == [1000.0, 1002.0, 1006.0, 1008.0, 1010.0]
    assert view["sessions"] == {
        "1": {
            "samples_per_second": [None, 20.0, 0.0, None, 1.0],
            "waited": [None, 0.25, 0.0, None, 0.0],
            "hit_rate": [None, 0.75, None, None, 0.0],
            "cached": [10, 20, 20, 2, 4],
            "memory": [100, 200, 200, 20, 40],
            "disk": [10, 20, 20, 2, 4],
        }
    }


def test_the_history_is_bounded_and_its_first_point_known(clock: list[float]) -> None:
    history = History()
    assert history.view() == {"interval": 2.0, "times": [], "sessions": {}}
    for turn in range(400):
        clock[0] = 2.0 * turn
        history.add([report(1, hits=turn)])
    view = history.view()
    assert view["times"] == [2.0 * turn for turn in range(100, 400)]
    assert view["sessions"]["1"]["samples_per_second"] == [0.5] * 300


# Machines


def share(number: int, *names: str) -> None:
    """Have machines share a session, the first of them this one."""
    members = [Member(name, f"{name}.example", "tcp://x:1", "k" * 40, 1 << 30) for name in names]
    write_membership(number, Membership(names[0], Keys(b"p" * 40, b"s" * 40), tuple(members)))


def passed(number: int, **traffics: PeerStats) -> None:
    """Add to what passed between this machine and others."""
    make_peer_stats(number)
    PeerStatsFile(number).add(traffics, now=True)


BUSY = PeerStats(received=3000, bytes=5 << 20, stored=40, unsound=1, failures=2, answers=8, seconds=0.02)


@pytest.mark.usefixtures("runtime")
def test_machines_are_told_as_the_membership_and_the_statistics_have_them() -> None:
    found = report(7, hits=1)
    assert session_view(found)["machines"] == []
    share(7, "b", "c", "a")
    nothing = dict.fromkeys(("received", "bytes", "stored", "unsound", "failures"), 0) | {"latency": None}
    quiet = [
        {"name": name, "host": f"{name}.example", "capacity": 1 << 30, "me": name == "b"}
        | (dict.fromkeys(nothing) if name == "b" else nothing)
        for name in ("a", "b", "c")
    ]
    assert session_view(found)["machines"] == quiet, "before anything has passed"
    passed(7, a=BUSY, gone=BUSY)
    view = session_view(found)
    sent = {"received": 3000, "bytes": 5 << 20, "stored": 40, "unsound": 1, "failures": 2, "latency": 0.0025}
    assert view["machines"] == [quiet[0] | sent, *quiet[1:]]
    answer = TypeAdapter(SessionView)
    assert answer.dump_python(answer.validate_python(view)) == view
    assert session_view(report(8))["machines"] == []


def test_a_statistics_file_that_cannot_be_read_hides_no_machine(runtime: Path) -> None:
    share(7, "b", "a")
    passed(7, a=BUSY)
    whole = (runtime / "7.traffic").read_bytes()
    for broken in (b"", b"x", b"\xff" * len(whole)):
        (runtime / "7.traffic").write_bytes(broken)
        told = [(machine["name"], machine["received"]) for machine in session_view(report(7))["machines"]]
        assert told == [("a", 0), ("b", None)]


@pytest.mark.usefixtures("runtime")
def test_machines_are_described() -> None:
    out = said.console()
    for names in ((), ("b", "a", "evil\x1b[31m")):
        if names:
            share(7, *names)
            passed(7, a=BUSY)
        with out.capture() as captured:
            out.print(said.describe(session_view(report(7))))
        lines = captured.get().splitlines()
        assert any("can hold" in line for line in lines) == bool(names)
    [row] = [line for line in lines if "a.example" in line]
    assert row.replace("│", " ").split() == [
        *("a", "a.example", "1", "GiB", "3,000", "5", "MiB", "2.5", "ms", "40", "2")
    ]
    assert any("b (this machine)" in line for line in lines)
    assert "\x1b[31m" not in captured.get()


@pytest.mark.usefixtures("runtime")
def test_what_other_machines_sent_are_hits() -> None:
    session = sessions.create("a", memory=1 << 20)
    with hotset.cache(Samples(torch.tensor, 10), session="a") as cached:
        for index in (0, 1, 0, 1):
            cached[index]
        store_of(cached).segment.slots[3, Slot.PEER_HITS] = 4
        (seen,) = reports.report(session).caches
    assert (seen.peer_hits, seen.hit_rate) == (4, (seen.hits + 4) / (seen.hits + 4 + seen.misses))
    found = SessionReport(
        session, True, 0, 0, (CacheReport(1, "D", hits=1, peer_hits=2, misses=1, hit_rate=0.75),)
    )
    view = session_view(found)
    [cache] = view["caches"]
    assert (cache["hits"], cache["peer_hits"], cache["hit_rate"]) == (1, 2, 0.75)
    out = said.console()
    with out.capture() as captured:
        out.print(said.describe(view), said.sessions_table([view]))
    assert captured.get().count("75.0%") == 2
    sessions.destroy(session)


# Metrics


def values(found: list[SessionReport]) -> dict[str, dict[tuple[str, ...], float]]:
    text = Metrics(LOCAL, lambda: found).text().decode()
    result: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.name.startswith("hotset_")
            result.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return result


def test_metrics_tell_what_the_reports_say() -> None:
    found = values([report(1, hits=7, misses=3, waited=0.5, cached=10), report(2, caches=0)])
    assert found["hotset_sessions"] == {(): 2}
    assert found["hotset_server_memory_bytes"] == {(): 100}
    assert found["hotset_server_memory_limit_bytes"] == {(): 1 << 30}
    assert found["hotset_session_memory_bytes"] == {("s1",): 100, ("s2",): 0}
    assert found["hotset_cache_hits_total"] == {("0", "s1"): 7}
    assert found["hotset_peer_hits_total"] == {("0", "s1"): 0}
    assert found["hotset_cache_misses_total"] == {("0", "s1"): 3}
    assert found["hotset_cache_waited_seconds_total"] == {("0", "s1"): 0.5}
    assert found["hotset_cache_cached_samples"] == {("0", "s1"): 10}
    assert found["hotset_cache_ok"] == {("0", "s1"): 1}
    assert found["hotset_cache_info"] == {("0", "Data", "s1"): 1}


def test_metrics_are_bounded_and_names_cannot_break_them() -> None:
    found = values([report(number, caches=10) for number in range(1, 300)])
    assert found["hotset_sessions"] == {(): 299}
    assert len(found["hotset_session_memory_bytes"]) == 200
    assert len(found["hotset_cache_hits_total"]) == 1000
    odd = report(1)
    named = CacheReport(id=5, name='a"b\n\ud800', samples=1)
    assert values([SessionReport(odd.session, True, 0, 0, (named,))])["hotset_cache_info"]


@pytest.mark.usefixtures("runtime")
def test_metrics_tell_of_other_machines_as_many_as_are_told_of() -> None:
    share(1, "b", "a", "c\n")
    passed(1, a=BUSY)
    found = values([report(1), report(2)])
    wanted = {"records": 3000, "bytes": 5 << 20, "failures": 2, "answers": 8, "seconds": 0.02}
    for name, value in wanted.items():
        assert found[f"hotset_peer_{name}_total"] == {("a", "s1"): value, ("c\\n", "s1"): 0}
    share(2, *(f"m{number}" for number in range(1200)))
    assert len(values([report(1), report(2)])["hotset_peer_bytes_total"]) == 1000


# Housekeeping, log, options


def test_a_chore_that_fails_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    housekeeper = Housekeeper(SessionService(LOCAL, None), History())
    turns = []

    def fail() -> None:
        turns.append(1)
        raise RuntimeError("broken" if len(turns) < 3 else "otherwise")

    for _ in range(3):
        housekeeper.do("this", fail)
    housekeeper.do("this", lambda: None)
    housekeeper.do("this", fail)
    assert len(turns) == 4
    assert [record.message for record in caplog.records] == ["this failed, and is tried again"] * 3


def test_housekeeping_goes_on_when_everything_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.server.daemon.INTERVAL", 0.01)
    turns = []

    def fail(*_: object) -> Any:
        turns.append(1)
        raise RuntimeError("broken")

    service = SessionService(LOCAL, None)
    monkeypatch.setattr(service, "clean", fail)
    monkeypatch.setattr("hotset.server.daemon.report_all", fail)
    with Housekeeper(service, History()):
        assert eventually(lambda: len(turns) > 10)


def test_the_status_has_the_caches_of_jobs_that_are_in_no_session(runtime: Path) -> None:
    service = SessionService(LOCAL, None)
    sessions.create("one", memory=1 << 20)
    with hotset.cache(Samples(torch.tensor, 20), memory="1MiB") as cached:
        for _ in range(2):
            list(hotset.DataLoader(cached, batch_size=10))
        with hotset.cache(Samples(torch.tensor, 10), session="one"):
            (job,) = service.status()["jobs"]
            (of_session,) = service.status()["sessions"][0]["caches"]
    assert (job["process"], job["samples"], job["hit_rate"]) == (os.getpid(), 20, 0.5)
    assert (of_session["process"], of_session["samples"]) == (None, 10)
    assert service.status()["jobs"] == []


def test_the_log_is_cut_to_its_last_half(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    lines = [f"line {number:06d}\n" for number in range(log.LARGEST // 12 + 10)]
    os.write(fd, "".join(lines[:-10]).encode())
    log.cut(fd)
    assert path.stat().st_size == 12 * len(lines[:-10])
    os.write(fd, "".join(lines[-10:]).encode())
    log.cut(fd)
    os.write(fd, b"after\n")
    os.close(fd)
    kept = path.read_text().splitlines(keepends=True)
    assert log.LARGEST // 2 - 20 < path.stat().st_size <= log.LARGEST // 2 + 6
    assert kept == [*lines[-len(kept) + 1 :], "after\n"]


def test_records_stay_in_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        log.set_up("info", file=False)
        try:
            raise ValueError("x\n2026-01-01 INFO forged\x1b[31m")
        except ValueError:
            logging.getLogger("hotset").exception("name %s", "a\nb\r\x1b[31m\u202e")
        logging.getLogger("hotset").debug("not at this level")
    finally:
        root.handlers[:], _ = before[0], root.setLevel(before[1])
        logging.captureWarnings(False)
    lines = capsys.readouterr().err.split("\n")
    assert lines[0].endswith(r"ERROR name a\nb\r\x1b[31m\u202e")
    assert lines.pop() == ""
    assert all(line.startswith("    ") and line.isprintable() for line in lines[1:])
    assert "forged" in "".join(lines[1:])


@given(st.text(max_size=300))
def test_printable_text_is_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable() or len(text) > 200


@pytest.mark.parametrize("amount", ["0", "0%", "101%", "2000", "-1", "", "80 %%", "nan%", "all"])
def test_shares_that_are_none(amount: str) -> None:
    with pytest.raises(HotsetError):
        parse_share(amount, 1000)


@pytest.mark.parametrize("time", ["", "0", "-1s", "1w", "nan", "inf", "h", float("nan"), float("inf"), -1, 0])
def test_times_that_are_none(time: float | str) -> None:
    with pytest.raises(ArgumentError):
        parse_seconds(time)


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "0"},
        {"host": "0x0"},
        {"host": "0.0"},
        {"host": "::ffff:0.0.0.0"},
        {"host": ""},
        {"host": "a b"},
        {"host": "evil\r\nX: y"},
        {"port": 0},
        {"port": 65536},
        {"memory": "120 PB"},
        {"spill": "/path/that/does/not/exist"},
        {"spill": "/dev/null"},
        {"spill": "/proc"},
        {"level": "loud"},
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(HotsetError):
        Options.parse(**wrong)


def test_options_reach_the_daemon_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotset.server import __main__ as daemon

    options = Options.parse(host="::1", port=50060, memory="1MiB", spill=str(tmp_path), level="debug")
    monkeypatch.setattr("sys.argv", ["server", options.argument()])
    monkeypatch.setattr(daemon, "serve", lambda told: told)
    assert daemon.main() == options
    assert options.is_loopback
    assert Options.parse(host="127.1").is_loopback
    assert not Options.parse(host="192.0.2.1").is_loopback


# The claim


def test_a_port_is_claimed_once_and_found_while_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    with place.claim(50099) as claim, place.ending(50099) as has_gone:
        assert place.is_claimed(50099)
        assert place.find(50099) is None  # it has not said where it is
        with pytest.raises(place.ServerError, match="runs already"), place.claim(50099):
            pass
        here = place.Place(os.getpid(), "127.0.0.1", 50099, None, "info")
        claim.publish(here)
        assert place.find(50099) == here
        assert place.read_token(50099) == claim.token
        assert not has_gone()
    assert not place.is_claimed(50099)
    assert place.read_token(50099) == ""
    assert os.listdir(tmp_path / "runtime") == []
    with place.claim(50099):
        pass


def test_gc_leaves_living_servers_alone_and_clears_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    os.close(place.open_log(50097))
    os.utime(tmp_path / "runtime" / "server-50097.log", (0, 0))
    (tmp_path / "runtime" / "server-50097.token").touch(0o600)
    servers.set_limit(50097, 1 << 20)
    others = tmp_path / "runtime" / "server-x.json"
    others.touch(0o600)
    with place.claim(50098):
        os.close(place.open_log(50098))
        os.utime(tmp_path / "runtime" / "server-50098.log", (0, 0))
        servers.set_limit(50098, 1 << 20)
        before = set(os.listdir(tmp_path / "runtime"))
        assert len(leftover_files.collect()) == 3
        left = set(os.listdir(tmp_path / "runtime"))
        assert before - left == {f"server-50097.{kind}" for kind in ("token", "log", "ledger")}
        assert place.is_claimed(50098)
    assert len(leftover_files.collect()) == 2
    assert os.listdir(tmp_path / "runtime") == [others.name]
    assert leftover_files.collect() == []


def test_gc_needs_no_room_where_it_is_to_make_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    os.close(place.open_log(50097))
    servers.set_limit(50097, 1 << 20)

    def collect() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # no byte more, in any file
        assert len(leftover_files.collect()) == 1

    in_child(collect)
    assert os.listdir(tmp_path / "runtime") == ["server-50097.log"]


def test_a_server_without_room_for_its_token_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))

    def claim() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="too large"), place.claim(50097):
            pass

    in_child(claim)
    assert os.listdir(tmp_path / "runtime") == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', json.dumps({"x": 1}).encode()])
def test_what_is_no_place_is_no_server(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    with place.claim(50098):
        (tmp_path / "runtime" / "server-50098.json").write_bytes(content)
        assert place.find(50098) is None


def test_a_session_that_cannot_be_destroyed_keeps_nobody_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    service = SessionService(LOCAL, None)
    service.begin()
    for name in ("one", "two"):
        service.create({"name": name, "memory": "1MiB"})
    destroy = sessions.destroy

    def fail_first(session: Session) -> int:
        if session.name == "one":
            raise OSError("the disk is gone")
        return destroy(session)

    with monkeypatch.context() as broken:
        broken.setattr(sessions, "destroy", fail_first)
        service.end()
    assert [session.name for session in sessions.sessions()] == ["one"]
    service.end()
    assert sessions.sessions() == []


def test_a_service_that_has_ended_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    service = SessionService(LOCAL, None)
    service.begin()
    service.create({"name": "one", "memory": "1MiB"})
    service.end()
    service.end()
    with pytest.raises(Refusal) as caught:
        service.create({"name": "two"})
    assert caught.value.status == 409
    assert sessions.sessions() == []
    assert os.listdir(tmp_path / "runtime") == []
