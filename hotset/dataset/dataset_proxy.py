"""What a cached dataset and a cached stream have in common: each stands in for the user's dataset.

Attributes that such an object does not have itself are those of the dataset. They can be set: that sets them
on the dataset, and what is cached of it is made anew, as its samples may be others now. So it is after one of
the dataset's methods was called that set an attribute (``cached.close_mosaic()``): where a method is looked
up, the attributes are held, and at the next use compared.

What it has itself lies in one dict (:class:`Own`), and pickles, but for what compares identities: the
snapshot of the transforms and the copied attributes, which are made again of the unpickled dataset, and the
held attributes.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import Dataset

from hotset.dataset.arguments import CacheArguments
from hotset.dataset.held_attributes import HeldAttributes
from hotset.dataset.transform_attributes import Snapshot
from hotset.determinism.objects.safe_access import has

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DatasetProxy", "Own"]

_OF_PROCESS = ("_snapshot", "_held", "_changed", "_copied", "_pass", "_watch")

T = TypeVar("T")
V = TypeVar("V")


class Own(Generic[V]):
    """An attribute of a cached dataset, kept in the dict ``_own`` of its ``__dict__``.

    MONAI's loader seeds random transforms by walking through all attributes of a dataset, and of what these
    hold, each with the next seed. It does not look into dicts: so it finds the user's dataset alone, and
    seeds what it would seed without a cache.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type) -> V:
        try:
            return holder.__dict__["_own"][self._name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, holder: Any, value: V) -> None:
        holder.__dict__.setdefault("_own", {})[self._name] = value


class DatasetProxy(Dataset[T], Generic[T]):
    """An object in place of the user's dataset."""

    _dataset: Any
    _arguments = Own[CacheArguments]()
    _snapshot = Own[Snapshot]()
    _held = Own["HeldAttributes | None"]()  # since a method was looked up
    _changed = Own["str | None"]()  # the attribute that a method has set
    _epoch = Own[int]()

    def __init__(self, dataset: Any, arguments: CacheArguments) -> None:
        self._dataset = dataset
        self._arguments = arguments
        self._epoch = 0
        self._take_snapshot()

    @property
    def dataset(self) -> Any:
        return self._dataset

    @property
    def epoch(self) -> int:
        return self._epoch

    def _take_snapshot(self) -> None:
        """Compare with the transforms and attributes that the dataset has now."""
        self._snapshot = Snapshot(self._dataset, self._arguments.transform)
        self._held = self._changed = None

    def _set_by_method(self) -> str | None:
        """The attribute that one of the dataset's methods has set, as far as it was looked up here."""
        if self._held is not None:
            held, self._held = self._held, None
            self._changed = self._changed or held.changed()
        return self._changed

    def _attribute_was_set(self, name: str) -> None:
        """Make anew what is cached, as this attribute of the dataset was set."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._dataset, name)
        if self._held is None and inspect.ismethod(value) and value.__self__ is self._dataset:
            self._held = HeldAttributes(self._dataset)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = any(isinstance(vars(cls).get(name), Own) for cls in type(self).__mro__)
        if own or name == "_dataset" or name.startswith("__"):
            object.__setattr__(self, name, value)
            return
        if hasattr(type(self), name):
            by_call = name == "epoch" and has(self._dataset, "set_epoch")
            raise AttributeError(
                f"{name!r} is an attribute of {type(self).__name__} itself and cannot be set; "
                + ("call set_epoch()." if by_call else f"set the dataset's own: `.dataset.{name} = ...`.")
            )
        setattr(self._dataset, name, value)
        self._attribute_was_set(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._dataset!r})"

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__["_own"].items() if name not in _OF_PROCESS}
        return {**self.__dict__, "_own": own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _own=dict(state["_own"]))
        self._take_snapshot()
