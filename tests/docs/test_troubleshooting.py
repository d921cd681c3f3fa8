"""docs/troubleshooting.md has an entry for each sentence by which hotset warns, or refuses to cache.

The sentences are read from the source: what is given to ``warn`` and the functions around it, and to
``NotCacheable``. A call that hands on what another function has composed is listed in ``COMPOSED``, with the
functions that compose it; a new one that is not listed fails. An entry's heading is the telling part of its
sentence, with an ellipsis for what varies.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\N{HORIZONTAL ELLIPSIS}"
Modules = dict[str, list[tuple[str, ast.AST]]]  # by file: each function, with its name
# The position of the sentence among the arguments of each function that warns.
SINKS = {"warn": 0, "_warn": 0, "_warn_once": 0, "_tell": 2, "_read_uncached": 0, "_give_up": 0}
SINKS |= {"_hotset_warn": 0}
# Calls that hand a sentence on, and where it is composed; nothing where that is a sink itself.
COMPOSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("_warnings.py", "Warner.__call__"): (),
    ("cluster/client.py", "Peer.fail"): (),  # _warn says the rest
    ("cluster/client.py", "Peer.note_refusal"): (),
    ("dataset/build.py", "_current"): (
        "dataset/planning/memory_budget.py:memory_limit",
        "dataset/planning/memory_budget.py:window_sizes",
        "dataset/planning/memory_budget.py:_too_small",
        "dataset/streams/probe.py:_order_warning",
    ),
    ("cli/doctor.py", "doctor"): ("cli/doctor.py:_no_loader",),
    ("dataset/current_cache.py", "CurrentCache._read_uncached"): (),
    ("dataset/current_cache.py", "CurrentCache._follow_content"): (
        "dataset/current_cache.py:CurrentCache._has_changed",
    ),
    ("dataset/current_cache.py", "CurrentCache._follow_once"): (
        "dataset/current_cache.py:CurrentCache._has_changed",
    ),
    ("dataset/current_cache.py", "CurrentCache._cache_anew"): (
        "dataset/current_cache.py:CurrentCache._has_changed",
    ),
    ("dataset/fill_now.py", "fill_now"): (),
    ("memoize/calls.py", "Calls._tell"): (),
    ("dataset/planning/planner.py", "_read"): ("dataset/planning/lost_threads.py:polars_was_begun",),
    ("dataset/prefetch/pool.py", "PrefetchPool._warn"): (),
    ("dataset/sample_access.py", "SampleAccess.receive"): (
        "dataset/source_reader.py:SourceReader._read_alone",
        "session/reclaim.py:sentence_about",
    ),
    ("dataset/sample_access.py", "SampleAccess._compare"): ("dataset/audit.py:Audit.differs",),
    ("dataset/sample_access.py", "SampleAccess.warn_of_machines"): (),
    ("dataset/sample_access.py", "SampleAccess.warn_of_shortage"): ("dataset/sample_access.py:_shortage",),
    ("dataset/sample_access.py", "SampleAccess.warn_of_draws"): ("dataset/sample_access.py:_draws",),
    ("device/stall_monitor.py", "_watch"): ("device/queue.py:_StallWarning.__call__",),
    ("loader/loader.py", "DataLoader._from_workers"): (),
    ("loader/worker_batches.py", "WorkerBatches.__next__"): (),
    # These give up room, and say nothing.
    ("store/keyed_store.py", "KeyedAllocator._find"): (),
    ("store/ring.py", "RingAllocator._find"): (),
}


@pytest.fixture(scope="module")
def modules() -> Modules:
    """The functions of each module; 80 MB, which must not stay: each fork copies their page tables."""
    package = ROOT / "hotset"
    return {
        str(path.relative_to(package)): list(functions(ast.parse(path.read_text())))
        for path in sorted(package.rglob("*.py"))
    }


@pytest.fixture(scope="module")
def said(modules: Modules) -> list[tuple[str, str]]:
    return sorted(set(sentences(modules)))


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function of a module with its name, as ``Class.method``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield above + node.name, node
            yield from functions(node, above)
        else:
            inside = f"{node.name}." if isinstance(node, ast.ClassDef) else above
            yield from functions(node, inside)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            yield from own_nodes(node)


def texts(value: ast.AST, function: ast.AST) -> list[str]:
    """What an expression may be, with a hole for each part that is not known here."""
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else []
    if isinstance(value, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in value.values]
        return ["".join(map(str, parts))]
    if isinstance(value, ast.IfExp):
        return texts(value.body, function) + texts(value.orelse, function)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        sides = [texts(side, function) or [HOLE] for side in (value.left, value.right)]
        return [left + right for left in sides[0] for right in sides[1]]
    if isinstance(value, ast.Name):
        given = [
            node.value
            for node in own_nodes(function)
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == value.id for target in node.targets)
        ]
        return [text for each in given for text in texts(each, function)]
    return []


def is_telling(text: str, words: int = 3) -> bool:
    return len(re.findall(r"[a-z]{2,}", text.replace(HOLE, " "))) >= words


def name_of(call: ast.Call) -> str:
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def sentences(modules: Modules) -> Iterator[tuple[str, str]]:
    """(where, sentence) for each warning, and each dataset that is not cached."""
    composed = {source for sources in COMPOSED.values() for source in sources}
    for file, found_there in modules.items():
        for name, function in found_there:
            place = f"{file}:{name}"
            if place in composed:
                whole = [node for node in own_nodes(function) if isinstance(node, ast.JoinedStr)]
                said = [text for node in whole for text in texts(node, function) if is_telling(text, 5)]
                assert said, place
                yield from ((place, text) for text in said)
            for call in own_nodes(function):
                if not isinstance(call, ast.Call):
                    continue
                position = SINKS.get(name_of(call))
                if name_of(call) == "NotCacheable" or ast.unparse(call.func) == "warned.append":
                    position = 0
                if position is None or len(call.args) <= position:
                    continue
                found = [text for text in texts(call.args[position], function) if is_telling(text)]
                none = isinstance(call.args[position], ast.Constant) and not found
                if not found and not none and name_of(call) != name.rpartition(".")[2]:
                    assert (file, name) in COMPOSED, f"{place} hands on a sentence: list it in COMPOSED"
                yield from ((place, text) for text in found)


@cache
def entries() -> list[str]:
    return re.findall(r"^### (.+?)$", PAGE.read_text(), re.M)


def fits(heading: str, sentence: str) -> bool:
    pattern = ".*".join(re.escape(part.strip()) for part in heading.replace("`", "").split(HOLE))
    return re.search(pattern, sentence.replace("`", ""), re.S) is not None


def is_quoted(sentence: str) -> bool:
    """Whether an entry's text has the longest part of it: a sentence may be composed of several."""
    longest = max((part.strip(" .,;:") for part in sentence.split(HOLE)), key=len)
    return longest in PAGE.read_text()


