"""Where the programs of these tests are forked from."""

from __future__ import annotations

import decoding
import pytest
from programs import Programs


@pytest.fixture(scope="session")
def forking(programs: Programs) -> None:
    decoding.programs = programs
