"""One training run from start to results: data, network, Trainer, evaluation of the best checkpoint."""

import logging
import os
import traceback
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.plugins.precision import MixedPrecision
from rich.console import Console

from qnmixer.config import Config, TrainerConfig, to_plain
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError, OutOfMemory
from qnmixer.parallel.memory import apply_memory_mode
from qnmixer.tracking.loggers import build_loggers, close_loggers
from qnmixer.tracking.results import results
from qnmixer.training.callbacks import IteratePictures, PromptInterrupt, ValidationLine
from qnmixer.training.checkpoints import AtomicCheckpointIO, load_weights
from qnmixer.training.evaluation import evaluate, log_evaluation, title_of, write_evaluation
from qnmixer.training.memory_monitor import MemoryMonitor
from qnmixer.training.module import ReconstructionModule
from qnmixer.training.out_of_memory import advice, is_out_of_memory, memory_of
from qnmixer.training.planning import MIB, Planner

_THREADS = torch.get_num_threads()  # as the process started: the jobs of a sweep share it


def fit(config: Config, folder: Path, overrides: list[str]) -> float:
    """Train, evaluate the best checkpoint, leave everything in `folder`; returns the best monitored value.

    Raises UserError for what the user can mend; results.json then says failed.
    """
    console = Console()
    exit_code = 1
    with results(folder, overrides) as record:
        try:
            best = _fit(config, folder, console, record)
            exit_code = 0
        finally:
            close_loggers(config.logger, exit_code)
    console.print(f"run folder: {folder}", soft_wrap=True)
    if picture := record.get("picture"):
        next_step = f"python -m qnmixer.evaluate run={folder} data=dicom data.root=/path/to/dicom"
        console.print(f"on your own slices: {next_step}\npicture: {picture}", soft_wrap=True, highlight=False)
    return best


def _fit(config: Config, folder: Path, console: Console, record: dict[str, object]) -> float:
    _quieten()
    _leave_cores_to_workers(config)
    accelerator = _accelerator(config.trainer.accelerator)
    L.seed_everything(config.seed, workers=True, verbose=False)
    module = ReconstructionModule(config)
    if config.finetune is not None:
        load_weights(module, Path(config.finetune))
    apply_memory_mode(module.network, config.memory)
    data = SliceDataModule(config.data)
    data.setup("fit")
    checkpoint = ModelCheckpoint(
        folder / "checkpoints",
        filename="best",
        monitor=config.monitor,
        mode="min" if config.monitor == "val/loss" else "max",
        save_last=True,
        enable_version_counter=False,
    )
    line = ValidationLine(console)
    planner = Planner(config, module.projector)  # before training takes the projector to its device
    memory = MemoryMonitor(console, planner.estimate(config).peak / MIB)
    trainer = _build_trainer(config, folder, accelerator, [checkpoint, line, memory], console)
    _print_start(config, data, module, trainer, console)
    available = memory_of(trainer.strategy.root_device)
    try:
        trainer.fit(module, datamodule=data)
    except SystemExit as stop:  # what Lightning makes of Ctrl-C
        raise KeyboardInterrupt from stop
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
        module.projector.cpu()
        raise OutOfMemory(advice(planner, config, available)) from error
    finally:
        record["memory"] = memory.record()
    if line.last_step != trainer.global_step:
        _validate_at_last(trainer, module, data, checkpoint)
    assert checkpoint.best_model_score is not None
    best = float(checkpoint.best_model_score)
    record["best"] = {config.monitor: best}
    if config.test_after_training:
        load_weights(module, folder)
        evaluation = evaluate(module, data, "test", config.evaluation, trainer.strategy.root_device)
        record["test"] = evaluation.means()
        picture = write_evaluation(folder / "evaluation", evaluation, title_of(config, config.data, "test"), console)
        record["picture"] = str(picture)
        log_evaluation(trainer.loggers, evaluation, picture)
    return best


def _build_trainer(
    config: Config, folder: Path, accelerator: str, callbacks: list[Callback], console: Console
) -> L.Trainer:
    t = config.trainer
    callbacks = [
        *callbacks,
        LearningRateMonitor("step"),
        IteratePictures(folder / "pictures"),
        PromptInterrupt(),
    ]
    if console.is_terminal:
        callbacks.append(RichProgressBar(leave=False))
    half = _cpu_half_precision(t, accelerator)
    return L.Trainer(
        accelerator=accelerator,
        devices=t.devices,
        precision=None if half else t.precision,  # type: ignore[arg-type]  # checked by config.py
        plugins=[AtomicCheckpointIO(), *([half] if half else [])],
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
        logger=build_loggers(config.logger, folder, to_plain(config)),
        callbacks=callbacks,
        enable_progress_bar=console.is_terminal,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def _validate_at_last(
    trainer: L.Trainer, module: ReconstructionModule, data: SliceDataModule, checkpoint: ModelCheckpoint
) -> None:
    """Score the steps since the last validation too, and keep them: last.ckpt, and best.ckpt where they are best."""
    trainer.validate(module, datamodule=data, verbose=False)
    score, best = trainer.callback_metrics[str(checkpoint.monitor)], checkpoint.best_model_score
    folder = Path(str(checkpoint.dirpath))
    trainer.save_checkpoint(folder / "last.ckpt")
    if best is None or (score < best if checkpoint.mode == "min" else score > best):
        trainer.save_checkpoint(folder / "best.ckpt")
        checkpoint.best_model_score = score


def _accelerator(name: str) -> str:
    """cpu or cuda: the operators exist for these two. Raises ConfigError for a GPU that is not there."""
    if name in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(f"trainer.accelerator={name}, but torch sees no CUDA device here: use cpu, or auto")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _batches_between_validations(t: TrainerConfig) -> int | None:
    """Lightning counts batches here, not optimizer steps."""
    return None if t.val_every_n_steps is None else t.val_every_n_steps * t.accumulate_grad_batches


def _cpu_half_precision(t: TrainerConfig, accelerator: str) -> MixedPrecision | None:
    """Real fp16 with a GradScaler on the CPU, where Lightning would silently take bf16 for 16-mixed."""
    return MixedPrecision("16-mixed", "cpu") if t.precision == "16-mixed" and accelerator == "cpu" else None


def _print_start(
    config: Config, data: SliceDataModule, module: ReconstructionModule, trainer: L.Trainer, console: Console
) -> None:
    n_parameters = sum(p.numel() for p in module.parameters())
    batch = config.data.batch_size * config.trainer.accumulate_grad_batches
    console.print(
        f"QN-Mixer, T = {config.model.n_iterations}, {n_parameters:,} parameters, on {trainer.strategy.root_device}\n"
        f"{config.geometry.n_views} views × {config.geometry.n_detectors} detector bins, noise {config.noise.name}\n"
        f"{data.describe()}\n"
        f"batch {config.data.batch_size} × accumulation {config.trainer.accumulate_grad_batches} = {batch} slices "
        f"an optimizer step",
        highlight=False,
        soft_wrap=True,
    )


def _leave_cores_to_workers(config: Config) -> None:
    """Give torch the cores that data workers leave.

    With more threads than free cores, those that wait for each other spin: a step took ten times as long (measured).
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _THREADS - config.data.num_workers))


def _quieten() -> None:
    """Leave the terminal to what a user can act on."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        "The .*dataloader.* does not have many workers",
        "The number of training batches .* is smaller than the logging interval",
        "Experiment logs directory .* exists and is not empty",
        "Checkpoint directory .* exists and is not empty",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
