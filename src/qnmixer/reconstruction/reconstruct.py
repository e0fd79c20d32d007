"""From slices or measured sinograms to reconstructions in HU, as DICOM, NumPy and PNG. Memory holds one batch at a
time."""

import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from pydicom.dataset import Dataset
from pydicom.uid import generate_uid
from rich.progress import Progress
from torch import Tensor

from qnmixer.data.formats import FORMATS
from qnmixer.errors import ConfigError, DataError, OutOfMemory, first_line
from qnmixer.installed import is_installed, not_installed
from qnmixer.measurement.faults import misfit
from qnmixer.models.fbp import FBP
from qnmixer.parallel.device_memory import is_out_of_memory
from qnmixer.parallel.devices import choose_device
from qnmixer.physics import MixedNoise, NoNoise, Symmetry, images_by_symmetry
from qnmixer.physics.units import FloatArray
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.cures import Cures
from qnmixer.reconstruction.input_slices import simulated_scans, slice_files
from qnmixer.reconstruction.reconstruct_config import OF_DATAMODULE, ReconstructConfig
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan, symmetries_of
from qnmixer.reconstruction.scan import Scan, warn
from qnmixer.reconstruction.sections import scan_for
from qnmixer.reconstruction.sinograms import holds_sinograms, measured_scans, sinogram_files
from qnmixer.reconstruction.uncertainty import load_calibration
from qnmixer.reconstruction.writers import window_of, write_dicom, write_npy, write_png
from qnmixer.runs.terminal import Console
from qnmixer.settings.plugins import module_of
from qnmixer.settings.rules import one_scale
from qnmixer.settings.run import targets_of

# Default batch sizes: on a CPU more slices do not fit into its cache; a GPU needs more to be busy.
_ON_CPU, _ON_GPU = 4, 16
_REFILLS = 2
_ABDOMEN = (-160.0, 240.0)  # HU, of the PNG of slices
_MAPPED = (0.0, 50.0)  # HU, of the PNG of a map
_ENDINGS = {"npy": ".npy", "png": ".png", "dicom": ".dcm"}
_FBP = "_fbp"  # the ending of the file names of FBP images
_SPREAD = "_spread"  # the ending of the file names of the deviation over the symmetries
_UNCERTAINTY = "_uncertainty"  # of the calibrated one
_TITLES = {_SPREAD: "Deviation over symmetries, HU", _UNCERTAINTY: "Half-width covering {:.0%} of errors, HU"}
_OF_A_NAME = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ)
"""Errors of one file name. The disk takes others."""


