from pathlib import Path

from notebooks.benchmarks.measuring import Row

from .conftest import write


def test_what_failed_and_what_was_measured_is_one_file(tmp_path: Path) -> None:
    path, row = tmp_path / "bench" / "gpu.md", Row("A training step (× floor)", "keep", "time", 0.01234, "ms", 1.51)
    write(path, {"test_gpu.py::test_x[cuda]": False, "test_gpu.py::test_y[cuda]": True}, [row])
    text = path.read_text()
    assert ": 1 of 2 tests passed.\n\nFailed: `test_gpu.py::test_x[cuda]`.\n\n## A training step" in text
    assert "| keep | 0.0123 ms (1.51) |" in text
