"""The format transform of a Hugging Face dataset, taken off it: rows as they are decoded, and a transform.

``with_transform`` and ``set_transform`` keep the user's function in the dataset's format. The cache takes the
rows below it, as Python objects, and treats the function like the first one of ``transform=``: it is cached
if it is deterministic and its result for a row does not depend on the other rows, and runs live on whole
batches otherwise (:mod:`hotset.determinism.batch_transform`). All other formats belong to the rows.

The dataset may be in a ``Subset``, whose batches are the dataset's, or in the parts of a ``ConcatDataset``,
if all have one function; torch reads those row by row.

The format can be set again at any time: :func:`format_of` is what tells.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from hotset.determinism.batch_transform import BatchTransform

__all__ = ["columns_with_gaps", "format_of", "row_of", "without_format_transform"]

_PYTHONS_OWN = (None, "python", "custom", "arrow", "polars")  # formats in which a None stays one
_FORMAT = ("_format_type", "_format_kwargs", "_format_columns", "_output_all_columns")


def without_format_transform(dataset: Any) -> tuple[Any, BatchTransform | None]:
    """Return a dataset of the rows below the format transform, and that; (dataset, None) if it has none."""
    kind = type(dataset)
    if kind is Subset:
        inner, step = without_format_transform(dataset.dataset)
        if step is None:
            return dataset, None
        twin = copy.copy(dataset)
        twin.dataset = inner
        return twin, step
    if kind is ConcatDataset:
        parts = [without_format_transform(part) for part in dataset.datasets]
        first = parts[0][1]
        if first is None or any(vars(step or first) != vars(first) or not step for _, step in parts):
            return dataset, None
        twin = copy.copy(dataset)
        twin.datasets = [part for part, _ in parts]
        first.batched = False
        return twin, first
    if not _is_hugging_face(dataset) or dataset._format_type != "custom":
        return dataset, None
    transform, columns = dataset._format_kwargs.get("transform"), dataset._format_columns
    if not callable(transform):
        return dataset, None
    twin = copy.copy(dataset)
    twin._format_type, twin._format_kwargs = None, {}
    twin._format_columns = None if dataset._output_all_columns else columns
    twin._output_all_columns = False
    return twin, BatchTransform(transform, columns, keeps_others=dataset._output_all_columns)


def format_of(dataset: Any) -> tuple[Any, ...] | None:
    """The format of a Hugging Face dataset; None of any other. Two are equal if they give the same rows."""
    if not _is_hugging_face(dataset):
        return None
    return tuple(vars(dataset).get(name) for name in _FORMAT)


def row_of(dataset: Any, index: int) -> Any:
    """A sample by its index; a row of a Hugging Face dataset as it is in a batch.

    In numpy's format a float is float64 in a row that is read alone, and float32 in a batch, which is what
    torch's loader reads, also through a ``Subset``.
    """
    several = getattr(dataset, "__getitems__", None)
    if several is None:
        return dataset[index]
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return several([index])[0] if _is_hugging_face(inner) else dataset[index]


def columns_with_gaps(dataset: Any) -> list[str]:
    """Columns of whole numbers or truth values with a None, in a format of arrays.

    Such a format makes them floats in a batch that has a None, and leaves them whole numbers in others.
    """
    if not _is_hugging_face(dataset) or dataset._format_type in _PYTHONS_OWN:
        return []
    names = dataset._format_columns or dataset.column_names
    rows = dataset._indices.column(0) if dataset._indices is not None else None
    return [name for name in names if _has_gaps(dataset.data.column(name), rows)]


def _has_gaps(column: Any, rows: Any) -> bool:
    from pyarrow import compute, types

    while any(is_list(column.type) for is_list in (types.is_list, types.is_large_list)):
        column, rows = compute.list_flatten(column if rows is None else column.take(rows)), None
    if not (types.is_integer(column.type) or types.is_boolean(column.type)) or not column.null_count:
        return False
    return rows is None or column.take(rows).null_count > 0


def _is_hugging_face(dataset: Any) -> bool:
    return any(
        f"{kind.__module__}.{kind.__qualname__}" == "datasets.arrow_dataset.Dataset"
        for kind in type(dataset).__mro__
    )
