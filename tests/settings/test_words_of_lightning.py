"""Arguments of Lightning's Trainer, its WandbLogger and wandb.init: each is a key, or is refused with a reason."""

import re
from inspect import signature
from typing import Any

import lightning as L
import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger

from qnmixer.settings.compose import compose
from qnmixer.settings.error_lines import explain
from qnmixer.settings.sections import REFUSED, TrainerConfig, WandbConfig

from ..conftest import config_of
from .conftest import refusal

# Unknown keys of logger.wandb, because a run sets them, or has one W&B run for each folder and the same names in all.
NOT_OF_WANDB = {
    "settings", "save_code", "anonymous", "force", "reinit", "resume_from", "fork_from", "experiment",
    "allow_val_change", "config", "config_exclude_keys", "config_include_keys", "prefix", "sync_tensorboard",
    "tensorboard", "monitor_gym", "checkpoint_name", "add_file_policy",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_wandb")


def test_out_of_memory_names_what_the_command_takes() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    lines = {name: explain(error, name) for name in ("train", "evaluate", "compare", "reconstruct")}
    remedies = re.findall(r"[\w.]+=\S+|data\.batch_size", lines.pop("train") or "")
    assert remedies == ["data.batch_size", "memory=recompute", "trainer.precision=16-mixed"]
    config_of(*(word for word in remedies if "=" in word))  # the command takes them
    assert {*lines.values()} == {"out of memory (CUDA out of memory. Tried to allocate 2 GiB): set accelerator=cpu"}


def test_every_argument_of_the_trainer() -> None:
    arguments = {*signature(L.Trainer.__init__).parameters} - {"self"}
    ours = {"val_every_n_steps", "save_every_n_steps", "tf32"}
    assert {*TrainerConfig.model_fields} - ours == {name for name in arguments if f"trainer.{name}" not in REFUSED}
    composed = compose("train", []).trainer
    assert {*composed} == {*TrainerConfig.model_fields}  # so none needs a plus
    of_lightning = {name: parameter.default for name, parameter in signature(L.Trainer.__init__).parameters.items()}
    other = {name for name in arguments & {*composed} if composed[name] != of_lightning[name]}
    assert other - {"inference_mode"} == {
        "max_steps", "gradient_clip_val", "log_every_n_steps", "precision", "deterministic",
        "num_sanity_val_steps", "enable_model_summary", "enable_progress_bar",
    }  # fmt: skip


def test_every_argument_of_wandb() -> None:
    arguments = {*signature(WandbLogger.__init__).parameters, *signature(wandb.init).parameters} - {"self", "kwargs"}
    assert {*WandbConfig.model_fields} - {"target"} == arguments - NOT_OF_WANDB
    assert {*compose("train", []).logger.wandb} == {*WandbConfig.model_fields} - {"target"} | {"_target_"}


@pytest.mark.parametrize("key", REFUSED)
def test_what_no_run_takes_is_one_line_that_says_why(key: str) -> None:
    line = f"{key} {REFUSED[key]}"
    assert refusal(f"{key}=true") == refusal(f"++{key}=true") == line


@pytest.mark.parametrize(("words", "value"), [
    ("devices=auto", "auto"), ("devices=-1", -1), ("devices=2", 2), ("devices='2'", 2), ("devices=[0,1]", [0, 1]),
    ("devices='0,1'", [0, 1]), ("devices='1,'", [1]), ("fast_dev_run=true", True), ("fast_dev_run=3", 3),
    ("val_check_interval=0.5", 0.5), ("val_check_interval=1.0", 1.0), ("val_check_interval=1", 1),
    ("val_check_interval=00:00:30:00", "00:00:30:00"), ("val_check_interval={minutes: 30}", {"minutes": 30}),
    ("max_time=00:00:30:00", "00:00:30:00"), ("max_time={hours: 2}", {"hours": 2}), ("limit_val_batches=0.5", 0.5),
    ("overfit_batches=4", 4), ("num_sanity_val_steps=-1", -1), ("precision=16", "16-mixed"),
    ("precision=32-true", "32"), ("deterministic=warn", "warn"), ("max_epochs=-1", -1), ("gradient_clip_val=0", 0.0),
])  # fmt: skip
def test_values_of_lightning_are_taken(words: str, value: Any) -> None:
    strategy = ["strategy=ddp"] * words.startswith("devices")
    taken = getattr(config_of(f"trainer.{words}", *strategy).trainer, words.partition("=")[0])
    assert (taken, type(taken)) == (value, type(value))


@pytest.mark.parametrize("words", ["val_check_interval=0.5", "check_val_every_n_epoch=2"])
def test_when_to_validate_is_said_once(words: str) -> None:
    """Lightning's word takes the place of the val_every_n_steps of files. Typed, both are refused."""
    typed = f"trainer.{words}"
    for experiment in ([], ["experiment=demo"], ["debug=few_batches"]):
        assert config_of(*experiment, typed).trainer.val_every_n_steps is None
    assert "val_every_n_steps" in refusal(typed, "trainer.val_every_n_steps=3")
