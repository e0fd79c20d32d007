import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_plan_is_within_ten_percent_of_real_steps(tmp_path: Path) -> None:
    """One of the benchmark's configurations, measured in a process of its own; `make bench` runs all."""
    path = tmp_path / "new folder" / "memory.json"
    script = Path(__file__).with_name("bench_memory.py")
    command = [sys.executable, script, "--json", path, "--configs", "4", "--pipelines", "--iterations", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(path.read_text())
    (row,) = result["plan"]
    assert row["measured_mib"] > 100
    assert row["ratio"] == pytest.approx(1, abs=0.1)
    assert f"{result['ratio']:.2f} times" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_device_of_four_holds_a_third_of_the_activations(tmp_path: Path) -> None:
    """One micro-batch in flight through 16 iterations, four processes; `make bench` measures 1f1b too."""
    path = tmp_path / "memory.json"
    script = Path(__file__).with_name("bench_memory.py")
    command = [sys.executable, script, "--json", path, "--configs", "--pipelines", "0", "--iterations", "1"]
    subprocess.run(command, capture_output=True, text=True, check=True)
    single, *devices = json.loads(path.read_text())["pipelines"]
    assert [device["device"] for device in devices] == [0, 1, 2, 3]
    for row in (single, *devices):
        assert row["ratio"] == pytest.approx(1, abs=0.1)
    for device in devices:
        assert max(device["predicted_of_single"], device["measured_of_single"]) <= 0.35
