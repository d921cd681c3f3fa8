"""The places near a dataset and its transforms in which a reading may leave a generator, as they were.

Many datasets make a generator when they first need it: ``if self.rng is None: self.rng = ...``. A reading
that makes one and draws from it leaves a state behind, and the one in which the generator began cannot be
known. So the places get back what they had: None, or nothing, and with it what else they had noted of that
(``self.is_ready = False``), or the generator that was there before (``self.rng = default_rng(worker)``). Only
generators and values of simple types are kept, so that nothing large stays alive.

==================================================  ======================================================
place                                               such as
==================================================  ======================================================
the attributes of a near object                     ``self.rng``, ``self.augments[2].rng``
the elements of a small list or dict in a place     ``self.rngs[worker]``
attributes of the user's classes                    ``cls._rng``
globals and enclosing names that are None, hold a   ``global RNG``
container, or are bound by the user's functions
what ``functools.lru_cache`` keeps, if it is few    ``@lru_cache`` over ``def rng(): ...``
a ``threading.local`` of a module, in this thread   ``LOCAL.rng``
==================================================  ======================================================

That is noted with every few samples that are read. So :mod:`hotset.determinism.objects.names` does not do it:
it keeps all values, and looks at what they hold, for readings that are rare.
"""

from __future__ import annotations

import threading
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from hotset.determinism.objects.code_dependencies import (
    bound_by,
    installed,
    is_users,
    loaded_globals,
    names_in,
)
from hotset.determinism.objects.memos import MEMO, kept_by, memo_of
from hotset.determinism.objects.object_graph import (
    attributes,
    parts_of_chains,
    reached_by_code,
    within_reach,
)
from hotset.determinism.objects.safe_access import (
    UNSET,
    attributes_of,
    content_of_cell,
    dict_of,
    is_opaque,
    set_attribute,
)
from hotset.store.leaves.instances import slots_of

__all__ = ["NearAttributes", "Noted", "near_objects", "put_back"]

_NEAR, _LEVELS = 64, 3
_MOST = 32  # classes; functions
_SMALL = 32  # elements of a container that are looked at
# By id: a class of the user's may have no hash.
_DICTS = frozenset(map(id, (dict, OrderedDict, defaultdict)))
_SIMPLE = frozenset(map(id, (type(None), bool, int, float, str, bytes)))
_CONTAINERS = _DICTS | {id(list)}
_PASSIVE = _SIMPLE | set(map(id, (tuple, range, complex, torch.Tensor, np.ndarray)))
_OTHER = object()  # in place of a value that is not kept

Noted = list[tuple["_Place", dict[Any, Any]]]
"""Places, each with what its names stood for."""


class _Place:
    """Where a reading may leave a generator: names, and what they stand for."""

    def now(self) -> Mapping[Any, Any]:
        """What the names stand for now."""
        raise NotImplementedError

    def put(self, name: Any, value: Any = UNSET) -> None:
        """Have a name stand for a value again, or for nothing."""
        raise NotImplementedError

    def noted(self, kinds: Set[int]) -> dict[Any, Any]:
        """What the names stand for now, where it is of one of these kinds, by id."""
        return {name: value if id(type(value)) in kinds else _OTHER for name, value in self.now().items()}

    def keeps(self, value: Any) -> bool:
        """Whether a value that was noted is put back."""
        return True

    def kinds(self) -> Any:
        """What changes if a generator is made here."""
        return tuple(map(type, self.now().values()))


class _Object(_Place):
    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._has_slots = bool(slots_of(owner))

    def now(self) -> Mapping[Any, Any]:
        return (attributes_of(self.owner) or {}) if self._has_slots else vars(self.owner)

    def put(self, name: Any, value: Any = UNSET) -> None:
        set_attribute(self.owner, name, value)


class _Class(_Place):
    def __init__(self, owner: type) -> None:
        self.owner = owner

    def now(self) -> Mapping[Any, Any]:
        return vars(self.owner)

    def put(self, name: Any, value: Any = UNSET) -> None:
        type.__delattr__(self.owner, name) if value is UNSET else type.__setattr__(self.owner, name, value)

    def noted(self, kinds: Set[int]) -> dict[Any, Any]:
        return dict(vars(self.owner))  # a class has many, and seldom sets any

    def keeps(self, value: Any) -> bool:
        return id(type(value)) in _SIMPLE


class _Globals(_Place):
    def __init__(self, owner: dict[str, Any], names: Iterable[str]) -> None:
        self.owner, self._names = owner, sorted(names)

    def now(self) -> Mapping[Any, Any]:
        return {name: self.owner[name] for name in self._names if name in self.owner}

    def put(self, name: Any, value: Any = UNSET) -> None:
        self.owner.pop(name) if value is UNSET else self.owner.update({name: value})


