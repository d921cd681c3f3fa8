"""The store in which a job keeps what its memoised functions returned: one for all of them, with one budget.

Ranks, loader workers however they were started, and all processes below one ``hotset run`` share it
(:func:`hotset.session.job.this_program`); with ``session=`` all jobs of the session do. It is found or made
when the first function is memoised, so that workers that are forked later have it, and lives as long as one
process has it. In a worker it is looked for at the first call.

The largest ``memory=`` that was given is the budget; ``spill=`` counts where the store is made.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

from hotset._warnings import warn
from hotset.dataset.attachment import Attachment
from hotset.dataset.spill_folder import spill_to
from hotset.errors import SessionError
from hotset.session.find_or_create import (
    CacheLocation,
    Shared,
    find_or_create_in_job,
    find_or_create_in_session,
)
from hotset.session.job import this_program
from hotset.session.session_definition import Session
from hotset.session.sessions import find
from hotset.store import memory_limits
from hotset.store.key_table import Counter
from hotset.store.keyed_store import KeyedStore
from hotset.store.locks import can_reopen
from hotset.units import parse_bytes

__all__ = ["MemoStats", "MemoStore", "open_store"]

_NAME = "memo"


class MemoStats(NamedTuple):
    """What a memoised function has done so far, in all processes that share its results.

    Attributes:
        calls: how often it was called.
        hits: calls that were answered from the store.
        computed: calls that ran the function.
        uncached: those of them whose result was not kept.
        entries: results in the store now.
        bytes: what their records in memory take.
        seconds: time spent in the function, summed over processes.
        seconds_saved: what the hits would have taken, at the mean time of a computation.
        audited: hits that were computed anew and compared.
    """

    calls: int
    hits: int
    computed: int
    uncached: int
    entries: int
    bytes: int
    seconds: float
    seconds_saved: float
    audited: int


class MemoStore:
    """One process's share in such a store; functions of one process that use the same store share it too.

    Args:
        memory, spill, session: as for :func:`hotset.memo`.

    Attributes:
        computing: for each sample id that this process is computing, the thread that does.
        ended: whether its session was destroyed, which the user was then told.
    """

    def __init__(self, memory: int | str, spill: str | None, session: str | int | None) -> None:
        self._users = 0
        self._key = session
        self.computing: dict[int, int] = {}
        self.ended = False
        self._process = os.getpid()
        shared = _find_or_make(memory, spill, session)
        self._attachment = Attachment(shared.value, shared.handle, "results of functions")

    def store(self) -> KeyedStore | None:
        """The store; None if there can be none, after its session was destroyed or the last user has left."""
        if self._process != os.getpid():  # what other threads of the parent compute, none computes here
            self._process, self.computing = os.getpid(), {}
        store = self._attachment.store()
        if not isinstance(store, KeyedStore):
            return None
        if not store.invalidated:
            return store
        if not self.ended:
            self.ended = True
            warn(
                f"session {self._key!r}, which keeps results of functions, was destroyed, so they are "
                "computed at each call from now on; create another with `hotset session create`, and memoise "
                "them again."
            )
        return None

    def raise_budget(self, memory: int | str) -> None:
        """Raise the budget to what another function asks for."""
        store = self.store()
        if store is not None and memory != "auto" and self._key is None:
            store.raise_limit(_bytes(memory, None))

    def enter(self) -> MemoStore:
        """Count a user."""
        self._users += 1
        return self

    def leave(self) -> None:
        """Detach when the last user leaves."""
        with _opening:  # another thread may be about to enter
            self._users -= 1
            if self._users <= 0:
                if _open.get(self._key) is self:
                    del _open[self._key]
                self._attachment.close()

    def functions(self) -> list[tuple[str, MemoStats]]:
        """The functions whose results are kept, and what each has done."""
        store = self.store()
        if store is None:
            return []
        return [(each.name, stats_of(store, each.number)) for each in store.keys.functions()]


_open: dict[str | int | None, MemoStore] = {}
_opening = threading.Lock()  # of that, and of how many users each has


def open_store(memory: int | str, spill: str | None, session: str | int | None) -> MemoStore:
    """This process's share in the store of its job, or of a session; :meth:`MemoStore.leave` gives it back.

    Raises:
        QuantityError: ``memory`` is not an amount of memory.
        SessionError: there is no such session.
    """
    with _opening:
        known = _open.get(session)
        if known is not None:
            known.raise_budget(memory)  # which notices that its session was destroyed
        if known is None or known.ended:
            known = _open[session] = MemoStore(memory, spill, session)
        return known.enter()


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()  # a thread of the parent may hold it


os.register_at_fork(after_in_child=_after_fork_in_child)


def stats_of(store: KeyedStore, number: int) -> MemoStats:
    """What the function of that number has done."""
    counted = store.keys.counted(number)
    entries, size = store.held(number)
    seconds, computed = counted[Counter.NS] / 1e9, counted[Counter.COMPUTED]
    hits = counted[Counter.HITS]
    saved = hits * seconds / computed if computed else 0.0
    calls, uncached = counted[Counter.CALLS], counted[Counter.NOT_KEPT]
    audited = counted[Counter.AUDITS]
    return MemoStats(calls, hits, computed, uncached, entries, size, seconds, saved, audited)


def _find_or_make(memory: int | str, spill: str | None, session: str | int | None) -> Shared[KeyedStore]:
    limit = _bytes(memory, None)  # raises also where another process's store is found
    found = find(session) if session is not None else None
    if not can_reopen():
        warn(
            "results of functions are not kept: /proc is not mounted here, through which processes reach "
            "shared memory; mount it (`mount -t proc proc /proc`)."
        )
        return Shared(None, None, joined=False)
    if found is not None:
        in_session = _in_session(found, memory)
        if in_session is not None:
            return in_session
    shared = find_or_create_in_job(
        _NAME,
        _NAME,
        create=lambda: _make(limit, memory, spill, None),
        attach=KeyedStore.attach,
        job=this_program(),
    )
    if shared.joined and shared.value is not None and memory != "auto":
        shared.value.raise_limit(limit)
    return shared


def _in_session(session: Session, memory: int | str) -> Shared[KeyedStore] | None:
    """The store in a session; None, with a warning, if the session cannot be used."""

    def create(location: CacheLocation) -> KeyedStore | None:
        most = location.limit if memory == "auto" else min(_bytes(memory, session), location.limit)
        return _make(most, memory, None, location)

    try:
        return find_or_create_in_session(session, _NAME, _NAME, create=create, attach=KeyedStore.attach)
    except SessionError as error:
        warn(f"results of functions are kept for this job alone, as session {session.name!r}: {error}")
    except OSError as error:
        warn(
            f"results of functions are kept for this job alone, as session {session.name!r} cannot be used: "
            f"{error}"
        )
    return None


def _bytes(memory: int | str, session: Session | None) -> int:
    free = memory_limits.headroom().bytes if session is None else session.memory
    return free // 2 if memory == "auto" else parse_bytes(memory, whole=lambda: free)


def _make(
    limit: int, memory: int | str, spill: str | None, location: CacheLocation | None
) -> KeyedStore | None:
    about = {
        "name": _NAME,
        "fingerprint": _NAME,
        "job": this_program().offers,
        "pid": os.getpid(),
        "memory": memory,
        "keyed": True,
    }
    try:
        return KeyedStore.make(
            limit,
            about=about,
            path=location.path if location is not None else None,
            spill=spill_to(_NAME, spill, location),
        )
    except (OSError, MemoryError, ValueError, OverflowError) as error:
        warn(
            f"results of functions are not kept, as no memory can be had for them: {error}. Check the limits "
            "of this shell (`ulimit -a`), or lower `memory=` (hotset run --memory)."
        )
    return None
