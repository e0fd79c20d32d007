"""Measured sinograms, read one at a time from .npy, .mat and .tif, in the units and rays that a network knows."""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import avg_pool2d

from qnmixer.data.fan_tiff import TIFF, open_fan
from qnmixer.data.numpy_files import open_stack, read_frame
from qnmixer.data.slices import SkipFile, require_size, usable
from qnmixer.errors import ConfigError, DataError, GeometryError, first_line
from qnmixer.installed import not_installed
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.physics.units import FloatArray
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.regrid import FloatList, regrid_scan
from qnmixer.reconstruction.scan import Scan, by_numbers, misfit, warn

_SCANS = (".npy", ".mat", *TIFF)
_FIX = "give sinograms as .npy"

# How far the best image of a geometry is from a scan, as a share of the scan, and the share of its noise that is added
# to the limits. Measured with CT slices at 256 × 256, 64 views: right scans 0.3 to 1.5 % (real discs over 30°: 1.3 %),
# with 1000 photons a ray 5 to 9 % at 20 % noise, with scatter of 1 % of the air's counts 6 %. Wrong ones: mirrored 6 to
# 15 %, one view without an object 12 %, 235° as a turn 11 to 22 %, half of the views empty 24 to 64 %. Right, but wider
# than the image: a table 4 %, arms 13 %.
_STEPS, _FAR, _ABSURD, _OF_NOISE = 10, 0.02, 0.15, 0.5
_LARGEST_ANGLE = 1e4  # radians; beyond it, an angle is no angle
_DENSITIES = 0.05, 1.0
"""Mean x of an object: above 1, it is denser than all that the network knows. Counts are far beyond."""
_BODIES = -200, 400
"""HU: real slices have means from −62 to 230, drawn ones to 490; with −log10 about −550, in pixels of 1.6 mm −350."""


def holds_sinograms(path: Path, trained: FanBeamGeometry, config: ReconstructConfig) -> bool:
    """Whether an input of kind=auto is a scan: by the keys given, by .mat or .tif, or by the shape of a .npy.

    Raises DataError for a .npy that is neither a slice nor a sinogram of the run.
    """
    if path.suffix.lower() in (".mat", *TIFF) or config.detector_pitch is not None or config.angle_span is not None:
        return True
    views, bins = trained.n_views, trained.n_detectors
    for file in _scan_files(path) if path.is_dir() or path.suffix.lower() == ".npy" else ():
        ending = file.suffix.lower()
        if ending == ".mat":
            return True
        if ending in TIFF:
            with suppress(SkipFile, DataError):  # a picture beside slices
                open_fan(file)
                return True
            continue
        with suppress(SkipFile):
            stack = open_stack(file)
            if stack.shape[-2:] == (views, bins):
                return True
            require_size(*stack.shape[1:])  # the minimum reads it all
            if stack[0].min() > -500:  # no air: hardly a slice
                raise DataError(
                    f"{file}, {list(stack.shape)}, is no slice (it has no air, −1000 HU) and no sinogram of this run "
                    f"([{views}, {bins}]): give kind=slices if it is a slice, or a sinogram of the run's geometry"
                )
            return False
    return False


def sinogram_files(path: Path) -> list[Path]:
    """The files that may hold sinograms. Raises DataError if there is none."""
    if not (files := _scan_files(path)):
        raise DataError(
            f"input={path} has no .npy file, .mat or .tif: give sinograms as .npy, [views, bins] or [N, views, bins]"
        )
    return files


def _scan_files(path: Path) -> list[Path]:
    files = path.rglob("*") if path.is_dir() else [path]
    scans = (file for file in files if file.suffix.lower() in _SCANS)
    return sorted((file for file in scans if file.is_file()), key=by_numbers)  # opening a pipe would not end


def measured_scans(
    path: Path, files: Sequence[Path], module: Reconstructor, config: ReconstructConfig
) -> Iterator[Scan]:
    """The sinograms of an input: .npy ([v, d] or [N, v, d]), .mat and .tif.

    A folder's unusable files are left out with a warning. An unusable file that is the input raises DataError.
    """
    scaling = module.config.data.scaling
    if scaling != "attenuation":
        raise ConfigError(
            f"run={config.run} was trained with data.scaling={scaling}, which leaves a measured sinogram without a "
            "scale: use a run with data.scaling=attenuation"
        )
    for file in files:
        name = Path(file.name) if file == path else file.relative_to(path)
        try:
            yield from _scans_of(file, name.with_suffix("").as_posix(), module, config)
        except DataError as error:
            if file == path:
                raise
            warn(f"skipped: {error}")


