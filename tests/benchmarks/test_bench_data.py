import json
import subprocess
import sys
from pathlib import Path

import pytest

TINY = (
    "data.image_size=16 data.batch_size=2 data.num_workers=1 geometry.n_views=8 geometry.n_detectors=24 "
    "geometry.detector_pitch=40 model.n_iterations=2 model.channels=4 model.n_mixer_layers=1 trainer.accelerator=cpu "
    "logger=csv"
)


@pytest.mark.slow
@pytest.mark.long
def test_bench_measures_and_writes_what_it_shows(tmp_path: Path) -> None:
    script, path = Path(__file__).with_name("bench_data.py"), tmp_path / "new folder" / "data.json"
    command = [sys.executable, script, "--slices", "4", "--steps", "3", "--json", path]
    command += ["--trainings", "demo", "--overrides", TINY]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    record = json.loads(path.read_text())
    assert [(row["image_size"], row["workers"]) for row in record["loader"]] == [
        (size, workers) for size in (64, 256) for workers in (0, 1, 2)
    ]
    assert all(row["slices_per_second"] > 0 for row in record["loader"])
    (training,) = record["training"]
    assert training["training"] == "demo"
    assert 0 < training["waiting_share"] < 1
    assert f"{training['step_s']:.3f} s" in shown
    assert 0 < record["start"]["help_s"] < record["start"]["first_step_s"]["demo"]
    assert f"{record['start']['help_s']:.2f} s" in shown
    assert list(tmp_path.iterdir()) == [path.parent]
