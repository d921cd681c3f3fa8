"""Two pipelines have one fingerprint only if they give the same samples; it is the same in every process."""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import io
import itertools
import json
import logging
import math
import multiprocessing
import operator
import os
import pickle
import queue
import random
import re
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import often, rarely, rng_states
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from hotset.determinism.declare import deterministic
from hotset.determinism.fingerprint.data_files import Files
from hotset.determinism.fingerprint.fingerprint import Fingerprint, fingerprint
from hotset.determinism.objects import code_dependencies as codes
from hotset.determinism.objects.object_graph import within_reach


def of(source: object, *prefix: Callable[..., Any]) -> str:
    return fingerprint(source, prefix).digest


# ---- what the tests describe -----------------------------------------------------------------------------

SCALE = 3
TABLE = {"a": [1, 2], "b": {"c": (0.5, None)}}
NAMES = frozenset({"x", "yy", "zzz", "w"})


def helper(x: float) -> float:
    return x * SCALE


def uses_helper(x: float) -> Any:
    return [helper(value) for value in (x, len(NAMES), TABLE["a"][0])]  # type: ignore[index]


def ping(x: int) -> int:
    return pong(x) if x else 1


def pong(x: int) -> int:
    return ping(x - 1)


class Interpolation(enum.Enum):
    NEAREST = 0
    LINEAR = "linear"


class Flags(enum.Flag):
    A = 1
    B = 2


class Size(NamedTuple):
    height: int
    width: int = 3


@dataclasses.dataclass
class Config:
    size: Size
    mode: Interpolation
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Resize:
    unit = "px"

    def __init__(self, size: int, mode: Interpolation = Interpolation.LINEAR) -> None:
        self.size = size
        self.mode = mode
        self.rng = random.Random()

    def __call__(self, x: Any) -> Any:
        return [self.halve(x), self.size, self.unit]

    @staticmethod
    def halve(x: Any) -> Any:
        return x / 2

    @property
    def area(self) -> int:
        return self.size**2


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any = None) -> None:
        self.left = left
        if right is not None:
            self.right = right


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(2))
            self.layer.bias.zero_()

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class Times(torch.nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def scripted(factor: int) -> Any:
    with warnings.catch_warnings():  # torch calls it deprecated; people have it all the same
        warnings.simplefilter("ignore")
        return torch.jit.script(Times(factor))


class Words(list[str]):
    pass


def closure_over(value: Any) -> Callable[[Any], Any]:
    return lambda x: (x, value)


def ring() -> Any:
    one: dict[str, Any] = {"name": "one"}
    one["other"] = {"name": "other", "back": [one]}
    return one


def zoo() -> dict[str, Any]:
    """One object of every kind, made anew by each call."""
    words = [f"word{i}" for i in range(400)]
    return {
        "none": None,
        "numbers": [0, -1, 2**80, True, 1.5, -0.0, math.nan, 1j, ..., NotImplemented],
        "texts": ["", "näïve", "\ud800", b"", bytearray(b"ab"), memoryview(b"cd")],
        "containers": [(), [], {}, set(), collections.deque([1]), range(3), slice(1, None)],
        "set of tuples": {("a", 1), ("b", 2), ("c", None)},
        "set of objects": {Size(1, 2), Size(3, 4), Interpolation.LINEAR, helper, frozenset({"p", "q"})},
        "set of functions that call each other": {ping, pong, uses_helper},
        "large set": set(words),
        "large mapping": {word: (i, word) for i, word in enumerate(words)},
        "mapping with odd keys": {Size(1): 1, ("a", frozenset("xyz")): 2, None: 3, 1.5: 4},
        "column": [(word, i, i % 2 == 0) for i, word in enumerate(words)],
        "ragged column": [[word] * (i % 3) for i, word in enumerate(words)],
        "mappings column": [{"image": f"/no/{i}", "label": [i, {"deep": i / 2}]} for i in range(400)],
        "paths column": [Path(f"/no/{i}") for i in range(400)],
        "scalars column": [np.float32(i) for i in range(400)],
        "mixed column": [i if i % 2 else [i] for i in range(400)],
        "counter": collections.Counter("abca"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, a=[1]),
        "subclass": Words(["a", "b"]),
        "enums": [Interpolation.NEAREST, Flags.A | Flags.B, Interpolation],
        "dataclass": Config(Size(1, 2), Interpolation.LINEAR, {"k": {1, 2}}),
        "slots": [Slotted(1), Slotted(1, 2)],
        "paths": [
            Path("/no/where"),
            re.compile("a+", re.I),
            datetime.date(2020, 1, 2),
            decimal.Decimal("1.50"),
        ],
        "functions": [helper, uses_helper, closure_over([1, {"x"}]), lambda x: x + SCALE],
        "library": [len, math.sqrt, operator.itemgetter(1), np.add, torch.relu, json.loads, "a".join],
        "torch": [torch.float16, torch.device("cpu"), torch.Size([1, 2]), torch.strided, torch.ops.aten.add],
        "methods": [Resize(3).__call__, Resize.halve, Words.append, functools.partial(helper, x=3)],
        "cached": functools.lru_cache(maxsize=3)(helper),
        "object": Resize(224),
        "class": Resize,
        "arrays": [np.arange(6).reshape(2, 3), np.array(["a", "bb"]), np.array([1, "x", None], object)],
        "structured": np.array([(1, 2.0)], [("a", "u1"), ("b", "f8")]),
        "tensors": [torch.arange(6), torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.bfloat16)],
        "storage": torch.arange(3).untyped_storage(),
        "module": Net(),
        "script": scripted(2),
        "image": Image.new("P", (3, 2), 7),
        "datasets": Subset(TensorDataset(torch.arange(10)), [1, 2, 3]),
        "cycle": ring(),
        "generators": [np.random.default_rng(), torch.Generator(), np.random.RandomState()],
        "no identity": [threading.Lock(), threading.local(), queue.Queue(), logging.getLogger("x"), object()],
        "iterators": [iter([1, 2]), *([itertools.count(3)] if sys.version_info < (3, 14) else [])],
        "module object": [math, types, np],
    }


def print_digests() -> None:
    print(digests())


def digests() -> str:
    return json.dumps({name: of(value) for name, value in zoo().items()})


# ---- stability -------------------------------------------------------------------------------------------


def in_another_process(hash_seed: str) -> str:
    code = "import test_fingerprint; test_fingerprint.print_digests()"
    path = os.pathsep.join(str(folder) for folder in Path(__file__).parents[:2])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    return run.stdout.decode().strip()


