"""The messages between machines: what is written is read again, and nothing else is, whatever bytes come."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset.cluster import protocol
from hotset.cluster.protocol import Head, Malformed, Operation, Status
from hotset.cluster.wire_records import (
    ABSENT,
    FULL,
    PENDING,
    TRUNCATED,
    CacheIdentity,
    WireRecords,
)
from hotset.errors import ArgumentError
from hotset.store import format as fmt
from hotset.store.format import LINE, RECORD, RECORD_HEADER
from hotset.store.record_batch import RecordBatch

PLAIN = CacheIdentity.of(b"f" * 16, samples=1000, stride=64, schema="plain")
TAILED = CacheIdentity.of(b"g" * 16, samples=1000, stride=64, schema="tailed")
LARGE = CacheIdentity.of(b"h" * 16, samples=1000, stride=20_000, schema="large")


def numbers(*ids: int) -> npt.NDArray[np.int64]:
    return np.array(ids, np.int64)


def record(
    cache: CacheIdentity, sample: int, tail_bytes: int, generation: int
) -> tuple[bytearray, bytearray]:
    """A row and its lines, as a store would have written them."""
    noise = np.random.default_rng(sample)
    row = bytearray(noise.bytes(cache.stride))
    lines = -(-tail_bytes // LINE)
    tail = bytearray(noise.bytes(tail_bytes) + bytes(lines * LINE - tail_bytes))
    row[16:24] = fmt.tail_word(sample, lines).to_bytes(8, "little")
    length = cache.stride - RECORD_HEADER + tail_bytes
    body = memoryview(tail)[:tail_bytes] if tail_bytes else None
    crc = fmt.checksum(sample, length, generation, memoryview(row)[RECORD_HEADER:], body)
    RECORD.pack_into(row, 0, length, generation, crc)
    return row, tail


def sound(ids: Any, records: WireRecords) -> Any:
    """Which of these samples' records are there and sound, if they are taken to be these samples'."""
    return records._replace(batch=records.batch._replace(ids=ids[records.present])).verified().present


def records(cache: CacheIdentity, ids: npt.NDArray[np.int64], plan: list[int | None]) -> WireRecords:
    """Records of these samples; the plan says of each the bytes of its tail, or None, -1, ...: a state."""
    generations, lines, rows, tails = [], [], bytearray(), bytearray()
    for sample, tail_bytes in zip(ids.tolist(), plan, strict=True):
        if tail_bytes is None or tail_bytes < 0:
            states = {None: ABSENT, -1: TRUNCATED, -2: PENDING, -3: FULL}
            generations.append(states[tail_bytes])
            continue
        row, tail = record(cache, sample, tail_bytes, sample % 7)
        rows += row
        tails += tail
        generations.append(sample % 7)
        lines.append(len(tail) // LINE)
    return WireRecords(
        numbers(*generations),
        RecordBatch(
            ids[numbers(*generations) >= 0],
            numbers(*lines),
            np.frombuffer(rows, np.uint8).reshape(-1, cache.stride),
            np.frombuffer(tails, np.uint8).reshape(-1, LINE),
        ),
    )


def head_of(cache: CacheIdentity, count: int, operation: Operation = Operation.GET) -> Head:
    return Head(operation, Status.OK, count, 77, cache.fingerprint, cache.layout)


def same(one: WireRecords, other: WireRecords) -> bool:
    parts = zip((one.generations, *one.batch[:4]), (other.generations, *other.batch[:4]), strict=True)
    return all(np.array_equal(a, b) for a, b in parts)


# ---- there and back ------------------------------------------------------------------------------------

plans = st.lists(st.one_of(st.none(), st.integers(-3, 700)), max_size=8)


@given(plans, st.booleans(), st.integers(0, 2**64 - 1))
def test_what_is_written_is_read(plan: list[int | None], tailed: bool, number: int) -> None:
    cache = dataclasses.replace(TAILED if tailed else PLAIN, clears=number % 5)
    plan = plan if tailed else [0 if size and size > 0 else size for size in plan]
    ids = np.arange(len(plan), dtype=np.int64) * 3
    sent = records(cache, ids, plan)
    for parts, answers, brings in (
        (protocol.get(number, cache, ids), False, False),
        (protocol.put(number, cache, ids, sent), False, True),
        (protocol.answer(head_of(cache, len(ids))._replace(number=number), cache, sent), True, True),
    ):
        head, rest = protocol.parse_head(b"".join(parts), answers=answers)
        assert head.clears == (0 if answers else cache.clears)
        assert (head.number, head.samples, head.fingerprint) == (number, len(ids), cache.fingerprint)
        if not answers:
            asked, rest = protocol.parse_ids(head, rest, cache)
            assert np.array_equal(asked, ids)
        if brings:
            found = protocol.parse_records(head, rest, ids, cache)
            assert same(found, sent)
            there = [size is not None and size >= 0 for size in plan]
            assert sound(ids, found).tolist() == there
        else:
            assert not rest


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8), st.integers(0, 2**64 - 1))
def test_words_come_and_go(words: list[int], number: int) -> None:
    asked = b"".join(protocol.clear(number, PLAIN, numbers(*words)))
    head, body = protocol.parse_head(asked, answers=False)
    assert (head.operation, head.number, head.samples) == (Operation.CLEAR, number, len(words))
    assert protocol.parse_words(head, body).tolist() == words
    said = b"".join(protocol.words_answer(head, PLAIN, numbers(*words[:1])))
    answer, _ = protocol.parse_head(said, answers=True)
    assert (answer.operation, answer.number, answer.samples) == (Operation.CLEAR, number, len(words[:1]))
    for other in (asked, bytes(body) + b"x", bytes(body)[1:] or b"x"):
        with pytest.raises(Malformed, match="words that its header says"):
            protocol.parse_words(head, other)


def test_a_refusal_names_its_request_and_why() -> None:
    for status in Status:
        refused = b"".join(protocol.refusal(head_of(PLAIN, 5, Operation.PUT), status))
        head, rest = protocol.parse_head(refused, answers=True)
        assert not rest
        assert (head.operation, head.number, head.samples, head.status) == (Operation.PUT, 77, 0, status)
        assert head.status.sentence


def test_a_malformed_request_is_refused_under_its_number() -> None:
    asked = b"".join(protocol.get(123, PLAIN, numbers(1, 2)))
    later = asked[:8] + b"\x09\x00" + asked[10:]
    refused = protocol.refusal_of(later)
    assert refused is not None
    head, _ = protocol.parse_head(b"".join(refused), answers=True)
    assert (head.number, head.status) == (123, Status.MALFORMED)
    assert protocol.refusal_of(b"short") is None
    assert protocol.refusal_of(b"") is None


# ---- nothing else is read ------------------------------------------------------------------------------


def read_all(message: bytes, cache: CacheIdentity) -> None:
    """Read a message as both ends do; only :class:`Malformed` may come of it."""
    for answers, bare in ((False, False), (True, False), (True, True)):
        try:
            head, rest = protocol.parse_head(message, answers=answers)
            ids = np.arange(head.samples, dtype=np.int64) % cache.samples
            if not answers:
                ids, rest = protocol.parse_ids(head, rest, cache)
            found = protocol.parse_records(head, rest, ids, cache, bare=bare)
            if not bare:
                sound(ids, found)
        except Malformed:
            continue


@given(st.binary(max_size=500), st.booleans())
def test_no_bytes_crash_the_parser(message: bytes, begins_well: bool) -> None:
    header = protocol.get(1, TAILED, numbers(1, 2))[0]
    read_all(header + message if begins_well else message, TAILED)


@given(st.data(), st.sampled_from(["get", "put", "answer"]), st.sampled_from([PLAIN, TAILED]))
def test_nor_do_messages_that_are_almost_right(data: st.DataObject, kind: str, cache: CacheIdentity) -> None:
    ids = numbers(5, 6, 7)
    sent = records(cache, ids, [300 if cache is TAILED else 0, None, 0])
    made: dict[str, list[Any]] = {
        "get": protocol.get(1, cache, ids),
        "put": protocol.put(1, cache, ids, sent),
        "answer": protocol.answer(head_of(cache, 3), cache, sent),
    }
    parts = [bytearray(part) for part in made[kind]]
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, len(parts) - 1))
        act = data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "double", "number"]))
        part = parts[which]
        if act == "flip" and part:
            part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif act == "number" and len(part) >= 8:
            at = data.draw(st.integers(0, len(part) // 4 - 1)) * 4
            part[at : at + 4] = data.draw(st.sampled_from([b"\xff" * 4, b"\xff\xff\xff\x7f", bytes(4)]))
        elif act == "cut":
            del part[data.draw(st.integers(0, len(part))) :]
        elif act == "grow":
            part += data.draw(st.binary(min_size=1, max_size=9))
        elif act == "drop" and len(parts) > 1:
            del parts[which]
        elif act == "double":
            parts.insert(which, bytearray(part))
    read_all(b"".join(parts), cache)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"nonsense", "not a message of hotset's"),
        (8, b"\x01\x00", "version 1 .* version 4; install"),
        (10, b"\x07", "the unknown operation 0x7"),
        (10, b"\x81", "the unknown operation 0x81"),
        (11, b"\x01", "the unknown status 1"),
        (12, b"\xff\xff\xff\xff", "4,294,967,295 samples"),
        (63, b"\x01", "tells of 72,057,594,037,927,936 clears"),
    ],
)
def test_a_head_is_refused_with_its_reason(at: int, value: bytes, why: str) -> None:
    message = bytearray().join(protocol.get(1, PLAIN, numbers(1)))
    message[at : at + len(value)] = value
    with pytest.raises(Malformed, match=why):
        protocol.parse_head(bytes(message), answers=False)


def test_the_body_is_refused_with_its_reason() -> None:
    ids, head = numbers(1, 2), head_of(PLAIN, 2)
    good = b"".join(protocol.answer(head, PLAIN, records(PLAIN, ids, [0, 0]))[1:])
    for size, count in (8, "1"), (12, "1.5"), (24, "3"):
        with pytest.raises(Malformed, match=f"sent {count} sample ids, where its header says 2"):
            protocol.parse_ids(head, bytes(size), PLAIN)
    for stranger in (-1, 1000):
        with pytest.raises(Malformed, match="outside this cache, which has 1,000 samples"):
            protocol.parse_ids(head, numbers(0, stranger).tobytes(), PLAIN)
    for said, bare, why in (
        (good[:8], False, "sent 1 entries, where its header says 2"),
        (good[:-1], False, "sent 127 bytes of records, where its entries say 128"),
        (good + b"x", False, "sent 129 bytes of records, where its entries say 128"),
        (good, True, "sent 18 entries, where its header says 2"),
        (good[:4] + b"\x01" + good[5:], False, "sent 128 bytes of records, where its entries say 384"),
        (b"\x01\x00\x00\xc0" + good[4:], False, "entry that is not valid"),
        (b"\x02\x00\x00\x00" + good[4:], False, "entry that is not valid"),
        (b"\x00\x00\x10\x40" + good[4:], False, "entry that is not valid"),
    ):
        with pytest.raises(Malformed, match=why):
            protocol.parse_records(head, said, ids, PLAIN, bare=bare)
    assert len(protocol.parse_records(head, good, ids, PLAIN).batch.rows) == 2


def test_an_absent_record_has_no_tail() -> None:
    entry = bytes(4) + b"\x01\x00\x00\x00"
    with pytest.raises(Malformed, match="with a tail for a record that has none"):
        protocol.parse_records(head_of(TAILED, 1), entry + bytes(LINE), numbers(1), TAILED)


def test_a_header_of_more_samples_than_a_message_may_have_is_refused() -> None:
    head = bytearray(protocol.get(1, PLAIN, numbers(1))[0])
    head[12:16] = protocol.MOST.to_bytes(4, "little")
    assert protocol.parse_head(bytes(head), answers=False)[0].samples == protocol.MOST
    head[12:16] = (protocol.MOST + 1).to_bytes(4, "little")
    with pytest.raises(Malformed, match="65,537 samples"):
        protocol.parse_head(bytes(head), answers=False)


def test_who_asks_for_too_much_is_told() -> None:
    with pytest.raises(ArgumentError, match="65,536 samples"):
        protocol.get(1, PLAIN, np.zeros(protocol.MOST + 1, np.int64))
    with pytest.raises(ArgumentError, match="16 bytes each"):
        CacheIdentity(b"short", bytes(16), 1, 64)


def test_no_message_is_longer_than_the_longest() -> None:
    """Its rows, and its tails, may be as many bytes as fit; and so many samples beside them absent."""
    stride = protocol.LARGEST - 8
    cache = CacheIdentity.of(b"h" * 16, samples=1 << 20, stride=stride, schema="large")
    ids, lines = np.arange(protocol.MOST, dtype=np.int64), numbers(protocol.LARGEST // LINE)
    rows, tails = np.zeros((1, stride), np.uint8), np.zeros((int(lines[0]), LINE), np.uint8)
    generations = np.where(ids == 0, 0, ABSENT)
    sent = WireRecords(generations, RecordBatch(ids[:1], lines, rows, tails))
    assert sum(map(len, protocol.put(1, cache, ids, sent))) == protocol.LONGEST
    more = sent.batch._replace(tails=np.zeros((int(lines[0]) + 1, LINE), np.uint8))
    with pytest.raises(ArgumentError, match=r"rows or of tails, got .* 67,109,120 bytes"):
        protocol.put(1, cache, ids, sent._replace(batch=more))


# ---- soundness -----------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from([PLAIN, TAILED, LARGE]))
def test_a_flipped_bit_anywhere_is_found(data: st.DataObject, cache: CacheIdentity) -> None:
    ids = numbers(5, 6, 7)
    sizes: list[int | None] = [300, None, 512] if cache is TAILED else [0, None, 0]
    sent = records(cache, ids, sizes)
    rows, tails = sent.batch.rows.copy(), sent.batch.tails.copy()
    damaged = sent._replace(batch=sent.batch._replace(rows=rows, tails=tails))
    # Not covered: the run of lines that a row owns, and what lies behind a tail's end in its last line.
    tail_bits = [*range(300), *range(512, 1024)] if cache is TAILED else []
    row_bits = [at for at in range(cache.stride) if not 12 <= at < 16]
    if tail_bits and data.draw(st.booleans()):
        at = data.draw(st.sampled_from(tail_bits))
        tails.reshape(-1)[at] ^= 1 << data.draw(st.integers(0, 7))
        which = 0 if at < 512 else 1
    else:
        which = data.draw(st.integers(0, 1))
        rows[which, data.draw(st.sampled_from(row_bits))] ^= 1 << data.draw(st.integers(0, 7))
    good = [True, False, True]
    assert sound(ids, sent).tolist() == good
    good[2 * which] = False
    found = sound(ids, damaged)
    assert found.tolist() == good
    kept = damaged.verified()
    assert sound(ids, kept).tolist() == good
    assert len(kept.batch.rows) == 1
    assert len(kept.batch.tails) == kept.batch.lines.sum()


@pytest.mark.parametrize("cache", [PLAIN, TAILED])
def test_a_record_for_another_sample_is_not_sound(cache: CacheIdentity) -> None:
    ids = numbers(5, 12)  # of the same generation
    sent = records(cache, ids, [0, 0])
    swapped = sent._replace(batch=sent.batch._replace(rows=sent.batch.rows[::-1].copy()))
    assert sound(ids, sent).all()
    assert not sound(ids, swapped).any()
    assert not sound(ids + 7, sent).any()


def test_a_record_of_another_generation_is_not_sound() -> None:
    ids = numbers(5)
    sent = records(PLAIN, ids, [0])
    assert not sound(ids, sent._replace(generations=sent.generations + 1)).any()


def test_a_length_that_does_not_fit_the_lines_is_not_sound() -> None:
    """Were it believed, a checksum over another sample's tail could be made to fit."""
    ids = numbers(5)
    row, tail = record(TAILED, 5, 700, 5)
    length = TAILED.stride - RECORD_HEADER + 10
    crc = fmt.checksum(5, length, 5, memoryview(row)[RECORD_HEADER:], memoryview(tail)[:10])
    RECORD.pack_into(row, 0, length, 5, crc)
    lines = numbers(3)
    rows, tails = np.frombuffer(row, np.uint8).reshape(1, -1), np.frombuffer(tail, np.uint8)
    sent = WireRecords(numbers(5), RecordBatch(ids, lines, rows, tails.reshape(-1, LINE)))
    assert not sound(ids, sent).any()


def test_the_layout_tells_schemas_apart() -> None:
    made = {"samples": 10, "stride": 64, "schema": ["a"]}
    layouts = {
        CacheIdentity.of(bytes(16), **{**made, **change}).layout  # type: ignore[arg-type]
        for change in ({}, {"samples": 11}, {"stride": 72}, {"schema": ["b"]})
    }
    assert len(layouts) == 4
    assert CacheIdentity.of(bytes(16), **made).layout in layouts  # type: ignore[arg-type]
