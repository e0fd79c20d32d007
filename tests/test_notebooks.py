"""Every notebook, its code run from top to bottom."""

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    matplotlib.use("Agg")
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) > 3
    namespace: dict[str, object] = {}
    for source in sources:
        exec(compile(source, str(path), "exec"), namespace)
    after, before = namespace["after"], namespace["before"]
    assert isinstance(after, list)
    assert isinstance(before, list)
    assert after[-1] > before[-1] > before[0]