class _Cells(_Place):
    def __init__(self, owner: types.FunctionType) -> None:
        self.owner = owner
        self._cells = dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))

    def now(self) -> Mapping[Any, Any]:
        contents = {name: content_of_cell(cell) for name, cell in self._cells.items()}
        return {name: content for name, content in contents.items() if content is not UNSET}

    def put(self, name: Any, value: Any = UNSET) -> None:
        if value is UNSET:
            del self._cells[name].cell_contents
        else:
            self._cells[name].cell_contents = value


class _Elements(_Place):
    """The elements of the list or dict that a name of another place stands for, if they are few.

    Numbers, texts, arrays and tensors among them do not count, nor does another element of a type that there
    was before, unless it is a generator: a list may have other elements for each sample.
    """

    def __init__(self, parent: _Place, name: Any, generators: tuple[type, ...]) -> None:
        self._parent, self._name, self._generators = parent, name, generators
        self._types: dict[int, type] = {}  # that there were; they keep their ids

    def now(self) -> Mapping[Any, Any]:
        held: Any = self._parent.now().get(self._name)
        if id(type(held)) in _DICTS and len(held) <= _SMALL:
            return dict(held)
        return dict(enumerate(held)) if type(held) is list and len(held) <= _SMALL else {}

    def put(self, name: Any, value: Any = UNSET) -> None:
        held: Any = self._parent.now().get(self._name)
        if type(held) is list and name >= len(held):
            return
        if value is UNSET:
            del held[name]
        else:
            held[name] = value

    def kinds(self) -> Any:
        return self._kinds_of(self.now().values())

    def _kinds_of(self, values: Iterable[Any]) -> tuple[int, int]:
        found = [kind for kind in map(type, values) if id(kind) not in _PASSIVE]
        if not found:
            return len(self._types), 0
        self._types.update((id(kind), kind) for kind in found)
        return len(self._types), sum(issubclass(kind, self._generators) for kind in found)


class _Memo(_Elements):
    """What ``functools.lru_cache`` keeps, if it is little. It cannot be taken away one by one."""

    def __init__(self, memo: Any, generators: tuple[type, ...]) -> None:
        super().__init__(self, None, generators)
        self._memo = memo

    def now(self) -> Mapping[Any, Any]:
        return dict(enumerate(kept_by(self._memo, _SMALL)))

    def put(self, name: Any, value: Any = UNSET) -> None:
        if value is UNSET and name == 0:  # it was empty
            self._memo.cache_clear()


class NearAttributes:
    """Notes what the places that are near hold.

    Args:
        holders: the dataset, its transforms.
        kinds: the classes of generators.

    Example:
        >>> import random
        >>> holder = types.SimpleNamespace(rng=None, is_ready=False)
        >>> near = NearAttributes([holder], (random.Random,))
        >>> holder.rng, holder.is_ready = random.Random(1), True
        >>> near.have_other_types, near.have_new
        (True, True)
        >>> put_back(near.noted)
        >>> holder
        namespace(rng=None, is_ready=False)
    """

    def __init__(self, holders: Sequence[object], kinds: tuple[type, ...]) -> None:
        self._holders, self._kinds = holders, kinds
        self._outer = list(_outer_places(holders, kinds))
        self.look()

    def look(self) -> None:
        """Find the objects that are near now, and note what all places hold."""
        places = [*map(_Object, near_objects(self._holders)), *self._outer]
        self._places = [*places, *(part for each in places for part in self._containers_in(each))]
        self._types = self._types_now()
        self._find_generators()
        self.note()

    def _find_generators(self) -> None:
        self._generators = [
            (place, name, value)
            for place in self._places
            for name, value in list(place.now().items())
            if issubclass(type(value), self._kinds)
        ]
        self._kept_kinds = _SIMPLE | {id(type(generator)) for *_, generator in self._generators}

    @property
    def generators(self) -> list[Any]:
        """The generators that stood in the places when these were looked at last."""
        return [generator for *_, generator in self._generators]

    def replaced(self) -> list[tuple[Any, Any]]:
        """Each generator in whose place there is another one now, and that one; then they are known."""
        pairs = [(known, place.now().get(name)) for place, name, known in self._generators]
        found = [(known, now) for known, now in pairs if now is not known]
        if found:
            self._find_generators()
        return [(known, now) for known, now in found if issubclass(type(now), self._kinds)]

    def _containers_in(self, place: _Place) -> Iterator[_Place]:
        if isinstance(place, _Memo) or not self._is_looked_into(place):
            return
        for name, value in list(place.now().items()):
            if id(type(value)) in _CONTAINERS and not (type(name) is str and name.startswith("__")):
                yield _Elements(place, name, self._kinds)

    def _is_looked_into(self, place: _Place) -> bool:
        """Whether its containers are places: a module of torch has many that it makes itself."""
        if not isinstance(place, _Object) or type(place.owner) is types.FunctionType:
            return True
        return any(place.owner is each for each in parts_of_chains(self._holders)) or (
            not is_opaque(place.owner) and is_users(place.owner)
        )

    def note(self) -> None:
        """From here on, compare with what the places hold now."""
        self.noted: Noted = [(each, each.noted(self._kept_kinds)) for each in self._places]

    def all_now(self) -> Noted:
        """What all places hold now."""
        return [(each, dict(each.now())) for each in self._places]

    @property
    def have_other_types(self) -> bool:
        """Whether something has another type than at the last look: a generator may have been made."""
        return self._types_now() != self._types

    def _types_now(self) -> list[Any]:
        return [each.kinds() for each in self._places]

    @property
    def have_new(self) -> bool:
        """Whether a name that stood for None or nothing leads to a generator now."""
        return any(
            value is not None and noted.get(name) is None and any(within_reach([value], self._kinds))
            for place, noted in self.noted
            for name, value in list(place.now().items())
        )


