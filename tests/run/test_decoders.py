"""Functions of other libraries below ``hotset run``: what they give, say and raise is their own."""

from __future__ import annotations

import enum
import os
import time
from pathlib import Path

import numpy as np
import pytest
from decoding import COMMAND, PRELUDE, Ran, calls, run

from hotset.run.call_identity import _MOMENT_SECONDS, LeftAlone, check_age, plain

pytestmark = pytest.mark.usefixtures("forking")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that several libraries read."""
    from PIL import Image

    place = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(1)
    colour = Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    colour.save(place / "colour.jpg")
    colour.save(place / "turned.jpg", exif=exif)
    colour.save(place / "colour.png")
    colour.convert("L").save(place / "grey.png")
    colour.convert("RGBA").save(place / "alpha.png")
    Image.fromarray(rng.integers(0, 65535, (40, 60), np.uint16)).save(place / "deep.png")
    (place / "not.jpg").write_bytes(b"nothing")
    return place


def compared(program: str, files: Path, *options: str, **how: str) -> Ran:
    """Run ``program`` without and with ``hotset run``; what they print is the same. Returns the latter."""
    plain = run(PRELUDE + program, str(files), hotset=None)
    ours = run(PRELUDE + program, str(files), hotset=("--memory", "256MiB", *options), **how)
    assert ours.code == plain.code == 0, plain.report + ours.report
    for got, expected in zip(ours.said, plain.said, strict=True):
        assert got == expected, ours.report
    assert plain.said
    return ours


def rounds(lines: str, count: int = 3) -> str:
    return f"root = sys.argv[1] + '/'\nfor _ in range({count}):\n" + "".join(
        f"    say({line})\n" for line in lines.strip().splitlines()
    )


def test_cv2_imread(files: Path) -> None:
    pytest.importorskip("cv2")
    program = "import cv2\nfrom pathlib import Path\n" + rounds("""
outcome(cv2.imread, root + "colour.jpg")
outcome(cv2.imread, root + "turned.jpg")
outcome(cv2.imread, root + "turned.jpg", cv2.IMREAD_IGNORE_ORIENTATION | cv2.IMREAD_COLOR)
outcome(cv2.imread, root + "deep.png")
outcome(cv2.imread, root + "deep.png", cv2.IMREAD_UNCHANGED)
outcome(cv2.imread, root + "alpha.png", flags=cv2.IMREAD_UNCHANGED)
outcome(cv2.imread, filename=root + "colour.png", flags=0)
outcome(cv2.imread, root + "missing.png")
outcome(cv2.imread, root + "not.jpg")
outcome(cv2.imread, Path(root) / "colour.png")
outcome(cv2.imread, 3)
outcome(cv2.imread)
outcome(cv2.imread, root + "colour.png", "red")
[cv2.imread.__name__, cv2.imread.__doc__[:20], cv2.imread.__module__]
""")
    ours = compared(program, files, command=COMMAND)
    made, hits = calls(ours.report, "cv2.imread")
    assert (made - hits) <= 9
    assert hits >= 14


def test_a_built_in_function_binds_nothing_pickles_and_moves_no_generator(files: Path) -> None:
    """And what the caller does to an array stays with the caller."""
    pytest.importorskip("cv2")
    program = """
import cv2, pickle, copy, random, numpy
class Reader:
    read = cv2.imread
    def __init__(self, path): self.path = path
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
for _ in range(3):
    say(outcome(Reader("x").read, sys.argv[1] + "/colour.jpg"))
    picture = cv2.imread(sys.argv[1] + "/colour.jpg")
    say(digest(picture))
    picture[:] = 7
    say([random.random(), numpy.random.rand(), torch.rand(1).item()])
say([pickle.loads(pickle.dumps(cv2.imread)) is cv2.imread, copy.deepcopy(cv2.imread) is cv2.imread])
say([repr(cv2.imread.__self__), cv2.imread.__text_signature__])
"""
    assert calls(compared(program, files).report, "cv2.imread") == (6, 5)


@pytest.mark.chaos  # it is imported for long; cv2 is another library whose functions are kept
def test_torchvision(files: Path) -> None:
    pytest.importorskip("torchvision")
    program = """
