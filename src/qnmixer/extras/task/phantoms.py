"""Phantoms with known inserts: a body of soft tissue, with discs of low contrast in it, or discs with edges to measure.

Lengths are in mm from the middle of the image, x to the right and y down. They grow with the field of view.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qnmixer.physics import FanBeamGeometry

BODY_HU = 40.0
_AIR_HU = -1000.0
_N_PLACES = 8
_BODY, _RING, _EDGE_RING, _EDGE_RADIUS, _REGION = 0.31, 0.19, 0.16, 0.05, 0.125
"""Parts of the field of view: half axes of the body, the circles of places and of edges, an edge's radius, a region."""
_LARGER, _MOVED = 0.05, 0.01
"""How far half axes differ from those, as a part of them, and how far a body is moved, as a part of the field."""


@dataclass(frozen=True)
class Disc:
    """A disc of another HU than the body around it."""

    x: float
    y: float
    radius: float
    contrast: float  # HU


class TaskPhantom:
    """What is known of the phantoms of a scan. Each is drawn anew, because artefacts of one body are no noise.

    Args:
        geometry: the scan, with the grid of the images.

    Attributes:
        field: of view in mm.
        region: side of a square region in pixels, even.
        places: middles of the regions (x, y), on corners of pixels. A quarter turn or a mirror maps each onto another.
    """

    def __init__(self, geometry: FanBeamGeometry) -> None:
        self.pixel_size, self.size = geometry.pixel_size, geometry.image_size
        self.field = self.size * self.pixel_size
        self.region = 2 * max(round(_REGION * self.size / 2), 4)
        angles = (2 * math.pi * (k + 0.5) / _N_PLACES for k in range(_N_PLACES))
        ring = _RING * self.size
        self.places = [(self._corner(ring * math.cos(angle)), self._corner(ring * math.sin(angle))) for angle in angles]

    def _corner(self, pixels: float) -> float:
        """The nearest corner of pixels: an odd number of them has its middle in a pixel."""
        shift = self.size % 2 / 2
        return (round(pixels - shift) + shift) * self.pixel_size

    def inserts(self, diameter: float, contrast: float) -> list[Disc]:
        """The same insert at every place."""
        return [Disc(x, y, diameter / 2, contrast) for x, y in self.places]

    def edges(self, contrasts: Sequence[float], rng: np.random.Generator) -> list[Disc]:
        """A large disc of each contrast. They are turned by a random angle, so that all edges meet the grid anew."""
        angles = (rng.uniform(0, 2 * math.pi) + 2 * math.pi * np.arange(len(contrasts)) / len(contrasts)).tolist()
        ring, radius = _EDGE_RING * self.field, _EDGE_RADIUS * self.field
        return [
            Disc(ring * math.cos(angle), ring * math.sin(angle), radius, contrast)
            for angle, contrast in zip(angles, contrasts, strict=True)
        ]

    def draw(self, size: int, discs: Sequence[Disc], rng: np.random.Generator) -> Tensor:
        """HU [size, size], float32, of a random body with discs. At edges a pixel has about its mean value."""
        pixel = self.field / size
        axis = (np.arange(size) - (size - 1) / 2) * pixel
        x, y = axis, axis[:, None]
        half_axes = _BODY * self.field * rng.uniform(1 - _LARGER, 1 + _LARGER, 2)
        middle = rng.uniform(-_MOVED, _MOVED, 2) * self.field
        to_middle = np.hypot((x - middle[0]) / half_axes[0], (y - middle[1]) / half_axes[1])
        inside = np.clip(0.5 - (to_middle - 1) * half_axes.mean() / pixel, 0, 1)
        image = _AIR_HU + (BODY_HU - _AIR_HU) * inside
        for disc in discs:
            distance = np.hypot(x - disc.x, y - disc.y) - disc.radius
            image += disc.contrast * np.clip(0.5 - distance / pixel, 0, 1)
        return torch.from_numpy(image.astype(np.float32))

    def regions(self, images: Tensor) -> Tensor:
        """The region around each place [n, places, N, N] of images [n, H, W]."""
        corners = [
            [round(at / self.pixel_size + (self.size - self.region) / 2) for at in (y, x)] for x, y in self.places
        ]
        return torch.stack([images[:, r : r + self.region, c : c + self.region] for r, c in corners], dim=1)
