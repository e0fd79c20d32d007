"""Promise 5: Sweeps: a process tree a job, resumable, one bad job does not stop the rest. W&B offline, same names for
every method, nothing private.

Runs whose W&B has no server, from the start or from some step on.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.tracking.records import read_metrics

from ..warm import Done, Warm
from .commands import PHANTOMS, STEPS, TINY, environment

OfflineRuns = Callable[[Path], list[Any]]


@pytest.mark.slow
@pytest.mark.xdist_group("commands")
def test_wandb_offline_needs_no_key_no_home_and_no_network(
    warm: Warm, tmp_path: Path, offline_runs: OfflineRuns
) -> None:
    folder, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    arguments = [*TINY, *PHANTOMS, "logger=wandb", f"hydra.run.dir={folder}"]
    env = environment(HOME=str(home), http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    done: Done = warm.run("-m", "qnmixer.train", *arguments, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("picture: ")
    assert not list(tmp_path.glob("wandb"))
    (run,) = offline_runs(folder)
    assert run.exit_code == 0
    assert [(row["_step"], row["samples"]) for row in run.history] == [(k, 2 * k) for k in range(1, STEPS + 1)]
    of_every_row = {"train/loss", "train/grad_norm", "train/lr", "train/lambda_0", "memory/allocated_mib"}
    assert all(of_every_row <= row.keys() for row in run.history)
    assert {"val/psnr", "test/psnr", "train/samples_per_second"} <= run.metrics
    files = run.folder / "files" / "media"
    assert len(list(files.glob("images/val/*.png"))) == 2
    (picture,) = files.glob("images/test/*.png")
    assert picture.read_bytes() == (folder / "evaluation" / "picture.png").read_bytes()
    (table,) = files.glob("table/test/*.json")
    (fbp, *of_fbp), (ours, *numbers) = json.loads(table.read_text())["data"]
    assert [fbp, ours] == ["FBP", "QN-Mixer"]
    assert all(isinstance(cell, float) for cell in [*of_fbp, *numbers])
    for name in ("picture.png", "page.html"):
        assert (run.folder / "files" / "evaluation" / name).samefile(folder / "evaluation" / name)


@pytest.mark.slow
@pytest.mark.usefixtures("no_wandb")
@pytest.mark.long
def test_training_continues_without_the_network(tmp_path: Path, wandb_server: Any) -> None:
    """A real run, whose server goes after the first validation: all its steps, one warning, a moment's wait."""
    tiny = (
        "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40 model.n_iterations=2 "
        "model.channels=4 model.n_mixer_layers=1 "
        "data.n_train=8 data.n_val=2 data.num_workers=0 trainer.max_steps=300 "
        "trainer.val_every_n_steps=20 trainer.log_every_n_steps=1 trainer.accelerator=cpu test_after_training=false"
    )
    command = [
        sys.executable,
        "-m",
        "qnmixer.train",
        *tiny.split(),
        "logger.wandb.mode=online",
        f"hydra.run.dir={tmp_path}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("pictures/*.png")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        wandb_server.leave()
        start = time.monotonic()
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert time.monotonic() - start < 120
    assert "step 300/300" in stdout
    assert f"W&B: {wandb_server.url}" in stdout
    assert [line for line in stderr.splitlines() if "W&B" in line and "wandb sync" in line] == [
        line for line in stderr.splitlines() if not line.startswith(" ")
    ]
    rows = read_metrics(tmp_path / "metrics.csv")
    assert sorted({int(row["step"]) for row in rows}) == list(range(1, 301))
    assert list(tmp_path.glob("wandb/run-*/*.wandb"))
