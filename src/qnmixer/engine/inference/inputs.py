"""The inputs of a reconstruction, read one by one: slices, from which sparse views are simulated, or measured
sinograms."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydicom.dataset import FileDataset
from rich.console import Console
from torch import Tensor

from qnmixer.engine.config import Config
from qnmixer.engine.config.commands import ReconstructConfig
from qnmixer.engine.data.numpy_files import open_stack, read_frame
from qnmixer.engine.data.resample import Grid
from qnmixer.engine.data.scaling import build_scaling, scaled_like
from qnmixer.engine.data.slices import FloatArray, SkipFile, require_size
from qnmixer.engine.inference.measured import ScanLayout, fit_scan, read_mat
from qnmixer.engine.inference.slices import InputSlices
from qnmixer.engine.reconstructor import STREAMS, Reconstructor
from qnmixer.errors import ConfigError, DataError
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.noise import attenuation_per_value

# Limits of line integrals of attenuation. Above the upper one no photon would be counted. Below the lower one the scan
# is wrong.
MAX_ATTENUATION, MIN_ATTENUATION = 14.0, -0.5
_SCANS = (".npy", ".mat")


@dataclass(kw_only=True)
class Scan:
    """The input of one image, in HU = offset + scale · x. Its arrays are on the CPU.

    `field_of_view`: mm that the image covers, if its template has true size; None: it covers the whole template.
    """

    name: str
    offset: float
    scale: float
    template: FileDataset | None = None
    frame: int = 0
    field_of_view: float | None = None


@dataclass(kw_only=True)
class SimulatedScan(Scan):
    """A slice, scaled for the network. Its sinogram will be simulated."""

    number: int  # keys its noise
    image: FloatArray  # [S, S]
    fine: FloatArray | None  # [f·S, f·S], to simulate from; with data.simulation_factor = f above 1


@dataclass(kw_only=True)
class MeasuredScan(Scan):
    """A measured sinogram, resampled to the network's rays and converted to its units."""

    sinogram: FloatArray  # [V, D], the network's value × mm
    missing: npt.NDArray[np.bool_]  # [V], views that it has by interpolation only


def sinograms_of(module: Reconstructor, scans: Sequence[Scan]) -> Tensor:
    """y [B, 1, V, D] on the module's device: measured, or simulated with noise keyed by the slice's number."""

    def tensor(arrays: list[FloatArray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays))[:, None].to(module.device)

    if measured := [scan.sinogram for scan in scans if isinstance(scan, MeasuredScan)]:
        return tensor(measured)
    simulated = [scan for scan in scans if isinstance(scan, SimulatedScan)]
    fine = [scan.fine for scan in simulated if scan.fine is not None]
    y = module.measurement.project(tensor([scan.image for scan in simulated]), tensor(fine) if fine else None)
    return module.measurement.noise(y, [(module.config.seed, STREAMS["test"], scan.number) for scan in simulated])


def simulated_scans(path: Path, module: Reconstructor) -> tuple[int, Iterator[Scan]]:
    """The number of files, and their slices as scans with the views and the noise of the network's training."""
    slices = InputSlices(path, true_size=module.config.data.at_true_size)
    config, scaling = module.config, build_scaling(module.config.data.scaling, module.config.data.hu_max)
    size, factor = config.data.image_size, config.data.simulation_factor
    field_of_view = module.projector.geometry.field_of_view if config.data.at_true_size else None
    grid, fine_grid = Grid(size, field_of_view), Grid(factor * size, field_of_view)

    def scans() -> Iterator[Scan]:
        unsized = 0
        for number, piece in enumerate(slices):
            unsized += field_of_view is not None and piece.spacing is None
            x, offset, scale = scaling.to_unit(grid.place(piece.hu, piece.spacing))
            fine = scaled_like(fine_grid.place(piece.hu, piece.spacing), offset, scale) if factor > 1 else None
            yield SimulatedScan(
                name=piece.name, offset=offset, scale=scale, template=piece.template, frame=piece.frame,
                number=number, image=x, fine=fine,
                field_of_view=field_of_view,
            )  # fmt: skip
        for line in slices.warnings():
            warn(line)
        if cut := None if field_of_view is None else grid.cut.line(str(path), field_of_view):
            warn(cut)
        if unsized:
            warn(
                f"{unsized} slices are in files without a pixel size (.npy, PNG): each is taken to be "
                f"{field_of_view:g} mm wide"
            )

    return len(slices.files), scans()


