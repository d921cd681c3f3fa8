"""The content of values that are changed in place: arrays, tensors, and what processes share.

An attribute may hold the same object as before, and the object other numbers: ``labels[3] = 5``, a counter in
``multiprocessing.Value`` that all workers see. :func:`content_of` returns their bytes, to be compared later.

======================================  ================================================================
array, tensor on the CPU, bytearray     its elements; not those that hold objects
``multiprocessing.Value``, ``Array``    the memory, read without its lock
``multiprocessing.Event``               whether it is set
``SharedMemory``, a ctypes object       the memory
pandas' ``DataFrame``, ``Series``       each column; not a long one of texts, or with objects of any kind
======================================  ================================================================

What a manager's proxy stands for is in another process, and is not looked at.

:func:`whole_content_of` does so for a container and all that it holds at any depth, where these are numbers,
texts, containers and small arrays: pickle writes them 20 times as fast as Python could compare them.
"""

from __future__ import annotations

import array
import ctypes
import io
import operator
import pickle
from typing import Any

import numpy as np
import torch

from hotset.determinism.objects.safe_access import loaded_class

__all__ = [
    "Copy",
    "bytes_of",
    "content_of",
    "copy_of",
    "is_copy",
    "is_shared",
    "put_content",
    "whole_content_of",
]

Copy = np.ndarray[Any, Any] | torch.Tensor

_CONTAINERS = (list, tuple, dict, set)
_SMALL = 4096
_LONGEST, _TEXTS = 20_000, 1 << 20  # texts of a table's column, and their bytes: some milliseconds
_C_DATA = ctypes.c_int.__mro__[-2]  # the base of all that ctypes lays out in memory


def content_of(value: Any, most: int) -> bytes | None:
    """The bytes of a value; None if it is of no such kind, or has more than ``most`` bytes.

    Example:
        >>> labels = np.zeros(2, np.uint8)
        >>> before = content_of(labels, 100)
        >>> labels[1] = 5
        >>> before, content_of(labels, 100), content_of(labels, 1)
        (b'\\x00\\x00', b'\\x00\\x05', None)
    """
    if issubclass(type(value), bytearray):
        return bytes(value) if len(value) <= most else None
    if issubclass(type(value), np.ndarray):
        return value.tobytes() if value.nbytes <= most and not value.dtype.hasobject else None
    if issubclass(type(value), torch.Tensor):
        return _bytes_of_tensor(value, most)
    if issubclass(type(value), loaded_class("multiprocessing.sharedctypes", "SynchronizedBase")):
        value = value.get_obj()
    if issubclass(type(value), _C_DATA):
        memory = memoryview(value).cast("B") if ctypes.sizeof(value) <= most else None
        return bytes(memory) if memory is not None else None
    if issubclass(type(value), loaded_class("multiprocessing.synchronize", "Event")):
        flag = getattr(value, "_flag", None)  # is_set() takes a lock, which a killed process may hold
        return bytes([flag.get_value() & 1]) if flag is not None else None
    if _is_table(value):
        return _bytes_of_table(value, most)
    if issubclass(type(value), loaded_class("multiprocessing.shared_memory", "SharedMemory")):
        shared = getattr(value, "_buf", None)  # None once it is closed
        return bytes(shared) if shared is not None and len(shared) <= most else None
    return None


def whole_content_of(container: Any, most: int) -> bytes | None:
    """The bytes of all that a container holds; None if it holds other objects, or takes more bytes.

    Example:
        >>> boxes = [{"box": [1, 2]}]
        >>> before = whole_content_of(boxes, 100)
        >>> boxes[0]["box"][1] = 3
        >>> whole_content_of(boxes, 100) == before, whole_content_of([object()], 100)
        (False, None)
    """
    if type(container) not in _CONTAINERS:
        return None
    file = _Limited(most)
    try:
        _Writer(file, pickle.HIGHEST_PROTOCOL).dump(container)
    except (TypeError, RecursionError):
        return None
    return file.getvalue()


