"""Calls of a library's functions through a memo, which the program does not notice.

A memo keeps what a function returns. Whatever else a caller could notice stays as it is without a memo:

- an exception is the function's own, and its traceback has one line more: that of the wrapper;
- the first caller gets the very object that the function returned, later ones an equal one of their own. Of
  an array that means dtype, shape, strides, whether it owns its memory; of a tensor dtype, shape, strides;
- what is not an array, a tensor, a number, a string, None or a tuple of them is handed on and not kept;
- while one function is computed, decoders that it calls itself are not memoised a second time.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from hotset._warnings import warnings_to
from hotset.run.environment import Options, options_here
from hotset.run.ledger import SLOW, ledger_here, left_alone, wait_for_store
from hotset.run.worth import Worth

__all__ = ["File", "Kept", "NotKept", "attach", "before_fork", "close_memos", "memo_of"]

# A process that decodes a few files, and has no other use for torch, must not wait for it.
_CALLS_WITHOUT_TORCH = 100
_SLOW = "to keep what it returns takes longer than that saves"
_here = threading.local()


def _is_computing() -> bool:
    """Whether this thread is inside a function that a memo computes."""
    return getattr(_here, "computing", False)


class NotKept(Exception):
    """Leaves a memo's computation without a value to keep; the text says why."""


class File(NamedTuple):
    """The file that a call reads.

    Attributes:
        path: an absolute one.
        status: what the system says of it.
    """

    path: str
    status: os.stat_result


class Kept:
    """One function's memo, made when it is first needed: then ``hotset.memo`` is imported, and not before.

    Args:
        name: what people call the function.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._memo: Any = None
        self._calls = 0
        self._worth = Worth()
        self._slow = False
        self._lock = threading.Lock()
        _all.append(self)
        before_fork(self.prepare)

    def get(
        self, begun: float, key: tuple[Any, ...], compute: Callable[[], Any], file: File | None = None
    ) -> Any:
        """What is kept, or what ``compute`` returns: arrays may be read-only views.

        Args:
            begun: when the program called, by ``time.perf_counter``.
            key: tells one call from another: None, numbers, strings, bytes and tuples of them.
            compute: computes it.
            file: is to be as it was, before and after; None if ``compute`` sees to that, and draws nothing.

        Raises:
            NotKept: as ``compute`` does, or because the memo cannot be used.
        """
        if self._memo is None:
            self.prepare()
        if self._memo is False:
            raise NotKept
        name = repr(key if file is None else (file.path, key)).encode("utf-8", "surrogatepass")
        computing: list[float] = []  # when it began, and ended

        def timed() -> Any:
            computing.append(time.perf_counter())
            try:
                return _computed(compute)
            finally:
                computing.append(time.perf_counter())

        with warnings_to(self._note):
            value = self._memo._hotset_calls.get_by_key(name, timed, file)
        if len(computing) == 2:  # not a hit that was audited in between
            began, ended = computing
            if self._worth.missed(began - begun, ended - began, time.perf_counter() - begun):
                self._leave()
        return value

    def gave(self, begun: float) -> None:
        """Note that the program has got back what was kept; it had called at ``begun``."""
        memo = self._memo
        if memo and self._worth.gave(time.perf_counter() - begun, memo._hotset_calls.mean_seconds):
            self._leave()

    def is_worth_it(self) -> bool:
        """Whether a call is to be memoised.

        The first ones are not where that would have to import torch, and none is if that takes longer than it
        saves, in this process or in another one.
        """
        if self._slow:
            self._note(_SLOW)
            return False
        if self._memo is None and "torch" not in sys.modules:
            self._calls += 1
            if self._calls <= _CALLS_WITHOUT_TORCH:
                self._note("the process has not imported torch")
                return False
        return not _is_computing()

    def _leave(self) -> None:
        self._slow = True
        ledger_here().mark(f"{SLOW}{self.name}")

    def prepare(self) -> None:
        """Make the memo."""
        with self._lock:
            if self._memo is not None:
                return
            try:
                with warnings_to(self._note):
                    self._memo = memo_of(_stand_in(self.name), options_here() or Options(), key=self.name)
                self._slow = _is_slow(self.name)
            except Exception as error:
                self._note(f"{type(error).__name__}: {error}")
                self._memo = False

    def close(self) -> None:
        """Give back this process's share in the store."""
        if self._memo:
            self._memo.close()
        self._memo, self._worth, self._slow = None, Worth(), False

    def after_fork(self) -> None:
        """In a child: no thread holds the lock, and what other processes have found out counts."""
        self._lock = threading.Lock()
        self._worth = Worth()
        self._slow = self._slow or _is_slow(self.name)

    def _note(self, sentence: str) -> None:
        left_alone(self.name, sentence)

    def call(
        self,
        begun: float,
        file: File,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        check: Callable[[str], None] | None = None,
    ) -> tuple[bool, Any]:
        """Call ``function``, or return what it returned before.

        What it returns is kept if ``check``, which is given the file, raises nothing.

        Returns:
            ``(True, the value)`` or ``(False, the error)``.

        The caller raises the error itself, so that its line is the only one of hotset's in the traceback.
        """
        made: list[tuple[bool, Any]] = []
        why = ""

        def compute() -> Any:
            made.append(_outcome(function, args, keywords))
            ok, value = made[0]
            if not ok:
                raise NotKept
            stored = _stored(value)
            if check is not None:
                try:
                    check(file.path)
                except Exception as error:
                    raise NotKept(str(error) or type(error).__name__) from None
            return stored

        try:
            found = self.get(begun, key, compute, file)
            if made:
                return made[0]
            value = _restored(found)
            self.gave(begun)
            return True, value
        except NotKept as error:
            why = str(error)
        except Exception as error:  # the memo's own: the program must not know
            self._note(f"{type(error).__name__}: {error}")
        if not made:
            return _outcome(function, args, keywords)
        if made[0][0] and why:
            self._note(why)
        return made[0]


