"""``hotset.memo``: what a function returned for the same arguments before, from memory that processes share.

A cache of whole samples ends where a program composes samples itself: four pictures in a mosaic, overlapping
windows of frames, an augmentation in the middle of ``__getitem__``. What such programs compute again and
again is one pure function, the decoder. Its results are kept, under the function's fingerprint and the
identity of its arguments (:mod:`hotset.memoize.calls`); what is random around it stays the program's
own.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from hotset.dataset.spill_folder import checked_folder
from hotset.errors import ArgumentError
from hotset.memoize.calls import Calls, name_of
from hotset.memoize.memo_store import MemoStats
from hotset.session.session_definition import Session
from hotset.units import parse_bytes

__all__ = ["Memo", "memo"]

P = ParamSpec("P")
R = TypeVar("R")


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
        # By their names these are no part of what the function is: fingerprints leave them out.
        self._hotset_options = options
        self._hotset_calls = Calls(function, options)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, self._hotset_calls.call(args, kwargs))

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
        return cast(R, self._hotset_calls.get(identity, compute))

    def stats(self) -> MemoStats:
        """What the function has done so far, in all processes that share its results."""
        return self._hotset_calls.stats()

    def check(self) -> list[str]:
        """Verify the store of this function's results: a list of problems, empty if all is well."""
        return self._hotset_calls.check()

    def clear(self) -> None:
        """Forget the results of this function, in all processes."""
        self._hotset_calls.clear()

    def close(self) -> None:
        """Detach: the function is computed at each call from now on. What it returned stays valid."""
        self._hotset_calls.close()

    def __enter__(self) -> Memo[P, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"hotset.memo({self._hotset_calls.name})"

    def __reduce__(self) -> Any:
        name = getattr(self.__wrapped__, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self.__wrapped__, "__module__", None) or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:  # decorated: the module has it under the function's name
            return name
        return Memo, (self.__wrapped__, self._hotset_options)


@overload
def memo(
    function: Callable[P, R],
    *,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | None = None,
    session: str | int | Session | None = None,
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
    session: str | int | Session | None = None,
    key: str | None = None,
    copy: bool = True,
    evict: Literal["lru"] | None = None,
) -> Callable[[Callable[P, R]], Memo[P, R]]: ...
def memo(
    function: Callable[P, R] | None = None,
    *,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | None = None,
    session: str | int | Session | None = None,
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
        session: a session, or its name or number; its results outlive this job.
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
        ...     return np.arange(count) ** 2
        >>> with hotset.memo(squares, memory="1MiB") as kept:
        ...     kept(4), kept(count=4), kept.stats().computed
        (array([0, 1, 4, 9]), array([0, 1, 4, 9]), 1)
    """
    if memory != "auto":
        parse_bytes(memory, whole=lambda: 0)
    _check(copy, evict, session, spill)
    options = {
        "memory": memory,
        "spill": checked_folder(spill) or None,
        "session": Session.name_of(session),
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
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise ArgumentError(f"hotset.memo must be given a function, got a {kind}; write @{kind} above it.")
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
                f"hotset.memo must be given a function that returns its result, got {name_of(function)}, "
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
