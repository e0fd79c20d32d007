import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc"),
]


def measured(folder: Path, *arguments: str) -> dict[str, dict[str, float]]:
    """What the bench writes, by line and column."""
    path, script = folder / "memory.json", Path(__file__).with_name("bench_memory.py")
    subprocess.run([sys.executable, script, "--json", path, *arguments], check=True)
    table: dict[str, dict[str, float]] = {}
    for _, line, column, value, *_ in json.loads(path.read_text())["rows"]:
        table.setdefault(line, {})[column] = value
    return table


def test_the_plan_is_within_ten_percent_of_real_steps(tmp_path: Path) -> None:
    """One of the benchmark's configurations, measured in a process of its own; `make bench` runs all."""
    (row,) = measured(tmp_path, "--configs", "3", "--pipelines").values()
    assert row["measured"] > 100
    assert row["planned : measured"] == pytest.approx(1, abs=0.1)


def test_a_device_of_four_holds_a_third_of_the_activations(tmp_path: Path) -> None:
    """One micro-batch in flight through 16 iterations, four processes; `make bench` measures 1f1b too."""
    rows = list(measured(tmp_path, "--configs", "--pipelines", "0").values())
    assert len(rows) == 5
    assert all(row["planned : measured"] == pytest.approx(1, abs=0.1) for row in rows)
    for device in rows[1:]:
        assert max(device["activations, planned : of one"], device["activations, measured : of one"]) <= 0.35
