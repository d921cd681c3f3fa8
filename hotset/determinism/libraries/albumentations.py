"""albumentations: each transform has a probability and its own generators, and its methods show if it draws.

``p`` is 0.5 for most transforms, so the class alone does not decide. With p=0 a transform is never applied
and draws nothing. With p=1 it is always applied, without a draw, and its class decides. A class draws if
its methods read ``self.py_random`` or ``self.random_generator``; classes that draw only with some parameters
have rules. Only the classes in ``_FIXED`` count as deterministic.

A Compose may convert bounding boxes and keypoints before and after its children. hotset cuts it only if it
converts none, and is always applied. Its two halves are copies of it. The second half does not repeat the
first one's checks of its inputs, as pictures may be tensors by then.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from hotset.determinism.objects.code_dependencies import names_in
from hotset.determinism.verdict import (
    Kind,
    Verdict,
    ancestor,
    doubtful_function,
    name_of,
    replaced_method,
    verdict_of_children,
)

__all__ = [
    "WRAPS_CHILDREN",
    "children_in_order",
    "judge",
    "nothing_is_random",
    "part",
    "takes_keywords",
    "without_draws",
]

WRAPS_CHILDREN = True

_FIXED_NAMES = """
    AutoContrast CenterCrop CenterCrop3D Crop CropAndPad Equalize FromFloat HorizontalFlip InvertImg Lambda
    LongestMaxSize Morphological NoOp Normalize Pad Pad3D PadIfNeeded PadIfNeeded3D Resize SmallestMaxSize
    TimeReverse ToFloat ToGray ToRGB ToSepia ToTensor3D ToTensorV2 Transpose VerticalFlip
"""
_FIXED = frozenset(_FIXED_NAMES.split())
_IN_ORDER = ("Compose", "Sequential")
_GENERATORS = {"py_random", "random_generator"}


@functools.lru_cache(maxsize=1024)
def takes_keywords(kind: type) -> bool:
    """Whether objects of a class are called with keywords: its ``__call__`` is one of albumentations'.

    A user may have derived a class from one of albumentations', and have given it a ``__call__`` of his own.
    """
    called = next((cls for cls in kind.__mro__ if "__call__" in vars(cls)), object)
    return called.__module__.startswith("albumentations.")


def children_in_order(container: Any) -> tuple[Any, ...] | None:
    """The children of a Compose or Sequential that is always applied and does nothing around them."""
    return tuple(container.transforms) if _in_order(container) and _why_whole(container) is None else None


def part(container: Any, children: list[Any], first: bool) -> list[Callable[..., Any]]:
    """A copy with these children. It draws from the container's own generator, as often as the container."""
    half = copy.copy(container)
    half.transforms = list(children)
    if not first:
        half.is_check_shapes = False
        half._strict = False
    return [half]


def without_draws(step: Any) -> Any:
    """A container that is always applied, as one that does not draw whether it is; anything else as it is.

    It stands before the cut. The part after the cut draws as often as the container, so with another draw for
    each sample that is cached its transforms would draw other numbers than without a cache, if the user has
    them share one generator.
    """
    children = children_in_order(step)
    if children is None:
        return step
    still = copy.copy(step)
    still.transforms = [without_draws(child) for child in children]
    still.py_random = _Applied()
    return still


def nothing_is_random(container: Any) -> bool:
    """Whether nothing in a container is random. With p=1 it draws whether it is applied all the same, from a
    generator that no transform of it then reads.
    """
    try:
        verdict = judge(container)
    except Exception:  # of a class that the user derived
        return False
    return verdict is not None and verdict.kind == "deterministic"


class _Applied:
    """In place of a generator: whatever the probability is, the container is applied."""

    def random(self) -> float:
        return 0.0


def judge(step: Any) -> Verdict | None:
    """Judge a transform or a composition of albumentations, or one that the user derived from one."""
    base = ancestor(step, "albumentations")
    names = {cls.__name__ for cls in type(step).__mro__ if cls.__module__.startswith("albumentations.")}
    if base is None or not names & {"BasicTransform", "BaseCompose"}:
        return None
    replaced = replaced_method(step, base)
    if "BaseCompose" in names:
        return _composition(step, base, replaced)
    known = replaced is None and not step.replay_mode
    if known and step.p <= 0:
        return _verdict(step, "deterministic", "with p=0 is never applied")
    if step.p < 1 and not (known and base.__name__ == "NoOp"):
        return _verdict(step, "random", f"draws whether it is applied, p={step.p:g}")
    if not known:
        why = f"has its own {replaced}" if replaced else "replays what was drawn before"
        return _verdict(step, "random" if _drawing(base) else "unknown", why)
    if base.__name__ in _FIXED:
        return _fixed(step, base.__name__)
    ranges = _RANGES.get(base.__name__)
    if ranges and all(_one(getattr(step, name)) for name in ranges):
        draws = ranges != ("blur_limit",)  # a kernel size given as a single number is not drawn
        return _verdict(step, "deterministic", f"has a single {' and '.join(ranges)} to draw", draws)
    method = _drawing(base)
    if method:
        return _verdict(step, "random", f"draws from its own generators in {method}")
    return _verdict(step, "unknown", "is of a class that hotset does not know")


