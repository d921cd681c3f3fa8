"""Clara Train configurations: what they load, what of it is cached, and the error for each wrong value.

Every voxel of the volumes has a value that no other voxel has in any of them, and labels are copies of the
images. So a crop shows its sample and its place there, and whether the label was cropped in the same way.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from helpers import equal_batches, eventually, failure, is_a_sentence, rarely
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tables import need
from torch.utils.data import DataLoader

import hotset

need("monai.data")

from hotset.integrations.clara import from_config  # noqa: E402

SHAPES = [(20, 18, 16), (16, 16, 16), (24, 16, 20), (18, 22, 17), (16, 20, 24), (12, 18, 10)]
COUNT = len(SHAPES)
CROP = (16, 14, 12)
LARGEST = max(math.prod(shape) for shape in SHAPES)
# The two configurations of Smart Cache's description, but for sizes and counts.
PLAIN = """{"train": {"image_pipeline": {
  "name": "SegmentationImagePipeline",
  "args": {
    "data_list_file_path": "{DATASET_JSON}",
    "data_file_base_dir": "{DATA_ROOT}",
    "data_list_key": "training",
    "output_crop_size": [16, 14, 12],
    "output_batch_size": 3,
    "num_workers": 4,
    "prefetch_size": 10
  }
}}}"""
CACHED = """{"train": {"image_pipeline": {
  "name": "SegmentationImagePipelineWithCache",
  "args": {
    "data_list_file_path": "{DATASET_JSON}",
    "data_file_base_dir": "{DATA_ROOT}",
    "data_list_key": "training",
    "output_crop_size": [16, 14, 12],
    "output_batch_size": 3,
    "num_workers": 2,
    "prefetch_size": 0,
    "num_cache_objects": 4,
    "replace_percent": 0.3
  }
}}}"""


def voxels(number: int) -> Any:
    """A volume whose voxels continue the numbers of the volume before; 0 is only padding."""
    shape = SHAPES[number]
    return (1 + number * LARGEST + np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clara")
    listed = []
    for number in range(COUNT):
        volume = nibabel.Nifti1Image(voxels(number), np.eye(4))
        for kind in ("image", "label"):
            nibabel.save(volume, folder / f"{kind}{number}.nii.gz")
        listed.append({"image": f"image{number}.nii.gz", "label": f"label{number}.nii.gz"})
    images = [{"image": each["image"]} for each in listed]
    lists = {
        "training": listed,
        "validation": listed[::-1],
        "test": [each["image"] for each in listed],
        "classes": [{**each, "label": number % 3} for number, each in enumerate(images)],
        "several": [{**each, "label": [number, 0.5]} for number, each in enumerate(images)],
        "channels": [{"image": [each["image"]] * 2, "label": each["label"]} for each in listed],
    }
    (folder / "dataset.json").write_text(json.dumps(lists))
    return folder


def config(name: str, section: str = "train", pre: Any = None, **args: Any) -> dict[str, Any]:
    """A configuration with these arguments in place of the usual ones; None leaves one out."""
    usual: dict[str, Any] = {
        "data_list_file_path": "{ROOT}/dataset.json",
        "data_file_base_dir": "{ROOT}",
        "data_list_key": "training" if section == "train" else "validation",
        "output_crop_size": list(CROP),
        "output_batch_size": 4,
        "num_workers": 0,
        "prefetch_size": 0,
    }
    if name.endswith("WithCache"):
        usual |= {"num_cache_objects": COUNT, "replace_percent": 0}
    given = {key: value for key, value in {**usual, **args}.items() if value is not None}
    pipeline = {"image_pipeline": {"name": name, "args": given}}
    return {section: pipeline if pre is None else {"pre_transforms": pre, **pipeline}}


def load(root: Path, name: str, section: str = "train", **args: Any) -> hotset.DataLoader[Any]:
    transforms = args.pop("transforms", None)
    return from_config(
        config(name, section, **args), section=section, environment={"ROOT": root}, transforms=transforms
    )


def origin(crop: Any) -> tuple[int, tuple[int, ...]]:
    """Which volume a crop of shape ``[1, x, y, z]`` is from, and where it begins; fails unless it is one."""
    cells = crop.numpy()[0]
    inside = np.argwhere(cells)
    low, high = inside.min(0), inside.max(0) + 1
    filled = cells[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
    number, place = divmod(int(filled.flat[0]) - 1, LARGEST)
    begin = np.unravel_index(place, SHAPES[number])
    ends = [int(a) + n for a, n in zip(begin, filled.shape, strict=True)]
    expected = voxels(number)[tuple(slice(a, b) for a, b in zip(begin, ends, strict=True))]
    assert np.array_equal(filled, expected), "no part of a volume"
    whole = [min(have, want) for have, want in zip(SHAPES[number], cells.shape, strict=True)]
    assert list(filled.shape) == whole, "padded where the volume goes on"
    return number, tuple(int(each) for each in begin)


def epoch(loader: Any) -> list[tuple[int, tuple[int, ...]]]:
    """The origins of an epoch's crops, in order; fails unless each batch is what it must be."""
    found = []
    for batch in loader:
        assert list(batch) == ["image", "label"]
        for value in batch.values():
            assert type(value) is torch.Tensor
            assert value.dtype == torch.float32
            assert value.shape[1:] == (1, *CROP)
        assert torch.equal(batch["image"], batch["label"])
        found += [origin(crop) for crop in batch["image"]]
    return found


