"""Pictures of Pillow: how they are flattened to leaves and built again.

A picture is its mode, size, palette, ``info``, and pixels. A picture that a dataset has opened (a
``JpegImageFile``) and may have loaded is one too: its pixels are loaded, and what comes back is of the same
class, as after pickling: without the file. ``info`` and small attributes are stored as Python literals.

Pillow is imported only for a picture that is there, or was stored.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

from hotset.store.leaves.instances import is_plain
from hotset.store.leaves.leaf import SchemaMismatch

__all__ = ["flatten_image", "image_file", "image_subclass", "unflatten_image"]

# The bytes of one pixel in the bytes of a whole picture; of mode "1" a row is padded to whole bytes.
_PIXEL_BYTES = {
    "L": 1,
    "P": 1,
    "LA": 2,
    "PA": 2,
    "La": 2,
    "I;16": 2,
    "RGB": 3,
    "YCbCr": 3,
    "HSV": 3,
    "LAB": 3,
}
# What a class of pictures defines if its objects are more than a picture and its attributes.
_SAYS_ITSELF = frozenset({"__slots__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"})
# Pictures of one camera or program say the same of themselves.
_SHORT = 2048
_parsed = functools.lru_cache(maxsize=256)(ast.literal_eval)
_IMAGE_FILE = re.compile(r"PIL\.\w+ImagePlugin:\w+")
_KEPT = frozenset({int, float, bool, str, type(None)})
_LITERALS = _KEPT | {bytes, complex}
_COLLECTIONS = frozenset({list, tuple, set})
# Attributes of an open file; the picture that comes back has none.
_NO_FILE = {"fp": None, "_exclusive_fp": False, "readonly": 0}
_OF_FILE = frozenset(
    {"_mode", "_exif", "_im", "palette", "map", *_NO_FILE, "_fp", "_close_exclusive_fp_after_loading"}
)


def flatten_image(image: Any) -> Any:
    own = _own_attributes(image)
    # A picture to which a program has given attributes has one leaf more.
    return _flattened(image, *[_literal(own, "the attributes")] if own else [])


def _own_attributes(image: Any) -> dict[str, Any]:
    """What a program has set on a picture that is no file's."""
    pillows = _attributes_of_pillow()
    return {key: part for key, part in vars(image).items() if key not in pillows}


@functools.lru_cache(maxsize=1)
def _attributes_of_pillow() -> frozenset[str]:
    """The attributes that this version of Pillow gives any picture."""
    from PIL import Image

    return frozenset(vars(Image.Image()))


def _flattened(image: Any, *own: str) -> Any:
    pixels = _pixels(image)  # first: loading a file may change mode, palette and info
    palette = image.getpalette(image.palette.mode) if image.palette is not None else None
    colours = (image.palette.mode, bytes(palette)) if palette is not None else ("", b"")
    # What a file's headers said travels with a PIL image, and transforms may look at it (EXIF rotation).
    info = _literal(image.info, "its info")
    return (image.mode, image.width, image.height, info, *colours, *own, pixels)


def unflatten_image(tree: Any) -> Any:
    from PIL import Image

    mode, width, height, info, palette_mode, palette, *own, pixels = tree
    image = Image.new(mode, (width, height), None)  # its pixels are not set twice
    if pixels:
        image.frombytes(pixels)
    if palette_mode:
        image.putpalette(palette, palette_mode)
    image.info = _value(info)
    if own:
        vars(image).update(_value(own[0]))
    return image


def _pixels(image: Any) -> bytes:
    """The bytes of a picture; loads it, if it is a file that was only opened.

    ``tobytes`` encodes 64 KiB at a time and joins the parts, which are two new pieces of memory for each
    picture. The encoder itself can give all of them at once.

    Raises:
        SchemaMismatch: it cannot be loaded.
    """
    from PIL import Image

    try:
        image.load()
    except Exception as error:  # Pillow raises errors of many kinds for a damaged file
        raise SchemaMismatch(f"a PIL image that cannot be loaded ({error})") from error
    size = image.width * image.height * _PIXEL_BYTES.get(image.mode, 4)
    if size:
        try:
            encoder = Image._getencoder(image.mode, "raw", image.mode)
            try:
                encoder.setimage(image.im, (0, 0, *image.size))
                _, ended, data = encoder.encode(size)
            finally:
                encoder.cleanup()
            if ended > 0:
                return data
        except (AttributeError, TypeError):  # another version of Pillow
            pass
    return image.tobytes()  # type: ignore[no-any-return]


