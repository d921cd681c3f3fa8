"""Memos: what ``functools.lru_cache`` and ``functools.cache`` make of a function, and what they keep."""

from __future__ import annotations

import functools
import gc
import operator
import types
from typing import Any

__all__ = ["MEMO", "calls_kept_by", "kept_by", "memo_of"]

MEMO = type(functools.lru_cache(operator.is_))
_LINK = "_lru_list_elem"  # the class of what it keeps in order


def memo_of(value: Any) -> Any:
    """What ``functools.lru_cache`` made of a function, also of a method or property; None if it is none."""
    value = getattr(value, "fget", None) if type(value) is property else value
    value = value.__func__ if type(value) in (staticmethod, classmethod) else value
    return value if type(value) is MEMO else None


def calls_kept_by(memo: Any) -> dict[Any, Any] | None:
    """The dict in which a memo that is not empty keeps results by key; it has no name, but the collector
    knows it.
    """
    info, own = memo.cache_info(), getattr(memo, "__dict__", None)
    found = [each for each in gc.get_referents(memo) if type(each) is dict and each is not own]
    if info.maxsize is not None:  # results are among what it refers to; the dict has links to them
        found = [each for each in found if {type(link).__name__ for link in each.values()} == {_LINK}]
    return found[0] if len(found) == 1 and len(found[0]) == info.currsize else None


def kept_by(memo: Any, most: int) -> list[Any]:
    """The results that a memo keeps, and perhaps arguments; none if these are more than so many.

    Example:
        >>> double = functools.cache(lambda x: 2.0 * x)
        >>> double(3), kept_by(double, 10), kept_by(double, 0)
        (6.0, [6.0], [])
    """
    if not 0 < memo.cache_info().currsize <= most:
        return []
    kept = calls_kept_by(memo) or {}
    if not any(type(value).__name__ == _LINK for value in kept.values()):
        return list(kept.values())
    others = (type, types.FunctionType)
    held = [each for each in gc.get_referents(memo) if each is not kept and each is not vars(memo)]
    return [each for each in held if not issubclass(type(each), others)]