LINES = 2
from benchmarks.operators import define_torchvision_operators
define_torchvision_operators()
import torch, torchvision
import torchvision.io.image as functions
if not functions._has_image_ops():  # torchvision without its extension: the same functions, with PIL
    import io, numpy
    from PIL import Image, ImageOps
    def decode(data, mode, turn=False):
        picture = Image.open(io.BytesIO(data.numpy().tobytes()))
        picture = (ImageOps.exif_transpose(picture) if turn else picture).convert("L" if mode == 1 else "RGB")
        array = numpy.array(picture)  # the channels last, also of a grey picture, as the extension has them
        return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)
    library = torch.library.Library("image", "FRAGMENT")
    library.define("read_file(str path) -> Tensor")
    library.define("decode_image(Tensor data, int mode, bool turn=False) -> Tensor")
    read = lambda path: torch.from_numpy(numpy.fromfile(path, numpy.uint8))
    library.impl("read_file", read, "CompositeImplicitAutograd")
    library.impl("decode_image", decode, "CompositeImplicitAutograd")
    functions._has_image_ops = lambda: True
from torchvision.io import ImageReadMode, decode_image, read_file, read_image
import inspect
say(str(inspect.signature(read_image)))
""" + rounds("""
outcome(read_image, root + "colour.jpg")
outcome(read_image, path=root + "colour.png", mode=ImageReadMode.GRAY)
outcome(torchvision.io.read_image, root + "turned.jpg", apply_exif_orientation=True)
outcome(decode_image, root + "colour.jpg", "RGB")
outcome(decode_image, read_file(root + "colour.jpg"))
outcome(read_image, root + "missing.png")
outcome(read_image, root + "not.jpg")
outcome(read_image)
""")
    ours = compared(program, files)
    assert calls(ours.report, "torchvision.io.image.read_image")[1] == 6
    assert calls(ours.report, "torchvision.io.image.decode_image")[1] == 2


@pytest.mark.chaos  # PIL itself is in test_pillow.py
def test_imageio_and_skimage_read_with_pil(files: Path) -> None:
    pytest.importorskip("imageio")
    pytest.importorskip("skimage")
    program = "import imageio.v2, imageio.v3, skimage.io\n" + rounds("""
outcome(imageio.v2.imread, root + "colour.jpg")
outcome(imageio.v3.imread, root + "colour.png")
outcome(skimage.io.imread, root + "grey.png")
outcome(skimage.io.imread, root + "colour.jpg", as_gray=True)
""")
    assert calls(compared(program, files).report, "PIL.Image.Image.load")[1] >= 8


@pytest.mark.chaos  # numpy.load is another function of files that is kept
def test_tifffile(files: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    stack = np.random.default_rng(2).integers(0, 255, (5, 30, 40), np.uint8)
    tifffile.imwrite(files / "stack.tif", stack, compression="zlib")
    tifffile.imwrite(files / "big.tif", stack.astype(">u2"), byteorder=">")
    tifffile.imwrite(files / "one.ome.tif", stack, metadata={"axes": "ZYX"})
    program = "import tifffile, skimage.io\n" + rounds("""
outcome(tifffile.imread, root + "stack.tif")
outcome(tifffile.imread, root + "stack.tif", key=2)
outcome(tifffile.imread, root + "stack.tif", key=slice(0, 3))
outcome(tifffile.imread, root + "big.tif")
outcome(tifffile.imread, root + "one.ome.tif")
outcome(tifffile.imread, [root + "stack.tif", root + "stack.tif"])
outcome(skimage.io.imread, root + "stack.tif")
outcome(tifffile.imread, root + "not.jpg")
""")
    ours = compared(program, files)
    assert calls(ours.report, "tifffile.tifffile.imread")[1] in (8 + 3, 8 + 2)
    assert "its pictures may be in several files" in ours.report


def test_numpy_load(files: Path) -> None:
    array = np.random.default_rng(3).normal(size=(20, 30))
    np.save(files / "c.npy", array)
    np.save(files / "f.npy", np.asfortranarray(array))
    np.save(files / "scalar.npy", np.float32(3))
    np.save(files / "empty.npy", np.zeros((3, 0, 2), np.float32))  # no boxes in a picture
    np.save(files / "objects.npy", np.array([{}, None], object), allow_pickle=True)
    np.save(files / "records.npy", np.zeros(3, [("a", "i4"), ("b", "U5")]))
    np.savez(files / "many.npz", a=array, b=array)
    program = "import numpy\n" + rounds("""