def measured_scans(path: Path, module: Reconstructor, config: ReconstructConfig) -> tuple[int, Iterator[Scan]]:
    """The number of files, and their sinograms [v, d], from .npy ([v, d] or [N, v, d]) or .mat."""
    trained = module.config
    if trained.data.scaling != "attenuation":
        raise ConfigError(
            f"run={config.run} was trained with data.scaling={trained.data.scaling}, which leaves a measured sinogram "
            "without a scale: use a run with data.scaling=attenuation"
        )
    per_value = _attenuation_of_one(trained, config) if config.unit == "attenuation" else 1.0
    files = _scan_files(path)
    if not files:
        raise DataError(
            f"input={path} has no .npy file and no .mat: give sinograms as .npy, [views, bins] or [N, views, bins]"
        )

    def scans() -> Iterator[Scan]:
        for file in files:
            try:
                name = file.relative_to(path) if path.is_dir() else Path(file.name)
                yield from _scans_of(file, name.with_suffix("").as_posix(), per_value, module, config)
            except DataError as error:
                if path.is_file():
                    raise
                warn(f"skipped: {error}")

    return len(files), scans()


def _attenuation_of_one(trained: Config, config: ReconstructConfig) -> float:
    """Attenuation in 1/mm that x = 1 means for a network. Some sets fix it, whatever that of water is."""
    its = trained.data.attenuation_of_one
    return attenuation_per_value(config.water_attenuation, trained.data.hu_max) if its is None else its


def _scans_of(
    file: Path, name: str, per_value: float, module: Reconstructor, config: ReconstructConfig
) -> Iterator[Scan]:
    """The sinograms of one file. If any of them is unusable, raises DataError before the first.

    So each sinogram is read twice: first all are checked, then they are used one by one. Only one is in memory at a
    time.
    """
    scans = _ScanFile(file, per_value, module, config)
    for k in range(scans.count):
        scans.check(k)
    if abs(turned := scans.layout.angles[0] - module.projector.geometry.first_angle) > 1e-6:
        warn(f"{file} starts {np.degrees(turned):.4g}° from the run's first view, so the image is turned by that angle")
    offset, scale = module.config.data.hu_scaling
    for k in range(scans.count):
        sinogram, missing = scans.fitted(k)
        yield MeasuredScan(
            name=f"{name}#{k}" if scans.count > 1 else name,
            offset=offset, scale=scale,
            sinogram=sinogram / np.float32(per_value), missing=missing,
        )  # fmt: skip


class _ScanFile:
    """The sinograms of one file, read one at a time. Raises DataError for an unusable file."""

    def __init__(self, file: Path, per_value: float, module: Reconstructor, config: ReconstructConfig) -> None:
        self.file, self.per_value, self.module, self.config = file, per_value, module, config
        geometry = module.projector.geometry
        self._sinogram: FloatArray | None = None
        if file.suffix == ".mat":
            self._sinogram, self.layout = read_mat(file)
            self.count = 1
        else:
            self.count, n_views = _scan_count(file, geometry, config)
            self.layout = _layout(n_views, geometry, config)

    def fitted(self, k: int) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
        """Sinogram k [V, D] on the network's rays, in its own unit, and which views are missing."""
        try:
            sinogram = read_frame(self.file, k) if self._sinogram is None else self._sinogram
        except SkipFile as reason:  # it was readable a moment ago
            raise DataError(f"{self.file} cannot be used: {reason}") from reason
        return fit_scan(sinogram, self.layout, self.module.projector.geometry, str(self.file))

    def check(self, k: int) -> None:
        """Raise DataError for a sinogram that is no −log of transmission in the given unit. Warn about gaps."""
        sinogram, missing = self.fitted(k)
        _check_unit(self.file, sinogram, self.per_value, self.module, self.config)
        if missing.any():
            warn(
                f"{self.file}: {missing.sum()} of {len(missing)} views are missing and filled in from their neighbours"
            )


def warn(line: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True, markup=False).print(f"warning: {line}", soft_wrap=True, highlight=False)