def reconstruct_input(config: ReconstructConfig) -> int:
    """Run `qnmixer.reconstruct`: reconstruct every slice or sinogram of the input. Returns their number.

    Raises CheckpointError, DataError (bad input), OutOfMemory, OSError (full disk; no half-written file stays). Raises
    DataError after the last slice if some could not be written.
    """
    console = Console()
    typed = map(module_of, targets_of(config).values())
    trained = load_run(config.run, config.checkpoint, [*config.trust, *typed])
    given = trained.config.changed(
        geometry=scan_for(config.geometry, trained.config.geometry), noise=config.noise or trained.config.noise
    )
    one_scale(given.data, given.noise)
    module = on_scan(trained, given, Cures(config.passes, config.start, config.mix)).eval()
    module = module.to(choose_device(config.accelerator))
    turns = symmetries_of(module.projector, config.symmetries)
    calibration = None if config.uncertainty is None else load_calibration(config.uncertainty, config.level)
    path, geometry, files = Path(config.input), module.projector.geometry, list[Path]()
    if config.input == OF_DATAMODULE:
        from qnmixer.reconstruction.own_data import scans_of_own  # it loads Lightning

        scans, total = scans_of_own(module, config)
    elif config.kind == "sinograms" or (config.kind == "auto" and holds_sinograms(path, geometry, config)):
        files = sinogram_files(path)
        scans, total = measured_scans(path, files, module, config), len(files)
    else:
        files = slice_files(path)
        scans, total = simulated_scans(path, files, module), len(files)
    batch_size = config.batch_size or (_ON_GPU if module.device.type == "cuda" else _ON_CPU)
    writer = _Writer(module, config, [file.relative_to(path) for file in files if file != path])
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reconstructing", total=total)
        for scan, x, spread in images_of(module, scans, batch_size, turns):
            if scan.measured and config.noise is not None:
                raise ConfigError(
                    f"noise={config.noise.name} has no effect on {scan.name}, which was measured: leave it out"
                )
            hu, maps = scan.hu(x), dict[str, FloatArray]()
            if spread is not None:
                maps[_SPREAD] = (scan.scale * spread)[0, 0].cpu().numpy()
                if calibration is not None:
                    maps[_UNCERTAINTY] = calibration.of(config.level, hu, maps[_SPREAD])
            written = writer.write(scan, hu, maps)
            if written and scan.measured:
                distance = misfit(module.projector, x, scan.sinogram, scan.missing)
                console.lines(f"{scan.name}: A x differs from the sinogram by {distance:.1%}")
            progress.advance(task)
    if not writer.count and not writer.failed:
        raise DataError(f"input={path} has nothing to reconstruct: see the warning above")
    if writer.count:
        console.lines(f"reconstructions: {writer.count:,}, as {', '.join(config.formats)}, in {config.output}")
        if not scan.measured:
            console.lines(_line_of_noise(module, as_trained=config.noise is None))
        if "dicom" in config.formats and max(writer.in_series.values()) > 1:
            line = f"slices without DICOM follow each other in steps of {config.slice_spacing:g} mm (slice_spacing=)"
            console.lines(line)
        if writer.measured:
            console.lines(f"FBP of the same scans beside them: NAME{_FBP}")
        if len(turns) > 1:
            line = f"deviation over {len(turns)} turns and flips of each scan, in HU: NAME{_SPREAD}"
            console.lines(f"{line}. It is a part of the error only")
            if calibration is not None:
                line = calibration.line(config.level, module, len(turns), measured=scan.measured)
                console.lines(f"NAME{_UNCERTAINTY}, in HU, {line}")
            if "dicom" in config.formats and not is_installed("maps"):
                console.lines(str(not_installed("highdicom", "maps", f"NAME{_SPREAD} in DICOM")))
    if writer.failed:
        raise DataError(writer.summary())
    return writer.count


def _line_of_noise(module: Reconstructor, as_trained: bool) -> str:
    """Which noise the simulated scans have."""
    line = f"scans simulated with noise={module.config.noise.name}"
    if as_trained and not isinstance(module.measurement.noise, NoNoise):
        line += ", as in training (noise=none: without)"
    if isinstance(module.measurement.noise, MixedNoise):
        line += ". Each has one of two noises: with noise=field or noise=physical all have the same quality"
    return line


def images_of(
    module: Reconstructor, scans: Iterator[Scan], batch_size: int, turns: Sequence[Symmetry] = ()
) -> Iterator[tuple[Scan, Tensor, Tensor | None]]:
    """Each scan with its x_T [1, 1, S, S], computed in batches. Where memory is short the batches become smaller.

    With several symmetries x_T is the mean over them. The third is its standard deviation over them; else None.

    Raises OutOfMemory if the memory is too small for a single scan.
    """
    waiting: list[Scan] = []
    while waiting := [*waiting, *islice(scans, max(0, batch_size - len(waiting)))]:
        part = waiting[:batch_size]
        try:
            images, spreads = _reconstructed(module, part, turns)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(part) == 1:
                size = module.config.data.image_size
                raise OutOfMemory(
                    f"out of memory with a single slice of {size} × {size} ({first_line(error)}): close other "
                    "programs, or use a machine with more memory (if the GPU is full: accelerator=cpu)"
                ) from error
            batch_size = len(part) // 2
            warn(f"out of memory with {len(part)} slices at once: continuing with batch_size={batch_size}")
            continue  # with the same scans
        waiting = waiting[len(part) :]
        yield from zip(part, images.split(1), [None] * len(part) if spreads is None else spreads.split(1), strict=True)


