"""One training run from start to results: data, network, Trainer, evaluation of the best checkpoint."""

import logging
import os
import traceback
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from rich.console import Console

from qnmixer.config import Config, TrainerConfig, effective_batch, to_plain
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import OutOfMemory
from qnmixer.parallel.memory import apply_memory_mode
from qnmixer.parallel.strategies import build_precision, build_strategy
from qnmixer.ranks import rank
from qnmixer.tracking.loggers import build_loggers, close_loggers
from qnmixer.tracking.results import results
from qnmixer.training.callbacks import IteratePictures, PromptInterrupt, ValidationLine
from qnmixer.training.checkpoints import AtomicCheckpointIO, load_weights, resumable
from qnmixer.training.evaluation import evaluate, log_evaluation, title_of, write_evaluation
from qnmixer.training.memory_monitor import MemoryMonitor
from qnmixer.training.module import ReconstructionModule
from qnmixer.training.out_of_memory import advice, is_out_of_memory, memory_of
from qnmixer.training.planning import MIB, Planner

_THREADS = torch.get_num_threads()  # as the process started: the jobs of a sweep share it


def fit(config: Config, folder: Path, overrides: list[str]) -> float:
    """Train, evaluate the best checkpoint, leave everything in `folder`; returns the best monitored value.

    One rank of a run, or all of it: rank 0 prints and writes. Raises UserError for what the user can mend;
    results.json then says failed.
    """
    console = Console(quiet=rank() != 0)
    exit_code = 1
    record_kept: AbstractContextManager[dict[str, Any]]
    record_kept = results(folder, overrides) if rank() == 0 else nullcontext({})
    with record_kept as record:
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
    L.seed_everything(config.seed, workers=True, verbose=False)
    module = ReconstructionModule(config)
    if config.finetune is not None:
        load_weights(module, Path(config.finetune))
    resumed = None if config.resume is None else resumable(config, Path(config.resume))
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
    memory = MemoryMonitor(console, planner.devices(config)[0].footprint.peak / MIB if rank() == 0 else None)
    trainer = build_trainer(config, folder, [checkpoint, line, memory], console)
    _print_start(config, data, module, trainer, console)
    available = memory_of(trainer.strategy.root_device)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resumed, weights_only=True)
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
        trained = ReconstructionModule(config, module.projector)
        load_weights(trained, folder)
        evaluation = evaluate(trained, data, "test", config.evaluation, trainer.strategy.root_device)
        if trainer.is_global_zero:
            record["test"] = evaluation.means()
            title = title_of(config, config.data, "test")
            picture = write_evaluation(folder / "evaluation", evaluation, title, console)
            record["picture"] = str(picture)
            log_evaluation(trainer.loggers, evaluation, picture)
    return best


def build_trainer(config: Config, folder: Path, callbacks: list[Callback], console: Console) -> L.Trainer:
    """Lightning's Trainer as a config says, which must have been counted (`on_this_machine`)."""
    t = config.trainer
    callbacks = [
        *callbacks,
        LearningRateMonitor("step"),
        IteratePictures(folder / "pictures"),
        PromptInterrupt(),
    ]
    if console.is_terminal and not console.quiet:
        callbacks.append(RichProgressBar(leave=False))
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
        use_distributed_sampler=False,
        logger=build_loggers(config.logger, folder, to_plain(config)),
        callbacks=callbacks,
        enable_progress_bar=console.is_terminal and not console.quiet,
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


def _batches_between_validations(t: TrainerConfig) -> int | None:
    """Lightning counts batches here, not optimizer steps."""
    return None if t.val_every_n_steps is None else t.val_every_n_steps * t.accumulate_grad_batches


def _print_start(
    config: Config, data: SliceDataModule, module: ReconstructionModule, trainer: L.Trainer, console: Console
) -> None:
    n_parameters, n_slices = sum(p.numel() for p in module.parameters()), len(data.dataset("train"))
    t, batch = config.trainer, effective_batch(config)
    nodes = f" × {t.num_nodes} nodes" if t.num_nodes > 1 else ""
    devices = f" × {t.devices} devices{nodes}" if config.strategy.name != "single" else ""
    last = f", the last of {n_slices % batch}" if n_slices % batch else ""
    console.print(
        f"QN-Mixer, T = {config.model.n_iterations}, {n_parameters:,} parameters, on {trainer.strategy.root_device}"
        f"{devices}, strategy {config.strategy.name}\n"
        f"{config.geometry.n_views} views × {config.geometry.n_detectors} detector bins, noise {config.noise.name}\n"
        f"{data.describe()}\n"
        f"batch {config.data.batch_size}{devices} × accumulation {t.accumulate_grad_batches} = {batch} slices "
        f"an optimizer step; {-(-n_slices // batch):,} steps an epoch{last}",
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
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "The .*dataloader.* does not have many workers",
        "The number of training batches .* is smaller than the logging interval",
        "Experiment logs directory .* exists and is not empty",
        "Checkpoint directory .* exists and is not empty",
        "The dirpath has changed from",
        "(?s)You're resuming from a checkpoint that ended before the epoch ended",  # the sampler knows where it was
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
