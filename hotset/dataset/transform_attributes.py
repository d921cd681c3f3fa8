"""The attributes in which datasets keep transforms, and how to replace these without changing the dataset.

====================  ===================================================================================
``transform``         of the picture, or of the whole item: torchvision's datasets, MONAI's ``Dataset``
``target_transform``  of the label
``transforms``        of both at once, called with two values (torchvision's detection datasets); if it only
                      holds the two others, as torchvision makes it from them, those are used
``_transforms``       the same, in DETR and torchvision's references; used if the dataset calls it
any other             that holds a transform or container which a library's structure gives away: LeRobot's
                      ``image_transforms``. Whether the dataset calls it shows when samples are read; a
                      ``torch.nn`` module may be a network, and does not count
====================  ===================================================================================

A list of transforms, which the dataset applies itself, is replaced by a list of one.

The attributes of what a ``Subset`` wraps are used, and of a ``ConcatDataset`` if all parts have equal chains.
The wrapped dataset of any other class with a chain of its own keeps its transforms.

The user can set all of these at any time. A :class:`Snapshot` tells whether that happened. Other attributes
that the user sets on the dataset reach the copy by :class:`CopiedAttributes`.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, Subset

from hotset.dataset.format_transform import format_of
from hotset.determinism.chain import is_list
from hotset.determinism.fingerprint.fingerprint import fingerprint
from hotset.determinism.libraries import torch_nn
from hotset.determinism.objects.held_values import same_value
from hotset.determinism.objects.safe_access import (
    UNSET,
    attributes_of,
    dict_of,
    length,
    set_attribute,
    values_of,
)
from hotset.determinism.verdict import library_of
from hotset.store.leaves.instances import solid_base

__all__ = [
    "TRANSFORM_NAMES",
    "CopiedAttributes",
    "Snapshot",
    "TransformAttribute",
    "called_with",
    "names_transforms",
    "owners_of_transforms",
    "transform_attributes_of",
    "with_transforms",
]

TRANSFORM_NAMES = ("transform", "target_transform", "transforms")
# Where containers of transforms hold their children: torchvision's, MONAI's, albumentations', torch.nn's.
_CONTAINED = ("transform", "target_transform", "transforms", "_modules")
_DEEPEST = 8
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_LIKELY = re.compile(r"[^_].*(transform|augment)s?|(transform|augment).*", re.IGNORECASE)


def names_transforms(name: str) -> bool:
    """Whether a public attribute of this name is likely to hold transforms.

    Example:
        >>> names_transforms("image_transforms"), names_transforms("root")
        (True, False)
    """
    return bool(_LIKELY.fullmatch(name))


class TransformAttribute(NamedTuple):
    """An attribute of a dataset that holds a chain."""

    name: str
    chain: Any


def transform_attributes_of(dataset: Any) -> tuple[TransformAttribute, ...]:
    """The attributes with transforms of a dataset, or of what a Subset or ConcatDataset wraps.

    Example:
        >>> import types
        >>> transform_attributes_of(types.SimpleNamespace(transform=len, other=min))
        (TransformAttribute(name='transform', chain=<built-in function len>),)
    """
    own = _own(dataset)
    if own:
        return own if _can_be_copied(dataset) else ()  # the chain is then a part of the dataset, as any code
    if isinstance(dataset, Subset):
        return transform_attributes_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = [transform_attributes_of(part) for part in dataset.datasets]
        return parts[0] if all(_equal(parts[0], part) for part in parts[1:]) else ()
    return ()


def with_transforms(dataset: Any, chains: Mapping[str, Any]) -> Any:
    """A shallow copy of a dataset, and of what it wraps, with other transforms.

    Args:
        chains: the new value of each attribute, by name; other attributes keep their values.
    """
    if not chains:
        return dataset
    twin = _shallow_copy(dataset)
    if not _own(dataset):
        if isinstance(dataset, Subset):
            _set(twin, "dataset", with_transforms(dataset.dataset, chains))
        else:
            _set(twin, "datasets", [with_transforms(part, chains) for part in dataset.datasets])
        return twin
    pair = _pair(dataset)
    if pair is not None:
        both = copy.copy(pair)
        for name in chains:
            setattr(both, name, chains[name])
        _set(twin, "transforms", both)
    for name, chain in chains.items():
        held = getattr(dataset, name)
        if name not in TRANSFORM_NAMES:
            set_attribute(twin, name, chain)
            continue
        _set(twin, name, type(held)([chain]) if is_list(held) else chain)
    return twin


def _shallow_copy(dataset: Any) -> Any:
    """A copy that has the dataset's attributes, even if the dataset refuses to be copied or pickled.

    Raises:
        Exception: what copying raises, if the dataset is more than its attributes.
    """
    kind = type(dataset)
    try:
        made = [copy.copy(dataset)]
        if made[0] is not dataset and type(made[0]) is kind:
            return _without_finalizer(made)
        refusal: Exception = TypeError(f"copy.copy of a {kind.__name__} must return another one")
    except Exception as error:  # of the dataset's __copy__, __reduce_ex__ or __getstate__
        refusal = error
    if solid_base(kind) is not object or any(vars(cls).get("__slots__") for cls in kind.__mro__):
        raise refusal
    made = [object.__new__(kind)]
    vars(made[0]).update(vars(dataset))
    return _without_finalizer(made)


class _Silent:
    """A base that keeps the ``__init_subclass__`` of the bases after it from running."""

    __slots__ = ()

    def __init_subclass__(cls) -> None: ...


def _derived(kind: Any, name: str, method: Callable[..., Any]) -> Any:
    """A class that has one method of its own, and whose objects are as large as those of its base.

    Neither the base nor its metaclass is told of it: some register all classes that derive from them.
    """
    order = {"mro": lambda cls: [cls, _Silent, *kind.__mro__]}
    meta: Any = type("Meta", (type(kind),), order)
    return type.__new__(meta, kind.__name__, (kind,), {"__slots__": (), name: method})


def called_with(chain: Any, change: Callable[[Any], Any]) -> Any:
    """A shallow copy of a chain that is of its class, for who asks, and is called with other values.

    Args:
        change: is given a tuple of values and a dict of keywords, and returns those to call the chain with.

    Raises:
        Exception: there is no such copy: a function has no class to derive from, for example.
    """
    twin, kind = _shallow_copy(chain), type(chain)

    def call(self: Any, *values: Any, **named: Any) -> Any:
        values, named = change((values, named))
        return kind.__call__(self, *values, **named)

    twin.__class__ = _derived(kind, "__call__", call)
    return twin


def _without_finalizer(made: list[Any]) -> Any:
    """Return the one object of this list, whose ``__del__`` will not run.

    A copy shares the files of the dataset, and would close them. Python calls the ``__del__`` of an object
    only once. So the copy's is called here, while it is of another class, whose ``__del__`` keeps it alive.
    """
    kind, new = type(made[0]), [object()]
    if not hasattr(kind, "__del__") or sys.getrefcount(made[0]) > sys.getrefcount(new[0]):
        return made[0]  # its class has none, or keeps the copy itself
    kept: list[Any] = []
    made[0].__class__ = _derived(kind, "__del__", lambda self: kept.append(self))
    made.clear()
    kept[0].__class__ = kind
    return kept[0]


def _can_be_copied(dataset: Any) -> bool:
    try:
        _shallow_copy(dataset)
    except Exception:
        return False
    return True


def _set(holder: Any, name: str, value: Any) -> None:
    """Set an attribute of a copy, even if its class guards them against being set."""
    try:
        setattr(holder, name, value)
    except Exception:  # of the dataset's __setattr__
        set_attribute(holder, name, value)


class CopiedAttributes:
    """Gives a copy that :func:`with_transforms` made the attributes that are set on the dataset later.

    Only what is set anew counts, by identity: a file that the copy has opened for itself stays.

    Args:
        twin: its copy, or the dataset itself.

    Example:
        >>> import types
        >>> dataset = types.SimpleNamespace(transform=len, size=1)
        >>> twin = with_transforms(dataset, {"transform": None})
        >>> copied = CopiedAttributes(dataset, twin)
        >>> dataset.size, dataset.transform = 2, min
        >>> copied.follow()
        >>> twin
        namespace(transform=None, size=2)
    """

    def __init__(self, dataset: Any, twin: Any) -> None:
        self._pairs = [
            (owner, other, dict(_attributes(owner)), _differing(_attributes(owner), _attributes(other)))
            for owner, other in zip(owners_of_transforms(dataset), owners_of_transforms(twin), strict=True)
            if owner is not other
        ]

    def follow(self) -> None:
        """Set on the copy what was set on the dataset since the last call, and delete what was deleted."""
        for owner, copied, held, differing in self._pairs:
            now = _attributes(owner)
            for name in held.keys() - now.keys():
                del held[name]
                if name in _attributes(copied):
                    set_attribute(copied, name)
            for name, value in now.items():
                if held.get(name, UNSET) is not value:
                    held[name] = value
                    if name not in differing:
                        set_attribute(copied, name, value)


def _attributes(owner: Any) -> dict[str, Any]:
    return attributes_of(owner) or {}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The names under which two dicts have other values. Equal numbers may be two objects after pickling."""
    names = one.keys() | other.keys()
    return {name for name in names if not same_value(one.get(name, UNSET), other.get(name, UNSET))}


