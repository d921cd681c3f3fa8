"""``hotset.memo``: a call is indistinguishable from the function's, and computed once for all processes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import random
import resource
import secrets
import sys
import threading
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import (
    difference,
    eventually,
    in_threads,
    interrupted_everywhere,
    is_a_sentence,
    often,
    rarely,
    rng_states,
    seed_everything,
)
from kills import child, in_child, kill, stop
from programs import Programs
from sources import ReadLog
from torch.utils.data import DataLoader, Dataset

import hotset
from hotset.determinism.fingerprint.fingerprint import fingerprint
from hotset.memoize.memo_store import MemoStore
from hotset.store.claims import Participant
from hotset.units import parse_bytes


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "computed")


@pytest.fixture(autouse=True)
def _no_audits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits call functions once more, and these tests count calls."""
    if "audit" not in request.node.name:
        monkeypatch.setattr("hotset.memoize.calls._AUDITED_SHARE", 0.0)


@contextlib.contextmanager
def memo(function: Callable[..., Any], **options: Any) -> Iterator[hotset.Memo[..., Any]]:
    """A memoised function whose store is found sound at the end."""
    with hotset.memo(function, **{"memory": "64MiB", **options}) as kept:
        yield kept
        assert kept.check() == []


class Decoder:
    """A function that logs its calls; it is the same function in every process."""

    def __init__(self, log: ReadLog, seconds: float = 0.0) -> None:
        self.log, self.seconds = log, seconds
        self.__qualname__ = "Decoder"

    def __call__(self, number: int, scale: int = 1) -> torch.Tensor:
        self.log.add(int(number))
        time.sleep(self.seconds)
        return torch.arange(100) * number * scale


# ---- what counts as one call -----------------------------------------------------------------------------


def test_calls_with_one_meaning_are_one_and_types_count(log: ReadLog) -> None:
    with memo(Decoder(log), key="decoder") as decode:
        for result in (decode(1), decode(number=1), decode(1, 1), decode(1, scale=1)):
            assert difference(result, torch.arange(100)) is None
        assert log.total() == 1
        decode(1.0)
        decode(True)
        assert log.total() == 3


@dataclasses.dataclass
class Crop:
    top: int
    size: tuple[int, int]


@dataclasses.dataclass(eq=False)
class Movable:
    """It can be in a set, and change."""

    top: int


ARGUMENTS: list[tuple[Any, Any]] = [
    (0.0, -0.0),
    (None, 0),
    ("a", b"a"),
    ("a", Path("a")),
    ((1, 2), [1, 2]),
    ((1, 2), (1, 2, 3)),
    (("ab", "c"), ("a", "bc")),
    ({"a": 1}, {"a": 1, "b": 2}),
    ({1, 2}, frozenset({1, 2})),
    (Crop(1, (2, 3)), Crop(1, (2, 4))),
    (np.float32(1), np.float64(1)),
    (np.arange(3), np.arange(3, dtype=np.int32)),
    (np.zeros((2, 3)), np.zeros((3, 2))),
    (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
    (torch.zeros(3), np.zeros(3, np.float32)),
    (slice(1, 2), range(1, 2)),
    (torch.float32, torch.float64),
    (np.dtype("f4"), np.dtype("f8")),
    (int, float),
    (1j, 1.0),
    (..., None),
    ((1 << 20_000,), (-(1 << 20_000),)),
    (np.zeros(2, [("a", "<i4")]), np.zeros(2, [("b", "<i4")])),
    (np.zeros(2, [("a", "<i4")])[0], np.zeros(2, [("a", "<f4")])[0]),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.str_("a"), "a"),
]
if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):  # from numpy 2 on
    _LONG = [np.array([letter * 40], np.dtypes.StringDType()) for letter in "ab"]
    ARGUMENTS.append((_LONG[0], _LONG[1]))


@pytest.mark.parametrize(("one", "other"), ARGUMENTS)
def test_arguments_that_differ_are_told_apart_and_equal_ones_are_one(one: Any, other: Any) -> None:
    calls = []

    def name(value: Any) -> int:
        calls.append(value)
        return len(calls)

    with memo(name, key="name") as kept:
        assert kept(one) == 1
        assert kept(pickle.loads(pickle.dumps(one))) == 1
        assert kept(other) == 2
        assert kept(other) == 2
        assert len(calls) == 2


def test_a_function_that_cannot_be_entered_just_now_is_entered_by_a_later_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a process is stopped while it holds the lock."""
    with memo(abs, key="other") as other, memo(abs, key="abs") as kept:
        assert other(-1) == 1
        with monkeypatch.context() as stopped:
            stopped.setattr(Participant, "short_lock", lambda self: contextlib.nullcontext(False))
            assert kept(-1) == 1
        assert [kept(-1), kept(-1)] == [1, 1]
        assert kept.stats().hits == 1


CELLS = [
    ("def double(x): return 2 * x", "def double(x): return 2 * x + 1", "double"),
    ("FACTOR = 2\ndef double(x): return FACTOR * x", "FACTOR = 3", "double"),
    (
        "class double(int):\n    def __new__(cls, x): return 2 * x",
        "class double(int):\n    def __new__(cls, x): return 2 * x + 1",
        "double",
    ),
    (
        "import enum\nclass Of(enum.Enum):\n    F = 2\n    def __call__(self, x): return self.value * x",
        "class Of(enum.Enum):\n    F = 3\n    def __call__(self, x): return self.value * x",
        "Of.F",
    ),
]


@pytest.mark.parametrize(("cell", "next_cell", "argument"), CELLS)
def test_a_function_or_class_among_the_arguments_counts_with_its_code(
    cell: str, next_cell: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose next cell defines another one of the same name."""
    notebook = types.ModuleType("notebook_of_a_test")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)

    def applied(function: Callable[[int], int], x: int) -> int:
        return function(x)

    with memo(applied) as kept:
        exec(cell, vars(notebook))
        first = eval(argument, vars(notebook))
        assert kept(first, 4) == kept(first, 4) == 8
        assert kept.stats().hits == 1
        exec(next_cell, vars(notebook))
        again = eval(argument, vars(notebook))
        assert kept(again, 4) == kept(again, 4) == again(4) != 8
        assert kept.stats().hits == 2


