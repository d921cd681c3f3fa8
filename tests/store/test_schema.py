"""The schema: what is taken in comes out indistinguishable, and what could not is refused with a sentence.

``differs`` (see ``hotset.determinism.equality``) says what indistinguishable means; the random trees at the
end hold the schema to it. Before them stands what each kind of leaf and group promises, and what misfits it.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import importlib
import json
import os
import sys
import threading
import uuid
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import helpers
import numpy as np
import pytest
import samples
import subclasses
import torch
from helpers import often
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from torch.utils.data import default_collate

from hotset.determinism.aliasing import copied
from hotset.determinism.equality import differs
from hotset.errors import ArgumentError, SegmentError
from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.codecs import register_codec
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.schema import Schema
from hotset.store.leaves.tensor_leaf import TORCH_DTYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of a tree that failed
]
fuzz = settings(max_examples=often(80, 400), deadline=None, database=None)


def reread(schema: Schema) -> Schema:
    """The schema as another process has it: through JSON text."""
    return Schema.from_json(json.loads(json.dumps(schema.to_json())))


def records(schema: Schema, values: Sequence[object]) -> list[Any]:
    """The samples, written and read again together, in memory that held something else before."""
    prepared = schema.prepare_all(values)
    rows, tails, at = 64, [], 64 + schema.stride * len(values)
    for one in prepared:
        tails.append(at)
        at += one.tail_bytes
    buffer = bytearray(b"\xa5" * (at + 16))
    for place, one in enumerate(prepared):
        schema.write(buffer, rows + place * schema.stride, one, 5 if schema.has_tail else 0, tails[place])
    if not schema.has_tail:
        together = bytearray(b"\xa5" * len(buffer))
        schema.write_rows(together, rows, prepared)
    found = schema.read(buffer, rows, tails)
    if not schema.has_tail:
        again = schema.read(together, rows, tails)
        assert [how for one, other in zip(again, found, strict=True) if (how := differs(one, other))] == []
    assert misaligned(found) == []
    return found


def misaligned(samples: list[Any]) -> list[str]:
    """Tensors that do not lie where their dtype may: touching one of 16 bytes an item is a SIGSEGV."""
    tensors = [leaf for leaf in helpers.leaves(samples) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return [f"{t.dtype} at {t.data_ptr():#x}" for t in tensors if t.data_ptr() % t.itemsize]


def altered(schema: Schema, *values: object) -> list[str]:
    """Which of these samples another end of a segment would not give back as they are."""
    found = []
    for view in (schema, reread(schema)):
        for value, got in zip(values, records(view, values), strict=True):
            how = differs(got, value)
            found += [f"{value!r}: {how}"] if how else []
    return found


def comes_out(schema: Schema, *values: object) -> None:
    assert altered(schema, *values) == []


def fits(schema: Schema, value: object) -> bool:
    try:
        schema.prepare(value)
    except SchemaMismatch as misfit:
        return not str(misfit)
    return True


def exchanged(first: Sequence[object], value: object) -> list[str]:
    """How a schema of others alters a sample: refused it may be, but not given back as something else."""
    found = []
    for keep_order in (True, False):
        try:
            schema = Schema.infer(first, keep_order=keep_order)
            if fits(schema, value):
                found += altered(schema, value)
        except SchemaMismatch:
            continue
        except Exception as error:  # a user's training would end with it
            found.append(f"{value!r} after {first!r}: {type(error).__name__}: {error}")
    return found


def all_exchanged(pairs: Iterable[tuple[Any, Any]]) -> list[str]:
    return [how for first, later in pairs for how in exchanged([first], later)]


# Every kind of leaf, in every kind of group

MAKERS: list[Callable[[int], Any]] = [
    *(samples.image_and_label, samples.number, samples.mapping, samples.ordered_mapping, samples.named),
    *(samples.text, samples.bfloat_and_half, samples.zero_d_and_empty, samples.permuted, samples.strided),
    *(samples.ragged, samples.ragged_pair, samples.ragged_two_ways, samples.jpeg_like, samples.none_inside),
    *(subclasses.boxes_and_masks, subclasses.meta_tensors, subclasses.images, subclasses.fixed_image),
]


@pytest.mark.parametrize("keep_order", [True, False])
def test_samples_come_out_as_they_went_in(keep_order: bool) -> None:
    for make in (*MAKERS, samples.nested):
        comes_out(Schema.infer([make(1), make(2)], keep_order=keep_order), *(make(i) for i in range(8)))


def test_every_dtype_of_torch_in_every_form() -> None:
    for name, dtype in TORCH_DTYPES.items():
        for shape in ((), (3,), (2, 3), (0,), (2, 0, 3)):
            size = int(np.prod(shape)) * dtype.itemsize
            raw = torch.arange(size, dtype=torch.uint8) % 2 * (1 if dtype is torch.bool else 97)
            tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
            strided = torch.empty((*shape, 2), dtype=dtype)[..., 0].copy_(tensor)
            wider = torch.zeros((4,) * len(shape), dtype=dtype)
            for first in ([tensor], [tensor, wider]):
                assert fits(Schema.infer(first, keep_order=True), strided), name
                comes_out(Schema.infer(first, keep_order=True), tensor, strided)


NUMPY_DTYPES = (
    "? b B <h >h <H >H <i >i <l >l <L >L <e >e <f >f <d >d <g <F >F <D <G <U3 >U3 S1 S5 <M8[s] >M8[D]"
)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_every_dtype_of_numpy_in_every_form(shape: tuple[int, ...]) -> None:
    for name in NUMPY_DTYPES.split():
        array = (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype("i8").astype(name)
        forms = array, array.copy(order="F"), array[..., None][..., 0]
        comes_out(Schema.infer([array], keep_order=True), array, *(f for f in forms if f.shape != (2, 3)))
        if shape == () and array.dtype.kind not in "US":
            comes_out(Schema.infer([array[()]], keep_order=True), array[()], array[()])


def test_every_python_scalar() -> None:
    values = [True, 1, -(2**63), 2**63 - 1, 0.1, -0.0, float("nan"), -float("inf"), 5e-324, -0.0j, None]
    for value in values:
        comes_out(Schema.infer([value], keep_order=True), value, value)
    comes_out(Schema.infer([values], keep_order=True), values)


def test_every_numpy_scalar() -> None:
    for code in "?bBhHiIlLefdgFDG":
        kind = np.dtype(code).type
        comes_out(Schema.infer([kind(1)], keep_order=True), kind(1), kind(0))
    moment = np.datetime64("2026-01-01T00:00:01", "us")
    schema = Schema.infer([moment], keep_order=True)
    comes_out(schema, moment, np.datetime64("NaT", "us"))
    assert not fits(schema, np.datetime64("2026-01-01", "s"))


def test_scalars_of_a_type_that_shares_its_dtype_with_another_are_not_exchanged() -> None:
    """``np.longlong`` has the dtype of ``np.int64``, and is another type."""
    kinds = (np.int64, np.longlong, np.uint64, np.ulonglong, np.intc, np.uintc)
    assert all_exchanged((one(1), two(1)) for one in kinds for two in kinds) == []


def test_arrays_whose_dtype_is_equal_to_that_of_another_type_come_out_with_their_own() -> None:
    codes = ("l", "q", "L", "Q", ">l", ">q")
    for dtype in (*map(np.dtype, codes), np.dtype([("x", "q")])):
        arrays = [np.ones(n, dtype) for n in (1, 2, 2)]
        for schema in (Schema.infer(arrays, keep_order=True), Schema.infer(arrays[1:], keep_order=True)):
            for found in records(schema, arrays[1:]):
                assert [type(each) for each in found.tolist()] == [type(each) for each in arrays[1].tolist()]
                assert type(found[0]) is type(arrays[1][0])
                assert found.dtype.byteorder == dtype.byteorder
            others = [np.dtype(code) for code in codes if np.dtype(code).char != dtype.char]
            assert not any(fits(schema, np.ones(2, other)) for other in others)


def test_tensors_of_sixteen_bytes_an_item_can_be_touched() -> None:
    """In each of several records that lie one behind the other, beside leaves of other sizes."""
    larger = [[np.array(["of 20"]), 1.5], [np.ones(1, "G"), 1.5]]  # items
    for beside in (None, 1, "text", torch.ones(3, dtype=torch.uint8), *larger):
        for shape in ((), (3,)):
            sample: list[Any] = [torch.full(shape, 1 + 2j, dtype=torch.complex128), beside]
            schema = Schema.infer([sample], keep_order=True)
            check_layout(schema)
            for got in records(schema, [sample] * 5):
                assert torch.equal(got[0] + 0, sample[0])
                assert got[0].data_ptr() % 16 == 0


def test_every_kind_of_text() -> None:
    texts = [
        "",
        "plain",
        "näïve",
        "🙂" * 300,
        "\ud800",
        "\udcff\ud83d\ude00",
        "nul\0inside",
        "\r\n",
        "\ufeff" * 3,
    ]
    comes_out(Schema.infer(["x"], keep_order=True), *texts)
    comes_out(
        Schema.infer([b"x"], keep_order=True), *(text.encode("utf-8", "surrogatepass") for text in texts)
    )


class Weekday(enum.Enum):
    MONDAY = 1
    TUESDAY = (2, "two")
    DIENSTAG = (2, "two")  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 7


class Spelled(str, enum.Enum):
    A = "a"
    B = "b"


class Flags(enum.Flag):
    A = 1
    B = 2


def test_members_of_enumerations() -> None:
    for kind in (Weekday, Level, Spelled, Flags):
        comes_out(Schema.infer([next(iter(kind))], keep_order=True), *kind)
    assert not fits(Schema.infer([Weekday.MONDAY], keep_order=True), Level.LOW)


def test_flags_that_are_no_single_member_are_kept_or_refused() -> None:
    flags = [Flags.A, Flags.A | Flags.B, Flags(0)]
    assert all_exchanged((one, two) for one in flags for two in flags) == []


# Dense arrays keep the order in which their dimensions lie

ORDERS = [
    torch.arange(24).reshape(2, 3, 4),
    torch.arange(24).reshape(3, 4, 2).permute(2, 0, 1),
    torch.arange(24).reshape(4, 3, 2).permute(2, 1, 0),
    torch.arange(1).reshape(1, 1, 1),
    torch.arange(12).reshape(3, 4, 1).permute(2, 0, 1),
    torch.arange(2).reshape(1, 1, 2).permute(2, 0, 1),
    torch.empty(3, 0, 2, dtype=torch.int64).permute(2, 0, 1),
    torch.arange(96).reshape(4, 6, 4)[::2, ::2],
    torch.arange(4).expand(2, 3, 4),
]


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_arrays_of_whatever_order_come_out_in_their_own_or_are_refused(library: str) -> None:
    """A picture read from a grey file lies as it counts, one from a colour file does not."""
    arrays: list[Any] = ORDERS if library == "torch" else [tensor.numpy() for tensor in ORDERS]
    wide: Any = torch.zeros(5, 5, 5, dtype=torch.int64)
    wide = wide if library == "torch" else wide.numpy()
    found = all_exchanged((one, two) for one in arrays for two in arrays)
    for one in arrays:
        for two in arrays:
            found += exchanged([one, wide], two) + exchanged([one, wide.swapaxes(0, 2)], two)
    assert found == []


def test_the_order_of_the_first_sample_is_kept() -> None:
    """The refusal above must not be the way out for what can be given back."""
    for tensor in ORDERS:
        for keep_order in (True, False):
            comes_out(Schema.infer([tensor], keep_order=keep_order), tensor, tensor + 1)
    lying = [tensor.permute(2, 0, 1) for tensor in (torch.zeros(4, 5, 3), torch.zeros(6, 2, 3))]
    comes_out(Schema.infer(lying, keep_order=True), *lying)


def test_values_that_torch_keeps_lazily_are_stored_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (z.conj(), z.conj().imag, z[0].conj()):
        schema = Schema.infer([lazy], keep_order=True)
        comes_out(schema, lazy)
        assert torch.equal(records(schema, [lazy])[0], lazy)


def test_arrays_come_out_as_nobody_elses_memory_and_read_only_if_they_were() -> None:
    sample = [torch.arange(4), np.arange(6.0)]
    for got in records(Schema.infer([sample], keep_order=True), [sample, sample]):
        got[0][:] = 0
        got[1][:] = 0
    assert differs(sample, [torch.arange(4), np.arange(6.0)]) is None
    for fixed in (np.frombuffer(b"abcdef", np.uint8), np.broadcast_to(np.arange(3), (2, 3))):
        schema = Schema.infer([[fixed]], keep_order=True)
        for again in (schema, reread(schema)):
            for got in records(again, [[fixed], [fixed]]):
                assert not got[0].flags.writeable
                assert differs(got, [fixed]) is None
        with pytest.raises(SchemaMismatch, match=r"\[0\]: an array that can be written to among"):
            schema.prepare([fixed.copy()])
    with_unit = np.zeros(2, np.dtype("f4", metadata={"unit": "mm"}))
    with pytest.raises(SchemaMismatch, match="dtype has metadata"):
        Schema.infer([with_unit], keep_order=True)


# Who does not fit, and what is said

FIRST: dict[str, Any] = {
    "image": torch.zeros(2, 3),
    "meta": [1, 2.0, "x", None, b"y", True],
    "box": samples.Pair(np.zeros(4), 3),
}


def _image(value: object) -> dict[str, Any]:
    return FIRST | {"image": value}


def _meta(place: int, value: object) -> dict[str, Any]:
    return FIRST | {"meta": [*FIRST["meta"][:place], value, *FIRST["meta"][place + 1 :]]}


MISFITS: dict[str, tuple[Any, str]] = {
    "another shape": (_image(torch.zeros(3, 2)), "['image']: shape (3, 2) instead of (2, 3)"),
    "more dimensions": (_image(torch.zeros(2, 3, 1)), "['image']: torch.float32 with 3 dimensions"),
    "another dtype": (_image(torch.zeros(2, 3).half()), "['image']: torch.float16"),
    "another library": (_image(np.zeros((2, 3), np.float32)), "['image']: ndarray instead of"),
    "a parameter": (_image(torch.nn.Parameter(torch.zeros(2, 3))), "['image']: Parameter instead of"),
    "a gradient": (_image(torch.zeros(2, 3, requires_grad=True)), "['image']: a tensor that requires"),
    "a sparse tensor": (
        _image(torch.zeros(2, 3).to_sparse()),
        "a torch.sparse_coo tensor on cpu; only dense ones",
    ),
    "a meta tensor": (_image(torch.zeros(2, 3, device="meta")), "only dense ones on the CPU"),
    "a missing key": ({"image": FIRST["image"], "meta": FIRST["meta"]}, "the sample: other keys"),
    "one key more": (FIRST | {"more": 1}, "the sample: other keys"),
    "keys in another order": (dict(reversed(FIRST.items())), "the sample: other keys"),
    "an ordered dict": (OrderedDict(FIRST), "the sample: OrderedDict instead of dict"),
    "a default dict": (defaultdict(int, FIRST), "the sample: defaultdict instead of dict"),
    "no dict at all": ([*FIRST.values()], "the sample: list instead of dict"),
    "a longer list": (FIRST | {"meta": [*FIRST["meta"], 1]}, "['meta']: other keys or another length"),
    "a tuple for a list": (FIRST | {"meta": tuple(FIRST["meta"])}, "['meta']: tuple instead of list"),
    "an int for a float": (_meta(1, 2), "['meta'][1]: int instead of float"),
    "a bool for an int": (_meta(0, True), "['meta'][0]: bool instead of int"),
    "an int for a bool": (_meta(5, 1), "['meta'][5]: int instead of bool"),
    "a numpy int for an int": (_meta(0, np.int64(1)), "['meta'][0]: int64 instead of int"),
    "a huge int": (_meta(0, 2**63), "['meta'][0]: an int of more than 64 bits"),
    "bytes for text": (_meta(2, b"x"), "['meta'][2]: bytes instead of str"),
    "text of a subclass": (_meta(2, np.str_("x")), "['meta'][2]: str_ instead of str"),
    "something for None": (_meta(3, 0), "['meta'][3]: int instead of None"),
    "None for something": (_meta(0, None), "['meta'][0]: NoneType instead of int"),
    "another namedtuple": (FIRST | {"box": samples.Loose(np.zeros(4), 3)}, "['box']: Loose instead of"),
    "a bare tuple": (FIRST | {"box": (np.zeros(4), 3)}, "['box']: tuple instead of namedtuple"),
    "another byte order": (FIRST | {"box": samples.Pair(np.zeros(4, ">f8"), 3)}, "['box']['image']: >f8"),
}


def test_what_does_not_fit_is_refused_and_named() -> None:
    schema = Schema.infer([FIRST], keep_order=True)
    comes_out(schema, FIRST)
    for view in (schema, reread(schema)):
        for what, (value, said) in MISFITS.items():
            with pytest.raises(SchemaMismatch) as caught:
                view.prepare(value)
            assert said in str(caught.value), what


class Sundial(datetime.tzinfo):
    """A time zone of the user's own."""


