"""What is said to people: warnings, each at their own line however deep it is found, and names made safe."""

from __future__ import annotations

import os
import sys
import warnings

from hotset.errors import HotsetWarning

__all__ = ["Teller", "printable", "tell"]

_OURS = os.path.dirname(__file__) + os.sep


def tell(sentence: str) -> None:
    """Warn of something, as from the innermost line that is neither hotset's nor torch's.

    (``skip_file_prefixes`` of :func:`warnings.warn` does this from Python 3.12 on.)
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    theirs = (_OURS, os.path.dirname(torch) + os.sep) if torch else (_OURS,)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(theirs):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, HotsetWarning, stacklevel=level)


class Teller:
    """Warns of something, and of what bears a name only once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, sentence: str, about: str = "") -> None:
        if about not in self._told:
            self._told |= {about} - {""}
            tell(sentence)


def printable(text: str, longest: int = 200) -> str:
    """Return ``text`` in one line that cannot move a cursor, colour a terminal or forge a line of a log.

    What is longer than ``longest`` characters is cut.

    Example:
        >>> print(printable("two\\nlines"))
        two\\nlines
    """
    cut = text if len(text) <= longest else text[: longest - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