class _Settings:
    size = 3


@dataclasses.dataclass
class _Square:
    side: int

    def area(self) -> int:
        return self.side**2


_FACTORS = {"gain": 2}


def _gained(number: int) -> int:
    return number * _FACTORS["gain"]


def test_what_is_set_on_a_class_or_changed_below_a_function_among_the_arguments_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def result(part: Any) -> Any:
        return part.size if part is _Settings else part.area() if isinstance(part, _Square) else part(3)

    with memo(result, key="result") as kept:
        assert [kept(_Settings), kept(_Square(2)), kept(_gained)] == [3, 4, 6]
        monkeypatch.setattr(_Settings, "size", 5)
        monkeypatch.setattr(_Square, "area", lambda square: -square.side)
        monkeypatch.setitem(_FACTORS, "gain", 7)
        for _ in range(2):
            assert [kept(_Settings), kept(_Square(2)), kept(_gained)] == [5, -2, 21]
        assert kept.stats().hits == 3


def test_texts_of_numpy_are_paths_as_well(tmp_path: Path) -> None:
    path = tmp_path / "label"

    def read(names: Any) -> str:
        return Path(str(np.ravel(names)[0])).read_text()

    with memo(read) as kept:
        for content in ("one", "another"):
            path.write_text(content)
            for names in (np.array([str(path)]), np.array([str(path)])[0]):
                assert kept(names) == kept(names) == content
        assert kept.stats().hits == 4


def test_an_argument_that_loses_its_identity_while_the_function_runs_is_no_error() -> None:
    def grow(items: list[Any]) -> int:
        items.append(object())
        return len(items)

    with memo(grow) as kept:
        with pytest.warns(hotset.HotsetWarning, match="changed while the function ran"):
            assert kept([1]) == kept([1]) == 2
        assert kept.stats().hits == 0


def test_only_a_function_of_any_keywords_sees_their_order() -> None:
    def named(a: int, b: int, c: int = 0) -> list[int]:
        return [a, b, c]

    def columns(*sizes: int, **named: int) -> list[str]:
        return [f"{name} {size}" for name, size in named.items()]

    with memo(named) as kept:
        assert kept(a=1, b=2) == kept(b=2, a=1) == kept(1, b=2) == [1, 2, 0]
        assert kept.stats().computed == 1
    with memo(columns) as kept:
        for _ in range(2):
            assert kept(1, a=2, b=3) == columns(1, a=2, b=3)
            assert kept(1, b=3, a=2) == columns(1, b=3, a=2)
        assert kept.stats().computed == 2


