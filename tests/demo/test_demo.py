"""The demo: its photographs, its two runs, what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from rich.console import Console

from hotset.demo import report, training
from hotset.demo.photographs import Photographs, build
from hotset.demo.run import demo
from hotset.errors import ArgumentError

CLASSES = ["astronaut", "chelsea", "china", "coffee", "flower", "rocket"]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("photographs"), count=60)


@pytest.fixture(autouse=True)
def temporary(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty, so that what a test leaves there shows."""
    folder = short_folder / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("COLUMNS", "100")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# The photographs


def test_the_photographs_are_jpegs_of_the_size_asked_for_spread_over_six_classes(photographs: Path) -> None:
    found = Photographs(photographs)
    assert found.classes == CLASSES
    assert [label for _, label in found.samples] == [label for label in range(6) for _ in range(10)]
    for path, label in found.samples:
        assert Path(path).parent.name == CLASSES[label]
        with Image.open(path) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (512, 512))


def test_the_same_files_are_built_each_time(photographs: Path, tmp_path: Path) -> None:
    again = contents(build(tmp_path / "again", count=12))
    full = contents(photographs)
    assert len(set(full.values())) == 60
    assert again == {name: full[name] for name in again}


def test_building_reports_every_image_in_order(tmp_path: Path) -> None:
    seen: list[int] = []
    build(tmp_path, count=7, size=32, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("arguments", [{"count": 0}, {"size": 0}])
def test_what_cannot_be_built_is_refused(arguments: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        build(tmp_path, **arguments)


def test_a_users_folder_is_read_as_imagefolder_reads_it(tmp_path: Path) -> None:
    for name in (
        "b/2.JPG",
        "b/deep/1.webp",
        "a/1.png",
        "a/2.jpeg",
        "a/notes.txt",
        ".hidden/1.jpg",
        "empty/x.md",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = Photographs(tmp_path)
    assert found.classes == ["a", "b"]
    assert [(str(Path(path).relative_to(tmp_path)), label) for path, label in found.samples] == [
        ("a/1.png", 0),
        ("a/2.jpeg", 0),
        ("b/2.JPG", 1),
        ("b/deep/1.webp", 1),
    ]
    assert len(found) == 4
    assert found[3] == found[-1] == (str(tmp_path / "b/deep/1.webp"), 1)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "does not exist"),
        ("file", "is not a folder"),
        ("bare", "has no subfolders"),
        ("imageless", "holds an image"),
    ],
)
def test_a_folder_that_holds_no_classes_is_refused_by_name(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "imageless" / "class").mkdir(parents=True)
    with pytest.raises(ArgumentError, match=sentence) as caught:
        Photographs(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


# The pipeline and the timed loop


def test_loading_gives_the_resized_image_and_names_a_damaged_one(photographs: Path, tmp_path: Path) -> None:
    path, label = Photographs(photographs)[20]
    image, same = training.load_resized((path, label))
    assert (image.shape, image.dtype, same) == ((3, 224, 224), torch.uint8, label)
    with Image.open(path) as original:
        means = np.asarray(original).mean((0, 1))
    assert image.float().mean((1, 2)).numpy() == pytest.approx(means, abs=1.0)

    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(Path(path).read_bytes()[:2000])
    with pytest.raises(ArgumentError, match=re.escape(str(damaged))):
        training.load_resized((str(damaged), 0))


def test_the_live_step_crops_and_mirrors_and_draws_from_torch_alone() -> None:
    image = torch.arange(224 * 224).reshape(1, 224, 224).expand(3, -1, -1)
    others = random.getstate(), np.random.get_state()[1].copy()
    corners = set()
    mirrored = 0
    for _ in range(50):
        cropped, label = training.flip_and_crop((image, 4))
        assert (cropped.shape, label) == ((3, 192, 192), 4)
        step = int(cropped[0, 0, 1] - cropped[0, 0, 0])
        assert step in (1, -1)
        assert int(cropped[0, 1, 0] - cropped[0, 0, 0]) == 224
        mirrored += step == -1
        corners.add(int(cropped[0, 0, :].min()))
    assert 10 < mirrored < 40
    assert len(corners) > 40
    assert random.getstate() == others[0]
    assert np.array_equal(np.random.get_state()[1], others[1])


def batches(count: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    labels = [torch.arange(16) % 2 for _ in range(count)]
    noise = [torch.randint(0, 100, (16, 3, 192, 192), generator=generator) for _ in range(count)]
    return [
        [(one + 150 * label.reshape(-1, 1, 1, 1)).to(torch.uint8), label]
        for one, label in zip(noise, labels, strict=True)
    ]


def test_training_learns_and_repeats_itself_bit_for_bit() -> None:
    data = batches(4)
    runs = []
    for _ in range(2):
        with training.steady():
            runs.append([epoch.losses for epoch in training.train(data, classes=2, epochs=6)])
    assert runs[0] == runs[1]
    assert [len(losses) for losses in runs[0]] == [4] * 6
    assert sum(runs[0][-1]) < 0.5 * sum(runs[0][0])


def test_waiting_is_counted_apart_from_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(3)
    clock = 100.0

    class Slow:
        def __iter__(self):
            nonlocal clock
            for batch in data:
                clock += 2.0
                yield batch
            clock += 2.0

    def computed(samples: int) -> None:
        nonlocal clock
        counted.append(samples)
        clock += 0.5

    counted: list[int] = []
    monkeypatch.setattr("hotset.demo.training.time.perf_counter", lambda: clock)
    (epoch,) = training.train(Slow(), classes=2, epochs=1, on_batch=computed)
    assert (epoch.waited, epoch.seconds) == (8.0, 9.5)
    assert counted == [16, 16, 16]
    assert epoch.samples == 48


def test_training_puts_threads_and_generator_back() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with training.steady():
        assert torch.get_num_threads() == 1
        torch.manual_seed(3)
        torch.rand(5)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


# The report


def epoch(seconds: float, waited: float, *losses: float) -> training.EpochResult:
    return training.EpochResult(seconds, waited, 300, losses)


def comparison(**changes: object) -> report.Comparison:
    fields: dict[str, object] = {
        "title": "three hundred",
        "samples": 300,
        "plain": [epoch(3.0, 2.25, 1.0, 0.5), epoch(2.0, 1.5, 0.25, 0.125)],
        "cached": [epoch(4.0, 3.25, 1.0, 0.5), epoch(0.5, 0.0625, 0.25, 0.125)],
        "lookups": [(30, 270), (285, 15)],
        "cached_samples": 290,
        "cached_bytes": 5 * 2**20,
    }
    return report.Comparison(**(fields | changes))  # type: ignore[arg-type]


def printed(given: report.Comparison) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(report.table(given))
    return console.file.getvalue()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_the_table_shows_what_the_runs_measured() -> None:
    text = printed(comparison())
    assert rows(text) == [
        ["1", "torch", "3.00", "100", "-", "2.25"],
        ["", "hotset", "4.00", "75", "10.0%", "3.25"],
        ["2", "torch", "2.00", "150", "-", "1.50"],
        ["", "hotset", "0.50", "600", "95.0%", "0.06"],
        ["all", "torch", "5.00", "120", "-", "3.75"],
        ["", "hotset", "4.50", "133", "52.5%", "3.31"],
    ]
    assert "290 of 300 samples, 5 MiB" in text
    assert "4.00x torch's speed" in text
    assert "losses of all 4 steps are identical" in text


def test_a_single_epoch_claims_no_speed_and_no_lookups_no_rate() -> None:
    text = printed(comparison(plain=[epoch(1.0, 0.5, 1.0)], cached=[epoch(1.0, 0.5, 1.0)], lookups=[(0, 0)]))
    assert "torch's speed" not in text
    assert [row[4] for row in rows(text)] == ["-"] * 4


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ((0.25, 0.125000001), "epoch 2, step 2: 0.125 with torch, 0.125000001 with hotset"),
        ((0.25,), "epoch 2 took 2 steps with torch, 1 with hotset"),
    ],
)
def test_losses_that_differ_are_named(second: tuple[float, ...], sentence: str) -> None:
    given = comparison(cached=[epoch(4.0, 3.0, 1.0, 0.5), epoch(0.5, 0.1, *second)])
    assert not given.identical
    text = printed(given)
    assert sentence in " ".join(text.split())
    assert "identical" not in text


