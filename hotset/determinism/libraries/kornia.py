"""kornia: an augmentation draws its parameters before it applies them; nothing else in kornia draws.

An augmentation has two probabilities, ``p`` for a sample and ``p_batch`` for a batch, and a parameter
generator. If one of the probabilities is 0, its output is its input, but it still draws its parameters. If
both are 1, it is deterministic if it has no parameters to draw, or if it draws them from ranges of one value.

A sequence draws the parameters of all its children before it applies the first one. It draws for sizes: an
augmentation tells the next child the size of its output, but a plain module that resizes does not. In two
halves of the sequence the next child would see the new size, and draw other parameters. So hotset cuts a
sequence only if all its children are augmentations. Those in the prefix draw nothing, so a copy of the
sequence with the others makes the same draws in the same order.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from hotset.determinism.verdict import (
    Kind,
    Verdict,
    ancestor,
    doubtful_function,
    name_of,
    replaced_method,
    verdict_of_children,
)

__all__ = ["WRAPS_CHILDREN", "children_in_order", "judge", "part"]

WRAPS_CHILDREN = True

# These have no parameters to draw: where they are applied, they always do the same.
_FIXED_NAMES = """
    CenterCrop CenterCrop3D Denormalize LongestMaxSize Normalize PadTo RandomAutoContrast RandomBoxBlur
    RandomDepthicalFlip3D RandomEqualize RandomEqualize3D RandomGrayscale RandomHorizontalFlip
    RandomHorizontalFlip3D RandomInvert RandomMedianBlur RandomVerticalFlip RandomVerticalFlip3D Resize
    SmallestMaxSize
"""
_FIXED = frozenset(_FIXED_NAMES.split())
# Generators that draw from uniform distributions only.
_UNIFORM = ("PlainUniformGenerator", "RandomGaussianBlurGenerator")
_SEQUENCES = ("ImageSequential", "AugmentationSequential")
_PURE = (
    "kornia.color.",
    "kornia.enhance.",
    "kornia.filters.",
    "kornia.geometry.transform.",
    "kornia.morphology.",
)
_NETWORKS = ("kornia.filters.dissolving", "kornia.filters.dexined")


def children_in_order(container: Any) -> tuple[Any, ...] | None:
    """The augmentations of a sequence that applies all of them, in order, to pictures alone."""
    return tuple(container.children()) if _is_sequence(container) and _why_whole(container) is None else None


def part(container: Any, children: list[Any], first: bool) -> list[Callable[..., Any]]:
    """A copy of the sequence with these children, which keep their names."""
    half = copy.copy(container)
    kept = {id(child) for child in children}
    half._modules = {name: child for name, child in container._modules.items() if id(child) in kept}
    return [half]


def judge(step: Any) -> Verdict | None:
    """Judge an augmentation, sequence, module or function of kornia, or what the user derived from one."""
    if isinstance(step, (types.FunctionType, types.BuiltinFunctionType)):
        if not str(step.__module__).startswith(_PURE):
            return None
        return Verdict.of(step, "deterministic", "kornia: a function of its arguments alone")
    base = ancestor(step, "kornia")
    names = {cls.__name__ for cls in type(step).__mro__ if cls.__module__.startswith("kornia.")}
    if base is None or "Module" not in {cls.__name__ for cls in type(step).__mro__}:
        return None
    replaced = replaced_method(step, base)
    if "_BasicAugmentationBase" in names:
        return _augmentation(step, base, replaced)
    if "PolicyAugmentBase" in names:
        return _verdict(step, "random", "draws from its policy")
    if "ImageSequentialBase" in names:
        return _sequence(step, replaced)
    if replaced or not base.__module__.startswith(_PURE) or base.__module__.startswith(_NETWORKS):
        why = f"has its own {replaced}" if replaced else "is of a class that hotset does not know"
        return _verdict(step, "unknown", why)
    unsure = doubtful_function(step, "kornia")
    if unsure:
        return _verdict(step, "unknown", unsure)
    children = list(step.children())
    if children:
        return verdict_of_children(step, children, f"kornia: only the modules in {base.__name__} may draw")
    return _verdict(step, "deterministic", "is not an augmentation")


def _augmentation(step: Any, base: type, replaced: str | None) -> Verdict:
    fixed = base.__name__ in _FIXED
    known = base.__module__.startswith("kornia.augmentation._")
    if replaced or not known:
        if known and not fixed:
            return _verdict(step, "random", f"is derived from {base.__name__}, which draws")
        return _verdict(step, "unknown", f"has its own {replaced}" if replaced else "is of an unknown class")
    if 0 in (step.p, step.p_batch):
        return _verdict(step, "deterministic", "with p=0 is never applied", draws=not fixed or _gated(step))
    if _gated(step):
        return _verdict(
            step, "random", f"draws whether it is applied, p={step.p:g}, p_batch={step.p_batch:g}"
        )
    unsure = doubtful_function(step, "kornia")
    if unsure:
        return _verdict(step, "unknown", unsure)
    if fixed:
        return _verdict(step, "deterministic", "has no parameters to draw and is always applied")
    if _single(step, base):
        return _verdict(step, "deterministic", "draws each parameter from a range of one value", draws=True)
    return _verdict(step, "random", "draws its parameters from torch's generator")


def _gated(step: Any) -> bool:
    """Whether an augmentation draws whether to apply itself."""
    return bool(0 < step.p < 1 or 0 < step.p_batch < 1)


def _single(step: Any, base: type) -> bool:
    """Whether all parameters are drawn from uniform distributions over one value."""
    generator = step._param_generator
    own = next(cls for cls in base.__mro__ if "generate_parameters" in vars(cls))
    if own.__name__ != "_BasicAugmentationBase" or type(generator).__name__ not in _UNIFORM:
        return False
    samplers = getattr(generator, "sampler_dict", None) or {"sigma": generator.sigma_sampler}
    return all(bool((each.low == each.high).all()) for each in samplers.values())


def _sequence(step: Any, replaced: str | None) -> Verdict:
    children = list(step.children())
    if getattr(step, "random_apply", False):
        return _verdict(step, "random", "draws which of its children it applies")
    if replaced or type(step).__name__ not in (*_SEQUENCES, "VideoSequential"):
        verdict = verdict_of_children(step, children, f"kornia: {name_of(step)}")
        if verdict.kind == "random":
            return verdict
        return _verdict(step, "unknown", "does more than apply its children in order")
    why = _why_whole(step)
    whole = f", and is kept whole, as it {why}" if why else ""
    return verdict_of_children(step, children, f"kornia: {name_of(step)} applies its children{whole}")


def _verdict(step: Any, kind: Kind, what: str, draws: bool = False) -> Verdict:
    return Verdict.of(step, kind, f"kornia: {name_of(step)} {what}", draws)


def _is_sequence(container: Any) -> bool:
    base = ancestor(container, "kornia")
    return base is not None and base.__name__ in _SEQUENCES and replaced_method(container, base) is None


def _why_whole(container: Any) -> str | None:
    """Why a sequence cannot be cut in two, as words that follow "it"; None if it can."""
    if container.random_apply:
        return "draws which of them to apply"
    if len(getattr(container, "data_keys", None) or [None]) > 1:
        return "takes several arguments"
    bases = [{cls.__name__ for cls in type(child).__mro__} for child in container.children()]
    if not all("_AugmentationBase" in each for each in bases):
        return "draws for sizes that its modules change"
    return "has hooks" if doubtful_function(container, "kornia") else None
