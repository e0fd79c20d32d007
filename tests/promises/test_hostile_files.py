"""Promise 8: No file of another's executes code, writes outside, or reaches the network.

Files from strangers in every command: nothing that they name is imported, and no variable is read.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer.reconstruction.weights import CHECKPOINT_KEY

from ..conftest import Outcome, tiny_module
from .commands import Command, contents, reconstruction, run, training

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]

LOOKUP, SECRET = "${oc.env:OF_THIS_MACHINE}", "word-that-nobody-knows"
CPU = ["experiment=demo", "trainer.accelerator=cpu", "trainer.max_steps=1", "logger=csv"]
COMMANDS = {
    "evaluate": ["run=a.ckpt", "accelerator=cpu", "data=phantoms", "data.n_test=2", "evaluation.n_pictures=1"],
    "evaluate as trained": ["run=a.ckpt", "accelerator=cpu", "evaluation.n_pictures=1"],
    "reconstruct": ["run=a.ckpt", "input=ct", "output=out", "accelerator=cpu"],
    "export": ["run=run", "output=given/a.safetensors"],
    "train": ["finetune=a.ckpt", *CPU],
    "train again": ["resume=a.ckpt", *CPU],
}


def names_code(config: dict[str, Any]) -> None:
    """In every place that may name a class or function."""
    names_code_of_slices(config)
    for section in ("model", "noise"):
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
    config["logger"] = {"wandb": {"_target_": "qnmixer.lightning.WandbRun", "project": LOOKUP}}


def looks_up_a_word(config: dict[str, Any]) -> None:
    """Where only some words are known: the error names the one that is there."""
    config["model"]["codec"] = LOOKUP


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(change, name, marks=[pytest.mark.extras] * (name == "export"))
        for change, names in {
            names_code: [*COMMANDS],
            names_code_of_slices: ["evaluate", "evaluate as trained", "reconstruct", "export"],
            looks_up: ["evaluate", "reconstruct", "export", "train again"],
            looks_up_a_word: ["evaluate", "export"],
        }.items()
        for name in names
    ],
)
def test_a_checkpoint_names_code_and_variables_in_vain(
    tmp_path: Path, command: Command, name: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """Each command on a checkpoint whose config was changed, beside a module of its maker."""
    (tmp_path / "evil_of_a_stranger.py").write_text("open('imported', 'w')\n")
    (tmp_path / "ct").mkdir()
    module = tiny_module()
    config = module.config.plain()
    change(config)
    checkpoint = {CHECKPOINT_KEY: {"format": 1, "config": config}, "state_dict": module.state_dict(), "global_step": 1}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    shutil.copy(tmp_path / "a.ckpt", tmp_path / "run" / "checkpoints" / "best.ckpt")

    outcome = command(tmp_path, name.split()[0], *COMMANDS[name], OF_THIS_MACHINE=SECRET)
    assert not (tmp_path / "imported").exists()
    output = outcome.stdout + outcome.stderr
    assert "Traceback" not in output
    assert SECRET not in output
    assert not [path for path, data in contents(tmp_path).items() if SECRET.encode() in data]
    refusal = change in (names_code, looks_up_a_word) or (change is names_code_of_slices and "as" in name)
    if not name.startswith("train") and name != "reconstruct":  # these find no fitting network, and no slices
        assert outcome.code == refusal, outcome.stderr
    if refusal and not name.startswith("train"):
        assert ("evil_of_a_stranger" if change is not looks_up_a_word else LOOKUP) in outcome.stderr


@pytest.mark.parametrize(("content", "words"), [
    ("missing", "give "), ("empty", "has no checkpoints"), ("other program", "another program"),
    ("code", "weights_only"), ("truncated", "damaged"), ("text", "no checkpoint"),
])  # fmt: skip
def test_no_command_takes_a_checkpoint_that_is_none(
    noise_free: Path, ct: Path, tmp_path: Path, content: str, words: str
) -> None:
    folder, out = tmp_path / "bad", tmp_path / "out"
    path = folder / "checkpoints" / "best.ckpt"
    if content != "missing":
        path.parent.mkdir(parents=True)
    if content == "other program":
        torch.save({"state_dict": {"a": torch.zeros(1)}, "hyper_parameters": {}}, path)
    elif content == "code":
        torch.save(Outcome(0, "", ""), path)
    elif content == "truncated":
        data = (noise_free / "checkpoints" / "best.ckpt").read_bytes()
        path.write_bytes(data[: len(data) // 2])
    elif content == "text":
        path.write_text("export A=1\npython -m train\n")
    for outcome in (
        run("evaluate", f"run={folder}", f"hydra.run.dir={out / 'evaluate'}"),
        reconstruction(folder, ct, out / "reconstruct"),
        training(out / "train", f"finetune={folder}"),
    ):
        assert words in outcome.error
        assert str(folder) in outcome.error
    assert not [*out.rglob("*.ckpt"), *out.rglob("*.dcm")]
