"""Segmenting 3-D volumes: no cache, a window that holds half of them, and all of them cached.

Smart Cache's case at the size of two cores. Without a cache, two volumes are read, unpacked and resampled for
each step of a small UNet, which takes four times as long as the step. All of that is deterministic, and
cached; the random crop and flips stay live.

The volumes are synthetic, and made here: smooth noise, in it ellipsoids of another intensity, the "organs",
in int16 .nii.gz files like a CT's, of different shapes and spacings. Nothing is fetched or left behind.

Run it: python examples/segmentation_volumes.py [--plot volumes.png]        (MONAI, nibabel; two minutes)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import monai
import nibabel
import numpy as np
import torch
from monai import transforms as mt
from torch.utils.data import get_worker_info

import hotset

KEYS = ("image", "label")
SPACING = (1.5, 1.5, 2.0)  # mm, of the voxels that the network sees
HELD_OUT = 4  # volumes that are never trained on, for the dice
LEARNING_RATE = 5e-3


# ---- volumes ---------------------------------------------------------------------------------------------


def write_volumes(folder: Path, count: int, size: int) -> list[dict[str, str]]:
    """Write ``count`` images and labels of about ``size`` voxels in the plane; return their paths."""
    items = []
    for number in range(count):
        image, label, spacing = made_up_volume(number, size)
        affine = np.diag([*spacing, 1.0])
        item = {key: str(folder / f"{key}{number}.nii.gz") for key in KEYS}
        nibabel.save(nibabel.Nifti1Image(image, affine), item["image"])
        nibabel.save(nibabel.Nifti1Image(label, affine), item["label"])
        items.append(item)
    return items


def made_up_volume(number: int, size: int) -> tuple[Any, Any, tuple[float, float, float]]:
    """One volume, always the same: int16 image, uint8 label, and the size of its voxels in mm."""
    rng = np.random.default_rng(number)
    x, y = rng.integers(size * 4 // 5, size * 6 // 5, 2).tolist()
    z = int(rng.integers(size // 3, size // 2))
    plane, slices = rng.uniform(0.7, 1.0), rng.uniform(1.5, 3.0)
    coarse = torch.from_numpy(rng.standard_normal((1, 1, 6, 6, 6)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, (x, y, z), mode="trilinear", align_corners=True)
    image = 60 * smooth[0, 0].numpy() + 25 * rng.standard_normal((x, y, z), dtype=np.float32)
    label = np.zeros((x, y, z), np.uint8)
    grid = np.ogrid[:x, :y, :z]
    for _ in range(3):
        centres, radii = rng.uniform(0.25, 0.75, 3), rng.uniform(0.15, 0.25, 3)
        squares = (
            ((axis / length - centre) / radius) ** 2
            for axis, length, centre, radius in zip(grid, (x, y, z), centres, radii, strict=True)
        )
        label[sum(squares) < 1] = 1
    return (image + 120 * label).astype(np.int16), label, (plane, plane, slices)


# ---- transforms, network ---------------------------------------------------------------------------------


def chain(crop: int) -> mt.Compose:
    """The whole chain, as without a cache; hotset finds where it becomes random."""
    size = (crop, crop, crop)
    return mt.Compose(
        [
            mt.LoadImaged(KEYS),
            mt.EnsureChannelFirstd(KEYS),
            mt.Orientationd(KEYS, axcodes="RAS", labels=None),
            mt.Spacingd(KEYS, pixdim=SPACING, mode=("bilinear", "nearest")),
            mt.ScaleIntensityRanged("image", a_min=-200, a_max=300, b_min=0, b_max=1, clip=True),
            mt.SpatialPadd(KEYS, spatial_size=size),
            # What a MetaTensor knows of its volume is needed no more, and plain tensors are cheaper.
            mt.EnsureTyped(KEYS, track_meta=False),
            mt.RandSpatialCropd(KEYS, roi_size=size, random_size=False),
            *(mt.RandFlipd(KEYS, prob=0.5, spatial_axis=axis) for axis in range(3)),
            mt.EnsureTyped(KEYS, track_meta=False),
        ]
    )


def seed_crops(worker: int) -> None:
    """MONAI's transforms each have a generator, which forked workers would share: seed them."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = getattr(info.dataset, "dataset", info.dataset)  # behind a cache it is the one within
    dataset.transform.set_random_state(info.seed % 2**32)


def small_unet() -> torch.nn.Module:
    """A UNet of a few thousand parameters, its weights always the same."""
    torch.manual_seed(0)
    net: torch.nn.Module = monai.networks.nets.UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
    )
    return net


