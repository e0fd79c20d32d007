"""What a run prints: lines before and after training, and one bar over all steps (lines in a log).

Lines of libraries about which a user can do nothing are hidden.
"""

import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.own_datamodule import OwnDataModule
from qnmixer.evaluation.evaluate import PAGE
from qnmixer.module.base import RunModule
from qnmixer.parallel.buffers import line_on_buffers
from qnmixer.runs.processes.process import is_rank, rank
from qnmixer.runs.run import Run
from qnmixer.runs.tables import in_digits
from qnmixer.runs.terminal import Console, Progress
from qnmixer.settings.run import Config, effective_batch

# Lines before and after training


def print_start(
    config: Config, module: RunModule, data: SliceDataModule | OwnDataModule, trainer: L.Trainer, console: Console
) -> None:
    """Print network, scan, data, batch, and the limit of the training."""
    t, n_parameters = config.trainer, sum(p.numel() for p in module.parameters())
    devices = f" × {t.n_devices} devices" if config.strategy.is_parallel else ""
    noise = f"noise {config.noise.name}"
    if isinstance(data, OwnDataModule):
        noise += " where a batch has no sinograms"
    elif data.measured and not config.noise.load().for_measured:
        noise = "measured"
    lines = [
        f"{module.network.title}, T = {module.network.n_iterations}, {n_parameters:,} parameters, "
        f"on {trainer.strategy.root_device}{devices}, strategy {config.strategy.name}",
        f"{config.geometry.n_views} views × {config.geometry.n_detectors} detector bins, {noise}",
        data.describe(),
    ]
    if n_parameters:
        numbers = [(n, unit) for n, unit in ((t.max_steps, "step"), (t.max_epochs, "epoch")) if n not in (None, -1)]
        limits = [f"{n:,} {unit}{'' if n == 1 else 's'}" for n, unit in numbers]  # without -1, no limit in Lightning
        lines += [
            f"batch {config.data.batch_size}{devices} × accumulation {t.accumulate_grad_batches} = "
            f"{effective_batch(config)} slices an optimizer step",
            f"training ends after {' or '.join(limits)}",
        ]
        if not t.validates:
            lines.append("no validation (trainer.limit_val_batches=0): the checkpoint is last.ckpt, and none is best")
        if t.fast_dev_run:
            n = "one batch" if t.fast_dev_run == 1 else f"{t.fast_dev_run} batches"
            lines.append(f"fast_dev_run: {n} of training, validation and test; no checkpoint, no metrics.csv, no table")
        if config.compile:
            lines.append("compiling in the first step: that takes minutes on a CPU, and compile=false takes none")
        if getattr(config.optimizer.load(), "takes_hidden_weights", False) and not module.network.hidden_weights():
            lines.append(f"the network names no hidden_weights(): optimizer={config.optimizer.name} uses AdamW for all")
        if (about_buffers := line_on_buffers(config, module.network)) is not None:
            lines.append(about_buffers)
    console.lines(*lines)


def print_early_end(trainer: L.Trainer, reasons: Sequence[str], console: Console) -> None:
    """Say if early stopping, for these reasons, another callback or trainer.max_time has ended training too soon."""
    if trainer.should_stop and trainer.global_step != trainer.max_steps and trainer.current_epoch != trainer.max_epochs:
        cause = f"early stopping after {trainer.global_step} steps: {' '.join(reasons)}"
        line = f"training ends early, after {trainer.global_step} steps: trainer.max_time, or a callback"
        console.lines(cause if reasons else line)


def print_end(run: Run) -> None:
    """Print where the results are."""
    run.console.lines(f"run folder: {run.folder}")
    for label, path in (("to look through", run.folder / "evaluation" / PAGE), ("profile", run.folder / "profile")):
        if path.exists():
            run.console.lines(f"{label}: {path}")
    if picture := run.record.get("picture"):
        run.console.lines(f"picture: {picture}")


