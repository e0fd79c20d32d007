import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_bench_measures_and_writes_what_it_shows(tmp_path: Path) -> None:
    script = Path(__file__).with_name("bench_operator.py")
    path = tmp_path / "new folder" / "operator.json"
    done = subprocess.run([sys.executable, script, "--json", path], capture_output=True, text=True, check=True)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["operator"], row["batch"]) for row in rows] == [(op, b) for b in (1, 4) for op in ("A", "Aᵀ", "FBP")]
    assert all(row["ms"] > 0 for row in rows)
    assert f"{rows[0]['ms']:.2f}" in done.stdout
    with_astra = [row["times_faster_per_image"] is not None for row in rows if row["operator"] != "FBP"]
    assert all(with_astra) or ("ASTRA is absent" in done.stdout and not any(with_astra))