def test_the_same_in_every_process_and_under_every_hash_seed() -> None:
    """This process has a seed of its own, or none."""
    assert digests() == in_another_process("1" if os.environ.get("PYTHONHASHSEED") != "1" else "2")


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support will be removed from itertools")
def test_the_same_for_an_equal_object_and_another_for_every_other() -> None:
    digests = {name: of(value) for name, value in zoo().items()}
    assert digests == {name: of(value) for name, value in zoo().items()}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("name", ["containers", "dataclass", "slots", "object", "arrays", "cycle", "column"])
def test_the_same_after_copying_and_pickling(name: str, copied: Any) -> None:
    thing = zoo()[name]
    if name == "containers":
        thing = thing[:-1]  # slices cannot be pickled before Python 3.11
    assert of(copied(thing)) == of(thing)


def test_a_shared_object_counts_like_equal_ones() -> None:
    one = [1, 2]
    assert of([one, one]) == of([[1, 2], [1, 2]])


def test_many_texts_that_are_shared_or_interned_count_like_equal_ones() -> None:
    shared = ["label"] * 600
    copies = ["".join(["la", "bel"]) for _ in range(600)]
    assert copies[0] is not copies[1]
    assert of(shared) == of(copies) == of([sys.intern(text) for text in copies])


class Member:
    """Sets keep members in the order of their hashes; this one's hash is not part of its content."""

    def __init__(self, order: int, **state: Any) -> None:
        self.__dict__.update(state, _hotset_order=order)

    def __hash__(self) -> int:
        return self._hotset_order  # type: ignore[no-any-return,attr-defined]


def test_the_order_of_a_sets_members_does_not_count_even_in_cycles(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)

    def members(first: int, second: int) -> Any:
        shared: list[Any] = []
        one = Member(first, shared=shared, files=[str(tmp_path / "a")] * 300)
        other = Member(second, shared=shared, files=[str(tmp_path / "b")] * 300)
        shared.append(one)
        return {one, other}

    assert [member.files[0][-1] for member in members(1, 2)] == ["a", "b"]
    assert [member.files[0][-1] for member in members(2, 1)] == ["b", "a"]
    assert of(members(1, 2)) == of(members(2, 1))


def test_a_cycle_is_the_same_wherever_it_is_met() -> None:
    one = ring()
    assert of([one, [[one]]]) == of([ring(), [[ring()]]])
    assert of(ring()) != of(ring()["other"])


