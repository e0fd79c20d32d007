"""Slices or measured sinograms in, reconstructions in HU out: DICOM, NumPy, PNG; one at a time, however many."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydicom.dataset import FileDataset
from pydicom.uid import generate_uid
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from qnmixer.config import Config, ReconstructConfig
from qnmixer.data.numpy_files import open_stack
from qnmixer.data.reading import InputSlices
from qnmixer.data.resample import to_square
from qnmixer.data.scaling import build_scaling, scaled_like
from qnmixer.data.scans import ScanLayout, fit_scan, read_mat
from qnmixer.data.slices import FloatArray, SkipFile
from qnmixer.data.writers import write_dicom, write_npy, write_png
from qnmixer.errors import ConfigError, DataError
from qnmixer.physics import FanBeamGeometry
from qnmixer.training.build import attenuation_per_value, choose_device
from qnmixer.training.checkpoints import load_run
from qnmixer.training.module import STREAMS, ReconstructionModule

# Line integrals of the body's attenuation: more than this and nothing is left to count, less and the scan is off.
MAX_ATTENUATION, MIN_ATTENUATION = 14.0, -0.5
_SCANS = (".npy", ".mat")
_REFILLS = 2


@dataclass
class Scan:
    """One sinogram to reconstruct, and how its image becomes HU = offset + scale · x."""

    y: Tensor  # [1, 1, V, D], the network's value × mm
    offset: float
    scale: float
    name: str
    template: FileDataset | None = None
    frame: int = 0
    missing: Tensor | None = None  # [V], views that y has by interpolation only


def reconstruct_input(config: ReconstructConfig) -> int:
    """`qnmixer.reconstruct`: every slice or sinogram of the input into the output folder; returns how many.

    Raises CheckpointError, DataError (bad input), OSError (full disk; no half-written file is left).
    """
    console = Console()
    module = load_run(config.run, config.checkpoint).to(choose_device(config.accelerator)).eval()
    path, output = Path(config.input), Path(config.output)
    if not path.exists():
        raise DataError(f"input={path} does not exist: give a file or a folder")
    sinograms = config.kind == "sinograms" or (config.kind == "auto" and _holds_sinograms(path, module.config, config))
    n_files, scans = _sinograms(path, module, config) if sinograms else _slices(path, module)
    call_uid = generate_uid()
    count = 0
    written: set[Path] = set()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for scan in progress.track(scans, total=n_files, description="reconstructing"):
            with torch.no_grad():
                x = _reconstruct(module, scan)[0, 0].cpu().numpy()
            count += 1
            target = output / _file_name(scan.name)
            if target in written:  # as of a.dcm and a.npy
                target = target.with_name(f"{target.name}_{count}")
            written.add(target)
            hu = (scan.offset + scan.scale * x).astype(np.float32)
            if "dicom" in config.formats:
                write_dicom(
                    target.with_name(f"{target.name}.dcm"),
                    hu,
                    series_uid=_series_uid(call_uid, scan),
                    description=_description(module, "measured" if sinograms else "simulated"),
                    template=scan.template,
                    frame=scan.frame,
                    pixel_spacing=module.config.geometry.field_of_view / module.config.data.image_size,
                    instance_number=None if scan.template else count,
                )
            _write_arrays(target, hu, config)
    if not count:
        raise DataError(f"input={path} holds nothing that could be reconstructed: see the warning above")
    console.print(f"{count} reconstruction(s) as {', '.join(config.formats)} in {output}", soft_wrap=True)
    return count


def _reconstruct(module: ReconstructionModule, scan: Scan) -> Tensor:
    """x_T [1, 1, S, S]; views that are missing are taken from A x_T in further passes, so that they bind it less."""
    x = module.network(scan.y)
    if scan.missing is None:
        return x
    for _ in range(_REFILLS):
        x = module.network(torch.where(scan.missing[:, None], module.projector(x), scan.y))
    return x


def _write_arrays(target: Path, hu: FloatArray, config: ReconstructConfig) -> None:
    """The formats that hold nothing but the image."""
    if "npy" in config.formats:
        write_npy(target.with_name(f"{target.name}.npy"), hu)
    if "png" in config.formats:
        low, high = config.window
        write_png(target.with_name(f"{target.name}.png"), hu, centre=(low + high) / 2, width=high - low)


def _series_uid(call_uid: str, scan: Scan) -> str:
    """One new series for each series of the input; where it names none, for each folder."""
    source = scan.template
    keys = [str((source and source.get(tag)) or "") for tag in ("PatientID", "StudyInstanceUID", "SeriesInstanceUID")]
    return generate_uid(entropy_srcs=[call_uid, *keys, "" if keys[-1] else str(Path(scan.name).parent)])


def _slices(path: Path, module: ReconstructionModule) -> tuple[int, Iterator[Scan]]:
    """Scans simulated from slices, with the views and the noise that the network was trained for."""
    slices = InputSlices(path)
    config, scaling = module.config, build_scaling(module.config.data.scaling, module.config.data.hu_max)
    size, factor = config.data.image_size, config.data.simulation_factor

    def tensor(x: FloatArray) -> Tensor:
        return torch.from_numpy(x)[None, None].to(module.device)

    def scans() -> Iterator[Scan]:
        for number, piece in enumerate(slices):
            x, offset, scale = scaling.to_unit(to_square(piece.hu, size))
            fine = tensor(scaled_like(to_square(piece.hu, factor * size), offset, scale)) if factor > 1 else None
            with torch.no_grad():
                y = module.noise(module.project(tensor(x), fine), [(config.seed, STREAMS["test"], number)])
            yield Scan(y, offset, scale, piece.name, piece.template, piece.frame)
        if warning := slices.warning():
            Console(stderr=True).print(f"warning: {warning}", soft_wrap=True)

    return len(slices.files), scans()


def _sinograms(path: Path, module: ReconstructionModule, config: ReconstructConfig) -> tuple[int, Iterator[Scan]]:
    """Measured scans [v, d] or stacks [N, v, d] from .npy files, or .mat, brought to the network's rays and units."""
    trained = module.config
    if trained.data.scaling != "attenuation":
        raise ConfigError(
            f"run={config.run} was trained with data.scaling={trained.data.scaling}, which leaves a measured sinogram "
            "without a scale: use a run with data.scaling=attenuation"
        )
    per_value = attenuation_per_value(trained, config.water_attenuation) if config.unit == "attenuation" else 1.0
    files = _scan_files(path)
    if not files:
        raise DataError(
            f"input={path} has no .npy file and no .mat: give sinograms as .npy, [views, bins] or [N, views, bins]"
        )

    def scans() -> Iterator[Scan]:
        for file in files:
            try:
                yield from _scans_of(file, per_value, module, config)
            except DataError as error:
                if path.is_file():
                    raise
                Console(stderr=True).print(f"warning: skipped: {error}", soft_wrap=True)

    return len(files), scans()


