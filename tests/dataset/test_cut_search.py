"""Where chains are found, where they are cut, and what the plan says about that.

A chain is where users keep it: ``transform``, ``target_transform`` and ``transforms`` of torchvision's
datasets, a list that the dataset goes through, through ``Subset`` and ``ConcatDataset``, or given. Whatever
is cut, a cached run equals an uncached one bit for bit, random suffix included.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, failure, is_a_sentence, rarely, recorded, rng_states, seed_everything
from hypothesis import given
from hypothesis import strategies as st
from live import Compose as LiveCompose
from live import LoggedCalls, draw_all, halve, image_jitter, image_to_float
from PIL import Image, ImageDraw
from samples import image_and_label
from sources import FolderLike, ReadLog, Samples, Transformed
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset

import hotset
from hotset.determinism.equality import differs
from hotset.policy.cut_point import cheapest_cut, cost_of_cut

N = 12


def epochs(dataset: Any, count: int = 2) -> list[Any]:
    seed_everything(99)
    return [([dataset[i] for i in range(len(dataset))], rng_states()) for _ in range(count)]


def double(label: int) -> int:
    return 2 * label + 1000


def blur_label(label: int) -> int:
    return label + random.randrange(1000)


class Both(Dataset[Any]):
    """As in torchvision: a transform for the picture and one for the label, each of which may be None."""

    def __init__(
        self, transform: Any = None, target_transform: Any = None, label_first: bool = False
    ) -> None:
        self.transform = transform
        self.target_transform = target_transform
        self.label_first = label_first

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        image, label = image_and_label(range(N)[index])
        if self.label_first and self.target_transform is not None:
            label = self.target_transform(label)
        if self.transform is not None:
            image = self.transform(image)
        if not self.label_first and self.target_transform is not None:
            label = self.target_transform(label)
        return image, label


class Jointly(Dataset[Any]):
    """A detection dataset: one chain for picture and target at once."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        image, label = image_and_label(range(N)[index])
        image, boxes = self.transforms(image, {"boxes": torch.full((4,), float(label))})
        return image, boxes


def scale_both(image: torch.Tensor, target: Any) -> Any:
    return image.float() / 2, {"boxes": target["boxes"] * 2}


def jitter_both(image: torch.Tensor, target: Any) -> Any:
    by = random.randrange(5)
    return image + by, {"boxes": target["boxes"] + by}


class JointCompose:
    """References' own Compose: unknown to hotset, so it is one transform."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def __call__(self, *values: Any) -> Any:
        for step in self.steps:
            values = step(*values)
        return values


def listed(steps: list[Any]) -> Any:
    return Transformed(Samples(image_and_label, N), steps)


SOURCES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "picture and label": (lambda: Both(image_to_float, double), ()),
    "random picture": (lambda: Both(image_jitter, double), ("image_jitter",)),
    "random label": (lambda: Both(image_to_float, blur_label), ("blur_label",)),
    "both random": (lambda: Both([image_to_float, image_jitter], blur_label), ("image_jitter", "blur_label")),
    "a list that it goes through": (lambda: listed([halve, halve, draw_all]), ("draw_all",)),
    "an empty list": (lambda: listed([]), ()),
    "subset": (lambda: Subset(FolderLike(N, image_jitter), [3, 1, 4, 1, 5]), ("image_jitter",)),
    "subset of a subset": (
        lambda: Subset(Subset(FolderLike(N, image_jitter), list(range(1, N))), [0, 2]),
        ("image_jitter",),
    ),
    "one chain for all parts": (
        lambda: ConcatDataset([FolderLike(4, image_jitter), FolderLike(N, image_jitter)]),
        ("image_jitter",),
    ),
    "other deterministic chains": (
        lambda: ConcatDataset([FolderLike(4, image_to_float), FolderLike(N, lambda x: x.float() * 3)]),
        (),
    ),
}


def _flat(transform: Any) -> Any:
    """The callable that a dataset takes: torchvision's Compose for a list of parts."""
    from torchvision.transforms import Compose

    return Compose(transform) if isinstance(transform, list) else transform


@pytest.mark.parametrize("name", SOURCES)
def test_a_chain_is_found_where_users_keep_it(name: str) -> None:
    make, live = SOURCES[name]

    def source() -> Any:
        made = make()
        if isinstance(made, Both):
            made.transform = _flat(made.transform)
        return made

    with hotset.cache(source()) as cached:
        assert cached.plan.live == live
        equal_batches(epochs(cached), epochs(source()))
        equal_batches(epochs(cached, 1), epochs(source(), 1), "warm")


@pytest.mark.parametrize(
    ("workers", "context"), rarely([(0, "fork"), (2, "fork"), (1, "spawn")], (1, "spawn"))
)
def test_cached_and_uncached_runs_agree_with_a_random_suffix(workers: int, context: str) -> None:
    def run(cached: bool) -> list[Any]:
        source: Any = Both(LiveCompose([image_to_float, image_jitter]), double)
        dataset = hotset.cache(source, memory="8MiB") if cached else source
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        if workers:
            options["multiprocessing_context"] = context if cached else "fork"
        loader = hotset.DataLoader(dataset, batch_size=4, shuffle=True, **options)
        seed_everything(7)
        return [(list(loader), rng_states()) for _ in range(2)]

    equal_batches(run(True), run(False))


def test_chains_that_differ_between_the_parts_are_never_mixed_up() -> None:
    """A random one among them cannot be cut off: samples come from the source, and are not frozen."""
    parts = [FolderLike(4, image_to_float), FolderLike(N, image_jitter)]
    with hotset.cache(ConcatDataset(parts)) as cached:
        with pytest.warns(hotset.HotsetWarning, match="draw random numbers"):
            batches = epochs(cached)
        equal_batches(batches, epochs(ConcatDataset(parts)))
        assert cached.stats().cached == 4
    with hotset.cache(parts[0]) as one, hotset.cache(parts[1]) as other:
        equal_batches(epochs(ConcatDataset([one, other])), epochs(ConcatDataset(parts)))


def test_draws_of_two_chains_keep_their_order() -> None:
    """Two random parts of which the label's comes first can be cut only where their order stays."""
    source = Both(image_jitter, blur_label, label_first=True)
    found = failure(lambda: hotset.cache(source))
    assert found.kind is hotset.NotCacheable
    with hotset.cache(Both(image_to_float, blur_label, label_first=True)) as cached:
        equal_batches(epochs(cached), epochs(Both(image_to_float, blur_label, label_first=True)))


