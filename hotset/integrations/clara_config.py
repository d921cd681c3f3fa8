"""Reading a Clara Train configuration: the error for a wrong value names its key.

Two files are read. Each section of ``train_config.json`` describes a pipeline; the data list that it names
describes the samples::

    train_config.json                             dataset.json
    {"train": {                                   {"training":
      "pre_transforms": [{"name", "args"}, ...],    [{"image": "a.nii.gz", "label": "b.nii.gz"}, ...],
      "image_pipeline": {"name", "args": {...}}},  "validation": [...],
     "validate": {...}}                            "test": [...]}

Both files often have one wrong value after they were moved to another machine. So a value is always kept with
the keys that lead to it, in a :class:`ConfigValue`, and only the methods of that return plain values. Errors
are found here, before a volume is opened or a worker started: unknown keys are refused, as most of them are
misspelt, and every file of the list must exist.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.errors import ArgumentError

__all__ = ["ConfigValue", "ImagePipeline", "read_config"]

_ARGUMENTS = (
    "data_list_file_path",
    "data_file_base_dir",
    "data_list_key",
    "output_crop_size",
    "output_batch_size",
    "num_workers",
    "prefetch_size",
)
_CACHE_ARGUMENTS = ("num_cache_objects", "replace_percent")
_TASKS = ("Segmentation", "Classification")
_NAMES = {
    f"{task}ImagePipeline{suffix}": (task, bool(suffix)) for task in _TASKS for suffix in ("", "WithCache")
}
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
_LARGEST_CLASS = (1 << 63) - 1
_SHOWN = 80


@dataclass(frozen=True)
class ConfigValue:
    """A value of a JSON file, and its place in the file.

    Attributes:
        value: the value.
        path: the keys that lead to it, ``train.pre_transforms[0].name``; empty for the whole file.
        file: the file's name, for messages; empty for the configuration itself.
    """

    value: Any
    path: str = ""
    file: str = ""

    @property
    def name(self) -> str:
        """What messages call it."""
        path = self.path or "the configuration"
        return f"{path} in {self.file}" if self.file else path

    def wrong(self, must: str, why: str = "") -> ArgumentError:
        """The error for a value that is not what it must be."""
        reason = f"; {why}" if why else ""
        return ArgumentError(f"{self.name} must be {must}, got {_shown(self.value)}{reason}.")

    def __contains__(self, key: str) -> bool:
        return key in self._object()

    def __getitem__(self, key: str) -> ConfigValue:
        if key not in self:
            known = ", ".join(map(str, self.value)) or "nothing"
            raise ArgumentError(f"{self.child(key).name} is missing; there is only {known}. Add it.")
        return self.child(key)

    def child(self, key: str) -> ConfigValue:
        """The value under a key; None, with its place, if the key is missing."""
        return ConfigValue(self._object().get(key), f"{self.path}.{key}" if self.path else key, self.file)

    def only(self, keys: Iterable[str], reader: str) -> None:
        """Refuse keys other than these."""
        known = tuple(keys)
        for key in self._object():
            if key not in known:
                name = self.child(key).name
                raise ArgumentError(f"{name} is not known to {reader}, which takes {', '.join(known)}.")

    def _object(self) -> Mapping[str, Any]:
        if not isinstance(self.value, Mapping):
            raise self.wrong("an object of keys and values")
        return self.value

    def elements(self, what: str) -> Iterator[ConfigValue]:
        """The elements of a list; ``what`` is their name in the error."""
        if not isinstance(self.value, (list, tuple)):
            raise self.wrong(f"a list of {what}")
        for number, value in enumerate(self.value):
            yield ConfigValue(value, f"{self.path}[{number}]", self.file)

    def text(self) -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong("a text")
        return self.value

    def whole(self, least: int) -> int:
        """A whole number, at least ``least``."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < least:
            raise self.wrong(f"a whole number, {least} or more")
        return self.value

    def number(self) -> float:
        """A number that a float32 can hold."""
        if not self._is_within(-1e38, 1e38):
            raise self.wrong("a number")
        return float(self.value)

    def fraction(self) -> float:
        """A number in [0, 1]."""
        if not self._is_within(0, 1):
            raise self.wrong("a fraction in [0, 1], not a percentage", "0.1 replaces 10 % of the samples")
        return float(self.value)

    def _is_within(self, least: float, most: float) -> bool:
        is_number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        return is_number and least <= self.value <= most

    def filled(self, variables: Mapping[str, Any]) -> ConfigValue:
        """The same value with every ``{VAR}`` in its texts replaced, at any depth.

        Raises:
            ArgumentError: a variable is not set, or is not a text.
        """

        def replaced(found: re.Match[str]) -> str:
            name = found[1]
            if name not in variables:
                raise ArgumentError(
                    f"{self.name} is {_shown(self.value)}, and {name} is not set; export it in the "
                    f"environment, or give environment={{{name!r}: ...}}."
                )
            value = variables[name]
            if not isinstance(value, (str, os.PathLike)):
                raise ArgumentError(f"environment[{name!r}] must be a text or a path, got {value!r}.")
            return os.fsdecode(value)

        value: Any = self.value
        if isinstance(value, str):
            value = _PLACEHOLDER.sub(replaced, value)
        elif isinstance(value, Mapping):
            value = {key: self.child(key).filled(variables).value for key in value}
        elif isinstance(value, (list, tuple)):
            value = [element.filled(variables).value for element in self.elements("anything")]
        return ConfigValue(value, self.path, self.file)


