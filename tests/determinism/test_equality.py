"""``differs`` sees what a training run could see of a difference, says where it is, and sees nothing else."""

from __future__ import annotations

import array
import copy
import dataclasses
import datetime
import decimal
import enum
import inspect
import io
import math
import struct
import threading
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import samples
import torch
from helpers import difference, rarely
from PIL import Image

from hotset.determinism.equality import changed_place, content_digests, differs
from hotset.determinism.fingerprint.fingerprint import fingerprint

PURE = [
    make
    for _, make in inspect.getmembers(samples, inspect.isfunction)
    if make.__module__ == "samples" and list(inspect.signature(make).parameters) == ["index"]
]


@dataclasses.dataclass
class Record:
    image: Any
    label: int


@dataclasses.dataclass
class Slotted:
    __slots__ = ("image", "label")
    image: Any
    label: int


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


class Text(str):
    pass


class Day(datetime.date):
    pass


class Quiet:
    """Says that it equals everything."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


Point = namedtuple("Point", "x y")


def masked(mask: list[int]) -> Any:
    return np.ma.MaskedArray([1, 2], mask=mask)  # type: ignore[no-untyped-call]


def test_a_sample_made_twice_is_the_same_and_another_one_is_not() -> None:
    for make in PURE:
        assert differs(make(3), make(3)) is None, make.__name__
        assert (differs(make(3), make(5)) is None) == (difference(make(3), make(5)) is None), make.__name__


@pytest.mark.parametrize(
    "make",
    rarely(["boxes_and_masks", "boxes_that_vary", "meta_tensors", "images", "fixed_image"], "meta_tensors"),
)
def test_subclasses_of_tensors_and_images_are_compared_with_their_attributes(make: str) -> None:
    subclasses = pytest.importorskip("subclasses")
    assert differs(getattr(subclasses, make)(3), getattr(subclasses, make)(3)) is None
    assert differs(getattr(subclasses, make)(3), getattr(subclasses, make)(5)) is not None


def test_attributes_of_a_tensor_subclass_count() -> None:
    subclasses = pytest.importorskip("subclasses")
    left, right = subclasses.meta_tensors(1), subclasses.meta_tensors(1)
    right["image"].meta["affine"][0, 0] = 9
    assert "affine" in str(differs(left, right))
    assert "canvas_size" in str(
        differs(subclasses.boxes_that_vary(4), _on_canvas(subclasses.boxes_that_vary(4)))
    )
    assert differs(subclasses.boxes_that_vary(4), torch.Tensor(subclasses.boxes_that_vary(4))) is not None


def _on_canvas(boxes: Any) -> Any:
    boxes.canvas_size = (7, 7)
    return boxes


NAN, OTHER_NAN = struct.unpack("<dd", struct.pack("<QQ", 0x7FF8000000000000, 0x7FF8000000000001))

DIFFERENT: list[tuple[Any, Any, str]] = [
    (1, True, "type int and type bool"),
    (1, 1.0, "type int and type float"),
    (0.0, -0.0, "0.0 and -0.0"),
    (NAN, OTHER_NAN, "nan and nan"),
    (1j, complex(-0.0, 1), "1j and"),
    ("a", Text("a"), "type str and type Text"),
    ([1], (1,), "type list and type tuple"),
    (Point(1, 2), (1, 2), "type Point and type tuple"),
    (Point(1, [2, 3]), Point(1, [2, 4]), "at .y[1]: 3 and 4"),
    ({"a": 1}, OrderedDict(a=1), "type dict and type OrderedDict"),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "keys in another order"),
    ({"a": 1}, {"a": 1, "b": 2}, "keys ['a'] and ['a', 'b']"),
    ({1: "x"}, {True: "x"}, "keys [1] and [True]"),
    ([1, 2], [1, 2, 3], "lengths 2 and 3"),
    ([], None, "type list and type NoneType"),
    ({"a": [(1, "x")]}, {"a": [(1, "y")]}, "at ['a'][0][1]: 'x' and 'y'"),
    ({"a": {1: 2, 3: "x"}}, {"a": {1: 2, 3: "y"}}, "at ['a'][3]: 'x' and 'y'"),
    ([1.0, 0.0], [1.0, -0.0], "at [1]: 0.0 and -0.0"),
    ({"a": 1, 0.0: 2}, {"a": 1, -0.0: 2}, "keys"),
    ({"a": 1}, {"a": True}, "at ['a']: type int and type bool"),
    ({1, 2}, {1.0, 2}, "{1, 2}"),
    (Record([1], 2), Record([1], 3), "at .label: 2 and 3"),
    (Slotted([1], 2), Slotted([3], 2), "at .image[0]: 1 and 3"),
    (Quiet(1), Quiet(2), "at .value: 1 and 2"),
    (Day(2020, 1, 1), Day(2020, 1, 2), "Day(2020, 1, 1) and Day(2020, 1, 2)"),
    (decimal.Decimal("1.0"), decimal.Decimal("1.5"), "Decimal('1.0') and Decimal('1.5')"),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype torch.float32 and torch.float64"),
    (torch.zeros(2), torch.zeros(1, 2), "shape torch.Size([2]) and torch.Size([1, 2])"),
    (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), "type Tensor and type Parameter"),
    (torch.zeros(2), torch.zeros(2, requires_grad=True), "requires_grad False and True"),
    (torch.zeros(2), torch.zeros(2, device="meta"), "device cpu and meta"),
    (torch.tensor([0.0]), torch.tensor([-0.0]), "values (1 of 1, first at [0])"),
    (torch.arange(6).view(2, 3), torch.tensor([[0, 1, 2], [3, 9, 9]]), "values (2 of 6, first at [1, 1])"),
    (torch.eye(3).to_sparse(), torch.eye(3), "layout"),
    (
        torch.eye(3).to_sparse(),
        (torch.eye(3) * 2).to_sparse(),
        "at ._values(): values (3 of 3, first at [0])",
    ),
    (torch.zeros(2, 3), torch.zeros(3, 2).t(), "dimensions that lie in memory as (0, 1) and (1, 0)"),
    (torch.zeros(2), np.zeros(2, np.float32), "type Tensor and type ndarray"),
    (torch.tensor(1), 1, "type Tensor and type int"),
    (np.float32(1), np.float64(1), "type float32 and type float64"),
    (np.float64(1), 1.0, "type float64 and type float"),
    (np.float64(0.0), np.float64(-0.0), "values"),
    (np.arange(3, dtype="<i4"), np.arange(3, dtype=">i4"), "dtype int32 and >i4"),
    (np.zeros((2, 3)), np.zeros((2, 3), order="F"), "dimensions that lie"),
    (np.array(["a", "b"]), np.array(["a", "c"]), "values (1 of 2, first at [1])"),
    (np.array([1, "a"], object), np.array([1, "b"], object), "at [1]: 'a' and 'b'"),
    (np.array([1, "a"], object), np.array([True, "a"], object), "at [0]: type int and type bool"),
    (masked([0, 1]), masked([1, 0]), "_mask"),
    (np.array([(1, 2)], "i4,f8"), np.array([(1, 3)], "i4,f8"), "at ['f1']: values"),
    (Image.new("RGB", (2, 2)), Image.new("L", (2, 2)), "image RGB (2, 2) and image L (2, 2)"),
    (Image.new("L", (2, 2)), Image.new("L", (2, 2), 7), "pixels"),
]


def test_a_difference_is_seen_both_ways_and_the_phrase_says_where() -> None:
    for a, b, phrase in DIFFERENT:
        assert phrase in str(differs(a, b))
        assert differs(b, a) is not None, phrase
        assert differs(a, copy.deepcopy(a)) is None, phrase
        assert differs(b, copy.deepcopy(b)) is None, phrase
        assert str(differs({"x": (0, a)}, {"x": (0, b)})).startswith("at ['x'][1]")


def test_a_palette_and_an_images_info_count() -> None:
    left = Image.new("P", (2, 2))
    left.putpalette([1, 2, 3] * 256)
    right = left.copy()
    assert differs(left, right) is None
    right.putpalette([3, 2, 1] * 256)
    assert differs(left, right) == "palette"
    right = left.copy()
    right.info["transparency"] = 3
    assert differs(left, right) == "at .info: keys [] and ['transparency']"


def test_members_of_a_set_count_with_their_types_and_bits() -> None:
    nan = float("nan")
    assert differs({(1, 2)}, {(True, 2)}) is not None
    assert differs({(1,): 0}, {(1.0,): 0}) is not None
    assert differs({0.0, nan}, {-0.0, nan}) is not None
    assert differs({nan, (nan, 1)}, {float("nan"), (float("nan"), 1)}) is None


def test_the_opacity_of_a_palettes_colours_counts() -> None:
    left, right = Image.new("P", (2, 2)), Image.new("P", (2, 2))
    left.putpalette([1, 2, 3, 255] * 4, "RGBA")
    right.putpalette([1, 2, 3, 9] * 4, "RGBA")
    assert differs(left, left.copy()) is None
    assert differs(left, right) == "palette"
    assert fingerprint([left]) == fingerprint([left.copy()]) != fingerprint([right])


def test_an_image_file_read_twice_is_the_same_whether_loaded_or_not(tmp_path: Path) -> None:
    Image.effect_noise((8, 8), 50).save(tmp_path / "noise.png")
    with Image.open(tmp_path / "noise.png") as left, Image.open(tmp_path / "noise.png") as right:
        left.load()
        assert differs(left, right) is None


def test_bytes_that_are_not_content_do_not_count() -> None:
    padded = np.dtype({"names": ["a", "b"], "formats": ["u1", "i8"], "offsets": [0, 8]})
    left, right = np.zeros(3, padded), np.zeros(3, padded)
    right.view(np.uint8).reshape(3, 16)[:, 1:8] = 99  # between the fields
    assert differs(left, right) is None
    if np.finfo(np.longdouble).nmant == 63:
        extended, other = np.ones(2, np.longdouble), np.ones(2, np.longdouble)
        other.view(np.uint8).reshape(2, 16)[:, 10:] = 99
        assert differs(extended, other) is None
        assert differs(extended, extended * 2) == "values (2 of 2, first at [0])"


def test_gaps_between_the_elements_of_a_view_do_not_count() -> None:
    base = torch.arange(20)
    assert differs(base[::2], base[::2].clone()) is None
    assert differs(np.arange(20)[::2], np.arange(20)[::2].copy()) is None
    assert differs(torch.arange(5).expand(3, 5), torch.arange(5).expand(3, 5).contiguous()) is None


def test_nan_equals_nan_wherever_it_is() -> None:
    def new() -> float:  # Python compares dicts' keys by identity before it compares them by value
        return math.inf - math.inf

    for make in (float, np.float16, torch.tensor, lambda x: np.array([x]), lambda x: {"x": [x]}):
        assert differs(make(math.nan), make(math.nan)) is None
    assert differs({new(): 1}, {new(): 1}) is None
    assert differs({new(): 1}, {1.0: 1}) is not None


def test_undefined_bytes_of_long_doubles_are_no_change() -> None:
    for _ in range(20):  # the padding holds what the memory held before
        np.full(64, 7, np.uint8)
        first = np.arange(4, dtype=np.longdouble) * 3
        assert content_digests(first) == content_digests(np.arange(4, dtype=np.longdouble) * 3)
    assert content_digests(first) != content_digests(first + 1)


def test_padding_between_the_fields_of_an_array_is_no_change() -> None:
    def rows(padding: int) -> Any:
        kind = np.dtype([("a", "i1"), ("b", "f8")], align=True)
        made = np.full(3 * kind.itemsize, padding, np.uint8).view(kind)
        made["a"], made["b"] = 1, 2.5
        return made

    assert differs(rows(7), rows(9)) is None
    assert content_digests(rows(7)) == content_digests(rows(9))


def test_what_is_made_anew_for_each_object_has_no_digest() -> None:
    class Held:
        def method(self) -> None: ...

    assert content_digests({"x": Held().method}) == content_digests({"x": Held().method})
    assert content_digests({"x": [].append}) == content_digests({"x": [].append})


def test_bools_are_compared_by_their_truth() -> None:
    bools = np.asarray(Image.fromarray(np.eye(3, dtype=np.uint8) * 255).convert("1"))
    assert bools.view(np.uint8).max() == 255, "as Pillow makes them"
    tensor = torch.tensor(bools)
    assert differs(bools, bools != 0) is None
    assert differs(tensor, torch.eye(3, dtype=torch.bool)) is None
    assert differs(tensor, ~tensor) is not None
    assert content_digests(tensor) == content_digests(torch.eye(3, dtype=torch.bool))


def test_a_class_that_is_made_anew_is_named_so() -> None:
    def point() -> Any:
        return namedtuple("Local", "x y")(1, 2)

    assert "made anew each time" in str(differs(point(), point()))


def test_what_has_no_text_or_hash_has_digests_of_its_other_parts() -> None:
    class Meta(type):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(cls, other: object) -> bool:
            return cls is other

    class Odd(metaclass=Meta):
        pass

    for held in (10**5000, Odd()):
        sample = {"long": [held] * 2_000, "x": np.zeros(2)}
        before = content_digests(sample)
        sample["x"] += 1
        assert changed_place(before, content_digests(sample)) == "['x']"


def test_what_is_nested_too_deeply_is_not_taken_for_equal() -> None:
    def nested() -> list[Any]:
        value: list[Any] = [1]
        for _ in range(3000):
            value = [value]
        return value

    assert differs(nested(), nested()) == "nested too deeply to be compared"
    assert content_digests(nested()) == {}


def test_decimals_are_compared_by_their_digits() -> None:
    for text in ("NaN", "-0", "1.10", "Infinity"):
        assert differs(decimal.Decimal(text), decimal.Decimal(text)) is None
    for one, other in (("-0", "0"), ("1.10", "1.1"), ("NaN", "sNaN")):
        assert differs(decimal.Decimal(one), decimal.Decimal(other)) is not None


def test_a_masked_array_does_not_change_as_its_fill_value_is_first_asked_for() -> None:
    def make(fill: int | None = None) -> Any:
        return np.ma.masked_array([1, 2], mask=[False, True], fill_value=fill)

    asked = make()
    assert asked.fill_value == 999999
    assert differs(asked, make()) is None
    assert differs(made := make(), make()) is None
    assert made._fill_value is None
    assert differs(make(7), make()) is not None
    assert differs(make(), np.ma.masked_array([1, 2], mask=[True, False])) is not None


def test_paths_are_compared_as_paths_whatever_they_have_cached() -> None:
    asked = Path("/a/b.txt")
    _ = asked.parts, hash(asked), str(asked)
    assert differs(asked, Path("/a/b.txt")) is None
    assert differs(asked, Path("/a/c.txt")) is not None


def test_cycles_end() -> None:
    def ring(value: int) -> list[Any]:
        inner: list[Any] = [value]
        inner.append({"back": inner})
        return inner

    assert differs(ring(1), ring(1)) is None
    assert differs(ring(1), ring(2)) == "at [0]: 1 and 2"


def test_a_graph_of_objects_with_many_paths_is_compared_in_time() -> None:
    def graph(last: int) -> Record:
        nodes = [Record(number, []) for number in range(20)]
        for node in nodes:
            node.extra = list(nodes)  # type: ignore[attr-defined]
        nodes[-1].extra.append(last)  # type: ignore[attr-defined]
        return nodes[0]

    assert differs(graph(1), graph(1)) is None
    assert "1 and 2" in (differs(graph(1), graph(2)) or "")
    assert content_digests(graph(1)) == content_digests(graph(1)) != content_digests(graph(2))


def test_one_attribute_more_is_a_difference() -> None:
    left, right = Record(1, 2), Record(1, 2)
    right.extra = 3  # type: ignore[attr-defined]
    assert differs(left, right) == "attribute extra of one only"
    assert differs(defaultdict(int, a=1), defaultdict(int, a=1)) is None


def test_objects_of_c_libraries_are_compared_by_what_pickle_keeps_of_them() -> None:
    for make in (np.random.MT19937, np.random.PCG64):  # without an == of their own, as a tokenizer's result
        assert differs(make(2), make(2)) is None
        assert differs(make(2), make(3)) is not None
        assert differs([make(2)], [make(2).jumped()]) is not None


class Ranges(bytearray):
    """As a library in Rust pickles a hash map, and equal to itself alone."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Ranges, (), bytes(self)


