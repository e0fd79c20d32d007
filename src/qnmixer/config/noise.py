"""What `noise` may say: the noise of a measurement."""

from dataclasses import dataclass

from qnmixer.config.custom import Custom
from qnmixer.config.option import number
from qnmixer.errors import ConfigError


@dataclass(kw_only=True)
class NoNoiseConfig:
    """Noise-free sinograms."""

    name: str


@dataclass(kw_only=True)
class FieldNoiseConfig:
    """The mild, scale-free noise of the field's papers."""

    name: str
    photons: float = number(above=0, at_most=1e15)
    sigma: float = number(at_least=0)


@dataclass(kw_only=True)
class PhysicalNoiseConfig:
    """Counts behind a body of real attenuation."""

    name: str
    photons: float = number(above=0, at_most=1e15)
    water_attenuation: float = number(above=0)  # 1/mm
    electronic_sigma: float = number(at_least=0)  # counts


@dataclass(kw_only=True)
class MixedNoiseConfig(PhysicalNoiseConfig):
    """The field's noise for some samples, counts for the rest."""

    physical_share: float = number(at_least=0, at_most=1)
    field_photons: float = number(above=0, at_most=1e15)
    field_sigma: float = number(at_least=0)


@dataclass(kw_only=True)
class CustomNoiseConfig(Custom):
    """A user's own `qnmixer.physics.KeyedNoise`, built with `(**arguments)`."""

    name: str


NoiseConfig = NoNoiseConfig | FieldNoiseConfig | PhysicalNoiseConfig | CustomNoiseConfig


def check_noise(noise: NoiseConfig, scaling: str) -> None:
    """Raise ConfigError unless this noise has a meaning for slices scaled so."""
    if scaling == "minmax" and isinstance(noise, PhysicalNoiseConfig):
        raise ConfigError(
            f"noise={noise.name} needs an attenuation scale that slices share: use data.scaling=attenuation, or "
            "noise=field"
        )
