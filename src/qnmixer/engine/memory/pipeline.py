"""The memory of each device of a pipeline: first of its stages one by one, then in the order in which it runs them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from qnmixer.engine.build import build_module
from qnmixer.engine.config import Config
from qnmixer.engine.config.run import batch_of_replica, devices_per_replica
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.memory.footprint import DevicePlan, Footprint
from qnmixer.engine.memory.tracker import (
    Hosted,
    PeakTracker,
    apply_hosted_mode,
    autocast,
    batch_of,
    n_bytes,
    without_data,
)
from qnmixer.engine.parallel.stages import (
    Logged,
    Packing,
    Stage,
    actions,
    cut_evenly,
    idle_share,
    loss_of_part,
    ranges,
    survey,
)
from qnmixer.engine.reconstructor import fine_size
from qnmixer.engine.run_module import RunModule
from qnmixer.physics import FanBeamProjector


def cut_of(config: Config) -> list[int]:
    """Iterations of each stage of a pipeline. They count as equal if the cost is not measured yet."""
    assert isinstance(config.strategy, PipelineConfig)
    n_stages = devices_per_replica(config) * config.strategy.stages_per_device
    return list(config.strategy.cut or cut_evenly(config.model.T, n_stages))


def n_microbatches(config: Config) -> int:
    """Micro-batches in the batch of a pipeline."""
    assert isinstance(config.strategy, PipelineConfig)
    return batch_of_replica(config) // config.strategy.microbatch_size


def idle(config: Config) -> float:
    """Share of device time that a pipeline waits, if all iterations cost the same.

    The backward pass counts as two forward passes; as three if it runs them again.
    """
    assert isinstance(config.strategy, PipelineConfig)
    return idle_share(
        config.strategy.schedule,
        devices_per_replica(config),
        n_microbatches(config),
        cut_of(config),
        config.strategy.stages_per_device,
        backward=3.0 if config.memory.name == "recompute" else 2.0,
    )


@dataclass(frozen=True)
class StageCost:
    """Bytes of a stage for one micro-batch. Only `casts` includes its input state, sinogram and images."""

    received: int  # the state that comes in; the gradient that goes out is of this size too
    sent: int  # the state that goes out, and the gradient that comes in
    sinogram: int
    casts: int  # weights in half precision, which all micro-batches share, and the inputs of one micro-batch
    forward: int  # most during forward
    held: int  # between forward and backward
    backward: int  # most during backward, gradients of weights left out
    first_backward: int  # the same with gradients of weights, if this backward makes them
    weights: dict[str, int]  # bytes of the weights that get a gradient, by name
    host: int  # what offloading moves away


def track_stages(config: Config, projector: FanBeamProjector, wanted: Iterable[range]) -> dict[range, StageCost]:
    """The cost of some stages of a pipeline, by their iterations. The stages run on fake tensors."""
    assert isinstance(config.strategy, PipelineConfig)
    b, size = config.strategy.microbatch_size, config.data.image_size
    hosted = Hosted()
    with without_data():
        module = build_module(config, projector)
        apply_hosted_mode(module.network, config, hosted)
        image, weight = torch.rand(b, 1, size, size), torch.ones(b)
        with torch.no_grad():
            y = projector(image)
        packings: dict[int, Packing] = {}  # of the states before iterations; each stage adds that of the next one
        costs = {}
        for iterations in wanted:
            if iterations.start and iterations.start not in packings:
                packings = dict(enumerate(survey(module.network, y, partial(autocast, config), timed=False)[0]))
            costs[iterations] = _track_stage(module, iterations, packings, (y, image, weight), hosted)
        return costs


def _track_stage(
    module: RunModule,
    iterations: range,
    packings: dict[int, Packing],
    batch: tuple[Tensor, Tensor, Tensor],
    hosted: "Hosted",
) -> StageCost:
    y, image, weight = batch
    network = module.network
    first, last = iterations.start == 0, iterations.stop == network.n_iterations
    stage = Stage(network, iterations, None if first else packings[iterations.start])

    def forward() -> tuple[Tensor, ...]:
        with autocast(module.config):
            output = stage(*received, y=y)
            if not last:
                return (output,)
            return loss_of_part(module, batch_of(image, weight, y), 0, output, 0, Logged()), output

    incoming = stage.incoming
    received = [] if incoming is None else [torch.empty(len(y), incoming.width, dtype=incoming.dtype).requires_grad_()]
    network.zero_grad()
    tracker = PeakTracker()
    tracker.track(module, y, image, weight, *received)
    # An outer autocast, as in training: it keeps half-precision copies of weights from one micro-batch to the next. The
    # first forward pass makes these copies, so they are counted apart.
    with tracker, torch.autocast("cpu", enabled=False):
        if module.config.trainer.precision != "32":
            forward()
        casts = tracker.active
        tracker.restart()
        host = hosted.bytes
        made = forward()
        most_forward, held = tracker.most - casts, tracker.active - casts
        given = [] if last else [torch.empty_like(made[0])]  # the gradient that comes in
        there = casts + n_bytes(given)
        tracker.restart()
        torch.autograd.backward(made[:1], given or None)
        most_backward, with_gradients = tracker.most - there, tracker.most_with_gradients - there
    if stage.outgoing is not None:
        packings[iterations.stop] = stage.outgoing
    return StageCost(
        received=n_bytes(received),
        sent=n_bytes(given),
        sinogram=y.nbytes,
        casts=there,
        forward=most_forward,
        held=held,
        backward=most_backward,
        first_backward=with_gradients,
        weights={name: p.nbytes for name, p in network.named_parameters() if p.grad is not None},
        host=hosted.bytes - host,
    )


def plan_device(
    config: Config, cut: list[int], costs: dict[range, StageCost], fixed: Footprint, device: int
) -> DevicePlan:
    """The memory of one device of a pipeline. It follows the device's actions in their order.

    Beside the stages it counts four things. Every device gets the whole batch. torch has a buffer for each received
    state and gradient of each micro-batch. Sent input gradients stay until torch frees them. At the end there is the
    message in which gradients are summed.
    """
    assert isinstance(config.strategy, PipelineConfig)
    schedule, n_devices, n = config.strategy.schedule, devices_per_replica(config), n_microbatches(config)
    own = [costs[iterations] for iterations in ranges(cut)[device::n_devices]]
    at_once = 1 if schedule == "sequential" else n  # micro-batches of one call of torch's schedule
    buffers = at_once * sum(stage.received + stage.sent for stage in own)
    images = batch_of_replica(config) * 4 * (config.data.image_size**2 + fine_size(config) ** 2 + 1)
    batch = images + n * own[0].sinogram + max(stage.casts for stage in own)

    gradients: dict[str, int] = {}
    if config.trainer.accumulate_grad_batches > 1:  # those of the batch before
        gradients = {name: size for stage in own for name, size in stage.weights.items()}
    held = sent = in_flight = most_in_flight = host = most_host = 0
    most = (0, 0)  # activations, gradients
    for kind, index, _ in actions(schedule, device, n_devices, n, config.strategy.stages_per_device):
        stage = own[index // n_devices]
        if kind == "F":
            most = max(most, (held + sent + stage.forward, sum(gradients.values())), key=sum)
            held, host, in_flight = held + stage.held, host + stage.host, in_flight + 1
            most_in_flight, most_host = max(most_in_flight, in_flight), max(most_host, host)
            continue
        held, host, in_flight = held - stage.held, host - stage.host, in_flight - 1
        first = not gradients
        gradients |= stage.weights
        made = stage.first_backward - stage.backward if first else sum(gradients.values())
        most = max(most, (held + sent + stage.backward, made), key=sum)
        # torch frees sent gradients late: 1f1b at its next message, gpipe and interleaved at the end of the batch.
        sent = 0 if schedule == "sequential" else stage.received + (0 if schedule == "1f1b" else sent)
    step = replace(fixed, activations=most[0] + batch, gradients=most[1], strategy=buffers, host=float(most_host))
    summing = replace(fixed, activations=images, strategy=buffers + fixed.parameters, host=float(most_host))
    footprint = max(step, summing, key=lambda footprint: footprint.peak)
    return DevicePlan(tuple(ranges(cut)[device::n_devices]), most_in_flight, footprint)
