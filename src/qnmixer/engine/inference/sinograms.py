"""Measured sinograms, read one at a time from .npy, in the units and rays that a network knows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import avg_pool2d

from qnmixer.engine.config.commands import ReconstructConfig
from qnmixer.engine.data.numpy_files import open_stack, read_frame
from qnmixer.engine.data.slices import require_size, usable
from qnmixer.engine.inference.fit import fit_scan
from qnmixer.engine.inference.scan import Scan, input_files, warn
from qnmixer.engine.reconstructor import Reconstructor
from qnmixer.errors import ConfigError, DataError, GeometryError
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.noise import attenuation_per_value

_FIX = "give sinograms as .npy"

_DENSITIES = 0.03, 1.2
"""Mean x of an object's FBP. Measured with CT slices: 0.15 to 0.6, in a limited angle from 0.08 on; in the wrong unit
below 0.025 or above 1.4, of transmissions negative, of counts thousands."""


def sinogram_files(path: Path) -> list[Path]:
    """The files of an input that may hold sinograms. Raises DataError if there is none."""
    if files := [file for file in input_files(path) if file.suffix == ".npy"]:
        return files
    raise DataError(f"input={path} has no .npy file: give sinograms as .npy, [views, bins] or [N, views, bins]")


def measured_scans(
    path: Path, files: Sequence[Path], module: Reconstructor, config: ReconstructConfig
) -> Iterator[Scan]:
    """The sinograms of an input: .npy, [v, d] or [N, v, d].

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
    """The sinograms of one file, of which one is in memory at a time. Raises DataError for the first unusable one."""
    geometry, data = module.projector.geometry, module.config.data
    offset, scale = data.hu_scaling
    count, scanner = _scanner_of(file, geometry, config)
    of_one = 1.0
    if config.unit == "attenuation":  # of some sets x = 1 is fixed, whatever the attenuation of water is
        of_one = data.attenuation_of_one or attenuation_per_value(config.water_attenuation, data.hu_max)
    for k in range(count):
        end = f"#{k}" if count > 1 else ""
        with usable(file, _FIX):
            sinogram = read_frame(file, k)
        fitted = fit_scan(sinogram, scanner, geometry, f"{file}{end}")
        y = torch.from_numpy(fitted / np.float32(of_one))[None, None].to(module.device)
        scan = Scan(name=f"{name}{end}", sinogram=y, offset=offset, scale=scale, measured=True)
        _check_unit(f"{file}{end}", scan, module)
        yield scan


def _scanner_of(file: Path, geometry: FanBeamGeometry, config: ReconstructConfig) -> tuple[int, FanBeamGeometry]:
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
            f"give [{views}, {bins}] or [N, {views}, {bins}], or give its angle_span= and detector_pitch=, or train "
            "with geometry.n_views and geometry.n_detectors"
        )
    pitch = config.detector_pitch or geometry.detector_pitch
    try:
        return shape[0], replace(
            geometry, n_views=shape[1], n_detectors=shape[2], detector_pitch=pitch,
            detector_offset=geometry.detector_offset * geometry.detector_pitch / pitch,
            angle_span=math.copysign(config.angle_span or geometry.angle_span, geometry.angle_span),
            view_angles=None if config.angle_span else geometry.view_angles,
        )  # fmt: skip
    except GeometryError as error:
        raise DataError(f"{file} cannot be used: {error}") from error


def _check_unit(where: str, scan: Scan, module: Reconstructor) -> None:
    """Raise DataError for counts, transmissions and a wrong unit: their image has a density that no object has."""
    x = module.projector.fbp(scan.sinogram)
    blocks = avg_pool2d(x, max(1, x.shape[-1] // 64))  # less noise
    density = float(blocks.square().sum() / blocks.sum())
    if not _DENSITIES[0] < density < _DENSITIES[1]:
        raise DataError(
            f"{where} would be an object of {scan.offset + scan.scale * density:.0f} HU on average. It is no −log of "
            "transmission, or not in its unit (unit=attenuation is −log(counts / unattenuated counts), unit=value the "
            "network's value × mm), or detector_pitch= is not that of its bins"
        )