class Snapshot:
    """The transforms that a dataset, and what it wraps, hold in this process.

    Attributes and the children of containers are compared by identity, which is cheap enough for each batch.
    A parameter that changes inside a transform is not noticed.

    Args:
        given: further transforms; the children of their containers are compared as well.

    Example:
        >>> import types
        >>> dataset = types.SimpleNamespace(transform=len)
        >>> held = Snapshot(dataset, ())
        >>> held.is_current()
        True
        >>> dataset.transform = min
        >>> held.is_current()
        False
    """

    def __init__(self, dataset: Any, given: Any) -> None:
        self._held: list[tuple[Any, str, Any]] = []
        self._formats: list[tuple[Any, Any]] = []
        self._children: list[tuple[Any, tuple[Any, ...]]] = []
        chains = [given]
        for owner in owners_of_transforms(dataset):
            if (shape := format_of(owner)) is not None:
                self._formats.append((owner, shape))
            # None may become a transform; what a dataset counts or makes for itself does not end a plan.
            held = _attributes(owner)
            empty = [name for name, value in held.items() if value is None and names_transforms(name)]
            others = (name for name, _ in _others(owner))
            for name in dict.fromkeys((*TRANSFORM_NAMES, *empty, *others)):
                self._held.append((owner, name, held.get(name, UNSET)))
                chains.append(held.get(name))
        for chain in chains:
            self._look_into(chain, 0)

    def _look_into(self, chain: Any, depth: int) -> None:
        if issubclass(type(chain), (list, tuple, dict)):
            children = tuple(values_of(chain))
            if not issubclass(type(chain), tuple):
                self._children.append((chain, children))
            for child in children:
                self._look_into(child, depth + 1)
        elif depth < _DEEPEST and callable(chain):
            held = _attributes(chain)
            for name in _CONTAINED:
                if name in held:
                    self._held.append((chain, name, held[name]))
                    self._look_into(held[name], depth + 1)

    def is_current(self) -> bool:
        """Whether the dataset still holds the same transforms."""
        last: tuple[Any, dict[str, Any]] = None, {}
        for owner, name, value in self._held:  # those of one owner follow each other
            if owner is not last[0]:
                last = owner, _attributes(owner)
            if last[1].get(name, UNSET) is not value:
                return False
        if any(format_of(owner) != held for owner, held in self._formats):
            return False
        for container, children in self._children:
            now = values_of(container)
            if len(now) != len(children) or not all(map(operator.is_, now, children)):
                return False
        return True


