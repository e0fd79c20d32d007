"""Measure variances: of the rays of repeated scans, and of a uniform region in a series of slices."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from qnmixer.engine.data.cache import to_grid
from qnmixer.engine.data.numpy_files import open_stack
from qnmixer.engine.data.slices import usable
from qnmixer.engine.inference.input_slices import InputSlice, read_slices, slice_files
from qnmixer.engine.reconstructor import geometry_of
from qnmixer.errors import DataError
from qnmixer.extras.calibration.config import CalibrateConfig
from qnmixer.extras.calibration.dose import Variances
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.fbp import fbp_of_slices
from qnmixer.physics.projector import system_matrix
from qnmixer.physics.sparse import apply_linear

_FIX = "give a .npy of numbers, [repeats, views, bins]"
_MOST_GROUPS, _FEWEST = 100, 50
"""Groups of rays with nearly the same transmission, and the rays of a group, or pixels of a region, at least."""
_CLEAR = 4.0
"""A group is used if its transmission is so many standard deviations above zero: then its counts are not clipped."""
_COARSE, _VIEWS = 64, 96
"""Pixels a side and views from which attenuations are computed. They vary slowly, and coarse pixels have less noise."""
_AIR = -950.0
"""HU of a coarse pixel below which it is air. A file holds no HU below −1024, so its noisy air is too dense."""
_DRAWS = 6
"""Draws of each kind of noise for a slice."""
_TOGETHER = 5
"""Slices whose noise is reconstructed together: their sinograms take 0.5 GB for 1,000 views of 900 bins."""


def of_repeats(path: Path, config: CalibrateConfig) -> Variances:
    """The variances of the transmissions in repeated scans [N, V, D], by groups of rays.

    With unit=counts and without `air`, the input is an air scan, in which the views are repeats too.

    Raises DataError for fewer than two repeats, and for scans in which no ray shows its noise.
    """
    stack = _stack(path)
    is_air = config.unit == "counts" and config.air is None
    if is_air:
        stack = stack.reshape(-1, 1, stack.shape[-1])
    n_repeats, n_views, n_bins = stack.shape
    if n_repeats < 2:
        raise DataError(f"{path} has one scan, which shows no noise: give at least two repeats, [repeats, views, bins]")
    air = np.ones(n_bins) if config.air is None else _stack(Path(config.air)).mean((0, 1), dtype=np.float64)
    if air.shape != (n_bins,) or not (air > 0).all():
        raise DataError(
            f"air={config.air} does not fit: give counts above zero of {n_bins} bins, [repeats, views, bins]"
        )
    means, squares = np.empty((n_views, n_bins)), np.empty((n_views, n_bins))
    for view in range(n_views):
        rays = stack[:, view].astype(np.float64)
        rays = np.exp(-rays) if config.unit == "attenuation" else rays / (rays.mean(0) if is_air else air)
        means[view], squares[view] = rays.mean(0), rays.var(0, ddof=1)
    finite = np.isfinite(means)
    order = np.argsort(-means[finite])  # from bright to dark
    n_groups = int(np.clip(len(order) // _FEWEST, 1, _MOST_GROUPS))
    groups = order[: len(order) // n_groups * n_groups].reshape(n_groups, -1)
    transmission, measured = means[finite][groups].mean(1), squares[finite][groups].mean(1)
    clear = np.logical_and.accumulate((transmission > _CLEAR * np.sqrt(measured)) & (measured > 0))
    if not clear.any():
        raise DataError(f"{path} has no ray whose counts vary and stay above zero: {_FIX}, in unit={config.unit}")
    error = float(np.sqrt(2 / (n_repeats - 1) / groups.shape[1]))
    return Variances(measured[clear], transmission[clear], np.ones(int(clear.sum())), error)


def _stack(path: Path) -> np.ndarray:
    with usable(path, _FIX):
        return open_stack(path)


def of_series(path: Path, config: CalibrateConfig) -> Variances:
    """The variances in a region of each slice, in 1/mm², and what both kinds of noise give there after FBP.

    Raises DataError for slices of several sizes, and for a region that does not fit into them.
    """
    slices = _slices(path, config.n_slices)
    size, spacing, section = len(slices[0].hu), slices[0].spacing, config.geometry
    if spacing is not None:
        section = section.changed(field_of_view=size * spacing[0])
    geometry = geometry_of(section, size)
    of_water = config.water_attenuation / 1000
    rows, columns = _region(geometry, config.region or ())
    margin = int(min(rows.min(), columns.min(), size - 1 - rows.max(), size - 1 - columns.max()))
    inner = replace(geometry, image_size=size - 2 * margin)  # the region is inside of it
    rng = np.random.default_rng(config.seed)
    variances = []
    for start in range(0, len(slices), _TOGETHER):
        sinograms: list[np.ndarray] = []
        for attenuation in _attenuations(slices[start : start + _TOGETHER], geometry, of_water):
            for deviation in (np.exp(attenuation / 2), np.exp(attenuation)):  # of counting, of electronics
                sinograms += [*(deviation * rng.standard_normal((_DRAWS, *attenuation.shape), np.float32))]
        noise = fbp_of_slices(np.stack(sinograms, axis=2), inner, section.fbp_filter)
        variances.append(_variance(noise[:, rows - margin, columns - margin], rows, columns))
    drawn = np.concatenate(variances).reshape(len(slices), 2, _DRAWS)
    measured = _variance(of_water * np.stack([piece.hu[rows, columns] for piece in slices]), rows, columns)
    counting, electronic = drawn.mean(-1).T
    of_draw = np.sqrt(np.mean(drawn.var(-1, ddof=1) / drawn.mean(-1) ** 2))
    return Variances(measured, counting, electronic, float(of_draw * np.sqrt(1 + 1 / _DRAWS)))


def _slices(path: Path, count: int) -> list[InputSlice]:
    """So many slices of a series, spread over it. Raises DataError if they differ in size or are not square."""
    files = slice_files(path)
    n_files = min(count, len(files))
    spread = [files[(2 * k + 1) * len(files) // (2 * n_files)] for k in range(n_files)]
    slices = [*islice(read_slices(path, spread), count)]
    if len({(*piece.hu.shape, piece.spacing) for piece in slices}) > 1 or len({*slices[0].hu.shape}) > 1:
        raise DataError(f"input={path} has slices of several sizes, or no square ones: give the folder of one series")
    return slices


def _region(geometry: FanBeamGeometry, region: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pixels in a disc (x, y, radius). Raises DataError for few, or some outside."""
    x, y, radius = region
    axis = (np.arange(geometry.image_size) - (geometry.image_size - 1) / 2) * geometry.pixel_size
    rows, columns = np.nonzero((axis[None, :] - x) ** 2 + (axis[:, None] - y) ** 2 <= radius**2)
    if len(rows) < _FEWEST or max(abs(x), abs(y)) + radius > geometry.field_of_view / 2:
        raise DataError(
            f"region={[*region]} has {len(rows)} pixels in slices that are {geometry.field_of_view:g} mm wide: give a "
            f"disc inside of them with at least {_FEWEST}"
        )
    return rows, columns


