"""What users declare about their code: ``@hotset.deterministic`` and ``@hotset.nondeterministic``.

A declaration is the strongest evidence there is: it wins over whatever hotset would find out by itself. It is
one attribute on the declared object, so that it travels with it, through pickle too::

    @hotset.deterministic                    a function
    def to_grey(image): ...

    @hotset.nondeterministic                 a class: its instances and its subclasses
    class Jitter: ...

    hotset.deterministic(Resize(224))        one instance; its own declaration wins over its class's
    hotset.deterministic(torch.sqrt)         takes no attribute: returned in a callable that has one

hotset looks the attribute up without running the object's own ``__getattr__``, which may answer to any name.

``functools.wraps`` copies a function's attributes to its wrapper, and the wrapper may do anything: it may add
noise to a deterministic function. So a copied ``deterministic`` does not count, but a copied
``nondeterministic`` does; declare the outermost function. Each declaration makes a new mark, so a wrapper
that has the same mark object as the function it wraps has a copied one. Of a ``functools.partial`` of a
declared function, as the values that it binds may be random, and of a method of a declared object, only
``nondeterministic`` counts, too.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from hotset.determinism.batch_transform import TakesBatches
from hotset.determinism.objects.safe_access import is_a
from hotset.errors import ArgumentError

__all__ = [
    "Declaration",
    "DeclaredCallable",
    "declared",
    "deterministic",
    "nondeterministic",
]

Declaration = Literal["deterministic", "nondeterministic"]
T = TypeVar("T")

_ATTRIBUTE = "_hotset_declared"


class _Mark:
    """One declaration. Compared by identity: see the module's docstring."""

    __slots__ = ("kind",)

    def __init__(self, kind: Declaration) -> None:
        self.kind: Declaration = kind


class DeclaredCallable:
    """Wraps a callable that takes no attribute, and carries its declaration; calls and reads are passed on.

    Attributes:
        __wrapped__: the callable itself.
    """

    __slots__ = ("__wrapped__", "_mark")

    def __init__(self, wrapped: Callable[..., Any], kind: Declaration) -> None:
        self.__wrapped__ = wrapped
        self._mark = _Mark(kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped callable."""
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return DeclaredCallable, (self.__wrapped__, self._mark.kind)

    def __repr__(self) -> str:
        return f"{self._mark.kind}({self.__wrapped__!r})"


def deterministic(obj: T) -> T:
    """Declare that ``obj`` gives the same output for the same input, always, so that it may be cached.

    Args:
        obj: a function, a class (then all its instances and subclasses), or one instance.

    Returns:
        ``obj`` itself, marked. If it takes no attribute (a builtin function, a bound method, an instance with
        slots): a picklable callable that wraps it and carries the mark.

    Raises:
        ArgumentError: ``obj`` takes no attribute, and is not callable.

    Example:
        >>> @deterministic
        ... def halve(x):
        ...     return x / 2
        >>> declared(halve)
        'deterministic'
    """
    return _declare(obj, "deterministic")


def nondeterministic(obj: T) -> T:
    """Declare that ``obj`` may give another output each time, so that it always stays live.

    Arguments, return value and errors are those of :func:`deterministic`.

    Example:
        >>> import math
        >>> declared(nondeterministic(math.sqrt))
        'nondeterministic'
    """
    return _declare(obj, "nondeterministic")


def declared(obj: Any) -> Declaration | None:
    """Return what was declared of ``obj`` or, failing that, of its class; None if nothing was.

    A bound method has the declaration of its function. If there is none, it is nondeterministic if its object
    is, as a ``functools.partial`` is if its function is.

    Example:
        >>> declared(len) is None
        True
    """
    if is_a(obj, DeclaredCallable):
        found: Declaration = obj._mark.kind
        return found
    if is_a(obj, types.MethodType):
        return declared(obj.__func__) or _if_not_deterministic(obj.__self__)
    if is_a(obj, (staticmethod, classmethod)):
        return declared(obj.__func__)
    if is_a(obj, TakesBatches) and _mark_of(obj) is None:
        return declared(obj.transform)
    mark = _mark_of(obj)
    if mark is None:
        return _if_not_deterministic(obj.func) if is_a(obj, functools.partial) else None
    if mark.kind == "deterministic" and _mark_of(inspect.getattr_static(obj, "__wrapped__", None)) is mark:
        return None
    return mark.kind


def _if_not_deterministic(obj: Any) -> Declaration | None:
    return "nondeterministic" if declared(obj) == "nondeterministic" else None


def _declare(obj: T, kind: Declaration) -> T:
    target = obj.__func__ if isinstance(obj, (staticmethod, classmethod)) else obj
    # Not through the object's own __setattr__: a frozen dataclass refuses, and a module may register things.
    put: Any = type.__setattr__ if isinstance(target, type) else object.__setattr__
    try:
        if isinstance(obj, DeclaredCallable):
            obj._mark = _Mark(kind)
        else:
            put(target, _ATTRIBUTE, _Mark(kind))
    except (AttributeError, TypeError):
        if not callable(obj):
            raise ArgumentError(
                f"{obj!r} cannot be declared {kind}: it takes no attribute and is not callable; "
                "declare its class, or a function that uses it."
            ) from None
        return cast(T, DeclaredCallable(obj, kind))
    return obj


def _mark_of(obj: object) -> _Mark | None:
    mark = inspect.getattr_static(obj, _ATTRIBUTE, None)
    return mark if isinstance(mark, _Mark) else None
