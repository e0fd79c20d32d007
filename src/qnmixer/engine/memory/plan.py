"""The memory of a training step on each device, computed without the devices and without that memory.

The step itself runs on fake tensors, which have shapes but no data. Only the operator is real. A step of T = 14 takes
5 s of a CPU.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from qnmixer.engine.build import build_module, build_optimizer
from qnmixer.engine.config import Config
from qnmixer.engine.config.rules import validate
from qnmixer.engine.config.run import with_iterations
from qnmixer.engine.config.sections import FSDPConfig, PipelineConfig, averages_weights
from qnmixer.engine.memory.footprint import DevicePlan, Footprint
from qnmixer.engine.memory.modes import apply_memory_mode
from qnmixer.engine.memory.pipeline import plan_pipeline
from qnmixer.engine.memory.tracker import (
    HOST,
    PeakTracker,
    autocast,
    batch_of,
    make_state,
    n_bytes,
    without_data,
)
from qnmixer.engine.reconstructor import (
    Measurement,
    build_projector,
    fine_size,
    system_matrix_at,
)
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.scan import ScanMatrix

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
        self._plans: dict[str, tuple[DevicePlan, ...]] = {}

    def estimate(self, config: Config) -> Footprint:
        """The footprint of a run on its fullest device."""
        return max((device.footprint for device in self.devices(config)), key=lambda footprint: footprint.peak)

    def growth(self, config: Config) -> float | None:
        """Bytes that each further iteration adds; None for a pipeline, and for a network without T."""
        T = config.model.T
        if isinstance(config.strategy, PipelineConfig) or T < 2:
            return None
        fewer = max(1, 2 * (T // 4))  # an even number: two kinds of block may alternate
        shorter = with_iterations(config, T - fewer)
        return (self.estimate(config).peak - self.estimate(shorter).peak) / fewer

    def devices(self, config: Config) -> tuple[DevicePlan, ...]:
        """The plan of each device that works on one batch, first stage first. Only a pipeline has several."""
        config = with_assumed_devices(config)
        if (key := repr(config)) not in self._plans:
            if isinstance(config.strategy, PipelineConfig):
                self._plans[key] = plan_pipeline(config, self.projector, self._fine_matrix(config))
            else:
                footprint = track_step(config, self.projector, self._fine_matrix(config))
                self._plans[key] = (DevicePlan((range(config.model.T),), 1, footprint),)
        return self._plans[key]

    def _fine_matrix(self, config: Config) -> ScanMatrix | None:
        """A of the finer grid, if the devices simulate on it. It takes as long to build as in the run."""
        size = fine_size(config)
        if size and size not in self._fine:
            self._fine[size] = system_matrix_at(config, size)
        return self._fine.get(size)


def with_assumed_devices(config: Config) -> Config:
    """The config with `ASSUMED_DEVICES` if a strategy leaves their number to the machine.

    Raises ConfigError for a config that cannot run on these.
    """
    if config.strategy.name == "single" or config.trainer.devices is not None:
        return config
    config = replace(config, trainer=replace(config.trainer, devices=ASSUMED_DEVICES))
    validate(config)
    return config


def track_step(config: Config, projector: FanBeamProjector, fine_matrix: ScanMatrix | None = None) -> Footprint:
    """The footprint of a whole training step on fake tensors, for single, ddp or fsdp.

    With `fine_matrix`, which is A of the finer grid, the step simulates from images on that grid.

    Gradients of ddp are views of its buckets, which stay when gradients are cleared. While it accumulates, gradients
    are outside the buckets. `strategy` counts them as a copy.
    """
    accumulates, ddp = config.trainer.accumulate_grad_batches > 1, config.strategy.name == "ddp"
    with without_data():
        module = build_module(config, projector)
        module.measurement.fine_matrix = fine_matrix
        network = module.network
        apply_memory_mode(network, config.memory, HOST.type)
        optimizer = build_optimizer(config.optimizer, network)
        make_state(optimizer)
        on_gpu = config.trainer.accelerator != "cpu"  # a plan is for GPUs, unless the run is known to have none
        if on_gpu:
            _step_all_at_once(optimizer)
        tracker = PeakTracker()
        tracker.track(module, optimizer)
        norms = _NormsInFull() if on_gpu and config.trainer.precision != "32" else nullcontext()
        with tracker, norms:
            for k in range(1 + accumulates):  # all later batches need the same memory as the second
                batch = _batch(config, module.measurement)
                with autocast(config):
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
            return _sharded(footprint, config, network)
        return footprint


def _batch(config: Config, measurement: Measurement) -> Any:
    """A batch with its sinograms. A run makes them one by one. All take the same, so the plan makes one."""
    scan, n, size = measurement.projector.geometry, config.data.batch_size, config.data.image_size
    image, fine = torch.rand(n, 1, size, size), None
    if measurement.fine_matrix is not None:
        fine = torch.rand(n, 1, *2 * [size * config.data.simulation_factor])
    with torch.no_grad():
        measured = measurement.project(image[-1:], None if fine is None else fine[-1:])
    others = torch.empty(n - 1, 1, scan.n_views, scan.n_detectors)
    return batch_of(image, torch.ones(n), torch.cat([others, measured])) | {"fine": fine}


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

    `strategy` counts the full tensors that exist at once. These are the weights of the root unit and of one block (of
    all blocks, if they stay gathered). Messages that gather weights and reduce gradients are twice the largest unit.
    While accumulating, all gradients are full.
    """
    assert isinstance(config.strategy, FSDPConfig)
    n_shards = (config.trainer.devices or 1) * config.trainer.num_nodes
    blocks = [n_bytes(block.parameters()) for block in network.blocks()]
    whole = n_bytes(network.parameters())
    root = whole - sum(blocks)
    gathered = root + (max(blocks, default=0) if config.strategy.reshard_after_forward else sum(blocks))
    unreduced = whole if config.trainer.accumulate_grad_batches > 1 else 0
    return replace(
        footprint,
        parameters=footprint.parameters / n_shards,
        gradients=footprint.gradients / n_shards,
        optimizer=footprint.optimizer / n_shards,
        strategy=gathered + 2 * max([root, *blocks]) + unreduced,
    )
