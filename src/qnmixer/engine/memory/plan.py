"""The memory of a training step on each device, computed without the devices and without that memory.

The step itself runs on fake tensors, which have shapes but no data. Only the operator is real. After the first few
iterations memory is affine in T, so two short steps predict a long one. Tests compare this with whole steps. For a
pipeline, each stage runs like this with one micro-batch. The order in which a device runs its stages then gives the
memory that it needs at once.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qnmixer.engine.build import build_module, build_optimizer
from qnmixer.engine.config import Config
from qnmixer.engine.config.named import averages_weights
from qnmixer.engine.config.rules import validate
from qnmixer.engine.config.run import devices_per_replica, with_iterations
from qnmixer.engine.config.sections import DDPConfig, FSDPConfig, PipelineConfig
from qnmixer.engine.memory.footprint import DevicePlan, Footprint, Prediction
from qnmixer.engine.memory.pipeline import StageCost, cut_of, plan_device, track_stages
from qnmixer.engine.memory.tracker import (
    Buckets,
    Hosted,
    NormsInFull,
    PeakTracker,
    apply_hosted_mode,
    autocast,
    batch_of,
    make_state,
    n_bytes,
    optimizer_bytes,
    step_all_at_once,
    without_data,
)
from qnmixer.engine.parallel.stages import ranges
from qnmixer.engine.reconstructor import (
    AUTOCAST,
    Measurement,
    Reconstructor,
    build_projector,
    fine_size,
    system_matrix_at,
)
from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.scan import ScanMatrix

# From here on memory was seen to be affine in T. Until then the peak moves within the step, but not with memory=keep in
# full precision: there each iteration after the second adds its graph and nothing else.
_FEWEST_ITERATIONS = 4
_FEWEST_KEPT = 3
_FEWEST_RECOMPUTED_IN_HALF = 8  # one iteration takes little then, so the states outgrow it late


ASSUMED_DEVICES = 4
"""The assumed number of devices, if the config leaves it to the machine."""


class Planner:
    """Predicts the footprint of configs with the same scan. It stores the results of its runs.

    Raises ConfigError for a config that leaves the number of devices open and cannot run on `ASSUMED_DEVICES`.
    """

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        self.projector = projector or build_projector(config)
        self.projector.safe_step_size()  # networks ask for these numbers, which fake tensors could not give
        self.projector.operator_norm()
        self._fine: dict[int, ScanMatrix] = {}  # by the size of the image
        self._known: dict[str, Footprint] = {}
        self._known_stages: dict[str, StageCost] = {}

    def predict(self, config: Config) -> Prediction:
        """The footprint of a run on its fullest device, and the bytes of each further iteration."""
        config = with_assumed_devices(config)
        if config.strategy.planned_as == "pipeline":
            return self._predict_pipeline(config)
        footprint, T = self.estimate(config), config.model.T
        device = DevicePlan((range(T),), 1, footprint)
        if not config.model.is_unrolled:
            return Prediction(footprint, None, (device,))
        width, first = _width(config), min(T, _first(config))
        growth = self._step(config, first + width).peak - self._step(config, first).peak
        return Prediction(footprint, growth / width, (device,))

    def estimate(self, config: Config) -> Footprint:
        """The footprint of a run on its fullest device, from two steps with few iterations.

        For a pipeline all iterations are run, because a stage is short and its incoming state grows.
        """
        config = with_assumed_devices(config)
        if config.strategy.planned_as == "pipeline":
            return max((plan.footprint for plan in self.devices(config)), key=lambda footprint: footprint.peak)
        T, width, first = config.model.T, _width(config), _first(config)
        if first + width >= T:
            return self._step(config, T)
        small, larger = (self._step(config, t) for t in (first, first + width))
        return small.moved((T - first) / width, larger)

    def devices(self, config: Config) -> tuple[DevicePlan, ...]:
        """The plan of each device that works on one batch, first stage first. Only a pipeline has several."""
        config = with_assumed_devices(config)
        if config.strategy.planned_as != "pipeline":
            return (DevicePlan((range(config.model.T),), 1, self.estimate(config)),)
        cut = cut_of(config)
        stages = self._stages(config, ranges(cut))
        fixed = self._fixed(config)
        return tuple(plan_device(config, cut, stages, fixed, d) for d in range(devices_per_replica(config)))

    def optimizer_state(self, config: Config) -> float:
        """Bytes of the optimizer state on one device."""
        config = with_assumed_devices(config)
        n_shards = _n_shards(config)
        with without_data():
            module = Reconstructor(config, self.projector)
            optimizer = build_optimizer(config.optimizer, module.network)
            make_state(optimizer)
            return optimizer_bytes(optimizer, n_shards)

    def _predict_pipeline(self, config: Config) -> Prediction:
        """Predict a pipeline. One more iteration goes to the first stage of the fullest device."""
        devices = self.devices(config)
        fullest = max(range(len(devices)), key=lambda d: devices[d].footprint.peak)
        footprint, width = devices[fullest].footprint, _width(config)
        cut = cut_of(config)
        cut[fullest] += width
        longer = with_iterations(config, config.model.T + width)
        longer = replace(longer, strategy=replace(config.strategy, cut=cut))  # type: ignore[call-arg]  # a pipeline's
        wanted = ranges(cut)[fullest :: len(devices)]
        stages = self._stages(longer, wanted)
        peak = plan_device(longer, cut, stages, self._fixed(longer), fullest).footprint.peak
        return Prediction(footprint, (peak - footprint.peak) / width, devices)

    def _fixed(self, config: Config) -> Footprint:
        """The memory that every device of a pipeline needs during all its actions. `gradients`: when all exist."""
        key = f"fixed {config.model} {config.optimizer} {fine_size(config)}"
        if key not in self._known:
            fine = self._fine_matrix(config)
            with without_data():
                module = Reconstructor(config, self.projector)
                module.measurement.fine_matrix = fine
                weights, operator = n_bytes(module.parameters()), n_bytes(module.buffers())
            self._known[key] = Footprint(weights, weights, self.optimizer_state(config), 0, operator)
        return self._known[key]

    def _stages(self, config: Config, wanted: list[range]) -> dict[range, "StageCost"]:
        assert isinstance(config.strategy, PipelineConfig)
        dtype = AUTOCAST[config.trainer.precision]
        setting = (config.model, config.data.image_size, config.memory, config.loss, config.strategy.microbatch_size)
        keys = {iterations: f"{setting} {dtype and dtype.itemsize} {iterations}" for iterations in wanted}
        missing = [iterations for iterations, key in keys.items() if key not in self._known_stages]
        if missing:
            costs = track_stages(config, self.projector, missing)
            self._known_stages |= {keys[iterations]: cost for iterations, cost in costs.items()}
        return {iterations: self._known_stages[key] for iterations, key in keys.items()}

    def _step(self, config: Config, n_iterations: int) -> Footprint:
        config = with_iterations(config, n_iterations)
        key = repr((config.model, config.data.batch_size, config.memory, config.optimizer, config.loss))
        dtype = AUTOCAST[config.trainer.precision]
        key += f"{dtype and dtype.itemsize} {config.trainer.accumulate_grad_batches > 1}"
        key += f"{config.strategy} {_n_shards(config)} {fine_size(config)} {averages_weights(config.callbacks)}"
        if key not in self._known:
            self._known[key] = track_step(config, self.projector, self._fine_matrix(config))
        return self._known[key]

    def _fine_matrix(self, config: Config) -> ScanMatrix | None:
        """A of the finer grid, if the devices simulate on it. It takes as long to build as in the run."""
        size = fine_size(config)
        if size and size not in self._fine:
            self._fine[size] = system_matrix_at(config, size)
        return self._fine.get(size)


_COUNTED_AS = ("replica", "shards", "pipeline")


def with_assumed_devices(config: Config) -> Config:
    """The config with `ASSUMED_DEVICES` if a strategy leaves their number to the machine.

    Raises ConfigError for a config that cannot run on these, and for a strategy without `planned_as`.
    """
    name, planned_as = config.strategy.name, config.strategy.planned_as
    if planned_as not in _COUNTED_AS:
        raise ConfigError(
            f"strategy={name} cannot be planned: its schema in qnmixer/engine/config/strategy.py says planned_as="
            f"{planned_as}, not {', '.join(_COUNTED_AS)}"
        )
    if config.strategy.name == "single" or config.trainer.devices is not None:
        return config
    config = replace(config, trainer=replace(config.trainer, devices=ASSUMED_DEVICES))
    validate(config)
    return config


def _width(config: Config) -> int:
    """The number of iterations by which memory grows evenly: whole periods."""
    return config.model.period if config.model.is_unrolled else 1


def _first(config: Config) -> int:
    """The fewest iterations from which memory is affine in T: a multiple of the width, below the T of a config."""
    width, memory, half = _width(config), config.memory.name, config.trainer.precision != "32"
    fewest = _FEWEST_KEPT if memory == "keep" and not half else _FEWEST_ITERATIONS
    fewest = max(_FEWEST_RECOMPUTED_IN_HALF if memory == "recompute" and half else fewest, 2 * width)
    return fewest + (config.model.T - fewest) % width


def _n_shards(config: Config) -> int:
    """The number of devices over which fsdp spreads each tensor; 1 for every other strategy."""
    sharded = config.strategy.planned_as == "shards"
    return (config.trainer.devices or 1) * config.trainer.num_nodes if sharded else 1


def track_step(config: Config, projector: FanBeamProjector, fine_matrix: ScanMatrix | None = None) -> Footprint:
    """The footprint of a whole training step on fake tensors, for single, ddp or fsdp.

    With `fine_matrix`, which is A of the finer grid, the step simulates from images on that grid.

    Gradients of ddp are views of its buckets, which stay when gradients are cleared. While it accumulates, gradients
    are outside the buckets. `strategy` counts them as a copy.
    """
    n_batches = min(2, config.trainer.accumulate_grad_batches)  # all later batches need the same memory as the second
    hosted = Hosted()
    with without_data():
        module = build_module(config, projector)
        module.measurement.fine_matrix = fine_matrix
        network = module.network
        apply_hosted_mode(network, config, hosted)
        optimizer = build_optimizer(config.optimizer, network)
        make_state(optimizer)
        on_gpu = config.trainer.accelerator != "cpu"  # a plan is for GPUs, unless the run is known to have none
        if on_gpu:
            step_all_at_once(optimizer)
        buckets = Buckets(network) if isinstance(config.strategy, DDPConfig) else None
        tracker = PeakTracker()
        tracker.track(module, optimizer)
        size, finer = config.data.image_size, config.data.image_size * config.data.simulation_factor
        norms = NormsInFull() if on_gpu and config.trainer.precision != "32" else nullcontext()
        with tracker, norms:
            for k in range(n_batches):
                image = torch.rand(config.data.batch_size, 1, size, size)
                fine = torch.rand(config.data.batch_size, 1, finer, finer) if fine_matrix is not None else None
                weight = torch.ones(config.data.batch_size)
                with torch.no_grad():
                    y = _simulated(module.measurement, image, fine)
                with autocast(config):
                    loss = module.training_step(batch_of(image, weight, y), 0)
                if k == 0:
                    optimizer.zero_grad()  # as in Lightning: the gradients of the step before exist until here
                if buckets is not None:
                    buckets.in_use = k == n_batches - 1
                loss.backward()
                del loss, y, image, fine, weight
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        footprint = Footprint(**tracker.peak, host=hosted.bytes)
        if averages_weights(config.callbacks):
            footprint = replace(footprint, parameters=2 * footprint.parameters)
        if buckets is not None:
            loose = max(0.0, footprint.gradients - buckets.bytes)
            footprint = replace(footprint, gradients=footprint.gradients - loose, strategy=loose)
        sharded = config.strategy.planned_as == "shards"
        return _sharded(footprint, config, network, optimizer) if sharded else footprint


def _simulated(measurement: Measurement, image: Tensor, fine: Tensor | None) -> Tensor:
    """The sinograms of a batch. A run makes them one by one. All take the same, so the plan makes one."""
    scan = measurement.projector.geometry
    others = torch.empty(len(image) - 1, 1, scan.n_views, scan.n_detectors)
    return torch.cat([others, measurement.project(image[-1:], None if fine is None else fine[-1:])])


def _sharded(
    footprint: Footprint, config: Config, network: UnrolledNetwork[Any], optimizer: torch.optim.Optimizer
) -> Footprint:
    """The footprint of a step on one device under fsdp, by arithmetic. It is too large rather than too small.

    Weights, gradients and optimizer state are cut along their first dimension, rounded up. `strategy` counts the full
    tensors that exist at once. These are the weights of the root unit and of one block (of all blocks, if they stay
    gathered). Messages that gather weights and reduce gradients are twice the largest unit. While accumulating, all
    gradients are full.
    """
    assert isinstance(config.strategy, FSDPConfig)
    n_shards = _n_shards(config)
    blocks = [n_bytes(block.parameters()) for block in network.blocks()]
    whole, shards = n_bytes(network.parameters()), n_bytes(network.parameters(), n_shards)
    root = whole - sum(blocks)
    gathered = root + (max(blocks, default=0) if config.strategy.reshard_after_forward else sum(blocks))
    messages = 2 * max([root, *blocks])
    unreduced = whole if config.trainer.accumulate_grad_batches > 1 else 0
    return replace(
        footprint,
        parameters=shards,
        gradients=footprint.gradients * shards / whole,
        optimizer=optimizer_bytes(optimizer, n_shards),
        strategy=gathered + messages + unreduced,
    )
