"""The digits of the examples: IDX files that are read exactly or refused in a sentence, and what is cached.

Truth is the format itself, written here byte by byte, and scikit-learn's digits.
"""

from __future__ import annotations

import gzip
import importlib.util
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, failure, is_a_sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import hotset
from hotset.dataset.dataset_proxy import current_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("mnist", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mnist = load_example()

IMAGES = np.arange(3 * 28 * 28, dtype=np.int64).reshape(3, 28, 28).astype(np.uint8)
LABELS = np.array([7, 0, 9], np.uint8)


def idx(values: np.ndarray[Any, Any]) -> bytes:
    """The file's bytes, by the format's own words."""
    sizes = b"".join(struct.pack(">I", size) for size in values.shape)
    return struct.pack(">HBB", 0, 8, values.ndim) + sizes + values.tobytes()


def put(folder: Path, part: str = "train", images: Any = IMAGES, labels: Any = LABELS) -> Path:
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


# Files


@settings(deadline=None, max_examples=50)
@given(arrays(np.uint8, array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)), st.booleans())
def test_what_is_written_is_the_format_and_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: Any, compressed: bool
) -> None:
    path = tmp_path_factory.mktemp("idx") / ("values.gz" if compressed else "values")
    mnist.write_idx(path, values)
    data = path.read_bytes()
    assert (gzip.decompress(data) if compressed else data) == idx(values)
    read = mnist.read_idx(path, values.ndim)
    np.testing.assert_array_equal(read, values)
    assert read.shape == values.shape


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_file_that_lost_or_gained_bytes_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = idx(IMAGES[:, :3, :3])
    path = tmp_path_factory.mktemp("idx") / "images"
    length = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(data.draw(st.sampled_from([whole[:length], whole + whole[: length + 1]])))
    found = failure(lambda: mnist.read_idx(path, 3))
    assert found.kind is ValueError
    assert is_a_sentence(found.text)
    assert str(path) in found.text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "nothing"),
        (idx(LABELS), "00 00 08 01"),
        (b"\0\0\x0d" + idx(IMAGES)[3:], "00 00 0d 03"),
        (b"\x89PNG\r\n" * 9, "89 50 4e 47"),
        (gzip.compress(idx(IMAGES)), "whose names end in .gz"),
        (struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3), "79,228,162,458,924,105,385,300,197,391"),
    ],
    ids=["empty", "labels", "floats", "png", "compressed", "huge"],
)
def test_a_file_of_another_kind_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(data)
    found = failure(lambda: mnist.read_idx(tmp_path / "images", 3))
    assert found.kind is ValueError
    assert words in found.text


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_a_damaged_compressed_file_is_refused(damage: str, tmp_path: Path) -> None:
    data = bytearray(gzip.compress(idx(IMAGES)))
    if damage == "flipped":
        data[len(data) // 2] ^= 255
    path = tmp_path / "images.gz"
    path.write_bytes({"cut": data[:-20], "flipped": data, "plain": idx(IMAGES)}[damage])
    found = failure(lambda: mnist.read_idx(path, 3))
    assert found.kind is ValueError
    assert "cannot be decompressed" in found.text


# Datasets


@pytest.mark.parametrize("compressed", [False, True])
def test_a_folders_files_are_used(compressed: bool, tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, "t10k", IMAGES[:2] + 1, LABELS[:2])
    if compressed:
        for path in list(tmp_path.iterdir()):
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    train, test = mnist.open_digits(tmp_path, ())
    assert (len(train), len(test)) == (3, 2)
    equal_batches(train[2], (torch.from_numpy(IMAGES[2:3].copy()), 9))
    equal_batches(test[0], (torch.from_numpy(IMAGES[:1] + 1), 7))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    put(tmp_path)
    found = failure(lambda: mnist.open_digits(tmp_path))
    assert found.kind is FileNotFoundError
    assert "t10k-images-idx3-ubyte" in found.text
    assert is_a_sentence(found.text)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    found = failure(lambda: mnist.Mnist(put(tmp_path, labels=LABELS[:2]), "train"))
    assert (found.kind, "3 pictures" in found.text, "2 labels" in found.text) == (ValueError, True, True)
    found = failure(lambda: mnist.Mnist(put(tmp_path, labels=LABELS + 1), "train"))
    assert (found.kind, "a label 10" in found.text) == (ValueError, True)


@pytest.fixture(scope="module")
def digits() -> Any:
    return mnist.open_digits(None, ())


def test_without_a_folder_the_digits_are_scikit_learns(digits: Any) -> None:
    from sklearn.datasets import load_digits

    truth = load_digits()
    train, test = digits
    assert (len(train), len(test)) == (1438, 359)
    order = np.argsort(np.arange(len(truth.target)) % 5 == 4, kind="stable")  # those for testing last
    labels = torch.cat([train.labels, test.labels])
    assert labels.tolist() == truth.target[order].tolist()
    images = torch.cat([train.images, test.images])
    assert images.shape == (1797, 28, 28)
    assert images.dtype == torch.uint8
    inner = images[:, 2:-2, 2:-2].reshape(-1, 8, 3, 8, 3)
    for row in range(3):
        for column in range(3):
            back = np.rint(inner[:, :, row, :, column].numpy() * (16 / 255))
            np.testing.assert_array_equal(back, truth.images[order])
    assert int(images.sum()) == int(inner.sum()), "the margin is not black"
    assert int(images.max()) == 255
    for half in digits:
        assert torch.bincount(half.labels, minlength=10).min() > 20


def test_digits_are_written_alike_each_time(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        mnist.write_digits(folder)
    one, two = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert len(one) == 4
    assert one == two


# Transforms


def test_pictures_for_lenet_are_resized_rescaled_and_normalised(digits: Any) -> None:
    picture = torch.zeros(1, 28, 28, dtype=torch.uint8)
    picture[0, :, 14:] = 255
    for function in mnist.FOR_LENET:
        picture = function(picture)
    assert picture.shape == (1, 32, 32)
    assert picture.dtype == torch.float32
    torch.testing.assert_close(picture[0, :, 0], torch.full((32,), -0.1307 / 0.3081))
    torch.testing.assert_close(picture[0, :, -1], torch.full((32,), (1 - 0.1307) / 0.3081))
    # Bilinear: the middle of column 15 is at 15.5 x 28/32 - 0.5 = 13.0625 of the columns it is made of.
    torch.testing.assert_close(picture[0, :, 15], torch.full((32,), (0.0625 - 0.1307) / 0.3081))


def test_all_of_it_is_cached_and_nothing_is_changed(digits: Any, tmp_path: Path) -> None:
    plain, _ = mnist.open_digits(None)
    with hotset.cache(mnist.open_digits(None)[0], memory="64MiB") as cached:
        assert not current_of(cached).source.live
        batches = list(hotset.DataLoader(cached, batch_size=100))
        assert cached.stats().cached == len(plain)
        again = list(hotset.DataLoader(cached, batch_size=100))
    for number, (batch, warm) in enumerate(zip(batches, again, strict=True)):
        rows = range(number * 100, min(number * 100 + 100, len(plain)))
        expected = torch.utils.data.default_collate([plain[row] for row in rows])
        equal_batches(batch, expected)
        equal_batches(warm, expected)


@pytest.mark.chaos  # another test runs it without a folder, and those above read folders
def test_it_runs_on_a_folder(tmp_path: Path) -> None:
    put(put(tmp_path), "t10k")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 pictures of (28, 28), of each digit [1, 0, 0, 0, 0, 0, 0, 1, 0, 1]") == 2