def _scans_of(file: Path, name: str, module: Reconstructor, config: ReconstructConfig) -> Iterator[Scan]:
    """The sinograms of one file, of which one is in memory at a time.

    Raises DataError for an unusable file. In a stack, an unusable sinogram is left out with a warning.
    """
    geometry, (offset, scale) = module.projector.geometry, module.config.data.hu_scaling
    ending = file.suffix.lower()
    if ending != ".npy" and (config.angle_span is not None or config.detector_pitch is not None):
        raise DataError(f"{file} has angles and bins of its own: leave out angle_span= and detector_pitch=")
    read: Callable[[int], FloatArray]
    if ending == ".mat":
        of_mat, scanner, angles = read_mat(file, geometry)
        count, read = 1, [of_mat].__getitem__
    elif ending in TIFF:
        with usable(file, _FIX):
            fan = open_fan(file)
        start, turned = fan.nearest(geometry.angles()[0])
        views, scanner = np.roll(np.arange(fan.n_views), -start), fan.scan(geometry)
        angles = geometry.angles()[0] + turned + fan.step * np.arange(fan.n_views)
        config, count, read = config.changed(water_attenuation=fan.water), fan.n_slices, partial(fan.rows, views=views)
    else:
        count, scanner = _scanner_of_npy(file, geometry, config)
        angles, read = scanner.angles(), partial(read_frame, file)
    attenuation_of_one = 1.0
    if config.unit == "attenuation":  # of some sets x = 1 is fixed, whatever the attenuation of water is
        data = module.config.data
        attenuation_of_water = attenuation_per_value(config.water_attenuation, data.hu_max)
        attenuation_of_one = attenuation_of_water if data.attenuation_of_one is None else data.attenuation_of_one
    if abs(turned := angles[0] - geometry.angles()[0]) > 1e-6:
        warn(f"{file} starts {np.degrees(turned):.4g}° from the run's first view, so the image is turned by that angle")
    doubted = "max_attenuation" in module.config.data.arguments  # a set whose objects are no bodies
    for k in range(count):
        end = f"#{k}" if count > 1 else ""
        with usable(file, _FIX):
            sinogram = read(k)
        try:
            regridded, missing = regrid_scan(sinogram, angles, scanner, geometry, f"{file}{end}")
            scan = Scan(
                name=f"{name}{end}", offset=offset, scale=scale, measured=True,
                sinogram=torch.from_numpy(regridded / np.float32(attenuation_of_one))[None, None].to(module.device),
                missing=torch.from_numpy(missing).to(module.device) if missing.any() else None,
            )  # fmt: skip
            hu = _check_scan(f"{file}{end}", scan, _noise_of(sinogram), module, config.unit)
        except DataError as error:
            if count == 1:
                raise
            warn(f"skipped: {error}")
            continue
        if not (doubted or _BODIES[0] < hu < _BODIES[1]):
            doubted = True  # once for a file
            warn(
                f"{file}{end} would be an object of {hu:.0f} HU on average, but a body or water is near 0: is it a "
                "transmission or −log10 instead of −ln, in units of pixels instead of mm, or of another "
                "water_attenuation=?"
            )
        if missing.any():
            warn(f"{file}{end}: {missing.sum()} of {len(missing)} views are missing, and filled in from the others")
        yield scan


def _scanner_of_npy(file: Path, geometry: FanBeamGeometry, config: ReconstructConfig) -> tuple[int, FanBeamGeometry]:
    """The number of sinograms in a .npy, and their rays: those of the run, except for keys that were given.

    Sinograms of another shape than the run's are accepted only if the config gives the keys that describe them.
    """
    with usable(file, _FIX):
        shape = open_stack(file).shape
        require_size(shape[1], shape[2], least=1)
    views, bins = geometry.n_views, geometry.n_detectors
    other_views = shape[1] != views and config.angle_span is None
    if other_views or (shape[2] != bins and config.detector_pitch is None):
        raise DataError(
            f"{file} has shape {list(shape)}, but the run was trained on {views} views × {bins} detector bins: "
            f"give [{views}, {bins}] or [N, {views}, {bins}] (rows of NaN for missing views), or give its angle_span= "
            "and detector_pitch=, or train with geometry.n_views and geometry.n_detectors"
        )
    pitch = config.detector_pitch or geometry.detector_pitch
    try:
        return shape[0], replace(
            geometry, n_views=shape[1], n_detectors=shape[2], detector_pitch=pitch,
            detector_offset=geometry.detector_offset * geometry.detector_pitch / pitch,
            angle_span=math.copysign(config.angle_span or geometry.angle_span, geometry.angle_span),
        )  # fmt: skip
    except GeometryError as error:
        raise DataError(f"{file} cannot be used: {error}") from error


