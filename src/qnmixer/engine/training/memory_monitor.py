"""Memory during training: metrics at each step, the memory of one step, and a warning about a leak."""

from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.config import Config
from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.memory.leaks import Leak, LeakWatch
from qnmixer.engine.memory.tracker import PeakTracker
from qnmixer.engine.memory.usage import read_usage, reset_peak
from qnmixer.engine.training.weight_averaging import MeanWeights


class MemoryMonitor(Callback):
    """Logs memory at each optimizer step, measures the memory of a step, and warns about a leak.

    The memory of a step is the figure in the terminal, results.json, sweeps and comparisons. `qnmixer.plan` predicts
    it. It is the largest number of bytes of tensors on the fullest device during an optimizer step. These are weights,
    gradients, optimizer state, graph and the scan's matrices. It is measured at the second step, because the optimizer
    state exists from then on. On CUDA torch's allocator counts, with cuBLAS's workspaces (`on_a_gpu`). On a CPU the
    tracker of the plan counts the real tensors. It cannot see those of fsdp and compile=true, so there is no figure
    then.

    The metric memory/peak_mib is the same figure. On CUDA it is that of each step, on a CPU always that of the second.
    Other counters of the process help to find a leak: memory/allocated_mib and memory/reserved_mib, on CUDA also
    memory/device_used_mib. `Usage` defines them. On a CPU they include Python and all libraries.

    Args:
        console: prints the lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.measured_mib: float | None = None  # of the second step, on the fullest device
        self.leak: Leak | None = None
        self._watch = LeakWatch()
        self._peak: int | None = None  # bytes, as memory/peak_mib
        self._tracker: PeakTracker | None = None
        self._tracking = ExitStack()
        self._n_steps = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Reset the peak at the start of an optimizer step, which may take several batches."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if pl_module.device.type == "cuda":
            reset_peak(pl_module.device)
        elif self._n_steps == 1 and _shows_tensors(pl_module):  # one step only: the tracker slows it down
            self._tracker = self._tracking.enter_context(PeakTracker())
            tensors = [value for value in batch.values() if isinstance(value, Tensor)]
            averaging = [it for it in trainer.callbacks if isinstance(it, MeanWeights)]  # type: ignore[attr-defined]
            tensors += [mean for it in averaging for mean in it.mean.values()]
            self._tracker.track(pl_module, *trainer.optimizers, *tensors)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Log memory and check for a leak, if the batch ended an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._tracking.close()
        self._n_steps += 1
        usage = read_usage(pl_module.device)
        if pl_module.device.type == "cuda":
            self._peak = usage.peak
        elif self._tracker is not None:
            self._peak, self._tracker = self._tracker.peak_bytes, None
        values = {"allocated": usage.allocated, "reserved": usage.reserved, "device_used": usage.device_used}
        values["peak"] = self._peak  # at each step: Lightning forgets a value at the end of its epoch
        for name, value in values.items():
            if value is not None:
                pl_module.log(f"memory/{name}_mib", value / MIB, batch_size=1, on_step=True, on_epoch=False)
        if self._peak is not None and self._n_steps == 2:
            peak = torch.tensor(self._peak / MIB, device=pl_module.device)
            # Of the fullest device: this is what must fit.
            self.measured_mib = float(trainer.strategy.reduce(peak, reduce_op="max"))
            self._print(f"memory: {self.measured_mib:,.0f} MiB in tensors at the peak of a step")
        if leak := self._watch.update(usage.allocated):
            self.leak = leak
            self._print(
                f"memory: a leak? The memory at the end of a step has grown for {leak.steps} steps, from "
                f"{leak.first_bytes / MIB:.0f} to {leak.last_bytes / MIB:.0f} MiB, {leak.bytes_per_step / MIB:.2g} MiB "
                "a step. Usual causes: a loss or image in a list without .detach() (its whole graph stays), a tensor "
                "logged with its graph, a state carried from batch to batch without .detach(), a callback that stores "
                "outputs"
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        self._tracking.close()

    def record(self, before: dict[str, float | None] | None = None) -> dict[str, float | None]:
        """The entry for results.json: `measured_step`, the memory of a step in MiB.

        Args:
            before: the entry from before the run was resumed. A resumed run may train no further step.
        """
        return {"measured_step": self.measured_mib or (before or {}).get("measured_step")}

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def _shows_tensors(module: L.LightningModule) -> bool:
    """Whether the tracker sees a run's tensors. It sees neither storages that fsdp frees nor compiled code."""
    config = getattr(module, "config", None)
    return isinstance(config, Config) and config.strategy.planned_as != "shards" and not config.compile
