"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `doctor`: its checks, one object in JSON, and what to do about a failure.
"""

import json
from pathlib import Path

import pytest

from ..conftest import TINY as COMMON
from .commands import Command

pytestmark = pytest.mark.slow

TINY = [word for word in COMMON if word.startswith(("data.im", "data.num", "geometry", "model", "trainer.acc"))]
TINY.append("data.n_train=5")


def test_a_healthy_machine_as_one_object(command: Command, tmp_path: Path) -> None:
    outcome = command(tmp_path, "doctor", *TINY, "format=json")
    report = json.loads(outcome.stdout)
    assert (outcome.code, report["ok"]) == (0, True), outcome.stdout
    assert all(set(check) == {"name", "status", "found", "mend"} for check in report["checks"])
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert status["gradients"] == status["sharding"] == status["memory growth"] == "PASS"
    assert status["communication"] == "SKIP"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_says_how_to_fix_it_and_the_rest_is_skipped(command: Command, tmp_path: Path) -> None:
    outcome = command(tmp_path, "doctor", *TINY, "strategy=ddp")
    lines = outcome.stdout.splitlines()
    assert (outcome.code, outcome.stderr) == (1, "")
    (failure,) = [line for line in lines if line.startswith("FAIL")]
    assert failure.split()[1] == "devices"
    assert "Fix: give trainer.devices=4" in failure
    assert lines[-1].startswith("SKIP  training")
    assert "devices failed" in lines[-1]
