"""Batches as trees: what is changed in them is their tensors, and nothing else, in trees of every make."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import pytest
import torch
from helpers import difference, equal_batches
from hypothesis import given
from hypothesis import strategies as st
from samples import FrozenRecord, Loose, Opaque, Pair, Record, SlottedRecord
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate

from hotset.device.trees import call, map_tensors, others, signature_of, tensors_of
from hotset.device.trees import difference as difference_in_words


class Fields(MutableMapping[str, Any]):
    """A mapping of the user's, that keeps its values in a dict of its own, and something beside them."""

    def __init__(self, note: str = "none") -> None:
        self.kept: dict[str, Any] = {}
        self.note = note

    def __getitem__(self, key: str) -> Any:
        return self.kept[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.kept[key] = value

    def __delitem__(self, key: str) -> None:
        del self.kept[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


class Sealed(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.kept = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self.kept[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


class Peculiar(Sealed):
    """One that cannot be made of its values alone."""

    def __init__(self, *, image: Any) -> None:
        super().__init__({"image": image})


class Output(OrderedDict[str, Any]):
    """As model libraries have them: no update(), and its values are attributes too."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("not to be updated")

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Noted(list[Any]):
    """A list that is not made of its elements alone."""

    def __init__(self, note: str, elements: list[Any]) -> None:
        super().__init__(elements)
        self.note = note


class Row(tuple[Any, ...]):
    pass


def fields(values: dict[str, Any]) -> Fields:
    made = Fields("of a test")
    made.kept.update(values)
    return made


def output(values: dict[str, Any]) -> Output:
    made = Output()
    for key, value in values.items():
        made[key] = value
    return made


TENSORS = st.builds(
    lambda shape, dtype, start: (torch.arange(24) + start)[: shape[0] * shape[1]].view(shape).to(dtype),
    st.tuples(st.integers(0, 4), st.integers(1, 3)),
    st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.bool]),
    st.integers(0, 9),
)
OTHERS = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3), st.just({1, 2}))
KEYS = st.text("abc", min_size=1, max_size=2)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(Row),
        st.lists(inner, max_size=3).map(lambda parts: Noted("a note", parts)),
        named,
        named.map(OrderedDict),
        named.map(UserDict),
        named.map(fields),
        named.map(Sealed),
        named.map(output),
        named.map(lambda values: defaultdict(list, values)),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
        st.tuples(inner, inner).map(lambda two: Loose(*two)),
        st.tuples(inner, inner).map(lambda two: Record(*two)),
        st.tuples(inner, inner).map(lambda two: FrozenRecord(*two)),
        st.tuples(inner, inner).map(lambda two: SlottedRecord(*two)),
    )


TREES = st.recursive(st.one_of(TENSORS, OTHERS), containers, max_leaves=8)


def parts(node: Any) -> list[Any] | None:
    if isinstance(node, Mapping):
        return list(node.values())
    if isinstance(node, (list, tuple)):
        return list(node)
    if dataclasses.is_dataclass(node):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    return None


def leaves(node: Any) -> list[Any]:
    inside = parts(node)
    return [node] if inside is None else [leaf for part in inside for leaf in leaves(part)]


def containers_of(node: Any) -> list[Any]:
    inside = parts(node)
    return [] if inside is None else [node, *(one for part in inside for one in containers_of(part))]


@given(TREES)
def test_each_tensor_is_changed_where_it_is_and_nothing_else(tree: Any) -> None:
    before = leaves(tree)
    changed = map_tensors(lambda tensor: tensor.to(torch.float64) + 1, tree)
    assert all(a is b for a, b in zip(before, leaves(tree), strict=True)), "the batch itself was changed"
    for old, new in zip(before, leaves(changed), strict=True):
        if isinstance(old, torch.Tensor):
            equal_batches(new, old.to(torch.float64) + 1)
        else:
            assert new is old
    made, given_ = containers_of(changed), containers_of(tree)
    assert [type(one) for one in made] == [type(one) for one in given_]
    for one, other in zip(made, given_, strict=True):
        if isinstance(one, Mapping):
            assert list(one) == list(other)
        assert getattr(one, "note", None) == getattr(other, "note", None)
        if isinstance(one, Output):
            assert all(getattr(one, key) is one[key] for key in one)


@given(TREES)
def test_unchanged_tensors_give_an_equal_batch(tree: Any) -> None:
    assert difference(map_tensors(lambda tensor: tensor, tree), tree) is None


@given(TREES)
def test_tensors_and_the_rest_are_the_leaves_in_order(tree: Any) -> None:
    found = leaves(tree)
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    assert all(a is b for a, b in zip(tensors_of(tree), tensors, strict=True))
    rest = [leaf for leaf in found if not isinstance(leaf, torch.Tensor)]
    assert all(a is b for (_, a), b in zip(others(tree), rest, strict=True))
    signature = signature_of(tree)
    assert [(one.shape, one.dtype) for one in signature] == [(tuple(t.shape), t.dtype) for t in tensors]
    places = [one.place for one in signature] + [place for place, _ in others(tree)]
    assert len(set(places)) == len(found), "two leaves have one place"
    assert difference_in_words(signature, tree) is None


def test_places_are_written_as_python_reaches_them() -> None:
    tensor = torch.zeros(2, 3)
    batch = {"x": [Record(tensor, 1, "r"), Pair(tensor, "s")], 7: FrozenRecord(tensor, None)}
    places = [one.place for one in signature_of(batch)]
    assert places == ["['x'][0].image", "['x'][1][0]", "[7].image"]
    for place in places:
        assert eval("batch" + place, {"batch": batch}) is tensor
    assert others(batch) == [
        ("['x'][0].label", 1),
        ("['x'][0].name", "r"),
        ("['x'][1][1]", "s"),
        ("[7].label", None),
    ]


def test_a_mapping_that_cannot_be_made_again_comes_as_a_dict() -> None:
    changed = map_tensors(torch.neg, Peculiar(image=torch.ones(1)))
    assert type(changed) is dict
    equal_batches(changed, {"image": -torch.ones(1)})


def test_a_counter_keeps_its_counts() -> None:
    counts = Counter(a=2, b=3)
    assert map_tensors(torch.neg, [torch.ones(1), counts])[1] == counts


@pytest.mark.parametrize(
    "leaf",
    [Opaque(3), deque([torch.ones(1)]), "text", range(3), {1}, Record],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_container_of_batches_is_a_leaf(leaf: Any) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a tensor was found in a leaf")

    assert map_tensors(refuse, (leaf,))[0] is leaf
    assert tensors_of(leaf) == []
    assert others(leaf) == [("", leaf)]


def test_torchs_own_results_keep_their_type() -> None:
    found = torch.ones(2, 3).max(dim=1)
    changed = map_tensors(torch.neg, found)
    assert type(changed) is type(found)
    assert changed.values.tolist() == [-1.0, -1.0]


def test_collated_samples_of_every_make_come_through() -> None:
    samples = [
        {"pair": Pair(torch.full((2,), i), i), "ordered": OrderedDict(b=[i / 3, torch.tensor(i)], a=str(i))}
        for i in range(3)
    ]
    batch = default_collate(samples)
    equal_batches(map_tensors(torch.clone, batch), batch)


EXPECTED = signature_of({"x": torch.zeros(4, 3), "y": torch.zeros(4, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("x", "y", "shorter", "words"),
    [
        (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), False, None),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), True, None),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), False, "at ['x'] it is torch.float32 (2, 3)"),
        (torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64), True, "at ['x'] it is torch.float32 (5, 3)"),
        (torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), True, "at ['x'] it is torch.float32 (2, 2)"),
        (torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64), True, "at ['y'] it is torch.int64 (4, 1)"),
        (torch.zeros(4, 3), torch.zeros(2), True, "at ['y'] it is torch.float32 (2,)"),
        (torch.zeros(4, 3), torch.tensor(1), True, "at ['y'] it is torch.int64 ()"),
        (torch.zeros(4, 3), 7, True, "it has 1 tensors, not 2"),
    ],
)
def test_differences_are_said_in_words(x: Any, y: Any, shorter: bool, words: str | None) -> None:
    found = difference_in_words(EXPECTED, {"x": x, "y": y}, shorter=shorter)
    assert found is None if words is None else found is not None and found.startswith(words)


def test_a_step_takes_a_sequences_elements_and_anything_else_whole() -> None:
    def step(*arguments: Any) -> Any:
        return arguments

    assert call(step, [1, 2]) == (1, 2)
    assert call(step, Pair(1, 2)) == (1, 2)
    assert call(step, {"a": 1}) == ({"a": 1},)
    record = Record(1, 2)
    assert call(step, record) == (record,)


def test_the_sizes_in_a_packed_sequence_stay_on_the_host() -> None:
    """As ``PackedSequence.to`` leaves them: recurrent networks want them there."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = map_tensors(lambda tensor: tensor.to("meta"), {"x": packed})["x"]
    assert type(moved) is PackedSequence
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes is packed.batch_sizes
    shuffled = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    assert [place for place, _ in others([shuffled])] == ["[0].batch_sizes"]
    assert len(tensors_of(shuffled)) == 3
    cloned = map_tensors(torch.clone, shuffled)
    assert all(map(torch.equal, cloned, shuffled))
