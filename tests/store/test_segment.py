"""Segments: sparse, reached by address or path, refused with a sentence when anything about one is off."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import is_a_sentence
from kills import in_child, lingering
from stores import attached, ids, opened, resident

from hotset.errors import SegmentError
from hotset.store import format as fmt
from hotset.store.format import Geometry, Live, pack_header
from hotset.store.segment import Address, Segment
from hotset.store.store import Store

GEOMETRY = Geometry(samples=1000, stride=64, rows=500, lines=40, metadata=2)


def make(i: int) -> tuple[torch.Tensor, str]:
    return torch.full((5,), i), "t" * i


@contextlib.contextmanager
def segment(path: Path | None = None, metadata: bytes = b"{}", **sizes: int) -> Iterator[Segment]:
    geometry = Geometry(**{**vars_of(GEOMETRY), "metadata": len(metadata), **sizes})
    where = None if path is None else str(path)
    with contextlib.closing(Segment.create(geometry, metadata, path=where, limit=12345)) as made:
        yield made


def vars_of(geometry: Geometry) -> dict[str, int]:
    return {name: getattr(geometry, name) for name in ("samples", "stride", "rows", "lines", "metadata")}


def refused(where: str | Path | Address) -> str:
    """What is said about this; fails unless it is refused, by name, and no descriptor stays open."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentError) as caught:
        Store.attach(str(where) if isinstance(where, Path) else where)
    said = str(caught.value)
    assert is_a_sentence(said)
    assert (str(where) if isinstance(where, Path) else "shared memory") in said
    assert set(os.listdir("/proc/self/fd")) <= before
    return said


# Making one


def test_a_segment_of_100_gib_is_sparse_and_costs_next_to_nothing() -> None:
    before = resident()
    images = Geometry(samples=700_000, stride=150_552, rows=700_000, lines=0, metadata=0)
    with contextlib.closing(Segment.create(images, limit=100 << 30)) as made:
        assert made.geometry.size > 97 << 30
        assert os.fstat(made.fd).st_size == images.size
        assert os.fstat(made.fd).st_blocks * 512 < 1 << 20
        assert resident() - before < 10 << 20


def test_a_store_of_100_gib_touches_less_than_10_mb_with_its_first_samples() -> None:
    def image(i: int) -> torch.Tensor:
        return torch.full((3, 224, 224), i % 251, dtype=torch.uint8)

    before = resident()
    with opened(image, 700_000, 100 << 30) as store:
        for i in (0, 699_999, 350_000):
            store.fill(ids(i), image)
        found = store.read(ids(699_999))
        assert found is not None
        assert torch.equal(found[0], image(699_999))
        assert os.fstat(store.segment.fd).st_blocks * 512 < 10 << 20
        assert resident() - before < 10 << 20


def test_without_a_path_it_is_a_memfd_without_a_name() -> None:
    names = set(os.listdir("/dev/shm"))
    with segment() as made:
        # Other processes here make and remove files of torch's meanwhile.
        assert not [one for one in set(os.listdir("/dev/shm")) - names if not one.startswith("torch_")]
        assert os.readlink(f"/proc/self/fd/{made.fd}").startswith("/memfd:hotset")
        assert made.trusted
        assert not os.get_inheritable(made.fd)
        assert made.metadata == {}
        assert int(made.live[Live.LIMIT]) == 12345
        assert len(made.index) == 1000
        assert not made.index.any()
        assert made.slots.shape == (fmt.SLOTS, fmt.SLOT_WORDS)


def test_with_a_path_it_is_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    before = os.umask(0)
    try:
        with segment(path, b'{"name":"a"}') as made:
            assert path.stat().st_mode & 0o7777 == 0o600
            assert not made.trusted
            assert not os.get_inheritable(made.fd)
            assert made.metadata == {"name": "a"}
            assert path.stat().st_size == made.geometry.size
            assert path.stat().st_blocks * 512 < 1 << 20
    finally:
        os.umask(before)


@pytest.mark.parametrize("there", ["file", "symlink", "dangling symlink", "folder"])
def test_a_path_that_exists_is_never_taken_over(tmp_path: Path, there: str) -> None:
    path, other = tmp_path / "segment", tmp_path / "other"
    if there == "folder":
        path.mkdir()
    elif there == "file":
        path.write_text("precious")
    else:
        if there == "symlink":
            other.write_text("precious")
        path.symlink_to(other)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="exists"), segment(path):
        pass
    assert set(os.listdir("/proc/self/fd")) <= before
    assert not other.exists() or other.read_text() == "precious"


