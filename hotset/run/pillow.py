"""Pictures that PIL decodes: PIL does all of it but the decoding of the pixels.

``PIL.Image.open`` reads a header. The pixels are decoded when they are needed, in ``ImageFile.load``, which
asks ``Image._getdecoder`` for a decoder, feeds it the file and changes the image in many small ways: its file
is closed, its list of tiles emptied, its palette applied, texts after the pixels added to its info, it is
turned as its orientation says. All of that differs by format and version. So ``load`` is PIL's own, in every
case. Only ``_getdecoder`` is replaced. It looks who calls it: if that is ``load``, and the image is of one
tile of a file, the decoder that it returns puts kept pixels into the image and asks for no data.

What is kept is a function of the file and of what a decoder gets: its name and arguments, mode, size,
configuration (which ``draft`` changes), the offset in the file. On a miss, a second decoder of PIL's reads
the file from a position of its own into the caller's image, and the pixels are copied from there. (An image
of its own would cost as much again: its memory is touched for the first time.) If anything goes wrong, the
caller's image is blank again, and its own decoder does its work as always, its errors included.

========  ======================================================================================
jpeg      JPEG and MPO (the pictures of phones). The file is not read on a hit.
zip       PNG but for animations. The file is read on a hit, as chunks after the pixels count.
libtiff   compressed TIFF, each frame
========  ======================================================================================

Left alone: WebP and AVIF, whose file is read when it is opened and may be another when it is decoded; formats
whose pixels are not compressed (BMP, PPM, TIFF as it is), as reading them is copying; formats that decode a
frame onto another (GIF, APNG); files that are neither opened by their path nor by Python's ``open``.
"""

from __future__ import annotations

import copy
import io
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hotset.run.call_identity import LeftAlone, file_facts, opened_file
from hotset.run.import_hook import Hook
from hotset.run.kept import Kept, NotKept
from hotset.run.ledger import left_alone

__all__ = ["NAME", "hooks"]

NAME = "PIL.Image.Image.load"
# Modes whose bytes in a file of raw pixels are all that there is: how many a line of so many pixels has.
_LINES: dict[str, Callable[[int], int]] = {
    "1": lambda width: (width + 7) // 8,
    **dict.fromkeys(("L", "P"), lambda width: width),
    **dict.fromkeys(("LA", "I;16", "I;16B"), lambda width: 2 * width),
    **dict.fromkeys(("RGB", "YCbCr", "LAB"), lambda width: 3 * width),
    **dict.fromkeys(("RGBA", "CMYK", "I", "F"), lambda width: 4 * width),
}
_STRIP = 64 << 10  # bytes
_UNCOMPRESSED = "its pixels are not compressed"
# Their file may change before they are decoded, and nothing tells what was read.
_READ_AT_ONCE = {name: f"a picture of format {name} is read as it is opened" for name in ("WEBP", "AVIF")}
_REASONS = {"raw": _UNCOMPRESSED, "bit": _UNCOMPRESSED, "gif": "a GIF's frame is decoded onto another"}


def hooks() -> Iterator[tuple[str, Hook]]:
    """The hook that replaces ``_getdecoder``."""
    yield "PIL.ImageFile", _replace


def _replace(module: Any) -> None:
    image_module = module.Image
    plain = image_module._getdecoder
    if hasattr(plain, "__hotset__"):
        return
    kept = Kept(NAME)
    decoders = _Decoders(plain, image_module, kept)
    load = module.ImageFile.load.__code__

    def _getdecoder(mode: str, decoder_name: str, args: Any, extra: tuple[Any, ...] = ()) -> Any:
        decoder = plain(mode, decoder_name, args, extra)
        frame = sys._getframe(1)
        # A decoder for another caller, such as Image.frombytes, does not read a file.
        if frame.f_code is load or frame.f_code.co_name == "_load_libtiff":
            image = frame.f_locals.get("self")
            if isinstance(image, module.ImageFile) and kept.is_worth_it():
                return decoders.decoder_for(image, decoder, (mode, decoder_name, args, extra))
        return decoder

    _getdecoder.__hotset__ = True  # type: ignore[attr-defined]
    image_module._getdecoder = _getdecoder


Call = tuple[str, str, Any, "tuple[Any, ...]"]


class _Decoders:
    """Makes decoders that give kept pixels, and keep those that they decode.

    Attributes:
        plain: PIL's ``_getdecoder``.
        core: PIL's module in C, which makes images.
        encoder: PIL's ``_getencoder``.
        kept: the memo.
        known: what pixels follow from beside the file and the call: versions of PIL and of its libraries.
    """

    def __init__(self, plain: Callable[..., Any], image_module: Any, kept: Kept) -> None:
        self.plain = plain
        self.core = image_module.core
        self.encoder = image_module._getencoder
        self.kept = kept
        names = sorted(name for name in dir(self.core) if name.endswith("version"))
        versions = (f"{name} {getattr(self.core, name)}" for name in names)
        self.known = " ".join(("pixels, end", image_module.__version__, *versions))

    def decoder_for(self, image: Any, decoder: Any, call: Call) -> Any:
        begun = time.perf_counter()
        try:
            source = _source_of(image, call)
        except LeftAlone as error:
            left_alone(NAME, str(error))
            return decoder
        return _Decoder(self, image, decoder, call, source, begun)