def _scans_of(file: Path, per_value: float, module: ReconstructionModule, config: ReconstructConfig) -> Iterator[Scan]:
    """The sinograms of one file; DataError before the first where any of them is of no use."""
    stack, layout = _read_scans(file, module.projector.geometry, config)
    scans = []
    for k, sinogram in enumerate(stack):
        fitted, missing = fit_scan(np.array(sinogram, np.float32), layout, module.projector.geometry, str(file))
        y = torch.from_numpy(fitted / np.float32(per_value))[None, None].to(module.device)
        _check_unit(file, fitted, y, module, config)
        name = f"{file.stem}#{k}" if len(stack) > 1 else file.stem
        scans.append(Scan(y, -1000.0, module.config.data.hu_max + 1000.0, name))
        if missing.any():
            scans[-1].missing = torch.from_numpy(missing).to(module.device)
            _warn(f"{file}: {missing.sum()} of {len(missing)} views are missing and filled in from their neighbours")
    if abs(turned := layout.angles[0] - module.projector.geometry.first_angle) > 1e-6:
        _warn(f"{file}: its first view is at {np.degrees(turned):.4g}° from the run's, and the image turned by that")
    yield from scans


def _warn(line: str) -> None:
    Console(stderr=True).print(f"warning: {line}", soft_wrap=True, highlight=False, markup=False)


