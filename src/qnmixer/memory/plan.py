"""The memory of a training step on each device, computed without the devices and without that memory.

The step itself runs on tensors that have shapes but no data. Only the operator is real. A step of T = 14 takes a second
of a CPU. Of a pipeline each stage runs by itself, times the micro-batches that its device has in flight. A run that
is out of memory plans too: its last line names changes that would fit.
"""

import math
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qnmixer.errors import ConfigError, UserError, first_line
from qnmixer.measurement.build import build_projector, fine_size, system_matrix_at
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.module.base import RunModule
from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer
from qnmixer.parallel.device_memory import MIB, DevicePlan, Footprint
from qnmixer.parallel.pipeline import Packing, Stage, layouts, loss_of_part, stages_of
from qnmixer.parallel.shapes import values_refused, without_data
from qnmixer.parallel.torch_private import tree_map_only
from qnmixer.parallel.tracker import HOST, PeakTracker, autocast, batch_of, make_state, n_bytes
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.scan import ScanMatrix
from qnmixer.settings.override import override
from qnmixer.settings.parts import ModelConfig, averages_weights
from qnmixer.settings.run import Config, validate
from qnmixer.settings.strategies import FSDPConfig, PipelineConfig

# The plan of a run

ASSUMED_DEVICES = 4
"""The assumed number of devices, if the config leaves it to the machine."""


class Planner:
    """Predicts the footprint of configs with the same scan. It stores the results of its runs.

    Raises ConfigError for a config that leaves the number of devices open and cannot run on `ASSUMED_DEVICES`, and for
    one whose step does not run without data: a shape or a branch that depends on the values of a tensor, or NumPy.
    """

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        self.projector = projector or build_projector(config)
        self.projector.safe_step_size()  # networks ask for these numbers, which tensors without data could not give
        self.projector.operator_norm()
        self._fine: dict[int, ScanMatrix] = {}  # by the size of the image
        self._plans: dict[str, tuple[DevicePlan, ...]] = {}

    def estimate(self, config: Config) -> Footprint:
        """The footprint of a run on its fullest device."""
        return max((device.footprint for device in self.devices(config)), key=lambda footprint: footprint.peak)

    def growth(self, config: Config) -> float | None:
        """Bytes that each further iteration adds; None for a pipeline, and for a network that cannot have more."""
        T = config.model.T
        if isinstance(config.strategy, PipelineConfig) or T < 2 or not config.model.is_unrolled:
            return None
        n_added = 2  # an even number: two kinds of block may alternate
        try:
            longer = config.changed(model=config.model.changed(n_iterations=T + n_added))
            longer_peak = self.estimate(longer).peak
        except ConfigError:
            return None
        return (longer_peak - self.estimate(config).peak) / n_added

    def devices(self, config: Config) -> tuple[DevicePlan, ...]:
        """The plan of each device that works on one batch, first stage first. Only a pipeline has several."""
        config = with_assumed_devices(config)
        if (key := repr(config)) not in self._plans:
            fine_matrix = self._fine_matrix(config)
            try:
                self._plans[key] = self._planned(config, fine_matrix)
            except UserError:
                raise
            except Exception as error:  # a user's code without data can raise anything
                raise _not_planned(f"without data it raises {type(error).__name__}, {first_line(error)}") from error
        return self._plans[key]

    def _planned(self, config: Config, fine_matrix: ScanMatrix | None) -> tuple[DevicePlan, ...]:
        with without_data():
            module = build_module(config, self.projector)
            if not module.automatic_optimization:
                raise _not_planned(f"{type(module).__name__} optimizes by itself (automatic_optimization=False)")
            module.measurement.fine_matrix = fine_matrix
            apply_memory_mode(module.network, config.memory, HOST.type)
            for name in ("forward", "start", "step", "image"):  # not all of the training step, which may log values
                setattr(module.network, name, values_refused()(getattr(module.network, name)))
            optimizer = build_optimizer(config.optimizer, module.network)
            make_state(optimizer)
            plan = _plan_pipeline if isinstance(config.strategy, PipelineConfig) else _plan_replica
            return plan(module, optimizer)

    def _fine_matrix(self, config: Config) -> ScanMatrix | None:
        """A of the finer grid, if the devices simulate on it. It takes as long to build as in the run."""
        size = fine_size(config)
        if size and size not in self._fine:
            self._fine[size] = system_matrix_at(config, size)
        return self._fine.get(size)


