"""The measurement x → A x + noise → y of a run: its scan, its noise, and the network that they are built with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qnmixer.data.batch import Batch
from qnmixer.errors import GeometryError, PluginError
from qnmixer.measurement.geometry import scan_of
from qnmixer.models.plain import PlainNetwork
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, KeyedNoise, NoNoise
from qnmixer.physics.projector import system_matrix
from qnmixer.physics.scan import ScanMatrix
from qnmixer.physics.sparse import apply_linear
from qnmixer.settings.plugins import parameters_of
from qnmixer.settings.run import Config
from qnmixer.settings.sections import GeometryConfig

# Training, validation and test draw their noise from different random streams.
STREAMS = {"train": 0, "val": 1, "test": 2}


class Measurement(nn.Module):
    """A scan and its noise: x → A x + noise → y.

    Args:
        projector: A of the grid of the images.
        noise: None: none is added.
        seed: of the noise.
        finer: builds A of the same scan for images of another size, to simulate from; None: from the scan itself.
        overfit: validation draws the noise of training, because it has the same slices.

    Attributes:
        fine_matrix: A of the finer grid, from its first use on.
    """

    def __init__(
        self,
        projector: FanBeamProjector,
        noise: KeyedNoise | None = None,
        seed: int = 42,
        *,
        finer: Callable[[int], ScanMatrix] | None = None,
        overfit: bool = False,
    ) -> None:
        super().__init__()
        self.projector, self.noise, self.seed, self.overfit = projector, noise or NoNoise(), seed, overfit
        self._finer = finer or partial(_matrix_at, projector.geometry)
        self.fine_matrix: ScanMatrix | None = None

    @torch.no_grad()
    def forward(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of a batch. A sample's noise does not depend on the batch, rank or device.

        A sinogram from the loader or from a scanner already has its noise. With fine images, y is simulated from them.
        Then no sinogram comes from the matrix that the network uses.
        """
        if "sinogram" in batch:
            return batch["sinogram"]
        return self.with_noise(self.project(batch["image"], batch.get("fine")), batch, stream)

    def with_noise(self, p: Tensor, batch: Batch, stream: str) -> Tensor:
        """Line integrals p [B, 1, V, D] with the noise of the samples of a batch."""
        if self.overfit and stream == "val":
            stream = "train"
        return self.noise(p, [(self.seed, STREAMS[stream], sample) for sample in batch["sample"].tolist()])

    def project(self, image: Tensor, fine: Tensor | None = None) -> Tensor:
        """A x [B, 1, V, D] of images [B, 1, S, S], or of the same images on the finer grid [B, 1, f·S, f·S] if given.

        Images are projected one at a time. A product with more columns rounds differently, and the last bit can change
        the photon counts that the noise draws. The finer matrix (A only) is built when it is first used, and is not
        part of checkpoints.
        """
        if fine is None:
            return torch.cat([self.projector(x) for x in image.split(1)])
        if self.fine_matrix is None:
            self.fine_matrix = self._finer(fine.shape[-1])
        matrix = self.fine_matrix.to(fine.device)
        return torch.cat([apply_linear(x, matrix, matrix.transpose) for x in fine.split(1)])


class SampleMeasurement:
    """Measures samples on the host, one by one: A x + noise → y. The workers of a loader do it ahead of time.

    A measured sinogram gets only noise that is for measured ones.

    Noise is drawn on the host. With sinograms on a GPU, the host would have to wait for each of them. The values equal
    those of `Measurement` on a CPU to the last bit.

    Args:
        noise: with the keys (seed, stream, sample).
        seed: of the noise.
        matrix: A for the images from which y is simulated; None: a scanner has measured all sinograms.
    """

    def __init__(self, noise: KeyedNoise, seed: int, matrix: ScanMatrix | None) -> None:
        self.noise, self.seed, self.matrix = noise, seed, matrix

    @torch.no_grad()
    def __call__(self, part: str, sample: Mapping[str, Any]) -> Tensor:
        """The noisy sinogram [1, V, D] of a sample of train, val or test."""
        if self.matrix is None or "sinogram" in sample:
            if not self.noise.for_measured:
                return sample["sinogram"]
            y = sample["sinogram"][None]
        else:
            y = apply_linear(sample.get("fine", sample["image"])[None], self.matrix, self.matrix.transpose)
        return self.noise(y, [(self.seed, STREAMS[part], sample["sample"])])[0]


def build_measurement(config: Config, projector: FanBeamProjector | None = None) -> Measurement:
    """Build the scan and the noise of a run."""
    return Measurement(
        projector or build_projector(config),
        build_noise(config),
        config.seed,
        finer=partial(system_matrix_at, config),
        overfit=config.debug.name == "overfit",
    )


def sample_measurement(config: Config) -> SampleMeasurement | None:
    """The measurement of a run's samples in its loaders; None if no noise is drawn on the host.

    It is also None if a scanner has measured the sinograms, unless the noise is for those too.
    """
    noise, data = build_noise(config), config.data
    if isinstance(noise, NoNoise) or (data.measured and not noise.for_measured):
        return None
    matrix = None if data.measured else system_matrix_at(config, data.image_size * data.simulation_factor)
    return SampleMeasurement(noise, config.seed, matrix)


def fine_size(config: Config) -> int:
    """The size of the images from which a device of a run simulates on a finer grid; 0 if it does not.

    With noise, the loaders simulate. Nothing does if a scanner has measured the sinograms.
    """
    data = config.data
    by_device = data.simulation_factor > 1 and not data.measured and isinstance(build_noise(config), NoNoise)
    return data.simulation_factor * data.image_size if by_device else 0


def _matrix_at(geometry: FanBeamGeometry, image_size: int) -> ScanMatrix:
    """Build A of a scan for images of another size that cover the same field."""
    pixel_size = geometry.pixel_size * geometry.image_size / image_size
    return system_matrix(replace(geometry, image_size=image_size, pixel_size=pixel_size))


def system_matrix_at(config: Config, image_size: int) -> ScanMatrix:
    """Build A of the scan for images of another size, to simulate from."""
    return system_matrix(build_geometry(config.changed(data=config.data.changed(image_size=image_size))))


def build_geometry(config: Config) -> FanBeamGeometry:
    """Build the scan. Raises GeometryError if it is impossible."""
    return geometry_of(config.geometry, config.data.image_size)


def geometry_of(section: GeometryConfig, image_size: int) -> FanBeamGeometry:
    """Build the scan of a section `geometry`, for images of this size. Raises GeometryError if it is impossible."""
    try:
        return scan_of(section.plain(), image_size)
    except GeometryError as error:  # it names its argument; on the command line the group comes first
        raise GeometryError(f"geometry.{error}") from error


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
        takes_projector = any(parameter.name == "projector" for parameter in parameters_of(model.load()) or ())
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
    noise: KeyedNoise = config.noise.build(supplied={"hu_max": config.data.hu_max})
    return noise
