"""Pictures of Pillow come back as they were stored: pixels, mode, palette, headers and class."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference
from PIL import ExifTags, Image, PngImagePlugin, TiffImagePlugin

import hotset
from hotset.store.leaves.codecs import codec_of
from hotset.store.leaves.leaf import SchemaMismatch

FORMATS = ["JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "JPEG2000", "TGA", "ICO", "PCX", "SGI"]
MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16", "RGBX", "LAB"]


def drawn(width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def opened(format: str, picture: Image.Image | None = None, **options: Any) -> Image.Image:
    file = io.BytesIO()
    (picture or drawn()).save(file, format, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def stored(picture: Image.Image) -> Image.Image:
    """The picture as a cache gives it back, once it is in the store."""
    with hotset.cache([picture] * 2, memory="16MiB") as cached:
        first, again = cached[0], cached[0]
        assert cached.stats().cached == 1
        assert difference(first, again) is None
        return again


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_an_opened_file_comes_back_as_its_picture(format: str, loaded: bool) -> None:
    picture = opened(format)
    if loaded:
        picture.load()
    again = stored(picture)
    assert type(again) is type(picture)
    assert difference(again, picture) is None
    for use in USES:
        assert use(again) == use(picture), use


USES = [
    lambda picture: (picture.format, picture.format_description, picture.get_format_mimetype()),
    lambda picture: (picture.tell(), getattr(picture, "n_frames", 1), getattr(picture, "is_animated", False)),
    lambda picture: dict(picture.getexif()),
    lambda picture: picture.convert("L").tobytes(),
    lambda picture: picture.resize((7, 5)).tobytes(),
    lambda picture: picture.crop((1, 1, 9, 9)).copy().tobytes(),
    lambda picture: np.asarray(picture).tobytes(),
    lambda picture: pickle.loads(pickle.dumps(picture)).tobytes(),
    lambda picture: picture.close(),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(40, 30), (1, 1), (7, 3), (300, 400)])
def test_every_mode_comes_back(mode: str, size: tuple[int, int]) -> None:
    picture = drawn(*size)
    made = picture.convert(mode) if mode not in ("I;16", "LAB", "RGBX") else Image.new(mode, size)
    codec = codec_of(made)
    assert codec is not None
    again = codec.unflatten(codec.flatten(made))
    assert difference(again, made) is None
    again.putpixel((0, 0), again.getpixel((0, 0)))  # it can be written


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_what_the_headers_said_comes_back(format: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.ImageDescription] = 6, "a photograph"
    picture = opened(format, exif=exif, icc_profile=b"profile" * 1000)
    again = stored(picture)
    assert dict(again.getexif()) == dict(exif) == dict(picture.getexif())
    assert again.info == picture.info
    assert again.info["icc_profile"] == b"profile" * 1000
    again.info["new"] = 1
    assert "new" not in stored(picture).info


def test_numbers_and_texts_of_pillows_own_classes_come_back() -> None:
    """As they are in photographs, and in PNG files of a Mac or of Photoshop."""
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta/>", "en", "key")
    picture = opened("PNG", pnginfo=text)
    picture.info["dpi"] = (TiffImagePlugin.IFDRational(300_001, 1_000), TiffImagePlugin.IFDRational(1, 3))
    again = stored(picture)
    assert difference(again, picture) is None
    assert again.info["XML:com.adobe.xmp"].lang == "en"
    assert [each.denominator for each in again.info["dpi"]] == [1_000, 3]
    assert difference(stored(picture.convert("L")), picture.convert("L")) is None


def test_palettes_and_transparency_come_back() -> None:
    picture = opened("PNG", drawn().quantize(17), transparency=3)
    again = stored(picture)
    assert (again.mode, again.info["transparency"]) == ("P", 3)
    assert again.getpalette() == picture.getpalette()
    assert again.convert("RGBA").tobytes() == picture.convert("RGBA").tobytes()


def test_a_picture_with_a_format_of_its_own_keeps_it() -> None:
    picture = drawn()
    picture.format = "JPEG"
    assert stored(picture).format == "JPEG"


def test_what_a_program_has_set_on_a_picture_comes_back_or_keeps_it_from_being_stored() -> None:
    picture = drawn()
    picture.label, picture.box = "cat", (1, 2, 3, 4)  # type: ignore[attr-defined]
    again: Any = stored(picture)
    assert (again.label, again.box) == ("cat", (1, 2, 3, 4))

    picture.scanner = object()  # type: ignore[attr-defined]
    codec = codec_of(picture)
    assert codec is not None
    with pytest.raises(SchemaMismatch, match="objects in the attributes"):
        codec.flatten(picture)


def test_a_jpeg_can_be_saved_with_the_subsampling_that_it_had() -> None:
    from PIL import JpegImagePlugin

    picture = opened("JPEG", subsampling="4:2:0")
    assert JpegImagePlugin.get_sampling(stored(picture)) == JpegImagePlugin.get_sampling(picture) == 2


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_files_of_several_frames_are_not_stored(format: str) -> None:
    frames = [drawn(), drawn().rotate(90)]
    picture = opened(format, frames[0], save_all=True, append_images=frames[1:])
    codec = codec_of(picture)
    assert codec is not None
    with pytest.raises(SchemaMismatch, match="TiffImageFile" if format == "TIFF" else "several frames"):
        codec.flatten(picture)
    picture.seek(1)


@pytest.mark.parametrize("bad", [0, 5])
def test_a_truncated_file_raises_where_it_is_loaded(bad: int) -> None:
    file = io.BytesIO()
    drawn(300, 300).save(file, "JPEG")
    data = file.getvalue()

    class Files(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return Image.open(io.BytesIO(data[:-2000] if index == bad else data))

    with hotset.cache(Files(), memory="16MiB") as cached:
        for _ in range(2):
            for index in range(12):
                picture = cached[index]
                if index == bad:
                    with pytest.raises(OSError, match="truncated"):
                        picture.load()
                else:
                    assert difference(picture, Files()[index]) is None
        assert cached.stats().cached == 11


def test_a_picture_whose_file_is_closed_is_no_error(tmp_path: Path) -> None:
    """Pillow cannot say any more whether a GIF has several frames."""
    path = tmp_path / "one.gif"
    drawn().quantize(16).save(path)

    def read(index: int) -> Image.Image:
        with Image.open(path) as picture:
            picture.load()
            return picture

    with pytest.warns(hotset.HotsetWarning, match="nothing of .* can be cached"):
        cached = hotset.cache(list(range(4)), transform=hotset.deterministic(read), memory="1MiB")
    with cached:
        assert [cached[index].tobytes() for index in range(4)] == [read(0).tobytes()] * 4
