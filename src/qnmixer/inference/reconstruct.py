"""From slices or measured sinograms to reconstructions in HU, as DICOM, NumPy and PNG. Memory holds one batch at a
time."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import torch
from pydicom.uid import generate_uid
from rich.console import Console
from rich.progress import Progress

from qnmixer.checkpoints.reading import load_run
from qnmixer.config import Config
from qnmixer.config.commands import ReconstructConfig
from qnmixer.config.data import DataConfig
from qnmixer.data.slices import FloatArray
from qnmixer.errors import DataError
from qnmixer.inference.batches import BatchedNetwork
from qnmixer.inference.inputs import MeasuredScan, Scan, holds_sinograms, measured_scans, simulated_scans, warn
from qnmixer.inference.writers import window_of, write_dicom, write_npy, write_png
from qnmixer.models import FBP
from qnmixer.parallel.devices import choose_device
from qnmixer.reconstructor import Reconstructor

# Default batch sizes: on a CPU more slices do not fit into its cache; a GPU needs more to be busy.
_ON_CPU, _ON_GPU = 4, 16
_ABDOMEN = (-160.0, 240.0)
"""HU, of the PNG of slices."""
_FBP = "_fbp"
"""The ending of the file names of FBP images."""


def reconstruct_input(config: ReconstructConfig) -> int:
    """Run `qnmixer.reconstruct`: reconstruct every slice or sinogram of the input. Returns their number.

    Raises CheckpointError, DataError (bad input), OutOfMemory, OSError (full disk; no half-written file stays).
    """
    console = Console(markup=False)
    module = load_run(config.run, config.checkpoint, config.trust).to(choose_device(config.accelerator)).eval()
    path = Path(config.input)
    sinograms = config.kind == "sinograms" or (config.kind == "auto" and holds_sinograms(path, module.config, config))
    n_files, scans = measured_scans(path, module, config) if sinograms else simulated_scans(path, module)
    batch_size = config.batch_size or (_ON_GPU if module.device.type == "cuda" else _ON_CPU)
    network, writer = BatchedNetwork(module, batch_size, config.precision), _Writer(module, config)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reconstructing", total=n_files)
        for batch in _in_batches(scans, batch_size):
            writer.write(batch, network(batch))
            progress.advance(task, len(batch))
    if not writer.count:
        raise DataError(f"input={path} has nothing to reconstruct: see the warning above")
    if writer.n_constant:
        warn(
            f"{writer.n_constant} of {writer.count} reconstructions are constant: every pixel has the same HU. The "
            "network is dead, or these sinograms are empty: evaluate the run before you use it"
        )
    line = f"reconstructions: {writer.count:,}, as {', '.join(config.formats)}, in {config.output}"
    console.print(line, soft_wrap=True)
    if sinograms:
        console.print(f"FBP of the same scans beside them: NAME{_FBP}", soft_wrap=True)
    if sinograms and "png" in config.formats and config.window is None:
        console.print(
            "PNG: black is the 1st and white the 99th percentile of each reconstruction. "
            f"For a window in HU give window=[{_ABDOMEN[0]:g},{_ABDOMEN[1]:g}]",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    return writer.count


def _in_batches(scans: Iterator[Scan], size: int) -> Iterator[list[Scan]]:
    """Lists of `size` scans. Scans that were read before an error are yielded before it is raised."""
    error: Exception | None = None
    while error is None:
        batch: list[Scan] = []
        try:
            batch.extend(islice(scans, size))
        except Exception as its:
            error = its
        if batch:
            yield batch
        elif error is None:
            return
    raise error


class _Writer:
    """Writes images to files, in the order of the input."""

    def __init__(self, module: Reconstructor, config: ReconstructConfig) -> None:
        self.module, self.config, self.count = module, config, 0
        self._window = None if config.window is None else (config.window[0], config.window[1])
        self.n_constant = 0
        self._call_uid = generate_uid()
        self._written: set[Path] = set()

    def write(self, scans: Sequence[Scan], images: Sequence[FloatArray]) -> None:
        """Write images, HU [S, S], in every format. They are numbered from 1 if the source has no number.

        For a measured scan it also writes the FBP in the same window, because there is no truth to compare with.
        """
        for scan, hu in zip(scans, images, strict=True):
            self.count += 1
            self.n_constant += bool(hu.max() == hu.min())
            target = self._new_target(scan)
            measured = isinstance(scan, MeasuredScan)
            window = self._window or (window_of(hu) if measured else _ABDOMEN)
            self._write(target, scan, hu, self.module.network.title, window)
            if isinstance(scan, MeasuredScan):
                self._write(_beside(target), scan, fbp_of(self.module, scan), FBP.title, window)

    def _new_target(self, scan: Scan) -> Path:
        """A path without a file. If two inputs have one name, such as a.dcm and a.npy, the second gets a number."""
        name = Path(self.config.output) / _file_name(scan.name)
        for target in chain([name], (name.with_name(f"{name.name}_{n}") for n in count(self.count))):
            wanted = {target, _beside(target)} if isinstance(scan, MeasuredScan) else {target}
            if self._written.isdisjoint(wanted):
                break
        self._written |= wanted
        return target

    def _write(self, target: Path, scan: Scan, hu: FloatArray, method: str, window: tuple[float, float]) -> None:
        if "dicom" in self.config.formats:
            self._write_dicom(target, scan, hu, method)
        if "npy" in self.config.formats:
            write_npy(target.with_name(f"{target.name}.npy"), hu)
        if "png" in self.config.formats:
            write_png(target.with_name(f"{target.name}.png"), hu, window=window)

    def _write_dicom(self, target: Path, scan: Scan, hu: FloatArray, method: str) -> None:
        trained = self.module.config
        write_dicom(
            target.with_name(f"{target.name}.dcm"),
            hu,
            series_uid=_series_uid(self._call_uid, scan, method),
            description=_description(method, trained, "measured" if isinstance(scan, MeasuredScan) else "simulated"),
            template=scan.template,
            frame=scan.frame,
            pixel_spacing=trained.geometry.field_of_view / trained.data.image_size,
            field_of_view=scan.field_of_view,
            instance_number=None if scan.template else self.count,
        )


def _beside(target: Path) -> Path:
    """The path of the FBP of a measured scan."""
    return target.with_name(f"{target.name}{_FBP}")


@torch.no_grad()
def fbp_of(module: Reconstructor, scan: MeasuredScan) -> FloatArray:
    """Filtered back-projection of a scan, HU [S, S]."""
    image = module.projector.fbp(torch.from_numpy(scan.sinogram)[None, None].to(module.device))[0, 0].cpu().numpy()
    return (scan.offset + scan.scale * image).astype(np.float32)


def _series_uid(call_uid: str, scan: Scan, method: str) -> str:
    """One new series for each series of the input and each method. Inputs without a series: one for each folder."""
    source = scan.template
    keys = [str((source and source.get(tag)) or "") for tag in ("PatientID", "StudyInstanceUID", "SeriesInstanceUID")]
    return generate_uid(entropy_srcs=[call_uid, method, *keys, "" if keys[-1] else str(Path(scan.name).parent)])


def _file_name(name: str) -> Path:
    """The relative path of a slice without its ending: a/b.dcm#3 becomes a/b_3."""
    file, frame = re.fullmatch(r"(.*?)(#\d+)?", name).groups()  # type: ignore[union-attr]  # it matches anything
    path = Path(file)
    path = path.with_suffix("") if path.suffix.lower() in (".dcm", ".ima", ".npy", ".png") else path
    return path.with_name(f"{path.name}_{frame[1:]}") if frame else path


def _description(method: str, config: Config, views: str) -> str:
    """The description of an image. The text before the semicolon becomes the name of the DICOM series."""
    description = (
        f"{method}, {config.geometry.n_views} {views} views, not for diagnosis; {config.data.image_size} pixels"
    )
    if method == FBP.title or not config.model.has_weights:
        return description
    if config.data.measured:
        return f"{description}, trained on measured sinograms"
    if type(config.data) is DataConfig:  # a class of the user's own: only its run says whether they were measured
        return description
    noise = "without noise" if config.noise.name == "none" else f"with noise {config.noise.name}"
    return f"{description}, trained {noise}"
