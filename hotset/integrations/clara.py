"""Clara Train's image pipelines: a ``train_config.json`` becomes a loader whose volumes are read once.

::

    LoadImaged ─ EnsureChannelFirstd ─ pre_transforms ─ SpatialPadd │ RandSpatialCropd       section train
    LoadImaged ─ EnsureChannelFirstd ─ pre_transforms ─ ResizeWithPadOrCropd │               section validate
    ╰───────────────────────── cached, up to the first random one ──╯ live, for each use

All transforms are MONAI's, in one Compose, and hotset cuts it like any other. In training a *window* over the
dataset holds ``num_cache_objects`` samples. An epoch is one pass over those; then the fraction
``replace_percent`` of them is replaced by others. In validation every epoch uses all samples.

**The random crop is drawn evenly over the volume**; a volume smaller than the crop is padded first. A crop
that favours the foreground would need a ratio, a background and a label that has both, and an image pipeline
has no arguments for these. For such crops, put ``RandCropByPosNegLabeld`` last in ``pre_transforms``, with
the same size: the pipeline's own crop then takes all of each. **One volume gives one crop**, so that a batch
is ``output_batch_size`` volumes; a transform that would give several is refused.

**Tensors, not MetaTensors.** pre_transforms such as ``Spacingd`` need a MetaTensor's metadata. The crop does
not, and batches are gathered from the cache only if they consist of plain tensors. So the metadata is dropped
before the crop, and again after it, as MONAI's crops add it anew.

**Seeds.** Each of MONAI's transforms has its own generator; after a fork, all workers would have equal ones
and draw the same. So the transforms are seeded: in each worker from the worker's seed, which torch draws for
each epoch; without workers once, from torch's generator, when the loader is made.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import get_worker_info

import hotset
from hotset.dataset.build import cache
from hotset.determinism.declare import deterministic
from hotset.errors import ArgumentError
from hotset.integrations.clara_config import ConfigValue, ImagePipeline, read_config
from hotset.loader.loader import DataLoader

__all__ = ["from_config"]

_SEEDS = 2**32


def from_config(
    path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
    *,
    section: str = "train",
    environment: Mapping[str, str | os.PathLike[str]] | None = None,
    transforms: Mapping[str, Callable[..., Callable[[Any], Any]]] | None = None,
) -> DataLoader[dict[str, torch.Tensor]]:
    """Make the loader that the ``image_pipeline`` of a Clara Train configuration describes.

    Names are ``SegmentationImagePipelineWithCache``, ``ClassificationImagePipelineWithCache``, and both
    without ``WithCache``, which read every volume each time. ``pre_transforms``, beside the
    ``image_pipeline``, are MONAI's dictionary transforms, in order. ``docs/clara.md`` lists all arguments.

    All workers together make ``prefetch_size`` batches ahead: each makes
    ``ceil(prefetch_size / num_workers)`` of them, but at least one.

    Args:
        path_or_dict: the path of ``train_config.json``, or its content.
        section: ``"train"`` or ``"validate"``.
        environment: the values of ``{VAR}`` in the configuration; by default the process's environment.
        transforms: more names for ``pre_transforms``: for each a callable that, called with ``args``, returns
            a transform of dicts. Your own transforms are live unless they are declared with
            :func:`hotset.deterministic`.

    Returns:
        A loader of dicts. ``"image"`` is float32, of shape ``[B, C, *output_crop_size]``. ``"label"`` is a
        float32 tensor of the same size for segmentation, with the label's own channels; for classification
        int64 ``[B]``, or float32 ``[B, n]`` if labels are lists. It is left out if the list has no labels.
        The last batch may be smaller; none is dropped. ``loader.dataset.plan`` says what is cached.

    Raises:
        ArgumentError: a value is missing or wrong, or a file is missing: the message names the key.
        ImportError: MONAI is not installed.

    Example:
        >>> import nibabel, numpy, os, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> volume = nibabel.Nifti1Image(numpy.ones((20, 20, 20), numpy.float32), numpy.eye(4))
        >>> for name in ("image.nii", "label.nii"):
        ...     nibabel.save(volume, os.path.join(folder.name, name))
        >>> with open(os.path.join(folder.name, "dataset.json"), "w") as file:
        ...     _ = file.write('{"training": [{"image": "image.nii", "label": "label.nii"}]}')
        >>> args = {
        ...     "data_list_file_path": "{ROOT}/dataset.json",
        ...     "data_file_base_dir": "{ROOT}",
        ...     "data_list_key": "training",
        ...     "output_crop_size": [16, 16, 16],
        ...     "output_batch_size": 1,
        ... }
        >>> config = {"train": {"image_pipeline": {"name": "SegmentationImagePipeline", "args": args}}}
        >>> for batch in from_config(config, environment={"ROOT": folder.name}):
        ...     print(batch["image"].shape, batch["label"].dtype)
        torch.Size([1, 1, 16, 16, 16]) torch.float32
        >>> folder.cleanup()
    """
    pipeline = read_config(path_or_dict, section, os.environ if environment is None else environment)
    dataset = _monai("data").Dataset(pipeline.samples, _chain(pipeline, transforms or {}))
    dataset.transform.set_random_state(int(torch.randint(_SEEDS, ()).item()))
    cached: Any = dataset
    if pipeline.resident is not None and pipeline.is_training:
        resident = min(pipeline.resident, len(dataset))
        cached = cache(dataset, window=hotset.Window(resident=resident, replace=pipeline.replace))
    elif pipeline.resident is not None:
        cached = cache(dataset)
    workers = pipeline.num_workers
    return DataLoader(
        cached,
        batch_size=pipeline.batch_size,
        shuffle=pipeline.is_training and cached is dataset,  # a window has its own order
        num_workers=workers,
        prefetch_factor=max(1, -(-pipeline.prefetch_size // workers)) if workers else None,
        worker_init_fn=_seed_transforms,
    )


def _monai(part: str) -> Any:
    try:
        import monai.data
        import monai.transforms
    except ImportError as error:
        raise ImportError(
            f"Clara's pipelines consist of MONAI's transforms, and MONAI cannot be imported ({error}); "
            "install it with: pip install 'hotset[monai]'."
        ) from error
    return getattr(monai, part)


def _seed_transforms(worker: int) -> None:
    """Seed the random transforms in this worker from the worker's seed."""
    info = get_worker_info()
    assert info is not None
    # A cache's live transforms are objects of the dataset's own chain, so seeding that chain gives a sample
    # the same crop with and without a cache.
    dataset: Any = getattr(info.dataset, "dataset", info.dataset)
    dataset.transform.set_random_state(info.seed % _SEEDS)


