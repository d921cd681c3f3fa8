"""The format: what is packed is unpacked, nothing forged is believed, regions lie apart, records cost little.

The fuzzing's invariant: whatever bytes stand where a header should be, and whatever size the file has,
``unpack_header`` gives a geometry that ends exactly where the file does, or a SegmentError that names it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from helpers import is_a_sentence, often
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotset.errors import SegmentError
from hotset.store import format as fmt
from hotset.store.format import Geometry, pack_header, unpack_header
from hotset.store.leaves.schema import Schema
from hotset.store.leaves.tensor_leaf import TORCH_DTYPES

NAME = "/dev/shm/hotset/imagenet.segment"
NONCE = bytes(range(16))
HEADER = struct.Struct("<8sIIQQQQQ16s")  # written down again: the test must not ask the code what it does
FIXED = HEADER.size + 4

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
fuzz = settings(max_examples=often(200, 1000), deadline=None, database=None)


def geometries() -> st.SearchStrategy[Geometry]:
    return st.builds(
        Geometry,
        samples=st.integers(0, 1 << 40),
        stride=st.integers(3, 1 << 29).map(lambda eighths: 8 * eighths),
        rows=st.integers(0, 1 << 30),
        lines=st.one_of(st.just(0), st.integers(0, 1 << 39)),
        metadata=st.integers(0, 1 << 20),
    )


def page_of(geometry: Geometry) -> bytes:
    return pack_header(geometry, NONCE).ljust(fmt.HEADER_BYTES, b"\0")


def forged(*sizes: int, magic: bytes = b"hotset\x00\x1a", version: int = 6, flags: int = 0) -> bytes:
    """A header of any content, with a checksum that fits: samples, stride, rows, lines, metadata."""
    fixed = HEADER.pack(magic, version, flags, *sizes, NONCE)
    return (fixed + struct.pack("<I", zlib.crc32(fixed))).ljust(fmt.HEADER_BYTES, b"\0")


def refused(page: bytes, size: int) -> str:
    """What is said about this header; fails unless it is refused, and named."""
    with pytest.raises(SegmentError) as caught:
        unpack_header(page, size, NAME)
    said = str(caught.value)
    assert NAME in said
    assert is_a_sentence(said)
    return said


GEOMETRY = Geometry(samples=1000, stride=4096, rows=500, lines=300, metadata=700)


@fuzz
@given(geometries(), st.binary(min_size=16, max_size=16))
def test_what_is_packed_is_unpacked(geometry: Geometry, nonce: bytes) -> None:
    page = pack_header(geometry, nonce).ljust(fmt.HEADER_BYTES, b"\0")
    assert unpack_header(page, geometry.size, NAME) == (geometry, nonce)


def test_the_header_is_the_one_that_is_drawn() -> None:
    fixed = pack_header(GEOMETRY, NONCE)
    assert len(fixed) == FIXED <= fmt.LIVE_AT
    assert HEADER.unpack_from(fixed) == (b"hotset\x00\x1a", 6, 0, 1000, 4096, 500, 300, 700, NONCE)


@fuzz
@given(geometries())
def test_regions_lie_apart_in_order_on_pages_with_less_than_a_page_between(geometry: Geometry) -> None:
    ends = [
        (geometry.slots_at, fmt.HEADER_BYTES + geometry.metadata),
        (geometry.index_at, geometry.slots_at + fmt.SLOTS * fmt.SLOT_WORDS * 8),
        (geometry.rows_at, geometry.index_at + 8 * geometry.samples),
        (geometry.lines_at, geometry.rows_at + geometry.rows * geometry.stride),
        (geometry.size, geometry.lines_at + geometry.lines * fmt.LINE),
    ]
    for begin, before in ends:
        assert begin % 4096 == 0
        assert 0 <= begin - before < 4096


def test_live_words_lie_in_the_header_behind_what_its_checksum_covers() -> None:
    words = [value for name, value in vars(fmt.Live).items() if name.isupper()]
    assert sorted(words) == list(range(len(words)))
    assert fmt.LIVE_AT % 8 == 0
    assert fmt.LIVE_AT + 8 * 8 <= fmt.HEADER_BYTES
    slot_words = [value for name, value in vars(fmt.Slot).items() if name.isupper()]
    assert sorted(slot_words) == sorted({*range(fmt.SLOT_WORDS)} - {9, 16}), "these were other versions'"
    assert max(slot_words) < fmt.SLOT_WORDS


def test_the_states_of_an_index_word_are_told_by_comparison() -> None:
    claims = [fmt.CLAIMED | slot << fmt.SLOT_SHIFT | 1 << 47 for slot in (0, fmt.SLOTS - 1, (1 << 13) - 1)]
    present = fmt.PRESENT | 3 << 60 | fmt.GENERATION_MASK << fmt.GENERATION_SHIFT | fmt.ROW_MASK
    assert all(0 < fmt.CLAIMED <= claim < fmt.PRESENT for claim in claims)
    assert fmt.PRESENT <= present < 1 << 63
    assert present & fmt.ROW_MASK == fmt.ROW_MASK
    assert present >> fmt.GENERATION_SHIFT & fmt.GENERATION_MASK == fmt.GENERATION_MASK


# Headers that nobody wrote


@fuzz
@given(geometries(), st.integers(0, 8 * FIXED - 1))
def test_any_flipped_bit_of_the_header_is_found(geometry: Geometry, bit: int) -> None:
    page = bytearray(page_of(geometry))
    page[bit // 8] ^= 1 << bit % 8
    refused(bytes(page), geometry.size)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 71, 72, 75])
def test_a_header_that_ends_early_is_found(length: int) -> None:
    assert str(length) in refused(page_of(GEOMETRY)[:length], length)


@fuzz
@given(geometries(), st.integers(0, 1 << 63))
def test_a_file_of_another_size_is_found(geometry: Geometry, size: int) -> None:
    if size != geometry.size:
        assert str(size) in refused(page_of(geometry), size)


@pytest.mark.parametrize("off", [-4096, -1, 1, 4096])
def test_a_file_a_little_longer_or_shorter_is_found(off: int) -> None:
    refused(page_of(GEOMETRY), GEOMETRY.size + off)


@fuzz
@given(st.binary(max_size=200), st.integers(0, 1 << 63))
def test_random_bytes_are_refused(page: bytes, size: int) -> None:
    refused(page, size)


@fuzz
@given(st.binary(min_size=FIXED - 8, max_size=200), st.integers(0, 1 << 63))
def test_random_bytes_behind_the_magic_ones_are_refused(rest: bytes, size: int) -> None:
    refused(b"hotset\x00\x1a" + rest, size)


def test_each_refusal_says_what_is_wrong() -> None:
    sizes = (10, 64, 5, 0, 0)
    size = Geometry(*sizes).size
    unpack_header(forged(*sizes), size, NAME)
    assert "magic" in refused(forged(*sizes, magic=b"safetens"), size)
    assert "format version 1" in refused(forged(*sizes, version=1), size)
    assert "format version 0" in refused(forged(*sizes, version=0), size)
    assert "sizes" not in refused(forged(*sizes, flags=1), size), "a keyed segment of these sizes is larger"
    assert "flags" in refused(forged(*sizes, flags=2), size)
    assert "checksum" in refused(b"hotset\x00\x1a".ljust(fmt.HEADER_BYTES, b"\0"), size)


@pytest.mark.parametrize(
    "sizes",
    [
        (10, 0, 5, 0, 0),  # rows of no bytes: not even a record's header, and where its tail is
        (10, 16, 5, 0, 0),
        (10, 8, 5, 0, 0),
        (10, 15, 5, 0, 0),
        (10, 20, 5, 0, 0),  # rows whose words would not be aligned
        (10, 64, 1 << 41, 0, 0),  # more rows than an index word can name
        (10, 64, 5, 1 << 41, 0),
    ],
)
def test_impossible_sizes_are_refused_though_the_checksum_and_the_files_size_fit(
    sizes: tuple[int, ...],
) -> None:
    assert "sizes" in refused(forged(*sizes), Geometry(*sizes).size)


numbers = st.one_of(
    st.integers(0, 300), st.integers(0, (1 << 64) - 1), st.integers(0, 63).map(lambda bit: 1 << bit)
)


@fuzz
@given(st.tuples(numbers, numbers, numbers, numbers, numbers), st.one_of(st.none(), st.integers(0, 1 << 66)))
@example((0, 24, 0, 0, 0), None)
@example(((1 << 64) - 1,) * 5, None)
def test_huge_numbers_with_a_fitting_checksum_are_refused_or_end_with_the_file(
    sizes: tuple[int, ...], size: int | None
) -> None:
    """With ``size`` None the forger made the file as long as the header says."""
    geometry = Geometry(*sizes)
    size = geometry.size if size is None else size
    possible = sizes[1] >= 24 and sizes[1] % 8 == 0 and max(sizes[2:4]) < 1 << 40
    if possible and geometry.size == size:
        assert unpack_header(forged(*sizes), size, NAME) == (geometry, NONCE)
    else:
        refused(forged(*sizes), size)


# Checksums


def _crc(
    sample: int = 5, length: int = 80, stamp: int = 2, row: bytes = b"r" * 48, tail: bytes = b"t" * 32
) -> int:
    return fmt.checksum(sample, length, stamp, memoryview(row), memoryview(tail) if tail else None)


def test_a_records_checksum_depends_on_its_identity_its_row_and_its_tail() -> None:
    assert _crc() == _crc()
    others = [
        _crc(6),
        _crc(length=81),
        _crc(stamp=3),
        _crc(row=b"r" * 47 + b"s"),
        _crc(tail=b"s" + b"t" * 31),
    ]
    others += [_crc(tail=b""), _crc(row=b"r" * 47), _crc(5 + (1 << 32))]
    assert len({_crc(), *others}) == 1 + len(others)


@given(pages=st.integers(0, 5), rest=st.integers(0, fmt.PAGE - 1), data=st.data(), in_tail=st.booleans())
def test_no_flipped_bit_of_a_long_record_is_missed(
    pages: int, rest: int, data: st.DataObject, in_tail: bool
) -> None:
    size = max(pages * fmt.PAGE + rest, 1)
    content = np.random.default_rng(size).bytes(size)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(content)
    flipped[at] ^= 1 << bit

    def found(part: bytes) -> int:
        return _crc(tail=part) if in_tail else _crc(row=part)

    assert found(bytes(flipped)) != found(content)


def test_a_page_that_was_lost_or_is_another_records_is_found() -> None:
    white = b"\xff" * (4 * fmt.PAGE)
    two_lost = bytes(fmt.PAGE) + white[: fmt.PAGE] + bytes(fmt.PAGE) + white[: fmt.PAGE]
    foreign = white[: 3 * fmt.PAGE] + b"\x01" * fmt.PAGE
    assert len({_crc(row=white), _crc(row=two_lost), _crc(row=foreign)}) == 3


@pytest.mark.parametrize("width", [16, 24, 1000, 4096, 8192, 8200, 8208, 20_000])
def test_many_checksums_are_each_ones(width: int) -> None:
    noise = np.random.default_rng(width)
    rows = noise.integers(0, 256, (7, width), np.uint8)
    samples, lengths = noise.integers(0, 1 << 40, 7), np.full(7, width - 16)
    stamps = noise.integers(0, 1 << 20, 7)
    each = [
        fmt.checksum(*one, memoryview(row)[16:], None)  # type: ignore[arg-type]
        for *one, row in zip(samples.tolist(), lengths.tolist(), stamps.tolist(), rows, strict=True)
    ]
    assert fmt.checksums(samples, lengths, stamps, rows) == each
    assert len(set(each)) == 7
    places = np.array([5, 2])
    some = fmt.checksums(samples[places], lengths[places], stamps[places], rows, places)
    assert some == [each[5], each[2]]
    assert fmt.checksums(samples[:0], lengths[:0], stamps[:0], rows[:0]) == []


def test_a_long_parts_checksum_is_what_the_format_says() -> None:
    """Computed once more in plain Python: sums of 512 columns of whole pages, then what is left."""
    part = np.random.default_rng(1).bytes(3 * fmt.PAGE + 100)
    words = struct.unpack(f"<{3 * 512}Q", part[: 3 * fmt.PAGE])
    sums = [sum(words[column::512]) % (1 << 64) for column in range(512)]
    crc = zlib.crc32(struct.pack("<QII", 5, 80, 2))
    crc = zlib.crc32(part[3 * fmt.PAGE :], zlib.crc32(struct.pack("<512Q", *sums), crc))
    assert _crc(row=part, tail=b"") == crc


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8191, 8192, 8193, 40_000, 9 * 4096])
@pytest.mark.parametrize("pages", [1, 2, 3, 100])
def test_a_tail_that_comes_in_spans_has_the_checksum_of_the_whole(size: int, pages: int) -> None:
    row, tail = memoryview(b"r" * 48), memoryview(np.random.default_rng(size).bytes(size))
    checksum = fmt.Checksum(5, 80, 2, row, size)
    for start in range(0, size, pages * fmt.PAGE):
        checksum.add(tail[start : start + pages * fmt.PAGE])
    assert checksum.value == _crc(row=bytes(row), tail=bytes(tail))


def test_a_tail_is_not_told_apart_by_where_row_and_tail_meet_but_by_the_length() -> None:
    """Row and tail are one stream to the checksum; the length, which is in it, says where the row ends."""
    assert _crc(row=b"a" * 8, tail=b"b" * 8, length=16) != _crc(row=b"a" * 16, tail=b"", length=8)


# What a record costs


def _content(sample: Any) -> int:
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.itemsize
    if isinstance(sample, (np.ndarray, np.generic)):
        return sample.nbytes
    if isinstance(sample, dict):
        return sum(map(_content, sample.values()))
    if isinstance(sample, (list, tuple)):
        return sum(map(_content, sample))
    if isinstance(sample, (str, bytes)):
        return len(sample.encode() if isinstance(sample, str) else sample)
    return {type(None): 0, bool: 1, int: 8, float: 8, complex: 16}[type(sample)]


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype), shapes, st.sampled_from([*TORCH_DTYPES.values()])
)
arrays = st.builds(
    np.zeros, shapes, st.sampled_from(["?", "<i2", ">i4", "<f2", ">f8", "<f16", "<c16", "<M8[s]"])
)
scalars = st.sampled_from([None, True, 3, 1.5, 2j, np.float32(1), np.int8(3)])
fixed_leaves = st.one_of(tensors, arrays, scalars)


def _stride(sample: Any) -> int:
    schema = Schema.infer([sample], keep_order=True)
    assert schema.stride % 8 == 0
    return schema.stride


@settings(max_examples=often(200, 1000), deadline=None, database=None)
@given(st.lists(fixed_leaves, max_size=24))
def test_a_record_of_fixed_leaves_costs_at_most_64_bytes(sample: list[Any]) -> None:
    assert _stride(sample) - _content(sample) <= 64


def test_usual_records_cost_24_bytes_and_the_padding_to_eight_bytes() -> None:
    assert _stride((torch.zeros(3, 224, 224, dtype=torch.uint8), 7)) == 150_528 + 8 + 24
    assert _stride(torch.zeros(210, dtype=torch.uint8)) == 24 + 216
    assert _stride(None) == 24
    assert _stride([True, 1] * 50) == 24 + 8 * 50 + 56


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.lists(fixed_leaves, max_size=3),
    st.lists(st.one_of(st.text(max_size=600), st.binary(max_size=600)), min_size=1, max_size=2),
    st.integers(0, 400),
)
def test_a_record_with_tails_costs_at_most_64_bytes_and_the_padding_of_the_tails(
    fixed: list[Any], texts: list[Any], atoms: int
) -> None:
    """Each tail is padded to 16 bytes, and all of them together to a line."""

    def sample(length: int) -> Any:
        return [fixed, texts, torch.zeros(length, 3)]

    schema = Schema.infer([sample(atoms), sample(atoms + 1)], keep_order=True)
    prepared = schema.prepare(sample(atoms))
    assert schema.stride - _content(fixed) <= 64
    assert 0 <= fmt.LINE * prepared.tail_lines - prepared.tail_bytes < fmt.LINE
    assert 0 <= prepared.tail_bytes - _content([texts, torch.zeros(atoms, 3)]) < 16 * (1 + len(texts))


def test_the_index_costs_eight_bytes_a_sample() -> None:
    small, large = (Geometry(samples, 64, 0, 0, 0) for samples in (1 << 20, 1 << 30))
    assert large.rows_at - small.rows_at == 8 * ((1 << 30) - (1 << 20))
