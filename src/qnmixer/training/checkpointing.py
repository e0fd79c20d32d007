"""Checkpointing: write best.ckpt and last.ckpt, with state that Lightning leaves out, and stop between two steps.

A checkpoint is written between two optimizer steps, after all rows of the last step are logged. That is before the next
batch, at the end of a validation, or at the end of training. A stop signal takes effect at the same points.
"""

import math
import shutil
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from qnmixer.data.samplers import random_states, set_random_states
from qnmixer.errors import ConfigError, Stopped, say
from qnmixer.files import atomic_file
from qnmixer.module.base import RunModule
from qnmixer.parallel.lightning_private import number_rows
from qnmixer.parallel.torch_private import schedules_in, step_to
from qnmixer.reconstruction.pretrained import encoded_readably, load
from qnmixer.reconstruction.weights import RUN_KEY
from qnmixer.runs.layout import checkpoint_in
from qnmixer.runs.loggers import log_models
from qnmixer.runs.processes.process import defer_stop, is_rank, rank, stop_requested
from qnmixer.settings.logged_names import best_name


class Checkpointing(Checkpoint):
    """Writes best.ckpt and last.ckpt, and stops training after a stop signal.

    Lightning's ModelCheckpoint writes before the row of the step is logged, so a killed run would lose that row. It
    also has no random states, and cannot stop.

    Args:
        folder: they are checkpoints/best.ckpt and checkpoints/last.ckpt in it.
        monitor: the metric of the best checkpoint.
        every_n_steps: write last.ckpt every n optimizer steps, and at validations; None: at validations only.
        mode: the better value of the metric, max or min.
    """

    def __init__(
        self, folder: str | Path, monitor: str = "val/psnr", every_n_steps: int | None = 100, mode: str = "max"
    ) -> None:
        self.folder, self.monitor, self.every_n_steps = Path(folder), monitor, every_n_steps
        self._sign = -1 if mode == "min" else 1
        self.best: float | None = None
        self.last: float | None = None  # the monitored value of the last validation, as it was measured
        self.validated = 0  # optimizer steps at the last validation
        self.seconds = 0.0  # of earlier parts of a resumed run
        self._start = time.monotonic()
        self._saved = 0
        self._first_step = 0  # optimizer steps before this part of the run
        self._group: dist.ProcessGroup | None = None  # in which ranks agree to stop
        self._resumed: list[dict[str, Any]] = []  # random states of all ranks in the checkpoint
        self._random: dict[str, Any] | None = None  # states at the start of a validation that is running
        self._schedules: list[BuiltSchedule] = []
        self._schedules_before: list[str] | None = None  # as the part before the resume has built them

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the process group in which ranks agree to stop. Note the schedules, before a checkpoint fills them."""
        self._schedules = [BuiltSchedule(config.scheduler) for config in trainer.lr_scheduler_configs]
        if dist.is_initialized():
            # gloo, because its messages do not wait for the work that is queued on a GPU.
            self._group = dist.new_group(backend="gloo")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the random states, and the place in a schedule that may be another one now.

        A first step that compiles takes minutes, and may end at once. Not in one of several ranks: the others would
        wait for it.
        """
        assert isinstance(pl_module, RunModule)
        if self._schedules_before is not None:
            for schedule, before in zip(self._schedules, self._schedules_before, strict=True):
                rates = schedule.resume(before)
                if rates is not None and not math.isclose(*rates) and rank() == 0:
                    say(
                        f"the schedule is another one now: the learning rate goes on at {rates[1]:.3g}, "
                        f"not {rates[0]:.3g} (a new run with finetune= begins with a schedule of its own)"
                    )
        forget_early_stops(trainer)  # that of the run before a resume
        defer_stop(is_rank() or not pl_module.settings.get("compile"))
        self._first_step = trainer.global_step
        self._restore_random(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a share of an epoch between validations be whole optimizer steps: a checkpoint has no gradients."""
        n, batches = trainer.accumulate_grad_batches, trainer.val_check_batch
        if isinstance(batches, int):
            trainer.val_check_batch = max(n, batches // n * n)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Between two steps: write last.ckpt if it is due, and stop if a rank has a stop signal."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        number_rows(trainer)
        step = trainer.global_step
        if step > self._first_step:
            defer_stop(True)
        if self.every_n_steps and step % self.every_n_steps == 0 and step > self._saved:
            self.save(trainer, "last")
        self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the random states. An interrupted validation starts again with them."""
        if trainer.sanity_checking:
            return
        self._restore_random(trainer)  # a resumed run that only lacks its last validation
        self._random = random_state(trainer.strategy.root_device)

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Stop if a rank has a stop signal."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._stop_if_asked(trainer)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the best monitored value so far, in the row of the validation. It is the value of best.ckpt."""
        if trainer.sanity_checking:
            return
        score = self._score(trainer)
        best = score if self._is_best(score) else self.best
        assert best is not None
        name = best_name(self.monitor)
        pl_module.log(name, best, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write best.ckpt, if it is the best, and last.ckpt."""
        if trainer.sanity_checking:
            return
        decide_early_stop(trainer)
        self._random = None
        self.validated = trainer.global_step
        if trainer.state.fn == TrainerFn.FITTING:
            self.save_validated(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take back a stop that comes too early. Lightning calls early stopping before it."""
        decide_early_stop(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write last.ckpt. From now on a signal stops at once: a validation and the evaluation can be repeated."""
        if self._saved != trainer.global_step:
            self.save(trainer, "last")
        self._stop_if_asked(trainer)
        defer_stop(False)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the state that Lightning leaves out."""
        data = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it when it has one
        checkpoint[RUN_KEY] = {
            "split": data.split.record if hasattr(data, "split") else None,
            "monitor": self.monitor,
            "best": self.best,
            "last": self.last,
            "validated": self.validated,
            "validating": self._random is not None,
            "seconds": self.seconds + time.monotonic() - self._start,
            "random": _of_all_ranks(self._random or random_state(trainer.strategy.root_device)),
            "schedules": [schedule.settings for schedule in self._schedules],
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the state that Lightning leaves out."""
        state = checkpoint[RUN_KEY]
        self._resumed = state["random"]
        self.validated, self._saved = state["validated"], checkpoint["global_step"]
        self.seconds = state["seconds"]
        self._schedules_before = state.get("schedules")
        if state["monitor"] == self.monitor:
            self.best, self.last = state["best"], state["last"]

    def save_validated(self, trainer: L.Trainer) -> None:
        """Write best.ckpt, if the last validation was the best, and last.ckpt.

        best.ckpt is written first: after a crash, last.ckpt must not name a best value whose file does not exist. Then
        last.ckpt is a copy of it: to gather and encode the state again would take longer.
        """
        self.last, score = float(trainer.callback_metrics[self.monitor]), self._score(trainer)
        # The ranks must agree, or one would wait for the others inside `save`.
        if not trainer.strategy.reduce_boolean_decision(self._is_best(score)):
            self.save(trainer, "last")
            return
        self.best = score
        self.save(trainer, "best")
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning's, untyped
            best, last = (checkpoint_in(self.folder, name) for name in ("best", "last"))
            with best.open("rb") as source, atomic_file(last) as stream:
                shutil.copyfileobj(source, stream)
        self._saved = trainer.global_step

    def check_end(self, step: int) -> None:
        """Raise FloatingPointError if the last validation gave NaN, or the worst value: the network is lost."""
        if self.last is not None and (math.isnan(self.last) or self.last == -self._sign * math.inf):
            raise FloatingPointError(f"{self.monitor} became {self.last} at step {step}")

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write NAME.ckpt; nothing in Lightning's fast_dev_run."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning's, untyped
            return
        # Every rank must get here: Lightning gathers the state with collectives, and rank 0 writes.
        trainer.save_checkpoint(checkpoint_in(self.folder, name), weights_only=False)
        module = trainer.lightning_module
        if trainer.is_global_zero and isinstance(module, RunModule) and module.settings:
            log_models(module.config, self.folder, name)
        if name == "last":
            self._saved = trainer.global_step

    def _score(self, trainer: L.Trainer) -> float:
        """The monitored value of the last validation; the worst possible value for NaN."""
        if self.monitor not in (values := trainer.callback_metrics):
            names = ", ".join(name for name in values if name.startswith("val/"))
            raise ConfigError(f"monitor={self.monitor} is not known: validation logs {names}")
        score = float(values[self.monitor])
        return -self._sign * math.inf if math.isnan(score) else score

    def _is_best(self, score: float) -> bool:
        return self.best is None or self._sign * score > self._sign * self.best

    def _restore_random(self, trainer: L.Trainer) -> None:
        states, self._resumed = self._resumed, []
        if rank() < len(states):
            set_random_state(states[rank()], trainer.strategy.root_device)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        """Stop all ranks if one of them has a stop signal."""
        asked = torch.tensor(float(stop_requested() is not None), device="cpu")
        if self._group is not None:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        if not asked:
            return
        if self._saved != trainer.global_step or self._random is not None:
            self.save(trainer, "last")
        defer_stop(False)
        raise Stopped(stop_requested(), together=True)


class BuiltSchedule:
    """A learning-rate schedule as the module has built it, for a resume that changes it, such as its length.

    Lightning restores the rate that the old schedule has given the next step. torch restores the settings of a
    schedule too, except functions. So the first step, or all of them, would follow the old schedule.
    """

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self.state = deepcopy(schedule.state_dict())
        self.groups = [_values(group) for group in schedule.optimizer.param_groups] if _counts_steps(schedule) else []
        self.settings = repr((self.state, self.groups))  # what it was built from, for the checkpoint

    def resume(self, settings_before: str) -> tuple[float, float] | None:
        """Put the restored schedule to the place that it has after as many steps of its own.

        With the schedule of before that is the place where it is. A rate that something else has set stays.

        Returns the learning rate of the first group for the next step: as it was restored, and as it is now. None if
        nothing was changed.
        """
        schedule = self.schedule
        parts = schedules_in(schedule)
        is_changed = self.settings != settings_before
        if not _counts_steps(schedule) or not (is_changed or any(hasattr(part, "lr_lambdas") for part in parts)):
            return None
        groups, n_steps = schedule.optimizer.param_groups, getattr(schedule, "last_epoch", parts[0].last_epoch)
        rates = [(group["lr"], rate) for group, rate in zip(groups, schedule.get_last_lr(), strict=True)]
        only_a_function = isinstance(schedule, LambdaLR) and not is_changed
        with warnings.catch_warnings(action="ignore"):  # of a schedule that steps before its optimizer
            if not only_a_function:
                schedule.load_state_dict(deepcopy(self.state))
                for group, values in zip(groups, self.groups, strict=True):
                    group |= values
            if isinstance(schedule, LambdaLR):  # any step is as near as the next
                step_to(schedule, n_steps)
            else:
                for _ in range(n_steps):
                    schedule.step()
        for group, (rate, of_schedule) in zip(groups, rates, strict=True):
            if rate != of_schedule:
                group["lr"] = rate
        return float(rates[0][0]), float(groups[0]["lr"])


def _counts_steps(schedule: Any) -> bool:
    """Whether the rates of a schedule follow from the number of steps. Those of a schedule by a metric do not."""
    return isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python, NumPy, torch, and of the device if it is a GPU, as plain data for weights_only=True."""
    return random_states() | {"cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    set_random_states(state)
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _of_all_ranks(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of all processes, by rank, on each of them."""
    if not dist.is_initialized():
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def decide_early_stop(trainer: L.Trainer) -> None:
    """Take an early stop back before trainer.min_steps and min_epochs: the next validation decides anew.

    Lightning would keep it, and end training there, whatever the metric does until then. No checkpoint has it, so a
    resumed run would not end there.
    """
    epochs = trainer.current_epoch + trainer.is_last_batch  # completed: the end of this one is still to come
    too_early = trainer.global_step < (trainer.min_steps or 0) or epochs < (trainer.min_epochs or 0)
    if too_early and early_stops(trainer):
        forget_early_stops(trainer)
        trainer.should_stop = False


def early_stops(trainer: L.Trainer) -> list[str]:
    """Why early stopping stops the training; empty if it goes on."""
    messages = (callback.stopping_reason_message for callback in trainer.early_stopping_callbacks)
    return [message.removesuffix(" Signaling Trainer to stop.") for message in messages if message]


def forget_early_stops(trainer: L.Trainer) -> None:
    """Let no callback have stopped the training."""
    for callback in trainer.early_stopping_callbacks:
        callback.stopping_reason_message = None


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint completely or not at all. On a full disk the previous checkpoint stays."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write to a temporary file beside path, then rename. Numbers of NumPy become Python's.

        Raises PluginError for an entry, such as one of a callback's `state_dict`, that nothing could read back.
        """
        # Into memory first: on a full disk torch.save raises a RuntimeError that does not name the cause.
        encoded = encoded_readably(_plain(checkpoint))
        with atomic_file(Path(path)) as stream:
            stream.write(encoded.getbuffer())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load on the CPU, without unpickling code."""
        return load(Path(path))


def _plain(value: Any) -> Any:
    """A value with Python's numbers in place of NumPy's, at any depth."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_plain(key): _plain(child) for key, child in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple, set) else value
