"""Warnings that point at the user's own line, and text made safe to print."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

from hotset.errors import HotsetWarning

__all__ = ["Warner", "printable", "warn", "warnings_to"]

_here = threading.local()
_OURS = os.path.dirname(__file__) + os.sep
# Libraries that call hotset on the user's behalf: none of their lines is the user's.
_BETWEEN = ("torch", "typer", "click", "contextlib", "multiprocessing", "concurrent.futures", "threading")


def warn(sentence: str) -> None:
    """Warn at the user's line: the innermost that does not belong to hotset, torch or another library.

    (``skip_file_prefixes`` of :func:`warnings.warn` does this from Python 3.12 on.)
    """
    say = getattr(_here, "say", None)
    if say is not None:
        say(sentence)
        return
    theirs = (_OURS, *filter(None, map(_code_of, _BETWEEN)))
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(theirs):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, HotsetWarning, stacklevel=level)


def _code_of(module: str) -> str:
    """The folder or the file of a module's code, if it is loaded; else an empty string."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return os.path.dirname(file) + os.sep if os.path.basename(file) == "__init__.py" else file


@contextlib.contextmanager
def warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Give what this thread would warn of to ``say``: for programs that do not know that they use hotset.

    Example:
        >>> with warnings_to(print):
        ...     warn("there is no room.")
        there is no room.
    """
    before = getattr(_here, "say", None)
    _here.say = say
    try:
        yield
    finally:
        _here.say = before


class Warner:
    """Warns; only once about each name in ``about``."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, sentence: str, about: str = "") -> None:
        if about not in self._warned:
            self._warned |= {about} - {""}
            warn(sentence)


def printable(text: str, longest: int = 200) -> str:
    """Return ``text`` in one line that cannot move a cursor, colour a terminal or forge a line of a log.

    What is longer than ``longest`` characters is cut.

    Example:
        >>> print(printable("two\\nlines"))
        two\\nlines
    """
    cut = text if len(text) <= longest else text[: longest - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
