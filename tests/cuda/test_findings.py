import json
from pathlib import Path

from .findings import Findings


def test_one_table_and_one_file(tmp_path: Path) -> None:
    findings = Findings(passed=2, failed=["test_gpu.py::test_x[cuda]"])
    findings.add("A", "256², 32 views, batch 1", 0.01234, "ms", 1.51)
    findings.add("measured peak : plan", "T = 14, keep", 1.0312)
    findings.write(tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text())["found"][0]["value"] == 0.01234
    table = (tmp_path / "gpu.md").read_text()
    assert "2 of 3 tests passed.\nFailed: `test_gpu.py::test_x[cuda]`." in table
    assert "| A | 256², 32 views, batch 1 | 0.0123 ms | 1.5 |" in table
    assert "| measured peak : plan | T = 14, keep | 1.03 |  |" in table
