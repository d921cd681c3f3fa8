"""Budgets: quotas, and that no job, cache or session holds more than its quotas say."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import equal_batches, is_a_sentence, often
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kills import child, kill, lingering
from samples import jpeg_like, kilobyte, mapping
from session_places import MIB, N, read_all
from sources import Samples
from stores import store_of

import hotset
from hotset import HotsetWarning
from hotset.dataset.dataset_proxy import current_of
from hotset.errors import SessionError
from hotset.session import server_quota as servers
from hotset.session import sessions
from hotset.session.quota import Quota
from hotset.session.reclaim import reclaim
from hotset.session.reports import report
from hotset.session.session_cache import SessionCacheHandle
from hotset.session.session_definition import open_quota

pytestmark = pytest.mark.usefixtures("runtime", "patient")

PORT = 50123


# Quotas


def quota(runtime: Path, file: str = "1.session", limit: int = 1000) -> Quota:
    folder = os.open(runtime, os.O_RDONLY)
    try:
        if not (runtime / file).exists():
            Quota.create(folder, file, {"for": "tests"}, limit)
        return Quota(folder, file)
    finally:
        os.close(folder)


def test_a_ledger_bounds_its_members_together(runtime: Path) -> None:
    with contextlib.closing(quota(runtime)) as book, contextlib.closing(quota(runtime)) as same:
        one, two = book.enter(11), same.enter(22)
        assert (book.enter(22), same.members()) == (two, {11: one, 22: two})
        assert book.take(one, 600)
        assert not same.take(two, 401)
        assert (same.left(two), same.held) == (400, 600)
        assert same.take(two, 400)
        assert not book.take(one, 601)
        assert book.take(one, 100)
        assert same.left(two) == 900
        same.limit = 50  # what is there stays, and nothing is added
        assert (book.left(one), book.left(two)) == (0, 0)
        assert not book.take(one, 101)
        assert book.take(one, 99)
        book.leave(two)
        assert (same.held, same.members()) == (99, {11: one})


@settings(max_examples=often(30, 300), deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 1200)), max_size=40))
@example([(0, 0, 800), (1, 0, 800)])  # each within its session's limit, and together beyond the server's
def test_no_order_of_taking_exceeds_any_limit(steps: list[tuple[int, int, int]]) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-hotset-") as place,
        contextlib.ExitStack() as s,
    ):
        path = Path(place)
        books = [s.enter_context(contextlib.closing(quota(path, f"{n}.session", 900))) for n in (1, 2)]
        for number, book in enumerate(books):
            above = quota(path, "server-1.ledger", 1500)
            book.set_parent(above, above.enter(number + 1), number + 1)
        server = s.enter_context(contextlib.closing(quota(path, "server-1.ledger")))
        rows = [[book.enter(100 + member) for member in range(3)] for book in books]
        model = [[0, 0, 0], [0, 0, 0]]
        for which, member, amount in steps:
            after = sum(model[which]) - model[which][member] + amount
            fits = after <= 900 and after + sum(model[1 - which]) <= 1500
            fits = fits or amount <= model[which][member]
            left = books[which].left(rows[which][member])
            assert books[which].take(rows[which][member], amount) == fits
            assert fits == (amount <= max(left, model[which][member]))
            model[which][member] = amount if fits else model[which][member]
            assert [book.held for book in books] == [sum(one) for one in model]
            assert server.held == sum(map(sum, model))


def test_a_ledger_is_held_by_forks_by_themselves(runtime: Path) -> None:
    with contextlib.closing(quota(runtime)) as other:
        book = quota(runtime)
        book.use()
        with lingering(lambda: None):
            assert other.in_use
            book.close()
            del book
            assert other.in_use, "the child uses it too"
        assert not other.in_use


def test_a_ledger_that_was_closed_uses_nothing(runtime: Path) -> None:
    with contextlib.closing(quota(runtime)) as other:
        book = quota(runtime)
        book.use()
        book.close()
        found = other.in_use
        del book
    assert not found


def test_a_lock_of_a_stopped_process_is_not_waited_for_for_long(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotset.session.quota._LOCK_SECONDS", 0.1)
    book = quota(runtime)

    def hold() -> None:
        held = quota(runtime).lock()
        held.__enter__()
        stack.append(held)

    stack: list[Any] = []
    with contextlib.closing(book), lingering(hold):
        assert not book.take(book.enter(1), 1)
    with contextlib.closing(quota(runtime)) as again:
        assert again.take(again.enter(1), 1), "the lock ends with its holder"


def test_511_caches_are_one_too_many_in_a_sentence(runtime: Path) -> None:
    with contextlib.closing(quota(runtime)) as book:
        for member in range(1, 511):
            book.enter(member)
        with pytest.raises(SessionError, match="510") as refused:
            book.enter(511)
        assert is_a_sentence(str(refused.value))


# Quotas


def fill_through(key: str, make: Any, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(400)
    cached = hotset.cache(Samples(make, 400), session="a", key=key)
    current_of(cached).tell = lambda told: None
    for i in order.tolist():
        equal_batches(cached[i], make(i))
    cached.close()


@pytest.mark.parametrize("spill", [False, True])
def test_caches_of_a_session_never_hold_more_than_its_memory(spill: bool, disk: str) -> None:
    memory = 300_007
    session = sessions.create("a", memory=memory, spill=disk if spill else None)
    makes: dict[str, Any] = {"one": kilobyte, "two": jpeg_like, "three": mapping}
    for key, make in makes.items():  # none comes too late for any room at all
        with hotset.cache(Samples(make, 400), session="a", key=key) as cached:
            equal_batches(cached[0], make(0))
    orders = random.Random(3)
    wanted = [(key, make, seed) for seed in range(2) for key, make in makes.items()]
    pids = [child(functools.partial(fill_through, *one)) for one in wanted]
    deadline, highest = time.monotonic() + 100, 0
    try:
        while pids and time.monotonic() < deadline:
            with open_quota(session) as book, book.lock():  # else room may pass on between two caches' counts
                highest = max(highest, report(session).memory)
            if len(pids) == 6 and highest > memory // 3:
                kill(pids.pop(orders.randrange(6)))
            pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.002)
    finally:
        for pid in pids:
            kill(pid)
    found = report(session)
    highest = max(highest, found.memory)
    assert 0.8 * memory < highest <= memory
    assert found.memory <= memory
    assert not found.in_use
    with open_quota(session) as book:
        assert found.memory <= book.held <= memory
    assert bool(found.disk) == spill
    assert all(cache.state == "ok" and cache.cached for cache in found.caches)
    if spill:
        assert min(cache.cached for cache in found.caches) > 300
    for key, make in makes.items():
        with hotset.cache(Samples(make, 400), session="a", key=key) as cached:
            assert cached.check() == []


def test_a_caches_own_memory_and_spill_narrow_its_share(disk: str) -> None:
    session = sessions.create("a", memory=MIB, spill=disk)
    with hotset.cache(Samples(kilobyte, N), session="a", memory="10KiB", key="small") as cached:
        read_all(cached, kilobyte)
        assert store_of(cached).segment.taken <= 10 << 10
        assert 0 < cached.stats().spilled < N
    with hotset.cache(Samples(kilobyte, N), session="a", memory="10KiB", spill=False, key="no") as cached:
        with pytest.warns(HotsetWarning, match="no more fit"):
            read_all(cached, kilobyte)
        assert cached.stats().spilled == 0
        assert cached.stats().cached < N
    found = report(session)
    assert [cache.disk > 0 for cache in found.caches] == [cache.spilled > 0 for cache in found.caches]
    assert found.memory <= 20 << 10


def test_a_servers_budget_bounds_its_sessions_together(disk: str) -> None:
    servers.set_limit(PORT, 60_000)
    assert servers.limit(PORT) == 60_000
    found = [sessions.create(name, memory=50_000, spill=disk, server=PORT) for name in "ab"]
    caches = [hotset.cache(Samples(kilobyte, 60), session=name) for name in "ab"]
    for cached in caches:
        read_all(cached, kilobyte)
    held = [report(session).memory for session in found]
    assert 40_000 < held[0] <= 50_000
    assert 50_000 < sum(held) <= 60_000
    sessions.destroy(found[0])
    with pytest.warns(HotsetWarning, match="was destroyed"):
        read_all(caches[0], kilobyte)
    caches[1].clear()
    room = store_of(caches[1]).allocator
    room.reopen()  # as after half a second
    read_all(caches[1], kilobyte)
    assert 40_000 < report(found[1]).memory <= 50_000, "what is destroyed is free for others"
    for cached in caches:
        cached.close()
    sessions.destroy(found[1])
    servers.drop(PORT)
    assert servers.limit(PORT) is None


def test_a_job_that_finds_a_session_as_it_is_made_is_bounded_by_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers.set_limit(PORT, 1000)
    write_down = sessions.write_down

    def write_down_and_use(folder: int, session: Any) -> None:
        write_down(folder, session)
        with open_quota(session) as book:
            took.append(book.take(book.enter(1), 900))
            took.append(book.take(book.enter(1), 1001))

    took: list[bool] = []
    monkeypatch.setattr(sessions, "write_down", write_down_and_use)
    sessions.create(memory=MIB, server=PORT)
    assert took == [True, False]


def test_a_session_that_its_server_has_no_place_for_is_not_made(runtime: Path) -> None:
    servers.set_limit(PORT, 1000)
    with contextlib.closing(quota(runtime, f"server-{PORT}.ledger")) as book:
        for member in range(1, 511):
            book.enter(member)
        with pytest.raises(SessionError, match="510"):
            sessions.create("a", memory=MIB, server=PORT)
        assert sessions.sessions() == []


def test_a_session_that_cannot_be_made_takes_no_place_of_its_server(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    servers.set_limit(PORT, 1000)
    monkeypatch.setattr(sessions, "write_down", refuse)
    with pytest.raises(SessionError, match="No space left"):
        sessions.create("a", memory=MIB, server=PORT)
    with contextlib.closing(quota(runtime, f"server-{PORT}.ledger")) as book:
        assert book.members() == {}


def test_a_session_without_an_amount_takes_its_servers() -> None:
    servers.set_limit(PORT, 12_345)
    servers.set_limit(PORT, 54_321)
    assert sessions.create(server=PORT).memory == 54_321
    assert sessions.create().memory > MIB


def test_what_is_cleared_is_free_for_others() -> None:
    def cached_by_the_second() -> int:
        sessions.create("a", memory=45_000)
        with (
            hotset.cache(Samples(kilobyte, N), session="a", key="one") as one,
            hotset.cache(Samples(kilobyte, N), session="a", key="two") as two,
        ):
            read_all(one, kilobyte)
            one.clear()
            current_of(two).tell = lambda told: None
            read_all(two, kilobyte)
            return two.stats().cached

    assert cached_by_the_second() == N


def test_a_straggler_of_a_dropped_cache_takes_nothing_from_the_next_in_its_row() -> None:
    session = sessions.create("a", memory=1000)
    with open_quota(session) as book, contextlib.closing(SessionCacheHandle(session.number, 11)) as straggler:
        row = book.enter(11)
        assert straggler.take(300)
        book.leave(row)
        assert book.enter(22) == row
        assert not straggler.take(400)
        assert book.bytes_of(row) == 0


def test_where_another_process_has_made_room_meanwhile_it_is_looked_for_again() -> None:
    session = sessions.create("a", memory=1000)
    with open_quota(session) as book, contextlib.closing(SessionCacheHandle(session.number, 11)) as mine:
        book.enter(11)
        theirs = book.enter(22)
        assert mine.join()
        assert book.use(theirs)
        assert book.take(theirs, 500)
        assert mine.left() == 500
        assert mine.make_room(2000) is None, "what is used is not dropped"
        book.leave(theirs)
        assert mine.make_room(2000) == ""
        assert mine.left() == 1000
        assert mine.make_room(2000) is None, "nothing has changed since"


def test_a_straggler_of_a_destroyed_session_takes_nothing_from_the_next() -> None:
    servers.set_limit(PORT, 1000)
    first = sessions.create("first", memory=1000, server=PORT)
    with open_quota(first) as straggler:
        row = straggler.enter(1)
        sessions.destroy(first)
        with open_quota(sessions.create("second", memory=1000, server=PORT)) as book:
            assert book.take(book.enter(2), 900)
            straggler.take(row, 1)
            parent = book._parent
            assert parent is not None
            assert parent[0].held == 900
            straggler.leave(row)
            assert parent[0].held == 900


def test_a_cache_that_takes_the_row_of_one_that_is_being_dropped_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = sessions.create("a", memory=MIB)
    with open_quota(session) as book:
        assert book.take(book.enter(11), 500)  # as a process leaves it that dies before its cache has a name
    leave = Quota.leave

    def leave_and_make(self: Quota, row: int) -> None:
        leave(self, row)
        made.append(hotset.cache(Samples(kilobyte, N), session="a"))

    made: list[Any] = []
    monkeypatch.setattr(Quota, "leave", leave_and_make)
    assert [each.bytes for each in reclaim(session, 1)] == [500]
    with made[0], open_quota(session) as book:
        assert len(book.members()) == 1
        assert book.unused() == []