def numbers(origins: list[tuple[int, tuple[int, ...]]]) -> list[int]:
    return [number for number, _ in origins]


# Segmentation


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_the_reference_without_a_cache(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train_config.json"
    file.write_text(PLAIN)
    monkeypatch.setenv("DATASET_JSON", str(root / "dataset.json"))
    monkeypatch.setenv("DATA_ROOT", str(root))
    loader = from_config(file)
    assert type(loader) is hotset.DataLoader
    assert (loader.num_workers, loader.prefetch_factor, loader.batch_size) == (4, 3, 3)
    epochs = [epoch(loader) for _ in range(2)]
    assert [sorted(numbers(origins)) for origins in epochs] == [list(range(COUNT))] * 2
    assert numbers(epochs[0]) != numbers(epochs[1])
    assert sorted(epochs[0]) != sorted(epochs[1]), "the same crops of the same volumes"


@pytest.fixture
def may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let helpers be late without a warning, as warnings are errors here."""
    monkeypatch.setattr("hotset.dataset.active_window._STARTING_SECONDS", math.inf)


@pytest.mark.usefixtures("may_be_late")
def test_the_reference_with_a_cache(root: Path) -> None:
    environment = {"DATASET_JSON": root / "dataset.json", "DATA_ROOT": str(root)}
    loader = from_config(json.loads(CACHED), environment=environment)
    cached: Any = loader.dataset
    with cached:
        assert (len(cached), len(loader)) == (4, 2)
        assert "LoadImaged" in cached.plan.cached, str(cached.plan)
        assert "RandSpatialCropd" in cached.plan.live, str(cached.plan)
        epochs: list[set[int]] = []

        def all_seen() -> bool:
            used = numbers(epoch(loader))
            assert len(set(used)) == len(used) == 4, "an epoch uses each resident sample once"
            epochs.append(set(used))
            return set.union(*epochs) == set(range(COUNT))

        assert eventually(all_seen, within=200.0), "the window stands still"
        for before, after in itertools.pairwise(epochs):
            assert len(before - after) <= math.ceil(4 * 0.3)
        assert cached.check() == []


def test_more_objects_than_there_are_samples_keep_all(root: Path) -> None:
    loader = load(root, "SegmentationImagePipelineWithCache", num_cache_objects=50, replace_percent=0.1)
    cached: Any = loader.dataset
    with cached:
        for _ in range(2):
            assert sorted(numbers(epoch(loader))) == list(range(COUNT))


@pytest.mark.parametrize("workers", rarely([0, 2], 0))
def test_validation_goes_through_all_in_order_and_is_cached_whole(root: Path, workers: int) -> None:
    loader = load(root, "SegmentationImagePipelineWithCache", "validate", num_workers=workers)
    plain = load(root, "SegmentationImagePipeline", "validate")
    cached: Any = loader.dataset
    with cached:
        epochs = [epoch(loader) for _ in range(3)]
        assert loader.last_epoch is not None
        assert loader.last_epoch.hit_rate == 1.0
        assert cached.stats().cached == COUNT
        assert cached.check() == []
    assert epochs == [epoch(plain)] * 3
    assert numbers(epochs[0]) == list(range(COUNT))[::-1]
    for number, begin in epochs[0]:
        spare = [max(0, have - want) for have, want in zip(SHAPES[number], CROP, strict=True)]
        assert all(abs(2 * at - free) <= 1 for at, free in zip(begin, spare, strict=True)), "off the centre"


def test_a_list_without_labels_can_be_validated_on(root: Path) -> None:
    (batch,) = load(root, "SegmentationImagePipeline", "validate", data_list_key="test", output_batch_size=8)
    assert list(batch) == ["image"]
    assert [origin(crop)[0] for crop in batch["image"]] == list(range(COUNT))


def test_several_files_are_the_channels_of_one_image(root: Path) -> None:
    batch = next(iter(load(root, "SegmentationImagePipeline", data_list_key="channels")))
    assert batch["image"].shape == (4, 2, *CROP)
    assert torch.equal(batch["image"][:, :1], batch["label"])
    assert torch.equal(batch["image"][:, 1:], batch["label"])


# Classification


PIPELINES = ("ClassificationImagePipeline", "ClassificationImagePipelineWithCache")


@pytest.mark.parametrize(
    ("name", "key"),
    rarely(itertools.product(PIPELINES, ["classes", "several"]), (PIPELINES[1], "several")),
)
def test_classification_labels_are_numbers(root: Path, name: str, key: str) -> None:
    loader = load(root, name, "validate", data_list_key=key)
    for _ in range(2):
        batches = list(loader)
        labels = torch.cat([batch["label"] for batch in batches])
        expected: Any = torch.arange(COUNT) % 3
        if key == "several":
            expected = torch.tensor([[float(number), 0.5] for number in range(COUNT)])
        equal_batches(labels, expected)
        assert type(batches[0]["image"]) is torch.Tensor
        assert batches[0]["image"].shape == (4, 1, *CROP)
        assert [origin(crop)[0] for batch in batches for crop in batch["image"]] == list(range(COUNT))


def test_classification_crops_images_at_random(root: Path) -> None:
    loader = load(root, "ClassificationImagePipeline", data_list_key="classes")
    epochs = [[origin(crop) for batch in loader for crop in batch["image"]] for _ in range(2)]
    assert sorted(epochs[0]) != sorted(epochs[1])
    assert sorted(numbers(epochs[0])) == list(range(COUNT))


@pytest.mark.usefixtures("may_be_late")
def test_classification_trains_on_the_residents(root: Path) -> None:
    args = {"data_list_key": "classes", "num_cache_objects": 4, "replace_percent": 0.25}
    loader = load(root, "ClassificationImagePipelineWithCache", **args)
    cached: Any = loader.dataset
    with cached:
        for _ in range(2):
            batches = list(loader)
            used = [origin(crop)[0] for batch in batches for crop in batch["image"]]
            assert len(set(used)) == len(used) == 4
            assert torch.cat([batch["label"] for batch in batches]).tolist() == [each % 3 for each in used]


# Draws


def test_workers_draw_differently_and_anew_in_each_epoch(root: Path) -> None:
    """Forked copies of one generator would draw the same crops in each worker and each epoch."""
    one = json.dumps({"training": [{"image": "image2.nii.gz", "label": "label2.nii.gz"}] * 4})
    (root / "one.json").write_text(one)
    args = {"data_list_file_path": str(root / "one.json"), "output_batch_size": 1, "num_workers": 2}
    loader = load(root, "SegmentationImagePipeline", output_crop_size=[4, 4, 4], **args)
    firsts = [[origin(batch["image"][0]) for batch in loader] for _ in range(2)]
    assert len(set(itertools.chain(*firsts))) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_the_seed_is_torchs(root: Path, workers: int) -> None:
    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        return epoch(load(root, "SegmentationImagePipeline", num_workers=workers))

    assert run(1) == run(1)
    assert sorted(run(1)) != sorted(run(2))


FLIP = {"name": "RandFlipd", "args": {"keys": ["image", "label"], "prob": 0.5, "spatial_axis": 0}}
SCALE = {"name": "ScaleIntensityRanged"}
SCALE["args"] = {"keys": "image", "a_min": 0, "a_max": 9, "b_min": 0, "b_max": 1}  # type: ignore[assignment]


@pytest.mark.parametrize(("workers", "context"), rarely([(0, None), (2, "fork")], (0, None)))
def test_a_cached_chain_gives_the_same_samples(root: Path, workers: int, context: str | None) -> None:
    """The seeding of workers finds the live part behind a cache, in spawned workers too."""
    epochs = 1 if context == "spawn" else 2  # a spawned worker imports MONAI

    def run(cached: bool) -> list[Any]:
        torch.manual_seed(3)
        made = load(root, "SegmentationImagePipeline", num_workers=workers, pre=[SCALE, FLIP])
        data: Any = hotset.cache(made.dataset) if cached else made.dataset
        kind: Any = hotset.DataLoader if cached else DataLoader
        loader = kind(
            data,
            batch_size=4,
            num_workers=workers,
            worker_init_fn=made.worker_init_fn,
            multiprocessing_context=context if cached else None,
        )
        batches = [batch for _ in range(epochs) for batch in loader]
        if cached:
            assert data.stats().cached == COUNT
            data.close()
        return batches

    for got, expected in zip(run(True), run(False), strict=True):
        equal_batches(got, expected)


def test_the_loader_can_be_pickled(root: Path) -> None:
    loader = load(root, "SegmentationImagePipelineWithCache", "validate", pre=[SCALE])
    cached: Any = loader.dataset
    with cached:
        again = pickle.loads(pickle.dumps(loader))
        for got, expected in zip(again, loader, strict=True):
            equal_batches(got, expected)
        again.dataset.close()


# pre_transforms


def test_pre_transforms_come_in_order_before_the_crop_and_hotset_cuts_them(root: Path) -> None:
    shift = {"name": "ShiftIntensityd", "args": {"keys": ["image"], "offset": 1, "safe": False}}
    loader = load(root, "SegmentationImagePipeline", pre=[SCALE, shift, FLIP])
    with hotset.cache(loader.dataset) as cached:
        assert "LoadImaged" in cached.plan.cached
        assert "RandFlipd" in cached.plan.live
        sample: Any = cached[1]
        padding = sample["label"] == 0
        expected = torch.where(padding, sample["image"], sample["label"] / 9 + 1)
        torch.testing.assert_close(sample["image"], expected)


@pytest.mark.filterwarnings("ignore:Num foregrounds")
def test_a_crop_of_monais_own_takes_the_place_of_ours(root: Path) -> None:
    args = {"keys": ["image", "label"], "label_key": "label", "spatial_size": list(CROP), "num_samples": 1}
    args |= {"pos": 1, "neg": 1, "allow_smaller": True}
    crop = {"name": "RandCropByPosNegLabeld", "args": args}
    more = {"name": "FgBgToIndicesd", "args": {"keys": "label"}}  # keys that no batch has
    loader = load(root, "SegmentationImagePipeline", pre=[more, crop])
    assert sorted(numbers(epoch(loader))) == list(range(COUNT))


class Offset:
    """A user's own transform."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": sample["image"] + self.by, "label": sample["label"] + self.by}


def test_the_users_own_transforms_come_before_monais(root: Path) -> None:
    pre = [{"name": "ScaleIntensityRanged", "args": {"by": -1.0}}]
    given = load(root, "SegmentationImagePipeline", "validate", pre=pre, transforms={pre[0]["name"]: Offset})
    plain = load(root, "SegmentationImagePipeline", "validate")
    # Volume 1 has the crop's size and more along each axis: no padding.
    assert torch.equal(given.dataset[4]["image"], plain.dataset[4]["image"] - 1)  # type: ignore[index]


def twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample, dict(sample)]


