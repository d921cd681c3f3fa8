"""Pictures that PIL decodes are those that it would have decoded, in every respect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from decoding import COMMAND, PRELUDE, calls, run
from helpers import rarely
from PIL import Image, features

pytestmark = pytest.mark.usefixtures("forking")
# An orientation of 6: PIL leaves it to who asks for it, and in TIFF turns the pixels itself.
TURNED = Image.Exif()
TURNED[0x0112] = 6
FORMATS = {
    "plain.jpg": {},
    "progressive.jpg": {"progressive": True, "quality": 60},
    "turned.jpg": {"exif": TURNED},
    "plain.png": {},
    "optimised.png": {"optimize": True},
    "lzw.tif": {"compression": "tiff_lzw"},
    "jpeg.tif": {"compression": "jpeg"},
    "turned-lzw.tif": {"compression": "tiff_lzw", "exif": TURNED},
    "plain.tif": {},
    "plain.bmp": {},
    "plain.gif": {},
    "plain.ppm": {},
    "plain.webp": {},
    "plain.jp2": {},
}
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")
KEPT = ("jpg", "png", "lzw.tif", "jpeg.tif")

# How a program gets at pixels; each gives all that can be seen afterwards.
SHOW = (
    PRELUDE
    + """
import glob, re, warnings
from PIL import Image, ImageFile, ImageOps, ImageSequence
warnings.simplefilter("ignore")

def state(image):
    facts = {name: re.sub("0x[0-9a-f]+", "", repr(value)) for name, value in vars(image).items()
             if name not in ("_im", "png")}
    if getattr(image, "png", None) is not None:
        facts |= {f"png.{name}": repr(value) for name, value in vars(image.png).items()}
    image.load()
    raw = image.tobytes("raw", "RGBX") if image.mode == "RGB" else image.tobytes()
    return [sorted(facts.items()), image.mode, image.size, image.readonly, list(image.getbands()),
            hashlib.sha256(raw).hexdigest(), image.getpalette(), image.im.mode]

def opened(path):
    image = Image.open(path)
    image.load()
    return state(image), repr(image.fp)

def used(path):
    with Image.open(path) as image:
        image = image.convert("RGB")
    return state(image)

