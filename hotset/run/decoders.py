"""The functions that are memoised as their module is imported, and what makes two of their calls the same.

A function is here if what it returns follows from one file and plain arguments. Its identity is the file
(:mod:`hotset.memo` looks at its size, time of change and inode), the other arguments with their defaults, and
the versions of the libraries that decode. A call whose identity is not certain is left alone; the report of
``hotset run`` says how often and why.

Built-in functions are replaced by an object without ``__get__``: as a class's attribute it binds no
``self``, and neither did they. Python's functions are replaced by a function.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import numbers
import os
import stat
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hotset.run.environment import Options, options_here
from hotset.run.import_hook import Hook
from hotset.run.kept import File, Kept, before_fork, memo_of
from hotset.run.ledger import IMPORTED, ledger_here, left_alone

__all__ = [
    "TABLE",
    "Decoder",
    "LeftAlone",
    "absolute",
    "check_age",
    "file_identity",
    "hooks",
    "memoised",
    "replace",
    "stand_in",
]

# Longer than the clock by which file systems write times.
_MOMENT_SECONDS = 0.05

# The file that a call reads, and what else tells it from others.
Identify = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[File, tuple[Any, ...]]"]


class LeftAlone(Exception):
    """This call is not memoised; the text says why, or nothing where the function below it is."""


class Decoder(NamedTuple):
    """One function.

    Attributes:
        module: the module whose attribute is replaced; others import it from there.
        name: the attribute.
        libraries: the modules whose versions are part of the identity.
        identify: makes, of the function, what gives a call's identity or raises LeftAlone.
        check: given the file once it was read; raises an exception if the value must not be kept.
    """

    module: str
    name: str
    libraries: tuple[str, ...]
    identify: Callable[[Callable[..., Any]], Identify]
    check: Callable[[str], None] | None = None


def hooks(more: tuple[str, ...] = ()) -> Iterator[tuple[str, Hook]]:
    """Every module to wait for, and what to do when it has been imported."""
    for decoder in TABLE:
        yield decoder.module, functools.partial(replace, decoder, memoised)
    for place in more:
        module, _, name = place.partition(":")
        yield module, functools.partial(_replace_users, name)


def replace(decoder: Decoder, make: Callable[[Callable[..., Any], Decoder], Any], module: Any) -> None:
    """Put what ``make`` makes of the function in its place, if the module has it, and once."""
    *parents, name = decoder.name.split(".")
    owner = functools.reduce(getattr, parents, module)
    function = getattr(owner, name, None)
    if function is not None and not hasattr(function, "__hotset__"):
        setattr(owner, name, make(function, decoder))


def memoised(function: Callable[..., Any], decoder: Decoder) -> Any:
    """What takes the place of ``function``, and keeps what it returns."""
    kept = Kept(f"{decoder.module}.{decoder.name}")
    identify = decoder.identify(function)

    def call(*args: Any, **keywords: Any) -> Any:
        if not kept.is_worth_it():
            return function(*args, **keywords)
        begun = time.perf_counter()
        identity = _identity(decoder, identify, args, keywords)
        if identity is None:
            return function(*args, **keywords)
        ok, value = kept.call(begun, *identity, function, args, keywords, decoder.check)
        if ok:
            return value
        try:
            raise value
        finally:
            del value  # its traceback has this frame

    return stand_in(function, call)


def stand_in(function: Callable[..., Any], call: Callable[..., Any]) -> Any:
    """What takes the place of ``function`` and calls ``call``: of its name and kind."""
    if isinstance(function, types.FunctionType):
        functools.update_wrapper(call, function)
        call.__hotset__ = True  # type: ignore[attr-defined]
        return call
    # A class for each, whose __call__ is ``call`` itself: one line in a traceback, not two.
    return type(_BuiltIn.__name__, (_BuiltIn,), {"__call__": staticmethod(call)})(function)


def _identity(
    decoder: Decoder, identify: Identify, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[File, tuple[Any, ...]] | None:
    try:
        file, rest = identify(args, keywords)
        return file, (versions(decoder.libraries), rest)
    except LeftAlone as error:
        reason = str(error)
    except Exception as error:  # unforeseen arguments, or a version of the library that this does not know
        reason = f"{type(error).__name__}: {error}"
    if reason:
        left_alone(f"{decoder.module}.{decoder.name}", reason)
    return None


class _BuiltIn:
    """Stands for a built-in function: the same name, documentation and place, and it binds nothing."""

    __hotset__ = True

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__module__, self.__doc__ = function.__module__, function.__doc__
        self.__self__ = getattr(function, "__self__", None)
        self.__text_signature__ = getattr(function, "__text_signature__", None)

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # as functions are pickled: by their name

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


def _replace_users(path: str, module: Any) -> None:
    """Memoise ``--memo module:function``: by all of its arguments, as ``hotset.memo`` does it."""
    import inspect

    ledger_here().mark(f"{IMPORTED}{module.__name__}")
    *parents, name = path.split(".")
    try:
        owner = functools.reduce(getattr, parents, module)
        function = inspect.getattr_static(owner, name)
    except AttributeError:
        left_alone(f"{module.__name__}:{path}", "the module has nothing of this name; check --memo")
        return
    setattr(owner, name, _WhenCalled(function))


class _WhenCalled:
    """Stands for the user's function until it is called; then it is the memo, whose module imports torch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        functools.update_wrapper(self, function)
        self._memo: Any = None
        before_fork(self.prepare)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.prepare()
        return self._memo(*args, **keywords)

    def prepare(self) -> None:
        """Make the memo, or do without."""
        if self._memo is None:
            try:
                self._memo = memo_of(self.__wrapped__, options_here() or Options())
            except Exception as error:
                left_alone(self.__wrapped__.__qualname__, f"hotset.memo: {type(error).__name__}: {error}")
                self._memo = self.__wrapped__

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __reduce__(self) -> Any:
        return str(self.__wrapped__.__qualname__)


