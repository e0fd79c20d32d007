"""The pipeline over iterations: each device runs its share of the T iterations and hands the state to the next.

Every device holds all weights, as in ddp, and gradients are summed over all devices before the optimizer's step. So
weights that iterations share stay equal, clipping sees the norm of the whole gradient, the GradScaler of every device
sees the same overflow, a checkpoint is that of one device, and validation runs on every device by itself.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.optim import Optimizer

from qnmixer.config import Config
from qnmixer.config.run import batch_of_replica, devices_per_replica
from qnmixer.config.strategy import PipelineConfig
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.parallel.stages import Context, Packing, Stage, cut_by_cost, cut_evenly, ranges, survey


class Trained(Protocol):
    """What a LightningModule must have to be trained by stages."""

    network: UnrolledNetwork[Any]

    def measure(self, batch: Any, stream: str) -> Tensor:
        """y [B, 1, V, D]."""

    def batch_loss(self, image: Tensor, truth: Tensor, weight: Tensor) -> Tensor:
        """Loss of some images, of which that of a whole batch is the sum."""

    def check_loss(self, loss: Tensor, batch: Any) -> None:
        """Raise for a loss that is not finite."""

    def log_loss(self, loss: Tensor, batch_idx: int) -> None:
        """Log the loss of a batch, or of those of a step."""


class PipelineStrategy(DDPStrategy):
    """Trains by stages within each group of devices, and by batches over the groups.

    Forward and backward of a batch are one thing here (a stage goes back through the first micro-batch while it has yet
    to see the last), so `training_step` does both, Lightning's backward nothing, and gradients are cleared after the
    optimizer's step instead of between the two.
    """

    def __init__(self, config: Config, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        assert isinstance(config.strategy, PipelineConfig)
        self.config, self.pipelining = config, config.strategy
        self.n_devices = devices_per_replica(config)
        self.cut: list[int] | None = None  # as measured, which another start would not measure again
        self._pipeline: Pipeline | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All devices of a pipeline get its whole batch, of fixed size."""
        return {
            "num_replicas": self.world_size // self.n_devices,
            "rank": self.global_rank // self.n_devices,
            "batch_size": batch_of_replica(self.config),
            "fill": True,
        }

    def configure_ddp(self) -> None:
        """No wrapper: gradients are summed below."""
        for first in range(0, self.world_size, self.n_devices):
            group = dist.new_group(list(range(first, first + self.n_devices)), timeout=self._timeout)
            if first == self.global_rank // self.n_devices * self.n_devices:
                self._group = group
        assert self.lightning_module is not None
        self.lightning_module.optimizer_zero_grad = lambda *args, **kwargs: None  # type: ignore[method-assign]  # a hook

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Forward and backward of a batch through all stages; its loss."""
        module: Any = self.lightning_module
        y = module.measure(batch, "train")
        if self._pipeline is None:
            assert self._group is not None
            context = self.precision_plugin.forward_context
            self._pipeline = Pipeline(module, self.config, y, self._group, context, self.cut)
            self.cut = self._pipeline.cut
        loss = self._pipeline.step(y, batch, self._loss_factor())
        module.log_loss(loss, batch_idx)
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing: `training_step` has been through."""
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Sum the gradients over the devices once the window's batches are through, step, clear them."""

        def through_all_devices() -> Any:
            result = closure()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            sum_gradients(parameters, divisor=self.world_size // self.n_devices)
            return result

        output = super().optimizer_step(optimizer, through_all_devices, model, **kwargs)
        optimizer.zero_grad()
        return output

    def _loss_factor(self) -> Tensor:
        """What the loss is multiplied by before backward: the GradScaler's scale, over the batches of a window."""
        factor = torch.ones((), device=self.root_device) / self.config.trainer.accumulate_grad_batches
        precision = self.precision_plugin
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            factor = precision.scaler.scale(factor)
        return factor


class Pipeline:
    """One device's stages, and the schedule they run by.

    Args:
        module: what is trained.
        config: the run's.
        y: a batch of sinograms, of the size of all to come.
        group: the devices of this pipeline, first stage first.
        context: what a forward runs in (autocast).
        cut: iterations of each stage as the run began with them; None: as configured, or balanced by measured cost.
    """

    def __init__(
        self,
        module: Trained,
        config: Config,
        y: Tensor,
        group: dist.ProcessGroup,
        context: Context,
        cut: list[int] | None = None,
    ) -> None:
        assert isinstance(config.strategy, PipelineConfig)
        options = config.strategy
        self.module, self.context, self.group = module, context, group
        self.sequential = options.schedule == "sequential"
        self.microbatch_size = options.microbatch_size
        device, n_devices = dist.get_rank(group), dist.get_world_size(group)
        n_stages = n_devices * options.stages_per_device
        of_one = y[: self.microbatch_size]

        cut = options.cut or (cut if cut and len(cut) == n_stages else None)
        timed = cut is None and not config.trainer.deterministic
        with torch.random.fork_rng([y.device] if y.is_cuda else []):  # dropout is to go on as if nothing had been
            packings, costs = survey(module.network, of_one, context, timed)
        cuts = [cut or (cut_by_cost(costs, n_stages) if timed else cut_evenly(len(costs), n_stages))]
        dist.broadcast_object_list(cuts, group_src=0, group=group)  # each device has measured costs of its own
        self.cut: list[int] = cuts[0]

        self.stages = [self._stage(index, packings, of_one) for index in range(device, n_stages, n_devices)]
        n = 1 if self.sequential else len(y) // self.microbatch_size
        options_of_all: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        self.schedule: Any
        if options.schedule == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(list(self.stages), n, **options_of_all)
        else:
            kind = Schedule1F1B if options.schedule == "1f1b" else ScheduleGPipe
            self.schedule = kind(self.stages[0], n, **options_of_all)
        self._batch: Any = None
        self._factor = torch.ones(())
        self._losses: list[Tensor] = []

    def _stage(self, index: int, packings: list[Packing], y: Tensor) -> PipelineStage:
        """A stage for torch's schedules, with the shapes of what it gets and gives; y: of a micro-batch."""
        iterations, n_stages = ranges(self.cut)[index], len(self.cut)
        first, last = index == 0, index == n_stages - 1

        def meta(iteration: int) -> Tensor:
            packing = packings[iteration]
            return torch.empty(len(y), packing.width, dtype=packing.dtype, device="meta", requires_grad=True)

        return PipelineStage(
            _Autocast(
                Stage(self.module.network, iterations, None if first else packings[iterations.start]), self.context
            ),
            index,
            n_stages,
            y.device,
            input_args=() if first else (meta(iterations.start),),
            output_args=(torch.empty_like(y, device="meta") if last else meta(iterations.stop),),
            group=self.group,
        )

    def step(self, y: Tensor, batch: Any, factor: Tensor) -> Tensor:
        """Add the gradients of factor · loss of a batch to those of this device's stages; returns the loss.

        Raises FloatingPointError, on the device of the last stage, when the loss is not finite.
        """
        self._batch, self._factor = batch, factor
        self._losses.clear()
        positions = torch.arange(len(y), device=y.device)
        size = self.microbatch_size if self.sequential else len(y)
        with torch.autocast(y.device.type, enabled=False):  # else backward would run in it
            for part, target in zip(y.split(size), positions.split(size), strict=True):
                self.schedule.step(y=part, target=target)
        loss = torch.zeros((), device=y.device)
        if self._losses:
            loss = torch.stack(self._losses).sum().float()
            self.module.check_loss(loss, batch)
        dist.broadcast(loss, group_src=dist.get_world_size(self.group) - 1, group=self.group)
        return loss

    def _loss(self, image: Tensor, positions: Tensor) -> Tensor:
        with self.context():
            loss = self.module.batch_loss(image, self._batch["image"][positions], self._batch["weight"][positions])
        self._losses.append(loss.detach())
        return loss * self._factor


class _Autocast(torch.nn.Module):
    """A stage run in the context of the precision, and of nothing else."""

    def __init__(self, stage: Stage, context: Context) -> None:
        super().__init__()
        self.stage, self.context = stage, context

    def forward(self, *packed: Tensor, y: Tensor) -> Tensor:
        with self.context():
            return self.stage(*packed, y=y)


def sum_gradients(parameters: list[torch.nn.Parameter], divisor: int) -> None:
    """Make every gradient the sum over all processes, over `divisor`, in one message; where one is missing it is 0."""
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    flat /= divisor
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view_as(p)
