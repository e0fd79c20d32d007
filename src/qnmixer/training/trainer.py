"""Lightning's Trainer as a config says."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from rich.console import Console

from qnmixer.config import Config, TrainerConfig
from qnmixer.parallel.precision import build_precision
from qnmixer.parallel.strategies import build_strategy
from qnmixer.tracking.loggers import build_loggers
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.checkpointing import AtomicCheckpointIO
from qnmixer.training.lightning_private import leave_signals_to_us
from qnmixer.training.progress import ProgressMetrics

_BUILT = ("enable_progress_bar", "limit_train_batches", "profiler")  # of trainer.extra: not passed on as they are
_PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def build_trainer(
    config: Config,
    folder: Path,
    callbacks: list[Callback],
    console: Console,
    overrides: Sequence[str] = (),
    resumed_at: int | None = None,
) -> L.Trainer:
    """Lightning's Trainer as a config says, which must have been counted (`on_this_machine`).

    `overrides` and `resumed_at` as in `build_loggers`.
    """
    t = config.trainer
    callbacks = [
        *callbacks,
        ProgressMetrics(),
        *build_callbacks(config.callbacks),
    ]
    extra = {name: value for name, value in t.extra.items() if name not in _BUILT and value is not None}
    shows_progress = console.is_terminal and not console.quiet and t.extra.get("enable_progress_bar", True)
    if shows_progress:
        callbacks.append(RichProgressBar(leave=False))
    leave_signals_to_us()
    return L.Trainer(
        accelerator=t.accelerator,
        devices=t.devices or 1,
        num_nodes=t.num_nodes,
        strategy=build_strategy(config),
        plugins=[AtomicCheckpointIO(), build_precision(config, t.accelerator)],
        max_steps=t.max_steps,
        max_epochs=-1 if t.max_epochs is None else t.max_epochs,
        accumulate_grad_batches=t.accumulate_grad_batches,
        gradient_clip_val=t.gradient_clip_val,
        val_check_interval=_batches_between_validations(t),
        check_val_every_n_epoch=1 if t.val_every_n_steps is None else None,
        limit_val_batches=t.limit_val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=t.log_every_n_steps,
        deterministic=t.deterministic,
        detect_anomaly=config.debug.name == "anomaly",
        use_distributed_sampler=False,
        logger=build_loggers(config, folder, list(overrides), resumed_at),
        callbacks=callbacks,
        enable_progress_bar=shows_progress,
        enable_model_summary=False,
        default_root_dir=folder,
        profiler=_profiler(t.extra.get("profiler"), folder / "profile"),
        **extra,
    )


def _profiler(name: str | None, folder: Path) -> Profiler | None:
    """Lightning's profiler of this name, which leaves what it measures in a folder."""
    return None if name is None else _PROFILERS[name](dirpath=folder, filename="lightning")


def _batches_between_validations(t: TrainerConfig) -> int | None:
    """Lightning counts batches here, not optimizer steps."""
    return None if t.val_every_n_steps is None else t.val_every_n_steps * t.accumulate_grad_batches
