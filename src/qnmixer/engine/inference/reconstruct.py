"""From slices or measured sinograms to reconstructions in HU, as DICOM, NumPy and PNG. Memory holds one batch at a
time."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from pydicom.dataset import Dataset
from pydicom.uid import generate_uid
from rich.progress import track
from torch import Tensor

from qnmixer.engine.checkpoints import load_run
from qnmixer.engine.config.commands import ReconstructConfig
from qnmixer.engine.data.dicom import open_ct
from qnmixer.engine.data.slices import FloatArray, usable
from qnmixer.engine.inference.scan import Scan, input_files
from qnmixer.engine.inference.sinograms import measured_scans, sinogram_files
from qnmixer.engine.inference.slices import simulated_scans
from qnmixer.engine.inference.writers import window_of, write_dicom, write_npy, write_png
from qnmixer.engine.memory.usage import is_out_of_memory
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.reconstructor import Reconstructor
from qnmixer.engine.reports.terminal import Console
from qnmixer.errors import DataError, OutOfMemory, first_line
from qnmixer.models.fbp import FBP

# Default batch sizes: on a CPU more slices do not fit into its cache; a GPU needs more to be busy.
_ON_CPU, _ON_GPU = 4, 16
_ABDOMEN = (-160.0, 240.0)
"""HU, of the PNG of slices."""
_FAR = 0.1
"""Of ‖A x − y‖ / ‖y‖ of a scan. Measured at 256 × 256, 64 views: right scans 1.5 % at most, but 20 % if 1000 photons a
ray were counted; mirrored ones 6 to 15 %, 235° as a turn 11 to 22 %."""
_FBP = "_fbp"
"""The ending of the file names of FBP images."""


def reconstruct_input(config: ReconstructConfig) -> int:
    """Run `qnmixer.reconstruct`: reconstruct every slice or sinogram of the input. Returns their number.

    Raises CheckpointError, DataError (bad input), OutOfMemory, OSError (full disk; no half-written file stays).
    """
    console = Console()
    module = load_run(config.run, config.checkpoint, config.trust).to(choose_device(config.accelerator)).eval()
    path = Path(config.input)
    sinograms = config.kind == "sinograms" or bool(config.detector_pitch or config.angle_span)
    files = sinogram_files(path) if sinograms else input_files(path)
    scans = measured_scans(path, files, module, config) if sinograms else simulated_scans(path, files, module)
    batch_size = config.batch_size or (_ON_GPU if module.device.type == "cuda" else _ON_CPU)
    writer = _Writer(module, config)
    images = images_of(module, scans, batch_size)
    hidden = not console.is_terminal
    for scan, x in track(images, "reconstructing", len(files), console=console, transient=True, disable=hidden):
        writer.write(scan, scan.hu(x))
        if scan.measured:
            far = float((module.projector(x) - scan.sinogram).norm() / scan.sinogram.norm())
            doubt = ": much noise, or other views or bins than those of the run" if far > _FAR else ""
            console.print(f"{scan.name}: A x differs from the sinogram by {far:.1%}{doubt}", soft_wrap=True)
    if not writer.count:
        raise DataError(f"input={path} has nothing to reconstruct: see the warning above")
    line = f"reconstructions: {writer.count:,}, as {', '.join(config.formats)}, in {config.output}"
    console.print(line, soft_wrap=True)
    if sinograms:
        console.print(f"FBP of the same scans beside them: NAME{_FBP}", soft_wrap=True)
    return writer.count


@torch.no_grad()
def images_of(module: Reconstructor, scans: Iterator[Scan], batch_size: int) -> Iterator[tuple[Scan, Tensor]]:
    """Each scan with its x_T [1, 1, S, S], computed in batches. Raises OutOfMemory if a batch is too large."""
    while part := list(islice(scans, batch_size)):
        try:
            images = module(torch.cat([scan.sinogram for scan in part]))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory with {len(part)} slices at once ({first_line(error)}): give a smaller batch_size=, or "
                "accelerator=cpu if the GPU is full"
            ) from error
        yield from zip(part, images.split(1), strict=True)


class _Writer:
    """Writes images to files, and counts them."""

    def __init__(self, module: Reconstructor, config: ReconstructConfig) -> None:
        self.module, self.config, self.count = module, config, 0
        self._call_uid = generate_uid()

    def write(self, scan: Scan, hu: FloatArray) -> None:
        """Write an image, HU [S, S], in every format.

        For a measured scan it also writes the FBP in the same window, because there is no truth to compare with.
        Raises DataError for an image with NaN or infinite values, and if a file is there already.
        """
        if not np.isfinite(hu).all():
            raise DataError(f"the reconstruction of {scan.name} has NaN or infinite values: evaluate the run first")
        self.count += 1
        target = Path(self.config.output) / _file_name(scan.name)
        chosen = self.config.window
        window = (chosen[0], chosen[1]) if chosen else window_of(hu) if scan.measured else _ABDOMEN
        self._write(target, scan, hu, self.module.network.title, window)
        if scan.measured:
            with torch.no_grad():
                fbp = scan.hu(self.module.projector.fbp(scan.sinogram))
            self._write(_with_end(target, _FBP), scan, fbp, FBP.title, window)

    def _write(self, target: Path, scan: Scan, hu: FloatArray, method: str, window: tuple[float, float]) -> None:
        if "npy" in self.config.formats:
            write_npy(_with_end(target, ".npy"), hu)
        if "png" in self.config.formats:
            write_png(_with_end(target, ".png"), hu, window=window)
        if "dicom" in self.config.formats:
            geometry, template = self.module.projector.geometry, None
            if scan.template is not None:
                with usable(scan.template, "leave the input as it is until the end"):
                    template = open_ct(scan.template)
            views = f"{geometry.n_views} {'measured' if scan.measured else 'simulated'} views"
            write_dicom(
                _with_end(target, ".dcm"),
                hu,
                series_uid=_series_uid([self._call_uid, method], template, scan.name),
                description=f"{method}, {views}, not for diagnosis; {geometry.image_size} pixels",
                template=template,
                frame=scan.frame,
                pixel_spacing=geometry.pixel_size,
                field_of_view=scan.field_of_view,
                instance_number=None if template else self.count,
            )


def _with_end(target: Path, end: str) -> Path:
    return target.with_name(f"{target.name}{end}")


def _series_uid(call: list[str], source: Dataset | None, name: str) -> str:
    """One new series for each series of the input in a call. Inputs without a series: one for each folder."""
    keys = [str((source and source.get(tag)) or "") for tag in ("PatientID", "StudyInstanceUID", "SeriesInstanceUID")]
    return generate_uid(entropy_srcs=[*call, *keys, "" if keys[-1] else str(Path(name).parent)])


def _file_name(name: str) -> Path:
    """The relative path of a slice without its ending: a/b.dcm#3 becomes a/b_3."""
    file, frame = re.fullmatch(r"(?s)(.*?)(#\d+)?", name).groups()  # type: ignore[union-attr]  # it matches anything
    path = Path(file)
    path = path.with_suffix("") if path.suffix.lower() in (".dcm", ".ima", ".npy", ".png") else path
    return path.with_name(f"{path.name}_{frame[1:]}") if frame else path