@torch.no_grad()
def _reconstructed(
    module: Reconstructor, scans: Sequence[Scan], turns: Sequence[Symmetry]
) -> tuple[Tensor, Tensor | None]:
    """x_T [B, 1, S, S], and its deviation over several symmetries, or None.

    Further passes replace missing views by A x_T: their interpolated values then matter less.
    """
    y = torch.cat([scan.sinogram for scan in scans])
    x = module(y)
    if gaps := [k for k, scan in enumerate(scans) if scan.missing is not None]:
        missing = torch.stack([s.missing for s in scans if s.missing is not None])[:, None, :, None]
        for _ in range(_REFILLS):
            y[gaps] = torch.where(missing, module.projector(x[gaps]), y[gaps])
            x[gaps] = module(y[gaps])
    if len(turns) < 2:
        return x, None
    images = torch.cat([x[None], images_by_symmetry(module, y, turns[1:])])  # the first is the identity
    return images.mean(0), images.std(0)


class _Writer:
    """Writes images to files, in the order of the input. `inputs`: all files, relative to the input folder."""

    def __init__(self, module: Reconstructor, config: ReconstructConfig, inputs: Sequence[Path]) -> None:
        self.module, self.config, self.count = module, config, 0
        self.measured = False  # whether an image of a measured scan was written
        self.failed: list[str] = []  # name of the scan, and why
        self._call_uid = generate_uid()
        self._written: set[Path] = set()
        self._files: list[Path] = []  # of the image that is being written
        self.in_series = Counter[str]()  # scans of each series without DICOM so far
        self._folders = {Path(config.output) / folder for file in inputs for folder in file.parents}

    def write(self, scan: Scan, hu: FloatArray, maps: Mapping[str, FloatArray] = MappingProxyType({})) -> bool:
        """Write an image, HU [S, S], in every format. Returns False for one that cannot be written; others can.

        Maps of the same pixels in HU go into files of their own, by the ending of their names.

        For a measured scan it also writes the FBP in the same window, because there is no truth to compare with.
        An image that fails leaves no file. Raises OSError for what is wrong with the disk, and not with a name.
        """
        self._files.clear()
        try:
            self._write_images(scan, hu, maps)
        except (DataError, OSError) as error:
            for path in self._files:
                path.unlink()
            if isinstance(error, OSError) and error.errno not in _OF_A_NAME:
                raise
            self.failed.append(f"{scan.name}: {error.strerror}" if isinstance(error, OSError) else str(error))
            return False
        self.count += 1
        return True

    def summary(self) -> str:
        """One line: how many images are missing, and why the first is."""
        return (
            f"{len(self.failed):,} of {self.count + len(self.failed):,} reconstructions are not written "
            f"({self.failed[0]}): rename or move such inputs, and reconstruct them alone"
        )

    def _write_images(self, scan: Scan, hu: FloatArray, maps: Mapping[str, FloatArray]) -> None:
        """Write the files of a scan. Raises DataError for an image with NaN or infinite values."""
        series, frame = _series_and_frame(scan.name)
        scan.place = self.in_series[series] if frame is None else frame
        self.in_series[series] += scan.template is None
        if not np.isfinite(hu).all():
            raise DataError(f"the reconstruction of {scan.name} has NaN or infinite values: evaluate the run first")
        target = self._new_target(scan)
        limits = self.config.window
        window = (limits[0], limits[1]) if limits else window_of(hu) if scan.measured else _ABDOMEN
        as_dicom = partial(self._write_dicom, scan=scan)
        image = self._write(target, hu, window, partial(as_dicom, hu=hu, method=self.module.network.title))
        if scan.measured:
            self.measured = True
            with torch.no_grad():
                fbp = scan.hu(self.module.projector.fbp(scan.sinogram))
            self._write(_with_end(target, _FBP), fbp, window, partial(as_dicom, hu=fbp, method=FBP.title))
        for end, values in maps.items():
            self._write_map(_with_end(target, end), scan, values, _TITLES[end].format(self.config.level), image)

    def _new_target(self, scan: Scan) -> Path:
        """A path without a file. If two inputs have one name, such as a.dcm and a.npy, the second gets a number.

        So does a file whose path with an ending is that of a folder: `a` beside `a.dcm/`.
        """
        target = name = Path(self.config.output) / _file_name(scan.name)
        numbers = count(self.count + 1)
        while True:
            ends = _SPREAD, _UNCERTAINTY, *([_FBP] if scan.measured else [])
            targets = {target, *(_with_end(target, end) for end in ends)}
            files = {_with_end(path, ending) for path in targets for ending in _ENDINGS.values()}
            if self._written.isdisjoint(targets) and self._folders.isdisjoint(files):
                break
            target = _with_end(name, f"_{next(numbers)}")
        self._written |= targets
        return target

    def _write(
        self, target: Path, values: FloatArray, window: tuple[float, float], as_dicom: Callable[[Path], Any] | None
    ) -> Dataset | None:
        """Write values [S, S] in every format, in DICOM by a function if there is one. Returns what this returns."""
        dataset = None
        for form in (form for form in _ENDINGS if form in self.config.formats):
            path = _with_end(target, _ENDINGS[form])
            if form == "npy":
                write_npy(path, values)
            elif form == "png":
                write_png(path, values, window=window)
            elif as_dicom is not None:
                dataset = as_dicom(path)
            else:
                continue
            self._files.append(path)
        return dataset

    def _write_map(self, target: Path, scan: Scan, values: FloatArray, title: str, image: Dataset | None) -> None:
        """Write a map in every format. In DICOM it is no CT image, but a parametric map of `image`."""
        as_dicom = None
        if image is not None and is_installed("maps"):
            from qnmixer.reconstruction.parametric_map import write_parametric_map  # of an extra

            series_uid = _series_uid(self._call_uid, scan, title)
            as_dicom = partial(write_parametric_map, values=values, image=image, series_uid=series_uid, label=title)
        self._write(target, values, _MAPPED, as_dicom)

    def _write_dicom(self, path: Path, scan: Scan, hu: FloatArray, method: str) -> Dataset:
        geometry = self.module.projector.geometry
        views = f"{geometry.n_views} {'measured' if scan.measured else 'simulated'} views"
        return write_dicom(
            path,
            hu,
            series_uid=_series_uid(self._call_uid, scan, method),
            description=f"{method}, {views}, not for diagnosis; {geometry.image_size} pixels",
            template=scan.template,
            frame=scan.frame,
            pixel_spacing=geometry.pixel_size,
            field_of_view=scan.field_of_view,
            place=scan.place,
            slice_spacing=self.config.slice_spacing,
        )


