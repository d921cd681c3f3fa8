"""The identity of a call's arguments: bytes that two calls share only if they must give the same result.

======================  ===========================================================================
argument                is described by
======================  ===========================================================================
None, bool, int, float, type and value: ``1``, ``1.0`` and ``True`` are three; -0.0 and 0.0 are two
complex, str, bytes
path, or text or bytes  its text, and as the *version* of what it names: size, times of change, inode
that are a file's path
tuple, list, dict, set  type, length, parts; a set's in the order of their own descriptions
dataclass, enum, slice, type and parts
range, namedtuple
array, tensor           dtype, shape, strides, all bytes (at most 64 KiB); an array of texts: its texts
numpy scalar            dtype and bytes; a text: as Python's
dtype, device           its name
class, function of a    module and name; the user's, its fingerprint, too
module
======================  ===========================================================================

Anything else has no identity: an open file, an object of a class of the user's own, a lambda, a larger array,
a tensor with attributes, an argument that is nested more than 20 deep or cannot be read. ``hotset.memo``
computes the function at each such call.

Every description begins with a tag and says how long it is, so that no two things have one description.
Arguments are bound to the function's parameters first, so that ``f(1)``, ``f(a=1)`` and ``f(1, b=default)``
are one. A function that has no signature of its own (many of those written in C, and wrappers that take
``*args``) is called with its arguments as given.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import os
import struct
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset._interrupts import own_errors
from hotset.determinism.fingerprint.fingerprint import fingerprint
from hotset.determinism.objects.bindings import Bindings
from hotset.determinism.objects.code_dependencies import is_users
from hotset.determinism.objects.mutable_content import bytes_of

__all__ = ["ArgumentKey", "Codes", "NoIdentity", "Parameters", "describe_arguments", "file_version"]

_LARGEST_ARRAY = 64 << 10
_DEEPEST = 20
_LONGEST_PATH = 4096
_WORD = (1 << 64) - 1
_FLOAT, _STAT = struct.Struct("<d"), struct.Struct("<QQQQ")


class NoIdentity(Exception):
    """An argument that has no identity; the message is a phrase that says which."""


class ArgumentKey(NamedTuple):
    """What tells one call from another.

    Attributes:
        key: bytes of the arguments.
        version: a hash of the sizes, dates and inodes of the files that they name; 0 if they name none.
        fixed: whether the arguments cannot change while the function runs.
    """

    key: bytes
    version: int
    fixed: bool


class Codes:
    """What the user's classes and functions among the arguments are made of.

    To describe one takes milliseconds, so it is described anew only if a name that it reads stands for
    something else than before, if an attribute of the class was set, or if a function reaches an object that
    can be changed in place.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes, Bindings, list[tuple[type, dict[str, Any]]]]] = {}

    def of(self, value: Any) -> bytes:
        """What a class or function is made of; nothing of an installed one, whose name says enough.

        Raises:
            NoIdentity: it reaches something that cannot be described.
        """
        known = self._known.get(id(value))
        if known is None or _is_another(*known):
            bindings = Bindings(value)  # before it is described: what changes meanwhile is noticed
            attributes = _attributes(value)
            digest = b""
            if is_users(value):
                found = fingerprint(value)
                if found.unknowns:
                    raise NoIdentity(f"{value.__qualname__}, which reaches {found.unknowns[0]}")
                digest = found.digest.encode()
            known = self._known[id(value)] = value, digest, bindings, attributes
        return known[1]


def _attributes(value: Any) -> list[tuple[type, dict[str, Any]]]:
    """The attributes of the user's classes of which a class is made."""
    if not isinstance(value, type):
        return []
    return [(cls, dict(vars(cls))) for cls in value.__mro__ if is_users(cls)]


def _is_another(
    value: Any, _: bytes, bindings: Bindings, attributes: list[tuple[type, dict[str, Any]]]
) -> bool:
    """Whether a class or function may be another than it was when it was described."""
    if bindings.changed() or (bindings.mutable and is_users(value) and not isinstance(value, type)):
        return True
    for cls, before in attributes:
        now = vars(cls)
        if len(now) != len(before) or any(now.get(name, before) is not held for name, held in before.items()):
            return True
    return False


class _Description:
    """Collects the description of one call's arguments.

    Attributes:
        codes: what classes and functions are made of.
        parts: the description, in pieces.
        files: what the system says of each file that an argument names.
        fixed: whether no argument can be changed in place.
    """

    __slots__ = ("codes", "files", "fixed", "parts")

    def __init__(self, codes: Codes) -> None:
        self.codes = codes
        self.parts: list[bytes] = []
        self.files: list[bytes] = []
        self.fixed = True

    def add(self, value: Any, depth: int = 0) -> None:
        """Describe a value; ``depth``: in how many others it is nested."""
        if depth >= _DEEPEST:
            raise NoIdentity(f"something nested more than {_DEEPEST} deep")
        _EXACT.get(type(value), _other)(self, value, depth)

    def put(self, tag: bytes, content: bytes) -> None:
        """Put bytes, after their tag and length."""
        self.parts.append(b"%b%d:" % (tag, len(content)))
        self.parts.append(content)

    def put_name(self, tag: bytes, kind: Any) -> None:
        """Put the full name of a class or function, and what it is made of if that is the user's."""
        self.put(tag, f"{kind.__module__}:{kind.__qualname__}".encode())
        self.put(b"", self.codes.of(kind))


