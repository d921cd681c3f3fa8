"""A machine's node by itself: it outlives what goes wrong, and makes its session anew."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import eventually
from rich.console import Console

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from hotset.cli.cluster import described
from hotset.cluster import node as nodes
from hotset.cluster import ray_join
from hotset.cluster.directory import Described, Directory, HeartbeatReply
from hotset.cluster.membership import read_membership
from hotset.cluster.node import Node
from hotset.cluster.store_service import StoreServices
from hotset.session import sessions


class Alone:
    """A directory that knows of one machine, the one that beats."""

    def __init__(self) -> None:
        self.beats = 0

    def beat(self, said: Any) -> HeartbeatReply:
        self.beats += 1
        return HeartbeatReply({said.member.name: said.member.key}, (said.member,), (), (), (), {})

    def goes_on(self) -> bool:
        begun = self.beats
        return eventually(lambda: self.beats > begun + 2)


@pytest.mark.parametrize("of", [(nodes, "open_quota"), (StoreServices, "end_leases"), (Alone, "beat")])
def test_a_node_outlives_what_goes_wrong_in_a_beat(
    of: tuple[Any, str], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.02)
    post, failures = Alone(), []

    def fail(*_: Any) -> Any:
        failures.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with Node("one", 1 << 20, "127.0.0.1", lambda said: post.beat(said)) as made:
        assert post.goes_on()
        session = made.session
        with monkeypatch.context() as patch:
            patch.setattr(*of, fail)
            assert eventually(lambda: len(failures) > 2)
            assert of[1] == "beat" or post.goes_on(), "it is heard all the same"
        assert post.goes_on()
        assert made.session == session, "nothing has happened to it"
        assert made.member.capacity > 0
        made.destroy()


@contextlib.contextmanager
def node_with_an_error(
    monkeypatch: pytest.MonkeyPatch, of: tuple[Any, str], error: Exception, beat: Any
) -> Iterator[Node]:
    """A node of which one function raises at each call, once it knows which machines are there."""

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(*of, fail)
    with Node("one", 1 << 20, "127.0.0.1", beat) as made:
        assert eventually(lambda: read_membership(made.session.number) is not None)
        yield made
        made.destroy()


def test_machines_hear_of_a_node_whose_counters_cannot_be_read(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, error = Directory(lambda: 1), ValueError("a file that is cut off")
    with node_with_an_error(monkeypatch, (nodes, "read_peer_stats"), error, directory.beat) as made:
        [said] = directory.status()
        assert said["name"] == made.member.name
        assert said["error"] == "ValueError: a file that is cut off"
        printed = io.StringIO()
        Console(file=printed, width=200).print(described({"one": [said]}))
        assert f"{made.member.name}: ValueError: a file that is cut off" in printed.getvalue()


class Handle:
    """An actor of Ray's, as far as its methods are called: each call gives what it returned, or raises."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(getattr(self._of, name)))


@pytest.mark.parametrize("broken", ["directory", "node", "beat", "nothing"])  # "node": it does not answer
def test_a_program_that_joins_is_told_why_its_machine_is_alone(
    broken: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on after a bounded time."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer, timeout: answer))
    monkeypatch.setattr(ray_join, "_READY_SECONDS", 0.5)
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.02)
    directory = Directory(lambda: 1)

    def beat(said: Any) -> HeartbeatReply:
        if broken == "beat":
            raise TimeoutError("no answer within 5 s")
        return directory.beat(said)

    with Node("one", 1 << 20, "127.0.0.1", beat) as made:
        handle = SimpleNamespace(trouble=lambda: made.trouble) if broken != "node" else None
        answers = {"directory": None, "nothing": SimpleNamespace(lack=lambda meeting: 0)}
        asked = Handle(answers.get(broken, directory))
        joined = ray_join.Joined("one", made.session.number, asked, node=Handle(handle))
        assert eventually(lambda: broken == "beat" or read_membership(made.session.number) is not None)
        why = joined.wait_for_all("there")
        made.destroy()
    if broken == "directory":
        assert why == "the directory of the session does not answer"
    elif broken == "node":
        assert why == "1 of the machines have not made their part of the cache"
    elif broken == "beat":
        assert why is not None
        assert "does not know the other machines (TimeoutError: no answer within 5 s)" in why
    else:
        assert why is None


class Strange(Alone):
    """One that tells of a cache that cannot be made here."""

    def beat(self, said: Any) -> HeartbeatReply:
        return super().beat(said)._replace(caches=(Described("there", 10, {}, {}),))


def test_a_node_that_cannot_make_a_cache_knows_who_is_there(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("whatever the import of a sample's type may raise")
    with node_with_an_error(monkeypatch, (Node, "_make"), error, Strange().beat):
        pass


def test_a_session_that_has_expired_is_made_anew(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(nodes, "_TTL", 0.1)
    post = Alone()
    with Node("one", 1 << 20, "127.0.0.1", post.beat) as made:
        assert eventually(lambda: read_membership(made.session.number) is not None)
        first, member = made.session, made.member
        membership = read_membership(first.number)
        assert eventually(sessions.expire), "nobody has used it"
        assert eventually(lambda: made.session != first)
        assert sessions.find("one") == made.session
        assert made.session.memory == first.memory
        assert eventually(lambda: made.member == member), "the same machine, which holds as much"
        assert eventually(lambda: read_membership(made.session.number) == membership)
        made.destroy()
        assert post.goes_on()
        assert sessions.sessions() == [], "that was on purpose"
