"""When two samples are *indistinguishable*: the meaning of "a hit equals a miss", in one function.

``==`` does not test that: it calls 1 and True equal, NaN unequal to itself, -0.0 equal to 0.0, and ignores
dtypes and attributes that a subclass adds. So :func:`differs` goes down both trees together and compares of
each pair of nodes, in this order: their exact types, their own content (dtype, shape, bytes, keys), and their
children.

======================  ======================================================================
node                    its own content
======================  ======================================================================
tensor                  dtype, layout, device, shape, order of dimensions in memory, bytes
                        (the parts of a sparse or nested one are children)
ndarray, numpy scalar   dtype with byte order, shape, order of dimensions in memory, bytes
PIL image               mode, size, palette, pixels (``info`` and ``format`` are children)
dict, list, tuple       keys in order, or the length
float, complex          the bits
Decimal                 its text
other, from Python      nothing: its attributes are children
weak reference          nothing: it holds no data
bound method            its function (the object is a child)
other, from C           its ``==`` decides, or what pickle keeps of it; if it has neither, the user's codec
                        for what holds it, or what the class of that says that pickle keeps
======================  ======================================================================

Attributes are children of tensors, arrays and containers too: that covers a MetaTensor's affine matrix and a
box's canvas size. The order of dimensions counts because it decides how sums are rounded, but only where both
arrays are dense: a copy of a strided slice need not keep the gaps.
"""

from __future__ import annotations

import array
import contextlib
import decimal
import enum
import hashlib
import io
import json
import reprlib
import struct
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset._interrupts import own_errors
from hotset.determinism.objects.object_graph import attributes
from hotset.determinism.objects.safe_access import is_a, loaded_class, shown
from hotset.store.leaves.codecs import given_codec
from hotset.store.leaves.instances import solid_base
from hotset.store.leaves.sparse_tensors import sparse_parts

__all__ = ["array_bytes", "changed_place", "content_digests", "differs", "integers_of", "palette_of"]

