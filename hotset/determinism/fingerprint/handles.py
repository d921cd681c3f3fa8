"""Handles: objects that stand for something outside the program, a file, a database, a pipe, a process.

One handle may stand for the training set and another of its type for the validation set, so the type is not
enough. hotset describes a handle by the first of these that it has:

=============  =========================================================================================
described by   handles
=============  =========================================================================================
content        ``BytesIO``, ``mmap`` (of a large file: the file), queues, shared memory, ``ContextVar``
file           open files, ``gzip``, ``sqlite3``, HDF5, LMDB, ``DirEntry``: path, size and date; a file that
               was deleted: its content; a file that is only written to: its name
type alone     handles that give no data: locks, threads, pools, event loops, unconnected sockets
none of these  pipes, connected sockets, child processes, databases in memory: *unknown*, so that no other
               process shares the cache (:meth:`hotset.determinism.fingerprint.describe.Describer.unknown`)
=============  =========================================================================================

hotset reads a handle through the methods of the library that made it, and moves no file position.
"""

from __future__ import annotations

import contextvars
import functools
import io
import os
import sqlite3
import stat
import types
from typing import Any

import numpy as np

from hotset.determinism.fingerprint.content_hash import digest_of_bytes
from hotset.determinism.fingerprint.describe import Describer, Handler, by_attributes, by_parts
from hotset.determinism.objects import code_dependencies as codes
from hotset.determinism.objects.object_graph import attributes

__all__ = ["OF_HANDLES", "by_type", "with_own_state"]

_READ = 32 << 20


by_type = by_attributes(b"t")
"""Describes a handle that gives no data by its type alone."""

_parts = functools.partial(by_attributes, b"h")


def _asked(base: type, name: str, value: object) -> Any:
    """An attribute as the library's class ``base`` defines it, even if a subclass replaces it."""
    return vars(base)[name].__get__(value)


# ---- files -----------------------------------------------------------------------------------------------


def _file_in_memory(to: Describer, file: Any) -> None:
    base = io.BytesIO if issubclass(type(file), io.BytesIO) else io.StringIO
    to.put(b"o")
    to.add(type(file), "closed" if _asked(base, "closed", file) else base.getvalue(file))
    to.state(file)


def _over_raw(base: type) -> Handler:
    """A handler for files of a buffered class: they are described by the raw file below."""
    return by_parts(b"o", lambda file: (type(file), _asked(base, "raw", file)))


def _text(to: Describer, file: Any) -> None:
    to.put(b"o")
    try:
        to.add(type(file), _asked(io.TextIOWrapper, "buffer", file))
    except ValueError:  # detached
        to.add(None)
        return
    to.name(str(file.encoding), str(file.errors))


def _raw(to: Describer, file: Any) -> None:
    to.put(b"o")
    to.add(type(file))
    if _asked(io.FileIO, "closed", file):
        to.add(getattr(file, "name", None))
    else:
        _descriptor(to, file, io.FileIO.fileno(file), io.FileIO.readable(file))


def _compressed(to: Describer, file: Any) -> None:
    """A file of ``gzip``, ``bz2`` or ``lzma``, over one that has a descriptor or over another object."""
    to.put(b"o")
    to.add(type(file))
    try:
        descriptor, readable = file.fileno(), file.readable()
    except (OSError, ValueError, AttributeError):  # closed, or over what is in memory
        to.state(file)
    else:
        _descriptor(to, file, descriptor, readable)


def _descriptor(to: Describer, value: Any, descriptor: int, readable: bool) -> None:
    """Describe an open file by its descriptor: another file may have its name by now."""
    about = os.fstat(descriptor)
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if stat.S_ISDIR(about.st_mode) or stat.S_ISCHR(about.st_mode) or not readable:
        to.name(path)
    elif not stat.S_ISREG(about.st_mode):
        to.unknown(value)
    elif about.st_nlink and not path.endswith(" (deleted)"):
        to.add(path, about.st_size, about.st_mtime_ns)
    else:
        to.put(b"c")
        for start in range(0, about.st_size, _READ):
            to.put(digest_of_bytes(np.frombuffer(os.pread(descriptor, _READ, start), np.uint8)))


def _environment(to: Describer, environment: Any) -> None:
    """Note that ``os.environ`` was met; :mod:`.environment` describes what code names."""
    by_type(to, environment)
    to.reads_environment = True


# ---- databases -------------------------------------------------------------------------------------------


def _sqlite(to: Describer, connection: sqlite3.Connection) -> None:
    """Describe a database by its files: the file itself, and the log that holds the latest writes."""
    try:
        cursor = sqlite3.Cursor(connection)
        cursor.row_factory = None
        files = [row[2] for row in cursor.execute("PRAGMA database_list")]
    except sqlite3.Error:  # closed, or made in another thread
        files = [""]
    if not all(files):
        to.unknown(connection)
        return
    to.put(b"h")
    to.add(type(connection))
    for file in files:
        to.add(file, f"{file}-wal")


def _hdf5(to: Describer, value: Any) -> None:
    """Describe a file of h5py, or a group or dataset in one, by the file and the name inside it."""
    try:
        file, name, driver = value.file.filename, value.name, value.file.driver
    except Exception:  # closed; h5py raises errors of several kinds
        driver = None
    if driver in (None, "core", "fileobj"):
        to.unknown(value)
        return
    to.put(b"h")
    to.add(type(value), os.fsdecode(file), name)


def _lmdb(to: Describer, environment: Any) -> None:
    """Describe an environment of LMDB by its path: a folder with the file in it, or the file."""
    try:
        path = environment.path()
    except Exception:  # closed: an error of LMDB's
        to.unknown(environment)
        return
    to.put(b"h")
    to.name("lmdb")
    to.add(path)