def _literal(value: Any, what: str) -> str:
    """A value as Python's literal.

    Raises:
        SchemaMismatch: it has no literal that is equal to it.
    """
    try:
        marked = _marked(value)
        text = repr(marked)
        parsed = ast.literal_eval(text) if len(text) > _SHORT else _parsed(text)
        if parsed != marked:
            raise SchemaMismatch(f"a PIL image of which {what} cannot be stored as text")
    except (ValueError, TypeError, SyntaxError) as error:
        raise SchemaMismatch(f"a PIL image with objects in {what}") from error
    return text


def _marked(value: Any) -> Any:
    """The value in types that have literals; raises ValueError if it holds any others.

    Pillow has a number and a text of its own in ``info`` of many photographs (``IFDRational``) and
    screenshots (``iTXt``). Each becomes a dict whose key is None, which stands for nothing else.
    """
    kind = type(value)
    if kind in _LITERALS:
        return value
    if kind is dict and None not in value and _LITERALS.issuperset(map(type, value)):
        return {key: _marked(part) for key, part in value.items()}
    if kind in _COLLECTIONS:
        return kind(map(_marked, value))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == "PIL.TiffImagePlugin.IFDRational":
        return {None: (name, _marked(value.numerator), _marked(value.denominator))}
    if name == "PIL.PngImagePlugin.iTXt":
        return {None: (name, str(value), _marked(value.lang), _marked(value.tkey))}
    raise ValueError(name)


def _value(text: str) -> Any:
    """The value of a literal; new dicts and lists each time."""
    return _unmarked(ast.literal_eval(text) if len(text) > _SHORT else _parsed(text))


def _unmarked(value: Any) -> Any:
    kind = type(value)
    if kind is dict and None in value:
        name, *parts = value[None]
        from PIL import PngImagePlugin, TiffImagePlugin

        return PngImagePlugin.iTXt(*parts) if name.endswith("iTXt") else TiffImagePlugin.IFDRational(*parts)
    if kind is dict:
        return {key: _unmarked(part) for key, part in value.items()}
    return kind(map(_unmarked, value)) if kind in _COLLECTIONS else value


def image_subclass(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return how a class of pictures that was derived from Pillow's is flattened and built again.

    None if it is not one, or if its pictures are more than a picture and attributes: it reads files, has
    slots, counts what it makes, or says itself what pickle keeps.

    Example:
        >>> from PIL import Image
        >>> class Mask(Image.Image): ...
        >>> image_subclass(Mask) is None, image_subclass(Image.Image) is None, image_subclass(int) is None
        (False, True, True)
    """
    base: Any = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if base is None or cls is base or not issubclass(cls, base) or not is_plain(cls):
        return None
    above = cls.__mro__[: cls.__mro__.index(base)]
    if any(vars(each).keys() & _SAYS_ITSELF for each in above):
        return None

    def flatten(image: Any) -> Any:
        if type(image) is not cls:
            raise SchemaMismatch(f"a picture of another class of the name {cls.__qualname__}")
        return _flattened(image, _literal(_own_attributes(image), "the attributes"))

    def unflatten(tree: Any) -> Any:
        image = unflatten_image(tree)
        image.__class__ = cls
        return image

    return flatten, unflatten


def image_file(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return how a class of Pillow's that reads files is flattened and built again; None if it is not one.

    The name is such as ``PIL.JpegImagePlugin:JpegImageFile``. What comes back is of that class, as after
    pickling: the picture without the file. Numbers and texts that it keeps as attributes are there as well.
    """
    if not _IMAGE_FILE.fullmatch(name):
        return None
    module, _, qualname = name.partition(":")
    from PIL import ImageFile

    cls = getattr(importlib.import_module(module), qualname, None)
    if not (isinstance(cls, type) and issubclass(cls, ImageFile.ImageFile)):
        return None

    def flatten(image: Any) -> Any:
        if hasattr(image, "tag_v2"):
            raise SchemaMismatch(f"a {qualname}, whose tags are read from its file; .copy() makes a picture")
        # The class notes the number of frames as it is asked for.
        if getattr(image, "is_animated", False) or getattr(image, "n_frames", 1) > 1:
            raise SchemaMismatch(f"a {qualname} of several frames, of which only one would be stored")
        picture = _flattened(image)
        kept = {
            key: part
            for key, part in vars(image).items()
            if (type(part) in _KEPT and key not in _OF_FILE) or key == "layer"  # of JPEG: its subsampling
        }
        return (*picture[:-1], _literal(kept, "the attributes"), picture[-1])

    def unflatten(tree: Any) -> Any:
        mode, width, height, info, palette_mode, palette, kept, pixels = tree
        image = cls.__new__(cls)
        # Not the method of the class itself, which may want more: JpegImageFile's wants its layers.
        ImageFile.ImageFile.__setstate__(image, [_value(info), mode, (width, height), None, pixels])
        if palette_mode:
            image.putpalette(palette, palette_mode)
        vars(image).update(_NO_FILE | _value(kept))
        return image

    return flatten, unflatten
