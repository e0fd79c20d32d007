"""The measurement of a run, and the network that knows it, from its config."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qnmixer.data.dataset import Sample
from qnmixer.errors import PluginError
from qnmixer.measurement.measurement import STREAMS, Measurement, matrix_at, scan_of
from qnmixer.models.plain import PlainNetwork
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, KeyedNoise, NoNoise
from qnmixer.physics.scan import ScanMatrix
from qnmixer.physics.sparse import apply_linear
from qnmixer.settings.plugins import parameters_of
from qnmixer.settings.run import Config
from qnmixer.settings.sections import GeometryConfig


def build_measurement(config: Config, projector: FanBeamProjector | None = None) -> Measurement:
    """Build the scan and the noise of a run."""
    return Measurement(
        projector or build_projector(config),
        build_noise(config),
        config.seed,
        overfit=config.debug.name == "overfit",
    )


def training_scans(config: Config) -> list[Config]:
    """The config at each scan that a training step may draw: each number of views over each arc; [] without any."""
    if not config.data.n_scans:
        return []
    geometry, one_scan = config.geometry, config.data.changed(views=[], arcs=[])
    spans = [math.copysign(math.radians(arc), geometry.angle_span) for arc in config.data.arcs]
    scans = product(config.data.views or [geometry.n_views], spans or [geometry.angle_span])
    sections = [geometry.changed(n_views=n_views, angle_span=span) for n_views, span in scans]
    return [config.changed(data=one_scan, geometry=section) for section in sections]


def add_training_scans(measurement: Measurement, config: Config) -> None:
    """Add the scans of training steps to the measurement of a run.

    A† of each is scaled to the largest eigenvalue of A†A that the scan of the run has. A step size λ_t is then as near
    to its bound in all scans, as `follow_scan` has it for a trained network.
    """
    scans = [build_measurement(scan) for scan in training_scans(config)]
    for scan in scans:
        scan.projector.scale_filtered_adjoint(measurement.projector.safe_step_size())
    if scans:
        of_run = build_measurement(config, copy.copy(measurement.projector))
        measurement.scans.extend([*scans, of_run])


def measure_of(config: Config) -> Callable[[str, Sample], Tensor] | None:
    """`measure` of a run's `SliceDataModule`: the workers of its loaders make noisy sinograms ahead of time.

    Noise is drawn on the host. With sinograms on a GPU, the host would have to wait for each of them. The values equal
    those of `Measurement` on a CPU to the last bit. None: there is no noise, or none for sinograms of a scanner.
    """
    noise, data = build_noise(config), config.data
    if isinstance(noise, NoNoise) or (data.measured and not noise.for_measured):
        return None
    size, scans = data.image_size * data.simulation_factor, [*training_scans(config), config]
    matrices = [] if data.measured else [matrix_at(build_geometry(scan), size) for scan in scans]
    return partial(_sinogram, noise, config.seed, matrices)


@torch.no_grad()
def _sinogram(noise: KeyedNoise, seed: int, matrices: Sequence[ScanMatrix], part: str, sample: Sample) -> Tensor:
    """The sinogram of a sample, [1, V, D]. A measured one gets only noise that is for measured ones.

    `matrices`: A of each scan that a training step may draw, and at last that of the run.
    """
    if matrices and "sinogram" not in sample:
        matrix = matrices[sample.get("scan", -1)]
        y = apply_linear(sample.get("fine", sample["image"])[None], matrix, matrix.transpose)
    elif noise.for_measured:
        y = sample["sinogram"][None]
    else:
        return sample["sinogram"]
    return noise(y, [(seed, STREAMS[part], sample["sample"])])[0]


def fine_size(config: Config) -> int:
    """The size of the images from which a device of a run simulates on a finer grid; 0 if it does not.

    With noise, the loaders simulate. Nothing does if a scanner has measured the sinograms.
    """
    data = config.data
    by_device = data.simulation_factor > 1 and not data.measured and isinstance(build_noise(config), NoNoise)
    return data.simulation_factor * data.image_size if by_device else 0


def build_geometry(config: Config) -> FanBeamGeometry:
    """Build the scan. Raises GeometryError if it is impossible."""
    return geometry_of(config.geometry, config.data.image_size)


def geometry_of(section: GeometryConfig, image_size: int) -> FanBeamGeometry:
    """Build the scan of a section `geometry`, for images of this size. Raises GeometryError if it is impossible."""
    return scan_of(section.plain(), image_size)


def build_projector(config: Config) -> FanBeamProjector:
    """Build A, Aᵀ and FBP of the scan."""
    return FanBeamProjector(build_geometry(config), fbp_filter=config.geometry.fbp_filter)


def build_network(config: Config, projector: FanBeamProjector) -> UnrolledNetwork[Any]:
    """Build the network that `model` names. Raises PluginError for one that does not fit.

    A plain torch module becomes a `PlainNetwork`. A network with an argument `variance` gets a function from a sinogram
    to the noise variance of each ray.
    """
    model = config.model
    variance = partial(_variance, config)
    network: UnrolledNetwork[Any]
    if model.has_steps:
        network = model.build(projector, supplied={"variance": variance})
    else:
        module = model.build(supplied={"variance": variance, "projector": projector})
        takes_projector = any(parameter.name == "projector" for parameter in parameters_of(model.load()))
        network = PlainNetwork(projector, module, of_sinogram=takes_projector)
    require_shapes(network, model.as_typed)
    if model.has_weights and not any(p.requires_grad for p in network.parameters()):
        raise PluginError(f"model._target_={model.target} has no weights to train: give it an nn.Parameter")
    return network


def require_shapes(module: nn.Module, name: str) -> None:
    """Raise PluginError for lazy modules, whose weights have no shape before a first batch."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    if lazy := next((place for place, tensor in tensors if is_lazy(tensor)), None):
        raise PluginError(f"{name} has {lazy} without a shape: give its sizes, and take no lazy module")


def _variance(config: Config, y: Tensor) -> Tensor:
    """The noise variance of each ray under the current noise of the config. An evaluation may change the noise."""
    return build_noise(config).variance(y)


def build_noise(config: Config) -> KeyedNoise:
    """Build the measurement noise that `noise` names. Raises PluginError for one that does not fit."""
    return config.noise.build(supplied={"hu_max": config.data.hu_max})
