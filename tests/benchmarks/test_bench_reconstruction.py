import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_bench_follows_a_series_and_its_memory_is_flat(tmp_path: Path) -> None:
    """The bench's own 1,000 slices are held to 5 %; a few small ones, with less around them, to 10 %."""
    script, path = Path(__file__).with_name("bench_reconstruction.py"), tmp_path / "reconstruction.json"
    network = "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40"
    network += " model.n_iterations=2 model.channels=4 model.n_mixer_layers=1"
    command = [sys.executable, script, "--slices", "60", "--inputs", "slices", "--overrides", network]
    done = subprocess.run([*command, "--json", path], capture_output=True, text=True, check=True)
    (row,) = json.loads(path.read_text())["series"]
    assert row["slices_per_second"] > 0
    assert row["mib_last_tenth"] > 100
    assert row["ratio"] == pytest.approx(row["mib_last_tenth"] / row["mib_first_tenth"])
    assert row["ratio"] == pytest.approx(1, abs=0.1)
    assert row["mib_peak"] >= row["mib_last_tenth"]
    assert f"{row['ratio']:.3f}" in done.stdout
