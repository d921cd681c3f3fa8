"""Hooks that run when a module has been imported; nothing is imported for them.

A finder at the head of ``sys.meta_path`` knows the names of a few modules. For one of these it asks the
finders behind it, as Python would have, and puts an ``exec_module`` on the loader that it gets: an attribute
of that one loader, which takes itself away when it runs. So the module's ``__loader__`` and ``__spec__`` are
what they would have been, and every other import passes with one look into a dict.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["AfterImport", "Hook"]

Hook = Callable[[ModuleType], None]


class AfterImport:
    """A finder that finds nothing itself and calls hooks after the import of their modules.

    Example:
        >>> hooks = AfterImport({"colorsys": lambda module: setattr(module, "seen", True)})
        >>> hooks.install()
        >>> import colorsys
        >>> colorsys.seen, type(colorsys.__loader__).__name__
        (True, 'SourceFileLoader')
    """

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks
        self._searching = threading.local()

    def install(self) -> None:
        """Be the first finder; call the hooks of modules that are there already."""
        sys.meta_path.insert(0, self)
        for name, hook in self._hooks.items():
            module = sys.modules.get(name)
            if module is not None:
                hook(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the finders behind this one find, its loader told to call the hook; None for most modules."""
        hook = self._hooks.get(name)
        if hook is None or getattr(self._searching, "name", None) == name:
            return None
        self._searching.name = name
        try:
            spec = self._behind(name, path, target)
        finally:
            self._searching.name = None
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, hook)
        return spec

    def _behind(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in [*sys.meta_path]:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None


def _call_after(loader: Any, hook: Hook) -> None:
    """Have ``loader`` call ``hook`` with the module that it executes next."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        # cv2 puts a module of its own name beside itself: what counts is the one that is imported.
        hook(module)

    with contextlib.suppress(AttributeError):  # a loader that takes none: its module stays as it is
        loader.exec_module = exec_module
