"""Schema of `model`: the arguments of a network, and the rules between them."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from qnmixer.config.option import number, one_of, target
from qnmixer.config.target import Target, schema
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.config.run import Config


@dataclass(kw_only=True)
class ModelConfig(Target):
    """A `qnmixer.models.UnrolledNetwork`, built with `(projector, **its keys)`."""

    group: ClassVar[str] = "model"

    @property
    def T(self) -> int:
        """Iterations of the network."""
        return 0

    def divisors(self) -> dict[str, int]:
        """Numbers that must divide the image size, by the key that sets each."""
        return {}

    def smallest(self) -> Self:
        """The same kind of network, so small that a step takes seconds. doctor uses it."""
        return self

    def check(self, run: "Config") -> None:
        """Check that the network's patches, windows or levels divide the image size."""
        size = run.data.image_size
        for key, part in self.divisors().items():
            if size % part:
                given = f"model.{key}={getattr(self, key)}"
                needed = given if part == getattr(self, key) else f"{part}, as {given} needs"
                raise ConfigError(
                    f"data.image_size={size} is not divisible by {needed}: "
                    f"choose data.image_size={size - size % part or part} or another model.{key}"
                )


@schema("qnmixer.models.FBP")
@dataclass(kw_only=True)
class FBPConfig(ModelConfig):
    """`qnmixer.models.FBP`; its filter is geometry.fbp_filter."""


@schema("qnmixer.models.TotalVariation")
@dataclass(kw_only=True)
class TVConfig(ModelConfig):
    """`qnmixer.models.TotalVariation`."""

    n_iterations: int = number(at_least=1, at_most=100_000)
    weight: float = number(above=0)
    noise_weight: float = number(at_least=0)
    gap: float = number(at_least=0, below=1)

    @property
    def T(self) -> int:
        """The configured number of iterations."""
        return self.n_iterations


@schema()
@dataclass(kw_only=True)
class LearnedConfig(ModelConfig):
    """A network with weights. It has one iteration, unless it has a key for T."""

    channels: int = number(at_least=1, at_most=1024)

    @property
    def T(self) -> int:
        """Always one."""
        return 1

    def smallest(self) -> Self:
        """The same network with eight channels."""
        return replace(self, channels=8)


@schema("qnmixer.models.FBPConvNet")
@dataclass(kw_only=True)
class FBPConvNetConfig(LearnedConfig):
    """`qnmixer.models.FBPConvNet`."""

    channels: int = number(at_least=4, at_most=1024)
    depth: int = number(at_least=1, at_most=10)

    def divisors(self) -> dict[str, int]:
        """2 to the power of the number of levels: each level halves the image."""
        return {"depth": 2**self.depth}


@schema()
@dataclass(kw_only=True)
class UnrolledConfig(LearnedConfig):
    """A network with a chosen T. Its memory grows by the same amount for each `period` iterations."""

    period: ClassVar[int] = 1

    n_iterations: int = number(at_least=1, at_most=1000)

    @property
    def T(self) -> int:
        """The configured number of iterations."""
        return self.n_iterations


@schema("qnmixer.models.LEARN")
@dataclass(kw_only=True)
class LEARNConfig(UnrolledConfig):
    """`qnmixer.models.LEARN`."""

    data_term: str = one_of("adjoint", "fbp")


@schema("qnmixer.models.LearnedPrimalDual")
@dataclass(kw_only=True)
class LearnedPrimalDualConfig(UnrolledConfig):
    """`qnmixer.models.LearnedPrimalDual`."""

    n_primal: int = number(at_least=2, at_most=1024)
    n_dual: int = number(at_least=1, at_most=1024)


@schema("qnmixer.models.RegFormer")
@dataclass(kw_only=True)
class RegFormerConfig(UnrolledConfig):
    """`qnmixer.models.RegFormer`."""

    period: ClassVar[int] = 2  # two kinds of block alternate

    n_heads: int = number(at_least=1, at_most=1024)
    window_size: int = number(at_least=2, at_most=8192)

    @property
    def _unit(self) -> int:
        return math.lcm(2, self.n_heads)

    def divisors(self) -> dict[str, int]:
        """The window size."""
        return {"window_size": self.window_size}

    def smallest(self) -> Self:
        """The same network with the fewest channels that its heads can share."""
        return replace(self, channels=self._unit)

    def check(self, run: "Config") -> None:
        """Check the channels: half of them go to the next iteration, and the heads share them."""
        super().check(run)
        if self.channels % self._unit:
            raise ConfigError(
                f"model.channels={self.channels} is not a multiple of {self._unit}. Half of them go to the next "
                f"iteration, and model.n_heads={self.n_heads} must divide them: choose "
                f"model.channels={-(-self.channels // self._unit) * self._unit}"
            )


@schema("qnmixer.models.QNMixer")
@dataclass(kw_only=True)
class QNMixerConfig(UnrolledConfig):
    """`qnmixer.models.QNMixer`."""

    channels: int = number(at_least=4, at_most=1024)
    patch_size: int = number(at_least=1)
    n_mixer_layers: int = number(at_least=1, at_most=1000)
    mlp_ratio: float = number(above=0, at_most=100)
    inception: bool
    detail_channels: int = number(at_least=0, at_most=1024)
    detail_data_step: bool
    regularizer: str | None = target()
    codec: str = one_of("orthonormal", "strided")
    codec_kernel: int = number(at_least=1, at_most=3)
    latent_factor: int = number(at_least=1)
    latent_channels: int = number(at_least=1, at_most=4096)
    shared_regularizer: bool
    shared_step_size: bool
    data_term: str = one_of("fbp", "adjoint")
    data_steps: int = number(at_least=1, at_most=1000)
    nonnegative: bool
    hessian: str = one_of("bfgs", "identity", "momentum")
    hessian_gradient: str = one_of("full", "detach")
    learned_trust: bool

    def divisors(self) -> dict[str, int]:
        """The patch size and the latent cell size."""
        return {"patch_size": self.patch_size, "latent_factor": self.latent_factor}

    def smallest(self) -> Self:
        """The same network, smaller, with a single layer."""
        return replace(super().smallest(), n_mixer_layers=1)

    def check(self, run: "Config") -> None:
        """Check the rules of its inception, codec and regulariser."""
        super().check(run)
        factor = self.latent_factor
        if self.channels % 4:
            raise ConfigError(f"model.channels={self.channels} is not a multiple of 4: the inception has four branches")
        if self.codec == "orthonormal" and self.latent_channels > factor**2:
            raise ConfigError(
                f"model.latent_channels={self.latent_channels} is more than latent_factor² = {factor**2}, "
                "the most that an orthonormal codec can have: lower it, or raise model.latent_factor"
            )
        if self.codec == "strided" and (factor < 2 or factor & (factor - 1)):
            raise ConfigError(f"model.latent_factor={factor} does not fit model.codec=strided: choose 2, 4, 8 or 16")
        if self.codec_kernel % 2 == 0:
            raise ConfigError(f"model.codec_kernel={self.codec_kernel} has no centre: choose 1 or 3")
        if self.regularizer is not None and self.detail_channels:
            raise ConfigError("model.regularizer replaces the detail convolutions too: set model.detail_channels=0")
