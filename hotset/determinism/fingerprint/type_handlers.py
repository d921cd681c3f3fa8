"""Handlers that describe objects whose attributes do not say everything: code, classes, modules, arrays.

Each handler is a function that describes one kind of object. ``HANDLERS`` maps types to handlers; a subclass
goes to the handler of its nearest base that has one. :mod:`hotset.determinism.fingerprint.handles` and
:mod:`hotset.determinism.fingerprint.remote_files` have the handlers for objects that stand for something
outside the program, :mod:`hotset.determinism.fingerprint.arrow_tables` and
:mod:`hotset.determinism.fingerprint.data_frames` those for tables.
"""

from __future__ import annotations

import builtins
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
from operator import itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset.determinism.equality import integers_of, palette_of
from hotset.determinism.fingerprint.arrow_tables import OF_ARROW
from hotset.determinism.fingerprint.content_hash import digest_of_bytes, file_behind
from hotset.determinism.fingerprint.data_files import Decoded
from hotset.determinism.fingerprint.data_frames import OF_DATA_FRAMES
from hotset.determinism.fingerprint.describe import Describer, Handler, by_attributes, by_parts
from hotset.determinism.fingerprint.handles import OF_HANDLES, by_type, with_own_state
from hotset.determinism.fingerprint.remote_files import OF_REMOTE_FILES
from hotset.determinism.objects import code_dependencies as codes
from hotset.determinism.objects.safe_access import UNSET, content_of_cell
from hotset.store.leaves.sparse_tensors import sparse_parts

__all__ = ["HANDLERS"]

Array = npt.NDArray[Any]

