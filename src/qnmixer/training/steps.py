"""The steps of a training run, and Lightning's Trainer. `qnmixer.fit` has their order."""

import math
import os
import re
import shlex
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ProgressBar, RichModelSummary
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch.profiler import schedule
from torch.utils.data import default_collate

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.splits import RunSplit, seen_by
from qnmixer.errors import ConfigError, DataError, OutOfMemory, Stopped
from qnmixer.evaluation.evaluate import RunData, count_of, evaluate, what_was_evaluated, write_evaluation
from qnmixer.evaluation.logs import log_evaluation
from qnmixer.evaluation.metrics import try_metrics
from qnmixer.files import write_text
from qnmixer.measurement.pairs import check_pairs
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.plan import Planner, advice, channels_of
from qnmixer.module.base import RunModule
from qnmixer.module.build import build_data_module, build_module, needs_truth
from qnmixer.parallel.buffers import buffer_means
from qnmixer.parallel.device_memory import MIB, is_out_of_memory, memory_of
from qnmixer.parallel.devices import allow_tf32, compile_blocks
from qnmixer.parallel.gather import gather
from qnmixer.parallel.lightning_private import count_training_steps, disable_signal_handling
from qnmixer.parallel.parallelism import build_precision, parallelism_of
from qnmixer.reconstruction.checkpoints import Checkpoint, load_weights, resumable
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.weights import find_checkpoint
from qnmixer.runs.loggers import FAILURE, INTERRUPTION, SUCCESS, close_loggers, device_name, log_models
from qnmixer.runs.processes.process import rank, stop_signals, world_size
from qnmixer.runs.records import read_results
from qnmixer.runs.run import Run, resume_hint
from qnmixer.runs.trained_settings import digest_of_training
from qnmixer.settings.parts import mode_of
from qnmixer.settings.plugins import digests_of_code, untrusted_modules
from qnmixer.settings.run import Config, effective_batch, targets_of
from qnmixer.settings.sections import FewBatchesConfig, ProfileConfig
from qnmixer.training.callbacks import (
    DataCheck,
    MemoryMonitor,
    StepMetrics,
    build_callbacks,
    callback_of,
    samples_until,
)
from qnmixer.training.checkpointing import AtomicCheckpointIO, Checkpointing, early_stops
from qnmixer.training.terminal import TrainingProgress, print_early_end, print_start, quieten

# Around a run


@contextmanager
def session(config: Config, run: Run) -> Iterator[None]:
    """Handle stop signals, write results.json, and close the loggers at the end of the block, even after an error."""
    exit_code = FAILURE
    modules = untrusted_modules(targets_of(config).values())
    with stopping_together(run), stop_signals(), run.recording(modules):
        code = digests_of_code(untrusted_modules([*targets_of(config).values(), config.fit]))
        run.record |= {"settings": digest_of_training(config), "code": code}
        run.record |= {"device": device_name(config.trainer.accelerator), "threads": torch.get_num_threads()}
        run.record["processes"] = world_size()  # each has so many threads
        quieten()
        if rank() == 0:
            write_text(run.folder / "code.diff", run.code_diff)  # empty without changes
        try:
            yield
            exit_code = SUCCESS
        except (KeyboardInterrupt, SystemExit):
            failed = read_results(run.folder).get("status") == "failed"
            exit_code = FAILURE if failed else INTERRUPTION
            raise
        finally:
            try:
                if exit_code != FAILURE:
                    log_models(config, run.folder)
            finally:
                close_loggers(exit_code)


@contextmanager
def stopping_together(run: Run) -> Iterator[None]:
    """Add to Stopped how to resume the run, and make all ranks end at the same time.

    A launcher kills the other ranks as soon as one ends, and rank 0 still has loggers to close.
    """
    try:
        yield
    except Stopped as stop:
        if stop.together and dist.is_initialized():
            dist.barrier()
        raise Stopped(stop.number, resume_hint(run.folder), stop.together) from None


# Before training


def prepared_module(config: Config) -> RunModule:
    """Build the LightningModule in its memory mode, with the weights of `finetune`.

    Raises OutOfMemory before it allocates any, if a step does not fit into the memory of a CPU. Raises PluginError if
    a metric fails for two images. Raises ConfigError for keys that a module which optimizes by itself does not take.
    """
    require_memory(config)
    module = build_module(config)
    if not module.automatic_optimization:  # Lightning would say so after the data and the loggers are there
        for key, off in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
            if getattr(config.trainer, key) != off:
                way = f"set trainer.{key}={'null' if off is None else off}"
                raise ConfigError(f"this module optimizes by itself (automatic_optimization=False): {way}")
    try_metrics(getattr(module, "metrics", {}), config.data.image_size)
    if config.finetune is not None:
        load_weights(module, config.finetune, config.finetune_strict)
    apply_memory_mode(module.network, config.memory)
    if config.compile:
        compile_blocks(module.network)
    return module


