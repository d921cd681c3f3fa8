"""A verdict on one transform: does it return the same output for the same input, and how is that known?

hotset looks for evidence in this order, and the first that it finds decides:

1. *Declared*: ``@hotset.deterministic`` or ``@hotset.nondeterministic``.
2. *Asked*: the transform has Clara's method ``is_deterministic()``, and hotset calls it.
3. *Structure*: the transform's class is one of a library that hotset knows
   (:mod:`hotset.determinism.libraries`).

Without evidence the verdict is ``"unknown"``. No outputs are compared here: two equal outputs prove nothing.

The verdict on a library's class holds for a user's subclass only if the subclass changes none of the class's
methods. A library's transform that holds a function of the user (a filter, a getter of labels, a hook) is
deterministic only if that function is. Every subclass of a class that draws counts as random.

``deterministic`` is about outputs. ``RandomHorizontalFlip(p=0)`` returns its input each time, but still draws
a number that it does not use. Its verdict says so (``draws``), because caching it would shift what all other
transforms draw from that generator.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from hotset.determinism.batch_transform import TakesBatches
from hotset.determinism.batched import Batched
from hotset.determinism.declare import declared
from hotset.determinism.objects.code_dependencies import package_of
from hotset.determinism.objects.object_graph import attributes
from hotset.determinism.objects.safe_access import has, is_a, values_of

__all__ = [
    "Kind",
    "Verdict",
    "ancestor",
    "doubtful_function",
    "library_of",
    "name_of",
    "replaced_method",
    "stated",
    "verdict_of",
    "verdict_of_children",
]

Kind = Literal["deterministic", "random", "unknown"]

# Package: its module in :mod:`hotset.determinism.libraries`.
_MODULES = {
    "torchvision": "torchvision",
    "monai": "monai",
    "albumentations": "albumentations",
    "kornia": "kornia",
    "torch": "torch_nn",
}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_NO_FUNCTION = (type, weakref.ref)
_PLAIN = (
    *(int, float, complex, str, bytes, type(None), enum.Enum, torch.Tensor, np.ndarray, np.generic),
    *(torch.dtype, torch.device, np.dtype),
)
# A subclass may define these: they decide what an instance holds or how it is shown, not its output.
_HARMLESS_NAMES = """
    __init__ __repr__ __str__ extra_repr __init_subclass__ __class_getitem__ __eq__ __hash__ __len__
    __reduce__ __getstate__ __setstate__ __copy__ __deepcopy__ __doc__ __module__ __annotate__
    __annotate_func__
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


@dataclass(frozen=True)
class Verdict:
    """The verdict on one transform.

    Attributes:
        step: the transform.
        name: what to call it.
        kind: ``"deterministic"``: the same output for the same input, always; ``"random"``; ``"unknown"``.
        evidence: a sentence that says how that is known.
        draws: it is deterministic, but each call still moves the state of a generator.
    """

    step: Any
    name: str
    kind: Kind
    evidence: str
    draws: bool = False

    @classmethod
    def of(cls, step: object, kind: Kind, evidence: str, draws: bool = False) -> Verdict:
        """A verdict on ``step`` under its own name."""
        return cls(step, name_of(step), kind, evidence, draws)


def verdict_of(step: Any) -> Verdict:
    """Judge one transform by what is declared, by what it says itself, and by its library's structure.

    Args:
        step: a leaf of a chain, see :func:`hotset.determinism.chain.leaves`.

    Returns:
        The verdict; never None.

    Raises:
        Exception: what the transform's own ``is_deterministic()`` raises.

    Example:
        >>> verdict_of(torch.nn.Dropout()).evidence
        'torch.nn: Dropout draws in training mode'
        >>> verdict_of(torch.nn.Dropout().eval()).kind
        'deterministic'
    """
    if is_a(step, TakesBatches):
        found = stated(step) or _in_training(step) or verdict_of(step.transform)
        return replace(found, step=step, name=name_of(step))
    return (
        stated(step)
        or _by_structure(step)
        or Verdict.of(step, "unknown", "not declared, and not from a library that hotset knows")
    )


def stated(step: object) -> Verdict | None:
    """The verdict by a declaration or the transform's own ``is_deterministic``; None if it has neither.

    Example:
        >>> stated(torch.nn.ReLU()) is None
        True
    """
    mark = declared(step)
    if mark is None:
        return _by_own_method(step)
    return Verdict.of(
        step, "deterministic" if mark == "deterministic" else "random", f"declared @hotset.{mark}"
    )


def verdict_of_children(step: object, children: Iterable[object], evidence: str) -> Verdict:
    """Judge a container by its children: random if one is, else unknown if one is, else deterministic.

    Example:
        >>> verdict_of_children(len, [torch.nn.ReLU(), torch.nn.Dropout()], "both").evidence
        'both; Dropout: torch.nn: Dropout draws in training mode'
    """
    verdicts = [verdict_of(child) for child in children]
    for kind in ("random", "unknown"):
        for verdict in verdicts:
            if verdict.kind == kind:
                return Verdict.of(step, verdict.kind, f"{evidence}; {verdict.name}: {verdict.evidence}")
    draws = any(verdict.draws for verdict in verdicts)
    return Verdict.of(step, "deterministic", f"{evidence}, each of them deterministic", draws)