outcome(numpy.load, root + "c.npy")
outcome(numpy.load, root + "f.npy")
outcome(numpy.load, root + "scalar.npy")
outcome(numpy.load, root + "empty.npy")
outcome(numpy.load, root + "records.npy")
outcome(numpy.load, root + "objects.npy")
outcome(numpy.load, root + "objects.npy", allow_pickle=True)
outcome(lambda path: dict(numpy.load(path)), root + "many.npz")
outcome(numpy.load, root + "c.npy", mmap_mode="r")
outcome(numpy.load, root + "missing.npy")
outcome(numpy.load, open(root + "c.npy", "rb"))
""")
    ours = compared(program, files)
    assert calls(ours.report, "numpy.load")[1] in (8, 10)
    assert "an array of Python objects" in ours.report


def test_arrays_of_an_archive(files: Path) -> None:
    array = np.random.default_rng(3).normal(size=(20, 30)).astype(np.float32)
    np.savez_compressed(files / "packed.npz", image=array, label=np.asfortranarray(array), one=np.float32(3))
    np.savez(files / "stored.npz", array, objects=np.array([{}, None], object))
    program = "import io, numpy\npacked = numpy.load(sys.argv[1] + '/packed.npz')\n" + rounds("""
outcome(lambda: numpy.load(root + "packed.npz")["image"])
outcome(lambda: numpy.load(root + "packed.npz")["image.npy"])
outcome(lambda: numpy.load(root + "packed.npz")["missing"])
outcome(lambda: [list(part) for part in numpy.load(root + "packed.npz").items()])
outcome(lambda: [packed["label"], packed.f.one, packed.get("image"), packed.files])
outcome(lambda: numpy.load(root + "stored.npz")["arr_0"])
outcome(lambda: numpy.load(root + "stored.npz")["objects"])
outcome(lambda: numpy.load(root + "stored.npz", allow_pickle=True)["objects"])
outcome(lambda: numpy.load(io.BytesIO(open(root + "packed.npz", "rb").read()))["image"])
outcome(lambda: numpy.load(open(root + "packed.npz", "rb"))["image"])
outcome(numpy.load(root + "packed.npz").close)
""")
    ours = compared(program, files)
    kept = {"image": 5, "label": 2, "one": 2, "arr_0": 1}  # how often a round asks for them
    objects = 2  # they are not kept
    made, hits = calls(ours.report, "numpy.lib.npyio.NpzFile.__getitem__")
    assert made == 3 * (sum(kept.values()) + objects)
    assert made - hits == len(kept) + 3 * objects
    assert "but from bytes or an object" in ours.report


def test_an_archive_that_is_written_anew_in_place_while_it_is_open(tmp_path: Path) -> None:
    """What is kept of the new content is not what its old directory leads to."""
    file = tmp_path / "a.npz"
    length = 99_999  # more bytes than an open file keeps in a buffer
    np.savez(file, a=np.full(length, 1))
    (tmp_path / "next").write_bytes(file.read_bytes())
    np.savez(tmp_path / "next.npz", a=np.full(length, 2))
    program = """
