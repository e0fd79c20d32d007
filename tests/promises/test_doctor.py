"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `doctor`: its checks, one object in JSON, and what to do about a failure.
"""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from qnmixer.doctor import doctor
from qnmixer.engine import cli
from qnmixer.engine.config.commands import parse_doctor
from qnmixer.engine.config.search_path import CONF

TINY = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=4", "model.n_mixer_layers=1", "data.n_train=5", "data.num_workers=0",
    "trainer.accelerator=cpu",
]  # fmt: skip


def run(folder: Path, *overrides: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, in this process."""
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["doctor", *TINY, *overrides])
        patch.delenv(cli.TRACEBACK, raising=False)
        try:
            cli.run(doctor, parse_doctor, "doctor")
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, stdout.getvalue(), stderr.getvalue()


def test_a_healthy_machine_as_one_object(tmp_path: Path) -> None:
    code, stdout, _ = run(tmp_path, "format=json")
    outcome: dict[str, Any] = json.loads(stdout)
    assert (code, outcome["ok"]) == (0, True)
    assert all(set(check) == {"name", "status", "found", "mend"} for check in outcome["checks"])
    status = {check["name"]: check["status"] for check in outcome["checks"]}
    assert status["gradients"] == status["sharding"] == status["memory growth"] == "PASS"
    assert status["communication"] == "SKIP"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_says_how_to_fix_it_and_the_rest_is_skipped(tmp_path: Path) -> None:
    code, stdout, stderr = run(tmp_path, "strategy=ddp")
    lines = stdout.splitlines()
    assert (code, stderr) == (1, "")
    (failed,) = [line for line in lines if line.startswith("FAIL")]
    assert failed.split()[1] == "devices"
    assert "Fix: give trainer.devices=4" in failed
    assert lines[-1].startswith("SKIP  training")
    assert "devices failed" in lines[-1]


def test_a_config_that_train_would_refuse_is_refused(tmp_path: Path) -> None:
    code, stdout, stderr = run(tmp_path, "formt=json")
    assert (code, stdout) == (1, "")
    assert stderr == "error: unknown key formt: did you mean format?\n"


@pytest.mark.slow
def test_help_says_what_it_is_for() -> None:
    result = subprocess.run([sys.executable, "-m", "qnmixer.doctor", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "python -m qnmixer.doctor trainer.devices=4 strategy=ddp" in result.stdout
    assert (CONF / "doctor.yaml").read_text().startswith("# ")