class TrainingProgress(Callback):
    """Shows the step of all steps, the loss, the last main metric of a validation, samples a second and the time left.

    A terminal has one bar for the whole run, where Lightning's own have one for each epoch, and a log has lines at
    intervals, where they have none. Each validation leaves a line. The loss is that of the last optimizer step. The
    time left is that of the whole run, validations included, at the pace so far. A quiet console shows nothing.
    """

    def __init__(self, console: Console) -> None:
        self.console = console  # that of the whole run, so that other lines go above the bar
        self._progress = Progress(console)
        self._total = math.inf
        self._begin = (0, 0.0)  # step and time at the start of training
        self._step = 0
        self._last: list[str] = []  # the main metric of the last validation

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the step at which a resumed run starts. Start the bar and the clock."""
        self._total, self._step = trainer.estimated_stepping_batches, trainer.global_step
        if self._step:
            self.console.lines(f"resumed at {self._place().replace('/', ' of ')}")
        self._begin = self._step, time.monotonic()
        self._show(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Show an optimizer step, if the batch ended one."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._show(trainer)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Show how far the validation is. That after training has its own bar."""
        self._step = trainer.global_step
        self._show(trainer, f"validating {batch_idx + 1}/{sum(trainer.num_val_batches)}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of a validation, as "step 20/400 · val PSNR 30.12 dB · SSIM 88.10 · 0:01:20 left"."""
        if trainer.sanity_checking:
            return
        assert isinstance(pl_module, RunModule)
        self._step = trainer.global_step
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        main = "val/psnr" if "val/psnr" in values else pl_module.config.monitor
        names = (f"val/{metric}" for metric in pl_module.config.metrics)
        other_metrics = [name for name in names if name in values and name != main]
        self._last = [f"{main} {in_digits(values[main])}"]
        place = [self._place()] if self._step else []  # a network that does not learn has no steps
        scores = " · ".join(_with_unit(name, values[name], pl_module) for name in (main, *other_metrics))
        self.console.lines(" · ".join([*place, f"val {scores}", *self._pace_and_time(trainer)]))
        if trainer.state.fn != TrainerFn.FITTING:  # the last one, after training
            self._progress.end()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar."""
        self._progress.end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the bar before the error is printed."""
        self._progress.end()

    def _show(self, trainer: L.Trainer, validating: str = "") -> None:
        """Draw the bar or print a line, if it is due. `validating`: how far a validation is."""
        if not self._progress.is_due():
            return
        status = [validating] if validating else []
        if not validating and (loss := trainer.callback_metrics.get("train/loss")) is not None:
            status = [f"loss {float(loss):#.3g}"]  # read only when it is shown: that waits for a GPU
        text = " · ".join([*status, *self._last, *self._pace_and_time(trainer)])
        self._progress.show(self._place(), text, self._step, self._total if math.isfinite(self._total) else None)

    def _place(self) -> str:
        return f"step {self._step}" if math.isinf(self._total) else f"step {self._step}/{self._total:.0f}"

    def _pace_and_time(self, trainer: L.Trainer) -> list[str]:
        speed, (first_step, start) = trainer.callback_metrics.get("train/samples_per_second"), self._begin
        texts = [] if speed is None else [f"{float(speed):.{2 if speed < 1 else 1}f} samples/s"]
        if first_step < self._step < self._total < math.inf:
            seconds = (time.monotonic() - start) / (self._step - first_step) * (self._total - self._step)
            texts.append(f"{timedelta(seconds=round(seconds))} left")
        return texts


def _with_unit(name: str, value: float, module: RunModule) -> str:
    """A metric of a validation with its title and unit, as "PSNR 30.12 dB"."""
    name = name.removeprefix("val/")
    metric = module.config.metrics.get(name)
    title, _, unit = ((metric and metric.title) or name).partition(", ")
    return f"{title.partition(' ×')[0]} {in_digits(value)} {unit}".rstrip()


# Lines of libraries

_NOT_FOR_USERS = (
    "The .*dataloader.* does not have many workers",
    "The number of training batches .* is smaller than the logging interval",
    "(?s)You're resuming from a checkpoint that ended before the epoch ended",  # the sampler knows where it was
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "It is recommended to use `self.log\\('(step|samples)', ..., sync_dist=True",  # every rank has the same
    # The stride of a dimension of size 1 means nothing, as in weights of convolutions from one channel. The gradient
    # has the memory layout of its bucket. Only torch's comparison of the numbers says otherwise.
    "Grad strides do not match bucket view strides",
)


def quieten() -> None:
    """Hide lines of libraries about which a user can do nothing."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=message)
    if rank() != 0:
        warnings.simplefilter("ignore")  # rank 0 prints the same warnings
    if is_rank():  # Python drops an exception in a finaliser; that a signal stopped the rank is not worth a traceback
        sys.unraisablehook = lambda unraisable: (
            None if issubclass(unraisable.exc_type, KeyboardInterrupt) else sys.__unraisablehook__(unraisable)
        )