# Parts of a class's body that do not count, or are filled in as the class is used.
_NOT_BODY = frozenset(
    (
        *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__parameters__", "__orig_bases__", "__type_params__", "__static_attributes__", "__match_args__"),
        *("__abstractmethods__", "_abc_impl", "__slotnames__"),
        # What pydantic makes of fields and validators names the class by its address, or depends on use.
        *("__pydantic_core_schema__", "__pydantic_serializer__", "__pydantic_validator__"),
        *("__pydantic_setattr_handlers__", "__pydantic_parent_namespace__"),
        *("__pydantic_complete__", "__pydantic_fields_complete__"),
    )
)
_CONSTANTS = frozenset({bool, int, float, complex, str, bytes})
# They read globals whose names the code need not have.
_ANY_GLOBAL = frozenset({"globals", "eval", "exec"})
_MEMBERS_OF_C = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NO_IDENTITY = (
    *(random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    torch.Generator,
    *(weakref.ref, weakref.ProxyType, weakref.CallableProxyType),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(threading.Thread, logging.Filterer, logging.LoggerAdapter),
)


def _by_text(to: Describer, value: object) -> None:
    """Describe a library's constant, whose ``str`` is its name."""
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
        to.modules.add(module)
        for name, part in sorted(codes.replaced_by_users(vars(cls)), key=itemgetter(0)):
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
    """The module's name; a spawned process runs the main module under another one."""
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
        to.modules.add(module)
        return
    to.codes[function.__code__] = None
    if _ANY_GLOBAL & {chain[0] for chain in codes.loaded_globals(function.__code__)}:
        to.modules.add(module)
    for chain in codes.loaded_globals(function.__code__):
        _loaded(to, function.__globals__, chain)
    for imported in codes.imported_by(function):
        _imported(to, imported)


def _loaded(to: Describer, names: dict[str, Any], chain: tuple[str, ...]) -> None:
    """Describe what a function reads through a chain of names, from its module's globals: ``helpers.scale``.

    What it reads from a library is described by the library's version, unless a user has put it there.
    """
    if chain[0] in names:
        value = names[chain[0]]
    else:  # a builtin, or not defined yet: the code holds the name
        value = vars(builtins).get(chain[0])
        if not codes.is_users(value):
            return
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
    """Describe a module by version or source, in the same way whether it was imported yet or not."""
    version = codes.installed(module)
    to.name(module)
    if version is None:
        to.put(codes.source_of(module))
        to.modules.add(module)
    else:
        to.name(version)


def _code(to: Describer, code: types.CodeType) -> None:
    to.put(b"K")
    for part in (code.co_code, getattr(code, "co_exceptiontable", b"")):
        to.count(len(part))
        to.put(part)
    to.add(code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        to.count(len(names))
        to.name(*names)
    to.count(len(code.co_consts))
    to.constants(code.co_consts)


def _cell(to: Describer, cell: types.CellType) -> None:
    content = content_of_cell(cell)
    to.put(b"e" if content is UNSET else b"c")
    if content is not UNSET:
        to.add(content)


def _module(to: Describer, module: types.ModuleType) -> None:
    to.put(b"m")
    _imported(to, module.__name__)


def _builtin(to: Describer, function: Any) -> None:
    """Describe a function written in C, alone or bound to its ``__self__``."""
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


_parts = functools.partial(by_attributes, b"p", state=True)

# ---- values ----------------------------------------------------------------------------------------------


def _parts_of_image(image: Any) -> tuple[Any, ...]:
    pixels = image.tobytes()  # before the palette, which PIL reads together with them
    return type(image), image.mode, image.size, pixels, palette_of(image), image.info


def _buffer(to: Describer, buffer: Any) -> None:
    to.put(b"b")
    try:
        view = buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else memoryview(buffer)
    except ValueError:  # released
        to.add(type(buffer))
        return
    to.add(type(buffer), np.frombuffer(view if view.contiguous else view.tobytes(), np.uint8))


# ---- arrays ----------------------------------------------------------------------------------------------


def _array(to: Describer, array: Array | np.generic) -> None:
    to.put(b"A")
    to.add(type(array))
    plain = np.asarray(array)
    to.name(repr(plain.dtype))
    to.add(plain.shape)
    if plain.dtype.names:
        # Field by field, as the padding between fields does not count.
        to.add(*(plain[name] for name in plain.dtype.names))
    elif plain.dtype.hasobject or plain.dtype.kind in "UT":
        to.elements(plain.ravel().tolist())
    else:
        _content(to, plain)
        if plain.dtype.kind == "S" and plain.size:
            to.files.add_column(Decoded(plain.reshape(-1)))
    to.state(array)


def _tensor(to: Describer, tensor: torch.Tensor) -> None:
    to.put(b"X")
    to.add(type(tensor))
    try:
        to.name(str(tensor.dtype), str(tensor.layout), tensor.device.type)
        to.add(tuple(tensor.shape), tensor.requires_grad)
        _values(to, tensor.detach())
    except (RuntimeError, NotImplementedError):
        if not torch.nn.parameter.is_lazy(tensor):  # a lazy parameter has no values yet
            to.unknown(tensor)
    to.state(tensor)


def _values(to: Describer, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        return
    if tensor.is_nested:
        to.add(list(tensor.unbind()))
    elif tensor.is_quantized:
        to.add(str(tensor.qscheme()), tensor.dequantize())
    elif (parts := sparse_parts(tensor)) is not None:
        to.add(parts)  # dense, a matrix of users and items would not fit into memory
    elif tensor.layout is not torch.strided:
        to.add(tensor.to_dense())
    else:
        _content(to, integers_of(tensor))


def _storage(to: Describer, storage: Any) -> None:
    untyped = storage.untyped()
    to.put(b"S")
    to.add(type(storage), torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))


def _script(to: Describer, scripted: Any) -> None:
    """Describe TorchScript by its archive: nothing else has all of its code and attributes."""
    to.put(b"J")
    to.add(type(scripted))
    try:
        to.put(scripted.save_to_buffer())
    except RuntimeError:
        to.unknown(scripted)


def _content(to: Describer, array: Array) -> None:
    """Put all of an array's bytes; or, if it maps a large file, the range of the file."""
    mapped = file_behind(array)
    if mapped is not None:
        to.put(b"f")
        to.add(tuple(mapped), array.strides)
    elif array.nbytes:
        to.put(b"w")
        to.put(digest_of_bytes(array))


HANDLERS: dict[type | str, Handler] = {
    **OF_HANDLES,
    **OF_ARROW,
    **OF_DATA_FRAMES,
    **OF_REMOTE_FILES,
    **dict.fromkeys(_NO_IDENTITY, with_own_state(by_type)),
    # Of a generator's seed nothing is read; one that a dataset holds may give each sample its own generator.
    np.random.SeedSequence: by_attributes(b"q", "entropy", "spawn_key", "pool_size"),
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format, torch.qscheme, np.dtype), _by_text),
    **dict.fromkeys((type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)), _by_text),
    type: _class,
    types.FunctionType: _function,
    types.CodeType: _code,
    types.CellType: _cell,
    types.ModuleType: _module,
    types.MethodType: _parts("__func__", "__self__"),
    **dict.fromkeys((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
    **dict.fromkeys(_MEMBERS_OF_C, _member_of_c),
    functools.partial: _parts("func", "args", "keywords"),
    type(functools.lru_cache(by_type)): _parts("__wrapped__"),
    **dict.fromkeys((staticmethod, classmethod), _parts("__func__")),
    property: _parts("fget", "fset", "fdel"),
    types.MappingProxyType: by_parts(b"P", lambda proxy: [dict(proxy)]),
    enum.Enum: by_attributes(b"e", "_name_", "_value_"),
    PurePath: by_parts(b"/", lambda path: (type(path), str(path))),
    re.Pattern: _parts("pattern", "flags"),
    struct.Struct: _parts("format"),
    **dict.fromkeys((bytearray, memoryview, pickle.PickleBuffer), _buffer),
    **dict.fromkeys((np.ndarray, np.generic), _array),
    torch.Tensor: _tensor,
    **dict.fromkeys((torch.UntypedStorage, torch.TypedStorage), _storage),
    **dict.fromkeys((torch.jit.ScriptModule, torch.jit.ScriptFunction), _script),
    "pydantic._internal._decorators.Decorator": by_attributes(b"y", "cls_var_name", "func", "shim", "info"),
    "PIL.Image.Image": by_parts(b"I", _parts_of_image),
    # By its source, as both give the same samples.
    "hotset.dataset.cached_dataset.CachedDataset": by_parts(
        b"H", lambda cached: (cached.dataset, cached._hotset_cache.access.source)
    ),
    "hotset.store.segment.Segment": by_type,  # its content comes from a dataset, which is described
}
