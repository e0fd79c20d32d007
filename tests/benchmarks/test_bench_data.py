import json
import subprocess
import sys
from pathlib import Path

import pytest

TINY = (
    "data.image_size=16 data.batch_size=2 data.num_workers=1 geometry.n_views=8 geometry.n_detectors=24 "
    "geometry.detector_pitch=40 model.n_iterations=2 model.channels=4 model.n_mixer_layers=1 trainer.accelerator=cpu"
)


@pytest.mark.slow
@pytest.mark.long
def test_bench_measures_loader_waiting_and_start(tmp_path: Path) -> None:
    script, path = Path(__file__).with_name("bench_data.py"), tmp_path / "new folder" / "data.json"
    command = [sys.executable, script, "--slices", "4", "--steps", "3", "--json", path]
    command += ["--trainings", "demo", "--overrides", TINY]
    subprocess.run(command, check=True, cwd=tmp_path)
    found = {tuple(row[1:3]): row[3] for row in json.loads(path.read_text())["rows"]}
    assert all(value > 0 for value in found.values())
    assert found["demo, 16², T = 2, batch 2", "waiting for data"] < 100
    assert found["train --help", "until its end"] < found["train, demo", "until the first step has ended"]
    assert list(tmp_path.iterdir()) == [path.parent]