def owners_of_transforms(dataset: Any) -> list[Any]:
    """The objects whose attributes may hold transforms."""
    found = [dataset] if attributes_of(dataset) is not None else []
    if isinstance(dataset, Subset):
        found += owners_of_transforms(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        found += [owner for part in dataset.datasets for owner in owners_of_transforms(part)]
    return found


def _own(dataset: Any) -> tuple[TransformAttribute, ...]:
    names = ["transform", "target_transform"]
    if _held(dataset, "transforms") is not None and _pair(dataset) is None:
        names.append("transforms")
    named = [TransformAttribute(name, chain) for name in names if (chain := _held(dataset, name)) is not None]
    return (*named, *(TransformAttribute(name, chain) for name, chain in _others(dataset)))


def _others(dataset: Any) -> list[tuple[str, Any]]:
    """The attributes of other names that hold what a library's structure says is a transform."""
    return [
        (name, value)
        for name, value in list(_attributes(dataset).items())
        if name not in TRANSFORM_NAMES and not name.startswith("__")
        if _is_known(value) or (name == "_transforms" and callable(value))
    ]


def _is_known(value: Any) -> bool:
    if not callable(value) or issubclass(type(value), (type, *_FUNCTIONS)):
        return False
    try:
        library = library_of(value)
        if library is None or library is torch_nn:  # a module under another name may be any network
            return False
        return library.children_in_order(value) is not None or library.judge(value) is not None
    except Exception:  # half made, unbound, or not what its class says
        return False


def _held(dataset: Any, name: str) -> Any | None:
    """The chain in this attribute of the object itself, without a wrapper's ``__getattr__``."""
    value = _static(dataset, name)
    of_class = issubclass(type(value), (staticmethod, classmethod, property)) or inspect.isfunction(value)
    if of_class and name not in _attributes(dataset):
        return None  # a method called `transform` is not replaced
    return value if callable(value) or (_is_made_of_values(value) and length(value) > 0) else None


def _is_made_of_values(value: Any) -> bool:
    """Whether this is a list of transforms whose class makes another of a list: a named tuple's does not."""
    kind: Any = type(value)
    made = kind.__new__ in (list.__new__, tuple.__new__) and kind.__init__ in (list.__init__, tuple.__init__)
    return is_list(value) and made


def _pair(dataset: Any) -> Any | None:
    """torchvision's ``transforms``, if it only holds the dataset's two others."""
    pair = _static(dataset, "transforms")
    held = dict_of(pair) or {}
    same = all(
        name in held and held[name] is _static(dataset, name) for name in ("transform", "target_transform")
    )
    return pair if same else None


def _static(dataset: Any, name: str) -> Any | None:
    """What lies under this name, in a slot too; no code of the dataset's runs."""
    value = inspect.getattr_static(dataset, name, None)
    return _attributes(dataset).get(name) if type(value) is types.MemberDescriptorType else value


def _equal(one: tuple[TransformAttribute, ...], other: tuple[TransformAttribute, ...]) -> bool:
    if [attribute.name for attribute in one] != [attribute.name for attribute in other]:
        return False
    chains = [(a.chain, b.chain) for a, b in zip(one, other, strict=True)]
    return all(a is b or fingerprint(a).digest == fingerprint(b).digest for a, b in chains)
