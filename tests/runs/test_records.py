"""Records that no run has written: one line says what is wrong, within bounds of time and memory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.limits import within_limits

from qnmixer.errors import DataError
from qnmixer.runs.loggers import MetricsFile
from qnmixer.runs.records import read_results
from qnmixer.runs.run import overrides_of
from qnmixer.runs.sweeps import rows_of

BRACKETS = b"[" * 200_000
SWEEP = {"overrides": [], "varying": [], "jobs": None}


def rows(folder: Path) -> object:
    return MetricsFile(folder, resumed_at=9).kept_rows


@pytest.mark.parametrize(("name", "content", "read"), [
    ("metrics.csv", b"step,a\n1,2\n\0\0\0\n", rows),
    ("metrics.csv", b"step,a\n1,caf\xe9\n", rows),
    ("metrics.csv", b"step,a\n1,2,3\n", rows),
    ("metrics.csv", b"step,a\n1\n", rows),
    ("metrics.csv", b"a,b\n1,2\n", rows),
    ("metrics.csv", b"step,a\n" + b"1" * 5000 + b",2\n", rows),
    ("metrics.csv", b"step,a\n1," + b"x" * 200_000 + b"\n", rows),
    ("results.json", BRACKETS, read_results),
    ("results.json", b"{}" + b" " * 2**24, read_results),
    ("results.json", b'{"overrides": [1, {}]}', overrides_of),
    ("results.json", b'{"status": ["done"]}', read_results),
    ("results.json", b'{"status": "done", "steps": "many"}', read_results),
    ("sweep.json", json.dumps(SWEEP | {"jobs": ["0"]}).encode(), rows_of),
    ("sweep.json", json.dumps(SWEEP | {"jobs": {"0": "seed=1"}}).encode(), rows_of),
], ids=lambda it: it[:40].decode("latin-1") if isinstance(it, bytes) else None)  # fmt: skip
def test_a_damaged_record_is_a_line(tmp_path: Path, name: str, content: bytes, read: Callable[[Path], object]) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with within_limits(), pytest.raises(DataError, match=r"is damaged, or another program wrote it \(.*\): ") as error:
        read(tmp_path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < len(str(path)) + 250
    assert "\n" not in str(error.value)


def test_a_job_without_results_of_its_own_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "results.json").write_text('{"status": "done", "best": {"val/psnr": 3.0}}')
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "results.json").write_text("{}")
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    (first, second) = rows_of(tmp_path)
    assert (first.numbers[0], second.status) == (3.0, "not begun")
