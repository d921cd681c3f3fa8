"""Each test of :class:`harness.Compatibility` runs for each program of its class."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize(
            "program", metafunc.cls.programs, ids=[each.name for each in metafunc.cls.programs]
        )


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Nothing is looked for: these libraries keep threads of their own."""