import numpy, time
path = sys.argv[1] + "/a.npz"
first = numpy.load(path)
say(outcome(lambda: first["a"]))
with open(path, "r+b") as file: file.write(open(sys.argv[1] + "/next.npz", "rb").read())
time.sleep(0.2)
for _ in range(2): say(outcome(lambda: numpy.load(path)["a"]))
say(outcome(lambda: first["a"]))
with open(path, "r+b") as file: file.write(open(sys.argv[1] + "/next", "rb").read())
"""
    time.sleep(2 * _MOMENT_SECONDS)
    ours = compared(program, tmp_path)
    assert ours.said[3][0] == "BadZipFile"
    assert calls(ours.report, "numpy.lib.npyio.NpzFile.__getitem__")[1] == 1


def test_slices_of_an_hdf5_file(files: Path) -> None:
    h5py = pytest.importorskip("h5py")
    array = np.random.default_rng(3).integers(0, 255, (6, 20, 30), np.uint8)
    with h5py.File(files / "packed.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(1, 20, 30), compression="gzip")
        file.create_dataset("group/names", data=["a", "b"], chunks=(1,), compression="gzip")
        file.create_dataset("plain", data=array)
        file["linked"] = h5py.SoftLink("/x")
        layout = h5py.VirtualLayout((6, 20, 30), np.uint8)
        layout[:] = h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("virtual", layout)
    with h5py.File(files / "links.h5", "w") as file:
        file["x"] = h5py.ExternalLink("packed.h5", "/x")
    with h5py.File(files / "other.h5", "w") as file:
        file.create_dataset("x", data=array + 1, chunks=(1, 20, 30), compression="lzf")
    program = """
import h5py, numpy
def read(path, name, index, **how):
    with h5py.File(path, "r", **how) as file: return file[name][index]
""" + rounds("""
outcome(read, root + "packed.h5", "x", 2)
outcome(read, root + "packed.h5", "x", numpy.int64(2))
outcome(read, root + "packed.h5", "x", -1)
outcome(read, root + "packed.h5", "x", (slice(1, 3), ..., 4))
outcome(read, root + "packed.h5", "x", [0, 3])
outcome(read, root + "packed.h5", "x", ())
outcome(read, root + "packed.h5", "linked", 2)
outcome(read, root + "links.h5", "x", 2)
outcome(read, root + "other.h5", "x", 2)
outcome(read, root + "packed.h5", "x", numpy.array([0, 3]))
outcome(read, root + "packed.h5", "x", 6)
outcome(read, root + "packed.h5", "x", None)
outcome(read, root + "packed.h5", "x", (0, 0, 0))
outcome(read, root + "packed.h5", "group/names", 0)
outcome(read, root + "packed.h5", "plain", 2)
outcome(read, root + "packed.h5", "virtual", 2)
outcome(read, root + "packed.h5", "x", 2, driver="core")
outcome(lambda: h5py.File(root + "packed.h5", "r")["x"].astype("f4")[2])
""")
    ours = compared(program, files)
    made, hits = calls(ours.report, "h5py._hl.dataset.Dataset.__getitem__")
    kept = 8  # the first one is asked for through a link, too
    not_kept = 4  # two errors, a number of numpy's, an object
    assert (made, hits) == (3 * (kept + 1 + not_kept), 3 * (kept + 1) - kept)
    for reason in (
        "not compressed",
        "may be written to",
        "another type",
        "argument index is a numpy.ndarray",
    ):
        assert reason in ours.report


def test_numpy_reads_text(files: Path) -> None:
    """Clouds of points come as text: ModelNet's, for one."""
    (files / "points.txt").write_text("".join(f"{i}.5,{-i},{i * i}\n" for i in range(40)))
    (files / "gaps.txt").write_text("1,2\n3,\n")
    program = "import io, numpy\n" + rounds("""
outcome(numpy.loadtxt, root + "points.txt", delimiter=",")
outcome(numpy.loadtxt, root + "points.txt", numpy.float32, "#", ",", usecols=(0, 2), unpack=True)
outcome(numpy.loadtxt, root + "points.txt", delimiter=",", converters={0: lambda text: float(text) + 1})
outcome(numpy.loadtxt, io.StringIO("1 2"))
outcome(numpy.loadtxt, root + "gaps.txt", delimiter=",")
outcome(numpy.loadtxt, root + "missing.txt")
outcome(numpy.genfromtxt, root + "gaps.txt", delimiter=",", filling_values=7)
outcome(numpy.genfromtxt, root + "points.txt", delimiter=",", skip_header=3)
""")
    ours = compared(program, files)
    assert calls(ours.report, "numpy.loadtxt")[1] == calls(ours.report, "numpy.genfromtxt")[1] == 4
    assert "argument converters is a " in ours.report


