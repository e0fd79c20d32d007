"""Promise 5: Sweeps: a process tree a job, resumable, one bad job does not stop the rest. W&B offline, same names for
every method, nothing private.

Sweeps from end to end: the results that a user finds in the morning.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qnmixer.settings.compose import compose

from ..conftest import PHANTOMS, TINY, csv_rows, offline_runs
from ..warm import FORK_RANKS, Warm
from .commands import Command

pytestmark = [pytest.mark.slow]

Start = Callable[..., Any]
DDP = ["strategy=ddp", "logger=wandb"]


def jobs(sweep: Path) -> list[dict[str, Any]]:
    """results.json of each job."""
    folders = sorted((path for path in sweep.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    return [json.loads((folder / "results.json").read_text()) for folder in folders]


def table(sweep: Path) -> list[dict[str, str]]:
    return csv_rows(sweep / "sweep.csv")


def test_jobs_of_several_processes_follow_each_other(start: Start, warm: Warm, tmp_path: Path) -> None:
    """Of two processes, of one, and of two again: what Hydra and Lightning by themselves deadlock on."""
    sweep, devices = ["-m", *DDP, "trainer.devices=2,1,2", "optimizer.lr=1e-3"], "212"
    code, stdout, stderr = start(*sweep, folder=None, under=warm.under, env=FORK_RANKS).outcome()
    assert (code, stderr) == (0, "")
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert folder.name.startswith("devices-")
    assert [job["status"] for job in jobs(folder)] == ["done"] * 3
    assert [line["trainer.devices"] for line in table(folder)] == [*devices]
    assert "on cpu × 1 devices" in stdout
    first_psnr, second_psnr, third_psnr = (float(line["val/psnr"]) for line in table(folder))
    assert third_psnr == first_psnr != second_psnr  # twice the batch

    runs = offline_runs(folder)
    assert sorted(run.name for run in runs) == sorted(f"trainer.devices={n}" for n in devices)
    assert {run.group for run in runs} == {folder.name}
    assert [run.exit_code for run in runs] == [0] * 3
    for run in runs:
        assert run.config["trainer"]["devices"] == int(run.name[-1])
        steps = [row["trainer/global_step"] for row in run.history if "train/loss" in row]
        assert steps == [1, 2, 3, 4]  # of one job, once

    code, stdout, stderr = start(*sweep, folder=None, under=warm.under).outcome()
    assert (code, stderr, stdout.count("already done")) == (0, "", 3)
    assert len([*folder.rglob("offline-run-*/*.wandb")]) == 3


def test_a_search_over_jobs_of_two_processes(start: Start, warm: Warm, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = ["-m", "hydra/sweeper=search", "strategy=ddp", "trainer.devices=2", "hydra.sweep.dir=search"]
    search += ["hydra.sweeper.n_trials=2", "optimizer.lr=tag(log, interval(1e-4, 1e-2))"]
    search += ["hydra.sweeper.storage=sqlite:///search.db", "hydra.sweeper.study_name=rates"]
    code, _, stderr = start(*search, folder=None, under=warm.under, env=FORK_RANKS).outcome()
    assert (code, stderr) == (0, "")
    records, rates = jobs(tmp_path / "search"), []
    for number, job in enumerate(records):
        (rate,) = (override.partition("=")[2] for override in job["overrides"] if override.startswith("optimizer.lr="))
        rates.append(rate)
        assert job["status"] == "done"
        config = (tmp_path / "search" / str(number) / ".hydra" / "config.yaml").read_text()
        assert f"lr: {rate}" in config
    assert len(set(rates)) == 2
    best_job = max(records, key=lambda job: job["best"]["val/psnr"])
    results = (tmp_path / "search" / "optimization_results.yaml").read_text()
    assert f"best_value: {best_job['best']['val/psnr']}" in results
    assert (tmp_path / "search" / "sweep.png").stat().st_size > 1000


def test_a_bad_and_a_crashing_job_leave_the_others_alone(start: Start, warm: Warm, tmp_path: Path) -> None:
    sweep = ["-m", "logger=wandb", "optimizer.lr=abc,1e9,1e-3", "hydra.launcher.jobs_at_once=2"]
    outcome = start(*sweep, "hydra.sweep.dir=sweep", folder=None, under=warm.under).outcome()
    assert outcome.error.startswith("2 of 3 jobs failed: 0, 1 (see sweep/sweep.md)")
    bad_job, crashed_job, good_job = jobs(tmp_path / "sweep")
    assert [bad_job["status"], crashed_job["status"], good_job["status"]] == ["failed", "failed", "done"]
    assert "optimizer.lr" in bad_job["error"]
    assert crashed_job["error"].startswith("FloatingPointError: the loss became nan")
    assert "error: the loss became nan" in (tmp_path / "sweep" / "1" / "output.log").read_text()
    assert "job 1 (optimizer.lr=1e+09): failed: FloatingPointError" in outcome.stdout
    assert {(run.name, run.exit_code) for run in offline_runs(tmp_path / "sweep")} == {
        ("optimizer.lr=1e+09", 1), ("optimizer.lr=0.001", 0)
    }  # fmt: skip
    markdown = (tmp_path / "sweep" / "sweep.md").read_text()
    assert f"- job 1: {crashed_job['error']}" in markdown


UNSAVED = ["trainer.val_every_n_steps=1000", "trainer.save_every_n_steps=null", "trainer.max_steps=50,2"]
SAVED = ["trainer.val_every_n_steps=50", "trainer.max_steps=300,301"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_stopped_sweep_leaves_no_process_and_continues(
    start: Start, warm: Warm, tmp_path: Path, number: signal.Signals
) -> None:
    """The job that was running resumes in its folder. Jobs that had not started follow."""
    sweep = ["-m", *(UNSAVED if number == signal.SIGINT else SAVED), "hydra.sweep.dir=sweep"]
    command = start(*sweep, folder=None, **({"under": warm.under} if number == signal.SIGINT else {}))
    job = tmp_path / "sweep" / "0"
    command.wait_for(job / ("metrics.csv" if number == signal.SIGINT else "checkpoints/last.ckpt"))
    os.kill(command.process.pid, number)
    code, stdout, stderr = command.outcome()
    record = json.loads((job / "results.json").read_text())
    if number == signal.SIGINT:
        assert (code, stderr) == (130, "interrupted; the same command runs the jobs that are not done\n")
        assert "job 0 (trainer.max_steps=50): interrupted" in stdout
        assert [line["status"] for line in table(tmp_path / "sweep")] == ["interrupted", "not begun"]
    else:
        assert (code, record["status"]) == (-number, "running")

    code, stdout, stderr = start(*sweep, folder=None, under=warm.under).outcome()
    assert (code, stderr) == (0, "")
    first_job, second_job = jobs(tmp_path / "sweep")
    assert [first_job["status"], second_job["status"]] == ["done", "done"]
    if number == signal.SIGINT:  # it left a checkpoint when it was told to stop
        assert [resumption["step"] for resumption in first_job["resumed"]] == [record["steps"]]
    assert first_job["resumed"][0]["step"] > 0
    assert "resumed" not in second_job


@pytest.mark.parametrize(
    ("launcher", "plugin"), [("slurm", "submitit"), ("submitit_local", "submitit"), ("ray_cluster", "ray")]
)
def test_launchers_for_clusters_compose(launcher: str, plugin: str) -> None:
    pytest.importorskip(plugin)
    config = compose("train", [f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep"], with_hydra=True)
    OmegaConf.to_container(config.hydra.launcher, resolve=True)


@pytest.mark.skipif(shutil.which("srun") is not None, reason="there is SLURM here")
def test_without_slurm_its_launcher_is_one_line(start: Start, warm: Warm) -> None:
    pytest.importorskip("submitit")
    line = start("-m", "hydra/launcher=slurm", "seed=1,2", folder=None, under=warm.under).outcome().error
    assert line.startswith("hydra/launcher=slurm needs SLURM, but this machine has no srun")


RAY = ["hydra.launcher.ray.init.address=null", "hydra.launcher.ray.remote.num_gpus=0"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "plugin", "words"), [("submitit_local", "submitit", []), ("ray_cluster", "ray", RAY)]
)
def test_the_local_mode_of_a_launcher(
    start: Start, tmp_path: Path, launcher: str, plugin: str, words: list[str]
) -> None:
    pytest.importorskip(plugin)
    sweep = ["-m", f"hydra/launcher={launcher}", *words, "strategy=ddp", "trainer.devices=2", "optimizer.lr=1e-3,abc"]
    code, _, stderr = start(*sweep, "hydra.sweep.dir=sweep", folder=None).outcome()
    assert code == 1, stderr
    assert stderr.splitlines()[-1].startswith("error: 1 of 2 jobs failed: 1 (see sweep/sweep.md)")
    assert [line["status"] for line in table(tmp_path / "sweep")] == ["done", "failed"]


def test_jobs_that_an_experiment_is_fitted_to_are_done_once(command: Command, tmp_path: Path) -> None:
    """`experiment=demo model=fbp` deletes keys of demo's, in the job's record too."""
    tiny = [*(word for word in TINY if not word.startswith("model.")), *PHANTOMS]
    for _ in range(2):
        outcome = command(tmp_path, "train", "-m", "experiment=demo", "model=fbp,tv", *tiny, "hydra.sweep.dir=sweep")
        assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("already done") == 2
    assert sorted(path.name for path in (tmp_path / "sweep").glob("[0-9]*")) == ["0", "1"]
