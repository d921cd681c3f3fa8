"""The names that an object, a class or a function uses, as they were: put back after a reading or a trial.

An object's are its attributes. A method may keep an open file in its class, in a global, in a dict of its
module, or by ``functools.lru_cache``, as well as in the dataset. See :mod:`hotset.dataset.held_attributes`
for what that means to workers. What the values held is in :mod:`hotset.determinism.objects.held_values`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Container
from typing import Any

from hotset.determinism.objects.code_dependencies import installed, loaded_globals, names_in
from hotset.determinism.objects.held_values import PUT_BACK, HeldValue, Room
from hotset.determinism.objects.memos import calls_kept_by, memo_of
from hotset.determinism.objects.safe_access import UNSET, attributes_of, content_of_cell, set_attribute
from hotset.determinism.objects.thread_names import key_of

__all__ = ["Counts", "Names", "is_its_own"]

Counts = Callable[[Any, Any], bool]
"""Whether a name of an owner counts."""

_MOST_CALLS = 4096  # that a memo may keep, for what is added to be taken out


def is_its_own(owner: Any, name: Any) -> bool:
    """Whether an attribute is the owner's: hotset keeps some in the user's objects."""
    return not str(name).startswith("_hotset")


class Names:
    """The attributes of an object or class, or the globals and enclosing names that a function reads.

    From what ``functools.lru_cache`` keeps, what was added is taken out.

    Args:
        owner: the object, class or function.
        room: how much of what they hold is looked at; it is used up.
        counts: whether a name counts; all but hotset's do by default.
        code: whether a class's attributes count, and what a function reads, and not only the attributes of an
            object or function; then only what can be put back is looked at.
        shared: whether memory that other processes may write to is put back as well.

    Attributes:
        owner, counts, code: as given.
        held: what its names stood for.
        seen: of those that can be changed in place, what they held, by name.

    Example:
        >>> import types
        >>> holder = types.SimpleNamespace(file=None, read=[])
        >>> names = Names(holder, Room())
        >>> holder.file, holder.size = "an open file", 3
        >>> holder.read.append(7)
        >>> names.put_back()
        >>> holder
        namespace(file=None, read=[])
    """

    def __init__(
        self, owner: Any, room: Room, counts: Counts = is_its_own, *, code: bool = False, shared: bool = False
    ) -> None:
        self.owner, self.counts, self.code, self._shared = owner, counts, code, shared
        self.held = {name: value for name, value in (self.now() or {}).items() if counts(owner, name)}
        self.seen: dict[Any, HeldValue] = {}
        for name, value in self.held.items():
            if code and not issubclass(type(value), PUT_BACK):
                continue
            with contextlib.suppress(Exception):  # of a stranger's code: it cannot be looked into
                if (found := HeldValue.of(value, room)) is not None:
                    self.seen[name] = found
        held = vars(owner) if code and issubclass(type(owner), type) else self.held
        memos = [memo for memo in map(memo_of, list(held.values())) if memo is not None]
        self._memos = [(memo, _known_calls(memo)) for memo in memos]

    def now(self) -> dict[Any, Any] | None:
        """What all names stand for now; None if the owner does not show them."""
        return _values(self.owner) if self.code else attributes_of(self.owner)

    def put_back(self, threads: Container[Any] = ()) -> None:
        """Set all names to what they were, with the contents that they had.

        Args:
            threads: what :func:`~.thread_names.named_by_threads` found: it is left as it is now.
        """
        now = self.now()
        if now is None:
            return
        for name in [name for name in now if name not in self.held and self.counts(self.owner, name)]:
            if not self._is_named(name, threads):
                _set(self.owner, name)
        for name, value in self.held.items():
            if (name not in now or now[name] is not value) and not self._is_named(name, threads):
                _set(self.owner, name, value)
        for each in self.seen.values():
            with contextlib.suppress(Exception):  # of a stranger's code: it keeps what it holds now
                each.put_back(threads, shared=self._shared)
        for memo, known in self._memos:
            _forget_all_but(memo, known)

    def _is_named(self, name: Any, threads: Container[Any]) -> bool:
        if isinstance(name, tuple):
            return key_of(_globals_of(self.owner, name), name[-1]) in threads
        return isinstance(name, str) and key_of(self.owner, name) in threads


def _values(owner: Any) -> dict[Any, Any]:
    """What an owner's names stand for.

    Of a function, a global's name is in a tuple, after that of its module if this is another one of the
    user's; a cell has a number.
    """
    if issubclass(type(owner), type):
        return {name: value for name, value in vars(owner).items() if not name.startswith("__")}
    found: dict[Any, Any] = {**(attributes_of(owner) or {})}
    if issubclass(type(owner), types.FunctionType):
        read = {names[0] for names in loaded_globals(owner.__code__)}
        found.update({(name,): owner.__globals__[name] for name in read & owner.__globals__.keys()})
        for name in [name for name in read if _is_users_module(owner.__globals__.get(name))]:
            held = vars(owner.__globals__[name])
            found.update({(name, each): held[each] for each in names_in(owner.__code__) & held.keys()})
        cells = dict(enumerate(map(content_of_cell, owner.__closure__ or ())))
        found.update((number, content) for number, content in cells.items() if content is not UNSET)
    return found


def _is_users_module(value: Any) -> bool:
    return type(value) is types.ModuleType and installed(value.__name__) is None


def _globals_of(owner: Any, name: tuple[str, ...]) -> dict[str, Any]:
    """The namespace of a function's name."""
    names: dict[str, Any] = owner.__globals__
    return names if len(name) == 1 else vars(names[name[0]])


def _set(owner: Any, name: Any, value: Any = UNSET) -> None:
    """Have a name stand for a value again, or for nothing."""
    if isinstance(name, int):
        cell = owner.__closure__[name]
        if value is UNSET:
            del cell.cell_contents
        else:
            cell.cell_contents = value
    elif isinstance(name, tuple):
        names, name = _globals_of(owner, name), name[-1]
        names.pop(name) if value is UNSET else names.update({name: value})
    elif issubclass(type(owner), type):
        type.__delattr__(owner, name) if value is UNSET else type.__setattr__(owner, name, value)
    else:
        set_attribute(owner, name, value)


def _known_calls(memo: Any) -> dict[int, Any] | None:
    """The keys of the calls whose results a memo keeps, by their id, as they may be slow to compare.

    None if they are too many, or cannot be told.
    """
    if not (size := memo.cache_info().currsize):
        return {}
    kept = calls_kept_by(memo) if size <= _MOST_CALLS else None
    return {id(key): key for key in kept} if kept is not None else None


def _forget_all_but(memo: Any, known: dict[int, Any] | None) -> None:
    """Take out of a memo what it keeps of other calls than these."""
    if known:
        kept = calls_kept_by(memo) or {}
        for key in [key for key in kept if id(key) not in known]:
            del kept[key]  # a memo bears that: another thread may do so
    elif known is not None and memo.cache_info().currsize:
        memo.cache_clear()