class _Limited(io.BytesIO):
    """Takes so many bytes; more are a ``TypeError``, which comes as soon as the pickler has written them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, some: Any) -> int:
        if self.tell() + len(some) > self._most:
            raise TypeError
        return super().write(some)


class _Writer(pickle.Pickler):
    """Writes numbers, texts, containers and small arrays; any other object is a ``TypeError``."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.nbytes <= _SMALL and not value.dtype.hasobject:
            return bytes, (value.tobytes(),)
        if value is bytes:
            return NotImplemented
        raise TypeError


def copy_of(value: Any, most: int) -> Copy | None:
    """A copy of an array of objects, or of a dense tensor on a device, if it is not larger; else None.

    Example:
        >>> names = np.array(["a", None])
        >>> before = copy_of(names, 100)
        >>> names[1] = "b"
        >>> is_copy(before, names), copy_of(names, 1)
        (False, None)
    """
    copied: Copy | None = None
    if issubclass(type(value), np.ndarray) and value.nbytes <= most:
        copied = value.copy()
    elif issubclass(type(value), torch.Tensor) and _is_dense(value) and value.nbytes <= most:
        copied = value.detach().clone()
    return copied


def is_copy(copy: Copy, value: Any) -> bool:
    """Whether a value is still what :func:`copy_of` has copied."""
    if isinstance(copy, torch.Tensor):
        return torch.equal(copy, value)
    return copy.shape == value.shape and all(map(operator.is_, copy.flat, value.flat))


def is_shared(value: Any) -> bool:
    """Whether running workers see what is written into it, and may write to it."""
    while issubclass(type(value), (np.ndarray, memoryview)):  # at last None, if an array has its own memory
        value = value.obj if issubclass(type(value), memoryview) else value.base
    if issubclass(type(value), torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return bool(value.is_shared())
    own = (type(None), bytes, bytearray, array.array, *_CONTAINERS)
    return not (issubclass(type(value), own) or _is_table(value))


def put_content(value: Any, content: Any) -> None:
    """Write what :func:`content_of` or :func:`copy_of` returned into an array, a tensor or a bytearray.

    Any other value stays as it is: not all of a table is known. So does an array or tensor that was resized,
    or cannot be written to.
    """
    kind = type(value)
    if issubclass(kind, bytearray):
        value[:] = content
    elif issubclass(kind, np.ndarray) and value.flags.writeable:
        if isinstance(content, bytes) and value.nbytes == len(content):
            content = np.frombuffer(content, value.dtype).reshape(value.shape)
        if isinstance(content, np.ndarray) and value.shape == content.shape:
            np.copyto(value, content)
    elif issubclass(kind, torch.Tensor):
        if isinstance(content, bytes) and value.nbytes == len(content) > 0:
            content = torch.frombuffer(bytearray(content), dtype=value.dtype).view(value.shape)
        if isinstance(content, torch.Tensor) and value.shape == content.shape:
            with torch.inference_mode():  # no gradient is recorded; an inference tensor allows it there alone
                value.copy_(content)


def _bytes_of_tensor(tensor: torch.Tensor, most: int) -> bytes | None:
    with torch._C.DisableTorchFunctionSubclass():
        if not _is_dense(tensor) or tensor.device.type != "cpu" or tensor.nbytes > most:
            return None
        return bytes_of(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor on the CPU, in order.

    Not by ``tensor.numpy()``: after that the user's tensor could not be resized any more.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def _is_table(value: Any) -> bool:
    kinds = (*loaded_class("pandas", "DataFrame"), *loaded_class("pandas", "Series"))
    return issubclass(type(value), kinds)


def _bytes_of_table(table: Any, most: int) -> bytes | None:
    """The bytes of its columns that have room, one after the other; None if none has.

    Not of its memory as a whole, which reading may lay out anew.
    """
    columns = [table] if table.ndim == 1 else [column for _, column in table.items()]
    parts: list[bytes] = []
    for column in columns:
        part = _bytes_of_column(column, most)
        if part is not None:  # which a column has room follows from the parts: later it is the same ones
            parts.append(part)
            most -= len(part)
    return b"".join(parts) if parts else None


def _bytes_of_column(column: Any, most: int) -> bytes | None:
    if isinstance(column.dtype, np.dtype) and not column.dtype.hasobject:
        values = column.to_numpy()
        return bytes(values.tobytes()) if values.nbytes <= most else None
    return whole_content_of(column.tolist(), min(most, _TEXTS)) if len(column) <= _LONGEST else None