def require_memory(config: Config) -> None:
    """Raise OutOfMemory for a step that does not fit into the memory of a CPU, by the plan.

    Linux would allow it, fill the swap, and kill the process without a message. CUDA refuses by itself. The plan takes
    seconds. So it runs only if a rough count, of the features of all iterations and of their weights, is large.
    """
    model, data = config.model, config.data
    if config.trainer.accelerator != "cpu" or not model.has_weights:
        return
    channels = channels_of(model)
    values = model.T * channels * (data.batch_size * data.image_size**2 + 16 * channels)
    available = memory_of(torch.device("cpu"))
    if 4 * values / MIB < available / 16:
        return
    planner = Planner(config)
    with suppress(ConfigError):  # nobody can plan it: a module that optimizes by itself, shapes that depend on data
        if planner.estimate(config).peak / MIB > available:
            raise OutOfMemory(advice(planner, config, available))


def resume_checkpoint(config: Config, run: Run) -> Path | None:
    """The checkpoint to resume from; None for a new run. Raises CheckpointError if it does not fit the config."""
    return None if run.resume is None else resumable(config, Path(run.resume)).path


def all_callbacks(config: Config, run: Run) -> list[Callback]:
    """Build those of every run (checkpoints, memory, progress), and those that the config names."""
    mode = mode_of(config.monitor, config.metrics) or "max"
    return [
        Checkpointing(run.folder, config.monitor, config.trainer.save_every_n_steps, mode),
        MemoryMonitor(run.console),
        *([TrainingProgress(run.console)] if config.trainer.enable_progress_bar else []),
        *([RichModelSummary()] if config.trainer.enable_model_summary else []),  # Lightning's default goes to its log
        *build_callbacks(config.callbacks, config.metrics),
    ]


def build_data(config: Config, run: Run, checkpoint: Path | None) -> RunData:
    """Build the LightningDataModule with its training and validation slices. A resumed run gets the same slices.

    One of the user's, of another kind than ours, is set up by Lightning.
    """
    before = None if checkpoint is None else Checkpoint(checkpoint)
    if not config.datamodule.is_of_slices:
        if before is not None:
            run.record_resume(before.steps)
        run.record["sinograms"] = f"of {config.datamodule.target}, or simulated"
        return build_data_module(config)
    t, batch, debug = config.trainer, effective_batch(config), config.debug
    test = int(t.fast_dev_run) or t.limit_test_batches
    if before is not None:
        split = RunSplit(before.split)
    else:  # it is still to be drawn, and knows the slices that the weights of `finetune` were trained on
        base = None if config.finetune is None else Checkpoint(find_checkpoint(config.finetune)).split
        split = RunSplit(base=None if base is None else seen_by(base))
    data = build_data_module(
        config,
        first=debug.batches * batch if isinstance(debug, FewBatchesConfig) else None,
        overfit=batch if debug.name == "overfit" else None,
        batches=t.overfit_batches or t.limit_train_batches,
        same_batches=t.overfit_batches > 0,
        test=test * config.data.batch_size * t.n_devices if isinstance(test, int) else test,
        split=split,
    )
    assert isinstance(data, SliceDataModule)
    data.setup("fit")  # here, so that bad slices end the run before its loggers start
    run.record["sinograms"] = "measured" if data.measured else "simulated"
    if before is not None:  # nothing has refused its settings
        run.record_resume(before.steps)
    return data


# The Trainer


_NOT_FOR_THE_TRAINER = "precision", "limit_test_batches", "val_every_n_steps", "save_every_n_steps", "tf32"
"""Keys of the section that a plugin, our test, our callbacks and torch get."""


