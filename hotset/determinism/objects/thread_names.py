"""The names that the threads of a program use while it runs.

What a thread writes meanwhile is not what a reading has left behind: to put it back would lose it. So what
the code of running threads names is left as it is.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections import deque
from typing import Any

from hotset.determinism.objects.code_dependencies import is_users, names_in
from hotset.determinism.objects.safe_access import UNSET, content_of_cell

__all__ = ["key_of", "named_by_threads"]

_MOST = 200  # functions
_Code = tuple[types.CodeType, dict[str, Any]]


def key_of(holder: Any, name: str) -> tuple[int, str]:
    """A key for an attribute of a class or module, or for a global, whose holder is the dict of globals."""
    return id(vars(holder) if type(holder) is types.ModuleType else holder), name


def named_by_threads() -> dict[Any, Any]:
    """What the code of the other threads of Python names: a key for each name, and the ids of their values.

    With each comes what has that id, so that it stays alive, and no other object gets the id.

    It is the code that runs in them now, and the user's functions that it calls by a global name. What a
    thread reaches by its arguments alone is not looked for.

    Example:
        >>> type(named_by_threads())
        <class 'dict'>
    """
    own, found = threading.get_ident(), dict[Any, Any]()
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != own}
    if not frames:
        return found
    codes: deque[_Code] = deque()
    for thread in threading.enumerate():
        target: Any = getattr(thread, "_target", None)
        if thread.ident in frames and issubclass(type(target), types.FunctionType):
            codes.append((target.__code__, target.__globals__))
            contents = map(content_of_cell, target.__closure__ or ())
            found.update((id(content), content) for content in contents if content is not UNSET)
    for frame in frames.values():
        at: types.FrameType | None = frame
        while at is not None:
            codes.append((at.f_code, at.f_globals))
            at = at.f_back
    seen = set[types.CodeType]()
    while codes and len(seen) < _MOST:
        code, names = codes.popleft()
        if code not in seen:
            seen.add(code)
            with contextlib.suppress(Exception):  # of a stranger's metaclass
                codes.extend(_named(code, names, found))
    return found


def _named(code: types.CodeType, names: dict[str, Any], found: dict[Any, Any]) -> list[_Code]:
    """Adds what code names to what was found; returns the code of the user's functions among it."""
    used = names_in(code)
    holders: list[Any] = [names]
    called: list[_Code] = []
    for holder in holders:
        held = holder if holder is names else vars(holder)
        # One that it sets need not be there yet.
        found.update((key_of(holder, name), holder) for name in used)
        values: list[Any] = [held.get(name) for name in used]  # a thread may delete one meanwhile
        for value in values:
            found[id(value)] = value
            if issubclass(type(value), types.FunctionType) and is_users(value):
                called.append((value.__code__, value.__globals__))
            elif holder is names and (type(value) is types.ModuleType or issubclass(type(value), type)):
                holders.append(value)
    return called
