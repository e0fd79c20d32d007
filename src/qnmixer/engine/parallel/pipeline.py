"""The pipeline over iterations: each device runs some of the T iterations and sends the state to the next device.

Like in ddp, every device holds all weights, and gradients are summed over all devices before the optimizer step. So
weights that iterations share stay equal, clipping uses the norm of the full gradient, and all GradScalers see the same
overflow. A checkpoint is that of one device. Every device validates by itself.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.optim import Optimizer

from qnmixer.engine.config import Config
from qnmixer.engine.config.run import batch_of_replica, devices_per_replica
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.parallel.stages import Context, Logged, Packing, Stage, cut_evenly, layouts, loss_of_part, ranges


class PipelineStrategy(DDPStrategy):
    """Trains in stages within each group of devices, and on different batches in each group.

    A stage may run the backward pass of the first micro-batch before the forward pass of the last one. So
    `training_step` does both passes, and Lightning's `backward` does nothing. Lightning clears gradients between the
    two passes. Here they are cleared after the optimizer step.
    """

    def __init__(self, config: Config, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        assert isinstance(config.strategy, PipelineConfig)
        self.config, self.pipelining = config, config.strategy
        self.n_devices = devices_per_replica(config)
        self._pipeline: Pipeline | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give all devices of a pipeline the full batch, of fixed size."""
        return {
            "num_replicas": self.world_size // self.n_devices,
            "rank": self.global_rank // self.n_devices,
            "batch_size": batch_of_replica(self.config),
            "fill": True,
        }

    def configure_ddp(self) -> None:
        """Add no DDP wrapper: `optimizer_step` sums the gradients."""
        for first in range(0, self.world_size, self.n_devices):
            # Every rank must make every group, also those that it is not in; otherwise `new_group` hangs.
            group = dist.new_group(list(range(first, first + self.n_devices)), timeout=self._timeout)
            if first == self.global_rank // self.n_devices * self.n_devices:
                self._group = group
        assert self.lightning_module is not None
        # Lightning clears gradients between forward and backward, when the first micro-batches already have theirs.
        self.lightning_module.optimizer_zero_grad = lambda *args, **kwargs: None  # type: ignore[method-assign]  # a hook

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Run the forward and backward pass of a batch through all stages. Returns its loss."""
        module: Any = self.lightning_module
        y = module.measure(batch, "train")
        if self._pipeline is None:
            assert self._group is not None
            context = self.precision_plugin.forward_context
            self._pipeline = Pipeline(module, self.config, y, self._group, context)
        return self._pipeline.step(y, batch, batch_idx, self._loss_factor())

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run no backward pass, because `training_step` has done it. Callbacks still see the loss."""
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]  # Lightning's, untyped
            callback.on_before_backward(self.lightning_module.trainer, self.lightning_module, closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step after the last batch of a window, with gradients summed over the devices. Then clear them."""

        # In the closure: the GradScaler looks for overflow right after it, and all ranks must decide alike.
        def through_all_devices() -> Any:
            result = closure()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            sum_gradients(parameters, divisor=self.world_size // self.n_devices)
            return result

        output = super().optimizer_step(optimizer, through_all_devices, model, **kwargs)
        optimizer.zero_grad()
        return output

    def _loss_factor(self) -> Tensor:
        """The factor on the loss before backward: the GradScaler's scale, divided by the batches of a window."""
        factor = torch.ones((), device=self.root_device) / self.config.trainer.accumulate_grad_batches
        precision = self.precision_plugin
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            factor = precision.scaler.scale(factor)
        return factor


class Pipeline:
    """The stages of one device, and their schedule.

    Args:
        module: the LightningModule to train, with `network` and `measure`.
        config: of the run.
        y: a batch of sinograms; all later batches have its size.
        group: the devices of this pipeline, first stage first.
        context: the autocast context of a forward pass.
    """

    def __init__(self, module: Any, config: Config, y: Tensor, group: dist.ProcessGroup, context: Context) -> None:
        assert isinstance(config.strategy, PipelineConfig)
        options = config.strategy
        self.module, self.context, self.group = module, context, group
        self.sequential = options.schedule == "sequential"
        self.microbatch_size = options.microbatch_size
        device, n_devices = dist.get_rank(group), dist.get_world_size(group)
        n_stages = n_devices * options.stages_per_device
        of_one = y[: self.microbatch_size]

        with torch.random.fork_rng([y.device] if y.is_cuda else []):  # layouts must not change later dropout
            packings = layouts(module.network, of_one, context)
        self.cut = options.cut or cut_evenly(module.network.n_iterations, n_stages)
        self.stages = [self._stage(index, packings, of_one) for index in range(device, n_stages, n_devices)]
        n = 1 if self.sequential else len(y) // self.microbatch_size
        # The loss of a micro-batch is its part of the batch's mean, so torch must not divide by their number again.
        options_of_all: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        self.schedule: Any
        if options.schedule == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(list(self.stages), n, **options_of_all)
        else:
            kind = Schedule1F1B if options.schedule == "1f1b" else ScheduleGPipe
            self.schedule = kind(self.stages[0], n, **options_of_all)
        self._batch: Any = None
        self._batch_idx = 0
        self._factor = torch.ones(())
        self._losses: list[Tensor] = []
        self._logged: Logged = {}

    def _stage(self, index: int, packings: list[Packing], y: Tensor) -> PipelineStage:
        """A stage for torch's schedules, with the shapes of its input and output. y: of a micro-batch."""
        iterations, n_stages = ranges(self.cut)[index], len(self.cut)
        first, last = index == 0, index == n_stages - 1

        # With shapes given, torch does not run all stages once more to find them.
        def meta(iteration: int) -> Tensor:
            packing = packings[iteration]
            return torch.empty(len(y), packing.width, dtype=packing.dtype, device="meta", requires_grad=True)

        incoming = None if first else packings[iterations.start]
        return PipelineStage(
            Stage(self.module.network, iterations, incoming, self.context),
            index,
            n_stages,
            y.device,
            input_args=() if first else (meta(iterations.start),),
            output_args=(torch.empty_like(y, device="meta") if last else meta(iterations.stop),),
            group=self.group,
        )

    def step(self, y: Tensor, batch: Any, batch_idx: int, factor: Tensor) -> Tensor:
        """Add the gradients of factor · loss of a batch to the gradients of this device's stages. Returns the loss.

        Logs what `training_step` logs, on every rank.
        """
        self._batch, self._batch_idx, self._factor = batch | {"sinogram": y}, batch_idx, factor
        self._losses.clear()
        self._logged.clear()
        positions = torch.arange(len(y))  # on the host, which reads them
        size = self.microbatch_size if self.sequential else len(y)
        with torch.autocast(y.device.type, enabled=False):  # torch's schedules would else run backward under autocast
            for part, target in zip(y.split(size), positions.split(size), strict=True):
                self.schedule.step(y=part, target=target)
        return self._on_every_device(y.device)

    def _on_every_device(self, device: torch.device) -> Tensor:
        """The loss of the batch, after `log` of all values. Only the device of the last stage knows them."""
        known: list[Any] = [None]
        last = dist.get_world_size(self.group) - 1
        if self._losses:
            values = {name: (total.item() / share, *rest) for name, (total, share, *rest) in self._logged.items()}
            known = [(torch.stack(self._losses).sum().item(), values)]
        dist.broadcast_object_list(known, group_src=last, group=self.group, device=device)
        loss, values = known[0]
        for name, (value, args, options) in values.items():
            self.module.log(name, torch.tensor(value, device=device), *args, **options)
        return torch.tensor(loss, device=device)

    def _loss(self, image: Tensor, positions: Tensor) -> Tensor:
        with self.context():
            loss = loss_of_part(self.module, self._batch, self._batch_idx, image, int(positions[0]), self._logged)
        self._losses.append(loss.detach())
        return loss * self._factor


def sum_gradients(parameters: list[torch.nn.Parameter], divisor: int) -> None:
    """Sum every gradient over all processes and divide by `divisor`, in one message. A missing gradient is 0.

    Frozen parameters get none: with a gradient of 0, weight decay would change them.
    """
    parameters = [p for p in parameters if p.requires_grad]
    # Hundreds of small messages would cost more than their bytes.
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    flat /= divisor
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view_as(p)
