"""The arguments of :func:`hotset.cache`: which are refused, and what to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from torch.utils.data import DataLoader

from hotset._warnings import printable
from hotset.dataset.pipeline import chain_of
from hotset.dataset.streams.source import is_stream
from hotset.dataset.window import Window
from hotset.determinism.batched import Batched
from hotset.determinism.chain import leaves
from hotset.errors import ArgumentError, NotCacheable
from hotset.session.session_definition import Session
from hotset.units import parse_bytes

if TYPE_CHECKING:  # what it needs is an extra
    from hotset.cluster.ray_join import Joined

__all__ = ["CacheArguments", "CacheOptions", "check_arguments", "explain_wrong_calls"]

F = TypeVar("F", bound=Callable[..., Any])
_MOST_THREADS = 1024


class CacheArguments(NamedTuple):
    """The arguments of :func:`hotset.cache` besides the dataset, once checked. They pickle."""

    transform: Any
    memory: int | str
    spill: str | Literal[False] | None
    session: str | int | None
    key: str | None
    window: Window | None
    cluster: str | None
    replicate: bool
    concurrency: int
    strict: bool
    cut: int | None


class CacheOptions(NamedTuple):
    """The arguments, and what was found with them.

    Attributes:
        given: the user's arguments.
        session: the session to cache in; None for a cache of this job.
        joined: the other machines of that session; None without ``cluster=``.
    """

    given: CacheArguments
    session: Session | None = None
    joined: Joined | None = None


def explain_wrong_calls(function: F) -> F:
    """Have a call with wrong arguments raise an error that says what to write.

    A refusal says all that there is to know of it, so its traceback ends here.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            raise TypeError(_advice(given, named, list(signature.parameters), error)) from None
        try:
            return function(*given, **named)
        except NotCacheable as refusal:
            raise refusal.with_traceback(None) from refusal.__cause__

    return cast(F, call)


def _advice(given: Sequence[Any], named: Mapping[str, Any], known: list[str], error: TypeError) -> str:
    """The error for these arguments: what is wrong, and what to write."""
    if len(given) > 1:
        value = printable(repr(given[1]), 60)
        name = "memory" if isinstance(given[1], (int, str)) else "transform"
        return (
            f"hotset.cache takes nothing but the dataset by position, got {value} as well; "
            f"write {name}={value}."
        )
    for name in named:
        if name not in known:
            like = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            rest = f"write {like[0]}=" if like else f"its arguments are {', '.join(known)}"
            return f"hotset.cache has no argument {name}=; {rest}."
    return f"hotset.cache must be given a dataset: {error}."


def check_arguments(dataset: Any, given: CacheArguments) -> None:
    """Refuse arguments that are wrong, or do not go together.

    Raises:
        ArgumentError, QuantityError: see :func:`hotset.cache`.
    """
    if given.memory != "auto":
        parse_bytes(given.memory, whole=lambda: 0)  # raises also in a rank that finds another rank's cache
    if given.cut is not None and type(given.cut) is not int:  # before it becomes a part of the cache's key
        got = f"{type(given.cut).__name__} {given.cut!r}"
        raise ArgumentError(f"cut= must be an int, how many transforms are cached, got {got}.")
    _require_one_dataset(dataset)
    _check_window(given)
    _check_session(given)
    _check_concurrency(given)
    if is_stream(dataset):
        _check_stream(given)


def _require_one_dataset(dataset: Any) -> None:
    """Refuse a loader, whose batches would be samples, and several datasets by name.

    Hugging Face's ``load_dataset`` returns these without ``split=``.
    """
    if isinstance(dataset, DataLoader):
        raise ArgumentError(
            f"dataset must be what samples are read from, got a {type(dataset).__name__}; cache its dataset, "
            "and load from that: hotset.DataLoader(hotset.cache(dataset), batch_size=...)."
        )
    names = list(itertools.islice(dataset, 4)) if isinstance(dataset, Mapping) else []
    if names and all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"dataset must be one dataset, got {type(dataset).__name__} with {', '.join(map(repr, names))}; "
            f"give one of them: hotset.cache(datasets[{names[0]!r}])."
        )


def _check_window(given: CacheArguments) -> None:
    window = given.window
    if window is None:
        return
    if _has_batched(given.transform):
        raise ArgumentError(
            "hotset.batched must not be used with window=: a window is filled sample by sample, each when "
            "its turn comes; leave out window=, and give memory= or spill= for all results."
        )
    if not isinstance(window, Window):
        raise ArgumentError(
            f"window= must be a hotset.Window, got {window!r}; write "
            f"window=hotset.Window(resident={window!r})."
        )
    if given.cluster is not None:
        raise ArgumentError(
            "window= and cluster= cannot be combined; give each machine its own torch.utils.data.Subset of "
            "the dataset with its own window=, and leave out cluster= and session=."
        )
    if given.spill is not None:
        raise ArgumentError(
            "window= and spill= cannot be combined: a window keeps all samples of an epoch in memory; leave "
            "out one of them."
        )
    if given.session is not None:
        raise ArgumentError(
            "window= and session= cannot be combined: a window belongs to one job, which moves it; leave out "
            "one of them."
        )


def _check_session(given: CacheArguments) -> None:
    """Check what goes with a session, or needs one: ``cluster=``, ``replicate=`` and ``spill=``."""
    cluster, session, spill = given.cluster, given.session, given.spill
    if cluster is not None:
        if not isinstance(cluster, str) or not cluster:
            raise ArgumentError(f'cluster= must be "auto" or an address (host:port), got {cluster!r}.')
        if not isinstance(session, str):
            raise ArgumentError(
                f"cluster= needs a session name, by which machines find each other, got session={session!r}; "
                'write session="...".'
            )
    elif given.replicate:
        raise ArgumentError("replicate= is for cluster=, which was not given; leave it out.")
    if session is None and spill is False:
        raise ArgumentError(
            "spill=False is for a session that spills, and session= was not given; leave it out."
        )
    if session is not None and spill is not None and spill is not False:
        raise ArgumentError(
            f"session {session!r} has its own spill folder, set at its creation; leave out spill=, or create "
            f"the session with `--spill {spill}`."
        )


def _check_concurrency(given: CacheArguments) -> None:
    concurrency = given.concurrency
    if type(concurrency) is not int or not 1 <= concurrency <= _MOST_THREADS:
        raise ArgumentError(
            f"concurrency= must be a whole number from 1 to {_MOST_THREADS}, got {concurrency!r}; 16 suits "
            "most sources that wait."
        )
    if concurrency > 1 and given.window is not None:
        raise ArgumentError(
            "concurrency= must be left out with window=: a window is filled by processes, of which a loader "
            "starts as many as it has workers."
        )


def _check_stream(given: CacheArguments) -> None:
    """Refuse what does not go with an iterable dataset."""
    for name, default in {"window": None, "cluster": None, "replicate": False, "concurrency": 1}.items():
        value = getattr(given, name)
        if value != default:
            raise ArgumentError(
                f"{name}= must be left out with an iterable dataset, got {value!r}: it is read in its own "
                "order, by a loader's workers; record it, and cache what was recorded again: cached.fill(), "
                f"then hotset.cache(cached, {name}=...)."
            )
    if _has_batched(given.transform):
        raise ArgumentError(
            "hotset.batched must not be used with an iterable dataset, whose samples come one by one; record "
            "it, and cache what was recorded again: cached.fill(), then hotset.cache(cached, transform=...)."
        )


def _has_batched(transform: Any) -> bool:
    return any(isinstance(step, Batched) for step in leaves(chain_of(transform)))