Array = npt.NDArray[Any]
# Compared by their own ==, not by their parts. A path fills its attributes as they are read.
_WHOLE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum, PurePath)
_ORDERED = (list, tuple, deque)
_CONTAINERS = (dict, list, tuple)  # as such, these have no attributes
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_MANY = 1_000  # values that have one digest together: a vocabulary's would take a minute
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HASHED_BY_IDENTITY = (weakref.ref, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
# Files in memory; other iterators are another one each time.
_IN_MEMORY = (io.BytesIO, io.StringIO)
_PICKLED_BY = ("__reduce_ex__", "__reduce__", "__getstate__")
_MOST_PICKLED = 6  # objects within each other that are compared by what pickle keeps of them
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def differs(a: object, b: object, *, across: bool = False) -> str | None:
    """Return None if two samples cannot be told apart, otherwise a phrase: where and how they differ.

    It compares exact types, the tree, keys in order, dtypes, shapes and bytes (a NaN equals the same NaN,
    -0.0 differs from 0.0), and attributes, of: tensors and ndarrays of any dtype and their subclasses, numpy
    scalars, PIL images, numbers, strings, None, and anything nested in dict, list, tuple, namedtuple,
    dataclass or an object's attributes. Anything else is compared with ``==``, or by what pickle keeps of it.

    Args:
        a, b: two samples.
        across: they may come from two processes, so that addresses of objects do not count. (MONAI enters one
            into a MetaTensor for each transform that the tensor went through.)

    Example:
        >>> differs({"x": 1.0}, {"x": 1})
        "at ['x']: type float and type int"
        >>> differs([float("nan")], [float("nan")]) is None
        True
    """
    try:
        return _compare(a, b, "", _Comparison(across))
    except RecursionError:
        return "nested too deeply to be compared"
    except own_errors() as error:  # of a stranger's ``==`` or iterator
        return f"objects of {type(a).__name__} that cannot be compared ({type(error).__name__}: {error})"


def content_digests(sample: object) -> dict[str, bytes]:
    """Return a digest of every tensor, array, image and other value in ``sample``, by its place in the tree.

    A source may change an object that it has returned before, and return it again. Two readings are then one
    object, in which :func:`differs` finds nothing; digests taken before the second reading show it. There
    are none of a sample that is nested too deeply to be walked through.
    """
    try:
        return dict(_digests(sample, "", {}))
    except RecursionError:
        return {}


def changed_place(before: dict[str, bytes], now: dict[str, bytes]) -> str | None:
    """The first place at which two results of :func:`content_digests` differ; None if they are equal."""
    return next((place for place in before | now if before.get(place) != now.get(place)), None)


_Pairs = dict[tuple[int, int], tuple[Any, Any]]


@dataclass
class _Comparison:
    """What one comparison keeps in mind.

    Attributes:
        across: see :func:`differs`.
        pickled: how many objects around these are compared by what pickle keeps of them.
        entered: pairs that were compared, or are being, by their ids: a graph of objects has more paths than
            nodes. They stay alive, or other objects would have their ids.
        unlike: pairs of which pickle keeps different things; as ``entered``.
    """

    across: bool
    pickled: int = 0
    entered: _Pairs = field(default_factory=dict)
    unlike: _Pairs = field(default_factory=dict)


def _compare(a: Any, b: Any, where: str, mind: _Comparison) -> str | None:
    if type(a) is not type(b):
        return _at(where, _two_types(type(a), type(b)))
    if a is b or _are_same_number_or_text(a, b) or (id(a), id(b)) in mind.entered:
        return None
    found = _difference(a, b, where, mind)
    if isinstance(found, _Unknown) and (_described_alike(a, b, mind.across) or _says_alike(a, b, mind)):
        return None
    return found


def _difference(a: Any, b: Any, where: str, mind: _Comparison) -> str | None:
    """How two nodes of one type differ, themselves or in their children."""
    if type(a) in _CONTAINERS and _are_equal_plain(a, b):
        return None
    what = _own_difference(a, b, mind)
    if what is not None:
        return _at(where, what)
    mind.entered[id(a), id(b)] = a, b
    for (label, left), (_, right) in zip(_children(a), _children(b), strict=True):
        if mind.across and _is_trace_address(a, label):
            continue
        found = _compare(left, right, where + label, mind)
        if found is not None:
            del mind.entered[id(a), id(b)]
            return found
    return None


def _are_equal_plain(a: Any, b: Any) -> bool:
    """Whether two lists or dicts hold the same numbers and texts: tokens, a vocabulary."""
    a, b = _items(a), _items(b)
    kinds = list(map(type, a))
    if not _PLAIN.issuperset(kinds) or kinds != list(map(type, b)) or a != b:
        return False
    return float not in kinds or _floats(a) == _floats(b)  # 0.0 == -0.0


def _are_same_number_or_text(a: Any, b: Any) -> bool:
    kind = type(a)
    if type(kind) is not type or kind not in _PLAIN:  # a class of another metaclass may have no hash
        return False
    return bool(a == b) and (kind is not float or _bits(a) == _bits(b))  # 0.0 == -0.0


def _floats(values: Sequence[Any]) -> bytes:
    """The bits of the floats among some values."""
    return array.array("d", [value for value in values if type(value) is float]).tobytes()


def _items(node: Any) -> Sequence[Any]:
    """What a list holds; of a dict, its keys and then its values."""
    return [*node, *node.values()] if type(node) is dict else node


def _two_types(a: type, b: type) -> str:
    if (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__):
        return f"two classes of the name {a.__qualname__}, which is made anew each time"
    return f"type {a.__name__} and type {b.__name__}"


def _is_trace_address(node: Any, label: str) -> bool:
    """Whether this is the ``id`` in MONAI's record of a transform, whose keys are strings or TraceKeys."""
    return label in ("['id']", "[id]") and is_a(node, dict) and "class" in node


def _at(where: str, what: str) -> str:
    return type(what)(f"at {where}: {what}") if where else what


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


class _Unknown(str):
    """A phrase about two objects of which only their identity tells whether they are equal."""


def _described_alike(a: object, b: object, across: bool) -> bool:
    """Whether the user's codec for objects with such parts describes both alike."""
    codec = given_codec(a)
    if codec is None:
        return False
    try:
        return differs(codec.flatten(a), codec.flatten(b), across=across) is None
    except own_errors():  # raised by the user's function: the cache says so when it stores the sample
        return False


def _own_difference(a: Any, b: Any, mind: _Comparison) -> str | None:
    """How two nodes of one type differ, apart from their children."""
    if type(a) in _CONTAINERS:
        return _keys_difference(list(a), list(b)) if type(a) is dict else _length_difference(a, b)
    if is_a(a, _WHOLE):
        return None if a == b else _two(a, b)
    if is_a(a, types.MethodType):
        return None if a.__func__ is b.__func__ else _two(a, b)
    if _is_image(a):
        return _image_difference(a, b)
    unpaired = attributes(a).keys() ^ attributes(b).keys()
    if unpaired:
        return f"attribute {min(unpaired)} of one only"
    if is_a(a, torch.Tensor):
        return _tensor_difference(a, b)
    if is_a(a, (np.ndarray, np.generic)):
        return _array_difference(np.asarray(a), np.asarray(b))
    if is_a(a, dict):
        return _keys_difference(list(a), list(b))
    if is_a(a, _ORDERED):
        return _length_difference(a, b)
    if is_a(a, (set, frozenset)):
        return None if set(map(_key, a)) == set(map(_key, b)) else _two(a, b)
    if is_a(a, (float, complex)):
        return None if _bits(a) == _bits(b) else _two(a, b)
    if type(a) in _PLAIN:  # as which pickle keeps it
        return _two(a, b)
    if is_a(a, int):  # what pickle keeps of it is itself
        return None if int.__eq__(a, b) else _two(a, b)
    if is_a(a, decimal.Decimal):
        return None if str(a) == str(b) else _two(a, b)  # == ignores zeros and signs, and no NaN equals one
    if solid_base(type(a)) is object or is_a(a, weakref.ref) or _equal(a, b):
        return None
    if _pickled_alike(a, b, mind):
        return None
    by_identity = getattr(type(a), "__eq__", None) is object.__eq__
    return (
        _Unknown(f"two objects of {_name(type(a))}, which cannot be compared") if by_identity else _two(a, b)
    )


def _length_difference(a: Any, b: Any) -> str | None:
    return None if len(a) == len(b) else f"lengths {len(a)} and {len(b)}"


def _says_alike(a: object, b: object, mind: _Comparison) -> bool:
    """Whether their class says itself what pickle keeps of them, and that is the same of both.

    A table of pandas holds objects that note who shares its memory; the class leaves them out of a pickle.
    """
    kind = type(a)
    own = ((getattr(kind, name, None), getattr(object, name, None)) for name in _PICKLED_BY)
    return any(method is not objects for method, objects in own) and _pickled_alike(a, b, mind)


def _pickled_alike(a: object, b: object, mind: _Comparison) -> bool:
    """Whether pickle keeps the same of both: a table or tokens of a library in C may have no ``==`` but
    their identity. What moves on as it is used is another one each time.
    """
    if is_a(a, (Iterator, torch.Generator)) and not is_a(a, _IN_MEMORY):
        return False
    if mind.pickled >= _MOST_PICKLED or (id(a), id(b)) in mind.unlike:
        return False
    try:
        inner = replace(mind, pickled=mind.pickled + 1)
        if _compare(_reduced(a), _reduced(b), "", inner) is None:
            return True
    except own_errors():  # it cannot be pickled, or only by itself (a RecursionError)
        pass
    mind.unlike[id(a), id(b)] = a, b
    return False


def _reduced(node: object) -> object:
    reduced = node.__reduce_ex__(4)
    if isinstance(reduced, str):
        return reduced
    return [list(part) if isinstance(part, Iterator) else _without_order(part) for part in reduced]


def _without_order(state: object) -> object:
    """A state that is JSON, read, with the keys in it sorted; any other as it is.

    A library in Rust keeps a hash map so, in another order each time: a fast tokenizer notes in one where
    each of two texts lies.
    """
    if type(state) is bytes and state.startswith(b"{"):
        with contextlib.suppress(ValueError):
            return json.loads(state, object_hook=lambda held: dict(sorted(held.items())))
    return state


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except own_errors():  # == returned an array, or the type does not allow it
        return False


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a node, each with its label: ``['key']``, ``[3]`` or ``.name``."""
    if type(node) in (list, tuple):  # most nodes
        yield from ((f"[{i}]", value) for i, value in enumerate(node))
        return
    if is_a(node, _WHOLE):
        return
    if is_a(node, dict):
        yield from ((f"[{shown(key)}]", value) for key, value in node.items())
        if type(node) is dict:
            return
    elif is_a(node, _ORDERED):
        names = getattr(type(node), "_fields", None)
        labels = [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(node))]
        yield from zip(labels, node, strict=True)
    elif is_a(node, types.MethodType):
        yield ".__self__", node.__self__
    elif is_a(node, torch.Tensor) and node.is_nested:
        yield from ((f"[{i}]", part) for i, part in enumerate(node.unbind()))
        return
    elif is_a(node, torch.Tensor) and (parts := sparse_parts(node)) is not None:
        yield from ((f".{name}()", part) for name, part in parts.items())
    elif is_a(node, (np.ndarray, np.void)):
        yield from _array_children(np.asarray(node))
    for name, value in sorted(attributes(node).items()):
        if name == "_fill_value" and is_a(node, np.ma.MaskedArray):
            # numpy sets the attribute when it is first asked for: here, that of a view.
            name, value = "fill_value", node.view().fill_value
        # An image's pixels are compared as such; its other attributes say how it was read.
        if not _is_image(node) or name in ("info", "format"):
            yield f".{name}", value


def _array_children(array: Array) -> Iterator[tuple[str, Any]]:
    if array.dtype.names:
        # Field by field, as the padding between fields does not count.
        yield from ((f"[{name!r}]", array[name]) for name in array.dtype.names)
    elif array.dtype.hasobject or array.dtype.kind == "T":
        for index in np.ndindex(array.shape):
            yield f"[{', '.join(map(str, index))}]", array[index]


def _keys_difference(a: list[Any], b: list[Any]) -> str | None:
    if [_key(key) for key in a] == [_key(key) for key in b]:
        return None
    if set(a) == set(b) and sorted(map(repr, a)) == sorted(map(repr, b)):
        return "keys in another order"
    return f"keys {_repr.repr(a)} and {_repr.repr(b)}"


def _key(key: Any) -> tuple[type, Any]:
    """What tells a dict's key or a set's member from others; of two NaNs each is unequal to the other."""
    if type(key) is tuple:
        return tuple, tuple(map(_key, key))
    return type(key), _bits(key) if type(key) in (float, complex) else key


def _tensor_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    # The shape of a nested tensor is that of its parts, which are children.
    kinds = ("dtype", "layout", "device", "requires_grad", "is_nested")
    for name in kinds if a.is_nested else (*kinds, "shape"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours != theirs:
            return f"{name} {ours} and {theirs}"
    if a.is_nested:
        return None if a.size(0) == b.size(0) else f"lengths {a.size(0)} and {b.size(0)}"
    if a.layout is not torch.strided:
        return None  # its parts are children
    if a.is_quantized:
        return None if torch.equal(a, b) else "values"
    found = _order_difference(tuple(a.shape), a.stride(), b.stride())
    if found is not None or a.is_meta or not a.numel():
        return found
    return _values_difference(_tensor_bytes(a), _tensor_bytes(b), tuple(a.shape))


def _tensor_bytes(tensor: torch.Tensor) -> Array:
    """Return the bytes of each element in order, as uint8 of shape (elements, bytes of one)."""
    found = array_bytes(integers_of(tensor)).reshape(tensor.numel(), -1)
    return _truths(found) if tensor.dtype == torch.bool else found


def integers_of(tensor: torch.Tensor) -> Array:
    """Return a strided tensor's elements as integers of the same size, on the CPU; a view where possible.

    The result has one dimension more if the tensor is complex.
    """
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    # Not plain.numpy(): after that the user's tensor could not be resized any more.
    return np.from_dlpack(plain.view(_INTEGERS[plain.element_size()]))


def _array_difference(a: Array, b: Array) -> str | None:
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} and {b.dtype}"
    if a.shape != b.shape:
        return f"shape {a.shape} and {b.shape}"
    if not a.nbytes:
        return None
    ours, theirs = (tuple(step // array.itemsize for step in array.strides) for array in (a, b))
    found = _order_difference(a.shape, ours, theirs)
    if found is not None or a.dtype.hasobject or a.dtype.names or a.dtype.kind == "T":
        return found
    return _values_difference(array_bytes(a), array_bytes(b), a.shape)


def array_bytes(array: Array) -> Array:
    """Return the bytes of each element in order, as uint8 of shape (elements, bytes of one).

    For arrays of one plain dtype: no objects, no fields.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)
    if array.dtype.kind in "fc" and array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1) > 8:
        # An extended float of 80 bits takes 16 bytes, the last six of which are undefined.
        raw = raw.reshape(array.size, -1, 16)[:, :, : (10 if np.finfo(np.longdouble).nmant == 63 else 16)]
        raw = raw.reshape(array.size, -1)
    return _truths(raw) if array.dtype.kind == "b" else raw


