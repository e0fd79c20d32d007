"""Slices or measured sinograms in, reconstructions in HU out: DICOM, NumPy, PNG; one at a time, however many."""

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
from qnmixer.data.scaling import build_scaling
from qnmixer.data.slices import FloatArray, SkipFile
from qnmixer.data.writers import write_dicom, write_npy, write_png
from qnmixer.errors import ConfigError, DataError
from qnmixer.training.build import attenuation_per_value, choose_device
from qnmixer.training.checkpoints import load_run
from qnmixer.training.module import STREAMS, ReconstructionModule

# Line integrals of the body's attenuation: more than this and nothing is left to count, less and the scan is off.
MAX_ATTENUATION, MIN_ATTENUATION = 14.0, -0.5


@dataclass
class Scan:
    """One sinogram to reconstruct, and how its image becomes HU = offset + scale · x."""

    y: Tensor  # [1, 1, V, D], the network's value × mm
    offset: float
    scale: float
    name: str
    template: FileDataset | None = None
    frame: int = 0


def reconstruct_input(config: ReconstructConfig) -> int:
    """`qnmixer.reconstruct`: every slice or sinogram of the input into the output folder; returns how many.

    Raises CheckpointError, DataError (bad input), OSError (full disk; no half-written file is left).
    """
    console = Console()
    module = load_run(Path(config.run), config.checkpoint).to(choose_device(config.accelerator)).eval()
    path, output = Path(config.input), Path(config.output)
    if not path.exists():
        raise DataError(f"input={path} does not exist: give a file or a folder")
    sinograms = config.kind == "sinograms" or (config.kind == "auto" and _holds_sinograms(path, module.config))
    n_files, scans = _sinograms(path, module, config) if sinograms else _slices(path, module)
    call_uid = generate_uid()
    count = 0
    written: set[Path] = set()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for scan in progress.track(scans, total=n_files, description="reconstructing"):
            with torch.no_grad():
                x = module.network(scan.y)[0, 0].cpu().numpy()
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
                    description=_description(module.config, "measured" if sinograms else "simulated"),
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

    def scans() -> Iterator[Scan]:
        for number, piece in enumerate(slices):
            x, offset, scale = scaling.to_unit(to_square(piece.hu, config.data.image_size))
            image = torch.from_numpy(x)[None, None].to(module.device)
            with torch.no_grad():
                y = module.noise(module.projector(image), [(config.seed, STREAMS["test"], number)])
            yield Scan(y, offset, scale, piece.name, piece.template, piece.frame)
        if warning := slices.warning():
            Console(stderr=True).print(f"warning: {warning}", soft_wrap=True)

    return len(slices.files), scans()


def _sinograms(path: Path, module: ReconstructionModule, config: ReconstructConfig) -> tuple[int, Iterator[Scan]]:
    """Measured scans [V, D] or stacks [N, V, D] from .npy files, turned into the network's units."""
    trained = module.config
    if trained.data.scaling != "attenuation":
        raise ConfigError(
            f"run={config.run} was trained with data.scaling={trained.data.scaling}, which leaves a measured sinogram "
            "without a scale: use a run with data.scaling=attenuation"
        )
    per_value = attenuation_per_value(trained, config.water_attenuation) if config.unit == "attenuation" else 1.0
    files = _npy_files(path)
    if not files:
        raise DataError(f"input={path} has no .npy file: give sinograms as .npy, [views, bins] or [N, views, bins]")

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
    stack = _read_stack(file, module.config)
    ys = torch.from_numpy(np.array(stack, np.float32) / np.float32(per_value))[:, None]
    for sinogram, y in zip(stack, ys, strict=True):
        _check_unit(file, sinogram, y[None].to(module.device), module, config)
    for k, y in enumerate(ys):
        name = f"{file.stem}#{k}" if len(stack) > 1 else file.stem
        yield Scan(y[None].to(module.device), -1000.0, module.config.data.hu_max + 1000.0, name)


def _holds_sinograms(path: Path, trained: Config) -> bool:
    """Whether an input of kind=auto is .npy of the shape that the run was trained for; DataError if it is nothing."""
    for file in _npy_files(path) if path.is_dir() or path.suffix == ".npy" else ():
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


def _npy_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.npy")) if path.is_dir() else [path]


def _scan_shape(trained: Config) -> tuple[int, int]:
    return trained.geometry.n_views, trained.geometry.n_detectors


def _read_stack(file: Path, trained: Config) -> np.ndarray:
    try:
        stack = open_stack(file)
    except SkipFile as reason:
        raise DataError(f"{file} cannot be used: {reason}; give sinograms as .npy") from reason
    if stack.shape[-2:] != _scan_shape(trained):
        views, bins = _scan_shape(trained)
        raise DataError(
            f"{file} has shape {list(stack.shape)}, but the run was trained on {views} views × {bins} detector bins: "
            f"give [{views}, {bins}] or [N, {views}, {bins}], or train with geometry.n_views and geometry.n_detectors"
        )
    if not np.isfinite(stack).all():
        raise DataError(f"{file} holds NaN or infinite values: mend the dead bins (interpolate them) first")
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


def _description(config: Config, views: str) -> str:
    """What stands before the semicolon becomes the name of the DICOM series."""
    return (
        f"QN-Mixer, {config.geometry.n_views} {views} views, not for diagnosis; "
        f"{config.data.image_size} pixels, trained with noise {config.noise.name}"
    )
