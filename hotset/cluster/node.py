"""The node: what one machine does for a session that it shares with others.

It owns the session on its machine: it makes the session if there is none, and makes it again if it is gone.
It makes this machine's part of each cache that any machine has, and serves its records. Once a second it
learns from the directory which machines there are, and writes that to a file for the machine's processes
(:mod:`hotset.cluster.membership`).

It runs in an actor of Ray's on that machine, which Ray starts again when it dies. The session, its content,
the machine's name and its keys stay; only the port changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from hotset._warnings import printable
from hotset.cluster.directory import Described, Heartbeat, HeartbeatReply
from hotset.cluster.membership import Keys, Member, Membership, read_membership, write_membership
from hotset.cluster.peer_stats import make_peer_stats, read_peer_stats
from hotset.cluster.server import RecordServer
from hotset.cluster.store_service import StoreService, StoreServices
from hotset.errors import SegmentError, SessionError
from hotset.session import reports, sessions
from hotset.session.find_or_create import CacheLocation, find_or_create_in_session
from hotset.session.runtime_dir import path_of, runtime, runtime_folder
from hotset.session.session_cache import SessionCacheHandle
from hotset.session.session_definition import Session, open_quota, session_of
from hotset.session.session_files import caches_of
from hotset.store import memory_limits
from hotset.store.format import DESTROYED, Live
from hotset.store.leaves.schema import Schema
from hotset.store.ring import attach_store
from hotset.store.spill import SpillTo
from hotset.store.store import Store

__all__ = ["Node", "find_or_make", "fingerprint_of"]

BEAT_SECONDS = 1.0
_JOIN_SECONDS = 0.2  # between heartbeats until it knows of the others
_TTL = 3600.0
# Characters of a host's name: with what is drawn behind it, as many as a row of the statistics file has.
_LONGEST = 39
# How long after another machine's last request the node counts as a user of a cache.
_UNASKED_SECONDS = 60.0


def fingerprint_of(about: dict[str, Any]) -> bytes:
    """The 16 bytes that identify a cache in its session, from the metadata: of fingerprint, or user's key."""
    text = str(about["fingerprint"]).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class _Part(NamedTuple):
    """This machine's part of a cache, as its node has it."""

    described: Described
    use: SessionCacheHandle
    service: StoreService