def test_a_state_that_is_json_is_compared_whatever_the_order_of_its_keys() -> None:
    """A fast tokenizer's Encoding of two texts has it in one or the other order, by chance."""
    first = Ranges(b'{"ids":[1,2],"ranges":{"0":[0,1],"1":[1,2]}}')
    assert differs(first, Ranges(b'{"ids":[1,2],"ranges":{"1":[1,2],"0":[0,1]}}')) is None
    for other in (b'{"ids":[2,1],"ranges":{"0":[0,1],"1":[1,2]}}', b'{"ids":[1,2],"ranges":{}}', b"{"):
        assert differs(first, Ranges(other)) is not None
    assert differs(Ranges(b"{"), Ranges(b"{")) is None


def test_values_that_cannot_be_compared_count_as_different() -> None:
    assert differs(object(), object()) is None, "two objects without any content are alike"
    assert differs(iter([1]), iter([1])) is not None
    assert differs(torch.Generator(), torch.Generator()) is not None


@pytest.mark.parametrize(
    ("sample", "change"),
    [
        (torch.zeros(3), lambda sample: sample.add_(1)),
        (np.zeros(3), lambda sample: sample.__iadd__(1)),
        ({"a": [1, {"b": 2}]}, lambda sample: sample["a"][1].update(b=3)),
        ([1, 2], lambda sample: sample.append(3)),
        (dict.fromkeys(map(str, range(2_000)), 7), lambda sample: sample.update({"1999": 8})),
        (list(range(2_000)), lambda sample: sample.__setitem__(7, 8)),
        ([each / 7 for each in range(2_000)], lambda sample: sample.__setitem__(0, -0.0)),
        ([*range(2_000), [1]], lambda sample: sample[-1].append(2)),
        (Image.new("L", (2, 2)), lambda sample: sample.putpixel((0, 0), 9)),
        (Record(bytearray(b"ab"), 1), lambda sample: sample.image.append(0)),
        (torch.zeros(3, dtype=torch.bfloat16)[::2], lambda sample: sample.fill_(2)),
        ({"seen": {1, "a"}}, lambda sample: sample["seen"].add(2)),
        ([array.array("i", [1, 2])], lambda sample: sample[0].append(3)),
        (Image.new("P", (2, 2)), lambda sample: sample.putpalette([1] * 768)),
        ({"reads": np.int64(1)}, lambda sample: sample.update(reads=sample["reads"] + np.int64(1))),
        ({"mean": np.float32(1)}, lambda sample: sample.update(mean=np.float32(2))),
        ([datetime.date(2020, 1, 1)], lambda sample: sample.__setitem__(0, datetime.date(2020, 1, 2))),
        ([decimal.Decimal("1.5")], lambda sample: sample.__setitem__(0, decimal.Decimal("2.5"))),
        ({"file": Path("a")}, lambda sample: sample.update(file=Path("b"))),
        ({"kind": Kind.FIRST}, lambda sample: sample.update(kind=Kind.SECOND)),
        (np.zeros(2, [("a", "i1"), ("b", "f8")]), lambda sample: sample["b"].fill(1)),
    ],
    ids=[
        "tensor",
        "array",
        "dict",
        "list",
        "long dict",
        "long list",
        "long list of floats",
        "long mixed list",
        "image",
        "bytearray",
        "view",
        "set",
        "array of Python's",
        "palette",
        "number of numpy's",
        "float of numpy's",
        "date",
        "decimal",
        "path",
        "enum",
        "fields",
    ],
)
def test_a_change_in_place_shows_in_the_digests(sample: Any, change: Any) -> None:
    before = content_digests(sample)
    assert content_digests(sample) == before
    change(sample)
    assert content_digests(sample) != before