def causes(error: BaseException) -> str:
    """The texts of an exception and its causes: MONAI's Compose raises its own error from ours."""
    found = []
    chained: BaseException | None = error
    while chained is not None:
        found.append(str(chained))
        chained = chained.__cause__
    return " | ".join(found)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            {"pre": [{"name": "Twice"}], "transforms": {"Twice": lambda: twice}},
            "must make one sample of one, got 2",
        ),
        ({"output_crop_size": [8, 8]}, "got 2 sizes for one of"),
        ({"pre": [{"name": "Rotate90d", "args": {"keys": "image"}}]}, "must have the same shape"),
    ],
    ids=["several", "axes", "shapes"],
)
def test_volumes_that_cannot_be_cropped_are_refused_with_a_sentence(
    root: Path, args: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RuntimeError, match="applying transform") as raised:
        list(load(root, "SegmentationImagePipeline", **args))
    assert sentence in causes(raised.value)


# Workers and batches


@pytest.mark.parametrize(
    ("workers", "prefetch", "factor"),
    [(0, 0, None), (0, 10, None), (2, 0, 1), (2, 1, 1), (2, 4, 2), (4, 10, 3), (1, 7, 7)],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_prefetch_size_is_shared_out_among_the_workers(
    root: Path, workers: int, prefetch: int, factor: int | None
) -> None:
    loader = load(root, "SegmentationImagePipeline", num_workers=workers, prefetch_size=prefetch)
    assert loader.prefetch_factor == factor


def test_workers_and_prefetch_may_be_left_out(root: Path) -> None:
    loader = load(root, "SegmentationImagePipeline", num_workers=None, prefetch_size=None)
    assert (loader.num_workers, loader.prefetch_factor) == (0, None)


# Wrong values

ARGS = "train.image_pipeline.args"
WITH_CACHE = "SegmentationImagePipelineWithCache"
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


RIGHT: dict[str, Any] = {
    "data_list_file_path": lambda value: False,
    "data_file_base_dir": lambda value: isinstance(value, str) and os.path.isdir(value),
    "data_list_key": lambda value: value == "training",
    "output_crop_size": lambda value: (
        isinstance(value, list) and len(value) in (2, 3) and all(is_whole(size, 1) for size in value)
    ),
    "output_batch_size": lambda value: is_whole(value, 1),
    "num_workers": lambda value: is_whole(value, 0),
    "prefetch_size": lambda value: is_whole(value, 0),
    "num_cache_objects": lambda value: is_whole(value, 1),
    "replace_percent": lambda value: type(value) in (int, float) and 0 <= value <= 1,
}


def refused(root: Path, given: Any, key: str, section: str = "train") -> str:
    """The sentence by which a configuration is refused; fails unless it begins with the key."""
    found = failure(lambda: from_config(given, section=section, environment={"ROOT": root}))
    assert found.kind is hotset.ArgumentError, found
    assert found.text.startswith(key), found.text
    assert is_a_sentence(found.text), found.text
    return found.text


@pytest.mark.parametrize("key", RIGHT)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_wrong_value_is_refused_by_its_key(root: Path, key: str, data: st.DataObject) -> None:
    value = data.draw(anything.filter(lambda value: not RIGHT[key](value)))
    made = config(WITH_CACHE)
    made["train"]["image_pipeline"]["args"][key] = value
    refused(root, made, f"{ARGS}.{key}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("replace_percent", value) for value in (-0.01, 1.01, math.nan, True, "0.1")),
        *(("output_crop_size", value) for value in ([16], [16] * 4, [16, 16, 0], [16, 16, 16.0], "16")),
        *(("num_cache_objects", value) for value in (0, 4.0, "4")),
        *(("num_workers", value) for value in (-1, 1.5)),
        ("prefetch_size", -1),
        ("output_batch_size", 0),
    ],
)
def test_a_value_just_outside_its_range_is_refused(root: Path, key: str, value: Any) -> None:
    made = config(WITH_CACHE)
    made["train"]["image_pipeline"]["args"][key] = value
    refused(root, made, f"{ARGS}.{key}")