def build_trainer(config: Config, folder: Path, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> L.Trainer:
    """Build Lightning's Trainer for a run folder; the config must come from `resolve_devices`. Sets trainer.tf32."""
    t, of_slices = config.trainer, config.datamodule.is_of_slices
    interval, every_n_epochs = t.val_check_interval, t.check_val_every_n_epoch
    if t.val_every_n_steps is not None:  # Lightning counts batches between validations, not optimizer steps
        interval, every_n_epochs = t.val_every_n_steps * t.accumulate_grad_batches, None
    disable_signal_handling()
    allow_tf32(t.tf32)
    # The other keys go to Lightning as they are: a new argument is a key of TrainerConfig, and nothing here.
    arguments: dict[str, Any] = {key: value for key, value in t if key not in _NOT_FOR_THE_TRAINER} | {
        "devices": t.devices if isinstance(t.devices, list) else t.per_node or 1,
        "strategy": parallelism_of(config).strategy(),
        # Not precision=: Lightning turns fp16 into bf16 on a CPU, and refuses it with FSDP2.
        "plugins": [AtomicCheckpointIO(), build_precision(t, t.accelerator)],
        "max_epochs": -1 if t.max_epochs is None else t.max_epochs,
        "val_check_interval": interval,
        "check_val_every_n_epoch": every_n_epochs,
        # Our own loader has the batches of these two: Lightning would replace its sampler.
        "limit_train_batches": None if of_slices else t.limit_train_batches,
        "overfit_batches": 0 if of_slices else t.overfit_batches,
        "limit_val_batches": t.overfit_batches or t.limit_val_batches,
        "use_distributed_sampler": False,  # Lightning's pads with slices that count twice, and shuffles always
        "logger": list(loggers),
        "callbacks": [*buffer_means(config), StepMetrics(), DataCheck(), *callbacks],
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "default_root_dir": folder,
        "profiler": _profiler(config, folder / "profile"),
    }
    trainer = L.Trainer(**arguments)
    count_training_steps(trainer)
    return trainer


def _profiler(config: Config, folder: Path) -> Profiler | None:
    """The profiler of `trainer.profiler`, or torch's for debug=profile. It writes its results into a folder."""
    debug, name = config.debug, config.trainer.profiler
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's writes to the terminal
    if name is not None:
        kinds = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
        return kinds[name](folder, name)
    if not isinstance(debug, ProfileConfig):
        return None
    steps_to_record = schedule(skip_first=debug.warm_up - 1, wait=0, warmup=1, active=debug.steps, repeat=1)
    return PyTorchProfiler(folder, "operators", schedule=steps_to_record, record_shapes=True, acc_events=True)


# Training


@contextmanager
def training(config: Config, run: Run, trainer: L.Trainer, module: RunModule, data: RunData) -> Iterator[None]:
    """Around `trainer.fit`: print how it starts, and record its memory, steps and seconds at the end, also if it fails.

    Raises OutOfMemory for a step that does not fit, KeyboardInterrupt after Ctrl-C, and FloatingPointError for a NaN
    with trainer.detect_anomaly.
    """
    print_start(config, module, data, trainer, run.console)
    if isinstance(data, SliceDataModule) and not data.has_truth:  # pairs are checked at the first batch
        for part in ("train", "val") if config.trainer.validates else ("train",):
            check_pairs(config, module.projector, default_collate([data.dataset(part)[0]]), part)
    debugging = naming_nan_gradients() if config.trainer.detect_anomaly else nullcontext()
    advising = out_of_memory_advice(config, module, trainer)
    with recording_training(run, trainer), advising, debugging, naming_causes(config):
        yield
    print_early_end(trainer, early_stops(trainer), run.console)
    # The profile is written. torch's profiler refuses a validation alone, which may follow.
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]  # Lightning's, untyped


