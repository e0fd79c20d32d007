"""A body with two organs, as pixels and as exact line integrals, and what else the tests of a scan compare with."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from qnmixer.physics import FanBeamGeometry

# Value, centre x, centre y, semi-axes a, b (mm), rotation (rad).
ELLIPSES = [
    (1.0, 10.0, -20.0, 130.0, 95.0, 0.3),
    (0.3, 60.0, 30.0, 40.0, 25.0, 1.1),
    (-0.2, -45.0, -50.0, 22.0, 35.0, -0.6),
]


def ellipse_image(geometry: FanBeamGeometry) -> Tensor:
    """Pixel means [1, 1, H, W] of the ellipses."""
    return _ellipse_image(geometry.image_size, geometry.pixel_size)


@cache
def _ellipse_image(size: int, pixel_size: float, supersampling: int = 8) -> Tensor:
    n = size * supersampling
    axis = (np.arange(n) - (n - 1) / 2) * pixel_size / supersampling
    x, y = axis[None, :], -axis[:, None]
    image = np.zeros((n, n))
    for value, x0, y0, a, b, turn in ELLIPSES:
        p = (x - x0) * np.cos(turn) + (y - y0) * np.sin(turn)
        q = -(x - x0) * np.sin(turn) + (y - y0) * np.cos(turn)
        image += value * ((p / a) ** 2 + (q / b) ** 2 <= 1)
    blocks = image.reshape(size, supersampling, size, supersampling)
    return torch.from_numpy(blocks.mean(axis=(1, 3))).float()[None, None]


def rays(geometry: FanBeamGeometry) -> tuple[np.ndarray, np.ndarray]:
    """A point and the unit direction of each ray, (x, y) in mm, [2, V, D] each, straight from the convention."""
    beta, n = geometry.angles()[:, None], geometry.n_detectors
    u = ((np.arange(n) - (n - 1) / 2 + geometry.detector_offset) * geometry.detector_pitch)[None, :]
    e_u, e_v = np.stack([np.cos(beta), np.sin(beta)]), np.stack([-np.sin(beta), np.cos(beta)])
    if geometry.beam == "parallel":
        return u * e_u, np.broadcast_to(e_v, (2, len(beta), n))
    source = np.broadcast_to(-geometry.source_to_axis * e_v, (2, len(beta), n))
    if geometry.beam == "fan_flat":
        along = geometry.source_to_detector * e_v + u * e_u
        return source, along / np.hypot(*along)
    gamma = u / geometry.source_to_detector
    return source, np.cos(gamma) * e_v + np.sin(gamma) * e_u


def ellipse_integrals(geometry: FanBeamGeometry) -> Tensor:
    """Exact line integrals [1, 1, V, D]."""
    start, along = rays(geometry)
    total = np.zeros(along.shape[1:])
    for value, x0, y0, a, b, turn in ELLIPSES:
        rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]) / np.array([[a], [b]])
        d = np.einsum("ij,jvd->ivd", rotation, along)
        s = np.einsum("ij,jvd->ivd", rotation, start - np.array([x0, y0])[:, None, None])
        dd, ds, ss = (d * d).sum(0), (d * s).sum(0), (s * s).sum(0)
        total += value * 2 * np.sqrt(np.maximum(ds**2 - dd * (ss - 1), 0)) / dd
    return torch.from_numpy(total).float()[None, None]


def random_pair(geometry: FanBeamGeometry, batch: int = 2) -> tuple[Tensor, Tensor]:
    """A random image and sinogram that fit the geometry."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, 1, geometry.image_size, geometry.image_size, generator=generator)
    return x, torch.rand(batch, 1, geometry.n_views, geometry.n_detectors, generator=generator)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