class Node:
    """A machine's part in a session that several share; a context manager.

    Args:
        memory: bytes that it may hold here, if it has to be made; None: half of what is free.
        host: this machine's address in the cluster, to which alone it is bound.
        beat: sends a heartbeat to the directory, and returns the reply.

    Attributes:
        session: on this machine; another one once it was made again.
        member: this machine, as the heartbeat describes it.
        trouble: what the last heartbeat's tasks could not do, and why; empty if all were done.

    Raises:
        SessionError: the session is not there, and cannot be made.
        OSError: nothing can be served from that address.
    """

    def __init__(
        self, name: str, memory: int | None, host: str, beat: Callable[[Heartbeat], HeartbeatReply]
    ) -> None:
        self._name = name
        self.session = find_or_make(name, memory)
        known = read_membership(self.session.number)
        new = f"{socket.gethostname()[:_LONGEST]}-{secrets.token_hex(4)}"
        self._me = known.me if known is not None else new
        self._keys = known.keys if known is not None else Keys.new()
        self._membership = known
        self._beat = beat
        self._services = StoreServices()
        self._wanted: tuple[str, ...] = ()
        self._parts: dict[str, _Part] = {}  # by meeting
        members = known.members if known is not None else ()
        self._knows = {self._me: self._keys.public, **{m.name: m.key.encode() for m in members}}
        self._allowed = set(self._knows.values())  # only added to: a machine that left may come back
        make_peer_stats(self.session.number)
        self._serve_existing_caches()
        self._server = RecordServer(host, self._services, self._keys, self._allowed)
        self.member = Member(
            self._me, host, self._server.endpoint, self._keys.public.decode(), self._capacity()
        )
        self._has_ended = False  # the session, on purpose
        self.trouble = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotset node", daemon=True)
        self._thread.start()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; the session stays."""
        self._stop.set()
        self._thread.join()
        self._server.close()
        self._services.close()
        for part in self._parts.values():
            part.use.close()

    def destroy(self) -> int:
        """Destroy the session on this machine; it is not created again. Returns the bytes freed."""
        self._has_ended = True
        with contextlib.suppress(SessionError):
            return sessions.destroy(self.session)
        return 0

    def status(self) -> dict[str, Any]:
        """Counters of what the node has served, its session holds, and its processes got from others."""
        said: dict[str, Any] = {"pid": os.getpid(), "served": asdict(self._server.served)}
        with contextlib.suppress(OSError):
            report = reports.report(self.session)
            caches = report.caches
            said |= {
                "cached": sum(cache.cached for cache in caches),
                "stored": round(sum(cache.mean_bytes * cache.cached for cache in caches)),
                "hits": sum(cache.hits for cache in caches),
                "misses": sum(cache.misses for cache in caches),
                "memory": report.memory,
            }
            peers = read_peer_stats(self.session.number)
            said["peers"] = {name: asdict(traffic) for name, traffic in peers.items()}
        return said

    def _capacity(self) -> int:
        """Bytes that this machine can hold: the session's limit, but no more than the machine has."""
        with contextlib.suppress(OSError):
            held = reports.report(self.session).memory
            free = min(memory_limits.headroom().bytes, memory_limits.tmpfs_free(str(runtime_folder())))
            return max(0, min(self.session.memory, held + free))
        return self.session.memory

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(0 if self._membership is None else BEAT_SECONDS):
            failed = []
            for task in (self._services.end_leases, self._keep_session, self._release_unused, self._exchange):
                # Each by itself, whatever it raises (no descriptors, say): the next beat tries it again.
                # While there is no directory, what was known last holds.
                try:
                    task()
                except Exception as error:
                    failed.append(_described(error))
            self.trouble = "; ".join(failed)
            if self._membership is None:
                self._stop.wait(_JOIN_SECONDS)

    def _is_there(self) -> bool:
        """Whether the session exists; takes over its new size if it was resized."""
        with contextlib.suppress(SessionError), open_quota(self.session) as quota:
            session = session_of(quota)
            if session != self.session:
                self.session = session
                self.member = self.member._replace(capacity=self._capacity())
            return True
        return False

    def _release_unused(self) -> None:
        """Keep in use only those caches that other machines ask for: an unused one makes room for others.

        A cache that has made room is made anew, empty, when the directory says that it is missing.
        """
        now = time.monotonic()
        for meeting, part in list(self._parts.items()):
            if part.service.store.segment.live[Live.INVALIDATED] == DESTROYED:
                self._services.drop(part.service.cache.fingerprint)
                part.use.close()
                del self._parts[meeting]
            elif now - part.service.asked < _UNASKED_SECONDS:
                part.use.join()
            else:
                part.use.release()

    def _keep_session(self) -> None:
        """Make the session anew, empty, if it is gone and was not destroyed on purpose."""
        if self._is_there():
            return
        self.member = self.member._replace(capacity=0)  # with the next heartbeat it owns nothing
        if self._has_ended:
            return
        session = find_or_make(self._name, self.session.memory, like=self.session)
        make_peer_stats(session.number)
        if self._membership is not None:
            write_membership(session.number, self._membership)
        self.session = session
        parts, self._parts = self._parts, {}
        self._services.retire()
        for part in parts.values():
            part.use.close()
        for part in parts.values():
            with contextlib.suppress(Exception):
                self._make(part.described)  # else the directory says with the next beat that it is missing
        self.member = self.member._replace(capacity=self._capacity())

    def _exchange(self) -> None:
        self._apply(self._beat(self._heartbeat()))

    def _heartbeat(self) -> Heartbeat:
        parts = self._parts
        news = tuple(parts[meeting].described for meeting in self._wanted if meeting in parts)
        clears = {meeting: part.service.clears for meeting, part in parts.items()}
        try:
            status = self.status()
        except Exception as error:  # counters are for people: machines hear of each other without them
            served = asdict(self._server.served)
            status = {"pid": os.getpid(), "served": served, "error": _described(error)}
        return Heartbeat(self.member, frozenset(self._knows), tuple(parts), news, clears, status)

    def _apply(self, heard: HeartbeatReply) -> None:
        # First: with the next beat this node says which keys it lets in, and is asked from then on.
        self._knows = {name: key.encode() for name, key in heard.keys.items()}
        self._allowed |= set(self._knows.values())
        self._wanted = heard.unknown
        for described in heard.caches:
            with contextlib.suppress(Exception):  # of types that this process cannot import, say
                self._make(described)
        for meeting, clears in heard.clears.items():
            part = self._parts.get(meeting)
            # The machine that clears may have asked this one meanwhile; a clear that fails comes again.
            if part is not None and part.service.clears < clears:
                with contextlib.suppress(Exception):
                    part.service.clear(clears)
        if heard.members is None:
            return
        membership = Membership(self._me, self._keys, heard.members, heard.former)
        if membership != self._membership and self._is_there():
            write_membership(self.session.number, membership)
            self._membership = membership

    # ---- caches --------------------------------------------------------------------------------------

    def _serve_existing_caches(self) -> None:
        """Serve the caches that the session has from before."""
        with runtime() as folder:
            place = path_of(folder)
            files = sorted(caches_of(self.session.number, os.listdir(folder)))
        for file in files:
            with (
                contextlib.suppress(SegmentError, OSError),
                contextlib.closing(attach_store(f"{place}/{file}")) as store,
            ):
                about = store.segment.metadata
                if "meeting" in about:  # otherwise it is of a job on this machine alone
                    self._make(Described.of(about["meeting"], len(store), about))

    def _make(self, described: Described) -> None:
        """Make this machine's part of a cache, or find it, and serve it."""
        schema = Schema.from_json(described.schema)

        def create(place: CacheLocation) -> Store:
            about = {**described.about, "meeting": described.meeting}
            spill = SpillTo(place.folder, place.spill, keeps_all=place.persist) if place.spill else None
            return Store.create(
                schema, described.samples, place.limit, about=about, path=place.path, spill=spill
            )

        def attach(path: str) -> Store:
            store = attach_store(path)
            if store.segment.metadata.get("fingerprint") != described.fingerprint:
                store.close()
                raise SegmentError("other samples are cached there.")
            return store

        shared = find_or_create_in_session(
            self.session, described.meeting, described.about["name"], create=create, attach=attach
        )
        store, use = shared.value, shared.handle
        assert store is not None
        assert isinstance(use, SessionCacheHandle)
        store.filler.ahead = True
        store.allocator.allowance, store.allocator.knob = use, "the session's `--memory`"
        service = StoreService(store, fingerprint_of(described.about))
        self._services.add(service)
        self._parts[described.meeting] = _Part(described, use, service)


def _described(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}")


def find_or_make(name: str, memory: int | None, like: Session | None = None) -> Session:
    """The session of that name on this machine; made if it is not there, like another one if it can be."""
    with contextlib.suppress(SessionError):
        return sessions.find(name)
    if like is not None:
        with contextlib.suppress(SessionError, OSError):  # its disk may be gone as well
            return sessions.create(name, memory=memory, spill=like.spill, persist=like.persist, ttl=like.ttl)
    try:
        return sessions.create(name, memory=memory, ttl=_TTL)
    except SessionError:
        return sessions.find(name)  # another process has just made it
