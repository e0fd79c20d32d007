"""Promise 2: 34 of 34 kills resume bit for bit; a dead rank is named within seconds, no orphan; two writers never share
a folder.

Training in several processes from end to end: the output that a user sees if it works, and if it fails.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from ..conftest import Command
from ..warm import FORK_RANKS, Warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

Start = Callable[..., Command]

ENDLESS = ["trainer.max_steps=1000000", "data.num_workers=1"]


def in_training(start: Start, *overrides: str, **options: Any) -> Command:
    """A run without end that has left a checkpoint."""
    command = start(*ENDLESS, *overrides, **options)
    command.wait_for(command.folder / "checkpoints" / "last.ckpt")
    return command


def steps_kept(command: Command) -> int:
    """Steps of last.ckpt, which must be whole."""
    assert not list(command.folder.rglob("*.tmp"))
    return torch.load(command.folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]


def test_a_rank_that_is_killed_ends_the_run(start: Start, warm: Warm) -> None:
    command = in_training(start, "strategy=ddp", "trainer.devices=2", under=warm.under)
    assert len(command.family()) == 1 + 2 * (1 + 2)  # a worker for training and one for validation
    os.kill(command.ranks(1)[0], signal.SIGKILL)
    code, stderr, seconds = command.end()
    assert (code, stderr) == (1, "error: rank 1 was killed by SIGKILL; the other ranks were stopped\n")
    assert seconds < 20
    assert command.record()["status"] == "failed"
    assert command.record()["error"] == f"RankFailed: {stderr.removeprefix('error: ').rstrip()}"
    assert steps_kept(command) >= 2
    assert len(command.losses()) >= 2


def change_loss(folder: Path, body: str) -> dict[str, str]:
    """Environment in which, from step 2 on, every rank computes the loss of a batch by `body`. The ranks are forked."""
    (folder / "sitecustomize.py").write_text(f"""
import os
if "RANK" in os.environ:
    from qnmixer.module import ReconstructionModule as Module
    def training_step(self, batch, batch_idx):
        rank, loss = int(os.environ["RANK"]), original(self, batch, batch_idx)
        if self.global_step < 2:
            return loss
        {body}
    original, Module.training_step = Module.training_step, training_step
""")
    return {"PYTHONPATH": str(folder), **FORK_RANKS}


def test_a_nan_on_one_rank_ends_the_run(start: Start, warm: Warm, tmp_path: Path) -> None:
    environment = change_loss(tmp_path, "return loss * float('nan') if rank == 1 else loss")
    command = start(*ENDLESS, "strategy=ddp", "trainer.devices=2", env=environment, under=warm.under)
    line = command.outcome().error
    assert line.startswith("rank 1: the loss became nan at step 2 (slices: train-phantom-")
    assert "lower optimizer.lr, or look at train/grad_norm in metrics.csv" in line
    assert command.record()["status"] == "failed"
    assert command.record()["error"] == f"RankFailed: {line}"
    assert steps_kept(command) == 2
    assert len(command.losses()) == 2  # where the line sends the user


@pytest.mark.parametrize(
    ("number", "code", "forks"),
    [(signal.SIGINT, 130, FORK_RANKS), pytest.param(signal.SIGUSR1, 143, {}, marks=pytest.mark.long)],
)
def test_a_run_can_be_stopped(
    start: Start, warm: Warm, number: signal.Signals, code: int, forks: dict[str, str]
) -> None:
    """By its launcher, which passes it on; every rank stops after the same step, and nothing is lost. One speaks."""
    command = in_training(start, "strategy=ddp", "trainer.devices=2", under=warm.under, env=forks)
    os.kill(command.process.pid, number)
    exit_code, stderr, seconds = command.end()
    step = steps_kept(command)
    line = f"interrupted after step {step}, to resume: python -m qnmixer.train resume=run\n"
    assert (exit_code, stderr) == (code, line)
    assert seconds < 20
    assert command.record()["status"] == "interrupted"
    assert (command.record()["steps"], command.record()["processes"]) == (step, 2)
    assert "error" not in command.record()
    assert len(command.losses()) == step
    lines = command.stdout.splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith("starting a run in ")] == [0]
    validations = [line.split(" · ")[0] for line in lines if "val PSNR" in line]
    assert validations == [f"step {2 * number}/1000000" for number in range(1, len(validations) + 1)]
    assert len(validations) >= step // 2 - 1  # the last may have been stopped


def test_what_is_not_there_is_said_before_there_are_ranks(start: Start, warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    data = ["data=numpy", f"data.root={tmp_path / 'empty'}"]
    command = start("strategy=ddp", "trainer.devices=4", *data, under=warm.under)
    line = command.outcome().error
    assert "rank" not in line
    assert f"{tmp_path / 'empty'} is empty" in line
    assert command.record()["status"] == "failed"


def torchrun(node: int, port: str) -> tuple[str, ...]:
    """The command of one of two nodes with a process each, both on this machine."""
    return (
        str(Path(sys.executable).with_name("torchrun")), "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1",
        "--master-addr=127.0.0.1", f"--master-port={port}",
    )  # fmt: skip


def srun(process: int, port: str) -> dict[str, str]:
    """The environment of one of two tasks, each on a node of its own."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_NODELIST": "127.0.0.1",
        "SLURM_PROCID": str(process), "SLURM_LOCALID": "0", "SLURM_NODEID": str(process), "MASTER_PORT": port,
    }  # fmt: skip