# The chain


def _chain(pipeline: ImagePipeline, known: Mapping[str, Callable[..., Any]]) -> Any:
    """The whole chain, from an item of the data list to a sample of a batch."""
    monai = _monai("transforms")
    files, both = ["image"], ["image"]
    types = [torch.float32]
    if "label" in pipeline.samples[0]:
        both.append("label")
        segmented = pipeline.task == "Segmentation"
        files += ["label"] if segmented else []
        listed = isinstance(pipeline.samples[0]["label"], list)
        types.append(torch.float32 if segmented or listed else torch.int64)
    plain = monai.EnsureTyped(both, dtype=types, track_meta=False)
    load = [monai.LoadImaged(files), monai.EnsureChannelFirstd(files)]
    pre = [_pre_transform(step, known) for step in pipeline.steps]
    if pipeline.is_training:
        pad = monai.SpatialPadd(files, spatial_size=pipeline.crop)
        crop = [pad, plain, monai.RandSpatialCropd(files, roi_size=pipeline.crop, random_size=False)]
    else:
        crop = [monai.ResizeWithPadOrCropd(files, spatial_size=pipeline.crop)]
    one = OneVolume(tuple(files), len(pipeline.crop), pipeline.args.child("output_crop_size").path)
    select = monai.SelectItemsd(both)
    # A transform that may give several samples gives a list, and the inner Compose maps the transforms after
    # it over that list. The outer one does not map, so that OneVolume gets the list.
    return monai.Compose([monai.Compose([*load, *pre]), one, select, *crop, plain], map_items=False)


@deterministic
class OneVolume:
    """Makes sure that ``pre_transforms`` give one sample that can be cropped.

    Args:
        keys: the entries that are cropped.
        axes: how many axes the crop has.
        name: the configuration's key of the crop's size.
    """

    def __init__(self, keys: tuple[str, ...], axes: int, name: str) -> None:
        self.keys = keys
        self.axes = axes
        self.name = name

    def __call__(self, given: Any) -> Any:
        samples = given if isinstance(given, list) else [given]
        if len(samples) != 1:
            raise ArgumentError(
                f"pre_transforms must make one sample of one, got {len(samples)}; leave out the transform "
                "that makes several, or give it num_samples=1: a batch is output_batch_size volumes."
            )
        shapes = [tuple(samples[0][key].shape[1:]) for key in self.keys]
        if any(len(shape) != self.axes for shape in shapes):
            raise ArgumentError(
                f"{self.name} must have a size for each axis of a volume, got {self.axes} sizes for one of "
                f"shape {shapes[0]}."
            )
        if len(set(shapes)) > 1:
            raise ArgumentError(
                f"an image and its label must have the same shape to be cropped, got {shapes[0]} and "
                f"{shapes[1]}; give pre_transforms that change the shape the keys of both."
            )
        return samples[0]


def _pre_transform(step: ConfigValue, known: Mapping[str, Callable[..., Any]]) -> Any:
    """One of ``pre_transforms``."""
    step.only(("name", "args"), "a transform")
    args = step["args"] if "args" in step else ConfigValue({}, f"{step.path}.args")
    args.only(args.value, "it")  # any keys, but an object
    make = _maker(step["name"], known)
    if "num_samples" in args and args["num_samples"].value != 1:
        raise args["num_samples"].wrong("1", "a batch is output_batch_size volumes, each cropped once")
    try:
        return make(**args.value)
    except Exception as error:  # transforms raise errors of many kinds
        why = str(error).rstrip(".")
        raise ArgumentError(f"{args.name}: {step.value['name']} refuses these arguments: {why}.") from error


def _maker(name: ConfigValue, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    text = name.text()
    if text in known:
        return known[text]
    monai = _monai("transforms")
    make = getattr(monai, text, None)
    if not (isinstance(make, type) and issubclass(make, monai.MapTransform)):
        names = [each for each in dir(monai) if each.endswith("d")]
        near = difflib.get_close_matches(text, [*names, *known], cutoff=0.7)
        hint = f", such as {' or '.join(near)}" if near else ""
        raise name.wrong(f"one of MONAI's dictionary transforms{hint}, or in transforms=")
    if make in (monai.LoadImaged, monai.EnsureChannelFirstd):
        raise name.wrong("left out", "images are loaded, channels first, before pre_transforms")
    found: Callable[..., Any] = make
    return found