def test_tensors_of_types_that_torch_cannot_copy_are_compared() -> None:
    bits = torch.arange(6, dtype=torch.uint8).view(torch.uint4)
    assert differs(bits, torch.arange(6, dtype=torch.uint8).view(torch.uint4)) is None
    assert differs(bits, torch.zeros(6, dtype=torch.uint8).view(torch.uint4)) is not None
    assert content_digests([bits]) != content_digests([torch.zeros(6, dtype=torch.uint8).view(torch.uint4)])


class Table:
    """As pandas' tables, whose parts note who shares their memory, and do not pickle that."""

    def __init__(self, part: Any) -> None:
        self.part, self.sharers = part, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"part": self.part}


def test_what_a_class_leaves_out_of_a_pickle_does_not_count_if_only_identity_tells_it_apart() -> None:
    assert differs(Table(1), Table(1)) is None
    assert differs([Table({"x": Table(np.zeros(2))})], [Table({"x": Table(np.zeros(2))})]) is None
    assert differs(Table(1), Table(2)) == "at .part: 1 and 2"
    assert differs([Table({"x": Table(np.zeros(2))})], [Table({"x": Table(np.ones(2))})]) is not None
    made = [pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}) for _ in range(2)]
    assert differs(*made) is None
    assert differs(pd.Series([1, 2]), pd.Series([1, 3])) is not None


