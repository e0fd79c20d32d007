"""From HU to the values of the network, and back: HU = offset + scale · x."""

from typing import Protocol

import numpy as np

from qnmixer.engine.data.slices import FloatArray
from qnmixer.errors import ConfigError


class Scaling(Protocol):
    """Maps a slice in HU to [0, 1]."""

    def to_unit(self, hu: FloatArray) -> tuple[FloatArray, float, float]:
        """Return x in [0, 1] and the (offset, scale) of HU = offset + scale · x."""
        ...


class AttenuationScaling:
    """x = (clip(HU, −1000, hu_max) + 1000) / (hu_max + 1000): attenuation relative to that of hu_max, air being 0."""

    def __init__(self, hu_max: float = 2000.0) -> None:
        if not hu_max > -1000:
            raise ConfigError(f"data.hu_max={hu_max:g} is not above air (−1000 HU): 2000 suits most scans")
        self.hu_max = float(hu_max)

    def to_unit(self, hu: FloatArray) -> tuple[FloatArray, float, float]:
        """Return x in [0, 1] and the (offset, scale) of HU = offset + scale · x, the same for every slice."""
        scale = self.hu_max + 1000.0
        x = (np.clip(hu, -1000.0, self.hu_max) + 1000.0) / scale
        return x.astype(np.float32, copy=False), -1000.0, scale


class MinMaxScaling:
    """x = (HU − min) / (max − min) of each slice, as the paper does; a constant slice becomes 0."""

    def to_unit(self, hu: FloatArray) -> tuple[FloatArray, float, float]:
        """Return x in [0, 1] and this slice's (offset, scale) of HU = offset + scale · x."""
        low, high = float(hu.min()), float(hu.max())
        scale = high - low or 1.0
        return ((hu - low) / scale).astype(np.float32, copy=False), low, scale


class OwnScaling:
    """x = (HU − offset) / scale, without clipping, for images that have a unit of their own."""

    def __init__(self, offset: float, scale: float) -> None:
        self.offset, self.scale = offset, scale

    def to_unit(self, hu: FloatArray) -> tuple[FloatArray, float, float]:
        """Return x and the (offset, scale) of HU = offset + scale · x, the same for every slice."""
        return ((hu - self.offset) / self.scale).astype(np.float32, copy=False), self.offset, self.scale


def scaled_like(hu: FloatArray, offset: float, scale: float) -> FloatArray:
    """x in [0, 1] of a slice at another resolution, by the (offset, scale) that `to_unit` gave for the slice."""
    return np.clip((hu - np.float32(offset)) / np.float32(scale), 0, 1)


def build_scaling(name: str, hu_max: float) -> Scaling:
    """Scaling by its name in the configuration."""
    if name == "attenuation":
        return AttenuationScaling(hu_max)
    if name == "minmax":
        return MinMaxScaling()
    raise ConfigError(f"data.scaling={name} is not known: choose attenuation or minmax")
