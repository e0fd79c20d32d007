import json
from pathlib import Path

import pytest

from ..warm import Warm


@pytest.mark.slow
def test_bench_measures_and_writes_what_it_shows(warm: Warm, tmp_path: Path) -> None:
    script = Path(__file__).with_name("bench_operator.py")
    path = tmp_path / "new folder" / "operator.json"
    done = warm.run(str(script), "--views", "8", "--beams", "fan_flat", "parallel", "--json", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    rows = record["rows"]
    assert [(row["beam"], row["operator"], row["batch"]) for row in rows] == [
        (beam, operator, batch)
        for beam in ("fan_flat", "parallel")
        for batch in (1, 4, 16)
        for operator in ("A", "Aᵀ", "FBP")
    ]
    assert all(row["times_flat_per_value"] == 1 for row in rows[:9])
    assert all(row["times_flat_per_value"] > 0 for row in rows)
    assert record["copy_bytes_per_second"] > 1e8
    assert all(row["times_floor"] > 0 for row in rows)
    assert rows[0]["times_bytes"] > rows[3]["times_bytes"] > 1
    assert f"{rows[0]['ms_per_image']:.2f}" in done.stdout
    with_astra = [row["times_faster"] is not None for row in rows if row["operator"] != "FBP"]
    assert all(with_astra) or ("ASTRA is absent" in done.stdout and not any(with_astra))