def test_more_than_two_gib_is_refused() -> None:
    huge = torch.zeros(1).expand((1 << 29) + 1)
    for first in ([torch.zeros(1), torch.zeros(2)], [huge]):
        with pytest.raises(SchemaMismatch, match="2 GiB"):
            Schema.infer(first, keep_order=True).prepare(huge)


def test_dimensions_beyond_what_a_record_holds_are_refused() -> None:
    """Of an array without elements: it takes no bytes, but its dimensions have to be written down."""
    assert exchanged([torch.empty(1, 0), torch.empty(2, 0)], torch.empty(1 << 33, 0)) == []


KEYS = [
    1,
    True,
    1.0,
    0,
    False,
    0.0,
    -0.0,
    "a",
    np.str_("a"),
    Spelled.A,
    None,
    "None",
    Level.LOW,
    np.float64(1),
    (),
    ("a", 0, 1),
    ("a", False, 1.0),
    ("a", -0.0, 1),
    ("a", 0.0, 1),
    (("a", 0), 1),
]


def test_keys_that_are_equal_and_not_the_same_are_not_exchanged() -> None:
    assert all_exchanged(({one: 5}, {two: 5}) for one in KEYS for two in KEYS) == []


def test_keys_come_out_in_order_with_their_types() -> None:
    sample = {"b": 1, "a": 2, 3: 4, 2: 5, None: 6, 0.5: 7, "\ud800": 8, "": 9, True: 10}
    sample |= {("color", 0, -1): 11, ("color", (1.5, Level.LOW)): 12, (): 13}
    comes_out(Schema.infer([sample], keep_order=True), sample)


