"""Measured sinograms, read one at a time from .npy, .mat and .tif, in the units and rays that a network knows."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from qnmixer.data.fan_tiff import TIFF, open_fan
from qnmixer.data.numpy_files import open_stack
from qnmixer.data.regrid import regrid_scan
from qnmixer.data.sinograms import SCANS, open_sinograms
from qnmixer.data.slices import SkipFile, require_size, usable
from qnmixer.errors import ConfigError, DataError, GeometryError
from qnmixer.measurement.scans import doubts_of_scan, noise_of
from qnmixer.physics import FanBeamGeometry, PhysicalNoise
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.scan import Scan, by_numbers, warn

_FIX = "give sinograms as .npy"


def holds_sinograms(path: Path, trained: FanBeamGeometry, config: ReconstructConfig) -> bool:
    """Whether an input of kind=auto is a scan: by the keys given, by .mat or .tif, or by the shape of a .npy.

    Raises DataError for a .npy that is neither a slice nor a sinogram of the run.
    """
    if path.suffix.lower() in (".mat", *TIFF) or config.detector_pitch is not None or config.angle_span is not None:
        return True
    views, bins = trained.n_views, trained.n_detectors
    for file in _scan_files(path):
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
        raise DataError(f"input={path} has no .npy file, .mat or .tif: give a .npy, [views, bins] or [N, views, bins]")
    return files


def _scan_files(path: Path) -> list[Path]:
    files = path.rglob("*") if path.is_dir() else [path]
    scans = (file for file in files if file.suffix.lower() in SCANS)
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
    with usable(file, _FIX):
        source = open_sinograms(file, geometry, _scanner_of_npy(file, geometry, config) if ending == ".npy" else None)
    angles, count = source.angles, source.n_scans
    data, attenuation_of_one = module.config.data, 1.0
    unit = config.unit or data.arguments.get("unit", "attenuation")
    if unit == "attenuation":  # of some sets x = 1 is fixed, whatever the attenuation of water is
        of_run = data.arguments.get("water_attenuation", PhysicalNoise.water_attenuation)
        water = source.water or config.water_attenuation or of_run
        attenuation_of_one = data.attenuation_of_one or attenuation_per_value(water, data.hu_max)
    if abs(turned := angles[0] - geometry.angles()[0]) > 1e-6:
        warn(f"{file} starts {np.degrees(turned):.4g}° from the run's first view, so the image is turned by that angle")
    is_body = "max_attenuation" not in module.config.data.arguments  # else a set of other objects; said once for a file
    for k in range(count):
        end = f"#{k}" if count > 1 else ""
        with usable(file, _FIX):
            sinogram = source.decode(k)
        try:
            regridded, missing = regrid_scan(sinogram, angles, source.scanner, geometry, f"{file}{end}")
            scan = Scan(
                name=f"{name}{end}", offset=offset, scale=scale, measured=True,
                sinogram=torch.from_numpy(regridded / np.float32(attenuation_of_one))[None, None].to(module.device),
                missing=torch.from_numpy(missing).to(module.device) if missing.any() else None,
            )  # fmt: skip
            doubts = doubts_of_scan(
                f"{file}{end}", module.projector, scan.sinogram, (offset, scale), f"unit={unit}",
                noise=noise_of(torch.from_numpy(sinogram)), missing=scan.missing, is_body=is_body,
                is_known=k > 0 or ending != ".npy",  # other files give their rays
            )  # fmt: skip
            for line in doubts:
                warn(line)
                is_body = is_body and "HU on average" not in line
        except DataError as error:
            if count == 1:
                raise
            warn(f"skipped: {error}")
            continue
        if missing.any():
            warn(f"{file}{end}: {missing.sum()} of {len(missing)} views are missing, and filled in from the others")
        yield scan


def _scanner_of_npy(file: Path, geometry: FanBeamGeometry, config: ReconstructConfig) -> FanBeamGeometry:
    """The rays of the sinograms in a .npy: those of the run, except for keys that were given.

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
        return replace(
            geometry, n_views=shape[1], n_detectors=shape[2], detector_pitch=pitch,
            detector_offset=geometry.detector_offset * geometry.detector_pitch / pitch,
            angle_span=math.copysign(config.angle_span or geometry.angle_span, geometry.angle_span),
        )  # fmt: skip
    except GeometryError as error:
        raise DataError(f"{file} cannot be used: {error}") from error