@dataclass(frozen=True)
class ImagePipeline:
    """An ``image_pipeline``, with every value in its range.

    Attributes:
        args: its arguments, for messages about them.
        steps: the elements of ``pre_transforms``.
        is_training: whether this is section ``train``, not ``validate``.
        task: ``"Segmentation"`` or ``"Classification"``.
        samples: one dict for each sample: see :func:`_read_samples`.
        crop: voxels (or pixels) along each axis.
        batch_size: samples in a batch.
        num_workers, prefetch_size: worker processes, and batches that they make ahead.
        resident: how many samples to keep in memory; None for a pipeline without a cache.
        replace: the fraction of them to replace after each epoch.
    """

    args: ConfigValue
    steps: list[ConfigValue]
    is_training: bool
    task: str
    samples: list[dict[str, Any]]
    crop: tuple[int, ...]
    batch_size: int
    num_workers: int
    prefetch_size: int
    resident: int | None
    replace: float


def read_config(config: Any, section: str, environment: Mapping[str, Any]) -> ImagePipeline:
    """Read one section of a configuration, given as the file's name or as its content.

    Raises:
        ArgumentError: a value is wrong or missing; the message names its key.
    """
    if section not in ("train", "validate"):
        raise ArgumentError(f"section must be 'train' or 'validate', got {section!r}.")
    if isinstance(config, (str, os.PathLike)):
        whole = ConfigValue(_json(Path(os.fsdecode(config)), "the configuration"))
    elif isinstance(config, Mapping):
        whole = ConfigValue(config)
    else:
        raise ArgumentError(f"a configuration must be a path or a dict, got a {type(config).__name__}.")
    given = whole[section]["image_pipeline"].filled(environment)
    given.only(("name", "args"), "an image pipeline")
    name = given["name"].text()
    if name not in _NAMES:
        raise given["name"].wrong(f"one of {', '.join(_NAMES)}")
    task, cached = _NAMES[name]
    args = given["args"]
    args.only((*_ARGUMENTS, *(_CACHE_ARGUMENTS if cached else ())), name)
    training = section == "train"
    samples = _read_samples(args, task, needs_labels=training)
    crop = tuple(size.whole(1) for size in args["output_crop_size"].elements("two or three sizes"))
    if len(crop) not in (2, 3):
        raise args["output_crop_size"].wrong("a list of two or three sizes")
    resident, replace = _cache_arguments(args, len(samples), training) if cached else (None, 0.0)
    steps: list[ConfigValue] = []
    if "pre_transforms" in whole[section]:
        given = whole[section]["pre_transforms"].filled(environment)
        steps = list(given.elements('{"name", "args"}'))
    return ImagePipeline(
        args=args,
        steps=steps,
        is_training=training,
        task=task,
        samples=samples,
        crop=crop,
        batch_size=args["output_batch_size"].whole(1),
        num_workers=args["num_workers"].whole(0) if "num_workers" in args else 0,
        prefetch_size=args["prefetch_size"].whole(0) if "prefetch_size" in args else 0,
        resident=resident,
        replace=replace,
    )