def test_what_could_not_be_made_leaves_no_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    before = set(os.listdir("/proc/self/fd"))
    for path in (None, tmp_path / "segment"):
        with pytest.raises(OSError, match="No space"), segment(path):
            pass
    assert set(os.listdir("/proc/self/fd")) <= before
    assert list(tmp_path.iterdir()) == []


def test_a_sealed_memfd_can_neither_shrink_nor_grow() -> None:
    with segment() as made:
        others = f"/proc/{os.getpid()}/fd/{made.fd}"
        for size in (0, 4096, made.geometry.size - 1, made.geometry.size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(made.fd, size)
            with pytest.raises(PermissionError):
                os.truncate(others, size)
        assert os.fstat(made.fd).st_size == made.geometry.size


# Reaching one


def test_another_process_reaches_a_memfd_by_its_address_and_sees_what_is_written() -> None:
    with segment() as made:
        pid, fd, inode, nonce = made.address
        assert pid == os.getpid()
        made.index[7] = 4711
        code = (
            "from hotset.store.segment import Address, Segment\n"
            f"s = Segment.attach(Address({pid}, {fd}, {inode}, {nonce!r}))\n"
            "assert s.trusted and s.index[7] == 4711 and s.metadata == {}, s.index[:9]\n"
            "s.index[8] = 4712\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
        assert made.index[8] == 4712


def test_a_memfd_is_reached_through_any_process_that_has_it() -> None:
    with segment() as made:
        inode, nonce = made.address.inode, made.nonce
        with lingering(lambda: None) as pid:
            with contextlib.closing(Segment.attach(Address(pid, made.fd, inode, nonce))) as again:
                again.index[3] = 5
            assert made.index[3] == 5


def test_a_file_is_reached_by_its_path_and_outlives_its_maker(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    with opened(make, 10, path=path) as store:
        store.fill(np.arange(10), make)
    with attached(path) as again:
        assert not again.segment.trusted
        assert again.present(np.arange(10)).all()
        assert again.schema.to_json() == store.schema.to_json()


def test_closing_leaves_the_mapping_to_who_still_looks_at_it() -> None:
    with segment() as made:
        index = made.index
        index[0] = 9
        made.close()
        made.close()
        assert index[0] == 9


def test_discard_gives_memory_back_and_reserve_takes_it() -> None:
    with segment(rows=1 << 16, stride=256) as made:
        at, size = made.geometry.rows_at, 8 << 20
        blocks = os.fstat(made.fd).st_blocks
        assert made.reserve(at, size)
        assert (os.fstat(made.fd).st_blocks - blocks) * 512 == size
        made.buffer[at : at + 4] = b"abcd"
        made.populate(at, size)
        assert made.buffer[at : at + 4] == b"abcd"
        made.discard(at, size)
        assert os.fstat(made.fd).st_blocks == blocks
        assert made.buffer[at : at + 4] == bytes(4)
        made.discard(at, 0)


# Refusing one


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.1])
def test_a_truncated_or_grown_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "segment"
    with opened(make, 10, path=path) as store:
        size = store.segment.geometry.size
    os.truncate(path, int(size * share) // 4096 * 4096)
    refused(path)


@pytest.mark.parametrize("off", [-4096, -1, 1])
def test_a_file_that_lost_its_last_page_or_byte_is_refused(tmp_path: Path, off: int) -> None:
    path = tmp_path / "segment"
    with segment(path) as made:
        os.truncate(path, made.geometry.size + off)
    assert str(GEOMETRY.size + off) in refused(path)


@pytest.mark.parametrize("length", [0, 1, 75, 100, 4095])
def test_a_file_that_ends_inside_its_header_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "segment"
    with segment(path):
        os.truncate(path, length)
    refused(path)


def test_every_flipped_bit_of_a_files_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    with segment(path):
        pass
    fixed = path.read_bytes()[:76]
    with path.open("r+b") as file:
        for bit in range(8 * len(fixed)):
            damaged = bytearray(fixed)
            damaged[bit // 8] ^= 1 << bit % 8
            file.seek(0)
            file.write(damaged)
            file.flush()
            refused(path)


def forged(path: Path, metadata: bytes, *, claimed: int | None = None, **sizes: int) -> Path:
    """A file with a header that fits it, and any metadata; ``claimed`` is how long the header says it is."""
    length = len(metadata) if claimed is None else claimed
    geometry = Geometry(**{**vars_of(GEOMETRY), "lines": 0, "metadata": length, **sizes})
    with path.open("wb") as file:
        file.truncate(geometry.size)
        file.write(pack_header(geometry, bytes(16)))
        file.seek(fmt.METADATA_CRC_AT)
        file.write(zlib.crc32(metadata).to_bytes(4, "little"))
        file.seek(fmt.HEADER_BYTES)
        file.write(metadata)
    return path


def _leaf(**described: Any) -> dict[str, Any]:
    array = {"leaf": "array", "library": "numpy", "dtype": "<i8", "ndim": 1, "shape": [2], "order": [0]}
    return {**array, "as_lies": True, **described}


_GROUP = b'{"group":"list","keys":[],"type":null,"codec":null,"children":['
FORGED_METADATA = {
    "nothing": b"",
    "no text": b"\xff\xfe\xfd",
    "no JSON": b"{'schema': 1}",
    "cut off": b'{"schema": {"leaf": "no',
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "no schema": b"{}",
    "a schema that is a list": b'{"schema": [1]}',
    "a schema that is null": b'{"schema": null}',
    "nested too deep": b"[" * 200_000,
    "a schema nested too deep": b'{"schema":' + b'{"children":[' * 5000 + b"1" + b"]}" * 5000 + b"}",
    "groups nested too deep": b'{"schema":' + _GROUP * 5000 + b'{"leaf":"none"}' + b"]}" * 5000 + b"}",
    "an unknown leaf": b'{"schema": {"leaf": "pickle"}}',
    "an array of objects": json.dumps({"schema": _leaf(dtype="|O")}).encode(),
    "an array of nothing known": json.dumps({"schema": _leaf(dtype="<x9")}).encode(),
    "a negative shape": json.dumps({"schema": _leaf(shape=[-2])}).encode(),
    "an order that is none": json.dumps({"schema": _leaf(order=[1])}).encode(),
    "dimensions that are not the shape's": json.dumps({"schema": _leaf(ndim=2)}).encode(),
    "a number of objects": b'{"schema": {"leaf": "number", "kind": "|O"}}',
    "text of no kind": b'{"schema": {"leaf": "text", "kind": "pickle"}}',
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED_METADATA)
def test_forged_metadata_is_refused_by_name(tmp_path: Path, what: str) -> None:
    path = forged(tmp_path / "segment", FORGED_METADATA[what], stride=32)
    with pytest.raises(SegmentError) as caught:
        Store.attach(str(path))
    assert is_a_sentence(str(caught.value))


@pytest.mark.parametrize("stride", [24, 32, 48, 4096])
def test_a_schema_whose_rows_are_not_the_segments_is_refused(tmp_path: Path, stride: int) -> None:
    schema = json.dumps({"schema": _leaf()}).encode()
    with attached(forged(tmp_path / "right", schema, stride=40)) as store:
        assert store.schema.stride == 40
    with pytest.raises(SegmentError):
        Store.attach(str(forged(tmp_path / "wrong", schema, stride=stride)))


def test_a_schema_with_tails_is_refused_where_the_segment_has_no_lines(tmp_path: Path) -> None:
    text = b'{"schema": {"leaf": "text", "kind": "str"}}'
    with attached(forged(tmp_path / "right", text, stride=32, lines=4)):
        pass
    with pytest.raises(SegmentError):
        Store.attach(str(forged(tmp_path / "none", text, stride=32, lines=0)))


def test_flipped_bits_of_the_metadata_are_found(tmp_path: Path) -> None:
    """Another key, dtype or order would make wrong samples out of sound records."""
    path = tmp_path / "segment"

    def sample(i: int) -> dict[str, Any]:
        return {"image": torch.arange(4) + i, "label": i}

    with opened(sample, 3, path=path) as store:
        store.fill(np.arange(3), sample)
        length = store.segment.geometry.metadata
    sound = path.read_bytes()[fmt.HEADER_BYTES : fmt.HEADER_BYTES + length]
    accepted = []
    with path.open("r+b") as file:
        for bit in range(8 * length):
            damaged = bytearray(sound)
            damaged[bit // 8] ^= 1 << bit % 8
            file.seek(fmt.HEADER_BYTES)
            file.write(damaged)
            file.flush()
            with contextlib.suppress(SegmentError):
                Store.attach(str(path)).close()
                accepted.append(bytes(damaged))
    assert accepted == []


def test_a_second_name_and_another_owner_are_refused(tmp_path: Path) -> None:
    right = forged(tmp_path / "right", b'{"schema": {"leaf": "text", "kind": "str"}}', stride=32, lines=4)
    os.link(right, tmp_path / "second")
    assert "hard link" in refused(right)
    (tmp_path / "second").unlink()
    with attached(right):
        pass
    if os.geteuid() == 0:
        os.chown(right, 12345, -1)
        assert "must own it" in refused(right)


def test_metadata_longer_than_memory_is_refused_and_not_read(tmp_path: Path) -> None:
    refused(forged(tmp_path / "segment", b"", claimed=1 << 40))


def test_a_file_larger_than_address_space_is_refused() -> None:
    """A tmpfs holds sparse files that no mapping does."""
    path = Path(f"/dev/shm/hotset-test-{os.getpid()}")
    try:
        refused(forged(path, b"{}", stride=1 << 20, rows=(1 << 40) - 1))
    finally:
        path.unlink()


@pytest.mark.parametrize(
    "kind", ["missing", "empty", "text", "folder", "fifo", "socket", "device", "symlink", "nul"]
)
def test_what_is_no_segment_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "segment"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a segment, but long enough to hold a header. " * 200)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "nul":
        path = tmp_path / "a\0b"
    elif kind == "symlink":
        with segment(tmp_path / "real"):
            path.symlink_to(tmp_path / "real")
    refused(path)


def test_a_stale_address_is_refused() -> None:
    with segment() as made, segment() as other:
        pid, fd, inode, nonce = made.address
        refused(Address(pid, other.fd, inode, nonce))
        refused(Address(pid, fd, inode + 1, nonce))
        assert "another cache" in refused(Address(pid, fd, inode, bytes(16)))
        refused(Address(pid, 1 << 20, inode, nonce))
        refused(Address(1 << 22, fd, inode, nonce))
        with lingering(lambda: None) as pid:
            pass
        refused(Address(pid, fd, inode, nonce))
    refused(Address(os.getpid(), fd, inode, nonce))


def test_a_descriptor_of_something_else_is_refused(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        for fd in (reading, writing):
            refused(Address(os.getpid(), fd, os.fstat(fd).st_ino, bytes(16)))
    finally:
        os.close(reading)
        os.close(writing)


def test_an_owner_that_closed_it_meanwhile_is_refused_and_its_attached_ones_go_on() -> None:
    with opened(make, 10) as store:
        store.fill(np.arange(10), make)
        address = store.segment.address
        with attached(address) as second:
            store.close()
            refused(address)
            assert second.present(np.arange(10)).all()

            def third() -> None:
                with attached(second) as store:
                    assert store.present(np.arange(10)).all()

            in_child(third)


def test_a_file_that_has_got_its_number_is_not_written_to(tmp_path: Path) -> None:
    """A program that closes all descriptors, as one that becomes a daemon does, gets their numbers anew."""
    with segment() as made, (tmp_path / "mine").open("w+b") as mine:
        kept = os.dup(made.fd)
        os.dup2(mine.fileno(), made.fd)  # os.closerange, then open
        try:
            assert not made.reserve(0, 1 << 16)
            with pytest.raises(OSError, match="Bad file descriptor"):
                made.write(memoryview(b"record"), 0)
        finally:
            os.dup2(kept, made.fd)
            os.close(kept)
        assert made.reserve(0, 1 << 16)
    assert (tmp_path / "mine").stat().st_size == 0


def test_the_headers_checksum_is_crc_32() -> None:
    with segment() as made:
        fixed = made.buffer[:76]
        assert struct.unpack("<I", fixed[72:]) == (zlib.crc32(fixed[:72]),)
