"""Slices or measured sinograms in, reconstructions in HU out: DICOM, NumPy, PNG; a batch at a time, however many."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from pydicom.uid import generate_uid
from rich.console import Console
from rich.progress import Progress

from qnmixer.checkpoints.reading import load_run
from qnmixer.config import ReconstructConfig
from qnmixer.data.slices import FloatArray
from qnmixer.errors import DataError
from qnmixer.inference.batches import BatchedNetwork
from qnmixer.inference.inputs import MeasuredScan, Scan, holds_sinograms, measured_scans, simulated_scans, warn
from qnmixer.inference.writers import write_dicom, write_npy, write_png
from qnmixer.parallel.devices import choose_device
from qnmixer.reconstructor import Reconstructor

# Slices at once where nobody says: on a CPU more of them leave the cache, a GPU wants to be filled.
_ON_CPU, _ON_GPU = 4, 16


def reconstruct_input(config: ReconstructConfig) -> int:
    """`qnmixer.reconstruct`: every slice or sinogram of the input into the output folder; returns how many.

    Raises CheckpointError, DataError (bad input), OutOfMemory, OSError (full disk; no half-written file is left).
    """
    console = Console()
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
        raise DataError(f"input={path} holds nothing that could be reconstructed: see the warning above")
    if writer.n_constant:
        warn(
            f"{writer.n_constant} of {writer.count} reconstructions are constant, the same HU in every pixel: the "
            "network is dead, or these sinograms are empty; evaluate the run before you use it"
        )
    console.print(f"{writer.count} reconstruction(s) as {', '.join(config.formats)} in {config.output}", soft_wrap=True)
    return writer.count


def _in_batches(scans: Iterator[Scan], size: int) -> Iterator[list[Scan]]:
    """Lists of `size`; what was read before an error is handed on before it is raised."""
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
    """Images to files, in the order of the input."""

    def __init__(self, module: Reconstructor, config: ReconstructConfig) -> None:
        self.module, self.config, self.count = module, config, 0
        self.n_constant = 0
        self._call_uid = generate_uid()
        self._written: set[Path] = set()

    def write(self, scans: Sequence[Scan], images: Sequence[FloatArray]) -> None:
        """Every format of every image, HU [S, S]; they are numbered from 1 where the source has no number."""
        for scan, hu in zip(scans, images, strict=True):
            self.count += 1
            self.n_constant += bool(hu.max() == hu.min())
            target = Path(self.config.output) / _file_name(scan.name)
            if target in self._written:  # as of a.dcm and a.npy
                target = target.with_name(f"{target.name}_{self.count}")
            self._written.add(target)
            if "dicom" in self.config.formats:
                self._write_dicom(target, scan, hu)
            if "npy" in self.config.formats:
                write_npy(target.with_name(f"{target.name}.npy"), hu)
            if "png" in self.config.formats:
                low, high = self.config.window
                write_png(target.with_name(f"{target.name}.png"), hu, centre=(low + high) / 2, width=high - low)

    def _write_dicom(self, target: Path, scan: Scan, hu: FloatArray) -> None:
        trained = self.module.config
        write_dicom(
            target.with_name(f"{target.name}.dcm"),
            hu,
            series_uid=_series_uid(self._call_uid, scan),
            description=_description(self.module, "measured" if isinstance(scan, MeasuredScan) else "simulated"),
            template=scan.template,
            frame=scan.frame,
            pixel_spacing=trained.geometry.field_of_view / trained.data.image_size,
            instance_number=None if scan.template else self.count,
        )


def _series_uid(call_uid: str, scan: Scan) -> str:
    """One new series for each series of the input; where it names none, for each folder."""
    source = scan.template
    keys = [str((source and source.get(tag)) or "") for tag in ("PatientID", "StudyInstanceUID", "SeriesInstanceUID")]
    return generate_uid(entropy_srcs=[call_uid, *keys, "" if keys[-1] else str(Path(scan.name).parent)])


def _file_name(name: str) -> Path:
    """A relative path without ending, from the name of a slice: a/b.dcm#3 becomes a/b_3."""
    file, frame = re.fullmatch(r"(.*?)(#\d+)?", name).groups()  # type: ignore[union-attr]  # it matches anything
    path = Path(file)
    path = path.with_suffix("") if path.suffix.lower() in (".dcm", ".ima", ".npy", ".png") else path
    return path.with_name(f"{path.name}_{frame[1:]}") if frame else path


def _description(module: Reconstructor, views: str) -> str:
    """What stands before the semicolon becomes the name of the DICOM series."""
    config = module.config
    return (
        f"{module.network.title}, {config.geometry.n_views} {views} views, not for diagnosis; "
        f"{config.data.image_size} pixels, trained with noise {config.noise.name}"
    )