def test_each_sentence_has_an_entry(said: list[tuple[str, str]]) -> None:
    assert len(said) > 100
    lacking = [
        f"{place}: {sentence}"
        for place, sentence in said
        if not any(fits(heading, sentence) for heading in entries()) and not is_quoted(sentence)
    ]
    assert lacking == [], "docs/troubleshooting.md lacks these"


def test_each_entry_is_of_a_sentence_and_says_what_to_do(said: list[tuple[str, str]]) -> None:
    known = [sentence for _, sentence in said]
    parts = re.split(r"^### (.+?)$", PAGE.read_text(), flags=re.M)[1:]
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        assert any(fits(heading, sentence) for sentence in known), f"no sentence is like: {heading}"
        assert "**Do:**" in text, heading


def test_the_reasons_why_machines_and_room_fail_are_there(modules: Modules) -> None:
    told = PAGE.read_text()
    from hotset.cluster import client, protocol  # they need an extra

    reasons = [*client._ENDS.values(), *(s.sentence for s in protocol.Status if s.name not in ("OK", "BUSY"))]
    for file in ("store/allocator.py", "store/spill.py"):
        for name, function in modules[file]:
            if name.rpartition(".")[2] in ("_limit_reached", "_file_system_full", "_no_memory"):
                joined = [node for node in own_nodes(function) if isinstance(node, ast.JoinedStr)]
                reasons += [text for node in joined for text in texts(node, function)]
    assert len(reasons) > 10
    assert [reason for reason in reasons if reason not in told] == []


def test_the_reasons_why_a_message_is_malformed_are_there(modules: Modules) -> None:
    """What another machine has sent is a part of a sentence (``Peer._warn``), and a part of a table's row."""
    told = PAGE.read_text()
    reasons = [
        text
        for file in ("cluster/protocol.py", "cluster/client.py")
        for _, function in modules[file]
        for call in own_nodes(function)
        if isinstance(call, ast.Call) and name_of(call) in ("Malformed", "fail")
        for text in (texts(call.args[0], function) if call.args else [])
    ]
    assert len(reasons) > 15
    assert [reason for reason in reasons if reason.strip(f": {HOLE}") not in told] == []


def test_places_that_hand_sentences_on_are_there(modules: Modules) -> None:
    there = {f"{file}:{name}" for file, found in modules.items() for name, _ in found}
    named = {f"{file}:{name}" for file, name in COMPOSED} | {s for each in COMPOSED.values() for s in each}
    assert named <= there, named - there