# Objects that hold more than a schema sees


@dataclasses.dataclass
class Late:
    image: Any
    cache: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Counted:
    image: Any
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput is: a dict and a dataclass in one."""

    loss: Any = None


@dataclasses.dataclass
class Fault(Exception):
    code: int = 0


class Hiding:
    __slots__ = ("hidden",)


@dataclasses.dataclass
class Slotted(Hiding):
    __slots__ = ("image",)
    image: Any


class Features:
    """As programs that fine-tune a language model have them."""

    def __init__(self, index: int) -> None:
        self.ids = list(range(index))
        self.mask = torch.ones(index)


class Boxed:
    __slots__ = ("__box", "__weakref__", "label")

    def __init__(self, label: str) -> None:
        self.__box, self.label = (1, len(label)), label


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer of transformers returns it; pickle would keep a part of it."""

    def __init__(self, data: dict[str, Any], sequences: int) -> None:
        super().__init__(data)
        self.sequences = sequences

    def __getattr__(self, name: str) -> Any:
        return self.data[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data = state["data"]


class Once:
    """A class that knows its objects."""

    made: ClassVar[dict[int, Once]] = {}

    def __new__(cls, number: int) -> Once:
        return cls.made.setdefault(number, super().__new__(cls))

    def __init__(self, number: int) -> None:
        self.number = number


class Freed:
    def __init__(self) -> None:
        self.address = 3

    def __del__(self) -> None: ...


class Missing: ...


class Countdown:
    def __init__(self) -> None:
        self.left = 3

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> int:
        self.left -= 1
        return self.left


class Attributed(dict):  # type: ignore[type-arg]
    """A dict that has its items as attributes."""


class Options(dict):  # type: ignore[type-arg]
    """A dict that is its attributes, as in many programs."""

    def __init__(self, **held: Any) -> None:
        super().__init__(held)
        self.__dict__ = self


class Rows(list):  # type: ignore[type-arg]
    ...


class Pair(tuple):  # type: ignore[type-arg]
    ...


class Word(str):
    line: int


class Pixels(int): ...


class Signal(np.ndarray):  # type: ignore[type-arg]
    """As numpy's documentation shows it."""

    rate: Any

    def __new__(cls, values: Any, rate: int) -> Signal:
        made = np.asarray(values).view(cls)
        made.rate = rate
        return made

    def __array_finalize__(self, obj: Any) -> None:
        self.rate = getattr(obj, "rate", None)


Point = namedtuple("Point", "x y")


class LabelledPoint(Point):
    """A namedtuple with a ``__dict__``."""


def _set(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _family() -> list[Any]:
    parent = Features(1)
    return [parent, _set(Features(2), parent=parent)]


def _layers() -> Features:
    """Objects that many more paths lead to than there are."""
    made = Features(1)
    for _ in range(40):
        made = _set(Features(1), left=made, right=made)
    return made


ODD_OBJECTS = {
    "a field that is not set yet": [Late(1), _set(Late(1), cache=2)],
    "a field that the constructor counts up": [Counted(3)],
    "an attribute that is no field": [_set(samples.Record(1, 2), extra=3), samples.Record(1, 2)],
    "a dict too": [Output(4), _set(Output(4), logits=5)],
    "an exception too": [Fault(3)],
    "a slot that is no field": [_set(Slotted(1), hidden=5), Slotted(1)],
    "a namedtuple with an attribute": [_set(LabelledPoint(1, 2), label="x"), LabelledPoint(1, 2)],
    "a tensor with an attribute": [_set(torch.ones(2), label="x"), torch.ones(2)],
    "a named tuple of torch": [torch.ones(2, 2).max(0)],
}


@pytest.mark.parametrize("what", ODD_OBJECTS)
def test_objects_that_hold_more_than_a_schema_sees_are_kept_or_refused(what: str) -> None:
    values = ODD_OBJECTS[what]
    assert all_exchanged((one, two) for one in values for two in values) == []


class Slots:
    """Finds all other attributes in a dict, and so ``__dict__`` and, before it has that dict, the dict."""

    __slots__ = ("_held",)

    def __init__(self, **held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return self._held[name]


class Shows:
    """Shows another ``__dict__`` than it has."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getattribute__(self, name: str) -> Any:
        return {"shown": 1} if name == "__dict__" else object.__getattribute__(self, name)


def test_the_attributes_of_an_object_are_read_and_set_without_its_code() -> None:
    schema = Schema.infer([Slots(x=1)], keep_order=True)
    assert [each.x for each in records(schema, [Slots(x=1), Slots(x=2)])] == [1, 2]
    (made,) = records(Schema.infer([Shows(3)], keep_order=True), [Shows(3)])
    assert made.number == 3


def test_a_class_that_has_other_slots_by_now_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = Schema.infer([Slots(x=1)], keep_order=True).to_json()
    monkeypatch.setattr(sys.modules[__name__], "Slots", type("Slots", (), {"__slots__": ("other",)}))
    with pytest.raises(SegmentError, match="_held"):
        Schema.from_json(described)


class Row:
    def to_dict(self) -> dict[str, Any]:
        return {}


class Graph(Row):
    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> Graph:
        return cls()


def test_a_class_that_is_known_by_its_methods_is_told_what_to_do() -> None:
    with pytest.raises(SchemaMismatch, match=r"; hotset.register_codec .* or return its to_dict\(\)$"):
        Schema.infer([_set(Row(), view=iter("x"))], keep_order=True)
    with pytest.raises(SchemaMismatch, match=r"register_codec\(Graph, Graph.to_dict, Graph.from_dict\)"):
        Schema.infer([_set(Graph(), view=iter("x"))], keep_order=True)


UNCACHEABLE: list[tuple[Any, str]] = [
    ([1, {"x": samples.Opaque(1)}], "[1]['x']: an object of samples.Opaque; hotset.register_codec makes"),
    ({("a", b"1"): 2}, "the sample: a dict with keys that are not text, numbers, or tuples of these"),
    ({Flags(3): 1}, "the sample: a dict with keys that are not text, numbers, or tuples of these"),
    ({("a", (1, float("nan"))): 2}, "the sample: a dict with NaN as a key"),
    ([np.array([1, "a"], object)], "[0]: a numpy array of object; return a list"),
    (
        [np.zeros(3, [(("title", "x"), "i4")])],
        "[0]: a numpy array of dtype([(('title', 'x'), '<i4')]); return a dict of its fields",
    ),
    (2**64, "the sample: an int of more than 64 bits"),
    (torch.zeros(2, requires_grad=True), "the sample: a tensor that requires a gradient"),
    (torch.zeros(2, requires_grad=True).to_sparse(), "the sample: a torch.sparse_coo tensor"),
    ({1, samples.Opaque(1)}, "the sample"),
    (defaultdict(lambda: 0), "the sample: a defaultdict that makes <function"),
    (datetime.datetime(2026, 1, 1, tzinfo=Sundial()), "the sample: a time in"),
    (memoryview(b"x"), "the sample: an object of builtins.memoryview"),
    (_set(np.ma.MaskedArray([1, 2], mask=[0, 1]), units="m"), "the sample: a masked array that is more than"),
    (lambda: 1, "the sample: an object of builtins.function; hotset.register_codec makes it cacheable"),
    ([[].append], "[0]: an object of builtins.builtin_function_or_method"),
    (type("Record", (), {}), "the sample: an object of builtins.type"),
    *(
        (each, f"the sample: an object of test_schema.{type(each).__name__}; hotset.register_codec makes")
        for each in (Once(3), Freed(), Missing(), Countdown())
    ),
    ([_set(Features(1), words=["word"] * 3_000)], "[0]['words']: more than 1,000 values in objects"),
    (
        [{"words": dict.fromkeys(map(str, range(10_001)), 7)}],
        "[0]['words']['9997'] is one of more than 10,000 values",
    ),
    (_family(), "[1]['parent']: the same object of test_schema.Features again"),
    (
        _set(Features(1), a={0: (edge := {"weight": 1})}, b=[edge]),
        "['b'][0]: the same object of builtins.dict",
    ),
    (_layers(), "['left']"),
    ([twice := Attributed(x=1), twice], "[1]: the same object of test_schema.Attributed again"),
    (_set(Rows(), a=(rows := [1]), b=rows), "['b']: the same object of builtins.list again"),
    (
        [Attributed(x=[threading.Lock()])],
        "[0]: an object of test_schema.Attributed, whose ['x'][0] is one of _thread.lock; "
        "hotset.register_codec makes it cacheable, or return a dict of it",
    ),
    (
        [_set(Features(1), lock=threading.Lock())],
        "[0]: an object of test_schema.Features, whose ['lock'] is one of _thread.lock; hotset.register_",
    ),
    (
        _set(UserDict(ids=[1]), encodings=[memoryview(b"x")]),
        "the sample: an object of collections.UserDict, whose ['encodings'][0] is one of "
        "builtins.memoryview; hotset.register_codec makes it cacheable, or return a dict of it",
    ),
]


def test_what_cannot_be_cached_at_all_is_refused_and_named() -> None:
    for value, said in UNCACHEABLE:
        with pytest.raises(SchemaMismatch) as caught:
            Schema.infer([value], keep_order=True)
        assert str(caught.value).startswith(said)


def test_a_sample_that_contains_itself_is_refused() -> None:
    sample: list[Any] = []
    sample.append(sample)
    with pytest.raises(SchemaMismatch):
        Schema.infer([sample], keep_order=True)


NOON = datetime.datetime(2026, 3, 29, 12, 30, 15, 17)
ORDINARY: dict[str, list[Any]] = {
    "sets": [{3, -1, 1 << 40}, set(), {7}],
    "mixed sets": [{"a", 1, (2, "b")}, {"c", 2, (3, "d")}],
    "frozen sets": [frozenset({3, 4}), frozenset({5})],
    "sets of texts": [{"a", "b"}, {"c", "d"}],
    "sets of large numbers": [{1 << 62}, {-(1 << 63)}],
    "deques": [deque([1, 2], 3), deque([3, 4], 3)],
    "unbounded deques": [deque([torch.ones(2)]), deque([torch.zeros(2)])],
    "default dicts": [defaultdict(list, {"a": [1]}), defaultdict(list, {"a": [2]})],
    "default dicts without a default": [defaultdict(None, x=1), defaultdict(None, x=2)],
    "counters": [Counter("aab"), Counter("abb")],
    "ranges": [range(3), range(5, 1, -2)],
    "slices": [slice(1, 5, 2), slice(3, 4, 1)],
    "open slices": [slice(None), slice(None)],
    "bytearrays": [bytearray(b"abc"), bytearray()],
    "paths": [Path("/a/b"), Path("c")],
    "pure paths": [PurePosixPath("/a"), PurePosixPath("\udcff")],
    "Windows' paths": [PureWindowsPath("c:/a")],
    "dates": [NOON.date(), datetime.date(1, 1, 1)],
    "times": [NOON.time(), datetime.time(2, 30, fold=1)],
    "moments": [NOON, NOON.replace(fold=1), datetime.datetime.max],
    "moments in a fixed zone": [NOON.replace(tzinfo=datetime.timezone.utc)],
    "moments in a named offset": [
        NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-3, microseconds=1), "X"))
    ],
    "moments in a place": [NOON.replace(tzinfo=ZoneInfo("Europe/Berlin"))],
    "spans": [datetime.timedelta(-3, 4, 5), datetime.timedelta.max],
    "decimals": [Decimal("1.10"), Decimal("NaN"), Decimal("-0")],
    "sizes": [torch.Size([2, 3]), torch.Size([4, 5])],
    "objects of a user's class": [Features(2), Features(2)],
    "objects with slots": [Boxed("a"), Boxed("bcd")],
    "dicts of a class": [Attributed(x=1, y=[3]), Attributed(x=2, y=[4])],
    "dicts with attributes": [_set(Attributed(x=1), y=2), _set(Attributed(x=1), y=3)],
    "ordered dicts of a class": [_set(Output(4), logits=5), _set(Output(4), logits=6)],
    "dicts that are their attributes": [Options(x=1, y=[3]), Options(x=2, y=[4])],
    "lists of a class": [_set(Rows([1, 2]), sep=","), _set(Rows([3, 4]), sep=";")],
    "tuples of a class": [Pair((1, torch.zeros(2))), Pair((3, torch.ones(2)))],
    "texts of a class, twice": [[word := _set(Word("a"), line=3), word], [word, word]],
    "texts of a class": [_set(Word("a"), line=3), _set(Word("b"), line=4)],
    "numbers of a class": [Pixels(3), Pixels(4)],
    "namespaces": [SimpleNamespace(x=1, y=[torch.ones(2)]), SimpleNamespace(x=2, y=[torch.zeros(2)])],
    "arrays of a class": [Signal(np.arange(3.0), rate=1), Signal(np.arange(5.0), rate=2)],
    "masked arrays": [np.ma.MaskedArray([1, n, 3], mask=[0, 1, 0]) for n in range(3)],
    "masked arrays without a mask": [np.ma.MaskedArray([1, n]) for n in range(3)],
    "masked arrays with more": [
        np.ma.MaskedArray([1.5, n], mask=[0, 1], fill_value=7.0, hard_mask=True) for n in range(3)
    ],
    "structured arrays": [
        np.full(n, n, [("t", "<i8"), ("xy", ">f4", 2), ("in", [("a", "U3")])]) for n in range(3)
    ],
    "records": [np.rec.array([(n, 0.5)], dtype=[("id", "i4"), ("x", "f8")]) for n in range(3)],
    "matrices": [np.array([[1, 2]]).view(np.matrix), np.array([[3, 4]]).view(np.matrix)],
    "identifiers": [uuid.UUID(int=1 << 100), uuid.uuid1()],
    "bytes of numpy": [np.bytes_(b"a"), np.bytes_(b"")],
    "objects that pickle keeps a part of": [Encoding({"ids": [1, 2]}, 3), Encoding({"ids": [4, 5]}, 6)],
    "objects in objects": [_set(Features(1), more=[Boxed("x")]), _set(Features(1), more=[Boxed("y")])],
    "texts of numpy": [np.str_("a"), np.str_("")],
    "what modules name": [
        [default_collate, len, Features, torch.uint8, Features.__init__, n] for n in range(2)
    ],
}


def test_ordinary_types_of_the_standard_library_come_out_as_they_went_in() -> None:
    for what, values in ORDINARY.items():
        schema = Schema.infer(values, keep_order=True)
        for value in values:
            assert fits(schema, value), what
        comes_out(schema, *values)
        comes_out(Schema.infer([{"x": [values[0], 1]}], keep_order=True), {"x": [values[0], 2]})
    made = records(Schema.infer([defaultdict(list, a=[1])], keep_order=True), [defaultdict(list, a=[1])])[0]
    assert made["new"] == []


def test_objects_of_classes_in_c_come_out_of_the_state_that_pickle_keeps() -> None:
    """As a tokenizer's ``Encoding`` does; of the installed libraries only scipy has such a class of data."""
    trees = [cKDTree(np.arange(12.0).reshape(4, 3) * number) for number in (1, 2, 3)]
    schema = Schema.infer([{"tree": tree} for tree in trees[:2]], keep_order=True)
    comes_out(schema, *({"tree": tree} for tree in trees))
    [found] = records(schema, [{"tree": trees[2]}])
    assert type(found["tree"]) is cKDTree
    assert found["tree"].query([0, 3, 6.5]) == trees[2].query([0, 3, 6.5])


def test_attributes_of_a_dict_that_are_items_come_out_as_those_items() -> None:
    easy = _set(Attributed(x=[1], y=2, z=[3]), z=[3])
    easy.x, easy.y = easy["x"], easy["y"]
    [found] = records(Schema.infer([easy], keep_order=True), [easy])
    found.x.append(2)
    assert (found["x"], found.y, found["z"] is found.z) == ([1, 2], 2, False)
    [options] = records(Schema.infer([Options(x=1)], keep_order=True), [Options(x=1)])
    options.y = 3
    assert options == {"x": 1, "y": 3}
    assert copied(Options(x=[1])).x == [1]


@pytest.mark.filterwarnings("ignore:Sparse")  # torch says that they are in beta state, and unchecked
def test_sparse_tensors_come_out_with_their_indices_as_they_were() -> None:
    def each(dense: Any) -> Iterator[torch.Tensor]:
        yield from (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc())
        yield from (dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 2)), dense.to_sparse(1))
        # Not coalesced: one place twice, and in no order.
        yield torch.sparse_coo_tensor([[3, 0, 3], [1, 0, 1]], dense[0, :3], (4, 4))

    one, two = (torch.arange(16.0).reshape(4, 4) * scale % 3 for scale in (1, 2))
    for left, right in zip(each(one), each(two), strict=True):
        schema = Schema.infer([left, right], keep_order=True)
        comes_out(schema, left, right)
        comes_out(Schema.infer([{"x": left}], keep_order=True), {"x": left})
        [found] = records(schema, [left])
        assert torch.equal(found.to_dense(), left.to_dense())
        assert not fits(schema, left.to_dense())
    twice = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))
    assert differs(twice, twice.coalesce()) is not None


