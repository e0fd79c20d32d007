"""The memory of a training step on each device, computed without the devices and without that memory.

The step itself runs on tensors that have shapes but no data. Only the operator is real. A step of T = 14 takes a second
of a CPU. Of a pipeline each stage runs by itself, times the micro-batches that its device has in flight. A run that
is out of memory plans too: its last line names changes that would fit.
"""

import copy
import math
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from qnmixer.errors import ConfigError, UserError, first_line
from qnmixer.measurement.build import build_geometry, build_measurement, fine_size, training_scans
from qnmixer.measurement.measurement import matrix_at
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.module.base import RunModule
from qnmixer.module.build import build_module, check_module
from qnmixer.module.parts import build_optimizer
from qnmixer.parallel.device_memory import MIB, DevicePlan, Footprint
from qnmixer.parallel.parallelism import parallelism_of
from qnmixer.parallel.shapes import values_refused, without_data
from qnmixer.parallel.tracker import HOST, batch_of, make_state
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.scan import ScanMatrix
from qnmixer.settings.override import override
from qnmixer.settings.parts import ModelConfig
from qnmixer.settings.run import Config, validate

ASSUMED_DEVICES = 4
"""The assumed number of devices, if the config leaves it to the machine."""


class _Unmeasured(FanBeamProjector):
    """The projector of a scan without the eigenvalues of A†A: they take seconds, and no number of bytes needs them."""

    def _largest_eigenvalue(self, *_: Any) -> float:
        return 1.0


class Planner:
    """Predicts the footprint of configs with the same scan. It stores the results of its runs.

    Raises ConfigError for a config that leaves the number of devices open and cannot run on `ASSUMED_DEVICES`, and for
    one whose step does not run without data: a shape or a branch that depends on the values of a tensor, or NumPy.
    """

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        scans = [config, *training_scans(config)]
        largest = max(scans, key=lambda scan: scan.geometry.n_views)
        self.geometry = largest.geometry
        """That of the step which needs most, if training steps have several scans."""
        self._others = [build_measurement(scan) for scan in scans if scan is not largest]
        geometry = build_geometry(largest)
        if projector is None or projector.geometry != geometry:
            projector = _Unmeasured(geometry, fbp_filter=largest.geometry.fbp_filter)
        self.projector = projector
        self.projector.safe_step_size()  # networks ask for these numbers, which tensors without data could not give
        self.projector.operator_norm()
        self._fine: dict[int, list[ScanMatrix]] = {}  # by the size of the image
        self._plans: dict[str, tuple[DevicePlan, ...]] = {}

    def estimate(self, config: Config) -> Footprint:
        """The footprint of a run on its fullest device."""
        return max((device.footprint for device in self.devices(config)), key=lambda footprint: footprint.peak)

    def growth(self, config: Config) -> float | None:
        """Bytes that each further iteration adds; None for a pipeline, and for a network that cannot have more."""
        T = config.model.T
        if len(self.devices(config)) > 1 or T < 2 or not config.model.is_unrolled:
            return None
        n_added = 2  # an even number: two kinds of block may alternate
        with suppress(ConfigError):
            longer = config.changed(model=config.model.changed(n_iterations=T + n_added))
            return (self.estimate(longer).peak - self.estimate(config).peak) / n_added
        return None

    def devices(self, config: Config) -> tuple[DevicePlan, ...]:
        """The plan of each device that works on one batch, first stage first. Only a pipeline has several."""
        asked = config = with_assumed_devices(config)
        config = config.changed(geometry=self.geometry, data=config.data.changed(views=[], arcs=[]))
        if (key := repr(config)) not in self._plans:
            fine_matrices = self._fine_matrices(config)
            try:
                self._plans[key] = self._planned(asked, config, fine_matrices)
            except UserError:
                raise
            except Exception as error:  # a user's code without data can raise anything
                raise _not_planned(f"without data it raises {type(error).__name__}, {first_line(error)}") from error
        return self._plans[key]

    def _planned(self, asked: Config, config: Config, fine_matrices: list[ScanMatrix]) -> tuple[DevicePlan, ...]:
        with without_data():
            module = build_module(config, copy.copy(self.projector))  # a step may leave it at a part of the scan
            check_module(module, asked)
            if not module.automatic_optimization:
                raise _not_planned(f"{type(module).__name__} optimizes by itself (automatic_optimization=False)")
            if self._others:  # the devices have the matrices of all scans
                of_largest = build_measurement(config, copy.copy(self.projector))
                module.measurement.scans.extend([*self._others, of_largest])
            for measurement, matrix in zip([module.measurement, *self._others], fine_matrices, strict=False):
                measurement.fine_matrix = matrix
            apply_memory_mode(module.network, config.memory, HOST.type)
            for name in ("forward", "start", "step", "image"):  # not all of the training step, which may log values
                setattr(module.network, name, values_refused()(getattr(module.network, name)))
            optimizer = build_optimizer(config.optimizer, module.network)
            make_state(optimizer)
            return parallelism_of(config).plan(module, optimizer, partial(_measured_batch, module))

    def _fine_matrices(self, config: Config) -> list[ScanMatrix]:
        """A of the finer grid for each scan, if the devices simulate on it. It takes as long to build as in the run."""
        size = fine_size(config)
        if size and size not in self._fine:
            projectors = [self.projector, *(measurement.projector for measurement in self._others)]
            self._fine[size] = [matrix_at(projector.geometry, size) for projector in projectors]
        return self._fine.get(size, [])


def _not_planned(why: str) -> ConfigError:
    """The error for a step that does not run without data."""
    return ConfigError(f"a step of this run cannot be planned: {why}. A run prints its memory: trainer.max_steps=3")


def with_assumed_devices(config: Config) -> Config:
    """The config with `ASSUMED_DEVICES` if a strategy leaves their number to the machine.

    Raises ConfigError for a config that cannot run on these.
    """
    if not config.strategy.is_parallel or config.trainer.per_node is not None:
        return config
    config = config.changed(trainer=config.trainer.changed(devices=ASSUMED_DEVICES))
    validate(config)
    return config


def _measured_batch(module: RunModule, n: int) -> Any:
    """A batch of n with its sinograms. A run makes them one by one. All take the same, so the plan makes one.

    Measured ones may have no images.
    """
    measurement, size = module.measurement, module.config.data.image_size
    scan, image, fine_image = measurement.projector.geometry, torch.rand(n, 1, size, size), {}
    if measurement.fine_matrix is not None:
        fine_image = {"fine": torch.rand(n, 1, *2 * [fine_size(module.config)])}
    with torch.no_grad():
        sinogram = measurement.project(image[-1:], *(images[-1:] for images in fine_image.values()))
    other_sinograms = torch.empty(n - 1, 1, scan.n_views, scan.n_detectors)
    batch = batch_of(image, torch.ones(n), torch.cat([other_sinograms, sinogram])) | fine_image
    return batch if module.config.data.has_truth else {key: batch[key] for key in batch if key != "image"}


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
        config.strategy.one_in_flight if (config.trainer.per_node or 1) > 1 else "",
        fewer_iterations,
        fewer_channels,
        f"{recompute} {half_precision} {batch_of_one} {fewer_channels}",
    ]
    overrides = dict.fromkeys(change for change in (" ".join(c.split()) for c in candidates) if change)
    return [change for change in overrides if changed_to(config, change) not in (None, config)]


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