def library_of(obj: object) -> Any | None:
    """The module in :mod:`hotset.determinism.libraries` that knows this transform or container, or None.

    Example:
        >>> library_of(torch.nn.ReLU()).__name__, library_of(print)
        ('hotset.determinism.libraries.torch_nn', None)
    """
    origins: Iterable[Any] = (obj,) if issubclass(type(obj), _FUNCTIONS) else type(obj).__mro__
    for origin in origins:
        module = _MODULES.get(package_of(origin))
        if module is not None:
            return importlib.import_module(f"hotset.determinism.libraries.{module}")
    return None


def ancestor(step: object, library: str) -> type | None:
    """Return the library's class of ``step``, or the one from which the user derived the class of ``step``.

    Example:
        >>> class Mine(torch.nn.ReLU): ...
        >>> ancestor(Mine(), "torch").__name__
        'ReLU'
    """
    return next((cls for cls in type(step).__mro__ if package_of(cls) == library), None)


def replaced_method(step: object, base: type) -> str | None:
    """Name a method of the library's class that the user's subclass, or this instance, has replaced.

    Example:
        >>> class Mine(torch.nn.ReLU):
        ...     def forward(self, x): return x
        >>> replaced_method(Mine(), torch.nn.ReLU), replaced_method(torch.nn.ReLU(), torch.nn.ReLU)
        ('forward', None)
    """
    for cls in type(step).__mro__:
        if cls not in base.__mro__:
            for name, value in list(vars(cls).items()):
                if name not in _HARMLESS and _replaces(value, inspect.getattr_static(base, name, None)):
                    return name
    for name, value in attributes(step).items():
        if callable(value) and _code(inspect.getattr_static(base, name, None)) is not None:
            return name
    return None


def doubtful_function(step: object, library: str) -> str | None:
    """A sentence about a function in a library's transform that is not known to be deterministic, or None.

    The library's own functions are defaults of its transforms, and count as deterministic.
    """
    for name, value in _held(attributes(step)):
        if not callable(value) or is_a(value, _NO_FUNCTION) or package_of(_origin(value)) == library:
            continue
        verdict = verdict_of(value)
        if verdict.kind != "deterministic":
            return f"its {name} is {verdict.name}: {verdict.evidence}"
    return None


def name_of(step: Any) -> str:
    """A transform's name, for messages.

    Example:
        >>> name_of(torch.nn.ReLU()), name_of(functools.partial(max, 3))
        ('ReLU', 'partial(max)')
    """
    if is_a(step, functools.partial):
        return f"partial({name_of(step.func)})"
    if is_a(step, Batched):
        return f"batched({name_of(step.transform)})"
    if is_a(step, TakesBatches):
        return name_of(step.transform)
    named = step if is_a(step, (*_FUNCTIONS, type)) else type(step)
    return named.__qualname__.rpartition("<locals>.")[2]


def _in_training(step: Any) -> Verdict | None:
    """The verdict on a ``hotset.batched`` whose network would draw, or learn, with each call; else None."""
    module = step.in_training if is_a(step, Batched) else None
    if module is None:
        return None
    why = f"{module} is in training mode, in which dropout draws and normalisation layers keep statistics"
    return Verdict.of(step, "random", f"{why}; call its .eval() first")


def _by_own_method(step: object) -> Verdict | None:
    """The verdict by the transform's own ``is_deterministic``, Clara's interface; None if it has none."""
    if is_a(step, type) or not callable(inspect.getattr_static(type(step), "is_deterministic", None)):
        return None
    answer = step.is_deterministic()  # type: ignore[attr-defined]
    if not isinstance(answer, (bool, np.bool_)):
        return Verdict.of(step, "unknown", f"its is_deterministic() returned {answer!r}, not a bool")
    return Verdict.of(
        step, "deterministic" if answer else "random", f"its is_deterministic() returned {bool(answer)}"
    )


def _by_structure(step: Any) -> Verdict | None:
    if is_a(step, functools.partial):
        return _of_partial(step)
    library = library_of(step)
    verdict: Verdict | None = library.judge(step) if library is not None else None
    return verdict


def _of_partial(step: functools.partial[Any]) -> Verdict | None:
    """The verdict on a known function with plain values bound; None for other functions and values."""
    inner = _by_structure(step.func)
    if inner is None or (inner.kind == "deterministic" and not _is_plain([step.args, step.keywords])):
        return None
    return Verdict.of(step, inner.kind, inner.evidence, inner.draws)


def _is_plain(value: Any) -> bool:
    if is_a(value, (list, tuple)):
        return all(map(_is_plain, value))
    if is_a(value, dict):
        return all(map(_is_plain, value.values()))
    return is_a(value, _PLAIN)


def _origin(value: Any) -> object:
    """A callable's function or class, whose module tells from which library the callable is."""
    if is_a(value, functools.partial):
        return _origin(value.func)
    return value if is_a(value, _FUNCTIONS) else type(value)


def _code(value: Any) -> object | None:
    """What identifies the code of a method or property: its file and line, or a callable; None for data."""
    inner = next((name for name in ("__func__", "fget") if has(value, name)), None)
    value = value if inner is None else getattr(value, inner)
    if is_a(value, types.FunctionType):
        return value.__code__.co_filename, value.__code__.co_firstlineno
    return value if callable(value) and not is_a(value, type) else None


def _replaces(value: object, original: object) -> bool:
    """Whether a class attribute replaces a method. A copy that the library itself made does not."""
    return _code(original) is not None and _code(value) != _code(original)


def _held(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """An object's attributes, and the elements of those that are lists and dicts: hooks, readers, filters."""
    for name, value in values.items():
        yield name, value
        if issubclass(type(value), (dict, list, tuple)):
            yield from ((name, each) for each in values_of(value))
