"""A network with its scan and its noise, from a checked config: the one place that knows which class a name stands for.

Plain torch: training, evaluation, inference and the plan are built on it.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from qnmixer.config import (
    Config,
    CustomConfig,
    CustomNoiseConfig,
    FieldNoiseConfig,
    MixedNoiseConfig,
    NoNoiseConfig,
    PhysicalNoiseConfig,
    QNMixerConfig,
)
from qnmixer.errors import ConfigError, GeometryError, PluginError
from qnmixer.models import (
    FBP,
    LEARN,
    FBPConvNet,
    LearnedPrimalDual,
    QNMixer,
    RegFormer,
    TotalVariation,
    UnrolledNetwork,
)
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.physics.noise import FieldNoise, KeyedNoise, MixedNoise, Noise, NoNoise, PhysicalNoise
from qnmixer.physics.rays import system_matrix
from qnmixer.physics.scan import ScanMatrix
from qnmixer.physics.sparse import apply_linear
from qnmixer.plugins import load_plugin, make_plugin, subclass_of

NETWORKS: dict[str, Any] = {
    "qn_mixer": QNMixer,
    "fbp": FBP,
    "tv": TotalVariation,
    "fbpconvnet": FBPConvNet,
    "learn": LEARN,
    "learned_primal_dual": LearnedPrimalDual,
    "regformer": RegFormer,
}
"""By `model.name`; each takes the projector, and the other keys of its config."""

AUTOCAST = {"32": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

# Training, validation and test draw their noise from streams of their own.
STREAMS = {"train": 0, "val": 1, "test": 2}

_NETWORK = subclass_of(UnrolledNetwork, "qnmixer.models.UnrolledNetwork")
_MODULE = subclass_of(nn.Module, "torch.nn.Module")
_NOISE = subclass_of(KeyedNoise, "qnmixer.physics.KeyedNoise", but=" with a method sample(p, rng)")


class Batch(TypedDict):
    """Collated samples of `SliceDataset`; HU = hu_offset + hu_scale · image."""

    image: Tensor  # [B, 1, S, S]
    fine: NotRequired[Tensor]  # [B, 1, f·S, f·S], to simulate from; with data.simulation_factor = f above 1
    hu_offset: Tensor  # [B]
    hu_scale: Tensor  # [B]
    sample: Tensor  # [B], int64: epoch · length + index; on the host in training and evaluation
    weight: Tensor  # [B], what each counts for; 0 for one that only fills the batch
    name: list[str]


class Reconstructor(nn.Module):
    """A network with its scan and its noise, as a config says: x → A x + noise → y → x_T."""

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        super().__init__()
        self.config = config
        self.projector = projector or build_projector(config)
        self.network = build_network(config, self.projector)
        self.noise = build_noise(config)
        self._fine_matrix: ScanMatrix | None = None

    @property
    def device(self) -> torch.device:
        """Where the scan's matrices are, and so all that is computed with them."""
        return next(self.projector.buffers()).device

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from y [B, 1, V, D]."""
        return self.network(y)

    @torch.no_grad()
    def measure(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of a batch; the same for a sample whatever the batch, rank or device.

        It is that of the fine images where there are any, so that no sinogram comes from the network's own matrix.
        """
        if self.config.debug.name == "overfit" and stream == "val":
            stream = "train"  # the same slices are to be the same measurements
        keys = [(self.config.seed, STREAMS[stream], sample) for sample in batch["sample"].tolist()]
        return self.noise(self.project(batch["image"], batch.get("fine")), keys)

    def project(self, image: Tensor, fine: Tensor | None = None) -> Tensor:
        """A x [B, 1, V, D] of images [B, 1, S, S], or rather, where there are any, of the same finer [B, 1, f·S, f·S].

        One by one, as a product of more columns rounds otherwise, and the last bit can decide which photon counts noise
        draws. The finer matrix, A alone, is built when the first are seen; it is no part of checkpoints.
        """
        if fine is None:
            return torch.cat([self.projector(x) for x in image.split(1)])
        if self._fine_matrix is None:
            data = replace(self.config.data, image_size=fine.shape[-1])
            self._fine_matrix = system_matrix(build_geometry(replace(self.config, data=data)))
        matrix = self._fine_matrix.to(fine.device)
        return torch.cat([apply_linear(x, matrix, matrix.transpose) for x in fine.split(1)])


