"""What makes two calls of a library's function the same: the file that they read, and their arguments.

A call's identity is its file (:func:`hotset.memo` looks at its size, time of change and inode), the other
arguments with their defaults, and the versions of the libraries that decode. A call whose identity is not
certain is left alone: :class:`LeftAlone` says why.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import numbers
import os
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from hotset.run.kept import File

__all__ = [
    "Identify",
    "LeftAlone",
    "absolute",
    "by_signature",
    "check_age",
    "cv2_imread",
    "file_facts",
    "file_identity",
    "hdf5_slice",
    "nibabel_proxy",
    "not_by_pillow",
    "npz_member",
    "numpy_load",
    "of_one_file",
    "opened_file",
    "read_by_soundfile",
    "versions",
    "video_alone",
]

# Longer than the clock by which file systems write times.
_MOMENT_SECONDS = 0.05

# The file that a call reads, and what else tells it from others.
Identify = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[File, tuple[Any, ...]]"]


class LeftAlone(Exception):
    """This call is not memoised; the text says why, or nothing where the function below it is."""


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


def opened_file(path: Any, descriptor: int) -> File:
    """The file that a library has opened by ``path`` and reads through ``descriptor``.

    Raises:
        LeftAlone: it is not a regular file, or the path leads to another one by now.
    """
    file = file_identity(path)
    if file_facts(os.fstat(descriptor)) != file_facts(file.status):
        raise LeftAlone("the file has changed since it was opened")
    return file


def file_facts(status: os.stat_result) -> tuple[int, ...]:
    """What tells a file, as it is, from other files and from what it was or will be."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


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
        # Combined flags, and none of them, may be without a name.
        which = value._value_ if isinstance(value, enum.Flag) else value._name_
        return (f"{kind.__module__}.{kind.__qualname__}", which)
    if isinstance(value, type):
        return ("type", f"{value.__module__}.{value.__qualname__}")
    if (kind.__module__.split(".")[0], kind.__name__.lower().endswith("dtype")) in _DTYPES:
        return ("dtype", str(value))
    raise LeftAlone(f"argument {what} is a {kind.__module__}.{kind.__qualname__}")


_DTYPES = {("numpy", True), ("torch", True)}


def by_signature(path: str, *absent: str, check: Callable[[str, dict[str, Any]], None] | None = None) -> Any:
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


def cv2_imread(function: Callable[..., Any]) -> Identify:
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


def not_by_pillow(path: str, given: dict[str, Any]) -> None:
    """What Ultralytics reads with PIL's plugins may warn, and does so in each call."""
    if path.lower().endswith((".avif", ".heic", ".heif")):
        raise LeftAlone("Ultralytics reads AVIF and HEIF with PIL")


def video_alone(path: str, given: dict[str, Any]) -> None:
    """What imageio reads with PIL or tifffile is memoised there, with all that it reads beside the pixels."""
    if given.get("plugin") != "pyav":
        raise LeftAlone("")


def numpy_load(function: Callable[..., Any]) -> Identify:
    """A file of one array: not an archive of many, which is read when it is used, nor a mapped one."""
    by_name = by_signature("file", "mmap_mode")(function)

    def identity(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[File, tuple[Any, ...]]:
        file, rest = by_name(args, keywords)
        with open(file.path, "rb") as opened:
            start = opened.read(6)
        if start.startswith(b"PK"):
            raise LeftAlone("")  # the arrays of an archive are kept one by one
        if start != b"\x93NUMPY":
            raise LeftAlone("the file has pickled objects")
        return file, rest

    return identity


def npz_member(function: Callable[..., Any]) -> Identify:
    """``NpzFile.__getitem__(self, name)``: an archive's array, which is unpacked at each use.

    The archive's directory was read as it was opened, so what it says of the array counts as well: if the
    file was written anew in place since, numpy raises an error, and must go on to do so.
    """

    def identity(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[File, tuple[Any, ...]]:
        archive, name = args
        packed = archive.zip
        member = packed.NameToInfo.get(name) or packed.NameToInfo.get(f"{name}.npy")
        if type(name) is not str or keywords or member is None:
            raise LeftAlone("the archive has no array of this name, and the call fails")
        if type(packed.fp) is not io.BufferedReader or type(packed.fp.raw) is not io.FileIO:
            raise LeftAlone("the archive is not read from a file, but from bytes or an object")
        place = (member.header_offset, member.compress_size, member.file_size, member.CRC)
        limits = (bool(archive.allow_pickle), plain(archive.max_header_size, "max_header_size"))
        return opened_file(packed.fp.name, packed.fp.fileno()), (member.filename, place, limits)

    return identity


def hdf5_slice(function: Callable[..., Any]) -> Identify:
    """``h5py.Dataset.__getitem__(self, index)`` of chunks that are compressed, or filtered otherwise."""

    def identity(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[File, tuple[Any, ...]]:
        if len(args) != 2 or keywords:
            raise LeftAlone("it is read as another type")
        data, index = args
        if data.chunks is None or not data.id.get_create_plist().get_nfilters():
            raise LeftAlone("it is not compressed")  # nor are data that lie in other files
        file = data.file  # not the one that links to it
        if file.driver != "sec2" or file.mode != "r" or file.swmr_mode or data.name is None:
            raise LeftAlone("the file is not opened by its path, or may be written to")
        return opened_file(file.filename, file.id.get_vfd_handle()), (data.name, plain(index, "index"))

    return identity


def nibabel_proxy(function: Callable[..., Any]) -> Identify:
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


def of_one_file(path: str) -> None:
    """Refuse a TIFF whose pictures may lie in other files as well."""
    with sys.modules["tifffile"].TiffFile(path) as file:
        if file.is_ome or file.is_mmstack or file.is_ndtiff or file.is_stk:
            raise LeftAlone("its pictures may be in several files")


def read_by_soundfile(path: str) -> None:
    """Refuse what librosa reads in another way, with a warning."""
    sys.modules["soundfile"].info(path)
