"""What `model` may say: the arguments of a network, and the rules between them."""

import math
from dataclasses import dataclass
from typing import ClassVar

from qnmixer.config.custom import Custom
from qnmixer.config.option import number, one_of
from qnmixer.errors import ConfigError


@dataclass(kw_only=True)
class ModelConfig:
    """Arguments of a network of `qnmixer.models`."""

    name: str

    @property
    def T(self) -> int:
        """Iterations of the network."""
        return 0

    def divisors(self) -> dict[str, int]:
        """What the image's size must be a multiple of, by the key that says so."""
        return {}


@dataclass(kw_only=True)
class FBPConfig(ModelConfig):
    """`qnmixer.models.FBP`; its filter is geometry.fbp_filter."""


@dataclass(kw_only=True)
class TVConfig(ModelConfig):
    """`qnmixer.models.TotalVariation`."""

    n_iterations: int = number(at_least=1)
    weight: float = number(above=0)

    @property
    def T(self) -> int:
        """As configured."""
        return self.n_iterations


@dataclass(kw_only=True)
class LearnedConfig(ModelConfig):
    """A network with weights."""

    channels: int = number(at_least=1)


@dataclass(kw_only=True)
class FBPConvNetConfig(LearnedConfig):
    """`qnmixer.models.FBPConvNet`."""

    channels: int = number(at_least=4)
    depth: int = number(at_least=1)

    @property
    def T(self) -> int:
        """One, always."""
        return 1

    def divisors(self) -> dict[str, int]:
        """It is halved at each level down."""
        return {"depth": 2**self.depth}


@dataclass(kw_only=True)
class UnrolledConfig(LearnedConfig):
    """A network whose T can be chosen; memory grows evenly by `period` iterations at a time."""

    period: ClassVar[int] = 1

    n_iterations: int = number(at_least=1)

    @property
    def T(self) -> int:
        """As configured."""
        return self.n_iterations


@dataclass(kw_only=True)
class CustomConfig(UnrolledConfig, Custom):
    """A user's own `qnmixer.models.UnrolledNetwork`, built with `(projector, n_iterations, channels, **arguments)`."""


@dataclass(kw_only=True)
class LEARNConfig(UnrolledConfig):
    """`qnmixer.models.LEARN`."""

    data_term: str = one_of("adjoint", "fbp")


@dataclass(kw_only=True)
class LearnedPrimalDualConfig(UnrolledConfig):
    """`qnmixer.models.LearnedPrimalDual`."""

    n_primal: int = number(at_least=2)
    n_dual: int = number(at_least=1)


@dataclass(kw_only=True)
class RegFormerConfig(UnrolledConfig):
    """`qnmixer.models.RegFormer`."""

    period: ClassVar[int] = 2  # two kinds of block, by turns

    n_heads: int = number(at_least=1)
    window_size: int = number(at_least=2)

    def divisors(self) -> dict[str, int]:
        """It is cut into windows."""
        return {"window_size": self.window_size}


@dataclass(kw_only=True)
class QNMixerConfig(UnrolledConfig):
    """`qnmixer.models.QNMixer`."""

    channels: int = number(at_least=4)
    patch_size: int = number(at_least=1)
    n_mixer_layers: int = number(at_least=1)
    mlp_ratio: float = number(above=0)
    inception: bool
    detail_channels: int = number(at_least=0)
    regularizer: str | None  # module.Class of a user's own
    codec: str = one_of("orthonormal", "strided")
    codec_kernel: int = number(at_least=1, at_most=3)
    latent_factor: int = number(at_least=1)
    latent_channels: int = number(at_least=1)
    shared_regularizer: bool
    shared_step_size: bool
    data_term: str = one_of("fbp", "adjoint")
    data_steps: int = number(at_least=1)
    nonnegative: bool
    hessian: str = one_of("bfgs", "identity", "momentum")
    hessian_gradient: str = one_of("full", "detach")
    learned_trust: bool

    def divisors(self) -> dict[str, int]:
        """It is cut into patches and into latent cells."""
        return {"patch_size": self.patch_size, "latent_factor": self.latent_factor}


def check_model(model: ModelConfig, size: int) -> None:
    """The rules between the keys of a network and the image's size. Raises ConfigError."""
    for key, part in model.divisors().items():
        if size % part:
            given = f"model.{key}={getattr(model, key)}"
            needed = given if part == getattr(model, key) else f"{part}, as {given} needs"
            raise ConfigError(
                f"data.image_size={size} is not divisible by {needed}: "
                f"choose data.image_size={size - size % part or part} or another model.{key}"
            )
    if isinstance(model, QNMixerConfig):
        _check_qn_mixer(model)
    if isinstance(model, RegFormerConfig) and (model.channels % 2 or model.channels % model.n_heads):
        unit = math.lcm(2, model.n_heads)
        raise ConfigError(
            f"model.channels={model.channels} is not a multiple of {unit}: half of them are handed on, and "
            f"model.n_heads={model.n_heads} share them; choose model.channels={-(-model.channels // unit) * unit}"
        )


def _check_qn_mixer(model: QNMixerConfig) -> None:
    if model.channels % 4:
        raise ConfigError(f"model.channels={model.channels} is not a multiple of 4: the inception has four branches")
    if model.codec == "orthonormal" and model.latent_channels > model.latent_factor**2:
        raise ConfigError(
            f"model.latent_channels={model.latent_channels} is more than latent_factor² = {model.latent_factor**2}: "
            "an orthonormal codec cannot have more; lower it or raise model.latent_factor"
        )
    if model.codec_kernel % 2 == 0:
        raise ConfigError(f"model.codec_kernel={model.codec_kernel} has no middle: choose 1 or 3")
    if model.regularizer is not None and model.detail_channels:
        raise ConfigError("model.regularizer takes the place of the details too: set model.detail_channels=0")
