"""The system matrix A: exact intersection lengths of rays and pixels (Siddon 1985), in float64."""

import numpy as np

from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.matrix_cache import Arrays, cached
from qnmixer.physics.scan import Numbering, ScanMatrix
from qnmixer.physics.sparse import Csr, Triples, in_threads, to_csr, transpose_csr

_CHUNK = 2**17
"""Ray–slab crossings computed at a time: few enough for the CPU's cache, and for little memory."""
_ON_GRID = 1e-9
"""A crossing this near to a grid line, in pixels, counts as exactly on it."""


def system_matrix(geometry: FanBeamGeometry) -> ScanMatrix:
    """A, with values in mm. Large ones are cached on disk."""

    def build() -> Arrays:
        layout = Numbering(geometry)
        forward = _by_rays(geometry)
        return *forward, *transpose_csr(forward, layout.n_pixels, layout.quarters)

    return ScanMatrix(geometry, cached("system matrix", geometry, build))


def _by_rays(geometry: FanBeamGeometry) -> Csr:
    """A of the distinct views: rows are rays, columns are pixels, numbered as `Numbering` says."""
    layout = Numbering(geometry)
    numbers = layout.pixel_numbers()
    order = layout.turned_rays()[:, 0]
    origin, direction = _rays(geometry)

    def part(first: int, last: int) -> Triples:
        rows = np.arange(first, last, dtype=np.int32)[order[first:last] >= 0]
        rays = order[rows]
        pixels, lengths, crossed = _intersect(origin[:, rays], direction[:, rays], geometry)
        return np.repeat(rows, crossed), numbers[pixels].astype(np.int32), lengths

    triples = in_threads(part, len(order), max(1, _CHUNK // geometry.image_size))
    return to_csr(triples, len(order), layout.quarters * layout.n_pixels)


def _rays(geometry: FanBeamGeometry) -> tuple[np.ndarray, np.ndarray]:
    """For each ray of the distinct views, the point nearest to the axis and the unit direction, as (column, row).

    In pixels, float64 [2, distinct views · D] each. Pixel (row i, column j) covers [j, j + 1] × [i, i + 1]; rows grow
    downwards.
    """
    phi = geometry.angles()[: geometry.n_distinct_views, None] - geometry.fan_angles()
    cos, sin = np.cos(phi), np.sin(phi)
    nearest = geometry.ray_distances() / geometry.pixel_size * np.stack([cos, -sin]) + geometry.image_size / 2
    return nearest.reshape(2, -1), np.stack([-sin, -cos]).reshape(2, -1)


def _intersect(
    origin: np.ndarray, direction: np.ndarray, geometry: FanBeamGeometry
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels that each ray crosses and the lengths in mm: int32 [nnz], float32 [nnz], and how many per ray [rays].

    A ray is followed along its longer axis. Between two neighbouring grid lines of that axis (a slab) it moves by at
    most one pixel across, so it meets at most two pixels there, split where it crosses the grid line between them.
    """
    n = geometry.image_size
    steep = np.abs(direction[1]) > np.abs(direction[0])
    along, across = (np.where(steep, origin[i], origin[1 - i])[:, None] for i in (1, 0))
    d_along, d_across = (np.where(steep, direction[i], direction[1 - i])[:, None] for i in (1, 0))

    position = across + (np.arange(n + 1) - along) * (d_across / d_along)
    grid_line = np.rint(position)
    position = np.where(np.abs(position - grid_line) < _ON_GRID, grid_line, position)
    enter, leave = position[:, :-1], position[:, 1:]
    first, second = (np.floor(edge).astype(np.int32) for edge in (enter, leave))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(first == second, 1.0, (np.maximum(first, second) - enter) / (leave - enter))
    # A ray that runs along a grid line belongs to the pixels on both sides, half each.
    on_line = (enter == leave) & (enter == first)
    first -= on_line
    share[on_line] = 0.5

    strip = np.stack([first, second], axis=-1)
    lengths = np.stack([share, 1 - share], axis=-1) * (geometry.pixel_size / np.abs(d_along))[..., None]
    slab = np.arange(n, dtype=np.int32)[None, :, None]
    pixels = np.where(steep[:, None, None], slab * n + strip, strip * n + slab)
    kept = (strip >= 0) & (strip < n) & (lengths > 0)
    return pixels[kept], lengths[kept].astype(np.float32), kept.sum(axis=(1, 2))