@contextmanager
def recording_training(run: Run, trainer: L.Trainer) -> Iterator[None]:
    """Record memory, steps and seconds at the end of training, also if it fails."""
    try:
        yield
    finally:
        if trainer.global_step != run.resumed_at or "memory" not in run.record:  # else it trained no further step
            run.record["memory"] = callback_of(trainer, MemoryMonitor).as_record()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning's, untyped
            run.record["fast_dev_run"] = int(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if trainer.global_step or run.resumed_at is None:  # else it failed before Lightning read its checkpoint
            run.record |= {"steps": trainer.global_step, "seconds": callback_of(trainer, Checkpointing).seconds}


@contextmanager
def out_of_memory_advice(config: Config, module: RunModule, trainer: L.Trainer) -> Iterator[None]:
    """Turn an error for lack of memory into OutOfMemory, whose line names changes that would fit."""
    available = memory_of(trainer.strategy.root_device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Frames of the error own the tensors that filled the memory. The plan needs that memory.
        traceback.clear_frames(error.__traceback__)
        line = f"out of memory: lower data.batch_size={config.data.batch_size}"
        with suppress(ConfigError):  # nobody can plan it
            line = advice(Planner(config, module.projector.cpu()), config, available)
        raise OutOfMemory(line) from error


@contextmanager
def naming_nan_gradients() -> Iterator[None]:
    """Turn an error of torch's anomaly detection into a FloatingPointError that names the operator and its caller."""
    with warnings.catch_warnings(record=True) as warned:  # torch names the code line in a warning only
        try:
            yield
        except RuntimeError as error:
            if not (match := re.search(r"Function '(\w+)' returned nan values", str(error))):
                raise
            traces = "".join(str(warning.message) for warning in warned)
            frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n +(.*)', traces)
            where = [f" of `{code}` ({path}:{line})" for path, line, code in frames if "site-packages" not in path]
            raise FloatingPointError(f"the gradient became NaN in {match[1]}{''.join(where[-1:])}") from error


@contextmanager
def naming_causes(config: Config) -> Iterator[None]:
    """Raise KeyboardInterrupt if Lightning has turned one into a SystemExit.

    Raise the first error if Lightning fails to tear down after it. Raise ConfigError for a module that looks for the
    truth, where data have none.
    """
    try:
        yield
    except SystemExit as end:
        raise end.__context__ or end from None
    except ValueError as error:  # Lightning counts the batches when it starts
        if "val_check_interval" not in str(error):
            raise
        raise ConfigError(" ".join(str(error).replace("`", "").split())) from error
    except Exception as error:
        if isinstance(error, KeyError) and error.args == ("image",):
            raise needs_truth(config) from error
        original = error.__context__  # its loops are half set up while the data workers start
        if original is not None and (isinstance(original, KeyboardInterrupt) or "iter(combined_loader)" in str(error)):
            raise original from None
        raise


# After training


def validate_last_steps(config: Config, run: Run, trainer: L.Trainer, module: RunModule, data: RunData) -> float:
    """Validate the last steps, if training ended between two validations. Returns the best monitored value.

    NaN without validation.

    Raises FloatingPointError if the last value is not finite: no exception tells of it, and the run has failed.
    """
    if not config.trainer.validates:
        run.record["best"] = {}
        return math.nan
    checkpointing = callback_of(trainer, Checkpointing)
    if checkpointing.validated != trainer.global_step or checkpointing.best is None:
        with naming_causes(config):
            trainer.validate(module, datamodule=data, verbose=False)
        checkpointing.save_validated(trainer)
    assert checkpointing.best is not None
    if math.isfinite(checkpointing.best):
        run.record["best"] = {config.monitor: checkpointing.best}
    checkpointing.check_end(trainer.global_step)
    return checkpointing.best


def evaluate_best(config: Config, run: Run, trainer: L.Trainer, module: RunModule, data: RunData) -> None:
    """Evaluate best.ckpt on the test slices. Table, page and picture go into evaluation/ and to the loggers.

    A line says how others are evaluated, if a LightningDataModule of the user's has no test_dataloader.
    """
    try:
        n_images = count_of(data, "test")
    except DataError as error:
        if isinstance(data, SliceDataModule):
            raise
        line = f"no table: {error}. On others:"
        command = shlex.join(["python", "-m", "qnmixer.evaluate", f"run={run.folder}", "data=NAME", "data.root=FOLDER"])
        run.console.lines(f"{line} {command}")
        return
    allow_tf32(False)  # the figures are those of `evaluate`
    trained = Reconstructor(config, module.projector)
    if config.trainer.fast_dev_run:  # there is no checkpoint
        weights = module.network.state_dict()
        trained.network.load_state_dict({name: gather(tensor).detach() for name, tensor in weights.items()})
    else:
        load_weights(trained, run.folder)
        slices = "" if n_images is None else f"{n_images} slices of "
        run.console.print(f"evaluating {find_checkpoint(run.folder).name} on {slices}the test split", highlight=False)
    evaluation = evaluate(trained, data, "test", config.evaluation, trainer.strategy.root_device)
    if config.trainer.fast_dev_run or not trainer.is_global_zero:
        return
    evaluation.trained = data.trained("test", data.split.record)
    run.record["test"] = evaluation.means()
    picture = write_evaluation(run.folder / "evaluation", evaluation, run.console)
    run.record |= {"picture": str(picture), "evaluated": what_was_evaluated(trained, evaluation)}
    step = trainer.global_step
    samples = float(samples_until(trainer, step))
    log_evaluation(trainer.loggers, evaluation, picture.parent, "test", step, samples=samples)
