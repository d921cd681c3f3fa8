"""Bindings: the objects that the names in a function stand for, so that a new binding is noticed.

A fingerprint describes a function with the globals and closures that it reads, as they are at that time. It
takes milliseconds, so ``hotset.memo`` does not take one at each call. But a notebook's next cell, a late
configuration or ``importlib.reload`` binds these names anew. So the bindings that the function reads are
listed once, and comparing them takes a microsecond: the same names must stand for the very same objects.

A name that the function itself binds (a global that counts its calls) does not count: that is its own state.

An object that a program changes in place stays the same object. Where the function reaches such objects
(:attr:`Bindings.mutable`), only another fingerprint tells.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from hotset.determinism.objects.code_dependencies import cells_of, globals_of, is_users
from hotset.determinism.objects.safe_access import UNSET, content_of_cell, has, is_a

__all__ = ["Bindings"]

_MOST = 500
_FIXED = (type(None), bool, int, float, complex, str, bytes, types.ModuleType, types.BuiltinFunctionType)


class Bindings:
    """The names that a function and the user's functions below it read, and the objects that they stand for.

    Args:
        function: any callable.

    Attributes:
        mutable: whether some of these objects can be changed in place.

    Example:
        >>> scale = 2
        >>> bindings = Bindings(lambda x: x * scale)
        >>> bindings.changed()
        False
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.mutable = False
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._code: list[tuple[types.FunctionType, Any, Any, Any]] = []
        seen: set[int] = set()
        waiting: deque[Any] = deque([function])
        while waiting and len(seen) < _MOST:
            value = waiting.popleft()
            if id(value) not in seen:
                seen.add(id(value))
                waiting.extend(self._note(value))
        self.mutable |= bool(waiting)

    def _note(self, value: Any) -> list[Any]:
        """Note the names that a value reads, if it is a function; return the objects that it leads to."""
        if is_a(value, types.FunctionType):
            return self._note_function(value) if is_users(value) else []
        if is_a(value, types.MethodType):
            return [value.__func__, value.__self__]
        wrapped = value.__wrapped__ if has(value, "__wrapped__") else None
        if is_a(wrapped, types.FunctionType) and type(value).__module__.startswith("hotset."):
            return [wrapped]
        if is_a(value, type):
            if not is_users(value):
                return []
            self.mutable = True  # its attributes can be set
            return [part for part in vars(value).values() if isinstance(part, types.FunctionType)]
        if is_a(value, (tuple, frozenset)):
            return list(value)
        if is_a(value, functools.partial):
            self.mutable = True  # its keywords
            return [value.func, *value.args, *value.keywords.values()]
        if not is_a(value, _FIXED):
            self.mutable = True
            return [kind for kind in type(value).__mro__ if is_users(kind)]  # its methods may be called
        return []

    def _note_function(self, function: types.FunctionType) -> list[Any]:
        found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._code.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
        cells = [(cell, content_of_cell(cell)) for cell in cells_of(function).values()]
        # Others are built-ins, or not there yet: an error when the function is called.
        bound = [(names, name, names[name]) for names, name in globals_of(function) if name in names]
        self._cells += cells
        self._globals += bound
        return [*found, *(content for _, content in cells), *(value for *_, value in bound)]

    def changed(self) -> bool:
        """Whether a name stands for another object than when this was made."""
        for names, name, value in self._globals:
            if names.get(name, UNSET) is not value:
                return True
        for cell, content in self._cells:
            if content_of_cell(cell) is not content:
                return True
        for function, code, defaults, named in self._code:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return True
            if function.__kwdefaults__ is not named:
                return True
        return False
