"""The documentation site: it builds without a warning, has every public name, and works as files.

The browser is Debian's Chromium, which tests/chromium.py drives over pipes. Where it, or what builds the site
(the extra ``docs``), is missing, those tests are skipped with a sentence.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import chromium
import pytest
from fake_server import FakeServer
from helpers import often

import hotset
import hotset.integrations

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WIDTHS = (375, 1280)
BRIGHTNESS = (
    "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
)
# Clara's reader has classes for hotset itself; users write from_config.
OURS = {"hotset.integrations.clara_config"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: a warning fails."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason=f"{module} is not installed; the extra `docs` has it")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


@pytest.fixture
def _nothing_left_behind() -> None:
    """In place of the check after each test: the browser, which serves all tests, has processes meanwhile."""


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    if chromium.program() is None:
        pytest.skip(chromium.MISSING)
    with chromium.Browser() as opened:
        yield opened


# ---- the files -----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page fetches, and the places on it that links lead to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        fetched = found.get("href") if tag == "link" else found.get("src")
        if fetched and found.get("rel") not in ("next", "prev", "canonical"):
            self.fetched.append(fetched)


def pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for file in pages(site):
        for fetched in Page(file).fetched:
            assert not re.match(r"(?:https?:)?//", fetched), f"{file.name} fetches {fetched}"
            assert fetched.startswith("data:") or (file.parent / fetched.split("?")[0]).is_file(), fetched
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text()), style.name


def public_names() -> Iterator[str]:
    yield from (f"hotset.{name}" for name in hotset.__all__ if name != "collate")
    yield from (f"hotset.collate.{name}" for name in hotset.collate.__all__)
    for module in pkgutil.iter_modules(hotset.integrations.__path__, "hotset.integrations."):
        if module.name not in OURS:
            text = Path(str(module.module_finder.path), f"{module.name.rpartition('.')[2]}.py").read_text()  # type: ignore[union-attr]
            names = re.search(r"^__all__ = \[(.*?)\]", text, re.M | re.S)
            assert names is not None, module.name
            yield from (f"{module.name}.{name}" for name in re.findall(r'"(\w+)"', names[1]))


def promised_names() -> set[str]:
    """What README and the documents write as code, apart from modules."""
    text = "".join(path.read_text() for path in [ROOT / "README.md", *DOCS.glob("*.md")])
    found = set()
    for name in re.findall(r"`(hotset(?:\.\w+)+)", text):
        try:
            importlib.import_module(name)
        except ImportError:
            found.add(name)
    return found


def test_each_public_name_is_in_the_reference(site: Path) -> None:
    documented = {name for file in (site / "reference").glob("*.html") for name in Page(file).ids}
    assert set(public_names()) - documented == set()
    assert {name for name in promised_names() if name not in documented} == set()


def test_each_command_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text()
    for command in ("run", "start", "session create", "cluster status", "check", "gc", "explain"):
        assert f">hotset {command}<" in text


def test_plots_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    plots = importlib.import_module("plots").plots()
    for name, text in plots.items():
        assert (DOCS / "plots" / name).read_text() == text, "run: python docs/tools/plots.py"
    assert {path.name for path in (DOCS / "plots").iterdir()} == set(plots)


# ---- the browser ---------------------------------------------------------------------------------------


def faults(browser: chromium.Browser, url: str) -> list[str]:
    """What is wrong with a page, narrow and wide, light and dark: the scheme changes no width."""
    found = []
    browser.look(WIDTHS[0], "light", height=300)
    browser.open(url)
    for width, scheme in ((WIDTHS[0], "light"), (WIDTHS[1], "light"), (WIDTHS[1], "dark")):
        browser.look(width, scheme, height=300)
        taken = browser.ask("document.documentElement.scrollWidth")
        if taken > width:
            found.append(f"it is {taken} pixels wide where {width} are")
        # The page hears of a change with its next frame.
        browser.wait_for(f"{BRIGHTNESS} {'>' if scheme == 'light' else '<'} 3 * 128")
    broken = browser.ask("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
    return [*found, *(f"{image} is no picture" for image in broken), *browser.problems]


def looked_at(site: Path) -> set[Path]:
    """The first page, and of each part the longest one, which has most of what could be too wide.

    All of them in ``make chaos``.
    """
    folders: dict[tuple[str, ...], list[Path]] = {}
    for file in sorted(pages(site), key=lambda file: -file.stat().st_size):
        folders.setdefault(file.parent.relative_to(site).parts[:1], []).append(file)
    most = often(1, 1000)
    return {site / "index.html"}.union(*(files[:most] for files in folders.values()))


def test_each_page_works_as_a_file(site: Path, browser: chromium.Browser) -> None:
    wrong = {str(file.relative_to(site)): faults(browser, file.as_uri()) for file in sorted(looked_at(site))}
    assert {name: found for name, found in wrong.items() if found} == {}
    assert len(wrong) > often(3, 40)


def test_search_finds_a_word_as_a_file(site: Path, browser: chromium.Browser) -> None:
    browser.look(1280, "light")
    browser.open((site / "index.html").as_uri())
    browser.ask("document.querySelector('[data-md-component=search-query]').focus()")
    browser.press("num_workers")
    found = browser.wait_for(
        "[...document.querySelectorAll('.md-search-result__item')].map(item => item.textContent).join(' ')"
    )
    assert "num_workers" in found
    assert browser.problems == []


def test_the_status_page_fits_too(browser: chromium.Browser) -> None:
    with FakeServer() as fake:
        assert faults(browser, fake.url) == []
        browser.wait_for("document.querySelector('#state').textContent.includes('live')")
        assert browser.problems == []