@pytest.mark.parametrize(
    ("transforms", "live"),
    [
        (scale_both, ()),
        (jitter_both, ("jitter_both",)),
        (JointCompose(scale_both, jitter_both), ("JointCompose",)),
    ],
)
def test_a_chain_of_two_values_is_cut(transforms: Any, live: tuple[str, ...]) -> None:
    with hotset.cache(Jointly(transforms)) as cached:
        assert cached.plan.live == live
        equal_batches(epochs(cached), epochs(Jointly(transforms)))


class OfDetr(Jointly):
    """Holds the chain as DETR and torchvision's references do."""

    def __init__(self, transforms: Any) -> None:
        super().__init__(None)
        self._transforms = transforms

    def __getitem__(self, index: int) -> Any:
        image, label = image_and_label(range(N)[index])
        return self._transforms(image, {"boxes": torch.full((4,), float(label))})


def test_a_chain_of_two_values_with_the_name_of_detr_is_cut() -> None:
    with hotset.cache(OfDetr(jitter_both)) as cached:
        assert cached.plan.live == ("jitter_both",)
        equal_batches(epochs(cached), epochs(OfDetr(jitter_both)))


def first_for_both(image: torch.Tensor, other: torch.Tensor) -> Any:
    return image, image


def apart(image: torch.Tensor, other: torch.Tensor) -> Any:
    by = random.randrange(5)
    return image + by, other - by


class KeepsTheFirst(Jointly):
    """Gives its chain the same picture twice."""

    def __getitem__(self, index: int) -> Any:
        image, label = image_and_label(range(N)[index])
        return self.transforms(image, image)[0], label


class AsTuple(Jointly):
    """Gives its chain a list, and returns the elements of what it gets, as MONAI's ZipDataset does."""

    def __getitem__(self, index: int) -> Any:
        return tuple(self.transforms(list(image_and_label(range(N)[index]))))


def test_a_chain_without_transforms_whose_result_is_taken_apart_stays_in_the_dataset() -> None:
    from torchvision import transforms as T

    empty = T.Compose([])
    with hotset.cache(AsTuple(empty)) as cached:
        equal_batches(epochs(cached), epochs(AsTuple(empty)))


def test_two_results_with_one_place_in_the_sample_are_not_put_back_there() -> None:
    """The live part's first result would be lost to its second."""
    from torchvision.transforms import v2

    found = failure(lambda: hotset.cache(KeepsTheFirst(v2.Compose([first_for_both, apart]))))
    assert found.kind is hotset.NotCacheable
    with hotset.cache(KeepsTheFirst(first_for_both)) as cached:
        equal_batches(epochs(cached), epochs(KeepsTheFirst(first_for_both)))


def test_torchvisions_joint_compose_is_cut_in_its_middle() -> None:
    from torchvision.transforms import v2

    def make() -> Any:
        return Jointly(v2.Compose([v2.ToDtype(torch.float32), v2.RandomHorizontalFlip(0.5), v2.Identity()]))

    with hotset.cache(make()) as cached:
        assert cached.plan.live == ("RandomHorizontalFlip", "Identity")
        equal_batches(epochs(cached), epochs(make()))


def test_torchvisions_pair_of_transforms(tmp_path: Path) -> None:
    """VisionDataset keeps ``transform`` and ``target_transform`` twice, the second time in ``transforms``."""
    from torchvision.datasets import VisionDataset

    class Pair(VisionDataset):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            return self.transforms(*image_and_label(range(N)[index]))

    def make() -> Any:
        return Pair(str(tmp_path), transform=_flat([image_to_float, image_jitter]), target_transform=double)

    source = make()
    with hotset.cache(source) as cached:
        assert cached.plan.live == ("image_jitter",)
        equal_batches(epochs(cached), epochs(make()))
    assert source.transforms.transform is source.transform, "the user's own dataset is as it was"


def test_what_the_dataset_does_after_its_transform_is_never_skipped() -> None:
    """It changes what its chain returns: a deterministic chain is cached whole, a random one is refused."""

    class Afterwards(FolderLike):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image * 2, label

    with hotset.cache(Afterwards(N, image_to_float)) as cached:
        assert cached.plan.live == ()
        equal_batches(epochs(cached), epochs(Afterwards(N, image_to_float)))
    found = failure(lambda: hotset.cache(Afterwards(N, image_jitter)))
    assert found.kind is hotset.NotCacheable


class Squares(FolderLike):
    """Changes what its chain returns."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image * image, label


class OwnCompose:
    """A container that only its own dataset knows."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def __call__(self, value: Any) -> Any:
        for step in self.steps:
            value = step(value)
        return value


@hotset.nondeterministic
class OwnJitter(OwnCompose):
    pass


class Checking(FolderLike):
    """Checks the type of its transform at each reading."""

    def __getitem__(self, index: int) -> Any:
        if not isinstance(self.transform, OwnCompose):
            raise ValueError("transform must be an OwnCompose.")
        return super().__getitem__(index)


def test_a_dataset_that_checks_the_type_of_its_transform_is_cached_whole() -> None:
    """It accepts nothing in place of its chain, so the chain is not cut; a random one is refused."""
    chain = OwnCompose(image_to_float, torch.neg)
    with hotset.cache(Checking(N, chain)) as cached:
        assert cached.plan.live == ()
        assert any("accepts nothing in place of its transform" in note for note in cached.plan.notes)
        equal_batches(epochs(cached), epochs(Checking(N, chain)))
        assert cached.stats().cached == N
    with hotset.cache(Checking(N, chain), transform=[draw_all]) as cached:
        assert cached.plan.live == ("draw_all",)
        equal_batches(epochs(cached), epochs(Transformed(Checking(N, chain), [draw_all])))
    found = failure(lambda: hotset.cache(Checking(N, OwnJitter(image_jitter))))
    assert found.kind is hotset.NotCacheable
    assert is_a_sentence(found.text), found.text
    with pytest.raises(ValueError, match="must be an OwnCompose"):  # the dataset's own error
        hotset.cache(Checking(N, halve))


def test_monais_cache_dataset_is_cached() -> None:
    monai = pytest.importorskip("monai")
    chain = monai.transforms.Compose([monai.transforms.ScaleIntensity(0.0, 1.0)])
    source = monai.data.CacheDataset([np.full((1, 4, 4), i + 1.0) for i in range(N)], chain, progress=False)
    with hotset.cache(source) as cached:
        equal_batches(epochs(cached), epochs(source))
        assert cached.stats().cached == N