def _outcome(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[bool, Any]:
    """``(True, what a function returns)``, or ``(False, its error)`` without this line in the traceback."""
    try:
        return True, function(*args, **keywords)
    except BaseException as error:
        trace = error.__traceback__
        return False, error.with_traceback(trace.tb_next if trace else None)


def _computed(compute: Callable[[], Any]) -> Any:
    _here.computing = True
    try:
        return compute()
    finally:
        _here.computing = False


def memo_of(function: Callable[..., Any], options: Options, *, key: str | None = None) -> Any:
    """A memo of ``function`` in the job's store; with ``key``, one that gives views where that can be."""
    memo = _imported()
    wait_for_store()
    return memo(
        function,
        memory=options.memory,
        spill=options.spill,
        session=options.session,
        evict=options.evict,
        key=key,
        # Memory that is used again cannot be looked at.
        copy=key is None or options.session is not None or options.evict is not None,
    )


def _imported() -> Any:
    """``hotset.memo``. The collector rests meanwhile: to pass over torch's objects takes half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        from hotset.memoize.decorator import memo
    finally:
        if collects:
            gc.enable()
    return memo


def _stand_in(name: str) -> Callable[..., Any]:
    """What the memo takes for the function, in its statistics: the function's name."""

    def decoder() -> None: ...

    decoder.__module__, _, decoder.__qualname__ = name.rpartition(".")
    return decoder


def attach(options: Options) -> Any:
    """The job's store, held until it is left: ``functions()`` are its statistics."""
    from hotset.memoize.memo_store import open_store

    return open_store(options.memory, options.spill, options.session)


def close_memos() -> None:
    """Close all memos of this process; one that is called again is made again."""
    for each in _all:
        each.close()


_all: list[Kept] = []
_prepares: list[Callable[[], None]] = []


def before_fork(prepare: Callable[[], None]) -> None:
    """Have ``prepare`` called before this process forks, once it has imported torch."""
    _prepares.append(prepare)


def _before_fork() -> None:
    """Make memos before workers are forked: each of them would have to import what they need."""
    if "torch" in sys.modules and not _is_computing():
        for prepare in _prepares:
            prepare()


def _after_fork() -> None:
    _here.computing = False
    for each in _all:
        each.after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _is_slow(name: str) -> bool:
    """Whether a process has noted that to keep what this function returns takes longer than that saves."""
    return ledger_here().has(f"{SLOW}{name}")


def _kind(value: Any) -> str:
    kind = type(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and kind is numpy.ndarray:
        return "an array of Python objects, or with metadata"
    if torch is not None and kind is torch.Tensor:
        return "a tensor that is not on the CPU, or is of bfloat16, or has a gradient or attributes"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# A value as it is kept: None, numbers, strings and usual arrays as they are; a tuple as ("tuple", ...);
# another array as ("array", axes, strides, is a view, can be written to, it in C order), a tensor as
# ("tensor", axes, strides, an array).


def _stored(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return ("tuple", *map(_stored, value))
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and type(value) is numpy.ndarray and _is_usual(value):
        flags = value.flags
        if flags.c_contiguous and flags.owndata and flags.writeable and value.size:
            return value  # one without elements may have any strides
        axes = _axes(value.strides, value.shape)
        in_order = _in_order(value.transpose(axes))
        stored = ("array", axes, value.strides, not flags.owndata, flags.writeable, in_order)
        again = _restored(stored)
        if again.strides != value.strides or again.flags.owndata != flags.owndata:
            raise _unusual("an array with gaps, or that is turned round")
        return stored
    if torch is not None and type(value) is torch.Tensor and _is_plain(value, torch):
        axes = _axes(value.stride(), tuple(value.shape))
        return ("tensor", axes, value.stride(), _in_order(value.permute(axes).numpy()))
    raise _unusual(_kind(value))


def _unusual(what: str) -> NotKept:
    return NotKept(f"it returned what cannot be kept: {what}")


def _is_usual(array: Any) -> bool:
    return not array.dtype.hasobject and array.dtype.metadata is None


def _is_plain(tensor: Any, torch: Any) -> bool:
    return bool(
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype is not torch.bfloat16
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_pinned())
        and not vars(tensor)
    )


def _axes(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes from the slowest to the fastest; axes of one element keep their place among equals."""
    return tuple(sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis)))


def _in_order(array: Any) -> Any:
    if not array.flags.c_contiguous:
        # Its strides could not be given again.
        raise _unusual("an array with gaps, or that is turned round")
    return array


def _restored(kept: Any) -> Any:
    """A value of the caller's own."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(kept) is numpy.ndarray:
        return numpy.array(kept, order="C", copy=True)
    if type(kept) is not tuple:
        return kept
    if kept[0] == "tuple":
        return tuple(map(_restored, kept[1:]))
    axes, array = kept[1], kept[-1]
    back = sorted(range(len(axes)), key=axes.__getitem__)
    if kept[0] == "tensor":
        torch = sys.modules["torch"]
        own = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device="cpu")
        own.numpy()[...] = array
        given = own if back == sorted(back) else own.permute(back)
        # As below: of a grey picture, the axis of its one channel.
        return given if given.stride() == kept[2] else given.as_strided(given.shape, kept[2])
    own = numpy.array(array.transpose(back), order="K", copy=True)  # type: ignore[union-attr]
    if kept[3]:
        # An axis of one element may have any stride, and has none if it is a new one.
        own = numpy.lib.stride_tricks.as_strided(own, own.shape, kept[2])  # type: ignore[union-attr]
    if not kept[4]:
        own.flags.writeable = False
    return own
