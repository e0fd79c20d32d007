"""The memory of each device of a pipeline: its stages one by one, times the micro-batches that it has in flight."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from qnmixer.engine.build import build_module, build_optimizer
from qnmixer.engine.config import Config
from qnmixer.engine.config.run import batch_of_replica, devices_per_replica
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.memory.footprint import DevicePlan, Footprint
from qnmixer.engine.memory.modes import apply_memory_mode
from qnmixer.engine.memory.tracker import HOST, PeakTracker, autocast, batch_of, make_state, n_bytes, without_data
from qnmixer.engine.parallel.stages import Packing, Stage, cut_evenly, layouts, loss_of_part, ranges
from qnmixer.engine.reconstructor import fine_size
from qnmixer.engine.run_module import RunModule
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.scan import ScanMatrix


def cut_of(config: Config) -> list[int]:
    """Iterations of each stage of a pipeline."""
    assert isinstance(config.strategy, PipelineConfig)
    n_stages = devices_per_replica(config) * config.strategy.stages_per_device
    return list(config.strategy.cut or cut_evenly(config.model.T, n_stages))


def n_microbatches(config: Config) -> int:
    """Micro-batches in the batch of a pipeline."""
    assert isinstance(config.strategy, PipelineConfig)
    return batch_of_replica(config) // config.strategy.microbatch_size


def in_flight(config: Config, device: int) -> int:
    """The most micro-batches that a device has between their forward and their backward pass, one for each stage."""
    assert isinstance(config.strategy, PipelineConfig)
    schedule, per_device = config.strategy.schedule, config.strategy.stages_per_device
    n, behind = n_microbatches(config), devices_per_replica(config) - 1 - device
    if schedule in ("sequential", "gpipe"):
        return 1 if schedule == "sequential" else n
    if schedule == "1f1b":
        return min(n, behind + 1)
    in_round = n // max(1, n // devices_per_replica(config))
    return min(per_device * n, (per_device - 1) * in_round + 2 * behind + 1)


def idle(config: Config) -> float:
    """Share of device time that a pipeline waits (the bubble), if all stages take the same time."""
    assert isinstance(config.strategy, PipelineConfig)
    together = 1 if config.strategy.schedule == "sequential" else n_microbatches(config)
    waiting = devices_per_replica(config) - 1
    return waiting / (config.strategy.stages_per_device * together + waiting)


@dataclass(frozen=True)
class StageCost:
    """Bytes of a stage.

    Attributes:
        footprint: at the peak of a step with one micro-batch, without messages.
        held: between the forward and the backward pass of a micro-batch.
        host: what offloading has moved away in between.
        batch: the images and sinograms of a micro-batch, which `footprint` includes.
        received: the state that comes in; the gradient that goes out is of this size too.
        sent: the state that goes out; the gradient that comes in is of this size too.
    """

    footprint: Footprint
    held: int
    host: int
    batch: int
    received: int
    sent: int


def plan_pipeline(
    config: Config, projector: FanBeamProjector, fine_matrix: ScanMatrix | None
) -> tuple[DevicePlan, ...]:
    """The plan of each device of a pipeline, first stage first. The stages run on fake tensors."""
    assert isinstance(config.strategy, PipelineConfig)
    b, size = config.strategy.microbatch_size, config.data.image_size
    with without_data():
        module = build_module(config, projector)
        module.measurement.fine_matrix = fine_matrix
        apply_memory_mode(module.network, config.memory, HOST.type)
        image, weight = torch.rand(b, 1, size, size), torch.ones(b)
        with torch.no_grad():
            y = projector(image)
        packings = layouts(module.network, y, partial(autocast, config))
        optimizer = build_optimizer(config.optimizer, module.network)
        make_state(optimizer)
        costs = {it: _track_stage(module, optimizer, it, packings, (y, image, weight)) for it in ranges(cut_of(config))}
    return tuple(_plan_device(config, costs, device) for device in range(devices_per_replica(config)))


def _track_stage(
    module: RunModule,
    optimizer: torch.optim.Optimizer,
    iterations: range,
    packings: list[Packing],
    batch: tuple[Tensor, Tensor, Tensor],
) -> StageCost:
    y, image, weight = batch
    network = module.network
    first, last = iterations.start == 0, iterations.stop == network.n_iterations

    def message(iteration: int) -> Tensor:
        packing = packings[iteration]
        return torch.empty(len(y), packing.width, dtype=packing.dtype, requires_grad=True)

    precision = partial(autocast, module.config)
    stage = Stage(network, iterations, None if first else packings[iterations.start], precision)
    received = [] if first else [message(iterations.start)]
    given = [] if last else [message(iterations.stop).detach()]  # the gradient that comes in

    def forward() -> Tensor:
        output: Tensor = stage(*received, y=y)
        with precision():
            return loss_of_part(module, batch_of(image, weight, y), 0, output, 0, {}) if last else output

    tracker = PeakTracker()
    tracker.track(module, optimizer, *batch)
    # An outer autocast, as in training: it keeps half-precision copies of weights from one micro-batch to the next.
    with tracker, torch.autocast("cpu", enabled=False):
        if module.config.trainer.precision != "32":
            forward()  # makes these copies
        before = dict(tracker.now)
        made = forward()
        held, host = (tracker.now[kind] - before[kind] for kind in ("activations", "host"))
        made.backward(*given)
        del made
        torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])  # the sum over the devices
        optimizer.step()
    footprint = replace(Footprint(**tracker.peak), host=0)
    return StageCost(footprint, held, host, n_bytes(batch), n_bytes(received), n_bytes(given))


def _plan_device(config: Config, costs: dict[range, StageCost], device: int) -> DevicePlan:
    """The memory of one device of a pipeline, at most: all micro-batches in flight, and the dearest stage at its peak.

    Every device gets the whole batch. torch has a buffer for each received state and gradient of each micro-batch of
    one call. It frees a sent gradient at its next message or later, when less is in flight.
    """
    assert isinstance(config.strategy, PipelineConfig)
    stages = tuple(ranges(cut_of(config))[device :: devices_per_replica(config)])
    own, others = [costs[it] for it in stages], in_flight(config, device) - 1
    fullest = max((cost.footprint for cost in own), key=lambda footprint: footprint.peak)
    held, host = (max(sizes) for sizes in zip(*((cost.held, cost.host) for cost in own), strict=True))
    n, fine = n_microbatches(config), 4 * batch_of_replica(config) * fine_size(config) ** 2
    at_once, late = (1, 0) if config.strategy.schedule == "sequential" else (n, 1)
    footprint = replace(
        fullest,
        activations=fullest.activations + others * held + (n - 1) * own[0].batch + fine,
        strategy=sum(at_once * (cost.received + cost.sent) + late * cost.received for cost in own),
        host=(others + 1) * host,
    )
    return DevicePlan(stages, others + 1, footprint)
