"""A chain's leaves and cuts: applying the two halves one after the other equals applying the chain.

Tested for every cut of chains of each library, against the whole chain: the values and the draws of every
generator, the global ones and those of the transforms.
"""

from __future__ import annotations

import functools
import pickle
from importlib.metadata import version
from typing import Any

import pytest
import torch
from helpers import seed_everything
from library_tables import apart, copied, need, neg, noise, seed, sure, world
from packaging.version import Version

import hotset
from hotset.determinism.chain import cut, leaves
from hotset.determinism.verdict import name_of, verdict_of
from hotset.errors import ArgumentError


def names(chain: Any) -> list[str]:
    return [name_of(leaf) for leaf in leaves(chain)]


def test_containers_are_opened_at_any_depth() -> None:
    from torchvision import transforms as T
    from torchvision.transforms import v2

    inner = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Tanh()))
    chain = [T.Compose([T.Resize(8), v2.Compose([v2.RGB(), (T.Pad(1), [inner])])]), neg]
    assert names(chain) == ["Resize", "RGB", "Pad", "ReLU", "Tanh", "neg"]
    assert names(neg) == ["neg"]
    assert names([]) == names([[], ()]) == []
    assert names(functools.partial(neg)) == ["partial(neg)"]


def test_a_container_that_was_declared_is_a_leaf() -> None:
    from torchvision import transforms as T

    for declare, kind in ((hotset.deterministic, "deterministic"), (hotset.nondeterministic, "random")):
        chain = declare(T.Compose([T.Resize(8), T.RandomCrop(4)]))
        assert leaves([chain]) == [chain]
        assert verdict_of(chain).kind == kind


def test_containers_that_choose_are_leaves() -> None:
    from torchvision import transforms as T
    from torchvision.transforms import v2

    both = [T.Resize(8), T.Resize(9)]
    chain = [T.RandomApply(both), T.RandomChoice(both), v2.RandomOrder(both), v2.RandomApply(both)]
    assert leaves(chain) == chain


def test_containers_that_choose_are_leaves_in_the_other_libraries() -> None:
    M, A, K = need("monai.transforms"), need("albumentations"), need("kornia.augmentation")
    flips = [M.Flip(0), M.Flip(1)]
    chosen = M.Compose([M.OneOf(flips), M.Compose([M.SomeOf(flips), M.RandomOrder(flips)]), *flips])
    assert names(chosen) == ["OneOf", "SomeOf", "RandomOrder", "Flip", "Flip"]
    turns = [A.HorizontalFlip(p=1), A.Compose([A.VerticalFlip(p=1), A.Compose([A.NoOp()], p=0.5)])]
    assert names(A.Compose([*turns, A.OneOf(turns)])) == [
        "HorizontalFlip",
        "VerticalFlip",
        "Compose",
        "OneOf",
    ]
    assert names(A.Compose([A.NoOp()], bbox_params=A.BboxParams("coco"))) == ["Compose"]
    assert names(A.Sequential(turns)) == ["Sequential"]
    crops = [K.CenterCrop(9), K.CenterCrop(8)]
    assert names(K.AugmentationSequential(*crops)) == names(K.ImageSequential(*crops)) == ["CenterCrop"] * 2
    assert names(K.ImageSequential(*crops, random_apply=1)) == ["ImageSequential"]
    assert names(K.AugmentationSequential(*crops, data_keys=["input", "mask"])) == ["AugmentationSequential"]
    assert names(K.ImageSequential(torch.nn.ReLU(), *crops)) == ["ImageSequential"]


def test_transforms_that_are_resampled_together_are_one_leaf() -> None:
    M = need("monai.transforms")
    parts = [M.EnsureType(), M.Spacing((2, 2)), M.RandRotate(0.5), M.ScaleIntensity(), M.Zoom(1.5)]
    assert names(M.Compose(parts, lazy=True)) == ["EnsureType", "Compose", "ScaleIntensity", "Zoom"]
    together = leaves(M.Compose(parts, lazy=True))[1]
    assert list(together.transforms) == parts[1:3]
    assert "RandRotate" in verdict_of(together).evidence
    assert len(leaves(M.Compose(parts))) == len(leaves(M.Compose(parts, lazy=None))) == 5


def test_a_container_inside_one_that_maps_is_left_whole() -> None:
    """FiveCrop returns a tuple, which MONAI's Compose would take for five samples."""
    from torchvision import transforms as T

    M = need("monai.transforms")
    chain = M.Compose([T.Compose([T.FiveCrop(4), T.Lambda(sure(torch.stack))]), M.Flip(0)])
    assert names(chain) == ["Compose", "Flip"]
    assert verdict_of(leaves(chain)[0]).kind == "deterministic"


def _tv_chain(given: dict[str, Any]) -> Any:
    T, v2 = given["T"], given["v2"]
    inner = v2.Compose([T.RandomHorizontalFlip(), T.Compose([v2.ColorJitter(0.5), v2.Resize(20)])])
    return [T.Compose([T.Resize(24), inner, T.RandomCrop(9)]), torch.nn.Sequential(torch.nn.Dropout())]


def _monai_chain(given: dict[str, Any]) -> Any:
    M = given["M"]
    inner = M.Compose([M.Flip(0), M.RandGaussianNoise(prob=1), M.Compose([M.Zoom(1.5), M.RandFlip(0.5)])])
    return M.Compose([M.ScaleIntensity(), inner, M.RandRotate(0.5, prob=1), noise])


