"""Promise 5: Sweeps: a process tree a job, resumable, one bad job does not stop the rest. W&B offline, same names for
every method, nothing private.

Jobs that `wandb agent` starts: the command line as its own code builds it, against a stand-in for W&B's server.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import DEFAULT_SWEEP_COMMAND, create_sweep_command, create_sweep_command_args

from qnmixer.engine.config.compose import CONF
from qnmixer.engine.tracking.results import read_results

from ..warm import Warm

TINY = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=4", "model.n_mixer_layers=1", "model.detail_channels=0",
    "data.num_workers=0", "data.n_train=4", "data.n_val=2", "trainer.max_steps=2", "trainer.val_every_n_steps=1",
    "trainer.accelerator=cpu", "test_after_training=false",
]  # fmt: skip
SWEEP = yaml.safe_load((CONF / "wandb_sweep.yaml").read_text())


def command_line(command: list[str], python: Path, program: str, values: dict[str, Any]) -> list[str]:
    """What the agent runs for one choice of the parameters (wandb_agent.py: Agent._command_run)."""
    words = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    words |= {"env": ["/usr/bin/env"], "interpreter": [str(python)], "program": [program]}
    built = []
    for word in create_sweep_command([*command]):
        built += words[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    return built


@pytest.mark.slow
def test_an_agent_runs_two_jobs_of_the_ready_sweep(warm: Warm, tmp_path: Path, wandb_server: Any) -> None:
    at = SWEEP["command"].index("${args_no_hyphens}")
    ours = [*SWEEP["command"][:at], *TINY, *SWEEP["command"][at:]]
    wandbs_own = [*DEFAULT_SWEEP_COMMAND, *TINY, "logger.wandb.mode=online", "hydra.run.dir=second"]
    jobs: dict[str, tuple[list[str], dict[str, Any], Path]] = {
        "first111": (ours, {"optimizer.lr": 0.002, "loss": "l1"}, Path("runs/wandb_sweeps/s1/first111")),
        "second22": (wandbs_own, {"optimizer.lr": 0.003, "trainer.gradient_clip_val": None}, Path("second")),
    }
    for run_id, (command, values, folder) in jobs.items():
        assert values.keys() & SWEEP["parameters"].keys()
        program = SWEEP["program"] if command is ours else str(CONF.parent / "src" / "qnmixer" / "train.py")
        of_agent = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": run_id, "WANDB_DIR": str(tmp_path)}
        done = subprocess.run(
            command_line(command, warm.python, program, values), cwd=tmp_path, env=os.environ | of_agent,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        given = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
        assert {*given} <= {*read_results(tmp_path / folder)["overrides"]}
        assert (tmp_path / folder / "wandb" / "run_id").read_text() == run_id
    assert [*wandb_server.runs] == [*jobs]
    for run in wandb_server.runs.values():
        assert run["exit_code"] == 0
        assert [row["val/psnr"] for row in run["history"] if SWEEP["metric"]["name"] in row]
