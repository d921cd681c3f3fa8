"""Docstring examples are true; apart from the documents, as the modules import large libraries."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import hotset

# The demo trains; JAX starts threads, after which no process may be forked: its own tests run its example.
SEPARATE = ("demo", "integrations.jax")
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(hotset.__path__, "hotset.")
    if not any(name in module.name for name in SEPARATE)
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_there_are_docstring_examples() -> None:
    finder = doctest.DocTestFinder()
    with_examples = [
        test.name for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples
    ]
    for public in ("build.cache", "loader.DataLoader", "codecs.register_codec", "collate.pad"):
        assert any(name.endswith(public) for name in with_examples), public
