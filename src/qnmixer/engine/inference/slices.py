"""Slices to reconstruct, read one at a time from a file or a folder. Their sparse views are simulated."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from qnmixer.engine.data.cache import Grid, Reader, cut_line
from qnmixer.engine.data.dataset import build_scaling, scaled_like
from qnmixer.engine.data.deeplesion import DeepLesionReader
from qnmixer.engine.data.dicom import DicomReader
from qnmixer.engine.data.numpy_files import NumpyReader
from qnmixer.engine.data.slices import (
    NO_AIR,
    NO_SPACING,
    FloatArray,
    SkipFile,
    Slice,
    clean_hu,
    summarise_skipped,
)
from qnmixer.engine.inference.scan import Scan, warn
from qnmixer.engine.reconstructor import STREAMS, Reconstructor
from qnmixer.errors import DataError

_NOT_DICOM: dict[str, type[Reader]] = {".npy": NumpyReader, ".png": DeepLesionReader}


def read_slices(path: Path, files: Sequence[Path], *, true_size: bool = False) -> Iterator[Slice]:
    """The slices of files: DICOM with any number of frames, `.npy`, 16-bit PNG. One at a time is decoded.

    Unusable files and frames are left out, with a warning at the end. So is a .npy without air: it is in another unit.

    Args:
        path: the input, for names and warnings.
        files: from `input_files`.
        true_size: leave out slices without a pixel size.

    Raises:
        DataError: no file is usable.
    """
    skipped: list[tuple[str, str]] = []
    found = False
    root = path if path.is_dir() else path.parent
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            for piece in _NOT_DICOM.get(file.suffix.lower(), DicomReader)().read(root, name):
                try:
                    if true_size and piece.spacing is None:
                        raise SkipFile(NO_SPACING)
                    hu = clean_hu(piece.hu)
                    if file.suffix.lower() == ".npy" and hu.min() > NO_AIR:
                        raise SkipFile("no air, −1000 HU: give kind=sinograms if it is a scan")
                except SkipFile as reason:
                    skipped.append((piece.info.name, str(reason)))
                    continue
                found = True
                yield Slice(piece.info, hu, piece.spacing)
        except SkipFile as reason:
            skipped.append((name, str(reason)))
    summary = summarise_skipped(str(path), skipped)
    if not found:
        raise DataError(f"input has no usable slice ({summary}): give CT in DICOM, HU in .npy or 16-bit PNG")
    if skipped:
        warn(summary)


def simulated_scans(path: Path, files: Sequence[Path], module: Reconstructor) -> Iterator[Scan]:
    """The slices of an input as scans, with the views and the noise of the network's training."""
    data, measurement = module.config.data, module.measurement
    field_of_view = module.projector.geometry.field_of_view if data.at_true_size else None
    scaling, factor = build_scaling(data.scaling, data.hu_max), data.simulation_factor
    grid, fine_grid = Grid(data.image_size, field_of_view), Grid(factor * data.image_size, field_of_view)
    root = path if path.is_dir() else path.parent

    def tensor(image: FloatArray) -> torch.Tensor:
        return torch.from_numpy(image)[None, None].to(module.device)

    for number, piece in enumerate(read_slices(path, files, true_size=data.at_true_size)):
        x, offset, scale = scaling.to_unit(grid.place(piece.hu, piece.spacing))
        fine = scaled_like(fine_grid.place(piece.hu, piece.spacing), offset, scale) if factor > 1 else None
        y = measurement.project(tensor(x), None if fine is None else tensor(fine))
        file = root / piece.info.path
        yield Scan(
            name=piece.info.name,
            sinogram=measurement.noise(y, [(module.config.seed, STREAMS["test"], number)]),
            offset=offset, scale=scale, template=None if file.suffix.lower() in _NOT_DICOM else file,
            frame=piece.info.frame, field_of_view=field_of_view,
        )  # fmt: skip
    if field_of_view is not None and (cut := cut_line(str(path), grid.widest, field_of_view)):
        warn(cut)
