"""torchvision, transforms v1 and v2: a list of the classes that do not draw, and a rule for each that draws.

Names are not enough: ``ColorJitter`` draws, and ``RandomHorizontalFlip(p=0)`` never flips. So each class that
draws has a rule, taken from its source, which says when its parameters leave no choice: a probability of 0, a
range of one value. The class may then still draw a number without using it, and the verdict says so. A class
in neither list is unknown, as a later torchvision may add one of any kind. The two versions share names and,
apart from the containers, the attributes that the rules read.

There is no rule that holds for some inputs only: a ``RandomCrop`` of exactly the picture's size returns the
picture each time, but draws as soon as a larger picture comes.
"""

from __future__ import annotations

import types
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

__all__ = ["WRAPS_CHILDREN", "children_in_order", "judge"]

WRAPS_CHILDREN = False

_FIXED_NAMES = """
    ToTensor PILToTensor ConvertImageDtype ToPILImage Normalize Resize CenterCrop Pad FiveCrop TenCrop
    LinearTransformation Grayscale RGB Identity ToDtype ToImage ToPureTensor SanitizeBoundingBoxes
    SanitizeKeyPoints ConvertBoundingBoxFormat ClampBoundingBoxes ClampKeyPoints SetClampingMode
    UniformTemporalSubsample ObjectDetection ImageClassification VideoClassification SemanticSegmentation
    OpticalFlow CenterCropVideo NormalizeVideo ToTensorVideo
"""
_FIXED = frozenset(_FIXED_NAMES.split())
_PLACES = ("torchvision.transforms.", "torchvision.prototype.transforms.")
_FUNCTIONAL = ("functional", "_functional_pil", "_functional_tensor", "_functional_video")
_READERS = (
    *("read_file", "read_image"),
    *("decode_image", "decode_jpeg", "decode_png", "decode_gif", "decode_webp"),
)


def children_in_order(container: Any) -> tuple[Any, ...] | None:
    """The transforms of a Compose, v1 or v2, that has no hooks and uses torchvision's own methods."""
    base = ancestor(container, "torchvision")
    if base is None or base.__name__ != "Compose" or not base.__module__.startswith(_PLACES):
        return None
    return None if replaced_method(container, base) or _hooked(container) else tuple(container.transforms)


def judge(step: Any) -> Verdict | None:
    """Judge a transform of torchvision, one derived from it, or one of its functions."""
    if isinstance(step, (types.FunctionType, types.BuiltinFunctionType)):
        return _function(step)
    base = ancestor(step, "torchvision")
    if base is None or not base.__module__.startswith(_PLACES):
        return None
    name = base.__name__
    if name in _STILL or _gated(base):
        return _random(step, base)
    if name in _CONTAINERS or name in ("Compose", "Lambda") or name in _FIXED:
        replaced = replaced_method(step, base) or ("hooks" if _hooked(step) else None)
        if replaced:
            return _verdict(step, "unknown", f"{name_of(step)} has its own {replaced}")
    if name in _CONTAINERS:
        return _CONTAINERS[name](step)
    if name == "Compose":
        evidence = "torchvision: Compose applies its transforms in order"
        return verdict_of_children(step, step.transforms, evidence)
    if name == "Lambda":
        inner = verdict_of(step.lambd)
        return _verdict(step, inner.kind, f"Lambda of {inner.name}: {inner.evidence}", inner.draws)
    if name in _FIXED:
        why = doubtful_function(step, "torchvision")
        if why:
            return _verdict(step, "unknown", f"{name}: {why}")
        return _verdict(step, "deterministic", f"{name} draws nothing")
    return _verdict(step, "unknown", f"hotset does not know the class {name_of(step)}")


def _verdict(step: Any, kind: Kind, what: str, draws: bool = False) -> Verdict:
    return Verdict.of(step, kind, f"torchvision: {what}", draws)


def _hooked(container: Any) -> bool:
    """Whether the user has registered a hook on a module, which may do anything."""
    return any("_hooks" in name and bool(value) for name, value in vars(container).items())


def _function(function: Any) -> Verdict | None:
    *place, file = str(function.__module__).split(".")
    if place[:1] == ["torchvision"] and "io" in [*place, file] and function.__name__ in _READERS:
        return _verdict(function, "deterministic", f"{function.__name__} only reads or decodes")
    if place[:2] != ["torchvision", "transforms"] or not {file, *place} & {*_FUNCTIONAL}:
        return None
    if function.__name__.startswith("gaussian_noise"):
        return _verdict(function, "random", "gaussian_noise draws noise from torch's generator")
    return _verdict(function, "deterministic", "a function of its arguments alone")


def _random(step: Any, base: type) -> Verdict:
    """The verdict on a class that draws: random, unless its rule says that the parameters leave no choice."""
    name = base.__name__
    believed = not replaced_method(step, base) and not _hooked(step)
    still = _STILL.get(name, _never)(step) if believed else None
    if still is None:
        return _verdict(step, "random", f"{name} draws from torch's generator")
    what = f"{name} with {still}: what it draws changes nothing"
    return _verdict(step, "deterministic", what, draws=name != "RandAugment")


def _gated(base: type) -> bool:
    """Whether this class draws whether to apply itself."""
    return any(cls.__name__ == "_RandomApplyTransform" for cls in base.__mro__)


