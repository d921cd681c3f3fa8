"""The walk that describes an object for its fingerprint: containers, attributes, columns, cycles.

:mod:`hotset.determinism.fingerprint.type_handlers` describes functions, classes, arrays and other special
objects; :mod:`hotset.determinism.fingerprint.fingerprint` has the theory.

A *description* is a string of bytes that no other value has. That of an atom is its tag, length and bytes;
that of any other value is the hash of a stream, into which its handler puts the descriptions of its parts.
Handlers are found by the object's type, never by ``isinstance``, which would believe a proxy's ``__class__``.
"""

from __future__ import annotations

import copyreg
import hashlib
import itertools
import marshal
import os
import struct
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np

from hotset._interrupts import own_errors
from hotset.determinism.declare import DeclaredCallable
from hotset.determinism.fingerprint.data_files import LONGEST, Decoded, Files
from hotset.determinism.objects.object_graph import attributes
from hotset.determinism.objects.safe_access import hides_attributes, is_opaque
from hotset.store.leaves.instances import solid_base

__all__ = ["Describer", "Handler", "by_attributes", "by_parts", "by_pickle"]

Handler = Callable[["Describer", Any], None]

_DEPTH = 100
_DESCRIPTORS = 1 << 16
# From this many elements on, a container is described by columns.
_COLUMN = 256
_COLUMN_LEVELS = 8
_CHUNK = 1 << 16
_MARSHALLED = frozenset({type(None), bool, int, float, complex, str, bytes})
_VERSION = "__hotset_version__"
_SORTED = ({str}, {int}, {bytes})


