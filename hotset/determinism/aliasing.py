"""Aliasing: a value that the source still refers to is copied before a transform may change it.

A list of dicts returns its own dicts, a ``TensorDataset`` views of the user's tensors, an in-memory cache
what it will return again. A transform that works in place would change the user's data, once more with each
reading. But a decoded picture belongs to the reader alone, and a copy would waste time. So :func:`owned`
copies each value, unless it is certain that no other object can reach it:

=======================  ==============================================================================
value                    no other object can reach it, if
=======================  ==============================================================================
number, text, ...        always: it cannot change
dict, list, tuple, set   only its holder refers to it, and so with each of its parts
tensor                   and its storage has no other tensor, no other object refers to it, and it is torch's
                         own memory; and so with each of its attributes
array                    and it owns its memory, or its base does, which only this array refers to
PIL image                and only it refers to its pixels, which are no array's or file's memory, and to the
                         containers, arrays and tensors that are its attributes
an object from Python    only its holder refers to it, and so with each of its attributes
anything else            never
=======================  ==============================================================================

The interpreter's reference count tells whether only its holder refers to a value: it is compared with the
count of a new object on the same path. If it is higher for another reason (a tracer, a traceback), the value
is copied: that only costs time. Each sample is looked at, as a source may keep references to some of them.
"""

from __future__ import annotations

import copy
import enum
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from hotset.determinism.objects.object_graph import attributes
from hotset.determinism.objects.safe_access import dict_of, loaded_class, set_attribute
from hotset.store.leaves.derived import derived_from
from hotset.store.leaves.instances import is_plain, slots_of, solid_base

__all__ = ["copied", "have_common_memory", "owned", "owns_all"]