def _monai_lists(given: dict[str, Any]) -> Any:
    """A sample becomes a list in the inner Compose, the only one that does not map over it."""
    M = given["M"]
    split = [M.SplitDim(1, keepdim=True), reversed_list, M.Compose([M.RandGaussianNoise(prob=1)])]
    return M.Compose([M.Flip(0), M.Compose(split, map_items=False), M.RandScaleIntensity(0.5, prob=1)])


def _monai_lazy(given: dict[str, Any]) -> Any:
    M = given["M"]
    parts = [
        M.ScaleIntensity(),
        M.Rotate(0.3),
        M.RandZoom(prob=1),
        M.GaussianSmooth(),
        M.Rotate(0.2),
        M.Flip(0),
    ]
    return M.Compose([*parts, M.Compose([M.Rotate(0.1), M.RandGaussianNoise(prob=1)])], lazy=True)


def _albumentations_chain(given: dict[str, Any]) -> Any:
    A = given["A"]
    inner = A.Compose([A.VerticalFlip(p=1), A.RandomCrop(12, 12), A.Sequential([A.GaussNoise(p=1)], p=1)])
    parts = [A.Resize(20, 20), inner, A.RandomBrightnessContrast(), given["ToTensorV2"](), A.NoOp(p=1)]
    return A.Compose(parts, strict=True, additional_targets={"image2": "image"})


def reversed_list(values: list[Any]) -> list[Any]:
    assert isinstance(values, list)
    return values[::-1]


CHAINS = {
    "tv": ("torchvision", _tv_chain, 6),
    "monai": ("monai", _monai_chain, 7),
    "monai lists": ("monai", _monai_lists, 5),
    "monai lazy": ("monai", _monai_lazy, 4),
    "albumentations": ("albumentations", _albumentations_chain, 7),
}


def run(steps: list[Any], sample: Any) -> Any:
    for step in steps:
        sample = step(**sample) if isinstance(sample, dict) else step(sample)
    return sample


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHAINS)
def test_the_two_halves_of_any_cut_are_the_chain(name: str) -> None:
    library, make, count = CHAINS[name]
    given, samples = world(library)
    if name == "monai lists" and Version(version("monai")) < Version("1.6"):
        count = 1  # kept whole

    def fresh() -> Any:
        chain = make(given)
        seed(chain)
        seed_everything(1)
        return chain

    whole = fresh()
    assert len(leaves(whole)) == count
    apply = whole if isinstance(whole, list) else [whole]
    sample = samples["picture"]
    expected = [run(apply, copied(sample)) for _ in range(3)]
    assert apart(expected[0], expected[1]), "a chain that draws nothing would hold nothing"
    for n in range(count + 1):
        # What a reader of the cache does: the prefix's output, then the suffix.
        prefix, suffix = cut(fresh(), n)
        assert bool(prefix) == (n > 0)
        assert bool(suffix) == (n < count)
        for result in expected:
            middle = run(prefix, copied(sample))
            assert not apart(run(suffix, middle), result), f"cut after {n}"


def test_kornias_sequence_is_cut_behind_children_that_do_not_draw() -> None:
    K = need("kornia.augmentation")
    for kind in (K.ImageSequential, K.AugmentationSequential):
        parts = [K.Resize((20, 20)), K.CenterCrop(16), K.RandomCrop((9, 9)), K.RandomGaussianNoise(p=0.5)]
        whole = kind(*parts)
        sample = world("kornia")[1]["picture"]
        seed_everything(2)
        expected = [whole(sample) for _ in range(4)]
        for n in (0, 1, 2):
            prefix, suffix = cut(whole, n)
            assert [name for name, _ in suffix[0].named_children()] == [
                name for name, _ in whole.named_children()
            ][n:]
            middle = run(prefix, sample)
            seed_everything(2)
            for result in expected:
                assert not apart(run(suffix, middle), result)
        assert [name for name, _ in whole.named_children()] == [
            f"{type(p).__name__}_{i}" for i, p in enumerate(parts)
        ]


def test_the_halves_of_monais_compose_are_seeded_like_the_whole() -> None:
    given, samples = world("monai")
    whole = _monai_chain(given)
    whole.set_random_state(seed=11)
    seed_everything(1)
    expected = whole(copied(samples["picture"]))
    for n in range(1, 7):
        prefix, suffix = cut(whole, n)
        suffix[0].set_random_state(seed=11)
        seed_everything(1)
        assert not apart(run(suffix, run(prefix, copied(samples["picture"]))), expected)


def test_the_halves_can_be_pickled() -> None:
    given, samples = world("monai")
    prefix, suffix = pickle.loads(pickle.dumps(cut(_monai_chain(given), 3)))
    for step in (*prefix, *suffix):
        step.set_random_state(seed=3)
    assert run(suffix, run(prefix, copied(samples["picture"]))).shape == (1, 16, 16)


def test_only_the_containers_on_the_way_to_the_cut_are_taken_apart() -> None:
    from torchvision import transforms as T

    first, last = T.Compose([T.Resize(8), T.Pad(1)]), T.Compose([T.CenterCrop(4), T.RandomCrop(2)])
    between = T.Compose([T.Grayscale(), T.RandomInvert()])
    prefix, suffix = cut([first, between, last], 3)
    assert prefix == [first, between.transforms[0]]
    assert suffix == [between.transforms[1], last]


def test_a_chain_cannot_be_cut_outside() -> None:
    assert cut([], 0) == ([], [])
    assert cut(neg, 1) == ([neg], [])
    for n in (-1, 2):
        with pytest.raises(ArgumentError, match=f"n must be from 0 to 1, .*, got {n}"):
            cut(neg, n)
