"""Schema of `trainer`: the arguments of Lightning's Trainer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from qnmixer.config.option import number, one_of
from qnmixer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from qnmixer.config.run import Config

PASSED_ON: dict[str, type | tuple[str, ...]] = {
    "benchmark": bool,
    "enable_autolog_hparams": bool,
    "enable_progress_bar": bool,
    "gradient_clip_algorithm": ("norm", "value"),
    "inference_mode": bool,
    "limit_train_batches": float,
    "max_time": str,
    "min_epochs": int,
    "min_steps": int,
    "profiler": ("simple", "advanced", "pytorch"),
    "sync_batchnorm": bool,
}
"""Arguments of Lightning's Trainer that are not in conf/, and their types: `+trainer.NAME=…` sets one."""

REFUSED = {
    "barebones": "it switches off the records of a run: use debug=few_batches",
    "callbacks": "they have their own group: use callbacks=… or +callbacks.NAME._target_=my_file.MyCallback",
    "check_val_every_n_epoch": "validations are counted in optimizer steps: use trainer.val_every_n_steps=…, null for "
    "the end of each epoch",
    "default_root_dir": "a run has one folder: use hydra.run.dir=…",
    "detect_anomaly": "use debug=anomaly, which names the line too",
    "enable_checkpointing": "without checkpoints a run cannot be resumed: use trainer.save_every_n_steps=…",
    "enable_model_summary": "use +callbacks.summary._target_=lightning.pytorch.callbacks.RichModelSummary",
    "fast_dev_run": "it writes no checkpoint and no metrics: use debug=few_batches, which tries the whole run",
    "limit_predict_batches": "the Trainer does not predict here: use python -m qnmixer.reconstruct",
    "limit_test_batches": "the test uses all images: use test_after_training=false to skip it",
    "logger": "loggers have their own group: use logger=…",
    "model_registry": "it is for Lightning's cloud: for W&B use logger.wandb.log_checkpoint=true",
    "num_sanity_val_steps": "it would count as a validation: use debug=few_batches to try one",
    "overfit_batches": "use debug=overfit",
    "plugins": "qnmixer sets its own for precision and checkpoints: use trainer.precision=…",
    "reload_dataloaders_every_n_epochs": "every epoch has a new order and new phantoms already: leave it out",
    "strategy": "strategies have their own group: use strategy=ddp, fsdp or pipeline",
    "use_distributed_sampler": "a run has its own sampler, which counts no slice twice: leave it out",
    "val_check_interval": "validations are counted in optimizer steps: use trainer.val_every_n_steps=…",
}
"""The other arguments: why they are refused, and what to use instead."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The arguments of Lightning's Trainer."""

    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    devices: int | None = number(at_least=1)  # of a node; None: all GPUs, or one with strategy=single
    num_nodes: int = number(at_least=1)
    precision: str = one_of("32", "16-mixed", "bf16-mixed")
    max_steps: int = number(at_least=-1)
    max_epochs: int | None = number(at_least=1)
    accumulate_grad_batches: int = number(at_least=1)
    gradient_clip_val: float | None = number(above=0)
    val_every_n_steps: int | None = number(at_least=1)
    save_every_n_steps: int | None = number(at_least=1)
    limit_val_batches: int | None = number(at_least=1)
    log_every_n_steps: int = number(at_least=1)
    deterministic: bool
    tf32: bool = False  # on GPUs that have it; older files lack the key
    extra: dict[str, Any] = field(default_factory=dict)  # from PASSED_ON

    def check(self, run: "Config") -> None:
        """Check the arguments that are passed on: Lightning's Trainer must accept their types and values."""
        for name, value in self.extra.items():
            if name not in PASSED_ON:
                raise ConfigError(f"trainer.extra.{name} is not known: {suggest(name, PASSED_ON)}")
            if value is not None:
                _check_extra(name, value, PASSED_ON[name])
        limit = self.extra.get("limit_train_batches")
        if limit is not None and limit <= 0:
            raise ConfigError(f"trainer.limit_train_batches={limit} is too small: give 1 or more batches, or a share")
        if isinstance(limit, float) and limit > 1:
            raise ConfigError(f"trainer.limit_train_batches={limit} is too large for a share: give at most 1.0")
        if isinstance(limit, int) and limit % self.accumulate_grad_batches:
            raise ConfigError(
                f"trainer.limit_train_batches={limit} is no multiple of trainer.accumulate_grad_batches="
                f"{self.accumulate_grad_batches}: the last step of an epoch would be smaller"
            )


def gathered(trainer: Any) -> Any:
    """The section, with arguments for Lightning's Trainer under `extra`. Raises ConfigError for refused ones."""
    if not isinstance(trainer, Mapping):
        return trainer
    for name in trainer:
        if name in REFUSED:
            raise ConfigError(refusal(str(name)))
    extra = {str(name): trainer[name] for name in trainer if name in PASSED_ON}
    rest = {str(name): trainer[name] for name in trainer if name not in extra}
    return rest | {"extra": {**(rest.get("extra") or {}), **extra}}


def refusal(name: str) -> str:
    """The message for an argument of the Trainer that is refused."""
    return f"trainer.{name} cannot be set: {REFUSED[name]}"


def _check_extra(name: str, value: Any, takes: type | tuple[str, ...]) -> None:
    key = f"trainer.{name}={value}"
    if isinstance(takes, tuple):
        if value not in takes:
            raise ConfigError(f"{key} is not known: {suggest(str(value), takes)}")
    elif takes is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} is not a number: give one")
    elif takes is int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} is not a whole number above 0: give one")
    elif takes is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false")
    elif not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(value)):
        raise ConfigError(f"{key} is not DAYS:HOURS:MINUTES:SECONDS: give for example 00:01:30:00")


KEYS = frozenset(f.name for f in fields(TrainerConfig)) - {"extra"}