class _Source(NamedTuple):
    """The file under an image and what of it is decoded.

    Attributes:
        path: the file's path.
        status: what tells it from other files, by its open descriptor.
        identity: what the pixels follow from, beside the file's content.
    """

    path: str
    status: tuple[int, ...]
    identity: tuple[Any, ...]


def _source_of(image: Any, call: Call) -> _Source:
    """What a call of ``_getdecoder`` is to decode.

    Raises:
        LeftAlone: it is not kept.
    """
    mode, name, args, extra = call
    if name not in ("jpeg", "zip", "libtiff"):
        raise LeftAlone(
            _READ_AT_ONCE.get(image.format)
            or _REASONS.get(name, f"it is a picture of PIL's decoder {name!r}")
        )
    if any(_is_replaced(image, read) for read in ("load_read", "load_seek")):
        raise LeftAlone("its file is read by a method that is not PIL's")
    if len(image.tile) != 1 or getattr(image, "tile_prefix", None):
        raise LeftAlone("the picture has more than one tile")
    if name in sys.modules["PIL.Image"].DECODERS:  # it may draw random numbers
        raise LeftAlone(f"the program has a decoder of its own for {name!r}")
    if mode not in _LINES:
        raise LeftAlone(f"pixels of mode {mode}")
    if name == "zip" and (getattr(image, "png", None) is None or image.is_animated):
        raise LeftAlone("an animated PNG's frame is decoded onto another")
    _, extents, offset, in_tile = image.tile[0]
    if name == "libtiff":
        args = in_tile  # without the descriptor, which is another each time
    if extents is None or extents[:2] != (0, 0):
        raise LeftAlone("the tile is not the whole picture")
    path, status = _file_of(image)
    more = (image._PngImageFile__idat,) if name == "zip" else ()  # what is left of the first chunk of pixels
    identity = (mode, name, _plain(args), _plain(extra), extents, offset, image.decodermaxblock, *more)
    return _Source(path, status, identity)


def _is_replaced(image: Any, name: str) -> bool:
    """Whether a method of ``image`` is of a plugin or program, and may give other bytes than the file's."""
    method = getattr(image, name, None)
    if method is None:
        return False
    return name in vars(image) or not str(getattr(method, "__module__", "")).startswith("PIL.")


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is tuple:
        return tuple(map(_plain, value))
    raise LeftAlone(f"a decoder's argument is a {type(value).__name__}")


def _file_of(image: Any) -> tuple[str, tuple[int, ...]]:
    """Path and status of the regular file that the image reads.

    Raises:
        LeftAlone: it reads something else, or the path leads to another file by now.
    """
    file = image.fp
    if type(file) is not io.BufferedReader or type(file.raw) is not io.FileIO:
        raise LeftAlone("the picture is not read from a file, but from bytes or an object")
    if not isinstance(file.name, str):
        raise LeftAlone("the file was opened without a path")
    opened = opened_file(file.name, file.fileno())
    return opened.path, file_facts(opened.status)