def test_a_fingerprint_has_32_hexadecimal_digits() -> None:
    assert re.fullmatch("[0-9a-f]{32}", of(1))
    assert fingerprint(1) == Fingerprint(of(1), ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        fingerprint(1).digest = "x"  # type: ignore[misc]


def test_source_and_prefix_are_told_apart() -> None:
    assert len({of(1), of(1, helper), of(1, helper, helper), of([1, helper]), of(helper, helper)}) == 5
    assert of(1, helper, uses_helper) != of(1, uses_helper, helper)


# ---- no two things alike ---------------------------------------------------------------------------------


def base_one() -> type:
    class Base:
        def f(self) -> int:
            return 1

    return Base


def base_two() -> type:
    class Base:
        def f(self) -> int:
            return 2

    return Base


def subclass(base: type, **body: Any) -> Any:
    return type("Sub", (base,), {"__module__": __name__, **body})


def keywords(size: int = 3, *, mode: str = "a") -> None: ...


def other_keywords(size: int = 3, *, mode: str = "b") -> None: ...


def other_defaults(size: int = 4, *, mode: str = "a") -> None: ...


def with_body(source: str, **names: Any) -> Any:
    """The function ``f`` that a piece of code defines, in a module of its own."""
    space: dict[str, Any] = {"__name__": "of_the_user", **names}
    exec(source, space)
    return space["f"]


READS_A_CONSTANT = "def f(x): return x * size"
CALLS_A_HELPER = "def g(x): return x{}\ndef h(x): return [g(y) for y in x]\ndef f(x): return h(x)"


DIFFERENT: list[tuple[str, Any, Any]] = [
    ("bool and int", True, 1),
    ("int and float", 1, 1.0),
    ("zeros", 0.0, -0.0),
    ("text and bytes", "a", b"a"),
    ("cut elsewhere", ("ab", "c"), ("a", "bc")),
    ("cut elsewhere, looking like an encoding", ("a", "bsc"), ("asb", "c")),
    ("rows cut elsewhere", [[1], [2, 3]] * 300, [[1, 2], [3]] * 300),
    ("what a moment's object described", [decimal.Decimal(1), decimal.Decimal(2)], [decimal.Decimal(1)] * 2),
    ("nested elsewhere", [[1], 2], [[1, 2]]),
    ("none and nothing", [None], []),
    ("tuple and list", (1,), [1]),
    ("set and frozenset", {1}, frozenset({1})),
    ("key and value", {1: 2}, {2: 1}),
    ("swapped values", {"a": 1, "b": 2}, {"a": 2, "b": 1}),
    ("dict and OrderedDict", {"a": 1}, collections.OrderedDict(a=1)),
    ("default factories", collections.defaultdict(list), collections.defaultdict(set)),
    ("subclass of list", ["a"], Words(["a"])),
    ("ranges", range(3), range(4)),
    ("parameters", Resize(3), Resize(4)),
    ("enum members", Resize(3, Interpolation.LINEAR), Resize(3, Interpolation.NEAREST)),
    ("flags", Flags.A, Flags.A | Flags.B),
    ("slots", Slotted(1), Slotted(2)),
    ("unset slots", Slotted(1), Slotted(1, 2)),
    ("slots by name", Slotted(1, 2), Slotted(2, 1)),
    ("named tuples", Size(1, 2), (1, 2)),
    ("instance and class", Resize(3), Resize),
    ("lambdas of one name", lambda x: x + 1, lambda x: x + 2),
    ("lambdas that differ in a name", lambda x: x.real, lambda x: x.imag),
    ("lambdas that differ in an operator", lambda x: x + 1, lambda x: x - 1),
    ("lambdas that differ inside", lambda: lambda x: x + 1, lambda: lambda x: x + 2),
    ("lambdas in a list", [lambda x: x + 1], [lambda x: x + 2]),
    ("lambdas that differ in a set", lambda x: x in {1, 2}, lambda x: x in {1, 3}),
    ("closures", closure_over(1), closure_over(2)),
    ("closures over lambdas", closure_over(lambda: 1), closure_over(lambda: 2)),
    ("defaults", keywords, other_defaults),
    ("keyword defaults", keywords, other_keywords),
    ("partials", functools.partial(helper, 1), functools.partial(helper, 2)),
    ("partial keywords", functools.partial(helper, x=1), functools.partial(helper, x=2)),
    ("partials of lambdas", functools.partial(lambda x: x, 1), functools.partial(lambda x: -x, 1)),
    ("methods of other instances", Resize(1).__call__, Resize(2).__call__),
    ("methods", Resize.halve, Resize.__call__),
    ("builtins", math.sin, math.cos),
    ("builtin methods", "a".join, "b".join),
    ("ufuncs", np.add, np.multiply),
    ("torch functions", torch.relu, torch.tanh),
    ("torch operators", torch.ops.aten.add, torch.ops.aten.mul),
    ("getters", operator.itemgetter(1), operator.itemgetter(2)),
    ("caches", functools.lru_cache(lambda x: x), functools.lru_cache(lambda x: -x)),
    ("globals", with_body(READS_A_CONSTANT, size=1), with_body(READS_A_CONSTANT, size=2)),
    (
        "global tables",
        with_body(READS_A_CONSTANT, size={"a": [1]}),
        with_body(READS_A_CONSTANT, size={"a": [2]}),
    ),
    ("helpers of helpers", with_body(CALLS_A_HELPER.format("+1")), with_body(CALLS_A_HELPER.format("+2"))),
    ("inherited methods", subclass(base_one()), subclass(base_two())),
    ("instances with inherited methods", subclass(base_one())(), subclass(base_two())()),
    ("class attributes", subclass(object, size=1), subclass(object, size=2)),
    ("instances with class attributes", subclass(object, size=1)(), subclass(object, size=2)()),
    ("properties", subclass(object, p=property(lambda s: 1)), subclass(object, p=property(lambda s: 2))),
    (
        "static methods",
        subclass(object, f=staticmethod(lambda: 1)),
        subclass(object, f=staticmethod(lambda: 2)),
    ),
    (
        "class methods",
        subclass(object, f=classmethod(lambda c: 1)),
        subclass(object, f=classmethod(lambda c: 2)),
    ),
    ("patterns", re.compile("a"), re.compile("b")),
    ("pattern flags", re.compile("a"), re.compile("a", re.I)),
    ("dates", datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    ("decimals", decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    ("path and text", Path("/no/a"), "/no/a"),
    ("kinds of path", Path("/no/a"), Path("/no/b")),
    ("values", np.array([1, 2]), np.array([1, 3])),
    ("shapes", np.zeros((2, 3)), np.zeros((3, 2))),
    ("dtypes", np.zeros(2, np.int32), np.zeros(2, np.float32)),
    ("byte orders", np.zeros(2, "<i4"), np.zeros(2, ">i4")),
    ("texts in arrays", np.array(["a"]), np.array(["b"])),
    ("objects in arrays", np.array([[1], None], object), np.array([[2], None], object)),
    ("fields", np.array([(1, 2)], "i4,i4"), np.array([(1, 3)], "i4,i4")),
    ("masks", np.ma.MaskedArray([1], [False]), np.ma.MaskedArray([1], [True])),  # type: ignore[no-untyped-call]
    ("array and tensor", np.zeros(2, np.float32), torch.zeros(2)),
    ("tensors", torch.tensor([0.0]), torch.tensor([-0.0])),
    ("tensor dtypes", torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
    ("tensor and parameter", torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
    ("sparse tensors", torch.eye(2).to_sparse(), (torch.eye(2) * 2).to_sparse()),
    ("meta tensors", torch.zeros(2, device="meta"), torch.zeros(3, device="meta")),
    ("storages", torch.zeros(2).untyped_storage(), torch.ones(2).untyped_storage()),
    ("weights", torch.nn.ModuleList([Net()]), torch.nn.ModuleList([Net().requires_grad_(False)])),
    ("modes of a module", Net(), Net().eval()),
    ("scripts", scripted(2), scripted(3)),
    ("images", Image.new("L", (2, 2), 1), Image.new("L", (2, 2), 2)),
    ("subsets", Subset(TensorDataset(torch.arange(9)), [1]), Subset(TensorDataset(torch.arange(9)), [2])),
    ("buffers", bytearray(b"a"), bytearray(b"b")),
    ("views", memoryview(b"abcd")[::2], memoryview(b"abcd")[1::2]),
    ("contents of a file in memory", io.BytesIO(b"a"), io.BytesIO(b"b")),
    ("iterators", iter([1, 2]), iter([1, 3])),
    ("modules", math, json),
    ("seeds of samples", np.random.SeedSequence(1).spawn(2), np.random.SeedSequence(2).spawn(2)),
    ("lengths that deques keep", collections.deque([1], 2), collections.deque([1], 3)),
]


def test_values_that_look_alike_have_different_fingerprints() -> None:
    found = [(name, of(one), of(other)) for name, one, other in DIFFERENT]
    again = [(name, of(one), of(other)) for name, one, other in DIFFERENT]
    unstable = [one for one, other in zip(found, again, strict=True) if one != other]
    mistaken = [name for name, one, other in found if one == other]
    inside = [name for name, one, other in DIFFERENT if of({"held": [one]}) == of({"held": [other]})]
    assert (unstable, mistaken, inside) == ([], [], [])


LARGE: list[tuple[str, Callable[[int], Any], Any]] = [
    ("pairs", lambda i: (f"/no/{i}", i), ("/no/other", 1)),
    ("numbers", lambda i: i, 1.5),
    ("lists of two lengths", lambda i: [i] * (i % 2), [9]),
    ("mappings", lambda i: {"a": i, "b": {"c": [i]}}, {"a": 0, "b": {"c": [-1]}}),
    ("mappings with other keys", lambda i: {"a": i}, {"b": 0}),
    ("paths", lambda i: Path(f"/no/{i}"), Path("/no/other")),
    ("scalars", lambda i: np.int64(i), np.int32(0)),
    ("objects", lambda i: Slotted(i), Slotted(None)),
    ("tensors", lambda i: torch.tensor(i), torch.tensor(0.0)),
    ("texts", lambda i: f"a text of {i} words", "another"),
]


@pytest.mark.parametrize(("make", "odd"), [case[1:] for case in LARGE], ids=[case[0] for case in LARGE])
def test_one_other_element_among_many_counts_wherever_it_is(make: Any, odd: Any) -> None:
    def items() -> list[Any]:
        return [make(i) for i in range(600)]

    digests = {of(items()), of(items()[1:]), of(items() * 2), of(tuple(items())), of(items()[::-1])}
    for place in (0, 300, 599):
        changed = items()
        changed[place] = odd
        digests.add(of(changed))
    assert len(digests) == 8
    assert of(items()) in digests


@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_is_described_by_its_parts_however_large_it_would_be(layout: str) -> None:
    def ratings(value: float) -> torch.Tensor:
        places = torch.tensor([[0, 7], [5, 1 << 20]])
        size = (1 << 20, 1 << 21)  # 8 TiB
        coo = torch.sparse_coo_tensor(places, torch.tensor([1.0, value]), size, check_invariants=True)
        return coo.coalesce() if layout == "to_sparse_coo" else getattr(coo, layout)()  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that some layouts are in beta
        first, same, other = (fingerprint([ratings(value)]) for value in (2.0, 2.0, 3.0))
    assert first == same != other
    assert not first.unknowns


def test_order_counts_in_lists_and_mappings_and_not_in_sets_and_attributes() -> None:
    for count in (5, 1000):
        names = [f"n{i}" for i in range(count)]
        rows = [{"a": 1, "b": name} for name in names]
        assert of(names) != of(names[::-1])
        assert of(dict.fromkeys(names, 1)) != of(dict.fromkeys(names[::-1], 1))
        assert of({*names}) == of({*names[::-1]})
        assert of(rows) != of([dict(reversed(row.items())) for row in rows])
        assert of(rows) != of([dict(reversed(row.items())) if row is rows[2] else row for row in rows])
    assert of(types.SimpleNamespace(a=1, b=2)) == of(types.SimpleNamespace(b=2, a=1))


def test_the_order_of_an_arrays_dimensions_in_memory_does_not_count() -> None:
    assert of(np.zeros((2, 3), order="F") + 1) == of(np.zeros((2, 3)) + 1)
    assert of(torch.arange(6).view(2, 3).t()) == of(torch.arange(6).view(2, 3).t().contiguous())


def test_the_padding_between_fields_does_not_count() -> None:
    padded = np.dtype({"names": ["a", "b"], "formats": ["u1", "i8"], "offsets": [0, 8]})
    one, other = np.zeros(3, padded), np.zeros(3, padded)
    other.view(np.uint8).reshape(3, 16)[:, 1:8] = 99
    assert of(one) == of(other)


# ---- code ------------------------------------------------------------------------------------------------


def test_a_function_of_the_same_body_is_the_same_wherever_it_stands() -> None:
    before = with_body("def f(x):\n    return x + 1")
    after = with_body("# moved down\n\n\ndef f(x):\n\n    return x + 1  # and commented")
    assert of(before) == of(after)


def test_a_global_that_shares_its_name_with_an_attribute_does_not_count() -> None:
    source = "def f(x): return x.count"
    assert of(with_body(source, count=1)) == of(with_body(source, count=2))


def test_recursive_functions_end() -> None:
    source = "def f(x): return g(x) if x else 0\ndef g(x): return f(x - {})"
    assert of(with_body(source.format(1))) == of(with_body(source.format(1)))
    assert of(with_body(source.format(1))) != of(with_body(source.format(2)))


def test_a_wrapper_from_a_library_does_not_hide_the_function() -> None:
    one = torch.no_grad()(with_body("def f(x): return x + 1"))
    other = torch.no_grad()(with_body("def f(x): return x + 2"))
    assert of(one) != of(other)


def test_a_wrapper_of_the_users_around_a_library_is_the_users() -> None:
    source = """
import functools, json
def g(x): return x + {}
@functools.wraps(json.loads)
def f(x): return g(x)
"""
    assert of(with_body(source.format(1))) != of(with_body(source.format(2)))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Writes, imports and replaces a user's module ``of_users_own``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> Any:
        (tmp_path / "of_users_own.py").write_text(source)
        sys.modules.pop("of_users_own", None)
        importlib.invalidate_caches()
        return importlib.import_module("of_users_own")

    yield write
    sys.modules.pop("of_users_own", None)
    codes.installed.cache_clear()


@pytest.mark.parametrize(
    "using",
    [
        "def f(x): return users.scale(x)",
        "import of_users_own\ndef f(x): return of_users_own.scale(x)",
        "def f(x):\n    import of_users_own\n    return of_users_own.scale(x)",
        "def f(x): return getattr(users, 'sca' + 'le')(x)",
    ],
)
def test_an_edited_function_in_another_module_counts(module: Callable[[str], Any], using: str) -> None:
    digests = []
    for body in ("x * 2", "x * 2", "x * 3"):
        users = module(f"def scale(x):\n    return {body}\n")
        digests.append(of(with_body(using, users=users)))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("edited", "statement"),
    [
        ("kit/near.py", "from .near import scale"),
        ("kit/near.py", "from . import near"),
        ("kit/parts/far.py", "import kit.parts.far"),
        ("kit/parts/far.py", "from kit.parts import far as near"),
        ("kit/deep.py", "from .over import scale"),
        ("kit/deep.py", "import kit.over"),
    ],
)
def test_an_edited_module_counts_that_a_function_imports_as_it_runs(
    edited: str, statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its own package, from one that was not imported yet, or by another module."""
    (tmp_path / "kit" / "parts").mkdir(parents=True)
    for name in ("__init__", "parts/__init__", "near", "parts/far", "deep"):
        (tmp_path / "kit" / f"{name}.py").write_text("def scale(x): return x\n")
    (tmp_path / "kit" / "over.py").write_text("from .deep import (  # all\n    scale,\n)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    function = with_body(f"def f(x):\n    {statement}\n    return x", __name__="kit.sets", __package__="kit")
    before = of(function)
    assert of(function) == before
    (tmp_path / edited).write_text("def scale(x): return 2 * x\n")
    assert of(function) != before
    assert not any(name.partition(".")[0] == "kit" for name in sys.modules), "nothing was imported"
    codes.installed.cache_clear()


@pytest.mark.parametrize("found", ["globals()['sca' + 'le'](x)", "eval('scale(x)')"])
def test_an_edited_function_counts_that_code_finds_by_its_name(
    found: str, module: Callable[[str], Any]
) -> None:
    source = f"def scale(x): return x * {{}}\ndef f(x): return {found}\n"
    digests = [of(module(source.format(number)).f) for number in (2, 2, 3)]
    assert digests[0] == digests[1] != digests[2]


def test_a_builtin_that_the_user_has_replaced_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    function = with_body("def f(x): return round(x)")
    digests = [of(function)]
    for replaced in (lambda x: x + 1, lambda x: x + 2):
        monkeypatch.setattr(builtins, "round", replaced)
        digests.append(of(function))
    assert len({*digests}) == 3


def test_what_a_function_of_many_names_reads_from_a_module_counts(module: Callable[[str], Any]) -> None:
    """From the 128th name on, an instruction comes in two parts."""
    users = module("")
    others = "".join(f"    x = x.name{number}\n" for number in range(300))
    function = with_body(f"def f(x):\n{others}    return users.options.size", users=users)
    digests = []
    for size in (1, 1, 2):
        users.options = types.SimpleNamespace(size=size)
        digests.append(of(function))
    assert digests[0] == digests[1] != digests[2]


def test_of_another_module_only_what_is_used_counts(module: Callable[[str], Any]) -> None:
    using = "def f(x): return users.scale(x)"
    one = of(with_body(using, users=module("def scale(x): return x\ndef unrelated(): return 1\n")))
    other = of(with_body(using, users=module("def scale(x): return x\ndef unrelated(): return 2\n")))
    assert one == other


def test_importing_a_module_later_does_not_change_the_fingerprint(module: Callable[[str], Any]) -> None:
    module("def scale(x): return x\n")
    function = with_body("def f(x):\n    import of_users_own, colorsys\n    return x")
    sys.modules.pop("of_users_own")
    sys.modules.pop("colorsys", None)
    before = of(function)
    assert "of_users_own" not in sys.modules, "taking a fingerprint imports nothing"
    function(1)
    assert of(function) == before


@pytest.mark.parametrize("thing", [torch.nn.ReLU(), torch.relu, np.add, math.sqrt, json.loads, Path("/no")])
def test_another_version_of_a_library_counts(thing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(thing)
    monkeypatch.setattr(codes, "installed", lambda module: f"{module} 99.9")
    assert of(thing) != before


def test_installed_modules_are_told_from_the_users() -> None:
    assert (
        codes.installed("torch.nn")
        == codes.installed("torch._C._nn")
        == f"torch {importlib.metadata.version('torch')}"
    )
    assert "pillow" in str(codes.installed("PIL.Image"))
    assert codes.installed("json") == codes.installed("_thread") == codes.installed("math")
    assert (
        codes.installed(__name__) is codes.installed("no_such_module") is codes.installed("__main__") is None
    )


@pytest.mark.parametrize(
    ("file", "listed"), [("RECORD", "drawing/__init__.py,,\n"), ("top_level.txt", "drawing\n")]
)
def test_a_module_belongs_to_the_distribution_that_lists_it(
    file: str, listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    (folder / "drawing").mkdir(parents=True)
    (folder / "drawing" / "__init__.py").touch()
    for name, content in {"paint_shop": listed, "other": listed.replace("drawing", "drawing_tools")}.items():
        about = folder / f"{name}-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (about / file).write_text(content)
    monkeypatch.syspath_prepend(str(folder))
    codes.installed.cache_clear()
    codes._version.cache_clear()
    assert codes.installed("drawing") == "drawing paint_shop 1.2"


def test_a_library_may_be_installed_into_any_folder_beside_what_the_user_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install --target`` into the program's own folder."""
    (tmp_path / "drawing_kit" / "parts").mkdir(parents=True)
    for file in (
        "drawing_kit/__init__.py",
        "drawing_kit/parts/pens.py",
        "drawing_kit/mine.py",
        "program_x.py",
    ):
        (tmp_path / file).touch()
    about = tmp_path / "drawing_kit-2.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: drawing_kit\nVersion: 2.3\n")
    rows = '"drawing_kit/__init__.py",sha256=x,0\ndrawing_kit/parts/pens.py,,\n'
    (about / "RECORD").write_text(rows)
    monkeypatch.syspath_prepend(str(tmp_path))
    pens, mine, program = map(
        importlib.import_module, ("drawing_kit.parts.pens", "drawing_kit.mine", "program_x")
    )
    assert codes.installed(pens.__name__) == "drawing_kit 2.3"
    assert codes.installed(mine.__name__) is codes.installed(program.__name__) is None


@pytest.mark.parametrize("record", [b"kit_x/pens.py,\xff,\n", b"kit_x/pens.py," + b"x" * 200_000 + b"\n"])
def test_a_damaged_record_makes_no_module_a_librarys(
    record: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a working folder that is gone, which modules are looked for in, raise an error."""
    about = tmp_path / "kit_x-1.0.dist-info"
    for folder in (about, tmp_path / "kit_x", tmp_path / "gone"):
        folder.mkdir()
    (tmp_path / "kit_x" / "pens.py").touch()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kit_x\nVersion: 1.0\n")
    (about / "RECORD").write_bytes(record)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kit_x", raising=False)
    monkeypatch.delitem(sys.modules, "kit_x.pens", raising=False)
    pens = importlib.import_module("kit_x.pens")
    codes.installed.cache_clear()
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert codes.installed(pens.__name__) is None


def test_the_main_module_of_a_spawned_process_is_the_main_module() -> None:
    class Thing:
        pass

    Thing.__module__ = "__main__"
    before = of(Thing())
    Thing.__module__ = "__mp_main__"
    assert of(Thing()) == before


# ---- what is not part of the identity --------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda thing: thing["random"].random(),
        lambda thing: thing["numpy"].random(),
        lambda thing: thing["legacy"].rand(),
        lambda thing: torch.rand((), generator=thing["torch"]),
        lambda thing: thing["written"].write("x"),
        lambda thing: thing["lock"].acquire(),
        lambda thing: thing["logger"].setLevel(10),
        lambda thing: setattr(thing["local"], "x", 1),
        lambda thing: thing["weak"].update(a=thing["object"]),
        lambda thing: setattr(thing["object"], "_hotset_cache", [1]),
        lambda thing: pickle.dumps(thing["object"]),
        lambda thing: thing["cached"](1),
        lambda thing: thing["file"].read(3),
    ],
)
def test_use_leaves_no_trace(use: Any, tmp_path: Path) -> None:
    with open(__file__) as file, (tmp_path / "log").open("w") as written:
        thing = {
            "random": random.Random(1),
            "numpy": np.random.default_rng(1),
            "legacy": np.random.RandomState(1),
            "torch": torch.Generator(),
            "written": written,
            "lock": threading.Lock(),
            "logger": logging.getLogger("test_fingerprint"),
            "local": threading.local(),
            "weak": weakref.WeakValueDictionary(),
            "object": Resize(3),
            "cached": functools.lru_cache(helper),
            "file": file,
        }
        before = of(thing)
        use(thing)
        assert of(thing) == before


def test_having_been_pickled_leaves_no_trace_on_the_class() -> None:
    class Fresh:
        pass

    before = of(Fresh())
    Fresh().__reduce_ex__(2)
    assert "__slotnames__" in vars(Fresh), (
        "pickling no longer marks classes: the exception has no reason left"
    )
    assert of(Fresh()) == before


def test_a_declaration_is_not_part_of_the_identity() -> None:
    assert of(deterministic(Resize(3))) == of(Resize(3))
    assert of(deterministic(math.sqrt)) == of(math.sqrt)
    assert of(deterministic(functools.partial(helper, 1))) == of(functools.partial(helper, 1))
    assert of(deterministic(with_body("def f(x): return x"))) == of(with_body("def f(x): return x"))
    assert of(deterministic(subclass(base_one()))) == of(subclass(base_one()))


def test_no_generator_moves() -> None:
    things = zoo()
    before = rng_states()
    of(things)
    assert rng_states() == before


def test_no_code_of_the_object_runs() -> None:
    class Booby:
        def __init__(self) -> None:
            self.size = 3

        def trapped(self, *args: Any) -> Any:
            raise AssertionError("code of the object ran")

        __getattr__ = __eq__ = __hash__ = __iter__ = __len__ = __repr__ = __reduce_ex__ = trapped
        __getstate__ = __index__ = __bool__ = trapped
        trap = property(trapped)
        __class__ = property(trapped)

    class BoobyList(list[int]):
        def trapped(self, *args: Any) -> Any:
            raise AssertionError("code of the object ran")

        __iter__ = __len__ = __getitem__ = __eq__ = __reduce_ex__ = trapped

    class BoobyDict(dict[str, int]):
        def trapped(self, *args: Any) -> Any:
            raise AssertionError("code of the object ran")

        __iter__ = __len__ = __getitem__ = keys = items = values = __missing__ = trapped

    class BoobyInt(int):
        def trapped(self, *args: Any) -> Any:
            raise AssertionError("code of the object ran")

        __int__ = __index__ = __eq__ = __hash__ = __pos__ = __repr__ = trapped

    assert of([Booby(), BoobyList([1]), BoobyDict(a=1), BoobyInt(3)]) != of([Booby(), BoobyList([2])])
    assert of(BoobyList([1])) != of(BoobyList([2]))
    assert of(BoobyDict(a=1)) != of(BoobyDict(a=2))
    assert of(BoobyInt(1)) != of(BoobyInt(2))


# ---- bounds ----------------------------------------------------------------------------------------------


def test_an_object_that_cannot_be_described_makes_the_fingerprint_unique_and_is_named() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    generator = numbers()
    seen = fingerprint({"a": generator})
    assert seen.unknowns == ("a builtins.generator could not be described",)
    assert fingerprint({"a": generator}).digest != seen.digest


@pytest.mark.skipif(sys.version_info < (3, 14), reason="tells by pickle how far it has come")
def test_how_far_an_iterator_has_come_is_not_known_from_python_3_14_on() -> None:
    seen = fingerprint(itertools.count(3))
    assert seen.unknowns == ("a itertools.count could not be described",)


def test_objects_nested_too_deep_are_not_described_and_that_is_noted() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert fingerprint(nested).unknowns == ("an object nested more than 100 deep was not described",)
    while nested:  # freed from outside in, as Python's own way of freeing it has a bound as well
        nested = nested.pop()


def test_a_large_list_in_itself_ends() -> None:
    large: list[Any] = [{"number": i} for i in range(300)]
    for row in large:
        row["all"] = large
    assert of(large) == of(large)
    large.extend([large] * 300)
    assert of(large) == of(large)


def test_objects_that_share_much_are_described_once_each() -> None:
    shared: Any = [1]
    for _ in range(60):
        shared = [shared, shared]
    assert of(shared) == of(shared)


@pytest.mark.parametrize(
    ("library", "transposed"), rarely(itertools.product([np, torch], [False, True]), (np, True))
)
def test_every_byte_of_a_huge_array_counts(library: Any, transposed: bool) -> None:
    side = 1 << often(12, 13)
    array = library.zeros((side, side), dtype=library.uint8)
    if transposed:
        array = array.T
    before = fingerprint(array)
    assert before.notes == ()
    assert fingerprint(array) == before
    for place in ((0, 0), (-1, -1), (3001, 77), (77, 3001)):
        array[place] = 1
        assert fingerprint(array).digest != before.digest
        array[place] = 0
    for place in ((1, 2), (4000, 2)):
        array[place] = 128
    assert fingerprint(array).digest != before.digest, "two bits that a sum would let cancel each other"


def test_two_rows_of_a_large_array_that_change_places_count() -> None:
    array = np.arange(1 << 20, dtype=np.float64).reshape(1 << 12, 1 << 8)
    swapped = array.copy()
    swapped[[7, 2055]] = swapped[[2055, 7]]
    negated = array.copy()
    negated[[7, 2055]] *= -1
    assert len({of(array), of(swapped), of(negated)}) == 3


def test_the_order_of_a_large_arrays_dimensions_in_memory_does_not_count() -> None:
    array = np.random.default_rng(1).integers(0, 255, (50, 1200, 1301), np.uint8)
    for axes in ((2, 1, 0), (0, 2, 1), (1, 0, 2))[: often(1, 3)]:
        assert of(array.transpose(axes)) == of(np.ascontiguousarray(array.transpose(axes)))
        tensor = torch.from_numpy(array)
        assert of(tensor.permute(axes)) == of(tensor.permute(axes).contiguous())


# ---- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "data" / name / f"{i}.txt").write_text(f"{name}{i}")
    return tmp_path / "data"


def every_file(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*.txt"))


NAMING: list[tuple[str, Callable[[Path], Any]]] = [
    ("list", every_file),
    ("pairs", lambda folder: [(path, i) for i, path in enumerate(every_file(folder))]),
    ("paths", lambda folder: [Path(path) for path in every_file(folder)]),
    ("mappings", lambda folder: [{"image": path, "label": 0} for path in every_file(folder)]),
    ("keys", lambda folder: dict.fromkeys(every_file(folder), 1)),
    ("attribute", lambda folder: types.SimpleNamespace(file=every_file(folder)[4])),
    ("column", lambda folder: [(path, 0) for path in every_file(folder)] * 100),
    (
        "mapping's column",
        lambda folder: {f"{path}{'/..' * 0}": i for i, path in enumerate(every_file(folder))},
    ),
    ("array", lambda folder: np.array(every_file(folder))),
    ("bytes", lambda folder: list(map(os.fsencode, every_file(folder)))),
    ("column of bytes", lambda folder: list(map(os.fsencode, every_file(folder))) * 100),
    ("array of bytes", lambda folder: np.array([list(map(os.fsencode, every_file(folder)))] * 2)),
    ("object array", lambda folder: np.array([Path(path) for path in every_file(folder)], object)),
    ("folder", str),
    ("folder and bare names", lambda folder: (folder, [Path(path).name for path in every_file(folder)])),
    ("folders in a list", lambda folder: [[str(folder / "a"), 0], [str(folder / "b"), 1]]),
    (
        "global constant",
        lambda folder: with_body("def f(i): return open(files[i])", files=every_file(folder)),
    ),
    ("constant in code", lambda folder: with_body(f"def f(i): return open({every_file(folder)[4]!r})")),
]


@pytest.mark.parametrize("naming", [case[1] for case in NAMING], ids=[case[0] for case in NAMING])
def test_a_changed_file_counts_however_it_is_named(folder: Path, naming: Callable[[Path], Any]) -> None:
    source = naming(folder)
    file = folder / "b" / "1.txt"
    before, dates = of(source), file.stat()
    assert of(source) == before
    file.write_text("other size")
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    resized = of(source)
    file.write_text("b1")
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns + 1))
    touched = of(source)
    file.unlink()
    deleted = of(source)
    assert len({before, resized, touched, deleted}) == 4
    file.write_text("b1")
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert of(source) == before


@pytest.mark.parametrize("naming", [every_file, str], ids=["list", "folder"])
def test_an_added_file_counts(folder: Path, naming: Callable[[Path], Any]) -> None:
    before = of(naming(folder))
    (folder / "b" / "3.txt").write_text("b3")
    assert of(naming(folder)) != before


def test_a_relative_path_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    before = of("data"), of("data/b/1.txt")
    (folder / "b" / "1.txt").write_text("other size")
    assert of("data") != before[0]
    assert of("data/b/1.txt") != before[1]


def test_hidden_files_locks_and_files_beside_listed_ones_do_not_count(folder: Path) -> None:
    listed = types.SimpleNamespace(root=str(folder), files=every_file(folder))
    before = of(str(folder)), of(listed)
    for name in (".cache", "data.lock", "lock.mdb"):
        (folder / name).write_text("x")
    assert of(str(folder)) == before[0]
    (folder / "log.csv").write_text("x")
    assert of(listed) == before[1]
    assert of(str(folder)) != before[0]


def test_a_folder_that_other_programs_write_to_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    before = fingerprint(str(tmp_path))
    assert before.notes == (f"the files in {tmp_path} were not compared: other programs write there",)
    (tmp_path / "run.log").write_text("x")
    assert fingerprint(str(tmp_path)) == before
    assert fingerprint([".", "..", "/"]).notes == ()


@pytest.mark.parametrize(
    "text", ["", "a\0b", "x" * 5000, "\ud800", "line\nbreak", "~", "//", "http://a.b/c?d"]
)
def test_any_text_may_be_tried_as_a_path(text: str) -> None:
    assert fingerprint([text, text + "2"]).notes == ()


def test_files_are_looked_at_in_rounds_and_a_note_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / f"{i}") for i in range(3000)]
    for path in paths:
        Path(path).touch()
    asked: list[str] = []
    monkeypatch.setattr("os.stat", counting(os.stat, asked))
    pairs = [(path, i) for i, path in enumerate(paths)]
    few = fingerprint(pairs, seconds=0)
    assert few.notes == ("the sizes and dates of 64 of 3,000 files were compared",)
    assert len(asked) == 64
    assert {paths[0], paths[-1]} < set(asked)
    assert fingerprint(pairs, seconds=0) == few
    assert fingerprint(pairs, seconds=1000).notes == ()
    assert set(asked) == set(paths)


def counting(stat: Any, asked: list[str]) -> Any:
    def count(path: Any, *args: Any, **kwargs: Any) -> Any:
        if type(path) is str and path.rsplit("/", 1)[-1].isdecimal():
            asked.append(path)
        return stat(path, *args, **kwargs)

    return count


def test_only_a_few_texts_of_a_column_without_files_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("os.stat", counting(os.stat, asked))
    assert fingerprint([f"{i}" for i in range(10_000)]).notes == ()
    assert len(asked) == 64


def test_one_file_among_many_single_texts_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "a")
    for place in (7, 100, 150):
        texts = {f"key{i}": {"text": [f"{i / 200}"]} for i in range(200)}
        texts[f"key{place}"] = {"text": [f"{place / 200}x"]}
        file = folder / "a" / f"{place / 200}x"
        file.write_text("size")
        before = of(texts)
        file.write_text("other size")
        assert of(texts) != before


def test_a_renamed_file_in_a_folder_counts(folder: Path) -> None:
    before = of(folder)
    (folder / "a" / "1.txt").rename(folder / "a" / "1.tyt")
    assert of(folder) != before


def test_the_order_in_which_a_folder_lists_its_files_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, digests = os.scandir, set()
    for backwards in (False, True):

        @contextlib.contextmanager
        def scandir(path: Any, backwards: bool = backwards) -> Iterator[Any]:
            with scan(path) as entries:
                yield iter(sorted(entries, key=lambda entry: entry.name, reverse=backwards))

        monkeypatch.setattr("os.scandir", scandir)
        digests.add(of(folder))
    assert len(digests) == 1


def test_only_the_first_files_of_a_large_folder_are_compared_and_that_is_noted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotset.determinism.fingerprint.data_files._FILES_OF_FOLDERS", 4)
    assert fingerprint(folder).notes == (f"of the files in {folder} only the first 4 were compared",)


def test_a_folder_that_links_to_itself_ends(folder: Path) -> None:
    (folder / "a" / "again").symlink_to(folder)
    assert of(folder) == of(folder)


def test_a_link_in_a_folder_that_leads_round_is_no_file(folder: Path) -> None:
    before = of(folder)
    (folder / "a" / "round").symlink_to("round")
    assert of(folder) == before


@pytest.mark.parametrize("name", ["/proc", "/proc/self"])
def test_what_the_kernel_makes_up_does_not_count(name: str) -> None:
    first = fingerprint(name, seconds=20.0)
    assert fingerprint(name, seconds=20.0) == first
    assert first.notes == ()


def test_a_named_open_file_counts_with_its_date(folder: Path) -> None:
    with contextlib.closing((folder / "a" / "1.txt").open()) as file:
        before = of({"file": file})
        os.utime(folder / "a" / "1.txt", ns=(1, 1))
        assert of({"file": file}) != before


def environment(folder: Path) -> Any:
    """As LMDB's: compiled, without a module's name or attributes."""
    methods = {"path": lambda self: str(folder), "__slots__": (), "__module__": "builtins"}
    return type("Environment", (), methods)()


def test_an_environment_of_lmdb_counts_by_its_file(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name / "data.mdb").write_bytes(b"data")
        (folder / name / "lock.mdb").write_bytes(b"lock")
    one, other = environment(folder / "a"), environment(folder / "b")
    before = of([one])
    (folder / "a" / "lock.mdb").write_bytes(b"another lock")
    assert of([environment(folder / "a")]) == before != of([other])
    os.utime(folder / "a" / "data.mdb", ns=(1, 1))
    assert of([one]) != before


def test_what_a_logger_of_loguru_writes_to_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "loguru"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_logger.py").write_text("class Logger:\n    pass\n")
    monkeypatch.syspath_prepend(package.parent)
    logger = importlib.import_module("loguru._logger").Logger()
    logger.sinks = [{"name": "here"}]
    before = of([logger])
    logger.sinks.append({"name": "there"})
    assert of([logger]) == before != of([])


def scaled(x: float) -> float:
    return x * SCALES[0] + GENERATOR.random()


SCALES = [2.0]
GENERATOR = random.Random(1)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function as numba compiles it, with a compiler that keeps what it has done."""
    package = tmp_path / "site-packages" / "numba" / "core"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "dispatcher.py").write_text("class Dispatcher:\n    pass\n")
    monkeypatch.syspath_prepend(package.parents[1])
    dispatcher = importlib.import_module("numba.core.dispatcher").Dispatcher()
    for name in ("numba", "numba.core", "numba.core.dispatcher"):
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))  # gone after the test
    functools.update_wrapper(dispatcher, scaled)
    dispatcher.targetoptions, dispatcher.overloads = {"fastmath": True}, [random.Random(2)]
    return dispatcher


def test_what_numba_compiles_counts_by_its_python_code_and_options(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of([compiled])
    compiled.overloads.append("float64")
    assert of([compiled]) == before
    compiled.targetoptions = {"fastmath": False}
    assert of([compiled]) != before
    compiled.targetoptions = {"fastmath": True}
    monkeypatch.setitem(globals(), "SCALES", [3.0])
    assert of([compiled]) != before


def test_generators_are_searched_in_the_python_code_of_what_numba_compiles_alone(compiled: Any) -> None:
    assert [found for _, found in within_reach([compiled], (random.Random,))] == [GENERATOR]


def test_without_candidates_digests_are_equal() -> None:
    assert Files().compare(1.0) == Files().compare(1.0)


# ---- files of object stores ------------------------------------------------------------------------------


class Versioned:
    """Reads objects of a store, and tells their versions."""

    def __init__(self, told: Any) -> None:
        self._hotset_told = told

    def __hotset_version__(self) -> Any:
        if isinstance(self._hotset_told, Exception):
            raise self._hotset_told
        return self._hotset_told


class VersionedAlso(Versioned):
    pass


@pytest.mark.parametrize("kind", [Versioned, VersionedAlso])
def test_what_a_source_tells_of_its_version_counts(kind: Any) -> None:
    assert of([kind({"a": '"e1"'})]) == of([kind({"a": '"e1"'})]) != of([kind({"a": '"e2"'})])
    found = fingerprint(kind(OSError("no route")))
    assert "__hotset_version__ that raised OSError (no route)" in found.unknowns[0]


class Store:
    """As a file system of fsspec: made from arguments, with state that differs from process to process."""

    __module__ = "fsspec.spec"
    __qualname__ = "AbstractFileSystem"

    def __init__(self, *storage_args: Any, **storage_options: Any) -> None:
        self.storage_args = storage_args
        self.storage_options = storage_options
        self.pid = random.random()
        self.etag = '"1"'
        self.asked = 0

    def info(self, path: str) -> dict[str, Any]:
        self.asked += 1
        if self.etag is None:
            raise ConnectionError("no route")
        return {"name": path, "ETag": self.etag, "type": "file", "atime": self.asked, "size": 3}


class StoredFile:
    __module__ = "fsspec.core"
    __qualname__ = "OpenFile"

    def __init__(self, fs: Store, path: str, mode: str = "rb") -> None:
        self.fs = fs
        self.path = path
        self.mode = mode


def test_a_file_of_fsspec_counts_by_its_store_path_and_version() -> None:
    def file(etag: str = '"1"', path: str = "a", *args: Any, **options: Any) -> str:
        store = Store(*args, **options)
        store.etag = etag
        return of([StoredFile(store, path)])

    assert file() == file() == file(token="secret")
    others = [file('"2"'), file(path="b"), file('"1"', "a", "root"), file(endpoint="http://there")]
    assert len({file(), *others}) == 5
    assert of([Store()]) == of([Store(secret="hidden")]) != of([Store(bucket="other")])


def test_a_file_of_fsspec_that_is_only_written_to_is_not_asked_for() -> None:
    store = Store()
    fingerprint([StoredFile(store, "log", "wb")])
    assert store.asked == 0


def test_a_version_that_cannot_be_asked_for_makes_the_fingerprint_unique_and_is_named() -> None:
    store = Store()
    store.etag = None  # type: ignore[assignment]
    found = fingerprint([StoredFile(store, "data/a")])
    assert "data/a" in found.unknowns[0]
    assert "no route" in found.unknowns[0]
    assert found.digest != fingerprint([StoredFile(store, "data/a")]).digest


def test_versions_of_many_files_are_asked_for_in_rounds_and_a_note_says_how_many() -> None:
    store = Store()
    files = [StoredFile(store, str(number)) for number in range(3000)]
    found = fingerprint(files, seconds=0.0)
    assert store.asked == 64
    assert found.notes == ("the sizes and dates of 64 of 3,000 files were compared",)


def test_an_object_of_compiled_code_without_a_constructor_is_not_described_by_its_type() -> None:
    hashes = [hashlib.sha256(content) for content in (b"a", b"b")]
    assert all("could not be described" in fingerprint(each).unknowns[0] for each in hashes)


def test_arrays_of_ctypes_and_of_multiprocessing_count_by_their_content() -> None:
    makers: list[Any] = [
        lambda numbers: multiprocessing.Array("i", numbers),
        lambda numbers: multiprocessing.RawArray("d", numbers),
        lambda numbers: (ctypes.c_ubyte * 2)(*numbers),
        lambda numbers: (ctypes.c_long * 2 * 1)((ctypes.c_long * 2)(*numbers)),
    ]
    digests = [[fingerprint(make(numbers)).digest for numbers in ([1, 2], [1, 2], [1, 3])] for make in makers]
    assert all(one == same != other for one, same, other in digests)
    assert len({one for one, *_ in digests}) == len(makers)
    assert fingerprint((ctypes.c_char_p * 1)(b"x")).unknowns