# What makes an identity


@functools.cache
def versions(libraries: tuple[str, ...]) -> tuple[str, ...]:
    """Name and version of each of the libraries."""
    import importlib.metadata  # here, as inspect below: each process imports this module as it starts

    found = []
    for name in libraries:
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if version is None:
            # Not imported for this: the program may have no use for it.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(name)
        found.append(f"{name} {version}")
        if name == "cv2":
            found.append(getattr(module, "getBuildInformation", str)())
    return tuple(found)


def file_identity(path: Any) -> File:
    """The file that ``path`` names.

    Raises:
        LeftAlone: it is not a path, or not that of a regular file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise LeftAlone("the file is given as an open file or as bytes")
    name = os.fspath(path)
    if not isinstance(name, str):
        raise LeftAlone("the path is given as bytes")
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        raise LeftAlone("there is no such file (a URL, or the call fails)") from None
    if not stat.S_ISREG(status.st_mode):
        raise LeftAlone("the path is not that of a regular file")
    check_age(status)
    return File(absolute(name), status)


def absolute(path: str) -> str:
    """The path from the root. Not ``abspath``: behind a link, ``link/../file`` is not ``file``."""
    return path if path.startswith("/") else os.path.join(os.getcwd(), path)


def check_age(status: os.stat_result) -> None:
    """Refuse a file that was written a moment ago: written once more, it may have the same time of change.

    Raises:
        LeftAlone: it was.
    """
    now = time.time()  # of both times, as programs set the first one (cp -p, os.utime)
    if min(abs(now - status.st_mtime), abs(now - status.st_ctime)) < _MOMENT_SECONDS:
        raise LeftAlone("the file was written a moment ago")


def plain(value: Any, what: str) -> Any:
    """An argument as part of an identity.

    Raises:
        LeftAlone: it is not a number, string, enum, dtype, slice, ``...``, or a tuple, list or dict of these.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind in (tuple, list):
        return (kind.__name__, *(plain(one, what) for one in value))
    if kind is dict:
        return ("dict", *((plain(name, what), plain(one, what)) for name, one in value.items()))
    if kind is slice:
        return ("slice", *(plain(one, what) for one in (value.start, value.stop, value.step)))
    if value is ...:
        return ("...",)
    if kind.__module__ == "numpy" and isinstance(value, numbers.Integral):
        return (kind.__name__, int(value))
    if isinstance(value, enum.Enum):
        return (f"{kind.__module__}.{kind.__qualname__}", value.name)
    if isinstance(value, type):
        return ("type", f"{value.__module__}.{value.__qualname__}")
    if (kind.__module__.split(".")[0], kind.__name__.lower().endswith("dtype")) in _DTYPES:
        return ("dtype", str(value))
    raise LeftAlone(f"argument {what} is a {kind.__module__}.{kind.__qualname__}")


_DTYPES = {("numpy", True), ("torch", True)}


