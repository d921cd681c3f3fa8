"""Other libraries' tests run all of planning, also what other tests leave out for its time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _as_users_run_it(patched_libraries: None) -> None:
    """Functions of the user's are looked for in libraries' modules."""