class _Decoder:
    """A decoder as ``ImageFile.load`` and ``TiffImageFile._load_libtiff`` use it.

    With ``pulls_fd``, ``load`` calls ``setfd`` and ``decode(b"")`` once and reads nothing itself.
    """

    def __init__(
        self, all_: _Decoders, image: Any, decoder: Any, call: Call, source: _Source, begun: float
    ) -> None:
        self._all, self._image, self._decoder = all_, image, decoder
        self._call, self._source, self._begun = call, source, begun
        self._filled = False  # whether the image has its pixels
        self._end: int | None = None  # where in the file, or after how many reads of a PNG, they ended

    @property
    def pulls_fd(self) -> Any:
        return self._filled or self._decoder.pulls_fd

    def setimage(self, core: Any, extents: Any) -> None:
        """Fill the image with what is kept; or else let PIL's decoder do so later."""
        try:
            if tuple(extents or ()) == (0, 0, *core.size) and core.mode == self._call[0]:
                self._fill(core, extents)
        except NotKept:
            left_alone(NAME, "the file is damaged, or changed meanwhile")
        except Exception as error:  # the memo's own: the program must not know
            left_alone(NAME, f"{type(error).__name__}: {error}")
        if not self._filled:
            if self._end is not None:
                core.paste(self._all.core.new(core.mode, core.size), (0, 0, *core.size))
            self._decoder.setimage(core, extents)

    def _fill(self, core: Any, extents: Any) -> None:
        source = self._source
        key = (self._all.known, source.path, source.status, source.identity)
        found = self._all.kept.get(self._begun, key, lambda: self._decoded(core))
        if self._end is None:
            pixels, end = found
            mode = self._call[0]
            raw = self._all.plain(mode, "raw", (mode, 0, 1))
            raw.setimage(core, extents)
            _, status = raw.decode(pixels)
            if status < 0:
                raise NotKept
            self._end = end
            self._all.kept.gave(self._begun)
        self._filled = True

    def _decoded(self, core: Any) -> Any:
        """Decode into the image: its pixels, which are still there alone, and where they end."""
        import numpy as np

        from hotset.store.body_writer import Unfilled

        mode, name, args, extra = self._call
        self._end = 0  # from here on the image is not blank
        try:
            if name == "libtiff":
                with open(self._source.path, "rb") as file:
                    self._check(file)
                    end = _decode_libtiff(self._all.plain, self._call, core, self._image, file)
                    self._check(file)
            else:
                end = _decode(self._all.plain(mode, name, args, extra), core, self._image)
                self._check(self._image.fp)
            self._end = end
        except (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error):
            raise NotKept from None  # the file is damaged: PIL's decoder will say so
        pixels = np.empty(_LINES[mode](core.size[0]) * core.size[1], np.uint8)
        return Unfilled((pixels, end), pixels, lambda: self._strips(core))

    def _check(self, file: Any) -> None:
        if file_facts(os.fstat(file.fileno())) != self._source.status:
            raise NotKept

    def _strips(self, core: Any) -> Iterator[bytes]:
        """The pixels of an image, in strips that stay in the processor's cache."""
        width, mode = core.size[0], self._call[0]
        encoder = self._all.encoder(mode, "raw", (mode, 0, 1))
        try:
            encoder.setimage(core, (0, 0, *core.size))
            status = 0
            while not status:
                _, status, strip = encoder.encode(max(_STRIP, 4 * width + 8))
                yield strip
        finally:
            encoder.cleanup()
        if status < 0:
            raise NotKept

    def setfd(self, file: Any) -> None:
        if not self._filled:
            self._decoder.setfd(file)

    def decode(self, data: bytes) -> tuple[int, int]:
        if not self._filled:
            return self._decoder.decode(data)  # type: ignore[no-any-return]
        name = self._call[1]
        if name == "jpeg":
            self._image.fp.seek(self._end)
        elif name == "zip":
            for _ in range(self._end or 0):  # ``load`` goes on with the chunks that follow
                self._image.load_read(self._image.decodermaxblock)
        return -1, 0

    def cleanup(self) -> Any:
        return self._decoder.cleanup()


class _Reader:
    """Reads a file from a position of its own: that of the file stays."""

    def __init__(self, file: Any) -> None:
        self._descriptor, self._position = file.fileno(), file.tell()

    def read(self, size: int) -> bytes:
        data = os.pread(self._descriptor, size, self._position)
        self._position += len(data)
        return data

    def tell(self) -> int:
        return self._position  # type: ignore[no-any-return]


def _decode(decoder: Any, image: Any, owner: Any) -> int:
    """Feed ``decoder`` as ``ImageFile.load`` does.

    Returns:
        Where in the file the reading ended; of a PNG how many reads it took.

    Raises:
        NotKept: the decoder found an error, or the end of the file too early.
    """
    decoder.setimage(image, owner.tile[0][1])
    is_png = getattr(owner, "png", None) is not None
    file = _Reader(owner.fp)
    read = _reader_of_png(owner, file) if is_png else file.read
    block, rest, reads = owner.decodermaxblock, b"", 0
    try:
        while True:
            data = read(block)
            reads += 1
            if not data:
                raise NotKept
            rest += data
            used, status = decoder.decode(rest)
            if used < 0:
                break
            rest = rest[used:]
    finally:
        decoder.cleanup()
    if status < 0:
        raise NotKept
    return reads if is_png else file.tell()


def _decode_libtiff(plain: Callable[..., Any], call: Call, image: Any, owner: Any, file: Any) -> int:
    """Decode as ``TiffImageFile._load_libtiff`` does: libtiff reads the descriptor itself.

    Raises:
        NotKept: libtiff found an error, or gets its descriptor in another way than it did.
    """
    mode, name, args, extra = call
    in_tile = owner.tile[0][3]
    where = [place for place, (a, b) in enumerate(zip(args, in_tile, strict=True)) if a is not b]
    if len(where) != 1 or args[where[0]] != owner.fp.fileno():
        raise NotKept
    own = (*args[: where[0]], file.fileno(), *args[where[0] + 1 :])
    decoder = plain(mode, name, own, extra)
    try:
        decoder.setimage(image, (0, 0, *image.size))
        _, status = decoder.decode(b"fpfp")
    finally:
        decoder.cleanup()
    if status < 0:
        raise NotKept
    return 0


def _reader_of_png(image: Any, file: Any) -> Callable[[int], bytes]:
    """``load_read`` of a copy of ``image`` that reads another file and changes nothing of the image.

    The pixels of a PNG are in some of its chunks, one after another.
    """
    twin = object.__new__(type(image))
    twin.__dict__.update(vars(image))
    twin.fp = file
    twin.png = copy.copy(image.png)
    twin.png.fp = file
    twin.png.queue = list(image.png.queue or ())
    return twin.load_read  # type: ignore[no-any-return]