class Describer:
    """Describes objects; each fingerprint takes a new one.

    Attributes:
        put: adds bytes to the description that is being made.
        files: the texts that may be paths.
        unknowns: phrases about what could not be described, as keys.
        modules: names of the modules in which code was met.
        codes: the code of users that was met and may run, as keys.
        numbers: the numbers that may be descriptors of open files.
        reads_environment: whether ``os.environ`` itself was met.
    """

    def __init__(self, handlers: dict[type | str, Handler]) -> None:
        self.files = Files()
        self.unknowns: dict[str, None] = {}
        self.modules: set[str] = set()
        self.codes: dict[types.CodeType, None] = {}
        self.numbers: set[int] = set()
        self.reads_environment = False
        self.put: Callable[[Any], object] = hashlib.blake2b().update
        self._handlers = {**_CONTAINERS, **handlers}
        self._of_type: dict[type, Handler] = {}
        self._entered: dict[int, int] = {}
        # By id, and with the object, as another object may get its id once it is gone.
        self._done: dict[int, tuple[bytes, object]] = {}
        self._in_code = False

    def describe(self, value: Any) -> bytes:
        """Return the description of any value; of one that cannot be looked into, random bytes."""
        if is_opaque(value):
            return self._nonce("an object whose class does not say what it is could not be described")
        kind = type(value)
        if kind is DeclaredCallable:
            return self.describe(value.__wrapped__)
        if kind in _ATOMS:
            if kind is str:
                self.files.add(value, folder=not self._in_code)
            elif kind is bytes and len(value) <= LONGEST:
                self.files.add(os.fsdecode(value), folder=not self._in_code)
            elif kind is int and 2 < value < _DESCRIPTORS and not self._in_code:
                self.numbers.add(value)
            return _ATOMS[kind](value)
        known = self._done.get(id(value))
        if known is not None:
            return known[0]
        if id(value) in self._entered:
            return b"^" + (len(self._entered) - self._entered[id(value)]).to_bytes(8, "little")
        if len(self._entered) >= _DEPTH:
            return self._nonce(f"an object nested more than {_DEPTH} deep was not described")
        digest = hashlib.blake2b(digest_size=16)
        outer, self.put = self.put, digest.update
        self._entered[id(value)] = len(self._entered)
        try:
            self._handler(kind)(self, value)
        except own_errors() as error:  # of a stranger's code
            self.unknown(value, f"could not be looked into ({type(error).__name__})")
        finally:
            self.put = outer
            del self._entered[id(value)]
        description = b"#" + digest.digest()
        self._done[id(value)] = (description, value)
        return description

    def add(self, *values: Any) -> None:
        """Put the descriptions of these values."""
        for value in values:
            self.put(self.describe(value))

    def name(self, *names: str) -> None:
        """Put texts that are names, and cannot be paths."""
        for name in names:
            self.put(_text(name))

    def constants(self, values: Iterable[Any]) -> None:
        """Put the constants of code."""
        outer, self._in_code = self._in_code, True
        self.add(*values)
        self._in_code = outer

    def count(self, number: int) -> None:
        """Put how many parts follow."""
        self.put(number.to_bytes(8, "little"))

    def unknown(self, value: object, why: str = "could not be described") -> None:
        """Put random bytes for a value that cannot be described, so that no other fingerprint is equal."""
        kind = type(value)
        self.put(self._nonce(f"a {kind.__module__}.{kind.__qualname__} {why}"))

    def _nonce(self, why: str) -> bytes:
        self.unknowns[why] = None
        return b"?" + os.urandom(16)

    def state(self, value: object) -> None:
        """Put the attributes of an object."""
        if hides_attributes(value):
            self.unknown(value, "hides its attributes")
        own = attributes(value)
        self.count(len(own))
        for name, part in sorted(own.items(), key=itemgetter(0)):
            self.name(name)
            self.add(part)

    def elements(self, values: list[Any]) -> None:
        """Put the elements of a container, in order."""
        self.count(len(values))
        if len(values) < _COLUMN:
            self.add(*values)
        else:
            self._column(values, 0)

    def apart(self, value: Any) -> bytes:
        """Describe a member of a set, without using the other members' descriptions.

        Members come in another order in each process. If they refer to each other in a cycle, the member that
        is described first would decide where the cycle is entered.
        """
        kind = type(value)
        if kind in _ATOMS or (kind is tuple and all(type(part) in _ATOMS for part in value)):
            return self.describe(value)
        outer, self._done = self._done, dict(self._done)
        try:
            return self.describe(value)
        finally:
            self._done = outer

    def _handler(self, kind: type) -> Handler:
        handler = self._of_type.get(kind)
        if handler is None:
            # That of the nearest base that has one, by type or name; failing that, that of a whole package.
            keys: list[type | str] = []
            for base in kind.__mro__:
                keys += [base, f"{base.__module__}.{base.__qualname__}"]
            keys += [f"{str(base.__module__).partition('.')[0]}.*" for base in kind.__mro__]
            handler = next((self._handlers[key] for key in keys if key in self._handlers), _object)
            self._of_type[kind] = handler
        return handler

    def _column(self, values: list[Any], level: int) -> None:
        kinds = set(map(type, values))
        kind = next(iter(kinds), None)
        if kinds <= _MARSHALLED:
            self._marshal(values)
            if str in kinds:
                self.files.add_column([text for text in values if type(text) is str])
            if bytes in kinds:
                self.files.add_column(Decoded([text for text in values if type(text) is bytes]))
        elif len(kinds) > 1 or level == _COLUMN_LEVELS or (level and len(set(map(id, values))) < len(values)):
            # A shared object is better described once, and a cycle may be entered at it.
            self.put(b"E")
            self.add(*values)
        elif kind is list or kind is tuple:
            self._rows(values, level)
        elif kind is dict and _uniform(values):
            names = list(values[0])
            self.put(b"D")
            self._column(names, level)
            for name in names:
                self._column([row[name] for row in values], level + 1)
        elif kind is not None and issubclass(kind, (PurePath, np.str_)):
            self.put(b"P")
            self.add(kind)
            self._column(list(map(str, values)), level)
        elif kind is not None and issubclass(kind, (np.number, np.bool_)):
            self.put(b"N")
            self.add(np.array(values, kind))
        else:
            self.put(b"E")
            self.add(*values)

    def _rows(self, rows: list[Any], level: int) -> None:
        lengths = list(map(len, rows))
        self.put(b"L" if type(rows[0]) is list else b"T")
        self._marshal(lengths)
        if len(set(lengths)) == 1 and lengths[0] <= 64:
            for column in range(lengths[0]):
                self._column(list(map(itemgetter(column), rows)), level + 1)
        else:
            self._column(list(itertools.chain.from_iterable(rows)), level + 1)

    def _marshal(self, values: list[Any]) -> None:
        # Version 2: from version 3 on, marshal marks interned texts and objects that it has met before.
        self.put(b"M")
        self.count(len(values))
        for start in range(0, len(values), _CHUNK):
            data = marshal.dumps(values[start : start + _CHUNK], 2)
            self.count(len(data))
            self.put(data)


def _uniform(rows: list[dict[Any, Any]]) -> bool:
    """Whether all rows have the same keys in the same order, all of them text."""
    keys = list(rows[0])
    return set(map(type, keys)) == {str} and all(list(row) == keys for row in rows)


def _sized(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def _text(text: str) -> bytes:
    return _sized(b"s", text.encode("utf-8", "surrogatepass"))


def _int(number: int) -> bytes:
    return _sized(b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))


_ATOMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"0",
    type(...): lambda _: b".",
    type(NotImplemented): lambda _: b"!",
    bool: lambda value: b"T" if value else b"F",
    int: _int,
    float: lambda value: b"f" + struct.pack("<d", value),
    complex: lambda value: b"c" + struct.pack("<dd", value.real, value.imag),
    str: _text,
    bytes: lambda value: _sized(b"b", value),
}


def by_parts(tag: bytes, parts: Callable[[Any], Iterable[Any]], *, state: bool = False) -> Handler:
    """A handler for values that these parts describe in full, or these and their attributes (``state``)."""

    def handler(to: Describer, value: Any) -> None:
        to.put(tag)
        to.add(*parts(value))
        if state:
            to.state(value)

    return handler


def by_attributes(tag: bytes, *names: str, state: bool = False) -> Handler:
    """A handler for objects written in C that their type and these attributes describe in full."""
    return by_parts(tag, lambda value: (type(value), *(getattr(value, name) for name in names)), state=state)


def _sequence(base: Any) -> Handler:
    def handler(to: Describer, value: Any) -> None:
        to.add(type(value))
        to.elements(list(base.__iter__(value)))
        if type(value) is not base:
            to.state(value)

    return handler


def _deque(to: Describer, value: Any) -> None:
    _sequence(deque)(to, value)
    to.add(vars(deque)["maxlen"].__get__(value))


def _set(base: Any) -> Handler:
    def handler(to: Describer, value: Any) -> None:
        to.add(type(value))
        members = list(base.__iter__(value))
        if len(members) >= _COLUMN and set(map(type, members)) in _SORTED:
            to.elements(sorted(members))
        else:
            to.count(len(members))
            for description in sorted(map(to.apart, members)):
                to.put(description)
        to.state(value)

    return handler


def _dict(to: Describer, value: Any) -> None:
    # In their order, as a sample may be the dict's first one, or its last.
    to.add(type(value))
    items = list(dict.items(value))
    to.elements([key for key, _ in items])
    to.elements([part for _, part in items])
    if type(value) is not dict:
        to.state(value)


def _default_dict(to: Describer, value: Any) -> None:
    _dict(to, value)
    to.add(value.default_factory)


def _atom_subclass(plain: Callable[[Any], Any]) -> Handler:
    return by_parts(b"", lambda value: (type(value), plain(value)), state=True)


def _object(to: Describer, value: Any) -> None:
    to.add(type(value))
    if any(_VERSION in vars(kind) for kind in type(value).__mro__):
        try:
            to.add(value.__hotset_version__())
        except own_errors() as error:
            to.unknown(value, f"has a {_VERSION} that raised {type(error).__name__} ({error})")
    if solid_base(type(value)) is object:
        to.state(value)
    else:
        by_pickle(to, value)


def _reduce(value: Any) -> Any:
    """What pickling returns, by protocol 5: protocol 4 would copy large buffers into bytes."""
    registered = copyreg.dispatch_table.get(type(value))
    if registered:
        return registered(value)
    if type(value).__module__ != "itertools":
        return value.__reduce_ex__(5)
    with warnings.catch_warnings():  # Python 3.12 and 3.13 warn that 3.14 pickles these no more
        warnings.simplefilter("ignore", DeprecationWarning)
        return value.__reduce_ex__(5)


def by_pickle(to: Describer, value: Any, *, without: str | None = None) -> None:
    """Describe an object by what pickling it returns, without an attribute that does not count.

    One that has a base written in C, or whose attributes do not say what it is.
    """
    try:
        reduced = _reduce(value)
    except own_errors():  # libraries raise errors of many kinds for what cannot be pickled
        to.unknown(value)
        return
    if isinstance(reduced, str):
        to.name(reduced)
        return
    make, args, state, listed, pairs = (*reduced, None, None, None)[:5]
    if isinstance(state, dict):
        counts = [name for name in state if name != without and not str(name).startswith("_hotset")]
        state = {name: state[name] for name in sorted(counts, key=str)}  # attributes have no order
    to.add(make, args, state, list(listed or ()), list(pairs or ()))


# The plain value of a subclass's instance is read by the base's own method, as the subclass may override it.
_CONTAINERS: dict[type | str, Handler] = {
    **{base: _sequence(base) for base in (list, tuple)},
    deque: _deque,
    **{base: _set(base) for base in (set, frozenset)},
    **{base: _atom_subclass(base.__pos__) for base in (int, float, complex)},
    str: _atom_subclass(str.__str__),
    bytes: _atom_subclass(lambda value: bytes.__getitem__(value, slice(None))),
    dict: _dict,
    defaultdict: _default_dict,
}
