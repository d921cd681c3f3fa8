"""What a cached dataset and a cached stream have in common: each stands in for the user's dataset.

Attributes that such an object does not have itself are those of the dataset. They can be set: that sets them
on the dataset, and what is cached of it is made anew, as its samples may be others now. So it is after one of
the dataset's methods was called that set an attribute (``cached.close_mosaic()``), which
:class:`~hotset.dataset.changes.SetSince` notices.

What it has itself, besides what is documented, has names that begin with ``_hotset``: the user's dataset may
have any other (``_epoch``, ``_samples``). It lies in slots. MONAI's loader seeds random transforms by walking
through the ``__dict__`` of a dataset, and of what that holds, each with the next seed: so it finds the user's
dataset alone, and seeds what it would seed without a cache.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import Dataset

from hotset.dataset.arguments import CacheArguments
from hotset.dataset.changes import SetSince

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DatasetProxy"]

T = TypeVar("T")


class DatasetProxy(Dataset[T], Generic[T]):
    """An object in place of the user's dataset."""

    __slots__ = ("_hotset_arguments", "_hotset_set_since")
    _hotset_arguments: CacheArguments
    _hotset_set_since: SetSince

    def __init__(self, dataset: Any, arguments: CacheArguments) -> None:
        self.__dict__["dataset"] = dataset
        self._hotset_arguments = arguments
        self._hotset_set_since = SetSince(dataset, arguments.transform)

    @property
    def dataset(self) -> Any:
        return self.__dict__["dataset"]

    def _hotset_attribute_was_set(self, name: str) -> None:
        """Make anew what is cached, as this attribute of the dataset was set."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_hotset")) or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.dataset, name)
        if inspect.ismethod(value) and value.__self__ is self.dataset:
            self._hotset_set_since.method_was_looked_up()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(("__", "_hotset")):
            object.__setattr__(self, name, value)
            return
        if hasattr(type(self), name):
            raise AttributeError(
                f"{name!r} is an attribute of {type(self).__name__} itself and cannot be set; set the "
                f"dataset's own: `.dataset.{name} = ...`."
            )
        setattr(self.dataset, name, value)
        self._hotset_attribute_was_set(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r})"
