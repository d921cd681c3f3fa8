"""The verdicts on real transforms of five libraries, compared with what these transforms do.

The transforms are in ``library_tables.py``. Each is tried to find out the truth: it is applied to a sample
up to 64 times, with the generators in another state each time, and the outputs are compared. So a table
cannot be wrong, and a verdict that differs from its table is.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from helpers import seed_everything
from library_tables import (
    LIBRARIES,
    apart,
    applicable,
    cases,
    darker,
    made,
    need,
    neg,
    noise,
    positive,
    sure,
)
from packaging.version import Version
from programs import Programs

import hotset
from hotset.determinism.chain import leaves
from hotset.determinism.draws.rng import Generators
from hotset.determinism.verdict import Verdict, verdict_of

REPEATS = 64
# Of what is the same each time, and moves no generator in any of them.
REPEATS_WITHOUT_DRAWS = 8


def outputs_differ(apply: Callable[[], Any], repeats: int = REPEATS) -> bool:
    seed_everything(0)
    first = apply()
    for seed in range(1, repeats):
        seed_everything(seed)
        if apart(apply(), first):
            return True
    return False


def generators_move(step: Any, apply: Callable[[], Any], times: int = 1) -> bool:
    # What it holds, too: a container of albumentations is not watched if nothing in it is random.
    watched = Generators([step, list(vars(step).values())])
    for _ in range(times):
        apply()
    return bool(watched.moved())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: the samples are small, and threads would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def wrong(kind: str, library: str, judged: Callable[[str], str | None]) -> list[str]:
    """What is wrong with the lines of a table, for those with an error."""
    found = ((line, judged(line)) for line in cases(kind, library))
    return [f"{line}: {what}" for line, what in found if what]


@pytest.mark.parametrize("library", LIBRARIES)
def test_transforms_that_always_return_the_same_are_judged_deterministic(library: str) -> None:
    def judged(line: str) -> str | None:
        step, apply = made(library, line)
        verdict = verdict_of(step)
        if (verdict.kind, verdict.draws) != ("deterministic", False):
            return f"called {verdict}"
        if not applicable(apply):
            return None
        if outputs_differ(apply, REPEATS_WITHOUT_DRAWS):
            return "is random"
        return "draws" if generators_move(step, apply, REPEATS_WITHOUT_DRAWS) else None

    assert wrong("CALM", library, judged) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_transforms_that_draw_unused_numbers_are_judged_deterministic_but_drawing(library: str) -> None:
    def judged(line: str) -> str | None:
        step, apply = made(library, line)
        verdict = verdict_of(step)
        if (verdict.kind, verdict.draws) != ("deterministic", True):
            return f"called {verdict}"
        if not applicable(apply):
            return None
        if outputs_differ(apply):
            return "is random"
        # Before 0.9, kornia does not draw for what is never applied; to call it drawing is only cautious.
        cautious = library == "kornia" and Version(version("kornia")) < Version("0.9")
        return None if cautious or generators_move(step, apply) else "draws nothing"

    assert wrong("IDLE", library, judged) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_transforms_whose_outputs_differ_are_judged_random(library: str) -> None:
    def judged(line: str) -> str | None:
        step, apply = made(library, line)
        verdict = verdict_of(step)
        if verdict.kind != "random":
            return f"called {verdict}"
        return "is deterministic" if applicable(apply) and not outputs_differ(apply) else None

    assert wrong("RANDOM", library, judged) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_random_transforms_whose_outputs_agree_are_judged_random(library: str) -> None:
    def judged(line: str) -> str | None:
        step, apply = made(library, line)
        verdict = verdict_of(step)
        if verdict.kind != "random":
            return f"called {verdict}"
        return "can be seen" if outputs_differ(apply) else None

    assert wrong("UNSEEN", library, judged) == []


def test_the_tables_are_wide() -> None:
    wide = {
        (kind, name): len(cases(kind, name))
        for kind in ("CALM", "IDLE", "RANDOM", "UNSEEN")
        for name in LIBRARIES
    }
    assert all(wide.values())
    assert sum(wide.values()) > 450


# ---- what is not in the tables: declarations, subclasses, functions handed over ----------------------------


def told(step: Any) -> tuple[str, str]:
    verdict = verdict_of(step)
    assert verdict.step is step
    return verdict.kind, verdict.evidence


def test_the_evidence_is_a_sentence_about_the_transform() -> None:
    from torchvision import transforms as T

    assert verdict_of(T.ColorJitter(0.5)) == Verdict(
        step=ANY,
        name="ColorJitter",
        kind="random",
        evidence="torchvision: ColorJitter draws from torch's generator",
    )
    assert "p=0, never applied" in told(T.RandomVerticalFlip(0))[1]
    assert "Lambda of neg: not declared" in told(T.Lambda(neg))[1]
    assert "RandomCrop draws" in told(T.Compose([T.Resize(8), T.RandomCrop(3)]))[1]
    assert told(T.Compose([T.Resize(8), neg]))[0] == "unknown"
    assert told(T.Compose([neg, T.RandomCrop(3)]))[0] == "random"


def test_a_declaration_wins_over_the_structure() -> None:
    from torchvision.transforms import v2

    assert told(hotset.deterministic(v2.RandomCrop(3))) == ("deterministic", "declared @hotset.deterministic")
    assert told(hotset.nondeterministic(v2.Resize(3))) == ("random", "declared @hotset.nondeterministic")


class Asked:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def is_deterministic(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __call__(self, value: Any) -> Any:
        return value


def test_a_transforms_own_is_deterministic_is_believed() -> None:
    assert told(Asked(True)) == ("deterministic", "its is_deterministic() returned True")
    assert told(Asked(np.bool_(False))) == ("random", "its is_deterministic() returned False")
    assert told(Asked("yes"))[0] == "unknown"
    assert told(hotset.nondeterministic(Asked(True)))[0] == "random"
    assert told(Asked)[0] == "unknown"  # the class is not a transform
    with pytest.raises(ZeroDivisionError):
        verdict_of(Asked(ZeroDivisionError()))


@pytest.mark.parametrize(
    "step", [neg, noise, len, torch.rand, float, object(), Asked, functools.partial(neg)]
)
def test_a_transform_of_no_known_library_is_unknown(step: Any) -> None:
    assert told(step)[0] == "unknown"


def test_a_partial_is_believed_if_it_binds_plain_values() -> None:
    from torchvision.transforms import functional as F

    assert told(functools.partial(F.resize, size=[3, 3]))[0] == "deterministic"
    assert told(functools.partial(F.resize, size=Asked(True)))[0] == "unknown"
    assert told(functools.partial(sure(neg)))[0] == "unknown"


def test_a_subclass_that_changes_no_method_is_judged_like_its_base() -> None:
    from torchvision.transforms import v2

    class Resize8(v2.Resize):
        def __init__(self) -> None:
            super().__init__(8)

        def extra_repr(self) -> str:
            return "eight"

    class Crop8(v2.RandomCrop):
        def __init__(self) -> None:
            super().__init__(8)

    assert told(Resize8())[0] == "deterministic"
    assert told(Crop8())[0] == "random"


def test_a_subclass_that_changes_a_method_is_unknown() -> None:
    from torchvision import transforms as T
    from torchvision.transforms import v2

    class Jittered(v2.Resize):
        def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
            self.size = [int(torch.randint(5, 9, ()))]
            return {}

    class Mixin(v2.Transform):
        def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
            return {"drawn": torch.rand(())}

    class Mixed(v2.Resize, Mixin): ...

    class Twofold(T.Resize, T.RandomCrop):
        def __init__(self, size: int) -> None:
            torch.nn.Module.__init__(self)
            self.size = size

    class Chain(v2.Compose):
        def forward(self, *inputs: Any) -> Any:
            return super().forward(*inputs) + torch.rand(())

    class Flip(v2.RandomHorizontalFlip):
        def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
            return inpt + torch.rand(())

    for step in (Jittered(8), Mixed(8), Chain([v2.Resize(8)])):
        assert told(step)[0] == "unknown", type(step)
    assert told(Twofold(8))[0] == "unknown"
    assert told(Flip(p=0))[0] == told(Flip(p=1))[0] == "random"
    assert leaves([Chain([v2.Resize(8)])])[0].__class__ is Chain


def test_a_users_own_transform_on_a_librarys_base_is_unknown() -> None:
    from torchvision.transforms import v2

    class Mine(v2.Transform):
        def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
            return inpt

    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    assert told(Mine())[0] == "unknown"
    assert told(Layer())[0] == "unknown"
    assert told(torch.nn.Sequential(torch.nn.ReLU(), Layer()))[0] == "unknown"


def test_an_instance_with_another_forward_is_unknown() -> None:
    layer = torch.nn.ReLU()
    layer.forward = noise  # type: ignore[method-assign]
    assert told(layer) == ("unknown", "torch.nn: ReLU has its own forward")


def test_hooks_count() -> None:
    from torchvision.transforms import v2

    for step in (torch.nn.ReLU(), v2.Resize(8)):
        step.register_forward_hook(lambda module, args, output: output + torch.rand(()))
        assert told(step)[0] == "unknown"
    for drawing in (v2.RandomHorizontalFlip(p=0), v2.RandomApply([v2.RGB()], p=1)):
        assert told(drawing)[0] == "deterministic"
        drawing.register_forward_hook(lambda module, args, output: output + torch.rand(()))
        assert told(drawing)[0] != "deterministic"
    for chain in (
        torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()),
        v2.Compose([v2.Resize(8), v2.RGB()]),
    ):
        assert len(leaves(chain)) == 2
        chain.register_forward_pre_hook(lambda module, args: args)
        assert leaves(chain) == [chain]
        assert told(chain)[0] == "unknown"


def test_functions_handed_to_a_transform_are_judged() -> None:
    from torchvision.transforms import v2

    def labels(sample: Any) -> Any:
        return sample["labels"]

    assert told(v2.SanitizeBoundingBoxes(labels_getter=labels))[0] == "unknown"
    assert told(v2.SanitizeBoundingBoxes(labels_getter=sure(labels)))[0] == "deterministic"
    M = need("monai.transforms")
    assert told(M.CropForeground(select_fn=positive))[0] == "unknown"
    assert told(M.Lambda(neg))[0] == told(M.Lambdad("image", [neg]))[0] == "unknown"


def test_no_exported_class_is_without_a_rule() -> None:
    """A class that a new version adds shows here, before users see it judged unknown."""
    from torchvision import transforms as T
    from torchvision.transforms import v2

    from hotset.determinism.libraries import albumentations as of_albumentations
    from hotset.determinism.libraries import torchvision as of_torchvision

    ruled = of_torchvision._FIXED | set(of_torchvision._STILL) | set(of_torchvision._CONTAINERS)
    exported = {name for module in (T, v2) for name, value in vars(module).items() if isinstance(value, type)}
    no_transforms = {"Transform", "InterpolationMode", "AutoAugmentPolicy"}
    assert exported - ruled - no_transforms == {"Compose", "Lambda"}

    A = need("albumentations")
    classes = [
        value for value in vars(A).values() if isinstance(value, type) and issubclass(value, A.BasicTransform)
    ]
    ruled = of_albumentations._FIXED
    unknown = {
        cls.__name__ for cls in classes if cls.__name__ not in ruled and not of_albumentations._drawing(cls)
    }
    assert unknown <= {"BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D"}, unknown
    assert len(classes) > 90


def test_kornias_estimators_draw_and_are_not_judged_deterministic() -> None:
    need("kornia")
    ransac = importlib.import_module("kornia.geometry.ransac")
    assert told(ransac.RANSAC())[0] == "unknown"


def test_a_module_that_moves_running_statistics_is_unknown() -> None:
    for layer in (torch.nn.BatchNorm2d(3), torch.nn.InstanceNorm1d(3, track_running_stats=True)):
        assert told(layer)[0] == "unknown"
        assert told(torch.nn.Sequential(layer))[0] == "unknown"
        assert told(layer.eval())[0] == "deterministic"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_whose_hook_moves_its_weight_is_unknown_in_training() -> None:
    layer = torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3))
    found = hotset.split([torch.nn.Sequential(layer, torch.nn.ReLU())], [torch.ones(3)])
    assert (found.verdicts[0].kind, found.count) == ("random", 0)
    assert told(layer)[0] == "unknown"
    assert told(layer.eval())[0] == "deterministic"


def test_monai_beyond_the_tables() -> None:
    M = need("monai.transforms")
    deepedit = need("monai.apps.deepedit.transforms")

    class Mine(M.MapTransform):  # type: ignore[misc, name-defined]
        def __call__(self, data: Any) -> Any:
            return data

    class Drawn(M.Randomizable):  # type: ignore[misc, name-defined]
        def __call__(self, data: Any) -> Any:
            return data

    class Still(M.RandFlip):  # type: ignore[misc, name-defined]
        def __call__(self, img: Any, randomize: bool = True) -> Any:
            return img + self.R.rand()

    assert told(Mine("image"))[0] == "unknown"
    assert told(Drawn()) == ("random", "MONAI: Drawn is a Randomizable")
    assert told(Still(prob=0))[0] == "random"
    # Draws from numpy's global generator, and its class does not say so.
    assert told(deepedit.DiscardAddGuidanced("image"))[0] == "unknown"
    assert told(M.SaveImage(writer=object, output_ext=".npy"))[0] == "unknown"


def test_kornias_own_copies_of_a_method_do_not_count_as_changed() -> None:
    K = need("kornia.augmentation")

    class Half(K.CenterCrop):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(16)

    class Other(Half):
        def apply_transform(self, *args: Any, **kwargs: Any) -> Any:
            return super().apply_transform(*args, **kwargs) + torch.rand(())

    assert told(Half())[0] == "deterministic"
    assert told(Other())[0] == "unknown"


def test_albumentations_beyond_the_tables() -> None:
    A = need("albumentations")

    class Mine(A.ImageOnlyTransform):  # type: ignore[misc, name-defined]
        def apply(self, img: Any, **_: Any) -> Any:
            return img

    class Brighter(A.Normalize):  # type: ignore[misc, name-defined]
        def apply(self, img: Any, **_: Any) -> Any:
            return img + self.py_random.random()

    assert told(Mine(p=1))[0] == "unknown"
    assert told(Mine(p=0.5))[0] == "random"
    assert told(Brighter())[0] == "unknown"
    assert told(A.Lambda(image=darker))[0] == "unknown"
    assert told(A.ReplayCompose([A.Resize(8, 8)]))[0] == "unknown"


def test_no_library_is_imported_to_judge(programs: Programs, tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from hotset.determinism.chain import leaves\n"
        "from hotset.determinism.verdict import verdict_of\n"
        "for step in leaves([torch.nn.Sequential(torch.nn.ReLU()), len, [lambda x: x]]):\n"
        "    verdict_of(step)\n"
        "print(*{'torchvision', 'monai', 'albumentations', 'kornia'} & set(sys.modules))\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    done = programs.run([str(program)], tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
