"""Everything that the documents show runs: their programs, and the files in examples/."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import rarely
from PIL import Image
from programs import Programs

import hotset

ROOT = Path(__file__).parents[2]
# Where warnings are errors, importing these libraries fails; their own test files run those examples.
ELSEWHERE = {"accelerate_loop", "lightning_trainer", "segmentation_volumes"}
ELSEWHERE |= {"quickstart_session", "evaluation_session", "slow_storage", "sweep_session"}
ELSEWHERE |= {"device_accelerate", "device_lightning", "lenet", "lenet_jax"}
ELSEWHERE |= {"cluster_train"}
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").glob("*.py")
    if path.stem not in ELSEWHERE and "__main__" in path.read_text()
)
# Ranks and the frozen encoder have tests of their own; the others show what is tested nowhere else.
RARE = [path for path in EXAMPLES if path.stem in ("ddp", "frozen_encoder")]
SMALL = {"frozen_encoder": ["--samples", "32", "--epochs", "2"]}


Run = Callable[[list[str], Path], str]


@pytest.fixture
def run(programs: Programs) -> Run:
    """A function that runs a program and returns what it prints; warnings are errors."""

    def run(program: list[str], cwd: Path) -> str:
        # albumentations asks a server for its newest version when it is imported, unless told not to.
        settings = {"PYTHONWARNINGS": "error", "NO_ALBUMENTATIONS_UPDATE": "1"}
        done = programs.run(program, cwd, settings, trains=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("example", rarely(EXAMPLES, *RARE), ids=lambda path: path.stem)
def test_examples_run_and_print(run: Run, example: Path, tmp_path: Path) -> None:
    assert run([str(example), *SMALL.get(example.stem, [])], tmp_path).strip()


@pytest.mark.chaos
def test_lenet_trains_alike_in_all_three_ways(run: Run, tmp_path: Path) -> None:
    printed = run([str(ROOT / "examples" / "lenet.py"), "--epochs", "2", "--sink-size", "30"], tmp_path)
    assert "epoch: 2 step: 30, loss is " in printed
    assert "60 steps" in printed
    ways = re.findall(r"for each call: loss ([\d.]+) after (\d+) steps", printed)
    assert len(ways) == 3
    assert len(set(ways)) == 1, ways
    assert int(ways[0][1]) == 2 * 44


def write_pictures(folder: Path) -> None:
    """Write a folder of small pictures in two classes, as ``ImageFolder`` reads them."""
    for number in range(6):
        file = folder / ("cats", "dogs")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 280), (40 * number, 90, 160)).save(file)


PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("training", "determinism", "window", "sinking", "memo")),
]
# Short programs: all of them in one process.
GUIDES = ["docs/start.md", *(f"docs/guides/{name}.md" for name in ("images", "text", "video", "ranks"))]
GUIDES += [f"docs/guides/{name}.md" for name in ("remote", "sessions", "sinking")]
# What other test files run: several machines, sessions, and libraries that do not import here.
RUN_ELSEWHERE = {"docs/cluster.md", "docs/sessions.md", "docs/clara.md", "docs/guides/volumes.md"}
RUN_ELSEWHERE |= {"docs/streams.md", "docs/guides/huggingface.md", "docs/guides/lightning.md"}


def programs_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_each_page_with_a_program_is_run() -> None:
    there = {f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in there if programs_of(page)} == {*PAGES, *GUIDES, *RUN_ELSEWHERE} - {"README.md"}


@pytest.mark.parametrize("pages", [*([page] for page in PAGES), GUIDES], ids=lambda pages: pages[0])
def test_programs_in_documents_run(run: Run, pages: list[str], tmp_path: Path) -> None:
    """Each as a main program, one after another in one process, as most of the time is torch's import."""
    programs = [program for page in pages for program in programs_of(page)]
    assert programs
    write_pictures(tmp_path / "pictures")
    # torchvision is importable beside a torch without CUDA only after this.
    first = "from benchmarks.operators import define_torchvision_operators as define; define()\n"
    for number, program in enumerate(programs):
        (tmp_path / f"program_{number}.py").write_text(program)
    names = [f"program_{number}.py" for number in range(len(programs))]
    everything = tmp_path / "everything.py"
    everything.write_text(
        f"{first}import runpy\nfor name in {names}:\n    runpy.run_path(name, None, '__main__')\n"
    )
    run([str(everything)], tmp_path)


def test_each_machine_has_a_window_over_its_own_subset(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program in docs/cluster.md, as the one rank of each of two machines runs it."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)
    (program,) = [each for each in programs if "Subset" in each]
    file = tmp_path / "program.py"
    file.write_text(program + "\nprint(*sorted(part.indices))\n")
    parts: list[set[str]] = []
    for machine in range(2):
        monkeypatch.setenv("RANK", str(machine))
        monkeypatch.setenv("WORLD_SIZE", "2")
        *said, indices = run([str(file)], tmp_path).splitlines()
        assert [line.rpartition(":")[0] for line in said] == [
            f"machine {machine}, rank {machine}, epoch {epoch}" for epoch in range(3)
        ]
        assert int(said[-1].split()[-2]) > 0
        parts.append(set(indices.split()))
    assert [len(part) for part in parts] == [300, 300]
    assert parts[0].isdisjoint(parts[1])


def test_every_relative_link_leads_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_file_that_the_architecture_names_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", (ROOT / "ARCHITECTURE.md").read_text()))
    assert {"store/gather.py", "loader/worker_messages.py", "tests/package/test_layers.py"} <= named
    for path in sorted(named):
        assert (ROOT / path).exists() or (ROOT / "hotset" / path).exists(), path


def test_each_figure_of_the_readme_is_on_a_page_that_says_how_it_was_measured() -> None:
    """Ratios and rates; the page has the machine and the command."""
    named, measured = (
        set(re.findall(r"\d[\d.,]*(?:x|/s)", (ROOT / page).read_text()))
        for page in ("README.md", "docs/benchmarks.md")
    )
    assert len(named) > 10
    assert named - measured == set()


def test_the_changelog_names_this_version() -> None:
    assert f"## {hotset.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_has_one_list_of_each_kind_for_a_version() -> None:
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions
    for version in versions:
        kinds = re.findall(r"^### (.*)", version, re.MULTILINE)
        assert kinds == [kind for kind in ("Added", "Changed", "Fixed") if kind in kinds]
