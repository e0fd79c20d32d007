"""Promise 8: No file of another's executes code, writes outside, or reaches the network.

Files from strangers in every command: nothing that they name is imported, and no variable is read.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer.engine.config import to_plain
from qnmixer.module import ReconstructionModule
from qnmixer.weights import CHECKPOINT_KEY

from ..warm import Done, Warm
from .commands import Outcome, reconstruction, run, training

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]

LOOKUP = "${oc.env:OF_THIS_MACHINE}"
CPU = "accelerator=cpu"
COMMANDS = {
    "evaluate": ["run=a.ckpt", CPU, "data=phantoms", "data.n_test=2"],
    "evaluate as trained": ["run=a.ckpt", CPU],
    "reconstruct": ["run=a.ckpt", "input=ct", "output=out", CPU],
    "export": ["run=run", "output=given/a.safetensors"],
    "train": ["finetune=a.ckpt", "experiment=demo", "trainer.accelerator=cpu", "trainer.max_steps=1", "logger=csv"],
    "train again": ["resume=a.ckpt", "experiment=demo", "trainer.accelerator=cpu", "trainer.max_steps=1", "logger=csv"],
}


@pytest.fixture
def attempt(warm: Warm, tmp_path: Path, tiny_module: Callable[..., ReconstructionModule]) -> Callable[..., Done]:
    """attempt(command, change): a command on a checkpoint whose config was changed, beside a module of its maker."""
    (tmp_path / "evil_of_a_stranger.py").write_text("open('imported', 'w')\n")
    (tmp_path / "ct").mkdir()

    def run(command: str, change: Callable[[dict[str, Any]], None]) -> Done:
        module = tiny_module()
        plain = to_plain(module.config)
        change(plain)
        found = {CHECKPOINT_KEY: {"format": 1, "config": plain}, "state_dict": module.state_dict(), "global_step": 1}
        checkpoint = tmp_path / "run" / "checkpoints" / "best.ckpt"
        checkpoint.parent.mkdir(parents=True)
        torch.save(found, checkpoint)
        shutil.copy(checkpoint, tmp_path / "a.ckpt")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "HYDRA"))}
        environment = kept | {"OF_THIS_MACHINE": "word-that-nobody-knows", "OMP_NUM_THREADS": "1"}
        words = COMMANDS[command]
        return warm.run("-m", f"qnmixer.{command.split()[0]}", *words, cwd=tmp_path, env=environment)

    return run


def names_code(config: dict[str, Any]) -> None:
    """In every place that may name a class or function."""
    for section in ("model", "data", "noise", "loss", "optimizer", "schedule"):
        config[section] = config[section] | {"_target_": "evil_of_a_stranger.X"}
    config["model"]["regularizer"] = "evil_of_a_stranger.X"
    for group in ("callbacks", "logger", "metrics"):
        config[group] = {"x": {"_target_": "evil_of_a_stranger.X"}}


def names_code_of_slices(config: dict[str, Any]) -> None:
    """Where reconstruct and export have no need of it."""
    for section in ("data", "loss", "optimizer", "schedule"):
        config[section] = config[section] | {"_target_": "evil_of_a_stranger.X"}


def looks_up(config: dict[str, Any]) -> None:
    """Where any text may stand."""
    config["finetune"], config["tags"] = LOOKUP, [LOOKUP]
    config["loss"] = {"_target_": "torch.nn.functional.mse_loss", "a": LOOKUP}
    config["callbacks"] = {"x": {"_target_": "lightning.pytorch.callbacks.Timer", "duration": LOOKUP}}
    config["logger"] = {"wandb": {"_target_": "qnmixer.engine.tracking.loggers.WandbRun", "project": LOOKUP}}


def looks_up_a_word(config: dict[str, Any]) -> None:
    """Where only some words are known: the error names the one that is there."""
    config["model"]["codec"] = LOOKUP


@pytest.mark.parametrize("change", [names_code, names_code_of_slices, looks_up, looks_up_a_word])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_names_code_and_variables_in_vain(
    attempt: Callable[..., Done], tmp_path: Path, command: str, change: Callable[[dict[str, Any]], None]
) -> None:
    done = attempt(command, change)
    assert not (tmp_path / "imported").exists()
    for text in [done.stdout, done.stderr]:
        assert "Traceback" not in text
        assert "word-that-nobody-knows" not in text
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if b"word-that-nobody-knows" in path.read_bytes()]
    refused = change in (names_code, looks_up_a_word) or (change is names_code_of_slices and "as" in command)
    if not command.startswith("train") and command != "reconstruct":  # these find no fitting network, and no slices
        assert done.returncode == refused, done.stderr
    if refused and not command.startswith("train"):
        assert ("evil_of_a_stranger" if change is not looks_up_a_word else LOOKUP) in done.stderr


@pytest.fixture(params=["missing", "empty", "other program", "code", "truncated", "text"])
def bad_run(request: pytest.FixtureRequest, noise_free: Path, tmp_path: Path) -> tuple[Path, str]:
    """A run folder without a checkpoint of ours, and what must be said of it."""
    folder = tmp_path / "bad"
    path = folder / "checkpoints" / "best.ckpt"
    if request.param != "missing":
        path.parent.mkdir(parents=True)
    if request.param == "other program":
        torch.save({"state_dict": {"a": torch.zeros(1)}, "hyper_parameters": {}}, path)
    elif request.param == "code":
        torch.save(Outcome(0, "", ""), path)
    elif request.param == "truncated":
        data = (noise_free / "checkpoints" / "best.ckpt").read_bytes()
        path.write_bytes(data[: len(data) // 2])
    elif request.param == "text":
        path.write_text("export A=1\npython -m train\n")
    words = {"missing": "give ", "empty": "has no checkpoints", "other program": "another program",
             "code": "weights_only", "truncated": "damaged", "text": "no checkpoint"}  # fmt: skip
    return folder, words[request.param]


def test_no_command_takes_a_checkpoint_that_is_none(bad_run: tuple[Path, str], ct: Path, tmp_path: Path) -> None:
    folder, words = bad_run
    out = tmp_path / "out"
    for outcome in (
        run("evaluate", f"run={folder}", f"hydra.run.dir={out / 'evaluate'}"),
        reconstruction(folder, ct, out / "reconstruct"),
        training(out / "train", f"finetune={folder}"),
    ):
        assert words in outcome.error
        assert str(folder) in outcome.error
    assert not list(out.rglob("*.ckpt"))
    assert not list(out.rglob("*.dcm"))
