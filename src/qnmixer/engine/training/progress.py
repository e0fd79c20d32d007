"""The progress of a run: one bar over all steps on a terminal, lines in a log."""

import math
import time
from collections import deque
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from qnmixer.engine.reports.progress import Bar, Pace, takes_a_bar
from qnmixer.engine.reports.tables import Console, in_digits
from qnmixer.engine.run_module import RunModule

_RECENT_LOSSES = 20  # their mean is shown


class TrainingProgress(Callback):
    """Shows the step of all steps, the loss, the last main metric of a validation, samples a second and the time left.

    A terminal has one bar for the whole run, where Lightning's own have one for each epoch. A log has lines at
    intervals. Each validation leaves a line. The loss is the mean over the last 20 optimizer steps. The time left is
    that of the whole run, validations included, at the pace so far. Values logged with `prog_bar=True` are shown too.

    Args:
        console: that of the whole run, so that other lines go above the bar. A quiet one shows nothing.
        enabled: False: only lines at validations. The same holds if the config's callbacks include a progress bar.
    """

    def __init__(self, console: Console, enabled: bool = True) -> None:
        self.console, self.enabled = console, enabled
        self._total = math.inf
        self._begin = (0, 0.0)  # step and time at the start of training
        self._step = 0
        self._losses: deque[Tensor] = deque(maxlen=_RECENT_LOSSES)  # read only to show them: that waits for a GPU
        self._last: list[str] = []  # the main metric of the last validation
        self._pace = Pace()
        self._bar: Bar | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the step at which a resumed run starts. Start the bar and the clock."""
        self._total, self._step = trainer.estimated_stepping_batches, trainer.global_step
        if self._step:
            self._print(f"resumed at {self._place().replace('/', ' of ')}")
        self._begin, self._pace = (self._step, time.monotonic()), Pace()
        self._show(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Store the loss of an optimizer step, if the batch ended one."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._losses.append(trainer.callback_metrics["train/loss"])
            self._show(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show that a validation begins. That after training has its own bar."""
        self._step = trainer.global_step
        self._show(trainer, 0)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Show how far the validation is."""
        self._show(trainer, batch_idx + 1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of a validation, as "step 20/400 · val PSNR 30.12 dB · SSIM 88.10 · 0:01:20 left"."""
        assert isinstance(pl_module, RunModule)
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        main = "val/psnr" if "val/psnr" in values else pl_module.config.monitor
        others = [name for it in pl_module.config.metrics if (name := f"val/{it}") in values and name != main]
        self._last = [f"{main} {in_digits(values[main])}"]
        place = [self._place()] if self._step else []  # a network that does not learn has no steps
        found = " · ".join(_with_unit(name, values[name], pl_module) for name in (main, *others))
        self._print(" · ".join([*place, f"val {found}", *self._pace_and_time(trainer)]))
        if trainer.state.fn != TrainerFn.FITTING:  # the last one, after training
            self._end()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar, and say why training ends before its last step."""
        self._end()
        if trainer.should_stop and trainer.global_step < self._total:
            self._print(f"training ends at step {trainer.global_step}: {_why_it_ends(trainer)}")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the bar before the error is printed."""
        self._end()

    def _show(self, trainer: L.Trainer, validated: int | None = None) -> None:
        """Draw the bar or print a line, if it is due. `validated`: batches of a validation that are done."""
        if not self.enabled or trainer.progress_bar_callback is not None:
            return
        if self._bar is None and takes_a_bar(self.console):
            self._bar = Bar(self.console)
        if not (self._pace.due() if self._bar is None else self._bar.is_due()):
            return
        if validated is None:
            loss = [f"loss {sum(map(float, self._losses)) / len(self._losses):#.3g}"] if self._losses else []
            now = [*loss, *(f"{name} {float(value):#.3g}" for name, value in trainer.progress_bar_metrics.items())]
        else:
            now = [f"validating {validated}/{sum(trainer.num_val_batches)}"]
        words = [*now, *self._last, *self._pace_and_time(trainer)]
        if self._bar is None:
            self._print(" · ".join([self._place(), *words]))
        else:
            total = self._total if math.isfinite(self._total) else None
            self._bar.draw(self._place(), " · ".join(words), self._step, total)

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)
        self._pace.printed()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.end()
            self._bar = None

    def _place(self) -> str:
        return f"step {self._step}" if math.isinf(self._total) else f"step {self._step}/{self._total:.0f}"

    def _pace_and_time(self, trainer: L.Trainer) -> list[str]:
        """Samples a second, and the time left."""
        speed, (first, start) = trainer.callback_metrics.get("train/samples_per_second"), self._begin
        found = [] if speed is None else [f"{float(speed):.{2 if speed < 1 else 1}f} samples/s"]
        if first < self._step < self._total < math.inf:
            left = (time.monotonic() - start) / (self._step - first) * (self._total - self._step)
            if left < timedelta.max.total_seconds():  # max_steps may be a number that nobody will live to see
                found.append(f"{timedelta(seconds=round(left))} left")
        return found


def _why_it_ends(trainer: L.Trainer) -> str:
    """The reason for which a callback ends training early, in the words of Lightning's EarlyStopping."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning's, untyped
    reasons = [it.stopping_reason_message for it in callbacks if isinstance(it, EarlyStopping)]
    left = [it.time_remaining() for it in callbacks if isinstance(it, Timer)]
    reasons += ["its time is over (trainer.max_time)" for it in left if it is not None and it <= 0]
    return next(filter(None, reasons), "a callback set trainer.should_stop")


def _with_unit(name: str, value: float, module: RunModule) -> str:
    """A metric of a validation with its title and unit, as "PSNR 30.12 dB"."""
    name = name.removeprefix("val/")
    metric = module.config.metrics.get(name)
    title, _, unit = ((metric and metric.title) or name).partition(", ")
    return f"{title.partition(' ×')[0]} {in_digits(value)} {unit}".rstrip()