@pytest.mark.parametrize("key", ["train", "image_pipeline", "name", "args", *RIGHT])
def test_a_missing_key_is_named(root: Path, key: str) -> None:
    made: Any = config(WITH_CACHE)
    places = {
        "train": made,
        "image_pipeline": made["train"],
        **dict.fromkeys(["name", "args"], made["train"]["image_pipeline"]),
    }
    holder = places.get(key, made["train"]["image_pipeline"]["args"])
    del holder[key]
    if key in ("num_workers", "prefetch_size"):
        made["train"]["image_pipeline"]["args"]["output_batch_size"] = 0  # these two may be missing
        refused(root, made, f"{ARGS}.output_batch_size")
        return
    path = {"train": "train", "image_pipeline": "train.image_pipeline"}.get(key)
    path = path or (f"train.image_pipeline.{key}" if key in ("name", "args") else f"{ARGS}.{key}")
    assert "is missing" in refused(root, made, f"{path} ")


@pytest.mark.parametrize("value", [None, 3, "text", [1]], ids=str)
@pytest.mark.parametrize("depth", range(4))
def test_a_value_that_must_be_an_object_is_named(root: Path, value: Any, depth: int) -> None:
    made: Any = config(WITH_CACHE)
    way = ["train", "image_pipeline", "args"][:depth]
    holder = made
    for key in way[:-1]:
        holder = holder[key]
    if way:
        holder[way[-1]] = value
        refused(root, made, f"{'.'.join(way)} must be")
    elif isinstance(value, str):
        assert "cannot be read" in refused(root, value, "the configuration: text")
    else:
        refused(root, value, "a configuration must be a path or a dict")


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        (lambda made: made["args"].update(replace_percnt=0.1), f"{ARGS}.replace_percnt", "replace_percent"),
        (lambda made: made["args"].update(replace_percent=10), f"{ARGS}.replace_percent must", "a fraction"),
        (lambda made: made.update(name="ImagePipeline"), "train.image_pipeline.name", WITH_CACHE),
        (lambda made: made.update(name=WITH_CACHE[:-9]), f"{ARGS}.num_cache_objects", "which takes"),
        (lambda made: made.update(path="x.y"), "train.image_pipeline.path", "name, args"),
        (lambda made: made["args"].update(data_list_key="train"), f"{ARGS}.data_list_key", "training, valid"),
        (lambda made: made["args"].update(data_file_base_dir="{NO}"), f"{ARGS}.data_file", "NO is not set"),
    ],
    ids=["misspelt", "percentage", "name", "not-cached", "key-beside", "list-key", "unset"],
)  # fmt: skip
def test_the_error_says_what_the_value_must_be(root: Path, change: Any, path: str, says: str) -> None:
    made: Any = config(WITH_CACHE)
    change(made["train"]["image_pipeline"])
    assert says in refused(root, made, path)


