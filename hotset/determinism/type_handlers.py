"""Descriptions of what is more than its attributes: code, classes, modules, arrays; and of what is no
identity. Of what stands for something outside: :mod:`hotset.determinism.handles`.

Each function here describes one kind; ``HANDLERS`` says which type goes to which. A type's subclasses go
there too, unless they have a handler of their own.
"""

from __future__ import annotations

import enum
import functools
import logging
import pickle
import random
import re
import struct
import threading
import types
import weakref
from collections.abc import Iterable
from operator import itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset.determinism import code_dependencies as codes
from hotset.determinism.content_hash import digest_of_bytes, file_behind, integers_of
from hotset.determinism.describe import Describer, Handler
from hotset.determinism.handles import OF_HANDLES, by_type, with_own_state

__all__ = ["HANDLERS"]

Array = npt.NDArray[Any]

# Parts of a class's body that describe nothing, or are filled in as the class is used.
_NOT_BODY = frozenset(
    (
        *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__parameters__", "__orig_bases__", "__type_params__", "__static_attributes__", "__match_args__"),
        *("__abstractmethods__", "_abc_impl", "__slotnames__"),
    )
)
_CONSTANTS = frozenset({bool, int, float, complex, str, bytes})
_MEMBERS_OF_C = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NO_IDENTITY = (
    *(random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    *(np.random.SeedSequence, torch.Generator),
    *(weakref.ref, weakref.ProxyType, weakref.CallableProxyType),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(threading.Thread, logging.Filterer, logging.LoggerAdapter),
)
# ---- no identity -----------------------------------------------------------------------------------------


def _by_text(to: Describer, value: object) -> None:
    """For constants of a library, whose text is their name."""
    to.add(type(value))
    to.name(str(value))


# ---- code ------------------------------------------------------------------------------------------------


def _class(to: Describer, cls: type) -> None:
    to.put(b"C")
    module = _module_name(cls.__module__)
    to.name(module, cls.__qualname__)
    if module == "builtins":
        return
    version = codes.installed(module)
    if version is not None:
        to.name(version)
        to.meets(module)
        for name, part in sorted(codes.replaced(vars(cls)), key=itemgetter(0)):
            to.name(name)
            to.add(part)
        return
    to.add(type(cls), cls.__bases__)
    body = {name: part for name, part in vars(cls).items() if name not in _NOT_BODY}
    own = sorted(name for name in body if not name.startswith("_hotset"))
    to.count(len(own))
    for name in own:
        to.name(name)
        to.add(body[name])


def _module_name(name: object) -> str:
    """A spawned process runs the main module under another name."""
    return "__main__" if name == "__mp_main__" else str(name)


def _function(to: Describer, function: types.FunctionType) -> None:
    to.put(b"F")
    to.add(function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__)
    to.state(function)
    # Not __module__: functools.wraps sets that to the wrapped function's.
    module = _module_name(function.__globals__.get("__name__"))
    version = codes.installed(module)
    if version is not None:
        to.name(version)
        to.meets(module)
        return
    to.reads(function.__code__)
    for chain in codes.loaded_globals(function.__code__):
        _loaded(to, function.__globals__, chain)
    for imported in codes.imports(function.__code__):
        _imported(to, imported)


def _loaded(to: Describer, names: dict[str, Any], chain: tuple[str, ...]) -> None:
    """What a function reads of its module, through other modules to the thing itself: ``helpers.scale``.

    What it reads of a library is known by its version, unless a user has put it there.
    """
    if chain[0] not in names:
        return  # a builtin, or not there yet: the name is in the code
    value = names[chain[0]]
    to.name(chain[0])
    for name in chain[1:]:
        if not issubclass(type(value), types.ModuleType):
            break
        found = vars(value).get(name)
        if codes.installed(value.__name__) is not None and not issubclass(type(found), types.ModuleType):
            to.add(value)
            value = found if type(found) in _CONSTANTS or codes.is_users(found) else None
            break
        value = found
    to.add(value)


def _imported(to: Describer, module: str) -> None:
    """By version or source, whether it was imported yet or not: that must change nothing."""
    version = codes.installed(module)
    to.name(module)
    if version is None:
        to.put(codes.source_of(module))
        to.meets(module)
    else:
        to.name(version)


def _code(to: Describer, code: types.CodeType) -> None:
    to.put(b"K")
    to.add(code.co_code, getattr(code, "co_exceptiontable", b""), code.co_flags)
    to.add(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        to.count(len(names))
        to.name(*names)
    to.count(len(code.co_consts))
    to.constants(code.co_consts)


def _cell(to: Describer, cell: types.CellType) -> None:
    try:
        content = cell.cell_contents
    except ValueError:
        to.put(b"e")
        return
    to.put(b"c")
    to.add(content)


def _module(to: Describer, module: types.ModuleType) -> None:
    to.put(b"m")
    _imported(to, module.__name__)


def _builtin(to: Describer, function: Any) -> None:
    """A function in C, alone or bound to what its ``__self__`` is."""
    to.put(b"B")
    to.name(str(function.__qualname__))
    owner = function.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        module = str(function.__module__ or getattr(owner, "__name__", ""))
        to.name(module, codes.installed(module) or "")
    else:
        to.add(owner)


def _member_of_c(to: Describer, member: Any) -> None:
    to.put(b"D")
    to.name(type(member).__name__, member.__objclass__.__module__, member.__objclass__.__qualname__)
    to.name(member.__name__)


def _parts(*names: str) -> Handler:
    """For what is made of some of its attributes, which C holds."""

    def handler(to: Describer, value: Any) -> None:
        to.put(b"p")
        to.add(type(value), *(getattr(value, name) for name in names))
        to.state(value)

    return handler


# ---- values ----------------------------------------------------------------------------------------------


def _enum(to: Describer, member: Any) -> None:
    to.put(b"e")
    to.add(type(member), member._name_, member._value_)


def _path(to: Describer, path: PurePath) -> None:
    to.put(b"/")
    to.add(type(path), str(path))


def _mapping_proxy(to: Describer, proxy: types.MappingProxyType[Any, Any]) -> None:
    to.put(b"P")
    to.add(dict(proxy))


def _image(to: Describer, image: Any) -> None:
    to.put(b"I")
    to.add(type(image), image.mode, image.size, image.tobytes(), image.getpalette(), image.info)


def _buffer(to: Describer, buffer: Any) -> None:
    to.put(b"b")
    try:
        view = buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else memoryview(buffer)
    except ValueError:  # released
        to.add(type(buffer))
        return
    to.add(type(buffer), np.frombuffer(view if view.contiguous else view.tobytes(), np.uint8))


def _cached(to: Describer, cached: Any) -> None:
    """A dataset that is cached itself gives what its source gives."""
    to.put(b"H")
    to.add(cached.dataset, cached._source)


# ---- arrays ----------------------------------------------------------------------------------------------


def _array(to: Describer, array: Array | np.generic) -> None:
    to.put(b"A")
    to.add(type(array))
    plain = np.asarray(array)
    to.name(repr(plain.dtype))
    to.add(plain.shape)
    if plain.dtype.names:
        # Field by field, as the padding between fields is not content.
        to.add(*(plain[name] for name in plain.dtype.names))
    elif plain.dtype.hasobject or plain.dtype.kind in "UT":
        to.elements(plain.ravel().tolist())
    else:
        _content(to, plain)
    to.state(array)


def _tensor(to: Describer, tensor: torch.Tensor) -> None:
    to.put(b"X")
    to.add(type(tensor))
    try:
        to.name(str(tensor.dtype), str(tensor.layout), tensor.device.type)
        to.add(tuple(tensor.shape), tensor.requires_grad)
        _values(to, tensor.detach())
    except (RuntimeError, NotImplementedError):
        if not torch.nn.parameter.is_lazy(tensor):  # which has no values yet
            to.unknown(tensor)
    to.state(tensor)


def _values(to: Describer, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        return
    if tensor.is_nested:
        to.add(list(tensor.unbind()))
    elif tensor.is_quantized:
        to.add(str(tensor.qscheme()), tensor.dequantize())
    elif tensor.layout is not torch.strided:
        to.add(tensor.to_dense())
    else:
        _content(to, integers_of(tensor))


def _storage(to: Describer, storage: Any) -> None:
    untyped = storage.untyped()
    to.put(b"S")
    to.add(type(storage), torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))


def _script(to: Describer, scripted: Any) -> None:
    """TorchScript, whose code and attributes only its own archive has in full."""
    to.put(b"J")
    to.add(type(scripted))
    try:
        to.put(scripted.save_to_buffer())
    except RuntimeError:
        to.unknown(scripted)


def _content(to: Describer, array: Array) -> None:
    """Put all of an array's bytes; or, if it maps a large file, which place of that."""
    place = file_behind(array)
    if place is not None:
        to.put(b"f")
        to.add(tuple(place), array.strides)
    elif array.nbytes:
        to.put(b"w")
        to.put(digest_of_bytes(array))


def _all(handler: Handler, kinds: Iterable[type | str]) -> dict[type | str, Handler]:
    return dict.fromkeys(kinds, handler)


HANDLERS: dict[type | str, Handler] = {
    **OF_HANDLES,
    **_all(with_own_state(by_type), _NO_IDENTITY),
    **_all(_by_text, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, np.dtype)),
    **_all(_by_text, (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))),
    type: _class,
    types.FunctionType: _function,
    types.CodeType: _code,
    types.CellType: _cell,
    types.ModuleType: _module,
    types.MethodType: _parts("__func__", "__self__"),
    **_all(_builtin, (types.BuiltinFunctionType, types.MethodWrapperType)),
    **_all(_member_of_c, _MEMBERS_OF_C),
    functools.partial: _parts("func", "args", "keywords"),
    type(functools.lru_cache(by_type)): _parts("__wrapped__"),
    **_all(_parts("__func__"), (staticmethod, classmethod)),
    property: _parts("fget", "fset", "fdel"),
    types.MappingProxyType: _mapping_proxy,
    enum.Enum: _enum,
    PurePath: _path,
    re.Pattern: _parts("pattern", "flags"),
    struct.Struct: _parts("format"),
    **_all(_buffer, (bytearray, memoryview, pickle.PickleBuffer)),
    **_all(_array, (np.ndarray, np.generic)),
    torch.Tensor: _tensor,
    **_all(_storage, (torch.UntypedStorage, torch.TypedStorage)),
    **_all(_script, (torch.jit.ScriptModule, torch.jit.ScriptFunction)),
    "PIL.Image.Image": _image,
    "hotset.dataset.cached_dataset.CachedDataset": _cached,
    "hotset.store.segment.Segment": by_type,  # what is kept there comes from somewhere else
}
