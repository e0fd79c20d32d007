"""One training run from start to results: data, network, Trainer, evaluation of the best checkpoint."""

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from qnmixer.checkpoints.reading import built_from, find_checkpoint, load_weights, resumable, steps_of
from qnmixer.config import Config, FewBatchesConfig, ProfileConfig, TrainerConfig, WandbConfig, effective_batch
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.sampler import EpochSampler
from qnmixer.errors import OutOfMemory, Stopped
from qnmixer.evaluation.evaluate import evaluate, title_of, what_was_evaluated, write_evaluation
from qnmixer.files import write_text
from qnmixer.memory.advice import advice
from qnmixer.memory.limits import is_out_of_memory, memory_of
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.plan import Planner
from qnmixer.parallel.compilation import compile_blocks
from qnmixer.plugins import trust_words
from qnmixer.processes.ranks import at_once, rank
from qnmixer.processes.signals import heeding
from qnmixer.reconstructor import Reconstructor
from qnmixer.tracking.loggers import CODE_DIFF, DONE, FAILED, INTERRUPTED, close_loggers, device_name, log_checkpoint
from qnmixer.tracking.results import git_diff, note, read_results, results
from qnmixer.tracking.resume import goes_on, how_to_go_on
from qnmixer.tracking.resume import recorded as overrides_of
from qnmixer.training.callbacks import ValidationLine, log_evaluation
from qnmixer.training.checkpointing import Keeping
from qnmixer.training.health import HealthMonitor
from qnmixer.training.lightning_private import number_rows
from qnmixer.training.memory_monitor import MemoryMonitor
from qnmixer.training.module import ReconstructionModule
from qnmixer.training.profiling import Profile, describe, naming_nan_gradients
from qnmixer.training.trainer import build_trainer


def fit(config: Config, folder: Path, overrides: list[str]) -> float:
    """Train, evaluate the best checkpoint, leave everything in `folder`; returns the best monitored value.

    One rank of a run, or all of it: rank 0 prints and writes. Raises UserError for what the user can mend;
    results.json then says failed.
    """
    console = Console(quiet=rank() != 0)
    exit_code = FAILED
    record_kept: AbstractContextManager[dict[str, Any]]
    here = goes_on(folder, config.resume)
    recorded = overrides_of(folder, overrides)
    record_kept = results(folder, recorded, here) if rank() == 0 else nullcontext({})
    with _stopping(folder), heeding(), record_kept as record:
        try:
            best = _fit(config, folder, recorded, here, console, record)
            exit_code = DONE
        except (KeyboardInterrupt, SystemExit):
            another_failed = at_once() or read_results(folder).get("status") == "failed"
            exit_code = FAILED if another_failed else INTERRUPTED
            raise
        finally:
            close_loggers(config.logger, exit_code)
    console.print(f"run folder: {folder}", soft_wrap=True)
    if picture := record.get("picture"):
        words = [f"run={folder}", *trust_words(built_from(config).values()), "data=dicom data.root=/path/to/dicom"]
        next_step = f"python -m qnmixer.evaluate {' '.join(words)}"
        console.print(f"on your own slices: {next_step}\npicture: {picture}", soft_wrap=True, highlight=False)
    return best


def _fit(
    config: Config, folder: Path, overrides: list[str], here: bool, console: Console, record: dict[str, Any]
) -> float:
    _quieten()
    record |= {"device": device_name(config.trainer.accelerator), "threads": torch.get_num_threads()}
    if config.tags:
        record["tags"] = config.tags
    L.seed_everything(config.seed, workers=True, verbose=False)
    module = ReconstructionModule(config)
    if config.finetune is not None:
        load_weights(module, config.finetune)
    resumed = None if config.resume is None else resumable(config, Path(config.resume))
    resumed_at = steps_of(resumed) if resumed is not None and here else None
    if resumed_at is not None and rank() == 0:
        note(folder, record, "resumed", {"step": resumed_at})
    apply_memory_mode(module.network, config.memory)
    if config.compile:
        compile_blocks(module.network)
    data = _build_data(config)
    data.setup("fit")
    keeping = Keeping(folder / "checkpoints", config.monitor, config.trainer.save_every_n_steps, here)
    learns = any(p.requires_grad for p in module.parameters())  # FBP and total variation have nothing to learn
    memory = MemoryMonitor(console)
    health = HealthMonitor(console, partial(note, folder, record, "warnings"), _warm_up(config))
    callbacks: list[Callback] = [keeping, ValidationLine(console), memory, health]
    if isinstance(config.debug, ProfileConfig):
        callbacks.append(Profile(folder / "profile", config.debug, console))
    if rank() == 0:
        _keep_diff(folder)
    trainer = build_trainer(config, folder, callbacks, console, overrides, resumed_at)
    _print_start(config, data, module, trainer, console)
    available = memory_of(trainer.strategy.root_device)
    try:
        with naming_nan_gradients() if config.debug.name == "anomaly" else nullcontext(), _interrupted_as_raised():
            if learns:
                trainer.fit(module, datamodule=data, ckpt_path=resumed, weights_only=True)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
        raise OutOfMemory(advice(Planner(config, module.projector.cpu()), config, available)) from error
    finally:
        record["memory"] = memory.record(record.get("memory"))
        record |= {"steps": trainer.global_step, "seconds": keeping.seconds}
    if keeping.validated != trainer.global_step or keeping.best is None:  # score the last steps too
        number_rows(trainer, trainer.global_step)
        with _interrupted_as_raised():
            trainer.validate(module, datamodule=data, verbose=False)
        keeping.keep(trainer)
    assert keeping.best is not None
    best = keeping.best
    record["best"] = {config.monitor: best}
    if config.test_after_training:
        trained = Reconstructor(config, module.projector)
        load_weights(trained, folder)
        device = trainer.strategy.root_device
        evaluation = evaluate(trained, data, "test", config.evaluation, device)
        if trainer.is_global_zero:
            record["test"] = evaluation.means()
            title = title_of(config, config.data, "test")
            picture = write_evaluation(folder / "evaluation", evaluation, title, config, device, console, folder)
            record |= {"picture": str(picture), "evaluated": what_was_evaluated(trained, config.data)}
            sampler = data.train_dataloader().sampler
            assert isinstance(sampler, EpochSampler)
            samples = float(sampler.samples_until(trainer.global_step))
            log_evaluation(trainer.loggers, evaluation, picture, trainer.global_step, samples)
    if isinstance(config.logger, WandbConfig) and config.logger.log_checkpoint:
        log_checkpoint(trainer.loggers, find_checkpoint(folder), {config.monitor: best})
    return best