@pytest.mark.parametrize("trainer", ["slurm", pytest.param("torchrun", marks=pytest.mark.long)])
def test_two_nodes_train_as_one_process_does(start: Start, warm: Warm, tmp_path: Path, trainer: str) -> None:
    """Under torchrun, or in the environment of srun: one folder, and the losses of one process on the same samples."""
    reference = start("data.n_train=7", "callbacks=default", folder=tmp_path / "single", under=warm.under)
    assert reference.end()[:2] == (0, "")
    port, nodes = str(find_free_network_port()), []
    for node in (0, 1):
        srun_options = {"under": warm.under, "env": srun(node, port)}
        options: dict[str, Any] = {"under": torchrun(node, port)} if trainer == "torchrun" else srun_options
        words = ["data.n_train=7", "data.batch_size=1", "strategy=ddp", f"trainer={trainer}", "trainer.devices=1"]
        nodes.append(start(*words, "callbacks=default", folder=tmp_path / trainer, **options))
    assert [node.end()[:2] for node in nodes] == [(0, ""), (0, "")]
    assert nodes[0].losses() == pytest.approx(reference.losses(), rel=1e-5)
    assert len(reference.losses()) == 4
    files = [{path.name for path in (tmp_path / run).rglob("*")} for run in ("single", trainer)]
    assert files[0] == files[1]
    assert nodes[0].record()["status"] == "done"
    assert "hydra.output_subdir=null" not in (tmp_path / trainer / ".hydra" / "hydra.yaml").read_text()


DDP = ["hydra.run.dir={}", "strategy=ddp", "trainer.devices=2"]
AT_ODDS = {
    "no common folder": ([], {}, "2 processes would make a run folder each: give them one, as hydra.run.dir=FOLDER"),
    "a sweep": (["-m", "seed=1,2"], {}, "a sweep starts the processes of each job itself"),
    "one device": (DDP[:1], {}, "strategy=single, but 2 processes were started: choose strategy=ddp"),
    "too many": ([*DDP[:2], "trainer.devices=4"], {}, "is not the number of processes that were started, 2"),
    "interactive": (DDP, {"SLURM_JOB_NAME": "interactive"}, "put SLURM_JOB_NAME=train before srun"),
    "no tasks per node": (DDP, {"SLURM_NTASKS_PER_NODE": ""}, "give --ntasks-per-node"),
}


@pytest.mark.parametrize("case", AT_ODDS)
def test_processes_at_odds_with_the_config_are_refused(start: Start, cold: Warm, tmp_path: Path, case: str) -> None:
    overrides, environment, message = AT_ODDS[case]
    environment = {name: value for name, value in (srun(1, "1") | environment).items() if value}
    command = start(
        *(override.format(tmp_path / "run") for override in overrides), env=environment, folder=None, under=cold.under
    )
    assert message in command.outcome().error
    assert not list(tmp_path.iterdir())