def test_randomness_that_a_trial_finds_is_refused_where_it_cannot_be_cut_off() -> None:
    """It shows in one call of many: the trial makes many of them, and two readings alone may miss it."""
    calls = [0]

    def rarely(image: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return image + (random.random() if calls[0] % 11 == 0 else 0)

    found = failure(lambda: hotset.cache(Squares(N, rarely)))
    assert found.kind is hotset.NotCacheable
    assert "rarely" in found.text
    assert is_a_sentence(found.text), found.text


def test_a_bad_sample_of_the_datasets_own_chain_does_not_stop_planning() -> None:
    def picky(image: torch.Tensor) -> torch.Tensor:
        if torch.equal(image, image_and_label(0)[0]):
            raise ValueError("sample 0 is bad")
        return image

    with hotset.cache(FolderLike(N, picky), transform=[halve_first]) as cached:
        assert cached.plan.live == ()
        equal_batches(cached[1], image_and_label(1))
        assert "bad" in failure(lambda: cached[0]).text


@pytest.mark.parametrize("cut", [np.int64(1), True, "1", 1.0])
def test_a_cut_that_is_no_int_is_refused(cut: Any) -> None:
    refused = failure(lambda: hotset.cache(Samples(image_and_label, N), memory="1MiB", cut=cut))
    assert refused.kind is hotset.ArgumentError
    assert is_a_sentence(refused.text)
    assert type(cut).__name__ in refused.text
    with hotset.cache(Samples(image_and_label, N), memory="1MiB", strict=np.True_) as cached:  # type: ignore[arg-type]
        assert len(cached) == N


class Tags(Dataset[Any]):
    """Most tags of a text are the same; each goes through a transform."""

    def __init__(self) -> None:
        self.transform: Any = blur
        self.target_transform: Any = {"O": 0, "person": 1}.__getitem__

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        tags = [*["O"] * 1000, "person"]
        return self.transform(torch.full((4,), float(index))), [self.target_transform(tag) for tag in tags]


def blur(text: torch.Tensor) -> torch.Tensor:
    return text + torch.rand(())


def test_equal_strings_are_not_one_value_that_is_tried_again_and_again() -> None:
    with hotset.cache(Tags(), memory="8MiB") as cached:
        assert cached.plan.live == ("blur",)
        assert differs(epochs(cached), epochs(Tags())) is None


class Texts(Dataset[str]):
    """The first is empty; all take a while to read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> str:
        time.sleep(0.003)
        return "word " * (index % 3)


def test_a_first_sample_without_a_size_does_not_stop_planning() -> None:
    def padded(text: str) -> torch.Tensor:
        return torch.tensor(list(text.encode().ljust(4096, b"\0")))

    with hotset.cache(Texts(), transform=[padded], memory="1MiB") as cached:
        assert "a sample takes 0 B there" in str(cached.plan)
        assert bytes(cached[2].tolist()).rstrip(b"\0") == b"word word "


def test_an_impossible_cut_is_an_error_and_not_moved() -> None:
    for source, chain, cut in (
        (Squares(N, image_to_float), None, 0),
        (Both(image_to_float, blur_label), [halve_first], 2),
    ):
        found = failure(lambda: hotset.cache(source, transform=chain, cut=cut))  # noqa: B023
        assert found.kind is hotset.ArgumentError
        assert f"cut={cut} is not possible" in found.text
        assert is_a_sentence(found.text), found.text


def test_known_randomness_that_does_not_show_is_refused_where_it_cannot_be_cut_off() -> None:
    """A crop of exactly the picture's size looks the same each time: only its class gives it away."""
    from torchvision.transforms import v2

    class Afterwards(FolderLike):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image * 2, label

    height = image_and_label(0)[0].shape[-2:]
    crop = v2.RandomApply([v2.Identity()], p=1e-9)
    assert len(height) == 2
    found = failure(lambda: hotset.cache(Afterwards(N, crop)))
    assert found.kind is hotset.NotCacheable
    assert "RandomApply" in found.text


def test_the_probe_finds_what_a_short_trial_missed() -> None:
    """Random for some samples only: not for those of the trial, but for those that the probe reads."""

    def rarely(sample: Any) -> Any:
        image, label = sample
        return image, label + (random.randrange(1000) if int(image.flatten()[0]) == target else 0)

    target = int(image_and_label(N // 7)[0].flatten()[0])
    with hotset.cache(Samples(image_and_label, N), transform=[halve_first, rarely]) as cached:
        assert "rarely" in cached.plan.live
        equal_batches(epochs(cached), epochs(Transformed(Samples(image_and_label, N), [halve_first, rarely])))


def halve_first(sample: Any) -> Any:
    return sample


# MONAI's own


def _items() -> list[dict[str, Any]]:
    return [{"image": np.full((1, 6, 6), float(i)), "label": i} for i in range(N)]


def _monai(steps: list[Any]) -> Any:
    from monai.data import Dataset as MonaiDataset
    from monai.transforms import Compose as MonaiCompose

    return MonaiDataset(_items(), MonaiCompose(steps))


def _values(found: Any) -> Any:
    """Samples without the memory addresses that MetaTensors hold of the transforms that made them."""
    return [
        ([(torch.as_tensor(s["image"]).numpy(), s["label"]) for s in samples], rng) for samples, rng in found
    ]


def add_one(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "image": item["image"] + 1}


def test_a_nested_deterministic_compose_is_cached_unlike_monais() -> None:
    """CacheDataset caches nothing of it, nor anything after a callable that is not a MONAI transform."""
    from monai.transforms import Compose as MonaiCompose
    from monai.transforms import RandFlipd, ScaleIntensityd, SpatialPadd

    def chain() -> Any:
        inner = MonaiCompose([ScaleIntensityd("image"), add_one, SpatialPadd("image", (8, 8))])
        return _monai([inner, RandFlipd("image", prob=0.5).set_random_state(5), ScaleIntensityd("image")])

    with hotset.cache(chain()) as cached:
        assert cached.plan.cached[1:] == ("ScaleIntensityd", "add_one", "SpatialPadd")
        assert cached.plan.live == ("RandFlipd", "ScaleIntensityd")
        equal_batches(_values(epochs(cached)), _values(epochs(chain())))


def test_a_lambda_in_monais_compose_that_hides_numpys_rng_is_live_unlike_monais() -> None:
    from monai.transforms import Lambdad, ScaleIntensityd

    def chain() -> Any:
        return _monai([ScaleIntensityd("image"), Lambdad("image", lambda x: x + np.random.rand())])

    with hotset.cache(chain()) as cached:
        assert cached.plan.live == ("Lambdad",)
        equal_batches(_values(epochs(cached)), _values(epochs(chain())))


@pytest.mark.parametrize("steps", [[], [None]])
def test_an_empty_chain_is_like_none(steps: list[Any]) -> None:
    transform = None if steps else []
    with hotset.cache(Samples(image_and_label, N), transform=transform) as cached:
        assert len(cached.plan.rows) == 1
        equal_batches(epochs(cached), epochs(Samples(image_and_label, N)))


# ---- where to cut ----------------------------------------------------------------------------------------


def test_cut_overrides_the_choice_and_is_checked(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "calls")
    chain = [LoggedCalls(log), lambda sample: (sample[0] * 3, sample[1]), draw_all]
    for cut, calls in ((0, 2 * N), (1, N), (2, N)):
        with hotset.cache(Samples(image_and_label, N), transform=chain, cut=cut) as cached:
            log.reset()
            got = epochs(cached)
            assert log.total() == calls
            assert len(cached.plan.live) == 3 - cut
        equal_batches(got, epochs(Transformed(Samples(image_and_label, N), chain)))
    for wrong in (-1, 4, "two", True, 1.5):
        found = failure(lambda cut=wrong: hotset.cache(Samples(image_and_label, N), transform=chain, cut=cut))  # type: ignore[misc]
        assert found.kind is hotset.ArgumentError
        assert is_a_sentence(found.text), found.text
    found = failure(lambda: hotset.cache(Samples(image_and_label, N), transform=chain, cut=3))
    assert found.kind is hotset.NotCacheable
    assert "draw_all" in found.text


def test_cut_counts_the_datasets_own_transforms_first() -> None:
    def make() -> Any:
        return FolderLike(N, _flat([image_to_float, torch.neg]))

    for cut in range(4):
        with hotset.cache(make(), transform=[halve], cut=cut) as cached:
            assert len(cached.plan.live) == 3 - cut
            equal_batches(epochs(cached), epochs(Transformed(make(), [halve])))


def pair(image: torch.Tensor, label: int) -> tuple[torch.Tensor, int]:
    return image, label


class Labelled:
    """A sample of a class of the user's own, as docTR's are."""

    def __init__(self, image: torch.Tensor, label: int) -> None:
        self.image, self.label = image, label

    def __getitem__(self, place: int) -> Any:
        return (self.image, self.label)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Labelled) and self.label == other.label and self.image.equal(other.image)


@pytest.mark.parametrize("kind", [pair, Labelled])
def test_a_conversion_that_makes_the_samples_larger_stays_live_where_fewer_would_fit(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    clock = 0.0

    def slow(index: int) -> Any:
        nonlocal clock
        clock += 1e-3
        return kind(torch.full((4096,), index % 251, dtype=torch.uint8), index)

    def to_float(sample: Any) -> Any:
        nonlocal clock
        clock += 1e-5
        return kind(sample[0].to(torch.float64), sample[1])

    monkeypatch.setattr("time.perf_counter", lambda: clock)
    source = Samples(slow, 64)
    with hotset.cache(source, transform=to_float, memory=64 * 4400) as cached:
        assert cached.plan.live == ("to_float",)
        assert any("cut before to_float" in note for note in cached.plan.notes)
        equal_batches(epochs(cached), epochs(Transformed(source, [to_float])))
        assert cached.stats().uncached == 0
    with hotset.cache(source, transform=to_float, memory="16MiB") as cached:
        assert cached.plan.live == ()


@given(
    read=st.floats(0, 10),
    seconds=st.lists(st.floats(0, 10), max_size=5),
    sizes=st.lists(st.integers(1, 100), min_size=6, max_size=6),
    limit=st.integers(0, 2000),
)
def test_the_cut_is_the_last_one_unless_another_is_clearly_cheaper(
    read: float, seconds: list[float], sizes: list[int], limit: int
) -> None:
    at = [float(size) for size in sizes[: len(seconds) + 1]]
    costs = [cost_of_cut(cut, read, seconds, at, 20, limit) for cut in range(len(seconds) + 1)]
    best = cheapest_cut(read, seconds, at, 20, limit)
    assert all(cost >= 0 for cost in costs)
    if best == len(seconds):
        assert min(costs) >= 0.8 * costs[-1]
    else:
        assert costs[best] == min(costs) < 0.8 * costs[-1]
    if all(20 * size <= limit for size in at):
        assert best == len(seconds)


# ---- samples that cannot be read -------------------------------------------------------------------------


def test_a_transform_that_raises_on_all_samples_raises_its_own_error() -> None:
    def broken(sample: Any) -> Any:
        raise KeyError("no such key in the user's transform")

    found = failure(lambda: hotset.cache(Samples(image_and_label, N), transform=[halve, broken]))
    assert found.kind is KeyError
    assert found.frames[-1] == "broken"


def test_a_bad_sample_raises_only_when_it_is_read() -> None:
    def picky(sample: Any) -> Any:
        if sample[1] == image_and_label(0)[1]:
            raise ValueError("sample 0 is bad")
        return sample

    with hotset.cache(Samples(image_and_label, N), transform=picky) as cached:
        assert cached[1][1] == image_and_label(1)[1]
        assert "bad" in failure(lambda: cached[0]).text


def test_a_bad_sample_raises_only_when_it_is_read_where_the_datasets_own_chain_is_cut() -> None:
    from torchvision.transforms import Compose, Lambda, RandomErasing

    def checked(picture: torch.Tensor) -> torch.Tensor:
        if not picture.any():
            raise ValueError("sample 0 is bad")
        return picture

    class Pictures(Dataset[Any]):
        def __init__(self) -> None:
            self.transform = Compose([Lambda(checked), RandomErasing()])

        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            return self.transform(torch.full((3, 8, 8), float(index)))

    with hotset.cache(Pictures(), memory="1MiB") as cached:
        assert [row.cached for row in cached.plan.rows] == [True, True, False]
        assert cached[1].shape == (3, 8, 8)
        assert "bad" in failure(lambda: cached[0]).text


# ---- the plan --------------------------------------------------------------------------------------------


def test_the_plan_is_a_table_with_the_evidence() -> None:
    def halve(sample: Any) -> Any:  # of its own, as other tests declare the common one
        return sample[0].to(torch.float32) / 2, sample[1]

    with hotset.cache(Samples(image_and_label, N), transform=[halve, draw_all], memory="1MiB") as cached:
        text = str(cached.plan)
        rows = {row.name: row for row in cached.plan.rows}
        assert [row.cached for row in cached.plan.rows] == [True, True, False]
        assert rows["halve"].kind == "unknown"
        assert "probed" in rows["halve"].evidence
        assert rows["draw_all"].kind == "random"
        assert all(row.seconds is not None and row.seconds > 0 for row in cached.plan.rows)
        assert rows["halve"].bytes == image_and_label(0)[0].numel() * 4 + 8
        for word in ("halve", "draw_all", "probed", "cached", "live", "fit"):
            assert word in text
        assert cached.plan.steps_per_epoch(5) == 3
        assert cached.plan.epochs_for(30, 5) == 10
        faster, slower = cached.plan.epoch_seconds(), cached.plan.epoch_seconds(cached=False)
        assert 0 < faster < slower


def test_a_budget_above_what_the_machine_has_is_warned_about() -> None:
    with pytest.warns(hotset.HotsetWarning, match="would swap or kill"):
        hotset.cache(Samples(image_and_label, N), memory="900TiB").close()


class Drawing(FolderLike):
    """Draws unused numbers with each reading; its chain and a given one are judged in spite of that."""

    def __getitem__(self, index: int) -> Any:
        random.random()
        torch.rand(())
        return super().__getitem__(index)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("is_declared", [False, True])
def test_planning_for_a_source_that_draws_moves_no_generator(given: bool, is_declared: bool) -> None:
    source: Any = Drawing(N, None if given else image_to_float)
    before = rng_states()
    if is_declared:
        hotset.cache(hotset.deterministic(source), transform=halve_first if given else None).close()
    else:
        found = failure(lambda: hotset.cache(source, transform=halve_first if given else None))
        assert found.kind is hotset.NotCacheable
    assert rng_states() == before


def test_live_transforms_are_measured_and_leave_no_trace() -> None:
    class Held:
        def __init__(self) -> None:
            self.generator = np.random.default_rng(3)
            self.calls = 0

        def __call__(self, sample: Any) -> Any:
            self.calls += 1
            return sample[0] + self.generator.integers(3), sample[1]

    live = Held()
    before = rng_states()
    with hotset.cache(Samples(image_and_label, N), transform=[live]) as cached:
        assert cached.plan.rows[-1].seconds is not None
    assert live.calls == 0
    assert live.generator.bit_generator.state == np.random.default_rng(3).bit_generator.state
    assert rng_states() == before


def test_one_slow_call_is_not_taken_for_the_time_of_a_live_transform(tmp_path: Path) -> None:
    waited = tmp_path / "waited"

    @hotset.nondeterministic
    def waits_at_first(sample: Any) -> Any:
        if not waited.exists():
            waited.touch()
            time.sleep(0.05)
        return sample

    with hotset.cache(Samples(image_and_label, N), transform=[waits_at_first]) as cached:
        seconds = cached.plan.rows[-1].seconds
    assert waited.exists()
    assert seconds is not None
    assert seconds < 0.05, "less than the call took that waited"


class Crop:
    """Adds a random number, in place of torchvision's RandomCrop."""

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture + torch.randint(1000, ())


class Around(Dataset[Any]):
    """Does something around its own random chains, which a cut would move behind it."""

    def __init__(self) -> None:
        self.transform = Crop()
        self.target_transform = Crop()

    def __len__(self) -> int:
        return N


class SeedsByIndex(Around):
    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return self.transform(torch.full((2,), index))


class DrawsASeed(Around):
    def __getitem__(self, index: int) -> Any:
        seed = np.random.randint(2**31)
        torch.manual_seed(seed)
        picture = self.transform(torch.full((2,), index))
        torch.manual_seed(seed)
        return picture, self.target_transform(torch.full((2,), index))


class PutsTheGeneratorBack(Around):
    def __getitem__(self, index: int) -> Any:
        state = torch.get_rng_state()
        picture = self.transform(torch.full((2,), index))
        torch.set_rng_state(state)
        return picture, self.target_transform(torch.full((2,), index))


class SeededCrop(Crop):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture + torch.randint(1000, (), generator=self.generator)


class SeedsThoseOfAClass(Around):
    """As MONAI's ImageDataset: it asks whether its chain can be seeded, which one in its place cannot."""

    def __init__(self) -> None:
        self.transform = SeededCrop()

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.transform, SeededCrop):
            self.transform.generator.manual_seed(index)
        return self.transform(torch.full((2,), index))


class SeedsThoseOfAClassThatGetWhatItHolds(Around):
    """The same, and its chain might work in place on what it holds, so that it is tried with copies."""

    def __init__(self) -> None:
        self.transform = SeededCrop()
        self.rows = [torch.full((2,), index) for index in range(N)]

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.transform, SeededCrop):
            self.transform.generator.manual_seed(index)
        return self.transform(self.rows[index])


class TriesAgain(Around):
    def __getitem__(self, index: int) -> Any:
        whole = torch.full((2,), index)
        picture = self.transform(whole)
        while int(picture[0]) % 4:
            picture = self.transform(whole)
        return picture


class TriesAgainAtTimes(Around):
    def __getitem__(self, index: int) -> Any:
        whole = torch.full((2,), index)
        picture = self.transform(whole)
        return self.transform(whole) if int(picture[0]) % 4 == 0 else picture


class FailsAtTimes(Crop):
    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        if torch.rand(()) < 0.3:
            raise ValueError("there is nothing in this crop")
        return super().__call__(picture)


class Catches(Around):
    def __init__(self) -> None:
        self.transform = FailsAtTimes()

    def __getitem__(self, index: int) -> Any:
        while True:
            with contextlib.suppress(ValueError):
                return self.transform(torch.full((2,), index))


class TriesUntilItIsRandom(Around):
    def __getitem__(self, index: int) -> Any:
        whole = torch.full((2,), index)
        while True:
            picture = self.transform(whole)
            if not torch.equal(picture, whole):
                return picture


@pytest.mark.parametrize(
    "kind",
    [
        SeedsByIndex,
        DrawsASeed,
        PutsTheGeneratorBack,
        SeedsThoseOfAClass,
        SeedsThoseOfAClassThatGetWhatItHolds,
        TriesAgain,
        TriesAgainAtTimes,
        Catches,
        TriesUntilItIsRandom,
    ],
)
def test_a_chain_is_not_cut_if_samples_are_others_when_it_runs_later(kind: type[Around]) -> None:
    dataset = kind()
    held, states = dict(vars(dataset)), rng_states()
    with pytest.raises(hotset.NotCacheable):
        hotset.cache(dataset, memory="1MiB")
    assert vars(dataset) == held
    assert rng_states() == states


class LeavesItSeeded(Around):
    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return self.transform(torch.full((2,), index))


class SeedsItsOwn(Around):
    def __init__(self) -> None:
        self.transform = SeededCrop()
        self.generator = self.transform.generator

    def __getitem__(self, index: int) -> Any:
        self.generator.manual_seed(index)
        random.random()  # a draw that no sample depends on
        return self.transform(torch.full((2,), index))


@pytest.mark.parametrize("kind", [SeedsByIndex, LeavesItSeeded, SeedsItsOwn])
def test_a_chain_whose_seed_is_the_sample_is_cached_whole_if_it_is_declared(kind: type[Around]) -> None:
    with hotset.cache(hotset.deterministic(kind()), memory="1MiB") as cached:
        for _ in range(3):
            equal_batches([cached[i] for i in range(N)], [kind()[i] for i in range(N)])
        assert cached.stats().hits == 2 * N


class Draws(Around):
    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return self.transform(torch.full((2,), index))


class SeedsAnother(Around):
    def __getitem__(self, index: int) -> Any:
        random.seed(index)
        return self.transform(torch.full((2,), index))


@pytest.mark.parametrize("kind", [Draws, SeedsAnother])
def test_a_random_chain_that_a_declared_dataset_does_not_seed_stays_live(kind: type[Around]) -> None:
    with hotset.cache(hotset.deterministic(kind()), memory="1MiB") as cached:
        assert "Crop" in cached.plan.live
        assert not torch.equal(cached[0], cached[0])


def test_the_parts_of_a_concat_dataset_with_other_chains_are_to_be_cached_alone() -> None:
    parts = [Both(Crop()), Both(Crop(), blur_label)]
    with pytest.raises(hotset.NotCacheable, match=r"Cache its parts"):
        hotset.cache(ConcatDataset(parts), memory="1MiB")
    cached = [hotset.cache(part, memory="1MiB") for part in parts]
    equal_batches(epochs(ConcatDataset(cached)), epochs(ConcatDataset(parts)))


def test_the_parts_of_a_stack_dataset_are_to_be_cached_alone() -> None:
    with pytest.raises(hotset.NotCacheable, match=r"Cache its parts: StackDataset\("):
        hotset.cache(StackDataset(Both(Crop()), Both(Crop())), memory="1MiB")
    cached = StackDataset(*(hotset.cache(Both(Crop()), memory="1MiB") for _ in range(2)))
    equal_batches(epochs(cached), epochs(StackDataset(Both(Crop()), Both(Crop()))))


class Mixes(Dataset[Any]):
    def __init__(self, pictures: Any) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.pictures[index], self.pictures[random.randrange(N)]


def test_of_a_dataset_that_composes_samples_of_another_that_one_is_to_be_cached() -> None:
    dataset: Any = Mixes(Both(Crop()))
    dataset.self = dataset  # as of self.__dict__.update(locals()); no advice is to name it
    vars(dataset).update(reversed(vars(dataset).items()))
    with pytest.raises(
        hotset.NotCacheable,
        match=r"cache that dataset alone: dataset\.pictures = hotset\.cache\(dataset\.pictures,",
    ):
        hotset.cache(dataset, memory="1MiB")
    dataset.pictures = hotset.cache(dataset.pictures, memory="1MiB")
    equal_batches(epochs(dataset), epochs(Mixes(Both(Crop()))))
    dataset.pictures.close()


class PairsArrays(Dataset[Any]):
    """Keeps the dataset that it has its arrays from, as torch's example of siamese networks does."""

    def __init__(self, pictures: Any) -> None:
        self.pictures = pictures
        self.arrays = [pictures[index] for index in range(N)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.arrays[index], self.arrays[random.randrange(N)]


def test_a_dataset_that_reading_does_not_use_is_not_named_as_what_is_to_be_cached() -> None:
    with pytest.raises(hotset.NotCacheable) as refused:
        hotset.cache(PairsArrays(Both(Crop())), memory="1MiB")
    assert "all epochs. Move the random part to transform=[...]" in str(refused.value)
    assert "'pictures'" not in str(refused.value)


class StacksViews(Around):
    def __getitem__(self, index: int) -> Any:
        return torch.stack([self.transform(torch.full((2,), index)) for _ in range(2)])


class CropsSome(Around):
    def __getitem__(self, index: int) -> Any:
        picture = torch.full((2,), index)
        return self.transform(picture) if index % 2 else picture


class AppliesEachToThePicture(Around):
    """Has a list of transforms, each of which makes a view of its own, as Dassl's datasets may."""

    def __init__(self) -> None:
        super().__init__()
        self.transform: Any = [Crop(), torch.neg]

    def __getitem__(self, index: int) -> Any:
        return [transform(torch.full((2,), index)) for transform in self.transform]


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        (StacksViews, "processes the results of its transform further"),
        (CropsSome, "calls its transform more often for some samples than for others"),
        (AppliesEachToThePicture, "gives other samples .* does not apply its list in turn, "),
    ],
)
def test_it_is_said_what_the_dataset_does_with_a_chain_that_stays_whole(
    kind: type[Around], does: str
) -> None:
    dataset = kind()
    dataset.target_transform = None
    with pytest.raises(
        hotset.NotCacheable, match=f"{kind.__name__} {does}.*with what the dataset does.*hotset run"
    ):
        hotset.cache(dataset, memory="1MiB")