def _variance(values: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The variances [Z] of the pixels [Z, n] about the quadratic surface that fits them best."""
    y, x = rows - rows.mean(), columns - columns.mean()
    surface = np.linalg.qr(np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], axis=1))[0]
    rest = values - values @ surface @ surface.T
    return np.sum(rest.astype(np.float64) ** 2, axis=1) / (len(rows) - surface.shape[1])


def _attenuations(slices: Sequence[InputSlice], geometry: FanBeamGeometry, of_water: float) -> list[np.ndarray]:
    """The attenuations [V, D] of the rays through each slice, from coarse images and some of the views."""
    size, n_views = min(_COARSE, geometry.image_size), min(_VIEWS, geometry.n_views)
    coarse = replace(geometry, image_size=size, pixel_size=geometry.field_of_view / size, n_views=n_views)
    matrix = system_matrix(coarse)
    nearest = np.rint(np.arange(geometry.n_views) * n_views / geometry.n_views).astype(int)
    nearest = nearest % n_views if geometry.is_full_turn else nearest.clip(max=n_views - 1)
    attenuations = []
    for piece in slices:
        hu = to_grid(piece.hu, piece.spacing, size, geometry.field_of_view)
        image = torch.from_numpy(np.where(hu < _AIR, 0.0, of_water * (hu + 1000))).float()[None, None]
        attenuations.append(apply_linear(image, matrix, matrix.transpose)[0, 0].numpy()[nearest])
    return attenuations