def test_zones_are_the_same_objects() -> None:
    for zone in (datetime.timezone.utc, ZoneInfo("Europe/Berlin")):
        value = NOON.replace(tzinfo=zone)
        assert records(Schema.infer([value], keep_order=True), [value])[0].tzinfo is zone


def test_a_mapped_array_comes_out_as_its_copy_does(tmp_path: Path) -> None:
    """In memory, and named as numpy names it."""
    np.arange(12.0).reshape(3, 4).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float64, "r", shape=(3, 4))
    schema = Schema.infer([mapped[0]], keep_order=True)
    for value in mapped:
        [found] = records(schema, [value])
        assert differs(found, copied(value)) is None
        assert (type(found), found.filename, found.tolist()) == (np.memmap, None, value.tolist())


class Polynomial:
    def __init__(self, terms: Any) -> None:
        self.terms = terms


def test_a_registered_type_comes_out_by_its_own_codec() -> None:
    register_codec(Fraction, lambda f: (f.numerator, f.denominator), lambda tree: Fraction(*tree))
    register_codec(Polynomial, lambda p: {"terms": p.terms}, lambda tree: Polynomial(tree["terms"]))
    sample = [Fraction(1, 3), Polynomial(torch.arange(3))]
    schema = Schema.infer([sample], keep_order=True)
    comes_out(schema, sample, [Fraction(-5, 7), Polynomial(torch.arange(3) * 2)])
    with pytest.raises(SchemaMismatch, match="int instead of fractions:Fraction"):
        schema.prepare([1, sample[1]])
    with pytest.raises(SchemaMismatch, match="an int of more than 64 bits"):
        schema.prepare([Fraction(2**70), sample[1]])


