"""What a cached dataset and a cached stream have in common: each stands in for the user's dataset.

Attributes that such an object does not have itself are those of the dataset. They can be set and deleted:
that does so on the dataset, and what is cached of it is made anew, as its samples may be others now. So it is
after one of the dataset's methods was called that set an attribute (``cached.close_mosaic()``), which
:class:`~hotset.dataset.changes.SetSince` notices.

What it has itself, besides what is documented, has names that begin with ``_hotset``: the user's dataset may
have any other (``_epoch``, ``_samples``). It lies in slots, and ``__dict__`` is the dataset's: programs look
into that (``vars(cached)``), set what is in it, and copy from it. MONAI's loader walks through it to seed
random transforms, each with the next seed, and so seeds what it would seed without a cache.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import Dataset

from hotset.dataset.arguments import CacheArguments
from hotset.dataset.changes import SetSince
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.special_methods import NOT_FORWARDED, NotSettable
from hotset.store.leaves.instances import slots_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DatasetProxy", "current_of"]

T = TypeVar("T")


class DatasetProxy(Dataset[T], Generic[T], metaclass=NotSettable):
    """An object in place of the user's dataset."""

    __slots__ = ("_hotset_arguments", "_hotset_dataset", "_hotset_set_since")
    _hotset_arguments: CacheArguments
    _hotset_dataset: Any
    _hotset_set_since: SetSince

    def __init__(self, dataset: Any, arguments: CacheArguments) -> None:
        self._hotset_dataset, self._hotset_arguments = dataset, arguments
        self._hotset_set_since = SetSince(dataset, arguments.transform)

    @property
    def dataset(self) -> Any:
        return self._hotset_dataset

    @property
    def __dict__(self) -> dict[str, Any]:
        return self._hotset_dataset.__dict__  # type: ignore[no-any-return]

    @__dict__.setter
    def __dict__(self, held: dict[str, Any]) -> None:
        self._hotset_dataset.__dict__ = held
        self._hotset_attribute_was_set("__dict__")

    @property
    def _hotset_stands_in(self) -> bool:
        """Whether ``isinstance`` finds the dataset's class."""
        return False

    @property
    def _hotset_access(self) -> SampleAccess:
        raise NotImplementedError

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
        own = name.startswith("_hotset") or name in NOT_FORWARDED
        if own or (name.startswith("__") and not self._hotset_stands_in):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        dataset = self._hotset_dataset
        value = getattr(dataset, name)
        if inspect.ismethod(value) and value.__self__ is dataset:
            self._hotset_set_since.method_was_looked_up()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_hotset") or name in ("__class__", "__dict__"):
            object.__setattr__(self, name, value)
            return
        self._hotset_require_the_datasets(name)
        setattr(self.dataset, name, value)
        self._hotset_attribute_was_set(name)

    def __delattr__(self, name: str) -> None:
        self._hotset_require_the_datasets(name)
        delattr(self.dataset, name)
        self._hotset_attribute_was_set(name)

    def _hotset_require_the_datasets(self, name: str) -> None:
        """Refuse to set or delete an attribute that this object has itself.

        Raises:
            AttributeError: it has it.
        """
        if hasattr(type(self), name):
            raise AttributeError(
                f"{name!r} is an attribute of {type(self).__name__} itself and cannot be set or deleted; use "
                f"the dataset's own, `.dataset.{name}`."
            )

    def __setitem__(self, index: Any, value: Any) -> None:
        self.dataset[index] = value
        self._hotset_set_since.elements_were_set()

    def __delitem__(self, index: Any) -> None:
        del self.dataset[index]
        self._hotset_set_since.elements_were_set()

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.dataset)})

    def __getstate__(self) -> Any:
        return None, {name: slot.__get__(self) for name, slot in slots_of(self).items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r})"


def current_of(cached: DatasetProxy[Any]) -> SampleAccess:
    """Return what reads the samples now, in this process: another object once they are cached anew.

    A function, as a public method would hide what the user's dataset has by that name.
    """
    return cached._hotset_access
