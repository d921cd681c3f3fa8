"""``hotset.memo``: what a function returned for the same arguments before, from memory that processes share.

A cache of whole samples ends where a program composes samples itself: four pictures in a mosaic, overlapping
windows of frames, an augmentation in the middle of ``__getitem__``. What such programs compute again and
again is one pure function, the decoder. Its results are kept here, under the function's fingerprint and the
identity of its arguments; what is random around it stays the program's own.

::

    call ── identity of the arguments ── known, and here? ── yes: a copy of the result
                  │ none                        │ no
                  └──> computed              claim ── compute, under watch ── store ── the computed value
                                                │ another computes it: wait, then look again

The first process that needs a result computes it, and the others wait for it. The generators are watched
while it is computed: a result that moved one, or that depends on entropy, is not kept, nor looked for again.
So is one that cannot be stored. If an argument changes while the function runs, or a file that an argument
names, this result is not kept. Errors are the function's own, and nothing is kept of them.

Waiting is bounded, as a computing process may be stopped, or wait for this one in turn; after that the result
is computed here. A killed process's claim is void. A forked child computes on its own what its parent was
computing.

Now and then a hit is computed anew and compared, in half a percent of the time. If they differ, nothing of this
function is served any more.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import multiprocessing
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from hotset._warnings import printable, warn
from hotset.dataset.memo_store import MemoStats, MemoStore, open_store, stats_of
from hotset.dataset.spill_folder import checked_folder
from hotset.determinism.argument_key import ArgumentKey, NoIdentity, Parameters, describe_arguments
from hotset.determinism.draw_watch import DrawWatch
from hotset.determinism.equality import same
from hotset.determinism.fingerprint import fingerprint
from hotset.determinism.rng import Generators
from hotset.errors import ArgumentError
from hotset.store.format import Live, Slot
from hotset.store.key_table import EVICTABLE, VIEWED, WRONG, Counter
from hotset.store.keyed_store import MISSING, KeyedStore
from hotset.store.leaves import SchemaMismatch
from hotset.units import parse_bytes

__all__ = ["Memo", "memo"]

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE_SECONDS, _NESTED_SECONDS = 30.0, 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5e-5, 5e-3
_TRIES = 3  # to claim what nobody has claimed
_AUDITED_SHARE, _AUDIT_KEPT_SECONDS = 0.005, 0.5
_LEAST_AUDIT_SECONDS = 1e-3  # an audit counts as at least this long: ten a second are enough
# What a user was told of a function, in all its processes: flags beside those of the key table.
_TOLD = {"draws": 1 << 8, "identity": 1 << 9, "kind": 1 << 10, "room": 1 << 11, "changed": 1 << 12}


class _InUse:
    """What this process needs for a call, while it is attached."""

    __slots__ = ("clear_generation", "counters", "number", "process", "reads", "share", "store")

    def __init__(self, share: MemoStore, store: KeyedStore, number: int, counters: memoryview) -> None:
        self.share, self.store, self.number, self.counters = share, store, number, counters
        self.clear_generation = int(store.segment.live[Live.CLEAR_GENERATION])
        self.reads = store.participant.row.data
        self.process = os.getpid()
        self.mark()

    def mark(self) -> None:
        """Note that this process uses the function: what it returned does not go first."""
        self.counters[Counter.IN_USE] = self.reads[Slot.INCARNATION]


class Memo(Generic[P, R]):
    """A function whose results are kept; made by :func:`memo`. It is called as the function is.

    It can be called anywhere: in ``__getitem__``, a collate function, a live transform, in threads and in
    forked or spawned processes. It pickles as its function does.

    Example:
        >>> with memo(divmod, memory="1MiB") as kept:
        ...     kept(7, 2), kept(7, 2), kept.stats().hits
        ((3, 1), (3, 1), 1)
    """

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._options = options
        self._view = not options["copy"]
        self._state: _InUse | None = None
        self._share: MemoStore | None = None
        self._closed = False
        self._parameters = Parameters(self.__wrapped__)
        self._digest = b""
        self._name = _name_of(self.__wrapped__)
        self._watches: list[DrawWatch] = []
        self._depth = threading.local()
        self._audited = time.monotonic()
        self._audit_left = 0.0
        self._generators: Generators | None = None
        self._told: set[str] = set()
        _memos.add(self)
        # A worker's parent has the store; the worker looks for it at its first call.
        if multiprocessing.parent_process() is None:
            self._share = self._opened()

    def _opened(self) -> MemoStore:
        options = self._options
        return open_store(options["memory"], options["spill"], options["session"])

    # ---- calls ---------------------------------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self.__wrapped__
        try:
            bound = self._parameters.bind(args, kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong
        try:
            identity = describe_arguments(bound)
        except NoIdentity as why:
            return cast(R, self._unidentified(why, lambda: function(*args, **kwargs)))
        again = None if identity.fixed and not identity.version else lambda: describe_arguments(bound)
        return cast(R, self._get(identity, lambda: function(*args, **kwargs), again))

    def get(self, identity: tuple[Any, ...], compute: Callable[[], R]) -> R:
        """The result that is kept under an identity of the caller's own; computed if there is none.

        For functions whose arguments say too little, or too much: a decoder that works on an open file, for
        example, whose result depends on the path and on a few settings.

        Args:
            identity: all that the result depends on. Paths of files count with their sizes and times.
            compute: computes the result.

        Raises:
            ArgumentError: a part of ``identity`` has no identity, such as an open file.
            Exception: whatever ``compute`` raises.

        Example:
            >>> with memo(str.upper, memory="1MiB") as upper:
            ...     upper.get(("a word", 3), lambda: "A word".upper()), upper.stats().entries
            ('A WORD', 1)
        """
        try:
            described = describe_arguments(identity)
        except NoIdentity as why:
            raise ArgumentError(
                f"identity= must consist of numbers, texts, paths and the like, got {why}."
            ) from None
        return cast(R, self._get(described, compute, lambda: describe_arguments(identity)))

    def _get(
        self, identity: ArgumentKey, compute: Callable[[], Any], again: Callable[[], ArgumentKey] | None
    ) -> Any:
        state = self._state or self._attached()
        if state is None:
            return compute()
        store, version = state.store, identity.version
        # A record whose memory callers may look at is never written again, so its version is in its key.
        name = identity.key + b"%d" % version if self._view else identity.key
        key = hashlib.blake2b(name, digest_size=16, key=self._digest).digest()
        state.counters[Counter.CALLS] += 1
        sample = store.keys.find(key)
        if sample >= 0:
            value = store.get(sample, 0 if self._view else version, view=self._view)
            if value is not MISSING:
                state.counters[Counter.HITS] += 1
                state.reads[Slot.HITS] += 1
                return value if not self._is_audit_due(state) else self._audit(state, value, compute)
        if store.segment.live[Live.CLEAR_GENERATION] != state.clear_generation:
            self._state = None  # the store was emptied, and knows the function no longer
            return self._get(identity, compute, again)
        return self._miss(state, key, identity, compute, again)

    def _miss(
        self,
        state: _InUse,
        key: bytes,
        identity: ArgumentKey,
        compute: Callable[[], Any],
        again: Callable[[], ArgumentKey] | None,
    ) -> Any:
        store, version = state.store, 0 if self._view else identity.version
        state.reads[Slot.MISSES] += 1
        state.mark()
        if store.keys.flags(state.number) & WRONG:
            return self._timed(state, compute)
        thread, computing = threading.get_ident(), state.share.computing
        sample, claimed = store.claim_new(
            key, state.number, lambda sample: computing.setdefault(sample, thread) == thread
        )
        if sample < 0:
            self._tell_full(state)
            return self._timed(state, compute)
        value = MISSING
        if not claimed:
            claimed, value = self._claim(state, sample, version)
        if value is not MISSING:
            state.counters[Counter.HITS] += 1
            return value
        if not claimed:
            return self._timed(state, compute)
        kept = False
        try:
            value, may_keep = self._computed(state, sample, identity, compute, again)
            kept = may_keep and self._kept(state, sample, version, value)
        finally:
            if not kept:
                store.release(sample)  # a forked child has no claim to release
            state.share.computing.pop(sample, None)
        return value

    def _claim(self, state: _InUse, sample: int, version: int) -> tuple[bool, Any]:
        """Claim a sample, or wait for its value: whether it is claimed, and the value or ``MISSING``."""
        store, thread = state.store, threading.get_ident()
        nested = getattr(self._depth, "computing", 0) or thread in state.share.computing.values()
        patience = _NESTED_SECONDS if nested else max(_PATIENCE_SECONDS, 5 * self._mean_seconds(state))
        deadline, pause, failed = time.monotonic() + patience, _FIRST_PAUSE_SECONDS, 0
        while True:
            if store.is_left_out(sample):
                return False, MISSING
            owner = state.share.computing.setdefault(sample, thread)
            if owner == thread:
                claimed = False
                try:
                    # Another process may have published it since this one looked.
                    value = store.get(sample, version, view=self._view)
                    claimed = value is MISSING and store.claim(sample, version)
                    if value is not MISSING or claimed:
                        return claimed, value
                finally:
                    if not claimed:
                        del state.share.computing[sample]
                if not store.is_claimed(sample):
                    failed += 1  # it cannot be claimed, or its record cannot be read here
            if failed > _TRIES:
                return False, MISSING
            if time.monotonic() > deadline:
                return False, MISSING
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _computed(
        self,
        state: _InUse,
        sample: int,
        identity: ArgumentKey,
        compute: Callable[[], Any],
        again: Callable[[], ArgumentKey] | None,
    ) -> tuple[Any, bool]:
        """Compute a claimed value under watch; returns it, and whether it may be kept."""
        watch = self._watches.pop() if self._watches else DrawWatch([self.__wrapped__])
        try:
            watch.begin()
            value = self._timed(state, compute, kept=True)
            if state.process != os.getpid():
                return value, False  # a child that was forked meanwhile: the claim is its parent's
            if watch.drew(value, compute):
                state.store.leave_out(sample)
                self._tell(
                    state,
                    "draws",
                    f"{self._name} draws random numbers, so what it returned is not kept and it is computed "
                    "at each call; memoise the part that draws none.",
                )
                return self._timed(state, compute), False
        finally:
            self._watches.append(watch)
        if again is not None and again() != identity:
            self._tell(
                state,
                "changed",
                f"an argument of {self._name}, or a file that it names, changed while the function ran, so "
                "that result is not kept; call it with arguments that stay the same.",
            )
            state.counters[Counter.NOT_KEPT] += 1
            return value, False
        return value, True

    def _kept(self, state: _InUse, sample: int, version: int, value: Any) -> bool:
        """Store a claimed value; whether that was done."""
        try:
            if state.store.put(sample, version, state.number, value):
                return True
            self._tell_full(state)
        except SchemaMismatch as mismatch:
            state.store.leave_out(sample)
            self._tell(
                state,
                "kind",
                f"{self._name} returns what cannot be kept ({printable(str(mismatch))}), so it is computed "
                "at each call; return arrays, tensors, images, numbers, texts, and containers of them.",
            )
        except OSError as error:
            self._tell(state, "room", f"what {self._name} returned cannot be kept: {error}.")
        state.counters[Counter.NOT_KEPT] += 1
        return False

    def _timed(self, state: _InUse, compute: Callable[[], Any], *, kept: bool = False) -> Any:
        counters, begun = state.counters, time.perf_counter_ns()
        self._depth.computing = getattr(self._depth, "computing", 0) + 1
        try:
            return compute()
        finally:
            self._depth.computing -= 1
            spent = time.perf_counter_ns() - begun
            counters[Counter.COMPUTED] += 1
            counters[Counter.NS] += spent
            counters[Counter.NOT_KEPT] += not kept

    @staticmethod
    def _mean_seconds(state: _InUse) -> float:
        return state.counters[Counter.NS] / 1e9 / max(state.counters[Counter.COMPUTED], 1)

    def _unidentified(self, why: NoIdentity, compute: Callable[[], Any]) -> Any:
        state = self._state or self._attached()
        if state is None:
            return compute()
        state.counters[Counter.CALLS] += 1
        self._tell(
            state,
            "identity",
            f"{self._name} was called with {why}, which has no identity, so such calls are computed each "
            "time; pass what identifies it instead, such as a path, a number, or a dataclass of these.",
        )
        return self._timed(state, compute)

    # ---- audit ---------------------------------------------------------------------------------------

    def _is_audit_due(self, state: _InUse) -> bool:
        now = time.monotonic()
        left = self._audit_left + _AUDITED_SHARE * (now - self._audited)
        self._audited = now
        cost = max(self._mean_seconds(state), _LEAST_AUDIT_SECONDS)
        self._audit_left = min(left, max(_AUDIT_KEPT_SECONDS, cost))
        return self._audit_left >= cost

    def _audit(self, state: _InUse, value: Any, compute: Callable[[], Any]) -> Any:
        """Compute a hit anew, and compare; returns what the caller gets."""
        if self._generators is None:
            self._generators = Generators([self.__wrapped__])
        before, begun = self._generators.states(), time.monotonic()
        state.counters[Counter.AUDITS] += 1
        try:
            computed = compute()
            differs = same(value, computed, across=True)
        except Exception:
            return value  # what it raises now, it would not have raised then
        finally:
            self._generators.put(before)
            self._audit_left -= time.monotonic() - begun
        if differs is None:
            return value
        if state.store.keys.tell_once(state.number, WRONG):
            state.store.forget(state.number)
            warn(
                f"{self._name} returned something else than what was kept ({differs}), so it is computed at "
                "each call from now on: it depends on more than its arguments and their files. Give it those "
                "as arguments, or do not memoise it."
            )
        return computed

    # ---- attaching -----------------------------------------------------------------------------------

    def _attached(self) -> _InUse | None:
        """Attach in this process, if that can be done."""
        if self._closed:
            return None
        if self._share is None:
            self._share = self._opened()
        share, store = self._share, self._share.store()
        if store is None:
            return None
        if not self._digest:
            self._digest = self._fingerprint()
        flags = (EVICTABLE if self._options["evict"] else 0) | (VIEWED if self._view else 0)
        number = store.keys.enter(self._name, self._digest, flags)
        counters = store.keys.counters(number) if number >= 0 else None
        if counters is None:
            return None
        self._state = _InUse(share, store, number, counters)
        weakref.finalize(self, _unused, os.getpid(), counters).atexit = False
        return self._state

    def _fingerprint(self) -> bytes:
        key = self._options["key"]
        if key is not None:
            text = f"key {key}"
        else:
            found = fingerprint(self.__wrapped__)
            if found.unknowns:
                warn(
                    f"results of {self._name} are shared with forked processes alone, as it holds "
                    f"{found.unknowns[0]}; give it a key= that names what it computes."
                )
            text = found.digest
        return hashlib.blake2b(f"{self._view} {text}".encode(), digest_size=16).digest()

    def _tell(self, state: _InUse, about: str, sentence: str) -> None:
        """Warn once about each thing, in all processes."""
        if about not in self._told:
            self._told.add(about)
            if state.store.keys.tell_once(state.number, _TOLD[about]):
                warn(sentence)

    def _tell_full(self, state: _InUse) -> None:
        why = state.store.why_full or "it has as many results as there are places"
        self._tell(
            state,
            "room",
            f"no more results of {self._name} are kept, and further ones are computed at each call: {why}. "
            'evict="lru" replaces the least recently used ones.',
        )

    # ---- the user's ----------------------------------------------------------------------------------

    def stats(self) -> MemoStats:
        """What the function has done so far, in all processes that share its results."""
        state = self._state or self._attached()
        if state is None:
            return MemoStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)
        return stats_of(state.store, state.number)

    def check(self) -> list[str]:
        """Verify the store of this function's results: a list of problems, empty if all is well."""
        state = self._state or self._attached()
        return [] if state is None else state.store.check()

    def clear(self) -> None:
        """Forget the results of this function, in all processes."""
        state = self._state or self._attached()
        if state is not None:
            state.store.forget(state.number)

    def close(self) -> None:
        """Detach: the function is computed at each call from now on. What it returned stays valid."""
        self._closed = True
        if self._state is not None:
            _unused(os.getpid(), self._state.counters)
        self._state = None
        share, self._share = self._share, None
        if share is not None:
            share.leave()

    def __enter__(self) -> Memo[P, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"hotset.memo({self._name})"

    def __reduce__(self) -> Any:
        name = getattr(self.__wrapped__, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self.__wrapped__, "__module__", None) or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:  # decorated: the module has it under the function's name
            return name
        return _restored, (self.__wrapped__, self._options)


def _restored(function: Callable[..., Any], options: dict[str, Any]) -> Memo[..., Any]:
    return Memo(function, options)


def _unused(process: int, counters: memoryview) -> None:
    """Note that a process uses a function no longer. It may run as a finalizer, so it takes no lock."""
    if process == os.getpid():
        counters[6] = 0  # Counter.IN_USE: module globals may be gone


def _name_of(function: Any) -> str:
    """Module and name of a function, as far as it has them; those of its class otherwise."""
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None)
    return f"{module}.{named.__qualname__}" if module else str(named.__qualname__)


