"""A dataset's own transforms are found in attributes of any name, and run live as often as it calls them."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rarely
from observed import compare, record
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

import hotset
from hotset.dataset.dataset_proxy import current_of

N = 14
v2: Any = None
vision: Any = None


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> None:
    """Imported as tests begin, not as files are collected: a process with it takes twice as long to fork."""
    global v2, vision
    v2 = importlib.import_module("torchvision.transforms.v2")
    vision = importlib.import_module("torchvision.datasets")


def crop() -> Any:
    return v2.Compose([v2.Resize(20), v2.RandomCrop(12), v2.RandomHorizontalFlip()])


def scaled_crop() -> Any:
    """It takes no integers."""
    return v2.Compose([v2.Normalize([128.0] * 3, [64.0] * 3), v2.Resize(20), v2.RandomCrop(12)])


def frame(index: int, camera: int) -> torch.Tensor:
    return torch.randint(
        0, 255, (3, 24, 28), generator=torch.Generator().manual_seed(100 * camera + index)
    ).byte()


class Episodes(Dataset[Any]):
    """As LeRobot's: ``image_transforms`` of each camera's picture, and other parts."""

    def __init__(self, image_transforms: Any, cameras: int = 2) -> None:
        self.image_transforms = image_transforms
        self.delta_timestamps = None
        self.cameras = [f"camera{number}" for number in range(cameras)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        index = range(N)[index]
        item = {name: frame(index, number) for number, name in enumerate(self.cameras)}
        item["action"] = torch.arange(3) + index
        if self.image_transforms is not None:
            for name in self.cameras:
                item[name] = self.image_transforms(item[name])
        return {**item, "task": f"task {index % 2}"}


class Named(Dataset[Any]):
    """A chain under a name of the user's, and another one that is used for training only."""

    def __init__(self, tf: Any, training_tf: Any = None) -> None:
        self.tf, self.training_tf, self.train = tf, training_tf, False

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        picture = self.tf(frame(range(N)[index], 0))
        return self.training_tf(picture) if self.train else picture, index


class InTurn(Named):
    """Calls a chain with what another one has returned."""

    def __getitem__(self, index: int) -> Any:
        return self.tf(self.training_tf(frame(range(N)[index], 0)))


class Opens(InTurn):
    """The first one gets a name, and returns what is there by this name."""

    def __getitem__(self, index: int) -> Any:
        return self.tf(self.training_tf(str(range(N)[index] + 100)))


def opened(name: str) -> torch.Tensor:
    return frame(int(name) - 100, 1).float()