def test_nibabel(files: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    volume = np.random.default_rng(4).integers(0, 900, (9, 10, 11)).astype(np.int16)
    scaled = nibabel.Nifti1Image(volume, np.eye(4))
    scaled.header.set_slope_inter(0.5, 3)
    nibabel.save(scaled, files / "scaled.nii.gz")
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), files / "plain.nii.gz")
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), files / "plain.nii")
    program = "import nibabel, numpy\ndef load(name): return nibabel.load(sys.argv[1] + '/' + name)\n"
    program += rounds("""
outcome(lambda: load("scaled.nii.gz").get_fdata())
outcome(lambda: load("scaled.nii.gz").get_fdata(dtype=numpy.float32))
outcome(lambda: numpy.asanyarray(load("plain.nii.gz").dataobj))
outcome(lambda: load("plain.nii.gz").dataobj[2:5, :, 3])
outcome(lambda: load("plain.nii.gz").dataobj[..., 3])
outcome(lambda: load("scaled.nii.gz").dataobj[..., 3])
outcome(lambda: load("scaled.nii.gz").dataobj[..., numpy.int64(4)])
outcome(lambda: load("plain.nii").get_fdata())
outcome(lambda: load("plain.nii.gz").dataobj.get_unscaled())
outcome(lambda: sorted(load("scaled.nii.gz").header.keys()))
""")
    ours = compared(program, files)
    assert calls(ours.report, "nibabel.arrayproxy.ArrayProxy._get_scaled")[1] == 12  # [2:5, :, 3] has gaps


