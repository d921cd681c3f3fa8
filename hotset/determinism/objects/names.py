"""The names that an object, a class or a function uses, as they were: put back after a reading or a trial.

A method may keep an open file in its class, in a global, in a dict of its module, or by
``functools.lru_cache``, as well as in the dataset. See :mod:`hotset.dataset.held_attributes` for what that
means to workers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch

from hotset.determinism.objects.code_dependencies import installed, loaded_globals, names_in
from hotset.determinism.objects.object_graph import attributes
from hotset.determinism.objects.safe_access import UNSET, content_of_cell
from hotset.determinism.objects.thread_names import key_of
from hotset.store.leaves.instances import solid_base

__all__ = ["Names", "empty_memos"]

_COPIED = (list, dict, set, np.ndarray, torch.Tensor)
_LARGE = 1 << 20  # bytes
_MEMO = type(functools.lru_cache(operator.is_))


class Names:
    """The attributes of an object or class, or the globals and enclosing names that a function reads.

    Lists, dicts, sets, arrays and tensors among them get their old contents, one level deep. What
    ``functools.lru_cache`` keeps cannot be set; one that was empty is emptied.

    Args:
        owner: the object, class or function.
        whole: copy contents of any size and memory; otherwise those that are not large, nor shared.

    Example:
        >>> import types
        >>> holder = types.SimpleNamespace(file=None, read=[])
        >>> names = Names(holder)
        >>> holder.file, holder.size = "an open file", 3
        >>> holder.read.append(7)
        >>> names.put_back()
        >>> holder
        namespace(file=None, read=[])
    """

    def __init__(self, owner: Any, *, whole: bool = False) -> None:
        self._owner = owner
        self._values = _values(owner)
        self._contents: dict[Any, Any] = {}
        held = vars(owner).values() if issubclass(type(owner), type) else self._values.values()
        self._empty = empty_memos(list(held))
        for name, value in self._values.items():
            with contextlib.suppress(Exception):  # of a stranger's code: it keeps what it holds
                copied = issubclass(type(value), _COPIED)
                if copied and (whole or (_size(value) <= _LARGE and not _is_shared(value))):
                    is_tensor = issubclass(type(value), torch.Tensor)
                    self._contents[name] = value.detach().clone() if is_tensor else copy.copy(value)

    def put_back(self, threads: Collection[Any] = ()) -> None:
        """Set all names to what they were, with the contents that they had.

        Args:
            threads: what :func:`~.thread_names.named_by_threads` found: it is left as it is now.
        """
        now = _values(self._owner)
        for name in set(now) - set(self._values):
            if not self._is_named(name, threads):
                _set(self._owner, name)
        for name, value in self._values.items():
            if (name not in now or now[name] is not value) and not self._is_named(name, threads):
                _set(self._owner, name, value)
            if id(value) in threads:
                continue
            if name in self._contents and not _is_same(value, self._contents[name]):
                _refill(value, self._contents[name])
        for memo in self._empty:
            if not _is_empty(memo):
                memo.cache_clear()

    def _is_named(self, name: Any, threads: Collection[Any]) -> bool:
        if isinstance(name, tuple):
            return key_of(_globals_of(self._owner, name), name[-1]) in threads
        return isinstance(name, str) and key_of(self._owner, name) in threads


def _values(owner: Any) -> dict[Any, Any]:
    """What an owner's names stand for.

    Of a function, a global's name is in a tuple, after that of its module if this is another one of the
    user's; a cell has a number.
    """
    if issubclass(type(owner), type):
        return {name: value for name, value in vars(owner).items() if not name.startswith(("__", "_hotset"))}
    found: dict[Any, Any] = {**attributes(owner)}
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
        owner, name = owner.__closure__[name], "cell_contents"
    if isinstance(name, tuple):
        names, name = _globals_of(owner, name), name[-1]
        names.pop(name) if value is UNSET else names.update({name: value})
    else:
        kind: Any = type if issubclass(type(owner), type) else object
        kind.__delattr__(owner, name) if value is UNSET else kind.__setattr__(owner, name, value)


def empty_memos(values: Iterable[Any]) -> list[Any]:
    """Those of these values that ``functools.lru_cache`` made, and which keep nothing yet.

    Example:
        >>> kept, empty = functools.lru_cache(abs), functools.lru_cache(len)
        >>> kept(-1)
        1
        >>> empty_memos([kept, property(empty), abs]) == [empty]
        True
    """
    return [memo for memo in map(_memo, values) if _is_empty(memo)]


def _memo(value: Any) -> Any:
    """What ``functools.lru_cache`` made of a function, also of a method or property; None if it is none."""
    value = getattr(value, "fget", None) if type(value) is property else value
    value = value.__func__ if type(value) in (staticmethod, classmethod) else value
    return value if type(value) is _MEMO else None


def _is_empty(memo: Any) -> bool:
    return memo is not None and memo.cache_info().currsize == 0


def _is_shared(value: Any) -> bool:
    """Whether an array or tensor lies in memory that other processes may write to meanwhile."""
    while isinstance(value, np.ndarray):
        value = value.base
    if isinstance(value, torch.Tensor):
        return bool(value.is_shared())  # type: ignore[no-untyped-call]
    return value is not None and not isinstance(value, _COPIED)


def _is_same(value: Any, content: Any) -> bool:
    """Whether a container has its old elements; so that nothing is written where nothing has changed."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return torch.equal(value, content)
    if issubclass(kind, np.ndarray):
        return np.array_equal(value, content)
    if len(value) != len(content):
        return False
    now, before = (
        [*each, *each.values()] if issubclass(kind, dict) else list(each) for each in (value, content)
    )
    return all(map(operator.is_, now, before))


def _size(value: Any) -> int:
    """The bytes of an array or tensor, about those of the references in another container."""
    return int(value.nbytes) if isinstance(value, (np.ndarray, torch.Tensor)) else 8 * len(value)


def _refill(value: Any, content: Any) -> None:
    """Give a container, array or tensor its old content again.

    By the methods of the class that was written in C: a user's own may refuse, and leave it empty.
    """
    kind = type(value)
    base: Any = solid_base(kind)
    if issubclass(kind, list):
        base.__setitem__(value, slice(None), content)
    elif issubclass(kind, (dict, set)):
        base.clear(value)
        base.update(value, content)
    elif issubclass(kind, np.ndarray):
        np.copyto(value, content, casting="unsafe")
    elif not value.requires_grad:
        with torch.no_grad():
            value.copy_(content)