def drafted(path):
    image = Image.open(path)
    image.draft("L", (image.size[0] // 2, image.size[1] // 2))
    image.load()
    return state(image)

def shrunk(path):
    image = Image.open(path)
    image.thumbnail((20, 20))
    return state(image)

def from_a_file(path):
    with open(path, "rb") as file:
        image = Image.open(file)
        image.load()
        return state(image), file.tell(), file.closed

def turned(path):
    return state(ImageOps.exif_transpose(Image.open(path)))

def changed(path):
    image = Image.open(path)
    image.load()
    image.paste(0, (0, 0, 5, 5))
    return state(image)

def frames(path):
    return [state(frame.copy()) for frame in ImageSequence.Iterator(Image.open(path))]

def twice(path):
    image = Image.open(path)
    image.load()
    return state(image), state(image.copy()), state(image.rotate(90))

WAYS = (opened, used, drafted, shrunk, from_a_file, turned, changed, frames, twice)

def everything(paths):
    return [[way.__name__, os.path.basename(path), outcome(way, path)] for path in paths for way in WAYS]
"""
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    grey = Image.fromarray(rng.integers(0, 255, (61, 83), np.uint8)).resize((166, 122))
    colour = Image.fromarray(rng.integers(0, 255, (61, 83, 3), np.uint8)).resize((166, 122))
    for mode in MODES:
        picture = (grey if mode in ("I;16", "I", "F") else colour).convert(mode)
        for name, options in FORMATS.items():
            if name.endswith("webp") and not features.check("webp"):
                continue
            path = place / f"{mode.replace(';', '_')}-{name}"
            try:
                picture.save(path, **options)  # type: ignore[arg-type]
            except (OSError, KeyError, ValueError, DeprecationWarning):
                path.unlink(missing_ok=True)  # no such pictures in this format, or soon none
    more = [colour.rotate(angle) for angle in (30, 60)]
    colour.save(place / "RGB-phone.mpo", save_all=True, append_images=more)
    colour.save(place / "RGB-moving.png", save_all=True, append_images=more)
    pages = np.stack([np.asarray(one) for one in (colour, *more)])
    tifffile.imwrite(place / "RGB-pages.tif", pages, compression="zlib", photometric="rgb")
    for name in ("RGB-plain.jpg", "RGB-plain.png", "RGB-lzw.tif"):
        content = (place / name).read_bytes()
        (place / f"cut-{name}").write_bytes(content[: len(content) * 2 // 3])
        (place / f"longer-{name}").write_bytes(content + b"more" * 50_000)
    moving = (place / "RGB-moving.png").read_bytes()
    # Within its last frame, of which PIL shows the rest as it is in the one before.
    (place / "cut-RGB-moving.png").write_bytes(moving[: len(moving) * 9 // 10])
    return place


def test_a_picture_cannot_be_told_from_a_plain_one(pictures: Path) -> None:
    """All ways to the pixels, all formats and modes; in the second round those that can be kept were."""
    program = (
        SHOW + "for _ in range(int(sys.argv[2])): say(everything(sorted(glob.glob(sys.argv[1] + '/*'))))\n"
    )
    plain = run(program, str(pictures), "1", hotset=None)
    ours = run(program, str(pictures), "2")
    assert ours.code == plain.code == 0, ours.report
    assert len(ours.said) == 2
    for round_ in ours.said:
        for got, expected in zip(round_, plain.said[0], strict=True):
            assert got == expected
    made, hits = calls(ours.report, "PIL.Image.Image.load")
    count = len([path for path in pictures.iterdir() if path.name.endswith(KEPT)])
    assert hits > 10 * count
    assert made - hits < 4 * count  # each of them once for its size, and a few times drafted


def test_large_pictures_cannot_be_told_from_plain_ones(tmp_path: Path) -> None:
    """Pillow keeps a large picture's lines in several blocks, and packs pixels in strips."""
    rng = np.random.default_rng(0)
    for mode in MODES:
        grey = mode in ("I;16", "I", "F")
        noise = Image.fromarray(rng.integers(0, 255, (90, 77) if grey else (90, 77, 3), np.uint8))
        picture = noise.resize((601, 397)).convert(mode)
        if mode == "P":
            picture.info["transparency"] = 3
        for suffix in ("png", "tif"):
            if suffix == "png" and mode in ("CMYK", "F", "I"):
                continue  # there are none
            options = {"compression": "tiff_lzw"} if suffix == "tif" else {"compress_level": 1}
            picture.save(tmp_path / f"{mode.replace(';', '_')}.{suffix}", **options)  # type: ignore[arg-type]
    for name, size in {"wide": (30_000, 3), "high": (3, 30_000), "blocks": (2900, 2100)}.items():
        noise.convert("RGB").resize(size).save(tmp_path / f"{name}.jpg", quality=50)
        noise.convert("RGBA").resize(size).save(tmp_path / f"{name}.png", compress_level=1)
    program = (
        SHOW + "for _ in range(int(sys.argv[2])): "
        "say([outcome(opened, path) for path in sorted(glob.glob(sys.argv[1] + '/*'))])\n"
    )
    plain, ours = run(program, str(tmp_path), "1", hotset=None), run(program, str(tmp_path), "2")
    assert ours.said == plain.said * 2
    count = len(list(tmp_path.iterdir()))
    assert calls(ours.report, "PIL.Image.Image.load") == (2 * count, count)


def test_damaged_files_are_as_without_us(pictures: Path) -> None:
    program = (
        SHOW
        + "for ImageFile.LOAD_TRUNCATED_IMAGES in (True, False):\n"
        + "    for _ in range(2): say(everything(sorted(glob.glob(sys.argv[1] + '/cut-*'))))\n"
    )
    plain = run(program, str(pictures), hotset=None)
    ours = run(program, str(pictures))
    assert ours.said == plain.said
    assert calls(ours.report, "PIL.Image.Image.load")[1] == 0


LOADER = (
    SHOW
    + """
import torch

class Pictures(torch.utils.data.Dataset):
    def __init__(self, paths): self.paths = paths
    def __len__(self): return len(self.paths)
    def __getitem__(self, index): return json.dumps(state(Image.open(self.paths[index]).convert("RGB")))

def walk(method):
    loader = torch.utils.data.DataLoader(Pictures(sorted(glob.glob(sys.argv[1] + "/[LPR]*plain.[jp]*g"))),
                                         batch_size=3, num_workers=2, multiprocessing_context=method,
                                         persistent_workers=method == "spawn")
    for _ in range(2): say([list(batch) for batch in loader])
"""
)


@pytest.mark.parametrize("method", rarely(["fork", "spawn"], "spawn"))
def test_workers_keep_for_one_another(pictures: Path, tmp_path: Path, method: str) -> None:
    module = tmp_path / "walking.py"
    module.write_text(LOADER)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport walking\n"
    program += f"if __name__ == '__main__': walking.walk({method!r})\n"
    plain = run(program, str(pictures), hotset=None)
    ours = run(program, str(pictures), command=COMMAND)
    assert ours.code == 0, ours.report
    assert ours.said == plain.said != []
    count = len(list(pictures.glob("[LPR]*plain.[jp]*g")))
    assert calls(ours.report, "PIL.Image.Image.load") == (2 * count, count)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    program = (
        SHOW
        + """
path = sys.argv[1] + "/a.png"
for value in (1, 2, 3):
    Image.new("L", (9, 9), value).save(path)
    say([Image.open(path).getpixel((4, 4)) for _ in range(3)])
first = Image.open(path)  # its header only
Image.new("L", (9, 9), 4).save(sys.argv[1] + "/b.png")
os.replace(sys.argv[1] + "/b.png", path)
say([first.getpixel((4, 4)), Image.open(path).getpixel((4, 4))])
"""
    )
    ran = run(program, str(tmp_path))
    assert ran.said == [[1] * 3, [2] * 3, [3] * 3, [3, 4]]
    assert "the file was written a moment ago" in ran.report


@pytest.mark.parametrize("change", ["overwritten", "cut"])
def test_a_file_that_changes_while_it_is_decoded_gives_what_pil_has_read_of_it(
    change: str, tmp_path: Path
) -> None:
    """PIL has the beginning of the file from when it was opened; hotset reads it once more."""
    program = (
        SHOW
        + """
import functools, random, time
from PIL import PngImagePlugin
change, when = sys.argv[2:]
ImageFile.LOAD_TRUNCATED_IMAGES = True
path, reads = sys.argv[1] + "/a.png", []
if change == "cut":
    Image.frombytes("L", (300, 300), random.Random(0).randbytes(90_000)).save(path)
else:
    Image.new("L", (9, 9), 2).save(path)
    other = open(path, "rb").read()
    Image.new("L", (9, 9), 1).save(path)

def changes():
    with open(path, "r+b") as file:
        file.write(other) if change == "overwritten" else file.truncate(1000)

plain = PngImagePlugin.PngImageFile.load_read

@functools.wraps(plain)
def load_read(self, count):
    reads.append(count)
    if len(reads) == 1 and change == "overwritten" and when == "midway":
        changes()
    read = plain(self, count)
    if len(reads) == 2 and change == "cut" and when == "midway":
        changes()
    return read

PngImagePlugin.PngImageFile.load_read = load_read
time.sleep(0.2)
image = Image.open(path)
if when == "before":
    changes()
say(hashlib.sha256(image.tobytes()).hexdigest())
"""
    )
    plain = run(program, str(tmp_path), change, "before", hotset=None)
    ours = run(program, str(tmp_path), change, "midway")
    assert ours.said == plain.said != []
    assert "the file is damaged, or changed meanwhile" in ours.report


def test_a_plugin_that_reads_its_file_in_its_own_way_is_left_alone(tmp_path: Path) -> None:
    program = (
        SHOW
        + """
from PIL import JpegImagePlugin
class Locked(JpegImagePlugin.JpegImageFile):
    def load_read(self, count):
        return open(sys.argv[1] + "/other.jpg", "rb").read()
for name, value in (("plain", 10), ("other", 200)):
    Image.new("L", (16, 16), value).save(sys.argv[1] + f"/{name}.jpg")
import time; time.sleep(0.2)
path = sys.argv[1] + "/plain.jpg"
for _ in range(2):
    image = Image.open(path)
    image.tile = [("jpeg", (0, 0, 16, 16), 0, image.tile[0][3])]
    other = Image.open(path)
    other.tile = list(image.tile)
    other.load_read = lambda count: open(sys.argv[1] + "/other.jpg", "rb").read()
    locked = Locked(path)
    lender = Image.open(sys.argv[1] + "/other.jpg")
    lender.fp.seek(0)
    borrowed = Image.open(path)
    borrowed.tile = list(image.tile)
    borrowed.load_read = lender.load_read
    say([one.getpixel((4, 4)) for one in (image, other, locked, borrowed)])
"""
    )
    ours = run(program, str(tmp_path))
    assert ours.said == [[10, 200, 200, 200]] * 2
    assert "by a method that is not PIL's" in ours.report


def test_threads_get_pictures_of_their_own(pictures: Path) -> None:
    program = (
        SHOW
        + """
from concurrent.futures import ThreadPoolExecutor
paths = sorted(glob.glob(sys.argv[1] + "/[LPR]*plain.[jp]*g")) * 4
with ThreadPoolExecutor(8) as pool: say([digests for digests in pool.map(changed, paths)])
"""
    )
    plain, ours = run(program, str(pictures), hotset=None), run(program, str(pictures))
    assert ours.said == plain.said != []


def test_what_is_left_alone_is_named_with_a_reason(pictures: Path) -> None:
    program = (
        SHOW
        + """
import io
for _ in range(2):
    Image.open(sys.argv[1] + "/RGB-plain.bmp").load()
    Image.open(io.BytesIO(open(sys.argv[1] + "/RGB-plain.png", "rb").read())).load()
"""
    )
    report = run(program, str(pictures)).report
    assert "its pixels are not compressed" in report
    assert "not read from a file, but from bytes" in report
    assert "Nothing was decoded by functions that hotset knows" in report