def _fixed(step: Any, name: str) -> Verdict:
    """The verdict on a transform of a class in ``_FIXED``, some of which draw with some parameters."""
    if name in ("LongestMaxSize", "SmallestMaxSize") and isinstance(step.max_size, (list, tuple)):
        return _verdict(
            step, "random" if len(step.max_size) > 1 else "deterministic", "chooses from its sizes"
        )
    if name == "CropAndPad":
        sizes = (step.px, step.percent, step.fill, step.fill_mask)
        if not all(each is None or isinstance(each, (int, float)) for each in sizes):
            return _verdict(step, "random", "draws its sizes or what it fills them with")
    if "random" in (getattr(step, "position", None), getattr(step, "pad_position", None)):
        return _verdict(step, "random", "draws the position")
    why = doubtful_function(step, "albumentations")
    if why:
        return _verdict(step, "unknown", why)
    return _verdict(step, "deterministic", "draws nothing where it is applied", draws=step.p < 1)


def _composition(step: Any, base: type, replaced: str | None) -> Verdict:
    if replaced or base.__name__ == "ReplayCompose" or step.replay_mode:
        return _verdict(step, "unknown", f"has its own {replaced}" if replaced else "replays what was drawn")
    if step.p <= 0:
        return _verdict(step, "deterministic", "with p=0 is never applied", draws=True)
    if base.__name__ not in _IN_ORDER:
        return _verdict(step, "random", "draws which of its transforms it applies, or where")
    if step.p < 1:
        return _verdict(step, "random", f"draws whether it is applied, p={step.p:g}")
    why = _why_whole(step)
    alone = "to have the first ones cached, give them a Compose of their own before it"
    whole = f", and is kept whole, as it {why} ({alone})" if why else ""
    verdict = verdict_of_children(
        step, step.transforms, f"albumentations: {base.__name__} applies its transforms{whole}"
    )
    return Verdict.of(step, verdict.kind, verdict.evidence, draws=verdict.kind == "deterministic")


def _verdict(step: Any, kind: Kind, what: str, draws: bool = False) -> Verdict:
    return Verdict.of(step, kind, f"albumentations: {name_of(step)} {what}", draws)


def _in_order(container: Any) -> bool:
    base = ancestor(container, "albumentations")
    if base is None or base.__name__ not in _IN_ORDER or not base.__module__.endswith(".composition"):
        return False
    return replaced_method(container, base) is None and container.p >= 1 and not container.replay_mode


def _why_whole(container: Any) -> str | None:
    """Why a composition cannot be cut in two, as words that follow "it"; None if it can."""
    if container.processors:
        return "converts boxes or keypoints before and after them"
    if getattr(container, "save_applied_params", False):
        return "records what they drew"
    return None


def _drawing(base: type) -> str | None:
    """The first method, of the class or a base below ``BasicTransform``, that reads one of its generators."""
    for cls in base.__mro__:
        if cls.__name__ == "BasicTransform":
            return None
        for name, value in list(vars(cls).items()):
            if isinstance(value, types.FunctionType) and _GENERATORS & names_in(value.__code__):
                return name
    return None


def _one(value: Any) -> bool:
    """Whether a range, or a list of ranges, holds one value."""
    if not isinstance(value, (list, tuple)):
        return True
    return all(map(_one, value)) and len({*map(str, value)}) <= 1


# These classes draw from these ranges only.
_RANGES = {
    "Blur": ("blur_limit",),
    "CLAHE": ("clip_limit",),
    "Defocus": ("radius", "alias_blur"),
    "Downscale": ("scale_range",),
    "Emboss": ("alpha", "strength"),
    "GaussianBlur": ("blur_limit", "sigma_limit"),
    "HueSaturationValue": ("hue_shift_limit", "sat_shift_limit", "val_shift_limit"),
    "ImageCompression": ("quality_range",),
    "MedianBlur": ("blur_limit",),
    "Posterize": ("num_bits",),
    "RandomBrightnessContrast": ("brightness_limit", "contrast_limit"),
    "RandomGamma": ("gamma_limit",),
    "RandomScale": ("scale_limit",),
    "Rotate": ("limit",),
    "SafeRotate": ("limit",),
    "Sharpen": ("alpha", "lightness"),
    "Solarize": ("threshold_range",),
}