def _with_end(target: Path, end: str) -> Path:
    return target.with_name(f"{target.name}{end}")


def _series_uid(call_uid: str, scan: Scan, method: str) -> str:
    """One new series for each series of the input and each method. Inputs without one: of each stack or folder."""
    source = scan.template
    keys = [str((source and source.get(tag)) or "") for tag in ("PatientID", "StudyInstanceUID", "SeriesInstanceUID")]
    return generate_uid(entropy_srcs=[call_uid, method, *keys, "" if keys[-1] else _series_and_frame(scan.name)[0]])


def _series_and_frame(name: str) -> tuple[str, int | None]:
    """The stack of a slice and its number there, or its folder and None."""
    stack, _, frame = name.rpartition("#")
    return (stack, int(frame)) if stack and frame.isdecimal() else (str(Path(name).parent), None)


def _file_name(name: str) -> Path:
    """The relative path of a slice without its ending: a/b.dcm#3 becomes a/b_3."""
    file, frame = re.fullmatch(r"(?s)(.*?)(#\d+)?", name).groups()  # type: ignore[union-attr]  # it matches anything
    path = Path(file)
    path = path.with_suffix("") if any(path.suffix.lower() in form.endings for form in FORMATS) else path
    return path.with_name(f"{path.name}_{frame[1:]}") if frame else path
