"""The pipeline over iterations: each device runs some of the T iterations and sends the state to the next device.

`Stage`, `Packing` and `loss_of_part` are the parts of a network and of its loss; `PipelineParallel` plans them, and
`PipelineStrategy` runs them. As in
ddp, every device holds all weights, and gradients are summed over all devices before the optimizer step. So weights
that iterations share stay equal, clipping uses the norm of the full gradient, and all GradScalers see the same
overflow. A checkpoint is that of one device. Every device validates by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer

from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.parallel.buffers import unchanged_buffers
from qnmixer.parallel.device_memory import DevicePlan, Footprint
from qnmixer.parallel.parallelism import TIMEOUT, Parallelism
from qnmixer.parallel.torch_private import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from qnmixer.parallel.tracker import PeakTracker, autocast, n_bytes
from qnmixer.settings.strategies import PipelineConfig, Schedule, microbatches_together

Context = Callable[[], AbstractContextManager[Any]]
Logged = dict[str, tuple[Tensor, float, tuple[Any, ...], dict[str, Any]]]
"""What `training_step` logs in a batch, by name: the weighted sum over micro-batches, the sum of their weights, and the
other arguments of `log`."""
_OF_ITERATES = ("iterates", "states", "trajectory", "run")
"""Methods of a network that need all its iterations on one device."""


class Stage(nn.Module):
    """Consecutive iterations. The input and the output are one packed state [b, K]; y is an extra input.

    The first stage takes no state, and the last one returns x_T. The state is packed into one tensor, because every
    tensor costs a message each way.

    `incoming` is the layout of the state before them, `context` the autocast of the forward pass.
    """

    def __init__(
        self, network: UnrolledNetwork[Any], iterations: range, incoming: "Packing", context: Context = nullcontext
    ) -> None:
        super().__init__()
        self.network, self.iterations, self.incoming, self.context = network, iterations, incoming, context

    def forward(self, *packed: Tensor, y: Tensor) -> Tensor:
        """The state after these iterations; y [b, 1, V, D]."""
        with self.context():
            state = self.incoming.unpack(*packed) if packed else self.network.start(y)
            state = self.network.loop(self.network, self.iterations, y, state)
            if self.iterations.stop == self.network.n_iterations:
                return self.network.image(state)
            return Packing.from_state(state).pack(state)


def loss_of_part(module: Any, batch: Any, batch_idx: int, image: Tensor, start: int, logged: Logged) -> Tensor:
    """The part of a micro-batch in the loss of its batch, by the module's own `training_step`.

    Args:
        module: a LightningModule with `network` and `measure`. Its loss is a mean over the images of a batch.
        batch: with its sinograms.
        image: x_T of the micro-batch, which the stages have computed.
        start: position in the batch of the micro-batch's first sample.
        logged: takes what `training_step` logs.

    Raises ConfigError if `training_step` needs more of the network than x_T, or logs a torchmetrics Metric.
    """
    part = {key: value[start : start + len(image)] for key, value in batch.items()}
    share = len(image) / len(batch["weight"])
    with _giving(module, part["sinogram"], image, partial(_add_logged, logged, share)):
        return module.training_step(part, batch_idx) * share


@contextmanager
def _giving(module: Any, y: Tensor, image: Tensor, add: Callable[..., None]) -> Iterator[None]:
    """Within it, the module measures y, its network gives this image for y and no iterates, and `log` calls `add`."""

    def forward(sinogram: Tensor) -> Tensor:
        if sinogram is not y:
            raise ConfigError(
                "strategy=pipeline: training_step gives the network another sinogram than that of self.measure, but "
                "its iterations are on other devices: choose strategy=ddp"
            )
        return image

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            "strategy=pipeline: training_step asks for the iterates, but they are on other devices: choose "
            "strategy=ddp memory=recompute"
        )

    # In the objects, so that hooks of `forward` still run.
    patches: list[tuple[Any, dict[str, Any]]] = [
        (module.network, {"forward": forward} | dict.fromkeys(_OF_ITERATES, refuse)),
        (module, {"measure": lambda batch, stream: y, "log": add}),
    ]
    for owner, methods in patches:
        vars(owner).update(methods)
    try:
        yield
    finally:
        for owner, methods in patches:
            for name in methods:
                del vars(owner)[name]


def _add_logged(logged: Logged, share: float, name: str, value: Any, *args: Any, **options: Any) -> None:
    if isinstance(value, nn.Module):
        raise ConfigError(f"strategy=pipeline: training_step logs {name} as a metric object: log a number")
    number = torch.as_tensor(value, dtype=torch.float32).detach().reshape(())
    total, shares = logged[name][:2] if name in logged else (0, 0.0)  # perhaps in some micro-batches only
    logged[name] = (total + share * number, shares + share, args, options)


@dataclass(frozen=True)
class Packing:
    """The layout of a state, of any tensors [b, …], in one tensor [b, K]. Each tensor is stored once."""

    spec: TreeSpec
    places: tuple[int, ...]  # for each leaf, the index of its part
    parts: tuple["_Part", ...]
    dtype: torch.dtype

    @staticmethod
    def from_state(state: Any) -> "Packing":
        """The layout of states like this one."""
        leaves, spec = tree_flatten(state)
        tensors = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Tensor))
        order = {tensor: k for k, tensor in enumerate(tensors)}
        places = tuple(order[leaf] if isinstance(leaf, Tensor) else -1 for leaf in leaves)
        parts = tuple(_Part(leaf.shape[1:], leaf.dtype, leaf.requires_grad) for leaf in order)
        return Packing(spec, places, parts, torch.promote_types(torch.float32, parts[0].dtype))

    @property
    def width(self) -> int:
        """K, the number of values for each sample."""
        return sum(part.shape.numel() for part in self.parts)

    def empty(self, b: int, device: torch.device | str) -> Tensor:
        """A message of b packed states, as another stage sends it."""
        return torch.empty(b, self.width, dtype=self.dtype, device=device, requires_grad=True)

    def pack(self, state: Any) -> Tensor:
        """Pack a state into [b, K]."""
        leaves, _ = tree_flatten(state)
        parts = {place: leaf for place, leaf in zip(self.places, leaves, strict=True) if place >= 0}
        return torch.cat([parts[k].reshape(len(parts[k]), -1).to(self.dtype) for k in range(len(parts))], dim=1)

    def unpack(self, packed: Tensor) -> Any:
        """Unpack the state. Constants become tensors that need no gradient again."""
        pieces = packed.split([part.shape.numel() for part in self.parts], dim=1)
        tensors = []
        for piece, part in zip(pieces, self.parts, strict=True):
            tensor = piece.view(-1, *part.shape).to(part.dtype)
            tensors.append(tensor if part.requires_grad else tensor.detach())
        return tree_unflatten([tensors[place] if place >= 0 else None for place in self.places], self.spec)


class _Part(NamedTuple):
    shape: torch.Size  # without the batch
    dtype: torch.dtype
    requires_grad: bool


def stages_of(n_iterations: int, n_stages: int) -> list[range]:
    """The iterations of each stage of a pipeline, as equal as possible: the last ones may have one fewer.

    The last stage also computes the loss.
    """
    return [range(part[0], part[-1] + 1) for part in np.array_split(range(n_iterations), n_stages)]


def layouts(network: UnrolledNetwork[Any], y: Tensor, context: Context) -> list[Packing]:
    """The layout of the state before each iteration, and after the last one: T + 1 of them.

    Iterations run one at a time, so this needs the memory of one iteration.
    """
    packings, state = [], None
    for t in range(network.n_iterations):
        with torch.enable_grad(), context():
            input_state = state if t else network.start(y)
            state = network.step(t, y, input_state)
        packings.append(Packing.from_state(input_state))
        # As another device would receive it: without its graph, and still one tensor where it holds one twice.
        received = cache(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        state = tree_map_only(Tensor, received, state)
    return [*packings, Packing.from_state(state)]


class PipelineParallel(Parallelism[PipelineConfig]):
    """How a pipeline trains, and what the plan counts for it."""

    def strategy(self) -> "PipelineStrategy":
        """The pipelines of this run."""
        keys, t, batch_size = self.keys, self.config.trainer, self.config.data.batch_size
        n_devices, accumulate = keys.devices_per_replica(self.config), t.accumulate_grad_batches
        return PipelineStrategy(n_devices, batch_size, accumulate, keys.schedule, keys.microbatch_size)

    def plan(self, module: Any, optimizer: Optimizer, batch_of: Callable[[int], Any]) -> tuple[DevicePlan, ...]:
        """The plan of each device, first stage first. It is an upper bound."""
        network, config = module.network, self.config
        batch = batch_of(self.keys.batch_of_replica(config))  # every device gets all of it
        y = batch["sinogram"][: self.keys.microbatch_size]
        packings = layouts(network, y, partial(autocast, config.trainer.precision))
        devices = range(self.keys.devices_per_replica(config))
        return tuple(self._plan_stage(module, optimizer, batch, packings, device) for device in devices)

    def _plan_stage(
        self, module: Any, optimizer: Optimizer, batch: Any, packings: list[Packing], device: int
    ) -> DevicePlan:
        """A stage at the peak of one micro-batch, with what those in flight hold between forward and backward.

        torch has a buffer for each received state and gradient of each micro-batch of one call. It frees a sent
        gradient at its next message or later, when less is in flight.
        """
        config, network = self.config, module.network
        iterations = stages_of(network.n_iterations, self.keys.devices_per_replica(config))[device]
        b, precision = self.keys.microbatch_size, partial(autocast, config.trainer.precision)
        stage = Stage(network, iterations, packings[iterations.start], precision)
        received = [packings[iterations.start].empty(b, "cpu")] if iterations.start else []
        is_last = iterations.stop == network.n_iterations
        gradient = [] if is_last else [packings[iterations.stop].empty(b, "cpu").detach()]  # it comes in

        def forward() -> Tensor:
            image: Tensor = stage(*received, y=batch["sinogram"][:b])
            with precision():
                return loss_of_part(module, batch, 0, image, 0, {}) if is_last else image

        tracker = PeakTracker()
        tracker.track(module, optimizer, *(value for value in batch.values() if isinstance(value, Tensor)))
        # An outer autocast, as in training: it keeps half-precision copies of weights from one micro-batch to the next.
        with tracker, torch.autocast("cpu", enabled=False):
            if config.trainer.precision != "32":
                forward()  # makes these copies
            base_bytes = tracker.current["activations"]
            output = forward()
            held_bytes = tracker.current["activations"] - base_bytes
            output.backward(*gradient)
            del output
            torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])  # summed over the devices
            optimizer.step()
        n_together, n_in_flight = self.keys.n_together(config), self.keys.in_flight(config, device)
        messages = n_together * n_bytes(received + gradient) + (n_bytes(received) if n_together > 1 else 0)
        peak = Footprint(**tracker.peak)
        activations = peak.activations + (n_in_flight - 1) * held_bytes
        return DevicePlan(iterations, n_in_flight, replace(peak, activations=activations, strategy=messages))


class PipelineStrategy(DDPStrategy):
    """Trains in stages within each group of devices, and on different batches in each group.

    A stage may run the backward pass of the first micro-batch before the forward pass of the last one. So
    `training_step` does both passes, and Lightning's `backward` does nothing. Lightning clears gradients between the
    two passes. Here they are cleared after the optimizer step.

    Args:
        n_devices: of one pipeline; the Trainer has a multiple of them.
        batch_size: samples of one device; a pipeline works on n_devices times as many together.
        accumulate: batches of an optimizer step, as the Trainer's accumulate_grad_batches.
        schedule: 1f1b, with as many micro-batches in flight as devices, or sequential, with one.
        microbatch_size: samples that a stage works on at once.
    """

    def __init__(
        self,
        n_devices: int,
        batch_size: int,
        accumulate: int = 1,
        schedule: Schedule = "1f1b",
        microbatch_size: int = 1,
    ) -> None:
        super().__init__(timeout=TIMEOUT)
        self.n_devices, self.batch_size, self.accumulate = n_devices, batch_size, accumulate
        self.schedule, self.microbatch_size = schedule, microbatch_size
        self._pipelines: dict[torch.Size, Pipeline] = {}  # by the shape of y: scans of training steps may differ
        self._group: dist.ProcessGroup | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give all devices of a pipeline the full batch, of fixed size."""
        return {
            "num_replicas": self.world_size // self.n_devices,
            "rank": self.global_rank // self.n_devices,
            "batch_size": self.batch_size * self.n_devices,
            "fill": True,
        }

    def configure_ddp(self) -> None:
        """Add no DDP wrapper: `optimizer_step` sums the gradients."""
        self._group, _ = dist.new_subgroups(self.n_devices, timeout=TIMEOUT)
        assert self.lightning_module is not None
        # Lightning clears gradients between forward and backward, when the first micro-batches already have theirs.
        self.lightning_module.optimizer_zero_grad = lambda *args, **kwargs: None  # type: ignore[method-assign]  # a hook

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Run the forward and backward pass of a batch through all stages. Returns its loss."""
        module: Any = self.lightning_module
        y = module.measure(batch, "train")
        if y.shape not in self._pipelines:
            assert self._group is not None
            context = self.precision_plugin.forward_context
            self._pipelines[y.shape] = Pipeline(module, self.schedule, self.microbatch_size, y, self._group, context)
        return self._pipelines[y.shape].step(y, batch, batch_idx, self._loss_factor())

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
        factor = torch.ones((), device=self.root_device) / self.accumulate
        scaler = getattr(self.precision_plugin, "scaler", None)
        return factor if scaler is None else scaler.scale(factor)


class Pipeline:
    """The stage of one device, and the schedule of all stages."""

    def __init__(
        self,
        module: Any,
        schedule: Schedule,
        microbatch_size: int,
        y: Tensor,  # a batch of sinograms; all its batches have this shape
        group: dist.ProcessGroup,  # the devices of this pipeline, first stage first
        context: Context,  # the autocast of a forward pass
    ) -> None:
        self.module, self.context, self.group = module, context, group
        self.microbatch_size = microbatch_size
        self.n_together = microbatches_together(schedule, len(y) // microbatch_size)
        microbatch_y = y[: self.microbatch_size]
        # Layouts must not change later dropout.
        with torch.random.fork_rng([y.device] if y.is_cuda else []), unchanged_buffers(module.network):
            packings = layouts(module.network, microbatch_y, context)
        stages = stages_of(module.network.n_iterations, dist.get_world_size(group))
        stage = self._stage(stages, dist.get_rank(group), packings, microbatch_y)
        kind = ScheduleGPipe if self.n_together == 1 else Schedule1F1B  # torch's 1F1B takes no single micro-batch
        # The loss of a micro-batch is its part of the batch's mean, so torch must not divide by their number again.
        self.schedule = kind(stage, self.n_together, loss_fn=self._loss, scale_grads=False)
        self._batch: Any = None
        self._batch_idx = 0
        self._factor = torch.ones(())
        self._losses: list[Tensor] = []
        self._logged: Logged = {}

    def _stage(self, stages: list[range], index: int, packings: list[Packing], y: Tensor) -> PipelineStage:
        """The stage of this index, for torch's schedules. y: of a micro-batch."""
        iterations, is_last = stages[index], index == len(stages) - 1
        # With the shapes of input and output given, torch does not run all stages once more to find them.
        received, sent = (packings[t].empty(len(y), "meta") for t in (iterations.start, iterations.stop))
        return PipelineStage(
            Stage(self.module.network, iterations, packings[iterations.start], self.context),
            index,
            len(stages),
            y.device,
            input_args=(received,) if index else (),
            output_args=(torch.empty_like(y, device="meta") if is_last else sent,),
            group=self.group,
        )

    def step(self, y: Tensor, batch: Any, batch_idx: int, factor: Tensor) -> Tensor:
        """Add the gradients of factor · loss of a batch to the gradients of this device's stage. Returns the loss.

        Logs what `training_step` logs, on every rank.
        """
        self._batch, self._batch_idx, self._factor = batch | {"sinogram": y}, batch_idx, factor
        self._losses.clear()
        self._logged.clear()
        positions = torch.arange(len(y))  # on the host, which reads them
        size = self.n_together * self.microbatch_size  # of the samples of one call of the schedule
        with torch.autocast(y.device.type, enabled=False):  # torch's schedules would else run backward under autocast
            for part, target in zip(y.split(size), positions.split(size), strict=True):
                self.schedule.step(y=part, target=target)
        return self._on_every_device(y.device)

    def _on_every_device(self, device: torch.device) -> Tensor:
        """The loss of the batch, after `log` of all values. Only the device of the last stage knows them."""
        message: list[Any] = [None]
        last_rank = dist.get_world_size(self.group) - 1
        if self._losses:
            values = {
                name: (total.item() / share, *arguments) for name, (total, share, *arguments) in self._logged.items()
            }
            message = [(torch.stack(self._losses).sum().item(), values)]
        dist.broadcast_object_list(message, group_src=last_rank, group=self.group, device=device)
        loss, values = message[0]
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
