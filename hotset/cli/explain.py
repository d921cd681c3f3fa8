"""``hotset explain module:object``: what would be cached of a dataset, and why, without filling a cache.

Given transforms alone, such as a Compose, it shows what their structure tells: a trial needs samples.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
import warnings
from pathlib import Path
from typing import Any

from hotset.errors import ArgumentError

__all__ = ["explained", "load"]


def load(place: str) -> Any:
    """Import what ``module:object`` or ``file.py:object`` names; call it if it needs no arguments.

    Raises:
        ArgumentError: there is no such module or object, or a file that these need.
        Exception: what else the module raises when it is imported, or the function when it is called.
    """
    try:
        return _loaded(place)
    except OSError as error:
        raise ArgumentError(
            f"{place!r} must be made without an error, got {type(error).__name__}: {error}; mend the path, "
            "or run the command in the folder that it belongs to."
        ) from error


def _loaded(place: str) -> Any:
    module, colon, path = place.partition(":")
    if not colon or not module or not path:
        raise ArgumentError(f"the object must be module:object or file.py:object, got {place!r}.")
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise ArgumentError(f"there is no file {module!r}; check the path.")
        sys.path.insert(0, str(file.parent.resolve()))
        module = file.stem
    else:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # something that the module itself needs
        raise ArgumentError(f"there is no module {module!r}; check the name, or install it.") from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise ArgumentError(f"{module!r} has no {path!r}; use a name that it defines.")
        found = getattr(found, name)
    return found() if _makes_one(found, path) else found


def _makes_one(found: Any, path: str) -> bool:
    """Whether it is a function or class to be called without arguments; a transform needs an argument."""
    if not isinstance(found, (type, types.FunctionType, types.BuiltinFunctionType, functools.partial)):
        return False
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        if isinstance(found, type):
            raise ArgumentError(
                f"{path!r} must be a dataset, transforms, or what makes them without arguments, got a class "
                f"that needs some ({error}); make one in a function without arguments, and name that."
            ) from None
        return False
    except ValueError:  # a builtin that does not say
        return False
    return True


def explained(
    dataset: Any,
    *,
    memory: str,
    resident: str | None,
    replace: str,
    strict: bool,
    cut: int | None,
    batch_size: int,
    steps: int | None,
) -> str:
    """The plan of a dataset as text, with steps per epoch; for transforms alone, a line for each.

    Raises:
        HotsetError: see :func:`hotset.cache`.
    """
    import hotset

    if _is_chain(dataset):
        return _explained_chain(dataset, strict)
    window = None
    if resident is not None:
        window = hotset.Window(_number(resident), _number(replace))
    if isinstance(dataset, hotset.CachedDataset):
        plan = dataset.plan
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hotset.HotsetWarning)  # the plan's notes say the same
            with hotset.cache(dataset, memory=memory, window=window, strict=strict, cut=cut) as cached:
                plan = cached.plan
    if plan.stream and not plan.samples:
        return f"{plan}\nsteps        known once the stream was read: until then it has no length"
    lines = [
        str(plan),
        f"steps        {plan.steps_per_epoch(batch_size):,} an epoch, in batches of {batch_size:,}",
    ]
    if steps is not None:
        lines.append(f"{'':<12} {steps:,} steps are {plan.epochs_for(steps, batch_size):.3g} epochs")
    return "\n".join(lines)


def _is_chain(found: Any) -> bool:
    """Whether it is a transform or a list of transforms, and not a dataset."""
    if isinstance(found, (list, tuple)):
        return bool(found) and all(map(callable, found))
    from hotset.determinism.verdict import library_of

    if any(base.__module__ == "torch.utils.data.dataset" for base in type(found).__mro__):
        return False  # its class is of a library, as a transform's is
    if library_of(found) is not None:  # torch's Sequential has a length, and gives its parts by number
        return True
    return callable(found) and not (hasattr(found, "__getitem__") and hasattr(found, "__len__"))


def _explained_chain(chain: Any, strict: bool) -> str:
    from hotset.dataset.plan import Row, table
    from hotset.determinism.chain import leaves
    from hotset.determinism.verdict import verdict_of

    rows: list[Row] = []
    for step in leaves(chain):
        verdict = verdict_of(step)
        stays = verdict.kind == "random" or (strict and verdict.kind == "unknown")
        cached = not stays and all(row.cached for row in rows)
        rows.append(Row(verdict.name, verdict.kind, verdict.evidence, None, None, cached))
    text = table(tuple(rows))
    if any(row.cached and row.kind == "unknown" for row in rows):
        text += "\nnote         an unknown transform is tried on samples; it stays live if its results differ"
    return text + "\nnote         name a dataset with these transforms to see bytes, times, and what fits"


def _number(text: str) -> float | str:
    """Parse a count, a fraction, or an amount of memory: ``50``, ``0.5``, ``20GiB``."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
