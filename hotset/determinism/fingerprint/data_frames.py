"""Tables of pandas and polars: described by their columns, and other objects of theirs by pickling.

Their attributes do not serve: pandas keeps what it has computed of an index beside it, and who else refers to
its values; polars keeps all in an object written in Rust. Nor does pickling a table of pandas: it writes
columns of a type together or apart, as they lie in memory, and reading rows may lay them out anew.

Texts are described one by one, as they may be paths of files. This module imports neither library: a handler
runs only for an object of theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.determinism.fingerprint.describe import Describer, Handler, by_parts, by_pickle

__all__ = ["OF_DATA_FRAMES"]


def _table_of_pandas(to: Describer, table: Any) -> None:
    """Describe a ``DataFrame`` or ``Series``: its axes, columns, and what it holds besides."""
    to.put(b"W")
    columns = [table] if table.ndim == 1 else [column for _, column in table.items()]
    besides = {name: part for name, part in table.__getstate__().items() if name != "_mgr"}
    to.add(type(table), *table.axes, besides)
    to.count(len(columns))
    # to_numpy() of one that is no array of numpy's would make new objects of it.
    to.add(*(column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array for column in columns))


def _texts_of_pandas(to: Describer, array: Any) -> None:
    to.put(b"T")
    to.add(type(array), str(array.dtype))
    to.elements(array.tolist())


def _column_of_polars(to: Describer, column: Any) -> None:
    to.put(b"O")
    if str(column.dtype) == "String":
        to.add(type(column), column.name)
        to.elements(column.to_list())
    else:
        by_pickle(to, column)


def _of_pandas_or_polars(to: Describer, value: Any) -> None:
    to.put(b"Z")
    to.add(type(value))
    by_pickle(to, value, without="_cache")  # of properties, as pandas reads them


OF_DATA_FRAMES: dict[type | str, Handler] = {
    **dict.fromkeys(("pandas.*", "polars.*"), _of_pandas_or_polars),
    **dict.fromkeys(("pandas.DataFrame", "pandas.Series"), _table_of_pandas),
    # The same before version 3.
    **dict.fromkeys(("pandas.core.frame.DataFrame", "pandas.core.series.Series"), _table_of_pandas),
    "pandas.core.arrays.string_.BaseStringArray": _texts_of_pandas,
    "polars.dataframe.frame.DataFrame": by_parts(b"V", lambda table: (type(table), table.get_columns())),
    "polars.series.series.Series": _column_of_polars,
}
