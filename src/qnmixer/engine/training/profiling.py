"""The debug modes of a run: the profile, the operator of a NaN gradient, and a line at the start."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch.profiler import profile, schedule

from qnmixer.engine.batch import Batch
from qnmixer.engine.config import Config, effective_batch
from qnmixer.engine.config.sections import FewBatchesConfig, ProfileConfig
from qnmixer.engine.processes.ranks import rank

_N_OPERATORS = 12


def describe(config: Config) -> str | None:
    """One line on how a debug mode changes the run; None for debug=off."""
    debug, batch = config.debug, effective_batch(config)
    if isinstance(debug, FewBatchesConfig):
        return f"debug=few_batches: {debug.batches * batch} slices of each split at most, and the numbers mean nothing"
    if isinstance(debug, ProfileConfig):
        return f"debug=profile: {debug.steps} steps are recorded, after {debug.warm_up} without recording"
    return {
        "overfit": f"debug=overfit: the same {batch} slices in training and validation, and the loss must fall far",
        "anomaly": "debug=anomaly: a gradient that becomes NaN ends the run and names the operator. Steps are slower",
    }.get(debug.name)


class Profile(Callback):
    """Records some optimizer steps with torch's profiler. Writes a trace for a viewer and a table of operators.

    Args:
        folder: gets rank_0.json.gz, and one file for each other process.
        config: the number of steps, and of steps before them.
        console: prints the table, costliest operators first.
    """

    def __init__(self, folder: Path, config: ProfileConfig, console: Console) -> None:
        self.folder, self.console, self.n_steps = folder, console, config.steps
        self._needed = config.warm_up + config.steps
        self._global_step = 0
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to the terminal
        self._profile = profile(
            schedule=schedule(skip_first=config.warm_up - 1, wait=0, warmup=1, active=config.steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting steps."""
        self._global_step = trainer.global_step
        self._profile.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        """Report each optimizer step, which may take several batches, to the profiler."""
        if trainer.global_step > self._global_step:
            self._global_step = trainer.global_step
            self._profile.step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the profile. One of too few steps would count what comes after them, such as a validation."""
        if (n := self._profile.step_num) < self._needed:
            self._profile.on_trace_ready = None
            line = f"profile: none, as training ended after {n} steps: debug.warm_up + debug.steps are {self._needed}"
            self.console.print(line, highlight=False, soft_wrap=True)
        self._profile.stop()

    def _write(self, recorded: profile) -> None:
        path = self.folder / f"rank_{rank()}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
        self.console.print(self._table(recorded))
        self.console.print(
            f"profile: {path}, one file for each process (load it at https://ui.perfetto.dev or in chrome://tracing)",
            highlight=False,
            soft_wrap=True,
        )

    def _table(self, recorded: profile) -> Table:
        events = [event for event in recorded.key_averages() if not event.key.startswith("ProfilerStep")]
        on_device = any(event.self_device_time_total for event in events)
        times = {e.key: e.self_device_time_total if on_device else e.self_cpu_time_total for e in events}
        total = sum(times.values())
        where = "device" if on_device else "CPU"
        table = Table("operator", f"{where} ms a step", "share", "calls a step")
        for event in sorted(events, key=lambda event: -times[event.key])[:_N_OPERATORS]:
            ms = times[event.key] / 1000 / self.n_steps
            table.add_row(
                event.key, f"{ms:.2f}", f"{100 * times[event.key] / total:.1f} %", f"{event.count / self.n_steps:.0f}"
            )
        return table


@contextmanager
def naming_nan_gradients() -> Iterator[None]:
    """Turn an error of torch's anomaly detection into a FloatingPointError that names the operator and its caller."""
    tracebacks: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="Error detected in")
        show = warnings.showwarning

        # torch names the code line in a warning only. The error that follows names the operator.
        def keep(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any
        ) -> None:
            if str(message).startswith("Error detected in"):
                tracebacks.append(str(message))
            else:
                show(message, category, filename, lineno, *rest, **more)

        warnings.showwarning = keep
        try:
            yield
        except RuntimeError as error:
            if not (found := re.search(r"Function '(\w+)' returned nan values", str(error))):
                raise
            where = f" {_caller(tracebacks[-1])}" if tracebacks else ""
            raise FloatingPointError(f"the gradient became NaN in {found[1]}{where}") from error


def _caller(traceback: str) -> str:
    """The innermost line of the user's code in a traceback from torch's warning."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n +(.*)', traceback)
    path, line, code = next((f for f in reversed(frames) if "site-packages" not in f[0]), frames[-1])
    return f"of `{code}` ({path}:{line})"