def _not_planned(why: str) -> ConfigError:
    """The error for a step that does not run without data."""
    return ConfigError(f"a step of this run cannot be planned: {why}. A run prints its memory: trainer.max_steps=3")


def with_assumed_devices(config: Config) -> Config:
    """The config with `ASSUMED_DEVICES` if a strategy leaves their number to the machine.

    Raises ConfigError for a config that cannot run on these.
    """
    if config.strategy.name == "single" or config.trainer.per_node is not None:
        return config
    config = config.changed(trainer=config.trainer.changed(devices=ASSUMED_DEVICES))
    validate(config)
    return config


# A step on one device


def _plan_replica(module: RunModule, optimizer: torch.optim.Optimizer) -> tuple[DevicePlan, ...]:
    """The plan of the one device that runs the whole network, for single, ddp or fsdp: a training step.

    Gradients of ddp are views of its buckets, which stay when gradients are cleared. While it accumulates, gradients
    are outside the buckets. `strategy` counts them as a copy.
    """
    config, network = module.config, module.network
    accumulates, ddp = config.trainer.accumulate_grad_batches > 1, config.strategy.name == "ddp"
    on_gpu = config.trainer.accelerator != "cpu"  # a plan is for GPUs, unless the run is known to have none
    if on_gpu:
        _step_all_at_once(optimizer)
    tracker = PeakTracker()
    tracker.track(module, optimizer)
    norms = _NormsInFull() if on_gpu and config.trainer.precision != "32" else nullcontext()
    with tracker, norms:
        for k in range(1 + accumulates):  # all later batches need the same memory as the second
            batch = _measured_batch(module, config.data.batch_size)
            with autocast(config.trainer.precision):
                loss = module.training_step(batch, 0)
            if k == 0:  # as in Lightning: the gradients of the step before exist until here
                optimizer.zero_grad(set_to_none=not ddp)
            loss.backward()
            del loss, batch
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    footprint = Footprint(**tracker.peak)
    if averages_weights(config.callbacks):
        footprint = replace(footprint, parameters=2 * footprint.parameters)
    if ddp and accumulates:
        footprint = replace(footprint, strategy=footprint.gradients)
    if isinstance(config.strategy, FSDPConfig):
        footprint = _sharded(footprint, config, network)
    return (DevicePlan(range(network.n_iterations), 1, footprint),)


def _measured_batch(module: RunModule, n: int) -> Any:
    """A batch of n with its sinograms. A run makes them one by one. All take the same, so the plan makes one."""
    measurement, size = module.measurement, module.config.data.image_size
    scan, image, fine_image = measurement.projector.geometry, torch.rand(n, 1, size, size), {}
    if measurement.fine_matrix is not None:
        fine_image = {"fine": torch.rand(n, 1, *2 * [fine_size(module.config)])}
    with torch.no_grad():
        sinogram = measurement.project(image[-1:], *(images[-1:] for images in fine_image.values()))
    other_sinograms = torch.empty(n - 1, 1, scan.n_views, scan.n_detectors)
    return batch_of(image, torch.ones(n), torch.cat([other_sinograms, sinogram])) | fine_image


def _step_all_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer update all weights together, which needs a temporary of the size of all weights.

    torch does so by default on a GPU but not on a CPU.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None:
            group["foreach"] = True