# ---- training --------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One training: for each step its seconds, those of them spent waiting, and its loss; the dice after."""

    name: str
    seconds: list[float]
    waited: list[float]
    losses: list[float]
    dice: float


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch: what counts is how many steps are trained."""
    while True:
        yield from loader


def train(name: str, loader: Iterable[Any], steps: int, held_out: list[Any], crop: int) -> Run:
    net = small_unet()
    loss_of = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
    # torch's preparations at a first step are not data loading.
    zeros = torch.zeros(1, 1, crop, crop, crop)
    loss_of(net(zeros), zeros).backward()
    optimizer.zero_grad()
    run = Run(name, [], [], [], 0.0)
    batches = endless(loader)
    for _ in range(steps):
        begin = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - begin
        loss = loss_of(net(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        run.waited.append(waited)
        run.seconds.append(time.perf_counter() - begin)
    return run._replace(dice=mean_dice(net, held_out, crop))


@torch.no_grad()
def mean_dice(net: torch.nn.Module, held_out: list[Any], crop: int) -> float:
    """Of whole volumes that were not trained on."""
    found = []
    for sample in held_out:
        scores = monai.inferers.sliding_window_inference(sample["image"][None], (crop,) * 3, 4, net)
        organ, truth = scores.argmax(1) == 1, sample["label"] == 1
        found.append(float(2 * (organ & truth).sum() / (organ.sum() + truth.sum()).clamp(min=1)))
    return statistics.fmean(found)


def runs(items: list[dict[str, str]], words: argparse.Namespace) -> Iterator[Run]:
    """Train three times: without a cache, with a window, with everything cached."""
    loading = {"batch_size": words.batch, "num_workers": words.workers, "worker_init_fn": seed_crops}
    loading["persistent_workers"] = words.workers > 0
    steps = chain(words.crop)
    first_random = steps.get_index_of_first(lambda step: isinstance(step, mt.Randomizable))
    deterministic = mt.Compose(steps.transforms[:first_random])
    held_out = [deterministic(item) for item in items[:HELD_OUT]]
    training = monai.data.Dataset(items[HELD_OUT:], chain(words.crop).set_random_state(0))

    plain = torch.utils.data.DataLoader(training, shuffle=True, **loading)
    yield train("no cache", plain, words.steps, held_out, words.crop)

    window = hotset.Window(words.resident, replace=words.replace)
    with hotset.cache(training, window=window) as cached:
        print(cached.plan)
        # No shuffle: the order is the window's, and random.
        loader = hotset.DataLoader(cached, **loading)
        yield train(f"window of {len(cached)}", loader, words.steps, held_out, words.crop)
        stats = cached.stats()
        print(f"replaced so far: {stats.replaced} volumes, {stats.late} of them late")
        del loader  # its workers end

    with hotset.cache(training) as cached:
        loader = hotset.DataLoader(cached, shuffle=True, **loading)
        yield train("all cached", loader, words.steps, held_out, words.crop)
        del loader


# ---- what came of it -------------------------------------------------------------------------------------


def print_table(found: list[Run], filled: int) -> None:
    """Print seconds a step, the share waited, loss and dice; apart from the first ``filled`` steps."""
    headings = (f"first {filled} steps", "later steps", "waited, later")
    print("\n{:14} {:>18} {:>18} {:>14} {:>10} {:>6}".format("", *headings, "last loss", "dice"))
    for run in found:
        early, later = statistics.fmean(run.seconds[:filled]), run.seconds[filled:]
        waited = sum(run.waited[filled:]) / sum(later)
        print(
            f"{run.name:14} {early:>12.3f} s/step {statistics.fmean(later):>11.3f} s/step "
            f"{waited:>14.0%} {run.losses[-1]:>10.3f} {run.dice:>6.2f}"
        )


def draw(found: list[Run], filled: int, path: Path) -> None:
    """Save the plot: seconds a step, split into waiting and computing, and when which step was done."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(2, 3))
    for place, (run, colour) in enumerate(zip(found, ("#8c8c8c", "#d9480f", "#1b7837"), strict=True)):
        seconds = statistics.fmean(run.seconds[filled:])
        waited = statistics.fmean(run.waited[filled:])
        bars.bar(place, waited, 0.7, color=colour)
        bars.bar(place, seconds - waited, 0.7, waited, color=colour, alpha=0.35)
        bars.text(place, seconds, f"{seconds:.2f} s", ha="center", va="bottom")
        curves.plot(np.cumsum(run.seconds), range(1, len(run.seconds) + 1), color=colour, label=run.name)
    bars.set_xticks(range(len(found)), [run.name for run in found])
    bars.set_title(f"seconds a step after the first {filled} (full colour: waiting for data)", fontsize=10)
    bars.margins(y=0.12)
    curves.set_title("steps done", fontsize=10)
    curves.set_xlabel("seconds since the training began")
    curves.legend(frameon=False, loc="lower right")
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description="3-D segmentation with and without a cache")
    parser.add_argument("--folder", type=Path, help="where the volumes are written, and stay; else nowhere")
    parser.add_argument("--plot", type=Path, help="save a plot there, a PNG")
    parser.add_argument("--volumes", type=int, default=40, help="to train on")
    parser.add_argument("--size", type=int, default=176, help="voxels of a volume, in its plane")
    parser.add_argument("--resident", type=int, default=20, help="volumes in the window")
    parser.add_argument("--replace", type=float, default=0.1, help="the share that leaves after an epoch")
    parser.add_argument("--crop", type=int, default=72, help="voxels of a crop, in each direction")
    parser.add_argument("--batch", type=int, default=2, help="crops in a step")
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--workers", type=int, default=2, help="of each loader")
    words = parser.parse_args()
    torch.set_num_threads(1)  # the workers want the other core
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = temporary  # an optimizer's first step makes this folder
        folder = words.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        items = write_volumes(folder, words.volumes + HELD_OUT, words.size)
        mebibytes = sum(Path(item[key]).stat().st_size for item in items for key in KEYS) / 2**20
        print(f"{len(items)} synthetic volumes, {mebibytes:,.0f} MiB of .nii.gz, {HELD_OUT} of them held out")
        found = list(runs(items, words))
    # By then each of the caches has what it is to hold.
    filled = min(-(-words.volumes // words.batch), words.steps // 2)
    print_table(found, filled)
    if words.plot is not None:
        draw(found, filled, words.plot)
        print(f"saved {words.plot}")


if __name__ == "__main__":
    main()