class GivesItself(Around):
    """Its transform looks at the dataset, as those of RT-DETR do, for the epoch or for other samples."""

    def __init__(self, transform: Any, together: bool) -> None:
        self.transform, self.together, self.step = transform, together, 2
        self.held = NotToBeCopied()

    def __getitem__(self, index: int) -> Any:
        picture = torch.full((2,), index)
        return self.transform((picture, self)) if self.together else self.transform(picture, self)


class NotToBeCopied:
    copies = 0

    def __deepcopy__(self, memo: Any) -> Any:
        NotToBeCopied.copies += 1
        return self


def by_step(picture: torch.Tensor, dataset: GivesItself) -> torch.Tensor:
    return picture * dataset.step


def by_step_of_both(values: tuple[torch.Tensor, GivesItself]) -> torch.Tensor:
    return by_step(*values)


def shifted_by_step(picture: torch.Tensor, dataset: GivesItself) -> torch.Tensor:
    return by_step(picture, dataset) + random.random()


@pytest.mark.parametrize(("transform", "together"), [(by_step, False), (by_step_of_both, True)])
def test_a_dataset_that_a_transform_gets_is_not_copied_with_its_arguments(
    transform: Any, together: bool
) -> None:
    NotToBeCopied.copies = 0
    dataset = GivesItself(transform, together)
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert "GivesItself gives its transform the dataset itself" in str(cached.plan)
        equal_batches(epochs(cached), epochs(GivesItself(transform, together)))
        assert NotToBeCopied.copies == 0
        with pytest.warns(hotset.HotsetWarning, match=r"step was set"):
            cached.step = 3
        assert cached[1].tolist() == [3, 3]


