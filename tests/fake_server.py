"""A stand-in for the cache server: its HTTP API over made-up sessions that fill as one watches.

Time is a tick for each look at ``/api/status``, two seconds each, so that what a test sees does not depend on
how long it took. The page gets the policy that the real server sends, and ``require-trusted-types-for``
beside it, under which putting text in as HTML raises an error. Every request is kept, for tests that ask what
was sent. Run as a program it serves the page for a look by eye::

    python tests/fake_server.py 50099
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import hotset
from hotset.server.request_auth import content_policy

PAGE = Path(hotset.__file__).parent / "server" / "page.html"
GIB = 1 << 30
EPOCH = time.time()


class Request(NamedTuple):
    method: str
    path: str
    authorization: str | None
    cookie: str | None


def cache(number: int, name: str, samples: int, row: int, **changed: Any) -> dict[str, Any]:
    """One CACHE of the API, empty; ``row`` bytes for each sample."""
    return {
        "id": number,
        "name": name,
        "samples": samples,
        "cached": 0,
        "spilled": 0,
        "memory": 0,
        "disk": 0,
        "limit": samples * row,
        "mean_bytes": float(row),
        "hits": 0,
        "peer_hits": 0,
        "misses": 0,
        "hit_rate": None,
        "fill_seconds": 0.0,
        "waited_seconds": 0.0,
        "processes": 0,
        "state": "ok",
        "process": None,
    } | changed


def machine(name: str, host: str, capacity: int, **changed: Any) -> dict[str, Any]:
    """One MACHINE of the API: this one, unless something is said to have passed."""
    counted = ("received", "bytes", "stored", "unsound", "failures")
    about = {"name": name, "host": host, "capacity": capacity, "me": not changed, "latency": None}
    return about | dict.fromkeys(counted, 0 if changed else None) | changed


def session(
    number: int, name: str, limit: int, caches: list[dict[str, Any]], **changed: Any
) -> dict[str, Any]:
    """One SESSION of the API, with the sums over its caches."""
    return {
        "number": number,
        "name": name,
        "memory": {"limit": limit, "used": sum(c["memory"] for c in caches)},
        "disk": {"folder": None, "used": sum(c["disk"] for c in caches)},
        "persist": False,
        "ttl": None,
        "created": EPOCH,
        "in_use": any(c["processes"] for c in caches),
        "server": None,
        "caches": caches,
        "machines": [],
    } | changed


def _filled(made: dict[str, Any], cached: int, spilled: int = 0) -> dict[str, Any]:
    row = int(made["mean_bytes"])
    hits, misses = max(0, cached * 3 - made["samples"]), cached
    return made | {
        "cached": cached,
        "spilled": spilled,
        "memory": (cached - spilled) * row,
        "disk": spilled * row,
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "fill_seconds": misses / 790,
        "waited_seconds": misses / 4100,
    }


def moving(tick: int) -> list[dict[str, Any]]:
    """Three sessions: one fills, spills and is shared, one is warm, one has not been used yet."""
    train = cache(2_918_374_511, "ImageFolder", 1_281_167, 150_528, processes=9)
    done = min(1_281_167, 640_000 + 9_000 * tick)
    train = _filled(train, done, spilled=max(0, done - 854_000)) | {"limit": 120 * GIB}
    sent = train["hits"] // 5
    train |= {"hits": train["hits"] - sent, "peer_hits": sent}
    valid = _filled(cache(77_120_034, "ImageFolder", 50_000, 150_528, processes=3), 50_000)
    warm = _filled(cache(1_045_882_310, "CIFAR10", 50_000, 3_073, processes=4), 50_000)
    warm |= {
        "hits": 400_000 + 50_000 * tick,
        "hit_rate": (400_000 + 50_000 * tick) / (450_000 + 50_000 * tick),
    }
    stale = _filled(cache(3_300_118_942, "Decathlon", 484, 90_177_536, state="invalidated"), 212)
    sweep = session(88_120, "sweep", 4 * GIB, [warm, stale], ttl=86_400.0, created=EPOCH - 7_000)
    sweep["memory"]["limit"] = 24 * GIB
    image = session(
        3_141_592_653, "imagenet", 160 * GIB, [train, valid], created=EPOCH - 90_000, server=50052
    )
    image["disk"] |= {"folder": "/nvme/hotset"}
    image["machines"] = [
        machine("gpu1-5e0c71aa", "10.0.0.11", 160 * GIB),
        _neighbour("gpu2-93b41f08", "10.0.0.12", sent * 5 // 9, done // 40),
        _neighbour("gpu3-0d6ea2c4", "10.0.0.13", sent - sent * 5 // 9, done // 45)
        | {"failures": 3, "latency": 0.00587},
    ]
    return [
        image | {"persist": True},
        sweep,
        session(7, "eval", 8 * GIB, [], created=EPOCH - 60, ttl=1_800.0),
    ]


def job() -> dict[str, Any]:
    """The cache of a job without a session."""
    return _filled(cache(7_341, "VOCDetection", 50_000, 150_528, processes=3, in_use=True), 36_000)


def _neighbour(name: str, host: str, sent: int, stored: int) -> dict[str, Any]:
    sizes = {"received": sent, "bytes": 150_528 * sent, "stored": stored}
    return machine(name, host, 160 * GIB, latency=0.00414, **sizes)


def _wave(number: int, tick: int) -> float:
    return math.sin(tick / 9 + number % 7) + 0.4 * math.sin(tick / 2.3 + number % 5)


def history(tick: int, sessions: list[dict[str, Any]], points: int = 300) -> dict[str, Any]:
    """The HISTORY of the API up to a tick; the session called ``eval`` has done nothing yet."""
    ticks = range(tick - points + 1, tick + 1)
    told: dict[str, Any] = {}
    for made in sessions:
        number = made["number"]
        quiet = made["name"] == "eval"
        warm = [(not quiet and made["name"] != "imagenet") or t > -60 for t in ticks]
        speed = [
            None if quiet else (14_000 if w else 1_500) * (1 + 0.12 * _wave(number, t))
            for t, w in zip(ticks, warm, strict=True)
        ]
        waited = [
            None if quiet else max(0.0, (0.02 if w else 0.8) * (1 + 0.3 * _wave(number + 1, t)))
            for t, w in zip(ticks, warm, strict=True)
        ]
        told[str(number)] = {
            "samples_per_second": speed,
            "waited": waited,
            "hit_rate": [None if quiet else 1.0 if w else 0.0 for w in warm],
            "cached": [sum(c["cached"] for c in made["caches"])] * points,
            "memory": [made["memory"]["used"]] * points,
            "disk": [made["disk"]["used"]] * points,
        }
    return {"interval": 2.0, "times": [EPOCH + 2 * t for t in ticks], "sessions": told}


class FakeServer:
    """A server on a port of the loopback interface, in a thread; a context manager.

    Args:
        port: 0 for any that is free.
        sessions: they stand still; without them those of :func:`moving` move.
        guarded: everything but the page needs the token, as on a host that others reach.
    """

    def __init__(
        self, port: int = 0, sessions: list[dict[str, Any]] | None = None, guarded: bool = False
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.still = sessions
        self.guarded = guarded
        self.spill = True
        self.jobs: list[dict[str, Any]] = []
        self.tick = 0
        self.destroyed: set[int] = set()
        self.requests: list[Request] = []
        self.port = port
        self.start()

    def start(self) -> None:
        """Answer from now on, on the port that it had."""
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End as a server that was killed does: the port refuses."""
        self._http.shutdown()
        self._thread.join(10)
        self._http.server_close()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def sessions(self) -> list[dict[str, Any]]:
        now = moving(self.tick) if self.still is None else self.still
        return [made for made in now if made["number"] not in self.destroyed]

    def status(self) -> dict[str, Any]:
        now = self.sessions()
        spill = {"folder": "/nvme/hotset", "used": sum(s["disk"]["used"] for s in now), "free": 700 * GIB}
        return {
            "version": "0.1.0",
            "pid": 4321,
            "host": "127.0.0.1",
            "port": self.port,
            "started": EPOCH - 93_600,
            "log": "/dev/shm/hotset-1000/server-50052.log",
            "memory": {"limit": 200 * GIB, "used": sum(s["memory"]["used"] for s in now)},
            "spill": spill if self.spill else None,
            "sessions": now,
            "jobs": self.jobs,
        }


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._keep()
        if self.path == "/":
            self._answer(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.fake.guarded and not self._trusted():
            self._json(401, {"error": "This server answers only who knows its token."})
        elif self.path == "/api/status":
            self.fake.tick += 1
            self._json(200, self.fake.status())
        elif self.path == "/api/history":
            self._json(200, history(self.fake.tick, self.fake.sessions()))
        else:
            self._json(404, {"error": f"There is nothing at {self.path}."})

    def do_DELETE(self) -> None:
        self._keep()
        which = self.path.removeprefix("/api/sessions/")
        found = [made for made in self.fake.sessions() if str(made["number"]) == which]
        if not self._trusted():
            self._json(401, {"error": "That is not this server's token."})
        elif not found:
            self._json(404, {"error": f"There is no session {which}."})
        else:
            self.fake.destroyed.add(found[0]["number"])
            self._json(200, {"freed": found[0]["memory"]["used"] + found[0]["disk"]["used"]})

    def _keep(self) -> None:
        sent = self.headers
        self.fake.requests.append(Request(self.command, self.path, sent["Authorization"], sent["Cookie"]))

    def _trusted(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {self.fake.token}"

    def _json(self, code: int, value: object) -> None:
        self._answer(code, json.dumps(value).encode(), "application/json")

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        policy = content_policy(PAGE.read_text(encoding="utf-8"))
        self.send_header("Content-Security-Policy", policy + "; require-trusted-types-for 'script'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        # A connection kept open would outlive the server's end, and a page would see it answer.
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with FakeServer(int(sys.argv[1]) if len(sys.argv) > 1 else 0) as fake:
        fake.jobs = [job()]
        print(fake.url, "token", fake.token, flush=True)
        threading.Event().wait()
