"""Tensors of subclasses: how they become a plain tensor with attributes, and a tensor of their class again.

This is what torch itself does to send such a tensor to another process. A class with another way (one that
wraps tensors, has slots, or says itself what is kept) is refused: elements and attributes do not describe it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.store.leaves.instances import slots_of
from hotset.store.leaves.leaf import SchemaMismatch

__all__ = ["tensors_of"]


def tensors_of(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How a tensor of a subclass is flattened and built again, as torch does to send it to a process."""
    torchs_way: Any = torch.Tensor.__reduce_ex__
    known = False

    def flatten(value: Any) -> Any:
        nonlocal known
        if type(value) is not cls or not (known or _is_tensor_and_attributes(value)):
            raise SchemaMismatch(
                f"a tensor of {cls.__module__}.{cls.__qualname__}, which is more than its elements and "
                "attributes; hotset.register_codec makes it cacheable"
            )
        # To ask takes some ten microseconds; all tensors of a class answer alike, unless it has its own way.
        known = cls.__reduce_ex__ is torchs_way
        with torch._C.DisableTorchFunctionSubclass():
            return (value.as_subclass(torch.Tensor), dict(vars(value)))

    def unflatten(tree: Any) -> Any:
        tensor, attributes = tree
        value = tensor.as_subclass(cls)
        vars(value).update(attributes)
        return value

    return flatten, unflatten


def _is_tensor_and_attributes(value: Any) -> bool:
    """Whether torch, too, makes a tensor again of its elements and ``__dict__``, and runs none of its class.

    It does not where a tensor wraps others (``__torch_dispatch__``), has slots, or says itself what is kept.
    """
    cls = type(value)
    if hasattr(cls, "__del__") or slots_of(value) or cls.__setstate__ is not torch.Tensor.__setstate__:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        rebuild, arguments, *more = value.__reduce_ex__(2)
    if rebuild is not torch._tensor._rebuild_from_type_v2 or more:
        return False
    inner, kind, _, state = arguments
    plain = inner in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3)
    return plain and kind is cls and (state is None or state == {} or state is vars(value))
