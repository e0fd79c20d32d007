import json
from pathlib import Path

from .findings import Findings, markdown


def test_one_table_and_one_file(tmp_path: Path) -> None:
    findings = Findings(passed=2, failed=["test_gpu.py::test_x[cuda-a]", "test_gpu.py::test_x[cuda-b]"])
    for network, error in (("a", 0.25), ("b", 0.5)):
        findings.add("gradient", f"{network}, keep, 32", error, "relative")
    findings.add("A", "256², 32 views, batch 1", 0.01234, "ms", 1.51)
    findings.add("measured peak : plan", "T = 14, keep", 1.0312)
    findings.write(tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text())["found"][2]["value"] == 0.01234
    table = (tmp_path / "gpu.md").read_text()
    assert "2 of 4 tests passed.\n\nFailed: `test_gpu.py::test_x[cuda-a] and [cuda-b]`.\n" in table
    assert "| A | 256², 32 views, batch 1 | 0.0123 ms | 2 |" in table
    assert "| gradient | b, keep, 32 (largest of 2) | 0.5 relative |  |" in table
    assert "| measured peak : plan | T = 14, keep | 1.03 |  |" in table


def test_the_table_of_the_results_is_that_of_its_figures() -> None:
    path = Path(__file__).parents[2] / "notebooks" / "results" / "gpu.json"
    assert path.with_suffix(".md").read_text() == markdown(json.loads(path.read_text()))