def test_a_codec_that_is_none_is_refused() -> None:
    for arguments in ((3, str, str), (Fraction, None, str), (Fraction, str, 3)):
        with pytest.raises(ArgumentError, match="register_codec"):
            register_codec(*arguments)


# Inferring and widening


def _is_fixed(schema: Schema) -> list[bool]:
    return [leaf.fixed_bytes is not None for leaf in schema.leaves]


def test_leaves_whose_shape_differs_among_the_first_samples_vary_and_the_others_do_not() -> None:
    def sample(n: int) -> Any:
        return [torch.zeros(n, 3), torch.zeros(3), np.zeros((3, n)), n, "text", None]

    assert _is_fixed(Schema.infer([sample(2)] * 2, keep_order=True)) == [True, True, True, True, False, True]
    schema = Schema.infer([sample(2), sample(2), sample(5)], keep_order=True)
    assert _is_fixed(schema) == [False, True, False, True, False, True]
    assert schema.has_tail
    comes_out(schema, sample(0), sample(1), sample(100))
    assert not fits(schema, [torch.zeros(2, 3), torch.zeros(4), *sample(2)[2:]])
    assert not fits(schema, [torch.zeros(2), *sample(2)[1:]])


def test_first_samples_that_do_not_fit_the_very_first_change_nothing() -> None:
    several = [[1, torch.zeros(2)], {"x": 1}, [1.0, torch.zeros(3)], [2, torch.zeros(2, 2)]]
    schema = Schema.infer(several, keep_order=True)
    assert _is_fixed(schema) == [True, False]
    comes_out(schema, [7, torch.ones(9)])
    assert not fits(schema, [1.0, torch.zeros(3)])