def put_back(noted: Noted, *, all_kinds: bool = False) -> None:
    """Have names stand for what was noted, and take away what was not there.

    Args:
        all_kinds: also for values of other types than the simple ones and generators.
    """
    for place, values in noted:  # never without a name in between: an interrupt may come
        now = place.now()
        others = [(name, value) for name, value in values.items() if value is not now.get(name, UNSET)]
        for name, value in others:
            if value is not _OTHER and (all_kinds or place.keeps(value)):
                place.put(name, value)
        for name in reversed([name for name in place.now() if name not in values]):
            place.put(name)


def _has_attributes(obj: object) -> bool:
    if type(dict_of(obj)) is dict:
        return not issubclass(type(obj), types.ModuleType)
    # Where hotset has slots and no dict, what looks through a dataset must not find the store.
    return bool(slots_of(obj)) and not str(type(obj).__module__).startswith("hotset.")


def near_objects(holders: Iterable[object]) -> Iterator[object]:
    """The holders, and the objects with attributes that they hold, two levels down; at most 64 in all.

    What a small list, tuple or dict holds counts as held by who holds that; it comes after what is held
    itself.
    """
    level = list(parts_of_chains(holders))
    seen: dict[int, object] = {}
    for _ in range(_LEVELS):
        level = [each for each in level if _has_attributes(each) and id(each) not in seen]
        for each in level[: _NEAR - len(seen)]:
            seen[id(each)] = each
            yield each
        values = [value for each in level[:_NEAR] for value in attributes(each).values()]
        level = [*values, *(part for value in values for part in _parts(value, _LEVELS))]


def _parts(value: Any, levels: int) -> Iterator[Any]:
    """The elements of a small container, and of containers in it."""
    if id(type(value)) not in _CONTAINERS | {id(tuple)} or len(value) > _SMALL or not levels:
        return
    for part in list(value.values() if id(type(value)) in _DICTS else value):
        if id(type(part)) not in _PASSIVE or type(part) is tuple:
            yield part
            yield from _parts(part, levels - 1)


def _outer_places(holders: Sequence[object], kinds: tuple[type, ...]) -> Iterator[_Place]:
    """The places outside of the holders that their code uses."""
    near = set(map(id, near_objects(holders)))
    reached = {id(each): each for holder in parts_of_chains(holders) for each in reached_by_code(holder)}
    named: dict[int, tuple[dict[str, Any], set[str]]] = {}
    others: dict[int, Any] = {}
    classes = [each for each in reached.values() if issubclass(type(each), type)]
    functions = [each for each in reached.values() if issubclass(type(each), types.FunctionType)]
    for function in functions[:_MOST]:
        if function.__closure__:
            yield _Cells(function)
        if function.__name__ in names_in(function.__code__):
            yield _Object(function)
        for held, name in _globals_in(function):
            value = held.get(name)
            if name in bound_by(function.__code__) or id(type(value)) in _CONTAINERS or value is None:
                named.setdefault(id(held), (held, set()))[1].add(name)
            elif type(value) is MEMO or issubclass(type(value), threading.local):
                others[id(value)] = value
    yield from (_Globals(*each) for each in named.values())
    for cls in classes[:_MOST]:
        yield _Class(cls)
        others.update((id(memo), memo) for memo in map(memo_of, list(vars(cls).values())) if memo is not None)
    yield from (_Memo(each, kinds) if type(each) is MEMO else _Object(each) for each in others.values())
    objects = [each for each in reached.values() if not issubclass(type(each), (type, types.FunctionType))]
    objects = [each for each in objects if id(each) not in near and _has_attributes(each)]
    yield from map(_Object, objects[:_NEAR])


def _globals_in(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """The globals of a function, and what it reads of modules of the user's: the namespace, and the name."""
    for name, *attributes_read in loaded_globals(function.__code__):
        yield function.__globals__, name
        module = function.__globals__.get(name)
        if attributes_read and type(module) is types.ModuleType and installed(module.__name__) is None:
            yield vars(module), attributes_read[0]
