"""Sparse tensors: their indices, values and size, as they are, coalesced or not."""

from __future__ import annotations

from typing import Any

from hotset.store.leaves.leaf import SchemaMismatch, is_tensor

__all__ = ["flatten_sparse", "is_sparse", "sparse_parts", "unflatten_sparse"]

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
# The methods that return what a tensor of each layout consists of.
_PARTS = {
    "torch.sparse_coo": ("_indices", "_values", "is_coalesced"),
    "torch.sparse_csr": _ROWS,
    "torch.sparse_bsr": _ROWS,
    "torch.sparse_csc": _COLUMNS,
    "torch.sparse_bsc": _COLUMNS,
}


def sparse_parts(tensor: Any) -> dict[str, Any] | None:
    """What a sparse tensor consists of, but for its size, by the methods that return it; None of another.

    Example:
        >>> import torch
        >>> sparse_parts(torch.eye(2).to_sparse())["_values"]
        tensor([1., 1.])
        >>> sparse_parts(torch.eye(2)) is None
        True
    """
    names = _PARTS.get(str(tensor.layout))
    return None if names is None else {name: getattr(tensor, name)() for name in names}


def is_sparse(value: object) -> bool:
    """Whether a value is a sparse tensor, of torch's own class, that is nothing but its parts."""
    if not is_tensor(value) or str(value.layout) not in _PARTS:
        return False
    return value.device.type == "cpu" and not (value.requires_grad or value.is_quantized or vars(value))


def flatten_sparse(value: Any) -> Any:
    parts = sparse_parts(value) if is_sparse(value) else None
    if parts is None:
        raise SchemaMismatch("another tensor than a sparse one on the CPU that requires no gradient")
    return str(value.layout), list(value.shape), *parts.values()


def unflatten_sparse(tree: Any) -> Any:
    """A sparse tensor of its parts, which are checked: indices beyond its size would reach other memory."""
    import torch

    layout, size, first, second, third = tree
    if layout == "torch.sparse_coo":
        indices, values, is_coalesced = first, second, third
        return torch.sparse_coo_tensor(
            indices, values, size, device="cpu", check_invariants=True, is_coalesced=is_coalesced
        )
    kind = getattr(torch, layout.removeprefix("torch."))
    return torch.sparse_compressed_tensor(
        first, second, third, size, layout=kind, device="cpu", check_invariants=True
    )