def test_inferring_and_preparing_change_no_sample() -> None:
    sample, other = ({"x": torch.arange(n), "y": [1, "a"]} for n in (3, 4))
    Schema.infer([sample, other], keep_order=True).prepare(sample)
    assert differs(sample, {"x": torch.arange(3), "y": [1, "a"]}) is None


# JSON


def test_json_gives_the_same_schema_with_the_same_layout() -> None:
    for make in (*MAKERS, samples.nested):
        schema = Schema.infer([make(1), make(2)], keep_order=True)
        again = reread(schema)
        assert json.dumps(again.to_json()) == json.dumps(schema.to_json())
        assert (again.stride, again.offsets) == (schema.stride, schema.offsets)
        assert again.leaves == schema.leaves
        assert again.tree == schema.tree


ALIENS = [
    *("os:system", "builtins:eval", "subprocess:Popen", "builtins:dict", "torch:Tensor", "enum:Enum.mro"),
    *("samples:Opaque", "samples:Pair._make", "samples:Pair.__new__", "samples:Nothing", "samples:"),
    *("collections:OrderedDict", "nowhere:Nothing", "..samples:Pair", ":", ""),
]


def _group(kind: str, name: str | None, keys: Sequence[Any], children: int) -> dict[str, Any]:
    leaves = [{"leaf": "none"}] * children
    return {"group": kind, "keys": keys, "children": leaves, "type": name, "codec": None}


def refused(described: Any) -> None:
    with pytest.raises(SegmentError):
        Schema.from_json(described)


def test_a_type_that_is_no_namedtuple_plain_class_or_enum_is_refused() -> None:
    """A schema must not be a way to call anything else."""
    for alien in ALIENS:
        refused({"leaf": "enum", "type": alien})
        for kind in ("namedtuple", "instance"):
            refused(_group(kind, alien, [], 0))


