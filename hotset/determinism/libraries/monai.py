"""MONAI: a transform that draws is a ``Randomizable``; a Compose does work around each child.

All of ``monai.transforms`` keeps to that trait. ``monai.apps`` does not (one of its transforms calls
``np.random`` without the trait), so its transforms without the trait are unknown. ``Compose`` always has the
trait, and is judged by its children. Containers that choose among their children are random.

hotset cuts a Compose into shallow copies of itself with fewer children. So ``map_items``, ``unpack_items``,
``overrides`` and ``log_stats`` hold in both halves, and a Compose around it still sees a Compose. A new
Compose would seed the children's generators anew. For the same reason a copy's ``set_random_state`` is that
of the whole: MONAI derives a child's seed from how many children come before it.

With lazy resampling, MONAI resamples lazy neighbours together, once: they stay together as one leaf.
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from hotset.determinism.verdict import (
    Kind,
    Verdict,
    ancestor,
    doubtful_function,
    name_of,
    replaced_method,
    verdict_of,
    verdict_of_children,
)

__all__ = ["WRAPS_CHILDREN", "children_in_order", "judge", "part"]

WRAPS_CHILDREN = True

_HOLDERS = {"Lambda": "func", "Lambdad": "func", "TorchVision": "trans", "TorchVisiond": "trans"}
_HOLDERS |= {"RandLambda": "func", "RandLambdad": "func"}
_HOLDERS |= {"TorchIO": "trans", "TorchIOd": "trans", "CuCIM": "transform", "CuCIMd": "trans"}
_WRITERS = ("SaveImage", "SaveImaged", "WriteFileMapping", "WriteFileMappingd")
_CHOOSERS = ("OneOf", "SomeOf", "RandomOrder")
# These draw only whether they are applied, so that prob=1 makes them deterministic.
_ONLY_GATED = ("RandFlip", "RandFlipd")


def children_in_order(container: Any) -> tuple[Any, ...] | None:
    """The children of a Compose; children that are resampled together are one Compose among them."""
    if not _is_compose(container) or _maps_over_a_nested_list(container):
        return None
    groups: list[tuple[Any, ...]] = []
    for lazy, children in itertools.groupby(
        container.transforms, lambda child: _is_lazy(child, container.lazy)
    ):
        run = tuple(children)
        groups += [run] if lazy else [(child,) for child in run]
    if len(groups) == 1 and len(groups[0]) > 1:
        return None
    return tuple(group[0] if len(group) == 1 else _with(container, group) for group in groups)


def part(container: Any, children: list[Any], first: bool) -> list[Callable[..., Any]]:
    """A copy of the Compose with these children."""
    return [_with(container, children)]


def judge(step: Any) -> Verdict | None:
    """Judge a transform of MONAI, or one that the user derived from one."""
    base = ancestor(step, "monai")
    if base is None or not _has(step, "Transform", "Randomizable", "RandomizableTrait"):
        return None
    name = base.__name__
    if name == "Compose" and base.__module__ == "monai.transforms.compose":
        if not _is_compose(step):
            replaced = replaced_method(step, base)
            return _verdict(step, "unknown", f"{name_of(step)} has its own {replaced}")
        evidence = "MONAI: Compose applies its transforms in order"
        if len(step.transforms) > 1 and step.lazy:
            evidence += ", and is kept whole, as they are resampled together"
        return verdict_of_children(step, step.transforms, evidence)
    if _has(step, "RandomizableTrait"):
        return _random(step, base)
    if not base.__module__.startswith("monai.transforms.") or base.__name__.endswith("Transform"):
        return _verdict(step, "unknown", f"hotset does not know the class {name_of(step)}")
    replaced = replaced_method(step, base)
    if replaced:
        return _verdict(step, "unknown", f"{name_of(step)} has its own {replaced}")
    if name in _WRITERS:
        return _verdict(step, "unknown", f"{name} writes files, which a cached result would not")
    if name in _HOLDERS:
        return _holder(step, name)
    why = doubtful_function(step, "monai")
    if why:
        return _verdict(step, "unknown", f"{name}: {why}")
    return _verdict(step, "deterministic", f"{name} is not a Randomizable")


def _verdict(step: Any, kind: Kind, what: str, draws: bool = False) -> Verdict:
    return Verdict.of(step, kind, f"MONAI: {what}", draws)


def _random(step: Any, base: type) -> Verdict:
    """The verdict on a Randomizable: random, unless its probability leaves no choice."""
    name = base.__name__
    prob = getattr(step, "prob", None)
    if base.__module__.startswith("monai.transforms.") and not replaced_method(step, base):
        if prob == 1 and name in _HOLDERS:
            return replace(_holder(step, name), draws=True)
        if name in _CHOOSERS:
            return _verdict(step, "random", f"{name} draws which of its transforms to apply")
        if prob == 0 and _has(step, "RandomizableTransform") and name not in _DRAW_REGARDLESS:
            return _verdict(step, "deterministic", f"{name} with prob=0 is never applied", draws=True)
        if prob == 1 and name in _ONLY_GATED:
            return _verdict(step, "deterministic", f"{name} with prob=1 is always applied", draws=True)
    return _verdict(step, "random", f"{name_of(step)} is a Randomizable")


# Randomizable transforms that are random even with prob=0.
_DRAW_REGARDLESS = ("RandGridPatch", "RandGridPatchd")


def _holder(step: Any, name: str) -> Verdict:
    """The verdict on a transform that applies another transform or a function."""
    held = getattr(step, _HOLDERS[name], None)
    inner: Iterable[Any] = held if isinstance(held, (list, tuple)) else [held]
    verdicts = [verdict_of(_unwrapped(each)) for each in inner]
    worst = min(verdicts, key=lambda verdict: ("random", "unknown", "deterministic").index(verdict.kind))
    draws = any(verdict.draws for verdict in verdicts)
    return _verdict(step, worst.kind, f"{name} of {worst.name}: {worst.evidence}", draws)


def _unwrapped(held: Any) -> Any:
    """What a transform applies: for an array transform inside a dictionary transform, what that applies."""
    attribute = _HOLDERS.get(type(held).__name__)
    return getattr(held, attribute) if attribute and ancestor(held, "monai") is type(held) else held


def _is_compose(container: Any) -> bool:
    """Whether this is MONAI's Compose, unchanged. hotset's own copies have another ``set_random_state``."""
    base = ancestor(container, "monai")
    if base is None or base.__name__ != "Compose" or base.__module__ != "monai.transforms.compose":
        return False
    replaced = replaced_method(container, base)
    return replaced is None or (replaced == "set_random_state" and replaced in vars(container))


def _with(container: Any, children: Iterable[Any]) -> Any:
    """A copy of a Compose with these children."""
    half = copy.copy(container)
    half.transforms = tuple(children)
    half.set_random_state = container.set_random_state
    return half


def _maps_over_a_nested_list(container: Any) -> bool:
    """Whether a cut within one of a Compose's children would map that child over a list meant for it whole.

    Before MONAI 1.6 a Compose with ``map_items`` maps also a nested Compose without it. The whole chain gives
    the nested one an item. The second half of a cut would give it the items of a list that the first half
    made.
    """
    if not container.map_items or not any(
        _is_compose(child) and not child.map_items for child in container.transforms
    ):
        return False
    version = re.match(r"(\d+)\.(\d+)", str(sys.modules["monai"].__version__))
    return version is not None and (int(version[1]), int(version[2])) < (1, 6)


def _is_lazy(child: Any, lazy: bool | None) -> bool:
    """Whether a child delays its resampling, or applies resampling that was delayed."""
    if lazy is False:
        return False
    if _has(child, "ApplyPending", "ApplyPendingd"):
        return True
    return _has(child, "LazyTrait") and bool(lazy or child.lazy)


def _has(step: Any, *names: str) -> bool:
    """Whether a transform's class is, or derives from, one of MONAI's of these names."""
    return any(cls.__name__ in names and cls.__module__.startswith("monai.") for cls in type(step).__mro__)
