"""Another system than Linux: nothing runs there, and each name says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hotset
from hotset.errors import HotsetError, UnsupportedPlatform

ON_A_MAC = """
import sys

sys.platform = "darwin"

import hotset
from hotset import errors

for name in hotset.__all__:
    try:
        found = getattr(hotset, name)
    except hotset.UnsupportedPlatform as error:
        assert "on Linux only" in str(error), error
        assert "darwin" in str(error), error
        assert "torch.utils.data.DataLoader" in str(error), error
    else:
        assert found is getattr(errors, name), "nothing but errors, which programs catch"
print(hotset.__version__, "torch" in sys.modules)
"""


def test_each_public_name_is_refused_with_what_to_do_and_without_importing_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MAC],
        cwd=Path(hotset.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{hotset.__version__} False\n"), done.stderr


def test_it_is_an_error_of_hotsets_and_of_the_system() -> None:
    assert issubclass(UnsupportedPlatform, (HotsetError, OSError))
    assert hotset.UnsupportedPlatform is UnsupportedPlatform
