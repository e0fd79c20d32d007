"""Debug modes of a run: the profile of some steps, and the operator behind a NaN gradient."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch.profiler import profile, schedule

from qnmixer.engine.config.sections import ProfileConfig
from qnmixer.engine.processes.ranks import rank

_N_OPERATORS = 30  # in the table


class Profile(Callback):
    """Records some optimizer steps with torch's profiler. Writes a trace for a viewer, and a table of operators.

    Args:
        folder: gets rank_0.json.gz and rank_0.txt, and the same two for each other process.
        config: the number of steps, and of steps before them.
        console: prints where they are.
    """

    def __init__(self, folder: Path, config: ProfileConfig, console: Console) -> None:
        self.folder, self.console = folder, console
        self._needed = config.warm_up + config.steps
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to the terminal
        self._profile = profile(
            schedule=schedule(skip_first=config.warm_up - 1, wait=0, warmup=1, active=config.steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting steps."""
        self._profile.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report each optimizer step, which may take several batches, to the profiler."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._profile.step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the profile. One of too few steps would count what comes after them, such as a validation."""
        if (n := self._profile.step_num) < self._needed:
            self._profile.on_trace_ready = None
            self._print(f"none, as training ended after {n} steps: debug.warm_up + debug.steps are {self._needed}")
        self._profile.stop()

    def _write(self, recorded: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{rank()}.json.gz"
        recorded.export_chrome_trace(str(path))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=order, row_limit=_N_OPERATORS)
        (self.folder / f"rank_{rank()}.txt").write_text(table, encoding="utf-8")
        self._print(f"{path} (load it at https://ui.perfetto.dev or in chrome://tracing); beside it a table as text")

    def _print(self, line: str) -> None:
        self.console.print(f"profile: {line}", highlight=False, soft_wrap=True)


@contextmanager
def naming_nan_gradients() -> Iterator[None]:
    """Turn an error of torch's anomaly detection into a FloatingPointError that names the operator and its caller."""
    traceback, show = "", warnings.showwarning

    # torch names the code line in a warning only. The error that follows names the operator.
    def keep(message: Warning | str, *rest: Any, **more: Any) -> None:
        nonlocal traceback
        if str(message).startswith("Error detected in"):
            traceback = str(message)
        else:
            show(message, *rest, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="Error detected in")
        warnings.showwarning = keep
        try:
            yield
        except RuntimeError as error:
            if not (found := re.search(r"Function '(\w+)' returned nan values", str(error))):
                raise
            frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n +(.*)', traceback)
            own = [frame for frame in frames if "site-packages" not in frame[0]]
            where = [f" of `{code}` ({path}:{line})" for path, line, code in (own or frames)[-1:]]
            raise FloatingPointError(f"the gradient became NaN in {found[1]}{''.join(where)}") from error
