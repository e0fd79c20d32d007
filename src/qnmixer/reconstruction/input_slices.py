"""Slices to reconstruct, read one at a time from a file or a folder. Their sparse views are simulated."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from qnmixer.data.cache import list_files, to_grid
from qnmixer.data.dataset import scaling_of
from qnmixer.data.formats import FORMATS, open_file
from qnmixer.data.slices import (
    NO_SPACING,
    SkipFile,
    Slice,
    SliceInfo,
    UnitSigns,
    clean_hu,
    summarise_skipped,
    unit_signs,
    unit_warnings,
)
from qnmixer.errors import DataError
from qnmixer.measurement.measurement import STREAMS
from qnmixer.physics.units import FloatArray
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.scan import Scan, by_numbers, warn


def slice_files(path: Path) -> list[Path]:
    """The files that may hold slices: a file itself, or all files of a folder. Raises DataError if there is none."""
    return [path] if path.is_file() else [path / file for file in sorted(list_files(path, key="input"), key=by_numbers)]


def read_slices(path: Path, files: Sequence[Path], *, true_size: bool = False) -> Iterator[Slice]:
    """The slices of files, of any format and with any number of frames, padding set to air. One at a time is decoded.

    Unusable files and frames are left out, with a warning at the end; with `true_size` also DICOM without a pixel size.
    Another warning is for values in another unit. Raises DataError if no file is usable.
    """
    skipped: list[tuple[str, str]] = []
    names: list[str] = []
    signs: list[UnitSigns] = []
    groups: list[str] = []  # a file with several slices, or the slices of a folder
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        try:
            opened = open_file(file)
        except SkipFile as reason:
            skipped.append((name, str(reason)))
            continue
        for frame in range(opened.n_frames):
            info = SliceInfo(name, frame, opened.n_frames, "", "", 0)
            try:
                spacing = opened.spacing(frame)
                if true_size and opened.dataset is not None and spacing is None:
                    raise SkipFile(NO_SPACING)
                hu = clean_hu(opened.decode(frame))
            except SkipFile as reason:
                skipped.append((info.name, str(reason)))
                continue
            signs.append(unit_signs(hu, info))
            groups.append(name if opened.n_frames > 1 or file == path else file.parent.name)
            names.append(name)
            yield Slice(info, hu, spacing, template=opened.dataset)
    summary = summarise_skipped(str(path), skipped)
    if not signs:
        raise DataError(f"input has no usable slice ({summary}): give {' or '.join(form.wanted for form in FORMATS)}")
    if skipped:
        warn(summary)
    root = str(path if path.is_dir() else path.parent)
    for line in unit_warnings(root, groups, "files or folders", names, signs):
        warn(line)


def simulated_scans(path: Path, files: Sequence[Path], module: Reconstructor) -> Iterator[Scan]:
    """The slices of an input as scans, with the views and the noise of the network's training."""
    data, measurement = module.config.data, module.measurement
    field_of_view = module.projector.geometry.field_of_view if data.at_true_size else None
    factor = data.simulation_factor

    def tensor(image: FloatArray) -> torch.Tensor:
        return torch.from_numpy(image)[None, None].to(module.device)

    unsized = 0
    for number, piece in enumerate(read_slices(path, files, true_size=data.at_true_size)):
        unsized += field_of_view is not None and piece.spacing is None
        hu, finer = (to_grid(piece.hu, piece.spacing, f * data.image_size, field_of_view) for f in (1, factor))
        scaling = scaling_of(data, hu)
        fine = tensor(scaling.to_unit(finer)) if factor > 1 else None
        y = measurement.project(tensor(scaling.to_unit(hu)), fine)
        yield Scan(
            name=piece.info.name,
            sinogram=measurement.noise(y, [(module.config.seed, STREAMS["test"], number)]),
            offset=scaling.offset, scale=scaling.scale, template=piece.template, frame=piece.info.frame,
            field_of_view=field_of_view,
        )  # fmt: skip
    if unsized:
        warn(
            f"{unsized} slices are in files without a pixel size (.npy, PNG): each is taken to be {field_of_view:g} mm "
            "wide"
        )
