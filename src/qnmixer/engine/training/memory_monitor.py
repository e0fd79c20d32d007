"""Memory during training: metrics at each step, the memory of one step, and a warning about a leak."""

from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.config import Config
from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.memory.leaks import Leak, LeakWatch
from qnmixer.engine.memory.tracker import PeakTracker
from qnmixer.engine.memory.usage import read_usage, reset_peak
from qnmixer.engine.reports.tables import Console
from qnmixer.engine.training.weight_averaging import MeanWeights


class MemoryMonitor(Callback):
    """Logs memory at each optimizer step, measures the memory of a step, and warns about a leak.

    The memory of a step is the largest number of bytes of tensors on the fullest device during the second optimizer
    step: weights, gradients, optimizer state, graph and the scan's matrices. `qnmixer.plan` predicts it. On CUDA
    torch's allocator counts. On a CPU the tracker of the plan counts the real tensors. It cannot see those of fsdp and
    compile=true, so there is no figure then.

    memory/peak_mib is the same figure, on CUDA of each step. memory/allocated_mib, memory/reserved_mib and
    memory/device_used_mib are counters of the process, see `Usage`. On a CPU they include Python and all libraries.

    Args:
        console: prints the lines.

    Attributes:
        measured_mib: the memory of a step; None before the second one has ended.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.measured_mib: float | None = None
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
            line = f"memory: {self.measured_mib:,.0f} MiB in tensors at the peak of a step"
            self.console.print(line, highlight=False, soft_wrap=True)
        if leak := self._watch.update(usage.allocated):
            self.leak = leak
            self.console.warn(
                f"a leak? The memory at the end of a step has grown for {leak.steps} steps, by "
                f"{leak.bytes_per_step / MIB:.2g} MiB a step. The usual cause is a loss, an image or a state that is "
                "stored or logged without .detach(), and so keeps its whole graph"
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        self._tracking.close()


def _shows_tensors(module: L.LightningModule) -> bool:
    """Whether the tracker sees a run's tensors. It sees neither storages that fsdp frees nor compiled code."""
    config = getattr(module, "config", None)
    return isinstance(config, Config) and config.strategy.planned_as != "shards" and not config.compile
