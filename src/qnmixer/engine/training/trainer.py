"""Lightning's Trainer, built from the config."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch.profiler import schedule

from qnmixer.engine.config import Config
from qnmixer.engine.config.sections import ProfileConfig, TrainerConfig
from qnmixer.engine.lightning_private import disable_signal_handling
from qnmixer.engine.parallel.devices import allow_tf32
from qnmixer.engine.parallel.strategies import build_precision, build_strategy
from qnmixer.engine.training.checkpointing import AtomicCheckpointIO
from qnmixer.engine.training.step_metrics import StepMetrics

_BUILT = ("enable_progress_bar", "limit_train_batches", "profiler")  # keys of trainer.extra that are converted first
_PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def build_trainer(config: Config, folder: Path, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> L.Trainer:
    """Build Lightning's Trainer for a run folder; the config must come from `resolve_devices`. Sets trainer.tf32."""
    t = config.trainer
    disable_signal_handling()
    allow_tf32(t.tf32)
    return L.Trainer(
        accelerator=t.accelerator,
        devices=t.devices or 1,
        num_nodes=t.num_nodes,
        strategy=build_strategy(config),
        # Not precision=: Lightning turns fp16 into bf16 on a CPU, and refuses it with FSDP2.
        plugins=[AtomicCheckpointIO(), build_precision(config, t.accelerator)],
        max_steps=t.max_steps,
        max_epochs=-1 if t.max_epochs is None else t.max_epochs,
        accumulate_grad_batches=t.accumulate_grad_batches,
        gradient_clip_val=t.gradient_clip_val,
        num_sanity_val_steps=0,  # callbacks would count it as a validation
        log_every_n_steps=t.log_every_n_steps,
        deterministic=t.deterministic,
        detect_anomaly=config.debug.name == "anomaly",
        use_distributed_sampler=False,  # Lightning's pads with slices that count twice, and shuffles always
        logger=list(loggers),
        callbacks=[StepMetrics(), *callbacks],
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
        default_root_dir=folder,
        profiler=_profiler(config, folder / "profile"),
        **_validations(t),
        **{name: value for name, value in t.extra.items() if name not in _BUILT and value is not None},
    )


def _validations(t: TrainerConfig) -> dict[str, Any]:
    """When to validate, and on how many batches. Lightning counts batches between validations, not optimizer steps."""
    if t.val_every_n_steps is None:
        return {"check_val_every_n_epoch": 1, "limit_val_batches": t.limit_val_batches}
    return {
        "val_check_interval": t.val_every_n_steps * t.accumulate_grad_batches,
        "check_val_every_n_epoch": None,
        "limit_val_batches": t.limit_val_batches,
    }


def _profiler(config: Config, folder: Path) -> Profiler | None:
    """Lightning's profiler that the config asks for, which writes its results into a folder."""
    name, debug = config.trainer.extra.get("profiler"), config.debug
    if isinstance(debug, ProfileConfig):
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to the terminal
        recorded = schedule(skip_first=debug.warm_up - 1, wait=0, warmup=1, active=debug.steps, repeat=1)
        return PyTorchProfiler(folder, "operators", schedule=recorded, record_shapes=True, acc_events=True)
    return None if name is None else _PROFILERS[name](dirpath=folder, filename="lightning")