# ---- memory, queues, sockets -----------------------------------------------------------------------------


def _mapping(to: Describer, mapping: Any) -> None:
    to.put(b"M")
    to.add(type(mapping))
    try:
        whole = np.frombuffer(mapping, np.uint8)
    except ValueError:  # closed
        return
    to.add(whole)


def _c_array(to: Describer, array: Any) -> None:
    """An array of ctypes: multiprocessing's classes of arrays hold data, unlike its others."""
    to.put(b"A")
    to.name(array._type_.__name__)
    to.count(len(array))
    code = getattr(array._type_, "_type_", None)
    if isinstance(code, str) and code in _C_NUMBERS:
        to.add(bytes(array))
    elif isinstance(code, type):  # of several dimensions
        to.elements(list(array))
    else:
        to.unknown(array)


def _queue_in_c(to: Describer, queue: Any) -> None:
    if queue.qsize():
        to.unknown(queue)
    else:
        by_type(to, queue)


def _context_variable(to: Describer, variable: contextvars.ContextVar[Any]) -> None:
    to.put(b"V")
    to.name(variable.name)
    try:
        to.add(variable.get())
    except LookupError:
        to.put(b"-")


def _socket(to: Describer, socket: Any) -> None:
    try:
        socket.getpeername()
    except OSError:  # not connected, or closed
        by_type(to, socket)
    else:
        to.unknown(socket)


# ---- a user's own class of one of these ------------------------------------------------------------------


def with_own_state(handler: Handler) -> Handler:
    """A handler that also describes the attributes that a user's subclass adds to such a type."""

    def both(to: Describer, value: Any) -> None:
        handler(to, value)
        if codes.installed(str(type(value).__module__)) is not None:
            return
        theirs = _names_of_library(type(value))
        to.add({name: part for name, part in attributes(value).items() if name not in theirs})

    return both


def _names_of_library(kind: type) -> frozenset[str]:
    """The attributes that the methods of its library's classes name: a thread's number, a queue's mutex."""
    bases = [base for base in kind.__mro__ if codes.installed(str(base.__module__)) is not None]
    functions = [part for base in bases for part in vars(base).values() if type(part) is types.FunctionType]
    return frozenset(name for function in functions for name in function.__code__.co_names)


_C_NUMBERS = "?cbBhHiIlLqQfdgu"  # and no pointers, whose targets are elsewhere in the next process
# Types are given by name where the library that defines them may not be imported.
_GIVES_DATA: tuple[type | str, ...] = (
    *(io.BufferedRWPair, sqlite3.Cursor, "h5py._objects.ObjectID", "subprocess.Popen"),
    *("multiprocessing.managers.BaseProxy", "multiprocessing.connection._ConnectionBase"),
    *("multiprocessing.queues.Queue", "multiprocessing.queues.SimpleQueue"),
    *("concurrent.futures._base.Future", "_asyncio.Future", "asyncio.futures.Future"),
    "asyncio.streams.StreamReader",
)
# A star stands for a whole package, and is looked up last: all other types of these packages give no data.
_GIVES_NO_DATA = (
    *("_thread.*", "threading.*", "queue.*", "_contextvars.*", "contextvars.*", "concurrent.*"),
    *("multiprocessing.*", "_multiprocessing.*", "asyncio.*", "_asyncio.*"),
    *("ssl.*", "_ssl.*", "selectors.*", "select.*"),
    "loguru._logger.Logger",
)
_COMPILED_BY_NUMBA = (
    *("numba.core.dispatcher.Dispatcher", "numba.core.ccallback.CFunc"),
    *("numba.np.ufunc.dufunc.DUFunc", "numba.np.ufunc.gufunc.GUFunc"),
)


def _compiled_by_numba(function: Any) -> tuple[Any, ...]:
    """Its Python code and options; not what has been compiled so far, and the compiler."""
    return type(function), function.__wrapped__, getattr(function, "targetoptions", None)


_HANDLES: dict[type | str, Handler] = {
    **dict.fromkeys(_GIVES_NO_DATA, by_type),
    **dict.fromkeys(_GIVES_DATA, Describer.unknown),
    **dict.fromkeys((io.BytesIO, io.StringIO), _file_in_memory),
    **dict.fromkeys(("gzip.GzipFile", "bz2.BZ2File", "lzma.LZMAFile"), _compressed),
    io.FileIO: _raw,
    io.TextIOWrapper: _text,
    **{base: _over_raw(base) for base in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom)},
    "os._Environ": _environment,
    os.DirEntry: by_parts(b"h", lambda entry: (type(entry), os.fsdecode(entry.path))),
    sqlite3.Connection: _sqlite,
    "h5py._hl.base.HLObject": _hdf5,
    # Compiled without a module's name, or in Python over cffi.
    **dict.fromkeys(("builtins.Environment", "lmdb.cffi.Environment"), _lmdb),
    **dict.fromkeys(_COMPILED_BY_NUMBA, by_parts(b"h", _compiled_by_numba)),
    "ctypes.CDLL": _parts("_name"),
    "mmap.mmap": _mapping,
    "multiprocessing.shared_memory.SharedMemory": _parts("_mmap"),
    "multiprocessing.sharedctypes.SynchronizedBase": _parts("_obj"),
    "_ctypes.Array": _c_array,
    "queue.Queue": _parts("maxsize", "queue"),
    "asyncio.queues.Queue": _parts("_maxsize", "_queue"),
    "_queue.SimpleQueue": _queue_in_c,
    contextvars.ContextVar: _context_variable,
    contextvars.Context: by_parts(b"V", lambda context: [dict(context)]),
    "_socket.socket": _socket,
}
OF_HANDLES = {kind: with_own_state(handler) for kind, handler in _HANDLES.items()}
