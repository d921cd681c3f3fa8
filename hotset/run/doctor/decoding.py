"""Clocks around the functions that ``hotset run`` knows; in a trial, these functions keep what they return.

They are replaced as their modules are imported, and others have imported them by name since. So a trial puts
nothing else into the modules: each replacement looks whether there is something to call instead.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hotset.run import decoders, pillow
from hotset.run.import_hook import Hook
from hotset.run.kept import close_memos

__all__ = ["Decode", "hooks", "keep_decoders"]

# Calls a function of this name between two readings of the clocks; the last one tells the bytes of a value.
Decode = Callable[[str, Callable[[], Any], Callable[[Any], int]], Any]

_timed: dict[str, Callable[[], Any]] = {}  # by name, what makes one that keeps
_keeping: dict[str, Callable[..., Any]] = {}


def hooks(decode: Decode) -> Iterator[tuple[str, Hook]]:
    """The hooks that put the clocks around decoders."""
    make = functools.partial(_timed_by, decode)
    for decoder in decoders.TABLE:
        yield decoder.module, functools.partial(decoders.replace, decoder, make)
    yield "PIL.ImageFile", functools.partial(_time_pillow, decode)


def _timed_by(decode: Decode, function: Callable[..., Any], decoder: decoders.Decoder) -> Any:
    """What takes the place of a decoder."""
    title = f"{decoder.module}.{decoder.name}"
    _timed[title] = functools.partial(decoders.memoised, function, decoder)

    def call(*args: Any, **keywords: Any) -> Any:
        if _keeping:
            return _keeping[title](*args, **keywords)
        return decode(title, lambda: function(*args, **keywords), _bytes_of)

    return decoders.stand_in(function, call)


def _time_pillow(decode: Decode, module: Any) -> None:
    plain = module.ImageFile.load

    def load(self: Any) -> Any:
        if not self.tile:  # loaded before
            return plain(self)
        return decode(pillow.NAME, lambda: plain(self), lambda _: _bytes_of_picture(self))

    module.ImageFile.load = functools.wraps(plain)(load)


@contextlib.contextmanager
def keep_decoders() -> Iterator[None]:
    """Within, the decoders keep what they return, as below ``hotset run``, and are not timed."""
    module = sys.modules.get("PIL.ImageFile")
    load = module and module.ImageFile.load
    get = module and module.Image._getdecoder
    try:
        _keeping.update({title: keeps() for title, keeps in _timed.items()})
        if module is not None:
            module.ImageFile.load = load.__wrapped__  # type: ignore[union-attr]  # PIL's is looked for
            for _, hook in pillow.hooks():
                hook(module)
        yield
    finally:
        _keeping.clear()
        if module is not None:
            module.ImageFile.load, module.Image._getdecoder = load, get
        close_memos()


def _bytes_of(value: Any) -> int:
    """The bytes of an array or a tensor, or of the first of a tuple; 0 of anything else."""
    size = getattr(value[0] if isinstance(value, tuple) and value else value, "nbytes", None)
    return size if isinstance(size, int) else 0


def _bytes_of_picture(image: Any) -> int:
    return int(image.width) * int(image.height) * len(image.getbands())
