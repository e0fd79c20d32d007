"""Measure variances: of the rays of repeated scans, and of a uniform region in a series of slices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from qnmixer.data.cache import to_grid
from qnmixer.data.numpy_files import open_stack
from qnmixer.data.slices import Slice, usable
from qnmixer.errors import DataError
from qnmixer.extras.calibration.calibrate_config import CalibrateConfig
from qnmixer.extras.calibration.dose import Variances
from qnmixer.measurement.build import geometry_of
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.fbp import fbp_of_slices
from qnmixer.physics.projector import system_matrix
from qnmixer.physics.sparse import apply_linear
from qnmixer.reconstruction.input_slices import read_slices, slice_files

_FIX = "give a .npy of numbers, [repeats, views, bins]"
_BLOCKS, _GROUPS, _FREEDOM = 24, 12, 200
"""Places on the fan, groups of rays with nearly the same transmission there, and degrees of freedom of a group."""
_FEWEST = 50  # pixels of a region
_DRIFT, _NO_REPEATS = 0.002, 0.2  # differences between the means of frames that are told, and that no repeats have
_OF_NOISE = 6.0  # standard errors of a frame's mean within which the means differ by noise
_COMPARED, _ALIKE = 64, 0.05  # frames that are compared in pairs, and a correlation of two that does not matter
_LEAST, _BY_CHANCE, _CLEARLY = 0.005, 3.0, 5.0
"""A correlation that does not matter, standard errors of one by chance, and standard errors that never are."""
_OFTEN, _SATURATED = 4, 0.05  # times that a bin reads its largest value, and a share of such bins, that are no chance
_NEIGHBOURS = 8  # dark bins whose counts are added
_UNEQUAL, _SMALL = 0.1, 0.05  # differences of noise that do not matter, and an error of a mean that tells bins apart
_CLEAR = 4.0  # standard deviations of a group above zero from which it is used: then its counts are not clipped
_COARSE, _VIEWS = 64, 96
"""Pixels a side and views from which attenuations are computed. They vary slowly, and coarse pixels have less noise."""
_AIR = -950.0
"""HU of a coarse pixel below which it is air. A file holds no HU below −1024, so its noisy air is too dense."""
_DRAWS = 6  # draws of each kind of noise for a slice
_TOGETHER = 5  # slices whose noise is reconstructed together: their sinograms take 0.5 GB for 1,000 views of 900 bins


def of_repeats(path: Path, config: CalibrateConfig) -> Variances:
    """The variances of the transmissions in repeated scans [N, V, D], by places on the fan and groups of equal rays.

    Equal frames count once. Each frame is divided by its mean, so drift of the tube is no noise. Rays that never vary
    are left out. If neighbouring bins are correlated, their covariances are added: crosstalk moves noise and loses
    none. With unit=counts and without `air`, the input is an air scan, in which the views are repeats too.

    Raises DataError for fewer than two repeats, for frames that are no repeats, for repeats on another axis, and for
    scans in which no ray shows its noise.
    """
    scans = _open(path, config)
    n, unusable = len(scans.frames), f"{_FIX}, in unit={config.unit}"
    notes = _Notes([], [])
    if n < len(scans.stack):
        notes.remarks.append(
            f"{len(scans.stack) - n} of {len(scans.stack)} frames are stored more than once, and count once."
        )
    if n < 2:
        raise DataError(f"{path} has no ray whose counts vary: {unusable}")
    # The tube drifts: each frame is divided by its strength, so that this is no noise.
    strengths, dead = _strengths(scans, notes)
    moments = _moments(scans, strengths)
    if not scans.is_air:
        _check_order(path, [scans.rays(view)[0] / strengths[0] for view in range(scans.n_views)], moments.variances)
    # A dead ray has no variance, and would make that of its group too small.
    means, variances = (np.where(dead, np.nan, values) for values in (moments.means, moments.variances))
    level = _level(path, scans, strengths, means, variances, notes)
    means, variances, covariances = means / level, variances / level**2, moments.covariances / level**2
    # One variance is too uncertain for a fit: those of rays alike in place and brightness are averaged.
    fewest = -(-_FREEDOM // (n - 1))
    cells = _cells(means, variances, fewest)
    if not cells:
        raise DataError(f"{path} has no ray whose counts vary and stay above zero: {unusable}")
    if max(means.flat[cell].mean() for cell in cells) > 1 + _NO_REPEATS:
        notes.doubts.append("Rays are brighter than air: the air scan had another tube current.")
    clear = np.concatenate(cells)
    _doubt_views(means, variances, cells, n, notes)
    _doubt_frames(moments, n, len(clear), notes)
    # The variance of noise without correlation: that of a sum of bins, divided by their number.
    is_shared = _is_crosstalk(means, variances, covariances, clear, n, notes)
    if is_shared:
        variances = variances + 2 * (covariances[0] + covariances[1])  # NaN at the edges
        cells = _cells(means, variances, fewest)

    def over_cells(values: np.ndarray) -> np.ndarray:
        return np.array([values.flat[cell].mean() for cell in cells])

    return Variances(
        measured=over_cells(variances),
        counting=over_cells(means),
        electronic=np.ones(len(cells)),
        error=(np.sqrt(5) if is_shared else 1.0) * np.sqrt(2 / (n - 1) / np.array([len(cell) for cell in cells])),
        places=over_cells(np.broadcast_to(np.linspace(-1, 1, scans.n_bins), means.shape)),
        air=scans.air,
        n_bins=scans.n_bins,
        shared=over_cells(covariances[0]) if is_shared else None,
        remarks=tuple(notes.remarks),
        doubts=tuple(notes.doubts),
    )


class _Notes(NamedTuple):
    """For the reader: what was taken out, and what makes I₀ and σ wrong."""

    remarks: list[str]
    doubts: list[str]


@dataclass(frozen=True)
class _Scans:
    stack: np.ndarray  # [N, V, D]
    frames: list[int]  # the numbers of those that differ
    unit: str
    air: np.ndarray | None  # counts [D]
    is_air: bool

    @property
    def n_views(self) -> int:
        return self.stack.shape[1]

    @property
    def n_bins(self) -> int:
        return self.stack.shape[2]

    def rays(self, view: int) -> np.ndarray:
        """Transmissions [n, D]."""
        values = self.stack[self.frames, view].astype(np.float64)
        return np.exp(-values) if self.unit == "attenuation" else values / (1.0 if self.air is None else self.air)


def _open(path: Path, config: CalibrateConfig) -> _Scans:
    """Read the scans and their air. Raises DataError if there is one repeat only, or if the air does not fit."""
    stack = _stack(path)
    is_air = config.unit == "counts" and config.air is None
    if is_air:
        stack = stack.reshape(-1, 1, stack.shape[-1])
    if len(stack) < 2:
        raise DataError(f"{path} has one scan, which shows no noise: give at least two repeats, [repeats, views, bins]")
    air = None
    if is_air or config.air is not None:
        air = (stack if config.air is None else _stack(Path(config.air))).mean((0, 1), dtype=np.float64)
    if config.air is not None and air is not None and (air.shape != stack.shape[2:] or not (air > 0).all()):
        raise DataError(f"air={config.air} does not fit: give counts above 0, [repeats, views, {stack.shape[2]} bins]")
    frames = sorted({blake2b(frame.tobytes()).digest(): k for k, frame in enumerate(stack)}.values())
    return _Scans(stack, frames, config.unit, air, is_air)


def _strengths(scans: _Scans, notes: _Notes) -> tuple[np.ndarray, np.ndarray]:
    """The mean [n] of each frame as a share of that of all, and which rays [V, D] never vary.

    A saturated detector reads one value many times: the largest of many bins.
    """
    strengths, still = np.zeros(len(scans.frames)), np.zeros((scans.n_views, scans.n_bins), bool)
    largest, times = np.full(scans.n_bins, -np.inf), np.zeros(scans.n_bins, int)
    for view in range(scans.n_views):
        rays = np.nan_to_num(scans.rays(view))
        still[view] = np.ptp(rays, axis=0) == 0
        strengths += rays[:, ~still[view]].sum(-1)
        rays[:, still[view]] = -np.inf
        top = np.maximum(largest, rays.max(0))
        times = np.where(top > largest, 0, times) + (np.isfinite(top) & (rays == top)).sum(0)
        largest = top
    # Few equal counts of one ray are chance. Those of its neighbour too are not.
    wide = np.pad(still, 1)
    dead = still & (wide[:-2, 1:-1] | wide[2:, 1:-1] | wide[1:-1, :-2] | wide[1:-1, 2:])
    if dead.any():
        notes.remarks.append(f"{dead.sum()} of {dead.size} rays never vary (dead, stuck or without counts): left out.")
    if np.mean(times >= _OFTEN) > _SATURATED:
        notes.doubts.append(
            f"{np.mean(times >= _OFTEN):.0%} of the bins read their largest value {_OFTEN} times or more: the "
            "detector was saturated, or the values were clipped."
        )
    return strengths / strengths.mean(), dead


def _check_order(path: Path, frame: Sequence[np.ndarray], variances: np.ndarray) -> None:
    """Raise DataError if repeats seem to be along another axis than the first: they vary least along it.

    `frame`: one of them, [V, D]. `variances`: over the first axis, [V, D].
    """
    along = {"[views, repeats, bins]": np.nanvar(frame, axis=0), "[views, bins, repeats]": np.nanvar(frame, axis=1)}
    order = min(along, key=lambda name: float(np.nanmean(along[name])))
    if len(frame) > 1 and np.nanmean(along[order]) < np.nanmean(variances) / 2:
        raise DataError(f"{path} looks like {order}: give [repeats, views, bins], as numpy.moveaxis gives them")


class _Moments(NamedTuple):
    means: np.ndarray  # [V, D]
    variances: np.ndarray  # [V, D]
    # [4, V, D]: with the first, second and third bin beside, NaN at the edges, and the view before (of air: the frame)
    covariances: np.ndarray
    alike: float  # how far the correlation of two frames is above that of independent ones, at most
    powers: np.ndarray  # the noise of frames as shares of their mean
    tails: float  # the fourth moment, as a share of a normal distribution's


def _moments(scans: _Scans, strengths: np.ndarray) -> _Moments:
    """The moments of the frames, each divided by its strength [n]."""
    n = len(strengths)
    compared = np.linspace(0, n - 1, min(n, _COMPARED)).astype(int)
    means, variances, covariances, products = [], [], [], np.zeros((len(compared), len(compared)))
    before, fourth, squares = None, 0.0, 0.0
    for view in range(scans.n_views):
        frames = scans.rays(view) / strengths[:, None]
        mean = frames.mean(0)
        rest = frames - mean
        means.append(mean)
        variances.append(np.sum(rest**2, axis=0) / (n - 1))
        lags = np.full((4, len(mean)), np.nan)
        for k, lag in enumerate(lags[:3], 1):
            # Of a bin with both neighbours, so that bins of many and of few counts have equal parts in the mean.
            both = np.sum(rest[:, k:] * rest[:, :-k], axis=0) / (n - 1)
            lag[k:-k] = (both[:-k] + both[k:]) / 2
        if scans.is_air:
            lags[3] = np.sum(rest[1:] * rest[:-1], axis=0) / (n - 1)
        elif before is not None:
            # So that bright and dark views have equal parts in the mean.
            root = np.sqrt(np.abs(mean / np.where(means[-2], means[-2], np.nan)))
            lags[3] = np.sum(rest * before, axis=0) / (n - 1) * root
        before = rest
        covariances.append(lags)
        clear = mean > _CLEAR * np.sqrt(variances[-1])
        white = rest[:, clear] / np.sqrt(mean[clear])
        products += white[compared] @ white[compared].T
        fourth += np.sum(white**4) * n / (n - 1) ** 2 / 3
        squares += np.sum((variances[-1][clear] / mean[clear]) ** 2) * (n - 1) / (n + 1)
    powers = np.diag(products)
    scale = np.sqrt(powers) + 1e-30
    pairs = (products / np.outer(scale, scale) + 1 / (n - 1))[np.triu_indices(len(compared), 1)]
    return _Moments(
        np.array(means),
        np.array(variances),
        np.stack(covariances, axis=1),
        float(pairs.max()),
        powers * strengths[compared] / (np.mean(powers) + 1e-30),  # as counting gives: a weak frame has more
        fourth / (squares + 1e-30),
    )


def _level(
    path: Path, scans: _Scans, strengths: np.ndarray, means: np.ndarray, variances: np.ndarray, notes: _Notes
) -> float:
    """The transmission of air in the scans: 1, but for drift of the tube. Raises DataError for frames too different."""
    of_noise = _OF_NOISE * float(np.sqrt(np.nansum(variances)) / np.nansum(means))
    drift = float(np.ptp(strengths)) if np.ptp(strengths) > of_noise else 0.0
    if drift > _NO_REPEATS:
        raise DataError(f"{path} has frames whose means differ by {drift:.0%}: give repeated scans of one object")
    errors = variances / len(strengths)
    # Of some neighbours together: with few repeats, some rays have a much too small error by chance.
    sums, squares = (sliding_window_view(of, min(_NEIGHBOURS, scans.n_bins), 1).sum(-1) for of in (means, errors))
    if not scans.is_air and (sums < -_OF_NOISE * np.sqrt(squares)).any():
        notes.doubts.append("Dark rays have counts below zero: the dark offset that was subtracted is too large.")
    level = 1.0 if scans.is_air else _level_of_air(means, errors)
    if drift > _DRIFT:
        notes.remarks.append(f"The frames' means differ by {drift:.1%}: each frame is divided by its own.")
        if level is None:
            notes.doubts.append(f"No bin at the edges sees air, so I₀ may be wrong by the drift, {drift:.1%}.")
    if level is not None and abs(level - 1) > _NO_REPEATS:
        of = "air=" if scans.unit == "counts" else "the air that they were divided by"
        notes.doubts.append(f"Bins at the edges see {level:.2f} times {of}: the air scan had another tube current.")
    return 1.0 if level is None else level


def _level_of_air(means: np.ndarray, errors: np.ndarray) -> float | None:
    """The mean transmission of the bins at both edges, if they see air: all equal but for noise, and that is small."""
    n = max(2, means.shape[1] // 50)
    edges, squares = (np.concatenate([values[:, :n], values[:, -n:]], axis=1) for values in (means, errors))
    level = float(np.nanmean(edges))
    # Of the sums: with few repeats, some rays have a much too small error by chance.
    is_flat = np.nanmean((edges - level) ** 2) / np.nanmean(squares) < 1 + _CLEARLY * np.sqrt(2 / edges.size)
    is_near = abs(level - 1) < _NO_REPEATS or np.nanmean(squares) < (_SMALL * level) ** 2
    return level if is_flat and is_near else None


def _doubt_frames(moments: _Moments, n: int, n_clear: int, notes: _Notes) -> None:
    """Doubt frames that are no independent measurements of one dose."""
    by_chance = _CLEARLY / np.sqrt(n_clear)
    if moments.alike > _ALIKE + by_chance:
        notes.doubts.append(
            f"Some frames are more alike than independent repeats (correlation {moments.alike:.2f}): bins drift apart, "
            "the object moved, or frames were stored twice after processing."
        )
    if n > 2 and np.abs(moments.powers - 1).max() > _UNEQUAL + by_chance * np.sqrt(2):
        low, high = moments.powers.min(), moments.powers.max()
        notes.doubts.append(f"Frames have {low:.2f} to {high:.2f} of their mean noise: they have different doses.")
    if moments.tails > 1 + _UNEQUAL + 4 * _CLEARLY / np.sqrt(n_clear * n):
        notes.doubts.append(
            f"Rays have more outliers than noise gives (fourth moment {moments.tails:.1f} times that of a normal "
            "distribution): spikes, or views that were lost in some frames."
        )


def _doubt_views(means: np.ndarray, variances: np.ndarray, cells: list[np.ndarray], n: int, notes: _Notes) -> None:
    """Doubt views whose noise differs from that of equal rays of other views."""
    relative = np.full(means.shape, np.nan)
    for cell in cells:
        of_cell = variances.flat[cell] / means.flat[cell]
        relative.flat[cell] = of_cell / of_cell.mean()
    powers, counts = np.nansum(relative, axis=1), np.isfinite(relative).sum(1)
    unequal = np.abs(powers - counts) > _UNEQUAL * counts + _CLEARLY * np.sqrt(2 * counts / (n - 1))
    if unequal.any():
        notes.doubts.append(f"{unequal.sum()} of {len(powers)} views have noise of another dose than the others.")


def _is_crosstalk(
    means: np.ndarray, variances: np.ndarray, covariances: np.ndarray, clear: np.ndarray, n: int, notes: _Notes
) -> bool:
    """Whether neighbouring bins are correlated. Doubts correlations that no crosstalk of neighbours gives."""
    noise = np.mean(variances.flat[clear] / means.flat[clear])
    shares = [lag.flat[clear] / means.flat[clear] / noise for lag in covariances]
    *bins, views = (float(np.nanmean(share)) for share in shares)
    least = max(_LEAST, _BY_CHANCE / np.sqrt(len(clear) * (n - 1)))
    beyond = _LEAST + _CLEARLY / np.sqrt(len(clear) * (n - 1))
    if bins[0] > least:
        notes.remarks.append(
            f"Neighbouring bins are correlated by {bins[0]:.3f}, which is taken for crosstalk of the detector."
        )
    wide = bins[1] > max(bins[0], 0) / 4 + beyond or bins[2] > beyond  # c²/(2c (1 − 2c)) is 1/4 at most
    if wide or min(bins) < -beyond:
        notes.doubts.append(
            "Bins are correlated as no crosstalk of neighbours correlates them (next, second, third: "
            f"{', '.join(f'{value:.3f}' for value in bins)}): the scans were filtered or interpolated."
        )
    by_chance = float(np.nanstd(shares[3]) / np.sqrt(np.isfinite(shares[3]).sum() + 1e-30))  # fewer: both are clear
    if views > max(_LEAST, _BY_CHANCE * by_chance) or views < -_CLEARLY * by_chance - _LEAST:
        notes.doubts.append(
            f"Neighbouring views are correlated by {views:.3f}: the detector lags, or views were interpolated. I₀ is "
            f"wrong by about {2 * views:.0%}."
        )
    return bins[0] > least


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


def _slices(path: Path, count: int) -> list[Slice]:
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


def _attenuations(slices: Sequence[Slice], geometry: FanBeamGeometry, of_water: float) -> list[np.ndarray]:
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