def _text(to: _Description, value: str | bytes, depth: int) -> None:
    """Describe a text or bytes, and the file of which it is the path."""
    if isinstance(value, str):
        to.put(b"s", value.encode("utf-8", "surrogatepass"))
    else:
        to.put(b"b", value)
    if not 0 < len(value) <= _LONGEST_PATH:
        return
    try:
        status = os.stat(value)
    except (OSError, ValueError):  # there is no such file; or a zero byte in the text
        return
    to.files.append(_packed(status))


def _packed(status: os.stat_result) -> bytes:
    times = status.st_mtime_ns ^ status.st_ctime_ns << 1  # a program can set the former, but not both
    return _STAT.pack(status.st_ino, status.st_size, times & _WORD, status.st_dev)


def _sequence(to: _Description, value: Sequence[Any], depth: int) -> None:
    to.parts.append(b"(%d:" % len(value) if type(value) is tuple else b"[%d:" % len(value))
    if type(value) is not tuple:
        to.fixed = False
    for part in value:
        to.add(part, depth + 1)


def _mapping(to: _Description, value: Mapping[Any, Any], depth: int) -> None:
    to.parts.append(b"{%d:" % len(value))
    for name, part in value.items():
        to.add(name, depth + 1)
        to.add(part, depth + 1)
    to.fixed = False


def _set(to: _Description, value: Any, depth: int) -> None:
    members = []
    for part in value:
        one = _Description(to.codes)
        one.add(part, depth + 1)
        members.append((b"".join(one.parts), one.files))
        to.fixed &= one.fixed
    to.parts.append(b"%b%d:" % (b"<" if type(value) is set else b">", len(value)))
    for description, files in sorted(members):
        to.parts.append(description)
        to.files += files
    to.fixed &= type(value) is frozenset


def _bounds(to: _Description, value: Any, depth: int) -> None:
    to.parts.append(b"|" if type(value) is slice else b"-")
    to.add((value.start, value.stop, value.step), depth + 1)


def _array(to: _Description, array: np.ndarray[Any, Any], depth: int) -> None:
    is_text = array.dtype.kind in "UST"  # they may be paths; of the last kind the array holds references
    if array.nbytes > _LARGEST_ARRAY or (array.dtype.hasobject and not is_text):
        raise NoIdentity(f"an array of {array.nbytes:,} bytes (up to {_LARGEST_ARRAY:,} have one)")
    to.put(b"ad", _dtype(array.dtype))
    to.put(b"an" + f"{array.shape}{array.strides}".encode(), b"" if is_text else array.tobytes())
    if is_text:
        _sequence(to, array.ravel().tolist(), depth)
    to.fixed = False


def _dtype(dtype: np.dtype[Any]) -> bytes:
    """Describe a dtype: all structured ones of a size have one ``str``."""
    return repr(dtype).encode()


def _tensor(to: _Description, value: torch.Tensor, depth: int) -> None:
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise NoIdentity(f"a tensor on {value.device}, or of a layout that is not dense")
    if vars(value):
        raise NoIdentity("a tensor with attributes of its own")
    if value.nbytes > _LARGEST_ARRAY:
        raise NoIdentity(f"a tensor of {value.nbytes:,} bytes (up to {_LARGEST_ARRAY:,} have one)")
    flags = f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.requires_grad}".encode()
    to.put(b"at" + flags, bytes_of(value))
    to.fixed = False


