"""Measure variances: of the rays of repeated scans, and of a uniform region in a series of slices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from qnmixer.data.cache import to_grid
from qnmixer.data.numpy_files import open_stack
from qnmixer.data.slices import usable
from qnmixer.errors import DataError
from qnmixer.extras.calibration.config import CalibrateConfig
from qnmixer.extras.calibration.dose import Variances
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.fbp import fbp_of_slices
from qnmixer.physics.projector import system_matrix
from qnmixer.physics.sparse import apply_linear
from qnmixer.reconstruction.input_slices import InputSlice, read_slices, slice_files
from qnmixer.reconstruction.reconstructor import geometry_of

_FIX = "give a .npy of numbers, [repeats, views, bins]"
_BLOCKS, _GROUPS, _FREEDOM = 24, 12, 200
"""Places on the fan, groups of rays with nearly the same transmission there, and degrees of freedom of a group."""
_FEWEST = 50
"""Pixels of a region."""
_DRIFT, _NO_REPEATS = 0.002, 0.2
"""Differences between the means of frames that are told, and that no repeats have."""
_OF_NOISE = 6.0
"""Standard errors of a frame's mean within which the means differ by noise."""
_COMPARED, _ALIKE = 64, 0.05
"""Frames that are compared in pairs, and a correlation of two that does not matter."""
_LEAST, _CLEARLY = 0.005, 5.0
"""A correlation of bins that does not matter, and standard errors beyond chance."""
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
    """The variances of the transmissions in repeated scans [N, V, D], by places on the fan and groups of equal rays.

    Equal frames count once. Each frame is divided by its mean, so drift of the tube is no noise. If neighbouring bins
    are correlated, their covariances are added: crosstalk moves noise and loses none. With unit=counts and without
    `air`, the input is an air scan, in which the views are repeats too.

    Raises DataError for fewer than two repeats, for frames that are no repeats, for repeats on another axis, and for
    scans in which no ray shows its noise.
    """
    stack = _stack(path)
    is_air = config.unit == "counts" and config.air is None
    if is_air:
        stack = stack.reshape(-1, 1, stack.shape[-1])
    if len(stack) < 2:
        raise DataError(f"{path} has one scan, which shows no noise: give at least two repeats, [repeats, views, bins]")
    n_views, n_bins = stack.shape[1:]
    air = np.ones(n_bins) if config.air is None else _stack(Path(config.air)).mean((0, 1), dtype=np.float64)
    if air.shape != (n_bins,) or not (air > 0).all():
        raise DataError(
            f"air={config.air} does not fit: give counts above zero of {n_bins} bins, [repeats, views, bins]"
        )
    frames = sorted({blake2b(frame.tobytes()).digest(): k for k, frame in enumerate(stack)}.values())
    remarks, doubts = [], []
    if len(frames) < len(stack):
        remarks.append(f"{len(stack) - len(frames)} of {len(stack)} frames are stored more than once, and count once.")
    if len(frames) < 2:
        raise DataError(f"{path} has no ray whose counts vary: {_FIX}, in unit={config.unit}")

    def rays(view: int) -> np.ndarray:
        """Transmissions [n, D]."""
        values = stack[frames, view].astype(np.float64)
        return np.exp(-values) if config.unit == "attenuation" else values / (values.mean(0) if is_air else air)

    strengths = np.sum([np.nan_to_num(rays(view)).sum(-1) for view in range(n_views)], axis=0)
    strengths /= strengths.mean()
    scans = _moments(rays, strengths, n_views)
    if not is_air and (order := _turned([rays(view)[0] / strengths[0] for view in range(n_views)], scans.variances)):
        raise DataError(f"{path} looks like {order}: give [repeats, views, bins], as numpy.moveaxis gives them")
    of_noise = _OF_NOISE * float(np.sqrt(np.nansum(scans.variances)) / np.nansum(scans.means))
    drift = float(np.ptp(strengths)) if np.ptp(strengths) > of_noise else 0.0
    if drift > _NO_REPEATS:
        raise DataError(f"{path} has frames whose means differ by {drift:.0%}: give repeated scans of one object")
    means, variances, covariances = scans.means, scans.variances, scans.covariances
    level = 1.0 if is_air else _level_of_air(means, variances / len(frames))
    if drift > _DRIFT:
        remarks.append(f"The frames' means differ by {drift:.1%}: each frame is divided by its own.")
        if level is None:
            doubts.append(f"No bin at the edges sees air, so I₀ may be wrong by the drift, {drift:.1%}.")
    if level is not None:
        means, variances, covariances = means / level, variances / level**2, covariances / level**2
    fewest = -(-_FREEDOM // (len(frames) - 1))
    cells = _cells(means, variances, fewest)
    if not cells:
        raise DataError(f"{path} has no ray whose counts vary and stay above zero: {_FIX}, in unit={config.unit}")
    clear = np.concatenate(cells)
    if scans.alike > _ALIKE + _CLEARLY / np.sqrt(len(clear)):
        doubts.append(
            f"Some frames are more alike than independent repeats (correlation {scans.alike:.2f}): bins drift apart, "
            "or frames were stored twice after processing."
        )
    noise = np.mean(variances.flat[clear] / means.flat[clear])
    correlations = [float(np.nanmean(lag.flat[clear] / means.flat[clear]) / noise) for lag in covariances]
    least = _LEAST + _CLEARLY / np.sqrt(len(clear) * (len(frames) - 1))
    inflation, shared = 1.0, None
    if correlations[0] > least:
        remarks.append(
            f"Neighbouring bins are correlated by {correlations[0]:.3f}, which is taken for crosstalk of the detector."
        )
        variances, inflation = variances + 2 * (covariances[0] + covariances[1]), np.sqrt(5)  # NaN at the edges
        cells, shared = _cells(means, variances, fewest), covariances[0]
    wide = correlations[1] > correlations[0] / 4 + least or correlations[2] > least  # c²/(2c (1 − 2c)) is 1/4 at most
    if wide or min(correlations) < -least:
        doubts.append(
            "Bins are correlated as no crosstalk of neighbours correlates them (next, second, third: "
            f"{', '.join(f'{value:.3f}' for value in correlations)}): the scans were filtered or interpolated."
        )
    places = np.broadcast_to(np.linspace(-1, 1, n_bins), means.shape)

    def over_cells(values: np.ndarray) -> np.ndarray:
        return np.array([values.flat[cell].mean() for cell in cells])

    return Variances(
        measured=over_cells(variances),
        counting=over_cells(means),
        electronic=np.ones(len(cells)),
        error=inflation * np.sqrt(2 / (len(frames) - 1) / np.array([len(cell) for cell in cells])),
        places=over_cells(places),
        air=stack.mean((0, 1), dtype=np.float64) if is_air else None if config.air is None else air,
        n_bins=n_bins,
        shared=None if shared is None else over_cells(shared),
        remarks=tuple(remarks),
        doubts=tuple(doubts),
    )


class _Moments(NamedTuple):
    """Of repeated frames: means and variances [V, D], covariances with the next bins [3, V, D], NaN at the edges.

    `alike`: how far the correlation of two frames is above that of independent ones, at most.
    """

    means: np.ndarray
    variances: np.ndarray
    covariances: np.ndarray
    alike: float


def _moments(rays: Callable[[int], np.ndarray], strengths: np.ndarray, n_views: int) -> _Moments:
    """The moments of the frames, each divided by its strength [n]."""
    n = len(strengths)
    compared = np.linspace(0, n - 1, min(n, _COMPARED)).astype(int)
    means, variances, covariances, products = [], [], [], np.zeros((len(compared), len(compared)))
    for view in range(n_views):
        frames = rays(view) / strengths[:, None]
        mean = frames.mean(0)
        rest = frames - mean
        means.append(mean)
        variances.append(np.sum(rest**2, axis=0) / (n - 1))
        lags = np.full((3, len(mean)), np.nan)
        for k, lag in enumerate(lags, 1):
            # Of a bin with both neighbours, so that bins of many and of few counts have equal parts in the mean.
            both = np.sum(rest[:, k:] * rest[:, :-k], axis=0) / (n - 1)
            lag[k:-k] = (both[:-k] + both[k:]) / 2
        covariances.append(lags)
        clear = mean > _CLEAR * np.sqrt(variances[-1])
        white = rest[np.ix_(compared, clear)] / np.sqrt(mean[clear])
        products += white @ white.T
    scale = np.sqrt(np.diag(products)) + 1e-30
    pairs = (products / np.outer(scale, scale) + 1 / (n - 1))[np.triu_indices(len(compared), 1)]
    return _Moments(np.array(means), np.array(variances), np.stack(covariances, axis=1), float(pairs.max()))


def _turned(frame: Sequence[np.ndarray], variances: np.ndarray) -> str:
    """Which order of axes repeats seem to have, if they vary least along another axis than the first; else nothing.

    `frame`: one of them, [V, D]. `variances`: over the first axis, [V, D].
    """
    along = {"[views, repeats, bins]": np.nanvar(frame, axis=0), "[views, bins, repeats]": np.nanvar(frame, axis=1)}
    order = min(along, key=lambda name: float(np.nanmean(along[name])))
    return order if len(frame) > 1 and np.nanmean(along[order]) < np.nanmean(variances) / 2 else ""


def _level_of_air(means: np.ndarray, errors: np.ndarray) -> float | None:
    """The mean transmission of the bins at both edges, if they see air: all equal but for noise, and near 1."""
    n = max(2, means.shape[1] // 50)
    edges, squares = (np.concatenate([values[:, :n], values[:, -n:]], axis=1) for values in (means, errors))
    level = float(np.nanmean(edges))
    is_flat = np.nanmean((edges - level) ** 2 / squares) < 1 + _CLEARLY * np.sqrt(2 / edges.size)
    return level if is_flat and abs(level - 1) < _NO_REPEATS else None


def _cells(means: np.ndarray, variances: np.ndarray, fewest: int) -> list[np.ndarray]:
    """Numbers of rays that are near each other on the fan and equally bright, from bright to dark.

    Brightness is that of their neighbours, because rays that are bright by their own noise would look too bright.
    """
    n_bins = means.shape[1]
    wide = np.pad(means, ((0, 0), (2, 2)), mode="reflect" if n_bins > 2 else "edge")
    brightness = (wide[:, :-4] + wide[:, 1:-3] + wide[:, 3:-1] + wide[:, 4:]) / 4
    numbers = np.arange(means.size).reshape(means.shape)
    n_blocks = int(np.clip(min(n_bins // 4, means.size // fewest), 1, _BLOCKS))
    cells = []
    for block in np.array_split(np.arange(n_bins), n_blocks):
        usable_rays = np.isfinite(brightness[:, block]) & np.isfinite(variances[:, block])
        rays, keys = numbers[:, block][usable_rays], brightness[:, block][usable_rays]
        rays = rays[np.argsort(-keys)]
        for cell in np.array_split(rays, int(np.clip(len(rays) // fewest, 1, _GROUPS))) if len(rays) else ():
            mean, variance = means.flat[cell].mean(), variances.flat[cell].mean()
            if not (variance > 0 and mean > _CLEAR * np.sqrt(variance)):
                break  # what is darker is cut too
            cells.append(cell)
    return cells


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