def test_a_dataset_that_gives_a_random_transform_itself_is_refused() -> None:
    with pytest.raises(hotset.NotCacheable, match="returns another sample each time"):
        hotset.cache(GivesItself(shifted_by_step, False), memory="1MiB")


class LeavesSomeOut(Around):
    """Does not call its chain for a few samples."""

    def __len__(self) -> int:
        return 20 * N

    def __getitem__(self, index: int) -> Any:
        whole = torch.full((2,), index)
        return whole if index % N == 5 else self.transform(whole)


class HaveOneMore(LeavesSomeOut):
    """Calls its chain for each of two parts, and of a few samples, for each of three."""

    def __getitem__(self, index: int) -> Any:
        return [self.transform(torch.full((2,), index)) for _ in range(3 if index % N == 5 else 2)]


class LeavesSomeOutOfMany(LeavesSomeOut):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class DrawForSomeOfMany(LeavesSomeOutOfMany):
    """Changes a few samples at random in place of calling its chain."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample + torch.randint(9, ()) if index % N == 5 else sample


class ShiftOfItsOwn:
    """Draws from a generator that it holds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture + int(self.rng.integers(1000))


class HaveOneMoreOfTheirOwn(HaveOneMore):
    def __init__(self) -> None:
        super().__init__()
        self.transform = ShiftOfItsOwn()