def _holds_sinograms(path: Path, trained: Config, config: ReconstructConfig) -> bool:
    """Whether an input of kind=auto is a scan: as is told, as .mat, or as .npy of the shape of the run's sinograms.

    DataError if it is nothing.
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
                    f"{file}, {list(stack.shape)}, has no air (−1000 HU), and sinograms of this run are "
                    f"[{views}, {bins}]: say kind=slices if it is a slice in HU; a sinogram must come from the "
                    "geometry of the run"
                )
            return False
    return False


def _scan_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.suffix in _SCANS) if path.is_dir() else [path]


def _scan_shape(trained: Config) -> tuple[int, int]:
    return trained.geometry.n_views, trained.geometry.n_detectors


def _read_scans(file: Path, geometry: FanBeamGeometry, config: ReconstructConfig) -> tuple[np.ndarray, ScanLayout]:
    """Sinograms [N, v, d] of a file, and where their rays ran: as .mat tells, or as the run's but for what is given."""
    if file.suffix == ".mat":
        sinogram, layout = read_mat(file)
        return sinogram[None], layout
    stack = _read_stack(file, geometry, config)
    n_views = stack.shape[-2]
    span = geometry.angle_span if config.angle_span is None else math.copysign(config.angle_span, geometry.angle_span)
    layout = ScanLayout(
        geometry.first_angle + span / n_views * np.arange(n_views),
        config.detector_pitch or geometry.detector_pitch,
        geometry.source_to_axis,
        geometry.source_to_detector,
    )
    return stack, layout


def _read_stack(file: Path, geometry: FanBeamGeometry, config: ReconstructConfig) -> np.ndarray:
    """Sinograms [N, v, d] of a .npy; of another shape than the run's only as far as the config tells what they are."""
    try:
        stack = open_stack(file)
    except SkipFile as reason:
        raise DataError(f"{file} cannot be used: {reason}; give sinograms as .npy") from reason
    views, bins = geometry.n_views, geometry.n_detectors
    other_views = stack.shape[-2] != views and config.angle_span is None
    if other_views or (stack.shape[-1] != bins and config.detector_pitch is None):
        raise DataError(
            f"{file} has shape {list(stack.shape)}, but the run was trained on {views} views × {bins} detector bins: "
            f"give [{views}, {bins}] or [N, {views}, {bins}], with rows of NaN for missing views, say what it is with "
            "angle_span= and detector_pitch=, or train with geometry.n_views and geometry.n_detectors"
        )
    return stack


def _check_unit(
    file: Path, sinogram: np.ndarray, y: Tensor, module: ReconstructionModule, config: ReconstructConfig
) -> None:
    """Refuse counts, transmissions, and value × mm taken for attenuation or the other way round."""
    low, high = float(sinogram.min()), float(sinogram.max())
    if config.unit == "attenuation" and not MIN_ATTENUATION <= low <= high <= MAX_ATTENUATION:
        raise DataError(
            f"{file} runs from {low:g} to {high:g}, which is no −log of transmission: take −log(counts / unattenuated "
            "counts) first, or set unit=value if it is the network's value × mm"
        )
    densest = float(torch.quantile(module.projector.fbp(y), 0.99))
    if not 0.05 < densest < 3.0:
        hu = densest * (module.config.data.hu_max + 1000) - 1000
        raise DataError(
            f"{file}: its densest parts would be at {hu:.0f} HU, so it is not in unit={config.unit}: give −log of "
            "transmission (unit=attenuation), or the network's value × mm (unit=value)"
        )


def _file_name(name: str) -> Path:
    """A relative path without ending, from the name of a slice: a/b.dcm#3 becomes a/b_3."""
    file, frame = re.fullmatch(r"(.*?)(#\d+)?", name).groups()  # type: ignore[union-attr]  # it matches anything
    path = Path(file)
    path = path.with_suffix("") if path.suffix.lower() in (".dcm", ".ima", ".npy", ".png") else path
    return path.with_name(f"{path.name}_{frame[1:]}") if frame else path


def _description(module: ReconstructionModule, views: str) -> str:
    """What stands before the semicolon becomes the name of the DICOM series."""
    config = module.config
    return (
        f"{module.network.title}, {config.geometry.n_views} {views} views, not for diagnosis; "
        f"{config.data.image_size} pixels, trained with noise {config.noise.name}"
    )