def test_what_torch_is_set_to_counts() -> None:
    weight = torch.ones(3, requires_grad=True)

    def scaled(factor: int) -> torch.Tensor:
        return weight * factor

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count)

    def squared(size: int) -> torch.Tensor:
        return torch.ones(size, size) @ torch.ones(size, size)

    with memo(scaled) as kept:
        with torch.no_grad():
            assert not kept(2).requires_grad
        with pytest.warns(hotset.HotsetWarning, match="gradient"):  # it is not kept
            assert kept(2).requires_grad
        with torch.no_grad():
            assert not kept(2).requires_grad
        assert kept.stats().hits == 1
    with memo(zeros) as kept:
        assert kept(2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert kept(2).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert kept(2).dtype is torch.float32
        assert kept.stats().hits == 1
    with memo(squared) as kept:
        assert kept(2).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert kept(2).dtype is torch.bfloat16


def test_a_default_without_an_identity_is_that_default() -> None:
    missing = object()

    def look(name: str, default: Any = missing) -> str:
        calls.append(name)
        return name

    calls: list[str] = []
    with memo(look, key="look") as kept:
        assert kept("a") == kept("a", missing) == "a"
        assert len(calls) == 1


def test_a_wrapper_may_have_another_default_than_the_function_that_it_wraps() -> None:
    def scaled(x: int, scale: int = 1) -> list[int]:
        return [x * scale]

    @functools.wraps(scaled)
    def doubled(*args: Any, **named: Any) -> list[int]:
        return scaled(*args, **{"scale": 2, **named})

    with memo(doubled) as kept:
        for _ in range(2):
            assert [kept(3), kept(3, scale=1), kept(3, scale=2), kept(x=3)] == [[6], [3], [6], [6]]


def test_a_default_may_be_an_array() -> None:
    def add(number: int, mean: Any = np.zeros(3)) -> Any:  # noqa: B008
        return number + mean

    with memo(add, key="add") as kept:
        assert difference(kept(1), np.ones(3)) is None
        assert difference(kept(1, np.zeros(3)), np.ones(3)) is None
        assert kept.stats().computed == 1


def test_a_changed_file_is_read_anew_and_takes_the_old_results_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")

    def read(path: str | bytes | Path, folders: tuple[str, ...] = ()) -> str:
        return Path(os.fsdecode(path)).read_text()

    with memo(read) as kept:
        for argument in (str(path), os.fsencode(path), path):
            path.write_text("one")
            assert kept(argument) == kept(argument) == "one"
            path.write_text("another")
            assert kept(argument) == kept(argument) == "another"
        assert kept.stats().entries == 3
        before = path.stat()
        path.write_text("ANOTHER")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert kept(path) == "ANOTHER", "a program can set the one time, but not the other"
        path.write_text("another")
        os.replace(tmp_path / "file", tmp_path / "moved")
        with pytest.raises(FileNotFoundError):
            kept(path)
        assert kept(tmp_path / "moved") == "another"


def test_a_set_of_files_is_one_call_in_whatever_order_its_members_come(tmp_path: Path, log: ReadLog) -> None:
    paths = [str(tmp_path / str(number)) for number in range(20)]
    for path in paths:
        Path(path).touch()
    others = [str(number) for number in range(10_000)]
    one, other = set(paths), {*others, *paths}
    for text in others:
        other.discard(text)
    assert one == other
    assert list(one) != list(other)

    def count(paths: set[str]) -> int:
        log.add(0)
        return len(paths)

    with memo(count, key="count") as kept:
        assert kept(one) == kept(other) == 20
        assert log.total() == 1


def test_wrong_arguments_raise_what_the_function_raises(log: ReadLog) -> None:
    with (
        memo(Decoder(log), key="decoder") as decode,
        pytest.raises(TypeError, match="unexpected keyword argument 'size'"),
    ):
        decode(1, size=3)


class Side(enum.Flag):
    LEFT = 1
    RIGHT = 2


class Bits(enum.IntFlag):
    LOW = 1


class Named(NamedTuple):
    number: int


@dataclasses.dataclass
class HalfSet:
    one: int
    other: int = dataclasses.field(init=False)


def half_set(**values: int) -> HalfSet:
    made = HalfSet(1)
    vars(made).update(values)
    return made


ALIKE = [
    *(Side.LEFT, Side.RIGHT, Side.LEFT | Side.RIGHT, Side(0), Bits(0), Bits(8), Bits.LOW | Bits(8)),
    *(8, 0, 0.0, Named(1), (1,), [1], half_set(), half_set(other=1), half_set(other=2)),
    *("x" * 5000, b"x" * 5000, "x" * 5001, torch.tensor([1j]), torch.tensor([1j]).conj()),
]


def test_arguments_that_differ_have_results_of_their_own() -> None:
    calls = []

    def number_of(value: Any) -> int:
        calls.append(value)
        return len(calls)

    with memo(number_of, key="number_of") as kept:
        numbers = list(range(1, len(ALIKE) + 1))
        assert [kept(value) for value in ALIKE] == numbers
        assert [kept(value) for value in copy.deepcopy(ALIKE)] == numbers


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is a prototype
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def nest(depth: int) -> list[Any]:
    return [nest(depth - 1)] if depth else []


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.spacing = 2.0  # type: ignore[attr-defined]
    return tensor


@dataclasses.dataclass
class Unreadable:
    value: int

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise RuntimeError("working outside of context")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    "argument",
    [
        object(),
        io.BytesIO(b"x"),
        lambda: 1,
        np.zeros(100_000),
        nest(30),
        torch.eye(2).to_sparse(),
        nested_tensor(),
        with_attribute(torch.zeros(2)),
        Unreadable(1),
        np.array([(1, ["x"])], dtype=[("number", int), ("list", object)])[0],
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_without_an_identity_is_computed_each_time_and_said_once(argument: Any) -> None:
    calls = []

    def count(value: Any) -> int:
        calls.append(value)
        return len(calls)

    with memo(count, key="count") as kept:
        with pytest.warns(hotset.HotsetWarning, match="has no identity") as told:
            assert [kept(argument), kept(argument), kept(argument)] == [1, 2, 3]
        (warning,) = told
        assert is_a_sentence(str(warning.message))
        assert kept.stats().entries == 0


# ---- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        2.5,
        "text" * 1000,
        b"",
        [1, "a", None],
        {"image": np.zeros((3, 5, 7), np.uint8), "label": 3},
        (torch.ones(3, 4).T, torch.zeros(0), torch.tensor(1.5)),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        torch.arange(6, dtype=torch.bfloat16),
        np.float32(1.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_hit_is_what_the_function_returns_and_the_callers_own(value: Any) -> None:
    with memo(lambda number: value, key="value") as kept:
        for _ in range(3):
            found = kept(1)
            assert difference(found, value) is None
            if isinstance(found, np.ndarray):
                found += 1
                found -= 1
            elif isinstance(found, dict):
                found["image"][:] = 9
                value["image"][:] = 0
        assert kept.stats().hits == 2


LAYOUTS: list[Callable[[], Any]] = [
    lambda: np.arange(60.0).reshape(3, 4, 5)[:, 1:3, 2:4],
    lambda: np.arange(60.0).reshape(3, 4, 5)[..., ::-1],
    lambda: np.arange(60.0).reshape(3, 4, 5)[::-1, :, ::2],
    lambda: np.arange(60.0).reshape(3, 4, 5).transpose(1, 0, 2)[1:],
    lambda: torch.arange(60.0).view(3, 4, 5)[:, 1:3, 2:4],
    lambda: torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1)[::2],
    lambda: {"crop": torch.rand(3, 300, 300)[:, 10:210, 20:220], "label": (np.arange(9)[::3], 1)},
    lambda: np.frombuffer(b"12345678", np.uint8),
]


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_view_comes_back_as_it_lies(make: Callable[[], Any]) -> None:
    """A sum over a crop adds in another order than one over its dense copy."""
    value = make()
    with memo(lambda number: value, key="layout") as kept:
        for _ in range(3):
            found = kept(1)
            assert difference(found, value) is None
            if isinstance(value, np.ndarray):
                assert (found.strides, found.flags.writeable) == (value.strides, value.flags.writeable)
            elif isinstance(value, dict):
                assert found["crop"].sum((1, 2)).tolist() == value["crop"].sum((1, 2)).tolist()
        assert kept.stats().hits == 2


def test_arrays_that_cannot_be_laid_out_again_are_computed_each_time() -> None:
    for make in (
        lambda: np.broadcast_to(np.arange(3), (4, 3)),
        lambda: np.lib.stride_tricks.sliding_window_view(np.arange(10), 4),
        lambda: torch.arange(3).expand(4, 3),
        lambda: np.arange(1_000_000)[::100_000],
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
    ):
        value = make()
        with memo(lambda number, value=value: value, key="layout") as kept:
            with pytest.warns(hotset.HotsetWarning, match="cannot be kept") as told:
                assert kept(1) is value
            assert is_a_sentence(str(told[0].message))
            assert kept(1) is value


class _Picture:
    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels


@pytest.mark.parametrize(
    "hold", [_Picture, lambda part: OrderedDict(part=part), lambda part: [{"x": (part,)}]]
)
def test_arrays_with_gaps_come_back_with_their_strides_whatever_holds_them(hold: Any) -> None:
    def made(number: int) -> Any:
        pixels = np.arange(60.0).reshape(6, 10) + number
        return [hold(pixels[1:5, 2:7]), hold(torch.from_numpy(pixels)[::2, 1:])]

    def layout(value: Any) -> Any:
        if isinstance(value, _Picture):
            return layout(value.pixels)
        if isinstance(value, (dict, list, tuple)):
            return list(map(layout, value.values() if isinstance(value, dict) else value))
        return value.strides if isinstance(value, np.ndarray) else value.stride(), value.tolist()

    with memo(made, key="made") as kept:
        kept(1)
        assert layout(kept(1)) == layout(made(1))
        assert kept.stats().hits == 1


def _within_itself(number: int) -> Any:
    made: list[Any] = [number]
    made.append(made)
    return made


def _deep(number: int) -> Any:
    made: Any = number
    for _ in range(5_000):
        made = [made]
    return made


@pytest.mark.parametrize("make", [_within_itself, _deep])
def test_a_result_that_contains_itself_or_is_too_deep_is_computed_each_time(make: Any) -> None:
    with memo(make, key="made") as kept:
        with pytest.warns(hotset.HotsetWarning, match="nested too deeply, or contains itself"):
            assert type(kept(1)) is list
        assert type(kept(1)) is list
        assert kept.stats().hits == 0


SIZES = [step * 4096 + more for step in (15, 16, 17, 63, 64, 65, 128, 200) for more in (-300, -1, 0, 1, 200)]


def test_large_results_are_kept_whatever_their_size_and_layout() -> None:
    """They are written from where they lie, in spans of pages: sizes around the borders of these."""

    def made(size: int) -> Any:
        numbers = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        return [
            numbers,
            {
                "turned": numbers[: size // 6 * 6].reshape(2, 3, -1).transpose(2, 0, 1),
                "text": "text" * 20_000,
            },
            torch.from_numpy(numbers.copy())[:-1:2].to(torch.int16),
            numbers[: size // 8 * 8].view("datetime64[us]"),
        ]

    with memo(made, key="made") as kept:
        for size in SIZES:
            kept(size)
        for size in SIZES:
            found, value = kept(size), made(size)
            assert difference(found, value) is None
            assert found[1]["turned"].strides == value[1]["turned"].strides
        assert kept.stats().hits == len(SIZES)
        assert kept.check() == []


def test_results_differ_in_shape_from_call_to_call() -> None:
    with memo(lambda size: np.full((size, size), size), key="square") as kept:
        for _ in range(2):
            for size in (1, 50, 3, 0, 200):
                assert difference(kept(size), np.full((size, size), size)) is None
        assert kept.stats().computed == 5


def test_without_copy_arrays_are_read_only_views_and_tensors_are_copies() -> None:
    with memo(lambda size: np.arange(size), key="numbers", copy=False) as kept:
        kept(1000)
        one, other = kept(1000), kept(1000)
        assert np.shares_memory(one, other)
        with pytest.raises(ValueError, match="read-only"):
            one[0] = 1
        kept.clear()
        assert kept.stats().entries == 0
        for size in range(2000, 2200):
            kept(size)
        assert difference(one, np.arange(1000)) is None, "the memory of a view is never used again"
    assert difference(one, np.arange(1000)) is None, "nor after close()"
    with memo(lambda size: torch.arange(size), key="tensors", copy=False) as kept:
        kept(10)
        kept(10)[0] = 5
        assert int(kept(10)[0]) == 0


# ---- what is not kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.random(),
        lambda: float(np.random.rand()),
        lambda: float(torch.rand(())),
        lambda: secrets.randbelow(1 << 60),
    ],
)
def test_what_draws_is_never_kept_and_draws_what_it_would_have_drawn(draw: Callable[[], Any]) -> None:
    def augment(number: int) -> Any:
        return number + draw()

    with memo(augment, key="augment") as kept:
        seed_everything()
        with pytest.warns(hotset.HotsetWarning, match="draws random numbers") as told:
            found = [kept(1), kept(2), kept(1)]
        assert is_a_sentence(str(told[0].message))
        assert len(told) == 1
        after = rng_states()
        seed_everything()
        expected = [augment(1), augment(2), augment(1)]
        if after == rng_states() and isinstance(found[0], float):
            assert found == expected
        assert found[0] != found[2]
        assert after == rng_states()
        assert kept.stats().entries == 0


def test_a_file_handle_is_returned_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with memo(lambda path: open(path), key="open") as kept:
        with pytest.warns(hotset.HotsetWarning, match="returned what cannot be kept") as told:  # noqa: PT031
            for _ in range(2):
                with kept(str(tmp_path / "file")) as file:
                    assert file.read() == "x"
        assert len(told) == 1
        assert is_a_sentence(str(told[0].message))


def test_an_error_is_the_functions_own_and_is_not_kept() -> None:
    broken = [True]

    def read(number: int) -> int:
        if broken[0]:
            raise KeyError(f"no {number}")
        return number

    with memo(read, key="read") as kept:
        for _ in range(2):
            with pytest.raises(KeyError, match="no 3"):
                kept(3)
        broken[0] = False
        assert kept(3) == 3


def test_a_result_during_which_an_argument_or_a_file_changed_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")

    def consume(items: list[int]) -> int:
        return items.pop()

    def tally(crops: frozenset[Movable]) -> int:
        for crop in crops:
            crop.top += 1
        return len(crops)

    def slow(path: Path) -> str:
        text = path.read_text()
        path.write_text(text + text)
        return text

    with memo(tally, key="tally") as kept, pytest.warns(hotset.HotsetWarning, match="changed while"):  # noqa: PT031
        assert kept(frozenset({Movable(0)})) == 1
        assert kept.stats().entries == 0
    with memo(consume, key="consume") as kept, pytest.warns(hotset.HotsetWarning, match="changed while"):  # noqa: PT031
        assert kept([1, 2]) == 2
        assert kept([1, 2]) == 2
        assert kept.stats().entries == 0
    with memo(slow, key="slow") as kept, pytest.warns(hotset.HotsetWarning, match="changed while") as told:  # noqa: PT031
        assert kept(path) == "one"
        assert kept(path) == "oneone"
        assert is_a_sentence(str(told[0].message))


def test_a_result_larger_than_the_budget_is_computed_and_smaller_ones_are_kept() -> None:
    with memo(lambda size: np.zeros(size, np.uint8), key="zeros", memory="1MiB") as kept:
        with pytest.warns(hotset.HotsetWarning, match="no more results of") as told:  # noqa: PT031
            for _ in range(2):
                assert len(kept(5_000_000)) == 5_000_000
        assert is_a_sentence(str(told[0].message))
        assert eventually(lambda: (kept(1000), kept.stats().entries)[1] == 1), "after the pause"


def test_memory_that_cannot_be_written_costs_the_results_alone() -> None:
    """As where a machine promises no more memory than it has, and has none left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with memo(lambda number: np.full(100_000, number), key="full", memory="64MiB") as kept:
        kept(1)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
            with pytest.warns(hotset.HotsetWarning, match="its file cannot be written"):
                assert difference(kept(2), np.full(100_000, 2)) is None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for number in (1, 2):
            assert difference(kept(number), np.full(100_000, number)) is None
        assert kept.check() == []


def test_what_is_not_a_function_that_returns_its_result_is_refused() -> None:
    async def fetch() -> int:
        return 1

    async def stream() -> Any:
        yield 1

    def rows() -> Iterator[int]:
        yield 1

    wrong: Any
    for wrong, match in (
        (fetch, "a coroutine"),
        (stream, "asynchronous"),
        (rows, "generator"),
        (3, "a function"),
        (staticmethod(len), "write @staticmethod above it"),
        (classmethod(len), "write @classmethod above it"),
    ):
        with pytest.raises(hotset.ArgumentError, match=match) as raised:
            hotset.memo(wrong)
        assert is_a_sentence(str(raised.value))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"copy": 1}, "copy= must be"),
        ({"evict": "fifo"}, "evict= must be"),
        ({"copy": False, "evict": "lru"}, "cannot be combined"),
        ({"copy": False, "session": "x"}, "cannot be combined"),
        ({"session": "x", "spill": "/tmp/x"}, "spill folder"),
        ({"spill": "/no/such/folder/x"}, "does not exist"),
        ({"session": "no such session"}, "session"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(options: dict[str, Any], match: str) -> None:
    with pytest.raises(hotset.HotsetError, match=match) as raised:
        hotset.memo(len, **options)
    assert is_a_sentence(str(raised.value))


# ---- functions -------------------------------------------------------------------------------------------


def test_two_functions_of_one_name_have_results_of_their_own() -> None:
    def make(factor: int) -> Callable[[int], int]:
        def scale(number: int) -> int:
            return number * factor

        return scale

    with memo(make(2)) as one, memo(make(3)) as other:
        assert [one(5), other(5), one(5), other(5)] == [10, 15, 10, 15]
        assert one.stats().computed == other.stats().computed == 1


SCALE = 2
TABLE = {1: 10}


def scaled(number: int) -> int:
    return number * SCALE


def through_another(number: int) -> int:
    return scaled(number) + 1


def row_from_table(number: int) -> Any:
    return np.full(300, number + TABLE[1])


def from_table(number: int) -> int:
    return TABLE[1] + number


class OfGlobal:
    def __init__(self) -> None:
        self.offset = 0

    def __call__(self, number: int) -> int:
        return number * SCALE + self.offset


def test_a_name_that_is_bound_anew_makes_it_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late configuration, a notebook's next cell: neither stale values, nor values for other programs."""
    with memo(functools.partial(scaled)) as kept, memo(OfGlobal()) as called:
        for scale in (2, 3):
            monkeypatch.setitem(globals(), "SCALE", scale)
            assert [kept(1), called(1)] == [scale, scale]
    with memo(scaled) as kept, memo(through_another) as outer:
        monkeypatch.setitem(globals(), "SCALE", 2)
        assert [kept(1), outer(1)] == [2, 3]
        monkeypatch.setitem(globals(), "SCALE", 3)
        assert [kept(1), kept(6), outer(1)] == [3, 18, 4]
        monkeypatch.setitem(globals(), "SCALE", 2)
        assert [kept(1), kept(6), outer(1)] == [2, 12, 3]
        monkeypatch.setitem(globals(), "scaled", lambda number: 100)
        assert outer(1) == 101
    factor = 2

    def closure(number: int) -> int:
        return number * factor

    with memo(closure) as kept:
        assert kept(5) == 10
        factor = 3
        assert kept(5) == 15


def test_what_is_changed_in_place_leaves_no_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TABLE", {1: 10})
    with memo(from_table) as kept:
        assert kept(1) == 11
        TABLE[1] = 20
        with pytest.warns(hotset.HotsetWarning, match="reaches an object that changes") as told:  # noqa: PT031
            for number in range(2, 200):
                assert kept(number) == 20 + number
                time.sleep(1e-3)
        assert is_a_sentence(str(told[0].message))
        assert [kept(1), kept(2)] == [21, 22]
        TABLE[1] = 10
        with memo(from_table) as other:
            wrong = [number for number in range(2, 200) if other(number) != 10 + number]
        assert wrong == []


def test_views_of_wrong_values_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TABLE", {1: 10})
    with memo(row_from_table, memory="1MiB", copy=False) as kept:
        kept(1)
        view = kept(1)
        assert not view.flags.owndata
        assert not view.flags.writeable
        TABLE[1] = 20

        def until_it_is_noticed() -> None:
            for number in range(2, 300):
                if kept.stats().calls:
                    kept(number)
                    time.sleep(1e-2)

        with pytest.warns(hotset.HotsetWarning, match="reaches an object that changes"):
            until_it_is_noticed()
        block = functools.partial(np.full, 2000)
        with memo(block, key="others", memory="1MiB", evict="lru") as others:
            for number in range(200):
                others(number)
            assert 0 < others.stats().entries < 200, "all lines have been used"
        assert (view == 11).all()


COUNT = 0


def counted(number: int) -> int:
    global COUNT
    COUNT += 1
    return number


def test_a_global_that_a_function_binds_itself_is_its_own_state() -> None:
    with memo(counted) as kept:
        for number in range(100):
            assert kept(number % 50) == number % 50
        assert kept.stats().hits == 50


def test_names_that_are_bound_anew_all_the_time_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with memo(scaled) as kept:
        with pytest.warns(hotset.HotsetWarning, match="reaches an object that changes") as told:  # noqa: PT031
            for scale in range(1000, 1050):
                monkeypatch.setitem(globals(), "SCALE", scale)
                assert kept(1) == scale
        assert len(told) == 1


def test_more_functions_than_there_are_places_are_computed_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotset.store.key_table.FUNCTIONS", 3)
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(memo(len, key=f"{number}")) for number in range(4)]
        assert [each("ab") for each in kept[:3]] == [2] * 3
        with pytest.warns(hotset.HotsetWarning, match="none is left") as told:
            assert [kept[3]("ab"), kept[3]("ab")] == [2, 2]
        assert len(told) == 1


def test_methods_and_decorated_functions(log: ReadLog) -> None:
    @dataclasses.dataclass(frozen=True)
    class Reader:
        scale: int

        @hotset.memo(memory="1MiB", key="read")
        def read(self, number: int) -> int:
            """Read."""
            log.add(number)
            return number * self.scale

    assert [Reader(2).read(3), Reader(2).read(3), Reader(5).read(3)] == [6, 6, 15]
    assert log.total() == 2
    assert Reader.read.__doc__ == "Read."
    assert Reader.read.__name__ == "read"
    assert Reader.read.__wrapped__(Reader(7), 1) == 7
    Reader.read.close()


class Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle = (number for number in range(3))

    def read(self, number: int) -> int:
        return number


def test_a_method_of_an_object_that_cannot_be_described_is_kept_for_forked_processes() -> None:
    kept = hotset.memo(Unpicklable().read, memory="1MiB")
    with pytest.warns(hotset.HotsetWarning, match="forked processes alone") as told:
        assert [kept(1), kept(1)] == [1, 1]
    assert is_a_sentence(str(told[0].message))
    assert kept.stats().hits == 1
    kept.close()


def test_a_function_calls_itself_and_another() -> None:
    calls = []

    def halves(number: int) -> int:
        calls.append(number)
        return number // 2

    def fibonacci(number: int) -> int:
        calls.append(number)
        return number if number < 2 else kept(number - 1) + kept(number - 2) + 0 * other(number)

    with memo(fibonacci, key="f") as kept, memo(halves, key="h") as other:
        assert kept(30) == 832040
        assert len(calls) == 31 + 29


def test_a_call_within_one_of_the_same_arguments_is_not_kept_and_the_outer_one_is() -> None:
    depths = []

    def deep(number: int) -> list[int]:
        depths.append(number)
        return [*kept(number), number] if len(depths) < 3 else []

    with memo(deep, key="deep") as kept:
        assert kept(7) == [7, 7]
        assert kept(7) == [7, 7]
        assert kept.stats().hits == 1
        assert len(depths) == 3


def test_after_close_it_is_the_function(log: ReadLog) -> None:
    with memo(Decoder(log), key="decoder") as decode:
        first = decode(3)
    assert difference(decode(3), first) is None
    assert log.total() == 2
    assert decode.check() == []
    assert decode.stats().calls == 0
    decode.clear()
    decode.close()


def test_clear_forgets_the_results_of_this_function_alone(log: ReadLog) -> None:
    with memo(Decoder(log), key="a") as one, memo(Decoder(log), key="b") as other:
        one(1), other(1)
        one.clear()
        assert (one.stats().entries, other.stats().entries) == (0, 1)
        one(1), other(1)
        assert log.total() == 3


@pytest.mark.parametrize("copies", [True, False])
def test_what_was_being_computed_as_the_function_was_cleared_is_not_served_later(copies: bool) -> None:
    world = [0]
    begun, cleared, waits = (os.pipe() for _ in range(3))

    def read(number: int) -> Any:
        found = np.full(300, number + world[0])
        if world[0] == 0:
            os.write(begun[1], b"x")
            os.read(cleared[0], 1)
        return found

    def wait_for_the_other() -> None:
        world[0] = 5
        os.write(waits[1], b"x")
        os._exit(int(kept(1)[0] != 6))

    with memo(read, key="read", copy=copies) as kept:
        first = child(lambda: kept(1))
        os.read(begun[0], 1)
        waiting = child(wait_for_the_other)
        os.read(waits[0], 1)
        kept.clear()
        world[0] = 5
        assert kept(1)[0] == 6, "it does not wait for a result from before"
        os.write(cleared[1], b"x")
        for pid in first, waiting:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert kept(1)[0] == 6
        assert (kept.stats().entries, kept.stats().bytes) == (1, 256 * 10)


def test_functions_share_one_budget_and_the_largest_counts() -> None:
    def block(number: int) -> np.ndarray[Any, Any]:
        return np.full(100_000, number, np.uint8)

    with memo(block, key="a", memory="1MiB") as one, memo(block, key="b", memory="2MiB") as other:
        with pytest.warns(hotset.HotsetWarning, match="no more results"):  # noqa: PT031
            for number in range(12):
                one(number), other(number)
        both = one.stats().bytes + other.stats().bytes
        assert parse_bytes("1MiB") < both <= parse_bytes("2MiB")


# ---- processes and threads -------------------------------------------------------------------------------


class Windows(Dataset[Any]):
    """Overlapping windows of eight frames, as a video's."""

    def __init__(self, decode: Any, frames: int) -> None:
        self.decode, self.frames = decode, frames

    def __len__(self) -> int:
        return self.frames - 7

    def __getitem__(self, first: int) -> torch.Tensor:
        return torch.stack([self.decode(number) for number in range(first, first + 8)])


@pytest.mark.parametrize("method", rarely(["fork", "spawn", "forkserver"], "spawn", "forkserver"))
def test_workers_compute_each_result_once(method: str, log: ReadLog) -> None:
    with memo(Decoder(log, 0.001), key="decoder") as decode:
        loader = DataLoader(
            Windows(decode, 40),
            4,
            num_workers=2,
            multiprocessing_context=method,
            persistent_workers=method != "fork",  # others import torch
        )
        for _ in range(2):
            batches = list(loader)
            assert difference(batches, list(DataLoader(Plain(40), 4))) is None
        del loader
        stats = decode.stats()
        assert stats.calls == 2 * 33 * 8
        assert stats.computed == 40
        assert log.total() == 40 + stats.audited, "spawned workers audit"


class Plain(Windows):
    def __init__(self, frames: int) -> None:
        super().__init__(lambda number: torch.arange(100) * number, frames)


PROGRAM = """
import multiprocessing, os, pickle, sys
import hotset, hotset.memoize.calls

hotset.memoize.calls._AUDITED_SHARE = 0.0  # what follows depends on the process

@hotset.memo(memory="8MiB")
def place(number: int) -> tuple[int, int]:
    return number, os.getpid()

def call(number):
    return place(number)

if __name__ == "__main__":
    found = place(4)
    assert len(pickle.dumps(place)) < 200
    assert pickle.loads(pickle.dumps(place)) is place
    for number, method in enumerate(sys.argv[1:]):
        # One process where each imports torch.
        with multiprocessing.get_context(method).Pool(2 if method == "fork" else 1) as pool:
            assert pool.map(call, [4, 4, 4]) == [found] * 3, method
            by_worker = pool.apply(call, (100 + number,))
        assert place(100 + number) == by_worker, method
        assert by_worker[1] != os.getpid()
    place.close()
    print("same")
"""


def test_a_decorated_function_of_a_program_is_shared_and_pickles_by_its_name(
    programs: Programs, tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    methods = ("fork", "spawn", "forkserver")[: often(2, 3)]
    run = programs.run([str(path), *methods], tmp_path)
    assert (run.stdout, run.stderr) == ("same\n", "")


def test_threads_compute_each_result_once(log: ReadLog) -> None:
    with memo(Decoder(log, 0.01), key="decoder") as decode:

        def body(thread: int) -> None:
            for number in range(8):
                assert difference(decode(number), torch.arange(100) * number) is None

        in_threads(4, body)
        assert sorted(log.order()) == list(range(8))


def test_a_forked_child_in_the_midst_of_a_computation_goes_on_by_itself(log: ReadLog) -> None:
    def forks(number: int) -> tuple[int, int]:
        return number, os.fork()

    with memo(forks, key="forks") as kept:
        number, pid = kept(5)
        if not pid:
            os._exit(0 if number == 5 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert kept(5) == (5, pid)


def test_a_killed_process_holds_nobody_up(log: ReadLog) -> None:
    with memo(Decoder(log, 30.0), key="decoder") as decode:
        pid = child(lambda: decode(1))
        assert eventually(lambda: log.total() == 1)
        kill(pid)
        decode.__wrapped__.seconds = 0.0
        begun = time.monotonic()
        decode(1)
        assert time.monotonic() - begun < 10.0
        assert log.total() == 2
        assert decode.stats().entries == 1


def test_a_child_that_ends_at_once_leaves_its_result(log: ReadLog) -> None:
    with memo(Decoder(log), key="decoder") as decode:
        in_child(lambda: decode(7))
        assert difference(decode(7), torch.arange(100) * 7) is None
        assert log.total() == 1


def test_a_stopped_process_is_waited_for_boundedly(log: ReadLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.memoize.calls._PATIENCE_SECONDS", 0.2)
    with memo(Decoder(log, 0.01), key="decoder") as decode:
        decode(0)
        decode.__wrapped__.seconds = 30.0
        pid = child(lambda: decode(1))
        assert eventually(lambda: log.total() == 2)
        stop(pid)
        decode.__wrapped__.seconds = 0.0
        assert difference(decode(1), torch.arange(100)) is None
        kill(pid)


def test_an_interrupted_call_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.memoize.calls._PATIENCE_SECONDS", 0.2)
    with memo(multiples, key="multiples") as kept:
        kept(0)
        numbers = itertools.count(1)
        now = [0]

        def call() -> None:
            now[0] = next(numbers)
            kept(now[0])

        for _ in interrupted_everywhere(call):
            in_threads(1, lambda _: kept(now[0]))
        assert kept.stats().uncached == 0, "who finds a claim that was left keeps nothing"


class Pairs(Dataset[Any]):
    def __init__(self, decode: Any) -> None:
        self.decode = decode

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.decode(index) + self.decode((index + 1) % 20)


def multiples(number: int) -> torch.Tensor:
    return torch.arange(100) * number


def test_a_dataset_that_holds_a_memoised_function_can_be_cached() -> None:
    with memo(multiples) as decode:
        first = fingerprint(Pairs(decode))
        decode(0)
        assert fingerprint(Pairs(decode)) == first, "what was called does not count"
        assert fingerprint(Pairs(str.upper)) != first
        with hotset.cache(Pairs(decode), memory="1MiB") as cached:
            for _ in range(2):
                found = list(DataLoader(cached, 5, num_workers=2))
                assert difference(found, list(DataLoader(Pairs(multiples), 5))) is None
        copied = copy.deepcopy(Pairs(decode))
        assert difference(copied[3], torch.arange(100) * 7) is None
        assert decode.stats().computed == 20
        copied.decode.close()


# ---- honesty ---------------------------------------------------------------------------------------------


def test_an_audit_finds_a_function_that_depends_on_more_than_its_arguments() -> None:
    world = [0]

    def read(number: int) -> int:
        time.sleep(1e-4)
        return number + world[0]

    with memo(read, key="read") as kept:
        assert kept(1) == 1
        world[0] = 5
        with pytest.warns(hotset.HotsetWarning, match="depends on more than its arguments") as told:
            assert eventually(lambda: kept(1) == 6)
        assert is_a_sentence(str(told[0].message))
        assert [kept(1), kept(2)] == [6, 7]
        world[0] = 7
        assert [kept(1), kept(2)] == [8, 9]


def test_what_was_being_computed_as_an_audit_found_a_difference_is_not_served() -> None:
    world = [0]

    def read(number: int) -> int:
        found = number + world[0]
        if (number, world[0]) == (2, 0):
            world[0] = 5
            with pytest.warns(hotset.HotsetWarning, match="depends on more than its arguments"):
                assert eventually(lambda: kept(1) == 6)
        return found

    with memo(read, key="read") as kept:
        assert [kept(1), kept(2)] == [1, 2]
        assert [kept(1), kept(2)] == [6, 7]
        assert kept.stats().entries == 0


def test_what_a_function_raises_in_an_audit_is_not_the_callers() -> None:
    fails = [False]

    def read(number: int) -> int:
        if fails[0]:
            raise OSError("the file server does not answer")
        return number

    with memo(read, key="read") as kept:
        kept(1)
        fails[0] = True
        assert eventually(lambda: kept(1) == 1 and kept.stats().audited >= 3)


def test_an_identity_of_the_users_must_be_one() -> None:
    with memo(len, key="len") as kept:
        with pytest.raises(hotset.ArgumentError, match=r"identity= must consist of .*, got an object"):
            kept.get((object(),), lambda: 1)
        assert kept.get(("a", 1), lambda: 1) == 1


def test_an_audit_moves_no_generator() -> None:
    with memo(lambda number: number + 0 * len(str(torch.get_rng_state())), key="steady") as kept:
        kept(1)
        seed_everything()
        before = rng_states()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            kept(1)
        assert rng_states() == before
        assert kept.stats().computed == 1, "what an audit computes is not counted"


# ---- room ------------------------------------------------------------------------------------------------


def test_least_recently_used_results_make_room_where_that_was_asked_for() -> None:
    calls = []

    def block(number: int) -> np.ndarray[Any, Any]:
        calls.append(number)
        return np.full(100_000, number, np.uint8)

    with memo(block, key="lru", memory="1MiB", evict="lru") as kept:
        for number in range(40):
            assert (kept(number) == number).all()
            time.sleep(0.002)  # the clock of uses counts milliseconds
            assert (kept(0) == 0).all()
        assert calls.count(0) == 1, "used all the time"
        assert kept(39)[0] == 39
        assert calls.count(39) == 1
        assert kept(1)[0] == 1
        assert calls.count(1) == 2, "given up"
        assert kept.stats().entries >= 8


def test_more_calls_than_there_are_places_are_told_though_results_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotset.store.keyed_store._MOST", 1024)
    with memo(lambda number: number + 1, key="places", memory="1MiB", evict="lru") as kept:
        assert [kept(number) for number in range(1024)] == list(range(1, 1025))
        with pytest.warns(hotset.HotsetWarning, match="1,024 different calls, one for each place") as told:
            assert [kept(number) for number in range(1020, 1030)] == list(range(1021, 1031))
        assert len(told) == 1
        assert is_a_sentence(str(told[0].message))
        assert kept.stats().entries == 1024


def test_what_cannot_be_kept_just_now_is_kept_later_and_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with memo(lambda number: number + 1, key="busy", memory="1MiB") as kept:
        assert kept(1) == 2
        with monkeypatch.context() as busy:
            # The lock is taken, by a process that was stopped.
            busy.setattr(Participant, "short_lock", lambda self: contextlib.nullcontext(False))
            assert kept(2) == 3
        assert [kept(2), kept(2)] == [3, 3]
        assert kept.stats().hits == 1


def test_what_is_kept_stays_where_nothing_else_was_asked_for() -> None:
    calls = []

    def block(number: int) -> np.ndarray[Any, Any]:
        calls.append(number)
        return np.full(100_000, number, np.uint8)

    with memo(block, key="stays", memory="1MiB") as kept:
        with pytest.warns(hotset.HotsetWarning, match='evict="lru" replaces'):  # noqa: PT031
            for number in range(20):
                kept(number)
        for number in range(9):
            assert kept(number)[0] == number
        assert all(calls.count(number) == 1 for number in range(9))


def test_results_of_a_function_whose_code_changed_go_first() -> None:
    def make(version: int) -> Callable[[int], np.ndarray[Any, Any]]:
        def block(number: int) -> np.ndarray[Any, Any]:
            return np.full(100_000, number + version, np.uint8)

        return block

    with memo(make(0), memory="1MiB") as old, memo(make(1), memory="1MiB") as new:
        for number in range(9):
            old(number)
        new.stats()  # enters the function
        with pytest.warns(hotset.HotsetWarning, match="no more results"):
            assert [int(new(number)[0]) for number in range(9)] == list(range(1, 10))
        assert old.stats().entries == 9, "it is in use"
        old.close()
        time.sleep(0.6)  # after which room is looked for again
        for _ in range(2):
            assert [int(new(number)[0]) for number in range(9)] == list(range(1, 10))
        assert new.stats().entries == 9


def test_what_memory_has_no_room_for_goes_to_the_spill(tmp_path: Path) -> None:
    calls = []

    def block(number: int) -> np.ndarray[Any, Any]:
        calls.append(number)
        return np.full(100_000, number, np.uint8)

    with memo(block, key="spilled", memory="1MiB", spill=tmp_path / "spill") as kept:
        for _ in range(2):
            for number in range(30):
                assert (kept(number) == number).all()
        assert len(calls) == 30
        assert kept.stats().entries == 30
        kept.clear()
        assert kept(29)[0] == 29
        assert len(calls) == 31


def test_threads_of_a_worker_that_call_a_function_first_are_one_user_of_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two the store would stay open after the function is closed."""
    raise_budget = MemoStore.raise_budget

    def slowly(store: MemoStore, memory: int | str) -> None:
        time.sleep(0.2)
        raise_budget(store, memory)

    with hotset.memo(str.lower, memory="1MiB"):
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())  # as in a loader's worker
        kept = hotset.memo(str.upper, memory="1MiB")
        monkeypatch.setattr(MemoStore, "raise_budget", slowly)
        in_threads(2, lambda _: kept("a"))
        (store,) = {id(each): each for each in gc.get_objects() if type(each) is MemoStore}.values()
    assert store.store() is not None
    kept.close()
    assert store.store() is None


def test_a_function_keeps_its_results_though_the_last_other_one_is_closed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread has found the store, and has not been counted as a user yet."""
    opening, closed = threading.Event(), threading.Event()
    raise_budget = MemoStore.raise_budget

    def slowly(store: MemoStore, memory: int | str) -> None:
        opening.set()
        closed.wait(0.2)
        raise_budget(store, memory)

    made: list[Any] = []
    first = hotset.memo(str.upper, memory="1MiB")
    monkeypatch.setattr(MemoStore, "raise_budget", slowly)
    other = threading.Thread(target=lambda: made.append(hotset.memo(str.lower, memory="1MiB")))
    other.start()
    opening.wait()
    first.close()
    closed.set()
    other.join()
    with made[0] as lower:
        assert (lower("A"), lower("A"), lower.stats().hits) == ("a", "a", 1)