class Processes(LeavesSomeOut):
    """Works on what its chain has returned for a few samples; ``_of`` and ``_changed`` say with what."""

    def __init__(self) -> None:
        self.transform = ShiftOfItsOwn()

    def __getitem__(self, index: int) -> Any:
        found = self.transform(self._of(index))
        return self._changed(found) if index % N == 5 else found

    def _of(self, index: int) -> Any:
        return torch.full((2,), index)

    def _changed(self, found: Any) -> Any:
        return found * 3


class Grows:
    """Adds how often it was called."""

    calls = 0

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return picture + self.calls


class ProcessesWhatGrows(Processes):
    def __init__(self) -> None:
        self.transform = Grows()


class AddNoise(Processes):
    def _changed(self, found: Any) -> Any:
        return found + torch.randint(9, ())


class ProcessesInPlace(Processes):
    def _changed(self, found: Any) -> Any:
        found *= 3
        return found


class ProcessesArraysInPlace(ProcessesInPlace):
    def _of(self, index: int) -> Any:
        return np.full(2, index)


class ProcessesManyInPlace(ProcessesInPlace):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class ShiftPicture(ShiftOfItsOwn):
    def __call__(self, picture: Any) -> Any:
        return picture.rotate(90 * int(self.rng.integers(4)))


