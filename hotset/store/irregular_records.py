"""Irregular records: a sample that does not have the common form is stored in a form of its own.

An optional field, a key that is missing now and then, a list of another length: such a sample does not fit
the schema (:mod:`hotset.store.leaves.schema`). Its record is a row of the common stride and a run of lines
like any other, but the record itself describes its layout::

    row      header | place of the tail | the body's beginning
    tail     the rest of the body

    body     +0   u32, bytes of the form
             +4   the form: a schema of this sample alone, as JSON, deflated; zeros up to a multiple of 16
             ...  the sample's row by that schema, without a header
             ...  its tail, on a multiple of 16

The index word and the header say which of the two kinds a record is (:mod:`hotset.store.format`). In all else
they are alike: room, checksums, tiers, rings, transfer between machines.

The shapes of arrays are not part of a form, so that samples which differ in their shapes only share one form,
and a reader has nearly always parsed it before. A form is verified: see :meth:`Schema.from_json`; and its
record is read from a copy, beyond which a forged form cannot reach.

Rejected: pickle, which is neither checked nor bounded; a list of forms in the metadata, which are written
only once, when the store is made; one tree of alternatives for all samples, which each new one would widen.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store.format import LINE, OWN_STAMP, RECORD_HEADER, TAIL, tail_word
from hotset.store.leaves.array_leaf import ArrayLeaf, NumpyLeaf
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.schema import LARGEST_RECORD, Prepared, Schema
from hotset.store.leaves.tree import Group, Node, varied
from hotset.store.leaves.tree_inference import infer
from hotset.store.leaves.tree_json import to_json

__all__ = [
    "Flattened",
    "OwnForm",
    "lay_out",
    "pieces",
    "prepare",
    "prepare_all",
    "read",
    "stamp",
    "unpack",
    "viewable",
    "write",
]

_LENGTH = struct.Struct("<I")
_HEAD = RECORD_HEADER + TAIL.size
_ALIGN = 16
# Text that a form may have before it is deflated, and forms that a process remembers.
_LARGEST_FORM = 16 << 20
_FORMS = 512
# The forms that this process wrote last, which it tries first.
_recent: deque[tuple[bytes, Schema]] = deque(maxlen=8)


@dataclass(frozen=True)
class OwnForm:
    """A sample in a form of its own, laid out: what :func:`write` writes.

    Attributes:
        body: form, row and tail, in writable memory of its own.
        tail_bytes: how many bytes of it do not fit into the record's row.
    """

    body: memoryview
    tail_bytes: int

    @property
    def tail_lines(self) -> int:
        return -(-self.tail_bytes // LINE)


# A flattened sample: in the common form, or in its own.
Flattened = Prepared | OwnForm


def stamp(flattened: Flattened, generation: int) -> int:
    """The generation and the kind of a record, as its header and its index word hold them."""
    return generation | OWN_STAMP if isinstance(flattened, OwnForm) else generation


def prepare(schema: Schema, sample: object) -> Flattened:
    """Flatten a sample, by the common schema or else in a form of its own.

    An :class:`OwnForm` from a cache of this very schema stays as it is.

    Raises:
        SchemaMismatch: it holds something that cannot be cached, or more than 2 GiB; says what and where.
    """
    if isinstance(sample, OwnForm):
        return sample
    try:
        return schema.prepare(sample)
    except SchemaMismatch:
        return lay_out(sample, schema.stride)


def prepare_all(
    schema: Schema, samples: Mapping[int, object], refused: Callable[[int, SchemaMismatch], None]
) -> list[tuple[int, Flattened]]:
    """Flatten several samples, by sample id, most of which have the common form: much faster than one by one.

    ``refused`` is called with each that cannot be cached, and why.
    """
    if len(samples) > 1:
        with contextlib.suppress(SchemaMismatch):
            return list(zip(samples, schema.prepare_all(list(samples.values())), strict=True))
    flattened: list[tuple[int, Flattened]] = []
    for sample, value in samples.items():
        try:
            flattened.append((sample, prepare(schema, value)))
        except SchemaMismatch as mismatch:
            refused(sample, mismatch)
    return flattened


def lay_out(sample: object, stride: int) -> OwnForm:
    """Flatten a sample in a form of its own, for rows of that stride.

    Raises:
        SchemaMismatch: as :func:`prepare`.
    """
    size, parts = pieces(sample)
    body = bytearray(size)
    at = 0
    for part in parts:
        body[at : at + len(part)] = part
        at += len(part)
    return OwnForm(memoryview(body), max(size - (stride - _HEAD), 0))


def pieces(sample: object) -> tuple[int, list[memoryview]]:
    """The body of a sample in a form of its own: how many bytes it has, and the bytes in several pieces.

    Large arrays are pieces as they lie in memory: nothing of them is copied.

    Raises:
        SchemaMismatch: as :func:`prepare`.
    """
    form, own, prepared = _recent_form(sample) or _new_form(sample)
    row_at, tail_at = _places(len(form), own)
    size = tail_at + prepared.tail_bytes
    if size + _HEAD > LARGEST_RECORD:
        raise SchemaMismatch("more than 2 GiB in one sample")
    head = bytearray(tail_at)
    own.write_row(head, row_at, prepared)
    _LENGTH.pack_into(head, 0, len(form))
    # Behind what was written: a row without its header begins sixteen bytes earlier.
    head[_LENGTH.size : _LENGTH.size + len(form)] = form
    return size, [memoryview(head), *own.tail_pieces(prepared)]


def _recent_form(sample: object) -> tuple[bytes, Schema, Prepared] | None:
    """A form that this process has written lately, if it fits: inferring one takes as long as the rest."""
    for form, own in tuple(_recent):
        try:
            return form, own, own.prepare(sample)
        except SchemaMismatch:
            continue
    return None


def _new_form(sample: object) -> tuple[bytes, Schema, Prepared]:
    described = to_json(varied(infer(sample, True)))
    form = zlib.compress(json.dumps(described, separators=(",", ":")).encode(), 1)
    try:
        own = _schema_of(form)  # as its readers will have it
    except SegmentError as error:
        raise SchemaMismatch(f"its form cannot be stored ({error})") from error
    prepared = own.prepare(sample)
    _recent.appendleft((form, own))
    return form, own, prepared


def _places(form_bytes: int, own: Schema) -> tuple[int, int]:
    """Offsets of a body's row, counted from the header that it lacks, and of its tail."""
    row_at = -(-(_LENGTH.size + form_bytes) // _ALIGN) * _ALIGN - RECORD_HEADER
    return row_at, -(-(row_at + own.stride) // _ALIGN) * _ALIGN


def write(
    schema: Schema, buffer: Any, row_at: int, flattened: Flattened, line: int = 0, tail_at: int = 0
) -> None:
    """Write a record's row, from the end of its header on, and its tail: see :meth:`Schema.write`."""
    if isinstance(flattened, Prepared):
        schema.write(buffer, row_at, flattened, line, tail_at)
        return
    TAIL.pack_into(buffer, row_at + RECORD_HEADER, tail_word(line, flattened.tail_lines))
    view, body = memoryview(buffer), flattened.body
    inside = len(body) - flattened.tail_bytes
    begin, end = row_at + _HEAD, row_at + schema.stride
    view[begin : begin + inside] = body[:inside]
    view[begin + inside : end] = bytes(end - begin - inside)
    view[tail_at : tail_at + flattened.tail_bytes] = body[inside:]


def read(
    schema: Schema, buffer: Any, rows_at: int, tails_at: Sequence[int], *, decode: bool = True
) -> list[Any]:
    """Build samples of either kind from their records: see :meth:`Schema.read`.

    Args:
        schema: the common one.
        buffer: writable memory that holds copies of rows, with their headers, and of tails.
        rows_at: offset of the first row; the others follow.
        tails_at: offset of each record's tail (ignored where it has none).
        decode: if False, samples with a form of their own are returned as :class:`OwnForm`, which
            :func:`prepare` takes.

    Raises:
        SegmentError: a form cannot be read, or does not describe its record.
    """
    stride = schema.stride
    stamps: npt.NDArray[np.uint32] = np.ndarray((len(tails_at),), "<u4", buffer, rows_at + 4, (stride,))
    if not int(np.bitwise_or.reduce(stamps)) & OWN_STAMP:
        return schema.read(buffer, rows_at, tails_at)
    found: list[Any] = []
    for own, run in itertools.groupby((stamps & OWN_STAMP != 0).tolist()):
        count, at = len(list(run)), rows_at + len(found) * stride
        tails = tails_at[len(found) : len(found) + count]
        if not own:
            found += schema.read(buffer, at, tails)
            continue
        packed = [_packed(buffer, at + i * stride, stride, tail) for i, tail in enumerate(tails)]
        found += [unpack(own.body) for own in packed] if decode else packed
    return found


def _packed(buffer: Any, row_at: int, stride: int, tail_at: int) -> OwnForm:
    """A copy of a record's body."""
    raw: npt.NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)
    (length,) = _LENGTH.unpack_from(buffer, row_at)
    inside, tail_bytes = stride - _HEAD, length - (stride - RECORD_HEADER)
    if not 0 <= tail_bytes <= max(len(raw) - tail_at, 0):
        raise SegmentError("a record's header says more bytes than the record has.")
    body = np.empty(inside + tail_bytes, np.uint8)
    body[:inside] = raw[row_at + _HEAD : row_at + stride]
    body[inside:] = raw[tail_at : tail_at + tail_bytes]
    return OwnForm(body.data, tail_bytes)


def unpack(body: Any) -> Any:
    """The sample whose record has this body; its arrays share the body's memory.

    Raises:
        SegmentError: the form cannot be read, or does not describe the body.
    """
    try:
        form_bytes, own = _form_of(body)
        row_at, tail_at = _places(form_bytes, own)
        return own.read(body, row_at, [tail_at])[0]
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
        raise SegmentError(f"a sample's form does not describe its record: {error!r}.") from error


def viewable(body: memoryview) -> bool:
    """Whether a sample can be built over memory that must not be written to: its arrays are all numpy's.

    torch knows no read-only tensors, and other objects would be made from tensors or arrays of their own.
    """
    try:
        return _is_plain(_form_of(body)[1].tree)
    except (SegmentError, struct.error):
        return False


def _is_plain(node: Node) -> bool:
    if isinstance(node, Group):
        return node.codec is None and all(map(_is_plain, node.children))
    return not isinstance(node, ArrayLeaf) or isinstance(node, NumpyLeaf)


def _form_of(body: Any) -> tuple[int, Schema]:
    """How many bytes a body's form has, and the form."""
    (form_bytes,) = _LENGTH.unpack_from(body)
    return form_bytes, _schema_of(bytes(body[_LENGTH.size : _LENGTH.size + form_bytes]))


@functools.lru_cache(_FORMS)
def _schema_of(form: bytes) -> Schema:
    """The schema that a form describes.

    Raises:
        SegmentError: it describes none.
    """
    try:
        inflating = zlib.decompressobj()
        text = inflating.decompress(form, _LARGEST_FORM)
        if not inflating.eof:
            raise ValueError(f"it is cut off, or longer than {_LARGEST_FORM:,} bytes")
        described = json.loads(text)
    except (RecursionError, ValueError, zlib.error) as error:
        raise SegmentError(f"a sample's form cannot be read: {error!r}.") from error
    return Schema.from_json(described)