def _truths(raw: Array) -> Array:
    """The bytes of bools as 0 and 1: Pillow makes bools of 255, and some copies of them have 1."""
    return np.not_equal(raw, 0).astype(np.uint8)


def _values_difference(a: Array, b: Array, shape: tuple[int, ...]) -> str | None:
    if np.array_equal(a, b):
        return None
    differing = (a != b).any(axis=1)
    if not shape:
        return "values"
    first = [int(i) for i in np.unravel_index(int(differing.argmax()), shape)]
    return f"values ({int(differing.sum()):,} of {differing.size:,}, first at {first})"


def _order_difference(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    """How the orders of two arrays' dimensions differ, by their strides in elements."""
    ours, theirs = _order(shape, a), _order(shape, b)
    if ours is None or theirs is None or ours == theirs:
        return None
    return f"dimensions that lie in memory as {ours} and {theirs}"


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of a dense array's dimensions in memory, outermost first; None if it is empty or not dense.

    Dimensions of one element are left out, as they have no place in that order.
    """
    if 0 in shape:
        return None
    order = sorted((i for i, size in enumerate(shape) if size != 1), key=lambda i: (-strides[i], i))
    step = 1
    for axis in reversed(order):
        if strides[axis] != step:
            return None
        step *= shape[axis]
    return tuple(order)


def _is_image(value: object) -> bool:
    return is_a(value, loaded_class("PIL.Image", "Image"))


def _image_difference(a: Any, b: Any) -> str | None:
    if (a.mode, a.size) != (b.mode, b.size):
        return f"image {a.mode} {a.size} and image {b.mode} {b.size}"
    # The pixels before the palette, which PIL reads together with them.
    pixels = _of_picture(a.tobytes), _of_picture(b.tobytes)
    if palette_of(a) != palette_of(b):
        return "palette"
    return None if pixels[0] == pixels[1] else "pixels"


def palette_of(image: Any) -> tuple[str, Any]:
    """The mode and the colours of a picture's palette: in RGB alone two of other opacities are equal."""
    mode = image.palette.mode if image.palette is not None else "RGB"
    return mode, _of_picture(lambda: image.getpalette(mode))


def _of_picture(method: Callable[[], Any]) -> Any:
    """What a method of a picture returns; of one whose file is damaged, what Pillow says of it."""
    try:
        return method()
    except own_errors() as error:  # Pillow raises errors of many kinds
        return f"{type(error).__name__}: {error}".encode("utf-8", "replace")


def _bits(number: complex) -> bytes:
    return struct.pack("<dd", number.real, number.imag)


def _two(a: object, b: object) -> str:
    return f"{_repr.repr(a)} and {_repr.repr(b)}"


def _content(node: Any) -> Any:
    """What a node holds itself, as bytes or an array; None if that is in its children alone."""
    if is_a(node, torch.Tensor):
        dense = node.layout is torch.strided and not (node.is_meta or node.is_quantized or node.is_nested)
        return _tensor_bytes(node) if dense and node.numel() else None
    if _is_image(node):
        return b"%b%a" % (_of_picture(node.tobytes), palette_of(node))
    if is_a(node, (np.ndarray, np.generic)):
        found = np.asarray(node)
        # Of objects these would be pointers, and between fields is padding: what counts are its children.
        plain = not (found.dtype.hasobject or found.dtype.names or found.dtype.kind == "T")
        return array_bytes(found).tobytes() if plain and found.nbytes else None
    if is_a(node, (bool, int, float, complex, str, bytes, bytearray)):
        return repr(node).encode("utf-8", "surrogatepass")
    if is_a(node, (set, frozenset)):  # its members have no places, at which each could be looked at
        return repr(sorted(map(repr, node))).encode("utf-8", "surrogatepass")
    if is_a(node, array.array):
        return node.tobytes()
    if is_a(node, (dict, *_ORDERED)):
        return str(len(node)).encode()
    return str(hash(node)).encode() if _is_hashed_by_value(node) else None


def _is_hashed_by_value(node: Any) -> bool:
    """Whether this is a value without children whose hash tells it from others: a date, an enum."""
    hashed: Any = type(node).__hash__
    if is_a(node, _HASHED_BY_IDENTITY) or hashed is None or hashed is object.__hash__:
        return False
    return is_a(node, _WHOLE) or solid_base(type(node)) is not object


def _digests(node: Any, where: str, entered: dict[int, Any]) -> Iterator[tuple[str, bytes]]:
    """The places of a node and its children that have content of their own, each with a digest of it."""
    if id(node) in entered:
        return
    parts: Iterable[tuple[str, Any]] = ()
    is_long = type(node) in (list, tuple, dict) and len(node) >= _MANY
    content = _shown(_whole, node) if is_long else None
    if content is None:
        content, parts = _shown(_content, node), _shown(lambda node: list(_children(node)), node) or ()
    if content is not None:
        yield where, hashlib.blake2b(content, digest_size=16).digest()
    for label, child in parts:
        entered[id(node)] = node
        yield from _digests(child, where + label, entered)


def _whole(node: Any) -> bytes | None:
    """What a list or dict holds, as bytes; None if these are not all numbers and texts."""
    is_plain = _PLAIN.issuperset(map(type, _items(node)))
    return repr(node).encode("utf-8", "surrogatepass") if is_plain else None


def _shown(look: Callable[[Any], Any], node: Any) -> Any:
    """What ``look`` returns of a node; None if the node does not show it."""
    try:
        return look(node)
    except RecursionError:
        raise
    except own_errors():  # of a stranger's code
        return None