def test_sounds(files: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(5)
    soundfile.write(files / "mono.flac", rng.normal(size=4000) / 9, 16000)
    soundfile.write(files / "stereo.wav", rng.normal(size=(4000, 2)) / 9, 22050)
    program = "import soundfile\n" + rounds("""
outcome(soundfile.read, root + "mono.flac")
outcome(soundfile.read, root + "stereo.wav", dtype="float32", always_2d=True)
outcome(soundfile.read, root + "stereo.wav", frames=100, start=50)
outcome(soundfile.read, root + "not.jpg")
""")
    assert calls(compared(program, files).report, "soundfile.read")[1] == 6


def test_librosa(files: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("librosa")
    soundfile.write(files / "sound.wav", np.random.default_rng(6).normal(size=(4000, 2)) / 9, 22050)
    program = "import librosa\n" + rounds("""
outcome(librosa.load, root + "sound.wav", sr=None)
outcome(librosa.load, root + "sound.wav", sr=16000, mono=False)
""")
    assert calls(compared(program, files).report, "librosa.core.audio.load")[1] == 4


@pytest.mark.chaos  # the same way to a function as that of cv2.imread
def test_torchaudio(files: Path, tmp_path: Path) -> None:
    """By its signature, as torchaudio itself needs libraries that are not everywhere."""
    (tmp_path / "torchaudio.py").write_text(
        "import torch\n"
        "def load(uri, frame_offset=0, num_frames=-1, normalize=True, channels_first=True, format=None,\n"
        "         buffer_size=4096, backend=None):\n"
        "    sound = torch.arange(float(frame_offset), 20.0).reshape(-1, 2)\n"
        "    return (sound.T if channels_first else sound), 16000\n"
    )
    program = f"sys.path.insert(0, {str(tmp_path)!r})\nimport torchaudio\n" + rounds("""
outcome(torchaudio.load, root + "colour.jpg")
outcome(torchaudio.load, root + "colour.jpg", channels_first=False)
outcome(torchaudio.load, root + "colour.jpg", 4)
""")
    assert calls(compared(program, files).report, "torchaudio.load") == (9, 6)


def test_frames_of_a_video_by_imageio(files: Path) -> None:
    av = pytest.importorskip("av")
    pytest.importorskip("imageio")
    rng = np.random.default_rng(7)
    with av.open(str(files / "video.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(12):
            picture = rng.integers(0, 255, (48, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    program = "import imageio.v3\n" + rounds("""
[outcome(imageio.v3.imread, root + "video.mp4", index=number, plugin="pyav") for number in (0, 5, 11)]
outcome(imageio.v3.imread, root + "video.mp4", plugin="pyav", index=3, format="gray")
""")
    assert calls(compared(program, files).report, "imageio.v3.imread") == (12, 8)


def test_ultralytics_reads_with_its_own_imread(files: Path) -> None:
    pytest.importorskip("ultralytics")
    program = """
os.environ["YOLO_CONFIG_DIR"] = sys.argv[1]
from benchmarks.operators import define_torchvision_operators
define_torchvision_operators()
import cv2
from ultralytics.utils.patches import imread
from ultralytics.data.base import imread as used
from pathlib import Path
say([cv2.imread.__name__, imread is used])
""" + rounds("""
outcome(used, root + "colour.jpg")
outcome(used, Path(root) / "grey.png", flags=cv2.IMREAD_GRAYSCALE)
outcome(used, root + "missing.png")
""")
    ours = compared(program, files)
    assert calls(ours.report, "ultralytics.utils.patches.imread")[1] == 4


def test_functions_of_the_user(files: Path, tmp_path: Path) -> None:
    (tmp_path / "reading.py").write_text(
        "def load(path, scale=1):\n    import numpy\n    return numpy.full(4, scale)\n"
    )
    program = f"""
sys.path.insert(0, {str(tmp_path)!r})
import reading
say([reading.load("a", scale).tolist() for scale in (1, 2, 1, 2)])
"""
    ours = compared(program, files, "--memo", "reading:load", "--memo", "reading:lode")
    assert calls(ours.report, "reading.load") == (4, 2)
    assert "reading:lode, once: the module has nothing of this name" in ours.report


def test_methods_of_the_user_of_every_kind(files: Path, tmp_path: Path) -> None:
    (tmp_path / "reading.py").write_text("""
import functools

class Reader:
    size = 3

    @staticmethod
    def static(path, self=1):
        return f"{path} {self}"

    @classmethod
    def of_class(cls, path):
        return f"{cls.__name__} {path}"

    def own(self, path):
        return f"own {path}"

    @property
    def name(self):
        return "reader"

class Derived(Reader): ...

@functools.lru_cache
def known(path):
    return f"known {path}"

async def awaited(path):
    return path

def each(path):
    yield path
""")
    program = f"""
sys.path.insert(0, {str(tmp_path)!r})
import inspect, reading
from reading import Derived, Reader
for _ in range(2):
    say([Reader.static("a"), Reader().static("a", self=2), Derived().static("b"), Reader().own("a")])
    say([Reader.of_class("a"), Reader().of_class("a"), Derived.of_class("a")])
    say([reading.known("a"), reading.known.cache_parameters()["maxsize"], Reader().name, Reader.size])
    say([isinstance(Derived(), Reader), inspect.iscoroutinefunction(reading.awaited), *reading.each("a")])
"""
    names = ("Reader", "Reader.static", "Reader.of_class", "Reader.own", "Reader.name", "Reader.size")
    places = [f"reading:{name}" for name in (*names, "known", "awaited", "each")]
    ours = compared(program, files, *(word for place in places for word in ("--memo", place)))
    assert calls(ours.report, "reading.Reader.static") == (6, 3)
    assert calls(ours.report, "reading.Reader.of_class") == (6, 4)
    for name, what in (
        ("Reader", "a class"),
        ("Reader.name", "of type property"),
        ("Reader.size", "of type int"),
        ("awaited", "asynchronous"),
        ("each", "a generator function"),
    ):
        assert f"reading:{name}, once: it is {what}; name a function that returns its result" in ours.report


def test_a_path_through_a_link_and_back_is_another_file(tmp_path: Path) -> None:
    (tmp_path / "there" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("there/below")
    np.save(tmp_path / "a.npy", np.full(3, 1))
    np.save(tmp_path / "there" / "a.npy", np.full(3, 2))
    time.sleep(2 * _MOMENT_SECONDS)
    program = """
import numpy
os.chdir(sys.argv[1])
for _ in range(2):
    say([int(numpy.load(path)[0]) for path in ("a.npy", "link/../a.npy", sys.argv[1] + "/link/../a.npy")])
"""
    ours = compared(program, tmp_path)
    assert ours.said == [[1, 2, 2]] * 2
    assert calls(ours.report, "numpy.load")[1] >= 3


def test_a_file_is_young_by_its_change_too(tmp_path: Path) -> None:
    """A copy with its source's date may be followed by another within one tick of the clock."""
    file = tmp_path / "a"
    file.write_bytes(b"a")
    os.utime(file, (1e9, 1e9))
    with pytest.raises(LeftAlone, match="a moment ago"):
        check_age(os.stat(file))
    time.sleep(2 * _MOMENT_SECONDS)
    check_age(os.stat(file))


def test_flags_without_a_name_are_told_apart() -> None:
    class Bits(enum.IntFlag):
        LOW = 1

    values = [Bits(0), Bits(8), Bits.LOW, Bits.LOW | Bits(8), 0, 8]
    assert len({plain(value, "flags") for value in values}) == len(values)


def test_a_traceback_has_one_line_of_ours_at_most(files: Path) -> None:
    program = """
import sys, traceback
sys.path.insert(0, sys.argv[1])
open(sys.argv[1] + "/failing.py", "w").write("def load(path): raise ValueError(path)")
from hotset.run.call_identity import by_signature
from hotset.run.decoders import Decoder, memoised
import failing
failing.load = memoised(failing.load, Decoder("failing", "load", (), by_signature("path")))
for _ in range(2):
    try: failing.load(sys.argv[1] + "/colour.jpg")
    except ValueError as error:
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        say([frames, repr(error.__context__), repr(error.__cause__), error.__suppress_context__])
"""
    assert (
        run(PRELUDE + program, str(files)).said == [[["<module>", "call", "load"], "None", "None", False]] * 2
    )


def test_a_function_is_left_alone_where_keeping_takes_longer_than_it_saves(tmp_path: Path) -> None:
    """In all processes, from some dozens of calls on; one that takes long is kept all the same."""
    (tmp_path / "many.py").write_text(
        """
import types, sys, time
from pathlib import Path
from hotset.run.call_identity import file_identity
from hotset.run.decoders import Decoder, memoised

def fast(path):
    return 1

def slow(path):
    time.sleep(0.01)
    return 2

def wrapped(function):
    def identify(_):
        return lambda args, keywords: (file_identity(*args), ())
    return memoised(function, Decoder("many", function.__name__, (), identify))

fast, slow = wrapped(fast), wrapped(slow)
"""
    )
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text("text")
    program = (
        PRELUDE
        + """
sys.path.insert(0, sys.argv[1])
import many
def values():
    return sum(many.fast(f"{sys.argv[1]}/{n}.txt") + many.slow(f"{sys.argv[1]}/{n}.txt") for n in range(100))
say([values()])
child = multiprocessing.get_context("fork").Process(target=lambda: say([values()]))
child.start(); child.join()
"""
    )
    ours = run(program, str(tmp_path))
    assert (ours.code, ours.said) == (0, [[300], [300]]), ours.report
    assert calls(ours.report, "many.fast")[1] == 0
    assert calls(ours.report, "many.slow") == (200, 100)
    assert "left alone: many.fast, at least" in ours.report
    assert "to keep what it returns takes longer than that saves" in ours.report
