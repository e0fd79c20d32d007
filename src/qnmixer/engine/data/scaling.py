"""From HU to the values of the network, and back: HU = offset + scale · x."""

from dataclasses import dataclass

import numpy as np

from qnmixer.engine.data.slices import FloatArray


@dataclass(frozen=True)
class FixedScaling:
    """x = (HU − offset) / scale, the same for every slice.

    `clip`: HU beyond x = 0 or 1 count as 0 or 1. False is for images that have a unit of their own.
    """

    offset: float
    scale: float
    clip: bool = False

    def to_unit(self, hu: FloatArray) -> tuple[FloatArray, float, float]:
        """Return x and the (offset, scale)."""
        its = np.clip(hu, self.offset, self.offset + self.scale) if self.clip else hu
        return ((its - self.offset) / self.scale).astype(np.float32, copy=False), self.offset, self.scale


class MinMaxScaling:
    """x = (HU − min) / (max − min) of each slice, as the paper does; a constant slice becomes 0."""

    def to_unit(self, hu: FloatArray) -> tuple[FloatArray, float, float]:
        """Return x in [0, 1] and this slice's (offset, scale)."""
        low, high = float(hu.min()), float(hu.max())
        scale = high - low or 1.0
        return ((hu - low) / scale).astype(np.float32, copy=False), low, scale


Scaling = FixedScaling | MinMaxScaling


def build_scaling(name: str, hu_max: float) -> Scaling:
    """The scaling of `data.scaling`. With "attenuation" air is x = 0 and hu_max is x = 1."""
    return MinMaxScaling() if name == "minmax" else FixedScaling(-1000.0, hu_max + 1000.0, clip=True)


def scaled_like(hu: FloatArray, offset: float, scale: float) -> FloatArray:
    """x in [0, 1] of a slice at another resolution, by the (offset, scale) that `to_unit` gave for the slice."""
    return np.clip((hu - np.float32(offset)) / np.float32(scale), 0, 1)