def _cache_arguments(args: ConfigValue, samples: int, training: bool) -> tuple[int, float]:
    resident = args["num_cache_objects"].whole(1)
    if training:
        return resident, args["replace_percent"].fraction()
    if "replace_percent" in args and args["replace_percent"].fraction() != 0:
        raise args["replace_percent"].wrong("0 for validation", "it uses the same samples each time")
    if resident < samples:
        raise args["num_cache_objects"].wrong(
            f"{samples} or more for validation",
            "an epoch is one pass over the cache, and the other samples would never be validated; use the "
            "pipeline without a cache if they do not fit in memory",
        )
    return resident, 0.0


def _read_samples(args: ConfigValue, task: str, *, needs_labels: bool) -> list[dict[str, Any]]:
    """The samples of a list in the form of the Medical Segmentation Decathlon.

    Args:
        args: holds ``data_list_file_path``, ``data_file_base_dir`` and ``data_list_key``.
        task: for segmentation labels are files, as images are; for classification an int or a list of
            numbers.
        needs_labels: if False, the list may hold images only, also as texts, as in the decathlon's ``test``.

    Returns:
        ``{"image": path}`` or ``{"image": path, "label": path or number or list}`` for each sample, the same
        keys in all of them; a list of paths stands for one image of several channels.

    Raises:
        ArgumentError: a value is wrong or missing; the message names its key in the configuration or the
        list.
    """
    file = Path(args["data_list_file_path"].text())
    base = args["data_file_base_dir"].text()
    if not os.path.isdir(base):
        raise args["data_file_base_dir"].wrong("a folder that exists")
    key = args["data_list_key"].text()
    listed = ConfigValue(_json(file, args["data_list_file_path"].name), file=str(file))
    if key not in listed:
        raise args["data_list_key"].wrong(f"a key of {file}", f"it has {', '.join(listed.value) or 'none'}")
    found = []
    for entry in listed[key].elements("samples"):
        if isinstance(entry.value, str) and not needs_labels:
            found.append({"image": _files(entry, base)})
            continue
        sample: dict[str, Any] = {"image": _files(entry["image"], base)}
        if needs_labels or "label" in entry:
            label = entry["label"]
            sample["label"] = _files(label, base) if task == "Segmentation" else _classes(label)
        found.append(sample)
        if len(sample) != len(found[0]):
            raise ArgumentError(
                f"{listed[key].name} must have a label for all samples or for none; {entry.path} is the "
                "first that differs."
            )
    if not found:
        raise listed[key].wrong("a list with a sample or more")
    if task == "Classification" and "label" in found[0]:
        _require_one_length([sample["label"] for sample in found], listed[key])
    return found


def _files(entry: ConfigValue, base: str) -> str | list[str]:
    """One file below ``base``, or several that are the channels of one image."""
    if isinstance(entry.value, (list, tuple)) and entry.value:
        return [_file(each, base) for each in entry.elements("files")]
    return _file(entry, base)


def _file(entry: ConfigValue, base: str) -> str:
    path = os.path.join(base, entry.text())
    if not os.path.exists(path):
        raise ArgumentError(
            f"{entry.name} must name a file, got {_shown(entry.value)}, but {path} does not exist; correct "
            "it or data_file_base_dir."
        )
    return path


def _classes(entry: ConfigValue) -> int | list[float]:
    """One class, or one number for each of several."""
    if isinstance(entry.value, (list, tuple)) and entry.value:
        return [number.number() for number in entry.elements("numbers")]
    if isinstance(entry.value, bool) or not isinstance(entry.value, int) or entry.value > _LARGEST_CLASS:
        raise entry.wrong("a class as a whole number of 64 bits, or a list of numbers")
    return entry.whole(0)


def _require_one_length(labels: list[Any], listed: ConfigValue) -> None:
    """Refuse labels that cannot make one tensor: all must be numbers, or lists of one length."""
    lengths = [len(label) if isinstance(label, list) else None for label in labels]
    for entry, length in zip(listed.elements("samples"), lengths, strict=True):
        if length != lengths[0]:
            raise entry["label"].wrong(f"like the first one, {_shown(labels[0])}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _json(file: Path, what: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{what}: {file} cannot be read ({error.strerror}); correct the path.") from error
    except ValueError as error:
        raise ArgumentError(f"{what}: {file} must be JSON: {error}.") from error
