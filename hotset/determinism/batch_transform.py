"""A transform that takes the rows of a batch together, as the `datasets` of Hugging Face call theirs.

After ``dataset.with_transform(fn)``, `datasets` calls ``fn`` with a dict of lists, once for each access: with
the rows of a batch (``__getitems__``), or with a single row as a batch of one (``__getitem__``). ``fn`` may
draw once for a batch, or pad to its longest row. So hotset calls it as often as `datasets` does, with the
same rows.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

__all__ = ["BatchTransform", "TakesBatches"]

Row = dict[str, Any]


class TakesBatches:
    """A transform that takes several samples together, around a function of the user's.

    Attributes:
        transform: the function. What is declared or known of it holds for the transform.
    """

    transform: Callable[..., Any]


class BatchTransform(TakesBatches):
    """Applies the format transform of a Hugging Face dataset to its rows, as that dataset does.

    Args:
        transform: the user's function.
        columns: the columns that the function gets; None for all.
        keeps_others: whether the other columns are part of the result, too.

    Example:
        >>> double = BatchTransform(lambda batch: {"x": [2 * x for x in batch["x"]]})
        >>> double({"x": 1}), double.many([{"x": 1}, {"x": 2}])
        ({'x': 2}, [{'x': 2}, {'x': 4}])
    """

    def __init__(
        self,
        transform: Callable[[dict[str, list[Any]]], Any],
        columns: Sequence[str] | None = None,
        *,
        keeps_others: bool = False,
    ) -> None:
        self.transform = transform
        self.columns = None if columns is None else tuple(columns)
        self.keeps_others = keeps_others
        self.batched = True  # whether the function gets the rows of a batch in one call; otherwise one by one

    def __call__(self, row: Row) -> Any:
        """The result for one row."""
        batch = self.transform(self._batch([row]))
        try:
            made = {name: column[0] for name, column in batch.items()}
        except Exception as error:
            raise TypeError(
                "Custom formatting function must return a dict of sequences to be able to pick a row, but "
                f"got {batch}"
            ) from error
        return made | {name: row[name] for name in self._others(row)}

    def many(self, rows: Sequence[Row]) -> list[Any]:
        """The results for the rows of a batch, in order."""
        if not self.batched or not rows:
            return [self(row) for row in rows]
        batch = self.transform(self._batch(rows))
        others = self._others(rows[0])
        if others:
            if not isinstance(batch, MutableMapping):
                raise TypeError(
                    "Custom formatting function must return a dict to work with output_all_columns=True, but "
                    f"got {batch}"
                )
            batch.update({name: [row[name] for row in rows] for name in others})
        count = len(batch[next(iter(batch))])
        return [{name: column[place] for name, column in batch.items()} for place in range(count)]

    def _batch(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        names = [name for name in rows[0] if self.columns is None or name in self.columns]
        return {name: [row[name] for row in rows] for name in names}

    def _others(self, row: Row) -> list[str]:
        if not self.keeps_others or self.columns is None:
            return []
        return [name for name in row if name not in self.columns]