def test_a_type_of_another_kind_is_refused() -> None:
    fields = ["image", "label"]
    Schema.from_json(_group("namedtuple", "samples:Pair", fields, 2))
    Schema.from_json(_group("instance", "samples:FrozenRecord", fields, 2))
    Schema.from_json({"leaf": "enum", "type": "samples:Colour"})
    refused(_group("namedtuple", "samples:FrozenRecord", fields, 2))
    refused(_group("instance", "samples:Pair", fields, 2))
    refused({"leaf": "enum", "type": "samples:Pair"})


@pytest.mark.parametrize(
    "name", ["nowhere:f", "samples:_CYCLE", "samples:NUMBERS", "sys:modules", "os:path", "os:", "", "samples"]
)
def test_a_name_of_anything_but_a_function_class_or_dtype_is_refused(name: str) -> None:
    Schema.from_json({"leaf": "named", "name": "samples:image_and_label"})
    Schema.from_json({"leaf": "named", "name": "torch:float32"})
    refused({"leaf": "named", "name": name})


def test_a_name_that_leads_to_another_object_than_its_own_is_refused() -> None:
    refused({"leaf": "named", "name": "math:__loader__"})


def test_a_function_is_what_a_module_holds_whatever_the_module_calls_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program's module has another name in a process that was spawned."""
    schema = Schema.infer([samples.image_and_label], keep_order=True)
    monkeypatch.setattr(samples.image_and_label, "__module__", "__mp_main__")
    comes_out(reread(schema), samples.image_and_label)


def test_a_group_without_its_type_is_refused() -> None:
    for kind in ("namedtuple", "instance"):
        refused(_group(kind, None, ["image", "label"], 2))


@pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"], [["a", {}], "b"], [["a", [1]], ["a", [1]]]])
def test_keys_and_children_that_do_not_agree_are_refused(keys: list[Any]) -> None:
    Schema.from_json(_group("dict", None, ["a", "b"], 2))
    refused(_group("dict", None, keys, 2))


def test_fields_that_are_not_the_types_are_refused() -> None:
    refused(_group("namedtuple", "samples:Pair", ["image", "other"], 2))
    refused(_group("namedtuple", "samples:Pair", ["image", "label", "more"], 3))
    refused(_group("instance", "samples:FrozenRecord", ["image", 3], 2))


def test_an_array_of_python_objects_is_refused() -> None:
    """Its bytes would be taken for addresses."""
    array = {"leaf": "array", "library": "numpy", "ndim": 0, "shape": [], "order": [], "as_lies": True}
    Schema.from_json({**array, "dtype": "<i8"})
    refused({**array, "dtype": "|O"})
    refused({"leaf": "number", "kind": "|O"})


def test_a_leaf_that_no_sample_has_is_refused() -> None:
    numbers = {"leaf": "numbers", "container": "list", "kind": "int", "length": 3}
    array = {"leaf": "array", "library": "torch", "ndim": 0, "shape": [], "order": [], "as_lies": True}
    Schema.from_json(numbers)
    Schema.from_json({**array, "dtype": "int64"})
    refused({**numbers, "container": "set"})
    refused({**numbers, "kind": "complex"})
    refused({**numbers, "length": 0})
    refused({**array, "dtype": "int64", "writeable": False})  # torch has no such tensors
    refused({"leaf": "text", "kind": "int"})


_WORDS = ["array", "number", "text", "none", "enum", "dict", "list", "object", "torch", "numpy", "int", "str"]
_WORDS += ["<f4", "|O", "V8", "float32", "os:system", "named"]
_FIELDS = ["leaf", "group", "keys", "children", "type", "codec", "kind", "library", "dtype", "ndim", "shape"]
_FIELDS += ["order", "as_lies", "name"]
json_leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 1 << 70), st.floats(), st.text(max_size=8)),
    st.sampled_from(_WORDS),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    json_leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_FIELDS), inner, max_size=8)
    ),
    max_leaves=20,
)


@settings(max_examples=often(200, 2000), deadline=None, database=None)
@given(json_values)
def test_forged_json_is_a_segment_error_or_a_schema(described: Any) -> None:
    try:
        schema = Schema.from_json(described)
    except SegmentError:
        return
    assert json.dumps(reread(schema).to_json()) == json.dumps(schema.to_json())


# Random trees

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def check_layout(schema: Schema) -> None:
    """No two leaves overlap, all lie inside the row, and each where its dtype may lie."""
    begin = 24
    for at, leaf in sorted(zip(schema.offsets, schema.leaves, strict=True), key=lambda pair: pair[0]):
        size = 4 * leaf.dims if leaf.fixed_bytes is None else leaf.fixed_bytes
        if size:
            assert begin <= at
            begin = at + size
        if leaf.fixed_bytes is None:
            assert at % 4 == 0
        elif isinstance(leaf, ArrayLeaf) and leaf.fixed_bytes and leaf.itemsize in (2, 4, 8, 16):
            assert at % leaf.itemsize == 0
            assert schema.stride % leaf.itemsize == 0
    assert begin <= schema.stride
    assert schema.stride % 8 == 0