def read_mat(path: Path, geometry: FanBeamGeometry) -> tuple[FloatArray, FanBeamGeometry, FloatList]:
    """The sinogram [v, d] (−log of transmission), rays and angles of a MATLAB file in the form of the Helsinki scans.

    That is a struct with `sinogram` and `parameters` (angles in degrees, distances in mm, pixelSizePost). HelTomo reads
    this form, and the Helsinki tomography challenge 2022 publishes it. The angles are those of ASTRA's `fanflat`.

    Raises:
        DataError: the file has another form.
        NotInstalled: there is no scipy.
    """
    try:
        loadmat = importlib.import_module("scipy.io").loadmat
    except ImportError as error:
        raise not_installed("scipy", "mat", str(path)) from error
    try:
        content: dict[str, Any] = loadmat(path, simplify_cells=True)
        struct = next(v for v in content.values() if isinstance(v, dict) and {"sinogram", "parameters"} <= v.keys())
        sinogram, parameters = np.asarray(struct["sinogram"], np.float32), struct["parameters"]
        angles = np.radians(np.atleast_1d(np.asarray(parameters["angles"], np.float64)))
        to_axis, to_detector = (float(parameters[f"distanceSource{end}"]) for end in ("Origin", "Detector"))
        if sinogram.ndim != 2 or angles.shape != sinogram.shape[:1] or not (np.abs(angles) < _LARGEST_ANGLE).all():
            raise ValueError(f"sinogram {list(sinogram.shape)} with {len(angles)} angles")
        if (unit := parameters.get("distanceUnit", "mm")) != "mm":
            raise ValueError(f"distanceUnit {unit}")
        scanner = replace(
            geometry, beam="fan_flat", source_to_axis=to_axis, axis_to_detector=to_detector - to_axis,
            n_detectors=sinogram.shape[1], detector_pitch=float(parameters["pixelSizePost"]), detector_offset=0.0,
            n_views=len(angles),
        )  # fmt: skip
    except Exception as error:  # bytes of another format can make scipy raise anything
        raise DataError(
            f"{path} is no scan ({first_line(repr(error))}): give a struct with sinogram [views, bins] and parameters "
            "(angles, pixelSizePost, distanceSourceOrigin, distanceSourceDetector, in mm), or save it as .npy"
        ) from error
    return sinogram, scanner, angles


def _noise_of(sinogram: FloatArray) -> float:
    """Noise of neighbouring bins [v, d], as a share of the sinogram's norm. Rows of NaN do not count."""
    # Second differences, 1 −2 1, remove a smooth object. They have 6 times the variance of white noise.
    roughness, norm = (
        float(np.nansum(np.square(values, dtype=np.float64))) for values in (np.diff(sinogram, 2), sinogram)
    )
    return math.sqrt(roughness / 6 / norm)


def _check_scan(place: str, scan: Scan, noise: float, module: Reconstructor, unit: str) -> float:
    """Refuse counts, transmissions, a wrong unit, and a scan that no image explains. Returns the mean HU of its object.

    The scan is in the unit of the network. `place` and `unit` are those of the file, for errors.
    """
    x = module.projector.least_squares(scan.sinogram, _STEPS)
    bins = max(1, scan.sinogram.shape[-1] // 64)
    distance, allowance = misfit(module.projector, x, scan, bins), _OF_NOISE * noise
    if distance > _ABSURD + allowance:
        raise DataError(
            f"{place} fits no image: the best one differs from it by {distance:.0%}, with noise of {noise:.0%}. If "
            "it is no −log of transmission, give that (unit=attenuation). If its views or bins are not those of the "
            "run, give its angle_span= and detector_pitch="
        )
    blocks = avg_pool2d(x, max(1, x.shape[-1] // 64))  # less noise
    # A mean weighted by x itself, so that air around the object counts little.
    density = float(blocks.square().sum() / blocks.sum())
    hu = scan.offset + scan.scale * density
    if not _DENSITIES[0] < density < _DENSITIES[1]:
        raise DataError(
            f"{place} would be an object of {hu:.0f} HU on average. Either it is no "
            f"−log of transmission in unit={unit} (unit=attenuation is −log(counts / unattenuated counts), unit=value "
            "the network's value × mm), or detector_pitch= is not that of its bins"
        )
    if distance > _FAR + allowance:
        warn(
            f"{place}: the best image differs from it by {distance:.1%}, so its geometry may be a little wrong, or "
            "the object reaches beyond the image"
        )
    return hu
