"""What a function's code refers to: the names of globals that it loads, and the modules that it imports.

Read from the instructions, not from ``co_names``, which holds attribute names and globals alike: there an
attribute ``.count`` would drag in an unrelated global ``count``, and with it another identity on every call.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from functools import lru_cache

__all__ = ["imports", "loaded_globals"]

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


@lru_cache(maxsize=4096)
def loaded_globals(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that ``code`` and the code nested in it read, with the attributes read off them.

    In order of first use, each chain of names once.

    Example:
        >>> import math
        >>> loaded_globals((lambda x: math.floor(x) + len(str(x))).__code__)
        (('math', 'floor'), ('len',), ('str',))
    """
    return tuple(dict.fromkeys(chain for each in _nested(code) for chain in _chains(each)))


@lru_cache(maxsize=4096)
def imports(code: types.CodeType) -> tuple[str, ...]:
    """Return the modules that ``code`` and the code nested in it import while they run.

    Example:
        >>> def f():
        ...     import math
        >>> imports(f.__code__)
        ('math',)
    """
    return tuple(
        dict.fromkeys(
            str(step.argval)
            for each in _nested(code)
            for step in dis.get_instructions(each)
            if step.opname == "IMPORT_NAME"
        )
    )


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if chain and step.opname in _ATTRIBUTE:
            chain += (str(step.argval),)
            continue
        if chain:
            yield chain
        chain = (str(step.argval),) if step.opname in _GLOBAL else ()
    if chain:
        yield chain