def holds_sinograms(path: Path, trained: Config, config: ReconstructConfig) -> bool:
    """Whether an input of kind=auto is a scan: by the keys given, by .mat, or by the shape of a .npy.

    Raises DataError for a .npy that is neither a slice nor a sinogram of the run.
    """
    if path.suffix == ".mat" or config.detector_pitch is not None or config.angle_span is not None:
        return True
    for file in _scan_files(path) if path.is_dir() or path.suffix == ".npy" else ():
        if file.suffix == ".mat":
            return True
        with suppress(SkipFile):
            stack = open_stack(file)
            if stack.shape[-2:] == _scan_shape(trained):
                return True
            if stack[0].min() > -500:  # no air: hardly a slice
                views, bins = _scan_shape(trained)
                raise DataError(
                    f"{file}, {list(stack.shape)}, is no slice (it has no air, −1000 HU) and no sinogram of this run "
                    f"([{views}, {bins}]): give kind=slices if it is a slice, or a sinogram of the run's geometry"
                )
            return False
    return False


def _scan_files(path: Path) -> list[Path]:
    files = path.rglob("*") if path.is_dir() else [path]
    return sorted(file for file in files if file.suffix in _SCANS and file.is_file())  # opening a pipe would not end


def _scan_shape(trained: Config) -> tuple[int, int]:
    return trained.geometry.n_views, trained.geometry.n_detectors


def _layout(n_views: int, geometry: FanBeamGeometry, config: ReconstructConfig) -> ScanLayout:
    """The layout of the rays in a .npy file: that of the run, except for keys that were given."""
    span = geometry.angle_span if config.angle_span is None else math.copysign(config.angle_span, geometry.angle_span)
    return ScanLayout(
        geometry.first_angle + np.arange(n_views, dtype=np.float64) * (span / n_views),
        config.detector_pitch or geometry.detector_pitch,
        geometry.source_to_axis,
        geometry.source_to_detector,
        geometry.beam,
        geometry.detector_offset * geometry.detector_pitch,
    )


def _scan_count(file: Path, geometry: FanBeamGeometry, config: ReconstructConfig) -> tuple[int, int]:
    """(N, v) of the sinograms [N, v, d] of a .npy.

    Sinograms of another shape than the run's are accepted only if the config gives the keys that describe them.
    """
    try:
        shape = open_stack(file).shape
        require_size(shape[1], shape[2], least=1)
    except SkipFile as reason:
        raise DataError(f"{file} cannot be used ({reason}): give sinograms as .npy") from reason
    views, bins = geometry.n_views, geometry.n_detectors
    other_views = shape[-2] != views and config.angle_span is None
    if other_views or (shape[-1] != bins and config.detector_pitch is None):
        raise DataError(
            f"{file} has shape {list(shape)}, but the run was trained on {views} views × {bins} detector bins: "
            f"give [{views}, {bins}] or [N, {views}, {bins}] (rows of NaN for missing views), or give its angle_span= "
            "and detector_pitch=, or train with geometry.n_views and geometry.n_detectors"
        )
    return shape[0], shape[1]


def _check_unit(
    file: Path, sinogram: FloatArray, per_value: float, module: Reconstructor, config: ReconstructConfig
) -> None:
    """Refuse counts, transmissions, and a wrong unit (value × mm instead of attenuation, or the reverse)."""
    low, high = float(sinogram.min()), float(sinogram.max())
    factor = 1.0 if config.unit == "attenuation" else _attenuation_of_one(module.config, config)
    if not MIN_ATTENUATION <= factor * low <= factor * high <= MAX_ATTENUATION:
        other = "value if it is the network's value × mm" if factor == 1.0 else "attenuation if it is that"
        raise DataError(
            f"{file} runs from {low:g} to {high:g} in unit={config.unit}, which is no −log of transmission: take "
            f"−log(counts / unattenuated counts) first, or set unit={other}"
        )
    y = torch.from_numpy(sinogram / np.float32(per_value))[None, None].to(module.device)
    densest = float(torch.quantile(module.projector.fbp(y), 0.99))
    if not 0.05 < densest < 3.0:
        offset, scale = module.config.data.hu_scaling
        hu = offset + scale * densest
        raise DataError(
            f"{file} would have its densest parts at {hu:.0f} HU, so it is not in unit={config.unit}: give −log of "
            "transmission (unit=attenuation), or the network's value × mm (unit=value)"
        )
