"""Warnings during training about a network that does not learn. Such a network raises no error by itself."""

from collections import Counter
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from qnmixer.engine.batch import Batch
from qnmixer.engine.build import warm_up_steps
from qnmixer.engine.run_module import RunModule
from qnmixer.engine.tracking.loggers import WandbRun
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training.step_metrics import StepMetrics, callback_of
from qnmixer.errors import UnstableNetwork

EVERY = 10
"""Optimizer steps between two checks."""
_SHORTEST = 20
"""Optimizer steps in which a network may be worse than FBP, also without a warm-up."""
_CONFIRMED = 3
"""Equal checks in a row before a warning. In fp16 single steps overflow in healthy runs too."""
_FAR = 10.0
"""A start with more than this many times the error of an empty image, or of FBP if that is larger, is refused."""

MESSAGES = {
    "zero_gradient": "the gradient is exactly zero: the network no longer learns",
    "gradient_not_finite": "the gradient is not finite: no step changes the weights",
    "worse_than_fbp": "the network is further from the truth than FBP, after the warm-up too",
}
_REMEDY = "Start again with a lower optimizer.lr, or resume= from an earlier checkpoint"


class Errors(NamedTuple):
    """Mean square errors over the slices of a step on all devices."""

    network: float
    fbp: float
    empty: float  # of an image of zeros


class HealthMonitor(Callback):
    """Checks the gradient and a batch's images every `EVERY` steps.

    A network whose start is far worse than FBP is refused before its first step. Each later warning is given once. It
    goes to the terminal, to results.json, and to the loggers as health/NAME = 1 (in W&B also as an alert).

    Args:
        run: for its console and its record, which gets each warning as {step, name, warning}.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._due = False
        self._output: Tensor | None = None  # x_T of the last batch of a step that is checked, [B, 1, S, S]
        self._batch: Batch | None = None
        self._begins = False
        self._warm_up = _SHORTEST
        self._in_a_row: Counter[str] = Counter()
        self._warned: set[str] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepare to check the start of a new run, and the steps after the warm-up."""
        assert isinstance(pl_module, RunModule)
        pl_module.network.register_forward_hook(self._keep)
        self._begins = trainer.global_step == 0
        self._warm_up = max(_SHORTEST, warm_up_steps(pl_module.config.schedule, pl_module.n_steps()))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, *_: Any) -> None:
        """Store the batch and its images if a check is due."""
        self._due = trainer.global_step % EVERY == 0
        self._batch = batch

    def _keep(self, network: nn.Module, inputs: Any, image: Tensor) -> None:
        if self._due and network.training:
            self._output = image.detach()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Check before the weights change."""
        assert isinstance(pl_module, RunModule)
        if not self._due or self._batch is None:
            return
        errors = _errors(pl_module, self._batch, self._output)
        # Released at once: these images would else stay on the device until the next check.
        self._due, self._output, self._batch = False, None, None
        if errors is None:
            return
        if self._begins:
            self._begins = False
            _refuse_bad_start(errors)
        norm, step = float(callback_of(trainer, StepMetrics).norm), trainer.global_step
        found = {
            "zero_gradient": norm == 0,
            "gradient_not_finite": not norm < float("inf"),
            "worse_than_fbp": errors.network > errors.fbp and step > self._warm_up,
        }
        for name, wrong in found.items():
            self._in_a_row[name] = self._in_a_row[name] + 1 if wrong else 0
            if self._in_a_row[name] == _CONFIRMED and name not in self._warned:
                self._warned.add(name)
                self._warn(trainer, name)

    def _warn(self, trainer: L.Trainer, name: str) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        line = f"{MESSAGES[name]} (seen at step {step}). {_REMEDY}"
        self.run.console.warn(line, style="bold red")
        self.run.note("warnings", {"step": step, "name": name, "warning": line})
        for logger in trainer.loggers:
            logger.log_metrics({f"health/{name}": 1.0}, step)
            if isinstance(logger, WandbRun):
                logger.experiment.alert(title=MESSAGES[name], text=line)


@torch.no_grad()
def _errors(module: RunModule, batch: Batch, output: Tensor | None) -> Errors | None:
    """Errors of the images of a batch. In a pipeline the device of the last stage has them.

    None if the last batch of a step has only samples of weight 0, which fill the step.
    """
    sums = torch.zeros(4, dtype=torch.float32, device=module.device)
    if output is not None:
        counts = batch["weight"][-len(output) :] > 0  # a pipeline stores the last of its micro-batches
        image, truth = output[counts], batch["image"][-len(counts) :][counts]
        fbp = module.projector.fbp(module.measure(batch, "train")[-len(counts) :])[counts]
        errors = [(x - truth).square().mean((1, 2, 3)).sum() for x in (image, fbp, torch.zeros_like(truth))]
        sums = torch.stack([*errors, counts.sum()]).float()
    if dist.is_initialized():
        dist.all_reduce(sums)
    return Errors(*(sums[:3] / sums[3]).tolist()) if sums[3] else None


def _refuse_bad_start(errors: Errors) -> None:
    if errors.network <= _FAR * max(errors.fbp, errors.empty):
        return
    raise UnstableNetwork(
        f"the untrained network's mean square error is {errors.network:.3g}, FBP's {errors.fbp:.3g} and that of an "
        f"empty image {errors.empty:.3g}: it cannot learn from this start. Let the data steps start at "
        "projector.safe_step_size() along projector.filtered_residual, and the last learned layer at zero"
    )