def to_hu(batch: Batch, image: Tensor) -> Tensor:
    """HU of images [B, 1, H, W] by the scaling of their slices."""
    return batch["hu_offset"][:, None, None, None] + batch["hu_scale"][:, None, None, None] * image


def build_geometry(config: Config) -> FanBeamGeometry:
    """The scan; raises GeometryError where it is impossible."""
    g = config.geometry
    half_step = 0.5 * g.angle_span / g.n_views
    try:
        return FanBeamGeometry(
            image_size=config.data.image_size,
            pixel_size=g.field_of_view / config.data.image_size,
            n_views=g.n_views,
            n_detectors=g.n_detectors,
            detector_pitch=g.detector_pitch,
            source_to_axis=g.source_to_axis,
            axis_to_detector=g.axis_to_detector,
            first_angle=half_step if g.first_angle is None else g.first_angle,
            angle_span=g.angle_span,
        )
    except GeometryError as error:  # it names its argument; the key on the command line has the group too
        raise GeometryError(f"geometry.{error}") from error


def build_projector(config: Config) -> FanBeamProjector:
    """A, Aᵀ and FBP of the scan."""
    return FanBeamProjector(build_geometry(config), fbp_filter=config.geometry.fbp_filter)


def build_network(config: Config, projector: FanBeamProjector) -> UnrolledNetwork[Any]:
    """The network that `model` names. Raises ConfigError for one of the user's own that does not fit."""
    model = config.model
    if isinstance(model, CustomConfig):
        return _custom_network(projector, model)
    arguments = {key: value for key, value in vars(model).items() if key != "name"}
    if isinstance(model, QNMixerConfig) and (target := arguments.pop("regularizer")):
        arguments["make_regularizer"] = partial(
            make_plugin, "model.regularizer", target, _MODULE, projector.geometry.image_size, model.channels
        )
    return NETWORKS[model.name](projector, **arguments)


def _custom_network(projector: FanBeamProjector, model: CustomConfig) -> UnrolledNetwork[Any]:
    network: UnrolledNetwork[Any] = make_plugin(
        "model._target_",
        model._target_,
        _NETWORK,
        projector,
        n_iterations=model.n_iterations,
        channels=model.channels,
        arguments=model.arguments,
    )
    if not any(p.requires_grad for p in network.parameters()):
        raise PluginError(f"model._target_={model._target_} has no weights to train: give it some")
    return network


def method_name(config: Config) -> str:
    """What tables and pictures call the network that `model` names."""
    if isinstance(config.model, CustomConfig):
        return load_plugin("model._target_", config.model._target_, _NETWORK).title
    return NETWORKS[config.model.name].title


def build_noise(config: Config) -> Noise:
    """The measurement noise that `noise` names. Raises ConfigError for one of the user's own that does not fit."""
    noise = config.noise
    if isinstance(noise, FieldNoiseConfig):
        return FieldNoise(noise.photons, noise.sigma)
    if isinstance(noise, PhysicalNoiseConfig):
        physical = PhysicalNoise(
            photons=noise.photons,
            attenuation_per_value=attenuation_per_value(config, noise.water_attenuation),
            electronic_sigma=noise.electronic_sigma,
        )
        if isinstance(noise, MixedNoiseConfig):
            return MixedNoise(FieldNoise(noise.field_photons, noise.field_sigma), physical, noise.physical_share)
        return physical
    if isinstance(noise, CustomNoiseConfig):
        return make_plugin("noise._target_", noise._target_, _NOISE, arguments=noise.arguments)
    if isinstance(noise, NoNoiseConfig):
        return NoNoise()
    raise ConfigError(f"noise={noise.name} has a schema, but nothing here builds it")


def attenuation_per_value(config: Config, water_attenuation: float) -> float:
    """Linear attenuation (1/mm) of x = 1: x = (HU + 1000)/(hu_max + 1000) and μ = μ_water (HU + 1000)/1000."""
    return water_attenuation * (config.data.hu_max + 1000.0) / 1000.0