def test_the_plot_is_a_png_whose_bars_are_the_epochs(tmp_path: Path) -> None:
    report.draw(comparison(), tmp_path / "plot")
    with Image.open(tmp_path / "plot") as image:
        assert image.format == "PNG"
        assert image.width >= 800
        assert image.height >= 400
        pixels = np.asarray(image.convert("RGB"))
    grey, orange = ((pixels == colour).all(2).sum() for colour in ((0x8C, 0x8C, 0x8C), (0xD9, 0x48, 0x0F)))
    # Bars are as wide as one another, so that coloured areas are to each other as the seconds waited.
    assert orange / grey == pytest.approx((3.25 + 0.0625) / (2.25 + 1.5), rel=0.1)


# The demo as a whole


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[report.Comparison]:
    """Each comparison that the demo made, as it was drawn."""
    made: list[report.Comparison] = []
    draw = report.draw

    def drawing(given: report.Comparison, path: Path) -> None:
        made.append(given)
        draw(given, path)

    monkeypatch.setattr(report, "draw", drawing)
    return made


def test_the_demo_builds_compares_and_leaves_only_the_plot(
    tmp_path: Path,
    temporary: Path,
    compared: list[report.Comparison],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(psutil.Process().children(recursive=True))
    plot = tmp_path / "plot.png"
    assert demo(epochs=2, batch_size=16, count=60, plot=plot) == 0
    text = capsys.readouterr().out

    (made,) = compared
    assert [len(one.losses) for one in (*made.plain, *made.cached)] == [4] * 4
    assert [one.samples for one in (*made.plain, *made.cached)] == [60] * 4
    assert all(0 < one.waited < one.seconds for one in (*made.plain, *made.cached))
    assert made.identical
    (first_hits, first_misses), second = made.lookups
    assert first_hits + first_misses == 60
    assert first_misses > 50
    assert second == (60, 0)
    assert made.cached_samples == 60
    assert 60 * 3 * 224 * 224 <= made.cached_bytes < 60 * 3 * 224 * 224 * 1.1
    assert rows(text) == rows(printed(made))
    assert "losses of all 8 steps are identical" in text
    assert "torch's run was first" not in text

    with Image.open(plot) as image:
        assert image.format == "PNG"
    assert list(temporary.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_demo_trains_on_a_users_folder_and_leaves_it_alone(
    photographs: Path, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(photographs)
    assert demo(photographs, epochs=1, workers=0, batch_size=25, plot=tmp_path / "plot.png") == 0
    assert contents(photographs) == before
    assert list(temporary.iterdir()) == []
    text = capsys.readouterr().out
    assert "60 photographs, 6 classes, batches of 25, 0 workers" in text
    assert "torch's run was first" in text


def test_losses_that_differ_make_the_demo_fail(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ordinary = training.Decoded.__getitem__

    def darker(self: training.Decoded, index: int) -> tuple[torch.Tensor, int]:
        image, label = ordinary(self, index)
        return image // 2, label

    monkeypatch.setattr(training.Decoded, "__getitem__", darker)
    assert demo(photographs, epochs=1, workers=0, plot=tmp_path / "plot.png") == 1
    assert "losses differ: first in epoch 1, step 1" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named_in_one_sentence(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build(tmp_path / "photographs", count=6, size=64)
    broken = folder / "rocket" / "broken.png"
    broken.write_text("not an image")
    assert demo(folder, epochs=1, workers=workers, plot=tmp_path / "plot.png") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{broken} cannot be read as an image")
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"epochs": 0}, "epochs must be at least"),
        ({"workers": -1}, "workers must be at least"),
        ({"batch_size": 0}, "batch_size must be at least"),
        ({"count": 0}, "count must be at least"),
        ({"plot": Path("nowhere/plot.png")}, "nowhere/plot.png"),
        ({"plot": Path("/")}, "saved as /;"),
        ({"folder": Path("/nowhere")}, "/nowhere does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    arguments: dict[str, object],
    sentence: str,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo(**arguments) == 2  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("module", ["PIL", "matplotlib", "sklearn", "skimage"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert demo() == 2
    assert 'pip install "hotset[demo]"' in capsys.readouterr().err


def test_a_users_folder_needs_nothing_that_only_building_needs(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "skimage", None)
    assert demo(photographs, epochs=1, workers=0, plot=tmp_path / "plot.png") == 0


def test_no_room_for_the_photographs_is_said_with_the_knob(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Image.Image, *arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert demo(count=6) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "TMPDIR" in error
    assert list(temporary.iterdir()) == []


# Trains for as long as nobody stops it, in the first run (torch's) or in the second (hotset's), and makes
# the file "reached" at that run's first batch: in the middle of an epoch, not while workers start.
ENDLESS = """
import pathlib, signal, sys
from hotset.demo import training
from hotset.demo.run import demo

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
ordinary, runs = training.train, []

def train(loader, **options):
    runs.append(loader)
    if len(runs) < int(sys.argv[1]):
        return ordinary(loader, **options)
    reached = lambda samples: pathlib.Path("reached").touch()
    return ordinary(loader, **(options | {"epochs": 10**6, "on_batch": reached}))

training.train = train
sys.exit(demo(epochs=1, count=300, batch_size=10))
"""


@pytest.mark.chaos
@pytest.mark.parametrize(("number", "code", "run"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)])
def test_a_demo_that_is_stopped_leaves_nothing_behind(
    number: signal.Signals, code: int, run: int, temporary: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(run)],
        cwd=temporary.parent,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers: list[psutil.Process] = []
    try:
        while process.poll() is None and not workers:
            time.sleep(0.05)
            if (temporary.parent / "reached").exists():
                workers = psutil.Process(process.pid).children()
        assert workers, process.stderr.read()
        process.send_signal(number)
        _, error = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, error
    # A worker of torch's may say that its connection broke; of hotset's code no traceback may appear.
    assert "/hotset/" not in error
    assert ("Interrupted; nothing is left behind." in error) == (number == signal.SIGINT)
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert list(temporary.iterdir()) == []
    assert not (temporary.parent / "hotset-demo.png").exists()


def test_importing_the_demo_brings_nothing_heavy() -> None:
    script = (
        "import sys, hotset.demo, hotset.demo.run;"
        "print({'torch', 'numpy', 'PIL', 'sklearn', 'skimage', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