def _other(to: _Description, value: Any, depth: int) -> None:
    """Describe a value whose class is not in ``_EXACT``, but is derived from one that has an identity."""
    kind = type(value)
    if isinstance(value, PurePath):
        to.put_name(b"p", kind)
        _text(to, str(value), depth)
    elif kind in (np.str_, np.bytes_):
        to.put(b"nt", b"")
        _text(to, value.item(), depth)
    elif isinstance(value, np.generic) and not value.dtype.hasobject:
        to.put(b"nd", _dtype(value.dtype))
        to.put(b"n", value.tobytes())
    elif isinstance(value, np.dtype):
        to.put(b"ny", _dtype(value))
    elif isinstance(value, enum.Enum):
        to.put_name(b"e", kind)
        # Combined flags, and none of them, may be without a name.
        to.put(b"", str(value._value_ if isinstance(value, enum.Flag) else value._name_).encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        to.put_name(b"@", kind)
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        _mapping(to, fields | getattr(value, "__dict__", {}), depth)
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        to.put_name(b"=", kind)
        _sequence(to, tuple(value), depth)
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        _global(to, value)
    else:
        article = "an" if kind.__qualname__[:1].lower() in "aeiou" else "a"
        raise NoIdentity(f"{article} {kind.__qualname__}")


def _global(to: _Description, value: Any) -> None:
    """Describe a class or function by its name, if that leads to it."""
    module, name = getattr(value, "__module__", None), value.__qualname__
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise NoIdentity(f"a function or class that its module does not have by its name ({name})")
    to.put_name(b"g", value)


_EXACT: dict[type, Callable[[_Description, Any, int], object]] = {
    type(None): lambda to, value, depth: to.parts.append(b"N"),
    bool: lambda to, value, depth: to.parts.append(b"T" if value else b"F"),
    # In decimal, Python refuses more than 4,300 digits.
    int: lambda to, value, depth: to.parts.append(b"i%x;" % value),
    float: lambda to, value, depth: to.parts.append(b"f" + _FLOAT.pack(value)),
    complex: lambda to, value, depth: to.parts.append(
        b"c" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag)
    ),
    **dict.fromkeys((str, bytes), _text),
    **dict.fromkeys((tuple, list), _sequence),
    dict: _mapping,
    **dict.fromkeys((set, frozenset), _set),
    **dict.fromkeys((slice, range), _bounds),
    type(...): lambda to, value, depth: to.parts.append(b"."),
    np.ndarray: _array,
    torch.Tensor: _tensor,
    torch.dtype: lambda to, value, depth: to.put(b"y", str(value).encode()),
    torch.device: lambda to, value, depth: to.put(b"v", str(value).encode()),
}


def describe_arguments(arguments: Sequence[Any], codes: Codes) -> ArgumentKey:
    """Return the identity of arguments.

    Raises:
        NoIdentity: one of them has none, or cannot be read, as another thread changes it.

    Example:
        >>> describe_arguments((1,), Codes()) == describe_arguments((1.0,), Codes())
        False
        >>> describe_arguments(("a", 2), Codes()).version
        0
    """
    to = _Description(codes)
    try:
        for value in arguments:
            to.add(value)
    except NoIdentity:
        raise
    except own_errors() as error:  # of a stranger's code
        raise NoIdentity(f"something that cannot be described ({type(error).__name__}: {error})") from error
    return ArgumentKey(b"".join(to.parts), _version(b"".join(to.files)) if to.files else 0, to.fixed)


def file_version(status: os.stat_result) -> int:
    """The version of arguments that name one file, of that status."""
    return _version(_packed(status))


def _version(files: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(files, digest_size=8).digest(), "little") or 1


class Parameters:
    """The parameters of a function, to which the arguments of its calls are bound.

    Args:
        function: any callable.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._names: list[str] | None = None
        self._defaults: list[Any] = []
        self._required = 0
        self._signature: inspect.Signature | None = None
        self._opaque: dict[int, tuple[str, str]] = {}
        try:
            # Not that of a function that it wraps, to which it may give other defaults than that has.
            signature = inspect.signature(function, follow_wrapped=False)
        except (TypeError, ValueError):
            return
        parameters = list(signature.parameters.values())
        for parameter in parameters:
            try:
                describe_arguments([parameter.default], Codes())
            except NoIdentity:
                self._opaque[id(parameter.default)] = ("the default of", parameter.name)
        kinds = {parameter.kind for parameter in parameters}
        if kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
            self._names = [parameter.name for parameter in parameters]
            self._defaults = [parameter.default for parameter in parameters]
            self._required = [default is inspect.Parameter.empty for default in self._defaults].count(True)
        self._signature = signature

    def bind(self, given: tuple[Any, ...], named: dict[str, Any]) -> Sequence[Any]:
        """The arguments in one order, defaults included.

        In place of a default without an identity (an object that marks "not given") stands its parameter's
        name: the function's own identity covers the object.

        Raises:
            TypeError: the function cannot be called with them.
        """
        bound = self._bind(given, named)
        if self._opaque:
            return [self._opaque.get(id(value), value) for value in bound]
        return bound

    def _bind(self, given: tuple[Any, ...], named: dict[str, Any]) -> Sequence[Any]:
        names = self._names
        if names is not None and not named and self._required <= len(given) <= len(names):
            return (*given, *self._defaults[len(given) :])
        if self._signature is None:
            return (given, tuple(named.items()))
        bound = self._signature.bind(*given, **named)
        bound.apply_defaults()
        if names is not None:
            return tuple(bound.arguments.values())
        # Keywords in another order are another call: a function may return them in theirs.
        return tuple(
            tuple(value.items())
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            else value
            for name, value in bound.arguments.items()
        )
