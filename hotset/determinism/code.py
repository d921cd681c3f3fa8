"""What code is made of: the globals that a function loads, the modules it imports, and where these come from.

Read from the instructions, not from ``co_names``, which holds attribute names and globals alike: there an
attribute ``.count`` would drag in an unrelated global ``count``, and with it another identity on every call.

Code of an *installed* distribution is known by its version. Any other is the *user's*, and is looked into.
"""

from __future__ import annotations

import dis
import importlib.metadata
import importlib.util
import platform
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

__all__ = ["imports", "installed", "loaded_globals", "source_of"]

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


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
    steps = (step for each in _nested(code) for step in dis.get_instructions(each))
    return tuple(dict.fromkeys(str(step.argval) for step in steps if step.opname == "IMPORT_NAME"))


@lru_cache(maxsize=4096)
def installed(module: str) -> str | None:
    """Return the distribution and version that a module belongs to, or None if it is the user's own.

    Nothing is imported for it.

    Example:
        >>> installed("json").startswith("python 3."), installed("__main__") is None
        (True, True)
    """
    root = module.partition(".")[0]
    if root in ("__main__", "__mp_main__"):
        return None
    origin = _origin(module)
    if origin is None:
        return f"python {platform.python_version()}" if root in sys.stdlib_module_names else None
    if {"site-packages", "dist-packages"} & set(origin.parts):
        return f"{root} {_version(root)}"
    return f"python {platform.python_version()}" if _LIBRARY in origin.parents else None


def source_of(module: str) -> bytes:
    """Return the bytes of a user's module's file; empty if there is none to read."""
    origin = _origin(module)
    try:
        return origin.read_bytes() if origin is not None else b""
    except OSError:
        return b""


def _origin(module: str) -> Path | None:
    """The file of a module; of its package's root if it has none of its own or was not imported yet."""
    root = module.partition(".")[0]
    for name in (module, root):
        # Past a lazy module's __getattr__; and it need not be a module at all.
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        if isinstance(file, str):
            return Path(file).resolve()
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _version(root: str) -> str:
    """Of the distribution whose package this is: its name may be another (PIL is pillow's)."""
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(root, [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


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
