import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_plan_is_within_ten_percent_of_real_steps(tmp_path: Path) -> None:
    """Three of the benchmark's configurations, measured in processes of their own; `make bench` runs all."""
    path = tmp_path / "new folder" / "memory.json"
    script = Path(__file__).with_name("bench_memory.py")
    command = [sys.executable, script, "--json", path, "--configs", "0", "1", "4", "--iterations", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(path.read_text())
    assert len(result["plan"]) == 3
    for row in result["plan"]:
        assert row["measured_mib"] > 100
        assert row["ratio"] == pytest.approx(1, abs=0.1)
    assert f"{result['ratio']:.2f} times" in done.stdout
