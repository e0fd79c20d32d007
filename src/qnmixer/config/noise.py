"""Schema of `noise`: the noise of a measurement."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qnmixer.config.option import number
from qnmixer.config.target import Target, schema
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.config.run import Config


@schema()
@dataclass(kw_only=True)
class NoiseConfig(Target):
    """A `qnmixer.physics.KeyedNoise`, built with `(**arguments)`."""

    group: ClassVar[str] = "noise"


@schema("qnmixer.physics.FieldNoise")
@dataclass(kw_only=True)
class FieldNoiseConfig(NoiseConfig):
    """The mild, scale-free noise of the field's papers."""

    photons: float = number(above=0, at_most=1e15)
    sigma: float = number(at_least=0)


@schema("qnmixer.physics.PhysicalNoise")
@dataclass(kw_only=True)
class PhysicalNoiseConfig(NoiseConfig):
    """Photon counts behind a body with real attenuation."""

    photons: float = number(above=0, at_most=1e15)
    water_attenuation: float = number(above=0)  # 1/mm
    electronic_sigma: float = number(at_least=0)  # counts
    fewest_counts: float = number(above=0, default=1.0)  # of a bin without any

    def check(self, run: "Config") -> None:
        """Check the scaling: photon counts make sense only if all slices have the same scale."""
        if run.data.scaling == "minmax":
            raise ConfigError(
                f"noise={self.name} needs the same attenuation scale in all slices: use data.scaling=attenuation, or "
                "noise=field"
            )


@schema("qnmixer.physics.MixedNoise")
@dataclass(kw_only=True)
class MixedNoiseConfig(PhysicalNoiseConfig):
    """The field's noise for a share of the samples, photon counts for the others."""

    physical_share: float = number(at_least=0, at_most=1)
    field_photons: float = number(above=0, at_most=1e15)
    field_sigma: float = number(at_least=0)