def _by_signature(path: str, *absent: str, check: Callable[[str, dict[str, Any]], None] | None = None) -> Any:
    """By the argument ``path``, a file, and all others, of which those in ``absent`` must be None.

    ``check`` is given the path and the arguments, and may raise LeftAlone.
    """

    def identify(function: Callable[..., Any]) -> Identify:
        import inspect

        signature = inspect.signature(function)

        def identity(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[File, tuple[Any, ...]]:
            try:
                bound = signature.bind(*args, **keywords)
            except TypeError:
                raise LeftAlone("the arguments do not fit, and the call fails") from None
            bound.apply_defaults()
            given = bound.arguments
            for name in absent:
                if given.get(name) is not None:
                    raise LeftAlone(f"argument {name} is given")
            if check is not None:
                check(str(given[path]), given)
            file = file_identity(given[path])
            rest = ((name, plain(value, name)) for name, value in sorted(given.items()) if name != path)
            return file, tuple(rest)

        return identity

    return identify


def _cv2_imread(function: Callable[..., Any]) -> Identify:
    """``imread(filename[, flags])``: the built-in function has no signature."""
    default = sys.modules["cv2"].IMREAD_COLOR if hasattr(sys.modules.get("cv2"), "IMREAD_COLOR") else 1

    def identity(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[File, tuple[Any, ...]]:
        more = {**dict(zip(("filename", "flags"), args, strict=False)), **keywords}
        if len(args) > 2 or not {"filename"} <= set(more) <= {"filename", "flags"}:
            raise LeftAlone("it has other arguments than a file and flags")
        flags = more.get("flags", default)
        if type(flags) is not int:
            raise LeftAlone("the flags are not an int")
        return file_identity(more["filename"]), (flags,)

    return identity


def _not_by_pillow(path: str, given: dict[str, Any]) -> None:
    """What Ultralytics reads with PIL's plugins may warn, and does so in each call."""
    if path.lower().endswith((".avif", ".heic", ".heif")):
        raise LeftAlone("Ultralytics reads AVIF and HEIF with PIL")


def _video_alone(path: str, given: dict[str, Any]) -> None:
    """What imageio reads with PIL or tifffile is memoised there, with all that it reads beside the pixels."""
    if given.get("plugin") != "pyav":
        raise LeftAlone("")


def _numpy_load(function: Callable[..., Any]) -> Identify:
    """A file of one array: not an archive of many, which is read when it is used, nor a mapped one."""
    by_signature = _by_signature("file", "mmap_mode")(function)

    def identity(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[File, tuple[Any, ...]]:
        file, rest = by_signature(args, keywords)
        with open(file.path, "rb") as opened:
            if opened.read(6) != b"\x93NUMPY":
                raise LeftAlone("the file is an archive, or has pickled objects")
        return file, rest

    return identity


def _nibabel_proxy(function: Callable[..., Any]) -> Identify:
    """``ArrayProxy._get_scaled(self, dtype, slicer)``: what ``get_fdata`` and ``dataobj`` read."""

    def identity(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[File, tuple[Any, ...]]:
        proxy = args[0]
        given = {**dict(zip(("dtype", "slicer"), args[1:], strict=False)), **keywords}
        if type(proxy).__qualname__ != "ArrayProxy" or set(given) != {"dtype", "slicer"}:
            raise LeftAlone("it is a kind of image that is read in its own way")
        file = file_identity(proxy.file_like)
        if not file.path.endswith((".gz", ".bz2")):
            raise LeftAlone("the file is not compressed, and nibabel maps it")
        if proxy._persist_opener:
            raise LeftAlone("nibabel keeps the file open")
        form = (proxy._shape, proxy._dtype.str, proxy._offset, proxy._mmap, proxy.order)
        scale = tuple((type(one).__name__, repr(one)) for one in (proxy._slope, proxy._inter))
        asked = tuple(plain(given[name], name) for name in ("dtype", "slicer"))
        return file, (plain(tuple(form), "spec"), scale, asked)

    return identity


def _of_one_file(path: str) -> None:
    """Refuse a TIFF whose pictures may lie in other files as well."""
    with sys.modules["tifffile"].TiffFile(path) as file:
        if file.is_ome or file.is_mmstack or file.is_ndtiff or file.is_stk:
            raise LeftAlone("its pictures may be in several files")


def _read_by_soundfile(path: str) -> None:
    """Refuse what librosa reads in another way, with a warning."""
    sys.modules["soundfile"].info(path)


TABLE = (
    Decoder("cv2", "imread", ("cv2",), _cv2_imread),
    Decoder(
        "ultralytics.utils.patches",
        "imread",
        ("ultralytics", "cv2"),
        _by_signature("filename", check=_not_by_pillow),
    ),
    Decoder("torchvision.io.image", "read_image", ("torchvision",), _by_signature("path")),
    Decoder("torchvision.io.image", "decode_image", ("torchvision",), _by_signature("input")),
    Decoder("imageio.v3", "imread", ("imageio", "av"), _by_signature("uri", check=_video_alone)),
    Decoder(
        "tifffile.tifffile",
        "imread",
        ("tifffile", "imagecodecs"),
        _by_signature("files", "out", "imread", "sort"),
        _of_one_file,
    ),
    Decoder("nibabel.arrayproxy", "ArrayProxy._get_scaled", ("nibabel", "numpy"), _nibabel_proxy),
    Decoder("soundfile", "read", ("soundfile",), _by_signature("file", "out")),
    Decoder("torchaudio", "load", ("torchaudio", "torchcodec"), _by_signature("uri")),
    Decoder(
        "librosa.core.audio",
        "load",
        ("librosa", "soundfile", "soxr", "numpy"),
        _by_signature("path"),
        _read_by_soundfile,
    ),
    Decoder("numpy", "load", ("numpy",), _numpy_load),
    Decoder("numpy", "loadtxt", ("numpy",), _by_signature("fname", "like")),
    Decoder("numpy", "genfromtxt", ("numpy",), _by_signature("fname", "like")),
    Decoder(
        "lerobot.datasets.video_utils",
        "decode_video_frames",
        ("lerobot", "torchcodec", "torchvision", "av"),
        _by_signature("video_path"),
    ),
)
