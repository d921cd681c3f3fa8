"""Sparse tensors: their indices, values and size, as they are, coalesced or not."""

from __future__ import annotations

from typing import Any

from hotset.store.leaves.leaf import SchemaMismatch, is_tensor

__all__ = ["flatten_sparse", "is_sparse", "unflatten_sparse"]


def is_sparse(value: object) -> bool:
    """Whether a value is a sparse tensor, of torch's own class, that is nothing but its parts."""
    if not is_tensor(value) or str(value.layout) not in _PARTS:
        return False
    return value.device.type == "cpu" and not (value.requires_grad or value.is_quantized or vars(value))


def flatten_sparse(value: Any) -> Any:
    if not is_sparse(value):
        raise SchemaMismatch("another tensor than a sparse one on the CPU that requires no gradient")
    layout = str(value.layout)
    first, second, values = (getattr(value, name)() for name in _PARTS[layout])
    return layout, list(value.shape), value.is_coalesced() if layout == _COO else None, first, second, values


def unflatten_sparse(tree: Any) -> Any:
    """A sparse tensor of its parts, which are checked: indices beyond its size would reach other memory."""
    import torch

    layout, size, is_coalesced, first, second, values = tree
    if layout == _COO:
        return torch.sparse_coo_tensor(first, values, size, check_invariants=True, is_coalesced=is_coalesced)
    kind = getattr(torch, layout.removeprefix("torch."))
    return torch.sparse_compressed_tensor(first, second, values, size, layout=kind, check_invariants=True)


_COO = "torch.sparse_coo"
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
# The methods that return what a tensor of each layout consists of; one of coordinates has only two parts.
_PARTS = {
    _COO: ("_indices", "_nnz", "_values"),
    "torch.sparse_csr": _ROWS,
    "torch.sparse_bsr": _ROWS,
    "torch.sparse_csc": _COLUMNS,
    "torch.sparse_bsc": _COLUMNS,
}