def _numpy_array(shape: tuple[int, ...], dtype: str, data: bytes, order: int, strided: bool) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.frombuffer((data * (size // len(data) + 1))[:size], np.uint8) % (2 if dtype == "?" else 255)
    axes = [(axis + order) % len(shape) for axis in range(len(shape))]
    array = raw.astype(np.uint8).view(dtype).reshape([shape[axis] for axis in axes])
    array = array.transpose([axes.index(axis) for axis in range(len(shape))])
    return np.stack([array, array], -1)[..., 1] if strided and shape else array


def _torch_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, data: bytes, order: int, strided: bool
) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    of_size = {1: "?" if dtype is torch.bool else "u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}[
        dtype.itemsize
    ]
    return torch.from_numpy(_numpy_array(shape, of_size, data, order, strided)).view(dtype)


_how = st.binary(min_size=1, max_size=16), st.integers(0, 2), st.booleans()
leaves = st.one_of(
    st.builds(_torch_tensor, shapes, st.sampled_from([*TORCH_DTYPES.values()]), *_how),
    st.builds(_numpy_array, shapes, st.sampled_from(["?", "<i2", ">u4", "<f4", ">f8", "<c8"]), *_how),
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.complex_numbers()),
    *(st.text(st.characters(), max_size=40), st.binary(max_size=300)),
    st.sampled_from(
        [*Weekday, *Level, np.int8(-3), np.float32("nan"), np.datetime64(5, "s"), np.bool_(True)]
    ),
)
keys = st.one_of(st.text(max_size=4), st.integers(-5, 5), st.none())


def groups(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mapping = st.lists(st.tuples(keys, inner), max_size=3, unique_by=lambda item: item[0])
    sequence = st.lists(inner, max_size=3)
    pairs = (samples.Pair, samples.Loose, samples.Record, samples.FrozenRecord, samples.SlottedRecord)
    built = (st.builds(kind, inner, inner) for kind in pairs)
    return st.one_of(sequence, sequence.map(tuple), mapping.map(dict), mapping.map(OrderedDict), *built)


trees = st.recursive(leaves, groups, max_leaves=8)


@fuzz
@given(trees, st.booleans())
def test_a_random_tree_comes_out_as_it_went_in(tree: Any, keep_order: bool) -> None:
    schema = Schema.infer([tree], keep_order=keep_order)
    check_layout(schema)
    comes_out(schema, tree, tree)


@fuzz
@given(trees, trees)
def test_of_two_random_trees_the_second_fits_unaltered_or_not_at_all(one: Any, two: Any) -> None:
    assert exchanged([one], two) == []


def _like(value: Any, draw: Any) -> Any:
    """Another value of the same kind: other text, arrays of another shape that lie as they count."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        shape = draw(st.lists(st.integers(0, 4), min_size=value.ndim, max_size=value.ndim).map(tuple))
        if isinstance(value, torch.Tensor):
            return torch.zeros(shape, dtype=torch.uint8).to(value.dtype)
        return np.zeros(shape, value.dtype)
    if isinstance(value, str) and type(value) is str:
        return draw(st.text(max_size=30))
    if isinstance(value, dict):
        return type(value)((key, _like(part, draw)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(_like(part, draw) for part in value)
    return value


@fuzz
@given(trees, st.data())
def test_random_trees_of_varying_shapes_come_out_as_they_went_in(tree: Any, data: Any) -> None:
    several = [_like(tree, data.draw) for _ in range(4)]
    for keep_order in (True, False):
        schema = Schema.infer(several[:3], keep_order=keep_order)
        check_layout(schema)
        assert all(fits(schema, sample) for sample in several[:3])
        comes_out(schema, *(sample for sample in several if fits(schema, sample)))


def test_a_class_is_imported_only_from_where_this_program_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema that somebody has forged must not run a module of his choice."""
    code = "import os, typing\nos.environ['RAN'] = __name__\nclass P(typing.NamedTuple):\n    a: int\n"
    (tmp_path / "package_here").mkdir()
    for name in ("alone_there", "package_here/__init__", "package_here/part", "package_here/__main__"):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RAN", raising=False)
    fields = {"leaf": "number", "kind": "int"}
    described = {"group": "namedtuple", "keys": ["a"], "children": [fields], "codec": None}
    for module in ("alone_there", "package_here.part"):
        with pytest.raises(SegmentError):
            Schema.from_json({**described, "type": f"{module}:P"})
        assert "RAN" not in os.environ
    importlib.import_module("package_here")
    with pytest.raises(SegmentError):
        Schema.from_json({**described, "type": "package_here.__main__:P"})
    assert os.environ["RAN"] == "package_here"
    Schema.from_json({**described, "type": "package_here.part:P"})  # the user's own, which imports it late
    assert os.environ["RAN"] == "package_here.part"
    for module in ("package_here", "package_here.part"):
        del sys.modules[module]


# ---- lists of numbers --------------------------------------------------------------------------------------

TEN = list(range(10))


@pytest.mark.parametrize(
    "value",
    [TEN, tuple(TEN), [0.5, -0.0] * 5, [True, False] * 5, [-(2**63), 2**63 - 1] * 4, {"ids": TEN, "y": 1}],
)
def test_many_numbers_of_one_kind_are_one_leaf(value: Any) -> None:
    schema = Schema.infer([value], keep_order=True)
    comes_out(schema, value, value)
    assert len(schema.leaves) <= 2


@pytest.mark.parametrize(
    "other",
    [TEN[:9], [*TEN, 1], [*TEN[:9], 0.5], [*TEN[:9], True], [*TEN[:9], 2**63], tuple(TEN), [*TEN[:9], None]],
)
def test_another_list_does_not_fit_numbers_of_one_kind_and_length(other: Any) -> None:
    schema = Schema.infer([TEN], keep_order=True)
    with pytest.raises(SchemaMismatch):
        schema.prepare(other)
    with pytest.raises(SchemaMismatch):
        schema.prepare_all([TEN, other])
    assert exchanged([TEN, TEN], other) == []


def test_lists_of_numbers_may_vary_in_length() -> None:
    lists = [[float(number) for number in range(length)] for length in (8, 9, 30)]
    schema = Schema.infer(lists, keep_order=True)
    comes_out(schema, *lists, [1.0], [])
    assert len(schema.leaves) == 1


def test_graphs_of_pytorch_geometric_come_out_with_storages_of_their_own() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=torch.ones(nodes, 2), edge_index=torch.zeros(2, 3)) for nodes in (2, 3)]
    for number, graph in enumerate(graphs):
        graph.name = f"graph {number}"
    schema = Schema.infer(graphs, keep_order=True)
    comes_out(schema, *graphs)
    [found] = records(schema, [graphs[1]])
    found.extra = 3
    assert (found._store._parent() is found, found.num_nodes, found.to_dict()["extra"]) == (True, 3, 3)
    typed = data.HeteroData()
    typed["paper"].x, typed["paper", "cites", "paper"].edge_index = torch.ones(2, 3), torch.zeros(2, 4)
    comes_out(Schema.infer([typed], keep_order=True), typed)
    foreign = data.Data(x=torch.ones(2, 2))
    vars(foreign)["_store"] = graphs[0]._store
    with pytest.raises(SchemaMismatch, match="a Data with a storage of another graph"):
        Schema.infer([foreign], keep_order=True)


def test_structured_arrays_come_out_with_their_very_dtype_or_are_refused() -> None:
    plain = [("a", "i1"), ("b", "<i8")]
    dtypes = [
        np.dtype(plain),
        np.dtype(plain, align=True),
        np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [4, 0], "itemsize": 12}),
        np.dtype({"names": ["all", "low"], "formats": ["<i8", "u1"], "offsets": [0, 0]}),  # the same bytes
        np.dtype([]),
    ]
    for dtype in dtypes:
        values = [np.zeros(n, dtype) for n in (2, 3)]
        schema = Schema.infer(values, keep_order=True)
        for found, value in zip(records(schema, values), values, strict=True):
            assert repr(found.dtype) == repr(value.dtype)
            assert (found == value).all()
    schema = Schema.infer([np.zeros(2, plain)], keep_order=True)
    for other in (np.dtype(plain, align=True), np.dtype([("a", "i1"), ("b", ">i8")]), np.dtype(plain[:1])):
        assert not fits(schema, np.zeros(2, other))
    refused = [
        ([(("title", "a"), "i4")], "a dict of its fields"),
        ([("a", object)], "a list"),
        ([("a", np.dtype("i4", metadata={"unit": "m"}))], "metadata"),
    ]
    for dtype_, telling in refused:
        with pytest.raises(SchemaMismatch, match=telling):
            Schema.infer([np.zeros(2, dtype_)], keep_order=True)
