"""Bodies of soft tissue with known discs. Lengths are in mm from the middle of the image, x to the right, y down."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qnmixer.physics import FanBeamGeometry

_BODY_HU, _AIR_HU = 40.0, -1000.0
_N_PLACES = 8
_BODY, _RING, _EDGE_RING, _EDGE_RADIUS, _REGION = 0.31, 0.19, 0.155, 0.0625, 0.125
"""Parts of the field of view: half axes of the body, the circles of places and of edges, an edge's radius, a region."""
_VARIED, _MOVED = 0.05, 0.01
"""How much the half axes vary, as a part of them, and how far a body is moved, as a part of the field."""


class Disc(NamedTuple):
    """A disc that differs from the body by a contrast in HU."""

    x: float
    y: float
    radius: float
    contrast: float


class TaskPhantom:
    """The phantoms of a scan. Each has a body of its own, so that artefacts of one body are not taken for its truth."""

    def __init__(self, geometry: FanBeamGeometry) -> None:
        self.pixel_size, self.size = geometry.pixel_size, geometry.image_size
        self.field = self.size * self.pixel_size
        self.region = 2 * max(round(_REGION * self.size / 2), 4)  # side of a square region in pixels, even
        angles = (2 * math.pi * (k + 0.5) / _N_PLACES for k in range(_N_PLACES))
        ring, odd = _RING * self.size, self.size % 2 / 2
        pixels = (((round(ring * f(angle) - odd) + odd) for f in (math.cos, math.sin)) for angle in angles)
        # Middles of the regions, on corners of pixels. A quarter turn maps each onto another.
        self.places = [(x * self.pixel_size, y * self.pixel_size) for x, y in pixels]

    def edges(self, contrasts: Sequence[float], rng: np.random.Generator) -> list[Disc]:
        """A large disc of each contrast in HU, all turned by a random angle: so edges meet the grid in many ways."""
        angles = (rng.uniform(0, 2 * math.pi) + 2 * math.pi * np.arange(len(contrasts)) / len(contrasts)).tolist()
        ring, radius = _EDGE_RING * self.field, _EDGE_RADIUS * self.field
        discs = zip(angles, contrasts, strict=True)
        return [Disc(ring * math.cos(angle), ring * math.sin(angle), radius, hu) for angle, hu in discs]

    def draw(self, size: int, rng: np.random.Generator) -> Tensor:
        """HU [size, size], float32, of a random body. At edges a pixel has about its mean value."""
        pixel = self.field / size
        axis = (np.arange(size) - (size - 1) / 2) * pixel
        x, y = axis, axis[:, None]
        a, b = _BODY * self.field * rng.uniform(1 - _VARIED, 1 + _VARIED, 2)
        middle = rng.uniform(-_MOVED, _MOVED, 2) * self.field
        outside = (np.hypot((x - middle[0]) / a, (y - middle[1]) / b) - 1) * (a + b) / 2
        image = _AIR_HU + (_BODY_HU - _AIR_HU) * np.clip(0.5 - outside / pixel, 0, 1)
        return torch.from_numpy(image.astype(np.float32))

    def draw_discs(self, size: int, discs: Sequence[Disc]) -> Tensor:
        """The contrasts of discs alone, HU [size, size], float32."""
        pixel = self.field / size
        axis = (np.arange(size) - (size - 1) / 2) * pixel
        image = np.zeros((size, size))
        for disc in discs:
            outside = np.hypot(axis - disc.x, axis[:, None] - disc.y) - disc.radius
            image += disc.contrast * np.clip(0.5 - outside / pixel, 0, 1)
        return torch.from_numpy(image.astype(np.float32))

    def around_body(self, image: Tensor) -> Tensor:
        """The middle of an image [H, W], which has all of any body and little more."""
        return image[self._margin : self.size - self._margin, self._margin : self.size - self._margin]

    def around_inserts(self, diameter: float) -> list[tuple[float, float, float]]:
        """Column, row and radius in pixels of a circle around each insert, in an image as `around_body` gives."""
        middle, radius = (self.size - 1) / 2 - self._margin, 0.8 * diameter / self.pixel_size + 1
        return [(x / self.pixel_size + middle, y / self.pixel_size + middle, radius) for x, y in self.places]

    @property
    def _margin(self) -> int:
        return int((0.5 - _BODY * (1 + _VARIED) - _MOVED) * self.size)

    def regions(self, images: Tensor) -> Tensor:
        """The region around each place [n, places, N, N] of images [n, H, W]."""
        shift, n = (self.size - self.region) / 2, self.region
        corners = [[round(at / self.pixel_size + shift) for at in place] for place in self.places]
        return torch.stack([images[:, row : row + n, column : column + n] for column, row in corners], dim=1)