_ATOMS: tuple[Any, ...] = (
    *(int, float, complex, str, bytes, type(None), type(...), enum.Enum, PurePath, range, type),
    *(torch.dtype, torch.device, torch.Size, torch.layout, np.dtype, np.number, np.bool_),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
_ATOM_TYPES = frozenset({int, float, complex, bool, str, bytes, type(None)})
_MANY = 8
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Of a picture's attributes others are Pillow's: an open file, a decoder.
_CHANGEABLE = frozenset({dict, list, set, deque, bytearray, np.ndarray, torch.Tensor})
# torch's count of a storage's users is not public: if a version lacks it, each tensor is copied.
_uses_of: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def owned(value: Any, refused: Callable[[object, Exception], None] | None = None) -> Any:
    """Return the value itself if no other object can reach it, otherwise a copy.

    Must be called with the value directly (``owned(dataset[3])``): a variable of the caller is a further
    reference.

    Args:
        value: a sample, or part of one.
        refused: see :func:`copied`.

    Example:
        >>> items = [{"x": 1}]
        >>> owned(items[0]) is items[0], owned(items[0]) == items[0]
        (False, True)
    """
    count = sys.getrefcount(value)
    kind = type(value)
    if kind in _ATOM_TYPES:
        return value
    if kind is _Gauge:  # for _passed(), which measures this very path
        return count
    try:
        alone = count <= _PASSED and _is_alone(value, kind)
    except RecursionError:
        alone = False
    return value if alone else copied(value, refused)


class _Gauge:
    """A new object, to measure its reference count."""


def owns_all(values: Iterable[Any], foreign: list[torch.Tensor] | None = None) -> bool:
    """Whether only this container reaches its values. The caller must hold no further reference to any.

    Args:
        foreign: gets the tensors whose memory torch did not allocate, of which that cannot be told, and which
            do not count then; None: they count as reached by others.
    """
    for value in values:
        count = sys.getrefcount(value)
        kind = type(value)
        if kind in _ATOM_TYPES:
            continue
        if count > _CONTAINED or not _is_alone(value, kind, foreign):
            return False
    return True


def _is_alone(value: Any, kind: type, foreign: list[torch.Tensor] | None = None) -> bool:
    """Whether a value that only its holder refers to shares no mutable memory with another object."""
    if kind is torch.Tensor:
        return _tensor_is_alone(value, foreign) and owns_all(vars(value).values(), foreign)
    if kind is tuple or kind is list or kind is set or kind is frozenset:
        # Of a thousand token ids, each has a count to look at, but all types are found in one call.
        return (len(value) > _MANY and _ATOM_TYPES.issuperset(map(type, value))) or owns_all(value, foreign)
    if kind is dict:
        return owns_all(value.values(), foreign)
    if issubclass(kind, _ATOMS):
        return True
    if weakref.getweakrefcount(value):
        return False
    if issubclass(kind, np.ndarray):
        return kind is np.ndarray and _array_is_alone(value)
    if _is_image(kind):
        return _image_is_alone(value)
    if issubclass(kind, torch.Tensor):
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return _tensor_is_alone(value, foreign) and owns_all(vars(value).values(), foreign)
    if kind is bytearray:
        return True
    if kind.__dictoffset__ and _is_from_python(kind):
        return owns_all(vars(value).values(), foreign)
    return False


def _tensor_is_alone(tensor: torch.Tensor, foreign: list[torch.Tensor] | None) -> bool:
    if _uses_of is None or tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if weakref.getweakrefcount(tensor):
        return False
    storage = tensor.untyped_storage()
    # The tensor and the storage object that was just made. A view shares its storage with its base, which
    # others may hold: it is copied. Memory that torch did not allocate (numpy's, a file's) cannot be resized.
    if _uses_of(storage._cdata) > 2 or sys.getrefcount(storage) > _STORED:
        return False
    if not storage.resizable() and foreign is not None:
        foreign.append(tensor)
        return True
    return storage.resizable()


def have_common_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some bytes are in the storages of two of these tensors.

    Example:
        >>> array = np.zeros(3)
        >>> have_common_memory([torch.from_numpy(array), torch.from_numpy(array)])
        True
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    spans = sorted((storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes())
    return any(begin + length > after for (begin, length), (after, _) in itertools.pairwise(spans))


def _array_is_alone(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype.hasobject:
        return False
    base = array.base
    if base is None:
        return bool(array.flags.owndata)
    # The view and the variable; numpy has no chains of views. One more for the argument.
    return type(base) is np.ndarray and base.flags.owndata and sys.getrefcount(base) <= _CONTAINED


def _image_is_alone(image: Any) -> bool:
    for attribute in vars(image).values():
        if type(attribute) in _CHANGEABLE and sys.getrefcount(attribute) > _CONTAINED:
            return False
    pixels = getattr(image, "_im", None)
    # Read-only, it shares the memory of an array or a file. One more reference for the argument.
    return pixels is None or (not image.readonly and sys.getrefcount(pixels) <= _CONTAINED)


def _is_from_python(kind: type) -> bool:
    """Whether an object of this class consists of its ``__dict__`` alone."""
    slots = any(vars(cls).get("__slots__") for cls in kind.__mro__)
    return solid_base(kind) is object and not slots


def _is_image(kind: type) -> bool:
    return issubclass(kind, loaded_class("PIL.Image", "Image"))


# ---- copying -------------------------------------------------------------------------------------------


def copied(value: Any, refused: Callable[[object, Exception], None] | None = None) -> Any:
    """Return a deep copy, in which two references to one object are two references to one copy.

    Of a view only its own elements are copied, not the whole memory behind it. A part that cannot be copied,
    such as an open file, is returned as it is; so is a value that is nested too deeply.

    Args:
        value: a sample, or part of one.
        refused: is called with each part that is not copied, and the reason.

    Example:
        >>> table = torch.zeros(1_000_000, 2)
        >>> copied([table[0]])[0].untyped_storage().nbytes()
        8
    """
    try:
        return _copy(value, {}, refused)
    except RecursionError as error:
        if refused is not None:
            refused(value, error)
        return value


def _copy(value: Any, memo: dict[int, Any], refused: Callable[[object, Exception], None] | None) -> Any:
    kind = type(value)
    if kind in _ATOM_TYPES:
        return value
    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if kind is dict:
        memo[id(value)] = made = {}
        made.update((key, _copy(part, memo, refused)) for key, part in value.items())
    elif kind is list and len(value) > _MANY and _ATOM_TYPES.issuperset(map(type, value)):
        memo[id(value)] = made = value.copy()
    elif kind is list:
        memo[id(value)] = made = []
        made.extend(_copy(part, memo, refused) for part in value)
    elif kind is tuple:
        memo[id(value)] = made = tuple([_copy(part, memo, refused) for part in value])
    elif issubclass(kind, tuple) and hasattr(kind, "_fields") and not attributes(value):
        # Not the constructor: a __new__ of the user may change what it is given.
        memo[id(value)] = made = tuple.__new__(kind, [_copy(part, memo, refused) for part in value])
    elif kind is torch.Tensor:
        memo[id(value)] = made = _copy_of_tensor(value)
        if held := vars(value):  # which the program has set: ``picture.spacing = (1, 1, 3)``
            vars(made).update(_copy(held, memo, refused))
    elif is_plain(kind) and not attributes(value):
        made = value  # it marks something by its identity alone: MISSING = object()
    else:
        made = _copy_of_object(value, memo, refused)
    return made


def _copy_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, without attributes of its own."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor.clone()
    with torch._C.DisableTorchFunctionSubclass():
        made = tensor.clone() if tensor.requires_grad and not tensor.is_leaf else tensor.detach().clone()
        if type(tensor) is not torch.Tensor:
            made = made.as_subclass(type(tensor))
        return made.requires_grad_() if tensor.requires_grad and tensor.is_leaf else made


def _copy_of_object(
    value: Any, memo: dict[int, Any], refused: Callable[[object, Exception], None] | None
) -> Any:
    """The copy that :mod:`copy` makes of an object, except for the tensors in it."""
    try:
        # torch's own deep copy of a tensor copies its whole storage, and numpy's can always be written to.
        for part in _not_for_deepcopy(value, set()):
            if id(part) in memo:
                continue
            if isinstance(part, torch.Tensor):
                memo[id(part)] = made = _copy_of_tensor(part)
                if vars(part):
                    vars(made).update(copy.deepcopy(vars(part), memo))
            elif _is_image(type(part)):
                _copy_image(part, memo)
            else:
                _copy_array(part, memo)
        made = copy.deepcopy(value, memo)
        if _is_image(type(value)):
            return made
        if dict_of(value) is value:  # a dict whose items are its attributes
            made.__dict__ = made
        elif is_plain(type(value)) or derived_from(type(value)) is not None:
            _complete(made, value, memo)
        return made
    except Exception as error:
        memo[id(value)] = value
        if refused is not None:
            refused(value, error)
        return value


def _complete(made: Any, value: Any, memo: dict[int, Any]) -> None:
    """Give the copy of an object the attributes that its class leaves out of what pickle keeps.

    A ``BatchEncoding`` of transformers so loses the number of its sequences. A weak reference stays away: it
    refers to an object of the original.
    """
    held, have = attributes(value), attributes(made)
    for name, part in held.items():
        if name not in have and not isinstance(part, weakref.ref):
            set_attribute(made, name, copy.deepcopy(part, memo))


def _copy_array(array: Any, memo: dict[int, Any]) -> None:
    """Note numpy's own deep copy of an array, made read-only and given the attributes that it lacks."""
    made = copy.deepcopy(array, memo)  # it notes the copy itself
    made.flags.writeable = array.flags.writeable
    held = {name: part for name, part in attributes(array).items() if name not in attributes(made)}
    if held:  # which the program has set: ``signal.rate = 16_000``
        vars(made).update(copy.deepcopy(held, memo))


def _copy_image(image: Any, memo: dict[int, Any]) -> None:
    """Note PIL's own deep copy of a picture, given the attributes that it lacks.

    It lacks the name of its file, what a program has set, and a palette that is empty or has other colours
    than RGB, such as an opacity for each.
    """
    made = copy.deepcopy(image, memo)  # it notes the copy itself
    of_file = hasattr(image, "fp")  # whose objects are not copied
    held = {name: part for name, part in vars(image).items() if name not in vars(made)}
    kept = {name: part for name, part in held.items() if not of_file or type(part) in _ATOM_TYPES}
    vars(made).update(copy.deepcopy(kept, memo))
    if image.palette is not None:
        mode = image.palette.mode
        made.putpalette(bytes(image.getpalette(mode)), mode)


def _not_for_deepcopy(value: Any, entered: set[int]) -> Iterable[Any]:
    """What :mod:`copy` would not copy as it is, the innermost first: some tensors and arrays, and pictures.

    These are tensors, and arrays that are read-only, or that a program has given attributes.
    """
    kind = type(value)
    if kind in _ATOM_TYPES or issubclass(kind, _ATOMS) or id(value) in entered:
        return
    if issubclass(kind, torch.Tensor):
        if kind is torch.Tensor or _is_elements_and_attributes(value):
            yield value
        return
    entered.add(id(value))
    if issubclass(kind, np.ndarray) and not value.dtype.hasobject:
        numpys_own = kind.__deepcopy__ is np.ndarray.__deepcopy__
        if not value.flags.writeable or (numpys_own and attributes(value)):
            yield value
            return
    if issubclass(kind, _CONTAINERS):
        for part in dict.values(value) if issubclass(kind, dict) else value:
            yield from _not_for_deepcopy(part, entered)
    for part in attributes(value).values():
        yield from _not_for_deepcopy(part, entered)
    if _is_image(kind):
        yield value


def _is_elements_and_attributes(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a subclass can be copied as such: torch's own may raise, others lack some."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or slots_of(tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and not tensor.is_meta


# ---- reference counts of a new object ------------------------------------------------------------------


def _passed() -> int:
    """The reference count that :func:`owned` sees of a new object passed to it."""
    counts: list[int] = [owned(_Gauge()) for _ in range(3)]
    return min(counts)


def _contained() -> int:
    """The reference count of a new object in a list, as seen by a loop over the list."""
    counts = []
    for value in [_Gauge(), _Gauge()]:
        counts.append(sys.getrefcount(value))  # the count in a comprehension may differ
    return min(counts)


def _stored() -> int:
    """The reference count of the storage of a new tensor, as seen by who looks at it."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


# At most the counts of the known interpreters: a tracer that holds references must not raise them.
_PASSED = 0
_PASSED = min(_passed(), 2 if sys.version_info >= (3, 11) else 3)
_CONTAINED = min(_contained(), 3)
_STORED = _stored()