@contextmanager
def _interrupted_as_raised() -> Iterator[None]:
    """Around Lightning, which makes a SystemExit of every KeyboardInterrupt."""
    try:
        yield
    except SystemExit as end:
        raise end.__context__ or end from None


@contextmanager
def _stopping(folder: Path) -> Iterator[None]:
    """Around a run: where somebody stops it, say how to go on, and have the ranks end together.

    Who launched them ends the others when one ends, and rank 0 has its logs to close.
    """
    try:
        yield
    except Stopped as stop:
        if stop.together and dist.is_initialized():
            dist.barrier()
        raise Stopped(stop.number, how_to_go_on(folder), stop.together) from None


def _keep_diff(folder: Path) -> None:
    if diff := git_diff():
        write_text(folder / CODE_DIFF, diff)
    else:
        (folder / CODE_DIFF).unlink(missing_ok=True)


def _build_data(config: Config) -> SliceDataModule:
    batch, debug = effective_batch(config), config.debug
    return SliceDataModule(
        config.data,
        first=debug.batches * batch if isinstance(debug, FewBatchesConfig) else None,
        overfit=batch if debug.name == "overfit" else None,
        batches=config.trainer.extra.get("limit_train_batches"),
    )


def _warm_up(config: Config) -> int:
    """Optimizer steps in which a network may be worse than FBP."""
    return max(20, round(config.schedule.warmup * max(0, config.trainer.max_steps)))


def _print_start(
    config: Config, data: SliceDataModule, module: ReconstructionModule, trainer: L.Trainer, console: Console
) -> None:
    n_parameters, n_slices = sum(p.numel() for p in module.parameters()), len(data.dataset("train"))
    t, batch = config.trainer, effective_batch(config)
    nodes = f" × {t.num_nodes} nodes" if t.num_nodes > 1 else ""
    devices = f" × {t.devices} devices{nodes}" if config.strategy.name != "single" else ""
    last = f", the last of {n_slices % batch}" if n_slices % batch else ""
    console.print(
        f"{module.network.title}, T = {module.network.n_iterations}, {n_parameters:,} parameters, "
        f"on {trainer.strategy.root_device}{devices}, strategy {config.strategy.name}\n"
        f"{config.geometry.n_views} views × {config.geometry.n_detectors} detector bins, noise {config.noise.name}\n"
        f"{data.describe()}\n"
        f"batch {config.data.batch_size}{devices} × accumulation {t.accumulate_grad_batches} = {batch} slices "
        f"an optimizer step; {_steps_an_epoch(config, n_slices):,} steps an epoch{last}",
        highlight=False,
        soft_wrap=True,
    )
    if n_parameters:
        console.print(_length(t, _steps_an_epoch(config, n_slices)), highlight=False, soft_wrap=True)
    if line := describe(config):
        console.print(line, highlight=False, soft_wrap=True)


def _steps_an_epoch(config: Config, n_slices: int) -> int:
    limit = config.trainer.extra.get("limit_train_batches")
    steps = limit // config.trainer.accumulate_grad_batches if isinstance(limit, int) else limit
    return EpochSampler(n_slices, shuffle=False, batch_size=effective_batch(config), batches=steps).steps


def _length(t: TrainerConfig, steps_an_epoch: int) -> str:
    """Which limit ends a run."""
    if t.max_epochs is None:
        return f"training ends after {t.max_steps:,} steps ({t.max_steps / steps_an_epoch:.3g} epochs)"
    by_epochs = t.max_epochs * steps_an_epoch
    if -1 < t.max_steps < by_epochs:
        return (
            f"training ends after {t.max_steps:,} steps, before trainer.max_epochs={t.max_epochs} ({by_epochs:,} steps)"
        )
    before = f", before trainer.max_steps={t.max_steps}" if t.max_steps > by_epochs else ""
    return f"training ends after {t.max_epochs:,} epoch{'s' * (t.max_epochs > 1)} ({by_epochs:,} steps){before}"


def _quieten() -> None:
    """Leave the terminal to what a user can act on."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "The .*dataloader.* does not have many workers",
        "The number of training batches .* is smaller than the logging interval",
        "Checkpoint directory .* exists and is not empty",
        "The dirpath has changed from",
        "(?s)You're resuming from a checkpoint that ended before the epoch ended",  # the sampler knows where it was
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "It is recommended to use `self.log\\('(step|samples)', ..., sync_dist=True",  # every rank has the same
    ):
        warnings.filterwarnings("ignore", message=message)