class Views(Dataset[Any]):
    """Two views of each picture, as for contrastive learning."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        picture = frame(range(N)[index], 0)
        return [self.transform(picture), self.transform(picture)], index


LIVE: dict[str, Callable[[], Dataset[Any]]] = {
    "LeRobot, two cameras": lambda: Episodes(crop()),
    "LeRobot, one camera": lambda: Episodes(crop(), cameras=1),
    "another name": lambda: Named(crop()),
    "a subset": lambda: Subset(Named(crop()), [5, 3, 8, 1, 0]),
    "one of two": lambda: Named(v2.Compose([v2.Resize(20), v2.RandomCrop(12)]), crop()),
    "two views": lambda: Views(crop()),
    "in turn": lambda: InTurn(scaled_crop(), v2.ToDtype(torch.float32)),
    "a name": lambda: Opens(scaled_crop(), v2.Lambda(opened)),
}


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(
        itertools.product(LIVE, [0, 2]),
        *[
            (kind, 2)
            for kind in (
                *("LeRobot, one camera", "another name", "a subset", "one of two", "two views"),
                *("in turn", "a name"),
            )
        ],
    ),
)
def test_the_random_part_runs_live_and_draws_as_without_a_cache(kind: str, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    expected = record(lambda: DataLoader(LIVE[kind](), **options))
    with hotset.cache(LIVE[kind](), memory="64MiB") as cached:
        compare(record(lambda: hotset.DataLoader(cached, **options)), expected)
        assert "RandomCrop" in cached.plan.live
        assert "Resize" in cached.plan.cached
        assert cached.stats().cached == len(cached)


def test_a_chain_that_is_not_called_is_not_in_the_plan_and_counts_in_the_fingerprint() -> None:
    plans = []
    for size in (8, 9):
        with hotset.cache(Named(v2.Resize(20), v2.RandomCrop(size)), memory="64MiB") as cached:
            plans.append(cached.plan)
            assert cached.plan.cached == ("Named", "Resize")
            assert not cached.plan.live
    assert plans[0].fingerprint != plans[1].fingerprint


def test_a_chain_whose_attributes_the_dataset_reads_is_left_where_it_is() -> None:
    class Reads(Named):
        def __getitem__(self, index: int) -> Any:
            return self.tf(frame(range(N)[index], 0)), len(self.tf.transforms)

    fixed = v2.Compose([v2.Resize(20), v2.CenterCrop(12)])
    with hotset.cache(Reads(fixed), memory="64MiB") as cached:
        assert torch.equal(cached[3][0], Reads(fixed)[3][0])
        assert cached.stats().cached == 1
    with pytest.raises(hotset.NotCacheable):
        hotset.cache(Reads(crop()), memory="64MiB")


@pytest.mark.parametrize("on", ["cached", "dataset"])
def test_a_chain_that_is_set_later_is_used(on: str) -> None:
    source = Episodes(None)
    with hotset.cache(source, memory="64MiB") as cached:
        assert cached[0]["camera0"].shape == (3, 24, 28)
        for size in (10, 6):
            (cached if on == "cached" else source).image_transforms = v2.Resize((size, size))
            assert cached[0]["camera1"].shape == (3, size, size)
            batch = next(iter(hotset.DataLoader(cached, batch_size=4)))
            assert batch["camera0"].shape == (4, 3, size, size)


def test_networks_and_functions_under_other_names_are_no_chains() -> None:
    class Encodes(Dataset[Any]):
        def __init__(self) -> None:
            self.encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(672, 4)).eval()
            self.loader = frame

        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            with torch.no_grad():
                return self.encoder(self.loader(range(N)[index], 0).float())

    with hotset.cache(Encodes(), memory="64MiB") as cached:
        assert cached.plan.cached == ("Encodes",)


def test_torchvisions_wrapped_datasets_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for index in range(N):
        Image.fromarray(frame(index, 0).permute(1, 2, 0).numpy()).save(tmp_path / "a" / f"{index}.png")
    flips = v2.Compose([v2.ToImage(), v2.Resize((20, 20)), v2.RandomHorizontalFlip()])

    def made() -> Any:
        return vision.wrap_dataset_for_transforms_v2(vision.ImageFolder(str(tmp_path), transform=flips))

    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    expected = record(lambda: DataLoader(made(), **options))
    with hotset.cache(made(), memory="64MiB") as cached:
        compare(record(lambda: hotset.DataLoader(cached, **options)), expected)
        assert cached.plan.live == ("RandomHorizontalFlip",)


def test_a_random_function_that_is_given_by_a_known_name_still_runs_live() -> None:
    def jitter(picture: torch.Tensor) -> torch.Tensor:
        return picture.float() * random.random()

    expected = record(lambda: DataLoader(Views(jitter), batch_size=4))
    with hotset.cache(Views(jitter), memory="64MiB") as cached:
        compare(record(lambda: hotset.DataLoader(cached, batch_size=4)), expected)
        assert cached.plan.live == ("jitter",)


def test_what_a_dataset_counts_or_makes_for_itself_leaves_the_plan_alone() -> None:
    class Counts(Named):
        def __init__(self) -> None:
            super().__init__(None)
            self.transforms_made, self._transform, self.augmented = 0, None, 0

        def __getitem__(self, index: int) -> Any:
            if self._transform is None:
                self._transform = v2.Resize(20)
            self.augmented += 1
            self.last_transform = object()
            return self._transform(frame(range(N)[index], 0)), index

    with hotset.cache(Counts(), memory="64MiB") as cached:
        before = current_of(cached)
        for _ in range(2):
            list(hotset.DataLoader(cached, batch_size=4))
        assert current_of(cached) is before
        assert cached.stats().cached == N


def test_a_broken_transform_that_is_not_used_does_no_harm() -> None:
    with hotset.cache(Named(v2.Resize(20), object.__new__(v2.RandomCrop)), memory="64MiB") as cached:
        assert cached[2][0].shape[1] == 20
    with hotset.cache(Named(v2.Resize(20), object.__new__(v2.Compose)), memory="64MiB") as cached:
        assert cached[2][0].shape[1] == 20
