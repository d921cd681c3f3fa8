"""The calls of a memoised function in one process: look up, or compute under watch and store.

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

Now and then, in half a percent of the time, a hit is computed anew and compared. If they differ, nothing of
this function is served any more.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hotset._fork_server import is_below_fork_server
from hotset._warnings import printable, warn
from hotset.dataset.audit_budget import AuditBudget
from hotset.determinism.argument_key import (
    ArgumentKey,
    Codes,
    NoIdentity,
    Parameters,
    describe_arguments,
    file_version,
)
from hotset.determinism.draws.draw_watch import DrawWatch
from hotset.determinism.equality import differs
from hotset.errors import ArgumentError
from hotset.memoize.function_description import FunctionDescription
from hotset.memoize.memo_store import MemoStats, MemoStore, open_store, stats_of
from hotset.store.body_writer import Unfilled
from hotset.store.format import FUNCTIONS, Live, Slot
from hotset.store.key_table import EVICTABLE, VIEWED, WRONG, Counter
from hotset.store.keyed_store import MISSING, KeyedStore
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.locks import Pauses

__all__ = ["Calls", "name_of"]

_PATIENCE_SECONDS, _NESTED_SECONDS = 30.0, 1.0
_AT_FIRST = True, False, torch.float32, False, False  # torch's modes: see _torch_modes
_TRIES = 3  # to claim what nobody has claimed
_AUDITED_SHARE = 0.005
_LEAST_AUDIT_SECONDS = 1e-3  # an audit counts as at least this long: ten a second are enough
# What a user was told of a function, in all its processes: flags beside those of the key table.
_TOLD = {"draws": 1 << 8, "identity": 1 << 9, "kind": 1 << 10, "room": 1 << 11, "changed": 1 << 12}


class _InUse:
    """What this process needs for a call, while it is attached."""

    __slots__ = (
        "clear_generation",
        "counters",
        "number",
        "process",
        "reads",
        "share",
        "store",
    )

    def __init__(self, share: MemoStore, store: KeyedStore, number: int, counters: memoryview) -> None:
        self.share, self.store, self.number, self.counters = share, store, number, counters
        self.clear_generation = int(store.segment.live[Live.CLEAR_GENERATION])
        self.reads = store.participant.row.data
        self.process = os.getpid()
        self.mark()

    def mark(self) -> None:
        """Note that this process uses the function: what it returned does not go first."""
        self.counters[Counter.IN_USE] = self.reads[Slot.INCARNATION]


def _torch_modes() -> bytes:
    """What has been set that changes what torch computes; empty as torch begins."""
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )
    return b"" if modes == _AT_FIRST else repr(modes).encode()


class Calls:
    """The calls of one memoised function in this process."""

    # No ``__dict__``: what looks through a dataset for its state must not find the store.
    __slots__ = (
        "__weakref__",
        "_audit_budget",
        "_closed",
        "_codes",
        "_depth",
        "_description",
        "_function",
        "_is_off",
        "_options",
        "_parameters",
        "_share",
        "_state",
        "_told",
        "_view",
        "_watches",
        "name",
    )

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function = function
        self._options = options
        self._view = not options["copy"]
        self._state: _InUse | None = None
        self._share: MemoStore | None = None
        self._closed = False
        self._codes = Codes()  # not for all functions: it refers to classes, which may refer to this
        self._parameters = Parameters(function)
        self._is_off = False  # whether all calls compute: there is no place, or what it reaches does not stay
        self.name = name_of(function)
        self._description = FunctionDescription(function, self.name, options["key"], self._view)
        self._watches: list[DrawWatch] = []
        self._depth = threading.local()
        self._audit_budget = AuditBudget(_AUDITED_SHARE)
        self._told: set[str] = set()
        _every.add(self)
        # A worker's parent has the store; the worker looks for it at its first call. So do those that come
        # from a fork server, which has not the program's key and would make a store of its own.
        if multiprocessing.parent_process() is None and not is_below_fork_server():
            self._share = self._opened()

    def _opened(self) -> MemoStore:
        options = self._options
        return open_store(options["memory"], options["spill"], options["session"])

    # ---- calls ---------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function returns for these arguments."""
        function = self._function
        try:
            bound = self._parameters.bind(args, kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong
        modes = _torch_modes()

        def describe() -> ArgumentKey:
            described = describe_arguments(bound, self._codes)
            return described._replace(key=described.key + modes) if modes else described

        try:
            identity = describe()
        except NoIdentity as why:
            return self._unidentified(why, lambda: function(*args, **kwargs))
        describe_again = None if identity.fixed and not identity.version else describe
        return self._get(identity, lambda: function(*args, **kwargs), describe_again)

    def get(self, identity: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """See :meth:`hotset.memoize.decorator.Memo.get`."""
        try:
            described = describe_arguments(identity, self._codes)
        except NoIdentity as why:
            raise ArgumentError(
                f"identity= must consist of numbers, texts, paths and the like, got {why}."
            ) from None
        return self._get(described, compute, lambda: describe_arguments(identity, self._codes))

    def get_by_key(
        self, key: bytes, compute: Callable[[], Any], file: tuple[str, os.stat_result] | None
    ) -> Any:
        """As :meth:`get`, for callers that describe their calls themselves.

        Args:
            key: all that the result depends on.
            compute: computes the result.
            file: a path, and the status in which the result depends on its file as well. None if ``compute``
                is code that draws nothing, and sees itself to it that no file changes; it may return a value
                that is to be stored as :class:`~hotset.store.body_writer.Unfilled`.
        """
        if file is None:
            return self._get(ArgumentKey(key, 0, True), compute, None, watched=False)
        path, status = file

        def describe_again() -> ArgumentKey:
            try:
                return ArgumentKey(key, file_version(os.stat(path)), True)
            except OSError:
                return ArgumentKey(key, 0, True)  # it is gone

        return self._get(ArgumentKey(key, file_version(status), True), compute, describe_again)

    def _get(
        self,
        identity: ArgumentKey,
        compute: Callable[[], Any],
        describe_again: Callable[[], ArgumentKey] | None,
        *,
        watched: bool = True,
    ) -> Any:
        """The result that is kept under an identity, computed if there is none.

        Args:
            describe_again: describes the arguments once more, to notice that one has changed while the
                function ran; None if none can change.
            watched: whether the result may depend on random numbers.
        """
        state = self._state or self._attached()
        if state is None:
            return compute()
        bindings = self._description.bindings
        if bindings is not None and bindings.changed():
            state = self._described_anew()
            if state is None:
                return compute()
        store, version = state.store, identity.version
        # A record whose memory callers may look at is never written again, so its version is in its key.
        name = identity.key + b"%d" % version if self._view else identity.key
        key = hashlib.blake2b(name, digest_size=16, key=self._description.digest).digest()
        state.counters[Counter.CALLS] += 1
        sample = store.keys.find(key)
        if sample >= 0:
            value = store.get(sample, 0 if self._view else version, view=self._view)
            if value is not MISSING:
                state.counters[Counter.HITS] += 1
                state.reads[Slot.HITS] += 1
                cost = max(self._mean_seconds_here(state), _LEAST_AUDIT_SECONDS)
                return self._audit(state, value, compute) if self._audit_budget.covers(cost) else value
        if store.segment.live[Live.CLEAR_GENERATION] != state.clear_generation:
            self._state = None  # the store was emptied, and knows the function no longer
            return self._get(identity, compute, describe_again, watched=watched)
        return self._miss(state, key, identity, compute, describe_again, watched)

    def _miss(
        self,
        state: _InUse,
        key: bytes,
        identity: ArgumentKey,
        compute: Callable[[], Any],
        describe_again: Callable[[], ArgumentKey] | None,
        watched: bool,
    ) -> Any:
        """Claim the result that belongs to this key and compute it, or wait for the process that does."""
        store, version = state.store, 0 if self._view else identity.version
        state.reads[Slot.MISSES] += 1
        state.mark()
        if store.keys.flags(state.number) & WRONG:
            return self._timed(state, compute)
        thread, computing = threading.get_ident(), state.share.computing
        outer = _computed_by(thread, computing)
        kept = False
        try:
            sample, claimed = store.claim_new(
                key,
                state.number,
                lambda sample: sample not in outer and computing.setdefault(sample, thread) == thread,
            )
            if sample < 0:
                self._tell_full(state)
            if sample < 0 or sample in outer:  # what the call around this one computes, that one stores
                return self._timed(state, compute)
            value = MISSING
            if not claimed:
                claimed, value = self._claim(state, sample, version)
            if value is not MISSING:
                state.counters[Counter.HITS] += 1
                return value
            if not claimed:
                return self._timed(state, compute)
            if watched:
                value, may_keep = self._computed(state, sample, identity, compute, describe_again)
            else:
                value, may_keep = self._timed(state, compute, kept=True), state.process == os.getpid()
            kept = may_keep and self._kept(state, sample, version, value)
            return value
        finally:
            # Found there, as an interrupt may come before it is known here what was claimed.
            for sample in _computed_by(thread, computing) - outer:
                if not kept:
                    store.release(sample)  # a forked child has no claim to release
                computing.pop(sample, None)

    def _claim(self, state: _InUse, sample: int, version: int) -> tuple[bool, Any]:
        """Claim a sample, or wait for its value: whether it is claimed, and the value or ``MISSING``."""
        store, thread = state.store, threading.get_ident()
        nested = getattr(self._depth, "computing", 0) or thread in state.share.computing.values()
        patience = _NESTED_SECONDS if nested else max(_PATIENCE_SECONDS, 5 * self._mean_seconds_here(state))
        pauses, failed = Pauses(patience), 0
        while True:
            if store.is_never_kept(sample) or store.keys.is_forgotten(sample):
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
            if failed > _TRIES or not pauses.pause():
                return False, MISSING

    def _computed(
        self,
        state: _InUse,
        sample: int,
        identity: ArgumentKey,
        compute: Callable[[], Any],
        describe_again: Callable[[], ArgumentKey] | None,
    ) -> tuple[Any, bool]:
        """Compute a claimed value under watch; returns it, and whether it may be kept."""
        watch = self._watches.pop() if self._watches else DrawWatch([self._function])
        try:
            watch.begin()
            value = self._timed(state, compute, kept=True)
            if state.process != os.getpid():
                return value, False  # a child that was forked meanwhile: the claim is its parent's
            if watch.drew(value, compute):
                state.store.never_keep(sample)
                self._tell(
                    state,
                    "draws",
                    f"{self.name} draws random numbers, so what it returned is not kept and it is computed "
                    "at each call; memoise the part that draws none.",
                )
                return self._timed(state, compute), False
        finally:
            self._watches.append(watch)
        if describe_again is not None and not _is_still(identity, describe_again):
            self._tell(
                state,
                "changed",
                f"an argument of {self.name}, or a file that it names, changed while the function ran, so "
                "that result is not kept; call it with arguments that stay the same.",
            )
            state.counters[Counter.NOT_KEPT] += 1
            return value, False
        return value, True

    def _kept(self, state: _InUse, sample: int, version: int, value: Any) -> bool:
        """Store a claimed value; whether that was done."""
        wrong = self._description.wrong_results(sample)
        if wrong:
            state.store.forget(state.number, np.array(wrong))
            self._given_up()
            return False
        try:
            # It may have been found wrong since this call looked; what is claimed then is forgotten below.
            if state.store.keys.flags(state.number) & WRONG:
                state.counters[Counter.NOT_KEPT] += 1
                return False
            if not state.store.put(sample, version, state.number, value):
                self._tell_full(state)
            elif not state.store.keys.is_forgotten(sample):
                return True
            else:
                # It was computed while the function was cleared, or found wrong: nobody finds it.
                state.store.forget(state.number, np.array([sample]))
        except SchemaMismatch as mismatch:
            state.store.never_keep(sample)
            self._tell(
                state,
                "kind",
                f"{self.name} returned what cannot be kept ({printable(str(mismatch))}), so such "
                "calls are computed each time; return arrays, tensors, images, numbers, texts, and "
                "containers of them.",
            )
        except OSError as error:
            self._tell(state, "room", f"what {self.name} returned cannot be kept: {error}.")
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

    def mean_seconds(self) -> float:
        """What the function took when it was computed, a mean over all processes; 0.0 if it never was."""
        state = self._state or self._attached()
        if state is None:
            return 0.0
        counted = state.store.keys.counted(state.number)
        return counted[Counter.NS] / 1e9 / max(counted[Counter.COMPUTED], 1)

    @staticmethod
    def _mean_seconds_here(state: _InUse) -> float:
        """As :meth:`mean_seconds`, over this process's computations."""
        return state.counters[Counter.NS] / 1e9 / max(state.counters[Counter.COMPUTED], 1)

    def _unidentified(self, why: NoIdentity, compute: Callable[[], Any]) -> Any:
        state = self._state or self._attached()
        if state is None:
            return compute()
        state.counters[Counter.CALLS] += 1
        self._tell(
            state,
            "identity",
            f"{self.name} was called with {why}, which has no identity, so such calls are computed each "
            "time; pass what identifies it instead, such as a path, a number, or a dataclass of these.",
        )
        return self._timed(state, compute)

    # ---- audit ---------------------------------------------------------------------------------------

    def _audit(self, state: _InUse, value: Any, compute: Callable[[], Any]) -> Any:
        """Compute a hit anew, and compare; returns what the caller gets."""
        watch, begun = self._watches.pop() if self._watches else DrawWatch([self._function]), time.monotonic()
        state.counters[Counter.AUDITS] += 1
        watch.begin()
        try:
            computed = compute()
            watch.drew(computed, compute)
            if isinstance(computed, Unfilled):
                computed = computed.filled()
            found = differs(value, computed, across=True)
        except BaseException as error:
            watch.drew()  # puts back what it moved before it raised
            if not isinstance(error, Exception):
                raise
            return value  # what it raises now, it would not have raised then
        finally:
            self._watches.append(watch)
            self._audit_budget.spend(time.monotonic() - begun)
        if found is None:
            return value
        if state.store.keys.set_flag(state.number, WRONG):
            state.store.forget(state.number)
            warn(
                f"{self.name} returned something else than what was kept ({found}), so it is computed at "
                "each call from now on: it depends on more than its arguments and their files. Give it those "
                "as arguments, or do not memoise it."
            )
        return computed

    # ---- attaching -----------------------------------------------------------------------------------

    def _attached(self) -> _InUse | None:
        """Attach in this process, if that can be done."""
        if self._closed or self._is_off:
            return None
        if self._share is None:
            with _opening:
                if self._share is None:
                    self._share = self._opened()
        share, store = self._share, self._share.store()
        if store is None:
            return None
        flags = (EVICTABLE if self._options["evict"] else 0) | (VIEWED if self._view else 0)
        try:
            number = store.keys.enter(self.name, self._description.begin(), flags)
        except BlockingIOError:
            return None  # a later call tries again
        counters = store.keys.counters(number) if number >= 0 else None
        if counters is None:
            self._is_off = True
            warn(
                f"what {self.name} returns is not kept: there are places for {FUNCTIONS:,} functions and "
                "1,024 processes, and none is left; memoise a function once, outside of what is called again."
            )
            return None
        self._state = _InUse(share, store, number, counters)
        weakref.finalize(self, _unused, os.getpid(), counters).atexit = False
        return self._state

    def _described_anew(self) -> _InUse | None:
        """Attach as the function that this one has become: what it reaches is another than it was."""
        if not self._description.drop():
            self._given_up()
            return None
        if self._state is not None:
            _unused(os.getpid(), self._state.counters)
        self._state = None
        return self._attached()

    def _given_up(self) -> None:
        """Compute at each call from now on, in this process: what the function reaches does not stay."""
        self._state, self._is_off = None, True
        warn(
            f"{self.name} reaches an object that changes while the program runs, so what it returns is not "
            "kept any more. Pass that object as an argument; or, if results do not depend on it (a log, a "
            "counter), name what the function computes by key=."
        )

    def _tell(self, state: _InUse, about: str, sentence: str) -> None:
        """Warn once about each thing, in all processes."""
        if about not in self._told:
            self._told.add(about)
            if state.store.keys.set_flag(state.number, _TOLD[about]):
                warn(sentence)

    def _tell_full(self, state: _InUse) -> None:
        keys = state.store.keys
        why, hint = state.store.why_full, ""
        if keys.why_full is not None:
            why = keys.why_full
        elif why is None:
            return  # it was busy, or emptied meanwhile, and there may be room for the next
        elif not self._options["evict"]:
            hint = ' evict="lru" replaces the least recently used ones (hotset run: --evict lru).'
        self._tell(
            state,
            "room",
            f"no more results of {self.name} are kept, and further ones are computed at each call: "
            f"{why}.{hint}",
        )

    # ---- looking after it ----------------------------------------------------------------------------

    def stats(self) -> MemoStats:
        """What the function has done so far, in all processes that share its results."""
        state = self._state or self._attached()
        if state is None:
            return MemoStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)
        return stats_of(state.store, state.number)

    def check(self) -> list[str]:
        """Verify the store of this function's results: a list of problems, empty if all is well."""
        state = self._state or self._attached()
        return [] if state is None or state.store.invalidated else state.store.check()

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


def _unused(
    process: int,
    counters: memoryview,
    in_use: int = Counter.IN_USE,
    getpid: Callable[[], int] = os.getpid,
) -> None:
    """Note that a process uses a function no longer. It may run as a finalizer, so it takes no lock."""
    # Bound above: as a finalizer it may run when this module's own names are gone.
    if process == getpid():
        counters[in_use] = 0


def _is_still(identity: ArgumentKey, describe_again: Callable[[], ArgumentKey]) -> bool:
    try:
        return describe_again() == identity
    except NoIdentity:  # it holds something now that has none
        return False


def _computed_by(thread: int, computing: dict[int, int]) -> set[int]:
    """The samples that a thread is computing, by a copy, as other threads enter theirs."""
    return {sample for sample, owner in list(computing.items()) if owner == thread}


def name_of(function: Any) -> str:
    """Module and name of a function, as far as it has them; those of its class otherwise."""
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None)
    return f"{module}.{named.__qualname__}" if module else str(named.__qualname__)


_every: weakref.WeakSet[Calls] = weakref.WeakSet()
_opening = threading.Lock()  # the store at a function's first call


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()  # a thread of the parent may hold it
    # A child counts in a slot of its own, and has none of the parent's other threads.
    for each in list(_every):
        each._state = None
        each._watches = []


os.register_at_fork(after_in_child=_after_fork_in_child)
