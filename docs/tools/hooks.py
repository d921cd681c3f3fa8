"""What the site has besides the pages in docs/: the reference, files elsewhere that pages link to, links.

Pages in docs/ are Markdown that reads well on a code host, too, so their links lead to files of the
repository. Here a link that leaves docs/ gets a page of its own, below ``source/``; and the reference, which
a code host could not show, is made of the names below.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Title, what the page is about, and its names.
REFERENCE: dict[str, tuple[str, str, list[str]]] = {
    "cache": (
        "Caching a dataset",
        "`hotset.cache` wraps a dataset; the rest says what may be cached.",
        [
            *(
                "hotset.cache",
                "hotset.CachedDataset",
                "hotset.CachedStream",
                "hotset.dataset.plan.Plan",
            ),
            "hotset.dataset.stats.Stats",
            *("hotset.Window", "hotset.deterministic", "hotset.nondeterministic", "hotset.split"),
            *("hotset.determinism.split.Split", "hotset.batched", "hotset.register_codec"),
        ],
    ),
    "loader": (
        "The loader",
        "`hotset.DataLoader` takes torch's arguments, and gives torch's batches.",
        [
            *("hotset.DataLoader", "hotset.loader.epoch_summary.EpochSummary"),
            *("hotset.collate.pad", "hotset.collate.ragged", "hotset.collate.Ragged"),
        ],
    ),
    "memo": (
        "Functions and arrays",
        "Results of functions, and slots that you set yourself, in shared memory.",
        [
            *("hotset.memo", "hotset.Memo", "hotset.memoize.memo_store.MemoStats"),
            *("hotset.SharedCache", "hotset.get_shm_size"),
        ],
    ),
    "device": (
        "On the device",
        "Batches that are copied ahead, and many steps in one call.",
        ["hotset.DeviceQueue", "hotset.device.queue.QueueStats", "hotset.data_sink", "hotset.Sink"],
    ),
    "train": (
        "Model, callbacks, metrics",
        "A training loop with sinking, callbacks and checkpoints.",
        [
            *("hotset.Model", "hotset.Callback", "hotset.LossMonitor", "hotset.TimeMonitor"),
            *("hotset.ModelCheckpoint", "hotset.EarlyStopping", "hotset.Accuracy", "hotset.Loss"),
        ],
    ),
    "sessions": (
        "Sessions from a program",
        "The functions that `hotset session` calls.",
        [
            *("hotset.session.sessions.create", "hotset.session.sessions.destroy"),
            *("hotset.session.sessions.find", "hotset.session.sessions.resize"),
            "hotset.session.sessions.sessions",
        ],
    ),
    "integrations": (
        "Integrations",
        "What other libraries need besides `hotset.DataLoader`, which most take as it is.",
        [
            "hotset.integrations.lightning.EpochEnds",
            "hotset.integrations.accelerate.from_cache",
            "hotset.integrations.clara.from_config",
            "hotset.integrations.jax.JaxSink",
        ],
    ),
    "errors": (
        "Errors and warnings",
        "Each is a built-in error as well. [Troubleshooting](../troubleshooting.md) goes by their text.",
        [
            *("hotset.HotsetError", "hotset.HotsetWarning", "hotset.ArgumentError", "hotset.QuantityError"),
            *("hotset.NotCacheable", "hotset.StateError", "hotset.LossNotFinite", "hotset.SegmentError"),
            *("hotset.FolderError", "hotset.SessionError", "hotset.ClusterError"),
            "hotset.UnsupportedPlatform",
        ],
    ),
}
# Pages that the navigation has a place for, and that may not be written yet.
LATER = ("doctor.md", "trainers.md")
COMMANDS = ("Commands", "What `hotset` and each of its commands print with `--help`.")
LINK = re.compile(r"(?<!`)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
NAMED = re.compile(r"\[([\w./-]+\.md)\]\(([\w./-]+\.md)")  # shown by its title
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
TABLE = re.compile(r"<table>.*?</table>", re.S)
PLOTTED = ("benchmarks.md", "compatibility.md")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for section in config.nav or []:
        for title, entries in section.items():
            section[title] = [each for each in entries if each not in LATER or (DOCS / each).is_file()]
        if "Reference" in section:
            section["Reference"] = [f"reference/{name}.md" for name in (*REFERENCE, "commands")]
        for entry in section.get("Inside", []):
            if "Decisions" in entry:
                entry["Decisions"] = [f"decisions/{path.name}" for path in decisions()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, (title, about, names) in REFERENCE.items():
        text = "\n\n".join(f"::: {each}" for each in names)
        add(files, config, f"reference/{name}.md", f"# {title}\n\n{about}\n\n{text}\n")
    title, about = COMMANDS
    add(files, config, "reference/commands.md", f"# {title}\n\n{about}\n\n{commands()}\n")
    for path in sorted(linked_from_docs()):
        add(files, config, site_uri(path), page_of(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = repository_path(page.file.src_uri)
    if place is None:
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = repository_target(place, link[1])
        if target is None:
            return link[0]
        uri = posixpath.relpath(site_uri(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"]({uri}{link[2] or ''})"

    def titled(link: re.Match[str]) -> str:
        target = repository_target(place, link[2])
        if target is None or not target.endswith(".md"):
            return link[0]
        title = re.search(r"^# (.+)$", (ROOT / target).read_text(), re.M)
        return f"[{title[1]}]({link[2]}" if title is not None else link[0]

    return outside_of_fences(markdown, lambda text: LINK.sub(moved, NAMED.sub(titled, text)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The first mention of a public name, unless it begins a cell or is a link, leads to the reference."""
    homes = {each: f"reference/{name}.html" for name, (_, _, names) in REFERENCE.items() for each in names}
    seen: set[str] = set()

    def linked(code: re.Match[str]) -> str:
        name = code[1]
        home = homes.get(name)
        if home is None or name in seen or page.file.src_uri.startswith(("reference/", "source/")):
            return code[0]
        seen.add(name)
        url = posixpath.relpath(home, posixpath.dirname(page.file.dest_uri) or ".")
        return f'<a href="{url}#{name}">{code[0]}</a>'

    parts = re.split(r"(<h[1-6].*?</h[1-6]>)", html, flags=re.S)  # headings stay as they are
    parts[::2] = [re.sub(r"(?<!>)<code>(hotset(?:\.\w+)+)[^<]*</code>", linked, part) for part in parts[::2]]
    html = "".join(parts)
    return TABLE.sub(folded, html) if page.file.src_uri in PLOTTED else html


