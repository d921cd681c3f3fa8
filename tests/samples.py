"""The samples of the tests: every kind of leaf in every kind of container.

Each function is pure: it gives the same sample for the same index, anew each time, in any process.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


class Pair(NamedTuple):
    image: Any
    label: Any


Loose = namedtuple("Loose", ["x", "y"])


@dataclasses.dataclass
class Record:
    image: Any
    label: Any
    name: str = "unnamed"


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    image: Any
    label: Any


@dataclasses.dataclass
class SlottedRecord:
    __slots__ = ("image", "label")
    image: Any
    label: Any


class Opaque:
    """A class that no codec knows, and whose objects are not made again of their attributes."""

    def __new__(cls, *values: int) -> Opaque:
        return super().__new__(cls)

    def __init__(self, value: int) -> None:
        self.value = value
        self.parts = [torch.full((2,), value), str(value)]


class Colour(enum.Enum):
    RED = 0
    GREEN = 1


# Multiples of 31, modulo 251.
_CYCLE = torch.from_numpy(np.resize((np.arange(251) * 31 % 251).astype(np.uint8), 1 << 14))


def _pattern(shape: Sequence[int], index: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """The numbers ``31 k + 17 index + 1``, modulo 251."""
    start = (index * 17 + 1) * pow(31, -1, 251) % 251
    return _CYCLE[start : start + math.prod(shape)].reshape(tuple(shape)).to(dtype, copy=True)


def image_and_label(index: int) -> tuple[torch.Tensor, int]:
    return _pattern((3, 6, 5), index), index % 10


def big_image_and_label(index: int) -> tuple[torch.Tensor, int]:
    return _pattern((3, 64, 64), index), index


_LONG = (np.arange(3 * 320 * 320 + 10_000) * 31 % 251).astype(np.uint8)


def poster_and_label(index: int) -> tuple[torch.Tensor, int]:
    """300 KB: a batch of eight is large enough to be gathered by a thread of its own."""
    row = _LONG[index * 17 : index * 17 + 3 * 320 * 320].reshape(3, 320, 320).copy()
    return torch.from_numpy(row), index


def clip_and_label(index: int) -> tuple[torch.Tensor, int]:
    """300 KB: frames that lie one by one as HWC and are seen as CHW, as readers of videos return them."""
    return poster_and_label(index)[0].view(4, 160, 160, 3).permute(0, 3, 1, 2), index


def constant_row(index: int) -> torch.Tensor:
    """64 KiB of one number: a torn read shows as two numbers in one sample."""
    return torch.full((8192,), index, dtype=torch.int64)


def kilobyte(index: int) -> torch.Tensor:
    return _pattern((1000,), index)


def half_megabyte(index: int) -> torch.Tensor:
    return torch.full((512 * 1024,), index % 251, dtype=torch.uint8)


def number(index: int) -> int:
    return index * 3


def small_float(index: int) -> torch.Tensor:
    return _pattern((4,), index, torch.float32)


def mapping(index: int) -> dict[str, Any]:
    return {
        "image": _pattern((2, 3, 4), index, torch.float32),
        "label": index,
        "weight": index / 7,
        "valid": index % 2 == 0,
        "meta": {"name": f"sample-{index}", "points": np.arange(6, dtype=np.int16) + index},
    }


def ordered_mapping(index: int) -> OrderedDict[str, Any]:
    """One key is a tuple, as monodepth2 has them for a frame at a scale."""
    parts = {"second": torch.tensor(index), ("first", -1): [float(index), np.float32(index / 3)]}
    return OrderedDict(parts)


def named(index: int) -> Pair:
    return Pair(_pattern((3, 4), index), Loose(index, (float(index), index % 2 == 1)))


def nested(index: int) -> Any:
    """Every container in every other, dataclasses included (which ``default_collate`` does not take)."""
    image = _pattern((2, 3), index)
    return {
        "list": [image, (index, [f"{index}"])],
        "pair": Pair(image + 1, {"deep": (image * 2, None)}),
        "record": Record(image + 2, [index, index + 1], name=f"r{index}"),
        "frozen": FrozenRecord(Loose(image + 3, index), ()),
        "slotted": SlottedRecord({"x": image + 4}, (index,)),
        "ordered": OrderedDict(b=1, a=[image + 5]),
        "empty": [{}, [], ()],
        7: index,
        ("color", 0, (-1,)): image + 6,
    }


def text(index: int) -> dict[str, Any]:
    words = ["", "plain", "näïve", "🙂" * (index % 5), "\ud800 lone", "nul\0inside", "line\nbreak"]
    return {"words": words, "text": "x" * (index * 7 % 50), "data": bytes(range(index % 30))}


def scalars(index: int) -> list[Any]:
    return [
        index, -index, 2**63 - 1 - index, -(2**63) + index, index % 2 == 0, index / 3,
        float("nan"), float("inf"), -0.0, complex(index, -0.5), None,
    ]  # fmt: skip


def numpy_scalars(index: int) -> list[Any]:
    return [
        np.int8(index % 100), np.uint16(index), np.int64(-index), np.float16(index / 3),
        np.float32(index / 3), np.float64(index / 7), np.bool_(index % 2), np.complex64(index + 1j),
        np.complex128(index - 1j),
    ]  # fmt: skip


def odd_numpy_scalars(index: int) -> list[Any]:
    return [
        np.longdouble(index) / 3, np.datetime64("2020-01-01") + np.timedelta64(index, "D"),
        np.timedelta64(index, "s"),
        np.str_(f"s{index}"), np.bytes_(b"b%d" % index),
    ]  # fmt: skip


def huge_int_sometimes(index: int) -> tuple[torch.Tensor, int]:
    return _pattern((4,), index), (2**64 + index if index % 3 == 1 else index)


def huge_int(index: int) -> tuple[torch.Tensor, int]:
    return _pattern((4,), index), -(2**80) - index


def bfloat_and_half(index: int) -> tuple[torch.Tensor, ...]:
    return tuple(_pattern((3, 2), index, dtype) for dtype in (torch.float16, torch.bfloat16, torch.complex64))


def zero_d_and_empty(index: int) -> list[Any]:
    return [
        torch.tensor(index), torch.tensor(index / 3, dtype=torch.float16), torch.tensor(index % 2 == 0),
        torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int16), torch.empty((0,), dtype=torch.bool),
        np.array(index), np.empty((2, 0), np.float32), b"", "", (), [], {},
    ]  # fmt: skip


def permuted(index: int) -> list[Any]:
    base = _pattern((2, 3, 4, 5), index, torch.float32)
    array = np.arange(24, dtype=np.int32).reshape(4, 6) + index
    return [
        base.permute(3, 1, 0, 2),
        base.transpose(0, 3),
        base.to(memory_format=torch.channels_last),
        _pattern((5, 3, 1, 3), index, torch.float32).permute(0, 3, 1, 2),  # pictures of one column
        base[0].t() if base[0].dim() == 2 else base[0].permute(2, 0, 1),
        np.asfortranarray(array),
        array.T,
        np.ascontiguousarray(array),
    ]


def strided(index: int) -> list[Any]:
    """Views that are not dense: only their values can be kept."""
    base = _pattern((6, 8), index, torch.int32)
    array = np.arange(48).reshape(6, 8) + index
    return [
        base[::2, 1::3],
        base[:, 3],
        base[1:1],
        base[:1].expand(5, 8),
        base.diagonal(),
        array[::2, ::-1],
        array[:, 3],
    ]


def arrays(index: int) -> list[Any]:
    return [
        (np.arange(5) + index).astype(">i4"), (np.arange(5) * index).astype(">f8"),
        (np.arange(4) + index).astype("<u2"),
        np.array([index, -index], dtype=np.float16), np.array([True, index % 2 == 0]),
        np.array([1j * index], dtype=np.complex64),
    ]  # fmt: skip


def odd_arrays(index: int) -> list[Any]:
    point = np.dtype([("x", "<f4"), ("y", ">i2")])
    return [
        np.array([(index, 2), (3, index)], dtype=point), np.array(["a", f"b{index:03d}"]),
        np.array([b"a", b"b%03d" % index]), np.array(["2020-01-01"], "M8[D]") + np.timedelta64(index, "D"),
    ]  # fmt: skip


def object_array(index: int) -> Any:
    return np.array([index, "two", None, [3]], dtype=object)


def ragged(index: int) -> dict[str, Any]:
    """A molecule: positions of a varying number of atoms beside leaves of one size."""
    atoms = index * 5 % 13
    return {
        "positions": _pattern((atoms, 3), index, torch.float32),
        "charges": _pattern((atoms,), index, torch.int64),
        "energy": index / 3,
        "cell": _pattern((3, 3), index, torch.float64),
    }


def token_ids(index: int) -> dict[str, Any]:
    """Lists of numbers, of which collating makes a tensor for each position."""
    return {
        "ids": [index * 100 + place for place in range(20)],
        "box": tuple(index / (place + 1) for place in range(9)),
        "mask": [(index + place) % 3 == 0 for place in range(11)],
        "label": index,
    }


def of_many_forms(index: int) -> dict[str, Any]:
    """Most without a caption, and some with lists of boxes."""
    sample: dict[str, Any] = {
        "image": _pattern((3, 5, 4), index),
        "caption": f"{index}" if index % 9 == 4 else None,
    }
    if index % 5 == 2:
        boxes = [{"box": torch.full((4,), float(index)), "kind": Colour.RED} for _ in range(index % 4)]
        sample["boxes"] = boxes
    return sample


def ragged_pair(index: int) -> tuple[torch.Tensor, int]:
    return _pattern((1 + index * 7 % 11,), index), index


def ragged_two_ways(index: int) -> torch.Tensor:
    return _pattern((1 + index % 3, 2 + index % 4), index, torch.int16)


def jpeg_like(index: int) -> tuple[np.ndarray[Any, Any], int]:
    return np.full((100 + index * 37 % 900,), index % 256, np.uint8), index


def odd_at_seven(index: int) -> tuple[torch.Tensor, int]:
    return (_pattern((3, 6, 5) if index != 7 else (3, 2, 2), index)), index


def other_shape_at_500(index: int) -> Any:
    return _pattern((4, 3) if index != 500 else (5, 3), index), index


def other_dtype_at_500(index: int) -> Any:
    return _pattern((4, 3), index, torch.uint8 if index != 500 else torch.float32), index


def other_tree_at_500(index: int) -> Any:
    image = _pattern((4, 3), index)
    return (image, index) if index != 500 else {"image": image, "label": [index]}


def none_inside(index: int) -> tuple[torch.Tensor, None]:
    return _pattern((3,), index), None


NUMBERS = """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32
    complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""