class DrawsOnPictures(Processes):
    def __init__(self) -> None:
        self.transform = ShiftPicture()

    def _of(self, index: int) -> Any:
        picture = Image.new("L", (4, 4), index % N)
        picture.putpixel((1, 2), 200)
        return picture

    def _changed(self, found: Any) -> Any:
        ImageDraw.Draw(found).point((3, 3), 255)
        return found


class Whitens:
    """Turns a list into a tensor."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values) + int(self.rng.integers(1000))


class NeedsATensor(Processes):
    """Calls a method of what its chain makes, which the chain is given as something else."""

    def __init__(self) -> None:
        self.transform = Whitens()

    def _of(self, index: int) -> Any:
        return [float(index)] * 2

    def _changed(self, found: Any) -> Any:
        return found.cos()


class NeedsATensorOfMany(NeedsATensor):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Exchanges(LeavesSomeOut):
    """Makes two views, and exchanges them in a few samples."""

    def __init__(self) -> None:
        self.transform = ShiftOfItsOwn()

    def __getitem__(self, index: int) -> Any:
        views = [self.transform(torch.full((2,), index)) for _ in range(2)]
        return views[::-1] if index % N == 5 else views


class OfArrays(Processes):
    """Gives a result beside its original, and in a few samples in another place."""

    def _of(self, index: int) -> Any:
        return np.full((2, 2), index)

    def __getitem__(self, index: int) -> Any:
        original = self._of(index)
        made = self.transform(original)
        return (original, made) if index % N != 5 else (made, original)


class OfTensors(OfArrays):
    def _of(self, index: int) -> Any:
        return torch.full((2, 2), index)


class OfPictures(OfArrays):
    def __init__(self) -> None:
        self.transform = ShiftPicture()

    def _of(self, index: int) -> Any:
        picture = Image.new("L", (4, 4), index % N)
        picture.putpixel((1, 2), 200)
        return picture


class OfDicts(OfArrays):
    def __init__(self) -> None:
        self.transform = ShiftOfDicts()

    def _of(self, index: int) -> Any:
        return {"picture": torch.full((2,), index)}


class ShiftOfDicts(ShiftOfItsOwn):
    def __call__(self, sample: Any) -> Any:
        return {"picture": super().__call__(sample["picture"])}


class GivesTwice(Processes):
    """Returns a result twice, or the original beside it."""

    def __getitem__(self, index: int) -> Any:
        original = self._of(index)
        made = self.transform(original)
        return (original, made) if index % N != 5 else (made, made)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        (HaveOneMoreOfTheirOwn, 2),
        *(
            pytest.param(
                kind, 2, marks=pytest.mark.chaos
            )  # in workers what they do is done as by the one above
            for kind in (LeavesSomeOut, AddNoise, HaveOneMore, LeavesSomeOutOfMany, ProcessesWhatGrows)
        ),
        *(
            (kind, 0)
            for kind in (
                LeavesSomeOut,
                HaveOneMore,
                HaveOneMoreOfTheirOwn,
                LeavesSomeOutOfMany,
                AddNoise,
                ProcessesWhatGrows,
                DrawForSomeOfMany,
                Processes,
                ProcessesInPlace,
                ProcessesArraysInPlace,
                ProcessesManyInPlace,
                DrawsOnPictures,
                NeedsATensor,
                NeedsATensorOfMany,
                Exchanges,
                OfArrays,
                OfTensors,
                OfPictures,
                OfDicts,
                GivesTwice,
            )
        ),
    ],
)
def test_rare_samples_for_which_a_dataset_treats_its_chain_otherwise_are_right(
    kind: type[LeavesSomeOut], workers: int
) -> None:
    def read(dataset: Any, loader: Any) -> list[Any]:
        torch.manual_seed(5)
        batches = loader(dataset, batch_size=8, num_workers=workers, shuffle=True, collate_fn=list)
        return [list(batches) for _ in range(3)]

    with recorded() as told, hotset.cache(kind(), memory="1MiB") as cached:
        assert cached.plan.live
        assert differs(read(cached, hotset.DataLoader), read(kind(), DataLoader)) is None
        assert cached.stats().cached == 19 * N + N - 20
    sentences = [str(each.message) for each in told]
    if not workers:  # each of which has met too few of them to speak of it
        assert any("treated otherwise than the rest" in each for each in sentences)
    assert all(map(is_a_sentence, sentences))


@hotset.deterministic
def as_it_is(picture: Any) -> Any:
    return picture


class HoldsPictures(DrawsOnPictures):
    """Keeps its pictures, and gives two views of each; in a few samples it raises, or writes into its own."""

    def __init__(self, *, raises: bool) -> None:
        self.transform: Any = [as_it_is, ShiftPicture()]
        self.pictures = [self._of(index) for index in range(N)]
        self._raises = raises

    def __len__(self) -> int:
        return N

    def _view(self, picture: Any) -> Any:
        for step in self.transform:
            picture = step(picture)
        return picture

    def __getitem__(self, index: int) -> Any:
        picture = self.pictures[index]
        views = self._view(picture), self._view(picture)
        if index == 5 and self._raises:
            raise ValueError("no such picture")
        if index == 5:
            picture.load()[3, 3] = 255
        return views


@pytest.mark.parametrize("raises", [False, True])
def test_two_views_of_a_picture_that_the_dataset_keeps_are_right_and_it_is_not_marked(raises: bool) -> None:
    def read(dataset: Any) -> list[Any]:
        fails = [failure(lambda: dataset[5]).text] if raises else []
        return [*(dataset[index] for index in range(N) if index != 5 or not raises), *fails]

    dataset, plain = HoldsPictures(raises=raises), HoldsPictures(raises=raises)
    with recorded(), hotset.cache(dataset, memory="1MiB") as cached:
        for _ in range(2):
            assert differs(read(cached), read(plain)) is None
        assert cached.stats().cached == N - 1
    assert not any(picture.readonly for picture in dataset.pictures)


class ManyOfItsPictures(HoldsPictures):
    def __getitem__(self, index: int) -> Any:
        return self._view(self.pictures[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_a_live_transform_that_works_in_place_changes_no_picture_that_the_dataset_keeps() -> None:
    class Paint(ShiftPicture):
        def __call__(self, picture: Any) -> Any:
            picture.putpixel((0, 0), int(self.rng.integers(256)))
            return picture

    dataset = ManyOfItsPictures(raises=False)
    dataset.transform = [as_it_is, Paint()]
    before = [picture.tobytes() for picture in dataset.pictures]
    with hotset.cache(dataset, memory="1MiB") as cached:
        batches = list(hotset.DataLoader(cached, batch_size=3, collate_fn=list))
        assert len(batches) == N // 3
    assert [picture.tobytes() for picture in dataset.pictures] == before


class DrawsOnItsInput(DrawsOnPictures):
    """Draws, in a few samples, on what its chain was given."""

    def __getitem__(self, index: int) -> Any:
        picture = self._of(index)
        view = self.transform(picture)
        if index % N == 5:
            picture.putpixel((3, 3), 255)
        return view, picture


class GivesItsOwn(Processes):
    """Gives the tensors that it keeps."""

    def __init__(self) -> None:
        self.transform: Any = [as_it_is, ShiftOfItsOwn()]
        self.tensors = [torch.full((2,), index) for index in range(20 * N)]

    def __getitem__(self, index: int) -> Any:
        found = self.tensors[index]
        for step in self.transform:
            found = step(found)
        return found


def test_tensors_that_a_cut_chain_returned_can_be_resized() -> None:
    dataset = GivesItsOwn()
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert differs([cached[3], cached[3]], [dataset.tensors[3]] * 2, across=True)
        assert dataset.tensors[3].resize_(4).shape == (4,)


def test_a_picture_that_the_dataset_draws_on_is_not_the_one_that_it_gave_its_chain() -> None:
    with recorded(), hotset.cache(DrawsOnItsInput(), memory="1MiB") as cached:
        equal_batches(epochs(cached), epochs(DrawsOnItsInput()))
        assert cached.stats().cached == 20 * N


class Halves:
    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        if picture.numel() > 1:
            raise ValueError("too large")
        return picture / 2


class TakesTheHalf(Around):
    """Its chain raises on all samples, and it goes on; nothing is random."""

    def __init__(self) -> None:
        self.transform = Halves()

    def __getitem__(self, index: int) -> Any:
        try:
            return self.transform(torch.full((2,), index))
        except ValueError:
            return self.transform(torch.full((1,), index))


def test_a_chain_whose_errors_the_dataset_catches_is_cached_whole() -> None:
    with hotset.cache(TakesTheHalf(), memory="1MiB") as cached:
        equal_batches(epochs(cached), epochs(TakesTheHalf()))
        assert cached.stats().hits
        assert any("catches what its transform raises" in note for note in cached.plan.notes)


def test_a_dataset_is_declared_by_the_object_and_not_by_its_class() -> None:
    for rows in (Subset(Draws(), range(N)), Draws()):
        with pytest.raises(hotset.NotCacheable, match=r"declare it: hotset\.deterministic\(dataset\)"):
            hotset.cache(rows, memory="1MiB")


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> float:
        return index + random.random()


def test_samples_with_sparse_tensors_are_cut_like_others() -> None:
    def make(i: int) -> dict[str, Any]:
        return {"x": (i * torch.eye(3)).to_sparse(), "y": torch.eye(2).to_sparse_csc()}

    def dense(sample: dict[str, Any]) -> torch.Tensor:
        return sample["x"].to_dense()

    def shake(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3)

    with hotset.cache(Samples(make, 8), transform=[dense, shake], memory="1MiB") as cached:
        for _ in range(2):
            for i in range(8):
                seed_everything(i)
                found = cached[i]
                seed_everything(i)
                assert torch.equal(found, i * torch.eye(3) + torch.rand(3))
        assert cached.stats().cached == 8
