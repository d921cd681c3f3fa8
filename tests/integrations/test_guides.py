"""The programs of guides that need libraries which do not import where warnings are errors."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import pytest
import tqdm
from library_tables import need

from benchmarks.operators import define_torchvision_operators

DOCS = Path(__file__).parents[2] / "docs"
NEEDS = {
    "guides/volumes.md": "monai.data",
    "clara.md": "monai.data",
    "guides/huggingface.md": "datasets",
    "guides/lightning.md": "lightning.pytorch",
    "streams.md": "webdataset",
}

define_torchvision_operators()
# Bars would start a thread that stays.
tqdm.tqdm.monitor_interval = 0


@pytest.mark.parametrize("page", NEEDS)
def test_programs_in_guides_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(NEEDS[page])
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert programs
    for number, program in enumerate(programs):
        file = tmp_path / f"program_{number}.py"
        file.write_text(program)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(file), run_name="__main__")
