"""The functions that are memoised as their module is imported.

A function is here if what it returns follows from one file and plain arguments; what tells two of its calls
apart is in :mod:`hotset.run.call_identity`. A call without a certain identity is left alone; the report of
``hotset run`` says how often and why.

Built-in functions are replaced by an object without ``__get__``: as a class's attribute it binds no
``self``, and neither did they. Those of Python and Cython are replaced by a function.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hotset.run import call_identity
from hotset.run.call_identity import Identify, LeftAlone, by_signature
from hotset.run.environment import Options, options_here
from hotset.run.import_hook import Hook
from hotset.run.kept import File, Kept, before_fork, memo_of
from hotset.run.ledger import CALLED, IMPORTED, ledger_here, left_alone

__all__ = ["TABLE", "Decoder", "hooks", "memoised", "replace", "stand_in"]


class Decoder(NamedTuple):
    """One function.

    Attributes:
        module: the module whose attribute is replaced; others import it from there.
        name: the attribute.
        libraries: the modules whose versions are part of the identity.
        identify: makes, of the function, what gives a call's identity or raises LeftAlone.
        check: given the file once it was read; raises an exception if the value must not be kept.
    """

    module: str
    name: str
    libraries: tuple[str, ...]
    identify: Callable[[Callable[..., Any]], Identify]
    check: Callable[[str], None] | None = None


def hooks(more: tuple[str, ...] = ()) -> Iterator[tuple[str, Hook]]:
    """Every module to wait for, and what to do when it has been imported."""
    for decoder in TABLE:
        yield decoder.module, functools.partial(replace, decoder, memoised)
    for place in more:
        module, _, name = place.partition(":")
        yield module, functools.partial(_replace_users, name)


def replace(decoder: Decoder, make: Callable[[Callable[..., Any], Decoder], Any], module: Any) -> None:
    """Put what ``make`` makes of the function in its place, if the module has it, and once."""
    *parents, name = decoder.name.split(".")
    owner = functools.reduce(getattr, parents, module)
    function = getattr(owner, name, None)
    if function is not None and not hasattr(function, "__hotset__"):
        setattr(owner, name, make(function, decoder))


def memoised(function: Callable[..., Any], decoder: Decoder) -> Any:
    """What takes the place of ``function``, and keeps what it returns."""
    kept = Kept(f"{decoder.module}.{decoder.name}")
    identify = decoder.identify(function)

    def call(*args: Any, **keywords: Any) -> Any:
        if not kept.is_worth_it():
            return function(*args, **keywords)
        begun = time.perf_counter()
        identity = _identity(decoder, identify, args, keywords)
        if identity is None:
            return function(*args, **keywords)
        ok, value = kept.call(begun, *identity, function, args, keywords, decoder.check)
        if ok:
            return value
        try:
            raise value
        finally:
            del value  # its traceback has this frame

    return stand_in(function, call)


def stand_in(function: Callable[..., Any], call: Callable[..., Any]) -> Any:
    """What takes the place of ``function`` and calls ``call``: of its name and kind."""
    if hasattr(type(function), "__get__"):
        functools.update_wrapper(call, function)
        call.__hotset__ = True  # type: ignore[attr-defined]
        return call
    # A class for each, whose __call__ is ``call`` itself: one line in a traceback, not two.
    return type(_BuiltIn.__name__, (_BuiltIn,), {"__call__": staticmethod(call)})(function)


def _identity(
    decoder: Decoder, identify: Identify, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[File, tuple[Any, ...]] | None:
    try:
        file, rest = identify(args, keywords)
        return file, (call_identity.versions(decoder.libraries), rest)
    except LeftAlone as error:
        reason = str(error)
    except Exception as error:  # unforeseen arguments, or a version of the library that this does not know
        reason = f"{type(error).__name__}: {error}"
    if reason:
        left_alone(f"{decoder.module}.{decoder.name}", reason)
    return None


class _BuiltIn:
    """Stands for a built-in function: the same name, documentation and place, and it binds nothing."""

    __hotset__ = True

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__module__, self.__doc__ = function.__module__, function.__doc__
        self.__self__ = getattr(function, "__self__", None)
        self.__text_signature__ = getattr(function, "__text_signature__", None)

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # as functions are pickled: by their name

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


def _replace_users(path: str, module: Any) -> None:
    """Memoise ``--memo module:function``: by all of its arguments, as ``hotset.memo`` does it."""
    import inspect

    ledger_here().mark(f"{IMPORTED}{module.__name__}")
    place = f"{module.__name__}:{path}"
    *parents, name = path.split(".")
    try:
        owner = functools.reduce(getattr, parents, module)
        function = inspect.getattr_static(owner, name)
    except AttributeError:
        left_alone(place, "the module has nothing of this name; check --memo")
        return
    what = _not_memoised(function)
    if what:
        left_alone(place, f"it is {what}; name a function that returns its result")
    elif isinstance(function, (staticmethod, classmethod)):
        setattr(owner, name, type(function)(_WhenCalled(function.__func__, place)))
    else:
        setattr(owner, name, _WhenCalled(function, place))


def _not_memoised(value: object) -> str:
    """What is none of the functions whose results are kept, in words; empty for the others."""
    import inspect

    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if isinstance(function, type):
        return "a class"  # which others derive from, and compare types with
    if not callable(function):
        return f"of type {type(function).__name__}"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "asynchronous"
    return "a generator function" if inspect.isgeneratorfunction(function) else ""


class _WhenCalled:
    """Stands for the user's function until it is called; then it is the memo, whose module imports torch.

    Args:
        function: the function.
        place: where it was found, as ``--memo`` names it.
    """

    def __init__(self, function: Callable[..., Any], place: str) -> None:
        self.__wrapped__ = function
        functools.update_wrapper(self, function)
        self._memo: Any = None
        self._place, self._was_called = place, False
        before_fork(self.prepare)

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        if not self._was_called:
            self._was_called = True
            ledger_here().mark(f"{CALLED}{self._place}")
        self.prepare()
        return self._memo(*args, **keywords)

    def prepare(self) -> None:
        """Make the memo, or do without."""
        if self._memo is None:
            try:
                self._memo = memo_of(self.__wrapped__, options_here() or Options())
            except Exception as error:
                left_alone(self.__wrapped__.__qualname__, f"hotset.memo: {type(error).__name__}: {error}")
                self._memo = self.__wrapped__

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # it is not there yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)  # such as ``cache_clear``

    def __reduce__(self) -> Any:
        return str(self.__wrapped__.__qualname__)


TABLE = (
    Decoder("cv2", "imread", ("cv2",), call_identity.cv2_imread),
    Decoder(
        "ultralytics.utils.patches",
        "imread",
        ("ultralytics", "cv2"),
        by_signature("filename", check=call_identity.not_by_pillow),
    ),
    Decoder("torchvision.io.image", "read_image", ("torchvision",), by_signature("path")),
    Decoder("torchvision.io.image", "decode_image", ("torchvision",), by_signature("input")),
    Decoder("imageio.v3", "imread", ("imageio", "av"), by_signature("uri", check=call_identity.video_alone)),
    Decoder(
        "tifffile.tifffile",
        "imread",
        ("tifffile", "imagecodecs"),
        by_signature("files", "out", "imread", "sort"),
        call_identity.of_one_file,
    ),
    Decoder(
        "nibabel.arrayproxy", "ArrayProxy._get_scaled", ("nibabel", "numpy"), call_identity.nibabel_proxy
    ),
    Decoder("soundfile", "read", ("soundfile",), by_signature("file", "out")),
    Decoder("torchaudio", "load", ("torchaudio", "torchcodec"), by_signature("uri")),
    Decoder(
        "librosa.core.audio",
        "load",
        ("librosa", "soundfile", "soxr", "numpy"),
        by_signature("path"),
        call_identity.read_by_soundfile,
    ),
    Decoder("numpy", "load", ("numpy",), call_identity.numpy_load),
    Decoder("numpy", "lib.npyio.NpzFile.__getitem__", ("numpy",), call_identity.npz_member),
    Decoder("numpy", "loadtxt", ("numpy",), by_signature("fname", "like")),
    Decoder("numpy", "genfromtxt", ("numpy",), by_signature("fname", "like")),
    Decoder("h5py._hl.dataset", "Dataset.__getitem__", ("h5py",), call_identity.hdf5_slice),
    Decoder(
        "lerobot.datasets.video_utils",
        "decode_video_frames",
        ("lerobot", "torchcodec", "torchvision", "av"),
        by_signature("video_path"),
    ),
)
