import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_bench_follows_a_series_and_its_memory_is_flat(tmp_path: Path) -> None:
    script, path = Path(__file__).with_name("bench_reconstruction.py"), tmp_path / "reconstruction.json"
    network = "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40"
    network += " model.n_iterations=2 model.channels=4 model.n_mixer_layers=1"
    command = [sys.executable, script, "--slices", "60", "--inputs", "slices", "--overrides", network]
    subprocess.run([*command, "--json", path], check=True)
    found = {column: value for _, _, column, value, *_ in json.loads(path.read_text())["rows"]}
    assert found["speed"] > 0
    assert found["resident at the end"] > 100
    assert found["memory, last tenth : first"] == pytest.approx(1, abs=0.1)