class _NormsInFull(TorchFunctionMode):
    """Makes norms take and give float32, as under autocast on a GPU. On a CPU they would stay in half precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.layer_norm, F.group_norm):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _sharded(footprint: Footprint, config: Config, network: UnrolledNetwork[Any]) -> Footprint:
    """The footprint of a step on one device under fsdp, by arithmetic. It is too large rather than too small.

    `strategy` counts the full tensors that exist at once. These are the weights of the root unit and of one block.
    Messages that gather weights and reduce gradients are twice the largest unit. While accumulating, all gradients are
    full.
    """
    n_shards = config.trainer.n_devices
    blocks = [n_bytes(block.parameters()) for block in network.blocks()]
    all_bytes = n_bytes(network.parameters())
    root = all_bytes - sum(blocks)
    gathered = root + max(blocks, default=0)
    unreduced = all_bytes if config.trainer.accumulate_grad_batches > 1 else 0
    return replace(
        footprint,
        parameters=footprint.parameters / n_shards,
        gradients=footprint.gradients / n_shards,
        optimizer=footprint.optimizer / n_shards,
        strategy=gathered + 2 * max([root, *blocks]) + unreduced,
    )


# The stages of a pipeline


def devices_per_replica(config: Config) -> int:
    """The number of devices that work on the same samples: those of a pipeline, or one."""
    return config.strategy.devices_per_replica(config.trainer)


def batch_of_replica(config: Config) -> int:
    """Samples that the devices of one replica get together. data.batch_size is for one device."""
    return config.data.batch_size * devices_per_replica(config)


def n_microbatches(config: Config) -> int:
    """Micro-batches in the batch of a pipeline."""
    assert isinstance(config.strategy, PipelineConfig)
    return batch_of_replica(config) // config.strategy.microbatch_size


def in_flight(config: Config, device: int) -> int:
    """The most micro-batches that a device has between their forward and their backward pass."""
    assert isinstance(config.strategy, PipelineConfig)
    n_remaining = devices_per_replica(config) - device
    return 1 if config.strategy.schedule == "sequential" else min(n_microbatches(config), n_remaining)


def idle(config: Config) -> float:
    """Share of device time that a pipeline waits (the bubble), if all stages take the same time."""
    assert isinstance(config.strategy, PipelineConfig)
    n_together = 1 if config.strategy.schedule == "sequential" else n_microbatches(config)
    n_waiting = devices_per_replica(config) - 1
    return n_waiting / (n_together + n_waiting)


def _plan_pipeline(module: RunModule, optimizer: torch.optim.Optimizer) -> tuple[DevicePlan, ...]:
    """The plan of each device of a pipeline, first stage first. It is an upper bound."""
    config = module.config
    assert isinstance(config.strategy, PipelineConfig)
    batch = _measured_batch(module, batch_of_replica(config))  # every device gets all of it
    y = batch["sinogram"][: config.strategy.microbatch_size]
    packings = layouts(module.network, y, partial(autocast, config.trainer.precision))
    plans = []
    for device, iterations in enumerate(stages_of(module.network.n_iterations, devices_per_replica(config))):
        n_in_flight = in_flight(config, device)
        footprint = _plan_stage(module, optimizer, batch, packings, iterations, n_in_flight)
        plans.append(DevicePlan(iterations, n_in_flight, footprint))
    return tuple(plans)


def _plan_stage(
    module: RunModule,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    packings: list[Packing],
    iterations: range,
    n_in_flight: int,
) -> Footprint:
    """A stage at the peak of one micro-batch, with what at most `n_in_flight` hold between forward and backward.

    torch has a buffer for each received state and gradient of each micro-batch of one call. It frees a sent gradient at
    its next message or later, when less is in flight.
    """
    config, network = module.config, module.network
    assert isinstance(config.strategy, PipelineConfig)
    b, precision = config.strategy.microbatch_size, partial(autocast, config.trainer.precision)
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
        torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])  # the sum over the devices
        optimizer.step()
    n_at_once, n_late = (1, 0) if config.strategy.schedule == "sequential" else (n_microbatches(config), 1)
    peak = Footprint(**tracker.peak)
    return replace(
        peak,
        activations=peak.activations + (n_in_flight - 1) * held_bytes,
        strategy=n_at_once * n_bytes(received + gradient) + n_late * n_bytes(received),
    )


# The last line of a run that is out of memory


def advice(planner: Planner, config: Config, available: float) -> str:
    """One line with the three mildest changes that fit into `available` MiB by the plan, or the closest ones."""
    peak = planner.estimate(config).peak / MIB
    peaks: dict[str, float] = {}
    fitting: list[str] = []
    for change in changes(config):
        with suppress(ConfigError):  # a change that cannot be planned
            peaks[change] = planner.estimate(override(config, change)).peak / MIB
        if peaks.get(change, math.inf) <= available:
            fitting.append(change)
        if len(fitting) == 3:
            break
    suggestions = fitting or sorted(peaks, key=peaks.__getitem__)[:3]
    options = ", or ".join(f"{change} ({peaks[change]:,.0f} MiB)" for change in suggestions)
    # By the plan the step fits. So something that the plan does not count took the memory.
    why = "" if peak > available else " (gaps between tensors, validation or other programs took the rest)"
    return (
        f"out of memory: a step of this run needs {peak:,.0f} MiB by the plan, but {available:,.0f} MiB were free"
        f"{why}: {'try' if fitting else 'no simple change fits, the closest are'} {options}"
    )


def channels_of(model: ModelConfig) -> int:
    """The argument channels of a network; 0 without it, or if that is no number."""
    channels = model.settings().get("channels", 0)
    return channels if isinstance(channels, int) else 0


def changes(config: Config) -> list[str]:
    """Changes that make a step smaller at the same effective batch, mildest first, except those already made."""
    batch = config.data.batch_size
    recompute = "" if config.memory.name == "recompute" else "memory=recompute"
    kind = "bf16" if config.trainer.accelerator == "cpu" else "16"  # fp16 is far slower on a CPU
    half_precision = "" if config.trainer.precision != "32" else f"trainer.precision={kind}-mixed"
    smaller_batch, batch_of_one = (_with_batch(config, min(batch - 1, limit)) for limit in (batch, 1))
    model, channels = config.model, channels_of(config.model)
    fewer_iterations = f"model.n_iterations={model.T // 2}" if model.T > 1 else ""
    fewer_channels = f"model.channels={channels // 8 * 4}" if channels >= 8 else ""
    candidates = [
        recompute,
        smaller_batch,
        half_precision,
        f"{recompute} {half_precision}",
        f"{recompute} {batch_of_one}",
        f"{recompute} {half_precision} {batch_of_one}",
    ]
    candidates += [
        _one_in_flight(config),
        fewer_iterations,
        fewer_channels,
        f"{recompute} {half_precision} {batch_of_one} {fewer_channels}",
    ]
    overrides = dict.fromkeys(change for change in (" ".join(c.split()) for c in candidates) if change)
    return [change for change in overrides if changed_to(config, change) not in (None, config)]


def _one_in_flight(config: Config) -> str:
    """Overrides for a pipeline with one micro-batch at a time, if there are enough devices."""
    if (config.trainer.per_node or 1) == 1:
        return ""
    group = "" if config.strategy.name == "pipeline" else "strategy=pipeline "
    return f"{group}strategy.schedule=sequential"


def changed_to(config: Config, overrides: str) -> Config | None:
    """The config with overrides; None if it refuses them."""
    try:
        return override(config, overrides)
    except ConfigError:
        return None


def _with_batch(config: Config, limit: int) -> str:
    """Overrides for the largest batch of at most `limit` that divides the batch, with more accumulation."""
    batch = config.data.batch_size
    for size in range(limit, 0, -1):
        if batch % size == 0:
            accumulate = config.trainer.accumulate_grad_batches * batch // size
            return f"data.batch_size={size} trainer.accumulate_grad_batches={accumulate}"
    return ""