def test_objects_within_each_other_that_pickle_alike_or_not_are_compared_in_time() -> None:
    def nested(inner: Any) -> Any:
        for _ in range(60):
            inner = Table([inner, inner])
        return inner

    assert differs(nested(1), nested(1)) is None
    assert differs(nested(threading.Lock()), nested(threading.Lock())) is not None


def test_files_in_memory_are_compared_with_their_position() -> None:
    for make, text in ((io.BytesIO, b"abc"), (io.StringIO, "abc")):
        left, right = make(text), make(text)  # type: ignore[arg-type]
        assert differs(left, right) is None
        assert differs(left, make(text[:2])) is not None  # type: ignore[arg-type]
        right.read(1)
        assert differs(left, right) is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_compared_part_by_part() -> None:
    for layout in (torch.strided, torch.jagged):

        def make(*values: float, layout: torch.layout = layout) -> torch.Tensor:
            return torch.nested.nested_tensor([torch.ones(2), torch.tensor(values) * 1.0], layout=layout)

        assert differs(make(1, 2, 3), make(1, 2, 3)) is None
        assert differs(make(1, 2, 3), make(1, 2, 4)) is not None
        assert differs(make(1, 2, 3), make(1, 2)) is not None
        assert differs(make(1, 2), make(1, 2).unbind()[0]) is not None


def test_bound_methods_are_compared_with_their_objects() -> None:
    assert differs(Record(1, 2).__eq__, Record(1, 2).__eq__) is None
    assert differs(Record(1, 2).__eq__, Record(1, 3).__eq__) is not None
    assert differs(Record(1, 2).__eq__, Record(1, 2).__repr__) is not None


class Raises(dict[str, int]):
    def __iter__(self) -> Any:
        raise KeyError("no")


def test_what_raises_as_it_is_compared_is_said_to() -> None:
    assert differs(Raises(x=1), Raises(x=1)) == "objects of Raises that cannot be compared (KeyError: 'no')"
