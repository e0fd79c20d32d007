"""The progress of training: one bar over all steps on a terminal, lines in a log."""

import math
from collections import deque
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.data.sampler import EpochSampler
from qnmixer.engine.reports.progress import Bar, Pace, takes_a_bar
from qnmixer.engine.reports.tables import in_digits
from qnmixer.engine.run_module import RunModule
from qnmixer.engine.tracking.loggers import WandbRun
from qnmixer.engine.tracking.metrics_file import read_metrics
from qnmixer.engine.tracking.results import duration
from qnmixer.engine.training.progress import Stopwatch, main_metric

_RECENT_LOSSES = 20  # their mean is shown
_RECENT_STEPS = 100  # the speed is measured over these


class TrainingProgress(Callback):
    """Shows the step of all steps, the loss, the last main metric of a validation, samples a second and the time left.

    A terminal has one bar for the whole run. A validation is a phase of it and leaves one line above it. A log has
    lines at intervals and at each validation, and so has W&B's output. Steps are optimizer steps. The loss is the mean
    over the last 20 steps. The speed is that of the last 100 steps, without validations. The time left includes
    validations, by the time that they took so far. The main metric is val/psnr, or the monitored one. Values logged
    with `prog_bar=True` are shown too.

    Args:
        console: that of the whole run, so that other lines go above the bar. A quiet one shows nothing.
        metrics: the run's metrics.csv, for the metric at which a resumed run starts.
        enabled: False: only lines at validations. The same holds if the config's callbacks include a progress bar.
    """

    def __init__(self, console: Console, metrics: Path, enabled: bool = True) -> None:
        self.console, self.metrics, self.enabled = console, metrics, enabled
        self._sampler: EpochSampler | None = None
        self._total = math.inf
        self._first = self._step = 0
        self._losses: deque[Tensor] = deque(maxlen=_RECENT_LOSSES)  # read only to show them: that waits for a GPU
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=_RECENT_STEPS)  # training seconds, steps, samples
        self._last: tuple[str, str] | None = None  # the main metric of the last validation: for a line, for the bar
        self._training, self._pausing = Stopwatch(), Stopwatch()
        self._pause = 0.0  # seconds of validation for each step
        self._pace = Pace()
        self._bar: Bar | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the step at which a resumed run starts. Start the bar and the clock."""
        sampler = trainer.train_dataloader.sampler  # type: ignore[union-attr]  # it has been made
        assert isinstance(sampler, EpochSampler)
        assert isinstance(pl_module, RunModule)
        self._sampler, self._total = sampler, trainer.estimated_stepping_batches
        self._first = self._step = trainer.global_step
        if self._first:
            rows = [row for row in read_metrics(self.metrics) if int(row["step"]) <= self._first]
            found = [row for row in rows if row.get("val/psnr") or row.get(pl_module.config.monitor)]
            if found:
                name = "val/psnr" if found[-1].get("val/psnr") else pl_module.config.monitor
                self._last = _main(name, float(found[-1][name]), pl_module)
            of = f" of {self._total:.0f}" if math.isfinite(self._total) else ""
            self._print(trainer, f"resumed at step {self._first}{of}")
        self._pace = Pace()
        self._draw(trainer)
        self._training.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Measure again after a validation."""
        self._pausing.stop()
        self._training.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Store loss and time of an optimizer step, if the batch ended one."""
        if trainer.global_step == self._step or self._sampler is None:
            return
        self._step = trainer.global_step
        # As a tensor: to read its value here would make the host wait for the GPU at every step.
        self._losses.append(trainer.callback_metrics["train/loss"])
        self._marks.append((self._training.seconds, self._step, self._sampler.samples_until(self._step)))
        self._show(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock of training. The validation after training has its own bar."""
        self._step = trainer.global_step
        self._training.stop()
        self._pausing.start()
        self._draw(trainer, _validating(trainer, 0))

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show how far the validation is."""
        self._show(trainer, _validating(trainer, batch_idx + 1))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of a validation."""
        if self._step > self._first:
            self._pause = self._pausing.seconds / (self._step - self._first)
        assert isinstance(pl_module, RunModule)
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        main = main_metric(trainer, pl_module)
        self._last = _main(main, values[main], pl_module)
        others = [name for it in pl_module.config.metrics if (name := f"val/{it}") in values and name != main]
        place = [self._place(trainer)] if self._step else []  # a network that does not learn has no steps
        found = [self._last[0], *(_of_line(name, values[name], pl_module).removeprefix("val ") for name in others)]
        self._print(trainer, " · ".join([*place, *found, *self._speed(trainer)]))
        if trainer.state.fn == TrainerFn.FITTING:
            self._draw(trainer)
        else:  # the last one, after training
            self._end()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar."""
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the bar before the error is printed."""
        self._end()

    def _show(self, trainer: L.Trainer, phase: str | None = None) -> None:
        """Redraw the bar and print a line, if one is due."""
        if not self._shows(trainer):
            return
        if self._bar is not None and self._bar.is_due():
            self._draw(trainer, phase)
        if self._pace.due():
            last = [] if self._last is None else [f"last {self._last[0]}"]
            line = " · ".join([self._place(trainer), *self._now(trainer, phase), *last, *self._speed(trainer)])
            if self._bar is None:
                self._print(trainer, line)
            else:
                _to_wandb(trainer, line)

    def _draw(self, trainer: L.Trainer, phase: str | None = None) -> None:
        """Draw the bar now, if the console can show one."""
        if not (self._shows(trainer) and takes_a_bar(self.console)):
            return
        if self._bar is None:
            self._bar = Bar(self.console)
        last = [] if self._last is None else [self._last[1]]
        words = " · ".join([*self._now(trainer, phase), *last, *self._speed(trainer, short=True)])
        total = None if self._open_end(trainer) else self._total
        self._bar.draw(self._place(trainer), words, self._step, total)

    def _end(self) -> None:
        self._training.stop()
        self._pausing.stop()
        if self._bar is not None:
            self._bar.end()
            self._bar = None

    def _shows(self, trainer: L.Trainer) -> bool:
        return self.enabled and trainer.progress_bar_callback is None

    def _print(self, trainer: L.Trainer, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)
        self._pace.printed()
        _to_wandb(trainer, line)

    def _place(self, trainer: L.Trainer) -> str:
        return f"step {self._step}" if self._open_end(trainer) else f"step {self._step}/{self._total:.0f}"

    def _now(self, trainer: L.Trainer, phase: str | None) -> list[str]:
        """The phase, or the loss and other values that are logged for the bar."""
        if phase is not None:
            return [phase]
        loss = [f"loss {sum(map(float, self._losses)) / len(self._losses):#.3g}"] if self._losses else []
        return [*loss, *(f"{name} {float(value):#.3g}" for name, value in trainer.progress_bar_metrics.items())]

    def _speed(self, trainer: L.Trainer, *, short: bool = False) -> list[str]:
        """Samples a second and the time left, after the first two steps."""
        if len(self._marks) < 2:
            return []
        (begin, _, before), (end, _, now) = self._marks[0], self._marks[-1]
        per_second = (now - before) / (end - begin)
        speed = f"{per_second:.{2 if per_second < 1 else 1}f} samples/s"
        left = min(self._left(trainer))
        if not 0 < left < math.inf:
            return [speed]
        most = any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if short:
            return [speed, f"{'≤ ' * most}{_clock(left)} left"]
        return [speed, f"{'at most ' * most}{duration(left)} left"]

    def _left(self, trainer: L.Trainer) -> tuple[float, float]:
        """Seconds to the last step, and to the end of trainer.max_time; infinite without a limit."""
        by_steps = by_time = math.inf
        if len(self._marks) > 1:
            (begin, first, _), (end, last, _) = self._marks[0], self._marks[-1]
            by_steps = ((end - begin) / (last - first) + self._pause) * (self._total - self._step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning's, untyped
            if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None:
                by_time = min(by_time, max(0.0, left))
        return by_steps, by_time

    def _open_end(self, trainer: L.Trainer) -> bool:
        """Whether the number of steps is unknown: there is no limit, or the time limit comes first."""
        by_steps, by_time = self._left(trainer)
        return math.isinf(self._total) or by_time < by_steps


def _main(name: str, value: float, module: RunModule) -> tuple[str, str]:
    """The main metric for a line, and for the bar."""
    return _of_line(name, value, module), f"{name} {in_digits(value)}"


def _of_line(name: str, value: float, module: RunModule) -> str:
    """A metric of a validation with its title and unit: "val PSNR 30.12 dB"."""
    metric = module.config.metrics.get(name.removeprefix("val/"))
    title, _, unit = ((metric and metric.title) or name.removeprefix("val/")).partition(", ")
    return f"val {title.partition(' ×')[0]} {in_digits(value)} {unit}".rstrip()


def _to_wandb(trainer: L.Trainer, line: str) -> None:
    """Add a line to W&B's output. W&B does not listen to the terminal, because other lines there name folders."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbRun):
            logger.experiment.write_logs(line)


def _validating(trainer: L.Trainer, n_done: int) -> str:
    return f"validating {n_done}/{sum(trainer.num_val_batches)}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