# Rules: the words that say why the parameters of a class that draws leave no choice; None if they do not.


def _never(step: Any) -> str | None:
    return "p=0, never applied" if getattr(step, "p", None) == 0 else None


def _always_or_never(step: Any) -> str | None:
    return "p=1, always applied" if step.p >= 1 else _never(step)


def _single(*names: str) -> Callable[[Any], str | None]:
    """A rule for attributes that are ranges: each must hold one value only."""

    def rule(step: Any) -> str | None:
        values = [getattr(step, name) for name in names]
        return f"a single {' and '.join(names)}" if all(map(_one, values)) else None

    return rule


def _one(value: Any) -> bool:
    """Whether a range, None or a list of ranges (low, high, low, high) holds one value each."""
    if not isinstance(value, (list, tuple)):
        return True
    return len(value) % 2 == 0 and all(low == high for low, high in zip(value[::2], value[1::2], strict=True))


def _zero(value: Any) -> bool:
    """Whether a number, None or each of several numbers is 0."""
    values = value if isinstance(value, (list, tuple)) else [value or 0]
    return all(each == 0 for each in values)


def _jitter(step: Any) -> str | None:
    """The order of the factors is drawn, so at most one of them may do anything."""
    factors = [
        each for each in (step.brightness, step.contrast, step.saturation, step.hue) if each is not None
    ]
    return "at most one factor, of one value" if len(factors) <= 1 and all(map(_one, factors)) else None


def _affine(step: Any) -> str | None:
    single = all(map(_one, (step.degrees, step.scale, step.shear))) and _zero(step.translate)
    return "one value for each parameter" if single else None


def _perspective(step: Any) -> str | None:
    # With a distortion of 0 a picture that it is applied to is resampled, which changes some pixels.
    return "distortion_scale=0, p=1" if step.distortion_scale == 0 and step.p >= 1 else _never(step)


def _still_where(tell: Callable[[Any], bool], words: str) -> Callable[[Any], str | None]:
    return lambda step: words if tell(step) else None


_GATED_NAMES = """
    RandomHorizontalFlip RandomHorizontalFlipVideo RandomVerticalFlip RandomGrayscale RandomInvert
    RandomPosterize RandomSolarize RandomAdjustSharpness RandomAutocontrast RandomEqualize
"""
_FREE_NAMES = """
    RandomCrop RandomResizedCrop RandomIoUCrop RandomChannelPermutation AutoAugment TrivialAugmentWide
    AugMix CutMix MixUp RandomCropVideo RandomResizedCropVideo
"""
_STILL: dict[str, Callable[[Any], str | None]] = {
    **dict.fromkeys(_GATED_NAMES.split(), _always_or_never),
    **dict.fromkeys(("RandomErasing", "RandomPhotometricDistort"), _never),
    "RandomZoomOut": lambda step: "side_range=1" if set(step.side_range) == {1} else _never(step),
    **dict.fromkeys(_FREE_NAMES.split(), lambda step: None),
    "RandomPerspective": _perspective,
    "ColorJitter": _jitter,
    "GaussianBlur": _single("sigma"),
    "GaussianNoise": _still_where(lambda step: _zero(step.sigma), "sigma=0"),
    "ElasticTransform": _still_where(lambda step: _zero(step.alpha), "alpha=0"),
    "JPEG": _single("quality"),
    "ScaleJitter": _single("scale_range"),
    "RandomRotation": _single("degrees"),
    "RandomAffine": _affine,
    "RandomShortestSize": _still_where(lambda step: len(step.min_size) == 1, "a single min_size"),
    "RandomResize": _still_where(lambda step: step.max_size - step.min_size == 1, "a range of one size"),
    "RandAugment": _still_where(lambda step: step.num_ops == 0, "num_ops=0"),
}


# Containers that choose among their children. They are leaves, judged by their children if they have no
# choice.


def _apply(step: Any) -> Verdict:
    p = float(step.p)
    # v1 compares the other way round: if it draws exactly 0, it applies its transforms even with p=0.
    if p <= 0 and ".v2." in type(step).__module__:
        return _verdict(step, "deterministic", "RandomApply with p=0 is never applied", draws=True)
    if p < 1:
        return _verdict(step, "random", f"RandomApply draws whether to apply, p={p:g}")
    return _without_choice(step, step.transforms, "RandomApply with p=1 always applies its transforms")


def _choose(step: Any) -> Verdict:
    if len(step.transforms) > 1:
        return _verdict(step, "random", f"{name_of(step)} draws which of its transforms comes next")
    return _without_choice(step, step.transforms, f"{name_of(step)} has one transform to choose from")


def _without_choice(step: Any, children: Iterable[Any], words: str) -> Verdict:
    verdict = verdict_of_children(step, children, f"torchvision: {words}")
    return replace(verdict, draws=verdict.kind == "deterministic" and not _shuffles(step))


def _shuffles(step: Any) -> bool:
    """Whether this is v1's RandomOrder: it shuffles a list, and for one element Python draws nothing."""
    return name_of(step) == "RandomOrder" and ".v2." not in type(step).__module__


_CONTAINERS: dict[str, Callable[[Any], Verdict]] = {
    "RandomApply": _apply,
    "RandomChoice": _choose,
    "RandomOrder": _choose,
}
