"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `doctor`: its checks, one object in JSON, and what to do about a failure.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config.compose import CONF

from ..warm import Warm

TINY = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=4", "model.n_mixer_layers=1", "data.n_train=5", "data.num_workers=0",
    "trainer.accelerator=cpu",
]  # fmt: skip


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(warm: Warm, tmp_path: Path) -> Run:
    """run(overrides): exit code, standard output and standard error. Its own process has no other tensors."""

    def start(*overrides: str) -> tuple[int, str, str]:
        done = warm.run("-m", "qnmixer.doctor", *TINY, *overrides, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return start


def test_a_healthy_machine_as_one_object(run: Run, tmp_path: Path) -> None:
    code, stdout, _ = run("format=json")
    outcome: dict[str, Any] = json.loads(stdout)
    assert (code, outcome["ok"]) == (0, True), stdout
    assert all(set(check) == {"name", "status", "found", "mend"} for check in outcome["checks"])
    status = {check["name"]: check["status"] for check in outcome["checks"]}
    assert status["gradients"] == status["sharding"] == status["memory growth"] == "PASS"
    assert status["communication"] == "SKIP"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_says_how_to_fix_it_and_the_rest_is_skipped(run: Run) -> None:
    code, stdout, stderr = run("strategy=ddp")
    lines = stdout.splitlines()
    assert (code, stderr) == (1, "")
    (failed,) = [line for line in lines if line.startswith("FAIL")]
    assert failed.split()[1] == "devices"
    assert "Fix: give trainer.devices=4" in failed
    assert lines[-1].startswith("SKIP  training")
    assert "devices failed" in lines[-1]


def test_a_config_that_train_would_refuse_is_refused(run: Run) -> None:
    code, stdout, stderr = run("formt=json")
    assert (code, stdout) == (1, "")
    assert stderr == "error: unknown key formt: did you mean format?\n"


@pytest.mark.slow
def test_help_says_what_it_is_for() -> None:
    result = subprocess.run([sys.executable, "-m", "qnmixer.doctor", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "python -m qnmixer.doctor trainer.devices=4 strategy=ddp" in result.stdout
    assert (CONF / "doctor.yaml").read_text().startswith("# ")