def folded(table: re.Match[str]) -> str:
    """A long table whose figures a plot shows, to be opened by whoever wants the figures."""
    rows = table[0].count("<tr>") - 1
    if rows < 9:
        return table[0]
    return f"<details><summary>All {rows} rows as a table</summary>{table[0]}</details>"


# ---- files elsewhere -----------------------------------------------------------------------------------


def decisions() -> list[Path]:
    return sorted((DOCS / "decisions").glob("*.md"))


def repository_path(src_uri: str) -> str | None:
    """The file that a page is made of; None for pages of the reference."""
    if src_uri.startswith("source/"):
        path = src_uri.removeprefix("source/")
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return None if src_uri.startswith("reference/") else f"docs/{src_uri}"


def repository_target(place: str, link: str) -> str | None:
    """The file or folder of the repository that a link in the file ``place`` leads to."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def site_uri(path: str) -> str:
    """The page for a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path == "docs/decisions":
        return f"decisions/{decisions()[0].name}"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def linked_from_docs() -> set[str]:
    """Files and folders outside of docs/ that pages link to, and that those link to."""
    found: set[str] = set()
    waiting = [f"docs/{path.relative_to(DOCS)}" for path in sorted(DOCS.rglob("*.md"))]
    waiting += ["ARCHITECTURE.md", "CHANGELOG.md", "tests/README.md"]
    found |= {path for path in waiting if not path.startswith("docs/")}
    while waiting:
        place = waiting.pop()
        for link in links_in((ROOT / place).read_text()):
            target = repository_target(place, link)
            if target and not site_uri(target).startswith("source/"):
                continue
            if target and target not in found:
                found.add(target)
                waiting += [target] if target.endswith(".md") else []
    return found


def links_in(markdown: str) -> Iterator[str]:
    for link in LINK.finditer(FENCE.sub("", markdown)):
        yield link[1]


def page_of(path: str) -> str:
    """The text of the page for a file or a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(each.name for each in place.iterdir() if not each.name.startswith(("_", ".")))
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = place.read_text()
    if path.endswith(".md"):
        return text
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    return f"{hidden}# {path}\n\n````{LANGUAGES.get(place.suffix, 'text')}\n{text}````\n"


def add(files: Files, config: MkDocsConfig, uri: str, text: str) -> None:
    files.append(File.generated(config, uri, content=text))


def outside_of_fences(markdown: str, change: Any) -> str:
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


# ---- commands ------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its options, as its own help has them."""
    import typer

    from hotset.cli.main import app

    return "\n\n".join(command_text(typer.main.get_command(app), "hotset"))


def command_text(command: Any, name: str) -> Iterator[str]:
    parts = [f"## {name}" if name == "hotset" or name.count(" ") == 1 else f"### {name}"]
    if command.help:
        parts.append(re.sub(r"\n(?=\S)", " ", command.help.replace("\b", "").strip().split("\f")[0]))
    rows = []
    for option in command.params:
        shown = ", ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
        told = " ".join((getattr(option, "help", None) or "").split()).replace("|", "\\|")
        if shown not in ("--help", "--install-completion", "--show-completion"):
            rows.append(f"| `{shown}` | {told} |")
    if rows:
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    yield "\n\n".join(parts)
    for each, below in sorted(getattr(command, "commands", {}).items()):
        if not below.hidden:
            yield from command_text(below, f"{name} {each}")