@pytest.mark.parametrize(
    ("pre", "path", "says"),
    [
        ({}, "train.pre_transforms must be", "a list"),
        ([3], "train.pre_transforms[0] must be", "object"),
        ([SCALE, {"args": {}}], "train.pre_transforms[1].name", "missing"),
        ([SCALE, {**SCALE, "disabled": True}], "train.pre_transforms[1].disabled", "name, args"),
        ([{"name": "ScaleIntensityRange"}], "train.pre_transforms[0].name", "ScaleIntensityRanged"),
        ([{"name": "Compose"}], "train.pre_transforms[0].name", "dictionary transforms"),
        ([{"name": "LoadImaged", "args": {"keys": "image"}}], "train.pre_transforms[0].name", "left out"),
        ([{"name": "Spacingd", "args": [1]}], "train.pre_transforms[0].args", "object"),
        ([{"name": "Spacingd", "args": {"fields": "image"}}], "train.pre_transforms[0].args", "fields"),
        ([FLIP, {"name": "Flipd", "args": {"keys": "{KEY}"}}], "train.pre_transforms[1].args.keys", "KEY"),
        (
            [{"name": "RandSpatialCropSamplesd", "args": {"keys": "image", "num_samples": 2}}],
            "train.pre_transforms[0].args.num_samples",
            "1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_pre_transform_is_named(root: Path, pre: Any, path: str, says: str) -> None:
    assert says in refused(root, config("SegmentationImagePipeline", pre=pre), path)


def test_validation_uses_the_same_samples_each_time(root: Path) -> None:
    args = "validate.image_pipeline.args"
    moving = config(WITH_CACHE, "validate", replace_percent=0.1)
    assert "0 for validation" in refused(root, moving, f"{args}.replace_percent", "validate")
    few = config(WITH_CACHE, "validate", num_cache_objects=COUNT - 1)
    assert f"{COUNT} or more" in refused(root, few, f"{args}.num_cache_objects", "validate")
    cached: Any = load(root, WITH_CACHE, "validate", replace_percent=None).dataset
    cached.close()


def test_another_section_is_refused(root: Path) -> None:
    refused(root, config(WITH_CACHE), "section must be", "test")
    refused(root, config(WITH_CACHE), "validate is missing", "validate")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"{'a': 1}"], ids=repr)
def test_files_that_are_not_json_are_named(root: Path, tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(text)
    assert "must be JSON" in refused(root, file, f"the configuration: {file}")
    made = config(WITH_CACHE, data_list_file_path=str(file))
    assert "must be JSON" in refused(root, made, f"{ARGS}.data_list_file_path: {file}")


@pytest.mark.parametrize(
    ("listed", "task", "path"),
    [
        ([], "Segmentation", "training"),
        ({"image": "image0.nii.gz"}, "Segmentation", "training"),
        ([3], "Segmentation", "training[0]"),
        (["image0.nii.gz"], "Segmentation", "training[0]"),
        ([{"image": "image0.nii.gz"}], "Segmentation", "training[0].label"),
        ([{"label": "label0.nii.gz"}], "Segmentation", "training[0].image"),
        ([{"image": "gone.nii.gz", "label": 3}], "Segmentation", "training[0].image"),
        ([{"image": "image0.nii.gz", "label": 3}], "Segmentation", "training[0].label"),
        ([{"image": ["image0.nii.gz", "gone"], "label": 3}], "Segmentation", "training[0].image[1]"),
        ([{"image": "image0.nii.gz", "label": "cat"}], "Classification", "training[0].label"),
        ([{"image": "image0.nii.gz", "label": -1}], "Classification", "training[0].label"),
        ([{"image": "image0.nii.gz", "label": 1 << 63}], "Classification", "training[0].label"),
        ([{"image": "image0.nii.gz", "label": True}], "Classification", "training[0].label"),
        ([{"image": "image0.nii.gz", "label": [1, None]}], "Classification", "training[0].label[1]"),
    ],
)
def test_a_wrong_sample_of_the_list_is_named(
    root: Path, tmp_path: Path, listed: Any, task: str, path: str
) -> None:
    file = tmp_path / "dataset.json"
    file.write_text(json.dumps({"training": listed}))
    made = config(f"{task}ImagePipeline", data_list_file_path=str(file))
    refused(root, made, f"{path} in {file} ")


def test_labels_must_be_alike(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "dataset.json"

    made = config("ClassificationImagePipeline", "validate", data_list_file_path=str(file))
    for labels in ([1, [1]], [[1], [1, 2]]):
        listed = [{"image": "image0.nii.gz", "label": label} for label in labels]
        file.write_text(json.dumps({"validation": listed}))
        refused(root, made, f"validation[1].label in {file} ", "validate")
    some = [{"image": "image0.nii.gz", "label": 1}, {"image": "image0.nii.gz"}]
    file.write_text(json.dumps({"validation": some}))
    assert "validation[1]" in refused(root, made, f"validation in {file} ", "validate")


def test_a_variable_that_is_not_a_text_is_refused(root: Path) -> None:
    found = failure(lambda: from_config(config(WITH_CACHE), environment={"ROOT": 3}))  # type: ignore[dict-item]
    assert found.kind is hotset.ArgumentError
    assert found.text.startswith("environment['ROOT'] must be")


def test_the_configuration_is_left_as_it_was(root: Path) -> None:
    made = config("SegmentationImagePipeline", pre=[SCALE, FLIP])
    before = copy.deepcopy(made)
    from_config(made, environment={"ROOT": root})
    assert made == before


def test_without_monai_a_sentence_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "monai.transforms", None)
    with pytest.raises(ImportError, match=r"pip install 'hotset\[monai\]'"):
        load(root, "SegmentationImagePipeline")