_memos: weakref.WeakSet[Memo[..., Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A child counts in a slot of its own, and has none of the parent's other threads.
    for each in list(_memos):
        each._state = None
        each._watches = []


os.register_at_fork(after_in_child=_after_fork_in_child)


@overload
def memo(
    function: Callable[P, R],
    *,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | None = None,
    session: str | int | None = None,
    key: str | None = None,
    copy: bool = True,
    evict: Literal["lru"] | None = None,
) -> Memo[P, R]: ...
@overload
def memo(
    function: None = None,
    *,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | None = None,
    session: str | int | None = None,
    key: str | None = None,
    copy: bool = True,
    evict: Literal["lru"] | None = None,
) -> Callable[[Callable[P, R]], Memo[P, R]]: ...
def memo(
    function: Callable[P, R] | None = None,
    *,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | None = None,
    session: str | int | None = None,
    key: str | None = None,
    copy: bool = True,
    evict: Literal["lru"] | None = None,
) -> Memo[P, R] | Callable[[Callable[P, R]], Memo[P, R]]:
    """Keep what a pure function returns, in memory that all processes of this job share.

    A decoder, a parser, a tokenizer: a function whose result depends on its arguments and on the files that
    they name, and on nothing else. Each result is computed once per machine; every call returns the caller's
    own, writable copy. What draws random numbers is noticed, and not kept.

    Arguments count by type and value: ``f(1)``, ``f(a=1)`` and ``f(1, b=default)`` are one call, and ``1``,
    ``1.0`` and ``True`` are three. The path of a file counts with the file's size, date and inode, so that a
    changed file is read anew. So does the function's code with all that it reaches, as for
    :func:`hotset.cache`.

    Args:
        function: the function; without it, a decorator is returned (``@hotset.memo(memory="8GiB")``).
        memory: the most that results may take, of all memoised functions of this job together: bytes, a
            string such as ``"64GiB"``, or ``"auto"``: half of what is free. If several functions give one,
            the largest counts.
        spill: a folder on a disk for results that memory has no room for. It counts for all functions, where
            the first of them is memoised.
        session: name or number of a session, whose results outlive this job.
        key: names what the function computes, in place of its fingerprint: for functions that hold what
            cannot be described. Change it when the function changes.
        copy: False returns arrays as read-only views of the shared memory; tensors and other objects are
            copied all the same. Not with ``session`` or ``evict``, which would use that memory again.
        evict: ``"lru"``: where there is no room, results of this function make room for others, the least
            recently used first. Without it what is kept stays, which is best where each epoch asks for all.

    Returns:
        A callable with the function's signature, and ``stats()``, ``check()``, ``clear()``, ``close()`` and
        ``__wrapped__``.

    Raises:
        ArgumentError: the function cannot be called, is a generator or a coroutine; or two arguments do not
            go together.
        QuantityError: ``memory`` is not an amount of memory.
        SessionError: there is no such session.

    Example:
        >>> import hotset, numpy as np
        >>> def squares(count):
        ...     print("computed")
        ...     return np.arange(count) ** 2
        >>> with hotset.memo(squares, memory="1MiB") as kept:
        ...     kept(4), kept(count=4)
        computed
        (array([0, 1, 4, 9]), array([0, 1, 4, 9]))
    """
    if memory != "auto":
        parse_bytes(memory, whole=lambda: 0)
    _check(copy, evict, session, spill)
    options = {
        "memory": memory,
        "spill": checked_folder(spill) or None,
        "session": session,
        "key": key,
        "copy": copy,
        "evict": evict,
    }
    if function is None:
        return lambda given: Memo(_checked(given), options)
    return Memo(_checked(function), options)


def _checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, if its results can be kept.

    Raises:
        ArgumentError: they cannot.
    """
    if not callable(function):
        raise ArgumentError(f"hotset.memo must be given a function, got {function!r}.")
    kinds: dict[str, Callable[[object], bool]] = {
        "a generator function": inspect.isgeneratorfunction,
        "a coroutine function": inspect.iscoroutinefunction,
        "an asynchronous generator function": inspect.isasyncgenfunction,
    }
    for kind, is_one in kinds.items():
        if is_one(function):
            raise ArgumentError(
                f"hotset.memo must be given a function that returns its result, got {_name_of(function)}, "
                f"{kind}; memoise a function that returns a list, or the value that is awaited."
            )
    return function


def _check(copy: object, evict: object, session: object, spill: object) -> None:
    if not isinstance(copy, bool):
        raise ArgumentError(f"copy= must be True or False, got {copy!r}; leave it out for copies.")
    if evict not in (None, "lru"):
        raise ArgumentError(
            f'evict= must be "lru" or None, got {evict!r}; leave it out to keep what is kept.'
        )
    if not copy and (evict is not None or session is not None):
        other = "evict=" if evict is not None else "session="
        raise ArgumentError(
            f"copy=False and {other} cannot be combined: memory that callers look at must not be used again; "
            "leave out one of them."
        )
    if session is not None and spill is not None:
        raise ArgumentError(
            f"session {session!r} has its own spill folder, set at its creation; leave out spill=."
        )
