"""Memory during training: in the metrics at each step, once beside the plan, and a warning about a leak."""

from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from qnmixer.memory.footprint import MIB
from qnmixer.memory.leaks import Leak, LeakWatch
from qnmixer.memory.usage import Usage, read_usage, reset_peak
from qnmixer.reconstructor import Batch


class MemoryMonitor(Callback):
    """Logs memory at each optimizer step, says what a step needs and what was planned, and warns of a leak.

    In the metrics, in MiB: memory/allocated_mib, memory/reserved_mib and memory/peak_mib (of that step alone), on CUDA
    memory/device_used_mib too; what they count is said in `Usage`.

    Args:
        console: where the lines go.
        predicted_mib: what the plan says a step needs.
    """

    def __init__(self, console: Console, predicted_mib: float | None = None) -> None:
        self.console = console
        self.predicted_mib = predicted_mib
        self.peak_mib = 0.0  # highest of the run so far, validation included; in the end, of all devices
        self.measured_mib: float | None = None  # peak of the second step
        self.leak: Leak | None = None
        self._watch = LeakWatch()
        self._n_steps = 0
        self._global_step = 0
        self._between_steps = True
        self._allocated_before = 0  # bytes

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the memory in use before the first step."""
        self._watch = LeakWatch()
        self._n_steps, self._global_step = 0, trainer.global_step
        self._between_steps = True
        self._allocated_before = read_usage(pl_module.device).allocated
        reset_peak(pl_module.device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Reset the peak at the start of an optimizer step, which may take several batches."""
        if self._between_steps:
            self._between_steps = False
            self._read(pl_module)  # a validation may have been higher
            reset_peak(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Log, and look for a leak, if the batch ended an optimizer step."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._n_steps += 1
        self._between_steps = True
        usage = self._read(pl_module)
        values = {"allocated": usage.allocated, "reserved": usage.reserved, "peak": usage.peak}
        if usage.device_used is not None:
            values["device_used"] = usage.device_used
        for name, value in values.items():
            pl_module.log(f"memory/{name}_mib", value / MIB, batch_size=1, on_step=True, on_epoch=False)
        if self._n_steps == 2:  # from which on the optimizer's state is there
            self._compare(pl_module, usage)
        if leak := self._watch.update(usage.allocated):
            self.leak = leak
            self._warn(leak)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Include the last validation, and take the highest peak of all devices."""
        self._read(pl_module)
        peak = torch.tensor(self.peak_mib, device=pl_module.device)
        self.peak_mib = float(trainer.strategy.reduce(peak, reduce_op="max"))

    def record(self, before: dict[str, float | None] | None = None) -> dict[str, float | None]:
        """The entry for results.json, in MiB. The figures of a step are those of this process.

        Args:
            before: the same from before the run was resumed; a resumed run may train no further step.
        """
        before = before or {}
        return {
            "peak": max(self.peak_mib, before.get("peak") or 0.0),
            "measured_step": self.measured_mib or before.get("measured_step"),
            "predicted_step": self.predicted_mib,
        }

    def _read(self, pl_module: L.LightningModule) -> Usage:
        usage = read_usage(pl_module.device)
        self.peak_mib = max(self.peak_mib, usage.peak / MIB)
        return usage

    def _compare(self, pl_module: L.LightningModule, usage: Usage) -> None:
        """Print what a step needs beside what was planned."""
        peak = usage.peak
        if pl_module.device.type != "cuda":
            # No allocator counts here: what training added, without the pages of files (torch's code comes in with the
            # first step), and the weights and operator, which were there before.
            tensors = chain(pl_module.parameters(), pl_module.buffers())
            of_files = usage.reserved - usage.allocated
            peak += sum(tensor.nbytes for tensor in tensors) - of_files - self._allocated_before
        self.measured_mib = peak / MIB
        plan = "" if self.predicted_mib is None else f", {self.predicted_mib:.0f} predicted (plan)"
        kept = "" if pl_module.device.type == "cuda" else " (on a CPU with freed memory that the C library keeps)"
        self._print(f"memory: {self.measured_mib:.0f} MiB at the peak of a step{kept}{plan}")

    def _warn(self, leak: Leak) -> None:
        self._print(
            f"memory: a leak? What is held at the end of a step has grown for {leak.steps} steps, from "
            f"{leak.first_bytes / MIB:.0f} to {leak.last_bytes / MIB:.0f} MiB, {leak.bytes_per_step / MIB:.2g} MiB "
            "a step. Usual causes: a loss or image kept in a list without .detach() (its whole graph stays), a tensor "
            "logged with its graph, a state carried from batch to batch without .detach(), a callback that stores "
            "outputs"
        )

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)