def every_dtype(index: int, names: str = NUMBERS) -> dict[str, torch.Tensor]:
    """The same bytes seen as each of torch's dtypes that this torch has."""
    data = ((torch.arange(48) * 7 + index) % 113).to(torch.uint8)
    return {
        name: data % 2 == 0 if name == "bool" else data.view(getattr(torch, name)).reshape(3, -1)
        for name in names.split()
        if hasattr(torch, name)
    }


def dtypes_that_are_no_numbers(index: int) -> dict[str, torch.Tensor]:
    return every_dtype(index, "float4_e2m1fn_x2 bits8 bits16")


def opaque(index: int) -> tuple[torch.Tensor, Opaque]:
    return _pattern((3,), index), Opaque(index)


def strange(index: int) -> list[Any]:
    """Leaves that no schema holds: samples that are not cached must still be served unchanged."""
    return [
        {("tuple", 1): index}, {index, "set"}, frozenset([index]), Fraction(index, 7), Decimal(index) / 8,
        Path(f"/tmp/{index}"),
        range(index), slice(index), bytearray(b"%d" % index), Colour.GREEN, torch.Size([index, 2]),
        torch.float16, int,
        defaultdict(list, {index: [index]}), Counter({"a": index}), torch.eye(3).to_sparse() * (index + 1),
        torch.tensor([1 + 2j, index + 3j]).conj(), torch.full((2,), float(index), requires_grad=True),
        np.rec.array([(index, 2.0)], dtype=[("a", int), ("b", float)]),
    ]  # fmt: skip


def same_content(index: int) -> tuple[torch.Tensor, str]:
    """Only five different samples, many times over."""
    return _pattern((3, 4), index % 5), f"{index % 5}"
